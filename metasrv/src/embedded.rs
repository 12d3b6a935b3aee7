//! A metadata store in this process: a cluster of one peer without any listener, behind the [`MetaStore`] trait.
//!
//! It is the same peer as any other, with the same log, snapshots and state machine, so its directory can later be started
//! as a peer of its own and grown to three. It refuses a directory whose cluster has other voters. [`node`]: a query node in the same
//! process, which it coordinates.

pub mod node;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use lake_client::clock;
use lake_client::store::{
    self, Capabilities, ChangeStream, Committed, Lease, MetaStore, Page, Read, ReadOptions, Snapshot,
};
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{KeyValue, Revision, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::{Applied, Kind};
use lake_proto::watch::Changes;
use prost::Message as _;

use crate::error::Error;
use crate::peer::duties::Mortal;
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::shares::{Call, Caller};
use crate::peer::{Opened, Peer, Settings, founding};
use crate::raft::network::Transport;

/// How long opening may wait until the log is recovered.
const RECOVERY: Duration = Duration::from_secs(60);

/// The store. Close it with [`EmbeddedStore::shutdown`].
pub struct EmbeddedStore {
    dir: PathBuf,
    peer: Arc<Peer>,
    member: Arc<Member>,
    /// All that this process asks for comes from one, so that what the peer has to do itself is not kept out.
    caller: Caller,
}

impl std::fmt::Debug for EmbeddedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddedStore").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl EmbeddedStore {
    /// Opens, or makes, the store in `dir`, and waits until it serves.
    ///
    /// # Errors
    /// In use, damaged, unreadable, or of a cluster with other voters.
    pub async fn open(dir: impl Into<PathBuf>) -> Result<Arc<Self>, Error> {
        Self::open_with(dir, Settings::default()).await
    }

    /// The same with other settings than the default ones.
    ///
    /// # Errors
    /// As [`EmbeddedStore::open`].
    pub async fn open_with(dir: impl Into<PathBuf>, settings: Settings) -> Result<Arc<Self>, Error> {
        let dir = dir.into();
        let opened = Opened::open(dir.clone(), None, &settings).await?;
        let voters = opened.voters().await;
        match voters {
            Ok(0 | 1) => {}
            Ok(voters) => {
                opened.close().await;
                return Err(Error::ManyVoters { dir, voters });
            }
            Err(e) => {
                opened.close().await;
                return Err(e);
            }
        }
        let transport = Transport::new(HashMap::new(), None);
        let peer = Peer::start(opened, String::new(), String::new(), settings, transport).await?;
        match Self::begin(&peer).await {
            Ok(member) => {
                let caller = peer.callers.at(None);
                Ok(Arc::new(Self { dir, peer, member, caller }))
            }
            Err(e) => {
                peer.shutdown().await;
                Err(e)
            }
        }
    }

    /// The store of a peer that runs anyway, for what else is in its process: of any number of voters, and not to be closed.
    pub(crate) fn of(peer: Arc<Peer>, member: Arc<Member>) -> Self {
        let (dir, caller) = (PathBuf::from(format!("peer {}", member.identity.id)), peer.callers.at(None));
        Self { dir, peer, member, caller }
    }

    async fn begin(peer: &Peer) -> Result<Arc<Member>, Error> {
        let member = founding::found_alone(peer).await.map_err(|f| Error::Stopped(f.message))?;
        let mut recovered = member.recovered();
        let waited = tokio::time::timeout(RECOVERY, recovered.wait_for(|recovered| *recovered)).await;
        match waited {
            Ok(Ok(_)) => Ok(member.clone()),
            _ => {
                let problem = member.problem().unwrap_or_else(|| "no reason is known".to_owned());
                Err(Error::Stopped(format!("the store did not recover within {} s: {problem}", RECOVERY.as_secs())))
            }
        }
    }

    /// Where it keeps its data.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Resolves once the store cannot go on, with the reason; the process must then end.
    pub fn failed(&self) -> impl Future<Output = Error> + Send + 'static {
        crate::peer::until_failed(self.peer.failed())
    }

    /// Closes the store; calls that come later fail.
    pub async fn shutdown(&self) {
        self.peer.shutdown().await;
    }

    fn call(&self, deadline: Instant) -> Call {
        Call { caller: self.caller.clone(), deadline }
    }

    fn error(&self, doing: String, started: Instant, failure: Failure) -> store::Error {
        error(&self.dir, doing, started, failure)
    }
}

/// A message of a watch as a caller in this process sees it.
fn changes(doing: String, encoded: bytes::Bytes) -> Result<Changes, store::Error> {
    let response = v1::WatchResponse::decode(encoded).map_err(|e| e.to_string());
    response.and_then(|response| Changes::try_from(response).map_err(|e| e.to_string())).map_err(|what| {
        store::Error::Internal {
            doing,
            message: format!("a message cannot be read: {what}; this is a defect"),
            applied: store::Applied::No,
        }
    })
}

fn error(dir: &Path, doing: String, started: Instant, failure: Failure) -> store::Error {
    let applied = match failure.applied {
        Applied::Unknown => store::Applied::Unknown,
        Applied::NotApplied => store::Applied::No,
    };
    match failure.kind {
        Kind::InvalidArgument
        | Kind::WrongIdentity
        | Kind::Unauthenticated
        | Kind::QuotaExceeded
        | Kind::LimitReached
        | Kind::LeaseExpired
        | Kind::ChangeUnderWay
        | Kind::UnsafeChange => store::Error::Refused { doing, message: failure.message },
        Kind::SessionExpired => store::Error::SessionExpired { doing, message: failure.message },
        Kind::Internal | Kind::Unspecified => store::Error::Internal { doing, message: failure.message, applied },
        Kind::SnapshotExpired => store::Error::SnapshotExpired { doing, message: failure.message },
        Kind::Compacted => store::Error::Compacted { doing, oldest: failure.oldest_revision, message: failure.message },
        Kind::NotLeader | Kind::Unavailable | Kind::Overloaded => store::Error::Unavailable {
            doing,
            endpoints: vec![format!("embedded in this process, {}", dir.display())],
            attempts: 1,
            elapsed: clock::since(started),
            leader: store::Leader::Without,
            last: failure.message,
            applied,
        },
    }
}

#[async_trait]
impl MetaStore for EmbeddedStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities::CLUSTER
    }

    async fn get(
        &self,
        key: &str,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Option<KeyValue>>, store::Error> {
        let started = clock::now();
        let read = self.member.get(key, options, &self.call(deadline)).await;
        let (revision, value) = read.map_err(|f| self.error(format!("reading {key}"), started, f))?;
        Ok(Read { revision, value })
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, store::Error> {
        let started = clock::now();
        let read = self.member.batch_get(keys, options, &self.call(deadline)).await;
        let (revision, value) = read.map_err(|f| self.error(format!("reading {} keys", keys.len()), started, f))?;
        Ok(Read { revision, value })
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Page>, store::Error> {
        let started = clock::now();
        let page = self.member.list(prefix, page, limit, options, &self.call(deadline)).await;
        let page = page.map_err(|f| self.error(format!("listing {prefix}"), started, f))?;
        Ok(Read { revision: page.revision, value: Page { entries: page.entries, next: page.next } })
    }

    async fn open_snapshot(&self, options: ReadOptions, deadline: Instant) -> Result<Read<Snapshot>, store::Error> {
        let started = clock::now();
        let opened = self.member.open_snapshot(options, &self.call(deadline)).await;
        let (revision, value) = opened.map_err(|f| self.error("opening a snapshot".to_owned(), started, f))?;
        Ok(Read { revision, value })
    }

    async fn close_snapshot(&self, snapshot: Snapshot, _: Instant) -> Result<bool, store::Error> {
        Ok(self.member.pages.close_snapshot(snapshot))
    }

    async fn watch(&self, prefix: &str, from: Revision, deadline: Instant) -> Result<ChangeStream, store::Error> {
        let started = clock::now();
        let watcher = self.member.watch(prefix, from, &self.call(deadline)).await;
        let watcher = watcher.map_err(|f| self.error(format!("watching {prefix:?}"), started, f))?;
        let (dir, doing) = (self.dir.clone(), format!("watching {prefix:?}"));
        let messages = futures::stream::unfold(Some(watcher), move |watcher| {
            let (dir, doing) = (dir.clone(), doing.clone());
            async move {
                let mut watcher = watcher?;
                Some(match watcher.next().await {
                    Ok(message) => (changes(doing, message.encoded()), Some(watcher)),
                    Err(failure) => (Err(error(&dir, doing, started, failure)), None),
                })
            }
        });
        Ok(messages.boxed())
    }

    async fn grant_lease(&self, ttl: Duration, holder: &str, deadline: Instant) -> Result<Lease, store::Error> {
        let started = clock::now();
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let granted = self.member.grant_lease(ttl_ms, holder.to_owned(), None, &self.call(deadline)).await;
        let id = granted.map_err(|f| self.error("granting a lease".to_owned(), started, f))?;
        Ok(Lease { id, ttl, held_until: started + ttl })
    }

    async fn renew_lease(&self, lease: Lease, deadline: Instant) -> Result<Option<Lease>, store::Error> {
        let (started, doing) = (clock::now(), format!("renewing lease {}", lease.id));
        let ids = [lease.id];
        let renewed = self.member.keep_alive(Mortal::Lease, &ids, &self.caller, started);
        let late = |_| Err(Failure::unavailable("there was no answer within the deadline"));
        let renewed = tokio::time::timeout_at(deadline.into(), renewed).await.unwrap_or_else(late);
        let kept = renewed.map_err(|f| self.error(doing, started, f))?;
        Ok(kept.alive.contains(&lease.id).then(|| Lease { held_until: started + lease.ttl, ..lease }))
    }

    async fn revoke_lease(&self, id: LeaseId, deadline: Instant) -> Result<bool, store::Error> {
        let started = clock::now();
        let revoked = self.member.revoke_lease(id, None, &self.call(deadline)).await;
        let (_, existed) = revoked.map_err(|f| self.error(format!("revoking lease {id}"), started, f))?;
        Ok(existed)
    }

    async fn commit(&self, txn: Txn, deadline: Instant) -> Result<Committed, store::Error> {
        let started = clock::now();
        txn.validate()?;
        let first = txn.then.first().or(txn.otherwise.first()).map(|op| op.key().to_owned());
        let doing = || format!("committing {}", first.as_deref().unwrap_or("a transaction"));
        let result =
            self.member.commit(txn, None, &self.call(deadline)).await.map_err(|f| self.error(doing(), started, f))?;
        Ok(Committed { result, resent: false })
    }
}
