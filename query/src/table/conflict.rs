//! Whether a change still holds on a newer version than the one its statement has read.
//!
//! As in Iceberg, what decides is what the statement read and what it removes, not that the pointer moved:
//! - A plain append reads nothing and removes nothing: it fits every version.
//! - A file that the change removes, or deletes rows of, must still be there, whatever removed it, and no row of it may have been
//!   deleted since: else rows would come back, or be there twice. This is so under both kinds of isolation.
//! - Of that, deleted rows matter nothing to a DELETE that names rows in delete files and looks at each row by itself: a row may
//!   be deleted twice. Only a deletion vector cannot be there twice for one file. To a transaction they do matter ([`super::staged`]).
//! - Serialisable (the default): no file came or went in between that may hold rows which the statement would have read
//!   ([`Scope`]). Rewrites that change no row do not count. Under snapshot isolation this is left out.
//!
//! The snapshots between the version read and the current one are gone through one by one, by the manifests that each has
//! added. If the version read is no ancestor of the current one (a rollback, say), nothing can be said: a conflict.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use iceberg::spec::{
    DataFile, DataFileFormat, FormatVersion, ManifestContentType, ManifestStatus, Operation, SnapshotRef, TableMetadata,
};

use super::deletes::{Named, names};
use super::version::{Change, Removed};
use crate::error::{Error, Result};
use crate::planted::{self, Bug};
use crate::storage::cache::MetadataCache;

/// More snapshots than this in between are not gone through.
const MAX_SNAPSHOTS: usize = 10_000;

/// What a statement has read of the table that it changes.
#[derive(Debug, Clone)]
pub struct Reads {
    /// The snapshot; `None` if the table had none.
    pub snapshot: Option<i64>,
    pub scope: Scope,
    /// The data files in the scope, as they were read. Needed where the scope is [`Scope::Files`].
    pub files: Arc<HashSet<String>>,
    pub isolation: Isolation,
    /// Rows that others delete make no difference: the statement deletes rows as well, each by what is in that row alone,
    /// and without rewriting files.
    pub only_deletes: bool,
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

/// Checks that `change`, the files that come and go if any do, made by a statement that has read `reads`, holds on `base`.
///
/// # Errors
/// `Conflict`, saying what another writer did.
pub async fn validate(
    cache: &MetadataCache,
    base: &TableMetadata,
    change: Option<&Change>,
    reads: &Reads,
) -> Result<()> {
    if base.current_snapshot_id() == reads.snapshot || planted::has(Bug::ReadsUnchecked) {
        return Ok(());
    }
    let none = HashSet::new();
    let removed = match change.map(|change| &change.removed) {
        Some(Removed::Files(paths)) => paths.as_ref(),
        None | Some(Removed::Nothing | Removed::Everything) => &none,
    };
    let touched = change.map_or(&none, |change| change.deletes.of.as_ref());
    let conflict = |what: String| Err(Error::conflict(format!("another writer has meanwhile {what}; run it again")));
    for snapshot in since(base, reads.snapshot)? {
        let id = snapshot.snapshot_id();
        let rewrite = snapshot.summary().operation == Operation::Replace;
        let serializable = !rewrite && reads.isolation == Isolation::Serializable;
        let in_scope = |file: &DataFile| serializable && reads.scope.covers(file);
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
                    (ManifestStatus::Deleted, ManifestContentType::Data)
                        if removed.contains(path) || touched.contains(path) =>
                    {
                        return conflict(format!(
                            "removed or rewritten a data file that the statement changes ({path})"
                        ));
                    }
                    (ManifestStatus::Deleted, ManifestContentType::Data)
                        if !reads.only_deletes && in_scope(data_file) =>
                    {
                        return conflict(format!("deleted rows that the statement has read (in {path})"));
                    }
                    (ManifestStatus::Added, ManifestContentType::Deletes) => {
                        let named = names(data_file);
                        let is_vector = data_file.file_format() == DataFileFormat::Puffin;
                        let of_any = |paths: &HashSet<String>| paths.iter().any(|path| named.may_be(path));
                        let in_the_way = match reads.only_deletes {
                            true => is_vector && of_any(touched),
                            false => {
                                of_any(removed) || of_any(touched) || (serializable && reads.may_have_read(&named))
                            }
                        };
                        if in_the_way {
                            return conflict(format!("deleted rows that the statement has read (by {path})"));
                        }
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(())
}

/// Checks that the rows which `change` deletes are named as `base` has it: files of position deletes are not written any more in format
/// version 3.
///
/// # Errors
/// `Conflict`: the table was upgraded meanwhile.
pub fn check_deletes(base: &TableMetadata, change: &Change) -> Result<()> {
    if change.deletes.added_tally.position_files == 0 || base.format_version() < FormatVersion::V3 {
        return Ok(());
    }
    Err(Error::conflict(
        "the table got format version 3 meanwhile, in which deleted rows are written otherwise; run it again",
    ))
}

impl Reads {
    /// Whether rows of data files may have been read that a delete file names.
    fn may_have_read(&self, named: &Named) -> bool {
        match self.scope {
            Scope::Nothing => false,
            Scope::Everything => true,
            // Rows of files that came later are looked at where those came.
            Scope::Files(_) => match named {
                Named::One(path) => self.files.contains(path),
                named => self.files.iter().any(|path| named.may_be(path)),
            },
        }
    }
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
