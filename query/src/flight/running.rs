//! Which statements run on this node, by the ids of their tickets, so that they can be cancelled, and changes asked how far they have come.
//!
//! A query that is cancelled ends with an error where its rows would go on; what it holds is given back. A change that is cancelled is
//! let go of: unless its commit had begun already, nothing of it is made.
//!
//! Cancelling is asked of any node: one that does not run the statement asks the others that are registered, each once. What none of
//! them runs has ended, or has not begun yet. Of a query that is polled the name says the node, and that one alone is asked.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Action, CancelFlightInfoRequest, CancelFlightInfoResult, CancelStatus, FlightInfo};
use futures::{Stream, StreamExt, TryStreamExt};
use lake_client::metadata::Metadata;
use prost::Message;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Request, Status};
use uuid::Uuid;

use super::FORWARDED_HEADER;
use super::status::from_error;
use crate::error::{Error, Result};

/// The action that cancels what a FlightInfo stands for.
pub const CANCEL: &str = "CancelFlightInfo";
/// The action that asks how many rows what a FlightInfo stands for has inserted, updated or deleted so far, in decimal digits. No answer:
/// it does not run at this node. A second answer says in words what the node waits for, if that takes long.
pub const PROGRESS: &str = "lake.Progress";
/// How long the metadata must have been waited for, for that to be told.
const WAITING_TOLD_AFTER: Duration = Duration::from_secs(2);
/// How many nodes are asked at a time.
const ASKED_AT_A_TIME: usize = 16;
/// How long one may take.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// See the module. What runs is bounded by admission.
#[derive(Debug, Clone, Default)]
pub struct Running {
    known: Arc<Mutex<HashMap<Uuid, Entered>>>,
}

#[derive(Debug)]
struct Entered {
    token: CancellationToken,
    /// How many run by the same ticket.
    times: usize,
    /// What they have changed so far.
    rows: Arc<AtomicU64>,
}

/// A statement that runs, until dropped.
#[derive(Debug)]
pub struct Run {
    running: Running,
    id: Uuid,
    token: CancellationToken,
    rows: Arc<AtomicU64>,
}

impl Running {
    /// A statement begins.
    pub fn begin(&self, id: Uuid) -> Run {
        let mut known = self.lock();
        let new = || Entered { token: CancellationToken::new(), times: 0, rows: Arc::default() };
        let entered = known.entry(id).or_insert_with(new);
        entered.times += 1;
        Run { running: self.clone(), id, token: entered.token.clone(), rows: entered.rows.clone() }
    }

    /// How many rows what runs by this ticket has changed so far.
    pub fn rows_so_far(&self, id: Uuid) -> Option<u64> {
        self.lock().get(&id).map(|entered| entered.rows.load(Ordering::Relaxed))
    }

    /// Cancels what runs by this ticket; whether there is anything.
    pub fn cancel(&self, id: Uuid) -> bool {
        let known = self.lock();
        let entered = known.get(&id);
        if let Some(entered) = entered {
            entered.token.cancel();
        }
        entered.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Entered>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Run {
    /// Where the rows that it changes are counted.
    pub fn counter(&self) -> Arc<AtomicU64> {
        self.rows.clone()
    }

    /// The same as long as nobody cancels it.
    ///
    /// # Errors
    /// `cancelled`, once somebody does; the work's own.
    pub async fn unless_cancelled<T>(
        &self,
        work: impl Future<Output = Result<T>>,
        cancelled: impl FnOnce() -> Error,
    ) -> Result<T> {
        tokio::select! {
            biased;
            () = self.token.cancelled() => Err(cancelled()),
            done = work => done,
        }
    }

    /// Rows that end with an error once somebody cancels them.
    pub fn rows<T: Send + 'static>(
        self,
        rows: impl Stream<Item = Result<T>> + Send + 'static,
    ) -> impl Stream<Item = Result<T>> + Send + 'static {
        let run = self;
        let ends = run.token.clone().cancelled_owned();
        let last = async move {
            // All of it, until here: it is what keeps the statement known.
            let run = run;
            run.token.is_cancelled().then(|| Err(cancelled()))
        };
        rows.take_until(ends).chain(futures::stream::once(last).filter_map(std::future::ready))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entered) = self.running.lock().entry(self.id) {
            entered.get_mut().times -= 1;
            if entered.get().times == 0 {
                entered.remove();
            }
        }
    }
}

/// What this node waits for, if it has for long.
pub fn waits_for(metadata: &Metadata) -> Option<String> {
    let waiting = metadata.waiting().filter(|waiting| *waiting >= WAITING_TOLD_AFTER)?;
    Some(format!("the metadata cluster has not answered a request for {} s", waiting.as_secs()))
}

/// What a cancelled query is told.
pub fn cancelled() -> Error {
    Error::cancelled("the query was cancelled by its client")
}

/// What a cancelled change is told.
pub fn change_cancelled() -> Error {
    Error::unknown(
        "the change was cancelled by its client: unless its commit had begun already, nothing was committed; look before running it \
         again, or run it by the same operation id",
    )
}

/// Asks the other nodes to cancel it; whether one has.
pub async fn cancel_elsewhere(metadata: &Metadata, here: &str, headers: &MetadataMap, info: &FlightInfo) -> bool {
    if headers.contains_key(FORWARDED_HEADER) {
        return false;
    }
    let nodes = metadata.nodes();
    let others: Vec<String> = nodes
        .iter()
        .flat_map(|nodes| nodes.nodes.values())
        .map(|node| node.record.flight_address.clone())
        .filter(|address| !address.is_empty() && address != here)
        .collect();
    let asked = futures::stream::iter(others).map(|node| async move {
        let asked = tokio::time::timeout(ASK_WITHIN, ask(&node, headers, info)).await;
        match asked {
            Ok(Ok(cancelled)) => cancelled,
            Ok(Err(error)) => {
                tracing::debug!(%node, %error, "a node could not be asked to cancel a statement");
                false
            }
            Err(_) => false,
        }
    });
    let asked: Vec<bool> = asked.buffer_unordered(ASKED_AT_A_TIME).collect().await;
    asked.contains(&true)
}

/// Asks the one node that can to cancel it; whether it has.
///
/// # Errors
/// `Unavailable`, naming the node: it does not answer. The node's own.
pub async fn cancel_at(node: &str, headers: &MetadataMap, info: &FlightInfo) -> Result<bool, Status> {
    let asked = tokio::time::timeout(ASK_WITHIN, ask(node, headers, info)).await;
    asked.unwrap_or_else(|_| Err(Status::unavailable("it does not answer"))).map_err(|status| match status.code() {
        Code::Unavailable => from_error(&Error::unavailable(format!(
            "{node}, the query node that runs this polled query or has its rows, cannot be asked to cancel it: {}; try again",
            status.message()
        ))),
        _ => status,
    })
}

async fn ask(node: &str, headers: &MetadataMap, info: &FlightInfo) -> Result<bool, Status> {
    let channel = crate::client::open(node).await.map_err(|e| Status::unavailable(e.to_string()))?;
    let body = CancelFlightInfoRequest::new(info.clone()).encode_to_vec();
    let mut request = Request::new(Action { r#type: CANCEL.to_owned(), body: body.into() });
    if let Some(bearer) = headers.get("authorization") {
        request.metadata_mut().insert("authorization", bearer.clone());
    }
    request.metadata_mut().insert(FORWARDED_HEADER, MetadataValue::from_static("1"));
    let answer = FlightServiceClient::new(channel).do_action(request).await?;
    let results: Vec<_> = answer.into_inner().try_collect().await?;
    let statuses = results.iter().filter_map(|result| CancelFlightInfoResult::decode(&*result.body).ok());
    Ok(statuses.map(|result| result.status).any(|status| status != CancelStatus::NotCancellable as i32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[tokio::test]
    async fn what_runs_is_cancelled_and_nothing_else() {
        let running = Running::default();
        let (id, other) = (Uuid::new_v4(), Uuid::new_v4());
        assert!(!running.cancel(id));
        let (run, again) = (running.begin(id), running.begin(id));
        let untouched = running.begin(other);
        let endless = run.rows(futures::stream::repeat_with(|| Ok(1)).take(3).chain(futures::stream::pending()));
        let mut endless = Box::pin(endless);
        assert_eq!(endless.next().await, Some(Ok(1)));
        assert!(running.cancel(id));
        let rest: Vec<Result<i32>> = endless.collect().await;
        assert_eq!(rest.last().unwrap().as_ref().unwrap_err().kind, Kind::Cancelled);
        assert!(running.cancel(id), "the other one is still there");
        let ended = again.unless_cancelled(std::future::pending::<Result<()>>(), change_cancelled).await;
        assert_eq!(ended.unwrap_err().kind, Kind::Unknown);
        drop(again);
        assert!(!running.cancel(id));
        let rows: Vec<Result<i32>> = untouched.rows(futures::stream::iter([Ok(1), Ok(2)])).collect().await;
        assert_eq!(rows, [Ok(1), Ok(2)]);
        assert!(!running.cancel(other));
    }
}
