//! A peer in the simulation: what outlives its crashes, and its life between two of them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use lake_client::clock;
use lake_metasrv::config::{Config, StorageConfig};
use lake_metasrv::files::FreeSpace;
use lake_metasrv::log::memory::MemoryDisk;
use lake_metasrv::peer::{Opened, Peer, Settings};
use lake_metasrv::server::{Ground, Server};
use lake_proto::v1;
use tokio::sync::watch;

use super::invariants::Seen;
use super::net::Ways;
use super::observer::Eyes;
use super::plan::Plan;

/// Where clients reach any peer.
const CLIENT_PORT: u16 = 9191;
/// Where peers reach any peer.
const RAFT_PORT: u16 = 9192;
/// Between two attempts to found the cluster.
const FOUND_AGAIN: Duration = Duration::from_millis(100);
/// How often a clock that goes faster is put ahead, in milliseconds of its own.
const STRIDE_MS: u64 = 20;

/// The name of a peer's host.
pub fn name(id: u64) -> String {
    format!("p{id}")
}

/// Where clients reach a peer.
pub fn endpoint(id: u64) -> String {
    format!("{}:{CLIENT_PORT}", name(id))
}

/// A peer as the cluster's founding names it.
pub fn member(id: u64) -> v1::Member {
    let raft_address = format!("{}:{RAFT_PORT}", name(id));
    v1::Member { id, raft_address, grpc_address: endpoint(id), incarnation: String::new() }
}

/// What tells one disk of a peer from another.
fn incarnation(seed: u64, id: u64) -> String {
    format!("{:032x}", (u128::from(seed) << 64) | u128::from(id))
}

/// Everything of a peer that outlives a crash. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Place {
    pub id: u64,
    pub disk: MemoryDisk,
    seed: u64,
    config: Config,
    /// It joins the cluster of the others.
    joins: bool,
    /// Those who found the cluster, if it is this peer that is asked to.
    founders: Vec<v1::Member>,
    ways: Ways,
    eyes: Eyes,
    now: Arc<Mutex<Now>>,
    gait: watch::Sender<Gait>,
    /// Milliseconds that its clock has been put ahead by, in all its lives.
    ahead_ms: Arc<AtomicU64>,
}

/// How a peer's clock goes beside the simulation's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Gait {
    /// It is to jump by this as soon as the peer runs.
    jump_ms: u64,
    faster_percent: u64,
}

/// The peer as it is now.
#[derive(Debug, Default)]
struct Now {
    peer: Weak<Peer>,
    /// Why it ended by itself.
    ended: Option<String>,
    /// It has lost its disk, and is told to join.
    lost: bool,
}

impl Place {
    /// A peer that founds the cluster with others, or, without `founders`, one that joins it.
    pub fn new(id: u64, plan: &Plan, founders: &[u64], ways: Ways, eyes: Eyes) -> Self {
        let seed = plan.seed ^ id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let disk = MemoryDisk::new(id, incarnation(seed, id), seed, Duration::from_millis(plan.sync_ms));
        let room = disk.clone();
        let dir = PathBuf::from(name(id));
        let config = Config {
            advertise: Some(endpoint(id)),
            raft_advertise: Some(member(id).raft_address),
            join: (1..=plan.peers).map(endpoint).collect(),
            storage: StorageConfig {
                snapshot_entries: plan.snapshot_entries,
                purge_margin_entries: plan.kept_entries,
                ..StorageConfig::default()
            },
            free_space: FreeSpace::new(move |_| Ok(if room.is_full() { 0 } else { u64::MAX })),
            ..Config::new(id, dir)
        };
        let joins = founders.is_empty();
        let asked_to_found = founders.first() == Some(&id);
        let founders = founders.iter().filter(|_| asked_to_found).map(|id| member(*id)).collect();
        let (gait, _) = watch::channel(Gait::default());
        let (now, ahead_ms) = (Arc::default(), Arc::default());
        Self { id, seed, disk, config, joins, founders, ways, eyes, now, gait, ahead_ms }
    }

    fn now<T>(&self, look: impl FnOnce(&mut Now) -> T) -> T {
        look(&mut self.now.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The peer, while it runs.
    pub fn peer(&self) -> Option<Arc<Peer>> {
        self.now(|now| now.peer.upgrade())
    }

    /// Why it ended by itself, once it has.
    pub fn ended(&self) -> Option<String> {
        self.now(|now| now.ended.clone())
    }

    /// Its disk is gone, and with it the snapshots, while it is down: it is started as a peer that joins under its old id.
    ///
    /// # Errors
    /// The snapshots cannot be removed.
    pub fn lose(&self) -> std::io::Result<()> {
        self.disk.lose(incarnation(!self.seed, self.id));
        self.now(|now| now.lost = true);
        std::fs::remove_dir_all(&self.config.dir)
    }

    /// Its clock jumps ahead, as soon as it runs, and goes faster from then on.
    pub fn put_ahead(&self, jump_ms: u64, faster_percent: u64) {
        self.gait.send_modify(|gait| {
            gait.jump_ms += jump_ms;
            gait.faster_percent += faster_percent;
        });
    }

    /// Its clock goes that much less fast again.
    pub fn slow_down(&self, faster_percent: u64) {
        self.gait.send_modify(|gait| gait.faster_percent -= faster_percent);
    }

    /// Milliseconds that its clock has been put ahead by so far, in all its lives.
    pub fn ahead_ms(&self) -> u64 {
        self.ahead_ms.load(Ordering::Relaxed)
    }

    /// Puts the clock of the peer's runtime ahead, for as long as the peer lives. All clocks that it reads are that one, which
    /// the simulation puts ahead as well.
    async fn keep_time(self) {
        let mut gaits = self.gait.subscribe();
        loop {
            let Gait { jump_ms, faster_percent } = *gaits.borrow_and_update();
            let mut ahead_ms = jump_ms;
            if faster_percent > 0 {
                tokio::time::sleep(Duration::from_millis(STRIDE_MS)).await;
                ahead_ms += STRIDE_MS * faster_percent / 100;
            }
            if ahead_ms > 0 {
                self.gait.send_if_modified(|gait| {
                    gait.jump_ms -= jump_ms;
                    false
                });
                tokio::time::advance(Duration::from_millis(ahead_ms)).await;
                self.ahead_ms.fetch_add(ahead_ms, Ordering::Relaxed);
            } else if gaits.changed().await.is_err() {
                return;
            }
        }
    }

    /// From a start until it ends by itself, or its host crashes.
    pub async fn live(self) -> turmoil::Result {
        self.eyes.see(Seen::Started { peer: self.id });
        // Ends with the runtime that it is about.
        tokio::task::spawn_local(self.clone().keep_time());
        let mut config = self.config.clone();
        if !self.joins && !self.now(|now| now.lost) {
            config.join.clear();
        }
        let settings = Settings::from(&config);
        let snapshots = config.dir.join("snapshots");
        let opened = Opened::in_memory(&self.disk, snapshots, &settings, self.eyes.on(self.id))?;
        let clients = self.ways.listen(name(self.id), CLIENT_PORT).await?;
        let peers = self.ways.listen(name(self.id), RAFT_PORT).await?;
        let ground = Ground { opened, clients, peers, http: None, dialer: self.ways.dialer(&name(self.id)) };
        let server = Server::start_on(config, ground).await?;
        self.now(|now| now.peer = Arc::downgrade(server.peer()));
        if !self.founders.is_empty() && !self.now(|now| now.lost) {
            while let Err(failure) = server.peer().init(self.founders.clone()).await {
                tracing::debug!(at = ?clock::wall(), "founding the cluster: {}", failure.message);
                tokio::time::sleep(FOUND_AGAIN).await;
            }
        }
        let why = server.failed().await.to_string();
        self.now(|now| now.ended = Some(why));
        server.shutdown().await;
        Ok(())
    }
}
