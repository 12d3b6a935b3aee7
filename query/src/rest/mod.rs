//! The Iceberg REST catalog: tables for every engine that speaks the protocol, over the same pointers as SQL.
//!
//! ```text
//!   [connections] -> [endpoint] which one?  -> [request] path, query, body, within limits
//!                                          -> [once]: done before?
//!                                          -> [namespaces], [tables], [views], [transactions] -> lake_client's catalog
//!                                                `-> [commit]: [evolve] what the updates make of a version, then the swap;
//!                                                    [comeback] whose turn it is, of those who have lost
//!   <- [error] status and type
//! ```
//! A node has no state of its own here: any number of them serve the same tables. What holds:
//! - A read begins with a linearizable look at the pointer, unless the node is configured to use what it has cached.
//! - A change runs to its end, or to its deadline, whether its client waits for it or not.
//! - A 500 to a change means that its outcome is unknown; everything else that fails was not done.
//! - No request makes the node panic, and none is without bounds: [`MAX_BODY_BYTES`], [`request::MAX_DEPTH`],
//!   [`DEADLINE`], [`MAX_REQUESTS`] at a time and [`BODIES_BYTES`] of their bodies; nor is a connection: [`connections`].

mod comeback;
mod commit;
mod connections;
pub mod endpoint;
mod error;
mod evolve;
mod metrics;
mod namespaces;
mod once;
mod openapi;
mod rendered;
mod request;
mod tables;
mod transactions;
mod views;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use iceberg::spec::TableMetadata;
use lake_client::cache::Want;
use lake_client::catalog::{TableIdent, TablePointer, Versioned};
use lake_client::secret::Secret;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::comeback::{Client, Comebacks};
use self::connections::{Bounds, Connections};
use self::endpoint::{ENDPOINTS, Endpoint, Operation, Routed, route};
use self::error::{RestError, Result, json_response, kind};
use self::metrics::Metrics;
use self::rendered::Rendered;
use self::request::Call;
use crate::config::Config;
use crate::table::Tables;

/// Largest body of a request.
pub const MAX_BODY_BYTES: usize = 16 << 20;
/// Most bytes of bodies that are held at a time; what is more waits.
pub const BODIES_BYTES: usize = 128 << 20;
/// Most requests that are served at a time; more wait a little.
pub const MAX_REQUESTS: usize = 256;
/// How long serving one request may take.
pub const DEADLINE: Duration = Duration::from_secs(30);
/// How long an answer waits behind that for a request to say itself what became of it.
const GRACE: Duration = Duration::from_secs(5);
/// How long a request waits for its turn.
const ADMISSION: Duration = Duration::from_secs(5);
/// What a node's own warehouse is called. The name of a warehouse is what paths begin with behind the version.
pub const WAREHOUSE: &str = lake_client::warehouse::DEFAULT;

/// What serves the requests.
#[derive(Debug)]
pub struct Rest {
    tables: Arc<Tables>,
    secret: Option<Secret>,
    /// Reads use what is cached, within the age that SQL allows it.
    cached_reads: bool,
    /// Keys are handed to clients that ask for them.
    lends: bool,
    /// How long a body may take to come.
    body_within: Duration,
    connections: Arc<Connections>,
    requests: Arc<Semaphore>,
    bodies: Arc<Semaphore>,
    metrics: Metrics,
    comebacks: Comebacks,
    rendered: Rendered,
}

impl Rest {
    /// # Errors
    /// The metrics cannot be made, which is a defect.
    pub fn new(config: &Config, tables: Arc<Tables>) -> crate::error::Result<Self> {
        let metrics = Metrics::new()?;
        let bounds = Bounds {
            connections: config.rest_max_connections,
            head_within: config.rest_head_within,
            idle: config.rest_idle,
        };
        Ok(Self {
            tables,
            secret: config.secret.clone(),
            cached_reads: config.rest_cached_reads,
            lends: config.rest_lend_credentials,
            body_within: config.rest_body_within,
            connections: Arc::new(Connections::new(bounds, metrics.connections.clone())),
            requests: Arc::new(Semaphore::new(MAX_REQUESTS)),
            bodies: Arc::new(Semaphore::new(BODIES_BYTES)),
            metrics,
            comebacks: Comebacks::default(),
            rendered: Rendered::default(),
        })
    }

    /// A table's pointer, for a read.
    async fn pointer(&self, ident: &TableIdent, deadline: Instant) -> Result<Option<Versioned<TablePointer>>> {
        match self.cached_reads {
            true => Ok(self.tables.metadata.table(ident, Want::by(deadline)).await?.pointer().cloned()),
            false => Ok(self.tables.metadata.read_table(ident, deadline).await?),
        }
    }

    /// Whether a client may name this location.
    async fn allowed(&self, field: &str, location: &str, deadline: Instant) -> Result<()> {
        self.tables.check_place(field, location, deadline).await.map_err(RestError::of_a_change)
    }

    /// Whether a client may make a table's version of this: it is sound, and what is new in it since `base` lies where it may.
    ///
    /// # Errors
    /// 400, with what is wrong.
    async fn check(&self, next: &TableMetadata, base: Option<&TableMetadata>, deadline: Instant) -> Result<()> {
        self.tables.check_incoming(next, base, deadline).await.map_err(RestError::of_a_change)
    }

    /// The warehouse that a path begins with; `None`: the node's own.
    async fn warehouse(&self, prefix: &str, deadline: Instant) -> Result<Option<String>> {
        if prefix == WAREHOUSE {
            return Ok(None);
        }
        match self.tables.has_warehouse(prefix, deadline).await.map_err(RestError::of_a_change)? {
            true => Ok(Some(prefix.to_owned())),
            false => Err(no_such_warehouse(prefix)),
        }
    }

    /// Whether the caller knows the secret, if there is one.
    fn authorize(&self, headers: &HeaderMap) -> Result<()> {
        let Some(secret) = &self.secret else { return Ok(()) };
        match headers.get(header::AUTHORIZATION).is_some_and(|value| secret.matches_bearer(value.as_bytes())) {
            true => Ok(()),
            false => Err(RestError::new(
                StatusCode::UNAUTHORIZED,
                kind::NOT_AUTHORIZED,
                "this catalog needs the cluster's secret as a bearer token",
            )),
        }
    }

    async fn config(&self, call: &Call) -> Result<Response> {
        let asked = call.parameter("warehouse").unwrap_or_default().trim_end_matches('/');
        let storage = &self.tables.storage;
        let (name, root) = match ["", WAREHOUSE, storage.warehouse()].contains(&asked) {
            true => (WAREHOUSE.to_owned(), storage.warehouse().to_owned()),
            false => {
                let known = self.tables.has_warehouse(asked, call.deadline).await.map_err(RestError::of_a_read)?;
                let profiles = storage.warehouses();
                let there = profiles.profiles.iter().find(|(name, profile)| *name == asked || profile.root == asked);
                match there {
                    Some((name, profile)) => (name.clone(), profile.root.clone()),
                    None if known => {
                        return Err(RestError::unavailable(format!("warehouse {asked:?} is being removed")));
                    }
                    None => return Err(no_such_warehouse(asked)),
                }
            }
        };
        let served = |endpoint: &&Endpoint| self.lends || endpoint.operation != Operation::LoadCredentials;
        let of_the_protocol = ENDPOINTS.iter().filter(|endpoint| endpoint.of_the_protocol()).filter(served);
        let endpoints: Vec<String> = of_the_protocol.map(Endpoint::advertised).collect();
        let body = json!({
            "defaults": storage.client_config(&root),
            "overrides": {"prefix": name},
            "endpoints": endpoints,
            "idempotency-key-lifetime": once::ADVERTISED_LIFETIME,
        });
        Ok(json_response(StatusCode::OK, body.to_string()))
    }

    async fn run(&self, endpoint: &Endpoint, call: &Call) -> Result<Response> {
        match endpoint.operation {
            Operation::Index => Ok(openapi::page()),
            Operation::OpenApi => Ok(openapi::document()),
            Operation::Metrics => Ok(self.metrics.report(&self.tables.metadata)),
            Operation::GetConfig => self.config(call).await,
            Operation::ListNamespaces => namespaces::list(self, call).await,
            Operation::CreateNamespace => namespaces::create(self, call).await,
            Operation::LoadNamespace => namespaces::load(self, call).await,
            Operation::NamespaceExists => namespaces::exists(self, call).await,
            Operation::DropNamespace => namespaces::drop(self, call).await,
            Operation::UpdateNamespace => namespaces::update(self, call).await,
            Operation::ListTables => tables::list(self, call).await,
            Operation::CreateTable => tables::create(self, call).await,
            Operation::RegisterTable => tables::register(self, call).await,
            Operation::LoadTable => tables::load(self, call).await,
            Operation::TableExists => tables::exists(self, call).await,
            Operation::CommitTable => tables::commit(self, call).await,
            Operation::DropTable => tables::drop(self, call).await,
            Operation::RenameTable => tables::rename(self, call).await,
            Operation::ReportMetrics => tables::report_metrics(call),
            Operation::LoadCredentials => tables::credentials(self, call).await,
            Operation::CommitTransaction => transactions::commit(self, call).await,
            Operation::ListViews => views::list(self, call).await,
            Operation::CreateView => views::create(self, call).await,
            Operation::RegisterView => views::register(self, call).await,
            Operation::LoadView => views::load(self, call).await,
            Operation::ViewExists => views::exists(self, call).await,
            Operation::ReplaceView => views::replace(self, call).await,
            Operation::DropView => views::drop(self, call).await,
            Operation::RenameView => views::rename(self, call).await,
        }
    }
}

/// Serves until it is told to stop.
pub async fn serve(rest: Arc<Rest>, listener: TcpListener, stop: CancellationToken) {
    let answer = {
        let rest = rest.clone();
        move |address, request| answer(rest.clone(), Client::at(address), request)
    };
    tokio::select! {
        () = connections::serve(listener, rest.connections.clone(), answer, stop) => {}
        never = once::sweep(&rest) => match never {},
    }
}

async fn answer(rest: Arc<Rest>, client: Client, request: Request) -> Response {
    let began = Instant::now();
    let described = format!("{} {}", request.method(), request.uri().path());
    let routed = route(request.method(), request.uri().path());
    let endpoint = if let Routed::To(endpoint, _) = &routed { Some(*endpoint) } else { None };
    let response = match admit(rest.clone(), client, routed, request).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(request = %described, status = error.status.as_u16(), message = %error.message, "refused");
            error.into_response()
        }
    };
    rest.metrics.count(endpoint, response.status(), began.elapsed());
    if response.status().is_server_error() {
        tracing::warn!(request = %described, status = response.status().as_u16(), "could not be served");
    }
    response
}

async fn admit(rest: Arc<Rest>, client: Client, routed: Routed, request: Request) -> Result<Response> {
    let (parts, body) = request.into_parts();
    let (endpoint, captures) = match routed {
        Routed::To(endpoint, captures) => (endpoint, captures),
        Routed::Undecodable => return Err(RestError::bad("path", "it is not the encoding of a text")),
        Routed::Nothing => {
            return Err(RestError::not_found(kind::NOT_FOUND, format!("{} is not served here", parts.uri.path())));
        }
        Routed::OtherMethods(methods) => {
            let refusal = RestError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                kind::UNSUPPORTED,
                format!("{} is not served here; {methods} is", parts.method),
            );
            let mut response = refusal.into_response();
            if let Ok(allow) = HeaderValue::from_str(&methods) {
                response.headers_mut().insert(header::ALLOW, allow);
            }
            return Ok(response);
        }
    };
    if endpoint.of_the_protocol() {
        rest.authorize(&parts.headers)?;
    }
    let busy = |what: &str| RestError::unavailable(format!("{what}; nothing was done: try again"));
    let admitted = tokio::time::timeout(ADMISSION, rest.requests.clone().acquire_owned())
        .await
        .ok()
        .and_then(|permit| permit.ok())
        .ok_or_else(|| busy("too many requests are being served"))?;
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    let none = length.is_none() && !parts.headers.contains_key(header::TRANSFER_ENCODING);
    let length = length.unwrap_or(if none { 0 } else { MAX_BODY_BYTES });
    if length > MAX_BODY_BYTES {
        return Err(too_large());
    }
    let room = tokio::time::timeout(ADMISSION, rest.bodies.clone().acquire_many_owned(length as u32))
        .await
        .ok()
        .and_then(|permit| permit.ok())
        .ok_or_else(|| busy("too many large requests are being served"))?;
    let body = read(body, rest.body_within).await?;
    let mut call = Call {
        captures,
        query: request::query(parts.uri.query().unwrap_or_default()),
        headers: parts.headers,
        body,
        deadline: Instant::now() + DEADLINE,
        key: None,
        warehouse: None,
        client: Some(client),
    };
    if endpoint.path.contains("{prefix}") {
        call.warehouse = rest.warehouse(call.captures.get("prefix"), call.deadline).await?;
    }
    call.key = once::Key::of(endpoint, parts.uri.path(), &call)?;
    let deadline = call.deadline;
    // A task of its own: a client that goes away leaves no change half made, and a defect is one request's. What it was
    // admitted with it keeps to its end, so that clients that go away do not make room for more.
    let work = {
        let rest = rest.clone();
        async move {
            let _admitted = (admitted, room);
            rest.run_once(endpoint, &call).await
        }
    };
    outcome(rest.tables.tasks.spawn(work), deadline, endpoint).await
}

/// What a request came to. It goes on, if that takes longer than it may.
async fn outcome(work: JoinHandle<Result<Response>>, deadline: Instant, endpoint: &Endpoint) -> Result<Response> {
    let (message, told) = match tokio::time::timeout_at((deadline + GRACE).into(), work).await {
        Ok(Ok(outcome)) => return outcome,
        Ok(Err(error)) => {
            tracing::error!(endpoint = endpoint.path, %error, "a request ended in a defect");
            let message = "a defect of this node ended the request";
            (message, RestError::new(StatusCode::INTERNAL_SERVER_ERROR, kind::INTERNAL, message))
        }
        Err(_) => {
            let message = "what the request needs has not answered before the deadline";
            (message, RestError::unavailable(message))
        }
    };
    Err(match endpoint.changes() {
        true => RestError::unknown(format!("{message}; whether anything was done is unknown")),
        false => told,
    })
}

/// What the store of the objects answers before the deadline.
///
/// # Errors
/// Its own; `Deadline`.
async fn answered<T>(
    deadline: Instant,
    work: impl Future<Output = crate::error::Result<T>>,
) -> crate::error::Result<T> {
    let late = |_| Err(crate::Error::deadline("the store of the objects has not answered before the deadline"));
    tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(late)
}

async fn read(body: Body, within: Duration) -> Result<Bytes> {
    match tokio::time::timeout(within, axum::body::to_bytes(body, MAX_BODY_BYTES)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if error.to_string().contains("length limit") => Err(too_large()),
        Ok(Err(error)) => Err(RestError::bad("body", format!("it did not come whole: {error}"))),
        Err(_) => Err(RestError::new(
            StatusCode::REQUEST_TIMEOUT,
            kind::BAD_REQUEST,
            format!("body: it did not come within {within:?} (rest_body_within_ms); nothing was done: send it again"),
        )),
    }
}

fn no_such_warehouse(name: &str) -> RestError {
    RestError::not_found(
        kind::NO_SUCH_WAREHOUSE,
        format!("warehouse {name:?} does not exist; there is {WAREHOUSE:?}, and what `lake meta warehouse list` shows"),
    )
}

fn too_large() -> RestError {
    RestError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        kind::BAD_REQUEST,
        format!("body: larger than {MAX_BODY_BYTES} bytes"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_waits_no_longer_than_a_request_may_take() {
        let began = tokio::time::Instant::now();
        let late = answered(began.into_std() + DEADLINE, std::future::pending::<crate::error::Result<()>>()).await;
        let late = RestError::of_a_change(late.unwrap_err());
        assert_eq!((late.status.as_u16(), began.elapsed().as_secs()), (503, DEADLINE.as_secs()), "nothing was done");
        let hangs = || tokio::spawn(std::future::pending());
        for (operation, status, kind) in
            [(Operation::LoadTable, 503, kind::UNAVAILABLE), (Operation::CommitTable, 500, kind::COMMIT_UNKNOWN)]
        {
            let endpoint = ENDPOINTS.iter().find(|endpoint| endpoint.operation == operation).unwrap();
            let late = outcome(hangs(), began.into_std() + DEADLINE, endpoint).await.unwrap_err();
            assert_eq!((late.status.as_u16(), late.kind), (status, kind));
        }
        assert_eq!(began.elapsed().as_secs(), (DEADLINE + GRACE).as_secs());
    }
}
