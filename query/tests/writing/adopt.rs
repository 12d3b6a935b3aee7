//! add_files: files that are there become a table's.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Date32Array, Int32Array, Int64Array, RecordBatch, StringArray, StructArray};
use arrow::datatypes::{DataType, Field, Fields, Schema};
use lake_query::Kind;
use parquet::arrow::ArrowWriter;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::Type;

use crate::common::*;
use crate::table::{files, metadata, operation};

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    write_batch(path, &RecordBatch::try_from_iter(columns).unwrap());
}

fn write_batch(path: &Path, batch: &RecordBatch) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut writer = ArrowWriter::try_new(std::fs::File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

fn with_id(name: &str, data_type: DataType, id: Option<i32>) -> Field {
    let id = id.map(|id| ("PARQUET:field_id".to_owned(), id.to_string()));
    Field::new(name, data_type, true).with_metadata(id.into_iter().collect())
}

fn longs(values: impl IntoIterator<Item = i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(values))
}

fn texts(values: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_added_where_they_lie() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let home = cluster.dir.path().join("warehouse/there");
    let source = format!("file://{}", home.display());
    write(&home.join("a.parquet"), vec![("id", longs(0..10)), ("name", texts(&["n"; 10]))]);
    // A narrower type, and one column less.
    write(&home.join("deeper/b.parquet"), vec![("id", Arc::new(Int32Array::from_iter_values(10..15)) as ArrayRef)]);
    write(&home.join("_temporary/c.parquet"), vec![("id", longs(90..91))]);
    run(&client, "CREATE TABLE t (id BIGINT NOT NULL, name VARCHAR)").await;
    let add = |more: &str| format!("CALL system.add_files('t', '{source}{more})");
    assert_eq!(number(&client, &add("', dry_run => true")).await, 2);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 0);
    assert_eq!(number(&client, &add("'")).await, 2);
    let table = metadata(&cluster, "t").await;
    assert_eq!(operation(&table), "append");
    assert!(table.properties().contains_key("schema.name-mapping.default"));
    assert_eq!(text(&client, "SELECT count(*), sum(id), count(name) FROM t").await, [["15", "105", "10"]]);
    let added = files(&table).await;
    let a = added.iter().find(|file| file.file_path() == format!("{source}/a.parquet")).unwrap();
    assert_eq!(a.record_count(), 10);
    assert_eq!(
        (&a.lower_bounds()[&1], &a.upper_bounds()[&1]),
        (&iceberg::spec::Datum::long(0), &iceberg::spec::Datum::long(9))
    );
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE id > 12").await, 2);
    for more in ["'", "/a.parquet'"] {
        let error = refused(&client, &add(more)).await;
        assert!(error.kind == Kind::AlreadyExists && error.message.contains("/a.parquet"), "{error}");
    }
    // Renamed columns are found by the names that they had, and by those that they have.
    run(&client, "ALTER TABLE t RENAME COLUMN name TO title").await;
    write(&home.join("more/d.parquet"), vec![("id", longs(20..21)), ("title", texts(&["t"]))]);
    assert_eq!(number(&client, &add("/more'")).await, 1);
    assert_eq!(
        text(&client, "SELECT title, count(*) FROM t WHERE title IS NOT NULL GROUP BY title ORDER BY 1").await,
        [["n", "10"], ["t", "1"]]
    );
    run(&client, "DELETE FROM t WHERE id < 5").await;
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 11);
    assert!(home.join("a.parquet").exists());

    write(&home.join("bad/x.parquet"), vec![("id", longs(0..1)), ("other", longs(0..1))]);
    write(&home.join("worse/x.parquet"), vec![("id", texts(&["one"]))]);
    write(&home.join("nulls/x.parquet"), vec![("id", Arc::new(Int64Array::from(vec![Some(1), None])) as ArrayRef)]);
    write(&home.join("lacks/x.parquet"), vec![("title", texts(&["t"]))]);
    std::fs::create_dir_all(home.join("broken")).unwrap();
    std::fs::write(home.join("broken/x.parquet"), b"PAR1 no").unwrap();
    std::fs::create_dir_all(home.join("empty")).unwrap();
    for (more, words) in [
        ("bad", "no column other"),
        ("worse", "column id is Utf8"),
        ("nulls", "column id is NOT NULL"),
        ("lacks", "lacks column id"),
        ("broken", "is damaged"),
        ("empty", "no Parquet files"),
    ] {
        let error = refused(&client, &add(&format!("/{more}'"))).await;
        assert!(error.message.contains(words) && error.message.contains(&format!("/{more}")), "{more}: {error}");
        assert!(error.message.contains("nothing was committed"), "{more}: {error}");
    }
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 11);
    // Names that no column of the table ever had, but its name mapping has.
    let mapping = r#"[{"field-id":1,"names":["id","number"]},{"field-id":2,"names":["name","title","heading"]}]"#;
    run(&client, &format!("ALTER TABLE t SET TBLPROPERTIES ('schema.name-mapping.default' = '{mapping}')")).await;
    write(&home.join("aliases/e.parquet"), vec![("number", longs(30..31)), ("heading", texts(&["h"]))]);
    assert_eq!(number(&client, &add("/aliases'")).await, 1);
    assert_eq!(text(&client, "SELECT id, title FROM t WHERE id > 20").await, [["30", "h"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_follow_from_directories_or_bounds() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let home = cluster.dir.path().join("warehouse/there");
    let days = |days: Vec<i32>| Arc::new(Date32Array::from(days)) as ArrayRef;
    write(&home.join("kind=a%3Ab/a.parquet"), vec![("id", longs(0..3)), ("day", days(vec![19_000; 3]))]);
    write(
        &home.join("kind=__HIVE_DEFAULT_PARTITION__/b.parquet"),
        vec![("id", longs(3..4)), ("day", days(vec![19_001]))],
    );
    run(&client, "CREATE TABLE t (id BIGINT, day DATE, kind VARCHAR) PARTITIONED BY (kind, day(day))").await;
    let source = |more: &str| format!("CALL system.add_files('t', 'file://{}{more}')", home.display());
    assert_eq!(number(&client, &source("")).await, 2);
    assert_eq!(
        text(&client, "SELECT kind, count(*), min(day) FROM t GROUP BY kind ORDER BY kind").await,
        [["a:b", "3", "2022-01-08"], ["NULL", "1", "2022-01-09"]]
    );
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE kind = 'a:b' AND day = DATE '2022-01-08'").await, 3);
    let explained = format!("{:?}", text(&client, "EXPLAIN SELECT * FROM t WHERE day = DATE '2022-01-08'").await);
    assert!(explained.contains("left_out=1"), "{explained}");
    run(&client, "DELETE FROM t WHERE id = 1").await;
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE kind = 'a:b'").await, 2);
    // Of two days, and a directory that says nothing.
    let other = cluster.dir.path().join("warehouse/other");
    write(&other.join("kind=c/c.parquet"), vec![("id", longs(0..2)), ("day", days(vec![19_000, 19_001]))]);
    let error = refused(&client, &format!("CALL system.add_files('t', 'file://{}')", other.display())).await;
    assert!(error.kind == Kind::Invalid && error.message.contains("in several"), "{error}");
    std::fs::remove_dir_all(&other).unwrap();
    write(&other.join("c.parquet"), vec![("id", longs(0..2)), ("day", days(vec![19_000; 2]))]);
    let error = refused(&client, &format!("CALL system.add_files('t', 'file://{}')", other.display())).await;
    assert!(error.kind == Kind::Invalid && error.message.contains("by kind"), "{error}");
}

fn has_ids(column: &Type) -> bool {
    column.get_basic_info().has_id() || (column.is_group() && column.get_fields().iter().any(|part| has_ids(part)))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_copy_writes_goes_by_name_into_any_table() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(
        &client,
        "CREATE TABLE a AS SELECT column1 AS id, column2 AS name, named_struct('x', column1, 'y', column2) AS s, \
         [named_struct('z', column1)] AS l, MAP {'k': 5} AS m FROM (VALUES (1, 'one'), (2, 'two'))",
    )
    .await;
    // Other ids, of the same names; nested ones in another order, too.
    run(
        &client,
        "CREATE TABLE b AS SELECT m, l, named_struct('y', 'none', 'x', CAST(0 AS BIGINT)) AS s, name, id FROM a \
         WHERE id > 5",
    )
    .await;
    let file = cluster.dir.path().join("warehouse/there/copied.parquet");
    let copy = format!("COPY (SELECT id + 10 AS id, upper(name) AS name, s, l, m FROM a) TO '{}'", file.display());
    assert_eq!(number(&client, &copy).await, 2);
    let written = SerializedFileReader::new(std::fs::File::open(&file).unwrap()).unwrap();
    let columns = written.metadata().file_metadata().schema_descr().root_schema_ptr();
    assert_eq!(columns.get_fields().len(), 5);
    assert!(!has_ids(&columns), "{columns:?}");
    let add = format!("CALL system.add_files('b', 'file://{}')", file.display());
    assert_eq!(number(&client, &add).await, 1);
    let sql = "SELECT id, name, s['x'], s['y'], l[1]['z'], m['k'] FROM b ORDER BY id";
    assert_eq!(text(&client, sql).await, [["11", "ONE", "1", "one", "1", "5"], ["12", "TWO", "2", "two", "2", "5"]]);
    assert_eq!(text(&client, "SELECT name FROM b WHERE id = 12 AND s['x'] = 2").await, [["TWO"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_with_ids_have_those_of_the_table_on_all_columns() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let home = cluster.dir.path().join("warehouse/there");
    run(
        &client,
        "CREATE TABLE t AS SELECT column1 AS id, named_struct('x', column1, 'y', column2) AS s FROM (VALUES (1, 2))",
    )
    .await;
    let table = metadata(&cluster, "t").await;
    let of = |name: &str| table.current_schema().field_id_by_name(name).unwrap();
    let add = async |name: &str, [id, s, x, y]: [Option<i32>; 4], more: Option<&str>| {
        let parts = [Some(("x", x)), Some(("y", y)), more.map(|name| (name, x.map(|_| 99)))];
        let parts = parts.into_iter().flatten().map(|(name, id)| with_id(name, DataType::Int64, id));
        let parts: Fields = parts.collect::<Vec<_>>().into();
        let values = parts.iter().map(|_| longs(7..8)).collect();
        let schema =
            Schema::new(vec![with_id("id", DataType::Int64, id), with_id("s", DataType::Struct(parts.clone()), s)]);
        let columns: Vec<ArrayRef> = vec![longs(5..6), Arc::new(StructArray::new(parts, values, None))];
        let path = home.join(name).join("x.parquet");
        write_batch(&path, &RecordBatch::try_new(Arc::new(schema), columns).unwrap());
        client.query(&format!("CALL system.add_files('t', 'file://{}')", path.display()), TIMEOUT).await
    };
    let [id, s, x, y] = [Some(of("id")), Some(of("s")), Some(of("s.x")), Some(of("s.y"))];
    for (name, ids, more, words) in [
        ("some", [id, None, None, None], None, "its column s has no field id"),
        ("part", [id, s, x, None], None, "its column s.y has no field id"),
        ("only-parts", [None, None, x, y], None, "its column id has no field id"),
        ("swapped", [s, id, x, y], None, "column id"),
        ("swapped-parts", [id, s, y, x], None, "its column s.x has the id"),
        ("unknown", [id, s, x, y], Some("z"), "the table has no column s.z"),
        ("unknown-by-name", [None; 4], Some("z"), "the table has no column s.z"),
    ] {
        let error = add(name, ids, more).await.err().unwrap_or_else(|| panic!("{name} was added"));
        let said = error.message.contains(words) && error.message.contains(&format!("/{name}/"));
        assert!(said && error.message.contains("nothing was committed"), "{name}: {error}");
    }
    for (name, ids) in [("all", [id, s, x, y]), ("none", [None; 4])] {
        add(name, ids, None).await.unwrap();
    }
    assert_eq!(text(&client, "SELECT sum(id), sum(s['x']), sum(s['y']) FROM t").await, [["11", "15", "16"]]);
}
