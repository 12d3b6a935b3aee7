//! What is to be done about the shards, decided from what the leader knows at one moment: pure functions.
//!
//! | a shard                                                  | what is planned                                              |
//! |----------------------------------------------------------|--------------------------------------------------------------|
//! | that nobody was given yet                                | a worker, as the selector says                               |
//! | whose lease lives                                        | it stays where it is, unless for balance                     |
//! | whose lease has ended, and its node has another one      | the node keeps it, under the new lease                       |
//! | whose lease has ended, and its node is registered no more| another worker, a follower if there is one                   |
//! | whose lease has ended, and its node is suspected         | the same                                                     |
//! | whose lease has ended, and its node is only late         | nothing yet                                                  |
//! | whose node is drained                                    | another worker, a follower if there is one; with none it     |
//! |                                                          | stays, under the node's new lease if that has another one    |
//!
//! So nothing is taken from a node before its lease has surely ended: the lease is gone from the state, and ids of leases do not
//! come twice. Only for balance, and on request, which draining is, is a shard moved whose lease lives: the old fence is over with the new route.
//!
//! In maintenance mode a node keeps its shards under its new lease, and nothing else is planned.
//!
//! Limits: as many changes at once as are asked for. Failure cases: none; whether a plan is carried out is decided by the compares of
//! each change ([`Change::txn`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lake_client::shards::{Fenced, Route, Settings, key};
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{Compare, Expected, Op, Revision, Txn};

use super::phi::THRESHOLD;
use super::selector::{Affinity, Candidate, Selector};
use crate::peer::nodes::heartbeat::in_term;

/// How long a worker has been heard before it is given the shards of others for balance.
pub const SETTLED: Duration = Duration::from_secs(10);

/// A node with the role of a worker that is registered.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Worker {
    /// Its lease, if that lives.
    pub lease: Option<LeaseId>,
    pub remaining: Duration,
    /// How long this leader has heard it; `None`: it has not.
    pub heard_for: Option<Duration>,
    /// How surely it is lost by its silence; `None`: it is not watched yet.
    pub suspicion: Option<f64>,
    pub cpu_permille: u32,
    pub running_statements: u32,
    /// Somebody has asked for it to be given nothing any more.
    pub drained: bool,
}

impl Worker {
    /// Whether it may be given shards, and under which lease.
    fn fit(&self) -> Option<LeaseId> {
        self.there().filter(|_| !self.drained)
    }

    /// Whether it lives, and under which lease.
    fn there(&self) -> Option<LeaseId> {
        self.lease.filter(|_| self.heard_for.is_some() && !self.suspected())
    }

    fn suspected(&self) -> bool {
        self.suspicion.is_some_and(|phi| phi > THRESHOLD)
    }
}

/// What the leader knows.
#[derive(Debug, Clone)]
pub struct World {
    pub settings: Settings,
    pub routes: BTreeMap<u32, Fenced>,
    /// The shards whose routes' leases live.
    pub alive: BTreeSet<u32>,
    pub workers: BTreeMap<String, Worker>,
    /// Nodes have had the time to come to this leader.
    pub warm: bool,
    pub followers: usize,
    pub selector: Selector,
}

impl World {
    /// Whether who has the shard gives it, and may be working for it: then there is time to make the target ready. One that is drained
    /// and whose lease has ended gives nothing, and whoever waited for the target would only find the shard looked after later.
    pub fn gives(&self, change: &Change) -> bool {
        matches!(change.why, Why::Balance | Why::Drained) && self.alive.contains(&change.shard)
    }

    /// Takes moves that are under way for made: who is about to be given a shard has it, and nothing more is moved for the same reason.
    pub fn expect<'a>(&mut self, moves: impl IntoIterator<Item = &'a Change>) {
        for change in moves {
            let fenced = self.routes.get_mut(&change.shard);
            if let Some(fenced) = fenced.filter(|fenced| Some(fenced.revision) == change.expected) {
                fenced.route = change.route.clone();
            }
        }
    }
}

/// Why a shard is given to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    Begins,
    Returned,
    Left,
    Lost,
    Balance,
    Asked,
    Drained,
    Followers,
}

impl Why {
    /// For people, as the route keeps it.
    pub fn as_str(self) -> &'static str {
        match self {
            Why::Begins => "the first",
            Why::Returned => "the node came back with another lease",
            Why::Left => "the node before has left",
            Why::Lost => "the node before was lost",
            Why::Balance => "balance",
            Why::Asked => "it was asked for",
            Why::Drained => "the node before is drained",
            Why::Followers => "other followers",
        }
    }
}

/// One route, and what it is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub shard: u32,
    /// As it must still be: the revision of the route; `None`: there is none.
    pub expected: Option<Revision>,
    /// Who has it until then.
    pub from: Option<String>,
    pub route: Route,
    pub why: Why,
}

impl Change {
    /// The one transaction that it is: only on the route as it was looked at, for a node whose lease lives, and by the leader of this
    /// term.
    pub fn txn(&self, term: u64) -> Txn {
        let expected = self.expected.map_or(Expected::Absent, Expected::ModRevision);
        Txn {
            when: vec![
                Compare::expected(key(self.shard), expected),
                Compare::lease_alive(self.route.lease),
                in_term(term),
            ],
            then: vec![Op::put(key(self.shard), self.route.to_bytes())],
            otherwise: vec![],
        }
    }
}

/// A plan in the making: the workers with the shards that they lead, or are about to.
struct Planning<'a> {
    world: &'a World,
    candidates: Vec<Candidate>,
    changes: Vec<Change>,
    most: usize,
}

impl<'a> Planning<'a> {
    fn new(world: &'a World, most: usize) -> Self {
        let mut led: BTreeMap<&str, usize> = BTreeMap::new();
        for (shard, fenced) in &world.routes {
            if world.alive.contains(shard) {
                *led.entry(&fenced.route.node).or_default() += 1;
            }
        }
        let candidates = world.workers.iter().filter_map(|(node, worker)| {
            Some(Candidate {
                node: node.clone(),
                lease: worker.fit()?,
                remaining: worker.remaining,
                shards: led.get(node.as_str()).copied().unwrap_or(0),
                cpu_permille: worker.cpu_permille,
                running_statements: worker.running_statements,
            })
        });
        Self { world, candidates: candidates.collect(), changes: Vec::new(), most }
    }

    fn is_full(&self) -> bool {
        self.changes.len() >= self.most
    }

    fn candidate(&mut self, node: &str) -> Option<&mut Candidate> {
        self.candidates.iter_mut().find(|candidate| candidate.node == node)
    }

    /// Gives a shard to a candidate.
    fn give(&mut self, shard: u32, node: &str, why: Why, turn: &mut usize) {
        let Some(lease) = self.candidate(node).map(|candidate| candidate.lease) else { return };
        self.give_under(lease, shard, node, why, turn);
    }

    /// Gives a shard to a node that has this lease. Whose it was keeps a part in it as a follower, if it lives.
    fn give_under(&mut self, lease: LeaseId, shard: u32, node: &str, why: Why, turn: &mut usize) {
        let before = self.world.routes.get(&shard);
        let from = before.map(|fenced| fenced.route.node.clone());
        if self.world.alive.contains(&shard)
            && let Some(from) = &from
            && let Some(from) = self.candidate(from)
        {
            from.shards = from.shards.saturating_sub(1);
        }
        if let Some(to) = self.candidate(node) {
            to.shards += 1;
        }
        let kept: Vec<String> =
            before.map(|fenced| fenced.route.nodes().map(str::to_owned).collect()).unwrap_or_default();
        let followers = self.followers(node, kept, turn);
        let route = Route { node: node.to_owned(), lease, followers, reason: why.as_str().to_owned() };
        let expected = before.map(|fenced| fenced.revision);
        self.changes.push(Change { shard, expected, from, route, why });
    }

    /// The followers of a shard that `node` leads: those of `kept` that are of use, and others if those are too few.
    fn followers(&self, node: &str, kept: Vec<String>, turn: &mut usize) -> Vec<String> {
        let fit = |other: &String| other != node && self.candidates.iter().any(|candidate| candidate.node == *other);
        let mut followers: Vec<String> = Vec::new();
        for other in kept.into_iter().filter(fit) {
            if !followers.contains(&other) {
                followers.push(other);
            }
        }
        followers.truncate(self.world.followers);
        let lacking = self.world.followers - followers.len();
        if lacking > 0 {
            let forbidden = followers.iter().cloned().chain([node.to_owned()]).collect();
            let affinity = Affinity { forbidden, ..Affinity::default() };
            let more = self.world.selector.select(&self.candidates, lacking, &affinity, turn).nodes;
            followers.extend(more);
        }
        followers
    }

    /// Shards that nobody has: nobody was given them, or the lease of who was has ended.
    fn settle(&mut self, turn: &mut usize) {
        for shard in 0..self.world.settings.shards {
            if self.is_full() {
                return;
            }
            if self.world.alive.contains(&shard) {
                continue;
            }
            let Some(fenced) = self.world.routes.get(&shard) else {
                if !self.world.settings.maintenance {
                    self.choose(shard, Affinity::default(), Why::Begins, turn);
                }
                continue;
            };
            let node = fenced.route.node.as_str();
            let worker = self.world.workers.get(node);
            if worker.is_some_and(|worker| worker.fit().is_some()) {
                self.give(shard, node, Why::Returned, turn);
                continue;
            }
            let why = match worker {
                // Something that is no route was in its place.
                None if node.is_empty() => Why::Begins,
                None => Why::Left,
                Some(worker) if worker.drained => Why::Drained,
                Some(worker) if self.world.warm && worker.suspected() => Why::Lost,
                Some(_) => continue,
            };
            let avoided = [node.to_owned()].into();
            let preferred = fenced.route.followers.clone();
            let affinity = Affinity { avoided, preferred, ..Affinity::default() };
            let moved = !self.world.settings.maintenance && self.choose(shard, affinity, why, turn);
            // It came back drained, and nobody takes it over: it keeps what it had.
            if !moved && let Some(lease) = worker.and_then(Worker::there) {
                self.give_under(lease, shard, node, Why::Returned, turn);
            }
        }
    }

    /// Shards of nodes that are drained.
    fn drain(&mut self, turn: &mut usize) {
        for (shard, fenced) in &self.world.routes {
            if self.is_full() {
                return;
            }
            let node = &fenced.route.node;
            let drained = self.world.workers.get(node).is_some_and(|worker| worker.drained);
            if drained && self.world.alive.contains(shard) {
                let affinity = Affinity { preferred: fenced.route.followers.clone(), ..Affinity::default() };
                self.choose(*shard, affinity, Why::Drained, turn);
            }
        }
    }

    /// Gives a shard to whom the selector says; says whether there was anybody.
    fn choose(&mut self, shard: u32, affinity: Affinity, why: Why, turn: &mut usize) -> bool {
        let selected = self.world.selector.select(&self.candidates, 1, &affinity, turn);
        let Some(node) = selected.nodes.first() else { return false };
        self.give(shard, node, why, turn);
        true
    }

    /// From the worker with the most to the one with the fewest, until they differ by one at most.
    fn balance(&mut self, turn: &mut usize) {
        let mut moved = BTreeSet::new();
        while !self.is_full() {
            let by_shards = |candidate: &&Candidate| (candidate.shards, candidate.node.clone());
            let Some(most) = self.candidates.iter().max_by_key(by_shards) else { return };
            let Some(fewest) = self.candidates.iter().min_by_key(by_shards) else { return };
            if most.shards - fewest.shards < 2 {
                return;
            }
            let (from, to) = (most.node.clone(), fewest.node.clone());
            let movable = self.world.routes.iter().filter(|(shard, fenced)| {
                self.world.alive.contains(shard) && fenced.route.node == from && !moved.contains(*shard)
            });
            // One whose tables the other one knows, if there is one.
            let shard = movable.min_by_key(|(shard, fenced)| (!fenced.route.followers.contains(&to), **shard));
            let Some(shard) = shard.map(|(shard, _)| *shard) else { return };
            moved.insert(shard);
            self.give(shard, &to, Why::Balance, turn);
        }
    }

    /// Whether the workers differ by so much that it is worth the moves by itself.
    fn is_uneven(&self) -> bool {
        let shards = || self.candidates.iter().map(|candidate| candidate.shards);
        let (Some(most), Some(fewest)) = (shards().max(), shards().min()) else { return false };
        let mean = shards().sum::<usize>() / self.candidates.len();
        let settled = self.candidates.iter().all(|candidate| {
            self.world.workers.get(&candidate.node).and_then(|worker| worker.heard_for) >= Some(SETTLED)
        });
        settled && most - fewest > (mean / 4).max(2)
    }

    /// Shards with followers that are of no use any more, or with too few.
    fn follow(&mut self, turn: &mut usize) {
        for (shard, fenced) in &self.world.routes {
            if self.is_full() {
                return;
            }
            let route = &fenced.route;
            if !self.world.alive.contains(shard) {
                continue;
            }
            let lost = |node: &String| {
                let worker = self.world.workers.get(node);
                worker.is_none_or(|worker| {
                    worker.drained || worker.lease.is_none() && self.world.warm && worker.suspected()
                })
            };
            let kept: Vec<String> = route.followers.iter().filter(|node| !lost(node)).cloned().collect();
            if kept.len() >= self.world.followers && kept.len() == route.followers.len() {
                continue;
            }
            let followers = self.followers(&route.node, kept, turn);
            // Another fence is worth it only if it mends something.
            if followers.len() > route.followers.len() || route.followers.iter().any(lost) {
                let route = Route { followers, ..route.clone() };
                let from = Some(route.node.clone());
                let expected = Some(fenced.revision);
                self.changes.push(Change { shard: *shard, expected, from, route, why: Why::Followers });
            }
        }
    }
}

/// What the leader does by itself, at most so much of it. `turn` goes on with each choice.
pub fn plan(world: &World, most: usize, turn: &mut usize) -> Vec<Change> {
    let mut planning = Planning::new(world, most);
    planning.settle(turn);
    if !world.settings.maintenance {
        planning.drain(turn);
    }
    if world.settings.maintenance || !world.warm || !planning.changes.is_empty() {
        return planning.changes;
    }
    if planning.is_uneven() {
        planning.balance(turn);
    }
    if planning.changes.is_empty() {
        planning.follow(turn);
    }
    planning.changes
}

/// What balances the shards, however little they differ.
pub fn balance(world: &World) -> Vec<Change> {
    let mut planning = Planning::new(world, world.settings.shards as usize);
    planning.balance(&mut 0);
    planning.changes
}

/// What gives a shard to a node. `None`: it has it.
///
/// # Errors
/// Why that cannot be, for whoever asked.
pub fn asked(world: &World, shard: u32, node: &str) -> Result<Option<Change>, String> {
    if shard >= world.settings.shards {
        return Err(format!("there is no shard {shard}: they are 0 to {}", world.settings.shards - 1));
    }
    let worker = world.workers.get(node);
    let worker = worker.ok_or_else(|| format!("no node {node} with the role worker is registered"))?;
    if worker.drained {
        return Err(format!("node {node} is drained: `lake meta shards drain {node} --end` first"));
    }
    if worker.fit().is_none() {
        return Err(format!("node {node} is not heard at present: a shard is given to one that lives"));
    }
    let has = |fenced: &Fenced| fenced.route.node == node && world.alive.contains(&shard);
    if world.routes.get(&shard).is_some_and(has) {
        return Ok(None);
    }
    let mut planning = Planning::new(world, 1);
    planning.give(shard, node, Why::Asked, &mut 0);
    Ok(planning.changes.pop())
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
