//! Peers with a large state write their snapshots one after the other, and a dead one holds up nobody for ever.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::support::{TestCluster, eventually};
use lake_metasrv::config::StorageConfig;
use lake_metasrv::peer::member::Member;
use lake_metasrv::peer::snapshot_turns::{LAPSE, SMALL_BYTES, is_due};
use lake_proto::v1;

/// Nobody has this id: it is that of a peer that had the turn, and died.
const DEAD: u64 = 77;
const VALUE_BYTES: usize = 1 << 20;

fn member(cluster: &TestCluster, id: u64) -> Arc<Member> {
    cluster.running[&id].peer().member().unwrap()
}

fn due(cluster: &TestCluster, id: u64) -> bool {
    let storage: StorageConfig = cluster.configs[&id].storage;
    is_due(&storage, member(cluster, id).published.since_snapshot())
}

/// A call of a peer to another one, over the network. One that the membership does not know may be newer than that.
async fn ask(cluster: &TestCluster, from: u64, to: u64, over: bool) -> Result<bool, tonic::Status> {
    let called = cluster.status(to).await;
    let header = v1::RaftHeader {
        cluster_id: called.cluster_id,
        from_id: from,
        from_incarnation: "ab".repeat(16),
        to_id: to,
        to_incarnation: called.self_.unwrap().incarnation,
    };
    let request = v1::SnapshotTurnRequest { header: Some(header), over };
    cluster.raft(to).snapshot_turn(request).await.map(|answer| answer.into_inner().granted)
}

/// Has a dead peer hold the turn, and writes until a snapshot is due somewhere. Says how long it took from the last word of the dead
/// one until somebody wrote a snapshot; `None`: it lost the turn before.
async fn until_written_after_a_death(cluster: &TestCluster) -> Option<std::time::Duration> {
    let leader = member(cluster, cluster.leader().await);
    let term = leader.view.term();
    let hold = || leader.snapshot_turns.asked(DEAD, false).unwrap_or(false);
    let leads = || leader.view.leading_term() == Some(term);
    eventually("the turn, with nothing due", async || {
        let writes = |id: &u64| due(cluster, *id) || member(cluster, *id).published.writes_snapshot();
        let idle = !cluster.running.keys().any(writes);
        (!leads() || idle && hold()).then_some(())
    })
    .await;
    let begun = || -> BTreeMap<u64, u64> {
        cluster.running.keys().map(|id| (*id, member(cluster, *id).published.snapshots_begun())).collect()
    };
    let before = begun();
    let mut last_word = Instant::now();
    while !cluster.running.keys().any(|id| due(cluster, *id)) {
        last_word = Instant::now();
        if !hold() || begun() != before {
            return None;
        }
        cluster.put("/kv/0", vec![7; VALUE_BYTES]).await;
    }
    eventually("a snapshot though the turn's holder is dead", async || (begun() != before).then_some(())).await;
    let took = last_word.elapsed();
    leads().then_some(took)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_waits_for_another_peers_turn_and_not_for_a_dead_one() {
    let mut cluster = TestCluster::founded(3, |config| config.storage.snapshot_bytes = 1 << 20).await;
    // So much that a turn is needed, and that what makes a snapshot due is several of these.
    let keys = 2 * SMALL_BYTES as usize / VALUE_BYTES;
    for n in 0..keys {
        cluster.put(&format!("/kv/{n}"), vec![n as u8; VALUE_BYTES]).await;
    }
    let mut took = None;
    for _ in 0..5 {
        took = until_written_after_a_death(&cluster).await;
        if took.is_some() {
            break;
        }
    }
    let took = took.expect("one of five in which the leader stayed, and the machine let the turn last");
    assert!(took >= LAPSE, "it was written after {took:?}, while the turn was another one's");

    // The same over the network; who does not lead is not to be asked.
    let leader = cluster.leader().await;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    let granted = async |peer| ask(&cluster, peer, leader, false).await.ok().filter(|granted| *granted);
    eventually("the turn", async || granted(DEAD).await).await;
    let asked = Instant::now();
    let other = ask(&cluster, DEAD + 1, leader, false).await;
    let elsewhere = ask(&cluster, DEAD + 1, follower, false).await;
    if asked.elapsed() < LAPSE && cluster.leader().await == leader {
        assert!(!other.unwrap(), "two at once");
        assert!(elsewhere.is_err());
    }
    assert!(!ask(&cluster, DEAD, leader, true).await.unwrap());
    eventually("the turn that was given back", async || granted(DEAD + 1).await).await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_stops_leaves_no_snapshot_behind_that_is_being_written() {
    let mut cluster = TestCluster::founded(1, |config| config.storage.snapshot_bytes = 24 << 20).await;
    for n in 0..20_u8 {
        cluster.put(&format!("/kv/{n}"), vec![n; VALUE_BYTES]).await;
    }
    let published = member(&cluster, 1).published.clone();
    // Several are written if one was missed.
    eventually("a snapshot that is being written", async || {
        if !published.writes_snapshot() {
            cluster.put("/kv/0", vec![7; VALUE_BYTES]).await;
        }
        published.writes_snapshot().then_some(())
    })
    .await;
    cluster.stop(1).await;
    assert!(!published.writes_snapshot(), "the directory is free, and somebody writes into it");
    cluster.start(1).await;
    assert_eq!(cluster.get(1, "/kv/19").await.unwrap().value.len(), VALUE_BYTES);
    cluster.stop_all().await;
}
