//! All there is under a prefix, and every change after that, for whoever keeps a copy.
//!
//! ```text
//!   listing at revision R --- changes from R + 1 on --- ... --- no longer kept ---> listing at a later revision --- ...
//!        Told::Reset            Told::Changes                                           Told::Reset
//! ```
//! A watch that was away for too long, or too slow, is told that what it asks for is no longer kept. Here that becomes a
//! listing at one revision, and the changes from the one after it: a copy that puts what a reset holds in the place of what it
//! has, and applies the changes to it, is at every message what the store held at that revision.
//!
//! It needs a store that watches and whose listings see one revision.

use std::time::Duration;

use futures::StreamExt;
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::watch::Changes;

use crate::clock;
use crate::store::{Applied, ChangeStream, Error, Read, ReadOptions, SharedStore};

/// How long a listing, and the opening of a watch, may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// All there is, at its revision: what was known before does not count.
    Reset(Read<Vec<KeyValue>>),
    /// What has changed since the message before.
    Changes(Changes),
}

/// Follows a prefix. Ended by dropping it.
pub struct Follower {
    store: SharedStore,
    prefix: String,
    /// The first revision that was not told; `None`: all there is has to be told first.
    next: Option<Revision>,
    stream: Option<ChangeStream>,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("prefix", &self.prefix).field("next", &self.next).finish_non_exhaustive()
    }
}

impl Follower {
    /// Begins with all there is.
    pub fn new(store: SharedStore, prefix: impl Into<String>) -> Self {
        Self { store, prefix: prefix.into(), next: None, stream: None }
    }

    /// The next message, as soon as there is one. Safe to give up and call again: nothing is lost or told twice.
    ///
    /// # Errors
    /// `Unavailable` if the store cannot be reached for long: call again to go on from where it was. `Refused` by a store
    /// that cannot watch.
    pub async fn next(&mut self) -> Result<Told, Error> {
        loop {
            let Some(next) = self.next else {
                let by = clock::now() + ANSWER_WITHIN;
                let all = self.store.list_all(&self.prefix, ReadOptions::default(), by).await?;
                self.next = Some(all.revision + 1);
                return Ok(Told::Reset(all));
            };
            let told = match &mut self.stream {
                Some(stream) => stream.next().await,
                None => match self.store.watch(&self.prefix, next, clock::now() + ANSWER_WITHIN).await {
                    Ok(stream) => {
                        self.stream = Some(stream);
                        continue;
                    }
                    Err(e) => Some(Err(e)),
                },
            };
            match told {
                Some(Ok(changes)) => {
                    self.next = Some(changes.progress + 1);
                    return Ok(Told::Changes(changes));
                }
                Some(Err(Error::Compacted { oldest, .. })) => {
                    tracing::debug!(prefix = self.prefix, next, oldest, "fell behind what is kept: listing again");
                    (self.next, self.stream) = (None, None);
                }
                Some(Err(e)) => {
                    self.stream = None;
                    return Err(e);
                }
                None => {
                    self.stream = None;
                    let doing = format!("watching {:?}", self.prefix);
                    let message = "the store's changes ended without a reason".to_owned();
                    return Err(Error::Internal { doing, message, applied: Applied::No });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lake_proto::kv::{Op, Txn};

    use super::*;
    use crate::memory::MemoryStore;

    /// A copy, and the revision that it is of.
    #[derive(Default)]
    struct Copy {
        entries: BTreeMap<String, KeyValue>,
        revision: Revision,
        resets: u32,
    }

    impl Copy {
        fn take(&mut self, told: Told) {
            match told {
                Told::Reset(all) => {
                    assert!(all.revision >= self.revision);
                    self.entries = all.value.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
                    self.revision = all.revision;
                    self.resets += 1;
                }
                Told::Changes(told) => {
                    for change in told.changes {
                        assert!(change.revision > self.revision);
                        for event in change.events {
                            match event.entry {
                                Some(entry) => self.entries.insert(event.key, entry),
                                None => self.entries.remove(&event.key),
                            };
                        }
                    }
                    self.revision = told.progress;
                }
            }
        }
    }

    #[tokio::test]
    async fn a_copy_is_what_the_store_holds_also_after_it_fell_behind() {
        let store = MemoryStore::shared();
        let soon = || clock::now() + Duration::from_secs(5);
        let mut n = 0;
        let mut write = async |times: u32| {
            let mut revision = 0;
            for _ in 0..times {
                n += 1;
                let key = format!("/kv/{}", n % 7);
                let op = if n % 5 == 0 { Op::delete(key) } else { Op::put(key, n.to_string()) };
                let txn = Txn { then: vec![op, Op::put("/kv/other", "x")], ..Txn::default() };
                revision = store.commit(txn, soon()).await.unwrap().result.revision;
            }
            revision
        };
        write(3).await;
        let mut follower = Follower::new(store.clone(), "/kv/");
        let mut copy = Copy::default();
        // Some within what is kept, some far beyond it.
        for (times, resets) in [(1, 1), (20, 1), (3000, 2), (5, 2), (2000, 3)] {
            copy.take(follower.next().await.unwrap());
            let revision = write(times).await;
            while copy.revision < revision {
                copy.take(follower.next().await.unwrap());
            }
            let all = store.list_all("/kv/", ReadOptions::default(), soon()).await.unwrap();
            assert_eq!(copy.entries.values().cloned().collect::<Vec<_>>(), all.value);
            assert_eq!((copy.revision, copy.resets), (all.revision, resets));
            write(1).await;
        }
    }
}
