//! The Flight SQL service itself: commands to statements, statements to answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::ipc::writer::IpcWriteOptions;
use arrow_flight::sql::metadata::{SqlInfoData, SqlInfoDataBuilder};
use arrow_flight::sql::server::{FlightSqlService, PeekableFlightDataStream};
use arrow_flight::sql::{
    ActionClosePreparedStatementRequest, ActionCreatePreparedStatementRequest, ActionCreatePreparedStatementResult,
    CommandGetCatalogs, CommandGetDbSchemas, CommandGetSqlInfo, CommandGetTableTypes, CommandGetTables,
    CommandPreparedStatementQuery, CommandPreparedStatementUpdate, CommandStatementQuery, CommandStatementUpdate,
    DoPutPreparedStatementResult, ProstMessageExt, SqlInfo, TicketStatementQuery,
};
use arrow_flight::{Action, FlightDescriptor, FlightEndpoint, FlightInfo, IpcMessage, SchemaAsIpc, Ticket};
use futures::TryStreamExt;
use prost::Message;
use tonic::{Request, Response, Status};

use super::operations::Operations;
use super::rows::{FlightStream, encode, encode_one, outgoing_schema};
use super::ticket::StatementTicket;
use super::{STALE_HEADER, status, timeout_of};
use crate::error::Error;
use crate::sql::statement::Command;
use crate::sql::{CATALOG, Engine};
use crate::table::catalog_error;

/// The longest that listing the catalog for a client may take.
const LISTING_TIMEOUT: Duration = Duration::from_secs(30);

/// Flight SQL over an [`Engine`].
#[derive(Clone)]
pub struct LakeFlight {
    engine: Arc<Engine>,
    operations: Arc<Operations>,
    info: Arc<SqlInfoData>,
}

type Answer = Result<Response<FlightStream>, Status>;

impl LakeFlight {
    pub fn new(engine: Arc<Engine>, operations: Arc<Operations>) -> Result<Self, Error> {
        let mut info = SqlInfoDataBuilder::new();
        info.append(SqlInfo::FlightSqlServerName, "lake");
        info.append(SqlInfo::FlightSqlServerVersion, env!("CARGO_PKG_VERSION"));
        info.append(SqlInfo::FlightSqlServerArrowVersion, "1.3");
        info.append(SqlInfo::FlightSqlServerReadOnly, false);
        info.append(SqlInfo::FlightSqlServerSql, true);
        info.append(SqlInfo::FlightSqlServerSubstrait, false);
        info.append(SqlInfo::FlightSqlServerTransaction, 0i32);
        info.append(SqlInfo::SqlIdentifierQuoteChar, "\"");
        let info = info.build().map_err(|e| Error::internal(format!("describing the server: {e}")))?;
        Ok(Self { engine, operations, info: Arc::new(info) })
    }

    /// What a statement would return, and a ticket for running it. Nothing is changed.
    async fn info_for(
        &self,
        sql: String,
        timeout: Option<Duration>,
        descriptor: FlightDescriptor,
    ) -> Result<Response<FlightInfo>, Status> {
        let planned = self.engine.plan(&sql, timeout).await.map_err(refused)?;
        let mut ticket = StatementTicket::new(sql);
        ticket.timeout_ms = timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        let mut info = FlightInfo::new()
            .try_with_schema(&outgoing_schema(&planned.schema))
            .map_err(|e| Status::internal(format!("encoding the schema: {e}")))?
            .with_endpoint(FlightEndpoint::new().with_ticket(ticket.encode()?))
            .with_descriptor(descriptor);
        if let Some(stale) = planned.stale {
            info = info.with_app_metadata(format!("{STALE_HEADER}: {}", stale.as_millis()));
        }
        Ok(Response::new(info))
    }

    /// Runs what a ticket says.
    async fn redeem(&self, ticket: StatementTicket, timeout: Option<Duration>) -> Answer {
        let timeout = timeout.or(ticket.timeout_ms.map(Duration::from_millis));
        if let Some(command) = self.command_of(&ticket.sql)? {
            let count = self.change(ticket, timeout).await?;
            return Ok(Response::new(encode_one(count_batch(command, count)?)));
        }
        let planned = self.engine.plan(&ticket.sql, timeout).await.map_err(refused)?;
        let stale = planned.stale;
        let (schema, rows) = self.engine.query(planned).await.map_err(refused)?;
        let mut response = Response::new(encode(outgoing_schema(&schema), rows));
        if let Some(value) = stale.and_then(|stale| stale.as_millis().to_string().parse().ok()) {
            response.metadata_mut().insert(STALE_HEADER, value);
        }
        Ok(response)
    }

    /// The command, if the statement changes something.
    fn command_of(&self, sql: &str) -> Result<Option<Command>, Status> {
        let action = self.engine.classify(sql).map_err(refused)?;
        Ok(action.is_change().then(|| action.command()))
    }

    /// Makes a change, once per operation.
    async fn change(&self, ticket: StatementTicket, timeout: Option<Duration>) -> Result<u64, Status> {
        let engine = self.engine.clone();
        let change = move || async move {
            let planned = engine.plan(&ticket.sql, timeout).await?;
            match planned.is_change() {
                true => engine.change(planned).await,
                false => Err(Error::invalid("a query is not an update: ask for its rows")),
            }
        };
        self.operations.run(ticket.id, change).await.map_err(refused)
    }

    async fn update(&self, sql: String, timeout: Option<Duration>) -> Result<i64, Status> {
        if self.command_of(&sql)?.is_none() {
            return Err(refused(Error::invalid("a query is not an update: ask for its rows")));
        }
        let count = self.change(StatementTicket::new(sql), timeout).await?;
        Ok(i64::try_from(count).unwrap_or(i64::MAX))
    }
}

fn refused(error: Error) -> Status {
    status::from_error(&error)
}

fn count_batch(command: Command, count: u64) -> Result<RecordBatch, Status> {
    let metadata = [(Command::METADATA_KEY.to_owned(), command.as_str().to_owned())].into();
    let schema = Schema::new(vec![Field::new("count", DataType::Int64, false)]).with_metadata(metadata);
    let count = Int64Array::from(vec![i64::try_from(count).unwrap_or(i64::MAX)]);
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

fn prepared(handle: &[u8]) -> Result<String, Status> {
    String::from_utf8(handle.to_vec())
        .map_err(|_| Status::invalid_argument("the prepared statement was not made by lake"))
}

#[tonic::async_trait]
impl FlightSqlService for LakeFlight {
    type FlightService = LakeFlight;

    async fn get_flight_info_statement(
        &self,
        query: CommandStatementQuery,
        request: Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        no_transaction(query.transaction_id.as_ref())?;
        let timeout = timeout_of(request.metadata());
        self.info_for(query.query, timeout, request.into_inner()).await
    }

    async fn do_get_statement(&self, ticket: TicketStatementQuery, request: Request<Ticket>) -> Answer {
        let ticket = StatementTicket::decode(&ticket.statement_handle)?;
        self.redeem(ticket, timeout_of(request.metadata())).await
    }

    async fn do_put_statement_update(
        &self,
        command: CommandStatementUpdate,
        request: Request<PeekableFlightDataStream>,
    ) -> Result<i64, Status> {
        no_transaction(command.transaction_id.as_ref())?;
        self.update(command.query, timeout_of(request.metadata())).await
    }

    async fn do_action_create_prepared_statement(
        &self,
        query: ActionCreatePreparedStatementRequest,
        request: Request<Action>,
    ) -> Result<ActionCreatePreparedStatementResult, Status> {
        no_transaction(query.transaction_id.as_ref())?;
        let planned = self.engine.plan(&query.query, timeout_of(request.metadata())).await.map_err(refused)?;
        let encode = |schema: &Schema| {
            let message: Result<IpcMessage, _> = SchemaAsIpc::new(schema, &IpcWriteOptions::default()).try_into();
            message.map(|IpcMessage(bytes)| bytes).map_err(|e| Status::internal(format!("encoding the schema: {e}")))
        };
        Ok(ActionCreatePreparedStatementResult {
            prepared_statement_handle: query.query.into(),
            dataset_schema: match planned.is_change() {
                true => Default::default(),
                false => encode(&outgoing_schema(&planned.schema))?,
            },
            parameter_schema: encode(&Schema::empty())?,
        })
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
        let sql = prepared(&query.prepared_statement_handle)?;
        let timeout = timeout_of(request.metadata());
        self.info_for(sql, timeout, request.into_inner()).await
    }

    async fn do_get_prepared_statement(
        &self,
        query: CommandPreparedStatementQuery,
        request: Request<Ticket>,
    ) -> Answer {
        let sql = prepared(&query.prepared_statement_handle)?;
        if self.command_of(&sql)?.is_some() {
            // Such a ticket has no operation id: redeemed twice, it would be done twice.
            return Err(refused(Error::invalid("a change is run by GetFlightInfo and its ticket, or by DoPut")));
        }
        self.redeem(StatementTicket::new(sql), timeout_of(request.metadata())).await
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
        let timeout = timeout_of(request.metadata());
        no_parameters(request).await?;
        self.update(prepared(&query.prepared_statement_handle)?, timeout).await
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

fn no_transaction(id: Option<&bytes::Bytes>) -> Result<(), Status> {
    match id {
        Some(id) if !id.is_empty() => {
            Err(refused(Error::not_supported("transactions are not supported yet; nothing was done")))
        }
        _ => Ok(()),
    }
}

async fn no_parameters(request: Request<PeekableFlightDataStream>) -> Result<(), Status> {
    use arrow_flight::decode::FlightRecordBatchStream;
    let data = request.into_inner().map_err(|status| arrow_flight::error::FlightError::Tonic(Box::new(status)));
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
