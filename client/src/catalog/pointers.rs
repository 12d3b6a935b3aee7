//! The pointers of tables and views: what one is, and reading them.

use std::collections::HashMap;
use std::time::Instant;

use lake_proto::kv::{KeyValue, Revision, TxnResult};
use lake_proto::limits::MAX_BATCH_GET_KEYS;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::error::Result;
use super::names::validate_name;
use super::{Catalog, CatalogError, Namespace, TableIdent};
use crate::store::{Error, Read, ReadOptions};

/// Where a table's current metadata is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TablePointer {
    pub uuid: Uuid,
    pub metadata_location: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_location: Option<String>,
}

/// A value with the revisions that say how current it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned<T> {
    pub value: T,
    /// What the next compare-and-set expects.
    pub mod_revision: Revision,
    /// The revision up to which the value is known to be current.
    pub valid_through: Revision,
}

/// What a name means. Tables and views of a namespace share its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Table,
    View,
}

impl Kind {
    pub fn key(self, ident: &TableIdent) -> String {
        match self {
            Kind::Table => ident.key(),
            Kind::View => ident.view_key(),
        }
    }

    pub fn prefix(self, namespace: &Namespace) -> String {
        match self {
            Kind::Table => namespace.table_prefix(),
            Kind::View => namespace.view_prefix(),
        }
    }

    pub fn other(self) -> Self {
        match self {
            Kind::Table => Kind::View,
            Kind::View => Kind::Table,
        }
    }

    pub fn exists(self, ident: &TableIdent) -> CatalogError {
        match self {
            Kind::Table => CatalogError::TableExists(ident.clone()),
            Kind::View => CatalogError::ViewExists(ident.clone()),
        }
    }

    pub fn missing(self, ident: &TableIdent) -> CatalogError {
        match self {
            Kind::Table => CatalogError::TableNotFound(ident.clone()),
            Kind::View => CatalogError::ViewNotFound(ident.clone()),
        }
    }
}

impl Catalog {
    /// The names of a namespace's tables, sorted.
    ///
    /// # Errors
    /// `NamespaceNotFound`, or the store's.
    pub async fn list_tables(&self, namespace: &Namespace, deadline: Instant) -> Result<Vec<String>> {
        self.names(Kind::Table, namespace, deadline).await
    }

    /// The names of a namespace's views, sorted.
    ///
    /// # Errors
    /// `NamespaceNotFound`, or the store's.
    pub async fn list_views(&self, namespace: &Namespace, deadline: Instant) -> Result<Vec<String>> {
        self.names(Kind::View, namespace, deadline).await
    }

    async fn names(&self, kind: Kind, namespace: &Namespace, deadline: Instant) -> Result<Vec<String>> {
        let prefix = kind.prefix(namespace);
        let read = self.store.list_all(&prefix, ReadOptions::default(), deadline).await?;
        if read.value.is_empty() && !self.namespace_exists(namespace, deadline).await? {
            return Err(CatalogError::NamespaceNotFound(namespace.clone()));
        }
        // A key that is none of lake's names nothing.
        let names = read.value.iter().map(|e| &e.key[prefix.len()..]).filter(|name| validate_name(name).is_ok());
        Ok(names.map(str::to_owned).collect())
    }

    /// A view's pointer, or `None` if there is no such view.
    pub async fn load_view(&self, view: &TableIdent, deadline: Instant) -> Result<Option<Versioned<TablePointer>>> {
        let read = self.store.get(&view.view_key(), ReadOptions::default(), deadline).await?;
        read.value.map(|e| pointer(view, &e, read.revision)).transpose()
    }

    /// A table's pointer, or `None` if there is no such table.
    pub async fn load_table(&self, table: &TableIdent, deadline: Instant) -> Result<Option<Versioned<TablePointer>>> {
        let read = self.store.get(&table.key(), ReadOptions::default(), deadline).await?;
        read.value.map(|e| pointer(table, &e, read.revision)).transpose()
    }

    /// Several tables' pointers, and the revision that all of them are of where the store has one; `None` for those that do not
    /// exist.
    ///
    /// # Errors
    /// The store's.
    pub async fn load_tables(
        &self,
        tables: &[TableIdent],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<(Revision, Vec<Option<Versioned<TablePointer>>>)> {
        let keys: Vec<String> = tables.iter().map(TableIdent::key).collect();
        let read = self.entries(&keys, options, deadline).await?;
        let found: HashMap<&str, &KeyValue> = read.value.iter().map(|e| (e.key.as_str(), e)).collect();
        let pointers = tables
            .iter()
            .zip(&keys)
            .map(|(table, key)| found.get(key.as_str()).map(|e| pointer(table, e, read.revision)).transpose())
            .collect::<Result<_>>()?;
        Ok((read.revision, pointers))
    }

    /// The entries of those keys that exist. More than one read may ask for are read from a snapshot.
    async fn entries(
        &self,
        keys: &[String],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        let can = self.store.capabilities();
        let held = can.snapshots || options.snapshot.is_some();
        if keys.len() <= MAX_BATCH_GET_KEYS || can.consistent_listing && !held {
            return self.store.batch_get(keys, options, deadline).await;
        }
        let snapshot = match options.snapshot {
            None if can.snapshots => Some(self.store.open_snapshot(options, deadline).await?.value),
            _ => None,
        };
        let options = snapshot.map_or(options, ReadOptions::at);
        let parts = async {
            let mut all = Read { revision: 0, value: Vec::new() };
            for some in keys.chunks(MAX_BATCH_GET_KEYS) {
                let read = self.store.batch_get(some, options, deadline).await?;
                all.revision = read.revision;
                all.value.extend(read.value);
            }
            Ok(all)
        };
        let all: Result<_, Error> = parts.await;
        if let Some(snapshot) = snapshot {
            // One that is not closed ends by itself.
            let _ = self.store.close_snapshot(snapshot, deadline).await;
        }
        all
    }
}

/// The entry of `key` among those that were read.
pub(crate) fn find<'a>(entries: &'a [KeyValue], key: &str) -> Option<&'a KeyValue> {
    entries.iter().find(|e| e.key == key)
}

/// The pointer that a transaction which did not run found under `key`.
pub(super) fn observed(table: &TableIdent, result: &TxnResult, key: &str) -> Result<Option<Versioned<TablePointer>>> {
    find(&result.observed, key).map(|entry| pointer(table, entry, result.revision)).transpose()
}

/// The pointer that a transaction has put at `revision`.
pub(super) fn written(new: &TablePointer, revision: Revision) -> Versioned<TablePointer> {
    Versioned { value: new.clone(), mod_revision: revision, valid_through: revision }
}

/// The pointer that an entry holds, read at `revision`.
pub(crate) fn pointer(table: &TableIdent, entry: &KeyValue, revision: Revision) -> Result<Versioned<TablePointer>> {
    let value = serde_json::from_slice(&entry.value)
        .map_err(|e| CatalogError::Damaged { what: format!("table {table}"), why: e.to_string() })?;
    Ok(Versioned { value, mod_revision: entry.mod_revision, valid_through: revision })
}

/// What is kept of a value; `what` names it in the error.
pub(crate) fn encode(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| CatalogError::Damaged { what: what.to_owned(), why: e.to_string() })
}
