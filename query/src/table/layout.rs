//! How rows are laid out in files: by partition, and sorted.
//!
//! Rows come to the writer clustered: those of one partition after each other, by [`cluster`], which is DataFusion's sort and
//! spills to disk. So one file is open at a time, whatever the number of partitions, and memory is bounded. Within a
//! partition rows are in the table's sort order.
//!
//! Partition values are those of the iceberg crate's transforms.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BinaryArray, RecordBatch};
use arrow::compute::{SortOptions, cast};
use arrow::datatypes::{
    DataType, Date32Type, Decimal128Type, Float32Type, Float64Type, Int32Type, Int64Type, Schema as ArrowSchema,
    Time64MicrosecondType, TimestampMicrosecondType, TimestampNanosecondType,
};
use datafusion::common::Result as DfResult;
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{LexOrdering, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use iceberg::spec::{
    Datum, Literal, NullOrder, PrimitiveType, Schema, SortDirection, SortField, SortOrder, Struct, TableMetadata,
    Transform, Type, UnboundPartitionSpec,
};

use super::{sound, types};
use crate::error::{Error, Result};

/// How a table is to be laid out, by names of columns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    pub partition: Vec<(String, Transform)>,
    pub sort: Vec<SortColumn>,
}

/// A column that rows are sorted by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SortColumn {
    pub name: String,
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
            let (id, data_type) = source(schema, name)?;
            if let Some(why) = sound::misfit(*transform, &data_type) {
                return Err(Error::invalid(format!(
                    "the table cannot be partitioned by {transform} of {name}, which is {data_type}: {why}"
                )));
            }
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
            spec = spec.add_partition_field(id, format!("{name}{suffix}"), *transform)?;
        }
        Ok(spec.build())
    }

    /// The sort order under `schema`.
    ///
    /// # Errors
    /// `Invalid` for a column that is not there or cannot be sorted by.
    pub fn order(&self, schema: &Schema) -> Result<SortOrder> {
        if self.sort.is_empty() {
            return Ok(SortOrder::unsorted_order());
        }
        let mut fields = Vec::new();
        for column in &self.sort {
            let (source_id, _) = source(schema, &column.name)?;
            fields.push(SortField {
                source_id,
                transform: Transform::Identity,
                direction: if column.descending { SortDirection::Descending } else { SortDirection::Ascending },
                null_order: if column.nulls_first { NullOrder::First } else { NullOrder::Last },
            });
        }
        Ok(SortOrder::builder().with_order_id(1).with_fields(fields).build(schema)?)
    }
}

fn source(schema: &Schema, name: &str) -> Result<(i32, Type)> {
    let field = schema.as_struct().fields().iter().find(|field| field.name == name);
    let field = field.ok_or_else(|| Error::invalid(format!("there is no column {name} to lay rows out by")))?;
    match field.field_type.as_ref() {
        Type::Primitive(_) => Ok((field.id, field.field_type.as_ref().clone())),
        other => Err(Error::invalid(format!("rows cannot be laid out by {name}, which is {other}"))),
    }
}

/// Why rows of such a table cannot be laid out, if so.
pub fn unsupported(metadata: &TableMetadata) -> Option<String> {
    if let Err(error) = Partitioner::new(metadata) {
        return Some(error.message);
    }
    let sorted = metadata.default_sort_order();
    let odd = sorted.fields.iter().find(|field| {
        field.transform != Transform::Identity || column_of(metadata.current_schema(), field.source_id).is_none()
    });
    odd.map(|field| format!("it is sorted by {} of column {}", field.transform, field.source_id))
}

/// Place and type of a top-level column.
fn column_of(schema: &Schema, id: i32) -> Option<(usize, PrimitiveType)> {
    let fields = schema.as_struct().fields();
    let place = fields.iter().position(|field| field.id == id)?;
    Some((place, fields[place].field_type.as_primitive_type()?.clone()))
}

/// Tells to which partition rows belong.
#[derive(Debug)]
pub struct Partitioner {
    pub spec_id: i32,
    fields: Vec<PartitionColumn>,
}

#[derive(Debug)]
struct PartitionColumn {
    place: usize,
    data_type: PrimitiveType,
    /// As rows of the table have it; those of a query may come otherwise.
    arrow_type: DataType,
    transform: Transform,
    function: sound::Function,
}

impl Partitioner {
    /// For rows of the current schema; `None` for a table that is not partitioned.
    ///
    /// # Errors
    /// `NotSupported` for a part of a nested column, and transforms that lake does not know.
    pub fn new(metadata: &TableMetadata) -> Result<Option<Arc<Self>>> {
        let spec = metadata.default_partition_spec();
        let mut fields = Vec::new();
        let arrow = types::arrow_schema(metadata.current_schema())?;
        for field in spec.fields() {
            let column = column_of(metadata.current_schema(), field.source_id);
            let (place, data_type) = column.ok_or_else(|| {
                Error::not_supported(format!("it is partitioned by {}, which is no column of its own", field.name))
            })?;
            let function = sound::function(field.transform)
                .map_err(|e| e.while_doing(format_args!("it is partitioned by {}", field.name)))?;
            let arrow_type = arrow.field(place).data_type().clone();
            fields.push(PartitionColumn { place, data_type, arrow_type, transform: field.transform, function });
        }
        let spec_id = spec.spec_id();
        Ok((!fields.is_empty()).then(|| Arc::new(Self { spec_id, fields })))
    }

    /// The partitions of a batch whose first columns are the table's: rows that follow each other and belong together.
    pub fn runs(&self, batch: &RecordBatch) -> Result<Vec<(Range<usize>, Struct)>> {
        let columns: Vec<ArrayRef> = self.fields.iter().map(|field| batch.column(field.place).clone()).collect();
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

    /// Calls `take` with the partition values of each row.
    fn each(
        &self,
        columns: &[ArrayRef],
        rows: usize,
        mut take: impl FnMut(usize, &[Option<Datum>]) -> Result<()>,
    ) -> Result<()> {
        let columns = columns.iter().zip(&self.fields).map(|(column, field)| cast(column, &field.arrow_type));
        let columns = columns.collect::<Result<Vec<_>, _>>().map_err(Error::invalid)?;
        let mut sources: Vec<Option<Datum>> = vec![None; self.fields.len()];
        let mut values: Vec<Option<Datum>> = vec![None; self.fields.len()];
        for row in 0..rows {
            for (i, field) in self.fields.iter().enumerate() {
                let source = datum(&columns[i], row, &field.data_type)?;
                // Rows that follow each other are often alike.
                if row > 0 && source == sources[i] {
                    continue;
                }
                values[i] = match &source {
                    Some(source) => field.function.of(source)?,
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
    if let Some(partitioner) = Partitioner::new(metadata)? {
        let columns = partitioner.fields.iter().map(|field| column(field.place)).collect();
        let key = PartitionKey { partitioner, columns };
        order.push(PhysicalSortExpr::new(Arc::new(key), SortOptions::default()));
    }
    for field in &sort.fields {
        let Some((place, _)) = column_of(metadata.current_schema(), field.source_id) else { continue };
        let options = SortOptions {
            descending: field.direction == SortDirection::Descending,
            nulls_first: field.null_order == NullOrder::First,
        };
        order.push(PhysicalSortExpr::new(column(place), options));
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

/// An expression with one value for each partition.
#[derive(Debug)]
struct PartitionKey {
    partitioner: Arc<Partitioner>,
    columns: Vec<Arc<dyn PhysicalExpr>>,
}

impl PartialEq for PartitionKey {
    fn eq(&self, other: &Self) -> bool {
        let transforms = |key: &Self| key.partitioner.fields.iter().map(|field| field.transform).collect::<Vec<_>>();
        transforms(self) == transforms(other) && self.columns.iter().eq(other.columns.iter())
    }
}

impl Eq for PartitionKey {}

impl Hash for PartitionKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.columns.hash(state);
    }
}

impl fmt::Display for PartitionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_sql(f)
    }
}

impl PhysicalExpr for PartitionKey {
    fn data_type(&self, _: &ArrowSchema) -> DfResult<DataType> {
        Ok(DataType::Binary)
    }

    fn nullable(&self, _: &ArrowSchema) -> DfResult<bool> {
        Ok(false)
    }

    fn evaluate(&self, batch: &RecordBatch) -> DfResult<ColumnarValue> {
        let rows = batch.num_rows();
        let columns = self.columns.iter().map(|column| column.evaluate(batch)?.into_array(rows));
        let columns = columns.collect::<DfResult<Vec<_>>>()?;
        let keys = self.partitioner.keys(&columns, rows).map_err(Error::into_datafusion)?;
        Ok(ColumnarValue::Array(Arc::new(keys)))
    }

    fn children(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        self.columns.iter().collect()
    }

    fn with_new_children(self: Arc<Self>, columns: Vec<Arc<dyn PhysicalExpr>>) -> DfResult<Arc<dyn PhysicalExpr>> {
        Ok(Arc::new(PartitionKey { partitioner: self.partitioner.clone(), columns }))
    }

    fn fmt_sql(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("partition(")?;
        for (i, (column, field)) in self.columns.iter().zip(&self.partitioner.fields).enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}{} of {column}", field.transform)?;
        }
        f.write_str(")")
    }
}
