//! Tables.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use iceberg::TableCreation;
use iceberg::spec::{FormatVersion, Schema, SortOrder, TableMetadata, TableMetadataBuilder, UnboundPartitionSpec};
use lake_client::catalog::{CatalogError, TableIdent, TablePointer};
use lake_client::procedures;
use lake_client::store::Applied;
use lake_proto::kv::Compare;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::commit::{self, no_such_table};
use super::error::{RestError, Result, json_response, kind, unless_made};
use super::evolve::{Change, refused, unpanicked};
use super::request::{Call, Identifier, part, table_of};
use super::{Rest, answered};
use crate::error::Kind;
use crate::outcomes;
use crate::table::commit::unsubmitted;
use crate::table::warehouses::Place;
use crate::table::{new_table_properties, sound, version};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Create {
    name: String,
    location: Option<String>,
    schema: Value,
    partition_spec: Option<Value>,
    write_order: Option<Value>,
    stage_create: Option<bool>,
    properties: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Register {
    name: String,
    metadata_location: String,
    overwrite: Option<bool>,
}

/// What every request names that makes a table.
#[derive(Debug, Deserialize)]
struct Named {
    name: String,
}

#[derive(Debug, Deserialize)]
struct Rename {
    source: Identifier,
    destination: Identifier,
}

pub async fn list(rest: &Rest, call: &Call) -> Result<Response> {
    let namespace = call.namespace()?;
    let names = rest.tables.metadata.list_tables(&namespace, call.deadline).await?;
    call.identifiers(&namespace, names)
}

/// Creates a table, or says what one would be that the client creates with its first commit.
pub async fn create(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Create = call.json()?;
    let ident = table_of(call.namespace()?, body.name.clone(), "name")?;
    let place = rest.tables.new_place(&ident, call.deadline).await.map_err(RestError::of_a_change)?;
    let metadata = plan(&ident, &place, &body)?;
    rest.check(&metadata, None, call.deadline).await?;
    if body.stage_create == Some(true) {
        if !rest.tables.metadata.namespace_exists(&ident.namespace, call.deadline).await? {
            return Err(CatalogError::NamespaceNotFound(ident.namespace).into());
        }
        if rest.tables.metadata.read_table(&ident, call.deadline).await?.is_some() {
            return Err(CatalogError::TableExists(ident).into());
        }
        if rest.tables.metadata.load_view(&ident, call.deadline).await?.is_some() {
            return Err(CatalogError::ViewExists(ident).into());
        }
        // Some clients write into directories that they expect to be there.
        let dir = format!("{}/metadata", metadata.location());
        answered(call.deadline, rest.tables.storage.prepare_directory(&dir)).await.map_err(RestError::of_a_change)?;
        return loaded(rest, call, None, &metadata, Snapshots::All);
    }
    publish(rest, &ident, metadata, Vec::new(), call, StatusCode::OK).await
}

/// The first version of a table that a client asks for.
fn plan(ident: &TableIdent, place: &Place, body: &Create) -> Result<TableMetadata> {
    let uuid = Uuid::new_v4();
    let location = place.of(uuid);
    if let Some(asked) = &body.location {
        return Err(no_location(asked));
    }
    let mut properties = new_table_properties();
    properties.extend(body.properties.iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
    let format_version = match properties.remove("format-version").as_deref() {
        None | Some("2") => FormatVersion::V2,
        Some("1") => FormatVersion::V1,
        Some("3") => FormatVersion::V3,
        Some(other) => return Err(RestError::bad("properties.format-version", format!("there is no version {other}"))),
    };
    let schema: Schema = part(body.schema.clone(), "schema")?;
    let spec: Option<UnboundPartitionSpec> =
        body.partition_spec.clone().map(|spec| part(spec, "partition-spec")).transpose()?;
    let order: Option<SortOrder> = body.write_order.clone().map(|order| part(order, "write-order")).transpose()?;
    sound::check_schema("schema", &schema).map_err(RestError::of_a_change)?;
    if let Some(spec) = &spec {
        sound::check_spec("partition-spec", spec, &[&schema]).map_err(RestError::of_a_change)?;
    }
    if let Some(order) = &order {
        sound::check_order("write-order", order, &[&schema]).map_err(RestError::of_a_change)?;
    }
    let creation = TableCreation::builder()
        .name(ident.name.clone())
        .location(location)
        .schema(schema)
        .partition_spec_opt(spec)
        .sort_order_opt(order)
        .properties(properties)
        .format_version(format_version)
        .build();
    let built = unpanicked("schema, partition-spec or write-order", || {
        TableMetadataBuilder::from_table_creation(creation)?.assign_uuid(uuid).build()
    })?;
    built.map(|built| built.metadata).map_err(|e| refused("schema, partition-spec or write-order", &e))
}

/// The answer to who asks for a place.
pub fn no_location(asked: &str) -> RestError {
    RestError::bad(
        "location",
        format!("{asked} was asked for, and the catalog chooses where things live: leave it out"),
    )
}

/// Makes a new table's first version current, if the guards hold. The answer has this status; where that is OK, it holds the table.
async fn publish(
    rest: &Rest,
    ident: &TableIdent,
    metadata: TableMetadata,
    guards: Vec<Compare>,
    call: &Call,
    status: StatusCode,
) -> Result<Response> {
    let uuid = metadata.uuid();
    let location = version::metadata_location(metadata.location(), None);
    let json = Bytes::from(version::to_json(&metadata).map_err(RestError::of_a_change)?);
    let written = answered(call.deadline, rest.tables.storage.write_new(&location, json.clone())).await;
    written.map_err(RestError::of_a_change)?;
    let new = TablePointer { uuid, metadata_location: location.clone(), previous_location: None };
    let kept = (status == StatusCode::OK).then_some(location.as_str());
    let writer = rest.writer(call, status, kept)?.guarded(guards);
    let mut created = writer.create_table(ident, &new, call.deadline).await;
    if matches!(&created, Err(e) if e.applied() == Applied::Unknown)
        && let Ok(Some(there)) = rest.tables.metadata.read_table(ident, call.deadline).await
        && there.value.uuid == uuid
    {
        // The uuid is this table's alone. While there is none, the lost attempt may still be on its way; if another one is there, this
        // one may have been renamed.
        created = Ok(there);
    }
    match created {
        Ok(_) => {
            let metadata = Arc::new(metadata);
            rest.tables.cache.put_table(&location, metadata.clone(), json.len()).await;
            rest.rendered.keep(&location, json);
            match kept {
                Some(location) => loaded(rest, call, Some(location), &metadata, Snapshots::All),
                None => Ok(status.into_response()),
            }
        }
        Err(error) => {
            if error.applied() == Applied::No {
                rest.tables.storage.discard(&[location]).await;
            }
            Err(error.into())
        }
    }
}

/// The answer again that an earlier request got, whose outcome names this metadata. Where that was removed since, as those of old
/// versions are, it is the table as it is now.
pub async fn again(rest: &Rest, call: &Call, key: Uuid, location: &str) -> Result<Response> {
    let error = match answered(call.deadline, rest.tables.cache.table(location)).await {
        Ok(metadata) => return loaded(rest, call, Some(location), &metadata, Snapshots::All),
        Err(error) if error.kind == Kind::NotFound => error,
        Err(error) => return Err(RestError::of_a_read(error)),
    };
    let ident = match call.captures.get("table") {
        "" => table_of(call.namespace()?, call.json::<Named>()?.name, "name")?,
        _ => call.table()?,
    };
    let now = match rest.tables.metadata.read_table(&ident, call.deadline).await? {
        Some(pointer) => {
            let loaded = answered(call.deadline, rest.tables.load_version(&ident, pointer, call.deadline)).await;
            loaded.map_err(RestError::of_a_read)?
        }
        None => None,
    };
    // Its name may be another table's by now.
    let directory = |location: &str| location.rsplit_once('/').map(|(directory, _)| directory.to_owned());
    let now = now.filter(|now| directory(&now.pointer.value.metadata_location) == directory(location));
    match now {
        Some(now) => loaded(rest, call, Some(&now.pointer.value.metadata_location), &now.metadata, Snapshots::All),
        None => Err(RestError::not_found(
            kind::NO_SUCH_TABLE,
            format!("request {key} was made, and table {ident} has been dropped, renamed or replaced since: {error}"),
        )),
    }
}

pub async fn load(rest: &Rest, call: &Call) -> Result<Response> {
    let ident = call.table()?;
    let snapshots = match call.parameter("snapshots") {
        None | Some("all") => Snapshots::All,
        Some("refs") => Snapshots::Refs,
        Some(other) => return Err(RestError::bad("snapshots", format!("{other:?} is neither all nor refs"))),
    };
    rest.come_back(call.client, &ident, call.deadline).await;
    let pointer = rest.pointer(&ident, call.deadline).await?.ok_or_else(|| no_such_table(&ident))?;
    let known = call.headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let tag = entity_tag(&pointer.value.metadata_location, snapshots);
    if known.flat_map(|tags| tags.split(',')).any(|one| one.trim().trim_start_matches("W/") == tag) {
        return with_tag(StatusCode::NOT_MODIFIED.into_response(), &tag);
    }
    let table = answered(call.deadline, rest.tables.load_version(&ident, pointer, call.deadline)).await;
    let table = table.map_err(RestError::of_a_read)?.ok_or_else(|| no_such_table(&ident))?;
    loaded(rest, call, Some(&table.pointer.value.metadata_location), &table.metadata, snapshots)
}

pub async fn exists(rest: &Rest, call: &Call) -> Result<Response> {
    let ident = call.table()?;
    match rest.pointer(&ident, call.deadline).await? {
        Some(_) => Ok(StatusCode::NO_CONTENT.into_response()),
        None => Err(no_such_table(&ident)),
    }
}

pub async fn commit(rest: &Rest, call: &Call) -> Result<Response> {
    let ident = call.table()?;
    let body: Value = call.json()?;
    call.names(&body, &ident)?;
    let change = Change::parse(&body)?;
    if change.creates() {
        return create_by_commit(rest, call, &ident, &change, StatusCode::OK).await;
    }
    let made = commit::commit(rest, call, &ident, &change, StatusCode::OK).await?;
    loaded(rest, call, Some(&made.location), &made.metadata, Snapshots::All)
}

/// Creates a table by a commit whose requirement is that there is none.
pub async fn create_by_commit(
    rest: &Rest,
    call: &Call,
    ident: &TableIdent,
    change: &Change,
    status: StatusCode,
) -> Result<Response> {
    let there = match rest.tables.metadata.read_table(ident, call.deadline).await? {
        Some(pointer) => answered(call.deadline, rest.tables.load_version(ident, pointer, call.deadline)).await,
        None => Ok(None),
    };
    let there = there.map_err(RestError::of_a_change)?;
    if let Some(there) = there.as_ref().filter(|there| change.is_made(&there.metadata)) {
        let location = Some(there.pointer.value.metadata_location.as_str()).filter(|_| status == StatusCode::OK);
        rest.leave_done(call, status, location).await?;
        return match location {
            Some(_) => loaded(rest, call, location, &there.metadata, Snapshots::All),
            None => Ok(status.into_response()),
        };
    }
    change.check(there.as_ref().map(|table| &*table.metadata))?;
    let place = rest.tables.new_place(ident, call.deadline).await.map_err(RestError::of_a_change)?;
    let metadata = change.found(|uuid| place.of(uuid))?;
    rest.check(&metadata, None, call.deadline).await?;
    let uuid = metadata.uuid();
    let check = || rest.tables.check_not_purged(uuid, call.deadline);
    let unpurged = check().await.map_err(RestError::of_a_change)?;
    match publish(rest, ident, metadata, unpurged, call, status).await {
        Err(error) if error.kind == kind::ALREADY_EXISTS => Err(RestError::lost(error.message)),
        Err(error) if error.kind == kind::COMMIT_FAILED => {
            check().await.map_err(RestError::of_a_change)?;
            Err(error)
        }
        outcome => outcome,
    }
}

/// Makes a table of metadata that is there already, and that no other table has.
pub async fn register(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Register = call.json()?;
    let ident = table_of(call.namespace()?, body.name, "name")?;
    let location = body.metadata_location;
    let deadline = call.deadline;
    rest.allowed("metadata-location", &location, deadline).await?;
    let metadata = answered(deadline, rest.tables.cache.table(&location)).await;
    let metadata = metadata.map_err(|e| match e.kind {
        Kind::NotFound | Kind::Corrupt | Kind::Invalid => RestError::bad("metadata-location", e),
        _ => RestError::of_a_change(e),
    })?;
    rest.allowed("the table's location", metadata.location(), deadline).await?;
    rest.check(&metadata, None, deadline).await?;
    let check = || rest.tables.check_not_purged(metadata.uuid(), deadline);
    let unpurged = check().await.map_err(RestError::of_a_change)?;
    let new = TablePointer { uuid: metadata.uuid(), metadata_location: location, previous_location: None };
    let there = rest.tables.metadata.read_table(&ident, deadline).await?;
    let expected = match there {
        None => None,
        Some(there) if body.overwrite == Some(true) => Some(there.mod_revision),
        Some(_) => return Err(CatalogError::TableExists(ident).into()),
    };
    let writer = rest.writer(call, StatusCode::OK, Some(&new.metadata_location))?.guarded(unpurged);
    let registered = writer.register_table(&ident, &new, expected, deadline).await;
    if let Err(CatalogError::Fenced { resent: false }) = registered {
        check().await.map_err(RestError::of_a_change)?;
    }
    let pointer = registered?;
    if pointer.value != new {
        return Err(CatalogError::TableExists(ident).into());
    }
    loaded(rest, call, Some(&pointer.value.metadata_location), &metadata, Snapshots::All)
}

pub async fn rename(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Rename = call.json()?;
    let (from, to) = (call.identifier(body.source, "source")?, call.identifier(body.destination, "destination")?);
    let before = rest.tables.metadata.read_table(&from, call.deadline).await?;
    let renamed = rest.writer(call, StatusCode::NO_CONTENT, None)?.rename_table(&from, &to, call.deadline).await;
    let made = async {
        let there = rest.tables.metadata.read_table(&to, call.deadline).await.ok().flatten();
        before.zip(there).is_some_and(|(before, there)| before.value.uuid == there.value.uuid)
    };
    unless_made(renamed, made).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub async fn drop(rest: &Rest, call: &Call) -> Result<Response> {
    let ident = call.table()?;
    let purge = call.parameter("purgeRequested").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let writer = rest.writer(call, StatusCode::NO_CONTENT, None)?;
    let now_ms = outcomes::now_ms();
    let mut in_doubt = None;
    loop {
        let current = rest.tables.metadata.read_table(&ident, call.deadline).await;
        let current = current.map_err(|e| match in_doubt {
            Some(_) => RestError::unknown(format!("dropping table {ident}: {e}; whether it was dropped is unknown")),
            None => e.into(),
        })?;
        let Some(current) = current.filter(|current| in_doubt.is_none_or(|uuid| uuid == current.value.uuid)) else {
            return match in_doubt {
                // Our own attempt, or another's drop, did it.
                Some(uuid) => {
                    let dropped = rest.tables.check_dropped(&ident, uuid, purge, call.deadline).await;
                    dropped.map(|()| StatusCode::NO_CONTENT.into_response()).map_err(|e| match e.kind {
                        Kind::NotFound => RestError::not_found(kind::NO_SUCH_TABLE, e.message),
                        _ => RestError::of_a_change(e),
                    })
                }
                None => Err(no_such_table(&ident)),
            };
        };
        let (writer, submitted) = match purge {
            false => (writer.clone(), None),
            true => {
                let (writer, submitted) = writer.purging(&ident, &current, now_ms);
                (writer, Some(submitted))
            }
        };
        let error = match writer.drop_table(&ident, current.mod_revision, call.deadline).await {
            Ok(_) => {
                if purge {
                    let submitted = writer.purge_dropped(&ident, &current, now_ms, call.deadline).await;
                    submitted.map_err(|e| RestError::of_a_change(unsubmitted(&ident, &e)))?;
                }
                return Ok(StatusCode::NO_CONTENT.into_response());
            }
            // The submission of an attempt of ours, which was made after all.
            Err(CatalogError::AlreadyDone(left)) if submitted.as_ref() == Some(&left) => {
                return Ok(StatusCode::NO_CONTENT.into_response());
            }
            // Another's purge of this very version: the table is gone.
            Err(CatalogError::AlreadyDone(left)) if submitted.is_some() && procedures::is_record(&left) => {
                CatalogError::TableNotFound(ident.clone())
            }
            Err(error) => error,
        };
        if error.applied() == Applied::Unknown {
            in_doubt = Some(current.value.uuid);
        }
        let is_over = Instant::now() >= call.deadline;
        match error {
            error if is_over && in_doubt.is_some() => {
                return Err(RestError::unknown(format!(
                    "dropping table {ident}: {error}; whether it was dropped is unknown"
                )));
            }
            CatalogError::Conflict { .. } | CatalogError::TableNotFound(_) if !is_over => {}
            error if in_doubt.is_none() => return Err(error.into()),
            _ => {}
        }
    }
}

/// The keys to a table's objects, for a client that has none of its own.
pub async fn credentials(rest: &Rest, call: &Call) -> Result<Response> {
    let ident = call.table()?;
    if !rest.lends {
        return Err(RestError::unsupported("this node lends no keys (rest_lend_credentials): use your own"));
    }
    let pointer = rest.pointer(&ident, call.deadline).await?.ok_or_else(|| no_such_table(&ident))?;
    let table = answered(call.deadline, rest.tables.load_version(&ident, pointer, call.deadline)).await;
    let table = table.map_err(RestError::of_a_read)?.ok_or_else(|| no_such_table(&ident))?;
    let lent = lent(rest, table.metadata.location())?;
    Ok(json_response(StatusCode::OK, json!({"storage-credentials": lent}).to_string()))
}

fn asks_for_credentials(call: &Call) -> bool {
    let asked = call.headers.get_all("x-iceberg-access-delegation").iter().filter_map(|value| value.to_str().ok());
    asked.flat_map(|ways| ways.split(',')).any(|way| way.trim().eq_ignore_ascii_case("vended-credentials"))
}

/// What is lent for the objects at a location: nothing where the node itself has no keys.
fn lent(rest: &Rest, location: &str) -> Result<Value> {
    let storage = &rest.tables.storage;
    let Some((access, secret)) = storage.keys(location).map_err(RestError::of_a_read)? else { return Ok(json!([])) };
    let mut config = storage.client_config(location);
    config.insert("s3.access-key-id".to_owned(), access.expose().to_owned());
    config.insert("s3.secret-access-key".to_owned(), secret.expose().to_owned());
    Ok(json!([{"prefix": location, "config": config}]))
}

/// What a client tells of its scans and commits. Nothing is done with it yet.
pub fn report_metrics(call: &Call) -> Result<Response> {
    call.table()?;
    call.json::<Value>()?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// What an answer has besides a table's metadata takes about this many bytes.
const ROOM_AROUND: usize = 1 << 10;

/// Which of a table's snapshots an answer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Snapshots {
    All,
    /// Those that branches and tags name.
    Refs,
}

/// The answer that holds a table.
fn loaded(
    rest: &Rest,
    call: &Call,
    location: Option<&str>,
    metadata: &TableMetadata,
    snapshots: Snapshots,
) -> Result<Response> {
    let failed = |e: serde_json::Error| RestError::of_a_read(crate::Error::internal(format!("writing JSON: {e}")));
    let json = match location {
        Some(location) => rest.rendered.json(location, metadata),
        None => version::to_json(metadata).map(Bytes::from),
    };
    let mut bytes = json.map_err(RestError::of_a_read)?;
    if snapshots == Snapshots::Refs {
        let mut json: Value = serde_json::from_slice(&bytes).map_err(failed)?;
        let named: HashSet<i64> = json["refs"]
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(_, reference)| reference["snapshot-id"].as_i64())
            .collect();
        if let Some(snapshots) = json.get_mut("snapshots").and_then(Value::as_array_mut) {
            snapshots.retain(|snapshot| snapshot["snapshot-id"].as_i64().is_some_and(|id| named.contains(&id)));
        }
        bytes = Bytes::from(serde_json::to_vec(&json).map_err(failed)?);
    }
    let mut body = Vec::with_capacity(bytes.len() + ROOM_AROUND);
    body.push(b'{');
    if let Some(location) = location {
        body.extend_from_slice(format!("\"metadata-location\":{},", Value::from(location)).as_bytes());
    }
    body.extend_from_slice(b"\"metadata\":");
    body.extend_from_slice(&bytes);
    let config = json!(rest.tables.storage.client_config(metadata.location()));
    body.extend_from_slice(format!(",\"config\":{config}").as_bytes());
    if rest.lends && asks_for_credentials(call) {
        // What is answered has been done: that keys cannot be had is told to who asks for them alone.
        match lent(rest, metadata.location()) {
            Ok(lent) => body.extend_from_slice(format!(",\"storage-credentials\":{lent}").as_bytes()),
            Err(error) => tracing::warn!(message = %error.message, "no keys can be lent"),
        }
    }
    body.push(b'}');
    let response = json_response(StatusCode::OK, body);
    match location {
        Some(location) => with_tag(response, &entity_tag(location, snapshots)),
        None => Ok(response),
    }
}

/// What tells one version of a table from another, as one kind of answer shows it.
fn entity_tag(location: &str, snapshots: Snapshots) -> String {
    let safe = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | ',' | '\\' | '%');
    let escaped: String =
        location.chars().map(|c| if safe(c) { c.to_string() } else { format!("%{:x}.", u32::from(c)) }).collect();
    let snapshots = if snapshots == Snapshots::All { "all" } else { "refs" };
    format!("\"{snapshots}:{escaped}\"")
}

fn with_tag(mut response: Response, tag: &str) -> Result<Response> {
    if let Ok(tag) = HeaderValue::from_str(tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_one_versions_and_one_kind_of_answers() {
        let tag = |location: &str| entity_tag(location, Snapshots::All);
        assert_eq!(tag("s3://b/t/metadata/1.json"), "\"all:s3://b/t/metadata/1.json\"");
        assert_ne!(tag("a,b"), tag("a%2c.b"));
        assert_ne!(tag("a"), entity_tag("a", Snapshots::Refs));
        for odd in ["a\"b", "ü\n", "a b"] {
            assert!(HeaderValue::from_str(&tag(odd)).is_ok());
        }
    }
}
