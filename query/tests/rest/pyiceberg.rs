//! PyIceberg, as its users use it.

use crate::common::{number, numbers, run, text};
use crate::{cluster, python};

const SCRIPT: &str = "pyiceberg_client.py";

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_makes_changes_and_reads_tables() {
    let cluster = cluster(2).await;
    let uri = format!("http://{}", cluster.nodes[0].rest_address().unwrap());
    python::run(SCRIPT, "session", &[&uri]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_and_sql_read_what_the_other_wrote() {
    let cluster = cluster(2).await;
    let sql = cluster.client(1).await;
    let uri = format!("http://{}", cluster.nodes[0].rest_address().unwrap());
    run(&sql, "CREATE TABLE from_sql AS SELECT * FROM (VALUES (1, 'a'), (2, NULL)) AS v(id, what)").await;
    run(&sql, "INSERT INTO from_sql VALUES (3, 'c')").await;
    python::run(SCRIPT, "reads_and_appends", &[&uri]).await;
    assert_eq!(numbers(&sql, "SELECT id FROM from_sql ORDER BY id").await, [1, 2, 3, 4]);
    assert_eq!(number(&sql, "SELECT count(*) FROM from_python WHERE what IS NULL").await, 1);
    let rows = text(&sql, "SELECT id, what, price FROM from_python ORDER BY id").await;
    assert_eq!(rows, [["10", "x", "1.25"], ["11", "NULL", "NULL"], ["12", "z", "3.50"]]);
    run(&sql, "INSERT INTO from_python VALUES (13, 'q', 4.75)").await;
    python::run(SCRIPT, "sees_what_sql_added", &[&uri]).await;
}
