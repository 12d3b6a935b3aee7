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

    /// A load of the tables begins; each needs an [`Ledger::end`]. Others may wait for it if it is given.
    pub fn begin(&mut self, tables: &[TableIdent], shared: Option<&Flight>) {
        for (at, table) in tables.iter().enumerate() {
            let loading = self.loading.entry(table.clone()).or_default();
            loading.loads += 1;
            if let Some(flight) = shared {
                loading.shared = Some((flight.clone(), at));
            }
        }
    }

    /// The load has brought what it was to bring: whoever comes from now on may know of later changes than it does.
    pub fn landed(&mut self, tables: &[TableIdent], flight: &Flight) {
        for table in tables {
            if let Some(loading) = self.loading.get_mut(table)
                && loading.shared.as_ref().is_some_and(|(shared, _)| shared.is(flight))
            {
                loading.shared = None;
            }
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

    /// The load of this table that others may wait for, and which of its answers is the table's.
    pub fn shared(&self, table: &TableIdent) -> Option<(Flight, usize)> {
        self.loading.get(table)?.shared.clone()
    }

    /// Nothing is being loaded.
    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.loading.is_empty()
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
            loading.shared = None;
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
        ledger.begin(&tables, Some(&flight));
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
        ledger.begin(&tables, Some(&flight));
        let before = ledger.ask();
        ledger.bar(&tables[0]);
        assert_eq!(ledger.judge(&tables, before, 100), Err(Refused::Overtaken));
        assert_eq!(ledger.judge(&tables, ledger.ask(), 0), Ok(()));
        assert!(ledger.shared(&tables[0]).is_none());
        assert!(ledger.shared(&tables[1]).is_some_and(|(shared, at)| shared.is(&flight) && at == 1));
        ledger.landed(&tables, &flight);
        assert!(ledger.shared(&tables[1]).is_none(), "it may lack what was told since");
    }
}
