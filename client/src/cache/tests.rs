//! The cache over a store in memory whose faults are switched on one by one.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use super::counters::Reason;
use super::resolve::is_away;
use super::*;
use crate::catalog::Namespace;
use crate::faulty::{FaultyStore, soon, until};

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
async fn a_store_that_is_behind_is_not_away_though_the_last_look_comes_too_late() {
    let store = FaultyStore::default();
    store.slow_reads.store(true, Ordering::SeqCst);
    let config = CacheConfig::default();
    let s = setup(store, config).await;
    // Each is one load; in some of them its time is over in the middle of a look.
    for _ in 0..60 {
        let by = clock::now() + config.away_patience + Duration::from_millis(20);
        let error = s.cache.get(&s.tables[0], Want::by(by).at_least(1000)).await.unwrap_err();
        assert!(matches!(error, CatalogError::Behind { seen: 1000, .. }), "{error}");
        assert!(!s.cache.shared.is_away(), "it has answered all the time");
    }
}

#[tokio::test(start_paused = true)]
async fn the_watch_brings_changes_and_one_confirmation_renews_every_entry() {
    let store = FaultyStore::default();
    store.watches.store(true, Ordering::SeqCst);
    let s = setup(store, CacheConfig::default()).await;
    let mut version = s.cache.subscribe();
    // The watch begins after what there is.
    until("the watch to begin", || s.cache.shared.cover().live).await;
    s.resolve(&s.tables).await;
    let changed = s.swap(0, "2").await.mod_revision;
    version.wait_for(|known| *known >= changed).await.unwrap();
    assert_eq!(location(&s.cache.cached(&s.tables[0]).unwrap()), "2");
    for _ in 0..10 {
        tokio::time::advance(Duration::from_millis(600)).await;
        let before = s.cache.counters().calls(Reason::Confirm);
        assert!(s.resolve(&s.tables).await.iter().all(|r| !r.metasrv_away && r.valid_through >= changed));
        let confirmed =
            || s.cache.counters().calls(Reason::Confirm) > before && !s.cache.shared.confirming.load(Ordering::SeqCst);
        until("a confirmation", confirmed).await;
    }
    assert_eq!(s.loads(), 1, "{:?}", s.cache.counters());
    assert_eq!(s.cache.counters().told, 1);
    // Nobody confirms what nobody uses: after a pause the first table that is asked for is read, which confirms the others.
    tokio::time::advance(CacheConfig::default().fresh_for).await;
    assert!(s.cache.cached(&s.tables[1]).is_none());
    s.resolve(&s.tables[..1]).await;
    assert!(s.cache.cached(&s.tables[1]).is_some());
    assert_eq!((s.loads(), s.cache.counters().calls(Reason::Expired)), (2, 1));
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
    let by = soon();
    while s.resolve(&s.tables[..1]).await[0].metasrv_away {
        assert!(clock::now() < by, "it is not noticed to be back");
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
    until("the watch to begin", || s.cache.shared.cover().live).await;
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
async fn a_thousand_who_want_what_another_node_has_seen_ask_once_or_twice() {
    let store = FaultyStore::default();
    store.slow_reads.store(true, Ordering::SeqCst);
    let minute = Duration::from_secs(60);
    let config = CacheConfig { refresh_after: minute, fresh_for: minute, ..CacheConfig::default() };
    let s = setup(store, config).await;
    let ask = async |tables: &[TableIdent], min_revision| {
        let before = s.loads();
        let asking: Vec<_> = (0..1000)
            .map(|_| {
                let (cache, tables) = (s.cache.clone(), tables.to_vec());
                let want = Want::by(soon()).at_least(min_revision);
                tokio::spawn(async move { cache.resolve(&tables, want).await })
            })
            .collect();
        for resolved in futures::future::join_all(asking).await {
            resolved.unwrap().unwrap();
        }
        s.loads() - before
    };
    for n in 0..10 {
        s.resolve(&s.tables).await;
        let changed = s.swap(0, &format!("{n}")).await.mod_revision;
        // Who comes when that has been seen begins another one, for once.
        let asked = ask(&s.tables[..1], changed).await;
        assert!((1..=2).contains(&asked), "{asked} loads of one table");
        // b is of an earlier moment than a: they are read together.
        let committed = s.swap(0, &format!("{n} here")).await;
        s.cache.note_committed(&s.tables[0], committed, clock::now());
        let asked = ask(&s.tables, 0).await;
        assert!((1..=2).contains(&asked), "{asked} loads of both");
    }
    assert!(s.cache.shared.lock().is_idle());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_shown_beside_a_writer_is_what_was_there_at_its_revision() {
    let store = FaultyStore::default();
    store.watches.store(true, Ordering::SeqCst);
    // It is fresh for as long as it takes.
    let minute = Duration::from_secs(60);
    let config = CacheConfig { refresh_after: minute, fresh_for: minute, ..CacheConfig::default() };
    let s = setup(store, config).await;
    until("the watch to begin", || s.cache.shared.cover().live).await;
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
        let changed = s.swap(0, &n.to_string()).await.mod_revision;
        changes.push(changed);
        // A watch that falls behind by more changes than the store keeps begins anew, and then tells of none of them.
        if n % 400 == 399 {
            s.cache.wait_for_version(changed, soon()).await.unwrap();
        }
    }
    written.store(true, Ordering::SeqCst);
    for reader in readers {
        for (since, through) in reader.await.unwrap() {
            let next = changes.iter().find(|change| **change > since);
            assert!(next.is_none_or(|next| *next > through), "of {since}, and said to be so at {through}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hit_waits_for_nobody() {
    // It is fresh for as long as it takes.
    let minute = Duration::from_secs(60);
    let config = CacheConfig { refresh_after: minute, fresh_for: minute, ..CacheConfig::default() };
    let s = setup(FaultyStore::default(), config).await;
    s.resolve(&s.tables).await;
    let (cache, table) = (s.cache.clone(), s.tables[0].clone());
    let (tell, told) = std::sync::mpsc::channel();
    // Whoever changes something of what is cached holds this meanwhile.
    let held = s.cache.shared.lock();
    std::thread::spawn(move || tell.send(cache.cached(&table).is_some()));
    assert_eq!(told.recv_timeout(minute), Ok(true));
    drop(held);
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
        let renewed = || s.cache.counters().calls(Reason::Refresh) > before && s.cache.shared.lock().is_idle();
        until("a renewal", renewed).await;
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
