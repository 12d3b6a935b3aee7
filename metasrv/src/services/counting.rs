//! Counts what connections have of a service's answers ([`crate::peer::untaken`]), and refuses the calls of who has its part.
//!
//! A connection asks for a piece before it can send it, and keeps it until its caller lets it: a piece counts until the
//! connection lets go of its bytes. Many calls may have been let in before any of them is answered: the answer of one for which
//! there is no room by then is dropped, and in place of it the call ends with why.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::server::TcpConnectInfo;

use crate::peer::Peer;
use crate::peer::failure::Failure;
use crate::peer::shares::{Caller, Callers, Held};
use crate::peer::untaken::Untaken;

/// A service whose answers are counted.
#[derive(Debug, Clone)]
pub struct Counting<S> {
    service: S,
    callers: Callers,
    untaken: Untaken,
}

impl<S> Counting<S> {
    /// Counts the answers of a peer's service.
    pub fn new(service: S, peer: &Peer) -> Self {
        Self { service, callers: peer.callers.clone(), untaken: peer.untaken.clone() }
    }
}

impl<S: NamedService> NamedService for Counting<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for Counting<S>
where
    S: Service<http::Request<B>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let address = request.extensions().get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
        let caller = self.callers.at(address);
        let (kind, untaken) = (Answer::of(request.uri().path()), self.untaken.clone());
        if kind != Answer::Small
            && let Err(refused) = untaken.may_ask(&caller)
        {
            let refused: Self::Response = Status::from(refused).into_http();
            return Box::pin(std::future::ready(Ok(refused)));
        }
        let answering = self.service.call(request);
        let counted = move |body| Body::new(Counted { body, kind, caller, untaken, ended: false });
        Box::pin(async move { Ok(answering.await?.map(counted)) })
    }
}

/// What a call is answered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// What was read, and can be again.
    Read,
    /// What became of a change.
    Change,
    /// Messages of a stream, each of which was let in already.
    Stream,
    /// What takes no more than the call, and what somebody lives by who has much to read besides: never refused.
    Small,
}

impl Answer {
    fn of(path: &str) -> Self {
        match path {
            "/lake.v1.Kv/Txn" | "/lake.v1.Nodes/Instruct" => Self::Change,
            "/lake.v1.Kv/Pipeline" | "/lake.v1.Watch/Watch" => Self::Stream,
            _ if path.starts_with("/lake.v1.Kv/") || path.ends_with("/List") => Self::Read,
            _ => Self::Small,
        }
    }

    /// Why there is none, if so many bytes have no room.
    fn refused(self, untaken: &Untaken, caller: &Caller, bytes: usize) -> Option<Failure> {
        let no_room = || untaken.room(caller, bytes).err();
        match self {
            Self::Read => no_room(),
            Self::Change => no_room().map(|refused| {
                let what = format!("what came of it is not told: {}", refused.message);
                // Not Overloaded: that says that nothing was done.
                Failure::unknown(what)
            }),
            Self::Stream | Self::Small => None,
        }
    }
}

/// An answer whose pieces are counted.
struct Counted {
    body: Body,
    kind: Answer,
    caller: Caller,
    untaken: Untaken,
    /// With a piece that had no room.
    ended: bool,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let frame = match std::task::ready!(Pin::new(&mut this.body).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            other => return Poll::Ready(other),
        };
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
        };
        if let Some(refused) = this.kind.refused(&this.untaken, &this.caller, data.len()) {
            this.ended = true;
            let mut trailers = http::HeaderMap::new();
            let told = Status::from(refused).add_header(&mut trailers);
            return Poll::Ready(Some(told.map(|()| Frame::trailers(trailers))));
        }
        let held = this.untaken.note(&this.caller, data.len());
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(Piece { data, _held: held })))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct Piece {
    data: Bytes,
    _held: Held,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::status::detail;
    use lake_proto::v1::error_detail::{Applied, Kind};

    use super::*;
    use crate::peer::untaken::FEW_BYTES;

    /// A body of one piece after the other.
    struct Pieces(Vec<Bytes>);

    impl HttpBody for Pieces {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop().map(|piece| Ok(Frame::data(piece))))
        }
    }

    fn counted(body: Body, kind: Answer, caller: Caller, untaken: &Untaken) -> Counted {
        Counted { body, kind, caller, untaken: untaken.clone(), ended: false }
    }

    #[tokio::test]
    async fn a_call_whose_answer_has_no_room_by_then_ends_with_why() {
        let (untaken, caller) = (Untaken::of(100 << 10), Callers::default().at(None));
        let has = untaken.note(&caller, 90 << 10);
        let asked = async |path: &str, bytes| {
            let body = Body::new(Pieces(vec![Bytes::from(vec![7; bytes])]));
            let mut body = counted(body, Answer::of(path), caller.clone(), &untaken);
            let first = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.unwrap().unwrap();
            let trailers = first.into_trailers().ok()?;
            assert!(body.is_end_stream());
            assert!(std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.is_none());
            let detail = detail(&Status::from_header_map(&trailers).unwrap()).unwrap();
            Some((detail.kind(), detail.applied()))
        };
        let change = "/lake.v1.Kv/Txn";
        for read in ["/lake.v1.Kv/BatchGet", "/lake.v1.Leases/List", "/lake.v1.Shards/List"] {
            assert_eq!(asked(read, FEW_BYTES + 1).await, Some((Kind::Overloaded, Applied::NotApplied)));
        }
        assert_eq!(asked("/lake.v1.Nodes/Instruct", FEW_BYTES + 1).await, Some((Kind::Unavailable, Applied::Unknown)));
        for kept in ["/lake.v1.Leases/KeepAlive", "/lake.v1.Nodes/Heartbeat"] {
            assert_eq!(asked(kept, FEW_BYTES + 1).await, None, "somebody lives by it");
        }
        assert_eq!(asked(change, FEW_BYTES + 1).await, Some((Kind::Unavailable, Applied::Unknown)));
        assert_eq!(asked(change, FEW_BYTES).await, None, "there is always room for little");
        assert_eq!(asked("/lake.v1.Watch/Watch", FEW_BYTES + 1).await, None, "it was let in");
        assert_eq!(untaken.bytes(), 90 << 10);
        drop(has);
        assert_eq!(asked(change, FEW_BYTES + 1).await, None);
    }

    #[tokio::test]
    async fn a_piece_counts_until_its_last_part_is_gone() {
        let untaken = Untaken::default();
        let body = Body::new(Pieces(vec![Bytes::from_static(b"last"), Bytes::from_static(b"the first")]));
        let mut body = counted(body, Answer::Stream, Caller::own(), &untaken);
        let mut piece = async || {
            let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
            frame.map(|frame| frame.unwrap().into_data().unwrap())
        };
        let mut first = piece().await.unwrap();
        let last = piece().await.unwrap();
        assert_eq!((&first[..], &last[..], untaken.bytes()), (&b"the first"[..], &b"last"[..], 13));
        let head = first.split_to(3);
        drop((first, last));
        assert_eq!(untaken.bytes(), 9, "a part of it is on its way");
        drop(head);
        assert_eq!(untaken.bytes(), 0);
        assert!(piece().await.is_none());
    }
}
