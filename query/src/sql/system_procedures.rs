//! `system.procedures`: what the cluster's leader does in steps, and what it has done lately.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray, TimestampMillisecondArray};
use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use lake_client::procedures::Procedure;

use super::Engine;
use super::system::whole;
use crate::error::{Error, Result};

/// The procedures that there are.
///
/// # Errors
/// `Unavailable` without a leader; `NotSupported` where nobody runs procedures.
pub async fn read(engine: &Engine, deadline: Instant) -> Result<RecordBatch> {
    let metadata = &engine.tables().metadata;
    if !metadata.runs_procedures() {
        return Err(Error::not_supported(
            "system.procedures lists what the leader of a metadata cluster does, and this node's metadata is not in one",
        ));
    }
    let procedures = metadata.procedures(deadline).await;
    rows(&procedures.map_err(|e| Error::unavailable(format!("reading system.procedures: {e}")))?)
}

fn rows(procedures: &[Procedure]) -> Result<RecordBatch> {
    type Text = fn(&Procedure) -> &str;
    type Number = fn(&Procedure) -> u64;
    let texts: [(&str, Text); 6] = [
        ("id", |p| &p.id),
        ("kind", |p| &p.record.kind),
        ("subject", |p| &p.record.subject),
        ("state", |p| p.record.state.as_str()),
        ("step", |p| &p.record.step),
        ("note", |p| &p.record.note),
    ];
    let numbers: [(&str, Number); 2] = [("steps", |p| p.record.steps), ("failures", |p| u64::from(p.record.failures))];
    let times: [(&str, Number); 2] =
        [("submitted", |p| p.record.submitted_unix_ms), ("changed", |p| p.record.changed_unix_ms)];
    let mut fields = Vec::new();
    let mut columns: Vec<ArrayRef> = Vec::new();
    for (name, of) in texts {
        fields.push(Field::new(name, DataType::Utf8, false));
        columns.push(Arc::new(StringArray::from_iter_values(procedures.iter().map(of))));
    }
    for (name, of) in numbers {
        fields.push(Field::new(name, DataType::Int64, false));
        columns.push(Arc::new(Int64Array::from_iter_values(procedures.iter().map(|p| whole(of(p))))));
    }
    for (name, of) in times {
        let values = TimestampMillisecondArray::from_iter_values(procedures.iter().map(|p| whole(of(p))));
        fields.push(Field::new(name, DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into())), false));
        columns.push(Arc::new(values.with_timezone("UTC")));
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
        .map_err(|e| Error::internal(format!("listing the procedures: {e}")))
}
