//! DuckDB with its iceberg extension, as its users use it.

use crate::common::{number, numbers};
use crate::{cluster, make_from_sql, python, rest, uri};

const SCRIPT: &str = "duckdb_client.py";

#[tokio::test(flavor = "multi_thread")]
async fn duckdb_makes_changes_and_reads_tables() {
    let cluster = cluster(2).await;
    let uri = uri(&cluster, 0);
    python::run(SCRIPT, "session", &[&uri]).await;
    python::run(SCRIPT, "drops", &[&uri]).await;
    rest(&cluster, 1).head("/v1/lake/namespaces/d").await.expect(404);
}

#[tokio::test(flavor = "multi_thread")]
async fn duckdb_and_sql_read_what_the_other_wrote() {
    let cluster = cluster(2).await;
    let sql = cluster.client(1).await;
    let uri = uri(&cluster, 0);
    make_from_sql(&sql).await;
    python::run(SCRIPT, "reads_and_appends", &[&uri]).await;
    assert_eq!(numbers(&sql, "SELECT id FROM from_sql ORDER BY id").await, [1, 2, 3, 4]);
    assert_eq!(number(&sql, "SELECT CAST(id AS BIGINT) FROM from_duckdb WHERE what = 'x'").await, 10);
}
