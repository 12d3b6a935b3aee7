//! Reading tables: an Iceberg version as a DataFusion table.
//!
//! Iceberg's metadata says which files there are and what is deleted from them ([`plan`]), which of them need not be
//! looked at ([`prune`]), and what is in them ([`values`]). DataFusion's own Parquet source reads them, on all cores, with
//! projection, filters (row group and page pruning, [`late`] columns by what [`selectivity`] expects), limits and statistics ([`source`]): deleted rows are left
//! out by position or by value ([`deletes`]), and columns are found in files by field id ([`adapter`]), so that renamed, added and
//! widened columns read right. What a file says of itself is checked before it is relied on ([`footer`], and for scans
//! [`reader`]); what is in its pages shows when they are decoded ([`guard`]). A scan can be handed to another node ([`wire`]).
//! Earlier versions are found by [`as_of`], and what the metadata says is a table itself ([`listing`]).
//!
//! The rule is: never wrong rows. What cannot be read correctly (files that are not Parquet, encryption, files without
//! field ids and without a name mapping, ...) is refused with an error that names it. What DataFusion would take from
//! statistics is held back where it need not be true: bounds of text, which may be cut, are never exact; nothing is exact
//! where rows are deleted, but for counts that are known without reading deletes; and float columns that may hold NaN are
//! opaque to pruning, because bounds leave NaN out.

pub mod adapter;
pub mod as_of;
pub mod deletes;
pub mod footer;
pub mod guard;
pub mod late;
pub mod listing;
pub mod plan;
pub mod prune;
pub mod reader;
pub mod selectivity;
pub mod sink;
pub mod source;
pub mod spelled;
pub mod thrift;
pub mod values;
pub mod wire;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::config::TableParquetOptions;
use datafusion::common::stats::Precision;
use datafusion::common::{ColumnStatistics, Result as DfResult, ScalarValue, Statistics};
use datafusion::datasource::TableType;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfigBuilder, FileSource, ParquetSource};
use datafusion::datasource::sink::DataSinkExec;
use datafusion::datasource::source::DataSourceExec;
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown};
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::metrics::MetricBuilder;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{ExecutionPlan, project_schema};
use datafusion_datasource::TableSchema;
use iceberg::spec::{
    BlobMetadata, DataFile, Literal, NestedField, Schema as IcebergSchema, SchemaRef as IcebergSchemaRef, SnapshotRef,
    Transform,
};
use parquet::arrow::RowNumber;

use crate::error::{Error, Result};
use crate::storage::Object;
use crate::table::types::{arrow_schema, field_id};
use crate::table::{Table, Tables};
use adapter::Rules;
use deletes::DeleteReader;
use plan::{PlannedFile, Pruned};
use prune::Pruning;
use reader::CheckedReaders;
use sink::AppendSink;
use source::{FilePlan, LakeSource};

/// Of the format's Puffin blobs, the sketch of a column's distinct values ...
const DISTINCT_VALUES_BLOB: &str = "apache-datasketches-theta-v1";
/// ... and under what their number is told.
const DISTINCT_VALUES_PROPERTY: &str = "ndv";

/// The column with the location of a row's data file, in a table with places.
pub const FILE_COLUMN: &str = "_file";
/// The column with a row's position in its data file, from 0, in a table with places.
pub const POSITION_COLUMN: &str = "_pos";

/// Which data files are read.
pub type Wanted = Arc<dyn Fn(&DataFile) -> bool + Send + Sync>;

/// One version of a table, for one statement.
pub struct LakeTable {
    tables: Arc<Tables>,
    table: Table,
    /// What is read; `None` for a table without rows.
    snapshot: Option<SnapshotRef>,
    columns: IcebergSchemaRef,
    /// The columns, and those for a row's place if it has them.
    schema: SchemaRef,
    has_places: bool,
    /// What a column holds that INSERT gives no value, by name.
    defaults: HashMap<String, Expr>,
    /// Which data files are read, if not all.
    wanted: Option<Wanted>,
    /// Until when an INSERT into it must be done.
    deadline: Instant,
    /// How old its pointer was.
    pointer_age: Option<Duration>,
}

impl fmt::Debug for LakeTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LakeTable({} at {})", self.table.ident, self.table.pointer.value.metadata_location)
    }
}

impl LakeTable {
    /// The current version.
    ///
    /// # Errors
    /// If the table has a column that lake cannot read.
    pub fn new(tables: Arc<Tables>, table: Table, deadline: Instant) -> Result<Self> {
        let snapshot = table.metadata.current_snapshot().cloned();
        let columns = table.metadata.current_schema().clone();
        Self::at(tables, table, snapshot, columns, deadline)
    }

    /// A snapshot, with these columns.
    ///
    /// # Errors
    /// If there is a column that lake cannot read.
    pub fn at(
        tables: Arc<Tables>,
        table: Table,
        snapshot: Option<SnapshotRef>,
        columns: IcebergSchemaRef,
        deadline: Instant,
    ) -> Result<Self> {
        let schema = arrow_schema(&columns).map_err(|e| e.while_doing(format_args!("table {}", table.ident)))?;
        let fields = columns.as_struct().fields().iter().zip(schema.fields());
        let defaults = fields.filter_map(|(column, field)| match &column.write_default {
            Some(Literal::Primitive(literal)) => {
                let value = values::literal_scalar(literal, field.data_type())?;
                Some((column.name.clone(), Expr::Literal(value, None)))
            }
            _ => None,
        });
        let defaults = defaults.collect();
        Ok(Self {
            tables,
            table,
            snapshot,
            columns,
            schema,
            has_places: false,
            defaults,
            wanted: None,
            deadline,
            pointer_age: None,
        })
    }

    /// The same with a row's place as two more columns, [`FILE_COLUMN`] and [`POSITION_COLUMN`]: what a position delete
    /// names. Rows that are deleted already do not come.
    ///
    /// # Errors
    /// `NotSupported` if the table has columns of these names.
    pub fn with_places(mut self) -> Result<Self> {
        if self.has_places {
            return Ok(self);
        }
        let mut fields = self.schema.fields().to_vec();
        for place in place_fields() {
            if self.schema.field_with_name(place.name()).is_ok() {
                return Err(Error::not_supported(format!(
                    "table {} has a column {}: a row's place cannot be told by that name",
                    self.table.ident,
                    place.name()
                )));
            }
            fields.push(Arc::new(place));
        }
        self.schema = Arc::new(Schema::new(fields));
        self.has_places = true;
        Ok(self)
    }

    /// The current version with places, and with the rows of some data files alone.
    ///
    /// # Errors
    /// As [`LakeTable::with_places`].
    pub fn places(&self, wanted: Wanted) -> Result<Self> {
        let places = Self::new(self.tables.clone(), self.table.clone(), self.deadline)?.with_places()?;
        Ok(Self { wanted: Some(wanted), ..places })
    }

    /// The same whose pointer was this old, for EXPLAIN ANALYZE.
    pub fn with_pointer_age(self, age: Option<Duration>) -> Self {
        Self { pointer_age: age, ..self }
    }

    pub fn table(&self) -> &Table {
        &self.table
    }

    /// A reader of what is deleted, with the memory of the statement that this is the runtime of.
    pub fn delete_reader(&self, runtime: &RuntimeEnv) -> DeleteReader {
        DeleteReader::new(self.tables.storage.clone(), self.tables.deletes.clone(), runtime)
    }

    /// The comments of its columns, in their order.
    pub fn comments(&self) -> Vec<Option<String>> {
        self.columns.as_struct().fields().iter().map(|column| column.doc.clone()).collect()
    }

    /// The snapshot that is read.
    pub fn snapshot(&self) -> Option<&SnapshotRef> {
        self.snapshot.as_ref()
    }
}

/// The columns for a row's place: the first is a constant of each file, the second is made by the Parquet reader.
fn place_fields() -> [Field; 2] {
    let position = Field::new(POSITION_COLUMN, DataType::Int64, false).with_extension_type(RowNumber);
    [Field::new(FILE_COLUMN, DataType::Utf8, false), position]
}

#[async_trait]
impl TableProvider for LakeTable {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn get_column_default(&self, column: &str) -> Option<&Expr> {
        self.defaults.get(column)
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
        self.scan_files(state, projection, filters, limit).await.map_err(Error::into_datafusion)
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
    async fn scan_files(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let columns = arrow_schema(&self.columns)?;
        let pruning = Pruning::new(state, &columns, filters)?;
        let mut planned =
            plan::files(&self.tables.cache, &self.table, self.snapshot.as_deref(), pruning.as_ref()).await?;
        if let Some(wanted) = &self.wanted {
            planned.files.retain(|file| wanted(file.data_file()));
        }
        if planned.files.is_empty() {
            return Ok(Arc::new(EmptyExec::new(project_schema(&self.schema, projection)?)));
        }
        let columns = self.columns_read(&planned.files)?;
        let arrow_columns = arrow_schema(&columns)?;
        let read = Read {
            rules: Arc::new(Rules::new(&self.table, &columns, arrow_columns.as_ref(), &planned.files)?),
            columns: arrow_columns,
            projection: self.places_read(projection, columns.as_struct().fields().len()),
            limit,
            exact: filters.is_empty(),
            pruned: planned.pruned,
            distinct: self.distinct_values(),
        };
        // A table may have files in several stores; one scan reads from one.
        let mut by_store: HashMap<ObjectStoreUrl, Vec<PlannedFile>> = HashMap::new();
        for file in planned.files {
            let location = file.data_file().file_path();
            let Object { url, store, .. } = self.tables.storage.resolve(location)?;
            state.runtime_env().register_object_store(url.as_ref(), store);
            by_store.entry(url).or_default().push(file);
        }
        let mut scans = Vec::with_capacity(by_store.len());
        for (url, files) in by_store {
            scans.push(self.scan_store(state, url, &files, &read)?);
        }
        Ok(match scans.len() {
            1 => scans.remove(0),
            _ => UnionExec::try_new(scans)?,
        })
    }

    /// The columns, and behind them those that are none of the table's any more and that equality deletes compare.
    fn columns_read(&self, files: &[PlannedFile]) -> Result<IcebergSchemaRef> {
        let mut compared = source::ids_compared(files.iter().flat_map(|file| &file.deletes));
        for column in self.columns.as_struct().fields() {
            compared.remove(&column.id);
        }
        if compared.is_empty() {
            return Ok(self.columns.clone());
        }
        let mut schemas: Vec<&IcebergSchemaRef> = self.table.metadata.schemas_iter().collect();
        schemas.sort_by_key(|schema| std::cmp::Reverse(schema.schema_id()));
        let mut fields = self.columns.as_struct().fields().to_vec();
        let mut compared: Vec<i32> = compared.into_iter().collect();
        compared.sort_unstable();
        for id in compared {
            let latest = schemas.iter().find_map(|schema| schema.as_struct().field_by_id(id));
            let latest = latest.ok_or_else(|| {
                let table = &self.table.ident;
                let part = schemas.iter().find_map(|schema| schema.name_by_field_id(id));
                let what = match part {
                    Some(name) => format!("{name} (id {id}), a part of a nested column, are not supported yet"),
                    None => format!("the column with the id {id}, which no schema of the table has, cannot be applied"),
                };
                Error::not_supported(format!("table {table} cannot be read: equality deletes by {what}"))
            })?;
            let field = NestedField { name: format!("__dropped_{id}"), required: false, ..latest.as_ref().clone() };
            fields.push(Arc::new(field));
        }
        Ok(Arc::new(IcebergSchema::builder().with_fields(fields).build()?))
    }

    /// Which columns of a scan are asked for: `read` of the table's, then those for a row's place.
    fn places_read(&self, projection: Option<&Vec<usize>>, read: usize) -> Vec<usize> {
        let own = self.columns.as_struct().fields().len();
        let place = |index: usize| if index < own { index } else { index - own + read };
        match projection {
            Some(projection) => projection.iter().copied().map(place).collect(),
            None => (0..self.schema.fields().len()).map(place).collect(),
        }
    }

    fn scan_store(
        &self,
        state: &dyn Session,
        url: ObjectStoreUrl,
        files: &[PlannedFile],
        read: &Read,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let runtime = state.runtime_env();
        let footers = runtime.cache_manager.get_file_metadata_cache();
        let readers = CheckedReaders::new(runtime.object_store(&url)?, footers);
        let mut options =
            TableParquetOptions { global: state.config_options().execution.parquet.clone(), ..Default::default() };
        // The source sees to that ([`late`]), and to what is done with it.
        options.global.pushdown_filters = false;
        options.global.max_predicate_cache_size = Some(late::DECODED_BYTES);
        let mut schema = TableSchema::builder(read.columns.clone());
        if self.has_places {
            let [file, position] = place_fields().map(Arc::new);
            schema = schema.with_table_partition_cols(vec![file]).with_virtual_columns(vec![position]);
        }
        let schema = schema.build();
        let table_schema = schema.table_schema().clone();
        let source = ParquetSource::new(schema)
            .with_table_parquet_options(options)
            .with_parquet_file_reader_factory(Arc::new(readers));
        let deletes = self.delete_reader(runtime);
        if let Some(age) = self.pointer_age {
            let age = usize::try_from(age.as_millis()).unwrap_or(usize::MAX);
            MetricBuilder::new(source.metrics()).global_gauge("pointer_age_ms").set(age);
        }
        let source = LakeSource::new(source, read.rules.clone(), deletes, read.pruned);
        let source = source.of_table(self.table.metadata.uuid());
        let always = state.config_options().execution.parquet.pushdown_filters;
        let source: Arc<dyn FileSource> = Arc::new(source.with_early_filters(always));
        let partitioned = files.iter().map(|file| self.partitioned(file, &read.columns)).collect::<Result<Vec<_>>>()?;
        let mut statistics = total(&table_schema, files, &partitioned, read.exact);
        for (column, field) in statistics.column_statistics.iter_mut().zip(table_schema.fields()) {
            if let Some(distinct) = field_id(field).and_then(|id| read.distinct.get(&id)) {
                column.distinct_count = Precision::Inexact(*distinct);
            }
        }
        let config = FileScanConfigBuilder::new(url, source)
            .with_file_groups(spread(partitioned, state.config().target_partitions()))
            .with_statistics(statistics)
            .with_expr_adapter(Some(Arc::new(read.rules.for_files(Arc::default()))))
            .with_limit(read.limit)
            .with_projection_indices(Some(read.projection.clone()))?
            .build();
        Ok(DataSourceExec::from_data_source(config))
    }

    /// What the statistics file says that is nearest to the snapshot. The numbers stand in the table's metadata itself.
    fn distinct_values(&self) -> HashMap<i32, usize> {
        let metadata = &self.table.metadata;
        let mut seen = HashSet::new();
        let mut snapshot = self.snapshot.as_ref();
        while let Some(at) = snapshot.filter(|at| seen.insert(at.snapshot_id())) {
            let Some(file) = metadata.statistics_for_snapshot(at.snapshot_id()) else {
                snapshot = at.parent_snapshot_id().and_then(|id| metadata.snapshot_by_id(id));
                continue;
            };
            let sketches = file.blob_metadata.iter().filter(|blob| blob.r#type == DISTINCT_VALUES_BLOB);
            let number = |blob: &BlobMetadata| match blob.fields.as_slice() {
                [id] => Some((*id, blob.properties.get(DISTINCT_VALUES_PROPERTY)?.parse().ok()?)),
                _ => None,
            };
            return sketches.filter_map(number).collect();
        }
        HashMap::new()
    }

    fn partitioned(&self, file: &PlannedFile, columns: &Schema) -> Result<PartitionedFile> {
        let data = file.data_file();
        let mut partitioned = PartitionedFile::new("", data.file_size_in_bytes());
        partitioned.object_meta.location = self.tables.storage.resolve(data.file_path())?.path;
        if self.has_places {
            partitioned.partition_values = vec![ScalarValue::from(data.file_path())];
        }
        let statistics = values::file_statistics(data, columns);
        let statistics = match file.deletes.is_empty() {
            true => statistics,
            false => statistics.to_inexact(),
        };
        let plan = FilePlan {
            location: data.file_path().to_owned(),
            deletes: file.deletes.clone(),
            constants: Arc::new(self.constants(file, columns)?),
        };
        Ok(partitioned.with_statistics(Arc::new(statistics)).with_extension(plan))
    }

    fn constants(&self, file: &PlannedFile, columns: &Schema) -> Result<HashMap<i32, ScalarValue>> {
        let metadata = &self.table.metadata;
        let spec = metadata.partition_spec_by_id(file.spec_id);
        let identity: HashSet<i32> = spec
            .into_iter()
            .flat_map(|spec| spec.fields())
            .filter(|field| field.transform == Transform::Identity)
            .map(|field| field.source_id)
            .collect();
        let mut constants = HashMap::new();
        for column in columns.fields() {
            if let Some(id) = field_id(column).filter(|id| identity.contains(id))
                && let Some(value) =
                    prune::identity_value(metadata, file.spec_id, file.data_file(), id, column.data_type())?
            {
                constants.insert(id, value);
            }
        }
        Ok(constants)
    }
}

/// What a scan reads, whichever store it reads from.
struct Read {
    /// The table's, and hidden ones that equality deletes compare.
    columns: SchemaRef,
    rules: Arc<Rules>,
    projection: Vec<usize>,
    limit: Option<usize>,
    /// Whether all rows are wanted.
    exact: bool,
    pruned: Pruned,
    /// About how many distinct values columns have, by id.
    distinct: HashMap<i32, usize>,
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
fn total(schema: &SchemaRef, planned: &[PlannedFile], files: &[PartitionedFile], exact: bool) -> Statistics {
    let mut total = Statistics::new_unknown(schema);
    let of_files = || files.iter().filter_map(|file| file.statistics.as_deref());
    let sum = |values: &mut dyn Iterator<Item = Precision<usize>>| {
        values.fold(Precision::Exact(0), |sum, value| sum.add(&value))
    };
    let live: Option<u64> = planned.iter().map(PlannedFile::live_rows).sum();
    total.num_rows = match live.and_then(|rows| usize::try_from(rows).ok()) {
        Some(rows) => Precision::Exact(rows),
        None => sum(&mut of_files().map(|s| s.num_rows)),
    };
    for (index, column) in total.column_statistics.iter_mut().enumerate() {
        let of_column = || of_files().map(|s| s.column_statistics.get(index).cloned().unwrap_or_default());
        *column = ColumnStatistics::new_unknown();
        column.null_count = sum(&mut of_column().map(|c| c.null_count));
        column.byte_size = sum(&mut of_column().map(|c| c.byte_size));
        column.min_value = of_column().map(|c| c.min_value).reduce(|a, b| a.min(&b)).unwrap_or_default();
        column.max_value = of_column().map(|c| c.max_value).reduce(|a, b| a.max(&b)).unwrap_or_default();
    }
    match exact {
        true => total,
        false => total.to_inexact(),
    }
}
