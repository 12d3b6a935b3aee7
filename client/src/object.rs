//! An object store as a metadata store: one object per key, changed by conditional puts.
//!
//! ```text
//!   <root>/d/dkv/da/fb        the entry of key /kv/a/b: a header (below), then the value
//! ```
//! Directories begin with `d` and entries with `f`, so that a key may be the beginning of another one on a file system, too;
//! bytes other than ASCII letters, digits, `-`, `_` and `.` are written `=XX`.
//!
//! It changes one key at a time and says so ([`Capabilities`]): no transaction over several, no prefix compares, no watch, no
//! leases. What orders changes is the store's own compare: `If-None-Match` for the first, `If-Match` with the ETag that was
//! read for every further one. Every change raises the key's count, which is its `mod_revision`; a delete leaves the count
//! behind in an entry without a value (object stores delete without conditions), so that no state of a key comes again.
//!
//! A local file system cannot put conditionally: there changes are made one after the other under a lock of the directory,
//! each synced before it is answered.
//!
//! A put whose answer was lost is recognised by the id that it wrote. It is made again only while what it was based on
//! stands, so that at most one of its attempts takes effect; if the key has moved on meanwhile, the change ends in doubt.
//!
//! Costs: a change is a read and a put; a page of a listing names every key under the directory of its prefix, and reads
//! each entry that it holds. Limits: [`READS_AT_ONCE`] objects read at once; values as everywhere.

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};
use lake_proto::kv::{Condition, Invalid, KeyValue, Op, Revision, Txn, TxnResult, validate_key};
use lake_proto::limits::{MAX_BATCH_GET_KEYS, MAX_PAGE_BYTES, MAX_PAGE_ENTRIES, MAX_VALUE_BYTES};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion};
use uuid::Uuid;

use crate::backoff::Backoff;
use crate::clock;
use crate::memory::{State, check_prefix};
use crate::store::{Applied, Capabilities, Committed, Error, MetaStore, Page, Read, ReadOptions};

/// Objects of one call that are read at once.
const READS_AT_ONCE: usize = 16;
/// What the object of an entry begins with.
const MAGIC: &[u8; 8] = b"LAKEKV01";
/// Magic, count, id, revision of creation, version.
const HEADER_BYTES: usize = 8 + 8 + 16 + 8 + 8;
/// Whoever holds a lock on this file changes the entries of a local directory.
const LOCK_FILE: &str = "lock";

/// A store of objects that changes one key at a time.
#[derive(Debug)]
pub struct ObjectMetaStore {
    objects: Arc<dyn ObjectStore>,
    root: Path,
    /// For messages.
    name: String,
    swaps: Swaps,
}

/// What orders the changes of a key.
#[derive(Debug, Clone)]
enum Swaps {
    /// The store compares.
    Conditional,
    /// Whoever holds the lock compares.
    Locked { dir: PathBuf, files: Arc<LocalFileSystem> },
}

/// What became of a put.
enum Put {
    Done,
    /// The entry is no longer the one that the put was to replace.
    Lost,
}

/// The object of a key, as it was read.
#[derive(Debug, Clone)]
struct Stored {
    /// Of the key's changes, deletes too.
    count: Revision,
    /// Of the change that wrote it.
    id: Uuid,
    /// `None`: deleted.
    entry: Option<KeyValue>,
    version: UpdateVersion,
}

impl ObjectMetaStore {
    /// The store under `root` of an object store, which must honour conditional puts: that is tried here, on an object of
    /// its own, since there are services that ignore the conditions.
    ///
    /// # Errors
    /// `Refused` if the object store overwrites against a condition; `Unavailable` if it does not answer by the deadline.
    pub async fn open(objects: Arc<dyn ObjectStore>, root: &str, deadline: Instant) -> Result<Self, Error> {
        let root = Path::parse(root).map_err(|e| refused("opening a metadata store", e))?;
        let name = format!("{objects}, under {root:?}");
        let this = Self { objects, root, name, swaps: Swaps::Conditional };
        this.prove_conditions(deadline).await?;
        Ok(this)
    }

    /// The store in a directory of the local file system, made if it is not there. Several processes of this machine may
    /// use it at once; over a network file system the lock is as good as that system's.
    ///
    /// # Errors
    /// `Refused` if it cannot be made or opened.
    pub fn local(dir: impl AsRef<FsPath>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let doing = format!("opening the metadata store in {}", dir.display());
        std::fs::create_dir_all(dir).map_err(|e| refused(&doing, e))?;
        File::options().create(true).append(true).open(dir.join(LOCK_FILE)).map_err(|e| refused(&doing, e))?;
        let dir = dir.canonicalize().map_err(|e| refused(&doing, e))?;
        let files = Arc::new(LocalFileSystem::new_with_prefix(&dir).map_err(|e| refused(&doing, e))?);
        let name = dir.display().to_string();
        let swaps = Swaps::Locked { dir, files: files.clone() };
        Ok(Self { objects: files, root: Path::default(), name, swaps })
    }

    async fn prove_conditions(&self, deadline: Instant) -> Result<(), Error> {
        let doing = "trying whether conditional puts are honoured";
        let path = self.root.clone().join(format!("probe-{}", Uuid::new_v4()));
        let put = async |mode| {
            let options = PutOptions { mode, ..PutOptions::default() };
            let put = self.objects.put_opts(&path, Bytes::from_static(b"probe").into(), options);
            tokio::time::timeout_at(deadline.into(), put).await.unwrap_or_else(|_| Err(late()))
        };
        let first = put(PutMode::Create).await.map_err(|e| self.unavailable(doing, clock::now(), 1, &e, false))?;
        let second = put(PutMode::Create).await;
        let other = UpdateVersion { e_tag: Some("\"00000000000000000000000000000000\"".to_owned()), version: None };
        let third = put(PutMode::Update(other)).await;
        let fourth = put(PutMode::Update(first.into())).await;
        // Left behind it is harmless.
        if let Err(e) = self.objects.delete(&path).await {
            tracing::warn!(object = %path, "an object that was written for a trial could not be removed: {e}");
        }
        let honoured = is_lost(&second) && is_lost(&third) && fourth.is_ok();
        match [second, third, fourth].into_iter().find_map(|put| put.err().filter(|e| !is_precondition(e))) {
            _ if honoured => Ok(()),
            Some(e) => Err(self.unavailable(doing, clock::now(), 1, &e, false)),
            None => Err(Error::Refused {
                doing: doing.to_owned(),
                message: format!(
                    "{} overwrites an object against If-None-Match or If-Match, or refuses one that should pass: use a \
                     service that honours them",
                    self.name
                ),
            }),
        }
    }

    fn path(&self, key: &str) -> Path {
        let (dirs, name) = key.rsplit_once('/').map_or((None, key), |(dirs, name)| (Some(dirs), name));
        self.dir(dirs).join(format!("f{}", encode(name)))
    }

    /// Where the entries are whose keys begin with these parts and a slash.
    fn dir(&self, parts: Option<&str>) -> Path {
        let parts = parts.into_iter().flat_map(|parts| parts.split('/'));
        parts.fold(self.root.clone(), |path, part| path.join(format!("d{}", encode(part))))
    }

    /// The key whose entry is there; `None`: it is no entry.
    fn key(&self, path: &Path) -> Option<String> {
        let mut parts: Vec<_> = path.prefix_match(&self.root)?.map(|part| part.as_ref().to_owned()).collect();
        let name = decode(parts.pop()?.strip_prefix('f')?)?;
        let mut key = String::new();
        for part in parts {
            key.push_str(&decode(part.strip_prefix('d')?)?);
            key.push('/');
        }
        Some(key + &name)
    }

    /// The object of a key; `None`: there never was such a key.
    async fn read(&self, key: &str) -> object_store::Result<Option<Stored>> {
        let path = self.path(key);
        let result = match self.objects.get(&path).await {
            Ok(result) => result,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(e),
        };
        let version = UpdateVersion { e_tag: result.meta.e_tag.clone(), version: result.meta.version.clone() };
        let damaged = |why: &str| object_store::Error::Generic {
            store: "metadata",
            source: format!("object {path} is no entry of lake's metadata: {why}").into(),
        };
        if result.meta.size > (HEADER_BYTES + MAX_VALUE_BYTES) as u64 {
            return Err(damaged("it is too large"));
        }
        Stored::decode(key, &result.bytes().await?, version).map(Some).map_err(damaged)
    }

    /// The same until the deadline, whatever fails on the way.
    async fn read_by(&self, doing: &str, key: &str, deadline: Instant) -> Result<Option<Stored>, Error> {
        let (started, mut backoff, mut attempts) = (clock::now(), Backoff::default(), 0);
        loop {
            attempts += 1;
            let read = tokio::time::timeout_at(deadline.into(), self.read(key)).await.unwrap_or_else(|_| Err(late()));
            let error = match read {
                Ok(stored) => return Ok(stored),
                Err(e) if is_final(&e) => return Err(refused(doing, e)),
                Err(e) => e,
            };
            if !backoff.wait(deadline).await {
                return Err(self.unavailable(doing, started, attempts, &error, false));
            }
        }
    }

    /// Puts an entry in the place of what was read.
    async fn put(&self, key: &str, before: Option<&Stored>, after: Bytes, by: Instant) -> object_store::Result<Put> {
        let path = self.path(key);
        match &self.swaps {
            Swaps::Conditional => {
                let mode = match before {
                    None => PutMode::Create,
                    Some(stored) => PutMode::Update(stored.version.clone()),
                };
                let options = PutOptions { mode, ..PutOptions::default() };
                let put = self.objects.put_opts(&path, after.into(), options);
                match tokio::time::timeout_at(by.into(), put).await.unwrap_or_else(|_| Err(late())) {
                    Ok(_) => Ok(Put::Done),
                    Err(e) if is_precondition(&e) => Ok(Put::Lost),
                    Err(e) => Err(e),
                }
            }
            Swaps::Locked { dir, files } => {
                let lock = lock(&dir.join(LOCK_FILE), by).await?;
                let file = files.path_to_filesystem(&path)?;
                let (key, count) = (key.to_owned(), before.map(|stored| stored.count));
                // Runs to its end with the lock, whether its caller waits or not.
                let put = tokio::task::spawn_blocking(move || {
                    let put = replace(&file, &key, count, &after);
                    drop(lock);
                    put
                });
                put.await.map_err(failed)?.map_err(failed)
            }
        }
    }

    fn unavailable(
        &self,
        doing: &str,
        started: Instant,
        attempts: u32,
        error: &object_store::Error,
        in_doubt: bool,
    ) -> Error {
        Error::Unavailable {
            doing: doing.to_owned(),
            endpoints: vec![self.name.clone()],
            attempts,
            elapsed: clock::since(started),
            leader: "an object store, without a leader".to_owned(),
            last: innermost(error),
            applied: if in_doubt { Applied::Unknown } else { Applied::No },
        }
    }

    fn check(&self, doing: &str, options: ReadOptions) -> Result<(), Error> {
        match options {
            ReadOptions { snapshot: Some(_), .. } => Err(Error::SnapshotExpired { prefix: doing.to_owned() }),
            ReadOptions { min_revision: 1.., .. } => {
                Err(Error::cannot(doing.to_owned(), "an object store has no revision of its own to wait for"))
            }
            _ => Ok(()),
        }
    }
}

impl Stored {
    fn encode(count: Revision, id: Uuid, entry: Option<&KeyValue>) -> Bytes {
        let value = entry.map_or(&[][..], |entry| &entry.value);
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + value.len());
        bytes.put_slice(MAGIC);
        bytes.put_u64(count);
        bytes.put_slice(id.as_bytes());
        bytes.put_u64(entry.map_or(0, |entry| entry.create_revision));
        // An entry has a version from 1 on: 0 is a key that was deleted.
        bytes.put_u64(entry.map_or(0, |entry| entry.version));
        bytes.put_slice(value);
        bytes.freeze()
    }

    fn decode(key: &str, bytes: &Bytes, version: UpdateVersion) -> Result<Self, &'static str> {
        let header = bytes.get(..HEADER_BYTES).ok_or("it is too short")?;
        if &header[..8] != MAGIC {
            return Err("it begins with something else");
        }
        let number = |at: usize| header[at..at + 8].try_into().map(u64::from_be_bytes).map_err(|_| "it is too short");
        let (mod_revision, create_revision, times) = (number(8)?, number(32)?, number(40)?);
        let id = Uuid::from_slice(&header[16..32]).map_err(|_| "it is too short")?;
        let entry = (times > 0).then(|| KeyValue {
            key: key.to_owned(),
            value: bytes.slice(HEADER_BYTES..),
            version: times,
            create_revision,
            mod_revision,
            lease: None,
        });
        Ok(Self { count: mod_revision, id, entry, version })
    }
}

/// A transaction's only key; `None` if it names none.
///
/// # Errors
/// `Refused` for a transaction that is about several keys, or about what is no key.
fn only_key(txn: &Txn) -> Result<Option<String>, Error> {
    let cannot = |what: String| {
        Err(Error::cannot(
            "running a transaction".to_owned(),
            &format!("an object store changes one key at a time: {what}"),
        ))
    };
    let mut only: Option<&str> = None;
    for compare in &txn.when {
        match compare.condition {
            Condition::Absent
            | Condition::ModRevision(_)
            | Condition::CreateRevision(_)
            | Condition::Version(_)
            | Condition::Value(_) => {}
            _ => return cannot(format!("it cannot tell {:?}", compare.condition)),
        }
    }
    for op in txn.then.iter().chain(&txn.otherwise) {
        match op {
            Op::Put { lease: None, .. } | Op::Delete { .. } | Op::Get { .. } => {}
            _ => return cannot(format!("it has neither leases, scopes nor lists inside a transaction ({})", op.key())),
        }
    }
    let keys = txn.when.iter().map(|compare| compare.key.as_str());
    for key in keys.chain(txn.then.iter().chain(&txn.otherwise).map(Op::key)) {
        match only {
            Some(other) if other != key => return cannot(format!("here are {other} and {key}")),
            _ => only = Some(key),
        }
    }
    Ok(only.map(str::to_owned))
}

#[async_trait]
impl MetaStore for ObjectMetaStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities { multi_key: false, consistent_listing: false, snapshots: false, watch: false, leases: false }
    }

    async fn get(&self, key: &str, options: ReadOptions, deadline: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        validate_key(key)?;
        let doing = format!("reading {key}");
        self.check(&doing, options)?;
        let stored = self.read_by(&doing, key, deadline).await?;
        Ok(Read { revision: stored.as_ref().map_or(0, |s| s.count), value: stored.and_then(|stored| stored.entry) })
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        if keys.len() > MAX_BATCH_GET_KEYS {
            return Err(Invalid::BatchKeys { count: keys.len() }.into());
        }
        keys.iter().try_for_each(|key| validate_key(key))?;
        let doing = format!("reading {} keys", keys.len());
        self.check(&doing, options)?;
        let reads: Vec<_> = keys.iter().map(|key| self.read_by(&doing, key, deadline)).collect();
        let stored: Vec<_> = futures::stream::iter(reads).buffered(READS_AT_ONCE).try_collect().await?;
        Ok(Read { revision: 0, value: stored.into_iter().flatten().filter_map(|stored| stored.entry).collect() })
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Page>, Error> {
        check_prefix(prefix)?;
        let doing = format!("listing {prefix}");
        self.check(&doing, options)?;
        let limit = if limit == 0 { MAX_PAGE_ENTRIES } else { (limit as usize).min(MAX_PAGE_ENTRIES) };
        let dir = self.dir(prefix.rsplit_once('/').map(|(dirs, _)| dirs));
        let started = clock::now();
        let names = self.objects.list((!dir.as_ref().is_empty()).then_some(&dir)).try_collect::<Vec<_>>();
        let names = tokio::time::timeout_at(deadline.into(), names).await.unwrap_or_else(|_| Err(late()));
        let names = match names {
            Ok(names) => names,
            Err(object_store::Error::NotFound { .. }) => Vec::new(),
            Err(e) => return Err(self.unavailable(&doing, started, 1, &e, false)),
        };
        let mut keys: Vec<_> = names.into_iter().filter_map(|object| self.key(&object.location)).collect();
        keys.retain(|key| key.starts_with(prefix) && page.is_none_or(|last| key.as_str() > last));
        keys.sort_unstable();

        let reads: Vec<_> = keys.iter().map(|key| self.read_by(&doing, key, deadline)).collect();
        let mut reads = futures::stream::iter(reads).buffered(READS_AT_ONCE.min(limit + 1));
        let mut found = Page::default();
        let mut bytes = 0;
        while let Some(stored) = reads.try_next().await? {
            let Some(entry) = stored.and_then(|stored| stored.entry) else { continue };
            if found.entries.len() == limit || bytes >= MAX_PAGE_BYTES {
                found.next = found.entries.last().map(|entry| entry.key.clone());
                break;
            }
            bytes += entry.key.len() + entry.value.len();
            found.entries.push(entry);
        }
        Ok(Read { revision: 0, value: found })
    }

    async fn commit(&self, txn: Txn, deadline: Instant) -> Result<Committed, Error> {
        txn.validate()?;
        let Some(key) = only_key(&txn)? else {
            return Ok(Committed { result: TxnResult { succeeded: true, ..TxnResult::default() }, resent: false });
        };
        let (doing, id) = (format!("committing {key}"), Uuid::new_v4());
        let (started, mut backoff, mut attempts) = (clock::now(), Backoff::default(), 0);
        // The attempt that may have been applied: what it was based on, and what it came to if it was.
        let mut pending: Option<(Revision, TxnResult)> = None;
        let mut in_doubt = false;
        let unknown = |attempts, last: String| Error::InDoubt {
            doing: doing.clone(),
            attempts,
            elapsed: clock::since(started),
            leader: "an object store, without a leader".to_owned(),
            last,
        };
        loop {
            attempts += 1;
            let before = match self.read_by(&doing, &key, deadline).await {
                Err(Error::Unavailable { doing, endpoints, attempts: n, leader, last, .. }) => {
                    let applied = if in_doubt { Applied::Unknown } else { Applied::No };
                    let (attempts, elapsed) = (attempts + n, clock::since(started));
                    return Err(Error::Unavailable { doing, endpoints, attempts, elapsed, leader, last, applied });
                }
                Err(e) if in_doubt => return Err(unknown(attempts, e.to_string())),
                other => other?,
            };
            let count = before.as_ref().map_or(0, |stored| stored.count);
            if let Some((_, result)) = pending.take_if(|_| before.as_ref().is_some_and(|stored| stored.id == id)) {
                return Ok(Committed { result, resent: false });
            }
            let moved_on = in_doubt && pending.as_ref().is_some_and(|(based_on, _)| *based_on != count);
            let mut state = State::of_one(before.as_ref().and_then(|stored| stored.entry.clone()), count);
            let (result, changes) = state.apply(txn.clone());
            if changes.is_empty() {
                return Ok(Committed { result, resent: in_doubt });
            }
            if moved_on {
                return Err(unknown(attempts, "the key has been changed since".to_owned()));
            }
            let after = Stored::encode(result.revision, id, state.get(&key));
            match self.put(&key, before.as_ref(), after, deadline).await {
                Ok(Put::Done) => return Ok(Committed { result, resent: false }),
                // By another writer, or by an attempt at this very put that the object store's client made again.
                Ok(Put::Lost) => pending = Some((count, result)),
                Err(e) if is_final(&e) && !in_doubt => return Err(refused(&doing, e)),
                Err(e) => {
                    in_doubt = true;
                    pending = Some((count, result));
                    if !backoff.wait(deadline).await {
                        return Err(self.unavailable(&doing, started, attempts, &e, true));
                    }
                }
            }
        }
    }
}

/// Puts a file in the place of one with this count, and syncs it.
fn replace(file: &FsPath, key: &str, count: Option<Revision>, after: &[u8]) -> std::io::Result<Put> {
    let damaged = |why| std::io::Error::other(format!("{}: it is no entry of lake's metadata: {why}", file.display()));
    let found = match std::fs::read(file) {
        Ok(bytes) => {
            let version = UpdateVersion { e_tag: None, version: None };
            Some(Stored::decode(key, &bytes.into(), version).map_err(damaged)?.count)
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    if found != count {
        return Ok(Put::Lost);
    }
    let dir = file.parent().ok_or_else(|| damaged("it has no directory"))?;
    // Those that are not there yet, innermost first, and the one above them, which gets a new name.
    let made: Vec<_> = dir.ancestors().take_while(|dir| !dir.exists()).map(FsPath::to_owned).collect();
    std::fs::create_dir_all(dir)?;
    let mut aside = file.as_os_str().to_owned();
    // A listing leaves out what is named so.
    aside.push("#1");
    let mut unfinished = File::create(&aside)?;
    unfinished.write_all(after)?;
    unfinished.sync_all()?;
    std::fs::rename(&aside, file)?;
    File::open(dir)?.sync_all()?;
    for above in made.iter().filter_map(|dir| dir.parent()) {
        File::open(above)?.sync_all()?;
    }
    Ok(Put::Done)
}

/// Locks a file until the handle is dropped.
async fn lock(path: &FsPath, by: Instant) -> object_store::Result<File> {
    let file = File::options().append(true).open(path).map_err(failed)?;
    let mut backoff = Backoff::default();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(failed(e)),
            Err(TryLockError::WouldBlock) => {}
        }
        if !backoff.wait(by).await {
            return Err(failed(format!("{} is locked by others all the time", path.display())));
        }
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic { store: "metadata", source: error.into() }
}

fn late() -> object_store::Error {
    failed("no answer by the deadline")
}

fn is_precondition(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
}

fn is_lost<T>(put: &object_store::Result<T>) -> bool {
    put.as_ref().is_err_and(is_precondition)
}

/// Whether trying again cannot help, and nothing was done.
fn is_final(error: &object_store::Error) -> bool {
    use object_store::Error::*;
    matches!(
        error,
        PermissionDenied { .. }
            | Unauthenticated { .. }
            | NotSupported { .. }
            | NotImplemented { .. }
            | InvalidPath { .. }
            | UnknownConfigurationKey { .. }
    )
}

fn refused(doing: &str, error: impl std::fmt::Display) -> Error {
    Error::Refused { doing: doing.to_owned(), message: error.to_string() }
}

fn innermost(error: &object_store::Error) -> String {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        reason = error.to_string();
        source = error.source();
    }
    reason
}

fn encode(part: &str) -> String {
    let mut encoded = String::with_capacity(part.len());
    for byte in part.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => encoded.push(byte as char),
            _ => encoded.push_str(&format!("={byte:02X}")),
        }
    }
    encoded
}

fn decode(encoded: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'=' {
            bytes.push(*first);
            continue;
        }
        let (digits, tail) = rest.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = tail;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use futures::stream::BoxStream;
    use lake_proto::kv::OpResult;
    use object_store::memory::InMemory;
    use object_store::{
        CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, PutMultipartOptions,
    };
    use object_store::{PutPayload, PutResult};

    use super::*;
    use crate::conformance;

    fn soon() -> Instant {
        clock::now() + Duration::from_secs(10)
    }

    #[tokio::test]
    async fn an_object_store_does_what_a_store_does() {
        let store = ObjectMetaStore::open(Arc::new(InMemory::new()), "some/where", soon()).await.unwrap();
        conformance::run(Arc::new(store)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_local_directory_does_what_a_store_does() {
        let dir = tempfile::tempdir().unwrap();
        conformance::run(Arc::new(ObjectMetaStore::local(dir.path().join("new")).unwrap())).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn two_stores_in_one_directory_lose_no_update() {
        let dir = tempfile::tempdir().unwrap();
        let count = async |store: ObjectMetaStore| {
            for _ in 0..50 {
                let txn = Txn { then: vec![Op::put("/kv/n", "x")], ..Txn::default() };
                assert!(store.commit(txn, soon()).await.unwrap().result.succeeded);
            }
        };
        let [one, other] = [(); 2].map(|()| ObjectMetaStore::local(dir.path()).unwrap());
        tokio::join!(count(one), count(other));
        let store = ObjectMetaStore::local(dir.path()).unwrap();
        let entry = store.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap();
        assert_eq!((entry.version, entry.mod_revision), (100, 100));
    }

    #[tokio::test]
    async fn a_file_that_lake_did_not_write_is_named_and_left() {
        let dir = tempfile::tempdir().unwrap();
        let store = ObjectMetaStore::local(dir.path()).unwrap();
        let file = dir.path().join("d/dkv/fa");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "something else").unwrap();
        let by = clock::now() + Duration::from_millis(100);
        let error = store.get("/kv/a", ReadOptions::default(), by).await.unwrap_err().to_string();
        assert!(error.contains("d/dkv/fa") && error.contains("no entry"), "{error}");
        assert_eq!(std::fs::read(&file).unwrap(), b"something else");
    }

    #[test]
    fn any_key_has_a_path_of_its_own_and_comes_back() {
        let swaps = Swaps::Conditional;
        let store =
            ObjectMetaStore { objects: Arc::new(InMemory::new()), root: "r".into(), name: String::new(), swaps };
        let keys = ["/kv/a", "/kv/a/", "/kv//a", "/kv/../a", "/kv/.", "/kv/a b", "/kv/a=20b", "/kv/ä%2F#1", "a", "/"];
        let mut paths = std::collections::BTreeSet::new();
        for key in keys {
            let path = store.path(key);
            assert_eq!(Path::parse(path.as_ref()).unwrap(), path, "{key}");
            assert_eq!(store.key(&path).as_deref(), Some(key), "{path}");
            paths.insert(path);
        }
        assert_eq!(paths.len(), keys.len());
    }

    /// An object store whose conditions, or answers to puts, are as bad as it is told.
    #[derive(Debug, Default)]
    struct Bad {
        objects: InMemory,
        ignores_conditions: bool,
        /// So many puts are made and their answers lost.
        lose: AtomicU32,
        /// Another writer comes right after a put whose answer is lost.
        overwritten: bool,
    }

    impl std::fmt::Display for Bad {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a bad store")
        }
    }

    #[async_trait]
    impl ObjectStore for Bad {
        async fn put_opts(&self, at: &Path, bytes: PutPayload, options: PutOptions) -> object_store::Result<PutResult> {
            if self.ignores_conditions {
                return self.objects.put(at, bytes).await;
            }
            let put = self.objects.put_opts(at, bytes.clone(), options).await?;
            if self.lose.load(Ordering::SeqCst) == 0 || at.as_ref().contains("probe") {
                return Ok(put);
            }
            self.lose.fetch_sub(1, Ordering::SeqCst);
            if self.overwritten {
                let bytes: Bytes = bytes.into();
                let stored = Stored::decode("/kv/n", &bytes, UpdateVersion { e_tag: None, version: None }).unwrap();
                let other = Stored::encode(stored.count + 1, Uuid::new_v4(), stored.entry.as_ref());
                self.objects.put(at, other.into()).await?;
            }
            Err(failed("the connection broke"))
        }

        async fn put_multipart_opts(
            &self,
            at: &Path,
            options: PutMultipartOptions,
        ) -> object_store::Result<Box<dyn MultipartUpload>> {
            self.objects.put_multipart_opts(at, options).await
        }

        async fn get_opts(&self, at: &Path, options: GetOptions) -> object_store::Result<GetResult> {
            self.objects.get_opts(at, options).await
        }

        fn delete_stream(
            &self,
            paths: BoxStream<'static, object_store::Result<Path>>,
        ) -> BoxStream<'static, object_store::Result<Path>> {
            self.objects.delete_stream(paths)
        }

        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
            self.objects.list(prefix)
        }

        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
            self.objects.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
            self.objects.copy_opts(from, to, options).await
        }
    }

    #[tokio::test]
    async fn a_service_that_ignores_conditions_is_refused() {
        let bad = Bad { ignores_conditions: true, ..Bad::default() };
        let error = ObjectMetaStore::open(Arc::new(bad), "", soon()).await.unwrap_err();
        assert!(matches!(&error, Error::Refused { message, .. } if message.contains("If-None-Match")), "{error}");
    }

    fn put(value: &str) -> Txn {
        let op = Op::Put { key: "/kv/n".into(), value: value.to_owned().into(), return_previous: true, lease: None };
        Txn { then: vec![op], ..Txn::default() }
    }

    #[tokio::test]
    async fn a_put_whose_answer_was_lost_is_found_again() {
        let bad = Arc::new(Bad::default());
        let store = ObjectMetaStore::open(bad.clone(), "", soon()).await.unwrap();
        store.commit(put("1"), soon()).await.unwrap();
        bad.lose.store(1, Ordering::SeqCst);
        let done = store.commit(put("2"), soon()).await.unwrap();
        let OpResult::Put { previous: Some(previous) } = &done.result.results[0] else { panic!("{done:?}") };
        assert_eq!((&previous.value[..], done.result.revision, done.resent), (&b"1"[..], 2, false));
        let entry = store.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap();
        assert_eq!((&entry.value[..], entry.version), (&b"2"[..], 2));
    }

    #[tokio::test]
    async fn a_put_that_was_lost_and_overwritten_is_not_made_again() {
        let bad = Arc::new(Bad { overwritten: true, ..Bad::default() });
        let store = ObjectMetaStore::open(bad.clone(), "", soon()).await.unwrap();
        store.commit(put("1"), soon()).await.unwrap();
        bad.lose.store(1, Ordering::SeqCst);
        let error = store.commit(put("2"), soon()).await.unwrap_err();
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
        let entry = store.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap();
        assert_eq!(entry.mod_revision, 3, "the other writer's, and nothing on top of it");
    }
}
