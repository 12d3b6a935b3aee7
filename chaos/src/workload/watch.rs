//! Watchers of one prefix, and clients that change what is under it, now and then by the end of a lease that a key hangs on. A
//! watcher lets go of its stream now and then and opens it again behind the last revision it saw, or takes nothing for a while.
//!
//! Some transactions also write keys beside the prefix, of which no watcher may hear, write a key twice, of which only the last is
//! told, make a key and delete it again, of which nothing is, or do all in the branch that runs where a compare fails.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lake_client::remote::watch::Watch as Stream;
use lake_client::store::{Applied, Error, MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Op, Revision, Txn};
use lake_proto::watch::Changes;
use rand::Rng;

use super::access::Access;
use super::{Actor, Frame, Plan, Unique, number_of, place};
use crate::history::{Action, Key, Watch, Workload};
use crate::run::recorder::Scribe;

const KEYS: i64 = 12;
/// Most keys in one transaction.
const MAX_KEYS: usize = 3;
/// How often a transaction does each of these in addition.
const BESIDE: f64 = 0.2;
const TWICE: f64 = 0.15;
const IN_VAIN: f64 = 0.1;
/// How often it does all in the other branch.
const OTHERWISE: f64 = 0.1;
/// Keys beside the prefix: beginnings of it, one of them in the order before it, and one behind it.
const NEIGHBOURS: [&str; 3] = ["/kv/chaos/wat", "/kv/chaos/watch", "/kv/chaos/watching"];
/// Nobody ever writes it.
const NEVER: &str = "/kv/chaos/never";
/// How often a writer puts a key that goes with a lease. At which revision is not told to anybody but watchers, so that the
/// outcome of these is unknown to the history.
const FLEETING: f64 = 0.02;
/// Longer than any of these leases is needed: it is ended.
const FLEETING_TTL: Duration = Duration::from_secs(60);
/// How often a watcher lets go of its stream, per message.
const LET_GO: f64 = 0.01;
/// How often a watcher takes nothing for a while, per message, and for how long: for longer than its stream is held for it.
const PAUSES: f64 = 0.004;
const PAUSE_MS: std::ops::Range<u64> = 600..1_500;
/// How long watchers may take to see the end, once all is healed.
const CATCH_UP: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

pub(super) fn plan(clients: usize) -> Plan {
    let values = Unique::default();
    let watchers = (clients / 3).max(1);
    let seen: Vec<Arc<AtomicU64>> = (0..watchers).map(|_| Arc::default()).collect();
    let watcher = |(n, seen): (usize, &Arc<AtomicU64>)| {
        let watcher = Watcher {
            watcher: n as u64,
            seen: seen.clone(),
            place: Place::Nowhere,
            stream: None,
            waiting: VecDeque::new(),
            backoff: Duration::ZERO,
        };
        Box::new(watcher) as Box<dyn Actor>
    };
    let mut actors: Vec<Box<dyn Actor>> = seen.iter().enumerate().map(watcher).collect();
    let writers = (clients - watchers.min(clients)).max(1);
    actors.extend((0..writers).map(|_| Box::new(Writer { values: values.clone() }) as Box<dyn Actor>));
    Plan { actors, frame: Box::new(Final { seen }) }
}

fn prefix() -> String {
    place(Workload::Watch, &Key::from(""))
}

fn key_at(place: &str) -> Option<Key> {
    place.strip_prefix(&prefix())?.parse::<i64>().ok().map(Key::from)
}

struct Writer {
    values: Unique,
}

#[async_trait]
impl Actor for Writer {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        if access.chance(FLEETING) {
            return self.fleeting(access, scribe).await;
        }
        if access.chance(0.15) {
            return self.delete(access, scribe).await;
        }
        let mut changes = BTreeMap::new();
        for _ in 0..access.rng.random_range(1..=MAX_KEYS) {
            changes.insert(Key::from(access.rng.random_range(0..KEYS)), Some(self.values.next()));
        }
        let put =
            |(key, value): (&Key, &Option<i64>)| Some(Op::put(place(Workload::Watch, key), (*value)?.to_string()));
        let puts: Vec<Op> = changes.iter().filter_map(put).collect();
        let places: Vec<String> = puts.iter().map(|op| op.key().to_owned()).collect();
        let ops = self.with_more(puts, access);
        let txn = match access.chance(OTHERWISE) {
            true => Txn { when: vec![Compare::mod_revision(NEVER, 1)], then: vec![], otherwise: ops },
            false => Txn { then: ops, ..Txn::default() },
        };
        let done = commit(Watch::Change { changes }, txn, access, scribe).await;
        if let Ended::At(revision) = done {
            places.iter().for_each(|place| access.ledger.put(place, revision));
        }
    }
}

impl Writer {
    /// The same with what makes no difference to watchers.
    fn with_more(&self, mut ops: Vec<Op>, access: &mut Access) -> Vec<Op> {
        if access.chance(TWICE) {
            let key = ops[0].key().to_owned();
            let before =
                if access.chance(0.5) { Op::delete(key) } else { Op::put(key, self.values.next().to_string()) };
            ops.insert(0, before);
        }
        if access.chance(BESIDE) {
            let key = NEIGHBOURS[access.rng.random_range(0..NEIGHBOURS.len())];
            ops.push(Op::put(key, self.values.next().to_string()));
        }
        if access.chance(IN_VAIN) {
            let key = place(Workload::Watch, &Key::from(KEYS + self.values.next()));
            ops.extend([Op::put(key.clone(), "0"), Op::delete(key)]);
        }
        ops
    }

    /// Puts a key that nobody else touches, and ends the lease that it hangs on.
    async fn fleeting(&self, access: &mut Access, scribe: &mut Scribe) {
        // A lease is nothing to anybody yet.
        let Ok(lease) = access.store.grant_lease(FLEETING_TTL, "chaos", access.deadline()).await else { return };
        let value = self.values.next();
        let key = Key::from(KEYS + value);
        let then = vec![Op::put_leased(place(Workload::Watch, &key), value.to_string(), lease.id)];
        let when = vec![Compare::lease_alive(lease.id)];
        let put = Watch::Change { changes: BTreeMap::from([(key.clone(), Some(value))]) };
        commit(put, Txn { when, then, otherwise: vec![] }, access, scribe).await;
        let gone = Action::Watch(Watch::Change { changes: BTreeMap::from([(key, None)]) });
        scribe.invoke(gone.clone());
        match access.store.revoke_lease(lease.id, access.deadline()).await {
            Ok(_) => scribe.unknown(gone, "it goes with its lease, at a revision that is not told"),
            Err(error) => scribe.unknown(gone, &format!("it goes with its lease, whose end is not known: {error}")),
        }
    }

    /// Deletes a key that is there: a delete of nothing is no change.
    async fn delete(&self, access: &mut Access, scribe: &mut Scribe) {
        let key = Key::from(access.rng.random_range(0..KEYS));
        let at = place(Workload::Watch, &key);
        let read = access.store.get(&at, ReadOptions::default(), access.deadline()).await;
        let Some(entry) = read.ok().and_then(|read| read.value) else { return };
        let txn = Txn {
            when: vec![Compare::mod_revision(at.clone(), entry.mod_revision)],
            then: vec![Op::delete(at.clone())],
            otherwise: vec![],
        };
        access.ledger.deleting(&at, entry.mod_revision);
        match commit(Watch::Change { changes: BTreeMap::from([(key, None)]) }, txn, access, scribe).await {
            Ended::At(revision) => access.ledger.deleted(&at, entry.mod_revision, Some(revision)),
            Ended::Not => access.ledger.deleted(&at, entry.mod_revision, None),
            Ended::Unknown => {}
        }
    }
}

/// How a change ended.
enum Ended {
    At(Revision),
    Not,
    Unknown,
}

/// It is made by whichever branch of the transaction has something to do.
async fn commit(change: Watch, txn: Txn, access: &mut Access, scribe: &mut Scribe) -> Ended {
    let action = Action::Watch(change);
    let by_then = !txn.then.is_empty();
    scribe.invoke(action.clone());
    match access.store.commit(txn, access.deadline()).await {
        Ok(done) if done.result.succeeded == by_then => {
            scribe.ok(action, Some(done.result.revision), None);
            Ended::At(done.result.revision)
        }
        Ok(done) if done.resent => {
            scribe.unknown(action, "sent twice, and the second compare failed");
            Ended::Unknown
        }
        Ok(_) => {
            scribe.refused(action, "the key has changed");
            Ended::Not
        }
        Err(error) => {
            scribe.change_failed(action, &error);
            if error.applied() == Applied::No { Ended::Not } else { Ended::Unknown }
        }
    }
}

/// Where a watcher is.
#[derive(Clone, Copy)]
enum Place {
    /// It has seen nothing, or what it wants is no longer kept: it lists first.
    Nowhere,
    /// It has seen everything up to here.
    At(Revision),
}

/// A transaction at its revision, or how far the watcher is.
type Part = (Revision, Option<BTreeMap<Key, Option<i64>>>);

struct Watcher {
    watcher: u64,
    seen: Arc<AtomicU64>,
    place: Place,
    stream: Option<Stream>,
    /// What came in one message and was not taken down yet.
    waiting: VecDeque<Part>,
    backoff: Duration,
}

#[async_trait]
impl Actor for Watcher {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        tokio::time::sleep(std::mem::take(&mut self.backoff)).await;
        match (self.place, &mut self.stream) {
            (Place::Nowhere, _) => self.list(access, scribe).await,
            (Place::At(after), None) => self.open(after, access, scribe),
            (Place::At(_), Some(_)) => self.next(access, scribe).await,
        }
    }

    fn is_paced(&self) -> bool {
        false
    }
}

impl Watcher {
    async fn list(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let action = |entries| Action::Watch(Watch::List { watcher: self.watcher, entries });
        scribe.invoke(action(None));
        match list(access).await {
            Ok((revision, entries)) => {
                scribe.ok(action(Some(entries)), Some(revision), None);
                self.at(revision);
            }
            Err(error) => {
                scribe.read_failed(action(None), &error, None);
                self.backoff = LOOK_AGAIN;
            }
        }
    }

    fn open(&mut self, after: Revision, access: &Access, scribe: &Scribe) {
        let action = Action::Watch(Watch::Open { watcher: self.watcher, after });
        scribe.invoke(action.clone());
        match access.store.watch(&prefix(), after + 1) {
            Ok(stream) => {
                self.stream = Some(stream);
                scribe.ok(action, None, None);
            }
            Err(error) => {
                scribe.read_failed(action, &error, None);
                self.backoff = LOOK_AGAIN;
            }
        }
    }

    async fn next(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let action = |changes| Action::Watch(Watch::Next { watcher: self.watcher, changes });
        if self.waiting.is_empty() {
            if access.chance(LET_GO) {
                self.stream = None;
                return;
            }
            if access.chance(PAUSES) {
                self.backoff = Duration::from_millis(access.rng.random_range(PAUSE_MS));
                return;
            }
            let Some(stream) = &mut self.stream else { return };
            let message = stream.next().await;
            match message {
                Some(Ok(message)) => self.waiting = taken_apart(message),
                Some(Err(error)) => {
                    scribe.invoke(action(None));
                    scribe.read_failed(action(None), &error, None);
                    if matches!(error, Error::Compacted { .. }) {
                        self.place = Place::Nowhere;
                    }
                    self.stream = None;
                    self.backoff = LOOK_AGAIN;
                    return;
                }
                // Its error has been told.
                None => {
                    self.stream = None;
                    self.backoff = LOOK_AGAIN;
                    return;
                }
            }
        }
        if let Some((revision, changes)) = self.waiting.pop_front() {
            scribe.invoke(action(None));
            scribe.ok(action(changes), Some(revision), None);
            self.at(revision);
        }
    }

    fn at(&mut self, revision: Revision) {
        self.place = Place::At(revision);
        self.seen.store(revision, Ordering::Release);
    }
}

/// Each transaction of a message, and then how far that goes.
fn taken_apart(message: Changes) -> VecDeque<Part> {
    let progress = message.progress;
    let last = message.changes.last().map(|change| change.revision);
    let mut parts: VecDeque<_> = message
        .changes
        .into_iter()
        .map(|change| {
            let value = |entry: Option<lake_proto::kv::KeyValue>| entry.and_then(|entry| number_of(&entry.value));
            // Of other keys it should hear nothing: what it does is in the history, and of nobody.
            let key = |place: &str| key_at(place).unwrap_or_else(|| Key::from(place));
            let events = change.events.into_iter().map(|event| (key(&event.key), value(event.entry)));
            (change.revision, Some(events.collect()))
        })
        .collect();
    if last.is_none_or(|last| last < progress) {
        parts.push_back((progress, None));
    }
    parts
}

async fn list(access: &Access) -> Result<(Revision, BTreeMap<Key, i64>), Error> {
    let read = access.store.list_all(&prefix(), ReadOptions::default(), access.deadline()).await?;
    let entry = |entry: &lake_proto::kv::KeyValue| Some((key_at(&entry.key)?, number_of(&entry.value)?));
    Ok((read.revision, read.value.iter().filter_map(entry).collect()))
}

struct Final {
    seen: Vec<Arc<AtomicU64>>,
}

#[async_trait]
impl Frame for Final {
    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        let action = |entries| Action::Watch(Watch::Final { entries });
        scribe.invoke(action(None));
        let (revision, entries) = match list(access).await {
            Ok(all) => all,
            Err(error) => {
                scribe.read_failed(action(None), &error, None);
                return Err(error);
            }
        };
        scribe.ok(action(Some(entries)), Some(revision), None);
        let all_have = || async {
            let behind = self.seen.iter().filter(|seen| seen.load(Ordering::Acquire) < revision).count();
            if behind == 0 { Ok(()) } else { Err(format!("{behind} watchers have not seen revision {revision}")) }
        };
        // A watcher that never gets there is for the checker to find: it lacks changes that there were.
        if let Err(error) = crate::probe::until("every watcher to see the end", CATCH_UP, all_have).await {
            tracing::warn!("{error}");
        }
        Ok(())
    }
}
