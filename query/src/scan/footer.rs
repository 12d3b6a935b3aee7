//! Parquet footers, checked before the parquet crate relies on them.
//!
//! The crate takes a file at its word: a footer longer than the file or a column at a negative offset panics, and a list
//! that claims two thousand million elements, or a column beyond the end of the file, asks for memory until the process
//! ends. So all that lake reads of Parquet comes through [`read`], and what it returns holds:
//! - the footer lies within the file, its lists within the footer, and its schema is not deeper than
//!   [`thrift::MAX_DEPTH`];
//! - every column, page index and bloom filter it speaks of lies within the file;
//! - of a page index that was read ([`check_page_index`]): a column's pages lie in the column, one after the other;
//! - the crate can decode it, and make Arrow's schema of it, without a panic.
//!
//! What is in the pages is not known before they are read.

use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Once};

use bytes::Bytes;
use datafusion::execution::cache::cache_manager::{CachedFileMetadataEntry, FileMetadataCache};
use datafusion_datasource_parquet::CachedParquetMetaData;
use futures::FutureExt;
use futures::future::{OptionFuture, try_join};
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use parquet::DecodeResult;
use parquet::arrow::parquet_to_arrow_schema;
use parquet::file::metadata::{
    ColumnChunkMetaData, PageIndexPolicy, ParquetMetaData, ParquetMetaDataPushDecoder, ParquetMetaDataReader,
};

use super::thrift::{self, I32, I64, LIST, Walker};
use crate::error::{Error, Kind, Result, words_of_panic};
use crate::storage::MAX_METADATA_BYTES;

/// Read at once from the end of a file: few footers are longer.
const TAIL_BYTES: u64 = 512 << 10;
const MAGIC: [u8; 4] = *b"PAR1";
const MAGIC_ENCRYPTED: [u8; 4] = *b"PARE";
/// The magic at both ends, and the length of the metadata.
const FRAME_BYTES: u64 = 12;
/// Most row groups, which the format numbers with 16 bits.
const MAX_ROW_GROUPS: usize = 1 << 15;
/// The shortest bloom filter: the shortest header and one block.
const BLOOM_FILTER_BYTES: i32 = 15 + 32;

/// Fields of the format's structs, by their ids.
mod field {
    pub const FILE_SCHEMA: i16 = 2;
    pub const FILE_ROW_GROUPS: i16 = 4;
    pub const SCHEMA_CHILDREN: i16 = 5;
    pub const OFFSET_INDEX_PAGES: i16 = 1;
    pub const PAGE_OFFSET: i16 = 1;
    pub const PAGE_BYTES: i16 = 2;
    pub const PAGE_FIRST_ROW: i16 = 3;
}

/// What the footer of `file` says, from `cache` or from the file, and with its page index, if it has one and
/// `with_page_index` asks for it.
///
/// # Errors
/// `Corrupt` if the file is damaged or not a Parquet file, `NotSupported` if it is encrypted, and those of reading; each
/// names the file.
pub async fn read(
    store: &dyn ObjectStore,
    file: &ObjectMeta,
    cache: &FileMetadataCache,
    with_page_index: bool,
) -> Result<Arc<ParquetMetaData>> {
    if let Some(cached) = usable(file, cache, with_page_index) {
        return Ok(cached);
    }
    match read_anew(store, file, with_page_index).await {
        Ok(metadata) => {
            let cached = Arc::new(CachedParquetMetaData::new(metadata.clone()));
            cache.put(&file.location, CachedFileMetadataEntry::new(file.clone(), cached));
            Ok(metadata)
        }
        Err(error) if matches!(error.kind, Kind::Corrupt | Kind::Storage) => {
            Err(wrong_size(store, file).await.unwrap_or(error))
        }
        Err(error) => Err(error),
    }
}

async fn read_anew(store: &dyn ObjectStore, file: &ObjectMeta, with_page_index: bool) -> Result<Arc<ParquetMetaData>> {
    let tail_start = file.size.saturating_sub(TAIL_BYTES);
    let head = OptionFuture::from((tail_start > 0).then(|| fetch(store, file, 0..MAGIC.len() as u64)));
    let (tail, head) = try_join(fetch(store, file, tail_start..file.size), head.map(Option::transpose)).await?;
    let range = metadata_range(file, head.as_ref().unwrap_or(&tail), &tail)?;
    let within_tail = |range: &Range<u64>| {
        let start = usize::try_from(range.start.checked_sub(tail_start)?).ok()?;
        let end = usize::try_from(range.end.checked_sub(tail_start)?).ok()?;
        (start <= end && end <= tail.len()).then(|| tail.slice(start..end))
    };
    let bytes = match within_tail(&range) {
        Some(bytes) => bytes,
        None => fetch(store, file, range).await?,
    };
    let mut metadata = decode(file, &bytes)?;
    if with_page_index && let Some(range) = page_index_range(&metadata) {
        let bytes = match within_tail(&range) {
            Some(bytes) => bytes,
            None => fetch(store, file, range.clone()).await?,
        };
        metadata = with_index(file, metadata, range, bytes)?;
    }
    Ok(Arc::new(metadata))
}

/// The reason why a file cannot be read that has not the size that it should have: what a store says of a range that is not there, and a
/// footer that is looked for in another place, do not tell it. `None`: it has.
pub async fn wrong_size(store: &dyn ObjectStore, file: &ObjectMeta) -> Option<Error> {
    let found = store.head(&file.location).await.ok()?.size;
    (found != file.size).then(|| {
        damaged(
            file,
            format_args!(
                "it has {found} bytes, and {} are expected, by the table's manifest or when it was listed: it was cut short or written \
                 over; put the whole file back, or read a snapshot that does not have it (FOR VERSION AS OF), to which \
                 system.rollback_to_snapshot goes back",
                file.size
            ),
        )
    })
}

/// Whether [`read`] reads nothing.
pub fn is_cached(file: &ObjectMeta, cache: &FileMetadataCache, with_page_index: bool) -> bool {
    usable(file, cache, with_page_index).is_some()
}

fn usable(file: &ObjectMeta, cache: &FileMetadataCache, with_page_index: bool) -> Option<Arc<ParquetMetaData>> {
    let whole = |cached: &ParquetMetaData| {
        !with_page_index || cached.offset_index().is_some() || page_index_range(cached).is_none()
    };
    cached(file, cache).filter(|cached| whole(cached))
}

/// Where the page indexes of all columns lie, with what is between them.
pub fn page_index_range(metadata: &ParquetMetaData) -> Option<Range<u64>> {
    let columns = metadata.row_groups().iter().flat_map(|group| group.columns());
    let indexes = columns.flat_map(|column| [column_index(column), offset_index(column)]).flatten();
    indexes.reduce(|all, index| all.start.min(index.start)..all.end.max(index.end))
}

/// Checks the page index of `file`, which `bytes` at `range` are.
///
/// # Errors
/// `Corrupt`, naming the file.
pub fn check_page_index(file: &ObjectMeta, metadata: &ParquetMetaData, range: &Range<u64>, bytes: &[u8]) -> Result<()> {
    let within = |index: Range<u64>| {
        let start = usize::try_from(index.start.checked_sub(range.start)?).ok()?;
        let end = usize::try_from(index.end.checked_sub(range.start)?).ok()?;
        bytes.get(start..end)
    };
    for group in metadata.row_groups() {
        for column in group.columns() {
            let Some(index) = offset_index(column) else { continue };
            chunk(column)
                .zip(within(index))
                .and_then(|(chunk, bytes)| check_pages(bytes, &chunk, group.num_rows()))
                .ok_or_else(|| damaged(file, format_args!("the page index of {} is not one", column.column_path())))?;
        }
    }
    Ok(())
}

/// Checks that `bytes` are all that was asked for: a store cuts a range short at the end of an object.
///
/// # Errors
/// `Corrupt`, naming the file.
pub fn check_whole(file: &ObjectMeta, range: &Range<u64>, bytes: &[u8]) -> Result<()> {
    match range.start + bytes.len() as u64 == range.end {
        true => Ok(()),
        false => Err(damaged(file, format_args!("it is shorter than the {} bytes it should have", file.size))),
    }
}

/// An error that says of a file that it is damaged.
pub fn damaged(file: &ObjectMeta, why: impl std::fmt::Display) -> Error {
    Error::corrupt(format!("{} is damaged or not a Parquet file: {why}", name(file)))
}

fn name(file: &ObjectMeta) -> String {
    format!("/{}", file.location)
}

fn cached(file: &ObjectMeta, cache: &FileMetadataCache) -> Option<Arc<ParquetMetaData>> {
    let entry = cache.get(&file.location).filter(|entry| entry.is_valid_for(file))?;
    let metadata: &CachedParquetMetaData = entry.file_metadata.as_any().downcast_ref()?;
    Some(metadata.parquet_metadata().clone())
}

async fn fetch(store: &dyn ObjectStore, file: &ObjectMeta, range: Range<u64>) -> Result<Bytes> {
    if file.size < FRAME_BYTES {
        return Err(damaged(file, format_args!("it has {} bytes, and the shortest has {FRAME_BYTES}", file.size)));
    }
    let read = store.get_range(&file.location, range.clone()).await;
    let bytes = read.map_err(|e| Error::object_store("reading", &name(file), &e))?;
    check_whole(file, &range, &bytes)?;
    Ok(bytes)
}

/// Where the metadata lies in a file that begins with `head` and ends with `tail`.
fn metadata_range(file: &ObjectMeta, head: &[u8], tail: &[u8]) -> Result<Range<u64>> {
    let Some(&[a, b, c, d, magic @ ..]) = tail.last_chunk::<8>() else {
        return Err(damaged(file, "it has no footer"));
    };
    match magic {
        MAGIC_ENCRYPTED => return Err(Error::not_supported(format!("{} cannot be read: it is encrypted", name(file)))),
        MAGIC => {}
        _ => return Err(damaged(file, "it does not end with PAR1")),
    }
    if !head.starts_with(&MAGIC) {
        return Err(damaged(file, "it does not begin with PAR1"));
    }
    let bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
    let room = file.size.saturating_sub(FRAME_BYTES);
    if bytes == 0 {
        return Err(damaged(file, "its metadata is empty"));
    }
    if bytes > room {
        return Err(damaged(
            file,
            format_args!(
                "its end claims {bytes} bytes of metadata, and the file has {} bytes in all, with room for {room}",
                file.size
            ),
        ));
    }
    if bytes > MAX_METADATA_BYTES {
        let most = MAX_METADATA_BYTES;
        return Err(damaged(file, format_args!("{bytes} bytes is more than metadata has (at most {most})")));
    }
    let start = MAGIC.len() as u64 + room - bytes;
    Ok(start..start + bytes)
}

fn decode(file: &ObjectMeta, bytes: &[u8]) -> Result<ParquetMetaData> {
    check_thrift(bytes).ok_or_else(|| damaged(file, "its metadata is not as the format says"))?;
    let metadata = guarded(file, || {
        let metadata = ParquetMetaDataReader::decode_metadata(bytes)?;
        let says = metadata.file_metadata();
        parquet_to_arrow_schema(says.schema_descr(), says.key_value_metadata())?;
        Ok(metadata)
    })?;
    check_places(&metadata, file.size).map_err(|why| damaged(file, why))?;
    Ok(metadata)
}

fn with_index(
    file: &ObjectMeta,
    metadata: ParquetMetaData,
    range: Range<u64>,
    bytes: Bytes,
) -> Result<ParquetMetaData> {
    check_page_index(file, &metadata, &range, &bytes)?;
    let decoded = guarded(file, || {
        let mut decoder = ParquetMetaDataPushDecoder::try_new_with_metadata(file.size, metadata)?
            .with_page_index_policy(PageIndexPolicy::Optional);
        decoder.push_range(range, bytes)?;
        decoder.try_decode()
    })?;
    match decoded {
        DecodeResult::Data(metadata) => Ok(metadata),
        DecodeResult::NeedsData(_) | DecodeResult::Finished => Err(damaged(file, "its page index is not whole")),
    }
}

thread_local! {
    /// Whether a panic on this thread is one that [`guarded`] turns into an error.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs code that may panic when what it decodes is damaged. That is an error then, and not reported as a defect.
fn guarded<T>(file: &ObjectMeta, decode: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                report(panic);
            }
        }));
    });
    GUARDED.set(true);
    let decoded = catch_unwind(AssertUnwindSafe(decode));
    GUARDED.set(false);
    match decoded {
        Ok(decoded) => decoded.map_err(|e| damaged(file, e)),
        Err(panic) => Err(damaged(file, words_of_panic(panic.as_ref()))),
    }
}

/// Whether the metadata can be parsed within bounds.
fn check_thrift(metadata: &[u8]) -> Option<()> {
    Walker::new(metadata).fields(|walker, id, kind| match (id, kind) {
        (field::FILE_SCHEMA, LIST) => check_schema(walker),
        (field::FILE_ROW_GROUPS, LIST) => {
            let groups = walker.structs().filter(|groups| *groups <= MAX_ROW_GROUPS)?;
            (0..groups).try_for_each(|_| walker.skip(thrift::STRUCT))
        }
        (field::FILE_SCHEMA | field::FILE_ROW_GROUPS, _) => None,
        _ => walker.skip(kind),
    })
}

/// Whether the elements, which are the schema depth first, make one tree.
fn check_schema(walker: &mut Walker<'_>) -> Option<()> {
    let elements = walker.structs()?;
    // Of every group on the way to the next element: how many children are still to come.
    let mut awaited = vec![1_usize];
    for left in (0..elements).rev() {
        while awaited.pop_if(|children| *children == 0).is_some() {}
        *awaited.last_mut()? -= 1;
        let mut children = 0;
        walker.fields(|walker, id, kind| match (id, kind) {
            (field::SCHEMA_CHILDREN, I32) => {
                children = usize::try_from(walker.int()?).ok()?;
                Some(())
            }
            (field::SCHEMA_CHILDREN, _) => None,
            _ => walker.skip(kind),
        })?;
        if children > left || awaited.len() > thrift::MAX_DEPTH {
            return None;
        }
        awaited.push(children);
    }
    awaited.iter().all(|children| *children == 0).then_some(())
}

/// Whether all that the metadata speaks of is in a file of `size` bytes.
fn check_places(metadata: &ParquetMetaData, size: u64) -> Result<(), String> {
    let mut rows = 0_i64;
    for (number, group) in metadata.row_groups().iter().enumerate() {
        rows = Some(group.num_rows())
            .filter(|rows| *rows >= 0)
            .and_then(|more| rows.checked_add(more))
            .ok_or_else(|| format!("row group {number} has {} rows", group.num_rows()))?;
        for column in group.columns() {
            let bloom_bytes = column.bloom_filter_length();
            let bloom = column.bloom_filter_offset().map(|offset| span(offset, bloom_bytes.unwrap_or_default()));
            let offset_index = column.offset_index_offset().zip(column.offset_index_length());
            let column_index = column.column_index_offset().zip(column.column_index_length());
            let indexes = [offset_index, column_index].map(|place| place.map(|(offset, bytes)| span(offset, bytes)));
            let mut places = [Some(chunk(column)), bloom.clone()].into_iter().chain(indexes).flatten();
            if !places.all(|place| place.is_some_and(|place| place.end <= size)) {
                return Err(format!(
                    "column {} of row group {number} is said to be outside of it",
                    column.column_path()
                ));
            }
            if bloom.is_some() && bloom_bytes.is_some_and(|bytes| bytes < BLOOM_FILTER_BYTES) {
                return Err(format!("the bloom filter of column {} is too short for one", column.column_path()));
            }
        }
        for sorting in group.sorting_columns().into_iter().flatten() {
            if !usize::try_from(sorting.column_idx).is_ok_and(|column| column < group.num_columns()) {
                return Err(format!("row group {number} is sorted by a column that is not there"));
            }
        }
    }
    Ok(())
}

/// Whether an offset index names pages that follow each other, in a column at `chunk` and a row group of `rows`.
fn check_pages(offset_index: &[u8], chunk: &Range<u64>, rows: i64) -> Option<()> {
    let (mut least_offset, mut least_row) = (chunk.start, 0);
    Walker::new(offset_index).fields(|walker, id, kind| {
        if id != field::OFFSET_INDEX_PAGES {
            return walker.skip(kind);
        }
        let pages = walker.structs().filter(|_| kind == LIST)?;
        (0..pages).try_for_each(|_| {
            let (mut offset, mut bytes, mut row) = (None, None, None);
            walker.fields(|walker, id, kind| {
                let value = match (id, kind) {
                    (field::PAGE_OFFSET, I64) => &mut offset,
                    (field::PAGE_BYTES, I32) => &mut bytes,
                    (field::PAGE_FIRST_ROW, I64) => &mut row,
                    _ => return walker.skip(kind),
                };
                *value = Some(walker.int()?);
                Some(())
            })?;
            let page = span(offset?, bytes?).filter(|page| page.start >= least_offset && page.end <= chunk.end)?;
            let row = row.filter(|row| (least_row..=rows).contains(row))?;
            (least_offset, least_row) = (page.end, row);
            Some(())
        })
    })
}

fn span(offset: i64, bytes: impl Into<i64>) -> Option<Range<u64>> {
    let start = u64::try_from(offset).ok()?;
    Some(start..start.checked_add(u64::try_from(bytes.into()).ok()?)?)
}

/// Where a column's pages lie.
fn chunk(column: &ColumnChunkMetaData) -> Option<Range<u64>> {
    span(column.dictionary_page_offset().unwrap_or(column.data_page_offset()), column.compressed_size())
}

fn column_index(column: &ColumnChunkMetaData) -> Option<Range<u64>> {
    span(column.column_index_offset()?, column.column_index_length()?)
}

fn offset_index(column: &ColumnChunkMetaData) -> Option<Range<u64>> {
    span(column.offset_index_offset()?, column.offset_index_length()?)
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Decimal128Array, Int64Array, RecordBatch, StringArray};
    use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::WriterProperties;

    use super::*;

    /// Two row groups of several pages each, with page indexes and bloom filters.
    fn sample(rows: i64) -> Vec<u8> {
        let names: Vec<Option<String>> = (0..rows).map(|row| (row % 7 > 0).then(|| format!("name {row}"))).collect();
        let spread = (0..rows).map(|row| row.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64.cast_signed()));
        let decimals = Decimal128Array::from_iter_values((0..rows).map(i128::from)).with_precision_and_scale(30, 2);
        let batch = RecordBatch::try_from_iter([
            ("spread", Arc::new(Int64Array::from_iter_values(spread)) as ArrayRef),
            ("name", Arc::new(StringArray::from(names))),
            ("decimal", Arc::new(decimals.unwrap())),
        ]);
        let properties = WriterProperties::builder()
            .set_max_row_group_row_count(Some(usize::try_from(rows).unwrap().div_ceil(2)))
            .set_data_page_row_count_limit(20)
            .set_write_batch_size(10)
            .set_bloom_filter_enabled(true)
            .set_bloom_filter_max_ndv(10)
            .build();
        let mut bytes = Vec::new();
        let batch = batch.unwrap();
        let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        bytes
    }

    struct Stored {
        store: InMemory,
        file: ObjectMeta,
        cache: Arc<FileMetadataCache>,
    }

    impl Stored {
        async fn new(bytes: &[u8]) -> Self {
            let store = InMemory::new();
            let path = Path::from("a/x.parquet");
            store.put(&path, bytes.to_vec().into()).await.unwrap();
            let file = store.head(&path).await.unwrap();
            Self { store, file, cache: RuntimeEnv::default().cache_manager.get_file_metadata_cache() }
        }

        async fn read(&self, with_page_index: bool) -> Result<Arc<ParquetMetaData>> {
            read(&self.store, &self.file, self.cache.as_ref(), with_page_index).await
        }
    }

    async fn refused(bytes: &[u8]) -> Error {
        Stored::new(bytes).await.read(true).await.unwrap_err()
    }

    /// A file that is nothing but this metadata.
    fn framed(metadata: &[u8]) -> Vec<u8> {
        let length = u32::try_from(metadata.len()).unwrap().to_le_bytes();
        [&MAGIC[..], metadata, &length, &MAGIC].concat()
    }

    #[tokio::test]
    async fn a_good_file_is_read_with_and_without_its_page_index() {
        for rows in [200, 100_000] {
            let bytes = sample(rows);
            assert_eq!(bytes.len() as u64 > TAIL_BYTES, rows > 200);
            let stored = Stored::new(&bytes).await;
            let plain = stored.read(false).await.unwrap();
            assert_eq!(plain.file_metadata().num_rows(), rows);
            assert!(plain.offset_index().is_none() && page_index_range(&plain).is_some());
            let whole = stored.read(true).await.unwrap();
            let pages = whole.offset_index().unwrap()[1][1].page_locations().len();
            assert!(pages > 1 && whole.column_index().is_some());
            stored.store.delete(&stored.file.location).await.unwrap();
            assert!(Arc::ptr_eq(&stored.read(false).await.unwrap(), &whole), "from the cache");
        }
    }

    fn cache_of(bytes: usize) -> Arc<FileMetadataCache> {
        let runtime = RuntimeEnvBuilder::new().with_metadata_cache_limit(bytes).build().unwrap();
        runtime.cache_manager.get_file_metadata_cache()
    }

    fn held(cache: &FileMetadataCache) -> usize {
        cache.list_entries().values().map(|entry| entry.size_bytes).sum()
    }

    #[tokio::test]
    async fn footers_are_kept_within_the_bytes_of_their_cache() {
        let (store, bytes) = (InMemory::new(), sample(200));
        let mut files = Vec::new();
        for number in 0..20 {
            let path = Path::from(format!("a/{number:02}.parquet"));
            store.put(&path, bytes.clone().into()).await.unwrap();
            files.push(store.head(&path).await.unwrap());
        }
        let roomy = cache_of(64 << 20);
        let footer = read(&store, &files[0], roomy.as_ref(), true).await.unwrap();
        let one = held(roomy.as_ref());
        assert!(one >= footer.memory_size(), "{one} bytes of {}, with its page index", footer.memory_size());
        let limit = 5 * one + one / 2;
        let cache = cache_of(limit);
        for file in &files {
            read(&store, file, cache.as_ref(), true).await.unwrap();
            assert!(held(cache.as_ref()) <= limit);
        }
        let kept: Vec<bool> = files.iter().map(|file| is_cached(file, cache.as_ref(), true)).collect();
        assert_eq!(kept, [[false; 15].as_slice(), &[true; 5]].concat(), "the last ones");
        // What is larger than all of it is read, and not kept.
        let small = cache_of(one / 2);
        read(&store, &files[0], small.as_ref(), true).await.unwrap();
        assert_eq!(small.len(), 0);
    }

    #[tokio::test]
    async fn what_is_not_framed_as_parquet_is_refused_by_name() {
        let good = sample(200);
        let end = good.len();
        let with_length = |length: u32| [&good[..end - 8], &length.to_le_bytes(), &MAGIC].concat();
        for (bytes, why) in [
            (vec![], "0 bytes"),
            (b"PAR1".to_vec(), "4 bytes"),
            (b"PAR1PAR1".to_vec(), "8 bytes"),
            (b"PAR1\0\0\0\0PAR1".to_vec(), "empty"),
            (
                b"PAR1\xff\xff\xff\xffPAR1".to_vec(),
                "claims 4294967295 bytes of metadata, and the file has 12 bytes in all, with room for 0",
            ),
            (with_length(u32::MAX), "claims 4294967295"),
            (with_length(u32::try_from(end - 11).unwrap()), "with room for"),
            (with_length(u32::try_from(end - 12).unwrap()), "metadata"),
            (with_length(1), "Required field version is missing"),
            (good[..end - 1].to_vec(), "does not end with PAR1"),
            (good[1..].to_vec(), "does not begin with PAR1"),
            (vec![b'x'; 4096], "does not end with PAR1"),
        ] {
            let error = refused(&bytes).await;
            assert_eq!(error.kind, Kind::Corrupt, "{error}");
            assert!(error.message.starts_with("/a/x.parquet is damaged") && error.message.contains(why), "{error}");
        }
        let error = refused(&[&good[..end - 4], &MAGIC_ENCRYPTED].concat()).await;
        assert!(error.kind == Kind::NotSupported && error.message.contains("/a/x.parquet"), "{error}");
        assert!(error.message.contains("encrypted"), "{error}");
    }

    #[tokio::test]
    async fn a_file_that_is_not_as_long_as_it_should_be_is_named() {
        let mut stored = Stored::new(&sample(200)).await;
        let found = stored.file.size;
        for expected in [found + 1, found - 1, 2 * found, 20, 1] {
            stored.file.size = expected;
            let error = stored.read(false).await.unwrap_err();
            assert!(error.kind == Kind::Corrupt && error.message.contains("/a/x.parquet"), "{error}");
            assert!(error.message.contains(&format!("it has {found} bytes, and {expected} are expected")), "{error}");
        }
        stored.file.size = found;
        stored.store.delete(&stored.file.location).await.unwrap();
        let error = stored.read(false).await.unwrap_err();
        assert!(error.kind == Kind::NotFound && error.message.contains("/a/x.parquet"), "{error}");
    }

    #[tokio::test]
    async fn a_list_or_a_schema_beyond_its_footer_is_refused_before_room_is_made_for_it() {
        const ENORMOUS: &[u8] = &[0xfe, 0xff, 0xff, 0xff, 0x0f];
        let root = |children: &[u8]| [&[0x48, 1, b'r', 0x15], children, &[0]].concat();
        let leaf: &[u8] = &[0x15, 2, 0x25, 0, 0x18, 1, b'a', 0];
        let group: &[u8] = &[0x35, 0, 0x18, 1, b'g', 0x15, 2, 0];
        let metadata = |elements: &[u8], schema: &[u8], groups: &[u8]| {
            [&[0x15, 2, 0x19], elements, schema, &[0x16, 0, 0x19], groups, &[0]].concat()
        };
        let flat = [root(&[2]), leaf.to_vec()].concat();
        let sound = Stored::new(&framed(&metadata(&[0x2c], &flat, &[0x0c]))).await.read(true).await.unwrap();
        assert_eq!(sound.file_metadata().schema_descr().num_columns(), 1);
        let nested = |groups: u8| {
            let mut schema = root(&[2]);
            (0..groups).for_each(|_| schema.extend(group));
            schema.extend(leaf);
            metadata(&[0xfc, groups + 2], &schema, &[0x0c])
        };
        Stored::new(&framed(&nested(60))).await.read(true).await.unwrap();
        for (what, metadata) in [
            ("row groups", metadata(&[0x2c], &flat, &[&[0xfc], ENORMOUS].concat())),
            ("schema elements", metadata(&[&[0xfc], ENORMOUS].concat(), &flat, &[0x0c])),
            ("children", metadata(&[0x2c], &[root(ENORMOUS), leaf.to_vec()].concat(), &[0x0c])),
            ("fewer children", metadata(&[0x2c], &[root(&[0]), leaf.to_vec()].concat(), &[0x0c])),
            ("depth", nested(100)),
        ] {
            let error = refused(&framed(&metadata)).await;
            assert!(error.kind == Kind::Corrupt && error.message.contains("as the format says"), "{what}: {error}");
        }
    }

    /// Neither a panic nor the end of the process, whatever a byte is replaced with.
    #[tokio::test]
    async fn any_damage_to_a_footer_and_its_page_index_is_survived() {
        let good = sample(200);
        let index = page_index_range(&Stored::new(&good).await.read(false).await.unwrap()).unwrap();
        let mut refused = 0;
        for place in usize::try_from(index.start).unwrap()..good.len() {
            for damage in [0x00, 0x01, 0x7f, 0x80, 0xff, good[place] ^ 0x01, good[place] ^ 0x10, !good[place]] {
                let mut bytes = good.clone();
                bytes[place] = damage;
                if let Err(error) = Stored::new(&bytes).await.read(true).await {
                    assert!(error.message.contains("/a/x.parquet"), "{error}");
                    refused += 1;
                }
            }
        }
        assert!(refused > 1000, "{refused}");
    }
}
