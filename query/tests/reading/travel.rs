//! Earlier versions of tables, and what the metadata says of them.

use iceberg::spec::{FormatVersion, PrimitiveType, SnapshotReference, SnapshotRetention, UnboundPartitionSpec};
use lake_query::Kind;

use crate::common::*;
use crate::foreign::*;

fn unpartitioned() -> UnboundPartitionSpec {
    UnboundPartitionSpec::builder().with_spec_id(0).build()
}

fn ids(range: std::ops::Range<i64>) -> arrow::array::RecordBatch {
    let ids = arrow::array::Int64Array::from_iter_values(range);
    batch(vec![(1, "id", std::sync::Arc::new(ids) as arrow::array::ArrayRef)])
}

/// Three snapshots: ten rows, ten more, and then a row less; a tag on the first, a branch on the second, and since the
/// second another name for the column.
async fn three_versions<'a>(cluster: &'a Cluster, snapshots: &mut Vec<i64>) -> Foreign<'a> {
    let columns = schema(0, [optional(1, "id", PrimitiveType::Long)]);
    let mut table = Foreign::create(cluster, "t", FormatVersion::V2, columns, unpartitioned(), &[]).await;
    let added = table.data(&ids(0..10));
    let path = location_of(&added);
    snapshots.push(table.commit("t", vec![added]).await);
    let added = table.data(&ids(10..20));
    snapshots.push(table.commit("t", vec![added]).await);
    table
        .change("t", |builder| {
            let columns = schema(1, [optional(1, "number", PrimitiveType::Long)]);
            builder.add_current_schema(columns).unwrap()
        })
        .await;
    let deletes = table.positions(&[(&path, 3)]);
    snapshots.push(table.commit("t", vec![deletes]).await);
    let (first, second) = (snapshots[0], snapshots[1]);
    table
        .change("t", |builder| {
            let tag = SnapshotRetention::Tag { max_ref_age_ms: Some(86_400_000) };
            let branch = SnapshotReference::new(second, SnapshotRetention::branch(Some(3), None, None));
            builder.set_ref("a tag", SnapshotReference::new(first, tag)).unwrap().set_ref("side", branch).unwrap()
        })
        .await;
    table
}

#[tokio::test(flavor = "multi_thread")]
async fn earlier_versions_are_read_as_they_were() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut snapshots = Vec::new();
    let table = three_versions(&cluster, &mut snapshots).await;
    let count = async |version: &str| number(&client, &format!("SELECT count(*) FROM t {version}")).await;
    assert_eq!(count("").await, 19);
    for (snapshot, rows) in snapshots.iter().zip([10, 20, 19]) {
        assert_eq!(count(&format!("FOR VERSION AS OF {snapshot}")).await, rows);
        assert_eq!(count(&format!("FOR VERSION AS OF '{snapshot}'")).await, rows);
    }
    assert_eq!(count("FOR VERSION AS OF 'a tag'").await, 10);
    assert_eq!(count("FOR VERSION AS OF 'side'").await, 20);
    assert_eq!(count("FOR VERSION AS OF 'main'").await, 19);
    // With the columns of its time, but for a branch.
    let of_tag = "SELECT max(v.id) FROM t FOR VERSION AS OF 'a tag' AS v WHERE v.id < 9";
    assert_eq!(number(&client, of_tag).await, 8);
    assert_eq!(number(&client, "SELECT max(t.number) FROM t FOR VERSION AS OF 'side'").await, 19);
    assert!(
        refused(&client, "SELECT id FROM t FOR VERSION AS OF 'side'")
            .await
            .message
            .contains("column id does not exist")
    );
    // Several versions in one statement, and one in a table made of it.
    let gone = "SELECT b.number FROM t FOR VERSION AS OF 'side' AS b LEFT ANTI JOIN t ON b.number = t.number";
    assert_eq!(numbers(&client, gone).await, [3]);
    let made = format!("CREATE TABLE copy AS SELECT * FROM t FOR VERSION AS OF {}", snapshots[0]);
    assert_eq!(number(&client, &made).await, 10);
    // By time: that of the second snapshot, one millisecond before it, and long ago.
    let entry = &table.metadata.history()[1];
    let at = |millis: i64| format!("SELECT arrow_cast(to_timestamp_millis({millis}), 'Utf8')");
    for (millis, rows) in [(entry.timestamp_ms(), 20), (entry.timestamp_ms() - 1, 10)] {
        let time = &text(&client, &at(millis)).await[0][0];
        assert_eq!(count(&format!("FOR TIMESTAMP AS OF '{time}'")).await, rows, "{time}");
        assert_eq!(count(&format!("FOR SYSTEM_TIME AS OF TIMESTAMP '{time}'")).await, rows, "{time}");
    }
    for (version, kind) in [
        ("FOR TIMESTAMP AS OF '2001-01-01'", Kind::NotFound),
        ("FOR TIMESTAMP AS OF 'noon'", Kind::Invalid),
        ("FOR VERSION AS OF 77", Kind::NotFound),
        ("FOR VERSION AS OF 'nobody'", Kind::NotFound),
    ] {
        let error = refused(&client, &format!("SELECT * FROM t {version}")).await;
        assert_eq!(error.kind, kind, "{version}: {error}");
    }
    let error = refused(&client, "SELECT * FROM nope FOR VERSION AS OF 1").await;
    assert!(error.message.contains("table nope does not exist"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_metadata_says_is_a_table() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut snapshots = Vec::new();
    three_versions(&cluster, &mut snapshots).await;
    let listed = text(&client, "SELECT snapshot_id, parent_id, operation FROM \"t$snapshots\" ORDER BY 1").await;
    let id = |index: usize| snapshots[index].to_string();
    assert_eq!(
        listed,
        [
            [id(0), "NULL".into(), "overwrite".into()],
            [id(1), id(0), "overwrite".into()],
            [id(2), id(1), "overwrite".into()],
        ]
    );
    let history = "SELECT snapshot_id, is_current_ancestor FROM \"t$history\" ORDER BY made_current_at, 1";
    assert_eq!(text(&client, history).await, [0, 1, 2].map(|index| [id(index), "true".into()]));
    let refs =
        "SELECT name, type, snapshot_id, min_snapshots_to_keep, max_reference_age_in_ms FROM \"t$refs\" ORDER BY 1";
    assert_eq!(
        text(&client, refs).await,
        [
            ["a tag".into(), "tag".into(), id(0), "NULL".into(), "86400000".into()],
            ["main".into(), "branch".into(), id(2), "NULL".into(), "NULL".into()],
            ["side".into(), "branch".into(), id(1), "3".into(), "NULL".into()],
        ]
    );
    let files = "SELECT content, record_count, file_format, partition FROM \"t$files\" ORDER BY content, file_path";
    assert_eq!(
        text(&client, files).await,
        [["0", "10", "parquet", ""], ["0", "10", "parquet", ""], ["1", "1", "parquet", ""],]
    );
    let on_disk = cluster.files(".parquet").len() as i64;
    assert_eq!(number(&client, "SELECT count(DISTINCT file_path) FROM \"t$files\"").await, on_disk);
    let entries = "SELECT status, sequence_number, content FROM default.\"t$entries\" ORDER BY 2";
    assert_eq!(text(&client, entries).await, [["1", "1", "0"], ["1", "2", "0"], ["1", "3", "1"]]);
    let manifests =
        "SELECT content, sequence_number, added_files_count, added_rows_count FROM \"t$manifests\" ORDER BY 2";
    assert_eq!(text(&client, manifests).await, [["0", "1", "1", "10"], ["0", "2", "1", "10"], ["1", "3", "1", "1"]]);
    let partitions = "SELECT record_count, file_count, position_delete_record_count, equality_delete_file_count \
                      FROM \"t$partitions\"";
    assert_eq!(text(&client, partitions).await, [["20", "2", "1", "0"]]);
    // Of an earlier version as well.
    let earlier = format!("SELECT count(*) FROM \"t$files\" FOR VERSION AS OF {}", snapshots[0]);
    assert_eq!(number(&client, &earlier).await, 1);
    let joined = "SELECT count(*) FROM \"t$entries\" e JOIN \"t$snapshots\" s ON e.snapshot_id = s.snapshot_id \
                  WHERE s.summary IS NOT NULL";
    assert_eq!(number(&client, joined).await, 3);
    // They are made of a table, and are none to be written.
    assert_eq!(refused(&client, "SELECT * FROM \"nope$files\"").await.kind, Kind::NotFound);
    run(&client, "CREATE TABLE empty (a INT)").await;
    for listing in ["snapshots", "history", "refs", "manifests", "files", "entries", "partitions"] {
        assert_eq!(number(&client, &format!("SELECT count(*) FROM \"empty${listing}\"")).await, 0, "{listing}");
    }
    let error = refused(&client, "INSERT INTO \"t$files\" SELECT * FROM \"t$files\"").await;
    assert!(matches!(error.kind, Kind::NotSupported | Kind::Invalid), "{:?} {error}", error.kind);
}
