//! For this crate's own tests: a store in memory with the faults of one that is not, each switched on by itself.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use lake_proto::coordination::{Scope, ScopeOwner};
use lake_proto::kv::{Compare, Condition, KeyValue, Op, Revision, Txn, TxnResult};

use crate::clock;
use crate::memory::MemoryStore;
use crate::store::{
    Applied, Capabilities, ChangeStream, Committed, Error, Leader, MetaStore, Page, Read, ReadOptions, Snapshot, Token,
};

/// Waits for what others of this process do.
pub async fn until(what: &str, is_so: impl Fn() -> bool) {
    let by = soon();
    for look in 1u32.. {
        if is_so() {
            return;
        }
        assert!(clock::now() < by, "waited in vain for {what}");
        // A clock that is paused goes on only where somebody sleeps: it stays where it is unless this takes unusually long.
        match look % 1000 {
            0 => tokio::time::sleep(Duration::from_millis(1)).await,
            _ => tokio::task::yield_now().await,
        }
    }
}

/// What another does between two sendings of a commit.
#[derive(Debug, Clone)]
pub enum Theirs {
    Put(String, Bytes),
    /// If it is there.
    Delete(String),
    /// Writes it again, with `1.json` for `0.json`, if it is there.
    Touch(String),
    /// If it is there.
    Move(String, String),
    /// All is as it was before the first sending, though written anew.
    Undo,
    /// Takes a scope.
    Claim(String),
    /// Nothing is answered after the second sending.
    Away,
}

/// What becomes of the first sending of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// There is none: the other was first.
    None,
    /// It is lost on its way, and nobody can say so.
    Lost,
    /// It is applied, and its answer is lost.
    Applied,
}

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
    /// What becomes of the next commit's first sending, and what comes before its second.
    pub interferes: Mutex<Option<(First, Vec<Theirs>)>>,
    /// Commits that wrote something else than the names of uuids.
    pub made: AtomicU32,
    /// Scopes that others hold. Those that a transaction acquires are not kept.
    claims: Mutex<Vec<String>>,
}

impl FaultyStore {
    fn call(&self) -> Result<(), Error> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match self.away.load(Ordering::SeqCst) {
            false => Ok(()),
            true => Err(unavailable()),
        }
    }

    /// One sending, as it is applied.
    async fn send(&self, mut txn: Txn, by: Instant) -> Result<TxnResult, Error> {
        let in_the_way = |one: &str, other: &str| one == other || one.starts_with(&format!("{other}/"));
        let claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_foreign = |compare: &Compare, path: &str| {
            matches!(compare.condition, Condition::ScopeFree(_))
                && (in_the_way(&compare.key, path) || in_the_way(path, &compare.key))
        };
        let foreign = claims.into_iter().filter(|path| txn.when.iter().any(|compare| is_foreign(compare, path)));
        let owner = || ScopeOwner::Procedure("another".to_owned());
        let conflicts: Vec<_> =
            foreign.map(|path| Scope { path, owner: owner(), fence: 1, acquired_unix_ms: 0 }).collect();
        txn.then.retain(|op| !matches!(op, Op::AcquireScope { .. } | Op::ReleaseScope { .. }));
        if !conflicts.is_empty() {
            // What it observes, and no more.
            txn.when.push(Compare::mod_revision("/kv/nothing", 1));
            txn.then.clear();
        }
        let result = self.store.commit(txn, by).await?.result;
        Ok(TxnResult { conflicts, ..result })
    }

    async fn leave(&self, key: &str, value: Option<Bytes>, by: Instant) -> Result<(), Error> {
        let there = self.store.get(key, ReadOptions::default(), by).await?.value;
        match (there, value) {
            (there, Some(value)) => {
                self.store.cas(key, there.as_ref().map(Token::of), value, by).await?;
            }
            (Some(there), None) => {
                self.store.cas_delete(key, Token::of(&there), by).await?;
            }
            (None, None) => {}
        }
        Ok(())
    }

    async fn all(&self, by: Instant) -> Result<Vec<KeyValue>, Error> {
        Ok(self.store.list_all("/lake/", ReadOptions::default(), by).await?.value)
    }

    /// Does what others do; `before` is what was there before the first sending.
    async fn interfere(&self, theirs: &[Theirs], before: &[KeyValue], by: Instant) -> Result<(), Error> {
        for theirs in theirs {
            let there = self.all(by).await?;
            let value = |key: &str| there.iter().find(|entry| entry.key == key).map(|entry| entry.value.clone());
            match theirs {
                Theirs::Put(key, value) => self.leave(key, Some(value.clone()), by).await?,
                Theirs::Delete(key) => self.leave(key, None, by).await?,
                Theirs::Touch(key) => {
                    if let Some(value) = value(key) {
                        let text = String::from_utf8_lossy(&value).replace("0.json", "1.json");
                        self.leave(key, Some(format!("{text} ").into()), by).await?;
                    }
                }
                Theirs::Move(from, to) => {
                    if let Some(value) = value(from) {
                        self.leave(from, None, by).await?;
                        self.leave(to, Some(value), by).await?;
                    }
                }
                Theirs::Undo => {
                    for entry in there.iter().filter(|entry| !before.contains(entry)) {
                        let old = before.iter().find(|old| old.key == entry.key);
                        self.leave(&entry.key, old.map(|old| old.value.clone()), by).await?;
                    }
                    for old in before.iter().filter(|old| there.iter().all(|entry| entry.key != old.key)) {
                        self.leave(&old.key, Some(old.value.clone()), by).await?;
                    }
                }
                Theirs::Claim(path) => {
                    self.claims.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
                }
                // Once that is sent.
                Theirs::Away => {}
            }
        }
        Ok(())
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
        let interferes = self.interferes.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (mut made, mut interfered) = (false, false);
        if let Some((first, theirs)) = interferes {
            let before = self.all(by).await?;
            made = first == First::Applied && self.send(txn.clone(), by).await?.succeeded;
            self.interfere(&theirs, &before, by).await?;
            interfered = first != First::None;
            let is_away = theirs.iter().any(|theirs| matches!(theirs, Theirs::Away));
            self.away.store(is_away, Ordering::SeqCst);
        }
        let first = self.overtakes.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut resent = first.is_some() || interfered;
        if let Some(first) = first {
            self.store.commit(first, by).await?;
        }
        while self.lose_answers.load(Ordering::SeqCst) > 0 {
            self.lose_answers.fetch_sub(1, Ordering::SeqCst);
            self.send(txn.clone(), by).await?;
            resent = true;
        }
        let writes = txn.then.iter().any(|op| op.is_write() && !op.key().starts_with("/lake/named/"));
        let result = self.send(txn, by).await?;
        if writes && (made || result.succeeded) {
            self.made.fetch_add(1, Ordering::SeqCst);
        }
        Ok(Committed { resent, result })
    }
}
