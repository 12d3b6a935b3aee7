//! INSERT: the rows of a plan are written as data files and then committed.
//!
//! Encoding is most of the work. Rows whose order means nothing are dealt to several writers once they are many, so that all cores
//! encode ([`write_in_any_order`]).

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::common::Result as DfResult;
use datafusion::common::runtime::SpawnedTask;
use datafusion::datasource::sink::DataSink;
use datafusion::execution::memory_pool::{MemoryLimit, MemoryPool};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::{DisplayAs, DisplayFormatType};
use futures::StreamExt;
use futures::future::{join_all, select_all};
use tokio::sync::mpsc;

use crate::error::{Error, Result};
use crate::progress;
use crate::table::memory::{MEMORY_PART, WriterMemory};
use crate::table::writer::{DataFiles, DataWriter, ROW_GROUP_BYTES};
use crate::table::{Table, Tables};

/// Rows of less than so many bytes, as they are in memory, are written by one writer: they make one file, and not many small ones.
const FEW_BYTES: usize = 64 << 20;
/// Most writers of one statement: fewer than the files that upkeep would pack at once.
const MAX_WRITERS: usize = 4;
/// Batches that wait for a writer that is encoding another.
const BATCHES_AHEAD: usize = 1;

/// Appends what it is given to one table.
pub struct AppendSink {
    tables: Arc<Tables>,
    table: Table,
    /// Every column may be null here: the writer refuses nulls, naming the column, and DataFusion would name a number.
    schema: SchemaRef,
    deadline: Instant,
}

impl AppendSink {
    pub fn new(tables: Arc<Tables>, table: Table, schema: &Schema, deadline: Instant) -> Self {
        let nullable = schema.fields().iter().map(|field| field.as_ref().clone().with_nullable(true));
        let schema = Arc::new(Schema::new(nullable.collect::<Vec<_>>()));
        Self { tables, table, schema, deadline }
    }

    async fn append(&self, rows: SendableRecordBatchStream, memory: &Arc<dyn MemoryPool>) -> Result<u64> {
        let writer = self.tables.data_writer(&self.table.metadata)?.within(WriterMemory::new(memory, 1));
        let files = write_rows(writer, rows, self.deadline).await?;
        let count = files.rows;
        self.tables.append(&self.table, files, self.deadline).await?;
        Ok(count)
    }
}

/// Writes all rows into data files, until the deadline.
pub async fn write_rows(
    mut writer: DataWriter,
    mut rows: SendableRecordBatchStream,
    deadline: Instant,
) -> Result<DataFiles> {
    let write = async {
        while let Some(batch) = rows.next().await {
            let batch = batch?;
            writer.write(&batch).await?;
            progress::count(batch.num_rows() as u64);
        }
        writer.finish().await
    };
    tokio::time::timeout_at(deadline.into(), write).await.unwrap_or_else(|_| Err(too_late()))
}

fn too_late() -> Error {
    Error::deadline("the rows were not written before the deadline; nothing was committed")
}

/// How writers share the rows of a statement.
#[derive(Debug, Clone)]
pub struct Sharing {
    /// At most so many.
    most: usize,
    few_bytes: usize,
    /// Where their row groups are taken from: those of all but the first before anything is written.
    memory: Arc<dyn MemoryPool>,
}

impl Sharing {
    /// Over so many cores, as far as the statement's memory goes.
    pub fn new(cores: usize, memory: &Arc<dyn MemoryPool>) -> Self {
        let by_memory = match memory.memory_limit() {
            MemoryLimit::Finite(bytes) => bytes / MEMORY_PART / ROW_GROUP_BYTES,
            MemoryLimit::Infinite | MemoryLimit::Unknown => MAX_WRITERS,
        };
        Self { most: cores.min(MAX_WRITERS).min(by_memory), few_bytes: FEW_BYTES, memory: memory.clone() }
    }
}

/// One of several writers, in a task of its own.
struct Sharer {
    rows: mpsc::Sender<RecordBatch>,
    written: SpawnedTask<Result<DataFiles>>,
}

impl Sharer {
    fn start(mut writer: DataWriter) -> Self {
        let (rows, mut dealt) = mpsc::channel::<RecordBatch>(BATCHES_AHEAD);
        let written = SpawnedTask::spawn(async move {
            while let Some(batch) = dealt.recv().await {
                writer.write(&batch).await?;
            }
            writer.finish().await
        });
        Self { rows, written }
    }
}

/// [`write_rows`] of rows whose order means nothing.
///
/// # Errors
/// As [`write_rows`]; what the other writers have written is removed.
pub async fn write_in_any_order(
    first: DataWriter,
    mut rows: SendableRecordBatchStream,
    sharing: &Sharing,
    deadline: Instant,
) -> Result<DataFiles> {
    let mut first = first.within(WriterMemory::new(&sharing.memory, sharing.most));
    let write = async {
        let mut bytes: usize = 0;
        while sharing.most < 2 || bytes < sharing.few_bytes {
            let Some(batch) = rows.next().await else { return first.finish().await };
            let batch = batch?;
            bytes = bytes.saturating_add(batch.get_array_memory_size());
            first.write(&batch).await?;
            progress::count(batch.num_rows() as u64);
        }
        let mut sharers = Vec::new();
        while sharers.len() + 1 < sharing.most {
            let memory = WriterMemory::new(&sharing.memory, sharing.most).with_a_row_group();
            let Some(memory) = memory else { break };
            sharers.push(Sharer::start(first.another().within(memory)));
        }
        sharers.push(Sharer::start(first));
        while let Some(batch) = rows.next().await {
            let batch = batch?;
            let mut places = Vec::with_capacity(sharers.len());
            for sharer in &sharers {
                places.push(Box::pin(sharer.rows.reserve()));
            }
            let (free, ..) = select_all(places).await;
            // Who takes no more has failed, and says why below.
            let Ok(free) = free else { break };
            progress::count(batch.num_rows() as u64);
            free.send(batch);
        }
        // No more rows come: each ends its file, also where another has failed.
        let writing = join_all(sharers.into_iter().map(|sharer| sharer.written)).await;
        let mut all: Option<DataFiles> = None;
        for written in writing {
            let written = written.map_err(|e| Error::internal(format!("writing a data file: {e}")))??;
            match &mut all {
                Some(all) => all.absorb(written),
                None => all = Some(written),
            }
        }
        all.ok_or_else(|| Error::internal("rows were written by nobody"))
    };
    tokio::time::timeout_at(deadline.into(), write).await.unwrap_or_else(|_| Err(too_late()))
}

impl fmt::Debug for AppendSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppendSink({})", self.table.ident)
    }
}

impl DisplayAs for AppendSink {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppendSink(table={})", self.table.ident)
    }
}

#[async_trait]
impl DataSink for AppendSink {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    async fn write_all(&self, rows: SendableRecordBatchStream, context: &Arc<TaskContext>) -> DfResult<u64> {
        self.append(rows, &context.runtime_env().memory_pool).await.map_err(Error::into_datafusion)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use arrow::array::Int64Array;
    use arrow::datatypes::{DataType, Field};
    use datafusion::execution::memory_pool::{GreedyMemoryPool, UnboundedMemoryPool};
    use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
    use tokio_util::task::TaskTracker;

    use super::*;

    const ROWS: i64 = 100;

    fn writer(dir: &Path, tasks: &TaskTracker) -> DataWriter {
        let columns = vec![Field::new("id", DataType::Int64, false)];
        DataWriter::in_dir(dir, columns, &[], tasks.clone(), 1 << 20).unwrap()
    }

    /// A batch for each row; the one of `null` has no value.
    fn rows(null: Option<i64>) -> SendableRecordBatchStream {
        let batch = |id: i64| {
            let ids = Int64Array::from(vec![Some(id).filter(|id| Some(*id) != null)]);
            RecordBatch::try_from_iter_with_nullable([("id", Arc::new(ids) as _, true)]).unwrap()
        };
        let batches: Vec<_> = (0..ROWS).map(batch).collect();
        let schema = batches[0].schema();
        Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::iter(batches.into_iter().map(Ok))))
    }

    fn until() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn many_rows_are_written_by_several_and_few_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let tasks = TaskTracker::new();
        let files_of = async |most: usize, few_bytes: usize, memory: Arc<dyn MemoryPool>| {
            let sharing = Sharing { most, few_bytes, memory };
            let files = write_in_any_order(writer(dir.path(), &tasks), rows(None), &sharing, until()).await.unwrap();
            let counted: u64 = files.files.iter().map(|file| file.record_count()).sum();
            assert_eq!((counted, files.rows), (ROWS as u64, ROWS as u64));
            files.files.len()
        };
        let unbounded = || -> Arc<dyn MemoryPool> { Arc::new(UnboundedMemoryPool::default()) };
        let tight: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(ROW_GROUP_BYTES - 1));
        assert!(files_of(3, 1, unbounded()).await > 1);
        assert_eq!(files_of(3, FEW_BYTES, unbounded()).await, 1, "of few rows");
        assert_eq!(files_of(1, 1, unbounded()).await, 1, "on one core");
        assert_eq!(files_of(3, 1, tight).await, 1, "without memory");
    }

    #[tokio::test]
    async fn one_writer_that_fails_leaves_nothing_of_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let tasks = TaskTracker::new();
        let sharing = Sharing { most: 3, few_bytes: 1, memory: Arc::new(UnboundedMemoryPool::default()) };
        let failed = write_in_any_order(writer(dir.path(), &tasks), rows(Some(ROWS / 2)), &sharing, until()).await;
        let error = failed.unwrap_err();
        assert!(error.message.contains("column id is NOT NULL"), "{error}");
        tasks.close();
        tasks.wait().await;
        assert_eq!(std::fs::read_dir(dir.path().join("data")).map_or(0, Iterator::count), 0);
    }

    #[test]
    fn writers_hold_a_part_of_a_statements_memory() {
        let most = |bytes| {
            let memory: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(bytes));
            Sharing::new(16, &memory).most
        };
        assert_eq!((most(256 << 20), most(512 << 20), most(1 << 40)), (1, 2, MAX_WRITERS));
    }
}
