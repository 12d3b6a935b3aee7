//! Rows that were deleted by position, by value, or by a deletion vector: never seen again, and no others lost.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Float64Array, Int32Array, Int64Array, StringArray};
use arrow::datatypes::Int64Type;
use datafusion::prelude::SessionContext;
use iceberg::spec::{FormatVersion, NestedField, PrimitiveType, Transform, Type, UnboundPartitionSpec};
use iceberg::spec::{Literal, Struct};
use lake_query::client::SqlClient;
use lake_query::scan::{FILE_COLUMN, LakeTable, POSITION_COLUMN};
use lake_query::{Kind, Options};

use crate::common::*;
use crate::foreign::*;

fn unpartitioned() -> UnboundPartitionSpec {
    UnboundPartitionSpec::builder().with_spec_id(0).build()
}

fn ids(range: std::ops::Range<i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(range))
}

/// `id`, and names of which every seventh is null.
fn rows(range: std::ops::Range<i64>) -> arrow::array::RecordBatch {
    let names = range.clone().map(|id| (id % 7 != 0).then(|| format!("name {id}")));
    batch(vec![(1, "id", ids(range.clone())), (2, "name", Arc::new(StringArray::from_iter(names)))])
}

fn two_columns() -> iceberg::spec::Schema {
    schema(0, [optional(1, "id", PrimitiveType::Long), optional(2, "name", PrimitiveType::String)])
}

/// Asks for the rows in many ways, and expects exactly those with the ids of `left`.
async fn expect(client: &SqlClient, table: &str, left: &[i64]) {
    assert_eq!(numbers(client, &format!("SELECT id FROM {table} ORDER BY id")).await, left);
    assert_eq!(number(client, &format!("SELECT count(*) FROM {table}")).await, left.len() as i64);
    let sum: i64 = left.iter().sum();
    assert_eq!(number(client, &format!("SELECT sum(id) FROM {table}")).await, sum);
    let named = left.iter().filter(|id| *id % 7 != 0).count() as i64;
    assert_eq!(number(client, &format!("SELECT count(name) FROM {table}")).await, named);
    let edges = format!("SELECT min(id), max(id) FROM {table}");
    let edge = |id: Option<&i64>| id.map_or("NULL".to_owned(), i64::to_string);
    assert_eq!(text(client, &edges).await, [[edge(left.first()), edge(left.last())]]);
    for (filter, holds) in [
        ("id >= 150", (|id| id >= 150) as fn(i64) -> bool),
        ("id < 100", |id| id < 100),
        ("id BETWEEN 90 AND 110", |id| (90..=110).contains(&id)),
        ("name = 'name 123'", |id| id == 123),
        ("name IS NULL", |id| id % 7 == 0),
    ] {
        let matching: Vec<i64> = left.iter().copied().filter(|id| holds(*id)).collect();
        let sql = format!("SELECT id FROM {table} WHERE {filter} ORDER BY id");
        assert_eq!(numbers(client, &sql).await, matching, "{filter}");
        // With a limit, which stops reading early: any of the rows, and never one that is deleted.
        let limited = numbers(client, &format!("SELECT id FROM {table} WHERE {filter} LIMIT 20")).await;
        assert_eq!(limited.len(), matching.len().min(20), "{filter}");
        assert!(limited.iter().all(|id| matching.contains(id)), "{filter}: {limited:?}");
    }
    let limited = numbers(client, &format!("SELECT id FROM {table} LIMIT 7")).await;
    assert!(limited.len() == left.len().min(7) && limited.iter().all(|id| left.contains(id)), "{limited:?}");
    let last = left.iter().rev().take(5).copied().collect::<Vec<_>>();
    assert_eq!(numbers(client, &format!("SELECT id FROM {table} ORDER BY id DESC LIMIT 5")).await, last);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_are_counted_among_the_memory_of_their_statement() {
    let little = |options| Options { statement_memory_bytes: Some(1 << 20), ..options };
    let (cluster, roomy) = (crate::with(little).await, crate::cluster().await);
    for cluster in [&cluster, &roomy] {
        let client = cluster.client(0).await;
        let mut table = Foreign::create(cluster, "v", FormatVersion::V3, two_columns(), unpartitioned(), &[]).await;
        let data = table.data(&rows(0..10));
        let path = location_of(&data);
        table.commit("v", vec![data]).await;
        // Far apart: hardly any share what a bitmap has for those that are near each other.
        let vector = table.vector(&path, &(0..600_000).map(|i| i * 1000).collect::<Vec<_>>());
        let mut named = vec![location_of(&vector)];
        table.commit("v", vec![vector]).await;
        let mut table = Foreign::create(cluster, "e", FormatVersion::V2, two_columns(), unpartitioned(), &[]).await;
        let data = table.data(&rows(40_000..40_010));
        table.commit("e", vec![data]).await;
        let values = table.equality(&rows(0..40_001));
        named.push(location_of(&values));
        table.commit("e", vec![values]).await;
        for ((table, named), sum) in ["v", "e"].into_iter().zip(&named).zip([45, 360_045]) {
            let sql = format!("SELECT sum(id) FROM {table}");
            if std::ptr::eq(cluster, &roomy) {
                assert_eq!(number(&client, &sql).await, sum, "{table}");
                continue;
            }
            let error = refused(&client, &sql).await;
            assert!(
                error.kind == Kind::Exhausted && error.message.contains(named),
                "{table}: {:?} {error}",
                error.kind
            );
        }
        until("what they held to be free", async || cluster.nodes[0].engine().memory_held() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_deleted_by_position_are_gone_and_the_others_keep_their_places() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, two_columns(), unpartitioned(), &[]).await;
    let (a, b) = (table.data(&rows(0..350)), table.data(&rows(350..400)));
    let (path_a, path_b) = (location_of(&a), location_of(&b));
    table.commit("t", vec![a, b]).await;
    expect(&client, "t", &(0..400).collect::<Vec<_>>()).await;

    // The first and the last row, one inside, a whole row group, and two delete files that overlap.
    let some: Vec<_> = [0, 57, 349].into_iter().chain(100..200).map(|place| (path_a.as_str(), place)).collect();
    let others = [(path_a.as_str(), 57), (path_a.as_str(), 58), (path_b.as_str(), 49)];
    let deletes = vec![table.positions(&some), table.positions(&others)];
    table.commit("t", deletes).await;
    let is_gone = |id: &i64| [0, 57, 58, 349, 399].contains(id) || (100..200).contains(id);
    let left: Vec<i64> = (0..400).filter(|id| !is_gone(id)).collect();
    expect(&client, "t", &left).await;

    // Deletes are of files that are not newer: one that is committed later keeps its rows.
    let added = table.data(&rows(1000..1010));
    table.commit("t", vec![added]).await;
    let older = table.positions(&[(path_b.as_str(), 3)]);
    table.commit("t", vec![Added { sequence_number: Some(1), ..older }]).await;
    let left: Vec<i64> = left.into_iter().filter(|id| *id != 353).chain(1000..1010).collect();
    expect(&client, "t", &left).await;
    let too_old = table.positions(&[(path_b.as_str(), 4)]);
    table.commit("t", vec![Added { sequence_number: Some(0), ..too_old }]).await;
    expect(&client, "t", &left).await;

    // And each row's file and position, for changing it.
    let tables = cluster.nodes[0].engine().tables();
    let mut loaded = tables.load(&[ident("t")], deadline()).await.unwrap();
    let current = loaded.tables.pop().flatten().unwrap();
    let provider = LakeTable::new(tables.clone(), current, deadline()).unwrap().with_places().unwrap();
    let context = SessionContext::new();
    context.register_table("t", Arc::new(provider)).unwrap();
    let sql = format!("SELECT id, {FILE_COLUMN} AS file, {POSITION_COLUMN} AS place FROM t WHERE id > 60 AND id < 390");
    let batches = context.sql(&sql).await.unwrap().collect().await.unwrap();
    let mut found = 0;
    for batch in &batches {
        let ids = batch.column(0).as_primitive::<Int64Type>();
        let files = arrow::compute::cast(batch.column(1), &arrow::datatypes::DataType::Utf8).unwrap();
        let files = files.as_string::<i32>();
        let places = batch.column(2).as_primitive::<Int64Type>();
        for row in 0..batch.num_rows() {
            let id = ids.value(row);
            let place = if id < 350 { (path_a.as_str(), id) } else { (path_b.as_str(), id - 350) };
            assert_eq!((files.value(row), places.value(row)), place);
            found += 1;
        }
    }
    assert_eq!(found, left.iter().filter(|id| (61..390).contains(*id)).count());
    let sql = format!("SELECT count(*) FROM t WHERE {FILE_COLUMN} = '{path_b}' AND {POSITION_COLUMN} < 10");
    let batches = context.sql(&sql).await.unwrap().collect().await.unwrap();
    assert_eq!(batches[0].column(0).as_primitive::<Int64Type>().value(0), 9, "one of ten is deleted");
    crate::check_where_they_ran(&cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_deleted_by_value_are_gone_where_they_are_older() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, two_columns(), unpartitioned(), &[]).await;
    let added = vec![table.data(&rows(0..350)), table.data(&rows(350..400))];
    table.commit("t", added).await;
    let by_id = |ids: &[i64]| batch(vec![(1, "whatever", Arc::new(Int64Array::from(ids.to_vec())) as ArrayRef)]);
    let deletes = vec![table.equality(&by_id(&[3, 120, 399, 12345]))];
    // In the same commit, rows are not deleted.
    let again = table.data(&rows(399..400));
    table.commit("t", deletes.into_iter().chain([again]).collect()).await;
    let mut left: Vec<i64> = (0..400).filter(|id| ![3, 120].contains(id)).collect();
    expect(&client, "t", &left).await;

    // By several columns, among them null, which equals null here; in another order than the table's.
    let names = StringArray::from(vec![Some("name 5"), Some("name 6"), None, None]);
    let several = batch(vec![
        (2, "name", Arc::new(names) as ArrayRef),
        (1, "id", Arc::new(Int64Array::from(vec![5, 7, 14, 15])) as ArrayRef),
    ]);
    let deletes = vec![table.equality(&several), table.equality(&by_id(&[200]))];
    table.commit("t", deletes).await;
    left.retain(|id| ![5, 14, 200].contains(id));
    expect(&client, "t", &left).await;
    // Of columns that the query does not ask for.
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE name LIKE 'name 1%'").await, {
        left.iter().filter(|id| *id % 7 != 0 && id.to_string().starts_with('1')).count() as i64
    });
    let explained = text(&client, "EXPLAIN SELECT count(*) FROM t").await;
    assert!(format!("{explained:?}").contains("DataSourceExec"), "the count is not known without reading");

    // By position as well.
    let path = location_of(&table.data(&rows(0..1)));
    let added = table.data(&rows(500..600));
    let of_added = location_of(&added);
    assert_ne!(path, of_added);
    table.commit("t", vec![added]).await;
    let deletes = vec![table.equality(&by_id(&[550, 551])), table.positions(&[(&of_added, 0), (&of_added, 51)])];
    table.commit("t", deletes).await;
    left.extend((500..600).filter(|id| ![500, 550, 551].contains(id)));
    expect(&client, "t", &left).await;
    crate::check_where_they_ran(&cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn equality_deletes_outlive_changes_of_their_columns() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let schema_0 = schema(
        0,
        [
            optional(1, "id", PrimitiveType::Int),
            optional(2, "key", PrimitiveType::Int),
            optional(3, "x", PrimitiveType::Double),
        ],
    );
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, schema_0, unpartitioned(), &[]).await;
    let ints = |range: std::ops::Range<i32>| Arc::new(Int32Array::from_iter_values(range)) as ArrayRef;
    let doubles = Arc::new(Float64Array::from_iter_values((0..10).map(f64::from))) as ArrayRef;
    let added = table.data(&batch(vec![(1, "id", ints(0..10)), (2, "key", ints(100..110)), (3, "x", doubles)]));
    table.commit("t", vec![added]).await;
    let one = |id: i32, value: i32| batch(vec![(id, "c", Arc::new(Int32Array::from(vec![value])) as ArrayRef)]);
    let x = batch(vec![(3, "x", Arc::new(Float64Array::from(vec![8.0])) as ArrayRef)]);
    let deletes = vec![table.equality(&one(1, 1)), table.equality(&one(2, 102)), table.equality(&x)];
    table.commit("t", deletes).await;
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 7);
    // The first column is widened and renamed, the others are dropped, and a new one takes a name that was used.
    table
        .change("t", |builder| {
            let fields = [optional(1, "number", PrimitiveType::Long), optional(4, "key", PrimitiveType::String)];
            builder.add_current_schema(schema(1, fields)).unwrap()
        })
        .await;
    let query = "SELECT number, key FROM t ORDER BY number";
    let left = ["0", "3", "4", "5", "6", "7", "9"].map(|n| [n.to_owned(), "NULL".to_owned()]);
    assert_eq!(text(&client, query).await, left);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 7);
    assert_eq!(numbers(&client, "SELECT number FROM t WHERE number > 7 LIMIT 3").await, [9]);
    // A column inside of another is refused, not passed over.
    let nested = NestedField::optional(
        5,
        "s",
        Type::Struct(iceberg::spec::StructType::new(vec![optional(6, "i", PrimitiveType::Int)])),
    );
    table
        .change("t", |builder| {
            let fields = [optional(1, "number", PrimitiveType::Long), Arc::new(nested)];
            builder.add_current_schema(schema(2, fields)).unwrap()
        })
        .await;
    let delete = table.equality(&one(6, 1));
    table.commit("t", vec![delete]).await;
    for sql in [
        "SELECT * FROM t",
        "SELECT number FROM t WHERE number = 9",
        "SELECT count(*) FROM t",
        "DELETE FROM t WHERE number = 9",
        "UPDATE t SET number = 10 WHERE number = 9",
        "CALL system.rewrite_data_files('t', strategy => 'sort', sort_order => 'number')",
    ] {
        let error = refused(&client, sql).await;
        let names = error.message.contains("equality deletes by s.i (id 6)");
        assert!(error.kind == Kind::NotSupported && names, "{sql}: {:?} {error}", error.kind);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equality_deletes_of_a_partition_stay_in_it() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let spec = UnboundPartitionSpec::builder()
        .with_spec_id(0)
        .add_partition_field(2, "name", Transform::Identity)
        .unwrap()
        .build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, two_columns(), spec, &[]).await;
    let partition = |name: &str| Struct::from_iter([Some(Literal::string(name))]);
    // The files have not the column that the table is partitioned by: it is in the metadata.
    let added = ["a", "b"].map(|name| table.data(&batch(vec![(1, "id", ids(0..10))])).spec(0, partition(name)));
    table.commit("t", added.into()).await;
    let deletes = table.equality(&batch(vec![(1, "id", ids(2..4))])).spec(0, partition("b"));
    table.commit("t", vec![deletes]).await;
    assert_eq!(numbers(&client, "SELECT id FROM t WHERE name = 'a' ORDER BY id").await, (0..10).collect::<Vec<_>>());
    assert_eq!(numbers(&client, "SELECT id FROM t WHERE name = 'b' ORDER BY id").await, [0, 1, 4, 5, 6, 7, 8, 9]);
    let counts = text(&client, "SELECT name, count(*) FROM t GROUP BY name ORDER BY name").await;
    assert_eq!(counts, [["a", "10"], ["b", "8"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_vectors_are_applied_counted_and_checked() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V3, two_columns(), unpartitioned(), &[]).await;
    let (a, b) = (table.data(&rows(0..350)), table.data(&rows(350..400)));
    let (path_a, path_b) = (location_of(&a), location_of(&b));
    table.commit("t", vec![a, b]).await;
    // Position deletes of before the upgrade to format 3: where there is a vector, it holds all of them.
    let old = table.positions(&[(&path_a, 1), (&path_b, 49)]);
    table.commit("t", vec![old]).await;
    let vector = table.vector(&path_a, &[1, 2, 3, 120, 349]);
    let of_vector = location_of(&vector);
    table.commit("t", vec![vector]).await;
    let left: Vec<i64> = (0..400).filter(|id| ![1, 2, 3, 120, 349, 399].contains(id)).collect();
    expect(&client, "t", &left).await;
    crate::check_where_they_ran(&cluster);

    // A table with vectors only is counted without reading.
    let mut counted = Foreign::create(&cluster, "c", FormatVersion::V3, two_columns(), unpartitioned(), &[]).await;
    let data = counted.data(&rows(0..50));
    let path = location_of(&data);
    counted.commit("c", vec![data]).await;
    let vector = counted.vector(&path, &[0, 49]);
    counted.commit("c", vec![vector]).await;
    assert_eq!(number(&client, "SELECT count(*) FROM c").await, 48);
    let explained = text(&client, "EXPLAIN SELECT count(*) FROM c").await;
    assert!(!format!("{explained:?}").contains("DataSourceExec"), "{explained:?}");

    // Damaged on disk, and read by a node that has nothing cached.
    let mut bytes = std::fs::read(path_of(&of_vector)).unwrap();
    bytes[20] ^= 1;
    std::fs::write(path_of(&of_vector), &bytes).unwrap();
    let config = lake_query::Config::new(options(cluster.dir.path())).unwrap();
    let node = lake_query::QueryNode::start(config, cluster.store.clone()).await.unwrap();
    let other = SqlClient::connect(&[node.flight_address().to_string()], None).await.unwrap();
    for damage in ["a flipped bit", "no file"] {
        let error = refused(&other, "SELECT sum(id) FROM t").await;
        let name = of_vector.rsplit('/').next().unwrap();
        assert!(error.kind == Kind::Corrupt && error.message.contains(name), "{damage}: {:?} {error}", error.kind);
        let _ = std::fs::remove_file(path_of(&of_vector));
    }
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_files_that_cannot_be_read_are_refused_by_name() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, two_columns(), unpartitioned(), &[]).await;
    let data = table.data(&rows(0..10));
    let path = location_of(&data);
    table.commit("t", vec![data]).await;
    let deletes = table.positions(&[(&path, 1)]);
    let of_deletes = location_of(&deletes);
    let name = of_deletes.rsplit('/').next().unwrap().to_owned();
    let good = std::fs::read(path_of(&of_deletes)).unwrap();
    table.commit("t", vec![deletes]).await;
    std::fs::write(path_of(&of_deletes), &good[..good.len() / 2]).unwrap();
    let error = refused(&client, "SELECT * FROM t").await;
    assert!(error.kind == Kind::Corrupt && error.message.contains(&name), "{:?} {error}", error.kind);
    std::fs::remove_file(path_of(&of_deletes)).unwrap();
    let error = refused(&client, "SELECT * FROM t").await;
    assert!(error.kind == Kind::Corrupt && error.message.contains(&name), "{:?} {error}", error.kind);
    std::fs::write(path_of(&of_deletes), &good).unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 9, "an error is not kept");

    let avro = table.positions(&[(&path, 2)]).with(|file| {
        file.file_format(iceberg::spec::DataFileFormat::Avro);
    });
    let name = location_of(&avro);
    table.commit("t", vec![avro]).await;
    let error = refused(&client, "SELECT * FROM t").await;
    assert!(error.kind == Kind::NotSupported && error.message.contains(&name), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_are_taken_as_they_are() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let name = "odd %20 a=ü&?+#";
    let mut table = Foreign::create(&cluster, name, FormatVersion::V2, two_columns(), unpartitioned(), &[]).await;
    let data = table.data(&rows(0..10));
    let path = location_of(&data);
    table.commit(name, vec![data]).await;
    let deletes = table.positions(&[(&path, 5)]);
    table.commit(name, vec![deletes]).await;
    let left = [0, 1, 2, 3, 4, 6, 7, 8, 9];
    assert_eq!(numbers(&client, &format!("SELECT id FROM \"{name}\" ORDER BY id")).await, left);
}
