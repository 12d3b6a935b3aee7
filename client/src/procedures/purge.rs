//! The kind `purge_table`: what a table that was dropped with PURGE has left in the object store is deleted.
//!
//! | step     | who     | what                                                                                     |
//! |----------|---------|------------------------------------------------------------------------------------------|
//! | `retain` | leader  | waits for the retention time. Nothing else has begun: it may be cancelled                |
//! | `check`  | workers | whether live tables refer to something in the location. It may be cancelled still        |
//! | `delete` | workers | deletes what the table's metadata reaches inside of its location, itself last            |
//!
//! Without a metadata cluster the janitor does all of it ([`crate::janitor`]).
//!
//! A worker does a bounded part of a step at a time, and says where the next one begins ([`Cursor`]). What was done
//! before an answer was lost is done again, which changes nothing: a file is deleted before the one that leads to it.

use lake_proto::kv::Revision;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Record, kept};
use crate::catalog::{Namespace, TableIdent, TablePointer};

/// The kind's name, and that of the instruction.
pub const PURGE_TABLE: &str = "purge_table";
/// What the ids of all purges of tables begin with, and of others.
pub const IDS: &str = "purge-";
/// The steps.
pub const RETAIN: &str = "retain";
pub const CHECK: &str = "check";
pub const DELETE: &str = "delete";
/// Most files of the table that live tables refer to, before the purge is given up.
pub const MAX_KEPT: usize = 1000;

/// What is deleted now. Each leads to those before it, and goes after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Data and delete files.
    #[default]
    Files,
    Manifests,
    /// Manifest lists and statistics.
    Lists,
    /// Metadata files; the table's last one at the very end.
    Metadata,
}

/// Where the next part of a step begins.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Cursor {
    /// While checking: the live tables up to this one, by the levels of its namespace and its name, were looked
    /// through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<(Vec<String>, String)>,
    #[serde(default)]
    pub part: Part,
    /// Of the manifests, in order of their names, so many are done ...
    #[serde(default)]
    pub manifests: u64,
    /// ... and of the next one so many entries.
    #[serde(default)]
    pub entries: u64,
}

/// What the procedure keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Purge {
    /// The name that it had.
    pub table: String,
    /// The levels of the namespace in that: a level may hold a point. None: it was submitted before they were kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespace: Vec<String>,
    pub uuid: Uuid,
    pub metadata_location: String,
    #[serde(default)]
    pub cursor: Cursor,
    /// Files that live tables refer to: they stay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<String>,
    #[serde(default)]
    pub deleted: u64,
    /// Files outside of the location: they stay.
    #[serde(default)]
    pub outside: u64,
}

/// The purge of a table that is dropped while its pointer is this one: its id, and its record.
pub fn of_drop(table: &TableIdent, pointer: &TablePointer, revision: Revision, now_unix_ms: u64) -> (String, Record) {
    let purge = Purge {
        table: table.to_string(),
        namespace: table.namespace.levels().to_vec(),
        uuid: pointer.uuid,
        metadata_location: pointer.metadata_location.clone(),
        cursor: Cursor::default(),
        kept: Vec::new(),
        deleted: 0,
        outside: 0,
    };
    (
        format!("{}{revision}", ids_of(pointer.uuid)),
        Record::new(PURGE_TABLE, &purge.table, RETAIN, kept(&purge), now_unix_ms),
    )
}

impl Purge {
    /// The name that the table had. `None`: it was submitted before namespaces were kept.
    pub fn ident(&self) -> Option<TableIdent> {
        let namespace = Namespace::new(self.namespace.iter().cloned()).ok()?;
        let name = self.table.strip_prefix(&format!("{namespace}."))?.to_owned();
        TableIdent::new(namespace, name).ok()
    }

    /// How much is deleted, and what stays, for people.
    pub fn so_far(&self) -> String {
        let mut text = match self.deleted {
            0 => String::new(),
            1 => "1 file is deleted".to_owned(),
            many => format!("{many} files are deleted"),
        };
        for (count, why) in
            [(self.outside, "outside of its location"), (self.kept.len() as u64, "used by other tables")]
        {
            if count > 0 {
                let between = if text.is_empty() { "" } else { "; " };
                text.push_str(&format!("{between}{count} stay: {why}"));
            }
        }
        text
    }

    /// Whether it is of a table of this name.
    pub fn is_of(&self, table: &TableIdent) -> bool {
        let is_there = self.namespace.is_empty() || self.namespace == table.namespace.levels();
        is_there && self.table == table.to_string()
    }
}

/// What the ids of all purges of a table begin with.
pub fn ids_of(table: Uuid) -> String {
    format!("{IDS}{table}-")
}

/// The revision that the pointer of a table had when it was dropped, by the id of its purge.
pub fn dropped_at(id: &str, table: Uuid) -> Option<Revision> {
    id.strip_prefix(&ids_of(table))?.parse().ok()
}

/// What a worker is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The procedure, which the worker looks up before it deletes anything.
    pub id: String,
    pub step: String,
    pub purge: Purge,
}

/// What a worker answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// A part of the step was done; what is kept from now on.
    Part(Box<Purge>),
    /// The step is done.
    Done(Box<Purge>),
    /// It cannot be done, and nothing was.
    Refused(String),
    /// What is there is not what should be: an operator is asked for.
    Doubtful(String),
    /// The procedure is not at this step any more.
    Over,
}

as_json!(Task);
as_json!(Answer);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_read_again() {
        let table: TableIdent = TableIdent::new("a.b".parse().unwrap(), "t").unwrap();
        let pointer = TablePointer {
            uuid: Uuid::new_v4(),
            metadata_location: "file:///x/1.json".into(),
            previous_location: None,
        };
        let (id, record) = of_drop(&table, &pointer, 17, 3);
        super::super::validate_id(&id).unwrap();
        assert!(id.starts_with(&ids_of(pointer.uuid)) && id.ends_with("-17"), "{id}");
        assert_eq!((dropped_at(&id, pointer.uuid), dropped_at(&id, Uuid::nil())), (Some(17), None));
        assert_eq!((record.subject.as_str(), record.step.as_str()), ("a.b.t", RETAIN));
        let purge: Purge = record.data().unwrap();
        let other: TableIdent = TableIdent::new(crate::catalog::Namespace::new(["a.b"]).unwrap(), "t").unwrap();
        assert!(other.to_string() == "a.b.t" && purge.is_of(&table) && !purge.is_of(&other));
        assert!(Purge { namespace: Vec::new(), ..purge.clone() }.is_of(&table), "one of before");
        assert_eq!(purge.ident(), Some(table));
        let task = Task { id, step: DELETE.to_owned(), purge: purge.clone() };
        assert_eq!(Task::of(&task.to_bytes()), Ok(task));
        for answer in [Answer::Part(Box::new(purge)), Answer::Refused("no".into()), Answer::Over] {
            assert_eq!(Answer::of(&answer.to_bytes()), Ok(answer));
        }
        assert!(Answer::of(b"{}").unwrap_err().contains("Answer cannot be read"));
        assert!(Part::Files < Part::Manifests && Part::Lists < Part::Metadata, "what leads to others goes later");
    }
}
