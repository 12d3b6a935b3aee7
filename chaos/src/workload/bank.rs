//! Accounts between which money moves. Every read of all of them, however fresh, sees the same total.
//!
//! Clients tell each other what was acknowledged to them, so that a read that is to be fresh can be seen not to be. Accounts are
//! read in every way that there is: by their keys, from any peer; of a snapshot, by their keys and as a listing in pages; and in
//! a transaction.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::clock;
use lake_client::store::{Consistency, Error, MetaStore, Read, ReadOptions};
use lake_proto::kv::{Compare, Expected, KeyValue, Op, OpResult, Revision, Txn};
use rand::Rng;

use super::access::Access;
use super::{Actor, Frame, Plan, number_of, place};
use crate::check::{bank, refusals};
use crate::history::{Action, Bank, Key, Workload};
use crate::run::recorder::Scribe;

const ACCOUNTS: i64 = 8;
const OPENING_BALANCE: i64 = 100;
const MAX_AMOUNT: i64 = 20;
/// How stale a bounded read may be: chance says how far below this. A peer that is cut off is not so for long.
const MAX_STALENESS: Duration = Duration::from_secs(2);
const LEAST_STALENESS: Duration = Duration::from_millis(200);
/// Half of them are no staler than this.
const LITTLE_STALENESS: Duration = Duration::from_millis(500);
/// Entries in a page of a snapshot's listing.
const PAGE_ENTRIES: u32 = 3;

pub(super) fn plan(clients: usize) -> Plan {
    let (opened, acknowledged) = (Opened::default(), Acknowledged::default());
    let client = |_| Client { opened: opened.clone(), acknowledged: acknowledged.clone() };
    Plan::of(clients, client, Accounts { opened: opened.clone() })
}

fn places() -> Vec<String> {
    (0..ACCOUNTS).map(|account| place(Workload::Bank, &account.into())).collect()
}

/// The revision at which the accounts were opened. Cheap to clone.
#[derive(Debug, Clone, Default)]
struct Opened(Arc<AtomicU64>);

impl Opened {
    fn at(&self) -> Revision {
        self.0.load(Ordering::Relaxed)
    }
}

/// The newest revision that a transfer was acknowledged at, and when: of those that are older than any read may be only the
/// last one is kept. Cheap to clone.
#[derive(Debug, Clone, Default)]
struct Acknowledged(Arc<Mutex<VecDeque<(Instant, Revision)>>>);

impl Acknowledged {
    fn with<T>(&self, look: impl FnOnce(&mut VecDeque<(Instant, Revision)>) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, at: Instant, revision: Revision) {
        self.with(|all| {
            let newest = all.back().map_or(0, |(_, newest)| *newest);
            if revision > newest {
                all.push_back((at, revision));
            }
            while all.get(1).is_some_and(|(next, _)| *next + MAX_STALENESS < at) {
                all.pop_front();
            }
        });
    }

    /// What a read has to see that begins at `began`, and is to be no staler than this.
    fn seen_by(&self, began: Instant, staleness: Duration) -> Revision {
        self.with(|all| {
            let before = all.iter().rev().find(|(at, _)| *at + staleness < began);
            before.map_or(0, |(_, revision)| *revision)
        })
    }
}

struct Client {
    opened: Opened,
    acknowledged: Acknowledged,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        if access.chance(0.5) {
            // How it ended is in the history.
            let _ = read_all(self.opened.at(), &self.acknowledged, access, scribe).await;
            return;
        }
        let from = access.rng.random_range(0..ACCOUNTS);
        let to = (from + access.rng.random_range(1..ACCOUNTS)) % ACCOUNTS;
        let amount = access.rng.random_range(1..=MAX_AMOUNT);
        if let Some(revision) = transfer(from, to, amount, access, scribe).await {
            self.acknowledged.note(clock::now(), revision);
        }
    }
}

/// The revision at which it was acknowledged.
async fn transfer(from: i64, to: i64, amount: i64, access: &mut Access, scribe: &mut Scribe) -> Option<Revision> {
    let action = Action::Bank(Bank::Transfer { from: from.into(), to: to.into(), amount });
    let places = [from, to].map(|account| place(Workload::Bank, &account.into()));
    let deadline = access.deadline();
    scribe.invoke(action.clone());
    let read = match access.store.batch_get(&places, ReadOptions::default(), deadline).await {
        Ok(read) => read,
        Err(error) => {
            scribe.read_failed(action, &error, None);
            return None;
        }
    };
    let account = |place: &String| {
        let entry = read.value.iter().find(|entry| entry.key == *place)?;
        Some((number_of(&entry.value)?, entry.mod_revision))
    };
    let (Some((has, from_revision)), Some((receives, to_revision))) = (account(&places[0]), account(&places[1])) else {
        scribe.refused(action, "an account is not there");
        return None;
    };
    if has < amount {
        scribe.refused(action, "too little in the account");
        return None;
    }
    let [from, to] = places;
    let txn = Txn {
        when: vec![Compare::mod_revision(from.clone(), from_revision), Compare::mod_revision(to.clone(), to_revision)],
        then: vec![put(&from, has - amount), put(&to, receives + amount)],
        otherwise: vec![],
    };
    match access.store.commit(txn, deadline).await {
        Ok(done) if done.result.succeeded => {
            let previous: Vec<_> = done.result.results.iter().map(previous).collect();
            // What the compares have found is what the writes have replaced. Of an answer kept in parts nobody knows.
            let is_right = done.result.reduced.is_some()
                || previous == [Some((has, from_revision)), Some((receives, to_revision))];
            match is_right {
                true => scribe.ok(action, Some(done.result.revision), None),
                false => scribe.amiss(action, Some(done.result.revision), None, bank::OTHER_PREVIOUS),
            }
            [from, to].iter().for_each(|place| access.ledger.put(place, done.result.revision));
            return Some(done.result.revision);
        }
        Ok(done) if done.resent => scribe.unknown(action, "sent twice, and the second compare failed"),
        Ok(done) => {
            let is_there = |key: &String, revision: Revision| {
                done.result.observed.iter().any(|entry| entry.key == *key && entry.mod_revision == revision)
            };
            match is_there(&from, from_revision) && is_there(&to, to_revision) {
                true => scribe.refused(action, refusals::WRONGLY),
                false => scribe.refused(action, "an account has changed"),
            }
        }
        Err(error) => scribe.change_failed(action, &error),
    }
    None
}

fn put(place: &str, balance: i64) -> Op {
    Op::Put { key: place.to_owned(), value: balance.to_string().into(), return_previous: true, lease: None }
}

/// What a write has replaced: the balance, and since when it was there.
fn previous(result: &OpResult) -> Option<(i64, Revision)> {
    match result {
        OpResult::Put { previous: Some(entry) } => Some((number_of(&entry.value)?, entry.mod_revision)),
        _ => None,
    }
}

/// All accounts at one revision: from any peer, as fresh as chance wants it, from a snapshot, or in a transaction. Never from
/// before they were opened, which a peer may not have heard of yet.
async fn read_all(
    opened: Revision,
    acknowledged: &Acknowledged,
    access: &mut Access,
    scribe: &mut Scribe,
) -> Result<(), Error> {
    let action = |balances| Action::Bank(Bank::Read { balances });
    let consistency = match access.rng.random_range(0..4) {
        0 => Consistency::Local,
        1 => {
            let most = if access.chance(0.5) { LITTLE_STALENESS } else { MAX_STALENESS };
            Consistency::Bounded(access.rng.random_range(LEAST_STALENESS..=most))
        }
        _ => Consistency::Linearizable,
    };
    let options = ReadOptions { consistency, min_revision: opened, ..ReadOptions::default() };
    let from = if access.chance(0.8) { access.any_peer() } else { None };
    let (began, deadline) = (clock::now(), access.deadline());
    let must_see = match consistency {
        // A snapshot is a fresh one, and a transaction runs now.
        _ if from.is_none() => acknowledged.seen_by(began, Duration::ZERO),
        Consistency::Linearizable => acknowledged.seen_by(began, Duration::ZERO),
        Consistency::Bounded(staleness) => acknowledged.seen_by(began, staleness),
        Consistency::Local => 0,
    };
    scribe.invoke(action(None));
    let (answer, peer) = match from {
        Some((id, at)) => (access.store.batch_get_from(&at, &places(), options, deadline).await, Some(id)),
        None if access.chance(0.5) => (of_a_snapshot(access).await, None),
        None => (in_a_transaction(access).await, None),
    };
    match answer {
        Ok(read) => {
            let answer = action(Some(balances(&read.value)));
            match read.revision < must_see {
                true => scribe.amiss(answer, Some(read.revision), peer, bank::TOO_STALE),
                false => scribe.ok(answer, Some(read.revision), peer),
            }
            Ok(())
        }
        Err(error) => {
            scribe.read_failed(action(None), &error, peer);
            Err(error)
        }
    }
}

/// Half of the accounts, and then the other half, of one snapshot; or page after page of its listing. Whatever is read is told to be
/// of the revision that the snapshot was opened at, and judged by that.
async fn of_a_snapshot(access: &mut Access) -> Result<Read<Vec<KeyValue>>, Error> {
    let deadline = access.deadline();
    let listed = access.chance(0.5);
    let opened = access.store.open_snapshot(ReadOptions::default(), deadline).await?;
    let options = ReadOptions::at(opened.value);
    let mut entries = Vec::new();
    if listed {
        let mut page = None::<String>;
        loop {
            let read = access.store.list(&prefix(), page.as_deref(), PAGE_ENTRIES, options, deadline).await?;
            entries.extend(read.value.entries);
            page = read.value.next;
            if page.is_none() {
                break;
            }
        }
    } else {
        let places = places();
        for half in places.chunks(places.len() / 2) {
            entries.extend(access.store.batch_get(half, options, deadline).await?.value);
        }
    }
    // Else it ends by itself, and a long run would have more than there can be.
    let _ = access.store.close_snapshot(opened.value, deadline).await;
    Ok(Read { revision: opened.revision, value: entries })
}

/// By a transaction that reads each of them, or lists them.
async fn in_a_transaction(access: &mut Access) -> Result<Read<Vec<KeyValue>>, Error> {
    let then = match access.chance(0.5) {
        true => places().into_iter().map(|key| Op::Get { key }).collect(),
        false => vec![Op::List { prefix: prefix(), limit: ACCOUNTS as u32 }],
    };
    let done = access.store.commit(Txn { then, ..Txn::default() }, access.deadline()).await?;
    let entries = done.result.results.into_iter().flat_map(|result| match result {
        OpResult::Get { entry } => entry.into_iter().collect(),
        OpResult::List { entries, .. } => entries,
        _ => Vec::new(),
    });
    Ok(Read { revision: done.result.revision, value: entries.collect() })
}

fn prefix() -> String {
    place(Workload::Bank, &Key::from(""))
}

fn balances(entries: &[KeyValue]) -> BTreeMap<Key, i64> {
    let prefix = prefix();
    let account =
        |entry: &KeyValue| Some((entry.key.strip_prefix(&prefix)?.parse::<i64>().ok()?, number_of(&entry.value)?));
    entries.iter().filter_map(account).map(|(account, balance)| (Key::from(account), balance)).collect()
}

struct Accounts {
    opened: Opened,
}

#[async_trait]
impl Frame for Accounts {
    async fn prepare(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        let balances = (0..ACCOUNTS).map(|account| (Key::from(account), OPENING_BALANCE)).collect();
        let action = Action::Bank(Bank::Open { balances });
        let txn = Txn {
            when: places().into_iter().map(|place| Compare::expected(place, Expected::Absent)).collect(),
            then: places().into_iter().map(|place| Op::put(place, OPENING_BALANCE.to_string())).collect(),
            otherwise: vec![],
        };
        scribe.invoke(action.clone());
        match access.store.commit(txn, access.deadline()).await {
            // Nobody else makes them: if they are there, the first of two sendings has made them.
            Ok(done) if done.result.succeeded || done.resent => {
                scribe.ok(action, done.result.succeeded.then_some(done.result.revision), None);
                self.opened.0.store(done.result.revision, Ordering::Relaxed);
                Ok(())
            }
            Ok(_) => {
                scribe.refused(action, "there were accounts before");
                let message = "there are accounts already: a run needs a cluster of its own".to_owned();
                Err(Error::Refused { doing: "making the accounts".to_owned(), message })
            }
            Err(error) => {
                scribe.change_failed(action, &error);
                Err(error)
            }
        }
    }

    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        let action = |balances| Action::Bank(Bank::Read { balances });
        scribe.invoke(action(None));
        let read = access.store.batch_get(&places(), ReadOptions::default(), access.deadline()).await;
        let read = read.inspect_err(|error| scribe.read_failed(action(None), error, None))?;
        scribe.ok(action(Some(balances(&read.value))), Some(read.revision), None);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_has_to_see_what_was_acknowledged_before_it_could_be_stale() {
        let (acknowledged, t) = (Acknowledged::default(), clock::now());
        let after = |ms: u64| t + Duration::from_millis(ms);
        let seen_by = |ms: u64, staleness: Duration| acknowledged.seen_by(after(ms), staleness);
        assert_eq!(seen_by(0, Duration::ZERO), 0);
        for (ms, revision) in [(100, 7), (200, 5), (300, 9)] {
            acknowledged.note(after(ms), revision);
        }
        assert_eq!((seen_by(100, Duration::ZERO), seen_by(301, Duration::ZERO)), (0, 9));
        assert_eq!((seen_by(2_250, MAX_STALENESS), seen_by(2_350, MAX_STALENESS)), (7, 9));
        acknowledged.note(after(2_500), 12);
        acknowledged.note(after(9_000), 20);
        assert_eq!(seen_by(9_001, MAX_STALENESS), 12, "the last of the old ones is kept");
        assert_eq!(acknowledged.with(|all| all.len()), 2);
    }
}
