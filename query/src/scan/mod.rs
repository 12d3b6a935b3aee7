//! Reading tables: an Iceberg version as a DataFusion table.
//!
//! Iceberg's metadata says which files there are ([`plan`]) and what is in them ([`values`]); DataFusion's own Parquet
//! source reads them, on all cores, with projection, filters (row group and page pruning), limits and statistics.
//! Columns are found in files by field id ([`adapter`]), so that renamed, added and widened columns read right. What a
//! file says of itself is checked before it is relied on ([`footer`], and for scans [`reader`]); what is in its pages shows when
//! they are decoded ([`guard`]).
//!
//! The rule is: never wrong rows. What cannot be read correctly yet (delete files, deletion vectors, files without
//! field ids, ...) is refused with an error that names it. Two things that DataFusion would take from statistics are
//! held back: bounds of text, which may be cut, are never exact; and float columns that may hold NaN are opaque to
//! pruning, because bounds leave NaN out.

pub mod adapter;
pub mod footer;
pub mod guard;
pub mod plan;
pub mod reader;
pub mod sink;
pub mod thrift;
pub mod values;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::Result as DfResult;
use datafusion::common::config::TableParquetOptions;
use datafusion::common::stats::Precision;
use datafusion::common::{ColumnStatistics, Statistics};
use datafusion::datasource::TableType;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfigBuilder, ParquetSource};
use datafusion::datasource::sink::DataSinkExec;
use datafusion::datasource::source::DataSourceExec;
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown};
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{ExecutionPlan, project_schema};

use crate::error::Error;
use crate::table::{Table, Tables};
use adapter::FieldIdAdapterFactory;
use reader::CheckedReaders;
use sink::AppendSink;

/// One version of a table, for one statement.
pub struct LakeTable {
    tables: Arc<Tables>,
    table: Table,
    schema: SchemaRef,
    /// Until when an INSERT into it must be done.
    deadline: Instant,
}

impl fmt::Debug for LakeTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LakeTable({} at {})", self.table.ident, self.table.pointer.value.metadata_location)
    }
}

impl LakeTable {
    /// # Errors
    /// If the table has a column that lake cannot read.
    pub fn new(tables: Arc<Tables>, table: Table, deadline: Instant) -> crate::error::Result<Self> {
        let schema = table.arrow_schema()?;
        Ok(Self { tables, table, schema, deadline })
    }

    pub fn table(&self) -> &Table {
        &self.table
    }
}

#[async_trait]
impl TableProvider for LakeTable {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn supports_filters_pushdown(&self, filters: &[&Expr]) -> DfResult<Vec<TableProviderFilterPushDown>> {
        // The scan prunes; what passes is filtered by DataFusion.
        Ok(vec![TableProviderFilterPushDown::Inexact; filters.len()])
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> DfResult<Arc<dyn ExecutionPlan>> {
        let files = plan::files(&self.tables.cache, &self.table).await.map_err(Error::into_datafusion)?;
        if files.is_empty() {
            return Ok(Arc::new(EmptyExec::new(project_schema(&self.schema, projection)?)));
        }
        let adapter = Arc::new(FieldIdAdapterFactory::new(&self.table, &self.schema, &files));
        // A table may have files in several stores; one scan reads from one.
        let mut by_store: HashMap<ObjectStoreUrl, Vec<PartitionedFile>> = HashMap::new();
        for entry in &files {
            let file = entry.data_file();
            let object = self.tables.storage.resolve(file.file_path()).map_err(Error::into_datafusion)?;
            let (url, store) = self.tables.storage.url_and_store(file.file_path()).map_err(Error::into_datafusion)?;
            state.runtime_env().register_object_store(&url, store);
            let mut partitioned = PartitionedFile::new("", file.file_size_in_bytes());
            partitioned.object_meta.location = object.path;
            let partitioned = partitioned.with_statistics(Arc::new(values::file_statistics(file, &self.schema)));
            by_store.entry(object.url).or_default().push(partitioned);
        }
        let mut scans = Vec::with_capacity(by_store.len());
        for (url, files) in by_store {
            scans.push(self.scan_store(state, url, files, projection, filters, limit, adapter.clone())?);
        }
        match scans.len() {
            1 => Ok(scans.remove(0)),
            _ => UnionExec::try_new(scans),
        }
    }

    async fn insert_into(
        &self,
        _: &dyn Session,
        input: Arc<dyn ExecutionPlan>,
        op: InsertOp,
    ) -> DfResult<Arc<dyn ExecutionPlan>> {
        if op != InsertOp::Append {
            return Err(
                Error::not_supported(format!("{op} is not supported yet; only INSERT INTO is")).into_datafusion()
            );
        }
        self.table.check_writable().map_err(Error::into_datafusion)?;
        let sink = AppendSink::new(self.tables.clone(), self.table.clone(), &self.schema, self.deadline);
        Ok(Arc::new(DataSinkExec::new(input, Arc::new(sink), None)))
    }
}

impl LakeTable {
    #[expect(clippy::too_many_arguments, reason = "the arguments of `scan`, once per store")]
    fn scan_store(
        &self,
        state: &dyn Session,
        url: ObjectStoreUrl,
        files: Vec<PartitionedFile>,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
        adapter: Arc<FieldIdAdapterFactory>,
    ) -> DfResult<Arc<dyn ExecutionPlan>> {
        let runtime = state.runtime_env();
        let readers = CheckedReaders::new(runtime.object_store(&url)?, runtime.cache_manager.get_file_metadata_cache());
        let options =
            TableParquetOptions { global: state.config_options().execution.parquet.clone(), ..Default::default() };
        let source = ParquetSource::new(self.schema.clone())
            .with_table_parquet_options(options)
            .with_parquet_file_reader_factory(Arc::new(readers));
        let statistics = total(&self.schema, &files, filters.is_empty());
        let config = FileScanConfigBuilder::new(url, Arc::new(source))
            .with_file_groups(spread(files, state.config().target_partitions()))
            .with_statistics(statistics)
            .with_expr_adapter(Some(adapter))
            .with_limit(limit)
            .with_projection_indices(projection.cloned())?
            .build();
        Ok(DataSourceExec::from_data_source(config))
    }
}

/// Spreads files over at most `partitions` groups of about the same size, the largest first.
fn spread(mut files: Vec<PartitionedFile>, partitions: usize) -> Vec<FileGroup> {
    files.sort_by_key(|file| std::cmp::Reverse(file.object_meta.size));
    let mut groups: Vec<(u64, Vec<PartitionedFile>)> = vec![(0, Vec::new()); partitions.clamp(1, files.len().max(1))];
    for file in files {
        if let Some(smallest) = groups.iter_mut().min_by_key(|(bytes, group)| (*bytes, group.len())) {
            smallest.0 += file.object_meta.size;
            smallest.1.push(file);
        }
    }
    groups.into_iter().map(|(_, files)| FileGroup::new(files)).collect()
}

/// The statistics of all files together. They stay exact only if nothing is filtered.
fn total(schema: &SchemaRef, files: &[PartitionedFile], exact: bool) -> Statistics {
    let mut total = Statistics::new_unknown(schema);
    let of_files = || files.iter().filter_map(|file| file.statistics.as_deref());
    let sum = |values: &mut dyn Iterator<Item = Precision<usize>>| {
        values.fold(Precision::Exact(0), |sum, value| sum.add(&value))
    };
    total.num_rows = sum(&mut of_files().map(|s| s.num_rows));
    total.total_byte_size = sum(&mut of_files().map(|s| s.total_byte_size));
    for (index, column) in total.column_statistics.iter_mut().enumerate() {
        let of_column = || of_files().filter_map(|s| s.column_statistics.get(index));
        *column = ColumnStatistics::new_unknown();
        column.null_count = sum(&mut of_column().map(|c| c.null_count));
        column.min_value = of_column().map(|c| c.min_value.clone()).reduce(|a, b| a.min(&b)).unwrap_or_default();
        column.max_value = of_column().map(|c| c.max_value.clone()).reduce(|a, b| a.max(&b)).unwrap_or_default();
    }
    match exact {
        true => total,
        false => total.to_inexact(),
    }
}
