//! Procedures as operators see them, and what they may have done about them.

use std::sync::Arc;

use axum::extract::Path;
use lake_client::catalog::{Catalog, TableIdent};
use lake_client::procedures::calls::{self, Asked, Clear};
use lake_client::procedures::purge_warehouse::of_warehouse;
use lake_client::procedures::upkeep::{What, of_table};
use lake_client::procedures::{Procedure, Record};
use lake_client::store::ReadOptions;
use lake_client::warehouse::{Holdings, WarehouseError};
use serde::Serialize;

use super::{Allowed, Answer, Json, Refused};
use crate::peer::procedures::kinds;

#[derive(Serialize)]
pub(super) struct Listed {
    id: String,
    mod_revision: u64,
    #[serde(flatten)]
    record: Record,
}

impl From<Procedure> for Listed {
    fn from(procedure: Procedure) -> Self {
        let Procedure { id, mod_revision, record } = procedure;
        Self { id, mod_revision, record }
    }
}

#[derive(Serialize)]
pub(super) struct Procedures {
    revision: u64,
    procedures: Vec<Listed>,
}

pub(super) async fn procedures(allowed: Allowed) -> Answer<Procedures> {
    let read = calls::list(&allowed.store(), ReadOptions::default(), allowed.call.deadline).await?;
    let shown = read.value.into_iter().filter(|p| !allowed.active || !p.record.state.is_ended());
    Ok(Json(Procedures { revision: read.revision, procedures: shown.map(Listed::from).collect() }))
}

async fn found(allowed: &Allowed, id: &str) -> Result<Procedure, Refused> {
    let found = calls::get(&allowed.store(), id, allowed.call.deadline).await?;
    found.ok_or_else(|| Refused::not_found(format!("there is no procedure {id:?}, or none any more")))
}

pub(super) async fn procedure(allowed: Allowed, Path(id): Path<String>) -> Answer<Listed> {
    Ok(Json(found(&allowed, &id).await?.into()))
}

#[derive(Serialize)]
pub(super) struct Started {
    dry_run: bool,
    id: String,
    /// None: it was not submitted, because this was a dry run.
    procedure: Option<Listed>,
    /// How much would go.
    #[serde(skip_serializing_if = "Option::is_none")]
    would_drop: Option<Holdings>,
}

pub(super) async fn start(
    allowed: Allowed,
    Path((what, namespace, table)): Path<(String, String, String)>,
) -> Answer<Started> {
    let known = What::ALL.map(What::as_str).join(", ");
    let what = What::named(&what).ok_or_else(|| Refused::invalid(format!("{what:?} is none of {known}")))?;
    let table = TableIdent::new(namespace.parse()?, table)?;
    let (deadline, dry_run) = (allowed.call.deadline, allowed.dry_run);
    let pointer = Catalog::new(Arc::new(allowed.store())).load_table(&table, deadline).await?;
    let pointer = pointer.ok_or_else(|| Refused::not_found(format!("there is no table {table}")))?;
    let (id, record) = of_table(what, &table, pointer.value.uuid, calls::unix_ms());
    if dry_run {
        return Ok(Json(Started { dry_run, id, procedure: None, would_drop: None }));
    }
    calls::submit(&allowed.leading_store().await?, &id, &record, deadline).await?;
    let procedure = Some(found(&allowed, &id).await?.into());
    Ok(Json(Started { dry_run, id, procedure, would_drop: None }))
}

pub(super) async fn purge_warehouse(allowed: Allowed, Path(name): Path<String>) -> Answer<Started> {
    let (deadline, dry_run) = (allowed.call.deadline, allowed.dry_run);
    let refused = |error: WarehouseError| -> Refused {
        match error {
            WarehouseError::Catalog(error) => error.into(),
            error => Refused::invalid(error.to_string()),
        }
    };
    let catalog = Catalog::new(Arc::new(allowed.store()));
    let known = catalog.warehouses(deadline).await?;
    if !known.profiles.contains_key(&name) {
        return Err(Refused::not_found(format!("there is no warehouse {name:?}")));
    }
    if dry_run {
        let (id, _) = of_warehouse(&name, known.mod_revision, calls::unix_ms())?;
        let would_drop = Some(catalog.holdings(&name, deadline).await.map_err(refused)?);
        return Ok(Json(Started { dry_run, id, procedure: None, would_drop }));
    }
    let catalog = Catalog::new(Arc::new(allowed.leading_store().await?));
    let id = catalog.submit_warehouse_purge(&name, calls::unix_ms(), deadline).await.map_err(refused)?;
    let procedure = Some(found(&allowed, &id).await?.into());
    Ok(Json(Started { dry_run, id, procedure, would_drop: None }))
}

/// What was, or would be, asked for.
#[derive(Serialize)]
pub(super) struct Change {
    dry_run: bool,
    /// Whether it is asked for, or would be; that it is cancelled then is the leader's to say, in its state and its note.
    accepted: bool,
    /// What would come of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    would: Option<String>,
    procedure: Listed,
}

impl Change {
    fn of(asked: Asked, id: &str) -> Result<Self, Refused> {
        let (accepted, procedure) = match asked {
            Asked::Now(procedure) => (true, procedure),
            Asked::NotNow(procedure) => (false, procedure),
            Asked::NotFound => {
                return Err(Refused::not_found(format!("there is no procedure {id:?}, or none any more")));
            }
        };
        Ok(Self { dry_run: false, accepted, would: None, procedure: (*procedure).into() })
    }
}

pub(super) async fn cancel(allowed: Allowed, Path(id): Path<String>) -> Answer<Change> {
    if !allowed.dry_run {
        let asked = calls::cancel(&allowed.leading_store().await?, &id, allowed.call.deadline).await?;
        return Ok(Json(Change::of(asked, &id)?));
    }
    let procedure = found(&allowed, &id).await?;
    let (accepted, would) = kinds::would_cancel(&procedure.record);
    Ok(Json(Change { dry_run: true, accepted, would: Some(would), procedure: procedure.into() }))
}

pub(super) async fn clear(allowed: Allowed, Path((id, how)): Path<(String, String)>) -> Answer<Change> {
    let how = match how.as_str() {
        "retry" => Clear::Retry,
        "give-up" => Clear::GiveUp,
        other => {
            return Err(Refused::invalid(format!(
                "a poisoned procedure is cleared by retry or give-up, not {other:?}"
            )));
        }
    };
    if !allowed.dry_run {
        let asked = calls::clear(&allowed.leading_store().await?, &id, how, allowed.call.deadline).await?;
        return Ok(Json(Change::of(asked, &id)?));
    }
    let procedure = found(&allowed, &id).await?;
    let (accepted, would) = kinds::would_clear(&procedure.record, how);
    Ok(Json(Change { dry_run: true, accepted, would: Some(would), procedure: procedure.into() }))
}
