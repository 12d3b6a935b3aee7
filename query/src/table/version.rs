//! The next version of a table: a new manifest, a new manifest list, a new metadata.json. Pure additions; nothing is
//! current before the pointer is swapped ([`super::commit`]).
//!
//! The manifest with the new files is written once for a commit. List and metadata depend on the version they follow
//! and are written anew for each attempt. Snapshots are sorted by sequence number in the JSON (the crate's order is
//! random, and incremental readers need this one).
//!
//! When a list has more than [`MAX_SMALL_MANIFESTS`] small manifests they are merged into larger ones, so that many small
//! INSERTs do not make planning slower for ever.

use std::collections::HashMap;
use std::sync::Arc;

use iceberg::spec::{
    DataFile, FormatVersion, MAIN_BRANCH, ManifestContentType, ManifestFile, ManifestListWriter, ManifestWriterBuilder,
    MetadataLog, Operation, Snapshot, Summary, TableMetadata,
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

/// What a commit adds, the same for all its attempts.
#[derive(Debug, Clone)]
pub struct Append {
    pub snapshot_id: i64,
    pub manifest: ManifestFile,
    pub files: u64,
    pub rows: u64,
    pub bytes: u64,
}

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

/// Writes the manifest that names `files`, for a snapshot with a new id.
pub async fn write_manifest(io: &LakeIo, metadata: &TableMetadata, files: &[DataFile]) -> Result<Append> {
    let snapshot_id = new_snapshot_id(Some(metadata));
    let location = format!("{}/metadata/{}-m0.avro", metadata.location(), Uuid::now_v7());
    let mut writer = ManifestWriterBuilder::new(
        io.output(&location),
        Some(snapshot_id),
        metadata.current_schema().clone(),
        metadata.default_partition_spec().as_ref().clone(),
    )
    .build_v2_data();
    let (mut rows, mut bytes) = (0, 0);
    for file in files {
        rows += file.record_count();
        bytes += file.file_size_in_bytes();
        // Less than 0: the sequence number is the one that the commit will get.
        writer.add_file(file.clone(), -1)?;
    }
    let manifest = writer.write_manifest_file().await?;
    Ok(Append { snapshot_id, manifest, files: files.len() as u64, rows, bytes })
}

/// Writes the version that follows `base` (at `base_location`; `None` for a table that is being created).
///
/// # Errors
/// What was written so far is removed.
pub async fn write_next(
    storage: &Arc<Storage>,
    cache: &MetadataCache,
    base: &TableMetadata,
    base_location: Option<&str>,
    append: Option<&Append>,
) -> Result<NextVersion> {
    let mut objects = Vec::new();
    let written = try_write_next(storage, cache, base, base_location, append, &mut objects).await;
    match written {
        Ok((metadata, location, metadata_bytes, expired)) => {
            Ok(NextVersion { metadata, location, metadata_bytes, objects, expired })
        }
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
    append: Option<&Append>,
    objects: &mut Vec<String>,
) -> Result<Written> {
    let io = LakeIo::new(storage.clone());
    let mut builder = base.clone().into_builder(base_location.map(str::to_owned));
    if let Some(append) = append {
        let snapshot = write_snapshot(&io, cache, base, append, objects).await?;
        builder = builder.set_branch_snapshot(snapshot, MAIN_BRANCH)?;
    }
    let built = builder.build()?;
    let bytes = to_json(&built.metadata)?;
    let location = metadata_location(base.location(), base_location);
    objects.push(location.clone());
    let size = bytes.len();
    storage.write_new(&location, bytes.into()).await?;
    Ok((Arc::new(built.metadata), location, size, built.expired_metadata_logs))
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
    append: &Append,
    objects: &mut Vec<String>,
) -> Result<Snapshot> {
    let parent = base.current_snapshot();
    let sequence_number = base.next_sequence_number();
    let carried = match parent {
        Some(parent) => cache.manifest_list(base, parent).await?.entries().to_vec(),
        None => Vec::new(),
    };
    let carried = merge_small(io, cache, base, append.snapshot_id, carried, objects).await?;
    let location = format!("{}/metadata/snap-{}-{}.avro", base.location(), append.snapshot_id, Uuid::now_v7());
    objects.push(location.clone());
    let writer = io.output(&location).writer().await?;
    let parent_id = parent.map(|parent| parent.snapshot_id());
    let mut list = ManifestListWriter::v2(writer, append.snapshot_id, parent_id, sequence_number);
    list.add_manifests(std::iter::once(append.manifest.clone()).chain(carried))?;
    list.close().await?;
    Ok(Snapshot::builder()
        .with_snapshot_id(append.snapshot_id)
        .with_parent_snapshot_id(parent_id)
        .with_sequence_number(sequence_number)
        .with_timestamp_ms(now_ms().max(base.last_updated_ms()))
        .with_manifest_list(location)
        .with_schema_id(base.current_schema_id())
        .with_summary(summary(parent.map(|parent| parent.summary()), append))
        .build())
}

fn now_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn summary(parent: Option<&Summary>, append: &Append) -> Summary {
    let mut properties = HashMap::from([
        ("added-data-files".to_owned(), append.files.to_string()),
        ("added-records".to_owned(), append.rows.to_string()),
        ("added-files-size".to_owned(), append.bytes.to_string()),
        ("changed-partition-count".to_owned(), "1".to_owned()),
    ]);
    let totals = [
        ("total-data-files", append.files),
        ("total-records", append.rows),
        ("total-files-size", append.bytes),
        ("total-delete-files", 0),
        ("total-position-deletes", 0),
        ("total-equality-deletes", 0),
    ];
    for (name, added) in totals {
        // A parent without totals leaves the table without them, rather than with wrong ones.
        let before = match parent {
            None => Some(0),
            Some(parent) => parent.additional_properties.get(name).and_then(|text| text.parse::<u64>().ok()),
        };
        if let Some(before) = before {
            properties.insert(name.to_owned(), (before + added).to_string());
        }
    }
    Summary { operation: Operation::Append, additional_properties: properties }
}

/// Replaces small manifests by larger ones when there are too many.
async fn merge_small(
    io: &LakeIo,
    cache: &MetadataCache,
    base: &TableMetadata,
    snapshot_id: i64,
    manifests: Vec<ManifestFile>,
    objects: &mut Vec<String>,
) -> Result<Vec<ManifestFile>> {
    let spec_id = base.default_partition_spec_id();
    let small = |manifest: &ManifestFile| {
        manifest.content == ManifestContentType::Data
            && manifest.partition_spec_id == spec_id
            && manifest.manifest_length < MANIFEST_TARGET_BYTES
            && manifest.key_metadata.is_none()
    };
    if base.format_version() != FormatVersion::V2
        || manifests.iter().filter(|manifest| small(manifest)).count() <= MAX_SMALL_MANIFESTS
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
    let mut writer = ManifestWriterBuilder::new(
        io.output(&location),
        Some(snapshot_id),
        base.current_schema().clone(),
        base.default_partition_spec().as_ref().clone(),
    )
    .build_v2_data();
    for file in &group {
        let manifest = cache.manifest(file).await?;
        for entry in manifest.entries().iter().filter(|entry| entry.is_alive()) {
            let (Some(added_by), Some(sequence)) = (entry.snapshot_id(), entry.sequence_number()) else {
                let path = &file.manifest_path;
                return Err(Error::corrupt(format!("{path}: an entry has neither snapshot id nor sequence number")));
            };
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
        let manifest: ManifestFile = ManifestFile {
            manifest_path: String::new(),
            manifest_length: 0,
            partition_spec_id: 0,
            content: ManifestContentType::Data,
            sequence_number: -1,
            min_sequence_number: -1,
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
        };
        let append = Append { snapshot_id: 1, manifest, files: 1, rows: 5, bytes: 9 };
        let first = summary(None, &append);
        assert_eq!(first.additional_properties["total-records"], "5");
        let second = summary(Some(&first), &append);
        assert_eq!(second.additional_properties["total-records"], "10");
        let without = Summary { operation: Operation::Append, additional_properties: HashMap::new() };
        assert!(!summary(Some(&without), &append).additional_properties.contains_key("total-records"));
    }
}
