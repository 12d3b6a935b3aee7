//! A query node: everything wired together, served, and stopped in order.
//!
//! States: starting (nothing is served; any error ends it) -> serving -> stopping (no statement begins; polled queries
//! fail; changes under way end, for at most [`SHUTDOWN_PATIENCE`]; the node leaves its cluster; connections close) -> stopped.
//!
//! In a metadata cluster the node registers itself, and as a worker looks after the tables of its shards ([`crate::upkeep`]), beside
//! serving: a cluster that is away keeps no query from cached pointers. Once another process was registered under its name, it has
//! failed ([`QueryNode::failed`]).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arrow_flight::flight_service_server::FlightServiceServer;
use lake_client::cache::CacheConfig;
use lake_client::catalog::appends;
use lake_client::metadata::Metadata;
use lake_client::remote::RemoteStore;
use lake_client::remote::node::NodeKeeper;
use lake_client::secret::Secret;
use lake_client::store::SharedStore;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Interceptor;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Status};

use crate::cluster::ThisNode;
use crate::config::{Config, NodeRole, default_id};
use crate::distributed::Distributed;
use crate::error::{Error, Result};
use crate::flight::MAX_REQUEST_BYTES;
use crate::flight::keys::TicketKeys;
use crate::flight::metrics::Metrics;
use crate::flight::operations::Operations;
use crate::flight::polls::Polls;
use crate::flight::served::Served;
use crate::flight::service::LakeFlight;
use crate::flight::whole::Whole;
use crate::outcomes;
use crate::probes::{self, Probed};
use crate::rest::{self, Rest};
use crate::sql::session::Sessions;
use crate::sql::transactions::Transactions;
use crate::sql::{Engine, once};
use crate::storage::Storage;
use crate::table::{TRANSACTIONS, Tables};
use crate::upkeep::{self, Upkeep};

/// How long stopping waits for changes under way, and then for connections.
pub const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(10);
/// How long stopping waits for the leader to take the node out of the registry.
const LEAVE_PATIENCE: Duration = Duration::from_secs(2);
/// How long stopping waits for what statements that nobody reads any more are computing, and for the rows of polled ones.
const COMPUTE_PATIENCE: Duration = Duration::from_secs(2);
/// An idle connection is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// A running query node.
#[derive(Debug)]
pub struct QueryNode {
    address: SocketAddr,
    rest_address: Option<SocketAddr>,
    http_address: Option<SocketAddr>,
    advertised: String,
    engine: Arc<Engine>,
    this: Arc<ThisNode>,
    operations: Arc<Operations>,
    polls: Arc<Polls>,
    transactions: Arc<Transactions>,
    stop: CancellationToken,
    server: JoinHandle<()>,
    /// In a metadata cluster: the way to it, and what keeps the node registered.
    cluster: Option<RemoteStore>,
    registered: Option<NodeKeeper>,
    /// Of a worker of one: what looks after the tables of its shards.
    upkeep: Option<JoinHandle<Infallible>>,
    failed: watch::Receiver<Option<Error>>,
}

impl QueryNode {
    /// Starts a node over `store`. When it returns, it serves.
    ///
    /// # Errors
    /// A warehouse that cannot be written, an address that cannot be had, a directory that cannot be made: each named.
    pub async fn start(config: Config, store: SharedStore) -> Result<QueryNode> {
        Self::start_over(config, store, None).await
    }

    /// Starts a node of a metadata cluster.
    ///
    /// # Errors
    /// As [`QueryNode::start`].
    pub async fn start_in_cluster(config: Config, cluster: RemoteStore) -> Result<QueryNode> {
        Self::start_over(config, Arc::new(cluster.clone()), Some(cluster)).await
    }

    async fn start_over(config: Config, store: SharedStore, cluster: Option<RemoteStore>) -> Result<QueryNode> {
        let keys = Arc::new(TicketKeys::new(store.clone()));
        let tables = tables(&config, store).await?;
        let engine = Arc::new(Engine::new(&config, tables)?.in_cluster(cluster.clone()));
        let operations = Arc::new(Operations::default());
        let (listener, address) = bind("listen", config.listen).await?;
        let rest = match config.rest_listen {
            Some(wanted) => Some(bind("rest_listen", wanted).await?),
            None => None,
        };
        let rest_address = rest.as_ref().map(|(_, address)| *address);
        let http = match config.http_listen {
            Some(wanted) => Some(bind("http_listen", wanted).await?),
            None => None,
        };
        let http_address = http.as_ref().map(|(_, address)| *address);
        let advertised = config.advertise.clone().unwrap_or_else(|| address.to_string());
        let transactions = Arc::new(Transactions::new(engine.tables().clone(), advertised.clone()));
        let sessions = Arc::new(Sessions::new(engine.clone(), transactions.clone()));
        let metrics = Arc::new(Metrics::new(config.slow_statement)?);
        let distributed = Distributed::new(&config, &engine, cluster.clone(), keys.clone())?;
        let parts = distributed.parts().clone();
        engine.distribute(distributed);
        let polls = Arc::new(Polls::new(engine.template().runtime_env().disk_manager.clone()));
        let flight = LakeFlight::new(sessions, operations.clone(), polls.clone(), keys, metrics.clone())?;
        let service = Served { flight, parts };
        let stop = CancellationToken::new();
        let (report, failed) = watch::channel(None);
        let rest = match rest {
            Some((listener, _)) => Some((listener, Arc::new(Rest::new(&config, engine.tables().clone())?))),
            None => None,
        };
        let probed = Probed { engine: engine.clone(), metrics, failed: failed.clone() };
        let http = http.map(|(listener, _)| (listener, probed));
        let chores = chores(engine.tables().clone(), transactions.clone());
        let served = Listeners { flight: (listener, service), rest, http };
        let server = tokio::spawn(serve(served, config.secret.clone(), chores, stop.clone(), report));
        let id = config.id.clone().unwrap_or_else(|| default_id(address.port()));
        tracing::info!(%id, %address, %advertised, warehouse = %config.warehouse, "the query node serves Flight SQL");
        let reached = rest_address.map(|address| address.to_string());
        let this = Arc::new(ThisNode::new(&config, advertised.clone(), reached, engine.clone()));
        let registered = cluster.clone().map(|cluster| NodeKeeper::start(cluster, &id, this.clone()));
        let upkeep = registered.as_ref().filter(|_| config.roles.contains(&NodeRole::Worker)).map(|registered| {
            let claim = upkeep::Worker {
                node: id.clone(),
                tenures: registered.tenures(),
                metadata: engine.tables().metadata.clone(),
                moves: this.moves().clone(),
            };
            tokio::spawn(Upkeep::new(engine.clone(), Arc::new(claim)).run(config.upkeep_interval))
        });
        if let Some(address) = rest_address {
            tracing::info!(%address, "the query node serves the Iceberg REST catalog");
        }
        Ok(QueryNode {
            address,
            rest_address,
            http_address,
            advertised,
            engine,
            this,
            operations,
            polls,
            transactions,
            stop,
            server,
            cluster,
            registered,
            upkeep,
            failed,
        })
    }

    /// Where Flight SQL is served.
    pub fn flight_address(&self) -> SocketAddr {
        self.address
    }

    /// Where the Iceberg REST catalog is served, if it is.
    pub fn rest_address(&self) -> Option<SocketAddr> {
        self.rest_address
    }

    /// Where probes and Prometheus are answered, if they are.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_address
    }

    /// Under which address clients are told to come.
    pub fn advertised_address(&self) -> &str {
        &self.advertised
    }

    /// From now on large queries are spread over these nodes (`host:port`), whatever the metadata cluster says.
    ///
    /// # Errors
    /// `Invalid`: one of them is no address.
    pub fn distribute_over(&self, nodes: &[String]) -> Result<()> {
        self.engine.distributed().map_or(Ok(()), |distributed| distributed.peers().name(nodes))
    }

    /// What runs the statements.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// This process as a leader sees it, for one that is in the same process.
    pub fn as_node(&self) -> Arc<ThisNode> {
        self.this.clone()
    }

    /// Returns when the node can serve no longer, with the reason. Cancel-safe.
    pub async fn failed(&self) -> Error {
        let mut failed = self.failed.clone();
        let server = async {
            match failed.wait_for(Option::is_some).await {
                Ok(error) => error.clone().unwrap_or_else(|| Error::internal("the server ended")),
                Err(_) => Error::internal("the server ended"),
            }
        };
        let superseded = async {
            match &self.registered {
                Some(registered) => Error::unavailable(registered.superseded().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            error = server => error,
            error = superseded => error,
        }
    }

    /// What keeps the node registered, in a metadata cluster.
    pub fn registered(&self) -> Option<&NodeKeeper> {
        self.registered.as_ref()
    }

    /// No upkeep begins any more. A commit that is under way runs to its end, and is waited for with the others.
    fn stop_upkeep(&self) {
        if let Some(upkeep) = &self.upkeep {
            upkeep.abort();
        }
    }

    /// Stops: no statement begins, changes under way end (for at most [`SHUTDOWN_PATIENCE`]), connections close.
    pub async fn shutdown(mut self) {
        self.engine.close();
        self.polls.stop();
        self.stop_upkeep();
        let changes = async {
            self.operations.close().await;
            self.transactions.close().await;
            self.engine.tables().close().await;
        };
        if tokio::time::timeout(SHUTDOWN_PATIENCE, changes).await.is_err() {
            tracing::warn!("changes were still under way when the query node stopped; whether they are made is open");
        }
        if let Some(registered) = self.registered.take() {
            registered.leave(LEAVE_PATIENCE).await;
        }
        self.stop.cancel();
        if tokio::time::timeout(SHUTDOWN_PATIENCE, &mut self.server).await.is_err() {
            tracing::warn!("clients were still reading when the query node stopped");
        }
        if tokio::time::timeout(COMPUTE_PATIENCE, self.polls.close()).await.is_err() {
            tracing::warn!("the rows of polled queries were still being kept when the query node stopped");
        }
        self.engine.stop_computing(COMPUTE_PATIENCE).await;
        if let Some(cluster) = &self.cluster {
            cluster.leave().await;
        }
    }
}

impl Drop for QueryNode {
    /// Without [`QueryNode::shutdown`] nobody waits; the server still ends.
    fn drop(&mut self) {
        self.stop.cancel();
        self.stop_upkeep();
        self.polls.abandon();
        self.server.abort();
    }
}

/// The tables of a store, in the warehouse that is configured.
///
/// # Errors
/// A warehouse that cannot be written.
pub(crate) async fn tables(config: &Config, store: SharedStore) -> Result<Arc<Tables>> {
    let storage = Storage::new(config.warehouse.clone(), config.s3.clone());
    storage.check().await?;
    let ages = CacheConfig {
        max_tables: config.pointer_cache_entries,
        refresh_after: config.pointer_ttl / 2,
        fresh_for: config.pointer_ttl,
        // Another node may just have created it, and its client be sent here.
        absent_for: Duration::ZERO,
        stale_limit: config.pointer_stale_limit,
        ..CacheConfig::default()
    };
    let metadata = Metadata::new(store, ages);
    Ok(Tables::new(storage, config.metadata_cache_bytes, metadata, config.target_file_bytes))
}

/// Listens on an address; says which it is.
async fn bind(field: &str, wanted: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(wanted).await.map_err(|e| {
        let hint = match e.kind() {
            std::io::ErrorKind::AddrInUse => format!("; another process uses it, choose another with {field}"),
            _ => String::new(),
        };
        Error::invalid(format!("listening on {wanted}: {e}{hint}"))
    })?;
    let address = listener
        .local_addr()
        .map_err(|e| Error::internal(format!("reading the address listened on ({wanted}): {e}")))?;
    Ok((listener, address))
}

/// What has to be looked after from time to time, until it is dropped.
async fn chores(tables: Arc<Tables>, transactions: Arc<Transactions>) -> Infallible {
    // Those of appends go once they are read, unless their nodes are gone.
    let domains = [once::DOMAIN, once::TICKETS, TRANSACTIONS, appends::DOMAIN];
    let outcomes = outcomes::sweep(&tables.writer, &domains, outcomes::LIFETIME);
    tokio::select! {
        never = transactions.watch() => never,
        never = outcomes => never,
        never = tables.follow_warehouses() => never,
    }
}

/// What is served, and where.
struct Listeners {
    flight: (TcpListener, Served),
    rest: Option<(TcpListener, Arc<Rest>)>,
    http: Option<(TcpListener, Probed)>,
}

/// Serves all that the node serves until it is told to stop, or one of it fails.
async fn serve(
    Listeners { flight: (listener, service), rest, http }: Listeners,
    secret: Option<Secret>,
    chores: impl Future<Output = Infallible>,
    stop: CancellationToken,
    report: watch::Sender<Option<Error>>,
) {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<FlightServiceServer<Served>>().await;
    let flight = FlightServiceServer::new(service)
        .max_decoding_message_size(MAX_REQUEST_BYTES)
        .max_encoding_message_size(usize::MAX);
    let flight = tonic::service::interceptor::InterceptedService::new(flight, RequireSecret { secret });
    // The builder's own nodelay does not reach connections of a listener that was bound outside of it.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let flight = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .add_service(health_service)
        .add_service(Whole(flight))
        .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
    // Probes are answered for as long as a statement may still be running.
    let drained = CancellationToken::new();
    let flight = async {
        let served = flight.await;
        drained.cancel();
        served.map_err(|e| Error::internal(format!("serving Flight SQL: {}", crate::error::with_sources(&e))))
    };
    let rest = async {
        if let Some((listener, rest)) = rest {
            rest::serve(rest, listener, stop.clone()).await;
        }
        Ok::<(), Error>(())
    };
    let http = async {
        match http {
            Some((listener, probed)) => probes::serve(probed, listener, drained.clone())
                .await
                .map_err(|e| Error::internal(format!("serving probes: {e}"))),
            None => Ok(()),
        }
    };
    let served = tokio::select! {
        served = async { tokio::try_join!(flight, rest, http) } => served,
        never = chores => match never {},
    };
    let reason = match served {
        Err(error) => error,
        Ok(_) => Error::unavailable("the query node was stopped"),
    };
    if !stop.is_cancelled() {
        tracing::error!(%reason, "the query node serves no longer");
    }
    report.send_replace(Some(reason));
}

/// Lets only those pass who know the secret, if there is one.
#[derive(Clone)]
struct RequireSecret {
    secret: Option<Secret>,
}

impl Interceptor for RequireSecret {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let Some(secret) = &self.secret else { return Ok(request) };
        let header = request.metadata().get("authorization");
        match header.is_some_and(|header| secret.matches_bearer(header.as_bytes())) {
            true => Ok(request),
            false => Err(Status::unauthenticated("this query node needs the cluster's secret as a bearer token")),
        }
    }
}
