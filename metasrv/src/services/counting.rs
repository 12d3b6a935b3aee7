//! Counts what connections have of a service's answers ([`crate::peer::untaken`]), and refuses the calls of who has its part.
//!
//! A connection asks for a piece before it can send it, and keeps it until its caller lets it: a piece counts until the
//! connection lets go of its bytes.

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
        if let Err(refused) = self.untaken.may_ask(&caller) {
            let refused: Self::Response = Status::from(refused).into_http();
            return Box::pin(std::future::ready(Ok(refused)));
        }
        let (untaken, answering) = (self.untaken.clone(), self.service.call(request));
        Box::pin(async move { Ok(answering.await?.map(|body| Body::new(Counted { body, caller, untaken }))) })
    }
}

/// An answer whose pieces are counted.
struct Counted {
    body: Body,
    caller: Caller,
    untaken: Untaken,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let frame = std::task::ready!(Pin::new(&mut this.body).poll_frame(cx));
        let counted = |data: Bytes| {
            let held = this.untaken.note(&this.caller, data.len());
            Bytes::from_owner(Piece { data, _held: held })
        };
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(counted))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
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
    use super::*;

    /// A body of one piece after the other.
    struct Pieces(Vec<Bytes>);

    impl HttpBody for Pieces {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop().map(|piece| Ok(Frame::data(piece))))
        }
    }

    #[tokio::test]
    async fn a_piece_counts_until_its_last_part_is_gone() {
        let untaken = Untaken::default();
        let body = Body::new(Pieces(vec![Bytes::from_static(b"last"), Bytes::from_static(b"the first")]));
        let mut body = Counted { body, caller: Caller::own(), untaken: untaken.clone() };
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
