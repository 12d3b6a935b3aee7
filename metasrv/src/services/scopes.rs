//! The `Scopes` service. Scopes are acquired and released by transactions ([`super::kv`]).

use std::sync::Arc;

use lake_proto::v1;
use lake_proto::v1::scopes_server::Scopes;
use tonic::{Request, Response, Status};

use super::kv::read_options;
use super::{call, serving};
use crate::peer::Peer;

/// Tells one peer's scopes.
pub struct ScopesService {
    peer: Arc<Peer>,
}

impl ScopesService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>) -> Self {
        Self { peer }
    }
}

#[tonic::async_trait]
impl Scopes for ScopesService {
    async fn list(&self, request: Request<v1::ListScopesRequest>) -> Result<Response<v1::ListScopesResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner();
        let options = read_options(request.options)?;
        let part = member.list_scopes(&request.prefix, &request.after, request.limit, options, &call).await?;
        Ok(Response::new(v1::ListScopesResponse {
            header: Some(member.header(part.revision)),
            scopes: part.items.into_iter().map(Into::into).collect(),
            more: part.more,
        }))
    }
}
