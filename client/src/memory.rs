//! The in-memory store: for tests, and the reference of what a store does.
//!
//! Plain and slow on purpose: one mutex around a `BTreeMap`, so that it can be read against the contract line by line. It has
//! neither leases nor scopes, and no elections: every transaction runs in term [`MemoryStore::TERM`].
//!
//! Limits: 64 listings and as many snapshots held, of which the oldest expires first; the last 1,000 changes kept.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{
    Compare, Condition, KeyValue, Op, OpResult, Revision, Txn, TxnResult, validate_key, validate_keys, validate_prefix,
};
use lake_proto::limits::{MAX_PAGE_ENTRIES, page_limit};
use lake_proto::watch::{Change, Changes, Event};
use tokio::sync::watch;

use crate::clock;
use crate::store::{
    Applied, Capabilities, ChangeStream, Committed, Error, InVain, Leader, MetaStore, Page, Read, ReadOptions,
    SharedStore, Snapshot,
};

/// Most listings whose pages are held at once; the oldest expires first. As many snapshots.
const MAX_HELD: usize = 64;
/// Changes kept for those who watch.
const MAX_CHANGES: usize = 1000;

/// A store in this process's memory.
#[derive(Debug, Default)]
pub struct MemoryStore {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    state: State,
    /// Listings under way: the id in their page tokens, the revision, and what is still to come.
    listings: Vec<(u64, Revision, Vec<KeyValue>)>,
    snapshots: Vec<(u64, State)>,
    next_id: u64,
    changes: VecDeque<Change>,
    /// The first revision that can be watched from.
    oldest: Revision,
    changed: watch::Sender<()>,
}

/// The map, and what a transaction does to it.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    map: BTreeMap<String, KeyValue>,
    revision: Revision,
}

impl MemoryStore {
    /// The term that every transaction runs in: there is no election here.
    pub const TERM: u64 = 1;

    pub fn new() -> Self {
        Self::default()
    }

    /// A new one that anything may share.
    pub fn shared() -> SharedStore {
        Arc::new(Self::new())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Waits until the revision that a read asks for is there.
    async fn reached(&self, doing: &str, options: ReadOptions, deadline: Instant) -> Result<(), Error> {
        if options.snapshot.is_some() {
            return Ok(());
        }
        let (started, mut changed) = (clock::now(), self.lock().changed.subscribe());
        while self.lock().state.revision < options.min_revision {
            if tokio::time::timeout_at(deadline.into(), changed.changed()).await.is_err() {
                let last = format!("revision {} has not come", options.min_revision);
                let (doing, elapsed) = (doing.to_owned(), clock::since(started));
                let in_vain = InVain { doing, attempts: 1, elapsed, leader: Leader::Without, last };
                return Err(in_vain.unavailable(vec!["this process's memory".to_owned()], Applied::No));
            }
        }
        Ok(())
    }
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn commit(&mut self, txn: Txn) -> TxnResult {
        let (result, events) = self.state.apply(txn);
        if !events.is_empty() {
            let events = events.into_iter().map(|(key, entry)| Event { key, entry }).collect();
            self.changes.push_back(Change { revision: result.revision, events });
            if self.changes.len() > MAX_CHANGES {
                self.oldest = self.changes.pop_front().map_or(self.oldest, |gone| gone.revision + 1);
            }
            self.changed.send_replace(());
        }
        result
    }

    /// The state that a read is made of.
    fn read(&self, doing: &str, options: ReadOptions) -> Result<&State, Error> {
        let Some(snapshot) = options.snapshot else { return Ok(&self.state) };
        let held = self.snapshots.iter().find(|(id, _)| *id == snapshot.to_wire());
        held.map(|(_, state)| state).ok_or_else(|| Error::snapshot_expired(doing))
    }

    /// What there is to tell of a prefix from a revision on; `None`: nothing yet.
    fn told(&self, prefix: &str, from: Revision) -> Result<Option<Changes>, Error> {
        if from < self.oldest {
            return Err(Error::compacted(&format!("watching {prefix:?}"), self.oldest));
        }
        if from > self.state.revision {
            return Ok(None);
        }
        let mut changes = Vec::new();
        for change in self.changes.iter().filter(|change| change.revision >= from) {
            let events: Vec<_> = change.events.iter().filter(|event| event.key.starts_with(prefix)).cloned().collect();
            if !events.is_empty() {
                changes.push(Change { revision: change.revision, events });
            }
        }
        Ok(Some(Changes { changes, progress: self.state.revision }))
    }
}

impl State {
    /// The state that holds one entry at most.
    #[cfg(feature = "store-object")]
    pub fn of_one(entry: Option<KeyValue>, revision: Revision) -> Self {
        Self { map: entry.into_iter().map(|entry| (entry.key.clone(), entry)).collect(), revision }
    }

    #[cfg(feature = "store-object")]
    pub fn get(&self, key: &str) -> Option<&KeyValue> {
        self.map.get(key)
    }

    fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a KeyValue> {
        self.map.range(prefix.to_owned()..).map(|(_, e)| e).take_while(move |e| e.key.starts_with(prefix))
    }

    fn holds(&self, compare: &Compare) -> bool {
        let entry = self.map.get(&compare.key);
        match &compare.condition {
            Condition::Absent => entry.is_none(),
            Condition::ModRevision(r) => entry.is_some_and(|e| e.mod_revision == *r),
            Condition::CreateRevision(r) => entry.is_some_and(|e| e.create_revision == *r),
            Condition::Version(v) => entry.is_some_and(|e| e.version == *v),
            Condition::Value(v) => entry.is_some_and(|e| e.value == *v),
            Condition::PrefixEmpty => self.under(&compare.key).next().is_none(),
            Condition::PrefixUnchangedSince(r) => self.under(&compare.key).all(|e| e.mod_revision <= *r),
            Condition::EntryTerm(t) => *t == MemoryStore::TERM,
            // There are none: `commit` has refused operations that would make one.
            Condition::LeaseAlive(_) => false,
            Condition::ScopeFree(owner) => !matches!(owner, Some(ScopeOwner::Lease(_))),
        }
    }

    fn observed(&self, when: &[Compare]) -> Vec<KeyValue> {
        let mut seen = BTreeMap::new();
        for compare in when {
            match compare.condition {
                Condition::EntryTerm(_) | Condition::LeaseAlive(_) | Condition::ScopeFree(_) => {}
                Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => {
                    seen.extend(self.under(&compare.key).take(MAX_PAGE_ENTRIES).map(|e| (e.key.clone(), e.clone())));
                }
                _ => seen.extend(self.map.get(&compare.key).map(|e| (e.key.clone(), e.clone()))),
            }
        }
        seen.into_values().collect()
    }

    /// Runs a transaction without operations on scopes, and says what it left under the keys that it changed.
    pub fn apply(&mut self, txn: Txn) -> (TxnResult, BTreeMap<String, Option<KeyValue>>) {
        let succeeded = txn.when.iter().all(|c| self.holds(c));
        let observed = if succeeded { vec![] } else { self.observed(&txn.when) };
        let revision = self.revision + 1;
        let mut events = BTreeMap::new();
        let branch = if succeeded { txn.then } else { txn.otherwise };
        let mut results = Vec::with_capacity(branch.len());
        for op in branch {
            results.push(match op {
                Op::Put { key, value, return_previous, lease: _ } => {
                    let old = self.map.remove(&key);
                    let entry = KeyValue {
                        key: key.clone(),
                        value,
                        version: old.as_ref().map_or(1, |o| o.version + 1),
                        create_revision: old.as_ref().map_or(revision, |o| o.create_revision),
                        mod_revision: revision,
                        lease: None,
                    };
                    self.map.insert(key.clone(), entry.clone());
                    events.insert(key, Some(entry));
                    OpResult::Put { previous: old.filter(|_| return_previous) }
                }
                Op::Delete { key, return_previous } => {
                    let old = self.map.remove(&key);
                    if old.is_some() {
                        events.insert(key, None);
                    }
                    OpResult::Delete { deleted: old.is_some(), previous: old.filter(|_| return_previous) }
                }
                Op::Get { key } => OpResult::Get { entry: self.map.get(&key).cloned() },
                Op::List { prefix, limit } => {
                    let limit = limit as usize;
                    let mut entries: Vec<_> = self.under(&prefix).take(limit + 1).cloned().collect();
                    let more = entries.len() > limit;
                    entries.truncate(limit);
                    OpResult::List { entries, more }
                }
                Op::AcquireScope { .. } | Op::ReleaseScope { .. } => unreachable!("`commit` has refused these"),
            });
        }
        if !events.is_empty() {
            self.revision = revision;
        }
        (TxnResult { revision: self.revision, succeeded, results, observed, ..TxnResult::default() }, events)
    }
}

#[async_trait]
impl MetaStore for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities { leases: false, ..Capabilities::CLUSTER }
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        validate_key(key)?;
        self.reached(key, options, by).await?;
        let inner = self.lock();
        let state = inner.read(key, options)?;
        Ok(Read { revision: state.revision, value: state.map.get(key).cloned() })
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        validate_keys(keys)?;
        self.reached("reading several keys", options, by).await?;
        let inner = self.lock();
        let state = inner.read("reading several keys", options)?;
        Ok(Read { revision: state.revision, value: keys.iter().filter_map(|k| state.map.get(k).cloned()).collect() })
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Page>, Error> {
        validate_prefix(prefix)?;
        if page.is_none() {
            self.reached(prefix, options, by).await?;
        }
        let limit = page_limit(limit);
        let mut inner = self.lock();
        let (revision, mut rest) = match page {
            None => {
                let state = inner.read(prefix, options)?;
                (state.revision, state.under(prefix).cloned().collect())
            }
            Some(token) => {
                let held = inner.listings.iter().position(|(id, _, _)| id.to_string() == token);
                let at = held.ok_or_else(|| Error::snapshot_expired(&format!("listing {prefix}")))?;
                let (_, revision, rest) = inner.listings.remove(at);
                (revision, rest)
            }
        };
        let tail = rest.split_off(limit.min(rest.len()));
        let next = (!tail.is_empty()).then(|| {
            let id = inner.next_id();
            if inner.listings.len() == MAX_HELD {
                inner.listings.remove(0);
            }
            inner.listings.push((id, revision, tail));
            id.to_string()
        });
        Ok(Read { revision, value: Page { entries: rest, next } })
    }

    async fn open_snapshot(&self, options: ReadOptions, by: Instant) -> Result<Read<Snapshot>, Error> {
        self.reached("opening a snapshot", options, by).await?;
        let mut inner = self.lock();
        let state = inner.read("opening a snapshot", options)?.clone();
        let (id, revision) = (inner.next_id(), state.revision);
        if inner.snapshots.len() == MAX_HELD {
            inner.snapshots.remove(0);
        }
        inner.snapshots.push((id, state));
        let value = Snapshot::from_wire(id).expect("ids begin at 1");
        Ok(Read { revision, value })
    }

    async fn close_snapshot(&self, snapshot: Snapshot, _: Instant) -> Result<bool, Error> {
        let mut inner = self.lock();
        let before = inner.snapshots.len();
        inner.snapshots.retain(|(id, _)| *id != snapshot.to_wire());
        Ok(inner.snapshots.len() < before)
    }

    async fn watch(&self, prefix: &str, from: Revision, _: Instant) -> Result<ChangeStream, Error> {
        validate_prefix(prefix)?;
        let (shared, prefix) = (self.inner.clone(), prefix.to_owned());
        let (from, changed) = {
            let inner = self.lock();
            (if from == 0 { inner.state.revision + 1 } else { from }, inner.changed.subscribe())
        };
        let stream = futures::stream::unfold(Some((from, changed)), move |watching| {
            let (shared, prefix) = (shared.clone(), prefix.clone());
            async move {
                let (from, mut changed) = watching?;
                loop {
                    let told = lock(&shared).told(&prefix, from);
                    match told {
                        Ok(Some(changes)) => {
                            let next = changes.progress + 1;
                            return Some((Ok(changes), Some((next, changed))));
                        }
                        // The sender lives as long as what is locked above.
                        Ok(None) => changed.changed().await.ok()?,
                        Err(e) => return Some((Err(e), None)),
                    }
                }
            }
        });
        Ok(Box::pin(stream))
    }

    async fn commit(&self, txn: Txn, _: Instant) -> Result<Committed, Error> {
        txn.validate()?;
        let beyond = |op: &Op| match op {
            Op::Put { lease, .. } => lease.is_some(),
            Op::AcquireScope { .. } | Op::ReleaseScope { .. } => true,
            Op::Delete { .. } | Op::Get { .. } | Op::List { .. } => false,
        };
        if txn.then.iter().chain(&txn.otherwise).any(beyond) {
            let message = "the store in memory has neither leases nor scopes".to_owned();
            return Err(Error::Refused { doing: "running a transaction".to_owned(), message });
        }
        Ok(Committed { result: self.lock().commit(txn), resent: false })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::conformance;

    fn soon() -> Instant {
        clock::now() + Duration::from_secs(5)
    }

    #[tokio::test]
    async fn it_does_what_a_store_does() {
        conformance::run(MemoryStore::shared()).await;
    }

    #[tokio::test]
    async fn pages_are_given_once_and_expire() {
        let store = MemoryStore::new();
        for i in 0..5 {
            store.cas(&format!("/kv/{i}"), None, "x".into(), soon()).await.unwrap();
        }
        let first = store.list("/kv/", None, 2, ReadOptions::default(), soon()).await.unwrap();
        let next = first.value.next.unwrap();
        let second = store.list("/kv/", Some(&next), 10, ReadOptions::default(), soon()).await.unwrap();
        assert_eq!((second.revision, second.value.entries.len(), second.value.next), (first.revision, 3, None));
        let again = store.list("/kv/", Some(&next), 10, ReadOptions::default(), soon()).await;
        assert_eq!(again, Err(Error::snapshot_expired("listing /kv/")));
    }

    #[tokio::test]
    async fn changes_that_are_no_longer_kept_are_said_to_be_gone() {
        use futures::StreamExt;
        let store = MemoryStore::new();
        for _ in 0..=MAX_CHANGES {
            store.commit(Txn { then: vec![Op::put("/kv/a", "x")], ..Txn::default() }, soon()).await.unwrap();
        }
        let mut watch = store.watch("/kv/", 1, soon()).await.unwrap();
        let gone = watch.next().await.unwrap().unwrap_err();
        assert_eq!(gone, Error::compacted("watching \"/kv/\"", 2));
        assert!(watch.next().await.is_none());
        let mut watch = store.watch("/kv/", 2, soon()).await.unwrap();
        assert_eq!(watch.next().await.unwrap().unwrap().changes.len(), MAX_CHANGES);
    }
}
