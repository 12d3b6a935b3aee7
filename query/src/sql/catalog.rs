//! The catalog of one statement: the tables it names, as they were when their pointers were resolved, all at once.
//!
//! The tables of the schema `system` are read from the leader ([`system`]). Everything else in the metadata is listed only for statements that look at listings (SHOW TABLES,
//! information_schema), and then loaded table by table as the statement gets to it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::{CatalogProvider, CatalogProviderList, SchemaProvider, TableFunction, TableProvider};
use datafusion::common::{Result as DfResult, TableReference};
use datafusion::datasource::TableType;
use datafusion::execution::session_state::SessionState;
use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{ObjectName, Statement, TableObject};
use lake_client::catalog::{CatalogError, Namespace, TableIdent};

use super::as_of::Name;
use super::bound::ROWS;
use super::ddl::table_reference;
use super::information::Information;
use super::statement::{self, position_of};
use super::{CATALOG, DEFAULT_SCHEMA, Engine, files, system, views};
use crate::error::{Error, Kind, Position, Result};
use crate::scan::LakeTable;
use crate::scan::listing::{Listing, ListingTable};
use crate::table::pins::Pins;
use crate::table::{Table, Tables, catalog_error};
use crate::words::{did_you_mean, nearest, quoted};

/// The schema whose tables are listings.
pub const INFORMATION_SCHEMA: &str = "information_schema";

/// How long is looked for the name that was perhaps meant ...
const SUGGEST_WITHIN: Duration = Duration::from_secs(2);
/// ... among how many.
const MOST_SUGGESTED_FROM: usize = 10_000;

/// What a statement's names mean.
pub struct Found {
    pub catalogs: Arc<dyn CatalogProviderList>,
    pub stale: Option<Duration>,
    /// The views that the statement leads to.
    pub views: HashSet<TableIdent>,
    /// Names that mean no table. They may still be something else, or not be needed.
    missing: Vec<(TableReference, Option<Position>)>,
    /// The versions of tables and views that it leads to.
    pub pins: Pins,
}

impl Found {
    /// An error of planning, if it is about a name that means no table, says so and where.
    pub fn explain(&self, error: Error) -> Error {
        for (table, position) in &self.missing {
            let resolved = table.clone().resolve(CATALOG, DEFAULT_SCHEMA);
            if error.message.contains(&format!("table '{resolved}' not found")) {
                let schema = match resolved.schema.as_ref() {
                    DEFAULT_SCHEMA => String::new(),
                    schema => format!("{schema}."),
                };
                let table = Name::parse(&resolved.table).table;
                return Error::not_found(format!("table {schema}{table} does not exist")).at(*position);
            }
        }
        error
    }

    /// The error of an INSERT whose query has another number of columns, with the numbers, as far as they can be found.
    pub async fn widths(&self, state: &SessionState, sql: &str, error: Error) -> Error {
        let counted = async {
            let (Parsed::Statement(statement), _) = statement::parse(state, sql).ok()? else { return None };
            let Statement::Insert(insert) = *statement else { return None };
            let TableObject::TableName(name) = &insert.table else { return None };
            let columns = match insert.columns.as_slice() {
                [] => {
                    let table = table_reference(name).ok()?.resolve(CATALOG, DEFAULT_SCHEMA);
                    let schema = self.catalogs.catalog(&table.catalog)?.schema(&table.schema)?;
                    let table = schema.table(&table.table).await.ok()??;
                    table.schema().fields().iter().map(|field| quoted(field.name())).collect()
                }
                columns => columns.iter().map(ToString::to_string).collect::<Vec<_>>(),
            };
            let query = Parsed::Statement(Box::new(Statement::Query(insert.source?)));
            let found = state.statement_to_plan(query).await.ok()?.schema().fields().len();
            Some(format!(
                "the query has {found} columns, where {} are to be inserted into {name} ({})",
                columns.len(),
                columns.join(", ")
            ))
        };
        match counted.await {
            Some(message) => Error { message, ..error },
            None => error,
        }
    }

    /// The comments of a table's columns, in their order.
    pub async fn comments(&self, table: &ObjectName) -> Vec<Option<String>> {
        let found = async {
            let table = table_reference(table).ok()?.resolve(CATALOG, DEFAULT_SCHEMA);
            let schema = self.catalogs.catalog(&table.catalog)?.schema(&table.schema)?;
            schema.table(&table.table).await.ok()?
        };
        found.await.map(|table| comments(table.as_ref())).unwrap_or_default()
    }

    /// The columns of the files that a statement names so.
    ///
    /// # Errors
    /// `Internal`: it does not name them.
    pub async fn columns(&self, file: &str) -> Result<SchemaRef> {
        let schema = self.catalogs.catalog(CATALOG).and_then(|catalog| catalog.schema(DEFAULT_SCHEMA));
        let table = match schema {
            Some(schema) => schema.table(file).await?,
            None => None,
        };
        table.map(|table| table.schema()).ok_or_else(|| Error::internal("the file to be copied was not found"))
    }
}

/// The error, with what was perhaps meant by the name of a table that is not there.
pub async fn suggest(tables: &Tables, error: Error, deadline: Instant) -> Error {
    let missing = error.message.strip_prefix("table ").and_then(|rest| rest.strip_suffix(" does not exist"));
    let Some(missing) = missing.filter(|_| error.kind == Kind::NotFound) else { return error };
    let (schema, table) = missing.rsplit_once('.').unwrap_or((DEFAULT_SCHEMA, missing));
    let Ok(namespace) = namespace(schema) else { return error };
    let deadline = deadline.min(Instant::now() + SUGGEST_WITHIN);
    let (names, views) = tokio::join!(
        tables.metadata.list_tables(&namespace, deadline),
        tables.metadata.list_views(&namespace, deadline)
    );
    let words = match (names, views) {
        (Err(CatalogError::NamespaceNotFound(_)), _) if schema == system::SYSTEM => {
            format!(": in {schema} are {}", system::NAMES.join(", "))
        }
        (Err(CatalogError::NamespaceNotFound(_)), _) if schema != DEFAULT_SCHEMA => {
            format!(": there is no schema {schema}")
        }
        (names, views) => {
            // It is an error anyway: what cannot be listed is not suggested.
            let names = names.unwrap_or_default().into_iter().chain(views.unwrap_or_default());
            let names: Vec<String> = names.take(MOST_SUGGESTED_FROM).collect();
            did_you_mean(nearest(table, names.iter().map(String::as_str)))
        }
    };
    Error { message: format!("{}{words}", error.message), ..error }
}

/// The comments of a table's columns, in their order; none of what is no table of lake's.
pub fn comments(table: &dyn TableProvider) -> Vec<Option<String>> {
    table.downcast_ref::<LakeTable>().map(LakeTable::comments).unwrap_or_default()
}

/// The table that a name means.
///
/// # Errors
/// `NotFound` for another catalog than lake's; `Invalid` for a name that cannot be one.
pub fn ident(table: &TableReference) -> Result<TableIdent> {
    if let Some(catalog) = table.catalog()
        && catalog != CATALOG
    {
        return Err(Error::not_found(format!("catalog {catalog} does not exist; there is only {CATALOG}")));
    }
    let namespace = namespace(table.schema().unwrap_or(DEFAULT_SCHEMA))?;
    TableIdent::new(namespace, table.table()).map_err(|e| catalog_error("naming a table", e))
}

/// The namespace that a schema's name means: levels are separated by dots.
pub fn namespace(schema: &str) -> Result<Namespace> {
    schema.parse().map_err(|e: CatalogError| catalog_error("naming a schema", e))
}

/// Finds what the statement's names mean; `now`: at this moment, and not as the cache may still know it. `rows` came with it.
pub async fn resolve(
    engine: &Engine,
    tables: &Arc<Tables>,
    statement: &Parsed,
    references: &[TableReference],
    rows: Option<Arc<dyn TableProvider>>,
    now: bool,
    deadline: Instant,
) -> Result<Found> {
    let mut schemas: BTreeMap<String, StatementSchema> = BTreeMap::new();
    let mut named: Vec<(TableReference, TableIdent)> = Vec::new();
    let mut missing = Vec::new();
    let mut listings = false;
    for reference in references {
        let place = || position_of(statement, reference);
        if let Some(rows) = rows.as_ref().filter(|_| *reference == TableReference::bare(ROWS)) {
            schemas.entry(DEFAULT_SCHEMA.to_owned()).or_default().add(ROWS, Entry::Loaded(rows.clone()));
        } else if files::is_file(reference) {
            let file = files::table(engine, reference.table()).await.map_err(|e| e.at(place()))?;
            schemas.entry(DEFAULT_SCHEMA.to_owned()).or_default().add(reference.table(), Entry::Loaded(file));
        } else if system::is_system(reference) {
            let table = system::table(engine, reference.table(), deadline).await.map_err(|e| e.at(place()))?;
            schemas.entry(system::SYSTEM.to_owned()).or_default().add(reference.table(), Entry::Loaded(table));
        } else if reference.schema() == Some(INFORMATION_SCHEMA) {
            listings = true;
        } else {
            let wanted = match reference.schema() {
                Some(schema) => TableReference::partial(schema, Name::parse(reference.table()).table),
                None => TableReference::bare(Name::parse(reference.table()).table),
            };
            match ident(reference).and_then(|_| ident(&wanted)) {
                Ok(ident) => named.push((reference.clone(), ident)),
                // Perhaps the name of a function or of a common table expression: then nobody asks for it.
                Err(error) if error.kind == Kind::Invalid => missing.push((reference.clone(), place())),
                Err(error) => return Err(error.at(place())),
            }
        }
    }
    let idents: Vec<TableIdent> = named.iter().map(|(_, ident)| ident.clone()).collect();
    let load = async |idents: &[TableIdent]| match now {
        true => tables.load_now(idents, deadline).await,
        false => tables.load(idents, deadline).await,
    };
    let mut loaded = load(&idents).await?;
    // Of a view whose statement is shown nothing has to be there any more.
    let is_told = |reference: &TableReference| {
        let name = Name::parse(reference.table());
        (name.listing, name.as_of) == (Some(Listing::CreateView), None)
    };
    // What is no table may be a view. What that is made of is of one moment with all the rest.
    let names: Vec<TableIdent> = named
        .iter()
        .zip(&loaded.tables)
        .filter(|((reference, _), table)| table.is_none() && !is_told(reference))
        .map(|((_, ident), _)| ident.clone())
        .collect();
    let expansion = views::expand(engine, tables, &names, deadline).await?;
    if !expansion.tables.is_empty() {
        let within = expansion.tables.iter().map(|(_, ident)| ident.clone());
        loaded = load(&idents.iter().cloned().chain(within).collect::<Vec<_>>()).await?;
    }
    let age = loaded.age;
    let mut pins = Pins::default();
    loaded.tables.iter().flatten().for_each(|table| pins.add(table));
    expansion.views.iter().for_each(|view| pins.add_view(&view.ident, &view.pointer));
    let within = loaded.tables.split_off(idents.len());
    for ((reference, ident), table) in expansion.tables.iter().zip(within) {
        let table =
            table.ok_or_else(|| Error::not_found(format!("table {ident}, which a view reads, does not exist")))?;
        let table = provider(tables, table, &Name::parse(reference.table()), age, deadline)?;
        let schema = reference.schema().unwrap_or(DEFAULT_SCHEMA).to_owned();
        schemas.entry(schema).or_default().add(reference.table(), Entry::Loaded(table));
    }
    let view_names = expansion.idents();
    for ((reference, ident), table) in named.into_iter().zip(loaded.tables) {
        let place = position_of(statement, &reference);
        match table {
            Some(table) => {
                let name = Name::parse(reference.table());
                let table = provider(tables, table, &name, age, deadline).map_err(|e| e.at(place))?;
                let schema = reference.schema().unwrap_or(DEFAULT_SCHEMA).to_owned();
                schemas.entry(schema).or_default().add(reference.table(), Entry::Loaded(table));
            }
            None if is_told(&reference) => {
                let told = views::told(tables, &ident, deadline).await.map_err(|e| e.at(place))?;
                let missing = || Error::not_found(format!("view {ident} does not exist")).at(place);
                let (pointer, told) = told.ok_or_else(missing)?;
                pins.add_view(&ident, &pointer);
                let schema = reference.schema().unwrap_or(DEFAULT_SCHEMA).to_owned();
                schemas.entry(schema).or_default().add(reference.table(), Entry::Loaded(Arc::new(told)));
            }
            None if view_names.contains(&ident) && Name::parse(reference.table()).table != reference.table() => {
                return Err(
                    Error::invalid(format!("{ident} is a view: it has no versions and no metadata tables")).at(place)
                );
            }
            None => missing.push((reference, place)),
        }
    }
    for (schema, file) in &expansion.files {
        let table = files::table(engine, file).await?;
        schemas.entry(schema.clone()).or_default().add(file, Entry::Loaded(table));
    }
    listings |= expansion.listings;
    if listings {
        list(tables, &mut schemas, deadline).await?;
    }
    for view in &expansion.views {
        let table = view.table(engine, catalogs(engine, schemas.clone())).await?;
        let schema = view.ident.namespace.to_string();
        schemas.entry(schema).or_default().add(&view.ident.name, Entry::Loaded(Arc::new(table)));
    }
    Ok(Found { catalogs: catalogs(engine, schemas), stale: loaded.stale, views: view_names, missing, pins })
}

fn catalogs(engine: &Engine, schemas: BTreeMap<String, StatementSchema>) -> Arc<dyn CatalogProviderList> {
    let schemas = schemas.into_iter().map(|(name, schema)| (name, Arc::new(schema))).collect();
    let functions = engine.template.table_functions().clone();
    Arc::new(StatementCatalogs { lake: Arc::new(StatementCatalog { schemas, functions }) })
}

/// What is asked for of a table: rows or a listing, of the current version or of an earlier one.
fn provider(
    tables: &Arc<Tables>,
    table: Table,
    name: &Name<'_>,
    age: Option<Duration>,
    deadline: Instant,
) -> Result<Arc<dyn TableProvider>> {
    let earlier = name.as_of.as_ref().map(|as_of| as_of.find(&table)).transpose()?;
    let tables = tables.clone();
    Ok(match (name.listing, earlier) {
        (None, None) => Arc::new(LakeTable::new(tables, table, deadline)?.with_pointer_age(age)),
        (None, Some((snapshot, columns))) => Arc::new(LakeTable::at(tables, table, Some(snapshot), columns, deadline)?),
        (Some(listing), earlier) => {
            let current = || table.metadata.current_snapshot().cloned();
            let snapshot = earlier.map(|(snapshot, _)| snapshot).or_else(current);
            Arc::new(ListingTable::new(tables, table, snapshot, listing))
        }
    })
}

/// Adds the names of everything that exists.
async fn list(tables: &Arc<Tables>, schemas: &mut BTreeMap<String, StatementSchema>, deadline: Instant) -> Result<()> {
    for (namespace, idents) in tables.list(deadline).await? {
        let schema = schemas.entry(namespace.to_string()).or_default();
        for ident in idents {
            let name = ident.name.clone();
            schema.tables.entry(name).or_insert(Entry::Listed { ident, tables: tables.clone(), deadline });
        }
    }
    for ident in tables.list_views(deadline).await? {
        let schema = schemas.entry(ident.namespace.to_string()).or_default();
        let name = ident.name.clone();
        schema.tables.entry(name).or_insert(Entry::ListedView { ident, tables: tables.clone(), deadline });
    }
    Ok(())
}

#[derive(Debug, Clone)]
enum Entry {
    Loaded(Arc<dyn TableProvider>),
    /// Known by name; loaded when somebody asks.
    Listed {
        ident: TableIdent,
        tables: Arc<Tables>,
        deadline: Instant,
    },
    /// A view that is known by name. Whoever looks at listings sees its columns, and no rows.
    ListedView {
        ident: TableIdent,
        tables: Arc<Tables>,
        deadline: Instant,
    },
}

#[derive(Debug, Default, Clone)]
struct StatementSchema {
    tables: HashMap<String, Entry>,
}

impl StatementSchema {
    fn add(&mut self, name: &str, entry: Entry) {
        self.tables.insert(name.to_owned(), entry);
    }
}

#[async_trait]
impl SchemaProvider for StatementSchema {
    fn table_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tables.keys().cloned().collect();
        names.sort();
        names
    }

    async fn table(&self, name: &str) -> DfResult<Option<Arc<dyn TableProvider>>> {
        match self.tables.get(name) {
            None => Ok(None),
            Some(Entry::Loaded(table)) => Ok(Some(table.clone())),
            Some(Entry::Listed { ident, tables, deadline }) => {
                let load = async {
                    let mut loaded = tables.load(std::slice::from_ref(ident), *deadline).await?;
                    match loaded.tables.pop().flatten() {
                        Some(table) => Ok(Some(LakeTable::new(tables.clone(), table, *deadline)?)),
                        // Dropped since it was listed.
                        None => Ok(None),
                    }
                };
                let table = load.await.map_err(Error::into_datafusion)?;
                Ok(table.map(|table| Arc::new(table) as Arc<dyn TableProvider>))
            }
            Some(Entry::ListedView { ident, tables, deadline }) => {
                let listed = views::listed(tables, ident, *deadline).await.map_err(Error::into_datafusion)?;
                Ok(listed.map(|view| Arc::new(view) as Arc<dyn TableProvider>))
            }
        }
    }

    async fn table_type(&self, name: &str) -> DfResult<Option<TableType>> {
        Ok(self.tables.get(name).map(|entry| match entry {
            Entry::Loaded(table) => table.table_type(),
            Entry::Listed { .. } => TableType::Base,
            Entry::ListedView { .. } => TableType::View,
        }))
    }

    fn table_exist(&self, name: &str) -> bool {
        self.tables.contains_key(name)
    }
}

#[derive(Debug, Clone)]
struct StatementCatalog {
    schemas: BTreeMap<String, Arc<StatementSchema>>,
    /// Those that are read as tables, for listing them.
    functions: HashMap<String, Arc<TableFunction>>,
}

impl CatalogProvider for StatementCatalog {
    fn schema_names(&self) -> Vec<String> {
        self.schemas.keys().cloned().collect()
    }

    fn schema(&self, name: &str) -> Option<Arc<dyn SchemaProvider>> {
        if name == INFORMATION_SCHEMA {
            let catalogs = Arc::new(StatementCatalogs { lake: Arc::new(self.clone()) });
            return Some(Arc::new(Information::new(catalogs, self.functions.clone())));
        }
        self.schemas.get(name).map(|schema| schema.clone() as Arc<dyn SchemaProvider>)
    }
}

#[derive(Debug)]
struct StatementCatalogs {
    lake: Arc<StatementCatalog>,
}

impl CatalogProviderList for StatementCatalogs {
    /// A statement cannot add catalogs.
    fn register_catalog(&self, _: String, _: Arc<dyn CatalogProvider>) -> Option<Arc<dyn CatalogProvider>> {
        None
    }

    fn catalog_names(&self) -> Vec<String> {
        vec![CATALOG.to_owned()]
    }

    fn catalog(&self, name: &str) -> Option<Arc<dyn CatalogProvider>> {
        (name == CATALOG).then(|| self.lake.clone() as Arc<dyn CatalogProvider>)
    }
}
