//! Filters that look at rows while files are decoded find what filters above the scan do, in whatever state the table is.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, Int32Array, Int64Array, StringArray};
use datafusion::prelude::{SessionConfig, SessionContext};
use iceberg::spec::{FormatVersion, Literal, NestedField, PrimitiveType, Type, UnboundPartitionSpec};
use lake_query::scan::LakeTable;

use crate::common::*;
use crate::foreign::*;
use crate::warm::{analyzed, metric};

/// DataFusion over these tables, which looks at filters while it decodes wherever that can be, whether it pays or not.
async fn early(cluster: &Cluster, names: &[&str]) -> SessionContext {
    let mut config = SessionConfig::new().with_target_partitions(2);
    config.options_mut().execution.parquet.pushdown_filters = true;
    let context = SessionContext::new_with_config(config);
    let tables = cluster.nodes[0].engine().tables();
    for name in names {
        let table = tables.load(&[ident(name)], deadline()).await.unwrap().tables.pop().flatten().unwrap();
        context.register_table(*name, Arc::new(LakeTable::new(tables.clone(), table, deadline()).unwrap())).unwrap();
    }
    context
}

async fn rows(context: &SessionContext, sql: &str) -> Vec<Vec<String>> {
    rows_of(&context.sql(sql).await.unwrap().collect().await.unwrap())
}

fn names(ids: std::ops::Range<i64>) -> ArrayRef {
    Arc::new(StringArray::from_iter(ids.map(|id| (id % 7 != 0).then(|| format!("name {id}")))))
}

fn floats(ids: std::ops::Range<i64>) -> ArrayRef {
    Arc::new(Float64Array::from_iter(ids.map(|id| match (id % 50, id % 11) {
        (0, _) => Some(f64::NAN),
        (_, 0) => None,
        _ => Some(id as f64 / 2.0),
    })))
}

fn ids(range: std::ops::Range<i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(range))
}

#[tokio::test(flavor = "multi_thread")]
async fn late_columns_have_the_same_rows() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let unpartitioned = UnboundPartitionSpec::builder().with_spec_id(0).build();
    let id = || optional(1, "id", PrimitiveType::Long);
    let before = schema(
        0,
        [
            id(),
            optional(2, "n", PrimitiveType::Int),
            optional(3, "s", PrimitiveType::String),
            optional(4, "x", PrimitiveType::Double),
        ],
    );
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V3, before, unpartitioned, &[]).await;
    let small = |range: std::ops::Range<i64>| range.map(|id| id * 3 % 101);
    let n = Arc::new(Int32Array::from_iter_values(small(0..350).map(|n| i32::try_from(n).unwrap()))) as ArrayRef;
    let a = table.data(&batch(vec![
        (1, "id", ids(0..350)),
        (2, "n", n),
        (3, "s", names(0..350)),
        (4, "x", floats(0..350)),
    ]));
    let path_a = location_of(&a);
    table.commit("t", vec![a]).await;
    // Renamed and widened, in another order, with columns that older files do not have.
    let added = NestedField::optional(5, "added", Type::Primitive(PrimitiveType::Long));
    let after = schema(
        1,
        [
            optional(3, "label", PrimitiveType::String),
            optional(2, "number", PrimitiveType::Long),
            id(),
            optional(4, "x", PrimitiveType::Double),
            Arc::new(added.with_initial_default(Literal::long(5))),
            optional(6, "missing", PrimitiveType::String),
        ],
    );
    table.change("t", |builder| builder.add_current_schema(after).unwrap()).await;
    let number = Arc::new(Int64Array::from_iter_values(small(350..700))) as ArrayRef;
    let added = Arc::new(Int64Array::from_iter_values((350..700).map(|id| id % 9))) as ArrayRef;
    let columns = vec![
        (3, "label", names(350..700)),
        (2, "number", number),
        (1, "id", ids(350..700)),
        (4, "x", floats(350..700)),
        (5, "added", added),
    ];
    let b = table.data(&batch(columns));
    let path_b = location_of(&b);
    // A file from which nothing is deleted, too.
    table.commit("t", vec![b]).await;
    // Rows at the edges of row groups, a whole one, and some by value, also by a column that is not asked for.
    let places: Vec<_> = [0, 99, 349].into_iter().chain(100..200).map(|place| (path_a.as_str(), place)).collect();
    let by_id = batch(vec![(1, "id", Arc::new(Int64Array::from(vec![3, 60, 690])) as ArrayRef)]);
    let by_label = batch(vec![(3, "label", Arc::new(StringArray::from(vec!["name 61", "name 500"])) as ArrayRef)]);
    let deletes = vec![
        table.positions(&places),
        table.vector(&path_b, &[0, 1, 57, 200, 349]),
        table.equality(&by_id),
        table.equality(&by_label),
    ];
    table.commit("t", deletes).await;
    let last = table.data(&batch(vec![(1, "id", ids(700..750)), (3, "label", names(700..750))]));
    table.commit("t", vec![last]).await;

    // Nothing goes through a limit.
    let whole = "(SELECT * FROM t LIMIT 100000)";
    let left = numbers(&client, "SELECT id FROM t ORDER BY id").await;
    let gone = |id: &i64| {
        let by_place = [0, 99, 349, 350, 351, 407, 550, 699].contains(id) || (100..200).contains(id);
        by_place || [3, 60, 690, 61, 500].contains(id)
    };
    assert_eq!(left, (0..750).filter(|id| !gone(id)).collect::<Vec<_>>());
    let filters = [
        "id >= 150",
        "number = 30",
        "number < 5 AND id > 40",
        "number IS NULL",
        "label = 'name 123' OR label = 'name 223'",
        "label IS NULL OR number > 90",
        "label LIKE 'name 1%' AND number <> 10",
        "(label IS NOT DISTINCT FROM 'name 61') OR id BETWEEN 340 AND 360",
        "x > 100",
        "x <> 5 AND id < 100",
        "NOT (x <= 50)",
        "x IS NULL",
        "added = 5",
        "added <> 5",
        "added > 4 AND label IS NOT NULL AND number < 50",
        "missing IS NULL AND id > 300",
        "missing = 'x'",
        "id IN (1, 2, 57, 348, 350, 399, 699, 710)",
        "id NOT IN (1, 2, 57) AND x < 20",
        "number + 1 = 31 AND id > 20",
    ];
    let columns = "id, number, label, x, added, missing";
    let all: Vec<String> = filters.iter().map(|filter| format!("({filter})")).collect();
    let all = text(&client, &format!("SELECT {columns}, {} FROM {whole} ORDER BY id", all.join(", "))).await;
    for (i, filter) in filters.iter().enumerate() {
        let holds = |row: &&Vec<String>| row[6 + i] == "true";
        let wanted: Vec<Vec<String>> = all.iter().filter(holds).map(|row| row[..6].to_vec()).collect();
        let query = format!("SELECT {columns} FROM t WHERE {filter} ORDER BY id");
        assert_eq!(rows(&early(&cluster, &["t"]).await, &query).await, wanted, "{filter}");
        assert_eq!(text(&client, &query).await, wanted, "{filter}");
    }
    // Filters that come while the query runs: of joins and of the first few.
    run(&client, "CREATE TABLE wanted AS SELECT * FROM (VALUES (30, 'name 10'), (5, 'name 400')) AS v(number, label)")
        .await;
    for of in [
        "SELECT t.id, t.number FROM {t} AS t JOIN wanted USING (label) WHERE t.x > 1 ORDER BY 1",
        "SELECT id FROM {t} AS t JOIN wanted ON t.added = wanted.number ORDER BY 1",
        "SELECT id, label FROM {t} AS t WHERE number > 3 ORDER BY x DESC NULLS LAST, id LIMIT 7",
        "SELECT id, label FROM {t} AS t ORDER BY added, id LIMIT 7",
        "SELECT id, x FROM {t} AS t ORDER BY missing NULLS FIRST, id DESC LIMIT 7",
        "SELECT min(x), max(number), min(added) FROM {t} AS t WHERE id > 20",
    ] {
        let (early_or_not, whole) = (of.replace("{t}", "t"), text(&client, &of.replace("{t}", whole)).await);
        assert_eq!(rows(&early(&cluster, &["t", "wanted"]).await, &early_or_not).await, whole, "{of}");
        assert_eq!(text(&client, &early_or_not).await, whole, "{of}");
    }

    // They are late where no filter can fail.
    for (filter, is_late) in [("number = 30", true), ("label = 'name 400'", true), ("number + 1 = 31", false)] {
        let analyze = format!("EXPLAIN ANALYZE SELECT id, x FROM t WHERE {filter}");
        let plan = rows(&early(&cluster, &["t"]).await, &analyze).await.concat().join("\n");
        let pruned = metric(&plan, "pushdown_rows_pruned").unwrap_or(0);
        assert_eq!(pruned > 0, is_late, "{filter}: {plan}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn columns_are_late_where_that_pays() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let columns = "value AS id, value * 7919 % 39989 AS k, value % 11 AS digit, CAST(value * 7919 AS VARCHAR) AS wide";
    let kind = "CASE value % 3 WHEN 0 THEN 'a' WHEN 1 THEN 'b' ELSE 'c' END AS kind";
    run(&client, &format!("CREATE TABLE facts AS SELECT {columns}, {kind} FROM generate_series(1, 160000)")).await;
    for (name, keys) in [
        ("few", "SELECT value AS k FROM generate_series(100, 103)"),
        ("hundreds", "SELECT value * 200 AS k FROM generate_series(0, 199)"),
        ("most", "SELECT value AS k FROM generate_series(0, 30000)"),
    ] {
        run(&client, &format!("CREATE TABLE {name} AS {keys}")).await;
    }
    for (query, is_late) in [
        ("SELECT wide FROM facts WHERE k = 4711", true),
        ("SELECT wide FROM facts WHERE k BETWEEN 100 AND 110", true),
        // Half of them.
        ("SELECT wide FROM facts WHERE k > 20000", false),
        // A third of them.
        ("SELECT wide FROM facts WHERE kind = 'a'", false),
        // Few, but one column of three is to be late.
        ("SELECT sum(id) FROM facts WHERE digit = 5 AND k < 500", false),
        ("SELECT id, wide FROM facts WHERE digit = 5 AND k < 500", true),
        // A join's values, and its hash table.
        ("SELECT sum(f.id) FROM facts AS f JOIN few ON f.k = few.k", true),
        ("SELECT sum(f.id) FROM facts AS f JOIN hundreds AS h ON f.k = h.k", true),
        ("SELECT sum(f.id) FROM facts AS f JOIN most AS m ON f.k = m.k", false),
    ] {
        let plan = analyzed(&client, query).await;
        let pruned = metric(&plan, "pushdown_rows_pruned").unwrap_or(0);
        assert_eq!(pruned > 0, is_late, "{query}: {plan}");
    }
}
