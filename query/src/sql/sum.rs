//! SUM of integers, which does not wrap either ([`super::overflow`]).
//!
//! DataFusion adds integers up in 64 bits, and wraps. Here they are added up in 128, which no table can fill, and the sum is an error
//! where it does not fit its type. So whether it is one does not depend on the order that rows come in.
//!
//! The adding is DataFusion's own, as of decimals without a scale; so is the sum of everything else.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BooleanArray, Decimal128Array};
use arrow::datatypes::{DECIMAL128_MAX_PRECISION, DataType, Decimal128Type, FieldRef, Int64Type, UInt64Type};
use datafusion::common::{DataFusionError, Result as DfResult, ScalarValue};
use datafusion::functions_aggregate::sum::sum_udaf;
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::utils::AggregateOrderSensitivity;
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, Documentation, EmitTo, GroupsAccumulator, ReversedUDAF,
    SetMonotonicity, Signature,
};

use crate::error::Error;

/// What integers are added up in.
const WIDE: DataType = DataType::Decimal128(DECIMAL128_MAX_PRECISION, 0);

/// See the module. It takes the place of DataFusion's.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct CheckedSum {
    inner: Arc<AggregateUDF>,
}

impl Default for CheckedSum {
    fn default() -> Self {
        Self { inner: sum_udaf() }
    }
}

fn is_integer(of: &DataType) -> bool {
    matches!(of, DataType::Int64 | DataType::UInt64)
}

fn widened(field: &FieldRef) -> FieldRef {
    match is_integer(field.data_type()) {
        true => Arc::new(field.as_ref().clone().with_data_type(WIDE)),
        false => field.clone(),
    }
}

fn wide_args(args: AccumulatorArgs<'_>) -> AccumulatorArgs<'_> {
    AccumulatorArgs { return_field: widened(&args.return_field), ..args }
}

impl AggregateUDFImpl for CheckedSum {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn signature(&self) -> &Signature {
        self.inner.signature()
    }

    fn return_type(&self, types: &[DataType]) -> DfResult<DataType> {
        self.inner.return_type(types)
    }

    fn accumulator(&self, args: AccumulatorArgs) -> DfResult<Box<dyn Accumulator>> {
        let to = args.return_type().clone();
        let inner = self.inner.accumulator(wide_args(args))?;
        match is_integer(&to) {
            true => Ok(Box::new(Wide { inner, to })),
            false => Ok(inner),
        }
    }

    fn create_sliding_accumulator(&self, args: AccumulatorArgs) -> DfResult<Box<dyn Accumulator>> {
        let to = args.return_type().clone();
        match (args.is_distinct, is_integer(&to)) {
            (true, true) if to == DataType::Int64 => Ok(Box::<SlidingDistinct>::default()),
            (false, true) => {
                let inner = self.inner.create_sliding_accumulator(wide_args(args))?;
                Ok(Box::new(Wide { inner, to }))
            }
            _ => self.inner.create_sliding_accumulator(args),
        }
    }

    fn state_fields(&self, args: StateFieldsArgs) -> DfResult<Vec<FieldRef>> {
        self.inner.state_fields(StateFieldsArgs { return_field: widened(&args.return_field), ..args })
    }

    fn groups_accumulator_supported(&self, args: AccumulatorArgs) -> bool {
        self.inner.groups_accumulator_supported(args)
    }

    fn create_groups_accumulator(&self, args: AccumulatorArgs) -> DfResult<Box<dyn GroupsAccumulator>> {
        let to = args.return_type().clone();
        let inner = self.inner.create_groups_accumulator(wide_args(args))?;
        match is_integer(&to) {
            true => Ok(Box::new(WideGroups { inner, to })),
            false => Ok(inner),
        }
    }

    fn reverse_expr(&self) -> ReversedUDAF {
        ReversedUDAF::Identical
    }

    fn order_sensitivity(&self) -> AggregateOrderSensitivity {
        AggregateOrderSensitivity::Insensitive
    }

    fn set_monotonicity(&self, data_type: &DataType) -> SetMonotonicity {
        self.inner.inner().set_monotonicity(data_type)
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.inner.documentation()
    }
}

/// Integers, as they are added up.
fn wide(values: &[ArrayRef]) -> DfResult<Vec<ArrayRef>> {
    let wide = |values: &ArrayRef| -> DfResult<ArrayRef> {
        let wide: Decimal128Array = match values.data_type() {
            DataType::Int64 => values.as_primitive::<Int64Type>().unary(i128::from),
            DataType::UInt64 => values.as_primitive::<UInt64Type>().unary(i128::from),
            other => return Err(DataFusionError::Internal(format!("a sum of {other} as one of integers"))),
        };
        Ok(Arc::new(wide.with_data_type(WIDE)))
    };
    values.iter().map(wide).collect()
}

/// Sums, as they are answered.
fn narrow(sums: &ArrayRef, to: &DataType) -> DfResult<ArrayRef> {
    let sums = sums.as_primitive::<Decimal128Type>();
    let narrow: ArrayRef = match to {
        DataType::UInt64 => Arc::new(sums.try_unary::<_, UInt64Type, _>(unsigned)?),
        _ => Arc::new(sums.try_unary::<_, Int64Type, _>(signed)?),
    };
    Ok(narrow)
}

fn unsigned(sum: i128) -> DfResult<u64> {
    u64::try_from(sum).map_err(|_| too_large(sum, "BIGINT UNSIGNED"))
}

fn signed(sum: i128) -> DfResult<i64> {
    i64::try_from(sum).map_err(|_| too_large(sum, "BIGINT"))
}

fn too_large(sum: i128, data_type: &str) -> DataFusionError {
    let why = format!("the sum {sum} does not fit {data_type}; sum(CAST(... AS DECIMAL(38, 0))) has room for it");
    Error::invalid(why).into_datafusion()
}

/// A sum of integers.
#[derive(Debug)]
struct Wide {
    inner: Box<dyn Accumulator>,
    to: DataType,
}

impl Accumulator for Wide {
    fn update_batch(&mut self, values: &[ArrayRef]) -> DfResult<()> {
        self.inner.update_batch(&wide(values)?)
    }

    fn evaluate(&mut self) -> DfResult<ScalarValue> {
        let sum = self.inner.evaluate()?.to_array()?;
        ScalarValue::try_from_array(&narrow(&sum, &self.to)?, 0)
    }

    fn size(&self) -> usize {
        size_of_val(self) + self.inner.size()
    }

    fn state(&mut self) -> DfResult<Vec<ScalarValue>> {
        self.inner.state()
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> DfResult<()> {
        self.inner.merge_batch(states)
    }

    fn retract_batch(&mut self, values: &[ArrayRef]) -> DfResult<()> {
        self.inner.retract_batch(&wide(values)?)
    }

    fn supports_retract_batch(&self) -> bool {
        self.inner.supports_retract_batch()
    }
}

/// Sums of integers, by groups.
struct WideGroups {
    inner: Box<dyn GroupsAccumulator>,
    to: DataType,
}

impl GroupsAccumulator for WideGroups {
    fn update_batch(
        &mut self,
        values: &[ArrayRef],
        group_indices: &[usize],
        opt_filter: Option<&BooleanArray>,
        total_num_groups: usize,
    ) -> DfResult<()> {
        self.inner.update_batch(&wide(values)?, group_indices, opt_filter, total_num_groups)
    }

    fn evaluate(&mut self, emit_to: EmitTo) -> DfResult<ArrayRef> {
        narrow(&self.inner.evaluate(emit_to)?, &self.to)
    }

    fn state(&mut self, emit_to: EmitTo) -> DfResult<Vec<ArrayRef>> {
        self.inner.state(emit_to)
    }

    fn merge_batch(&mut self, values: &[ArrayRef], group_indices: &[usize], total_num_groups: usize) -> DfResult<()> {
        self.inner.merge_batch(values, group_indices, total_num_groups)
    }

    fn convert_to_state(&self, values: &[ArrayRef], opt_filter: Option<&BooleanArray>) -> DfResult<Vec<ArrayRef>> {
        self.inner.convert_to_state(&wide(values)?, opt_filter)
    }

    fn size(&self) -> usize {
        size_of_val(self) + self.inner.size()
    }
}

/// SUM(DISTINCT) of integers over a window that slides, which DataFusion has for signed ones alone.
#[derive(Debug, Default)]
struct SlidingDistinct {
    /// How often a value is in the window.
    counts: HashMap<i64, u64>,
    sum: i128,
}

impl Accumulator for SlidingDistinct {
    fn update_batch(&mut self, values: &[ArrayRef]) -> DfResult<()> {
        for value in values[0].as_primitive::<Int64Type>().iter().flatten() {
            let count = self.counts.entry(value).or_default();
            if *count == 0 {
                self.sum += i128::from(value);
            }
            *count += 1;
        }
        Ok(())
    }

    fn retract_batch(&mut self, values: &[ArrayRef]) -> DfResult<()> {
        for value in values[0].as_primitive::<Int64Type>().iter().flatten() {
            let Some(count) = self.counts.get_mut(&value) else { continue };
            *count -= 1;
            if *count == 0 {
                self.sum -= i128::from(value);
                self.counts.remove(&value);
            }
        }
        Ok(())
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }

    fn evaluate(&mut self) -> DfResult<ScalarValue> {
        match self.counts.is_empty() {
            true => Ok(ScalarValue::Int64(None)),
            false => Ok(ScalarValue::Int64(Some(signed(self.sum)?))),
        }
    }

    fn size(&self) -> usize {
        size_of_val(self) + self.counts.capacity() * size_of::<(i64, u64)>()
    }

    fn state(&mut self) -> DfResult<Vec<ScalarValue>> {
        Err(DataFusionError::Internal("a window has no state of parts".to_owned()))
    }

    fn merge_batch(&mut self, _: &[ArrayRef]) -> DfResult<()> {
        Err(DataFusionError::Internal("a window has no state of parts".to_owned()))
    }
}
