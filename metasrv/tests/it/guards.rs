//! Leases and scopes that are held for as long as something lives, and what they tell whoever holds them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{PATIENCE, TestCluster, eventually};
use lake_client::catalog::{Catalog, CatalogError, Namespace, TableChange, TableIdent, TablePointer};
use lake_client::remote::RemoteStore;
use lake_client::remote::keeper::LeaseKeeper;
use lake_client::remote::scope::{Acquired, Fenced, ScopeGuard};
use lake_client::store::{Error, MetaStore, ReadOptions};
use lake_proto::coordination::{Scope, ScopeOwner};
use lake_proto::kv::{Compare, Op, Revision, Txn};
use lake_proto::watch::Change;
use uuid::Uuid;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

async fn acquire(store: &RemoteStore, paths: &[&str], ttl_s: u64) -> Result<ScopeGuard, Vec<Scope>> {
    let paths = paths.iter().map(|path| (*path).to_owned()).collect();
    match ScopeGuard::acquire(store, paths, Duration::from_secs(ttl_s), "a test", soon()).await.unwrap() {
        Acquired::Held(guard) => Ok(guard),
        Acquired::Taken(by) => Err(by),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scopes_are_held_all_or_none_until_their_guard_goes() {
    const TTL_S: u64 = 6;
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let guard = acquire(&store, &["/a/b", "/c"], 60).await.unwrap();
    for (paths, in_the_way) in [(["/d", "/a"], "/a/b"), (["/c/x", "/d"], "/c")] {
        let taken = acquire(&store, &paths, 60).await.unwrap_err();
        let taken: Vec<_> = taken.iter().map(|scope| (scope.path.as_str(), scope.owner.clone())).collect();
        assert_eq!(taken, [(in_the_way, guard.owner())]);
    }
    let put = |when| Txn { when, then: vec![Op::put("/kv/a", "1")], otherwise: vec![] };
    let Fenced::Ran(done) = guard.commit(put(vec![Compare::absent("/kv/a")]), soon()).await.unwrap() else {
        panic!("they are held")
    };
    assert!(done.result.succeeded);
    let Fenced::Ran(done) = guard.commit(put(vec![Compare::absent("/kv/a")]), soon()).await.unwrap() else {
        panic!("they are held, whatever else is so")
    };
    assert!(!done.result.succeeded);
    let unfenced = Txn { otherwise: vec![Op::put("/kv/b", "1")], ..Txn::default() };
    let refused = guard.commit(unfenced, soon()).await.unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused}");
    let under_it = put(guard.compares());
    assert!(store.revoke_lease(guard.lease().id(), soon()).await.unwrap());
    assert_eq!(guard.commit(put(vec![]), soon()).await.unwrap(), Fenced::Lost);
    assert!(!guard.release(soon()).await.unwrap(), "there is nothing to give back");
    assert!(!store.commit(under_it, soon()).await.unwrap().result.succeeded, "it is held no more");

    let dropped = acquire(&store, &["/a"], TTL_S).await.expect("it was given back");
    // It is kept alive for as long as the guard is there.
    let renewed = dropped.lease().held_until();
    eventually("three renewals", async || {
        (dropped.lease().held_until() > renewed + Duration::from_secs(TTL_S)).then_some(())
    })
    .await;
    assert!(acquire(&store, &["/a/b"], 60).await.is_err());
    drop(dropped);
    eventually("the scope to end with its lease", async || acquire(&store, &["/a/b"], 60).await.ok()).await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_scope_has_it_once_its_guard_is_dropped_or_its_holder_is_gone() {
    const MINUTE: Duration = Duration::from_secs(60);
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let wait = async |path: &str, by: Instant| {
        ScopeGuard::wait_for(&store, vec![path.to_owned()], MINUTE, "a test", by).await.unwrap()
    };
    let first = acquire(&store, &["/a"], 60).await.unwrap();
    let fence = first.lease().id();
    // Enough for a lease and a transaction, also where a disk is slow.
    match wait("/a/b", Instant::now() + Duration::from_secs(5)).await {
        Acquired::Taken(by) => assert_eq!(by[0].path, "/a", "who is in the way is told"),
        Acquired::Held(_) => panic!("it is taken"),
    }
    // The lease would live for a minute: it is released, and does not end by itself.
    let dropped = async {
        eventually("the waiting to begin", async || {
            let leases = store.all_leases(Default::default(), soon()).await.unwrap().value;
            leases.iter().all(|lease| lease.id == fence).then_some(())
        })
        .await;
        drop(first);
    };
    let (waited, ()) = futures::join!(wait("/a/b", soon()), dropped);
    let Acquired::Held(second) = waited else { panic!("it was given back") };
    assert!(second.lease().id() > fence, "the fence rises");

    // One whose process is gone: nobody renews its lease.
    let silent = store.grant_lease(Duration::from_secs(6), "a test", soon()).await.unwrap();
    let owner = ScopeOwner::Lease(silent.id);
    let when = vec![Compare::lease_alive(silent.id), Compare::scope_free("/c".to_owned(), Some(owner.clone()))];
    let then = vec![Op::AcquireScope { path: "/c".to_owned(), owner }];
    let txn = Txn { when, then, otherwise: vec![] };
    assert!(store.commit(txn, soon()).await.unwrap().result.succeeded);
    let Acquired::Held(third) = wait("/c", soon()).await else { panic!("its lease ends by itself") };
    assert!(third.release(soon()).await.unwrap() && second.release(soon()).await.unwrap());
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn work_under_a_lease_ends_when_the_lease_may_be_lost() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let lease = store.grant_lease(Duration::from_secs(6), "a test", soon()).await.unwrap();
    let keeper = LeaseKeeper::start(store, lease);
    assert_eq!(keeper.while_held(async { 7 }).await, Ok(7));
    keeper.renewed().await.unwrap();
    cluster.stop_all().await;
    let until = keeper.held_until();
    let lost = keeper.while_held(std::future::pending::<()>()).await.unwrap_err();
    assert!(keeper.held_until() >= until && !keeper.is_held());
    assert!(lost.contains(&lease.id.to_string()), "{lost}");
}

async fn revision(store: &RemoteStore) -> Revision {
    store.get("/kv/nothing", ReadOptions::default(), soon()).await.unwrap().revision
}

/// One that nothing else is.
fn pointer() -> TablePointer {
    let uuid = Uuid::new_v4();
    TablePointer { uuid, metadata_location: format!("file:///{uuid}"), previous_location: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn structure_is_one_transaction_that_no_scope_of_others_may_be_in_the_way_of() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let catalog = Catalog::new(Arc::new(store.clone()));
    let [n, o, nested] = ["n", "o", "n.m"].map(|name| name.parse::<Namespace>().unwrap());
    for namespace in [&n, &o] {
        catalog.create_namespace(namespace, BTreeMap::new(), soon()).await.unwrap();
    }
    let named = |name: &str| TableIdent::new(n.clone(), name).unwrap();
    let (t, v, x, y) = (named("t"), named("v"), named("x"), named("y"));
    let table = catalog.create_table(&t, &pointer(), soon()).await.unwrap();
    let view = catalog.create_view(&v, &pointer(), soon()).await.unwrap().mod_revision;
    let properties: BTreeMap<String, String> = [("a".to_owned(), "b".to_owned())].into();
    let new_x = [TableChange { table: x.clone(), expected: None, new: pointer() }];

    let guard = acquire(&store, &["/catalog/n", "/catalog/o"], 60).await.unwrap();
    let before = revision(&store).await;
    let refused = [
        ("/catalog/n", catalog.create_table(&x, &pointer(), soon()).await.map(drop)),
        ("/catalog/n", catalog.register_table(&t, &pointer(), Some(table.mod_revision), soon()).await.map(drop)),
        ("/catalog/n", catalog.create_view(&x, &pointer(), soon()).await.map(drop)),
        ("/catalog/n", catalog.change_tables(&new_x, soon()).await.map(drop)),
        ("/catalog/n", catalog.rename_table(&t, &x, soon()).await.map(drop)),
        ("/catalog/n", catalog.rename_view(&v, &x, soon()).await.map(drop)),
        ("/catalog/n", catalog.drop_table(&t, table.mod_revision, soon()).await.map(drop)),
        ("/catalog/n", catalog.drop_view(&v, view, soon()).await.map(drop)),
        ("/catalog/n", catalog.create_namespace(&nested, BTreeMap::new(), soon()).await),
        ("/catalog/n", catalog.drop_namespace_and_contents(&n, None, soon()).await.map(drop)),
        ("/catalog/o", catalog.drop_namespace(&o, soon()).await),
    ];
    for (at, (path, refused)) in refused.into_iter().enumerate() {
        let expected = CatalogError::ScopeHeld { path: path.to_owned(), owner: guard.owner().to_string() };
        assert_eq!(refused, Err(expected), "{at}");
    }
    assert_eq!(revision(&store).await, before, "nothing was done");
    // These are no structure: they go on.
    let next = TablePointer { uuid: table.value.uuid, ..pointer() };
    let swapped = catalog.swap_table(&t, table.mod_revision, &next, None, soon()).await.unwrap().mod_revision;
    catalog.update_namespace(&n, &Default::default(), &properties, soon()).await.unwrap();
    assert_eq!((swapped, revision(&store).await), (before + 1, before + 2));

    assert!(guard.release(soon()).await.unwrap());
    let mut last = revision(&store).await;
    let mut told = store.watch("/lake/", last + 1).unwrap();
    let mut one = async |what: &str, done: Result<(), CatalogError>| {
        done.unwrap_or_else(|e| panic!("{what}: {e}"));
        let (upto, mut changes) = (revision(&store).await, Vec::new());
        while last < upto {
            let message = tokio::time::timeout(PATIENCE, told.next()).await.expect("changes in time");
            let message = message.expect("the watch goes on").unwrap();
            last = message.progress;
            changes.extend(message.changes);
        }
        // Which table has a uuid is kept up afterwards.
        let is_structure = |change: &&Change| change.events.iter().any(|event| !event.key.starts_with("/lake/named/"));
        assert_eq!(changes.iter().filter(is_structure).count(), 1, "{what} is one transaction: {changes:?}");
    };
    one("a change that creates", catalog.change_tables(&new_x, soon()).await.map(drop)).await;
    one("creating a view", catalog.create_view(&y, &pointer(), soon()).await.map(drop)).await;
    one("renaming a table", catalog.rename_table(&t, &named("u"), soon()).await.map(drop)).await;
    one("renaming a view", catalog.rename_view(&v, &named("w"), soon()).await.map(drop)).await;
    let table = catalog.create_table(&t, &pointer(), soon()).await;
    let (table, created) = (table.as_ref().map_or(0, |table| table.mod_revision), table.map(drop));
    one("creating a table", created).await;
    one("dropping a table", catalog.drop_table(&t, table, soon()).await.map(drop)).await;
    one("creating a namespace", catalog.create_namespace(&nested, BTreeMap::new(), soon()).await).await;
    one("dropping a namespace", catalog.drop_namespace(&nested, soon()).await).await;
    one("properties", catalog.update_namespace(&o, &Default::default(), &properties, soon()).await.map(drop)).await;
    let dropped = catalog.drop_namespace_and_contents(&n, None, soon()).await;
    assert_eq!(dropped, Ok(4), "two tables and two views");
    one("dropping a namespace with all that is in it", dropped.map(drop)).await;
    cluster.stop_all().await;
}
