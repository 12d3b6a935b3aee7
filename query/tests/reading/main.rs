//! Tables in every state that other engines leave them in: read right, or refused by name.

mod columns;
#[path = "../common/mod.rs"]
mod common;
mod deletes;
mod foreign;
mod late;
mod pruning;
mod pyiceberg;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../rest/python.rs"]
mod python;
mod stores;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../../client/tests/support/mod.rs"]
mod support;
mod travel;
mod warm;

use std::sync::Arc;

use common::*;
use lake_client::memory::MemoryStore;
use lake_query::Options;

/// A cluster of one node that looks at every pointer anew, so that it sees what is changed behind its back.
async fn cluster() -> Cluster {
    with(|options| options).await
}

async fn with(change: impl Fn(Options) -> Options) -> Cluster {
    Cluster::over(Arc::new(MemoryStore::new()), 1, |options| change(Options { pointer_ttl_ms: Some(0), ..options }))
        .await
}

/// Whether queries ran where they were meant to: here, on the node that was asked.
fn check_where_they_ran(cluster: &Cluster) {
    assert_eq!(cluster.nodes[0].engine().distributed().unwrap().counts(), (0, 0));
}
