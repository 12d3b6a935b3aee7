//! Numbers that become integers are rounded, halves away from zero, also within lists, structs and maps; and decimals of fewer
//! digits behind the point likewise (which Arrow does by itself).

use std::sync::Arc;

use arrow::array::{Array, ArrayData, ArrayRef, AsArray, Float32Array, Float64Array, make_array};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, FieldRef, Float32Type, Float64Type};
use arrow::error::ArrowError;
use datafusion::common::{Result as DfResult, ScalarValue};

/// Whether there are numbers in values of a type that a cast to another one has to round.
pub fn is_rounded(of: &DataType, to: &DataType) -> bool {
    match of.is_nested() {
        true => parts(of).into_iter().zip(targets(of, to)).any(|(of, to)| to.is_some_and(|to| is_rounded(of, to))),
        false => to.is_integer() && has_fraction(of),
    }
}

/// The same values, of which a cast to `to` has to cut none: what becomes an integer is rounded, and all else is as it was.
///
/// # Errors
/// For what is no number, and cannot be cast to its own type.
pub fn rounded(of: &ArrayRef, to: &DataType) -> Result<ArrayRef, ArrowError> {
    if !is_rounded(of.data_type(), to) {
        return Ok(of.clone());
    }
    if !of.data_type().is_nested() {
        return whole_numbers(of);
    }
    let data = of.to_data();
    let mut parts = Vec::with_capacity(data.child_data().len());
    for (part, to) in data.child_data().iter().zip(targets(of.data_type(), to)) {
        parts.push(match to {
            Some(to) => rounded(&make_array(part.clone()), to)?.to_data(),
            None => part.clone(),
        });
    }
    let data_type = with_parts(of.data_type(), &parts);
    Ok(make_array(data.into_builder().data_type(data_type).child_data(parts).build()?))
}

/// The value as one of another type.
///
/// # Errors
/// If it does not fit that.
pub fn cast(value: &ScalarValue, to: &DataType) -> DfResult<ScalarValue> {
    match is_rounded(&value.data_type(), to) {
        true => ScalarValue::try_from_array(&rounded(&value.to_array()?, to)?, 0)?.cast_to(to),
        false => value.cast_to(to),
    }
}

/// The types that a nested one consists of.
fn parts(of: &DataType) -> Vec<&DataType> {
    match of {
        DataType::Struct(fields) => fields.iter().map(|field| field.data_type()).collect(),
        DataType::Map(part, _) => vec![part.data_type()],
        of => element(of).into_iter().collect(),
    }
}

/// What a cast makes of each of its parts: of a struct's, the one of that name, or else the one in that place.
fn targets<'t>(of: &DataType, to: &'t DataType) -> Vec<Option<&'t DataType>> {
    match (of, to) {
        (DataType::Struct(of), DataType::Struct(to)) => {
            let target = |(place, part): (usize, &FieldRef)| {
                let named = to.iter().find(|to| to.name() == part.name());
                named.or_else(|| to.get(place)).map(|to| to.data_type())
            };
            of.iter().enumerate().map(target).collect()
        }
        (DataType::Map(..), DataType::Map(to, _)) => vec![Some(to.data_type())],
        (of, to) => element(of).map(|_| element(to)).into_iter().collect(),
    }
}

/// Of a list.
fn element(of: &DataType) -> Option<&DataType> {
    match of {
        DataType::List(element)
        | DataType::LargeList(element)
        | DataType::ListView(element)
        | DataType::LargeListView(element)
        | DataType::FixedSizeList(element, _) => Some(element.data_type()),
        _ => None,
    }
}

/// A nested type of other parts.
fn with_parts(of: &DataType, parts: &[ArrayData]) -> DataType {
    let part = |field: &FieldRef, part: &ArrayData| -> FieldRef {
        Arc::new(field.as_ref().clone().with_data_type(part.data_type().clone()))
    };
    match (of, parts) {
        (DataType::Struct(fields), parts) => {
            DataType::Struct(fields.iter().zip(parts).map(|(field, of)| part(field, of)).collect())
        }
        (DataType::Map(field, sorted), [of]) => DataType::Map(part(field, of), *sorted),
        (DataType::List(field), [of]) => DataType::List(part(field, of)),
        (DataType::LargeList(field), [of]) => DataType::LargeList(part(field, of)),
        (DataType::ListView(field), [of]) => DataType::ListView(part(field, of)),
        (DataType::LargeListView(field), [of]) => DataType::LargeListView(part(field, of)),
        (DataType::FixedSizeList(field, length), [of]) => DataType::FixedSizeList(part(field, of), *length),
        (other, _) => other.clone(),
    }
}

/// Whether values of a type can have digits behind the point.
fn has_fraction(of: &DataType) -> bool {
    match of {
        DataType::Float32 | DataType::Float64 => true,
        DataType::Decimal32(_, scale)
        | DataType::Decimal64(_, scale)
        | DataType::Decimal128(_, scale)
        | DataType::Decimal256(_, scale) => *scale > 0,
        _ => false,
    }
}

/// The type of a number that is rounded: 9.9 becomes 10, of a digit more before the point.
fn whole(of: &DataType) -> DataType {
    let digits = |precision: u8, scale: i8| precision.saturating_sub(scale.unsigned_abs()).saturating_add(1);
    match *of {
        DataType::Decimal32(precision, scale) if scale > 0 => DataType::Decimal32(digits(precision, scale), 0),
        DataType::Decimal64(precision, scale) if scale > 0 => DataType::Decimal64(digits(precision, scale), 0),
        DataType::Decimal128(precision, scale) if scale > 0 => DataType::Decimal128(digits(precision, scale), 0),
        DataType::Decimal256(precision, scale) if scale > 0 => DataType::Decimal256(digits(precision, scale), 0),
        ref other => other.clone(),
    }
}

/// The same numbers without digits behind the point, of type [`whole`].
fn whole_numbers(of: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    match of.data_type() {
        DataType::Float64 => {
            let rounded: Float64Array = of.as_primitive::<Float64Type>().unary(f64::round);
            Ok(Arc::new(rounded))
        }
        DataType::Float32 => {
            let rounded: Float32Array = of.as_primitive::<Float32Type>().unary(f32::round);
            Ok(Arc::new(rounded))
        }
        other => cast_with_options(of, &whole(other), &strict),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Decimal128Array, Int64Array, ListArray, StructArray};
    use arrow::buffer::{NullBuffer, OffsetBuffer};
    use arrow::datatypes::{Field, Int32Type};

    use super::*;

    fn decimals(values: Vec<Option<i128>>, precision: u8, scale: i8) -> ArrayRef {
        Arc::new(Decimal128Array::from(values).with_precision_and_scale(precision, scale).unwrap())
    }

    #[test]
    fn halves_go_away_from_zero() {
        let rounded = |of: &ArrayRef| rounded(of, &DataType::Int64).unwrap();
        let floats: ArrayRef = Arc::new(Float64Array::from(vec![Some(0.5), Some(-1.5), Some(2.4), None]));
        let rounded_floats: ArrayRef = Arc::new(Float64Array::from(vec![Some(1.0), Some(-2.0), Some(2.0), None]));
        assert_eq!(&rounded(&floats), &rounded_floats);
        let (of, to) = (vec![Some(95), Some(-5), Some(14), None], vec![Some(10), Some(-1), Some(1), None]);
        assert_eq!(&rounded(&decimals(of, 2, 1)), &decimals(to, 2, 0));
        assert_eq!(&rounded(&decimals(vec![Some(5)], 1, 1)), &decimals(vec![Some(1)], 1, 0));
    }

    /// A struct of these parts, three of them.
    fn structs(parts: Vec<(&str, ArrayRef)>) -> ArrayRef {
        let fields = parts.iter().map(|(name, part)| Arc::new(Field::new(*name, part.data_type().clone(), true)));
        let nulls = NullBuffer::from(vec![true, false, true]);
        let fields = fields.collect();
        Arc::new(StructArray::new(fields, parts.into_iter().map(|(_, part)| part).collect(), Some(nulls)))
    }

    #[test]
    fn what_becomes_an_integer_within_others_is_rounded_and_nothing_else() {
        let tenths = || decimals(vec![Some(15), Some(25), Some(-4)], 2, 1);
        let of = structs(vec![("a", tenths()), ("b", tenths()), ("c", Arc::new(Int64Array::from(vec![1, 2, 3])))]);
        // By name, whatever the order.
        let to = structs(vec![
            ("b", Arc::new(Float64Array::from(vec![0.0; 3])) as ArrayRef),
            ("a", Arc::new(Int64Array::from(vec![0; 3]))),
            ("c", Arc::new(Int64Array::from(vec![0; 3]))),
        ]);
        let expected = structs(vec![
            ("a", decimals(vec![Some(2), Some(3), Some(0)], 2, 0)),
            ("b", tenths()),
            ("c", Arc::new(Int64Array::from(vec![1, 2, 3]))),
        ]);
        assert_eq!(&rounded(&of, to.data_type()).unwrap(), &expected);
        // In a list, of which a part is looked at.
        let list = |of: &ArrayRef, lengths: [usize; 2]| -> ArrayRef {
            let element = Arc::new(Field::new("element", of.data_type().clone(), true));
            Arc::new(ListArray::new(element, OffsetBuffer::from_lengths(lengths), of.clone(), None))
        };
        let integers: ArrayRef =
            Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([Some([Some(0)]), Some([Some(0)])]));
        let found = rounded(&list(&tenths(), [1, 2]).slice(1, 1), integers.data_type()).unwrap();
        assert_eq!(&found, &list(&decimals(vec![Some(2), Some(3), Some(0)], 2, 0), [1, 2]).slice(1, 1));
        let structs_of = list(&of, [2, 1]);
        let to = list(&to, [2, 1]);
        assert_eq!(&rounded(&structs_of, to.data_type()).unwrap(), &list(&expected, [2, 1]));
        assert!(!is_rounded(integers.data_type(), integers.data_type()));
        assert!(!is_rounded(&DataType::Float64, integers.data_type()), "that is no cast");
    }
}
