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
use bytes::Bytes;
use datafusion::common::Result as DfResult;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::context::SessionConfig;
use datafusion::execution::memory_pool::MemoryPool;
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::execution::session_state::{SessionState, SessionStateBuilder};
use datafusion_distributed::{DistributedCodec, DistributedConfig, DistributedExt, DistributedTaskContext};
use datafusion_proto::bytes::physical_plan_from_bytes_with_proto_converter;
use datafusion_proto::physical_plan::{DeduplicatingProtoConverter, PhysicalExtensionCodec};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use tokio::sync::Semaphore;
use tonic::codegen::http::HeaderMap;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};
use url::Url;
use uuid::Uuid;

use super::channel::Channels;
use super::message::{Answer, Call, TOKEN_HEADER};
use super::taken::{Key, Own, Taken};
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
    taken: Arc<Taken>,
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
        let (sessions, taken) = (Arc::new(sessions), Arc::default());
        Self { sessions, taken, keys, room: Arc::new(Semaphore::new(most)), most }
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
        let answering = async {
            match call {
                Call::Plan { task, tasks, node } => {
                    let node = Url::parse(&node).map_err(|e| Error::invalid(format!("{node} is no node: {e}")))?;
                    self.take(Key { statement, task }, tasks, node, &headers.into_headers(), body, messages).await
                }
                Call::Rows { task, partition, head } => {
                    let end = partition.checked_add(1).ok_or_else(|| Error::invalid("a partition without an end"))?;
                    // They may be asked for before their plan has come.
                    let mut rows = self.taken.rows(Key { statement, task }, partition..end, head, &body).await?;
                    Ok(sent(rows.pop().ok_or_else(|| Error::internal("a part of a query without rows"))?))
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
        key: Key,
        tasks: usize,
        node: Url,
        headers: &HeaderMap,
        plan: Bytes,
        mut messages: Streaming<FlightData>,
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
        let own = Own::new(node, key.statement, &self.taken);
        let session = self.sessions.session(key, tasks, own, headers)?;
        let task = session.task_ctx();
        let context = task.clone();
        let part = async move {
            let codec = DistributedCodec::new_combined_with_user(context.session_config());
            let converter = DeduplicatingProtoConverter::default();
            let plan = physical_plan_from_bytes_with_proto_converter(&plan, &context, &codec, &converter)?;
            guard::rewrite(plan)
        };
        let kept = self.taken.keep(key, computing::planning(&session, part).await??, task)?;
        let accepted = futures::stream::once(std::future::ready(Ok(Answer::Accepted.write())));
        let rest = async move {
            // Nothing more is said.
            while let Ok(Some(_)) = messages.message().await {}
            drop((kept, permit));
        };
        let rest = futures::stream::once(rest).filter_map(|()| std::future::ready(None::<Result<FlightData, Status>>));
        Ok(accepted.chain(rest).boxed())
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
    /// One for a part of so many in its stage.
    fn session(&self, key: Key, tasks: usize, own: Own, headers: &HeaderMap) -> DfResult<SessionState> {
        let mut passed_on = HeaderMap::new();
        if let Some(value) = headers.get(TOKEN_HEADER) {
            passed_on.insert(TOKEN_HEADER, value.clone());
        }
        let template = &self.template;
        let shared = template.runtime_env();
        let runtime = RuntimeEnv { memory_pool: self.memory_of(key.statement), ..shared.as_ref().clone() };
        let scalars = template.scalar_functions().values().cloned();
        let scalars = scalars.chain(overflow::functions()).chain(rounding::functions()).collect();
        let place = DistributedTaskContext { task_index: key.task.number, task_count: tasks };
        let config = SessionConfig::default()
            .with_extension(Arc::new(place))
            .with_distributed_option_extension_from_headers::<DistributedConfig>(headers)?;
        Ok(SessionStateBuilder::new()
            .with_default_features()
            .with_config(computing::as_in(template, config))
            .with_runtime_env(Arc::new(runtime))
            .with_scalar_functions(scalars)
            .with_aggregate_functions(template.aggregate_functions().values().cloned().collect())
            .with_window_functions(template.window_functions().values().cloned().collect())
            .with_distributed_user_codec_arc(self.codec.clone())
            .with_distributed_channel_resolver(self.channels.within(own))
            .with_distributed_passthrough_headers(passed_on)?
            .build())
    }
}
