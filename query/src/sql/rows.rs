//! A query's rows on their way out.
//!
//! They are sent by a task of the query's own, one batch ahead of who takes them. It ends with its client or at its deadline,
//! whether anybody takes rows or not: a client that does not read keeps neither a slot nor memory.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};

use arrow::array::{Array, ArrayRef, RecordBatch};
use arrow::datatypes::{FieldRef, Schema, SchemaRef};
use datafusion::execution::SendableRecordBatchStream;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{Engine, Planned, Work, as_written, computing, name_files, panicked};
use crate::error::{Error, Result};
use crate::progress;

/// Batches that wait for the client to take them.
const BATCHES_AHEAD: usize = 1;

/// What a query may return, and has returned.
struct Limit {
    max_rows: u64,
    max_bytes: u64,
    rows: u64,
    bytes: u64,
}

impl Engine {
    /// Runs a query, as fast as its rows are taken. Dropping the stream stops it.
    ///
    /// # Errors
    /// In the stream too: after an error it ends.
    pub async fn query(&self, planned: Planned) -> Result<(SchemaRef, BoxStream<'static, Result<RecordBatch>>)> {
        planned.check_bound()?;
        let Planned { faults, state, work, deadline, names, spread, slot, .. } = planned;
        let Work::Query(plan) = work else { return Err(Error::internal("a change was run as a query")) };
        let told = plan.schema().inner().clone();
        let starting = AssertUnwindSafe(async {
            let part = async move {
                // It was optimised when it was planned; the session's own way to a physical plan would do that once more.
                let physical = state.query_planner().create_physical_plan(&plan, &state).await;
                (state, physical)
            };
            let (state, physical) = computing::planning(&self.template, part).await?;
            Ok::<_, Error>(self.begin(&state, physical?, spread.as_deref(), deadline).await?)
        });
        let (physical, stream) = match tokio::time::timeout_at(deadline.into(), starting.catch_unwind()).await {
            Ok(Ok(started)) => started.map_err(|e| faults.explain(e))?,
            Ok(Err(panic)) => return Err(panicked("planning the query", panic.as_ref())),
            Err(_) => return Err(read_deadline()),
        };
        progress::runs_by(&physical);
        let unnamed = stream.schema();
        let schema = names.put(as_told(&unnamed, &told));
        let named = (!Arc::ptr_eq(&unnamed, &schema)).then(|| schema.clone());
        let limit = Limit { max_rows: self.max_rows, max_bytes: self.max_bytes, rows: 0, bytes: 0 };
        let (sender, rows) = mpsc::channel(BATCHES_AHEAD);
        let failure = Arc::new(OnceLock::new());
        let failed = failure.clone();
        self.tasks.spawn(async move {
            let sending = AssertUnwindSafe(send(stream, named, limit, &sender)).catch_unwind();
            let ended = tokio::select! {
                biased;
                () = sender.closed() => return,
                ended = tokio::time::timeout_at(deadline.into(), sending) => match ended {
                    Ok(Ok(ended)) => ended.map_err(|error| faults.explain(name_files(error, &physical))),
                    Ok(Err(panic)) => Err(panicked("running the query", panic.as_ref())),
                    Err(_) => Err(read_deadline()),
                },
            };
            if let Err(error) = ended {
                // The first is the only one.
                let _ = failed.set(error);
            }
            // What is held is given back before the client sees the end.
            drop((physical, slot));
            drop(sender);
        });
        let last = futures::stream::once(async move { failure.get().cloned().map(Err) }).filter_map(std::future::ready);
        let rows = ReceiverStream::new(rows).map(Ok).chain(last);
        Ok((schema, rows.boxed()))
    }
}

/// The schema of rows with columns that may be NULL where that was told of them: what is known once there is a plan, as of a largest
/// value that was looked up, does not change what a client has been told.
fn as_told(rows: &SchemaRef, told: &Schema) -> SchemaRef {
    let both = || rows.fields().iter().zip(told.fields());
    let narrower = |(own, told): (&FieldRef, &FieldRef)| told.is_nullable() && !own.is_nullable();
    if rows.fields().len() != told.fields().len() || !both().any(narrower) {
        return rows.clone();
    }
    let widened = both().map(|(own, told)| match narrower((own, told)) {
        true => Arc::new(own.as_ref().clone().with_nullable(true)),
        false => own.clone(),
    });
    Arc::new(Schema::new_with_metadata(widened.collect::<Vec<_>>(), rows.metadata().clone()))
}

/// Sends what a query returns, as fast as it is taken; under the schema that it is to have, if it is to have another.
async fn send(
    mut rows: SendableRecordBatchStream,
    named: Option<SchemaRef>,
    mut limit: Limit,
    to: &mpsc::Sender<RecordBatch>,
) -> Result<()> {
    while let Some(batch) = rows.next().await {
        let batch = match &named {
            Some(schema) => as_written::under(schema, batch?)?,
            None => batch?,
        };
        limit.count(&batch)?;
        if to.send(batch).await.is_err() {
            return Err(Error::cancelled("the client went away"));
        }
    }
    Ok(())
}

impl Limit {
    /// Counts rows that leave the node, up to what a query may return.
    fn count(&mut self, batch: &RecordBatch) -> Result<()> {
        let size = |column: &ArrayRef| {
            column.to_data().get_slice_memory_size().unwrap_or_else(|_| column.get_array_memory_size())
        };
        self.rows += batch.num_rows() as u64;
        self.bytes += batch.columns().iter().map(size).sum::<usize>() as u64;
        let over = |limit: u64, what: &str, name: &str| {
            Error::exhausted(format!(
                "the query returns more than {limit} {what}, which is all that it may ({name}); ask for less, or write the \
                 rows into a table"
            ))
        };
        match (self.rows > self.max_rows, self.bytes > self.max_bytes) {
            (true, _) => Err(over(self.max_rows, "rows", "max_result_rows")),
            (_, true) => Err(over(self.max_bytes, "bytes", "max_result_bytes")),
            _ => Ok(()),
        }
    }
}

fn read_deadline() -> Error {
    Error::deadline("the query took longer than its deadline and was stopped")
}
