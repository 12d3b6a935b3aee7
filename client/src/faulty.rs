//! For this crate's own tests: a store in memory with the faults of one that is not, each switched on by itself.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_proto::kv::{KeyValue, Revision, Txn};

use crate::clock;
use crate::memory::MemoryStore;
use crate::store::{
    Applied, Capabilities, ChangeStream, Committed, Error, Leader, MetaStore, Page, Read, ReadOptions, Snapshot,
};

/// The store. Without a fault it does what [`MemoryStore`] does.
#[derive(Debug, Default)]
pub struct FaultyStore {
    store: MemoryStore,
    /// Calls so far.
    pub calls: AtomicU32,
    /// Every call fails.
    pub away: AtomicBool,
    /// So many commits are applied and their answers lost; each is asked for again, as the remote store does.
    pub lose_answers: AtomicU32,
    /// Another's, which comes before the next commit: that is lost on its way, and sent again.
    pub overtakes: Mutex<Option<Txn>>,
    /// Watches are not refused.
    pub watches: AtomicBool,
    /// Reads of several keys take a while.
    pub slow_reads: AtomicBool,
    /// Reads of one key take a while, and fail at their deadlines.
    pub slow_gets: AtomicBool,
    /// Listings have expired as soon as they are asked for.
    pub forgets_listings: AtomicBool,
}

impl FaultyStore {
    fn call(&self) -> Result<(), Error> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match self.away.load(Ordering::SeqCst) {
            false => Ok(()),
            true => Err(unavailable()),
        }
    }
}

fn unavailable() -> Error {
    Error::Unavailable {
        doing: "test".into(),
        endpoints: vec![],
        attempts: 1,
        elapsed: Duration::ZERO,
        leader: Leader::Without,
        last: String::new(),
        applied: Applied::No,
    }
}

/// Long enough for any call of a test.
pub fn soon() -> Instant {
    clock::now() + Duration::from_secs(30)
}

#[async_trait]
impl MetaStore for FaultyStore {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        self.call()?;
        if self.slow_gets.load(Ordering::SeqCst) {
            let answered = clock::now() + Duration::from_millis(30);
            tokio::time::sleep_until(answered.min(by).into()).await;
            if answered > by {
                return Err(unavailable());
            }
        }
        self.store.get(key, options, by).await
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        self.call()?;
        if self.slow_reads.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
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
        self.call()?;
        if self.forgets_listings.load(Ordering::SeqCst) {
            return Err(Error::snapshot_expired(&format!("listing {prefix}")));
        }
        self.store.list(prefix, page, limit, options, by).await
    }

    async fn open_snapshot(&self, options: ReadOptions, by: Instant) -> Result<Read<Snapshot>, Error> {
        self.call()?;
        self.store.open_snapshot(options, by).await
    }

    async fn close_snapshot(&self, snapshot: Snapshot, by: Instant) -> Result<bool, Error> {
        self.call()?;
        self.store.close_snapshot(snapshot, by).await
    }

    async fn watch(&self, prefix: &str, from: Revision, by: Instant) -> Result<ChangeStream, Error> {
        self.call()?;
        match self.watches.load(Ordering::SeqCst) {
            true => self.store.watch(prefix, from, by).await,
            false => Err(Error::cannot("watching".to_owned(), "watches are switched off")),
        }
    }

    async fn commit(&self, txn: Txn, by: Instant) -> Result<Committed, Error> {
        self.call()?;
        let first = self.overtakes.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut resent = first.is_some();
        if let Some(first) = first {
            self.store.commit(first, by).await?;
        }
        while self.lose_answers.load(Ordering::SeqCst) > 0 {
            self.lose_answers.fetch_sub(1, Ordering::SeqCst);
            self.store.commit(txn.clone(), by).await?;
            resent = true;
        }
        Ok(Committed { resent, ..self.store.commit(txn, by).await? })
    }
}
