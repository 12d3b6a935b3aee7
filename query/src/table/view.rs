//! Iceberg views: a query's text under a name, with the columns that it is known by.
//!
//! A view is a pointer, like a table, and its metadata a small JSON file per version. REST and SQL write the same.

use std::collections::HashMap;
use std::time::Instant;

use iceberg::spec::{Schema, ViewFormatVersion, ViewMetadata, ViewMetadataBuilder, ViewRepresentation, ViewVersion};
use lake_client::catalog::{CatalogError, TableIdent, TablePointer, Versioned};
use lake_client::store::Applied;
use serde_json::{Value, json};
use uuid::Uuid;

use super::version::{metadata_location, now_ms};
use super::{Tables, catalog_error};
use crate::error::{Error, Result};
use crate::storage::Storage;

/// The dialect of the views that lake makes, and of those that it runs: its SQL is DataFusion's.
pub const DIALECT: &str = "datafusion";
/// The property that allows a version without a dialect that the one before had.
const DROP_DIALECT: &str = "replace.drop-dialect.allowed";
/// How often a change is made again on what another one left, before the deadline ends it.
const MAX_RACES: u32 = 64;

/// What a version of a view says.
#[derive(Debug, Clone)]
pub struct Definition {
    pub sql: String,
    /// In which namespace names without one are looked for.
    pub namespace: Vec<String>,
    /// The columns, with their comments.
    pub columns: Schema,
}

impl Definition {
    fn version(&self) -> Result<ViewVersion> {
        let version = json!({
            "version-id": 1,
            "schema-id": 0,
            "timestamp-ms": now_ms(),
            "summary": {"engine-name": "lake", "engine-version": env!("CARGO_PKG_VERSION")},
            "default-namespace": self.namespace,
            "representations": [{"type": "sql", "sql": self.sql, "dialect": DIALECT}],
        });
        serde_json::from_value(version).map_err(|e| Error::internal(format!("describing a version of a view: {e}")))
    }
}

/// The query of a view's current version.
///
/// # Errors
/// `NotSupported` if it has none in lake's dialect, naming those that it has.
pub fn query<'a>(ident: &TableIdent, metadata: &'a ViewMetadata) -> Result<&'a str> {
    let representations = metadata.current_version().representations();
    let mut others = Vec::new();
    for ViewRepresentation::Sql(sql) in representations.iter() {
        match sql.dialect.eq_ignore_ascii_case(DIALECT) {
            true => return Ok(&sql.sql),
            false => others.push(sql.dialect.as_str()),
        }
    }
    Err(Error::not_supported(format!(
        "view {ident} has no query in the dialect {DIALECT}, only in: {}; CREATE OR REPLACE VIEW gives it one",
        others.join(", ")
    )))
}

/// The metadata at a location.
///
/// # Errors
/// `NotFound`, `Corrupt`, and the storage's.
pub async fn read(storage: &Storage, location: &str) -> Result<ViewMetadata> {
    let bytes = storage.read(location).await?;
    serde_json::from_slice(&bytes)
        .map_err(|e| Error::corrupt(format!("{location}: not the metadata of an Iceberg view: {e}")))
}

/// Writes the metadata that follows what is at `previous`. Returns where it is.
///
/// # Errors
/// The storage's.
pub async fn write(storage: &Storage, metadata: &ViewMetadata, previous: Option<&str>) -> Result<String> {
    let location = metadata_location(metadata.location(), previous);
    let bytes = to_json(metadata).map_err(|e| Error::internal(format!("writing the metadata of a view: {e}")))?;
    storage.write_new(&location, bytes.into()).await?;
    Ok(location)
}

/// The metadata as JSON, in the order of its ids.
///
/// # Errors
/// It cannot be written as JSON.
pub fn to_json(metadata: &ViewMetadata) -> serde_json::Result<Vec<u8>> {
    let mut json = serde_json::to_value(metadata)?;
    for (list, key) in [("versions", "version-id"), ("schemas", "schema-id")] {
        if let Some(entries) = json.get_mut(list).and_then(Value::as_array_mut) {
            entries.sort_by_key(|entry| entry.get(key).and_then(Value::as_i64));
        }
    }
    serde_json::to_vec(&json)
}

/// Creates a view.
///
/// # Errors
/// `AlreadyExists` (also for a table of that name), `NotFound` (the namespace), and the metadata's.
pub async fn create(
    tables: &Tables,
    ident: &TableIdent,
    definition: &Definition,
    properties: HashMap<String, String>,
    deadline: Instant,
) -> Result<()> {
    let doing = format!("creating view {ident}");
    let uuid = Uuid::new_v4();
    let built = ViewMetadataBuilder::new(
        tables.new_place(ident, deadline).await?.of(uuid),
        definition.columns.clone(),
        definition.version()?,
        ViewFormatVersion::V1,
        properties,
    )?
    .assign_uuid(uuid)
    .build()?;
    let location = write(&tables.storage, &built.metadata, None).await?;
    let new = TablePointer { uuid, metadata_location: location.clone(), previous_location: None };
    match tables.recording()?.create_view(ident, &new, deadline).await {
        Ok(_) => Ok(()),
        Err(error) => Err(undone(tables, location, &doing, error).await),
    }
}

/// Changes a view to what `change` makes of it; it runs again whenever another writer was first.
///
/// # Errors
/// `NotFound`, those of `change`, and the metadata's.
pub async fn change(
    tables: &Tables,
    ident: &TableIdent,
    change: impl Fn(ViewMetadata) -> Result<ViewMetadataBuilder>,
    deadline: Instant,
) -> Result<()> {
    let doing = format!("changing view {ident}");
    for _ in 0..MAX_RACES {
        let current = pointer(tables, ident, deadline).await?;
        let location = &current.value.metadata_location;
        let base = read(&tables.storage, location).await?;
        let built = change(base)?.build()?;
        if built.changes.is_empty() {
            return Ok(());
        }
        let next = write(&tables.storage, &built.metadata, Some(location)).await?;
        let new = TablePointer {
            uuid: current.value.uuid,
            metadata_location: next.clone(),
            previous_location: Some(location.clone()),
        };
        match tables.recording()?.swap_view(ident, current.mod_revision, &new, deadline).await {
            Ok(_) => return Ok(()),
            Err(CatalogError::Conflict { resent: false, .. }) => tables.storage.discard(&[next]).await,
            Err(error) => return Err(undone(tables, next, &doing, error).await),
        }
    }
    Err(Error::conflict(format!("{doing}: others changed it {MAX_RACES} times; nothing was committed")))
}

/// Gives a view another query.
///
/// # Errors
/// As [`change`].
pub async fn replace(
    tables: &Tables,
    ident: &TableIdent,
    definition: &Definition,
    properties: HashMap<String, String>,
    deadline: Instant,
) -> Result<()> {
    let version = definition.version()?;
    let define = |builder: ViewMetadataBuilder| -> Result<ViewMetadataBuilder> {
        let builder = builder.set_current_version(version.clone(), definition.columns.clone())?;
        Ok(builder.set_properties(properties.clone())?)
    };
    let next = |base: ViewMetadata| {
        let ours_alone = query(ident, &base).is_ok() && base.current_version().representations().len() == 1;
        if ours_alone || base.properties().contains_key(DROP_DIALECT) {
            return define(base.into_builder());
        }
        // Texts in other dialects would be of another query: they go, by the leave that the format asks for.
        let leave = HashMap::from([(DROP_DIALECT.to_owned(), "true".to_owned())]);
        let replaced = define(base.into_builder().set_properties(leave)?)?.build()?.metadata;
        Ok(replaced.into_builder().remove_properties(&[DROP_DIALECT.to_owned()]))
    };
    change(tables, ident, next, deadline).await
}

/// Drops a view. Its metadata stays where it is.
///
/// # Errors
/// `NotFound`, and the metadata's.
pub async fn drop(tables: &Tables, ident: &TableIdent, deadline: Instant) -> Result<()> {
    let doing = format!("dropping view {ident}");
    for _ in 0..MAX_RACES {
        let current = pointer(tables, ident, deadline).await?;
        match tables.recording()?.drop_view(ident, current.mod_revision, deadline).await {
            Ok(_) => return Ok(()),
            Err(CatalogError::Conflict { resent: false, .. }) => {}
            Err(error) => return Err(catalog_error(&doing, error)),
        }
    }
    Err(Error::conflict(format!("{doing}: others changed it {MAX_RACES} times; it was not dropped")))
}

async fn pointer(tables: &Tables, ident: &TableIdent, deadline: Instant) -> Result<Versioned<TablePointer>> {
    let found = tables.metadata.load_view(ident, deadline).await;
    let found = found.map_err(|e| catalog_error("looking up a view", e))?;
    found.ok_or_else(|| Error::not_found(format!("view {ident} does not exist")))
}

/// The error of a change for which metadata was written; that goes, if it is certain that nothing was done.
async fn undone(tables: &Tables, location: String, doing: &str, error: CatalogError) -> Error {
    if error.applied() == Applied::No {
        tables.storage.discard(&[location]).await;
    }
    catalog_error(doing, error)
}
