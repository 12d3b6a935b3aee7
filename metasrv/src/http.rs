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
//! Limits: [`MAX_CONNECTIONS`], of which each host has its part ([`crate::peer::shares`]); one more is closed at once.

pub mod admin;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use lake_client::secret::Secret;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::accepting::Counted;
use crate::metrics;
use crate::peer::Peer;
use crate::peer::shares::{Callers, Pool, Resource};

/// Connections at once.
pub const MAX_CONNECTIONS: usize = 256;

/// Whoever asks, each with its share.
struct Probes {
    listener: TcpListener,
    callers: Callers,
    pool: Pool,
}

impl Listener for Probes {
    type Io = Counted<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (io, address) = Listener::accept(&mut self.listener).await;
            match self.pool.take(&self.callers.at(Some(address)), 1) {
                Ok(share) => return (Counted::new(io, share), address),
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
