//! Tables that PyIceberg writes, read here; and tables made by hand, read by PyIceberg: both must agree.

use std::sync::Arc;

use iceberg::spec::{FormatVersion, PrimitiveType, TableMetadata, UnboundPartitionSpec};
use lake_client::Catalog;
use lake_client::catalog::TablePointer;

use crate::common::*;
use crate::foreign::*;
use crate::python::python;

async fn script(source: &str, arguments: &[String]) -> serde_json::Value {
    let all: Vec<&str> = ["-c", source].into_iter().chain(arguments.iter().map(String::as_str)).collect();
    let out = python("a script", &all).await;
    serde_json::from_str(out.lines().last().unwrap()).unwrap_or_else(|e| panic!("{e}: {out}"))
}

/// Writes tables in a directory and says of each where its metadata is, which of its columns can be compared as they are,
/// where all of its rows are as plain Parquet, and how many rows some filters leave.
const WRITE: &str = r#"
import json, os, sys, datetime as dt, math
import pyarrow as pa, pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.schema import Schema
from pyiceberg.partitioning import PartitionSpec, PartitionField
from pyiceberg.transforms import *
from pyiceberg.types import *
home = sys.argv[1]
os.makedirs(home)
catalog = SqlCatalog("c", uri=f"sqlite:///{home}/catalog.db", warehouse=f"file://{home}")
catalog.create_namespace("n")
told = {}

def tell(name, table, columns, filters):
    rows = table.scan().to_arrow()
    plain = rows.select(columns)
    pq.write_table(plain.cast(pa.schema([pa.field(f.name, f.type, True) for f in plain.schema])), f"{home}/{name}.parquet")
    counts = [[sql, len(table.scan(row_filter=py).to_arrow())] for sql, py in filters]
    told[name] = {"metadata": table.metadata_location, "columns": columns, "rows": len(rows), "counts": counts}

utc = dt.timezone.utc
def rows(lo, hi):
    n = list(range(lo, hi))
    return {
        "id": pa.array(n, pa.int64()),
        "n": pa.array([i * 3 for i in n], pa.int32()),
        "name": pa.array([None if i % 7 == 0 else f"{i % 10}-name-{i:05d}-and-more-of-it" for i in n]),
        "x": pa.array([None if i % 11 == 0 else math.nan if i % 13 == 0 else i / 4 for i in n]),
        "ts": pa.array([dt.datetime(2024, 1, 1, tzinfo=utc) + dt.timedelta(hours=7 * i) for i in n], pa.timestamp("us", tz="UTC")),
        "kind": pa.array([f"k{i % 3}" for i in n]),
        "day": pa.array([dt.date(2024, 1, 1) + dt.timedelta(days=i % 40) for i in n]),
    }
filters = [("id = 17", "id == 17"), ("id > 50 AND id <= 60", "id > 50 and id <= 60"), ("name IS NULL", "name is null"),
    ("name = '3-name-00003-and-more-of-it'", "name == '3-name-00003-and-more-of-it'"), ("kind = 'k1'", "kind == 'k1'"),
    ("ts >= '2024-01-10T00:00:00Z' AND ts < '2024-01-20T00:00:00Z'", "ts >= '2024-01-10T00:00:00+00:00' and ts < '2024-01-20T00:00:00+00:00'"),
    ("day = '2024-01-05'", "day == '2024-01-05'"), ("day > '2024-02-01'", "day > '2024-02-01'"),
    ("kind <> 'k1' AND id < 30", "kind != 'k1' and id < 30"), ("id IN (3, 5, 1000)", "id in (3, 5, 1000)"),
    ("name LIKE '4-name%'", "name like '4-name%'"), ("x = 2.5", "x == 2.5")]
columns = ["id", "n", "name", "x", "ts", "kind", "day"]

# Partitioned in every way, and differently later; rows deleted by rewriting.
first = pa.table(rows(0, 100))
for name, parts in {
    "plain": [], "identity": [("kind", IdentityTransform())], "bucket": [("id", BucketTransform(4)), ("name", BucketTransform(3))],
    "truncate": [("name", TruncateTransform(2)), ("id", TruncateTransform(25))], "day": [("ts", DayTransform())],
    "month": [("day", MonthTransform())], "year": [("ts", YearTransform())], "hour": [("ts", HourTransform())],
    "mixed": [("kind", IdentityTransform()), ("day", IdentityTransform())]}.items():
    table = catalog.create_table(f"n.{name}", schema=first.schema)
    if parts:
        with table.update_spec() as spec:
            for column, transform in parts:
                spec.add_field(column, transform, f"p_{column}")
    table.append(first)
    if parts:
        with table.update_spec() as spec:
            spec.remove_field(f"p_{parts[0][0]}")
            spec.add_field("n", BucketTransform(2), "later")
    table.append(pa.table(rows(100, 130)))
    table.delete("id >= 20 and id < 25")
    tell(name, table, columns, filters)

# Columns that change.
table = catalog.create_table("n.evolved", schema=Schema(
    NestedField(1, "id", LongType()), NestedField(2, "a", IntegerType()), NestedField(3, "b", StringType()), NestedField(4, "f", FloatType()),
    NestedField(5, "d", DecimalType(9, 2)), NestedField(6, "s", StructType(NestedField(7, "x", IntegerType()), NestedField(8, "y", StringType()))),
    NestedField(9, "l", ListType(10, IntegerType(), element_required=False)), NestedField(11, "gone", StringType())))
table.append(pa.Table.from_pylist([
    {"id": i, "a": i * 2, "b": f"b{i}", "f": i / 2, "d": i, "s": {"x": i, "y": f"y{i}"}, "l": list(range(i % 4)), "gone": "g"} for i in range(20)],
    schema=table.schema().as_arrow()))
with table.update_schema() as schema:
    schema.rename_column("a", "tmp"); schema.rename_column("b", "a")
with table.update_schema() as schema:
    schema.rename_column("tmp", "b"); schema.delete_column("gone")
with table.update_schema() as schema:
    schema.update_column("b", field_type=LongType()); schema.update_column("f", field_type=DoubleType())
    schema.update_column("d", field_type=DecimalType(12, 2))
    schema.add_column("gone", LongType()); schema.add_column(("s", "z"), LongType()); schema.rename_column("s.x", "w")
with table.update_schema() as schema:
    schema.move_first("l")
with table.update_schema() as schema:
    schema.update_column("s.w", field_type=LongType())
table.append(pa.Table.from_pylist([
    {"id": i, "b": 2**40 + i, "a": f"b{i}", "f": 1e300, "d": 10**9, "s": {"w": 2**40, "y": None, "z": i}, "l": None, "gone": i} for i in range(20, 30)],
    schema=table.schema().as_arrow()))
tell("evolved", table, ["id", "a", "b", "f", "d", "gone"], [("b = 10", "b == 10"), ("b > 3000000000", "b > 3000000000"), ("a = 'b7'", "a == 'b7'"),
    ("f > 1e6", "f > 1000000.0"), ("gone IS NULL", "gone is null"), ("gone >= 25", "gone >= 25"), ("d > 15", "d > 15")])

# Files that were there before the table: they have no ids.
pq.write_table(pa.table(rows(0, 40)), f"{home}/there.parquet")
table = catalog.create_table("n.adopted", schema=first.schema)
table.add_files([f"file://{home}/there.parquet"])
with table.update_schema() as schema:
    schema.rename_column("name", "title")
with table.update_schema() as schema:
    schema.add_column("fresh", LongType())
tell("adopted", table, ["id", "n", "title", "x", "ts", "kind", "day", "fresh"], [("title IS NULL", "title is null"), ("fresh IS NULL", "fresh is null"), ("id < 7", "id < 7")])
print(json.dumps(told))
"#;

#[tokio::test(flavor = "multi_thread")]
async fn what_pyiceberg_writes_is_read_as_pyiceberg_reads_it() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let home = cluster.dir.path().join("warehouse/python").display().to_string();
    let told = script(WRITE, std::slice::from_ref(&home)).await;
    let catalog = Catalog::new(cluster.store.clone());
    let _ = catalog.create_namespace(&ident("x").namespace, Default::default(), deadline()).await;
    assert_eq!(told.as_object().unwrap().len(), 11);
    for (name, table) in told.as_object().unwrap() {
        let location = table["metadata"].as_str().unwrap().to_owned();
        let metadata: TableMetadata = serde_json::from_slice(&std::fs::read(path_of(&location)).unwrap()).unwrap();
        let pointer = TablePointer { uuid: metadata.uuid(), metadata_location: location, previous_location: None };
        catalog.create_table(&ident(name), &pointer, deadline()).await.unwrap();
        let rows = table["rows"].as_i64().unwrap();
        let quoted = format!("\"{name}\"");
        assert_eq!(number(&client, &format!("SELECT count(*) FROM {quoted}")).await, rows, "{name}");
        let columns: Vec<&str> = table["columns"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
        let columns = columns.join(", ");
        let (ours, theirs) =
            (format!("SELECT {columns} FROM {quoted}"), format!("SELECT {columns} FROM '{home}/{name}.parquet'"));
        for (left, right) in [(&ours, &theirs), (&theirs, &ours)] {
            let differing = text(&client, &format!("{left} EXCEPT ALL {right} LIMIT 5")).await;
            assert!(differing.is_empty(), "{name}: {left} and not {right}: {differing:?}");
        }
        for count in table["counts"].as_array().unwrap() {
            let (filter, rows) = (count[0].as_str().unwrap(), count[1].as_i64().unwrap());
            let counted = number(&client, &format!("SELECT count(*) FROM {quoted} WHERE {filter}")).await;
            assert_eq!(counted, rows, "{name}: {filter}");
        }
    }
    // Nested columns, which cannot be compared as a whole.
    let nested = "SELECT sum(s['w']), count(s['y']), sum(s['z']), sum(array_length(l)), sum(l[2]) FROM evolved";
    let w = (0..20).sum::<i64>() + 10 * (1 << 40);
    let wanted = [w.to_string(), "20".into(), (20..30).sum::<i64>().to_string(), "30".into(), "10".into()];
    assert_eq!(text(&client, nested).await, [wanted]);
}

/// Says which ids are left in the tables whose metadata is named.
const READ: &str = r#"
import json, sys
from pyiceberg.table import StaticTable
print(json.dumps([sorted(StaticTable.from_metadata(path).scan().to_arrow()["id"].to_pylist()) for path in sys.argv[1:]]))
"#;

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_reads_hand_made_deletes_as_we_do() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut locations = Vec::new();
    let mut ours = Vec::new();
    for (name, version) in [("positions", FormatVersion::V2), ("vectors", FormatVersion::V3)] {
        let columns = schema(0, [optional(1, "id", PrimitiveType::Long)]);
        let spec = UnboundPartitionSpec::builder().with_spec_id(0).build();
        let mut table = Foreign::create(&cluster, name, version, columns, spec, &[]).await;
        let ids = |range| Arc::new(arrow::array::Int64Array::from_iter_values(range)) as arrow::array::ArrayRef;
        let (a, b) =
            (table.data(&batch(vec![(1, "id", ids(0..300))])), table.data(&batch(vec![(1, "id", ids(300..310))])));
        let (path_a, path_b) = (location_of(&a), location_of(&b));
        table.commit(name, vec![a, b]).await;
        let deletes = match version {
            FormatVersion::V3 => vec![table.vector(&path_a, &[0, 150, 299]), table.vector(&path_b, &[9])],
            _ => {
                vec![table.positions(&[(&path_a, 0), (&path_a, 150), (&path_b, 9)]), table.positions(&[(&path_a, 299)])]
            }
        };
        table.commit(name, deletes).await;
        locations.push(table.location.clone());
        ours.push(numbers(&client, &format!("SELECT id FROM {name} ORDER BY id")).await);
    }
    let theirs = script(READ, &locations).await;
    let theirs: Vec<Vec<i64>> = serde_json::from_value(theirs).unwrap();
    assert_eq!(ours, theirs);
    assert_eq!(ours.iter().map(Vec::len).collect::<Vec<_>>(), [306, 306]);
}

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_reads_the_deletes_that_we_write() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let catalog = Catalog::new(cluster.store.clone());
    let modes = "'write.delete.mode' = 'merge-on-read', 'write.update.mode' = 'merge-on-read'";
    let (mut locations, mut ours) = (Vec::new(), Vec::new());
    for (name, layout) in [
        ("of_files", format!("WITH ({modes})")),
        ("of_partitions", format!("PARTITIONED BY (p) WITH ({modes}, 'write.delete.granularity' = 'partition')")),
        ("vectors", format!("PARTITIONED BY (p) WITH ({modes}, 'format-version' = '3')")),
    ] {
        run(&client, &format!("CREATE TABLE {name} (p BIGINT, id BIGINT) {layout}")).await;
        for start in [0, 1000] {
            let rows = format!("SELECT value % 2, value FROM generate_series({start}, {})", start + 499);
            run(&client, &format!("INSERT INTO {name} {rows}")).await;
        }
        assert_eq!(number(&client, &format!("DELETE FROM {name} WHERE id % 7 = 0")).await, 144);
        assert_eq!(number(&client, &format!("UPDATE {name} SET id = -id WHERE id BETWEEN 10 AND 20")).await, 10);
        assert_eq!(number(&client, &format!("DELETE FROM {name} WHERE id > 1490 AND p = 1")).await, 4);
        let pointer = catalog.load_table(&ident(name), deadline()).await.unwrap().unwrap();
        locations.push(pointer.value.metadata_location);
        ours.push(numbers(&client, &format!("SELECT id FROM {name} ORDER BY id")).await);
    }
    let theirs: Vec<Vec<i64>> = serde_json::from_value(script(READ, &locations).await).unwrap();
    assert_eq!(ours, theirs);
    assert!(ours.iter().all(|ids| ids.len() == 852), "{:?}", ours.iter().map(Vec::len).collect::<Vec<_>>());
}
