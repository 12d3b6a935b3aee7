//! What a peer says of itself over HTTP, for probes and for Prometheus.
//!
//! - `/live`: 200 while the process can do its work or can come to do it by itself. A supervisor may restart a peer that
//!   is not live. Elections, a lost quorum, a full disk and recovery are no reason for that: restarting a healthy peer in
//!   the middle of an election only prolongs it.
//! - `/ready`: 200 if the peer serves linearizable reads and knows of a leader to send writes to; else 503 with the reason.
//! - `/metrics`: Prometheus' text format.
//!
//! Nothing of that needs the cluster secret, and none of it can change anything; keys and values do not appear. [`admin`] is for operators,
//! and asks for the secret. Listens only where `http_listen` says.
//!
//! Limits: [`MAX_CONNECTIONS`], of which each host has its part ([`crate::peer::shares`]); one more is closed at once. One on
//! which nothing moves for [`IDLE`] is ended, so that those who hold theirs open do not keep their host's probes away: a peer that
//! does not answer them would be restarted.

pub mod admin;

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
use lake_client::secret::Secret;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use crate::accepting::Counted;
use crate::metrics;
use crate::peer::Peer;
use crate::peer::shares::{Callers, Pool, Resource};

/// Connections at once.
pub const MAX_CONNECTIONS: usize = 256;
/// How long nothing may move on a connection.
pub const IDLE: Duration = Duration::from_secs(60);

/// Whoever asks, each with its share.
struct Probes {
    listener: TcpListener,
    callers: Callers,
    pool: Pool,
}

impl Listener for Probes {
    type Io = Lively<Counted<TcpStream>>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (io, address) = Listener::accept(&mut self.listener).await;
            match self.pool.take(&self.callers.at(Some(address)), 1) {
                Ok(share) => return (Lively::new(Counted::new(io, share)), address),
                Err(refused) => {
                    tracing::debug!(%address, "{refused} has as many connections for probes as it may have")
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection that fails once nothing has moved on it for too long.
struct Lively<IO> {
    io: IO,
    /// Ends then.
    silence: Pin<Box<Sleep>>,
}

impl<IO> Lively<IO> {
    fn new(io: IO) -> Self {
        Self { io, silence: Box::pin(tokio::time::sleep(IDLE)) }
    }

    /// What came of moving something.
    fn moved<T>(&mut self, what: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if what.is_pending() {
            return self.silence.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()));
        }
        self.silence.as_mut().reset(tokio::time::Instant::now() + IDLE);
        what
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Lively<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = Pin::new(&mut this.io).poll_read(cx, buf);
        this.moved(read, cx)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Lively<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write(cx, buf);
        this.moved(written, cx)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Serves until it is told to stop.
///
/// # Errors
/// The listener fails.
pub async fn serve(
    peer: Arc<Peer>,
    listener: TcpListener,
    secret: Option<Secret>,
    stop: CancellationToken,
) -> io::Result<()> {
    let pool = Pool::new(Resource::Probes, MAX_CONNECTIONS);
    let probes = Probes { listener, callers: peer.callers.clone(), pool };
    let router: Router = Router::new()
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/metrics", get(report))
        .with_state(peer.clone());
    axum::serve(probes, router.merge(admin::router(peer, secret))).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn live(State(peer): State<Arc<Peer>>) -> Response {
    match &*peer.failed().borrow() {
        None => (StatusCode::OK, "live\n").into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn ready(State(peer): State<Arc<Peer>>) -> Response {
    match not_ready(&peer) {
        None => (StatusCode::OK, "ready\n").into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

fn not_ready(peer: &Peer) -> Option<String> {
    if let Some(why) = &*peer.failed().borrow() {
        return Some(why.clone());
    }
    let member = match peer.serving() {
        Ok(member) => member,
        Err(fresh) => return Some(fresh.message),
    };
    if let Some(problem) = member.problem() {
        return Some(problem);
    }
    if !*member.recovered().borrow() {
        return Some("recovering what was applied before the start".to_owned());
    }
    member.view.leader_id().is_none().then(|| "no leader is known".to_owned())
}

async fn report(State(peer): State<Arc<Peer>>) -> Response {
    match metrics::text(&peer) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("gathering the metrics: {e}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_on_which_nothing_moves_is_ended() {
        let (mut near, far) = tokio::io::duplex(4);
        let mut lively = Lively::new(far);
        let mut got = [0; 3];
        near.write_all(b"GET").await.unwrap();
        tokio::time::advance(IDLE / 2).await;
        lively.read_exact(&mut got).await.unwrap();
        tokio::time::advance(IDLE / 2).await;
        near.write_all(b" /l").await.unwrap();
        lively.read_exact(&mut got).await.unwrap();
        assert_eq!(lively.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let unread = lively.write_all(b"live\n").await.unwrap_err();
        assert_eq!(unread.kind(), io::ErrorKind::TimedOut, "an answer that is not taken");
    }
}
