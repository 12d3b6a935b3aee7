//! Leases when the leader is killed, or paused and woken again. Peers are processes of their own here: this test binary
//! itself, told by an environment variable to run one.

mod support;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lake_client::remote::keeper::LeaseKeeper;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::store::{MetaStore, ReadOptions};
use lake_metasrv::config::Config;
use lake_metasrv::server::Server;
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::v1;
use lake_proto::v1::cluster_client::ClusterClient;
use lake_proto::v1::leases_client::LeasesClient;
use support::{PATIENCE, eventually};
use tonic::transport::Channel;

const PEER: &str = "LAKE_TEST_LEASE_PEER";

/// Not a test by itself: what a child process runs.
#[tokio::test(flavor = "multi_thread")]
async fn run_one_peer() {
    let Ok(arguments) = std::env::var(PEER) else { return };
    let parts: Vec<&str> = arguments.split('|').collect();
    let mut config = Config::new(parts[0].parse().unwrap(), parts[1]);
    config.listen = parts[2].parse().unwrap();
    config.raft_listen = parts[3].parse().unwrap();
    config.storage.disk_reserve_bytes = 0;
    let server = Server::start(config).await.unwrap();
    eprintln!("{}", server.failed().await);
    std::process::exit(1);
}

struct Processes {
    addresses: BTreeMap<u64, SocketAddr>,
    children: BTreeMap<u64, Child>,
    store: RemoteStore,
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in self.children.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Processes {
    async fn start(dir: &Path) -> Self {
        let listeners: Vec<_> = (0..6).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        drop(listeners);
        let mut founders = Vec::new();
        let (mut addresses, mut children) = (BTreeMap::new(), BTreeMap::new());
        for (id, pair) in (1..=3u64).zip(ports.chunks(2)) {
            let arguments = format!("{id}|{}|{}|{}", dir.join(format!("peer-{id}")).display(), pair[0], pair[1]);
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "run_one_peer", "--nocapture"])
                .env(PEER, arguments)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            children.insert(id, child);
            addresses.insert(id, pair[0]);
            founders.push(v1::Member {
                id,
                raft_address: pair[1].to_string(),
                grpc_address: pair[0].to_string(),
                incarnation: String::new(),
            });
        }
        let endpoints = addresses.values().map(ToString::to_string).collect();
        let store = RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap();
        let this = Self { addresses, children, store };
        eventually("the founding", async || {
            let request = v1::InitRequest { founders: founders.clone() };
            ClusterClient::new(this.channel(1)).init(request).await.ok()
        })
        .await;
        this
    }

    fn channel(&self, id: u64) -> Channel {
        Channel::from_shared(format!("http://{}", self.addresses[&id])).unwrap().connect_lazy()
    }

    /// Whoever of these says that it leads.
    async fn leader_among(&self, ids: &[u64]) -> u64 {
        eventually("a leader", async || {
            for id in ids {
                let asked = ClusterClient::new(self.channel(*id)).leader(v1::LeaderRequest {}).await;
                if asked.is_ok_and(|answer| answer.into_inner().leader.is_some_and(|leader| leader.id == *id)) {
                    return Some(*id);
                }
            }
            None
        })
        .await
    }

    fn kill(&mut self, id: u64) {
        let mut child = self.children.remove(&id).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn signal(&self, id: u64, signal: &str) {
        let pid = self.children[&id].id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    async fn hang(&self, key: &str, lease: u64) {
        let txn = Txn {
            when: vec![Compare::lease_alive(lease)],
            then: vec![Op::put_leased(key, "v", lease)],
            otherwise: vec![],
        };
        let done = eventually("a commit", async || self.store.commit(txn.clone(), soon()).await.ok()).await;
        assert!(done.result.succeeded);
    }

    async fn is_there(&self, key: &str) -> bool {
        self.store.get(key, ReadOptions::default(), soon()).await.unwrap().value.is_some()
    }

    async fn remaining_ms(&self, at: u64, lease: u64) -> Option<u64> {
        let list = LeasesClient::new(self.channel(at)).list(v1::ListLeasesRequest::default()).await.ok()?.into_inner();
        list.leases.into_iter().find(|l| l.id == lease)?.remaining_ms
    }
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_leader_ends_no_lease_early_and_saves_none_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let mut peers = Processes::start(dir.path()).await;
    let ttl = Duration::from_secs(3);
    let silent = peers.store.grant_lease(ttl, "silent", soon()).await.unwrap();
    peers.hang("/kv/silent", silent.id).await;
    let kept = peers.store.grant_lease(ttl * 3, "kept", soon()).await.unwrap();
    peers.hang("/kv/kept", kept.id).await;
    let keeper = LeaseKeeper::start(peers.store.clone(), kept);
    let leader = eventually("half of its time to pass", async || {
        let leader = peers.leader_among(&[1, 2, 3]).await;
        peers.remaining_ms(leader, silent.id).await.filter(|left| *left < 1500).map(|_| leader)
    })
    .await;
    let killed = Instant::now();
    peers.kill(leader);
    eventually("the silent lease to end", async || (!peers.is_there("/kv/silent").await).then_some(())).await;
    let lived = killed.elapsed();
    println!("the silent lease of {ttl:?} ended {lived:?} after its leader was killed");
    assert!(lived >= ttl, "the new leader did not give it its full time");
    assert!(keeper.is_held() && peers.is_there("/kv/kept").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_was_paused_and_woke_ends_nothing_that_its_successor_keeps() {
    let dir = tempfile::tempdir().unwrap();
    let peers = Processes::start(dir.path()).await;
    let lease = peers.store.grant_lease(Duration::from_secs(6), "kept", soon()).await.unwrap();
    peers.hang("/kv/kept", lease.id).await;
    let keeper = LeaseKeeper::start(peers.store.clone(), lease);
    let old = peers.leader_among(&[1, 2, 3]).await;
    let others: Vec<u64> = (1..=3).filter(|id| *id != old).collect();
    peers.signal(old, "-STOP");
    // As the old leader counts, the lease is over when it wakes.
    let over = Instant::now() + lease.ttl;
    let new = peers.leader_among(&others).await;
    eventually("renewals by the new leader", async || (keeper.held_until() > over + lease.ttl).then_some(())).await;
    peers.signal(old, "-CONT");
    eventually("the old leader to follow", async || {
        let asked = ClusterClient::new(peers.channel(old)).leader(v1::LeaderRequest {}).await.ok()?.into_inner();
        asked.leader.filter(|leader| leader.id == new)
    })
    .await;
    let later = Instant::now() + lease.ttl;
    eventually("more renewals", async || (keeper.held_until() > later).then_some(())).await;
    assert!(keeper.is_held() && peers.is_there("/kv/kept").await);
}
