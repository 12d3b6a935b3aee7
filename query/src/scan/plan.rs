//! Which files of a version are to be read, and what is deleted from them.
//!
//! The manifests of a snapshot are loaded once, and looked at as they are kept. What they say becomes a [`Planned`]: live data files with
//! their partition values and statistics, each with the deletes that apply to it by the rules of the format:
//! - a deletion vector applies to the one file that it names; there it takes the place of position deletes;
//! - position deletes apply to files of the same partition that are not newer (data sequence number at most theirs);
//! - equality deletes apply to files that are older (less than theirs), of the same partition, or anywhere if they belong
//!   to an unpartitioned spec.
//!
//! Manifests and files in which no row can match are left out ([`super::prune`]). What cannot be read correctly is refused
//! here, by name.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};
use iceberg::spec::{
    DataContentType, DataFile, DataFileFormat, ManifestContentType, ManifestEntry, ManifestEntryRef, ManifestFile,
    Snapshot, Struct,
};
use serde::{Deserialize, Serialize};

use super::prune::Pruning;
use crate::error::{Error, Result};
use crate::storage::cache::MetadataCache;
use crate::storage::packed::Packed;
use crate::table::Table;
use crate::table::deletes::{DeletePlace, Named, names};
use crate::table::version::has_live_files;

/// Manifests read at a time.
const MANIFESTS_IN_FLIGHT: usize = 16;

/// The files of a version in which rows may match.
#[derive(Debug, Default)]
pub struct Planned {
    pub files: Vec<PlannedFile>,
    /// Manifests and data files that were left out because no row in them can match.
    pub pruned: Pruned,
}

/// How much was left out, and how the rest was come by.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Pruned {
    pub manifests: usize,
    pub files: usize,
    /// Of the manifests that were looked at, how many were in the cache, and how many had to be read.
    pub manifests_cached: usize,
    pub manifests_read: usize,
}

/// A data file and the deletes that apply to it.
#[derive(Debug, Clone)]
pub struct PlannedFile {
    pub entry: ManifestEntryRef,
    /// The partition spec that the file was written under.
    pub spec_id: i32,
    pub deletes: Vec<Arc<DeleteFile>>,
}

/// A file, or a part of one, that says which rows are deleted.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeleteFile {
    pub location: String,
    pub size_bytes: u64,
    pub rows: u64,
    pub kind: DeleteKind,
    /// Whether it names rows of one data file and of no other.
    pub of_one_file: bool,
}

impl DeleteFile {
    /// Which entry of a manifest it is.
    pub fn place(&self) -> DeletePlace {
        let offset = match self.kind {
            DeleteKind::Vector { offset, .. } => offset,
            _ => 0,
        };
        (self.location.clone(), offset)
    }
}

/// How a delete file names rows.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DeleteKind {
    /// By file and position.
    Positions,
    /// By the values of the columns with these ids.
    Equality(Vec<i32>),
    /// Positions in one file, as a bitmap at a place in a Puffin file.
    Vector { offset: u64, bytes: u64 },
}

impl PlannedFile {
    pub fn data_file(&self) -> &DataFile {
        self.entry.data_file()
    }

    /// How many rows are left, if that is certain without reading deletes.
    pub fn live_rows(&self) -> Option<u64> {
        let rows = self.data_file().record_count();
        match self.deletes.as_slice() {
            [] => Some(rows),
            [delete] if matches!(delete.kind, DeleteKind::Vector { .. }) => rows.checked_sub(delete.rows),
            _ => None,
        }
    }
}

/// Plans reading `snapshot`.
///
/// # Errors
/// `NotSupported`, naming what cannot be read; those of reading manifests.
pub async fn files(
    cache: &MetadataCache,
    table: &Table,
    snapshot: Option<&Snapshot>,
    pruning: Option<&Pruning>,
) -> Result<Planned> {
    let Some(snapshot) = snapshot else { return Ok(Planned::default()) };
    let refused =
        |what: &dyn fmt::Display| Error::not_supported(format!("table {} cannot be read: {what}", table.ident));
    if snapshot.encryption_key_id().is_some() {
        return Err(refused(&"it is encrypted"));
    }
    let list = cache.manifest_list(&table.metadata, snapshot).await?;
    let live: Vec<&ManifestFile> = list.entries().iter().filter(|manifest| has_live_files(manifest)).collect();
    if live.iter().any(|manifest| manifest.key_metadata.is_some()) {
        return Err(refused(&"it is encrypted"));
    }
    let mut pruned = Pruned::default();
    let matching = match pruning {
        Some(pruning) => {
            let keep = pruning.manifests(&table.metadata, &live);
            let kept: Vec<_> = live.iter().zip(keep).filter(|(_, keep)| *keep).map(|(manifest, _)| *manifest).collect();
            pruned.manifests = live.len() - kept.len();
            kept
        }
        None => live,
    };
    let mut loads = Vec::with_capacity(matching.len());
    for manifest in &matching {
        match cache.has_manifest(manifest) {
            true => pruned.manifests_cached += 1,
            false => pruned.manifests_read += 1,
        }
        loads.push(cache.packed(manifest));
    }
    let loaded: Vec<Arc<Packed>> = futures::stream::iter(loads)
        .buffered(MANIFESTS_IN_FLIGHT)
        .try_collect()
        .await
        .map_err(|e: Error| e.while_doing(format_args!("planning table {}", table.ident)))?;

    let mut deletes = DeleteIndex::default();
    let mut data: Vec<(&Packed, usize, i32)> = Vec::new();
    for (manifest, entries) in matching.into_iter().zip(&loaded) {
        let (entries, spec_id): (&Packed, i32) = (entries, manifest.partition_spec_id);
        for at in (0..entries.len()).filter(|at| entries.is_alive(*at)) {
            if entries.is_encrypted(at) {
                return Err(refused(&"it is encrypted"));
            }
            match (manifest.content, entries.is_of_data(at)) {
                (ManifestContentType::Data, true) => data.push((entries, at, spec_id)),
                (ManifestContentType::Deletes, true) | (ManifestContentType::Data, false) => {
                    let path = &manifest.manifest_path;
                    return Err(Error::corrupt(format!("{path} names files of another kind than it is said to")));
                }
                (ManifestContentType::Deletes, false) => {
                    let anywhere = table.metadata.partition_spec_by_id(spec_id).is_some_and(|s| s.is_unpartitioned());
                    deletes.add(&entries.entry(at)?, spec_id, anywhere).map_err(|e| match e {
                        Unreadable::Refused(what) => refused(&what),
                        Unreadable::Corrupt(what) => Error::corrupt(format!("{}: {what}", manifest.manifest_path)),
                    })?;
                }
            }
        }
    }
    if let Some(pruning) = pruning {
        let keep = pruning.files(&table.metadata, &data);
        let before = data.len();
        let mut keep = keep.into_iter();
        data.retain(|_| keep.next().unwrap_or(true));
        pruned.files = before - data.len();
    }
    let mut files = Vec::with_capacity(data.len());
    for (entries, at, spec_id) in data {
        let entry = Arc::new(entries.entry(at)?);
        if entry.file_format() != DataFileFormat::Parquet {
            return Err(refused(&format_args!("{} is not a Parquet file", entry.file_path())));
        }
        let deletes = deletes.of(&entry, spec_id);
        files.push(PlannedFile { entry, spec_id, deletes });
    }
    Ok(Planned { files, pruned })
}

/// Why a delete file cannot be applied.
enum Unreadable {
    Refused(String),
    Corrupt(String),
}

/// A delete file with its data sequence number.
type Sequenced = (i64, Arc<DeleteFile>);

/// Deletes, by what they may apply to.
#[derive(Default)]
struct DeleteIndex {
    /// Deletion vectors, by the data file they name.
    vectors: HashMap<String, Sequenced>,
    /// Position deletes that name one data file.
    positions_of_file: HashMap<String, Vec<Sequenced>>,
    /// Position deletes by spec and partition.
    positions: HashMap<(i32, Struct), Vec<Positions>>,
    /// Equality deletes by spec and partition ...
    equality: HashMap<(i32, Struct), Vec<Sequenced>>,
    /// ... and those for all of the table.
    equality_anywhere: Vec<Sequenced>,
}

struct Positions {
    sequence_number: i64,
    /// Which data files, as far as that is known.
    named: Named,
    file: Arc<DeleteFile>,
}

impl DeleteIndex {
    fn add(&mut self, entry: &ManifestEntry, spec_id: i32, anywhere: bool) -> Result<(), Unreadable> {
        let file = entry.data_file();
        let location = file.file_path();
        let sequence_number = entry
            .sequence_number()
            .ok_or_else(|| Unreadable::Corrupt(format!("the delete file {location} has no sequence number")))?;
        let partition = || (spec_id, file.partition().clone());
        let described = |kind| {
            Arc::new(DeleteFile {
                location: location.to_owned(),
                size_bytes: file.file_size_in_bytes(),
                rows: file.record_count(),
                kind,
                of_one_file: file.referenced_data_file().is_some(),
            })
        };
        match (file.content_type(), file.file_format()) {
            (DataContentType::PositionDeletes, DataFileFormat::Puffin) => {
                let place = file.content_offset().zip(file.content_size_in_bytes());
                let place = place.and_then(|(at, bytes)| Some((u64::try_from(at).ok()?, u64::try_from(bytes).ok()?)));
                let (Some((offset, bytes)), Some(of)) = (place, file.referenced_data_file()) else {
                    let what = format!("the deletion vector in {location} does not say where it is and of which file");
                    return Err(Unreadable::Corrupt(what));
                };
                let vector = (sequence_number, described(DeleteKind::Vector { offset, bytes }));
                if self.vectors.insert(of.clone(), vector).is_some() {
                    return Err(Unreadable::Corrupt(format!("{of} has two deletion vectors")));
                }
            }
            (DataContentType::PositionDeletes, DataFileFormat::Parquet) => {
                let described = described(DeleteKind::Positions);
                match names(file) {
                    Named::One(of) => self.positions_of_file.entry(of).or_default().push((sequence_number, described)),
                    named => {
                        let positions = Positions { sequence_number, named, file: described };
                        self.positions.entry(partition()).or_default().push(positions);
                    }
                }
            }
            (DataContentType::EqualityDeletes, DataFileFormat::Parquet) => {
                let ids = file.equality_ids().filter(|ids| !ids.is_empty()).ok_or_else(|| {
                    Unreadable::Corrupt(format!("the equality deletes in {location} do not say of which columns"))
                })?;
                let equality = (sequence_number, described(DeleteKind::Equality(ids)));
                match anywhere {
                    true => self.equality_anywhere.push(equality),
                    false => self.equality.entry(partition()).or_default().push(equality),
                }
            }
            (_, format) => {
                return Err(Unreadable::Refused(format!("the deletes in {location} are a file of format {format}")));
            }
        }
        Ok(())
    }

    /// What applies to a data file.
    fn of(&self, entry: &ManifestEntryRef, spec_id: i32) -> Vec<Arc<DeleteFile>> {
        // Without one, in format version 1, it is older than every delete.
        let sequence_number = entry.sequence_number().unwrap_or(0);
        let path = entry.file_path();
        let mut found = Vec::new();
        if self.vectors.is_empty()
            && self.positions_of_file.is_empty()
            && self.positions.is_empty()
            && self.equality.is_empty()
            && self.equality_anywhere.is_empty()
        {
            return found;
        }
        let partition = (spec_id, entry.data_file().partition().clone());
        match self.vectors.get(path) {
            Some((of, vector)) if sequence_number <= *of => found.push(vector.clone()),
            _ => {
                let of_file = self.positions_of_file.get(path).into_iter().flatten();
                found.extend(of_file.filter(|(of, _)| sequence_number <= *of).map(|(_, file)| file.clone()));
                let of_partition = self.positions.get(&partition).into_iter().flatten();
                let applies = |positions: &&Positions| {
                    sequence_number <= positions.sequence_number && positions.named.may_be(path)
                };
                found.extend(of_partition.filter(applies).map(|positions| positions.file.clone()));
            }
        }
        let equality = self.equality.get(&partition).into_iter().flatten().chain(&self.equality_anywhere);
        found.extend(equality.filter(|(of, _)| sequence_number < *of).map(|(_, file)| file.clone()));
        found
    }
}

#[cfg(test)]
mod tests {
    use iceberg::spec::{DataFileBuilder, ManifestStatus};

    use super::*;

    fn entry(content: DataContentType, path: &str, sequence_number: i64) -> ManifestEntryRef {
        let mut file = DataFileBuilder::default();
        file.content(content)
            .file_path(path.to_owned())
            .file_format(DataFileFormat::Parquet)
            .partition(Struct::empty())
            .record_count(1)
            .file_size_in_bytes(1);
        if content == DataContentType::EqualityDeletes {
            file.equality_ids(Some(vec![1]));
        }
        let entry = ManifestEntry::builder().status(ManifestStatus::Added).sequence_number(sequence_number);
        Arc::new(entry.data_file(file.build().unwrap()).build())
    }

    #[test]
    fn sequence_numbers_decide_what_a_delete_applies_to() {
        let mut index = DeleteIndex::default();
        for (content, spec_id, anywhere) in [
            (DataContentType::PositionDeletes, 0, true),
            (DataContentType::EqualityDeletes, 0, true),
            (DataContentType::EqualityDeletes, 1, false),
        ] {
            let path = format!("{content:?}-{spec_id}");
            assert!(index.add(&entry(content, &path, 5), spec_id, anywhere).is_ok());
        }
        let of = |spec_id, sequence_number| -> Vec<String> {
            let deletes = index.of(&entry(DataContentType::Data, "a", sequence_number), spec_id);
            deletes.iter().map(|delete| delete.location.clone()).collect()
        };
        assert_eq!(of(0, 4), ["PositionDeletes-0", "EqualityDeletes-0"]);
        assert_eq!(of(0, 5), ["PositionDeletes-0"], "rows of the same commit are not deleted by value");
        assert!(of(0, 6).is_empty(), "newer files are not touched");
        assert_eq!(of(1, 4), ["EqualityDeletes-1", "EqualityDeletes-0"], "positions are of their own partition");
    }
}
