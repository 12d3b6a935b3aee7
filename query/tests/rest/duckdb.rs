//! DuckDB with its iceberg extension, as its users use it.

use crate::common::{number, numbers, run, text};
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
    make_from_sql(&sql, r#""default""#).await;
    python::run(SCRIPT, "reads_and_appends", &[&uri]).await;
    assert_eq!(numbers(&sql, "SELECT id FROM from_sql ORDER BY id").await, [1, 2, 3, 4]);
    assert_eq!(number(&sql, "SELECT CAST(id AS BIGINT) FROM from_duckdb WHERE what = 'x'").await, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_duckdb_or_sql_deletes_is_gone_for_the_other() {
    let cluster = cluster(2).await;
    let sql = cluster.client(1).await;
    let uri = uri(&cluster, 0);
    let merge_on_read = "'write.delete.mode' = 'merge-on-read', 'write.update.mode' = 'merge-on-read'";
    // Position deletes in one, deletion vectors in the other.
    for (name, version) in [("second", 2), ("third", 3)] {
        let with = format!("WITH ('format-version' = '{version}', {merge_on_read})");
        run(&sql, &format!("CREATE TABLE {name} (id BIGINT, what TEXT) {with}")).await;
        run(&sql, &format!("INSERT INTO {name} VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, NULL)")).await;
        run(&sql, &format!("DELETE FROM {name} WHERE id = 2")).await;
        run(&sql, &format!("UPDATE {name} SET what = 'z' WHERE id = 3")).await;
    }
    python::run(SCRIPT, "deletes", &[&uri]).await;
    for name in ["second", "third"] {
        let rows = text(&sql, &format!("SELECT id, what FROM {name} ORDER BY id")).await;
        assert_eq!(rows, [["3", "z"], ["4", "y"], ["5", "e"]], "{name}");
        run(&sql, &format!("DELETE FROM {name} WHERE id = 5")).await;
        assert_eq!(numbers(&sql, &format!("SELECT id FROM {name} ORDER BY id")).await, [3, 4], "{name}");
    }
}
