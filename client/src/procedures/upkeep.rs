//! The kind `table_upkeep`: what `CALL system.` does to a table's files and history, done by a worker to its end, whoever has asked for it
//! having gone.
//!
//! | step    | who    | what                                                                                     |
//! |---------|--------|------------------------------------------------------------------------------------------|
//! | `place` | leader | chooses the worker: the one that leads the table's shard, or another one that is connected |
//! | `run`   | worker | begins it, and answers that it is running until it has ended                              |
//!
//! The worker's commit carries the compare that the procedure's record is still as it was when it began ([`fence`]): so of a cancel, and of a
//! worker that was given up and works on, nothing is committed. Orphans are removed without a commit, while that compare holds every so often.

use std::fmt;

use lake_proto::kv::Compare;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Procedure, Record, State, kept, key};
use crate::catalog::{Namespace, TableIdent};

/// The kind's name, and that of the instruction.
pub const TABLE_UPKEEP: &str = "table_upkeep";
/// The steps.
pub const PLACE: &str = "place";
pub const RUN: &str = "run";

/// What is done: a procedure in SQL's sense, with its usual arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    ExpireSnapshots,
    RewriteDataFiles,
    RewriteManifests,
    RemoveOrphanFiles,
}

impl What {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::ExpireSnapshots, Self::RewriteDataFiles, Self::RewriteManifests, Self::RemoveOrphanFiles];

    /// The one of that name, whose words may be joined as an option's are.
    pub fn named(name: &str) -> Option<Self> {
        let name = name.replace('-', "_");
        Self::ALL.into_iter().find(|what| what.as_str() == name)
    }

    /// As CALL names it.
    pub fn as_str(self) -> &'static str {
        match self {
            What::ExpireSnapshots => "expire_snapshots",
            What::RewriteDataFiles => "rewrite_data_files",
            What::RewriteManifests => "rewrite_manifests",
            What::RemoveOrphanFiles => "remove_orphan_files",
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the procedure keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableUpkeep {
    pub what: What,
    /// The levels of the table's namespace, and its name.
    pub namespace: Vec<String>,
    pub table: String,
    pub uuid: Uuid,
    /// Who does it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// What CALL answers, once it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

impl TableUpkeep {
    /// The table.
    ///
    /// # Errors
    /// It is the name of none.
    pub fn ident(&self) -> Result<TableIdent, String> {
        let namespace = Namespace::new(self.namespace.iter().cloned()).map_err(|e| e.to_string())?;
        TableIdent::new(namespace, self.table.clone()).map_err(|e| e.to_string())
    }
}

/// The procedure that does this to a table: its usual id, and its record.
pub fn of_table(what: What, table: &TableIdent, uuid: Uuid, now_unix_ms: u64) -> (String, Record) {
    let (namespace, name) = (table.namespace.levels().to_vec(), table.name.clone());
    let upkeep = TableUpkeep { what, namespace, table: name, uuid, node: None, count: None };
    let record = Record::new(TABLE_UPKEEP, format!("{what} {table}"), PLACE, kept(&upkeep), now_unix_ms);
    (format!("upkeep-{uuid}-{what}-{now_unix_ms}"), record)
}

/// What must hold of whatever is committed for a procedure that was read so.
pub fn fence(procedure: &Procedure) -> Compare {
    Compare::mod_revision(key(&procedure.id), procedure.mod_revision)
}

/// Whether it is for this node to work on a procedure that was read so.
pub fn is_for(procedure: &Procedure, node: &str) -> bool {
    let record = &procedure.record;
    let stands = record.kind == TABLE_UPKEEP && record.state == State::Active && record.step == RUN && !record.cancel;
    stands && record.data::<TableUpkeep>().is_ok_and(|upkeep| upkeep.node.as_deref() == Some(node))
}

/// What a worker is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The procedure, which the worker looks up.
    pub id: String,
    /// Whom it is for.
    pub node: String,
}

/// What a worker answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It was begun, and has not ended.
    Running,
    /// It is done, and this is what CALL answers.
    Done(u64),
    /// It did not work; it may the next time.
    Failed(String),
    /// It cannot be done.
    Refused(String),
    /// The procedure is not this node's at present.
    Over,
}

as_json!(Task);
as_json!(Answer);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_for_the_node_that_was_chosen_and_only_while_it_stands_so() {
        let table = TableIdent::new("a.b".parse().unwrap(), "t").unwrap();
        let (id, record) = of_table(What::RewriteDataFiles, &table, Uuid::nil(), 7);
        super::super::validate_id(&id).unwrap();
        assert_eq!((record.subject.as_str(), record.step.as_str()), ("rewrite_data_files a.b.t", PLACE));
        let upkeep: TableUpkeep = record.data().unwrap();
        assert_eq!(upkeep.ident(), Ok(table));
        let placed = TableUpkeep { node: Some("n".to_owned()), ..upkeep };
        let running = Record { step: RUN.to_owned(), data: kept(&placed), ..record.clone() };
        let is = |record: &Record, node| {
            is_for(&Procedure { id: id.clone(), mod_revision: 3, record: record.clone() }, node)
        };
        assert!(is(&running, "n") && !is(&running, "m") && !is(&record, "n"));
        for over in [
            Record { cancel: true, ..running.clone() },
            Record { state: State::Poisoned, ..running.clone() },
            Record { step: PLACE.to_owned(), ..running.clone() },
        ] {
            assert!(!is(&over, "n"), "{over:?}");
        }
        for what in What::ALL {
            assert_eq!(What::named(&what.as_str().replace('_', "-")), Some(what));
        }
        assert_eq!(What::named("drop_table"), None);
        for answer in [Answer::Running, Answer::Done(3), Answer::Refused("no".into()), Answer::Over] {
            assert_eq!(Answer::of(&answer.to_bytes()), Ok(answer));
        }
        let task = Task { id, node: "n".to_owned() };
        assert_eq!(Task::of(&task.to_bytes()), Ok(task));
    }
}
