//! Snapshots that are picked out of the history: what one of them has added, or where a branch has got to, becomes current.

use std::sync::Arc;
use std::time::Instant;

use iceberg::spec::{
    ManifestContentType, ManifestStatus, Operation, Snapshot, SnapshotReference, TableMetadata, TableMetadataBuilder,
};

use super::commit::{self, Proposal};
use super::maintenance::{ancestors, branch_retention, make_current, reference};
use super::version::{self, Edit, Removed};
use super::writer::DataFiles;
use super::{Table, Tables};
use crate::error::{Error, Result};
use crate::storage::io::LakeIo;

/// Where the summary of a picked snapshot says where it comes from.
const SOURCE_SNAPSHOT: &str = "source-snapshot-id";
/// Under which id a snapshot was staged by a write-audit-publish workflow, and under which it was published.
const STAGED_ID: &str = "wap.id";
const PUBLISHED_ID: &str = "published-wap-id";

/// Adds what a snapshot has added, which is not among those that the current one comes from, once again. If the snapshot
/// directly follows the current one, it becomes the current one itself (a fast-forward); else it must be an append.
///
/// # Errors
/// `NotFound`; `Invalid` for a snapshot that is in the history already, was picked before, or is no append; `Conflict` if the table
/// was changed meanwhile so that a fast-forward is none any more.
pub async fn cherrypick_snapshot(tables: &Arc<Tables>, table: &Table, picked: i64, deadline: Instant) -> Result<()> {
    table.check_writable()?;
    let metadata = &table.metadata;
    let snapshot = check(metadata, picked)?;
    if snapshot.parent_snapshot_id() == metadata.current_snapshot_id() {
        let parent = metadata.current_snapshot_id();
        let edit: Edit = Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
            check(base, picked)?;
            if base.current_snapshot_id() != parent {
                return Err(Error::conflict("another writer has meanwhile committed to the table; run it again"));
            }
            make_current(base, builder, picked)
        });
        return tables.edit(table, edit, deadline).await;
    }
    if snapshot.summary().operation != Operation::Append {
        return Err(Error::invalid(format!(
            "snapshot {picked} cannot be picked: it does more than append, and does not follow the current one"
        )));
    }
    let mut files = DataFiles::new(tables.storage.clone(), tables.tasks.clone());
    let list = tables.cache.manifest_list(metadata, snapshot).await?;
    for manifest in list.entries().iter().filter(|manifest| manifest.added_snapshot_id == picked) {
        if manifest.content == ManifestContentType::Deletes {
            return Err(Error::invalid(format!("snapshot {picked} cannot be picked: it deletes rows")));
        }
        let loaded = tables.cache.manifest(manifest).await?;
        let added = loaded.entries().iter().filter(|entry| entry.status() == ManifestStatus::Added);
        for entry in added.filter(|entry| entry.snapshot_id() == Some(picked)) {
            if manifest.partition_spec_id != metadata.default_partition_spec_id() {
                return Err(Error::not_supported(format!(
                    "snapshot {picked} cannot be picked: the table is partitioned otherwise now"
                )));
            }
            files.rows += entry.record_count();
            files.files.push(entry.data_file().clone());
        }
    }
    let mut notes = vec![(SOURCE_SNAPSHOT.to_owned(), picked.to_string())];
    if let Some(id) = note(snapshot, STAGED_ID) {
        notes.push((PUBLISHED_ID.to_owned(), id.to_owned()));
    }
    let (tables, table) = (tables.clone(), table.clone());
    let owner = tables.clone();
    owner
        .owned(async move {
            let io = LakeIo::new(tables.storage.clone());
            let (operation, removed) = (Operation::Append, Removed::Nothing);
            let mut change = version::write_change(&io, &table.metadata, operation, &files.files, removed).await?;
            change.notes.extend(notes);
            change.notes.extend(tables.scope.notes());
            // Looked at again on the version that it is committed on: two may pick the same.
            let edit: Edit = Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
                check(base, picked)?;
                Ok(builder)
            });
            let proposal =
                Proposal { change: Some(change), edit: Some(edit), reads: None, schema_id: None, batch: None };
            commit::commit(&tables, &table, proposal, files, deadline).await.map(drop)
        })
        .await
}

/// The snapshot, if it may be picked: neither it nor a copy of it is in the history of the current one.
fn check(base: &TableMetadata, picked: i64) -> Result<&Snapshot> {
    let snapshot = base.snapshot_by_id(picked);
    let snapshot = snapshot.ok_or_else(|| Error::not_found(format!("the table has no snapshot {picked}")))?;
    let staged = note(snapshot, STAGED_ID);
    let number = picked.to_string();
    for ancestor in ancestors(base, base.current_snapshot_id()) {
        let refused = |why: String| Err(Error::invalid(format!("snapshot {picked} cannot be picked: {why}")));
        let id = ancestor.snapshot_id();
        if id == picked {
            return refused("the current snapshot comes from it already".into());
        }
        if note(ancestor, SOURCE_SNAPSHOT) == Some(&number) {
            return refused(format!("it was picked already, as snapshot {id}"));
        }
        if let Some(staged) = staged
            && (note(ancestor, PUBLISHED_ID) == Some(staged) || note(ancestor, STAGED_ID) == Some(staged))
        {
            return refused(format!("what was staged as {staged} was published already, as snapshot {id}"));
        }
    }
    Ok(snapshot)
}

fn note<'a>(snapshot: &'a Snapshot, name: &str) -> Option<&'a str> {
    snapshot.summary().additional_properties.get(name).map(String::as_str)
}

/// Moves a branch on to where another branch, or a tag, is. It must come from where the branch is now; a branch that is not there is
/// made.
pub fn fast_forward(branch: String, to: String) -> Edit {
    Arc::new(move |base: &TableMetadata, builder: TableMetadataBuilder| {
        let target =
            reference(base, &to)?.ok_or_else(|| Error::not_found(format!("the table has no reference {to}")))?;
        let target = target.snapshot_id;
        let retention = match reference(base, &branch)? {
            None => branch_retention(),
            Some(at) if !at.is_branch() => return Err(Error::invalid(format!("{branch} is no branch"))),
            Some(at) if at.snapshot_id == target => return Ok(builder),
            Some(at) if ancestors(base, Some(target)).any(|from| from.snapshot_id() == at.snapshot_id) => at.retention,
            Some(_) => {
                return Err(Error::invalid(format!(
                    "{branch} cannot be moved on to {to}: it has snapshots that {to} does not come from"
                )));
            }
        };
        Ok(builder.set_ref(&branch, SnapshotReference::new(target, retention))?)
    })
}
