//! The official ADBC driver from Python, as its users use it.

use std::sync::Arc;

use lake_client::memory::MemoryStore;
use lake_query::Options;

use crate::common::{Cluster, number, numbers, run, text, until};
use crate::python;

const SCRIPT: &str = "../flight/adbc_client.py";

async fn with(function: &str) -> Cluster {
    // Each node sees at once what the other has done.
    let change = |options| Options { pointer_ttl_ms: Some(0), ..options };
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 2, change).await;
    run(
        &cluster.client(1).await,
        "CREATE TABLE fruit AS SELECT * FROM (VALUES (1, 'apple'), (2, NULL)) AS v(id, name)",
    )
    .await;
    let uris: Vec<String> = cluster.nodes.iter().map(|node| format!("grpc://{}", node.flight_address())).collect();
    python::run(SCRIPT, function, &[&uris[0], &uris[1]]).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn dbapi_binds_parameters_of_all_types() {
    let cluster = with("parameters").await;
    let sql = cluster.client(1).await;
    assert_eq!(numbers(&sql, "SELECT id FROM fruit ORDER BY id").await, [1, 2, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_are_the_drivers_own() {
    let cluster = with("transactions").await;
    let sql = cluster.client(1).await;
    assert_eq!(numbers(&sql, "SELECT id FROM fruit ORDER BY id").await, [1, 2, 10, 11]);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_half_of_a_transaction_is_committed() {
    with("unread").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_ingested_in_every_mode() {
    let cluster = with("ingest").await;
    let sql = cluster.client(1).await;
    assert_eq!(text(&sql, "SELECT * FROM made ORDER BY id").await, [["7", "seven"]]);
    assert_eq!(number(&sql, "SELECT count(*) FROM many").await, 200_000);
    assert_eq!(number(&sql, "SELECT sum(id) FROM many").await, 199_999 * 100_000);
    assert_eq!(number(&sql, "SELECT count(*) FROM \"many$snapshots\"").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_ingested_in_transactions() {
    let cluster = with("ingest_in_transactions").await;
    let sql = cluster.client(1).await;
    assert_eq!(numbers(&sql, "SELECT id FROM fruit ORDER BY id").await, [1, 2, 30, 31, 40]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cancelled_ends_and_leaves_nothing() {
    let cluster = with("cancelling").await;
    let running = || cluster.nodes.iter().map(|node| node.engine().running()).sum::<usize>();
    until("all to end", async || running() == 0).await;
    assert_eq!(number(&cluster.client(1).await, "SELECT count(*) FROM fruit").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn pandas_and_polars_read_and_write() {
    let cluster = with("frames").await;
    let sql = cluster.client(1).await;
    assert_eq!(text(&sql, "SELECT * FROM from_polars ORDER BY id").await, [["1", "a"], ["2", "NULL"]]);
    assert_eq!(number(&sql, "SELECT count(*) FROM from_pandas").await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_catalog_is_seen_and_a_change_is_made_once() {
    let cluster = with("catalog").await;
    let sql = cluster.client(1).await;
    assert_eq!(number(&sql, "SELECT count(*) FROM fruit WHERE id = 20").await, 1);
}
