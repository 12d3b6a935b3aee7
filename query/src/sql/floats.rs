//! Decimals beside floats.
//!
//! A number with a point is a decimal. Where a decimal meets a float, DataFusion makes decimals of 30 digits of both, 15 of them
//! behind the point: 1e-20 becomes 0, and neither NaN nor 1e20 is one at all. Here the decimal becomes a float instead, as in other
//! databases, wherever DataFusion looks for a type that two values have in common: in comparisons, BETWEEN, IN, ANY and ALL, CASE,
//! among the arguments of a function, in the columns of UNION, INTERSECT, EXCEPT and VALUES, and in the keys of a join; within
//! lists, structs and maps, too.
//!
//! Timestamps meet in the same places ([`super::times`]). Functions that would refuse such arguments before are in
//! [`super::arguments`].
//!
//! What type an expression has is known for certain only once DataFusion has coerced what it is made of: before, a UNION or a CASE
//! has the type of its first part. So both go hand in hand here, from the innermost out.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::datatypes::{DataType, FieldRef, Fields};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion, TreeNodeRewriter};
use datafusion::common::{Column, DFSchema, DataFusionError, ExprSchema, Result as DfResult};
use datafusion::logical_expr::binary::{comparison_coercion, type_union_resolution};
use datafusion::logical_expr::expr::{Case, WindowFunctionDefinition};
use datafusion::logical_expr::expr_rewriter::{NamePreserver, coerce_plan_expr_for_schema};
use datafusion::logical_expr::utils::merge_schema;
use datafusion::logical_expr::{
    Cast, DmlStatement, Expr, ExprSchemable, LogicalPlan, LogicalPlanBuilder, Operator, RecursiveQuery, Subquery,
    Union, Values, WriteOp, cast,
};
use datafusion::optimizer::AnalyzerRule;
use datafusion::optimizer::analyzer::type_coercion::TypeCoercionRewriter;

use super::times;

/// Functions whose arguments need not have a type in common.
const APART: [&str; 4] = ["named_struct", "struct", "map", "arrays_zip"];
/// Functions whose arguments, all of them, are to have a type in common.
const ALIKE: [&str; 7] = ["coalesce", "nvl", "nullif", "greatest", "least", "make_array", "nvl2"];
/// Of these, those that take texts for timestamps and dates.
const WITH_TEXTS: [&str; 4] = ["coalesce", "nullif", "greatest", "least"];
/// What the only column of a subquery is called that was cast: as no column in it is, which may be compared with another one, too.
const CAST: &str = "__lake_cast";

/// Comes right before DataFusion's own coercion of types.
#[derive(Debug)]
pub struct DecimalsMeetFloats;

impl AnalyzerRule for DecimalsMeetFloats {
    fn name(&self) -> &str {
        "decimals_meet_floats"
    }

    fn analyze(&self, plan: LogicalPlan, _: &ConfigOptions) -> DfResult<LogicalPlan> {
        let settle = |plan: LogicalPlan| plan.transform_up_with_subqueries(settled).map(|settled| settled.data);
        if !refers_out(&plan)? {
            return settle(plan);
        }
        // A subquery has its types before what is around it has.
        let settled = settle(plan.clone())?;
        match stale_references(&settled)? {
            stale if stale.is_empty() => Ok(settled),
            stale => settle(refer_anew(plan, &stale)?),
        }
    }
}

/// A plan with the types that it will have, of inputs and subqueries that have theirs.
fn settled(plan: LogicalPlan) -> DfResult<Transformed<LogicalPlan>> {
    let schema = visible(&plan)?;
    let inferred = match &plan {
        LogicalPlan::Values(values) => inferred(values)?,
        _ => Vec::new(),
    };
    // Those of VALUES have no names.
    let names = (!matches!(plan, LogicalPlan::Values(_))).then(|| NamePreserver::new(&plan));
    let plan = plan.map_expressions(|expr| {
        let name = names.as_ref().map(|names| names.save(&expr));
        let settled = settled_expr(expr, &schema)?;
        Ok(settled.update_data(|expr| match name {
            Some(name) => name.restore(expr),
            None => expr,
        }))
    })?;
    let plan = match plan.data {
        LogicalPlan::Union(union) => LogicalPlan::Union(of_union(union)?),
        LogicalPlan::Values(values) => LogicalPlan::Values(of_values(values, &inferred)?),
        LogicalPlan::Join(mut join) => {
            for (left, right) in &mut join.on {
                let types = [left.get_type(join.left.schema()).ok(), right.get_type(join.right.schema()).ok()];
                match times::exactly(&types, |_| false) {
                    true => times::in_nanoseconds([left, right], &types),
                    false => cast_each([left, right], common(&types)),
                }
            }
            LogicalPlan::Join(join)
        }
        LogicalPlan::RecursiveQuery(query) => {
            check_recursive(&query)?;
            LogicalPlan::RecursiveQuery(query)
        }
        other => other,
    };
    let plan = TypeCoercionRewriter::new(&schema).coerce_plan(plan)?;
    Ok(Transformed::yes(plan.recompute_schema()?))
}

/// An expression with the types that it will have, over these columns.
pub(super) fn settled_expr(expr: Expr, schema: &DFSchema) -> DfResult<Transformed<Expr>> {
    let mut coercion = TypeCoercionRewriter::new(schema);
    expr.transform_up(|expr| coercion.f_up(in_expr(expr, schema)?))
}

/// References of subqueries to columns around them, by column and type, which were made before these had the type that they have.
type Stale = HashMap<(Column, DataType), DataType>;

fn stale_references(plan: &LogicalPlan) -> DfResult<Stale> {
    let mut stale = Stale::new();
    plan.apply_with_subqueries(|node| {
        node.apply_subqueries(|subquery| {
            let around = merge_schema(&node.inputs());
            subquery.apply(|within| {
                within.apply_expressions(|expr| {
                    expr.apply(|expr| {
                        if let Expr::OuterReferenceColumn(field, column) = expr
                            && let Ok(now) = around.field_from_column(column)
                            && now.data_type() != field.data_type()
                        {
                            stale.insert((column.clone(), field.data_type().clone()), now.data_type().clone());
                        }
                        Ok(TreeNodeRecursion::Continue)
                    })
                })
            })
        })
    })?;
    Ok(stale)
}

fn refer_anew(plan: LogicalPlan, stale: &Stale) -> DfResult<LogicalPlan> {
    let renewed = |expr: Expr| -> DfResult<Transformed<Expr>> {
        Ok(match expr {
            Expr::OuterReferenceColumn(field, column) => {
                let known = (column, field.data_type().clone());
                let field = match stale.get(&known) {
                    Some(now) => Arc::new(field.as_ref().clone().with_data_type(now.clone())),
                    None => field,
                };
                Transformed::yes(Expr::OuterReferenceColumn(field, known.0))
            }
            other => Transformed::no(other),
        })
    };
    let in_plan = |node: LogicalPlan| node.map_expressions(|expr| expr.transform_up(renewed));
    Ok(plan.transform_up_with_subqueries(in_plan)?.data)
}

fn refers_out(plan: &LogicalPlan) -> DfResult<bool> {
    let mut found = false;
    plan.apply_with_subqueries(|node| {
        node.apply_expressions(|expr| {
            found = found || expr.exists(|expr| Ok(matches!(expr, Expr::OuterReferenceColumn(..))))?;
            Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
        })
    })?;
    Ok(found)
}

/// The columns that the expressions of a plan can see.
fn visible(plan: &LogicalPlan) -> DfResult<DFSchema> {
    let mut schema = merge_schema(&plan.inputs());
    // Columns that come from no input.
    match plan {
        LogicalPlan::TableScan(scan) => {
            schema.merge(&DFSchema::try_from_qualified_schema(scan.table_name.clone(), &scan.source.schema())?);
        }
        LogicalPlan::Dml(DmlStatement { op: WriteOp::MergeInto(_), table_name, target, .. }) => {
            schema.merge(&DFSchema::try_from_qualified_schema(table_name.clone(), &target.schema())?);
        }
        _ => {}
    }
    Ok(schema)
}

/// Rewrites each expression of a plan, from the innermost out, knowing the columns that it can see.
pub(super) fn rewrite(plan: LogicalPlan, expr: fn(Expr, &DFSchema) -> Transformed<Expr>) -> DfResult<LogicalPlan> {
    Ok(plan.transform_up_with_subqueries(|plan| in_plan(plan, expr))?.data)
}

fn in_plan(
    plan: LogicalPlan,
    rewritten: fn(Expr, &DFSchema) -> Transformed<Expr>,
) -> DfResult<Transformed<LogicalPlan>> {
    let schema = visible(&plan)?;
    let names = NamePreserver::new(&plan);
    let done = plan.map_expressions(|expr| {
        let name = names.save(&expr);
        let done = expr.transform_up(|expr| Ok(rewritten(expr, &schema)))?;
        Ok(done.update_data(|expr| name.restore(expr)))
    })?;
    match done.transformed {
        true => done.map_data(LogicalPlan::recompute_schema),
        false => Ok(done),
    }
}

fn in_expr(mut expr: Expr, schema: &DFSchema) -> DfResult<Expr> {
    match &mut expr {
        Expr::Cast(cast) if cast.field.name() == times::WRITTEN => {
            times::written(&mut cast.expr, &mut cast.field, schema);
        }
        Expr::TryCast(cast) if cast.field.name() == times::WRITTEN => {
            times::written(&mut cast.expr, &mut cast.field, schema);
        }
        Expr::BinaryExpr(binary) if compares(binary.op) => compare(vec![&mut *binary.left, &mut *binary.right], schema),
        Expr::Between(between) => compare(vec![&mut *between.expr, &mut *between.low, &mut *between.high], schema),
        Expr::InList(list) => {
            times::take_texts("IN", std::iter::once(&mut *list.expr).chain(&mut list.list).collect(), schema)?;
            compare(std::iter::once(&mut *list.expr).chain(&mut list.list).collect(), schema);
        }
        Expr::InSubquery(within) => meet_rows(&mut within.expr, &mut within.subquery, schema)?,
        Expr::SetComparison(compared) => meet_rows(&mut compared.expr, &mut compared.subquery, schema)?,
        Expr::ScalarFunction(function) if ALIKE.contains(&function.func.name()) => {
            if WITH_TEXTS.contains(&function.func.name()) {
                times::take_texts(function.func.name(), function.args.iter_mut().collect(), schema)?;
            }
            meet(function.args.iter_mut().collect(), schema);
        }
        Expr::ScalarFunction(function) if !APART.contains(&function.func.name()) => {
            meet_floats(function.args.iter_mut().collect(), schema);
            times::arguments(function.func.name(), &mut function.args, schema);
        }
        // lag and lead make of a default what their values are. It has to stay a literal.
        Expr::WindowFunction(window) if matches!(window.fun, WindowFunctionDefinition::WindowUDF(_)) => {
            if let [value, _, default] = window.params.args.as_mut_slice() {
                meet_floats(vec![value, &mut default.clone()], schema);
            }
        }
        Expr::Case(case) => {
            times::take_texts("CASE", compared_in(case), schema)?;
            compare(compared_in(case), schema);
            times::take_texts("CASE", results_of(case), schema)?;
            meet(results_of(case), schema);
        }
        _ => {}
    }
    Ok(expr)
}

/// What `CASE a WHEN b ..` compares.
fn compared_in(case: &mut Case) -> Vec<&mut Expr> {
    let Some(of) = case.expr.as_deref_mut() else { return Vec::new() };
    std::iter::once(of).chain(case.when_then_expr.iter_mut().map(|(when, _)| &mut **when)).collect()
}

fn results_of(case: &mut Case) -> Vec<&mut Expr> {
    let results = case.when_then_expr.iter_mut().map(|(_, then)| &mut **then);
    results.chain(case.else_expr.as_deref_mut()).collect()
}

fn compares(op: Operator) -> bool {
    use Operator::{Eq, Gt, GtEq, IsDistinctFrom, IsNotDistinctFrom, Lt, LtEq, NotEq};
    matches!(op, Eq | NotEq | Lt | LtEq | Gt | GtEq | IsDistinctFrom | IsNotDistinctFrom)
}

/// As [`meet`], of what is compared: timestamps of several units exactly.
fn compare(parts: Vec<&mut Expr>, schema: &DFSchema) {
    let types: Vec<Option<DataType>> = parts.iter().map(|part| part.get_type(schema).ok()).collect();
    match times::exactly(&types, |place| parts.get(place).is_some_and(|part| !varies(part))) {
        true => times::in_nanoseconds(parts, &types),
        false => meet(parts, schema),
    }
}

/// Makes floats of the decimals among these where there is a float, and the like of timestamps.
fn meet(parts: Vec<&mut Expr>, schema: &DFSchema) {
    // What has no type, or is wrong, is for DataFusion to say.
    let types: Vec<Option<DataType>> = parts.iter().map(|part| part.get_type(schema).ok()).collect();
    let is_constant = |place: usize| parts.get(place).is_some_and(|part| !varies(part));
    let times = times::met(&types, is_constant);
    cast_each(parts, either(met(&types), times));
}

fn meet_floats(parts: Vec<&mut Expr>, schema: &DFSchema) {
    let types: Vec<Option<DataType>> = parts.iter().map(|part| part.get_type(schema).ok()).collect();
    cast_each(parts, met(&types));
}

/// Whether it may be another value in another row.
fn varies(expr: &Expr) -> bool {
    let varies = |expr: &Expr| {
        matches!(
            expr,
            Expr::Column(_)
                | Expr::OuterReferenceColumn(..)
                | Expr::LambdaVariable(_)
                | Expr::ScalarSubquery(_)
                | Expr::Placeholder(_)
        )
    };
    expr.exists(|expr| Ok(varies(expr))).unwrap_or(true)
}

/// What two sides become that are compared in each row.
fn common(types: &[Option<DataType>]) -> Vec<Option<DataType>> {
    either(met(types), times::met(types, |_| false))
}

fn either(floats: Vec<Option<DataType>>, times: Vec<Option<DataType>>) -> Vec<Option<DataType>> {
    floats.into_iter().zip(times).map(|(float, time)| float.or(time)).collect()
}

fn cast_each<'a>(parts: impl IntoIterator<Item = &'a mut Expr>, to: Vec<Option<DataType>>) {
    for (part, to) in parts.into_iter().zip(to) {
        if let Some(to) = to {
            *part = cast(std::mem::take(part), to);
        }
    }
}

/// The same of a value and the rows of a subquery.
fn meet_rows(value: &mut Expr, rows: &mut Subquery, schema: &DFSchema) -> DfResult<()> {
    // Of several columns they are compared by nobody.
    if rows.subquery.schema().fields().len() != 1 {
        return Ok(());
    }
    let is_correlated = !rows.outer_ref_columns.is_empty();
    let (relation, field) = rows.subquery.schema().qualified_field(0);
    let mut of_rows = Expr::Column(Column::from((relation, field)));
    let types = [value.get_type(schema).ok(), Some(field.data_type().clone())];
    match times::exactly(&types, |_| false) {
        true => times::in_nanoseconds([&mut *value, &mut of_rows], &types),
        false => {
            let mut to = common(&types);
            // DataFusion's own casts are called as what was cast, which a condition that ties the rows may need as it is.
            if let [Some(of), Some(beside)] = &types
                && is_correlated
                && to.iter().all(Option::is_none)
                && of.is_numeric()
                && beside.is_numeric()
                && let Some(coerced) = comparison_coercion(of, beside)
            {
                to = [of, beside].map(|own| Some(coerced.clone()).filter(|to| to != own)).into();
            }
            cast_each([&mut *value, &mut of_rows], to);
        }
    }
    if !matches!(of_rows, Expr::Column(_)) {
        let plan = LogicalPlanBuilder::from(rows.subquery.as_ref().clone()).project([of_rows.alias(CAST)])?;
        rows.subquery = Arc::new(plan.build()?);
    }
    Ok(())
}

/// The same of the columns of a UNION.
fn of_union(Union { inputs, schema }: Union) -> DfResult<Union> {
    let width = schema.fields().len();
    if inputs.iter().any(|input| input.schema().fields().len() != width) {
        return Ok(Union { inputs, schema });
    }
    let mut types: Vec<Vec<DataType>> = vec![Vec::new(); inputs.len()];
    for column in 0..width {
        let of = |input: &Arc<LogicalPlan>| input.schema().field(column).data_type().clone();
        let before: Vec<Option<DataType>> = inputs.iter().map(|input| Some(of(input))).collect();
        for ((types, met), input) in types.iter_mut().zip(common(&before)).zip(&inputs) {
            types.push(met.unwrap_or_else(|| of(input)));
        }
    }
    // Its own types are from before its inputs had theirs.
    let schema = match types.first() {
        Some(first) => Arc::new(with_types(&schema, first)?),
        None => schema,
    };
    let inputs = inputs.into_iter().zip(types).map(|(input, types)| -> DfResult<Arc<LogicalPlan>> {
        let wanted = with_types(input.schema(), &types)?;
        Ok(Arc::new(coerce_plan_expr_for_schema(Arc::unwrap_or_clone(input), &wanted)?))
    });
    Ok(Union { inputs: inputs.collect::<DfResult<_>>()?, schema })
}

fn with_types(schema: &DFSchema, types: &[DataType]) -> DfResult<DFSchema> {
    let fields = schema.iter().zip(types).map(|((qualifier, field), of)| {
        (qualifier.cloned(), Arc::new(field.as_ref().clone().with_data_type(of.clone())))
    });
    DFSchema::new_with_metadata(fields.collect(), schema.metadata().clone())
}

/// Of each column of VALUES, whether it has the type that DataFusion gives to such values, which is in casts of them: not one that they
/// were cast to for another reason.
fn inferred(Values { schema, values }: &Values) -> DfResult<Vec<bool>> {
    let inferred = schema.fields().iter().enumerate().map(|(column, field)| -> DfResult<bool> {
        let own = own_types(values, column, field.data_type())?;
        Ok(own.iter().fold(None, together).as_ref() == Some(field.data_type()))
    });
    inferred.collect()
}

/// The types of a column's values, without casts to its own.
fn own_types(values: &[Vec<Expr>], column: usize, common: &DataType) -> DfResult<Vec<DataType>> {
    let own = values.iter().filter_map(|row| row.get(column)).map(|value| match value {
        Expr::Cast(cast) if cast.field.data_type() == common => cast.expr.get_type(&DFSchema::empty()),
        Expr::Literal(null, _) if null.is_null() => Ok(DataType::Null),
        other => other.get_type(&DFSchema::empty()),
    });
    own.collect()
}

/// The same of the columns of VALUES.
fn of_values(Values { schema, mut values }: Values, inferred: &[bool]) -> DfResult<Values> {
    let nothing = DFSchema::empty();
    let mut types: Vec<DataType> = schema.fields().iter().map(|field| field.data_type().clone()).collect();
    for ((column, common), inferred) in types.iter_mut().enumerate().zip(inferred) {
        let own: Vec<_> = own_types(&values, column, common)?.into_iter().map(Some).collect();
        let met = met(&own);
        let met = met.iter().zip(&own).filter_map(|(met, own)| met.as_ref().or(own.as_ref()));
        let after = met.fold(None, together).filter(|after| *inferred && *after != *common);
        for value in values.iter_mut().filter_map(|row| row.get_mut(column)) {
            let own = match std::mem::take(value) {
                Expr::Cast(Cast { expr, field }) if after.is_some() && *field.data_type() == *common => *expr,
                other => other,
            };
            *value = own.cast_to(after.as_ref().unwrap_or(common), &nothing)?;
        }
        if let Some(after) = after {
            *common = after;
        }
    }
    Ok(Values { schema: Arc::new(with_types(&schema, &types)?), values })
}

/// The type that DataFusion gives to a column of VALUES.
fn together(common: Option<DataType>, of: &DataType) -> Option<DataType> {
    match common {
        _ if of.is_null() => common,
        None => Some(of.clone()),
        Some(same) if same == *of => Some(same),
        Some(common) => type_union_resolution(&[common, of.clone()]),
    }
}

/// The recursive part of a query reads columns of the types that the first part was planned with.
fn check_recursive(query: &RecursiveQuery) -> DfResult<()> {
    let now = query.static_term.schema();
    match query.schema.fields().iter().zip(now.fields()).find(|(planned, now)| {
        met(&[Some(planned.data_type().clone()), Some(now.data_type().clone())]).iter().any(Option::is_some)
    }) {
        None => Ok(()),
        Some((column, _)) => Err(DataFusionError::Plan(format!(
            "the first part of the recursive query {} has decimals and floats in its column {}: cast them to one type",
            query.name,
            column.name()
        ))),
    }
}

/// The types that arguments of these become, as far as there are decimals beside floats.
pub(super) fn met_types(types: &[DataType]) -> Vec<DataType> {
    let known: Vec<Option<DataType>> = types.iter().cloned().map(Some).collect();
    met(&known).into_iter().zip(types).map(|(met, own)| met.unwrap_or_else(|| own.clone())).collect()
}

/// The types that values of these become which are to have one in common, each if it is another one.
fn met(types: &[Option<DataType>]) -> Vec<Option<DataType>> {
    let distinct: HashSet<&DataType> = types.iter().flatten().collect();
    let of = |one: &DataType| {
        let mut done = None;
        // Beside floats of two widths it is the wider one.
        for float in [DataType::Float64, DataType::Float32] {
            for beside in &distinct {
                if let Some(floated) = floated(done.as_ref().unwrap_or(one), beside, &float) {
                    done = Some(floated);
                }
            }
        }
        done
    };
    let done: HashMap<&DataType, Option<DataType>> = distinct.iter().map(|one| (*one, of(one))).collect();
    types.iter().map(|one| done.get(one.as_ref()?)?.clone()).collect()
}

/// A type with this float in place of decimals where the other has it. A list and what could be in it are alike, as for functions
/// of both. `None`: nowhere.
fn floated(of: &DataType, beside: &DataType, float: &DataType) -> Option<DataType> {
    let beside = innermost(beside);
    let within = |field: &FieldRef, beside: &DataType| -> Option<FieldRef> {
        let data_type = floated(field.data_type(), beside, float)?;
        Some(Arc::new(field.as_ref().clone().with_data_type(data_type)))
    };
    match of {
        decimal if decimal.is_decimal() => (beside == float).then(|| float.clone()),
        DataType::List(element) => Some(DataType::List(within(element, beside)?)),
        DataType::LargeList(element) => Some(DataType::LargeList(within(element, beside)?)),
        DataType::FixedSizeList(element, size) => Some(DataType::FixedSizeList(within(element, beside)?, *size)),
        DataType::Map(entries, sorted) => match beside {
            DataType::Map(others, _) => Some(DataType::Map(within(entries, others.data_type())?, *sorted)),
            _ => None,
        },
        DataType::Struct(parts) => {
            let DataType::Struct(others) = beside else { return None };
            let by_name = parts.iter().all(|part| others.find(part.name()).is_some());
            let mut changed = false;
            let done = parts.iter().enumerate().map(|(i, part)| {
                let other = match by_name {
                    true => others.find(part.name()).map(|(_, other)| other),
                    false => others.get(i),
                };
                match other.and_then(|other| within(part, other.data_type())) {
                    Some(done) => {
                        changed = true;
                        done
                    }
                    None => part.clone(),
                }
            });
            let done: Fields = done.collect();
            changed.then_some(DataType::Struct(done))
        }
        _ => None,
    }
}

fn innermost(of: &DataType) -> &DataType {
    match of {
        DataType::List(element) | DataType::LargeList(element) | DataType::FixedSizeList(element, _) => {
            innermost(element.data_type())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_become_the_widest_float_beside_them() {
        let decimal = || Some(DataType::Decimal128(3, 1));
        let (real, double) = (|| Some(DataType::Float32), || Some(DataType::Float64));
        assert_eq!(
            met(&[decimal(), real(), None, double(), Some(DataType::Int64)]),
            [double(), None, None, None, None]
        );
        assert_eq!(met(&[real(), decimal()]), [None, real()]);
        let list = |of: Option<DataType>| of.map(|of| DataType::new_list(of, true));
        assert_eq!(met(&[list(decimal()), list(double())]), [list(double()), None]);
        assert_eq!(met(&[list(decimal()), double()]), [list(double()), None]);
        assert!(met(&[decimal(), Some(DataType::Int64), Some(DataType::Utf8)]).iter().all(Option::is_none));
    }
}
