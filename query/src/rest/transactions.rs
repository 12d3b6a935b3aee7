//! Commits to several tables at once: all of them are made, or none, in one transaction of the metadata.
//!
//! Each attempt builds on the tables as they are at one revision; a lost race is tried again there, as with one table
//! ([`super::commit`]). After an attempt without an answer, any of its tables tells what became of all of them.

use std::sync::Arc;
use std::time::Instant;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use iceberg::spec::{MetadataLog, TableMetadata};
use lake_client::catalog::{CatalogError, TableChange, TableIdent, TablePointer, Versioned};
use lake_client::store::Applied;
use lake_proto::kv::Compare;
use serde_json::Value;

use super::commit::{self, Backoff, Doubt, Verdict, await_turn, no_such_table, verdict};
use super::error::{RestError, Result, kind};
use super::evolve::{Change, Evolved};
use super::request::{Call, part};
use super::tables;
use super::{Rest, answered};
use crate::error::Kind;
use crate::table::commit::remove_expired;
use crate::table::version;

/// Most tables of one transaction.
const MAX_TABLES: usize = 100;

/// One table's part of an attempt.
struct Made {
    change: TableChange,
    metadata: Arc<TableMetadata>,
    bytes: usize,
    base_location: Option<String>,
    expired: Vec<MetadataLog>,
    /// What must hold besides.
    guards: Vec<Compare>,
}

pub async fn commit(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Value = call.json()?;
    let Some(list) = body.get("table-changes").and_then(Value::as_array) else {
        return Err(RestError::bad("table-changes", "a list is needed"));
    };
    if list.len() > MAX_TABLES {
        return Err(RestError::bad("table-changes", format!("{} tables; at most {MAX_TABLES}", list.len())));
    }
    let mut changes: Vec<(TableIdent, Change)> = Vec::new();
    for (i, entry) in list.iter().enumerate() {
        let field = format!("table-changes[{i}]");
        let at = |e: RestError| RestError { message: format!("{field}.{}", e.message), ..e };
        let named = entry.get("identifier").cloned().unwrap_or_default();
        let named = part(named, "identifier").and_then(|named| call.identifier(named, "identifier")).map_err(at)?;
        if changes.iter().any(|(other, _)| *other == named) {
            return Err(RestError::bad(&field, format!("table {named} is changed twice")));
        }
        changes.push((named, Change::parse(entry).map_err(at)?));
    }
    if let [(ident, change)] = changes.as_slice() {
        return match change.creates() {
            true => tables::create_by_commit(rest, call, ident, change, StatusCode::NO_CONTENT).await.map(drop),
            false => commit::commit(rest, call, ident, change, StatusCode::NO_CONTENT).await.map(drop),
        }
        .map(|()| StatusCode::NO_CONTENT.into_response());
    }
    let idents: Vec<TableIdent> = changes.iter().map(|(ident, _)| ident.clone()).collect();
    for ident in &idents {
        rest.give_up(call.client, ident, call.deadline).await;
    }
    // Attempts without an answer: which table tells of each, and what was written for it.
    let mut doubts: Vec<(usize, Doubt, Vec<String>)> = Vec::new();
    let mut backoff = Backoff::default();
    loop {
        let read = rest.tables.metadata.read_tables(&idents, call.deadline).await;
        let current = read.map_err(|e| ended(!doubts.is_empty(), e.into()))?;
        let mut open = Vec::new();
        for (i, doubt, written) in std::mem::take(&mut doubts) {
            match settled(rest, current[i].as_ref(), &doubt, call.deadline).await {
                Verdict::Done => return Ok(StatusCode::NO_CONTENT.into_response()),
                Verdict::Open => open.push((i, doubt, written)),
                Verdict::Never => rest.tables.storage.discard(&written).await,
                Verdict::Untold => return Err(ended(true, RestError::lost("others have committed since"))),
            }
        }
        doubts = open;
        let now = current.clone();
        let made = match attempt(rest, call, &changes, current).await {
            Ok(made) => made,
            Err(error) if error.kind == kind::COMMIT_FAILED && were_made(rest, &changes, &now, call.deadline).await => {
                rest.leave_done(call, StatusCode::NO_CONTENT, None).await?;
                return Ok(StatusCode::NO_CONTENT.into_response());
            }
            Err(error) => return Err(ended(!doubts.is_empty(), error)),
        };
        if made.is_empty() {
            rest.leave_done(call, StatusCode::NO_CONTENT, None).await?;
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
        let written: Vec<String> = made.iter().map(|made| made.change.new.metadata_location.clone()).collect();
        let parts: Vec<TableChange> = made.iter().map(|made| made.change.clone()).collect();
        let guards = made.iter().flat_map(|made| made.guards.iter().cloned()).collect();
        let writer = rest.writer(call, StatusCode::NO_CONTENT, None)?.guarded(guards);
        let error = match writer.change_tables(&parts, call.deadline).await {
            Ok(_) => {
                for made in made {
                    let location = &made.change.new.metadata_location;
                    rest.tables.cache.put_table(location, made.metadata.clone(), made.bytes).await;
                    remove_expired(&rest.tables, &made.metadata, made.expired);
                }
                return Ok(StatusCode::NO_CONTENT.into_response());
            }
            Err(error) => error,
        };
        let unknown = error.applied() == Applied::Unknown;
        match unknown {
            true => {
                // One that was there before tells best.
                let i = made.iter().position(|made| made.change.expected.is_some()).unwrap_or(0);
                let one = &made[i];
                let open = Doubt {
                    expected: one.change.expected.unwrap_or(0),
                    base_location: one.base_location.clone().unwrap_or_default(),
                    location: one.change.new.metadata_location.clone(),
                };
                let of = idents.iter().position(|ident| *ident == one.change.table).unwrap_or(0);
                doubts.push((of, open, written));
            }
            false => rest.tables.storage.discard(&written).await,
        }
        match error {
            CatalogError::Conflict { .. } => {
                backoff.pause(call.deadline).await.map_err(|e| ended(!doubts.is_empty(), e))?
            }
            CatalogError::NotYourTurn { table, turn, .. } => {
                let uuid = made.iter().find(|made| made.change.table == table).map(|made| made.change.new.uuid);
                let waited = await_turn(&rest.tables, uuid.unwrap_or_default(), turn, call.deadline).await;
                waited.map_err(|e| ended(!doubts.is_empty(), e))?;
            }
            // Perhaps by an attempt of this very commit that is in doubt.
            error @ CatalogError::AlreadyDone(_) => return Err(error.into()),
            _ if unknown && Instant::now() < call.deadline => {}
            error => return Err(ended(!doubts.is_empty(), error.into())),
        }
    }
}

/// Whether this very commit was made before, and is sent again by something that got no answer: each table that would tell says so,
/// and one does.
async fn were_made(
    rest: &Rest,
    changes: &[(TableIdent, Change)],
    current: &[Option<Versioned<TablePointer>>],
    deadline: Instant,
) -> bool {
    let mut tells = false;
    for ((_, change), current) in changes.iter().zip(current) {
        if !change.tells() {
            continue;
        }
        let Some(current) = current else { return false };
        let metadata = answered(deadline, rest.tables.cache.table(&current.value.metadata_location)).await;
        if !metadata.is_ok_and(|metadata| change.is_made(&metadata)) {
            return false;
        }
        tells = true;
    }
    tells
}

/// The error that ends the commit, with what is known of its outcome.
fn ended(in_doubt: bool, error: RestError) -> RestError {
    match in_doubt {
        false => error,
        true => RestError::unknown(format!(
            "committing to several tables: an answer of the metadata was lost, and then: {}; whether it was committed is \
             unknown: look before doing it again",
            error.message
        )),
    }
}

async fn settled(rest: &Rest, current: Option<&Versioned<TablePointer>>, doubt: &Doubt, deadline: Instant) -> Verdict {
    let Some(current) = current else {
        // One that was to be created is not there yet; one that was there is gone, and what was done to it before is not told.
        return if doubt.expected == 0 { Verdict::Open } else { Verdict::Untold };
    };
    match answered(deadline, rest.tables.cache.table(&current.value.metadata_location)).await {
        Ok(metadata) => verdict(current, &metadata, doubt),
        Err(_) => Verdict::Untold,
    }
}

/// Writes what each table becomes of what it is now.
async fn attempt(
    rest: &Rest,
    call: &Call,
    changes: &[(TableIdent, Change)],
    current: Vec<Option<Versioned<TablePointer>>>,
) -> Result<Vec<Made>> {
    let mut made: Vec<Made> = Vec::new();
    for ((ident, change), current) in changes.iter().zip(current) {
        match one(rest, call, ident, change, current).await {
            Ok(Some(one)) => made.push(one),
            Ok(None) => {}
            Err(error) => {
                let written: Vec<String> = made.into_iter().map(|made| made.change.new.metadata_location).collect();
                rest.tables.storage.discard(&written).await;
                return Err(error);
            }
        }
    }
    Ok(made)
}

async fn one(
    rest: &Rest,
    call: &Call,
    ident: &TableIdent,
    change: &Change,
    current: Option<Versioned<TablePointer>>,
) -> Result<Option<Made>> {
    let base = match &current {
        None => None,
        Some(current) => match answered(call.deadline, rest.tables.cache.table(&current.value.metadata_location)).await
        {
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind == Kind::NotFound => {
                return Err(RestError::lost(format!("table {ident} was changed by others meanwhile")));
            }
            Err(error) => return Err(RestError::of_a_change(error)),
        },
    };
    if !change.creates() && base.is_none() {
        return Err(no_such_table(ident));
    }
    change.check(base.as_deref())?;
    let mut guards = Vec::new();
    let (metadata, expired) = match (&base, &current) {
        (Some(base), Some(current)) => match change.apply(base, &current.value.metadata_location)? {
            Evolved::Unchanged => return Ok(None),
            Evolved::Next(next) => {
                rest.check(&next.metadata, Some(base), call.deadline).await?;
                (next.metadata, next.expired)
            }
        },
        _ => {
            let place = rest.tables.new_place(ident, call.deadline).await.map_err(RestError::of_a_change)?;
            let metadata = change.found(|uuid| place.of(uuid))?;
            rest.check(&metadata, None, call.deadline).await?;
            let unpurged = rest.tables.check_not_purged(metadata.uuid(), call.deadline).await;
            guards = unpurged.map_err(RestError::of_a_change)?;
            (metadata, Vec::new())
        }
    };
    let base_location = current.as_ref().map(|current| current.value.metadata_location.clone());
    let location = version::metadata_location(metadata.location(), base_location.as_deref());
    let json = version::to_json(&metadata).map_err(RestError::of_a_change)?;
    let bytes = json.len();
    let written = answered(call.deadline, rest.tables.storage.write_new(&location, json.into())).await;
    written.map_err(RestError::of_a_change)?;
    let uuid = current.as_ref().map_or(metadata.uuid(), |current| current.value.uuid);
    let new = TablePointer { uuid, metadata_location: location, previous_location: base_location.clone() };
    let change = TableChange { table: ident.clone(), expected: current.map(|current| current.mod_revision), new };
    Ok(Some(Made { change, metadata: Arc::new(metadata), bytes, base_location, expired, guards }))
}
