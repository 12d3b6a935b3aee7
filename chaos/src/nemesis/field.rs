//! The cluster as nemeses see it: who is there, who leads, who is hurt already, and what is wrong with the network.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lake_client::remote::RemoteStore;
use lake_proto::v1::StatusResponse;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::disk::Disks;
use super::kind::Target;
use crate::cluster::Cluster;
use crate::net::condition::Condition;
use crate::net::objects::Objects;
use crate::net::{Conditions, Counts, Network, Node, Path, combine};
use crate::process::{ProcessName, Role};
use crate::workload::access::Roster;
use crate::{Result, probe};

/// How long a fault may take to show that it took effect.
pub const PROOF_WITHIN: Duration = Duration::from_secs(4);
/// How long a peer may take to serve again, and a change of the membership to be made.
pub const MEND_WITHIN: Duration = Duration::from_secs(30);

/// What nemeses act on. Shared by them.
pub struct Field {
    pub cluster: Cluster,
    pub network: Network,
    /// Reaches the peers where they listen at first, past what can be cut.
    pub store: RemoteStore,
    /// Whom clients may ask: those that belong to the cluster.
    pub roster: Roster,
    pub disks: Disks,
    /// Where every peer's fake clock is read from, if there is a library that fakes it.
    pub clocks: Option<PathBuf>,
    /// The query nodes, and where clients reach them.
    pub query_nodes: Roster,
    /// The same, where they serve REST.
    pub rest_nodes: Roster,
    /// The way to the object store, if the run has one that can be hurt.
    pub objects: Option<Objects>,
    hurt: Mutex<Hurt>,
}

#[derive(Default)]
struct Hurt {
    /// Peers whose process or disk is under a fault.
    peers: BTreeSet<u64>,
    /// Query nodes that are under a fault.
    query_nodes: BTreeSet<u64>,
    /// Peers to whose data something was done that no peer need survive.
    damaged: BTreeMap<u64, Damage>,
    /// What is wrong with the network, by what made it so.
    network: BTreeMap<&'static str, Conditions>,
    /// Spare peers not used yet.
    spares: Vec<u64>,
}

struct Damage {
    /// What was done, for people.
    what: String,
    /// It need not come back.
    is_lost: bool,
}

impl Field {
    /// A sound cluster, with these spare peers.
    pub fn new(
        cluster: Cluster,
        network: Network,
        store: RemoteStore,
        roster: Roster,
        disks: Disks,
        clocks: Option<PathBuf>,
        spares: Vec<u64>,
    ) -> Self {
        let hurt = Mutex::new(Hurt { spares, ..Hurt::default() });
        let (query_nodes, rest_nodes) = (Roster::default(), Roster::default());
        for entry in cluster.entries().iter().filter(|entry| entry.role == Role::Query) {
            for (service, nodes) in [("flight", &query_nodes), ("rest", &rest_nodes)] {
                if let Some(address) = entry.addresses.get(service) {
                    nodes.add(entry.id, address.clone());
                }
            }
        }
        Self { cluster, network, store, roster, disks, clocks, query_nodes, rest_nodes, objects: None, hurt }
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

    /// Chooses peers that are under no fault, and notes that they are now. What was asked for by name is had as it was asked
    /// for, or not at all: a leader is waited for.
    ///
    /// # Errors
    /// Why there are none.
    pub async fn claim(&self, target: Option<Target>, rng: &mut StdRng) -> Result<Vec<u64>, String> {
        let leader = match target {
            Some(Target::Leader) => Some(self.await_leader().await?),
            _ => self.leader().await,
        };
        let mut hurt = self.hurt();
        let members = self.roster.ids();
        let is_free = |id: &u64| !hurt.peers.contains(id) && hurt.damaged.get(id).is_none_or(|damage| !damage.is_lost);
        let mut free: Vec<u64> = members.iter().copied().filter(is_free).collect();
        free.shuffle(rng);
        let meant = target.unwrap_or_else(|| any_target(rng));
        let chosen = choose(meant, members.len(), &free, leader);
        if chosen.is_empty() {
            return Err("every peer that it could be done to is under another fault".to_owned());
        }
        if target.is_some_and(|target| !is_as_asked(target, members.len(), &chosen, leader)) {
            return Err(format!(
                "of those that it was to be done to some are under another fault; free: {}",
                named(&free)
            ));
        }
        hurt.peers.extend(&chosen);
        Ok(chosen)
    }

    /// The same for a target that was drawn, not asked for: if it cannot be had, whatever else can.
    ///
    /// # Errors
    /// Why nobody can be hurt.
    pub async fn claim_drawn(&self, drawn: Option<Target>, rng: &mut StdRng) -> Result<Vec<u64>, String> {
        match self.claim(drawn, rng).await {
            Err(_) if drawn.is_some() => self.claim(None, rng).await,
            claimed => claimed,
        }
    }

    /// One peer that is under no fault: the leader, if that is asked for.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn claim_one(&self, target: Option<Target>, rng: &mut StdRng) -> Result<u64, String> {
        let one = self.claim(Some(target.unwrap_or(Target::One)), rng).await?;
        one.first().copied().ok_or_else(|| "there is no peer".to_owned())
    }

    /// The peers that are meant, for what hurts neither their processes nor their disks: whatever else they are under.
    ///
    /// # Errors
    /// Why they are not to be had.
    pub async fn pick(&self, target: Target, rng: &mut StdRng) -> Result<Vec<u64>, String> {
        let leader = match target {
            Target::Leader => Some(self.await_leader().await?),
            _ => None,
        };
        let mut members = self.roster.ids();
        members.shuffle(rng);
        let chosen = choose(target, members.len(), &members, leader);
        match is_as_asked(target, members.len(), &chosen, leader) {
            true => Ok(chosen),
            false => Err(format!("the leader is none of {}", named(&members))),
        }
    }

    /// Chooses processes of a role that are under no fault, and notes that they are now: peers as [`Self::claim`] does; of query
    /// nodes one, unless all are asked for or chance says so.
    ///
    /// # Errors
    /// Why there are none, or not all.
    pub async fn claim_of(&self, role: Role, target: Option<Target>, rng: &mut StdRng) -> Result<Vec<u64>, String> {
        match role {
            Role::Metasrv => self.claim(target, rng).await,
            Role::Query => self.claim_query(target, rng),
        }
    }

    fn claim_query(&self, target: Option<Target>, rng: &mut StdRng) -> Result<Vec<u64>, String> {
        let mut hurt = self.hurt();
        let all = self.query_nodes.ids();
        let mut free: Vec<u64> = all.iter().copied().filter(|id| !hurt.query_nodes.contains(id)).collect();
        free.shuffle(rng);
        let meant = match target {
            Some(Target::All) => all.len(),
            Some(_) => 1,
            None => rng.random_range(1..=all.len().max(1)),
        };
        let chosen: Vec<u64> = free.iter().copied().take(meant).collect();
        match (all.len(), chosen.len()) {
            (0, _) => return Err("there is no query node".to_owned()),
            (_, 0) => return Err("every query node is under another fault".to_owned()),
            (_, had) if had < meant && target.is_some() => {
                return Err(format!(
                    "some query nodes are under another fault; free: {}",
                    named_as(called(Role::Query), &free)
                ));
            }
            _ => {}
        }
        hurt.query_nodes.extend(&chosen);
        Ok(chosen)
    }

    /// The fault on these processes of a role is over.
    pub fn release_of(&self, role: Role, ids: &[u64]) {
        let mut hurt = self.hurt();
        let under = match role {
            Role::Metasrv => &mut hurt.peers,
            Role::Query => &mut hurt.query_nodes,
        };
        for id in ids {
            under.remove(id);
        }
    }

    /// Starts a process, unless it runs, and waits until it serves.
    ///
    /// # Errors
    /// It does not serve in time.
    pub async fn start_of(&self, role: Role, id: u64) -> Result<()> {
        match role {
            Role::Metasrv => self.cluster.start_one(ProcessName::metasrv(id)).await,
            Role::Query => self.start_query(id).await,
        }
    }

    /// Starts a query node, unless it runs, and waits until it serves; clients are told where.
    ///
    /// # Errors
    /// It does not serve in time.
    pub async fn start_query(&self, id: u64) -> Result<()> {
        let name = ProcessName::query(id);
        self.cluster.start_one(name).await?;
        // If somebody had taken its port it has another one.
        let addresses = self.cluster.entry(name)?.addresses;
        for (service, nodes) in [("flight", &self.query_nodes), ("rest", &self.rest_nodes)] {
            if let Some(address) = addresses.get(service) {
                nodes.replace(id, address.clone());
            }
        }
        Ok(())
    }

    /// Something was done to a peer's data that it need not survive: it is asked for nothing more, unless it
    /// [goes on](Self::goes_on).
    pub fn lose(&self, id: u64, what: &str) {
        self.hurt().damaged.insert(id, Damage { what: what.to_owned(), is_lost: true });
    }

    /// A damaged peer serves: it must agree with the others again. It may still find its damage later.
    pub fn goes_on(&self, id: u64) {
        if let Some(damage) = self.hurt().damaged.get_mut(&id) {
            damage.is_lost = false;
        }
    }

    /// What was done to the data of a peer that need not come back.
    pub fn loss_of(&self, id: u64) -> Option<String> {
        self.hurt().damaged.get(&id).filter(|damage| damage.is_lost).map(|damage| damage.what.clone())
    }

    /// What was done to a peer's data, whether or not it goes on.
    pub fn damage_of(&self, id: u64) -> Option<String> {
        self.hurt().damaged.get(&id).map(|damage| damage.what.clone())
    }

    /// Waits for somebody to lead.
    ///
    /// # Errors
    /// Nobody does within [`PROOF_WITHIN`].
    pub async fn await_leader(&self) -> Result<u64, String> {
        self.cluster.leader(PROOF_WITHIN).await.map(|leader| leader.process.id).map_err(|e| e.to_string())
    }

    /// The fault on these peers is over.
    pub fn release(&self, peers: &[u64]) {
        self.release_of(Role::Metasrv, peers);
    }

    /// A peer that was never started, if there is one left.
    pub fn take_spare(&self) -> Option<u64> {
        let mut hurt = self.hurt();
        if hurt.spares.is_empty() { None } else { Some(hurt.spares.remove(0)) }
    }

    /// Clients may ask this peer from now on.
    pub fn enlist(&self, id: u64) {
        if let Some(address) = self.network.address(Node::Clients, Node::Peer(id)) {
            self.roster.add(id, address);
        }
    }

    // ---- the network ------------------------------------------------------------------------------------------

    /// Makes this wrong with the network, beside what others have made wrong, and waits until something was hurt by it.
    ///
    /// # Errors
    /// It cannot be made so; or nothing was hurt within [`PROOF_WITHIN`], and it stays in force.
    pub async fn disturb(&self, by: &'static str, conditions: Conditions) -> Result<u64> {
        self.disturb_each(by, conditions, &[]).await.map(|hurt| hurt.values().sum())
    }

    /// The same, until something was hurt on one way of each of these as well; says how much was on which.
    ///
    /// # Errors
    /// As [`Self::disturb`], with the ways on which nothing was hurt.
    pub async fn disturb_each(
        &self,
        by: &'static str,
        conditions: Conditions,
        each: &[Vec<Path>],
    ) -> Result<BTreeMap<Path, u64>> {
        let before = self.network.counts().await?;
        let wrong = self.wrong_with(by, Some(conditions.clone()));
        self.network.set(wrong).await?;
        probe::until("the network fault to meet traffic", PROOF_WITHIN, || async {
            let now = self.network.counts().await.map_err(|e| e.to_string())?;
            let nothing = Counts::default();
            let done = conditions.iter().map(|(path, condition)| {
                let counts = now.get(path).unwrap_or(&nothing);
                (*path, counts.done_by(condition, before.get(path).unwrap_or(&nothing)))
            });
            let hurt: BTreeMap<Path, u64> = done.filter(|(_, hurt)| *hurt > 0).collect();
            let not_yet = each.iter().filter(|ways| !ways.iter().any(|way| hurt.contains_key(way)));
            let not_yet: Vec<String> = not_yet.map(|ways| told(ways)).collect();
            match (hurt.is_empty(), not_yet.is_empty()) {
                (true, _) => Err("nothing was sent there".to_owned()),
                (false, false) => Err(format!("nothing was sent {}", not_yet.join("; nor "))),
                (false, true) => Ok(hurt),
            }
        })
        .await
    }

    /// Takes back what `by` has made wrong.
    ///
    /// # Errors
    /// It cannot be taken back.
    pub async fn calm(&self, by: &'static str) -> Result<()> {
        let wrong = self.wrong_with(by, None);
        self.network.set(wrong).await
    }

    /// Why none of these conditions can be had here, if so.
    pub fn lacks(&self, condition: &Condition) -> Option<String> {
        self.network.lacks(condition)
    }

    /// Notes what `by` makes wrong; gives all that is wrong then.
    fn wrong_with(&self, by: &'static str, conditions: Option<Conditions>) -> Conditions {
        let mut hurt = self.hurt();
        match conditions {
            Some(conditions) => hurt.network.insert(by, conditions),
            None => hurt.network.remove(by),
        };
        hurt.network.values().fold(Conditions::new(), |all, one| combine(&all, one))
    }

    /// Takes back everything that is wrong with the network, and with the way to the object store.
    ///
    /// # Errors
    /// It cannot be taken back.
    pub async fn calm_all(&self) -> Result<()> {
        self.hurt().network.clear();
        self.objects.iter().for_each(Objects::calm);
        self.network.set(Conditions::new()).await
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
pub(crate) fn choose(target: Target, members: usize, free: &[u64], leader: Option<u64>) -> Vec<u64> {
    match leader.filter(|id| target == Target::Leader && free.contains(id)) {
        Some(leader) => vec![leader],
        None => free.iter().copied().take(count(target, members)).collect(),
    }
}

/// Whether these are what was asked for by name: the very leader, or as many as were meant.
pub(crate) fn is_as_asked(target: Target, members: usize, chosen: &[u64], leader: Option<u64>) -> bool {
    match target {
        Target::Leader => leader.is_some_and(|leader| chosen == [leader]),
        target => chosen.len() == count(target, members),
    }
}

/// How many of so many peers are meant.
fn count(target: Target, members: usize) -> usize {
    let majority = members / 2 + 1;
    match target {
        Target::Leader | Target::One => 1,
        Target::Minority => members.saturating_sub(majority).max(1),
        Target::Majority => majority,
        Target::All => members,
    }
}

/// Ways for people.
pub fn told(ways: &[Path]) -> String {
    ways.iter().map(|(from, to)| format!("{from} -> {to}")).collect::<Vec<_>>().join(", ")
}

/// What a process of a role is called.
pub fn called(role: Role) -> &'static str {
    match role {
        Role::Metasrv => "peer",
        Role::Query => "query node",
    }
}

/// Peers for people: `peer 1, peer 3`.
pub fn named(peers: &[u64]) -> String {
    named_as(called(Role::Metasrv), peers)
}

/// The same of whatever is called by this name.
pub fn named_as(name: &str, ids: &[u64]) -> String {
    match ids {
        [] => "nobody".to_owned(),
        ids => ids.iter().map(|id| format!("{name} {id}")).collect::<Vec<_>>().join(", "),
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
        assert!(is_as_asked(Target::Leader, 5, &[3], Some(3)) && is_as_asked(Target::All, 2, &[2, 1], None));
        assert!(!is_as_asked(Target::Leader, 5, &[5], Some(3)), "another one is not the leader");
        assert!(!is_as_asked(Target::Leader, 5, &[5], None));
        assert!(!is_as_asked(Target::Majority, 5, &[5, 2], Some(3)), "two of five are no majority");
        assert_eq!(named(&[1, 3]), "peer 1, peer 3");
    }
}
