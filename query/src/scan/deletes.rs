//! What delete files say: read once, kept by location, applied to data files.
//!
//! - Positions (files of them and deletion vectors) become a bitmap for each data file, and that the row groups and rows
//!   which are to be read ([`access_plan`]).
//! - Equality deletes become a set of encoded rows ([`EqualitySet`]), against which rows that were read are held
//!   ([`EqualityFilter`]).
//!
//! Delete files are immutable, so what was read is never wrong, only dropped when room is needed. Many data files that
//! need the same deletes at the same time cause one read. No single one may take more than [`MAX_LOADED_BYTES`], and what a
//! statement reads and uses is counted among its memory ([`Held`]): once for each scan, however many files of it need the same, and whether the
//! cache has it, too, or not. Whoever has not the memory for them fails alone.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, RecordBatch};
use arrow::compute::{CastOptions, cast_with_options, filter_record_batch};
use arrow::datatypes::{DataType, Int64Type, Schema};
use arrow::row::{RowConverter, SortField};
use datafusion::common::{DataFusionError, Result as DfResult};
use datafusion::datasource::listing::PartitionedFile;
use datafusion::execution::cache::cache_manager::FileMetadataCache;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation};
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion_datasource_parquet::{ParquetAccessPlan, ParquetFileReaderFactory, RowGroupAccess};
use futures::{FutureExt, TryStreamExt};
use moka::future::Cache;
use object_store::ObjectStoreExt;
use parquet::arrow::arrow_reader::{RowSelection, RowSelector};
use parquet::arrow::async_reader::AsyncFileReader;
use parquet::arrow::{ParquetRecordBatchStreamBuilder, ProjectionMask};
use parquet::file::metadata::ParquetMetaData;
use roaring::RoaringTreemap;

use super::guard::unmatched;
use super::plan::{DeleteFile, DeleteKind};
use super::reader::CheckedReaders;
use crate::error::{Error, Kind, Result, words_of_panic};
use crate::storage::Storage;
use crate::table::deletes::{PATH_ID, POSITION_ID, VECTOR_MAGIC};
use crate::table::types::field_id;

/// The most that the deletes of one file may take in memory.
pub const MAX_LOADED_BYTES: usize = 1 << 30;
/// Length, magic and checksum of a deletion vector.
const VECTOR_FRAME_BYTES: usize = 12;
/// About what a position takes at most, in a bitmap of few.
const POSITION_BYTES: usize = 2;
/// About what an entry of a hash set takes besides its bytes.
const ENTRY_BYTES: usize = 32;
/// How often a read that another statement had not the memory for is made again.
const READS: usize = 64;
/// From so many delete files on those are forgotten that nobody uses any more.
const MANY_HELD: usize = 1024;

/// Deletes that were read, bounded in bytes.
#[derive(Debug, Clone)]
pub struct DeleteCache {
    loaded: Cache<Key, (Loaded, u32)>,
}

/// A delete file, and for values the types that they were converted to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    location: String,
    offset: u64,
    types: Vec<DataType>,
}

#[derive(Debug, Clone)]
enum Loaded {
    Positions(Arc<Positions>),
    Equality(Arc<EqualitySet>),
}

/// Deleted positions, by data file.
#[derive(Debug, Default)]
struct Positions {
    of: HashMap<String, Arc<RoaringTreemap>>,
}

/// Rows that are deleted by value, each encoded as a [`RowConverter`] does.
#[derive(Debug, Default)]
pub struct EqualitySet {
    rows: HashSet<Box<[u8]>>,
}

/// A column that equality deletes name, as it is read from data files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EqualityColumn {
    pub id: i32,
    pub name: String,
    pub data_type: DataType,
}

impl DeleteCache {
    pub fn new(capacity_bytes: u64) -> Self {
        let loaded = Cache::builder().max_capacity(capacity_bytes).weigher(|_, (_, weight)| *weight).build();
        Self { loaded }
    }
}

/// Reads delete files, for one scan of a statement.
#[derive(Debug, Clone)]
pub struct DeleteReader {
    storage: Arc<Storage>,
    cache: DeleteCache,
    pub footers: Arc<FileMetadataCache>,
    memory: Arc<dyn MemoryPool>,
    /// What is counted for what is in use.
    held: Arc<Mutex<HashMap<Key, Weak<MemoryReservation>>>>,
}

/// What is deleted, and the statement's memory for it, which is given back with the last that use it.
#[derive(Debug)]
pub struct Held<T> {
    what: Arc<T>,
    _memory: Arc<MemoryReservation>,
}

impl<T> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.what
    }
}

impl DeleteReader {
    /// A reader for a statement whose memory, and cache of footers, `runtime` has.
    pub fn new(storage: Arc<Storage>, cache: DeleteCache, runtime: &RuntimeEnv) -> Self {
        let footers = runtime.cache_manager.get_file_metadata_cache();
        Self { storage, cache, footers, memory: runtime.memory_pool.clone(), held: Arc::default() }
    }

    /// Memory of the statement for what is deleted by `whom`; none yet.
    pub fn memory(&self, whom: impl fmt::Display) -> MemoryReservation {
        MemoryConsumer::new(format!("deletes in {whom}")).register(&self.memory)
    }

    /// Both together, in the statement's memory.
    pub fn together(&self, one: &RoaringTreemap, other: &RoaringTreemap, of: &str) -> Result<Held<RoaringTreemap>> {
        let memory = self.memory(format_args!("several files, of {of}"));
        let both = one | other;
        memory.try_grow(both.serialized_size())?;
        Ok(Held { what: Arc::new(both), _memory: Arc::new(memory) })
    }

    /// The positions that `delete` names in the data file at `of`, if any.
    ///
    /// # Errors
    /// `Exhausted`: the statement has not the memory; `Corrupt` and those of the store.
    pub async fn positions(&self, delete: &DeleteFile, of: &str) -> Result<Option<Held<RoaringTreemap>>> {
        let offset = match delete.kind {
            DeleteKind::Vector { offset, .. } => offset,
            _ => 0,
        };
        let key = Key { location: delete.location.clone(), offset, types: Vec::new() };
        let load = || async {
            let positions = match delete.kind {
                DeleteKind::Vector { offset, bytes } => self.read_vector(delete, of, offset, bytes).await?,
                _ => self.read_positions(delete).await?,
            };
            let bytes = positions.of.iter().map(|(path, positions)| path.len() + positions.serialized_size());
            let weight = weight(bytes.sum());
            Ok((Loaded::Positions(Arc::new(positions)), weight))
        };
        match self.load(key, delete, load).await? {
            (Loaded::Positions(positions), _memory) => {
                Ok(positions.of.get(of).map(|positions| Held { what: positions.clone(), _memory }))
            }
            (Loaded::Equality(_), _) => Err(Error::internal("positions were read as values")),
        }
    }

    /// The rows that `delete` names, encoded by `columns`, which are in the order of their ids.
    ///
    /// # Errors
    /// As [`DeleteReader::positions`].
    pub async fn equality(&self, delete: &DeleteFile, columns: &[EqualityColumn]) -> Result<Held<EqualitySet>> {
        let types = columns.iter().map(|column| column.data_type.clone()).collect();
        let key = Key { location: delete.location.clone(), offset: 0, types };
        let load = || async {
            let set = self.read_equality(delete, columns).await?;
            let weight = weight(set.rows.iter().map(|row| row.len() + ENTRY_BYTES).sum());
            Ok((Loaded::Equality(Arc::new(set)), weight))
        };
        match self.load(key, delete, load).await? {
            (Loaded::Equality(what), _memory) => Ok(Held { what, _memory }),
            (Loaded::Positions(_), _) => Err(Error::internal("values were read as positions")),
        }
    }

    async fn load<F: Future<Output = Result<(Loaded, u32)>>>(
        &self,
        key: Key,
        delete: &DeleteFile,
        load: impl Fn() -> F,
    ) -> Result<(Loaded, Arc<MemoryReservation>)> {
        let doing = |error: Error| error.while_doing(format_args!("reading the deletes in {}", delete.location));
        let mut reads = 0;
        loop {
            let mut own = false;
            let guarded = async {
                own = true;
                let loaded = AssertUnwindSafe(load()).catch_unwind().await;
                loaded
                    .unwrap_or_else(|panic| Err(Error::corrupt(format!("it is damaged ({})", words_of_panic(&*panic)))))
            };
            let loaded = self.cache.loaded.try_get_with(key.clone(), guarded).await;
            reads += 1;
            match loaded {
                Ok((loaded, weight)) => return Ok((loaded, self.hold(key, weight, delete).map_err(doing)?)),
                // It was another statement's memory.
                Err(error) if error.kind == Kind::Exhausted && !own && reads < READS => {}
                Err(error) => {
                    let mut error = Error::clone(&error);
                    if error.kind == Kind::NotFound {
                        // The table's metadata says that it is there.
                        error.kind = Kind::Corrupt;
                    }
                    return Err(doing(error));
                }
            }
        }
    }

    /// Counts what is in use among the statement's memory, unless it is already.
    fn hold(&self, key: Key, bytes: u32, delete: &DeleteFile) -> Result<Arc<MemoryReservation>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = held.get(&key).and_then(Weak::upgrade) {
            return Ok(memory);
        }
        if held.len() >= MANY_HELD {
            held.retain(|_, memory| memory.strong_count() > 0);
        }
        let memory = self.memory(&delete.location);
        memory.try_grow(bytes as usize)?;
        let memory = Arc::new(memory);
        held.insert(key, Arc::downgrade(&memory));
        Ok(memory)
    }

    async fn read_vector(&self, delete: &DeleteFile, of: &str, offset: u64, bytes: u64) -> Result<Positions> {
        let end = offset.checked_add(bytes).filter(|_| bytes <= MAX_LOADED_BYTES as u64);
        let Some(end) = end else {
            return Err(Error::corrupt(format!("a deletion vector is said to have {bytes} bytes at {offset}")));
        };
        let object = self.storage.resolve(&delete.location)?;
        // What is read, and what becomes of it.
        let memory = self.memory(&delete.location);
        memory.try_grow(2 * usize::try_from(bytes).unwrap_or(MAX_LOADED_BYTES))?;
        let read = object.store.get_range(&object.path, offset..end).await;
        let read = read.map_err(|e| Error::object_store("reading", &delete.location, &e))?;
        let positions = decode_vector(&read).ok_or_else(|| {
            Error::corrupt(format!("what is at {offset} is no deletion vector, or a damaged one, of {bytes} bytes"))
        })?;
        if positions.len() != delete.rows {
            let (says, has) = (delete.rows, positions.len());
            return Err(Error::corrupt(format!(
                "the deletion vector at {offset} has {has} rows, and should have {says}"
            )));
        }
        Ok(Positions { of: HashMap::from([(of.to_owned(), Arc::new(positions))]) })
    }

    async fn read_positions(&self, delete: &DeleteFile) -> Result<Positions> {
        let builder = self.open(delete).await?;
        let wanted = [(PATH_ID, "file_path"), (POSITION_ID, "pos")];
        let places = wanted.map(|(id, name)| {
            let fields = builder.schema().fields();
            let by_id = fields.iter().position(|field| field_id(field) == Some(id));
            by_id.or_else(|| fields.iter().position(|field| field.name() == name))
        });
        let [Some(path), Some(position)] = places else {
            return Err(Error::corrupt("it has not the columns of position deletes"));
        };
        let mask = ProjectionMask::roots(builder.parquet_schema(), [path, position]);
        // Columns come in the order of the file.
        let (path, position) = if path < position { (0, 1) } else { (1, 0) };
        let mut batches = builder.with_projection(mask).build().map_err(unreadable)?;
        let mut of: HashMap<String, RoaringTreemap> = HashMap::new();
        let memory = self.memory(&delete.location);
        let mut bytes = 0;
        while let Some(batch) = batches.try_next().await.map_err(unreadable)? {
            let paths = cast(batch.column(path), &DataType::Utf8)?;
            let paths = paths.as_string::<i32>();
            let positions = cast(batch.column(position), &DataType::Int64)?;
            let positions = positions.as_primitive::<Int64Type>();
            if paths.null_count() + positions.null_count() > 0 {
                return Err(Error::corrupt("a position delete is null"));
            }
            bytes += batch.num_rows() * POSITION_BYTES;
            // Sorted by file: so the same path comes many times in a row.
            let mut row = 0;
            while row < batch.num_rows() {
                let path = paths.value(row);
                if !of.contains_key(path) {
                    bytes += path.len() + ENTRY_BYTES;
                }
                let into = of.entry(path.to_owned()).or_default();
                while row < batch.num_rows() && paths.value(row) == path {
                    let position = u64::try_from(positions.value(row))
                        .map_err(|_| Error::corrupt(format!("{} is no position", positions.value(row))))?;
                    into.insert(position);
                    row += 1;
                }
            }
            check_bytes(bytes)?;
            memory.try_resize(bytes)?;
        }
        Ok(Positions { of: of.into_iter().map(|(path, positions)| (path, Arc::new(positions))).collect() })
    }

    async fn read_equality(&self, delete: &DeleteFile, columns: &[EqualityColumn]) -> Result<EqualitySet> {
        let builder = self.open(delete).await?;
        let fields = builder.schema().fields().clone();
        let place = |column: &EqualityColumn| {
            let place = fields.iter().position(|field| field_id(field) == Some(column.id));
            place.ok_or_else(|| Error::corrupt(format!("it has no column with the id {} ({})", column.id, column.name)))
        };
        let places = columns.iter().map(place).collect::<Result<Vec<_>>>()?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), places.iter().copied());
        let mut batches = builder.with_projection(mask).build().map_err(unreadable)?;
        let converter = converter(columns)?;
        let mut set = EqualitySet::default();
        let memory = self.memory(&delete.location);
        let mut bytes = 0;
        while let Some(batch) = batches.try_next().await.map_err(unreadable)? {
            let columns = columns.iter().zip(&places).map(|(column, place)| {
                // Columns come in the order of the file.
                let index = places.iter().filter(|other| *other < place).count();
                cast(batch.column(index), &column.data_type)
            });
            let rows = converter.convert_columns(&columns.collect::<Result<Vec<_>>>()?).map_err(unreadable_arrow)?;
            for row in rows.iter() {
                bytes += row.as_ref().len() + ENTRY_BYTES;
                set.rows.insert(row.as_ref().into());
            }
            check_bytes(bytes)?;
            memory.try_resize(bytes)?;
        }
        Ok(set)
    }

    async fn open(&self, delete: &DeleteFile) -> Result<ParquetRecordBatchStreamBuilder<Box<dyn AsyncFileReader>>> {
        let object = self.storage.resolve(&delete.location)?;
        let mut file = PartitionedFile::new("", delete.size_bytes);
        file.object_meta.location = object.path;
        let readers = CheckedReaders::new(object.store, self.footers.clone());
        let reader: Box<dyn AsyncFileReader> =
            readers.create_reader(0, file, None, &ExecutionPlanMetricsSet::new()).map_err(Error::from)?;
        ParquetRecordBatchStreamBuilder::new(reader).await.map_err(unreadable)
    }
}

fn weight(bytes: usize) -> u32 {
    u32::try_from(bytes.max(1024)).unwrap_or(u32::MAX)
}

fn check_bytes(bytes: usize) -> Result<()> {
    match bytes <= MAX_LOADED_BYTES {
        true => Ok(()),
        false => Err(Error::exhausted(format!(
            "more than {MAX_LOADED_BYTES} bytes of memory are needed for them; rewrite the table's data files"
        ))),
    }
}

fn unreadable(error: parquet::errors::ParquetError) -> Error {
    let error = Error::from(DataFusionError::from(error));
    if let Some(why) = unmatched(&error) {
        return Error::corrupt(format_args!("it is damaged: {why}"));
    }
    match error.kind {
        Kind::Internal | Kind::Invalid => Error::corrupt(error.message),
        _ => error,
    }
}

fn unreadable_arrow(error: arrow::error::ArrowError) -> Error {
    Error::corrupt(error)
}

fn cast(column: &ArrayRef, data_type: &DataType) -> Result<ArrayRef> {
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(column, data_type, &strict).map_err(unreadable_arrow)
}

/// Deletion vectors are framed: length, magic, bitmap, checksum of magic and bitmap.
fn decode_vector(bytes: &[u8]) -> Option<RoaringTreemap> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (body, checksum) = rest.split_last_chunk::<4>()?;
    let is_whole =
        u32::from_be_bytes(*length) as usize == body.len() && bytes.len() == VECTOR_FRAME_BYTES - 4 + body.len();
    if !is_whole || crc32fast::hash(body) != u32::from_be_bytes(*checksum) {
        return None;
    }
    let bitmap = body.strip_prefix(&VECTOR_MAGIC)?;
    RoaringTreemap::deserialize_from(bitmap).ok()
}

/// Which row groups and rows are to be read when the rows at `deleted` are not.
pub fn access_plan(footer: &ParquetMetaData, deleted: &RoaringTreemap) -> ParquetAccessPlan {
    let mut positions = deleted.iter().peekable();
    let mut end = 0_u64;
    let mut groups = Vec::with_capacity(footer.num_row_groups());
    for group in footer.row_groups() {
        let rows = u64::try_from(group.num_rows()).unwrap_or(0);
        let start = end;
        end += rows;
        let mut selectors = Vec::new();
        let (mut at, mut gone) = (start, 0);
        while let Some(position) = positions.next_if(|position| *position < end) {
            if position > at {
                selectors.push(RowSelector::select(usize::try_from(position - at).unwrap_or(usize::MAX)));
            }
            match selectors.last_mut() {
                Some(last) if last.skip => last.row_count += 1,
                _ => selectors.push(RowSelector::skip(1)),
            }
            at = position + 1;
            gone += 1;
        }
        groups.push(match gone {
            0 => RowGroupAccess::Scan,
            gone if gone == rows => RowGroupAccess::Skip,
            _ => {
                if at < end {
                    selectors.push(RowSelector::select(usize::try_from(end - at).unwrap_or(usize::MAX)));
                }
                RowGroupAccess::Selection(RowSelection::from(selectors))
            }
        });
    }
    ParquetAccessPlan::new(groups)
}

fn converter(columns: &[EqualityColumn]) -> Result<RowConverter> {
    let fields = columns.iter().map(|column| SortField::new(column.data_type.clone())).collect();
    RowConverter::new(fields).map_err(|e| Error::not_supported(format!("equality deletes cannot be applied: {e}")))
}

/// Equality deletes by the same columns.
pub struct EqualityFilter {
    converter: RowConverter,
    /// Where the columns are in a batch.
    columns: Vec<usize>,
    sets: Vec<Held<EqualitySet>>,
}

impl fmt::Debug for EqualityFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: usize = self.sets.iter().map(|set| set.rows.len()).sum();
        write!(f, "EqualityFilter({rows} rows)")
    }
}

impl EqualityFilter {
    pub fn new(columns: &[EqualityColumn], places: Vec<usize>, sets: Vec<Held<EqualitySet>>) -> Result<Self> {
        Ok(Self { converter: converter(columns)?, columns: places, sets })
    }

    /// The rows of `batch` that none of the sets names.
    pub fn apply(&self, batch: &RecordBatch) -> DfResult<RecordBatch> {
        let columns: Vec<ArrayRef> = self.columns.iter().map(|index| batch.column(*index).clone()).collect();
        let rows = self.converter.convert_columns(&columns)?;
        let stays = |row: &[u8]| !self.sets.iter().any(|set| set.rows.contains(row));
        let keep: BooleanArray = rows.iter().map(|row| Some(stays(row.as_ref()))).collect();
        Ok(filter_record_batch(batch, &keep)?)
    }
}

/// The columns that equality deletes by `ids` compare, in the order of their ids.
///
/// # Errors
/// `NotSupported` for a column inside of another.
pub fn equality_columns(ids: &[i32], schema: &Schema) -> Result<Vec<EqualityColumn>> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    let column = |id: i32| {
        let field = schema.fields().iter().find(|field| field_id(field) == Some(id));
        let field = field.filter(|field| !field.data_type().is_nested()).ok_or_else(|| {
            Error::not_supported(format!("equality deletes by the column with the id {id}, which is nested or unknown"))
        })?;
        Ok(EqualityColumn { id, name: field.name().clone(), data_type: field.data_type().clone() })
    };
    ids.into_iter().map(column).collect()
}

#[cfg(test)]
mod tests {
    use parquet::file::metadata::{FileMetaData, RowGroupMetaData};
    use parquet::schema::types::{SchemaDescriptor, Type};

    use super::*;

    /// A footer of row groups with so many rows.
    fn footer(groups: &[i64]) -> ParquetMetaData {
        let root = Arc::new(Type::group_type_builder("schema").build().unwrap());
        let schema = Arc::new(SchemaDescriptor::new(root));
        let file = FileMetaData::new(1, groups.iter().sum(), None, None, schema.clone(), None);
        let group = |rows: &i64| RowGroupMetaData::builder(schema.clone()).set_num_rows(*rows).build().unwrap();
        ParquetMetaData::new(file, groups.iter().map(group).collect())
    }

    #[test]
    fn deleted_positions_become_rows_to_read() {
        let deleted: RoaringTreemap = [0, 1, 3, 10, 11, 12, 13, 14, 24, 30].into_iter().collect();
        let plan = access_plan(&footer(&[10, 5, 10, 5]), &deleted);
        let (skip, select) = (RowSelector::skip, RowSelector::select);
        assert_eq!(
            plan.into_inner(),
            [
                RowGroupAccess::Selection(RowSelection::from(vec![skip(2), select(1), skip(1), select(6)])),
                RowGroupAccess::Skip,
                RowGroupAccess::Selection(RowSelection::from(vec![select(9), skip(1)])),
                RowGroupAccess::Scan,
            ]
        );
    }

    #[test]
    fn a_deletion_vector_is_checked() {
        let positions: RoaringTreemap = [3, 5, 1 << 40].into_iter().collect();
        let vector = crate::table::deletes::encode_vector(&positions).unwrap();
        assert_eq!(decode_vector(&vector), Some(positions));
        for damaged in 0..vector.len() {
            let mut bytes = vector.clone();
            bytes[damaged] ^= 1;
            assert_eq!(decode_vector(&bytes), None, "byte {damaged}");
            assert_eq!(decode_vector(&vector[..damaged]), None, "cut at {damaged}");
        }
    }
}
