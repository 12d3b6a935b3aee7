//! Table pointers, cached: in the steady state a query needs no metadata call, and no table costs one.
//!
//! In reading order: `cover` (what is known of an entry, and until when), `ledger` (what may be stored), `load` (one read
//! for all who ask), `sync` (the watch, and how time comes in), [`counters`], and [`PointerCache`] here.
//!
//! ```text
//!                    hit: cover, then entry                miss, or too old
//!   queries --------------------------------> entries <---------- load (one per table) <------ metasrv
//!                                              ^    ^                                            |  |
//!   commits of this node ----------------------'    '--- changes --- watch of /lake/table/ <-----'  |
//!                                              cover <-- progress ---'                              |
//!                                              cover <-- confirmation: one small read for all <-----'
//! ```
//!
//! # What a query gets
//!
//! The age of an entry counts from a moment at which it was certainly current: when the read that brought it began, or
//! when the last confirmation began whose revision the watch has reached.
//!
//! | age                        | a query gets                                                                           |
//! |----------------------------|----------------------------------------------------------------------------------------|
//! | up to `refresh_after`      | the entry                                                                              |
//! | up to `fresh_for`          | the entry; in the background it is renewed, by one confirmation for all the watch covers |
//! | older                      | a load, one per table however many ask; the entry, marked, if metasrv cannot be reached  |
//! | older than `stale_limit`   | a load; an error that says so if metasrv cannot be reached                             |
//!
//! That a table does not exist is believed for `absent_for` only, and not renewed.
//!
//! So while metasrv can be reached, a query gets a state that was current when it began or at most `fresh_for` before:
//! with the watch, without it, and with one that hangs or follows a peer that lags, since no age counts from what a watch
//! says alone. With the watch a change arrives in a fraction of that, and pointers that are used cost metasrv nothing but
//! the confirmation: two small reads a second and node at the defaults, none without queries.
//!
//! While metasrv is away, the first query waits `away_patience`; those that follow get the old entry at once, and one
//! confirmation at a time finds out when it is back. Such answers say so ([`Resolved::metasrv_away`]).
//!
//! # What holds
//!
//! - A node never shows an older state of a table than it has shown, also after an eviction and also if a peer that lags
//!   answers: `ledger` says how. A load that raced with a change is not used.
//! - What this node committed, it sees ([`PointerCache::note_committed`]).
//! - Several pointers are all of one moment, but those of a node that metasrv is away from: `valid_through` is pushed on by
//!   the watch for all entries at once, so that this costs no call unless one of them has changed within the last
//!   fraction of a second; then one read fetches them together.
//!
//! # Bounds
//!
//! `max_tables` entries, dropped after `keep_for` without use. Loads: one per table for those who can share it, each ended
//! by `away_patience`; one confirmation, one renewal of up to 256 tables at a time, [`RENEWALS_WAITING`] waiting. All tasks
//! are the cache's and end with it ([`PointerCache::close`], or its last handle).
//!
//! It needs a store whose revisions are the store's (`consistent_listing`). Without `watch` it works as said, each table
//! being renewed by itself.

pub mod counters;
mod cover;
mod ledger;
mod load;
#[cfg(test)]
mod model;
mod sync;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use lake_proto::kv::Revision;
use rand::Rng;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backoff::Backoff;
use crate::catalog::{Catalog, CatalogError, TableIdent, TablePointer, Versioned};
use crate::clock;
use crate::store::{Error, SharedStore};
use counters::{Counters, Counting, Reason, count};
use cover::{Cover, Entry, Known, one_moment};
use ledger::Ledger;
use load::Load;

/// The pause before a load that failed is made again.
const LOAD_PAUSE: Duration = Duration::from_millis(20);
/// An entry younger than this is not renewed for a newer revision having been mentioned.
const NEWER_PAUSE: Duration = Duration::from_millis(100);
/// Tables that wait for their renewal; beyond that they become too old, and are loaded when asked for.
pub const RENEWALS_WAITING: usize = 4096;

/// Bounds and ages of a [`PointerCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheConfig {
    /// Most tables held.
    pub max_tables: u64,
    /// From this age on, use has an entry renewed in the background.
    pub refresh_after: Duration,
    /// From this age on, a query waits for the renewal.
    pub fresh_for: Duration,
    /// From this age on, it is not believed that a table does not exist.
    pub absent_for: Duration,
    /// Entries not used for this long are dropped.
    pub keep_for: Duration,
    /// How long a query waits for metasrv before it takes an old entry.
    pub away_patience: Duration,
    /// While metasrv is away, entries older than this are not used.
    pub stale_limit: Duration,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            max_tables: 100_000,
            refresh_after: Duration::from_millis(500),
            fresh_for: Duration::from_secs(1),
            absent_for: Duration::from_millis(200),
            keep_for: Duration::from_secs(24 * 3600),
            away_patience: Duration::from_secs(2),
            stale_limit: Duration::from_secs(24 * 3600),
        }
    }
}

/// What a query wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// How long it waits.
    pub deadline: Instant,
    /// States that are current at this revision, or later ones.
    pub min_revision: Revision,
}

impl Want {
    /// What the cache holds by its rules.
    pub fn by(deadline: Instant) -> Self {
        Self { deadline, min_revision: 0 }
    }

    /// What another node has seen, or later.
    pub fn at_least(self, min_revision: Revision) -> Self {
        Self { min_revision, ..self }
    }
}

/// A table's pointer as a query should use it.
#[derive(Debug, Clone)]
pub struct Resolved {
    entry: Arc<Entry>,
    /// The pointer is current up to this revision.
    pub valid_through: Revision,
    /// It was certainly current this long ago.
    pub age: Duration,
    /// It is older than it should be, because metasrv could not be reached.
    pub metasrv_away: bool,
}

impl Resolved {
    /// `None`: there is no such table.
    pub fn pointer(&self) -> Option<&Versioned<TablePointer>> {
        self.entry.pointer.as_ref()
    }

    fn of(known: Known, now: Instant, metasrv_away: bool) -> Self {
        let age = now.saturating_duration_since(known.as_of);
        Self { entry: known.entry, valid_through: known.through, age, metasrv_away }
    }
}

/// Table pointers of one catalog, cached. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PointerCache {
    shared: Arc<Shared>,
    /// Ends the tasks with the last handle.
    _owner: Arc<Owner>,
}

/// What the tasks and the handles share.
#[derive(Debug)]
struct Shared {
    store: SharedStore,
    catalog: Catalog,
    config: CacheConfig,
    entries: moka::sync::Cache<TableIdent, Arc<Entry>>,
    cover: ArcSwap<Cover>,
    /// Held wherever an entry is put in another's place.
    ledger: Mutex<Ledger>,
    /// The ledger's, for those who only compare.
    seen: Arc<AtomicU64>,
    /// Nothing is shown as current that may have changed up to this revision.
    required: AtomicU64,
    away: AtomicBool,
    /// How far the watch has come.
    version: watch::Sender<Revision>,
    confirm_wanted: Notify,
    confirming: AtomicBool,
    renewals: mpsc::Sender<TableIdent>,
    counting: Arc<Counting>,
    /// Of the waits between attempts.
    seeds: AtomicU64,
    tasks: TaskTracker,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Owner {
    stop: CancellationToken,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl PointerCache {
    /// Begins with nothing, and with its tasks: inside a tokio runtime.
    ///
    /// # Panics
    /// If the store's revisions are not the store's: nothing that is cached could be said to be current.
    pub fn new(store: SharedStore, config: CacheConfig) -> Self {
        Self::build(store, config, Arc::default(), rand::rng().random())
    }

    /// Counts where somebody else may count as well, and waits as the seed says.
    pub(crate) fn build(store: SharedStore, config: CacheConfig, counting: Arc<Counting>, seed: u64) -> Self {
        assert!(
            store.capabilities().consistent_listing,
            "pointers are cached of stores whose revisions are the store's"
        );
        let (renewals, wanted) = mpsc::channel(RENEWALS_WAITING);
        let ledger = Ledger::default();
        let shared = Arc::new(Shared {
            catalog: Catalog::new(store.clone()),
            store,
            config,
            entries: moka::sync::Cache::builder().max_capacity(config.max_tables).time_to_idle(config.keep_for).build(),
            cover: ArcSwap::default(),
            seen: ledger.seen_by_all(),
            ledger: Mutex::new(ledger),
            required: AtomicU64::new(0),
            away: AtomicBool::new(false),
            version: watch::Sender::new(0),
            confirm_wanted: Notify::new(),
            confirming: AtomicBool::new(false),
            renewals,
            counting,
            seeds: AtomicU64::new(seed),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        });
        shared.spawn(sync::follow(shared.clone()));
        shared.spawn(sync::confirm(shared.clone()));
        shared.spawn(sync::renew(shared.clone(), wanted));
        let owner = Arc::new(Owner { stop: shared.stop.clone() });
        Self { shared, _owner: owner }
    }

    /// Ends its tasks, and waits for them. What is asked for afterwards comes from what is cached, or is an error.
    pub async fn close(&self) {
        self.shared.stop.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    /// A table's pointer if it is cached and fit for use: no call, no wait, no allocation.
    pub fn cached(&self, table: &TableIdent) -> Option<Resolved> {
        self.hit(table, 0)
    }

    fn hit(&self, table: &TableIdent, min_revision: Revision) -> Option<Resolved> {
        let shared = &self.shared;
        // Before the entry: that holds every change up to this cover's progress.
        let cover = shared.cover();
        let known = cover.know(shared.entries.get(table)?);
        let now = clock::now();
        if !shared.fits(&known, now, min_revision) {
            return None;
        }
        count(&shared.counting.hits);
        shared.have_renewed(table, &cover, &known, now);
        Some(Resolved::of(known, now, false))
    }

    /// A table's pointer. A hit does not wait.
    ///
    /// # Errors
    /// The catalog's; `Behind` if nothing of the revision wanted can be had; `TooOld`.
    pub async fn get(&self, table: &TableIdent, want: Want) -> Result<Resolved, CatalogError> {
        if let Some(resolved) = self.hit(table, want.min_revision) {
            return Ok(resolved);
        }
        self.resolve(std::slice::from_ref(table), want).await.map(|mut resolved| resolved.swap_remove(0))
    }

    /// The pointers of the tables of one query, in the order asked for, all of one moment: if those cached cannot be shown
    /// to be, one read fetches them together. While metasrv is away the cached ones are returned as they are, and say so.
    ///
    /// # Errors
    /// As [`PointerCache::get`].
    pub async fn resolve(&self, tables: &[TableIdent], want: Want) -> Result<Vec<Resolved>, CatalogError> {
        let shared = &self.shared;
        let began = clock::now();
        // They have been found to be of several moments.
        let mut together = false;
        let mut waited = false;
        let mut behind = None;
        loop {
            let cover = shared.cover();
            let mut known: Vec<Option<Known>> =
                tables.iter().map(|table| shared.entries.get(table).map(|entry| cover.know(entry))).collect();
            let fits = |known: &Option<Known>| {
                known.as_ref().is_some_and(|known| shared.fits(known, began, want.min_revision))
            };
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
            let error = match shared.fetch(asked, load, together, began, want.deadline).await {
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
                Err(error) if is_away(&error) => Some(behind.clone().unwrap_or(error)),
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

    /// This process committed the pointer, or read it: later queries here see it, or a later one. `at`: when the commit or
    /// the read began.
    pub fn note_committed(&self, table: &TableIdent, pointer: Versioned<TablePointer>, at: Instant) {
        self.shared.note(table, Some(pointer.mod_revision), pointer.valid_through, Some(pointer), at);
    }

    /// This process dropped the table, or saw that it is not there, at this revision.
    pub fn note_dropped(&self, table: &TableIdent, revision: Revision, at: Instant) {
        self.shared.note(table, None, revision, None, at);
    }

    /// What is cached may be no longer so: the next query asks metasrv, also if a load is on its way. While that is away it
    /// is as good as any other old pointer.
    pub fn invalidate(&self, table: &TableIdent) {
        let mut ledger = self.shared.lock();
        ledger.bar(table);
        if let Some(cached) = self.shared.peek(table) {
            let doubted = Entry::new(cached.pointer.clone(), cached.revision, cached.read_at).doubted_at(clock::now());
            self.shared.entries.insert(table.clone(), Arc::new(doubted));
        }
    }

    /// The metadata has this revision, as an answer of its said: what is of an earlier one is renewed when it is next used,
    /// and no answer from before is believed any more.
    pub fn notice(&self, revision: Revision) {
        self.shared.notice(revision);
    }

    /// Waits until the watch has told of every change up to this revision. Whatever is shown from then on is current at it.
    ///
    /// # Errors
    /// `Unavailable` if that is not so by the deadline.
    pub async fn wait_for_version(&self, revision: Revision, deadline: Instant) -> Result<Revision, CatalogError> {
        let began = clock::now();
        let mut version = self.subscribe();
        let told = match tokio::time::timeout_at(deadline.into(), version.wait_for(|told| *told >= revision)).await {
            Ok(Ok(told)) => *told,
            _ => {
                let told = *self.shared.version.borrow();
                let last = format!("changes have been told up to revision {told}");
                let doing = format!("waiting for revision {revision}");
                return Err(load::unavailable(&doing, &last, clock::since(began)).into());
            }
        };
        self.shared.required.fetch_max(revision, Ordering::AcqRel);
        Ok(told)
    }

    /// The latest revision that is known of.
    pub fn seen(&self) -> Revision {
        self.shared.seen.load(Ordering::Acquire)
    }

    /// The revision up to which the watch has told of every change; 0 before it has begun.
    pub fn subscribe(&self) -> watch::Receiver<Revision> {
        self.shared.version.subscribe()
    }

    /// What it has done so far.
    pub fn counters(&self) -> Counters {
        self.shared.counting.snapshot()
    }

    /// Tables cached now, or nearly so many.
    pub fn len(&self) -> u64 {
        self.shared.entries.run_pending_tasks();
        self.shared.entries.entry_count()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Runs a task for as long as the cache.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.shared.spawn(task);
    }

    /// For whoever hears of revisions, and must not keep the cache from ending.
    pub(crate) fn downgrade(&self) -> Noticed {
        Noticed { shared: Arc::downgrade(&self.shared) }
    }

    /// Evicts a table, as a full cache might.
    #[cfg(test)]
    fn evict(&self, table: &TableIdent) {
        let _ledger = self.shared.lock();
        self.shared.entries.invalidate(table);
    }
}

/// Takes notice of revisions while there is a cache.
#[derive(Debug, Clone)]
pub(crate) struct Noticed {
    shared: Weak<Shared>,
}

impl Noticed {
    pub fn notice(&self, revision: Revision) {
        if let Some(shared) = self.shared.upgrade() {
            shared.notice(revision);
        }
    }
}

impl Shared {
    /// A task that ends with the cache.
    fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = task => {}
            }
        });
    }

    fn backoff(&self) -> Backoff {
        Backoff::seeded(self.seeds.fetch_add(1, Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cover(&self) -> Cover {
        **self.cover.load()
    }

    fn update_cover(&self, mut update: impl FnMut(&mut Cover)) {
        self.cover.rcu(|cover| {
            let mut cover = **cover;
            update(&mut cover);
            cover
        });
    }

    /// Whether a query that began then may get this.
    fn fits(&self, known: &Known, began: Instant, min_revision: Revision) -> bool {
        let bound = match known.entry.pointer {
            Some(_) => self.config.fresh_for,
            None => self.config.absent_for,
        };
        let age = began.saturating_duration_since(known.as_of);
        let required = self.required.load(Ordering::Acquire);
        known.entry.doubted.is_none() && known.through >= min_revision.max(required) && (age < bound || age.is_zero())
    }

    /// Has an entry renewed that was used, if it is time.
    fn have_renewed(&self, table: &TableIdent, cover: &Cover, known: &Known, now: Instant) {
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

    fn want_confirmation(&self) {
        if !self.confirming.load(Ordering::Relaxed) && !self.confirming.swap(true, Ordering::AcqRel) {
            count(&self.counting.refreshes);
            self.confirm_wanted.notify_one();
        }
    }

    /// Waits for loads of the tables: others' that are on their way and began late enough, and one of its own for the rest.
    async fn fetch(
        self: &Arc<Self>,
        tables: Vec<TableIdent>,
        load: Load,
        together: bool,
        began: Instant,
        deadline: Instant,
    ) -> Result<Vec<Arc<Entry>>, CatalogError> {
        // A load that metasrv does not answer ends a little earlier, and says more.
        let until = deadline.min(clock::now() + self.config.away_patience + LOAD_PAUSE);
        let mut waiting = Vec::with_capacity(tables.len());
        let mut own = Vec::new();
        let cover = self.cover();
        let registered = {
            // Looked and begun under one lock: of two who come at once the second finds what the first has begun, or brought.
            let mut ledger = self.lock();
            let recent =
                |flight: &load::Flight| began.saturating_duration_since(flight.started) < self.config.fresh_for;
            for table in tables {
                let brought = || {
                    self.peek(&table).filter(|entry| self.fits(&cover.know(entry.clone()), began, load.min_revision))
                };
                let awaited = match together {
                    true => None,
                    false => match ledger.shared(&table).filter(|(flight, _)| recent(flight)) {
                        Some((flight, at)) => Some(Awaited::Other(flight, at)),
                        None => brought().map(Awaited::Brought),
                    },
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
                    Err(error) if is_away(&error) => return Err(error),
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
        let least = want.min_revision.max(self.required.load(Ordering::Acquire));
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

    /// The table's state at `revision`, and since `since` if that is known, by a commit or read that began at `at`.
    fn note(
        &self,
        table: &TableIdent,
        since: Option<Revision>,
        revision: Revision,
        pointer: Option<Versioned<TablePointer>>,
        at: Instant,
    ) {
        let mut ledger = self.lock();
        ledger.see(revision);
        ledger.raise(table, since.unwrap_or(revision));
        // Only in an older one's place: of a table that is not cached it is not known whether this is the latest.
        if let Some(cached) = self.peek(table)
            && self.cover().know(cached).through < revision
        {
            self.keep(table, Entry::new(pointer, revision, at));
        }
    }

    fn notice(&self, revision: Revision) {
        if revision > self.seen.load(Ordering::Acquire) {
            self.lock().see(revision);
        }
    }

    fn is_away(&self) -> bool {
        self.away.load(Ordering::Acquire)
    }

    fn note_reached(&self, away: bool) {
        self.away.store(away, Ordering::Release);
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

fn is_away(error: &CatalogError) -> bool {
    matches!(error, CatalogError::Store(Error::Unavailable { .. }))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use uuid::Uuid;

    use super::*;
    use crate::catalog::Namespace;
    use crate::faulty::{FaultyStore, soon};

    fn pointer(location: &str) -> TablePointer {
        TablePointer { uuid: Uuid::new_v4(), metadata_location: location.into(), previous_location: None }
    }

    struct Setup {
        store: Arc<FaultyStore>,
        catalog: Catalog,
        cache: PointerCache,
        tables: Vec<TableIdent>,
    }

    /// Tables a and b, nothing cached.
    async fn setup(store: FaultyStore, config: CacheConfig) -> Setup {
        let store = Arc::new(store);
        let catalog = Catalog::new(store.clone());
        let namespace: Namespace = "n".parse().unwrap();
        catalog.create_namespace(&namespace, BTreeMap::new(), soon()).await.unwrap();
        let tables: Vec<_> = ["a", "b"].iter().map(|n| TableIdent::new(namespace.clone(), *n).unwrap()).collect();
        for t in &tables {
            catalog.create_table(t, &pointer("1"), soon()).await.unwrap();
        }
        let cache = PointerCache::new(store.clone(), config);
        Setup { store, catalog, cache, tables }
    }

    impl Setup {
        /// Another process's change; the revision.
        async fn swap(&self, at: usize, location: &str) -> Versioned<TablePointer> {
            let now = self.catalog.load_table(&self.tables[at], soon()).await.unwrap().unwrap();
            let next = pointer(location);
            self.catalog.swap_table(&self.tables[at], now.mod_revision, &next, None, soon()).await.unwrap()
        }

        async fn resolve(&self, tables: &[TableIdent]) -> Vec<Resolved> {
            self.cache.resolve(tables, Want::by(soon())).await.unwrap()
        }

        /// Calls for a table's sake.
        fn loads(&self) -> u64 {
            let counters = self.cache.counters();
            [Reason::Miss, Reason::Expired, Reason::Refresh, Reason::Moment].iter().map(|r| counters.calls(*r)).sum()
        }
    }

    fn location(resolved: &Resolved) -> &str {
        resolved.pointer().map_or("none", |pointer| &pointer.value.metadata_location)
    }

    #[tokio::test(start_paused = true)]
    async fn a_fresh_pointer_needs_no_call_and_a_missing_table_is_cached_too() {
        let s = setup(FaultyStore::default(), CacheConfig::default()).await;
        let missing = TableIdent::new(s.tables[0].namespace.clone(), "missing").unwrap();
        for _ in 0..3 {
            let r = s.resolve(&[s.tables[0].clone(), missing.clone()]).await;
            assert_eq!((location(&r[0]), location(&r[1])), ("1", "none"));
        }
        assert_eq!(s.loads(), 1);
        tokio::time::advance(CacheConfig::default().absent_for).await;
        assert!(s.cache.cached(&s.tables[0]).is_some() && s.cache.cached(&missing).is_none());
        let counters = s.cache.counters();
        assert_eq!((counters.hits, counters.misses), (5, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn two_pointers_of_different_moments_are_read_again_together() {
        let s = setup(FaultyStore::default(), CacheConfig::default()).await;
        s.resolve(&s.tables[..1]).await;
        s.swap(1, "2").await;
        // b, loaded now, changed after a was read: one more read settles both.
        for _ in 0..2 {
            assert_eq!(location(&s.resolve(&s.tables).await[1]), "2");
            assert_eq!(s.loads(), 3);
        }
        assert_eq!(s.cache.counters().calls(Reason::Moment), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_pointer_is_used_and_marked_while_metasrv_is_away_up_to_the_limit() {
        let config = CacheConfig { stale_limit: Duration::from_secs(60), ..CacheConfig::default() };
        let s = setup(FaultyStore::default(), config).await;
        assert!(!s.resolve(&s.tables).await[0].metasrv_away);
        s.store.away.store(true, Ordering::SeqCst);
        tokio::time::advance(config.fresh_for).await;
        let old = s.resolve(&s.tables).await;
        assert!(old.iter().all(|r| r.metasrv_away && r.pointer().is_some() && r.age >= config.fresh_for));
        assert_eq!(s.cache.counters().stale, 2);
        let unknown = TableIdent::new(s.tables[0].namespace.clone(), "c").unwrap();
        let at_once = Want::by(clock::now() + Duration::from_millis(50));
        assert!(s.cache.get(&unknown, at_once).await.is_err());
        tokio::time::advance(config.stale_limit).await;
        let error = s.cache.get(&s.tables[0], Want::by(soon())).await.unwrap_err();
        assert!(matches!(error, CatalogError::TooOld { .. }), "{error}");

        s.store.away.store(false, Ordering::SeqCst);
        s.swap(0, "back").await;
        let r = s.resolve(&s.tables[..1]).await.remove(0);
        assert_eq!((location(&r), r.metasrv_away), ("back", false));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_committed_here_is_seen_and_never_replaced_by_something_older() {
        let s = setup(FaultyStore::default(), CacheConfig::default()).await;
        let old = s.resolve(&s.tables[..1]).await[0].pointer().unwrap().clone();
        let began = clock::now();
        let new = s.swap(0, "2").await;
        s.cache.note_committed(&s.tables[0], new.clone(), began);
        s.cache.note_committed(&s.tables[0], old, began);
        assert_eq!(location(&s.cache.cached(&s.tables[0]).unwrap()), "2");
        assert_eq!(s.cache.seen(), new.mod_revision);
        let gone = s.catalog.drop_table(&s.tables[0], new.mod_revision, soon()).await.unwrap();
        s.cache.note_dropped(&s.tables[0], gone, began);
        assert_eq!(location(&s.resolve(&s.tables[..1]).await[0]), "none");
    }

    #[tokio::test(start_paused = true)]
    async fn what_another_node_has_seen_is_waited_for() {
        let s = setup(FaultyStore::default(), CacheConfig::default()).await;
        s.resolve(&s.tables).await;
        let changed = s.swap(0, "2").await.mod_revision;
        assert_eq!(location(&s.cache.cached(&s.tables[0]).unwrap()), "1");
        let want = Want::by(soon()).at_least(changed);
        assert_eq!(location(&s.cache.get(&s.tables[0], want).await.unwrap()), "2");
        // A revision that nobody has heard of fails the one who asks for it, and nobody else.
        let error = s.cache.get(&s.tables[0], Want::by(soon()).at_least(1000)).await.unwrap_err();
        assert!(matches!(error, CatalogError::Behind { seen: 1000, .. }), "{error}");
        assert_eq!(location(&s.resolve(&s.tables).await[0]), "2");
    }

    #[tokio::test(start_paused = true)]
    async fn the_watch_brings_changes_and_one_confirmation_renews_every_entry() {
        let store = FaultyStore::default();
        store.watches.store(true, Ordering::SeqCst);
        let s = setup(store, CacheConfig::default()).await;
        let mut version = s.cache.subscribe();
        // The watch begins after what there is.
        while !s.cache.shared.cover().live {
            tokio::task::yield_now().await;
        }
        s.resolve(&s.tables).await;
        let changed = s.swap(0, "2").await.mod_revision;
        version.wait_for(|known| *known >= changed).await.unwrap();
        assert_eq!(location(&s.cache.cached(&s.tables[0]).unwrap()), "2");
        for _ in 0..10 {
            tokio::time::advance(Duration::from_millis(600)).await;
            let before = s.cache.counters().calls(Reason::Confirm);
            assert!(s.resolve(&s.tables).await.iter().all(|r| !r.metasrv_away && r.valid_through >= changed));
            while s.cache.counters().calls(Reason::Confirm) == before
                || s.cache.shared.confirming.load(Ordering::SeqCst)
            {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(s.loads(), 1, "{:?}", s.cache.counters());
        assert_eq!(s.cache.counters().told, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_who_miss_ask_once() {
        let s = setup(FaultyStore::default(), CacheConfig::default()).await;
        let asking = (0..1000).map(|_| s.cache.get(&s.tables[0], Want::by(soon())));
        for resolved in futures::future::join_all(asking).await {
            assert_eq!(location(&resolved.unwrap()), "1");
        }
        assert_eq!(s.loads(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_doubted_is_asked_for_and_used_only_while_metasrv_is_away() {
        let s = setup(FaultyStore::default(), CacheConfig::default()).await;
        s.resolve(&s.tables).await;
        s.swap(0, "2").await;
        s.cache.invalidate(&s.tables[0]);
        assert!(s.cache.cached(&s.tables[0]).is_none() && s.cache.cached(&s.tables[1]).is_some());
        s.store.away.store(true, Ordering::SeqCst);
        let old = s.resolve(&s.tables[..1]).await.remove(0);
        assert_eq!((location(&old), old.metasrv_away), ("1", true));
        s.store.away.store(false, Ordering::SeqCst);
        // Asking found out that it was away, and it takes a question to find out that it is back.
        while s.resolve(&s.tables[..1]).await[0].metasrv_away {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(location(&s.cache.cached(&s.tables[0]).unwrap()), "2");
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_waited_for_is_not_taken_back_while_metasrv_is_away() {
        let store = FaultyStore::default();
        store.watches.store(true, Ordering::SeqCst);
        let s = setup(store, CacheConfig::default()).await;
        s.resolve(&s.tables[..1]).await;
        let changed = s.swap(0, "2").await.mod_revision;
        s.cache.wait_for_version(changed, soon()).await.unwrap();
        // What is cached is from before the watch began anew: nothing says that it is current at that revision.
        let old = Entry::new(None, changed - 1, clock::now());
        s.cache.shared.update_cover(|cover| *cover = Cover::default());
        s.cache.shared.entries.insert(s.tables[0].clone(), Arc::new(old));
        s.store.away.store(true, Ordering::SeqCst);
        let want = Want::by(clock::now() + Duration::from_secs(10));
        let error = s.cache.get(&s.tables[0], want).await.unwrap_err();
        assert!(is_away(&error), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_doubt_stays_until_what_is_cached_was_read_after_it() {
        let store = FaultyStore::default();
        store.watches.store(true, Ordering::SeqCst);
        let s = setup(store, CacheConfig::default()).await;
        while !s.cache.shared.cover().live {
            tokio::task::yield_now().await;
        }
        s.resolve(&s.tables).await;
        let began = clock::now();
        let first = s.swap(0, "2").await;
        tokio::time::advance(Duration::from_millis(1)).await;
        s.cache.invalidate(&s.tables[0]);
        // Both are of before the doubt: what a commit left that began before it, and what the watch tells late.
        s.cache.note_committed(&s.tables[0], first.clone(), began);
        assert!(s.cache.cached(&s.tables[0]).is_none());
        s.cache.wait_for_version(first.mod_revision, soon()).await.unwrap();
        assert!(s.cache.cached(&s.tables[0]).is_none());
        assert_eq!(location(&s.resolve(&s.tables[..1]).await[0]), "2");
        assert!(s.cache.cached(&s.tables[0]).is_some(), "it was read after the doubt");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_thousand_who_miss_at_the_same_time_ask_once() {
        let store = FaultyStore::default();
        store.slow_reads.store(true, Ordering::SeqCst);
        // They are fresh for as long as it takes.
        let minute = Duration::from_secs(60);
        let config = CacheConfig { refresh_after: minute, fresh_for: minute, ..CacheConfig::default() };
        let s = setup(store, config).await;
        for _ in 0..20 {
            s.cache.evict(&s.tables[0]);
            let before = s.loads();
            let asking: Vec<_> = (0..1000)
                .map(|_| {
                    let (cache, table) = (s.cache.clone(), s.tables[0].clone());
                    tokio::spawn(async move { cache.get(&table, Want::by(soon())).await })
                })
                .collect();
            for resolved in futures::future::join_all(asking).await {
                assert_eq!(location(&resolved.unwrap().unwrap()), "1");
            }
            assert_eq!(s.loads() - before, 1);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn what_is_shown_beside_a_writer_is_what_was_there_at_its_revision() {
        let store = FaultyStore::default();
        store.watches.store(true, Ordering::SeqCst);
        // It is fresh for as long as it takes.
        let minute = Duration::from_secs(60);
        let config = CacheConfig { refresh_after: minute, fresh_for: minute, ..CacheConfig::default() };
        let s = setup(store, config).await;
        while !s.cache.shared.cover().live {
            tokio::task::yield_now().await;
        }
        s.resolve(&s.tables[..1]).await;
        let written = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..4)
            .map(|_| {
                let (cache, table, written) = (s.cache.clone(), s.tables[0].clone(), written.clone());
                tokio::task::spawn_blocking(move || {
                    let mut shown = BTreeSet::new();
                    while !written.load(Ordering::SeqCst) {
                        let resolved = cache.cached(&table).expect("it is cached and fresh");
                        let since = resolved.pointer().expect("it is there").mod_revision;
                        shown.insert((since, resolved.valid_through));
                    }
                    shown
                })
            })
            .collect();
        let mut changes = Vec::new();
        for n in 0..2000 {
            changes.push(s.swap(0, &n.to_string()).await.mod_revision);
        }
        s.cache.wait_for_version(*changes.last().expect("there are some"), soon()).await.unwrap();
        written.store(true, Ordering::SeqCst);
        for reader in readers {
            for (since, through) in reader.await.unwrap() {
                let next = changes.iter().find(|change| **change > since);
                assert!(next.is_none_or(|next| *next > through), "of {since}, and said to be so at {through}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_tables_are_held_than_may_be() {
        let config = CacheConfig { max_tables: 10, ..CacheConfig::default() };
        let s = setup(FaultyStore::default(), config).await;
        let namespace = s.tables[0].namespace.clone();
        let tables: Vec<_> = (0..1000).map(|n| TableIdent::new(namespace.clone(), format!("t{n}")).unwrap()).collect();
        assert!(s.resolve(&tables).await.iter().all(|r| r.pointer().is_none()));
        assert!(s.cache.len() <= config.max_tables, "{}", s.cache.len());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_used_is_renewed_before_it_is_too_old() {
        // Nothing is told here: watches are refused.
        let config = CacheConfig::default();
        let s = setup(FaultyStore::default(), config).await;
        s.resolve(&s.tables[..1]).await;
        for _ in 0..4 {
            tokio::time::advance(config.refresh_after).await;
            let before = s.cache.counters().calls(Reason::Refresh);
            assert!(s.cache.cached(&s.tables[0]).is_some());
            while s.cache.counters().calls(Reason::Refresh) == before || !s.cache.shared.lock().is_idle() {
                tokio::task::yield_now().await;
            }
        }
        let counters = s.cache.counters();
        assert_eq!((counters.calls(Reason::Refresh), counters.calls(Reason::Expired)), (4, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn closing_ends_every_task_and_what_is_cached_stays() {
        let store = FaultyStore::default();
        store.watches.store(true, Ordering::SeqCst);
        let s = setup(store, CacheConfig::default()).await;
        s.resolve(&s.tables).await;
        s.cache.close().await;
        assert_eq!(s.cache.shared.tasks.len(), 0);
        assert!(s.cache.cached(&s.tables[0]).is_some());
        tokio::time::advance(CacheConfig::default().fresh_for).await;
        assert!(s.resolve(&s.tables).await[0].metasrv_away, "it is old, and says so");
    }
}
