//! A store on whose way a test does something to the calls of a node.

use std::fmt::Debug;
use std::ops::Deref;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::store::{
    Applied, Capabilities, ChangeStream, Committed, Error, Leader, Lease, MetaStore, Page, Read, ReadOptions,
    SharedStore, Snapshot,
};
use lake_proto::kv::{KeyValue, Op, Revision, Txn};

/// What is done to calls. Without anything of its own it lets all of them through.
#[async_trait]
pub trait Way: Debug + Send + Sync + 'static {
    fn capabilities(&self, of: Capabilities) -> Capabilities {
        of
    }

    /// Before a call about keys that begin so, other than a commit. An error is its answer.
    async fn call(&self, _about: &str, _by: Instant) -> Result<(), Error> {
        Ok(())
    }

    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        store.commit(txn, by).await
    }

    async fn open_snapshot(&self, store: &SharedStore, by: Instant) -> Result<Read<Snapshot>, Error> {
        store.open_snapshot(ReadOptions::default(), by).await
    }

    async fn grant_lease(&self, store: &SharedStore, ttl: Duration, by: Instant) -> Result<Lease, Error> {
        store.grant_lease(ttl, "test", by).await
    }

    async fn renew_lease(&self, store: &SharedStore, lease: Lease, by: Instant) -> Result<Option<Lease>, Error> {
        store.renew_lease(lease, by).await
    }
}

/// A store, and the way to it.
#[derive(Debug)]
pub struct Through<W> {
    pub store: SharedStore,
    pub way: W,
}

impl<W> Deref for Through<W> {
    type Target = W;

    fn deref(&self) -> &W {
        &self.way
    }
}

/// Makes this, once, just before a table is made or changed.
#[derive(Debug, Default)]
pub struct Meanwhile(pub Mutex<Option<Txn>>);

/// Whether it makes or changes a table.
fn is_of_table(txn: &Txn) -> bool {
    txn.then.iter().any(|op| matches!(op, Op::Put { key, .. } if key.starts_with("/lake/table/")))
}

/// The same, and while the gate is held no table is made or changed.
#[derive(Debug, Default)]
pub struct Gated {
    pub first: Meanwhile,
    pub gate: tokio::sync::Mutex<()>,
    /// How many have come to the gate.
    pub came: AtomicUsize,
}

#[async_trait]
impl Way for Gated {
    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        if is_of_table(&txn) {
            self.came.fetch_add(1, Ordering::SeqCst);
            drop(self.gate.lock().await);
        }
        self.first.commit(store, txn, by).await
    }
}

#[async_trait]
impl Way for Meanwhile {
    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let first = if is_of_table(&txn) { self.0.lock().unwrap().take() } else { None };
        if let Some(first) = first {
            assert!(store.commit(first, by).await?.result.succeeded);
        }
        store.commit(txn, by).await
    }
}

/// No peer answers, or none did before the connection broke.
pub fn unavailable(applied: Applied) -> Error {
    Error::Unavailable {
        doing: "committing".into(),
        endpoints: vec!["127.0.0.1:1".into()],
        attempts: 1,
        elapsed: Duration::ZERO,
        leader: Leader::Unknown { term: 0 },
        last: "connection refused".into(),
        applied,
    }
}

#[async_trait]
impl<W: Way> MetaStore for Through<W> {
    fn capabilities(&self) -> Capabilities {
        self.way.capabilities(self.store.capabilities())
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        self.call(key, by).await?;
        self.store.get(key, options, by).await
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        self.call(keys.first().map_or("", String::as_str), by).await?;
        self.store.batch_get(keys, options, by).await
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Page>, Error> {
        self.call(prefix, by).await?;
        self.store.list(prefix, page, limit, options, by).await
    }

    async fn open_snapshot(&self, _: ReadOptions, by: Instant) -> Result<Read<Snapshot>, Error> {
        self.call("", by).await?;
        self.way.open_snapshot(&self.store, by).await
    }

    async fn close_snapshot(&self, snapshot: Snapshot, by: Instant) -> Result<bool, Error> {
        self.store.close_snapshot(snapshot, by).await
    }

    async fn watch(&self, prefix: &str, from: Revision, by: Instant) -> Result<ChangeStream, Error> {
        self.call(prefix, by).await?;
        self.store.watch(prefix, from, by).await
    }

    async fn commit(&self, txn: Txn, by: Instant) -> Result<Committed, Error> {
        self.call("", by).await?;
        self.way.commit(&self.store, txn, by).await
    }

    async fn grant_lease(&self, ttl: Duration, _holder: &str, by: Instant) -> Result<Lease, Error> {
        self.call("", by).await?;
        self.way.grant_lease(&self.store, ttl, by).await
    }

    async fn renew_lease(&self, lease: Lease, by: Instant) -> Result<Option<Lease>, Error> {
        self.call("", by).await?;
        self.way.renew_lease(&self.store, lease, by).await
    }
}
