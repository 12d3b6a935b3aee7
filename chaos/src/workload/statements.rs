//! What workloads that speak SQL share: their statements are sent, and answers lost, in one way; tables are made as they are needed,
//! and everything is read at every node in the end.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::store::Error;
use rand::Rng;

use super::Unique;
use super::access::Access;
use super::rotation::Rotation;
use crate::check::table::FRESH_NS;
use crate::history::Action;
use crate::run::recorder::Scribe;
use crate::sql::{Answer, Failure, Value};

/// The schema of all tables of such a workload.
pub(super) const SCHEMA: &str = "chaos";
/// Before something is sent again, unless its answer was lost on purpose.
pub(super) const PAUSE: Duration = Duration::from_millis(50);
/// How often each read in the end is tried.
pub(super) const TRIES: usize = 5;

/// Stands for all tables, where they are read together.
pub(super) const ALL: i64 = -1;

/// Tables that clients use one after the other, and what they know of them together.
#[derive(Debug)]
pub(super) struct Used {
    pub(super) tables: Rotation,
    /// Of writes.
    pub(super) numbers: Unique,
    /// Of these, how many were acknowledged.
    acknowledged: AtomicU64,
    /// Tables that are there.
    made: Mutex<BTreeSet<i64>>,
}

impl Used {
    /// One table at a time, for so many operations.
    pub(super) fn new(uses: u64) -> Self {
        Self {
            tables: Rotation::new(1, uses),
            numbers: Unique::default(),
            acknowledged: AtomicU64::new(0),
            made: Mutex::default(),
        }
    }

    fn made(&self) -> MutexGuard<'_, BTreeSet<i64>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a table by this statement, unless it is there.
    ///
    /// # Errors
    /// As [`Access::run`].
    pub(super) async fn make(&self, table: i64, sql: &str, node: u64, access: &mut Access) -> Result<(), Failure> {
        if self.made().contains(&table) {
            return Ok(());
        }
        access.run(node, sql, None, access.deadline()).await?;
        self.made().insert(table);
        Ok(())
    }

    /// A write was acknowledged.
    pub(super) fn acknowledge(&self) {
        self.acknowledged.fetch_add(1, Ordering::Relaxed);
    }

    /// How many were.
    pub(super) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Those that were made.
    pub(super) fn all(&self) -> Vec<i64> {
        self.made().iter().copied().collect()
    }
}

/// What a workload reads once all is healed.
#[async_trait]
pub(super) trait Last: Sync {
    /// The tables that there are, or [`ALL`].
    fn tables(&self) -> Vec<i64>;

    /// How many writes to them were acknowledged.
    fn acknowledged(&self) -> u64;

    /// Reads a table at a node; how it ended is in the history.
    async fn read(&self, table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure>;

    /// What one node is asked of a table beside that.
    async fn list(&self, _: i64, _: u64, _: &mut Access, _: &mut Scribe) -> Result<(), Failure> {
        Ok(())
    }
}

/// Makes the schema; gives the node that has.
///
/// # Errors
/// There is no node, or as [`Access::run`].
pub(super) async fn make_schema(access: &mut Access) -> Result<u64, Failure> {
    let node = access.any_node().ok_or_else(|| Failure::unreached("there is no query node"))?;
    access.run(node, &format!("CREATE SCHEMA {SCHEMA}"), None, access.deadline()).await?;
    Ok(node)
}

/// Reads a table, several times if need be.
///
/// # Errors
/// The last one's.
pub(super) async fn read_again(
    last: &impl Last,
    table: i64,
    node: u64,
    access: &mut Access,
    scribe: &mut Scribe,
) -> Result<(), Failure> {
    let mut tried = last.read(table, node, access, scribe).await;
    for _ in 1..TRIES {
        if tried.is_ok() {
            break;
        }
        tokio::time::sleep(PAUSE).await;
        tried = last.read(table, node, access, scribe).await;
    }
    tried
}

/// Reads every table at every node, once each of them has to show everything.
///
/// # Errors
/// One could not be read.
pub(super) async fn read_everywhere(last: &impl Last, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    tokio::time::sleep(Duration::from_nanos(FRESH_NS)).await;
    let nodes = access.nodes();
    for table in last.tables() {
        for node in &nodes {
            read_again(last, table, *node, access, scribe).await?;
        }
        if let Some(node) = nodes.first() {
            last.list(table, *node, access, scribe).await?;
        }
    }
    access.ledger.looked_for_elsewhere(last.acknowledged());
    Ok(())
}

/// Runs a statement at a query node, until `by`. `lost`: its answer is not waited for longer than some of so many milliseconds; the
/// statement may have its effect.
///
/// # Errors
/// As [`Access::run`]; unknown where the answer was not waited for.
pub(super) async fn send(
    node: u64,
    sql: &str,
    operation: Option<&str>,
    by: Instant,
    lost: Option<Range<u64>>,
    access: &mut Access,
) -> Result<Answer, Failure> {
    let Some(too_short_ms) = lost else { return access.run(node, sql, operation, by).await };
    let patience = Duration::from_millis(access.rng.random_range(too_short_ms));
    let sent = tokio::time::timeout(patience, access.run(node, sql, operation, by)).await;
    sent.unwrap_or_else(|_| Err(Failure::unanswered(patience)))
}

/// How many rows a statement has changed.
pub(super) fn count_of(answer: &Answer) -> Option<i64> {
    answer.rows.first()?.first()?.int()
}

/// How old the rows of an answer may be, as it says, in whole milliseconds.
pub(super) fn stale_ms(answer: &Answer) -> Option<u64> {
    answer.stale.map(|stale| u64::try_from(stale.as_millis()).unwrap_or(u64::MAX))
}

/// A read was answered. `foreign`: a row of the answer that no statement of the workload can have left, so that the answer is wrong
/// whatever the others show.
pub(super) fn told(scribe: &Scribe, answer: Action, revision: Option<u64>, node: u64, foreign: Option<&[Value]>) {
    match foreign {
        None => scribe.ok(answer, revision, Some(node)),
        Some(row) => scribe.amiss(answer, revision, Some(node), &format!("it has a row that cannot be there: {row:?}")),
    }
}

/// A query node that answers whatever it is asked with the same rows, and a client's way to it.
#[cfg(test)]
pub(super) mod canned {
    use std::sync::Arc;
    use std::time::Duration;

    use async_trait::async_trait;
    use lake_client::dial::Dialer;

    use crate::run::clients::Reach;
    use crate::sql::{Answer, Failure, Front, Session, Statement, Value};
    use crate::workload::access::{Access, Door, Roster};

    #[derive(Debug, Clone)]
    struct Canned(Answer);

    #[async_trait]
    impl Front for Canned {
        async fn connect(&self, _: &str) -> Result<Box<dyn Session>, Failure> {
            Ok(Box::new(self.clone()))
        }
    }

    #[async_trait]
    impl Session for Canned {
        async fn run(&mut self, _: &Statement) -> Result<Answer, Failure> {
            Ok(self.0.clone())
        }

        fn transaction(&self) -> Option<String> {
            None
        }

        fn set_transaction(&mut self, _: Option<String>) {}
    }

    /// To node 1. Of the metadata there is nothing.
    pub(in crate::workload) fn access(rows: &[&[Value]]) -> Access {
        let rows = rows.iter().map(|row| row.to_vec()).collect();
        let nodes = Roster::new(vec![(1, "nowhere".to_owned())]);
        let reach = Reach {
            roster: Roster::default(),
            ledger: Arc::default(),
            endpoints: vec!["127.0.0.1:1".to_owned()],
            timeout: Duration::from_secs(10),
            seed: 1,
            secret: None,
            dialer: Dialer::default(),
            door: Some(Door {
                front: Arc::new(Canned(Answer { rows, stale: None })),
                nodes,
                warehouse: None,
                logs: None,
                is_own: true,
            }),
        };
        reach.access(0).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_how_many_rows_and_how_old() {
        let answer = |rows, stale| Answer { rows, stale };
        let counted = answer(vec![vec![Value::Int(3)]], Some(Duration::from_micros(2_900)));
        assert_eq!((count_of(&counted), stale_ms(&counted)), (Some(3), Some(2)));
        assert_eq!((count_of(&answer(vec![], None)), stale_ms(&answer(vec![], None))), (None, None));
    }
}
