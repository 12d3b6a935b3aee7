//! How rows are laid out in files: by partition, and sorted.
//!
//! Rows come to the writer clustered: those of one partition after each other, by [`cluster`], which is DataFusion's sort and
//! spills to disk. So one file is open at a time, whatever the number of partitions, and memory is bounded. Within a
//! partition rows are in the table's sort order, by what its transforms make of them. An order that lake does not know is none.
//!
//! What rows are laid out by is a [`Key`]: a column, or a part of structs, and a transform ([`sound::Function`]).

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BinaryArray, RecordBatch, make_array, new_empty_array};
use arrow::buffer::NullBuffer;
use arrow::compute::{SortOptions, cast};
use arrow::datatypes::{
    DataType, Date32Type, Decimal128Type, Float32Type, Float64Type, Int32Type, Int64Type, Schema as ArrowSchema,
    Time64MicrosecondType, TimestampMicrosecondType, TimestampNanosecondType,
};
use datafusion::common::{Result as DfResult, ScalarValue};
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{LexOrdering, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use iceberg::spec::{
    Datum, Literal, NestedFieldRef, NullOrder, PrimitiveType, Schema, SortDirection, SortField, SortOrder, Struct,
    TableMetadata, Transform, Type, UnboundPartitionSpec,
};

use super::{sound, types};
use crate::error::{Error, Result};
use crate::scan::values::literal_scalar;
use crate::storage::names::in_manifest;

/// The id of the sort order that is none.
const UNSORTED: i32 = 0;

/// How a table is to be laid out, by names of columns; `s.a` is the field a of the struct s.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    pub partition: Vec<(String, Transform)>,
    pub sort: Vec<SortColumn>,
}

/// What rows are sorted by: a column, or what a transform makes of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SortColumn {
    pub name: String,
    pub transform: Transform,
    pub descending: bool,
    pub nulls_first: bool,
}

impl Layout {
    /// The partition spec under `schema`.
    ///
    /// # Errors
    /// `Invalid` for a column that is not there, and a transform that does not fit its type.
    pub fn spec(&self, schema: &Schema) -> Result<UnboundPartitionSpec> {
        let mut spec = UnboundPartitionSpec::builder();
        for (name, transform) in &self.partition {
            let id = source(schema, name, *transform, "partitioned", sound::part_misfit)?;
            let suffix = match transform {
                Transform::Identity => "",
                Transform::Bucket(_) => "_bucket",
                Transform::Truncate(_) => "_trunc",
                Transform::Year => "_year",
                Transform::Month => "_month",
                Transform::Day => "_day",
                Transform::Hour => "_hour",
                Transform::Void => "_void",
                Transform::Unknown => return Err(Error::invalid(format!("partitioning by {transform} of {name}"))),
            };
            spec = spec.add_partition_field(id, field_name(schema, name, suffix), *transform)?;
        }
        Ok(spec.build())
    }

    /// The sort order under `schema`.
    ///
    /// # Errors
    /// `Invalid` for a column that is not there or cannot be sorted by, and a transform that does not fit its type.
    pub fn order(&self, schema: &Schema) -> Result<SortOrder> {
        if self.sort.is_empty() {
            return Ok(SortOrder::unsorted_order());
        }
        let mut fields = Vec::new();
        for column in &self.sort {
            fields.push(SortField {
                source_id: source(schema, &column.name, column.transform, "sorted", sound::misfit)?,
                transform: column.transform,
                direction: if column.descending { SortDirection::Descending } else { SortDirection::Ascending },
                null_order: if column.nulls_first { NullOrder::First } else { NullOrder::Last },
            });
        }
        Ok(SortOrder::builder().with_order_id(1).with_fields(fields).build(schema)?)
    }
}

/// Why a transform of a type is not to be had.
type Misfit = fn(Transform, &Type) -> Option<String>;

/// The id of a column that a table is to be `laid` out by.
fn source(schema: &Schema, name: &str, transform: Transform, laid: &str, misfit: Misfit) -> Result<i32> {
    let field = schema.field_by_name(name);
    let field = field.ok_or_else(|| Error::invalid(format!("there is no column {name} to lay rows out by")))?;
    let data_type = field.field_type.as_ref();
    if !data_type.is_primitive() {
        return Err(Error::invalid(format!("rows cannot be laid out by {name}, which is {data_type}")));
    }
    if locate(schema.as_struct().fields(), field.id).is_none() {
        return Err(Error::invalid(format!("rows cannot be laid out by {name}, which is inside of a list or a map")));
    }
    match misfit(transform, data_type) {
        None => Ok(field.id),
        Some(why) => Err(Error::invalid(format!(
            "the table cannot be {laid} by {transform} of {name}, which is {data_type}: {why}"
        ))),
    }
}

/// What a partition field is called: as its column, in what every engine finds it by in manifests, and as no other column.
fn field_name(schema: &Schema, column: &str, suffix: &str) -> String {
    let plain: String = column.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let mut name = in_manifest(&plain) + suffix;
    while name != column && schema.field_by_name(&name).is_some() {
        name.push_str("_part");
    }
    name
}

/// Why rows of such a table cannot be laid out, if so.
pub fn unsupported(metadata: &TableMetadata) -> Option<String> {
    Partitioner::new(metadata).err().map(|error| error.message)
}

/// The way to a column, or to a part of structs, and what is there: the place among the columns, then those in the structs.
fn locate(fields: &[NestedFieldRef], id: i32) -> Option<(Vec<usize>, &NestedFieldRef)> {
    fields.iter().enumerate().find_map(|(place, field)| match field.field_type.as_ref() {
        _ if field.id == id => Some((vec![place], field)),
        Type::Struct(parts) => {
            let (mut path, found) = locate(parts.fields(), id)?;
            path.insert(0, place);
            Some((path, found))
        }
        _ => None,
    })
}

/// The names on the way to a column, or to a part of structs.
pub fn names(schema: &Schema, id: i32) -> Option<Vec<&str>> {
    let mut fields = schema.as_struct().fields();
    let mut names = Vec::new();
    for place in locate(fields, id)?.0 {
        let field = fields.get(place)?;
        names.push(field.name.as_str());
        if let Type::Struct(parts) = field.field_type.as_ref() {
            fields = parts.fields();
        }
    }
    Some(names)
}

/// Something that rows are laid out by.
#[derive(Debug)]
struct Key {
    /// The place of the column.
    place: usize,
    /// The places in the structs that lead on from there.
    parts: Vec<usize>,
    data_type: PrimitiveType,
    /// As rows of the table have it; those of a query may come otherwise.
    arrow_type: DataType,
    transform: Transform,
    function: sound::Function,
    /// What the transform makes of it.
    result_type: DataType,
}

impl Key {
    /// # Errors
    /// `NotSupported` for what is not there, or inside of a list or a map, and for transforms that lake does not know.
    fn new(schema: &Schema, source: i32, transform: Transform, misfit: Misfit) -> Result<Self> {
        let function = sound::function(transform)?;
        let (path, field) = locate(schema.as_struct().fields(), source).ok_or_else(|| {
            Error::not_supported(format!("column {source} is not there, or inside of a list or a map"))
        })?;
        let of_type = field.field_type.as_ref();
        if let Some(why) = misfit(transform, of_type) {
            return Err(Error::not_supported(format!("{transform} of {}, which is {of_type}: {why}", field.name)));
        }
        let primitive = of_type.as_primitive_type();
        let data_type = primitive.ok_or_else(|| Error::not_supported(format!("{} is {of_type}", field.name)))?.clone();
        let arrow_type = types::column_type(of_type)?;
        let result_type = types::column_type(&transform.result_type(of_type)?)?;
        let (place, parts) = (path.first().copied().unwrap_or_default(), path.get(1..).unwrap_or_default().to_vec());
        Ok(Self { place, parts, data_type, arrow_type, transform, function, result_type })
    }

    /// Its values in a column of rows, as those of the table have them.
    fn values(&self, column: &ArrayRef) -> Result<ArrayRef> {
        let mut values = column.clone();
        for place in &self.parts {
            let parts = values.as_struct_opt().filter(|parts| *place < parts.num_columns());
            let parts = parts.ok_or_else(|| Error::internal("rows to be laid out lack a part of a struct"))?;
            let part = parts.column(*place);
            // A part of nothing is nothing.
            values = match NullBuffer::union(parts.nulls(), part.nulls()) {
                None => part.clone(),
                nulls => make_array(part.to_data().into_builder().nulls(nulls).build().map_err(Error::internal)?),
            };
        }
        cast(&values, &self.arrow_type).map_err(Error::invalid)
    }

    /// What the transform makes of each value in a column of rows.
    fn transformed(&self, column: &ArrayRef) -> Result<ArrayRef> {
        let values = self.values(column)?;
        if self.transform == Transform::Identity {
            return Ok(values);
        }
        if values.is_empty() {
            return Ok(new_empty_array(&self.result_type));
        }
        let null = ScalarValue::try_from(&self.result_type)?;
        let mut made: Vec<ScalarValue> = Vec::with_capacity(values.len());
        let mut last = None;
        for row in 0..values.len() {
            let source = datum(&values, row, &self.data_type)?;
            // Rows that follow each other are often alike.
            let same = made.last().filter(|_| source == last).cloned();
            made.push(match (same, &source) {
                (Some(same), _) => same,
                (None, None) => null.clone(),
                (None, Some(value)) => match self.function.of(value)? {
                    Some(value) => literal_scalar(value.literal(), &self.result_type)
                        .ok_or_else(|| Error::internal(format!("{} made {value}", self.transform)))?,
                    None => null.clone(),
                },
            });
            last = source;
        }
        Ok(ScalarValue::iter_to_array(made)?)
    }
}

/// Tells to which partition rows belong.
#[derive(Debug)]
pub struct Partitioner {
    pub spec_id: i32,
    /// How many fields the spec has. Those without a key are null: void ones, whatever their column is.
    width: usize,
    /// Each with the place of its field.
    keys: Vec<(usize, Key)>,
}

impl Partitioner {
    /// For rows of the current schema; `None` for a table that is not partitioned.
    ///
    /// # Errors
    /// `NotSupported` for a part of a list or a map, and transforms that lake does not know.
    pub fn new(metadata: &TableMetadata) -> Result<Option<Arc<Self>>> {
        let spec = metadata.default_partition_spec();
        let mut keys = Vec::new();
        for (at, field) in spec.fields().iter().enumerate() {
            if field.transform != Transform::Void {
                let key = Key::new(metadata.current_schema(), field.source_id, field.transform, sound::part_misfit);
                let key = key.map_err(|e| e.while_doing(format_args!("it is partitioned by {}", field.name)))?;
                keys.push((at, key));
            }
        }
        let (spec_id, width) = (spec.spec_id(), spec.fields().len());
        Ok((width > 0).then(|| Arc::new(Self { spec_id, width, keys })))
    }

    /// The partitions of a batch whose first columns are the table's: rows that follow each other and belong together.
    pub fn runs(&self, batch: &RecordBatch) -> Result<Vec<(Range<usize>, Struct)>> {
        let columns: Vec<ArrayRef> = self.keys.iter().map(|(_, key)| batch.column(key.place).clone()).collect();
        let mut runs: Vec<(Range<usize>, Vec<Option<Datum>>)> = Vec::new();
        self.each(&columns, batch.num_rows(), |row, values| {
            match runs.last_mut() {
                Some((rows, last)) if last == values => rows.end = row + 1,
                _ => runs.push((row..row + 1, values.to_vec())),
            }
            Ok(())
        })?;
        let partition =
            |values: Vec<Option<Datum>>| -> Struct { values.into_iter().map(|v| v.map(Literal::from)).collect() };
        Ok(runs.into_iter().map(|(rows, values)| (rows, partition(values))).collect())
    }

    /// A key for each row, the same for those of one partition.
    fn keys(&self, columns: &[ArrayRef], rows: usize) -> Result<BinaryArray> {
        let mut keys = Vec::with_capacity(rows);
        self.each(columns, rows, |_, values| {
            let mut key = Vec::new();
            for value in values {
                match value {
                    None => key.push(0),
                    Some(value) => {
                        let bytes = value.to_bytes()?;
                        key.push(1);
                        key.extend((bytes.len() as u32).to_be_bytes());
                        key.extend(bytes.iter());
                    }
                }
            }
            keys.push(key);
            Ok(())
        })?;
        Ok(BinaryArray::from_iter_values(keys))
    }

    /// Calls `take` with the partition values of each row; `columns` are those of the keys.
    fn each(
        &self,
        columns: &[ArrayRef],
        rows: usize,
        mut take: impl FnMut(usize, &[Option<Datum>]) -> Result<()>,
    ) -> Result<()> {
        let columns = columns.iter().zip(&self.keys).map(|(column, (_, key))| key.values(column));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let mut sources: Vec<Option<Datum>> = vec![None; self.keys.len()];
        let mut values: Vec<Option<Datum>> = vec![None; self.width];
        for row in 0..rows {
            for (i, (at, key)) in self.keys.iter().enumerate() {
                let source = datum(&columns[i], row, &key.data_type)?;
                // Rows that follow each other are often alike.
                if row > 0 && source == sources[i] {
                    continue;
                }
                values[*at] = match &source {
                    Some(source) => key.function.of(source)?,
                    None => None,
                };
                sources[i] = source;
            }
            take(row, &values)?;
        }
        Ok(())
    }
}

/// A value of a column as Iceberg has it.
pub fn datum(column: &ArrayRef, row: usize, data_type: &PrimitiveType) -> Result<Option<Datum>> {
    if column.is_null(row) {
        return Ok(None);
    }
    Ok(Some(match (data_type, column.data_type()) {
        (PrimitiveType::Boolean, DataType::Boolean) => Datum::bool(column.as_boolean().value(row)),
        (PrimitiveType::Int, DataType::Int32) => Datum::int(column.as_primitive::<Int32Type>().value(row)),
        (PrimitiveType::Long, DataType::Int64) => Datum::long(column.as_primitive::<Int64Type>().value(row)),
        (PrimitiveType::Float, DataType::Float32) => Datum::float(column.as_primitive::<Float32Type>().value(row)),
        (PrimitiveType::Double, DataType::Float64) => Datum::double(column.as_primitive::<Float64Type>().value(row)),
        (PrimitiveType::Date, DataType::Date32) => Datum::date(column.as_primitive::<Date32Type>().value(row)),
        (PrimitiveType::Time, DataType::Time64(_)) => {
            Datum::time_micros(column.as_primitive::<Time64MicrosecondType>().value(row))?
        }
        (PrimitiveType::Timestamp, DataType::Timestamp(..)) => {
            Datum::timestamp_micros(column.as_primitive::<TimestampMicrosecondType>().value(row))
        }
        (PrimitiveType::Timestamptz, DataType::Timestamp(..)) => {
            Datum::timestamptz_micros(column.as_primitive::<TimestampMicrosecondType>().value(row))
        }
        (PrimitiveType::TimestampNs, DataType::Timestamp(..)) => {
            Datum::timestamp_nanos(column.as_primitive::<TimestampNanosecondType>().value(row))
        }
        (PrimitiveType::TimestamptzNs, DataType::Timestamp(..)) => {
            Datum::timestamptz_nanos(column.as_primitive::<TimestampNanosecondType>().value(row))
        }
        (PrimitiveType::String, DataType::Utf8View) => Datum::string(column.as_string_view().value(row)),
        (PrimitiveType::Binary, DataType::BinaryView) => {
            Datum::binary(column.as_binary_view().value(row).iter().copied())
        }
        (PrimitiveType::Fixed(_) | PrimitiveType::Uuid, DataType::FixedSizeBinary(_)) => {
            Datum::try_from_bytes(column.as_fixed_size_binary().value(row), data_type.clone())?
        }
        (PrimitiveType::Decimal { .. }, DataType::Decimal128(..)) => {
            let value = column.as_primitive::<Decimal128Type>().value(row);
            Datum::try_from_bytes(&value.to_be_bytes(), data_type.clone())?
        }
        (wanted, found) => {
            return Err(Error::not_supported(format!(
                "partitioning by a column of type {wanted}, which comes as {found}"
            )));
        }
    }))
}

/// The plan with its rows clustered by partition and sorted, as the table asks for; its first columns are the table's.
pub fn cluster(plan: Arc<dyn ExecutionPlan>, metadata: &TableMetadata) -> Result<Arc<dyn ExecutionPlan>> {
    cluster_by(plan, metadata, metadata.default_sort_order())
}

/// [`cluster`] with the rows of a partition in this order.
pub fn cluster_by(
    plan: Arc<dyn ExecutionPlan>,
    metadata: &TableMetadata,
    sort: &SortOrder,
) -> Result<Arc<dyn ExecutionPlan>> {
    let schema = plan.schema();
    let column = |place: usize| -> Arc<dyn PhysicalExpr> { Arc::new(Column::new(schema.field(place).name(), place)) };
    let mut order = Vec::new();
    if let Some(partitioner) = Partitioner::new(metadata)?.filter(|partitioner| !partitioner.keys.is_empty()) {
        let columns = partitioner.keys.iter().map(|(_, key)| column(key.place)).collect();
        let key = Ordered { by: By::Partition(partitioner), columns };
        order.push(PhysicalSortExpr::new(Arc::new(key), SortOptions::default()));
    }
    for (key, options) in sort_keys(metadata.current_schema(), sort).unwrap_or_default() {
        let of = column(key.place);
        let by: Arc<dyn PhysicalExpr> = match key.transform == Transform::Identity && key.parts.is_empty() {
            true => of,
            false => Arc::new(Ordered { by: By::Key(Arc::new(key)), columns: vec![of] }),
        };
        order.push(PhysicalSortExpr::new(by, options));
    }
    let Some(order) = LexOrdering::new(order) else { return Ok(plan) };
    let parts = plan.output_partitioning().partition_count();
    let sorted: Arc<dyn ExecutionPlan> =
        Arc::new(SortExec::new(order.clone(), plan).with_preserve_partitioning(parts > 1));
    Ok(match parts > 1 {
        true => Arc::new(SortPreservingMergeExec::new(order, sorted)),
        false => sorted,
    })
}

/// What rows are sorted by, but for what makes no difference; `None` for an order that lake does not know.
fn sort_keys(schema: &Schema, order: &SortOrder) -> Option<Vec<(Key, SortOptions)>> {
    let fields = order.fields.iter().filter(|field| field.transform != Transform::Void);
    let keys = fields.map(|field| {
        let options = SortOptions {
            descending: field.direction == SortDirection::Descending,
            nulls_first: field.null_order == NullOrder::First,
        };
        Some((Key::new(schema, field.source_id, field.transform, sound::misfit).ok()?, options))
    });
    keys.collect()
}

/// The id of the order that rows of a table are written in, if it has one: 0, no order, for one that lake does not know.
pub fn sort_order_id(metadata: &TableMetadata) -> Option<i32> {
    let order = metadata.default_sort_order();
    match sort_keys(metadata.current_schema(), order) {
        _ if order.is_unsorted() => None,
        Some(_) => i32::try_from(order.order_id).ok(),
        None => Some(UNSORTED),
    }
}

/// An expression that rows are sorted by.
#[derive(Debug)]
struct Ordered {
    by: By,
    columns: Vec<Arc<dyn PhysicalExpr>>,
}

#[derive(Debug, Clone)]
enum By {
    /// One value for each partition.
    Partition(Arc<Partitioner>),
    Key(Arc<Key>),
}

impl By {
    fn keys(&self) -> Vec<&Key> {
        match self {
            By::Partition(partitioner) => partitioner.keys.iter().map(|(_, key)| key).collect(),
            By::Key(key) => vec![key],
        }
    }
}

impl PartialEq for Ordered {
    fn eq(&self, other: &Self) -> bool {
        let of_partition = |ordered: &Self| matches!(ordered.by, By::Partition(_));
        let (keys, others) = (self.by.keys(), other.by.keys());
        of_partition(self) == of_partition(other)
            && keys
                .iter()
                .map(|key| (&key.parts, key.transform))
                .eq(others.iter().map(|key| (&key.parts, key.transform)))
            && self.columns.iter().eq(other.columns.iter())
    }
}

impl Eq for Ordered {}

impl Hash for Ordered {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.columns.hash(state);
    }
}

impl fmt::Display for Ordered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_sql(f)
    }
}

impl PhysicalExpr for Ordered {
    fn data_type(&self, _: &ArrowSchema) -> DfResult<DataType> {
        Ok(match &self.by {
            By::Partition(_) => DataType::Binary,
            By::Key(key) => key.result_type.clone(),
        })
    }

    fn nullable(&self, _: &ArrowSchema) -> DfResult<bool> {
        Ok(matches!(self.by, By::Key(_)))
    }

    fn evaluate(&self, batch: &RecordBatch) -> DfResult<ColumnarValue> {
        let rows = batch.num_rows();
        let columns = self.columns.iter().map(|column| column.evaluate(batch)?.into_array(rows));
        let columns = columns.collect::<DfResult<Vec<_>>>()?;
        let values: Result<ArrayRef> = match (&self.by, columns.as_slice()) {
            (By::Partition(partitioner), columns) => {
                partitioner.keys(columns, rows).map(|keys| Arc::new(keys) as ArrayRef)
            }
            (By::Key(key), [column]) => key.transformed(column),
            (By::Key(_), _) => Err(Error::internal("rows are sorted by one column at a time")),
        };
        values.map(ColumnarValue::Array).map_err(Error::into_datafusion)
    }

    fn children(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        self.columns.iter().collect()
    }

    fn with_new_children(self: Arc<Self>, columns: Vec<Arc<dyn PhysicalExpr>>) -> DfResult<Arc<dyn PhysicalExpr>> {
        Ok(Arc::new(Ordered { by: self.by.clone(), columns }))
    }

    fn fmt_sql(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self.by, By::Partition(_)) { "partition(" } else { "(" })?;
        for (i, (column, key)) in self.columns.iter().zip(self.by.keys()).enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}{} of {column}", key.transform)?;
        }
        f.write_str(")")
    }
}
