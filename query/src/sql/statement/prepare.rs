//! What DataFusion would take wrongly, or not at all, made plain before it plans a statement.

use std::collections::HashSet;
use std::ops::ControlFlow;

use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{
    Assignment, AssignmentTarget, CastKind, DataType, ExactNumberInfo, Expr, Ident, Merge, MergeAction, MergeClause,
    MergeClauseKind, MergeUpdateExpr, ObjectName, ObjectNamePart, SelectItem, SetExpr, SetQuantifier, Statement,
    TableFactor, Update, UpdateTableFromKind, Value, ValueWithSpan, VisitMut, visit_expressions_mut,
};

use super::{normalize, place, refused};
use crate::error::{Error, Result};

/// A number with an exponent is a float, as in other databases; without one it is a decimal.
pub(super) fn exponents_are_floats(statement: &mut Parsed) {
    let statement = match statement {
        Parsed::Statement(statement) => statement.as_mut(),
        Parsed::Explain(explain) => return exponents_are_floats(&mut explain.statement),
        _ => return,
    };
    floats_in(statement);
}

/// The same of a part of a statement.
pub(super) fn floats_in(part: &mut impl VisitMut) {
    let _ = visit_expressions_mut(part, |expr| {
        if let Expr::Value(number) = expr
            && let Value::Number(text, _) = &number.value
            && text.contains(['e', 'E'])
        {
            let text = Expr::Value(ValueWithSpan { value: Value::SingleQuotedString(text.clone()), span: number.span });
            let data_type = DataType::Double(ExactNumberInfo::None);
            let expr_as_text = Box::new(text);
            *expr = Expr::Cast { kind: CastKind::Cast, expr: expr_as_text, data_type, array: false, format: None };
        }
        ControlFlow::<()>::Continue(())
    });
}

/// The expression as it was before [`floats_in`].
pub(in crate::sql) fn floats_as_written(expr: &Expr) -> Expr {
    let mut expr = expr.clone();
    let _ = visit_expressions_mut(&mut expr, |part| {
        let number = match part {
            Expr::Cast { expr, data_type: DataType::Double(ExactNumberInfo::None), .. } => match expr.as_ref() {
                Expr::Value(ValueWithSpan { value: Value::SingleQuotedString(text), span })
                    if text.contains(['e', 'E']) && text.parse::<f64>().is_ok() =>
                {
                    Some(ValueWithSpan { value: Value::Number(text.clone(), false), span: *span })
                }
                _ => None,
            },
            _ => None,
        };
        if let Some(number) = number {
            *part = Expr::Value(number);
        }
        ControlFlow::<()>::Continue(())
    });
    expr
}

/// What is inserted goes by its place: that two columns of the query have one name is nothing to it, and DataFusion refuses it.
/// So what comes again gets another name.
pub(super) fn inserts_go_by_place(statement: &mut Parsed) {
    match statement {
        Parsed::Statement(statement) => {
            if let Statement::Insert(insert) = statement.as_mut()
                && let Some(query) = &mut insert.source
            {
                names_differ(&mut query.body);
            }
        }
        Parsed::Explain(explain) => inserts_go_by_place(&mut explain.statement),
        _ => {}
    }
}

fn names_differ(body: &mut SetExpr) {
    let select = match body {
        SetExpr::Select(select) => select,
        SetExpr::Query(query) => return names_differ(&mut query.body),
        // Here names say which columns belong together.
        SetExpr::SetOperation {
            set_quantifier: SetQuantifier::ByName | SetQuantifier::AllByName | SetQuantifier::DistinctByName,
            ..
        } => return,
        SetExpr::SetOperation { left, right, .. } => {
            names_differ(left);
            return names_differ(right);
        }
        _ => return,
    };
    let any_column = |item: &SelectItem| matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..));
    let any_column = select.projection.iter().any(any_column);
    let mut seen = HashSet::new();
    for (i, item) in select.projection.iter_mut().enumerate() {
        let (name, again) = match &*item {
            SelectItem::UnnamedExpr(expr) => match uncast(expr) {
                Expr::Identifier(column) => (normalize(column), any_column),
                Expr::CompoundIdentifier(parts) => (parts.last().map(normalize).unwrap_or_default(), any_column),
                expr => (expr.to_string(), false),
            },
            SelectItem::ExprWithAlias { alias, .. } => (normalize(alias), false),
            _ => continue,
        };
        if seen.insert(name) && !again {
            continue;
        }
        let alias = Ident::with_quote('"', format!("__lake_{i}"));
        match item {
            SelectItem::UnnamedExpr(expr) => {
                let expr = std::mem::replace(expr, Expr::value(Value::Null));
                *item = SelectItem::ExprWithAlias { expr, alias };
            }
            SelectItem::ExprWithAlias { alias: named, .. } => *named = alias,
            _ => {}
        }
    }
}

/// What is cast: to DataFusion a cast has its name.
fn uncast(expr: &Expr) -> &Expr {
    match expr {
        Expr::Cast { expr, .. } | Expr::Nested(expr) => uncast(expr),
        other => other,
    }
}

/// What DataFusion would take wrongly, or not at all, is made plain: names of assigned columns as the table has them, and
/// UPDATE ... FROM as the MERGE that it is.
pub(super) fn prepare_update(statement: &mut Statement) -> Result<()> {
    match statement {
        Statement::Update(update) => {
            // A row that the join has twice would be written twice.
            if update.from.is_none() && !update.table.joins.is_empty() {
                return Err(refused("UPDATE of a join (write UPDATE ... FROM)"));
            }
            let target = target_names(&update.table.relation);
            assigned_columns(&mut update.assignments, &target)?;
        }
        Statement::Merge(merge) => {
            let target = target_names(&merge.table);
            for clause in &mut merge.clauses {
                if let MergeAction::Update(update) = &mut clause.action {
                    assigned_columns(&mut update.assignments, &target)?;
                }
            }
        }
        _ => return Ok(()),
    }
    if let Statement::Update(update) = statement
        && update.from.is_some()
    {
        *statement = update_from(update.clone())?;
    }
    Ok(())
}

/// What the columns of a table may be qualified with.
fn target_names(table: &TableFactor) -> Vec<String> {
    match table {
        TableFactor::Table { name, alias, .. } => {
            let last = name.0.last().and_then(|part| part.as_ident()).map(normalize);
            last.into_iter().chain(alias.as_ref().map(|alias| normalize(&alias.name))).collect()
        }
        _ => Vec::new(),
    }
}

/// DataFusion looks at the last part of an assigned name only, takes it literally, and lets the last of several win.
fn assigned_columns(assignments: &mut [Assignment], target: &[String]) -> Result<()> {
    let mut seen = HashSet::new();
    for assignment in assignments {
        let AssignmentTarget::ColumnName(ObjectName(parts)) = &mut assignment.target else {
            return Err(refused("assigning to several columns at once"));
        };
        let parts_of_name: Vec<Ident> = parts.iter().filter_map(|part| part.as_ident().cloned()).collect();
        let column = match parts_of_name.as_slice() {
            [column] => column,
            [qualifiers @ .., table, column] if target.contains(&normalize(table)) && qualifiers.len() < 3 => column,
            [first, ..] => {
                return Err(
                    refused("assigning to a part of a column, or to a column of another table,").at(place(first))
                );
            }
            [] => return Err(refused("this form of SET")),
        };
        let name = normalize(column);
        if !seen.insert(name.clone()) {
            return Err(Error::invalid(format!("column {name} is assigned twice")).at(place(column)));
        }
        let mut column = column.clone();
        column.value = name;
        column.quote_style = Some('"');
        *parts = vec![ObjectNamePart::Identifier(column)];
    }
    Ok(())
}

/// `UPDATE t SET .. FROM s WHERE p` is `MERGE INTO t USING s ON p WHEN MATCHED THEN UPDATE SET ..`.
fn update_from(update: Update) -> Result<Statement> {
    let (UpdateTableFromKind::BeforeSet(mut from) | UpdateTableFromKind::AfterSet(mut from)) =
        update.from.ok_or_else(|| Error::internal("UPDATE without FROM was taken for one with it"))?;
    let (Some(source), true) = (from.pop(), from.is_empty()) else {
        return Err(refused("UPDATE ... FROM several tables; name a subquery, which"));
    };
    if !update.table.joins.is_empty() || !source.joins.is_empty() {
        return Err(refused("UPDATE ... FROM with a join; name a subquery, which"));
    }
    let (or, returning, order_by, limit) = (&update.or, &update.returning, &update.order_by, &update.limit);
    let clauses = [
        (or.is_some(), "OR"),
        (returning.is_some(), "RETURNING"),
        (!order_by.is_empty(), "ORDER BY"),
        (limit.is_some(), "LIMIT"),
    ];
    if let Some((_, clause)) = clauses.iter().find(|(is_there, _)| *is_there) {
        return Err(refused(&format!("UPDATE ... FROM with {clause}")));
    }
    let on = update.selection.unwrap_or_else(|| Expr::value(Value::Boolean(true)));
    let assignments = update.assignments;
    let action = MergeUpdateExpr {
        update_token: update.update_token.clone(),
        assignments,
        update_predicate: None,
        delete_predicate: None,
    };
    let clause = MergeClause {
        when_token: update.update_token.clone(),
        clause_kind: MergeClauseKind::Matched,
        predicate: None,
        action: MergeAction::Update(action),
    };
    Ok(Statement::Merge(Merge {
        merge_token: update.update_token,
        optimizer_hints: update.optimizer_hints,
        into: true,
        table: update.table.relation,
        source: source.relation,
        on: Box::new(on),
        clauses: vec![clause],
        output: update.output,
    }))
}
