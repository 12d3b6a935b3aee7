//! The `Cluster` service: who a peer is, who leads, and founding.

use std::sync::Arc;

use lake_proto::v1;
use lake_proto::v1::cluster_server::Cluster;
use tonic::{Request, Response, Status};

use crate::peer::Peer;

/// Answers for one peer.
pub struct ClusterService {
    peer: Arc<Peer>,
}

impl ClusterService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>) -> Self {
        Self { peer }
    }
}

#[tonic::async_trait]
impl Cluster for ClusterService {
    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        Ok(Response::new(self.peer.status()))
    }

    async fn leader(&self, _: Request<v1::LeaderRequest>) -> Result<Response<v1::LeaderResponse>, Status> {
        let peer_id = self.peer.identity.id;
        let Some(member) = self.peer.member() else {
            return Ok(Response::new(v1::LeaderResponse { peer_id, ..v1::LeaderResponse::default() }));
        };
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
}
