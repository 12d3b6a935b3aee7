//! The catalog over a store: namespaces and table pointers (semantics, section 11).
//!
//! Keys:
//! ```text
//! /lake/catalog/<namespace>            the namespace's properties
//! /lake/warehouses                     the namespaces that have a place of their own ([`crate::warehouse`])
//! /lake/table/<namespace>/<table>      the pointer: table uuid, current and previous metadata location
//! /lake/view/<namespace>/<view>        the same of a view
//! /lake/turn/<table uuid>              who is next to swap that pointer, while somebody has claimed it
//! /lake/op/<domain>/<id>               what became of an operation that its caller may ask for again
//! /lake/append/<table uuid>/<id>       an append that is handed over ([`appends`])
//! ```
//! Levels of a nested namespace join with U+001F, which no name may hold. A pointer never holds file lists or
//! statistics: those are Iceberg's. Every change is one transaction with a compare on each key it writes. Tables and views
//! of a namespace share its names.
//!
//! Creating, dropping and renaming is structural work: its transaction also demands that nobody else holds a scope on
//! what it touches (semantics, section 6), `/catalog/<level>/.../<table>`.
//!
//! Compare-and-set alone is not fair: of two writers, the one that builds on its own last commit is always a little
//! quicker, and the other may lose for ever. So a writer that has lost may claim the next turn ([`Catalog::claim_turn`]).
//! A swap needs that nobody else has; the claimant's own ends its claim in the same transaction. Nothing that matters
//! rests on it: the compare on the pointer decides as before, and a claim that outlives its claimant is ended by whoever
//! waits for it.
//!
//! A table's uuid, and with it its metadata, has one name: who registers metadata claims its uuid's turn, so that two of them
//! do not meet, and looks whether a table has it ([`Catalog::register_table`]).
//!
//! Over a store that changes one key at a time (library mode) it works as far as [`one_key`] says.
//!
//! A change whose answer was lost is asked for again by the store; its compare then fails on its own effect. Such a
//! call is told apart here by the value found: metadata locations and table uuids are never used twice, so a pointer
//! that holds exactly what the call wanted to write was written by it.

pub mod appends;
pub mod one_key;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lake_proto::kv::{Compare, Condition, KeyValue, Op, Revision, Txn, TxnResult};
use lake_proto::limits::MAX_BATCH_GET_KEYS;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use self::appends::Settling;
use crate::store::{Applied, Committed, Error, Read, ReadOptions, SharedStore, Token};

/// Keys of namespaces begin so.
pub(crate) const NAMESPACES: &str = "/lake/catalog/";
/// Keys of pointers begin so.
pub(crate) const TABLES: &str = "/lake/table/";
/// Keys of views begin so.
const VIEWS: &str = "/lake/view/";
/// Keys of the outcomes of operations begin so.
const OPERATIONS: &str = "/lake/op/";
/// Outcomes that are forgotten in one transaction.
const FORGOTTEN_AT_A_TIME: usize = 500;
/// Most tables and views that are dropped together with their namespace: each is a compare and an operation of one
/// transaction.
pub const MOST_DROPPED_AT_ONCE: u64 = 400;
/// Paths of scopes on what is in the catalog begin so.
const SCOPES: &str = "/catalog";
/// Joins the levels of a nested namespace in a key. No name may hold it.
const LEVEL_SEPARATOR: char = '\u{1f}';
/// Longest name of a namespace level or table, in bytes.
const MAX_NAME_BYTES: usize = 255;
/// Deepest nesting of namespaces.
const MAX_LEVELS: usize = 16;
/// How often a change is tried again on what another change left, before the deadline ends it.
const MAX_RACES: u32 = 64;

/// A namespace: one or more levels.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(Vec<String>);

impl Namespace {
    /// A namespace of these levels.
    ///
    /// # Errors
    /// [`CatalogError::InvalidName`] if there is no level, too many, or one is not a valid name.
    pub fn new(levels: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, CatalogError> {
        let levels: Vec<String> = levels.into_iter().map(Into::into).collect();
        if levels.is_empty() || levels.len() > MAX_LEVELS {
            return Err(CatalogError::InvalidName {
                name: levels.join("."),
                why: format!("a namespace has 1 to {MAX_LEVELS} levels"),
            });
        }
        for level in &levels {
            validate_name(level)?;
        }
        Ok(Self(levels))
    }

    /// The levels, outermost first.
    pub fn levels(&self) -> &[String] {
        &self.0
    }

    fn encoded(&self) -> String {
        self.0.join(&LEVEL_SEPARATOR.to_string())
    }

    fn decode(encoded: &str) -> Result<Self, CatalogError> {
        Self::new(encoded.split(LEVEL_SEPARATOR))
    }

    /// The namespace whose properties are under this key.
    pub(crate) fn from_key(key: &str) -> Result<Self, CatalogError> {
        Self::decode(key.strip_prefix(NAMESPACES).unwrap_or(key))
    }

    pub(crate) fn key(&self) -> String {
        format!("{NAMESPACES}{}", self.encoded())
    }

    /// What the keys of all that is in it start with.
    pub(crate) fn contents(&self) -> [String; 3] {
        [self.table_prefix(), self.view_prefix(), self.nested_prefix()]
    }

    /// What is kept under its key while it has no properties.
    pub(crate) fn without_properties(key: &str) -> Result<Vec<u8>, CatalogError> {
        encode(&NamespaceRecord::default(), key)
    }

    /// What the keys of all namespaces nested in this one start with.
    fn nested_prefix(&self) -> String {
        format!("{}{LEVEL_SEPARATOR}", self.key())
    }

    fn table_prefix(&self) -> String {
        format!("{TABLES}{}/", self.encoded())
    }

    fn view_prefix(&self) -> String {
        format!("{VIEWS}{}/", self.encoded())
    }

    /// The path of scopes on it.
    pub(crate) fn scope_path(&self) -> String {
        format!("{SCOPES}/{}", self.0.join("/"))
    }

    /// The namespace that this one is nested in.
    pub fn parent(&self) -> Option<Namespace> {
        (self.0.len() > 1).then(|| Namespace(self.0[..self.0.len() - 1].to_vec()))
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("."))
    }
}

impl FromStr for Namespace {
    type Err = CatalogError;

    /// Levels separated by dots.
    fn from_str(s: &str) -> Result<Self, CatalogError> {
        Self::new(s.split('.'))
    }
}

/// A table by namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableIdent {
    pub namespace: Namespace,
    pub name: String,
}

impl TableIdent {
    /// # Errors
    /// [`CatalogError::InvalidName`] if `name` is not a valid name.
    pub fn new(namespace: Namespace, name: impl Into<String>) -> Result<Self, CatalogError> {
        let name = name.into();
        validate_name(&name)?;
        Ok(Self { namespace, name })
    }

    pub(crate) fn key(&self) -> String {
        format!("{}{}", self.namespace.table_prefix(), self.name)
    }

    fn view_key(&self) -> String {
        format!("{}{}", self.namespace.view_prefix(), self.name)
    }

    fn scope_path(&self) -> String {
        format!("{}/{}", self.namespace.scope_path(), self.name)
    }

    /// The table whose pointer is under this key.
    pub(crate) fn from_key(key: &str) -> Option<Self> {
        let (namespace, name) = key.strip_prefix(TABLES)?.split_once('/')?;
        Self::new(Namespace::decode(namespace).ok()?, name).ok()
    }
}

impl fmt::Display for TableIdent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.namespace, self.name)
    }
}

fn validate_name(name: &str) -> Result<(), CatalogError> {
    let why = if name.is_empty() {
        "a name is not empty".to_owned()
    } else if name.len() > MAX_NAME_BYTES {
        format!("a name has at most {MAX_NAME_BYTES} bytes")
    } else if name.contains('/') || name.chars().any(char::is_control) {
        "a name holds no '/' and no control characters".to_owned()
    } else {
        return Ok(());
    };
    Err(CatalogError::InvalidName { name: name.chars().take(64).collect(), why })
}

/// Where a table's current metadata is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TablePointer {
    pub uuid: Uuid,
    pub metadata_location: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_location: Option<String>,
}

/// A namespace's properties.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct NamespaceRecord {
    #[serde(default)]
    properties: BTreeMap<String, String>,
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

/// Why a catalog call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    #[error("invalid name {name:?}: {why}")]
    InvalidName { name: String, why: String },
    #[error("namespace {0} does not exist")]
    NamespaceNotFound(Namespace),
    #[error("namespace {0} exists already")]
    NamespaceExists(Namespace),
    #[error("namespace {0} is not empty: drop what is in it first")]
    NamespaceNotEmpty(Namespace),
    #[error("namespace {0} is a warehouse: remove that (`lake meta warehouse remove`)")]
    IsWarehouse(Namespace),
    #[error("table {0} does not exist")]
    TableNotFound(TableIdent),
    #[error("table {0} exists already")]
    TableExists(TableIdent),
    /// What is to be registered is a table that there is.
    #[error("that is the metadata of table {0}, which exists: drop that first, and its objects stay")]
    Registered(TableIdent),
    #[error("view {0} does not exist")]
    ViewNotFound(TableIdent),
    #[error("view {0} exists already")]
    ViewExists(TableIdent),
    /// The operation has left its outcome before: it is not done again.
    #[error("this operation has been done already")]
    AlreadyDone(Bytes),
    /// Structural work that takes more than one transaction has been begun by somebody else.
    #[error("{path} is held by {owner} for structural work; nothing was done: try again when that has ended")]
    ScopeHeld { path: String, owner: String },
    /// Another writer changed the pointer first.
    #[error("{table} was changed by another writer")]
    Conflict {
        table: TableIdent,
        /// The pointer as it is now; `None` if the table is gone.
        current: Option<Versioned<TablePointer>>,
        /// An earlier attempt of this call may have been applied and built upon since: look whether the current
        /// metadata already holds the change before making it again.
        resent: bool,
    },
    /// Another writer has claimed the next turn. The pointer has not been changed.
    #[error("another writer of table {table} has claimed the next turn")]
    NotYourTurn {
        table: TableIdent,
        /// The claim.
        turn: Revision,
        /// An earlier attempt of this call may still be applied, once the turn is free.
        resent: bool,
    },
    /// The answers are of an earlier state than this process, or the caller, has seen already.
    #[error(
        "{doing}: the metadata answers from revision {answered}, and revision {seen} has been seen already: a peer that lags, or another cluster; nothing was changed, try again, and check the endpoints if it stays so"
    )]
    Behind { doing: String, answered: Revision, seen: Revision },
    /// Only what is too old to be used is cached, and metasrv cannot be reached.
    #[error(
        "what is known of table {table} is {:.0} s old, more than the {:.0} s that may pass while the metadata cannot be reached: {error}", .age.as_secs_f64(), .limit.as_secs_f64()
    )]
    TooOld { table: TableIdent, age: Duration, limit: Duration, error: Error },
    /// The stored bytes are not what lake writes.
    #[error("the record of {what} in the metadata is damaged: {why}")]
    Damaged { what: String, why: String },
    #[error(transparent)]
    Store(#[from] Error),
}

impl CatalogError {
    /// Whether the change that failed may have been made.
    pub fn applied(&self) -> Applied {
        match self {
            CatalogError::Store(e) => e.applied(),
            CatalogError::Conflict { resent: true, .. } | CatalogError::NotYourTurn { resent: true, .. } => {
                Applied::Unknown
            }
            _ => Applied::No,
        }
    }
}

type Result<T, E = CatalogError> = std::result::Result<T, E>;

/// An operation whose outcome is kept, so that asking for it again changes nothing (semantics, section 4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    key: String,
    /// What is kept if it is done.
    outcome: Bytes,
}

impl Operation {
    /// An operation of this id, unique within its domain, that will have had this outcome once it is done.
    ///
    /// # Errors
    /// `InvalidName` if one of the two is not a valid name.
    pub fn new(domain: &str, id: &str, outcome: impl Into<Bytes>) -> Result<Self> {
        Ok(Self { key: operation_key(domain, id)?, outcome: outcome.into() })
    }
}

fn operation_key(domain: &str, id: &str) -> Result<String> {
    validate_name(domain)?;
    validate_name(id)?;
    Ok(format!("{OPERATIONS}{domain}/{id}"))
}

/// One table's part of a change of several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableChange {
    pub table: TableIdent,
    /// The revision that its pointer must still have; `None`: the table is created.
    pub expected: Option<Revision>,
    pub new: TablePointer,
}

/// What a name means. Tables and views of a namespace share its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Table,
    View,
}

impl Kind {
    fn key(self, ident: &TableIdent) -> String {
        match self {
            Kind::Table => ident.key(),
            Kind::View => ident.view_key(),
        }
    }

    fn prefix(self, namespace: &Namespace) -> String {
        match self {
            Kind::Table => namespace.table_prefix(),
            Kind::View => namespace.view_prefix(),
        }
    }

    fn other(self) -> Self {
        match self {
            Kind::Table => Kind::View,
            Kind::View => Kind::Table,
        }
    }

    fn exists(self, ident: &TableIdent) -> CatalogError {
        match self {
            Kind::Table => CatalogError::TableExists(ident.clone()),
            Kind::View => CatalogError::ViewExists(ident.clone()),
        }
    }

    fn missing(self, ident: &TableIdent) -> CatalogError {
        match self {
            Kind::Table => CatalogError::TableNotFound(ident.clone()),
            Kind::View => CatalogError::ViewNotFound(ident.clone()),
        }
    }
}

/// Namespaces and table pointers over a store.
#[derive(Debug, Clone)]
pub struct Catalog {
    store: SharedStore,
    /// What every change made with this handle is a part of.
    operations: Vec<Operation>,
}

impl Catalog {
    pub fn new(store: SharedStore) -> Self {
        Self { store, operations: Vec::new() }
    }

    /// A handle whose changes are this operation, besides those that they are already: the first that is made leaves its
    /// outcome, in the same transaction, and where an outcome is found nothing is changed ([`CatalogError::AlreadyDone`]).
    pub fn within(&self, operation: Operation) -> Self {
        let mut operations = self.operations.clone();
        operations.push(operation);
        Self { store: self.store.clone(), operations }
    }

    /// The outcome that was left of an operation.
    ///
    /// # Errors
    /// The store's.
    pub async fn outcome(&self, domain: &str, id: &str, deadline: Instant) -> Result<Option<Bytes>> {
        let key = operation_key(domain, id)?;
        Ok(self.store.get(&key, ReadOptions::default(), deadline).await?.value.map(|e| e.value))
    }

    /// Leaves the outcome of an operation that changes nothing: a refusal. Returns the one that is there.
    ///
    /// # Errors
    /// The store's.
    pub async fn leave_outcome(&self, operation: &Operation, deadline: Instant) -> Result<Bytes> {
        let committed = self.store.cas(&operation.key, None, operation.outcome.clone(), deadline).await?;
        match find(&committed.result.observed, &operation.key) {
            Some(there) => Ok(there.value.clone()),
            None => Ok(operation.outcome.clone()),
        }
    }

    /// Forgets the outcomes in a domain that `old` says are no longer needed. Returns how many those were.
    ///
    /// # Errors
    /// The store's.
    pub async fn forget_outcomes(&self, domain: &str, old: impl Fn(&[u8]) -> bool, deadline: Instant) -> Result<usize> {
        let prefix = format!("{OPERATIONS}{domain}/");
        let kept = self.store.list_all(&prefix, ReadOptions::default(), deadline).await?;
        let old: Vec<_> = kept.value.iter().filter(|e| old(&e.value)).collect();
        for some in old.chunks(FORGOTTEN_AT_A_TIME) {
            let when = some.iter().map(|e| Compare::mod_revision(&e.key, e.mod_revision)).collect();
            let then = some.iter().map(|e| Op::delete(&e.key)).collect();
            self.store.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
        }
        Ok(old.len())
    }

    /// Makes a transaction a part of the operations, if there are any.
    async fn commit(&self, mut txn: Txn, deadline: Instant) -> Result<Committed> {
        for operation in &self.operations {
            txn.when.push(Compare::absent(&operation.key));
            txn.then.push(Op::put(&operation.key, operation.outcome.clone()));
        }
        let committed = self.store.commit(txn, deadline).await?;
        for operation in &self.operations {
            match find(&committed.result.observed, &operation.key) {
                // By an attempt of this very call whose answer was lost: the caller finds its effect.
                Some(there) if committed.resent && there.value == operation.outcome => {}
                Some(there) if !committed.result.succeeded => {
                    return Err(CatalogError::AlreadyDone(there.value.clone()));
                }
                _ => {}
            }
        }
        Ok(committed)
    }

    /// The store below.
    pub fn store(&self) -> &SharedStore {
        &self.store
    }

    /// Creates a namespace. Its parent, if it is nested, must exist.
    ///
    /// # Errors
    /// `NamespaceExists`, `NamespaceNotFound` (the parent), or the store's.
    pub async fn create_namespace(
        &self,
        namespace: &Namespace,
        properties: BTreeMap<String, String>,
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
            if let Some(existing) = find(&committed.result.observed, &key) {
                // A namespace carries nothing unique. Our own lost answer and another's identical creation look the
                // same, and either way the namespace is there as asked for.
                return match committed.resent && existing.value == value {
                    true => Ok(()),
                    false => Err(CatalogError::NamespaceExists(namespace.clone())),
                };
            }
            claimed(&committed.result)?;
        }
        Err(self.raced(format!("creating namespace {namespace}")))
    }

    /// Drops an empty namespace.
    ///
    /// # Errors
    /// `NamespaceNotFound`, `NamespaceNotEmpty`, `IsWarehouse`, or the store's.
    pub async fn drop_namespace(&self, namespace: &Namespace, deadline: Instant) -> Result<()> {
        let key = namespace.key();
        let mut in_doubt = false;
        for _ in 0..MAX_RACES {
            let revision = match self.namespace_revision(namespace, deadline).await {
                // Gone after an attempt of ours whose answer was lost: that attempt, or another's drop, did it.
                Err(CatalogError::NamespaceNotFound(_)) if in_doubt => return Ok(()),
                other => other?,
            };
            let contents = namespace.contents();
            let mut when = vec![Compare::mod_revision(&key, revision)];
            when.extend(self.no_warehouse(namespace, deadline).await?);
            when.extend(contents.iter().map(Compare::prefix_empty));
            when.extend(self.unclaimed(namespace.scope_path()));
            let txn = Txn { when, then: vec![Op::delete(&key)], otherwise: vec![] };
            let committed = self.commit(txn, deadline).await?;
            if committed.result.succeeded {
                return Ok(());
            }
            if committed.result.observed.iter().any(|e| contents.iter().any(|p| e.key.starts_with(p.as_str()))) {
                return Err(CatalogError::NamespaceNotEmpty(namespace.clone()));
            }
            claimed(&committed.result)?;
            in_doubt |= committed.resent;
        }
        Err(self.raced(format!("dropping namespace {namespace}")))
    }

    /// Drops a namespace with its tables and views, in one transaction. Returns how many of these there were.
    ///
    /// # Errors
    /// `NamespaceNotFound`; `NamespaceNotEmpty` if there are namespaces nested in it; `Store(Refused)` if there are more than
    /// [`MOST_DROPPED_AT_ONCE`]; the store's.
    pub async fn drop_namespace_and_contents(&self, namespace: &Namespace, deadline: Instant) -> Result<u64> {
        let key = namespace.key();
        let prefixes = [namespace.table_prefix(), namespace.view_prefix()];
        let mut in_doubt = None;
        for _ in 0..MAX_RACES {
            let revision = match (self.namespace_revision(namespace, deadline).await, in_doubt) {
                // By an attempt of ours whose answer was lost, or by another's drop.
                (Err(CatalogError::NamespaceNotFound(_)), Some(count)) => return Ok(count),
                (revision, _) => revision?,
            };
            let mut when =
                vec![Compare::mod_revision(&key, revision), Compare::prefix_empty(namespace.nested_prefix())];
            when.extend(self.unclaimed(namespace.scope_path()));
            let mut then = vec![Op::delete(&key)];
            for prefix in &prefixes {
                let read = self.store.list_all(prefix, ReadOptions::default(), deadline).await?;
                when.push(Compare { key: prefix.clone(), condition: Condition::PrefixUnchangedSince(read.revision) });
                for entry in read.value {
                    when.push(Compare::mod_revision(&entry.key, entry.mod_revision));
                    then.push(Op::delete(&entry.key));
                }
            }
            let count = then.len() as u64 - 1;
            if count > MOST_DROPPED_AT_ONCE {
                return Err(CatalogError::Store(Error::Refused {
                    doing: format!("dropping namespace {namespace} and what is in it"),
                    message: format!(
                        "{count} tables and views are in it, and one transaction drops at most {MOST_DROPPED_AT_ONCE}; nothing \
                         was dropped: drop some of them first"
                    ),
                }));
            }
            let committed = self.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
            if committed.result.succeeded {
                return Ok(count);
            }
            if committed.result.observed.iter().any(|e| e.key.starts_with(namespace.nested_prefix().as_str())) {
                return Err(CatalogError::NamespaceNotEmpty(namespace.clone()));
            }
            claimed(&committed.result)?;
            in_doubt = committed.resent.then_some(count).or(in_doubt);
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
        let key = namespace.key();
        // Removed by an attempt whose answer was lost.
        let mut in_doubt: Option<BTreeSet<String>> = None;
        for _ in 0..MAX_RACES {
            let read = self.store.get(&key, ReadOptions::default(), deadline).await?;
            let Some(entry) = read.value else { return Err(CatalogError::NamespaceNotFound(namespace.clone())) };
            let mut record = namespace_record(namespace, &entry)?;
            let there = removals.iter().filter(|name| record.properties.remove(*name).is_some()).cloned().collect();
            record.properties.extend(updates.iter().map(|(name, value)| (name.clone(), value.clone())));
            let value = encode(&record, &key)?;
            let removed = in_doubt.take().unwrap_or(there);
            if entry.value == value && self.operations.is_empty() {
                return Ok(removed);
            }
            let txn = Txn {
                when: vec![Compare::mod_revision(&key, entry.mod_revision)],
                then: vec![Op::put(&key, value)],
                otherwise: vec![],
            };
            let committed = self.commit(txn, deadline).await?;
            if committed.result.succeeded {
                return Ok(removed);
            }
            in_doubt = committed.resent.then_some(removed);
        }
        Err(self.raced(format!("changing the properties of namespace {namespace}")))
    }

    pub async fn namespace_exists(&self, namespace: &Namespace, deadline: Instant) -> Result<bool> {
        Ok(self.store.get(&namespace.key(), ReadOptions::default(), deadline).await?.value.is_some())
    }

    /// All namespaces, in key order.
    pub async fn list_namespaces(&self, deadline: Instant) -> Result<Vec<Namespace>> {
        let read = self.store.list_all(NAMESPACES, ReadOptions::default(), deadline).await?;
        read.value.iter().map(|e| Namespace::from_key(&e.key)).collect()
    }

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
        Ok(read.value.into_iter().map(|e| e.key[prefix.len()..].to_owned()).collect())
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

    /// Creates a table that points at `new`.
    ///
    /// # Errors
    /// `TableExists`, `ViewExists`, `NamespaceNotFound`, `ScopeHeld`, or the store's.
    pub async fn create_table(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.create(Kind::Table, table, new, None, deadline).await
    }

    /// Creates a table of metadata that is there already, or puts it in the place of what `table` is at the revision `expected`.
    /// A table has one name: none of another name may have the uuid.
    ///
    /// # Errors
    /// `Registered`, `NotYourTurn` while somebody else has claimed the turn of that uuid, those of [`Catalog::create_table`] or
    /// [`Catalog::swap_table`]. None of them leaves a claim behind, but one whose outcome is unknown.
    pub async fn register_table(
        &self,
        table: &TableIdent,
        new: &TablePointer,
        expected: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        // First, so that who registers the table that all write to is told at once.
        self.nameless(table, new.uuid, deadline).await?;
        let claim = self.claim_turn(new.uuid, Uuid::new_v4(), deadline).await?;
        if claim.is_none() && self.store.capabilities().multi_key {
            let turn = self.turn(new.uuid, deadline).await?.unwrap_or(0);
            return Err(CatalogError::NotYourTurn { table: table.clone(), turn, resent: false });
        }
        let made = async {
            self.nameless(table, new.uuid, deadline).await?;
            match expected {
                None => self.create(Kind::Table, table, new, claim, deadline).await,
                Some(expected) => self.swap_table(table, expected, new, claim, deadline).await,
            }
        };
        let made = made.await;
        if let (Err(error), Some(claim)) = (&made, claim)
            && error.applied() == Applied::No
        {
            // Whoever waits for it ends it otherwise.
            let _ = self.end_turn(new.uuid, claim, deadline).await;
        }
        made
    }

    /// Checks that no table but `table` has this uuid.
    async fn nameless(&self, table: &TableIdent, uuid: Uuid, deadline: Instant) -> Result<()> {
        let own = table.key();
        let read = self.store.list_all(TABLES, ReadOptions::default(), deadline).await?;
        for entry in read.value.iter().filter(|entry| entry.key != own) {
            // A damaged one does not say whose it is, and is not what keeps another from being brought back.
            let Ok(there) = serde_json::from_slice::<TablePointer>(&entry.value) else { continue };
            if there.uuid == uuid {
                let other = TableIdent::from_key(&entry.key).unwrap_or_else(|| table.clone());
                return Err(CatalogError::Registered(other));
            }
        }
        Ok(())
    }

    /// Creates a view that points at `new`.
    ///
    /// # Errors
    /// As [`Catalog::create_table`].
    pub async fn create_view(
        &self,
        view: &TableIdent,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.create(Kind::View, view, new, None, deadline).await
    }

    async fn create(
        &self,
        kind: Kind,
        table: &TableIdent,
        new: &TablePointer,
        turn: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let (key, other_key) = (kind.key(table), kind.other().key(table));
        let value = encode(new, &key)?;
        let mut in_doubt = false;
        for _ in 0..MAX_RACES {
            let namespace = self.namespace_revision(&table.namespace, deadline).await?;
            let mut when = vec![
                Compare::absent(&key),
                Compare::absent(&other_key),
                Compare::mod_revision(table.namespace.key(), namespace),
            ];
            when.extend(self.unclaimed(table.scope_path()));
            let mut then = vec![Op::put(&key, value.clone())];
            if let Some(claim) = turn {
                when.push(Compare::mod_revision(turn_key(new.uuid), claim));
                then.push(Op::delete(turn_key(new.uuid)));
            }
            let committed = self.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
            if committed.result.succeeded {
                return Ok(written(new, committed.result.revision));
            }
            in_doubt |= committed.resent;
            if let Some(existing) = find(&committed.result.observed, &key) {
                let current = pointer(table, existing, committed.result.revision)?;
                // The uuid tells: the table was created by this call, whatever was committed to it since.
                return match current.value.uuid == new.uuid {
                    true if in_doubt => Ok(current),
                    false if in_doubt => {
                        Err(CatalogError::Conflict { table: table.clone(), current: Some(current), resent: true })
                    }
                    _ => Err(kind.exists(table)),
                };
            }
            if find(&committed.result.observed, &other_key).is_some() {
                return Err(kind.other().exists(table));
            }
            claimed(&committed.result)?;
            let held = find(&committed.result.observed, &turn_key(new.uuid)).map(|e| e.mod_revision);
            if turn.is_some() && held != turn {
                return Err(CatalogError::NotYourTurn {
                    table: table.clone(),
                    turn: held.unwrap_or(0),
                    resent: in_doubt,
                });
            }
        }
        Err(self.raced(format!("creating {table}")))
    }

    /// Swaps a table's pointer, if its `mod_revision` is still `expected` and the next turn is nobody else's: unclaimed,
    /// or the caller's own claim `turn`, which ends with it.
    ///
    /// # Errors
    /// `Conflict` with the pointer as it is now, `NotYourTurn`, or the store's.
    pub async fn swap_table(
        &self,
        table: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        turn: Option<Revision>,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.swap(table, expected, new, turn, &Settling::default(), deadline).await
    }

    /// The swap, and the appends that it makes.
    async fn swap(
        &self,
        table: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        turn: Option<Revision>,
        settling: &Settling,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let (key, turn_key) = (table.key(), turn_key(new.uuid));
        let mut txn = settling.transaction(new.uuid)?;
        txn.when.push(Compare::mod_revision(&key, expected));
        txn.then.push(Op::put(&key, encode(new, &key)?));
        txn.when.push(match turn {
            None => Compare::absent(&turn_key),
            Some(claim) => {
                txn.then.push(Op::delete(&turn_key));
                Compare::mod_revision(&turn_key, claim)
            }
        });
        let committed = self.commit(txn, deadline).await?;
        let (result, resent) = (committed.result, committed.resent);
        if result.succeeded {
            return Ok(written(new, result.revision));
        }
        let current = find(&result.observed, &key).map(|e| pointer(table, e, result.revision)).transpose()?;
        match current {
            // The metadata location is ours alone: an earlier attempt of this call was applied.
            Some(current) if current.value == *new => Ok(current),
            Some(current) if current.mod_revision == expected => {
                let held = find(&result.observed, &turn_key).map(|e| e.mod_revision);
                match held == turn && !settling.is_empty() {
                    true => Err(CatalogError::Conflict { table: table.clone(), current: Some(current), resent }),
                    false => Err(CatalogError::NotYourTurn { table: table.clone(), turn: held.unwrap_or(0), resent }),
                }
            }
            current => Err(CatalogError::Conflict { table: table.clone(), current, resent }),
        }
    }

    /// Swaps a view's pointer, if its `mod_revision` is still `expected`.
    ///
    /// # Errors
    /// `Conflict` with the pointer as it is now, or the store's.
    pub async fn swap_view(
        &self,
        view: &TableIdent,
        expected: Revision,
        new: &TablePointer,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let key = view.view_key();
        let txn = Txn {
            when: vec![Compare::mod_revision(&key, expected)],
            then: vec![Op::put(&key, encode(new, &key)?)],
            otherwise: vec![],
        };
        let committed = self.commit(txn, deadline).await?;
        let (result, resent) = (committed.result, committed.resent);
        if result.succeeded {
            return Ok(written(new, result.revision));
        }
        match find(&result.observed, &key).map(|e| pointer(view, e, result.revision)).transpose()? {
            Some(current) if current.value == *new => Ok(current),
            current => Err(CatalogError::Conflict { table: view.clone(), current, resent }),
        }
    }

    /// Creates tables and swaps pointers, all in one transaction: all of it is done, or nothing. The next turn of none of
    /// them may be another's.
    ///
    /// # Errors
    /// `Conflict` or `NotYourTurn` for the first table that is not as expected; for one that is created as
    /// [`Catalog::create_table`]; the store's.
    pub async fn change_tables(
        &self,
        changes: &[TableChange],
        deadline: Instant,
    ) -> Result<Vec<Versioned<TablePointer>>> {
        self.change_tables_while(changes, &[], deadline).await
    }

    /// The same, if the pointers of `unchanged` are still at these revisions as well.
    ///
    /// # Errors
    /// As [`Catalog::change_tables`]; `Conflict` also for one of `unchanged`.
    pub async fn change_tables_while(
        &self,
        changes: &[TableChange],
        unchanged: &[(TableIdent, Revision)],
        deadline: Instant,
    ) -> Result<Vec<Versioned<TablePointer>>> {
        let mut in_doubt = false;
        for _ in 0..MAX_RACES {
            let (mut when, mut then) = (Vec::new(), Vec::new());
            when.extend(unchanged.iter().map(|(table, revision)| Compare::mod_revision(table.key(), *revision)));
            let mut namespaces = BTreeMap::new();
            for TableChange { table, expected, new } in changes {
                let key = table.key();
                then.push(Op::put(&key, encode(new, &key)?));
                match expected {
                    Some(expected) => {
                        when.push(Compare::mod_revision(&key, *expected));
                        when.push(Compare::absent(turn_key(new.uuid)));
                    }
                    None => {
                        when.push(Compare::absent(&key));
                        when.push(Compare::absent(table.view_key()));
                        when.extend(self.unclaimed(table.scope_path()));
                        let revision = self.namespace_revision(&table.namespace, deadline).await?;
                        namespaces.insert(table.namespace.key(), revision);
                    }
                }
            }
            when.extend(namespaces.into_iter().map(|(key, revision)| Compare::mod_revision(key, revision)));
            let committed = self.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
            let (result, resent) = (committed.result, committed.resent);
            if result.succeeded {
                return Ok(changes.iter().map(|change| written(&change.new, result.revision)).collect());
            }
            in_doubt |= resent;
            let current = |table: &TableIdent| {
                find(&result.observed, &table.key()).map(|e| pointer(table, e, result.revision)).transpose()
            };
            let now: Vec<_> = changes.iter().map(|change| current(&change.table)).collect::<Result<_>>()?;
            if changes.iter().zip(&now).all(|(change, now)| now.as_ref().is_some_and(|now| now.value == change.new)) {
                // The metadata locations are ours alone: an earlier attempt of this call was applied.
                return Ok(now.into_iter().flatten().collect());
            }
            for (table, revision) in unchanged {
                let now = current(table)?;
                if now.as_ref().is_none_or(|now| now.mod_revision != *revision) {
                    return Err(CatalogError::Conflict { table: table.clone(), current: now, resent: in_doubt });
                }
            }
            for (TableChange { table, expected, new }, now) in changes.iter().zip(now) {
                let table = table.clone();
                match (expected, now) {
                    (Some(expected), Some(now)) if now.mod_revision == *expected => {
                        if let Some(turn) = find(&result.observed, &turn_key(new.uuid)) {
                            let turn = turn.mod_revision;
                            return Err(CatalogError::NotYourTurn { table, turn, resent: in_doubt });
                        }
                    }
                    (Some(_), current) => {
                        return Err(CatalogError::Conflict { table, current, resent: in_doubt });
                    }
                    (None, Some(current)) if in_doubt => {
                        return Err(CatalogError::Conflict { table, current: Some(current), resent: true });
                    }
                    (None, Some(_)) => return Err(CatalogError::TableExists(table)),
                    (None, None) if find(&result.observed, &table.view_key()).is_some() => {
                        return Err(CatalogError::ViewExists(table));
                    }
                    (None, None) => {}
                }
            }
            claimed(&result)?;
        }
        Err(self.raced("changing several tables".to_owned()))
    }

    /// Claims the next turn to swap the pointer of the table with this uuid, for `claimant`, whose id is its own.
    /// Returns the claim; `None` if it is another's turn, or the store changes one key at a time: nobody has turns there.
    ///
    /// # Errors
    /// The store's.
    pub async fn claim_turn(&self, table: Uuid, claimant: Uuid, deadline: Instant) -> Result<Option<Revision>> {
        if !self.store.capabilities().multi_key {
            return Ok(None);
        }
        let key = turn_key(table);
        let committed = self.store.cas(&key, None, claimant.to_string().into(), deadline).await?;
        if committed.result.succeeded {
            return Ok(Some(committed.result.revision));
        }
        let held = find(&committed.result.observed, &key).filter(|e| e.value == claimant.to_string());
        Ok(held.map(|e| e.mod_revision))
    }

    /// The claim on the next turn, if there is one.
    ///
    /// # Errors
    /// The store's.
    pub async fn turn(&self, table: Uuid, deadline: Instant) -> Result<Option<Revision>> {
        let read = self.store.get(&turn_key(table), ReadOptions::default(), deadline).await?;
        Ok(read.value.map(|e| e.mod_revision))
    }

    /// Ends a claim, if it is still that one.
    ///
    /// # Errors
    /// The store's.
    pub async fn end_turn(&self, table: Uuid, claim: Revision, deadline: Instant) -> Result<()> {
        self.store.cas_delete(&turn_key(table), Token::at(claim), deadline).await.map(drop).map_err(Into::into)
    }

    /// Gives a table another name, in the same namespace or another one, whatever is committed to it meanwhile.
    ///
    /// # Errors
    /// `TableNotFound`, `NamespaceNotFound` (the new one), `TableExists`, `ViewExists`, `ScopeHeld`, or the store's.
    pub async fn rename_table(
        &self,
        from: &TableIdent,
        to: &TableIdent,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.rename(Kind::Table, from, to, deadline).await
    }

    /// Gives a view another name, as [`Catalog::rename_table`] does.
    ///
    /// # Errors
    /// As it.
    pub async fn rename_view(
        &self,
        from: &TableIdent,
        to: &TableIdent,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        self.rename(Kind::View, from, to, deadline).await
    }

    async fn rename(
        &self,
        kind: Kind,
        from: &TableIdent,
        to: &TableIdent,
        deadline: Instant,
    ) -> Result<Versioned<TablePointer>> {
        let keys = [kind.key(from), kind.key(to), kind.other().key(to), to.namespace.key()];
        let mut moved: Option<Uuid> = None;
        for _ in 0..MAX_RACES {
            let read = self.store.batch_get(&keys, ReadOptions::default(), deadline).await?;
            let there = find(&read.value, &keys[1]).map(|e| pointer(to, e, read.revision)).transpose()?;
            if let (Some(there), Some(moved)) = (&there, moved)
                && there.value.uuid == moved
            {
                // By an attempt of this call whose answer was lost.
                return Ok(there.clone());
            }
            let Some(entry) = find(&read.value, &keys[0]) else {
                return Err(kind.missing(from));
            };
            if there.is_some() {
                return Err(kind.exists(to));
            }
            if find(&read.value, &keys[2]).is_some() {
                return Err(kind.other().exists(to));
            }
            let Some(namespace) = find(&read.value, &keys[3]) else {
                return Err(CatalogError::NamespaceNotFound(to.namespace.clone()));
            };
            let current = pointer(from, entry, read.revision)?;
            let mut when = vec![
                Compare::mod_revision(&keys[0], entry.mod_revision),
                Compare::absent(&keys[1]),
                Compare::absent(&keys[2]),
                Compare::mod_revision(&keys[3], namespace.mod_revision),
            ];
            when.extend(self.unclaimed(from.scope_path()));
            when.extend(self.unclaimed(to.scope_path()));
            let then = vec![Op::delete(&keys[0]), Op::put(&keys[1], entry.value.clone())];
            let committed = self.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
            if committed.result.succeeded {
                return Ok(written(&current.value, committed.result.revision));
            }
            if committed.resent {
                moved = Some(current.value.uuid);
            }
            claimed(&committed.result)?;
        }
        Err(self.raced(format!("renaming {from} to {to}")))
    }

    /// Drops a table, if its `mod_revision` is still `expected`. Returns a revision at which it is gone.
    ///
    /// # Errors
    /// `Conflict` with the pointer as it is now, `TableNotFound`, `ScopeHeld`, or the store's.
    pub async fn drop_table(&self, table: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        self.remove(Kind::Table, table, expected, deadline).await
    }

    /// Drops a view, if its `mod_revision` is still `expected`. Returns a revision at which it is gone.
    ///
    /// # Errors
    /// As [`Catalog::drop_table`].
    pub async fn drop_view(&self, view: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        self.remove(Kind::View, view, expected, deadline).await
    }

    async fn remove(&self, kind: Kind, table: &TableIdent, expected: Revision, deadline: Instant) -> Result<Revision> {
        let key = kind.key(table);
        let mut when = vec![Compare::mod_revision(&key, expected)];
        when.extend(self.unclaimed(table.scope_path()));
        let txn = Txn { when, then: vec![Op::delete(&key)], otherwise: vec![] };
        let committed = self.commit(txn, deadline).await?;
        if committed.result.succeeded {
            return Ok(committed.result.revision);
        }
        let current =
            find(&committed.result.observed, &key).map(|e| pointer(table, e, committed.result.revision)).transpose()?;
        match current {
            // The entry expected is gone, and an attempt whose answer was lost may have removed it.
            None if committed.resent => Ok(committed.result.revision),
            None => Err(kind.missing(table)),
            Some(current) if current.mod_revision == expected => {
                claimed(&committed.result)?;
                Err(CatalogError::Conflict { table: table.clone(), current: Some(current), resent: committed.resent })
            }
            current => Err(CatalogError::Conflict { table: table.clone(), current, resent: committed.resent }),
        }
    }

    /// Demands that nobody holds a scope on this path, where the store has scopes.
    pub(crate) fn unclaimed(&self, path: String) -> Option<Compare> {
        self.store.capabilities().scopes.then(|| Compare::scope_free(path, None))
    }

    async fn namespace_revision(&self, namespace: &Namespace, deadline: Instant) -> Result<Revision> {
        let read = self.store.get(&namespace.key(), ReadOptions::default(), deadline).await?;
        read.value.map(|e| e.mod_revision).ok_or_else(|| CatalogError::NamespaceNotFound(namespace.clone()))
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

/// Whether a scope was in the way of a transaction that did not run.
pub(crate) fn claimed(result: &TxnResult) -> Result<()> {
    match result.conflicts.first() {
        Some(scope) => Err(CatalogError::ScopeHeld { path: scope.path.clone(), owner: scope.owner.to_string() }),
        None => Ok(()),
    }
}

fn namespace_record(namespace: &Namespace, entry: &KeyValue) -> Result<NamespaceRecord> {
    serde_json::from_slice(&entry.value)
        .map_err(|e| CatalogError::Damaged { what: format!("namespace {namespace}"), why: e.to_string() })
}

fn turn_key(table: Uuid) -> String {
    format!("/lake/turn/{table}")
}

pub(crate) fn find<'a>(entries: &'a [KeyValue], key: &str) -> Option<&'a KeyValue> {
    entries.iter().find(|e| e.key == key)
}

fn written(new: &TablePointer, revision: Revision) -> Versioned<TablePointer> {
    Versioned { value: new.clone(), mod_revision: revision, valid_through: revision }
}

/// The pointer that an entry holds, read at `revision`.
pub(crate) fn pointer(table: &TableIdent, entry: &KeyValue, revision: Revision) -> Result<Versioned<TablePointer>> {
    let value = serde_json::from_slice(&entry.value)
        .map_err(|e| CatalogError::Damaged { what: format!("table {table}"), why: e.to_string() })?;
    Ok(Versioned { value, mod_revision: entry.mod_revision, valid_through: revision })
}

pub(crate) fn encode(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| CatalogError::Damaged { what: what.to_owned(), why: e.to_string() })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::faulty::{FaultyStore, soon};

    fn pointer() -> TablePointer {
        let uuid = Uuid::new_v4();
        TablePointer { uuid, metadata_location: format!("file:///t-{uuid}/metadata/0.json"), previous_location: None }
    }

    fn setup() -> (Arc<FaultyStore>, Catalog, Namespace, TableIdent) {
        let store = Arc::new(FaultyStore::default());
        let namespace: Namespace = "a.b".parse().unwrap();
        let table = TableIdent::new(namespace.clone(), "t").unwrap();
        (store.clone(), Catalog::new(store), namespace, table)
    }

    /// The table, in its namespaces.
    async fn created(catalog: &Catalog, table: &TableIdent) -> Versioned<TablePointer> {
        for n in ["a", "a.b"] {
            catalog.create_namespace(&n.parse().unwrap(), BTreeMap::new(), soon()).await.unwrap();
        }
        catalog.create_table(table, &pointer(), soon()).await.unwrap()
    }

    #[tokio::test]
    async fn a_tree_of_namespaces_stays_a_tree() {
        let (_, catalog, nested, table) = setup();
        let parent: Namespace = "a".parse().unwrap();
        let create = |n: &Namespace| {
            let (catalog, n) = (catalog.clone(), n.clone());
            async move { catalog.create_namespace(&n, BTreeMap::new(), soon()).await }
        };
        assert_eq!(create(&nested).await, Err(CatalogError::NamespaceNotFound(parent.clone())));
        create(&parent).await.unwrap();
        create(&nested).await.unwrap();
        assert_eq!(create(&nested).await, Err(CatalogError::NamespaceExists(nested.clone())));
        catalog.create_table(&table, &pointer(), soon()).await.unwrap();
        assert_eq!(catalog.list_namespaces(soon()).await.unwrap(), [parent.clone(), nested.clone()]);
        assert_eq!(catalog.list_tables(&nested, soon()).await.unwrap(), ["t"]);
        assert_eq!(catalog.list_tables(&parent, soon()).await.unwrap(), [""; 0]);

        let drop = |n: &Namespace| {
            let (catalog, n) = (catalog.clone(), n.clone());
            async move { catalog.drop_namespace(&n, soon()).await }
        };
        assert_eq!(drop(&parent).await, Err(CatalogError::NamespaceNotEmpty(parent.clone())));
        assert_eq!(drop(&nested).await, Err(CatalogError::NamespaceNotEmpty(nested.clone())));
        let loaded = catalog.load_table(&table, soon()).await.unwrap().unwrap();
        catalog.drop_table(&table, loaded.mod_revision, soon()).await.unwrap();
        drop(&nested).await.unwrap();
        assert_eq!(drop(&nested).await, Err(CatalogError::NamespaceNotFound(nested.clone())));
        drop(&parent).await.unwrap();
        let orphan = catalog.create_table(&table, &pointer(), soon()).await;
        assert_eq!(orphan, Err(CatalogError::NamespaceNotFound(nested)));
    }

    #[tokio::test]
    async fn a_namespace_is_dropped_with_all_that_is_in_it() {
        let (_, catalog, namespace, table) = setup();
        created(&catalog, &table).await;
        let view = TableIdent::new(namespace.clone(), "v").unwrap();
        catalog.create_view(&view, &pointer(), soon()).await.unwrap();
        let parent: Namespace = "a".parse().unwrap();
        let nested = catalog.drop_namespace_and_contents(&parent, soon()).await;
        assert_eq!(nested, Err(CatalogError::NamespaceNotEmpty(parent.clone())));
        assert_eq!(catalog.drop_namespace_and_contents(&namespace, soon()).await, Ok(2));
        assert_eq!(catalog.load_table(&table, soon()).await, Ok(None));
        assert_eq!(catalog.load_view(&view, soon()).await, Ok(None));
        assert_eq!(catalog.drop_namespace_and_contents(&parent, soon()).await, Ok(0));
        let gone = catalog.drop_namespace_and_contents(&parent, soon()).await;
        assert_eq!(gone, Err(CatalogError::NamespaceNotFound(parent)));
    }

    #[tokio::test]
    async fn several_pointers_change_while_others_stay() {
        let (_, catalog, namespace, table) = setup();
        let first = created(&catalog, &table).await;
        let read = TableIdent::new(namespace, "read").unwrap();
        let seen = catalog.create_table(&read, &pointer(), soon()).await.unwrap();
        let change = |expected, new| TableChange { table: table.clone(), expected: Some(expected), new };
        let changes = [change(first.mod_revision, pointer())];
        let guards = [(read.clone(), seen.mod_revision)];
        let changed = catalog.change_tables_while(&changes, &guards, soon()).await.unwrap();
        let moved = catalog.swap_table(&read, seen.mod_revision, &pointer(), None, soon()).await.unwrap();
        let late = [change(changed[0].mod_revision, pointer())];
        let refused = catalog.change_tables_while(&late, &guards, soon()).await;
        assert_eq!(refused, Err(CatalogError::Conflict { table: read, current: Some(moved), resent: false }));
        assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, changes[0].new);
        // Of two operations that a change is a part of, either stops it.
        let operation = |id: &str| Operation::new("test", id, id.to_owned()).unwrap();
        let once = catalog.within(operation("a")).within(operation("b"));
        once.change_tables(&late, soon()).await.unwrap();
        let again = catalog.within(operation("c")).within(operation("b")).change_tables(&late, soon()).await;
        assert_eq!(again, Err(CatalogError::AlreadyDone("b".into())));
        assert_eq!(catalog.outcome("test", "c", soon()).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_lost_race_returns_what_won() {
        let (_, catalog, _, table) = setup();
        let first = created(&catalog, &table).await;
        assert_eq!(
            catalog.create_table(&table, &pointer(), soon()).await,
            Err(CatalogError::TableExists(table.clone()))
        );
        let won = catalog.swap_table(&table, first.mod_revision, &pointer(), None, soon()).await.unwrap();
        let lost = catalog.swap_table(&table, first.mod_revision, &pointer(), None, soon()).await;
        assert_eq!(
            lost,
            Err(CatalogError::Conflict { table: table.clone(), current: Some(won.clone()), resent: false })
        );
        assert!(catalog.drop_table(&table, first.mod_revision, soon()).await.is_err());
        catalog.drop_table(&table, won.mod_revision, soon()).await.unwrap();
        assert_eq!(catalog.drop_table(&table, won.mod_revision, soon()).await, Err(CatalogError::TableNotFound(table)));
    }

    #[tokio::test]
    async fn a_lost_answer_is_not_taken_for_a_lost_race() {
        let (store, catalog, nested, table) = setup();
        let lose = || store.lose_answers.store(1, Ordering::SeqCst);
        catalog.create_namespace(&"a".parse().unwrap(), BTreeMap::new(), soon()).await.unwrap();
        lose();
        catalog.create_namespace(&nested, BTreeMap::new(), soon()).await.unwrap();
        lose();
        let created = catalog.create_table(&table, &pointer(), soon()).await.unwrap();
        lose();
        let swapped = catalog.swap_table(&table, created.mod_revision, &pointer(), None, soon()).await.unwrap();
        assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, swapped.value);
        lose();
        catalog.drop_table(&table, swapped.mod_revision, soon()).await.unwrap();
        lose();
        catalog.drop_namespace(&nested, soon()).await.unwrap();
    }

    #[tokio::test]
    async fn a_table_is_renamed_once() {
        let (store, catalog, nested, table) = setup();
        let first = created(&catalog, &table).await;
        let parent: Namespace = "a".parse().unwrap();
        let to = |namespace: &Namespace, name: &str| TableIdent::new(namespace.clone(), name).unwrap();
        let rename = async |from: &TableIdent, to: &TableIdent| catalog.rename_table(from, to, soon()).await;

        let moved = to(&parent, "u");
        store.lose_answers.store(1, Ordering::SeqCst);
        let renamed = rename(&table, &moved).await.unwrap();
        assert_eq!(renamed.value, first.value);
        assert_eq!(catalog.load_table(&table, soon()).await.unwrap(), None);
        assert_eq!(catalog.load_table(&moved, soon()).await.unwrap().unwrap().value, first.value);
        assert_eq!(rename(&table, &moved).await, Err(CatalogError::TableNotFound(table.clone())));
        assert_eq!(rename(&moved, &moved).await, Err(CatalogError::TableExists(moved.clone())));
        catalog.create_table(&table, &pointer(), soon()).await.unwrap();
        assert_eq!(rename(&moved, &table).await, Err(CatalogError::TableExists(table.clone())));
        let nowhere: Namespace = "nowhere".parse().unwrap();
        assert_eq!(rename(&moved, &to(&nowhere, "t")).await, Err(CatalogError::NamespaceNotFound(nowhere)));
        // What was the table's under its old name is no longer to be had there.
        let late = catalog.swap_table(&table, first.mod_revision, &pointer(), None, soon()).await;
        assert!(matches!(late, Err(CatalogError::Conflict { .. })), "{late:?}");
        assert_eq!(catalog.list_tables(&nested, soon()).await.unwrap(), ["t"]);
    }

    #[tokio::test]
    async fn tables_and_views_share_their_names() {
        let (store, catalog, nested, table) = setup();
        let first = created(&catalog, &table).await;
        let view = TableIdent::new(nested.clone(), "v").unwrap();
        assert_eq!(
            catalog.create_view(&table, &pointer(), soon()).await,
            Err(CatalogError::TableExists(table.clone()))
        );
        store.lose_answers.store(1, Ordering::SeqCst);
        let made = catalog.create_view(&view, &pointer(), soon()).await.unwrap();
        assert_eq!(catalog.create_table(&view, &pointer(), soon()).await, Err(CatalogError::ViewExists(view.clone())));
        assert_eq!(catalog.rename_table(&table, &view, soon()).await, Err(CatalogError::ViewExists(view.clone())));
        assert_eq!(catalog.rename_view(&view, &table, soon()).await, Err(CatalogError::TableExists(table.clone())));
        assert_eq!(catalog.list_views(&nested, soon()).await.unwrap(), ["v"]);
        assert_eq!(catalog.list_tables(&nested, soon()).await.unwrap(), ["t"]);
        store.lose_answers.store(1, Ordering::SeqCst);
        let swapped = catalog.swap_view(&view, made.mod_revision, &pointer(), soon()).await.unwrap();
        let stale = catalog.swap_view(&view, made.mod_revision, &pointer(), soon()).await;
        assert!(matches!(stale, Err(CatalogError::Conflict { resent: false, .. })), "{stale:?}");
        assert_eq!(catalog.load_view(&view, soon()).await.unwrap().unwrap().value, swapped.value);
        assert!(matches!(catalog.drop_namespace(&nested, soon()).await, Err(CatalogError::NamespaceNotEmpty(_))));
        catalog.drop_view(&view, swapped.mod_revision, soon()).await.unwrap();
        assert_eq!(catalog.drop_view(&view, swapped.mod_revision, soon()).await, Err(CatalogError::ViewNotFound(view)));
        assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, first.value);
    }

    #[tokio::test]
    async fn several_tables_change_together() {
        let (store, catalog, nested, table) = setup();
        let first = created(&catalog, &table).await;
        let other = TableIdent::new(nested, "u").unwrap();
        let change = |table: &TableIdent, expected, new: &TablePointer| TableChange {
            table: table.clone(),
            expected,
            new: new.clone(),
        };
        let (a, b) = (TablePointer { uuid: first.value.uuid, ..pointer() }, pointer());
        store.lose_answers.store(1, Ordering::SeqCst);
        let both = [change(&table, Some(first.mod_revision), &a), change(&other, None, &b)];
        let made = catalog.change_tables(&both, soon()).await.unwrap();
        assert_eq!((&made[0].value, &made[1].value), (&a, &b));
        assert_eq!(made[0].mod_revision, made[1].mod_revision, "one transaction");

        let next = TablePointer { uuid: b.uuid, ..pointer() };
        let late = [change(&other, Some(made[1].mod_revision), &next), change(&table, Some(first.mod_revision), &a)];
        let lost = catalog.change_tables(&late, soon()).await.unwrap_err();
        assert!(matches!(&lost, CatalogError::Conflict { table: t, resent: false, .. } if *t == table), "{lost:?}");
        assert_eq!(catalog.load_table(&other, soon()).await.unwrap().unwrap().value, b, "nothing of it was done");
        let there = catalog.change_tables(&[change(&other, None, &next)], soon()).await;
        assert_eq!(there, Err(CatalogError::TableExists(other.clone())));
        let claim = catalog.claim_turn(b.uuid, Uuid::new_v4(), soon()).await.unwrap().unwrap();
        let early = catalog.change_tables(&[change(&other, Some(made[1].mod_revision), &next)], soon()).await;
        assert_eq!(early, Err(CatalogError::NotYourTurn { table: other, turn: claim, resent: false }));
    }

    #[tokio::test]
    async fn an_operation_is_done_once() {
        let (store, catalog, _, table) = setup();
        let first = created(&catalog, &table).await;
        let operation = |id: &str| Operation::new("test", id, format!("outcome of {id}")).unwrap();
        let swap = |id: &str, expected, new: &TablePointer| {
            let (catalog, table, new) = (catalog.within(operation(id)), table.clone(), new.clone());
            async move { catalog.swap_table(&table, expected, &new, None, soon()).await }
        };
        let mut next = [pointer(), pointer(), pointer()];
        next.iter_mut().for_each(|next| next.uuid = first.value.uuid);
        let made = swap("1", first.mod_revision, &next[0]).await.unwrap();
        let outcome = catalog.outcome("test", "1", soon()).await.unwrap();
        assert_eq!(outcome.as_deref(), Some(&b"outcome of 1"[..]));
        let again = swap("1", made.mod_revision, &next[1]).await;
        assert_eq!(again, Err(CatalogError::AlreadyDone("outcome of 1".into())));
        assert_eq!(catalog.load_table(&table, soon()).await.unwrap().unwrap().value, next[0]);
        // An answer that is lost is not taken for another's.
        store.lose_answers.store(1, Ordering::SeqCst);
        let made = swap("4", made.mod_revision, &next[1]).await.unwrap();
        assert_eq!(made.value, next[1]);
        // What is not done leaves nothing.
        assert!(matches!(swap("2", first.mod_revision, &next[2]).await, Err(CatalogError::Conflict { .. })));
        assert_eq!(catalog.outcome("test", "2", soon()).await.unwrap(), None);

        store.lose_answers.store(1, Ordering::SeqCst);
        assert_eq!(catalog.leave_outcome(&operation("3"), soon()).await.unwrap(), "outcome of 3");
        let other = Operation::new("test", "3", "another").unwrap();
        assert_eq!(catalog.leave_outcome(&other, soon()).await.unwrap(), "outcome of 3");
        assert!(Operation::new("test", "a/b", "").is_err());
        assert_eq!(catalog.forget_outcomes("test", |kept| kept.ends_with(b"3"), soon()).await.unwrap(), 1);
        assert_eq!(catalog.outcome("test", "3", soon()).await.unwrap(), None);
        assert!(catalog.outcome("test", "1", soon()).await.unwrap().is_some());
    }

    #[tokio::test]
    async fn properties_of_a_namespace_change_one_by_one() {
        let (store, catalog, _, _) = setup();
        let namespace: Namespace = "a".parse().unwrap();
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
        };
        let names = |names: &[&str]| -> BTreeSet<String> { names.iter().map(|n| (*n).to_owned()).collect() };
        let missing = catalog.update_namespace(&namespace, &names(&[]), &map(&[("k", "v")]), soon()).await;
        assert_eq!(missing, Err(CatalogError::NamespaceNotFound(namespace.clone())));
        assert_eq!(catalog.namespace_properties(&namespace, soon()).await.unwrap(), None);
        catalog.create_namespace(&namespace, map(&[("a", "1"), ("b", "2")]), soon()).await.unwrap();
        store.lose_answers.store(1, Ordering::SeqCst);
        let removed = catalog.update_namespace(&namespace, &names(&["a", "x"]), &map(&[("b", "3")]), soon()).await;
        assert_eq!(removed.unwrap(), names(&["a"]));
        assert_eq!(catalog.namespace_properties(&namespace, soon()).await.unwrap(), Some(map(&[("b", "3")])));
    }

    #[tokio::test]
    async fn a_claimed_turn_is_the_claimants() {
        let (_, catalog, _, table) = setup();
        let first = created(&catalog, &table).await;
        let uuid = first.value.uuid;
        let next = || TablePointer { uuid, ..pointer() };
        let [mine, theirs] = [Uuid::new_v4(), Uuid::new_v4()];
        let claim = catalog.claim_turn(uuid, mine, soon()).await.unwrap().unwrap();
        assert_eq!(catalog.claim_turn(uuid, mine, soon()).await.unwrap(), Some(claim), "asked for again");
        assert_eq!(catalog.claim_turn(uuid, theirs, soon()).await.unwrap(), None);
        let early = catalog.swap_table(&table, first.mod_revision, &next(), None, soon()).await;
        assert_eq!(early, Err(CatalogError::NotYourTurn { table: table.clone(), turn: claim, resent: false }));
        let swapped = catalog.swap_table(&table, first.mod_revision, &next(), Some(claim), soon()).await.unwrap();
        assert_eq!(catalog.turn(uuid, soon()).await.unwrap(), None, "the claim ends with the swap");

        // One that its claimant leaves behind is ended by who waits for it, and then does not count any more.
        let left = catalog.claim_turn(uuid, mine, soon()).await.unwrap().unwrap();
        assert_eq!(catalog.turn(uuid, soon()).await.unwrap(), Some(left));
        catalog.end_turn(uuid, left, soon()).await.unwrap();
        let late = catalog.swap_table(&table, swapped.mod_revision, &next(), Some(left), soon()).await;
        assert!(matches!(late, Err(CatalogError::NotYourTurn { turn: 0, .. })), "{late:?}");
        catalog.swap_table(&table, swapped.mod_revision, &next(), None, soon()).await.unwrap();
    }

    #[tokio::test]
    async fn metadata_has_one_name() {
        let (store, catalog, _, table) = setup();
        let first = created(&catalog, &table).await;
        let uuid = first.value.uuid;
        let twin = TableIdent::new(table.namespace.clone(), "twin").unwrap();
        let older = TablePointer { uuid, ..pointer() };
        let there = Err(CatalogError::Registered(table.clone()));
        assert_eq!(catalog.register_table(&twin, &older, None, soon()).await, there);
        let other = catalog.create_table(&twin, &pointer(), soon()).await.unwrap();
        assert_eq!(catalog.register_table(&twin, &older, Some(other.mod_revision), soon()).await, there);
        assert_eq!(catalog.turn(uuid, soon()).await.unwrap(), None, "no claim is left");

        // Under its own name it takes another version, and under another once it is dropped; also when an answer is lost.
        let back = catalog.register_table(&table, &older, Some(first.mod_revision), soon()).await.unwrap();
        assert_eq!(
            catalog.register_table(&table, &older, None, soon()).await,
            Err(CatalogError::TableExists(table.clone()))
        );
        assert_eq!(catalog.turn(uuid, soon()).await.unwrap(), None, "no claim is left");
        catalog.drop_table(&table, back.mod_revision, soon()).await.unwrap();
        store.lose_answers.store(1, Ordering::SeqCst);
        let moved = catalog.register_table(&twin, &older, Some(other.mod_revision), soon()).await.unwrap();
        assert_eq!(moved.value, older);
        assert_eq!(catalog.turn(uuid, soon()).await.unwrap(), None, "no claim is left");

        // Two at the same time.
        catalog.drop_table(&twin, moved.mod_revision, soon()).await.unwrap();
        let both = tokio::join!(
            catalog.register_table(&table, &older, None, soon()),
            catalog.register_table(&twin, &older, None, soon())
        );
        assert_ne!(both.0.is_ok(), both.1.is_ok(), "{both:?}");
        let held = catalog.claim_turn(Uuid::nil(), Uuid::new_v4(), soon()).await.unwrap().unwrap();
        let nil = TablePointer { uuid: Uuid::nil(), ..pointer() };
        let third = TableIdent::new(table.namespace.clone(), "third").unwrap();
        let busy = catalog.register_table(&third, &nil, None, soon()).await;
        assert_eq!(busy, Err(CatalogError::NotYourTurn { table: third.clone(), turn: held, resent: false }));
    }

    #[tokio::test]
    async fn more_tables_than_one_read_takes_are_loaded_at_one_revision() {
        let (_, catalog, nested, table) = setup();
        let first = created(&catalog, &table).await;
        let mut tables: Vec<_> = (0..3000).map(|n| TableIdent::new(nested.clone(), format!("t{n}")).unwrap()).collect();
        tables.push(table);
        let (revision, pointers) = catalog.load_tables(&tables, ReadOptions::default(), soon()).await.unwrap();
        assert_eq!((revision, pointers.len()), (first.mod_revision, tables.len()));
        assert_eq!(pointers.iter().flatten().collect::<Vec<_>>(), [&first]);
    }

    #[test]
    fn names_that_would_break_keys_are_refused() {
        for name in ["", "a/b", "a\u{1f}b", "a\nb", &"x".repeat(256)] {
            assert!(matches!(Namespace::new([name]), Err(CatalogError::InvalidName { .. })), "{name:?}");
        }
        assert!(Namespace::new([""; 0]).is_err());
        assert!(Namespace::new(vec!["x"; 17]).is_err());
        assert_eq!("a.b".parse::<Namespace>().unwrap().levels(), ["a", "b"]);
    }
}
