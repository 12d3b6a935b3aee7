//! Values that only grow, one row in each of a few tables, written by one client each and read at all query nodes.
//!
//! A node that is cut off from the metadata answers from what it knows, and says how old that is. So writers go to another node at
//! once when one does not serve them, and readers stay where they are: the older a node's answers may be, the more there is to see.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lake_client::clock;
use lake_client::store::Error;
use rand::Rng;

use super::access::Access;
use super::statements::{ALL, Last, SCHEMA, count_of, make_schema, read_again, read_everywhere, stale_ms, told};
use super::{Actor, Frame, Plan};
use crate::check::cached::{FIRST, MISSING};
use crate::check::table::FRESH_NS;
use crate::history::{Action, Cached, Key};
use crate::run::recorder::Scribe;
use crate::sql::{Failure, Value};

const TABLES: i64 = 4;
/// The probability that a client with a table of its own writes.
const WRITES: f64 = 0.5;
/// How long a write may take, so that one at a node that is cut off does not keep its client for as long as the cut.
const WRITTEN_WITHIN: Duration = Duration::from_secs(3);
/// How long a read may take: what a node waits for the metadata before it answers from what it knows, and more.
const READ_WITHIN: Duration = Duration::from_secs(6);

pub(super) fn plan(clients: usize) -> Plan {
    let acknowledged = Arc::new(AtomicU64::new(0));
    let client = |n: usize| Client {
        own: (0..TABLES).filter(|table| *table as usize % clients == n).map(|table| (table, FIRST)).collect(),
        node: None,
        acknowledged: acknowledged.clone(),
    };
    Plan::of(clients, client, Tables { acknowledged: acknowledged.clone() })
}

fn name(table: i64) -> String {
    format!("{SCHEMA}.cached_{table}")
}

struct Client {
    /// Tables that nobody else writes to, with the last number that was tried.
    own: Vec<(i64, i64)>,
    /// Where the last write was not refused.
    node: Option<u64>,
    acknowledged: Arc<AtomicU64>,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        if !self.own.is_empty() && access.chance(WRITES) {
            self.write(access, scribe).await;
        } else if let Some(node) = access.any_node() {
            let tables: Vec<i64> = match access.chance(0.5) {
                true => (0..TABLES).collect(),
                false => vec![access.rng.random_range(0..TABLES)],
            };
            // How it ended is in the history.
            let _ = read(&tables, node, access, scribe).await;
        }
    }
}

impl Client {
    async fn write(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let Some(node) = self.node.or_else(|| access.any_node()) else { return };
        let at = access.rng.random_range(0..self.own.len());
        let (table, last) = &mut self.own[at];
        *last += 1;
        let (table, number) = (*table, *last);
        let action = Action::Cached(Cached::Write { table: table.into(), number });
        // Whatever comes late finds a larger one.
        let sql = format!("UPDATE {} SET n = {number} WHERE n < {number}", name(table));
        let by = access.deadline().min(clock::now() + WRITTEN_WITHIN);
        scribe.invoke(action.clone());
        self.node = match access.run(node, &sql, None, by).await {
            Ok(answer) => match count_of(&answer) {
                Some(0) => {
                    scribe.refused(action, "no row was found");
                    None
                }
                Some(1) => {
                    scribe.ok(action, None, Some(node));
                    self.acknowledged.fetch_add(1, Ordering::Relaxed);
                    Some(node)
                }
                _ => {
                    scribe.unknown(action, "the answer does not say how many rows were changed");
                    None
                }
            },
            Err(failure) => {
                scribe.statement_failed(action, &failure, node);
                access.nodes().into_iter().find(|other| *other != node)
            }
        };
    }
}

/// What tables have, by one query.
async fn read(tables: &[i64], node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
    let action = |values, stale_ms| Action::Cached(Cached::Read { values, stale_ms });
    let of_table = |table: &i64| format!("SELECT {table} AS place, n FROM {}", name(*table));
    let sql = tables.iter().map(of_table).collect::<Vec<_>>().join(" UNION ALL ");
    let by = access.deadline().min(clock::now() + READ_WITHIN);
    scribe.invoke(action(None, None));
    match access.run(node, &sql, None, by).await {
        Ok(answer) => {
            let mut values: BTreeMap<Key, i64> = tables.iter().map(|table| ((*table).into(), MISSING)).collect();
            let mut foreign = None;
            for row in &answer.rows {
                match row.iter().map(Value::int).collect::<Vec<_>>()[..] {
                    // Each of those that were asked for has one row.
                    [Some(table), Some(number)] if values.get(&Key::from(table)) == Some(&MISSING) => {
                        values.insert(table.into(), number);
                    }
                    _ => foreign = Some(row.as_slice()),
                }
            }
            told(scribe, action(Some(values), stale_ms(&answer)), None, node, foreign);
            Ok(())
        }
        Err(failure) => {
            scribe.query_failed(action(None, None), &failure, node);
            Err(failure)
        }
    }
}

struct Tables {
    acknowledged: Arc<AtomicU64>,
}

#[async_trait]
impl Frame for Tables {
    async fn prepare(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        let node = make_schema(access).await?;
        for table in 0..TABLES {
            let sql = format!("CREATE TABLE {} AS SELECT CAST({FIRST} AS BIGINT) AS n", name(table));
            access.run(node, &sql, None, access.deadline()).await?;
        }
        // From now on every node has something to answer from.
        tokio::time::sleep(Duration::from_nanos(FRESH_NS)).await;
        for node in access.nodes() {
            read_again(self, ALL, node, access, scribe).await?;
        }
        Ok(())
    }

    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        read_everywhere(self, access, scribe).await
    }
}

#[async_trait]
impl Last for Tables {
    fn tables(&self) -> Vec<i64> {
        vec![ALL]
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    async fn read(&self, _: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
        read(&(0..TABLES).collect::<Vec<_>>(), node, access, scribe).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::statements::canned;
    use super::*;
    use crate::history::History;
    use crate::run::recorder::Recorder;

    #[tokio::test]
    async fn a_second_row_of_a_table_is_found() {
        let row: &[Value] = &[Value::Int(0), Value::Int(FIRST)];
        for (rows, found) in [(&[row][..], 0), (&[row, row][..], 1)] {
            let recorder = Recorder::new();
            read(&[0], 1, &mut canned::access(rows), &mut recorder.scribe()).await.unwrap();
            let judged = crate::check::cached::check(&History::new(recorder.take().0).unwrap());
            assert_eq!(judged.findings.iter().filter(|found| found.kind == "impossible").count(), found, "{judged:?}");
        }
    }

    #[test]
    fn every_table_has_one_writer() {
        for clients in 1..7 {
            let Plan { actors, .. } = plan(clients);
            assert_eq!(actors.len(), clients);
            let owners = |table: i64| (0..clients).filter(move |n| table as usize % clients == *n).count();
            assert!((0..TABLES).all(|table| owners(table) == 1));
        }
    }
}
