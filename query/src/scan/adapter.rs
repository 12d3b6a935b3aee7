//! Columns by field id.
//!
//! DataFusion asks for each file how the table's columns are to be found in it. By Iceberg's rules that is by id, not
//! by name or place: a column may have been renamed, moved, widened or added since the file was written. The same holds
//! for the parts of nested columns ([`ByIds`]).
//! - The file has the id: that column, cast if it was widened since.
//! - The file does not have it: the constant of an identity partition, then the column's initial default, then null.
//! - A file without any ids: they are those that the table's name mapping (`schema.name-mapping.default`) gives to its
//!   names; without a mapping it is refused.
//!
//! A part that a query takes out of a nested column is taken out of what the file has ([`part_read`]), so that DataFusion's reader
//! decodes no other part, also of files that are older than what the column is now.
//!
//! What cannot be read correctly is refused by name. A float column that may hold NaN is wrapped in [`Opaque`], which
//! passes values through and which pruning cannot look into.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, ListArray, MapArray, RecordBatch, StructArray, new_null_array,
};
use arrow::buffer::NullBuffer;
use arrow::compute::{CastOptions, cast_with_options, nullif};
use arrow::datatypes::{DataType, Field, FieldRef, Fields, Schema, SchemaRef, TimeUnit};
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::common::{Result as DfResult, ScalarValue};
use datafusion::functions::core::getfield::GetFieldFunc;
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::expressions::{CastExpr, Column, Literal as Constant, lit};
use datafusion::physical_expr::{PhysicalExpr, ScalarFunctionExpr};
use datafusion::physical_expr_adapter::{PhysicalExprAdapter, PhysicalExprAdapterFactory};
use iceberg::spec::{Literal, MappedField, NameMapping, NestedField, Transform, Type};
use parquet::arrow::RowNumber;

use super::plan::PlannedFile;
use super::values::{is_float, is_nan_free, literal_scalar};
use crate::error::{Error, Result};
use crate::table::Table;
use crate::table::types::{FIELD_ID, field_id};

/// The property with the ids that names have in files without ids.
pub const NAME_MAPPING: &str = "schema.name-mapping.default";
/// Names of the parts of lists and maps in a name mapping.
const ELEMENT: &str = "element";
const KEY: &str = "key";
const VALUE: &str = "value";

/// How the columns of a scan are found in its files.
#[derive(Debug)]
pub struct Rules {
    pub(super) table: String,
    /// What rows hold that are older than a column, by id; also of parts of nested columns.
    pub(super) defaults: HashMap<i32, ScalarValue>,
    /// Columns, and parts of them, that may not be null.
    pub(super) required: HashSet<i32>,
    /// What tables have been partitioned by as it is: of files without it the partition has it.
    pub(super) partitioned_by: HashSet<i32>,
    pub(super) names: Option<NameMapping>,
    /// Float columns that hold NaN in some file, for all that is known.
    pub(super) maybe_nan: HashSet<i32>,
}

impl Rules {
    /// # Errors
    /// `Corrupt` for a name mapping that is none, `NotSupported` for a default value that lake cannot read.
    pub fn new(table: &Table, schema: &iceberg::spec::Schema, arrow: &Schema, files: &[PlannedFile]) -> Result<Self> {
        let floats = arrow.fields().iter().filter(|field| is_float(field.data_type())).filter_map(|f| field_id(f));
        let maybe_nan = floats.filter(|id| !files.iter().all(|file| is_nan_free(file.data_file(), *id))).collect();
        let names = match table.metadata.properties().get(NAME_MAPPING) {
            Some(json) => Some(serde_json::from_str(json).map_err(|e| {
                Error::corrupt(format!("table {}: its property {NAME_MAPPING} is no name mapping: {e}", table.ident))
            })?),
            None => None,
        };
        let partition_fields = table.metadata.partition_specs_iter().flat_map(|spec| spec.fields());
        let identity = partition_fields.filter(|field| field.transform == Transform::Identity);
        let mut rules = Self {
            table: table.ident.to_string(),
            defaults: HashMap::new(),
            required: HashSet::new(),
            partitioned_by: identity.map(|field| field.source_id).collect(),
            names,
            maybe_nan,
        };
        for (field, arrow) in schema.as_struct().fields().iter().zip(arrow.fields()) {
            rules.add(field, arrow)?;
        }
        Ok(rules)
    }

    fn add(&mut self, field: &NestedField, arrow: &Field) -> Result<()> {
        if field.required {
            self.required.insert(field.id);
        }
        if let Some(default) = &field.initial_default {
            let value = match default {
                Literal::Primitive(literal) => literal_scalar(literal, arrow.data_type()),
                _ => None,
            };
            let value =
                value.ok_or_else(|| self.refused(format_args!("the default value of {} is not read", field.name)))?;
            self.defaults.insert(field.id, value);
        }
        let parts: Vec<&NestedField> = match field.field_type.as_ref() {
            Type::Primitive(_) => return Ok(()),
            Type::Struct(fields) => fields.fields().iter().map(AsRef::as_ref).collect(),
            Type::List(list) => vec![&list.element_field],
            Type::Map(map) => vec![&map.key_field, &map.value_field],
        };
        parts.into_iter().zip(parts_of(arrow.data_type())).try_for_each(|(part, arrow)| self.add(part, arrow))
    }

    /// The adapter of files whose rows have these constants, by id.
    pub fn for_files(self: &Arc<Self>, constants: Arc<HashMap<i32, ScalarValue>>) -> FieldIdAdapterFactory {
        FieldIdAdapterFactory { rules: self.clone(), constants }
    }

    /// The columns of a file of these columns, with ids, if the table's can be read from it.
    ///
    /// # Errors
    /// As reading the file would fail.
    pub fn check_file(
        self: &Arc<Self>,
        logical: SchemaRef,
        physical: SchemaRef,
        constants: HashMap<i32, ScalarValue>,
    ) -> Result<Fields> {
        let adapter = self.for_files(Arc::new(constants)).adapter(logical.clone(), physical)?;
        for (place, column) in logical.fields().iter().enumerate() {
            adapter.column(&Column::new(column.name(), place))?;
        }
        Ok(adapter.stored)
    }

    fn refused(&self, what: impl fmt::Display) -> Error {
        Error::not_supported(format!("table {} cannot be read: {what}", self.table))
    }

    /// What a column, or a part of one, is where a file does not have it.
    fn missing(&self, wanted: &Field, id: i32) -> Result<ScalarValue> {
        if let Some(default) = self.defaults.get(&id) {
            return Ok(default.clone());
        }
        if self.required.contains(&id) {
            return Err(Error::corrupt(format!(
                "table {}: a data file lacks column {}, which may not be null",
                self.table,
                wanted.name()
            )));
        }
        Ok(ScalarValue::try_from(wanted.data_type())?)
    }

    fn check_missing_part(&self, wanted: &Field) -> Result<()> {
        let id = field_id(wanted).ok_or_else(|| Error::internal("a column's part has no field id"))?;
        if self.partitioned_by.contains(&id) {
            let name = wanted.name();
            return Err(self.refused(format_args!("a data file lacks {name}, whose value is kept in the partition")));
        }
        self.missing(wanted, id).map(drop)
    }
}

/// What a nested type consists of.
pub fn parts_of(data_type: &DataType) -> Vec<&FieldRef> {
    match data_type {
        DataType::Struct(fields) => fields.iter().collect(),
        DataType::Map(entries, _) => parts_of(entries.data_type()),
        DataType::List(element)
        | DataType::LargeList(element)
        | DataType::ListView(element)
        | DataType::LargeListView(element)
        | DataType::FixedSizeList(element, _) => vec![element],
        _ => Vec::new(),
    }
}

/// Makes the adapters of files with the same constants.
#[derive(Debug)]
pub struct FieldIdAdapterFactory {
    rules: Arc<Rules>,
    constants: Arc<HashMap<i32, ScalarValue>>,
}

impl PhysicalExprAdapterFactory for FieldIdAdapterFactory {
    fn create(&self, logical: SchemaRef, physical: SchemaRef) -> DfResult<Arc<dyn PhysicalExprAdapter>> {
        Ok(Arc::new(self.adapter(logical, physical).map_err(Error::into_datafusion)?))
    }
}

impl FieldIdAdapterFactory {
    fn adapter(&self, logical: SchemaRef, physical: SchemaRef) -> Result<FieldIdAdapter> {
        let stored = match physical.fields().iter().any(has_ids) {
            true => physical.fields().clone(),
            false => {
                let Some(names) = &self.rules.names else {
                    let what = format!("a data file has no field ids, and the table has no {NAME_MAPPING}");
                    return Err(self.rules.refused(what));
                };
                let mapped = |field: &FieldRef| {
                    let mapping = names.fields().iter().find(|mapping| mapping.names().contains(field.name()));
                    mapping.map_or_else(|| field.clone(), |mapping| with_ids(field, mapping))
                };
                physical.fields().iter().map(mapped).collect()
            }
        };
        let by_id = stored.iter().enumerate().filter_map(|(i, field)| Some((field_id(field)?, i))).collect();
        let (rules, constants) = (self.rules.clone(), self.constants.clone());
        Ok(FieldIdAdapter { rules, constants, logical, stored, by_id })
    }
}

/// Whether it, or a part of it, has an id: then all of its file is read by ids.
pub fn has_ids(field: &FieldRef) -> bool {
    field_id(field).is_some() || parts_of(field.data_type()).into_iter().any(has_ids)
}

/// The field with the ids that the mapping gives to it and its parts.
fn with_ids(field: &Field, mapping: &MappedField) -> FieldRef {
    let part = |part: &FieldRef, name: &str| -> FieldRef {
        let named = |mapping: &&Arc<MappedField>| mapping.names().iter().any(|n| n == name);
        mapping.fields().iter().find(named).map_or_else(|| part.clone(), |mapping| with_ids(part, mapping))
    };
    let element = |field: &FieldRef| part(field, ELEMENT);
    let data_type = match field.data_type() {
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(|field| part(field, field.name())).collect()),
        DataType::List(field) => DataType::List(element(field)),
        DataType::LargeList(field) => DataType::LargeList(element(field)),
        DataType::ListView(field) => DataType::ListView(element(field)),
        DataType::LargeListView(field) => DataType::LargeListView(element(field)),
        DataType::FixedSizeList(field, size) => DataType::FixedSizeList(element(field), *size),
        DataType::Map(entries, sorted) => match entries.data_type() {
            DataType::Struct(fields) if fields.len() == 2 => {
                let fields = [part(&fields[0], KEY), part(&fields[1], VALUE)];
                let entries = entries.as_ref().clone().with_data_type(DataType::Struct(fields.into_iter().collect()));
                DataType::Map(Arc::new(entries), *sorted)
            }
            _ => field.data_type().clone(),
        },
        other => other.clone(),
    };
    let mut field = field.clone().with_data_type(data_type);
    if let Some(id) = mapping.field_id() {
        field.metadata_mut().insert(FIELD_ID.to_owned(), id.to_string());
    }
    Arc::new(field)
}

#[derive(Debug)]
struct FieldIdAdapter {
    rules: Arc<Rules>,
    constants: Arc<HashMap<i32, ScalarValue>>,
    logical: SchemaRef,
    /// The file's columns, with ids.
    stored: Fields,
    by_id: HashMap<i32, usize>,
}

impl PhysicalExprAdapter for FieldIdAdapter {
    fn rewrite(&self, expr: Arc<dyn PhysicalExpr>) -> DfResult<Arc<dyn PhysicalExpr>> {
        expr.transform_up(|expr| {
            if let Some(column) = expr.downcast_ref::<Column>() {
                return Ok(Transformed::yes(self.column(column).map_err(Error::into_datafusion)?));
            }
            Ok(match part_read(&expr) {
                Some(part) => Transformed::yes(part),
                None => Transformed::no(expr),
            })
        })
        .data()
    }
}

impl FieldIdAdapter {
    fn column(&self, column: &Column) -> Result<Arc<dyn PhysicalExpr>> {
        let wanted = self.logical.field_with_name(column.name()).map_err(Error::internal)?;
        if wanted.has_valid_extension_type::<RowNumber>() {
            // The reader makes it, under the same name.
            let place = self.stored.iter().rposition(|field| field.name() == wanted.name());
            let place = place.ok_or_else(|| Error::internal("row numbers were not asked of the reader"))?;
            return Ok(Arc::new(Column::new(wanted.name(), place)));
        }
        let id =
            field_id(wanted).ok_or_else(|| Error::internal(format!("column {} has no field id", column.name())))?;
        let Some(&index) = self.by_id.get(&id) else {
            return Ok(lit(match self.constants.get(&id) {
                Some(constant) => constant.clone(),
                None => self.rules.missing(wanted, id)?,
            }));
        };
        let stored = &self.stored[index];
        let found: Arc<dyn PhysicalExpr> = Arc::new(Column::new(stored.name(), index));
        let found: Arc<dyn PhysicalExpr> = if stored.data_type() == wanted.data_type() {
            found
        } else if wanted.data_type().is_nested() {
            let to = Arc::new(wanted.clone());
            let by_ids = ByIds { rules: self.rules.clone(), child: found, from: stored.clone(), to };
            by_ids.check(stored, wanted)?;
            Arc::new(by_ids)
        } else {
            if !widens(stored.data_type(), wanted.data_type()) {
                return Err(self.rules.refused(unlike(stored, wanted)));
            }
            Arc::new(CastExpr::new(found, wanted.data_type().clone(), None))
        };
        match self.rules.maybe_nan.contains(&id) {
            true => Ok(Arc::new(Opaque { inner: found })),
            false => Ok(found),
        }
    }
}

/// A part of a nested column as that part of what the file has. `None` for what is no such expression, for a part that is not there, and
/// for one that is itself nested: for that the reader decodes the whole column in any case.
fn part_read(expr: &Arc<dyn PhysicalExpr>) -> Option<Arc<dyn PhysicalExpr>> {
    let taken = ScalarFunctionExpr::try_downcast_func::<GetFieldFunc>(expr.as_ref())?;
    let (of, names) = taken.args().split_first()?;
    let by_ids = of.downcast_ref::<ByIds>()?;
    let (mut stored, mut wanted) = (&by_ids.from, &by_ids.to);
    let mut args = vec![by_ids.child.clone()];
    for name in names {
        let name = name.downcast_ref::<Constant>()?.value().try_as_str().flatten()?;
        let (DataType::Struct(parts), DataType::Struct(wanted_parts)) = (stored.data_type(), wanted.data_type()) else {
            return None;
        };
        wanted = wanted_parts.iter().find(|part| part.name() == name)?;
        stored = parts.get(part_with_id(parts, wanted)?)?;
        // It is taken by its name.
        if parts.iter().filter(|part| part.name() == stored.name()).count() > 1 {
            return None;
        }
        args.push(lit(stored.name().as_str()));
    }
    if wanted.data_type().is_nested() {
        return None;
    }
    let field = Arc::new(stored.as_ref().clone().with_nullable(true));
    let (get, options) = (Arc::new(taken.fun().clone()), Arc::new(taken.config_options().clone()));
    let part: Arc<dyn PhysicalExpr> = Arc::new(ScalarFunctionExpr::new(taken.name(), get, args, field, options));
    Some(match stored.data_type() == wanted.data_type() {
        true => part,
        false => Arc::new(CastExpr::new(part, wanted.data_type().clone(), None)),
    })
}

fn unlike(stored: &Field, wanted: &Field) -> String {
    let (name, stored, wanted) = (wanted.name(), stored.data_type(), wanted.data_type());
    format!("column {name} is {stored} in a data file and {wanted} in the table")
}

/// The promotions of Iceberg, and other ways to write the same values.
fn widens(stored: &DataType, wanted: &DataType) -> bool {
    use DataType::*;
    use TimeUnit::{Microsecond, Millisecond, Nanosecond};
    match (stored, wanted) {
        (s, w) if s == w => true,
        (Dictionary(_, values), w) => widens(values, w),
        (Int8 | Int16 | UInt8 | UInt16 | Int32, Int32 | Int64) | (UInt32, Int64) => true,
        (Float16 | Float32, Float32 | Float64) => true,
        (Decimal32(p, s) | Decimal64(p, s) | Decimal128(p, s), Decimal128(q, t)) => s == t && p <= q,
        (Utf8 | LargeUtf8 | Utf8View, Utf8 | LargeUtf8 | Utf8View) => true,
        (Binary | LargeBinary | BinaryView, Binary | LargeBinary | BinaryView) => true,
        (Time32(_), Time64(Microsecond)) => true,
        (Date32, Timestamp(_, None)) => true,
        (Timestamp(Millisecond | Microsecond, Some(_)), Timestamp(Microsecond | Nanosecond, Some(_))) => true,
        (Timestamp(Millisecond | Microsecond, None), Timestamp(Microsecond | Nanosecond, None)) => true,
        (Timestamp(Nanosecond, Some(_)), Timestamp(Nanosecond, Some(_))) => true,
        _ => false,
    }
}

/// A nested column in the shape that the table has today.
#[derive(Debug, Clone)]
struct ByIds {
    rules: Arc<Rules>,
    child: Arc<dyn PhysicalExpr>,
    from: FieldRef,
    to: FieldRef,
}

impl ByIds {
    /// Whether `stored` can be read as `wanted`, before anything is.
    fn check(&self, stored: &Field, wanted: &Field) -> Result<()> {
        use DataType::*;
        match (stored.data_type(), wanted.data_type()) {
            (Struct(stored), Struct(wanted)) => {
                wanted.iter().try_for_each(|wanted| match part_with_id(stored, wanted) {
                    Some(index) => self.check(&stored[index], wanted),
                    None => self.rules.check_missing_part(wanted),
                })
            }
            (List(s) | LargeList(s) | ListView(s) | LargeListView(s) | FixedSizeList(s, _), List(w)) => {
                self.check(s, w)
            }
            (Map(s, _), Map(w, _)) => match (s.data_type(), w.data_type()) {
                (Struct(s), Struct(w)) if s.len() == 2 && w.len() == 2 => {
                    self.check(&s[0], &w[0])?;
                    self.check(&s[1], &w[1])
                }
                _ => Err(self.rules.refused(unlike(stored, wanted))),
            },
            (s, w) if !s.is_nested() && !w.is_nested() && widens(s, w) => Ok(()),
            _ => Err(self.rules.refused(unlike(stored, wanted))),
        }
    }

    fn convert(&self, array: &ArrayRef, stored: &Field, wanted: &Field) -> DfResult<ArrayRef> {
        use DataType::*;
        let strict = CastOptions { safe: false, ..CastOptions::default() };
        Ok(match (stored.data_type(), wanted.data_type()) {
            (s, w) if s == w => array.clone(),
            (Struct(stored), Struct(wanted)) => {
                let array = array.as_struct();
                let part = |wanted: &FieldRef| match part_with_id(stored, wanted) {
                    Some(index) => self.convert(array.column(index), &stored[index], wanted),
                    None => match field_id(wanted).and_then(|id| self.rules.defaults.get(&id)) {
                        Some(default) => within(&default.to_array_of_size(array.len())?, array.nulls()),
                        None => Ok(new_null_array(wanted.data_type(), array.len())),
                    },
                };
                let parts = wanted.iter().map(part).collect::<DfResult<Vec<_>>>()?;
                let nulls = array.nulls().cloned();
                Arc::new(StructArray::try_new_with_length(wanted.clone(), parts, nulls, array.len())?)
            }
            (List(s), List(w)) => {
                let array = array.as_list::<i32>();
                let values = self.convert(array.values(), s, w)?;
                Arc::new(ListArray::try_new(w.clone(), array.offsets().clone(), values, array.nulls().cloned())?)
            }
            (LargeList(s) | ListView(s) | LargeListView(s) | FixedSizeList(s, _), List(_)) => {
                let list = Field::new(stored.name(), List(s.clone()), true);
                self.convert(&cast_with_options(array, list.data_type(), &strict)?, &list, wanted)?
            }
            (Map(s, _), Map(w, sorted)) => {
                let array = array.as_map();
                let (Struct(s), Struct(parts)) = (s.data_type(), w.data_type()) else {
                    return Err(self.rules.refused(unlike(stored, wanted)).into_datafusion());
                };
                let entries = array.entries();
                let columns = [0, 1].map(|i| self.convert(entries.column(i), &s[i], &parts[i]));
                let columns = columns.into_iter().collect::<DfResult<Vec<_>>>()?;
                let entries = StructArray::try_new(parts.clone(), columns, entries.nulls().cloned())?;
                let (offsets, nulls) = (array.offsets().clone(), array.nulls().cloned());
                Arc::new(MapArray::try_new(w.clone(), offsets, entries, nulls, *sorted)?)
            }
            (_, wanted) => cast_with_options(array, wanted, &strict)?,
        })
    }
}

/// The values of a part, without those in a struct that is null.
fn within(part: &ArrayRef, nulls: Option<&NullBuffer>) -> DfResult<ArrayRef> {
    match nulls {
        Some(nulls) => Ok(nullif(part, &BooleanArray::new(!nulls.inner(), None))?),
        None => Ok(part.clone()),
    }
}

fn part_with_id(stored: &Fields, wanted: &Field) -> Option<usize> {
    let id = field_id(wanted)?;
    stored.iter().position(|field| field_id(field) == Some(id))
}

impl PartialEq for ByIds {
    fn eq(&self, other: &Self) -> bool {
        self.child.eq(&other.child) && self.to == other.to
    }
}

impl Eq for ByIds {}

impl Hash for ByIds {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.child.hash(state);
        self.to.hash(state);
    }
}

impl fmt::Display for ByIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "by_ids({})", self.child)
    }
}

impl PhysicalExpr for ByIds {
    fn data_type(&self, _: &Schema) -> DfResult<DataType> {
        Ok(self.to.data_type().clone())
    }

    fn nullable(&self, _: &Schema) -> DfResult<bool> {
        Ok(true)
    }

    fn evaluate(&self, batch: &RecordBatch) -> DfResult<ColumnarValue> {
        let array = self.child.evaluate(batch)?.into_array(batch.num_rows())?;
        Ok(ColumnarValue::Array(self.convert(&array, &self.from, &self.to)?))
    }

    fn children(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        vec![&self.child]
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn PhysicalExpr>>) -> DfResult<Arc<dyn PhysicalExpr>> {
        match children.into_iter().next() {
            Some(child) => Ok(Arc::new(ByIds { child, ..self.as_ref().clone() })),
            None => Ok(self),
        }
    }

    fn fmt_sql(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
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
