//! DELETE, UPDATE, MERGE, INSERT OVERWRITE, TRUNCATE.

use iceberg::spec::ManifestStatus;
use lake_query::Kind;

use crate::common::*;
use crate::table::{entries, metadata, operation, summary};

async fn ids(client: &lake_query::client::SqlClient) -> Vec<i64> {
    numbers(client, "SELECT id FROM t ORDER BY id").await
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_rows_go_and_the_others_stay_where_they_were() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (id BIGINT, what VARCHAR)").await;
    for start in [0, 10, 20] {
        let insert = format!("INSERT INTO t SELECT value, 'x' || value FROM generate_series({start}, {})", start + 9);
        run(&client, &insert).await;
    }
    let before = metadata(&cluster, "t").await;
    // One file loses some rows, one all of them, one none.
    assert_eq!(number(&client, "DELETE FROM t WHERE id BETWEEN 5 AND 19").await, 15);
    assert_eq!(ids(&client).await, (0..5).chain(20..30).collect::<Vec<_>>());
    let after = metadata(&cluster, "t").await;
    assert_eq!(operation(&after), "overwrite");
    for (name, value) in [
        ("added-data-files", "1"),
        ("added-records", "5"),
        ("deleted-data-files", "2"),
        ("deleted-records", "20"),
        ("total-data-files", "2"),
        ("total-records", "15"),
        ("changed-partition-count", "1"),
    ] {
        assert_eq!(summary(&after, name).as_deref(), Some(value), "{name}");
    }
    let snapshot = after.current_snapshot().unwrap();
    assert_eq!(snapshot.parent_snapshot_id(), before.current_snapshot_id());
    assert_eq!(snapshot.sequence_number(), 4);
    let entries = entries(&after).await;
    let of = |status| entries.iter().filter(|entry| entry.status == status).collect::<Vec<_>>();
    let deleted = of(ManifestStatus::Deleted);
    assert_eq!(deleted.iter().map(|entry| entry.rows).sum::<u64>(), 20);
    assert!(deleted.iter().all(|entry| entry.snapshot == snapshot.snapshot_id() && entry.sequence < 4), "{deleted:?}");
    assert!(deleted.iter().all(|entry| entry.file_sequence == entry.sequence), "{deleted:?}");
    let added: Vec<_> =
        of(ManifestStatus::Added).into_iter().filter(|e| e.snapshot == snapshot.snapshot_id()).collect();
    assert!(added.len() == 1 && added[0].rows == 5 && added[0].sequence == 4, "{added:?}");

    // Whole files only: nothing is written anew. The deleted entries of the last snapshot are told of no more.
    assert_eq!(number(&client, "DELETE FROM t WHERE id >= 20").await, 10);
    let after = metadata(&cluster, "t").await;
    assert_eq!((operation(&after).as_str(), summary(&after, "added-data-files")), ("delete", None));
    assert_eq!(numbers(&client, "DELETE FROM t WHERE id = 77").await, [0]);
    assert_eq!(
        metadata(&cluster, "t").await.current_snapshot_id(),
        after.current_snapshot_id(),
        "no snapshot for nothing"
    );
    assert_eq!(number(&client, "DELETE FROM t").await, 5);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 0);
    assert_eq!(number(&client, "INSERT INTO t VALUES (1, 'y')").await, 1);
    assert_eq!(ids(&client).await, [1]);
}

/// DataFusion hands a provider no filter for EXISTS, and another query's for IN and NOT EXISTS.
#[tokio::test(flavor = "multi_thread")]
async fn conditions_with_subqueries_delete_what_select_finds() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE u AS SELECT * FROM (VALUES (2), (3), (NULL)) AS u(k)").await;
    for condition in [
        "EXISTS (SELECT 1 FROM u WHERE u.k = t.id)",
        "NOT EXISTS (SELECT 1 FROM u WHERE u.k = t.id)",
        "id IN (SELECT k FROM u)",
        "id NOT IN (SELECT k FROM u)",
        "id NOT IN (SELECT k FROM u WHERE k IS NOT NULL)",
        "id IN (SELECT k FROM u) OR id = 5",
        "id = (SELECT max(k) FROM u)",
        "id > (SELECT avg(id) FROM t)",
        "NOT (id = 1) AND id < 4",
        "id IS NULL",
        "NOT (id > 2)",
        "true",
        "false",
        "NULL",
    ] {
        run(&client, "CREATE TABLE t AS SELECT * FROM (VALUES (1), (2), (3), (4), (5), (NULL)) AS t(id)").await;
        run(&client, "INSERT INTO t VALUES (6), (7)").await;
        let all = text(&client, "SELECT id FROM t ORDER BY id").await;
        let found = text(&client, &format!("SELECT id FROM t WHERE {condition} ORDER BY id")).await;
        let deleted = number(&client, &format!("DELETE FROM t WHERE {condition}")).await;
        let left = text(&client, "SELECT id FROM t ORDER BY id").await;
        assert_eq!(deleted as usize, found.len(), "{condition}");
        let expected: Vec<_> = all.into_iter().filter(|row| !found.contains(row)).collect();
        assert_eq!(left, expected, "{condition}");
        run(&client, "DROP TABLE t").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_change_what_they_name_and_nothing_else() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (id BIGINT NOT NULL, a INT, b VARCHAR, f DOUBLE, l INT[], ts TIMESTAMP)").await;
    for row in [
        "1, 10, 'x', 'NaN', [1, NULL], TIMESTAMP '2026-01-02 03:04:05.678901'",
        "2, NULL AS a, NULL AS b, 2.5, NULL AS l, NULL AS ts",
        "3, 30, 'z', 1e300, [3], NULL",
    ] {
        run(&client, &format!("INSERT INTO t SELECT {row}")).await;
    }
    assert_eq!(number(&client, "UPDATE t SET a = a + 1, B = upper(b) WHERE t.id <> 3").await, 2);
    assert_eq!(
        text(&client, "SELECT * FROM t ORDER BY id").await,
        [
            ["1", "11", "X", "NaN", "[1, NULL]", "2026-01-02T03:04:05.678901"],
            ["2", "NULL", "NULL", "2.5", "NULL", "NULL"],
            ["3", "30", "z", "1e300", "[3]", "NULL"],
        ]
    );
    // Both sides are those of before, and a subquery sees the version that the statement began with.
    assert_eq!(number(&client, "UPDATE t AS x SET id = a, a = id WHERE x.a IS NOT NULL").await, 2);
    assert_eq!(text(&client, "SELECT id, a FROM t ORDER BY id").await, [["2", "NULL"], ["11", "1"], ["30", "3"]]);
    assert_eq!(number(&client, "UPDATE t SET a = (SELECT max(id) FROM t)").await, 3);
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE a = 30").await, 3);
    for (sql, words) in [
        ("UPDATE t SET id = NULL WHERE id = 2", "column id is NOT NULL"),
        ("UPDATE t SET a = 1 / (id - 2)", "ivide by zero"),
        ("UPDATE t SET a = 3000000000", "cast"),
    ] {
        let error = refused(&client, sql).await;
        assert_eq!(error.kind, Kind::Invalid, "{sql}: {error}");
        assert!(error.message.to_lowercase().contains(&words.to_lowercase()), "{sql}: {error}");
        assert!(error.message.contains("nothing was committed"), "{sql}: {error}");
    }
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE a = 30").await, 3);

    run(&client, "CREATE TABLE s AS SELECT * FROM (VALUES (2, 'two'), (30, 'thirty'), (99, 'none')) AS s(k, v)").await;
    assert_eq!(number(&client, "UPDATE t SET b = s.v || t.id FROM s WHERE s.k = t.id").await, 2);
    assert_eq!(text(&client, "SELECT b FROM t ORDER BY id").await.concat(), ["two2", "X", "thirty30"]);
    run(&client, "INSERT INTO s VALUES (2, 'deux')").await;
    let error = refused(&client, "UPDATE t SET b = s.v FROM s WHERE s.k = t.id").await;
    assert!(error.kind == Kind::Invalid && error.message.contains("more than one row of the source"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn merge_does_what_its_clauses_say() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (id BIGINT, v VARCHAR, n INT)").await;
    run(&client, "INSERT INTO t VALUES (1, 'a', 1), (2, 'b', 2), (NULL, 'null', 0)").await;
    run(&client, "INSERT INTO t VALUES (3, 'c', 3), (4, 'd', 4)").await;
    run(&client, "CREATE TABLE s AS SELECT * FROM (VALUES (2, 'B', 'u'), (3, 'C', 'd'), (4, 'D', 'k'), (5, 'E', 'u'), (6, 'F', 'd'), (NULL, 'N', 'u')) AS s(id, v, op)").await;
    let merge = "MERGE INTO t AS x USING s ON x.id = s.id \
        WHEN MATCHED AND s.op = 'd' THEN DELETE \
        WHEN MATCHED AND s.op = 'u' THEN UPDATE SET v = s.v || x.v, n = x.n * 10 \
        WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT (v, id) VALUES (s.v, s.id) \
        WHEN NOT MATCHED BY SOURCE AND x.id = 1 THEN UPDATE SET n = -1";
    assert_eq!(number(&client, merge).await, 5);
    assert_eq!(
        text(&client, "SELECT * FROM t ORDER BY id NULLS LAST, v").await,
        [
            ["1", "a", "-1"],
            ["2", "Bb", "20"],
            ["4", "d", "4"],
            ["5", "E", "NULL"],
            ["NULL", "N", "NULL"],
            ["NULL", "null", "0"],
        ]
    );
    // A condition is looked at for rows of its kind only.
    let merge = "MERGE INTO t USING (SELECT 2 AS k, 0 AS d UNION ALL SELECT 50, 5) AS s ON t.id = s.k \
        WHEN MATCHED AND t.n > 0 THEN UPDATE SET n = 7 \
        WHEN NOT MATCHED AND 10 / s.d = 2 THEN INSERT VALUES (s.k, 'new', s.d)";
    assert_eq!(number(&client, merge).await, 2);
    assert_eq!(text(&client, "SELECT id, n FROM t WHERE id IN (2, 50) ORDER BY id").await, [["2", "7"], ["50", "5"]]);
    // Insert-only, and nothing to insert.
    let merge = "MERGE INTO t USING s ON t.id = s.id OR (t.id IS NULL AND s.id IS NULL) WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.v, 0)";
    assert_eq!(number(&client, merge).await, 2);
    let after = metadata(&cluster, "t").await;
    assert_eq!(operation(&after), "append");
    let merge = "MERGE INTO t USING s ON t.id = s.id OR (t.id IS NULL AND s.id IS NULL) WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.v, 0)";
    assert_eq!(number(&client, merge).await, 0);
    assert_eq!(metadata(&cluster, "t").await.current_snapshot_id(), after.current_snapshot_id());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_row_that_matches_twice_is_an_error() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT * FROM (VALUES (1, 'a'), (2, 'b')) AS t(id, v)").await;
    let before = metadata(&cluster, "t").await.current_snapshot_id();
    let files = cluster.files(".parquet");
    let source = "(VALUES (1, 'x'), (1, 'y'), (3, 'z')) AS s(id, v)";
    for clauses in [
        "WHEN MATCHED THEN UPDATE SET v = s.v",
        "WHEN MATCHED AND s.v = 'x' THEN UPDATE SET v = s.v",
        "WHEN MATCHED AND s.v = 'y' THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.v)",
    ] {
        let error = refused(&client, &format!("MERGE INTO t USING {source} ON t.id = s.id {clauses}")).await;
        assert!(error.kind == Kind::Invalid && error.message.contains("more than one row of the source"), "{error}");
        assert!(error.message.contains("nothing was committed"), "{error}");
    }
    assert_eq!(metadata(&cluster, "t").await.current_snapshot_id(), before);
    until("what was written to go", async || cluster.files(".parquet") == files).await;
    let error = refused(
        &client,
        "MERGE INTO t USING (SELECT 1 AS id) AS s ON t.id = s.id AND EXISTS (SELECT 1 FROM t AS u WHERE u.id = s.id) \
         WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'x')",
    )
    .await;
    assert!(error.kind == Kind::NotSupported && error.message.contains("subquery in USING"), "{error}");
    // Without WHEN MATCHED nothing happens to a row that matches.
    let insert = format!("MERGE INTO t USING {source} ON t.id = s.id WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.v)");
    assert_eq!(number(&client, &insert).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn overwritten_and_truncated_tables_have_only_what_came_after() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (id BIGINT)").await;
    assert_eq!(number(&client, "INSERT OVERWRITE t VALUES (1), (2)").await, 2);
    assert_eq!(number(&client, "INSERT INTO t VALUES (3)").await, 1);
    assert_eq!(number(&client, "INSERT OVERWRITE t SELECT id * 10 FROM t").await, 3);
    assert_eq!(ids(&client).await, [10, 20, 30]);
    let after = metadata(&cluster, "t").await;
    assert_eq!(operation(&after), "overwrite");
    assert_eq!(summary(&after, "deleted-data-files").as_deref(), Some("2"));
    assert_eq!(number(&client, "INSERT OVERWRITE t SELECT id FROM t WHERE false").await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 0);
    run(&client, "INSERT INTO t VALUES (4)").await;
    run(&client, "TRUNCATE TABLE t").await;
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 0);
    let after = metadata(&cluster, "t").await;
    assert_eq!((operation(&after).as_str(), summary(&after, "total-records").as_deref()), ("delete", Some("0")));
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_of_a_change_shows_how_rows_are_found_and_does_nothing() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS id").await;
    for sql in ["DELETE FROM t WHERE id = 1", "UPDATE t SET id = 2 WHERE id = 1"] {
        let plan = pretty(&run(&client, &format!("EXPLAIN {sql}")).await);
        assert!(plan.contains("DataSourceExec") && plan.contains("_pos"), "{plan}");
    }
    assert_eq!(ids(&client).await, [1]);
}

/// Positions are those of the file, also where the reader has skipped row groups and pages.
#[tokio::test(flavor = "multi_thread")]
async fn positions_hold_where_parts_of_a_file_are_skipped() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT value AS id, value % 7 AS m FROM generate_series(0, 1299999)").await;
    assert_eq!(number(&client, "DELETE FROM t WHERE id BETWEEN 1200000 AND 1200009").await, 10);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 1_299_990);
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE id BETWEEN 1199990 AND 1200019").await, 20);
    assert_eq!(number(&client, "UPDATE t SET m = -1 WHERE id = 1250000").await, 1);
    assert_eq!(text(&client, "SELECT id FROM t WHERE m = -1").await, [["1250000"]]);
    assert_eq!(
        text(&client, "SELECT count(*), count(DISTINCT id), sum(id) FROM t").await,
        [["1299990", "1299990", "844987349955"]]
    );
}
