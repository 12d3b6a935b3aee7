//! A client of query nodes, for the shell, `lake up` and tests: SQL in, record batches and structured errors out. What
//! Flight SQL needs for that stays in this crate.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Action, FlightEndpoint, FlightInfo};
use futures::{Stream, StreamExt, TryStreamExt};
use lake_client::secret::Secret;
use prost::Message;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use uuid::Uuid;

use crate::error::{Kind, Position};
use crate::flight::running::PROGRESS;
use crate::flight::ticket::StatementTicket;
use crate::flight::transactions::put_settings;
use crate::flight::{STALE_HEADER, TIMEOUT_HEADER, status};
use crate::sql::session::Settings;
use crate::sql::statement::Command;

/// How long one connection attempt may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// What is known of a statement whose answer did not come.
const UNKNOWN_OUTCOME: &str = "whether the statement was run is unknown";
/// How much later than the node the client gives up: the node's words are better.
const GRACE: Duration = Duration::from_secs(5);

/// Why a statement failed, or a node could not be reached.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct SqlError {
    pub message: String,
    /// Where in the statement, if that is known.
    pub position: Option<Position>,
    pub code: Code,
    /// What can be done about it; finer than the code.
    pub kind: Kind,
}

impl SqlError {
    fn unreachable(endpoints: &[String], last: &str) -> Self {
        let endpoints = endpoints.join(", ");
        SqlError {
            message: format!("no query node can be reached at {endpoints}: {last}"),
            position: None,
            code: Code::Unavailable,
            kind: Kind::Unavailable,
        }
    }
}

impl From<Status> for SqlError {
    fn from(status: Status) -> Self {
        let error = status::to_error(&status);
        SqlError { message: error.message, position: error.position, code: status.code(), kind: error.kind }
    }
}

/// A connection to one of several query nodes.
#[derive(Debug, Clone)]
pub struct SqlClient {
    endpoint: String,
    flight: FlightServiceClient<Channel>,
    bearer: Option<MetadataValue<Ascii>>,
    /// Of this client's session. Clones share it.
    settings: Arc<Mutex<Settings>>,
}

/// How far a statement has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SoFar {
    /// The rows that it has inserted, updated or deleted.
    pub rows: u64,
    /// Why it goes no further, in words, if its node has waited for long.
    pub waits: Option<String>,
}

/// The rows of a statement, as they come.
pub struct Rows {
    pub schema: SchemaRef,
    /// What the user should know besides, such as that the rows are from old table versions.
    pub notices: Vec<String>,
    /// How old those versions are, if the node said so.
    pub stale: Option<Duration>,
    /// What a statement that changed something was; then there is one row, `count`.
    pub command: Option<String>,
    /// The node they come from.
    endpoint: String,
    /// Came with the schema.
    first: Option<RecordBatch>,
    batches: FlightRecordBatchStream,
}

impl Rows {
    /// Why no more rows come.
    fn lost(&self, error: FlightError) -> SqlError {
        let outcome = match self.command {
            Some(_) => UNKNOWN_OUTCOME,
            None => "not all rows have come: run the query again",
        };
        lost(&self.endpoint, error.into(), outcome)
    }
}

impl Stream for Rows {
    type Item = Result<RecordBatch, SqlError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let next = self.batches.poll_next_unpin(cx);
        next.map(|batch| batch.map(|batch| batch.map_err(|e| self.lost(e))))
    }
}

impl SqlClient {
    /// Connects to the first of `endpoints` (`host:port`) that answers.
    ///
    /// # Errors
    /// `Unavailable`, naming the endpoints, if none does.
    pub async fn connect(endpoints: &[String], secret: Option<&Secret>) -> Result<Self, SqlError> {
        let bearer = secret
            .map(|secret| MetadataValue::try_from(secret.bearer()))
            .transpose()
            .map_err(|_| SqlError::from(Status::invalid_argument("the secret cannot be sent in a header")))?;
        let mut last = "there are no addresses".to_owned();
        for endpoint in endpoints {
            match open(endpoint).await {
                Ok(channel) => {
                    let flight = FlightServiceClient::new(channel)
                        .max_decoding_message_size(usize::MAX)
                        .max_encoding_message_size(usize::MAX);
                    let settings = Settings { kept: true, ..Settings::default() };
                    let settings = Arc::new(Mutex::new(settings));
                    return Ok(Self { endpoint: endpoint.clone(), flight, bearer, settings });
                }
                Err(error) => last = crate::error::with_sources(&error),
            }
        }
        Err(SqlError::unreachable(endpoints, &last))
    }

    /// The node connected to.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Runs a statement. With a `timeout` the node gives up after that; else after what it is configured for.
    pub async fn execute(&self, sql: &str, timeout: Option<Duration>) -> Result<Rows, SqlError> {
        self.execute_as(Uuid::new_v4(), sql, timeout).await
    }

    /// What this client's statements are run with.
    pub fn settings(&self) -> Settings {
        self.lock().clone()
    }

    /// Goes on with the session of another client, which had to be given up.
    pub fn resume(&self, settings: Settings) {
        *self.lock() = settings;
    }

    fn lock(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a statement with this ticket's id: a change asked for twice by one id, of one node, is made once.
    pub async fn execute_as(&self, id: Uuid, sql: &str, timeout: Option<Duration>) -> Result<Rows, SqlError> {
        let ticket = StatementTicket { id, ..StatementTicket::new(sql) };
        let ticket = ticket.encode().map_err(|e| SqlError::from(status::from_error(&e)))?;
        let mut request = Request::new(ticket);
        put_settings(&self.settings(), request.metadata_mut()).map_err(|e| SqlError::from(status::from_error(&e)))?;
        if let Some(bearer) = &self.bearer {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        if let Some(timeout) = timeout {
            request.metadata_mut().insert(TIMEOUT_HEADER, MetadataValue::from(millis(timeout)));
        }
        let mut flight = self.flight.clone();
        let answer = flight.do_get(request);
        let response = match timeout {
            Some(timeout) => {
                tokio::time::timeout(timeout.saturating_add(GRACE), answer).await.map_err(|_| self.silent())?
            }
            None => answer.await,
        };
        let response = response.map_err(|status| lost(&self.endpoint, status, UNKNOWN_OUTCOME))?;
        let stale = response.metadata().get(STALE_HEADER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        let notices = stale.map(|millis| {
            let seconds = millis as f64 / 1000.0;
            format!("the metadata cluster is away: these rows are from table versions known {seconds:.1} s ago")
        });
        let data = response.into_inner().map_err(|status| FlightError::Tonic(Box::new(status)));
        let mut batches = FlightRecordBatchStream::new_from_flight_data(data);
        // The schema comes with the first message.
        let first = batches.next().await.transpose().map_err(|e| lost(&self.endpoint, e.into(), UNKNOWN_OUTCOME))?;
        let schema = batches.schema().cloned().unwrap_or_else(|| Arc::new(Schema::empty()));
        let command = schema.metadata().get(Command::METADATA_KEY).cloned();
        if let Some(json) = schema.metadata().get(Settings::METADATA_KEY) {
            match serde_json::from_str(json) {
                Ok(settings) => self.resume(settings),
                Err(error) => tracing::warn!(%error, "the settings that an answer brings cannot be read"),
            }
        }
        let (endpoint, stale) = (self.endpoint.clone(), stale.map(Duration::from_millis));
        Ok(Rows { schema, notices: notices.into_iter().collect(), stale, command, endpoint, first, batches })
    }

    /// How far a statement that runs with this ticket's id has come. `None`: it does not run at this client's node, or that does not say.
    pub async fn so_far(&self, id: Uuid) -> Option<SoFar> {
        let ticket = StatementTicket { id, ..StatementTicket::new("") }.encode().ok()?;
        let info = FlightInfo::new().with_endpoint(FlightEndpoint::new().with_ticket(ticket));
        let mut request = Request::new(Action::new(PROGRESS, info.encode_to_vec()));
        if let Some(bearer) = &self.bearer {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        let answer = self.flight.clone().do_action(request).await.ok()?;
        let mut answers = answer.into_inner();
        let rows = answers.try_next().await.ok()??;
        let rows = std::str::from_utf8(&rows.body).ok()?.parse().ok()?;
        // A node of an earlier version says no more.
        let waits = answers.try_next().await.ok().flatten();
        let waits = waits.map(|waits| String::from_utf8_lossy(&waits.body).into_owned());
        Some(SoFar { rows, waits })
    }

    /// Runs a statement and returns all its rows.
    pub async fn query(&self, sql: &str, timeout: Option<Duration>) -> Result<Vec<RecordBatch>, SqlError> {
        self.execute(sql, timeout).await?.try_collect().await
    }

    fn silent(&self) -> SqlError {
        Status::unknown(format!(
            "{} did not answer within the deadline; whether the statement was run is unknown",
            self.endpoint
        ))
        .into()
    }
}

/// A status of the transport's own says nothing of what the node did; `outcome` says what that means.
fn lost(endpoint: &str, status: Status, outcome: &str) -> SqlError {
    if status.metadata().contains_key(crate::flight::KIND_HEADER) || status.code() == Code::Unauthenticated {
        return status.into();
    }
    if status.code() == Code::Unimplemented {
        let message = format!("{endpoint} is no query node: what answers there, a metadata peer perhaps, runs no SQL");
        return SqlError { message, position: None, code: status.code(), kind: Kind::Invalid };
    }
    let mut error = SqlError::from(status);
    let why = if error.message.is_empty() { error.code.description() } else { &error.message };
    error.message = format!("the connection to {endpoint} failed: {why}; {outcome}");
    error.kind = Kind::Unknown;
    error
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A connection to a node.
pub(crate) async fn open(endpoint: &str) -> Result<Channel, tonic::transport::Error> {
    let uri = match endpoint.contains("://") {
        true => endpoint.to_owned(),
        false => format!("http://{endpoint}"),
    };
    let endpoint = Endpoint::from_shared(uri)?.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true);
    endpoint.connect().await
}
