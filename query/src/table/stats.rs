//! What a manifest says about a data file: counts and bounds by column, taken from the Parquet footer that was just
//! written.
//!
//! Bounds are given for columns and parts of structs, not for what is in lists and maps, and only when every row group has them. Those of text may be cut
//! (64 bytes; the upper one rounded up), which the format allows and readers must expect. NaN is no bound; how many
//! NaNs there are is counted while writing ([`NanCounter`]), because the footer does not say.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::buffer::NullBuffer;
use arrow::datatypes::{DataType, Fields, Float32Type, Float64Type};
use iceberg::spec::{
    DataContentType, DataFileBuilder, DataFileFormat, Datum, NestedFieldRef, PrimitiveType, Schema, Type,
};
use parquet::file::metadata::ParquetMetaData;
use parquet::file::statistics::Statistics;

use super::types::field_id;
use crate::error::{Error, Result};

/// Counts NaNs by column.
#[derive(Debug, Default)]
pub struct NanCounter {
    counts: HashMap<i32, u64>,
}

impl NanCounter {
    /// Counts those of `batch`, whose fields carry ids, also in structs.
    pub fn add(&mut self, batch: &RecordBatch) {
        self.add_columns(batch.schema_ref().fields(), batch.columns(), None);
    }

    /// `within` says where the struct is null that these are parts of: what they hold there is nothing.
    fn add_columns(&mut self, fields: &Fields, columns: &[ArrayRef], within: Option<&NullBuffer>) {
        for (field, column) in fields.iter().zip(columns) {
            let nulls = NullBuffer::union(within, column.nulls());
            let counts = |i: usize| nulls.as_ref().is_none_or(|nulls| nulls.is_valid(i));
            let nans = match field.data_type() {
                DataType::Float32 => {
                    let values = column.as_primitive::<Float32Type>().values();
                    values.iter().enumerate().filter(|(i, v)| v.is_nan() && counts(*i)).count()
                }
                DataType::Float64 => {
                    let values = column.as_primitive::<Float64Type>().values();
                    values.iter().enumerate().filter(|(i, v)| v.is_nan() && counts(*i)).count()
                }
                DataType::Struct(parts) => {
                    self.add_columns(parts, column.as_struct().columns(), nulls.as_ref());
                    continue;
                }
                _ => continue,
            };
            if let Some(id) = field_id(field) {
                *self.counts.entry(id).or_default() += nans as u64;
            }
        }
    }
}

/// The ids of columns and of parts of structs.
fn leaves(fields: &[NestedFieldRef], into: &mut HashSet<i32>) {
    for field in fields {
        match field.field_type.as_ref() {
            Type::Primitive(_) => {
                into.insert(field.id);
            }
            Type::Struct(parts) => leaves(parts.fields(), into),
            Type::List(_) | Type::Map(_) => {}
        }
    }
}

/// The manifest's description of a file that was just written, but for what depends on how the table is laid out.
pub fn data_file(
    location: &str,
    size_bytes: u64,
    schema: &Schema,
    footer: &ParquetMetaData,
    nans: NanCounter,
) -> Result<DataFileBuilder> {
    let mut ids = Vec::new();
    for column in footer.file_metadata().schema_descr().columns() {
        let info = column.self_type().get_basic_info();
        if !info.has_id() {
            return Err(Error::internal(format!(
                "{location}: column {} was written without a field id",
                column.path()
            )));
        }
        ids.push(Some(info.id()));
    }
    let mut bounded = HashSet::new();
    leaves(schema.as_struct().fields(), &mut bounded);
    Ok(describe(location, size_bytes, schema, footer, &ids, &bounded, nans))
}

/// The same for any file: `ids` are those of its leaves, in order, if they are of the table; `bounded` the columns and parts of
/// structs of which the file keeps values as lake would.
pub fn describe(
    location: &str,
    size_bytes: u64,
    schema: &Schema,
    footer: &ParquetMetaData,
    ids: &[Option<i32>],
    bounded: &HashSet<i32>,
    nans: NanCounter,
) -> DataFileBuilder {
    let columns = footer.file_metadata().schema_descr().columns();
    let mut sizes: HashMap<i32, u64> = HashMap::new();
    let mut values: HashMap<i32, u64> = HashMap::new();
    let mut nulls: HashMap<i32, u64> = HashMap::new();
    let mut bounds: HashMap<i32, Bounds> = HashMap::new();
    for row_group in footer.row_groups() {
        for ((column, chunk), id) in columns.iter().zip(row_group.columns()).zip(ids) {
            let Some(id) = *id else { continue };
            *sizes.entry(id).or_default() += u64::try_from(chunk.compressed_size()).unwrap_or(0);
            *values.entry(id).or_default() += u64::try_from(chunk.num_values()).unwrap_or(0);
            let statistics = chunk.statistics();
            if column.max_rep_level() == 0
                && let Some(count) = statistics.and_then(Statistics::null_count_opt)
            {
                *nulls.entry(id).or_default() += count;
            }
            if bounded.contains(&id)
                && let Some(field) = schema.field_by_id(id)
                && let Type::Primitive(primitive) = field.field_type.as_ref()
            {
                let all_null =
                    statistics.and_then(Statistics::null_count_opt) == u64::try_from(chunk.num_values()).ok();
                if !all_null {
                    bounds.entry(id).or_default().add(statistics.and_then(|s| chunk_bounds(s, primitive)));
                }
            }
        }
    }
    let (mut lower, mut upper) = (HashMap::new(), HashMap::new());
    for (id, bounds) in bounds {
        if let Bounds::Known(low, high) = bounds {
            lower.insert(id, low);
            upper.insert(id, high);
        }
    }
    let offsets = footer.row_groups().iter().filter_map(|group| {
        let first = group.columns().first()?;
        Some(first.dictionary_page_offset().unwrap_or(i64::MAX).min(first.data_page_offset()))
    });
    let mut described = DataFileBuilder::default();
    described
        .content(DataContentType::Data)
        .file_path(location.to_owned())
        .file_format(DataFileFormat::Parquet)
        .record_count(u64::try_from(footer.file_metadata().num_rows()).unwrap_or(0))
        .file_size_in_bytes(size_bytes)
        .column_sizes(sizes)
        .value_counts(values)
        .null_value_counts(nulls)
        .nan_value_counts(nans.counts)
        .lower_bounds(lower)
        .upper_bounds(upper)
        .split_offsets(Some(offsets.collect()));
    described
}

/// Bounds over several row groups.
#[derive(Debug, Default)]
enum Bounds {
    #[default]
    Empty,
    Known(Datum, Datum),
    Unknown,
}

impl Bounds {
    fn add(&mut self, chunk: Option<(Datum, Datum)>) {
        *self = match (std::mem::take(self), chunk) {
            (Bounds::Empty, Some((low, high))) => Bounds::Known(low, high),
            (Bounds::Known(low, high), Some((l, h))) => {
                let low = if l.partial_cmp(&low) == Some(Ordering::Less) { l } else { low };
                let high = if h.partial_cmp(&high) == Some(Ordering::Greater) { h } else { high };
                Bounds::Known(low, high)
            }
            _ => Bounds::Unknown,
        };
    }
}

fn chunk_bounds(statistics: &Statistics, primitive: &PrimitiveType) -> Option<(Datum, Datum)> {
    Some((
        datum(statistics.min_bytes_opt()?, statistics, primitive)?,
        datum(statistics.max_bytes_opt()?, statistics, primitive)?,
    ))
}

/// Parquet keeps plain values as Iceberg serialises them, but for decimals, which Iceberg wants big-endian.
fn datum(bytes: &[u8], statistics: &Statistics, primitive: &PrimitiveType) -> Option<Datum> {
    let little_endian = matches!(statistics, Statistics::Int32(_) | Statistics::Int64(_));
    let datum = match primitive {
        PrimitiveType::Decimal { .. } if little_endian => {
            let reversed: Vec<u8> = bytes.iter().rev().copied().collect();
            Datum::try_from_bytes(&reversed, primitive.clone())
        }
        _ => Datum::try_from_bytes(bytes, primitive.clone()),
    };
    datum.ok().filter(|datum| !datum.is_nan())
}
