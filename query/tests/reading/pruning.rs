//! Files and manifests are left out where no row can match, and only there.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Float64Array, Int32Array, StringArray, TimestampMicrosecondArray};
use iceberg::spec::{
    Datum, FormatVersion, Literal, PrimitiveLiteral, PrimitiveType, Struct, Transform, UnboundPartitionSpec,
};
use iceberg::transform::create_transform_function;
use lake_query::client::SqlClient;

use crate::common::*;
use crate::foreign::*;
use crate::warm::analyzed;

const HOUR_MICROS: i64 = 3_600_000_000;

/// How many data files a query is planned to read.
async fn files_read(client: &SqlClient, sql: &str) -> usize {
    let plan = text(client, &format!("EXPLAIN {sql}")).await;
    plan.iter().flatten().map(|part| part.matches(".parquet").count()).sum()
}

/// How many rows a condition holds for, and how many files have to be read for them.
async fn reads(client: &SqlClient, filter: &str, rows: i64, files: usize) {
    assert_eq!(number(client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, rows, "{filter}");
    assert_eq!(files_read(client, &format!("SELECT * FROM t WHERE {filter}")).await, files, "{filter}");
}

fn partitioned_by(source: i32, transform: Transform) -> UnboundPartitionSpec {
    let spec = UnboundPartitionSpec::builder().with_spec_id(0).add_partition_field(source, "part", transform);
    spec.unwrap().build()
}

/// `n` from 0 to 99, `s` its text, `ts` as many times 10 hours.
fn row_of(n: i32) -> (i32, String, i64) {
    (n, format!("{n:03}-text"), i64::from(n) * 10 * HOUR_MICROS)
}

fn rows_of(numbers: &[i32]) -> arrow::array::RecordBatch {
    let rows: Vec<_> = numbers.iter().map(|n| row_of(*n)).collect();
    let ts = TimestampMicrosecondArray::from_iter_values(rows.iter().map(|row| row.2)).with_timezone("UTC");
    batch(vec![
        (1, "n", Arc::new(Int32Array::from_iter_values(rows.iter().map(|row| row.0))) as ArrayRef),
        (2, "s", Arc::new(StringArray::from_iter_values(rows.iter().map(|row| &row.1)))),
        (3, "ts", Arc::new(ts)),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_left_out_by_every_transform() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = || {
        schema(
            0,
            [
                optional(1, "n", PrimitiveType::Int),
                optional(2, "s", PrimitiveType::String),
                optional(3, "ts", PrimitiveType::Timestamptz),
            ],
        )
    };
    let cases = [
        ("identity", 1, Transform::Identity, "n % 100 < 40 AND n = 17", 1_usize),
        ("bucket", 1, Transform::Bucket(4), "n = 17", 1),
        ("buckets", 1, Transform::Bucket(4), "n IN (17, 18)", 2),
        ("bucket_s", 2, Transform::Bucket(4), "s = '017-text'", 1),
        ("bucket_ts", 3, Transform::Bucket(4), "ts = TIMESTAMP '1970-01-08T02:00:00Z'", 1),
        ("truncate", 1, Transform::Truncate(25), "n BETWEEN 30 AND 49", 1),
        ("truncate_s", 2, Transform::Truncate(2), "s >= '030' AND s < '050'", 2),
        ("day", 3, Transform::Day, "ts >= '1970-01-08T00:00:00Z' AND ts < '1970-01-09T00:00:00Z'", 1),
        ("month", 3, Transform::Month, "ts < '1970-02-01T00:00:00Z'", 1),
        ("year", 3, Transform::Year, "ts >= '1971-01-01T00:00:00Z'", 0),
        ("hour", 3, Transform::Hour, "ts > '1970-01-02T12:00:00Z' AND ts <= '1970-01-02T16:00:00Z'", 1),
        ("void", 1, Transform::Void, "n = 17", 1),
    ];
    for (name, source, transform, filter, most) in cases {
        let mut table =
            Foreign::create(&cluster, name, FormatVersion::V2, columns(), partitioned_by(source, transform), &[]).await;
        let function = create_transform_function(&transform).unwrap();
        // A manifest for every other partition, so that both are left out. Bounds are in neither.
        let mut by_partition: std::collections::BTreeMap<String, (Option<Literal>, Vec<i32>)> = Default::default();
        for n in 0..40 {
            let (n, s, ts) = row_of(n);
            let value = match source {
                1 => Datum::int(n),
                2 => Datum::string(s),
                _ => Datum::timestamptz_micros(ts),
            };
            let value = function.transform_literal(&value).unwrap();
            let literal = value.as_ref().map(|value| Literal::Primitive(value.literal().clone()));
            by_partition.entry(format!("{value:?}")).or_insert((literal, Vec::new())).1.push(n);
        }
        for (literal, numbers) in by_partition.into_values() {
            let added = table.data(&rows_of(&numbers)).spec(0, Struct::from_iter([literal]));
            table.commit(name, vec![added]).await;
        }
        assert_eq!(number(&client, &format!("SELECT count(*) FROM \"{name}\"")).await, 40);
        let wanted = number(
            &client,
            &format!("SELECT count(*) FROM (SELECT n + 0 AS n, s || '' AS s, ts + INTERVAL '0' HOUR AS ts FROM \"{name}\") AS x WHERE {filter}"),
        )
        .await;
        let counted = number(&client, &format!("SELECT count(*) FROM \"{name}\" WHERE {filter}")).await;
        assert_eq!(counted, wanted, "{name}: {filter}");
        let read = files_read(&client, &format!("SELECT * FROM \"{name}\" WHERE {filter}")).await;
        assert!(read <= most, "{name}: {filter} reads {read} files");
        assert_eq!(number(&client, &format!("SELECT count(*) FROM \"{name}\" WHERE n IS NULL")).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn manifests_of_other_partitions_are_not_read() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = schema(
        0,
        [
            optional(1, "n", PrimitiveType::Int),
            optional(2, "s", PrimitiveType::String),
            optional(3, "ts", PrimitiveType::Timestamptz),
        ],
    );
    let spec = partitioned_by(1, Transform::Identity);
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns, spec, &[]).await;
    let of = |n| Struct::from_iter([Some(Literal::int(n))]);
    let added = table.data(&rows_of(&[1])).spec(0, of(1));
    table.commit("t", vec![added]).await;
    let before = cluster.files(".avro");
    let added = table.data(&rows_of(&[2])).spec(0, of(2));
    table.commit("t", vec![added]).await;
    let added: Vec<_> = cluster.files(".avro").into_iter().filter(|file| !before.contains(file)).collect();
    let manifest = added.iter().find(|file| !file.to_string_lossy().contains("list-")).unwrap();
    std::fs::remove_file(manifest).unwrap();
    assert_eq!(text(&client, "SELECT s FROM t WHERE n < 2").await, [["001-text"]]);
    let error = refused(&client, "SELECT s FROM t WHERE n < 3").await;
    assert!(error.message.contains(&*manifest.file_name().unwrap().to_string_lossy()), "{:?} {error}", error.kind);
}

#[tokio::test(flavor = "multi_thread")]
async fn bounds_are_of_columns_by_id_and_of_their_types_of_today() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = schema(0, [optional(1, "a", PrimitiveType::Int), optional(2, "b", PrimitiveType::Int)]);
    let spec = UnboundPartitionSpec::builder().with_spec_id(0).build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns, spec, &[]).await;
    let ints = |values: [i32; 3]| Arc::new(Int32Array::from(values.to_vec())) as ArrayRef;
    for start in [10, 20] {
        let added = table
            .data(&batch(vec![(1, "a", ints([start, start + 1, start + 2])), (2, "b", ints([-1, -2, -3]))]))
            .with(|file| {
                file.lower_bounds([(1, Datum::int(start)), (2, Datum::int(-3))].into())
                    .upper_bounds([(1, Datum::int(start + 2)), (2, Datum::int(-1))].into())
                    .null_value_counts([(1, 0), (2, 0)].into());
            });
        table.commit("t", vec![added]).await;
    }
    assert_eq!(files_read(&client, "SELECT b FROM t WHERE a = 21").await, 1);
    assert_eq!(text(&client, "SELECT min(a), max(a), min(b) FROM t").await, [["10", "22", "-3"]]);
    let explained = text(&client, "EXPLAIN SELECT min(a), max(a), min(b), count(*) FROM t").await;
    assert!(!format!("{explained:?}").contains("DataSourceExec"), "known from metadata: {explained:?}");
    // The names are swapped and the types widened.
    table
        .change("t", |builder| {
            let fields = [optional(1, "b", PrimitiveType::Long), optional(2, "a", PrimitiveType::Long)];
            builder.add_current_schema(schema(1, fields)).unwrap()
        })
        .await;
    for (filter, rows, files) in [
        ("b = 21", 1, 1),
        ("b >= 12", 4, 2),
        ("b > 22", 0, 0),
        ("b > 3000000000", 0, 0),
        ("b < 3000000000", 6, 2),
        ("a = 21", 0, 0),
        ("a < 0", 6, 2),
        ("a = -2 AND b < 15", 1, 1),
        ("a IS NULL", 0, 0),
    ] {
        reads(&client, filter, rows, files).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nan_is_not_lost_behind_bounds() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = schema(0, [optional(1, "x", PrimitiveType::Double)]);
    let spec = UnboundPartitionSpec::builder().with_spec_id(0).build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns, spec, &[]).await;
    let doubles = |values: [f64; 3]| batch(vec![(1, "x", Arc::new(Float64Array::from(values.to_vec())) as ArrayRef)]);
    for (values, nans, low, high) in [
        // As an engine that counts NaN, and as one that does not, describes them.
        ([5.0, 5.0, f64::NAN], Some(1), 5.0, 5.0),
        ([1.0, f64::NAN, 2.0], None, 1.0, 2.0),
        ([1.0, 2.0, 3.0], Some(0), 1.0, 3.0),
    ] {
        let added = table.data(&doubles(values)).with(|file| {
            file.lower_bounds([(1, Datum::double(low))].into())
                .upper_bounds([(1, Datum::double(high))].into())
                .null_value_counts([(1, 0)].into())
                .nan_value_counts(nans.map(|nans| (1, nans)).into_iter().collect());
        });
        table.commit("t", vec![added]).await;
    }
    for (filter, rows) in [
        ("x = 5", 2),
        ("x <> 5", 7),
        ("x > 5", 2),
        ("x > 100", 2),
        ("x < 2.5", 4),
        ("isnan(x)", 2),
        ("x = 2", 2),
        ("NOT (x <= 5)", 2),
    ] {
        assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, rows, "{filter}");
    }
    assert_eq!(text(&client, "SELECT count(*), count(x) FROM t").await, [["9", "9"]]);
    assert_eq!(files_read(&client, "SELECT * FROM t WHERE x > 5").await, 2, "only where there is certainly no NaN");
}

#[tokio::test(flavor = "multi_thread")]
async fn text_bounds_that_were_cut_are_no_values() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = schema(0, [optional(1, "s", PrimitiveType::String)]);
    let spec = UnboundPartitionSpec::builder().with_spec_id(0).build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns, spec, &[]).await;
    let long = "aaaaaaaaaaaaaaaa";
    let texts = |texts: Vec<String>| batch(vec![(1, "s", Arc::new(StringArray::from(texts)) as ArrayRef)]);
    for (values, low, high) in [
        (vec![format!("{long}1"), format!("{long}2")], long, "aaaaaaaaaaaaaaab"),
        // By somebody who did not round up.
        (vec![format!("{long}3"), format!("{long}4")], long, long),
        (vec!["b".into(), "b".into()], "b", "b"),
    ] {
        let added = table.data(&texts(values)).with(|file| {
            file.lower_bounds([(1, Datum::string(low))].into())
                .upper_bounds([(1, Datum::string(high))].into())
                .null_value_counts([(1, 0)].into());
        });
        table.commit("t", vec![added]).await;
    }
    let all = text(&client, "SELECT s FROM t ORDER BY s").await;
    let expected = (1..=4).map(|n| vec![format!("{long}{n}")]).chain([vec!["b".into()], vec!["b".into()]]);
    assert_eq!(all, expected.collect::<Vec<_>>());
    for n in 1..=4 {
        let filter = format!("s = '{long}{n}'");
        assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, 1, "{filter}");
    }
    assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE s <> '{long}'")).await, 6);
    assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE s > '{long}'")).await, 6);
    assert_eq!(text(&client, "SELECT min(s), max(s) FROM t").await, [[format!("{long}1"), "b".into()]]);
    assert_eq!(files_read(&client, "SELECT * FROM t WHERE s = 'b'").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_of_every_spec_are_understood() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = schema(
        0,
        [
            optional(1, "n", PrimitiveType::Int),
            optional(2, "s", PrimitiveType::String),
            optional(3, "ts", PrimitiveType::Timestamptz),
        ],
    );
    let spec = UnboundPartitionSpec::builder().with_spec_id(0).build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns, spec, &[]).await;
    let added = table.data(&rows_of(&[1, 2, 3]));
    table.commit("t", vec![added]).await;
    for (spec_id, source, transform, value, numbers) in [
        (1, 1, Transform::Truncate(10), PrimitiveLiteral::Int(10), [11, 12]),
        (2, 3, Transform::Day, PrimitiveLiteral::Int(8), [20, 21]),
    ] {
        table
            .change("t", |builder| {
                let spec = UnboundPartitionSpec::builder().with_spec_id(spec_id);
                let spec = spec.add_partition_field(source, format!("part{spec_id}"), transform).unwrap();
                builder.add_default_partition_spec(spec.build()).unwrap()
            })
            .await;
        let partition = Struct::from_iter([Some(Literal::Primitive(value))]);
        let added = table.data(&rows_of(&numbers)).spec(spec_id, partition);
        table.commit("t", vec![added]).await;
    }
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 7);
    for (filter, rows, files) in [
        ("n = 2", 1, 2),
        ("n = 11", 1, 3),
        ("n = 25", 0, 2),
        ("ts >= '1970-01-09T00:00:00Z' AND ts < '1970-01-10T00:00:00Z'", 2, 3),
        ("ts >= '1970-01-12T00:00:00Z'", 0, 2),
    ] {
        reads(&client, filter, rows, files).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn row_groups_and_pages_are_left_out_by_their_bounds() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = schema(0, [optional(1, "n", PrimitiveType::Int), optional(2, "s", PrimitiveType::String)]);
    let spec = UnboundPartitionSpec::builder().with_spec_id(0).build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns, spec, &[]).await;
    // Four row groups of ten pages each. The metadata has no bounds.
    let rows = batch(vec![
        (1, "n", Arc::new(Int32Array::from_iter_values(0..400)) as ArrayRef),
        (2, "s", Arc::new(StringArray::from_iter_values((0..400).map(|n| format!("row {n}"))))),
    ]);
    let added =
        table.data_with(&rows, |properties| properties.set_data_page_row_count_limit(10).set_write_batch_size(10));
    table.commit("t", vec![added]).await;
    let filter = "n BETWEEN 215 AND 217";
    assert_eq!(text(&client, &format!("SELECT max(s), count(*) FROM t WHERE {filter}")).await, [["row 217", "3"]]);
    let plan = analyzed(&client, &format!("SELECT s FROM t WHERE {filter}")).await;
    for (figure, counts) in [
        ("row_groups_pruned_statistics", "4 total \u{2192} 1 matched"),
        ("page_index_rows_pruned", "100 total \u{2192} 10 matched"),
    ] {
        assert!(plan.contains(&format!("{figure}={counts}")), "{figure}: {plan}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn row_groups_are_left_out_by_bloom_filters() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = schema(
        0,
        [
            optional(1, "n", PrimitiveType::Int),
            optional(2, "s", PrimitiveType::String),
            optional(3, "x", PrimitiveType::Float),
        ],
    );
    // Even numbers in such an order that the bounds of each of the four row groups are about the same.
    let numbers: Vec<i32> = (0..400).map(|i| i * 319 % 400 * 2).collect();
    let rows = batch(vec![
        (1, "n", Arc::new(Int32Array::from(numbers.clone())) as ArrayRef),
        (2, "s", Arc::new(StringArray::from_iter_values(numbers.iter().map(|n| format!("key {n}"))))),
        (3, "x", Arc::new(Float32Array::from_iter_values(numbers.iter().map(|n| *n as f32 / 4.0)))),
    ]);
    for (name, has_filters) in [("t", true), ("plain", false)] {
        let spec = UnboundPartitionSpec::builder().with_spec_id(0).build();
        let mut table = Foreign::create(&cluster, name, FormatVersion::V2, columns.clone(), spec, &[]).await;
        let added = table.data_with(&rows, |properties| {
            properties.set_bloom_filter_max_ndv(100).set_bloom_filter_fpp(0.0001).set_bloom_filter_enabled(has_filters)
        });
        table.commit(name, vec![added]).await;
        if has_filters {
            let expect = async |filter: &str, matched: usize, rows: i64| {
                assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, rows, "{filter}");
                let plan = analyzed(&client, &format!("SELECT * FROM t WHERE {filter}")).await;
                let figure = format!("row_groups_pruned_bloom_filter=4 total \u{2192} {matched} matched");
                assert!(plan.contains(&figure), "{filter}: {plan}");
            };
            expect("n = 401", 0, 0).await;
            expect("n = 402", 1, 1).await;
            expect("s = 'key 401'", 0, 0).await;
            expect("s = 'key 402'", 1, 1).await;
            // By id, and by values of the types that the file has.
            let fields = [
                optional(1, "number", PrimitiveType::Long),
                optional(2, "n", PrimitiveType::String),
                optional(3, "x", PrimitiveType::Double),
            ];
            table.change(name, |builder| builder.add_current_schema(schema(1, fields)).unwrap()).await;
            expect("number = 401", 0, 0).await;
            expect("number = 402", 1, 1).await;
            expect("n = 'key 402'", 1, 1).await;
            // However far these are looked at.
            for (filter, rows) in [("x = 100.5", 1), ("x = 100.25", 0), ("number = 402 AND x = 100.5", 1)] {
                assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE {filter}")).await, rows, "{filter}");
            }
        } else {
            let plan = analyzed(&client, "SELECT * FROM plain WHERE n = 401").await;
            assert!(plan.contains("row_groups_pruned_bloom_filter=4 total \u{2192} 4 matched"), "{plan}");
        }
    }
    // And by those that lake writes, where the table asks for them.
    let enabled = |column| format!("'write.parquet.bloom-filter-enabled.column.{column}' = 'true'");
    run(
        &client,
        &format!("CREATE TABLE own (n BIGINT, s VARCHAR, x DOUBLE) WITH ({}, {})", enabled("n"), enabled("s")),
    )
    .await;
    run(&client, "INSERT INTO own SELECT 2 * value, concat('key ', 2 * value), value FROM generate_series(0, 400)")
        .await;
    for (filter, left, rows) in [("n = 401", 0, 0), ("n = 402", 1, 1), ("s = 'key 401'", 0, 0), ("x = 0.5", 1, 0)] {
        assert_eq!(number(&client, &format!("SELECT count(*) FROM own WHERE {filter}")).await, rows, "{filter}");
        let plan = analyzed(&client, &format!("SELECT * FROM own WHERE {filter}")).await;
        let figure = format!("row_groups_pruned_bloom_filter=1 total \u{2192} {left} matched");
        assert!(plan.contains(&figure), "{filter}: {plan}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_struct_the_parts_that_are_asked_for_are_read() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    // The first part takes next to no room in a file, the second has 600 KB that cannot be made less.
    let rows = "SELECT named_struct('a', 7, 'b', md5(CAST(value AS VARCHAR))) AS s FROM generate_series(1, 20000)";
    run(&client, &format!("CREATE TABLE t AS {rows}")).await;
    let read = async |sql: &str| {
        let plan = analyzed(&client, sql).await;
        let figure = plan.split("bytes_scanned=").nth(1).unwrap_or_else(|| panic!("{plan}"));
        figure.split([',', ']']).next().unwrap().to_owned()
    };
    let expect = async |[a, b]: [&str; 2]| {
        assert_eq!(number(&client, &format!("SELECT sum({a}) FROM t")).await, 140_000);
        let little = read(&format!("SELECT sum({a}) FROM t")).await;
        assert!(little.parse::<u32>().is_ok(), "{a}, less than a thousand: {little}");
        let much = read(&format!("SELECT max({b}) FROM t")).await;
        assert!(much.ends_with('K'), "{b}: {much}");
    };
    expect(["s['a']", "s['b']"]).await;
    // Also where the file is older than what the column is.
    for alter in ["RENAME COLUMN s.a TO c", "ADD COLUMN s.a VARCHAR", "RENAME COLUMN s.b TO d"] {
        run(&client, &format!("ALTER TABLE t {alter}")).await;
    }
    expect(["s['c']", "s['d']"]).await;
    assert_eq!(number(&client, "SELECT count(s['a']) FROM t").await, 0);
    assert_eq!(
        number(&client, "SELECT count(*) FROM t WHERE s['c'] = 7 AND s['a'] IS NULL AND s['d'] > ''").await,
        20_000
    );
}
