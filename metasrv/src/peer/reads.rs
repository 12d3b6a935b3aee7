//! Read-index rounds, shared by all readers that wait (semantics, section 3).
//!
//! One task runs one round at a time. A round takes every reader that is waiting when it begins, confirms the leadership
//! against a quorum (here, or by asking the leader), and gives each the log index that it has to see applied. Readers that
//! come meanwhile wait for the next round, so that a round always begins after the reads it serves.
//!
//! Limits: [`MAX_WAITING`] readers, one round of [`ROUND_TIMEOUT`] at most.
//! Failure cases: no leader, no quorum, too many readers: the readers of that round are told.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use openraft::ReadPolicy;
use openraft::errors::{LinearizableReadError, RaftError};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::counters::Counter;
use super::failure::Failure;
use super::shares::{Caller, Held, Pool, Refused, Resource};
use super::view::View;
use crate::log::lock;
use crate::raft::network::{Network, Transport};
use crate::raft::types::LogId;
use crate::raft::wire::log_id_from_wire;

/// Readers that wait, of which each caller has its part ([`super::shares`]).
pub const MAX_WAITING: usize = 8192;
/// How long one round may take.
const ROUND_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait before looking for the leader again.
pub const RETRY: Duration = Duration::from_millis(20);

/// What a reader has to see applied, and when its round began.
#[derive(Debug, Clone, Copy)]
pub struct ReadPoint {
    pub index: u64,
    /// The term of the leader that was confirmed: that of the entry at `index`.
    pub term: u64,
    pub began: Instant,
}

type Answer = oneshot::Sender<Result<ReadPoint, Failure>>;

/// The readers' side.
#[derive(Debug)]
pub struct ReadIndex {
    waiting: mpsc::Sender<Answer>,
    readers: Pool,
    /// Rounds that confirmed the leadership: many readers may share one.
    rounds: Arc<Counter>,
    /// When the newest round began that this peer also applied.
    confirmed: Mutex<Option<Instant>>,
}

impl ReadIndex {
    /// The readers' side, and the task that runs the rounds until it is cancelled.
    pub fn new(view: View, network: Network, stop: CancellationToken) -> (Arc<Self>, impl Future<Output = ()>) {
        let (waiting, readers) = mpsc::channel(MAX_WAITING);
        let pool = Pool::new(Resource::Reads, MAX_WAITING);
        let confirmed_rounds = Arc::new(Counter::default());
        let this = Self { waiting, readers: pool, rounds: confirmed_rounds.clone(), confirmed: Mutex::new(None) };
        (Arc::new(this), async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = rounds(view, network, readers, &confirmed_rounds) => {}
            }
        })
    }

    /// How many rounds confirmed the leadership so far.
    pub fn rounds(&self) -> u64 {
        self.rounds.get()
    }

    /// Waits for a round that begins after this call.
    ///
    /// # Errors
    /// Unavailable without a leader or a quorum, Overloaded with too many readers.
    pub async fn next_round(&self, caller: &Caller) -> Result<ReadPoint, Failure> {
        let held = self.wait(caller)?;
        self.round_for(&held).await
    }

    /// A place among the readers that wait for anything: to be confirmed, or for a revision to come. Held for as long.
    ///
    /// # Errors
    /// Overloaded.
    pub fn wait(&self, caller: &Caller) -> Result<Held, Failure> {
        self.readers.take(caller, 1).map_err(overloaded)
    }

    /// As [`ReadIndex::next_round`], for one that has its place.
    ///
    /// # Errors
    /// As there.
    pub async fn round_for(&self, _place: &Held) -> Result<ReadPoint, Failure> {
        let (answer, point) = oneshot::channel();
        self.waiting.try_send(answer).map_err(|e| match e {
            // Readers that gave up are still in line.
            mpsc::error::TrySendError::Full(_) => overloaded(Refused::Full),
            mpsc::error::TrySendError::Closed(_) => Failure::unavailable("the peer is stopping"),
        })?;
        point.await.map_err(|_| Failure::unavailable("the peer is stopping"))?
    }

    /// A reader has seen its point applied.
    pub fn confirm(&self, point: ReadPoint) {
        let mut confirmed = lock(&self.confirmed);
        *confirmed = (*confirmed).max(Some(point.began));
    }

    /// How long ago the newest round began that this peer completed and applied.
    pub fn staleness(&self) -> Option<Duration> {
        lock(&self.confirmed).map(clock::since)
    }
}

fn overloaded(refused: Refused) -> Failure {
    let what = format!(
        "{refused} has as many reads waiting as it may have, of {MAX_WAITING}; wait for some of them, then ask again"
    );
    Failure::new(Kind::Overloaded, what)
}

async fn rounds(view: View, network: Network, mut readers: mpsc::Receiver<Answer>, confirmed: &Counter) {
    let mut waiting = Vec::new();
    while readers.recv_many(&mut waiting, MAX_WAITING).await > 0 {
        waiting.retain(|answer| !answer.is_closed());
        if waiting.is_empty() {
            continue;
        }
        let began = clock::now();
        let result = match tokio::time::timeout(ROUND_TIMEOUT, round(&view, &network)).await {
            Ok(result) => {
                confirmed.add(u64::from(result.is_ok()));
                result.map(|id| ReadPoint { index: id.index, term: id.leader_id.term, began })
            }
            Err(_) => Err(Failure {
                leader: view.leader(),
                term: view.term(),
                ..Failure::unavailable(format!(
                    "peer {} could not confirm a read against a quorum within {} s",
                    view.id(),
                    ROUND_TIMEOUT.as_secs()
                ))
            }),
        };
        for answer in waiting.drain(..) {
            // A reader that gave up is gone.
            let _ = answer.send(result.clone());
        }
    }
}

/// Confirms the leadership, wherever it is now. Looks again while it moves; the caller limits the time.
async fn round(view: &View, network: &Network) -> Result<LogId, Failure> {
    loop {
        match view.leader_id() {
            Some(id) if id == view.id() => match local(view).await {
                Ok(id) => return Ok(id),
                Err(Retry::No(failure)) => return Err(failure),
                Err(Retry::Yes(why)) => tracing::debug!("confirming reads as the leader: {why}"),
            },
            Some(id) => match view.member(id) {
                Some(member) => match remote(&network.transport, network, id, &member).await {
                    Ok(id) => return Ok(id),
                    Err(why) => tracing::debug!(leader = id, "asking the leader to confirm reads: {why}"),
                },
                None => tracing::debug!(leader = id, "the leader is not in the membership known here"),
            },
            None => {}
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Whether another look at who leads may help.
pub enum Retry {
    Yes(String),
    No(Failure),
}

/// The read index, if this peer leads and a quorum confirms it. The entry is one of the leader's own term.
pub async fn local(view: &View) -> Result<LogId, Retry> {
    match view.raft().get_read_linearizer(ReadPolicy::ReadIndex).await {
        Ok(linearizer) => Ok(*linearizer.read_log_id().log_id()),
        Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(forward))) => {
            Err(Retry::Yes(format!("peer {} leads now", forward.leader_id.map_or("?".into(), |id| id.to_string()))))
        }
        Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(e))) => Err(Retry::Yes(e.to_string())),
        Err(RaftError::Fatal(e)) => {
            Err(Retry::No(Failure::unavailable(format!("peer {}: the consensus core ended: {e}", view.id()))))
        }
    }
}

async fn remote(transport: &Transport, network: &Network, id: u64, member: &v1::Member) -> Result<LogId, String> {
    let to = crate::raft::types::Member::from(member.clone());
    let mut client = transport.client(id, &member.raft_address).map_err(|e| e.to_string())?;
    let request = v1::ReadIndexRequest { header: Some(network.sender.header(id, &to)) };
    let response = client.read_index(request).await.map_err(|status| status.message().to_owned())?.into_inner();
    response.read_log_id.map(log_id_from_wire).ok_or_else(|| "it gave no index".to_owned())
}
