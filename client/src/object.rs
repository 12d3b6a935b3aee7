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
//! Each change has an id of its own, and an entry names the last [`IDS_KEPT`] of them. So a put whose answer was lost is
//! found again, also behind the changes of others. It is made again only while what it was based on stands, so that at most
//! one of its attempts takes effect; behind more changes than are named it ends in doubt.
//!
//! Costs: a change is a read and a put; a listing names every key under the directory of its prefix once, if its pages are
//! asked for one after the other, and reads each entry. Limits: [`MAX_LISTINGS_HELD`] listings under way whose names are
//! kept; [`READS_AT_ONCE`] objects read at once; values as everywhere; keys whose object's name is not too long
//! ([`NAME_BYTES`], [`FILE_NAME_BYTES`]).

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path as FsPath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt};
use lake_proto::kv::{Condition, KeyValue, Op, Revision, Txn, TxnResult, validate_key, validate_keys, validate_prefix};
use lake_proto::limits::{MAX_PAGE_BYTES, MAX_VALUE_BYTES, page_limit};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion};
use uuid::Uuid;

use crate::backoff::Backoff;
use crate::clock;
use crate::memory::State;
use crate::store::{Applied, Capabilities, Committed, Error, InVain, Leader, MetaStore, Page, Read, ReadOptions};

/// Objects of one call that are read at once.
const READS_AT_ONCE: usize = 16;
/// What the object of an entry begins with.
const MAGIC: &[u8; 8] = b"LAKEKV01";
/// Magic, count, revision of creation, version. The ids of the last changes follow, the newest first.
const HEADER_BYTES: usize = 8 + 8 + 8 + 8;
/// Changes of a key whose ids are kept.
const IDS_KEPT: usize = 16;
const ID_BYTES: usize = 16;
/// Longest name of an object, as S3 has it.
const NAME_BYTES: usize = 1024;
/// Longest name of a file and of a directory on the usual file systems, less what a file has that is not finished.
const FILE_NAME_BYTES: usize = 253;
/// Listings whose next page needs no list of all names; the oldest gives way.
const MAX_LISTINGS_HELD: usize = 4;
/// One with more names asks for them again at each page.
const MAX_NAMES_HELD: usize = 500_000;
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
    /// Listings under way, the newest first.
    listings: Mutex<Vec<Listing>>,
}

/// The names behind a page that was given.
#[derive(Debug)]
struct Listing {
    prefix: String,
    /// The key that the page ended with, which is its token.
    last: String,
    rest: Vec<String>,
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
    /// The entry is not the one that the put was to replace, and it was not made.
    Another,
    /// The same, or the put was made nevertheless: the object store's client may send one twice by itself, and tell only what
    /// came of the second.
    Lost,
}

/// The object of a key, as it was read.
#[derive(Debug, Clone)]
struct Stored {
    /// Of the key's changes, deletes too.
    count: Revision,
    /// Of the last changes, the newest first.
    ids: Vec<Uuid>,
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
        let this = Self { objects, root, name, swaps: Swaps::Conditional, listings: Mutex::default() };
        this.prove_conditions(deadline).await?;
        Ok(this)
    }

    /// The store under `root` of an S3 bucket, with what the environment says of the service (`AWS_ENDPOINT_URL`,
    /// `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and so on).
    ///
    /// # Errors
    /// `Refused` for settings that make no sense; as [`ObjectMetaStore::open`].
    pub async fn s3(bucket: &str, root: &str, deadline: Instant) -> Result<Self, Error> {
        let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
        if builder.get_config_value(&AmazonS3ConfigKey::Endpoint).is_some_and(|url| url.starts_with("http://")) {
            builder = builder.with_allow_http(true);
        }
        let objects = builder.build().map_err(|e| refused(&format!("opening bucket {bucket}"), e))?;
        Self::open(Arc::new(objects), root, deadline).await
    }

    /// The store in a directory of the local file system, made if it is not there. Several processes of this machine may
    /// use it at once; over a network file system the lock is as good as that system's.
    ///
    /// # Errors
    /// `Refused` if it cannot be made or opened.
    pub fn local(dir: impl AsRef<FsPath>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let doing = format!("opening the metadata store in {}", dir.display());
        let dir = std::path::absolute(dir).map_err(|e| refused(&doing, e))?;
        make_dir(&dir).map_err(|e| refused(&doing, e))?;
        File::options().create(true).append(true).open(dir.join(LOCK_FILE)).map_err(|e| refused(&doing, e))?;
        let dir = dir.canonicalize().map_err(|e| refused(&doing, e))?;
        let files = Arc::new(LocalFileSystem::new_with_prefix(&dir).map_err(|e| refused(&doing, e))?);
        let name = dir.display().to_string();
        let swaps = Swaps::Locked { dir, files: files.clone() };
        Ok(Self { objects: files, root: Path::default(), name, swaps, listings: Mutex::default() })
    }

    async fn prove_conditions(&self, deadline: Instant) -> Result<(), Error> {
        let (doing, started) = ("trying whether conditional puts are honoured", clock::now());
        let path = self.root.clone().join(format!("probe-{}", Uuid::new_v4()));
        let put = async |mode| {
            let options = PutOptions { mode, ..PutOptions::default() };
            let put = self.objects.put_opts(&path, Bytes::from_static(b"probe").into(), options);
            tokio::time::timeout_at(deadline.into(), put).await.unwrap_or_else(|_| Err(late()))
        };
        let first = put(PutMode::Create).await.map_err(|e| self.failed(doing, started, &e))?;
        let second = put(PutMode::Create).await;
        let other = UpdateVersion { e_tag: Some("\"00000000000000000000000000000000\"".to_owned()), version: None };
        let third = put(PutMode::Update(other)).await;
        let fourth = put(PutMode::Update(first.into())).await;
        // Left behind it is harmless.
        let deleted = tokio::time::timeout_at(deadline.into(), self.objects.delete(&path)).await;
        if let Err(e) = deleted.unwrap_or_else(|_| Err(late())) {
            tracing::warn!(object = %path, "an object that was written for a trial could not be removed: {e}");
        }
        let honoured = is_lost(&second) && is_lost(&third) && fourth.is_ok();
        match [second, third, fourth].into_iter().find_map(|put| put.err().filter(|e| !is_precondition(e))) {
            _ if honoured => Ok(()),
            Some(e) => Err(self.failed(doing, started, &e)),
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
        if result.meta.size > (HEADER_BYTES + IDS_KEPT * ID_BYTES + MAX_VALUE_BYTES) as u64 {
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
                return Err(self.unavailable(doing, started, attempts, &error, Applied::No));
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
                match tokio::time::timeout_at(by.into(), put).await {
                    Ok(put) => put.map_err(failed)?.map_err(failed),
                    Err(_) => Err(late()),
                }
            }
        }
    }

    /// The names of what is under a prefix, in key order, behind the key `after`.
    async fn keys_under(
        &self,
        doing: &str,
        prefix: &str,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<Vec<String>, Error> {
        let dir = self.dir(prefix.rsplit_once('/').map(|(dirs, _)| dirs));
        let started = clock::now();
        let names = self.objects.list((!dir.as_ref().is_empty()).then_some(&dir)).try_collect::<Vec<_>>();
        let names = tokio::time::timeout_at(deadline.into(), names).await.unwrap_or_else(|_| Err(late()));
        let names = match names {
            Ok(names) => names,
            Err(object_store::Error::NotFound { .. }) => Vec::new(),
            Err(e) => return Err(self.failed(doing, started, &e)),
        };
        let mut keys: Vec<_> = names.into_iter().filter_map(|object| self.key(&object.location)).collect();
        keys.retain(|key| key.starts_with(prefix) && after.is_none_or(|after| key.as_str() > after));
        keys.sort_unstable();
        Ok(keys)
    }

    /// Keeps the names behind a page, so that the next one need not ask for all of them again.
    fn hold(&self, prefix: &str, last: &str, rest: Vec<String>) {
        if rest.len() <= MAX_NAMES_HELD {
            let mut held = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
            held.truncate(MAX_LISTINGS_HELD - 1);
            held.insert(0, Listing { prefix: prefix.to_owned(), last: last.to_owned(), rest });
        }
    }

    /// The names behind a page, if they are held.
    fn taken_up(&self, prefix: &str, last: &str) -> Option<Vec<String>> {
        let mut held = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
        let at = held.iter().position(|listing| listing.prefix == prefix && listing.last == last)?;
        Some(held.remove(at).rest)
    }

    fn unavailable(
        &self,
        doing: &str,
        started: Instant,
        attempts: u32,
        error: &object_store::Error,
        applied: Applied,
    ) -> Error {
        let (doing, elapsed, last) = (doing.to_owned(), clock::since(started), innermost(error));
        let in_vain = InVain { doing, attempts, elapsed, leader: Leader::Without, last };
        in_vain.unavailable(vec![self.name.clone()], applied)
    }

    /// The error of what is not tried again, and has changed nothing.
    fn failed(&self, doing: &str, started: Instant, error: &object_store::Error) -> Error {
        match is_final(error) {
            true => refused(doing, error),
            false => self.unavailable(doing, started, 1, error, Applied::No),
        }
    }

    /// Refuses a key for whose object there is no name.
    fn check_name(&self, doing: &str, key: &str) -> Result<(), Error> {
        let path = self.path(key);
        let (longest, limit) = match &self.swaps {
            Swaps::Conditional => (path.as_ref().len(), NAME_BYTES),
            Swaps::Locked { .. } => (path.parts().map(|part| part.as_ref().len()).max().unwrap_or(0), FILE_NAME_BYTES),
        };
        if longest > limit {
            let what =
                format!("the key cannot be kept here: a name would have {longest} bytes, and has at most {limit}");
            return Err(Error::cannot(doing.to_owned(), &what));
        }
        Ok(())
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
    fn encode(count: Revision, ids: &[Uuid], entry: Option<&KeyValue>) -> Bytes {
        let value = entry.map_or(&[][..], |entry| &entry.value);
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + ids.len() * ID_BYTES + value.len());
        bytes.put_slice(MAGIC);
        bytes.put_u64(count);
        bytes.put_u64(entry.map_or(0, |entry| entry.create_revision));
        // An entry has a version from 1 on: 0 is a key that was deleted.
        bytes.put_u64(entry.map_or(0, |entry| entry.version));
        ids.iter().for_each(|id| bytes.put_slice(id.as_bytes()));
        bytes.put_slice(value);
        bytes.freeze()
    }

    fn decode(key: &str, bytes: &Bytes, version: UpdateVersion) -> Result<Self, &'static str> {
        const SHORT: &str = "it is too short";
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or(SHORT)?;
        if &header[..8] != MAGIC {
            return Err("it begins with something else");
        }
        let number = |at: usize| header[at..at + 8].try_into().map(u64::from_be_bytes).map_err(|_| SHORT);
        let (count, create_revision, times) = (number(8)?, number(16)?, number(24)?);
        let ids_bytes = ids_kept(count) * ID_BYTES;
        let ids = rest.get(..ids_bytes).ok_or(SHORT)?;
        let ids = ids.chunks(ID_BYTES).map(|id| Uuid::from_slice(id).map_err(|_| SHORT)).collect::<Result<_, _>>()?;
        let entry = (times > 0).then(|| KeyValue {
            key: key.to_owned(),
            value: bytes.slice(HEADER_BYTES + ids_bytes..),
            version: times,
            create_revision,
            mod_revision: count,
            lease: None,
        });
        Ok(Self { count, ids, entry, version })
    }

    /// The id of the change that raised the key's count to this; `None`: it is not named any more.
    fn id_of(&self, count: Revision) -> Option<Uuid> {
        let age = self.count.checked_sub(count)?;
        self.ids.get(usize::try_from(age).ok()?).copied()
    }
}

/// Of how many changes an entry names the ids.
fn ids_kept(count: Revision) -> usize {
    usize::try_from(count).unwrap_or(IDS_KEPT).min(IDS_KEPT)
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
        Capabilities {
            multi_key: false,
            consistent_listing: false,
            snapshots: false,
            watch: false,
            leases: false,
            scopes: false,
            ..Capabilities::CLUSTER
        }
    }

    async fn get(&self, key: &str, options: ReadOptions, deadline: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        validate_key(key)?;
        let doing = format!("reading {key}");
        self.check(&doing, options)?;
        self.check_name(&doing, key)?;
        let stored = self.read_by(&doing, key, deadline).await?;
        Ok(Read { revision: stored.as_ref().map_or(0, |s| s.count), value: stored.and_then(|stored| stored.entry) })
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        validate_keys(keys)?;
        let doing = format!("reading {} keys", keys.len());
        self.check(&doing, options)?;
        keys.iter().try_for_each(|key| self.check_name(&doing, key))?;
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
        validate_prefix(prefix)?;
        let doing = format!("listing {prefix}");
        self.check(&doing, options)?;
        let limit = page_limit(limit);
        let mut keys = match page.and_then(|last| self.taken_up(prefix, last)) {
            Some(keys) => keys,
            None => self.keys_under(&doing, prefix, page, deadline).await?,
        };
        let mut found = Page::default();
        let (mut bytes, mut looked_at) = (0, 0);
        while found.entries.len() < limit && bytes < MAX_PAGE_BYTES && looked_at < keys.len() {
            let these = READS_AT_ONCE.min(limit - found.entries.len()).min(keys.len() - looked_at);
            let reads = keys[looked_at..looked_at + these].iter().map(|key| self.read_by(&doing, key, deadline));
            let reads: Vec<_> = reads.collect();
            for entry in futures::future::try_join_all(reads).await?.into_iter().flatten().filter_map(|s| s.entry) {
                bytes += entry.key.len() + entry.value.len();
                found.entries.push(entry);
            }
            looked_at += these;
        }
        if looked_at < keys.len() {
            let rest = keys.split_off(looked_at);
            found.next = keys.pop();
            self.hold(prefix, found.next.as_deref().unwrap_or_default(), rest);
        }
        Ok(Read { revision: 0, value: found })
    }

    async fn commit(&self, txn: Txn, deadline: Instant) -> Result<Committed, Error> {
        txn.validate()?;
        let Some(key) = only_key(&txn)? else {
            return Ok(Committed { result: TxnResult { succeeded: true, ..TxnResult::default() }, resent: false });
        };
        let (doing, id) = (format!("committing {key}"), Uuid::new_v4());
        self.check_name(&doing, &key)?;
        let (started, mut backoff, mut attempts) = (clock::now(), Backoff::default(), 0);
        // The put that may have been made, or may still be: what it was based on, and what it came to if it was.
        let mut pending: Option<(Revision, TxnResult)> = None;
        // Others change the key as well: some room between the attempts.
        let mut crowded = false;
        let in_doubt = |attempts, last: String| {
            let (doing, elapsed) = (doing.clone(), clock::since(started));
            InVain { doing, attempts, elapsed, leader: Leader::Without, last }.in_doubt()
        };
        loop {
            attempts += 1;
            let before = match self.read_by(&doing, &key, deadline).await {
                Err(e) if pending.is_none() => return Err(e),
                Err(e @ Error::Unavailable { .. }) => return Err(e.with_applied(Applied::Unknown)),
                Err(e) => return Err(in_doubt(attempts, e.to_string())),
                Ok(before) => before,
            };
            let count = before.as_ref().map_or(0, |stored| stored.count);
            let on_its_way = match pending.take() {
                None => false,
                // The same put again: one of the two takes effect.
                Some((based_on, _)) if based_on == count => true,
                Some((based_on, result)) => match before.as_ref().and_then(|stored| stored.id_of(based_on + 1)) {
                    Some(first) if first == id => return Ok(Committed { result, resent: false }),
                    // What it was based on does not come again.
                    Some(_) => false,
                    None => return Err(in_doubt(attempts, format!("the key was changed {IDS_KEPT} times and more"))),
                },
            };
            if std::mem::take(&mut crowded) {
                if !backoff.wait(deadline).await {
                    let applied = if on_its_way { Applied::Unknown } else { Applied::No };
                    let why = failed("the key is changed by others all the time");
                    return Err(self.unavailable(&doing, started, attempts, &why, applied));
                }
                if !on_its_way {
                    continue;
                }
            }
            let mut state = State::of_one(before.as_ref().and_then(|stored| stored.entry.clone()), count);
            let (result, changes) = state.apply(txn.clone());
            if changes.is_empty() {
                return Ok(Committed { result, resent: false });
            }
            let earlier = before.iter().flat_map(|stored| &stored.ids).copied();
            let ids: Vec<_> = std::iter::once(id).chain(earlier).take(ids_kept(result.revision)).collect();
            let after = Stored::encode(result.revision, &ids, state.get(&key));
            match self.put(&key, before.as_ref(), after, deadline).await {
                Ok(Put::Done) => return Ok(Committed { result, resent: false }),
                Ok(lost) => {
                    crowded = attempts > 1;
                    // One that is on its way since before may have been made.
                    pending = Some((count, result)).filter(|_| on_its_way || matches!(lost, Put::Lost));
                }
                Err(e) if is_final(&e) && !on_its_way => return Err(refused(&doing, e)),
                Err(e) => {
                    pending = Some((count, result));
                    if !backoff.wait(deadline).await {
                        return Err(self.unavailable(&doing, started, attempts, &e, Applied::Unknown));
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
        return Ok(Put::Another);
    }
    let dir = file.parent().ok_or_else(|| damaged("it has no directory"))?;
    make_dir(dir)?;
    let mut aside = file.as_os_str().to_owned();
    // A listing leaves out what is named so.
    aside.push("#1");
    let mut unfinished = File::create(&aside)?;
    unfinished.write_all(after)?;
    unfinished.sync_all()?;
    std::fs::rename(&aside, file)?;
    File::open(dir)?.sync_all()?;
    Ok(Put::Done)
}

/// Makes a directory and those above it, and syncs the names of those that were not there.
fn make_dir(dir: &FsPath) -> std::io::Result<()> {
    let made: Vec<_> = dir.ancestors().take_while(|dir| !dir.exists()).map(FsPath::to_owned).collect();
    std::fs::create_dir_all(dir)?;
    for above in made.iter().filter_map(|dir| dir.parent()) {
        File::open(above)?.sync_all()?;
    }
    Ok(())
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
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
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
        let store = ObjectMetaStore {
            objects: Arc::new(InMemory::new()),
            root: "r".into(),
            name: String::new(),
            swaps,
            listings: Mutex::default(),
        };
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
        /// So many others write right after a put whose answer is lost.
        overwritten: Revision,
        /// A put whose answer is lost is made again by the client itself, which is told that it lost.
        repeats: bool,
        /// Every put is told that it lost.
        always_lost: AtomicBool,
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
            let lost = || object_store::Error::Precondition { path: at.to_string(), source: "lost".into() };
            if self.always_lost.load(Ordering::SeqCst) {
                return Err(lost());
            }
            let put = self.objects.put_opts(at, bytes.clone(), options).await?;
            if self.lose.load(Ordering::SeqCst) == 0 || at.as_ref().contains("probe") {
                return Ok(put);
            }
            self.lose.fetch_sub(1, Ordering::SeqCst);
            let bytes: Bytes = bytes.into();
            let mut stored = Stored::decode("/kv/n", &bytes, UpdateVersion { e_tag: None, version: None }).unwrap();
            for _ in 0..self.overwritten {
                stored.count += 1;
                stored.ids.insert(0, Uuid::new_v4());
                stored.ids.truncate(IDS_KEPT);
                let other = Stored::encode(stored.count, &stored.ids, stored.entry.as_ref());
                self.objects.put(at, other.into()).await?;
            }
            if self.repeats {
                return Err(lost());
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

    /// What comes of a second put whose answer is lost.
    async fn second_put(bad: Bad) -> (Result<Committed, Error>, KeyValue) {
        let bad = Arc::new(bad);
        let store = ObjectMetaStore::open(bad.clone(), "", soon()).await.unwrap();
        store.commit(put("1"), soon()).await.unwrap();
        bad.lose.store(1, Ordering::SeqCst);
        let done = store.commit(put("2"), soon()).await;
        (done, store.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap())
    }

    #[tokio::test]
    async fn a_put_that_was_lost_and_overwritten_is_found_behind_the_others() {
        for repeats in [false, true] {
            for overwritten in [0, 1, IDS_KEPT as Revision - 1] {
                let (done, entry) = second_put(Bad { overwritten, repeats, ..Bad::default() }).await;
                assert_eq!(done.unwrap().result.revision, 2);
                assert_eq!(entry.mod_revision, 2 + overwritten, "nothing on top of the others");
            }
            let overwritten = IDS_KEPT as Revision;
            let (done, entry) = second_put(Bad { overwritten, repeats, ..Bad::default() }).await;
            let error = done.unwrap_err();
            assert!(matches!(error, Error::InDoubt { .. }), "{error}");
            assert_eq!(entry.mod_revision, 2 + overwritten, "nothing on top of the others");
        }
    }

    #[tokio::test]
    async fn a_put_that_loses_all_the_time_ends_with_its_deadline() {
        let bad = Arc::new(Bad::default());
        let store = ObjectMetaStore::open(bad.clone(), "", soon()).await.unwrap();
        bad.always_lost.store(true, Ordering::SeqCst);
        let by = clock::now() + Duration::from_millis(300);
        let ended = tokio::time::timeout(Duration::from_secs(5), store.commit(put("1"), by)).await.expect("it ends");
        let error = ended.unwrap_err();
        assert!(error.is_unavailable() && error.applied() == Applied::Unknown, "{error}");
    }

    #[tokio::test]
    async fn a_key_that_no_object_can_be_named_for_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let local = ObjectMetaStore::local(dir.path()).unwrap();
        let objects = ObjectMetaStore::open(Arc::new(InMemory::new()), "root", soon()).await.unwrap();
        let key = |bytes| format!("/kv/{}", "k".repeat(bytes));
        for (store, most) in [(&local, FILE_NAME_BYTES - 1), (&objects, NAME_BYTES - "root/d/dkv/f".len())] {
            store.cas(&key(most), None, "v".into(), soon()).await.unwrap();
            let longer = key(most + 1);
            for error in [
                store.cas(&longer, None, "v".into(), soon()).await.unwrap_err(),
                store.get(&longer, ReadOptions::default(), soon()).await.unwrap_err(),
                store.batch_get(&[longer], ReadOptions::default(), soon()).await.unwrap_err(),
            ] {
                assert!(matches!(error, Error::Refused { .. }) && error.applied() == Applied::No, "{error}");
            }
        }
    }
}
