//! One peer: its data directory, and what stage of its life it is in.
//!
//! ```text
//!   Fresh --- Adopt (cluster id durable in the mark) ---> Member --- wait_for_recovery ---> serves
//! ```
//!
//! A fresh peer has an identity and nothing else; it can only be asked who it is and to become a founder. A
//! [`Member`] runs a consensus core. A peer that finds a cluster id in its mark starts as a member at once.
//!
//! - [`founding`]: `Init`, which makes one cluster of several fresh peers;
//! - `joining`: a fresh peer asks to be taken into a cluster;
//! - [`membership`], [`changes`]: a leader adds, promotes, removes and replaces peers; [`standing`]: a removed one learns it;
//! - [`member`]: reads and transactions; [`watches`]: changes as they happen;
//! - [`coordination`]: leases, sessions, scopes and quotas; [`countdowns`], [`duties`]: what the leader measures and
//!   does for them; [`nodes`]: the query nodes that it coordinates; [`procedures`]: what it runs in steps; [`counters`], [`latencies`]: how often what happened, and how long it took;
//! - [`succession`]: what a voter does whose leader's connection broke;
//! - [`agreement`]: whether the peers still hold the same state;
//! - [`shares`]: what all callers share, in parts; [`ledger`]: the same for what stands in the state; [`untaken`]: for the answers
//!   that wait for them;
//! - [`reads`], [`pages`], [`watchdog`], [`address`], [`view`]: parts of a member; [`disk`]: the room it takes;
//! - [`snapshot_turns`]: which peer writes its snapshot now;
//! - [`failure`]: why a call failed.

pub mod address;
pub mod agreement;
pub mod changes;
pub mod coordination;
pub mod countdowns;
pub mod counters;
pub mod disk;
pub mod duties;
pub mod failure;
pub mod founding;
pub(crate) mod joining;
pub mod latencies;
pub mod ledger;
pub mod member;
pub mod membership;
pub mod nodes;
pub mod pages;
pub mod placement;
pub mod procedures;
pub mod reads;
pub mod shares;
pub mod snapshot_turns;
pub mod standing;
pub mod succession;
pub mod untaken;
pub mod verdicts;
pub mod view;
pub mod watchdog;
pub mod watches;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use lake_client::nodes::Rhythm;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use tokio::sync::{Mutex, watch};

use self::counters::Counter;
use self::disk::Disk;
use self::failure::Failure;
use self::member::Member;
use self::placement::Placement;
use self::procedures::machine::Pace;
use self::shares::Callers;
use self::untaken::Untaken;
use self::verdicts::Verdicts;
use crate::config::{Config, StorageConfig, Timing};
use crate::directory::{self, DirectoryLock, DirectoryOptions};
use crate::error::Error;
use crate::files::FreeSpace;
use crate::log::Log;
use crate::log::memory::MemoryDisk;
use crate::raft::network::Transport;
use crate::raft::state_machine::{DiskReserve, Observe, StateMachine};
use crate::snapshot::SnapshotStore;
use crate::state::FEATURE_LEVEL;

/// Who a peer is (semantics, section 9) and where it can be reached now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub id: u64,
    pub incarnation: String,
    /// Empty when the peer runs embedded.
    pub raft_address: String,
    pub grpc_address: String,
}

impl Identity {
    /// This peer as a member.
    pub fn to_wire(&self) -> v1::Member {
        v1::Member {
            id: self.id,
            raft_address: self.raft_address.clone(),
            grpc_address: self.grpc_address.clone(),
            incarnation: self.incarnation.clone(),
        }
    }

    /// A member, with this peer's own addresses as they are now if it is this peer.
    fn known_as(&self, member: v1::Member) -> v1::Member {
        if member.id == self.id && member.incarnation == self.incarnation { self.to_wire() } else { member }
    }
}

/// What of the configuration a peer needs.
#[derive(Clone)]
pub struct Settings {
    pub timing: Timing,
    pub storage: StorageConfig,
    /// How long the pages of a listing, and snapshots, are held.
    pub page_life: Duration,
    /// How free space is found out.
    pub free_space: FreeSpace,
    /// The highest feature level that the peer can apply.
    pub feature_level: u32,
    /// The times that query nodes keep.
    pub rhythm: Rhythm,
    /// The times that procedures keep.
    pub pace: Pace,
    /// How shards are placed.
    pub placement: Placement,
}

impl From<&Config> for Settings {
    fn from(config: &Config) -> Self {
        Self {
            timing: config.timing,
            storage: config.storage,
            page_life: config.page_life,
            free_space: config.free_space.clone(),
            feature_level: config.feature_level,
            rhythm: config.rhythm,
            pace: config.pace,
            placement: config.placement,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timing: Timing::default(),
            storage: StorageConfig::default(),
            page_life: crate::config::PAGE_LIFE,
            free_space: FreeSpace::default(),
            feature_level: FEATURE_LEVEL,
            rhythm: Rhythm::default(),
            pace: Pace::default(),
            placement: Placement::default(),
        }
    }
}

/// How a peer ends for good, and what it leaves behind of why. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Ends {
    pub failed: watch::Sender<Option<String>>,
    pub verdicts: Verdicts,
}

/// One peer.
pub struct Peer {
    pub identity: Arc<Identity>,
    pub log: Log,
    /// What the data directory takes.
    pub disk: Disk,
    pub(crate) callers: Callers,
    /// Answers that wait for their callers.
    pub untaken: Untaken,
    /// Questions who leads that this peer was asked.
    pub leader_questions: Counter,
    pub(crate) transport: Transport,
    settings: Settings,
    member: ArcSwapOption<Member>,
    /// What becomes the member's. Also serialises founding.
    fresh: Mutex<Option<StateMachine>>,
    ends: Ends,
    lock: std::sync::Mutex<Option<DirectoryLock>>,
}

/// A data directory that is held and open, before the peer's addresses are known.
pub struct Opened {
    log: Log,
    disk: Disk,
    state_machine: StateMachine,
    verdicts: Verdicts,
    /// None of a log in memory.
    lock: Option<DirectoryLock>,
}

impl Opened {
    /// Takes and opens a directory. `id` is `None` for whatever it says (1 if it is new).
    ///
    /// # Errors
    /// In use, of another peer, damaged, unreadable.
    pub async fn open(dir: PathBuf, id: Option<u64>, settings: &Settings) -> Result<Self, Error> {
        let options = DirectoryOptions {
            peer_id: id,
            storage: settings.storage,
            free_space: settings.free_space.clone(),
            feature_level: settings.feature_level,
            skip_sync: Default::default(),
        };
        let disk = Disk::new(dir.clone(), settings.storage.disk_reserve_bytes, settings.free_space.clone());
        let verdicts = Verdicts::in_dir(&dir);
        let opening = tokio::task::spawn_blocking(move || {
            let lock = DirectoryLock::take(&dir)?;
            directory::open(&dir, options).map(|contents| (contents, lock))
        });
        let (contents, lock) =
            opening.await.map_err(|e| Error::Stopped(format!("opening the data directory: {e}")))??;
        let (log, state_machine) = (contents.log, contents.state_machine);
        Ok(Self { log, disk, state_machine, verdicts, lock: Some(lock) })
    }

    /// A peer whose log is in memory, on a disk that outlives it; its snapshots are files in `dir`. Everything that its state
    /// machine does is seen by `observer`. For simulations: nobody else is kept from using either.
    ///
    /// # Errors
    /// A snapshot that cannot be read or is damaged.
    pub fn in_memory(
        log: &MemoryDisk,
        dir: PathBuf,
        settings: &Settings,
        observer: Arc<dyn Observe>,
    ) -> Result<Self, Error> {
        let snapshots = SnapshotStore::open(dir.clone()).map_err(Error::io("opening the snapshots"))?;
        let loaded = directory::load_snapshot(&snapshots, &log.mark(), settings.feature_level)?;
        let bytes = settings.storage.disk_reserve_bytes;
        let disk = Disk::new(dir, bytes, settings.free_space.clone());
        let reserve = DiskReserve { bytes, free_space: settings.free_space.clone() };
        let log = Log::in_memory(log).map_err(Error::io("making the log"))?;
        let state_machine = StateMachine::new(snapshots, log.clone(), reserve, loaded)
            .supporting(settings.feature_level)
            .observed_by(observer);
        Ok(Self { log, disk, state_machine, verdicts: Verdicts::unkept(), lock: None })
    }

    /// The voters of the cluster that the directory belongs to, as its snapshot and log say.
    pub async fn voters(&self) -> Result<usize, Error> {
        let applied = self.state_machine.published().current();
        let mut voters = applied.membership.voter_ids().count();
        let mut next = applied.last.map_or(0, |id| id.index + 1);
        loop {
            let entries = self
                .log
                .read(next.., crate::log::READ_BYTES)
                .await
                .map_err(Error::io("reading the log's membership"))?;
            let Some(last) = entries.last() else { return Ok(voters) };
            next = last.log_id.index + 1;
            for entry in &entries {
                if let crate::raft::types::Payload::Membership(membership) = &entry.payload {
                    voters = membership.voter_ids().count();
                }
            }
        }
    }

    /// Closes the directory again.
    pub async fn close(self) {
        self.log.close().await;
    }
}

impl Peer {
    /// Starts a peer in an open directory: as a member if it belongs to a cluster, else fresh.
    ///
    /// # Errors
    /// When the consensus core does not start.
    pub async fn start(
        opened: Opened,
        raft_address: String,
        grpc_address: String,
        settings: Settings,
        transport: Transport,
    ) -> Result<Arc<Self>, Error> {
        let mark = opened.log.mark();
        let identity = Identity { id: mark.peer_id, incarnation: mark.incarnation, raft_address, grpc_address };
        let peer = Arc::new(Self {
            identity: Arc::new(identity),
            log: opened.log,
            disk: opened.disk,
            callers: Callers::default(),
            untaken: Untaken::default(),
            leader_questions: Counter::default(),
            transport,
            settings,
            member: ArcSwapOption::empty(),
            fresh: Mutex::new(Some(opened.state_machine)),
            ends: Ends { failed: watch::Sender::new(None), verdicts: opened.verdicts },
            lock: std::sync::Mutex::new(opened.lock),
        });
        if !mark.cluster_id.is_empty() {
            let mut fresh = peer.fresh.lock().await;
            if let Err(e) = peer.become_member(&mut fresh, mark.cluster_id).await {
                peer.log.close().await;
                return Err(e);
            }
        }
        Ok(peer)
    }

    async fn become_member(&self, fresh: &mut Option<StateMachine>, cluster_id: String) -> Result<Arc<Member>, Error> {
        let state_machine = fresh
            .take()
            .ok_or_else(|| Error::Stopped("the peer has begun to serve its cluster before and failed".to_owned()))?;
        let member = Member::start(
            self.identity.clone(),
            cluster_id,
            &self.settings,
            self.transport.clone(),
            self.log.clone(),
            state_machine,
            self.ends.clone(),
        )
        .await?;
        self.member.store(Some(member.clone()));
        tracing::info!(peer = self.identity.id, cluster = member.cluster_id, "this peer is a member");
        Ok(member)
    }

    /// Makes a fresh peer a member of `cluster_id`, durably. Nothing happens to one that is.
    ///
    /// # Errors
    /// When it belongs to another cluster, or the mark cannot be written.
    pub async fn adopt(&self, cluster_id: &str) -> Result<Arc<Member>, Failure> {
        let mut fresh = self.fresh.lock().await;
        if let Some(member) = self.member.load_full() {
            if member.cluster_id == cluster_id {
                return Ok(member);
            }
            return Err(Failure::new(
                Kind::WrongIdentity,
                format!(
                    "peer {} belongs to cluster {} and cannot become a founder of {cluster_id}",
                    self.identity.id, member.cluster_id
                ),
            ));
        }
        self.log
            .adopt(cluster_id.to_owned())
            .await
            .map_err(|e| Failure::unavailable(format!("peer {}: noting the cluster's id: {e}", self.identity.id)))?;
        self.become_member(&mut fresh, cluster_id.to_owned()).await.map_err(|e| {
            let what = e.to_string();
            self.ends.failed.send_replace(Some(what.clone()));
            Failure::unavailable(format!("peer {}: {what}", self.identity.id))
        })
    }

    /// The highest feature level that the peer can apply.
    pub fn supported_feature_level(&self) -> u32 {
        self.settings.feature_level
    }

    /// The member, once the peer is one.
    pub fn member(&self) -> Option<Arc<Member>> {
        self.member.load_full()
    }

    /// The member.
    ///
    /// # Errors
    /// Unavailable while the peer is fresh, and once it knows that it was removed or holds another state than the majority:
    /// another peer can help.
    pub fn serving(&self) -> Result<Arc<Member>, Failure> {
        let member = self.member().ok_or_else(|| {
            Failure::unavailable(format!(
                "peer {} belongs to no cluster yet; found one with `lake meta init`, or join it to one",
                self.identity.id
            ))
        })?;
        match member.standing.over() {
            Some(why) => Err(Failure::unavailable(why)),
            None => Ok(member),
        }
    }

    /// Something ends the peer for good.
    pub(crate) fn fail(&self, what: &str) {
        note_end(&self.ends.failed, what.to_owned());
    }

    /// What ended the peer, once something has. `None` until then.
    pub fn failed(&self) -> watch::Receiver<Option<String>> {
        self.ends.failed.subscribe()
    }

    /// Everything this peer knows of itself and its cluster, but for its disk ([`Peer::disk`]). Never waits.
    pub fn status(&self) -> v1::StatusResponse {
        use v1::status_response::Stage;
        let mark = self.log.mark();
        let base = v1::StatusResponse {
            self_: Some(self.identity.to_wire()),
            cluster_id: mark.cluster_id,
            stage: Stage::Fresh as i32,
            problem: self.ends.failed.borrow().clone().unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            supported_feature_level: self.settings.feature_level,
            unix_ms: member::unix_ms(),
            ..v1::StatusResponse::default()
        };
        let Some(member) = self.member() else { return base };
        let metrics = member.view.metrics();
        let applied = member.published.current();
        let problem = member.problem();
        let stage = match &problem {
            Some(_) => Stage::Stopped,
            None if *member.recovered().borrow() => Stage::Member,
            None => Stage::Recovering,
        };
        let (voters, learners) = member.view.members();
        let (purged, last) = self.log.bounds();
        v1::StatusResponse {
            stage: stage as i32,
            problem: problem.or_else(|| member.alarm()).unwrap_or(base.problem),
            term: metrics.current_term,
            leader: member.view.leader(),
            voters,
            learners,
            last_log_index: last.map_or(0, |id| id.index),
            applied_index: applied.last.map_or(0, |id| id.index),
            snapshot_index: metrics.snapshot.map_or(0, |id| id.index),
            purged_index: purged.map_or(0, |id| id.index),
            revision: applied.state.revision(),
            keys: applied.state.len() as u64,
            feature_level: applied.state.feature_level(),
            map_bytes: applied.state.bytes(),
            map_limit_bytes: applied.state.quotas().find(|(prefix, _)| prefix.is_empty()).map(|(_, q)| q.limit_bytes),
            state_hash: applied.last.map(|id| hash_at(id.index, applied.state.digest())),
            compared_hash: applied.notes.newest().map(|note| hash_at(note.index, note.hash)),
            progress: member.changes.progress_of_others(),
            nearly_full_quotas: coordination::nearly_full(&applied.state),
            changing_voters: membership::is_joint(metrics.membership_config.membership()),
            ..base
        }
    }

    /// Ends the peer: ends the core, closes the log, lets the directory go.
    pub async fn shutdown(&self) {
        if let Some(member) = self.member() {
            member.shutdown().await;
        }
        self.log.close().await;
        drop(crate::log::lock(&self.lock).take());
    }
}

fn hash_at(index: u64, hash: u128) -> v1::StateHashAt {
    v1::StateHashAt { index, hash: Bytes::copy_from_slice(&hash.to_be_bytes()) }
}

/// Notes what ends a peer for good. The first word counts.
fn note_end(failed: &watch::Sender<Option<String>>, what: String) {
    failed.send_if_modified(|failed| {
        let first = failed.is_none();
        failed.get_or_insert(what);
        first
    });
}

/// Resolves once something has ended the peer.
pub(crate) async fn until_failed(mut failed: watch::Receiver<Option<String>>) -> Error {
    let what = failed.wait_for(Option::is_some).await.ok().and_then(|what| what.clone());
    match what {
        Some(what) => Error::Stopped(what),
        // The peer was stopped as it should be, and cannot fail any more.
        None => std::future::pending().await,
    }
}
