//! A disk that fills up under a peer, and has room again.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lake_metasrv::files::FreeSpace;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::{Applied, Kind};
use lake_proto::v1::status_response::Stage;
use support::{TestCluster, eventually};

/// A founded cluster in which each peer's disk has as much room as the test says.
async fn cluster_with_rooms() -> (TestCluster, BTreeMap<u64, Arc<AtomicU64>>) {
    let rooms: BTreeMap<u64, Arc<AtomicU64>> = (1..=3).map(|id| (id, Arc::new(AtomicU64::new(u64::MAX)))).collect();
    let cluster = TestCluster::founded(3, |config| {
        let room = rooms[&config.id].clone();
        config.storage.disk_reserve_bytes = 1 << 20;
        config.free_space = FreeSpace::new(move |_| Ok(room.load(Ordering::SeqCst)));
    })
    .await;
    (cluster, rooms)
}

async fn stopped(cluster: &TestCluster, id: u64) {
    eventually("the peer to say that its disk is full", async || {
        let status = cluster.status(id).await;
        (status.stage() == Stage::Stopped && status.problem.contains("disk full")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_with_a_full_disk_gives_way_and_comes_back_as_a_follower() {
    let (mut cluster, rooms) = cluster_with_rooms().await;
    cluster.put("/kv/a", "1").await;
    let full = cluster.leader().await;
    rooms[&full].store(0, Ordering::SeqCst);
    // Its own disk does not count for the quorum: the other two commit, until somebody notices.
    cluster.put("/kv/a", "2").await;
    stopped(&cluster, full).await;
    let txn = Txn { then: vec![Op::put("/kv/b", "1")], ..Txn::default() };
    let error = cluster.kv(full).txn(v1::TxnRequest { txn: Some(txn.into()), stamp: None }).await.unwrap_err();
    let detail = lake_proto::status::detail(&error).unwrap();
    assert_eq!((detail.kind(), detail.applied()), (Kind::Overloaded, Applied::NotApplied), "{error}");
    let next = eventually("another leader", async || {
        for id in (1..=3).filter(|id| *id != full) {
            if cluster.status(id).await.leader.is_some_and(|l| l.id == id) {
                return Some(id);
            }
        }
        None
    })
    .await;
    let revision = cluster.put("/kv/a", "3").await;
    assert_eq!(&cluster.get(next, "/kv/a").await.unwrap().value[..], b"3");

    rooms[&full].store(u64::MAX, Ordering::SeqCst);
    eventually("the peer to go on", async || {
        let status = cluster.status(full).await;
        (status.stage() == Stage::Member && status.revision >= revision).then_some(())
    })
    .await;
    assert_eq!(&cluster.get(full, "/kv/a").await.unwrap().value[..], b"3");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_all_disks_full_nothing_is_acknowledged_and_nothing_is_lost() {
    let (mut cluster, rooms) = cluster_with_rooms().await;
    let revision = cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    for room in rooms.values() {
        room.store(0, Ordering::SeqCst);
    }
    let txn = Txn { then: vec![Op::put("/kv/a", "2")], ..Txn::default() };
    let mut request = tonic::Request::new(v1::TxnRequest { txn: Some(txn.into()), stamp: None });
    request.set_timeout(std::time::Duration::from_millis(500));
    let error = cluster.kv(leader).txn(request).await.unwrap_err();
    assert!(lake_proto::status::detail(&error).is_some(), "{error}");
    stopped(&cluster, leader).await;
    for room in rooms.values() {
        room.store(u64::MAX, Ordering::SeqCst);
    }
    assert!(cluster.put("/kv/a", "3").await > revision);
    cluster.stop_all().await;
}
