//! Bringing a store to where a file has it: by guarded creates, in batches, and key by key where one of them does not do.

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use futures::stream::FuturesUnordered;
use lake_proto::kv::{Compare, Op, Txn};

use super::comparing::{Entries, is_same};
use super::{Error, Existing, Progress, Step, Tell};
use crate::backoff::Backoff;
use crate::clock;
use crate::store::{self, Applied, MetaStore, ReadOptions, Token};

/// Batches on their way at once, in a store that changes several keys at once ...
const BATCHES_AT_ONCE: usize = 4;
/// ... and in one that does not, where each is of one key.
const KEYS_AT_ONCE: usize = 16;
/// Most keys in one batch.
const BATCH_KEYS: usize = 256;
/// A batch takes no more keys that would make it larger.
const BATCH_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Done {
    pub(super) written: u64,
    pub(super) replaced: u64,
    pub(super) there: u64,
    pub(super) kept: u64,
}

impl Done {
    pub(super) fn all(&self) -> u64 {
        self.written + self.there + self.kept
    }

    fn add(&mut self, other: Self) {
        self.written += other.written;
        self.replaced += other.replaced;
        self.there += other.there;
        self.kept += other.kept;
    }
}

pub(super) struct Filling<'a> {
    pub(super) store: &'a dyn MetaStore,
    pub(super) existing: Existing,
    pub(super) patience: Duration,
    /// Nothing was there when it began: what is there now need not be looked at first.
    pub(super) empty: bool,
    pub(super) done: Done,
    pub(super) of: u64,
    pub(super) tell: Tell<'a>,
}

type Batch = Vec<(String, Bytes)>;

impl Filling<'_> {
    pub(super) async fn all(&mut self, path: &Path) -> Result<(), Error> {
        let can = self.store.capabilities();
        let (keys, at_once) = match can.multi_key {
            // A compare and a put for each.
            true => (BATCH_KEYS.min(can.txn_ops / 2).max(1), BATCHES_AT_ONCE),
            false => (1, KEYS_AT_ONCE),
        };
        let limit = BATCH_BYTES.min(can.txn_bytes);
        let mut file = Entries::open(path).await?;
        let mut next = file.next().await?;
        let worker = Worker { store: self.store, existing: self.existing, patience: self.patience, empty: self.empty };
        let mut under_way = FuturesUnordered::new();
        loop {
            if under_way.len() < at_once && next.is_some() {
                let (mut batch, mut bytes) = (Batch::new(), 0);
                while let Some((key, value)) = next.take_if(|(key, value)| {
                    batch.is_empty() || batch.len() < keys && bytes + 2 * key.len() + value.len() <= limit
                }) {
                    bytes += 2 * key.len() + value.len();
                    batch.push((key, value));
                    next = file.next().await?;
                }
                under_way.push(worker.put(batch));
                continue;
            }
            let Some(done) = under_way.try_next().await? else { return Ok(()) };
            self.done.add(done);
            (self.tell)(Progress { step: Step::Writing, entries: self.done.all(), of: Some(self.of) });
        }
    }
}

#[derive(Clone, Copy)]
struct Worker<'a> {
    store: &'a dyn MetaStore,
    existing: Existing,
    patience: Duration,
    empty: bool,
}

impl Worker<'_> {
    fn deadline(&self) -> Instant {
        clock::now() + self.patience
    }

    /// Puts what is missing of a batch.
    async fn put(self, batch: Batch) -> Result<Done, Error> {
        let mut done = Done::default();
        let batch = if self.empty { batch } else { self.missing(batch, &mut done).await? };
        if batch.is_empty() {
            return Ok(done);
        }
        let when = batch.iter().map(|(key, _)| Compare::absent(key)).collect();
        let then = batch.iter().map(|(key, value)| Op::put(key, value.clone())).collect();
        match self.store.commit(Txn { when, then, otherwise: vec![] }, self.deadline()).await {
            Ok(committed) if committed.result.succeeded => {
                done.written += batch.len() as u64;
                return Ok(done);
            }
            Ok(_) => {}
            Err(e) if e.applied() == Applied::Unknown => tracing::debug!("looking at each key of a batch: {e}"),
            Err(e) => return Err(e.into()),
        }
        for (key, value) in batch {
            done.add(self.settle(key, value).await?);
        }
        Ok(done)
    }

    /// What of a batch has to be written, and can be at once.
    async fn missing(&self, batch: Batch, done: &mut Done) -> Result<Batch, Error> {
        let keys: Vec<_> = batch.iter().map(|(key, _)| key.clone()).collect();
        let found = match self.store.batch_get(&keys, ReadOptions::default(), self.deadline()).await {
            Ok(read) => read.value,
            // What is there is together larger than one answer.
            Err(store::Error::Refused { .. } | store::Error::Invalid(_)) => {
                for (key, value) in batch {
                    done.add(self.settle(key, value).await?);
                }
                return Ok(Batch::new());
            }
            Err(e) => return Err(e.into()),
        };
        let mut found = found.into_iter().peekable();
        let mut missing = Batch::new();
        for (key, value) in batch {
            match found.next_if(|entry| entry.key == key) {
                None => missing.push((key, value)),
                Some(entry) if is_same(&entry, &value) => done.there += 1,
                Some(_) => done.add(self.settle(key, value).await?),
            }
        }
        Ok(missing)
    }

    /// Brings one key to where it should be, whatever is there.
    async fn settle(&self, key: String, value: Bytes) -> Result<Done, Error> {
        let (by, mut backoff) = (self.deadline(), Backoff::default());
        loop {
            let found = self.store.get(&key, ReadOptions::default(), by).await?.value;
            let (token, replaced) = match &found {
                Some(entry) if is_same(entry, &value) => return Ok(Done { there: 1, ..Done::default() }),
                Some(_) if self.existing == Existing::Refuse => return Err(Error::Changed { key }),
                Some(_) if self.existing == Existing::Keep => return Ok(Done { kept: 1, ..Done::default() }),
                Some(entry) => (Some(Token::of(entry)), 1),
                None => (None, 0),
            };
            let why = match self.store.cas(&key, token, value.clone(), by).await {
                Ok(committed) if committed.result.succeeded => {
                    return Ok(Done { written: 1, replaced, ..Done::default() });
                }
                Ok(_) => Error::Changed { key: key.clone() },
                Err(e) if e.applied() == Applied::Unknown => e.into(),
                Err(e) => return Err(e.into()),
            };
            if !backoff.wait(by).await {
                return Err(why);
            }
        }
    }
}
