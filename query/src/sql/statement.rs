//! What a statement is, before anything is looked up: a query, a change that lake can make, or one that it refuses by
//! name. Nothing is accepted that would be half done.

use std::ops::ControlFlow;

use datafusion::common::TableReference;
use datafusion::execution::session_state::SessionState;
use datafusion::sql::parser::{DFParserBuilder, Statement as Parsed};
use datafusion::sql::sqlparser::ast::{
    CastKind, ColumnOption, CreateTable, DataType, ExactNumberInfo, Expr, Ident, ObjectName, ObjectType,
    ShowStatementFilter, ShowStatementFilterPosition, ShowStatementOptions, Statement, Value, ValueWithSpan,
    visit_expressions_mut, visit_relations,
};
use datafusion::sql::sqlparser::dialect::GenericDialect;

use super::{CATALOG, MAX_STATEMENT_BYTES, as_of};
use crate::error::{Error, Position, Result};

/// Kinds of statements, as the answer to a change names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Select,
    Insert,
    CreateTable,
    CreateTableAs,
    CreateSchema,
    DropTable,
    DropSchema,
}

impl Command {
    /// Under which key the schema of an answer to a change names the command.
    pub const METADATA_KEY: &'static str = "lake.command";

    pub fn as_str(self) -> &'static str {
        match self {
            Command::Select => "SELECT",
            Command::Insert => "INSERT",
            Command::CreateTable => "CREATE TABLE",
            Command::CreateTableAs => "CREATE TABLE AS",
            Command::CreateSchema => "CREATE SCHEMA",
            Command::DropTable => "DROP TABLE",
            Command::DropSchema => "DROP SCHEMA",
        }
    }
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Query,
    Insert,
    CreateTable {
        /// With AS: the columns that are declared NOT NULL. Others may be null, whatever the query says.
        as_query: Option<Vec<String>>,
    },
    CreateSchema,
    /// A table or a schema.
    Drop(ObjectKind),
}

/// What can be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    Table,
    Schema,
}

impl Action {
    pub fn is_change(&self) -> bool {
        *self != Action::Query
    }

    pub fn command(&self) -> Command {
        match self {
            Action::Query => Command::Select,
            Action::Insert => Command::Insert,
            Action::CreateTable { as_query: None } => Command::CreateTable,
            Action::CreateTable { as_query: Some(_) } => Command::CreateTableAs,
            Action::CreateSchema => Command::CreateSchema,
            Action::Drop(ObjectKind::Table) => Command::DropTable,
            Action::Drop(ObjectKind::Schema) => Command::DropSchema,
        }
    }
}

/// Parses one statement.
///
/// # Errors
/// `Invalid` with the place of a syntax error; `NotSupported` naming a statement that lake does not run.
pub fn parse(state: &SessionState, sql: &str) -> Result<(Parsed, Action)> {
    if sql.len() > MAX_STATEMENT_BYTES {
        return Err(Error::invalid(format!(
            "the statement has {} bytes, and at most {MAX_STATEMENT_BYTES} are allowed; load large data from a file",
            sql.len()
        )));
    }
    let (sql, versions) = as_of::take(sql)?;
    let mut statement = parse_one(state, &sql)?;
    as_of::put(&mut statement, versions)?;
    let mut statement = match rewrite(&statement)? {
        Some(sql) => parse_one(state, &sql)?,
        None => statement,
    };
    let action = classify(&statement)?;
    exponents_are_floats(&mut statement);
    Ok((statement, action))
}

/// A number with an exponent is a float, as in other databases; without one it is a decimal.
fn exponents_are_floats(statement: &mut Parsed) {
    let statement = match statement {
        Parsed::Statement(statement) => statement.as_mut(),
        Parsed::Explain(explain) => return exponents_are_floats(&mut explain.statement),
        _ => return,
    };
    let _ = visit_expressions_mut(statement, |expr| {
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

fn parse_one(state: &SessionState, sql: &str) -> Result<Parsed> {
    let limit = state.config_options().sql_parser.recursion_limit.get();
    let mut statements = DFParserBuilder::new(sql)
        .with_dialect(&GenericDialect {})
        .with_recursion_limit(limit)
        .build()
        .and_then(|mut parser| parser.parse_statements())
        .map_err(|e| {
            let error = Error::from(e);
            match error.message.ends_with("found: EOF") {
                true => error.at(Some(end_of(sql))),
                false => error,
            }
        })?;
    match (statements.pop_front(), statements.is_empty()) {
        (Some(statement), true) => Ok(statement),
        (None, _) => Err(Error::invalid("there is no statement")),
        (Some(_), false) => {
            Err(Error::not_supported("several statements in one text are not supported yet: send them one by one"))
        }
    }
}

/// The place after the last character, which the parser does not name.
fn end_of(sql: &str) -> Position {
    let sql = sql.trim_end();
    let last = sql.rsplit('\n').next().unwrap_or(sql);
    Position { line: sql.matches('\n').count() as u64 + 1, column: last.chars().count() as u64 + 1 }
}

fn classify(statement: &Parsed) -> Result<Action> {
    let statement = match statement {
        Parsed::Statement(statement) => statement.as_ref(),
        Parsed::Explain(_) => return Ok(Action::Query),
        Parsed::CreateExternalTable(_) => return Err(refused("CREATE EXTERNAL TABLE")),
        Parsed::CopyTo(_) => return Err(refused("COPY")),
        Parsed::Reset(_) => return Err(refused("RESET")),
    };
    match statement {
        Statement::Query(_)
        | Statement::Explain { .. }
        | Statement::ExplainTable { .. }
        | Statement::ShowTables { .. }
        | Statement::ShowColumns { .. }
        | Statement::ShowFunctions { .. }
        | Statement::ShowVariable { .. } => Ok(Action::Query),
        Statement::Insert(_) => Ok(Action::Insert),
        Statement::CreateTable(table) => create_table(table),
        Statement::CreateSchema { .. } => Ok(Action::CreateSchema),
        Statement::Drop { object_type, names, cascade, purge, temporary, .. } => {
            let kind = match object_type {
                ObjectType::Table => ObjectKind::Table,
                ObjectType::Schema => ObjectKind::Schema,
                other => return Err(refused(&format!("DROP {other}"))),
            };
            match (*cascade, *purge, *temporary, names.len()) {
                (true, ..) => Err(refused("DROP ... CASCADE")),
                (_, true, ..) => Err(refused("DROP ... PURGE")),
                (_, _, true, _) => Err(refused("DROP TEMPORARY")),
                (_, _, _, 1) => Ok(Action::Drop(kind)),
                _ => Err(refused("DROP of several things at once")),
            }
        }
        other => Err(refused(&leading_words(&other.to_string()))),
    }
}

fn refused(what: &str) -> Error {
    Error::not_supported(format!("{what} is not supported yet; nothing was done"))
}

/// The words that name a statement.
fn leading_words(sql: &str) -> String {
    let mut words = sql.split(|c: char| !c.is_ascii_alphabetic()).filter(|word| !word.is_empty());
    let first = words.next().unwrap_or("this statement").to_ascii_uppercase();
    match (first.as_str(), words.next()) {
        ("ALTER" | "CREATE" | "DROP" | "SHOW" | "START", Some(second)) => {
            format!("{first} {}", second.to_ascii_uppercase())
        }
        _ => first,
    }
}

fn create_table(table: &CreateTable) -> Result<Action> {
    let mut not_null = Vec::new();
    for column in &table.columns {
        for option in &column.options {
            match &option.option {
                ColumnOption::Null => {}
                ColumnOption::NotNull => not_null.push(normalize(&column.name)),
                other => {
                    let words = leading_words(&other.to_string());
                    return Err(refused(&format!("{words} on column {}", column.name)).at(place(&column.name)));
                }
            }
        }
    }
    if let Some(constraint) = table.constraints.first() {
        return Err(refused(&format!("the constraint {constraint}")));
    }
    if table.or_replace {
        return Err(refused("CREATE OR REPLACE TABLE"));
    }
    Ok(Action::CreateTable { as_query: table.query.is_some().then_some(not_null) })
}

/// SHOW statements that DataFusion does not know, as queries.
fn rewrite(statement: &Parsed) -> Result<Option<String>> {
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
        _ => Ok(None),
    }
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

/// An identifier as the catalog has it.
pub fn normalize(ident: &Ident) -> String {
    match ident.quote_style {
        Some(_) => ident.value.clone(),
        None => ident.value.to_lowercase(),
    }
}

fn place(ident: &Ident) -> Option<Position> {
    let start = ident.span.start;
    (start.line > 0).then_some(Position { line: start.line, column: start.column })
}

/// Where a statement first names a table.
pub fn position_of(statement: &Parsed, table: &TableReference) -> Option<Position> {
    match statement {
        Parsed::Statement(statement) => {
            let mut found = None;
            let _ = visit_relations(statement.as_ref(), |name| {
                if found.is_none() && names(name, table) {
                    found = name.0.first().and_then(|part| part.as_ident()).and_then(place);
                }
                std::ops::ControlFlow::<()>::Continue(())
            });
            found
        }
        Parsed::Explain(explain) => position_of(&explain.statement, table),
        _ => None,
    }
}

fn names(name: &ObjectName, table: &TableReference) -> bool {
    let parts: Option<Vec<String>> = name.0.iter().map(|part| part.as_ident().map(normalize)).collect();
    parts.is_some_and(|parts| parts == table.to_vec())
}

#[cfg(test)]
mod tests {
    use datafusion::execution::session_state::SessionStateBuilder;

    use super::*;
    use crate::error::Kind;

    fn parse(sql: &str) -> Result<(Parsed, Action)> {
        super::parse(&SessionStateBuilder::new_with_default_features().build(), sql)
    }

    #[test]
    fn statements_are_told_apart() {
        for (sql, command) in [
            ("SELECT 1;", Command::Select),
            ("explain analyze select 1", Command::Select),
            ("SHOW TABLES FROM a LIKE '%x'", Command::Select),
            ("SHOW SCHEMAS", Command::Select),
            ("DESCRIBE t", Command::Select),
            ("INSERT INTO t VALUES (1)", Command::Insert),
            ("CREATE TABLE t (a INT NOT NULL)", Command::CreateTable),
            ("CREATE TABLE t AS SELECT 1 AS a", Command::CreateTableAs),
            ("CREATE SCHEMA IF NOT EXISTS s", Command::CreateSchema),
            ("DROP TABLE IF EXISTS t", Command::DropTable),
            ("DROP SCHEMA s", Command::DropSchema),
        ] {
            assert_eq!(parse(sql).map(|(_, action)| action.command()), Ok(command), "{sql}");
        }
    }

    #[test]
    fn what_lake_does_not_do_is_refused_by_name() {
        for (sql, words) in [
            ("UPDATE t SET a = 1", "UPDATE"),
            ("DELETE FROM t", "DELETE"),
            ("MERGE INTO t USING u ON t.a = u.a WHEN MATCHED THEN DELETE", "MERGE"),
            ("ALTER TABLE t ADD COLUMN b INT", "ALTER TABLE"),
            ("COPY t TO 'x.parquet'", "COPY"),
            ("SET x = 1", "SET"),
            ("BEGIN", "BEGIN"),
            ("TRUNCATE TABLE t", "TRUNCATE"),
            ("CREATE VIEW v AS SELECT 1", "CREATE VIEW"),
            ("CREATE OR REPLACE TABLE t (a INT)", "CREATE OR REPLACE TABLE"),
            ("CREATE TABLE t (a INT PRIMARY KEY)", "PRIMARY on column a"),
            ("CREATE TABLE t (a INT DEFAULT 1)", "DEFAULT on column a"),
            ("CREATE EXTERNAL TABLE t STORED AS PARQUET LOCATION 'x'", "CREATE EXTERNAL TABLE"),
            ("DROP TABLE t CASCADE", "CASCADE"),
            ("DROP TABLE a, b", "several"),
            ("SELECT 1; SELECT 2", "several statements"),
        ] {
            let error = parse(sql).unwrap_err();
            assert!(error.kind == Kind::NotSupported && error.message.contains(words), "{sql}: {error}");
        }
    }

    #[test]
    fn errors_and_tables_have_places() {
        let error = parse("SELECT 1\nFROM t WHERE").unwrap_err();
        assert_eq!(error.position, Some(Position { line: 2, column: 13 }), "{error}");
        let (statement, _) = parse("SELECT *\n  FROM a JOIN nope.B ON true").unwrap();
        let table = TableReference::partial("nope", "b");
        assert_eq!(position_of(&statement, &table), Some(Position { line: 2, column: 15 }));
    }
}
