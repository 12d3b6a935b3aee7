//! CREATE, ALTER and DROP (of schemas: [`schemas`], of views: [`views`]). Each is one change of the catalog; with AS, the rows are written first and the table appears with
//! all of them or not at all. A table that is replaced keeps its identity and its history.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::datatypes::{DECIMAL128_MAX_PRECISION, DataType, Field, Schema};
use datafusion::common::TableReference;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::datasource::{ViewTable, source_as_provider};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{DdlStatement, Expr, LogicalPlan};
use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{AlterTableOperation, ObjectName, RenameTableNameKind, Statement};
use iceberg::spec::TableMetadata;
use lake_client::catalog::{CatalogError, TableIdent};

use super::alter::{self, Alteration};
use super::catalog::ident;
use super::clauses::AlterLayout;
use super::procedures::constant;
use super::schemas::{self, SchemaStatement};
use super::statement::{Action, normalize};
use super::views::{self, ViewChange};
use super::{DEFAULT_SCHEMA, dml, files};
use crate::error::{Error, Kind, Result};
use crate::planted::{self, Bug};
use crate::scan::LakeTable;
use crate::table::conflict::{Isolation, Reads, Scope};
use crate::table::layout::Layout;
use crate::table::writer::DataFiles;
use crate::table::{Table, Tables, catalog_error, ensure_namespace};

/// A change of the catalog.
pub enum Ddl {
    CreateTable(NewTable),
    AlterTable { ident: TableIdent, if_exists: bool, alterations: Vec<Alteration> },
    RenameTable { from: TableIdent, to: TableIdent, if_exists: bool },
    DropTable { ident: TableIdent, if_exists: bool, purge: bool },
    UndropTable(TableIdent),
    Schema(SchemaStatement),
    View(Box<ViewChange>),
}

/// A table to be created.
pub struct NewTable {
    ident: TableIdent,
    if_not_exists: bool,
    or_replace: bool,
    columns: Schema,
    layout: Layout,
    properties: BTreeMap<String, String>,
    /// That set them.
    defaults: Vec<Alteration>,
    rows: Option<Box<LogicalPlan>>,
}

/// What sets the defaults and the comments of a new table's columns.
///
/// # Errors
/// `Invalid` for one that is no constant.
pub async fn defaults(state: &SessionState, action: &Action) -> Result<Vec<Alteration>> {
    let Action::CreateTable { defaults, comments, .. } = action else { return Ok(Vec::new()) };
    let mut alterations = Vec::with_capacity(defaults.len() + comments.len());
    for (name, value) in defaults {
        let value = Some(constant(state, value).await?).filter(|value| !value.is_null());
        alterations.push(Alteration::SetDefault { name: name.clone(), value });
    }
    let comment = |(name, comment): &(String, String)| Alteration::CommentColumn {
        name: name.clone(),
        comment: Some(comment.clone()),
    };
    alterations.extend(comments.iter().map(comment));
    Ok(alterations)
}

/// The change that a plan of DataFusion's stands for. `defaults`: of a new table; `state`: unless parameters have no values yet.
pub fn plan(
    plan: LogicalPlan,
    action: &Action,
    defaults: Vec<Alteration>,
    state: Option<&SessionState>,
) -> Result<Ddl> {
    let LogicalPlan::Ddl(statement) = plan else {
        return Err(Error::internal("a statement that changes the catalog was planned as something else"));
    };
    match statement {
        DdlStatement::CreateMemoryTable(create) => {
            if files::is_file(&create.name) {
                return Err(Error::invalid(format!("{:?} is not a name for a table", create.name.table())));
            }
            let Action::CreateTable { as_query, layout, properties, .. } = action else {
                return Err(Error::not_supported("SELECT INTO is not supported yet; use CREATE TABLE ... AS"));
            };
            if create.temporary {
                return Err(Error::not_supported("this form of CREATE TABLE is not supported yet; nothing was done"));
            }
            let columns = create.input.schema().fields().len();
            let written_out: Vec<bool> = (0..columns).map(|column| is_written_out(&create.input, column)).collect();
            let query = match state {
                // Before it, a UNION has the types of its first part.
                Some(state) if as_query.is_some() => {
                    let query = Arc::unwrap_or_clone(create.input);
                    state.analyzer().execute_and_check(query, state.config_options(), |_, _| {})?
                }
                _ => Arc::unwrap_or_clone(create.input),
            };
            let planned = query.schema().as_arrow();
            let fields = planned.fields().iter().zip(written_out).map(|(field, written_out)| match as_query {
                Some(not_null) => {
                    let data_type = match written_out {
                        true => roomy(field.data_type()),
                        false => field.data_type().clone(),
                    };
                    Field::new(field.name(), data_type, !not_null.contains(field.name()))
                }
                None => Field::new(field.name(), field.data_type().clone(), field.is_nullable()),
            });
            Ok(Ddl::CreateTable(NewTable {
                ident: ident(&create.name)?,
                if_not_exists: create.if_not_exists,
                or_replace: create.or_replace,
                columns: Schema::new(fields.collect::<Vec<_>>()),
                layout: layout.clone(),
                properties: properties.clone(),
                defaults,
                rows: as_query.is_some().then(|| Box::new(query)),
            }))
        }
        DdlStatement::DropTable(drop) => {
            let purge = matches!(action, Action::DropTable { purge: true });
            Ok(Ddl::DropTable { ident: ident(&drop.name)?, if_exists: drop.if_exists, purge })
        }
        other => Err(Error::not_supported(format!("{} is not supported yet; nothing was done", other.name()))),
    }
}

/// The type of a new column of literals. That of a decimal that is written out has its own digits alone, and 0.5 would make a column
/// that 1.5 does not fit: as nobody has said how many there will be, it has as many as there are.
fn roomy(of: &DataType) -> DataType {
    match *of {
        DataType::Decimal128(_, scale) if scale >= 0 => DataType::Decimal128(DECIMAL128_MAX_PRECISION, scale),
        ref other => other.clone(),
    }
}

/// Whether all values of a column are literals of the statement.
fn is_written_out(plan: &LogicalPlan, column: usize) -> bool {
    match plan {
        LogicalPlan::Projection(projection) => projection.expr.get(column).is_some_and(|expr| match plain(expr) {
            Expr::Column(of) => {
                let place = projection.input.schema().maybe_index_of_column(of);
                place.is_some_and(|place| is_written_out(&projection.input, place))
            }
            other => is_literal(other),
        }),
        // Here casts are of DataFusion's own making, where rows differ.
        LogicalPlan::Values(values) => values.values.iter().all(|row| {
            row.get(column).is_some_and(|expr| match expr {
                Expr::Cast(cast) => is_literal(&cast.expr),
                other => is_literal(other),
            })
        }),
        LogicalPlan::Union(union) => union.inputs.iter().all(|input| is_written_out(input, column)),
        LogicalPlan::SubqueryAlias(_) | LogicalPlan::Sort(_) | LogicalPlan::Limit(_) | LogicalPlan::Filter(_) => {
            plan.inputs().first().is_some_and(|input| is_written_out(input, column))
        }
        _ => false,
    }
}

fn plain(expr: &Expr) -> &Expr {
    match expr {
        Expr::Alias(alias) => plain(&alias.expr),
        other => other,
    }
}

fn is_literal(expr: &Expr) -> bool {
    match expr {
        Expr::Literal(..) => true,
        Expr::Negative(of) => is_literal(of),
        Expr::Alias(alias) => is_literal(&alias.expr),
        _ => false,
    }
}

/// Makes the change and returns how many rows were written.
pub async fn run(tables: &Arc<Tables>, state: &SessionState, ddl: Ddl, deadline: Instant) -> Result<u64> {
    match ddl {
        Ddl::CreateTable(table) => create_table(tables, state, table, deadline).await,
        Ddl::AlterTable { ident, if_exists, alterations } => {
            let Some(table) = load(tables, &ident, deadline).await? else {
                return match if_exists {
                    true => Ok(0),
                    false => Err(Error::not_found(format!("table {ident} does not exist"))),
                };
            };
            tables.edit(&table, alter::edit(alterations), deadline).await.map(|()| 0)
        }
        Ddl::RenameTable { from, to, if_exists } => {
            let renamed = match planted::has(Bug::RenameApart) {
                false => tables.recording()?.rename_table(&from, &to, deadline).await.map(drop),
                true => rename_apart(tables, &from, &to, deadline).await,
            };
            match renamed {
                Ok(()) => Ok(0),
                Err(CatalogError::TableNotFound(_)) if if_exists => Ok(0),
                Err(e) => Err(catalog_error(&format!("renaming table {from}"), e)),
            }
        }
        Ddl::UndropTable(ident) => tables.undrop_table(&ident, deadline).await.map(|()| 0),
        Ddl::Schema(statement) => schemas::run(tables, statement, deadline).await,
        Ddl::View(change) => views::run(tables, *change, deadline).await,
        Ddl::DropTable { ident, if_exists, purge } => match tables.drop_table(&ident, purge, deadline).await {
            Err(error) if error.kind == Kind::NotFound && if_exists => Ok(0),
            other => other.map(|()| 0),
        },
    }
}

/// A bug that is planted.
async fn rename_apart(
    tables: &Tables,
    from: &TableIdent,
    to: &TableIdent,
    deadline: Instant,
) -> Result<(), CatalogError> {
    let pointer = tables.metadata.read_table(from, deadline).await?;
    let pointer = pointer.ok_or_else(|| CatalogError::TableNotFound(from.clone()))?;
    let writer = tables.metadata.writer();
    writer.drop_table(from, pointer.mod_revision, deadline).await?;
    tokio::time::sleep(Duration::from_millis(100)).await;
    writer.create_table(to, &pointer.value, deadline).await.map(drop)
}

async fn load(tables: &Tables, ident: &TableIdent, deadline: Instant) -> Result<Option<Table>> {
    Ok(tables.load(std::slice::from_ref(ident), deadline).await?.tables.pop().flatten())
}

/// What ALTER TABLE and COMMENT ON stand for.
pub async fn plan_alter(state: &SessionState, statement: &Parsed) -> Result<Ddl> {
    let Parsed::Statement(statement) = statement else {
        return Err(Error::internal("a statement that alters a table was parsed as something else"));
    };
    if let Statement::AlterTable(table) = statement.as_ref()
        && let [AlterTableOperation::RenameTable { table_name }] = table.operations.as_slice()
    {
        let (RenameTableNameKind::As(to) | RenameTableNameKind::To(to)) = table_name;
        let (from, to) = (ident(&table_reference(&table.name)?)?, ident(&table_reference(to)?)?);
        return Ok(Ddl::RenameTable { from, to, if_exists: table.if_exists });
    }
    let (name, if_exists, alterations) = match statement.as_ref() {
        Statement::AlterTable(table) => (table.name.clone(), table.if_exists, alter::alterations(state, table).await?),
        Statement::Comment { object_type, object_name, comment, if_exists } => {
            let (name, alteration) = alter::comment(object_type, object_name, comment.clone())?;
            (name, *if_exists, vec![alteration])
        }
        _ => return Err(Error::internal("a statement that alters a table was parsed as something else")),
    };
    Ok(Ddl::AlterTable { ident: ident(&table_reference(&name)?)?, if_exists, alterations })
}

/// A table laid out otherwise from now on.
pub fn plan_layout(alter: AlterLayout) -> Result<Ddl> {
    let alteration = match alter.partition {
        true => Alteration::SetPartition(alter.layout),
        false => Alteration::SetOrder(alter.layout),
    };
    let ident = ident(&table_reference(&alter.table)?)?;
    Ok(Ddl::AlterTable { ident, if_exists: alter.if_exists, alterations: vec![alteration] })
}

pub(super) fn table_reference(name: &ObjectName) -> Result<TableReference> {
    let parts: Option<Vec<String>> = name.0.iter().map(|part| part.as_ident().map(normalize)).collect();
    match parts.as_deref() {
        Some([table]) => Ok(TableReference::bare(table.as_str())),
        Some([schema, table]) => Ok(TableReference::partial(schema.as_str(), table.as_str())),
        Some([catalog, schema, table]) => Ok(TableReference::full(catalog.as_str(), schema.as_str(), table.as_str())),
        _ => Err(Error::invalid(format!("{name} is not a name for a table"))),
    }
}

async fn create_table(tables: &Arc<Tables>, state: &SessionState, table: NewTable, deadline: Instant) -> Result<u64> {
    let NewTable { ident, if_not_exists, or_replace, columns, layout, properties, defaults, rows } = table;
    let ident = &ident;
    let doing = format!("creating table {ident}");
    // Asked first, so that neither rows are written nor a schema is created for nothing. Creating decides.
    let exists = tables.metadata.read_table(ident, deadline).await.map_err(|e| catalog_error(&doing, e))?.is_some();
    match (exists, if_not_exists) {
        (true, true) => return Ok(0),
        (true, false) if or_replace => {
            if let Some(table) = load(tables, ident, deadline).await? {
                if !defaults.is_empty() {
                    return Err(Error::not_supported(
                        "a default or a comment for a column of a table that is replaced is not supported yet; ALTER COLUMN ... SET \
                         DEFAULT and COMMENT ON COLUMN set them afterwards; nothing was done",
                    ));
                }
                let reads = rows.as_deref().map(|rows| reads_of(rows, ident)).transpose()?.flatten();
                let (metadata, edit) = tables.plan_replace(&table, &columns, &layout, properties)?;
                let files = write(tables, state, &metadata, rows, deadline).await?;
                let count = files.as_ref().map_or(0, |files| files.rows);
                tables.will_answer(count);
                return tables.replace(&table, metadata, edit, files, reads, deadline).await.map(|()| count);
            }
            // Dropped since.
        }
        (true, false) => return Err(Error::already_exists(format!("table {ident} exists already"))),
        _ => {}
    }
    if ident.namespace.levels() == [DEFAULT_SCHEMA] {
        ensure_namespace(&tables.writer, &ident.namespace, deadline).await?;
    } else if !tables
        .metadata
        .namespace_exists(&ident.namespace, deadline)
        .await
        .map_err(|e| catalog_error(&doing, e))?
    {
        let namespace = &ident.namespace;
        return Err(Error::not_found(format!("schema {namespace} does not exist; CREATE SCHEMA {namespace} makes it")));
    }
    let place = tables.new_place(ident, deadline).await?;
    let mut metadata = tables.plan_create(&place, &columns, &layout, properties)?;
    if !defaults.is_empty() {
        let builder = metadata.clone().into_builder(None);
        metadata = alter::edit(defaults)(&metadata, builder)?.build()?.metadata;
    }
    let files = write(tables, state, &metadata, rows, deadline).await?;
    let count = files.as_ref().map_or(0, |files| files.rows);
    tables.will_answer(count);
    match tables.create(ident, metadata, files, deadline).await {
        Ok(()) => Ok(count),
        Err(error) if error.kind == Kind::AlreadyExists && if_not_exists => Ok(0),
        Err(error) => Err(error),
    }
}

/// What a query reads of a table as it is now: whoever replaces the table by it would lose what others do meanwhile, so that
/// nobody may, whatever the table says of isolation. A query that does not read it replaces whatever is there.
fn reads_of(plan: &LogicalPlan, ident: &TableIdent) -> Result<Option<Reads>> {
    let mut found = None;
    plan.apply_with_subqueries(|plan| {
        let LogicalPlan::TableScan(scan) = plan else { return Ok(TreeNodeRecursion::Continue) };
        let provider = source_as_provider(&scan.source)?;
        if let Some(view) = provider.downcast_ref::<ViewTable>() {
            found = reads_of(view.logical_plan(), ident).map_err(Error::into_datafusion)?.or(found.take());
        } else if let Some(table) = provider.downcast_ref::<LakeTable>()
            && table.table().ident == *ident
        {
            let snapshot = table.snapshot().map(|snapshot| snapshot.snapshot_id());
            if snapshot == table.table().metadata.current_snapshot_id() {
                found = Some(Reads {
                    snapshot,
                    scope: Scope::Everything,
                    files: Arc::default(),
                    isolation: Isolation::Serializable,
                    only_deletes: false,
                });
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(found)
}

/// Writes the rows of a new table, if there are to be any.
async fn write(
    tables: &Arc<Tables>,
    state: &SessionState,
    metadata: &TableMetadata,
    rows: Option<Box<LogicalPlan>>,
    deadline: Instant,
) -> Result<Option<DataFiles>> {
    let Some(plan) = rows else { return Ok(None) };
    dml::write_plan(tables, state, metadata, &plan, deadline).await.map(Some)
}
