//! Everything that a store holds, into a data file ([`file`]), and out of one into any other store.
//!
//! ```text
//!   store --- export: page by page ---> data file --- import: guarded creates ---> store --- compared with the file
//! ```
//! What is moved are the keys under `/kv/` and `/lake/`, which are all that there are, with their values. What is not:
//! revisions, which are each store's own (tokens, caches and watches of the old store mean nothing at the new one); leases,
//! and the keys that hang on them, since nobody at the new store would keep them alive; scopes, sessions, quotas.
//!
//! The file is of one revision where the store's listings are; else what was changed meanwhile is there as it was or as it
//! is. It also decouples the two: however slow the target is, the source's state is held only as long as reading takes.
//!
//! An import writes by `put if absent` only, so that it never takes another's change back, and may be made again after it was
//! stopped: what the same file has left there counts as done. Unless told otherwise ([`Existing`]) the target may hold
//! nothing else. In the end the target is listed and compared with the file, entry by entry.
//!
//! Limits: a page, a record and [`BATCHES_AT_ONCE`] batches in memory; batches within what the store says that it takes.
//! Failure cases: the store is away or refuses; the file; a target that holds something else; somebody who writes to the
//! target meanwhile. Whatever was written by then stays, and is told.

pub mod file;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use futures::stream::FuturesUnordered;
use lake_proto::kv::{Compare, KeyValue, Op, Revision, Txn};
use lake_proto::limits::MAX_PAGE_ENTRIES;

use self::file::{Described, FileError, Header, Reading, Sum, Writing};
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
/// How often a listing whose pages have expired is begun again.
const LISTINGS: u32 = 3;

/// What is done with keys that the target holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Existing {
    /// Nothing may be there but what the same file has left there.
    #[default]
    Refuse,
    /// They stay, with their values; only what is missing is written.
    Keep,
    /// They stay, but those that are in the file get its values.
    Replace,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub step: Step,
    /// Entries done in this step.
    pub entries: u64,
    /// Of so many, if that is known.
    pub of: Option<u64>,
}

/// What is done to the entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Reading,
    LookingAtTarget,
    Writing,
    Comparing,
}

/// What is told of the progress, for every page and batch.
pub type Tell<'a> = &'a (dyn Fn(Progress) + Send + Sync);

/// What an import did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    pub file: Described,
    /// Written now.
    pub written: u64,
    /// Of these, in the place of other values.
    pub replaced: u64,
    /// There already, with the same value.
    pub there: u64,
    /// There with another value, which was kept.
    pub kept: u64,
    /// Keys of the target that are not in the file.
    pub others: u64,
    /// Of the target's entries that are as in the file: equal to the file's, unless some were kept.
    pub verified: Sum,
}

/// Why something was not moved.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    File(#[from] FileError),
    /// Nothing was written.
    #[error("the target is not empty: key {key:?} {what}")]
    NotEmpty { key: String, what: &'static str },
    /// It was written by others while the import was under way.
    #[error("key {key:?} of the target was changed by others while it was imported")]
    Changed { key: String },
    /// The import is over, and the target is not as it should be.
    #[error(
        "the target does not hold what was imported: {missing} keys are missing, {other} have other values, {extra} are not \
         of the file; the first is {first:?}"
    )]
    Differs { missing: u64, other: u64, extra: u64, first: String },
    /// Some of it was written.
    #[error("{done} of {of} entries are in the target, and then: {source}")]
    Stopped { done: u64, of: u64, source: Box<Error> },
}

/// Writes everything that a store holds to a file. `name` is the store's, for people; `patience` is how long one call to the
/// store may take.
///
/// # Errors
/// The store's, the file's. Nothing is left of the file then.
pub async fn export(
    store: &dyn MetaStore,
    name: &str,
    path: &Path,
    patience: Duration,
    tell: Tell<'_>,
) -> Result<Described, Error> {
    begun_again(async || export_once(store, name, path, patience, tell).await).await
}

/// Does something anew, [`LISTINGS`] times, while the listings that it needs have expired before their end.
async fn begun_again<T>(work: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
    let (mut backoff, mut times) = (Backoff::default(), 1);
    loop {
        match work().await {
            Err(Error::Store(store::Error::SnapshotExpired { .. })) if times < LISTINGS => {
                times += 1;
                tokio::time::sleep(backoff.next_wait()).await;
            }
            other => return other,
        }
    }
}

async fn export_once(
    store: &dyn MetaStore,
    name: &str,
    path: &Path,
    patience: Duration,
    tell: Tell<'_>,
) -> Result<Described, Error> {
    let mut listed = Listed::new(store, patience);
    let first = listed.next().await?;
    let header = Header {
        from: name.to_owned(),
        revision: listed.revision.filter(|_| store.capabilities().consistent_listing),
        made_unix_ms: u64::try_from(clock::wall().as_millis()).unwrap_or(u64::MAX),
        made_by: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let to = path.to_owned();
    let mut writing = blocking(move || Writing::begin(&to, &header)).await?;
    let mut page: Vec<_> = first.into_iter().collect();
    loop {
        page.append(&mut listed.rest());
        if page.is_empty() {
            match listed.next().await? {
                Some(entry) => page.push(entry),
                None => break,
            }
            continue;
        }
        let entries = std::mem::take(&mut page);
        writing = blocking(move || {
            for entry in entries {
                match entry.lease {
                    None => writing.add(&entry.key, &entry.value)?,
                    Some(_) => writing.leave_out(),
                }
            }
            Ok(writing)
        })
        .await?;
        tell(Progress { step: Step::Reading, entries: writing.sum().entries, of: None });
    }
    Ok(blocking(move || writing.finish()).await?)
}

/// Fills a store from a file. `patience` is how long one call to the store may take.
///
/// # Errors
/// The store's, the file's; [`Error::NotEmpty`]; [`Error::Stopped`] once something may have been written: the import may
/// then be made again.
pub async fn import(
    path: &Path,
    store: &dyn MetaStore,
    existing: Existing,
    patience: Duration,
    tell: Tell<'_>,
) -> Result<Imported, Error> {
    let from = path.to_owned();
    // A file that is damaged in the end is found before anything is written.
    let file = blocking(move || file::check(&from)).await?;
    let look = async |step: Step| begun_again(async || compare(path, store, patience, step, tell).await).await;
    let before = look(Step::LookingAtTarget).await?;
    if existing == Existing::Refuse
        && let Some(Differing { key, what, .. }) = before.extra.first.clone().or(before.other.first.clone())
    {
        return Err(Error::NotEmpty { key, what });
    }
    let empty = before.sum.entries + before.other.count + before.extra.count == 0;
    let mut filling = Filling { store, existing, patience, empty, done: Done::default(), of: file.sum.entries, tell };
    let filled = filling.all(path).await;
    let done = filling.done;
    let stopped = |source| Error::Stopped { done: done.all(), of: file.sum.entries, source: Box::new(source) };
    filled.map_err(stopped)?;
    let after = look(Step::Comparing).await.map_err(stopped)?;
    let other = if existing == Existing::Keep { 0 } else { after.other.count };
    let extra = if existing == Existing::Refuse { after.extra.count } else { 0 };
    if after.missing.count + other + extra > 0 || existing != Existing::Keep && after.sum != file.sum {
        let first = [&after.missing, &after.other, &after.extra].into_iter().find_map(|some| some.first.as_ref());
        let first = first.map(|first| first.key.clone()).unwrap_or_default();
        return Err(stopped(Error::Differs { missing: after.missing.count, other, extra, first }));
    }
    Ok(Imported {
        file,
        written: done.written,
        replaced: done.replaced,
        there: done.there,
        kept: done.kept,
        others: after.extra.count,
        verified: after.sum,
    })
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FileError> + Send + 'static,
) -> Result<T, FileError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(e) => Err(FileError::Io { doing: "working on a data file".to_owned(), source: std::io::Error::other(e) }),
    }
}

// ---- what is there --------------------------------------------------------------------------------------------

/// The entries of a store, in key order.
struct Listed<'a> {
    store: &'a dyn MetaStore,
    patience: Duration,
    entries: std::vec::IntoIter<KeyValue>,
    /// `None`: the first page was not read; `Some(None)`: the last one was.
    page: Option<Option<String>>,
    revision: Option<Revision>,
}

impl<'a> Listed<'a> {
    fn new(store: &'a dyn MetaStore, patience: Duration) -> Self {
        Self { store, patience, entries: Vec::new().into_iter(), page: None, revision: None }
    }

    async fn next(&mut self) -> Result<Option<KeyValue>, store::Error> {
        loop {
            if let Some(entry) = self.entries.next() {
                return Ok(Some(entry));
            }
            let page = match &self.page {
                None => None,
                Some(Some(page)) => Some(page.as_str()),
                Some(None) => return Ok(None),
            };
            let (limit, by) = (MAX_PAGE_ENTRIES as u32, clock::now() + self.patience);
            let read = self.store.list("", page, limit, ReadOptions::default(), by).await?;
            self.entries = read.value.entries.into_iter();
            self.page = Some(read.value.next);
            self.revision = Some(read.revision);
        }
    }

    /// What is left of the page.
    fn rest(&mut self) -> Vec<KeyValue> {
        std::mem::take(&mut self.entries).collect()
    }
}

/// The entries of a file, in key order.
struct Entries {
    /// `None` while it reads.
    reading: Option<Reading>,
    entries: std::vec::IntoIter<(String, Bytes)>,
}

impl Entries {
    async fn open(path: &Path) -> Result<Self, FileError> {
        let path = path.to_owned();
        let reading = blocking(move || Reading::open(&path)).await?;
        Ok(Self { reading: Some(reading), entries: Vec::new().into_iter() })
    }

    async fn next(&mut self) -> Result<Option<(String, Bytes)>, FileError> {
        loop {
            if let Some(entry) = self.entries.next() {
                return Ok(Some(entry));
            }
            let Some(mut reading) = self.reading.take() else { return Ok(None) };
            let (reading, some) = blocking(move || reading.next_batch().map(|some| (reading, some))).await?;
            let Some(some) = some else { return Ok(None) };
            (self.reading, self.entries) = (Some(reading), some.into_iter());
        }
    }
}

/// A key that is not as in the file.
#[derive(Debug, Clone)]
struct Differing {
    key: String,
    what: &'static str,
}

#[derive(Debug, Default)]
struct Those {
    count: u64,
    first: Option<Differing>,
}

impl Those {
    fn add(&mut self, key: &str, what: &'static str) {
        self.count += 1;
        self.first.get_or_insert_with(|| Differing { key: key.to_owned(), what });
    }
}

/// A store beside a file.
#[derive(Debug, Default)]
struct Compared {
    /// Entries that are the same in both.
    sum: Sum,
    missing: Those,
    other: Those,
    extra: Those,
}

const NOT_IN_DATA: &str = "is not in the data";

async fn compare(
    path: &Path,
    store: &dyn MetaStore,
    patience: Duration,
    step: Step,
    tell: Tell<'_>,
) -> Result<Compared, Error> {
    let (mut file, mut listed) = (Entries::open(path).await?, Listed::new(store, patience));
    let (mut wanted, mut found) = (file.next().await?, listed.next().await?);
    let mut compared = Compared::default();
    loop {
        match (&wanted, &found) {
            (None, None) => return Ok(compared),
            (Some((key, value)), Some(entry)) if *key == entry.key => {
                match is_same(entry, value) {
                    true => compared.sum.add(key, value),
                    false if entry.lease.is_some() => compared.other.add(key, "hangs on a lease"),
                    false => compared.other.add(key, "has another value than the data"),
                }
                (wanted, found) = (file.next().await?, listed.next().await?);
            }
            (None, Some(entry)) => {
                compared.extra.add(&entry.key, NOT_IN_DATA);
                found = listed.next().await?;
            }
            (Some((key, _)), Some(entry)) if *key > entry.key => {
                compared.extra.add(&entry.key, NOT_IN_DATA);
                found = listed.next().await?;
            }
            (Some((key, _)), _) => {
                compared.missing.add(key, "is missing");
                wanted = file.next().await?;
            }
        }
        let entries = compared.sum.entries + compared.other.count + compared.missing.count;
        if entries % MAX_PAGE_ENTRIES as u64 == 0 {
            tell(Progress { step, entries, of: None });
        }
    }
}

fn is_same(entry: &KeyValue, value: &Bytes) -> bool {
    entry.value == *value && entry.lease.is_none()
}

// ---- writing --------------------------------------------------------------------------------------------------

#[derive(Debug, Clone, Copy, Default)]
struct Done {
    written: u64,
    replaced: u64,
    there: u64,
    kept: u64,
}

impl Done {
    fn all(&self) -> u64 {
        self.written + self.there + self.kept
    }

    fn add(&mut self, other: Self) {
        self.written += other.written;
        self.replaced += other.replaced;
        self.there += other.there;
        self.kept += other.kept;
    }
}

struct Filling<'a> {
    store: &'a dyn MetaStore,
    existing: Existing,
    patience: Duration,
    /// Nothing was there when it began: what is there now need not be looked at first.
    empty: bool,
    done: Done,
    of: u64,
    tell: Tell<'a>,
}

type Batch = Vec<(String, Bytes)>;

impl Filling<'_> {
    async fn all(&mut self, path: &Path) -> Result<(), Error> {
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

/// A file that two stores are moved by, which goes when this is dropped.
#[derive(Debug)]
pub struct Between(PathBuf);

impl Between {
    /// In this directory.
    pub fn new(dir: &Path) -> Self {
        Self(dir.join(format!("lake-data-{}", uuid::Uuid::new_v4().simple())))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        // It may not have been made.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use futures::FutureExt;
    use lake_proto::limits::MAX_VALUE_BYTES;

    use super::*;
    use crate::faulty::{FaultyStore, soon};
    use crate::memory::MemoryStore;

    const SHORT: Duration = Duration::from_secs(5);

    fn silent(_: Progress) {}

    /// A store with many small entries and some large ones, and a file of it.
    async fn source(dir: &Path) -> (MemoryStore, PathBuf, Described) {
        let store = MemoryStore::new();
        let put = async |key: String, value: Bytes| {
            assert!(store.cas(&key, None, value, soon()).await.unwrap().result.succeeded);
        };
        for n in 0..3000 {
            put(format!("/kv/{n:05}"), n.to_string().into()).await;
        }
        for n in 0..5 {
            put(format!("/lake/large/{n}"), vec![n; MAX_VALUE_BYTES].into()).await;
        }
        put("/lake/nothing".to_owned(), Bytes::new()).await;
        let path = dir.join("data");
        let described = export(&store, "a test", &path, SHORT, &silent).await.unwrap();
        assert_eq!((described.sum.entries, described.left_out), (3006, 0));
        assert_eq!(described.header.revision, Some(3006));
        (store, path, described)
    }

    async fn content(store: &dyn MetaStore) -> Vec<(String, Bytes)> {
        let all = store.list_all("", ReadOptions::default(), soon()).await.unwrap().value;
        all.into_iter().map(|entry| (entry.key, entry.value)).collect()
    }

    #[tokio::test]
    async fn a_store_is_moved_by_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let (old, path, described) = source(dir.path()).await;
        let new = MemoryStore::new();
        let imported = import(&path, &new, Existing::Refuse, SHORT, &silent).await.unwrap();
        assert_eq!((imported.written, imported.there, imported.verified), (3006, 0, described.sum));
        assert!(content(&new).await == content(&old).await);
        let again = dir.path().join("again");
        assert_eq!(export(&new, "a test", &again, SHORT, &silent).await.unwrap().sum, described.sum);
    }

    #[tokio::test]
    async fn an_import_that_was_stopped_goes_on_from_there() {
        let dir = tempfile::tempdir().unwrap();
        let (old, path, _) = source(dir.path()).await;
        let new = FaultyStore::default();
        let away = |progress: Progress| {
            if progress.step == Step::Writing && progress.entries >= 1000 {
                new.away.store(true, Ordering::SeqCst);
            }
        };
        let stopped = import(&path, &new, Existing::Refuse, SHORT, &away).await.unwrap_err();
        let Error::Stopped { done, of: 3006, source } = &stopped else { panic!("{stopped}") };
        assert!(*done >= 1000 && matches!(**source, Error::Store(store::Error::Unavailable { .. })), "{stopped}");
        new.away.store(false, Ordering::SeqCst);
        let imported = import(&path, &new, Existing::Refuse, SHORT, &silent).await.unwrap();
        assert!(imported.there >= *done && imported.there + imported.written == 3006, "{imported:?}");
        assert!(content(&new).await == content(&old).await);
    }

    #[tokio::test]
    async fn answers_that_are_lost_lose_and_double_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (old, path, described) = source(dir.path()).await;
        let new = FaultyStore::default();
        let lose = |progress: Progress| {
            if progress.step == Step::Writing {
                new.lose_answers.store(1, Ordering::SeqCst);
            }
        };
        let imported = import(&path, &new, Existing::Refuse, SHORT, &lose).await.unwrap();
        assert_eq!((imported.there + imported.written, imported.verified), (3006, described.sum));
        assert!(content(&new).await == content(&old).await);
    }

    #[tokio::test]
    async fn what_others_write_meanwhile_is_never_taken_back_and_told() {
        let dir = tempfile::tempdir().unwrap();
        let (_, path, _) = source(dir.path()).await;
        let write = |store: &MemoryStore, key: &str| {
            let done = store.cas(key, None, "another's".into(), soon()).now_or_never();
            assert!(done.is_none_or(|done| done.is_ok()), "the first time it is written");
        };
        for existing in [Existing::Refuse, Existing::Keep, Existing::Replace] {
            let new = MemoryStore::new();
            let on = |progress: Progress| {
                if progress.step == Step::Writing {
                    write(&new, "/lake/nothing");
                }
            };
            let done = import(&path, &new, existing, SHORT, &on).await;
            let value = new.get("/lake/nothing", ReadOptions::default(), soon()).await.unwrap().value.unwrap().value;
            match (existing, done) {
                (Existing::Refuse, Err(Error::Stopped { source, .. })) => {
                    assert!(matches!(*source, Error::Changed { .. }), "{source}");
                    assert_eq!(value, "another's");
                }
                (Existing::Keep, Ok(imported)) => assert_eq!((imported.kept, value), (1, "another's".into())),
                (Existing::Replace, Ok(imported)) => assert_eq!((imported.replaced, value), (1, Bytes::new())),
                (_, done) => panic!("{existing:?}: {done:?}"),
            }
        }
        // What is found only by the comparison in the end.
        let new = MemoryStore::new();
        let on = |progress: Progress| {
            if progress.step == Step::Writing && progress.entries == 3006 {
                write(&new, "/kv/another");
            }
        };
        let done = import(&path, &new, Existing::Refuse, SHORT, &on).await.unwrap_err();
        let Error::Stopped { source, .. } = done else { panic!("{done}") };
        assert!(matches!(*source, Error::Differs { missing: 0, other: 0, extra: 1, .. }), "{source}");
    }

    #[tokio::test]
    async fn a_target_with_other_keys_is_refused_untouched() {
        let dir = tempfile::tempdir().unwrap();
        let (_, path, _) = source(dir.path()).await;
        for key in ["/kv/", "/kv/00001", "/kv/00001a", "/lake/z"] {
            let new = MemoryStore::new();
            new.cas(key, None, "x".into(), soon()).await.unwrap();
            let refused = import(&path, &new, Existing::Refuse, SHORT, &silent).await.unwrap_err();
            assert!(matches!(&refused, Error::NotEmpty { key: named, .. } if named == key), "{refused}");
            assert_eq!(content(&new).await.len(), 1);
        }
    }

    #[tokio::test]
    async fn a_listing_that_expires_all_the_time_ends_in_its_error() {
        let dir = tempfile::tempdir().unwrap();
        let store = FaultyStore::default();
        store.forgets_listings.store(true, Ordering::SeqCst);
        let error = export(&store, "a test", &dir.path().join("data"), SHORT, &silent).await.unwrap_err();
        assert!(matches!(error, Error::Store(store::Error::SnapshotExpired { .. })), "{error}");
        assert_eq!(store.calls.load(Ordering::SeqCst), LISTINGS);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
