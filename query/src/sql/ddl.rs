//! CREATE and DROP. Each is one change of the catalog; with AS, the rows are written first and the table appears with
//! all of them or not at all.

use std::sync::Arc;
use std::time::Instant;

use arrow::datatypes::{Field, Schema};
use datafusion::common::SchemaReference;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{DdlStatement, LogicalPlan};
use datafusion::physical_plan::execute_stream;
use lake_client::catalog::{CatalogError, Namespace, TableIdent};

use super::catalog::{ident, namespace};
use super::statement::Action;
use super::{CATALOG, DEFAULT_SCHEMA, files, name_files};
use crate::error::{Error, Kind, Result};
use crate::scan::sink::write_rows;
use crate::table::{Tables, catalog_error, ensure_namespace};

/// A change of the catalog.
pub enum Ddl {
    CreateTable { ident: TableIdent, if_not_exists: bool, columns: Schema, rows: Option<Box<LogicalPlan>> },
    CreateSchema { namespace: Namespace, if_not_exists: bool },
    DropTable { ident: TableIdent, if_exists: bool },
    DropSchema { namespace: Namespace, if_exists: bool },
}

/// The schema that describes the others.
const INFORMATION_SCHEMA: &str = "information_schema";

/// The change that a plan of DataFusion's stands for.
pub fn plan(plan: LogicalPlan, action: &Action) -> Result<Ddl> {
    let LogicalPlan::Ddl(statement) = plan else {
        return Err(Error::internal("a statement that changes the catalog was planned as something else"));
    };
    match statement {
        DdlStatement::CreateMemoryTable(create) => {
            if files::is_file(&create.name) {
                return Err(Error::invalid(format!("{:?} is not a name for a table", create.name.table())));
            }
            let Action::CreateTable { as_query } = action else {
                return Err(Error::not_supported("SELECT INTO is not supported yet; use CREATE TABLE ... AS"));
            };
            if create.or_replace || create.temporary {
                return Err(Error::not_supported("this form of CREATE TABLE is not supported yet; nothing was done"));
            }
            let planned = create.input.schema().as_arrow();
            let fields = planned.fields().iter().map(|field| match as_query {
                Some(not_null) => Field::new(field.name(), field.data_type().clone(), !not_null.contains(field.name())),
                None => Field::new(field.name(), field.data_type().clone(), field.is_nullable()),
            });
            Ok(Ddl::CreateTable {
                ident: ident(&create.name)?,
                if_not_exists: create.if_not_exists,
                columns: Schema::new(fields.collect::<Vec<_>>()),
                rows: as_query.is_some().then(|| Box::new(Arc::unwrap_or_clone(create.input))),
            })
        }
        DdlStatement::CreateCatalogSchema(create) => {
            let name = create.schema_name.strip_prefix("lake.").unwrap_or(&create.schema_name);
            if name == INFORMATION_SCHEMA {
                return Err(Error::invalid(format!("{name} is the name of a schema that is always there")));
            }
            Ok(Ddl::CreateSchema { namespace: namespace(name)?, if_not_exists: create.if_not_exists })
        }
        DdlStatement::DropTable(drop) => Ok(Ddl::DropTable { ident: ident(&drop.name)?, if_exists: drop.if_exists }),
        DdlStatement::DropCatalogSchema(drop) => {
            let schema = match drop.name {
                SchemaReference::Bare { schema } => schema,
                SchemaReference::Full { schema, catalog } if catalog.as_ref() == CATALOG => schema,
                SchemaReference::Full { catalog, .. } => {
                    return Err(Error::not_found(format!("catalog {catalog} does not exist; there is only {CATALOG}")));
                }
            };
            Ok(Ddl::DropSchema { namespace: namespace(&schema)?, if_exists: drop.if_exists })
        }
        other => Err(Error::not_supported(format!("{} is not supported yet; nothing was done", other.name()))),
    }
}

/// Makes the change and returns how many rows were written.
pub async fn run(tables: &Arc<Tables>, state: &SessionState, ddl: Ddl, deadline: Instant) -> Result<u64> {
    match ddl {
        Ddl::CreateTable { ident, if_not_exists, columns, rows } => {
            create_table(tables, state, &ident, if_not_exists, &columns, rows, deadline).await
        }
        Ddl::CreateSchema { namespace, if_not_exists } => {
            match tables.writer.create_namespace(&namespace, Default::default(), deadline).await {
                Ok(()) => Ok(0),
                Err(CatalogError::NamespaceExists(_)) if if_not_exists => Ok(0),
                Err(e) => Err(catalog_error(&format!("creating schema {namespace}"), e)),
            }
        }
        Ddl::DropTable { ident, if_exists } => match tables.drop_table(&ident, deadline).await {
            Err(error) if error.kind == Kind::NotFound && if_exists => Ok(0),
            other => other.map(|()| 0),
        },
        Ddl::DropSchema { namespace, if_exists } => match tables.writer.drop_namespace(&namespace, deadline).await {
            Ok(()) => Ok(0),
            Err(CatalogError::NamespaceNotFound(_)) if if_exists => Ok(0),
            Err(e) => Err(catalog_error(&format!("dropping schema {namespace}"), e)),
        },
    }
}

async fn create_table(
    tables: &Arc<Tables>,
    state: &SessionState,
    ident: &TableIdent,
    if_not_exists: bool,
    columns: &Schema,
    rows: Option<Box<LogicalPlan>>,
    deadline: Instant,
) -> Result<u64> {
    let doing = format!("creating table {ident}");
    // Asked first, so that neither rows are written nor a schema is created for nothing. Creating decides.
    let exists = tables.metadata.read_table(ident, deadline).await.map_err(|e| catalog_error(&doing, e))?.is_some();
    match (exists, if_not_exists) {
        (true, true) => return Ok(0),
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
    let metadata = tables.plan_create(ident, columns)?;
    let files = match rows {
        Some(plan) => {
            let physical = state.create_physical_plan(&plan).await?;
            let stream = execute_stream(physical.clone(), state.task_ctx())?;
            let written = write_rows(tables.data_writer(&metadata)?, stream, deadline).await;
            Some(written.map_err(|e| name_files(e, &physical))?)
        }
        None => None,
    };
    let count = files.as_ref().map_or(0, |files| files.rows);
    match tables.create(ident, metadata, files, deadline).await {
        Ok(()) => Ok(count),
        Err(error) if error.kind == Kind::AlreadyExists && if_not_exists => Ok(0),
        Err(error) => Err(error),
    }
}
