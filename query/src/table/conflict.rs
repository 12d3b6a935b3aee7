//! Whether a change still holds on a newer version than the one its statement has read.
//!
//! As in Iceberg, what decides is what the statement read and what it removes, not that the pointer moved:
//! - A plain append reads nothing and removes nothing: it fits every version.
//! - A file that the change removes must still be there, whatever removed it, and no row of it may have been deleted since:
//!   else rows would come back, or be there twice. This is so under both kinds of isolation.
//! - Serialisable (the default): no file came or went in between that may hold rows which the statement would have read
//!   ([`Scope`]). Rewrites that change no row do not count. Under snapshot isolation this is left out.
//!
//! The snapshots between the version read and the current one are gone through one by one, by the manifests that each has
//! added. If the version read is no ancestor of the current one (a rollback, say), nothing can be said: a conflict.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use iceberg::spec::{
    DataContentType, DataFile, ManifestContentType, ManifestStatus, Operation, SnapshotRef, TableMetadata,
};

use super::version::{Change, Removed};
use crate::error::{Error, Result};
use crate::storage::cache::MetadataCache;

/// More snapshots than this in between are not gone through.
const MAX_SNAPSHOTS: usize = 10_000;

/// What a statement has read of the table that it changes.
#[derive(Debug, Clone)]
pub struct Reads {
    /// The snapshot; `None` if the table had none.
    pub snapshot: Option<i64>,
    pub scope: Scope,
    pub isolation: Isolation,
}

/// How much of what others did in between a statement puts up with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    Serializable,
    Snapshot,
}

impl Isolation {
    /// What the table asks for: `write.<kind>.isolation-level`.
    ///
    /// # Errors
    /// `Invalid` for a word that is neither `serializable` nor `snapshot`.
    pub fn of(metadata: &TableMetadata, kind: &str) -> Result<Self> {
        let name = format!("write.{kind}.isolation-level");
        match metadata.properties().get(&name).map(|level| level.to_ascii_lowercase()).as_deref() {
            None | Some("serializable") => Ok(Isolation::Serializable),
            Some("snapshot") => Ok(Isolation::Snapshot),
            Some(other) => Err(Error::invalid(format!(
                "the table property {name} is {other:?}, and must be serializable or snapshot"
            ))),
        }
    }
}

/// In which files rows may have been that the statement would have read.
#[derive(Clone)]
pub enum Scope {
    Nothing,
    Everything,
    /// Those for which this says yes.
    Files(Arc<dyn Fn(&DataFile) -> bool + Send + Sync>),
}

impl Scope {
    pub fn covers(&self, file: &DataFile) -> bool {
        match self {
            Scope::Nothing => false,
            Scope::Everything => true,
            Scope::Files(may_match) => may_match(file),
        }
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scope::Nothing => "Nothing",
            Scope::Everything => "Everything",
            Scope::Files(_) => "Files",
        })
    }
}

/// Checks that `change`, made by a statement that has read `reads`, holds on `base`.
///
/// # Errors
/// `Conflict`, saying what another writer did.
pub async fn validate(cache: &MetadataCache, base: &TableMetadata, change: &Change, reads: &Reads) -> Result<()> {
    if base.current_snapshot_id() == reads.snapshot {
        return Ok(());
    }
    let none = HashSet::new();
    let removed = match &change.removed {
        Removed::Files(paths) => paths.as_ref(),
        Removed::Nothing | Removed::Everything => &none,
    };
    let conflict = |what: String| Err(Error::conflict(format!("another writer has meanwhile {what}; run it again")));
    for snapshot in since(base, reads.snapshot)? {
        let id = snapshot.snapshot_id();
        let rewrite = snapshot.summary().operation == Operation::Replace;
        let in_scope =
            |file: &DataFile| !rewrite && reads.isolation == Isolation::Serializable && reads.scope.covers(file);
        let list = cache.manifest_list(base, &snapshot).await?;
        for file in list.entries().iter().filter(|file| file.added_snapshot_id == id) {
            let manifest = cache.manifest(file).await?;
            for entry in manifest.entries().iter().filter(|entry| entry.snapshot_id() == Some(id)) {
                let data_file = entry.data_file();
                let path = data_file.file_path();
                match (entry.status(), file.content) {
                    (ManifestStatus::Existing, _) => {}
                    (ManifestStatus::Added, ManifestContentType::Data) if in_scope(data_file) => {
                        return conflict(format!("added rows that the statement would have read (in {path})"));
                    }
                    (ManifestStatus::Deleted, ManifestContentType::Data) if removed.contains(path) => {
                        return conflict(format!(
                            "removed or rewritten a data file that the statement changes ({path})"
                        ));
                    }
                    (ManifestStatus::Deleted, ManifestContentType::Data) if in_scope(data_file) => {
                        return conflict(format!("deleted rows that the statement has read (in {path})"));
                    }
                    (ManifestStatus::Added, ManifestContentType::Deletes)
                        if deletes_from(data_file, removed) || (!rewrite && deletes_in_scope(reads)) =>
                    {
                        return conflict(format!("deleted rows that the statement has read (by {path})"));
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(())
}

/// Whether a delete file may delete rows of one of these data files.
fn deletes_from(delete_file: &DataFile, data_files: &HashSet<String>) -> bool {
    match (delete_file.content_type(), delete_file.referenced_data_file()) {
        (DataContentType::PositionDeletes, Some(path)) => data_files.contains(&path),
        // It may name any file of its partition.
        _ => !data_files.is_empty(),
    }
}

/// Bounds of a delete file say nothing of the deleted rows.
fn deletes_in_scope(reads: &Reads) -> bool {
    reads.isolation == Isolation::Serializable && !matches!(reads.scope, Scope::Nothing)
}

/// The snapshots of `base` that came after `read`, newest first.
fn since(base: &TableMetadata, read: Option<i64>) -> Result<Vec<SnapshotRef>> {
    let mut newer = Vec::new();
    let mut current = base.current_snapshot();
    while let Some(snapshot) = current {
        if Some(snapshot.snapshot_id()) == read {
            return Ok(newer);
        }
        if newer.len() >= MAX_SNAPSHOTS {
            break;
        }
        newer.push(snapshot.clone());
        current = match snapshot.parent_snapshot_id() {
            None => match read {
                None => return Ok(newer),
                Some(_) => break,
            },
            // Expired: what came before is not known.
            Some(parent) => base.snapshot_by_id(parent),
        };
    }
    if read.is_none() && newer.is_empty() {
        return Ok(newer);
    }
    Err(Error::conflict(
        "the version that the statement has read is no longer in the history of the table: it was rolled back, replaced or \
         expired meanwhile; run it again",
    ))
}
