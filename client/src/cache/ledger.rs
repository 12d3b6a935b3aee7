//! What may be stored, and what must not: pure.
//!
//! A node never shows a state of a table that is older than one it has shown, also when the newer one was evicted in between,
//! and also when the answer comes from a peer that lags. Two rules do that, without anything being kept of tables that are
//! neither cached nor being loaded:
//!
//! - Nothing that this node has shown, been told or written is of a later revision than `seen`. A load takes `seen` along
//!   when it begins, and an answer from an earlier revision is refused. Linearizable reads never are.
//! - While a table is being loaded, what becomes known of it is noted with its load: the revision of a change that was told,
//!   or that somebody said it may be different without knowing since when. An answer from before that is refused.
//!
//! What is refused is asked for again. An answer that is not refused may be stored, and may be given.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lake_proto::kv::Revision;

use super::load::Flight;
use crate::catalog::TableIdent;

/// The knowledge of revisions, under one lock with every change of the entries.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Changed under the lock only.
    seen: Arc<AtomicU64>,
    /// Counts what [`Ledger::bar`] did.
    bars: u64,
    /// The tables that are being loaded.
    loading: HashMap<TableIdent, Loading>,
    /// Loads that bring several tables as of one moment, by these, in order: whom to wait for rather than ask again.
    together: HashMap<Arc<[TableIdent]>, Flight>,
}

#[derive(Debug, Default)]
struct Loading {
    loads: u32,
    /// An answer from an earlier revision is not the table's state any more.
    floor: Revision,
    /// An answer to a question that was asked before this bar is not either.
    barred: u64,
    /// Whom to wait for rather than ask again, and which of its answers is this table's.
    shared: Option<(Flight, usize)>,
    /// The same for who wants a revision that only its callers know of. It may never come: nobody else waits for it.
    ahead: Option<(Flight, usize)>,
}

impl Loading {
    /// Nobody waits for this load any more who has not begun to; `None`: for none.
    fn unshare(&mut self, flight: Option<&Flight>) {
        for shared in [&mut self.shared, &mut self.ahead] {
            shared.take_if(|(shared, _)| flight.is_none_or(|flight| shared.is(flight)));
        }
    }
}

/// What was known when a question was asked.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// The answer must not be from an earlier revision.
    pub seen: Revision,
    bars: u64,
}

/// Why an answer may not be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// It is from an earlier revision than was known when the question was asked.
    Behind,
    /// What it says of one of the tables was overtaken while it was on its way.
    Overtaken,
}

impl Ledger {
    pub fn seen(&self) -> Revision {
        self.seen.load(Ordering::Acquire)
    }

    /// For those who look without the lock.
    pub fn seen_by_all(&self) -> Arc<AtomicU64> {
        self.seen.clone()
    }

    /// Something of this revision was seen.
    pub fn see(&mut self, revision: Revision) {
        self.seen.fetch_max(revision, Ordering::AcqRel);
    }

    /// A question is asked now.
    pub fn ask(&self) -> Asked {
        Asked { seen: self.seen(), bars: self.bars }
    }

    /// A load of the tables begins, for which others may wait; each needs an [`Ledger::end`].
    pub fn begin(&mut self, tables: &[TableIdent], flight: &Flight) {
        let ahead = flight.min_revision > self.seen();
        for (at, table) in tables.iter().enumerate() {
            let loading = self.loading.entry(table.clone()).or_default();
            loading.loads += 1;
            let shared = if ahead { &mut loading.ahead } else { &mut loading.shared };
            *shared = Some((flight.clone(), at));
        }
    }

    /// The load that has begun brings just these tables, which are in order, as of one moment.
    pub fn begin_together(&mut self, tables: Arc<[TableIdent]>, flight: &Flight) {
        self.together.insert(tables, flight.clone());
    }

    /// The load has brought what it was to bring: whoever comes from now on may know of later changes than it does.
    pub fn landed(&mut self, tables: &[TableIdent], flight: &Flight) {
        for table in tables {
            if let Some(loading) = self.loading.get_mut(table) {
                loading.unshare(Some(flight));
            }
        }
        if self.together.get(tables).is_some_and(|shared| shared.is(flight)) {
            self.together.remove(tables);
        }
    }

    pub fn end(&mut self, tables: &[TableIdent], flight: &Flight) {
        self.landed(tables, flight);
        for table in tables {
            let Some(loading) = self.loading.get_mut(table) else { continue };
            loading.loads -= 1;
            if loading.loads == 0 {
                self.loading.remove(table);
            }
        }
    }

    /// The load of this table to wait for if a state of `min_revision` is wanted, and which of its answers is the table's.
    pub fn shared(&self, table: &TableIdent, min_revision: Revision) -> Option<(Flight, usize)> {
        let loading = self.loading.get(table)?;
        match min_revision > self.seen() {
            false => loading.shared.clone(),
            true => loading.ahead.clone().filter(|(flight, _)| flight.min_revision >= min_revision),
        }
    }

    /// The same of just these tables, which are in order, as of one moment.
    pub fn shared_together(&self, tables: &[TableIdent], min_revision: Revision) -> Option<Flight> {
        let flight = self.together.get(tables)?;
        let seen = self.seen();
        let awaits = |revision: Revision| if revision > seen { revision } else { 0 };
        let fits = match awaits(min_revision) {
            0 => awaits(flight.min_revision) == 0,
            wanted => awaits(flight.min_revision) >= wanted,
        };
        fits.then(|| flight.clone())
    }

    /// Nothing is being loaded.
    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.loading.is_empty() && self.together.is_empty()
    }

    /// The table's state from this revision on is known.
    pub fn raise(&mut self, table: &TableIdent, revision: Revision) {
        self.see(revision);
        if let Some(loading) = self.loading.get_mut(table) {
            loading.floor = loading.floor.max(revision);
        }
    }

    /// The table may have changed, nobody knows at which revision.
    pub fn bar(&mut self, table: &TableIdent) {
        self.bars += 1;
        if let Some(loading) = self.loading.get_mut(table) {
            loading.barred = self.bars;
            loading.unshare(None);
            self.together.retain(|tables, _| tables.binary_search(table).is_err());
        }
    }

    /// Whether an answer from `revision` may be stored.
    pub fn judge(&self, tables: &[TableIdent], asked: Asked, revision: Revision) -> Result<(), Refused> {
        if revision < asked.seen {
            return Err(Refused::Behind);
        }
        let overtaken = |table| {
            let loading: Option<&Loading> = self.loading.get(table);
            loading.is_some_and(|loading| revision < loading.floor || asked.bars < loading.barred)
        };
        match tables.iter().any(overtaken) {
            true => Err(Refused::Overtaken),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::load::tests::flight;

    fn tables() -> Vec<TableIdent> {
        ["a", "b"].iter().map(|name| TableIdent::new("n".parse().unwrap(), *name).unwrap()).collect()
    }

    #[test]
    fn an_answer_from_before_what_became_known_is_refused() {
        let (mut ledger, tables, flight) = (Ledger::default(), tables(), flight());
        ledger.see(10);
        ledger.begin(&tables, &flight);
        let asked = ledger.ask();
        assert_eq!(ledger.judge(&tables, asked, 9), Err(Refused::Behind));
        ledger.see(20);
        assert_eq!(ledger.judge(&tables, asked, 10), Ok(()), "20 was not known when it was asked");
        ledger.raise(&tables[1], 15);
        assert_eq!(ledger.judge(&tables, asked, 14), Err(Refused::Overtaken));
        assert_eq!(ledger.judge(&tables[..1], asked, 14), Ok(()));
        assert_eq!(ledger.judge(&tables, asked, 15), Ok(()));
        ledger.end(&tables, &flight);
        assert!(ledger.is_idle());
        assert_eq!(ledger.judge(&tables, ledger.ask(), 19), Err(Refused::Behind));
    }

    #[test]
    fn what_was_asked_before_a_bar_is_refused_and_nobody_joins_it() {
        let (mut ledger, tables, flight) = (Ledger::default(), tables(), flight());
        ledger.begin(&tables, &flight);
        ledger.begin_together(tables.clone().into(), &flight);
        assert!(ledger.shared_together(&tables, 0).is_some_and(|shared| shared.is(&flight)));
        let before = ledger.ask();
        ledger.bar(&tables[0]);
        assert_eq!(ledger.judge(&tables, before, 100), Err(Refused::Overtaken));
        assert_eq!(ledger.judge(&tables, ledger.ask(), 0), Ok(()));
        assert!(ledger.shared(&tables[0], 0).is_none() && ledger.shared_together(&tables, 0).is_none());
        assert!(ledger.shared(&tables[1], 0).is_some_and(|(shared, at)| shared.is(&flight) && at == 1));
        ledger.landed(&tables, &flight);
        assert!(ledger.shared(&tables[1], 0).is_none(), "it may lack what was told since");
    }

    #[test]
    fn a_load_that_waits_for_a_revision_is_joined_by_who_waits_for_it_too() {
        let (mut ledger, tables) = (Ledger::default(), tables());
        ledger.see(10);
        let mut ahead = flight();
        ahead.min_revision = 20;
        ledger.begin(&tables, &ahead);
        ledger.begin_together(tables.clone().into(), &ahead);
        let joins = |ledger: &Ledger, min_revision| {
            let alone = ledger.shared(&tables[0], min_revision).is_some();
            assert_eq!(alone, ledger.shared_together(&tables, min_revision).is_some());
            alone
        };
        assert!(joins(&ledger, 11) && joins(&ledger, 20));
        assert!(
            !joins(&ledger, 21) && !joins(&ledger, 10) && !joins(&ledger, 0),
            "it brings less, or may bring nothing"
        );
        ledger.end(&tables, &ahead);
        assert!(!joins(&ledger, 20) && ledger.is_idle());
    }
}
