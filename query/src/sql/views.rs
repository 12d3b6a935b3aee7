//! Views in SQL: CREATE [OR REPLACE] VIEW, ALTER VIEW and DROP VIEW, and what a view's name stands for in a query.
//!
//! What is kept is the query's own text, so that it means what the tables are when it is run, and the columns with their
//! names and comments. A view shows exactly these columns, found by name: a column that a table has got since does not
//! come with `SELECT *`, and one that is gone is an error that names view and column.
//!
//! ```text
//! names that mean no table -> views? -> their texts, and what those name (at most [`MAX_DEPTH`] deep, [`MAX_VIEWS`] in all)
//!                          -> all tables at once, of one moment
//!                          -> plans, from the innermost view out
//! ```
//! Names without a schema in a view are of the view's own default schema.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use datafusion::common::{Column, DFSchema, TableReference};
use datafusion::datasource::{MemTable, ViewTable};
use datafusion::logical_expr::{EmptyRelation, Expr, LogicalPlan, LogicalPlanBuilder};
use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{Ident, ObjectName, ObjectNamePart};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::parser::{Parser, ParserError};
use datafusion::sql::sqlparser::tokenizer::{Location, Token};
use futures::FutureExt;
use futures::future::BoxFuture;
use iceberg::spec::{NestedField, Schema, ViewMetadata};
use lake_client::catalog::{CatalogError, TableIdent, TablePointer, Versioned};

use super::as_of::Name;
use super::catalog::ident;
use super::clauses::{begins_with, blank, offset};
use super::ddl::table_reference;
use super::planning::{check_reads_only, check_size};
use super::statement::{self, Action, Command, normalize, refused};
use super::{CATALOG, DEFAULT_SCHEMA, Engine, alter, computing, files, values};
use crate::error::{Error, Kind, Position, Result};
use crate::scan::listing::Listing;
use crate::scan::spelled;
use crate::table::view::{self, Definition};
use crate::table::{Tables, catalog_error, ensure_namespace, types};

/// How deep views may be made of views.
pub const MAX_DEPTH: usize = 16;
/// Most views that a statement may lead to.
pub const MAX_VIEWS: usize = 100;

/// A statement about a view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ViewStatement {
    Create(Create),
    /// ALTER VIEW v AS, with the query's text.
    Query {
        name: ObjectName,
        sql: String,
    },
    Rename {
        name: ObjectName,
        to: ObjectName,
        if_exists: bool,
    },
    Properties {
        name: ObjectName,
        set: BTreeMap<String, String>,
        unset: Vec<String>,
        if_exists: bool,
    },
    Drop {
        name: ObjectName,
        if_exists: bool,
    },
}

/// CREATE VIEW.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Create {
    name: ObjectName,
    or_replace: bool,
    if_not_exists: bool,
    /// Names for the query's columns, with comments.
    columns: Vec<(String, Option<String>)>,
    properties: BTreeMap<String, String>,
    sql: String,
}

impl ViewStatement {
    pub fn command(&self) -> Command {
        match self {
            ViewStatement::Create(_) => Command::CreateView,
            ViewStatement::Drop { .. } => Command::DropView,
            _ => Command::AlterView,
        }
    }

    /// Whether there is a query to be planned.
    pub fn has_query(&self) -> bool {
        matches!(self, ViewStatement::Create(_) | ViewStatement::Query { .. })
    }
}

/// The statement about a view that a text is, and its query, each word in its place; `None` if it is another.
///
/// # Errors
/// `Invalid`, with its place, and `NotSupported` for kinds of views that lake does not have.
pub fn take(sql: &str) -> Result<Option<(ViewStatement, Option<String>)>> {
    if !begins_with(sql, &["CREATE", "ALTER", "DROP"]) {
        return Ok(None);
    }
    let Ok(mut parser) = Parser::new(&GenericDialect {}).try_with_sql(sql) else { return Ok(None) };
    let parser = &mut parser;
    let start = parser.parse_one_of_keywords(&[Keyword::CREATE, Keyword::ALTER, Keyword::DROP]);
    let or_replace = start == Some(Keyword::CREATE) && parser.parse_keywords(&[Keyword::OR, Keyword::REPLACE]);
    if let Some(kind) = parser.parse_one_of_keywords(&[Keyword::MATERIALIZED, Keyword::TEMPORARY, Keyword::TEMP])
        && parser.peek_keyword(Keyword::VIEW)
    {
        return Err(refused(&format!("a {kind:?} VIEW")));
    }
    let Some(start) = start.filter(|_| parser.parse_keyword(Keyword::VIEW)) else { return Ok(None) };
    let at = parser.peek_token().span.start;
    let taken = match start {
        Keyword::CREATE => create(parser, sql, or_replace),
        Keyword::ALTER => alter_view(parser, sql),
        _ => drop_view(parser),
    };
    match taken {
        Ok(taken) => Ok(Some(taken?)),
        Err(error) => {
            let error = Error::from(datafusion::common::DataFusionError::SQL(Box::new(error), None));
            Err(error.at(Some(Position { line: at.line, column: at.column })))
        }
    }
}

type Taken = Result<(ViewStatement, Option<String>)>;

fn create(parser: &mut Parser<'_>, sql: &str, or_replace: bool) -> Result<Taken, ParserError> {
    let if_not_exists = parser.parse_keywords(&[Keyword::IF, Keyword::NOT, Keyword::EXISTS]);
    let name = parser.parse_object_name(false)?;
    let mut columns = Vec::new();
    if parser.consume_token(&Token::LParen) {
        columns = parser.parse_comma_separated(|parser| {
            let name = normalize(&parser.parse_identifier()?);
            let comment = match parser.parse_keyword(Keyword::COMMENT) {
                true => Some(parser.parse_literal_string()?),
                false => None,
            };
            Ok((name, comment))
        })?;
        parser.expect_token(&Token::RParen)?;
    }
    let mut properties = HashMap::new();
    loop {
        if parser.parse_keyword(Keyword::COMMENT) {
            let _ = parser.consume_token(&Token::Eq);
            properties.insert(alter::COMMENT.to_owned(), parser.parse_literal_string()?);
        } else if parser.peek_keyword(Keyword::TBLPROPERTIES) {
            match alter::properties(&parser.parse_options(Keyword::TBLPROPERTIES)?) {
                Ok(more) => properties.extend(more),
                Err(error) => return Ok(Err(error)),
            }
        } else {
            break;
        }
    }
    if or_replace && if_not_exists {
        return Ok(Err(Error::invalid("a view is either replaced, or left as it is IF NOT EXISTS")));
    }
    parser.expect_keyword(Keyword::AS)?;
    let (text, placed) = query_at(sql, parser.peek_token().span.start);
    let properties = properties.into_iter().collect();
    let create = Create { name, or_replace, if_not_exists, columns, properties, sql: text };
    Ok(Ok((ViewStatement::Create(create), Some(placed))))
}

fn alter_view(parser: &mut Parser<'_>, sql: &str) -> Result<Taken, ParserError> {
    let if_exists = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let name = parser.parse_object_name(false)?;
    let statement =
        match parser.expect_one_of_keywords(&[Keyword::AS, Keyword::RENAME, Keyword::SET, Keyword::UNSET])? {
            Keyword::AS => {
                let (text, placed) = query_at(sql, parser.peek_token().span.start);
                return Ok(Ok((ViewStatement::Query { name, sql: text }, Some(placed))));
            }
            Keyword::RENAME => {
                parser.expect_keyword(Keyword::TO)?;
                ViewStatement::Rename { name, to: parser.parse_object_name(false)?, if_exists }
            }
            Keyword::SET => match alter::properties(&parser.parse_options(Keyword::TBLPROPERTIES)?) {
                Ok(set) => {
                    ViewStatement::Properties { name, set: set.into_iter().collect(), unset: Vec::new(), if_exists }
                }
                Err(error) => return Ok(Err(error)),
            },
            _ => {
                parser.expect_keyword(Keyword::TBLPROPERTIES)?;
                let unset =
                    parser.parse_parenthesized(|parser| parser.parse_comma_separated(Parser::parse_literal_string))?;
                ViewStatement::Properties { name, set: BTreeMap::new(), unset, if_exists }
            }
        };
    ended(parser)?;
    Ok(Ok((statement, None)))
}

fn drop_view(parser: &mut Parser<'_>) -> Result<Taken, ParserError> {
    let if_exists = parser.parse_keywords(&[Keyword::IF, Keyword::EXISTS]);
    let name = parser.parse_object_name(false)?;
    if parser.parse_keyword(Keyword::CASCADE) {
        return Ok(Err(refused("DROP VIEW ... CASCADE")));
    }
    let _ = parser.parse_keyword(Keyword::RESTRICT);
    if parser.peek_token().token == Token::Comma {
        return Ok(Err(refused("DROP of several views at once")));
    }
    ended(parser)?;
    Ok(Ok((ViewStatement::Drop { name, if_exists }, None)))
}

fn ended(parser: &mut Parser<'_>) -> Result<(), ParserError> {
    let _ = parser.consume_token(&Token::SemiColon);
    parser.expect_token(&Token::EOF).map(drop)
}

/// The query that begins there: its text, and the same with all that is before it blanked.
fn query_at(sql: &str, start: Location) -> (String, String) {
    let start = match start.line {
        // The parser gives the end of the text no place.
        0 => sql.len(),
        _ => offset(sql, start),
    };
    let mut placed = sql.to_owned();
    blank(&mut placed, 0..start);
    let text = sql[start..].trim().trim_end_matches(';').trim_end();
    (text.to_owned(), placed)
}

/// A change of a view, planned.
pub enum ViewChange {
    Define {
        ident: TableIdent,
        create: Option<Create>,
        definition: Box<Definition>,
        properties: HashMap<String, String>,
    },
    Rename {
        from: TableIdent,
        to: TableIdent,
        if_exists: bool,
    },
    Properties {
        ident: TableIdent,
        set: BTreeMap<String, String>,
        unset: Vec<String>,
        if_exists: bool,
    },
    Drop {
        ident: TableIdent,
        if_exists: bool,
    },
}

/// What a statement about a view means. `query`: its plan, and the views that the query leads to.
///
/// # Errors
/// `Invalid`: columns that do not fit, or a view that would be made of itself.
pub fn plan(statement: ViewStatement, query: Option<(&LogicalPlan, &HashSet<TableIdent>)>) -> Result<ViewChange> {
    let view = |name: &ObjectName| ident(&table_reference(name)?);
    let (name, columns, sql) = match &statement {
        ViewStatement::Create(create) => (&create.name, create.columns.clone(), create.sql.clone()),
        ViewStatement::Query { name, sql } => (name, Vec::new(), sql.clone()),
        ViewStatement::Rename { name, to, if_exists } => {
            return Ok(ViewChange::Rename { from: view(name)?, to: view(to)?, if_exists: *if_exists });
        }
        ViewStatement::Properties { name, set, unset, if_exists } => {
            let (set, unset) = (set.clone(), unset.clone());
            return Ok(ViewChange::Properties { ident: view(name)?, set, unset, if_exists: *if_exists });
        }
        ViewStatement::Drop { name, if_exists } => {
            return Ok(ViewChange::Drop { ident: view(name)?, if_exists: *if_exists });
        }
    };
    let ident = view(name)?;
    let (query, reads) = query.ok_or_else(|| Error::internal("a view without a query"))?;
    check_reads_only(query)?;
    if matches!(query, LogicalPlan::Explain(_) | LogicalPlan::Analyze(_) | LogicalPlan::DescribeTable(_)) {
        return Err(Error::invalid("a view is made of a query"));
    }
    if reads.contains(&ident) {
        return Err(Error::invalid(format!("view {ident} would be made of itself; nothing was done")));
    }
    let fields = query.schema().as_arrow().fields();
    if !columns.is_empty() && columns.len() != fields.len() {
        return Err(Error::invalid(format!(
            "view {ident} names {} columns, and its query has {}",
            columns.len(),
            fields.len()
        )));
    }
    let named = fields.iter().enumerate().map(|(i, field)| {
        let name = columns.get(i).map_or(field.name(), |(name, _)| name);
        // What a query tells of nulls is of today's tables.
        field.as_ref().clone().with_name(name).with_nullable(true)
    });
    let schema = types::iceberg_schema(&arrow::datatypes::Schema::new(named.collect::<Vec<_>>()))
        .map_err(|e| e.while_doing(format_args!("view {ident}")))?;
    let sql = match columns.is_empty() {
        true => sql,
        false => {
            let (before, behind) = around_named(columns.iter().map(|(name, _)| name.as_str()));
            format!("{before}{sql}{behind}")
        }
    };
    let definition =
        Definition { sql, namespace: vec![DEFAULT_SCHEMA.to_owned()], columns: commented(&schema, &columns)? };
    let (create, properties) = match statement {
        ViewStatement::Create(create) => {
            let properties = create.properties.clone().into_iter().collect();
            (Some(create), properties)
        }
        _ => (None, HashMap::new()),
    };
    Ok(ViewChange::Define { ident, create, definition: Box::new(definition), properties })
}

/// What stands around a query whose columns are named.
fn around_named<'a>(columns: impl Iterator<Item = &'a str>) -> (&'static str, String) {
    let names: Vec<String> = columns.map(quoted).collect();
    ("SELECT * FROM (\n", format!("\n) AS named_columns ({})", names.join(", ")))
}

fn quoted(name: &str) -> String {
    ObjectName(vec![ObjectNamePart::Identifier(Ident::with_quote('"', name))]).to_string()
}

fn commented(schema: &Schema, columns: &[(String, Option<String>)]) -> Result<Schema> {
    let fields = schema.as_struct().fields().iter().enumerate().map(|(i, field)| {
        let doc = columns.get(i).and_then(|(_, comment)| comment.clone());
        Arc::new(NestedField { doc, ..field.as_ref().clone() })
    });
    Ok(Schema::builder().with_fields(fields).build()?)
}

/// The statement that makes such a view.
///
/// # Errors
/// `NotSupported`: no statement can make one, as its query is in another dialect only, or looks for names in a schema of its own.
fn create_statement(ident: &TableIdent, metadata: &ViewMetadata) -> Result<String> {
    let kept = view::query(ident, metadata)?;
    let within = metadata.current_version().default_namespace().to_string();
    if within != DEFAULT_SCHEMA {
        return Err(Error::not_supported(format!(
            "no statement makes a view such as {ident}: names without a schema are looked for in {within} in it; its query is: {kept}"
        )));
    }
    let columns = metadata.current_schema().as_struct().fields();
    let (before, behind) = around_named(columns.iter().map(|column| column.name.as_str()));
    let named = kept.strip_prefix(before).and_then(|rest| rest.strip_suffix(behind.as_str()));
    let (namespace, name) = (spelled::name(&ident.namespace.to_string()), spelled::name(&ident.name));
    let mut text = format!("CREATE VIEW {namespace}.{name}");
    // Only with their names have columns comments.
    if named.is_some() || columns.iter().any(|column| column.doc.is_some()) {
        let columns = columns.iter().map(|column| {
            let comment = column.doc.as_ref().map(|doc| format!(" COMMENT {}", spelled::quoted(doc)));
            format!("  {}{}", spelled::name(&column.name), comment.unwrap_or_default())
        });
        text.push_str(&format!(" (\n{}\n)", columns.collect::<Vec<_>>().join(",\n")));
    }
    let mut properties: BTreeMap<&String, &String> = metadata.properties().iter().collect();
    if let Some(comment) = properties.remove(&alter::COMMENT.to_owned()) {
        text.push_str(&format!("\nCOMMENT {}", spelled::quoted(comment)));
    }
    if !properties.is_empty() {
        let each =
            properties.iter().map(|(key, value)| format!("{} = {}", spelled::quoted(key), spelled::quoted(value)));
        text.push_str(&format!("\nTBLPROPERTIES ({})", each.collect::<Vec<_>>().join(", ")));
    }
    text.push_str(&format!("\nAS {}", named.unwrap_or(kept)));
    Ok(text)
}

/// What SHOW CREATE VIEW shows, as a table, and the version that it is of. `None`: there is no such view.
///
/// # Errors
/// The metadata's; `NotSupported`: no statement can make such a view.
pub async fn told(
    tables: &Tables,
    ident: &TableIdent,
    deadline: Instant,
) -> Result<Option<(Versioned<TablePointer>, MemTable)>> {
    let Some(pointer) = tables.load_view(ident, deadline).await? else { return Ok(None) };
    let metadata = tables.cache.view(&pointer.value.metadata_location).await?;
    let statement: ArrayRef = Arc::new(StringArray::from(vec![create_statement(ident, &metadata)?]));
    let schema = Listing::CreateView.schema();
    let rows = RecordBatch::try_new(schema.clone(), vec![statement])
        .map_err(|e| Error::internal(format!("telling how view {ident} is made: {e}")))?;
    Ok(Some((pointer, MemTable::try_new(schema, vec![vec![rows]])?)))
}

/// Makes the change.
///
/// # Errors
/// `AlreadyExists`, `NotFound`, and the metadata's.
pub async fn run(tables: &Tables, change: ViewChange, deadline: Instant) -> Result<u64> {
    let missing_is_fine = |error: Error, if_exists: bool| match error.kind == Kind::NotFound && if_exists {
        true => Ok(0),
        false => Err(error),
    };
    match change {
        ViewChange::Define { ident, create: None, definition, properties } => {
            view::replace(tables, &ident, &definition, properties, deadline).await.map(|()| 0)
        }
        ViewChange::Define { ident, create: Some(create), definition, properties } => {
            if ident.namespace.levels() == [DEFAULT_SCHEMA] {
                ensure_namespace(&tables.writer, &ident.namespace, deadline).await?;
            }
            if create.or_replace {
                match view::replace(tables, &ident, &definition, properties.clone(), deadline).await {
                    Err(error) if error.kind == Kind::NotFound => {}
                    other => return other.map(|()| 0),
                }
            }
            match view::create(tables, &ident, &definition, properties, deadline).await {
                Err(error) if error.kind == Kind::AlreadyExists && create.if_not_exists => Ok(0),
                other => other.map(|()| 0),
            }
        }
        ViewChange::Rename { from, to, if_exists } => {
            match tables.recording()?.rename_view(&from, &to, deadline).await {
                Ok(_) => Ok(0),
                Err(CatalogError::ViewNotFound(_)) if if_exists => Ok(0),
                Err(e) => Err(catalog_error(&format!("renaming view {from}"), e)),
            }
        }
        ViewChange::Properties { ident, set, unset, if_exists } => {
            let change = |base: ViewMetadata| {
                let builder = base.into_builder().remove_properties(&unset);
                Ok(builder.set_properties(set.clone().into_iter().collect())?)
            };
            match view::change(tables, &ident, change, deadline).await {
                Ok(()) => Ok(0),
                Err(error) => missing_is_fine(error, if_exists),
            }
        }
        ViewChange::Drop { ident, if_exists } => match view::drop(tables, &ident, deadline).await {
            Ok(()) => Ok(0),
            Err(error) => missing_is_fine(error, if_exists),
        },
    }
}

/// A view that a statement leads to.
pub struct View {
    pub ident: TableIdent,
    pub pointer: Versioned<TablePointer>,
    metadata: Arc<ViewMetadata>,
    parsed: Parsed,
    /// Where its names without a schema are looked for.
    namespace: String,
}

/// The views that a statement leads to, and what they are made of.
#[derive(Default)]
pub struct Expansion {
    /// Those that others are made of come first.
    pub views: Vec<View>,
    /// Names of tables that the views are made of, each with its schema.
    pub tables: Vec<(TableReference, TableIdent)>,
    /// Names of files, with the schema in which a view looks for them.
    pub files: Vec<(String, String)>,
    /// Whether one of them looks at listings.
    pub listings: bool,
}

impl Expansion {
    pub fn idents(&self) -> HashSet<TableIdent> {
        self.views.iter().map(|view| view.ident.clone()).collect()
    }
}

/// Finds which of these names, which mean no table, are views, and what they lead to.
///
/// # Errors
/// `Invalid` for views that are made of each other, or too deep; `Corrupt`; `NotSupported` for other dialects.
pub async fn expand(engine: &Engine, tables: &Tables, names: &[TableIdent], deadline: Instant) -> Result<Expansion> {
    let mut search =
        Search { engine, tables, deadline, done: HashSet::new(), path: Vec::new(), found: Expansion::default() };
    for name in names {
        search.visit(name.clone()).await?;
    }
    Ok(search.found)
}

struct Search<'a> {
    engine: &'a Engine,
    tables: &'a Tables,
    deadline: Instant,
    done: HashSet<TableIdent>,
    /// From the statement to the view that is being looked at.
    path: Vec<TableIdent>,
    found: Expansion,
}

impl Search<'_> {
    fn visit(&mut self, name: TableIdent) -> BoxFuture<'_, Result<()>> {
        async move {
            if let Some(start) = self.path.iter().position(|ident| *ident == name) {
                let cycle: Vec<String> = self.path[start..].iter().chain([&name]).map(ToString::to_string).collect();
                return Err(Error::invalid(format!("views are made of each other: {}", cycle.join(" reads "))));
            }
            if !self.done.insert(name.clone()) {
                return Ok(());
            }
            let Some(pointer) = self.tables.load_view(&name, self.deadline).await? else { return Ok(()) };
            if self.path.len() >= MAX_DEPTH {
                return Err(Error::invalid(format!("view {name} is made of views more than {MAX_DEPTH} deep")));
            }
            if self.found.views.len() >= MAX_VIEWS {
                return Err(Error::invalid(format!("the statement leads to more than {MAX_VIEWS} views")));
            }
            let metadata = self.tables.cache.view(&pointer.value.metadata_location).await?;
            let of_view = |e: Error| Error { position: None, ..e.while_doing(format_args!("view {name}")) };
            let sql = view::query(&name, &metadata)?;
            let (parsed, action) = statement::parse(&self.engine.template, sql).map_err(of_view)?;
            if action != Action::Query {
                return Err(of_view(Error::corrupt("what is kept is no query")));
            }
            let namespace = metadata.current_version().default_namespace().to_string();
            let references = self.engine.template.resolve_table_references(&parsed)?;
            let mut inner = Vec::new();
            for reference in references {
                if files::is_file(&reference) {
                    self.found.files.push((namespace.clone(), reference.table().to_owned()));
                    continue;
                }
                let schema = reference.schema().unwrap_or(&namespace).to_owned();
                if schema == super::catalog::INFORMATION_SCHEMA {
                    self.found.listings = true;
                    continue;
                }
                let bare = Name::parse(reference.table()).table;
                let wanted = match reference.catalog() {
                    Some(catalog) => TableReference::full(catalog, schema.as_str(), bare),
                    None => TableReference::partial(schema.as_str(), bare),
                };
                match ident(&wanted) {
                    Ok(ident) => inner.push((TableReference::partial(schema, reference.table()), ident)),
                    // Perhaps the name of a function or of a common table expression.
                    Err(error) if error.kind == Kind::Invalid => {}
                    Err(error) => return Err(of_view(error)),
                }
            }
            let idents: Vec<TableIdent> = inner.iter().map(|(_, ident)| ident.clone()).collect();
            let loaded = self.tables.load(&idents, self.deadline).await.map_err(of_view)?;
            self.path.push(name.clone());
            for ((reference, ident), table) in inner.into_iter().zip(loaded.tables) {
                match table {
                    Some(_) => self.found.tables.push((reference, ident)),
                    None => self.visit(ident).await?,
                }
            }
            self.path.pop();
            self.found.views.push(View { ident: name, pointer, metadata, parsed, namespace });
            Ok(())
        }
        .boxed()
    }
}

impl View {
    /// The view as a table, in a catalog that has what it is made of.
    ///
    /// # Errors
    /// `NotFound` naming what it is made of and is gone; those of planning.
    pub async fn table(
        &self,
        engine: &Engine,
        catalogs: Arc<dyn datafusion::catalog::CatalogProviderList>,
    ) -> Result<ViewTable> {
        let plan = self.plan(engine, catalogs).await;
        let plan = plan.map_err(|e| {
            let e = self.explain(e);
            Error { position: None, ..e.while_doing(format_args!("view {}", self.ident)) }
        })?;
        let sql = view::query(&self.ident, &self.metadata)?.to_owned();
        Ok(ViewTable::new(plan, Some(sql)))
    }

    async fn plan(
        &self,
        engine: &Engine,
        catalogs: Arc<dyn datafusion::catalog::CatalogProviderList>,
    ) -> Result<LogicalPlan> {
        let template = engine.template.clone();
        let config = template.config().clone().with_default_catalog_and_schema(CATALOG, &self.namespace);
        let state = datafusion::execution::session_state::SessionStateBuilder::new_from_existing(template)
            .with_config(config)
            .with_catalog_list(catalogs)
            .build();
        let parsed = self.parsed.clone();
        let part = async move { values::plan(&state, parsed).await };
        let plan = computing::planning(&engine.template, part).await??;
        check_reads_only(&plan)?;
        check_size(&plan)?;
        let mut columns = Vec::new();
        for field in self.metadata.current_schema().as_struct().fields() {
            let found = plan.schema().iter().find(|(_, column)| column.name() == &field.name);
            let (qualifier, column) = found.ok_or_else(|| {
                Error::not_found(format!("its query has no column {} any more; CREATE OR REPLACE VIEW", field.name))
            })?;
            columns.push(Expr::Column(Column::from((qualifier, column))).alias(&field.name));
        }
        Ok(LogicalPlanBuilder::from(plan).project(columns)?.build()?)
    }

    /// Says of a name that means nothing any more what it was.
    fn explain(&self, error: Error) -> Error {
        let gone = error.message.split_once("table '").and_then(|(_, rest)| rest.split_once("' not found"));
        match gone {
            Some((table, _)) => {
                let table = table.strip_prefix("lake.").unwrap_or(table);
                Error::not_found(format!("table {} does not exist", Name::parse(table).table))
            }
            None => error,
        }
    }
}

/// A view as listings show it: its columns, and the query as it is kept. `None`: dropped since.
///
/// # Errors
/// The metadata's; `Corrupt`.
pub async fn listed(tables: &Tables, ident: &TableIdent, deadline: Instant) -> Result<Option<ViewTable>> {
    let pointer = tables.metadata.load_view(ident, deadline).await;
    let Some(pointer) = pointer.map_err(|e| catalog_error("looking up views", e))? else { return Ok(None) };
    let metadata = tables.cache.view(&pointer.value.metadata_location).await?;
    let columns =
        types::arrow_schema(metadata.current_schema()).map_err(|e| e.while_doing(format_args!("view {ident}")))?;
    let plan = LogicalPlan::EmptyRelation(EmptyRelation {
        produce_one_row: false,
        schema: Arc::new(DFSchema::try_from(columns.as_ref().clone())?),
    });
    Ok(Some(ViewTable::new(plan, view::query(ident, &metadata).ok().map(str::to_owned))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_about_views_are_understood() {
        let sql = "CREATE OR REPLACE VIEW s.v (a COMMENT 'first', \"B\")\nCOMMENT 'words' AS SELECT 1 AS x, 'AS' AS y;";
        let (statement, query) = take(sql).unwrap().unwrap();
        let ViewStatement::Create(create) = statement else { panic!("{statement:?}") };
        assert_eq!(create.columns, [("a".to_owned(), Some("first".to_owned())), ("B".to_owned(), None)]);
        assert_eq!((create.sql.as_str(), create.or_replace), ("SELECT 1 AS x, 'AS' AS y", true));
        assert_eq!(create.properties["comment"], "words");
        let query = query.unwrap();
        assert_eq!(query.find("SELECT"), sql.find("SELECT"));
        assert_eq!(query.matches('\n').count(), 1, "lines stay lines");
        for (sql, command) in [
            ("CREATE VIEW IF NOT EXISTS v AS (SELECT 1 AS x)", Command::CreateView),
            ("ALTER VIEW v AS SELECT 1 AS x", Command::AlterView),
            ("ALTER VIEW IF EXISTS v RENAME TO s.w", Command::AlterView),
            ("ALTER VIEW v SET TBLPROPERTIES ('a' = 'b')", Command::AlterView),
            ("ALTER VIEW v UNSET TBLPROPERTIES ('a')", Command::AlterView),
            ("DROP VIEW IF EXISTS a.v;", Command::DropView),
        ] {
            let (statement, query) = take(sql).unwrap().unwrap();
            assert_eq!((statement.command(), query.is_some()), (command, statement.has_query()), "{sql}");
        }
        for sql in ["SELECT 1", "CREATE TABLE view (a INT)", "DROP TABLE v", "'"] {
            assert_eq!(take(sql).unwrap(), None, "{sql}");
        }
        for sql in
            ["CREATE VIEW v SELECT 1", "CREATE TEMPORARY VIEW v AS SELECT 1", "DROP VIEW a, b", "DROP VIEW v CASCADE"]
        {
            assert!(take(sql).is_err(), "{sql}");
        }
    }

    #[test]
    fn a_view_is_told_as_the_statement_that_makes_it() {
        let ident = ident(&TableReference::partial("s", "V")).unwrap();
        let told = |sql: &str, namespace: &str, doc: Option<&str>| {
            let metadata = serde_json::json!({
                "view-uuid": "0197f5e2-5bd5-7c3f-9a0e-6d1c6c0f0001", "format-version": 1, "location": "memory:/v",
                "current-version-id": 1, "version-log": [{"timestamp-ms": 1, "version-id": 1}],
                "versions": [{
                    "version-id": 1, "schema-id": 0, "timestamp-ms": 1, "summary": {}, "default-namespace": [namespace],
                    "representations": [{"type": "sql", "sql": sql, "dialect": view::DIALECT}],
                }],
                "schemas": [{"type": "struct", "schema-id": 0, "fields": [
                    {"id": 1, "name": "a", "required": false, "type": "long", "doc": doc},
                    {"id": 2, "name": "B", "required": false, "type": "string"},
                ]}],
                "properties": {"owner": "me", "comment": "it's"},
            });
            let metadata: ViewMetadata = serde_json::from_value(metadata).unwrap();
            create_statement(&ident, &metadata)
        };
        let plain = told("SELECT a, \"B\" FROM t", DEFAULT_SCHEMA, None).unwrap();
        assert_eq!(
            plain,
            "CREATE VIEW s.\"V\"\nCOMMENT 'it''s'\nTBLPROPERTIES ('owner' = 'me')\nAS SELECT a, \"B\" FROM t"
        );
        // What CREATE VIEW keeps of named columns is the query again.
        let (before, behind) = around_named(["a", "B"].into_iter());
        let named = told(&format!("{before}SELECT 1, 'x'{behind}"), DEFAULT_SCHEMA, Some("first")).unwrap();
        let (statement, _) = take(&named).unwrap().unwrap();
        let ViewStatement::Create(create) = statement else { panic!("{statement:?}") };
        assert_eq!(create.columns, [("a".to_owned(), Some("first".to_owned())), ("B".to_owned(), None)]);
        assert_eq!((create.sql.as_str(), create.properties["comment"].as_str()), ("SELECT 1, 'x'", "it's"));
        let error = told("SELECT a, b FROM t", "elsewhere", None).unwrap_err();
        assert_eq!(error.kind, Kind::NotSupported);
        assert!(error.message.contains("elsewhere"), "{error}");
    }
}
