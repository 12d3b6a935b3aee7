//! What a query gets: an entry that fits it, one that is loaded for it, or, while metasrv is away, an old one.
//!
//! [`Shared::fits`] says which entries fit. Of several tables the entries must be of one moment as well; if those cached cannot be
//! shown to be, one read fetches them together. A query that finds a load of its tables on its way waits for that, if it began
//! late enough to bring what the query may get.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lake_proto::kv::Revision;

use super::counters::{Reason, count};
use super::cover::{Cover, Entry, Known, one_moment};
use super::load::{self, Load};
use super::{PointerCache, Resolved, Shared, Want};
use crate::catalog::{CatalogError, TableIdent};
use crate::clock;
use crate::store::{Error, ReadOptions};

/// The pause before a load that failed is made again.
const LOAD_PAUSE: Duration = Duration::from_millis(20);
/// An entry younger than this is not renewed for a newer revision having been mentioned.
const NEWER_PAUSE: Duration = Duration::from_millis(100);

impl PointerCache {
    /// The pointers of the tables of one query, in the order asked for, all of one moment: if those cached cannot be shown
    /// to be, one read fetches them together. While metasrv is away the cached ones are returned as they are, and say so.
    ///
    /// # Errors
    /// As [`PointerCache::get`].
    pub async fn resolve(&self, tables: &[TableIdent], want: Want) -> Result<Vec<Resolved>, CatalogError> {
        let shared = &self.shared;
        if !shared.caches {
            return shared.read(tables, want).await;
        }
        let began = clock::now();
        // They have been found to be of several moments.
        let mut together = false;
        let mut waited = false;
        let mut behind = None;
        // What the store itself has said of being away.
        let mut said = None;
        loop {
            let least = shared.least(want.min_revision);
            let cover = shared.cover();
            let mut known: Vec<Option<Known>> =
                tables.iter().map(|table| shared.entries.get(table).map(|entry| cover.know(entry))).collect();
            let fits = |known: &Option<Known>| known.as_ref().is_some_and(|known| shared.fits(known, began, least));
            let mut missing: Vec<usize> = (0..tables.len()).filter(|&at| !fits(&known[at])).collect();
            if missing.is_empty() && one_moment(known.iter().flatten()) {
                if !waited {
                    shared.counting.hits.fetch_add(tables.len() as u64, Ordering::Relaxed);
                }
                let now = clock::now();
                for (table, known) in tables.iter().zip(known.iter().flatten()) {
                    shared.have_renewed(table, &cover, known, now);
                }
                return Ok(known.into_iter().flatten().map(|known| Resolved::of(known, now, false)).collect());
            }
            together |= missing.is_empty();
            if shared.is_away() {
                // At once, without another wait for it.
                if let Ok(old) = shared.make_do(tables, &known, want, None) {
                    return Ok(old);
                }
            }
            if together {
                missing = (0..tables.len()).collect();
            }
            if !waited {
                shared.counting.misses.fetch_add(missing.len() as u64, Ordering::Relaxed);
                waited = true;
            }
            let new = missing.iter().all(|&at| known[at].is_none());
            let reason = match (together, new) {
                (true, _) => Reason::Moment,
                (false, true) => Reason::Miss,
                (false, false) => Reason::Expired,
            };
            let load = Load { reason, min_revision: want.min_revision };
            let asked: Vec<TableIdent> = missing.iter().map(|&at| tables[at].clone()).collect();
            // A load that metasrv does not answer ends a little earlier, and says more.
            let until = want.deadline.min(clock::now() + shared.config.away_patience + LOAD_PAUSE);
            let fetched = match together {
                true => shared.fetch_together(&asked, load, began, until).await,
                false => shared.fetch(asked, load, began, until).await,
            };
            let error = match fetched {
                Ok(entries) => {
                    for (&at, entry) in missing.iter().zip(entries) {
                        known[at] = Some(cover.know(entry));
                    }
                    let fit = known.iter().all(fits);
                    if fit && one_moment(known.iter().flatten()) {
                        let now = clock::now();
                        return Ok(known.into_iter().flatten().map(|known| Resolved::of(known, now, false)).collect());
                    }
                    together |= fit;
                    None
                }
                // Says more than that there was no time for another answer.
                Err(error) if is_away(&error) => {
                    if !load::is_unanswered(&error) {
                        said = Some(error.clone());
                    }
                    Some(behind.as_ref().or(said.as_ref()).cloned().unwrap_or(error))
                }
                Err(error @ CatalogError::Behind { .. }) => {
                    behind = Some(error.clone());
                    Some(error)
                }
                Err(error) => return Err(error),
            };
            let late = clock::now() + LOAD_PAUSE >= want.deadline;
            if let Some(error) = error {
                match shared.make_do(tables, &known, want, Some(error)) {
                    Ok(old) => return Ok(old),
                    Err(error) if late => return Err(error),
                    Err(_) => tokio::time::sleep(LOAD_PAUSE).await,
                }
            } else if late {
                return Err(load::unanswered("looking up tables of one moment", clock::since(began)).into());
            }
        }
    }
}

impl Shared {
    /// The revision at which whatever is shown must be current.
    pub(super) fn least(&self, min_revision: Revision) -> Revision {
        min_revision.max(self.required.load(Ordering::Acquire))
    }

    /// Whether a query that began then may get this.
    pub(super) fn fits(&self, known: &Known, began: Instant, least: Revision) -> bool {
        let bound = match known.entry.pointer {
            Some(_) => self.config.fresh_for,
            None => self.config.absent_for,
        };
        let age = began.saturating_duration_since(known.as_of);
        known.entry.doubted.is_none() && known.through >= least && (age < bound || age.is_zero())
    }

    /// Has an entry renewed that was used, if it is time.
    pub(super) fn have_renewed(&self, table: &TableIdent, cover: &Cover, known: &Known, now: Instant) {
        let age = now.saturating_duration_since(known.as_of);
        // A watch that does not get to what was confirmed hangs, or follows a peer that lags.
        let behind =
            |&(_, at): &(Revision, Instant)| now.saturating_duration_since(at) >= self.config.refresh_after / 2;
        let watched = cover.live && cover.covers(&known.entry) && !cover.awaited.as_ref().is_some_and(behind);
        let newer = || {
            // What the watch covers, it is about to tell.
            !watched
                && known.through < self.seen.load(Ordering::Relaxed)
                && now.saturating_duration_since(known.entry.read_at) >= NEWER_PAUSE
        };
        if age < self.config.refresh_after && !newer() || known.entry.pointer.is_none() {
            return;
        }
        if watched {
            if cover.awaited.is_none() {
                self.want_confirmation();
            }
        } else if !known.entry.renewing.swap(true, Ordering::AcqRel) && self.renewals.try_send(table.clone()).is_ok() {
            count(&self.counting.refreshes);
        }
    }

    /// Whether a query that began then may wait for this load.
    fn began_late_enough(&self, flight: &load::Flight, began: Instant) -> bool {
        began.saturating_duration_since(flight.started) < self.config.fresh_for
    }

    /// Waits for one load of all the tables: another's of just these that is on its way and began late enough, or its own.
    async fn fetch_together(
        self: &Arc<Self>,
        tables: &[TableIdent],
        load: Load,
        began: Instant,
        until: Instant,
    ) -> Result<Vec<Arc<Entry>>, CatalogError> {
        let mut wanted = tables.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        let wanted: Arc<[TableIdent]> = wanted.into();
        let (flight, registered) = {
            let mut ledger = self.lock();
            let shared = ledger.shared_together(&wanted, load.min_revision);
            match shared.filter(|flight| self.began_late_enough(flight, began)) {
                Some(flight) => (flight, None),
                None => {
                    let registered = self.register_load(&mut ledger, wanted.to_vec(), load);
                    ledger.begin_together(wanted.clone(), registered.flight());
                    (registered.flight().clone(), Some(registered))
                }
            }
        };
        if let Some(registered) = registered {
            self.run_load(registered, load);
        }
        let entries = flight.outcome(until).await?;
        let of = |table: &TableIdent| wanted.binary_search(table).ok().and_then(|at| entries.get(at).cloned());
        Ok(tables.iter().map(|table| of(table).expect("a load brings an entry for each of its tables")).collect())
    }

    /// Waits for loads of the tables: others' that are on their way and began late enough, and one of its own for the rest.
    async fn fetch(
        self: &Arc<Self>,
        tables: Vec<TableIdent>,
        load: Load,
        began: Instant,
        until: Instant,
    ) -> Result<Vec<Arc<Entry>>, CatalogError> {
        let mut waiting = Vec::with_capacity(tables.len());
        let mut own = Vec::new();
        let least = self.least(load.min_revision);
        let cover = self.cover();
        let registered = {
            // Looked and begun under one lock: of two who come at once the second finds what the first has begun, or brought.
            let mut ledger = self.lock();
            for table in tables {
                let brought = || self.peek(&table).filter(|entry| self.fits(&cover.know(entry.clone()), began, least));
                let shared = ledger.shared(&table, load.min_revision);
                let awaited = match shared.filter(|(flight, _)| self.began_late_enough(flight, began)) {
                    Some((flight, at)) => Some(Awaited::Other(flight, at)),
                    None => brought().map(Awaited::Brought),
                };
                if awaited.is_none() {
                    own.push(table.clone());
                }
                waiting.push((table, awaited.unwrap_or(Awaited::Own)));
            }
            (!own.is_empty()).then(|| self.register_load(&mut ledger, own, load))
        };
        let own = match registered {
            Some(registered) => Some(self.run_load(registered, load).outcome(until).await?),
            None => None,
        };
        let mut own = own.iter().flat_map(|entries| entries.iter());
        let mut entries = Vec::with_capacity(waiting.len());
        for (table, awaited) in waiting {
            let entry = match awaited {
                Awaited::Own => own.next().cloned(),
                Awaited::Brought(entry) => Some(entry),
                Awaited::Other(flight, at) => match flight.outcome(until).await {
                    Ok(entries) => entries.get(at).cloned(),
                    Err(error) if is_away(&error) || matches!(error, CatalogError::Behind { .. }) => return Err(error),
                    // It may be about another table of that load.
                    Err(_) => self.begin_load(vec![table], load).outcome(until).await?.first().cloned(),
                },
            };
            entries.push(entry.expect("a load brings an entry for each of its tables"));
        }
        Ok(entries)
    }

    /// What is cached, although it is old, because metasrv is away; else why that cannot be done.
    fn make_do(
        &self,
        tables: &[TableIdent],
        known: &[Option<Known>],
        want: Want,
        error: Option<CatalogError>,
    ) -> Result<Vec<Resolved>, CatalogError> {
        let now = clock::now();
        let error = error.unwrap_or_else(|| load::unanswered("looking up tables", Duration::ZERO).into());
        let least = self.least(want.min_revision);
        let mut resolved = Vec::with_capacity(tables.len());
        for (table, known) in tables.iter().zip(known) {
            let Some(known) = known.clone().filter(|known| known.through >= least) else {
                return Err(error);
            };
            let age = now.saturating_duration_since(known.as_of);
            if age > self.config.stale_limit {
                return Err(match error {
                    CatalogError::Store(error) => {
                        CatalogError::TooOld { table: table.clone(), age, limit: self.config.stale_limit, error }
                    }
                    error => error,
                });
            }
            resolved.push(Resolved::of(known, now, true));
        }
        self.want_confirmation();
        self.counting.stale.fetch_add(tables.len() as u64, Ordering::Relaxed);
        Ok(resolved)
    }

    /// The tables' pointers as they are now, from a store of which nothing is cached. A revision that somebody has seen of one of
    /// them is in that.
    async fn read(&self, tables: &[TableIdent], want: Want) -> Result<Vec<Resolved>, CatalogError> {
        let at = clock::now();
        self.counting.misses.fetch_add(tables.len() as u64, Ordering::Relaxed);
        self.counting.call(Reason::Miss);
        let (_, pointers) = self.catalog.load_tables(tables, ReadOptions::default(), want.deadline).await?;
        let now = clock::now();
        let resolved = pointers.into_iter().map(|pointer| {
            let through = pointer.as_ref().map_or(0, |pointer| pointer.mod_revision);
            let entry = Arc::new(Entry::new(pointer, through, at));
            Resolved::of(Known { entry, through, as_of: at }, now, false)
        });
        Ok(resolved.collect())
    }
}

/// What a query waits for, of one of its tables.
enum Awaited {
    /// The load that it begins itself.
    Own,
    /// Another's, and which of its answers.
    Other(load::Flight, usize),
    /// Nothing: it came meanwhile.
    Brought(Arc<Entry>),
}

/// Whether it says that metasrv cannot be reached.
pub(super) fn is_away(error: &CatalogError) -> bool {
    matches!(error, CatalogError::Store(Error::Unavailable { .. }))
}
