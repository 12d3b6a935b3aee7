//! The `Raft` service: what the other peers call.
//!
//! Each call's header is checked before anything else (semantics, section 9): the cluster, this peer's id and
//! incarnation, and the sender's incarnation where the membership knows the sender under another one. A sender that the
//! membership does not know passes, since it may be newer than this peer's membership, unless the state machine knows it as
//! removed.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use futures::StreamExt;
use futures::stream::BoxStream;
use lake_proto::kv::Invalid;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::raft_server::Raft;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, StreamAppendError, StreamAppendResult, TransferLeaderRequest,
    VoteRequest, VoteResponse,
};
use openraft::storage::Snapshot;
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::deadline;
use crate::blocking::blocking;
use crate::peer::Peer;
use crate::peer::disk::Disk;
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::reads::{self, Retry};
use crate::raft::types::TypeConfig;
use crate::raft::wire::{
    append_request_from_wire, log_id_from_wire, log_id_to_wire, required_vote, snapshot_meta_from_wire, unknown_entry,
    vote_to_wire,
};
use crate::snapshot::{self, SnapshotData, SnapshotError};

/// From one look at the room on the disk to the next while a snapshot is received.
const LOOK_EVERY_BYTES: u64 = 16 << 20;
/// Snapshots received at once: one, and one from a new leader while the old one's stream has not broken yet.
const MAX_RECEIVING: usize = 2;

/// Answers for one peer.
#[derive(Clone)]
pub struct RaftService {
    peer: Arc<Peer>,
    stop: CancellationToken,
    receiving: Arc<Semaphore>,
}

impl RaftService {
    /// Of this peer; its streams end with `stop`.
    pub fn new(peer: Arc<Peer>, stop: CancellationToken) -> Self {
        Self { peer, stop, receiving: Arc::new(Semaphore::new(MAX_RECEIVING)) }
    }

    /// The member that a call is meant for, if it is meant for this one.
    fn addressed(&self, header: Option<v1::RaftHeader>) -> Result<Arc<Member>, Failure> {
        let header = header.ok_or_else(|| Failure::invalid(Invalid::Missing("header")))?;
        let member = self.peer.serving()?;
        let identity = &self.peer.identity;
        let wrong = |what: String| {
            Failure::new(
                Kind::WrongIdentity,
                format!("peer {} refuses a call from peer {}: {what}", identity.id, header.from_id),
            )
        };
        if header.cluster_id != member.cluster_id {
            return Err(wrong(format!(
                "it is for cluster {:?}, and this peer belongs to {:?}",
                header.cluster_id, member.cluster_id
            )));
        }
        if header.to_id != identity.id || header.to_incarnation != identity.incarnation {
            return Err(wrong(format!(
                "it is for peer {} with incarnation {:?}, and this is peer {} with incarnation {:?}",
                header.to_id, header.to_incarnation, identity.id, identity.incarnation
            )));
        }
        if let Some(known) = member.view.member(header.from_id)
            && known.incarnation != header.from_incarnation
        {
            return Err(wrong(format!(
                "the membership knows the caller with incarnation {:?}, not {:?}: it has lost its data directory",
                known.incarnation, header.from_incarnation
            )));
        }
        if member.published.current().state.known_peer(header.from_id).is_some_and(|known| known.removed) {
            return Err(wrong("it was removed from the cluster".to_owned()));
        }
        Ok(member)
    }

    fn stopped(&self, error: impl std::fmt::Display) -> Failure {
        stopped(&self.peer, error)
    }
}

fn sender(header: &Option<v1::RaftHeader>) -> u64 {
    header.as_ref().map_or(0, |header| header.from_id)
}

fn stopped(peer: &Peer, error: impl std::fmt::Display) -> Failure {
    Failure::unavailable(format!("peer {}: the consensus core ended: {error}", peer.identity.id))
}

/// An append of the leader's. A command that this build does not know ends the peer: it must not be skipped (semantics,
/// section 1), and no later attempt would fare better.
fn append_from_wire(peer: &Peer, request: v1::AppendRequest) -> Result<AppendEntriesRequest<TypeConfig>, Failure> {
    append_request_from_wire(request).map_err(|e| match unknown_entry(&e) {
        Some(what) => {
            peer.fail(&what);
            Failure::unavailable(format!("peer {}: {what}", peer.identity.id))
        }
        None => Failure::invalid(e),
    })
}

/// The answer to one append of a stream.
fn append_answer(result: StreamAppendResult<TypeConfig>) -> v1::AppendResponse {
    use v1::append_response::Result as Wire;
    let result = match result {
        Ok(Some(matched)) => Wire::PartialSuccess(log_id_to_wire(matched)),
        Ok(None) => Wire::Success(true),
        Err(StreamAppendError::Conflict(_)) => Wire::Conflict(true),
        Err(StreamAppendError::HigherVote(vote)) => Wire::HigherVote(vote_to_wire(&vote)),
    };
    v1::AppendResponse { result: Some(result) }
}

fn vote_request(request: v1::VoteRequest) -> Result<VoteRequest<TypeConfig>, Failure> {
    Ok(VoteRequest {
        vote: required_vote(request.vote).map_err(Failure::invalid)?,
        last_log_id: request.last_log_id.map(log_id_from_wire),
        leadership_transfer: request.leadership_transfer,
    })
}

fn vote_response(response: VoteResponse<TypeConfig>) -> v1::VoteResponse {
    v1::VoteResponse {
        vote: Some(vote_to_wire(&response.vote)),
        granted: response.vote_granted,
        last_log_id: response.last_log_id.map(log_id_to_wire),
    }
}

#[tonic::async_trait]
impl Raft for RaftService {
    async fn append(&self, request: Request<v1::AppendRequest>) -> Result<Response<v1::AppendResponse>, Status> {
        let mut request = request.into_inner();
        let from = sender(&request.header);
        let member = self.addressed(request.header.take())?;
        let rpc = append_from_wire(&self.peer, request)?;
        use v1::append_response::Result as Wire;
        let answer = member.raft().append_entries(rpc).await.map_err(|e| self.stopped(e))?;
        if !matches!(answer, AppendEntriesResponse::HigherVote(_)) {
            member.view.heard_from(from);
        }
        let result = match answer {
            AppendEntriesResponse::Success => Wire::Success(true),
            AppendEntriesResponse::PartialSuccess(Some(id)) => Wire::PartialSuccess(log_id_to_wire(id)),
            // Nothing at all was accepted, which the caller answers by looking for the last matching entry.
            AppendEntriesResponse::PartialSuccess(None) | AppendEntriesResponse::Conflict => Wire::Conflict(true),
            AppendEntriesResponse::HigherVote(vote) => Wire::HigherVote(vote_to_wire(&vote)),
        };
        Ok(Response::new(v1::AppendResponse { result: Some(result) }))
    }

    type AppendStreamStream = BoxStream<'static, Result<v1::AppendResponse, Status>>;

    async fn append_stream(
        &self,
        request: Request<Streaming<v1::AppendRequest>>,
    ) -> Result<Response<Self::AppendStreamStream>, Status> {
        let mut requests = request.into_inner();
        let mut first = requests.message().await?.ok_or_else(|| Failure::invalid("a stream of appends without any"))?;
        let header = first.header.take();
        let from = sender(&header);
        let member = self.addressed(header.clone())?;
        // However the stream ends: also if nobody polls it any more, its connection being gone.
        let tie = member.succession.tie(from);
        let rest = futures::stream::unfold((requests, tie), move |(mut requests, tie)| async move {
            match requests.message().await {
                Ok(request) => Some((request?, (requests, tie))),
                Err(status) => {
                    tracing::debug!("a stream of appends broke: {}", status.message());
                    None
                }
            }
        });
        let service = self.clone();
        let appends = futures::stream::iter([first]).chain(rest).scan((), move |(), append| {
            // The sender may have been removed since the stream began.
            let checked = service.addressed(header.clone()).and_then(|_| append_from_wire(&service.peer, append));
            let checked =
                checked.inspect_err(|failure| tracing::warn!("a stream of appends is ended: {}", failure.message));
            futures::future::ready(checked.ok())
        });
        let appends = appends.take_until(self.stop.clone().cancelled_owned());
        let results = member.raft().stream_append(appends).take_until(self.stop.clone().cancelled_owned());
        let peer = self.peer.clone();
        let answers = results.map(move |result| match result {
            Ok(result) => {
                if !matches!(result, Err(StreamAppendError::HigherVote(_))) {
                    member.view.heard_from(from);
                }
                Ok(append_answer(result))
            }
            Err(e) => Err(stopped(&peer, e).into()),
        });
        Ok(Response::new(answers.boxed()))
    }

    async fn vote(&self, request: Request<v1::VoteRequest>) -> Result<Response<v1::VoteResponse>, Status> {
        let mut request = request.into_inner();
        let member = self.addressed(request.header.take())?;
        let response = member.raft().vote(vote_request(request)?).await.map_err(|e| self.stopped(e))?;
        Ok(Response::new(vote_response(response)))
    }

    async fn pre_vote(&self, request: Request<v1::VoteRequest>) -> Result<Response<v1::VoteResponse>, Status> {
        let mut request = request.into_inner();
        let member = self.addressed(request.header.take())?;
        let response = member.raft().pre_vote(vote_request(request)?).await.map_err(|e| self.stopped(e))?;
        Ok(Response::new(vote_response(response)))
    }

    async fn snapshot(
        &self,
        request: Request<Streaming<v1::SnapshotMessage>>,
    ) -> Result<Response<v1::SnapshotResponse>, Status> {
        use v1::snapshot_message::Message;
        let mut stream = request.into_inner();
        let Some(Message::Header(header)) = stream.message().await?.and_then(|m| m.message) else {
            return Err(Failure::invalid("a snapshot begins with its header").into());
        };
        let from = sender(&header.header);
        let member = self.addressed(header.header)?;
        let vote = required_vote(header.vote).map_err(Failure::invalid)?;
        let meta = header.meta.ok_or_else(|| Failure::invalid(Invalid::Missing("snapshot's meta")))?;
        let meta = snapshot_meta_from_wire(meta).map_err(Failure::invalid)?;
        let turn = self.receiving.clone().try_acquire_owned().map_err(|_| {
            Failure::new(
                Kind::Overloaded,
                format!("{MAX_RECEIVING} snapshots are being received already; send it again"),
            )
        })?;
        let file = Received { path: member.snapshots.temporary("receiving") };
        let path = file.path.clone();
        receive(&mut stream, &path, header.size, &self.peer.disk).await.inspect_err(|failure| {
            tracing::warn!(bytes = header.size, "a snapshot is not received: {}", failure.message);
        })?;
        member.view.heard_from(from);
        let (checked, feature_level) = (path.clone(), member.feature_level);
        let check = blocking(move || Ok(snapshot::check(&checked, feature_level)));
        match check.await.map_err(|e| Failure::unavailable(format!("checking the snapshot: {e}")))? {
            Ok(()) => {}
            // As with an entry that this build does not know: it must not go on without, and no later attempt would fare
            // better.
            Err(newer @ SnapshotError::Newer { .. }) => {
                self.peer.fail(&newer.to_string());
                return Err(Failure::unavailable(format!("peer {}: {newer}", self.peer.identity.id)).into());
            }
            Err(e) => return Err(Failure::unavailable(format!("the snapshot did not arrive whole: {e}")).into()),
        }
        tracing::info!(bytes = header.size, index = meta.last_log_id.map(|id| id.index), "received a snapshot");
        let snapshot = Snapshot { meta, snapshot: SnapshotData { path: path.clone() } };
        // The core reads the file, so it must outlive a caller that goes away meanwhile.
        let (installed, answer) = oneshot::channel();
        let raft = member.raft().clone();
        member.spawn(async move {
            let response = raft.install_full_snapshot(vote, snapshot).await;
            drop((file, turn));
            // Nobody may be waiting any more.
            let _ = installed.send(response);
        });
        let response = answer.await.map_err(|_| self.stopped("the peer is stopping"))?;
        let response = response.map_err(|e| self.stopped(e))?;
        Ok(Response::new(v1::SnapshotResponse { vote: Some(vote_to_wire(&response.vote)) }))
    }

    async fn transfer_leader(
        &self,
        request: Request<v1::TransferLeaderRequest>,
    ) -> Result<Response<v1::TransferLeaderResponse>, Status> {
        let request = request.into_inner();
        let member = self.addressed(request.header)?;
        let from = required_vote(request.from_leader).map_err(Failure::invalid)?;
        let last = request.last_log_id.map(log_id_from_wire);
        let rpc = TransferLeaderRequest::new(from, request.to_node, last);
        let (accepted, reason) = match member.raft().handle_transfer_leader(rpc).await.map_err(|e| self.stopped(e))? {
            Ok(()) => (true, String::new()),
            Err(e) => (false, e.to_string()),
        };
        Ok(Response::new(v1::TransferLeaderResponse { accepted, reason }))
    }

    async fn state_hash(
        &self,
        request: Request<v1::StateHashRequest>,
    ) -> Result<Response<v1::StateHashResponse>, Status> {
        let request = request.into_inner();
        let member = self.addressed(request.header)?;
        let hash = member.published.current().notes.at(request.index);
        Ok(Response::new(v1::StateHashResponse { hash: hash.map(|hash| hash.to_be_bytes().to_vec().into()) }))
    }

    async fn snapshot_turn(
        &self,
        request: Request<v1::SnapshotTurnRequest>,
    ) -> Result<Response<v1::SnapshotTurnResponse>, Status> {
        let request = request.into_inner();
        let from = sender(&request.header);
        let member = self.addressed(request.header)?;
        let granted = member.snapshot_turns.asked(from, request.over)?;
        Ok(Response::new(v1::SnapshotTurnResponse { granted }))
    }

    async fn read_index(
        &self,
        request: Request<v1::ReadIndexRequest>,
    ) -> Result<Response<v1::ReadIndexResponse>, Status> {
        let deadline = deadline(request.metadata());
        let member = self.addressed(request.into_inner().header)?;
        let confirmed = tokio::time::timeout_at(deadline.into(), reads::local(&member.view)).await;
        let id = match confirmed {
            Ok(Ok(id)) => id,
            Ok(Err(Retry::No(failure))) => return Err(failure.into()),
            Ok(Err(Retry::Yes(why))) => {
                return Err(Failure {
                    term: member.view.term(),
                    leader: member.view.leader(),
                    ..Failure::new(Kind::NotLeader, format!("peer {}: {why}", self.peer.identity.id))
                }
                .into());
            }
            Err(_) => return Err(Failure::unavailable("no quorum confirmed the leadership in time").into()),
        };
        Ok(Response::new(v1::ReadIndexResponse { read_log_id: Some(log_id_to_wire(id)) }))
    }

    async fn readdress(
        &self,
        request: Request<v1::ReaddressRequest>,
    ) -> Result<Response<v1::ReaddressResponse>, Status> {
        let deadline = deadline(request.metadata());
        let request = request.into_inner();
        let from = request.header.as_ref().map(|header| (header.from_id, header.from_incarnation.clone()));
        let member = self.addressed(request.header)?;
        let caller = request.self_.ok_or_else(|| Failure::invalid(Invalid::Missing("self")))?;
        if from != Some((caller.id, caller.incarnation.clone())) {
            let what =
                format!("peer {}: only peer {} itself can say where it is reached", self.peer.identity.id, caller.id);
            return Err(Failure::new(Kind::WrongIdentity, what).into());
        }
        member.addresses.replace(caller, deadline).await?;
        Ok(Response::new(v1::ReaddressResponse {}))
    }

    async fn standing(&self, request: Request<v1::StandingRequest>) -> Result<Response<v1::StandingResponse>, Status> {
        use v1::standing_response::Standing;
        let header = request.into_inner().header.ok_or_else(|| Failure::invalid(Invalid::Missing("header")))?;
        let member = self.peer.serving()?;
        if header.cluster_id != member.cluster_id {
            let what = format!("this peer belongs to cluster {}, not {}", member.cluster_id, header.cluster_id);
            return Err(Failure::new(Kind::WrongIdentity, what).into());
        }
        let applied = member.published.current();
        let known = applied.state.known_peer(header.from_id);
        let standing = match known.filter(|known| *known.incarnation == *header.from_incarnation) {
            Some(known) if known.removed => Standing::Removed,
            Some(_) => Standing::Member,
            None => Standing::Unknown,
        };
        let next_peer_id = applied.state.next_peer_id();
        Ok(Response::new(v1::StandingResponse { standing: standing as i32, next_peer_id }))
    }

    async fn identity(&self, _: Request<v1::IdentityRequest>) -> Result<Response<v1::IdentityResponse>, Status> {
        Ok(Response::new(self.peer.identity_answer()))
    }

    async fn adopt(&self, request: Request<v1::AdoptRequest>) -> Result<Response<v1::AdoptResponse>, Status> {
        let request = request.into_inner();
        let identity = &self.peer.identity;
        if request.to_id != identity.id || request.to_incarnation != identity.incarnation {
            let what = format!(
                "this is peer {} with incarnation {}, not peer {} with incarnation {}",
                identity.id, identity.incarnation, request.to_id, request.to_incarnation
            );
            return Err(Failure::new(Kind::WrongIdentity, what).into());
        }
        if request.cluster_id.is_empty() || request.cluster_id.len() > 64 {
            return Err(Failure::invalid("a cluster id has 1 to 64 characters").into());
        }
        self.peer.adopt(&request.cluster_id).await?;
        Ok(Response::new(v1::AdoptResponse {}))
    }
}

/// A file that a snapshot is received into. It goes with the call, also if the connection breaks in the middle, or, once the
/// core has it, when that is done with it. What was installed has another name by then.
struct Received {
    path: PathBuf,
}

impl Drop for Received {
    fn drop(&mut self) {
        // What was renamed, or never made, is not there.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Writes what comes into a file, durably, and checks that it is as long as was said. It never takes what is kept in reserve:
/// then the log could not go on, and the peer with it.
async fn receive(
    stream: &mut Streaming<v1::SnapshotMessage>,
    path: &std::path::Path,
    size: u64,
    disk: &Disk,
) -> Result<(), Failure> {
    let full = |what: String| Failure::new(Kind::Overloaded, format!("receiving a snapshot of {size} bytes: {what}"));
    let cannot_write = |e: io::Error| match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            full(format!("disk full: {}: {e}", path.display()))
        }
        _ => Failure::unavailable(format!("receiving a snapshot into {}: {e}", path.display())),
    };
    disk.room_for(size).await.map_err(full)?;
    let mut looked_at = 0;
    let to = path.to_owned();
    let mut file = blocking(move || File::create(to)).await.map_err(cannot_write)?;
    let mut received = 0;
    loop {
        let message = stream
            .message()
            .await
            .map_err(|s| Failure::unavailable(format!("receiving a snapshot: {}", s.message())))?;
        let Some(message) = message else { break };
        let Some(v1::snapshot_message::Message::Chunk(chunk)) = message.message else {
            return Err(Failure::invalid("a snapshot has one header, then chunks"));
        };
        received += chunk.len() as u64;
        if received > size {
            break;
        }
        if received - looked_at >= LOOK_EVERY_BYTES {
            looked_at = received;
            // This chunk is not written yet.
            disk.room_for(size - received + chunk.len() as u64).await.map_err(full)?;
        }
        let writing = blocking(move || file.write_all(&chunk).map(|()| file));
        file = writing.await.map_err(cannot_write)?;
    }
    if received != size {
        return Err(Failure::unavailable(format!("{received} bytes of a snapshot of {size} bytes arrived")));
    }
    blocking(move || file.sync_all()).await.map_err(cannot_write)
}
