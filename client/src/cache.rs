//! Table pointers, cached: in the steady state a query needs no metadata call.
//!
//! An entry is one table's pointer (or its absence) with the revision it was read at and when. By its age:
//!
//! | age                          | a query gets                                                                    |
//! |------------------------------|---------------------------------------------------------------------------------|
//! | up to `refresh_after`        | the entry                                                                       |
//! | up to `fresh_for`            | the entry; one load in the background renews it                                 |
//! | older                        | a load, one per key however many ask; the entry if metasrv cannot be reached    |
//!
//! Tables in use are thus renewed before anybody waits for them. While metasrv is away, the first query waits
//! `away_patience`; those that follow get the old entry at once, and one load at a time in the background finds out
//! when it is back. Such answers say so ([`Resolved::metasrv_away`]).
//!
//! Never back in time: an entry is replaced only by one read at a later revision. Bounds: `max_tables` entries, dropped
//! after `keep_for` without use; background loads run one per key and end by `away_patience`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lake_proto::kv::Revision;
use moka::future::Cache;

use crate::catalog::{Catalog, CatalogError, TableIdent, TablePointer, Versioned};
use crate::clock;

/// How long the outcome of a load may be handed to those who ask next, should its caller have gone before removing it.
const LOAD_KEPT: Duration = Duration::from_millis(1);

/// The pause before a load that ended with another caller's deadline is made again.
const LOAD_PAUSE: Duration = Duration::from_millis(20);

/// Bounds and ages of a [`PointerCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheConfig {
    /// Most tables held.
    pub max_tables: u64,
    /// From this age on, use renews an entry in the background.
    pub refresh_after: Duration,
    /// From this age on, a query waits for the renewal.
    pub fresh_for: Duration,
    /// Entries not used for this long are dropped.
    pub keep_for: Duration,
    /// How long a query waits for metasrv before it takes an old entry.
    pub away_patience: Duration,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            max_tables: 100_000,
            refresh_after: Duration::from_millis(500),
            fresh_for: Duration::from_secs(1),
            keep_for: Duration::from_secs(24 * 3600),
            away_patience: Duration::from_secs(2),
        }
    }
}

/// A table's pointer as a query should use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// `None`: there is no such table.
    pub pointer: Option<Versioned<TablePointer>>,
    /// How long ago it was read from metasrv.
    pub age: Duration,
    /// It is older than it should be, because metasrv could not be reached.
    pub metasrv_away: bool,
}

#[derive(Debug)]
struct Entry {
    pointer: Option<Versioned<TablePointer>>,
    /// The revision it was read at, or written at.
    valid_through: Revision,
    read_at: Instant,
    refreshing: AtomicBool,
}

/// Table pointers of one catalog, cached. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PointerCache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    catalog: Catalog,
    config: CacheConfig,
    entries: Cache<TableIdent, Arc<Entry>>,
    /// Loads under way. What they bring is kept in `entries`, which takes only what is later than what it has.
    loads: Cache<TableIdent, Arc<Entry>>,
    /// Since when metasrv has not been reached; `None` while it is there.
    away_since: Mutex<Option<Instant>>,
}

impl PointerCache {
    pub fn new(catalog: Catalog, config: CacheConfig) -> Self {
        let entries = Cache::builder().max_capacity(config.max_tables).time_to_idle(config.keep_for).build();
        let loads = Cache::builder().max_capacity(config.max_tables).time_to_live(LOAD_KEPT).build();
        Self { inner: Arc::new(Inner { catalog, config, entries, loads, away_since: Mutex::new(None) }) }
    }

    /// The pointers of the tables of one query, all of one moment: if those cached cannot be shown to be, one read
    /// fetches them together. While metasrv is away the cached ones are returned as they are, and say so.
    ///
    /// # Errors
    /// The catalog's, for tables that are not cached.
    pub async fn resolve(&self, tables: &[TableIdent], deadline: Instant) -> Result<Vec<Resolved>, CatalogError> {
        let mut entries = Vec::with_capacity(tables.len());
        for table in tables {
            entries.push(self.inner.entry(table, deadline).await?);
        }
        let changed = entries.iter().filter_map(|(e, _)| e.pointer.as_ref()).map(|p| p.mod_revision).max();
        let known = entries.iter().map(|(e, _)| e.valid_through).min();
        let one_moment = changed.unwrap_or(0) <= known.unwrap_or(0);
        if !one_moment && !entries.iter().any(|(_, away)| *away) {
            match self.inner.load(tables, self.inner.patience(deadline)).await {
                Ok(loaded) => entries = loaded.into_iter().map(|e| (e, false)).collect(),
                Err(e) if is_away(&e) => entries.iter_mut().for_each(|(_, away)| *away = true),
                Err(e) => return Err(e),
            }
        }
        let now = clock::now();
        Ok(entries
            .into_iter()
            .map(|(e, metasrv_away)| Resolved {
                pointer: e.pointer.clone(),
                age: now.saturating_duration_since(e.read_at),
                metasrv_away,
            })
            .collect())
    }

    /// This process committed `pointer`: later queries here see it.
    pub async fn note_committed(&self, table: &TableIdent, pointer: Versioned<TablePointer>) {
        let valid_through = pointer.valid_through;
        self.inner.store(table, Some(pointer), valid_through, clock::now()).await;
    }

    /// This process dropped the table, or found that what is cached is no longer so: the next query asks metasrv.
    pub async fn note_dropped(&self, table: &TableIdent) {
        self.inner.entries.invalidate(table).await;
    }
}

impl Inner {
    /// A table's entry, and whether it is old because metasrv is away.
    async fn entry(
        self: &Arc<Self>,
        table: &TableIdent,
        deadline: Instant,
    ) -> Result<(Arc<Entry>, bool), CatalogError> {
        let Some(cached) = self.entries.get(table).await else {
            return Ok((self.load_patiently(table, deadline).await?, false));
        };
        let age = clock::since(cached.read_at);
        if age < self.config.refresh_after {
            return Ok((cached, false));
        }
        if age < self.config.fresh_for {
            self.refresh_in_background(table, &cached);
            return Ok((cached, false));
        }
        if self.is_away() {
            self.refresh_in_background(table, &cached);
            return Ok((cached, true));
        }
        match self.load_once(table, self.patience(deadline)).await {
            Ok(loaded) => Ok((loaded, false)),
            Err(e) if is_away(&e) => Ok((cached, true)),
            Err(e) => Err(e),
        }
    }

    /// Loads a table that is not cached, for as long as the deadline allows.
    async fn load_patiently(&self, table: &TableIdent, deadline: Instant) -> Result<Arc<Entry>, CatalogError> {
        loop {
            // The load may be another caller's, and end by that one's deadline.
            match self.load_once(table, deadline).await {
                Err(e) if is_away(&e) && clock::now() + LOAD_PAUSE < deadline => {
                    tokio::time::sleep(LOAD_PAUSE).await;
                }
                other => return other,
            }
        }
    }

    /// Loads a table, once for all who ask while it is under way.
    async fn load_once(&self, table: &TableIdent, deadline: Instant) -> Result<Arc<Entry>, CatalogError> {
        let load = async { self.load(std::slice::from_ref(table), deadline).await.map(|mut e| e.swap_remove(0)) };
        let loaded = self.loads.try_get_with(table.clone(), load).await.map_err(|e| CatalogError::clone(&e));
        self.loads.invalidate(table).await;
        loaded
    }

    fn refresh_in_background(self: &Arc<Self>, table: &TableIdent, entry: &Arc<Entry>) {
        if entry.refreshing.swap(true, Ordering::AcqRel) {
            return;
        }
        // Detached, but bounded: one per entry, and it ends by the patience.
        let (inner, table, entry) = (self.clone(), table.clone(), entry.clone());
        tokio::spawn(async move {
            let deadline = clock::now() + inner.config.away_patience;
            if let Err(error) = inner.load_once(&table, deadline).await {
                tracing::debug!(%table, %error, "renewing a cached pointer failed");
            }
            entry.refreshing.store(false, Ordering::Release);
        });
    }

    /// Loads tables at one revision and caches them.
    async fn load(&self, tables: &[TableIdent], deadline: Instant) -> Result<Vec<Arc<Entry>>, CatalogError> {
        // The age counts from before the read: what it returns was current then, and perhaps not any more now.
        let read_at = clock::now();
        let loaded = self.catalog.load_tables(tables, deadline).await;
        self.note_reached(&loaded);
        let (revision, pointers) = loaded?;
        let mut entries = Vec::with_capacity(tables.len());
        for (table, pointer) in tables.iter().zip(pointers) {
            self.store(table, pointer.clone(), revision, read_at).await;
            let refreshing = AtomicBool::new(false);
            entries.push(Arc::new(Entry { pointer, valid_through: revision, read_at, refreshing }));
        }
        Ok(entries)
    }

    /// Caches what was read at `valid_through`, unless something later is cached already.
    async fn store(
        &self,
        table: &TableIdent,
        pointer: Option<Versioned<TablePointer>>,
        valid_through: Revision,
        read_at: Instant,
    ) {
        let entry = Arc::new(Entry { pointer, valid_through, read_at, refreshing: AtomicBool::new(false) });
        self.entries
            .entry(table.clone())
            .and_compute_with(|old| {
                let later = old.is_none_or(|o| o.value().valid_through <= valid_through);
                std::future::ready(match later {
                    true => moka::ops::compute::Op::Put(entry),
                    false => moka::ops::compute::Op::Nop,
                })
            })
            .await;
    }

    fn patience(&self, deadline: Instant) -> Instant {
        deadline.min(clock::now() + self.config.away_patience)
    }

    fn is_away(&self) -> bool {
        self.away_since.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn note_reached<T>(&self, answer: &Result<T, CatalogError>) {
        let mut away = self.away_since.lock().unwrap_or_else(PoisonError::into_inner);
        match answer {
            Err(e) if is_away(e) => {
                away.get_or_insert_with(clock::now);
            }
            _ => *away = None,
        }
    }
}

fn is_away(error: &CatalogError) -> bool {
    matches!(error, CatalogError::Store(e) if e.is_unavailable())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use uuid::Uuid;

    use super::*;
    use crate::catalog::Namespace;
    use crate::faulty::{FaultyStore, soon};

    fn pointer(location: &str) -> TablePointer {
        TablePointer { uuid: Uuid::new_v4(), metadata_location: location.into(), previous_location: None }
    }

    async fn setup(config: CacheConfig) -> (Arc<FaultyStore>, Catalog, PointerCache, Vec<TableIdent>) {
        let store = Arc::new(FaultyStore::default());
        let catalog = Catalog::new(store.clone());
        let namespace: Namespace = "n".parse().unwrap();
        catalog.create_namespace(&namespace, BTreeMap::new(), soon()).await.unwrap();
        let tables: Vec<_> = ["a", "b"].iter().map(|n| TableIdent::new(namespace.clone(), *n).unwrap()).collect();
        for t in &tables {
            catalog.create_table(t, &pointer("1"), soon()).await.unwrap();
        }
        let cache = PointerCache::new(catalog.clone(), config);
        store.calls.store(0, Ordering::SeqCst);
        (store, catalog, cache, tables)
    }

    #[tokio::test]
    async fn a_fresh_pointer_needs_no_call_and_a_missing_table_is_cached_too() {
        let (store, _, cache, tables) = setup(CacheConfig::default()).await;
        let missing = TableIdent::new(tables[0].namespace.clone(), "missing").unwrap();
        for _ in 0..3 {
            let r = cache.resolve(&[tables[0].clone(), missing.clone()], soon()).await.unwrap();
            assert!(r[0].pointer.is_some() && r[1].pointer.is_none());
        }
        assert_eq!(store.calls.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn two_pointers_of_different_moments_are_read_again_together() {
        let (store, catalog, cache, tables) = setup(CacheConfig::default()).await;
        cache.resolve(&tables[..1], soon()).await.unwrap();
        let b = catalog.load_table(&tables[1], soon()).await.unwrap().unwrap();
        catalog.swap_table(&tables[1], b.mod_revision, &pointer("2"), None, soon()).await.unwrap();
        store.calls.store(0, Ordering::SeqCst);
        // b, loaded now, changed after a was read: one more read settles both.
        let both = cache.resolve(&tables, soon()).await.unwrap();
        assert_eq!(both[1].pointer.as_ref().unwrap().value.metadata_location, "2");
        assert_eq!(store.calls.load(Ordering::SeqCst), 2);
        cache.resolve(&tables, soon()).await.unwrap();
        assert_eq!(store.calls.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn an_old_pointer_is_used_and_marked_while_metasrv_is_away() {
        let config = CacheConfig { refresh_after: Duration::ZERO, fresh_for: Duration::ZERO, ..CacheConfig::default() };
        let (store, catalog, cache, tables) = setup(config).await;
        assert!(!cache.resolve(&tables, soon()).await.unwrap()[0].metasrv_away);
        store.away.store(true, Ordering::SeqCst);
        assert!(cache.resolve(&tables, soon()).await.unwrap().iter().all(|r| r.metasrv_away && r.pointer.is_some()));
        let unknown = TableIdent::new(tables[0].namespace.clone(), "c").unwrap();
        let at_once = clock::now() + Duration::from_millis(50);
        assert!(cache.resolve(&[unknown], at_once).await.is_err());

        store.away.store(false, Ordering::SeqCst);
        let a = catalog.load_table(&tables[0], soon()).await.unwrap().unwrap();
        catalog.swap_table(&tables[0], a.mod_revision, &pointer("back"), None, soon()).await.unwrap();
        let deadline = soon();
        loop {
            let r = cache.resolve(&tables[..1], soon()).await.unwrap().remove(0);
            if r.pointer.unwrap().value.metadata_location == "back" {
                assert!(!r.metasrv_away);
                break;
            }
            assert!(clock::now() < deadline, "the pointer was never renewed");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_was_committed_here_is_seen_and_never_replaced_by_something_older() {
        let (_, catalog, cache, tables) = setup(CacheConfig::default()).await;
        let old = catalog.load_table(&tables[0], soon()).await.unwrap().unwrap();
        let new = catalog.swap_table(&tables[0], old.mod_revision, &pointer("2"), None, soon()).await.unwrap();
        cache.note_committed(&tables[0], new.clone()).await;
        cache.note_committed(&tables[0], old).await;
        let seen = cache.resolve(&tables[..1], soon()).await.unwrap().remove(0).pointer.unwrap();
        assert_eq!(seen.value, new.value);
    }
}
