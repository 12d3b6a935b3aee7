//! CREATE OR REPLACE, ALTER TABLE, COMMENT, properties.

use lake_query::Kind;

use crate::common::*;
use crate::table::{metadata, operation};

#[tokio::test(flavor = "multi_thread")]
async fn altered_columns_keep_their_values() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (a INT NOT NULL, b FLOAT, c DECIMAL(5, 2), d VARCHAR)").await;
    run(&client, "INSERT INTO t VALUES (1, 1.5, 1.25, 'x')").await;
    run(&client, "ALTER TABLE t RENAME COLUMN a TO id").await;
    run(&client, "ALTER TABLE t ADD COLUMN a VARCHAR COMMENT 'again', ADD COLUMN first BIGINT FIRST").await;
    run(&client, "ALTER TABLE t ALTER COLUMN id SET DATA TYPE BIGINT, ALTER COLUMN b TYPE DOUBLE").await;
    run(&client, "ALTER TABLE t ALTER COLUMN c TYPE DECIMAL(8, 2), ALTER COLUMN id DROP NOT NULL").await;
    run(&client, "INSERT INTO t (id, a, c) VALUES (5000000000, 'new', 123456.78)").await;
    assert_eq!(
        text(&client, "SELECT first, id, b, c, d, a FROM t ORDER BY id").await,
        [["NULL", "1", "1.5", "1.25", "x", "NULL"], ["NULL", "5000000000", "NULL", "123456.78", "NULL", "new"]]
    );
    // A column dropped and added again has none of the old values.
    run(&client, "ALTER TABLE t DROP COLUMN d").await;
    run(&client, "ALTER TABLE t ADD COLUMN d VARCHAR AFTER id, ADD COLUMN IF NOT EXISTS b INT").await;
    assert_eq!(
        text(&client, "DESCRIBE t").await.into_iter().map(|row| row[0].clone()).collect::<Vec<_>>(),
        ["first", "id", "d", "b", "c", "a"]
    );
    assert_eq!(text(&client, "SELECT d, b FROM t ORDER BY id").await, [["NULL", "1.5"], ["NULL", "NULL"]]);
    // Changes of rows meet files of several schemas.
    assert_eq!(number(&client, "UPDATE t SET d = concat(a, c)").await, 2);
    assert_eq!(number(&client, "DELETE FROM t WHERE id > 1").await, 1);
    assert_eq!(
        text(&client, "SELECT first, id, d, b, c, a FROM t").await,
        [["NULL", "1", "1.25", "1.5", "1.25", "NULL"]]
    );
    let before = metadata(&cluster, "t").await;
    for (sql, kind, words) in [
        ("ALTER TABLE t DROP COLUMN nope", Kind::NotFound, "no column nope"),
        ("ALTER TABLE t ADD COLUMN ID INT", Kind::AlreadyExists, "column id already"),
        ("ALTER TABLE t RENAME COLUMN b TO c", Kind::AlreadyExists, "column c already"),
        ("ALTER TABLE t ALTER COLUMN id TYPE INT", Kind::Invalid, "cannot become int"),
        ("ALTER TABLE t ALTER COLUMN d TYPE BIGINT", Kind::Invalid, "cannot become long"),
        ("ALTER TABLE t ALTER COLUMN c TYPE DECIMAL(9, 3)", Kind::Invalid, "cannot become decimal"),
        ("ALTER TABLE t ALTER COLUMN b SET NOT NULL", Kind::Invalid, "cannot become NOT NULL"),
        ("ALTER TABLE t ADD COLUMN z INT NOT NULL", Kind::NotSupported, "NOT NULL"),
        ("ALTER TABLE t SET TBLPROPERTIES ('format-version' = '1')", Kind::Invalid, "cannot go back to 1"),
        ("ALTER TABLE t SET TBLPROPERTIES ('format-version' = '4')", Kind::Invalid, "must be 2 or 3"),
        ("ALTER TABLE t UNSET TBLPROPERTIES ('nope')", Kind::NotFound, "no property nope"),
        ("ALTER TABLE nope ADD COLUMN b INT", Kind::NotFound, "nope does not exist"),
    ] {
        let error = refused(&client, sql).await;
        assert!(error.kind == kind && error.message.contains(words), "{sql}: {:?} {error}", error.kind);
    }
    for sql in [
        "ALTER TABLE t DROP COLUMN IF EXISTS nope",
        "ALTER TABLE IF EXISTS nope DROP COLUMN b",
        "ALTER TABLE t UNSET TBLPROPERTIES IF EXISTS ('nope')",
        "ALTER TABLE t SET TBLPROPERTIES ('format-version' = '2')",
    ] {
        run(&client, sql).await;
    }
    let after = metadata(&cluster, "t").await;
    assert_eq!(after.last_updated_ms(), before.last_updated_ms(), "nothing to do makes no version");
}

#[tokio::test(flavor = "multi_thread")]
async fn properties_and_comments_are_kept() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (a INT) WITH ('write.delete.isolation-level' = 'snapshot', x = 1)").await;
    run(&client, "ALTER TABLE t SET TBLPROPERTIES ('y' = 'two', 'x' = '3')").await;
    run(&client, "COMMENT ON TABLE t IS 'words'").await;
    run(&client, "COMMENT ON COLUMN t.a IS 'a number'").await;
    let table = metadata(&cluster, "t").await;
    for (name, value) in [("write.delete.isolation-level", "snapshot"), ("x", "3"), ("y", "two"), ("comment", "words")]
    {
        assert_eq!(table.properties().get(name).map(String::as_str), Some(value), "{name}");
    }
    assert_eq!(table.current_schema().field_by_name("a").unwrap().doc.as_deref(), Some("a number"));
    run(&client, "ALTER TABLE t UNSET TBLPROPERTIES ('x', 'y')").await;
    run(&client, "COMMENT ON TABLE t IS NULL").await;
    let table = metadata(&cluster, "t").await;
    assert!(["x", "y", "comment"].iter().all(|name| !table.properties().contains_key(*name)));
    run(&client, "INSERT INTO t VALUES (1)").await;
    run(&client, "ALTER TABLE t SET TBLPROPERTIES ('write.delete.isolation-level' = 'sometimes')").await;
    let error = refused(&client, "DELETE FROM t").await;
    assert!(error.kind == Kind::Invalid && error.message.contains("must be serializable or snapshot"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_table_keeps_its_history_and_none_of_its_rows() {
    let cluster = Cluster::start(2).await;
    let client = cluster.client(0).await;
    assert_eq!(number(&client, "CREATE OR REPLACE TABLE t AS SELECT 1 AS a, 'x' AS b").await, 1);
    let before = metadata(&cluster, "t").await;
    assert_eq!(number(&client, "CREATE OR REPLACE TABLE t AS SELECT a + 1 AS b, a FROM t").await, 1);
    assert_eq!(text(&client, "SELECT b, a FROM t").await, [["2", "1"]]);
    let after = metadata(&cluster, "t").await;
    assert_eq!((after.uuid(), after.location()), (before.uuid(), before.location()));
    assert_eq!((after.snapshots().len(), operation(&after).as_str()), (2, "append"));
    assert!(after.snapshot_by_id(before.current_snapshot_id().unwrap()).is_some());
    let ids: Vec<i32> = after.current_schema().as_struct().fields().iter().map(|field| field.id).collect();
    assert_eq!(ids, [3, 4], "no id is used again");
    run(&client, "CREATE OR REPLACE TABLE t (z VARCHAR) COMMENT = 'empty'").await;
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 0);
    run(&client, "INSERT INTO t VALUES ('y')").await;
    assert_eq!(text(&client, "SELECT * FROM t").await, [["y"]]);
    // A query that fails leaves the table as it was.
    let error = refused(&client, "CREATE OR REPLACE TABLE t AS SELECT 1 / (length(z) - 1) AS x FROM t").await;
    assert!(error.message.contains("nothing was committed"), "{error}");
    assert_eq!(text(&client, "SELECT * FROM t").await, [["y"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_table_is_under_its_new_name_alone() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE SCHEMA s").await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS a").await;
    run(&client, "CREATE TABLE taken AS SELECT 2 AS a").await;
    let error = refused(&client, "ALTER TABLE t RENAME TO taken").await;
    assert_eq!(error.kind, Kind::AlreadyExists, "{error}");
    run(&client, "ALTER TABLE t RENAME TO s.u").await;
    assert_eq!(refused(&client, "SELECT * FROM t").await.kind, Kind::NotFound);
    run(&client, "INSERT INTO s.u VALUES (3)").await;
    assert_eq!(numbers(&client, "SELECT a FROM s.u ORDER BY a").await, [1, 3]);
    assert_eq!(refused(&client, "ALTER TABLE t RENAME TO v").await.kind, Kind::NotFound);
    run(&client, "ALTER TABLE IF EXISTS t RENAME TO v").await;
}
