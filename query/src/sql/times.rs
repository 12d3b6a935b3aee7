//! Timestamps of the years 1 to 9999.
//!
//! Iceberg's have microseconds, DataFusion's nanoseconds, which reach from 1677 to 2262 only: what is compared as nanoseconds is an
//! error for a row of another year. So TIMESTAMP without digits has microseconds here ([`Microseconds`]); and what meets such a
//! timestamp (a text, a date, a constant of more digits, as `now()`) gets them, too ([`met`]). What is finer is cut off, as it is where
//! timestamps are stored. A column of nanoseconds stays one, and is compared with others in decimals ([`exactly`]). `date_bin` computes
//! in nanoseconds, and has NULL for what has none: here that is an error ([`limit`]).
//!
//! A text that is written out beside a timestamp or a date is one, also in CASE and `coalesce`; a column of texts there is refused, as
//! in PostgreSQL ([`take_texts`]).

use std::sync::Arc;

use arrow::array::{Array, ArrayRef};
use arrow::datatypes::{DataType, Field, FieldRef, TimeUnit};
use arrow::util::display::array_value_to_string;
use datafusion::common::{DFSchema, Result as DfResult, ScalarValue, exec_err, plan_err};
use datafusion::execution::FunctionRegistry;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::planner::TypePlanner;
use datafusion::logical_expr::sort_properties::{ExprProperties, SortProperties};
use datafusion::logical_expr::{
    ColumnarValue, Documentation, Expr, ExprSchemable, Operator, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF,
    ScalarUDFImpl, Signature, binary_expr, cast, lit,
};
use datafusion::sql::sqlparser::ast::{DataType as Written, TimezoneInfo};

use crate::words::sql_type;

/// What marks the type of a cast that is written in a statement.
pub const WRITTEN: &str = "timestamp";

const DATE_BIN: &str = "date_bin";
/// Of a count of microseconds.
const MICROS_DIGITS: u8 = 19;
/// Of a product of that and 1000.
const NANOS_DIGITS: u8 = 24;

/// What TIMESTAMP means.
#[derive(Debug)]
pub struct Microseconds {
    /// WITH TIME ZONE.
    pub zone: Option<Arc<str>>,
}

impl TypePlanner for Microseconds {
    fn plan_type_field(&self, written: &Written) -> DfResult<Option<FieldRef>> {
        let Written::Timestamp(None, zone) = written else { return Ok(None) };
        let zone = match zone {
            TimezoneInfo::WithTimeZone | TimezoneInfo::Tz => self.zone.clone(),
            TimezoneInfo::None | TimezoneInfo::WithoutTimeZone => None,
        };
        Ok(Some(Arc::new(Field::new(WRITTEN, DataType::Timestamp(TimeUnit::Microsecond, zone), true))))
    }
}

/// A cast that is written: of an integer, which counts seconds.
pub fn written(of: &mut Expr, to: &mut FieldRef, schema: &DFSchema) {
    if let (DataType::Timestamp(_, zone), Ok(DataType::Int64)) = (to.data_type(), of.get_type(schema)) {
        *of = cast(std::mem::take(of), DataType::Timestamp(TimeUnit::Second, zone.clone()));
    }
    *to = Arc::new(Field::new("", to.data_type().clone(), true));
}

/// The types that values of these become which are to have one in common, if one of them is a timestamp of microseconds: each if it is
/// another one. `is_constant`: which are the same for all rows.
pub fn met(types: &[Option<DataType>], is_constant: impl Fn(usize) -> bool) -> Vec<Option<DataType>> {
    let micros = types.iter().flatten().find_map(|of| match of {
        DataType::Timestamp(TimeUnit::Microsecond, zone) => Some(zone),
        _ => None,
    });
    let finer = |(place, of): (usize, &Option<DataType>)| {
        matches!(of, Some(DataType::Timestamp(TimeUnit::Nanosecond, _))) && !is_constant(place)
    };
    let Some(zone) = micros.filter(|_| !types.iter().enumerate().any(finer)) else { return vec![None; types.len()] };
    let each = types.iter().map(|of| match of.as_ref()? {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Date32 | DataType::Date64 => {
            Some(DataType::Timestamp(TimeUnit::Microsecond, zone.clone()))
        }
        DataType::Timestamp(TimeUnit::Nanosecond, zone) => {
            Some(DataType::Timestamp(TimeUnit::Microsecond, zone.clone()))
        }
        _ => None,
    });
    each.collect()
}

/// Whether values of these types are compared with a column of nanoseconds and have no nanoseconds themselves: neither type holds
/// the other one's values. `is_constant` as in [`met`]: a constant gets the nanoseconds that it has.
pub fn exactly(types: &[Option<DataType>], is_constant: impl Fn(usize) -> bool) -> bool {
    let mut zones: Vec<Option<&str>> = Vec::new();
    let (mut finest, mut coarser) = (false, false);
    for (place, of) in types.iter().enumerate() {
        match of {
            Some(DataType::Timestamp(unit, zone)) => {
                zones.push(zone.as_deref());
                match unit {
                    TimeUnit::Nanosecond => finest |= !is_constant(place),
                    _ => coarser |= !is_constant(place),
                }
            }
            Some(DataType::Date32 | DataType::Date64) => {
                zones.push(None);
                coarser |= !is_constant(place);
            }
            Some(DataType::Null) => {}
            _ => return false,
        }
    }
    let is_utc = |zone: &Option<&str>| matches!(zone, None | Some("UTC" | "+00:00"));
    let one_clock = zones.iter().all(is_utc) || zones.windows(2).all(|two| two[0] == two[1]);
    finest && coarser && one_clock
}

/// Makes decimals of these, which count nanoseconds.
pub fn in_nanoseconds<'a>(parts: impl IntoIterator<Item = &'a mut Expr>, types: &[Option<DataType>]) {
    let counted = |of: Expr, digits: u8| cast(cast(of, DataType::Int64), DataType::Decimal128(digits, 0));
    for (part, of) in parts.into_iter().zip(types) {
        let zone = match of {
            Some(DataType::Timestamp(TimeUnit::Nanosecond, _)) => {
                *part = counted(std::mem::take(part), NANOS_DIGITS);
                continue;
            }
            Some(DataType::Timestamp(_, zone)) => zone.clone(),
            Some(DataType::Date32 | DataType::Date64) => None,
            _ => continue,
        };
        let micros = cast(std::mem::take(part), DataType::Timestamp(TimeUnit::Microsecond, zone));
        let nanos_each = lit(ScalarValue::Decimal128(Some(1000), 4, 0));
        *part = binary_expr(counted(micros, MICROS_DIGITS), Operator::Multiply, nanos_each);
    }
}

/// What a text is beside values of these types: a timestamp if one of them is, else a date.
pub fn moment(types: &[Option<DataType>]) -> Option<DataType> {
    let of_kind = |is: fn(&DataType) -> bool| types.iter().flatten().find(|of| is(of));
    let micros = of_kind(|of| matches!(of, DataType::Timestamp(TimeUnit::Microsecond, _)));
    let other = || of_kind(|of| matches!(of, DataType::Timestamp(..)));
    let date = || of_kind(|of| matches!(of, DataType::Date32 | DataType::Date64));
    micros.or_else(other).or_else(date).cloned()
}

pub fn is_text(of: &DataType) -> bool {
    matches!(of, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

/// Takes the texts that are written out among these, which are to have a type in common, for the timestamps or dates that they are
/// beside. `place` is what they are in.
///
/// # Errors
/// `Plan`: one is none, or is not written out.
pub fn take_texts(place: &str, parts: Vec<&mut Expr>, schema: &DFSchema) -> DfResult<()> {
    let types: Vec<Option<DataType>> = parts.iter().map(|part| part.get_type(schema).ok()).collect();
    let Some(to) = moment(&types) else { return Ok(()) };
    for (part, _) in parts.into_iter().zip(&types).filter(|(_, of)| of.as_ref().is_some_and(is_text)) {
        let Expr::Literal(text, _) = &*part else {
            return plan_err!(
                "{} and {part}, which is VARCHAR, are together in {place}: cast one of them",
                sql_type(&to)
            );
        };
        let Ok(taken) = text.cast_to(&to) else {
            return plan_err!("Cannot cast string '{text}' to {}, which it is beside in {place}", sql_type(&to));
        };
        *part = lit(taken);
    }
    Ok(())
}

/// The arguments of a function as it takes them: the origin of `date_bin` has nanoseconds, or its other timestamp would have to.
pub fn arguments(function: &str, args: &mut [Expr], schema: &DFSchema) {
    if let (DATE_BIN, [_, _, origin]) = (function, args)
        && let Ok(DataType::Timestamp(TimeUnit::Microsecond, zone)) = origin.get_type(schema)
    {
        *origin = cast(std::mem::take(origin), DataType::Timestamp(TimeUnit::Nanosecond, zone));
    }
}

/// Makes an error of what `date_bin` has no result for.
///
/// # Errors
/// `Internal` if DataFusion has no such function.
pub fn limit(template: &mut SessionState) -> DfResult<()> {
    let inner = template.udf(DATE_BIN)?;
    template.register_udf(Arc::new(ScalarUDF::from(Binned { inner })))?;
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Binned {
    inner: Arc<ScalarUDF>,
}

impl ScalarUDFImpl for Binned {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn signature(&self) -> &Signature {
        self.inner.signature()
    }

    fn return_type(&self, arg_types: &[DataType]) -> DfResult<DataType> {
        self.inner.return_type(arg_types)
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs<'_>) -> DfResult<FieldRef> {
        self.inner.return_field_from_args(args)
    }

    fn output_ordering(&self, inputs: &[ExprProperties]) -> DfResult<SortProperties> {
        self.inner.output_ordering(inputs)
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.inner.documentation()
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> DfResult<ColumnarValue> {
        let given = args.args.clone();
        let binned = self.inner.invoke_with_args(args)?;
        let rows = match &binned {
            ColumnarValue::Scalar(value) if value.is_null() => 1,
            ColumnarValue::Array(values) if values.null_count() > 0 => values.len(),
            _ => return Ok(binned),
        };
        let values = binned.to_array(rows)?;
        let given = given.iter().map(|arg| arg.to_array(rows)).collect::<DfResult<Vec<ArrayRef>>>()?;
        let lost = (0..rows).find(|row| values.is_null(*row) && given.iter().all(|arg| arg.is_valid(*row)));
        match (lost, given.get(1)) {
            (Some(row), Some(of)) => exec_err!(
                "date_bin() has no result for {}: it computes with the years 1678 to 2261",
                array_value_to_string(of, row)?
            ),
            _ => Ok(binned),
        }
    }
}

#[cfg(test)]
mod tests {
    use datafusion::logical_expr::col;

    use super::*;

    #[test]
    fn microseconds_stay_what_they_are() {
        let zone = Some(Arc::<str>::from("UTC"));
        let (micros, nanos) =
            (DataType::Timestamp(TimeUnit::Microsecond, None), DataType::Timestamp(TimeUnit::Nanosecond, zone.clone()));
        let types = [Some(micros.clone()), Some(DataType::Utf8), Some(DataType::Date32), Some(nanos), None];
        let with_zone = DataType::Timestamp(TimeUnit::Microsecond, zone);
        assert_eq!(met(&types, |_| true), [None, Some(micros.clone()), Some(micros), Some(with_zone), None]);
        assert!(met(&types, |_| false).iter().all(Option::is_none), "a column of nanoseconds stays one");
        assert!(met(&types[1..], |_| true).iter().all(Option::is_none), "there are no microseconds");
    }

    #[test]
    fn what_has_no_nanoseconds_is_compared_in_decimals() {
        let at = |unit, zone: Option<&str>| Some(DataType::Timestamp(unit, zone.map(Arc::from)));
        let (micros, nanos) = (at(TimeUnit::Microsecond, None), at(TimeUnit::Nanosecond, None));
        let (utc, berlin) = (at(TimeUnit::Nanosecond, Some("UTC")), at(TimeUnit::Nanosecond, Some("Europe/Berlin")));
        let date = || Some(DataType::Date32);
        for (types, expected) in [
            (vec![micros.clone(), nanos.clone()], true),
            (vec![date(), nanos.clone(), Some(DataType::Null)], true),
            (vec![micros.clone(), utc], true),
            (vec![micros.clone(), berlin], false),
            (vec![nanos.clone(), nanos.clone()], false),
            (vec![micros.clone(), date()], false),
            (vec![micros.clone(), nanos.clone(), Some(DataType::Utf8)], false),
            (vec![micros.clone(), nanos.clone(), None], false),
        ] {
            assert_eq!(exactly(&types, |_| false), expected, "{types:?}");
        }
        let types = [micros, nanos];
        assert!((0..2).all(|constant| !exactly(&types, |place| place == constant)));
        let mut parts = [col("a"), col("b")];
        in_nanoseconds(&mut parts, &types);
        let fields = types.iter().zip(["a", "b"]);
        let fields: Vec<Field> = fields.map(|(of, name)| Field::new(name, of.clone().unwrap(), true)).collect();
        let schema = DFSchema::try_from(arrow::datatypes::Schema::new(fields)).unwrap();
        for part in &parts {
            assert_eq!(part.get_type(&schema).unwrap(), DataType::Decimal128(NANOS_DIGITS, 0), "{part}");
        }
    }

    #[test]
    fn texts_beside_timestamps_are_written_out() {
        let fields = vec![
            Field::new("at", DataType::Timestamp(TimeUnit::Microsecond, None), true),
            Field::new("day", DataType::Date32, true),
            Field::new("text", DataType::Utf8, true),
        ];
        let schema = DFSchema::try_from(arrow::datatypes::Schema::new(fields)).unwrap();
        let taken = |mut parts: Vec<Expr>| {
            take_texts("CASE", parts.iter_mut().collect(), &schema).map(|()| parts).map_err(|e| e.to_string())
        };
        let at = lit(ScalarValue::TimestampMicrosecond(Some(-62_135_596_800_000_000), None));
        assert_eq!(taken(vec![col("at"), col("day"), lit("0001-01-01")]).unwrap(), [col("at"), col("day"), at]);
        assert_eq!(taken(vec![lit("1970-01-02"), col("day")]).unwrap()[0], lit(ScalarValue::Date32(Some(1))));
        let others = vec![col("text"), lit("abc")];
        assert_eq!(taken(others.clone()).unwrap(), others, "no timestamp");
        assert!(
            taken(vec![col("at"), lit("abc")]).unwrap_err().contains("'abc' to TIMESTAMP, which it is beside in CASE")
        );
        assert!(taken(vec![col("text"), col("day")]).unwrap_err().contains("DATE and text, which is VARCHAR"));
    }
}
