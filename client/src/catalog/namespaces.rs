//! Namespaces: creating and dropping them, and their properties.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use lake_proto::kv::{Compare, Condition, KeyValue, Op, Revision, Txn};
use serde::{Deserialize, Serialize};

use super::error::Result;
use super::names::NAMESPACES;
use super::pointers::{encode, find};
use super::{Catalog, CatalogError, MAX_RACES, Namespace, TableIdent, TablePointer, claimed, stands};
use crate::procedures::drop_namespace::of_namespace;
use crate::procedures::purge::of_drop;
use crate::store::{Error, ReadOptions};

/// Most tables and views that are dropped together with their namespace: each is a compare and an operation of one
/// transaction.
pub const MOST_DROPPED_AT_ONCE: u64 = 400;

/// A namespace's properties.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct NamespaceRecord {
    #[serde(default)]
    properties: BTreeMap<String, String>,
}

impl Namespace {
    /// What is kept under its key while it has no properties.
    pub(crate) fn without_properties(key: &str) -> Result<Vec<u8>> {
        encode(&NamespaceRecord::default(), key)
    }
}

impl Catalog {
    /// Creates a namespace. Its parent, if it is nested, must exist.
    ///
    /// # Errors
    /// `NamespaceExists`, `NamespaceNotFound` (the parent), `InvalidName`, `ScopeHeld`, or the store's.
    pub async fn create_namespace(
        &self,
        namespace: &Namespace,
        properties: BTreeMap<String, String>,
        deadline: Instant,
    ) -> Result<()> {
        namespace.check_new()?;
        let mut in_doubt = false;
        let created = self.create_namespace_noting(namespace, properties, &mut in_doubt, deadline).await;
        created.map_err(|error| error.after_doubt(in_doubt))
    }

    /// The same. Says whether an attempt whose answer was lost may have been applied.
    async fn create_namespace_noting(
        &self,
        namespace: &Namespace,
        properties: BTreeMap<String, String>,
        in_doubt: &mut bool,
        deadline: Instant,
    ) -> Result<()> {
        let key = namespace.key();
        let value = encode(&NamespaceRecord { properties }, &key)?;
        for _ in 0..MAX_RACES {
            let mut when = vec![Compare::absent(&key)];
            when.extend(self.unclaimed(namespace.scope_path()));
            if let Some(parent) = namespace.parent() {
                when.push(Compare::mod_revision(parent.key(), self.namespace_revision(&parent, deadline).await?));
            }
            let txn = Txn { when, then: vec![Op::put(&key, value.clone())], otherwise: vec![] };
            let committed = self.commit(txn, deadline).await?;
            if committed.result.succeeded {
                return Ok(());
            }
            *in_doubt |= self.is_in_doubt(&committed);
            if let Some(existing) = find(&committed.result.observed, &key) {
                // A namespace carries nothing unique. Our own lost answer and another's identical creation look the
                // same, and either way the namespace is there as asked for.
                return match *in_doubt && existing.value == value {
                    true => Ok(()),
                    false => Err(CatalogError::NamespaceExists(namespace.clone())),
                };
            }
            claimed(&committed.result)?;
            if *in_doubt {
                // It may have been made, and be gone by now: it is not made a second time.
                return Err(CatalogError::NamespaceNotFound(namespace.clone()));
            }
        }
        Err(self.raced(format!("creating namespace {namespace}")))
    }

    /// That what is in a namespace is looked at and the namespace dropped in one step takes a store that changes several keys.
    fn drops_namespaces(&self, namespace: &Namespace) -> Result<()> {
        match self.store.capabilities().multi_key {
            true => Ok(()),
            false => Err(CatalogError::Store(Error::cannot(
                format!("dropping namespace {namespace}"),
                "this metadata changes one key at a time, so somebody may create a table in the namespace while it goes; nothing was \
                 dropped: drop the tables in it, and leave it there",
            ))),
        }
    }

    /// Drops an empty namespace.
    ///
    /// # Errors
    /// `NamespaceNotFound`, `NamespaceNotEmpty`, `IsWarehouse`, `ScopeHeld`, or the store's.
    pub async fn drop_namespace(&self, namespace: &Namespace, deadline: Instant) -> Result<()> {
        self.drops_namespaces(namespace)?;
        let key = namespace.key();
        for _ in 0..MAX_RACES {
            let revision = self.namespace_revision(namespace, deadline).await?;
            let contents = namespace.contents();
            let mut when = vec![Compare::mod_revision(&key, revision)];
            when.extend(self.no_warehouse(namespace, deadline).await?);
            when.extend(contents.iter().map(Compare::prefix_empty));
            when.extend(self.unclaimed(namespace.scope_path()));
            let txn = Txn { when, then: vec![Op::delete(&key)], otherwise: vec![] };
            let committed = self.commit(txn, deadline).await?;
            // Gone, or another one by now: an attempt of ours whose answer was lost, or another's drop, did it.
            let is_gone = self.is_in_doubt(&committed) && !stands(&committed.result, &key, revision);
            if committed.result.succeeded || is_gone {
                return Ok(());
            }
            if committed.result.observed.iter().any(|e| contents.iter().any(|p| e.key.starts_with(p.as_str()))) {
                return Err(CatalogError::NamespaceNotEmpty(namespace.clone()).after_doubt(committed.resent));
            }
            claimed(&committed.result).map_err(|error| error.after_doubt(committed.resent))?;
        }
        Err(self.raced(format!("dropping namespace {namespace}")))
    }

    /// Drops a namespace with its tables and views, and submits the purges of its tables if it is told when that is, in one transaction.
    /// Returns how many tables and views there were.
    ///
    /// # Errors
    /// `NamespaceNotFound`; `IsWarehouse`; `ScopeHeld`; `NamespaceNotEmpty` if there are namespaces nested in it; `Store(Refused)` if
    /// there are more than [`MOST_DROPPED_AT_ONCE`], or than the store takes in one transaction, or a table is to be purged of which nobody
    /// can read what its files are; the store's.
    pub async fn drop_namespace_and_contents(
        &self,
        namespace: &Namespace,
        purged_at_unix_ms: Option<u64>,
        deadline: Instant,
    ) -> Result<u64> {
        let refused = |message: String| {
            let doing = format!("dropping namespace {namespace} and what is in it");
            CatalogError::Store(Error::Refused { doing, message })
        };
        self.drops_namespaces(namespace)?;
        let most = self.store.capabilities().txn_ops;
        let key = namespace.key();
        let prefixes = [namespace.table_prefix(), namespace.view_prefix()];
        for _ in 0..MAX_RACES {
            let revision = self.namespace_revision(namespace, deadline).await?;
            let mut when =
                vec![Compare::mod_revision(&key, revision), Compare::prefix_empty(namespace.nested_prefix())];
            when.extend(self.no_warehouse(namespace, deadline).await?);
            when.extend(self.unclaimed(namespace.scope_path()));
            let mut then = vec![Op::delete(&key)];
            let (mut gone, mut count) = (Vec::new(), 0);
            for prefix in &prefixes {
                let read = self.store.list_all(prefix, ReadOptions::default(), deadline).await?;
                when.push(Compare { key: prefix.clone(), condition: Condition::PrefixUnchangedSince(read.revision) });
                for entry in read.value {
                    let pointer = serde_json::from_slice::<TablePointer>(&entry.value).ok();
                    if let Some(now_unix_ms) = purged_at_unix_ms.filter(|_| *prefix == prefixes[0]) {
                        let table = pointer.as_ref().zip(TableIdent::from_key(&entry.key));
                        let (pointer, table) = table.ok_or_else(|| {
                            refused(format!("what {} points at cannot be read; nothing was dropped", entry.key))
                        })?;
                        let (purge, record) = of_drop(&table, pointer, entry.mod_revision, now_unix_ms);
                        let purge = crate::procedures::key(&purge);
                        when.push(Compare::absent(&purge));
                        then.push(Op::put(purge, record.to_bytes()));
                    }
                    when.push(Compare::mod_revision(&entry.key, entry.mod_revision));
                    then.push(Op::delete(&entry.key));
                    gone.extend(pointer.map(|pointer| (entry.key, pointer.uuid)));
                    count += 1;
                }
            }
            if count > MOST_DROPPED_AT_ONCE || when.len().max(then.len()) > most {
                return Err(refused(format!(
                    "{count} tables and views are in it, and one transaction drops at most {MOST_DROPPED_AT_ONCE}, and makes at most \
                     {most} changes in all; nothing was dropped: drop some of them first"
                )));
            }
            let committed = self.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
            // As with an empty one.
            let is_gone = self.is_in_doubt(&committed) && !stands(&committed.result, &key, revision);
            if committed.result.succeeded || is_gone {
                self.forget_names(&gone, deadline).await;
                return Ok(count);
            }
            if committed.result.observed.iter().any(|e| e.key.starts_with(namespace.nested_prefix().as_str())) {
                return Err(CatalogError::NamespaceNotEmpty(namespace.clone()).after_doubt(committed.resent));
            }
            claimed(&committed.result).map_err(|error| error.after_doubt(committed.resent))?;
        }
        Err(self.raced(format!("dropping namespace {namespace} and what is in it")))
    }

    /// Has the cluster's leader drop a namespace with all that is in it, in steps ([`crate::procedures::drop_namespace`]), and with `purge`
    /// has the files of its tables deleted. Returns the id of the procedure, which has begun with that.
    ///
    /// # Errors
    /// `NamespaceNotFound`, `NamespaceNotEmpty` if there are namespaces nested in it, `IsWarehouse`, `ScopeHeld`, or the store's.
    pub async fn submit_namespace_drop(
        &self,
        namespace: &Namespace,
        purge: bool,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<String> {
        let key = namespace.key();
        for _ in 0..MAX_RACES {
            let revision = self.namespace_revision(namespace, deadline).await?;
            let (id, record) = of_namespace(namespace, revision, purge, now_unix_ms);
            let mut txn = record.submission(&id);
            txn.when.push(Compare::mod_revision(&key, revision));
            txn.when.push(Compare::prefix_empty(namespace.nested_prefix()));
            txn.when.extend(self.no_warehouse(namespace, deadline).await?);
            let committed = self.commit(txn, deadline).await?;
            // By an attempt of ours whose answer was lost: another's of the same moment holds the scope. If it is not there, none was
            // applied: it stays when it has ended.
            let is_there = find(&committed.result.observed, &crate::procedures::key(&id)).is_some();
            if committed.result.succeeded || committed.resent && is_there {
                return Ok(id);
            }
            if committed.result.observed.iter().any(|e| e.key.starts_with(namespace.nested_prefix().as_str())) {
                return Err(CatalogError::NamespaceNotEmpty(namespace.clone()));
            }
            claimed(&committed.result)?;
        }
        Err(self.raced(format!("dropping namespace {namespace} and what is in it")))
    }

    /// A namespace's properties, or `None` if there is no such namespace.
    pub async fn namespace_properties(
        &self,
        namespace: &Namespace,
        deadline: Instant,
    ) -> Result<Option<BTreeMap<String, String>>> {
        let read = self.store.get(&namespace.key(), ReadOptions::default(), deadline).await?;
        Ok(read.value.map(|e| namespace_record(namespace, &e)).transpose()?.map(|record| record.properties))
    }

    /// Removes and sets properties of a namespace; what is in both is set. Returns those of `removals` that were there.
    ///
    /// # Errors
    /// `NamespaceNotFound`, or the store's.
    pub async fn update_namespace(
        &self,
        namespace: &Namespace,
        removals: &BTreeSet<String>,
        updates: &BTreeMap<String, String>,
        deadline: Instant,
    ) -> Result<BTreeSet<String>> {
        let mut in_doubt = None;
        let updated = self.update_namespace_noting(namespace, removals, updates, &mut in_doubt, deadline).await;
        updated.map_err(|error| error.after_doubt(in_doubt.is_some()))
    }

    /// The same. Says what was removed by an attempt whose answer was lost, if it was applied.
    async fn update_namespace_noting(
        &self,
        namespace: &Namespace,
        removals: &BTreeSet<String>,
        updates: &BTreeMap<String, String>,
        in_doubt: &mut Option<BTreeSet<String>>,
        deadline: Instant,
    ) -> Result<BTreeSet<String>> {
        let key = namespace.key();
        for _ in 0..MAX_RACES {
            let read = self.store.get(&key, ReadOptions::default(), deadline).await?;
            let Some(entry) = read.value else { return Err(CatalogError::NamespaceNotFound(namespace.clone())) };
            let mut record = namespace_record(namespace, &entry)?;
            let there = removals.iter().filter(|name| record.properties.remove(*name).is_some()).cloned().collect();
            record.properties.extend(updates.iter().map(|(name, value)| (name.clone(), value.clone())));
            let value = encode(&record, &key)?;
            let removed = in_doubt.clone().unwrap_or(there);
            if entry.value == value && self.operations.is_empty() {
                return Ok(removed);
            }
            if in_doubt.is_some() {
                // Either others were first, or they have come after it and are not to be overwritten.
                let met = format!("others have changed the properties of namespace {namespace} in between");
                return Err(CatalogError::InDoubt { met });
            }
            let txn = Txn {
                when: vec![Compare::mod_revision(&key, entry.mod_revision)],
                then: vec![Op::put(&key, value)],
                otherwise: vec![],
            };
            let committed = self.commit(txn, deadline).await?;
            // What is a part of operations has left their outcomes, and was done if these are there.
            let is_in_doubt = self.is_in_doubt(&committed);
            if committed.result.succeeded || is_in_doubt && !self.operations.is_empty() {
                return Ok(removed);
            }
            if is_in_doubt {
                *in_doubt = Some(removed);
            }
        }
        match in_doubt {
            Some(_) => Err(CatalogError::InDoubt { met: format!("namespace {namespace} was changed again and again") }),
            None => Err(self.raced(format!("changing the properties of namespace {namespace}"))),
        }
    }

    pub async fn namespace_exists(&self, namespace: &Namespace, deadline: Instant) -> Result<bool> {
        Ok(self.store.get(&namespace.key(), ReadOptions::default(), deadline).await?.value.is_some())
    }

    /// All namespaces, in key order.
    pub async fn list_namespaces(&self, deadline: Instant) -> Result<Vec<Namespace>> {
        let read = self.store.list_all(NAMESPACES, ReadOptions::default(), deadline).await?;
        // A key that is none of lake's names no namespace.
        Ok(read.value.iter().filter_map(|e| Namespace::from_key(&e.key).ok()).collect())
    }

    pub(super) async fn namespace_revision(&self, namespace: &Namespace, deadline: Instant) -> Result<Revision> {
        let read = self.store.get(&namespace.key(), ReadOptions::default(), deadline).await?;
        read.value.map(|e| e.mod_revision).ok_or_else(|| CatalogError::NamespaceNotFound(namespace.clone()))
    }
}

fn namespace_record(namespace: &Namespace, entry: &KeyValue) -> Result<NamespaceRecord> {
    serde_json::from_slice(&entry.value)
        .map_err(|e| CatalogError::Damaged { what: format!("namespace {namespace}"), why: e.to_string() })
}
