//! The `Kv` service: reads on any peer, transactions on the leader.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use lake_client::store::{Consistency, ReadOptions, Snapshot};
use lake_proto::MAX_MESSAGE_BYTES;
use lake_proto::kv::Txn;
use lake_proto::v1;
use lake_proto::v1::kv_server::{Kv, KvServer};
use tonic::codegen::{Body, Service, StdError, http};
use tonic::metadata::MetadataMap;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};

use super::streams::{Answers, Streams};
use super::{call, framed, pipeline, serving};
use crate::peer::Peer;
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::shares::Call;

const PIPELINE: &str = "/lake.v1.Kv/Pipeline";

/// The service of one peer. Its stream is served by hand, so that nothing of what was sent stays with it ([`super::framed`]).
#[derive(Clone)]
pub struct KvServing {
    service: Arc<KvService>,
    generated: KvServer<KvService>,
}

impl KvServing {
    /// Serves this.
    pub fn new(service: KvService) -> Self {
        let service = Arc::new(service);
        let generated = KvServer::from_arc(service.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(usize::MAX);
        Self { service, generated }
    }
}

impl NamedService for KvServing {
    const NAME: &'static str = "lake.v1.Kv";
}

impl<B> Service<http::Request<B>> for KvServing
where
    B: Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        if request.uri().path() != PIPELINE {
            return self.generated.call(request);
        }
        let service = self.service.clone();
        Box::pin(async move {
            Ok(match service.open_pipeline(framed::requests(request)) {
                Ok(answers) => framed::answer(answers),
                Err(failure) => Status::from(failure).into_http(),
            })
        })
    }
}

/// Serves one peer's map.
pub struct KvService {
    peer: Arc<Peer>,
    streams: Streams,
}

impl KvService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>, streams: Streams) -> Self {
        Self { peer, streams }
    }

    fn member(&self, metadata: &MetadataMap) -> Result<Arc<Member>, Failure> {
        serving(&self.peer, metadata)
    }

    /// A stream of requests; its answers, framed.
    fn open_pipeline(&self, request: Request<Streaming<v1::PipelineRequests>>) -> Result<Answers<Bytes>, Failure> {
        let member = self.member(request.metadata())?;
        let caller = self.peer.callers.at(request.remote_addr());
        self.streams.open(&caller.clone(), |answers| pipeline::serve(member, caller, request.into_inner(), answers))
    }
}

/// What a read's options ask for.
pub(super) fn read_options(options: Option<v1::ReadOptions>) -> Result<ReadOptions, Failure> {
    use v1::read_options::Consistency as Wire;
    let options = options.unwrap_or_default();
    let consistency = match Wire::try_from(options.consistency) {
        Ok(Wire::Linearizable) => Consistency::Linearizable,
        Ok(Wire::Local) => Consistency::Local,
        Ok(Wire::Bounded) => Consistency::Bounded(Duration::from_millis(options.max_staleness_ms)),
        Err(_) => return Err(Failure::invalid(format!("there is no consistency {}", options.consistency))),
    };
    let snapshot = Snapshot::from_wire(options.snapshot);
    Ok(ReadOptions { consistency, min_revision: options.min_revision, snapshot })
}

/// One entry.
pub(super) async fn get(member: &Member, request: v1::GetRequest, call: &Call) -> Result<v1::GetResponse, Failure> {
    let (revision, entry) = member.get(&request.key, read_options(request.options)?, call).await?;
    Ok(v1::GetResponse { header: Some(member.header(revision)), entry: entry.map(Into::into) })
}

/// Several entries at one revision.
pub(super) async fn batch_get(
    member: &Member,
    request: v1::BatchGetRequest,
    call: &Call,
) -> Result<v1::BatchGetResponse, Failure> {
    let (revision, entries) = member.batch_get(&request.keys, read_options(request.options)?, call).await?;
    let entries = entries.into_iter().map(Into::into).collect();
    Ok(v1::BatchGetResponse { header: Some(member.header(revision)), entries })
}

/// A transaction.
pub(super) async fn txn(member: &Member, request: v1::TxnRequest, call: &Call) -> Result<v1::TxnResponse, Failure> {
    let txn = request.txn.ok_or_else(|| Failure::invalid("the request has no transaction"))?;
    let txn = Txn::try_from(txn).map_err(Failure::invalid)?;
    let result = member.commit(txn, request.stamp.map(Into::into), call).await?;
    let header = member.header(result.revision);
    Ok(result.into_response(Some(header)))
}

#[tonic::async_trait]
impl Kv for KvService {
    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::GetResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = self.member(request.metadata())?;
        Ok(Response::new(get(&member, request.into_inner(), &call).await?))
    }

    async fn batch_get(&self, request: Request<v1::BatchGetRequest>) -> Result<Response<v1::BatchGetResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = self.member(request.metadata())?;
        Ok(Response::new(batch_get(&member, request.into_inner(), &call).await?))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = self.member(request.metadata())?;
        let request = request.into_inner();
        let token = Some(request.page.as_str()).filter(|page| !page.is_empty());
        let options = read_options(request.options)?;
        let page = member.list(&request.prefix, token, request.limit, options, &call).await?;
        Ok(Response::new(v1::ListResponse {
            header: Some(member.header(page.revision)),
            entries: page.entries.into_iter().map(Into::into).collect(),
            next_page: page.next.unwrap_or_default(),
        }))
    }

    async fn open_snapshot(
        &self,
        request: Request<v1::OpenSnapshotRequest>,
    ) -> Result<Response<v1::OpenSnapshotResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = self.member(request.metadata())?;
        let options = read_options(request.into_inner().options)?;
        let (revision, snapshot) = member.open_snapshot(options, &call).await?;
        let header = Some(member.header(revision));
        Ok(Response::new(v1::OpenSnapshotResponse { header, snapshot: snapshot.to_wire() }))
    }

    async fn close_snapshot(
        &self,
        request: Request<v1::CloseSnapshotRequest>,
    ) -> Result<Response<v1::CloseSnapshotResponse>, Status> {
        let member = self.member(request.metadata())?;
        let snapshot = Snapshot::from_wire(request.into_inner().snapshot);
        let existed = snapshot.is_some_and(|snapshot| member.pages.close_snapshot(snapshot));
        Ok(Response::new(v1::CloseSnapshotResponse { existed }))
    }

    async fn txn(&self, request: Request<v1::TxnRequest>) -> Result<Response<v1::TxnResponse>, Status> {
        let call = call(&self.peer, &request);
        let member = self.member(request.metadata())?;
        Ok(Response::new(txn(&member, request.into_inner(), &call).await?))
    }

    type PipelineStream = Answers<v1::PipelineResponses>;

    async fn pipeline(
        &self,
        _: Request<Streaming<v1::PipelineRequests>>,
    ) -> Result<Response<Self::PipelineStream>, Status> {
        Err(Status::unimplemented("it is served before it comes here"))
    }
}
