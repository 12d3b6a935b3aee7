//! Arithmetic of integers that does not wrap.
//!
//! Where the result of `+`, `-` or `*` of integers, or of a minus before one, does not fit its type, DataFusion wraps: 2^63 - 1
//! and 1 are -2^63. That is a wrong result without a word; here it is an error, as it is for decimals, and as a division by zero is.
//! The operators become functions ([`Checked`]) once the types of both sides are settled. What is not of integers stays: floats
//! become infinite, and decimals, dates and times have checks of their own.
//!
//! An integer that is too small is no error: a wider type is asked for by a cast, as in `CAST(a AS BIGINT) * b`.

use std::sync::{Arc, LazyLock};

use arrow::array::ArrayRef;
use arrow::compute::kernels::numeric::{add, mul, neg, sub};
use arrow::datatypes::{DataType, Field, FieldRef};
use arrow::error::ArrowError;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, DataFusionError, Result as DfResult, ScalarValue};
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::{
    BinaryExpr, ColumnarValue, Expr, ExprSchemable, LogicalPlan, Operator, ReturnFieldArgs, ScalarFunctionArgs,
    ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use datafusion::optimizer::AnalyzerRule;
use datafusion::physical_expr_common::datum::apply;

use super::floats::rewrite;

/// Comes behind DataFusion's own coercion of types.
#[derive(Debug)]
pub struct IntegersDoNotWrap;

impl AnalyzerRule for IntegersDoNotWrap {
    fn name(&self) -> &str {
        "integers_do_not_wrap"
    }

    fn analyze(&self, plan: LogicalPlan, _: &ConfigOptions) -> DfResult<LogicalPlan> {
        rewrite(plan, in_expr)
    }
}

/// By their place in [`Arithmetic`].
static FUNCTIONS: LazyLock<[Arc<ScalarUDF>; 4]> = LazyLock::new(|| {
    [Arithmetic::Add, Arithmetic::Subtract, Arithmetic::Multiply, Arithmetic::Negate]
        .map(|arithmetic| Arc::new(ScalarUDF::from(Checked::new(arithmetic))))
});

/// What takes the operators' places, for a plan that comes from another node.
pub fn functions() -> impl Iterator<Item = Arc<ScalarUDF>> {
    FUNCTIONS.iter().cloned()
}

fn in_expr(expr: Expr, schema: &DFSchema) -> Transformed<Expr> {
    let arithmetic = match &expr {
        Expr::BinaryExpr(BinaryExpr { op: Operator::Plus, .. }) => Arithmetic::Add,
        Expr::BinaryExpr(BinaryExpr { op: Operator::Minus, .. }) => Arithmetic::Subtract,
        Expr::BinaryExpr(BinaryExpr { op: Operator::Multiply, .. }) => Arithmetic::Multiply,
        Expr::Negative(_) => Arithmetic::Negate,
        _ => return Transformed::no(expr),
    };
    // What has no type, or is wrong, is for DataFusion to say.
    let is_integer = |expr: &Expr| expr.get_type(schema).ok().filter(DataType::is_integer);
    let args = match expr {
        Expr::BinaryExpr(BinaryExpr { left, op, right }) => match (is_integer(&left), is_integer(&right)) {
            (Some(a), Some(b)) if a == b => vec![*left, *right],
            _ => return Transformed::no(Expr::BinaryExpr(BinaryExpr { left, op, right })),
        },
        Expr::Negative(of) if is_integer(&of).is_some_and(|of| of.is_signed_integer()) => vec![*of],
        other => return Transformed::no(other),
    };
    let func = FUNCTIONS[arithmetic as usize].clone();
    Transformed::yes(Expr::ScalarFunction(ScalarFunction { func, args }))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Negate,
}

/// An operation on integers of one type that fails where the result does not fit it.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Checked {
    arithmetic: Arithmetic,
    signature: Signature,
}

impl Checked {
    fn new(arithmetic: Arithmetic) -> Self {
        let arguments = if arithmetic == Arithmetic::Negate { 1 } else { 2 };
        Self { arithmetic, signature: Signature::any(arguments, Volatility::Immutable) }
    }
}

impl ScalarUDFImpl for Checked {
    fn name(&self) -> &str {
        match self.arithmetic {
            Arithmetic::Add => "checked_add",
            Arithmetic::Subtract => "checked_subtract",
            Arithmetic::Multiply => "checked_multiply",
            Arithmetic::Negate => "checked_negate",
        }
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, types: &[DataType]) -> DfResult<DataType> {
        types.first().cloned().ok_or_else(|| DataFusionError::Internal("arithmetic of nothing".to_owned()))
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> DfResult<FieldRef> {
        let types: Vec<DataType> = args.arg_fields.iter().map(|field| field.data_type().clone()).collect();
        let nullable = args.arg_fields.iter().any(|field| field.is_nullable());
        Ok(Arc::new(Field::new(self.name(), self.return_type(&types)?, nullable)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> DfResult<ColumnarValue> {
        match (self.arithmetic, args.args.as_slice()) {
            (Arithmetic::Add, [left, right]) => apply(left, right, add),
            (Arithmetic::Subtract, [left, right]) => apply(left, right, sub),
            (Arithmetic::Multiply, [left, right]) => apply(left, right, mul),
            (Arithmetic::Negate, [ColumnarValue::Array(of)]) => Ok(ColumnarValue::Array(negated(of)?)),
            (Arithmetic::Negate, [ColumnarValue::Scalar(of)]) => {
                let negated = negated(&of.to_array()?)?;
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&negated, 0)?))
            }
            _ => Err(DataFusionError::Internal(format!("{} of {} values", self.name(), args.args.len()))),
        }
    }
}

fn negated(of: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    neg(of.as_ref())
}
