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
    DataContentType, DataFile, DataFileBuilder, DataFileFormat, FormatVersion, MAIN_BRANCH, ManifestContentType,
    ManifestEntry, ManifestFile, ManifestListWriter, ManifestWriter, ManifestWriterBuilder, MetadataLog, Operation,
    PartitionSpec, SchemaRef, Snapshot, Struct, Summary, TableMetadata, TableMetadataBuilder,
};
use uuid::Uuid;

use super::deletes::{self, DeletePlace, place};
use super::sound;
use super::writer::DataFiles;
use crate::error::{Error, Result};
use crate::storage::Storage;
use crate::storage::cache::MetadataCache;
use crate::storage::io::LakeIo;
use crate::storage::names::spec_in_manifest;

/// As many small manifests are merged, unless the table says otherwise.
const MIN_MANIFESTS_TO_MERGE: usize = 100;
/// A manifest of at least this size is not small, and merging aims at it, unless the table says otherwise.
pub(crate) const MANIFEST_TARGET_BYTES: i64 = 8 << 20;
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
    pub deletes: Deletes,
    /// All small manifests are merged, however few they are.
    pub merge_manifests: bool,
    /// What else the summary says.
    pub notes: HashMap<String, String>,
}

/// What a change does to delete files.
#[derive(Debug, Clone, Default)]
pub struct Deletes {
    /// The manifests that name the added ones, one for each partition spec.
    pub added: Vec<ManifestFile>,
    pub added_tally: DeleteTally,
    /// The data files whose rows they delete. Each must still be there.
    pub of: Arc<HashSet<String>>,
    /// Those that are not needed any more. Others may have removed them already.
    pub removed: Arc<HashSet<DeletePlace>>,
}

impl Change {
    /// The manifests with what is added.
    pub fn manifests(&self) -> impl Iterator<Item = &ManifestFile> {
        self.added.iter().chain(&self.deletes.added)
    }

    fn removes_nothing(&self) -> bool {
        matches!(self.removed, Removed::Nothing) && self.deletes.removed.is_empty()
    }

    /// Whether a file that is there goes.
    fn removes(&self, file: &DataFile) -> bool {
        let removed = match &self.removed {
            Removed::Nothing => false,
            Removed::Everything => true,
            Removed::Files(paths) => match file.content_type() {
                DataContentType::Data => paths.contains(file.file_path()),
                // What is deleted from a file goes with it.
                _ => file.referenced_data_file().is_some_and(|of| paths.contains(&of)),
            },
        };
        removed || (file.content_type() != DataContentType::Data && self.deletes.removed.contains(&place(file)))
    }
}

/// How many delete files, and what is in them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeleteTally {
    pub position_files: u64,
    pub vectors: u64,
    pub equality_files: u64,
    pub positions: u64,
    pub equality_rows: u64,
    pub bytes: u64,
}

impl DeleteTally {
    fn files(&self) -> u64 {
        self.position_files + self.vectors + self.equality_files
    }

    fn add(&mut self, file: &DataFile) {
        // Of a vector its own part of the file.
        let bytes = file.content_size_in_bytes().and_then(|bytes| u64::try_from(bytes).ok());
        self.bytes = self.bytes.saturating_add(bytes.unwrap_or(file.file_size_in_bytes()));
        match (file.content_type(), file.file_format()) {
            (DataContentType::EqualityDeletes, _) => {
                self.equality_files += 1;
                self.equality_rows = self.equality_rows.saturating_add(file.record_count());
            }
            (_, format) => {
                match format {
                    DataFileFormat::Puffin => self.vectors += 1,
                    _ => self.position_files += 1,
                }
                self.positions = self.positions.saturating_add(file.record_count());
            }
        }
    }
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
        self.files = self.files.saturating_add(other.files);
        self.rows = self.rows.saturating_add(other.rows);
        self.bytes = self.bytes.saturating_add(other.bytes);
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
        *self += Tally { files: 1, rows: file.record_count(), bytes: file.file_size_in_bytes() };
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
        deletes: Deletes::default(),
        merge_manifests: false,
        notes: HashMap::new(),
    };
    if files.is_empty() {
        return Ok(change);
    }
    let location = format!("{}/metadata/{}-m0.avro", metadata.location(), Uuid::now_v7());
    let spec = spec_in_manifest(metadata.default_partition_spec())?;
    let schema = metadata.current_schema().clone();
    let builder = ManifestWriterBuilder::new(io.output(&location), None, schema, spec);
    let mut writer = build(builder, metadata.format_version(), ManifestContentType::Data);
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

/// [`write_change`] with all that was written for it: data files, delete files, and what those replace.
///
/// # Errors
/// Those of writing; `Corrupt` for a partition spec that the table does not have.
pub async fn write_files(
    io: &LakeIo,
    metadata: &TableMetadata,
    operation: Operation,
    files: &DataFiles,
    removed: Removed,
) -> Result<Change> {
    let mut change = write_change(io, metadata, operation, &files.files, removed).await?;
    write_deletes(io, metadata, &mut change, &files.deletes).await?;
    change.deletes.of = files.deleted_from.clone();
    change.deletes.removed = files.replaced_deletes.clone();
    Ok(change)
}

/// Adds delete files to a change, whose manifests are written here, one for each partition spec.
async fn write_deletes(
    io: &LakeIo,
    metadata: &TableMetadata,
    change: &mut Change,
    deletes: &[(i32, DataFile)],
) -> Result<()> {
    for (spec_id, files) in deletes::by_spec(deletes) {
        let spec = metadata.partition_spec_by_id(spec_id);
        let spec = spec.ok_or_else(|| Error::corrupt(format!("the table has no partition spec {spec_id}")))?;
        let location = format!("{}/metadata/{}-m0.avro", metadata.location(), Uuid::now_v7());
        let (output, id) = (io.output(&location), Some(change.snapshot_id));
        let builder = ManifestWriterBuilder::new(output, id, schema_of(metadata, spec), spec_in_manifest(spec)?);
        let mut writer = build(builder, metadata.format_version(), ManifestContentType::Deletes);
        for file in files {
            change.deletes.added_tally.add(file);
            change.added_partitions.insert(file.partition().clone());
            writer.add_file(file.clone(), -1)?;
        }
        change.deletes.added.push(writer.write_manifest_file().await?);
    }
    Ok(())
}

/// The newest schema that has all the columns which a spec names: some may have been dropped.
fn schema_of(metadata: &TableMetadata, spec: &PartitionSpec) -> SchemaRef {
    let mut schemas: Vec<&SchemaRef> = metadata.schemas_iter().collect();
    schemas.sort_by_key(|schema| std::cmp::Reverse(schema.schema_id()));
    let current = metadata.current_schema();
    let fits = |schema: &&SchemaRef| spec.partition_type(schema).is_ok();
    std::iter::once(current).chain(schemas).find(fits).unwrap_or(current).clone()
}

fn build(builder: ManifestWriterBuilder, version: FormatVersion, content: ManifestContentType) -> ManifestWriter {
    match (version >= FormatVersion::V3, content) {
        (false, ManifestContentType::Data) => builder.build_v2_data(),
        (false, ManifestContentType::Deletes) => builder.build_v2_deletes(),
        (true, ManifestContentType::Data) => builder.build_v3_data(),
        (true, ManifestContentType::Deletes) => builder.build_v3_deletes(),
    }
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
        sound::check(&built.metadata, Some(base))?;
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
    let carried = merge_small(io, cache, base, change, carried, objects).await?;
    let location = format!("{}/metadata/snap-{}-{}.avro", base.location(), change.snapshot_id, Uuid::now_v7());
    objects.push(location.clone());
    let writer = io.output(&location).writer().await?;
    let parent_id = parent.map(|parent| parent.snapshot_id());
    // In format version 3 each row has an id, and what is added gets the next ones.
    let first_row_id = base.next_row_id();
    let mut list = match base.format_version() >= FormatVersion::V3 {
        true => ManifestListWriter::v3(writer, change.snapshot_id, parent_id, sequence_number, Some(first_row_id)),
        false => ManifestListWriter::v2(writer, change.snapshot_id, parent_id, sequence_number),
    };
    list.add_manifests(change.manifests().chain(&change.taken).cloned().chain(carried))?;
    let next_row_id = list.next_row_id();
    list.close().await?;
    let snapshot = Snapshot::builder()
        .with_snapshot_id(change.snapshot_id)
        .with_parent_snapshot_id(parent_id)
        .with_sequence_number(sequence_number)
        .with_timestamp_ms(now_ms().max(base.last_updated_ms()))
        .with_manifest_list(location)
        .with_schema_id(base.current_schema_id())
        .with_summary(summary(parent.map(|parent| parent.summary()), change, &gone));
    Ok(match next_row_id {
        Some(next) => snapshot.with_row_range(first_row_id, next.saturating_sub(first_row_id)).build(),
        None => snapshot.build(),
    })
}

/// What a snapshot has removed.
#[derive(Debug, Default)]
struct Gone {
    data: Tally,
    deletes: DeleteTally,
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
    if change.removes_nothing() {
        return Ok(carried);
    }
    let data_stays = matches!(change.removed, Removed::Nothing);
    let (mut kept, searched): (Vec<_>, Vec<_>) =
        carried.into_iter().partition(|file| data_stays && file.content == ManifestContentType::Data);
    let loads: Vec<_> = searched
        .into_iter()
        .map(|file| async move {
            let manifest = cache.manifest(&file).await?;
            Ok::<_, Error>((file, manifest))
        })
        .collect();
    let mut loads = futures::stream::iter(loads).buffered(MANIFESTS_IN_FLIGHT);
    while let Some(loaded) = loads.next().await {
        let (file, manifest) = loaded?;
        let alive = || manifest.entries().iter().filter(|entry| entry.is_alive());
        if !alive().any(|entry| change.removes(entry.data_file())) {
            kept.push(file);
            continue;
        }
        let location = format!("{}/metadata/{}-m2.avro", base.location(), Uuid::now_v7());
        objects.push(location.clone());
        let metadata = manifest.metadata();
        let (schema, spec) = (metadata.schema().clone(), metadata.partition_spec().clone());
        let builder = ManifestWriterBuilder::new(io.output(&location), Some(change.snapshot_id), schema, spec);
        let mut writer = build(builder, base.format_version(), file.content);
        let mut row_ids = RowIds::of(&file);
        for entry in alive() {
            let data_file = row_ids.told(entry.data_file())?;
            let (added_by, sequence) = origin(&file, entry)?;
            match change.removes(&data_file) {
                true => {
                    gone.add(&data_file);
                    writer.add_delete_file(data_file, sequence, entry.file_sequence_number)?;
                }
                false => {
                    writer.add_existing_file(data_file, added_by, sequence, entry.file_sequence_number)?;
                }
            }
        }
        let mut written = writer.write_manifest_file().await?;
        // Each entry tells its own.
        written.first_row_id = file.first_row_id;
        kept.push(written);
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
            _ => self.deletes.add(file),
        }
    }
}

/// Ids of rows, in format version 3: a data file that does not tell its first one has those that follow the file before it.
/// Delete files have none, though there are writers whose lists say so of manifests of them.
struct RowIds {
    spec_id: i32,
    next: Option<i64>,
}

impl RowIds {
    fn of(manifest: &ManifestFile) -> Self {
        let first = manifest.first_row_id.filter(|_| manifest.content == ManifestContentType::Data);
        let next = first.and_then(|id| i64::try_from(id).ok());
        Self { spec_id: manifest.partition_spec_id, next }
    }

    /// The next live file of the manifest, which tells its first id: where it is named next, others are before it.
    fn told(&mut self, file: &DataFile) -> Result<DataFile> {
        let Some(first) = self.next.filter(|_| file.first_row_id().is_none()) else { return Ok(file.clone()) };
        self.next = i64::try_from(file.record_count()).ok().and_then(|rows| first.checked_add(rows));
        let mut told = DataFileBuilder::default();
        told.content(file.content_type())
            .file_path(file.file_path().to_owned())
            .file_format(file.file_format())
            .partition(file.partition().clone())
            .partition_spec_id(self.spec_id)
            .record_count(file.record_count())
            .file_size_in_bytes(file.file_size_in_bytes())
            .column_sizes(file.column_sizes().clone())
            .value_counts(file.value_counts().clone())
            .null_value_counts(file.null_value_counts().clone())
            .nan_value_counts(file.nan_value_counts().clone())
            .lower_bounds(file.lower_bounds().clone())
            .upper_bounds(file.upper_bounds().clone())
            .key_metadata(file.key_metadata().map(<[u8]>::to_vec))
            .split_offsets(file.split_offsets().map(<[i64]>::to_vec))
            .equality_ids(file.equality_ids())
            .first_row_id(Some(first));
        if let Some(order) = file.sort_order_id() {
            told.sort_order_id(order);
        }
        let path = file.file_path();
        told.build().map_err(|e| Error::internal(format!("describing {path}: {e}")))
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
    let (added, deletes) = (change.added_tally, change.deletes.added_tally);
    let mut properties = change.notes.clone();
    let mut say = |name: &str, count: u64| {
        if count > 0 {
            properties.insert(name.to_owned(), count.to_string());
        }
    };
    say("added-data-files", added.files);
    say("added-records", added.rows);
    say("added-delete-files", deletes.files());
    say("added-position-delete-files", deletes.position_files);
    say("added-dvs", deletes.vectors);
    say("added-position-deletes", deletes.positions);
    let (added_bytes, gone_bytes) =
        (added.bytes.saturating_add(deletes.bytes), gone.data.bytes.saturating_add(gone.deletes.bytes));
    say("added-files-size", added_bytes);
    say("deleted-data-files", gone.data.files);
    say("deleted-records", gone.data.rows);
    say("removed-delete-files", gone.deletes.files());
    say("removed-position-delete-files", gone.deletes.position_files);
    say("removed-dvs", gone.deletes.vectors);
    say("removed-equality-delete-files", gone.deletes.equality_files);
    say("removed-position-deletes", gone.deletes.positions);
    say("removed-equality-deletes", gone.deletes.equality_rows);
    say("removed-files-size", gone_bytes);
    // Which partitions others add to is in their manifests alone.
    if change.taken.is_empty() || change.added_partitions.iter().all(|partition| partition.fields().is_empty()) {
        let partitions = change.added_partitions.union(&gone.partitions).count();
        properties.insert("changed-partition-count".to_owned(), partitions.to_string());
    }
    let totals = [
        ("total-data-files", added.files, gone.data.files),
        ("total-records", added.rows, gone.data.rows),
        ("total-files-size", added_bytes, gone_bytes),
        ("total-delete-files", deletes.files(), gone.deletes.files()),
        ("total-position-deletes", deletes.positions, gone.deletes.positions),
        ("total-equality-deletes", deletes.equality_rows, gone.deletes.equality_rows),
    ];
    for (name, added, removed) in totals {
        // A parent without totals leaves the table without them, rather than with wrong ones.
        let before = match parent {
            None => Some(0),
            Some(parent) => parent.additional_properties.get(name).and_then(|text| text.parse::<u64>().ok()),
        };
        if let Some(after) = before.and_then(|before| before.checked_add(added)?.checked_sub(removed)) {
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
    let mut kept = manifests;
    for content in [ManifestContentType::Data, ManifestContentType::Deletes] {
        let small = |manifest: &ManifestFile| {
            manifest.content == content
                && manifest.partition_spec_id == spec_id
                && manifest.manifest_length < merging.target_bytes
                // Those of this very snapshot tell what it removes.
                && manifest.added_snapshot_id != change.snapshot_id
                && manifest.key_metadata.is_none()
        };
        let count = kept.iter().filter(|manifest| small(manifest)).count();
        let due = change.merge_manifests || (merging.enabled && count >= merging.min_count);
        if count < 2 || !due {
            continue;
        }
        let (small, others): (Vec<_>, Vec<_>) = kept.into_iter().partition(small);
        kept = others;
        for group in groups(small, merging.target_bytes, change.merge_manifests) {
            match <[ManifestFile; 1]>::try_from(group) {
                Ok([alone]) => kept.push(alone),
                Err(group) => kept.push(merge(io, cache, base, change.snapshot_id, group, objects).await?),
            }
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
    let spec = spec_in_manifest(base.default_partition_spec())?;
    let schema = base.current_schema().clone();
    let content = group.first().map_or(ManifestContentType::Data, |manifest| manifest.content);
    let builder = ManifestWriterBuilder::new(io.output(&location), Some(snapshot_id), schema, spec);
    let mut writer = build(builder, base.format_version(), content);
    for file in &group {
        let manifest = cache.manifest(file).await?;
        let mut row_ids = RowIds::of(file);
        for entry in manifest.entries().iter().filter(|entry| entry.is_alive()) {
            let (added_by, sequence) = origin(file, entry)?;
            let data_file = row_ids.told(entry.data_file())?;
            writer.add_existing_file(data_file, added_by, sequence, entry.file_sequence_number)?;
        }
    }
    let mut merged = writer.write_manifest_file().await?;
    // Each entry tells its own. Rows of before an upgrade to format version 3 have no ids, and get some now.
    let first: Option<Vec<u64>> = group.iter().map(|file| file.first_row_id).collect();
    let first = first.filter(|_| content == ManifestContentType::Data);
    merged.first_row_id = first.and_then(|first| first.into_iter().min());
    Ok(merged)
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
            deletes: Deletes::default(),
            merge_manifests: false,
            notes: HashMap::new(),
        };
        let first = summary(None, &adds(1, 5), &Gone::default());
        assert_eq!(first.additional_properties["total-records"], "5");
        let gone = Gone { data: Tally { files: 1, rows: 5, bytes: 9 }, ..Gone::default() };
        let second = summary(Some(&first), &adds(2, 7), &gone).additional_properties;
        assert_eq!((second["total-records"].as_str(), second["total-data-files"].as_str()), ("7", "2"));
        assert_eq!((second["deleted-records"].as_str(), second["changed-partition-count"].as_str()), ("5", "1"));
        let huge = Summary {
            operation: Operation::Append,
            additional_properties: [("total-records".to_owned(), u64::MAX.to_string())].into(),
        };
        let fourth = summary(Some(&huge), &adds(1, 5), &Gone::default());
        assert!(!fourth.additional_properties.contains_key("total-records"), "no total is better than a wrong one");
        let without = Summary { operation: Operation::Append, additional_properties: HashMap::new() };
        let third = summary(Some(&without), &adds(1, 5), &Gone::default());
        assert!(!third.additional_properties.contains_key("total-records"));
    }
}
