//! The store as the catalog of a process uses it: the cache learns of every revision that an answer mentions, each call is
//! counted by its reason, and how long one waits for its answer is known.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{KeyValue, Revision, Txn};
use lake_proto::watch::Changes;

use crate::cache::Noticed;
use crate::cache::counters::{Counting, Reason};
use crate::clock;
use crate::store::{
    Capabilities, ChangeStream, Committed, Error, Lease, MetaStore, Page, Read, ReadOptions, SharedStore, Snapshot,
};

/// The calls that wait for an answer, by when they began. They are as many as their callers.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    calls: Mutex<BTreeSet<(Instant, u64)>>,
    begun: AtomicU64,
}

/// One of them, until dropped.
struct Call<'a> {
    all: &'a UnderWay,
    this: (Instant, u64),
}

impl UnderWay {
    fn begin(&self) -> Call<'_> {
        let this = (clock::now(), self.begun.fetch_add(1, Ordering::Relaxed));
        self.lock().insert(this);
        Call { all: self, this }
    }

    /// How long the one has waited that waits longest.
    pub fn longest(&self) -> Option<Duration> {
        self.lock().first().map(|(began, _)| clock::since(*began))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<(Instant, u64)>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.this);
    }
}

/// A store that tells the cache of every revision it is told of, and counts.
#[derive(Debug)]
pub(super) struct Noticing {
    store: SharedStore,
    pointers: Noticed,
    counting: Arc<Counting>,
    under_way: Arc<UnderWay>,
}

impl Noticing {
    pub fn new(store: SharedStore, pointers: Noticed, counting: Arc<Counting>, under_way: Arc<UnderWay>) -> Self {
        Self { store, pointers, counting, under_way }
    }

    /// A call begins. It waits for its answer until what this returns is dropped.
    fn call(&self, reason: Reason) -> Call<'_> {
        self.counting.call(reason);
        self.under_way.begin()
    }

    fn noticed<T>(&self, revision: impl Fn(&T) -> Revision, answer: Result<T, Error>) -> Result<T, Error> {
        if let Ok(answer) = &answer {
            self.pointers.notice(revision(answer));
        }
        answer
    }
}

#[async_trait]
impl MetaStore for Noticing {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        let _waits = self.call(Reason::Read);
        let read = self.store.get(key, options, by).await;
        self.noticed(|read| read.revision, read)
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        let _waits = self.call(Reason::Read);
        let read = self.store.batch_get(keys, options, by).await;
        self.noticed(|read| read.revision, read)
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Page>, Error> {
        let _waits = self.call(Reason::List);
        let read = self.store.list(prefix, page, limit, options, by).await;
        self.noticed(|read| read.revision, read)
    }

    async fn open_snapshot(&self, options: ReadOptions, by: Instant) -> Result<Read<Snapshot>, Error> {
        let _waits = self.call(Reason::Read);
        let read = self.store.open_snapshot(options, by).await;
        self.noticed(|read| read.revision, read)
    }

    async fn close_snapshot(&self, snapshot: Snapshot, by: Instant) -> Result<bool, Error> {
        let _waits = self.call(Reason::Read);
        self.store.close_snapshot(snapshot, by).await
    }

    async fn commit(&self, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let _waits = self.call(Reason::Write);
        let committed = self.store.commit(txn, by).await;
        self.noticed(|committed| committed.result.revision, committed)
    }

    async fn watch(&self, prefix: &str, from: Revision, by: Instant) -> Result<ChangeStream, Error> {
        let _waits = self.call(Reason::Watch);
        let told = self.store.watch(prefix, from, by).await?;
        let pointers = self.pointers.clone();
        let noticed = move |told: &Result<Changes, Error>| {
            if let Ok(told) = told {
                pointers.notice(told.progress);
            }
        };
        Ok(told.inspect(noticed).boxed())
    }

    async fn grant_lease(&self, ttl: Duration, holder: &str, by: Instant) -> Result<Lease, Error> {
        let _waits = self.call(Reason::Write);
        self.store.grant_lease(ttl, holder, by).await
    }

    async fn renew_lease(&self, lease: Lease, by: Instant) -> Result<Option<Lease>, Error> {
        let _waits = self.call(Reason::Write);
        self.store.renew_lease(lease, by).await
    }

    async fn revoke_lease(&self, id: LeaseId, by: Instant) -> Result<bool, Error> {
        let _waits = self.call(Reason::Write);
        self.store.revoke_lease(id, by).await
    }
}
