//! What is done to a table's history and files, and not to its rows: references, expiry, manifests, and tables that others have
//! written.
//!
//! Objects are removed only after the version that no longer refers to them is certainly current, and only if neither that
//! version nor one that can be gone back to refers to them. After an unknown outcome nothing is removed: the sweep for
//! orphans finds it later.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

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
/// For so long after another took its place no snapshot expires that was current, unless the table says otherwise ([`HELD`]): a ticket
/// that was made at that moment is good for 10 minutes, the query that it stands for then runs for 10 at most by default, and clocks
/// differ.
pub const HELD_FOR: Duration = Duration::from_secs(21 * 60);
/// The table property that says for how long that is, in milliseconds. Below [`HELD_FOR`] statements may lose what they read.
pub const HELD: &str = "lake.expire-snapshots.held-ms";
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
        make_current(base, builder, snapshot)
    })
}

/// Makes the latest snapshot the current one that was made before that moment, of those that the current one comes from.
pub fn rollback_to_timestamp(before_ms: i64) -> Edit {
    Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
        let line = ancestors(base, base.current_snapshot_id());
        let earlier = line.filter(|snapshot| snapshot.timestamp_ms() < before_ms);
        match earlier.max_by_key(|snapshot| snapshot.timestamp_ms()) {
            Some(snapshot) => make_current(base, builder, snapshot.snapshot_id()),
            None => Err(Error::not_found(
                "the current snapshot comes from none that was made before that moment, as far as the table's history goes back",
            )),
        }
    })
}

pub(super) fn make_current(
    base: &TableMetadata,
    builder: TableMetadataBuilder,
    snapshot: i64,
) -> Result<TableMetadataBuilder> {
    if base.current_snapshot_id() == Some(snapshot) {
        return Ok(builder);
    }
    let retention = reference(base, MAIN_BRANCH)?.map_or_else(branch_retention, |main| main.retention);
    Ok(builder.set_ref(MAIN_BRANCH, SnapshotReference::new(snapshot, retention))?)
}

pub(super) fn branch_retention() -> SnapshotRetention {
    SnapshotRetention::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None, max_ref_age_ms: None }
}

/// Names a snapshot, the current one unless another is given, for as long as `retention` says, which is a branch's or a tag's.
pub fn create_ref(name: String, snapshot: Option<i64>, retention: SnapshotRetention) -> Edit {
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
        Ok(builder.set_ref(&name, SnapshotReference::new(snapshot, retention.clone()))?)
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

/// Removes references that are past, and snapshots from the history that are old, that no reference needs and that nobody can be
/// reading ([`held`]), and then the objects that only they refer to. Returns how many snapshots.
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
            let (gone, builder) = retained(base, older_than_ms, retain_last)?.remove_others(base, builder);
            tables.will_answer(gone.len() as u64);
            *taken_out.lock().unwrap_or_else(PoisonError::into_inner) = (gone, Some(base.clone()));
            Ok(builder)
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
    Ok(retained(base, older_than_ms, retain_last)?.others(base))
}

/// How long snapshots of a table are kept, in milliseconds.
pub(super) fn snapshot_age_ms(base: &TableMetadata) -> i64 {
    property(base, "history.expire.max-snapshot-age-ms").unwrap_or(SNAPSHOT_AGE_MS)
}

/// What stays of a table's history.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Retained {
    snapshots: HashSet<i64>,
    /// References that do not.
    past: Vec<String>,
}

impl Retained {
    /// The snapshots that do not stay.
    fn others(&self, base: &TableMetadata) -> Vec<Snapshot> {
        let others = base.snapshots().filter(|snapshot| !self.snapshots.contains(&snapshot.snapshot_id()));
        others.map(|snapshot| snapshot.as_ref().clone()).collect()
    }

    /// Removes what does not stay. Gives the snapshots.
    pub fn remove_others(
        &self,
        base: &TableMetadata,
        builder: TableMetadataBuilder,
    ) -> (Vec<Snapshot>, TableMetadataBuilder) {
        let gone = self.others(base);
        let ids: Vec<i64> = gone.iter().map(Snapshot::snapshot_id).collect();
        let builder = self.past.iter().fold(builder, |builder, name| builder.remove_ref(name));
        (gone, builder.remove_snapshots(&ids))
    }
}

/// What stays, by the rules of Iceberg's specification (Snapshot Retention Policy), and what may be in use.
pub(super) fn retained(base: &TableMetadata, older_than_ms: Option<i64>, retain_last: Option<u64>) -> Result<Retained> {
    let young = planted::has(Bug::ExpiredYoung);
    let (older_than_ms, retain_last) = match young {
        true => (Some(version::now_ms()), Some(1)),
        false => (older_than_ms, retain_last),
    };
    let now = version::now_ms();
    let default_cutoff = older_than_ms.unwrap_or(now.saturating_sub(snapshot_age_ms(base)));
    let least = property(base, "history.expire.min-snapshots-to-keep").and_then(|n| u64::try_from(n).ok());
    let default_least = retain_last.or(least).unwrap_or(1).max(1);
    let default_ref_age = property(base, "history.expire.max-ref-age-ms");
    let mut retained = Retained::default();
    let mut referred = HashSet::new();
    for (name, reference) in references(base)? {
        let (SnapshotRetention::Tag { max_ref_age_ms } | SnapshotRetention::Branch { max_ref_age_ms, .. }) =
            &reference.retention;
        let made = base.snapshot_by_id(reference.snapshot_id).map(|snapshot| snapshot.timestamp_ms());
        let is_past = match (made, max_ref_age_ms.or(default_ref_age)) {
            (Some(made), Some(most)) => now.saturating_sub(made) > most,
            _ => false,
        };
        if is_past && name != MAIN_BRANCH {
            retained.past.push(name);
            continue;
        }
        match &reference.retention {
            SnapshotRetention::Tag { .. } => {
                referred.insert(reference.snapshot_id);
                retained.snapshots.insert(reference.snapshot_id);
            }
            SnapshotRetention::Branch { min_snapshots_to_keep, max_snapshot_age_ms, .. } => {
                let least = min_snapshots_to_keep.and_then(|n| u64::try_from(n).ok()).unwrap_or(default_least).max(1);
                let cutoff = max_snapshot_age_ms.map_or(default_cutoff, |age| now.saturating_sub(age));
                for (i, snapshot) in ancestors(base, Some(reference.snapshot_id)).enumerate() {
                    referred.insert(snapshot.snapshot_id());
                    if (i as u64) < least || snapshot.timestamp_ms() >= cutoff {
                        retained.snapshots.insert(snapshot.snapshot_id());
                    }
                }
            }
        }
    }
    // What no reference leads to goes once it is old: a rollback may be taken back for a while.
    let unreferred = base.snapshots().filter(|snapshot| !referred.contains(&snapshot.snapshot_id()));
    let recent = unreferred.filter(|snapshot| snapshot.timestamp_ms() >= default_cutoff);
    retained.snapshots.extend(recent.map(|snapshot| snapshot.snapshot_id()));
    if !young {
        retained.snapshots.extend(held(base, now));
    }
    Ok(retained)
}

/// The snapshots that statements and tickets may be reading at that moment which took them for the current one: those that are it, or
/// were it until at most [`HELD_FOR`] ago. What is read by FOR VERSION AS OF is not told by this, nor are the heads of other branches.
pub(super) fn held(base: &TableMetadata, now_ms: i64) -> HashSet<i64> {
    let held_for_ms = property(base, HELD).unwrap_or(HELD_FOR.as_millis() as i64);
    let since_ms = now_ms.saturating_sub(held_for_ms);
    let mut held: HashSet<i64> = base.current_snapshot_id().into_iter().collect();
    if held_for_ms <= 0 {
        return held;
    }
    // Until the one that follows it was made ...
    for snapshot in base.snapshots().filter(|snapshot| snapshot.timestamp_ms() >= since_ms) {
        held.insert(snapshot.snapshot_id());
        held.extend(snapshot.parent_snapshot_id());
    }
    // ... or another took its place, as by a rollback ...
    let log = base.history();
    let replaced = log.windows(2).filter(|pair| pair[1].timestamp_ms >= since_ms);
    held.extend(replaced.map(|pair| pair[0].snapshot_id));
    // ... or none did.
    if base.current_snapshot_id().is_none() && base.last_updated_ms() >= since_ms {
        held.extend(log.last().map(|entry| entry.snapshot_id));
    }
    held
}

fn property(base: &TableMetadata, name: &str) -> Option<i64> {
    base.properties().get(name).and_then(|text| text.parse().ok())
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
/// for a file that is no table metadata; `Invalid` for what lake cannot use, or names what is where it may not be.
pub async fn register_table(tables: &Arc<Tables>, ident: &TableIdent, file: &str, deadline: Instant) -> Result<()> {
    let doing = format!("registering table {ident}");
    let metadata = tables.cache.table(file).await.map_err(|e| e.while_doing(&doing))?;
    let place = tables.check_place("the table's location", metadata.location(), deadline).await;
    place.map_err(|e| e.while_doing(&doing))?;
    tables.check_incoming(&metadata, None, deadline).await.map_err(|e| e.while_doing(&doing))?;
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const MINUTE: i64 = 60_000;
    const DAY: i64 = 24 * 60 * MINUTE;

    /// A table whose snapshots 1, 2, ... were made so long ago, in milliseconds, each from the one before it, the last being current.
    fn table(ages: &[i64], change: impl Fn(&mut Value)) -> TableMetadata {
        let at = |age: i64| version::now_ms() - age;
        let id = |i: usize| i as i64 + 1;
        let snapshots: Vec<Value> = ages.iter().enumerate().map(|(i, age)| {
            let mut snapshot = json!({"snapshot-id": id(i), "sequence-number": id(i), "timestamp-ms": at(*age),
                "summary": {"operation": "append"}, "manifest-list": format!("file:///w/t/metadata/snap-{i}.avro"), "schema-id": 0});
            if i > 0 {
                snapshot["parent-snapshot-id"] = json!(id(i - 1));
            }
            snapshot
        }).collect();
        let log: Vec<Value> =
            ages.iter().enumerate().map(|(i, age)| json!({"snapshot-id": id(i), "timestamp-ms": at(*age)})).collect();
        let current = ages.len() as i64;
        let mut metadata = json!({"format-version": 2, "table-uuid": uuid::Uuid::from_u128(7), "location": "file:///w/t",
            "last-sequence-number": current, "last-updated-ms": at(0), "last-column-id": 1, "current-schema-id": 0,
            "schemas": [{"type": "struct", "schema-id": 0, "fields":
                [{"id": 1, "name": "x", "required": false, "type": "long"}]}],
            "default-spec-id": 0, "partition-specs": [{"spec-id": 0, "fields": []}], "last-partition-id": 999,
            "default-sort-order-id": 0, "sort-orders": [{"order-id": 0, "fields": []}], "properties": {},
            "current-snapshot-id": current, "snapshots": snapshots, "snapshot-log": log, "metadata-log": [],
            "refs": {"main": {"snapshot-id": current, "type": "branch"}}});
        change(&mut metadata);
        serde_json::from_value(metadata).unwrap()
    }

    fn kept(table: &TableMetadata, older_than_ms: Option<i64>) -> (Vec<i64>, Vec<String>) {
        let Retained { snapshots, mut past } = retained(table, older_than_ms, None).unwrap();
        let mut snapshots: Vec<i64> = snapshots.into_iter().collect();
        snapshots.sort_unstable();
        past.sort_unstable();
        (snapshots, past)
    }

    #[test]
    fn what_was_current_a_while_ago_is_held() {
        let now = Some(version::now_ms());
        // The second was current until 5 minutes ago, although it is old, and the first until the second was there.
        let ages = [9 * DAY, 8 * DAY, 5 * MINUTE];
        assert_eq!(kept(&table(&ages, |_| {}), now).0, [2, 3]);
        assert_eq!(kept(&table(&ages, |_| {}), None).0, [2, 3]);
        assert_eq!(kept(&table(&[9 * DAY, 8 * DAY, 25 * MINUTE], |_| {}), now).0, [3]);
        let held_for = |ms: &'static str| move |m: &mut Value| m["properties"] = json!({HELD: ms});
        assert_eq!(kept(&table(&ages, held_for("60000")), now).0, [3]);
        assert_eq!(kept(&table(&ages, held_for("0")), now).0, [3]);
        assert_eq!(kept(&table(&[9 * DAY, 2 * DAY, DAY], held_for("604800000")), now).0, [1, 2, 3]);
        // After a rollback from the third, 5 minutes ago.
        let rolled_back = table(&[9 * DAY, 8 * DAY, 7 * DAY], |m| {
            let at = version::now_ms() - 5 * MINUTE;
            m["snapshot-log"].as_array_mut().unwrap().push(json!({"snapshot-id": 1, "timestamp-ms": at}));
            m["current-snapshot-id"] = json!(1);
            m["refs"]["main"]["snapshot-id"] = json!(1);
        });
        assert_eq!(kept(&rolled_back, now).0, [1, 3]);
        // The table was emptied without a snapshot, as CREATE OR REPLACE does.
        let emptied = table(&[9 * DAY, 8 * DAY], |m| {
            m["current-snapshot-id"] = json!(-1);
            m["refs"] = json!({});
        });
        assert_eq!(kept(&emptied, now).0, [2]);
    }

    #[test]
    fn references_are_kept_for_as_long_as_they_say() {
        let ages = [9 * DAY, 8 * DAY, 7 * DAY, DAY];
        let with = |refs: Value, properties: Value| {
            table(&ages, |m| {
                for (name, reference) in refs.as_object().unwrap() {
                    m["refs"][name] = reference.clone();
                }
                m["properties"] = properties.clone();
            })
        };
        let tag = |id: i64, most: Option<i64>| match most {
            None => json!({"snapshot-id": id, "type": "tag"}),
            Some(most) => json!({"snapshot-id": id, "type": "tag", "max-ref-age-ms": most}),
        };
        let refs = json!({"ever": tag(1, None), "past": tag(2, Some(7 * DAY)), "still": tag(3, Some(8 * DAY))});
        assert_eq!(kept(&with(refs.clone(), json!({})), None), (vec![1, 3, 4], vec!["past".to_owned()]));
        // The table says it for those that do not; the branch main stays in any case.
        let all = json!({"history.expire.max-ref-age-ms": "1000"});
        assert_eq!(kept(&with(refs, all), None), (vec![3, 4], vec!["ever".to_owned(), "past".to_owned()]));
        // What a branch says of its snapshots goes for them, also for younger ones than others keep.
        let branch = |id: i64, more: Value| {
            let mut reference = json!({"snapshot-id": id, "type": "branch"});
            reference.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            reference
        };
        let three = branch(3, json!({"min-snapshots-to-keep": 3}));
        assert_eq!(kept(&with(json!({"b": three}), json!({})), None).0, [1, 2, 3, 4]);
        let past = branch(3, json!({"min-snapshots-to-keep": 3, "max-ref-age-ms": 1000}));
        assert_eq!(kept(&with(json!({"b": past}), json!({})), None), (vec![4], vec!["b".to_owned()]));
        let short = table(&[3 * DAY, 2 * DAY, DAY], |m| m["refs"]["main"]["max-snapshot-age-ms"] = json!(DAY + MINUTE));
        assert_eq!(kept(&short, None).0, [3]);
    }

    #[test]
    fn a_rollback_to_a_time_finds_what_was_made_before_it() {
        let table = table(&[9 * DAY, 8 * DAY, 7 * DAY], |_| {});
        let back = |age: i64| {
            let builder = table.clone().into_builder(None);
            let built = rollback_to_timestamp(version::now_ms() - age)(&table, builder)?.build()?;
            Ok::<_, Error>(built.metadata.current_snapshot_id())
        };
        assert_eq!(back(8 * DAY - MINUTE).unwrap(), Some(2));
        assert_eq!(back(MINUTE).unwrap(), Some(3));
        assert_eq!(back(10 * DAY).unwrap_err().kind, Kind::NotFound);
    }
}
