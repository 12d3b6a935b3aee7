//! Late columns: filters look at the rows of a file while it is decoded, each at the columns that it is about, and the other columns
//! are decoded only of the rows that are left.
//!
//! It is no more than less work, and only where it is less ([`worth`]). The filter above the scan stays and looks at what comes out: the
//! Parquet reader passes over a filter that it cannot use for a file (of nested columns, say) without a word. Deleted rows are left out
//! before, as everywhere, and equality deletes behind it.
//!
//! Looking early has a price: each filter is a pass of its own over its columns, which are decoded for it, kept, and put together once
//! more with the rest; and the rest is not skipped where the rows that are left lie close together: where one is left of 64, the reader
//! decodes all and throws away. So filters are looked at early where they leave no more than [`FEW`] of the rows, and one of two holds:
//! - the late columns have at least as many bytes as those that are looked at first. `quantity < 24 AND discount BETWEEN 0.05 AND 0.07
//!   AND shipped >= DATE '1994-01-01'` with one more column to read is not: three columns of four are decoded in any case;
//! - the few are by a join's filter, and would be by nothing else below the join: rows that it drops here need not be hashed, moved
//!   between cores and looked up there. Where the statement's own filters drop most rows, those do not get there in any case.
//!
//! What a top-k asks for is not known when its first files are opened, and becomes little soon: it is looked at early where late
//! columns have [`OPEN_TIMES`] the bytes. Filters of joins that leave most rows ([`MOST`]) are left to the join. Row groups and pages are
//! left out by what filters say of their bounds in any case. What filters leave is estimated for each file by [`selectivity`](super::selectivity).
//!
//! Filters are looked at one by one here, the ones of few bytes first. One that can fail would then also look at rows that another
//! one leaves out before it now (`kind = 'x' AND CAST(text AS INT) > 2`), so that there are late columns only where no filter can
//! ([`cannot_fail`]).

use std::collections::HashSet;
use std::sync::Arc;

use datafusion::datasource::physical_plan::{FileSource, ParquetSource};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{
    BinaryExpr, Column, DynamicFilterPhysicalExpr, DynamicFilterTracking, InListExpr, IsNotNullExpr, IsNullExpr,
    LikeExpr, Literal, NotExpr,
};
use datafusion::physical_expr::projection::ProjectionExprs;
use datafusion::physical_expr::utils::collect_columns;
use datafusion::physical_expr::{PhysicalExpr, conjunction, split_conjunction};

use super::selectivity::Known;

/// Filters read their columns one after the other, before the rest. Where each read is a request to an object store, that pays for
/// files that are larger than this only, in bytes.
pub const REMOTE_FILE_BYTES: u64 = 8 << 20;
/// What filters have decoded is kept for the rows that come out, of each row group that is read, up to so many bytes; what is more is
/// decoded twice.
pub const DECODED_BYTES: usize = 16 << 20;
/// Of a file's rows, at most so many are left where it pays to skip the others: half of what the reader skips at all, for it is estimated.
const FEW: f64 = 1.0 / 128.0;
/// A filter that leaves more of the rows than this drops too little.
const MOST: f64 = 0.5;
/// How many times the bytes of what is looked at first the late columns have where what is left is not known yet.
const OPEN_TIMES: f64 = 4.0;

/// Of a scan's filter, what is looked at while a file is decoded of which this is known; `None` if that does not pay.
pub fn worth(
    filter: &Arc<dyn PhysicalExpr>,
    asked: &ProjectionExprs,
    known: &Known<'_>,
) -> Option<Arc<dyn PhysicalExpr>> {
    let mut looked_at = Vec::new();
    let (mut own, mut of_joins, mut is_open) = (1.0, 1.0, false);
    let mut fixed = Vec::new();
    for conjunct in split_conjunction(filter) {
        match DynamicFilterTracking::classify(conjunct) {
            DynamicFilterTracking::Static => fixed.push(conjunct.clone()),
            DynamicFilterTracking::Watching(_) => is_open = true,
            DynamicFilterTracking::AllComplete => {
                let part = known.part(conjunct);
                if part > MOST {
                    continue;
                }
                of_joins *= part;
            }
        }
        looked_at.push(conjunct.clone());
    }
    if !fixed.is_empty() {
        // Together: two may be about the two ends of one column.
        own = known.part(&conjunction(fixed));
    }
    let looked_at = conjunction(looked_at);
    let first = columns(known, [&looked_at]);
    let asked = columns(known, asked.iter().map(|column| &column.expr));
    let bytes = |column: &usize| known.row_bytes(*column);
    let early: f64 = first.iter().map(bytes).sum();
    let late: f64 = asked.difference(&first).map(bytes).sum();
    let pays = !first.is_empty()
        && (own * of_joins <= FEW && late >= early
            || of_joins <= FEW && own > MOST
            || is_open && late >= OPEN_TIMES * early);
    pays.then_some(looked_at)
}

fn columns<'a>(known: &Known<'_>, exprs: impl IntoIterator<Item = &'a Arc<dyn PhysicalExpr>>) -> HashSet<usize> {
    let named = exprs.into_iter().flat_map(collect_columns);
    named.filter_map(|column| known.schema.index_of(column.name()).ok()).collect()
}

/// Whether a filter can be evaluated for any row: it compares columns and constants.
pub fn cannot_fail(filter: &Arc<dyn PhysicalExpr>) -> bool {
    let compares = |binary: &BinaryExpr| {
        use Operator::{And, Eq, Gt, GtEq, IsDistinctFrom, IsNotDistinctFrom, Lt, LtEq, NotEq, Or};
        matches!(binary.op(), And | Or | Eq | NotEq | Lt | LtEq | Gt | GtEq | IsDistinctFrom | IsNotDistinctFrom)
    };
    let known = filter.is::<Column>()
        || filter.is::<Literal>()
        || filter.is::<IsNullExpr>()
        || filter.is::<IsNotNullExpr>()
        || filter.is::<NotExpr>()
        || filter.is::<InListExpr>()
        || filter.is::<LikeExpr>()
        // Of a join or a top-k, about the columns that are its children.
        || filter.is::<DynamicFilterPhysicalExpr>()
        || filter.downcast_ref::<BinaryExpr>().is_some_and(compares);
    known && filter.children().into_iter().all(cannot_fail)
}

/// The source that looks at `filter` early, with its other columns late.
pub fn late(source: Arc<dyn FileSource>, filter: Arc<dyn PhysicalExpr>) -> Arc<dyn FileSource> {
    match source.downcast_ref::<ParquetSource>() {
        Some(parquet) => {
            Arc::new(parquet.with_predicate(filter).with_pushdown_filters(true).with_reorder_filters(true))
        }
        None => source,
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::{DataType, Field, Schema};
    use datafusion::common::stats::Precision;
    use datafusion::common::{ColumnStatistics, DFSchema, ScalarValue, Statistics};
    use datafusion::logical_expr::{Expr, cast, col, lit};
    use datafusion::physical_expr::expressions::lit as constant;
    use datafusion::prelude::SessionContext;

    use super::*;

    /// Whether filters are looked at early in a file of 100,000 rows with `n` from 0 to 99,999, `m` from 0 to 9, `kind` of 4 bits a
    /// row and `text` of 10 bytes a row, compressed, all of which are asked for, or only `n` and `m`.
    fn is_early(filter: Vec<Arc<dyn PhysicalExpr>>, narrow: bool) -> bool {
        let schema = known_schema();
        let sized = |bytes| ColumnStatistics { byte_size: Precision::Inexact(bytes), ..Default::default() };
        let between = |lower: i64, upper: i64| ColumnStatistics {
            min_value: Precision::Exact(ScalarValue::from(lower)),
            max_value: Precision::Exact(ScalarValue::from(upper)),
            ..sized(800_000)
        };
        let statistics = Statistics {
            num_rows: Precision::Exact(100_000),
            total_byte_size: Precision::Absent,
            column_statistics: vec![between(0, 99_999), between(0, 9), sized(150_000), sized(3_000_000)],
        };
        let asked: &[usize] = if narrow { &[0, 1] } else { &[0, 1, 2, 3] };
        let asked = ProjectionExprs::from_indices(asked, &schema);
        let known = Known { schema: &schema, statistics: &statistics, distinct: &[] };
        worth(&conjunction(filter), &asked, &known).is_some()
    }

    fn known_schema() -> Schema {
        let fields = [
            ("n", DataType::Int64),
            ("m", DataType::Int64),
            ("kind", DataType::Utf8View),
            ("text", DataType::Utf8View),
        ];
        Schema::new(fields.map(|(name, of)| Field::new(name, of, true)).to_vec())
    }

    fn physical(filter: Expr) -> Arc<dyn PhysicalExpr> {
        let schema = DFSchema::try_from(known_schema()).unwrap();
        SessionContext::new().state().create_physical_expr(filter, &schema).unwrap()
    }

    fn dynamic(column: &str, now: Expr, is_complete: bool) -> Arc<dyn PhysicalExpr> {
        let filter = DynamicFilterPhysicalExpr::new(vec![physical(col(column))], constant(true));
        filter.update(physical(now)).unwrap();
        if is_complete {
            filter.mark_complete();
        }
        Arc::new(filter)
    }

    #[test]
    fn columns_are_late_where_few_rows_are_left_and_much_is_skipped() {
        let holds = |filter: Expr| is_early(vec![physical(filter)], false);
        let text = |text: &str| lit(ScalarValue::Utf8View(Some(text.into())));
        assert!(holds(col("n").eq(lit(5_i64))));
        assert!(holds(col("n").gt(lit(50_000_i64)).and(col("n").lt(lit(50_010_i64)))), "a short way between two ends");
        assert!(!holds(col("n").gt(lit(50_000_i64))));
        assert!(!holds(col("m").eq(lit(5_i64))));
        assert!(holds(col("n").in_list(vec![lit(5_i64), lit(6_i64)], false)));
        assert!(!holds(col("n").in_list(vec![lit(5_i64), lit(6_i64)], true)));
        assert!(!holds(col("n").eq(lit(5_i64)).or(col("m").eq(lit(5_i64)))));
        assert!(holds(col("text").eq(text("x"))), "so many bits tell many values apart");
        assert!(!holds(col("kind").eq(text("x"))));
        assert!(!holds(col("text").like(text("%x%"))), "nothing is known");
        // 30 bytes for the filter, and 16 for the rest.
        assert!(!is_early(vec![physical(col("text").eq(text("x")))], true));
    }

    #[test]
    fn filters_of_joins_are_early_where_nothing_else_drops_the_rows() {
        let few = || dynamic("n", col("n").in_list(vec![lit(5_i64), lit(6_i64)], false), true);
        assert!(is_early(vec![few()], true));
        assert!(!is_early(vec![dynamic("n", col("n").gt(lit(100_i64)), true)], false));
        assert!(!is_early(vec![few(), physical(col("m").eq(lit(5_i64)))], true), "they do not get to the join");
        // A top-k: not known yet, but so much would be skipped.
        let open = |column| dynamic(column, lit(true), false);
        assert!(is_early(vec![open("n")], false));
        assert!(!is_early(vec![open("n")], true));
    }

    #[test]
    fn what_can_fail_is_told_from_what_cannot() {
        let fields = [("a", DataType::Int64), ("b", DataType::Int64), ("s", DataType::Utf8View)];
        let schema = Schema::new(fields.map(|(name, of)| Field::new(name, of, true)).to_vec());
        let schema = DFSchema::try_from(schema).unwrap();
        let state = SessionContext::new().state();
        let holds = |filter: Expr| cannot_fail(&state.create_physical_expr(filter, &schema).unwrap());
        assert!(holds(
            col("a")
                .gt(lit(5_i64))
                .and(col("s").like(lit(ScalarValue::Utf8View(Some("x%".into())))).or(col("s").is_null()))
        ));
        assert!(holds(col("a").in_list(vec![lit(1_i64), lit(2_i64)], true).and(!col("a").eq(col("b")))));
        assert!(!holds((lit(10_i64) / col("a")).gt(lit(1_i64))));
        assert!(!holds(col("b").not_eq(lit(0_i64)).and((col("a") % col("b")).eq(lit(1_i64)))));
        assert!(!holds(cast(col("s"), DataType::Int64).eq(lit(1_i64))));
    }
}
