//! Who is let in, how much of the node it may have, and for how long.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Cluster, TIMEOUT, in_time, number, pretty, refused, run, until};
use futures::TryStreamExt;
use lake_client::memory::MemoryStore;
use lake_query::client::{Rows, SqlClient};
use lake_query::{Kind, Options};

async fn cluster(change: impl Fn(Options) -> Options) -> Cluster {
    Cluster::over(Arc::new(MemoryStore::new()), 1, change).await
}

/// More rows than a connection takes without being read: the statement goes on for as long as nobody reads them.
async fn begin_long_query(client: &SqlClient, timeout: Option<Duration>) -> Rows {
    client.execute("SELECT value FROM generate_series(1, 1000000000000)", timeout).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn so_many_statements_run_and_the_rest_waits_or_is_refused() {
    let cluster =
        cluster(|options| Options { max_statements: Some(1), max_queued_statements: Some(1), ..options }).await;
    let engine = cluster.nodes[0].engine();
    let client = cluster.client(0).await;
    let first = begin_long_query(&client, TIMEOUT).await;
    let waiting = {
        let client = client.clone();
        tokio::spawn(async move { number(&client, "SELECT 7").await })
    };
    until("a statement to wait", async || engine.waiting() > 0).await;
    let error = refused(&client, "SELECT 8").await;
    assert!(error.kind == Kind::Exhausted && error.message.contains("another node"), "{error}");
    drop(first);
    assert_eq!(in_time("the one that waited", waiting).await.unwrap(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_ends_at_its_deadline_though_nobody_reads_it() {
    let cluster = cluster(|options| options).await;
    let engine = cluster.nodes[0].engine();
    let client = cluster.client(0).await;
    let rows = begin_long_query(&client, Some(Duration::from_secs(15))).await;
    assert_eq!(engine.running(), 1);
    until("the query to end", async || engine.running() == 0).await;
    let error = rows.try_collect::<Vec<_>>().await.unwrap_err();
    assert_eq!(error.kind, Kind::Deadline, "{error}");
    // Read in time, all rows come.
    let rows = run(&client, "SELECT * FROM tpch('lineitem', 0.1)").await;
    assert_eq!(rows.iter().map(|batch| batch.num_rows()).sum::<usize>(), 600_572);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_that_is_too_large_fails_alone() {
    let cluster = cluster(|options| Options {
        memory_limit_bytes: Some(64 << 20),
        statement_memory_bytes: Some(4 << 20),
        max_result_rows: Some(1000),
        max_result_bytes: Some(64 << 10),
        ..options
    })
    .await;
    let client = cluster.client(0).await;
    let join = "SELECT count(*) FROM tpch('lineitem', 0.1) AS a JOIN tpch('lineitem', 0.1) AS b \
                ON a.l_comment = b.l_comment AND a.l_orderkey = b.l_orderkey";
    let other = "SELECT count(*) FROM tpch('orders', 0.01)";
    let (error, other) = tokio::join!(refused(&client, join), number(&client, other));
    assert!(error.kind == Kind::Exhausted && error.message.contains("HashJoinInput"), "{error}");
    assert_eq!(other, 15_000);
    // What it held is free again, once its tasks have noticed.
    until("what it held to be free", async || cluster.nodes[0].engine().memory_held() == 0).await;
    for (query, setting) in [
        ("SELECT l_orderkey FROM tpch('lineitem', 0.01)", "max_result_rows"),
        ("SELECT repeat('x', 100000)", "max_result_bytes"),
    ] {
        let error = refused(&client, query).await;
        assert!(error.kind == Kind::Exhausted && error.message.contains(setting), "{error}");
    }
    run(&client, "SELECT l_orderkey FROM tpch('lineitem', 0.01) LIMIT 1000").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_spilled_up_to_a_limit() {
    let little = |options| Options { statement_memory_bytes: Some(48 << 20), ..options };
    let sql = "SELECT * FROM tpch('lineitem', 0.1) ORDER BY l_comment";
    let roomy = cluster(little).await;
    let plan = pretty(&run(&roomy.client(0).await, &format!("EXPLAIN ANALYZE {sql}")).await);
    let spills = plan.split("spill_count=").skip(1).any(|count| !count.starts_with('0'));
    assert!(spills && plan.contains("output_rows=600"), "{plan}");

    let cluster = cluster(|options| Options { spill_limit_bytes: Some(1 << 20), ..little(options) }).await;
    let client = cluster.client(0).await;
    let error = refused(&client, sql).await;
    assert!(error.kind == Kind::Exhausted && error.message.contains("spill_limit_bytes"), "{error}");
    assert_eq!(number(&client, "SELECT 1").await, 1);
}
