//! Accounts that are rows of several tables. A transfer is a transaction of SQL that takes from one table and gives to another;
//! a read asks for all accounts, and the versions that they are of, in one query. The total never changes for anybody.
//!
//! ```text
//! BEGIN -> UPDATE: takes, if there is enough -> UPDATE: gives -> COMMIT
//!   anything fails before COMMIT    -> ROLLBACK; nothing was committed
//!   COMMIT was not served           -> COMMIT again
//!   COMMIT's answer is lost         -> COMMIT again, at any node: it says what became of it, or leaves that nothing will
//! ```
//! Some answers to COMMIT are lost on purpose. Some transfers have an operation id, which must change nothing about all this.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::clock;
use lake_client::store::Error;
use rand::Rng;

use super::access::Access;
use super::statements::{
    ALL, Last, PAUSE, SCHEMA, count_of, make_schema, read_again, read_everywhere, send, stale_ms, told,
};
use super::{Actor, Frame, Plan, Unique};
use crate::history::{Accounts, Action, Key};
use crate::run::recorder::Scribe;
use crate::sql::{Failure, Value, What};

const TABLES: i64 = 3;
/// Accounts of one table.
const ACCOUNTS: i64 = 4;
const OPENING_BALANCE: i64 = 100;
const MAX_AMOUNT: i64 = 20;
/// The probability of a read.
const READS: f64 = 0.5;
/// The probability that a transfer has an operation id.
const ONCE: f64 = 0.3;
/// The probability that the answer to the first COMMIT is not waited for.
const LOST: f64 = 0.3;
/// How long a COMMIT has whose answer is to be lost.
const TOO_SHORT_MS: std::ops::Range<u64> = 1..15;
/// How often COMMIT is sent.
const COMMITS: usize = 8;
/// What a query node says of a COMMIT that comes while another one runs: a conflict, but not with other writers.
const BUSY: &str = "another statement of this transaction is running";
/// How long a ROLLBACK may take, which changes nothing about the outcome.
const ROLLBACK: Duration = Duration::from_millis(500);

pub(super) fn plan(clients: usize) -> Plan {
    let (numbers, acknowledged) = (Unique::default(), Arc::new(AtomicU64::new(0)));
    let client = |_| Client { numbers: numbers.clone(), acknowledged: acknowledged.clone() };
    Plan::of(clients, client, Bank { acknowledged: acknowledged.clone() })
}

fn name(table: i64) -> String {
    format!("{SCHEMA}.accounts_{table}")
}

/// The key of an account: its table is in it.
fn account(table: i64, n: i64) -> i64 {
    table * 100 + n
}

fn all_accounts() -> impl Iterator<Item = (i64, i64)> {
    (0..TABLES).flat_map(|table| (0..ACCOUNTS).map(move |n| (table, account(table, n))))
}

struct Client {
    numbers: Unique,
    acknowledged: Arc<AtomicU64>,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let Some(node) = access.any_node() else { return };
        if access.chance(READS) {
            // How it ended is in the history.
            let _ = read(node, access, scribe).await;
            return;
        }
        let from = access.rng.random_range(0..TABLES);
        let to = (from + access.rng.random_range(1..TABLES)) % TABLES;
        let [taken, given] = [from, to].map(|table| account(table, access.rng.random_range(0..ACCOUNTS)));
        let amount = access.rng.random_range(1..=MAX_AMOUNT);
        let operation = access.chance(ONCE).then(|| format!("chaos move {}", self.numbers.next()));
        let action = Action::Accounts(Accounts::Move { from: taken.into(), to: given.into(), amount });
        let updates = [
            format!(
                "UPDATE {} SET balance = balance - {amount} WHERE id = {taken} AND balance >= {amount}",
                name(from)
            ),
            format!("UPDATE {} SET balance = balance + {amount} WHERE id = {given}", name(to)),
        ];
        let by = access.deadline();
        scribe.invoke(action.clone());
        let ended = match prepare(node, &updates, operation.as_deref(), by, access).await {
            Ok(()) => commit(node, by, access).await,
            Err(failure) => Err(failure),
        };
        // Wherever it was last asked to be committed.
        for node in access.nodes() {
            roll_back(node, access).await;
        }
        match ended {
            Ok(by) => {
                scribe.ok(action, None, by);
                self.acknowledged.fetch_add(1, Ordering::Relaxed);
            }
            Err(failure) => scribe.statement_failed(action, &failure, node),
        }
    }
}

/// Everything up to COMMIT. Whatever goes wrong here, nothing was committed, and nothing will be.
async fn prepare(
    node: u64,
    updates: &[String; 2],
    operation: Option<&str>,
    by: Instant,
    access: &mut Access,
) -> Result<(), Failure> {
    let certainly_not = |failure: Failure| match failure.what {
        What::Unknown => Failure { what: What::NotServed, ..failure },
        _ => failure,
    };
    access.run(node, "BEGIN", operation, by).await.map_err(certainly_not)?;
    for update in updates {
        let answer = access.run(node, update, None, by).await.map_err(certainly_not)?;
        match count_of(&answer) {
            Some(1) => {}
            Some(0) => return Err(refused("there was too little in the account")),
            count => return Err(refused(&format!("an account is {count:?} rows"))),
        }
    }
    Ok(())
}

fn refused(why: &str) -> Failure {
    Failure { what: What::Conflict, kind: "refused by the client".to_owned(), message: why.to_owned() }
}

/// Commits; gives the node that has, if its first answer arrived.
async fn commit(node: u64, by: Instant, access: &mut Access) -> Result<Option<u64>, Failure> {
    let handle = access.transaction(node);
    let (mut at, mut in_doubt) = (node, None::<Failure>);
    for sending in 1..=COMMITS {
        let is_lost = sending == 1 && access.chance(LOST);
        match send(at, "COMMIT", None, by, is_lost.then_some(TOO_SHORT_MS), access).await {
            Ok(_) => return Ok((sending == 1).then_some(node)),
            Err(failure) => match failure.what {
                // The one before it is still at it.
                What::Conflict if in_doubt.is_some() && failure.message.contains(BUSY) => {}
                // It says what became of it, also if an answer was lost before.
                What::Conflict | What::Refused => return Err(failure),
                What::NotServed if in_doubt.is_none() && clock::now() + PAUSE >= by => return Err(failure),
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
        if in_doubt.is_some() {
            // The session that lost the answer has nothing open any more.
            let next = access.any_node().unwrap_or(at);
            if access.set_transaction(at, None, by).await.is_ok()
                && access.set_transaction(next, handle.clone(), by).await.is_ok()
            {
                at = next;
            } else {
                break;
            }
        }
    }
    Err(in_doubt.unwrap_or_else(|| Failure {
        what: What::NotServed,
        kind: "not committed".to_owned(),
        message: "COMMIT was not served".to_owned(),
    }))
}

/// Leaves no transaction open in the session at a node.
async fn roll_back(node: u64, access: &mut Access) {
    if access.transaction(node).is_some() {
        let by = clock::now() + ROLLBACK;
        // What is not ended so ends by itself, and was not committed.
        let _ = access.run(node, "ROLLBACK", None, by).await;
        let _ = access.set_transaction(node, None, by).await;
    }
}

/// All accounts, and the versions that they are of.
async fn read(node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
    let action = |balances, versions, stale_ms| Action::Accounts(Accounts::Read { balances, versions, stale_ms });
    let of_table = |table| {
        let name = name(table);
        let snapshots = format!("{SCHEMA}.\"accounts_{table}$snapshots\"");
        format!(
            "SELECT 0 AS what, id, balance FROM {name} UNION ALL SELECT 1, {table}, max(sequence_number) FROM {snapshots}"
        )
    };
    let sql = (0..TABLES).map(of_table).collect::<Vec<_>>().join(" UNION ALL ");
    let by = access.deadline();
    scribe.invoke(action(None, None, None));
    let answer = match access.run(node, &sql, None, by).await {
        Ok(answer) => answer,
        Err(failure) => {
            scribe.query_failed(action(None, None, None), &failure, node);
            return Err(failure);
        }
    };
    let (mut balances, mut versions) = (BTreeMap::<Key, i64>::new(), BTreeMap::<Key, i64>::new());
    let mut foreign = None;
    for row in &answer.rows {
        let is_new = match row.iter().map(Value::int).collect::<Vec<_>>()[..] {
            [Some(0), Some(id), Some(balance)] => balances.insert(id.into(), balance).is_none(),
            [Some(1), Some(table), Some(version)] => versions.insert(table.into(), version).is_none(),
            _ => false,
        };
        if !is_new {
            foreign = Some(row.as_slice());
        }
    }
    told(scribe, action(Some(balances), Some(versions), stale_ms(&answer)), None, node, foreign);
    Ok(())
}

struct Bank {
    acknowledged: Arc<AtomicU64>,
}

#[async_trait]
impl Frame for Bank {
    async fn prepare(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        let node = make_schema(access).await?;
        for table in 0..TABLES {
            let sql = format!("CREATE TABLE {} (id BIGINT, balance BIGINT)", name(table));
            access.run(node, &sql, None, access.deadline()).await?;
        }
        // A file for each, so that two transfers meet only where they concern the same account.
        for (table, id) in all_accounts() {
            let sql = format!("INSERT INTO {} VALUES ({id}, {OPENING_BALANCE})", name(table));
            access.run(node, &sql, None, access.deadline()).await?;
        }
        let balances = all_accounts().map(|(_, id)| (id.into(), OPENING_BALANCE)).collect();
        let open = Action::Accounts(Accounts::Open { balances });
        scribe.invoke(open.clone());
        scribe.ok(open, None, Some(node));
        // What was there before is no node's to forget.
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
impl Last for Bank {
    fn tables(&self) -> Vec<i64> {
        vec![ALL]
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    async fn read(&self, _: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
        read(node, access, scribe).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::statements::canned;
    use super::*;
    use crate::run::recorder::Recorder;

    #[tokio::test]
    async fn an_account_that_is_there_twice_is_told() {
        let [one, other] = [1, 2].map(|id| [Value::Int(0), Value::Int(id), Value::Int(100)]);
        let (one, other) = (&one[..], &other[..]);
        for (rows, is_told) in [(&[one, other][..], false), (&[one, other, one][..], true)] {
            let recorder = Recorder::new();
            read(1, &mut canned::access(rows), &mut recorder.scribe()).await.unwrap();
            assert_eq!(recorder.take().0[1].error.is_some(), is_told);
        }
    }

    #[test]
    fn every_account_has_a_key_of_its_own() {
        let accounts: std::collections::BTreeSet<i64> = all_accounts().map(|(_, id)| id).collect();
        assert_eq!(accounts.len() as i64, TABLES * ACCOUNTS);
    }
}
