//! Prepared statements. A handle holds the statement, its settings and the values that are bound to it, so that any node of the
//! cluster takes it and none remembers it; closing one has nothing to do.
//!
//! Values for a query travel in the handle that binding them returns, and then in the ticket, so they are few
//! ([`MAX_HANDLE_VALUES`]); those of a change come with the call that makes it, or in the handle ([`MAX_VALUES`], [`MAX_ROWS`]).
//! Many rows are better loaded than bound: bulk ingest streams them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use arrow::datatypes::Schema;
use arrow::ipc::writer::IpcWriteOptions;
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::sql::ActionCreatePreparedStatementResult;
use arrow_flight::sql::server::PeekableFlightDataStream;
use arrow_flight::{IpcMessage, SchemaAsIpc};
use bytes::Bytes;
use futures::TryStreamExt;
use tonic::Status;
use uuid::Uuid;

use super::rows::outgoing_schema;
use super::status::{from_error, to_error};
use super::ticket::StatementTicket;
use crate::error::{Error, Kind, Result};
use crate::sql::bound::MAX_ROWS;
use crate::sql::session::{Described, Sessions};

/// Most bytes of values for a query, as they are sent.
pub const MAX_HANDLE_VALUES: usize = 512 << 10;
/// Most bytes of values for a change.
pub const MAX_VALUES: usize = 32 << 20;

/// What describing a statement without values has come to: where its parameters could be anything it may fail for want of
/// them, and running it will tell.
///
/// # Errors
/// Others.
pub fn described(
    described: Result<Described>,
    sessions: &Sessions,
    ticket: &StatementTicket,
) -> Result<(Option<Described>, usize)> {
    match described {
        Ok(described) => {
            let count = described.parameters.len();
            Ok((Some(described), count))
        }
        Err(error) if matches!(error.kind, Kind::Invalid | Kind::NotSupported | Kind::Internal) => {
            match sessions.engine().parameters_of(&ticket.sql) {
                Ok((count, _)) if count > 0 && sessions.engine().classify(&ticket.sql)?.takes_parameters() => {
                    Ok((None, count))
                }
                _ => Err(error),
            }
        }
        Err(error) => Err(error),
    }
}

/// The answer to CreatePreparedStatement.
///
/// # Errors
/// If a schema cannot be written.
pub fn created(
    ticket: &StatementTicket,
    described: Option<Described>,
    parameters: usize,
    is_change: bool,
) -> Result<ActionCreatePreparedStatementResult, Status> {
    let encode = |schema: &Schema| {
        let message: Result<IpcMessage, _> = SchemaAsIpc::new(schema, &IpcWriteOptions::default()).try_into();
        message.map(|IpcMessage(bytes)| bytes).map_err(|e| Status::internal(format!("encoding the schema: {e}")))
    };
    let unknown = |i: usize| arrow::datatypes::Field::new(format!("${i}"), arrow::datatypes::DataType::Null, true);
    let parameter_schema = match &described {
        Some(described) => outgoing_schema(&Schema::new(described.parameters.clone())),
        None => Schema::new((1..=parameters).map(unknown).collect::<Vec<_>>()).into(),
    };
    Ok(ActionCreatePreparedStatementResult {
        prepared_statement_handle: ticket.to_handle().map_err(|e| from_error(&e))?,
        dataset_schema: match described {
            Some(described) if !is_change => encode(&outgoing_schema(&described.schema))?,
            _ => Bytes::new(),
        },
        parameter_schema: encode(&parameter_schema)?,
    })
}

/// What a handle says, as an operation of its own: a prepared statement is made anew each time that it is run.
///
/// # Errors
/// `Invalid`: it was not made by lake.
pub fn opened(handle: &[u8]) -> Result<StatementTicket> {
    let ticket = StatementTicket::from_handle(handle)
        .map_err(|_| Error::invalid("the prepared statement was not made by lake"))?;
    Ok(StatementTicket { id: Uuid::new_v4(), ..ticket })
}

/// The values that a client sends, all of them; `None`: it sends none.
///
/// # Errors
/// `Exhausted`: they are too many; `Invalid`: they cannot be read.
pub async fn values(stream: PeekableFlightDataStream, max_bytes: usize) -> Result<Option<RecordBatch>> {
    // Who sends no values may send the command alone.
    let stream = stream.map_err(FlightError::from);
    let stream = stream.try_filter(|data| std::future::ready(!data.data_header.is_empty()));
    // Of what is read all columns share the memory of one message: it is counted as it comes.
    let bytes = Arc::new(AtomicUsize::new(0));
    let counted = bytes.clone();
    let stream = stream.inspect_ok(move |data| {
        counted.fetch_add(data.data_body.len(), Ordering::Relaxed);
    });
    let mut batches = FlightRecordBatchStream::new_from_flight_data(stream);
    let (mut taken, mut rows) = (Vec::new(), 0usize);
    while let Some(batch) = batches.try_next().await.map_err(|e| failed(e, "reading the values of the parameters"))? {
        rows = rows.saturating_add(batch.num_rows());
        if bytes.load(Ordering::Relaxed) > max_bytes || rows > MAX_ROWS {
            return Err(Error::exhausted(format!(
                "the values of the parameters have more than {max_bytes} bytes, or {MAX_ROWS} rows; nothing was done: load many \
                 rows by bulk ingest, or from a file"
            )));
        }
        if batch.num_rows() > 0 {
            taken.push(batch);
        }
    }
    let Some(schema) = batches.schema().filter(|schema| !schema.fields().is_empty()) else { return Ok(None) };
    let values = concat_batches(schema, &taken);
    values.map(Some).map_err(|e| Error::invalid(format!("reading the values of the parameters: {e}")))
}

/// Why no more comes from a client.
pub fn failed(error: FlightError, doing: &str) -> Error {
    match error {
        FlightError::Tonic(status) => to_error(&status).while_doing(format_args!("{doing}")),
        other => Error::invalid(format!("{doing}: {other}")),
    }
}
