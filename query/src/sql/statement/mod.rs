//! What a statement is, before anything is looked up: a query, a change that lake can make, or one that it refuses by
//! name. Nothing is accepted that would be half done.

mod altering;
mod classify;
mod dropped;
mod prepare;
mod show;
mod size;

use std::collections::BTreeMap;

use datafusion::common::TableReference;
use datafusion::execution::session_state::SessionState;
use datafusion::sql::parser::{DFParserBuilder, Statement as Parsed};
use datafusion::sql::sqlparser::ast::{Expr, Ident, ObjectName, visit_relations};
use lake_client::catalog::TableIdent;

use super::clauses::{self, AlterLayout};
use super::copy::{self, Copy, CopyFrom};
use super::dialect::LakeDialect;
use super::schemas::{self, SchemaStatement};
use super::session::SessionChange;
use super::views::{self, ViewStatement};
use super::{MAX_STATEMENT_BYTES, as_of, column_types, undrop};
use crate::error::{Error, Position, Result};
use crate::table::layout::Layout;
pub(super) use prepare::floats_as_written;
pub(super) use size::check_text;

/// Kinds of statements, as the answer to a change names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Select,
    Insert,
    InsertOverwrite,
    Delete,
    Update,
    Merge,
    Truncate,
    CreateTable,
    CreateTableAs,
    AlterTable,
    Comment,
    Call,
    CreateSchema,
    DropTable,
    UndropTable,
    AlterSchema,
    DropSchema,
    CreateView,
    AlterView,
    DropView,
    Copy,
    Begin,
    Commit,
    Rollback,
    Set,
}

impl Command {
    /// Under which key the schema of an answer to a change names the command.
    pub const METADATA_KEY: &'static str = "lake.command";

    pub fn as_str(self) -> &'static str {
        match self {
            Command::Select => "SELECT",
            Command::Insert => "INSERT",
            Command::InsertOverwrite => "INSERT OVERWRITE",
            Command::Delete => "DELETE",
            Command::Update => "UPDATE",
            Command::Merge => "MERGE",
            Command::Truncate => "TRUNCATE TABLE",
            Command::CreateTable => "CREATE TABLE",
            Command::CreateTableAs => "CREATE TABLE AS",
            Command::AlterTable => "ALTER TABLE",
            Command::Comment => "COMMENT",
            Command::Call => "CALL",
            Command::CreateSchema => "CREATE SCHEMA",
            Command::DropTable => "DROP TABLE",
            Command::UndropTable => "UNDROP TABLE",
            Command::AlterSchema => "ALTER SCHEMA",
            Command::DropSchema => "DROP SCHEMA",
            Command::CreateView => "CREATE VIEW",
            Command::AlterView => "ALTER VIEW",
            Command::DropView => "DROP VIEW",
            Command::Copy => "COPY",
            Command::Begin => "BEGIN",
            Command::Commit => "COMMIT",
            Command::Rollback => "ROLLBACK",
            Command::Set => "SET",
        }
    }
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Query,
    /// INSERT, INSERT OVERWRITE, DELETE, UPDATE, MERGE or TRUNCATE.
    ChangeRows(Command),
    CreateTable {
        /// With AS: the columns that are declared NOT NULL. Others may be null, whatever the query says.
        as_query: Option<Vec<String>>,
        layout: Layout,
        properties: BTreeMap<String, String>,
        /// Of columns, by their names.
        defaults: Vec<(String, Expr)>,
        /// Of columns, by their names.
        comments: Vec<(String, String)>,
    },
    /// ALTER TABLE or COMMENT ON.
    Alter(Command),
    /// ALTER TABLE ... SET PARTITIONED BY or SORTED BY.
    AlterLayout(Box<AlterLayout>),
    /// CALL of a procedure.
    Call,
    /// CREATE, ALTER or DROP SCHEMA.
    Schema(Box<SchemaStatement>),
    /// CREATE, ALTER or DROP VIEW.
    View(Box<ViewStatement>),
    DropTable {
        /// Its files are to be deleted, too.
        purge: bool,
    },
    UndropTable(TableIdent),
    /// COPY of files into a table.
    CopyFrom(Box<CopyFrom>),
    /// COPY of a table or a query into a file.
    CopyTo {
        /// One that is there already is replaced.
        overwrite: bool,
    },
    /// BEGIN, COMMIT, ROLLBACK or SET.
    Session(SessionChange),
}

impl Action {
    pub fn is_change(&self) -> bool {
        *self != Action::Query
    }

    /// Whether it changes rows that it finds, and does not only add some.
    pub fn changes_what_is_there(&self) -> bool {
        matches!(self, Action::ChangeRows(command) if *command != Command::Insert)
    }

    /// Whether parameters may stand in it: of a view the text is kept, and others are no statements of DataFusion's.
    pub fn takes_parameters(&self) -> bool {
        matches!(
            self,
            Action::Query
                | Action::ChangeRows(_)
                | Action::CreateTable { as_query: Some(_), .. }
                | Action::CopyTo { .. }
                | Action::Call
        )
    }

    pub fn command(&self) -> Command {
        match self {
            Action::Query => Command::Select,
            Action::ChangeRows(command) => *command,
            Action::CreateTable { as_query: None, .. } => Command::CreateTable,
            Action::CreateTable { as_query: Some(_), .. } => Command::CreateTableAs,
            Action::Alter(command) => *command,
            Action::AlterLayout(_) => Command::AlterTable,
            Action::Call => Command::Call,
            Action::Schema(schema) => schema.command(),
            Action::View(view) => view.command(),
            Action::DropTable { .. } => Command::DropTable,
            Action::UndropTable(_) => Command::UndropTable,
            Action::CopyFrom(_) | Action::CopyTo { .. } => Command::Copy,
            Action::Session(change) => change.command(),
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
    check_text(sql)?;
    if let Some((view, query)) = views::take(sql)? {
        let parsed = match query {
            None => parse_one(state, NOTHING)?,
            Some(query) => parse_query(state, &query, "a view is made of a query")?,
        };
        return Ok((parsed, Action::View(Box::new(view))));
    }
    if let Some(schema) = schemas::take(sql)? {
        return Ok((parse_one(state, NOTHING)?, Action::Schema(Box::new(schema))));
    }
    if let Some(table) = undrop::take(sql)? {
        return Ok((parse_one(state, NOTHING)?, Action::UndropTable(table)));
    }
    match copy::take(sql)? {
        None => {}
        Some(Copy::From(copy)) => return Ok((parse_one(state, &copy.insert(None))?, Action::CopyFrom(Box::new(copy)))),
        Some(Copy::To(copy, query)) => {
            let query = parse_query(state, &query, "COPY writes the rows of a query or of a table")?;
            let overwrite = copy.overwrites();
            return Ok((copy.statement(query)?, Action::CopyTo { overwrite }));
        }
    }
    let (sql, versions) = as_of::take(sql)?;
    let sql = column_types::maps_in_parentheses(sql.into_owned());
    let (sql, layout) = clauses::take_layout(&sql)?;
    if let Some(alter) = clauses::alter_layout(&sql)? {
        let statement = altering::alter_table(alter.table.clone(), alter.if_exists, Vec::new());
        return Ok((statement, Action::AlterLayout(Box::new(alter))));
    }
    let mut statement = match altering::unset_properties(&sql).or_else(|| altering::move_column(&sql)) {
        Some(statement) => statement,
        None => match altering::alter_parts(&sql)? {
            Some(statement) => statement,
            None => parse_one(state, &sql)?,
        },
    };
    as_of::put(&mut statement, versions)?;
    let mut statement = match show::as_query(&statement)? {
        Some(sql) => {
            let mut query = parse_one(state, &sql)?;
            show::put_at(&mut query, show::place_of_table(&statement));
            query
        }
        None => statement,
    };
    let mut action = classify::classify(&mut statement)?;
    dropped::refuse(&mut statement)?;
    match &mut action {
        Action::CreateTable { layout: of_table, .. } => *of_table = layout,
        _ if layout != Layout::default() => return Err(refused("laying out this kind of table")),
        _ => {}
    }
    if let Parsed::Statement(statement) = &mut statement {
        prepare::prepare_update(statement)?;
    }
    prepare::exponents_are_floats(&mut statement);
    prepare::inserts_go_by_place(&mut statement);
    Ok((statement, action))
}

/// A statement that names no table, for those that need none parsed.
const NOTHING: &str = "SELECT 1";

/// A query that is a part of another statement.
fn parse_query(state: &SessionState, sql: &str, otherwise: &str) -> Result<Parsed> {
    match parse(state, sql)? {
        (parsed, Action::Query) => Ok(parsed),
        _ => Err(Error::invalid(otherwise)),
    }
}

fn parse_one(state: &SessionState, sql: &str) -> Result<Parsed> {
    let limit = state.config_options().sql_parser.recursion_limit.get();
    let mut statements = DFParserBuilder::new(sql)
        .with_dialect(&LakeDialect)
        .with_recursion_limit(limit)
        .build()
        .and_then(|mut parser| parser.parse_statements())
        .map_err(|e| {
            let error = Error::from(e);
            if error.message.ends_with("recursion limit exceeded") {
                return Error::invalid(format!(
                    "the statement has brackets, queries or expressions nested more than {limit} deep; nothing was done"
                ));
            }
            match error.message.ends_with("found: EOF") {
                true => error.at(Some(end_of(sql))),
                false => error,
            }
        })?;
    match (statements.pop_front(), statements.is_empty()) {
        (Some(statement), true) => size::check_tables(&statement).map(|()| statement),
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

pub(super) fn refused(what: &str) -> Error {
    Error::not_supported(format!("{what} is not supported yet; nothing was done"))
}

/// An identifier as the catalog has it.
pub fn normalize(ident: &Ident) -> String {
    match ident.quote_style {
        Some(_) => ident.value.clone(),
        None => ident.value.to_lowercase(),
    }
}

pub(super) fn place(ident: &Ident) -> Option<Position> {
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
            ("SHOW DROPPED TABLES;", Command::Select),
            ("SHOW CREATE TABLE s.t", Command::Select),
            ("SHOW CREATE VIEW s.v", Command::Select),
            ("SHOW TBLPROPERTIES \"T\"", Command::Select),
            ("DESCRIBE t", Command::Select),
            ("INSERT INTO t VALUES (1)", Command::Insert),
            ("INSERT OVERWRITE t VALUES (1)", Command::InsertOverwrite),
            ("UPDATE t SET a = 1", Command::Update),
            ("UPDATE t SET a = s.a FROM s WHERE s.b = t.b", Command::Update),
            ("DELETE FROM t", Command::Delete),
            ("MERGE INTO t USING u ON t.a = u.a WHEN MATCHED THEN DELETE", Command::Merge),
            ("TRUNCATE TABLE t", Command::Truncate),
            ("CREATE TABLE t (a INT NOT NULL)", Command::CreateTable),
            ("CREATE TABLE t AS SELECT 1 AS a", Command::CreateTableAs),
            ("CREATE OR REPLACE TABLE t (a INT) WITH (x = 'y')", Command::CreateTable),
            ("ALTER TABLE t ADD COLUMN b INT", Command::AlterTable),
            ("ALTER TABLE a.t UNSET TBLPROPERTIES ('a', 'b');", Command::AlterTable),
            ("ALTER TABLE t SET PARTITIONED BY (day(a))", Command::AlterTable),
            ("COMMENT ON TABLE t IS 'words'", Command::Comment),
            ("CALL system.rewrite_manifests('t')", Command::Call),
            ("CREATE SCHEMA IF NOT EXISTS s", Command::CreateSchema),
            ("DROP TABLE IF EXISTS t", Command::DropTable),
            ("DROP SCHEMA s CASCADE", Command::DropSchema),
            ("ALTER SCHEMA s SET TBLPROPERTIES ('a' = 'b')", Command::AlterSchema),
            ("CREATE OR REPLACE VIEW v AS SELECT * FROM t FOR VERSION AS OF 'a'", Command::CreateView),
            ("ALTER VIEW v RENAME TO w", Command::AlterView),
            ("DROP VIEW v", Command::DropView),
            ("COPY t FROM 'x.csv' (HEADER false)", Command::Copy),
            ("COPY (SELECT 1 AS x) TO 'x.parquet'", Command::Copy),
            ("BEGIN", Command::Begin),
            ("COMMIT;", Command::Commit),
            ("SET lake.operation_id = 'a'", Command::Set),
        ] {
            assert_eq!(parse(sql).map(|(_, action)| action.command()), Ok(command), "{sql}");
        }
    }

    #[test]
    fn what_lake_does_not_do_is_refused_by_name() {
        for (sql, words) in [
            ("UPDATE t SET st.a = 1", "a part of a column"),
            ("UPDATE t SET a = 1 FROM s, u", "several tables"),
            ("UPDATE t SET a = s.a FROM s WHERE s.b = t.b LIMIT 1", "LIMIT"),
            ("UPDATE t SET a = s.a FROM s WHERE s.b = t.b RETURNING t.a", "RETURNING"),
            ("UPDATE t JOIN s ON t.a = s.a SET a = 1", "UPDATE of a join"),
            ("COPY t TO 'x.avro' (FORMAT avro)", "format avro"),
            ("ROLLBACK TO SAVEPOINT a", "ROLLBACK"),
            ("USE s", "USE"),
            ("CREATE MATERIALIZED VIEW v AS SELECT 1", "VIEW"),
            ("CREATE TABLE t (a INT PRIMARY KEY)", "PRIMARY KEY on column a"),
            ("CREATE TABLE t (a INT AUTO_INCREMENT)", "AUTO_INCREMENT on column a"),
            ("CREATE TABLE t (a INT, b CHAR(3))", "column b: CHAR(3)"),
            ("CREATE TABLE t (a UUID)", "column a: UUID"),
            ("CREATE TABLE t (a MAP<VARCHAR, STRUCT<b INT UNSIGNED>>)", "column a: INT UNSIGNED"),
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
    fn what_is_inserted_has_no_name_twice() {
        let written = |sql: &str| parse(sql).unwrap().0.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        for (sql, said) in [
            ("INSERT INTO t SELECT a, b FROM s", "INSERT INTO t SELECT a, b FROM s"),
            (
                "INSERT INTO t SELECT a, A, s.a, 1, 1 AS b, 2 AS B FROM s ORDER BY a",
                "INSERT INTO t SELECT a, A AS \"__lake_1\", s.a AS \"__lake_2\", 1, 1 AS b, 2 AS \"__lake_5\" FROM s ORDER BY a",
            ),
            (
                "INSERT INTO t SELECT CAST(a AS INT), a::DOUBLE FROM s",
                "INSERT INTO t SELECT CAST(a AS INT), a::DOUBLE AS \"__lake_1\" FROM s",
            ),
            ("INSERT INTO t SELECT *, a FROM s", "INSERT INTO t SELECT *, a AS \"__lake_1\" FROM s"),
            (
                "INSERT INTO t SELECT 1, 1 UNION ALL (SELECT 2, 2)",
                "INSERT INTO t SELECT 1, 1 AS \"__lake_1\" UNION ALL (SELECT 2, 2 AS \"__lake_1\")",
            ),
        ] {
            assert_eq!(written(sql), said);
        }
    }

    #[test]
    fn delete_has_its_from() {
        for sql in ["DELETE t", "delete t WHERE a = 1", "DELETE T AS x"] {
            let error = parse(sql).unwrap_err();
            assert!(error.kind == Kind::Invalid && error.message.contains("write DELETE FROM"), "{sql}: {error}");
            assert_eq!(error.position, Some(Position { line: 1, column: 8 }), "{sql}");
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
