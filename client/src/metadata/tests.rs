//! The metadata of several nodes over one store.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::StreamExt;

use super::writer::TURN_LIMIT;
use super::*;
use crate::cache::counters::Reason;
use crate::faulty::{FaultyStore, soon, until};
use crate::memory::MemoryStore;
use crate::nodes::Record;
use crate::shards::{self, Route, SETTINGS, Settings};
use crate::store::{MetaStore, Token};
use lake_proto::v1::NodeInfo;

fn pointer(location: &str) -> TablePointer {
    TablePointer { uuid: Uuid::nil(), metadata_location: location.to_owned(), previous_location: None }
}

fn table() -> TableIdent {
    TableIdent::new("n".parse().unwrap(), "t").unwrap()
}

/// A node of its own over the store.
async fn node(store: &SharedStore) -> Metadata {
    let metadata = Metadata::new(store.clone(), CacheConfig::default());
    until("its namespaces", || metadata.namespaces().is_some()).await;
    metadata
}

#[tokio::test(start_paused = true)]
async fn what_one_node_does_it_sees_at_once_and_others_are_told() {
    let store = MemoryStore::shared();
    let (one, two) = (node(&store).await, node(&store).await);
    let namespace: Namespace = "n".parse().unwrap();
    one.writer().create_namespace(&namespace, Default::default(), soon()).await.unwrap();
    let created = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
    for metadata in [&one, &two] {
        metadata.wait_for_version(created.mod_revision, soon()).await.unwrap();
        until("the namespace", || metadata.namespaces().unwrap().names.contains(&namespace)).await;
        let resolved = metadata.table(&table(), Want::by(soon())).await.unwrap();
        assert_eq!(resolved.pointer().unwrap().value, pointer("1"));
    }
    let swapped = one.writer().swap_table(&table(), created.mod_revision, &pointer("2"), None, soon()).await.unwrap();
    assert_eq!(one.cached(&table()).unwrap().pointer().unwrap().value, pointer("2"));
    assert_eq!(two.wait_for_version(swapped.mod_revision, soon()).await.unwrap(), two.seen());
    assert_eq!(two.cached(&table()).unwrap().pointer().unwrap().value, pointer("2"));
    let counters = two.counters();
    assert_eq!((counters.calls(Reason::Miss), counters.calls(Reason::Write)), (1, 0));

    let error = two.wait_for_version(1000, clock::now() + Duration::from_secs(1)).await.unwrap_err();
    assert!(error.to_string().contains("told up to revision 3"), "{error}");
    let dropped = two.writer().drop_table(&table(), swapped.mod_revision, soon()).await.unwrap();
    assert_eq!(two.table(&table(), Want::by(soon())).await.unwrap().pointer(), None);
    one.wait_for_version(dropped, soon()).await.unwrap();
    assert_eq!(one.table(&table(), Want::by(soon())).await.unwrap().pointer(), None);
    one.close().await;
    two.close().await;
}

#[tokio::test(start_paused = true)]
async fn how_long_a_call_waits_is_known_until_it_ends() {
    let store = Arc::new(FaultyStore::default());
    let metadata = Metadata::new(store.clone(), CacheConfig::default());
    store.slow_gets.store(true, Ordering::SeqCst);
    let namespace: Namespace = "n".parse().unwrap();
    assert_eq!(metadata.waiting(), None);
    let mut call = Box::pin(metadata.namespace_exists(&namespace, soon()));
    let little = Duration::from_millis(20);
    tokio::time::timeout(little, &mut call).await.unwrap_err();
    let waiting = metadata.waiting().unwrap();
    assert!(waiting >= little && waiting < little * 2, "{waiting:?}");
    assert_eq!(call.await, Ok(false));
    assert_eq!(metadata.waiting(), None);
    // Also one that nobody waits for any more.
    tokio::time::timeout(little, metadata.namespace_exists(&namespace, soon())).await.unwrap_err();
    assert_eq!(metadata.waiting(), None);
}

#[tokio::test(start_paused = true)]
async fn a_change_runs_again_on_what_the_winner_left() {
    let store = MemoryStore::shared();
    let (one, two) = (node(&store).await, node(&store).await);
    one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    one.writer().create_table(&table(), &pointer("a"), soon()).await.unwrap();
    two.table(&table(), Want::by(soon())).await.unwrap();
    let base = one.read_table(&table(), soon()).await.unwrap().unwrap();
    // The watch has not come: what this node has cached is what lost.
    one.writer().swap_table(&table(), base.mod_revision, &pointer("ab"), None, soon()).await.unwrap();
    let mut seen = Vec::new();
    let append = |current: &TablePointer| {
        seen.push(current.metadata_location.clone());
        Ok::<_, String>(Some(pointer(&format!("{}c", current.metadata_location))))
    };
    let changed = two.writer().read_modify_write(&table(), soon(), append).await.unwrap();
    assert_eq!(changed.value, pointer("abc"));
    assert_eq!(seen.last().unwrap(), "ab");
    let refused = two.writer().read_modify_write(&table(), soon(), |_| Err("no")).await.unwrap_err();
    assert_eq!(refused, ModifyError::Refused("no"));
    let kept = two.writer().read_modify_write(&table(), soon(), |_| Ok::<_, String>(None)).await.unwrap();
    assert_eq!(kept.mod_revision, changed.mod_revision);
}

#[tokio::test(start_paused = true)]
async fn a_namespace_is_dropped_with_all_that_is_in_it_and_nothing_of_it_is_seen() {
    let store = MemoryStore::shared();
    let one = node(&store).await;
    let namespace: Namespace = "n".parse().unwrap();
    one.writer().create_namespace(&namespace, Default::default(), soon()).await.unwrap();
    one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
    one.table(&table(), Want::by(soon())).await.unwrap();
    // Something that is none of lake's names.
    store.cas("/lake/table/n/a/b", None, "x".into(), soon()).await.unwrap();
    assert_eq!(one.writer().drop_namespace_and_contents(&namespace, None, soon()).await, Ok(2));
    assert_eq!(one.table(&table(), Want::by(soon())).await.unwrap().pointer(), None);
}

#[tokio::test(start_paused = true)]
async fn what_changes_elsewhere_leaves_the_set_of_namespaces_as_it_is() {
    let store = MemoryStore::shared();
    let one = node(&store).await;
    let at = async |revision: Revision| loop {
        match one.namespaces() {
            Some(namespaces) if namespaces.revision >= revision => return namespaces,
            _ => tokio::task::yield_now().await,
        }
    };
    one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    let before = at(one.seen()).await;
    let created = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
    let after = at(created.mod_revision).await;
    assert!(Arc::ptr_eq(&before.names, &after.names) && after.names.len() == 1);
    one.writer().create_namespace(&"m".parse().unwrap(), Default::default(), soon()).await.unwrap();
    assert_eq!((at(one.seen()).await.names.len(), after.names.len()), (2, 1), "a copy that somebody has stays");
}

#[tokio::test(start_paused = true)]
async fn too_many_namespaces_are_not_kept_and_fewer_are_again() {
    let store = MemoryStore::shared();
    let catalog = Catalog::new(store.clone());
    let copy: Arc<ArcSwapOption<Namespaces>> = Arc::default();
    let names: [Namespace; 3] = ["a", "b", "c"].map(|name| name.parse().unwrap());
    let following = tokio::spawn(copies::follow_at_most(store, copy.clone(), 2));
    let has = async |many: Option<usize>| {
        // Longer than until it is looked at again.
        let by = clock::now() + Duration::from_secs(120);
        while copy.load().as_ref().map(|namespaces| namespaces.names.len()) != many {
            assert!(clock::now() < by, "waited in vain for {many:?} namespaces");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    for (name, many) in names.iter().zip([Some(1), Some(2), None]) {
        catalog.create_namespace(name, Default::default(), soon()).await.unwrap();
        has(many).await;
    }
    catalog.drop_namespace(&names[0], soon()).await.unwrap();
    has(Some(2)).await;
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn nodes_are_seen_as_they_register_and_go() {
    let store = MemoryStore::shared();
    let one = node(&store).await;
    let put = async |name: &str, token: Option<Token>, value: Bytes| {
        let key = format!("/lake/node/{name}");
        store.cas(&key, token, value, soon()).await.unwrap().result.revision
    };
    let info = NodeInfo { flight_address: "a:1".to_owned(), ..NodeInfo::default() };
    let at = async |revision| loop {
        match one.nodes() {
            Some(nodes) if nodes.revision >= revision => return nodes,
            _ => tokio::task::yield_now().await,
        }
    };
    let record = Record::next("p", 7, &info, None);
    let first = put("n", None, record.to_bytes()).await;
    let nodes = at(first).await;
    let known = nodes.nodes["n"].clone();
    assert_eq!((known.record.flight_address.as_str(), known.epoch), ("a:1", first));
    assert_eq!(known.record, record);
    // Something that no registry wrote is no node; another process is.
    let other = put("other", None, "up".into()).await;
    let after = at(other).await;
    assert!(Arc::ptr_eq(&nodes.nodes, &after.nodes) && after.nodes.len() == 1, "nothing of it has changed");
    let next = Record::next("q", 8, &info, Some((record, known.epoch)));
    let again = put("n", Some(Token::at(first)), next.to_bytes()).await;
    let later = at(again).await.nodes["n"].clone();
    assert_eq!((later.record, later.epoch), (next, again));
    let key = "/lake/node/n";
    let gone = store.cas_delete(key, Token::at(again), soon()).await.unwrap().result.revision;
    assert!(at(gone).await.nodes.is_empty());
    one.close().await;
}

#[cfg(feature = "store-object")]
#[tokio::test]
async fn over_a_directory_every_question_is_a_read_and_changes_are_seen_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let open = || {
        let store: SharedStore = Arc::new(crate::object::ObjectMetaStore::local(dir.path()).unwrap());
        Metadata::new(store, CacheConfig::default())
    };
    let (one, two) = (open(), open());
    one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    let created = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
    for at in 2..6 {
        let add = |now: &TablePointer| Ok::<_, String>(Some(pointer(&format!("{}{at}", now.metadata_location))));
        let writer = if at % 2 == 0 { &two } else { &one };
        writer.writer().read_modify_write(&table(), soon(), add).await.unwrap();
    }
    let missing = TableIdent::new("n".parse().unwrap(), "missing").unwrap();
    for metadata in [&one, &two] {
        assert!(metadata.cached(&table()).is_none());
        let want = Want::by(soon()).at_least(created.mod_revision);
        let resolved = metadata.tables(&[table(), missing.clone()], want).await.unwrap();
        let pointer = resolved[0].pointer().unwrap();
        assert_eq!(pointer.value.metadata_location, "12345");
        assert_eq!(resolved[0].valid_through, pointer.mod_revision);
        assert!(resolved[1].pointer().is_none() && !resolved[0].metasrv_away);
        let read = metadata.read_table(&table(), soon()).await.unwrap().unwrap();
        assert_eq!((&read.value, metadata.seen()), (&pointer.value, 0));
        assert!(metadata.namespaces().is_none() && metadata.wait_for_version(1, soon()).await.is_err());
        metadata.close().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_left_behind_is_ended() {
    let store = MemoryStore::shared();
    let one = node(&store).await;
    one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    one.writer().create_table(&table(), &pointer("a"), soon()).await.unwrap();
    // Whoever claimed it is gone.
    one.writer().claim_turn(Uuid::nil(), Uuid::new_v4(), soon()).await.unwrap().unwrap();
    let change = |_: &TablePointer| Ok::<_, String>(Some(pointer("b")));
    let at_once = clock::now() + TURN_LIMIT / 2;
    let error = one.writer().read_modify_write(&table(), at_once, change).await.unwrap_err();
    assert!(matches!(error, ModifyError::Catalog(CatalogError::NotYourTurn { .. })), "{error}");
    let changed = one.writer().read_modify_write(&table(), soon(), change).await.unwrap();
    assert_eq!(changed.value, pointer("b"));
    assert_eq!(one.turn(Uuid::nil(), soon()).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn whose_turn_it_is_is_told_though_the_last_look_comes_too_late() {
    let store = Arc::new(FaultyStore::default());
    let shared: SharedStore = store.clone();
    let one = Metadata::new(shared, CacheConfig::default());
    one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    one.writer().create_table(&table(), &pointer("a"), soon()).await.unwrap();
    one.writer().claim_turn(Uuid::nil(), Uuid::new_v4(), soon()).await.unwrap().unwrap();
    store.slow_gets.store(true, Ordering::SeqCst);
    let change = |_: &TablePointer| Ok::<_, String>(Some(pointer("b")));
    // Deadlines before, in the middle of and behind a look.
    for more in 0..250 {
        let by = clock::now() + Duration::from_millis(400 + more);
        let error = one.writer().read_modify_write(&table(), by, change).await.unwrap_err();
        assert!(matches!(error, ModifyError::Catalog(CatalogError::NotYourTurn { .. })), "{more} ms more: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_old_pointer_does_not_decide_that_nothing_is_to_be_done() {
    // Nothing is told here: watches are refused.
    let shared: SharedStore = Arc::new(FaultyStore::default());
    let (one, two) =
        (Metadata::new(shared.clone(), CacheConfig::default()), Metadata::new(shared.clone(), CacheConfig::default()));
    one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    let mut last = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
    type Decline = fn(&TablePointer) -> std::result::Result<Option<TablePointer>, &'static str>;
    let declines: [Decline; 2] = [|_| Ok(None), |_| Err("not of this one")];
    for decline in declines {
        let old = two.table(&table(), Want::by(soon())).await.unwrap().pointer().unwrap().value.clone();
        let next = pointer(&format!("{}1", old.metadata_location));
        one.writer().swap_table(&table(), last.mod_revision, &next, None, soon()).await.unwrap();
        assert_eq!(two.cached(&table()).unwrap().pointer().unwrap().value, old, "it is cached still");
        let change = |now: &TablePointer| match now == &old {
            true => decline(now),
            false => Ok(Some(pointer(&format!("{}2", now.metadata_location)))),
        };
        last = two.writer().read_modify_write(&table(), soon(), change).await.unwrap();
        assert_eq!(last.value.metadata_location, format!("{}2", next.metadata_location));
    }
}

#[tokio::test(start_paused = true)]
async fn a_revision_in_any_reply_has_what_is_older_renewed() {
    // Nothing is told here: watches are refused.
    let store = Arc::new(FaultyStore::default());
    let shared: SharedStore = store.clone();
    let (one, two) =
        (Metadata::new(shared.clone(), CacheConfig::default()), Metadata::new(shared.clone(), CacheConfig::default()));
    one.writer().create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    let created = one.writer().create_table(&table(), &pointer("1"), soon()).await.unwrap();
    two.table(&table(), Want::by(soon())).await.unwrap();
    one.writer().swap_table(&table(), created.mod_revision, &pointer("2"), None, soon()).await.unwrap();
    // Young enough to be used, and nothing is known of a change.
    tokio::time::advance(Duration::from_millis(150)).await;
    assert_eq!(two.cached(&table()).unwrap().pointer().unwrap().value, pointer("1"));
    assert_eq!(two.counters().refreshes, 0);
    two.list_namespaces(soon()).await.unwrap();
    let by = clock::now() + Duration::from_millis(200);
    while two.cached(&table()).unwrap().pointer().unwrap().value != pointer("2") {
        assert!(clock::now() < by, "the pointer was not renewed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(two.counters().calls(Reason::Refresh), 1);
    store.away.store(true, Ordering::SeqCst);
    assert!(two.list_namespaces(soon()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_revision_that_another_watch_tells_of_is_noticed() {
    // The pointers are told of nothing.
    let pointers = PointerCache::new(Arc::new(FaultyStore::default()), CacheConfig::default());
    let store = MemoryStore::shared();
    let noticing = Noticing::new(store.clone(), pointers.downgrade(), Arc::default(), Arc::default());
    let mut told = noticing.watch("/lake/catalog/", 1, soon()).await.unwrap();
    let revision = store.cas("/kv/a", None, "1".into(), soon()).await.unwrap().result.revision;
    assert_eq!(told.next().await.unwrap().unwrap().progress, revision);
    assert_eq!(pointers.seen(), revision);
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_is_refused_is_asked_for_again() {
    // Watches are refused.
    let store = Arc::new(FaultyStore::default());
    let shared: SharedStore = store.clone();
    Catalog::new(shared.clone()).create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    let copy: Arc<ArcSwapOption<Namespaces>> = Arc::default();
    let before = store.calls.load(Ordering::SeqCst);
    let following = tokio::spawn(copies::follow_at_most(shared, copy.clone(), 2));
    // It was listed, and then refused.
    until("both calls", || store.calls.load(Ordering::SeqCst) >= before + 2).await;
    assert!(copy.load().is_none() && !following.is_finished());
    store.watches.store(true, Ordering::SeqCst);
    let by = soon();
    while copy.load().is_none() {
        assert!(clock::now() < by, "it is not asked for again");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(copy.load().as_ref().unwrap().names.len(), 1);
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn every_call_is_counted_by_its_reason() {
    let store = Arc::new(FaultyStore::default());
    store.watches.store(true, Ordering::SeqCst);
    let shared: SharedStore = store.clone();
    let one = node(&shared).await;
    let writer = one.writer();
    let namespace: Namespace = "n".parse().unwrap();
    writer.create_namespace(&namespace, Default::default(), soon()).await.unwrap();
    let created = writer.create_table(&table(), &pointer("1"), soon()).await.unwrap();
    for _ in 0..2 {
        one.table(&table(), Want::by(soon())).await.unwrap();
        tokio::time::advance(CacheConfig::default().fresh_for).await;
    }
    writer.swap_table(&table(), created.mod_revision, &pointer("2"), None, soon()).await.unwrap();
    one.list_namespaces(soon()).await.unwrap();
    let snapshot = one.open_snapshot(soon()).await.unwrap();
    one.read_tables_at(snapshot, &[table()], soon()).await.unwrap();
    one.close_snapshot(snapshot, soon()).await.unwrap();
    one.close().await;
    let counters = one.counters();
    assert_eq!(counters.all_calls(), u64::from(store.calls.load(Ordering::SeqCst)), "{counters:?}");
    for reason in [Reason::Miss, Reason::Confirm, Reason::Watch, Reason::Read, Reason::List, Reason::Write] {
        assert!(counters.calls(reason) > 0, "{reason:?}: {counters:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn routes_are_seen_as_shards_are_moved() {
    let store = MemoryStore::shared();
    let one = node(&store).await;
    let put = async |key: &str, token: Option<Token>, value: Bytes| {
        store.cas(key, token, value, soon()).await.unwrap().result.revision
    };
    let at = async |revision| loop {
        match one.shards() {
            Some(shards) if shards.revision >= revision => return shards.routes.clone(),
            _ => tokio::task::yield_now().await,
        }
    };
    let route = |node: &str, lease| Route { node: node.into(), lease, followers: vec![], reason: String::new() };
    let settings = Settings { shards: 1, maintenance: false };
    put(SETTINGS, None, settings.to_bytes()).await;
    let first = put(&shards::key(0), None, route("a", 7).to_bytes()).await;
    let fenced = at(first).await.of(Uuid::nil()).unwrap().clone();
    assert_eq!((fenced.route.node.as_str(), fenced.revision), ("a", first));
    let moved = put(&shards::key(0), Some(Token::at(first)), route("b", 8).to_bytes()).await;
    let routes = at(moved).await;
    let held = |node, lease| routes.held_by(node, lease).map(|fence| fence.revision).collect::<Vec<_>>();
    assert_eq!((held("a", 7), held("b", 8)), (vec![], vec![moved]));
    one.close().await;
}

#[cfg(feature = "store-object")]
#[tokio::test]
async fn one_key_at_a_time_a_dropped_table_waits_for_its_purge_and_comes_back() {
    use lake_proto::kv::Compare;

    use crate::procedures::purge::{DELETE, ids_of};
    use crate::procedures::{Record, State};

    let dir = tempfile::tempdir().unwrap();
    let store: SharedStore = Arc::new(crate::object::ObjectMetaStore::local(dir.path()).unwrap());
    let metadata = Metadata::new(store.clone(), CacheConfig::default());
    let writer = metadata.writer();
    writer.create_namespace(&"n".parse().unwrap(), Default::default(), soon()).await.unwrap();
    let made = TablePointer { uuid: Uuid::new_v4(), ..pointer("1") };
    writer.create_table(&table(), &made, soon()).await.unwrap();
    let dropped = async || {
        let there = metadata.read_table(&table(), soon()).await.unwrap().unwrap();
        let (dropping, _) = writer.purging(&table(), &there, 1);
        dropping.drop_table(&table(), there.mod_revision, soon()).await.unwrap();
        for _ in 0..2 {
            writer.purge_dropped(&table(), &there, 1, soon()).await.unwrap();
        }
        let (purges, _) = metadata.procedures_of(&ids_of(made.uuid), soon()).await.unwrap();
        purges.into_iter().find(|purge| !purge.record.state.is_ended()).unwrap()
    };
    let is_there = async || metadata.read_table(&table(), soon()).await.unwrap().is_some_and(|it| it.value == made);
    let read = dropped().await;
    assert!(!is_there().await);
    // A janitor has seen it meanwhile.
    let seen = Record { seen_unix_ms: Some(5), ..read.record.clone() };
    let seen = writer.change_procedure(&read, &seen, soon()).await.unwrap().unwrap();
    assert!(!writer.undrop_table(&table(), &read, &made, 2, soon()).await.unwrap(), "it has gone on since");
    assert!(!is_there().await);
    assert!(writer.undrop_table(&table(), &seen, &made, 2, soon()).await.unwrap() && is_there().await);
    let over = metadata.procedure(&seen.id, soon()).await.unwrap().unwrap().record;
    assert_eq!(
        (over.state, over.seen_unix_ms),
        (State::Cancelled, None),
        "it began to wait anew, and was cancelled then"
    );

    // Whoever has made it again may have ended before the purge was cancelled.
    let read = dropped().await;
    assert_ne!(read.id, seen.id);
    writer.create_table(&table(), &made, soon()).await.unwrap();
    assert!(writer.undrop_table(&table(), &read, &made, 3, soon()).await.unwrap() && is_there().await);
    assert_eq!(metadata.procedure(&read.id, soon()).await.unwrap().unwrap().record.state, State::Cancelled);

    // The files of one that was made again are gone where its purge was faster than that.
    let read = dropped().await;
    let there = writer.create_table(&table(), &made, soon()).await.unwrap();
    let over = Record { state: State::Done, step: DELETE.to_owned(), ..read.record.clone() };
    writer.change_procedure(&read, &over, soon()).await.unwrap().unwrap();
    assert!(!writer.undrop_table(&table(), &read, &made, 3, soon()).await.unwrap(), "it is not had back");
    assert!(is_there().await, "whoever has made it has to see to it");
    writer.drop_table(&table(), there.mod_revision, soon()).await.unwrap();
    writer.create_table(&table(), &made, soon()).await.unwrap();

    // Too late; and whoever was replaced changes nothing.
    let read = dropped().await;
    let deletes = Record { step: DELETE.to_owned(), ..read.record.clone() };
    let deletes = writer.change_procedure(&read, &deletes, soon()).await.unwrap().unwrap();
    assert!(!writer.undrop_table(&table(), &deletes, &made, 4, soon()).await.unwrap() && !is_there().await);
    assert!(store.cas("/lake/janitor/fence", None, "another".into(), soon()).await.unwrap().result.succeeded);
    let replaced = writer.guarded(vec![Compare::mod_revision("/lake/janitor/fence", 7)]);
    let done = Record { state: State::Done, ..deletes.record.clone() };
    let refused = replaced.change_procedure(&deletes, &done, soon()).await;
    assert!(matches!(refused, Err(CatalogError::Fenced { .. })), "{refused:?}");
    let refused = replaced.forget_procedure(&deletes, soon()).await;
    assert!(matches!(refused, Err(CatalogError::Fenced { .. })), "{refused:?}");
    assert_eq!(metadata.procedure(&deletes.id, soon()).await.unwrap().unwrap(), deletes);
    writer.forget_procedure(&deletes, soon()).await.unwrap();
    assert_eq!(metadata.procedure(&deletes.id, soon()).await.unwrap(), None);
    metadata.close().await;
}
