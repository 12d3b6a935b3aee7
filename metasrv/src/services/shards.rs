//! The `Shards` service.

use std::sync::Arc;

use lake_proto::v1;
use lake_proto::v1::shards_server::Shards;
use tonic::{Request, Response, Status};

use super::{call, serving};
use crate::peer::Peer;

/// Tells and moves the shards of one peer's cluster.
pub struct ShardsService {
    peer: Arc<Peer>,
}

impl ShardsService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>) -> Self {
        Self { peer }
    }
}

#[tonic::async_trait]
impl Shards for ShardsService {
    async fn list(&self, request: Request<v1::ListShardsRequest>) -> Result<Response<v1::ListShardsResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        Ok(Response::new(member.list_shards(&call).await?))
    }

    async fn move_shard(
        &self,
        request: Request<v1::MoveShardRequest>,
    ) -> Result<Response<v1::MoveShardResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner();
        let moved = member.move_shard(request.shard, &request.node, request.dry_run, &call).await?;
        let header = Some(member.header(member.published.current().state.revision()));
        Ok(Response::new(v1::MoveShardResponse { header, moved: Some(moved) }))
    }

    async fn balance(
        &self,
        request: Request<v1::BalanceShardsRequest>,
    ) -> Result<Response<v1::BalanceShardsResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let moves = member.balance_shards(request.into_inner().dry_run, &call).await?;
        let header = Some(member.header(member.published.current().state.revision()));
        Ok(Response::new(v1::BalanceShardsResponse { header, moves }))
    }

    async fn maintain(
        &self,
        request: Request<v1::MaintainShardsRequest>,
    ) -> Result<Response<v1::MaintainShardsResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let revision = member.maintain_shards(request.into_inner().maintenance, &call).await?;
        Ok(Response::new(v1::MaintainShardsResponse { header: Some(member.header(revision)) }))
    }
}
