//! What a query node says of itself over HTTP, for probes and for Prometheus: beside Flight SQL, where `http_listen` says.
//!
//! - `/live`: 200 while the process can do its work. A supervisor may restart a node that is not live. A metadata cluster that
//!   is away is no reason for that: what is cached is served on.
//! - `/ready`: 200 if the node takes statements; 503 from the moment that it is asked to stop, so that load balancers send no more.
//! - `/metrics`: Prometheus' text format ([`crate::flight::metrics`]).
//!
//! Nothing here needs the secret, and nothing can change anything; names, texts and rows do not appear. At most
//! [`MAX_CONNECTIONS`] at once; one more waits. One on which nothing moves for [`IDLE`] is ended, so that those who hold theirs open
//! do not keep probes away: a node that does not answer them would be restarted.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::flight::metrics::Metrics;
use crate::sql::Engine;

/// Connections at once.
pub const MAX_CONNECTIONS: usize = 256;

/// How long nothing may move on a connection.
pub const IDLE: Duration = Duration::from_secs(60);

/// Whoever may be asked.
#[derive(Debug, Clone)]
pub struct Probed {
    pub engine: Arc<Engine>,
    pub metrics: Arc<Metrics>,
    /// Why the node serves no longer.
    pub failed: watch::Receiver<Option<Error>>,
}

/// Serves until it is told to stop.
///
/// # Errors
/// The listener fails.
pub async fn serve(probed: Probed, listener: TcpListener, stop: CancellationToken) -> io::Result<()> {
    let router = Router::new()
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/metrics", get(report))
        .with_state(probed);
    let listener = Bounded { listener, slots: Arc::new(Semaphore::new(MAX_CONNECTIONS)) };
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

fn says(why: Option<String>, well: &'static str) -> Response {
    match why {
        None => (StatusCode::OK, well).into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn live(State(probed): State<Probed>) -> Response {
    says(probed.failed.borrow().as_ref().map(ToString::to_string), "live\n")
}

async fn ready(State(probed): State<Probed>) -> Response {
    let failed = probed.failed.borrow().as_ref().map(ToString::to_string);
    let stopping = probed.engine.is_closed().then(|| "the node is stopping, and takes no more statements".to_owned());
    says(failed.or(stopping), "ready\n")
}

async fn report(State(probed): State<Probed>) -> Response {
    match probed.metrics.text(&probed.engine) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")).into_response(),
    }
}

/// Accepts as many connections as there are slots.
struct Bounded {
    listener: TcpListener,
    slots: Arc<Semaphore>,
}

/// A connection in its slot.
struct Slotted<S = TcpStream> {
    stream: S,
    /// Ends when nothing has moved for too long.
    silence: Pin<Box<Sleep>>,
    /// `None` only if the slots are closed, which nobody does.
    _slot: Option<OwnedSemaphorePermit>,
}

impl<S> Slotted<S> {
    fn new(stream: S, slot: Option<OwnedSemaphorePermit>) -> Self {
        Self { stream, silence: Box::pin(tokio::time::sleep(IDLE)), _slot: slot }
    }

    /// What came of moving something; an error once nothing has moved for too long.
    fn moved<T>(&mut self, what: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        match what {
            Poll::Pending => self.silence.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into())),
            ready => {
                self.silence.as_mut().reset(tokio::time::Instant::now() + IDLE);
                ready
            }
        }
    }
}

impl Listener for Bounded {
    type Io = Slotted;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Slotted, SocketAddr) {
        let slot = self.slots.clone().acquire_owned().await.ok();
        let (stream, address) = Listener::accept(&mut self.listener).await;
        (Slotted::new(stream, slot), address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Slotted<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.moved(read, cx)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Slotted<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.moved(written, cx)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_on_which_nothing_moves_is_ended() {
        let (mut near, far) = tokio::io::duplex(4);
        let mut slotted = Slotted::new(far, None);
        let mut got = [0; 3];
        near.write_all(b"GET").await.unwrap();
        tokio::time::advance(IDLE / 2).await;
        slotted.read_exact(&mut got).await.unwrap();
        tokio::time::advance(IDLE / 2).await;
        near.write_all(b" /l").await.unwrap();
        slotted.read_exact(&mut got).await.unwrap();
        assert_eq!(slotted.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let unread = slotted.write_all(b"live\n").await.unwrap_err();
        assert_eq!(unread.kind(), io::ErrorKind::TimedOut, "an answer that is not taken");
    }
}
