//! How a node asks another one for a part of a query.
//!
//! Rows of each partition come on a stream of their own, over one connection for each part that is asked: a partition that is
//! not read stops itself alone, as far as HTTP/2 lets it come ([`WINDOW_BYTES`], which the statement's memory pays for). Rows
//! that came are passed on as they come; the end of them only if the other node says that these were all, and how many. A node
//! that is gone without a word is noticed within [`ALIVE_EVERY`] and [`ALIVE_WITHIN`].

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow_flight::FlightData;
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use async_trait::async_trait;
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::{DataFusionError, Result as DfResult};
use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::MemoryConsumer;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion_distributed::{
    ChannelResolver, CoordinatorToWorkerMsg, ExecuteTaskRequest, GetWorkerInfoRequest, GetWorkerInfoResponse,
    ProducerHead, SetPlanRequest, WorkerChannel, WorkerToCoordinatorMsg,
};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, Stream, StreamExt, TryStreamExt};
use lake_client::secret::Secret;
use tokio_util::sync::CancellationToken;
use tonic::codegen::http::HeaderMap;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use url::Url;

use super::message::{Answer, Call, Head};
use super::taken::Own;
use crate::error::{Error, Kind, Result};
use crate::flight::status::to_error;

/// What may be on its way of one partition, in bytes.
const WINDOW_BYTES: u32 = 512 << 10;
/// Most partitions asked for over one connection: servers take 200 requests at a time on each.
const PARTITIONS_PER_CONNECTION: usize = 128;
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// How long a node may take until it has a plan.
const ACCEPT_WITHIN: Duration = Duration::from_secs(10);
/// How often a connection is asked whether it is there, and how long its answer may take.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
const ALIVE_WITHIN: Duration = Duration::from_secs(10);

/// The first failure of a query's nodes to take their parts: whoever waits for rows need not wait for it to show there.
#[derive(Debug, Default)]
pub struct Failure {
    first: OnceLock<Error>,
    met: CancellationToken,
}

impl Failure {
    fn note(&self, error: &Error) {
        // The first is kept.
        let _ = self.first.set(error.clone());
        self.met.cancel();
    }

    /// Returns once there is one. Cancel-safe.
    pub async fn met(&self) -> Error {
        self.met.cancelled().await;
        self.first.get().cloned().unwrap_or_else(|| Error::internal("a failure without words"))
    }
}

/// Knows the way to other nodes.
#[derive(Debug, Clone)]
pub struct Channels {
    bearer: Option<MetadataValue<Ascii>>,
    /// Where this node coordinates.
    failure: Option<Arc<Failure>>,
    /// Where it has a part.
    own: Option<Own>,
}

impl Channels {
    /// # Errors
    /// `Internal`: the secret cannot be sent, which was checked when it was read.
    pub fn new(secret: Option<&Secret>) -> Result<Self> {
        let bearer = secret.map(|secret| secret.bearer().parse::<MetadataValue<Ascii>>()).transpose();
        let mut bearer = bearer.map_err(|_| Error::internal("the secret cannot be put into a header"))?;
        if let Some(bearer) = &mut bearer {
            bearer.set_sensitive(true);
        }
        Ok(Self { bearer, failure: None, own: None })
    }

    /// The same for a query that this node coordinates.
    #[must_use]
    pub fn noting(&self, failure: Arc<Failure>) -> Self {
        Self { failure: Some(failure), ..self.clone() }
    }

    /// The same for a part that this node has: what it needs of others here is not sent over a connection.
    #[must_use]
    pub fn within(&self, own: Own) -> Self {
        Self { own: Some(own), ..self.clone() }
    }
}

#[async_trait]
impl ChannelResolver for Channels {
    async fn get_worker_client_for_url(&self, url: &Url) -> DfResult<Box<dyn WorkerChannel>> {
        Ok(Box::new(Other { url: url.clone(), channels: self.clone() }))
    }
}

/// Another node.
#[derive(Clone)]
struct Other {
    url: Url,
    channels: Channels,
}

impl fmt::Display for Other {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.url.host_str().unwrap_or_default();
        write!(f, "query node {host}:{}", self.url.port_or_known_default().unwrap_or_default())
    }
}

impl Other {
    /// A connection that so many partitions come over.
    async fn connect(self, partitions: usize) -> Result<FlightServiceClient<Channel>> {
        let windows = u32::try_from(partitions.clamp(1, PARTITIONS_PER_CONNECTION) + 1).unwrap_or(u32::MAX);
        let endpoint = match Endpoint::from_shared(self.url.to_string()) {
            Ok(endpoint) => endpoint,
            Err(error) => return Err(self.unreachable(&error.to_string())),
        };
        let endpoint = endpoint
            .connect_timeout(CONNECT_WITHIN)
            .tcp_nodelay(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES.saturating_mul(windows))
            .http2_keep_alive_interval(ALIVE_EVERY)
            .keep_alive_timeout(ALIVE_WITHIN)
            .keep_alive_while_idle(true);
        // In a box: of a future that borrows the endpoint the compiler cannot tell through all layers that it may be sent.
        let connecting = connected(endpoint);
        match tokio::time::timeout(CONNECT_WITHIN, connecting).await {
            Ok(Ok(channel)) => Ok(FlightServiceClient::new(channel).max_decoding_message_size(usize::MAX)),
            Ok(Err(error)) => Err(self.unreachable(&crate::error::with_sources(&error))),
            Err(_) => Err(self.unreachable("no answer in time")),
        }
    }

    fn unreachable(&self, why: &str) -> Error {
        Error::unavailable(format!("{self} cannot be reached for its part of the query: {why}"))
    }

    fn headers(&self, headers: HeaderMap) -> MetadataMap {
        let mut metadata = MetadataMap::from_headers(headers);
        if let Some(bearer) = &self.channels.bearer {
            metadata.insert("authorization", bearer.clone());
        }
        metadata
    }

    /// Gives the node the plan of a part. It keeps it until `ends` ends, or the answer is dropped.
    async fn give_plan(
        self,
        headers: HeaderMap,
        request: SetPlanRequest,
        ends: BoxStream<'static, CoordinatorToWorkerMsg>,
        task: Arc<TaskContext>,
    ) -> Result<Streaming<FlightData>> {
        if !request.work_unit_feed_declarations.is_empty() {
            return Err(Error::internal("a plan with feeds cannot be sent to another node"));
        }
        let call = Call::Plan {
            task: request.task_key.into(),
            tasks: request.task_count,
            node: request.target_worker_url.to_string(),
        };
        let first = call.write(request.plan.encode(&task)?)?;
        let client = self.clone().connect(1).await?;
        let mut asked = Request::new(and_no_more(first, ends));
        *asked.metadata_mut() = self.headers(headers);
        match tokio::time::timeout(ACCEPT_WITHIN, self.clone().accepted(client, asked)).await {
            Ok(answered) => answered,
            Err(_) => Err(Error::unavailable(format!("{self} did not take its part of the query in time"))),
        }
    }

    /// Waits until the node has taken a plan.
    async fn accepted(
        self,
        mut client: FlightServiceClient<Channel>,
        asked: Request<Messages>,
    ) -> Result<Streaming<FlightData>> {
        let mut answers = match client.do_exchange(asked).await {
            Ok(answered) => answered.into_inner(),
            Err(status) => return Err(self.refused(&status)),
        };
        let answer = match answers.message().await {
            Ok(answer) => answer,
            Err(status) => return Err(self.refused(&status)),
        };
        let answer = match &answer {
            Some(answer) => Answer::read(answer)?,
            None => None,
        };
        match answer {
            Some(Answer::Accepted) => Ok(answers),
            _ => Err(Error::unavailable(format!("{self} did not take its part of the query"))),
        }
    }

    /// What a status says; one that is not of the other node's own words is about the connection.
    fn refused(&self, status: &tonic::Status) -> Error {
        let error = to_error(status);
        match status.metadata().contains_key(crate::flight::KIND_HEADER) {
            true => error,
            false => {
                Error::unavailable(format!("{self} was lost while it did its part of the query: {}", error.message))
            }
        }
    }

    /// Begins to ask for rows of one partition.
    async fn ask(
        self,
        mut client: FlightServiceClient<Channel>,
        headers: HeaderMap,
        first: FlightData,
    ) -> Result<Streaming<FlightData>> {
        let mut asked = Request::new(futures::stream::once(std::future::ready(first)));
        *asked.metadata_mut() = self.headers(headers);
        let answered = client.do_exchange(asked).await.map_err(|status| self.refused(&status))?;
        Ok(answered.into_inner())
    }

    /// The rows of one partition, to the end that the other node has said.
    fn rows(self, asking: SpawnedTask<Result<Streaming<FlightData>>>) -> BoxStream<'static, DfResult<RecordBatch>> {
        /// What is sent, until it ends.
        enum Coming {
            Asked(SpawnedTask<Result<Streaming<FlightData>>>),
            Rows(Box<Streaming<FlightData>>),
        }
        let promised = Arc::new(OnceLock::<u64>::new());
        let (said, other) = (promised.clone(), self.clone());
        let data = futures::stream::try_unfold(Coming::Asked(asking), move |coming| {
            let (other, said) = (other.clone(), said.clone());
            async move {
                let mut rows = match coming {
                    Coming::Rows(rows) => rows,
                    Coming::Asked(asking) => match asking.await {
                        Ok(rows) => Box::new(rows.map_err(external)?),
                        Err(e) => return Err(external(Error::internal(format!("asking {other} for rows: {e}")))),
                    },
                };
                let cut_off = || Error::unavailable(format!("{other} stopped in the middle of its part of the query"));
                let message = rows.message().await.map_err(|status| external(other.refused(&status)))?;
                let message = message.ok_or_else(|| external(cut_off()))?;
                match Answer::read(&message).map_err(external)? {
                    None => Ok(Some((message, Coming::Rows(rows)))),
                    Some(Answer::Ended { rows }) => {
                        // It is said once.
                        let _ = said.set(rows);
                        Ok(None)
                    }
                    Some(_) => Err(external(cut_off())),
                }
            }
        });
        let counted = Arc::new(AtomicU64::new(0));
        let came = counted.clone();
        let batches =
            FlightRecordBatchStream::new_from_flight_data(data.boxed()).map_err(from_flight).inspect_ok(move |batch| {
                came.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
            });
        let checked = futures::stream::once(async move {
            let came = counted.load(Ordering::Relaxed);
            match promised.get() {
                Some(promised) if *promised == came => None,
                promised => Some(Err(Error::unavailable(format!(
                    "{self} was to send {} rows of its part of the query, and {came} came",
                    promised.map_or_else(|| "an unknown number of".to_owned(), u64::to_string)
                ))
                .into_datafusion())),
            }
        });
        // What failed has said so already.
        let failed = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let noted = failed.clone();
        batches
            .inspect_err(move |_| noted.store(true, Ordering::Relaxed))
            .chain(checked.filter_map(move |end| {
                let end = end.filter(|_| !failed.load(Ordering::Relaxed));
                std::future::ready(end)
            }))
            .boxed()
    }
}

fn connected(endpoint: Endpoint) -> BoxFuture<'static, std::result::Result<Channel, tonic::transport::Error>> {
    async move { endpoint.connect().await }.boxed()
}

/// Messages to a node. A type without a lifetime: of a call with a boxed stream the compiler cannot tell that it may be sent.
struct Messages(BoxStream<'static, FlightData>);

impl Stream for Messages {
    type Item = FlightData;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<FlightData>> {
        self.0.poll_next_unpin(context)
    }
}

/// A message, and then none until `ends` ends.
fn and_no_more(first: FlightData, ends: BoxStream<'static, CoordinatorToWorkerMsg>) -> Messages {
    let nothing = ends.filter_map(|_| std::future::ready(None::<FlightData>));
    Messages(futures::stream::once(std::future::ready(first)).chain(nothing).boxed())
}

/// Nothing more is said; that the node is lost shows in its rows.
fn until_over(mut answers: Streaming<FlightData>) -> BoxStream<'static, DfResult<WorkerToCoordinatorMsg>> {
    let over = async move { while let Ok(Some(_)) = answers.message().await {} };
    futures::stream::once(over).filter_map(|()| std::future::ready(None)).boxed()
}

fn external(error: Error) -> FlightError {
    FlightError::ExternalError(Box::new(error))
}

/// The error that came through Flight.
fn from_flight(error: FlightError) -> DataFusionError {
    match error {
        FlightError::ExternalError(inner) => match inner.downcast::<Error>() {
            Ok(ours) => ours.into_datafusion(),
            Err(other) => DataFusionError::External(other),
        },
        other => Error::new(Kind::Unavailable, format!("rows of another query node cannot be read: {other}"))
            .into_datafusion(),
    }
}

#[async_trait]
impl WorkerChannel for Other {
    async fn coordinator_channel(
        &mut self,
        headers: HeaderMap,
        request: SetPlanRequest,
        ends: BoxStream<'static, CoordinatorToWorkerMsg>,
        _: ExecutionPlanMetricsSet,
        task: &Arc<TaskContext>,
    ) -> DfResult<BoxStream<'static, DfResult<WorkerToCoordinatorMsg>>> {
        let failure = self.channels.failure.clone();
        // In a task of its own, which ends with this call.
        let giving = SpawnedTask::spawn(self.clone().give_plan(headers, request, ends, task.clone()));
        let given = giving.await.unwrap_or_else(|e| Err(Error::internal(format!("giving a node its part: {e}"))));
        let answers = match given {
            Ok(answers) => answers,
            Err(error) => {
                if let Some(failure) = failure {
                    failure.note(&error);
                }
                return Err(error.into_datafusion());
            }
        };
        Ok(until_over(answers))
    }

    async fn execute_task(
        &mut self,
        headers: HeaderMap,
        request: ExecuteTaskRequest,
        _: ExecutionPlanMetricsSet,
        task: &Arc<TaskContext>,
    ) -> DfResult<Vec<BoxStream<'static, DfResult<RecordBatch>>>> {
        let (head, body) = match request.producer_head {
            ProducerHead::None => (Head::AsTheyAre, Vec::new()),
            ProducerHead::BroadcastExec { output_partitions } => {
                (Head::Broadcast { partitions: output_partitions }, Vec::new())
            }
            ProducerHead::RepartitionExec { partitioning } => (Head::Partitioned, partitioning.encode(task)?),
        };
        if let Some(own) = self.channels.own.as_ref().filter(|own| own.is(&self.url)) {
            let partitions = request.target_partition_start..request.target_partition_end;
            let rows = own.rows(request.task_key.into(), partitions, head, &body).await;
            return Ok(rows.map_err(Error::into_datafusion)?.into_iter().map(StreamExt::boxed).collect());
        }
        let partitions: Vec<usize> = (request.target_partition_start..request.target_partition_end).collect();
        let mut streams = Vec::with_capacity(partitions.len());
        for partitions in partitions.chunks(PARTITIONS_PER_CONNECTION) {
            let client = self.clone().connect(partitions.len()).await.map_err(Error::into_datafusion)?;
            for &partition in partitions {
                let call = Call::Rows { task: request.task_key.into(), partition, head };
                let first = call.write(body.clone()).map_err(Error::into_datafusion)?;
                let reservation = MemoryConsumer::new("rows of another query node").register(task.memory_pool());
                reservation.try_grow(WINDOW_BYTES as usize)?;
                // Asked for at once, and whether anybody reads or not: who makes the rows is to know of all that they are for.
                let asking = SpawnedTask::spawn(self.clone().ask(client.clone(), headers.clone(), first));
                let rows = self.clone().rows(asking);
                streams.push(
                    rows.inspect(move |_| {
                        // Held for as long as rows may come.
                        let _ = &reservation;
                    })
                    .boxed(),
                );
            }
        }
        Ok(streams)
    }

    async fn get_worker_info(&mut self, _: GetWorkerInfoRequest) -> DfResult<GetWorkerInfoResponse> {
        Ok(GetWorkerInfoResponse { version: env!("CARGO_PKG_VERSION").to_owned() })
    }
}
