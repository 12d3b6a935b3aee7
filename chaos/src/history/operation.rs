//! One event of a history.

use std::fmt;

use super::action::Action;

/// Who recorded an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Process {
    /// A client. Its number is never used again after an unknown outcome.
    Client(u64),
    /// What makes the faults.
    Nemesis,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Process::Client(number) => write!(f, "{number}"),
            Process::Nemesis => f.write_str("nemesis"),
        }
    }
}

/// What an event says about its action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// It begins.
    Invoke,
    /// It happened, between its invocation and this.
    Ok,
    /// It did not happen and never will. With an [`Operation::refusal`] that is as it should be.
    Fail,
    /// It may have happened, and may yet happen. All events of the nemesis are of this kind.
    Info,
}

/// One event of a history.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// Its place in the history, from 0. [`super::History::new`] numbers anew.
    pub index: u64,
    /// Nanoseconds since the run began.
    pub time_ns: u64,
    pub process: Process,
    pub kind: Kind,
    pub action: Action,
    /// The revision that the answer carries: of the change if it made one, of the entry if it read one.
    pub revision: Option<u64>,
    /// The peer that was asked.
    pub peer: Option<u64>,
    /// Why it was refused, as it should be: a compare that found another value, a lock that somebody holds. A refusal is
    /// an answer; a failure without one was not served.
    pub refusal: Option<String>,
    /// Why it was not served, or why its outcome is unknown.
    pub error: Option<String>,
}

impl Operation {
    /// An event without the facts that only some have. The history gives it its index.
    pub fn new(process: Process, kind: Kind, time_ns: u64, action: Action) -> Self {
        Operation { index: 0, time_ns, process, kind, action, revision: None, peer: None, refusal: None, error: None }
    }

    /// The same with the peer that was asked.
    pub fn at_peer(self, peer: u64) -> Self {
        Operation { peer: Some(peer), ..self }
    }

    /// The same with why it was refused.
    pub fn refused(self, refusal: impl Into<String>) -> Self {
        Operation { refusal: Some(refusal.into()), ..self }
    }

    /// The same with what went wrong.
    pub fn because(self, error: impl Into<String>) -> Self {
        Operation { error: Some(error.into()), ..self }
    }
}
