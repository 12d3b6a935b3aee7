//! The next version of a table: new manifests, a new manifest list, a new metadata.json. Pure additions; nothing is
//! current before the pointer is swapped ([`super::commit`]).
//!
//! The manifest with the new files is written once for a commit. List and metadata depend on the version they follow
//! and are written anew for each attempt; so are the manifests that name a removed file: it stays in them as deleted by
//! this snapshot, and what else they name as existing, with the sequence numbers it had. Snapshots are sorted by sequence number in the JSON (the crate's order is
//! random, and incremental readers need this one).
//!
//! When a list has more than [`MAX_SMALL_MANIFESTS`] small manifests they are merged into larger ones, so that many small
//! INSERTs do not make planning slower for ever.

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

/// More small manifests than this are merged.
pub const MAX_SMALL_MANIFESTS: usize = 100;
/// A manifest of at least this size is not small, and merging aims at it.
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
        ManifestWriterBuilder::new(io.output(&location), Some(snapshot_id), metadata.current_schema().clone(), spec)
            .build_v2_data();
    for file in files {
        change.added_tally.add(file);
        change.added_partitions.insert(file.partition().clone());
        // Less than 0: the sequence number is the one that the commit will get.
        writer.add_file(file.clone(), -1)?;
    }
    change.added = Some(writer.write_manifest_file().await?);
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
    let next = next_metadata(&io, cache, base, base_location, edit, change, objects).await?;
    let Some((metadata, expired)) = next else { return Ok(None) };
    let location = metadata_location(base.location(), base_location);
    let size = write_metadata(storage, &metadata, &location, objects).await?;
    Ok(Some((Arc::new(metadata), location, size, expired)))
}

/// Writes the list and the manifests of the version that follows `base`, as [`write_next`] does, but not its metadata, which is
/// returned, with the metadata files that fell out of its log. What was written is added to `objects`.
///
/// # Errors
/// As [`write_next`]; what was written so far stays.
pub async fn next_metadata(
    io: &LakeIo,
    cache: &MetadataCache,
    base: &TableMetadata,
    base_location: Option<&str>,
    edit: Option<&Edit>,
    change: Option<&Change>,
    objects: &mut Vec<String>,
) -> Result<Option<(TableMetadata, Vec<MetadataLog>)>> {
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
        let snapshot = write_snapshot(io, cache, base, change, objects).await?;
        builder = builder.set_branch_snapshot(snapshot, MAIN_BRANCH)?;
    }
    let built = builder.build()?;
    expired.extend(built.expired_metadata_logs);
    Ok(Some((built.metadata, expired)))
}

/// Writes a version's metadata to `location`, which is added to `objects`. Returns its size in bytes.
///
/// # Errors
/// The storage's.
pub async fn write_metadata(
    storage: &Storage,
    metadata: &TableMetadata,
    location: &str,
    objects: &mut Vec<String>,
) -> Result<usize> {
    let bytes = to_json(metadata)?;
    let size = bytes.len();
    objects.push(location.to_owned());
    storage.write_new(location, bytes.into()).await?;
    Ok(size)
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
    let most = if change.merge_manifests { 1 } else { MAX_SMALL_MANIFESTS };
    let carried = merge_small(io, cache, base, change.snapshot_id, most, carried, objects).await?;
    let location = format!("{}/metadata/snap-{}-{}.avro", base.location(), change.snapshot_id, Uuid::now_v7());
    objects.push(location.clone());
    let writer = io.output(&location).writer().await?;
    let parent_id = parent.map(|parent| parent.snapshot_id());
    let mut list = ManifestListWriter::v2(writer, change.snapshot_id, parent_id, sequence_number);
    list.add_manifests(change.added.iter().cloned().chain(carried))?;
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
    let partitions = change.added_partitions.union(&gone.partitions).count();
    properties.insert("changed-partition-count".to_owned(), partitions.to_string());
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

/// Replaces small manifests by larger ones when there are more than `most`.
async fn merge_small(
    io: &LakeIo,
    cache: &MetadataCache,
    base: &TableMetadata,
    snapshot_id: i64,
    most: usize,
    manifests: Vec<ManifestFile>,
    objects: &mut Vec<String>,
) -> Result<Vec<ManifestFile>> {
    let spec_id = base.default_partition_spec_id();
    let small = |manifest: &ManifestFile| {
        manifest.content == ManifestContentType::Data
            && manifest.partition_spec_id == spec_id
            && manifest.manifest_length < MANIFEST_TARGET_BYTES
            // Those of this very snapshot tell what it removes.
            && manifest.added_snapshot_id != snapshot_id
            && manifest.key_metadata.is_none()
    };
    if base.format_version() != FormatVersion::V2 || manifests.iter().filter(|manifest| small(manifest)).count() <= most
    {
        return Ok(manifests);
    }
    let (small, mut kept): (Vec<_>, Vec<_>) = manifests.into_iter().partition(small);
    // Newest first, as readers that look for recent files expect; a group ends at the target size.
    let mut group: Vec<ManifestFile> = Vec::new();
    let mut group_bytes = 0;
    for manifest in small {
        if group_bytes + manifest.manifest_length > MANIFEST_TARGET_BYTES && !group.is_empty() {
            kept.push(merge(io, cache, base, snapshot_id, std::mem::take(&mut group), objects).await?);
            group_bytes = 0;
        }
        group_bytes += manifest.manifest_length;
        group.push(manifest);
    }
    if !group.is_empty() {
        kept.push(merge(io, cache, base, snapshot_id, group, objects).await?);
    }
    Ok(kept)
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

    #[test]
    fn totals_follow_the_parent() {
        let adds = |files, rows| Change {
            snapshot_id: 1,
            operation: Operation::Append,
            added: None,
            added_tally: Tally { files, rows, bytes: 9 },
            added_partitions: HashSet::from([Struct::empty()]),
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
