//! Filters that look at rows while files are decoded find what filters above the scan do, in whatever state the table is.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, Int32Array, Int64Array, StringArray};
use iceberg::spec::{FormatVersion, Literal, NestedField, PrimitiveType, Type, UnboundPartitionSpec};

use crate::common::*;
use crate::foreign::*;
use crate::warm::{analyzed, metric};

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
        let found = text(&client, &format!("SELECT {columns} FROM t WHERE {filter} ORDER BY id")).await;
        assert_eq!(found, wanted, "{filter}");
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
        let (late, early) = (of.replace("{t}", "t"), of.replace("{t}", whole));
        assert_eq!(text(&client, &late).await, text(&client, &early).await, "{of}");
    }

    // They are late where that is asked for, and where no filter can fail.
    for (filter, is_late) in [("number = 30", true), ("label = 'name 400'", true), ("number + 1 = 31", false)] {
        let plan = analyzed(&client, &format!("SELECT id, x FROM t WHERE {filter}")).await;
        let pruned = metric(&plan, "pushdown_rows_pruned").unwrap_or(0);
        assert_eq!(pruned > 0, is_late, "{filter}: {plan}");
    }
}
