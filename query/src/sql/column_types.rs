//! Types of columns as a statement names them: those that DataFusion does not know, and those that would silently become others.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, TimeUnit};
use datafusion::common::{Result as DfResult, not_impl_err};
use datafusion::logical_expr::planner::TypePlanner;
use datafusion::sql::sqlparser::ast::{
    ArrayElemTypeDef, ColumnDef, DataType as Written, ExactNumberInfo, StructField, TimezoneInfo,
};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::tokenizer::{Token, TokenWithSpan, Tokenizer};

use super::clauses::{begins_with, offset};
use super::statement::{normalize, place};
use super::times::Microseconds;
use crate::error::{Error, Result};

/// The zone of TIMESTAMP WITH TIME ZONE, as columns have it.
const UTC: &str = "UTC";

/// `MAP(K, V)`, `BINARY(n)`, and other names of types that DataFusion has.
#[derive(Debug)]
pub struct MoreTypes {
    times: Microseconds,
}

impl Default for MoreTypes {
    fn default() -> Self {
        Self { times: Microseconds { zone: Some(UTC.into()) } }
    }
}

impl TypePlanner for MoreTypes {
    fn plan_type_field(&self, written: &Written) -> DfResult<Option<FieldRef>> {
        let timestamp = Written::Timestamp(None, TimezoneInfo::None);
        let plain = match written {
            Written::Datetime(None) => &timestamp,
            other => other,
        };
        if let Some(timestamp) = self.times.plan_type_field(plain)? {
            return Ok(Some(timestamp));
        }
        let is_more = matches!(
            written,
            Written::Map(..)
                | Written::Binary(_)
                | Written::Varbinary(_)
                | Written::Blob(_)
                | Written::CharacterVarying(_)
                | Written::CharVarying(_)
                // DataFusion leaves the zone out where the session has none.
                | Written::Timestamp(_, TimezoneInfo::Tz | TimezoneInfo::WithTimeZone)
        );
        Ok(if is_more { Some(Arc::new(Field::new("", arrow_type(written)?, true))) } else { None })
    }
}

/// What a type is that stands in a map, or that DataFusion does not know.
fn arrow_type(written: &Written) -> DfResult<DataType> {
    let part =
        |name: &str, of: &Written| -> DfResult<FieldRef> { Ok(Arc::new(Field::new(name, arrow_type(of)?, true))) };
    Ok(match written {
        Written::Boolean | Written::Bool => DataType::Boolean,
        Written::TinyInt(_) => DataType::Int8,
        Written::SmallInt(_) | Written::Int2(_) => DataType::Int16,
        Written::Int(_) | Written::Integer(_) | Written::Int4(_) => DataType::Int32,
        Written::BigInt(_) | Written::Int8(_) => DataType::Int64,
        Written::Float(_) | Written::Real | Written::Float4 => DataType::Float32,
        Written::Double(ExactNumberInfo::None) | Written::DoublePrecision | Written::Float8 => DataType::Float64,
        Written::Decimal(digits) | Written::Numeric(digits) => match decimal(digits) {
            Some(decimal) => decimal,
            None => return not_impl_err!("Unsupported SQL type {written}: a decimal has 1 to 38 digits"),
        },
        Written::Varchar(_)
        | Written::CharacterVarying(_)
        | Written::CharVarying(_)
        | Written::Text
        | Written::String(_) => DataType::Utf8View,
        Written::Binary(Some(bytes)) => match i32::try_from(*bytes) {
            Ok(bytes @ 1..) => DataType::FixedSizeBinary(bytes),
            _ => return not_impl_err!("Unsupported SQL type {written}: its size is that of a value in bytes"),
        },
        Written::Binary(None) | Written::Varbinary(_) | Written::Blob(_) | Written::Bytea => DataType::Binary,
        Written::Date => DataType::Date32,
        Written::Time(None, TimezoneInfo::None | TimezoneInfo::WithoutTimeZone) => {
            DataType::Time64(TimeUnit::Nanosecond)
        }
        Written::Datetime(None) => DataType::Timestamp(TimeUnit::Microsecond, None),
        Written::Timestamp(digits, zone) => {
            let unit = match digits {
                Some(0) => TimeUnit::Second,
                Some(3) => TimeUnit::Millisecond,
                None | Some(6) => TimeUnit::Microsecond,
                Some(9) => TimeUnit::Nanosecond,
                _ => return not_impl_err!("Unsupported SQL type {written}: a second has 0, 3, 6 or 9 digits"),
            };
            let has_zone = matches!(zone, TimezoneInfo::Tz | TimezoneInfo::WithTimeZone);
            DataType::Timestamp(unit, has_zone.then(|| UTC.into()))
        }
        Written::Array(ArrayElemTypeDef::AngleBracket(of) | ArrayElemTypeDef::SquareBracket(of, None)) => {
            DataType::List(part(Field::LIST_FIELD_DEFAULT_NAME, of)?)
        }
        Written::Struct(fields, _) => {
            let field = |(i, field): (usize, &StructField)| {
                let name = field.field_name.as_ref().map_or_else(|| format!("c{i}"), normalize);
                part(&name, &field.field_type)
            };
            DataType::Struct(fields.iter().enumerate().map(field).collect::<DfResult<_>>()?)
        }
        Written::Map(key, value) => {
            let key = Arc::new(Field::new("key", arrow_type(key)?, false));
            let entry = DataType::Struct(vec![key, part("value", value)?].into());
            DataType::Map(Arc::new(Field::new("entries", entry, false)), false)
        }
        other => return not_impl_err!("Unsupported SQL type {other}"),
    })
}

/// As DataFusion has it: 38 digits, 10 of them behind the point, where nothing is said.
fn decimal(digits: &ExactNumberInfo) -> Option<DataType> {
    let (precision, scale) = match *digits {
        ExactNumberInfo::None => (38, 10),
        ExactNumberInfo::Precision(precision) => (precision, 0),
        ExactNumberInfo::PrecisionAndScale(precision, scale) => (precision, scale),
    };
    let (precision, scale) = (u8::try_from(precision).ok()?, i8::try_from(scale).ok()?);
    let is_one = (1..=38).contains(&precision) && (0..=38).contains(&scale) && scale.unsigned_abs() <= precision;
    is_one.then_some(DataType::Decimal128(precision, scale))
}

/// # Errors
/// `NotSupported`, with what to write instead, for a type that the column would not have. A longest length of text that is not kept
/// harms little, and many tools write one; a length that all values are to have, or a sign that none may have, would be wrong in silence.
pub fn check(column: &ColumnDef) -> Result<()> {
    match lost(&column.data_type) {
        None => Ok(()),
        Some((written, why)) => Err(Error::not_supported(format!(
            "column {}: {written} is not supported, as {why}; nothing was done",
            column.name
        ))
        .at(place(&column.name))),
    }
}

fn lost(written: &Written) -> Option<(&Written, &'static str)> {
    let why = match written {
        Written::Array(
            ArrayElemTypeDef::AngleBracket(of)
            | ArrayElemTypeDef::SquareBracket(of, _)
            | ArrayElemTypeDef::Parenthesis(of),
        ) => return lost(of),
        Written::Map(key, value) => return lost(key).or_else(|| lost(value)),
        Written::Struct(fields, _) => return fields.iter().find_map(|field| lost(&field.field_type)),
        Written::Char(_) | Written::Character(_) => "Iceberg has no text of a fixed length: use VARCHAR",
        Written::Uuid => "columns of Iceberg's uuid are read and not made: use VARCHAR, or BINARY(16)",
        Written::Timestamp(Some(9), _) => "columns have microseconds: use TIMESTAMP",
        Written::TinyIntUnsigned(_)
        | Written::UTinyInt
        | Written::Int2Unsigned(_)
        | Written::SmallIntUnsigned(_)
        | Written::USmallInt
        | Written::MediumIntUnsigned(_) => "Iceberg has no integers without a sign: use INT",
        Written::IntUnsigned(_) | Written::Int4Unsigned(_) | Written::IntegerUnsigned(_) => {
            "Iceberg has no integers without a sign: use BIGINT"
        }
        Written::BigIntUnsigned(_)
        | Written::Int8Unsigned(_)
        | Written::UBigInt
        | Written::Unsigned
        | Written::UnsignedInteger => "Iceberg has no integers without a sign: use BIGINT, or DECIMAL(20, 0)",
        _ => return None,
    };
    Some((written, why))
}

/// `MAP<K, V>` where columns are defined, of which the parser knows `MAP(K, V)` alone. Each character stays in its place.
pub fn maps_in_parentheses(sql: String) -> String {
    if !begins_with(&sql, &["CREATE", "ALTER"]) {
        return sql;
    }
    // What is no SQL at all the parser tells best.
    let Ok(tokens) = Tokenizer::new(&GenericDialect {}, &sql).tokenize_with_location() else { return sql };
    let tokens: Vec<&TokenWithSpan> =
        tokens.iter().filter(|token| !matches!(token.token, Token::Whitespace(_))).collect();
    // Of each that is open: whether it is a map's.
    let mut open = Vec::new();
    let mut found = Vec::new();
    let mut before = Keyword::NoKeyword;
    for token in tokens {
        let at = || offset(&sql, token.span.start);
        match &token.token {
            // The query has expressions.
            Token::Word(word) if word.keyword == Keyword::AS && open.is_empty() => break,
            Token::Lt if before == Keyword::MAP => {
                found.push((at(), "("));
                open.push(true);
            }
            Token::Lt if matches!(before, Keyword::STRUCT | Keyword::ARRAY) => open.push(false),
            Token::Gt if open.pop() == Some(true) => found.push((at(), ")")),
            Token::ShiftRight => {
                for place in [at(), at() + 1] {
                    if open.pop() == Some(true) {
                        found.push((place, ")"));
                    }
                }
            }
            _ => {}
        }
        before = match &token.token {
            Token::Word(word) => word.keyword,
            _ => Keyword::NoKeyword,
        };
    }
    let mut text = sql;
    for (at, bracket) in found {
        text.replace_range(at..=at, bracket);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_written_as_the_parser_has_them() {
        for (sql, said) in [
            ("CREATE TABLE t (m MAP<VARCHAR, INT>)", "CREATE TABLE t (m MAP(VARCHAR, INT))"),
            (
                "create table t (é map < INT, Map<INT, STRUCT<a ARRAY<INT>>>>, n INT)",
                "create table t (é map ( INT, Map(INT, STRUCT<a ARRAY<INT>>)), n INT)",
            ),
            (
                "ALTER TABLE t ADD COLUMN s STRUCT<m MAP<INT, INT>>",
                "ALTER TABLE t ADD COLUMN s STRUCT<m MAP(INT, INT)>",
            ),
        ] {
            assert_eq!(maps_in_parentheses(sql.to_owned()), said);
        }
        for untouched in
            ["SELECT map<1 FROM t", "CREATE TABLE t AS SELECT map<1, a>2 FROM s", "CREATE TABLE t (\"map\" INT)"]
        {
            assert_eq!(maps_in_parentheses(untouched.to_owned()), untouched);
        }
    }
}
