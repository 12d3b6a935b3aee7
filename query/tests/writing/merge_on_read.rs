//! Merge-on-read: delete files as other engines will find them.

use std::sync::Arc;

use iceberg::spec::{DataContentType, DataFile, DataFileFormat, Datum};
use lake_client::memory::MemoryStore;
use lake_query::client::SqlClient;
use lake_query::{Kind, Options};

use crate::common::*;
use crate::table::{files, metadata, operation, set_property, summary};

const MERGE_ON_READ: &str = "'write.delete.mode' = 'merge-on-read', 'write.update.mode' = 'merge-on-read', \
     'write.merge.mode' = 'merge-on-read'";
/// Field ids of the columns of position deletes.
const PATH: i32 = i32::MAX - 101;
const POSITION: i32 = i32::MAX - 102;

/// Nodes that look at every pointer anew.
async fn cluster(nodes: usize) -> Cluster {
    let change = |options| Options { pointer_ttl_ms: Some(0), ..options };
    Cluster::over(Arc::new(MemoryStore::new()), nodes, change).await
}

/// The live data files, and the live delete files.
async fn both(cluster: &Cluster, name: &str) -> (Vec<DataFile>, Vec<DataFile>) {
    let live = files(&metadata(cluster, name).await).await;
    live.into_iter().partition(|file| file.content_type() == DataContentType::Data)
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_named_and_data_files_stay() {
    let cluster = cluster(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    run(
        &a,
        &format!("CREATE TABLE t WITH ({MERGE_ON_READ}) AS SELECT value AS id, 'x' AS s FROM generate_series(0, 99)"),
    )
    .await;
    run(&a, "INSERT INTO t SELECT value, 'y' FROM generate_series(100, 109)").await;
    assert_eq!(number(&a, "DELETE FROM t WHERE id IN (3, 7, 50)").await, 3);
    let (data, deletes) = both(&cluster, "t").await;
    assert_eq!((data.len(), deletes.len()), (2, 1));
    let table = metadata(&cluster, "t").await;
    assert_eq!(operation(&table), "delete");
    for (name, value) in [
        ("added-delete-files", "1"),
        ("added-position-delete-files", "1"),
        ("added-position-deletes", "3"),
        ("total-position-deletes", "3"),
        ("total-delete-files", "1"),
        ("total-records", "110"),
    ] {
        assert_eq!(summary(&table, name).as_deref(), Some(value), "{name}");
    }
    let large = data.iter().find(|file| file.record_count() == 100).unwrap();
    let [delete] = deletes.as_slice() else { panic!("{deletes:?}") };
    assert_eq!((delete.file_format(), delete.record_count()), (DataFileFormat::Parquet, 3));
    assert_eq!(delete.referenced_data_file().as_deref(), Some(large.file_path()));
    let path = Datum::string(large.file_path());
    assert_eq!((&delete.lower_bounds()[&PATH], &delete.upper_bounds()[&PATH]), (&path, &path));
    let (first, last) = (Datum::long(3), Datum::long(50));
    assert_eq!((&delete.lower_bounds()[&POSITION], &delete.upper_bounds()[&POSITION]), (&first, &last));
    assert_eq!(delete.value_counts()[&POSITION], 3);
    let on_disk = std::fs::metadata(delete.file_path().strip_prefix("file://").unwrap()).unwrap();
    assert_eq!(delete.file_size_in_bytes(), on_disk.len());

    // Named again together with what comes; a statement that moves rows adds a data file.
    assert_eq!(number(&a, "UPDATE t SET s = 'z', id = -id WHERE id BETWEEN 8 AND 9 OR id = 105").await, 3);
    let table = metadata(&cluster, "t").await;
    assert_eq!(operation(&table), "overwrite");
    let (data, deletes) = both(&cluster, "t").await;
    assert_eq!((data.len(), deletes.len()), (3, 2));
    assert_eq!(deletes.iter().map(DataFile::record_count).max(), Some(5));
    assert_eq!(summary(&table, "removed-delete-files").as_deref(), Some("1"));
    assert_eq!(summary(&table, "total-position-deletes").as_deref(), Some("6"));
    let merge = "MERGE INTO t USING (VALUES (1), (500)) AS s(k) ON t.id = s.k WHEN MATCHED THEN DELETE \
         WHEN NOT MATCHED THEN INSERT VALUES (s.k, 'new')";
    assert_eq!(number(&a, merge).await, 2);
    let left: Vec<i64> = [-105, -9, -8].into_iter().chain(0..110).chain([500]).collect();
    let gone = [1, 3, 7, 8, 9, 50, 105];
    let mut left: Vec<i64> = left.into_iter().filter(|id| !gone.contains(id)).collect();
    for client in [&a, &b] {
        assert_eq!(numbers(client, "SELECT id FROM t ORDER BY id").await, left);
        assert_eq!(number(client, "SELECT count(*) FROM t WHERE s = 'z'").await, 3);
    }
    // Of a file without rows nothing is left, nor of what was deleted from it.
    assert_eq!(number(&b, "DELETE FROM t WHERE id BETWEEN 100 AND 110").await, 9);
    let (data, deletes) = both(&cluster, "t").await;
    assert_eq!((data.len(), deletes.len()), (3, 1), "{data:?}");
    left.retain(|id| !(100..=110).contains(id));

    assert_eq!(number(&b, "CALL system.rewrite_data_files('t', 10)").await, 1, "only the one with deletes");
    let table = metadata(&cluster, "t").await;
    assert_eq!(summary(&table, "total-delete-files").as_deref(), Some("0"));
    assert_eq!(summary(&table, "total-records").map(|rows| rows.parse().unwrap()), Some(left.len()));
    assert_eq!(numbers(&b, "SELECT id FROM t ORDER BY id").await, left);
    // What only the history needs goes with it.
    run(&b, "ALTER TABLE t SET TBLPROPERTIES ('lake.expire-snapshots.held-ms' = '0')").await;
    run(&b, "CALL system.expire_snapshots('t', older_than => now())").await;
    assert_eq!(cluster.files(".parquet").len(), files(&table).await.len());
    assert_eq!(numbers(&b, "SELECT id FROM t ORDER BY id").await, left);
    set_property(&cluster, "t", "write.delete.mode", "sometimes").await;
    let error = refused(&b, "DELETE FROM t WHERE id = 2").await;
    assert!(error.kind == Kind::Invalid && error.message.contains("write.delete.mode"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_file_may_be_of_a_partition() {
    let cluster = cluster(1).await;
    let client = cluster.client(0).await;
    run(
        &client,
        &format!(
            "CREATE TABLE t (p BIGINT, id BIGINT) PARTITIONED BY (p) \
             WITH ({MERGE_ON_READ}, 'write.delete.granularity' = 'partition')"
        ),
    )
    .await;
    for start in [0, 100, 200] {
        run(&client, &format!("INSERT INTO t SELECT value % 2, value FROM generate_series({start}, {})", start + 9))
            .await;
    }
    // Partitioned otherwise from now on: deletes stay with the data files.
    run(&client, "ALTER TABLE t SET PARTITIONED BY (bucket(2, id))").await;
    assert_eq!(number(&client, "DELETE FROM t WHERE id % 10 = 2").await, 3);
    let (data, deletes) = both(&cluster, "t").await;
    assert_eq!((data.len(), deletes.len()), (6, 1));
    assert!(deletes[0].referenced_data_file().is_none() && deletes[0].record_count() == 3);
    assert_ne!(deletes[0].lower_bounds()[&PATH], deletes[0].upper_bounds()[&PATH]);
    assert_eq!(number(&client, "DELETE FROM t WHERE id < 3").await, 2);
    let left: Vec<i64> = (3..10).chain(100..110).chain(200..210).filter(|id| id % 10 != 2).collect();
    assert_eq!(numbers(&client, "SELECT id FROM t ORDER BY id").await, left);
    // Files of one partition lose what is deleted; a delete file goes once it applies to nothing.
    assert!(number(&client, "CALL system.rewrite_data_files('t')").await >= 3);
    assert_eq!(numbers(&client, "SELECT id FROM t ORDER BY id").await, left);
    assert_eq!(both(&cluster, "t").await.1.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_format_3_have_deletion_vectors_and_rows_keep_their_ids() {
    let cluster = cluster(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    run(&a, &format!("CREATE TABLE t (id BIGINT) WITH ({MERGE_ON_READ}, 'format-version' = '3')")).await;
    for start in [0, 100] {
        run(&a, &format!("INSERT INTO t SELECT value FROM generate_series({start}, {})", start + 9)).await;
    }
    assert_eq!(metadata(&cluster, "t").await.next_row_id(), 20);
    assert_eq!(number(&a, "DELETE FROM t WHERE id IN (1, 2, 101)").await, 3);
    let (data, deletes) = both(&cluster, "t").await;
    assert_eq!((data.len(), deletes.len()), (2, 2));
    for delete in &deletes {
        assert_eq!(delete.file_format(), DataFileFormat::Puffin);
        assert!(delete.content_offset().is_some() && delete.content_size_in_bytes().is_some());
        assert!(data.iter().any(|file| delete.referenced_data_file().as_deref() == Some(file.file_path())));
    }
    assert_eq!(cluster.files(".puffin").len(), 1, "all of one statement in one file");
    assert_eq!(summary(&metadata(&cluster, "t").await, "added-dvs").as_deref(), Some("2"));
    let explained = format!("{:?}", text(&a, "EXPLAIN SELECT count(*) FROM t").await);
    assert!(!explained.contains("DataSourceExec"), "a table with vectors is counted without reading: {explained}");
    // One vector for a file, with all that was deleted before.
    assert_eq!(number(&b, "DELETE FROM t WHERE id = 3").await, 1);
    let (_, deletes) = both(&cluster, "t").await;
    assert_eq!(deletes.iter().map(DataFile::record_count).sum::<u64>(), 4);
    assert_eq!(deletes.len(), 2);
    assert_eq!(metadata(&cluster, "t").await.next_row_id(), 20, "no row was added");
    assert_eq!(number(&b, "UPDATE t SET id = -id WHERE id = 102").await, 1);
    assert_eq!(number(&b, "DELETE FROM t WHERE id BETWEEN 0 AND 9").await, 7);
    let table = metadata(&cluster, "t").await;
    assert_eq!(table.next_row_id(), 21);
    let (data, deletes) = both(&cluster, "t").await;
    assert_eq!((data.len(), deletes.len()), (2, 1), "a whole file is gone");
    // The entry that stays in a manifest that was written anew tells the id that it had.
    let kept: Vec<_> = data.iter().filter(|file| file.record_count() == 10).map(DataFile::first_row_id).collect();
    assert!(kept == [None] || kept == [Some(10)], "{kept:?}");
    let left: Vec<i64> = [-102].into_iter().chain((100..110).filter(|id| ![101, 102].contains(id))).collect();
    run(&a, "CALL system.rewrite_manifests('t')").await;
    let data = both(&cluster, "t").await.0;
    let mut kept: Vec<_> = data.iter().map(DataFile::first_row_id).collect();
    kept.sort_unstable();
    assert_eq!(kept, [Some(10), Some(20)]);
    assert_eq!(metadata(&cluster, "t").await.next_row_id(), 21);
    for client in [&a, &b] {
        assert_eq!(numbers(client, "SELECT id FROM t ORDER BY id").await, left);
    }
    let error = refused(&a, "CREATE TABLE u (id BIGINT) WITH ('format-version' = '1')").await;
    assert!(error.kind == Kind::Invalid && error.message.contains("must be 2 or 3"), "{error}");
}

/// The id of each row that is there, on both nodes.
async fn see(clients: [&SqlClient; 2], name: &str, expected: &[i64]) {
    for client in clients {
        assert_eq!(numbers(client, &format!("SELECT id FROM {name} ORDER BY id")).await, expected, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_names_rows_also_of_files_that_it_has_added() {
    let cluster = cluster(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    for version in [2, 3] {
        let name = format!("t{version}");
        let with = format!("WITH ({MERGE_ON_READ}, 'format-version' = '{version}')");
        run(&a, &format!("CREATE TABLE {name} (id BIGINT) {with}")).await;
        run(&a, &format!("INSERT INTO {name} SELECT value FROM generate_series(0, 9)")).await;
        run(&a, "BEGIN").await;
        run(&a, &format!("INSERT INTO {name} SELECT value FROM generate_series(100, 109)")).await;
        assert_eq!(number(&a, &format!("DELETE FROM {name} WHERE id IN (1, 101)")).await, 2);
        assert_eq!(number(&a, &format!("UPDATE {name} SET id = -id WHERE id = 2")).await, 1);
        let merge = format!(
            "MERGE INTO {name} USING (VALUES (3), (200)) AS s(k) ON {name}.id = s.k WHEN MATCHED THEN DELETE \
             WHEN NOT MATCHED THEN INSERT VALUES (s.k)"
        );
        assert_eq!(number(&a, &merge).await, 2);
        let staged: Vec<i64> = [-2, 0].into_iter().chain(4..10).chain([100]).chain(102..110).chain([200]).collect();
        assert_eq!(numbers(&a, &format!("SELECT id FROM {name} ORDER BY id")).await, staged);
        assert_eq!(number(&b, &format!("SELECT count(*) FROM {name}")).await, 10, "nobody else sees it");
        // COMMIT makes it anew on what is there by then, with sequence numbers of which the first is greater than all that were staged.
        for id in 300..306 {
            run(&b, &format!("INSERT INTO {name} VALUES ({id})")).await;
        }
        run(&a, "COMMIT").await;
        let mut left: Vec<i64> = staged.into_iter().chain(300..306).collect();
        see([&a, &b], &name, &left).await;
        let (data, deletes) = both(&cluster, &name).await;
        assert_eq!((data.len(), deletes.len()), (10, 2), "one for each data file that has lost rows");
        let mut deleted: Vec<u64> = deletes.iter().map(DataFile::record_count).collect();
        deleted.sort_unstable();
        assert_eq!(deleted, [1, 3]);
        let format = if version == 3 { DataFileFormat::Puffin } else { DataFileFormat::Parquet };
        assert!(deletes.iter().all(|delete| delete.file_format() == format), "{deletes:?}");
        assert_ne!(deletes[0].referenced_data_file(), deletes[1].referenced_data_file());

        // Of a file without rows nothing is left.
        run(&a, "BEGIN").await;
        assert_eq!(number(&a, &format!("DELETE FROM {name} WHERE id = 102")).await, 1);
        assert_eq!(number(&a, &format!("DELETE FROM {name} WHERE id BETWEEN 100 AND 109")).await, 8);
        run(&a, "COMMIT").await;
        left.retain(|id| !(100..110).contains(id));
        see([&a, &b], &name, &left).await;
        let (data, deletes) = both(&cluster, &name).await;
        assert_eq!((data.len(), deletes.len()), (9, 1));

        let files = cluster.files("");
        run(&a, "BEGIN").await;
        assert_eq!(number(&a, &format!("DELETE FROM {name} WHERE id = 4")).await, 1);
        assert_eq!(number(&a, &format!("UPDATE {name} SET id = 50 WHERE id = 5")).await, 1);
        run(&a, "ROLLBACK").await;
        until("what was written to go", async || cluster.files("") == files).await;
        see([&a, &b], &name, &left).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_transaction_deletes_nobody_else_may_have_deleted() {
    let cluster = cluster(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    let (delete, update) = ("DELETE FROM t WHERE id = 1", "UPDATE t SET id = -1 WHERE id = 1");
    let (of_the_file, of_another) = ("DELETE FROM t WHERE id = 2", "DELETE FROM t WHERE id = 11");
    for version in [2, 3] {
        // What the transaction does, what another writer does before its COMMIT, and the rows that are left if it is no conflict.
        for (statement, meanwhile, left) in [
            (delete, of_the_file, None),
            (delete, of_another, Some(vec![0, 2, 10, 12])),
            (update, of_the_file, None),
            (update, of_another, Some(vec![-1, 0, 2, 10, 12])),
            ("TRUNCATE TABLE t", of_the_file, None),
        ] {
            let what = format!("{statement} / {meanwhile} in version {version}");
            let with = format!("WITH ({MERGE_ON_READ}, 'format-version' = '{version}')");
            run(&a, &format!("CREATE TABLE t (id BIGINT) {with}")).await;
            run(&a, "INSERT INTO t VALUES (0), (1), (2)").await;
            run(&a, "INSERT INTO t VALUES (10), (11), (12)").await;
            run(&a, "BEGIN").await;
            run(&a, statement).await;
            assert_eq!(number(&b, meanwhile).await, 1, "{what}");
            match left {
                Some(left) => {
                    run(&a, "COMMIT").await;
                    see([&a, &b], "t", &left).await;
                }
                None => {
                    let error = refused(&a, "COMMIT").await;
                    assert!(error.kind == Kind::Conflict && error.message.contains("deleted rows"), "{what}: {error}");
                    assert!(error.message.contains("nothing was committed"), "{what}: {error}");
                    run(&a, "ROLLBACK").await;
                    see([&a, &b], "t", &[0, 1, 10, 11, 12]).await;
                }
            }
            run(&a, "DROP TABLE t").await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_does_not_name_rows_as_version_2_does_in_a_table_of_version_3() {
    let cluster = cluster(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    run(&a, &format!("CREATE TABLE t (id BIGINT) WITH ({MERGE_ON_READ}, 'format-version' = '2')")).await;
    run(&a, "INSERT INTO t VALUES (1), (2)").await;
    run(&a, "BEGIN").await;
    run(&a, "DELETE FROM t WHERE id = 1").await;
    run(&b, "ALTER TABLE t SET TBLPROPERTIES ('format-version' = '3')").await;
    let error = refused(&a, "COMMIT").await;
    assert!(error.kind == Kind::Conflict && error.message.contains("format version 3"), "{error}");
    run(&a, "ROLLBACK").await;
    see([&a, &b], "t", &[1, 2]).await;
}
