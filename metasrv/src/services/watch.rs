//! The `Watch` service. It is written by hand where the others are generated, because its messages come encoded: one is
//! encoded once, however many watchers it goes to ([`crate::peer::watches`]).
//!
//! There is no task for a stream: a connection asks its [`Watcher`] for the next message when it has room for it. A watch
//! ends when the caller goes, with the error that ended it, or when the server stops.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use lake_proto::v1;
use prost::Message as _;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::{Body, Service, StdError, http};
use tonic::server::{Grpc, NamedService, ServerStreamingService};
use tonic::{Request, Response, Status};

use super::{call, serving};
use crate::peer::Peer;
use crate::peer::watches::Watcher;

const PATH: &str = "/lake.v1.Watch/Watch";
/// A stream's buffer grows in steps of so many bytes. Most messages are small, and there are many streams.
const BUFFER_BYTES: usize = 512;
/// Messages that are ready together go out together, up to so many bytes.
const TOGETHER_BYTES: usize = 32 << 10;

/// Serves one peer's watches.
#[derive(Clone)]
pub struct WatchServer {
    peer: Arc<Peer>,
}

impl WatchServer {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>) -> Self {
        Self { peer }
    }
}

impl NamedService for WatchServer {
    const NAME: &'static str = "lake.v1.Watch";
}

impl<B> Service<http::Request<B>> for WatchServer
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
        let this = self.clone();
        Box::pin(async move {
            if request.uri().path() == PATH {
                return Ok(Grpc::new(Encoded).server_streaming(this, request).await);
            }
            let status = Status::unimplemented(format!("there is no method {}", request.uri().path()));
            Ok(status.into_http())
        })
    }
}

impl ServerStreamingService<v1::WatchRequest> for WatchServer {
    type Response = Bytes;
    type ResponseStream = BoxStream<'static, Result<Bytes, Status>>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<v1::WatchRequest>) -> Self::Future {
        let peer = self.peer.clone();
        Box::pin(async move {
            let call = call(&peer, &request);
            let member = serving(&peer, request.metadata())?;
            let request = request.into_inner();
            let watcher = member.watch(&request.prefix, request.from_revision, &call).await?;
            Ok(Response::new(messages(watcher)))
        })
    }
}

fn messages(watcher: Watcher) -> BoxStream<'static, Result<Bytes, Status>> {
    let next = |watcher: Option<Watcher>| async {
        let mut watcher = watcher?;
        Some(match watcher.next().await {
            Ok(message) => (Ok(message.encoded), Some(watcher)),
            Err(failure) => (Err(failure.into()), None),
        })
    };
    futures::stream::unfold(Some(watcher), next).boxed()
}

/// Takes messages that are encoded already.
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = v1::WatchRequest;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(item.len());
        buffer.put(item);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, TOGETHER_BYTES)
    }
}

impl Decoder for Encoded {
    type Item = v1::WatchRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Self::Item>, Status> {
        let request = v1::WatchRequest::decode(buffer);
        request.map(Some).map_err(|e| Status::invalid_argument(format!("the request cannot be read: {e}")))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, TOGETHER_BYTES)
    }
}
