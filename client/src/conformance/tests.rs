//! The suite finds what is wrong with a store: here with some that break the contract in one way each.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use futures::StreamExt;
use lake_proto::kv::{Condition, KeyValue, Revision, Txn};
use lake_proto::watch::Changes;

use super::run_small;
use crate::memory::MemoryStore;
use crate::store::{Capabilities, ChangeStream, Committed, Error, MetaStore, Page, Read, ReadOptions, Snapshot};

/// What a store does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Whatever state compare-and-set expects is taken for the one that is there.
    TokensIgnored,
    /// Of a transaction the first operation is done.
    Halves,
    /// A compare that fails does not say why.
    Mute,
    /// What is read together does not come in the order that was asked for.
    Disorder,
    /// The last entry is not listed.
    ListsShort,
    /// Each page is of the moment at which it is asked for.
    PagesMove,
    /// Reads of a snapshot are of the moment, too.
    SnapshotsMove,
    /// A revision that is to be waited for is not.
    Hasty,
    /// A watch leaves transactions of several keys out.
    WatchSkips,
    /// A watch tells everything twice.
    WatchRepeats,
    /// It says that it has leases.
    Boasts,
    /// It says that it has no snapshots.
    Coy,
}

#[derive(Debug)]
struct Flawed {
    store: MemoryStore,
    flaw: Flaw,
}

impl Flawed {
    fn options(&self, options: ReadOptions) -> ReadOptions {
        match self.flaw {
            Flaw::SnapshotsMove => ReadOptions { snapshot: None, ..options },
            Flaw::Hasty => ReadOptions { min_revision: 0, ..options },
            _ => options,
        }
    }
}

#[async_trait]
impl MetaStore for Flawed {
    fn capabilities(&self) -> Capabilities {
        match self.flaw {
            Flaw::Boasts => Capabilities::CLUSTER,
            Flaw::Coy => Capabilities { snapshots: false, ..self.store.capabilities() },
            _ => self.store.capabilities(),
        }
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        self.store.get(key, self.options(options), by).await
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        let mut read = self.store.batch_get(keys, self.options(options), by).await?;
        if self.flaw == Flaw::Disorder {
            read.value.reverse();
        }
        Ok(read)
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Page>, Error> {
        if self.flaw == Flaw::PagesMove {
            let all = self.store.list_all(prefix, options, by).await?;
            let behind = |entry: &KeyValue| page.is_none_or(|page| entry.key.as_str() > page);
            let mut entries: Vec<_> = all.value.into_iter().filter(behind).collect();
            let more = entries.len() > limit as usize;
            entries.truncate(limit as usize);
            let next = entries.last().filter(|_| more).map(|last| last.key.clone());
            return Ok(Read { revision: all.revision, value: Page { entries, next } });
        }
        let mut read = self.store.list(prefix, page, limit, self.options(options), by).await?;
        if self.flaw == Flaw::ListsShort && read.value.next.is_none() {
            read.value.entries.pop();
        }
        Ok(read)
    }

    async fn open_snapshot(&self, options: ReadOptions, by: Instant) -> Result<Read<Snapshot>, Error> {
        self.store.open_snapshot(options, by).await
    }

    async fn close_snapshot(&self, snapshot: Snapshot, by: Instant) -> Result<bool, Error> {
        self.store.close_snapshot(snapshot, by).await
    }

    async fn watch(&self, prefix: &str, from: Revision, by: Instant) -> Result<ChangeStream, Error> {
        let (flaw, told) = (self.flaw, self.store.watch(prefix, from, by).await?);
        let spoilt = move |told: Result<Changes, Error>| {
            let Changes { mut changes, progress } = told?;
            match flaw {
                Flaw::WatchSkips => changes.retain(|change| change.events.len() < 2),
                Flaw::WatchRepeats => changes = changes.iter().chain(&changes).cloned().collect(),
                _ => {}
            }
            Ok(Changes { changes, progress })
        };
        Ok(told.map(spoilt).boxed())
    }

    async fn commit(&self, mut txn: Txn, by: Instant) -> Result<Committed, Error> {
        match self.flaw {
            Flaw::TokensIgnored => {
                txn.when.retain(|compare| !matches!(compare.condition, Condition::ModRevision(_)));
            }
            Flaw::Halves => txn.then.truncate(1),
            _ => {}
        }
        let mut committed = self.store.commit(txn, by).await?;
        if self.flaw == Flaw::Mute {
            committed.result.observed.clear();
        }
        Ok(committed)
    }
}

fn flawed(flaw: Flaw) -> Arc<Flawed> {
    Arc::new(Flawed { store: MemoryStore::new(), flaw })
}

#[tokio::test(start_paused = true)]
async fn a_store_that_breaks_the_contract_does_not_pass() {
    run_small(flawed(Flaw::None)).await;
    for flaw in [
        Flaw::TokensIgnored,
        Flaw::Halves,
        Flaw::Mute,
        Flaw::Disorder,
        Flaw::ListsShort,
        Flaw::PagesMove,
        Flaw::SnapshotsMove,
        Flaw::Hasty,
        Flaw::WatchSkips,
        Flaw::WatchRepeats,
        Flaw::Boasts,
        Flaw::Coy,
    ] {
        let passed = tokio::spawn(run_small(flawed(flaw))).await;
        assert!(passed.is_err_and(|failed| failed.is_panic()), "{flaw:?} is not found");
    }
}
