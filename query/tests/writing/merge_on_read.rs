//! Merge-on-read: delete files as other engines will find them.

use std::sync::Arc;

use iceberg::spec::{DataContentType, DataFile, DataFileFormat, Datum};
use lake_client::memory::MemoryStore;
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
