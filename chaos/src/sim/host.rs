//! A peer in the simulation: what outlives its crashes, and its life between two of them.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use lake_client::clock;
use lake_metasrv::config::{Config, StorageConfig};
use lake_metasrv::files::FreeSpace;
use lake_metasrv::log::memory::MemoryDisk;
use lake_metasrv::peer::{Opened, Peer, Settings};
use lake_metasrv::server::{Ground, Server};
use lake_proto::v1;

use super::invariants::Seen;
use super::net;
use super::observer::Eyes;
use super::plan::Plan;

/// Where clients reach any peer.
const CLIENT_PORT: u16 = 9191;
/// Where peers reach any peer.
const RAFT_PORT: u16 = 9192;
/// Between two attempts to found the cluster.
const FOUND_AGAIN: Duration = Duration::from_millis(100);

/// The name of a peer's host.
pub fn name(id: u64) -> String {
    format!("p{id}")
}

/// Where clients reach a peer.
pub fn endpoint(id: u64) -> String {
    format!("{}:{CLIENT_PORT}", name(id))
}

/// A peer as the cluster's founding names it.
fn member(id: u64) -> v1::Member {
    let raft_address = format!("{}:{RAFT_PORT}", name(id));
    v1::Member { id, raft_address, grpc_address: endpoint(id), incarnation: String::new() }
}

/// Everything of a peer that outlives a crash. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Place {
    pub id: u64,
    pub disk: MemoryDisk,
    config: Config,
    /// Those who found the cluster, if it is this peer that is asked to.
    founders: Vec<v1::Member>,
    eyes: Eyes,
    now: Arc<Mutex<Now>>,
}

/// The peer as it is now.
#[derive(Debug, Default)]
struct Now {
    peer: Weak<Peer>,
    /// Why it ended by itself.
    ended: Option<String>,
}

impl Place {
    /// A peer that founds the cluster with others, or, without `founders`, one that joins it.
    pub fn new(id: u64, plan: &Plan, founders: &[u64], eyes: Eyes) -> Self {
        let seed = plan.seed ^ id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let incarnation = format!("{:032x}", (u128::from(seed) << 64) | u128::from(id));
        let dir = PathBuf::from(name(id));
        let config = Config {
            advertise: Some(endpoint(id)),
            raft_advertise: Some(member(id).raft_address),
            join: if founders.is_empty() { (1..=plan.peers).map(endpoint).collect() } else { Vec::new() },
            storage: StorageConfig {
                snapshot_entries: plan.snapshot_entries,
                purge_margin_entries: plan.kept_entries,
                ..StorageConfig::default()
            },
            free_space: FreeSpace::new(|_| Ok(u64::MAX)),
            ..Config::new(id, dir)
        };
        let asked_to_found = founders.first() == Some(&id);
        let founders = founders.iter().filter(|_| asked_to_found).map(|id| member(*id)).collect();
        let disk = MemoryDisk::new(id, incarnation, seed, Duration::from_millis(plan.sync_ms));
        Self { id, disk, config, founders, eyes, now: Arc::default() }
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

    /// From a start until it ends by itself, or its host crashes.
    pub async fn live(self) -> turmoil::Result {
        self.eyes.see(Seen::Started { peer: self.id });
        let settings = Settings::from(&self.config);
        let snapshots = self.config.dir.join("snapshots");
        let opened = Opened::in_memory(&self.disk, snapshots, &settings, self.eyes.on(self.id))?;
        let clients = net::listen(CLIENT_PORT).await?;
        let peers = net::listen(RAFT_PORT).await?;
        let ground = Ground { opened, clients, peers, http: None, dialer: net::dialer() };
        let server = Server::start_on(self.config.clone(), ground).await?;
        self.now(|now| now.peer = Arc::downgrade(server.peer()));
        if !self.founders.is_empty() {
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
