//! Polars and Daft, as their users use them.

use crate::common::{Cluster, numbers, run};
use crate::{cluster, make_from_sql, python, uri};

const SCRIPT: &str = "frames_client.py";

/// Has a function of the script read tables that SQL has written and deleted from, and write one of its own.
async fn with(function: &str) -> Cluster {
    let cluster = cluster(2).await;
    let sql = cluster.client(1).await;
    let uri = uri(&cluster, 0);
    make_from_sql(&sql, r#""default""#).await;
    python::run(SCRIPT, function, &[&uri]).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn polars_reads_and_writes() {
    let cluster = with("with_polars").await;
    let sql = cluster.client(1).await;
    assert_eq!(numbers(&sql, "SELECT id FROM from_polars").await, [4]);
    run(&sql, "INSERT INTO from_polars VALUES (5, 'more')").await;
    assert_eq!(numbers(&sql, "SELECT id FROM from_polars ORDER BY id").await, [4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn daft_reads_and_appends() {
    let cluster = with("with_daft").await;
    let sql = cluster.client(1).await;
    assert_eq!(numbers(&sql, "SELECT id FROM from_daft ORDER BY id").await, [1, 2, 3]);
}
