//! Functions whose arguments have a type in common that DataFusion does not bring them to.
//!
//! What type an expression has is asked while a statement is planned, before [`super::floats`] has settled it: a function that refuses
//! its arguments then is an error. Those of lists take no element whose type is another than that of the list's elements, unless
//! it is to become an integer or a float: no decimal of another width, none beside a float. `coalesce` takes no text beside a timestamp.
//! Here they do: a decimal beside a float is one, and numbers of other kinds are what they are in comparisons.

use std::collections::HashSet;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::Result as DfResult;
use datafusion::execution::FunctionRegistry;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::binary::type_union_resolution;
use datafusion::logical_expr::simplify::{ExprSimplifyResult, SimplifyContext};
use datafusion::logical_expr::type_coercion::functions::fields_with_udf;
use datafusion::logical_expr::{
    ArrayFunctionArgument, ArrayFunctionSignature, ColumnarValue, Documentation, Expr, ReturnFieldArgs,
    ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, TypeSignature,
};

use super::{floats, times};

/// Of a list and what may be in it.
const OF_LISTS: [&str; 11] = [
    "array_append",
    "array_has",
    "array_position",
    "array_positions",
    "array_prepend",
    "array_remove",
    "array_remove_all",
    "array_remove_n",
    "array_replace",
    "array_replace_all",
    "array_replace_n",
];
const COALESCE: &str = "coalesce";

/// Puts these in the places of DataFusion's.
///
/// # Errors
/// `Internal` if DataFusion has no function of that name.
pub fn widen(template: &mut SessionState) -> DfResult<()> {
    for name in OF_LISTS.into_iter().chain([COALESCE]) {
        let inner = template.udf(name)?;
        let signature = Signature::user_defined(inner.signature().volatility);
        template.register_udf(Arc::new(ScalarUDF::from(Widened { inner, signature })))?;
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Widened {
    inner: Arc<ScalarUDF>,
    signature: Signature,
}

impl ScalarUDFImpl for Widened {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn aliases(&self) -> &[String] {
        self.inner.aliases()
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, arg_types: &[DataType]) -> DfResult<Vec<DataType>> {
        let types = match self.name() {
            COALESCE => texts_as_times(arg_types),
            _ => of_list(&self.inner.signature().type_signature, floats::met_types(arg_types)),
        };
        let field = |of: &DataType| Arc::new(Field::new("", of.clone(), true));
        let fields: Vec<FieldRef> = types.iter().map(field).collect();
        let fields = fields_with_udf(&fields, self.inner.as_ref())?;
        Ok(fields.iter().map(|field| field.data_type().clone()).collect())
    }

    fn return_type(&self, arg_types: &[DataType]) -> DfResult<DataType> {
        self.inner.return_type(arg_types)
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs<'_>) -> DfResult<FieldRef> {
        self.inner.return_field_from_args(args)
    }

    fn simplify(&self, args: Vec<Expr>, info: &SimplifyContext) -> DfResult<ExprSimplifyResult> {
        self.inner.simplify(args, info)
    }

    fn short_circuits(&self) -> bool {
        self.inner.short_circuits()
    }

    fn conditional_arguments<'a>(&self, args: &'a [Expr]) -> Option<(Vec<&'a Expr>, Vec<&'a Expr>)> {
        self.inner.conditional_arguments(args)
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.inner.documentation()
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> DfResult<ColumnarValue> {
        self.inner.invoke_with_args(args)
    }
}

/// The texts among these become what they are beside: whether they are written out is looked at when the types are settled
/// ([`times::take_texts`]).
fn texts_as_times(types: &[DataType]) -> Vec<DataType> {
    let known: Vec<Option<DataType>> = types.iter().cloned().map(Some).collect();
    match times::moment(&known) {
        Some(to) => types.iter().map(|of| if times::is_text(of) { to.clone() } else { of.clone() }).collect(),
        None => types.to_vec(),
    }
}

/// The types of a list and of what may be in it, with one type for all of this where these are numbers of several.
fn of_list(signature: &TypeSignature, types: Vec<DataType>) -> Vec<DataType> {
    let Some(roles) = roles(signature, types.len()) else { return types };
    let elements = roles.iter().zip(&types).filter_map(|(role, of)| element(role, of));
    let elements: Vec<DataType> = elements.filter(|of| !of.is_null()).cloned().collect();
    let distinct: HashSet<&DataType> = elements.iter().collect();
    if distinct.len() < 2 || !elements.iter().all(DataType::is_numeric) {
        return types;
    }
    let Some(common) = type_union_resolution(&elements) else { return types };
    let with_common = |(role, of): (&ArrayFunctionArgument, DataType)| match role {
        ArrayFunctionArgument::Element if !of.is_null() => common.clone(),
        ArrayFunctionArgument::Array => list_of(&of, &common).unwrap_or(of),
        _ => of,
    };
    roles.iter().zip(types).map(with_common).collect()
}

/// What a function of lists takes in each place.
fn roles(signature: &TypeSignature, count: usize) -> Option<&[ArrayFunctionArgument]> {
    match signature {
        TypeSignature::ArraySignature(ArrayFunctionSignature::Array { arguments, .. }) => {
            (arguments.len() == count).then_some(arguments.as_slice())
        }
        TypeSignature::OneOf(signatures) => signatures.iter().find_map(|one| roles(one, count)),
        _ => None,
    }
}

fn element<'a>(role: &ArrayFunctionArgument, of: &'a DataType) -> Option<&'a DataType> {
    match (role, of) {
        (ArrayFunctionArgument::Element, of) => Some(of),
        (
            ArrayFunctionArgument::Array,
            DataType::List(field) | DataType::LargeList(field) | DataType::FixedSizeList(field, _),
        ) => Some(field.data_type()),
        _ => None,
    }
}

fn list_of(list: &DataType, element: &DataType) -> Option<DataType> {
    let within = |field: &FieldRef| Arc::new(field.as_ref().clone().with_data_type(element.clone()));
    Some(match list {
        DataType::List(field) => DataType::List(within(field)),
        DataType::LargeList(field) => DataType::LargeList(within(field)),
        DataType::FixedSizeList(field, size) => DataType::FixedSizeList(within(field), *size),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::TimeUnit;
    use datafusion::execution::session_state::SessionStateBuilder;

    use super::*;

    #[test]
    fn a_list_and_what_may_be_in_it_get_one_type() {
        let mut template = SessionStateBuilder::new_with_default_features().build();
        widen(&mut template).unwrap();
        let coerced = |name: &str, types: &[DataType]| template.udf(name).unwrap().coerce_types(types);
        let list = |of: &DataType| DataType::new_list(of.clone(), true);
        let (decimal, double, long) = (DataType::Decimal128(3, 1), DataType::Float64, DataType::Int64);
        for (name, types, expected) in [
            ("array_has", vec![list(&decimal), double.clone()], vec![list(&double), double.clone()]),
            ("list_contains", vec![list(&double), decimal.clone()], vec![list(&double), double.clone()]),
            ("array_append", vec![list(&long), double.clone()], vec![list(&double), double.clone()]),
            ("array_prepend", vec![decimal.clone(), list(&double)], vec![double.clone(), list(&double)]),
            (
                "array_position",
                vec![list(&decimal), double.clone(), long.clone()],
                vec![list(&double), double.clone(), long.clone()],
            ),
            (
                "array_replace",
                vec![list(&decimal), DataType::Null, double.clone()],
                vec![list(&double), double.clone(), double.clone()],
            ),
            ("array_has", vec![list(&DataType::Utf8), DataType::Utf8], vec![list(&DataType::Utf8), DataType::Utf8]),
        ] {
            assert_eq!(coerced(name, &types).unwrap(), expected, "{name} of {types:?}");
        }
        let wider = DataType::Decimal128(4, 2);
        let types = [list(&decimal), DataType::Decimal128(3, 2)];
        assert_eq!(coerced("array_remove", &types).unwrap(), [list(&wider), wider]);
        assert!(coerced("array_has", &[long, double]).is_err(), "no list");
    }

    #[test]
    fn a_text_beside_a_timestamp_is_one() {
        let at = DataType::Timestamp(TimeUnit::Microsecond, None);
        assert_eq!(texts_as_times(&[DataType::Utf8, at.clone(), DataType::Null]), [at.clone(), at, DataType::Null]);
        assert_eq!(texts_as_times(&[DataType::Utf8, DataType::Date32]), [DataType::Date32, DataType::Date32]);
        assert_eq!(texts_as_times(&[DataType::Utf8, DataType::Int64]), [DataType::Utf8, DataType::Int64]);
    }
}
