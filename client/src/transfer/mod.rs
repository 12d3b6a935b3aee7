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
//! Limits: a page, a record and [`filling::BATCHES_AT_ONCE`] batches in memory; batches within what the store says that it takes.
//! Failure cases: the store is away or refuses; the file; a target that holds something else; somebody who writes to the
//! target meanwhile. Whatever was written by then stays, and is told.

mod comparing;
pub mod file;
mod filling;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use self::comparing::{Differing, Listed, compare};
use self::file::{Described, FileError, Header, Sum, Writing};
use self::filling::{Done, Filling};
use crate::backoff::Backoff;
use crate::clock;
use crate::store::{self, MetaStore};

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
