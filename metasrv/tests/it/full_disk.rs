//! A disk that fills up under a peer, and has room again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::support::{PATIENCE, TestCluster, eventually, why};
use lake_metasrv::files::FreeSpace;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::{Applied, Kind};
use lake_proto::v1::status_response::Stage;

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
    why(async || {
        let mut request = tonic::Request::new(v1::TxnRequest { txn: Some(txn.clone().into()), stamp: None });
        request.set_timeout(std::time::Duration::from_millis(500));
        cluster.kv(leader).txn(request).await
    })
    .await;
    stopped(&cluster, leader).await;
    for room in rooms.values() {
        room.store(u64::MAX, Ordering::SeqCst);
    }
    assert!(cluster.put("/kv/a", "3").await > revision);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_can_be_stopped_while_its_disk_is_full() {
    let (mut cluster, rooms) = cluster_with_rooms().await;
    cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    let full = (1..=3).find(|id| *id != leader).unwrap();
    rooms[&full].store(0, Ordering::SeqCst);
    cluster.put("/kv/a", "2").await;
    stopped(&cluster, full).await;
    // Its core has a vote to write, behind what is held.
    let next = (1..=3).find(|id| ![leader, full].contains(id)).unwrap();
    eventually("another leader", async || {
        let moved = cluster.client().transfer_leader(Some(next), Instant::now() + PATIENCE).await;
        moved.is_ok_and(|moved| moved.leader.is_some_and(|leader| leader.id == next)).then_some(())
    })
    .await;
    let revision = cluster.put("/kv/a", "3").await;
    tokio::time::timeout(PATIENCE, cluster.stop(full)).await.expect("it stops, full or not");

    rooms[&full].store(u64::MAX, Ordering::SeqCst);
    cluster.start(full).await;
    eventually("the peer to have everything", async || (cluster.status(full).await.revision >= revision).then_some(()))
        .await;
    cluster.stop_all().await;
}

/// The files of a peer's directory of snapshots that are being received.
fn receiving(cluster: &TestCluster, id: u64) -> usize {
    let entries = std::fs::read_dir(cluster.configs[&id].dir.join("snapshots")).unwrap();
    entries.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("receiving-")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_would_eat_the_reserve_is_not_received() {
    use v1::snapshot_message::Message;
    const RESERVE: u64 = 1 << 20;
    let rooms: BTreeMap<u64, Arc<AtomicU64>> = (1..=3).map(|id| (id, Arc::new(AtomicU64::new(u64::MAX)))).collect();
    let mut cluster = TestCluster::founded(3, |config| {
        let room = rooms[&config.id].clone();
        (config.storage.snapshot_entries, config.storage.purge_margin_entries) = (20, 5);
        config.storage.disk_reserve_bytes = RESERVE;
        config.free_space = FreeSpace::new(move |_| Ok(room.load(Ordering::SeqCst)));
    })
    .await;
    let leader = cluster.leader().await;
    let behind = (1..=3).find(|id| *id != leader).unwrap();
    cluster.stop(behind).await;
    let mut revision = 0;
    for n in 0..60 {
        revision = cluster.put(&format!("/kv/{n}"), vec![7; 100_000]).await;
    }
    eventually("the log to be purged", async || (cluster.status(leader).await.purged_index > 20).then_some(())).await;

    // Its log has room, the snapshot of six megabytes has none.
    let room = rooms[&behind].clone();
    room.store(RESERVE + (5 << 20), Ordering::SeqCst);
    cluster.start(behind).await;
    let (to, from) = (cluster.status(behind).await, cluster.status(leader).await);
    let header = |size| v1::SnapshotMessage {
        message: Some(Message::Header(v1::SnapshotHeader {
            header: Some(v1::RaftHeader {
                cluster_id: from.cluster_id.clone(),
                from_id: leader,
                from_incarnation: from.self_.clone().unwrap().incarnation,
                to_id: behind,
                to_incarnation: to.self_.clone().unwrap().incarnation,
            }),
            vote: Some(v1::Vote { term: from.term, node_id: leader, committed: true }),
            meta: Some(v1::SnapshotMeta {
                last_log_id: Some(v1::LogId { term: from.term, node_id: 0, index: from.snapshot_index }),
                membership: Some(v1::StoredMembership {
                    log_id: None,
                    membership: Some(v1::Membership {
                        configs: vec![v1::membership::Config { voters: vec![1, 2, 3] }],
                        nodes: from.voters.clone(),
                    }),
                }),
                ..v1::SnapshotMeta::default()
            }),
            size,
        })),
    };
    let refused = |status: tonic::Status| {
        let detail = lake_proto::status::detail(&status).unwrap();
        assert_eq!((detail.kind(), detail.applied()), (Kind::Overloaded, Applied::NotApplied), "{status}");
        assert!(status.message().contains("disk full"), "{status}");
    };
    refused(cluster.raft(behind).snapshot(futures::stream::iter([header(6 << 20)])).await.unwrap_err());

    assert!(cluster.status(behind).await.revision < revision, "nor does the leader's own arrive");

    // It fills up while one comes.
    const CHUNKS: u64 = 40;
    room.store(RESERVE + (CHUNKS << 20), Ordering::SeqCst);
    let fills = room.clone();
    let chunks = (0..CHUNKS).map(move |n| {
        if n == 10 {
            fills.store(RESERVE + (5 << 20), Ordering::SeqCst);
        }
        v1::SnapshotMessage { message: Some(Message::Chunk(vec![0; 1 << 20].into())) }
    });
    let stream = futures::stream::iter([header(CHUNKS << 20)].into_iter().chain(chunks));
    refused(cluster.raft(behind).snapshot(stream).await.unwrap_err());
    eventually("what had come to be gone", async || (receiving(&cluster, behind) == 0).then_some(())).await;

    room.store(u64::MAX, Ordering::SeqCst);
    eventually("the peer to have everything", async || {
        (cluster.status(behind).await.revision >= revision).then_some(())
    })
    .await;
    cluster.stop_all().await;
}
