//! SHOW statements that DataFusion does not know.

use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{
    Ident, ObjectName, ShowStatementFilter, ShowStatementFilterPosition, ShowStatementOptions, Statement,
};

use super::{normalize, refused};
use crate::error::Result;
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
            let of_schema = match show_options.show_in.as_ref().map(|show_in| &show_in.parent_name) {
                None => String::new(),
                Some(Some(ObjectName(parts))) => match parts.as_slice() {
                    [part] => match part.as_ident() {
                        Some(schema) => format!(" AND table_schema = '{}'", normalize(schema).replace('\'', "''")),
                        None => return Err(refused("this form of SHOW TABLES")),
                    },
                    _ => return Err(refused("SHOW TABLES in a qualified schema")),
                },
                Some(None) => return Err(refused("this form of SHOW TABLES")),
            };
            let like = like(show_options, "table_name", "SHOW TABLES")?;
            Ok(Some(format!(
                "SELECT table_schema, table_name FROM {CATALOG}.information_schema.tables \
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
        Statement::ShowVariable { variable } if is_dropped_tables(variable) => Ok(Some(format!(
            "SELECT table_schema, table_name, dropped, undroppable_until FROM {CATALOG}.{}.{} ORDER BY dropped, 1, 2",
            system::SYSTEM,
            system::DROPPED
        ))),
        _ => Ok(None),
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
    let quoted = |pattern: &str| pattern.replace('\'', "''");
    match filter {
        ShowStatementFilter::Like(pattern) | ShowStatementFilter::NoKeyword(pattern) => {
            Ok(format!(" AND {column} LIKE '{}'", quoted(pattern)))
        }
        ShowStatementFilter::ILike(pattern) => Ok(format!(" AND {column} ILIKE '{}'", quoted(pattern))),
        ShowStatementFilter::Where(_) => Err(refused(&format!("{statement} WHERE"))),
    }
}
