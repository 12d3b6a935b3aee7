//! Decimals beside floats.
//!
//! A number with a point is a decimal. Where a decimal meets a float, DataFusion makes decimals of 30 digits of both, 15 of them
//! behind the point, and neither NaN nor 1e20 is one: a statement would fail by what is in a row. Here the decimal becomes a
//! float instead, as in other databases: in comparisons, BETWEEN, IN, CASE, and among the arguments of a function.

use arrow::datatypes::DataType;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{DFSchema, Result as DfResult};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::utils::merge_schema;
use datafusion::logical_expr::{DmlStatement, Expr, ExprSchemable, LogicalPlan, Operator, WriteOp, cast};
use datafusion::optimizer::AnalyzerRule;

/// Comes before DataFusion's own coercion of types.
#[derive(Debug)]
pub struct DecimalsMeetFloats;

impl AnalyzerRule for DecimalsMeetFloats {
    fn name(&self) -> &str {
        "decimals_meet_floats"
    }

    fn analyze(&self, plan: LogicalPlan, _: &ConfigOptions) -> DfResult<LogicalPlan> {
        rewrite(plan, in_expr)
    }
}

/// Rewrites each expression of a plan, from the innermost out, knowing the columns that it can see.
pub(super) fn rewrite(plan: LogicalPlan, expr: fn(Expr, &DFSchema) -> Transformed<Expr>) -> DfResult<LogicalPlan> {
    Ok(plan.transform_up_with_subqueries(|plan| in_plan(plan, expr))?.data)
}

fn in_plan(
    plan: LogicalPlan,
    rewritten: fn(Expr, &DFSchema) -> Transformed<Expr>,
) -> DfResult<Transformed<LogicalPlan>> {
    let mut schema = merge_schema(&plan.inputs());
    // Columns that come from no input.
    match &plan {
        LogicalPlan::TableScan(scan) => {
            schema.merge(&DFSchema::try_from_qualified_schema(scan.table_name.clone(), &scan.source.schema())?);
        }
        LogicalPlan::Dml(DmlStatement { op: WriteOp::MergeInto(_), table_name, target, .. }) => {
            schema.merge(&DFSchema::try_from_qualified_schema(table_name.clone(), &target.schema())?);
        }
        _ => {}
    }
    let names = NamePreserver::new(&plan);
    let done = plan.map_expressions(|expr| {
        let name = names.save(&expr);
        let done = expr.transform_up(|expr| Ok(rewritten(expr, &schema)))?;
        Ok(done.update_data(|expr| name.restore(expr)))
    })?;
    match done.transformed {
        true => done.map_data(LogicalPlan::recompute_schema),
        false => Ok(done),
    }
}

fn in_expr(mut expr: Expr, schema: &DFSchema) -> Transformed<Expr> {
    let changed = match &mut expr {
        Expr::BinaryExpr(binary) if compares(binary.op) => meet(vec![&mut *binary.left, &mut *binary.right], schema),
        Expr::Between(between) => meet(vec![&mut *between.expr, &mut *between.low, &mut *between.high], schema),
        Expr::InList(list) => meet(std::iter::once(&mut *list.expr).chain(&mut list.list).collect(), schema),
        Expr::ScalarFunction(function) => meet(function.args.iter_mut().collect(), schema),
        Expr::Case(case) => {
            let (mut compared, mut results) = (Vec::new(), Vec::new());
            let compares = case.expr.is_some();
            compared.extend(case.expr.as_deref_mut());
            for (when, then) in &mut case.when_then_expr {
                if compares {
                    compared.push(&mut **when);
                }
                results.push(&mut **then);
            }
            results.extend(case.else_expr.as_deref_mut());
            let compared = meet(compared, schema);
            meet(results, schema) || compared
        }
        _ => false,
    };
    match changed {
        true => Transformed::yes(expr),
        false => Transformed::no(expr),
    }
}

fn compares(op: Operator) -> bool {
    use Operator::{Eq, Gt, GtEq, IsDistinctFrom, IsNotDistinctFrom, Lt, LtEq, NotEq};
    matches!(op, Eq | NotEq | Lt | LtEq | Gt | GtEq | IsDistinctFrom | IsNotDistinctFrom)
}

/// Makes floats of the decimals among these, if there is a float: of the widest float's type. Whether it did.
fn meet(parts: Vec<&mut Expr>, schema: &DFSchema) -> bool {
    // What has no type yet, or is wrong, is for DataFusion to say.
    let types: Vec<Option<DataType>> = parts.iter().map(|part| part.get_type(schema).ok()).collect();
    let is_wide = |of: &DataType| matches!(of, DataType::Float64);
    let float = match types.iter().flatten().filter(|of| of.is_floating()).map(is_wide).max() {
        None => return false,
        Some(true) => DataType::Float64,
        Some(false) => DataType::Float32,
    };
    let mut changed = false;
    for (part, of) in parts.into_iter().zip(types) {
        if of.is_some_and(|of| of.is_decimal()) {
            *part = cast(std::mem::take(part), float.clone());
            changed = true;
        }
    }
    changed
}
