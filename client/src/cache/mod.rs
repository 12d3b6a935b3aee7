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
//! `max_tables` entries, dropped after `keep_for` without use. Loads: one per table, or per set of tables that are wanted as
//! of one moment, for those who can share it (who wants a revision that nobody here has seen shares with those who want it,
//! too), each ended by `away_patience`; one confirmation, one renewal of up to 256 tables at a time, [`RENEWALS_WAITING`] waiting. All tasks
//! are the cache's and end with it ([`PointerCache::close`], or its last handle).
//!
//! Without `watch` it works as said, each table being renewed by itself. Where revisions are each key's own (a store without
//! `consistent_listing`: library mode) nothing says until when a pointer is current, or of which moment several are: nothing is
//! cached there, and each question is a read of its tables as they are now.

pub mod counters;
mod cover;
mod ledger;
mod load;
#[cfg(test)]
mod model;
mod sync;
#[cfg(test)]
mod tests;

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
use crate::store::{Error, ReadOptions, SharedStore};
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
    /// The store's revisions are its own; else nothing is cached.
    caches: bool,
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
    pub fn new(store: SharedStore, config: CacheConfig) -> Self {
        Self::build(store, config, Arc::default(), rand::rng().random())
    }

    /// Counts where somebody else may count as well, and waits as the seed says.
    pub(crate) fn build(store: SharedStore, config: CacheConfig, counting: Arc<Counting>, seed: u64) -> Self {
        let (renewals, wanted) = mpsc::channel(RENEWALS_WAITING);
        let ledger = Ledger::default();
        let shared = Arc::new(Shared {
            catalog: Catalog::new(store.clone()),
            caches: store.capabilities().consistent_listing,
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
        // Before the cover, whose progress has come so far.
        let least = shared.least(min_revision);
        // Before the entry: that holds every change up to this cover's progress.
        let cover = shared.cover();
        let known = cover.know(shared.entries.get(table)?);
        let now = clock::now();
        if !shared.fits(&known, now, least) {
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
        if !shared.caches {
            return shared.read(tables, want).await;
        }
        let began = clock::now();
        // They have been found to be of several moments.
        let mut together = false;
        let mut waited = false;
        let mut behind = None;
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
    /// `Unavailable` if that is not so by the deadline. `Refused` where revisions are each key's own.
    pub async fn wait_for_version(&self, revision: Revision, deadline: Instant) -> Result<Revision, CatalogError> {
        let began = clock::now();
        if !self.shared.caches {
            let why = "this store has no revision of its own; what is read is as it is now";
            return Err(Error::cannot(format!("waiting for revision {revision}"), why).into());
        }
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

    /// The revision at which whatever is shown must be current.
    fn least(&self, min_revision: Revision) -> Revision {
        min_revision.max(self.required.load(Ordering::Acquire))
    }

    /// Whether a query that began then may get this.
    fn fits(&self, known: &Known, began: Instant, least: Revision) -> bool {
        let bound = match known.entry.pointer {
            Some(_) => self.config.fresh_for,
            None => self.config.absent_for,
        };
        let age = began.saturating_duration_since(known.as_of);
        known.entry.doubted.is_none() && known.through >= least && (age < bound || age.is_zero())
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

    /// The table's state at `revision`, and since `since` if that is known, by a commit or read that began at `at`.
    fn note(
        &self,
        table: &TableIdent,
        since: Option<Revision>,
        revision: Revision,
        pointer: Option<Versioned<TablePointer>>,
        at: Instant,
    ) {
        if !self.caches {
            return;
        }
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
        if self.caches && revision > self.seen.load(Ordering::Acquire) {
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
