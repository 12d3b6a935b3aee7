//! Which manifests and data files certainly hold no row that a query wants.
//!
//! The query's filters become one of DataFusion's pruning predicates, over the table's columns. It is asked about many
//! containers at once, first the manifests and then the files of those that are left. What is known of a container's
//! column comes from
//! - the partition: a value of a transform says between which values the column's own lie (`day(ts)`, `truncate(4, s)`,
//!   the value itself); of `bucket(n, c)` it says which single values are not there;
//! - the file's bounds and counts.
//!
//! Everything goes by field id and by the column's type of today: a bound that was written for a type that does not widen
//! to it is not known. Bounds of floats are not known where there may be NaN, which they leave out, and the partition
//! value of a float is not used at all. A text bound that may have been cut is one still, but two that are equal need not
//! mean a single value ([`super::values`]).

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, UInt64Array};
use arrow::datatypes::{DataType, SchemaRef};
use datafusion::catalog::Session;
use datafusion::common::pruning::PruningStatistics;
use datafusion::common::tree_node::TreeNode;
use datafusion::common::{Column, DFSchema, ScalarValue};
use datafusion::logical_expr::Expr;
use datafusion::physical_expr::conjunction;
use datafusion::physical_expr::simplifier::PhysicalExprSimplifier;
use datafusion::physical_optimizer::pruning::{PruningPredicate, PruningPredicateBuilder};
use iceberg::spec::{Datum, Literal, ManifestFile, PartitionSpec, PrimitiveLiteral, TableMetadata, Transform, Type};

use super::values::{Bounds, is_float, literal_scalar, packed_bounds, range_of_partition_value};
use crate::error::{Error, Result};
use crate::storage::packed::Packed;
use crate::table::sound;
use crate::table::types::field_id;

/// A query's filters, for leaving out what cannot match.
#[derive(Debug)]
pub struct Pruning {
    predicate: PruningPredicate,
    schema: SchemaRef,
}

impl Pruning {
    /// `None` if the filters leave nothing out.
    pub fn new(state: &dyn Session, schema: &SchemaRef, filters: &[Expr]) -> Result<Option<Self>> {
        if filters.is_empty() {
            return Ok(None);
        }
        let df_schema = DFSchema::try_from(schema.as_ref().clone())?;
        let of_rows = |filter: &&Expr| {
            let of_query = |expr: &Expr| {
                matches!(
                    expr,
                    Expr::ScalarSubquery(_)
                        | Expr::InSubquery(_)
                        | Expr::Exists(_)
                        | Expr::OuterReferenceColumn(..)
                        | Expr::Placeholder(_)
                )
            };
            !filter.is_volatile() && !filter.exists(|expr| Ok(of_query(expr))).unwrap_or(true)
        };
        // What cannot be evaluated here is evaluated on the rows.
        let filters = filters.iter().filter(of_rows);
        let physical = filters.filter_map(|filter| state.create_physical_expr(filter.clone(), &df_schema).ok());
        let all = PhysicalExprSimplifier::new(schema).simplify(conjunction(physical))?;
        let predicate = PruningPredicateBuilder::new().with_file_schema(schema.clone()).try_build(all);
        Ok(match predicate {
            Ok(predicate) if !predicate.always_true() => Some(Self { predicate, schema: schema.clone() }),
            _ => None,
        })
    }

    /// Of each manifest, whether rows in it may match, by its partitions.
    pub fn manifests(&self, metadata: &TableMetadata, manifests: &[&ManifestFile]) -> Vec<bool> {
        let mut specs = Specs::new(metadata);
        let mut containers = Vec::with_capacity(manifests.len());
        for manifest in manifests {
            containers.push(Container::Manifest { manifest, partition: specs.get(manifest.partition_spec_id) });
        }
        self.prune(containers)
    }

    /// Of each file, an entry of a manifest of that spec, whether rows in it may match.
    pub fn files(&self, metadata: &TableMetadata, files: &[(&Packed, usize, i32)]) -> Vec<bool> {
        let mut specs = Specs::new(metadata);
        let mut containers = Vec::with_capacity(files.len());
        for (entries, at, spec_id) in files {
            containers.push(Container::File { entries, at: *at, partition: specs.get(*spec_id) });
        }
        self.prune(containers)
    }

    fn prune(&self, containers: Vec<Container<'_>>) -> Vec<bool> {
        let count = containers.len();
        if count == 0 {
            return Vec::new();
        }
        self.predicate.prune(&Containers { schema: &self.schema, containers, last: RefCell::default() }).unwrap_or_else(
            |error| {
                // Everything is read, and an error that concerns the query shows when it is evaluated on rows.
                tracing::debug!(%error, "filters could not be used for leaving out files");
                vec![true; count]
            },
        )
    }
}

/// A field of a partition spec, with what its values mean.
#[derive(Debug)]
struct Field {
    source_id: i32,
    transform: Transform,
    /// The type of its values, by the source column's type of today.
    result_type: Option<Type>,
}

/// The fields of partition specs, worked out once for each.
struct Specs<'a> {
    metadata: &'a TableMetadata,
    fields: HashMap<i32, Arc<Vec<Field>>>,
}

impl<'a> Specs<'a> {
    fn new(metadata: &'a TableMetadata) -> Self {
        Self { metadata, fields: HashMap::new() }
    }

    fn get(&mut self, spec_id: i32) -> Arc<Vec<Field>> {
        let metadata = self.metadata;
        let fields = self.fields.entry(spec_id).or_insert_with(|| {
            let spec = metadata.partition_spec_by_id(spec_id).map(|spec| fields_of(metadata, spec));
            Arc::new(spec.unwrap_or_default())
        });
        fields.clone()
    }
}

fn fields_of(metadata: &TableMetadata, spec: &PartitionSpec) -> Vec<Field> {
    let field = |field: &iceberg::spec::PartitionField| {
        let source = metadata.current_schema().field_by_id(field.source_id);
        let result_type = source.and_then(|source| field.transform.result_type(&source.field_type).ok());
        Field { source_id: field.source_id, transform: field.transform, result_type }
    };
    spec.fields().iter().map(field).collect()
}

/// Something with rows in it.
enum Container<'a> {
    Manifest { manifest: &'a ManifestFile, partition: Arc<Vec<Field>> },
    File { entries: &'a Packed, at: usize, partition: Arc<Vec<Field>> },
}

impl Container<'_> {
    fn bounds(&self, id: i32, data_type: &DataType) -> Bounds {
        let mut bounds = match self {
            Container::Manifest { .. } => Bounds::default(),
            Container::File { entries, at, .. } => packed_bounds(entries, *at, id, data_type),
        };
        if is_float(data_type) || bounds.lower.is_some() && bounds.upper.is_some() {
            return bounds;
        }
        for (index, field) in self.fields_of(id) {
            let Some((lower, upper)) = self.partition_values(index, field) else { continue };
            let range = |literal: &PrimitiveLiteral| range_of_partition_value(field.transform, literal, data_type);
            // The file's own bounds are at least as close.
            bounds.lower = bounds.lower.take().or_else(|| range(&lower)?.0);
            bounds.upper = bounds.upper.take().or_else(|| range(&upper)?.1);
        }
        bounds
    }

    fn fields_of(&self, id: i32) -> impl Iterator<Item = (usize, &Field)> {
        let (Container::Manifest { partition, .. } | Container::File { partition, .. }) = self;
        partition.iter().enumerate().filter(move |(_, field)| field.source_id == id)
    }

    /// Between which values the partition field's lie; nulls aside.
    fn partition_values(&self, index: usize, field: &Field) -> Option<(PrimitiveLiteral, PrimitiveLiteral)> {
        match self {
            Container::File { entries, at, .. } => {
                let value = entries.partition_value(*at, index)?;
                Some((value.clone(), value))
            }
            Container::Manifest { manifest, .. } => {
                let summary = manifest.partitions.as_ref()?.get(index)?;
                let primitive = field.result_type.as_ref()?.as_primitive_type()?;
                let decode = |bytes: &[u8]| Datum::try_from_bytes(bytes, primitive.clone()).ok();
                let lower = decode(summary.lower_bound.as_ref()?)?;
                let upper = decode(summary.upper_bound.as_ref()?)?;
                Some((lower.literal().clone(), upper.literal().clone()))
            }
        }
    }

    fn nulls(&self, id: i32) -> Option<u64> {
        let Container::File { entries, at, .. } = self else { return None };
        let known = entries.null_count(*at, id);
        // Every transform but void makes null of null, and of null only.
        known.or_else(|| {
            let all_null = self.fields_of(id).any(|(index, field)| {
                !matches!(field.transform, Transform::Void | Transform::Unknown)
                    && entries.partition_is_null(*at, index)
            });
            all_null.then(|| entries.records(*at))
        })
    }

    fn rows(&self) -> Option<u64> {
        match self {
            Container::Manifest { .. } => None,
            Container::File { entries, at, .. } => Some(entries.records(*at)),
        }
    }

    /// Whether no row's value of the column is among `values`, as their buckets say.
    fn has_none_of(&self, id: i32, values: &HashSet<ScalarValue>, buckets: &mut Buckets) -> bool {
        self.fields_of(id).any(|(index, field)| {
            let Transform::Bucket(_) = field.transform else { return false };
            let Some((PrimitiveLiteral::Int(lower), PrimitiveLiteral::Int(upper))) =
                self.partition_values(index, field)
            else {
                return false;
            };
            let buckets = buckets.of(field.transform, values);
            buckets.as_ref().is_some_and(|buckets| !buckets.iter().any(|bucket| (lower..=upper).contains(bucket)))
        })
    }
}

/// The buckets of the values that a filter asks for, worked out once for each number of buckets.
#[derive(Default)]
struct Buckets {
    of: HashMap<Transform, Option<Vec<i32>>>,
}

impl Buckets {
    fn of(&mut self, transform: Transform, values: &HashSet<ScalarValue>) -> &Option<Vec<i32>> {
        self.of.entry(transform).or_insert_with(|| {
            let function = sound::function(transform).ok()?;
            let bucket = |value| match function.of(&datum(value)?).ok()??.literal() {
                PrimitiveLiteral::Int(bucket) => Some(*bucket),
                _ => None,
            };
            values.iter().map(bucket).collect()
        })
    }
}

/// A value as Iceberg hashes it.
fn datum(value: &ScalarValue) -> Option<Datum> {
    Some(match value {
        ScalarValue::Int32(Some(v)) => Datum::int(*v),
        ScalarValue::Int64(Some(v)) => Datum::long(*v),
        ScalarValue::Date32(Some(v)) => Datum::date(*v),
        ScalarValue::TimestampMicrosecond(Some(v), None) => Datum::timestamp_micros(*v),
        ScalarValue::TimestampMicrosecond(Some(v), Some(_)) => Datum::timestamptz_micros(*v),
        ScalarValue::TimestampNanosecond(Some(v), None) => Datum::timestamp_nanos(*v),
        ScalarValue::TimestampNanosecond(Some(v), Some(_)) => Datum::timestamptz_nanos(*v),
        ScalarValue::Utf8(Some(v)) | ScalarValue::LargeUtf8(Some(v)) | ScalarValue::Utf8View(Some(v)) => {
            Datum::string(v)
        }
        ScalarValue::Binary(Some(v)) | ScalarValue::LargeBinary(Some(v)) | ScalarValue::BinaryView(Some(v)) => {
            Datum::binary(v.iter().copied())
        }
        _ => return None,
    })
}

struct Containers<'a> {
    schema: &'a SchemaRef,
    containers: Vec<Container<'a>>,
    /// The lower and the upper bounds of the column that was asked for last, by its id: they are worked out together, and asked for one
    /// after the other.
    last: RefCell<Option<(i32, [Option<ArrayRef>; 2])>>,
}

impl Containers<'_> {
    fn column(&self, column: &Column) -> Option<(i32, &DataType)> {
        let field = self.schema.field_with_name(&column.name).ok()?;
        Some((field_id(field)?, field.data_type()))
    }

    fn bounds(&self, column: &Column) -> Option<[Option<ArrayRef>; 2]> {
        let (id, data_type) = self.column(column)?;
        if let Some((of, bounds)) = self.last.borrow().as_ref()
            && *of == id
        {
            return Some(bounds.clone());
        }
        let null = ScalarValue::try_from(data_type).ok()?;
        let (mut lower, mut upper) = (Vec::new(), Vec::new());
        for container in &self.containers {
            let bounds = container.bounds(id, data_type);
            lower.push(bounds.lower.unwrap_or_else(|| null.clone()));
            upper.push(bounds.upper.unwrap_or_else(|| null.clone()));
        }
        let bounds = [lower, upper].map(|values| ScalarValue::iter_to_array(values).ok());
        self.last.replace(Some((id, bounds.clone())));
        Some(bounds)
    }
}

impl PruningStatistics for Containers<'_> {
    fn min_values(&self, column: &Column) -> Option<ArrayRef> {
        let [lower, _] = self.bounds(column)?;
        lower
    }

    fn max_values(&self, column: &Column) -> Option<ArrayRef> {
        let [_, upper] = self.bounds(column)?;
        upper
    }

    fn num_containers(&self) -> usize {
        self.containers.len()
    }

    fn null_counts(&self, column: &Column) -> Option<ArrayRef> {
        let (id, _) = self.column(column)?;
        Some(Arc::new(self.containers.iter().map(|container| container.nulls(id)).collect::<UInt64Array>()))
    }

    fn row_counts(&self) -> Option<ArrayRef> {
        Some(Arc::new(self.containers.iter().map(Container::rows).collect::<UInt64Array>()))
    }

    fn contained(&self, column: &Column, values: &HashSet<ScalarValue>) -> Option<BooleanArray> {
        let (id, _) = self.column(column)?;
        let mut buckets = Buckets::default();
        let contained = |container: &Container<'_>| match container.has_none_of(id, values, &mut buckets) {
            true => Some(false),
            // A bucket holds other values as well.
            false => None,
        };
        Some(self.containers.iter().map(contained).collect())
    }
}

/// The constant that a file's rows have in the column with this id, if the file was written under a spec that partitions
/// by the column itself.
pub fn identity_value(
    metadata: &TableMetadata,
    spec_id: i32,
    file: &iceberg::spec::DataFile,
    id: i32,
    data_type: &DataType,
) -> Result<Option<ScalarValue>> {
    let Some(spec) = metadata.partition_spec_by_id(spec_id) else {
        return Err(Error::corrupt(format!(
            "{} is of partition spec {spec_id}, which does not exist",
            file.file_path()
        )));
    };
    let mut fields = spec.fields().iter().zip(file.partition().fields());
    let found = fields.find(|(field, _)| field.source_id == id && field.transform == Transform::Identity);
    match found {
        None => Ok(None),
        Some((_, None)) => Ok(Some(ScalarValue::try_from(data_type)?)),
        Some((_, Some(Literal::Primitive(literal)))) => match literal_scalar(literal, data_type) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::not_supported(format!(
                "{} cannot be read: the value of its partition is no {data_type}",
                file.file_path()
            ))),
        },
        Some((_, Some(_))) => Err(Error::corrupt(format!("{} has a nested partition value", file.file_path()))),
    }
}
