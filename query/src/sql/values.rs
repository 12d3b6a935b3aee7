//! VALUES in an INSERT, and in a CREATE TABLE that names its columns.
//!
//! DataFusion gives VALUES the types of the table's columns, wherever in the statement they are. For those that are the rows that is well;
//! those within a query may be compared or computed with before, and be other columns: such a query is planned by itself ([`plan`]).
//!
//! The types of lists, structs and maps carry field ids. On their way
//! through constants the ids of some parts get lost, and then the rows are refused for having other types than they should. So
//! VALUES have these types without ids; the writer gives the table's to what it writes. Where a column is NOT NULL the writer
//! names it, and DataFusion would name a number: there VALUES may be null.
//!
//! Where the values of a column differ in type, DataFusion casts them to one that they have in common, which may have to be another one
//! ([`super::floats`]). Casts that the statement itself has, and those to a table's columns, are written twice: these are to stay.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Fields};
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{Column, DFSchema, DataFusionError, Result as DfResult, ScalarValue};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{
    Cast, CreateMemoryTable, DdlStatement, DmlStatement, Expr, ExprSchemable, LogicalPlan, Projection, Values, cast,
};
use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{
    CastKind, DataType as WrittenType, Expr as Written, Query, SetExpr, Statement, Visit, Visitor, VisitorMut,
};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::parser::Parser;

use super::bound::visit;
use crate::error::Result;

/// The plan of a statement.
pub async fn plan(state: &SessionState, mut statement: Parsed) -> DfResult<LogicalPlan> {
    keep_casts(&mut statement);
    let typed = is_typed(&statement);
    let Some(place) = query_with_values(&mut statement) else {
        let plan = state.statement_to_plan(statement).await?;
        return match typed {
            true => with_kept_types(plan),
            false => Ok(plan),
        };
    };
    let query = Statement::Query(place.clone());
    let query = state.statement_to_plan(Parsed::Statement(Box::new(query))).await?;
    // What becomes of the columns of any query is the same.
    let nulls: Vec<String> = (0..query.schema().fields().len()).map(|i| format!("NULL AS c{i}")).collect();
    let nulls = format!("SELECT {}", nulls.join(", "));
    *place = Parser::new(&GenericDialect {}).try_with_sql(&nulls)?.parse_query()?;
    match state.statement_to_plan(statement).await? {
        LogicalPlan::Dml(DmlStatement { table_name, target, op, input, .. }) => {
            let rows = rows(&input, query, target.schema().fields(), false)?;
            Ok(LogicalPlan::Dml(DmlStatement::new(table_name, target, op, Arc::new(rows))))
        }
        LogicalPlan::Ddl(DdlStatement::CreateMemoryTable(create)) => {
            let input = Arc::new(rows(&create.input, query, create.input.schema().fields(), true)?);
            Ok(LogicalPlan::Ddl(DdlStatement::CreateMemoryTable(CreateMemoryTable { input, ..create })))
        }
        _ => Err(planned_otherwise()),
    }
}

/// Writes each cast to a decimal that is a value of VALUES twice.
pub fn keep_casts(statement: &mut Parsed) {
    visit(statement, &mut Casts);
}

struct Casts;

impl VisitorMut for Casts {
    type Break = ();

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<()> {
        keep_casts_of(&mut query.body);
        ControlFlow::Continue(())
    }
}

fn keep_casts_of(body: &mut SetExpr) {
    match body {
        SetExpr::Values(values) => {
            for value in values.rows.iter_mut().flat_map(|row| row.content.iter_mut()) {
                let mut written = &*value;
                while let Written::Nested(within) = written {
                    written = within;
                }
                if let Written::Cast { kind: CastKind::Cast | CastKind::DoubleColon, data_type, .. } = written
                    && let WrittenType::Decimal(_) | WrittenType::Numeric(_) | WrittenType::Dec(_) = data_type
                {
                    let (data_type, expr) = (data_type.clone(), Box::new(written.clone()));
                    *value = Written::Cast { kind: CastKind::Cast, expr, data_type, array: false, format: None };
                }
            }
        }
        SetExpr::SetOperation { left, right, .. } => {
            keep_casts_of(left);
            keep_casts_of(right);
        }
        _ => {}
    }
}

/// Whether VALUES in this statement get the types of a table's columns.
fn is_typed(statement: &Parsed) -> bool {
    let Parsed::Statement(statement) = statement else { return false };
    match statement.as_ref() {
        Statement::Insert(_) => true,
        Statement::CreateTable(create) => !create.columns.is_empty(),
        _ => false,
    }
}

fn with_kept_types(plan: LogicalPlan) -> DfResult<LogicalPlan> {
    let plan = plan.transform_up(|node| {
        let LogicalPlan::Values(mut values) = node else { return Ok(Transformed::no(node)) };
        for value in values.values.iter_mut().flatten() {
            let to = match value {
                Expr::Cast(cast) if cast.field.data_type().is_decimal() => cast.field.data_type().clone(),
                _ => continue,
            };
            *value = cast(std::mem::take(value), to);
        }
        Ok(Transformed::yes(LogicalPlan::Values(values)))
    })?;
    Ok(plan.data)
}

fn planned_otherwise() -> DataFusionError {
    DataFusionError::Internal("a statement with a query was planned as something else".to_owned())
}

/// What a query returns as these columns, in the way that `of_nulls` has it for one that returns as many. `always`: each with a cast,
/// without which a new column would have the type of what is written out, and not the one that it was given.
fn rows(of_nulls: &LogicalPlan, query: LogicalPlan, fields: &Fields, always: bool) -> DfResult<LogicalPlan> {
    let LogicalPlan::Projection(Projection { expr, input, .. }) = of_nulls else { return Err(planned_otherwise()) };
    let mut columns = Vec::with_capacity(expr.len());
    for (expr, field) in expr.iter().zip(fields) {
        columns.push(match inserted(expr) {
            Some(column) => {
                let place = input.schema().index_of_column(column)?;
                let column = Expr::Column(Column::from(query.schema().qualified_field(place)));
                let column = match column.cast_to(field.data_type(), query.schema())? {
                    same @ Expr::Column(_) if always => cast(same, field.data_type().clone()),
                    other => other,
                };
                column.alias(field.name())
            }
            None => expr.clone(),
        });
    }
    Ok(LogicalPlan::Projection(Projection::try_new(columns, Arc::new(query))?))
}

/// The query of an INSERT, or of a CREATE TABLE that names its columns, if it has VALUES within.
fn query_with_values(statement: &mut Parsed) -> Option<&mut Box<Query>> {
    let Parsed::Statement(statement) = statement else { return None };
    let query = match statement.as_mut() {
        Statement::Insert(insert) => insert.source.as_mut()?,
        Statement::CreateTable(create) if !create.columns.is_empty() => create.query.as_mut()?,
        _ => return None,
    };
    let within = !matches!(query.body.as_ref(), SetExpr::Values(_)) && query.visit(&mut Within).is_break();
    within.then_some(query)
}

/// The column that is inserted, if it is no default.
fn inserted(expr: &Expr) -> Option<&Column> {
    match expr {
        Expr::Alias(alias) => inserted(&alias.expr),
        Expr::Cast(cast) => inserted(&cast.expr),
        Expr::Column(column) => Some(column),
        _ => None,
    }
}

/// Breaks at VALUES.
struct Within;

impl Visitor for Within {
    type Break = ();

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        match has_values(&query.body) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

fn has_values(body: &SetExpr) -> bool {
    match body {
        SetExpr::Values(_) => true,
        SetExpr::SetOperation { left, right, .. } => has_values(left) || has_values(right),
        _ => false,
    }
}

/// The plan with VALUES whose nested types have no ids.
pub fn without_ids(plan: LogicalPlan) -> Result<LogicalPlan> {
    let insert = matches!(plan, LogicalPlan::Dml(_));
    let to_change = |field: &Field| has_ids(field) || (insert && !field.is_nullable());
    let mut changed = false;
    let plan = plan.transform_up(|node| match node {
        LogicalPlan::Values(values) if values.schema.fields().iter().any(|field| to_change(field)) => {
            changed = true;
            Ok(Transformed::yes(LogicalPlan::Values(plain(values)?)))
        }
        LogicalPlan::Projection(projection) if changed => {
            let projection = Projection::try_new(projection.expr, projection.input)?;
            Ok(Transformed::yes(LogicalPlan::Projection(projection)))
        }
        node => Ok(Transformed::no(node)),
    })?;
    Ok(plan.data)
}

fn plain(values: Values) -> DfResult<Values> {
    let plain_field = |field: &FieldRef| {
        let data_type = plain_type(field.data_type());
        Arc::new(field.as_ref().clone().with_data_type(data_type).with_nullable(true))
    };
    let fields = values.schema.iter().map(|(qualifier, field)| (qualifier.cloned(), plain_field(field))).collect();
    let schema = DFSchema::new_with_metadata(fields, HashMap::new())?;
    let mut rows = values.values;
    for row in &mut rows {
        for (expr, field) in row.iter_mut().zip(schema.fields()) {
            if !field.data_type().is_nested() {
                continue;
            }
            let value = match std::mem::take(expr) {
                Expr::Cast(Cast { expr, .. }) => *expr,
                other => other,
            };
            *expr = match value {
                Expr::Literal(null, metadata) if null.is_null() => {
                    Expr::Literal(ScalarValue::try_from(field.data_type())?, metadata)
                }
                value => value.cast_to(field.data_type(), &DFSchema::empty())?,
            };
        }
    }
    Ok(Values { schema: Arc::new(schema), values: rows })
}

fn has_ids(field: &Field) -> bool {
    plain_type(field.data_type()) != *field.data_type()
}

fn plain_type(data_type: &DataType) -> DataType {
    let part = |field: &FieldRef| -> FieldRef {
        let data_type = plain_type(field.data_type());
        Arc::new(Field::new(field.name(), data_type, field.is_nullable()))
    };
    match data_type {
        DataType::Struct(parts) => DataType::Struct(parts.iter().map(part).collect::<Fields>()),
        DataType::List(element) => DataType::List(part(element)),
        DataType::Map(entries, sorted) => DataType::Map(part(entries), *sorted),
        other => other.clone(),
    }
}
