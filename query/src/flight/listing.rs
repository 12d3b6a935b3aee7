//! GetTables: the tables and views that there are, as the patterns of a client have them.
//!
//! Only those that match are loaded for their columns. What cannot be loaded, or was dropped since it was listed, has none:
//! one damaged table does not hide the others.

use std::time::Instant;

use arrow::array::{BooleanArray, RecordBatch, StringArray};
use arrow::compute::like;
use arrow::datatypes::Schema;
use arrow_flight::sql::CommandGetTables;
use lake_client::catalog::TableIdent;

use super::rows::outgoing_schema;
use crate::error::{Error, Result};
use crate::sql::{CATALOG, Engine, views};

/// The answer to the command.
///
/// # Errors
/// Those of listing the metadata.
pub async fn tables(engine: &Engine, query: CommandGetTables, deadline: Instant) -> Result<RecordBatch> {
    let tables = engine.tables();
    let failed = |e: arrow_flight::error::FlightError| Error::internal(format!("listing tables: {e}"));
    let wants = |kind: &str| query.table_types.is_empty() || query.table_types.iter().any(|wanted| wanted == kind);
    let mut builder = query.clone().into_builder();
    if wants("TABLE") {
        for (namespace, idents) in tables.list(deadline).await? {
            let idents = matching(&query, idents)?;
            let loaded = match query.include_schema {
                true => tables.load(&idents, deadline).await.map(|loaded| loaded.tables),
                false => Ok(Vec::new()),
            };
            for (i, ident) in idents.iter().enumerate() {
                let table = match &loaded {
                    Ok(loaded) => loaded.get(i).cloned().flatten(),
                    // Each by itself, then.
                    Err(_) => one(engine, ident, deadline).await,
                };
                let schema = table.and_then(|table| table.arrow_schema().ok());
                let schema = schema.map_or_else(|| Schema::empty().into(), |schema| outgoing_schema(&schema));
                builder.append(CATALOG, namespace.to_string(), &ident.name, "TABLE", &schema).map_err(failed)?;
            }
        }
    }
    if wants("VIEW") {
        for ident in matching(&query, tables.list_views(deadline).await?)? {
            let schema = match query.include_schema {
                true => views::listed(tables, &ident, deadline).await.ok().flatten(),
                false => None,
            };
            let schema = schema.map(|view| datafusion::catalog::TableProvider::schema(&view));
            let schema = schema.map_or_else(|| Schema::empty().into(), |schema| outgoing_schema(&schema));
            builder.append(CATALOG, ident.namespace.to_string(), &ident.name, "VIEW", &schema).map_err(failed)?;
        }
    }
    builder.build().map_err(failed)
}

async fn one(engine: &Engine, ident: &TableIdent, deadline: Instant) -> Option<crate::table::Table> {
    let loaded = engine.tables().load(std::slice::from_ref(ident), deadline).await;
    loaded.ok()?.tables.pop().flatten()
}

/// Those that the patterns mean, in which `%` is any text and `_` any character.
fn matching(query: &CommandGetTables, idents: Vec<TableIdent>) -> Result<Vec<TableIdent>> {
    let is_like = |names: Vec<String>, pattern: &Option<String>| -> Result<BooleanArray> {
        let names = StringArray::from(names);
        match pattern {
            None => Ok(BooleanArray::from(vec![true; arrow::array::Array::len(&names)])),
            Some(pattern) => like(&names, &StringArray::new_scalar(pattern))
                .map_err(|e| Error::invalid(format!("the pattern {pattern:?}: {e}"))),
        }
    };
    let schemas = idents.iter().map(|ident| ident.namespace.to_string()).collect();
    let schemas = is_like(schemas, &query.db_schema_filter_pattern)?;
    let names = is_like(idents.iter().map(|ident| ident.name.clone()).collect(), &query.table_name_filter_pattern)?;
    let matches = schemas.values().iter().zip(names.values().iter());
    Ok(idents.into_iter().zip(matches).filter(|(_, (schema, name))| *schema && *name).map(|(ident, _)| ident).collect())
}
