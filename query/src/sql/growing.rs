//! Functions that make much of little.
//!
//! `repeat('a', 2000000000)` or `range(10000000000)` take their result's memory at once, past the pool that statements share and
//! even while a statement is planned, and the process would be killed for it, with all that it serves. So what such a function is
//! about to make of the rows of a batch is reckoned first, from its arguments, and more than an eighth of `memory_limit_bytes` is an
//! error of the statement. It is reckoned low where it is not exact (a character is a byte): nothing that has room is refused. So are
//! the comparisons of `levenshtein`, which go with the product of two lengths, since nothing ends a call: neither deadline nor cancelling.
//!
//! While a statement is planned ([`while_planning`]) a small sum of all that has to do: beyond it a call fails, and the optimiser leaves
//! what fails to where rows are computed. So no large constant is kept in a plan, outside of the memory that is counted. What cannot be
//! left to later (VALUES, an argument of CALL, a DEFAULT) is refused.

use std::cell::Cell;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, StringViewArray};
use arrow::compute::cast;
use arrow::compute::kernels::length::length;
use arrow::datatypes::{DataType, FieldRef, IntervalMonthDayNanoType, IntervalUnit, TimeUnit};
use datafusion::common::{DataFusionError, Result as DfResult, exec_err};
use datafusion::execution::FunctionRegistry;
use datafusion::execution::memory_pool::human_readable_size;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{
    ColumnarValue, Documentation, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
};

/// The part of the memory of all statements that one call may make for one batch.
const SHARE: usize = 8;
/// What all calls may make in one part of a statement's planning, in bytes: as much as the longest statement could have written out.
const WHILE_PLANNING: i128 = super::MAX_STATEMENT_BYTES as i128;
/// Characters that one call may compare with others for one batch: some seconds of a core.
const MOST_COMPARED: i128 = 1 << 32;
/// So many count as a byte while a statement is planned.
const COMPARED_PER_BYTE: i128 = 64;
/// Of a number, a date or a time in a list.
const VALUE_BYTES: i128 = 8;
const DAY_NANOS: i128 = 24 * 60 * 60 * 1_000_000_000;
/// A month's at least.
const MONTH_DAYS: i128 = 28;

tokio::task_local! {
    /// What a part of planning has made, in bytes.
    static MADE: Cell<i128>;
}

/// Does a part of a statement's planning: what its calls make together is limited.
pub(super) async fn while_planning<T>(part: impl Future<Output = T>) -> T {
    MADE.scope(Cell::new(0), part).await
}

/// What a call makes of its arguments, in bytes; or how often it compares.
type Reckon = fn(&Arguments) -> DfResult<i128>;

const FUNCTIONS: [(&str, Reckon); 12] = [
    ("repeat", repeated),
    ("lpad", padded),
    ("rpad", padded),
    ("replace", replaced),
    ("regexp_replace", rewritten),
    ("concat_ws", separated),
    ("array_to_string", joined),
    ("array_repeat", repeated),
    ("array_resize", resized),
    ("range", ranged),
    ("generate_series", ranged),
    (LEVENSHTEIN, compared),
];
const LEVENSHTEIN: &str = "levenshtein";

/// Puts the check before each of these functions.
///
/// # Errors
/// `Internal` if DataFusion has no function of that name.
pub fn limit(template: &mut SessionState, memory_limit_bytes: usize) -> DfResult<()> {
    let most = i128::try_from(memory_limit_bytes / SHARE).unwrap_or(i128::MAX);
    for (name, reckon) in FUNCTIONS {
        let inner = template.udf(name)?;
        let most = if name == LEVENSHTEIN { MOST_COMPARED } else { most };
        template.register_udf(Arc::new(ScalarUDF::from(Limited { inner, reckon: Reckoned(reckon), most })))?;
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Limited {
    inner: Arc<ScalarUDF>,
    reckon: Reckoned,
    /// Bytes, or comparisons.
    most: i128,
}

/// Follows from the function's name: not compared.
#[derive(Clone, Copy)]
struct Reckoned(Reckon);

impl std::fmt::Debug for Reckoned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reckoned")
    }
}

impl PartialEq for Reckoned {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Reckoned {}

impl std::hash::Hash for Reckoned {
    fn hash<H: std::hash::Hasher>(&self, _: &mut H) {}
}

impl ScalarUDFImpl for Limited {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn aliases(&self) -> &[String] {
        self.inner.aliases()
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

    fn coerce_types(&self, arg_types: &[DataType]) -> DfResult<Vec<DataType>> {
        self.inner.coerce_types(arg_types)
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.inner.documentation()
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> DfResult<ColumnarValue> {
        let makes = (self.reckon.0)(&Arguments::of(&args)?)?;
        let compares = self.name() == LEVENSHTEIN;
        let bytes = if compares { makes / COMPARED_PER_BYTE } else { makes };
        let too_much = MADE.try_with(|made| {
            let sum = made.get().saturating_add(bytes);
            let too_much = sum > WHILE_PLANNING;
            if !too_much {
                made.set(sum);
            }
            too_much
        });
        let (most, when) = match too_much {
            Ok(false) => return self.inner.invoke_with_args(args),
            Ok(true) if compares => (WHILE_PLANNING * COMPARED_PER_BYTE, "in all while a statement is planned"),
            Ok(true) => (WHILE_PLANNING, "in all while a statement is planned"),
            Err(_) if makes <= self.most => return self.inner.invoke_with_args(args),
            Err(_) => (self.most, "at a time"),
        };
        let (name, rows) = (self.name(), args.number_rows);
        let readable = |bytes: i128| human_readable_size(usize::try_from(bytes).unwrap_or(usize::MAX));
        Err(DataFusionError::ResourcesExhausted(match compares {
            true => format!("{name}() would compare {makes} times for {rows} rows, and may {most} times {when}"),
            false => {
                let (makes, most) = (readable(makes), readable(most));
                format!("{name}() would make {makes} of {rows} rows, and may make {most} {when}")
            }
        }))
    }
}

/// The arguments of a call, row by row.
struct Arguments {
    /// What is the same for all rows is there once.
    each: Vec<ArrayRef>,
    /// All of them are.
    constant: bool,
    rows: usize,
}

impl Arguments {
    fn of(args: &ScalarFunctionArgs) -> DfResult<Self> {
        let constant = args.args.iter().all(|arg| matches!(arg, ColumnarValue::Scalar(_)));
        let array = |arg: &ColumnarValue| match arg {
            ColumnarValue::Array(array) => Ok(array.clone()),
            ColumnarValue::Scalar(value) => value.to_array(),
        };
        // Of constants one value is made.
        let rows = if constant { 1 } else { args.number_rows };
        Ok(Self { each: args.args.iter().map(array).collect::<DfResult<_>>()?, constant, rows })
    }

    /// One of them in each row. What is no number, or none of this size, counts as NULL.
    fn integers(&self, at: usize) -> DfResult<Each> {
        match self.each.get(at) {
            Some(array) => Each::of(array),
            None => Ok(Each(Int64Array::new_null(1))),
        }
    }

    /// One of them as text.
    fn texts(&self, at: usize) -> DfResult<StringViewArray> {
        match self.each.get(at) {
            Some(array) => Ok(cast(array, &DataType::Utf8View)?.as_string_view().clone()),
            None => Ok(StringViewArray::new_null(1)),
        }
    }

    /// The sum over the rows of what is made of each.
    fn sum(&self, of: impl Fn(usize) -> Option<i128>) -> i128 {
        (0..self.rows).filter_map(of).fold(0, i128::saturating_add)
    }

    /// What one value of an argument takes: exact for text, the mean of others.
    fn bytes(&self, at: usize) -> DfResult<Each> {
        let Some(array) = self.each.get(at) else { return self.integers(at) };
        match array.data_type() {
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Each::of(&length(array.as_ref())?),
            _ => {
                let mean = array.to_data().get_slice_memory_size()? / array.len().max(1);
                Ok(Each(Int64Array::from(vec![i64::try_from(mean).unwrap_or(i64::MAX)])))
            }
        }
    }
}

/// A number for each row, or one for all.
struct Each(Int64Array);

impl Each {
    fn of(array: &ArrayRef) -> DfResult<Self> {
        Ok(Self(cast(array, &DataType::Int64)?.as_primitive().clone()))
    }

    fn at(&self, row: usize) -> Option<i128> {
        let row = if self.0.len() == 1 { 0 } else { row };
        (row < self.0.len() && self.0.is_valid(row)).then(|| i128::from(self.0.value(row)))
    }
}

/// NULL where there is none.
fn text_at(texts: &StringViewArray, row: usize) -> Option<&str> {
    let row = if texts.len() == 1 { 0 } else { row };
    (row < texts.len() && texts.is_valid(row)).then(|| texts.value(row))
}

fn repeated(args: &Arguments) -> DfResult<i128> {
    let (bytes, times) = (args.bytes(0)?, args.integers(1)?);
    Ok(args.sum(|row| Some(bytes.at(row)?.saturating_mul(times.at(row)?.max(0)))))
}

fn padded(args: &Arguments) -> DfResult<i128> {
    let to = args.integers(1)?;
    Ok(args.sum(|row| Some(to.at(row)?.max(0))))
}

/// Exact where it is much.
fn replaced(args: &Arguments) -> DfResult<i128> {
    let (bytes, to) = (args.bytes(0)?, args.bytes(2)?);
    let at_most = args.sum(|row| Some(bytes.at(row)?.saturating_mul(to.at(row)?.max(1))));
    if at_most <= WHILE_PLANNING {
        return Ok(at_most);
    }
    let (text, from) = (args.texts(0)?, args.texts(1)?);
    Ok(args.sum(|row| {
        // Nothing is where it is not.
        let (text, from) = (text_at(&text, row)?, text_at(&from, row).filter(|from| !from.is_empty())?);
        let times = i128::try_from(text.matches(from).count()).unwrap_or(i128::MAX);
        Some(times.saturating_mul(to.at(row)?))
    }))
}

/// Of constants alone, as if everything were replaced: of rows nobody knows before how often something is found.
fn rewritten(args: &Arguments) -> DfResult<i128> {
    if !args.constant {
        return Ok(0);
    }
    let (bytes, to) = (args.bytes(0)?, args.bytes(2)?);
    Ok(args.sum(|row| Some((bytes.at(row)? + 1).saturating_mul(to.at(row)?))))
}

fn separated(args: &Arguments) -> DfResult<i128> {
    let by = args.bytes(0)?;
    let is_there = |array: &&ArrayRef, row: usize| array.is_valid(if array.len() == 1 { 0 } else { row });
    Ok(args.sum(|row| {
        let there = args.each.iter().skip(1).filter(|array| is_there(array, row)).count();
        let between = i128::try_from(there.saturating_sub(1)).unwrap_or(i128::MAX);
        Some(by.at(row)?.saturating_mul(between))
    }))
}

fn joined(args: &Arguments) -> DfResult<i128> {
    let Some(lists) = args.each.first().filter(|lists| matches!(lists.data_type(), DataType::List(_))) else {
        return Ok(0);
    };
    let (values, by) = (Each::of(&length(lists.as_ref())?)?, args.bytes(1)?);
    Ok(args.sum(|row| Some(by.at(row)?.saturating_mul((values.at(row)? - 1).max(0)))))
}

/// How often, of texts of a byte for each character.
fn compared(args: &Arguments) -> DfResult<i128> {
    let (one, other) = (args.bytes(0)?, args.bytes(1)?);
    Ok(args.sum(|row| Some(one.at(row)?.saturating_mul(other.at(row)?))))
}

fn resized(args: &Arguments) -> DfResult<i128> {
    let (to, with) = (args.integers(1)?, args.bytes(2)?);
    Ok(args.sum(|row| Some(to.at(row)?.max(0).saturating_mul(with.at(row).unwrap_or(1).max(1)))))
}

fn ranged(args: &Arguments) -> DfResult<i128> {
    let values = match args.each.first().map(|array| array.data_type()) {
        Some(DataType::Int64) => {
            let (from, to, step) = match args.each.len() {
                1 => (Each(Int64Array::from(vec![0])), args.integers(0)?, Each(Int64Array::from(vec![1]))),
                2 => (args.integers(0)?, args.integers(1)?, Each(Int64Array::from(vec![1]))),
                _ => (args.integers(0)?, args.integers(1)?, args.integers(2)?),
            };
            args.sum(|row| steps(from.at(row)?, to.at(row)?, step.at(row)?))
        }
        Some(of @ (DataType::Date32 | DataType::Date64 | DataType::Timestamp(..))) if args.each.len() == 3 => {
            let nanos = match of {
                DataType::Date32 => DAY_NANOS,
                DataType::Date64 | DataType::Timestamp(TimeUnit::Millisecond, _) => 1_000_000,
                DataType::Timestamp(TimeUnit::Second, _) => 1_000_000_000,
                DataType::Timestamp(TimeUnit::Microsecond, _) => 1_000,
                _ => 1,
            };
            let (from, to) = (in_units(&args.each[0])?, in_units(&args.each[1])?);
            let step = cast(&args.each[2], &DataType::Interval(IntervalUnit::MonthDayNano))?;
            let step = step.as_primitive::<IntervalMonthDayNanoType>();
            let mut lengths = Vec::with_capacity(step.len());
            for step in step {
                let Some(step) = step else {
                    lengths.push(None);
                    continue;
                };
                let parts = [i128::from(step.months), i128::from(step.days), i128::from(step.nanoseconds)];
                // It could go back as far as it goes on, without end.
                if parts.iter().any(|part| *part < 0) && parts.iter().any(|part| *part > 0) {
                    return exec_err!("the step of a series of dates or times goes in one direction, not {step:?}");
                }
                lengths.push(Some((parts[0] * MONTH_DAYS + parts[1]) * DAY_NANOS + parts[2]));
            }
            let length = |row: usize| lengths[if lengths.len() == 1 { 0 } else { row }];
            args.sum(|row| steps(from.at(row)? * nanos, to.at(row)? * nanos, length(row)?))
        }
        _ => 0,
    };
    Ok(values.saturating_mul(VALUE_BYTES))
}

/// Dates and times as the numbers that they are kept as.
fn in_units(array: &ArrayRef) -> DfResult<Each> {
    match array.data_type() {
        DataType::Date32 => Each::of(&cast(array, &DataType::Int32)?),
        _ => Each::of(array),
    }
}

/// How many values there are from one to the other; none if the step is 0, which the function refuses.
fn steps(from: i128, to: i128, step: i128) -> Option<i128> {
    let (span, step) = if step < 0 { (from - to, -step) } else { (to - from, step) };
    (step != 0 && span >= 0).then(|| span / step + 1)
}
