//! One query over several nodes: the same rows as on one, whatever state a table is in, or an error.

#[path = "../reading/columns.rs"]
mod columns;
#[path = "../common/mod.rs"]
mod common;
#[path = "../reading/deletes.rs"]
mod deletes;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../reading/foreign.rs"]
mod foreign;
mod nodes;
mod proxy;
#[path = "../reading/stores.rs"]
mod stores;
mod tpch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use lake_client::memory::MemoryStore;
use lake_query::Options;

/// Nodes that spread every query that can be over all of them.
async fn nodes(count: usize, change: impl Fn(Options) -> Options) -> Cluster {
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), count, |options| {
        change(Options { distribute: Some("on".into()), pointer_ttl_ms: Some(0), ..options })
    })
    .await;
    let addresses: Vec<String> = cluster.nodes.iter().map(|node| node.flight_address().to_string()).collect();
    for node in &cluster.nodes {
        node.distribute_over(&addresses).unwrap();
    }
    cluster
}

/// For the tests of reading, which are run here over three nodes.
async fn cluster() -> Cluster {
    with(|options| options).await
}

async fn with(change: impl Fn(Options) -> Options) -> Cluster {
    nodes(3, change).await
}

/// Whether queries ran where they were meant to: here, on several nodes, and none of them on one after all.
fn check_where_they_ran(cluster: &Cluster) {
    let (spread, fallen_back) = counts(cluster, 0);
    assert!(spread > 0 && fallen_back == 0, "{spread} were spread, and {fallen_back} ran on one node after all");
}

/// How many queries a node has spread, and how many of them ran on it after all.
fn counts(cluster: &Cluster, node: usize) -> (u64, u64) {
    cluster.nodes[node].engine().distributed().unwrap().counts()
}

/// Waits until no node has anything of a query left: parts, memory or statements.
async fn until_idle(cluster: &Cluster) {
    let left = |node: &lake_query::QueryNode| {
        let engine = node.engine();
        (engine.distributed().unwrap().parts().in_hand(), engine.memory_held(), engine.running())
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left: Vec<_> = cluster.nodes.iter().map(&left).collect();
        if left.iter().all(|left| matches!(left, (0, 0, 0))) {
            return;
        }
        assert!(Instant::now() < deadline, "left of the query, of each node (parts, bytes, statements): {left:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
