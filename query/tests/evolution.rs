//! Tables that other engines have changed: read right, or refused by name.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::store::{Through, Way};
use common::*;
use iceberg::io::FileIO;
use iceberg::spec::{
    NestedField, PrimitiveType, Schema, TableMetadata, TableMetadataBuilder, Transform, Type, UnboundPartitionSpec,
};
use lake_client::Catalog;
use lake_client::catalog::{TableIdent, TablePointer};
use lake_client::memory::MemoryStore;
use lake_client::store::Capabilities;
use lake_query::{Kind, Options};

/// Plays another engine: reads the table's metadata, changes it, and swaps the pointer.
async fn change(
    cluster: &Cluster,
    change: impl AsyncFnOnce(TableMetadata, TableMetadataBuilder) -> TableMetadataBuilder,
) {
    let catalog = Catalog::new(cluster.store.clone());
    let ident = TableIdent::new("default".parse().unwrap(), "t").unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let current = catalog.load_table(&ident, deadline).await.unwrap().unwrap();
    let location = current.value.metadata_location.clone();
    let metadata = TableMetadata::read_from(&FileIO::new_with_fs(), &location).await.unwrap();
    let builder = metadata.clone().into_builder(Some(location.clone()));
    let changed = change(metadata, builder).await.build().unwrap().metadata;
    let new_location = location.replace(".metadata.json", "-changed.metadata.json");
    std::fs::write(new_location.strip_prefix("file://").unwrap(), serde_json::to_vec(&changed).unwrap()).unwrap();
    let pointer =
        TablePointer { uuid: current.value.uuid, metadata_location: new_location, previous_location: Some(location) };
    catalog.swap_table(&ident, current.mod_revision, &pointer, None, deadline).await.unwrap();
}

/// Plays another engine that writes whatever it likes into the table's metadata.
async fn rewrite(cluster: &Cluster, rewrite: impl FnOnce(&mut serde_json::Value)) {
    let catalog = Catalog::new(cluster.store.clone());
    let ident = TableIdent::new("default".parse().unwrap(), "t").unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let current = catalog.load_table(&ident, deadline).await.unwrap().unwrap();
    let location = current.value.metadata_location.clone();
    let path = |location: &str| location.strip_prefix("file://").unwrap().to_owned();
    let mut json = serde_json::from_slice(&std::fs::read(path(&location)).unwrap()).unwrap();
    rewrite(&mut json);
    let new = location.replace(".metadata.json", "-rewritten.metadata.json");
    std::fs::write(path(&new), serde_json::to_vec(&json).unwrap()).unwrap();
    let new = TablePointer { uuid: current.value.uuid, metadata_location: new, previous_location: Some(location) };
    catalog.swap_table(&ident, current.mod_revision, &new, None, deadline).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_metadata_log_removes_nothing_but_the_tables_own() {
    let mut cluster = cluster().await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE victim AS SELECT 1 AS x").await;
    let victim = cluster.files(".metadata.json").pop().unwrap();
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    rewrite(&cluster, |json| {
        let entry = serde_json::json!({
            "timestamp-ms": json["last-updated-ms"],
            "metadata-file": format!("file://{}", victim.display()),
        });
        json["metadata-log"] = vec![entry].into();
        json["properties"]["write.metadata.previous-versions-max"] = "1".into();
    })
    .await;
    let own = cluster.files("-rewritten.metadata.json");
    assert_eq!(own.len(), 1);
    for value in 0..3 {
        run(&client, &format!("INSERT INTO t VALUES ({value})")).await;
    }
    // It waits for clean-ups.
    cluster.nodes.remove(0).shutdown().await;
    assert!(!own[0].exists(), "it fell out of the log");
    assert!(victim.exists(), "another table's was removed");
}

/// Snapshots that come from each other have no beginning.
#[tokio::test(flavor = "multi_thread")]
async fn a_history_that_goes_in_circles_has_an_end() {
    let cluster = cluster().await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    run(&client, "INSERT INTO t VALUES (2)").await;
    rewrite(&cluster, |json| {
        let last = json["snapshots"][1]["snapshot-id"].clone();
        json["snapshots"][0]["parent-snapshot-id"] = last;
    })
    .await;
    number(
        &client,
        "CALL system.expire_snapshots('t', older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 9)",
    )
    .await;
    assert_eq!(numbers(&client, "SELECT x FROM t ORDER BY x").await, [1, 2]);
}

/// Tells nobody of changes, so that a node believes its pointers for as long as they may be believed.
#[derive(Debug)]
struct Mute;

impl Way for Mute {
    fn capabilities(&self, of: Capabilities) -> Capabilities {
        Capabilities { watch: false, ..of }
    }
}

/// A cluster whose nodes look at every pointer anew.
async fn cluster() -> Cluster {
    let store = Arc::new(MemoryStore::new());
    Cluster::over(store, 1, |options| Options { pointer_ttl_ms: Some(0), ..options }).await
}

fn field(id: i32, name: &str, primitive: PrimitiveType) -> Arc<NestedField> {
    Arc::new(NestedField::optional(id, name, Type::Primitive(primitive)))
}

#[tokio::test(flavor = "multi_thread")]
async fn renamed_swapped_widened_and_new_columns_read_right() {
    let cluster = cluster().await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (a INT, b VARCHAR, c VARCHAR, f REAL, n DECIMAL(5, 2))").await;
    run(&client, "INSERT INTO t VALUES (1, 'b1', 'c1', 1.5, 1.25), (2, 'b2', 'c2', 'NaN', 2.25)").await;
    change(&cluster, async |_, builder| {
        // b and c swap their names, a is widened, f too, n gets more digits, d is new.
        let fields = [
            field(1, "a", PrimitiveType::Long),
            field(2, "c", PrimitiveType::String),
            field(3, "b", PrimitiveType::String),
            field(4, "f", PrimitiveType::Double),
            field(5, "n", PrimitiveType::Decimal { precision: 9, scale: 2 }),
            field(6, "d", PrimitiveType::Long),
        ];
        builder.add_current_schema(Schema::builder().with_schema_id(1).with_fields(fields).build().unwrap()).unwrap()
    })
    .await;
    run(&client, "INSERT INTO t VALUES (3000000000, 'c3', 'b3', 1e300, 1234567.25, 4)").await;
    assert_eq!(
        text(&client, "SELECT a, b, c, f, n, d FROM t ORDER BY a").await,
        [
            ["1", "c1", "b1", "1.5", "1.25", "NULL"],
            ["2", "c2", "b2", "NaN", "2.25", "NULL"],
            ["3000000000", "b3", "c3", "1e300", "1234567.25", "4"],
        ]
    );
    for (filter, rows) in [
        ("b = 'c1'", 1),
        ("b = 'b1'", 0),
        ("c = 'b2'", 1),
        ("a > 1", 2),
        ("a > 2147483647", 1),
        ("f > 1e299", 2),
        ("n > 2", 2),
        ("d IS NULL", 2),
        ("d = 4", 1),
        ("d IS NOT NULL AND a < 10", 0),
    ] {
        assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, rows, "{filter}");
    }
    assert_eq!(
        text(&client, "SELECT min(a), max(a), min(d), count(d), count(*) FROM t").await,
        [["1", "3000000000", "4", "1", "3"]]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn columns_changed_while_a_statement_runs_are_a_conflict() {
    let cluster = Cluster::over(Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Mute }), 1, |options| {
        Options { pointer_ttl_ms: Some(600_000), ..options }
    })
    .await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (a INT)").await;
    change(&cluster, async |_, builder| {
        let fields = [field(1, "a", PrimitiveType::Int), field(2, "b", PrimitiveType::Int)];
        builder.add_current_schema(Schema::builder().with_schema_id(1).with_fields(fields).build().unwrap()).unwrap()
    })
    .await;
    // The node still believes the old pointer, and so the old columns.
    let error = refused(&client, "INSERT INTO t VALUES (1)").await;
    assert_eq!(error.kind, Kind::Conflict, "{error}");
    assert!(error.message.contains("columns") && error.message.contains("nothing was committed"), "{error}");
    assert!(cluster.files(".parquet").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_are_of_one_moment_also_where_the_metadata_of_one_is_gone() {
    let store = Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Mute });
    // The nodes keep pointers for long, and nothing of what these name.
    let change = |options| Options { pointer_ttl_ms: Some(600_000), metadata_cache_bytes: Some(0), ..options };
    let cluster = Cluster::over(store, 2, change).await;
    let (reader, writer) = (cluster.client(0).await, cluster.client(1).await);
    for table in ["t", "u"] {
        run(&writer, &format!("CREATE TABLE {table} AS SELECT 1 AS x")).await;
    }
    let sql = "SELECT (SELECT sum(x) FROM t) * 100 + (SELECT sum(x) FROM u)";
    assert_eq!(number(&reader, sql).await, 101);
    let before: Vec<_> =
        cluster.files(".metadata.json").into_iter().filter(|file| file.to_string_lossy().contains("/t-")).collect();
    run(&writer, "BEGIN").await;
    run(&writer, "INSERT INTO t VALUES (10)").await;
    run(&writer, "INSERT INTO u VALUES (10)").await;
    run(&writer, "COMMIT").await;
    assert!(!before.is_empty());
    before.iter().for_each(|file| std::fs::remove_file(file).unwrap());
    // Of t there is only the new version: u is not shown as it was before the transaction.
    assert_eq!(number(&reader, sql).await, 1111);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_go_by_the_partitioning_that_is_current() {
    let cluster = cluster().await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (a INT, b VARCHAR)").await;
    run(&client, "INSERT INTO t VALUES (1, 'x')").await;
    change(&cluster, async |_, builder| {
        let spec = UnboundPartitionSpec::builder()
            .with_spec_id(1)
            .add_partition_field(1, "a_bucket", Transform::Bucket(4))
            .unwrap();
        builder.add_default_partition_spec(spec.build()).unwrap()
    })
    .await;
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE b = 'x'").await, 1);
    assert_eq!(number(&client, "INSERT INTO t VALUES (2, 'y'), (3, NULL)").await, 2);
    // Changed rows of the file from before move into partitions too.
    assert_eq!(number(&client, "UPDATE t SET b = 'z' WHERE a < 3").await, 2);
    assert_eq!(text(&client, "SELECT * FROM t ORDER BY a").await, [["1", "z"], ["2", "z"], ["3", "NULL"]]);
    assert_eq!(number(&client, "INSERT OVERWRITE t VALUES (3, 'x')").await, 1);
    assert_eq!(text(&client, "SELECT b FROM t WHERE a = 3").await, [["x"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_are_partitioned_by_nanoseconds() {
    let cluster = cluster().await;
    let client = cluster.client(0).await;
    let columns = "id BIGINT, ns TIMESTAMP, tz TIMESTAMP WITH TIME ZONE, other TIMESTAMP";
    let parts = "day(ns), bucket(8, ns), hour(tz), year(other)";
    run(&client, &format!("CREATE TABLE t ({columns}) PARTITIONED BY ({parts}) WITH ('format-version' = '3')")).await;
    // SQL has no word for such columns.
    rewrite(&cluster, |json| {
        for (i, name) in [(1, "timestamp_ns"), (2, "timestamptz_ns"), (3, "timestamp_ns")] {
            json["schemas"][0]["fields"][i]["type"] = name.into();
        }
    })
    .await;
    let rows = "(1, '1969-12-30 23:59:59.999999999', '1969-12-30T23:59:59.999999999Z', '1969-12-31 00:00:00'), \
                (2, '2026-01-02 03:04:05.000000001', '2026-01-02T03:04:05.000000001Z', '2026-01-02 00:00:00'), \
                (3, '2026-01-02 03:04:05.000000001', '2026-01-02T03:04:05.000000001Z', '2026-07-02 00:00:00'), \
                (4, NULL, NULL, NULL)";
    assert_eq!(number(&client, &format!("INSERT INTO t VALUES {rows}")).await, 4);
    assert_eq!(number(&client, "SELECT count(*) FROM \"t$files\"").await, 3);
    let error = refused(&client, "ALTER TABLE t SET PARTITIONED BY (tz)").await;
    assert!(error.message.contains("no manifests that hold timestamps with nanoseconds"), "{error}");
    for (filter, ids) in [
        ("ns = '1969-12-30 23:59:59.999999999'", vec![1]),
        ("ns < '1969-12-31'", vec![1]),
        ("ns >= '2026-01-02'", vec![2, 3]),
        ("ns IN ('2026-01-02 03:04:05.000000001')", vec![2, 3]),
        ("tz = '2026-01-02T03:04:05.000000001Z'", vec![2, 3]),
        ("tz <= '1969-12-30T23:59:59.999999999Z'", vec![1]),
        ("other > '2026-06-01'", vec![3]),
        ("ns IS NULL AND tz IS NULL", vec![4]),
    ] {
        let sql = format!("SELECT id FROM t WHERE {filter} ORDER BY id");
        assert_eq!(numbers(&client, &sql).await, ids, "{filter}");
    }
    assert_eq!(number(&client, "UPDATE t SET other = '2027-01-01' WHERE tz IS NULL").await, 1);
    assert_eq!(number(&client, "DELETE FROM t WHERE ns < '1970-01-01'").await, 1);
    assert_eq!(numbers(&client, "SELECT id FROM t WHERE other >= '2026-07-02' ORDER BY id").await, [3, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_that_lake_does_not_know_is_none() {
    let cluster = cluster().await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (a BIGINT, b VARCHAR)").await;
    rewrite(&cluster, |json| {
        let field = serde_json::json!(
            {"source-id": 1, "transform": "unknown", "direction": "asc", "null-order": "nulls-first"}
        );
        json["sort-orders"].as_array_mut().unwrap().push(serde_json::json!({"order-id": 1, "fields": [field]}));
        json["default-sort-order-id"] = 1.into();
    })
    .await;
    assert_eq!(number(&client, "INSERT INTO t VALUES (2, 'y'), (1, NULL), (3, 'z')").await, 3);
    assert_eq!(numbers(&client, "SELECT CAST(sort_order_id AS BIGINT) FROM \"t$files\"").await, [0]);
    assert_eq!(number(&client, "DELETE FROM t WHERE a = 1").await, 1);
    assert_eq!(numbers(&client, "SELECT a FROM t ORDER BY a").await, [2, 3]);
    run(&client, "TRUNCATE TABLE t").await;
}

/// The iceberg crate writes such names into manifests as they are, and nobody could read them.
#[tokio::test(flavor = "multi_thread")]
async fn partition_fields_are_called_as_manifests_take_it() {
    let cluster = cluster().await;
    let client = cluster.client(0).await;
    let parts = "s.a, truncate(1, \"b c\")";
    let row = "named_struct('a', 1) AS s, 'x1' AS \"b c\"";
    run(&client, &format!("CREATE TABLE t PARTITIONED BY ({parts}) AS SELECT 1 AS id, {row}")).await;
    // As other engines call them.
    rewrite(&cluster, |json| {
        for (i, name) in [(0, "s.a"), (1, "b c_trunc")] {
            json["partition-specs"][0]["fields"][i]["name"] = name.into();
        }
    })
    .await;
    run(&client, "INSERT INTO t VALUES (2, named_struct('a', 2), 'y2'), (3, named_struct('a', 1), 'x3')").await;
    run(&client, "ALTER TABLE t SET TBLPROPERTIES ('write.delete.mode' = 'merge-on-read')").await;
    run(&client, "INSERT INTO t VALUES (4, named_struct('a', 1), 'x4'), (5, named_struct('a', 1), 'x5')").await;
    assert_eq!(number(&client, "DELETE FROM t WHERE id = 4").await, 1);
    run(&client, "CALL system.rewrite_manifests('t')").await;
    let rest = "SELECT id FROM t WHERE s['a'] = 1 AND \"b c\" >= 'x' ORDER BY id";
    assert_eq!(numbers(&client, rest).await, [1, 3, 5]);
    let parts = "SELECT count(DISTINCT partition) FROM \"t$files\" WHERE partition LIKE 's.a=_/b c_trunc=_'";
    assert_eq!(number(&client, parts).await, 2);
    run(&client, "CALL system.rewrite_data_files('t', 2)").await;
    assert_eq!(numbers(&client, rest).await, [1, 3, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_void_field_whose_column_was_dropped_is_none() {
    let cluster = cluster().await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (id BIGINT, gone INT, p VARCHAR) PARTITIONED BY (void(gone), p)").await;
    assert_eq!(number(&client, "INSERT INTO t VALUES (1, 10, 'x'), (2, 20, 'y')").await, 2);
    // As a table is that was of format version 1.
    rewrite(&cluster, |json| {
        let mut schema = json["schemas"][0].clone();
        schema["schema-id"] = 1.into();
        schema["fields"].as_array_mut().unwrap().remove(1);
        json["schemas"].as_array_mut().unwrap().push(schema);
        json["current-schema-id"] = 1.into();
    })
    .await;
    assert_eq!(text(&client, "SELECT * FROM t WHERE p = 'x'").await, [["1", "x"]]);
    assert_eq!(number(&client, "INSERT INTO t VALUES (3, 'x'), (4, 'z')").await, 2);
    assert_eq!(number(&client, "UPDATE t SET p = 'w' WHERE id = 2").await, 1);
    assert_eq!(number(&client, "DELETE FROM t WHERE id = 1").await, 1);
    run(&client, "ALTER TABLE t ADD COLUMN gone VARCHAR").await;
    run(&client, "CALL system.rewrite_data_files('t', 1)").await;
    assert_eq!(
        text(&client, "SELECT * FROM t ORDER BY id").await,
        [["2", "w", "NULL"], ["3", "x", "NULL"], ["4", "z", "NULL"]]
    );
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE p = 'w'").await, 1);
}
