//! The `Cluster` service: who a peer is, who leads, founding, and changes of the membership.

use std::sync::Arc;
use std::time::Duration;

use lake_proto::kv::Invalid;
use lake_proto::v1;
use lake_proto::v1::cluster_server::Cluster;
use rand::Rng;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{call, deadline, serving};
use crate::peer::Peer;
use crate::peer::changes::MAX_LAG_ENTRIES;
use crate::peer::failure::Failure;
use crate::peer::member::Member;

/// How long who asks for the leader may have it waited for.
const MAX_LEADER_WAIT: Duration = Duration::from_secs(1);
/// How often is looked meanwhile, at most: half of it at least. A thousand that wait are not told at one moment.
const LEADER_LOOK: Duration = Duration::from_millis(20);

/// Answers for one peer.
pub struct ClusterService {
    peer: Arc<Peer>,
    stop: CancellationToken,
}

impl ClusterService {
    /// Of this peer, which stops when that says so.
    pub fn new(peer: Arc<Peer>, stop: CancellationToken) -> Self {
        Self { peer, stop }
    }

    /// Waits until another leader is known than the caller cannot reach, or its patience ends. If this peer leads, the
    /// caller has just reached it.
    async fn await_leader(&self, member: &Member, question: &v1::LeaderRequest) {
        let wait = Duration::from_millis(question.wait_ms.into()).min(MAX_LEADER_WAIT);
        let known = || {
            let term = member.view.term();
            let besides = (question.besides_id, question.besides_term);
            let another = |id| term >= besides.1 && (id, term) != besides;
            member.view.leader_id().is_some_and(|id| id == member.identity.id || another(id))
        };
        let looking = async {
            while !known() {
                let pause = LEADER_LOOK.mul_f64(rand::rng().random_range(0.5..=1.0));
                tokio::time::sleep(pause).await;
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => {}
            // In vain or not, what is known then is the answer.
            _ = tokio::time::timeout(wait, looking) => {}
        }
    }
}

#[tonic::async_trait]
impl Cluster for ClusterService {
    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        let disk = self.peer.disk.usage().await;
        Ok(Response::new(v1::StatusResponse { disk, ..self.peer.status() }))
    }

    async fn leader(&self, request: Request<v1::LeaderRequest>) -> Result<Response<v1::LeaderResponse>, Status> {
        self.peer.leader_questions.add(1);
        let peer_id = self.peer.identity.id;
        // Fresh, or removed: it knows nothing of who leads.
        let Ok(member) = self.peer.serving() else {
            return Ok(Response::new(v1::LeaderResponse { peer_id, ..v1::LeaderResponse::default() }));
        };
        let caller = call(&self.peer, &request).caller;
        let question = request.into_inner();
        if question.wait_ms > 0 {
            // Who has no place to wait in is answered with what is known now.
            if let Ok(_place) = member.reads.wait(&caller) {
                self.await_leader(&member, &question).await;
            }
        }
        let (mut members, learners) = member.view.members();
        members.extend(learners);
        Ok(Response::new(v1::LeaderResponse {
            cluster_id: member.cluster_id.clone(),
            peer_id,
            term: member.view.term(),
            leader: member.view.leader(),
            members,
        }))
    }

    async fn init(&self, request: Request<v1::InitRequest>) -> Result<Response<v1::InitResponse>, Status> {
        let founded = self.peer.init(request.into_inner().founders).await?;
        Ok(Response::new(v1::InitResponse { cluster_id: founded.cluster_id, founded: founded.founded }))
    }

    async fn join(&self, request: Request<v1::JoinRequest>) -> Result<Response<v1::JoinResponse>, Status> {
        let (deadline, member) = (deadline(request.metadata()), serving(&self.peer, request.metadata())?);
        let wanted = required(request.into_inner().member)?;
        let joined = member.changes.join(wanted, deadline).await?;
        let cluster_id = member.cluster_id.clone();
        Ok(Response::new(v1::JoinResponse { cluster_id, joined: joined.joined, member: Some(joined.member) }))
    }

    async fn promote(&self, request: Request<v1::PromoteRequest>) -> Result<Response<v1::PromoteResponse>, Status> {
        let (deadline, member) = (deadline(request.metadata()), serving(&self.peer, request.metadata())?);
        let promoted = member.changes.promote(request.into_inner().id, deadline).await?;
        Ok(Response::new(v1::PromoteResponse {
            voter: promoted.voter,
            lag_entries: promoted.lag_entries,
            lag_limit_entries: MAX_LAG_ENTRIES,
        }))
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Result<Response<v1::RemoveResponse>, Status> {
        let (deadline, member) = (deadline(request.metadata()), serving(&self.peer, request.metadata())?);
        let request = request.into_inner();
        let removed = member.changes.remove(request.id, request.force, deadline).await?;
        Ok(Response::new(v1::RemoveResponse { removed }))
    }

    async fn replace(&self, request: Request<v1::ReplaceRequest>) -> Result<Response<v1::ReplaceResponse>, Status> {
        let (deadline, member) = (deadline(request.metadata()), serving(&self.peer, request.metadata())?);
        let request = request.into_inner();
        let replaced = member.changes.replace(request.old_id, required(request.by)?, deadline).await?;
        Ok(Response::new(v1::ReplaceResponse { replaced }))
    }

    async fn transfer_leadership(
        &self,
        request: Request<v1::TransferLeadershipRequest>,
    ) -> Result<Response<v1::TransferLeadershipResponse>, Status> {
        let (deadline, member) = (deadline(request.metadata()), serving(&self.peer, request.metadata())?);
        let to = Some(request.into_inner().to).filter(|id| *id != 0);
        let (term, leader) = member.changes.transfer(to, deadline).await?;
        Ok(Response::new(v1::TransferLeadershipResponse { term, leader: Some(leader) }))
    }
}

fn required(member: Option<v1::Member>) -> Result<v1::Member, Failure> {
    member.ok_or_else(|| Failure::invalid(Invalid::Missing("member")))
}
