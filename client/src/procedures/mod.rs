//! Procedures: work that outlives one transaction, as the map keeps it (semantics, section 12). docs/src/procedures.md
//! has the whole of it.
//!
//! ```text
//!   submitted (in the transaction that makes it necessary)
//!      |
//!   active --- step, committed --- step, committed --- ... ---> done
//!      |  |                                        `----------> failed      (nothing outside is in doubt)
//!      |  `--- told to, where its kind allows it -------------> cancelled
//!      `--- what it has done outside is in doubt -------------> poisoned --- cleared ---> active, or failed
//! ```
//!
//! Here are pure values, and [`calls`] on a store. lake-metasrv's `peer::procedures` is the leader, which runs them; without a cluster the
//! janitor (lake-query's `janitor`) sees to those of the kind [`purge`], and there are no others. Query nodes carry out the steps that touch
//! objects ([`purge`], [`upkeep`]); [`drop_namespace`] and [`purge_warehouse`] are the leader's alone.
//!
//! - A procedure is one entry, [`key`] of its id. The id is the idempotency key: it is submitted with a compare that
//!   the entry is absent, and stays there until its history is forgotten.
//! - Its scopes are owned by it; they are acquired in the transaction that submits it, and released in the one that
//!   ends it, or before.
//! - One that was submitted by a step of another is that one's child: its record names the parent, which may wait for it.
//! - Times in it are of the cluster's own clock (`peer::procedures::clock`), which no wall clock moves; `*_unix_ms`
//!   are for people, and for janitors.
//!
//! Limits: [`MAX_PROCEDURES`] that are looked at, [`MAX_ID_BYTES`], [`MAX_SCOPES`], [`MAX_NOTE_BYTES`],
//! [`MAX_RECORD_BYTES`].

/// What is sent as JSON, both ways.
macro_rules! as_json {
    ($type:ty) => {
        impl $type {
            /// As it is sent.
            pub fn to_bytes(&self) -> bytes::Bytes {
                // Texts, numbers and lists cannot fail to be written.
                serde_json::to_vec(self).unwrap_or_default().into()
            }

            /// What was sent.
            ///
            /// # Errors
            /// It is something else.
            pub fn of(bytes: &[u8]) -> Result<Self, String> {
                serde_json::from_slice(bytes).map_err(|e| format!("{} cannot be read: {e}", stringify!($type)))
            }
        }
    };
}

pub mod calls;
pub mod drop_namespace;
pub mod purge;
pub mod purge_warehouse;
pub mod upkeep;

use bytes::Bytes;
use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Compare, KeyValue, Op, Revision, Txn};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Under it lies one entry for each procedure.
pub const PROCEDURES: &str = "/lake/proc/";
/// Most procedures that the leader looks at. Others wait until some of these have ended, and were forgotten.
pub const MAX_PROCEDURES: usize = 20_000;
/// Longest id of a procedure, in bytes.
pub const MAX_ID_BYTES: usize = 128;
/// Most scopes of a procedure.
pub const MAX_SCOPES: usize = 64;
/// Longest note, in bytes; a longer one is cut.
pub const MAX_NOTE_BYTES: usize = 1000;
/// Largest record, in bytes.
pub const MAX_RECORD_BYTES: usize = 256 << 10;

/// What a kind keeps of a procedure: made of numbers, texts and lists.
pub type Kept = Value;

/// As it is kept.
pub fn kept(data: &impl Serialize) -> Kept {
    // What kinds keep cannot fail to be written.
    serde_json::to_value(data).unwrap_or_default()
}

/// Where a procedure stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Its steps are carried out, or wait for their time.
    Active,
    /// All of it was done.
    Done,
    /// It was not done, or not all of it, and nothing is in doubt.
    Failed,
    /// It was told not to go on, before that was too late.
    Cancelled,
    /// What it has done outside is in doubt: an operator is asked for. It keeps its scopes.
    Poisoned,
}

impl State {
    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Active => "active",
            State::Done => "done",
            State::Failed => "failed",
            State::Cancelled => "cancelled",
            State::Poisoned => "poisoned",
        }
    }

    /// Whether nothing comes after it.
    pub fn is_ended(self) -> bool {
        matches!(self, State::Done | State::Failed | State::Cancelled)
    }
}

/// What the map keeps of a procedure. JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// What it does.
    pub kind: String,
    /// To what, for people.
    pub subject: String,
    pub state: State,
    /// The step that comes next, in the kind's own words.
    pub step: String,
    /// What the kind has to know, and how far it has come. Only the kind reads it.
    #[serde(default)]
    pub data: Kept,
    /// The procedure that has submitted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Paths that it claims until it ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scopes: Vec<String>,
    /// How many steps were committed.
    #[serde(default)]
    pub steps: u64,
    /// How often the step that comes next has failed.
    #[serde(default)]
    pub failures: u32,
    /// What it came to, or why the last attempt failed, or what it waits for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// Somebody has asked for it to be cancelled.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancel: bool,
    /// When the leader saw it first; `None`: none has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted_ms: Option<u64>,
    /// Nothing is done before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_ms: Option<u64>,
    /// If it has not ended by then, it is poisoned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    pub submitted_unix_ms: u64,
    #[serde(default)]
    pub changed_unix_ms: u64,
    /// When a janitor saw it first, where there is no leader: by the clock of the store that holds the tables, and not by the cluster's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_unix_ms: Option<u64>,
}

/// Where the entry of a procedure is.
pub fn key(id: &str) -> String {
    format!("{PROCEDURES}{id}")
}

/// The procedure whose entry is there.
pub fn id_of(key: &str) -> Option<&str> {
    key.strip_prefix(PROCEDURES).filter(|id| !id.is_empty())
}

/// Why something is no procedure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("{id:?} is no id of a procedure: it has 1 to {MAX_ID_BYTES} bytes, and neither / nor what cannot be seen")]
    Id { id: String },
    #[error("the procedure's {what} has {len} bytes or parts; it may have at most {most}")]
    TooLong { what: &'static str, len: usize, most: usize },
}

/// Checks the limits of an id.
///
/// # Errors
/// When it is none.
pub fn validate_id(id: &str) -> Result<(), Invalid> {
    let fits = (1..=MAX_ID_BYTES).contains(&id.len());
    if fits && !id.chars().any(|c| c == '/' || c.is_control() || c.is_whitespace()) {
        return Ok(());
    }
    Err(Invalid::Id { id: id.chars().take(MAX_ID_BYTES).collect() })
}

/// The beginning of a text, of at most [`MAX_NOTE_BYTES`].
pub fn note(text: impl Into<String>) -> String {
    let mut text = text.into();
    if text.len() > MAX_NOTE_BYTES {
        let mut end = MAX_NOTE_BYTES - 3;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str("...");
    }
    text
}

impl Record {
    /// A procedure to be submitted: what it does, to what, its first step, and what the kind has to know.
    pub fn new(kind: &str, subject: impl Into<String>, step: &str, data: Kept, now_unix_ms: u64) -> Self {
        Self {
            kind: kind.to_owned(),
            subject: subject.into(),
            state: State::Active,
            step: step.to_owned(),
            data,
            parent: None,
            scopes: Vec::new(),
            steps: 0,
            failures: 0,
            note: String::new(),
            cancel: false,
            accepted_ms: None,
            due_ms: None,
            deadline_ms: None,
            ended_ms: None,
            submitted_unix_ms: now_unix_ms,
            changed_unix_ms: now_unix_ms,
            seen_unix_ms: None,
        }
    }

    /// What an entry holds. `None`: something that is no procedure's record.
    pub fn of(entry: &KeyValue) -> Option<Self> {
        serde_json::from_slice(&entry.value).ok()
    }

    /// As it is kept.
    pub fn to_bytes(&self) -> Bytes {
        // A struct of strings and numbers cannot fail to be written.
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    /// What the kind has kept, read as what it is.
    ///
    /// # Errors
    /// It is something else.
    pub fn data<T: for<'de> Deserialize<'de>>(&self) -> Result<T, String> {
        T::deserialize(&self.data).map_err(|e| format!("what is kept of it cannot be read: {e}"))
    }

    /// Checks the limits.
    ///
    /// # Errors
    /// The first one that is passed.
    pub fn validate(&self) -> Result<(), Invalid> {
        let within = |what, len: usize, most| match len <= most {
            true => Ok(()),
            false => Err(Invalid::TooLong { what, len, most }),
        };
        within("scopes", self.scopes.len(), MAX_SCOPES)?;
        within("record", self.to_bytes().len(), MAX_RECORD_BYTES)
    }

    /// The transaction that submits it under this id, and does nothing where the id is taken or one of its scopes is.
    pub fn submission(&self, id: &str) -> Txn {
        let (key, owner) = (key(id), ScopeOwner::Procedure(id.to_owned()));
        let free = |path: &String| Compare::scope_free(path.clone(), Some(owner.clone()));
        let acquire = |path: &String| Op::AcquireScope { path: path.clone(), owner: owner.clone() };
        let when = self.scopes.iter().map(free).chain([Compare::absent(&key)]).collect();
        let mut then: Vec<Op> = self.scopes.iter().map(acquire).collect();
        then.push(Op::put(&key, self.to_bytes()));
        Txn { when, then, otherwise: vec![] }
    }

    /// The transaction that puts it in the place of what was read at `revision`; with its end its scopes go.
    pub fn change(&self, id: &str, revision: Revision) -> Txn {
        let key = key(id);
        let release =
            |path: &String| Op::ReleaseScope { path: path.clone(), owner: ScopeOwner::Procedure(id.to_owned()) };
        let mut then = vec![Op::put(&key, self.to_bytes())];
        if self.state.is_ended() {
            then.extend(self.scopes.iter().map(release));
        }
        Txn { when: vec![Compare::mod_revision(&key, revision)], then, otherwise: vec![] }
    }
}

/// Whether these bytes are a record.
pub fn is_record(bytes: &[u8]) -> bool {
    serde_json::from_slice::<Record>(bytes).is_ok()
}

/// A procedure as it was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Procedure {
    pub id: String,
    /// What a change of it expects.
    pub mod_revision: Revision,
    pub record: Record,
}

impl Procedure {
    /// What an entry holds. `None`: something that is no procedure.
    pub fn of(entry: &KeyValue) -> Option<Self> {
        let record = Record::of(entry)?;
        Some(Self { id: id_of(&entry.key)?.to_owned(), mod_revision: entry.mod_revision, record })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record { scopes: vec!["/catalog/a".to_owned()], ..Record::new("k", "a.t", "first", kept(&7), 1) }
    }

    #[test]
    fn a_record_survives_being_kept_and_what_is_added_later_is_read() {
        let entry = |value: Bytes| KeyValue {
            key: key("p-1"),
            value,
            version: 1,
            create_revision: 3,
            mod_revision: 3,
            lease: None,
        };
        let read = Procedure::of(&entry(record().to_bytes())).unwrap();
        assert_eq!((read.id.as_str(), read.mod_revision, &read.record), ("p-1", 3, &record()));
        assert_eq!(read.record.data::<u64>(), Ok(7));
        assert!(read.record.data::<String>().unwrap_err().contains("cannot be read"));
        let later = r#"{"kind":"k","subject":"s","state":"poisoned","step":"x","submitted_unix_ms":1,"of_later":[1]}"#;
        assert_eq!(Procedure::of(&entry(later.into())).unwrap().record.state, State::Poisoned);
        assert_eq!(Procedure::of(&entry("something".into())), None);
    }

    #[test]
    fn scopes_come_with_the_submission_and_go_with_the_end() {
        let submitted = record().submission("p-1");
        submitted.validate().unwrap();
        assert_eq!((submitted.when.len(), submitted.then.len()), (2, 2));
        let changed = |state| Record { state, ..record() }.change("p-1", 9);
        for (state, released) in [(State::Active, 0), (State::Poisoned, 0), (State::Done, 1), (State::Cancelled, 1)] {
            let txn = changed(state);
            txn.validate().unwrap();
            assert_eq!(txn.then.len(), 1 + released, "{state:?}");
        }
    }

    #[test]
    fn there_are_limits() {
        for id in ["", "a/b", "a b", "a\n", &"n".repeat(MAX_ID_BYTES + 1)] {
            assert!(validate_id(id).is_err(), "{id:?}");
        }
        assert_eq!(validate_id("purge-1"), Ok(()));
        assert_eq!(record().validate(), Ok(()));
        assert!(Record { scopes: vec![String::new(); MAX_SCOPES + 1], ..record() }.validate().is_err());
        assert!(Record { data: "x".repeat(MAX_RECORD_BYTES).into(), ..record() }.validate().is_err());
        assert_eq!(note("short"), "short");
        let cut = note("ü".repeat(MAX_NOTE_BYTES));
        assert!(cut.len() <= MAX_NOTE_BYTES && cut.ends_with("ü..."), "{}", cut.len());
    }
}
