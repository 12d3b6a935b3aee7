//! Operations whose outcome is kept, so that asking for them again changes nothing (semantics, section 4).
//!
//! An outcome is left in the transaction that makes the operation's change, which demands that there is none. Whoever asks
//! again finds it, and nothing is changed. Outcomes stay until they are forgotten: by whoever knows that nobody asks any more,
//! or once they were kept for long ([`super::kept`]).
//!
//! What is left may also be a procedure ([`crate::procedures`]), which begins or changes with the change that it is a part of.

use std::time::Instant;

use bytes::Bytes;
use lake_proto::kv::{Compare, Expected, Op, Revision, Txn, TxnResult};

use super::error::Result;
use super::names::validate_name;
use super::pointers::find;
use super::{Catalog, CatalogError};
use crate::procedures::Record;
use crate::store::{Committed, ReadOptions};

/// Keys of the outcomes of operations begin so.
const OPERATIONS: &str = "/lake/op/";
/// Outcomes that are forgotten in one transaction.
const FORGOTTEN_AT_A_TIME: usize = 500;

/// An operation whose outcome is kept, so that asking for it again changes nothing (semantics, section 4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    key: String,
    /// What is kept if it is done.
    outcome: Bytes,
    /// Of what is there before; `None`: nothing is.
    expected: Option<Revision>,
}

impl Operation {
    /// An operation of this id, unique within its domain, that will have had this outcome once it is done.
    ///
    /// # Errors
    /// `InvalidName` if one of the two is not a valid name.
    pub fn new(domain: &str, id: &str, outcome: impl Into<Bytes>) -> Result<Self> {
        Ok(Self { key: operation_key(domain, id)?, outcome: outcome.into(), expected: None })
    }

    /// The submission of a procedure without scopes, as a part of a change: its record is what is left.
    pub fn submitting(id: &str, record: &Record) -> Self {
        Self { key: crate::procedures::key(id), outcome: record.to_bytes(), expected: None }
    }

    /// The change of a procedure without scopes that was read at `revision`, as a part of another change.
    pub fn changing(id: &str, revision: Revision, record: &Record) -> Self {
        Self { expected: Some(revision), ..Self::submitting(id, record) }
    }
}

/// What the keys of a domain's outcomes begin with.
pub(super) fn operations_of(domain: &str) -> String {
    format!("{OPERATIONS}{domain}/")
}

/// The key of an operation's outcome.
pub(super) fn operation_key(domain: &str, id: &str) -> Result<String> {
    validate_name(domain)?;
    validate_name(id)?;
    Ok(operations_of(domain) + id)
}

impl Catalog {
    /// A handle whose changes are this operation, besides those that they are already: the first that is made leaves its
    /// outcome, in the same transaction, and where an outcome is found nothing is changed ([`CatalogError::AlreadyDone`]).
    pub fn within(&self, operation: Operation) -> Self {
        let mut operations = self.operations.clone();
        operations.push(operation);
        Self { operations, ..self.clone() }
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
        let kept = self.store.list_all(&operations_of(domain), ReadOptions::default(), deadline).await?;
        let old: Vec<_> = kept.value.into_iter().filter(|e| old(&e.value)).map(|e| (e.key, e.mod_revision)).collect();
        self.forget(&old, deadline).await?;
        Ok(old.len())
    }

    /// Forgets outcomes, by their keys and the revisions at which they were read. What is no longer as it was read stays, and
    /// what goes with it in one transaction.
    pub(super) async fn forget(&self, read: &[(String, Revision)], deadline: Instant) -> Result<()> {
        for some in read.chunks(FORGOTTEN_AT_A_TIME) {
            let when = some.iter().map(|(key, revision)| Compare::mod_revision(key, *revision)).collect();
            let then = some.iter().map(|(key, _)| Op::delete(key)).collect();
            self.store.commit(Txn { when, then, otherwise: vec![] }, deadline).await?;
        }
        Ok(())
    }

    /// Whether a transaction that did not run found what each operation, if there is any, would have left.
    pub(super) fn have_left(&self, result: &TxnResult) -> bool {
        let has_left = |operation: &Operation| {
            find(&result.observed, &operation.key).is_some_and(|there| there.value == operation.outcome)
        };
        self.operations.iter().all(has_left)
    }

    /// Makes a transaction a part of the operations, if there are any.
    pub(crate) async fn commit(&self, mut txn: Txn, deadline: Instant) -> Result<Committed> {
        for operation in &self.operations {
            let expected = operation.expected.map_or(Expected::Absent, Expected::ModRevision);
            txn.when.push(Compare::expected(&operation.key, expected));
            txn.then.push(Op::put(&operation.key, operation.outcome.clone()));
        }
        txn.when.extend(self.guards.iter().cloned());
        let when = if self.guards.is_empty() { Vec::new() } else { txn.when.clone() };
        let committed = self.store.commit(txn, deadline).await?;
        if self.is_fenced(&when, &committed.result) {
            let resent = committed.resent && self.have_left(&committed.result);
            return Err(CatalogError::Fenced { resent });
        }
        for operation in &self.operations {
            match find(&committed.result.observed, &operation.key) {
                // By an attempt of this very call whose answer was lost: the caller finds its effect.
                Some(there) if committed.resent && there.value == operation.outcome => {}
                // It is not what was in the way.
                Some(there) if operation.expected == Some(there.mod_revision) => {}
                Some(there) if !committed.result.succeeded => {
                    return Err(CatalogError::AlreadyDone(there.value.clone()).after_doubt(committed.resent));
                }
                None if !committed.result.succeeded && operation.expected.is_some() => {
                    return Err(CatalogError::AlreadyDone(Bytes::new()).after_doubt(committed.resent));
                }
                _ => {}
            }
        }
        Ok(committed)
    }

    /// Whether an attempt before the one that did not run may have been applied.
    pub(super) fn is_in_doubt(&self, committed: &Committed) -> bool {
        committed.resent && !committed.result.succeeded && self.have_left(&committed.result)
    }
}
