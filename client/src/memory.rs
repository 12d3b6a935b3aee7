//! The in-memory store: for tests, and the reference of what a store does.
//!
//! Plain and slow on purpose: one mutex around a `BTreeMap`, so that it can be read against the contract line by line.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Compare, Condition, Invalid, KeyValue, Op, OpResult, Revision, Txn, TxnResult, validate_key};
use lake_proto::limits::{MAX_BATCH_GET_KEYS, MAX_PAGE_ENTRIES};

use crate::store::{Capabilities, Committed, Error, MetaStore, Page, Read, ReadOptions};

/// Most listings whose pages are held at once; the oldest expires first.
const MAX_HELD_LISTINGS: usize = 64;
/// A store in this process's memory.
#[derive(Debug, Default)]
pub struct MemoryStore {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    map: BTreeMap<String, KeyValue>,
    revision: Revision,
    /// Listings under way: the id in their page tokens, the revision, and what is still to come.
    listings: Vec<(u64, Revision, Vec<KeyValue>)>,
    next_listing: u64,
}

impl MemoryStore {
    /// The term that every transaction runs in: there is no election here.
    pub const TERM: u64 = 1;

    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
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

    fn apply(&mut self, txn: Txn) -> TxnResult {
        let succeeded = txn.when.iter().all(|c| self.holds(c));
        let observed = if succeeded { vec![] } else { self.observed(&txn.when) };
        let revision = self.revision + 1;
        let mut changed = false;
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
                    self.map.insert(key, entry);
                    changed = true;
                    OpResult::Put { previous: old.filter(|_| return_previous) }
                }
                Op::Delete { key, return_previous } => {
                    let old = self.map.remove(&key);
                    changed |= old.is_some();
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
        if changed {
            self.revision = revision;
        }
        TxnResult { revision: self.revision, succeeded, results, observed, ..TxnResult::default() }
    }
}

#[async_trait]
impl MetaStore for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities { multi_key: true, consistent_listing: true }
    }

    async fn get(&self, key: &str, _: ReadOptions, _: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        validate_key(key)?;
        let inner = self.lock();
        Ok(Read { revision: inner.revision, value: inner.map.get(key).cloned() })
    }

    async fn batch_get(&self, keys: &[String], _: ReadOptions, _: Instant) -> Result<Read<Vec<KeyValue>>, Error> {
        if keys.len() > MAX_BATCH_GET_KEYS {
            return Err(Invalid::BatchKeys { count: keys.len() }.into());
        }
        let inner = self.lock();
        Ok(Read { revision: inner.revision, value: keys.iter().filter_map(|k| inner.map.get(k).cloned()).collect() })
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        _: ReadOptions,
        _: Instant,
    ) -> Result<Read<Page>, Error> {
        let limit = if limit == 0 { MAX_PAGE_ENTRIES } else { (limit as usize).min(MAX_PAGE_ENTRIES) };
        let mut inner = self.lock();
        let (revision, mut rest) = match page {
            None => (inner.revision, inner.under(prefix).cloned().collect()),
            Some(token) => {
                let held = inner.listings.iter().position(|(id, _, _)| id.to_string() == token);
                let at = held.ok_or_else(|| Error::SnapshotExpired { prefix: prefix.to_owned() })?;
                let (_, revision, rest) = inner.listings.remove(at);
                (revision, rest)
            }
        };
        let tail = rest.split_off(limit.min(rest.len()));
        let next = (!tail.is_empty()).then(|| {
            inner.next_listing += 1;
            let id = inner.next_listing;
            if inner.listings.len() == MAX_HELD_LISTINGS {
                inner.listings.remove(0);
            }
            inner.listings.push((id, revision, tail));
            id.to_string()
        });
        Ok(Read { revision, value: Page { entries: rest, next } })
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
        Ok(Committed { result: self.lock().apply(txn), resent: false })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lake_proto::kv::Expected;

    use super::*;
    use crate::clock;

    fn soon() -> Instant {
        clock::now() + Duration::from_secs(5)
    }

    #[tokio::test]
    async fn a_recreated_key_is_not_taken_for_the_old_one() {
        let store = MemoryStore::new();
        let first = store.cas("/kv/a", Expected::Absent, "1".into(), soon()).await.unwrap().result.revision;
        assert!(store.cas_delete("/kv/a", first, soon()).await.unwrap().result.succeeded);
        assert!(store.cas("/kv/a", Expected::Absent, "1".into(), soon()).await.unwrap().result.succeeded);
        let stale = store.cas("/kv/a", Expected::ModRevision(first), "2".into(), soon()).await.unwrap();
        assert!(!stale.result.succeeded);
        assert_eq!(stale.result.observed.len(), 1);
    }

    #[tokio::test]
    async fn pages_see_one_revision() {
        let store = MemoryStore::new();
        for i in 0..5 {
            store.cas(&format!("/kv/{i}"), Expected::Absent, "x".into(), soon()).await.unwrap();
        }
        let first = store.list("/kv/", None, 2, ReadOptions::default(), soon()).await.unwrap();
        store.cas("/kv/9", Expected::Absent, "x".into(), soon()).await.unwrap();
        let next = first.value.next.unwrap();
        let second = store.list("/kv/", Some(&next), 10, ReadOptions::default(), soon()).await.unwrap();
        assert_eq!((second.revision, second.value.entries.len(), second.value.next), (first.revision, 3, None));
        let again = store.list("/kv/", Some(&next), 10, ReadOptions::default(), soon()).await;
        assert_eq!(again, Err(Error::SnapshotExpired { prefix: "/kv/".into() }));
    }
}
