//! Peers as processes of their own, which can be killed and paused: the test's own binary, started again, finds in its
//! environment which peer it is.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_metasrv::config::Config;
use lake_metasrv::server::Server;
use lake_proto::v1;
use lake_proto::v1::cluster_client::ClusterClient;
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::Channel;

use super::{PATIENCE, eventually, free_port};

const PEER: &str = "LAKE_TEST_PEER";

/// Not a test by itself: serves as the peer that the environment names, until it fails or is killed. Without one: nothing.
#[tokio::test(flavor = "multi_thread")]
async fn run_one_peer() {
    let Ok(arguments) = std::env::var(PEER) else { return };
    let parts: Vec<&str> = arguments.split('|').collect();
    let mut config = Config::new(parts[0].parse().unwrap(), parts[1]);
    config.listen = parts[2].parse().unwrap();
    config.raft_listen = parts[3].parse().unwrap();
    config.storage.snapshot_entries = parts[4].parse().unwrap();
    config.storage.purge_margin_entries = config.storage.snapshot_entries / 4;
    config.storage.disk_reserve_bytes = 0;
    let server = Server::start(config).await.unwrap();
    eprintln!("{}", server.failed().await);
    server.shutdown().await;
    std::process::exit(1);
}

/// Peers by id, in one temporary directory. What they say is printed if the test fails.
pub struct Processes {
    dirs: tempfile::TempDir,
    snapshot_entries: u64,
    addresses: BTreeMap<u64, (SocketAddr, SocketAddr)>,
    pub children: BTreeMap<u64, Child>,
}

impl Drop for Processes {
    fn drop(&mut self) {
        for id in self.children.keys().copied().collect::<Vec<_>>() {
            self.kill(id);
        }
        if std::thread::panicking() {
            println!("the peers said: {}", std::fs::read_to_string(self.said()).unwrap_or_default());
        }
    }
}

impl Processes {
    /// Three peers, founded, with a leader, which take a snapshot after so many entries.
    pub async fn founded(snapshot_entries: u64) -> Self {
        let dirs = tempfile::tempdir().unwrap();
        let mut this = Self { dirs, snapshot_entries, addresses: BTreeMap::new(), children: BTreeMap::new() };
        for id in 1..=3 {
            this.spawn(id);
        }
        let founders: Vec<_> = (1..=3).map(|id| this.named(id)).collect();
        eventually("the founding", async || {
            this.cluster(1).init(v1::InitRequest { founders: founders.clone() }).await.ok()
        })
        .await;
        this.leader().await;
        this
    }

    /// A peer's data directory.
    pub fn dir(&self, id: u64) -> PathBuf {
        self.dirs.path().join(format!("peer-{id}"))
    }

    fn said(&self) -> PathBuf {
        self.dirs.path().join("said")
    }

    /// Starts a peer, where it was before if it is known.
    pub fn spawn(&mut self, id: u64) {
        let (grpc, raft) = *self.addresses.entry(id).or_insert_with(|| (free_port(), free_port()));
        let arguments = format!("{id}|{}|{grpc}|{raft}|{}", self.dir(id).display(), self.snapshot_entries);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "support::processes::run_one_peer", "--nocapture"])
            .env(PEER, arguments)
            .stdout(Stdio::null())
            .stderr(std::fs::File::options().create(true).append(true).open(self.said()).unwrap())
            .spawn()
            .unwrap();
        self.children.insert(id, child);
    }

    /// SIGKILL.
    pub fn kill(&mut self, id: u64) {
        let mut child = self.children.remove(&id).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn signal(&self, id: u64, signal: Signal) {
        let pid = Pid::from_raw(self.children[&id].id() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub fn channel(&self, id: u64) -> Channel {
        Channel::from_shared(format!("http://{}", self.addresses[&id].0)).unwrap().connect_lazy()
    }

    pub fn cluster(&self, id: u64) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel(id))
    }

    /// A peer as an operator names it.
    pub fn named(&self, id: u64) -> v1::Member {
        let (grpc, raft) = self.addresses[&id];
        v1::Member { id, raft_address: raft.to_string(), grpc_address: grpc.to_string(), incarnation: String::new() }
    }

    /// Nothing from a peer that is down, or asleep.
    pub async fn status(&self, id: u64) -> Option<v1::StatusResponse> {
        let mut cluster = self.cluster(id);
        let asked = tokio::time::timeout(Duration::from_secs(1), cluster.status(v1::StatusRequest {})).await;
        asked.ok()?.ok().map(|answer| answer.into_inner())
    }

    /// Waits until some running peer other than these says that it leads itself.
    pub async fn leader_besides(&self, besides: &[u64]) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut seen = Vec::new();
            for id in self.children.keys().filter(|id| !besides.contains(id)) {
                let status = self.status(*id).await;
                if status.as_ref().is_some_and(|s| s.leader.as_ref().is_some_and(|leader| leader.id == *id)) {
                    return *id;
                }
                seen.push((*id, status));
            }
            assert!(Instant::now() < deadline, "waited in vain for a leader: {seen:#?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn leader(&self) -> u64 {
        self.leader_besides(&[]).await
    }

    /// The client's own way to all of them.
    pub fn store(&self) -> RemoteStore {
        let endpoints = self.addresses.values().map(|(grpc, _)| grpc.to_string()).collect();
        RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap()
    }

    /// Where all data directories are.
    pub fn root(&self) -> &Path {
        self.dirs.path()
    }
}
