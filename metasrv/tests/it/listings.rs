//! What the client lists in parts and gives whole, and reads that one peer answers.

use std::time::{Duration, Instant};

use crate::support::{PATIENCE, TestCluster};
use lake_client::remote::coordination::LiveLease;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::store::{Consistency, Error, MetaStore, ReadOptions};
use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Compare, Op, Txn};

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_of_several_parts_is_of_one_revision() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let owner = ScopeOwner::Procedure("p".into());
    for hundred in 0..12 {
        let paths: Vec<String> = (0..100).map(|n| format!("/many/{:04}", hundred * 100 + n)).collect();
        let free = |path: &String| Compare::scope_free(path.clone(), Some(owner.clone()));
        let acquire = |path: &String| Op::AcquireScope { path: path.clone(), owner: owner.clone() };
        let txn =
            Txn { when: paths.iter().map(free).collect(), then: paths.iter().map(acquire).collect(), ..Txn::default() };
        assert!(store.commit(txn, soon()).await.unwrap().result.succeeded);
    }
    let read = store.all_scopes("/many/", ReadOptions::default(), soon()).await.unwrap();
    let paths: Vec<String> = read.value.into_iter().map(|scope| scope.path).collect();
    assert_eq!(paths, (0..1200).map(|n| format!("/many/{n:04}")).collect::<Vec<_>>());
    assert_eq!(store.all_scopes("/many/11", ReadOptions::default(), soon()).await.unwrap().value.len(), 100);
    assert_eq!(store.all_scopes("/none", ReadOptions::default(), soon()).await.unwrap().value, []);

    let lease = store.grant_lease(Duration::from_secs(60), "somebody", soon()).await.unwrap();
    let all = store.all_leases(ReadOptions::default(), soon()).await.unwrap().value;
    assert_eq!((all.len(), all[0].id, all[0].holder.as_str()), (1, lease.id, "somebody"));
    let one = store.lease(lease.id, ReadOptions::default(), soon()).await.unwrap().value.unwrap();
    // Its time goes on.
    assert!(one.remaining <= all[0].remaining);
    assert_eq!(LiveLease { remaining: all[0].remaining, ..one }, all[0]);
    for other in [0, 1, lease.id + 1, u64::MAX] {
        assert_eq!(store.lease(other, ReadOptions::default(), soon()).await.unwrap().value, None);
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_peer_that_is_named_answers_and_no_other() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let revision = cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    let store = cluster.client();
    for id in 1..=3 {
        let at = store.reading_at(&cluster.configs[&id].listen.to_string()).unwrap();
        for consistency in [Consistency::Linearizable, Consistency::Local] {
            let options = ReadOptions { consistency, min_revision: revision, ..ReadOptions::default() };
            assert!(at.get("/kv/a", options, soon()).await.unwrap().value.is_some());
            assert_eq!(at.list("/kv/", None, 0, options, soon()).await.unwrap().value.entries.len(), 1);
        }
        let snapshot = at.open_snapshot(ReadOptions::default(), soon()).await.unwrap().value;
        let held = at.batch_get(&["/kv/a".to_owned()], ReadOptions::at(snapshot), soon()).await.unwrap();
        assert_eq!(held.value.len(), 1, "the peer that holds the snapshot is asked again");
    }

    let follower = (1..=3).find(|id| *id != leader).unwrap();
    let address = cluster.configs[&follower].listen.to_string();
    let at = store.reading_at(&address).unwrap();
    cluster.stop(follower).await;
    let deadline = Instant::now() + Duration::from_millis(500);
    match at.get("/kv/a", ReadOptions::default(), deadline).await.unwrap_err() {
        Error::Unavailable { endpoints, .. } => assert_eq!(endpoints, [address], "nobody else was asked"),
        other => panic!("{other}"),
    }
    let txn = Txn { then: vec![Op::put("/kv/b", "2")], ..Txn::default() };
    at.commit(txn, soon()).await.expect("a change goes to the leader");
    cluster.stop_all().await;

    let store = RemoteStore::connect(RemoteConfig { endpoints: vec!["a:1".into()], secret: None }).unwrap();
    assert!(matches!(store.reading_at("nowhere"), Err(Error::Refused { .. })));
}
