//! Iceberg's bounds and counts as DataFusion's statistics.

use arrow::datatypes::{DataType, Schema, TimeUnit};
use datafusion::common::stats::Precision;
use datafusion::common::{ColumnStatistics, ScalarValue, Statistics};
use iceberg::spec::{DataFile, Datum, PrimitiveLiteral, PrimitiveType};

use crate::table::types::field_id;

/// What the manifest says about a file, for the table's columns.
pub fn file_statistics(file: &DataFile, schema: &Schema) -> Statistics {
    let columns = schema.fields().iter().map(|field| match field_id(field) {
        Some(id) => column_statistics(file, id, field.data_type()),
        None => ColumnStatistics::new_unknown(),
    });
    Statistics {
        num_rows: count(file.record_count()),
        total_byte_size: Precision::Inexact(usize::try_from(file.file_size_in_bytes()).unwrap_or(usize::MAX)),
        column_statistics: columns.collect(),
    }
}

fn count(value: u64) -> Precision<usize> {
    usize::try_from(value).map_or(Precision::Absent, Precision::Exact)
}

fn column_statistics(file: &DataFile, id: i32, data_type: &DataType) -> ColumnStatistics {
    let mut statistics = ColumnStatistics::new_unknown();
    // A column that the file does not have has no counts either: nothing is known here.
    if let Some(nulls) = file.null_value_counts().get(&id) {
        statistics.null_count = count(*nulls);
    }
    if !may_use_bounds(file, id, data_type) {
        return statistics;
    }
    let bound = |datum: Option<&Datum>| match datum.and_then(|datum| scalar(datum, data_type)) {
        // Text and binary bounds may be cut: good for pruning, not for answers.
        Some(value) if is_text(data_type) => Precision::Inexact(value),
        Some(value) => Precision::Exact(value),
        None => Precision::Absent,
    };
    statistics.min_value = bound(file.lower_bounds().get(&id));
    statistics.max_value = bound(file.upper_bounds().get(&id));
    statistics
}

/// Bounds leave NaN out, so those of a float column count only where there is none.
fn may_use_bounds(file: &DataFile, id: i32, data_type: &DataType) -> bool {
    !is_float(data_type) || is_nan_free(file, id)
}

/// Whether the column certainly holds no NaN.
pub fn is_nan_free(file: &DataFile, id: i32) -> bool {
    file.nan_value_counts().get(&id) == Some(&0)
}

pub fn is_float(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Float16 | DataType::Float32 | DataType::Float64)
}

fn is_text(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Utf8View | DataType::Utf8 | DataType::BinaryView | DataType::Binary)
}

/// A bound as a value of the column's current type. `None` where the bound was written for another type and there is no
/// exact conversion: then nothing is known.
fn scalar(datum: &Datum, data_type: &DataType) -> Option<ScalarValue> {
    use PrimitiveLiteral as Literal;
    Some(match (datum.literal(), datum.data_type(), data_type) {
        (Literal::Boolean(v), _, DataType::Boolean) => ScalarValue::Boolean(Some(*v)),
        (Literal::Int(v), PrimitiveType::Int, DataType::Int32) => ScalarValue::Int32(Some(*v)),
        (Literal::Int(v), PrimitiveType::Int, DataType::Int64) => ScalarValue::Int64(Some(i64::from(*v))),
        (Literal::Long(v), PrimitiveType::Long, DataType::Int64) => ScalarValue::Int64(Some(*v)),
        (Literal::Float(v), _, DataType::Float32) => ScalarValue::Float32(Some(v.0)),
        (Literal::Float(v), _, DataType::Float64) => ScalarValue::Float64(Some(f64::from(v.0))),
        (Literal::Double(v), _, DataType::Float64) => ScalarValue::Float64(Some(v.0)),
        (Literal::Int(v), PrimitiveType::Date, DataType::Date32) => ScalarValue::Date32(Some(*v)),
        (Literal::Long(v), PrimitiveType::Time, DataType::Time64(TimeUnit::Microsecond)) => {
            ScalarValue::Time64Microsecond(Some(*v))
        }
        (
            Literal::Long(v),
            PrimitiveType::Timestamp | PrimitiveType::Timestamptz,
            DataType::Timestamp(TimeUnit::Microsecond, zone),
        ) => ScalarValue::TimestampMicrosecond(Some(*v), zone.clone()),
        (
            Literal::Long(v),
            PrimitiveType::TimestampNs | PrimitiveType::TimestamptzNs,
            DataType::Timestamp(TimeUnit::Nanosecond, zone),
        ) => ScalarValue::TimestampNanosecond(Some(*v), zone.clone()),
        (Literal::Int128(v), PrimitiveType::Decimal { scale, .. }, DataType::Decimal128(p, s))
            if i64::from(*scale) == i64::from(*s) =>
        {
            ScalarValue::Decimal128(Some(*v), *p, *s)
        }
        (Literal::String(v), _, DataType::Utf8View) => ScalarValue::Utf8View(Some(v.clone())),
        (Literal::Binary(v), PrimitiveType::Binary, DataType::BinaryView) => ScalarValue::BinaryView(Some(v.clone())),
        (Literal::Binary(v), PrimitiveType::Fixed(n), DataType::FixedSizeBinary(size))
            if i64::try_from(*n).ok()? == i64::from(*size) =>
        {
            ScalarValue::FixedSizeBinary(*size, Some(v.clone()))
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_become_values_of_the_column() {
        assert_eq!(scalar(&Datum::int(5), &DataType::Int64), Some(ScalarValue::Int64(Some(5))), "widened since");
        assert_eq!(scalar(&Datum::date(5), &DataType::Date32), Some(ScalarValue::Date32(Some(5))));
        assert_eq!(scalar(&Datum::string("x"), &DataType::Utf8View), Some(ScalarValue::Utf8View(Some("x".into()))));
        assert_eq!(scalar(&Datum::date(5), &DataType::Int64), None);
    }
}
