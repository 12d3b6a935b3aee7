//! Iceberg's values, bounds and counts as DataFusion's.

use arrow::datatypes::{DataType, Schema, TimeUnit};
use datafusion::common::stats::Precision;
use datafusion::common::{ColumnStatistics, ScalarValue, Statistics};
use iceberg::spec::{DataFile, Datum, PrimitiveLiteral, PrimitiveType, Transform};

use crate::storage::packed::Packed;
use crate::table::types::field_id;

/// Bounds of text are cut to no fewer characters than this by any writer.
const CUT_TEXT_CHARS: usize = 16;
/// Text and nested columns have about so many times the bytes before they are compressed.
pub const COMPRESSION: u64 = 3;
const DAY_SECONDS: i64 = 86_400;
const HOUR_SECONDS: i64 = 3_600;

/// Between which values a column's lie, as far as it is known.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Bounds {
    pub lower: Option<ScalarValue>,
    pub upper: Option<ScalarValue>,
}

/// What the manifest says about a file, for the table's columns. How many bytes there are is said by column, as of DataFusion's own
/// Parquet files: a query reads some of them, so that the file's size would be too large for it, and too small once it is decoded.
/// Which side of a join is the smaller one hangs on that.
pub fn file_statistics(file: &DataFile, schema: &Schema) -> Statistics {
    let columns = schema.fields().iter().map(|field| match field_id(field) {
        Some(id) => column_statistics(file, id, field.data_type()),
        None => ColumnStatistics::new_unknown(),
    });
    Statistics {
        num_rows: count(file.record_count()),
        total_byte_size: Precision::Absent,
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
    let bounds = file_bounds(file, id, data_type);
    let precision = |bound| match bound {
        // Text and binary bounds may be cut, and the sign of a zero may be lost: good for pruning, not for answers.
        Some(value) if is_text(data_type) || is_float_zero(&value) => Precision::Inexact(value),
        Some(value) => Precision::Exact(value),
        None => Precision::Absent,
    };
    statistics.min_value = precision(bounds.lower);
    statistics.max_value = precision(bounds.upper);
    statistics.byte_size = match data_type.primitive_width() {
        Some(width) => count(file.record_count()).multiply(&Precision::Exact(width)),
        None => match file.column_sizes().get(&id) {
            Some(bytes) => count(bytes.saturating_mul(COMPRESSION)).to_inexact(),
            None => Precision::Absent,
        },
    };
    statistics
}

/// The file's bounds of the column with this id, as values of the column's type.
pub fn file_bounds(file: &DataFile, id: i32, data_type: &DataType) -> Bounds {
    // Bounds leave NaN out, so those of a float column count only where there is none.
    if is_float(data_type) && !is_nan_free(file, id) {
        return Bounds::default();
    }
    let bound = |datum: Option<&Datum>| datum.and_then(|datum| scalar(datum.data_type(), datum.literal(), data_type));
    sound(bound(file.lower_bounds().get(&id)), bound(file.upper_bounds().get(&id)))
}

/// The same of an entry of a manifest.
pub fn packed_bounds(entries: &Packed, at: usize, id: i32, data_type: &DataType) -> Bounds {
    if is_float(data_type) && entries.nan_count(at, id) != Some(0) {
        return Bounds::default();
    }
    let bound = |known: Option<(&PrimitiveType, PrimitiveLiteral)>| known.and_then(|(of, l)| scalar(of, &l, data_type));
    sound(bound(entries.lower(at, id)), bound(entries.upper(at, id)))
}

/// The bounds, if they bound something.
fn sound(lower: Option<ScalarValue>, upper: Option<ScalarValue>) -> Bounds {
    // Both cut, and the upper one not rounded up: then it bounds nothing.
    let are_cut = lower == upper && lower.as_ref().is_some_and(may_be_cut);
    // No values are between them: they are damaged, and DataFusion takes them for a defect of its own.
    let are_crossed = matches!((&lower, &upper), (Some(lower), Some(upper)) if lower > upper);
    match are_cut || are_crossed {
        true => Bounds::default(),
        false => Bounds { lower, upper },
    }
}

fn may_be_cut(value: &ScalarValue) -> bool {
    match value {
        ScalarValue::Utf8View(Some(text)) => text.chars().count() >= CUT_TEXT_CHARS,
        ScalarValue::BinaryView(Some(bytes)) => bytes.len() >= CUT_TEXT_CHARS,
        _ => false,
    }
}

fn is_float_zero(value: &ScalarValue) -> bool {
    match value {
        ScalarValue::Float32(Some(value)) => *value == 0.0,
        ScalarValue::Float64(Some(value)) => *value == 0.0,
        _ => false,
    }
}

/// Whether the column certainly holds no NaN.
pub fn is_nan_free(file: &DataFile, id: i32) -> bool {
    file.nan_value_counts().get(&id) == Some(&0)
}

pub fn is_float(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Float16 | DataType::Float32 | DataType::Float64)
}

pub fn is_text(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Utf8View | DataType::Utf8 | DataType::BinaryView | DataType::Binary)
}

/// A bound as a value of the column's current type. `None` where the bound was written for another type and there is no
/// exact conversion: then nothing is known.
fn scalar(of: &PrimitiveType, literal: &PrimitiveLiteral, data_type: &DataType) -> Option<ScalarValue> {
    use PrimitiveType as Primitive;
    let fits = match (of, data_type) {
        (Primitive::Boolean, DataType::Boolean)
        | (Primitive::Int, DataType::Int32 | DataType::Int64)
        | (Primitive::Long, DataType::Int64)
        | (Primitive::Float, DataType::Float32 | DataType::Float64)
        | (Primitive::Double, DataType::Float64)
        | (Primitive::Date, DataType::Date32)
        | (Primitive::Time, DataType::Time64(TimeUnit::Microsecond))
        | (Primitive::Timestamp | Primitive::Timestamptz, DataType::Timestamp(TimeUnit::Microsecond, _))
        | (Primitive::TimestampNs | Primitive::TimestamptzNs, DataType::Timestamp(TimeUnit::Nanosecond, _))
        | (Primitive::String, DataType::Utf8View)
        | (Primitive::Binary, DataType::BinaryView)
        | (Primitive::Uuid | Primitive::Fixed(_), DataType::FixedSizeBinary(_)) => true,
        (Primitive::Decimal { scale, .. }, DataType::Decimal128(_, s)) => i64::from(*scale) == i64::from(*s),
        _ => false,
    };
    fits.then(|| literal_scalar(literal, data_type)).flatten()
}

/// A literal as a value of `data_type`, or of the type that it was promoted to. `None` where it is none.
pub fn literal_scalar(literal: &PrimitiveLiteral, data_type: &DataType) -> Option<ScalarValue> {
    use PrimitiveLiteral as Literal;
    Some(match (literal, data_type) {
        (Literal::Boolean(v), DataType::Boolean) => ScalarValue::Boolean(Some(*v)),
        (Literal::Int(v), DataType::Int32) => ScalarValue::Int32(Some(*v)),
        (Literal::Int(v), DataType::Int64) => ScalarValue::Int64(Some(i64::from(*v))),
        (Literal::Long(v), DataType::Int64) => ScalarValue::Int64(Some(*v)),
        (Literal::Float(v), DataType::Float32) => ScalarValue::Float32(Some(v.0)),
        (Literal::Float(v), DataType::Float64) => ScalarValue::Float64(Some(f64::from(v.0))),
        (Literal::Double(v), DataType::Float64) => ScalarValue::Float64(Some(v.0)),
        (Literal::Int(v), DataType::Date32) => ScalarValue::Date32(Some(*v)),
        (Literal::Long(v), DataType::Time64(TimeUnit::Microsecond)) => ScalarValue::Time64Microsecond(Some(*v)),
        (Literal::Long(v), DataType::Timestamp(unit, _)) => moment(*v, *unit, data_type)?,
        (Literal::Int128(v), DataType::Decimal128(p, s)) => ScalarValue::Decimal128(Some(*v), *p, *s),
        (Literal::String(v), DataType::Utf8View) => ScalarValue::Utf8View(Some(v.clone())),
        (Literal::String(v), DataType::Utf8) => ScalarValue::Utf8(Some(v.clone())),
        (Literal::Binary(v), DataType::BinaryView) => ScalarValue::BinaryView(Some(v.clone())),
        (Literal::Binary(v), DataType::Binary) => ScalarValue::Binary(Some(v.clone())),
        (Literal::Binary(v), DataType::FixedSizeBinary(size)) if usize::try_from(*size) == Ok(v.len()) => {
            ScalarValue::FixedSizeBinary(*size, Some(v.clone()))
        }
        (Literal::UInt128(v), DataType::FixedSizeBinary(16)) => {
            ScalarValue::FixedSizeBinary(16, Some(v.to_be_bytes().to_vec()))
        }
        _ => return None,
    })
}

fn moment(value: i64, unit: TimeUnit, data_type: &DataType) -> Option<ScalarValue> {
    let DataType::Timestamp(_, zone) = data_type else { return None };
    match unit {
        TimeUnit::Microsecond => Some(ScalarValue::TimestampMicrosecond(Some(value), zone.clone())),
        TimeUnit::Nanosecond => Some(ScalarValue::TimestampNanosecond(Some(value), zone.clone())),
        TimeUnit::Second | TimeUnit::Millisecond => None,
    }
}

/// The least and the greatest value that `transform` makes `value` of, as values of the column's type. `None` where that
/// is not known.
pub fn range_of_partition_value(
    transform: Transform,
    value: &PrimitiveLiteral,
    data_type: &DataType,
) -> Option<(Option<ScalarValue>, Option<ScalarValue>)> {
    match (transform, value) {
        (Transform::Identity, value) => {
            let value = literal_scalar(value, data_type)?;
            Some((Some(value.clone()), Some(value)))
        }
        (Transform::Year | Transform::Month | Transform::Day | Transform::Hour, PrimitiveLiteral::Int(value)) => {
            let from = |seconds| time_of(seconds, data_type);
            let next = value.checked_add(1).and_then(|next| from(first_second(transform, next)?));
            // Files are there in which the last second of a day before 1970 is in the next day, as the iceberg crate has it.
            let is_late = transform == Transform::Day && *value <= 0 && matches!(data_type, DataType::Timestamp(..));
            let first = first_second(transform, *value).and_then(|first| from(first - i64::from(is_late)));
            Some((
                first.and_then(|units| time_scalar(units, data_type)),
                next.and_then(|units| time_scalar(units.checked_sub(1)?, data_type)),
            ))
        }
        (Transform::Truncate(width), value) => {
            let last = |value: i128| value.checked_add(i128::from(width))?.checked_sub(1);
            let is_whole = |length: usize| u32::try_from(length).is_ok_and(|length| length < width);
            let upper = match value {
                PrimitiveLiteral::Int(v) => i32::try_from(last(i128::from(*v))?).ok().map(PrimitiveLiteral::Int),
                PrimitiveLiteral::Long(v) => i64::try_from(last(i128::from(*v))?).ok().map(PrimitiveLiteral::Long),
                PrimitiveLiteral::Int128(v) => last(*v).map(PrimitiveLiteral::Int128),
                PrimitiveLiteral::String(v) if is_whole(v.chars().count()) => Some(value.clone()),
                PrimitiveLiteral::String(v) => after_prefix(v).map(PrimitiveLiteral::String),
                PrimitiveLiteral::Binary(v) if is_whole(v.len()) => Some(value.clone()),
                PrimitiveLiteral::Binary(_) => None,
                _ => return None,
            };
            Some((literal_scalar(value, data_type), upper.and_then(|upper| literal_scalar(&upper, data_type))))
        }
        _ => None,
    }
}

/// A text behind all that begin with `prefix`.
fn after_prefix(prefix: &str) -> Option<String> {
    let mut chars: Vec<char> = prefix.chars().collect();
    while let Some(last) = chars.pop() {
        // There are no characters between the two.
        let next = if last == '\u{d7ff}' { Some('\u{e000}') } else { char::from_u32(u32::from(last) + 1) };
        if let Some(next) = next {
            chars.push(next);
            return Some(chars.into_iter().collect());
        }
    }
    None
}

/// When the year, month, day or hour numbered `value` begins, in seconds since 1970.
fn first_second(transform: Transform, value: i32) -> Option<i64> {
    let value = i64::from(value);
    match transform {
        Transform::Year => Some(days_to_month(value.checked_mul(12)?) * DAY_SECONDS),
        Transform::Month => Some(days_to_month(value) * DAY_SECONDS),
        Transform::Day => Some(value * DAY_SECONDS),
        Transform::Hour => Some(value * HOUR_SECONDS),
        _ => None,
    }
}

/// Days from the beginning of 1970 to the month that is so many months later, in the proleptic Gregorian calendar.
/// After "chrono-Compatible Low-Level Date Algorithms" by Howard Hinnant.
fn days_to_month(months: i64) -> i64 {
    let (year, month) = (1970 + months.div_euclid(12), months.rem_euclid(12) + 1);
    // Years begin in March here, so that a leap day is a year's last.
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// A time in the units of a column.
fn time_of(seconds: i64, data_type: &DataType) -> Option<i64> {
    match data_type {
        DataType::Date32 => Some(seconds.div_euclid(DAY_SECONDS)),
        DataType::Timestamp(TimeUnit::Microsecond, _) => seconds.checked_mul(1_000_000),
        DataType::Timestamp(TimeUnit::Nanosecond, _) => seconds.checked_mul(1_000_000_000),
        _ => None,
    }
}

fn time_scalar(units: i64, data_type: &DataType) -> Option<ScalarValue> {
    match data_type {
        DataType::Date32 => Some(ScalarValue::Date32(Some(i32::try_from(units).ok()?))),
        DataType::Timestamp(unit, _) => moment(units, *unit, data_type),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use iceberg::spec::{DataContentType, DataFileBuilder, DataFileFormat, Struct};

    use super::*;

    #[test]
    fn bounds_become_values_of_the_column() {
        let scalar = |datum: &Datum, data_type| scalar(datum.data_type(), datum.literal(), data_type);
        assert_eq!(scalar(&Datum::int(5), &DataType::Int64), Some(ScalarValue::Int64(Some(5))), "widened since");
        assert_eq!(scalar(&Datum::date(5), &DataType::Date32), Some(ScalarValue::Date32(Some(5))));
        assert_eq!(scalar(&Datum::string("x"), &DataType::Utf8View), Some(ScalarValue::Utf8View(Some("x".into()))));
        assert_eq!(scalar(&Datum::date(5), &DataType::Int64), None);
        assert_eq!(scalar(&Datum::fixed([1; 8]), &DataType::FixedSizeBinary(16)), None, "cut");
    }

    fn file(lower: Datum, upper: Datum, nans: Option<u64>) -> DataFile {
        DataFileBuilder::default()
            .content(DataContentType::Data)
            .file_path("a".to_owned())
            .file_format(DataFileFormat::Parquet)
            .partition(Struct::empty())
            .record_count(2)
            .file_size_in_bytes(1)
            .lower_bounds([(1, lower)].into())
            .upper_bounds([(1, upper)].into())
            .null_value_counts([(1, 0)].into())
            .nan_value_counts(nans.map(|nans| (1, nans)).into_iter().collect())
            .build()
            .unwrap()
    }

    #[test]
    fn bounds_that_look_like_one_value_and_need_not_be_are_none() {
        let long = || Datum::string("0123456789abcdef");
        assert_eq!(file_bounds(&file(long(), long(), None), 1, &DataType::Utf8View), Bounds::default());
        let crossed = file(Datum::long(3), Datum::long(2), None);
        assert_eq!(file_bounds(&crossed, 1, &DataType::Int64), Bounds::default());
        let short = file_bounds(&file(Datum::string("x"), Datum::string("x"), None), 1, &DataType::Utf8View);
        assert_eq!(short.lower, Some(ScalarValue::Utf8View(Some("x".into()))));
        let statistics = column_statistics(&file(Datum::string("x"), Datum::string("x"), None), 1, &DataType::Utf8View);
        assert!(statistics.min_value.is_exact() == Some(false), "text is never exact");
    }

    #[test]
    fn bytes_are_told_by_column() {
        let told = file(Datum::long(1), Datum::long(2), None);
        let statistics = |data_type| column_statistics(&told, 1, &data_type).byte_size;
        assert_eq!(statistics(DataType::Int64), Precision::Exact(16));
        assert_eq!(statistics(DataType::Utf8View), Precision::Absent, "the manifest has no sizes");
        let mut sized = DataFileBuilder::default();
        sized
            .file_path("a".to_owned())
            .content(DataContentType::Data)
            .file_format(DataFileFormat::Parquet)
            .record_count(2)
            .file_size_in_bytes(1000)
            .column_sizes([(1, 10)].into());
        let sized = sized.build().unwrap();
        assert_eq!(column_statistics(&sized, 1, &DataType::Utf8View).byte_size, Precision::Inexact(30));
        assert_eq!(file_statistics(&sized, &Schema::empty()).total_byte_size, Precision::Absent);
    }

    #[test]
    fn bounds_of_floats_count_only_without_nan() {
        let bounds = |nans| file_bounds(&file(Datum::double(1.0), Datum::double(2.0), nans), 1, &DataType::Float64);
        assert_eq!(bounds(None), Bounds::default());
        assert_eq!(bounds(Some(1)), Bounds::default());
        assert_eq!(bounds(Some(0)).upper, Some(ScalarValue::Float64(Some(2.0))));
    }

    #[test]
    fn partition_values_are_ranges() {
        let days = |days: i32| Some(ScalarValue::Date32(Some(days)));
        let range = |transform, value, data_type: &DataType| {
            range_of_partition_value(transform, &PrimitiveLiteral::Int(value), data_type).unwrap()
        };
        assert_eq!(range(Transform::Year, 0, &DataType::Date32), (days(0), days(364)));
        assert_eq!(range(Transform::Year, 30, &DataType::Date32), (days(10_957), days(11_322)), "2000, a leap year");
        assert_eq!(range(Transform::Month, 1, &DataType::Date32), (days(31), days(58)), "February");
        assert_eq!(range(Transform::Month, -1, &DataType::Date32), (days(-31), days(-1)), "December 1969");
        assert_eq!(range(Transform::Day, 5, &DataType::Date32), (days(5), days(5)));
        let utc = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
        let at = |micros| Some(ScalarValue::TimestampMicrosecond(Some(micros), Some("UTC".into())));
        assert_eq!(range(Transform::Hour, -1, &utc), (at(-3_600_000_000), at(-1)));
        assert_eq!(range(Transform::Day, 1, &utc), (at(86_400_000_000), at(172_799_999_999)));
        assert_eq!(range(Transform::Day, 0, &utc), (at(-1_000_000), at(86_399_999_999)), "as some writers round");
        assert_eq!(range(Transform::Day, 0, &DataType::Date32), (days(0), days(0)));
        let int = |v| Some(ScalarValue::Int32(Some(v)));
        assert_eq!(range(Transform::Truncate(10), -10, &DataType::Int32), (int(-10), int(-1)));
        let text = |v: &str| Some(ScalarValue::Utf8View(Some(v.into())));
        let truncated = |v: &str| {
            let value = PrimitiveLiteral::String(v.into());
            range_of_partition_value(Transform::Truncate(3), &value, &DataType::Utf8View).unwrap()
        };
        assert_eq!(truncated("abc"), (text("abc"), text("abd")));
        assert_eq!(truncated("ab\u{10ffff}"), (text("ab\u{10ffff}"), text("ac")));
        assert_eq!(truncated("\u{10ffff}\u{10ffff}\u{10ffff}").1, None);
        assert_eq!(truncated("ab"), (text("ab"), text("ab")));
        assert_eq!(range_of_partition_value(Transform::Bucket(4), &PrimitiveLiteral::Int(1), &DataType::Int32), None);
    }
}
