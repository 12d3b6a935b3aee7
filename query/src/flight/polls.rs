//! Queries that are polled (PollFlightInfo): run by the node, whether their client stays or not, until their rows are fetched.
//!
//! It is so for every PollFlightInfo of a query, without a header that asks for it: Flight's specification says that the call starts the
//! query, and who wants a query to run as its rows are taken has GetFlightInfo, which stays as it is. What is no query, or belongs to a
//! transaction, is answered at once as GetFlightInfo answers it: polling changes nothing.
//!
//! ```text
//! PollFlightInfo(command) -> planned, registered -> running --- ended within `FIRST_WAIT` or later ---> kept | failed
//! PollFlightInfo(name)    -> waits up to `LATER_WAIT` for the end; each poll begins `KEPT_FOR` anew, and so does each batch fetched
//! running                 -> info without an endpoint, the name to poll by, how far it has come if known, when it expires
//! kept                    -> info with the name as ticket; DoGet reads the spool ([`super::spool`])
//! failed                  -> the error, as the status of each poll; cancelled, and fetched to the end, are such errors, too
//! not polled for `KEPT_FOR`, or making room for another -> unknown
//! ```
//! The name ([`super::ticket::Polled`]) is signed and says the node; another node sends polls, DoGet and CancelFlightInfo on to it, once. It
//! is the descriptor to poll by, the descriptor within the info, by which CancelFlightInfo knows a query that runs, and the ticket of what
//! was kept.
//!
//! The deadline is that of `lake-timeout-ms`, else the configuration's: `grpc-timeout` is that of a call, which returns before it.
//!
//! Bounds: [`MAX_POLLED`] queries, of which those that hold nothing any more make room, the longest unpolled first; half of
//! `spill_limit_bytes`; [`KEPT_FOR`]; admission, for what runs; who fetches and takes nothing for [`KEPT_FOR`] loses the rows with an
//! error, and never sees an end too early.
//!
//! Each query has one task, which owns it until it is forgotten, and each DoGet of its rows another; [`Polls`] stops and awaits them.
//!
//! Failures:
//! - the node stops: what runs fails with `Unavailable`, run it elsewhere; what is kept can be fetched while the node lets clients read on;
//! - the node is dead: `Unavailable`, naming it, and the rows are lost;
//! - the node was started anew, or the query was forgotten: `NotFound`, with what may have become of it;
//! - the answer to the first poll is lost, or a client stays away: the query runs, and its rows are kept, for [`KEPT_FOR`] at most.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow_flight::{FlightEndpoint, FlightInfo, PollInfo, Ticket};
use datafusion::execution::DiskManager;
use futures::{FutureExt, StreamExt, TryStreamExt};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::running::cancelled;
use super::spool::{Spool, Spools};
use crate::error::{Error, Result, words_of_panic};
use crate::outcomes::now_ms;
use crate::progress::Scans;
use crate::sql::session::Rows;

/// How long a query is known that is neither polled nor fetched.
pub const KEPT_FOR: Duration = Duration::from_secs(5 * 60);
/// How long the first poll waits for the end: a short query is answered by one.
pub const FIRST_WAIT: Duration = Duration::from_millis(200);
/// How long others do.
pub const LATER_WAIT: Duration = Duration::from_secs(5);
/// Most queries known at a time.
pub const MAX_POLLED: usize = 1000;
/// Batches that are read before a client takes them.
const BATCHES_AHEAD: usize = 1;

/// The polled queries of a node.
#[derive(Debug)]
pub struct Polls {
    known: Mutex<HashMap<Uuid, Arc<Query>>>,
    spools: Spools,
    tasks: TaskTracker,
    /// No query runs any more.
    stopped: CancellationToken,
    /// Nor are rows fetched.
    abandoned: CancellationToken,
}

/// How a query has ended, once it has.
type Outcome = Option<Result<Arc<Spool>>>;

/// A query that is polled.
#[derive(Debug)]
struct Query {
    /// What is told of it. It has no endpoint; its descriptor is the name.
    info: FlightInfo,
    scans: Arc<Scans>,
    outcome: watch::Sender<Outcome>,
    /// When it is forgotten.
    expires: Mutex<Instant>,
    cancelled: CancellationToken,
    /// It has made room for another.
    forgotten: CancellationToken,
}

/// Rows that were kept, on their way out.
pub struct Fetched {
    /// Of the rows.
    pub schema: SchemaRef,
    /// How old the oldest pointer was that was used because the metadata cluster was away.
    pub stale: Option<Duration>,
    /// All of them, or an error at the end.
    pub rows: Rows,
}

impl Polls {
    /// None yet. Their rows are kept where spill files are.
    pub fn new(disk: Arc<DiskManager>) -> Self {
        Self {
            known: Mutex::default(),
            spools: Spools::new(disk),
            tasks: TaskTracker::new(),
            stopped: CancellationToken::new(),
            abandoned: CancellationToken::new(),
        }
    }

    /// Where the rows of queries are kept.
    pub fn spools(&self) -> &Spools {
        &self.spools
    }

    /// Begins a query, which is known by `id` from now on. `info` tells of it, with its name as the descriptor, and `scans` how far it has
    /// come.
    ///
    /// # Errors
    /// `Exhausted`: too many are known that run or hold rows; `Unavailable`: the node stops. Then it is not begun.
    pub fn begin(
        self: &Arc<Self>,
        id: Uuid,
        info: FlightInfo,
        scans: Arc<Scans>,
        query: impl Future<Output = Result<Spool>> + Send + 'static,
    ) -> Result<()> {
        let known = Arc::new(Query {
            info,
            scans,
            outcome: watch::Sender::new(None),
            expires: Mutex::new(Instant::now() + KEPT_FOR),
            cancelled: CancellationToken::new(),
            forgotten: CancellationToken::new(),
        });
        {
            let mut all = self.lock();
            if self.stopped.is_cancelled() {
                return Err(stopping());
            }
            make_room(&mut all)?;
            all.insert(id, known.clone());
        }
        let (polls, query) = (self.clone(), Box::pin(query));
        self.tasks.spawn(async move {
            known.run(query, &polls.stopped).await;
            tokio::select! {
                // What is kept may be fetched for as long as the node is there.
                () = polls.stopped.cancelled() => return,
                () = known.forgotten.cancelled() => {}
                () = known.expired() => {}
            }
            polls.lock().remove(&id);
        });
        Ok(())
    }

    /// What there is to tell of a query, at its end or after that time.
    ///
    /// # Errors
    /// `NotFound`: it is not known, or not any more. The query's own.
    pub async fn poll(&self, id: Uuid, wait: Duration) -> Result<PollInfo> {
        let query = self.get(id)?;
        query.stays();
        let ended = tokio::time::timeout(wait, query.ended()).await.ok();
        query.stays();
        query.told(ended)
    }

    /// The rows of a query that has ended. They are given up once they were taken to the end.
    ///
    /// # Errors
    /// `NotFound`: it is not known, or not any more; `Invalid`: it still runs. The query's own. In the rows: the disk's, and that they
    /// were not taken for too long.
    pub fn fetch(&self, id: Uuid) -> Result<Fetched> {
        let query = self.get(id)?;
        let outcome = query.outcome.borrow().clone();
        let spool =
            outcome.unwrap_or_else(|| Err(Error::invalid("the query still runs: poll it until it has ended")))?;
        query.stays();
        let (schema, stale) = (spool.schema.clone(), spool.stale);
        let (sender, rows) = mpsc::channel(BATCHES_AHEAD);
        let ended = Arc::new(OnceLock::new());
        let (reading, abandoned, end) = (query.clone(), self.abandoned.clone(), ended.clone());
        self.tasks.spawn(async move {
            let sent = tokio::select! {
                biased;
                () = sender.closed() => return,
                () = abandoned.cancelled() => Err(stopping()),
                () = reading.cancelled.cancelled() => Err(cancelled()),
                sent = reading.send(spool, &sender) => sent,
            };
            // The first is the only one. It is there before the channel ends.
            let _ = end.set(sent);
        });
        let last = async move {
            match ended.get() {
                Some(Ok(())) => {
                    query.fetched();
                    None
                }
                Some(Err(error)) => Some(Err::<RecordBatch, Error>(error.clone())),
                None => Some(Err(Error::internal("reading the rows of a polled query ended too early"))),
            }
        };
        let last = futures::stream::once(last).filter_map(std::future::ready);
        let rows = ReceiverStream::new(rows).map(Ok).chain(last).boxed();
        Ok(Fetched { schema, stale, rows })
    }

    /// Ends a query that runs, or gives up its rows; whether there was anything.
    pub fn cancel(&self, id: Uuid) -> bool {
        let Ok(query) = self.get(id) else { return false };
        let holds = query.holds_something();
        if holds {
            query.cancelled.cancel();
            query.outcome.send_replace(Some(Err(cancelled())));
        }
        holds
    }

    /// Ends what runs; none begins any more. What was kept can still be fetched.
    pub fn stop(&self) {
        // No query comes in between.
        let _all = self.lock();
        self.stopped.cancel();
    }

    /// Ends what is being fetched as well.
    pub fn abandon(&self) {
        self.stop();
        self.abandoned.cancel();
    }

    /// The same, and waits until there is nothing left.
    pub async fn close(&self) {
        self.abandon();
        self.tasks.close();
        self.tasks.wait().await;
        self.lock().clear();
    }

    fn get(&self, id: Uuid) -> Result<Arc<Query>> {
        self.lock().get(&id).cloned().ok_or_else(|| {
            Error::not_found(format!(
                "this node knows no such polled query: nobody polled or fetched it for {} minutes, it made room for others after it had \
                 failed or was fetched, or the node was started anew; run it again",
                KEPT_FOR.as_secs() / 60
            ))
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Query>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets the one that was not asked for for longest of those that hold nothing, if there are too many.
fn make_room(known: &mut HashMap<Uuid, Arc<Query>>) -> Result<()> {
    if known.len() < MAX_POLLED {
        return Ok(());
    }
    let over = known.iter().filter(|(_, query)| !query.holds_something());
    let Some(id) = over.min_by_key(|(_, query)| query.expires()).map(|(id, _)| *id) else {
        return Err(Error::exhausted(format!(
            "{MAX_POLLED} polled queries run on this node or wait to be fetched, which is all that may; fetch or cancel them, or run this \
             one by GetFlightInfo; nothing was done"
        )));
    };
    if let Some(query) = known.remove(&id) {
        query.forgotten.cancel();
    }
    Ok(())
}

impl Query {
    /// Runs it to its end, unless it is not wanted any more.
    async fn run(&self, query: impl Future<Output = Result<Spool>>, stopped: &CancellationToken) {
        let query = AssertUnwindSafe(query).catch_unwind();
        let outcome = tokio::select! {
            biased;
            () = stopped.cancelled() => Err(stopping()),
            () = self.cancelled.cancelled() => Err(cancelled()),
            () = self.expired() => Err(unwanted()),
            outcome = query => outcome.unwrap_or_else(|panic| {
                let words = words_of_panic(panic.as_ref());
                Err(Error::internal(format!("running a polled query failed inside lake: {words}; please report this")))
            }),
        };
        self.outcome.send_if_modified(|known| {
            // Who has cancelled it has said so.
            let is_first = known.is_none();
            if is_first {
                *known = Some(outcome.map(Arc::new));
            }
            is_first
        });
    }

    /// How it has ended, once it has.
    async fn ended(&self) -> Result<Arc<Spool>> {
        let mut outcome = self.outcome.subscribe();
        let known = outcome.wait_for(Option::is_some).await;
        let known = known.ok().and_then(|known| known.clone());
        known.unwrap_or_else(|| Err(Error::internal("a polled query ended unexpectedly")))
    }

    /// Returns when nobody has asked for it for too long.
    async fn expired(&self) {
        loop {
            let expires = self.expires();
            if expires <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(expires).await;
        }
    }

    fn expires(&self) -> Instant {
        *self.expires.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody has asked for it.
    fn stays(&self) {
        *self.expires.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + KEPT_FOR;
    }

    /// Whether it runs, or has rows.
    fn holds_something(&self) -> bool {
        !matches!(*self.outcome.borrow(), Some(Err(_)))
    }

    /// Its rows were taken to the end.
    fn fetched(&self) {
        let fetched =
            Error::not_found("the rows of this polled query were fetched to the end, and are not kept; run it again");
        self.outcome.send_replace(Some(Err(fetched)));
    }

    fn told(&self, ended: Option<Result<Arc<Spool>>>) -> Result<PollInfo> {
        let (mut info, name) = (self.info.clone(), self.info.flight_descriptor.clone());
        let mut told = match ended.transpose()? {
            None => PollInfo { flight_descriptor: name, progress: self.scans.share(), ..PollInfo::default() },
            Some(spool) => {
                let ticket = Ticket { ticket: name.unwrap_or_default().cmd };
                info = info
                    .with_endpoint(FlightEndpoint::new().with_ticket(ticket))
                    .with_total_records(i64::try_from(spool.rows).unwrap_or(i64::MAX));
                PollInfo { progress: Some(1.0), ..PollInfo::default() }
            }
        };
        told.info = Some(info);
        let expires = told.expiration_time.get_or_insert_default();
        expires.seconds = i64::try_from(now_ms() / 1000 + KEPT_FOR.as_secs()).unwrap_or(i64::MAX);
        Ok(told)
    }

    /// Sends its rows, as fast as they are taken.
    async fn send(&self, spool: Arc<Spool>, to: &mpsc::Sender<RecordBatch>) -> Result<()> {
        let mut rows = pin!(spool.read());
        while let Some(batch) = rows.try_next().await? {
            match tokio::time::timeout(KEPT_FOR, to.send(batch)).await {
                Ok(sent) => sent.map_err(|_| Error::cancelled("the client went away"))?,
                Err(_) => {
                    return Err(Error::deadline(format!(
                        "the rows of the polled query were not taken for {} minutes; these are not all: fetch them anew, or run the \
                         query again",
                        KEPT_FOR.as_secs() / 60
                    )));
                }
            }
            self.stays();
        }
        Ok(())
    }
}

fn stopping() -> Error {
    Error::unavailable("the query node stops, and polled queries with it; run the query on another node")
}

fn unwanted() -> Error {
    Error::cancelled(format!("nobody polled the query for {} minutes, so it was stopped", KEPT_FOR.as_secs() / 60))
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};
    use arrow_flight::FlightDescriptor;
    use datafusion::execution::disk_manager::DiskManagerBuilder;

    use super::*;
    use crate::error::Kind;

    fn polls() -> Arc<Polls> {
        Arc::new(Polls::new(Arc::new(DiskManagerBuilder::default().build().unwrap())))
    }

    fn batch() -> RecordBatch {
        let column: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
        RecordBatch::try_from_iter([("x", column)]).unwrap()
    }

    /// Begins a query by a new id.
    fn begin(polls: &Arc<Polls>, query: impl Future<Output = Result<Spool>> + Send + 'static) -> Result<Uuid> {
        let id = Uuid::new_v4();
        let info = FlightInfo::new().with_descriptor(FlightDescriptor::new_cmd("name"));
        polls.begin(id, info, Arc::default(), query).map(|()| id)
    }

    /// A query of that many batches.
    fn of(polls: &Arc<Polls>, batches: usize) -> impl Future<Output = Result<Spool>> + Send + use<> {
        let polls = polls.clone();
        let rows = futures::stream::iter(vec![Ok(batch()); batches]);
        async move { polls.spools().keep(batch().schema(), None, rows).await }
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_asks_for_is_forgotten() {
        let polls = polls();
        let (guard, dropped) = tokio::sync::oneshot::channel::<()>();
        let running = begin(&polls, async move {
            let _guard = guard;
            std::future::pending().await
        });
        let (running, kept) = (running.unwrap(), begin(&polls, of(&polls, 1)).unwrap());
        let poll = polls.poll(kept, LATER_WAIT).await.unwrap();
        assert!(poll.flight_descriptor.is_none() && polls.spools().bytes() > 0);
        // Each poll begins the time anew.
        for _ in 0..3 {
            tokio::time::sleep(KEPT_FOR - LATER_WAIT - Duration::from_secs(1)).await;
            let poll = polls.poll(running, LATER_WAIT).await.unwrap();
            assert!(poll.flight_descriptor.is_some() && poll.info.unwrap().endpoint.is_empty());
        }
        assert_eq!(polls.poll(kept, LATER_WAIT).await.unwrap_err().kind, Kind::NotFound);
        assert_eq!(polls.spools().bytes(), 0, "its rows are given up");
        dropped.await.unwrap_err();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(polls.poll(running, LATER_WAIT).await.unwrap_err().kind, Kind::NotFound);
        polls.close().await;
    }

    #[tokio::test(start_paused = true)]
    async fn rows_that_are_not_taken_end_with_an_error_and_can_be_fetched_anew() {
        let polls = polls();
        let id = begin(&polls, of(&polls, 5)).unwrap();
        polls.poll(id, LATER_WAIT).await.unwrap();
        let mut rows = polls.fetch(id).unwrap().rows;
        rows.next().await.unwrap().unwrap();
        // The client goes on polling.
        for _ in 0..3 {
            tokio::time::sleep(KEPT_FOR / 2 + Duration::from_secs(1)).await;
            polls.poll(id, LATER_WAIT).await.unwrap();
        }
        let rest: Vec<Result<RecordBatch>> = rows.collect().await;
        assert!(rest.len() < 5, "{}", rest.len());
        assert_eq!(rest.last().unwrap().as_ref().unwrap_err().kind, Kind::Deadline);
        let rows: Vec<RecordBatch> = polls.fetch(id).unwrap().rows.try_collect().await.unwrap();
        assert_eq!(rows, vec![batch(); 5]);
        let error = polls.fetch(id).err().unwrap();
        assert!(error.kind == Kind::NotFound && error.message.contains("fetched to the end"), "{error}");
        polls.close().await;
        assert_eq!(polls.spools().bytes(), 0);
    }

    #[tokio::test]
    async fn there_are_only_so_many_and_what_holds_nothing_makes_room() {
        let polls = polls();
        let forever = || std::future::pending::<Result<Spool>>();
        let ids: Vec<Uuid> = (0..MAX_POLLED).map(|_| begin(&polls, forever()).unwrap()).collect();
        assert_eq!(begin(&polls, forever()).unwrap_err().kind, Kind::Exhausted);
        assert!(polls.cancel(ids[7]));
        assert!(!polls.cancel(ids[7]), "there is nothing left of it");
        let error = polls.poll(ids[7], LATER_WAIT).await.unwrap_err();
        assert_eq!(error.kind, Kind::Cancelled, "{error}");
        begin(&polls, forever()).unwrap();
        assert_eq!(polls.poll(ids[7], LATER_WAIT).await.unwrap_err().kind, Kind::NotFound);
        assert_eq!(begin(&polls, forever()).unwrap_err().kind, Kind::Exhausted);
        polls.close().await;
    }

    #[tokio::test]
    async fn a_node_that_stops_ends_what_runs_and_lets_what_is_kept_be_fetched() {
        let polls = polls();
        let (running, kept) = (begin(&polls, std::future::pending()).unwrap(), begin(&polls, of(&polls, 2)).unwrap());
        while polls.poll(kept, LATER_WAIT).await.unwrap().flight_descriptor.is_some() {}
        polls.stop();
        let error = polls.poll(running, LATER_WAIT).await.unwrap_err();
        assert!(error.kind == Kind::Unavailable && error.message.contains("another node"), "{error}");
        assert_eq!(begin(&polls, std::future::pending()).unwrap_err().kind, Kind::Unavailable);
        let rows: Vec<RecordBatch> = polls.fetch(kept).unwrap().rows.try_collect().await.unwrap();
        assert_eq!(rows, vec![batch(); 2]);
        polls.close().await;
        assert_eq!(polls.spools().bytes(), 0);
    }

    #[tokio::test]
    async fn a_query_that_panics_has_failed() {
        let polls = polls();
        let id = begin(&polls, async { panic!("a defect") }).unwrap();
        let error = polls.poll(id, LATER_WAIT).await.unwrap_err();
        assert!(error.kind == Kind::Internal && error.message.contains("a defect"), "{error}");
        polls.close().await;
    }
}
