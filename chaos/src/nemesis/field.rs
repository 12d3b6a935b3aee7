//! The cluster as nemeses see it: who is there, who leads, who is hurt already, and what is wrong with the network.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lake_client::remote::RemoteStore;
use lake_proto::v1::StatusResponse;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::disk::Disks;
use super::kind::Target;
use crate::cluster::Cluster;
use crate::net::{Conditions, Counts, Fabric, Node, Path, combine};
use crate::process::ProcessName;
use crate::workload::access::Roster;
use crate::{Result, probe};

/// How long a fault may take to show that it took effect.
pub const PROOF_WITHIN: Duration = Duration::from_secs(4);
/// How long a peer may take to serve again, and a change of the membership to be made.
pub const MEND_WITHIN: Duration = Duration::from_secs(30);

/// What nemeses act on. Shared by them.
pub struct Field {
    pub cluster: Cluster,
    pub fabric: Arc<Fabric>,
    /// Reaches the peers where they listen, past the fabric.
    pub store: RemoteStore,
    /// Whom clients may ask: those that belong to the cluster.
    pub roster: Roster,
    pub disks: Disks,
    /// Where every peer's fake clock is read from, if there is a library that fakes it.
    pub clocks: Option<PathBuf>,
    hurt: Mutex<Hurt>,
}

#[derive(Default)]
struct Hurt {
    /// Peers whose process or disk is under a fault.
    peers: BTreeSet<u64>,
    /// What is wrong with the network, by what made it so.
    network: BTreeMap<&'static str, Conditions>,
    /// Spare peers not used yet.
    spares: Vec<u64>,
}

impl Field {
    /// A sound cluster, with these spare peers.
    pub fn new(
        cluster: Cluster,
        fabric: Arc<Fabric>,
        store: RemoteStore,
        roster: Roster,
        disks: Disks,
        clocks: Option<PathBuf>,
        spares: Vec<u64>,
    ) -> Self {
        let hurt = Mutex::new(Hurt { spares, ..Hurt::default() });
        Self { cluster, fabric, store, roster, disks, clocks, hurt }
    }

    fn hurt(&self) -> MutexGuard<'_, Hurt> {
        self.hurt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until when a change of the cluster that is asked for now may take.
    pub fn deadline(&self) -> Instant {
        Instant::now() + MEND_WITHIN
    }

    // ---- who there is -----------------------------------------------------------------------------------------

    /// What each running peer says of itself.
    pub async fn statuses(&self) -> Vec<StatusResponse> {
        self.cluster.statuses().await
    }

    /// Who leads, if somebody says so.
    pub async fn leader(&self) -> Option<u64> {
        let answers = self.statuses().await;
        probe::leader(&answers).and_then(|answer| Some(answer.self_.as_ref()?.id))
    }

    /// What one peer says of itself.
    pub async fn status(&self, id: u64) -> Option<StatusResponse> {
        let entry = self.cluster.entry(ProcessName::metasrv(id)).ok()?;
        probe::peer(entry.addresses.get("grpc")?).await.ok()
    }

    /// Chooses peers that are under no fault, and notes that they are now. Empty: there are none.
    pub async fn claim(&self, target: Option<Target>, rng: &mut StdRng) -> Vec<u64> {
        let leader = self.leader().await;
        let mut hurt = self.hurt();
        let members = self.roster.ids();
        let mut free: Vec<u64> = members.iter().copied().filter(|id| !hurt.peers.contains(id)).collect();
        free.shuffle(rng);
        let chosen = choose(target.unwrap_or_else(|| any_target(rng)), members.len(), &free, leader);
        hurt.peers.extend(&chosen);
        chosen
    }

    /// The fault on these peers is over.
    pub fn release(&self, peers: &[u64]) {
        let mut hurt = self.hurt();
        for id in peers {
            hurt.peers.remove(id);
        }
    }

    /// A peer that was never started, if there is one left.
    pub fn take_spare(&self) -> Option<u64> {
        let mut hurt = self.hurt();
        if hurt.spares.is_empty() { None } else { Some(hurt.spares.remove(0)) }
    }

    /// Clients may ask this peer from now on.
    pub fn enlist(&self, id: u64) {
        if let Some(address) = self.fabric.address(Node::Clients, Node::Peer(id)) {
            self.roster.add(id, address);
        }
    }

    // ---- the network ------------------------------------------------------------------------------------------

    /// Makes this wrong with the network, beside what others have made wrong, and waits until something was hurt by it.
    ///
    /// # Errors
    /// Nothing was within [`PROOF_WITHIN`]; it stays in force.
    pub async fn disturb(&self, by: &'static str, conditions: Conditions) -> Result<u64> {
        let paths: Vec<Path> = conditions.keys().copied().collect();
        let before = self.fabric.counts();
        self.set_network(by, Some(conditions));
        probe::until("the network fault to meet traffic", PROOF_WITHIN, || async {
            let now = self.fabric.counts();
            let since = |path: &Path| Some(now.get(path)?.hurt_since(before.get(path).unwrap_or(&Counts::default())));
            match paths.iter().filter_map(since).sum::<u64>() {
                0 => Err("nothing was sent there".to_owned()),
                hurt => Ok(hurt),
            }
        })
        .await
    }

    /// Takes back what `by` has made wrong.
    pub fn calm(&self, by: &'static str) {
        self.set_network(by, None);
    }

    fn set_network(&self, by: &'static str, conditions: Option<Conditions>) {
        let mut hurt = self.hurt();
        match conditions {
            Some(conditions) => hurt.network.insert(by, conditions),
            None => hurt.network.remove(by),
        };
        self.fabric.set(hurt.network.values().fold(Conditions::new(), |all, one| combine(&all, one)));
    }

    /// Takes back everything that is wrong with the network.
    pub fn calm_all(&self) {
        self.hurt().network.clear();
        self.fabric.set(Conditions::new());
    }
}

fn any_target(rng: &mut StdRng) -> Target {
    match rng.random_range(0..100) {
        0..40 => Target::Leader,
        40..65 => Target::One,
        65..80 => Target::Minority,
        80..95 => Target::Majority,
        _ => Target::All,
    }
}

/// Of the peers in `free`, those that are meant. `members` is how many there are, free or not.
fn choose(target: Target, members: usize, free: &[u64], leader: Option<u64>) -> Vec<u64> {
    let majority = members / 2 + 1;
    let count = match target {
        Target::Leader => match leader.filter(|id| free.contains(id)) {
            Some(leader) => return vec![leader],
            None => 1,
        },
        Target::One => 1,
        Target::Minority => (members - majority).max(1),
        Target::Majority => majority,
        Target::All => members,
    };
    free.iter().copied().take(count).collect()
}

/// Peers for people: `peer 1, peer 3`.
pub fn named(peers: &[u64]) -> String {
    match peers {
        [] => "nobody".to_owned(),
        peers => peers.iter().map(|id| format!("peer {id}")).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_chosen_among_those_that_are_free() {
        let chosen = |target, free: &[u64], leader| choose(target, 5, free, leader);
        assert_eq!(chosen(Target::Leader, &[5, 2, 3], Some(3)), [3]);
        assert_eq!(chosen(Target::Leader, &[5, 2], Some(3)), [5]);
        assert_eq!(chosen(Target::Minority, &[5, 2, 3, 1, 4], None), [5, 2]);
        assert_eq!(chosen(Target::Majority, &[5, 2, 3, 1, 4], None), [5, 2, 3]);
        assert_eq!(chosen(Target::All, &[5, 2], None), [5, 2]);
        assert_eq!(choose(Target::Minority, 1, &[1], Some(1)), [1]);
        assert!(chosen(Target::One, &[], None).is_empty());
        assert_eq!(named(&[1, 3]), "peer 1, peer 3");
    }
}
