//! Clauses that the parser reads and DataFusion drops without a word: each is refused by its name, since without it the rows would
//! be others, or the caller would believe in a promise that nobody keeps.
//!
//! Whatever DataFusion itself refuses, or plans, it is left to. The parser's types are taken apart whole, so that a clause that a
//! new version of the parser knows does not compile before it has been thought of.

use std::ops::ControlFlow;

use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{
    Cte, Expr, Function, FunctionArguments, GroupByExpr, Join, ObjectName, OrderBy, OrderByKind, Query, Select,
    SelectFlavor, SelectItem, SetExpr, SetOperator, TableAlias, TableAliasColumnDef, TableFactor, TableFunctionArgs,
    TableWithJoins, VisitMut, VisitorMut, WildcardAdditionalOptions, With,
};

use super::{place, refused};
use crate::error::{Error, Position, Result};

/// Refuses what would be dropped, and gives `FROM t` the SELECT * that it lacks.
///
/// # Errors
/// `NotSupported`, naming the clause.
pub(super) fn refuse(statement: &mut Parsed) -> Result<()> {
    let statement = match statement {
        Parsed::Statement(statement) => statement.as_mut(),
        Parsed::Explain(explain) => return refuse(&mut explain.statement),
        _ => return Ok(()),
    };
    match statement.visit(&mut Dropped) {
        ControlFlow::Break(error) => Err(error),
        ControlFlow::Continue(()) => Ok(()),
    }
}

struct Dropped;

impl VisitorMut for Dropped {
    type Break = Error;

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<Error> {
        flow(in_query(query))
    }

    fn pre_visit_select(&mut self, select: &mut Select) -> ControlFlow<Error> {
        if select.flavor == SelectFlavor::FromFirstNoSelect && select.projection.is_empty() {
            select.projection.push(SelectItem::Wildcard(WildcardAdditionalOptions::default()));
            select.flavor = SelectFlavor::FromFirst;
        }
        flow(in_select(select))
    }

    fn pre_visit_table_factor(&mut self, table: &mut TableFactor) -> ControlFlow<Error> {
        flow(in_table(table))
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Error> {
        match expr {
            Expr::Function(Function { name, parameters, .. }) if *parameters != FunctionArguments::None => {
                ControlFlow::Break(
                    refused(&format!("{name}(...)(...), a function with parameters,")).at(place_of(name)),
                )
            }
            _ => ControlFlow::Continue(()),
        }
    }
}

fn flow(result: Result<()>) -> ControlFlow<Error> {
    match result {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => ControlFlow::Break(error),
    }
}

fn absent(is_absent: bool, what: &str) -> Result<()> {
    match is_absent {
        true => Ok(()),
        false => Err(refused(what)),
    }
}

fn in_query(query: &Query) -> Result<()> {
    let Query {
        with,
        body,
        order_by,
        // Planned, or refused by DataFusion.
        limit_clause: _,
        fetch: _,
        pipe_operators: _,
        locks,
        for_clause,
        settings,
        format_clause,
    } = query;
    if let Some(lock) = locks.first() {
        return Err(refused(&lock.to_string()));
    }
    if let Some(clause) = for_clause {
        return Err(refused(&clause.to_string()));
    }
    absent(settings.is_none(), "SETTINGS")?;
    absent(format_clause.is_none(), "FORMAT behind a query")?;
    // Which columns those are is only known of a SELECT.
    let by_all = matches!(order_by, Some(OrderBy { kind: OrderByKind::All(_), .. }));
    absent(!by_all || matches!(**body, SetExpr::Select(_)), "ORDER BY ALL of anything but a SELECT")?;
    let Some(With { with_token: _, recursive, cte_tables }) = with else { return Ok(()) };
    for cte in cte_tables {
        // MATERIALIZED says how, and not what.
        let Cte { alias, query, from, materialized: _, closing_paren_token: _ } = cte;
        absent(from.is_none(), "FROM behind a query of WITH")?;
        in_alias(alias)?;
        let Query { with, body, limit_clause, fetch, pipe_operators, .. } = query.as_ref();
        let is_union = matches!(**body, SetExpr::SetOperation { op: SetOperator::Union, .. });
        let plain = with.is_none() && limit_clause.is_none() && fetch.is_none() && pipe_operators.is_empty();
        if *recursive && is_union && !plain {
            return Err(refused("WITH, LIMIT, OFFSET or |> around the UNION of a query of WITH RECURSIVE")
                .at(place(&alias.name)));
        }
    }
    Ok(())
}

fn in_select(select: &Select) -> Result<()> {
    let Select {
        // What they are, and where.
        select_token: _,
        optimizer_hints: _,
        flavor: _,
        // Planned, or refused by DataFusion.
        distinct: _,
        top: _,
        top_before_distinct: _,
        projection: _,
        into: _,
        lateral_views: _,
        selection: _,
        cluster_by: _,
        distribute_by: _,
        sort_by: _,
        having: _,
        named_window: _,
        qualify: _,
        window_before_qualify: _,
        select_modifiers,
        exclude,
        from,
        prewhere,
        connect_by,
        group_by,
        value_table_mode,
    } = select;
    absent(select_modifiers.is_none(), "a word of MySQL's between SELECT and the columns, as SQL_CALC_FOUND_ROWS,")?;
    absent(exclude.is_none(), "EXCLUDE behind all columns (write it behind the *), which")?;
    absent(prewhere.is_none(), "PREWHERE (write WHERE)")?;
    absent(connect_by.is_empty(), "CONNECT BY (write WITH RECURSIVE)")?;
    absent(value_table_mode.is_none(), "SELECT AS STRUCT or AS VALUE")?;
    let (GroupByExpr::All(modifiers) | GroupByExpr::Expressions(_, modifiers)) = group_by;
    if let Some(modifier) = modifiers.first() {
        return Err(refused(&format!("GROUP BY ... {modifier} (write GROUP BY ROLLUP (...) or the like)")));
    }
    from.iter().try_for_each(in_joins)
}

fn in_joins(tables: &TableWithJoins) -> Result<()> {
    // The tables are visited each by itself.
    let TableWithJoins { relation: _, joins } = tables;
    for join in joins {
        // Operators that DataFusion does not plan it refuses.
        let Join { relation: _, global, join_operator: _ } = join;
        absent(!global, "GLOBAL before JOIN")?;
    }
    Ok(())
}

fn in_table(table: &TableFactor) -> Result<()> {
    match table {
        TableFactor::Table {
            name,
            alias,
            args,
            with_hints,
            version,
            with_ordinality,
            partitions,
            json_path,
            sample,
            index_hints,
        } => {
            let at = place_of(name);
            let absent = |is_absent, what: &str| absent(is_absent, what).map_err(|error| error.at(at));
            if let Some(TableFunctionArgs { args: _, settings }) = args {
                absent(settings.is_none(), "SETTINGS of a table function")?;
            }
            if let Some(hint) = with_hints.first() {
                return Err(refused(&format!("the hint WITH ({hint})")).at(at));
            }
            absent(
                version.is_none(),
                "this form of an earlier version (write FOR VERSION AS OF or FOR TIMESTAMP AS OF)",
            )?;
            absent(!with_ordinality, "WITH ORDINALITY")?;
            absent(partitions.is_empty(), "PARTITION (...) behind a table's name")?;
            absent(json_path.is_none(), "a path behind a table's name")?;
            absent(sample.is_none(), "TABLESAMPLE")?;
            absent(index_hints.is_empty(), "USE INDEX or another hint on an index")?;
            alias.as_ref().map_or(Ok(()), in_alias)
        }
        TableFactor::Derived { lateral: _, subquery: _, alias, sample } => {
            absent(sample.is_none(), "TABLESAMPLE")?;
            alias.as_ref().map_or(Ok(()), in_alias)
        }
        TableFactor::Function { lateral: _, name, args: _, with_ordinality, alias } => {
            absent(!with_ordinality, "WITH ORDINALITY").map_err(|error| error.at(place_of(name)))?;
            alias.as_ref().map_or(Ok(()), in_alias)
        }
        TableFactor::UNNEST { alias, array_exprs: _, with_offset: _, with_offset_alias: _, with_ordinality: _ } => {
            alias.as_ref().map_or(Ok(()), in_alias)
        }
        TableFactor::NestedJoin { table_with_joins, alias } => {
            in_joins(table_with_joins)?;
            alias.as_ref().map_or(Ok(()), in_alias)
        }
        // DataFusion refuses them.
        TableFactor::TableFunction { .. }
        | TableFactor::JsonTable { .. }
        | TableFactor::OpenJsonTable { .. }
        | TableFactor::Pivot { .. }
        | TableFactor::Unpivot { .. }
        | TableFactor::MatchRecognize { .. }
        | TableFactor::XmlTable { .. }
        | TableFactor::SemanticView { .. } => Ok(()),
    }
}

fn in_alias(alias: &TableAlias) -> Result<()> {
    let TableAlias { explicit, name, columns, at } = alias;
    // To the parser it is a name, to whoever writes it behind a table ClickHouse's clause.
    let is_final = !explicit && name.quote_style.is_none() && name.value.eq_ignore_ascii_case("final");
    absent(!is_final, "FINAL (if a name is meant, write AS final)").map_err(|error| error.at(place(name)))?;
    absent(at.is_none(), "AT behind a table's name").map_err(|error| error.at(place(name)))?;
    for TableAliasColumnDef { name, data_type } in columns {
        absent(data_type.is_none(), "a type in the names of a table's columns")
            .map_err(|error| error.at(place(name)))?;
    }
    Ok(())
}

fn place_of(name: &ObjectName) -> Option<Position> {
    name.0.first().and_then(|part| part.as_ident()).and_then(place)
}
