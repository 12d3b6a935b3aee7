//! What the leader coordinates, over HTTP: nodes, shards and procedures, in lists and one by one, and what an operator may have done about
//! them, also as dry runs. The answers are JSON. docs/src/monitoring.md has the paths.
//!
//! It takes what the gRPC services take: the cluster secret, if there is one, as `Authorization: Bearer`. A request that a web page has
//! sent (it has an `Origin`) is refused, so that none that an operator looks at gives orders to a peer without a secret.
//!
//! Lists of nodes and shards, and all that changes something, are the leader's: another peer answers 421 and says who leads. Limits:
//! a request has [`DEFAULT_DEADLINE`]; connections are [`super::MAX_CONNECTIONS`], with the probes'.

mod procedures;

use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRequestParts, Path, RawQuery};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use lake_client::catalog::CatalogError;
use lake_client::clock;
use lake_client::drains;
use lake_client::nodes::{NodeStatus, PING};
use lake_client::procedures::kept;
use lake_client::secret::Secret;
use lake_client::store;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use serde::Serialize;

use crate::embedded::EmbeddedStore;
use crate::peer::Peer;
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::shares::Call;
use crate::services::DEFAULT_DEADLINE;

/// Whose coordination it is, and what opens the door.
#[derive(Clone)]
struct Admin {
    peer: Arc<Peer>,
    secret: Option<Secret>,
}

/// The paths.
pub fn router(peer: Arc<Peer>, secret: Option<Secret>) -> Router {
    Router::new()
        .route("/v1/nodes", get(nodes))
        .route("/v1/nodes/{node}", get(node))
        .route("/v1/nodes/{node}/ping", post(ping))
        .route("/v1/nodes/{node}/drain/{state}", post(drain))
        .route("/v1/drained", get(drained))
        .route("/v1/shards", get(shards))
        .route("/v1/shards/{shard}", get(shard))
        .route("/v1/shards/{shard}/move/{node}", post(move_shard))
        .route("/v1/shards/balance", post(balance))
        .route("/v1/shards/maintenance/{state}", post(maintenance))
        .route("/v1/procedures", get(procedures::procedures))
        .route("/v1/procedures/start/{what}/{namespace}/{table}", post(procedures::start))
        .route("/v1/procedures/purge-warehouse/{warehouse}", post(procedures::purge_warehouse))
        .route("/v1/procedures/{id}", get(procedures::procedure))
        .route("/v1/procedures/{id}/cancel", post(procedures::cancel))
        .route("/v1/procedures/{id}/clear/{how}", post(procedures::clear))
        .with_state(Admin { peer, secret })
}

/// Why nothing was done.
struct Refused {
    code: StatusCode,
    kind: &'static str,
    message: String,
    leader: Option<String>,
}

impl Refused {
    fn new(code: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { code, kind, message: message.into(), leader: None }
    }

    fn not_found(message: String) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NOT_FOUND", message)
    }

    fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Kind::InvalidArgument.as_str_name(), message)
    }
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        let code = match failure.kind {
            Kind::NotLeader => StatusCode::MISDIRECTED_REQUEST,
            Kind::InvalidArgument => StatusCode::BAD_REQUEST,
            Kind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let leader = failure.leader.map(|leader| leader.grpc_address);
        Self { leader, ..Self::new(code, failure.kind.as_str_name(), failure.message) }
    }
}

impl From<store::Error> for Refused {
    fn from(error: store::Error) -> Self {
        match &error {
            store::Error::Refused { .. } => Self::invalid(error.to_string()),
            error if error.is_unavailable() => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, Kind::Unavailable.as_str_name(), error.to_string())
            }
            error => Self::new(StatusCode::INTERNAL_SERVER_ERROR, Kind::Internal.as_str_name(), error.to_string()),
        }
    }
}

impl From<CatalogError> for Refused {
    fn from(error: CatalogError) -> Self {
        match error {
            CatalogError::Store(error) => error.into(),
            error if error.applied() == store::Applied::Unknown => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, Kind::Internal.as_str_name(), error.to_string())
            }
            error => Self::invalid(error.to_string()),
        }
    }
}

#[derive(Serialize)]
struct Told<'a> {
    error: &'a str,
    kind: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    leader: Option<&'a str>,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let told = Told { error: &self.message, kind: self.kind, leader: self.leader.as_deref() };
        (self.code, Json(&told)).into_response()
    }
}

/// An answer in JSON.
struct Json<T>(T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], format!("{}\n", kept(&self.0))).into_response()
    }
}

type Answer<T> = Result<Json<T>, Refused>;

/// A request that may be answered.
struct Allowed {
    member: Arc<Member>,
    peer: Arc<Peer>,
    call: Call,
    /// Only what would be done is to be told.
    dry_run: bool,
    /// Only what has not ended is to be told.
    active: bool,
}

impl FromRequestParts<Admin> for Allowed {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, admin: &Admin) -> Result<Self, Refused> {
        if parts.headers.contains_key(header::ORIGIN) {
            let message = "web pages may ask for nothing here";
            return Err(Refused::new(StatusCode::FORBIDDEN, "FORBIDDEN", message));
        }
        if let Some(secret) = &admin.secret {
            let given = parts.headers.get(header::AUTHORIZATION);
            if !given.is_some_and(|given| secret.matches_bearer(given.as_bytes())) {
                let message = "the peers have a cluster secret: give it as `Authorization: Bearer SECRET`";
                return Err(Refused::new(StatusCode::UNAUTHORIZED, Kind::Unauthenticated.as_str_name(), message));
            }
        }
        let member = admin.peer.serving()?;
        let peer = admin.peer.clone();
        let call = Call { caller: peer.callers.at(None), deadline: clock::now() + DEFAULT_DEADLINE };
        let mut allowed = Self { member, peer, call, dry_run: false, active: false };
        let Ok(RawQuery(query)) = RawQuery::from_request_parts(parts, admin).await;
        for flag in query.iter().flat_map(|query| query.split('&')).filter(|flag| !flag.is_empty()) {
            match flag {
                "dry_run=true" => allowed.dry_run = true,
                "dry_run=false" => {}
                "active=true" => allowed.active = true,
                "active=false" => {}
                other => {
                    let message =
                        format!("there is no parameter {other:?} here: dry_run and active may be true or false");
                    return Err(Refused::invalid(message));
                }
            }
        }
        Ok(allowed)
    }
}

impl Allowed {
    /// The map, as whoever is in this process changes it.
    fn store(&self) -> EmbeddedStore {
        EmbeddedStore::of(self.peer.clone(), self.member.clone())
    }

    /// The same, if this peer leads: what it proposes is committed.
    async fn leading_store(&self) -> Result<EmbeddedStore, Refused> {
        self.member.confirmed_on_duty(&self.call.caller).await?;
        Ok(self.store())
    }
}

// ---- nodes ----------------------------------------------------------------------------------------------------

#[derive(Serialize)]
struct Node {
    node: String,
    state: &'static str,
    process: String,
    epoch: u64,
    lease: u64,
    lease_left_ms: Option<u64>,
    silent_ms: Option<u64>,
    connected: bool,
    roles: Vec<String>,
    flight_address: String,
    rest_address: String,
    version: String,
    load: Option<Load>,
}

#[derive(Serialize)]
struct Load {
    running_statements: u32,
    max_statements: u32,
    cpu_millicores: u32,
    cache_bytes: u64,
    observed_revision: u64,
    procedures: Vec<String>,
}

impl From<v1::NodeStatus> for Node {
    fn from(status: v1::NodeStatus) -> Self {
        let (lease_left_ms, silent_ms) = (status.remaining_ms, status.silent_ms);
        let status = NodeStatus::from(status);
        let state = status.state().as_str();
        let NodeStatus { node, process, epoch, lease, connected, info, load, .. } = status;
        let max_statements = info.max_statements;
        let load = load.map(|load| Load {
            running_statements: load.running_statements,
            max_statements,
            cpu_millicores: load.cpu_millicores,
            cache_bytes: load.cache_bytes,
            observed_revision: load.observed_revision,
            procedures: load.procedures,
        });
        let v1::NodeInfo { roles, flight_address, rest_address, version, .. } = info;
        Self {
            node,
            state,
            process,
            epoch,
            lease,
            lease_left_ms,
            silent_ms,
            connected,
            roles,
            flight_address,
            rest_address,
            version,
            load,
        }
    }
}

#[derive(Serialize)]
struct Nodes {
    revision: u64,
    nodes: Vec<Node>,
}

async fn nodes(allowed: Allowed) -> Answer<Nodes> {
    let (revision, nodes) = allowed.member.list_nodes(&allowed.call).await?;
    Ok(Json(Nodes { revision, nodes: nodes.into_iter().map(Node::from).collect() }))
}

async fn node(allowed: Allowed, Path(name): Path<String>) -> Answer<Node> {
    let (_, nodes) = allowed.member.list_nodes(&allowed.call).await?;
    let found = nodes.into_iter().find(|node| node.node == name);
    found.map(|node| Json(node.into())).ok_or_else(|| no_node(&name))
}

fn no_node(name: &str) -> Refused {
    Refused::not_found(format!("no node {name:?} is registered"))
}

#[derive(Serialize)]
struct Pinged {
    node: String,
    answered_in_ms: u64,
}

async fn ping(allowed: Allowed, Path(node): Path<String>) -> Answer<Pinged> {
    let began = clock::now();
    allowed.member.instruct(&node, PING, Bytes::new(), false, &allowed.call).await?;
    let answered_in_ms = u64::try_from(clock::since(began).as_millis()).unwrap_or(u64::MAX);
    Ok(Json(Pinged { node, answered_in_ms }))
}

#[derive(Serialize)]
struct Drained {
    drained: Vec<String>,
}

async fn drained(allowed: Allowed) -> Answer<Drained> {
    Ok(Json(Drained { drained: drains::list(&allowed.store(), allowed.call.deadline).await? }))
}

#[derive(Serialize)]
struct Drain {
    node: String,
    drained: bool,
    dry_run: bool,
    /// That it leads at present, and that go to others.
    shards: Vec<u32>,
}

async fn drain(allowed: Allowed, Path((node, state)): Path<(String, String)>) -> Answer<Drain> {
    let (drained, dry_run) = (on_or_off(&state)?, allowed.dry_run);
    let listed = allowed.member.list_shards(&allowed.call).await?;
    let led: Vec<u32> =
        listed.shards.iter().filter(|shard| drained && shard.node == node).map(|shard| shard.shard).collect();
    if drained && led.is_empty() {
        let (_, nodes) = allowed.member.list_nodes(&allowed.call).await?;
        nodes.iter().find(|listed| listed.node == node).ok_or_else(|| no_node(&node))?;
    }
    if !dry_run {
        drains::set(&allowed.store(), &node, drained, allowed.call.deadline).await?;
    }
    Ok(Json(Drain { node, drained, dry_run, shards: led }))
}

fn on_or_off(state: &str) -> Result<bool, Refused> {
    match state {
        "on" => Ok(true),
        "off" => Ok(false),
        other => Err(Refused::invalid(format!("it is on or off, not {other:?}"))),
    }
}

// ---- shards ---------------------------------------------------------------------------------------------------

#[derive(Serialize)]
struct Shard {
    shard: u32,
    state: &'static str,
    node: String,
    followers: Vec<String>,
    lease: u64,
    lease_left_ms: Option<u64>,
    fence: u64,
    suspicion: Option<f64>,
    reason: String,
}

impl From<v1::ShardStatus> for Shard {
    fn from(status: v1::ShardStatus) -> Self {
        let v1::ShardStatus { shard, node, lease, fence, followers, remaining_ms, suspicion, reason } = status;
        let state = if remaining_ms.is_some() { "held" } else { "lost" };
        Self { shard, state, node, followers, lease, lease_left_ms: remaining_ms, fence, suspicion, reason }
    }
}

#[derive(Serialize)]
struct Shards {
    count: u32,
    maintenance: bool,
    shards: Vec<Shard>,
}

async fn shards(allowed: Allowed) -> Answer<Shards> {
    let v1::ListShardsResponse { count, maintenance, shards, .. } = allowed.member.list_shards(&allowed.call).await?;
    Ok(Json(Shards { count, maintenance, shards: shards.into_iter().map(Shard::from).collect() }))
}

async fn shard(allowed: Allowed, Path(number): Path<u32>) -> Answer<Shard> {
    let listed = allowed.member.list_shards(&allowed.call).await?;
    let found = listed.shards.into_iter().find(|shard| shard.shard == number);
    let missing = || Refused::not_found(format!("nobody has a shard {number}: there are {} of them", listed.count));
    found.map(|shard| Json(shard.into())).ok_or_else(missing)
}

#[derive(Serialize)]
struct Move {
    shard: u32,
    from: String,
    to: String,
    /// None: it was not moved, or nobody knows.
    fence: Option<u64>,
}

impl From<v1::ShardMove> for Move {
    fn from(moved: v1::ShardMove) -> Self {
        let v1::ShardMove { shard, from, to, fence } = moved;
        Self { shard, from, to, fence: (fence != 0).then_some(fence) }
    }
}

#[derive(Serialize)]
struct Moves {
    dry_run: bool,
    moves: Vec<Move>,
}

async fn move_shard(allowed: Allowed, Path((shard, node)): Path<(u32, String)>) -> Answer<Moves> {
    let dry_run = allowed.dry_run;
    let moved = allowed.member.move_shard(shard, &node, dry_run, &allowed.call).await?;
    Ok(Json(Moves { dry_run, moves: vec![moved.into()] }))
}

async fn balance(allowed: Allowed) -> Answer<Moves> {
    let dry_run = allowed.dry_run;
    let moves = allowed.member.balance_shards(dry_run, &allowed.call).await?;
    Ok(Json(Moves { dry_run, moves: moves.into_iter().map(Move::from).collect() }))
}

#[derive(Serialize)]
struct Maintenance {
    dry_run: bool,
    maintenance: bool,
    /// None: nothing was changed, because this was a dry run.
    revision: Option<u64>,
    /// Of a dry run: whether it is not so already.
    would_change: Option<bool>,
}

async fn maintenance(allowed: Allowed, Path(state): Path<String>) -> Answer<Maintenance> {
    let maintenance = on_or_off(&state)?;
    if allowed.dry_run {
        let would_change = Some(allowed.member.would_maintain(maintenance, &allowed.call).await?);
        return Ok(Json(Maintenance { dry_run: true, maintenance, revision: None, would_change }));
    }
    let revision = Some(allowed.member.maintain_shards(maintenance, &allowed.call).await?);
    Ok(Json(Maintenance { dry_run: false, maintenance, revision, would_change: None }))
}
