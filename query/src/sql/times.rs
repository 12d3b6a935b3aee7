//! Timestamps of the years 1 to 9999.
//!
//! Iceberg's have microseconds, DataFusion's nanoseconds, which reach from 1677 to 2262 only: what is compared as nanoseconds is an
//! error for a row of another year. So TIMESTAMP without digits has microseconds here ([`Microseconds`]); and what meets such a
//! timestamp (a text, a date, a constant of more digits, as `now()`) gets them, too ([`met`]). What is finer is cut off, as it is where
//! timestamps are stored. A column of nanoseconds stays one. `date_bin` computes in nanoseconds, and has NULL for what has none: here
//! that is an error ([`limit`]).

use std::sync::Arc;

use arrow::array::{Array, ArrayRef};
use arrow::datatypes::{DataType, Field, FieldRef, TimeUnit};
use arrow::util::display::array_value_to_string;
use datafusion::common::{DFSchema, Result as DfResult, exec_err};
use datafusion::execution::FunctionRegistry;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::planner::TypePlanner;
use datafusion::logical_expr::sort_properties::{ExprProperties, SortProperties};
use datafusion::logical_expr::{
    ColumnarValue, Documentation, Expr, ExprSchemable, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl,
    Signature, cast,
};
use datafusion::sql::sqlparser::ast::{DataType as Written, TimezoneInfo};

/// What marks the type of a cast that is written in a statement.
pub const WRITTEN: &str = "timestamp";

const DATE_BIN: &str = "date_bin";

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
}
