//! Numbers that become integers are rounded, halves away from zero, and decimals of fewer digits behind the point likewise (which
//! Arrow does by itself).

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Float32Array, Float64Array};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Float32Type, Float64Type};
use arrow::error::ArrowError;

/// Whether values of a type can have digits behind the point.
pub fn has_fraction(of: &DataType) -> bool {
    match of {
        DataType::Float32 | DataType::Float64 => true,
        DataType::Decimal32(_, scale)
        | DataType::Decimal64(_, scale)
        | DataType::Decimal128(_, scale)
        | DataType::Decimal256(_, scale) => *scale > 0,
        _ => false,
    }
}

/// The type of what is rounded: 9.9 becomes 10, of a digit more before the point.
pub fn whole(of: &DataType) -> DataType {
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
///
/// # Errors
/// For what is no number, and cannot be cast to its own type.
pub fn rounded(of: &ArrayRef) -> Result<ArrayRef, ArrowError> {
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
    use arrow::array::Decimal128Array;

    use super::*;

    #[test]
    fn halves_go_away_from_zero() {
        let floats: ArrayRef = Arc::new(Float64Array::from(vec![Some(0.5), Some(-1.5), Some(2.4), None]));
        let rounded_floats: ArrayRef = Arc::new(Float64Array::from(vec![Some(1.0), Some(-2.0), Some(2.0), None]));
        assert_eq!(&rounded(&floats).unwrap(), &rounded_floats);
        let decimals = |values: Vec<Option<i128>>, precision, scale| -> ArrayRef {
            Arc::new(Decimal128Array::from(values).with_precision_and_scale(precision, scale).unwrap())
        };
        let (of, to) = (vec![Some(95), Some(-5), Some(14), None], vec![Some(10), Some(-1), Some(1), None]);
        assert_eq!(&rounded(&decimals(of, 2, 1)).unwrap(), &decimals(to, 2, 0));
        assert_eq!(&rounded(&decimals(vec![Some(5)], 1, 1)).unwrap(), &decimals(vec![Some(1)], 1, 0));
    }
}
