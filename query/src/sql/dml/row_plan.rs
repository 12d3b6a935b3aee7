//! The plan of a statement over a scan that tells each row's place: which rows it changes, and what becomes of them.

use std::sync::Arc;

use arrow::datatypes::FieldRef;
use datafusion::common::tree_node::TreeNode;
use datafusion::common::{Column, DFSchema, JoinType, ScalarValue, TableReference};
use datafusion::datasource::provider_as_source;
use datafusion::logical_expr::{
    DmlStatement, Expr, ExprSchemable, LogicalPlan, LogicalPlanBuilder, MergeIntoAction, MergeIntoClauseKind,
    MergeIntoOp, Projection, TableSource, WriteOp, lit, when,
};

use super::{DELETE, INSERT, KIND, SEEN, UPDATE, on};
use crate::error::{Error, Result};
use crate::scan::{FILE_COLUMN, LakeTable, POSITION_COLUMN, Wanted};

/// The column that is true for rows of a MERGE's source.
const SOURCE: &str = "__lake_source";
/// The column with the number of the WHEN clause that applies.
const CLAUSE: &str = "__lake_clause";

/// The rows that a statement changes: the new values of all columns, file, position and kind.
pub(super) fn row_plan(target: &LakeTable, dml: &DmlStatement, wanted: Wanted) -> Result<LogicalPlan> {
    let source = provider_as_source(Arc::new(target.places(wanted)?));
    match (&dml.op, dml.input.as_ref()) {
        (WriteOp::MergeInto(merge), _) => merge_plan(dml, merge, source),
        (WriteOp::Update, LogicalPlan::Projection(projection)) => {
            let input = with_row_ids(&projection.input, source)?;
            let mut exprs = projection.expr.clone();
            exprs.extend(row_ids(input.schema())?);
            exprs.push(lit(UPDATE).alias(KIND));
            Ok(LogicalPlan::Projection(Projection::try_new(exprs, Arc::new(input))?))
        }
        (WriteOp::Delete, input) => {
            let input = with_row_ids(input, source)?;
            let mut exprs = row_ids(input.schema())?;
            exprs.push(lit(DELETE).alias(KIND));
            Ok(LogicalPlan::Projection(Projection::try_new(exprs, Arc::new(input))?))
        }
        (op, _) => Err(Error::not_supported(format!("this form of {op} is not supported yet"))),
    }
}

/// The plan with another source for its first table, which is the target.
fn with_row_ids(plan: &LogicalPlan, source: Arc<dyn TableSource>) -> Result<LogicalPlan> {
    if let LogicalPlan::TableScan(scan) = plan {
        return Ok(LogicalPlanBuilder::scan(scan.table_name.clone(), source, None)?.build()?);
    }
    let mut inputs: Vec<LogicalPlan> = plan.inputs().into_iter().cloned().collect();
    let Some(first) = inputs.first_mut() else {
        return Err(Error::not_supported(
            "this form of the statement is not supported yet: it does not begin with a table",
        ));
    };
    *first = with_row_ids(first, source)?;
    Ok(plan.with_new_exprs(plan.expressions(), inputs)?)
}

fn row_ids(schema: &DFSchema) -> Result<Vec<Expr>> {
    let find = |name: &str| -> Result<Expr> {
        let found = schema.iter().find(|(_, field)| field.name() == name);
        let (qualifier, field) = found.ok_or_else(|| Error::internal(format!("the plan has lost column {name}")))?;
        Ok(Expr::Column(Column::from((qualifier, field))).alias(name))
    };
    Ok(vec![find(FILE_COLUMN)?, find(POSITION_COLUMN)?])
}

fn merge_plan(dml: &DmlStatement, merge: &MergeIntoOp, target: Arc<dyn TableSource>) -> Result<LogicalPlan> {
    let columns = dml.target.schema();
    let has = |kind| merge.clauses.iter().any(|clause| clause.kind.canonical() == kind);
    let join_type = match (has(MergeIntoClauseKind::NotMatchedByTarget), has(MergeIntoClauseKind::NotMatchedBySource)) {
        (false, false) => JoinType::Inner,
        (true, false) => JoinType::Right,
        (false, true) => JoinType::Left,
        (true, true) => JoinType::Full,
    };
    let column =
        |(qualifier, field): (Option<&TableReference>, &FieldRef)| Expr::Column(Column::from((qualifier, field)));
    let mut of_source: Vec<Expr> = dml.input.schema().iter().map(column).collect();
    of_source.push(lit(true).alias(SOURCE));
    let source = LogicalPlanBuilder::from(dml.input.as_ref().clone()).project(of_source)?.build()?;
    let target = LogicalPlanBuilder::scan(dml.table_name.clone(), target, None)?.build()?;
    let joined = on::join(target, source, join_type, &merge.on)?;
    let [file, position] = <[Expr; 2]>::try_from(row_ids(joined.schema())?)
        .map_err(|_| Error::internal("a row has two ids"))?
        .map(Expr::unalias);
    let marked = Expr::Column(Column::new_unqualified(SOURCE));
    let matched = file.clone().is_not_null().and(marked.clone().is_not_null());

    // Kinds exclude each other, and a condition is looked at only for rows of its kind.
    let mut clause: Vec<(Expr, Expr)> = Vec::new();
    for (kind, holds) in [
        (MergeIntoClauseKind::Matched, matched.clone()),
        (MergeIntoClauseKind::NotMatchedByTarget, file.clone().is_null()),
        (MergeIntoClauseKind::NotMatchedBySource, marked.is_null()),
    ] {
        let of_kind = merge.clauses.iter().enumerate().filter(|(_, clause)| clause.kind.canonical() == kind);
        let conditions =
            of_kind.map(|(index, clause)| (clause.predicate.clone().unwrap_or_else(|| lit(true)), lit(index as i32)));
        if let Some(first) = case(conditions.collect(), None)? {
            clause.push((holds, first));
        }
    }
    let clause = case(clause, None)?.ok_or_else(|| Error::invalid("MERGE INTO needs a WHEN clause"))?;
    let mut with_clause: Vec<Expr> = joined.schema().iter().map(column).collect();
    with_clause.push(clause.alias(CLAUSE));
    let clause = || Expr::Column(Column::new_unqualified(CLAUSE));
    let applies = match has(MergeIntoClauseKind::Matched) {
        true => clause().is_not_null().or(matched),
        false => clause().is_not_null(),
    };
    let chosen = LogicalPlanBuilder::from(joined).project(with_clause)?.filter(applies)?.build()?;

    let mut output = Vec::new();
    for field in columns.fields() {
        let mut values = Vec::new();
        for (index, when) in merge.clauses.iter().enumerate() {
            let value = match &when.action {
                MergeIntoAction::Delete => continue,
                MergeIntoAction::Update(assignments) => {
                    let assigned = assignments.iter().find(|(name, _)| name == field.name());
                    assigned.map_or_else(
                        || Expr::Column(Column::new(Some(dml.table_name.clone()), field.name())),
                        |(_, value)| value.clone(),
                    )
                }
                MergeIntoAction::Insert { columns: names, values } => {
                    let place = match names.is_empty() {
                        true => columns.index_of(field.name()).ok(),
                        false => names.iter().position(|name| name == field.name()),
                    };
                    let default = || dml.target.get_column_default(field.name()).cloned();
                    let given = place.and_then(|place| values.get(place)).cloned();
                    given.or_else(default).unwrap_or_else(|| lit(ScalarValue::Null))
                }
            };
            values.push((clause().eq(lit(index as i32)), value.cast_to(field.data_type(), chosen.schema())?));
        }
        let value = match case(values, None)? {
            Some(value) => value,
            None => lit(ScalarValue::try_from(field.data_type())?),
        };
        output.push(value.alias(field.name()));
    }
    let kinds = merge.clauses.iter().enumerate().map(|(index, when)| {
        let kind = match when.action {
            MergeIntoAction::Delete => DELETE,
            MergeIntoAction::Update(_) => UPDATE,
            MergeIntoAction::Insert { .. } => INSERT,
        };
        (clause().eq(lit(index as i32)), lit(kind))
    });
    let kind = case(kinds.collect(), Some(lit(SEEN)))?.unwrap_or_else(|| lit(SEEN));
    output.extend([file.alias(FILE_COLUMN), position.alias(POSITION_COLUMN), kind.alias(KIND)]);
    Ok(LogicalPlan::Projection(Projection::try_new(output, Arc::new(chosen))?))
}

/// `CASE WHEN .. THEN .. END`; `None` without a case.
fn case(cases: Vec<(Expr, Expr)>, otherwise: Option<Expr>) -> Result<Option<Expr>> {
    let mut cases = cases.into_iter();
    let Some((condition, value)) = cases.next() else { return Ok(None) };
    let mut builder = when(condition, value);
    for (condition, value) in cases {
        builder = builder.when(condition, value);
    }
    Ok(Some(match otherwise {
        Some(otherwise) => builder.otherwise(otherwise)?,
        None => builder.end()?,
    }))
}

pub(super) fn has_subquery(expr: &Expr) -> bool {
    let is_subquery = |expr: &Expr| {
        matches!(
            expr,
            Expr::ScalarSubquery(_)
                | Expr::InSubquery(_)
                | Expr::Exists(_)
                | Expr::SetComparison(_)
                | Expr::OuterReferenceColumn(..)
        )
    };
    expr.exists(|expr| Ok(is_subquery(expr))).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_with_subqueries_are_told_apart() {
        assert!(!has_subquery(&lit(1).eq(lit(2))));
        let plan = LogicalPlanBuilder::empty(true).build().unwrap();
        assert!(has_subquery(&lit(true).and(datafusion::logical_expr::exists(Arc::new(plan)))));
        assert_eq!(arrow::datatypes::DataType::Int32, lit(SEEN).get_type(&DFSchema::empty()).unwrap());
    }
}
