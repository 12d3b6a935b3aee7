//! A network that can be hurt: every connection between nodes passes through a proxy of this process.
//!
//! ```text
//!   peer 1 -- link (peer 1 -> peer 2) --> peer 2        one listener per link, told to peer 1 as "where peer 2 is"
//!   peer 2 -- link (peer 2 -> peer 1) --> peer 1
//!   clients -- link (clients -> peer 1) --> peer 1      one per peer, which is what the peer advertises
//!   query node 1 -- the same link --------> peer 1      told from clients by its process
//! ```
//! What is hurt is the path from one node to another ([`condition::Condition`] per ordered pair), not a link: what peer 1
//! says to peer 2 travels on its own link as requests, and on peer 2's link as answers, and a path that is cut one way
//! cuts both. So a half-open network behaves as it does with packets.
//!
//! - [`condition`]: what happens on a path, as a value;
//! - [`counts`]: what happened on a path;
//! - [`proxy`]: listeners, connections, and the pumps that carry bytes;
//! - `frames`: where a message ends, for faults between a request and its answer;
//! - `owners`: whose a connection is;
//! - [`partition`]: which paths a partition cuts, as a function;
//! - [`namespaces`]: the same for peers in network namespaces, where the kernel drops real packets;
//! - [`objects`]: the way of query nodes to an object store;
//! - this file: [`Fabric`], all links of a cluster, changed as one; [`Network`], either of the two.
//!
//! TCP hides loss and reordering of packets, and so do we: a lost packet is a delay of a retransmission, and what may arrive
//! in another order than it was sent are bytes of different connections: what one sends is held back until something of
//! another one has passed it.
//!
//! Limits: [`proxy::MAX_CONNECTIONS`] per link, [`proxy::QUEUE_CHUNKS`] chunks of [`proxy::CHUNK_BYTES`] on each way of a
//! connection. Failure cases: a peer that is down refuses: the connection is reset.

pub mod condition;
mod counts;
mod frames;
pub mod namespaces;
pub mod objects;
mod owners;
pub mod partition;
mod proxy;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::condition::Condition;
pub use self::counts::Counts;
use self::namespaces::Namespaces;
use self::objects::Objects;
use self::owners::Owners;
pub use self::proxy::Counters;
use crate::ports::{self, Port};
use crate::{IoContext, Result};

/// One end of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Node {
    /// All clients of the cluster.
    Clients,
    /// A peer, by its id.
    Peer(u64),
    /// A query node, by its id.
    Query(u64),
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Clients => f.pad("clients"),
            Node::Peer(id) => f.pad(&format!("peer {id}")),
            Node::Query(id) => f.pad(&format!("query node {id}")),
        }
    }
}

/// From where to where bytes travel.
pub type Path = (Node, Node);

/// What is wrong with the network now; a path that is not named is sound.
pub type Conditions = BTreeMap<Path, Condition>;

struct Link {
    port: Port,
    /// Where the node at the far end listens. Absent until that is known.
    target: watch::Sender<Option<String>>,
}

/// All links of a cluster.
pub struct Fabric {
    links: BTreeMap<Path, Link>,
    conditions: watch::Sender<Arc<Conditions>>,
    counters: Arc<BTreeMap<Path, Arc<Counters>>>,
    owners: Arc<Owners>,
    stop: CancellationToken,
    listeners: tokio::sync::Mutex<JoinSet<()>>,
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("links", &self.links.len()).finish_non_exhaustive()
    }
}

impl Fabric {
    /// Links between all of these peers, and from the clients to each. Everything is sound at first. Chance (jitter, loss)
    /// follows `seed`.
    ///
    /// # Errors
    /// No port is free, or one cannot be listened on.
    pub async fn open(peers: &[u64], seed: u64) -> Result<Arc<Self>> {
        Self::open_with(peers, &[], seed).await
    }

    /// The same with query nodes, whose ways to each peer can be hurt as well.
    ///
    /// # Errors
    /// As [`Fabric::open`].
    pub async fn open_with(peers: &[u64], query_nodes: &[u64], seed: u64) -> Result<Arc<Self>> {
        let between = peers.iter().flat_map(|from| peers.iter().map(move |to| (Node::Peer(*from), Node::Peer(*to))));
        let from_clients = peers.iter().map(|to| (Node::Clients, Node::Peer(*to)));
        let paths: Vec<Path> = between.filter(|(from, to)| from != to).chain(from_clients).collect();
        let conditions = watch::Sender::new(Arc::new(Conditions::new()));
        let stop = CancellationToken::new();
        let mut listeners = JoinSet::new();
        let from_query =
            peers.iter().flat_map(|to| query_nodes.iter().map(|from| (Node::Query(*from), Node::Peer(*to))));
        let both_ways = paths.iter().copied().chain(from_query).flat_map(|(from, to)| [(from, to), (to, from)]);
        let counters: BTreeMap<Path, Arc<Counters>> = both_ways.map(|path| (path, Arc::default())).collect();
        let (counters, owners) = (Arc::new(counters), Arc::new(Owners::default()));
        let mut links = BTreeMap::new();
        for (n, path) in paths.into_iter().enumerate() {
            let port = ports::reserve()?;
            let address = port.loopback();
            let listener = TcpListener::bind(&address)
                .await
                .doing(|| format!("listening on {address} for a link of the proxy"))?;
            let target = watch::Sender::new(None);
            let link = proxy::Link {
                path,
                target: target.subscribe(),
                conditions: conditions.subscribe(),
                counters: counters.clone(),
                owners: owners.clone(),
                seed: seed.wrapping_add(n as u64),
            };
            listeners.spawn(proxy::listen(listener, link, stop.clone()));
            links.insert(path, Link { port, target });
        }
        let listeners = tokio::sync::Mutex::new(listeners);
        Ok(Arc::new(Self { links, conditions, counters, owners, stop, listeners }))
    }

    /// Where `from` reaches `to`: the listener of the link. `None` if there is no such link.
    pub fn address(&self, from: Node, to: Node) -> Option<String> {
        self.links.get(&(from, to)).map(|link| link.port.loopback())
    }

    /// Peer `id` listens there, for clients and for the other peers.
    pub fn set_targets(&self, id: u64, for_clients: &str, for_peers: &str) {
        for ((from, to), link) in &self.links {
            if *to == Node::Peer(id) {
                let target = if *from == Node::Clients { for_clients } else { for_peers };
                link.target.send_if_modified(|known| {
                    let new = Some(target.to_owned());
                    let changed = *known != new;
                    *known = new;
                    changed
                });
            }
        }
    }

    /// That query node is this process now, or none.
    pub fn set_process(&self, query_node: u64, pid: Option<u32>) {
        self.owners.set(query_node, pid);
    }

    /// What is wrong from now on, instead of what was.
    pub fn set(&self, conditions: Conditions) {
        self.conditions.send_replace(Arc::new(conditions));
    }

    /// What has happened on each path so far.
    pub fn counts(&self) -> BTreeMap<Path, Counts> {
        self.counters.iter().map(|(path, counters)| (*path, counters.read())).collect()
    }

    /// Closes every connection and listener, and waits for their tasks.
    pub async fn close(&self) {
        self.stop.cancel();
        let mut listeners = self.listeners.lock().await;
        while listeners.join_next().await.is_some() {}
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// How nodes reach each other.
#[derive(Debug, Clone)]
pub enum Network {
    /// Through proxies of this process, on loopback.
    Proxies(Arc<Fabric>),
    /// Directly, each peer in a network namespace of its own.
    Namespaces(Arc<Namespaces>),
}

impl Network {
    /// Where `from` reaches `to`. `None` if there is no such way.
    pub fn address(&self, from: Node, to: Node) -> Option<String> {
        match self {
            Network::Proxies(fabric) => fabric.address(from, to),
            Network::Namespaces(namespaces) => namespaces.address(from, to),
        }
    }

    /// Peer `id` serves clients and other peers on these ports of the host that it listens on.
    pub fn set_targets(&self, id: u64, for_clients: &str, for_peers: &str) {
        match self {
            Network::Proxies(fabric) => fabric.set_targets(id, for_clients, for_peers),
            Network::Namespaces(namespaces) => namespaces.set_targets(id, for_clients, for_peers),
        }
    }

    /// That query node is this process now, or none. Only proxies have to know.
    pub fn set_process(&self, query_node: u64, pid: Option<u32>) {
        match self {
            Network::Proxies(fabric) => fabric.set_process(query_node, pid),
            Network::Namespaces(_) => {}
        }
    }

    /// A way of query nodes to the S3 service at `target` (`HOST:PORT`), on which each can be cut off by itself.
    ///
    /// # Errors
    /// As [`Objects::open`].
    pub async fn open_objects(&self, target: &str) -> Result<Objects> {
        match self {
            Network::Proxies(fabric) => Objects::open_for(target, fabric.owners.clone()).await,
            // There are no query nodes.
            Network::Namespaces(_) => Objects::open(target).await,
        }
    }

    /// What is wrong from now on, instead of what was.
    ///
    /// # Errors
    /// A program that should make it so fails; proxies always can.
    pub async fn set(&self, conditions: Conditions) -> Result<()> {
        match self {
            Network::Proxies(fabric) => {
                fabric.set(conditions);
                Ok(())
            }
            Network::Namespaces(namespaces) => namespaces.set(conditions).await,
        }
    }

    /// What has happened on each path so far.
    ///
    /// # Errors
    /// A program that should tell fails; proxies always know.
    pub async fn counts(&self) -> Result<BTreeMap<Path, Counts>> {
        match self {
            Network::Proxies(fabric) => Ok(fabric.counts()),
            Network::Namespaces(namespaces) => namespaces.counts().await,
        }
    }

    /// Why this machine cannot have a condition, if it cannot.
    pub fn lacks(&self, condition: &Condition) -> Option<String> {
        match self {
            Network::Proxies(_) => None,
            Network::Namespaces(namespaces) => namespaces.lacks(condition),
        }
    }

    /// Ends everything that this process does for it.
    pub async fn close(&self) {
        match self {
            Network::Proxies(fabric) => fabric.close().await,
            // It goes with the namespaces of this process.
            Network::Namespaces(_) => {}
        }
    }
}

/// Two sets of conditions at once: on a path that both name, the worse of each part.
pub fn combine(one: &Conditions, other: &Conditions) -> Conditions {
    let mut both = one.clone();
    for (path, condition) in other {
        both.entry(*path).and_modify(|have| *have = have.worse(condition)).or_insert_with(|| condition.clone());
    }
    both
}

#[cfg(test)]
mod tests;
