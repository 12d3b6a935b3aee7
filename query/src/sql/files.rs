//! Parquet files named in SQL: `SELECT * FROM '/data/x.parquet'`, a glob, a directory, or `s3://bucket/x.parquet`.
//!
//! Allowed only where the configuration says so, because a query node may be able to read files that its callers should
//! not. Every file's footer is read while planning, one after the other by name, so that a damaged file is an error that
//! names it.

use std::path::Path;
use std::sync::Arc;

use arrow::datatypes::Schema;
use datafusion::catalog::TableProvider;
use datafusion::common::TableReference;
use datafusion::datasource::file_format::FileFormat;
use datafusion::datasource::file_format::parquet::ParquetFormat;
use datafusion::datasource::listing::{ListingOptions, ListingTable, ListingTableConfig, ListingTableUrl};
use futures::{StreamExt, TryStreamExt};
use object_store::ObjectMeta;

use super::Engine;
use crate::error::{Error, Result};
use crate::scan::footer;

/// Most files that one name may stand for.
const MAX_FILES: usize = 10_000;
/// Footers read at a time.
const FOOTERS_IN_FLIGHT: usize = 8;

/// Whether a name in SQL means files. No table's name holds a slash.
pub fn is_file(table: &TableReference) -> bool {
    let name = table.table();
    matches!(table, TableReference::Bare { .. })
        && (name.contains('/') || name.to_ascii_lowercase().ends_with(".parquet"))
}

/// The files that `name` stands for, as one table.
pub async fn table(engine: &Engine, name: &str) -> Result<Arc<dyn TableProvider>> {
    if !engine.allows_files() {
        return Err(Error::denied(format!(
            "{name}: this node does not read files named in SQL; allow_local_files in its configuration allows it"
        )));
    }
    let reading = |e: Error| e.while_doing(format_args!("reading {name}"));
    check_kind(name)?;
    let url = parse(name).map_err(reading)?;
    let (store_url, store) = engine.tables().storage.url_and_store(&location(&url)).map_err(reading)?;
    let state = &engine.template;
    state.runtime_env().register_object_store(&store_url, store.clone());
    let listed: Vec<ObjectMeta> = url
        .list_all_files(state, store.as_ref(), if url.is_collection() { ".parquet" } else { "" })
        .await
        .map_err(|e| reading(e.into()))?
        .take(MAX_FILES + 1)
        .try_collect()
        .await
        .map_err(|e| reading(e.into()))?;
    if listed.is_empty() {
        return Err(Error::not_found(format!("there are no Parquet files at {name}")));
    }
    if listed.len() > MAX_FILES {
        return Err(Error::invalid(format!("{name} stands for more than {MAX_FILES} files")));
    }
    let format = ParquetFormat::default();
    let footers = state.runtime_env().cache_manager.get_file_metadata_cache();
    let schemas: Vec<Schema> = futures::stream::iter(listed)
        .map(|file| {
            let (format, store, footers) = (&format, &store, footers.as_ref());
            async move {
                // With its page index: DataFusion reads what it does not find in the cache, and checks nothing.
                footer::read(store.as_ref(), &file, footers, true).await?;
                let schema = format.infer_schema(state, store, std::slice::from_ref(&file)).await;
                schema.map(Arc::unwrap_or_clone).map_err(|e| footer::damaged(&file, Error::from(e)))
            }
        })
        .buffered(FOOTERS_IN_FLIGHT)
        .try_collect()
        .await?;
    let schema = Schema::try_merge(schemas)
        .map_err(|e| Error::invalid(format!("the files at {name} do not have the same columns: {e}")))?;
    let options =
        ListingOptions::new(Arc::new(format)).with_file_extension(if url.is_collection() { ".parquet" } else { "" });
    let config = ListingTableConfig::new(url).with_listing_options(options).with_schema(Arc::new(schema));
    Ok(Arc::new(ListingTable::try_new(config)?))
}

/// A pipe would be waited for, and a device has no end.
fn check_kind(name: &str) -> Result<()> {
    let path = name.strip_prefix("file://").unwrap_or(name);
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() && !found.is_dir() => {
            Err(Error::invalid(format!("{name} is neither a file nor a directory")))
        }
        // What is not there, and what is elsewhere, is found out by reading it.
        _ => Ok(()),
    }
}

/// A directory is one also without the slash at its end.
fn parse(name: &str) -> Result<ListingTableUrl> {
    let is_dir = !name.contains("://") && !name.ends_with('/') && Path::new(name).is_dir();
    let name = if is_dir { format!("{name}/") } else { name.to_owned() };
    Ok(ListingTableUrl::parse(name)?)
}

/// Some location in the store that the files are in.
fn location(url: &ListingTableUrl) -> String {
    match url.scheme() {
        "file" => format!("file:///{}", url.prefix()),
        _ => format!("{}{}", url.object_store().as_str(), url.prefix()),
    }
}
