//! Writing data files: a stream of record batches becomes Parquet files of about the target size, each durable before
//! it is named anywhere, and has checksums ([`super::checksums`]).
//!
//! Memory: a writer holds one row group of one file encoded, at most [`ROW_GROUP_BYTES`] and as the statement's memory allows
//! ([`super::memory`]), besides its bloom filters and what its upload has under way. Of a partitioned table a file ends where the partition does; rows that come clustered ([`super::layout`]) make one file, or
//! a few large ones, for each partition.
//! A [`DataFiles`] that is dropped without [`DataFiles::keep`] removes what it names: a statement that fails or is
//! cancelled leaves nothing behind.

use std::collections::HashSet;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use iceberg::spec::{DataFile, Schema, Struct, TableMetadata};
use object_store::buffered::BufWriter;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::file::properties::WriterProperties;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::deletes::DeletePlace;
use super::layout::{self, Partitioner};
use super::memory::WriterMemory;
use super::numbers::rounded;
use super::parquet_file::ParquetFile;
use super::stats::{NanCounter, data_file};
use super::style::Style;
use super::types::arrow_schema;
use crate::error::{Error, Result, with_sources};
use crate::storage::Storage;

/// A row group ends at about this size.
pub const ROW_GROUP_BYTES: usize = 64 << 20;
/// And at this many rows.
pub(super) const ROW_GROUP_ROWS: usize = 1 << 20;
/// An upload's buffer; smaller files are created in one request.
const UPLOAD_BUFFER_BYTES: usize = 8 << 20;

/// Data files that no snapshot refers to yet.
#[derive(Debug)]
pub struct DataFiles {
    pub files: Vec<DataFile>,
    /// Delete files, each with the partition spec that it belongs to.
    pub deletes: Vec<(i32, DataFile)>,
    /// The data files whose rows those delete.
    pub deleted_from: Arc<HashSet<String>>,
    /// Delete files of the table that are not needed any more once these are committed.
    pub replaced_deletes: Arc<HashSet<DeletePlace>>,
    pub rows: u64,
    /// Every object written so far for the commit to come, data files first.
    objects: Vec<String>,
    storage: Arc<Storage>,
    tasks: TaskTracker,
}

impl DataFiles {
    pub fn new(storage: Arc<Storage>, tasks: TaskTracker) -> Self {
        let (deleted_from, replaced_deletes) = Default::default();
        Self {
            files: Vec::new(),
            deletes: Vec::new(),
            deleted_from,
            replaced_deletes,
            rows: 0,
            objects: Vec::new(),
            storage,
            tasks,
        }
    }

    /// Takes over the data files of another.
    pub fn take_over(&mut self, mut other: Self) {
        self.files.append(&mut other.files);
        self.rows += other.rows;
        self.objects.append(&mut other.objects);
    }

    /// Also removed if nothing comes of it.
    pub fn add_object(&mut self, location: String) {
        self.objects.push(location);
    }

    /// Takes over what `other` has written, for one commit of both.
    pub fn absorb(&mut self, mut other: DataFiles) {
        self.rows += other.rows;
        self.files.append(&mut other.files);
        self.objects.append(&mut other.objects);
    }

    /// A snapshot refers to the files, or may: they stay.
    pub fn keep(mut self) {
        self.objects.clear();
    }

    /// Removes the files now. Only for a commit that certainly did not happen.
    pub async fn discard(mut self) {
        let objects = std::mem::take(&mut self.objects);
        self.storage.discard(&objects).await;
    }
}

impl Drop for DataFiles {
    fn drop(&mut self) {
        let objects = std::mem::take(&mut self.objects);
        // A panic says nothing of what was committed: then they stay, for the orphan sweep.
        if objects.is_empty() || std::thread::panicking() {
            return;
        }
        let storage = self.storage.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.tasks.spawn_on(async move { storage.discard(&objects).await }, &runtime);
        }
    }
}

/// Writes record batches into data files of one table.
pub struct DataWriter {
    storage: Arc<Storage>,
    /// Where data files go, without a trailing slash.
    directory: String,
    schema: Arc<Schema>,
    arrow_schema: SchemaRef,
    target_file_bytes: usize,
    partitioner: Option<Arc<Partitioner>>,
    /// The order that rows come in, if the table has one.
    sort_order_id: Option<i32>,
    style: Style,
    memory: Option<WriterMemory>,
    open: Option<OpenFile>,
    done: DataFiles,
}

struct OpenFile {
    location: String,
    partition: Struct,
    writer: ParquetFile,
    nans: NanCounter,
}

impl DataWriter {
    /// For a table as it is in `metadata`.
    ///
    /// # Errors
    /// `Invalid` for a property of the table that says how to write and makes no sense; `NotSupported` for a partitioning that cannot
    /// be written.
    pub fn new(
        storage: Arc<Storage>,
        tasks: TaskTracker,
        metadata: &TableMetadata,
        target_file_bytes: usize,
    ) -> Result<Self> {
        let schema = metadata.current_schema().clone();
        Ok(Self {
            directory: format!("{}/data", metadata.location()),
            arrow_schema: arrow_schema(&schema)?,
            schema,
            target_file_bytes,
            partitioner: Partitioner::new(metadata)?,
            sort_order_id: layout::sort_order_id(metadata),
            style: Style::of(metadata)?,
            memory: None,
            open: None,
            done: DataFiles::new(storage.clone(), tasks),
            storage,
        })
    }

    /// The same, which holds no more than this.
    pub fn within(self, memory: WriterMemory) -> Self {
        Self { memory: Some(memory), ..self }
    }

    /// Another one for the same table, which makes files of its own, and whose memory is another one's, too.
    pub fn another(&self) -> Self {
        Self {
            storage: self.storage.clone(),
            directory: self.directory.clone(),
            schema: self.schema.clone(),
            arrow_schema: self.arrow_schema.clone(),
            target_file_bytes: self.target_file_bytes,
            partitioner: self.partitioner.clone(),
            sort_order_id: self.sort_order_id,
            style: self.style.clone(),
            memory: None,
            open: None,
            done: DataFiles::new(self.storage.clone(), self.done.tasks.clone()),
        }
    }

    /// The same for rows that do not come in the table's order.
    pub fn in_no_order(self) -> Self {
        Self { sort_order_id: None, ..self }
    }

    /// Adds a batch whose columns are the table's, in order.
    pub async fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let batch = conform(batch, &self.arrow_schema)?;
        let Some(partitioner) = self.partitioner.clone() else {
            return self.write_into(Struct::empty(), &batch).await;
        };
        for (rows, partition) in partitioner.runs(&batch)? {
            self.write_into(partition, &batch.slice(rows.start, rows.len())).await?;
        }
        Ok(())
    }

    /// Adds rows that are all of one partition.
    async fn write_into(&mut self, partition: Struct, batch: &RecordBatch) -> Result<()> {
        let mut file = match self.open.take() {
            Some(file) if file.partition == partition => file,
            Some(file) => {
                self.end(file).await?;
                self.begin(partition)?
            }
            None => self.begin(partition)?,
        };
        file.nans.add(batch);
        file.writer.write(batch).await.map_err(|e| write_failed(&file.location, &e))?;
        if let Some(memory) = &self.memory
            && !memory.allows(file.writer.memory_size())
        {
            file.writer.flush().await.map_err(|e| write_failed(&file.location, &e))?;
            memory.ended(file.writer.memory_size());
        }
        match file.writer.bytes_written() + file.writer.in_progress_size() >= self.target_file_bytes {
            true => self.end(file).await,
            false => {
                self.open = Some(file);
                Ok(())
            }
        }
    }

    /// Ends the last file. Every file named in the result is durable.
    pub async fn finish(mut self) -> Result<DataFiles> {
        if let Some(file) = self.open.take() {
            self.end(file).await?;
        }
        Ok(self.done)
    }

    fn begin(&mut self, partition: Struct) -> Result<OpenFile> {
        let location = format!("{}/{}.parquet", self.directory, Uuid::now_v7());
        self.done.add_object(location.clone());
        let writer = parquet_writer(&self.storage, &location, self.arrow_schema.clone(), &self.style)?;
        Ok(OpenFile { location, partition, writer, nans: NanCounter::default() })
    }

    async fn end(&mut self, file: OpenFile) -> Result<()> {
        let OpenFile { location, partition, mut writer, nans } = file;
        let footer = writer.finish().await.map_err(|e| write_failed(&location, &e))?;
        if let Some(memory) = &self.memory {
            memory.ended(0);
        }
        self.storage.persist(&location).await?;
        let mut described = data_file(&location, writer.bytes_written() as u64, &self.schema, &footer, nans)?;
        if let Some(partitioner) = &self.partitioner {
            described.partition(partition).partition_spec_id(partitioner.spec_id);
        }
        if let Some(order) = self.sort_order_id {
            described.sort_order_id(order);
        }
        let described = described.build().map_err(|e| Error::internal(format!("describing {location}: {e}")))?;
        self.done.rows += described.record_count();
        self.done.files.push(described);
        Ok(())
    }
}

/// A writer of a new Parquet file, whose fields carry ids.
pub(super) fn parquet_writer(
    storage: &Storage,
    location: &str,
    schema: SchemaRef,
    style: &Style,
) -> Result<ParquetFile> {
    let object = storage.resolve(location)?;
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(ROW_GROUP_ROWS))
        .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
        .set_created_by(concat!("lake ", env!("CARGO_PKG_VERSION")).to_owned());
    let properties = style.add_to(properties).build();
    // Without the Arrow schema in the footer every reader sees the types Iceberg names.
    let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
    let upload = BufWriter::with_capacity(object.store, object.path, UPLOAD_BUFFER_BYTES);
    ParquetFile::new(upload, schema, options).map_err(|e| write_failed(location, &e))
}

pub(super) fn write_failed(location: &str, error: &parquet::errors::ParquetError) -> Error {
    let source = object_store::Error::Generic { store: "Parquet", source: with_sources(error).into() };
    Error::object_store("writing", location, &source)
}

/// The batch with exactly the table's types and nullability.
///
/// # Errors
/// `Invalid`, naming the column, for a null where there may be none and a value that does not fit.
fn conform(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch> {
    if batch.num_columns() != schema.fields().len() {
        return Err(Error::internal(format!(
            "{} columns were to be written into a table of {}",
            batch.num_columns(),
            schema.fields().len()
        )));
    }
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    let mut columns = Vec::with_capacity(batch.num_columns());
    for (field, column) in schema.fields().iter().zip(batch.columns()) {
        if !field.is_nullable() && column.null_count() > 0 {
            return Err(Error::invalid(format!("column {} is NOT NULL, and a row has no value for it", field.name())));
        }
        let wrong = |e: ArrowError| Error::invalid(format!("column {}: {e}", field.name()));
        let cast = |column: &ArrayRef| cast_with_options(column, field.data_type(), &strict).map_err(wrong);
        columns.push(match column.data_type() == field.data_type() {
            true => column.clone(),
            false => cast(&rounded(column, field.data_type()).map_err(wrong)?)?,
        });
    }
    RecordBatch::try_new(schema.clone(), columns).map_err(|e| Error::invalid(e.to_string()))
}

#[cfg(test)]
impl DataWriter {
    /// For an unpartitioned table in a directory of its own.
    ///
    /// # Errors
    /// As [`DataWriter::new`].
    pub(crate) fn in_dir(
        dir: &std::path::Path,
        columns: Vec<arrow::datatypes::Field>,
        properties: &[(&str, &str)],
        tasks: TaskTracker,
        target_file_bytes: usize,
    ) -> Result<Self> {
        use iceberg::spec::{FormatVersion, PartitionSpec, SortOrder, TableMetadataBuilder};
        let location = format!("file://{}", dir.display());
        let metadata = TableMetadataBuilder::new(
            super::types::iceberg_schema(&arrow::datatypes::Schema::new(columns)).unwrap(),
            PartitionSpec::unpartition_spec(),
            SortOrder::unsorted_order(),
            location.clone(),
            FormatVersion::V2,
            properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        );
        let metadata = metadata.unwrap().build().unwrap().metadata;
        let storage = Storage::new(location, crate::config::S3Config::default());
        Self::new(storage, tasks, &metadata, target_file_bytes)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Float64Array, Int64Array, ListArray, StringArray, StructArray};
    use arrow::buffer::NullBuffer;
    use arrow::datatypes::{DataType, Field, Fields, Int64Type};
    use iceberg::spec::Datum;
    use parquet::file::reader::{FileReader, SerializedFileReader};

    use super::*;

    fn writer(dir: &std::path::Path, target: usize) -> DataWriter {
        writer_with(dir, target, &[]).unwrap()
    }

    fn writer_with(dir: &std::path::Path, target: usize, properties: &[(&str, &str)]) -> Result<DataWriter> {
        let columns = vec![
            Field::new("id", DataType::Int64, false),
            Field::new("x", DataType::Float64, true),
            Field::new("s", DataType::Utf8, true),
        ];
        DataWriter::in_dir(dir, columns, properties, TaskTracker::new(), target)
    }

    fn batch(ids: Vec<Option<i64>>) -> RecordBatch {
        let rows = ids.len();
        RecordBatch::try_from_iter_with_nullable([
            ("id", Arc::new(Int64Array::from(ids)) as _, true),
            (
                "x",
                Arc::new(Float64Array::from_iter((0..rows).map(|i| match i {
                    0 => Some(f64::NAN),
                    1 => None,
                    i => Some(i as f64),
                }))) as _,
                true,
            ),
            ("s", Arc::new(StringArray::from_iter((0..rows).map(|i| Some(format!("row {i}"))))) as _, true),
        ])
        .unwrap()
    }

    #[tokio::test]
    async fn a_file_is_described_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = writer(dir.path(), 1 << 20);
        writer.write(&batch((0..10).map(Some).collect())).await.unwrap();
        let files = writer.finish().await.unwrap();
        let [file] = files.files.as_slice() else { panic!() };
        let path = file.file_path().strip_prefix("file://").unwrap().to_owned();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), file.file_size_in_bytes());
        assert_eq!((file.record_count(), files.rows), (10, 10));
        assert_eq!(file.null_value_counts()[&2], 1);
        assert_eq!(file.nan_value_counts()[&2], 1);
        assert_eq!(file.value_counts()[&2], 10);
        assert_eq!((&file.lower_bounds()[&1], &file.upper_bounds()[&1]), (&Datum::long(0), &Datum::long(9)));
        assert_eq!((&file.lower_bounds()[&2], &file.upper_bounds()[&2]), (&Datum::double(2.0), &Datum::double(9.0)));
        assert_eq!(file.upper_bounds()[&3], Datum::string("row 9"));
        assert_eq!(file.split_offsets().unwrap(), [4]);
        let sizes = file.column_sizes();
        assert!(sizes.len() == 3 && sizes.values().sum::<u64>() < file.file_size_in_bytes(), "{sizes:?}");
        files.discard().await;
        assert!(!std::path::Path::new(&path).exists());
    }

    #[tokio::test]
    async fn parts_of_structs_are_described_too() {
        let dir = tempfile::tempdir().unwrap();
        let list = ListArray::from_iter_primitive::<Int64Type, _, _>(vec![Some(vec![Some(1), Some(2)]); 4]);
        let parts: Vec<(&str, ArrayRef)> = vec![
            ("n", Arc::new(Int64Array::from(vec![Some(5), None, Some(7), Some(99)]))),
            ("x", Arc::new(Float64Array::from(vec![f64::NAN, 1.5, 2.5, f64::NAN]))),
            ("l", Arc::new(list)),
        ];
        let field = |(name, part): &(&str, ArrayRef)| Field::new(*name, part.data_type().clone(), true);
        let fields: Fields = parts.iter().map(field).collect();
        // What is in the last is nothing, for it is null itself.
        let nulls = NullBuffer::from(vec![true, true, true, false]);
        let column = StructArray::new(fields, parts.into_iter().map(|(_, part)| part).collect(), Some(nulls));
        let columns = vec![Field::new("s", column.data_type().clone(), true)];
        let mut writer = DataWriter::in_dir(dir.path(), columns, &[], TaskTracker::new(), 1 << 20).unwrap();
        let batch = RecordBatch::try_from_iter([("s", Arc::new(column) as ArrayRef)]).unwrap();
        writer.write(&batch).await.unwrap();
        let files = writer.finish().await.unwrap();
        let [file] = files.files.as_slice() else { panic!() };
        let bounds = |id| (file.lower_bounds().get(&id).cloned(), file.upper_bounds().get(&id).cloned());
        assert_eq!(bounds(2), (Some(Datum::long(5)), Some(Datum::long(7))));
        assert_eq!(bounds(3), (Some(Datum::double(1.5)), Some(Datum::double(2.5))));
        assert_eq!((file.nan_value_counts().get(&3), file.null_value_counts().get(&2)), (Some(&1), Some(&2)));
        assert!(file.lower_bounds().keys().all(|id| [2, 3].contains(id)), "of lists there are none");
    }

    #[tokio::test]
    async fn files_end_at_the_target_size_and_go_when_nobody_keeps_them() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = writer(dir.path(), 1);
        let tasks = writer.done.tasks.clone();
        for start in 0..3 {
            writer.write(&batch((start..start + 10).map(Some).collect())).await.unwrap();
        }
        let files = writer.finish().await.unwrap();
        assert_eq!((files.files.len(), files.rows), (3, 30));
        drop(files);
        tasks.close();
        tasks.wait().await;
        assert_eq!(std::fs::read_dir(dir.path().join("data")).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn columns_that_are_to_have_them_have_bloom_filters() {
        let dir = tempfile::tempdir().unwrap();
        let (enabled, fpp) = ("write.parquet.bloom-filter-enabled.column", "write.parquet.bloom-filter-fpp.column");
        let (of_s, of_x, of_none) = (format!("{enabled}.s"), format!("{enabled}.x"), format!("{enabled}.none"));
        let max_bytes = ("write.parquet.bloom-filter-max-bytes", "1024");
        let properties = [(of_s.as_str(), "true"), (of_x.as_str(), "false"), (of_none.as_str(), "true"), max_bytes];
        let mut writer = writer_with(dir.path(), 1 << 20, &properties).unwrap();
        writer.write(&batch((0..8000).map(Some).collect())).await.unwrap();
        let files = writer.finish().await.unwrap();
        let path = files.files[0].file_path().strip_prefix("file://").unwrap();
        let reader = SerializedFileReader::new(std::fs::File::open(path).unwrap()).unwrap();
        let columns = reader.metadata().row_group(0).columns();
        let filters: Vec<_> = columns.iter().map(|column| column.bloom_filter_length()).collect();
        let [None, None, Some(bytes)] = filters.as_slice() else { panic!("{filters:?}") };
        // And a header.
        assert!((1024..1024 + 32).contains(bytes), "{bytes}");
        drop(files);
        let fpp = format!("{fpp}.s");
        let wrong = [
            (of_s.as_str(), "yes"),
            (fpp.as_str(), "1"),
            (fpp.as_str(), "NaN"),
            (max_bytes.0, "0"),
            ("write.parquet.compression-codec", "best"),
            ("write.parquet.compression-level", "23"),
        ];
        for wrong in wrong {
            let error = writer_with(dir.path(), 1 << 20, &[(of_s.as_str(), "true"), wrong]).map(drop).unwrap_err();
            assert!(error.message.contains(wrong.0), "{error}");
        }
    }

    #[tokio::test]
    async fn files_are_compressed_as_the_table_says() {
        let dir = tempfile::tempdir().unwrap();
        for codec in ["zstd", "GZIP", "snappy", "lz4", "uncompressed"] {
            let properties = [("write.parquet.compression-codec", codec), ("write.parquet.compression-level", "1")];
            let mut writer = writer_with(dir.path(), 1 << 20, &properties).unwrap();
            writer.write(&batch((0..10).map(Some).collect())).await.unwrap();
            let files = writer.finish().await.unwrap();
            let path = files.files[0].file_path().strip_prefix("file://").unwrap();
            let reader = SerializedFileReader::new(std::fs::File::open(path).unwrap()).unwrap();
            let written = format!("{:?}", reader.metadata().row_group(0).column(1).compression_codec());
            assert_eq!(written, codec.to_ascii_uppercase());
        }
        // A level of a codec that lake does not write is none of zstd.
        let brotli = [("write.parquet.compression-codec", "brotli"), ("write.parquet.compression-level", "0")];
        assert!(writer_with(dir.path(), 1 << 20, &brotli).is_ok());
    }

    #[tokio::test]
    async fn a_missing_value_names_its_column() {
        let dir = tempfile::tempdir().unwrap();
        let error = writer(dir.path(), 1 << 20).write(&batch(vec![Some(1), None])).await.unwrap_err();
        assert!(error.message.contains("column id is NOT NULL"), "{error}");
    }
}
