//! A Parquet file that is being written: rows are encoded into a row group in memory, which goes to the store once it is full.
//!
//! Limits, sizes and the way to the store are those of the parquet crate's `AsyncArrowWriter`. It is not that one because every page has
//! a checksum here ([`checksums`]).

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use object_store::buffered::BufWriter;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::{ArrowColumnWriter, ArrowRowGroupWriterFactory, ArrowWriterOptions, compute_leaves};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ParquetMetaData;
use parquet::file::writer::SerializedFileWriter;
use tokio::io::AsyncWriteExt;

use super::checksums::{self, Chunks, SharedChunk};

/// See the module.
pub struct ParquetFile {
    /// Up to the last row group that has ended; what is not on its way to the store yet is in memory.
    file: SerializedFileWriter<Vec<u8>>,
    columns: ArrowRowGroupWriterFactory,
    chunks: Arc<Chunks>,
    schema: SchemaRef,
    open: Option<RowGroup>,
    store: BufWriter,
}

/// The row group that takes rows.
struct RowGroup {
    /// The leaves of all columns, each with its pages.
    columns: Vec<(ArrowColumnWriter, SharedChunk)>,
    /// At least one.
    rows: usize,
}

impl ParquetFile {
    /// Of rows with these columns; `options` say how it is written.
    ///
    /// # Errors
    /// A column of a type that Parquet has not.
    pub fn new(store: BufWriter, schema: SchemaRef, options: ArrowWriterOptions) -> Result<Self> {
        let chunks = Arc::new(Chunks::default());
        let options = options.with_page_store_factory(chunks.clone());
        let writer = ArrowWriter::try_new_with_options(Vec::new(), schema.clone(), options)?;
        let (file, columns) = writer.into_serialized_writer()?;
        Ok(Self { file, columns, chunks, schema, open: None, store })
    }

    /// Adds rows, which have the file's columns. Row groups end where they are full.
    ///
    /// # Errors
    /// Those of encoding and of the store. The file is none then.
    pub async fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        let mut at = 0;
        while at < batch.num_rows() {
            let rows = self.room().clamp(1, batch.num_rows() - at);
            self.encode(&batch.slice(at, rows))?;
            at += rows;
            if self.room() == 0 {
                self.flush().await?;
            }
        }
        Ok(())
    }

    /// Ends the row group, if one is open, and hands it to the store.
    ///
    /// # Errors
    /// As [`ParquetFile::write`].
    pub async fn flush(&mut self) -> Result<()> {
        self.end_row_group()?;
        self.hand_over().await
    }

    /// Ends the file: all of it is in the store then, and nothing more can be written.
    ///
    /// # Errors
    /// As [`ParquetFile::write`].
    pub async fn finish(&mut self) -> Result<ParquetMetaData> {
        self.end_row_group()?;
        let footer = self.file.finish()?;
        self.hand_over().await?;
        self.store.shutdown().await?;
        Ok(footer)
    }

    /// Bytes that the open row group holds in memory, about.
    pub fn memory_size(&self) -> usize {
        self.open.as_ref().map_or(0, |group| group.columns.iter().map(|(column, _)| column.memory_size()).sum())
    }

    /// Bytes that the open row group would have in the file, about.
    pub fn in_progress_size(&self) -> usize {
        self.open.as_ref().map_or(0, RowGroup::bytes)
    }

    /// Bytes of the file so far, without the open row group.
    pub fn bytes_written(&self) -> usize {
        self.file.bytes_written()
    }

    /// How many more rows the open row group takes, or the next one if none is open: of rows as large as those it has.
    fn room(&self) -> usize {
        let properties = self.file.properties();
        let most_rows = properties.max_row_group_row_count().unwrap_or(usize::MAX);
        let Some(group) = &self.open else { return most_rows };
        let rows = most_rows.saturating_sub(group.rows);
        let Some(most_bytes) = properties.max_row_group_bytes() else { return rows };
        let bytes = group.bytes();
        match (bytes / group.rows.max(1), most_bytes.saturating_sub(bytes)) {
            (_, 0) => 0,
            (0, _) => rows,
            (of_a_row, left) => rows.min(left / of_a_row),
        }
    }

    fn encode(&mut self, batch: &RecordBatch) -> Result<()> {
        let group = match &mut self.open {
            Some(group) => group,
            none => {
                let columns = self.columns.create_column_writers(self.file.flushed_row_groups().len())?;
                let chunks = self.chunks.take();
                if columns.len() != chunks.len() {
                    return Err(ParquetError::General("a defect: columns without a place for their pages".to_owned()));
                }
                none.insert(RowGroup { columns: columns.into_iter().zip(chunks).collect(), rows: 0 })
            }
        };
        let mut columns = group.columns.iter_mut();
        for (field, array) in self.schema.fields().iter().zip(batch.columns()) {
            for leaf in compute_leaves(field, array)? {
                let column = columns.next().map(|(column, _)| column);
                column.ok_or_else(|| ParquetError::General("a defect: too many columns".to_owned()))?.write(&leaf)?;
            }
        }
        group.rows += batch.num_rows();
        Ok(())
    }

    fn end_row_group(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let mut group = self.file.next_row_group()?;
        for (column, chunk) in open.columns {
            checksums::append(&mut group, column, &chunk)?;
        }
        group.close()?;
        Ok(())
    }

    async fn hand_over(&mut self) -> Result<()> {
        let bytes = std::mem::take(self.file.inner_mut());
        Ok(self.store.write_all(&bytes).await?)
    }
}

impl RowGroup {
    fn bytes(&self) -> usize {
        self.columns.iter().map(|(column, _)| column.get_estimated_total_bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array, ListArray, StringArray};
    use arrow::compute::concat_batches;
    use arrow::datatypes::Int32Type;
    use bytes::Bytes;
    use object_store::memory::InMemory;
    use object_store::{ObjectStore, ObjectStoreExt};
    use parquet::arrow::arrow_reader::{
        ArrowReaderOptions, ParquetRecordBatchReaderBuilder, RowSelection, RowSelector,
    };
    use parquet::basic::{Compression, ZstdLevel};
    use parquet::file::metadata::{PageIndexPolicy, ParquetMetaDataReader};
    use parquet::file::properties::{WriterProperties, WriterVersion};

    use super::super::checksums::tests::header;
    use super::*;

    /// Numbers, texts with nulls of which some come often, and lists with nulls, some of them empty.
    fn rows(rows: usize) -> RecordBatch {
        let texts = (0..rows).map(|row| match row % 7 {
            0 => None,
            1 => Some(format!("only row {row} has this")),
            kind => Some(format!("kind {kind}")),
        });
        let lists = (0..rows).map(|row| {
            let list = (0..row % 4).map(|item| (item != 1).then_some(i32::try_from(row * 10 + item).unwrap()));
            (row % 5 > 0).then(|| list.collect::<Vec<_>>())
        });
        RecordBatch::try_from_iter_with_nullable([
            ("id", Arc::new(Int64Array::from_iter_values(0..rows as i64)) as ArrayRef, false),
            ("text", Arc::new(StringArray::from_iter(texts)) as _, true),
            ("list", Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists)) as _, true),
        ])
        .unwrap()
    }

    /// The file that becomes of `batch` when it is written in parts, as long as its writer says.
    async fn written(batch: &RecordBatch, properties: WriterProperties) -> Bytes {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let to = BufWriter::new(store.clone(), "x.parquet".into());
        let options = ArrowWriterOptions::new().with_properties(properties);
        let mut file = ParquetFile::new(to, batch.schema(), options).unwrap();
        for start in (0..batch.num_rows()).step_by(110) {
            file.write(&batch.slice(start, 110.min(batch.num_rows() - start))).await.unwrap();
        }
        let footer = file.finish().await.unwrap();
        assert_eq!(footer.file_metadata().num_rows(), batch.num_rows() as i64);
        let bytes = store.get(&"x.parquet".into()).await.unwrap().bytes().await.unwrap();
        assert_eq!(bytes.len(), file.bytes_written());
        bytes
    }

    /// What is read of some rows, by the page index.
    fn read(bytes: &Bytes, selection: Vec<RowSelector>) -> Result<RecordBatch> {
        let options = ArrowReaderOptions::new().with_page_index_policy(PageIndexPolicy::Required);
        let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(bytes.clone(), options)?;
        let schema = builder.schema().clone();
        let batches = builder.with_row_selection(RowSelection::from(selection)).build()?;
        Ok(concat_batches(&schema, &batches.collect::<Result<Vec<_>, _>>()?)?)
    }

    /// The types of a file's pages and where their bodies are: each header lies where the footer and the page index say, has the
    /// checksum of its body, and there is nothing between two pages.
    fn pages(bytes: &Bytes) -> Vec<(i64, std::ops::Range<usize>)> {
        let reader = ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Required);
        let metadata = reader.parse_and_finish(bytes).unwrap();
        let mut pages = Vec::new();
        for (group, index) in metadata.row_groups().iter().zip(metadata.offset_index().unwrap()) {
            for (column, index) in group.columns().iter().zip(index) {
                let (start, length) = column.byte_range();
                let mut at = start;
                let of_data: Vec<_> = index.page_locations().iter().map(|page| page.offset as u64).collect();
                let sizes = index.page_locations().iter().map(|page| page.compressed_page_size as u64);
                let dictionary = of_data[0] - start;
                assert_eq!(column.dictionary_page_offset(), (dictionary > 0).then_some(start as i64));
                assert_eq!(column.data_page_offset() as u64, of_data[0]);
                for (number, size) in (dictionary > 0).then_some(dictionary).into_iter().chain(sizes).enumerate() {
                    let page = &bytes[at as usize..(at + size) as usize];
                    let header = header(page).unwrap();
                    let body = &page[header.bytes..];
                    let path = column.column_path();
                    assert_eq!(header.checksum, Some(crc32fast::hash(body)), "{path}, page {number}: {header:?}");
                    assert_eq!(header.body_bytes, body.len(), "{path}, page {number}: {header:?}");
                    if let Some(data) = number.checked_sub(usize::from(dictionary > 0)) {
                        assert_eq!(at, of_data[data], "{path}");
                    }
                    pages.push((header.page_type, at as usize + header.bytes..(at + size) as usize));
                    at += size;
                }
                assert_eq!(at, start + length);
            }
        }
        pages
    }

    #[tokio::test]
    async fn every_page_has_a_checksum_and_lies_where_the_file_says() {
        let batch = rows(1000);
        let zstd = Compression::ZSTD(ZstdLevel::try_new(3).unwrap());
        for (version, data_page) in [(WriterVersion::PARQUET_1_0, 0), (WriterVersion::PARQUET_2_0, 3)] {
            for dictionary in [true, false] {
                for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, zstd] {
                    let properties = WriterProperties::builder()
                        .set_writer_version(version)
                        .set_dictionary_enabled(dictionary)
                        .set_compression(compression)
                        .set_data_page_row_count_limit(64)
                        .set_write_batch_size(32)
                        .set_max_row_group_row_count(Some(300))
                        .set_bloom_filter_enabled(true);
                    let bytes = written(&batch, properties.build()).await;
                    let what = format!("{version:?}, dictionary {dictionary}, {compression:?}");
                    let kinds: Vec<i64> = pages(&bytes).into_iter().map(|(kind, _)| kind).collect();
                    let dictionaries = kinds.iter().filter(|kind| **kind == 2).count();
                    assert_eq!(dictionaries, if dictionary { 4 * 3 } else { 0 }, "{what}");
                    assert!(
                        kinds.iter().all(|kind| [2, data_page].contains(kind)) && kinds.len() > 4 * 3 * 2,
                        "{what}"
                    );
                    let all = read(&bytes, vec![RowSelector::select(1000)]).unwrap();
                    assert_eq!(all, batch, "{what}");
                    for row in [0, 63, 64, 299, 300, 777, 999] {
                        let one = read(&bytes, vec![RowSelector::skip(row), RowSelector::select(1)]).unwrap();
                        assert_eq!(one, batch.slice(row, 1), "{what}, row {row}");
                    }
                    let builder = ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap();
                    let groups: Vec<i64> =
                        builder.metadata().row_groups().iter().map(|group| group.num_rows()).collect();
                    assert_eq!(groups, [300, 300, 300, 100]);
                    let filter = builder.get_row_group_column_bloom_filter(2, 0).unwrap().unwrap();
                    assert!((600..900_i64).all(|id| filter.check(&id)), "{what}");
                }
            }
        }
    }

    #[tokio::test]
    async fn a_byte_that_has_changed_in_a_page_is_noticed() {
        let batch = rows(20);
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            let bytes = written(&batch, WriterProperties::builder().set_writer_version(version).build()).await;
            for place in pages(&bytes).into_iter().flat_map(|(_, body)| body) {
                let mut damaged = bytes.to_vec();
                damaged[place] ^= 1 << (place % 8);
                let damaged = Bytes::from(damaged);
                let all = ParquetRecordBatchReaderBuilder::try_new(damaged.clone()).unwrap().build().unwrap();
                let all = all.collect::<Result<Vec<_>, _>>().unwrap_err().to_string();
                // A page by the index.
                let some = read(&damaged, vec![RowSelector::skip(1), RowSelector::select(19)]).unwrap_err().to_string();
                assert!(all.contains("CRC") && some.contains("CRC"), "byte {place}: {all}; {some}");
            }
        }
    }

    #[tokio::test]
    async fn a_row_group_ends_at_its_bytes_too() {
        let batch = rows(2000);
        let properties = || WriterProperties::builder().set_dictionary_enabled(false);
        let whole = written(&batch, properties().build()).await.len();
        let bytes = written(&batch, properties().set_max_row_group_bytes(Some(whole / 4)).build()).await;
        let metadata = ParquetMetaDataReader::new().parse_and_finish(&bytes).unwrap();
        let sizes: Vec<i64> = metadata.row_groups().iter().map(|group| group.compressed_size()).collect();
        assert!((4..=8).contains(&sizes.len()), "{whole} bytes: {sizes:?}");
        // What is left of the open pages is estimated.
        assert!(sizes.iter().all(|size| *size as usize <= whole / 3), "{whole} bytes: {sizes:?}");
        assert_eq!(read(&bytes, vec![RowSelector::select(2000)]).unwrap(), batch);
    }
}
