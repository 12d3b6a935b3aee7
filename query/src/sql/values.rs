//! Literals of nested types in `INSERT ... VALUES`.
//!
//! DataFusion gives VALUES the types of the table's columns, and those of lists, structs and maps carry field ids. On their way
//! through constants the ids of some parts get lost, and then the rows are refused for having other types than they should. So
//! VALUES have these types without ids; the writer gives the table's to what it writes. Where a column is NOT NULL the writer
//! names it, and DataFusion would name a number: there VALUES may be null.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Fields};
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{DFSchema, Result as DfResult, ScalarValue};
use datafusion::logical_expr::{Cast, Expr, ExprSchemable, LogicalPlan, Projection, Values};

use crate::error::Result;

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
