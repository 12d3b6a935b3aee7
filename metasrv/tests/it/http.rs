//! What probes and Prometheus are told.

use std::io::ErrorKind::WouldBlock;
use std::net::SocketAddr;

use crate::support::{TestCluster, eventually, http_get as get};
use lake_metasrv::http::MAX_CONNECTIONS;
use lake_metasrv::state::FEATURE_LEVEL;
use tokio::net::TcpStream;

#[tokio::test(flavor = "multi_thread")]
async fn live_and_ready_are_told_apart() {
    let mut cluster =
        TestCluster::fresh(3, |config| config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)))).await;
    let address = |cluster: &TestCluster, id: u64| cluster.running[&id].http_address().unwrap();
    assert_eq!(get(address(&cluster, 1), "/live").await.0, 200);
    let (code, why) = get(address(&cluster, 1), "/ready").await;
    assert!(code == 503 && why.contains("belongs to no cluster"), "{code} {why}");
    let supported = format!("lake_metasrv_supported_feature_level {FEATURE_LEVEL}");
    let (_, fresh) = get(address(&cluster, 1), "/metrics").await;
    assert!(fresh.lines().any(|line| line == supported), "{fresh}");

    cluster.init(1).await.unwrap();
    let leader = cluster.leader().await;
    for id in 1..=3 {
        eventually("every peer to be ready", async || {
            (get(address(&cluster, id), "/ready").await.0 == 200).then_some(())
        })
        .await;
    }
    cluster.put("/kv/a", "1").await;
    for id in 1..=3 {
        let in_force = format!("lake_metasrv_feature_level {FEATURE_LEVEL}");
        eventually("every peer to say at which feature level it is", async || {
            let metrics = get(address(&cluster, id), "/metrics").await.1;
            (metrics.lines().any(|line| line == in_force) && metrics.lines().any(|l| l == supported)).then_some(())
        })
        .await;
    }
    let (code, metrics) = get(address(&cluster, leader), "/metrics").await;
    assert_eq!(code, 200);
    for line in ["lake_metasrv_is_leader 1", "lake_metasrv_voters 3", "lake_metasrv_keys 1", "lake_metasrv_failed 0"] {
        assert!(metrics.lines().any(|l| l == line), "{line} is missing from:\n{metrics}");
    }
    assert!(metrics.contains("# TYPE lake_metasrv_leases_granted_total counter"), "{metrics}");
    assert!(metrics.contains("lake_metasrv_lag_entries{peer="), "{metrics}");
    cluster.get(leader, "/kv/a").await;
    let (_, after) = get(address(&cluster, leader), "/metrics").await;
    for (what, least) in [
        ("commit_seconds", 1.0),
        ("read_index_seconds", 1.0),
        ("journal_sync_seconds", 1.0),
        ("scopes_acquired_seconds_total", 0.0),
    ] {
        let name = format!("lake_metasrv_{what}{}", if least > 0.0 { "_count" } else { "" });
        let count = after.lines().find_map(|line| line.strip_prefix(&name)?.trim().parse::<f64>().ok());
        assert!(count.is_some_and(|count| count >= least), "{name}: {count:?} in\n{after}");
    }
    assert!(after.contains("lake_metasrv_commit_seconds_bucket{le=\"0.001\"}"), "{after}");
    assert_eq!(get(address(&cluster, leader), "/else").await.0, 404);

    // Whoever only connects keeps no other probe out for long: it has its part, and what is more is closed.
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(TcpStream::connect(address(&cluster, leader)).await.unwrap());
    }
    eventually("more than a host's part to be closed", async || {
        let open = |connection: &TcpStream| connection.try_read(&mut [0; 1]).is_err_and(|e| e.kind() == WouldBlock);
        (idle.iter().filter(|connection| open(connection)).count() <= MAX_CONNECTIONS / 2).then_some(())
    })
    .await;
    drop(idle);
    eventually("probes to be answered again", async || {
        let answered = tokio::spawn(get(address(&cluster, leader), "/live")).await;
        answered.is_ok_and(|(code, _)| code == 200).then_some(())
    })
    .await;

    // Without a quorum a peer is alive, and not ready: a restart would not help it.
    for id in (1..=3).filter(|id| *id != leader) {
        cluster.stop(id).await;
    }
    eventually("the peer that is left to know of no leader", async || {
        let (code, why) = get(address(&cluster, leader), "/ready").await;
        (code == 503 && why.contains("no leader")).then_some(())
    })
    .await;
    assert_eq!(get(address(&cluster, leader), "/live").await, (200, "live\n".to_owned()));
    cluster.stop_all().await;
}
