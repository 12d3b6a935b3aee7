//! A cluster of peers in this process, over real gRPC on free ports, with its data in temporary directories.

pub mod directories;
pub mod hurt;
pub mod ledger;
pub mod load;
pub mod log_oracle;
pub mod processes;
pub mod purging;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_metasrv::config::{Config, Timing};
use lake_metasrv::server::Server;
use lake_proto::kv::{Expected, Op, Txn};
use lake_proto::v1;
use lake_proto::v1::cluster_client::ClusterClient;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::kv_client::KvClient;
use lake_proto::v1::raft_client::RaftClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::transport::Channel;
use tonic::{Request, Status};

/// How long anything in these tests may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Nobody stands for election because the machine is busy with other things: who leads, leads until the test has it otherwise.
pub const CALM: Timing = Timing {
    heartbeat: Duration::from_millis(80),
    election_timeout_min: Duration::from_millis(1000),
    election_timeout_max: Duration::from_millis(1500),
};

/// Peers by id, some of them down.
pub struct TestCluster {
    pub configs: BTreeMap<u64, Config>,
    pub running: BTreeMap<u64, Server>,
    _dirs: tempfile::TempDir,
}

/// A port that nobody else gets for a while.
pub fn free_port() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // With a connection that this end closed first, the kernel hands the port to nobody for a minute, except to who names it.
    let other_end = std::net::TcpStream::connect(address).unwrap();
    drop(listener.accept().unwrap());
    drop(other_end);
    address
}

impl TestCluster {
    /// Fresh peers 1 to `n`, started.
    pub async fn fresh(n: u64, change: impl Fn(&mut Config)) -> Self {
        let dirs = tempfile::tempdir().unwrap();
        let mut configs = BTreeMap::new();
        for id in 1..=n {
            let mut config = Config::new(id, dirs.path().join(format!("peer-{id}")));
            config.listen = free_port();
            config.raft_listen = free_port();
            config.storage.disk_reserve_bytes = 0;
            config.timing = CALM;
            change(&mut config);
            configs.insert(id, config);
        }
        let mut cluster = Self { configs, running: BTreeMap::new(), _dirs: dirs };
        for id in 1..=n {
            cluster.start(id).await;
        }
        cluster
    }

    /// The same, founded, with a leader that all of them know.
    pub async fn founded(n: u64, change: impl Fn(&mut Config)) -> Self {
        let cluster = Self::fresh(n, change).await;
        cluster.found().await;
        cluster
    }

    /// Founds the cluster, and waits until every peer knows who leads it.
    pub async fn found(&self) {
        let found = async || self.init(1).await.inspect_err(|e| println!("founding: {e}")).ok();
        eventually("the founding", found).await;
        eventually("every peer to know who leads", async || {
            let leader = self.leader().await;
            for id in self.running.keys() {
                if self.status(*id).await.leader.is_none_or(|known| known.id != leader) {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }

    pub fn founders(&self) -> Vec<v1::Member> {
        self.configs
            .values()
            .map(|c| v1::Member {
                id: c.id,
                raft_address: c.raft_listen.to_string(),
                grpc_address: c.advertise.clone().unwrap_or_else(|| c.listen.to_string()),
                incarnation: String::new(),
            })
            .collect()
    }

    pub async fn init(&self, at: u64) -> Result<v1::InitResponse, Status> {
        let request = v1::InitRequest { founders: self.founders() };
        self.cluster(at).init(request).await.map(|r| r.into_inner())
    }

    /// Settles where another fresh peer will be, without starting it.
    pub fn prepare(&mut self, id: u64, change: impl FnOnce(&mut Config)) {
        let mut config = Config::new(id, self._dirs.path().join(format!("peer-{id}")));
        config.listen = free_port();
        config.raft_listen = free_port();
        config.storage.disk_reserve_bytes = 0;
        config.timing = CALM;
        change(&mut config);
        self.configs.insert(id, config);
    }

    /// A peer as an operator names it, who does not know its incarnation.
    pub fn named(&self, id: u64) -> v1::Member {
        let config = &self.configs[&id];
        v1::Member {
            id,
            raft_address: config.raft_listen.to_string(),
            grpc_address: config.listen.to_string(),
            incarnation: String::new(),
        }
    }

    /// The client's own way to the cluster, told of every peer there is, and the secret that they have.
    pub fn client(&self) -> RemoteStore {
        let endpoints = self.configs.values().map(|c| c.listen.to_string()).collect();
        let secret = self.configs.values().find_map(|c| c.secret.clone());
        RemoteStore::connect(RemoteConfig { endpoints, secret }).unwrap()
    }

    pub async fn start(&mut self, id: u64) {
        let server = Server::start(self.configs[&id].clone()).await.unwrap();
        self.running.insert(id, server);
    }

    /// Gives a peer that is down other ports, and tells the others where to look for it.
    pub fn relocate(&mut self, id: u64) {
        let config = self.configs.get_mut(&id).unwrap();
        config.listen = free_port();
        config.raft_listen = free_port();
        let raft = config.raft_listen.to_string();
        for (_, other) in self.configs.iter_mut().filter(|(other, _)| **other != id) {
            other.peers.insert(id, raft.clone());
        }
    }

    pub async fn stop(&mut self, id: u64) {
        self.running.remove(&id).unwrap().shutdown().await;
    }

    pub async fn stop_all(&mut self) {
        let stopping = std::mem::take(&mut self.running).into_values().map(Server::shutdown);
        futures::future::join_all(stopping).await;
    }

    pub fn channel(&self, id: u64) -> Channel {
        Channel::from_shared(format!("http://{}", self.configs[&id].listen)).unwrap().connect_lazy()
    }

    pub fn kv(&self, id: u64) -> KvClient<Channel> {
        KvClient::new(self.channel(id)).max_decoding_message_size(64 << 20)
    }

    /// The other peers' way in.
    pub fn raft(&self, id: u64) -> RaftClient<Channel> {
        let address = format!("http://{}", self.configs[&id].raft_listen);
        RaftClient::new(Channel::from_shared(address).unwrap().connect_lazy())
    }

    pub fn cluster(&self, id: u64) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel(id))
    }

    pub async fn status(&self, id: u64) -> v1::StatusResponse {
        let mut cluster = self.cluster(id);
        let status = tokio::time::timeout(PATIENCE, cluster.status(v1::StatusRequest {})).await;
        status.expect("a status in time").unwrap().into_inner()
    }

    /// Waits until some running peer says that it leads itself.
    pub async fn leader(&self) -> u64 {
        eventually("a leader", async || {
            for id in self.running.keys() {
                let status = self.status(*id).await;
                if status.leader.as_ref().is_some_and(|l| l.id == *id)
                    && status.stage() == v1::status_response::Stage::Member
                {
                    return Some(*id);
                }
            }
            None
        })
        .await
    }

    /// Runs a transaction on whoever leads, as a client does: follows the leader until the deadline.
    pub async fn commit(&self, txn: Txn) -> v1::TxnResponse {
        eventually("a commit", async || {
            for id in self.running.keys() {
                let mut request = Request::new(v1::TxnRequest { txn: Some(txn.clone().into()), stamp: None });
                // What is given up may be made all the same, and then once more.
                request.set_timeout(Duration::from_secs(15));
                if let Ok(response) = self.kv(*id).txn(request).await {
                    return Some(response.into_inner());
                }
            }
            None
        })
        .await
    }

    pub async fn put(&self, key: &str, value: impl Into<bytes::Bytes>) -> u64 {
        self.commit(Txn { then: vec![Op::put(key, value)], ..Txn::default() }).await.revision
    }

    pub async fn create(&self, key: &str, value: &'static str) -> bool {
        self.commit(Txn::cas(key, Expected::Absent, value)).await.succeeded
    }

    /// A linearizable read at one peer.
    pub async fn get(&self, at: u64, key: &str) -> Option<v1::KeyValue> {
        self.try_get(at, key, v1::ReadOptions::default()).await.unwrap().entry
    }

    pub async fn try_get(&self, at: u64, key: &str, options: v1::ReadOptions) -> Result<v1::GetResponse, Status> {
        let mut request = Request::new(v1::GetRequest { key: key.into(), options: Some(options) });
        request.set_timeout(PATIENCE);
        self.kv(at).get(request).await.map(|r| r.into_inner())
    }
}

/// The status code and the body of an answer over HTTP.
pub async fn http_get(address: SocketAddr, path: &str) -> (u16, String) {
    http(address, "GET", path, "").await
}

/// The same of any request, with further headers, each with its end of line.
pub async fn http(address: SocketAddr, method: &str, path: &str, headers: &str) -> (u16, String) {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: peer\r\nConnection: close\r\n{headers}\r\n");
    let asking = async {
        let mut connection = tokio::net::TcpStream::connect(address).await?;
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = tokio::time::timeout(PATIENCE, asking).await.expect("an answer in time").unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("a whole answer");
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status code");
    (code, body.to_owned())
}

/// One of the figures that a peer serves there.
pub async fn figure(address: SocketAddr, name: &str) -> f64 {
    let (_, text) = http_get(address, "/metrics").await;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// Waits for something to become true.
pub async fn eventually<T>(what: &str, look: impl AsyncFn() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Why a call failed, as the peer says. On a machine that is busy with other things its answer may come after the caller's time,
/// and then nobody is told anything: it is asked again.
pub async fn why<T>(call: impl AsyncFn() -> Result<T, Status>) -> Kind {
    eventually("the reason of a failure", async || lake_proto::status::detail(&call().await.err()?).map(|d| d.kind()))
        .await
}

/// The kind of a failed call.
pub fn kind(status: &Status) -> Kind {
    lake_proto::status::detail(status).unwrap_or_else(|| panic!("no detail in {status:?}")).kind()
}
