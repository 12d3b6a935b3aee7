//! Views: what a query is called, and its text for one or more engines. SQL in lake runs those in its own dialect
//! ([`crate::sql::views`]).

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use iceberg::ViewUpdate;
use iceberg::spec::{Schema, ViewFormatVersion, ViewMetadata, ViewMetadataBuilder, ViewVersion};
use lake_client::catalog::{CatalogError, TableIdent, TablePointer, Versioned};
use lake_client::store::Applied;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::error::{RestError, Result, json_response, kind, unless_made};
use super::evolve::{entries, refused, unpanicked};
use super::request::{Call, Identifier, part, table_of};
use super::{Rest, answered};
use crate::error::Kind;
use crate::table::view;

/// How often a change is made again on what another one left, before the deadline ends it.
const MAX_RACES: u32 = 64;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Create {
    name: String,
    location: Option<String>,
    schema: Value,
    view_version: Value,
    properties: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Register {
    name: String,
    metadata_location: String,
}

#[derive(Debug, Deserialize)]
struct Rename {
    source: Identifier,
    destination: Identifier,
}

/// The one requirement that there is.
#[derive(Debug, Deserialize)]
#[serde(tag = "type")]
enum Requirement {
    #[serde(rename = "assert-view-uuid")]
    Uuid { uuid: Uuid },
}

pub async fn list(rest: &Rest, call: &Call) -> Result<Response> {
    let namespace = call.namespace()?;
    let names = rest.tables.metadata.list_views(&namespace, call.deadline).await?;
    call.identifiers(&namespace, names)
}

pub async fn create(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Create = call.json()?;
    let ident = table_of(call.namespace()?, body.name, "name")?;
    if let Some(asked) = body.location {
        return Err(super::tables::no_location(&asked));
    }
    let schema: Schema = part(body.schema, "schema")?;
    let view_version: ViewVersion = part(body.view_version, "view-version")?;
    let uuid = Uuid::new_v4();
    let place = rest.tables.new_place(&ident, call.deadline).await.map_err(RestError::of_a_change)?;
    let location = place.of(uuid);
    let properties: HashMap<String, String> = body.properties.unwrap_or_default().into_iter().collect();
    let field = "schema or view-version";
    let built = unpanicked(field, || {
        ViewMetadataBuilder::new(location, schema, view_version, ViewFormatVersion::V1, properties)?
            .assign_uuid(uuid)
            .build()
    })?;
    let metadata = built.map_err(|e| refused(field, &e))?.metadata;
    let location = write(rest, &metadata, None, call.deadline).await?;
    let new = TablePointer { uuid, metadata_location: location.clone(), previous_location: None };
    let created = rest.writer(call, StatusCode::OK, Some(&location))?.create_view(&ident, &new, call.deadline).await;
    discard_unmade(rest, &location, &created).await;
    unless_made(created, has_uuid(rest, call, &ident, uuid)).await?;
    loaded(&location, &metadata)
}

pub async fn load(rest: &Rest, call: &Call) -> Result<Response> {
    let ident = call.view()?;
    let pointer = pointer(rest, &ident, call).await?;
    let metadata = read(rest, &pointer.value.metadata_location, call.deadline).await.map_err(RestError::of_a_read)?;
    loaded(&pointer.value.metadata_location, &metadata)
}

pub async fn exists(rest: &Rest, call: &Call) -> Result<Response> {
    pointer(rest, &call.view()?, call).await.map(|_| StatusCode::NO_CONTENT.into_response())
}

/// Replaces a view's version, or changes it otherwise.
pub async fn replace(rest: &Rest, call: &Call) -> Result<Response> {
    let ident = call.view()?;
    let body: Value = call.json()?;
    call.names(&body, &ident)?;
    let requirements: Vec<Requirement> = entries(&body, "requirements")?;
    let updates: Vec<ViewUpdate> = entries(&body, "updates")?;
    for _ in 0..MAX_RACES {
        let current = pointer(rest, &ident, call).await?;
        let location = &current.value.metadata_location;
        let base = read(rest, location, call.deadline).await.map_err(RestError::of_a_change)?;
        for Requirement::Uuid { uuid } in &requirements {
            if *uuid != base.uuid() {
                return Err(RestError::lost(format!("view {ident} is {}, not {uuid}", base.uuid())));
            }
        }
        let built = evolve(base, &updates)?;
        let next = write(rest, &built, Some(location), call.deadline).await?;
        let new = TablePointer {
            uuid: current.value.uuid,
            metadata_location: next.clone(),
            previous_location: Some(location.clone()),
        };
        let writer = rest.writer(call, StatusCode::OK, Some(&next))?;
        let swap = || writer.swap_view(&ident, current.mod_revision, &new, call.deadline);
        let swapped = match swap().await {
            // Made again, it finds what the one without an answer has made, or keeps that from being made.
            Err(error) if error.applied() == Applied::Unknown => match swap().await {
                again @ Ok(_) => again,
                // Perhaps by the one without an answer, whose metadata this is.
                Err(done @ CatalogError::AlreadyDone(_)) => return Err(done.into()),
                Err(CatalogError::Conflict { current: Some(now), .. })
                    if now.value.previous_location.as_deref() == Some(next.as_str()) =>
                {
                    Ok(now)
                }
                Err(_) => Err(error),
            },
            swapped => swapped,
        };
        discard_unmade(rest, &next, &swapped).await;
        match swapped {
            Ok(_) => return loaded(&next, &built),
            Err(CatalogError::Conflict { resent: false, .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(RestError::lost(format!("others changed view {ident} {MAX_RACES} times; nothing was committed")))
}

/// Makes a view of metadata that is there already.
pub async fn register(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Register = call.json()?;
    let ident = table_of(call.namespace()?, body.name, "name")?;
    let location = body.metadata_location;
    rest.allowed("metadata-location", &location, call.deadline).await?;
    let metadata = read(rest, &location, call.deadline).await.map_err(|e| match e.kind {
        Kind::NotFound | Kind::Corrupt | Kind::Invalid => RestError::bad("metadata-location", e),
        _ => RestError::of_a_change(e),
    })?;
    let new = TablePointer { uuid: metadata.uuid(), metadata_location: location.clone(), previous_location: None };
    let created = rest.writer(call, StatusCode::OK, Some(&location))?.create_view(&ident, &new, call.deadline).await;
    unless_made(created, has_uuid(rest, call, &ident, new.uuid)).await?;
    loaded(&location, &metadata)
}

pub async fn rename(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Rename = call.json()?;
    let (from, to) = (call.identifier(body.source, "source")?, call.identifier(body.destination, "destination")?);
    let before = rest.tables.metadata.load_view(&from, call.deadline).await?;
    let renamed = rest.writer(call, StatusCode::NO_CONTENT, None)?.rename_view(&from, &to, call.deadline).await;
    let made = async {
        match before {
            Some(before) => has_uuid(rest, call, &to, before.value.uuid).await,
            None => false,
        }
    };
    unless_made(renamed, made).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub async fn drop(rest: &Rest, call: &Call) -> Result<Response> {
    let ident = call.view()?;
    let writer = rest.writer(call, StatusCode::NO_CONTENT, None)?;
    for _ in 0..MAX_RACES {
        let current = pointer(rest, &ident, call).await?;
        match writer.drop_view(&ident, current.mod_revision, call.deadline).await {
            Err(CatalogError::Conflict { resent: false, .. }) => {}
            dropped => {
                let gone = async { matches!(rest.tables.metadata.load_view(&ident, call.deadline).await, Ok(None)) };
                unless_made(dropped, gone).await?;
                return Ok(StatusCode::NO_CONTENT.into_response());
            }
        }
    }
    Err(RestError::lost(format!("others changed view {ident} {MAX_RACES} times; it was not dropped")))
}

fn evolve(base: ViewMetadata, updates: &[ViewUpdate]) -> Result<ViewMetadata> {
    let (uuid, location) = (base.uuid(), base.location().to_owned());
    let mut builder = base.into_builder();
    for (i, update) in updates.iter().cloned().enumerate() {
        let field = format!("updates[{i}]");
        let applied = unpanicked(&field, || match update {
            ViewUpdate::AssignUuid { uuid } => Ok(builder.assign_uuid(uuid)),
            ViewUpdate::UpgradeFormatVersion { format_version } => builder.upgrade_format_version(format_version),
            ViewUpdate::AddSchema { schema, .. } => Ok(builder.add_schema(schema)),
            ViewUpdate::SetLocation { location } => Ok(builder.set_location(location)),
            ViewUpdate::SetProperties { updates } => builder.set_properties(updates),
            ViewUpdate::RemoveProperties { removals } => Ok(builder.remove_properties(&removals)),
            ViewUpdate::AddViewVersion { view_version } => builder.add_version(view_version),
            ViewUpdate::SetCurrentViewVersion { view_version_id } => builder.set_current_version_id(view_version_id),
        })?;
        builder = applied.map_err(|e| refused(&field, &e))?;
    }
    let metadata = unpanicked("updates", || builder.build())?.map_err(|e| refused("updates", &e))?.metadata;
    match (metadata.uuid() == uuid, metadata.location() == location) {
        (true, true) => Ok(metadata),
        (false, _) => Err(RestError::bad("updates", format!("the view's uuid is {uuid}, and stays"))),
        _ => {
            Err(RestError::bad("updates", format!("the catalog chooses where a view lives; this one is at {location}")))
        }
    }
}

async fn pointer(rest: &Rest, ident: &TableIdent, call: &Call) -> Result<Versioned<TablePointer>> {
    let pointer = rest.tables.metadata.load_view(ident, call.deadline).await?;
    pointer.ok_or_else(|| CatalogError::ViewNotFound(ident.clone()).into())
}

async fn read(rest: &Rest, location: &str, deadline: Instant) -> crate::error::Result<ViewMetadata> {
    answered(deadline, view::read(&rest.tables.storage, location)).await
}

/// Writes the metadata that follows what is at `previous`. Returns where it is.
async fn write(rest: &Rest, metadata: &ViewMetadata, previous: Option<&str>, deadline: Instant) -> Result<String> {
    let written = answered(deadline, view::write(&rest.tables.storage, metadata, previous)).await;
    written.map_err(RestError::of_a_change)
}

/// Removes the metadata that was written for a change, if it is certain that this was not made.
async fn discard_unmade<T>(rest: &Rest, location: &str, changed: &Result<T, CatalogError>) {
    if changed.as_ref().is_err_and(|error| error.applied() == Applied::No) {
        rest.tables.storage.discard(&[location.to_owned()]).await;
    }
}

/// Whether a view is the one with this uuid. Without an answer nothing says so.
async fn has_uuid(rest: &Rest, call: &Call, view: &TableIdent, uuid: Uuid) -> bool {
    let there = rest.tables.metadata.load_view(view, call.deadline).await;
    there.is_ok_and(|there| there.is_some_and(|there| there.value.uuid == uuid))
}

fn loaded(location: &str, metadata: &ViewMetadata) -> Result<Response> {
    let failed = |e: serde_json::Error| RestError::of_a_read(crate::Error::internal(format!("writing JSON: {e}")));
    let metadata: Value = serde_json::from_slice(&view::to_json(metadata).map_err(failed)?).map_err(failed)?;
    let body = json!({"metadata-location": location, "metadata": metadata, "config": {}});
    Ok(json_response(StatusCode::OK, body.to_string()))
}

/// The answer again that an earlier request got, whose outcome names this metadata.
pub async fn again(rest: &Rest, location: &str, deadline: Instant) -> Result<Response> {
    let metadata = read(rest, location, deadline).await.map_err(RestError::of_a_read)?;
    loaded(location, &metadata).map_err(|e| RestError { kind: kind::INTERNAL, ..e })
}
