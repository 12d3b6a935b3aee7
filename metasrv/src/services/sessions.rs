//! The `Sessions` service.

use std::sync::Arc;

use lake_proto::v1;
use lake_proto::v1::sessions_server::Sessions;
use tonic::{Request, Response, Status, Streaming};

use super::streams::Streams;
use super::{call, keep_alive, serving};
use crate::peer::Peer;
use crate::peer::duties::Mortal;

/// Serves one peer's sessions.
pub struct SessionsService {
    peer: Arc<Peer>,
    streams: Streams,
}

impl SessionsService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>, streams: Streams) -> Self {
        Self { peer, streams }
    }
}

#[tonic::async_trait]
impl Sessions for SessionsService {
    async fn open(
        &self,
        request: Request<v1::OpenSessionRequest>,
    ) -> Result<Response<v1::OpenSessionResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner();
        let id = member.open_session(request.ttl_ms, request.holder, &call).await?;
        Ok(Response::new(v1::OpenSessionResponse { header: Some(member.header(id)), id }))
    }

    async fn close(
        &self,
        request: Request<v1::CloseSessionRequest>,
    ) -> Result<Response<v1::CloseSessionResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let (revision, existed) = member.close_session(request.into_inner().id, &call).await?;
        Ok(Response::new(v1::CloseSessionResponse { header: Some(member.header(revision)), existed }))
    }

    type KeepAliveStream = keep_alive::Answers;

    async fn keep_alive(
        &self,
        request: Request<Streaming<v1::KeepAliveRequest>>,
    ) -> Result<Response<Self::KeepAliveStream>, Status> {
        keep_alive::open(&self.peer, Mortal::Session, &self.streams, request)
    }
}
