//! Calls to the other peers, over one HTTP/2 connection each.
//!
//! Every call carries a [`v1::RaftHeader`] with the cluster id and both ends' incarnations; the receiver refuses what is
//! not meant for it (semantics, section 9). Connections are made when first needed and again after they break; HTTP/2
//! pings notice a peer that went silent without closing, within [`PING_EVERY`] plus [`PING_TIMEOUT`].
//!
//! Snapshots go as one stream: a header, then the file in chunks of [`SNAPSHOT_CHUNK_BYTES`]. The receiver checks every
//! checksum in the file before it installs it. A chunk is read once there is room for it at the receiver's: one that takes nothing
//! fills the sender's memory with no more than HTTP/2 lets be on its way. How long it takes is limited by progress:
//! [`SNAPSHOT_STALL`] for each further chunk.
//!
//! Failure cases: unreachable (openraft backs off and tries again), too slow, refused; none of them is fatal.

use std::collections::HashMap;
use std::fs::File;
use std::future::Future;
use std::io::{self, Read};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, Stream, StreamExt};
use lake_client::dial::Dialer;
use lake_client::secret::Secret;
use lake_proto::v1::raft_client::RaftClient;
use lake_proto::{MAX_MESSAGE_BYTES, SECRET_METADATA_KEY, v1};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendResult, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::storage::Snapshot;
use openraft::vote::leader_id_std::CommittedLeaderId;
use openraft::{OptionalSend, RPCTypes, RaftNetworkFactory, RaftNetworkV2};
use tokio::sync::watch;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::append_stream::{self, AppendFailed};
use super::types::{Member, TypeConfig, Vote};
use super::wire::{
    entry_to_wire, log_id_from_wire, log_id_to_wire, required_vote, snapshot_meta_to_wire, vote_from_wire, vote_to_wire,
};
use crate::blocking::blocking;
use crate::log::lock;
use crate::snapshot::SnapshotData;

/// How often a silent connection is tried.
pub const PING_EVERY: Duration = Duration::from_millis(500);
/// How long such a try may take.
pub const PING_TIMEOUT: Duration = Duration::from_millis(500);
/// Connections that are kept: more than there can be members, but whoever is asked to join may say anything of where it is.
const MAX_CHANNELS: usize = 64;
/// How long connecting may take.
pub const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// Chunks in which a snapshot is sent.
pub const SNAPSHOT_CHUNK_BYTES: usize = 1 << 20;
/// How long the other side may take to accept one more chunk of a snapshot. However large it is, it arrives as long as
/// something of it does.
const SNAPSHOT_STALL: Duration = Duration::from_secs(30);
/// How long it may take to check and install what has arrived.
const SNAPSHOT_INSTALL: Duration = Duration::from_secs(600);
/// Least time for an append with entries, which waits for the other side's disk.
pub(super) const APPEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Adds the cluster secret to a call.
#[derive(Debug, Clone)]
pub struct AddSecret {
    value: Option<MetadataValue<Ascii>>,
}

impl Interceptor for AddSecret {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, Status> {
        if let Some(value) = &self.value {
            request.metadata_mut().insert(SECRET_METADATA_KEY, value.clone());
        }
        Ok(request)
    }
}

/// A client of another peer's Raft service.
pub type Client = RaftClient<InterceptedService<Channel, AddSecret>>;

/// Connections to other peers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Transport {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    secret: AddSecret,
    dialer: Dialer,
    /// Addresses that win over those of the membership.
    overrides: HashMap<u64, String>,
    channels: Mutex<HashMap<u64, (String, Channel)>>,
}

impl Transport {
    /// No connection yet.
    pub fn new(overrides: HashMap<u64, String>, secret: Option<&Secret>) -> Self {
        let value = secret.and_then(|secret| MetadataValue::try_from(secret.bearer()).ok());
        let value = value.map(|mut value| {
            value.set_sensitive(true);
            value
        });
        let (secret, dialer, channels) = (AddSecret { value }, Dialer::default(), Mutex::default());
        Self { inner: Arc::new(Inner { secret, dialer, overrides, channels }) }
    }

    /// The same, none made yet, with connections that are made by this dialer.
    pub fn dialing(self, dialer: Dialer) -> Self {
        let Inner { secret, overrides, .. } = &*self.inner;
        let (secret, overrides, channels) = (secret.clone(), overrides.clone(), Mutex::default());
        Self { inner: Arc::new(Inner { secret, dialer, overrides, channels }) }
    }

    /// How connections are made.
    pub(crate) fn dialer(&self) -> Dialer {
        self.inner.dialer.clone()
    }

    /// Where peer `id` is, if the membership says `address`.
    pub fn resolve<'a>(&'a self, id: u64, address: &'a str) -> &'a str {
        self.inner.overrides.get(&id).map_or(address, String::as_str)
    }

    /// A client of peer `id`. Connects when first used.
    ///
    /// # Errors
    /// When the address is none.
    pub fn client(&self, id: u64, address: &str) -> io::Result<Client> {
        let address = self.resolve(id, address);
        let mut channels = lock(&self.inner.channels);
        let channel = match channels.get(&id) {
            Some((known, channel)) if known == address => channel.clone(),
            _ => {
                if channels.len() >= MAX_CHANNELS {
                    // Who is still talked to is connected to again.
                    channels.clear();
                }
                let endpoint = Endpoint::from_shared(format!("http://{address}"))
                    .map_err(|e| {
                        io::Error::new(io::ErrorKind::InvalidInput, format!("peer {id}'s address {address:?}: {e}"))
                    })?
                    .connect_timeout(CONNECT_TIMEOUT)
                    .http2_keep_alive_interval(PING_EVERY)
                    .keep_alive_timeout(PING_TIMEOUT)
                    .keep_alive_while_idle(true)
                    .initial_stream_window_size(4 << 20)
                    .initial_connection_window_size(8 << 20)
                    .tcp_nodelay(true);
                let channel = self.inner.dialer.channel(&endpoint);
                channels.insert(id, (address.to_owned(), channel.clone()));
                channel
            }
        };
        Ok(RaftClient::with_interceptor(channel, self.inner.secret.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES))
    }
}

/// Who sends: the part of the header that is the same in every call.
#[derive(Debug, Clone)]
pub struct Sender {
    pub cluster_id: String,
    pub id: u64,
    pub incarnation: String,
}

impl Sender {
    /// The header of a call to a member.
    pub fn header(&self, to_id: u64, to: &Member) -> v1::RaftHeader {
        v1::RaftHeader {
            cluster_id: self.cluster_id.clone(),
            from_id: self.id,
            from_incarnation: self.incarnation.clone(),
            to_id,
            to_incarnation: to.incarnation.clone(),
        }
    }
}

/// An append as it is sent.
pub(super) fn append_to_wire(
    header: Option<v1::RaftHeader>,
    rpc: &AppendEntriesRequest<TypeConfig>,
) -> v1::AppendRequest {
    v1::AppendRequest {
        header,
        vote: Some(vote_to_wire(&rpc.vote)),
        prev_log_id: rpc.prev_log_id.map(log_id_to_wire),
        entries: rpc.entries.iter().map(entry_to_wire).collect(),
        leader_commit: rpc.leader_commit.map(log_id_to_wire),
    }
}

/// Makes openraft's connections.
#[derive(Debug, Clone)]
pub struct Network {
    pub transport: Transport,
    pub sender: Sender,
    /// Where the membership last said that each peer is. openraft keeps a leader's connections when it replaces a record.
    addresses: Arc<Mutex<HashMap<u64, String>>>,
}

impl Network {
    /// No connection yet.
    pub fn new(transport: Transport, sender: Sender) -> Self {
        Self { transport, sender, addresses: Arc::default() }
    }

    /// The membership says now that peer `id` is at `raft_address`: connections that exist go there from now on.
    pub fn moved(&self, id: u64, raft_address: &str) {
        lock(&self.addresses).insert(id, raft_address.to_owned());
    }
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = PeerNetwork;

    async fn new_client(&mut self, target: u64, node: &Member) -> PeerNetwork {
        self.moved(target, &node.raft_address);
        PeerNetwork { network: self.clone(), target, member: node.clone() }
    }
}

/// openraft's connection to one peer.
#[derive(Debug)]
pub struct PeerNetwork {
    network: Network,
    target: u64,
    member: Member,
}

type RpcError = RPCError<TypeConfig>;
/// The answers of a stream of appends, and how they come to be.
type AppendAnswers<'s> =
    BoxFuture<'s, Result<BoxStream<'s, Result<StreamAppendResult<TypeConfig>, RpcError>>, RpcError>>;

impl PeerNetwork {
    fn header(&self) -> Option<v1::RaftHeader> {
        Some(self.network.sender.header(self.target, &self.member))
    }

    fn client(&self) -> Result<Client, RpcError> {
        self.network
            .transport
            .client(self.target, &self.known_address())
            .map_err(|e| RPCError::Unreachable(Unreachable::new(&e)))
    }

    /// Runs a call with a time limit and sorts its errors.
    async fn call<T>(
        &self,
        action: RPCTypes,
        timeout: Duration,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, RpcError> {
        match tokio::time::timeout(timeout, call).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.error(&status)),
            Err(_) => {
                Err(RPCError::Timeout(Timeout { action, id: self.network.sender.id, target: self.target, timeout }))
            }
        }
    }

    fn error(&self, status: &Status) -> RpcError {
        let message = format!("peer {} at {}: {}", self.target, self.address(), status.message());
        match status.code() {
            // A peer with a full disk, too, is asked again later and not at once.
            Code::Unavailable | Code::Unknown | Code::ResourceExhausted => {
                RPCError::Unreachable(Unreachable::from_string(message))
            }
            Code::PermissionDenied | Code::Unauthenticated => {
                tracing::warn!("{message}");
                RPCError::Unreachable(Unreachable::from_string(message))
            }
            _ => RPCError::Network(NetworkError::from_string(message)),
        }
    }

    fn known_address(&self) -> String {
        let addresses = lock(&self.network.addresses);
        addresses.get(&self.target).unwrap_or(&self.member.raft_address).clone()
    }

    fn address(&self) -> String {
        self.network.transport.resolve(self.target, &self.known_address()).to_owned()
    }

    fn nonsense(&self, what: impl std::fmt::Display) -> RpcError {
        RPCError::Network(NetworkError::from_string(format!("peer {} at {}: {what}", self.target, self.address())))
    }

    fn vote_request(&self, rpc: &VoteRequest<TypeConfig>) -> v1::VoteRequest {
        v1::VoteRequest {
            header: self.header(),
            vote: Some(vote_to_wire(&rpc.vote)),
            last_log_id: rpc.last_log_id.map(log_id_to_wire),
            leadership_transfer: rpc.leadership_transfer,
        }
    }

    fn vote_response(&self, response: v1::VoteResponse) -> Result<VoteResponse<TypeConfig>, RpcError> {
        let vote = required_vote(response.vote).map_err(|e| self.nonsense(e))?;
        Ok(VoteResponse::new(vote, response.last_log_id.map(log_id_from_wire), response.granted))
    }
}

impl RaftNetworkV2<TypeConfig> for PeerNetwork {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RpcError> {
        let timeout = if rpc.entries.is_empty() { option.hard_ttl() } else { APPEND_TIMEOUT.max(option.hard_ttl()) };
        let request = append_to_wire(self.header(), &rpc);
        let mut client = self.client()?;
        let response = self.call(RPCTypes::AppendEntries, timeout, client.append(request)).await?;
        use v1::append_response::Result as Wire;
        match response.result {
            Some(Wire::Success(_)) => Ok(AppendEntriesResponse::Success),
            Some(Wire::PartialSuccess(id)) => Ok(AppendEntriesResponse::PartialSuccess(Some(log_id_from_wire(id)))),
            Some(Wire::Conflict(_)) => Ok(AppendEntriesResponse::Conflict),
            Some(Wire::HigherVote(vote)) => Ok(AppendEntriesResponse::HigherVote(vote_from_wire(vote))),
            None => Err(self.nonsense("an answer to an append without a result")),
        }
    }

    /// Appends without waiting for the answers to those before: while one is being synced, the next is on its way.
    fn stream_append<'s, S>(&'s mut self, mut input: S, _option: RPCOption) -> AppendAnswers<'s>
    where
        S: Stream<Item = AppendEntriesRequest<TypeConfig>> + OptionalSend + Unpin + 'static,
    {
        async move {
            // After failures openraft waits where it makes the next request. Asked for only once there is a connection, to a
            // peer that refuses connections it would never be, and one attempt would follow on the other without a pause.
            let Some(first) = input.next().await else { return Ok(futures::stream::empty().boxed()) };
            let input = futures::stream::iter([first]).chain(input);
            let mut client = self.client()?;
            let (pipeline, requests) = append_stream::pipeline(self.header(), input);
            let opening = client.append_stream(requests);
            let answers = self.call(RPCTypes::AppendEntries, APPEND_TIMEOUT, opening).await?;
            let this = &*self;
            let results = append_stream::results(pipeline, answers).map(move |result| {
                result.map_err(|failed| match failed {
                    AppendFailed::Status(status) => this.error(&status),
                    AppendFailed::Nonsense(what) => this.nonsense(what),
                    AppendFailed::Silent => RPCError::Timeout(Timeout {
                        action: RPCTypes::AppendEntries,
                        id: this.network.sender.id,
                        target: this.target,
                        timeout: APPEND_TIMEOUT,
                    }),
                })
            });
            Ok(results.boxed())
        }
        .boxed()
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        let mut client = self.client()?;
        let request = self.vote_request(&rpc);
        let response = self.call(RPCTypes::Vote, option.hard_ttl(), client.vote(request)).await?;
        self.vote_response(response)
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        let mut client = self.client()?;
        let request = self.vote_request(&rpc);
        let response = self.call(RPCTypes::Vote, option.hard_ttl(), client.pre_vote(request)).await?;
        self.vote_response(response)
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot<CommittedLeaderId<u64>, u64, Member, SnapshotData>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let cannot_read = |e: io::Error| {
            let what = format!("reading the snapshot {} to send it: {e}", snapshot.snapshot.path.display());
            StreamingError::Network(NetworkError::from_string(what))
        };
        let path = snapshot.snapshot.path.clone();
        let opening = blocking(move || {
            let file = File::open(path)?;
            let size = file.metadata()?.len();
            Ok((file, size))
        });
        let (file, size) = opening.await.map_err(cannot_read)?;
        let header = v1::SnapshotHeader {
            header: self.header(),
            vote: Some(vote_to_wire(&vote)),
            meta: Some(snapshot_meta_to_wire(&snapshot.meta)),
            size,
        };
        let mut client = self.client()?;
        tracing::info!(to = self.target, bytes = size, "sending a snapshot");
        let (accepted, progress) = watch::channel(0);
        let sending = client.snapshot(snapshot_messages(header, file, accepted));
        tokio::select! {
            closed = cancel => Err(StreamingError::Closed(closed)),
            response = sending => {
                let response = response.map_err(|status| self.error(&status))?.into_inner();
                let vote = required_vote(response.vote).map_err(|e| self.nonsense(e))?;
                Ok(SnapshotResponse::new(vote))
            }
            timeout = stalled(progress) => {
                let (action, id, target) = (RPCTypes::InstallSnapshot, self.network.sender.id, self.target);
                Err(RPCError::Timeout(Timeout { action, id, target, timeout }).into())
            }
        }
    }

    async fn transfer_leader(
        &mut self,
        req: TransferLeaderRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RpcError> {
        let mut client = self.client()?;
        let request = v1::TransferLeaderRequest {
            header: self.header(),
            from_leader: Some(vote_to_wire(req.from_leader())),
            to_node: *req.to_node_id(),
            last_log_id: req.last_log_id().copied().map(log_id_to_wire),
        };
        let response = self.call(RPCTypes::TransferLeader, option.hard_ttl(), client.transfer_leader(request)).await?;
        if response.accepted { Ok(Ok(())) } else { Err(self.nonsense(response.reason)) }
    }
}

/// Resolves once a transfer has stood still for too long: while chunks are still to be accepted, or, once the channel is
/// closed, while the other side installs them. Says for how long.
async fn stalled(mut progress: watch::Receiver<u64>) -> Duration {
    loop {
        match tokio::time::timeout(SNAPSHOT_STALL, progress.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => break,
            Err(_) => return SNAPSHOT_STALL,
        }
    }
    tokio::time::sleep(SNAPSHOT_INSTALL).await;
    SNAPSHOT_INSTALL
}

/// The header, then the file's chunks. A read error ends the stream early, which the receiver notices by the size. `accepted`
/// counts the chunks that were asked for, and is dropped after the last.
fn snapshot_messages(
    header: v1::SnapshotHeader,
    file: File,
    accepted: watch::Sender<u64>,
) -> impl Stream<Item = v1::SnapshotMessage> + Send + 'static {
    use v1::snapshot_message::Message;
    let head = futures::stream::iter([v1::SnapshotMessage { message: Some(Message::Header(header)) }]);
    let chunks = futures::stream::unfold((file, accepted), |(file, accepted)| async move {
        let reading = blocking(move || {
            let mut chunk = Vec::with_capacity(SNAPSHOT_CHUNK_BYTES);
            (&file).take(SNAPSHOT_CHUNK_BYTES as u64).read_to_end(&mut chunk)?;
            Ok((chunk, file))
        });
        let read = reading.await.inspect_err(|e| tracing::warn!("reading a snapshot to send it: {e}"));
        let (chunk, file) = read.ok().filter(|(chunk, _)| !chunk.is_empty())?;
        accepted.send_modify(|chunks| *chunks += 1);
        Some((v1::SnapshotMessage { message: Some(Message::Chunk(chunk.into())) }, (file, accepted)))
    });
    head.chain(chunks)
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
