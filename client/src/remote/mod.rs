//! The Raft cluster as a store.
//!
//! A call goes to the leader. Who that is, is remembered; when nobody is known, every endpoint is asked at once
//! (`ask_leader`), by one asker however many calls wait. An attempt ends in one of four ways:
//!
//! | attempt ended in                          | was it applied? | what follows                                        |
//! |-------------------------------------------|-----------------|-----------------------------------------------------|
//! | an answer                                 | yes             | done                                                |
//! | NotLeader with a hint                     | no              | at once to the peer named                           |
//! | refused connection, not ready, overloaded | no              | back off, ask who leads, again                      |
//! | broken connection, silence, lost lead     | unknown         | as above, if sending it twice is harmless; else end |
//!
//! Sending a transaction twice is harmless if each write in it is covered by a compare on that very key: once applied,
//! its compare fails. The answer then says `resent`, so that the caller can look for its own effect. A blind write is
//! never sent again once it may have been applied.
//!
//! Reads and transactions share one stream per peer ([`pipe`]), so that many made together cost little more than one.
//!
//! Reads may also be made of one peer that is named (`get_from`, `batch_get_from`), which then answers for itself.
//!
//! [`coordination`] has leases, sessions, scopes and quotas, [`keeper`] keeps a lease alive.
//!
//! Bounds: a call ends by its deadline; one connection and one stream per endpoint; at most [`MAX_ENDPOINTS`] endpoints, those given
//! and those learnt from members; one question round at a time.

mod backoff;
mod leader;
mod pipe;

pub mod admin;
pub mod coordination;
pub mod keeper;
mod peer;
pub mod watch;

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lake_proto::coordination::Stamp;
use lake_proto::kv::{Condition, Invalid, KeyValue, Txn, TxnResult, validate_key};
use lake_proto::limits::MAX_BATCH_GET_KEYS;
use lake_proto::v1::cluster_client::ClusterClient;
use lake_proto::v1::error_detail::{Applied as WireApplied, Kind};
use lake_proto::v1::kv_client::KvClient;
use lake_proto::v1::pipeline_request::Request as Piped;
use lake_proto::v1::pipeline_response::Response as PipedAnswer;
use lake_proto::{MAX_MESSAGE_BYTES, status, v1};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use self::backoff::Backoff;
use self::leader::{Round, View};
use self::pipe::Pipe;
use crate::secret::Secret;
use crate::store::{
    Applied, Capabilities, Committed, Consistency, Error, MetaStore, Page, Read, ReadOptions, Snapshot,
};

/// Most endpoints kept: those given and those learnt.
pub const MAX_ENDPOINTS: usize = 32;
/// How long a peer may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// A silent connection is probed after this long ...
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// ... and given up this long after the probe.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long one attempt may take before another peer is tried.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(4);
/// How long a question round waits for answers.
const ASK_TIMEOUT: Duration = Duration::from_millis(600);
/// How long a question round waits for better answers once one names a leader.
const ASK_GRACE: Duration = Duration::from_millis(60);

/// How to reach the cluster.
#[derive(Debug, Clone)]
pub struct RemoteConfig {
    /// `host:port` of any of the peers.
    pub endpoints: Vec<String>,
    pub secret: Option<Secret>,
}

/// A store that is the Raft cluster. Cheap to clone; connects when first used.
#[derive(Debug, Clone)]
pub struct RemoteStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: RemoteConfig,
    shared: Mutex<Shared>,
    /// Held while asking; counts the rounds.
    asking: tokio::sync::Mutex<u64>,
}

#[derive(Debug, Default)]
struct Shared {
    view: View,
    /// Endpoints learnt from members, beyond those given.
    learnt: Vec<String>,
    channels: HashMap<String, Channel>,
    pipes: HashMap<String, Pipe>,
    /// Which endpoint a peer answered at. It is preferred to the address that the peer is known under in the cluster,
    /// because it works from here: a proxy or NAT may stand between.
    answered_at: HashMap<u64, String>,
    /// The number of question rounds that have ended.
    rounds: u64,
    /// The cluster that the first leader found belongs to. Peers of another one are not listened to.
    cluster_id: Option<String>,
}

impl Shared {
    fn forget_connection(&mut self, address: &str) {
        self.channels.remove(address);
        self.pipes.remove(address);
        self.answered_at.retain(|_, endpoint| endpoint != address);
    }
}

/// What became of one attempt that brought no answer.
struct Failure {
    applied: Applied,
    /// Whether another attempt can help.
    retry: bool,
    /// The peer said who leads.
    redirected: bool,
    /// The connection is of no use any more.
    broken: bool,
    status: Status,
}

impl RemoteStore {
    /// # Errors
    /// If no endpoint is given, too many are, or one is not `host:port`.
    pub fn connect(config: RemoteConfig) -> Result<Self, Error> {
        let refuse = |message: String| Error::Refused { doing: "connecting to the metadata cluster".into(), message };
        if config.endpoints.is_empty() || config.endpoints.len() > MAX_ENDPOINTS {
            let given = config.endpoints.len();
            return Err(refuse(format!("{given} endpoints were given; 1 to {MAX_ENDPOINTS} can be")));
        }
        for endpoint in &config.endpoints {
            let well_formed = endpoint.rsplit_once(':').is_some_and(|(h, p)| !h.is_empty() && p.parse::<u16>().is_ok());
            if !well_formed || connection(endpoint).is_err() {
                return Err(refuse(format!("{endpoint:?} is not an endpoint: write host:port")));
            }
        }
        let inner = Inner { config, shared: Mutex::default(), asking: tokio::sync::Mutex::new(0) };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The endpoints asked: those given, then those learnt.
    pub fn endpoints(&self) -> Vec<String> {
        self.inner.endpoints()
    }

    /// Finds out who leads, by asking every endpoint unless somebody else just did.
    ///
    /// # Errors
    /// `Unavailable` if nobody names a leader by the deadline.
    pub async fn ask_leader(&self, deadline: Instant) -> Result<(u64, String), Error> {
        let mut attempts = Attempts::new("asking who leads", deadline);
        loop {
            attempts.count += 1;
            self.inner.ask().await;
            if let Some(l) = self.inner.lock().view.leader() {
                return Ok((l.id, l.address.clone()));
            }
            attempts.last = "no peer names a leader".to_owned();
            if !attempts.wait().await {
                return Err(self.unavailable(attempts, Applied::No));
            }
        }
    }

    /// One call, on the leader, until it is answered or the deadline is over.
    async fn on_leader<T, F>(
        &self,
        doing: &str,
        deadline: Instant,
        resendable: bool,
        send: impl Fn(String, Duration) -> F,
    ) -> Result<(T, bool), Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let mut attempts = Attempts::new(doing, deadline);
        let mut in_doubt = false;
        loop {
            let Some(address) = self.leader_address(&mut attempts).await else {
                return Err(self.unavailable(attempts, applied(in_doubt)));
            };
            attempts.count += 1;
            let Some(timeout) = attempts.remaining().map(|r| r.min(ATTEMPT_TIMEOUT)) else {
                return Err(self.unavailable(attempts, applied(in_doubt)));
            };
            let failure = match self.inner.attempt(timeout, send(address.clone(), timeout)).await {
                Ok(answer) => return Ok((answer, in_doubt)),
                Err(status) => classify(status),
            };
            attempts.last = format!("{}: {}", address, failure.status.message());
            tracing::debug!(doing, peer = %address, attempt = attempts.count, error = %failure.status.message(), "attempt failed");
            in_doubt |= failure.applied == Applied::Unknown;
            if !failure.retry {
                return Err(ended(doing, failure, in_doubt));
            }
            // Also before giving up: the next call must not go to the same silent peer.
            self.inner.after_failure(&address, &failure);
            if in_doubt && !resendable {
                return Err(self.unavailable(attempts, Applied::Unknown));
            }
            if !failure.redirected && !attempts.wait().await {
                return Err(self.unavailable(attempts, applied(in_doubt)));
            }
        }
    }

    /// The same for a call that has a connection of gRPC's own.
    async fn call_leader<T, F>(
        &self,
        doing: &str,
        deadline: Instant,
        resendable: bool,
        send: impl Fn(Channel, Duration) -> F,
    ) -> Result<(T, bool), Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let on_channel = |address: String, timeout| {
            let call = self.inner.channel(&address).map(|channel| send(channel, timeout));
            async move { call?.await }
        };
        self.on_leader(doing, deadline, resendable, on_channel).await
    }

    /// Where to send the next attempt: to the leader known, or found by asking. `None` when the time is up.
    async fn leader_address(&self, attempts: &mut Attempts) -> Option<String> {
        loop {
            attempts.remaining()?;
            if let Some(l) = self.inner.lock().view.leader() {
                return Some(l.address.clone());
            }
            let asked = tokio::time::timeout_at(attempts.deadline.into(), self.inner.ask()).await;
            if self.inner.lock().view.leader().is_some() {
                continue;
            }
            if let Ok(Some(why)) = asked {
                attempts.last = why;
            }
            attempts.count += 1;
            if !attempts.wait().await {
                return None;
            }
        }
    }

    fn unavailable(&self, attempts: Attempts, applied: Applied) -> Error {
        Error::Unavailable {
            doing: attempts.doing,
            endpoints: self.endpoints(),
            attempts: attempts.count,
            elapsed: attempts.started.elapsed(),
            leader: self.inner.lock().view.describe(),
            last: attempts.last,
            applied,
        }
    }

    /// Runs a transaction, as this request of a session if there is a stamp.
    async fn commit_as(
        &self,
        txn: Txn,
        stamp: Option<Stamp>,
        resendable: bool,
        deadline: Instant,
    ) -> Result<Committed, Error> {
        txn.validate()?;
        let doing = match txn.then.iter().find(|o| o.is_write()) {
            Some(op) => format!("committing {}", op.key()),
            None => "running a transaction".to_owned(),
        };
        let message = v1::TxnRequest { txn: Some(txn.into()), stamp: stamp.map(Into::into) };
        let (answer, resent) = self
            .on_leader(&doing, deadline, resendable, async |address, timeout| {
                let take = |answer| if let PipedAnswer::Txn(txn) = answer { Some(txn) } else { None };
                self.inner.piped(&address, Piped::Txn(message.clone()), timeout, take).await
            })
            .await?;
        let result = TxnResult::try_from(answer).map_err(|e| Error::Internal {
            doing,
            message: format!("the peer's answer cannot be read: {e}"),
            applied: Applied::Unknown,
        })?;
        Ok(Committed { result, resent })
    }

    async fn read<T, F>(
        &self,
        doing: String,
        deadline: Instant,
        send: impl Fn(String, Duration) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        match self.on_leader(&doing, deadline, true, send).await {
            Ok((answer, _)) => Ok(answer),
            // Whether a read was made does not matter.
            Err(Error::Unavailable { doing, endpoints, attempts, elapsed, leader, last, .. }) => {
                Err(Error::Unavailable { doing, endpoints, attempts, elapsed, leader, last, applied: Applied::No })
            }
            Err(e) => Err(e),
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn endpoints(&self) -> Vec<String> {
        let shared = self.lock();
        let mut all = self.config.endpoints.clone();
        all.extend(shared.learnt.iter().cloned());
        all
    }

    fn channel(&self, address: &str) -> Result<Channel, Status> {
        let mut shared = self.lock();
        if let Some(channel) = shared.channels.get(address) {
            return Ok(channel.clone());
        }
        let endpoint = connection(address).map_err(|e| Status::unavailable(format!("{address:?}: {e}")))?;
        let channel = endpoint.connect_lazy();
        if shared.channels.len() >= 2 * MAX_ENDPOINTS {
            shared.channels.clear();
            shared.pipes.clear();
        }
        shared.channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// One attempt, in its time.
    async fn attempt<T>(&self, timeout: Duration, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        match tokio::time::timeout(timeout, call).await {
            Ok(answer) => answer,
            Err(_) => Err(Status::deadline_exceeded(format!("no answer within {:.1} s", timeout.as_secs_f64()))),
        }
    }

    fn kv(&self, address: &str) -> Result<KvClient<Channel>, Status> {
        Ok(KvClient::new(self.channel(address)?)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// One call on the stream to a peer, which is opened if there is none.
    async fn piped<T>(
        &self,
        address: &str,
        request: Piped,
        timeout: Duration,
        take: impl FnOnce(PipedAnswer) -> Option<T>,
    ) -> Result<T, Status> {
        let pipe = self.pipe(address)?;
        let answer = pipe.call(request, timeout).await?;
        take(answer).ok_or_else(|| Status::internal("the peer answered another question than was asked"))
    }

    fn pipe(&self, address: &str) -> Result<Pipe, Status> {
        if let Some(pipe) = self.lock().pipes.get(address).filter(|pipe| !pipe.is_ended()) {
            return Ok(pipe.clone());
        }
        let channel = self.channel(address)?;
        let mut shared = self.lock();
        if let Some(pipe) = shared.pipes.get(address).filter(|pipe| !pipe.is_ended()) {
            return Ok(pipe.clone());
        }
        let cluster_id = shared.cluster_id.clone();
        let pipe =
            Pipe::open(channel, |outgoing| addressed(outgoing, self.config.secret.as_ref(), cluster_id.as_deref()));
        shared.pipes.insert(address.to_owned(), pipe.clone());
        Ok(pipe)
    }

    fn after_failure(&self, address: &str, failure: &Failure) {
        let mut shared = self.lock();
        let detail = status::detail(&failure.status);
        shared.view.forget(address);
        if let Some(d) = detail {
            let leader = d.leader.map(|l| Self::reachable(&shared, l)).filter(|l| l.grpc_address != address);
            shared.view.learn(d.term, leader.as_ref());
        }
        if failure.broken {
            shared.forget_connection(address);
        }
    }

    /// Asks every endpoint who leads, unless a round ended since this call began. Says why no leader was found.
    async fn ask(&self) -> Option<String> {
        let before = self.lock().rounds;
        let mut turn = self.asking.lock().await;
        if self.lock().rounds != before {
            return None;
        }
        let mut why = None;
        let endpoints = self.endpoints();
        let mut round = Round::new(endpoints.len());
        let mut answers: FuturesUnordered<_> = endpoints.iter().map(|e| self.ask_one(e)).collect();
        let mut until = tokio::time::Instant::now() + ASK_TIMEOUT;
        while !round.decided() {
            match tokio::time::timeout_at(until, answers.next()).await {
                Ok(Some(answer)) => {
                    let had_leader = round.has_leader();
                    let answer = answer.and_then(|(address, answer)| self.of_our_cluster(address, answer));
                    round.answer(answer.map_err(|e| why = Some(e)).ok());
                    if !had_leader && round.has_leader() {
                        until = until.min(tokio::time::Instant::now() + ASK_GRACE);
                    }
                }
                Ok(None) | Err(_) => break,
            }
        }
        drop(answers);
        let found = round.has_leader();
        let (view, members) = round.finish();
        let mut shared = self.lock();
        if let Some(l) = view.leader() {
            let leader = v1::Member { id: l.id, grpc_address: l.address.clone(), ..v1::Member::default() };
            let leader = Self::reachable(&shared, leader);
            shared.view.learn(l.term, Some(&leader));
            // A member behind an endpoint that was given is asked there.
            let given = |id: &u64| shared.answered_at.get(id).is_some_and(|e| self.config.endpoints.contains(e));
            let members: Vec<_> = members.into_iter().filter(|m| !given(&m.id)).collect();
            shared.learnt = members
                .into_iter()
                .map(|m| m.grpc_address)
                .filter(|a| !a.is_empty() && !self.config.endpoints.contains(a))
                .take(MAX_ENDPOINTS - self.config.endpoints.len())
                .collect();
        }
        shared.rounds += 1;
        *turn = shared.rounds;
        (!found).then(|| why.unwrap_or_else(|| "the peers that answered know of no leader".to_owned()))
    }

    /// The address at which to reach the member from here.
    fn reachable(shared: &Shared, mut member: v1::Member) -> v1::Member {
        if let Some(endpoint) = shared.answered_at.get(&member.id) {
            member.grpc_address.clone_from(endpoint);
        }
        member
    }

    /// Refuses what a peer of another cluster says. The first leader that is named decides which cluster is ours.
    fn of_our_cluster(&self, address: &str, answer: v1::LeaderResponse) -> Result<v1::LeaderResponse, String> {
        let mut shared = self.lock();
        if answer.leader.is_some() && shared.cluster_id.is_none() {
            shared.cluster_id = Some(answer.cluster_id.clone());
        }
        match &shared.cluster_id {
            Some(ours) if !answer.cluster_id.is_empty() && *ours != answer.cluster_id => {
                let theirs = &answer.cluster_id;
                Err(format!("{address} belongs to cluster {theirs}, and the others to {ours}: correct the endpoints"))
            }
            _ => {
                if shared.answered_at.len() < 2 * MAX_ENDPOINTS || shared.answered_at.contains_key(&answer.peer_id) {
                    shared.answered_at.insert(answer.peer_id, address.to_owned());
                }
                Ok(answer)
            }
        }
    }

    async fn ask_one<'a>(&self, address: &'a str) -> Result<(&'a str, v1::LeaderResponse), String> {
        let asked = async {
            let mut client = ClusterClient::new(self.channel(address)?);
            client.leader(self.request(v1::LeaderRequest {}, ASK_TIMEOUT)?).await
        };
        match tokio::time::timeout(ASK_TIMEOUT, asked).await {
            Ok(Ok(answer)) => Ok((address, answer.into_inner())),
            Ok(Err(status)) => {
                self.lock().forget_connection(address);
                Err(format!("{address}: {}", describe(&status)))
            }
            Err(_) => {
                self.lock().forget_connection(address);
                Err(format!("{address}: no answer within {:.1} s", ASK_TIMEOUT.as_secs_f64()))
            }
        }
    }

    fn request<T>(&self, message: T, timeout: Duration) -> Result<Request<T>, Status> {
        let mut request = self.untimed(message)?;
        request.set_timeout(timeout);
        Ok(request)
    }

    /// A request that names no time.
    fn untimed<T>(&self, message: T) -> Result<Request<T>, Status> {
        let cluster_id = self.lock().cluster_id.clone();
        addressed(message, self.config.secret.as_ref(), cluster_id.as_deref())
    }
}

/// A connection to a peer, not opened yet.
fn connection(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(false))
}

/// A request that tells the server how long it has, and proves knowledge of the secret.
fn request<T>(message: T, timeout: Duration, secret: Option<&Secret>) -> Result<Request<T>, Status> {
    let mut request = addressed(message, secret, None)?;
    request.set_timeout(timeout);
    Ok(request)
}

/// A request that proves knowledge of the secret, and says which cluster is meant.
fn addressed<T>(message: T, secret: Option<&Secret>, cluster_id: Option<&str>) -> Result<Request<T>, Status> {
    let mut request = Request::new(message);
    if let Some(secret) = secret {
        let header = secret.bearer().parse().map_err(|_| Status::internal("the cluster secret is no header value"))?;
        request.metadata_mut().insert(lake_proto::SECRET_METADATA_KEY, header);
    }
    if let Some(id) = cluster_id {
        let header = id.parse().map_err(|_| Status::internal(format!("cluster id {id:?} is no header value")))?;
        request.metadata_mut().insert(lake_proto::CLUSTER_METADATA_KEY, header);
    }
    Ok(request)
}

/// The calls of one operation: how many, since when, until when.
struct Attempts {
    doing: String,
    started: Instant,
    deadline: Instant,
    count: u32,
    last: String,
    backoff: Backoff,
}

impl Attempts {
    fn new(doing: &str, deadline: Instant) -> Self {
        Self {
            doing: doing.to_owned(),
            started: Instant::now(),
            deadline,
            count: 0,
            last: "the deadline was over before the first attempt ended".to_owned(),
            backoff: Backoff::default(),
        }
    }

    fn remaining(&self) -> Option<Duration> {
        self.deadline.checked_duration_since(Instant::now()).filter(|d| !d.is_zero())
    }

    /// Backs off. False: the deadline comes first.
    async fn wait(&mut self) -> bool {
        let wait = self.backoff.next_wait();
        match self.remaining() {
            Some(remaining) if remaining > wait => {
                tokio::time::sleep(wait).await;
                true
            }
            _ => false,
        }
    }
}

fn applied(in_doubt: bool) -> Applied {
    if in_doubt { Applied::Unknown } else { Applied::No }
}

impl Failure {
    /// One that no other attempt can mend, and that changed nothing.
    fn fatal(status: Status) -> Self {
        Self { applied: Applied::No, retry: false, redirected: false, broken: false, status }
    }
}

/// What a failed attempt means. The only place that decides it.
fn classify(status: Status) -> Failure {
    let Some(detail) = status::detail(&status) else {
        // Not a lake peer's own words: the transport's, or a proxy's.
        let refused = is_connect_error(&status);
        let applied = if refused { Applied::No } else { Applied::Unknown };
        let retry = !matches!(status.code(), Code::Unimplemented | Code::InvalidArgument | Code::Unauthenticated);
        return Failure { applied, retry, redirected: false, broken: true, status };
    };
    let applied = match detail.applied() {
        WireApplied::NotApplied => Applied::No,
        WireApplied::Unknown => Applied::Unknown,
    };
    let kind = detail.kind();
    let retry = matches!(kind, Kind::NotLeader | Kind::Unavailable | Kind::Overloaded);
    let redirected = kind == Kind::NotLeader && detail.leader.is_some_and(|l| !l.grpc_address.is_empty());
    Failure { applied, retry, redirected, broken: false, status }
}

/// Whether the request never left because no connection could be made.
fn is_connect_error(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return matches!(io.kind(), std::io::ErrorKind::ConnectionRefused);
        }
        if error.is::<tonic::ConnectError>() || error.is::<tonic::TimeoutExpired>() {
            return error.is::<tonic::ConnectError>();
        }
        source = error.source();
    }
    false
}

/// The innermost reason of a status, which says more than tonic's "transport error".
fn describe(status: &Status) -> String {
    let mut reason = match status.message() {
        "" if status.code() == Code::Unimplemented => "something else than a metadata peer answers there".to_owned(),
        "" => status.code().description().to_owned(),
        message => message.to_owned(),
    };
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        reason = error.to_string();
        source = error.source();
    }
    reason
}

/// The error of an attempt that no other attempt can mend.
fn ended(doing: &str, failure: Failure, in_doubt: bool) -> Error {
    let message = failure.status.message().to_owned();
    let doing = doing.to_owned();
    let detail = status::detail(&failure.status);
    let oldest = detail.as_ref().map_or(0, |d| d.oldest_revision);
    match detail.map(|d| d.kind()) {
        Some(Kind::SnapshotExpired) => Error::SnapshotExpired { prefix: doing },
        Some(Kind::Compacted) => Error::Compacted { doing, oldest },
        Some(Kind::Internal) | None => Error::Internal { doing, message, applied: applied(in_doubt) },
        Some(_) if in_doubt => Error::Internal { doing, message, applied: Applied::Unknown },
        Some(_) => Error::Refused { doing, message },
    }
}

fn wire_options(options: ReadOptions) -> v1::ReadOptions {
    use v1::read_options::Consistency as Wire;
    let (consistency, max_staleness_ms) = match options.consistency {
        Consistency::Linearizable => (Wire::Linearizable, 0),
        Consistency::Local => (Wire::Local, 0),
        Consistency::Bounded(d) => (Wire::Bounded, u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
    };
    v1::ReadOptions {
        consistency: consistency as i32,
        max_staleness_ms,
        min_revision: options.min_revision,
        snapshot: options.snapshot.map_or(0, Snapshot::to_wire),
    }
}

fn revision(header: Option<v1::ResponseHeader>) -> u64 {
    header.map_or(0, |h| h.revision)
}

/// Whether a transaction may be sent again when it may have been applied: all its writes stand in `then` under a
/// compare on the same key, which its first application makes false.
fn is_resendable(txn: &Txn) -> bool {
    let covered = |key: &str| {
        txn.when.iter().any(|c| c.key == key && matches!(c.condition, Condition::Absent | Condition::ModRevision(_)))
    };
    let changes_own_compare = txn.then.iter().filter(|o| o.is_write()).all(|o| covered(o.key()));
    changes_own_compare && !txn.otherwise.iter().any(|o| o.is_write())
}

#[async_trait]
impl MetaStore for RemoteStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities { multi_key: true, consistent_listing: true }
    }

    async fn get(&self, key: &str, options: ReadOptions, deadline: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        validate_key(key)?;
        let message = v1::GetRequest { key: key.to_owned(), options: Some(wire_options(options)) };
        let answer = self
            .read(format!("reading {key}"), deadline, async |address, timeout| {
                let take = |answer| if let PipedAnswer::Get(get) = answer { Some(get) } else { None };
                self.inner.piped(&address, Piped::Get(message.clone()), timeout, take).await
            })
            .await?;
        Ok(Read { revision: revision(answer.header), value: answer.entry.map(Into::into) })
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        if keys.len() > MAX_BATCH_GET_KEYS {
            return Err(Invalid::BatchKeys { count: keys.len() }.into());
        }
        keys.iter().try_for_each(|k| validate_key(k))?;
        let message = v1::BatchGetRequest { keys: keys.to_vec(), options: Some(wire_options(options)) };
        let answer = self
            .read(format!("reading {} keys", keys.len()), deadline, async |address, timeout| {
                let take = |answer| if let PipedAnswer::BatchGet(get) = answer { Some(get) } else { None };
                self.inner.piped(&address, Piped::BatchGet(message.clone()), timeout, take).await
            })
            .await?;
        let entries = answer.entries.into_iter().map(Into::into).collect();
        Ok(Read { revision: revision(answer.header), value: entries })
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Page>, Error> {
        let message = v1::ListRequest {
            prefix: prefix.to_owned(),
            limit,
            page: page.unwrap_or_default().to_owned(),
            options: Some(wire_options(options)),
        };
        let answer = self
            .read(format!("listing {prefix}"), deadline, async |address, timeout| {
                let request = self.inner.request(message.clone(), timeout)?;
                Ok(self.inner.kv(&address)?.list(request).await?.into_inner())
            })
            .await?;
        let page = Page {
            entries: answer.entries.into_iter().map(Into::into).collect(),
            next: (!answer.next_page.is_empty()).then_some(answer.next_page),
        };
        Ok(Read { revision: revision(answer.header), value: page })
    }

    async fn open_snapshot(&self, options: ReadOptions, deadline: Instant) -> Result<Read<Snapshot>, Error> {
        let doing = "opening a snapshot";
        let message = v1::OpenSnapshotRequest { options: Some(wire_options(options)) };
        let answer = self
            .read(doing.to_owned(), deadline, async |address, timeout| {
                let request = self.inner.request(message, timeout)?;
                Ok(self.inner.kv(&address)?.open_snapshot(request).await?.into_inner())
            })
            .await?;
        let value = Snapshot::from_wire(answer.snapshot).ok_or_else(|| Error::Internal {
            doing: doing.to_owned(),
            message: "the peer's answer names no snapshot".to_owned(),
            applied: Applied::No,
        })?;
        Ok(Read { revision: revision(answer.header), value })
    }

    async fn commit(&self, txn: Txn, deadline: Instant) -> Result<Committed, Error> {
        let resendable = is_resendable(&txn);
        self.commit_as(txn, None, resendable, deadline).await
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Compare, Expected, Op};

    use super::*;

    #[test]
    fn only_guarded_writes_are_sent_twice() {
        assert!(is_resendable(&Txn::cas("/lake/a", Expected::Absent, "1")));
        assert!(is_resendable(&Txn::cas_delete("/lake/a", 4)));
        let blind = Txn { then: vec![Op::put("/kv/a", "1")], ..Txn::default() };
        assert!(!is_resendable(&blind));
        let elsewhere = Txn { when: vec![Compare::absent("/kv/b")], ..blind };
        assert!(!is_resendable(&elsewhere));
        let otherwise = Txn { otherwise: vec![Op::put("/kv/b", "1")], ..Txn::cas("/kv/a", Expected::Absent, "1") };
        assert!(!is_resendable(&otherwise));
    }

    #[test]
    fn endpoints_are_checked_when_given() {
        let connect = |e: &str| RemoteStore::connect(RemoteConfig { endpoints: vec![e.to_owned()], secret: None });
        for wrong in ["", "localhost", ":80", "host:99999", "a b:80"] {
            assert!(matches!(connect(wrong), Err(Error::Refused { .. })), "{wrong:?}");
        }
        assert!(matches!(
            RemoteStore::connect(RemoteConfig { endpoints: vec![], secret: None }),
            Err(Error::Refused { .. })
        ));
    }

    #[tokio::test]
    async fn a_cluster_that_is_not_there_is_named_and_nothing_was_applied() {
        // Reserved and closed again: nobody listens there.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let endpoint = format!("127.0.0.1:{port}");
        let store = RemoteStore::connect(RemoteConfig { endpoints: vec![endpoint.clone()], secret: None }).unwrap();
        let deadline = Instant::now() + Duration::from_millis(300);
        let error = store.cas("/lake/a", Expected::Absent, "1".into(), deadline).await.unwrap_err();
        assert_eq!(error.applied(), Applied::No);
        let message = error.to_string();
        assert!(message.contains("unreachable") && message.contains(&endpoint), "{message}");
        assert!(Instant::now() < deadline + Duration::from_secs(1));
    }
}
