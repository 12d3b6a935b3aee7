//! Rows that any client of `table` changes, each time by one statement whose effect depends on what it has read: what others have changed
//! in between must make it a conflict, and no row may be there twice or lack what was acknowledged.
//!
//! - A row has a list, to which an UPDATE or a MERGE appends a number of its own. Beside each is a second row, which nobody looks at: half of
//!   the statements leave it alone, so that they delete one row of a file, and the others change both. The MERGE adds both where they are
//!   not there.
//! - Lamps are rows that come and go: a MERGE adds one unless it is there, a DELETE takes one away unless it is the last, which a subquery
//!   counts. So, once there was one, there always is, though no two of the statements need to change the same row.
//!
//! All are sent once. Clients that are each at it now and then seldom meet; so all are at the same time ([`Shared::meets`]).

use std::collections::BTreeMap;
use std::time::Instant;

use async_trait::async_trait;
use lake_client::clock;
use rand::Rng;

use super::access::Access;
use super::statements::{Last, SCHEMA, Used, count_of, stale_ms, told};
use crate::history::{Action, Table};
use crate::run::recorder::Scribe;
use crate::sql::{Failure, Value};

/// Operations on one table.
const USES: u64 = 80;
/// In so many seconds of so many, the last of them, clients do nothing else.
const MEET_FOR_S: u64 = 2;
const MEET_EVERY_S: u64 = 6;
/// Of a hundred operations, so many are reads; numbers appended. The rest are about lamps.
const READS: u32 = 20;
const PUSHES: u32 = 45;
/// Rows that have a list, and lamps: few, so that clients meet in one.
const ROWS: i64 = 2;
const LAMPS: i64 = 3;

/// What clients know of these tables together.
#[derive(Debug)]
pub(super) struct Shared {
    used: Used,
    began: Instant,
}

impl Shared {
    pub(super) fn new() -> Self {
        Self { used: Used::new(USES), began: clock::now() }
    }

    /// Whether clients are at it now.
    pub(super) fn meets(&self) -> bool {
        clock::now().saturating_duration_since(self.began).as_secs() % MEET_EVERY_S >= MEET_EVERY_S - MEET_FOR_S
    }

    /// Does one operation.
    pub(super) async fn step(&self, access: &mut Access, scribe: &mut Scribe) {
        let table = self.used.tables.pick(&mut access.rng);
        let Some(node) = access.any_node() else { return };
        // Whoever comes next tries again.
        if self.used.make(table, &create(table), node, access).await.is_err() {
            return;
        }
        let (change, sql) = match access.rng.random_range(0..100) {
            0..READS => {
                // How it ended is in the history.
                let _ = read(table, node, access, scribe).await;
                return;
            }
            drawn if drawn < READS + PUSHES => {
                let (row, number) = (access.rng.random_range(0..ROWS), self.used.numbers.next());
                let push = PUSH[access.rng.random_range(0..PUSH.len())];
                (Table::Push { table: table.into(), row, number }, pushes(push, table, row, number))
            }
            _ => {
                let (row, on) = (Table::LAMPS + access.rng.random_range(0..LAMPS), access.chance(0.5));
                (Table::Turn { table: table.into(), row, on }, turns(table, row, on))
            }
        };
        self.change(change, &sql, node, access, scribe).await;
    }

    async fn change(&self, change: Table, sql: &str, node: u64, access: &mut Access, scribe: &mut Scribe) {
        let action = Action::Table(change);
        let by = access.deadline();
        scribe.invoke(action.clone());
        match access.run(node, sql, None, by).await {
            Ok(answer) => match count_of(&answer) {
                Some(0) => scribe.refused(action, "nothing was to be changed"),
                Some(1 | 2) => {
                    scribe.ok(action, None, Some(node));
                    self.used.acknowledge();
                }
                count => scribe.amiss(action, None, Some(node), &format!("it has changed {count:?} rows")),
            },
            Err(failure) => scribe.statement_failed(action, &failure, node),
        }
    }
}

/// How a number gets to the end of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Push {
    /// UPDATE of the row alone, or of that beside it as well.
    Alone,
    Both,
    Merge,
}

const PUSH: [Push; 4] = [Push::Alone, Push::Alone, Push::Both, Push::Merge];

fn name(table: i64) -> String {
    format!("{SCHEMA}.shared_{table}")
}

/// As the other tables, every other one deletes rows by delete files.
fn create(table: i64) -> String {
    let mode = if table % 2 == 0 { "merge-on-read" } else { "copy-on-write" };
    let modes = ["delete", "update", "merge"].map(|what| format!("'write.{what}.mode' = '{mode}'")).join(", ");
    format!("CREATE TABLE IF NOT EXISTS {} (id BIGINT, part BIGINT, numbers VARCHAR) WITH ({modes})", name(table))
}

fn pushes(push: Push, table: i64, row: i64, number: i64) -> String {
    let name = name(table);
    match push {
        Push::Alone => format!("UPDATE {name} SET numbers = numbers || ' {number}' WHERE id = {row} AND part = 0"),
        Push::Both => format!("UPDATE {name} SET numbers = numbers || ' {number}' WHERE id = {row} AND part < 2"),
        // What it says of the target alone bounds what other writers are in its way.
        Push::Merge => format!(
            "MERGE INTO {name} t USING (VALUES ({row}, 0, ' {number}'), ({row}, 1, ' {number}')) AS s(id, part, more) \
             ON t.id = {row} AND t.part = s.part WHEN MATCHED THEN UPDATE SET numbers = t.numbers || s.more \
             WHEN NOT MATCHED THEN INSERT (id, part, numbers) VALUES (s.id, s.part, s.more)"
        ),
    }
}

fn turns(table: i64, row: i64, on: bool) -> String {
    let name = name(table);
    match on {
        true => format!(
            "MERGE INTO {name} t USING (VALUES ({row}, 0, '')) AS s(id, part, numbers) ON t.id = {row} AND t.part = s.part \
             WHEN NOT MATCHED THEN INSERT (id, part, numbers) VALUES (s.id, s.part, s.numbers)"
        ),
        false => format!(
            "DELETE FROM {name} WHERE id = {row} AND (SELECT count(*) FROM {name} WHERE id >= {}) > 1",
            Table::LAMPS
        ),
    }
}

/// All rows that anybody looks at, and the sequence number of the version that they are of.
async fn read(table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
    let action = |rows, stale_ms| Action::Table(Table::Shared { table: table.into(), rows, stale_ms });
    let sql = format!(
        "SELECT 0 AS what, id, numbers FROM {} WHERE part = 0 UNION ALL \
         SELECT 1, max(sequence_number), '' FROM {SCHEMA}.\"shared_{table}$snapshots\"",
        name(table)
    );
    let by = access.deadline();
    scribe.invoke(action(None, None));
    let answer = match access.run(node, &sql, None, by).await {
        Ok(answer) => answer,
        Err(failure) => {
            scribe.query_failed(action(None, None), &failure, node);
            return Err(failure);
        }
    };
    let (mut rows, mut sequence, mut foreign) = (BTreeMap::<i64, Vec<Vec<i64>>>::new(), None, None);
    for row in &answer.rows {
        match row.as_slice() {
            [Value::Int(0), Value::Int(id), Value::Text(numbers)] => match numbers_of(numbers) {
                Some(list) => rows.entry(*id).or_default().push(list),
                None => foreign = Some(row.as_slice()),
            },
            [Value::Int(1), newest, Value::Text(_)] => sequence = newest.int().and_then(|n| u64::try_from(n).ok()),
            _ => foreign = Some(row.as_slice()),
        }
    }
    told(scribe, action(Some(rows), stale_ms(&answer)), sequence, node, foreign);
    Ok(())
}

fn numbers_of(text: &str) -> Option<Vec<i64>> {
    text.split_whitespace().map(|number| number.parse().ok()).collect()
}

#[async_trait]
impl Last for Shared {
    fn tables(&self) -> Vec<i64> {
        self.used.all()
    }

    fn acknowledged(&self) -> u64 {
        self.used.acknowledged()
    }

    async fn read(&self, table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
        read(table, node, access, scribe).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::statements::canned;
    use super::*;
    use crate::run::recorder::Recorder;

    #[test]
    fn a_statement_rests_on_what_is_there() {
        let alone = pushes(Push::Alone, 1, 0, 7);
        assert_eq!(alone, "UPDATE chaos.shared_1 SET numbers = numbers || ' 7' WHERE id = 0 AND part = 0");
        assert!(pushes(Push::Merge, 1, 0, 7).contains("(VALUES (0, 0, ' 7'), (0, 1, ' 7'))"));
        assert!(turns(1, 101, false).ends_with("(SELECT count(*) FROM chaos.shared_1 WHERE id >= 100) > 1"));
    }

    #[tokio::test]
    async fn a_row_that_is_there_twice_is_told_as_it_is() {
        let text = |text: &str| Value::Text(text.to_owned());
        let (one, other) = ([Value::Int(0), Value::Int(1), text(" 3 5")], [Value::Int(0), Value::Int(1), text(" 3")]);
        let newest = [Value::Int(1), Value::Int(9), text("")];
        let recorder = Recorder::new();
        read(0, 1, &mut canned::access(&[&one, &other, &newest]), &mut recorder.scribe()).await.unwrap();
        let ended = recorder.take().0.pop().unwrap();
        let rows = Some(BTreeMap::from([(1, vec![vec![3, 5], vec![3]])]));
        assert_eq!(ended.action, Action::Table(Table::Shared { table: 0.into(), rows, stale_ms: None }));
        assert_eq!((ended.revision, ended.error), (Some(9), None));
        let row = [Value::Int(0), Value::Int(1), text("three")];
        let recorder = Recorder::new();
        read(0, 1, &mut canned::access(&[&row]), &mut recorder.scribe()).await.unwrap();
        assert!(recorder.take().0[1].error.is_some(), "nobody writes that");
    }
}
