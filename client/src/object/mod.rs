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
//! asked for one after the other, and reads each entry. Limits: [`listing::MAX_LISTINGS_HELD`] listings under way whose names are
//! kept; [`READS_AT_ONCE`] objects read at once; values as everywhere; keys whose object's name is not too long
//! ([`NAME_BYTES`], [`FILE_NAME_BYTES`]).
//!
//! `opening` makes a store of what is there, `names` has how a key becomes a name, `stored` what an object holds, `listing` the
//! names between two pages, `local` the lock and the file in the place of another, `failure` what errors mean.

mod failure;
mod listing;
mod local;
mod names;
mod opening;
mod stored;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use lake_proto::kv::{Condition, KeyValue, Op, Revision, Txn, TxnResult, validate_key, validate_keys, validate_prefix};
use lake_proto::limits::{MAX_PAGE_BYTES, MAX_VALUE_BYTES, page_limit};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion};
use uuid::Uuid;

use self::failure::{failed, innermost, is_final, is_precondition, late, refused};
use self::listing::Listing;
use self::local::{LOCK_FILE, lock, replace};
use self::names::{decode, encode};
use self::stored::{HEADER_BYTES, ID_BYTES, IDS_KEPT, Stored, ids_kept};
use crate::backoff::Backoff;
use crate::clock;
use crate::memory::State;
use crate::store::{Applied, Capabilities, Committed, Error, InVain, Leader, MetaStore, Page, Read, ReadOptions};

/// Objects of one call that are read at once.
const READS_AT_ONCE: usize = 16;
/// Longest name of an object, as S3 has it.
const NAME_BYTES: usize = 1024;
/// Longest name of a file and of a directory on the usual file systems, less what a file has that is not finished.
const FILE_NAME_BYTES: usize = 253;

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
    /// It was not made: the lock was not to be had.
    Locked(object_store::Error),
}

impl ObjectMetaStore {
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
        let mut last = None;
        loop {
            attempts += 1;
            let error = match tokio::time::timeout_at(deadline.into(), self.read(key)).await {
                Ok(Ok(stored)) => return Ok(stored),
                Ok(Err(e)) if is_final(&e) => return Err(refused(doing, e)),
                Ok(Err(e)) => e,
                // What the attempt before it was told says more.
                Err(_) => last.take().unwrap_or_else(late),
            };
            if !backoff.wait(deadline).await {
                return Err(self.unavailable(doing, started, attempts, &error, Applied::No));
            }
            last = Some(error);
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
                let lock = match lock(&dir.join(LOCK_FILE), by).await {
                    Ok(lock) => lock,
                    Err(e) => return Ok(Put::Locked(e)),
                };
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
            ReadOptions { snapshot: Some(_), .. } => Err(Error::snapshot_expired(doing)),
            ReadOptions { min_revision: 1.., .. } => {
                Err(Error::cannot(doing.to_owned(), "an object store has no revision of its own to wait for"))
            }
            _ => Ok(()),
        }
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
                Ok(Put::Locked(e)) => {
                    let applied = if on_its_way { Applied::Unknown } else { Applied::No };
                    return Err(self.unavailable(&doing, started, attempts, &e, applied));
                }
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
