//! The `Leases` service.

use std::sync::Arc;

use lake_proto::v1;
use lake_proto::v1::leases_server::Leases;
use tonic::{Request, Response, Status, Streaming};

use super::kv::read_options;
use super::streams::Streams;
use super::{call, keep_alive, serving};
use crate::peer::Peer;
use crate::peer::duties::Mortal;

/// Serves one peer's leases.
pub struct LeasesService {
    peer: Arc<Peer>,
    streams: Streams,
}

impl LeasesService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>, streams: Streams) -> Self {
        Self { peer, streams }
    }
}

#[tonic::async_trait]
impl Leases for LeasesService {
    async fn grant(&self, request: Request<v1::GrantLeaseRequest>) -> Result<Response<v1::GrantLeaseResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner();
        let stamp = request.stamp.map(Into::into);
        let id = member.grant_lease(request.ttl_ms, request.holder, stamp, &call).await?;
        Ok(Response::new(v1::GrantLeaseResponse { header: Some(member.header(id)), id }))
    }

    async fn revoke(
        &self,
        request: Request<v1::RevokeLeaseRequest>,
    ) -> Result<Response<v1::RevokeLeaseResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner();
        let (revision, existed) = member.revoke_lease(request.id, request.stamp.map(Into::into), &call).await?;
        Ok(Response::new(v1::RevokeLeaseResponse { header: Some(member.header(revision)), existed }))
    }

    type KeepAliveStream = keep_alive::Answers;

    async fn keep_alive(
        &self,
        request: Request<Streaming<v1::KeepAliveRequest>>,
    ) -> Result<Response<Self::KeepAliveStream>, Status> {
        keep_alive::open(&self.peer, Mortal::Lease, &self.streams, request)
    }

    async fn list(&self, request: Request<v1::ListLeasesRequest>) -> Result<Response<v1::ListLeasesResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner();
        let options = read_options(request.options)?;
        let part = member.list_leases(request.after, request.limit, options, &call).await?;
        let leases = part.items.into_iter().map(|(lease, remaining)| v1::Lease {
            id: lease.id,
            ttl_ms: lease.ttl_ms,
            holder: lease.holder,
            keys: lease.keys as u64,
            remaining_ms: remaining.map(|remaining| remaining.as_millis() as u64),
        });
        let (header, leases) = (Some(member.header(part.revision)), leases.collect());
        Ok(Response::new(v1::ListLeasesResponse { header, leases, more: part.more }))
    }
}
