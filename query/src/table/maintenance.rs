//! What is done to a table's history and files, and not to its rows: references, expiry, manifests, and tables that others have
//! written.
//!
//! Objects are removed only after the version that no longer refers to them is certainly current, and only if neither that
//! version nor one that can be gone back to refers to them. After an unknown outcome nothing is removed: the sweep for
//! orphans finds it later.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures::StreamExt;
use iceberg::spec::{
    MAIN_BRANCH, Operation, Snapshot, SnapshotRef, SnapshotReference, SnapshotRetention, TableMetadata,
    TableMetadataBuilder,
};
use lake_client::catalog::{CatalogError, TableIdent, TablePointer};

use super::commit::{self, Proposal};
use super::version::{self, Edit, Removed};
use super::writer::DataFiles;
use super::{Table, Tables, catalog_error};
use crate::error::{Error, Kind, Result};
use crate::planted::{self, Bug};
use crate::storage::cache::MetadataCache;
use crate::storage::io::LakeIo;

/// Snapshots older than this expire, unless the table or the statement says otherwise.
const SNAPSHOT_AGE_MS: i64 = 5 * 24 * 3600 * 1000;
/// Manifests read at a time.
const MANIFESTS_IN_FLIGHT: usize = 16;
/// Most files, and most snapshots, that the log names of what a dry run has found.
pub const NAMED_AT_MOST: usize = 1000;

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
    let taken_out: Arc<Mutex<(Vec<Snapshot>, Option<TableMetadata>)>> = Arc::default();
    let edit: Edit = {
        let (taken_out, tables) = (taken_out.clone(), tables.clone());
        Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
            let gone = expired(base, older_than_ms, retain_last)?;
            tables.will_answer(gone.len() as u64);
            let ids: Vec<i64> = gone.iter().map(|snapshot| snapshot.snapshot_id()).collect();
            *taken_out.lock().unwrap_or_else(PoisonError::into_inner) = (gone, Some(base.clone()));
            Ok(builder.remove_snapshots(&ids))
        })
    };
    let (tables, table) = (tables.clone(), table.clone());
    let owner = tables.clone();
    owner
        .owned(async move {
            let none = DataFiles::new(tables.storage.clone(), tables.tasks.clone());
            let pointer = commit::commit(&tables, &table, Proposal::edit(edit), none, deadline).await?;
            let (gone, base) = std::mem::take(&mut *taken_out.lock().unwrap_or_else(PoisonError::into_inner));
            let Some(base) = base else { return Ok(0) };
            if !gone.is_empty() {
                let current = tables.cache.table(&pointer.value.metadata_location).await;
                // Nobody is told of it as a failure: what was asked for is committed.
                let removed = match current {
                    Ok(current) => remove_unreferenced(&tables, &base, &current, &gone, deadline).await,
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

/// What [`expire_snapshots`] would do to the table as it is now. Returns how many snapshots it would remove; the log names them, and the
/// objects that only they refer to.
///
/// # Errors
/// What could not be read; `Deadline`.
pub async fn would_expire(
    tables: &Tables,
    table: &Table,
    older_than_ms: Option<i64>,
    retain_last: Option<u64>,
    deadline: Instant,
) -> Result<u64> {
    let base: &TableMetadata = &table.metadata;
    let gone = expired(base, older_than_ms, retain_last)?;
    let ids: HashSet<i64> = gone.iter().map(Snapshot::snapshot_id).collect();
    let stay =
        base.snapshots().map(AsRef::as_ref).filter(|snapshot: &&Snapshot| !ids.contains(&snapshot.snapshot_id()));
    let objects = unreferenced(tables, base, &gone, (base, stay), deadline).await?;
    let (snapshots, found) = (gone.len(), objects.len());
    tracing::info!(table = %table.ident, snapshots, objects = found, "an expiry that was only asked about");
    for snapshot in ids.iter().take(NAMED_AT_MOST) {
        tracing::info!(table = %table.ident, snapshot, "would expire");
    }
    for location in objects.iter().take(NAMED_AT_MOST) {
        tracing::info!(table = %table.ident, %location, "would be removed");
    }
    Ok(snapshots as u64)
}

/// The snapshots that do not stay.
fn expired(base: &TableMetadata, older_than_ms: Option<i64>, retain_last: Option<u64>) -> Result<Vec<Snapshot>> {
    let kept = retained(base, older_than_ms, retain_last)?;
    let gone = base.snapshots().filter(|snapshot| !kept.contains(&snapshot.snapshot_id()));
    Ok(gone.map(|snapshot| snapshot.as_ref().clone()).collect())
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
    let (older_than_ms, retain_last) = match planted::has(Bug::ExpiredYoung) {
        true => (Some(version::now_ms()), Some(1)),
        false => (older_than_ms, retain_last),
    };
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
///
/// # Errors
/// What could not be read; `Deadline`, with how many are gone.
pub(super) async fn remove_unreferenced(
    tables: &Tables,
    base: &TableMetadata,
    current: &TableMetadata,
    gone: &[Snapshot],
    deadline: Instant,
) -> Result<()> {
    let stay = current.snapshots().map(AsRef::as_ref);
    let orphans = unreferenced(tables, base, gone, (current, stay), deadline).await?;
    let removed = tables.storage.discard_until(&orphans, deadline).await;
    match Instant::now() < deadline || removed == orphans.len() {
        true => Ok(()),
        false => Err(Error::deadline(format!("{removed} of {} are gone, and there was no more time", orphans.len()))),
    }
}

/// What the snapshots `gone` of `base` refer to, and those that `stay` in a version do not.
///
/// # Errors
/// What could not be read; `Deadline`.
async fn unreferenced<'a>(
    tables: &Tables,
    base: &TableMetadata,
    gone: &[Snapshot],
    (version, stay): (&TableMetadata, impl Iterator<Item = &'a Snapshot>),
    deadline: Instant,
) -> Result<Vec<String>> {
    let find = async {
        let kept = reachable(&tables.cache, version, stay).await?;
        let lost = reachable(&tables.cache, base, gone.iter()).await?;
        Ok((kept, lost))
    };
    let (kept, lost) = tokio::time::timeout_at(deadline.into(), find)
        .await
        .unwrap_or_else(|_| Err(Error::deadline("which files these are was not found out in time")))?;
    // What lies elsewhere is not the table's own.
    let own = format!("{}/", base.location());
    let is_kept = |location: &String| kept.contains(location) && !planted::has(Bug::ExpiredTooMuch);
    Ok(lost.into_iter().filter(|location| !is_kept(location) && location.starts_with(&own)).collect())
}

/// The manifest lists, manifests and files of snapshots.
pub(super) async fn reachable<'a>(
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
