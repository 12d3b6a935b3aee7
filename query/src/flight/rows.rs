//! Rows as Flight data. Text and binary columns leave as plain Utf8 and Binary: not every driver knows views.

use std::pin::Pin;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow_flight::FlightData;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use futures::{Stream, StreamExt, TryStreamExt};
use tonic::Status;

use super::status;
use crate::error::{Error, Result};

/// A stream of a Flight answer.
pub type FlightStream = Pin<Box<dyn Stream<Item = Result<FlightData, Status>> + Send>>;

/// The schema that clients see.
pub fn outgoing_schema(schema: &Schema) -> SchemaRef {
    let plain = |field: &Arc<Field>| match field.data_type() {
        DataType::Utf8View => Arc::new(field.as_ref().clone().with_data_type(DataType::Utf8)),
        DataType::BinaryView => Arc::new(field.as_ref().clone().with_data_type(DataType::Binary)),
        _ => field.clone(),
    };
    let fields: Vec<_> = schema.fields().iter().map(plain).collect();
    Arc::new(Schema::new(fields).with_metadata(schema.metadata().clone()))
}

/// Encodes rows, whose schema becomes `schema` on the way.
pub fn encode(schema: SchemaRef, rows: impl Stream<Item = Result<RecordBatch>> + Send + 'static) -> FlightStream {
    let target = schema.clone();
    let rows = rows.map(move |batch| batch.and_then(|batch| outgoing(&batch, &target)));
    let rows = rows.map_err(|error| FlightError::Tonic(Box::new(status::from_error(&error))));
    Box::pin(FlightDataEncoderBuilder::new().with_schema(schema).build(rows).map_err(Status::from))
}

/// Encodes one batch.
pub fn encode_one(batch: RecordBatch) -> FlightStream {
    encode(batch.schema(), futures::stream::once(async move { Ok(batch) }))
}

/// A batch under the schema that clients see.
///
/// # Errors
/// `Internal`: a column cannot be put so.
pub fn outgoing(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch> {
    let failed = |e: arrow::error::ArrowError| Error::internal(format!("encoding rows: {e}"));
    let columns = batch.columns().iter().zip(schema.fields()).map(|(column, field)| {
        match column.data_type() == field.data_type() {
            true => Ok(column.clone()),
            false => cast(column, field.data_type()).map_err(failed),
        }
    });
    let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema.clone(), columns.collect::<Result<_>>()?, &options).map_err(failed)
}
