//! What is done to a table's history and files, and not to its rows: references, expiry, manifests, orphans, and tables that
//! others have written.
//!
//! Objects are removed only after the version that no longer refers to them is certainly current, and only if neither that
//! version nor one that can be gone back to refers to them. After an unknown outcome nothing is removed: the sweep for
//! orphans finds it later.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures::{StreamExt, TryStreamExt};
use iceberg::spec::{
    MAIN_BRANCH, Operation, Snapshot, SnapshotRef, SnapshotReference, SnapshotRetention, TableMetadata,
    TableMetadataBuilder,
};
use lake_client::catalog::{CatalogError, TableIdent, TablePointer};
use object_store::ObjectStore;

use super::commit::{self, Proposal};
use super::version::{self, Edit, Removed};
use super::writer::DataFiles;
use super::{Table, Tables, catalog_error};
use crate::error::{Error, Kind, Result};
use crate::planted::{self, Bug};
use crate::storage::abandoned::Abandoned;
use crate::storage::cache::MetadataCache;
use crate::storage::canonical;
use crate::storage::io::LakeIo;

/// How old a file must be to be taken for an orphan, unless said otherwise ...
pub const ORPHAN_AGE: Duration = Duration::from_secs(72 * 3600);
/// ... and at least: a younger one may belong to a statement that is running.
pub const ORPHAN_AGE_LEAST: Duration = Duration::from_secs(24 * 3600);

/// Snapshots older than this expire, unless the table or the statement says otherwise.
const SNAPSHOT_AGE_MS: i64 = 5 * 24 * 3600 * 1000;
/// Manifests read at a time.
const MANIFESTS_IN_FLIGHT: usize = 16;
/// Orphans that are removed before it is looked again whose it is to do that.
const REMOVED_AT_A_TIME: usize = 100;

/// Makes a snapshot the current one; `ancestor`: only one that the current one comes from.
pub fn set_current(snapshot: i64, ancestor: bool) -> Edit {
    Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
        if base.snapshot_by_id(snapshot).is_none() {
            return Err(Error::not_found(format!("the table has no snapshot {snapshot}")));
        }
        if ancestor && !ancestors(base, base.current_snapshot_id()).any(|s| s.snapshot_id() == snapshot) {
            return Err(Error::invalid(format!("the current snapshot does not come from snapshot {snapshot}")));
        }
        let current = base.current_snapshot_id();
        match current == Some(snapshot) {
            true => Ok(builder),
            false => Ok(builder.set_ref(MAIN_BRANCH, SnapshotReference::new(snapshot, branch_retention()))?),
        }
    })
}

pub(super) fn branch_retention() -> SnapshotRetention {
    SnapshotRetention::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None, max_ref_age_ms: None }
}

/// Names a snapshot, the current one unless another is given.
pub fn create_ref(name: String, snapshot: Option<i64>, branch: bool) -> Edit {
    Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
        if base.snapshot_for_ref(&name).is_some() {
            return Err(Error::already_exists(format!("the table has a reference {name} already")));
        }
        let Some(snapshot) = snapshot.or(base.current_snapshot_id()) else {
            return Err(Error::invalid("the table has no snapshot that could be named"));
        };
        if base.snapshot_by_id(snapshot).is_none() {
            return Err(Error::not_found(format!("the table has no snapshot {snapshot}")));
        }
        let retention = match branch {
            true => branch_retention(),
            false => SnapshotRetention::Tag { max_ref_age_ms: None },
        };
        Ok(builder.set_ref(&name, SnapshotReference::new(snapshot, retention))?)
    })
}

/// Removes a name. The snapshot stays until it expires.
pub fn drop_ref(name: String, branch: bool) -> Edit {
    Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
        let kind = if branch { "branch" } else { "tag" };
        if name == MAIN_BRANCH {
            return Err(Error::invalid("the branch main is the table itself"));
        }
        match reference(base, &name)? {
            Some(reference) if reference.is_branch() == branch => Ok(builder.remove_ref(&name)),
            Some(_) => Err(Error::invalid(format!("{name} is no {kind}"))),
            None => Err(Error::not_found(format!("the table has no {kind} {name}"))),
        }
    })
}

pub(super) fn reference(base: &TableMetadata, name: &str) -> Result<Option<SnapshotReference>> {
    Ok(references(base)?.into_iter().find(|(of, _)| of == name).map(|(_, reference)| reference))
}

/// All references by name, which the crate keeps to itself but for their snapshots.
fn references(base: &TableMetadata) -> Result<Vec<(String, SnapshotReference)>> {
    let failed = |e: serde_json::Error| Error::internal(format!("reading the references of a table: {e}"));
    let json = serde_json::to_value(base).map_err(failed)?;
    let refs = json.get("refs").and_then(serde_json::Value::as_object).cloned().unwrap_or_default();
    refs.into_iter().map(|(name, value)| Ok((name, serde_json::from_value(value).map_err(failed)?))).collect()
}

/// A snapshot and what it comes from, newest first. It ends also where metadata is damaged so that a snapshot comes from itself.
pub(super) fn ancestors(base: &TableMetadata, from: Option<i64>) -> impl Iterator<Item = &SnapshotRef> {
    let first = from.and_then(|id| base.snapshot_by_id(id));
    let line = std::iter::successors(first, |snapshot| base.snapshot_by_id(snapshot.parent_snapshot_id()?));
    line.take(base.snapshots().len())
}

/// Removes snapshots from the history that are old and no reference needs, and then the objects that only they refer to.
/// Returns how many snapshots.
pub async fn expire_snapshots(
    tables: &Arc<Tables>,
    table: &Table,
    older_than_ms: Option<i64>,
    retain_last: Option<u64>,
    deadline: Instant,
) -> Result<u64> {
    let expired: Arc<Mutex<(Vec<Snapshot>, Option<TableMetadata>)>> = Arc::default();
    let edit: Edit = {
        let (expired, tables) = (expired.clone(), tables.clone());
        Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
            let kept = retained(base, older_than_ms, retain_last)?;
            let gone: Vec<Snapshot> =
                base.snapshots().filter(|s| !kept.contains(&s.snapshot_id())).map(|s| s.as_ref().clone()).collect();
            tables.will_answer(gone.len() as u64);
            let ids: Vec<i64> = gone.iter().map(|snapshot| snapshot.snapshot_id()).collect();
            *expired.lock().unwrap_or_else(PoisonError::into_inner) = (gone, Some(base.clone()));
            Ok(builder.remove_snapshots(&ids))
        })
    };
    let (tables, table) = (tables.clone(), table.clone());
    let owner = tables.clone();
    owner
        .owned(async move {
            let none = DataFiles::new(tables.storage.clone(), tables.tasks.clone());
            let pointer = commit::commit(&tables, &table, Proposal::edit(edit), none, deadline).await?;
            let (gone, base) = std::mem::take(&mut *expired.lock().unwrap_or_else(PoisonError::into_inner));
            let Some(base) = base else { return Ok(0) };
            if !gone.is_empty() {
                let current = tables.cache.table(&pointer.value.metadata_location).await;
                let removed = match current {
                    Ok(current) => remove_unreferenced(&tables, &base, &current, &gone).await,
                    Err(error) => Err(error),
                };
                if let Err(error) = removed {
                    tracing::warn!(table = %table.ident, %error, "expired snapshots' files stay; the orphan sweep will find them");
                }
            }
            Ok(gone.len() as u64)
        })
        .await
}

/// How long snapshots of a table are kept, in milliseconds.
pub(super) fn snapshot_age_ms(base: &TableMetadata) -> i64 {
    let asked = base.properties().get("history.expire.max-snapshot-age-ms").and_then(|text| text.parse().ok());
    asked.unwrap_or(SNAPSHOT_AGE_MS)
}

/// The ids of the snapshots that stay.
pub(super) fn retained(
    base: &TableMetadata,
    older_than_ms: Option<i64>,
    retain_last: Option<u64>,
) -> Result<HashSet<i64>> {
    let property = |name: &str| base.properties().get(name).and_then(|text| text.parse::<i64>().ok());
    let now = version::now_ms();
    let default_cutoff = older_than_ms.unwrap_or(now.saturating_sub(snapshot_age_ms(base)));
    let least = property("history.expire.min-snapshots-to-keep").and_then(|n| u64::try_from(n).ok());
    let default_least = retain_last.or(least).unwrap_or(1).max(1);
    let mut kept = HashSet::new();
    for (_, reference) in references(base)? {
        match &reference.retention {
            SnapshotRetention::Tag { .. } => {
                kept.insert(reference.snapshot_id);
            }
            SnapshotRetention::Branch { min_snapshots_to_keep, max_snapshot_age_ms, .. } => {
                let least = min_snapshots_to_keep.and_then(|n| u64::try_from(n).ok()).unwrap_or(default_least);
                let cutoff = max_snapshot_age_ms.map_or(default_cutoff, |age| now.saturating_sub(age));
                for (i, snapshot) in ancestors(base, Some(reference.snapshot_id)).enumerate() {
                    if (i as u64) < least || snapshot.timestamp_ms() >= cutoff {
                        kept.insert(snapshot.snapshot_id());
                    }
                }
            }
        }
    }
    // What no reference leads to goes once it is old: a rollback may be taken back for a while.
    let young = base.snapshots().filter(|snapshot| snapshot.timestamp_ms() >= default_cutoff);
    kept.extend(young.map(|snapshot| snapshot.snapshot_id()));
    Ok(kept)
}

/// Removes what the snapshots `gone` of `base` refer to and no snapshot of `current` does.
pub(super) async fn remove_unreferenced(
    tables: &Tables,
    base: &TableMetadata,
    current: &TableMetadata,
    gone: &[Snapshot],
) -> Result<()> {
    let kept = reachable(&tables.cache, current, current.snapshots().map(AsRef::as_ref)).await?;
    let lost = reachable(&tables.cache, base, gone.iter()).await?;
    // What lies elsewhere is not the table's own.
    let own = format!("{}/", base.location());
    let is_kept = |location: &String| kept.contains(location) && !planted::has(Bug::ExpiredTooMuch);
    let orphans: Vec<String> =
        lost.into_iter().filter(|location| !is_kept(location) && location.starts_with(&own)).collect();
    tables.storage.discard(&orphans).await;
    Ok(())
}

/// The manifest lists, manifests and files of snapshots.
async fn reachable<'a>(
    cache: &MetadataCache,
    metadata: &TableMetadata,
    snapshots: impl Iterator<Item = &'a Snapshot>,
) -> Result<HashSet<String>> {
    let mut found = HashSet::new();
    let mut manifests = Vec::new();
    for snapshot in snapshots {
        if !found.insert(snapshot.manifest_list().to_owned()) {
            continue;
        }
        let list = cache.manifest_list(metadata, snapshot).await?;
        for file in list.entries() {
            if found.insert(file.manifest_path.clone()) {
                manifests.push(file.clone());
            }
        }
    }
    let mut loads = futures::stream::iter(manifests)
        .map(|file| async move { cache.manifest(&file).await })
        .buffer_unordered(MANIFESTS_IN_FLIGHT);
    while let Some(manifest) = loads.next().await {
        let manifest = manifest?;
        let alive = manifest.entries().iter().filter(|entry| entry.is_alive());
        found.extend(alive.map(|entry| entry.file_path().to_owned()));
    }
    Ok(found)
}

/// Merges the manifests of the current snapshot into as few as their size allows. Returns how many there were.
pub async fn rewrite_manifests(tables: &Arc<Tables>, table: &Table, deadline: Instant) -> Result<u64> {
    let Some(snapshot) = table.metadata.current_snapshot() else { return Ok(0) };
    let before = tables.cache.manifest_list(&table.metadata, snapshot).await?.entries().len();
    if before < 2 {
        return Ok(0);
    }
    tables.will_answer(before as u64);
    let (tables, table) = (tables.clone(), table.clone());
    let owner = tables.clone();
    owner
        .owned(async move {
            let io = LakeIo::new(tables.storage.clone());
            let mut change =
                version::write_change(&io, &table.metadata, Operation::Replace, &[], Removed::Nothing).await?;
            change.merge_manifests = true;
            let none = DataFiles::new(tables.storage.clone(), tables.tasks.clone());
            let proposal = Proposal::change(change, None, &table.metadata);
            commit::commit(&tables, &table, proposal, none, deadline).await?;
            Ok(before as u64)
        })
        .await
}

/// Removes, or with `dry_run` only counts and logs, what is in the table's location, that nothing of the table refers to,
/// and that is older than `older_than` by the store's clock. So are uploads to S3 that began before that and were not completed; where they
/// cannot be listed they stay, and the log says so.
///
/// Where it is done under guards they are looked at before each [`REMOVED_AT_A_TIME`] files; those may still go when it is another's to do,
/// which finds fewer.
///
/// # Errors
/// `Conflict` once it is another's to do.
/// `NotSupported` if another table lives in the location as well: what that one refers to would look like an orphan.
pub async fn remove_orphan_files(
    tables: &Arc<Tables>,
    ident: &TableIdent,
    older_than: Duration,
    dry_run: bool,
    deadline: Instant,
) -> Result<u64> {
    let find = async {
        let doing = format!("looking up table {ident}");
        // Listed first: what is written after that is in no list, and what was written before is known to the pointer that is
        // read then, or too young.
        let current = tables.metadata.read_table(ident, deadline).await.map_err(|e| catalog_error(&doing, e))?;
        let current = current.ok_or_else(|| Error::not_found(format!("table {ident} does not exist")))?;
        let location = tables.cache.table(&current.value.metadata_location).await?.location().to_owned();
        lives_alone(tables, ident, &location, deadline).await?;
        let (listed, uploads) = old_objects(tables, &location, older_than).await?;
        let current = tables.metadata.read_table(ident, deadline).await.map_err(|e| catalog_error(&doing, e))?;
        let current = current.ok_or_else(|| Error::not_found(format!("table {ident} does not exist")))?;
        let metadata = tables.cache.table(&current.value.metadata_location).await?;
        if metadata.location() != location {
            return Err(Error::conflict(format!("table {ident} was moved or replaced meanwhile; run it again")));
        }
        let mut known = reachable(&tables.cache, &metadata, metadata.snapshots().map(AsRef::as_ref)).await?;
        if planted::has(Bug::SweptLive) {
            known.clear();
        }
        known.insert(current.value.metadata_location.clone());
        known.extend(current.value.previous_location.clone());
        known.extend(metadata.metadata_log().iter().map(|entry| entry.metadata_file.clone()));
        known.extend(metadata.statistics_iter().map(|file| file.statistics_path.clone()));
        known.extend(metadata.partition_statistics_iter().map(|file| file.statistics_path.clone()));
        let known = known.iter().map(|location| tables.storage.resolve(location).map(|object| object.path.to_string()));
        let known: HashSet<String> = known.collect::<Result<_>>()?;
        let orphans = listed.into_iter().filter(|(path, _)| !known.contains(path)).map(|(_, url)| url);
        Ok((location, orphans.collect::<Vec<_>>(), uploads))
    };
    let (location, orphans, uploads) = tokio::time::timeout_at(deadline.into(), find).await.unwrap_or_else(|_| {
        Err(Error::deadline(format!("looking for orphans of table {ident}: not done in time; nothing was removed")))
    })?;
    for orphan in &orphans {
        tracing::info!(table = %ident, location = %orphan, dry_run, "an orphan");
    }
    for upload in &uploads {
        tracing::info!(table = %ident, path = %upload.path, dry_run, "an upload that nobody completes");
    }
    if !dry_run {
        remove(tables, ident, &orphans, deadline).await?;
        for some in uploads.chunks(REMOVED_AT_A_TIME) {
            let checked = tables.writer.check_guards(deadline).await;
            checked.map_err(|e| {
                catalog_error("looking whose it is to do", e)
                    .while_doing(format_args!("aborting uploads of table {ident}"))
            })?;
            tables.storage.abort_uploads(&location, some).await?;
        }
    }
    Ok((orphans.len() + uploads.len()) as u64)
}

/// Removes orphans for as long as the guards hold, which no commit carries here.
async fn remove(tables: &Tables, ident: &TableIdent, orphans: &[String], deadline: Instant) -> Result<()> {
    let mut removed = 0;
    for some in orphans.chunks(REMOVED_AT_A_TIME) {
        let checked = tables.writer.check_guards(deadline).await;
        checked.map_err(|e| {
            let doing = format!("removing orphans of table {ident}, {removed} of {} are gone", orphans.len());
            catalog_error("looking whose it is to do", e).while_doing(doing)
        })?;
        tables.storage.discard(some).await;
        removed += some.len();
    }
    Ok(())
}

/// Refuses if another table's location, or its current metadata, is inside this one or around it. One whose metadata cannot be
/// read is an error, too.
async fn lives_alone(tables: &Tables, ident: &TableIdent, location: &str, deadline: Instant) -> Result<()> {
    let directory = |location: &str| format!("{}/", canonical(location.trim_end_matches('/')));
    let own = directory(location);
    for (_, idents) in tables.list(deadline).await? {
        for other in idents.iter().filter(|other| *other != ident) {
            let doing = format!("looking up table {other}, which may share the location of table {ident}");
            let pointer = tables.metadata.read_table(other, deadline).await.map_err(|e| catalog_error(&doing, e))?;
            let Some(pointer) = pointer else { continue };
            let file = &pointer.value.metadata_location;
            let metadata = tables.cache.table(file).await.map_err(|e| e.while_doing(&doing))?;
            let theirs = directory(metadata.location());
            if canonical(file).starts_with(&own) || theirs.starts_with(&own) || own.starts_with(&theirs) {
                return Err(Error::not_supported(format!(
                    "removing orphans of table {ident}: table {other} lives in {location} as well, and its files would look like \
                     orphans; nothing was removed"
                )));
            }
        }
    }
    Ok(())
}

/// The objects under a location that are old enough: their paths in the store, and their locations. And the uploads that are.
async fn old_objects(
    tables: &Tables,
    location: &str,
    older_than: Duration,
) -> Result<(Vec<(String, String)>, Vec<Abandoned>)> {
    let root = tables.storage.resolve(location)?;
    let failed = |e| Error::object_store("listing", location, &e);
    // The clock that counts is the one that dates the objects.
    let now = tables.storage.clock(&format!("{location}/metadata")).await?;
    let listed: Vec<_> = root.store.list(Some(&root.path)).try_collect().await.map_err(failed)?;
    let old = listed.into_iter().filter(|object| {
        let modified = SystemTime::from(object.last_modified);
        now.duration_since(modified).is_ok_and(|age| age >= older_than)
    });
    let prefix: &str = root.path.as_ref();
    let located = old.filter_map(|object| {
        let path = object.location.to_string();
        let rest = path.strip_prefix(prefix)?.to_owned();
        Some((path, format!("{location}{rest}")))
    });
    let located = located.collect();
    let Some(before) = now.checked_sub(older_than) else { return Ok((located, Vec::new())) };
    let uploads = tables.storage.abandoned_uploads(location, Some(before)).await.unwrap_or_else(|error| {
        tracing::warn!(%error, "uploads that were not completed, if there are any, stay");
        Vec::new()
    });
    Ok((located, uploads))
}

/// Makes a table of metadata that is there already.
///
/// # Errors
/// `AlreadyExists` for one of this name, or one that this is the metadata of; `NotFound` for the namespace or the file; `Corrupt`
/// for a file that is no table metadata.
pub async fn register_table(tables: &Arc<Tables>, ident: &TableIdent, file: &str, deadline: Instant) -> Result<()> {
    let doing = format!("registering table {ident}");
    let metadata = tables.cache.table(file).await.map_err(|e| e.while_doing(&doing))?;
    let check = || tables.check_not_purged(metadata.uuid(), deadline);
    let unpurged = check().await.map_err(|e| e.while_doing(&doing))?;
    let pointer = TablePointer { uuid: metadata.uuid(), metadata_location: file.to_owned(), previous_location: None };
    let registered = tables.recording()?.guarded(unpurged).register_table(ident, &pointer, None, deadline).await;
    if let Err(CatalogError::Fenced { resent: false }) = registered {
        check().await.map_err(|e| e.while_doing(&doing))?;
    }
    match registered {
        Ok(current) if current.value == pointer => Ok(()),
        Ok(_) => Err(Error::already_exists(format!("table {ident} exists already"))),
        Err(error) => match catalog_error(&doing, error) {
            error if error.kind == Kind::Unknown => Err(error),
            error => Err(error.of_a_change()),
        },
    }
}
