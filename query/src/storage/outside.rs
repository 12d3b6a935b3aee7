//! Requests to object stores are made by the process's runtime, whoever asks: whoever computes on another one
//! ([`crate::sql`]) may give a connection no turn for seconds.
//!
//! What is answered comes over through a queue of [`FRAMES_AHEAD`] pieces: whoever reads slowly has no more than these of a large
//! object in memory. An answer whose task ends before its last piece was sent is an error, and no short object.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use async_trait::async_trait;
use bytes::Bytes;
use http_body::{Body, Frame};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
    ReqwestConnector,
};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

/// Pieces of an answer that wait to be taken, each of some 16 KiB at most as HTTP brings them.
const FRAMES_AHEAD: usize = 32;

/// Makes clients whose requests are made by a runtime.
#[derive(Debug)]
pub struct Outside(pub Handle);

impl HttpConnector for Outside {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Requests { client, runtime: self.0.clone() }))
    }
}

#[derive(Debug)]
struct Requests {
    client: HttpClient,
    runtime: Handle,
}

fn interrupted() -> HttpError {
    HttpError::new(HttpErrorKind::Interrupted, std::io::Error::other("the request was given up in the middle"))
}

#[async_trait]
impl HttpService for Requests {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let client = self.client.clone();
        let (tell, told) = oneshot::channel();
        let (frames, coming) = mpsc::channel(FRAMES_AHEAD);
        let task = self.runtime.spawn(async move {
            let (parts, mut body) = match client.execute(request).await {
                Ok(answer) => answer.into_parts(),
                Err(error) => {
                    let _ = tell.send(Err(error));
                    return;
                }
            };
            // Who has asked may be gone, here and below.
            if tell.send(Ok(parts)).is_err() {
                return;
            }
            while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
                if frames.send(Some(frame)).await.is_err() {
                    return;
                }
            }
            let _ = frames.send(None).await;
        });
        let task = AbortOnDropHandle::new(task);
        let parts = told.await.map_err(|_| interrupted())??;
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(Frames { coming, ended: false, _task: task })))
    }
}

/// An answer's pieces; `None` behind the last.
struct Frames {
    coming: mpsc::Receiver<Option<Result<Frame<Bytes>, HttpError>>>,
    ended: bool,
    _task: AbortOnDropHandle<()>,
}

impl Body for Frames {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.coming.poll_recv(context).map(|came| match came {
            Some(Some(frame)) => Some(frame),
            Some(None) => {
                self.ended = true;
                None
            }
            None => {
                self.ended = true;
                Some(Err(interrupted()))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const PIECES: usize = 1000;

    /// Answers with many pieces, and counts those that were asked for; it may stop in the middle.
    #[derive(Debug, Clone)]
    struct Pieces {
        made: Arc<AtomicUsize>,
        panics_at: usize,
    }

    #[async_trait]
    impl HttpService for Pieces {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            Ok(HttpResponse::new(HttpResponseBody::new(self.clone())))
        }
    }

    impl Body for Pieces {
        type Data = Bytes;
        type Error = HttpError;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
            let made = self.made.fetch_add(1, Ordering::SeqCst);
            assert!(made != self.panics_at, "the connection's task ends");
            Poll::Ready((made < PIECES).then(|| Ok(Frame::data(Bytes::from_static(b"a piece")))))
        }
    }

    async fn asked(pieces: &Pieces) -> HttpResponseBody {
        let requests = Requests { client: HttpClient::new(pieces.clone()), runtime: Handle::current() };
        requests.call(HttpRequest::new(Vec::new().into())).await.unwrap().into_parts().1
    }

    async fn next(body: &mut HttpResponseBody) -> Option<Result<Frame<Bytes>, HttpError>> {
        poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
    }

    #[tokio::test]
    async fn who_reads_slowly_has_little_of_a_large_object_in_memory() {
        let pieces = Pieces { made: Arc::default(), panics_at: usize::MAX };
        let mut body = asked(&pieces).await;
        assert!(next(&mut body).await.unwrap().is_ok());
        // Whatever can come without anybody taking it has its turns.
        for _ in 0..10_000 {
            tokio::task::yield_now().await;
        }
        assert!(pieces.made.load(Ordering::SeqCst) <= FRAMES_AHEAD + 3);
        let mut came = 1;
        while let Some(frame) = next(&mut body).await {
            frame.unwrap();
            came += 1;
        }
        assert_eq!(came, PIECES);
    }

    #[tokio::test]
    async fn an_answer_that_ends_in_the_middle_is_no_short_object() {
        let mut body = asked(&Pieces { made: Arc::default(), panics_at: 3 }).await;
        for _ in 0..3 {
            assert!(next(&mut body).await.unwrap().is_ok());
        }
        assert!(next(&mut body).await.unwrap().is_err());
        assert!(next(&mut body).await.is_none());
    }
}
