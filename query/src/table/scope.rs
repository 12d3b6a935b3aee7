//! On whose behalf tables are read and changed.
//!
//! Statements work on [`super::Tables`] and do not know: most commit what they do at once. One with an operation id leaves its
//! outcome in the transaction of its commit ([`Once`]). One inside of a transaction reads what that has pinned and staged,
//! and commits nothing itself ([`Staged`]). A query may read versions that were settled before ([`Pins`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lake_client::catalog::Operation;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::catalog_error;
use super::pins::Pins;
use super::staged::Staged;
use crate::error::{Error, Result};
use crate::outcomes::now_ms;

/// The property of a snapshot's summary with the id of the operation that made it.
pub const OPERATION_NOTE: &str = "lake.operation-id";
/// The property of a snapshot's summary with the id of the transaction that made it.
pub const TRANSACTION_NOTE: &str = "lake.transaction-id";

/// See the module.
#[derive(Debug, Clone, Default)]
pub enum Scope {
    #[default]
    Plain,
    Once(Arc<Once>),
    Within(Arc<Staged>),
    /// A query on versions that were settled before.
    Pinned(Arc<Pins>),
}

/// A statement or a transaction that is made once, by its id.
#[derive(Debug)]
pub struct Once {
    domain: &'static str,
    id: String,
    at_ms: u64,
    /// This attempt's alone.
    run: Uuid,
    /// Tells the statement from another.
    statement: AtomicU64,
    /// What the statement answers once it is committed.
    count: AtomicU64,
}

/// What became of an operation, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    pub at_ms: u64,
    pub run: Uuid,
    pub statement: u64,
    pub count: u64,
    /// Kind and message of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<(String, String)>,
}

impl Once {
    /// An operation of this id in a domain, told from others by `statement`.
    pub fn new(domain: &'static str, id: &str, statement: u64) -> Self {
        let (at_ms, run) = (now_ms(), Uuid::new_v4());
        let (statement, count) = (AtomicU64::new(statement), AtomicU64::new(0));
        Self { domain, id: id.to_owned(), at_ms, run, statement, count }
    }

    pub fn domain(&self) -> &'static str {
        self.domain
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn statement(&self) -> u64 {
        self.statement.load(Ordering::Relaxed)
    }

    /// What the answer will be: said before the commit begins.
    pub fn will_answer(&self, count: u64) {
        self.count.store(count, Ordering::Relaxed);
    }

    /// Of a transaction, whose statements are known only as they come.
    pub fn set_statement(&self, statement: u64) {
        self.statement.store(statement, Ordering::Relaxed);
    }

    /// As it is kept: done, or refused.
    pub fn outcome(&self, refusal: Option<(String, String)>) -> Outcome {
        let count = self.count.load(Ordering::Relaxed);
        Outcome { at_ms: self.at_ms, run: self.run, statement: self.statement(), count, refusal }
    }

    /// The record of that.
    ///
    /// # Errors
    /// `Invalid` if the id cannot be one.
    pub fn record(&self, refusal: Option<(String, String)>) -> Result<Operation> {
        let bytes = serde_json::to_vec(&self.outcome(refusal))
            .map_err(|e| Error::internal(format!("writing the outcome of operation {}: {e}", self.id)))?;
        Operation::new(self.domain, &self.id, bytes).map_err(|e| catalog_error("naming an operation", e))
    }

    /// Whether an outcome was left by this very attempt.
    pub fn left(&self, outcome: &Outcome) -> bool {
        outcome.run == self.run
    }
}

impl Outcome {
    /// # Errors
    /// `Unknown` if what is kept is not what lake writes.
    pub fn read(id: &str, kept: &[u8]) -> Result<Self> {
        serde_json::from_slice(kept)
            .map_err(|e| Error::unknown(format!("the outcome kept of operation {id} is damaged: {e}")))
    }
}

impl Scope {
    /// Whether changes are staged for a transaction that is still open.
    pub fn is_staged(&self) -> bool {
        matches!(self, Scope::Within(_))
    }

    /// What the summary of a snapshot says of it.
    pub fn notes(&self) -> HashMap<String, String> {
        match self {
            Scope::Plain | Scope::Pinned(_) => HashMap::new(),
            Scope::Once(once) => HashMap::from([(OPERATION_NOTE.to_owned(), once.id.clone())]),
            Scope::Within(staged) => staged.notes(),
        }
    }
}
