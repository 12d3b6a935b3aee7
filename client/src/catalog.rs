//! The catalog over a store: namespaces and table pointers (semantics, section 11).
//!
//! Keys:
//! ```text
//! /lake/catalog/<namespace>            the namespace's properties
//! /lake/warehouses                     the namespaces that have a place of their own ([`crate::warehouse`])
//! /lake/table/<namespace>/<table>      the pointer: table uuid, current and previous metadata location
//! /lake/named/<table uuid>             which table has that uuid: the key of its pointer
//! /lake/named/all                      says that every table has such a key
//! /lake/view/<namespace>/<view>        as a table's, of a view
//! /lake/turn/<table uuid>              who is next to swap that pointer, while somebody has claimed it
//! /lake/op/<domain>/<id>               what became of an operation that its caller may ask for again
//! /lake/op/kept/<domain>               for how long a domain's outcomes have been kept at least (`kept`)
//! /lake/append/<table uuid>/<id>       an append that is handed over ([`appends`])
//! ```
//! Levels of a nested namespace join with U+001F, which no name may hold. A pointer never holds file lists or
//! statistics: those are Iceberg's. Every change is one transaction with a compare on each key it writes. Tables and views
//! of a namespace share its names.
//!
//! Creating, dropping and renaming is structural work: its transaction also demands that nobody else holds a scope on
//! what it touches (semantics, section 6), `/catalog/<level>/.../<table>`.
//!
//! Over a store that changes one key at a time (library mode) it works as far as [`one_key`] says.
//!
//! A change whose answer was lost is asked for again by the store; its compare then fails on its own effect. Such a
//! call is told apart here by the value found: metadata locations and table uuids are never used twice, so a pointer
//! that holds exactly what the call wanted to write was written by it; and what has never been deleted was not by it. Where
//! neither tells, whatever else is in the way, the call ends as unknown ([`CatalogError::applied`]).
//!
//! In reading order: `names` (what keys are made of), `pointers` (what they hold, and reading it), `namespaces`, `structure`
//! (creating, renaming and dropping tables and views), `registering` (metadata that is there, and that a table has
//! one name), `swaps` (commits, and the turns that make them fair), `operations` (what is
//! done once), `kept` (when its outcome may go), [`appends`], [`one_key`], `error`.

pub mod appends;
mod error;
mod kept;
mod names;
mod namespaces;
pub mod one_key;
mod operations;
mod pointers;
mod registering;
mod structure;
mod swaps;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use lake_proto::kv::{Compare, Condition, KeyValue, Revision, Txn, TxnResult};

pub use self::error::CatalogError;
pub use self::kept::Keeping;
pub(crate) use self::names::named_key;
#[cfg(feature = "cache")]
pub(crate) use self::names::{NAMESPACES, TABLES};
pub use self::names::{Namespace, TableIdent};
pub use self::namespaces::MOST_DROPPED_AT_ONCE;
pub use self::operations::Operation;
#[cfg(feature = "cache")]
pub(crate) use self::pointers::pointer;
pub use self::pointers::{TablePointer, Versioned};
pub(crate) use self::pointers::{encode, find};
pub use self::swaps::TableChange;
use crate::store::{Error, SharedStore};

/// How often a change is tried again on what another change left, before the deadline ends it.
pub(crate) const MAX_RACES: u32 = 64;

/// Namespaces and table pointers over a store.
#[derive(Debug, Clone)]
pub struct Catalog {
    store: SharedStore,
    /// What every change made with this handle is a part of.
    operations: Vec<Operation>,
    /// What must hold of every change made with this handle.
    guards: Vec<Compare>,
    /// Every table's uuid is known to have its name.
    all_named: Arc<AtomicBool>,
}

impl Catalog {
    pub fn new(store: SharedStore) -> Self {
        Self { store, operations: Vec::new(), guards: Vec::new(), all_named: Arc::default() }
    }

    /// A handle whose changes carry these compares besides their own: where one does not hold, nothing is changed
    /// ([`CatalogError::Fenced`]). Over a store that changes one key at a time those of other keys are looked up right before.
    pub fn guarded(&self, guards: Vec<Compare>) -> Self {
        let guards = self.guards.iter().cloned().chain(guards).collect();
        Self { guards, ..self.clone() }
    }

    /// Looks whether the guards hold, for what no change of the catalog is a part of. Right after that they may not any more.
    ///
    /// # Errors
    /// [`CatalogError::Fenced`] if one does not; the store's.
    pub async fn check_guards(&self, deadline: Instant) -> Result<(), CatalogError> {
        if self.guards.is_empty() {
            return Ok(());
        }
        let txn = Txn { when: self.guards.clone(), then: vec![], otherwise: vec![] };
        match self.store.commit(txn, deadline).await?.result.succeeded {
            true => Ok(()),
            false => Err(CatalogError::Fenced { resent: false }),
        }
    }

    /// Whether it was a guard that kept a transaction from running: one does not hold by what was observed; or one of which
    /// nothing can be observed, because everything else holds.
    fn is_fenced(&self, when: &[Compare], result: &TxnResult) -> bool {
        if result.succeeded || self.guards.is_empty() || !result.conflicts.is_empty() {
            return false;
        }
        let all_observed = self.store.capabilities().multi_key;
        let holds = |compare: &Compare| {
            let entry = find(&result.observed, &compare.key);
            match &compare.condition {
                Condition::Absent => Some(entry.is_none()),
                Condition::ModRevision(_) if entry.is_none() && !all_observed => None,
                Condition::ModRevision(revision) => Some(entry.is_some_and(|entry| entry.mod_revision == *revision)),
                Condition::PrefixUnchangedSince(revision) if all_observed => {
                    let newer =
                        |entry: &KeyValue| entry.key.starts_with(&compare.key) && entry.mod_revision > *revision;
                    Some(!result.observed.iter().any(newer))
                }
                _ => None,
            }
        };
        let hidden = |compare: &Compare| matches!(compare.condition, Condition::LeaseAlive(_));
        self.guards.iter().any(|guard| holds(guard) == Some(false))
            || self.guards.iter().any(hidden) && when.iter().all(|compare| holds(compare) != Some(false))
    }

    /// The store below.
    pub fn store(&self) -> &SharedStore {
        &self.store
    }

    /// Demands that nobody holds a scope on this path, where the store has scopes.
    pub(crate) fn unclaimed(&self, path: String) -> Option<Compare> {
        self.store.capabilities().scopes.then(|| Compare::scope_free(path, None))
    }

    fn raced(&self, doing: String) -> CatalogError {
        CatalogError::Store(Error::Refused {
            doing,
            message: format!(
                "its namespace was changed {MAX_RACES} times in between; nothing was committed, try again"
            ),
        })
    }
}

/// Whether a transaction that did not run found, under `key`, what was there at `revision`, changed since or not: it has not been
/// deleted, and so no attempt was applied that deletes it. What is made again is younger.
fn stands(result: &TxnResult, key: &str, revision: Revision) -> bool {
    find(&result.observed, key).is_some_and(|there| there.create_revision <= revision)
}

/// Whether a scope was in the way of a transaction that did not run.
pub(crate) fn claimed(result: &TxnResult) -> Result<(), CatalogError> {
    match result.conflicts.first() {
        Some(scope) => Err(CatalogError::ScopeHeld { path: scope.path.clone(), owner: scope.owner.to_string() }),
        None => Ok(()),
    }
}
