//! Why a catalog call failed.

use std::time::Duration;

use bytes::Bytes;
use lake_proto::kv::Revision;

use super::{Namespace, TableIdent, TablePointer, Versioned};
use crate::procedures::is_record;
use crate::store::{Applied, Error};

/// Why a catalog call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    #[error("invalid name {name:?}: {why}")]
    InvalidName { name: String, why: String },
    #[error("namespace {0} does not exist")]
    NamespaceNotFound(Namespace),
    #[error("namespace {0} exists already")]
    NamespaceExists(Namespace),
    #[error("namespace {0} is not empty: drop what is in it first, and the schemas nested in it, which CASCADE leaves")]
    NamespaceNotEmpty(Namespace),
    #[error("namespace {0} is a warehouse: remove that (`lake meta warehouse remove`)")]
    IsWarehouse(Namespace),
    #[error("table {0} does not exist")]
    TableNotFound(TableIdent),
    #[error("table {0} exists already")]
    TableExists(TableIdent),
    /// What is to be made has the uuid of a table that there is.
    #[error(
        "table {0} exists and has that uuid, and a table has one name: drop that first, and its objects stay; nothing was made"
    )]
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
    /// What the caller does is another's to do by now ([`Catalog::guarded`]).
    #[error("what this was done for is another's by now, or its lease has ended; {}", fate(.resent))]
    Fenced {
        /// An earlier attempt of this call may have been applied before.
        resent: bool,
    },
    /// Another writer changed the pointer first.
    #[error("{table} was changed by another writer{}", doubt(.resent))]
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
    /// An attempt of this call, whose answer was lost, may have been applied, and what was met since does not tell.
    #[error(
        "whether it was done is unknown: an answer was lost, and then: {met}; look at what is there before you repeat it"
    )]
    InDoubt { met: String },
    /// The stored bytes are not what lake writes.
    #[error("the record of {what} in the metadata is damaged: {why}")]
    Damaged { what: String, why: String },
    #[error(transparent)]
    Store(#[from] Error),
}

/// What is known of a change that was refused now, and may have been sent before.
fn fate(resent: &bool) -> &'static str {
    match resent {
        true => "whether it was changed by an attempt before is unknown",
        false => "nothing was changed",
    }
}

/// What is said besides, of a change that may have been made before.
fn doubt(resent: &bool) -> &'static str {
    if *resent { "; whether an attempt before was applied is unknown" } else { "" }
}

impl CatalogError {
    /// Whether the change that failed may have been made.
    pub fn applied(&self) -> Applied {
        match self {
            CatalogError::Store(e) => e.applied(),
            CatalogError::InDoubt { .. }
            | CatalogError::Conflict { resent: true, .. }
            | CatalogError::NotYourTurn { resent: true, .. }
            | CatalogError::Fenced { resent: true } => Applied::Unknown,
            _ => Applied::No,
        }
    }

    /// The same error of a call of which an attempt before it may have been applied: it does not say that nothing was done.
    pub fn after_doubt(self, in_doubt: bool) -> Self {
        if !in_doubt || self.applied() == Applied::Unknown {
            return self;
        }
        let met = match self {
            // What was left says that it is done. A procedure's record does not say by whom.
            CatalogError::AlreadyDone(left) if !left.is_empty() && !is_record(&left) => {
                return CatalogError::AlreadyDone(left);
            }
            CatalogError::AlreadyDone(_) => "the procedure that it is a part of has gone on".to_owned(),
            CatalogError::Store(error) => match error.with_applied(Applied::Unknown) {
                error if error.applied() == Applied::Unknown => return CatalogError::Store(error),
                error => error.to_string(),
            },
            // The words of these say that nothing was done.
            CatalogError::ScopeHeld { path, owner } => format!("{path} is held by {owner} for structural work"),
            CatalogError::Registered(other) => format!("table {other} exists and has that uuid"),
            CatalogError::Fenced { .. } => {
                "what this was done for is another's by now, or its lease has ended".to_owned()
            }
            CatalogError::Conflict { table, .. } => format!("{table} was changed by another writer"),
            other => other.to_string(),
        };
        CatalogError::InDoubt { met }
    }
}

pub(super) type Result<T, E = CatalogError> = std::result::Result<T, E>;
