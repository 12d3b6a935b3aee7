//! What a node says of itself, and how it stops.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};
use lake_client::memory::MemoryStore;
use lake_query::{Kind, Options};

use crate::common::{Cluster, TIMEOUT, refused, run};
use crate::http::Http;
use crate::support::eventually;

async fn observed(change: impl Fn(Options) -> Options) -> (Cluster, Http) {
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 1, |options| {
        change(Options { http_listen: Some("127.0.0.1:0".into()), ..options })
    })
    .await;
    let http = Http::new(cluster.nodes[0].http_address().unwrap());
    (cluster, http)
}

async fn metrics(http: &Http) -> String {
    String::from_utf8(http.get("/metrics").await.expect(200).body).unwrap()
}

/// Waits until the figures have this line.
async fn until_counted(http: &Http, line: &str) {
    eventually(line, async || metrics(http).await.lines().any(|known| known == line).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_are_counted_by_command_and_outcome() {
    let (cluster, http) = observed(|options| options).await;
    http.get("/live").await.expect(200);
    http.get("/ready").await.expect(200);
    http.get("/nothing").await.expect(404);
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t AS SELECT * FROM (VALUES (1), (2), (0)) AS v(x)").await;
    run(&sql, "SELECT x FROM t").await;
    refused(&sql, "SELECT 1 / x FROM t").await;
    refused(&sql, "INSERT INTO t SELECT 9223372036854775807 + x FROM t").await;
    for line in [
        "lake_query_statements_total{command=\"CREATE TABLE AS\",outcome=\"done\"} 1",
        "lake_query_statement_rows_total{command=\"CREATE TABLE AS\"} 3",
        "lake_query_statements_total{command=\"SELECT\",outcome=\"done\"} 1",
        "lake_query_statements_total{command=\"SELECT\",outcome=\"invalid\"} 1",
        "lake_query_statement_rows_total{command=\"SELECT\"} 3",
        "lake_query_statements_total{command=\"INSERT\",outcome=\"invalid\"} 1",
        "lake_query_statement_seconds_count{command=\"SELECT\"} 2",
        "lake_query_statements_running 0",
    ] {
        until_counted(&http, line).await;
    }
    let mut rows = sql.execute("SELECT value FROM generate_series(1, 100000000)", TIMEOUT).await.unwrap();
    rows.next().await.unwrap().unwrap();
    until_counted(&http, "lake_query_statements_running 1").await;
    drop(rows);
    until_counted(&http, "lake_query_statements_total{command=\"SELECT\",outcome=\"cancelled\"} 1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_ends_what_it_has_begun_and_begins_no_more() {
    let (mut cluster, http) = observed(|options| options).await;
    let (reading, late) = (cluster.client(0).await, cluster.client(0).await);
    let mut rows = reading.execute("SELECT value FROM generate_series(1, 1000000)", TIMEOUT).await.unwrap();
    let first = rows.next().await.unwrap().unwrap();
    let node = cluster.nodes.pop().unwrap();
    let stopping = tokio::spawn(node.shutdown());
    eventually("it to be ready no more", async || (http.get("/ready").await.status != 200).then_some(())).await;
    // Read at once: the node does not wait for its clients for ever.
    let rest = tokio::spawn(rows.try_collect::<Vec<_>>());
    // Ready no more, the node may have closed its connections already.
    let error = refused(&late, "SELECT 1").await;
    assert!(matches!(error.kind, Kind::Unavailable | Kind::Unknown), "{error}");
    let rest = rest.await.unwrap().unwrap();
    let count = first.num_rows() + rest.iter().map(|batch| batch.num_rows()).sum::<usize>();
    assert_eq!(count, 1_000_000);
    stopping.await.unwrap();
}
