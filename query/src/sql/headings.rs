//! Two columns of a result by one name.
//!
//! `SELECT a, a` and `SELECT 1, 1` are queries like others, but no two expressions of a SELECT may have one name in DataFusion, nor may a
//! column that only ORDER BY needs have the name of one that is selected. Where a query cannot be planned as it is written, and columns
//! of its outermost SELECT may be of one name, these get names of their own, and the result has those that were meant. So it is with the
//! query of an INSERT, whose columns go by their place. In a new table, a view and a subquery two columns of one name stay refused:
//! nobody could tell which one is meant.

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::common::{Column, Result as DfResult, TableReference};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{Expr, LogicalPlan, Projection};
use datafusion::sql::parser::{ExplainStatement, Statement as Parsed};
use datafusion::sql::sqlparser::ast::{
    AccessExpr, Expr as Written, Ident, Query, SelectItem, SetExpr, Statement, Subscript, Value,
};

use super::statement::normalize;
use super::values;

/// What the names begin with that stand for others.
const OWN: &str = "__lake_column_";

/// What a column is called in the result.
#[derive(Debug)]
struct Heading {
    /// As it is planned.
    own: String,
    /// As it is written.
    text: String,
    /// The column that has the same name.
    like: Option<usize>,
}

/// The plan of a statement.
pub async fn plan(state: &SessionState, statement: Parsed) -> DfResult<LogicalPlan> {
    let again = renamed(&statement);
    match (values::plan(state, statement).await, again) {
        (Err(error), Some((again, headings))) => match values::plan(state, again).await {
            Ok(plan) => with_headings(plan, &headings),
            Err(_) => Err(error),
        },
        (planned, _) => planned,
    }
}

/// The same statement with other names, if two columns may be of one name.
fn renamed(statement: &Parsed) -> Option<(Parsed, Vec<Heading>)> {
    let query = match statement {
        Parsed::Statement(statement) => match statement.as_ref() {
            Statement::Query(query) => query.as_ref(),
            Statement::Insert(insert) => insert.source.as_deref()?,
            _ => return None,
        },
        Parsed::Explain(explain) => {
            let (again, headings) = renamed(&explain.statement)?;
            let explain = ExplainStatement { statement: Box::new(again), ..explain.clone() };
            return Some((Parsed::Explain(explain), headings));
        }
        _ => return None,
    };
    if !may_share(&query.body, query.order_by.is_some()) {
        return None;
    }
    let mut again = statement.clone();
    let mut headings = Vec::new();
    let Parsed::Statement(statement) = &mut again else { return None };
    let query: &mut Query = match statement.as_mut() {
        Statement::Query(query) => query,
        Statement::Insert(insert) => insert.source.as_deref_mut()?,
        _ => return None,
    };
    let ordered = query.order_by.is_some();
    rename(&mut query.body, ordered, &mut headings);
    Some((again, headings))
}

fn may_share(body: &SetExpr, ordered: bool) -> bool {
    match body {
        SetExpr::Select(select) => {
            let mut seen: Vec<String> = Vec::with_capacity(select.projection.len());
            for item in &select.projection {
                match item {
                    SelectItem::UnnamedExpr(Written::Cast { .. }) if ordered => return true,
                    SelectItem::UnnamedExpr(expr) => seen.push(name_of(expr)),
                    SelectItem::ExprWithAlias { alias, .. } => seen.push(normalize(alias)),
                    _ if select.projection.len() > 1 => return true,
                    _ => {}
                }
            }
            let all = seen.len();
            seen.sort_unstable();
            seen.dedup();
            seen.len() < all
        }
        SetExpr::Query(query) => may_share(&query.body, ordered || query.order_by.is_some()),
        SetExpr::SetOperation { left, right, .. } => may_share(left, false) || may_share(right, false),
        _ => false,
    }
}

/// Gives names of their own to columns that have the name of another one, or may have that of one that is not written out: of `*`, or
/// of what only ORDER BY needs.
fn rename(body: &mut SetExpr, ordered: bool, headings: &mut Vec<Heading>) {
    match body {
        SetExpr::Select(select) => {
            let written =
                |item: &SelectItem| matches!(item, SelectItem::UnnamedExpr(_) | SelectItem::ExprWithAlias { .. });
            let all_written = select.projection.iter().all(written);
            let mut seen: HashMap<String, usize> = HashMap::new();
            for (place, item) in select.projection.iter_mut().enumerate() {
                let (text, expr) = match &*item {
                    SelectItem::UnnamedExpr(expr) => (name_of(expr), expr),
                    SelectItem::ExprWithAlias { expr, alias } => (normalize(alias), expr),
                    _ => continue,
                };
                let like = seen.get(&text).copied();
                let hidden = ordered && matches!(item, SelectItem::UnnamedExpr(Written::Cast { .. }));
                if like.is_none() {
                    seen.insert(text.clone(), place);
                    if all_written && !hidden {
                        continue;
                    }
                }
                let own = format!("{OWN}{}", headings.len());
                let alias = Ident::with_quote('"', own.as_str());
                *item = SelectItem::ExprWithAlias { expr: expr.clone(), alias };
                headings.push(Heading { own, text, like: like.filter(|_| all_written) });
            }
        }
        SetExpr::Query(query) => {
            let ordered = ordered || query.order_by.is_some();
            rename(&mut query.body, ordered, headings);
        }
        SetExpr::SetOperation { left, right, .. } => {
            rename(left, false, headings);
            rename(right, false, headings);
        }
        _ => {}
    }
}

/// What a column is called by whoever reads the statement.
fn name_of(expr: &Written) -> String {
    match expr {
        Written::Identifier(name) => normalize(name),
        Written::CompoundIdentifier(parts) => parts.last().map(normalize).unwrap_or_default(),
        Written::Nested(expr) | Written::Cast { expr, .. } => name_of(expr),
        Written::CompoundFieldAccess { access_chain, .. } => match access_chain.last() {
            Some(AccessExpr::Dot(field)) => name_of(field),
            Some(AccessExpr::Subscript(Subscript::Index { index: Written::Value(value) })) => match &value.value {
                Value::SingleQuotedString(field) => field.clone(),
                _ => expr.to_string(),
            },
            _ => expr.to_string(),
        },
        other => other.to_string(),
    }
}

/// The plan with the names that were meant. Each column has a qualifier of its own, which no result shows.
fn with_headings(plan: LogicalPlan, headings: &[Heading]) -> DfResult<LogicalPlan> {
    let schema = plan.schema().clone();
    let of = |name: &str| headings.iter().find(|heading| heading.own == name);
    if schema.fields().iter().all(|field| of(field.name()).is_none()) {
        return Ok(plan);
    }
    let named = schema.iter().enumerate().map(|(place, (qualifier, field))| {
        let name = match of(field.name()) {
            None => field.name().clone(),
            Some(heading) => {
                let like = heading.like.and_then(|like| schema.fields().get(like)).map(|like| like.name());
                like.filter(|like| of(like).is_none()).unwrap_or(&heading.text).clone()
            }
        };
        let column = Expr::Column(Column::from((qualifier, field)));
        column.alias_qualified(Some(TableReference::bare(place.to_string())), name)
    });
    let named = named.collect();
    Ok(LogicalPlan::Projection(Projection::try_new(named, Arc::new(plan))?))
}

#[cfg(test)]
mod tests {
    use datafusion::prelude::SessionContext;
    use datafusion::sql::parser::DFParser;

    use super::*;

    async fn names(sql: &str) -> DfResult<Vec<String>> {
        let context = SessionContext::new();
        let parsed = DFParser::parse_sql(sql)?.pop_front().unwrap();
        let plan = plan(&context.state(), parsed).await?;
        let rows = context.execute_logical_plan(plan).await?.collect().await?;
        Ok(rows[0].schema().fields().iter().map(|field| field.name().clone()).collect())
    }

    #[tokio::test]
    async fn columns_of_one_name_keep_it() {
        let t = "(VALUES (1, 2)) AS t(a, b)";
        for (select, expected) in [
            ("SELECT a, a FROM @", vec!["a", "a"]),
            ("SELECT t.a, b, a FROM @ ORDER BY a", vec!["a", "b", "a"]),
            ("SELECT a, b AS a FROM @", vec!["a", "a"]),
            ("SELECT *, a FROM @", vec!["a", "b", "a"]),
            ("SELECT 1, 1, 1 FROM @", vec!["Int64(1)"; 3]),
            ("SELECT CAST(a AS VARCHAR), b FROM @ ORDER BY a", vec!["a", "b"]),
            ("SELECT a, a FROM @ UNION ALL SELECT b, b FROM @", vec!["a", "a"]),
            ("SELECT DISTINCT a, a FROM @ ORDER BY a", vec!["a", "a"]),
            ("SELECT count(*), count(*) FROM @", vec!["count(*)"; 2]),
            ("SELECT a AS x, b AS y FROM @", vec!["x", "y"]),
        ] {
            let sql = select.replace('@', t);
            assert_eq!(names(&sql).await.unwrap(), expected, "{sql}");
        }
        for sql in ["SELECT * FROM (SELECT 1, 1) AS v", "CREATE TABLE t AS SELECT 1 AS a, 2 AS a", "SELECT nope, nope"]
        {
            assert!(names(sql).await.is_err(), "{sql}");
        }
    }
}
