//! SHOW statements that DataFusion does not know.

use std::ops::ControlFlow;

use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{
    Ident, ObjectName, ObjectNamePart, ShowCreateObject, ShowStatementFilter, ShowStatementFilterPosition,
    ShowStatementOptions, Statement, visit_relations_mut,
};
use datafusion::sql::sqlparser::tokenizer::Span;

use super::{normalize, refused};
use crate::error::{Error, Result};
use crate::sql::{CATALOG, system};

/// Such a statement as a query.
pub(super) fn as_query(statement: &Parsed) -> Result<Option<String>> {
    let Parsed::Statement(statement) = statement else { return Ok(None) };
    match statement.as_ref() {
        Statement::ShowSchemas { show_options, .. } | Statement::ShowDatabases { show_options, .. } => {
            if show_options.show_in.is_some() {
                return Err(refused("SHOW SCHEMAS IN"));
            }
            let like = like(show_options, "schema_name", "SHOW SCHEMAS")?;
            Ok(Some(format!(
                "SELECT schema_name FROM {CATALOG}.information_schema.schemata \
                 WHERE schema_name <> 'information_schema'{like} ORDER BY 1"
            )))
        }
        Statement::ShowTables {
            show_options,
            extended: false,
            full: false,
            terse: false,
            history: false,
            external: false,
        } => {
            let schema = match show_options.show_in.as_ref().map(|show_in| &show_in.parent_name) {
                None => None,
                Some(Some(ObjectName(parts))) => match parts.as_slice() {
                    [part] => match part.as_ident() {
                        Some(schema) => Some(normalize(schema)),
                        None => return Err(refused("this form of SHOW TABLES")),
                    },
                    _ => return Err(refused("SHOW TABLES in a qualified schema")),
                },
                Some(None) => return Err(refused("this form of SHOW TABLES")),
            };
            let of_schema =
                schema.as_ref().map(|schema| format!(" AND table_schema = '{}'", schema.replace('\'', "''")));
            let of_schema = of_schema.unwrap_or_default();
            let mut all = format!("{CATALOG}.information_schema.tables");
            if schema.as_deref() == Some(system::SYSTEM) {
                let own = system::NAMES.map(|name| format!("('{name}')")).join(", ");
                all = format!(
                    "(SELECT table_schema, table_name FROM {all} UNION SELECT '{}', column1 FROM (VALUES {own}))",
                    system::SYSTEM
                );
            }
            let like = like(show_options, "table_name", "SHOW TABLES")?;
            Ok(Some(format!(
                "SELECT table_schema, table_name FROM {all} \
                 WHERE table_schema <> 'information_schema'{of_schema}{like} ORDER BY 1, 2"
            )))
        }
        Statement::ShowViews { show_options, terse: false, materialized: false } if show_options.show_in.is_none() => {
            let like = like(show_options, "table_name", "SHOW VIEWS")?;
            Ok(Some(format!(
                "SELECT table_schema, table_name FROM {CATALOG}.information_schema.tables \
                 WHERE table_type = 'VIEW' AND table_schema <> 'information_schema'{like} ORDER BY 1, 2"
            )))
        }
        // DataFusion shows each overload, and leaves out functions that tell their types from what they are called with.
        Statement::ShowFunctions { filter } => {
            let like = filter
                .as_ref()
                .map_or(Ok(String::new()), |filter| filtered(filter, "routine_name", "SHOW FUNCTIONS"))?;
            Ok(Some(format!(
                "SELECT routine_name AS function_name, function_type, \
                 array_to_string(array_sort(array_agg(DISTINCT data_type) FILTER (WHERE data_type IS NOT NULL)), ', ') AS return_type, \
                 max(syntax_example) AS syntax_example, max(description) AS description \
                 FROM {CATALOG}.information_schema.routines WHERE true{like} GROUP BY routine_name, function_type ORDER BY 1, 2"
            )))
        }
        Statement::ShowCreate { obj_type: ShowCreateObject::Table, obj_name } => {
            let table = obj_name.0.iter().filter_map(ObjectNamePart::as_ident);
            of_metadata("create_statement", table, "create", "SHOW CREATE TABLE").map(Some)
        }
        Statement::ShowCreate { obj_type: ShowCreateObject::View, obj_name } => {
            let view = obj_name.0.iter().filter_map(ObjectNamePart::as_ident);
            of_metadata("create_statement", view, "create_view", "SHOW CREATE VIEW").map(Some)
        }
        // The parser takes it for the name of a setting.
        Statement::ShowVariable { variable }
            if variable.first().is_some_and(|first| normalize(first) == "tblproperties") =>
        {
            of_metadata("property, value", variable.iter().skip(1), "properties", "SHOW TBLPROPERTIES").map(Some)
        }
        Statement::ShowVariable { variable } if is_dropped_tables(variable) => Ok(Some(format!(
            "SELECT table_schema, table_name, dropped, undroppable_until FROM {CATALOG}.{}.{} ORDER BY dropped, 1, 2",
            system::SYSTEM,
            system::DROPPED
        ))),
        _ => Ok(None),
    }
}

/// Where the statement names the table or view that its query ([`as_query`]) reads, if it does.
pub(super) fn place_of_table(statement: &Parsed) -> Span {
    let Parsed::Statement(statement) = statement else { return Span::empty() };
    let table = match statement.as_ref() {
        Statement::ShowCreate { obj_name, .. } => obj_name.0.first().and_then(ObjectNamePart::as_ident),
        Statement::ShowVariable { variable } => variable.get(1),
        _ => None,
    };
    table.map_or_else(Span::empty, |table| table.span)
}

/// What the query names stands there, for errors.
pub(super) fn put_at(query: &mut Parsed, place: Span) {
    let Parsed::Statement(query) = query else { return };
    let _ = visit_relations_mut(query.as_mut(), |name| {
        for part in &mut name.0 {
            if let ObjectNamePart::Identifier(part) = part {
                part.span = place;
            }
        }
        ControlFlow::<()>::Continue(())
    });
}

/// A query of what the metadata says of a table or a view.
fn of_metadata<'a>(
    columns: &str,
    table: impl IntoIterator<Item = &'a Ident>,
    listing: &str,
    statement: &str,
) -> Result<String> {
    let parts: Vec<String> = table.into_iter().map(|part| normalize(part).replace('"', "\"\"")).collect();
    match parts.split_last() {
        Some((table, within)) if within.len() < 3 => {
            let within: String = within.iter().map(|part| format!("\"{part}\".")).collect();
            Ok(format!("SELECT {columns} FROM {within}\"{table}${listing}\" ORDER BY 1"))
        }
        _ => Err(Error::invalid(format!("{statement} takes one name"))),
    }
}

/// SHOW DROPPED TABLES, which the parser takes for the name of a setting.
fn is_dropped_tables(variable: &[Ident]) -> bool {
    matches!(variable, [dropped, tables] if normalize(dropped) == "dropped" && normalize(tables) == "tables")
}

fn like(options: &ShowStatementOptions, column: &str, statement: &str) -> Result<String> {
    if options.starts_with.is_some() || options.limit.is_some() || options.limit_from.is_some() {
        return Err(refused(&format!("this form of {statement}")));
    }
    let filter = match &options.filter_position {
        None => return Ok(String::new()),
        Some(ShowStatementFilterPosition::Infix(filter) | ShowStatementFilterPosition::Suffix(filter)) => filter,
    };
    filtered(filter, column, statement)
}

fn filtered(filter: &ShowStatementFilter, column: &str, statement: &str) -> Result<String> {
    let quoted = |pattern: &str| pattern.replace('\'', "''");
    match filter {
        ShowStatementFilter::Like(pattern) | ShowStatementFilter::NoKeyword(pattern) => {
            Ok(format!(" AND {column} LIKE '{}'", quoted(pattern)))
        }
        ShowStatementFilter::ILike(pattern) => Ok(format!(" AND {column} ILIKE '{}'", quoted(pattern))),
        ShowStatementFilter::Where(_) => Err(refused(&format!("{statement} WHERE"))),
    }
}
