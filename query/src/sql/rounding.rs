//! Numbers become integers by rounding.
//!
//! `CAST(1.7 AS INT)` is 2, and so is what becomes of 1.7 in a column of integers, as in PostgreSQL, DuckDB and Trino; halves go away
//! from zero. DataFusion would cut it to 1. A cast of a float or of a decimal with digits behind the point goes by a function
//! ([`Rounded`]) first, once all types are settled and the casts that writing into a column takes are in the plan. Decimals that get
//! fewer digits behind the point are rounded in the same way by the cast itself.

use std::sync::{Arc, LazyLock};

use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, DataFusionError, Result as DfResult, ScalarValue};
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::{
    Cast, ColumnarValue, Expr, ExprSchemable, LogicalPlan, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF,
    ScalarUDFImpl, Signature, TryCast, Volatility,
};
use datafusion::optimizer::AnalyzerRule;

use super::floats::rewrite;
use crate::table::numbers::{has_fraction, rounded, whole};

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

/// A cast to an integer, of what is rounded first.
pub(super) fn in_expr(expr: Expr, schema: &DFSchema) -> Transformed<Expr> {
    let (of, to) = match &expr {
        Expr::Cast(cast) => (&cast.expr, &cast.field),
        Expr::TryCast(cast) => (&cast.expr, &cast.field),
        _ => return Transformed::no(expr),
    };
    let is_rounded = matches!(of.as_ref(), Expr::ScalarFunction(function) if function.func.name() == NAME);
    // What has no type is for DataFusion to say.
    if !to.data_type().is_integer() || is_rounded || !of.get_type(schema).is_ok_and(|of| has_fraction(&of)) {
        return Transformed::no(expr);
    }
    let rounded =
        |of: Box<Expr>| Box::new(Expr::ScalarFunction(ScalarFunction { func: FUNCTION.clone(), args: vec![*of] }));
    Transformed::yes(match expr {
        Expr::Cast(Cast { expr, field }) => Expr::Cast(Cast { expr: rounded(expr), field }),
        Expr::TryCast(TryCast { expr, field }) => Expr::TryCast(TryCast { expr: rounded(expr), field }),
        other => other,
    })
}

/// A number without digits behind the point.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Rounded {
    signature: Signature,
}

impl Default for Rounded {
    fn default() -> Self {
        Self { signature: Signature::any(1, Volatility::Immutable) }
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
        types.first().map(whole).ok_or_else(|| DataFusionError::Internal("nothing was rounded".to_owned()))
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> DfResult<FieldRef> {
        let types: Vec<DataType> = args.arg_fields.iter().map(|field| field.data_type().clone()).collect();
        let nullable = args.arg_fields.iter().any(|field| field.is_nullable());
        Ok(Arc::new(Field::new(self.name(), self.return_type(&types)?, nullable)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> DfResult<ColumnarValue> {
        match args.args.as_slice() {
            [ColumnarValue::Array(of)] => Ok(ColumnarValue::Array(rounded(of)?)),
            [ColumnarValue::Scalar(of)] => {
                let rounded = rounded(&of.to_array()?)?;
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&rounded, 0)?))
            }
            other => Err(DataFusionError::Internal(format!("{} values were rounded as one", other.len()))),
        }
    }
}
