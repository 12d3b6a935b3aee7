//! A client's way to the cluster: its own connections, its own chance, and the peers that there are.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_client::remote::RemoteStore;
use lake_client::store::{Error, MetaStore, Read, ReadOptions};
use lake_proto::kv::KeyValue;
use rand::Rng;
use rand::rngs::StdRng;

use crate::process::ProcessName;
use crate::run::ledger::Ledger;
use crate::sql::{Answer, Failure, Front, Session, Statement};

/// How much longer than the node a client waits for its answer: the node's words are better.
const GRACE: Duration = Duration::from_millis(500);

/// The peers that clients may ask now, and where. Changes as peers join and leave.
#[derive(Debug, Clone, Default)]
pub struct Roster(Arc<RwLock<Vec<(u64, String)>>>);

impl Roster {
    /// These, by id.
    pub fn new(peers: Vec<(u64, String)>) -> Self {
        Self(Arc::new(RwLock::new(peers)))
    }

    /// The peers.
    pub fn peers(&self) -> Vec<(u64, String)> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Their ids.
    pub fn ids(&self) -> Vec<u64> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).iter().map(|(id, _)| *id).collect()
    }

    /// One more.
    pub fn add(&self, id: u64, endpoint: String) {
        let mut peers = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !peers.iter().any(|(known, _)| *known == id) {
            peers.push((id, endpoint));
        }
    }

    /// It is there now.
    pub fn replace(&self, id: u64, endpoint: String) {
        let mut peers = self.0.write().unwrap_or_else(PoisonError::into_inner);
        peers.iter_mut().filter(|(known, _)| *known == id).for_each(|(_, at)| at.clone_from(&endpoint));
    }

    /// One less.
    pub fn remove(&self, id: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).retain(|(known, _)| *known != id);
    }
}

/// The query nodes, and how they are spoken to. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Door {
    pub front: Arc<dyn Front>,
    pub nodes: Roster,
    /// Where tables' files are, if they are this machine's.
    pub warehouse: Option<PathBuf>,
    /// Where the logs of query nodes are that are all of this machine: `query-<id>.log`.
    pub logs: Option<PathBuf>,
    /// The cluster is the run's own: what is not the workload's may be changed as well.
    pub is_own: bool,
}

/// One client's sessions at the query nodes, each with where that node was when it began.
#[derive(Debug)]
pub struct Sessions {
    door: Door,
    open: BTreeMap<u64, (String, Box<dyn Session>)>,
}

impl Sessions {
    /// None is open yet.
    pub fn new(door: Door) -> Self {
        Self { door, open: BTreeMap::new() }
    }

    async fn at(&mut self, node: u64, within: Duration) -> Result<&mut Box<dyn Session>, Failure> {
        let known = self.door.nodes.peers().into_iter().find(|(id, _)| *id == node);
        let (_, endpoint) = known.ok_or_else(|| Failure::unreached(format!("there is no query node {node}")))?;
        let open = match self.open.remove(&node) {
            Some(open) if open.0 == endpoint => open,
            _ => {
                let connecting = tokio::time::timeout(within, self.door.front.connect(&endpoint));
                let late = |_| Failure::unreached(format!("query node {node} accepts no connection"));
                let session = connecting.await.map_err(late)??;
                (endpoint, session)
            }
        };
        Ok(&mut self.open.entry(node).or_insert(open).1)
    }
}

/// What an actor works with.
#[derive(Debug)]
pub struct Access {
    pub store: RemoteStore,
    /// Of a run with query nodes that is to speak SQL.
    pub sessions: Option<Sessions>,
    pub roster: Roster,
    /// What was acknowledged to any client.
    pub ledger: Arc<Ledger>,
    /// How long one operation may take.
    pub timeout: Duration,
    pub rng: StdRng,
}

impl Access {
    /// Until when an operation that begins now may take.
    pub fn deadline(&self) -> Instant {
        clock::now() + self.timeout
    }

    /// Any peer, and where it is reached. `None` if there is none at the moment.
    pub fn any_peer(&mut self) -> Option<(u64, String)> {
        let peers = self.roster.peers();
        if peers.is_empty() { None } else { peers.get(self.rng.random_range(0..peers.len())).cloned() }
    }

    /// All query nodes.
    pub fn nodes(&self) -> Vec<u64> {
        self.sessions.as_ref().map_or_else(Vec::new, |sessions| sessions.door.nodes.ids())
    }

    /// Where tables' files are, if they are this machine's.
    pub fn warehouse(&self) -> Option<PathBuf> {
        self.sessions.as_ref()?.door.warehouse.clone()
    }

    /// The logs of the query nodes, if they are all of this machine.
    pub fn logs(&self) -> Option<Vec<PathBuf>> {
        let logs = self.sessions.as_ref()?.door.logs.as_ref()?;
        let log = |id| logs.join(format!("{}.log", ProcessName::query(id)));
        Some(self.nodes().into_iter().map(log).collect())
    }

    /// Whether the cluster is the run's own, and nobody's who is only lending it.
    pub fn is_own(&self) -> bool {
        self.sessions.as_ref().is_some_and(|sessions| sessions.door.is_own)
    }

    /// Any query node. `None` if there is none.
    pub fn any_node(&mut self) -> Option<u64> {
        let nodes = self.nodes();
        if nodes.is_empty() { None } else { nodes.get(self.rng.random_range(0..nodes.len())).copied() }
    }

    /// What names the transaction that this client has open at a query node.
    pub fn transaction(&self, node: u64) -> Option<String> {
        self.sessions.as_ref()?.open.get(&node)?.1.transaction()
    }

    /// Has the session at a query node go on with a transaction, or with none.
    ///
    /// # Errors
    /// There is no session yet, and none can be had until `by`.
    pub async fn set_transaction(&mut self, node: u64, handle: Option<String>, by: Instant) -> Result<(), Failure> {
        let left = by.saturating_duration_since(clock::now());
        let sessions = self.sessions.as_mut().ok_or_else(|| Failure::unreached("this run has no query nodes"))?;
        sessions.at(node, left).await?.set_transaction(handle);
        Ok(())
    }

    /// Runs a statement at a query node, until `by`.
    ///
    /// # Errors
    /// As [`Session::run`].
    pub async fn run(&mut self, node: u64, sql: &str, operation: Option<&str>, by: Instant) -> Result<Answer, Failure> {
        let left = || by.saturating_duration_since(clock::now());
        let sessions = self.sessions.as_mut().ok_or_else(|| Failure::unreached("this run has no query nodes"))?;
        let session = sessions.at(node, left()).await?;
        let timeout = left();
        let statement = Statement { sql: sql.to_owned(), operation: operation.map(str::to_owned), timeout };
        let running = tokio::time::timeout(timeout + GRACE, session.run(&statement));
        running.await.unwrap_or_else(|_| Err(Failure::unanswered(timeout + GRACE)))
    }

    /// One entry, as some peer answers, or whoever leads; with who was asked.
    pub async fn get(
        &self,
        from: Option<(u64, String)>,
        key: &str,
        options: ReadOptions,
    ) -> (Result<Read<Option<KeyValue>>, Error>, Option<u64>) {
        match from {
            Some((id, at)) => (self.store.get_from(&at, key, options, self.deadline()).await, Some(id)),
            None => (self.store.get(key, options, self.deadline()).await, None),
        }
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.rng.random_bool(probability)
    }
}
