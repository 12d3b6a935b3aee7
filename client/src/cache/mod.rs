//! Table pointers, cached: in the steady state a query needs no metadata call, and no table costs one.
//!
//! In reading order: `cover` (what is known of an entry, and until when), `ledger` (what may be stored), `load` (one read
//! for all who ask), `resolve` (what a query gets), `sync` (the watch, and how time comes in), [`counters`], and [`PointerCache`]
//! here.
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
mod resolve;
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
use crate::store::{Error, SharedStore};
use counters::{Counters, Counting, count};
use cover::{Cover, Entry, Known};
use ledger::Ledger;

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

    fn want_confirmation(&self) {
        if !self.confirming.load(Ordering::Relaxed) && !self.confirming.swap(true, Ordering::AcqRel) {
            count(&self.counting.refreshes);
            self.confirm_wanted.notify_one();
        }
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
