//! A scan as it travels to another node.
//!
//! DataFusion's own encoding of a plan knows neither [`LakeSource`] nor what hangs on its files, and would leave both out without
//! a word: deleted rows would come back, and columns be found by name. So a scan of a table is written here, whole, or refused:
//! - the Parquet source inside, with projection and predicate, in DataFusion's encoding, without its files;
//! - the files by their locations in the table's metadata, each with its range, its deletes and its constants;
//! - the rules by which columns are found in files.
//!
//! ```text
//! length of JSON (4 bytes, big-endian) | JSON ([`Scan`]) | PhysicalPlanNode
//! ```
//! Where objects are, and with which keys, every node knows by itself ([`Storage`]): a plan holds locations, and no secrets.

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::common::{ScalarValue, Statistics};
use datafusion::datasource::listing::{FileRange, PartitionedFile};
use datafusion::datasource::physical_plan::{
    FileGroup, FileScanConfig, FileScanConfigBuilder, FileSource, ParquetSource,
};
use datafusion::datasource::source::DataSourceExec;
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{
    DefaultPhysicalExtensionCodec, PhysicalPlanDecodeContext, PhysicalProtoConverterExtension,
};
use datafusion_proto::protobuf;
use iceberg::spec::NameMapping;
use prost::Message;
use serde::{Deserialize, Serialize};

use super::adapter::Rules;
use super::deletes::{DeleteCache, DeleteReader};
use super::guard::Guarded;
use super::plan::{DeleteFile, Pruned};
use super::reader::CheckedReaders;
use super::source::{FilePlan, LakeSource, Parts};
use crate::error::{Error, Result};
use crate::storage::Storage;

const LENGTH_BYTES: usize = 4;

/// What DataFusion's encoding does not hold.
#[derive(Serialize, Deserialize)]
struct Scan {
    rules: Columns,
    /// Each once, however many files it applies to.
    deletes: Vec<DeleteFile>,
    groups: Vec<Vec<File>>,
    limit: Option<usize>,
    batch_size: Option<usize>,
}

/// [`Rules`].
#[derive(Serialize, Deserialize)]
struct Columns {
    table: String,
    defaults: Vec<(i32, Vec<u8>)>,
    required: Vec<i32>,
    partitioned_by: Vec<i32>,
    names: Option<NameMapping>,
    maybe_nan: Vec<i32>,
}

/// A data file, or a range of it.
#[derive(Serialize, Deserialize)]
struct File {
    location: String,
    size: u64,
    range: Option<(i64, i64)>,
    /// Which of the scan's.
    deletes: Vec<usize>,
    constants: Vec<(i32, Vec<u8>)>,
}

/// A scan of a table, if that is what a node of a plan is.
pub fn of_table(node: &dyn ExecutionPlan) -> Option<(&FileScanConfig, &LakeSource)> {
    let scan = node.downcast_ref::<DataSourceExec>()?.data_source().downcast_ref::<FileScanConfig>()?;
    let source = match scan.file_source.downcast_ref::<Guarded>() {
        Some(guarded) => guarded.inner(),
        None => &scan.file_source,
    };
    Some((scan, source.downcast_ref::<LakeSource>()?))
}

/// Whether another node can read it: the rows' places, and an order among files, are for statements that stay on one node.
pub fn can_travel(scan: &FileScanConfig) -> bool {
    let schema = scan.file_source.table_schema();
    let all_known = || scan.file_groups.iter().flat_map(|group| group.iter()).all(|file| location(file).is_some());
    schema.table_partition_cols().is_empty()
        && schema.virtual_columns().is_empty()
        && !scan.preserve_order
        && scan.output_ordering.is_empty()
        && scan.output_partitioning.is_none()
        && all_known()
}

/// The location of a table's file, as its metadata names it.
pub fn location(file: &PartitionedFile) -> Option<&str> {
    file.extension::<FilePlan>().map(|plan| plan.location.as_str())
}

fn scalar(value: &ScalarValue) -> Result<Vec<u8>> {
    let encoded = protobuf::ScalarValue::try_from(value)
        .map_err(|e| Error::not_supported(format!("sending a constant to another node: {e}")))?;
    Ok(encoded.encode_to_vec())
}

fn scalars<'a>(values: impl IntoIterator<Item = (&'a i32, &'a ScalarValue)>) -> Result<Vec<(i32, Vec<u8>)>> {
    values.into_iter().map(|(id, value)| Ok((*id, scalar(value)?))).collect()
}

fn read_scalars(values: Vec<(i32, Vec<u8>)>) -> Result<HashMap<i32, ScalarValue>> {
    let read = |(id, bytes): (i32, Vec<u8>)| {
        let encoded = protobuf::ScalarValue::decode(bytes.as_slice()).map_err(not_ours)?;
        let value = ScalarValue::try_from(&encoded).map_err(not_ours)?;
        Ok((id, value))
    };
    values.into_iter().map(read).collect()
}

fn not_ours(why: impl std::fmt::Display) -> Error {
    Error::internal(format!("reading a scan that another node has sent: {why}"))
}

fn of_ids(ids: &std::collections::HashSet<i32>) -> Vec<i32> {
    ids.iter().copied().collect()
}

/// Writes a scan of a table.
///
/// # Errors
/// `NotSupported`: it is one that cannot travel; `Internal`: its parts cannot be written.
pub fn encode(
    scan: &FileScanConfig,
    source: &LakeSource,
    converter: &dyn PhysicalProtoConverterExtension,
    to: &mut Vec<u8>,
) -> Result<()> {
    if !can_travel(scan) {
        return Err(Error::not_supported("a scan with places or an order cannot be sent to another node"));
    }
    let Parts { inner, rules, batch_size, .. } = source.parts();
    if !inner.is::<ParquetSource>() {
        return Err(Error::internal("the source of a scan is not one of Parquet files"));
    }
    let mut deletes: Vec<DeleteFile> = Vec::new();
    let mut places: HashMap<Arc<DeleteFile>, usize> = HashMap::new();
    let mut file = |file: &PartitionedFile| -> Result<File> {
        let plan = file.extension::<FilePlan>();
        let plan = plan.ok_or_else(|| Error::internal("a file of a table came without its plan"))?;
        let mut place = |delete: &Arc<DeleteFile>| {
            *places.entry(delete.clone()).or_insert_with(|| {
                deletes.push(delete.as_ref().clone());
                deletes.len() - 1
            })
        };
        Ok(File {
            location: plan.location.clone(),
            size: file.object_meta.size,
            range: file.range.as_ref().map(|range| (range.start, range.end)),
            deletes: plan.deletes.iter().map(&mut place).collect(),
            constants: scalars(plan.constants.iter())?,
        })
    };
    let mut groups = Vec::with_capacity(scan.file_groups.len());
    for group in &scan.file_groups {
        groups.push(group.iter().map(&mut file).collect::<Result<Vec<_>>>()?);
    }
    let head = Scan {
        rules: Columns {
            table: rules.table.clone(),
            defaults: scalars(&rules.defaults)?,
            required: of_ids(&rules.required),
            partitioned_by: of_ids(&rules.partitioned_by),
            names: rules.names.clone(),
            maybe_nan: of_ids(&rules.maybe_nan),
        },
        deletes,
        groups,
        limit: scan.limit,
        batch_size,
    };
    let head = serde_json::to_vec(&head).map_err(|e| Error::internal(format!("writing a scan: {e}")))?;
    let length = u32::try_from(head.len()).map_err(|_| Error::exhausted("a scan of too many files to be sent"))?;
    let unknown = Statistics::new_unknown(inner.table_schema().table_schema());
    let plain = FileScanConfigBuilder::from(scan.clone())
        .with_source(inner)
        .with_file_groups(Vec::new())
        .with_statistics(unknown)
        .with_limit(None)
        .build();
    let plain: Arc<dyn ExecutionPlan> = DataSourceExec::from_data_source(plain);
    let plain = converter.execution_plan_to_proto(&plain, &DefaultPhysicalExtensionCodec {})?;
    to.extend(length.to_be_bytes());
    to.extend(head);
    plain.encode(to).map_err(|e| Error::internal(format!("writing a scan: {e}")))
}

/// The scan that another node has written, to be read here.
///
/// # Errors
/// `Internal` for what is none; those of [`Storage::resolve`].
pub fn decode(
    bytes: &[u8],
    storage: &Arc<Storage>,
    cache: &DeleteCache,
    task: &TaskContext,
    converter: &dyn PhysicalProtoConverterExtension,
) -> Result<Arc<dyn ExecutionPlan>> {
    let (length, rest) = bytes.split_first_chunk::<LENGTH_BYTES>().ok_or_else(|| not_ours("it is cut off"))?;
    let length = usize::try_from(u32::from_be_bytes(*length)).map_err(not_ours)?;
    let (head, plain) = rest.split_at_checked(length).ok_or_else(|| not_ours("it is cut off"))?;
    let Scan { rules, deletes, groups, limit, batch_size } = serde_json::from_slice(head).map_err(not_ours)?;
    let plain = protobuf::PhysicalPlanNode::decode(plain).map_err(not_ours)?;
    let runtime = task.runtime_env();
    let store = register(&plain, storage, task)?;
    let plain = converter
        .proto_to_execution_plan(&plain, &PhysicalPlanDecodeContext::new(task, &DefaultPhysicalExtensionCodec {}))?;
    let config = plain
        .downcast_ref::<DataSourceExec>()
        .and_then(|exec| exec.data_source().downcast_ref::<FileScanConfig>())
        .ok_or_else(|| not_ours("it is no scan of files"))?;
    let source = config.file_source.downcast_ref::<ParquetSource>();
    let source = source.ok_or_else(|| not_ours("it is no scan of Parquet files"))?;

    let footers = runtime.cache_manager.get_file_metadata_cache();
    let readers = Arc::new(CheckedReaders::new(store, footers));
    let bare = ParquetSource::new(source.table_schema().clone())
        .with_table_parquet_options(source.table_parquet_options().clone())
        .with_parquet_file_reader_factory(readers.clone());
    let rules = Arc::new(Rules {
        table: rules.table,
        defaults: read_scalars(rules.defaults)?,
        required: rules.required.into_iter().collect(),
        partitioned_by: rules.partitioned_by.into_iter().collect(),
        names: rules.names,
        maybe_nan: rules.maybe_nan.into_iter().collect(),
    });
    let parts = Parts {
        inner: Arc::new(source.clone().with_parquet_file_reader_factory(readers)),
        rules: rules.clone(),
        pruned: Pruned::default(),
        batch_size,
    };
    let reader = DeleteReader::new(storage.clone(), cache.clone(), &runtime);
    let source: Arc<dyn FileSource> = Arc::new(LakeSource::of(parts, bare, reader));
    let deletes: Vec<Arc<DeleteFile>> = deletes.into_iter().map(Arc::new).collect();
    let mut read = Vec::with_capacity(groups.len());
    for group in groups {
        let files = group.into_iter().map(|file| partitioned(file, &deletes, storage)).collect::<Result<Vec<_>>>()?;
        read.push(FileGroup::new(files));
    }
    let config = FileScanConfigBuilder::from(config.clone())
        .with_source(Arc::new(Guarded::new(source)))
        .with_file_groups(read)
        .with_limit(limit)
        .with_expr_adapter(Some(Arc::new(rules.for_files(Arc::default()))))
        .build();
    Ok(DataSourceExec::from_data_source(config))
}

fn partitioned(file: File, deletes: &[Arc<DeleteFile>], storage: &Storage) -> Result<PartitionedFile> {
    let mut partitioned = PartitionedFile::new("", file.size);
    partitioned.object_meta.location = storage.resolve(&file.location)?.path;
    partitioned.range = file.range.map(|(start, end)| FileRange { start, end });
    let delete = |place: usize| deletes.get(place).cloned().ok_or_else(|| not_ours("it names deletes that it lacks"));
    let plan = FilePlan {
        location: file.location,
        deletes: file.deletes.into_iter().map(delete).collect::<Result<_>>()?,
        constants: Arc::new(read_scalars(file.constants)?),
    };
    Ok(partitioned.with_extension(plan))
}

/// Makes the scan's object store known to DataFusion, as this node reaches it.
fn register(
    plain: &protobuf::PhysicalPlanNode,
    storage: &Storage,
    task: &TaskContext,
) -> Result<Arc<dyn object_store::ObjectStore>> {
    let Some(protobuf::physical_plan_node::PhysicalPlanType::ParquetScan(scan)) = &plain.physical_plan_type else {
        return Err(not_ours("it is no scan of Parquet files"));
    };
    let conf = scan.base_conf.as_ref().ok_or_else(|| not_ours("it does not say of what"))?;
    // Any object of the store says which one it is.
    let (url, store) = storage.url_and_store(&format!("{}_", conf.object_store_url))?;
    task.runtime_env().register_object_store(&url, store.clone());
    Ok(store)
}
