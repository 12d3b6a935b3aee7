//! A client's way to the cluster: its own connections, its own chance, and the peers that there are.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_client::remote::RemoteStore;
use lake_client::store::{Error, MetaStore, Read, ReadOptions};
use lake_proto::kv::KeyValue;
use rand::Rng;
use rand::rngs::StdRng;

use crate::run::ledger::Ledger;

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

/// What an actor works with.
#[derive(Debug)]
pub struct Access {
    pub store: RemoteStore,
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
