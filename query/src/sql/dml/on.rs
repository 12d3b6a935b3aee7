//! The join of a MERGE, whose ON condition may hold subqueries.
//!
//! DataFusion plans subqueries in a WHERE and in a select list, and none where two tables are joined. An inner join leaves the rows for
//! which ON holds: there the conditions with subqueries are a WHERE over it. Of an outer join, as WHEN NOT MATCHED asks for, a row stays
//! for which ON does not hold: there each subquery becomes a column of the side whose columns it is compared with (of the source, if with
//! none), and ON asks the column.
//!
//! ```text
//! t MERGE s ON t.id = s.id AND s.k IN (SELECT k FROM r)
//!   -> t JOIN (SELECT *, s.k IN (SELECT k FROM r) AS __lake_on_0 FROM s) ON t.id = s.id AND __lake_on_0
//! ```
//! NULL is told from false as in any select list ([`crate::sql::subqueries`]).

use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{Column, JoinType};
use datafusion::logical_expr::utils::split_conjunction_owned;
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder};

use super::row_plan::has_subquery;
use crate::error::Result;
use crate::sql::subqueries::{has_correlated, refused, subquery_of};

/// What the columns begin with that hold what subqueries come to.
const ASKED: &str = "__lake_on_";

/// Joins target and source of a MERGE.
///
/// # Errors
/// `NotSupported`: an outer join whose condition holds a subquery that is correlated, or compared with columns of both sides.
pub(super) fn join(target: LogicalPlan, source: LogicalPlan, join_type: JoinType, on: &Expr) -> Result<LogicalPlan> {
    if !has_subquery(on) {
        return Ok(LogicalPlanBuilder::from(target).join_on(source, join_type, [on.clone()])?.build()?);
    }
    if join_type == JoinType::Inner {
        let conditions = split_conjunction_owned(on.clone());
        let (asking, plain): (Vec<Expr>, Vec<Expr>) = conditions.into_iter().partition(has_subquery);
        let joined = LogicalPlanBuilder::from(target).join_on(source, join_type, plain)?;
        return Ok(match asking.into_iter().reduce(Expr::and) {
            Some(condition) => joined.filter(condition)?.build()?,
            None => joined.build()?,
        });
    }
    let (mut of_target, mut of_source) = (Vec::new(), Vec::new());
    let condition = on.clone().transform_down(|expr| {
        if subquery_of(&expr).is_none() {
            return Ok(Transformed::no(expr));
        }
        if has_correlated(&expr)? {
            return Err(refused(
                "a correlated subquery in the ON condition of a MERGE with WHEN NOT MATCHED",
                "take it into the select list of a subquery in USING, and name its column in ON",
            ));
        }
        let sees = |side: &LogicalPlan| expr.column_refs().iter().all(|column| side.schema().has_column(column));
        let (by_source, by_target) = (sees(&source), sees(&target));
        let name = format!("{ASKED}{}", of_source.len() + of_target.len());
        match (by_source, by_target) {
            (true, _) => of_source.push(expr.alias(name.as_str())),
            (false, true) => of_target.push(expr.alias(name.as_str())),
            (false, false) => {
                return Err(refused(
                    "a subquery that the ON condition of a MERGE with WHEN NOT MATCHED compares with columns of both the target and \
                     the source",
                    "compare it with columns of one of them",
                ));
            }
        }
        Ok(Transformed::yes(Expr::Column(Column::new_unqualified(name))))
    })?;
    let (target, source) = (with_columns(target, of_target)?, with_columns(source, of_source)?);
    Ok(LogicalPlanBuilder::from(target).join_on(source, join_type, [condition.data])?.build()?)
}

/// The rows of a plan with more columns.
fn with_columns(plan: LogicalPlan, more: Vec<Expr>) -> Result<LogicalPlan> {
    if more.is_empty() {
        return Ok(plan);
    }
    let columns: Vec<Expr> = plan.schema().columns().into_iter().map(Expr::Column).chain(more).collect();
    Ok(LogicalPlanBuilder::from(plan).project(columns)?.build()?)
}
