//! The Flight SQL service itself: commands to statements, statements to answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{AsArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::flight_service_server::FlightService;
use arrow_flight::sql::metadata::{SqlInfoData, XdbcTypeInfoData};
use arrow_flight::sql::server::{FlightSqlService, PeekableFlightDataStream};
use arrow_flight::sql::{
    ActionBeginTransactionRequest, ActionBeginTransactionResult, ActionCancelQueryRequest, ActionCancelQueryResult,
    ActionClosePreparedStatementRequest, ActionCreatePreparedStatementRequest, ActionCreatePreparedStatementResult,
    ActionEndTransactionRequest, Any, Command as FlightCommand, CommandGetCatalogs, CommandGetDbSchemas,
    CommandGetSqlInfo, CommandGetTableTypes, CommandGetTables, CommandGetXdbcTypeInfo, CommandPreparedStatementQuery,
    CommandPreparedStatementUpdate, CommandStatementIngest, CommandStatementQuery, CommandStatementUpdate,
    DoPutPreparedStatementResult, ProstMessageExt, SqlInfo, TicketStatementQuery,
};
use arrow_flight::{
    Action, ActionType, CancelFlightInfoRequest, CancelFlightInfoResult, CancelStatus, FlightDescriptor,
    FlightEndpoint, FlightInfo, PollInfo, Result as ActionResult, Ticket,
};
use futures::{StreamExt, TryStreamExt};
use prost::Message;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use super::answering::Answering;
use super::ingest::{Incoming, Mode, Target};
use super::keys::TicketKeys;
use super::metrics::Metrics;
use super::operations::Operations;
use super::polls::{FIRST_WAIT, LATER_WAIT, Polls};
use super::prepared::{self, MAX_HANDLE_VALUES, MAX_VALUES};
use super::rows::{FlightStream, encode, encode_one, outgoing, outgoing_schema};
use super::running::{self, Running};
use super::spool::Spool;
use super::ticket::{Asked, Plan, Polled, StatementTicket};
use super::transactions::{self, Elsewhere, settings_of};
use super::{
    FORWARDED_HEADER, SCHEMA_HEADER, STALE_HEADER, call_timeout, cookies, info, listing, statement_timeout, status,
    timeout_of,
};
use crate::error::Error;
use crate::progress::{self, Scans};
use crate::sql::bound::Bound;
use crate::sql::session::{Changed, Rows, SessionChange, Sessions, Settings};
use crate::sql::statement::{Action as Sort, Command};
use crate::sql::{CATALOG, Engine};
use crate::table::catalog_error;

/// The longest that listing the catalog for a client may take.
const LISTING_TIMEOUT: Duration = Duration::from_secs(30);

/// Flight SQL over an [`Engine`].
#[derive(Clone)]
pub struct LakeFlight {
    engine: Arc<Engine>,
    sessions: Arc<Sessions>,
    operations: Arc<Operations>,
    polls: Arc<Polls>,
    keys: Arc<TicketKeys>,
    metrics: Arc<Metrics>,
    running: Running,
    info: Arc<SqlInfoData>,
    types: Arc<XdbcTypeInfoData>,
}

type Answer = Result<Response<FlightStream>, Status>;

impl LakeFlight {
    /// # Errors
    /// `Internal`: what it says of itself cannot be written.
    pub fn new(
        sessions: Arc<Sessions>,
        operations: Arc<Operations>,
        polls: Arc<Polls>,
        keys: Arc<TicketKeys>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, Error> {
        let (info, types) = (Arc::new(info::sql_info()?), Arc::new(info::type_info()?));
        let (engine, running) = (sessions.engine().clone(), Running::default());
        Ok(Self { engine, sessions, operations, polls, keys, metrics, running, info, types })
    }

    /// What a statement would return, and a ticket for running it. Nothing is changed; a transaction remembers its changes that
    /// are to be fetched.
    async fn info_for(
        &self,
        ticket: StatementTicket,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let (headers, _, descriptor) = request.into_parts();
        let (plan, schema) = self.plan(ticket, &headers).await?;
        let ticket = plan.encode(&self.keys, listing_deadline(&headers)).await.map_err(refused)?;
        let mut endpoint = FlightEndpoint::new().with_ticket(ticket);
        let expires = endpoint.expiration_time.get_or_insert_default();
        expires.seconds = i64::try_from(plan.expires_ms() / 1000).unwrap_or(i64::MAX);
        let info = planned_info(&plan, &schema, descriptor)?.with_endpoint(endpoint);
        if !headers.contains_key(SCHEMA_HEADER) {
            let StatementTicket { id, sql, settings, .. } = &plan.statement;
            self.sessions.asked(*id, sql, settings).map_err(refused)?;
        }
        Ok(Response::new(info))
    }

    /// What running a statement needs, and the schema of what it would return. Nothing is changed.
    async fn plan(&self, mut ticket: StatementTicket, headers: &MetadataMap) -> Result<(Plan, SchemaRef), Status> {
        let timeout = timeout_of(headers);
        let described = self.sessions.describe(&ticket.bound(), &ticket.settings, timeout).await.map_err(refused)?;
        if !described.parameters.is_empty() {
            return Err(refused(Error::invalid(format!(
                "the statement has {} parameters, and no values are bound to them; nothing was done",
                described.parameters.len()
            ))));
        }
        ticket.timeout_ms = timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        Ok((Plan::new(ticket, described.pins, described.stale), described.schema))
    }

    /// PollFlightInfo: begins a query, or says how far one has come ([`super::polls`]). What is no query, or belongs to a transaction, is
    /// answered at once, as GetFlightInfo answers it.
    ///
    /// # Errors
    /// Those of planning; of a query that has failed, its own.
    pub async fn poll(&self, request: Request<FlightDescriptor>) -> Result<Response<PollInfo>, Status> {
        let command = Any::decode(&*request.get_ref().cmd).ok().and_then(|any| FlightCommand::try_from(any).ok());
        let ticket = match command {
            Some(FlightCommand::TicketStatementQuery(name)) => {
                return self.poll_again(&name.statement_handle, request).await;
            }
            Some(FlightCommand::CommandStatementQuery(query)) => {
                let settings = self.settings(request.metadata(), query.transaction_id.as_ref())?;
                Some(StatementTicket { settings, ..StatementTicket::new(query.query) })
            }
            Some(FlightCommand::CommandPreparedStatementQuery(query)) => Some(opened(&query, request.metadata())?),
            _ => None,
        };
        if let Some(ticket) = ticket
            && ticket.settings.transaction.is_none()
            && self.command_of(&ticket.sql, &ticket.settings)?.is_none()
        {
            return self.poll_first(ticket, request.metadata()).await;
        }
        let info = self.get_flight_info(request).await?;
        Ok(info.map(|info| PollInfo { info: Some(info), progress: Some(1.0), ..PollInfo::default() }))
    }

    /// Begins a query that is polled.
    async fn poll_first(&self, ticket: StatementTicket, headers: &MetadataMap) -> Result<Response<PollInfo>, Status> {
        let (plan, schema) = self.plan(ticket, headers).await?;
        let (id, node) = (plan.statement.id, self.sessions.transactions().node().to_owned());
        let name = Polled { id, node }.encode(&self.keys, listing_deadline(headers)).await.map_err(refused)?;
        let info = planned_info(&plan, &schema, FlightDescriptor::new_cmd(name.ticket))?;
        // The call ends before the query does.
        let timeout = statement_timeout(headers);
        let scans = Arc::new(Scans::default());
        let (flight, shown) = (self.clone(), scans.clone());
        let query = async move { flight.keep(&Asked::Plan(plan), timeout, shown).await };
        self.polls.begin(id, info, scans, query).map_err(refused)?;
        self.polls.poll(id, wait_within(headers, FIRST_WAIT)).await.map(Response::new).map_err(refused)
    }

    /// How far a query has come, by its name.
    async fn poll_again(&self, name: &[u8], request: Request<FlightDescriptor>) -> Result<Response<PollInfo>, Status> {
        let (headers, _, descriptor) = request.into_parts();
        let polled = Polled::of(name, &self.keys, listing_deadline(&headers)).await.map_err(refused)?;
        let polled = polled.ok_or_else(|| refused(Error::invalid("this is the ticket of no query that is polled")))?;
        if let Some(mut node) = self.node_of(&polled, &headers).await? {
            return node.poll_flight_info(transactions::carry(&headers, descriptor)).await;
        }
        let told = self.polls.poll(polled.id, wait_within(&headers, LATER_WAIT)).await;
        told.map(Response::new).map_err(refused)
    }

    /// Runs a query, and keeps its rows.
    async fn keep(&self, asked: &Asked, timeout: Option<Duration>, scans: Arc<Scans>) -> Result<Spool, Error> {
        let settings = &asked.statement().settings;
        let (schema, rows, stale) = progress::shown_to(scans, self.start(asked, settings, timeout)).await?;
        // As clients see them: what is only a part of larger memory becomes as large as it is.
        let schema = outgoing_schema(&schema);
        let under = schema.clone();
        let rows = rows.map(move |batch| batch.and_then(|batch| outgoing(&batch, &under)));
        self.polls.spools().keep(schema, stale, rows).await
    }

    /// The rows of a query that was polled, from here or from the node that has them.
    async fn fetch(&self, polled: &Polled, headers: &MetadataMap, came: Ticket) -> Answer {
        if let Some(mut node) = self.node_of(polled, headers).await? {
            let answer = node.do_get(transactions::carry(headers, came)).await?;
            return Ok(answer.map(|stream| Box::pin(stream) as FlightStream));
        }
        let fetched = self.polls.fetch(polled.id).map_err(refused)?;
        Ok(answered(fetched.schema, fetched.rows, fetched.stale))
    }

    /// The node of a query that is polled, if it is another one and the request was not sent on already.
    async fn node_of(
        &self,
        polled: &Polled,
        headers: &MetadataMap,
    ) -> Result<Option<FlightServiceClient<Channel>>, Status> {
        if !self.is_elsewhere(polled, headers) {
            return Ok(None);
        }
        let away = |why: String| {
            refused(Error::unavailable(format!(
                "{}, the query node that runs this polled query or has its rows, cannot be reached: {why}; try again, or run the query \
                 again",
                polled.node
            )))
        };
        transactions::connect(&polled.node).await.map(Some).map_err(away)
    }

    fn is_elsewhere(&self, polled: &Polled, headers: &MetadataMap) -> bool {
        polled.node != self.sessions.transactions().node() && !headers.contains_key(FORWARDED_HEADER)
    }

    /// Runs what a ticket says, here or where its transaction is: there it goes as it came.
    async fn redeem(&self, asked: Asked, headers: &MetadataMap, came: Ticket) -> Answer {
        let ticket = asked.statement();
        let settings = settings_of(headers, None, ticket.settings.clone()).map_err(refused)?;
        let timeout = timeout_of(headers).or(ticket.timeout_ms.map(Duration::from_millis));
        let elsewhere = Elsewhere::of(&self.sessions, &settings, headers).map_err(refused)?;
        if let Some(elsewhere) = elsewhere {
            match elsewhere.connect().await {
                Ok(node) => return elsewhere.get(node, headers, came).await,
                // How a transaction ends can be settled without its node.
                Err(_) if self.ends_a_transaction(ticket)? => {}
                Err(error) => return Err(refused(error)),
            }
        }
        if let Some(command) = self.command_of(&ticket.sql, &settings)? {
            let (changed, answering) = self.answer(ticket.id, command, asked.bound(), settings, timeout).await?;
            return Ok(Response::new(answering.hand_out(encode_one(count_batch(command, &changed)?))));
        }
        let (schema, rows, stale) = self.start(&asked, &settings, timeout).await.map_err(refused)?;
        Ok(answered(outgoing_schema(&schema), rows, stale))
    }

    /// Begins a query, which is counted and can be cancelled. Besides its rows: how old the oldest pointer was that is used because the
    /// metadata cluster is away, or was when it was planned.
    async fn start(
        &self,
        asked: &Asked,
        settings: &Settings,
        timeout: Option<Duration>,
    ) -> Result<(SchemaRef, Rows, Option<Duration>), Error> {
        let ticket = asked.statement();
        let run = self.running.begin(ticket.id);
        let measured = self.metrics.begin(Command::Select, &ticket.sql);
        let bound = asked.bound();
        let starting = self.sessions.query(&bound, settings, timeout);
        let (schema, rows, mut stale) = match run.unless_cancelled(starting, running::cancelled).await {
            Ok(started) => started,
            Err(error) => {
                measured.end(&Err::<(), _>(error.clone()), |()| 0);
                return Err(error);
            }
        };
        if let Asked::Plan(plan) = asked {
            stale = stale.or(plan.stale_ms.map(Duration::from_millis));
        }
        Ok((schema, measured.rows(run.rows(rows)).boxed(), stale))
    }

    /// The command, if the statement changes something.
    fn command_of(&self, sql: &str, settings: &Settings) -> Result<Option<Command>, Status> {
        let action = self.sessions.classify(sql, settings).map_err(refused)?;
        Ok(action.is_change().then(|| action.command()))
    }

    fn ends_a_transaction(&self, ticket: &StatementTicket) -> Result<bool, Status> {
        let action = self.engine.classify(&ticket.sql).map_err(refused)?;
        Ok(matches!(action, Sort::Session(SessionChange::End(_))))
    }

    /// Makes a change, once per operation, and answers it at once.
    async fn change(
        &self,
        id: Uuid,
        command: Command,
        bound: Bound,
        settings: Settings,
        timeout: Option<Duration>,
    ) -> Result<Changed, Status> {
        let (changed, answering) = self.answer(id, command, bound, settings, timeout).await?;
        answering.given();
        Ok(changed)
    }

    /// Makes a change, once per operation. What it has come to is to be handed out.
    async fn answer(
        &self,
        id: Uuid,
        command: Command,
        bound: Bound,
        settings: Settings,
        timeout: Option<Duration>,
    ) -> Result<(Changed, Answering), Status> {
        let (transactions, run) = (self.sessions.transactions().clone(), self.running.clone());
        let answering = Answering::new(transactions, run, id, command, &bound.sql, &settings).map_err(refused)?;
        let (sessions, running, metrics) = (self.sessions.clone(), self.running.clone(), self.metrics.clone());
        let change = move || async move {
            let run = running.begin(id);
            let measured = metrics.begin(command, &bound.sql);
            // On the heap: what makes a change is large, and each that wraps it would have a copy on the stack.
            let change = Box::pin(sessions.change(&bound, &settings, timeout));
            let change = progress::told_to(run.counter(), change);
            let changed = run.unless_cancelled(change, running::change_cancelled).await;
            measured.end(&changed, |changed| changed.count);
            changed
        };
        match self.operations.run(id, change).await {
            Ok(changed) => Ok((changed, answering)),
            Err(error) => {
                answering.refused();
                Err(refused(error))
            }
        }
    }

    async fn update(&self, ticket: StatementTicket, headers: &MetadataMap) -> Result<i64, Status> {
        let Some(command) = self.command_of(&ticket.sql, &ticket.settings)? else {
            return Err(refused(Error::invalid("a query is not an update: ask for its rows")));
        };
        let elsewhere = Elsewhere::of(&self.sessions, &ticket.settings, headers).map_err(refused)?;
        let Some(elsewhere) = elsewhere else {
            let bound = ticket.bound();
            let changed = self.change(ticket.id, command, bound, ticket.settings, timeout_of(headers)).await?;
            let count = changed.count;
            return Ok(i64::try_from(count).unwrap_or(i64::MAX));
        };
        let node = elsewhere.connect().await.map_err(refused)?;
        let ticket = ticket.encode().map_err(refused)?;
        let answer = elsewhere.get(node, headers, ticket).await?.into_inner();
        let data = answer.map_err(|status| FlightError::Tonic(Box::new(status)));
        let rows: Vec<RecordBatch> = FlightRecordBatchStream::new_from_flight_data(data).try_collect().await?;
        let count = rows.first().and_then(|rows| rows.column(0).as_primitive_opt::<Int64Type>()).map(|c| c.value(0));
        count.ok_or_else(transactions::no_count)
    }

    /// The id of the statement that a FlightInfo stands for, and its name if it is polled.
    async fn statement_of(&self, info: &FlightInfo) -> Result<(Uuid, Option<Polled>), Status> {
        let nothing = || refused(Error::invalid("this FlightInfo is no answer of lake's to a statement"));
        let ticket = info.endpoint.first().and_then(|endpoint| endpoint.ticket.as_ref());
        // A query that is polled has a ticket once it has ended.
        let ticket = ticket.map(|ticket| &ticket.ticket).or(info.flight_descriptor.as_ref().map(|name| &name.cmd));
        let any = Any::decode(&**ticket.ok_or_else(nothing)?).map_err(|_| nothing())?;
        let Ok(FlightCommand::TicketStatementQuery(ticket)) = FlightCommand::try_from(any) else {
            return Err(nothing());
        };
        let (handle, deadline) = (&ticket.statement_handle, Instant::now() + LISTING_TIMEOUT);
        if let Some(polled) = Polled::of(handle, &self.keys, deadline).await.map_err(refused)? {
            return Ok((polled.id, Some(polled)));
        }
        let asked = Asked::of(handle, &self.keys, deadline).await.map_err(refused)?;
        Ok((asked.statement().id, None))
    }

    /// Cancels what a FlightInfo stands for, here or on another node.
    async fn cancel(&self, headers: &MetadataMap, info: &FlightInfo) -> Result<bool, Status> {
        let (id, polled) = self.statement_of(info).await?;
        if let Some(polled) = polled {
            return match self.is_elsewhere(&polled, headers) {
                true => running::cancel_at(&polled.node, headers, info).await,
                false => Ok(self.polls.cancel(id)),
            };
        }
        let (here, metadata) = (self.sessions.transactions().node(), &self.engine.tables().metadata);
        Ok(self.running.cancel(id) || running::cancel_elsewhere(metadata, here, headers, info).await)
    }

    fn settings(&self, headers: &MetadataMap, transaction: Option<&bytes::Bytes>) -> Result<Settings, Status> {
        settings_of(headers, transaction.map(AsRef::as_ref), Settings::default()).map_err(refused)
    }
}

fn refused(error: Error) -> Status {
    status::from_error(&error)
}

fn count_batch(command: Command, changed: &Changed) -> Result<RecordBatch, Status> {
    let mut metadata = HashMap::from([(Command::METADATA_KEY.to_owned(), command.as_str().to_owned())]);
    if let Some(settings) = &changed.settings {
        let json = serde_json::to_string(settings).map_err(|e| Status::internal(format!("encoding settings: {e}")))?;
        metadata.insert(Settings::METADATA_KEY.to_owned(), json);
    }
    let schema = Schema::new(vec![Field::new("count", DataType::Int64, false)]).with_metadata(metadata);
    let count = Int64Array::from(vec![i64::try_from(changed.count).unwrap_or(i64::MAX)]);
    RecordBatch::try_new(Arc::new(schema), vec![Arc::new(count)])
        .map_err(|e| Status::internal(format!("encoding the count: {e}")))
}

/// An answer to a command about the catalog: its ticket is the command itself.
fn command_info(
    command: &impl ProstMessageExt,
    schema: SchemaRef,
    request: Request<FlightDescriptor>,
) -> Result<Response<FlightInfo>, Status> {
    let ticket = Ticket { ticket: command.as_any().encode_to_vec().into() };
    let info = FlightInfo::new()
        .try_with_schema(&schema)
        .map_err(|e| Status::internal(format!("encoding the schema: {e}")))?
        .with_endpoint(FlightEndpoint::new().with_ticket(ticket))
        .with_descriptor(request.into_inner());
    Ok(Response::new(info))
}

/// What is said of a statement that was planned, without an endpoint.
fn planned_info(plan: &Plan, schema: &SchemaRef, descriptor: FlightDescriptor) -> Result<FlightInfo, Status> {
    let info = FlightInfo::new()
        .try_with_schema(&outgoing_schema(schema))
        .map_err(|e| Status::internal(format!("encoding the schema: {e}")))?
        .with_descriptor(descriptor);
    Ok(match plan.stale_ms {
        Some(stale) => info.with_app_metadata(format!("{STALE_HEADER}: {stale}")),
        None => info,
    })
}

/// The answer with a query's rows.
fn answered(schema: SchemaRef, rows: Rows, stale: Option<Duration>) -> Response<FlightStream> {
    let mut response = Response::new(encode(schema, rows));
    if let Some(value) = stale.and_then(|stale| stale.as_millis().to_string().parse().ok()) {
        response.metadata_mut().insert(STALE_HEADER, value);
    }
    response
}

/// What a prepared statement is run as.
fn opened(query: &CommandPreparedStatementQuery, headers: &MetadataMap) -> Result<StatementTicket, Status> {
    let mut ticket = prepared::opened(&query.prepared_statement_handle).map_err(refused)?;
    ticket.settings = settings_of(headers, None, ticket.settings).map_err(refused)?;
    Ok(ticket)
}

/// How long a poll may wait for an end: no longer than its call may take.
fn wait_within(headers: &MetadataMap, most: Duration) -> Duration {
    call_timeout(headers).map_or(most, |timeout| most.min(timeout / 2))
}

fn listing_deadline(headers: &MetadataMap) -> Instant {
    Instant::now() + timeout_of(headers).unwrap_or(LISTING_TIMEOUT)
}

fn one_batch(batch: arrow_flight::error::Result<RecordBatch>) -> Answer {
    Ok(Response::new(encode_one(batch.map_err(Status::from)?)))
}

#[tonic::async_trait]
impl FlightSqlService for LakeFlight {
    type FlightService = LakeFlight;

    async fn get_flight_info_statement(
        &self,
        query: CommandStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let settings = self.settings(request.metadata(), query.transaction_id.as_ref())?;
        if let Some(elsewhere) = Elsewhere::of(&self.sessions, &settings, request.metadata()).map_err(refused)? {
            let (headers, _, descriptor) = request.into_parts();
            return elsewhere.info(&headers, descriptor).await;
        }
        let ticket = StatementTicket { settings, ..StatementTicket::new(query.query) };
        self.info_for(ticket, request).await
    }

    async fn do_get_statement(&self, ticket: TicketStatementQuery, request: Request<Ticket>) -> Answer {
        let (headers, _, came) = request.into_parts();
        let (handle, deadline) = (&ticket.statement_handle, listing_deadline(&headers));
        if let Some(polled) = Polled::of(handle, &self.keys, deadline).await.map_err(refused)? {
            return self.fetch(&polled, &headers, came).await;
        }
        let asked = Asked::decode(handle, &self.keys, deadline).await.map_err(refused)?;
        self.redeem(asked, &headers, came).await
    }

    async fn do_put_statement_update(
        &self,
        command: CommandStatementUpdate,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        let settings = self.settings(request.metadata(), command.transaction_id.as_ref())?;
        self.update(StatementTicket { settings, ..StatementTicket::new(command.query) }, request.metadata()).await
    }

    async fn do_action_create_prepared_statement(
        &self,
        query: ActionCreatePreparedStatementRequest,
        request: Request<Action>,
    ) -> Result<ActionCreatePreparedStatementResult, Status> {
        let settings = self.settings(request.metadata(), query.transaction_id.as_ref())?;
        let timeout = timeout_of(request.metadata());
        let ticket = StatementTicket { settings, ..StatementTicket::new(query.query) };
        let is_change = self.command_of(&ticket.sql, &ticket.settings)?.is_some();
        let described = match Elsewhere::of(&self.sessions, &ticket.settings, request.metadata()).map_err(refused)? {
            None => {
                let described = self.sessions.describe(&ticket.bound(), &ticket.settings, timeout).await;
                prepared::described(described, &self.sessions, &ticket).map_err(refused)?
            }
            // The node of its transaction knows its tables; what it takes is told without them.
            Some(_) => (None, self.engine.parameters_of(&ticket.sql).map_err(refused)?.0),
        };
        prepared::created(&ticket, described.0, described.1, is_change)
    }

    async fn do_action_begin_transaction(
        &self,
        _: ActionBeginTransactionRequest,
        request: Request<Action>,
    ) -> Result<ActionBeginTransactionResult, Status> {
        transactions::begin(&self.sessions, request.metadata())
    }

    async fn do_action_end_transaction(
        &self,
        query: ActionEndTransactionRequest,
        request: Request<Action>,
    ) -> Result<(), Status> {
        transactions::end(&self.sessions, query, request.metadata()).await
    }

    async fn do_action_close_prepared_statement(
        &self,
        _: ActionClosePreparedStatementRequest,
        _: Request<Action>,
    ) -> Result<(), Status> {
        Ok(())
    }

    async fn get_flight_info_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let ticket = opened(&query, request.metadata())?;
        if let Some(elsewhere) = Elsewhere::of(&self.sessions, &ticket.settings, request.metadata()).map_err(refused)? {
            let (headers, _, descriptor) = request.into_parts();
            return elsewhere.info(&headers, descriptor).await;
        }
        self.info_for(ticket, request).await
    }

    async fn do_get_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<Ticket>,
    ) -> Answer {
        let ticket = prepared::opened(&query.prepared_statement_handle).map_err(refused)?;
        if self.command_of(&ticket.sql, &ticket.settings)?.is_some() {
            // Such a ticket has no operation id: redeemed twice, it would be done twice.
            return Err(refused(Error::invalid("a change is run by GetFlightInfo and its ticket, or by DoPut")));
        }
        let came = ticket.encode().map_err(refused)?;
        self.redeem(Asked::Statement(ticket), request.metadata(), came).await
    }

    async fn do_put_prepared_statement_query(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<DoPutPreparedStatementResult, Status> {
        let mut ticket = prepared::opened(&query.prepared_statement_handle).map_err(refused)?;
        let most = match self.command_of(&ticket.sql, &ticket.settings)? {
            Some(_) => MAX_VALUES,
            None => MAX_HANDLE_VALUES,
        };
        ticket.parameters = prepared::values(request.into_inner(), most).await.map_err(refused)?;
        Ok(DoPutPreparedStatementResult { prepared_statement_handle: Some(ticket.to_handle().map_err(refused)?) })
    }

    async fn do_put_prepared_statement_update(
        &self,
        query: CommandPreparedStatementUpdate,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        let headers = request.metadata().clone();
        let mut ticket = prepared::opened(&query.prepared_statement_handle).map_err(refused)?;
        let values = prepared::values(request.into_inner(), MAX_VALUES).await.map_err(refused)?;
        ticket.parameters = values.or(ticket.parameters);
        ticket.settings = settings_of(&headers, None, ticket.settings).map_err(refused)?;
        self.update(ticket, &headers).await
    }

    async fn do_put_statement_ingest(
        &self,
        command: CommandStatementIngest,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        let headers = request.metadata().clone();
        let named = command.transaction_id.clone().filter(|id| !id.is_empty());
        let transaction = named.or_else(|| cookies::transaction(&headers));
        let settings = self.settings(&headers, transaction.as_ref())?;
        let target = Target::of(&command).map_err(refused)?;
        if let Some(elsewhere) = Elsewhere::of(&self.sessions, &settings, &headers).map_err(refused)? {
            return elsewhere.put(&headers, request.into_inner()).await;
        }
        let rows = Incoming::new(request.into_inner()).await.map_err(refused)?;
        let (timeout, deadline) = (timeout_of(&headers), self.engine.write_deadline(timeout_of(&headers)));
        let exists = target.looks_first()
            && self.engine.has_table(&target.schema, &target.table, deadline).await.map_err(refused)?;
        match target.mode {
            Mode::ReplaceExisting if !exists => {
                let name = format!("{}.{}", target.schema, target.table);
                return Err(refused(Error::not_found(format!("table {name} does not exist; nothing was done"))));
            }
            Mode::CreateOrAppend if !exists => {
                let empty = target.empty(&rows.schema).map_err(refused)?;
                let settings = Settings { operation: None, ..settings.clone() };
                self.change(Uuid::new_v4(), Command::CreateTableAs, empty, settings, timeout).await?;
            }
            _ => {}
        }
        let statement = target.statement(rows);
        let command = self.command_of(&statement.sql, &settings)?.unwrap_or(Command::Insert);
        let count = self.change(Uuid::new_v4(), command, statement, settings, timeout).await?.count;
        Ok(i64::try_from(count).unwrap_or(i64::MAX))
    }

    async fn do_action_cancel_query(
        &self,
        query: ActionCancelQueryRequest,
        request: Request<Action>,
    ) -> Result<ActionCancelQueryResult, Status> {
        let info = FlightInfo::decode(query.info).map_err(|e| refused(Error::invalid(e)))?;
        // The numbers are the same.
        let result = match self.cancel(request.metadata(), &info).await? {
            true => CancelStatus::Cancelled,
            false => CancelStatus::NotCancellable,
        };
        Ok(ActionCancelQueryResult { result: result as i32 })
    }

    async fn list_custom_actions(&self) -> Option<Vec<Result<ActionType, Status>>> {
        let action = |name: &str, description: &str| {
            Ok(ActionType { r#type: name.to_owned(), description: description.to_owned() })
        };
        Some(vec![
            action(running::CANCEL, "Cancels a statement, by the FlightInfo that it was answered with."),
            action(running::PROGRESS, "How many rows a change has made so far, by its FlightInfo, if it runs here."),
        ])
    }

    async fn do_action_fallback(
        &self,
        request: Request<Action>,
    ) -> Result<Response<<Self as FlightService>::DoActionStream>, Status> {
        let (headers, _, action) = request.into_parts();
        let answers = match action.r#type.as_str() {
            running::CANCEL => {
                let request = CancelFlightInfoRequest::decode(action.body).map_err(|e| refused(Error::invalid(e)))?;
                let info =
                    request.info.ok_or_else(|| refused(Error::invalid("CancelFlightInfo names no FlightInfo")))?;
                let status = match self.cancel(&headers, &info).await? {
                    true => CancelStatus::Cancelled,
                    false => CancelStatus::NotCancellable,
                };
                vec![CancelFlightInfoResult::new(status).encode_to_vec()]
            }
            running::PROGRESS => {
                let info = FlightInfo::decode(action.body).map_err(|e| refused(Error::invalid(e)))?;
                let rows = self.running.rows_so_far(self.statement_of(&info).await?.0);
                let waits = rows.and_then(|_| running::waits_for(&self.engine.tables().metadata));
                rows.map(|rows| rows.to_string()).into_iter().chain(waits).map(String::into_bytes).collect()
            }
            other => return Err(refused(Error::not_supported(format!("there is no action {other:?}")))),
        };
        let answers = answers.into_iter().map(|body| Ok(ActionResult::new(body)));
        Ok(Response::new(Box::pin(futures::stream::iter(answers))))
    }

    async fn get_flight_info_catalogs(
        &self,
        query: CommandGetCatalogs,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        command_info(&query, query.into_builder().schema(), request)
    }

    async fn do_get_catalogs(&self, query: CommandGetCatalogs, _: Request<Ticket>) -> Answer {
        let mut builder = query.into_builder();
        builder.append(CATALOG);
        one_batch(builder.build())
    }

    async fn get_flight_info_schemas(
        &self,
        query: CommandGetDbSchemas,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        command_info(&query, query.clone().into_builder().schema(), request)
    }

    async fn do_get_schemas(&self, query: CommandGetDbSchemas, request: Request<Ticket>) -> Answer {
        let metadata = &self.engine.tables().metadata;
        let failed = |e| refused(catalog_error("listing schemas", e));
        let namespaces = metadata.list_namespaces(listing_deadline(request.metadata())).await.map_err(failed)?;
        let mut builder = query.into_builder();
        for namespace in namespaces {
            builder.append(CATALOG, namespace.to_string());
        }
        one_batch(builder.build())
    }

    async fn get_flight_info_tables(
        &self,
        query: CommandGetTables,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        command_info(&query, query.clone().into_builder().schema(), request)
    }

    async fn do_get_tables(&self, query: CommandGetTables, request: Request<Ticket>) -> Answer {
        one_batch(Ok(listing::tables(&self.engine, query, listing_deadline(request.metadata()))
            .await
            .map_err(refused)?))
    }

    async fn get_flight_info_table_types(
        &self,
        query: CommandGetTableTypes,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        command_info(&query, query.into_builder().schema(), request)
    }

    async fn do_get_table_types(&self, query: CommandGetTableTypes, _: Request<Ticket>) -> Answer {
        let mut builder = query.into_builder();
        builder.append("TABLE");
        builder.append("VIEW");
        one_batch(builder.build())
    }

    async fn get_flight_info_xdbc_type_info(
        &self,
        query: CommandGetXdbcTypeInfo,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let schema = query.into_builder(&self.types).schema();
        command_info(&query, schema, request)
    }

    async fn do_get_xdbc_type_info(&self, query: CommandGetXdbcTypeInfo, _: Request<Ticket>) -> Answer {
        one_batch(query.into_builder(&self.types).build())
    }

    async fn get_flight_info_sql_info(
        &self,
        query: CommandGetSqlInfo,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let schema = query.clone().into_builder(&self.info).schema();
        command_info(&query, schema, request)
    }

    async fn do_get_sql_info(&self, query: CommandGetSqlInfo, _: Request<Ticket>) -> Answer {
        one_batch(query.into_builder(&self.info).build())
    }

    async fn register_sql_info(&self, _: i32, _: &SqlInfo) {}
}
