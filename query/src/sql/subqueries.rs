//! IN, ANY, ALL and EXISTS of a subquery, where DataFusion does not tell NULL from false, or plans nothing.
//!
//! `k NOT IN (SELECT s FROM ..)` is NULL, and no row's condition, where nothing is equal to k and one of the two is NULL. DataFusion
//! knows that of a condition of its own; beside an OR, within a CASE, a NOT or another operator it takes NULL for false. In a select
//! list it plans none of them. There they become, before anything else looks at the plan,
//!
//! ```text
//! e IN S, e = ANY S      found OR (unknown AND NULL)         found:   EXISTS (S WHERE e = s)
//! e NOT IN S, e <> ALL S NOT (found OR (unknown AND NULL))   unknown: e IS NULL AND EXISTS (S) OR EXISTS (S WHERE s IS NULL)
//! e < ALL S, ..          NOT (found OR (unknown AND NULL))   found:   EXISTS (S WHERE e >= s)
//! ```
//! none of whose parts is NULL. What asks nothing of a row is a scalar subquery, which runs once; in a select list the others are counts.
//!
//! An aggregate without GROUP BY is one row, also of no rows: a correlated one is compared as a scalar subquery is ([`as_one_row`]).
//!
//! What stays wrong there is refused: DataFusion looks at the rows that a correlated subquery means only behind its LIMIT, its window
//! functions, and other aggregates over all of them.

use std::sync::Arc;

use arrow::datatypes::DataType;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion, TreeNodeRewriter};
use datafusion::common::{
    Column, DFSchema, DataFusionError, ExprSchema, JoinType, Result as DfResult, ScalarValue, Spans,
};
use datafusion::functions_aggregate::expr_fn::count;
use datafusion::logical_expr::expr::{Exists, InSubquery, SetComparison, SetQuantifier};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::logical_plan::{FetchType, SkipType};
use datafusion::logical_expr::utils::{merge_schema, split_conjunction, split_conjunction_owned};
use datafusion::logical_expr::{
    BinaryExpr, Distinct, Expr, ExprSchemable, Filter, Join, LogicalPlan, LogicalPlanBuilder, Operator, Subquery,
    binary_expr, lit, when,
};
use datafusion::optimizer::AnalyzerRule;

/// What a subquery's column is called, which nothing outside of it is.
const VALUE: &str = "__lake_in";

/// Comes before all other rules, which see what it makes.
#[derive(Debug)]
pub struct SubqueriesKnowNull;

impl AnalyzerRule for SubqueriesKnowNull {
    fn name(&self) -> &str {
        "subqueries_know_null"
    }

    fn analyze(&self, plan: LogicalPlan, _: &ConfigOptions) -> DfResult<LogicalPlan> {
        Ok(plan.transform_up_with_subqueries(in_plan)?.data)
    }
}

fn in_plan(plan: LogicalPlan) -> DfResult<Transformed<LogicalPlan>> {
    let mut found = false;
    plan.apply_expressions(|expr| {
        found |= has_predicate(expr)?;
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    if !found {
        return Ok(Transformed::no(plan));
    }
    let plan = match plan {
        LogicalPlan::Filter(filter) => in_filter(split_conjunction_owned(filter.predicate), filter.input)?,
        LogicalPlan::Join(join) => in_join(join)?,
        LogicalPlan::Projection(_) => {
            let schema = merge_schema(&plan.inputs());
            let names = NamePreserver::new(&plan);
            let done = plan.map_expressions(|expr| {
                let name = names.save(&expr);
                let expr = expr.transform_up(as_one_row)?.data;
                let done = value(expr, &schema, Place::Value)?;
                Ok(done.update_data(|expr| name.restore(expr)))
            })?;
            done.data.recompute_schema()?
        }
        // Its parts are looked at when they have become a plan.
        LogicalPlan::Dml(_) => return Ok(Transformed::no(plan)),
        other => {
            let place = other.display().to_string();
            let place = place.split(':').next().unwrap_or_default().to_owned();
            return Err(refused(
                &format!(
                    "IN, EXISTS, ANY or ALL of a subquery in GROUP BY, ORDER BY, an aggregate or a window ({place})"
                ),
                "take it into the select list of a subquery in FROM",
            ));
        }
    };
    Ok(Transformed::yes(plan))
}

/// Rows for which all of these are true.
fn in_filter(conditions: Vec<Expr>, input: Arc<LogicalPlan>) -> DfResult<LogicalPlan> {
    let schema = input.schema().clone();
    let rewritten: Vec<Expr> = conditions.into_iter().map(|one| condition(one, &schema)).collect::<DfResult<_>>()?;
    match rewritten.into_iter().reduce(Expr::and) {
        Some(predicate) => Ok(LogicalPlan::Filter(Filter::try_new(predicate, input)?)),
        None => Ok(Arc::unwrap_or_clone(input)),
    }
}

/// A condition of ON is one of the joined rows, or of the rows of the side that may be missing.
fn in_join(mut join: Join) -> DfResult<LogicalPlan> {
    let mut conditions = Vec::new();
    let mut rest = Vec::new();
    for one in join.filter.take().map(split_conjunction_owned).unwrap_or_default() {
        match has_predicate(&one)? {
            true => conditions.push(one),
            false => rest.push(one),
        }
    }
    join.filter = rest.into_iter().reduce(Expr::and);
    let side = match join.join_type {
        JoinType::Inner => return in_filter(conditions, Arc::new(LogicalPlan::Join(join))),
        JoinType::Left => &mut join.right,
        JoinType::Right => &mut join.left,
        _ => return Err(in_on()),
    };
    for condition in &conditions {
        if !columns_of(condition)?.iter().all(|column| side.schema().has_column(column)) {
            return Err(in_on());
        }
    }
    *side = Arc::new(in_filter(conditions, side.clone())?);
    Ok(LogicalPlan::Join(join))
}

fn in_on() -> DataFusionError {
    refused(
        "IN, EXISTS, ANY or ALL of a subquery in the ON condition of this outer join",
        "take it into the select list of a subquery in FROM, and ON that column",
    )
}

/// One of the conditions of a filter.
fn condition(expr: Expr, schema: &DFSchema) -> DfResult<Expr> {
    let expr = expr.transform_up(as_one_row)?.data;
    let expr = expr.transform_up(|expr| Ok(as_in(expr)))?.data;
    let not_in = match &expr {
        Expr::InSubquery(within) if within.negated => Some(within),
        Expr::Not(of) => match of.as_ref() {
            Expr::InSubquery(within) if !within.negated => Some(within),
            _ => None,
        },
        _ => None,
    };
    // As an anti join that knows NULL, on one column.
    if let Some(InSubquery { expr: of, subquery, .. }) = not_in
        && subquery.outer_ref_columns.is_empty()
        && of.any_column_refs()
        && !of.contains_outer()
        && !of.is_volatile()
        && !has_subquery(of)?
    {
        return Ok(expr);
    }
    Ok(expr.rewrite(&mut Conditions { schema, matters: Vec::new() })?.data)
}

/// What is compared with a correlated aggregate over all of its rows is compared with the one row that it has. HAVING leaves that
/// row, or none.
fn as_one_row(expr: Expr) -> DfResult<Transformed<Expr>> {
    let (Expr::InSubquery(InSubquery { subquery, .. })
    | Expr::SetComparison(SetComparison { subquery, .. })
    | Expr::Exists(Exists { subquery, .. })) = &expr
    else {
        return Ok(Transformed::no(expr));
    };
    if subquery.outer_ref_columns.is_empty() {
        return Ok(Transformed::no(expr));
    }
    let Some(row) = OneRow::of(subquery)? else { return Ok(Transformed::no(expr)) };
    let (compared, of_none) = match expr {
        Expr::InSubquery(InSubquery { expr, negated, .. }) => {
            let op = if negated { Operator::NotEq } else { Operator::Eq };
            (binary_expr(*expr, op, row.value), negated)
        }
        Expr::SetComparison(SetComparison { expr, op, quantifier, .. }) => {
            (binary_expr(*expr, op, row.value), matches!(quantifier, SetQuantifier::All))
        }
        Expr::Exists(Exists { negated, .. }) => (lit(!negated), negated),
        other => return Ok(Transformed::no(other)),
    };
    Ok(Transformed::yes(match row.is_there {
        None => compared,
        Some(is_there) => when(is_there, compared).otherwise(lit(of_none))?,
    }))
}

/// The row of an aggregate without GROUP BY.
struct OneRow {
    /// Its only column.
    value: Expr,
    /// The condition of HAVING, which is never NULL.
    is_there: Option<Expr>,
}

impl OneRow {
    /// `None`: it is another subquery, or one whose row DataFusion would not find for each row around it.
    fn of(subquery: &Subquery) -> DfResult<Option<Self>> {
        let mut plan = &subquery.subquery;
        while let LogicalPlan::Distinct(Distinct::All(input)) = plan.as_ref() {
            plan = input;
        }
        let LogicalPlan::Projection(projection) = plan.as_ref() else { return Ok(None) };
        let [column] = projection.expr.as_slice() else { return Ok(None) };
        let (input, having) = match projection.input.as_ref() {
            LogicalPlan::Filter(filter) => (&filter.input, Some(&filter.predicate)),
            _ => (&projection.input, None),
        };
        let LogicalPlan::Aggregate(aggregate) = input.as_ref() else { return Ok(None) };
        let is_plain = aggregate.group_expr.is_empty() && !aggregate.aggr_expr.is_empty();
        let is_tied = !input.contains_outer_reference() && !aggregate.input.all_out_ref_exprs().is_empty();
        if !is_plain || !is_tied || !has_ties(&aggregate.input)? {
            return Ok(None);
        }
        // What does not depend on the aggregate, or on more than that, has no value of no rows in DataFusion.
        for expr in std::iter::once(column).chain(having) {
            if !expr.any_column_refs() || expr.contains_outer() || expr.is_volatile() || has_subquery(expr)? {
                return Ok(None);
            }
        }
        let of_row = |expr: &Expr| -> DfResult<Expr> {
            let column = expr.clone().unalias().alias(VALUE);
            let plan = LogicalPlanBuilder::from(input.as_ref().clone()).project([column])?.build()?;
            let outer_ref_columns = plan.all_out_ref_exprs();
            Ok(Expr::ScalarSubquery(Subquery { subquery: Arc::new(plan), outer_ref_columns, spans: Spans::new() }))
        };
        let is_there = having.map(|having| of_row(having).map(|is| Expr::IsTrue(Box::new(is)))).transpose()?;
        Ok(Some(Self { value: of_row(column)?, is_there }))
    }
}

/// Whether what ties rows to the row around is in conditions that can be taken out from under an aggregate over these: each that a column
/// is equal to something, without a cast that makes one value of two.
fn has_ties(plan: &LogicalPlan) -> DfResult<bool> {
    if plan.all_out_ref_exprs().is_empty() {
        return Ok(true);
    }
    match plan {
        LogicalPlan::Filter(filter) => {
            let schema = filter.input.schema();
            let ties = split_conjunction(&filter.predicate);
            let ties = ties.into_iter().filter(|one| one.contains_outer()).all(|one| is_tie(one, schema));
            Ok(ties && has_ties(&filter.input)?)
        }
        LogicalPlan::Projection(_) | LogicalPlan::SubqueryAlias(_) | LogicalPlan::Join(_) => {
            let is_inner = !matches!(plan, LogicalPlan::Join(join) if join.join_type != JoinType::Inner);
            let mut ties = is_inner && !plan.contains_outer_reference();
            for input in plan.inputs() {
                ties = ties && has_ties(input)?;
            }
            Ok(ties)
        }
        _ => Ok(false),
    }
}

fn is_tie(condition: &Expr, schema: &DFSchema) -> bool {
    let Expr::BinaryExpr(BinaryExpr { left, op: Operator::Eq, right }) = condition else { return false };
    let (column, other) = match (left.as_ref(), right.as_ref()) {
        (column @ Expr::Column(_), other) | (other, column @ Expr::Column(_)) => (column, other),
        _ => return false,
    };
    match (column.get_type(schema), other.get_type(schema)) {
        (Ok(of), Ok(beside)) => !other.any_column_refs() && stays_apart(&of, &beside),
        _ => false,
    }
}

/// Whether two values of the first type stay two where they are compared with one of the second.
fn stays_apart(of: &DataType, beside: &DataType) -> bool {
    let is_text = |of: &DataType| matches!(of, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let is_exact = |of: &DataType| of.is_integer() || of.is_decimal();
    of == beside
        || (is_exact(of) && is_exact(beside))
        || (of.is_floating() && beside.is_floating())
        || (is_text(of) && is_text(beside))
}

/// ANY and ALL that are IN and NOT IN, which are found by a join.
fn as_in(expr: Expr) -> Transformed<Expr> {
    let negated = match &expr {
        Expr::SetComparison(SetComparison { op: Operator::Eq, quantifier: SetQuantifier::Any, .. }) => false,
        Expr::SetComparison(SetComparison { op: Operator::NotEq, quantifier: SetQuantifier::All, .. }) => true,
        _ => return Transformed::no(expr),
    };
    match expr {
        Expr::SetComparison(SetComparison { expr, subquery, .. }) => {
            Transformed::yes(Expr::InSubquery(InSubquery { expr, subquery, negated }))
        }
        other => Transformed::no(other),
    }
}

/// Goes down from a condition through AND, OR and NOT: for what is there it matters only when it is true, or only when it is false.
struct Conditions<'a> {
    schema: &'a DFSchema,
    /// The value that matters, of each expression on the way.
    matters: Vec<bool>,
}

impl TreeNodeRewriter for Conditions<'_> {
    type Node = Expr;

    fn f_down(&mut self, expr: Expr) -> DfResult<Transformed<Expr>> {
        let matters = self.matters.last().copied().unwrap_or(true);
        match &expr {
            Expr::BinaryExpr(BinaryExpr { op: Operator::And | Operator::Or, .. }) => self.matters.push(matters),
            Expr::Not(_) => self.matters.push(!matters),
            // Where it is NULL, false does as well.
            Expr::InSubquery(within) if within.negated != matters => {
                check(&within.expr, &within.subquery, false)?;
                self.matters.push(matters);
                return Ok(Transformed::new(expr, false, TreeNodeRecursion::Jump));
            }
            _ => {
                self.matters.push(matters);
                let done = value(expr, self.schema, Place::Condition)?;
                return Ok(Transformed::new(done.data, done.transformed, TreeNodeRecursion::Jump));
            }
        }
        Ok(Transformed::no(expr))
    }

    fn f_up(&mut self, expr: Expr) -> DfResult<Transformed<Expr>> {
        self.matters.pop();
        Ok(Transformed::no(expr))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In a condition, where DataFusion plans EXISTS.
    Condition,
    /// In a select list, where it plans none.
    Value,
}

/// An expression whose value matters, also where it is NULL.
fn value(expr: Expr, schema: &DFSchema, place: Place) -> DfResult<Transformed<Expr>> {
    expr.transform_up(|expr| {
        Ok(Transformed::yes(match expr {
            Expr::Exists(exists) => {
                check_rows(&exists.subquery, place == Place::Condition)?;
                match place {
                    Place::Condition => return Ok(Transformed::no(Expr::Exists(exists))),
                    Place::Value => {
                        let plan = exists.subquery.subquery.as_ref().clone();
                        negated_if(exists.negated, there_are(plan, place)?)
                    }
                }
            }
            Expr::InSubquery(within) => {
                let nullable = Expr::InSubquery(within.clone()).nullable(schema).unwrap_or(true);
                if place == Place::Condition && !nullable {
                    check(&within.expr, &within.subquery, false)?;
                    return Ok(Transformed::no(Expr::InSubquery(within)));
                }
                let quantifier = if within.negated { SetQuantifier::All } else { SetQuantifier::Any };
                let op = if within.negated { Operator::NotEq } else { Operator::Eq };
                compared(*within.expr, &within.subquery, op, &quantifier, schema, place)?
            }
            Expr::SetComparison(SetComparison { expr, subquery, op, quantifier }) => {
                compared(*expr, &subquery, op, &quantifier, schema, place)?
            }
            other => return Ok(Transformed::no(other)),
        }))
    })
}

/// `of op ANY (subquery)`, or ALL.
fn compared(
    of: Expr,
    subquery: &Subquery,
    op: Operator,
    quantifier: &SetQuantifier,
    schema: &DFSchema,
    place: Place,
) -> DfResult<Expr> {
    check(&of, subquery, true)?;
    let all = matches!(quantifier, SetQuantifier::All);
    let rows = subquery.subquery.as_ref();
    let (relation, field) = rows.schema().qualified_field(0);
    let column = Expr::Column(Column::from((relation, field)));
    let rows = LogicalPlanBuilder::from(rows.clone()).project([column.alias(VALUE)])?.build()?;
    let value = || Expr::Column(Column::new_unqualified(VALUE));
    let outer = outer_reference(of.clone(), schema)?;
    // ALL is false for one row for which it is not.
    let comparison = match (all, op.negate()) {
        (false, _) => binary_expr(outer, op, value()),
        (true, Some(negated)) => binary_expr(outer, negated, value()),
        (true, None) => Expr::Not(Box::new(binary_expr(outer, op, value()))),
    };
    let is_equality = matches!(&comparison, Expr::BinaryExpr(BinaryExpr { op: Operator::Eq, .. }));
    if place == Place::Value && comparison.contains_outer() && !is_equality {
        return Err(refused(
            &format!("{op} {quantifier} of a subquery in a select list, or in ON of a MERGE with WHEN NOT MATCHED"),
            "compare with the least or the greatest of the subquery's values",
        ));
    }
    let with = |condition: Expr| -> DfResult<Expr> {
        there_are(LogicalPlanBuilder::from(rows.clone()).filter(condition)?.build()?, place)
    };
    let found = with(comparison)?;
    let mut unknown = Vec::new();
    // What cannot tell yet may be.
    if of.nullable(schema).unwrap_or(true) {
        unknown.push(of.is_null().and(there_are(rows.clone(), place)?));
    }
    if field.is_nullable() {
        unknown.push(with(value().is_null())?);
    }
    let known = match unknown.into_iter().reduce(Expr::or) {
        Some(unknown) => found.or(unknown.and(lit(ScalarValue::Boolean(None)))),
        None => found,
    };
    Ok(negated_if(all, known))
}

fn negated_if(negated: bool, expr: Expr) -> Expr {
    match negated {
        true => Expr::Not(Box::new(expr)),
        false => expr,
    }
}

/// Whether a plan has rows, which is never NULL.
fn there_are(plan: LogicalPlan, place: Place) -> DfResult<Expr> {
    let outer_ref_columns = plan.all_out_ref_exprs();
    let subquery = |plan: LogicalPlan, outer_ref_columns| Subquery {
        subquery: Arc::new(plan),
        outer_ref_columns,
        spans: Spans::new(),
    };
    let once = outer_ref_columns.is_empty();
    if !once && place == Place::Condition {
        return Ok(Expr::Exists(Exists { subquery: subquery(plan, outer_ref_columns), negated: false }));
    }
    let mut rows = LogicalPlanBuilder::from(plan);
    if once {
        rows = rows.limit(0, Some(1))?;
    }
    let counted = rows.aggregate(Vec::<Expr>::new(), vec![count(lit(1_i64))])?.build()?;
    let columns: Vec<Expr> = counted.schema().columns().into_iter().map(Expr::Column).collect();
    let counted = LogicalPlanBuilder::from(counted).project(columns)?.build()?;
    let count = Expr::ScalarSubquery(subquery(counted, outer_ref_columns));
    // Of none that match, the count may be NULL.
    Ok(Expr::IsTrue(Box::new(count.gt(lit(0_i64)))))
}

/// An expression as a subquery sees it.
fn outer_reference(expr: Expr, schema: &DFSchema) -> DfResult<Expr> {
    let done = expr.transform_up(|expr| match expr {
        Expr::Column(column) => {
            let field = schema.field_from_column(&column)?.clone();
            Ok(Transformed::yes(Expr::OuterReferenceColumn(field, column)))
        }
        other => Ok(Transformed::no(other)),
    })?;
    Ok(done.data)
}

/// What is compared with a subquery must be that once, and the subquery must be one that DataFusion takes for what it says.
///
/// # Errors
/// `NotImplemented` for what would be wrong; with `again`, also where it would be if both stood there more than once.
fn check(of: &Expr, subquery: &Subquery, again: bool) -> DfResult<()> {
    if of.is_volatile() {
        let words = format!("comparing {of}, which is another value each time, with a subquery");
        return Err(refused(&words, "compute it in a subquery in FROM, with LIMIT, or write it into a table"));
    }
    check_rows(subquery, false)?;
    if !again {
        return Ok(());
    }
    let plan = subquery.subquery.as_ref();
    let mut volatile = false;
    plan.apply_with_subqueries(|plan| {
        plan.apply_expressions(|expr| {
            volatile |= expr.is_volatile();
            Ok(TreeNodeRecursion::Continue)
        })
    })?;
    if volatile {
        return Err(refused(
            "NOT IN, IN, ANY or ALL of a subquery whose rows are others each time, where it can be NULL,",
            "write its rows into a table, or let it be a condition of its own",
        ));
    }
    if of.contains_outer() || has_correlated(of)? {
        return Err(refused(
            "comparing a column of an outer query with a subquery, where that can be NULL,",
            "write EXISTS or NOT EXISTS, with a condition",
        ));
    }
    if subquery.outer_ref_columns.is_empty() {
        return Ok(());
    }
    // One of the same name would be taken for it.
    let columns = of.column_refs();
    let mut hidden = false;
    plan.apply(|plan| {
        hidden |= columns.iter().any(|column| plan.schema().has_column(column));
        Ok(TreeNodeRecursion::Continue)
    })?;
    match hidden {
        true => Err(refused(
            "comparing a column with a correlated subquery that has a column of that name",
            "give the table another name in the subquery (FROM t AS u)",
        )),
        false => Ok(()),
    }
}

/// Whether DataFusion, which takes the conditions that tie a subquery to its row out of it, would look at other rows then.
fn check_rows(subquery: &Subquery, exists: bool) -> DfResult<()> {
    if subquery.outer_ref_columns.is_empty() {
        return Ok(());
    }
    const BY_EQUALITY: &str = "compare with the subquery by = instead of IN, or join with it";
    const BY_JOIN: &str = "let a column = a value of its type be what ties it to the row, or join with it";
    let mut found = None;
    subquery.subquery.apply(|plan| {
        let mut instead = BY_EQUALITY;
        let correlated = |plan: &LogicalPlan| !plan.all_out_ref_exprs().is_empty();
        let words = match plan {
            LogicalPlan::Limit(limit) => {
                let any_row = matches!(limit.get_skip_type()?, SkipType::Literal(0))
                    && matches!(limit.get_fetch_type()?, FetchType::Literal(_));
                if exists && any_row {
                    return Ok(TreeNodeRecursion::Continue);
                }
                "LIMIT or OFFSET"
            }
            LogicalPlan::Window(_) => "a window function",
            LogicalPlan::Aggregate(aggregate)
                if aggregate.group_expr.is_empty()
                    || aggregate.group_expr.iter().any(|by| matches!(by, Expr::GroupingSet(_))) =>
            {
                instead = BY_JOIN;
                "an aggregate without GROUP BY, or with GROUPING SETS"
            }
            LogicalPlan::Distinct(Distinct::On(_)) => "DISTINCT ON",
            _ => return Ok(TreeNodeRecursion::Continue),
        };
        if plan.inputs().into_iter().any(correlated) {
            found = Some((words, instead));
            return Ok(TreeNodeRecursion::Stop);
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    match found {
        None => Ok(()),
        Some((words, instead)) => {
            Err(refused(&format!("IN, EXISTS, ANY or ALL of a correlated subquery with {words}"), instead))
        }
    }
}

fn has_predicate(expr: &Expr) -> DfResult<bool> {
    expr.exists(|expr| Ok(matches!(expr, Expr::InSubquery(_) | Expr::SetComparison(_) | Expr::Exists(_))))
}

fn has_subquery(expr: &Expr) -> DfResult<bool> {
    Ok(has_predicate(expr)? || expr.exists(|expr| Ok(matches!(expr, Expr::ScalarSubquery(_))))?)
}

/// The subquery that an expression is, if it is one.
pub(super) fn subquery_of(expr: &Expr) -> Option<&Subquery> {
    match expr {
        Expr::InSubquery(InSubquery { subquery, .. })
        | Expr::Exists(Exists { subquery, .. })
        | Expr::SetComparison(SetComparison { subquery, .. })
        | Expr::ScalarSubquery(subquery) => Some(subquery),
        _ => None,
    }
}

pub(super) fn has_correlated(expr: &Expr) -> DfResult<bool> {
    expr.exists(|expr| Ok(subquery_of(expr).is_some_and(|subquery| !subquery.outer_ref_columns.is_empty())))
}

/// The columns that an expression sees, also within subqueries.
fn columns_of(expr: &Expr) -> DfResult<Vec<Column>> {
    let mut columns = Vec::new();
    expr.apply(|expr| {
        let outer = subquery_of(expr).map(|subquery| subquery.outer_ref_columns.as_slice()).unwrap_or_default();
        for expr in std::iter::once(expr).chain(outer) {
            if let Expr::Column(column) | Expr::OuterReferenceColumn(_, column) = expr {
                columns.push(column.clone());
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(columns)
}

pub(super) fn refused(what: &str, instead: &str) -> DataFusionError {
    DataFusionError::NotImplemented(format!("{what}; {instead}"))
}
