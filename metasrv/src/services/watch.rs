//! The `Watch` service. It is written by hand where the others are generated, because its messages come framed: one is
//! encoded once, and in memory once, however many watchers it goes to ([`crate::peer::watches`], [`super::framed`]).
//!
//! There is no task for a stream: a connection asks its [`Watcher`] for the next message when it has room for it. A watch
//! ends when the caller goes, with the error that ended it, or when the server stops.
//!
//! What connections have been given and their callers have not taken has a limit ([`crate::peer::untaken`]). A message that
//! has no room is read again when there is some, from the same place; after [`ROOM_WITHIN`] the watch is cut off.

use std::convert::Infallible;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use lake_proto::v1;
use rand::Rng;
use tokio::time::Instant;
use tonic::codegen::{Body, Service, StdError, http};
use tonic::server::NamedService;
use tonic::{Request, Status, Streaming};

use super::{call, framed, serving};
use crate::peer::Peer;
use crate::peer::failure::Failure;
use crate::peer::shares::Caller;
use crate::peer::untaken::Untaken;
use crate::peer::watches::Watcher;

const PATH: &str = "/lake.v1.Watch/Watch";
/// How long a watcher waits for room for its next message, and how long until it looks again.
const ROOM_WITHIN: Duration = Duration::from_secs(2);
const LOOK_AGAIN_MS: RangeInclusive<u64> = 1..=20;

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
            if request.uri().path() != PATH {
                let status = Status::unimplemented(format!("there is no method {}", request.uri().path()));
                return Ok(status.into_http());
            }
            Ok(match this.open(framed::requests(request)).await {
                Ok(watch) => framed::answer(watch.messages()),
                Err(status) => status.into_http(),
            })
        })
    }
}

impl WatchServer {
    async fn open(&self, request: Request<Streaming<v1::WatchRequest>>) -> Result<Watch, Status> {
        let call = call(&self.peer, &request);
        let member = serving(&self.peer, request.metadata())?;
        let request = request.into_inner().message().await?;
        let request = request.ok_or_else(|| Failure::invalid("a watch begins with what is to be watched"))?;
        let watcher = member.watch(&request.prefix, request.from_revision, &call).await?;
        Ok(Watch { watcher, caller: call.caller, untaken: self.peer.untaken.clone() })
    }
}

/// One watch of a caller.
struct Watch {
    watcher: Watcher,
    caller: Caller,
    untaken: Untaken,
}

impl Watch {
    fn messages(self) -> BoxStream<'static, Result<Bytes, Status>> {
        let next = |watch: Option<Watch>| async {
            let mut watch = watch?;
            Some(match watch.next().await {
                Ok(message) => (Ok(message), Some(watch)),
                Err(failure) => (Err(failure.into()), None),
            })
        };
        futures::stream::unfold(Some(self), next).boxed()
    }

    /// The next message, for which there is room.
    async fn next(&mut self) -> Result<Bytes, Failure> {
        let mut until = None;
        loop {
            let message = self.watcher.next().await?.framed;
            let bytes = message.len();
            if self.untaken.room(&self.caller, bytes).is_ok() {
                return Ok(message);
            }
            // Whoever waits holds nothing.
            drop(message);
            self.watcher.step_back();
            let until = *until.get_or_insert_with(|| Instant::now() + ROOM_WITHIN);
            wait_for_room(&self.untaken, &self.caller, bytes, until).await?;
        }
    }
}

/// Waits until there is room for so many bytes.
async fn wait_for_room(untaken: &Untaken, caller: &Caller, bytes: usize, until: Instant) -> Result<(), Failure> {
    while let Err(refused) = untaken.room(caller, bytes) {
        if Instant::now() >= until {
            let what = format!(
                "the watch is cut off, to be gone on with from the revision after the last progress: {}",
                refused.message
            );
            return Err(Failure { message: what, ..refused });
        }
        let wait = rand::rng().random_range(LOOK_AGAIN_MS);
        tokio::time::sleep(Duration::from_millis(wait)).await;
    }
    Ok(())
}
