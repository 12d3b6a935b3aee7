//! Loads: one read for all who ask for the same table while it is on its way.
//!
//! A load is a task of the cache's, so that a caller who gives up takes it from nobody. It ends by the cache's patience,
//! whatever the deadlines of those who wait for it. An answer that must not be stored ([`super::ledger`]) is asked for again
//! until then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_proto::kv::Revision;
use tokio::sync::watch;

use super::Shared;
use super::counters::{Reason, count};
use super::cover::Entry;
use super::ledger::{Asked, Ledger, Refused};
use super::resolve::is_away;
use crate::catalog::{CatalogError, TableIdent, TablePointer, Versioned};
use crate::clock;
use crate::store::{Applied, Error, Leader, ReadOptions};

const LOOKING_UP: &str = "looking up tables";

/// The tables' entries, in the order asked for, all of one revision or later ones that say the same.
type Outcome = Result<Arc<[Arc<Entry>]>, CatalogError>;

/// A load on its way.
#[derive(Debug, Clone)]
pub struct Flight {
    /// What it brings was current then, or later.
    pub started: Instant,
    /// ... and at this revision.
    pub min_revision: Revision,
    outcome: watch::Receiver<Option<Outcome>>,
}

impl Flight {
    pub fn is(&self, other: &Flight) -> bool {
        self.outcome.same_channel(&other.outcome)
    }

    /// What it brings; a load that has brought nothing by `until` counts as metasrv being away.
    pub async fn outcome(mut self, until: Instant) -> Outcome {
        match tokio::time::timeout_at(until.into(), self.outcome.wait_for(Option::is_some)).await {
            Ok(Ok(outcome)) => outcome.clone().unwrap_or_else(|| Err(ended())),
            Ok(Err(_)) => Err(ended()),
            Err(_) => Err(unanswered(LOOKING_UP, clock::since(self.started)).into()),
        }
    }
}

/// What is to be loaded.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub reason: Reason,
    /// From this revision or a later one.
    pub min_revision: Revision,
}

/// A load that others may wait for. It takes the tables off the ledger when it ends, however it does, and so must not be
/// dropped under the ledger's lock.
pub struct Registered {
    shared: Arc<Shared>,
    tables: Vec<TableIdent>,
    flight: Flight,
    report: watch::Sender<Option<Outcome>>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.lock().end(&self.tables, &self.flight);
    }
}

impl Registered {
    pub fn flight(&self) -> &Flight {
        &self.flight
    }

    async fn load(&self, load: Load, until: Instant) -> Outcome {
        let (shared, tables) = (&self.shared, &self.tables);
        let mut backoff = shared.backoff();
        let mut behind = None;
        loop {
            let asked = shared.lock().ask();
            let read_at = clock::now();
            let had = until.saturating_duration_since(read_at);
            shared.counting.call(load.reason);
            // What only the caller knows of is not waited for at the store: it may never come, and that no answer comes for want
            // of it would look as if the store was away.
            let options = ReadOptions { min_revision: asked.seen, ..ReadOptions::default() };
            let read = shared.catalog.load_tables(tables, options, until);
            let read = match tokio::time::timeout_at(until.into(), read).await {
                Ok(read) => read,
                Err(_) => Err(unanswered(LOOKING_UP, clock::since(read_at)).into()),
            };
            match (&read, behind.take()) {
                // The store has answered a moment ago, and is not away.
                (Err(CatalogError::Store(e)), Some(behind)) if e.is_of_a_last_look(had) => return Err(behind),
                _ => shared.note_reached(read.as_ref().is_err_and(is_away)),
            }
            let (revision, pointers) = read?;
            match self.land(asked, load.min_revision, revision, read_at, pointers) {
                Ok(entries) => return Ok(entries),
                Err(why) => {
                    count(&shared.counting.refused);
                    tracing::debug!(revision, ?why, "what was read of table pointers is not the latest known");
                    match why {
                        Refused::Behind => {
                            let seen = asked.seen.max(load.min_revision);
                            let error = CatalogError::Behind { doing: LOOKING_UP.to_owned(), answered: revision, seen };
                            if !backoff.wait(until).await {
                                return Err(error);
                            }
                            behind = Some(error);
                        }
                        Refused::Overtaken if clock::now() >= until => {
                            let last = "it changed each time while it was read";
                            return Err(unavailable(LOOKING_UP, last, clock::since(read_at)).into());
                        }
                        // The next answer has what this one lacks.
                        Refused::Overtaken => {}
                    }
                }
            }
        }
    }

    /// Stores what a read brought that was begun at `read_at`, if it may be.
    fn land(
        &self,
        asked: Asked,
        min_revision: Revision,
        revision: Revision,
        read_at: Instant,
        pointers: Vec<Option<Versioned<TablePointer>>>,
    ) -> Result<Arc<[Arc<Entry>]>, Refused> {
        let (shared, tables) = (&self.shared, &self.tables);
        let mut ledger = shared.lock();
        if revision < min_revision {
            return Err(Refused::Behind);
        }
        ledger.judge(tables, asked, revision)?;
        ledger.see(revision);
        let mut entries = Vec::with_capacity(tables.len());
        for (table, pointer) in tables.iter().zip(pointers) {
            // Since when this has been the table's state, as far as is known.
            let since = pointer.as_ref().map_or(revision, |pointer| pointer.mod_revision);
            ledger.raise(table, since);
            entries.push(shared.keep(table, Entry::new(pointer, revision, read_at)));
        }
        ledger.landed(tables, &self.flight);
        shared.update_cover(|cover| cover.confirmed(revision, read_at));
        Ok(entries.into())
    }
}

impl Shared {
    /// Begins to load the tables together, as one read.
    pub fn begin_load(self: &Arc<Self>, tables: Vec<TableIdent>, load: Load) -> Flight {
        let registered = self.register_load(&mut self.lock(), tables, load);
        self.run_load(registered, load)
    }

    /// Says that the tables are about to be loaded together; [`Shared::run_load`] does it.
    pub fn register_load(self: &Arc<Self>, ledger: &mut Ledger, tables: Vec<TableIdent>, load: Load) -> Registered {
        let (report, outcome) = watch::channel(None);
        let flight = Flight { started: clock::now(), min_revision: load.min_revision, outcome };
        ledger.begin(&tables, &flight);
        Registered { shared: self.clone(), tables, flight, report }
    }

    /// Runs a load as a task of the cache's.
    pub fn run_load(self: &Arc<Self>, registered: Registered, load: Load) -> Flight {
        let flight = registered.flight.clone();
        let until = flight.started + self.config.away_patience;
        let report = registered.report.clone();
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            let outcome = tokio::select! {
                biased;
                () = stop.cancelled() => Err(ended()),
                outcome = registered.load(load, until) => outcome,
            };
            drop(registered);
            report.send_replace(Some(outcome));
        });
        flight
    }

    /// Caches an entry whose state is not older than what is cached, and returns the one that says more. Under the
    /// ledger's lock.
    pub fn keep(&self, table: &TableIdent, mut entry: Entry) -> Arc<Entry> {
        if let Some(cached) = self.peek(table) {
            if cached.revision > entry.revision {
                return cached;
            }
            // A doubt is about what was so before it.
            entry.doubted = cached.doubted.filter(|doubted| entry.read_at < *doubted);
            // What was current at a revision before this one was so at that time; so is what came after it.
            entry.read_at = entry.read_at.max(self.cover.load().know(cached).as_of);
        }
        let entry = Arc::new(entry);
        self.entries.insert(table.clone(), entry.clone());
        entry
    }

    /// What is cached. Asking for what is not does not count as use.
    pub fn peek(&self, table: &TableIdent) -> Option<Arc<Entry>> {
        match self.entries.contains_key(table) {
            true => self.entries.get(table),
            false => None,
        }
    }
}

/// The store cannot be reached, as the cache says it.
pub fn unavailable(doing: &str, last: &str, elapsed: Duration) -> Error {
    Error::Unavailable {
        doing: doing.to_owned(),
        endpoints: Vec::new(),
        attempts: 1,
        elapsed,
        leader: Leader::Without,
        last: last.to_owned(),
        applied: Applied::No,
    }
}

/// The store has not answered in the time that the cache gives it.
pub fn unanswered(doing: &str, elapsed: Duration) -> Error {
    unavailable(doing, "no answer in time", elapsed)
}

/// Whether the cache says so itself, of a store that has not said anything.
pub fn is_unanswered(error: &CatalogError) -> bool {
    matches!(error, CatalogError::Store(Error::Unavailable { endpoints, .. }) if endpoints.is_empty())
}

fn ended() -> CatalogError {
    unavailable(LOOKING_UP, "the cache of table pointers was closed", Duration::ZERO).into()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// One that brings nothing.
    pub fn flight() -> Flight {
        Flight { started: clock::now(), min_revision: 0, outcome: watch::channel(None).1 }
    }
}
