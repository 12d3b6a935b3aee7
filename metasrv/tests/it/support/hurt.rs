//! Three peers behind the fault runs' own network: between the clients and each peer, and between the peers.

use std::sync::Arc;

use lake_chaos::net::condition::{Condition, Cut};
use lake_chaos::net::{Conditions, Fabric, Node, Path};
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::store::Committed;
use lake_proto::kv::{KeyValue, Op, OpResult, Txn};

use super::{TestCluster, eventually};

/// The peers, the network, and a client behind it.
pub struct Hurt {
    pub cluster: TestCluster,
    pub fabric: Arc<Fabric>,
    pub store: RemoteStore,
}

impl Hurt {
    pub async fn founded() -> Self {
        let fabric = Fabric::open(&[1, 2, 3], 1).await.unwrap();
        let way = |from, to| fabric.address(from, Node::Peer(to)).unwrap();
        let cluster = TestCluster::fresh(3, |config| {
            config.advertise = Some(way(Node::Clients, config.id));
            let others = (1..=3).filter(|id| *id != config.id);
            config.peers = others.map(|id| (id, way(Node::Peer(config.id), id))).collect();
        })
        .await;
        for (id, config) in &cluster.configs {
            fabric.set_targets(*id, &config.listen.to_string(), &config.raft_listen.to_string());
        }
        cluster.found().await;
        let store = connect(&fabric);
        Self { cluster, fabric, store }
    }

    /// Another client behind the network, with connections and a session of its own.
    pub fn client(&self) -> RemoteStore {
        connect(&self.fabric)
    }

    /// The client's requests reach this peer, and no answer comes back.
    pub fn mute(&self, peer: u64) {
        let silent = Condition::cut(Cut::Silent);
        self.fabric.set(Conditions::from([((Node::Peer(peer), Node::Clients), silent)]));
    }

    /// Every connection of clients to this peer breaks, with the answers in it, and then all is well again.
    pub async fn reset(&self, peer: u64) {
        let path = (Node::Peer(peer), Node::Clients);
        let resets = || self.fabric.counts()[&path].resets;
        let before = resets();
        self.fabric.set(Conditions::from([(path, Condition::cut(Cut::Reset))]));
        eventually("a reset", async || (resets() > before).then_some(())).await;
        self.fabric.set(Conditions::new());
    }

    /// The entry as a peer has it, asked directly, once it has that value.
    pub async fn applied(&self, key: &str, value: &str) -> KeyValue {
        eventually("the change to be applied", async || {
            let mut everywhere = Vec::new();
            for id in self.cluster.running.keys() {
                everywhere.push(self.cluster.get(*id, key).await.filter(|entry| entry.value == value)?);
            }
            everywhere.pop().map(Into::into)
        })
        .await
    }

    pub async fn end(mut self) {
        self.cluster.stop_all().await;
        self.fabric.close().await;
    }
}

fn connect(fabric: &Fabric) -> RemoteStore {
    let endpoints = (1..=3).map(|id| fabric.address(Node::Clients, Node::Peer(id)).unwrap()).collect();
    RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap()
}

/// Both ways between clients and a peer.
pub fn both_ways(peer: u64) -> [Path; 2] {
    [(Node::Clients, Node::Peer(peer)), (Node::Peer(peer), Node::Clients)]
}

/// A blind put that says what it replaced: done twice it would say something else, and count one version more.
pub fn put(key: &str, value: &str) -> Txn {
    let op = Op::Put { key: key.into(), value: value.to_owned().into(), return_previous: true, lease: None };
    Txn { then: vec![op], ..Txn::default() }
}

/// What a put replaced.
pub fn previous(committed: &Committed) -> Option<KeyValue> {
    match &committed.result.results[..] {
        [OpResult::Put { previous }] => previous.clone(),
        other => panic!("not a put's results: {other:?}"),
    }
}
