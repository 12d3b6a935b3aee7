//! What a node does for queries that others coordinate: it takes plans of their parts, and sends the rows that these make.
//!
//! ```text
//! no token of this lake's                    -> refused
//! a plan, and the node has its fill of parts,
//!   or is stopping                           -> refused; nothing was done
//! a plan                                     -> kept until the request ends, or its connection does: then what is left of it stops
//! rows                                       -> sent as they are taken; they stop when they are not asked for any more
//! an error, or a panic                       -> the last message says so; without one, nobody takes the rows for all
//! ```
//! Bounds: parts in hand (`distribute_tasks`); memory: all parts of a statement on a node share what one statement may have, out of
//! what all statements have.

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, AsArray, RecordBatch, RecordBatchOptions};
use arrow_flight::FlightData;
use arrow_flight::encode::{DictionaryHandling, FlightDataEncoder, FlightDataEncoderBuilder};
use arrow_flight::error::FlightError;
use datafusion::common::{DataFusionError, Result as DfResult};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::memory_pool::MemoryPool;
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::execution::session_state::SessionState;
use datafusion_distributed::{
    DistributedExt, ExecuteTaskRequest, MaybeEncoded, ProducerHead, SetPlanRequest, Worker, WorkerQueryContext,
};
use datafusion_proto::physical_plan::PhysicalExtensionCodec;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::codegen::http::HeaderMap;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};
use url::Url;
use uuid::Uuid;

use super::channel::Channels;
use super::message::{Answer, Call, Head, TOKEN_HEADER};
use super::{guard, token};
use crate::error::{Error, Result, words_of_panic};
use crate::flight::keys::TicketKeys;
use crate::flight::status::from_error;
use crate::sql::memory::SharedMemory;
use crate::sql::{computing, overflow, rounding};

/// How long the first message of a request may take to come, and its token to be looked at.
const FIRST_WITHIN: Duration = Duration::from_secs(10);

/// What is answered.
pub type Answers = BoxStream<'static, Result<FlightData, Status>>;

/// See the module.
#[derive(Clone)]
pub struct Parts {
    sessions: Arc<WorkerSessions>,
    workers: Arc<Mutex<HashMap<Uuid, Weak<Worker>>>>,
    keys: Arc<TicketKeys>,
    /// Parts that may yet be taken. Closed: none is.
    room: Arc<Semaphore>,
    most: usize,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("room", &self.room.available_permits()).finish_non_exhaustive()
    }
}

impl Parts {
    pub fn new(sessions: WorkerSessions, keys: Arc<TicketKeys>, most: usize) -> Self {
        let (sessions, workers) = (Arc::new(sessions), Arc::default());
        Self { sessions, workers, keys, room: Arc::new(Semaphore::new(most)), most }
    }

    /// What has a statement's parts here. It goes with the last of them: one for all statements would keep plans, and the memory
    /// that they reserve, until it is asked for others.
    fn worker_for(&self, statement: Uuid) -> Arc<Worker> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = workers.get(&statement).and_then(Weak::upgrade) {
            return known;
        }
        workers.retain(|_, worker| worker.strong_count() > 0);
        let runtime = self.sessions.template.runtime_env().clone();
        let sessions = self.sessions.clone();
        let session = move |context| {
            let sessions = sessions.clone();
            async move { sessions.session(context).await }
        };
        let worker = Arc::new(Worker::from_session_builder(session).with_runtime_env(runtime));
        workers.insert(statement, Arc::downgrade(&worker));
        worker
    }

    /// How many are in hand.
    pub fn in_hand(&self) -> usize {
        self.most.saturating_sub(self.room.available_permits())
    }

    /// Takes no more. Those in hand go on.
    pub fn close(&self) {
        self.room.close();
    }

    /// Whether a request is about a part of a query, and no client's.
    pub fn concerns(headers: &MetadataMap) -> bool {
        headers.contains_key(TOKEN_HEADER)
    }

    /// Answers a request.
    ///
    /// # Errors
    /// As the module says.
    pub async fn exchange(&self, request: Request<Streaming<FlightData>>) -> Result<Response<Answers>, Status> {
        let (headers, _, mut messages) = request.into_parts();
        let asked = async {
            let statement = token::verify(&self.keys, &headers, Instant::now() + FIRST_WITHIN).await?;
            let first = messages.message().await.map_err(|status| crate::flight::status::to_error(&status))?;
            let (call, body) = Call::read(first.ok_or_else(|| Error::invalid("a request without a message"))?)?;
            Ok::<_, Error>((statement, call, body))
        };
        let asked = tokio::time::timeout(FIRST_WITHIN, asked).await;
        let asked =
            asked.unwrap_or_else(|_| Err(Error::deadline("the first message of a request did not come in time")));
        let (statement, call, body) = asked.map_err(|e| from_error(&e))?;
        let body = body.to_vec();
        let answering = async {
            match call {
                Call::Plan { task, tasks, node, began_ns } => {
                    let node = Url::parse(&node).map_err(|e| Error::invalid(format!("{node} is no node: {e}")))?;
                    let request = SetPlanRequest {
                        task_key: task.into(),
                        task_count: tasks,
                        plan: MaybeEncoded::Encoded(body),
                        work_unit_feed_declarations: Vec::new(),
                        target_worker_url: node,
                        query_start_time_ns: began_ns,
                    };
                    self.take(statement, headers.into_headers(), request, messages).await
                }
                Call::Rows { task, partition, head } => {
                    let producer_head = match head {
                        Head::AsTheyAre => ProducerHead::None,
                        Head::Broadcast { partitions } => ProducerHead::BroadcastExec { output_partitions: partitions },
                        Head::Partitioned => {
                            ProducerHead::RepartitionExec { partitioning: MaybeEncoded::Encoded(body) }
                        }
                    };
                    let end = partition.checked_add(1).ok_or_else(|| Error::invalid("a partition without an end"))?;
                    let request = ExecuteTaskRequest {
                        task_key: task.into(),
                        target_partition_start: partition,
                        target_partition_end: end,
                        producer_head,
                    };
                    self.rows(statement, request).await
                }
            }
        };
        let answered = AssertUnwindSafe(answering).catch_unwind().await.unwrap_or_else(|panic| {
            let words = words_of_panic(panic.as_ref());
            tracing::error!(panic = words, "taking a part of a query panicked");
            Err(Error::internal(format!("taking a part of a query failed inside lake: {words}; please report this")))
        });
        answered.map(Response::new).map_err(|e| from_error(&e))
    }

    /// Takes a plan, and keeps it until the request ends.
    async fn take(
        &self,
        statement: Uuid,
        headers: HeaderMap,
        request: SetPlanRequest,
        messages: Streaming<FlightData>,
    ) -> Result<Answers> {
        let permit = self.room.clone().try_acquire_owned().map_err(|e| match e {
            tokio::sync::TryAcquireError::Closed => {
                Error::unavailable("this query node is stopping and takes no part of a query; nothing was done")
            }
            tokio::sync::TryAcquireError::NoPermits => Error::exhausted(format!(
                "this query node has {} parts of queries in hand (distribute_tasks); nothing was done: try again later",
                self.most
            )),
        })?;
        let ended = CancellationToken::new();
        // Dropped with the stream, which is read until the query ends.
        let held = (permit, ended.clone().drop_guard());
        let messages = messages.filter_map(move |message| {
            let _ = &held;
            std::future::ready(message.err().map(|status| Err(DataFusionError::Execution(status.to_string()))))
        });
        let worker = self.worker_for(statement);
        let answers = worker.coordinator_channel(headers, request, messages.boxed()).await?;
        let accepted = futures::stream::once(std::future::ready(Ok(Answer::Accepted.write())));
        let rest = async move {
            ended.cancelled_owned().await;
            drop((answers, worker));
        };
        let rest = futures::stream::once(rest).filter_map(|()| std::future::ready(None::<Result<FlightData, Status>>));
        Ok(accepted.chain(rest).boxed())
    }

    /// The rows of one partition.
    async fn rows(&self, statement: Uuid, request: ExecuteTaskRequest) -> Result<Answers> {
        // They may be asked for before their plan has come.
        let worker = self.worker_for(statement);
        let (mut streams, _) = worker.execute_task(request).await?;
        let stream = streams.pop().ok_or_else(|| Error::internal("a part of a query without rows"))?;
        Ok(sent(stream))
    }
}

/// Rows, as they are sent.
fn sent(rows: SendableRecordBatchStream) -> Answers {
    enum Sending {
        Rows(Box<FlightDataEncoder>),
        Over,
    }
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    let schema = rows.schema();
    let rows = AssertUnwindSafe(rows).catch_unwind().map(|batch| match batch {
        Ok(batch) => batch.map_err(Error::from).and_then(|batch| compacted(&batch).map_err(Error::internal)),
        Err(panic) => {
            let words = words_of_panic(panic.as_ref());
            tracing::error!(panic = words, "a part of a query panicked");
            Err(Error::internal(format!("a part of the query failed inside lake: {words}; please report this")))
        }
    });
    let rows = rows.inspect_ok(move |batch| {
        counted.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
    });
    let data = FlightDataEncoderBuilder::new()
        .with_schema(schema)
        // As the plan has it: hydrated, a column would come with another type.
        .with_dictionary_handling(DictionaryHandling::Resend)
        .build(rows.map_err(|error| FlightError::ExternalError(Box::new(error))));
    let sending = futures::stream::unfold(Sending::Rows(Box::new(data)), move |sending| {
        let count = count.clone();
        async move {
            let Sending::Rows(mut data) = sending else { return None };
            Some(match data.next().await {
                Some(Ok(message)) => (Ok(message), Sending::Rows(data)),
                Some(Err(error)) => (Ok(Answer::failed(&of_flight(error)).write()), Sending::Over),
                None => (Ok(Answer::Ended { rows: count.load(Ordering::Relaxed) }.write()), Sending::Over),
            })
        }
    });
    sending.boxed()
}

fn of_flight(error: FlightError) -> Error {
    match error {
        FlightError::ExternalError(inner) => match inner.downcast::<Error>() {
            Ok(ours) => *ours,
            Err(other) => Error::internal(other),
        },
        other => Error::internal(format!("sending rows to another query node: {other}")),
    }
}

/// The rows without what they do not use of buffers that they share with others.
fn compacted(batch: &RecordBatch) -> Result<RecordBatch, arrow::error::ArrowError> {
    let compact = |column: &ArrayRef| -> ArrayRef {
        if let Some(text) = column.as_string_view_opt() {
            Arc::new(text.gc())
        } else if let Some(bytes) = column.as_binary_view_opt() {
            Arc::new(bytes.gc())
        } else {
            column.clone()
        }
    };
    let columns = batch.columns().iter().map(compact).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(batch.schema(), columns, &options)
}

/// Makes sessions for parts of queries: as they are here, with the memory of their statement.
pub struct WorkerSessions {
    pub template: SessionState,
    pub memory: Arc<SharedMemory>,
    pub codec: Arc<dyn PhysicalExtensionCodec>,
    pub channels: Channels,
    pub keys: Arc<TicketKeys>,
    /// Of the statements that have parts here.
    pub statements: Mutex<HashMap<Uuid, Weak<dyn MemoryPool>>>,
}

impl WorkerSessions {
    /// One for all parts of a statement here.
    fn memory_of(&self, statement: Uuid) -> Arc<dyn MemoryPool> {
        let mut statements = self.statements.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = statements.get(&statement).and_then(Weak::upgrade) {
            return known;
        }
        statements.retain(|_, pool| pool.strong_count() > 0);
        let pool = self.memory.statement();
        statements.insert(statement, Arc::downgrade(&pool));
        pool
    }
}

impl WorkerSessions {
    /// One for a part.
    async fn session(&self, context: WorkerQueryContext) -> DfResult<SessionState> {
        let WorkerQueryContext { mut builder, headers } = context;
        let metadata = MetadataMap::from_headers(headers.clone());
        let statement = token::verify(&self.keys, &metadata, Instant::now() + FIRST_WITHIN).await;
        let statement = statement.map_err(Error::into_datafusion)?;
        let mut passed_on = HeaderMap::new();
        if let Some(value) = headers.get(TOKEN_HEADER) {
            passed_on.insert(TOKEN_HEADER, value.clone());
        }
        let shared = self.template.runtime_env();
        let runtime = RuntimeEnv { memory_pool: self.memory_of(statement), ..shared.as_ref().clone() };
        let template = &self.template;
        let scalars = template.scalar_functions().values().cloned();
        let scalars = scalars.chain(overflow::functions()).chain(rounding::functions()).collect();
        let config = builder.config().take().unwrap_or_default();
        Ok(builder
            .with_config(computing::as_in(template, config))
            .with_runtime_env(Arc::new(runtime))
            .with_scalar_functions(scalars)
            .with_aggregate_functions(template.aggregate_functions().values().cloned().collect())
            .with_window_functions(template.window_functions().values().cloned().collect())
            .with_distributed_user_codec_arc(self.codec.clone())
            .with_distributed_channel_resolver(self.channels.clone())
            .with_distributed_passthrough_headers(passed_on)?
            .with_distributed_worker_plan_rewrite_handler(guard::rewrite)
            .build())
    }
}
