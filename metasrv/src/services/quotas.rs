//! The `Quotas` service.

use std::sync::Arc;

use lake_proto::v1;
use lake_proto::v1::quotas_server::Quotas;
use tonic::{Request, Response, Status};

use super::kv::read_options;
use super::{call, serving};
use crate::peer::Peer;

/// Sets and tells one peer's quotas.
pub struct QuotasService {
    peer: Arc<Peer>,
}

impl QuotasService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>) -> Self {
        Self { peer }
    }
}

#[tonic::async_trait]
impl Quotas for QuotasService {
    async fn set(&self, request: Request<v1::SetQuotaRequest>) -> Result<Response<v1::SetQuotaResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner();
        let stamp = request.stamp.map(Into::into);
        let revision = member.set_quota(request.prefix, request.bytes, stamp, &call).await?;
        Ok(Response::new(v1::SetQuotaResponse { header: Some(member.header(revision)) }))
    }

    async fn list(&self, request: Request<v1::ListQuotasRequest>) -> Result<Response<v1::ListQuotasResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let options = read_options(request.into_inner().options)?;
        let (revision, quotas) = member.list_quotas(options, &call).await?;
        Ok(Response::new(v1::ListQuotasResponse { header: Some(member.header(revision)), quotas }))
    }
}
