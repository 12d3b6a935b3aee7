//! Rows of a small table that is written through SQL at any query node, and read whole at any.
//!
//! All rows under an id are written by one statement, and by one client: INSERT, UPDATE, MERGE and DELETE. Some are sent under an
//! operation id, to any node, with so little time that the answer is often lost, and sent again, to any node, until there is one; those without
//! are sent once. After an unknown outcome an id is left alone, so that what a read may show is known.
//!
//! A read asks for the rows and the snapshot that they are of in one statement. A table is left after [`USES`] operations.
//! Every other one deletes rows by delete files, the others by writing anew what is left.
//!
//! Some clients may do the same through REST, by PyIceberg ([`super::rest`]): theirs are inserts, overwrites and deletes, sent once.
//!
//! The others meet now and then in rows that all of them change ([`super::shared`]).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::clock;
use lake_client::store::Error;
use rand::Rng;

use super::access::Access;
use super::rest::{PyIceberg, Ready, Rest};
use super::shared::Shared;
use super::statements::{Last, PAUSE, SCHEMA, Used, count_of, make_schema, read_everywhere, send, stale_ms, told};
use super::{Actor, Frame, Plan};
use crate::history::{Action, Change, Snapshot, Table, Write};
use crate::run::recorder::Scribe;
use crate::sql::{Answer, Failure, Value, What};

/// Operations on one table: each may leave a file, and a read opens all of them.
const USES: u64 = 120;
/// Of a hundred operations, so many are reads; inserts; updates; merges. The rest are deletes.
const READS: u32 = 35;
const INSERTS: u32 = 30;
const UPDATES: u32 = 12;
const MERGES: u32 = 12;
/// The probability that a write is made under an operation id.
const ONCE: f64 = 0.5;
/// The probability that the answer to one of the first such sendings is not waited for.
const LOST: f64 = 0.4;
const MAX_LOST: usize = 3;
/// How long a sending has whose answer is to be lost.
const TOO_SHORT_MS: std::ops::Range<u64> = 1..50;
/// Sendings of one write.
const SENDINGS: usize = 8;
/// What an operation id begins with; the write's number follows.
const OPERATION: &str = "chaos ";

/// `rest`: how the first so many of them go through REST.
pub(super) fn plan(clients: usize, rest: Option<&Rest>) -> Plan {
    let shared = Arc::new(Used::new(USES));
    let by_rest = rest.map(|rest| ByRest {
        rest: rest.clone(),
        ready: Ready::default(),
        written: Arc::default(),
        shown: Arc::default(),
    });
    let through = |n| {
        let ByRest { rest, ready, written, shown } = by_rest.clone().filter(|by| n < by.rest.clients)?;
        Some(Through { rest: PyIceberg::new(rest, ready), written, shown })
    };
    let together = Arc::new(Shared::new());
    let client =
        |n| Client { shared: shared.clone(), together: together.clone(), mine: Vec::new(), through: through(n) };
    let frame = Tables { shared: shared.clone(), together: together.clone(), by_rest: by_rest.clone() };
    Plan::of(clients, client, frame)
}

/// How some clients go through REST.
#[derive(Clone)]
struct ByRest {
    rest: Rest,
    ready: Ready,
    /// How many of their writes were acknowledged.
    written: Arc<AtomicU64>,
    /// How many of their reads succeeded.
    shown: Arc<AtomicU64>,
}

/// What a client goes through instead of SQL.
struct Through {
    rest: PyIceberg,
    written: Arc<AtomicU64>,
    shown: Arc<AtomicU64>,
}

/// The statement that makes a table.
fn create(table: i64) -> String {
    let mode = if table % 2 == 0 { "merge-on-read" } else { "copy-on-write" };
    let modes = ["delete", "update", "merge"].map(|what| format!("'write.{what}.mode' = '{mode}'")).join(", ");
    format!("CREATE TABLE IF NOT EXISTS {} (id BIGINT, part BIGINT, v BIGINT) WITH ({modes})", name(table))
}

fn name(table: i64) -> String {
    format!("{SCHEMA}.rows_{table}")
}

/// The listing of a table's snapshots.
fn snapshots_of(table: i64) -> String {
    format!("{SCHEMA}.\"rows_{table}$snapshots\"")
}

struct Client {
    shared: Arc<Used>,
    /// Rows that are not any client's own.
    together: Arc<Shared>,
    /// Ids of which this client knows that their rows are there, with their table.
    mine: Vec<(i64, i64)>,
    through: Option<Through>,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        if let Some(Through { rest, .. }) = &mut self.through
            && let Err(failure) = rest.start().await
        {
            tracing::warn!("{failure}");
            return;
        }
        if self.through.is_none() && self.together.meets() {
            return self.together.step(access, scribe).await;
        }
        let table = self.shared.tables.pick(&mut access.rng);
        let Some(node) = access.any_node() else { return };
        // Whoever comes next tries again.
        if self.shared.make(table, &create(table), node, access).await.is_err() {
            return;
        }
        self.mine.retain(|(of, _)| *of == table);
        let drawn = access.rng.random_range(0..100);
        let known = match self.mine.len() {
            0 => None,
            n => Some(access.rng.random_range(0..n)),
        };
        let (change, at) = match (drawn, known) {
            (0..READS, _) => {
                // How it ended is in the history.
                let _ = match &mut self.through {
                    Some(Through { rest, shown, .. }) => {
                        let read = read_by(rest, table, node, access, scribe).await;
                        shown.fetch_add(u64::from(read.is_ok()), Ordering::Relaxed);
                        read
                    }
                    None => read(table, node, access, scribe).await,
                };
                return;
            }
            (_, None) => (Change::Insert, None),
            (drawn, known) => match drawn - READS {
                0..INSERTS => (Change::Insert, None),
                n if n < INSERTS + UPDATES => (Change::Update, known),
                n if n < INSERTS + UPDATES + MERGES => (Change::Merge, known.filter(|_| access.chance(0.5))),
                _ => (Change::Delete, known),
            },
        };
        // Until it is known what became of the write, nothing is known of the id.
        let known = at.map(|at| self.mine.swap_remove(at).1);
        let number = self.shared.numbers.next();
        let once = self.through.is_none() && access.chance(ONCE);
        let write = Write { change, table: table.into(), id: known.unwrap_or(number), number, once };
        if self.write(table, &write, node, access, scribe).await == Left::There {
            self.mine.push((table, write.id));
        }
    }
}

/// What is known of an id after a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// Its rows are there.
    There,
    /// They are not, or nobody knows.
    Unknown,
}

impl Client {
    async fn write(&mut self, table: i64, write: &Write, node: u64, access: &mut Access, scribe: &mut Scribe) -> Left {
        let action = Action::Table(Table::Write(write.clone()));
        let sql = statement(table, write);
        let by = access.deadline();
        scribe.invoke(action.clone());
        let counted = |(answer, by): (Answer, _)| (count_of(&answer), by);
        let sent = match (&mut self.through, write.once) {
            (Some(Through { rest, .. }), _) => {
                let sent = rest.write(&name(table), write, node, by).await;
                sent.map(|count| (Some(count), Some(node))).map_err(|e| (e, node))
            }
            (None, true) => send_until_answered(&sql, write.number, node, by, access).await.map(counted),
            (None, false) => {
                let sent = access.run(node, &sql, None, by).await;
                sent.map(|answer| (count_of(&answer), Some(node))).map_err(|e| (e, node))
            }
        };
        // What was there before a write that did nothing is there still.
        let was_there = matches!(write.change, Change::Update | Change::Delete);
        let unchanged = if was_there { Left::There } else { Left::Unknown };
        match sent {
            Ok((count, by)) => match (count, write.change) {
                (Some(0), Change::Update | Change::Delete) => {
                    scribe.refused(action, "no row was found");
                    unchanged
                }
                (Some(count), change) if count == Table::PARTS as i64 => {
                    scribe.ok(action, None, by);
                    self.shared.acknowledge();
                    if let Some(through) = &self.through {
                        through.written.fetch_add(1, Ordering::Relaxed);
                    }
                    if change == Change::Delete { Left::Unknown } else { Left::There }
                }
                (count, _) => {
                    let count = count.map_or_else(|| "an unknown number of".to_owned(), |count| count.to_string());
                    scribe.amiss(action, None, by, &format!("changed {count} rows instead of {}", Table::PARTS));
                    Left::Unknown
                }
            },
            Err((failure, node)) => {
                let unchanged = if failure.what == What::Unknown { Left::Unknown } else { unchanged };
                scribe.statement_failed(action, &failure, node);
                unchanged
            }
        }
    }
}

/// Sends a write under an operation id until there is an answer, which is often not waited for. Gives the node that has made it, if it
/// was sent once only: another one may only have found out what had become of it.
async fn send_until_answered(
    sql: &str,
    number: i64,
    first: u64,
    by: Instant,
    access: &mut Access,
) -> Result<(Answer, Option<u64>), (Failure, u64)> {
    let operation = format!("{OPERATION}{number}");
    let mut node = first;
    let mut in_doubt: Option<Failure> = None;
    for sending in 1..=SENDINGS {
        let is_lost = sending <= MAX_LOST && access.chance(LOST);
        match send(node, sql, Some(&operation), by, is_lost.then_some(TOO_SHORT_MS), access).await {
            Ok(answer) => return Ok((answer, (sending == 1).then_some(node))),
            Err(failure) => match failure.what {
                // It is kept as the outcome, whichever sending it was.
                What::Conflict | What::Refused => return Err((failure, node)),
                What::NotServed if in_doubt.is_none() => return Err((failure, node)),
                What::NotServed => {}
                What::Unknown => in_doubt = Some(failure),
            },
        }
        if clock::now() + PAUSE >= by {
            break;
        }
        if !is_lost {
            tokio::time::sleep(PAUSE).await;
        }
        node = access.any_node().unwrap_or(node);
    }
    Err((in_doubt.unwrap_or_else(|| Failure::unanswered(Duration::ZERO)), node))
}

fn statement(table: i64, write: &Write) -> String {
    let (name, id, parts) = (name(table), write.id, Table::PARTS);
    let first = Table::values(write.number)[0];
    let rows = || {
        let rows = Table::values(write.number).into_iter().enumerate();
        rows.map(|(part, value)| format!("({id}, {part}, {value})")).collect::<Vec<_>>().join(", ")
    };
    match write.change {
        Change::Insert => format!("INSERT INTO {name} VALUES {}", rows()),
        Change::Update => format!("UPDATE {name} SET v = {first} + part WHERE id = {id} AND part < {parts}"),
        Change::Delete => format!("DELETE FROM {name} WHERE id = {id}"),
        Change::Merge => format!(
            // What it says of the target alone bounds what other writers are in its way.
            "MERGE INTO {name} t USING (VALUES {}) AS s(id, part, v) ON t.id = {id} AND t.part = s.part \
             WHEN MATCHED THEN UPDATE SET v = s.v WHEN NOT MATCHED THEN INSERT (id, part, v) VALUES (s.id, s.part, s.v)",
            rows()
        ),
    }
}

/// All rows of a table, and the snapshot that they are of.
async fn read(table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
    let action =
        |rows, snapshot, stale_ms| Action::Table(Table::Read { table: table.into(), rows, snapshot, stale_ms });
    let (name, snapshots) = (name(table), snapshots_of(table));
    let sql = format!(
        "SELECT 0 AS what, id, v FROM {name} UNION ALL SELECT 1, snapshot_id, sequence_number FROM \
         (SELECT snapshot_id, sequence_number FROM {snapshots} ORDER BY sequence_number DESC LIMIT 1) AS newest"
    );
    let by = access.deadline();
    scribe.invoke(action(None, None, None));
    let answer = match access.run(node, &sql, None, by).await {
        Ok(answer) => answer,
        Err(failure) => {
            scribe.query_failed(action(None, None, None), &failure, node);
            return Err(failure);
        }
    };
    let (mut rows, mut newest, mut foreign) = (BTreeMap::<i64, Vec<i64>>::new(), None, None);
    for row in &answer.rows {
        match row.iter().map(Value::int).collect::<Vec<_>>()[..] {
            [Some(0), Some(id), Some(value)] => rows.entry(id).or_default().push(value),
            [Some(1), Some(snapshot), Some(sequence)] => newest = Some((snapshot, sequence)),
            _ => foreign = Some(row.as_slice()),
        }
    }
    rows.values_mut().for_each(|values| values.sort_unstable());
    let stale_ms = stale_ms(&answer);
    let sequence = newest.and_then(|(_, sequence)| u64::try_from(sequence).ok());
    told(scribe, action(Some(rows), newest.map(|(snapshot, _)| snapshot), stale_ms), sequence, node, foreign);
    Ok(())
}

/// The same through REST.
async fn read_by(
    rest: &mut PyIceberg,
    table: i64,
    node: u64,
    access: &Access,
    scribe: &mut Scribe,
) -> Result<(), Failure> {
    let action = |rows, snapshot| Action::Table(Table::Read { table: table.into(), rows, snapshot, stale_ms: None });
    let by = access.deadline();
    scribe.invoke(action(None, None));
    match rest.read(&name(table), node, by).await {
        Ok(read) => {
            let shown = action(Some(read.rows), read.snapshot);
            told(scribe, shown, read.sequence, node, read.foreign.as_deref());
            Ok(())
        }
        Err(failure) => {
            scribe.query_failed(action(None, None), &failure, node);
            Err(failure)
        }
    }
}

/// Every snapshot of a table.
async fn list(table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
    let action = |snapshots| Action::Table(Table::Line { table: table.into(), snapshots });
    let sql = format!(
        "SELECT sequence_number, snapshot_id, parent_id, summary['lake.operation-id'] AS operation FROM {} ORDER BY 1",
        snapshots_of(table)
    );
    let by = access.deadline();
    scribe.invoke(action(None));
    match access.run(node, &sql, None, by).await {
        Ok(answer) => {
            let snapshots = answer.rows.iter().filter_map(|row| snapshot(row)).collect();
            let foreign = answer.rows.iter().find(|row| snapshot(row).is_none());
            told(scribe, action(Some(snapshots)), None, node, foreign.map(Vec::as_slice));
            Ok(())
        }
        Err(failure) => {
            scribe.query_failed(action(None), &failure, node);
            Err(failure)
        }
    }
}

fn snapshot(row: &[Value]) -> Option<Snapshot> {
    let [sequence, id, parent, operation] = row else { return None };
    let number = match operation {
        Value::Text(operation) => operation.strip_prefix(OPERATION).and_then(|number| number.parse().ok()),
        Value::Null | Value::Int(_) => None,
    };
    Some(Snapshot { sequence: u64::try_from(sequence.int()?).ok()?, id: id.int()?, parent: parent.int(), number })
}

struct Tables {
    shared: Arc<Used>,
    together: Arc<Shared>,
    by_rest: Option<ByRest>,
}

#[async_trait]
impl Frame for Tables {
    async fn prepare(&mut self, access: &mut Access, _scribe: &mut Scribe) -> Result<(), Error> {
        make_schema(access).await?;
        if let Some(ByRest { rest, ready, .. }) = &self.by_rest {
            // Whoever asks for what cannot be had learns it before anybody is hurt.
            ready.fill(rest).await?;
        }
        Ok(())
    }

    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        read_everywhere(self, access, scribe).await?;
        read_everywhere(self.together.as_ref(), access, scribe).await?;
        for (what, count) in self.by_rest.iter().flat_map(|by| [("write", &by.written), ("read", &by.shown)]) {
            if count.load(Ordering::Relaxed) == 0 {
                return Err(Failure::unreached(format!("no {what} through REST succeeded")).into());
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Last for Tables {
    fn tables(&self) -> Vec<i64> {
        self.shared.all()
    }

    fn acknowledged(&self) -> u64 {
        self.shared.acknowledged()
    }

    async fn read(&self, table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
        read(table, node, access, scribe).await
    }

    async fn list(&self, table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
        list(table, node, access, scribe).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::statements::canned;
    use super::*;
    use crate::run::recorder::Recorder;

    #[tokio::test]
    async fn a_row_that_no_statement_leaves_is_told() {
        let row: &[Value] = &[Value::Int(0), Value::Int(7), Value::Int(15)];
        for (rows, is_told) in [(&[row][..], false), (&[row, &[Value::Int(0), Value::Null, Value::Null]][..], true)] {
            let recorder = Recorder::new();
            read(1, 1, &mut canned::access(rows), &mut recorder.scribe()).await.unwrap();
            assert_eq!(recorder.take().0[1].error.is_some(), is_told);
            let recorder = Recorder::new();
            list(1, 1, &mut canned::access(rows), &mut recorder.scribe()).await.unwrap();
            assert!(recorder.take().0[1].error.is_some(), "these are no snapshots");
        }
    }

    #[test]
    fn a_statement_writes_all_rows_of_an_id() {
        let write = |change| Write { change, table: 1.into(), id: 7, number: 5, once: false };
        let insert = statement(1, &write(Change::Insert));
        assert_eq!(insert, "INSERT INTO chaos.rows_1 VALUES (7, 0, 15), (7, 1, 16), (7, 2, 17)");
        let update = statement(1, &write(Change::Update));
        assert_eq!(update, "UPDATE chaos.rows_1 SET v = 15 + part WHERE id = 7 AND part < 3");
        assert!(statement(1, &write(Change::Merge)).contains("(VALUES (7, 0, 15), (7, 1, 16), (7, 2, 17))"));
        assert_eq!(Table::number(&[15, 16, 17]), Some(5));
        assert_eq!(Table::number(&[15, 16]), None);
        assert_eq!(Table::number(&[15, 16, 20]), None);
    }

    #[test]
    fn a_snapshot_is_read_with_the_operation_that_made_it() {
        let (one, text) = (Value::Int(1), |text: &str| Value::Text(text.to_owned()));
        let row = [one.clone(), Value::Int(99), Value::Null, text("chaos 12")];
        let expected = Snapshot { sequence: 1, id: 99, parent: None, number: Some(12) };
        assert_eq!(snapshot(&row), Some(expected));
        assert_eq!(snapshot(&[one, Value::Int(99), Value::Int(98), text("order 12")]).unwrap().number, None);
    }
}
