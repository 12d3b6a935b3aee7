//! Connections to the peers, and who leads as far as the calls on them have shown.
//!
//! [`Inner`] is what all clones of a store share: one connection and one stream for each endpoint, made when first needed
//! and forgotten once broken, the view of the leader, and the question round that finds it ([`Inner::ask`]). Who can wait asks
//! one peer after the other instead ([`in_turn`]).
//!
//! The members are learnt from every round, and in the background from the leader: at once when one leads that is not known, within
//! a second of an answer that tells of a newer membership, and else every 10 to 20 s. So a client finds the cluster again though
//! every peer that it was given is gone, if it has made calls, or watched, while they were replaced. Where the peer that led does not answer a
//! watch as the leader, all are asked.
//!
//! Limits: [`MAX_ENDPOINTS`] endpoints; one question round at a time, which ends within [`ASK_TIMEOUT`] and what the peers
//! are asked to wait ([`super::leader::AWAITED_FOR`]); one question for the members at a time.

mod in_turn;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lake_proto::v1::cluster_client::ClusterClient;
use lake_proto::v1::error_detail::{Applied, Kind};
use lake_proto::v1::kv_client::KvClient;
use lake_proto::v1::pipeline_request::Request as Piped;
use lake_proto::v1::pipeline_response::Response as PipedAnswer;
use lake_proto::{MAX_MESSAGE_BYTES, status, v1};
use rand::Rng;
use tokio_util::task::AbortOnDropHandle;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::attempts::{Failure, describe};
use super::flight::{Flight, Joined};
use super::leader::{Question, Round, View};
use super::pipe::Pipe;
use super::session::Sessions;
use super::{MAX_ENDPOINTS, RemoteConfig};
use crate::clock;
use crate::dial::Dialer;
use crate::secret::Secret;
use crate::store::KnownLeader;

/// How long a peer may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// A silent connection is probed after this long ...
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// ... and given up this long after the probe.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_millis(600);
/// How long a question round waits for answers, beyond what the peers are asked to wait.
const ASK_TIMEOUT: Duration = Duration::from_millis(600);
/// How long a question round waits for better answers once one names a leader.
const ASK_GRACE: Duration = Duration::from_millis(60);
/// After this long at the most, and half of it at least, a client that makes calls, or watches, asks the leader who the members are.
const MEMBERS_FOR: Duration = Duration::from_secs(20);
/// The same while the leader is none of the members known, or after a watch lost its peer.
const MEMBERS_RETRY: Duration = Duration::from_secs(1);

/// What the clones of a store share.
#[derive(Debug)]
pub(super) struct Inner {
    config: RemoteConfig,
    pub dialer: Dialer,
    shared: Mutex<Shared>,
    /// What the clones' mutations are requests of.
    pub sessions: Sessions,
}

/// What is known of the peers at this moment.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub view: View,
    /// Endpoints learnt from members, beyond those given.
    learnt: Vec<String>,
    channels: HashMap<String, Channel>,
    pipes: HashMap<String, Pipe>,
    /// Which endpoint a peer answered at. It is preferred to the address that the peer is known under in the cluster,
    /// because it works from here: a proxy or NAT may stand between.
    answered_at: HashMap<u64, String>,
    /// The last question round.
    asking: Option<Flight<Result<(), String>>>,
    /// The log entry of the newest membership that an answer told of.
    membership: u64,
    /// When the members are asked for next; `None`: at once.
    pub members_due: Option<Instant>,
    /// Who asks for them.
    asks_members: Option<AbortOnDropHandle<()>>,
    /// The cluster that the first leader found belongs to. Peers of another one are not listened to.
    cluster_id: Option<String>,
    /// Why the last question round found no leader, if it did not.
    in_vain: Option<String>,
}

impl Shared {
    /// The connection to this endpoint is of no use any more.
    pub fn forget_connection(&mut self, address: &str) {
        self.channels.remove(address);
        self.pipes.remove(address);
        self.answered_at.retain(|_, endpoint| endpoint != address);
    }

    /// By an answer. Where it is newer than any before, whoever calls or watches next after a while of at most [`MEMBERS_RETRY`] asks who
    /// the members are: not all clients at once.
    fn told_of_membership(&mut self, membership: u64) {
        if membership > self.membership {
            self.membership = membership;
            let soon = clock::now() + MEMBERS_RETRY.mul_f64(rand::rng().random());
            self.members_due = self.members_due.map(|due| due.min(soon));
        }
    }
}

fn header(answer: &PipedAnswer) -> Option<&v1::ResponseHeader> {
    match answer {
        PipedAnswer::Get(answer) => answer.header.as_ref(),
        PipedAnswer::BatchGet(answer) => answer.header.as_ref(),
        PipedAnswer::Txn(answer) => answer.header.as_ref(),
        PipedAnswer::Error(_) => None,
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let (Some(leaving), Ok(runtime)) = (self.leaving(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(leaving);
        }
    }
}

impl Inner {
    /// No connection yet.
    pub fn new(config: RemoteConfig, dialer: Dialer) -> Self {
        Self { config, dialer, shared: Mutex::default(), sessions: Sessions::default() }
    }

    /// The connection that there is to the leader known.
    pub fn leader_channel(&self) -> Option<Channel> {
        let shared = self.lock();
        shared.view.leader().and_then(|leader| shared.channels.get(&leader.address).cloned())
    }

    /// What is known now. Held for a look or a change, never across an await.
    pub fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The endpoints given, then those learnt.
    pub fn endpoints(&self) -> Vec<String> {
        let shared = self.lock();
        let mut all = self.config.endpoints.clone();
        all.extend(shared.learnt.iter().cloned());
        all
    }

    /// The connection to an endpoint, made if there is none.
    pub fn channel(&self, address: &str) -> Result<Channel, Status> {
        let mut shared = self.lock();
        if let Some(channel) = shared.channels.get(address) {
            return Ok(channel.clone());
        }
        let endpoint = connection(address).map_err(|e| unsent(Kind::Unavailable, format!("{address:?}: {e}")))?;
        let channel = self.dialer.channel(&endpoint);
        if shared.channels.len() >= 2 * MAX_ENDPOINTS {
            shared.channels.clear();
            shared.pipes.clear();
        }
        shared.channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// A connection of its own to an endpoint, for one stream whose own messages show in time whether it is alive. It is not
    /// probed: the probes of a thousand silent streams would cost the leader more than all that is said on them.
    pub fn unprobed_channel(&self, address: &str) -> Result<Channel, Status> {
        let endpoint = unprobed(address).map_err(|e| unsent(Kind::Unavailable, format!("{address:?}: {e}")))?;
        Ok(self.dialer.channel(&endpoint))
    }

    /// A client of the map at an endpoint.
    pub fn kv(&self, address: &str) -> Result<KvClient<Channel>, Status> {
        Ok(KvClient::new(self.channel(address)?)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// One call on the stream to a peer, which is opened if there is none.
    pub async fn piped<T>(
        &self,
        address: &str,
        request: Piped,
        timeout: Duration,
        take: impl FnOnce(PipedAnswer) -> Option<T>,
    ) -> Result<T, Status> {
        let pipe = self.pipe(address)?;
        let answer = pipe.call(request, timeout).await?;
        if let Some(header) = header(&answer) {
            self.lock().told_of_membership(header.membership);
        }
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

    /// Takes in what a failed attempt, which began at that time, says of its peer and of the leader. One that has too much
    /// to do leads as before: to ask all peers who does would only give them more of it. One that cannot reach a quorum
    /// names itself, and is left all the same.
    pub fn after_failure(&self, address: &str, began: Instant, failure: &Failure) {
        let mut shared = self.lock();
        let detail = status::detail(&failure.status);
        let now = clock::now();
        if failure.broken || failure.kind() != Some(Kind::Overloaded) {
            shared.view.forget(address, began, now);
        }
        if let Some(d) = detail {
            let leader = d.leader.map(|l| Self::reachable(&shared, l)).filter(|l| l.grpc_address != address);
            shared.view.learn_at(now, d.term, leader.as_ref());
            let known = |l: &v1::Member| {
                self.config.endpoints.contains(&l.grpc_address) || shared.learnt.contains(&l.grpc_address)
            };
            if leader.is_some_and(|l| !known(&l)) {
                shared.members_due = None;
            }
        }
        if failure.broken {
            shared.forget_connection(address);
        }
    }

    /// Asks every endpoint who leads; whoever comes while that is under way waits for the same answers. Says why no leader
    /// was found.
    pub async fn ask(self: &Arc<Self>) -> Option<String> {
        let round = self.question_round(&mut self.lock());
        why_in_vain(round).await
    }

    /// The same, unless a leader has been found meanwhile.
    pub async fn ask_unless_known(self: &Arc<Self>) -> Option<String> {
        let round = {
            let mut shared = self.lock();
            if shared.view.leader().is_some() {
                return None;
            }
            self.question_round(&mut shared)
        };
        why_in_vain(round).await
    }

    /// The round that is under way, begun if there is none.
    fn question_round(self: &Arc<Self>, shared: &mut Shared) -> Joined<Result<(), String>> {
        if let Some(round) = shared.asking.as_ref().and_then(Flight::join) {
            return round;
        }
        let inner = self.clone();
        // It ends within the time of a question, and keeps the store alive for as long.
        let round = Flight::begin(async move { inner.ask_all().await });
        shared.asking.insert(round).joined()
    }

    /// Asks every endpoint who leads, and learns of it.
    async fn ask_all(&self) -> Result<(), String> {
        let mut why = None;
        let mut answered = Answered::default();
        let endpoints = self.endpoints();
        let mut round = Round::new(endpoints.len());
        let question = self.lock().view.question(clock::now());
        let mut answers: FuturesUnordered<_> = endpoints.iter().map(|e| self.ask_one(e, question, true)).collect();
        let mut until = tokio::time::Instant::now() + question.wait + ASK_TIMEOUT;
        while !round.decided() {
            match tokio::time::timeout_at(until, answers.next()).await {
                Ok(Some(answer)) => {
                    let had_leader = round.has_leader();
                    let answer = answer.and_then(|(address, answer)| {
                        let answer = self.of_our_cluster(address, answer)?;
                        answered.note(address, &answer);
                        Ok(answer)
                    });
                    round.answer(answer.map_err(|e| why = Some(e)).ok());
                    if !had_leader && round.has_leader() {
                        until = until.min(tokio::time::Instant::now() + ASK_GRACE);
                    }
                }
                Ok(None) | Err(_) => break,
            }
        }
        drop(answers);
        if self.learn(round) {
            return Ok(());
        }
        let mut shared = self.lock();
        let why = answered.without_leader(endpoints.len(), shared.cluster_id.is_some(), why);
        shared.in_vain = Some(why.clone());
        Err(why)
    }

    /// Why there was no leader when the peers were last asked.
    pub fn why_in_vain(&self) -> Option<String> {
        self.lock().in_vain.clone()
    }

    /// Takes in what the answers came to. Says whether they name a leader.
    fn learn(&self, round: Round) -> bool {
        let (view, members) = round.finish();
        let mut shared = self.lock();
        let now = clock::now();
        let Some(l) = view.leader() else {
            shared.view.asked_in_vain(now);
            return false;
        };
        let leader = v1::Member { id: l.id, grpc_address: l.address.clone(), ..v1::Member::default() };
        let leader = Self::reachable(&shared, leader);
        shared.view.learn_at(now, l.term, Some(&leader));
        shared.in_vain = None;
        self.learn_members(&mut shared, members);
        true
    }

    /// Keeps who the members are, for when all that are known by now are gone.
    fn learn_members(&self, shared: &mut Shared, members: Vec<v1::Member>) {
        // A member behind an endpoint that was given is asked there.
        let given = |id: &u64| shared.answered_at.get(id).is_some_and(|e| self.config.endpoints.contains(e));
        let members: Vec<_> = members.into_iter().filter(|m| !given(&m.id)).collect();
        shared.learnt = members
            .into_iter()
            .map(|m| m.grpc_address)
            .filter(|a| !a.is_empty() && !self.config.endpoints.contains(a))
            .take(MAX_ENDPOINTS - self.config.endpoints.len())
            .collect();
        shared.members_due = Some(clock::now() + MEMBERS_FOR.mul_f64(rand::rng().random_range(0.5..=1.0)));
    }

    /// The leader to send a call to, if one is known. From time to time it is asked who the members are, beside the call.
    pub fn leader(self: &Arc<Self>) -> Option<String> {
        let mut shared = self.lock();
        let leader = shared.view.leader()?.clone();
        let address = leader.address.clone();
        if Self::members_to_be_asked(&mut shared) {
            self.begin_asking_members(&mut shared, leader, false);
        }
        Some(address)
    }

    /// What a watch does with each message, as it makes no calls: where the members are to be asked for, that is begun, and not waited
    /// for.
    pub fn keep_members(self: &Arc<Self>, membership: u64) {
        let mut shared = self.lock();
        shared.told_of_membership(membership);
        if !Self::members_to_be_asked(&mut shared) {
            return;
        }
        match shared.view.leader().cloned() {
            Some(leader) => self.begin_asking_members(&mut shared, leader, true),
            // The round goes on by itself.
            None => drop(self.question_round(&mut shared)),
        }
    }

    /// Whether it is time to ask who the members are; that is put off then, for whoever comes next.
    fn members_to_be_asked(shared: &mut Shared) -> bool {
        let now = clock::now();
        let due = shared.members_due.is_none_or(|due| now >= due);
        if due {
            shared.members_due = Some(now + MEMBERS_RETRY);
        }
        due
    }

    fn begin_asking_members(self: &Arc<Self>, shared: &mut Shared, leader: KnownLeader, for_watch: bool) {
        // It ends within the time of a question, and keeps the store alive for as long.
        let asking = tokio::spawn(self.clone().ask_members(leader, for_watch));
        shared.asks_members = Some(AbortOnDropHandle::new(asking));
    }

    /// A peer went away under a watch: who the members are is asked for soon, before those that are known have all gone. Many watches
    /// that lose it at once ask once.
    pub fn members_may_have_changed(&self) {
        let mut shared = self.lock();
        let soon = clock::now() + MEMBERS_RETRY;
        shared.members_due = shared.members_due.map(|due| due.min(soon));
    }

    /// `for_watch`: nobody else may find out that another leads. Calls do, and a leader that has too much to do is not to have all clients
    /// ask all peers.
    async fn ask_members(self: Arc<Self>, leader: KnownLeader, for_watch: bool) {
        let question = Question { wait: Duration::ZERO, besides: None };
        // Calls are under way on that connection, and find out whether it is broken.
        let answer = self.ask_one(&leader.address, question, false).await;
        let why = match answer.and_then(|(address, answer)| self.of_our_cluster(address, answer)) {
            // Only a leader's word: the members that an old one knows are of the past.
            Ok(answer) if answer.leader.as_ref().is_some_and(|l| l.id == answer.peer_id) => {
                return self.learn_members(&mut self.lock(), answer.members);
            }
            Ok(answer) => format!("peer {} leads no more", answer.peer_id),
            Err(why) => why,
        };
        tracing::debug!("asking who the members are: {why}");
        if for_watch {
            // The round goes on by itself.
            drop(self.question_round(&mut self.lock()));
        }
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

    /// `alone`: nobody else would find out that the connection has fallen silent.
    async fn ask_one<'a>(
        &self,
        address: &'a str,
        question: Question,
        alone: bool,
    ) -> Result<(&'a str, v1::LeaderResponse), String> {
        let timeout = question.wait + ASK_TIMEOUT;
        let (besides_id, besides_term) = question.besides.unwrap_or_default();
        let wait_ms = u32::try_from(question.wait.as_millis()).unwrap_or(u32::MAX);
        let message = v1::LeaderRequest { wait_ms, besides_id, besides_term };
        let asked = async {
            let mut client = ClusterClient::new(self.channel(address)?);
            client.leader(self.request(message, timeout)?).await
        };
        match tokio::time::timeout(timeout, asked).await {
            Ok(Ok(answer)) => Ok((address, answer.into_inner())),
            Ok(Err(status)) => {
                self.lock().forget_connection(address);
                Err(format!("{address}: {}", describe(&status)))
            }
            Err(_) => {
                if alone {
                    self.lock().forget_connection(address);
                }
                Err(format!("{address}: no answer within {:.1} s", timeout.as_secs_f64()))
            }
        }
    }

    /// A request that tells the peer how long it has.
    pub fn request<T>(&self, message: T, timeout: Duration) -> Result<Request<T>, Status> {
        let mut request = self.untimed(message)?;
        request.set_timeout(timeout);
        Ok(request)
    }

    /// A request that names no time.
    pub fn untimed<T>(&self, message: T) -> Result<Request<T>, Status> {
        let cluster_id = self.lock().cluster_id.clone();
        addressed(message, self.config.secret.as_ref(), cluster_id.as_deref())
    }
}

/// Who answered a question round.
#[derive(Debug, Default)]
struct Answered {
    /// Peers of a cluster.
    members: usize,
    /// Where peers are that belong to none yet.
    fresh: Vec<String>,
}

impl Answered {
    fn note(&mut self, address: &str, answer: &v1::LeaderResponse) {
        match answer.cluster_id.is_empty() {
            true => self.fresh.push(address.to_owned()),
            false => self.members += 1,
        }
    }

    /// Why nobody was found that leads, of so many peers that were asked; `why` is what the last one said that gave no answer.
    fn without_leader(mut self, asked: usize, is_founded: bool, why: Option<String>) -> String {
        self.fresh.sort_unstable();
        let fresh = self.fresh.join(", ");
        let told = match (self.members, self.fresh.len()) {
            (0, 0) => None,
            (0, n) if !is_founded => {
                let (belongs, it) = if n == 1 { ("belongs", "it") } else { ("belong", "them") };
                Some(format!(
                    "{fresh} {belongs} to no cluster yet: found one of all its peers with `lake meta init`, or start {it} with \
                     --join"
                ))
            }
            (members, fresh) => Some(format!(
                "the peers that answered, {} of {asked}, know of no leader: without a majority of the voters there is none",
                members + fresh
            )),
        };
        match (told, why) {
            (Some(told), Some(why)) => format!("{told}; {why}"),
            (told, why) => told.or(why).unwrap_or_else(|| "no peer answered in time".to_owned()),
        }
    }
}

async fn why_in_vain(round: Joined<Result<(), String>>) -> Option<String> {
    match round.outcome().await {
        Some(found) => found.err(),
        None => Some("who asked for the leader has ended".to_owned()),
    }
}

/// A connection to a peer, not opened yet.
pub(super) fn connection(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    Ok(unprobed(address)?
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(false))
}

/// The same, which nobody probes.
fn unprobed(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(format!("http://{address}"))?.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true))
}

/// A failure before anything was sent.
fn unsent(kind: Kind, what: String) -> Status {
    status::status(kind, Applied::NotApplied, what)
}

/// A request that tells the server how long it has, and proves knowledge of the secret.
pub(super) fn request<T>(message: T, timeout: Duration, secret: Option<&Secret>) -> Result<Request<T>, Status> {
    let mut request = addressed(message, secret, None)?;
    request.set_timeout(timeout);
    Ok(request)
}

/// A request that proves knowledge of the secret, and says which cluster is meant.
pub(super) fn addressed<T>(
    message: T,
    secret: Option<&Secret>,
    cluster_id: Option<&str>,
) -> Result<Request<T>, Status> {
    let mut request = Request::new(message);
    if let Some(secret) = secret {
        let header: Result<MetadataValue<Ascii>, _> = secret.bearer().parse();
        let mut header =
            header.map_err(|_| unsent(Kind::Internal, "the cluster secret is no header value".to_owned()))?;
        header.set_sensitive(true);
        request.metadata_mut().insert(lake_proto::SECRET_METADATA_KEY, header);
    }
    if let Some(id) = cluster_id {
        let header = id.parse();
        let header = header.map_err(|_| unsent(Kind::Internal, format!("cluster id {id:?} is no header value")))?;
        request.metadata_mut().insert(lake_proto::CLUSTER_METADATA_KEY, header);
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::super::attempts::classify;
    use super::*;

    #[test]
    fn the_secret_is_never_shown_and_the_cluster_is() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        let request = addressed((), Some(&secret), Some("c1")).unwrap();
        let shown = format!("{:?}", request.metadata());
        assert!(!shown.contains("0123456789abcdef") && shown.contains("c1"), "{shown}");
        let header = request.metadata().get(lake_proto::SECRET_METADATA_KEY).unwrap();
        assert!(secret.matches_bearer(header.as_bytes()));
    }

    #[test]
    fn that_nobody_leads_is_told_with_the_reason() {
        let answers = |clusters: &[&str]| {
            let mut answered = Answered::default();
            for (n, cluster_id) in clusters.iter().enumerate() {
                let answer =
                    v1::LeaderResponse { cluster_id: (*cluster_id).to_owned(), ..v1::LeaderResponse::default() };
                answered.note(&format!("peer{n}:1"), &answer);
            }
            answered
        };
        let refused = || Some("peer2:1: refused".to_owned());
        let fresh = answers(&["", ""]).without_leader(3, false, refused());
        assert!(
            fresh.starts_with("peer0:1, peer1:1 belong to no cluster yet: ") && fresh.ends_with("; peer2:1: refused")
        );
        assert!(fresh.contains("`lake meta init`"), "{fresh}");
        // One that is fresh beside a cluster that was seen is not what is missing.
        for (clusters, is_founded) in [(&["c"][..], false), (&[""][..], true)] {
            let lost = answers(clusters).without_leader(3, is_founded, None);
            assert!(lost.contains("answered, 1 of 3,") && lost.contains("majority of the voters"), "{lost}");
        }
        assert_eq!(answers(&[]).without_leader(3, false, refused()), "peer2:1: refused");
    }

    #[tokio::test(start_paused = true)]
    async fn a_round_goes_on_though_the_one_who_began_it_has_given_up() {
        // Connections are made, and nobody answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let config = RemoteConfig { endpoints: vec![silent.local_addr().unwrap().to_string()], secret: None };
        let inner = Arc::new(Inner::new(config, Dialer::default()));
        let began = clock::now();
        for _ in 0..2 {
            let hurried = tokio::time::timeout(ASK_TIMEOUT / 6, inner.ask()).await;
            assert!(hurried.is_err(), "it is not over: {hurried:?}");
        }
        assert!(inner.ask().await.is_some(), "nobody leads");
        assert!(clock::since(began) < ASK_TIMEOUT + ASK_TIMEOUT / 6, "each has begun one anew");
        assert!(inner.lock().asking.as_ref().unwrap().join().is_none());
    }

    #[tokio::test]
    async fn who_watches_asks_for_the_members_from_time_to_time_and_soon_after_a_peer_went() {
        let config = RemoteConfig { endpoints: vec!["127.0.0.1:1".to_owned()], secret: None };
        let inner = Arc::new(Inner::new(config, Dialer::default()));
        let member = |id: u64| v1::Member { id, grpc_address: format!("127.0.0.1:{id}"), ..v1::Member::default() };
        inner.learn_members(&mut inner.lock(), vec![member(1), member(2)]);
        let due = || inner.lock().members_due.unwrap();
        let later = due();
        inner.keep_members(0);
        assert!(due() == later && inner.lock().asking.is_none(), "they are known");
        inner.members_may_have_changed();
        let soon = due();
        assert!(soon <= clock::now() + MEMBERS_RETRY && soon < later);
        inner.members_may_have_changed();
        assert_eq!(due(), soon, "a second watch puts it off no further");
        // Nobody is known to lead: all are asked; else the leader is.
        inner.lock().members_due = Some(clock::now());
        inner.keep_members(0);
        assert!(inner.lock().asking.is_some() && inner.lock().asks_members.is_none());
        inner.lock().view.learn_at(clock::now(), 5, Some(&member(2)));
        inner.lock().members_due = Some(clock::now());
        inner.keep_members(0);
        assert!(inner.lock().asks_members.is_some() && due() > clock::now());
        // A newer membership is asked for soon, an older one that another peer still has is not.
        for (membership, is_newer) in [(7, true), (7, false), (6, false), (8, true)] {
            let far = clock::now() + Duration::from_secs(3600);
            inner.lock().members_due = Some(far);
            inner.keep_members(membership);
            assert_eq!(due() <= clock::now() + MEMBERS_RETRY, is_newer, "{membership}");
        }
    }

    #[tokio::test]
    async fn a_leader_that_is_no_known_member_has_the_members_asked_for() {
        let config = RemoteConfig { endpoints: vec!["127.0.0.1:1".to_owned()], secret: None };
        let inner = Arc::new(Inner::new(config, Dialer::default()));
        let member = |id: u64| v1::Member { id, grpc_address: format!("127.0.0.1:{id}"), ..v1::Member::default() };
        inner.learn_members(&mut inner.lock(), vec![member(1), member(2)]);
        assert_eq!(inner.endpoints(), ["127.0.0.1:1", "127.0.0.1:2"]);
        for (term, named, asks) in [(5, 2, false), (6, 3, true)] {
            let hint = v1::ErrorDetail {
                kind: Kind::NotLeader as i32,
                term,
                leader: Some(member(named)),
                ..v1::ErrorDetail::default()
            };
            let failure = classify(status::with_detail(hint, "another peer leads"));
            inner.after_failure("127.0.0.1:1", clock::now(), &failure);
            assert_eq!(inner.lock().members_due.is_none(), asks, "peer {named}");
            assert_eq!(inner.leader(), Some(format!("127.0.0.1:{named}")), "the hint is followed");
        }
        assert!(
            inner.lock().asks_members.is_some() && inner.lock().members_due.is_some(),
            "once, and not at each call"
        );
    }
}
