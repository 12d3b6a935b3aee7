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
//! | broken connection, silence, lost lead     | unknown         | as above, if it carries a stamp or does no harm     |
//!
//! A mutation carries the stamp of a session that this client keeps open ([`session`]), so that it may be sent again until
//! it is answered, and the answer is that of the first time, whoever leads by then. A read does no harm.
//!
//! Reads and transactions share one stream per peer ([`pipe`]), so that many made together cost little more than one.
//!
//! Reads may also be made of one peer that is named (`get_from`, `batch_get_from`), which then answers for itself.
//!
//! [`attempts`] runs an operation and sorts its failures, [`session`] and [`window`] number the mutations, [`connections`] has what the attempts go over, [`leader`] what is
//! known of who leads, [`flight`] what all wait for together. [`coordination`] has leases, sessions, scopes and quotas, [`keeper`] keeps a lease alive, [`node`] a query node registered, [`scope`] holds scopes by one,
//! [`shards`] moves shards, [`snapshots`] saves the state.
//!
//! Bounds: a call ends by its deadline; one connection and one stream per endpoint, and another connection for a node's heartbeats; at most [`MAX_ENDPOINTS`] endpoints,
//! those given and those learnt from members; one question round at a time.

pub(crate) mod attempts;
mod connections;
#[cfg(test)]
mod deadlines;
mod flight;
mod leader;
mod pipe;
mod session;
mod window;

pub mod admin;
pub mod coordination;
pub mod keeper;
pub mod node;
mod peer;
pub mod scope;
pub mod shards;
pub mod snapshots;
pub mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_proto::coordination::{LeaseId, Stamp};
use lake_proto::kv::{Condition, KeyValue, Op, Revision, Txn, TxnResult, validate_key, validate_keys};
use lake_proto::v1;
use lake_proto::v1::pipeline_request::Request as Piped;
use lake_proto::v1::pipeline_response::Response as PipedAnswer;

use self::attempts::{At, Attempts, Rules};
use self::connections::{Inner, connection};
use crate::clock;
use crate::dial::Dialer;
use crate::secret::Secret;
use crate::store::{
    Applied, Capabilities, ChangeStream, Committed, Consistency, Error, Lease, MetaStore, Page, Read, ReadOptions,
    Snapshot,
};

/// Most endpoints kept: those given and those learnt.
pub const MAX_ENDPOINTS: usize = 32;

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
    /// Whom reads go to; `None`: whoever leads.
    reads_at: Option<At>,
}

impl RemoteStore {
    /// # Errors
    /// If no endpoint is given, too many are, or one is not `host:port`.
    pub fn connect(config: RemoteConfig) -> Result<Self, Error> {
        Self::connect_by(config, Dialer::default())
    }

    /// The same, with connections that are made by this dialer.
    ///
    /// # Errors
    /// As [`RemoteStore::connect`].
    pub fn connect_by(config: RemoteConfig, dialer: Dialer) -> Result<Self, Error> {
        if config.endpoints.is_empty() || config.endpoints.len() > MAX_ENDPOINTS {
            let given = config.endpoints.len();
            return Err(unusable(format!("{given} endpoints were given; 1 to {MAX_ENDPOINTS} can be")));
        }
        config.endpoints.iter().try_for_each(|endpoint| check_endpoint(endpoint))?;
        Ok(Self { inner: Arc::new(Inner::new(config, dialer)), reads_at: None })
    }

    /// The same store, whose reads are answered by the peer at this endpoint and by no other. Changes go to whoever leads.
    ///
    /// # Errors
    /// If it is not `host:port`.
    pub fn reading_at(&self, endpoint: &str) -> Result<Self, Error> {
        check_endpoint(endpoint)?;
        Ok(self.at(endpoint, false))
    }

    fn at(&self, endpoint: &str, once: bool) -> Self {
        Self { inner: self.inner.clone(), reads_at: Some(At { endpoint: endpoint.into(), once }) }
    }

    /// The endpoints asked: those given, then those learnt.
    pub fn endpoints(&self) -> Vec<String> {
        self.inner.endpoints()
    }

    /// Finds out who leads, by asking every endpoint, or waiting with whoever does that now.
    ///
    /// # Errors
    /// `Unavailable` if nobody names a leader by the deadline.
    pub async fn ask_leader(&self, deadline: Instant) -> Result<(u64, String), Error> {
        let mut attempts = Attempts::new("asking who leads", deadline);
        loop {
            attempts.count += 1;
            let asked = tokio::time::timeout_at(deadline.into(), self.inner.ask()).await;
            if let Some(l) = self.inner.lock().view.leader() {
                return Ok((l.id, l.address.clone()));
            }
            attempts.last = asked.ok().flatten().unwrap_or_else(|| "no peer names a leader".to_owned());
            if !attempts.wait().await {
                return Err(self.unavailable(&attempts, Applied::No));
            }
        }
    }

    /// Runs a transaction once, however often it is sent for that.
    async fn commit_once(&self, txn: &Txn, deadline: Instant) -> Result<Committed, Error> {
        let doing = doing(txn);
        let txn_message = v1::Txn::from(txn.clone());
        let rules = if is_resendable(txn) { Rules::RESENDABLE } else { Rules::ONCE };
        let (answer, resent) = self
            .mutate(&doing, deadline, rules, async |stamp: Option<Stamp>, address: String, timeout| {
                let message = v1::TxnRequest { txn: Some(txn_message.clone()), stamp: stamp.map(Into::into) };
                self.inner.piped(&address, Piped::Txn(message), timeout, txn_answer).await
            })
            .await?;
        Ok(Committed { result: txn_result(doing, answer)?, resent })
    }
}

pub(crate) fn doing(txn: &Txn) -> String {
    match txn.then.iter().find(|o| o.is_write()) {
        Some(op) => format!("committing {}", op.key()),
        None => "running a transaction".to_owned(),
    }
}

fn txn_answer(answer: PipedAnswer) -> Option<v1::TxnResponse> {
    if let PipedAnswer::Txn(txn) = answer { Some(txn) } else { None }
}

fn txn_result(doing: String, answer: v1::TxnResponse) -> Result<TxnResult, Error> {
    TxnResult::try_from(answer).map_err(|e| Error::Internal {
        doing,
        message: format!("the peer's answer cannot be read: {e}"),
        applied: Applied::Unknown,
    })
}

fn unusable(message: String) -> Error {
    Error::Refused { doing: "connecting to the metadata cluster".to_owned(), message }
}

fn check_endpoint(endpoint: &str) -> Result<(), Error> {
    let well_formed = endpoint.rsplit_once(':').is_some_and(|(h, p)| !h.is_empty() && p.parse::<u16>().is_ok());
    if !well_formed || connection(endpoint).is_err() {
        return Err(unusable(format!("{endpoint:?} is not an endpoint: write host:port")));
    }
    Ok(())
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
pub(crate) fn is_resendable(txn: &Txn) -> bool {
    let covered = |key: &str| {
        txn.when.iter().any(|c| c.key == key && matches!(c.condition, Condition::Absent | Condition::ModRevision(_)))
    };
    let changes_own_compare = txn.then.iter().filter(|o| o.is_write()).all(|o| covered(o.key()));
    changes_own_compare && !txn.otherwise.iter().any(|o| o.is_write())
}

#[async_trait]
impl MetaStore for RemoteStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities::CLUSTER
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
        validate_keys(keys)?;
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

    async fn close_snapshot(&self, snapshot: Snapshot, deadline: Instant) -> Result<bool, Error> {
        let message = v1::CloseSnapshotRequest { snapshot: snapshot.to_wire() };
        let answer = self
            .read("closing a snapshot".to_owned(), deadline, async |address, timeout| {
                let request = self.inner.request(message, timeout)?;
                Ok(self.inner.kv(&address)?.close_snapshot(request).await?.into_inner())
            })
            .await?;
        Ok(answer.existed)
    }

    async fn watch(&self, prefix: &str, from: Revision, deadline: Instant) -> Result<ChangeStream, Error> {
        let from = match from {
            // The stream may be opened later than the caller's next change is made.
            0 => self.batch_get(&[], ReadOptions::default(), deadline).await?.revision + 1,
            from => from,
        };
        let mut attempts = Attempts::new(&format!("watching {prefix:?} from revision {from} on"), deadline);
        let mut watch = self.watch(prefix, from)?;
        if watch.opened(deadline).await {
            return Ok(Box::pin(watch));
        }
        attempts.last = "no peer has taken the watch on".to_owned();
        Err(self.unavailable(&attempts, Applied::No))
    }

    async fn grant_lease(&self, ttl: Duration, holder: &str, deadline: Instant) -> Result<Lease, Error> {
        self.grant_lease(ttl, holder, deadline).await
    }

    async fn renew_lease(&self, lease: Lease, deadline: Instant) -> Result<Option<Lease>, Error> {
        let asked = clock::now();
        let alive = self.renew_one_lease(lease.id, deadline).await?;
        Ok(alive.then(|| Lease { held_until: asked + lease.ttl, ..lease }))
    }

    async fn revoke_lease(&self, id: LeaseId, deadline: Instant) -> Result<bool, Error> {
        self.revoke_lease(id, deadline).await
    }

    async fn commit(&self, txn: Txn, deadline: Instant) -> Result<Committed, Error> {
        txn.validate()?;
        loop {
            let committed = self.commit_once(&txn, deadline).await?;
            let result = &committed.result;
            let ran = if result.succeeded { &txn.then } else { &txn.otherwise };
            let changed_nothing = ran.iter().all(|op| matches!(op, Op::Get { .. } | Op::List { .. }));
            // Its first answer was too large to be kept: asked for as a new request, there is a whole one.
            if result.reduced.is_none() || !changed_nothing || clock::now() >= deadline {
                return Ok(committed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Compare, Expected};

    use super::*;
    use crate::clock;

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
        // Bound, so that it is nobody else's, and nobody listens there.
        let nobody = tokio::net::TcpSocket::new_v4().unwrap();
        nobody.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let endpoint = nobody.local_addr().unwrap().to_string();
        let store = RemoteStore::connect(RemoteConfig { endpoints: vec![endpoint.clone()], secret: None }).unwrap();
        let deadline = clock::now() + Duration::from_millis(300);
        let ended = tokio::time::timeout(Duration::from_secs(60), store.cas("/lake/a", None, "1".into(), deadline));
        let error = ended.await.expect("it ends").unwrap_err();
        assert_eq!(error.applied(), Applied::No);
        let message = error.to_string();
        assert!(message.contains("unreachable") && message.contains(&endpoint), "{message}");
    }
}
