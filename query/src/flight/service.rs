//! The Flight SQL service itself: commands to statements, statements to answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{AsArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use arrow::ipc::writer::IpcWriteOptions;
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::sql::metadata::{SqlInfoData, SqlInfoDataBuilder};
use arrow_flight::sql::server::{FlightSqlService, PeekableFlightDataStream};
use arrow_flight::sql::{
    ActionBeginTransactionRequest, ActionBeginTransactionResult, ActionClosePreparedStatementRequest,
    ActionCreatePreparedStatementRequest, ActionCreatePreparedStatementResult, ActionEndTransactionRequest,
    CommandGetCatalogs, CommandGetDbSchemas, CommandGetSqlInfo, CommandGetTableTypes, CommandGetTables,
    CommandPreparedStatementQuery, CommandPreparedStatementUpdate, CommandStatementQuery, CommandStatementUpdate,
    DoPutPreparedStatementResult, ProstMessageExt, SqlInfo, TicketStatementQuery,
};
use arrow_flight::{Action, FlightDescriptor, FlightEndpoint, FlightInfo, IpcMessage, SchemaAsIpc, Ticket};
use futures::TryStreamExt;
use prost::Message;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::operations::Operations;
use super::rows::{FlightStream, encode, encode_one, outgoing_schema};
use super::ticket::StatementTicket;
use super::transactions::{self, Elsewhere, settings_of};
use super::{STALE_HEADER, status, timeout_of};
use crate::error::Error;
use crate::sql::session::{Changed, SessionChange, Sessions, Settings};
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
    info: Arc<SqlInfoData>,
}

type Answer = Result<Response<FlightStream>, Status>;

impl LakeFlight {
    pub fn new(sessions: Arc<Sessions>, operations: Arc<Operations>) -> Result<Self, Error> {
        let mut info = SqlInfoDataBuilder::new();
        info.append(SqlInfo::FlightSqlServerName, "lake");
        info.append(SqlInfo::FlightSqlServerVersion, env!("CARGO_PKG_VERSION"));
        info.append(SqlInfo::FlightSqlServerArrowVersion, "1.3");
        info.append(SqlInfo::FlightSqlServerReadOnly, false);
        info.append(SqlInfo::FlightSqlServerSql, true);
        info.append(SqlInfo::FlightSqlServerSubstrait, false);
        // Transactions, without savepoints.
        info.append(SqlInfo::FlightSqlServerTransaction, 1i32);
        info.append(SqlInfo::SqlIdentifierQuoteChar, "\"");
        let info = info.build().map_err(|e| Error::internal(format!("describing the server: {e}")))?;
        Ok(Self { engine: sessions.engine().clone(), sessions, operations, info: Arc::new(info) })
    }

    /// What a statement would return, and a ticket for running it. Nothing is changed.
    async fn info_for(
        &self,
        sql: String,
        settings: Settings,
        timeout: Option<Duration>,
        descriptor: FlightDescriptor,
    ) -> Result<Response<FlightInfo>, Status> {
        let (schema, stale) = self.sessions.describe(&sql, &settings, timeout).await.map_err(refused)?;
        let mut ticket = StatementTicket { settings, ..StatementTicket::new(sql) };
        ticket.timeout_ms = timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        let mut info = FlightInfo::new()
            .try_with_schema(&outgoing_schema(&schema))
            .map_err(|e| Status::internal(format!("encoding the schema: {e}")))?
            .with_endpoint(FlightEndpoint::new().with_ticket(ticket.encode()?))
            .with_descriptor(descriptor);
        if let Some(stale) = stale {
            info = info.with_app_metadata(format!("{STALE_HEADER}: {}", stale.as_millis()));
        }
        Ok(Response::new(info))
    }

    /// Runs what a ticket says, here or where its transaction is.
    async fn redeem(&self, mut ticket: StatementTicket, headers: &MetadataMap) -> Answer {
        ticket.settings = settings_of(headers, None, ticket.settings).map_err(refused)?;
        let timeout = timeout_of(headers).or(ticket.timeout_ms.map(Duration::from_millis));
        let elsewhere = Elsewhere::of(&self.sessions, &ticket.settings, headers).map_err(refused)?;
        if let Some(elsewhere) = elsewhere {
            match elsewhere.connect().await {
                Ok(node) => return elsewhere.get(node, headers, ticket.encode()?).await,
                // How a transaction ends can be settled without its node.
                Err(_) if self.ends_a_transaction(&ticket)? => {}
                Err(error) => return Err(refused(error)),
            }
        }
        if let Some(command) = self.command_of(&ticket)? {
            let changed = self.change(ticket, timeout).await?;
            return Ok(Response::new(encode_one(count_batch(command, &changed)?)));
        }
        let (schema, rows, stale) =
            self.sessions.query(&ticket.sql, &ticket.settings, timeout).await.map_err(refused)?;
        let mut response = Response::new(encode(outgoing_schema(&schema), rows));
        if let Some(value) = stale.and_then(|stale| stale.as_millis().to_string().parse().ok()) {
            response.metadata_mut().insert(STALE_HEADER, value);
        }
        Ok(response)
    }

    /// The command, if the statement changes something.
    fn command_of(&self, ticket: &StatementTicket) -> Result<Option<Command>, Status> {
        let action = self.sessions.classify(&ticket.sql, &ticket.settings).map_err(refused)?;
        Ok(action.is_change().then(|| action.command()))
    }

    fn ends_a_transaction(&self, ticket: &StatementTicket) -> Result<bool, Status> {
        let action = self.engine.classify(&ticket.sql).map_err(refused)?;
        Ok(matches!(action, Sort::Session(SessionChange::End(_))))
    }

    /// Makes a change, once per operation.
    async fn change(&self, ticket: StatementTicket, timeout: Option<Duration>) -> Result<Changed, Status> {
        let sessions = self.sessions.clone();
        let id = ticket.id;
        let change = move || async move { sessions.change(&ticket.sql, &ticket.settings, timeout).await };
        self.operations.run(id, change).await.map_err(refused)
    }

    async fn update(&self, ticket: StatementTicket, headers: &MetadataMap) -> Result<i64, Status> {
        if self.command_of(&ticket)?.is_none() {
            return Err(refused(Error::invalid("a query is not an update: ask for its rows")));
        }
        let elsewhere = Elsewhere::of(&self.sessions, &ticket.settings, headers).map_err(refused)?;
        let Some(elsewhere) = elsewhere else {
            let count = self.change(ticket, timeout_of(headers)).await?.count;
            return Ok(i64::try_from(count).unwrap_or(i64::MAX));
        };
        let node = elsewhere.connect().await.map_err(refused)?;
        let answer = elsewhere.get(node, headers, ticket.encode()?).await?.into_inner();
        let data = answer.map_err(|status| FlightError::Tonic(Box::new(status)));
        let rows: Vec<RecordBatch> = FlightRecordBatchStream::new_from_flight_data(data).try_collect().await?;
        let count = rows.first().and_then(|rows| rows.column(0).as_primitive_opt::<Int64Type>()).map(|c| c.value(0));
        count.ok_or_else(|| Status::internal("the node of the transaction did not answer with a count"))
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

fn listing_deadline<T>(request: &Request<T>) -> Instant {
    Instant::now() + timeout_of(request.metadata()).unwrap_or(LISTING_TIMEOUT)
}

fn one_batch(batch: arrow_flight::error::Result<RecordBatch>) -> Answer {
    Ok(Response::new(encode_one(batch.map_err(Status::from)?)))
}

/// A prepared statement is made anew each time that it is run: each run is an operation of its own.
fn prepared(handle: &[u8]) -> Result<StatementTicket, Status> {
    let ticket = StatementTicket::decode(handle)
        .map_err(|_| Status::invalid_argument("the prepared statement was not made by lake"))?;
    Ok(StatementTicket { settings: ticket.settings, ..StatementTicket::new(ticket.sql) })
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
        let timeout = timeout_of(request.metadata());
        self.info_for(query.query, settings, timeout, request.into_inner()).await
    }

    async fn do_get_statement(&self, ticket: TicketStatementQuery, request: Request<Ticket>) -> Answer {
        let ticket = StatementTicket::decode(&ticket.statement_handle)?;
        self.redeem(ticket, request.metadata()).await
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
        let (schema, _) = self.sessions.describe(&query.query, &settings, timeout).await.map_err(refused)?;
        let ticket = StatementTicket { settings, ..StatementTicket::new(query.query) };
        let is_change = self.command_of(&ticket)?.is_some();
        let encode = |schema: &Schema| {
            let message: Result<IpcMessage, _> = SchemaAsIpc::new(schema, &IpcWriteOptions::default()).try_into();
            message.map(|IpcMessage(bytes)| bytes).map_err(|e| Status::internal(format!("encoding the schema: {e}")))
        };
        Ok(ActionCreatePreparedStatementResult {
            prepared_statement_handle: serde_json::to_vec(&ticket)
                .map_err(|e| Status::internal(format!("making a handle: {e}")))?
                .into(),
            dataset_schema: match is_change {
                true => Default::default(),
                false => encode(&outgoing_schema(&schema))?,
            },
            parameter_schema: encode(&Schema::empty())?,
        })
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
        let ticket = prepared(&query.prepared_statement_handle)?;
        let settings = settings_of(request.metadata(), None, ticket.settings).map_err(refused)?;
        let timeout = timeout_of(request.metadata());
        self.info_for(ticket.sql, settings, timeout, request.into_inner()).await
    }

    async fn do_get_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<Ticket>,
    ) -> Answer {
        let ticket = prepared(&query.prepared_statement_handle)?;
        if self.command_of(&ticket)?.is_some() {
            // Such a ticket has no operation id: redeemed twice, it would be done twice.
            return Err(refused(Error::invalid("a change is run by GetFlightInfo and its ticket, or by DoPut")));
        }
        self.redeem(ticket, request.metadata()).await
    }

    async fn do_put_prepared_statement_query(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<DoPutPreparedStatementResult, Status> {
        no_parameters(request).await?;
        Ok(DoPutPreparedStatementResult { prepared_statement_handle: Some(query.prepared_statement_handle) })
    }

    async fn do_put_prepared_statement_update(
        &self,
        query: CommandPreparedStatementUpdate,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        let headers = request.metadata().clone();
        no_parameters(request).await?;
        let mut ticket = prepared(&query.prepared_statement_handle)?;
        ticket.settings = settings_of(&headers, None, ticket.settings).map_err(refused)?;
        self.update(ticket, &headers).await
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
        let namespaces = metadata.list_namespaces(listing_deadline(&request)).await.map_err(failed)?;
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
        let deadline = listing_deadline(&request);
        let tables = self.engine.tables();
        let listed = tables.list(deadline).await.map_err(refused)?;
        let mut builder = query.clone().into_builder();
        for (namespace, idents) in listed {
            let schemas: Vec<SchemaRef> = match query.include_schema {
                true => {
                    let loaded = tables.load(&idents, deadline).await.map_err(refused)?;
                    let schema = |table: Option<crate::table::Table>| match table {
                        Some(table) => table.arrow_schema().map(|schema| outgoing_schema(&schema)),
                        None => Ok(Arc::new(Schema::empty())),
                    };
                    loaded.tables.into_iter().map(schema).collect::<Result<_, _>>().map_err(refused)?
                }
                false => idents.iter().map(|_| Arc::new(Schema::empty())).collect(),
            };
            for (ident, schema) in idents.iter().zip(schemas) {
                builder.append(CATALOG, namespace.to_string(), &ident.name, "TABLE", &schema).map_err(Status::from)?;
            }
        }
        one_batch(builder.build())
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
        one_batch(builder.build())
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

async fn no_parameters(request: Request<PeekableFlightDataStream>) -> Result<(), Status> {
    let data = request.into_inner().map_err(|status| FlightError::Tonic(Box::new(status)));
    let mut batches = FlightRecordBatchStream::new_from_flight_data(data);
    while let Some(batch) = batches.try_next().await? {
        if batch.num_columns() > 0 && batch.num_rows() > 0 {
            return Err(refused(Error::not_supported(
                "parameters of prepared statements are not supported yet; nothing was done",
            )));
        }
    }
    Ok(())
}
