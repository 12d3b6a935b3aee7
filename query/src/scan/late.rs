//! Late columns: filters look at the rows of a file while it is decoded, each at the columns that it is about, and the other columns
//! are decoded only of the rows that are left.
//!
//! It is no more than less work. The filter above the scan stays and looks at what comes out: the Parquet reader passes over a filter
//! that it cannot use for a file (of nested columns, say) without a word. Deleted rows are left out before, as everywhere, and
//! equality deletes behind it.
//!
//! Filters are looked at one by one here, the ones of few bytes first. One that can fail would then also look at rows that another
//! one leaves out before it now (`kind = 'x' AND CAST(text AS INT) > 2`), so that there are late columns only where no filter can
//! ([`cannot_fail`]).

use std::sync::Arc;

use datafusion::datasource::physical_plan::{FileSource, ParquetSource};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{
    BinaryExpr, Column, DynamicFilterPhysicalExpr, InListExpr, IsNotNullExpr, IsNullExpr, LikeExpr, Literal, NotExpr,
};
use datafusion::physical_expr::projection::ProjectionExprs;
use datafusion::physical_expr::utils::collect_columns;

/// Filters read their columns one after the other, before the rest. Where each read is a request to an object store, that pays for
/// files that are larger than this only, in bytes.
pub const REMOTE_FILE_BYTES: u64 = 8 << 20;
/// What filters have decoded is kept for the rows that come out, of each row group that is read, up to so many bytes; what is more is
/// decoded twice.
pub const DECODED_BYTES: usize = 16 << 20;

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

/// Whether there are columns to be late: some that are asked for, and that the filter is not about.
pub fn leaves_columns(filter: &Arc<dyn PhysicalExpr>, asked: &ProjectionExprs) -> bool {
    let looked_at = collect_columns(filter);
    asked.iter().any(|column| !collect_columns(&column.expr).is_subset(&looked_at))
}

/// The source with its other columns late.
pub fn late(source: Arc<dyn FileSource>) -> Arc<dyn FileSource> {
    match source.downcast_ref::<ParquetSource>() {
        Some(parquet) => Arc::new(parquet.clone().with_pushdown_filters(true).with_reorder_filters(true)),
        None => source,
    }
}

#[cfg(test)]
mod tests {
    use datafusion::common::{DFSchema, ScalarValue};
    use datafusion::logical_expr::{Expr, cast, col, lit};
    use datafusion::prelude::SessionContext;

    use super::*;

    #[test]
    fn what_can_fail_is_told_from_what_cannot() {
        use arrow::datatypes::{DataType, Field, Schema};
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
