//! A peer as a process runs it: two listeners, one for clients and one for the other peers.
//!
//! Start: take and open the data directory, bind both addresses, start the peer, serve. Stop, in this order: health says
//! no, a leader hands over, running calls get [`DRAIN`] to end, the core ends, the log closes, the directory is free.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use lake_client::dial::Dialer;
use lake_client::secret::Secret;
use lake_proto::MAX_MESSAGE_BYTES;
use lake_proto::v1::cluster_server::ClusterServer;
use lake_proto::v1::leases_server::LeasesServer;
use lake_proto::v1::nodes_server::NodesServer;
use lake_proto::v1::quotas_server::QuotasServer;
use lake_proto::v1::raft_server::RaftServer;
use lake_proto::v1::scopes_server::ScopesServer;
use lake_proto::v1::sessions_server::SessionsServer;
use lake_proto::v1::shards_server::ShardsServer;
use lake_proto::v1::snapshots_server::SnapshotsServer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::server::{Connected, TcpIncoming};
use tonic_health::ServingStatus;

use crate::accepting;
use crate::config::Config;
use crate::error::Error;
use crate::http;
use crate::peer::shares::{Pool, Resource};
use crate::peer::{Opened, Peer, Settings, joining};
use crate::raft::network::Transport;
use crate::services::CheckSecret;
use crate::services::cluster::ClusterService;
use crate::services::counting::Counting;
use crate::services::kv::{KvService, KvServing};
use crate::services::leases::LeasesService;
use crate::services::nodes::NodesService;
use crate::services::quotas::QuotasService;
use crate::services::raft::RaftService;
use crate::services::scopes::ScopesService;
use crate::services::sessions::SessionsService;
use crate::services::shards::ShardsService;
use crate::services::snapshots::SnapshotsService;
use crate::services::streams::Streams;
use crate::services::watch::WatchServer;

/// How long running calls may go on when the server stops.
pub const DRAIN: Duration = Duration::from_secs(2);
/// A connection of another peer that is silent for so long is probed, and closed if that is not answered within as long.
const PROBES_PEERS: Duration = Duration::from_secs(5);
/// How long one of a client is silent until it is probed, and closed after [`PROBES_PEERS`] more. Of a thousand query nodes each has one that
/// is always silent, beside that of its heartbeats.
const PROBES_CLIENTS: Duration = Duration::from_secs(20);
/// Calls under way on one connection. A caller that has more waits with the rest at its own side.
pub const MAX_STREAMS: u32 = 16_384;

type Serving = tonic::transport::server::Router;

/// A running peer. Stop it with [`Server::shutdown`]; dropping it leaves the stopping to the runtime's end.
pub struct Server {
    peer: Arc<Peer>,
    grpc_address: SocketAddr,
    raft_address: SocketAddr,
    http_address: Option<SocketAddr>,
    failed: watch::Receiver<Option<String>>,
    health: tonic_health::server::HealthReporter,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

/// An address that is listened on, and who connects to it.
pub struct Listening<S> {
    pub address: SocketAddr,
    pub incoming: S,
}

/// What a server stands on: a peer's data, who connects to it, and how it connects to others.
pub struct Ground<S> {
    pub opened: Opened,
    pub clients: Listening<S>,
    pub peers: Listening<S>,
    /// Where probes are answered, if anywhere.
    pub http: Option<TcpListener>,
    pub dialer: Dialer,
}

impl Server {
    /// Starts a peer.
    ///
    /// # Errors
    /// A configuration that contradicts itself, a directory that is in use, of another peer or damaged, an address that
    /// cannot be listened on.
    pub async fn start(config: Config) -> Result<Self, Error> {
        config.validate()?;
        let clients = listen("clients (listen)", config.listen).await?;
        let peers = listen("peers (raft_listen)", config.raft_listen).await?;
        let http = match config.http_listen {
            Some(listen) => Some(bind("probes (http_listen)", listen).await?),
            None => None,
        };
        let opened = Opened::open(config.dir.clone(), Some(config.id), &Settings::from(&config)).await?;
        Self::start_on(config, Ground { opened, clients, peers, http, dialer: Dialer::default() }).await
    }

    /// Starts a peer on data that is open, between connections that come and go in any way.
    ///
    /// # Errors
    /// When the consensus core does not start.
    pub async fn start_on<S, IO>(config: Config, ground: Ground<S>) -> Result<Self, Error>
    where
        S: Stream<Item = io::Result<IO>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let Ground { opened, clients, peers, http, dialer } = ground;
        let (grpc_address, raft_address) = (clients.address, peers.address);
        let http_address = http.as_ref().map(bound).transpose()?;
        let advertised =
            |advertise: &Option<String>, bound: SocketAddr| advertise.clone().unwrap_or_else(|| bound.to_string());
        let peer = Peer::start(
            opened,
            advertised(&config.raft_advertise, raft_address),
            advertised(&config.advertise, grpc_address),
            Settings::from(&config),
            Transport::new(config.peers.clone(), config.secret.as_ref()).dialing(dialer),
        )
        .await?;

        let secret = CheckSecret::new(config.secret.as_ref());
        let stop = CancellationToken::new();
        let streams = Streams::new(stop.child_token(), peer.untaken.clone());
        let mut tasks = JoinSet::new();
        let (health, health_service) = tonic_health::server::health_reporter();
        set_health(&health, ServingStatus::NotServing).await;
        let kv = KvServing::new(KvService::new(peer.clone(), streams.clone()));
        let client_services = builder(PROBES_CLIENTS)
            .add_service(health_service)
            .add_service(counted(kv, &peer, &secret))
            .add_service(counted(LeasesServer::new(LeasesService::new(peer.clone(), streams.clone())), &peer, &secret))
            .add_service(counted(
                SessionsServer::new(SessionsService::new(peer.clone(), streams.clone())),
                &peer,
                &secret,
            ))
            .add_service(counted(ScopesServer::new(ScopesService::new(peer.clone())), &peer, &secret))
            .add_service(counted(QuotasServer::new(QuotasService::new(peer.clone())), &peer, &secret))
            .add_service(counted(NodesServer::new(NodesService::new(peer.clone(), streams.clone())), &peer, &secret))
            .add_service(counted(ShardsServer::new(ShardsService::new(peer.clone())), &peer, &secret))
            .add_service(counted(WatchServer::new(peer.clone()), &peer, &secret))
            .add_service(counted(
                SnapshotsServer::new(SnapshotsService::new(peer.clone(), streams.clone())),
                &peer,
                &secret,
            ))
            .add_service(ClusterServer::with_interceptor(
                ClusterService::new(peer.clone(), stop.child_token()),
                secret.clone(),
            ));
        let raft_service = RaftServer::new(RaftService::new(peer.clone(), stop.child_token()))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let peer_services = builder(PROBES_PEERS).add_service(InterceptedService::new(raft_service, secret));
        let ended = watch::Sender::new(None);
        let pool = Pool::new(Resource::Connections, accepting::max_connections());
        let clients = accepting::accept("clients", clients.incoming, peer.callers.clone(), pool);
        tasks.spawn(serve("clients", client_services, clients, stop.clone(), ended.clone()));
        let pool = Pool::new(Resource::PeerConnections, accepting::MAX_PEER_CONNECTIONS);
        let peers = accepting::accept("other peers", peers.incoming, peer.callers.clone(), pool);
        tasks.spawn(serve("peers", peer_services, peers, stop.clone(), ended.clone()));
        tasks.spawn(report_health(peer.clone(), health.clone(), stop.clone()));
        tasks.spawn(watch_failure(peer.failed(), ended.clone(), stop.clone()));
        tasks.spawn(end_streams(streams, stop.clone()));
        if let Some(http) = http {
            tasks.spawn(serve_http(peer.clone(), http, config.secret.clone(), stop.clone(), ended.clone()));
        }
        if !config.join.is_empty() {
            let (join, secret) = (config.join.clone(), config.secret.clone());
            tasks.spawn(joining::ask_to_join(peer.clone(), join, secret, ended.clone(), stop.clone()));
        }
        tracing::info!(
            peer = config.id, dir = %config.dir.display(), grpc = %grpc_address, raft = %raft_address,
            "the metadata peer is up"
        );
        Ok(Self { peer, grpc_address, raft_address, http_address, failed: ended.subscribe(), health, stop, tasks })
    }

    /// The peer.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Where it listens for clients.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc_address
    }

    /// Where it listens for probes, if it does.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_address
    }

    /// Where it listens for the other peers.
    pub fn raft_address(&self) -> SocketAddr {
        self.raft_address
    }

    /// Resolves once the peer cannot go on; the process must then end with an error.
    pub fn failed(&self) -> impl Future<Output = Error> + Send + 'static {
        crate::peer::until_failed(self.failed.clone())
    }

    /// Stops the peer; returns when its directory and addresses are free.
    pub async fn shutdown(mut self) {
        set_health(&self.health, ServingStatus::NotServing).await;
        if let Some(member) = self.peer.member() {
            member.hand_over().await;
            member.watches.close();
        }
        self.stop.cancel();
        let drained = tokio::time::timeout(DRAIN, async { while self.tasks.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!("calls are still running after {} s: cutting them off", DRAIN.as_secs());
            self.tasks.shutdown().await;
        }
        self.peer.shutdown().await;
        tracing::info!(peer = self.peer.identity.id, "the metadata peer is down");
    }
}

/// A service for clients, its answers counted, behind the check of the secret.
fn counted<S>(service: S, peer: &Peer, secret: &CheckSecret) -> InterceptedService<Counting<S>, CheckSecret> {
    InterceptedService::new(Counting::new(service, peer), secret.clone())
}

/// How HTTP/2 is spoken, with a probe so often where nothing is heard.
pub(crate) fn builder(probes: Duration) -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(probes))
        .http2_keepalive_timeout(Some(PROBES_PEERS))
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(8 << 20)
        .max_concurrent_streams(MAX_STREAMS)
}

async fn listen(what: &'static str, address: SocketAddr) -> Result<Listening<TcpIncoming>, Error> {
    let listener = bind(what, address).await?;
    let address = bound(&listener)?;
    // The builder's own nodelay does not reach connections of a listener that was bound outside of it.
    Ok(Listening { address, incoming: TcpIncoming::from(listener).with_nodelay(Some(true)) })
}

async fn bind(what: &'static str, address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address).await.map_err(|source| Error::Listen { what, address: address.to_string(), source })
}

fn bound(listener: &TcpListener) -> Result<SocketAddr, Error> {
    listener.local_addr().map_err(Error::io("asking for the bound address"))
}

async fn serve<S, IO>(
    what: &'static str,
    router: Serving,
    incoming: S,
    stop: CancellationToken,
    failed: watch::Sender<Option<String>>,
) where
    S: Stream<Item = io::Result<IO>> + Send + 'static,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    if let Err(e) = router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await {
        failed.send_replace(Some(format!("serving {what}: {e}")));
    }
}

async fn serve_http(
    peer: Arc<Peer>,
    listener: TcpListener,
    secret: Option<Secret>,
    stop: CancellationToken,
    failed: watch::Sender<Option<String>>,
) {
    if let Err(e) = http::serve(peer, listener, secret, stop).await {
        failed.send_replace(Some(format!("serving probes and operators: {e}")));
    }
}

async fn set_health(health: &tonic_health::server::HealthReporter, status: ServingStatus) {
    for service in ["", "lake.v1.Kv", "lake.v1.Watch", "lake.v1.Cluster"] {
        health.set_service_status(service, status).await;
    }
}

/// Says "serving" while the peer is a member that has recovered and has no problem.
async fn report_health(peer: Arc<Peer>, health: tonic_health::server::HealthReporter, stop: CancellationToken) {
    let mut serving = false;
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let now = peer.member().is_some_and(|member| *member.recovered().borrow() && member.problem().is_none());
        if now != serving {
            serving = now;
            set_health(&health, if now { ServingStatus::Serving } else { ServingStatus::NotServing }).await;
        }
    }
}

/// Waits for the streams' tasks once the server stops.
async fn end_streams(streams: Streams, stop: CancellationToken) {
    stop.cancelled().await;
    streams.ended().await;
}

/// Passes on what ended the peer.
async fn watch_failure(
    mut failed: watch::Receiver<Option<String>>,
    ended: watch::Sender<Option<String>>,
    stop: CancellationToken,
) {
    tokio::select! {
        () = stop.cancelled() => {}
        what = failed.wait_for(Option::is_some) => {
            if let Ok(what) = what {
                tracing::error!("this peer has to stop: {}", what.as_deref().unwrap_or_default());
                ended.send_replace(what.clone());
            }
        }
    }
}
