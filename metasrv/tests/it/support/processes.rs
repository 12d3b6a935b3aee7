//! Peers as processes of their own, which can be killed and paused: the test's own binary, started again, finds in its
//! environment which peer it is.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use lake_chaos::peers::{Peers, Place};
use lake_client::nodes::Rhythm;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_metasrv::config::{Config, Timing};
use lake_metasrv::peer::procedures::machine::Pace;
use lake_metasrv::server::Server;
use lake_proto::v1;
use lake_proto::v1::cluster_client::ClusterClient;
use rustix::process::Signal;
use tonic::transport::Channel;

use super::{CALM, PATIENCE, eventually, figure, free_port};

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
    config.http_listen = Some(parts[5].parse().unwrap());
    let ms = |part: &str| Duration::from_millis(part.parse().unwrap());
    config.rhythm = Rhythm { interval: ms(parts[6]), lease: ms(parts[7]) };
    let [heartbeat, election_timeout_min, election_timeout_max] = [8, 9, 10].map(|n| ms(parts[n]));
    config.timing = Timing { heartbeat, election_timeout_min, election_timeout_max };
    config.pace = Pace { first_retry: Duration::from_millis(20), ..Pace::retaining(0) };
    config.storage.purge_margin_entries = config.storage.snapshot_entries / 4;
    config.storage.disk_reserve_bytes = 0;
    let server = Server::start(config).await.unwrap();
    eprintln!("{}", server.failed().await);
    server.shutdown().await;
    std::process::exit(1);
}

/// Peers by id, in one temporary directory. What they say is printed if the test fails.
pub struct Processes {
    pub peers: Peers,
    snapshot_entries: u64,
    rhythm: Rhythm,
    timing: Timing,
    /// What else the peers find in their environment.
    env: Vec<(String, OsString)>,
    /// Where each serves its figures.
    http: BTreeMap<u64, SocketAddr>,
    dirs: tempfile::TempDir,
}

impl Drop for Processes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the peers said: {}", std::fs::read_to_string(said(self.dirs.path())).unwrap_or_default());
        }
    }
}

fn said(root: &Path) -> PathBuf {
    root.join("said")
}

impl Processes {
    /// Query nodes of these peers are heard a few times a second.
    pub const RHYTHM: Rhythm = Rhythm { interval: Duration::from_millis(600), lease: Duration::from_secs(10) };

    /// Three peers, founded, with a leader, which take a snapshot after so many entries.
    pub async fn founded(snapshot_entries: u64) -> Self {
        Self::founded_by(3, snapshot_entries).await
    }

    /// So many.
    pub async fn founded_by(count: u64, snapshot_entries: u64) -> Self {
        Self::founded_so(count, snapshot_entries, Self::RHYTHM, Timing::default(), Vec::new()).await
    }

    /// Three of which nobody stands for election because the machine is busy.
    pub async fn calm(snapshot_entries: u64) -> Self {
        Self::founded_so(3, snapshot_entries, Self::RHYTHM, CALM, Vec::new()).await
    }

    /// Three whose leader stays however slow the machine is: an election would be another measurement.
    pub async fn still(snapshot_entries: u64) -> Self {
        let timing = Timing {
            heartbeat: Duration::from_millis(500),
            election_timeout_min: Duration::from_secs(10),
            election_timeout_max: Duration::from_secs(15),
        };
        Self::founded_so(3, snapshot_entries, Self::RHYTHM, timing, Vec::new()).await
    }

    /// Three with other times for query nodes.
    pub async fn with_rhythm(rhythm: Rhythm) -> Self {
        Self::founded_so(3, 100_000, rhythm, Timing::default(), Vec::new()).await
    }

    /// Three that find this in their environment.
    #[allow(dead_code, reason = "it is the unit tests that use it")]
    pub async fn founded_in(env: Vec<(String, OsString)>) -> Self {
        Self::founded_so(3, 100_000, Self::RHYTHM, Timing::default(), env).await
    }

    async fn founded_so(
        count: u64,
        snapshot_entries: u64,
        rhythm: Rhythm,
        timing: Timing,
        env: Vec<(String, OsString)>,
    ) -> Self {
        let dirs = tempfile::tempdir().unwrap();
        let peers = Peers::new(dirs.path().to_owned());
        let mut this = Self { peers, snapshot_entries, rhythm, timing, env, http: BTreeMap::new(), dirs };
        for id in 1..=count {
            this.spawn(id);
        }
        let founders: Vec<_> = (1..=count).map(|id| this.named(id)).collect();
        eventually("the founding", async || {
            this.cluster(1).init(v1::InitRequest { founders: founders.clone() }).await.ok()
        })
        .await;
        this.leader().await;
        this
    }

    /// A peer's data directory.
    pub fn dir(&self, id: u64) -> PathBuf {
        self.peers.place(id).unwrap().dir().to_owned()
    }

    /// Starts a peer, where it was before if it is known.
    pub fn spawn(&mut self, id: u64) {
        let (snapshot_entries, said) = (self.snapshot_entries, said(self.dirs.path()));
        let Timing { heartbeat, election_timeout_min, election_timeout_max } = self.timing;
        let times = [self.rhythm.interval, self.rhythm.lease, heartbeat, election_timeout_min, election_timeout_max];
        let times = times.map(|time| time.as_millis().to_string()).join("|");
        let env = self.env.clone();
        let http = *self.http.entry(id).or_insert_with(free_port);
        let this_binary = |place: &Place| {
            let said = std::fs::File::options().create(true).append(true).open(said).unwrap();
            let (dir, grpc, raft) = (place.dir().display(), place.grpc(), place.raft());
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", "support::processes::run_one_peer", "--nocapture"])
                .env(PEER, format!("{id}|{dir}|{grpc}|{raft}|{snapshot_entries}|{http}|{times}"))
                .envs(env)
                .stdout(Stdio::null())
                .stderr(said);
            command
        };
        self.peers.start(id, this_binary).unwrap();
    }

    /// SIGKILL.
    pub fn kill(&mut self, id: u64) {
        self.peers.kill(id).unwrap();
    }

    pub fn signal(&self, id: u64, signal: Signal) {
        self.peers.signal(id, signal).unwrap();
    }

    pub fn channel(&self, id: u64) -> Channel {
        Channel::from_shared(format!("http://{}", self.peers.place(id).unwrap().grpc())).unwrap().connect_lazy()
    }

    pub fn cluster(&self, id: u64) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel(id))
    }

    /// A peer as an operator names it.
    pub fn named(&self, id: u64) -> v1::Member {
        self.peers.named(id).unwrap()
    }

    /// Nothing from a peer that is down, or asleep.
    pub async fn status(&self, id: u64) -> Option<v1::StatusResponse> {
        self.peers.status(id).await
    }

    /// One of a peer's figures.
    pub async fn figure(&self, id: u64, name: &str) -> f64 {
        figure(self.http[&id], name).await
    }

    /// Waits until some running peer other than these says that it leads itself.
    pub async fn leader_besides(&self, besides: &[u64]) -> u64 {
        self.peers.leader_besides(besides, PATIENCE).await.unwrap_or_else(|e| panic!("{e}"))
    }

    pub async fn leader(&self) -> u64 {
        self.leader_besides(&[]).await
    }

    /// The client's own way to all of them.
    pub fn store(&self) -> RemoteStore {
        let endpoints = self.peers.places().map(Place::grpc).collect();
        RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap()
    }

    /// Where all data directories are.
    pub fn root(&self) -> &Path {
        self.dirs.path()
    }
}
