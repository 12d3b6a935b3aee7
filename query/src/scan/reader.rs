//! How scans read Parquet files: footers through [`footer`], and nothing outside of the file.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use datafusion::common::Result as DfResult;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::execution::cache::cache_manager::FileMetadataCache;
use datafusion::physical_plan::metrics::{Count, ExecutionPlanMetricsSet, MetricBuilder};
use datafusion_datasource_parquet::{DefaultParquetFileReaderFactory, ParquetFileReaderFactory};
use futures::FutureExt;
use futures::future::BoxFuture;
use object_store::{ObjectMeta, ObjectStore};
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::AsyncFileReader;
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaData};

use super::footer;
use crate::error::{Error, Kind};

/// Makes a reader for every file of a scan.
#[derive(Debug)]
pub struct CheckedReaders {
    store: Arc<dyn ObjectStore>,
    footers: Arc<FileMetadataCache>,
    plain: DefaultParquetFileReaderFactory,
}

impl CheckedReaders {
    pub fn new(store: Arc<dyn ObjectStore>, footers: Arc<FileMetadataCache>) -> Self {
        Self { plain: DefaultParquetFileReaderFactory::new(store.clone()), store, footers }
    }
}

impl ParquetFileReaderFactory for CheckedReaders {
    fn create_reader(
        &self,
        partition: usize,
        file: PartitionedFile,
        metadata_size_hint: Option<usize>,
        metrics: &ExecutionPlanMetricsSet,
    ) -> DfResult<Box<dyn AsyncFileReader + Send>> {
        Ok(Box::new(CheckedReader {
            store: self.store.clone(),
            footers: self.footers.clone(),
            file: file.object_meta.clone(),
            hits: MetricBuilder::new(metrics).counter("footer_cache_hits", partition),
            misses: MetricBuilder::new(metrics).counter("footer_cache_misses", partition),
            plain: self.plain.create_reader(partition, file, metadata_size_hint, metrics)?,
            metadata: None,
        }))
    }
}

struct CheckedReader {
    store: Arc<dyn ObjectStore>,
    footers: Arc<FileMetadataCache>,
    file: ObjectMeta,
    /// Reads what is not the footer.
    plain: Box<dyn AsyncFileReader + Send>,
    /// Once it was asked for.
    metadata: Option<Arc<ParquetMetaData>>,
    /// Footers that the cache had, and had not.
    hits: Count,
    misses: Count,
}

impl CheckedReader {
    fn check_range(&self, range: &Range<u64>) -> Result<()> {
        match range.start <= range.end && range.end <= self.file.size {
            true => Ok(()),
            false => Err(external(footer::damaged(
                &self.file,
                format_args!("bytes {} to {} of {} are asked for", range.start, range.end, self.file.size),
            ))),
        }
    }
}

impl AsyncFileReader for CheckedReader {
    /// Page indexes and bloom filters are asked for here; for data, see below.
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes>> {
        async move {
            self.check_range(&range)?;
            let read = self.plain.get_bytes(range.clone()).await;
            let whole = read.and_then(|bytes| {
                footer::check_whole(&self.file, &range, &bytes).map_err(external)?;
                Ok(bytes)
            });
            let bytes = match whole {
                Ok(bytes) => bytes,
                Err(error) => return Err(explained(self.store.as_ref(), &self.file, error).await),
            };
            if let Some(metadata) = &self.metadata
                && footer::page_index_range(metadata).as_ref() == Some(&range)
            {
                footer::check_page_index(&self.file, metadata, &range, &bytes).map_err(external)?;
            }
            Ok(bytes)
        }
        .boxed()
    }

    fn get_byte_ranges(&mut self, ranges: Vec<Range<u64>>) -> BoxFuture<'_, Result<Vec<Bytes>>> {
        async move {
            ranges.iter().try_for_each(|range| self.check_range(range))?;
            let read = self.plain.get_byte_ranges(ranges.clone()).await;
            let whole = read.and_then(|read| {
                let mut each = ranges.iter().zip(&read);
                each.try_for_each(|(range, bytes)| footer::check_whole(&self.file, range, bytes)).map_err(external)?;
                Ok(read)
            });
            match whole {
                Ok(read) => Ok(read),
                Err(error) => Err(explained(self.store.as_ref(), &self.file, error).await),
            }
        }
        .boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, Result<Arc<ParquetMetaData>>> {
        async move {
            let with_page_index = options.is_some_and(|o| o.column_index_policy() != PageIndexPolicy::Skip);
            match footer::is_cached(&self.file, self.footers.as_ref(), with_page_index) {
                true => self.hits.add(1),
                false => self.misses.add(1),
            }
            let read = footer::read(self.store.as_ref(), &self.file, self.footers.as_ref(), with_page_index).await;
            let metadata = read.map_err(|error| match error.kind {
                // The table's metadata says that it is there.
                Kind::NotFound => external(Error::corrupt(error)),
                _ => external(error),
            })?;
            self.metadata = Some(metadata.clone());
            Ok(metadata)
        }
        .boxed()
    }
}

/// An error of reading, or that the file has another size than it should.
async fn explained(store: &dyn ObjectStore, file: &ObjectMeta, error: ParquetError) -> ParquetError {
    footer::wrong_size(store, file).await.map_or(error, external)
}

/// For passing through the parquet crate and DataFusion.
fn external(error: Error) -> ParquetError {
    ParquetError::External(Box::new(error))
}
