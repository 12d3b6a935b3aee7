//! What is in a file's pages is known only once they are decoded: the parquet crate may find that it does not match its checksum, or
//! is nothing it can decode, or may panic on it. Either ends the query with an error that names the file.
//!
//! [`NameDamagedFiles`] is the last rule of the physical optimizer. It puts a [`Guarded`] source in the place of each source
//! of Parquet files, of tables and of files named in SQL alike, so that nothing before it has to know. A guarded source plans
//! and decodes as the one inside does, file by file, and catches what goes wrong on the way.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::common::{DataFusionError, Result};
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{FileOpener, FileScanConfig, FileScanConfigBuilder, FileSource};
use datafusion::datasource::source::DataSourceExec;
use datafusion::physical_expr::projection::ProjectionExprs;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion::physical_plan::{DisplayFormatType, ExecutionPlan, PhysicalExpr};
use datafusion_datasource::TableSchema;
use datafusion_datasource::morsel::{Morsel, MorselPlan, MorselPlanner, Morselizer};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use object_store::ObjectStore;

use crate::error::{Error, Kind, words_of_panic};

/// The rule that guards all sources of Parquet files.
#[derive(Debug)]
pub struct NameDamagedFiles;

impl PhysicalOptimizerRule for NameDamagedFiles {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|node| {
            let scan = node
                .downcast_ref::<DataSourceExec>()
                .and_then(|exec| exec.data_source().downcast_ref::<FileScanConfig>())
                .filter(|scan| scan.file_source.file_type() == "parquet" && !scan.file_source.is::<Guarded>());
            let Some(scan) = scan else { return Ok(Transformed::no(node)) };
            let source = Arc::new(Guarded { inner: scan.file_source.clone() });
            let guarded = FileScanConfigBuilder::from(scan.clone()).with_source(source).build();
            Ok(Transformed::yes(DataSourceExec::from_data_source(guarded) as Arc<dyn ExecutionPlan>))
        })
        .data()
    }

    fn name(&self) -> &str {
        "name_damaged_files"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// A source of files where what is wrong in a file's pages is an error that names the file.
pub(super) struct Guarded {
    inner: Arc<dyn FileSource>,
}

impl Guarded {
    pub(super) fn new(inner: Arc<dyn FileSource>) -> Self {
        Self { inner }
    }

    pub(super) fn inner(&self) -> &Arc<dyn FileSource> {
        &self.inner
    }
}

impl FileSource for Guarded {
    fn create_file_opener(
        &self,
        store: Arc<dyn ObjectStore>,
        config: &FileScanConfig,
        partition: usize,
    ) -> Result<Arc<dyn FileOpener>> {
        self.inner.create_file_opener(store, config, partition)
    }

    fn create_morselizer(
        &self,
        store: Arc<dyn ObjectStore>,
        config: &FileScanConfig,
        partition: usize,
    ) -> Result<Box<dyn Morselizer>> {
        Ok(Box::new(GuardedMorselizer { inner: self.inner.create_morselizer(store, config, partition)? }))
    }

    fn table_schema(&self) -> &TableSchema {
        self.inner.table_schema()
    }

    fn with_batch_size(&self, batch_size: usize) -> Arc<dyn FileSource> {
        Arc::new(Self { inner: self.inner.with_batch_size(batch_size) })
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
        self.inner.fmt_extra(kind, f)
    }

    fn reorder_files(&self, files: Vec<PartitionedFile>) -> Vec<PartitionedFile> {
        self.inner.reorder_files(files)
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.inner.apply_expressions(f)
    }
}

/// The file that is being read, for messages.
type Name = Arc<str>;

/// Runs what may fail or panic when `file` is damaged.
fn guarded<T>(file: &Name, work: impl FnOnce() -> Result<T>) -> Result<T> {
    ended(file, catch_unwind(AssertUnwindSafe(work)))
}

/// What became of such work.
fn ended<T>(file: &Name, done: std::thread::Result<Result<T>>) -> Result<T> {
    match done {
        Ok(done) => done.map_err(|error| named(file, error)),
        Err(panic) => Err(failed(file, panic.as_ref())),
    }
}

/// The same error; if it is about what is in a file, and names none, with `file`.
fn named(file: &Name, error: DataFusionError) -> DataFusionError {
    let is_of_parquet = match &error {
        DataFusionError::ParquetError(_) => true,
        DataFusionError::ArrowError(inner, _) => matches!(inner.as_ref(), ArrowError::ParquetError(_)),
        _ => false,
    };
    if !is_of_parquet {
        return error;
    }
    let error = Error::from(error);
    let is_named = error.message.contains(file.trim_start_matches('/'));
    match unmatched(&error) {
        _ if error.kind != Kind::Corrupt || is_named => error,
        Some(why) => Error::corrupt(format!("{file} is damaged: {why}")),
        None => Error::corrupt(format!("{file} is damaged, or written in a way that lake cannot read: {error}")),
    }
    .into_datafusion()
}

/// In words, if it is that a page does not match its checksum.
pub(super) fn unmatched(error: &Error) -> Option<&'static str> {
    // The parquet crate has no other error for it.
    let says_so = error.message.contains("CRC checksum mismatch");
    says_so.then_some("what is in one of its pages does not match the checksum that was written with it")
}

fn failed(file: &Name, panic: &(dyn Any + Send)) -> DataFusionError {
    let words = words_of_panic(panic);
    tracing::error!(file = &**file, panic = words, "reading a file panicked");
    Error::corrupt(format!("{file} is damaged: what is in its pages is not what it says of them ({words})"))
        .into_datafusion()
}

#[derive(Debug)]
struct GuardedMorselizer {
    inner: Box<dyn Morselizer>,
}

impl Morselizer for GuardedMorselizer {
    fn plan_file(&self, file: PartitionedFile) -> Result<Box<dyn MorselPlanner>> {
        let name: Name = format!("/{}", file.object_meta.location).into();
        let inner = guarded(&name, || self.inner.plan_file(file))?;
        Ok(Box::new(GuardedPlanner { file: name, inner }))
    }
}

#[derive(Debug)]
struct GuardedPlanner {
    file: Name,
    inner: Box<dyn MorselPlanner>,
}

impl MorselPlanner for GuardedPlanner {
    fn plan(self: Box<Self>) -> Result<Option<MorselPlan>> {
        let Self { file, inner } = *self;
        let planner =
            |file: &Name, inner| Box::new(GuardedPlanner { file: file.clone(), inner }) as Box<dyn MorselPlanner>;
        let Some(mut plan) = guarded(&file, || inner.plan())? else { return Ok(None) };
        let morsels = plan.take_morsels().into_iter();
        let morsels = morsels.map(|inner| Box::new(GuardedMorsel { file: file.clone(), inner }) as Box<dyn Morsel>);
        let planners = plan.take_ready_planners().into_iter().map(|inner| planner(&file, inner));
        let mut guarded = MorselPlan::new().with_morsels(morsels.collect()).with_planners(planners.collect());
        if let Some(pending) = plan.take_pending_planner() {
            guarded.set_pending_planner(async move {
                let inner = ended(&file, AssertUnwindSafe(pending).catch_unwind().await)?;
                Ok(planner(&file, inner))
            });
        }
        Ok(Some(guarded))
    }
}

#[derive(Debug)]
struct GuardedMorsel {
    file: Name,
    inner: Box<dyn Morsel>,
}

impl Morsel for GuardedMorsel {
    fn into_stream(self: Box<Self>) -> BoxStream<'static, Result<RecordBatch>> {
        let Self { file, inner } = *self;
        let stream = match guarded(&file, || Ok(inner.into_stream())) {
            Ok(stream) => stream,
            Err(error) => return futures::stream::iter([Err(error)]).boxed(),
        };
        // It ends with the panic.
        let batches = AssertUnwindSafe(stream).catch_unwind();
        batches.map(move |batch| ended(&file, batch)).boxed()
    }
}
