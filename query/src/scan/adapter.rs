//! Columns by field id.
//!
//! DataFusion asks for each file how the table's columns are to be found in it. By Iceberg's rules that is by id, not
//! by name or place: a column may have been renamed, widened or added since the file was written.
//! - The file has the id: that column, cast if it was widened since.
//! - The file does not have it: null, for an optional column that never had another value.
//! - Anything else (a default value, an identity partition's constant, a file without ids, a nested column of another
//!   shape) is refused by name until it can be read correctly.
//!
//! A float column that may hold NaN is wrapped in [`Opaque`], which passes values through and which pruning cannot
//! look into.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::common::{Result as DfResult, ScalarValue};
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{CastExpr, Column, lit};
use datafusion::physical_expr_adapter::{PhysicalExprAdapter, PhysicalExprAdapterFactory};
use iceberg::spec::{ManifestEntryRef, Transform};

use super::values::{is_float, is_nan_free};
use crate::error::Error;
use crate::table::Table;
use crate::table::types::field_id;

/// Makes the adapters of one scan.
#[derive(Debug)]
pub struct FieldIdAdapterFactory {
    rules: Arc<Rules>,
}

#[derive(Debug)]
struct Rules {
    table: String,
    /// Columns which a file may lack although they are not null there, with the reason.
    not_null_when_missing: HashMap<i32, &'static str>,
    /// Float columns that hold NaN in some file, for all that is known.
    maybe_nan: HashSet<i32>,
}

impl FieldIdAdapterFactory {
    pub fn new(table: &Table, schema: &Schema, files: &[ManifestEntryRef]) -> Self {
        let mut not_null_when_missing = HashMap::new();
        for field in table.metadata.current_schema().as_struct().fields() {
            if field.initial_default.is_some() {
                not_null_when_missing.insert(field.id, "it has a default value for older rows");
            } else if field.required {
                not_null_when_missing.insert(field.id, "it may not be null");
            }
        }
        for spec in table.metadata.partition_specs_iter() {
            for field in spec.fields().iter().filter(|field| field.transform == Transform::Identity) {
                not_null_when_missing.insert(field.source_id, "its value is kept in the partition");
            }
        }
        let floats = schema.fields().iter().filter(|field| is_float(field.data_type())).filter_map(|f| field_id(f));
        let maybe_nan = floats.filter(|id| !files.iter().all(|entry| is_nan_free(entry.data_file(), *id))).collect();
        let rules = Rules { table: table.ident.to_string(), not_null_when_missing, maybe_nan };
        Self { rules: Arc::new(rules) }
    }
}

impl PhysicalExprAdapterFactory for FieldIdAdapterFactory {
    fn create(&self, logical: SchemaRef, physical: SchemaRef) -> DfResult<Arc<dyn PhysicalExprAdapter>> {
        let by_id: HashMap<i32, usize> =
            physical.fields().iter().enumerate().filter_map(|(i, field)| Some((field_id(field)?, i))).collect();
        if by_id.is_empty() {
            return Err(self.rules.refused("a data file has no field ids").into_datafusion());
        }
        Ok(Arc::new(FieldIdAdapter { rules: self.rules.clone(), logical, physical, by_id }))
    }
}

impl Rules {
    fn refused(&self, what: impl fmt::Display) -> Error {
        Error::not_supported(format!("table {} cannot be read yet: {what}", self.table))
    }
}

#[derive(Debug)]
struct FieldIdAdapter {
    rules: Arc<Rules>,
    logical: SchemaRef,
    physical: SchemaRef,
    by_id: HashMap<i32, usize>,
}

impl PhysicalExprAdapter for FieldIdAdapter {
    fn rewrite(&self, expr: Arc<dyn PhysicalExpr>) -> DfResult<Arc<dyn PhysicalExpr>> {
        expr.transform_up(|expr| match expr.downcast_ref::<Column>() {
            Some(column) => Ok(Transformed::yes(self.column(column)?)),
            None => Ok(Transformed::no(expr)),
        })
        .data()
    }
}

impl FieldIdAdapter {
    fn column(&self, column: &Column) -> DfResult<Arc<dyn PhysicalExpr>> {
        let wanted = self.logical.field_with_name(column.name())?;
        let id = field_id(wanted)
            .ok_or_else(|| Error::internal(format!("column {} has no field id", column.name())).into_datafusion())?;
        let Some(&index) = self.by_id.get(&id) else {
            return match self.rules.not_null_when_missing.get(&id) {
                Some(why) => {
                    let what = format!("a data file lacks column {}, and {why}", column.name());
                    Err(self.rules.refused(what).into_datafusion())
                }
                None => Ok(lit(ScalarValue::try_from(wanted.data_type())?)),
            };
        };
        let stored = self.physical.field(index);
        let found: Arc<dyn PhysicalExpr> = Arc::new(Column::new(stored.name(), index));
        let found: Arc<dyn PhysicalExpr> = match stored.data_type() == wanted.data_type() {
            true => found,
            false => {
                if !is_same_shape(stored, wanted) {
                    let what = format!(
                        "column {} is {} in a data file and {} in the table",
                        column.name(),
                        stored.data_type(),
                        wanted.data_type()
                    );
                    return Err(self.rules.refused(what).into_datafusion());
                }
                Arc::new(CastExpr::new(found, wanted.data_type().clone(), None))
            }
        };
        match self.rules.maybe_nan.contains(&id) {
            true => Ok(Arc::new(Opaque { inner: found })),
            false => Ok(found),
        }
    }
}

/// Whether a cast by place turns `stored` into `wanted`: for a nested column only if every part has the same id.
fn is_same_shape(stored: &Field, wanted: &Field) -> bool {
    match (stored.data_type(), wanted.data_type()) {
        (DataType::Struct(stored), DataType::Struct(wanted)) => {
            stored.len() == wanted.len()
                && stored
                    .iter()
                    .zip(wanted)
                    .all(|(s, w)| field_id(s) == field_id(w) && s.name() == w.name() && is_same_shape(s, w))
        }
        (DataType::List(s) | DataType::LargeList(s), DataType::List(w)) => {
            field_id(s) == field_id(w) && is_same_shape(s, w)
        }
        (DataType::Map(s, _), DataType::Map(w, _)) => is_same_shape(s, w),
        (stored, wanted) => !stored.is_nested() && !wanted.is_nested() && widens(stored, wanted),
    }
}

/// The promotions of Iceberg, and other names for the same values.
fn widens(stored: &DataType, wanted: &DataType) -> bool {
    use DataType::*;
    match (stored, wanted) {
        (s, w) if s == w => true,
        (Int32, Int64) | (Float32, Float64) => true,
        (Decimal128(p, s), Decimal128(q, t)) => s == t && p <= q,
        (Utf8 | LargeUtf8 | Utf8View, Utf8 | LargeUtf8 | Utf8View) => true,
        (Binary | LargeBinary | BinaryView, Binary | LargeBinary | BinaryView) => true,
        (Timestamp(s, Some(_)), Timestamp(w, Some(_))) => s == w,
        _ => false,
    }
}

/// An expression that pruning cannot look into.
#[derive(Debug, Clone)]
struct Opaque {
    inner: Arc<dyn PhysicalExpr>,
}

impl PartialEq for Opaque {
    fn eq(&self, other: &Self) -> bool {
        self.inner.eq(&other.inner)
    }
}

impl Eq for Opaque {}

impl Hash for Opaque {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.hash(state);
    }
}

impl fmt::Display for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "maybe_nan({})", self.inner)
    }
}

impl PhysicalExpr for Opaque {
    fn data_type(&self, schema: &Schema) -> DfResult<DataType> {
        self.inner.data_type(schema)
    }

    fn nullable(&self, schema: &Schema) -> DfResult<bool> {
        self.inner.nullable(schema)
    }

    fn evaluate(&self, batch: &RecordBatch) -> DfResult<ColumnarValue> {
        self.inner.evaluate(batch)
    }

    fn children(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        vec![&self.inner]
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn PhysicalExpr>>) -> DfResult<Arc<dyn PhysicalExpr>> {
        match children.into_iter().next() {
            Some(inner) => Ok(Arc::new(Opaque { inner })),
            None => Ok(self),
        }
    }

    fn fmt_sql(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt_sql(f)
    }
}
