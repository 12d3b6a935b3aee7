//! Streams of answers whose messages are framed already ([`lake_proto::codec::framed`]).
//!
//! tonic puts the messages of a stream together in a buffer of the stream's own, which stays as large as the largest of them for as
//! long as the stream is open, also when its caller has taken all: 96 MiB and more of a watch that was once told of a large change.
//! Here a message goes to the connection as it is, and its memory goes with it; one that goes to many is in memory once.
//!
//! Limits: messages that are ready together go out together, copied, until they have [`TOGETHER_BYTES`].

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http_body::{Body as HttpBody, Frame};
use lake_proto::MAX_MESSAGE_BYTES;
use lake_proto::codec::Exact;
use prost::Message;
use tonic::body::Body;
use tonic::codec::Codec;
use tonic::codegen::{StdError, http};
use tonic::{Request, Status, Streaming};

/// Messages that are ready together go out together until they have so many bytes.
const TOGETHER_BYTES: usize = 32 << 10;

/// A call's messages.
pub fn requests<T, B>(request: http::Request<B>) -> Request<Streaming<T>>
where
    T: Message + Default + Send + 'static,
    B: HttpBody + Send + 'static,
    B::Error: Into<StdError>,
{
    let decoder = Exact::<(), T>::default().decoder();
    Request::from_http(request.map(|body| Streaming::new_request(decoder, body, None, Some(MAX_MESSAGE_BYTES))))
}

/// The answer that a stream of framed messages is.
pub fn answer(messages: impl Stream<Item = Result<Bytes, Status>> + Send + Unpin + 'static) -> http::Response<Body> {
    let body = Framed { messages: Some(messages), end: None };
    let mut answer = http::Response::new(Body::new(body));
    let grpc = http::HeaderValue::from_static("application/grpc");
    answer.headers_mut().insert(http::header::CONTENT_TYPE, grpc);
    answer
}

struct Framed<S> {
    /// Until they have ended.
    messages: Option<S>,
    /// How they have ended, until that is told.
    end: Option<Status>,
}

impl<S: Stream<Item = Result<Bytes, Status>> + Unpin> Framed<S> {
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some(messages) = &mut self.messages else { return Poll::Ready(None) };
        let end = match std::task::ready!(messages.poll_next_unpin(cx)) {
            Some(Ok(message)) => return Poll::Ready(Some(message)),
            Some(Err(why)) => why,
            None => Status::ok(""),
        };
        (self.messages, self.end) = (None, Some(end));
        Poll::Ready(None)
    }
}

impl<S: Stream<Item = Result<Bytes, Status>> + Unpin> HttpBody for Framed<S> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let Some(first) = std::task::ready!(this.poll_message(cx)) else {
            return Poll::Ready(this.end.take().map(|end| {
                let mut trailers = http::HeaderMap::new();
                let told = end.add_header(&mut trailers);
                told.map(|()| Frame::trailers(trailers))
            }));
        };
        let mut together = Vec::new();
        while first.len().max(together.len()) < TOGETHER_BYTES
            && let Poll::Ready(Some(next)) = this.poll_message(cx)
        {
            if together.is_empty() {
                together.extend_from_slice(&first);
            }
            together.extend_from_slice(&next);
        }
        let data = if together.is_empty() { first } else { together.into() };
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.messages.is_none() && self.end.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::stream::BoxStream;
    use tonic::Code;

    use super::*;

    async fn next(body: &mut Framed<BoxStream<'static, Result<Bytes, Status>>>) -> Option<Frame<Bytes>> {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await;
        frame.map(Result::unwrap)
    }

    fn framed(messages: Vec<Result<Bytes, Status>>) -> Framed<BoxStream<'static, Result<Bytes, Status>>> {
        Framed { messages: Some(futures::stream::iter(messages).boxed()), end: None }
    }

    #[tokio::test]
    async fn a_stream_keeps_nothing_of_what_it_has_sent() {
        let large: Arc<[u8]> = vec![7; 1 << 20].into();
        let messages = [Ok(Bytes::from_owner(large.clone())), Ok(Bytes::from_owner(large.clone()))];
        let open = futures::stream::iter(messages).chain(futures::stream::pending());
        let mut body = Framed { messages: Some(open.boxed()), end: None };
        for left in [2, 1] {
            let data = next(&mut body).await.unwrap().into_data().unwrap();
            assert_eq!(data.as_ptr(), large.as_ptr(), "it is not copied");
            drop(data);
            assert_eq!(Arc::strong_count(&large), left);
        }
        assert!(!body.is_end_stream());
    }

    #[tokio::test]
    async fn small_messages_go_out_together_and_why_a_stream_ends_behind_them() {
        let large = Bytes::from(vec![7; TOGETHER_BYTES]);
        let small = |text: &'static str| Ok(Bytes::from_static(text.as_bytes()));
        for (end, code) in [(None, Code::Ok), (Some(Err(Status::aborted("why"))), Code::Aborted)] {
            let messages = [small("a"), small("bc"), Ok(large.clone()), small("d"), small("e")];
            let mut body = framed(messages.into_iter().chain(end).collect());
            for expected in [[&b"abc"[..], &large[..]].concat(), b"de".to_vec()] {
                assert_eq!(next(&mut body).await.unwrap().into_data().unwrap(), expected);
            }
            assert!(!body.is_end_stream());
            let trailers = next(&mut body).await.unwrap().into_trailers().unwrap();
            assert_eq!(Status::from_header_map(&trailers).unwrap().code(), code);
            assert!(body.is_end_stream() && next(&mut body).await.is_none());
        }
    }
}
