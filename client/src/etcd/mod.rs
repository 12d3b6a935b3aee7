//! An etcd as a metadata store, over its v3 API.
//!
//! A key is kept under a root, as it is; a transaction is one of etcd's, its revisions are etcd's. Every listing and
//! snapshot sees one revision for as long as etcd has not compacted it. A lease is etcd's, with a key beside it
//! (`<root>\0lease/<id>`) that hangs on it: a compare that the lease is alive is one that this key exists.
//!
//! What etcd does not have, and this store refuses: scopes, and compares with the term of an entry. etcd has limits of its
//! own: as started by default, 128 operations in a transaction and 1.5 MiB in a request.
//!
//! etcd knows no sessions: a change whose answer was lost is sent again only if each write in it is covered by a compare on
//! that very key; the answer then says `resent`. Any other ends as unknown.
//!
//! A watch is one of everything in etcd, and what lies elsewhere is left out here: only so does every revision come to it, in
//! order, and tell how far it has come. etcd can be asked for a watch's progress, too, but before 3.5.8 and 3.4.25 its answer may
//! come ahead of changes that it counts as told. So each watch costs the bandwidth of all changes.
//!
//! `txn` has how a transaction becomes one of etcd's, `watch` what its watch tells, `answers` what its answers and errors mean.
//!
//! Limits: one connection per endpoint; one attempt at a time, of at most [`ATTEMPT_TIMEOUT`], within the deadline.

mod answers;
mod txn;
mod watch;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use lake_proto::MAX_MESSAGE_BYTES;
use lake_proto::coordination::{LeaseId, validate_holder, validate_lease_ttl};
use lake_proto::etcd as wire;
use lake_proto::etcd::kv_client::KvClient;
use lake_proto::etcd::lease_client::LeaseClient;
use lake_proto::etcd::request_op::Request as WireRequest;
use lake_proto::etcd::response_op::Response as WireResponse;
use lake_proto::etcd::watch_client::WatchClient;
use lake_proto::kv::{KeyValue, Op, Revision, Txn, validate_key, validate_keys, validate_prefix};
use lake_proto::limits::page_limit;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use self::answers::{
    entry, fitting, header, is_busy, is_refusal, is_too_large, refused, signed, too_large, unreadable,
};
use self::watch::{Watching, revision};
use crate::backoff::Backoff;
use crate::clock;
use crate::remote::attempts::{Resend, describe, transport_error};
use crate::remote::{doing, is_resendable};
use crate::store::{
    Applied, Capabilities, ChangeStream, Committed, Consistency, Error, InVain, Leader, Lease, MetaStore, Page, Read,
    ReadOptions, Snapshot,
};

/// How long one attempt may take before another endpoint is tried.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(4);
/// How long an endpoint may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// A silent connection is probed after this long; etcd hangs up on who asks more often than every 5 s ...
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// ... and given up this long after the probe.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(2);
/// What etcd takes in one transaction, as started by default: compares and operations ...
const MAX_TXN_OPS: usize = 128;
/// ... and bytes of keys and values, which leaves room in its 1.5 MiB for keys that are named again.
const MAX_TXN_BYTES: usize = (1 << 20) + (64 << 10);
/// As etcd writes "from the first key on", and "all of them".
const EVERYTHING: Bytes = Bytes::from_static(b"\0");
/// Keys read by one request.
const KEYS_AT_ONCE: usize = 100;

/// A store that is an etcd. Connects when first used.
#[derive(Debug)]
pub struct EtcdStore {
    endpoints: Vec<String>,
    channels: Vec<Channel>,
    /// The endpoint that answered last.
    turn: AtomicUsize,
    root: String,
}

impl EtcdStore {
    /// # Errors
    /// `Refused` if no endpoint is given, or one is not `host:port`.
    pub fn connect(endpoints: Vec<String>, root: &str) -> Result<Self, Error> {
        let unusable = |message: String| Error::Refused { doing: "connecting to etcd".to_owned(), message };
        if endpoints.is_empty() {
            return Err(unusable("no endpoint was given".to_owned()));
        }
        let channel = |endpoint: &String| match Endpoint::from_shared(format!("http://{endpoint}")) {
            Ok(connection) => Ok(connection
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
                .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
                .connect_lazy()),
            Err(e) => Err(unusable(format!("{endpoint:?} is not an endpoint ({e}): write host:port"))),
        };
        let channels = endpoints.iter().map(channel).collect::<Result<_, _>>()?;
        Ok(Self { endpoints, channels, turn: AtomicUsize::new(0), root: root.to_owned() })
    }

    /// One call, at one endpoint after the other until it is answered, refused, or its time is over. The answer comes with
    /// whether an earlier attempt may have been applied.
    async fn call<T, F>(
        &self,
        doing: &str,
        deadline: Instant,
        resend: Resend,
        send: impl Fn(Channel) -> F,
    ) -> Result<(T, bool), Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let (started, mut backoff) = (clock::now(), Backoff::default());
        let (mut attempts, mut in_doubt) = (0, false);
        let in_vain = |attempts, last| InVain {
            doing: doing.to_owned(),
            attempts,
            elapsed: clock::since(started),
            leader: Leader::Without,
            last,
        };
        loop {
            let turn = self.turn.load(Ordering::Relaxed) % self.channels.len();
            let by = deadline.min(clock::now() + ATTEMPT_TIMEOUT);
            attempts += 1;
            let (never_done, last) = match tokio::time::timeout_at(by.into(), send(self.channels[turn].clone())).await {
                Ok(Ok(answer)) => return Ok((answer, in_doubt)),
                Ok(Err(status)) if is_too_large(&status) => {
                    let applied = if resend == Resend::Freely { Applied::No } else { Applied::Unknown };
                    return Err(too_large(doing).with_applied(applied));
                }
                Ok(Err(status)) if is_refusal(&status) && in_doubt => {
                    return Err(in_vain(attempts, describe(&status)).in_doubt());
                }
                Ok(Err(status)) if is_refusal(&status) => return Err(refused(doing, &status)),
                Ok(Err(status)) => {
                    let (never_sent, _) = transport_error(&status);
                    let last = format!("{}: {}", self.endpoints[turn], describe(&status));
                    (never_sent || is_busy(&status), last)
                }
                Err(_) => (false, format!("{}: no answer in time", self.endpoints[turn])),
            };
            in_doubt |= !never_done && resend != Resend::Freely;
            self.turn.store(turn + 1, Ordering::Relaxed);
            if in_doubt && resend == Resend::Never || !backoff.wait(deadline).await {
                let applied = if in_doubt { Applied::Unknown } else { Applied::No };
                return Err(in_vain(attempts, last).unavailable(self.endpoints.clone(), applied));
            }
        }
    }

    /// A read: whether it was made does not matter.
    async fn read<T, F>(&self, doing: &str, deadline: Instant, send: impl Fn(Channel) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        Ok(self.call(doing, deadline, Resend::Freely, send).await?.0)
    }

    /// One range of keys, or the beginning of it, if all of it is more than one answer takes. `revision` 0: as it is now.
    async fn range(
        &self,
        doing: &str,
        request: wire::RangeRequest,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<(Revision, wire::RangeResponse), Error> {
        let mut request = at(request, options);
        let (started, mut backoff, mut attempts) = (clock::now(), Backoff::default(), 0);
        loop {
            attempts += 1;
            let read = async |channel: Channel| fitting(kv(channel).range(request.clone()).await);
            let Some(response) = self.read(doing, deadline, read).await? else {
                if request.limit <= 1 {
                    return Err(too_large(doing));
                }
                request.limit /= 2;
                continue;
            };
            let now = header(doing, &response.header)?;
            let revision = if request.revision > 0 { request.revision as Revision } else { now };
            if options.snapshot.is_some() || now >= options.min_revision {
                return Ok((revision, response));
            }
            // etcd is behind what another store of it has seen, or the revision is one of the future.
            if !backoff.wait(deadline).await {
                let last = format!("etcd is at revision {now}, and {} is waited for", options.min_revision);
                let elapsed = clock::since(started);
                let in_vain = InVain { doing: doing.to_owned(), attempts, elapsed, leader: Leader::Without, last };
                return Err(in_vain.unavailable(self.endpoints.clone(), Applied::No));
            }
        }
    }

    fn key(&self, key: &str) -> Bytes {
        format!("{}{key}", self.root).into()
    }

    /// From where to where the keys under a prefix lie.
    fn under(&self, prefix: &str) -> (Bytes, Bytes) {
        // What is no key of lake's, such as those of leases, does not begin so.
        let from = self.key(if prefix.is_empty() { "/" } else { prefix });
        let mut until = from.to_vec();
        // The text is UTF-8, in which the byte 255 does not occur.
        if let Some(last) = until.last_mut() {
            *last += 1;
        }
        (from, until.into())
    }

    fn lease_key(&self, id: LeaseId) -> Bytes {
        self.key(&format!("\0lease/{id}"))
    }

    fn entries(&self, doing: &str, entries: Vec<wire::KeyValue>) -> Result<Vec<KeyValue>, Error> {
        let entries: Result<_, String> = entries.into_iter().map(|found| entry(&self.root, found)).collect();
        entries.map_err(|what| unreadable(doing, what))
    }
}

fn kv(channel: Channel) -> KvClient<Channel> {
    KvClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES)
}

fn at(request: wire::RangeRequest, options: ReadOptions) -> wire::RangeRequest {
    match options.snapshot {
        Some(snapshot) => wire::RangeRequest { revision: signed(snapshot.to_wire()), ..request },
        None => wire::RangeRequest { serializable: options.consistency == Consistency::Local, ..request },
    }
}

#[async_trait]
impl MetaStore for EtcdStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scopes: false, txn_ops: MAX_TXN_OPS, txn_bytes: MAX_TXN_BYTES, ..Capabilities::CLUSTER }
    }

    async fn get(&self, key: &str, options: ReadOptions, deadline: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        validate_key(key)?;
        let doing = format!("reading {key}");
        let request = wire::RangeRequest { key: self.key(key), ..Default::default() };
        let (revision, response) = self.range(&doing, request, options, deadline).await?;
        Ok(Read { revision, value: self.entries(&doing, response.kvs)?.pop() })
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        validate_keys(keys)?;
        let doing = format!("reading {} keys", keys.len());
        // All at the revision of the first.
        let at_one = match options.snapshot {
            Some(snapshot) => snapshot,
            None => self.open_snapshot(options, deadline).await?.value,
        };
        let mut found = Vec::new();
        let (mut rest, mut at_once) = (keys, KEYS_AT_ONCE);
        while !rest.is_empty() {
            let (these, behind) = rest.split_at(at_once.min(rest.len()));
            let ranges = these.iter().map(|key| {
                let range = wire::RangeRequest { key: self.key(key), ..Default::default() };
                wire::RequestOp { request: Some(WireRequest::RequestRange(at(range, ReadOptions::at(at_one)))) }
            });
            let request = wire::TxnRequest { success: ranges.collect(), ..Default::default() };
            let read = async |channel: Channel| fitting(kv(channel).txn(request.clone()).await);
            let Some(response) = self.read(&doing, deadline, read).await? else {
                if these.len() == 1 {
                    return Err(too_large(&doing));
                }
                at_once = these.len() / 2;
                continue;
            };
            for answer in response.responses {
                let Some(WireResponse::ResponseRange(range)) = answer.response else {
                    return Err(unreadable(&doing, "a read's answer is of another kind".to_owned()));
                };
                found.extend(self.entries(&doing, range.kvs)?);
            }
            rest = behind;
        }
        Ok(Read { revision: at_one.to_wire(), value: found })
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Page>, Error> {
        validate_prefix(prefix)?;
        let doing = format!("listing {prefix}");
        let mut request = self.list_request(prefix, page_limit(limit) as i64);
        let mut options = options;
        if let Some(page) = page {
            // Where the page begins, and at which revision.
            let token = page.split_once(' ').and_then(|(revision, key)| Some((revision.parse().ok()?, key)));
            let Some((revision, key)) = token else {
                return Err(Error::snapshot_expired(&doing));
            };
            options = Snapshot::from_wire(revision).map_or(options, ReadOptions::at);
            request.key = self.key(key);
        }
        let (revision, response) = self.range(&doing, request, options, deadline).await?;
        let entries = self.entries(&doing, response.kvs)?;
        // The first key behind the last one.
        let next = entries.last().filter(|_| response.more).map(|last| format!("{revision} {}\0", last.key));
        Ok(Read { revision, value: Page { entries, next } })
    }

    async fn open_snapshot(&self, options: ReadOptions, deadline: Instant) -> Result<Read<Snapshot>, Error> {
        let doing = "opening a snapshot";
        let request = wire::RangeRequest { key: self.key("/"), ..Default::default() };
        let (revision, _) = self.range(doing, request, options, deadline).await?;
        let value = Snapshot::from_wire(revision).ok_or_else(|| unreadable(doing, "revision 0".to_owned()))?;
        Ok(Read { revision, value })
    }

    async fn commit(&self, txn: Txn, deadline: Instant) -> Result<Committed, Error> {
        txn.validate()?;
        let doing = doing(&txn);
        let compares = txn.when.iter().map(|compare| self.compare(compare)).collect::<Result<Vec<_>, _>>()?;
        let requests = |ops: &[Op]| ops.iter().map(|op| self.request(op)).collect::<Result<Vec<_>, _>>();
        let mut failure = requests(&txn.otherwise)?;
        failure.extend(txn.when.iter().filter_map(|compare| self.look(compare)));
        let request = wire::TxnRequest { compare: compares.concat(), success: requests(&txn.then)?, failure };
        let send = async |channel: Channel| Ok(kv(channel).txn(request.clone()).await?.into_inner());
        let resend = if is_resendable(&txn) { Resend::Harmless } else { Resend::Never };
        let (response, resent) = self.call(&doing, deadline, resend, send).await?;
        let result = self.result(&txn, response);
        let result = result.map_err(|what| unreadable(&doing, what).with_applied(Applied::Unknown))?;
        Ok(Committed { result, resent })
    }

    async fn watch(&self, prefix: &str, from: Revision, deadline: Instant) -> Result<ChangeStream, Error> {
        validate_prefix(prefix)?;
        let doing = format!("watching {prefix:?}");
        let create = wire::WatchCreateRequest {
            key: EVERYTHING,
            range_end: EVERYTHING,
            start_revision: signed(from),
            progress_notify: true,
            fragment: true,
        };
        let request =
            wire::WatchRequest { request_union: Some(wire::watch_request::RequestUnion::CreateRequest(create)) };
        let opened = self
            .read(&doing, deadline, async |channel| {
                // The request's side stays open for as long as the watch does.
                let requests =
                    futures::StreamExt::chain(futures::stream::iter([request.clone()]), futures::stream::pending());
                let mut requests = tonic::Request::new(requests);
                // A member without a leader, which would tell of nothing, ends the watch.
                requests.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
                let mut client = WatchClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
                let mut stream = client.watch(requests).await?.into_inner();
                let first = stream.message().await?;
                let first = first.ok_or_else(|| Status::unavailable("etcd ended the stream"))?;
                Ok((stream, first))
            })
            .await?;
        let (stream, first) = opened;
        let watching = Watching {
            seen: revision(&first),
            told: 0,
            told_at: clock::now(),
            stream,
            first: Some(first),
            unfinished: None,
            from_now: from == 0,
            under: self.under(prefix),
            root: self.root.clone(),
            endpoints: self.endpoints.clone(),
            doing,
            since: clock::now(),
        };
        Ok(Box::pin(futures::stream::unfold(Some(watching), |watching| async move {
            let mut watching = watching?;
            match watching.next().await {
                Ok(changes) => Some((Ok(changes), Some(watching))),
                Err(e) => Some((Err(e), None)),
            }
        })))
    }

    async fn grant_lease(&self, ttl: Duration, holder: &str, deadline: Instant) -> Result<Lease, Error> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        validate_lease_ttl(ttl_ms)?;
        validate_holder(holder)?;
        let (doing, asked) = ("granting a lease", clock::now());
        // etcd counts in seconds. One that lives a little longer than its holder believes does no harm.
        let request = wire::LeaseGrantRequest { ttl: signed(ttl_ms.div_ceil(1000)), id: 0 };
        let grant = async |channel: Channel| Ok(LeaseClient::new(channel).lease_grant(request).await?.into_inner());
        let (granted, _) = self.call(doing, deadline, Resend::Harmless, grant).await?;
        let id = u64::try_from(granted.id).map_err(|_| unreadable(doing, "an id below 0".to_owned()))?;
        let alive = wire::PutRequest {
            key: self.lease_key(id),
            value: holder.to_owned().into(),
            lease: granted.id,
            prev_kv: false,
        };
        let put = async |channel: Channel| kv(channel).put(alive.clone()).await;
        self.call(doing, deadline, Resend::Harmless, put).await?;
        Ok(Lease { id, ttl, held_until: asked + ttl })
    }

    async fn renew_lease(&self, lease: Lease, deadline: Instant) -> Result<Option<Lease>, Error> {
        let (doing, asked) = (format!("renewing lease {}", lease.id), clock::now());
        let request = wire::LeaseKeepAliveRequest { id: signed(lease.id) };
        let renewed = self
            .read(&doing, deadline, async |channel| {
                let requests = futures::stream::iter([request]);
                let mut answers = LeaseClient::new(channel).lease_keep_alive(requests).await?.into_inner();
                answers.message().await?.ok_or_else(|| Status::unavailable("etcd ended the stream"))
            })
            .await?;
        Ok((renewed.ttl > 0).then(|| Lease { held_until: asked + lease.ttl, ..lease }))
    }

    async fn revoke_lease(&self, id: LeaseId, deadline: Instant) -> Result<bool, Error> {
        let request = wire::LeaseRevokeRequest { id: signed(id) };
        let revoke = async |channel: Channel| match LeaseClient::new(channel).lease_revoke(request).await {
            Ok(_) => Ok(true),
            Err(status) if status.code() == Code::NotFound => Ok(false),
            Err(status) => Err(status),
        };
        // Not there, when an earlier attempt has lost its answer: it was that attempt that ended it, or there was none.
        let (existed, resent) = self.call(&format!("revoking lease {id}"), deadline, Resend::Harmless, revoke).await?;
        Ok(existed || resent)
    }
}
