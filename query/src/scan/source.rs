//! The files of a version as DataFusion reads them: its own Parquet source, told for each file what it must know.
//!
//! [`LakeSource`] passes everything on to a [`ParquetSource`]: projection, filters for pruning, sort hints, metrics. Only
//! when a file is opened ([`LakeMorselizer`]) it steps in, with the file's [`FilePlan`]:
//! - positions that are deleted become an access plan, so that neither they nor their pages are decoded;
//! - equality deletes are applied to the rows that come out, for which the columns that they compare are read as well; a
//!   limit then counts what is left;
//! - constants of the file's partition stand in for columns that it does not have.
//!
//! Deletes are read when the file is opened, not when the query is planned. Filters are used for leaving out files, row
//! groups and pages, and for decoding less of the rows that they leave out ([`late`]). None of it is relied on: DataFusion drops a
//! row filter that it cannot build for a file without a word, and does so for nested columns and for what stands in for a column.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{Result as DfResult, ScalarValue};
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{
    FileOpener, FileScanConfig, FileScanConfigBuilder, FileSource, ParquetSource,
};
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::projection::{ProjectionExpr, ProjectionExprs};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::filter_pushdown::FilterPushdownPropagation;
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder};
use datafusion::physical_plan::{DisplayFormatType, SortOrderPushdownResult};
use datafusion_datasource::TableSchema;
use datafusion_datasource::morsel::{Morsel, MorselPlan, MorselPlanner, Morselizer};
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::ObjectStore;
use roaring::RoaringTreemap;
use uuid::Uuid;

use super::adapter::Rules;
use super::deletes::{DeleteReader, EqualityFilter, EqualitySet, Held, access_plan, equality_columns};
use super::plan::{DeleteFile, DeleteKind, Pruned};
use super::selectivity::Known;
use super::{footer, late};
use crate::error::{Error, Result};

/// What is to be known of a file of a table when it is opened. An extension of its [`PartitionedFile`].
#[derive(Debug, Clone)]
pub struct FilePlan {
    /// As the table's metadata names it.
    pub location: String,
    pub deletes: Vec<Arc<DeleteFile>>,
    /// Values of columns that the file need not have, by id.
    pub constants: Arc<HashMap<i32, ScalarValue>>,
}

/// What a [`LakeSource`] is made of, but for where it reads.
pub(super) struct Parts {
    pub inner: Arc<dyn FileSource>,
    pub rules: Arc<Rules>,
    pub pruned: Pruned,
    pub batch_size: Option<usize>,
}

/// A source of the files of one version of a table.
#[derive(Clone)]
pub struct LakeSource {
    /// With everything that was pushed into it.
    inner: Arc<dyn FileSource>,
    /// Without.
    plain: Arc<ParquetSource>,
    rules: Arc<Rules>,
    deletes: DeleteReader,
    /// What planning left out, for people to see.
    pruned: Pruned,
    batch_size: Option<usize>,
    /// Whose files they are; `None` for one that came from another node.
    table: Option<Uuid>,
    /// Whether filters are looked at early wherever they can be, and not only where it pays.
    always_early: bool,
}

impl LakeSource {
    pub fn new(plain: ParquetSource, rules: Arc<Rules>, deletes: DeleteReader, pruned: Pruned) -> Self {
        let figure =
            |name: &'static str, value: usize| MetricBuilder::new(plain.metrics()).global_counter(name).add(value);
        figure("files_left_out", pruned.files);
        figure("manifests_left_out", pruned.manifests);
        figure("manifest_cache_hits", pruned.manifests_cached);
        figure("manifest_cache_misses", pruned.manifests_read);
        let (inner, plain) = (Arc::new(plain.clone()), Arc::new(plain));
        Self { inner, plain, rules, deletes, pruned, batch_size: None, table: None, always_early: false }
    }

    /// The same, of this table.
    pub fn of_table(self, table: Uuid) -> Self {
        Self { table: Some(table), ..self }
    }

    /// The same that looks at filters early wherever that can be, whether it pays or not.
    pub fn with_early_filters(self, always: bool) -> Self {
        Self { always_early: always, ..self }
    }

    /// The table, where the scan was planned.
    pub fn table(&self) -> Option<Uuid> {
        self.table
    }

    /// What another node needs for reading the same.
    pub(super) fn parts(&self) -> Parts {
        Parts { inner: self.inner.clone(), rules: self.rules.clone(), pruned: self.pruned, batch_size: self.batch_size }
    }

    /// The source of these parts. `plain`: as `inner`, without what was pushed into it. What planning left out is counted
    /// where it was planned.
    pub(super) fn of(parts: Parts, plain: ParquetSource, deletes: DeleteReader) -> Self {
        let Parts { inner, rules, pruned, batch_size } = parts;
        Self { inner, plain: Arc::new(plain), rules, deletes, pruned, batch_size, table: None, always_early: false }
    }

    fn with_inner(&self, inner: Arc<dyn FileSource>) -> Self {
        Self { inner, ..self.clone() }
    }

    fn wrap(&self, inner: Arc<dyn FileSource>) -> Arc<dyn FileSource> {
        Arc::new(self.with_inner(inner))
    }

    /// The same source, reading these columns as well, after its own.
    fn with_columns(&self, names: &[String]) -> Result<Arc<dyn FileSource>> {
        let schema = self.plain.table_schema().table_schema();
        if self.inner.table_schema().table_schema() != schema {
            return Err(Error::not_supported("row numbers of a table with equality deletes are not supported yet"));
        }
        let asked = match self.inner.projection() {
            Some(projection) => projection.clone(),
            None => ProjectionExprs::from_indices(&(0..schema.fields().len()).collect::<Vec<_>>(), schema),
        };
        let mut exprs: Vec<ProjectionExpr> = asked.iter().cloned().collect();
        for name in names {
            let index = schema.index_of(name).map_err(Error::internal)?;
            exprs.push(ProjectionExpr::new(Arc::new(Column::new(name, index)), format!("__equality_{name}")));
        }
        let source = match self.inner.filter() {
            Some(filter) => self.plain.with_predicate(filter),
            None => self.plain.as_ref().clone(),
        };
        let source = source.try_pushdown_projection(&ProjectionExprs::new(exprs))?;
        let source = source.ok_or_else(|| Error::internal("a Parquet source took no projection"))?;
        Ok(match self.batch_size {
            Some(rows) => source.with_batch_size(rows),
            None => source,
        })
    }

    /// Whether filters may be looked at early. A row's place is made by the reader, and a limit is of rows that no filter has looked at.
    fn may_be_early(&self, config: &FileScanConfig) -> bool {
        config.limit.is_none()
            && self.table_schema().virtual_columns().is_empty()
            && self.filter().is_some_and(|filter| late::cannot_fail(&filter))
    }
}

impl FileSource for LakeSource {
    fn create_file_opener(
        &self,
        store: Arc<dyn ObjectStore>,
        config: &FileScanConfig,
        partition: usize,
    ) -> DfResult<Arc<dyn FileOpener>> {
        // Says that it is not to be asked.
        self.inner.create_file_opener(store, config, partition)
    }

    fn create_morselizer(
        &self,
        store: Arc<dyn ObjectStore>,
        config: &FileScanConfig,
        partition: usize,
    ) -> DfResult<Box<dyn Morselizer>> {
        let columns = config.statistics().column_statistics;
        let scan = Scan {
            source: self.clone(),
            store,
            url: config.object_store_url.clone(),
            limit: config.limit,
            preserve_order: config.preserve_order,
            partition,
            may_be_early: self.may_be_early(config),
            distinct: columns.iter().map(|column| column.distinct_count.get_value().copied()).collect(),
        };
        let plain = scan.morselizer(self.inner.clone(), config.limit, Arc::default(), None)?;
        Ok(Box::new(LakeMorselizer { plain, scan: Arc::new(scan) }))
    }

    fn table_schema(&self) -> &TableSchema {
        self.inner.table_schema()
    }

    fn with_batch_size(&self, batch_size: usize) -> Arc<dyn FileSource> {
        let source = self.with_inner(self.inner.with_batch_size(batch_size));
        Arc::new(Self { batch_size: Some(batch_size), ..source })
    }

    fn filter(&self) -> Option<Arc<dyn PhysicalExpr>> {
        self.inner.filter()
    }

    fn projection(&self) -> Option<&ProjectionExprs> {
        self.inner.projection()
    }

    fn metrics(&self) -> &ExecutionPlanMetricsSet {
        self.inner.metrics()
    }

    fn file_type(&self) -> &str {
        self.inner.file_type()
    }

    fn fmt_extra(&self, kind: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt_extra(kind, f)?;
        let Pruned { manifests, files, .. } = self.pruned;
        match kind {
            DisplayFormatType::Default | DisplayFormatType::Verbose if manifests + files > 0 => {
                write!(f, ", manifests_left_out={manifests}, files_left_out={files}")
            }
            _ => Ok(()),
        }
    }

    fn try_pushdown_filters(
        &self,
        filters: Vec<Arc<dyn PhysicalExpr>>,
        config: &ConfigOptions,
    ) -> DfResult<FilterPushdownPropagation<Arc<dyn FileSource>>> {
        let mut config = config.clone();
        config.execution.parquet.pushdown_filters = false;
        let pushed = self.inner.try_pushdown_filters(filters, &config)?;
        let updated_node = pushed.updated_node.map(|inner| self.wrap(inner));
        Ok(FilterPushdownPropagation { filters: pushed.filters, updated_node })
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
        properties: &EquivalenceProperties,
    ) -> DfResult<SortOrderPushdownResult<Arc<dyn FileSource>>> {
        Ok(match self.inner.try_pushdown_sort(order, properties)? {
            SortOrderPushdownResult::Exact { inner } => SortOrderPushdownResult::Exact { inner: self.wrap(inner) },
            SortOrderPushdownResult::Inexact { inner } => SortOrderPushdownResult::Inexact { inner: self.wrap(inner) },
            SortOrderPushdownResult::Unsupported => SortOrderPushdownResult::Unsupported,
        })
    }

    fn reorder_files(&self, files: Vec<PartitionedFile>) -> Vec<PartitionedFile> {
        self.inner.reorder_files(files)
    }

    fn try_pushdown_projection(&self, projection: &ProjectionExprs) -> DfResult<Option<Arc<dyn FileSource>>> {
        Ok(self.inner.try_pushdown_projection(projection)?.map(|inner| self.wrap(inner)))
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> DfResult<TreeNodeRecursion>,
    ) -> DfResult<TreeNodeRecursion> {
        self.inner.apply_expressions(f)
    }
}

/// One partition of a scan.
struct Scan {
    source: LakeSource,
    store: Arc<dyn ObjectStore>,
    url: ObjectStoreUrl,
    limit: Option<usize>,
    preserve_order: bool,
    partition: usize,
    /// Whether its filters may be looked at while a file is decoded.
    may_be_early: bool,
    /// How many distinct values the table's columns have, where that is known.
    distinct: Vec<Option<usize>>,
}

/// What a file's deletes come to.
#[derive(Default)]
struct Deleted {
    positions: Option<Held<RoaringTreemap>>,
    /// By the ids of the columns that they compare.
    equality: Vec<(Vec<i32>, Vec<Held<EqualitySet>>)>,
}

impl Scan {
    /// What is looked at while this file is decoded.
    fn early(&self, file: &PartitionedFile) -> Option<Arc<dyn PhysicalExpr>> {
        let (filter, asked) = self.source.filter().zip(self.source.projection()).filter(|_| self.may_be_early)?;
        if self.source.always_early {
            return Some(filter);
        }
        if !self.url.as_str().starts_with("file:") && file.object_meta.size <= late::REMOTE_FILE_BYTES {
            return None;
        }
        let schema = self.source.plain.table_schema().file_schema();
        let known = Known { schema, statistics: file.statistics.as_deref()?, distinct: &self.distinct };
        late::worth(&filter, asked, &known)
    }

    fn morselizer(
        &self,
        source: Arc<dyn FileSource>,
        limit: Option<usize>,
        constants: Arc<HashMap<i32, ScalarValue>>,
        early: Option<Arc<dyn PhysicalExpr>>,
    ) -> DfResult<Box<dyn Morselizer>> {
        let source = match early {
            Some(filter) => late::late(source, filter),
            None => source,
        };
        // The configuration of the whole scan, but for its files.
        let config = FileScanConfigBuilder::new(self.url.clone(), source.clone())
            .with_limit(limit)
            .with_preserve_order(self.preserve_order)
            .with_expr_adapter(Some(Arc::new(self.source.rules.for_files(constants))))
            .build();
        source.create_morselizer(self.store.clone(), &config, self.partition)
    }

    async fn deleted(&self, plan: &FilePlan) -> Result<Deleted> {
        let reader = &self.source.deletes;
        let mut deleted = Deleted::default();
        for delete in &plan.deletes {
            match &delete.kind {
                DeleteKind::Positions | DeleteKind::Vector { .. } => {
                    let Some(found) = reader.positions(delete, &plan.location).await? else { continue };
                    deleted.positions = Some(match deleted.positions.take() {
                        None => found,
                        Some(before) => reader.together(&before, &found, &plan.location)?,
                    });
                }
                DeleteKind::Equality(ids) => {
                    let schema = self.source.plain.table_schema().file_schema();
                    let columns = equality_columns(ids, schema)?;
                    let set = reader.equality(delete, &columns).await?;
                    let ids: Vec<i32> = columns.iter().map(|column| column.id).collect();
                    match deleted.equality.iter_mut().find(|(of, _)| *of == ids) {
                        Some((_, sets)) => sets.push(set),
                        None => deleted.equality.push((ids, vec![set])),
                    }
                }
            }
        }
        Ok(deleted)
    }

    /// Begins reading a file, without what is deleted from it.
    async fn open(&self, mut file: PartitionedFile, plan: &FilePlan) -> Result<Box<dyn MorselPlanner>> {
        let deleted = self.deleted(plan).await?;
        let early = self.early(&file);
        if let Some(positions) = &deleted.positions {
            let footers = self.source.deletes.footers.as_ref();
            let footer = footer::read(self.store.as_ref(), &file.object_meta, footers, false).await?;
            file = file.with_extension(access_plan(&footer, positions));
        }
        if deleted.equality.is_empty() {
            let morselizer = self.morselizer(self.source.inner.clone(), self.limit, plan.constants.clone(), early)?;
            return Ok(morselizer.plan_file(file)?);
        }
        let schema = self.source.plain.table_schema().file_schema();
        let projection = self.source.inner.projection();
        let asked = projection.map_or(self.source.table_schema().table_schema().fields().len(), |p| p.iter().count());
        let mut names: Vec<String> = Vec::new();
        let mut filters = Vec::new();
        for (ids, sets) in deleted.equality {
            let columns = equality_columns(&ids, schema)?;
            let place = |name: &String| {
                let known = names.iter().position(|other| other == name).unwrap_or_else(|| {
                    names.push(name.clone());
                    names.len() - 1
                });
                asked + known
            };
            let places = columns.iter().map(|column| &column.name).map(place).collect();
            filters.push(EqualityFilter::new(&columns, places, sets)?);
        }
        let source = self.source.with_columns(&names)?;
        let morselizer = self.morselizer(source, None, plan.constants.clone(), early)?;
        let inner = morselizer.plan_file(file)?;
        Ok(Box::new(FilteredPlanner { inner, asked, filters: filters.into() }))
    }
}

struct LakeMorselizer {
    /// For files that nothing has to be known of.
    plain: Box<dyn Morselizer>,
    scan: Arc<Scan>,
}

impl fmt::Debug for LakeMorselizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LakeMorselizer({:?})", self.plain)
    }
}

impl Morselizer for LakeMorselizer {
    fn plan_file(&self, file: PartitionedFile) -> DfResult<Box<dyn MorselPlanner>> {
        let plan = file.extension::<FilePlan>().cloned();
        // Without it deleted rows would come back.
        let plan = plan.ok_or_else(|| Error::internal("a file of a table came without its plan").into_datafusion())?;
        if !plan.deletes.is_empty() {
            return Ok(Box::new(WithDeletes { scan: self.scan.clone(), file, plan }));
        }
        let early = self.scan.early(&file);
        if plan.constants.is_empty() && early.is_none() {
            return self.plain.plan_file(file);
        }
        let source = self.scan.source.inner.clone();
        self.scan.morselizer(source, self.scan.limit, plan.constants, early)?.plan_file(file)
    }
}

/// Reads a file's deletes, and then begins with the file.
struct WithDeletes {
    scan: Arc<Scan>,
    file: PartitionedFile,
    plan: FilePlan,
}

impl fmt::Debug for WithDeletes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WithDeletes({:?})", self.plan)
    }
}

impl MorselPlanner for WithDeletes {
    fn plan(self: Box<Self>) -> DfResult<Option<MorselPlan>> {
        let Self { scan, file, plan } = *self;
        Ok(Some(
            MorselPlan::new()
                .with_pending_planner(async move { scan.open(file, &plan).await.map_err(Error::into_datafusion) }),
        ))
    }
}

/// Applies equality deletes to what another planner's morsels read.
#[derive(Debug)]
struct FilteredPlanner {
    inner: Box<dyn MorselPlanner>,
    /// How many columns the query asked for; those after them are for the filters.
    asked: usize,
    filters: Arc<[EqualityFilter]>,
}

impl MorselPlanner for FilteredPlanner {
    fn plan(self: Box<Self>) -> DfResult<Option<MorselPlan>> {
        let Self { inner, asked, filters } = *self;
        let Some(mut plan) = inner.plan()? else { return Ok(None) };
        let planner = move |inner, filters: &Arc<[EqualityFilter]>| {
            Box::new(FilteredPlanner { inner, asked, filters: filters.clone() }) as Box<dyn MorselPlanner>
        };
        let morsels = plan.take_morsels().into_iter();
        let morsels = morsels
            .map(|inner| Box::new(FilteredMorsel { inner, asked, filters: filters.clone() }) as Box<dyn Morsel>)
            .collect();
        let planners = plan.take_ready_planners().into_iter().map(|inner| planner(inner, &filters)).collect();
        let mut filtered = MorselPlan::new().with_morsels(morsels).with_planners(planners);
        if let Some(pending) = plan.take_pending_planner() {
            filtered.set_pending_planner(async move { Ok(planner(pending.await?, &filters)) });
        }
        Ok(Some(filtered))
    }
}

#[derive(Debug)]
struct FilteredMorsel {
    inner: Box<dyn Morsel>,
    asked: usize,
    filters: Arc<[EqualityFilter]>,
}

impl Morsel for FilteredMorsel {
    fn into_stream(self: Box<Self>) -> BoxStream<'static, DfResult<RecordBatch>> {
        let Self { inner, asked, filters } = *self;
        let own: Vec<usize> = (0..asked).collect();
        let filter = move |batch: DfResult<RecordBatch>| {
            let left = filters.iter().try_fold(batch?, |batch, filter| filter.apply(&batch))?;
            Ok(left.project(&own)?)
        };
        inner.into_stream().map(filter).boxed()
    }
}

/// The ids of the columns that the deletes of `files` compare.
pub fn ids_compared<'a>(files: impl Iterator<Item = &'a Arc<DeleteFile>>) -> HashSet<i32> {
    let ids = files.filter_map(|delete| match &delete.kind {
        DeleteKind::Equality(ids) => Some(ids),
        _ => None,
    });
    ids.flatten().copied().collect()
}
