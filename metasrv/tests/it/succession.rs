//! What the voters do when the leader's process dies.

use std::time::Instant;

use crate::support::{CALM, PATIENCE, TestCluster, eventually};
use lake_metasrv::config::Timing;
use lake_metasrv::server::Server;

/// Raft's own timer is off at the followers: only the broken connection can tell them.
fn leave_it_to_the_connections(cluster: &TestCluster, ids: &[u64]) {
    for id in ids {
        let member = cluster.running[id].peer().member().unwrap();
        member.raft().runtime_config().elect(false);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_process_dies_is_followed_though_no_timer_runs() {
    // As in operation.
    let mut cluster = TestCluster::founded(3, |config| config.timing = Timing::default()).await;
    cluster.put("/kv/a", "1").await;
    // One peer lives in a runtime of its own, which can end without a word to anybody.
    let id = cluster.leader().await;
    cluster.stop(id).await;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = cluster.configs[&id].clone();
    let mortal = runtime.spawn(Server::start(config)).await.unwrap().unwrap();
    eventually("the leadership to move", async || {
        let moved = cluster.client().transfer_leader(Some(id), Instant::now() + PATIENCE).await;
        moved.is_ok_and(|moved| moved.leader.is_some_and(|leader| leader.id == id)).then_some(())
    })
    .await;
    let others: Vec<u64> = cluster.running.keys().copied().collect();
    leave_it_to_the_connections(&cluster, &others);

    drop(mortal);
    runtime.shutdown_background();
    let heir = cluster.leader().await;
    assert!(others.contains(&heir));
    assert_eq!(cluster.get(heir, "/kv/a").await.unwrap().value, &b"1"[..]);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_unseats_no_leader_that_lives() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    let term = cluster.status(leader).await.term;
    for id in (1..=3).filter(|id| *id != leader) {
        let member = cluster.running[&id].peer().member().unwrap();
        for _ in 0..50 {
            let before = member.view.heard_at();
            drop(member.succession.tie(leader));
            eventually("the leader to be heard", async || (member.view.heard_at() > before).then_some(())).await;
        }
        // By then whoever would have asked has asked.
        let until = member.view.heard_at() + 2 * CALM.election_timeout_max;
        eventually("some time with the leader", async || (member.view.heard_at() > until).then_some(())).await;
    }
    assert_eq!((cluster.leader().await, cluster.status(leader).await.term), (leader, term));
    cluster.stop_all().await;
}
