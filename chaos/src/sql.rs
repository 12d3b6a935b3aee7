//! SQL as fault runs need it. The harness speaks to query nodes over the wire, and knows neither Flight SQL nor Arrow: whoever
//! starts a run brings a client of them as a [`Front`].
//!
//! What an error says of the change that it ended is kept in four words, [`What`]; that is how a history records it.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

/// A way to query nodes.
#[async_trait]
pub trait Front: Debug + Send + Sync {
    /// A session at a query node.
    ///
    /// # Errors
    /// It cannot be reached.
    async fn connect(&self, endpoint: &str) -> Result<Box<dyn Session>, Failure>;
}

/// How much longer than the node a question waits for its answer: the node's words are better.
const GRACE: Duration = Duration::from_millis(500);

/// One question, in a session of its own.
///
/// # Errors
/// As [`Session::run`]; and no answer has come within that time.
pub async fn ask(front: &dyn Front, endpoint: &str, sql: &str, within: Duration) -> Result<Answer, Failure> {
    let statement = Statement { sql: sql.to_owned(), operation: None, timeout: within };
    let asked = async { front.connect(endpoint).await?.run(&statement).await };
    let asked = tokio::time::timeout(within + GRACE, asked).await;
    asked.unwrap_or_else(|_| Err(Failure::unanswered(within + GRACE)))
}

/// One client's session: what BEGIN opens is open for its next statements.
#[async_trait]
pub trait Session: Debug + Send + Sync {
    /// Runs a statement to its last row. Cancel-safe: a statement that is not waited for may have its effect.
    ///
    /// # Errors
    /// It did not succeed, or nobody knows.
    async fn run(&mut self, statement: &Statement) -> Result<Answer, Failure>;

    /// What names the transaction that BEGIN has opened, to any node.
    fn transaction(&self) -> Option<String>;

    /// Goes on with that transaction, or with none: it is left as it is.
    fn set_transaction(&mut self, handle: Option<String>);
}

/// What is to be run.
#[derive(Debug, Clone)]
pub struct Statement {
    pub sql: String,
    /// The operation id under which it is made once.
    pub operation: Option<String>,
    /// When the node is to give up.
    pub timeout: Duration,
}

/// What a statement has brought.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    pub rows: Vec<Vec<Value>>,
    /// How old the rows are, if the node says that they may be older than they should.
    pub stale: Option<Duration>,
}

/// One value of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Null,
    Int(i64),
    Text(String),
}

impl Value {
    /// The number, if it is one.
    pub fn int(&self) -> Option<i64> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Null | Value::Text(_) => None,
        }
    }
}

/// What an error says of the change that it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Another writer was first. It did not happen, and never will.
    Conflict,
    /// It cannot be done as things are. It did not happen, and never will.
    Refused,
    /// It was not served, and did not happen: it may be tried again.
    NotServed,
    /// It may have happened, or may yet.
    Unknown,
}

/// Why a statement did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub what: What,
    /// In a word or two, for counting.
    pub kind: String,
    pub message: String,
}

impl Failure {
    /// Nobody knows what became of a statement that was not waited for any longer.
    pub fn unanswered(after: Duration) -> Self {
        let message = format!("no answer within {} ms", after.as_millis());
        Self { what: What::Unknown, kind: "no answer".to_owned(), message }
    }

    /// Nothing was sent.
    pub fn unreached(message: impl Into<String>) -> Self {
        Self { what: What::NotServed, kind: "unreachable".to_owned(), message: message.into() }
    }
}

impl From<Failure> for lake_client::Error {
    fn from(failure: Failure) -> Self {
        let applied = match failure.what {
            What::Unknown => lake_client::store::Applied::Unknown,
            What::Conflict | What::Refused | What::NotServed => lake_client::store::Applied::No,
        };
        Self::Internal { doing: "running a statement".to_owned(), message: failure.message, applied }
    }
}
