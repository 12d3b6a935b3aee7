//! What a statement is, before anything is looked up: a query, a change that lake can make, or one that it refuses by
//! name. Nothing is accepted that would be half done.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use datafusion::common::{DataFusionError, TableReference};
use datafusion::execution::session_state::SessionState;
use datafusion::sql::parser::{DFParserBuilder, Statement as Parsed};
use datafusion::sql::sqlparser::ast::helpers::attached_token::AttachedToken;
use datafusion::sql::sqlparser::ast::{
    AlterTable, AlterTableOperation, Assignment, AssignmentTarget, CastKind, ColumnDef, ColumnOption, CommentDef,
    CreateTable, CreateTableOptions, DataType, ExactNumberInfo, Expr, FromTable, Ident, Merge, MergeAction,
    MergeClause, MergeClauseKind, MergeUpdateExpr, ObjectName, ObjectNamePart, ObjectType, SelectItem, SetExpr,
    SetQuantifier, ShowStatementFilter, ShowStatementFilterPosition, ShowStatementOptions, SqlOption, Statement,
    TableFactor, Update, UpdateTableFromKind, Value, ValueWithSpan, visit_expressions_mut, visit_relations,
};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::Parser;
use datafusion::sql::sqlparser::tokenizer::{Token, TokenWithSpan, Tokenizer, Word};
use lake_client::catalog::TableIdent;

use super::clauses::{self, AlterLayout};
use super::columns::SEPARATOR;
use super::copy::{self, Copy, CopyFrom};
use super::schemas::{self, SchemaStatement};
use super::session::{self, SessionChange};
use super::views::{self, ViewStatement};
use super::{CATALOG, DEFAULT_SCHEMA, MAX_STATEMENT_BYTES, alter, as_of, files, system, undrop};
use crate::error::{Error, Position, Result};
use crate::table::layout::Layout;

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
    let (sql, layout) = clauses::take_layout(&sql)?;
    if let Some(alter) = clauses::alter_layout(&sql)? {
        let statement = alter_table(alter.table.clone(), alter.if_exists, Vec::new());
        return Ok((statement, Action::AlterLayout(Box::new(alter))));
    }
    let mut statement = match unset_properties(&sql) {
        Some(statement) => statement,
        None => match alter_parts(&sql)? {
            Some(statement) => statement,
            None => parse_one(state, &sql)?,
        },
    };
    as_of::put(&mut statement, versions)?;
    let mut statement = match rewrite(&statement)? {
        Some(sql) => parse_one(state, &sql)?,
        None => statement,
    };
    let mut action = classify(&mut statement)?;
    match &mut action {
        Action::CreateTable { layout: of_table, .. } => *of_table = layout,
        _ if layout != Layout::default() => return Err(refused("laying out this kind of table")),
        _ => {}
    }
    if let Parsed::Statement(statement) = &mut statement {
        prepare_update(statement)?;
    }
    exponents_are_floats(&mut statement);
    inserts_go_by_place(&mut statement);
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

/// What is inserted goes by its place: that two columns of the query have one name is nothing to it, and DataFusion refuses it.
/// So what comes again gets another name.
fn inserts_go_by_place(statement: &mut Parsed) {
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
    let mut seen = std::collections::HashSet::new();
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

/// `ALTER TABLE t UNSET TBLPROPERTIES ('a')`, which the parser does not know, as `SET TBLPROPERTIES ('a' = NULL)`.
fn unset_properties(sql: &str) -> Option<Parsed> {
    let mut parser = Parser::new(&GenericDialect {}).try_with_sql(sql).ok()?;
    if !parser.parse_keywords(&[Keyword::ALTER, Keyword::TABLE]) {
        return None;
    }
    let if_exists = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let name = parser.parse_object_name(false).ok()?;
    if !parser.parse_keywords(&[Keyword::UNSET, Keyword::TBLPROPERTIES]) {
        return None;
    }
    let silent = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let keys = parser.parse_parenthesized(|parser| parser.parse_comma_separated(Parser::parse_literal_string)).ok()?;
    let _ = parser.consume_token(&Token::SemiColon);
    if parser.peek_token().token != Token::EOF {
        return None;
    }
    let value = Expr::value(match silent {
        true => Value::Boolean(false),
        false => Value::Null,
    });
    let unset =
        |key| SqlOption::KeyValue { key: Ident::with_quote('\'', key), value: Expr::Nested(Box::new(value.clone())) };
    let operation = AlterTableOperation::SetTblProperties { table_properties: keys.into_iter().map(unset).collect() };
    Some(alter_table(name, if_exists, vec![operation]))
}

/// ALTER TABLE of parts of columns (`a.b`), for which the parser expects one name: they become one, with [`SEPARATOR`] in it.
fn alter_parts(sql: &str) -> Result<Option<Parsed>> {
    // What is no SQL at all the parser tells best.
    let Ok(tokens) = Tokenizer::new(&GenericDialect {}, sql).tokenize_with_location() else { return Ok(None) };
    let mut tokens: Vec<TokenWithSpan> =
        tokens.into_iter().filter(|token| !matches!(token.token, Token::Whitespace(_))).collect();
    let is = |tokens: &[TokenWithSpan], i: usize, keywords: &[Keyword]| matches!(tokens.get(i).map(|t| &t.token), Some(Token::Word(w)) if w.quote_style.is_none() && keywords.contains(&w.keyword));
    if !is(&tokens, 0, &[Keyword::ALTER]) || !is(&tokens, 1, &[Keyword::TABLE]) {
        return Ok(None);
    }
    let mut found = false;
    let mut i = 2;
    while i < tokens.len() {
        let begins = is(&tokens, i, &[Keyword::ADD, Keyword::DROP, Keyword::ALTER, Keyword::RENAME]);
        i += 1;
        // A table may be called like that.
        if !begins || tokens[i - 2].token == Token::Period || tokens.get(i).is_some_and(|t| t.token == Token::Period) {
            continue;
        }
        while is(&tokens, i, &[Keyword::COLUMN, Keyword::IF, Keyword::NOT, Keyword::EXISTS]) {
            i += 1;
        }
        let (mut names, mut end) = (Vec::new(), i);
        while let Some(Token::Word(word)) = tokens.get(end).map(|token| &token.token) {
            names.push(match word.quote_style {
                Some(_) => word.value.clone(),
                None => word.value.to_lowercase(),
            });
            end += 1;
            match tokens.get(end).map(|token| &token.token) {
                Some(Token::Period) => end += 1,
                _ => break,
            }
        }
        if names.len() > 1 {
            let value = names.join(&SEPARATOR.to_string());
            let path = Token::Word(Word { value, quote_style: Some('"'), keyword: Keyword::NoKeyword });
            let span = tokens[i].span.union(&tokens[end - 1].span);
            tokens.splice(i..end, [TokenWithSpan { token: path, span }]);
            found = true;
        }
    }
    if !found {
        return Ok(None);
    }
    let wrong = |e| Error::from(DataFusionError::SQL(Box::new(e), None));
    let mut parser = Parser::new(&GenericDialect {}).with_tokens_with_locations(tokens);
    let statement = parser.parse_statement().map_err(wrong)?;
    let _ = parser.consume_token(&Token::SemiColon);
    parser.expect_token(&Token::EOF).map_err(wrong)?;
    Ok(Some(Parsed::Statement(Box::new(statement))))
}

fn alter_table(name: ObjectName, if_exists: bool, operations: Vec<AlterTableOperation>) -> Parsed {
    Parsed::Statement(Box::new(Statement::AlterTable(AlterTable {
        name,
        if_exists,
        only: false,
        operations,
        location: None,
        on_cluster: None,
        table_type: None,
        end_token: AttachedToken::empty(),
    })))
}

fn classify(statement: &mut Parsed) -> Result<Action> {
    let statement = match statement {
        Parsed::Statement(statement) => statement.as_mut(),
        Parsed::Explain(_) => return Ok(Action::Query),
        Parsed::CreateExternalTable(_) => return Err(refused("CREATE EXTERNAL TABLE")),
        Parsed::CopyTo(_) => return Err(refused("COPY")),
        Parsed::Reset(_) => return Err(refused("RESET")),
    };
    match statement {
        Statement::ShowColumns { show_options, .. } => {
            if let Some(ObjectName(parts)) = show_options.show_in.as_mut().and_then(|of| of.parent_name.as_mut()) {
                in_default_schema(parts);
            }
            Ok(Action::Query)
        }
        Statement::Query(_)
        | Statement::Explain { .. }
        | Statement::ExplainTable { .. }
        | Statement::ShowTables { .. }
        | Statement::ShowFunctions { .. }
        | Statement::ShowVariable { .. } => Ok(Action::Query),
        Statement::Insert(insert) => {
            if insert.partitioned.is_some() {
                return Err(refused("INSERT ... PARTITION (partitions follow from the values)"));
            }
            Ok(Action::ChangeRows(match insert.overwrite {
                true => Command::InsertOverwrite,
                false => Command::Insert,
            }))
        }
        Statement::Delete(delete) => match &delete.from {
            FromTable::WithFromKeyword(_) => Ok(Action::ChangeRows(Command::Delete)),
            // A word that is missing may be more than that one, as a condition.
            FromTable::WithoutKeyword(tables) => {
                let at = tables.first().and_then(|table| match &table.relation {
                    TableFactor::Table { name, .. } => name.0.first().and_then(|part| part.as_ident()).and_then(place),
                    _ => None,
                });
                Err(Error::invalid("syntax error: DELETE without FROM; nothing was done: write DELETE FROM").at(at))
            }
        },
        Statement::Update(_) => Ok(Action::ChangeRows(Command::Update)),
        Statement::Merge(_) => Ok(Action::ChangeRows(Command::Merge)),
        Statement::Truncate(_) => Ok(Action::ChangeRows(Command::Truncate)),
        Statement::CreateTable(table) => create_table(table),
        Statement::AlterTable(_) => Ok(Action::Alter(Command::AlterTable)),
        Statement::Call(_) => Ok(Action::Call),
        Statement::Comment { .. } => Ok(Action::Alter(Command::Comment)),
        Statement::Drop { object_type, names, cascade, purge, temporary, .. } => {
            if *object_type != ObjectType::Table {
                return Err(refused(&format!("DROP {object_type}")));
            }
            match (*cascade, *temporary, names.len()) {
                (true, ..) => Err(refused("DROP ... CASCADE")),
                (_, true, _) => Err(refused("DROP TEMPORARY")),
                (_, _, 1) => Ok(Action::DropTable { purge: *purge }),
                _ => Err(refused("DROP of several things at once")),
            }
        }
        other => match session::parse(other)? {
            Some(change) => Ok(Action::Session(change)),
            None => Err(refused(&leading_words(&other.to_string()))),
        },
    }
}

/// A table's name alone means one in the default schema. DataFusion would show the columns of all tables of that name.
fn in_default_schema(parts: &mut Vec<ObjectNamePart>) {
    let [ObjectNamePart::Identifier(table)] = parts.as_slice() else { return };
    if !files::is_file(&TableReference::bare(normalize(table))) {
        let schema = Ident { value: DEFAULT_SCHEMA.to_owned(), quote_style: Some('"'), span: table.span };
        parts.insert(0, ObjectNamePart::Identifier(schema));
    }
}

/// What DataFusion would take wrongly, or not at all, is made plain: names of assigned columns as the table has them, and
/// UPDATE ... FROM as the MERGE that it is.
fn prepare_update(statement: &mut Statement) -> Result<()> {
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
    let mut seen = std::collections::HashSet::new();
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

pub(super) fn refused(what: &str) -> Error {
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

fn create_table(table: &mut CreateTable) -> Result<Action> {
    let mut not_null = Vec::new();
    for column in &table.columns {
        check_length(column)?;
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
    if table.or_replace && table.if_not_exists {
        return Err(Error::invalid("a table is either replaced, or left as it is IF NOT EXISTS"));
    }
    // Taken out, since DataFusion does not know what to do with them.
    let mut properties = match std::mem::replace(&mut table.table_options, CreateTableOptions::None) {
        CreateTableOptions::None => Default::default(),
        CreateTableOptions::With(options)
        | CreateTableOptions::Options(options)
        | CreateTableOptions::TableProperties(options) => alter::properties_of_new(&options)?,
        CreateTableOptions::Plain(options) => {
            for option in options {
                match option {
                    SqlOption::Comment(comment) => table.comment = Some(comment),
                    other => return Err(refused(&format!("the option {other}"))),
                }
            }
            Default::default()
        }
    };
    if let Some(CommentDef::WithEq(text) | CommentDef::WithoutEq(text)) = table.comment.take() {
        properties.insert(alter::COMMENT.to_owned(), text);
    }
    let as_query = table.query.is_some().then_some(not_null);
    Ok(Action::CreateTable { as_query, layout: Layout::default(), properties: properties.into_iter().collect() })
}

/// Text in Iceberg has neither a length nor padding. A longest length that is not kept harms little, and many tools write one; one
/// that all values are to have would be wrong in silence.
pub(super) fn check_length(column: &ColumnDef) -> Result<()> {
    match &column.data_type {
        DataType::Char(_) | DataType::Character(_) => Err(Error::not_supported(format!(
            "column {}: {} is not supported, as Iceberg has no text of a fixed length: use VARCHAR; nothing was done",
            column.name, column.data_type
        ))
        .at(place(&column.name))),
        _ => Ok(()),
    }
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
            ("UPDATE t JOIN s ON t.a = s.a SET a = 1", "UPDATE of a join"),
            ("COPY t TO 'x.avro' (FORMAT avro)", "format avro"),
            ("ROLLBACK TO SAVEPOINT a", "ROLLBACK"),
            ("USE s", "USE"),
            ("CREATE MATERIALIZED VIEW v AS SELECT 1", "VIEW"),
            ("CREATE TABLE t (a INT PRIMARY KEY)", "PRIMARY on column a"),
            ("CREATE TABLE t (a INT DEFAULT 1)", "DEFAULT on column a"),
            ("CREATE TABLE t (a INT, b CHAR(3))", "column b: CHAR(3)"),
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
