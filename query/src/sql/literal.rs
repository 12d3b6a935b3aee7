//! A value of an Arrow column as the SQL literal that means it, exactly, of a type that holds it.
//!
//! Integers are written as numbers, whatever their width; what has no literal of its own is a cast of one.

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::sql::sqlparser::ast::{Expr, Value, ValueWithSpan, VisitMut, VisitorMut};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::parser::Parser;
use datafusion::sql::sqlparser::tokenizer::Span;

use crate::error::{Error, Result};

/// The literal of a row of a column, which has the values of this parameter.
///
/// # Errors
/// `NotSupported`, naming the parameter and the type, for values that SQL has no literals for.
pub fn of(column: &ArrayRef, row: usize, parameter: usize) -> Result<Expr> {
    let failed = |e: &dyn std::fmt::Display| Error::invalid(format!("reading the value of parameter {parameter}: {e}"));
    // A column of nothing else has no marks of which are null.
    if column.is_null(row) || *column.data_type() == DataType::Null {
        return null(column.data_type());
    }
    let as_type = |data_type: &DataType| cast(&column.slice(row, 1), data_type).map_err(|e| failed(&e));
    let text = || -> Result<String> {
        let options = FormatOptions::default();
        let formatter = ArrayFormatter::try_new(column.as_ref(), &options).map_err(|e| failed(&e))?;
        Ok(formatter.value(row).to_string())
    };
    let text_as = |data_type: &str| -> Result<Expr> { sql(&format!("CAST('{}' AS {data_type})", text()?)) };
    match column.data_type() {
        DataType::Dictionary(_, values) => of(&as_type(values)?, 0, parameter),
        DataType::RunEndEncoded(_, values) => of(&as_type(values.data_type())?, 0, parameter),
        DataType::Boolean => Ok(plain(Value::Boolean(column.as_boolean().value(row)))),
        integer if integer.is_integer() => sql(&text()?),
        DataType::Float16 | DataType::Float32 => text_as("REAL"),
        DataType::Float64 => text_as("DOUBLE"),
        DataType::Decimal32(digits, scale)
        | DataType::Decimal64(digits, scale)
        | DataType::Decimal128(digits, scale)
        | DataType::Decimal256(digits, scale)
            if *scale >= 0 =>
        {
            text_as(&format!("DECIMAL({digits}, {scale})"))
        }
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            let text = as_type(&DataType::Utf8)?;
            Ok(plain(Value::SingleQuotedString(text.as_string::<i32>().value(0).to_owned())))
        }
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            let bytes = as_type(&DataType::Binary)?;
            let hex = bytes.as_binary::<i32>().value(0).iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(plain(Value::HexStringLiteral(hex)))
        }
        DataType::Date32 => text_as("DATE"),
        DataType::Date64 => of(&as_type(&DataType::Date32)?, 0, parameter),
        DataType::Time32(_) | DataType::Time64(_) => text_as("TIME"),
        of @ (DataType::Timestamp(..) | DataType::Duration(_)) => {
            let number = as_type(&DataType::Int64)?.as_primitive::<Int64Type>().value(0);
            // A name of a time zone may hold what it likes.
            sql(&format!("arrow_cast({number}, '{}')", of.to_string().replace('\'', "''")))
        }
        other => Err(Error::not_supported(format!(
            "parameter {parameter} is a {other}, and values of this type cannot be bound; nothing was done"
        ))),
    }
}

/// NULL of the type that values of a column have as literals: what a statement returns must not depend on which value is missing.
fn null(of: &DataType) -> Result<Expr> {
    let typed = |data_type: &str| sql(&format!("CAST(NULL AS {data_type})"));
    let by_arrow = |of: &DataType| sql(&format!("arrow_cast(NULL, '{}')", of.to_string().replace('\'', "''")));
    match of {
        DataType::Dictionary(_, values) => null(values),
        DataType::RunEndEncoded(_, values) => null(values.data_type()),
        DataType::Boolean => typed("BOOLEAN"),
        integer if integer.is_integer() => typed("BIGINT"),
        DataType::Float16 | DataType::Float32 => typed("REAL"),
        DataType::Float64 => typed("DOUBLE"),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => by_arrow(&DataType::Utf8),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            by_arrow(&DataType::Binary)
        }
        DataType::Date32 | DataType::Date64 => typed("DATE"),
        DataType::Time32(_) | DataType::Time64(_) => typed("TIME"),
        DataType::Timestamp(..) | DataType::Duration(_) => by_arrow(of),
        DataType::Decimal32(digits, scale)
        | DataType::Decimal64(digits, scale)
        | DataType::Decimal128(digits, scale)
        | DataType::Decimal256(digits, scale)
            if *scale >= 0 =>
        {
            typed(&format!("DECIMAL({digits}, {scale})"))
        }
        _ => Ok(plain(Value::Null)),
    }
}

fn plain(value: Value) -> Expr {
    Expr::Value(ValueWithSpan { value, span: Span::empty() })
}

/// An expression of our own, which has no place in the statement.
fn sql(text: &str) -> Result<Expr> {
    let parser = Parser::new(&GenericDialect {}).try_with_sql(text);
    let mut expr = parser
        .and_then(|mut parser| parser.parse_expr())
        .map_err(|e| Error::internal(format!("writing the literal {text}: {e}")))?;
    // Nothing breaks off.
    let _ = expr.visit(&mut Placeless);
    Ok(expr)
}

struct Placeless;

impl VisitorMut for Placeless {
    type Break = ();

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> std::ops::ControlFlow<()> {
        if let Expr::Value(value) = expr {
            value.span = Span::empty();
        }
        std::ops::ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        BinaryArray, Date32Array, Decimal128Array, Float64Array, Int8Array, ListArray, NullArray, StringViewArray,
        TimestampMicrosecondArray, UInt64Array,
    };

    use super::*;
    use crate::error::Kind;

    #[test]
    fn values_are_written_as_sql_has_them() {
        let columns: Vec<(ArrayRef, &str)> = vec![
            (Arc::new(NullArray::new(1)), "NULL"),
            (Arc::new(Int8Array::from(vec![None::<i8>])), "CAST(NULL AS BIGINT)"),
            (Arc::new(Float64Array::from(vec![None::<f64>])), "CAST(NULL AS DOUBLE)"),
            (Arc::new(StringViewArray::from(vec![None::<&str>])), "arrow_cast(NULL, 'Utf8')"),
            (Arc::new(Date32Array::from(vec![None::<i32>])), "CAST(NULL AS DATE)"),
            (
                Arc::new(Decimal128Array::from(vec![None::<i128>]).with_precision_and_scale(5, 2).unwrap()),
                "CAST(NULL AS DECIMAL(5,2))",
            ),
            (Arc::new(Int8Array::from(vec![-5])), "-5"),
            (Arc::new(UInt64Array::from(vec![u64::MAX])), "18446744073709551615"),
            (Arc::new(Float64Array::from(vec![0.1])), "CAST('0.1' AS DOUBLE)"),
            (
                Arc::new(Decimal128Array::from(vec![-125]).with_precision_and_scale(5, 2).unwrap()),
                "CAST('-1.25' AS DECIMAL(5,2))",
            ),
            (Arc::new(StringViewArray::from(vec!["it's \\"])), "'it''s \\'"),
            (Arc::new(BinaryArray::from(vec![&[0u8, 255][..]])), "X'00ff'"),
            (Arc::new(Date32Array::from(vec![1])), "CAST('1970-01-02' AS DATE)"),
        ];
        for (column, written) in columns {
            assert_eq!(of(&column, 0, 1).unwrap().to_string(), written);
        }
        let time: ArrayRef = Arc::new(TimestampMicrosecondArray::from(vec![7]).with_timezone("UTC"));
        assert!(of(&time, 0, 1).unwrap().to_string().starts_with("arrow_cast(7, 'Timestamp("));
        let list: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>([Some([Some(1)])]));
        let error = of(&list, 0, 3).unwrap_err();
        assert!(error.kind == Kind::NotSupported && error.message.contains("parameter 3"), "{error}");
    }
}
