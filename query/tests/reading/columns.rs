//! Columns are found in files by their ids, whatever has become of names, types, places and parts of them since.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, DictionaryArray, Int32Array, Int64Array, LargeListArray, ListArray, MapArray,
    RecordBatch, StringArray, StructArray, TimestampMillisecondArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Fields, Int32Type};
use iceberg::spec::{
    FormatVersion, ListType, Literal, MapType, NestedField, NestedFieldRef, PrimitiveType, Struct, StructType,
    Transform, Type, UnboundPartitionSpec,
};
use lake_query::Kind;
use parquet::arrow::ArrowWriter;

use crate::common::*;
use crate::foreign::*;

fn unpartitioned() -> UnboundPartitionSpec {
    UnboundPartitionSpec::builder().with_spec_id(0).build()
}

fn nested(id: i32, name: &str, data_type: Type) -> NestedFieldRef {
    Arc::new(NestedField::optional(id, name, data_type))
}

fn structure(fields: Vec<NestedFieldRef>) -> Type {
    Type::Struct(StructType::new(fields))
}

fn list(id: i32, element: Type) -> Type {
    Type::List(ListType::new(Arc::new(NestedField::list_element(id, element, false))))
}

fn map(key_id: i32, value_id: i32, value: Type) -> Type {
    let key = NestedField::map_key_element(key_id, Type::Primitive(PrimitiveType::String));
    Type::Map(MapType::new(Arc::new(key), Arc::new(NestedField::map_value_element(value_id, value, false))))
}

fn ints(values: &[i32]) -> ArrayRef {
    Arc::new(Int32Array::from(values.to_vec()))
}

fn texts(values: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

fn part(id: i32, name: &str, array: &ArrayRef) -> Arc<Field> {
    Arc::new(with_id(Field::new(name, array.data_type().clone(), true), id))
}

fn struct_of(parts: Vec<(i32, &str, ArrayRef)>) -> ArrayRef {
    let fields: Fields = parts.iter().map(|(id, name, array)| part(*id, name, array)).collect();
    Arc::new(StructArray::new(fields, parts.into_iter().map(|(.., array)| array).collect(), None))
}

/// A row for each length.
fn list_of(id: i32, lengths: &[usize], values: ArrayRef) -> ArrayRef {
    let field = part(id, "element", &values);
    Arc::new(ListArray::new(field, OffsetBuffer::from_lengths(lengths.iter().copied()), values, None))
}

#[tokio::test(flavor = "multi_thread")]
async fn nested_columns_are_read_by_the_ids_of_their_parts() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let int = || Type::Primitive(PrimitiveType::Int);
    let before = schema(
        0,
        [
            optional(1, "id", PrimitiveType::Int),
            nested(2, "s", structure(vec![nested(3, "a", int()), nested(4, "b", int()), nested(5, "c", int())])),
            nested(6, "l", list(7, structure(vec![nested(8, "x", int()), nested(9, "y", int())]))),
            nested(10, "m", map(11, 12, structure(vec![nested(13, "v", int())]))),
            nested(14, "p", list(15, int())),
        ],
    );
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, before, unpartitioned(), &[]).await;
    let entries = struct_of(vec![(13, "v", ints(&[5, 6]))]);
    let keys = texts(&["k1", "k2"]);
    let key = Arc::new(with_id(Field::new("key", DataType::Utf8, false), 11));
    let entry = StructArray::new(Fields::from(vec![key, part(12, "value", &entries)]), vec![keys, entries], None);
    let entry_field = Field::new("key_value", entry.data_type().clone(), false);
    let maps = MapArray::new(Arc::new(entry_field), OffsetBuffer::from_lengths([1, 1]), entry, None, false);
    let added = table.data(&batch(vec![
        (1, "id", ints(&[1, 2])),
        (2, "s", struct_of(vec![(3, "a", ints(&[10, 20])), (4, "b", ints(&[11, 21])), (5, "c", ints(&[12, 22]))])),
        (6, "l", list_of(7, &[2, 1], struct_of(vec![(8, "x", ints(&[1, 2, 3])), (9, "y", ints(&[4, 5, 6]))]))),
        (10, "m", Arc::new(maps)),
        (14, "p", list_of(15, &[1, 2], ints(&[7, 8, 9]))),
    ]));
    table.commit("t", vec![added]).await;
    let query = "SELECT s['a'], s['b'], l[1]['x'], l[1]['y'], m['k1']['v'], p[1] FROM t ORDER BY id";
    let rows = [["10", "11", "1", "4", "5", "7"], ["20", "21", "3", "6", "NULL", "8"]];
    assert_eq!(text(&client, query).await, rows);
    // Everything at once: a and b swap names, c goes and a new c comes, one is widened, the order changes; in the list a
    // part is renamed and one is new; in the map a value gets one more; the elements of p are widened.
    let long = || Type::Primitive(PrimitiveType::Long);
    let after = schema(
        1,
        [
            nested(14, "p", list(15, long())),
            nested(10, "m", map(11, 12, structure(vec![nested(18, "w", int()), nested(13, "v", long())]))),
            nested(
                6,
                "l",
                list(7, structure(vec![nested(9, "z", long()), nested(17, "y", int()), nested(8, "x", int())])),
            ),
            nested(2, "s", structure(vec![nested(16, "c", int()), nested(4, "a", long()), nested(3, "b", int())])),
            optional(1, "id", PrimitiveType::Int),
        ],
    );
    table.change("t", |builder| builder.add_current_schema(after).unwrap()).await;
    let query = "SELECT s['a'], s['b'], s['c'], l[1]['x'], l[1]['y'], l[1]['z'], m['k1']['v'], m['k1']['w'], p[1] \
                 FROM t ORDER BY id";
    let rows = [
        ["11", "10", "NULL", "1", "NULL", "4", "5", "NULL", "7"],
        ["21", "20", "NULL", "3", "NULL", "6", "NULL", "NULL", "8"],
    ];
    assert_eq!(text(&client, query).await, rows);
    // A filter on a part is never lost, although it cannot be evaluated on the file as it is.
    for (filter, rows) in [
        ("s['a'] = 11", 1),
        ("s['b'] = 11", 0),
        ("s['c'] IS NULL", 2),
        ("s['c'] = 12", 0),
        ("l[1]['x'] > 2", 1),
        ("s['a'] > 11 AND p[1] = 8", 1),
    ] {
        assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, rows, "{filter}");
        let limited = text(&client, &format!("SELECT id FROM t WHERE {filter} LIMIT 5")).await;
        assert_eq!(limited.len() as i64, rows, "{filter}");
    }
    assert_eq!(text(&client, "SELECT s FROM t WHERE id = 1").await, [["{c: NULL, a: 11, b: 10}"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_column_that_comes_back_under_its_name_is_another() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let before = schema(0, [optional(1, "id", PrimitiveType::Int), optional(2, "x", PrimitiveType::Int)]);
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, before, unpartitioned(), &[]).await;
    let added = table.data(&batch(vec![(1, "id", ints(&[1])), (2, "x", ints(&[5]))]));
    table.commit("t", vec![added]).await;
    let after = schema(1, [optional(1, "id", PrimitiveType::Int), optional(3, "x", PrimitiveType::Int)]);
    table.change("t", |builder| builder.add_current_schema(after).unwrap()).await;
    let added = table.data(&batch(vec![(1, "id", ints(&[2])), (3, "x", ints(&[6]))]));
    table.commit("t", vec![added]).await;
    assert_eq!(text(&client, "SELECT id, x FROM t ORDER BY id").await, [["1", "NULL"], ["2", "6"]]);
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE x = 5").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn older_rows_have_the_initial_default() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let id = || optional(1, "id", PrimitiveType::Int);
    let of_struct = |extra: Vec<NestedFieldRef>| {
        let fields = [optional(3, "a", PrimitiveType::Int)].into_iter().chain(extra).collect();
        nested(2, "s", structure(fields))
    };
    let before = schema(0, [id(), of_struct(vec![])]);
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V3, before, unpartitioned(), &[]).await;
    let added = table.data(&batch(vec![(1, "id", ints(&[1, 2])), (2, "s", struct_of(vec![(3, "a", ints(&[7, 8]))]))]));
    table.commit("t", vec![added]).await;
    let with_default = |id, name, primitive, default| {
        let field = NestedField::optional(id, name, Type::Primitive(primitive));
        Arc::new(field.with_initial_default(default))
    };
    let required = NestedField::required(5, "r", Type::Primitive(PrimitiveType::Long));
    let after = schema(
        1,
        [
            id(),
            of_struct(vec![with_default(4, "b", PrimitiveType::Int, Literal::int(9))]),
            Arc::new(required.with_initial_default(Literal::long(5))),
            with_default(6, "t", PrimitiveType::String, Literal::string("old")),
            with_default(7, "d", PrimitiveType::Date, Literal::date(1)),
            with_default(8, "n", PrimitiveType::Decimal { precision: 9, scale: 2 }, Literal::decimal(125)),
        ],
    );
    table.change("t", |builder| builder.add_current_schema(after).unwrap()).await;
    let query = "SELECT id, s['a'], s['b'], r, t, d, n FROM t ORDER BY id";
    let old = |id: &str, a: &str| [id, a, "9", "5", "old", "1970-01-02", "1.25"].map(str::to_owned);
    assert_eq!(text(&client, query).await, [old("1", "7"), old("2", "8")]);
    let added = table.data(&batch(vec![
        (1, "id", ints(&[3])),
        (2, "s", struct_of(vec![(3, "a", ints(&[1])), (4, "b", ints(&[2]))])),
        (5, "r", Arc::new(Int64Array::from(vec![6])) as ArrayRef),
        (6, "t", Arc::new(StringArray::from(vec![None::<&str>])) as ArrayRef),
    ]));
    table.commit("t", vec![added]).await;
    let new = ["3", "1", "2", "6", "NULL", "1970-01-02", "1.25"].map(str::to_owned);
    assert_eq!(text(&client, query).await, [old("1", "7"), old("2", "8"), new]);
    for (filter, rows) in [("t = 'old'", 2), ("t IS NULL", 1), ("r = 5", 2), ("s['b'] = 9", 2), ("n > 1", 3)] {
        assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, rows, "{filter}");
    }
    assert_eq!(text(&client, "SELECT min(r), max(r), count(t) FROM t").await, [["5", "6", "2"]]);
    // A struct that is null has no parts, whatever their default.
    let before = schema(0, [id(), of_struct(vec![])]);
    let mut table = Foreign::create(&cluster, "u", FormatVersion::V3, before, unpartitioned(), &[]).await;
    let (fields, parts, _) = struct_of(vec![(3, "a", ints(&[7, 8]))]).as_struct().clone().into_parts();
    let one_is_null = StructArray::new(fields, parts, Some(vec![true, false].into()));
    let added = table.data(&batch(vec![(1, "id", ints(&[1, 2])), (2, "s", Arc::new(one_is_null) as ArrayRef)]));
    table.commit("u", vec![added]).await;
    let after = schema(1, [id(), of_struct(vec![with_default(4, "b", PrimitiveType::Int, Literal::int(9))])]);
    table.change("u", |builder| builder.add_current_schema(after).unwrap()).await;
    assert_eq!(
        text(&client, "SELECT id, s['a'], s['b'], s IS NULL FROM u ORDER BY id").await,
        [["1", "7", "9", "false"], ["2", "NULL", "NULL", "true"]]
    );
}

/// A file whose columns have no ids, with what Arrow knows of their types.
fn without_ids(path: &str, columns: Vec<(&str, ArrayRef)>) -> u64 {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(std::fs::File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    std::fs::metadata(path).unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_without_ids_are_read_by_the_name_mapping() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = || {
        schema(
            0,
            [
                optional(1, "id", PrimitiveType::Long),
                optional(2, "name", PrimitiveType::String),
                nested(
                    3,
                    "s",
                    structure(vec![optional(4, "a", PrimitiveType::Int), optional(5, "b", PrimitiveType::Int)]),
                ),
                nested(6, "l", list(7, Type::Primitive(PrimitiveType::Int))),
                optional(8, "at", PrimitiveType::Timestamptz),
                optional(9, "other", PrimitiveType::Int),
            ],
        )
    };
    let mapping = r#"[
        {"field-id": 1, "names": ["number", "id"]}, {"field-id": 2, "names": ["title"]},
        {"field-id": 3, "names": ["s"], "fields": [{"field-id": 4, "names": ["b"]}, {"field-id": 5, "names": ["a"]}]},
        {"field-id": 6, "names": ["l"], "fields": [{"field-id": 7, "names": ["element"]}]},
        {"field-id": 8, "names": ["at"]}
    ]"#;
    for (name, properties) in [("mapped", vec![("schema.name-mapping.default", mapping)]), ("plain", vec![])] {
        let mut table =
            Foreign::create(&cluster, name, FormatVersion::V2, columns(), unpartitioned(), &properties).await;
        let added = table.data(&batch(vec![(1, "id", Arc::new(Int64Array::from(vec![0])) as ArrayRef)]));
        let path = location_of(&added);
        let parts: Fields = ["a", "b"].map(|name| Field::new(name, DataType::Int32, true)).to_vec().into();
        let structs = StructArray::new(parts, vec![ints(&[1, 2]), ints(&[3, 4])], None);
        let items = Arc::new(Field::new("item", DataType::Int32, true));
        // As PyArrow writes lists and categories, which Arrow remembers.
        let lists = LargeListArray::new(items, OffsetBuffer::from_lengths([1, 2]), ints(&[5, 6, 7]), None);
        let titles: DictionaryArray<Int32Type> = ["x", "y"].into_iter().collect();
        let times = TimestampMillisecondArray::from(vec![0, 1000]).with_timezone("+02:00");
        let bytes = without_ids(
            path_of(&path),
            vec![
                ("number", ints(&[1, 2])),
                ("title", Arc::new(titles)),
                ("s", Arc::new(structs)),
                ("l", Arc::new(lists)),
                ("at", Arc::new(times)),
                ("other", ints(&[9, 9])),
            ],
        );
        let added = added.with(|file| {
            file.record_count(2).file_size_in_bytes(bytes);
        });
        table.commit(name, vec![added]).await;
    }
    let query = "SELECT id, name, s['a'], s['b'], l[1], at, other FROM mapped ORDER BY id";
    assert_eq!(
        text(&client, query).await,
        [
            ["1", "x", "3", "1", "5", "1970-01-01T00:00:00Z", "NULL"],
            ["2", "y", "4", "2", "6", "1970-01-01T00:00:01Z", "NULL"],
        ]
    );
    assert_eq!(number(&client, "SELECT count(*) FROM mapped WHERE id = 2 AND name = 'y' AND s['a'] = 4").await, 1);
    let error = refused(&client, "SELECT id FROM plain").await;
    assert!(error.kind == Kind::NotSupported && error.message.contains("no field ids"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_file_does_not_have_is_in_its_partition() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let fields = || {
        [
            optional(1, "id", PrimitiveType::Int),
            optional(2, "day", PrimitiveType::Date),
            optional(3, "kind", PrimitiveType::Int),
            optional(4, "u", PrimitiveType::Uuid),
        ]
    };
    let spec = UnboundPartitionSpec::builder()
        .with_spec_id(0)
        .add_partition_field(2, "day", Transform::Identity)
        .unwrap()
        .add_partition_field(3, "kind", Transform::Identity)
        .unwrap()
        .add_partition_field(4, "u_bucket", Transform::Bucket(2))
        .unwrap()
        .build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, schema(0, fields()), spec, &[]).await;
    for (n, day) in [(1, Some(Literal::date(100))), (2, None)] {
        let partition = Struct::from_iter([day, Some(Literal::int(n)), None]);
        let added = table.data(&batch(vec![(1, "id", ints(&[n, n + 10]))])).spec(0, partition);
        table.commit("t", vec![added]).await;
    }
    // One of the columns is widened and renamed since.
    table
        .change("t", |builder| {
            let [id, day, _, u] = fields();
            let fields = [id, day, optional(3, "grade", PrimitiveType::Long), u];
            builder.add_current_schema(schema(1, fields)).unwrap()
        })
        .await;
    assert_eq!(
        text(&client, "SELECT id, day, grade, u FROM t ORDER BY id").await,
        [
            ["1", "1970-04-11", "1", "NULL"],
            ["2", "NULL", "2", "NULL"],
            ["11", "1970-04-11", "1", "NULL"],
            ["12", "NULL", "2", "NULL"],
        ]
    );
    for (filter, rows) in [
        ("grade = 1", 2),
        ("day IS NULL", 2),
        ("day = '1970-04-11'", 2),
        ("day <> '1970-04-11'", 0),
        ("grade > 1 AND day IS NOT NULL", 0),
    ] {
        assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, rows, "{filter}");
    }
    assert_eq!(text(&client, "SELECT min(day), max(grade), count(day) FROM t").await, [["1970-04-11", "2", "2"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_right_is_refused_by_name() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let required = NestedField::required(2, "must", Type::Primitive(PrimitiveType::Int));
    let columns = schema(0, [optional(1, "id", PrimitiveType::Int), Arc::new(required)]);
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns, unpartitioned(), &[]).await;
    let added = table.data(&batch(vec![(1, "id", ints(&[1]))]));
    table.commit("t", vec![added]).await;
    let error = refused(&client, "SELECT must FROM t").await;
    assert!(error.kind == Kind::Corrupt && error.message.contains("must"), "{:?} {error}", error.kind);
    // A type that does not widen to the table's.
    let columns = schema(0, [optional(1, "id", PrimitiveType::Int)]);
    let mut table = Foreign::create(&cluster, "u", FormatVersion::V2, columns, unpartitioned(), &[]).await;
    let added = table.data(&batch(vec![(1, "id", texts(&["no number"]))]));
    table.commit("u", vec![added]).await;
    let error = refused(&client, "SELECT id FROM u").await;
    assert!(error.kind == Kind::NotSupported && error.message.contains("column id"), "{:?} {error}", error.kind);
}
