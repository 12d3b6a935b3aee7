//! Where statements compute: threads of their own.
//!
//! An operator may compute for seconds within one batch, a join above all, and gives nobody else a turn meanwhile. So plans are
//! executed by a runtime of the engine's own, with as many threads as the machine has cores, and their rows are handed over
//! through a short queue. What the node does besides (serving, heartbeats, commits, deadlines, cancelling) has the process's
//! runtime to itself: a statement that is cancelled, or whose deadline has come, ends at once for its client, and its operators
//! where the batch that they are at does.
//!
//! So is whatever of planning computes ([`planning`]): expressions of constants are evaluated there, and nothing ends a function that
//! is at one. What asks the metadata stays outside, and so does the parsing of a text, whose length is limited, and the writing of data
//! files. Parts of queries that other nodes coordinate are taken and computed by these threads as well. Requests to object stores are
//! made by the process's runtime, too ([`crate::storage`]): a connection may be used by both, and must be served while a batch is
//! computed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use datafusion::common::{Result as DfResult, exec_err};
use datafusion::execution::context::SessionConfig;
use datafusion::execution::session_state::SessionState;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::LogicalPlan;
use datafusion::physical_plan::stream::RecordBatchReceiverStreamBuilder;
use datafusion::physical_plan::{ExecutionPlan, execute_stream};
use futures::StreamExt;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinError;
use tokio_util::task::AbortOnDropHandle;

use super::growing;
use crate::error::{Error, Result};

/// Threads at least: one long batch leaves another thread to small statements, on one core too.
const MIN_THREADS: usize = 2;
/// Most threads for reads of files, which block. Further reads wait for one.
const MAX_BLOCKING_THREADS: usize = 128;
/// As the process's own threads have: plans are walked recursively. Only what is used takes memory.
const THREAD_STACK_BYTES: usize = 32 << 20;
/// Batches that wait to be taken out of the runtime.
const BATCHES_AHEAD: usize = 1;

/// Owns the threads, until it is stopped or dropped.
#[derive(Debug)]
pub struct ComputeThreads {
    handle: Handle,
    stopping: Arc<AtomicBool>,
    runtime: Mutex<Option<Runtime>>,
}

/// The way to the threads, which a session of DataFusion's carries as an extension.
#[derive(Debug)]
pub(super) struct Computing {
    handle: Handle,
    /// Set before the first of its tasks is dropped.
    stopping: Arc<AtomicBool>,
}

impl ComputeThreads {
    /// As many threads as there are cores.
    ///
    /// # Errors
    /// `Exhausted` if the threads cannot be had.
    pub fn start() -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(MIN_THREADS, usize::from);
        let runtime = Builder::new_multi_thread()
            .worker_threads(cores.max(MIN_THREADS))
            .max_blocking_threads(MAX_BLOCKING_THREADS)
            .thread_name("lake-compute")
            .thread_stack_size(THREAD_STACK_BYTES)
            .enable_all()
            .build()
            .map_err(|e| Error::exhausted(format!("starting the threads that statements compute on: {e}")))?;
        Ok(Self { handle: runtime.handle().clone(), stopping: Arc::default(), runtime: Mutex::new(Some(runtime)) })
    }

    /// What is to be among the extensions of a session whose plans are to be executed there.
    pub(super) fn extension(&self) -> Arc<Computing> {
        Arc::new(Computing { handle: self.handle.clone(), stopping: self.stopping.clone() })
    }

    /// Ends the threads, waiting for what they are computing at most for so long. What runs there afterwards ends with an error.
    pub async fn stop(&self, patience: Duration) {
        let Some(runtime) = self.take() else { return };
        // It blocks.
        let stopped = tokio::task::spawn_blocking(move || runtime.shutdown_timeout(patience)).await;
        if let Err(error) = stopped {
            tracing::warn!(%error, "the threads that statements compute on did not stop in order");
        }
    }

    fn take(&self) -> Option<Runtime> {
        self.stopping.store(true, Ordering::SeqCst);
        self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for ComputeThreads {
    /// Without [`ComputeThreads::stop`] nobody waits; the threads still end.
    fn drop(&mut self) {
        if let Some(runtime) = self.take() {
            runtime.shutdown_background();
        }
    }
}

/// A session whose plans are executed by the same threads as those of another.
pub fn as_in(other: &SessionState, config: SessionConfig) -> SessionConfig {
    match other.config().get_extension::<Computing>() {
        Some(computing) => config.with_extension(computing),
        None => config,
    }
}

/// Does a part of planning on the threads that a session names; on the caller's own if it names none. What it may make of constants
/// is limited ([`growing::while_planning`]). Who stops waiting has its answer at once: the part ends where it next waits for something.
///
/// # Errors
/// `Unavailable`: the threads are stopping.
///
/// # Panics
/// If the part does.
pub async fn planning<T: Send + 'static>(
    session: &SessionState,
    part: impl Future<Output = T> + Send + 'static,
) -> Result<T> {
    let part = growing::while_planning(part);
    let Some(computing) = session.config().get_extension::<Computing>() else { return Ok(part.await) };
    match AbortOnDropHandle::new(computing.handle.spawn(part)).await.map_err(JoinError::try_into_panic) {
        Ok(done) => Ok(done),
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        Err(Err(_)) => Err(Error::unavailable("this query node is stopping; nothing was done: ask another one")),
    }
}

/// The physical plan of a logical one, optimised.
///
/// # Errors
/// As [`planning`], and the plan's.
pub async fn physical_plan(session: &SessionState, plan: &LogicalPlan) -> Result<Arc<dyn ExecutionPlan>> {
    let (own, plan) = (session.clone(), plan.clone());
    Ok(planning(session, async move { own.create_physical_plan(&plan).await }).await??)
}

/// The rows of a plan, computed by the threads that its session names; by the caller's own if it names none. Dropping the
/// stream stops it.
///
/// # Errors
/// The plan's; in the stream too.
pub fn execute(plan: &Arc<dyn ExecutionPlan>, context: Arc<TaskContext>) -> DfResult<SendableRecordBatchStream> {
    there(&context.clone(), || execute_stream(plan.clone(), context))
}

/// The same of one partition.
///
/// # Errors
/// The plan's; in the stream too.
pub fn execute_partition(
    plan: &Arc<dyn ExecutionPlan>,
    partition: usize,
    context: Arc<TaskContext>,
) -> DfResult<SendableRecordBatchStream> {
    there(&context.clone(), || plan.execute(partition, context))
}

fn there(
    context: &TaskContext,
    begin: impl FnOnce() -> DfResult<SendableRecordBatchStream>,
) -> DfResult<SendableRecordBatchStream> {
    let Some(computing) = context.session_config().get_extension::<Computing>() else { return begin() };
    let mut rows = {
        // Operators may begin tasks as soon as they are executed.
        let _within = computing.handle.enter();
        begin()?
    };
    let mut builder = RecordBatchReceiverStreamBuilder::new(rows.schema(), BATCHES_AHEAD);
    let taken = builder.tx();
    let stopping = computing.stopping.clone();
    let compute = async move {
        while let Some(batch) = rows.next().await {
            let last = batch.is_err();
            if taken.send(batch).await.is_err() || last {
                return Ok(());
            }
        }
        // Operators take the silence of a task that was dropped for its end: these may be some of the rows.
        if stopping.load(Ordering::SeqCst) {
            return exec_err!("this query node is stopping; ask another one");
        }
        Ok(())
    };
    builder.spawn_on(compute, &computing.handle);
    Ok(builder.build())
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;
    use std::time::Instant;

    use arrow::array::RecordBatch;
    use arrow::datatypes::DataType;
    use datafusion::common::DataFusionError;
    use datafusion::execution::FunctionRegistry;
    use datafusion::logical_expr::{ColumnarValue, Volatility, create_udf};
    use futures::TryStreamExt;
    use tokio::sync::{Semaphore, SemaphorePermit};

    use super::super::Engine;
    use super::super::bound::Bound;
    use super::*;
    use crate::config::{Config, Options};

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Holds up who computes, until it is opened.
    struct Gate {
        open: Mutex<bool>,
        opened: Condvar,
        /// Who has come to it, and on which threads.
        threads: Mutex<Vec<String>>,
        come: Semaphore,
        gone: Semaphore,
    }

    impl Gate {
        fn pass(&self) -> Result<(), DataFusionError> {
            self.threads.lock().unwrap().push(std::thread::current().name().unwrap_or_default().to_owned());
            self.come.add_permits(1);
            let open = self.open.lock().unwrap();
            let (open, _) = self.opened.wait_timeout_while(open, PATIENCE, |open| !*open).unwrap();
            self.gone.add_permits(1);
            match *open {
                true => Ok(()),
                false => Err(DataFusionError::Execution("nobody opened the gate".to_owned())),
            }
        }
    }

    async fn run(engine: &Engine, sql: &str) {
        engine.change(engine.plan(&Bound::from(sql), None).await.unwrap()).await.unwrap();
    }

    async fn rows(engine: &Engine, sql: &str) -> Result<Vec<RecordBatch>> {
        let planned = engine.plan(&Bound::from(sql), None).await?;
        let (_, rows) = engine.query(planned).await?;
        rows.try_collect().await
    }

    // One thread: whatever computes on it has it alone.
    #[tokio::test]
    async fn what_takes_long_to_compute_holds_up_neither_its_node_nor_its_own_end() {
        let dir = tempfile::tempdir().unwrap();
        let warehouse = format!("file://{}", dir.path().join("warehouse").display());
        let options = Options { dir: Some(dir.path().join("node")), warehouse: Some(warehouse), ..Options::default() };
        let config = Config::new(options).unwrap();
        let store = Arc::new(lake_client::memory::MemoryStore::new());
        let tables = crate::node::tables(&config, store).await.unwrap();
        let mut engine = Engine::new(&config, tables).unwrap();
        let gate = Arc::new(Gate {
            open: Mutex::new(false),
            opened: Condvar::new(),
            threads: Mutex::default(),
            come: Semaphore::new(0),
            gone: Semaphore::new(0),
        });
        // One that is evaluated for each batch, and one while a statement is planned.
        for (name, volatility) in [("through", Volatility::Volatile), ("folded", Volatility::Immutable)] {
            let passed = gate.clone();
            let through = move |args: &[ColumnarValue]| {
                passed.pass()?;
                Ok::<_, DataFusionError>(args[0].clone())
            };
            let through = create_udf(name, vec![DataType::Int64], DataType::Int64, volatility, Arc::new(through));
            engine.template.register_udf(Arc::new(through)).unwrap();
        }
        run(&engine, "CREATE TABLE t (x BIGINT)").await;

        let long = "SELECT through(x) FROM (VALUES (1)) AS t(x)";
        let planned = engine.plan(&Bound::from(long), None).await.unwrap();
        let (_, of_long) = engine.query(planned).await.unwrap();
        tokio::time::timeout(PATIENCE, gate.come.acquire()).await.unwrap().unwrap().forget();
        // The node goes on, and so does another statement.
        assert_eq!(rows(&engine, "SELECT 1").await.unwrap().len(), 1);
        // Its deadline ends it where it is ...
        let planned = engine.plan(&Bound::from(long), Some(Duration::from_secs(5))).await.unwrap();
        let (_, ended) = engine.query(planned).await.unwrap();
        let error = ended.try_collect::<Vec<_>>().await.unwrap_err();
        assert!(error.message.contains("deadline"), "{error}");
        // ... and so does its client.
        drop(of_long);
        let waits = Instant::now();
        while engine.running() > 0 {
            assert!(waits.elapsed() < PATIENCE, "a statement that nobody waits for still runs");
            tokio::task::yield_now().await;
        }
        *gate.open.lock().unwrap() = true;
        gate.opened.notify_all();
        assert_eq!(rows(&engine, long).await.unwrap().len(), 1);

        // The same where a constant is evaluated: of a query before it is run, of a change when its rows are planned.
        for sql in ["SELECT folded(1)", "INSERT INTO t VALUES (folded(1))", "DELETE FROM t WHERE x = folded(1)"] {
            *gate.open.lock().unwrap() = false;
            for passes in [&gate.come, &gate.gone] {
                passes.forget_permits(usize::MAX);
            }
            while gate.come.try_acquire().map(SemaphorePermit::forget).is_err() {
                let planned = engine.plan(&Bound::from(sql), Some(Duration::from_secs(1))).await;
                let changed = async { engine.change(planned?).await };
                let error = changed.await.err().unwrap_or_else(|| panic!("{sql} has come to an end"));
                assert!(error.message.contains("deadline"), "{sql}: {error}");
            }
            assert_eq!(rows(&engine, "SELECT 1").await.unwrap().len(), 1);
            assert_eq!(engine.running(), 0, "{sql}");
            *gate.open.lock().unwrap() = true;
            gate.opened.notify_all();
            tokio::time::timeout(PATIENCE, gate.gone.acquire()).await.unwrap().unwrap().forget();
        }
        let threads = gate.threads.lock().unwrap().clone();
        assert!(threads.iter().all(|name| name == "lake-compute"), "{threads:?}");
        engine.stop_computing(PATIENCE).await;
        assert!(rows(&engine, "SELECT 1").await.is_err(), "a statement ran on threads that were stopped");
    }
}
