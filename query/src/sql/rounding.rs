//! Numbers become integers by rounding.
//!
//! `CAST(1.7 AS INT)` is 2, and so is what becomes of 1.7 in a column of integers, as in PostgreSQL, DuckDB and Trino; halves go away
//! from zero. DataFusion would cut it to 1. What a cast makes integers of goes by a function ([`Rounded`]) first, if it has digits
//! behind the point, once all types are settled and the casts that writing into a column takes are in the plan. Of a list, a struct
//! or a map the same goes for what is within. Decimals that get fewer digits behind the point are rounded in the same way by the cast
//! itself.

use std::sync::{Arc, LazyLock};

use arrow::array::new_empty_array;
use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, DataFusionError, Result as DfResult, ScalarValue};
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::{
    Cast, ColumnarValue, Expr, ExprSchemable, LogicalPlan, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF,
    ScalarUDFImpl, Signature, TryCast, TypeSignature, Volatility,
};
use datafusion::optimizer::AnalyzerRule;

use super::floats::rewrite;
use crate::table::numbers::{is_rounded, rounded};

const NAME: &str = "rounded";

/// Comes behind DataFusion's own coercion of types.
#[derive(Debug)]
pub struct IntegersAreRounded;

impl AnalyzerRule for IntegersAreRounded {
    fn name(&self) -> &str {
        "integers_are_rounded"
    }

    fn analyze(&self, plan: LogicalPlan, _: &ConfigOptions) -> DfResult<LogicalPlan> {
        rewrite(plan, in_expr)
    }
}

static FUNCTION: LazyLock<Arc<ScalarUDF>> = LazyLock::new(|| Arc::new(ScalarUDF::from(Rounded::default())));

/// What rounds, for a plan that comes from another node.
pub fn functions() -> impl Iterator<Item = Arc<ScalarUDF>> {
    std::iter::once(FUNCTION.clone())
}

/// A cast to integers, of what is rounded first.
pub(super) fn in_expr(expr: Expr, schema: &DFSchema) -> Transformed<Expr> {
    let (of, to) = match &expr {
        Expr::Cast(cast) => (&cast.expr, cast.field.data_type()),
        Expr::TryCast(cast) => (&cast.expr, cast.field.data_type()),
        _ => return Transformed::no(expr),
    };
    let is_done = matches!(of.as_ref(), Expr::ScalarFunction(function) if function.func.name() == NAME);
    // What has no type is for DataFusion to say.
    if is_done || !of.get_type(schema).is_ok_and(|of| is_rounded(&of, to)) {
        return Transformed::no(expr);
    }
    let target = match to.is_nested().then(|| ScalarValue::try_from(to)) {
        None => None,
        Some(Ok(null)) => Some(null),
        Some(Err(_)) => return Transformed::no(expr),
    };
    let rounded = |of: Box<Expr>| {
        let target = target.map(|target| Expr::Literal(target, None));
        let args = std::iter::once(*of).chain(target).collect();
        Box::new(Expr::ScalarFunction(ScalarFunction { func: FUNCTION.clone(), args }))
    };
    Transformed::yes(match expr {
        Expr::Cast(Cast { expr, field }) => Expr::Cast(Cast { expr: rounded(expr), field }),
        Expr::TryCast(TryCast { expr, field }) => Expr::TryCast(TryCast { expr: rounded(expr), field }),
        other => other,
    })
}

/// A number without digits behind the point. Of a nested value, those that a cast to the type of the second argument, which is NULL,
/// makes integers of.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Rounded {
    signature: Signature,
}

impl Default for Rounded {
    fn default() -> Self {
        let signatures = vec![TypeSignature::Any(1), TypeSignature::Any(2)];
        Self { signature: Signature::one_of(signatures, Volatility::Immutable) }
    }
}

/// What is rounded, and for what.
fn of_and_to<T>(args: &[T]) -> DfResult<(&T, Option<&T>)> {
    match args {
        [of] => Ok((of, None)),
        [of, to] => Ok((of, Some(to))),
        other => Err(DataFusionError::Internal(format!("{} values were rounded as one", other.len()))),
    }
}

impl ScalarUDFImpl for Rounded {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, types: &[DataType]) -> DfResult<DataType> {
        let (of, to) = of_and_to(types)?;
        let rounded = rounded(&new_empty_array(of), to.unwrap_or(&DataType::Int64))?;
        Ok(rounded.data_type().clone())
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> DfResult<FieldRef> {
        let types: Vec<DataType> = args.arg_fields.iter().map(|field| field.data_type().clone()).collect();
        let nullable = args.arg_fields.first().is_none_or(|of| of.is_nullable());
        Ok(Arc::new(Field::new(self.name(), self.return_type(&types)?, nullable)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> DfResult<ColumnarValue> {
        let (of, to) = of_and_to(&args.args)?;
        let to = to.map_or(DataType::Int64, ColumnarValue::data_type);
        match of {
            ColumnarValue::Array(of) => Ok(ColumnarValue::Array(rounded(of, &to)?)),
            ColumnarValue::Scalar(of) => {
                let rounded = rounded(&of.to_array()?, &to)?;
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&rounded, 0)?))
            }
        }
    }
}
