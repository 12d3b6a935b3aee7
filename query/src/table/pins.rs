//! The versions of tables and views that a query was planned on, so that it can be run on them later, and elsewhere.
//!
//! A version is the metadata that its pointer named. That object is removed once many newer versions have come; while the
//! table still has the snapshot, the version is then made of the newer metadata. A snapshot that has expired since, or a table
//! that was dropped, is an error that says so: nothing else is read in its place.

use std::sync::Arc;
use std::time::{Duration, Instant};

use iceberg::spec::{MAIN_BRANCH, SnapshotReference, SnapshotRetention, TableMetadata};
use lake_client::catalog::{Namespace, TableIdent, TablePointer, Versioned};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Table, Tables, catalog_error};
use crate::error::{Error, Kind, Result};

/// How long the metadata may take to say whether a version is gone.
const LOOK: Duration = Duration::from_secs(5);

/// The version of one table or view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    namespace: Vec<String>,
    name: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    view: bool,
    uuid: Uuid,
    location: String,
    revision: u64,
    /// Of a table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    snapshot: Option<i64>,
    #[serde(default)]
    schema: i32,
}

/// The versions that a query reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins(Vec<Pin>);

impl Pins {
    /// Adds the version of a table.
    pub fn add(&mut self, table: &Table) {
        self.0.push(Pin {
            snapshot: table.metadata.current_snapshot_id(),
            schema: table.metadata.current_schema_id(),
            ..pin(&table.ident, &table.pointer, false)
        });
    }

    /// Adds the version of a view.
    pub fn add_view(&mut self, view: &TableIdent, pointer: &Versioned<TablePointer>) {
        self.0.push(pin(view, pointer, true));
    }

    /// The version of a view, if there is one.
    pub fn view(&self, view: &TableIdent) -> Option<Versioned<TablePointer>> {
        self.find(view, true).map(Pin::pointer)
    }

    /// An error of a query on these versions: that one of them is gone, if it is and that may be the reason. The metadata of a
    /// version often outlives the files that are found by it.
    pub async fn explain(&self, tables: &Tables, error: Error) -> Error {
        if !matches!(error.kind, Kind::NotFound | Kind::Corrupt | Kind::Storage) {
            return error;
        }
        for pin in self.0.iter().filter(|pin| !pin.view) {
            if pin.is_gone(tables, Instant::now() + LOOK).await {
                return pin.gone();
            }
        }
        error
    }

    pub(super) fn table(&self, table: &TableIdent) -> Option<&Pin> {
        self.find(table, false)
    }

    fn find(&self, ident: &TableIdent, view: bool) -> Option<&Pin> {
        self.0.iter().find(|pin| {
            pin.view == view && pin.name == ident.name && pin.namespace.as_slice() == ident.namespace.levels()
        })
    }
}

fn pin(ident: &TableIdent, pointer: &Versioned<TablePointer>, view: bool) -> Pin {
    Pin {
        namespace: ident.namespace.levels().to_vec(),
        name: ident.name.clone(),
        view,
        uuid: pointer.value.uuid,
        location: pointer.value.metadata_location.clone(),
        revision: pointer.mod_revision,
        snapshot: None,
        schema: 0,
    }
}

impl Pin {
    fn ident(&self) -> Result<TableIdent> {
        let namespace = Namespace::new(self.namespace.iter().map(String::as_str));
        let ident = namespace.and_then(|namespace| TableIdent::new(namespace, self.name.as_str()));
        ident.map_err(|e| catalog_error("naming a table", e))
    }

    fn pointer(&self) -> Versioned<TablePointer> {
        let value = TablePointer { uuid: self.uuid, metadata_location: self.location.clone(), previous_location: None };
        Versioned { value, mod_revision: self.revision, valid_through: self.revision }
    }

    /// The version itself.
    ///
    /// # Errors
    /// `Conflict`: it is gone. Those of reading metadata.
    pub(super) async fn load(&self, tables: &Tables, deadline: Instant) -> Result<Table> {
        let (ident, pointer) = (self.ident()?, self.pointer());
        let loading = |e: Error| e.while_doing(format_args!("loading table {ident}"));
        tables.find_bucket(&self.location, deadline).await.map_err(loading)?;
        let metadata = match tables.cache.table(&self.location).await {
            Err(error) if error.kind == Kind::NotFound => {
                let current = tables.metadata.read_table(&ident, deadline).await;
                let current = current.map_err(|e| catalog_error("looking up a table", e))?;
                let current = current.filter(|current| current.value.uuid == self.uuid).ok_or_else(|| self.gone())?;
                let newer = tables.cache.table(&current.value.metadata_location).await.map_err(loading)?;
                Arc::new(self.within(&newer)?)
            }
            loaded => loaded.map_err(loading)?,
        };
        Ok(Table { ident, pointer, metadata })
    }

    /// The version as later metadata still has it.
    fn within(&self, newer: &TableMetadata) -> Result<TableMetadata> {
        let Some(snapshot_id) = self.snapshot.filter(|id| newer.snapshot_by_id(*id).is_some()) else {
            return Err(self.gone());
        };
        let retention =
            SnapshotRetention::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None, max_ref_age_ms: None };
        let then = newer
            .clone()
            .into_builder(None)
            .set_current_schema(self.schema)
            .and_then(|builder| builder.set_ref(MAIN_BRANCH, SnapshotReference { snapshot_id, retention }))
            .and_then(|builder| builder.build());
        then.map(|built| built.metadata).map_err(|_| self.gone())
    }

    /// Whether its table has it no longer. Where nobody can tell it is not said.
    async fn is_gone(&self, tables: &Tables, deadline: Instant) -> bool {
        let Ok(ident) = self.ident() else { return false };
        match tables.metadata.read_table(&ident, deadline).await {
            Ok(Some(current)) if current.value.uuid == self.uuid => {
                let newer = tables.cache.table(&current.value.metadata_location).await;
                let has = |newer: &TableMetadata| self.snapshot.is_none_or(|id| newer.snapshot_by_id(id).is_some());
                newer.is_ok_and(|newer| !has(&newer))
            }
            Ok(_) => true,
            Err(_) => false,
        }
    }

    fn gone(&self) -> Error {
        Error::conflict(format!(
            "the version of table {}.{} that the query was planned on is gone: it has expired, or the table was dropped; run the \
             query again",
            self.namespace.join("."),
            self.name
        ))
    }
}
