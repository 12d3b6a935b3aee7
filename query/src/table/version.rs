//! The next version of a table: new manifests, a new manifest list, a new metadata.json. Pure additions; nothing is
//! current before the pointer is swapped ([`super::commit`]).
//!
//! The manifest with the new files is written once for a commit. List and metadata depend on the version they follow
//! and are written anew for each attempt; so are the manifests that name a removed file: it stays in them as deleted by
//! this snapshot, and what else they name as existing, with the sequence numbers it had. Snapshots are sorted by sequence number in the JSON (the crate's order is
//! random, and incremental readers need this one).
//!
//! A manifest of added files says neither which snapshot has added them nor its sequence number: both are inherited from the
//! list (Iceberg, "Sequence Number Inheritance"), so that another node can take it into a snapshot of its own
//! ([`super::handing`]).
//!
//! When a list has as many small manifests as [`Merging`] says they are merged into larger ones, so that many small
//! INSERTs do not make planning slower for ever. A manifest is merged with newer ones only if those are as large together:
//! each file is written anew a number of times that grows with the logarithm of how many there are, and few are at once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures::StreamExt;
use iceberg::spec::{
    DataContentType, DataFile, FormatVersion, MAIN_BRANCH, Manifest, ManifestContentType, ManifestEntry, ManifestFile,
    ManifestListWriter, ManifestWriter, ManifestWriterBuilder, MetadataLog, Operation, Snapshot, Struct, Summary,
    TableMetadata, TableMetadataBuilder,
};
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::storage::Storage;
use crate::storage::cache::MetadataCache;
use crate::storage::io::LakeIo;

/// As many small manifests are merged, unless the table says otherwise.
const MIN_MANIFESTS_TO_MERGE: usize = 100;
/// A manifest of at least this size is not small, and merging aims at it, unless the table says otherwise.
const MANIFEST_TARGET_BYTES: i64 = 8 << 20;
/// Manifests read at a time.
const MANIFESTS_IN_FLIGHT: usize = 16;

/// Objects of a version that is written and not yet current.
#[derive(Debug)]
pub struct NextVersion {
    pub metadata: Arc<TableMetadata>,
    pub location: String,
    pub metadata_bytes: usize,
    /// Everything written for this attempt: list, merged manifests, metadata.
    pub objects: Vec<String>,
    /// Metadata files that fell out of the metadata log.
    pub expired: Vec<MetadataLog>,
}

/// What a commit does to the files of a table, the same for all its attempts.
#[derive(Debug, Clone)]
pub struct Change {
    pub snapshot_id: i64,
    pub operation: Operation,
    /// The manifest that names the added files.
    pub added: Option<ManifestFile>,
    pub added_tally: Tally,
    /// Partitions with added files.
    pub added_partitions: HashSet<Struct>,
    /// Manifests of files that others add in this snapshot; the tally has them, the partitions do not.
    pub taken: Vec<ManifestFile>,
    pub removed: Removed,
    /// All small manifests are merged, however few they are.
    pub merge_manifests: bool,
    /// What else the summary says.
    pub notes: HashMap<String, String>,
}

/// The data files that a change removes.
#[derive(Debug, Clone, Default)]
pub enum Removed {
    #[default]
    Nothing,
    /// All that the version has which the change follows.
    Everything,
    /// These, by path. Each must still be there.
    Files(Arc<HashSet<String>>),
}

/// How many files, rows and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub files: u64,
    pub rows: u64,
    pub bytes: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.files += other.files;
        self.rows += other.rows;
        self.bytes += other.bytes;
    }
}

/// When small manifests are merged: Iceberg's `commit.manifest-merge.enabled`, `commit.manifest.min-count-to-merge` and
/// `commit.manifest.target-size-bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Merging {
    enabled: bool,
    min_count: usize,
    target_bytes: i64,
}

impl Merging {
    /// What the table asks for; what is no number or word is not counted.
    fn of(properties: &HashMap<String, String>) -> Self {
        let number = |name: &str| properties.get(name).and_then(|text| text.parse::<u32>().ok());
        Self {
            enabled: properties.get("commit.manifest-merge.enabled").is_none_or(|v| !v.eq_ignore_ascii_case("false")),
            min_count: number("commit.manifest.min-count-to-merge")
                .map_or(MIN_MANIFESTS_TO_MERGE, |n| n.max(2) as usize),
            target_bytes: number("commit.manifest.target-size-bytes").map_or(MANIFEST_TARGET_BYTES, i64::from),
        }
    }
}

impl Tally {
    fn add(&mut self, file: &DataFile) {
        self.files += 1;
        self.rows += file.record_count();
        self.bytes += file.file_size_in_bytes();
    }
}

/// A change of a table's metadata besides its snapshots. It runs again on every version that a commit tries to follow,
/// and fails where it does not fit.
pub type Edit = Arc<dyn Fn(&TableMetadata, TableMetadataBuilder) -> Result<TableMetadataBuilder> + Send + Sync>;

/// A random id that is not among the table's.
pub fn new_snapshot_id(metadata: Option<&TableMetadata>) -> i64 {
    loop {
        let (high, low) = Uuid::new_v4().as_u64_pair();
        let id = ((high ^ low) & i64::MAX as u64) as i64;
        if id > 0 && metadata.is_none_or(|metadata| metadata.snapshot_by_id(id).is_none()) {
            return id;
        }
    }
}

/// A change that adds `files`, whose manifest is written here, and removes `removed`, as a snapshot with a new id.
pub async fn write_change(
    io: &LakeIo,
    metadata: &TableMetadata,
    operation: Operation,
    files: &[DataFile],
    removed: Removed,
) -> Result<Change> {
    let snapshot_id = new_snapshot_id(Some(metadata));
    let mut change = Change {
        snapshot_id,
        operation,
        added: None,
        added_tally: Tally::default(),
        added_partitions: HashSet::new(),
        taken: Vec::new(),
        removed,
        merge_manifests: false,
        notes: HashMap::new(),
    };
    if files.is_empty() {
        return Ok(change);
    }
    let location = format!("{}/metadata/{}-m0.avro", metadata.location(), Uuid::now_v7());
    let spec = metadata.default_partition_spec().as_ref().clone();
    let mut writer =
        ManifestWriterBuilder::new(io.output(&location), None, metadata.current_schema().clone(), spec).build_v2_data();
    for file in files {
        change.added_tally.add(file);
        change.added_partitions.insert(file.partition().clone());
        // Less than 0: the sequence number is the one that the commit will get.
        writer.add_file(file.clone(), -1)?;
    }
    let written = writer.write_manifest_file().await?;
    change.added = Some(ManifestFile { added_snapshot_id: snapshot_id, ..written });
    Ok(change)
}

/// Writes the version that follows `base` (at `base_location`; `None` for a table that is being created): first the edit,
/// then the change. `None` if there is nothing to do.
///
/// # Errors
/// `Conflict` if a file to be removed is not there any more. What was written so far is removed.
pub async fn write_next(
    storage: &Arc<Storage>,
    cache: &MetadataCache,
    base: &TableMetadata,
    base_location: Option<&str>,
    edit: Option<&Edit>,
    change: Option<&Change>,
) -> Result<Option<NextVersion>> {
    let mut objects = Vec::new();
    let written = try_write_next(storage, cache, base, base_location, edit, change, &mut objects).await;
    match written {
        Ok(Some((metadata, location, metadata_bytes, expired))) => {
            Ok(Some(NextVersion { metadata, location, metadata_bytes, objects, expired }))
        }
        Ok(None) => Ok(None),
        Err(error) => {
            storage.discard(&objects).await;
            Err(error)
        }
    }
}

type Written = (Arc<TableMetadata>, String, usize, Vec<MetadataLog>);

async fn try_write_next(
    storage: &Arc<Storage>,
    cache: &MetadataCache,
    base: &TableMetadata,
    base_location: Option<&str>,
    edit: Option<&Edit>,
    change: Option<&Change>,
    objects: &mut Vec<String>,
) -> Result<Option<Written>> {
    let io = LakeIo::new(storage.clone());
    let mut builder = base.clone().into_builder(base_location.map(str::to_owned));
    let mut expired = Vec::new();
    let mut edited = None;
    if let Some(edit) = edit {
        let built = edit(base, builder)?.build()?;
        if change.is_none() && built.changes.is_empty() && base_location.is_some() {
            return Ok(None);
        }
        expired = built.expired_metadata_logs;
        builder = built.metadata.clone().into_builder(None);
        edited = Some(built.metadata);
    }
    if let Some(change) = change {
        let base = edited.as_ref().unwrap_or(base);
        let snapshot = write_snapshot(&io, cache, base, change, objects).await?;
        builder = builder.set_branch_snapshot(snapshot, MAIN_BRANCH)?;
    }
    let built = builder.build()?;
    expired.extend(built.expired_metadata_logs);
    let bytes = to_json(&built.metadata)?;
    let location = metadata_location(base.location(), base_location);
    objects.push(location.clone());
    let size = bytes.len();
    storage.write_new(&location, bytes.into()).await?;
    Ok(Some((Arc::new(built.metadata), location, size, expired)))
}

/// A name for the metadata of the version that follows the one at `previous`, for a table that lives at `table`.
pub fn metadata_location(table: &str, previous: Option<&str>) -> String {
    let version = previous.map_or(0, |location| version_of(location).saturating_add(1));
    format!("{table}/metadata/{version:05}-{}.metadata.json", Uuid::new_v4())
}

/// The number that a metadata file's name begins with.
fn version_of(location: &str) -> u64 {
    let name = location.rsplit('/').next().unwrap_or(location);
    let digits = name.trim_start_matches('v');
    digits.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

async fn write_snapshot(
    io: &LakeIo,
    cache: &MetadataCache,
    base: &TableMetadata,
    change: &Change,
    objects: &mut Vec<String>,
) -> Result<Snapshot> {
    let parent = base.current_snapshot();
    let sequence_number = base.next_sequence_number();
    let carried = match parent {
        Some(parent) => cache.manifest_list(base, parent).await?.entries().to_vec(),
        None => Vec::new(),
    };
    let mut gone = Gone::default();
    let carried = remove_files(io, cache, base, change, carried, &mut gone, objects).await?;
    let carried = merge_small(io, cache, base, change, carried, objects).await?;
    let location = format!("{}/metadata/snap-{}-{}.avro", base.location(), change.snapshot_id, Uuid::now_v7());
    objects.push(location.clone());
    let writer = io.output(&location).writer().await?;
    let parent_id = parent.map(|parent| parent.snapshot_id());
    let mut list = ManifestListWriter::v2(writer, change.snapshot_id, parent_id, sequence_number);
    list.add_manifests(change.added.iter().chain(&change.taken).cloned().chain(carried))?;
    list.close().await?;
    Ok(Snapshot::builder()
        .with_snapshot_id(change.snapshot_id)
        .with_parent_snapshot_id(parent_id)
        .with_sequence_number(sequence_number)
        .with_timestamp_ms(now_ms().max(base.last_updated_ms()))
        .with_manifest_list(location)
        .with_schema_id(base.current_schema_id())
        .with_summary(summary(parent.map(|parent| parent.summary()), change, &gone))
        .build())
}

/// What a snapshot has removed.
#[derive(Debug, Default)]
struct Gone {
    data: Tally,
    /// Delete files: how many, and their rows by kind.
    delete_files: u64,
    position_deletes: u64,
    equality_deletes: u64,
    delete_bytes: u64,
    partitions: HashSet<Struct>,
}

/// The manifests of `carried` without what the change removes. Those that name none of it stay as they are.
async fn remove_files(
    io: &LakeIo,
    cache: &MetadataCache,
    base: &TableMetadata,
    change: &Change,
    carried: Vec<ManifestFile>,
    gone: &mut Gone,
    objects: &mut Vec<String>,
) -> Result<Vec<ManifestFile>> {
    // A manifest whose files are all deleted has told of it in the snapshot that wrote it.
    let carried: Vec<_> = carried.into_iter().filter(has_live_files).collect();
    if let Removed::Nothing = change.removed {
        return Ok(carried);
    }
    let to_remove = |file: &DataFile| match &change.removed {
        Removed::Nothing => false,
        Removed::Everything => true,
        Removed::Files(paths) => file.content_type() == DataContentType::Data && paths.contains(file.file_path()),
    };
    let loads: Vec<_> = carried
        .into_iter()
        .map(|file| async move {
            let manifest = cache.manifest(&file).await?;
            Ok::<_, Error>((file, manifest))
        })
        .collect();
    let mut loads = futures::stream::iter(loads).buffered(MANIFESTS_IN_FLIGHT);
    let mut kept = Vec::new();
    while let Some(loaded) = loads.next().await {
        let (file, manifest) = loaded?;
        let alive = || manifest.entries().iter().filter(|entry| entry.is_alive());
        if !alive().any(|entry| to_remove(entry.data_file())) {
            kept.push(file);
            continue;
        }
        let location = format!("{}/metadata/{}-m2.avro", base.location(), Uuid::now_v7());
        objects.push(location.clone());
        let mut writer = rewriter(io, &location, change.snapshot_id, &manifest, file.content);
        for entry in alive() {
            let data_file = entry.data_file();
            let (added_by, sequence) = origin(&file, entry)?;
            match to_remove(data_file) {
                true => {
                    gone.add(data_file);
                    writer.add_delete_file(data_file.clone(), sequence, entry.file_sequence_number)?;
                }
                false => {
                    writer.add_existing_file(data_file.clone(), added_by, sequence, entry.file_sequence_number)?;
                }
            }
        }
        kept.push(writer.write_manifest_file().await?);
    }
    if let Removed::Files(paths) = &change.removed
        && gone.data.files != paths.len() as u64
    {
        return Err(Error::conflict(
            "another writer has meanwhile removed or rewritten data files that this statement changes; run it again",
        ));
    }
    Ok(kept)
}

impl Gone {
    fn add(&mut self, file: &DataFile) {
        self.partitions.insert(file.partition().clone());
        match file.content_type() {
            DataContentType::Data => self.data.add(file),
            DataContentType::PositionDeletes => {
                self.delete_files += 1;
                self.position_deletes += file.record_count();
                self.delete_bytes += file.file_size_in_bytes();
            }
            DataContentType::EqualityDeletes => {
                self.delete_files += 1;
                self.equality_deletes += file.record_count();
                self.delete_bytes += file.file_size_in_bytes();
            }
        }
    }
}

/// A writer for what `manifest` names, under the schema and the partition spec that it was written with.
fn rewriter(
    io: &LakeIo,
    location: &str,
    snapshot_id: i64,
    manifest: &Manifest,
    content: ManifestContentType,
) -> ManifestWriter {
    let metadata = manifest.metadata();
    let builder = ManifestWriterBuilder::new(
        io.output(location),
        Some(snapshot_id),
        metadata.schema().clone(),
        metadata.partition_spec().clone(),
    );
    match content {
        ManifestContentType::Data => builder.build_v2_data(),
        ManifestContentType::Deletes => builder.build_v2_deletes(),
    }
}

/// The snapshot and the sequence number with which an entry came to the table.
fn origin(file: &ManifestFile, entry: &ManifestEntry) -> Result<(i64, i64)> {
    match (entry.snapshot_id(), entry.sequence_number()) {
        (Some(added_by), Some(sequence)) => Ok((added_by, sequence)),
        _ => {
            let path = &file.manifest_path;
            Err(Error::corrupt(format!("{path}: an entry has neither snapshot id nor sequence number")))
        }
    }
}

/// Counts may be missing, in tables of format version 1. Then the manifest has to be opened.
pub fn has_live_files(manifest: &ManifestFile) -> bool {
    manifest.has_added_files() || manifest.has_existing_files()
}

/// Milliseconds since 1970, by this node's clock.
pub fn now_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn summary(parent: Option<&Summary>, change: &Change, gone: &Gone) -> Summary {
    let added = change.added_tally;
    let mut properties = change.notes.clone();
    let mut say = |name: &str, count: u64| {
        if count > 0 {
            properties.insert(name.to_owned(), count.to_string());
        }
    };
    say("added-data-files", added.files);
    say("added-records", added.rows);
    say("added-files-size", added.bytes);
    say("deleted-data-files", gone.data.files);
    say("deleted-records", gone.data.rows);
    say("removed-delete-files", gone.delete_files);
    say("removed-position-deletes", gone.position_deletes);
    say("removed-equality-deletes", gone.equality_deletes);
    say("removed-files-size", gone.data.bytes + gone.delete_bytes);
    // Which partitions others add to is in their manifests alone.
    if change.taken.is_empty() || change.added_partitions.iter().all(|partition| partition.fields().is_empty()) {
        let partitions = change.added_partitions.union(&gone.partitions).count();
        properties.insert("changed-partition-count".to_owned(), partitions.to_string());
    }
    let totals = [
        ("total-data-files", added.files, gone.data.files),
        ("total-records", added.rows, gone.data.rows),
        ("total-files-size", added.bytes, gone.data.bytes + gone.delete_bytes),
        ("total-delete-files", 0, gone.delete_files),
        ("total-position-deletes", 0, gone.position_deletes),
        ("total-equality-deletes", 0, gone.equality_deletes),
    ];
    for (name, added, removed) in totals {
        // A parent without totals leaves the table without them, rather than with wrong ones.
        let before = match parent {
            None => Some(0),
            Some(parent) => parent.additional_properties.get(name).and_then(|text| text.parse::<u64>().ok()),
        };
        if let Some(after) = before.and_then(|before| (before + added).checked_sub(removed)) {
            properties.insert(name.to_owned(), after.to_string());
        }
    }
    Summary { operation: change.operation.clone(), additional_properties: properties }
}

/// Replaces small manifests by larger ones, when there are enough of them or the change is about that.
async fn merge_small(
    io: &LakeIo,
    cache: &MetadataCache,
    base: &TableMetadata,
    change: &Change,
    manifests: Vec<ManifestFile>,
    objects: &mut Vec<String>,
) -> Result<Vec<ManifestFile>> {
    let merging = Merging::of(base.properties());
    let spec_id = base.default_partition_spec_id();
    let small = |manifest: &ManifestFile| {
        manifest.content == ManifestContentType::Data
            && manifest.partition_spec_id == spec_id
            && manifest.manifest_length < merging.target_bytes
            // Those of this very snapshot tell what it removes.
            && manifest.added_snapshot_id != change.snapshot_id
            && manifest.key_metadata.is_none()
    };
    let count = manifests.iter().filter(|manifest| small(manifest)).count();
    let due = change.merge_manifests || (merging.enabled && count >= merging.min_count);
    if base.format_version() != FormatVersion::V2 || count < 2 || !due {
        return Ok(manifests);
    }
    let (small, mut kept): (Vec<_>, Vec<_>) = manifests.into_iter().partition(small);
    for group in groups(small, merging.target_bytes, change.merge_manifests) {
        match <[ManifestFile; 1]>::try_from(group) {
            Ok([alone]) => kept.push(alone),
            Err(group) => kept.push(merge(io, cache, base, change.snapshot_id, group, objects).await?),
        }
    }
    Ok(kept)
}

/// Which manifests are merged with each other: newest first, a group ends at the target size, and, unless all are wanted,
/// before a manifest that is larger than the group.
fn groups(mut small: Vec<ManifestFile>, target_bytes: i64, all: bool) -> Vec<Vec<ManifestFile>> {
    small.sort_by_key(|manifest| std::cmp::Reverse(manifest.sequence_number));
    let mut groups: Vec<Vec<ManifestFile>> = Vec::new();
    let mut bytes = 0;
    for manifest in small {
        let length = manifest.manifest_length;
        match groups.last_mut() {
            // Of two that are about as large, each may be the larger one.
            Some(group) if bytes + length <= target_bytes && (all || length <= bytes + bytes / 2) => {
                bytes += length;
                group.push(manifest);
            }
            _ => {
                bytes = length;
                groups.push(vec![manifest]);
            }
        }
    }
    groups
}

async fn merge(
    io: &LakeIo,
    cache: &MetadataCache,
    base: &TableMetadata,
    snapshot_id: i64,
    group: Vec<ManifestFile>,
    objects: &mut Vec<String>,
) -> Result<ManifestFile> {
    let location = format!("{}/metadata/{}-m1.avro", base.location(), Uuid::now_v7());
    objects.push(location.clone());
    let spec = base.default_partition_spec().as_ref().clone();
    let schema = base.current_schema().clone();
    let mut writer = ManifestWriterBuilder::new(io.output(&location), Some(snapshot_id), schema, spec).build_v2_data();
    for file in &group {
        let manifest = cache.manifest(file).await?;
        for entry in manifest.entries().iter().filter(|entry| entry.is_alive()) {
            let (added_by, sequence) = origin(file, entry)?;
            writer.add_existing_file(entry.data_file().clone(), added_by, sequence, entry.file_sequence_number)?;
        }
    }
    Ok(writer.write_manifest_file().await?)
}

/// The metadata as JSON, in the order that the specification and incremental readers expect.
pub fn to_json(metadata: &TableMetadata) -> Result<Vec<u8>> {
    let failed = |e: serde_json::Error| Error::internal(format!("writing table metadata as JSON: {e}"));
    let mut json = serde_json::to_value(metadata).map_err(failed)?;
    for (list, key) in [
        ("snapshots", "sequence-number"),
        ("schemas", "schema-id"),
        ("partition-specs", "spec-id"),
        ("sort-orders", "order-id"),
    ] {
        if let Some(entries) = json.get_mut(list).and_then(serde_json::Value::as_array_mut) {
            entries.sort_by_key(|entry| {
                let number = |name: &str| entry.get(name).and_then(serde_json::Value::as_i64);
                (number(key), number("timestamp-ms"))
            });
        }
    }
    serde_json::to_vec(&json).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_names() {
        assert_eq!(version_of("s3://b/t/metadata/00012-7b.metadata.json"), 12);
        assert_eq!(version_of("s3://b/t/metadata/v3.metadata.json"), 3);
        assert_eq!(version_of("s3://b/t/metadata/odd.json"), 0);
    }

    fn manifest(sequence_number: i64, manifest_length: i64) -> ManifestFile {
        ManifestFile {
            manifest_path: format!("m{sequence_number}"),
            manifest_length,
            partition_spec_id: 0,
            content: ManifestContentType::Data,
            sequence_number,
            min_sequence_number: sequence_number,
            added_snapshot_id: 1,
            added_files_count: None,
            existing_files_count: None,
            deleted_files_count: None,
            added_rows_count: None,
            existing_rows_count: None,
            deleted_rows_count: None,
            partitions: None,
            key_metadata: None,
            first_row_id: None,
        }
    }

    #[test]
    fn manifests_are_merged_with_those_of_their_size() {
        let lengths = |small: &[i64], all| {
            let small = small.iter().enumerate().map(|(i, length)| manifest(i as i64, *length));
            let groups = groups(small.collect(), 100, all);
            groups.iter().map(|group| group.iter().map(|m| m.manifest_length).collect()).collect::<Vec<Vec<_>>>()
        };
        // Oldest first here, newest first there.
        assert_eq!(lengths(&[90, 40, 2, 2, 2], false), [vec![2, 2, 2], vec![40], vec![90]]);
        assert_eq!(lengths(&[90, 6, 2, 2, 2], false), [vec![2, 2, 2, 6], vec![90]]);
        assert_eq!(lengths(&[90, 40, 2, 2, 2], true), [vec![2, 2, 2, 40], vec![90]]);
        assert_eq!(lengths(&[60, 60], true), [vec![60], vec![60]]);
        // Appending one by one and merging ten at a time, few are left, and each is written a few times only.
        let (mut manifests, mut written, mut most) = (Vec::new(), 0, 0);
        for i in 0..1000 {
            manifests.push(manifest(i, 1));
            if manifests.len() >= 10 {
                let merged = groups(std::mem::take(&mut manifests), 1_000_000, false).into_iter().map(|group| {
                    let bytes = group.iter().map(|m| m.manifest_length).sum();
                    written += if group.len() > 1 { bytes } else { 0 };
                    manifest(group[0].sequence_number, bytes)
                });
                manifests = merged.collect();
            }
            most = most.max(manifests.len());
        }
        assert!(most <= 10 && written <= 10_000, "{most} manifests, {written} written");
    }

    #[test]
    fn merging_is_as_the_table_says() {
        let of = |properties: &[(&str, &str)]| {
            Merging::of(&properties.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        };
        assert_eq!(of(&[]), Merging { enabled: true, min_count: 100, target_bytes: 8 << 20 });
        let asked = [
            ("commit.manifest-merge.enabled", "false"),
            ("commit.manifest.min-count-to-merge", "1"),
            ("commit.manifest.target-size-bytes", "4096"),
        ];
        assert_eq!(of(&asked), Merging { enabled: false, min_count: 2, target_bytes: 4096 });
    }

    #[test]
    fn totals_follow_the_parent() {
        let adds = |files, rows| Change {
            snapshot_id: 1,
            operation: Operation::Append,
            added: None,
            added_tally: Tally { files, rows, bytes: 9 },
            added_partitions: HashSet::from([Struct::empty()]),
            taken: Vec::new(),
            removed: Removed::Nothing,
            merge_manifests: false,
            notes: HashMap::new(),
        };
        let first = summary(None, &adds(1, 5), &Gone::default());
        assert_eq!(first.additional_properties["total-records"], "5");
        let gone = Gone { data: Tally { files: 1, rows: 5, bytes: 9 }, ..Gone::default() };
        let second = summary(Some(&first), &adds(2, 7), &gone).additional_properties;
        assert_eq!((second["total-records"].as_str(), second["total-data-files"].as_str()), ("7", "2"));
        assert_eq!((second["deleted-records"].as_str(), second["changed-partition-count"].as_str()), ("5", "1"));
        let without = Summary { operation: Operation::Append, additional_properties: HashMap::new() };
        let third = summary(Some(&without), &adds(1, 5), &Gone::default());
        assert!(!third.additional_properties.contains_key("total-records"));
    }
}
