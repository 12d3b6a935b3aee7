//! Requests that break off are not taken for whole ones.
//!
//! A client that cancels a call, or whose deadline has passed, resets its stream. hyper and tonic both let such a stream end, without
//! an error, where it has come to: rows that are ingested, or values that are bound, would be taken for all there are, and what is a
//! part of a change would be committed. HTTP/2 knows better: only a stream whose end was sent has ended.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::{Code, Status};

use super::status::from_error;
use crate::error::Error;

/// A service whose requests fail where they break off.
#[derive(Debug, Clone)]
pub struct Whole<S>(pub S);

impl<S: NamedService> NamedService for Whole<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<http::Request<Body>>> Service<http::Request<Body>> for Whole<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> S::Future {
        self.0.call(request.map(|body| Body::new(ToItsEnd(body))))
    }
}

struct ToItsEnd(Body);

impl http_body::Body for ToItsEnd {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.0).poll_frame(cx));
        Poll::Ready(match frame {
            None if !self.0.is_end_stream() => Some(Err(broken_off())),
            Some(Err(status)) if status.code() == Code::Cancelled => Some(Err(broken_off())),
            frame => frame,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

/// Not by the code of what is cancelled, which tonic takes for the end of a request. The kind says it.
fn broken_off() -> Status {
    let error = Error::cancelled("the request broke off before its end: its client cancelled it, or is gone");
    let status = from_error(&error);
    Status::with_metadata(Code::Aborted, status.message(), status.metadata().clone())
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use http_body::Body as _;

    use super::*;
    use crate::error::Kind;
    use crate::flight::status::to_error;

    /// A stream with one frame, which then is at its end, or only stops.
    struct Stops {
        frames: usize,
        ended: bool,
    }

    impl http_body::Body for Stops {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            let frame = self.frames.checked_sub(1);
            self.frames = frame.unwrap_or_default();
            Poll::Ready(frame.map(|_| Ok(Frame::data(Bytes::from_static(b"x")))))
        }

        fn is_end_stream(&self) -> bool {
            self.frames == 0 && self.ended
        }
    }

    #[tokio::test]
    async fn a_stream_that_stops_before_its_end_fails() {
        for ended in [true, false] {
            let mut body = ToItsEnd(Body::new(Stops { frames: 1, ended }));
            let mut next = async || poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
            assert!(next().await.unwrap().unwrap().is_data());
            match (next().await, ended) {
                (None, true) => {}
                (Some(Err(status)), false) => {
                    assert_ne!(status.code(), Code::Cancelled);
                    assert_eq!(to_error(&status).kind, Kind::Cancelled);
                }
                (other, _) => panic!("{other:?}"),
            }
        }
    }
}
