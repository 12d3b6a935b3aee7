//! What a statement reads of its target, as far as its conditions tell.

use std::sync::Arc;

use datafusion::common::pruning::PrunableStatistics;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{Column, DFSchema, Statistics};
use datafusion::datasource::{ViewTable, source_as_provider};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::utils::split_conjunction;
use datafusion::logical_expr::{DmlStatement, Expr, LogicalPlan, MergeIntoClauseKind, Projection, WriteOp};
use datafusion::physical_optimizer::pruning::PruningPredicateBuilder;
use iceberg::spec::DataFile;

use super::row_plan::has_subquery;
use crate::error::Result;
use crate::scan::{LakeTable, values};
use crate::sql::subqueries::subquery_of;
use crate::sql::{CATALOG, DEFAULT_SCHEMA, computing, floats, rounding};
use crate::table::conflict::Scope;

/// In which files rows of the target may be that the statement reads, from its conditions on the target alone.
pub(super) async fn scope(state: &SessionState, target: &LakeTable, dml: &DmlStatement) -> Result<Scope> {
    if reads_besides(dml)? {
        return Ok(Scope::Everything);
    }
    let conditions: Vec<&Expr> = match &dml.op {
        WriteOp::MergeInto(merge) => {
            if merge.clauses.iter().any(|c| c.kind.canonical() == MergeIntoClauseKind::NotMatchedBySource) {
                return Ok(Scope::Everything);
            }
            split_conjunction(&merge.on)
        }
        _ => {
            let mut plan = dml.input.as_ref();
            while let LogicalPlan::Projection(Projection { input, .. }) = plan {
                plan = input;
            }
            match plan {
                LogicalPlan::Filter(filter) => split_conjunction(&filter.predicate),
                _ => Vec::new(),
            }
        }
    };
    let of_target = |expr: &&Expr| {
        let merge = matches!(dml.op, WriteOp::MergeInto(_));
        let columns = expr.column_refs();
        !columns.is_empty()
            && !expr.is_volatile()
            && !has_subquery(expr)
            && (!merge || columns.iter().all(|column| column.relation.as_ref() == Some(&dml.table_name)))
    };
    let Some(condition) = conditions.into_iter().filter(of_target).cloned().reduce(Expr::and) else {
        return Ok(Scope::Everything);
    };
    let schema = target.table().arrow_schema()?;
    let unqualified = condition.transform(|expr| {
        Ok(match expr {
            Expr::Column(column) => Transformed::yes(Expr::Column(Column::new_unqualified(column.name))),
            expr => Transformed::no(expr),
        })
    })?;
    // What cannot be used for pruning bounds nothing.
    let (own, of_rows) = (state.clone(), schema.clone());
    let part = async move {
        let columns = DFSchema::try_from(of_rows.as_ref().clone()).ok()?;
        // As the rows are looked at.
        let condition = floats::settled_expr(unqualified.data, &columns).ok()?.data;
        let condition = condition.transform_up(|expr| Ok(rounding::in_expr(expr, &columns))).ok()?.data;
        let condition = own.create_physical_expr(condition, &columns).ok()?;
        let predicate = PruningPredicateBuilder::new().with_file_schema(of_rows.clone()).build(condition)?;
        // It is looked at for each file: not if it holds what is too much for planning.
        let of_none = Arc::new(Statistics::new_unknown(&of_rows));
        predicate.prune(&PrunableStatistics::new(vec![of_none], of_rows)).is_ok().then_some(predicate)
    };
    let predicate = computing::planning(state, part).await?;
    let Some(predicate) = predicate else { return Ok(Scope::Everything) };
    Ok(Scope::Files(Arc::new(move |file: &DataFile| {
        let statistics = Arc::new(values::file_statistics(file, &schema));
        let statistics = PrunableStatistics::new(vec![statistics], schema.clone());
        predicate.prune(&statistics).map_or(true, |keep| keep.first() != Some(&false))
    })))
}

/// Whether the statement reads its target a second time, where its conditions do not bound what it reads.
pub(super) fn reads_besides(dml: &DmlStatement) -> Result<bool> {
    let resolved = dml.table_name.clone().resolve(CATALOG, DEFAULT_SCHEMA);
    let mut reads = 0;
    let mut view = false;
    let mut count = |plan: &LogicalPlan| {
        if let LogicalPlan::TableScan(scan) = plan {
            if scan.table_name.clone().resolve(CATALOG, DEFAULT_SCHEMA) == resolved {
                reads += 1;
            }
            // It may read anything.
            view |= source_as_provider(&scan.source).is_ok_and(|provider| provider.is::<ViewTable>());
        }
        Ok(TreeNodeRecursion::Continue)
    };
    dml.input.apply_with_subqueries(&mut count)?;
    let once = match &dml.op {
        // Of INSERT the input is the query alone.
        WriteOp::Insert(_) => 0,
        WriteOp::MergeInto(merge) => {
            for expr in merge.exprs() {
                expr.apply(|expr| {
                    if let Some(subquery) = subquery_of(expr) {
                        subquery.subquery.apply_with_subqueries(&mut count)?;
                    }
                    Ok(TreeNodeRecursion::Continue)
                })?;
            }
            0
        }
        _ => 1,
    };
    Ok(view || reads > once)
}
