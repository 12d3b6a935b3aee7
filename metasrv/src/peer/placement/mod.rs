//! Placement: which worker has which shard, and what the leader does about it. docs/src/placement.md has the whole of it.
//!
//! - [`phi`]: how surely a node is lost, by its silence;
//! - [`selector`]: which worker gets a shard;
//! - [`plan`]: what is to be done, decided from what is known at one moment;
//! - [`moving`]: moves that are asked for, and what surrounds a move: the target is warmed, the source leaves;
//! - this file: what is known, and the supervisor, which looks and carries plans out while this peer is on duty.
//!
//! Invariants:
//! - a route is changed in one transaction, on the route as it was looked at, for a node whose lease lives, in a log entry of this
//!   leader's term: a deposed leader moves nothing;
//! - what is moved by itself is so in the settings that it was planned in: nothing is once maintenance has begun;
//! - nothing is moved by itself from a node whose lease lives, but for balance.
//!
//! The supervisor is a part of this peer's duties, and ends with them. It keeps nothing from look to look but whose turn it is and the moves
//! that are under way ([`moving::UnderWay`]): it looks on while their targets are made ready, so that who is lost meanwhile is
//! not found later. What it knows of nodes is in the registry and the detectors, which are of one term.
//!
//! Limits: [`MOVES_AT_ONCE`] such moves under way, and as many changes besides that are transactions alone; a look every [`LOOK`], or
//! once those are made. Failure cases: a change that is not made is planned again with a later look, from what is there then.

pub mod moving;
pub mod phi;
pub mod plan;
pub mod selector;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures::StreamExt;
use lake_client::clock;
use lake_client::drains::{self, DRAINS};
use lake_client::nodes::{MAX_NODES, NODES, key as node_key};
use lake_client::shards::{DEFAULT_SHARDS, Fenced, MAX_SHARDS, ROUTES, Route, Routes, SETTINGS, Settings, WORKER, key};
use lake_proto::kv::{Compare, Expected, Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;

use self::moving::UnderWay;
use self::plan::{Change, Why, Worker, World};
use self::selector::Selector;
use super::duties::Mortal;
use super::failure::Failure;
use super::member::Member;
use super::nodes::heartbeat::in_term;
use super::nodes::{has_lease, millis};
use super::procedures::failpoints::{Point, ROUTE, reached_in};
use super::shares::Call;
use crate::log::lock;
use crate::state::State;

/// How often the supervisor looks.
const LOOK: Duration = Duration::from_millis(500);
/// Changes of routes that are under way at once.
pub const MOVES_AT_ONCE: usize = 16;
/// How long one may take.
const MOVE_WITHIN: Duration = Duration::from_secs(5);
/// How often a change that was asked for is tried on what another one left.
const RACES: usize = 8;

/// How shards are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// How many shards a cluster gets that has none yet.
    pub shards: u32,
    /// Of each shard.
    pub followers: usize,
    pub selector: Selector,
}

impl Default for Placement {
    fn default() -> Self {
        Self { shards: DEFAULT_SHARDS, followers: 1, selector: Selector::default() }
    }
}

/// Looks after the shards while this peer is on duty in `term`; ended by dropping it.
pub(super) async fn supervise(member: &Weak<Member>, term: u64) {
    let (mut turn, mut under_way) = (0, UnderWay::default());
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(member) = member.upgrade() else { return };
        // Without a quorum it could do nothing, and what it knows may be of the past.
        if member.look_for_silence(term) {
            tokio::select! {
                () = member.look_after_shards(term, &mut turn, &mut under_way) => {}
                // Changes that take long are not time in which nobody could be heard.
                () = member.go_on_looking(term) => {}
            }
        }
    }
}

/// Whether somebody has asked for a node to be given nothing any more.
pub(in crate::peer) fn is_drained(state: &State, node: &str) -> bool {
    state.mod_revision(&drains::key(node)).is_some()
}

/// All routes and settings.
pub(in crate::peer) fn routes(state: &State) -> Routes {
    let mut routes = Routes::default();
    let entries = state.list(ROUTES, None, MAX_SHARDS as usize + 1, usize::MAX).entries;
    entries.iter().for_each(|entry| routes.learn(&entry.key, Some(entry)));
    routes
}

impl Member {
    /// Has the detectors look. Says whether a quorum has confirmed this leader lately.
    fn look_for_silence(&self, term: u64) -> bool {
        let confirmed = self.view.confirmed_term() == Some(term);
        lock(&self.nodes.detectors).look(clock::now(), confirmed);
        confirmed
    }

    /// The same until it is dropped.
    async fn go_on_looking(&self, term: u64) {
        loop {
            tokio::time::sleep(LOOK).await;
            self.look_for_silence(term);
        }
    }

    async fn look_after_shards(self: &Arc<Self>, term: u64, turn: &mut usize, under_way: &mut UnderWay) {
        self.forget_the_deleted();
        let state = self.published.current().state.clone();
        let mut world = match self.world(&state) {
            Some(world) => world,
            None => return self.begin_placement(&state, term).await,
        };
        world.expect(under_way.moves());
        let changes = plan::plan(&world, MOVES_AT_ONCE, turn);
        let changes = changes.into_iter().map(|change| (world.gives(&change), change)).collect();
        self.carry_out(term, &state, changes, under_way).await;
    }

    /// Carries out what was planned in this state, each with whether who has the shard gives it ([`World::gives`]). Those that are given are only
    /// begun: who has them lives, so there is time, and others do not wait for it. Where somebody has begun maintenance since, nothing is
    /// changed any more.
    async fn carry_out(
        self: &Arc<Self>,
        term: u64,
        state: &State,
        changes: Vec<(bool, Change)>,
        under_way: &mut UnderWay,
    ) {
        let settings = state.get(SETTINGS).map(|entry| Compare::mod_revision(SETTINGS, entry.mod_revision));
        let mut others = Vec::new();
        for (gives, change) in changes {
            if gives {
                let (member, settings, given) = (self.clone(), settings.clone(), change.clone());
                under_way.begin(change, async move { member.give(term, &given, settings).await });
            } else if !under_way.has(change.shard) {
                others.push(change);
            }
        }
        let deadline = clock::now() + MOVE_WITHIN;
        let made = futures::stream::iter(others)
            .map(|change| {
                let settings = settings.clone();
                async move {
                    self.make(term, &change, settings, deadline).await;
                }
            })
            .buffer_unordered(MOVES_AT_ONCE);
        made.collect::<()>().await;
    }

    /// One change that was planned. Says the new fence; `None`: it was not made, and is planned again if it is still called for.
    async fn make(&self, term: u64, change: &Change, settings: Option<Compare>, deadline: Instant) -> Option<u64> {
        match self.change_route(term, change, settings, &Call::own(deadline)).await {
            Ok(Some(fence)) => return Some(fence),
            Ok(None) => tracing::debug!(shard = change.shard, "something was changed meanwhile: looking again"),
            Err(failure) => tracing::debug!(shard = change.shard, "changing a route: {}", failure.message),
        }
        None
    }

    /// Forgets what was heard of nodes that were deleted from the map since: they may be many, over a long term.
    fn forget_the_deleted(&self) {
        lock(&self.nodes.records).forget(&self.published.current().state);
        let mut registry = lock(&self.nodes.registry);
        // Read under the lock: whoever is noted was registered before that.
        let applied = self.published.current();
        let gone = registry.forget(|node| applied.state.mod_revision(&node_key(node)).is_some());
        let mut detectors = lock(&self.nodes.detectors);
        gone.iter().for_each(|(node, process)| detectors.left(node, process));
    }

    /// Decides how many shards there are, once a worker has been heard for an interval: others may come with it.
    async fn begin_placement(&self, state: &State, term: u64) {
        let workers = self.workers(state, clock::now());
        let heard = |worker: &Worker| worker.heard_for >= Some(self.nodes.rhythm.interval);
        if state.get(SETTINGS).is_some() || !workers.values().any(heard) {
            return;
        }
        let settings = Settings { shards: self.placement.shards, maintenance: false };
        let mut txn = Txn::cas(SETTINGS, Expected::Absent, settings.to_bytes());
        txn.when.push(in_term(term));
        match self.commit(txn, None, &Call::own(clock::now() + MOVE_WITHIN)).await {
            Ok(result) if result.succeeded => tracing::info!(shards = settings.shards, "the cluster has shards"),
            Ok(_) => {}
            Err(failure) => tracing::debug!("deciding the number of shards: {}", failure.message),
        }
    }

    /// What this leader knows; `None`: there are no shards yet.
    fn world(&self, state: &State) -> Option<World> {
        let Routes { settings, mut routes } = routes(state);
        let settings = settings?;
        routes.retain(|shard, _| *shard < settings.shards);
        // What is there and no route names nobody: it is replaced by one.
        let missing = (0..settings.shards).filter(|shard| !routes.contains_key(shard));
        let odd: Vec<(u32, Fenced)> = missing
            .filter_map(|shard| {
                Some((shard, Fenced { route: Route::default(), revision: state.get(&key(shard))?.mod_revision }))
            })
            .collect();
        routes.extend(odd);
        let now = clock::now();
        let nodes = routes.values().flat_map(|fenced| fenced.route.nodes()).filter(|node| !node.is_empty());
        let mut detectors = lock(&self.nodes.detectors);
        detectors.resume(nodes);
        let led_for = detectors.led_for(now);
        drop(detectors);
        let alive: BTreeSet<u32> = routes
            .iter()
            .filter(|(_, fenced)| has_lease(state, &fenced.route.node, fenced.route.lease))
            .map(|(shard, _)| *shard)
            .collect();
        let warm_up = self.nodes.rhythm.interval + self.nodes.rhythm.timeout();
        Some(World {
            settings,
            routes,
            alive,
            workers: self.workers(state, now),
            warm: led_for >= warm_up,
            followers: self.placement.followers,
            selector: self.placement.selector,
        })
    }

    fn workers(&self, state: &State, now: Instant) -> BTreeMap<String, Worker> {
        let mut records = lock(&self.nodes.records);
        let registry = lock(&self.nodes.registry);
        let countdowns = lock(self.duties.of(Mortal::Lease));
        let detectors = lock(&self.nodes.detectors);
        let drained: BTreeSet<&str> = state.keys(DRAINS).filter_map(|key| key.strip_prefix(DRAINS)).collect();
        let workers = state.keys(NODES).take(MAX_NODES).filter_map(|key| {
            let node = key.strip_prefix(NODES)?.to_owned();
            let (record, _) = records.of(state, &node)?;
            if !record.roles.iter().any(|role| role == WORKER) {
                return None;
            }
            let heard = registry.of(&node, &record.process);
            let load = heard.map(|heard| &heard.load);
            let cores = heard.map_or(1, |heard| heard.info.cores.max(1));
            let worker = Worker {
                lease: Some(record.lease).filter(|lease| *lease != 0),
                remaining: countdowns.remaining(record.lease, now).unwrap_or_default(),
                heard_for: heard
                    .and_then(|_| detectors.heard_since(&node, &record.process))
                    .map(|since| now.saturating_duration_since(since)),
                suspicion: detectors.phi(&node, now),
                cpu_permille: load.map_or(0, |load| load.cpu_millicores / cores),
                running_statements: load.map_or(0, |load| load.running_statements),
                drained: drained.contains(node.as_str()),
            };
            Some((node, worker))
        });
        workers.collect()
    }

    /// Makes a change, if this compare holds as well. Says the new fence; `None`: the route, the lease, the term or that is another by
    /// now.
    async fn change_route(
        &self,
        term: u64,
        change: &Change,
        settings: Option<Compare>,
        call: &Call,
    ) -> Result<Option<u64>, Failure> {
        reached_in(Point::Begin, ROUTE);
        let mut txn = change.txn(term);
        txn.when.extend(settings);
        let result = self.commit(txn, None, call).await?;
        if !result.succeeded {
            return Ok(None);
        }
        reached_in(Point::Committed, ROUTE);
        match change.why {
            Why::Lost | Why::Left => self.counters.shards_failed_over.add(1),
            Why::Balance | Why::Asked | Why::Drained => self.counters.shards_moved.add(1),
            Why::Begins | Why::Returned | Why::Followers => {}
        }
        tracing::info!(
            shard = change.shard,
            from = change.from,
            to = change.route.node,
            fence = result.revision,
            why = change.why.as_str(),
            "a shard's route was changed"
        );
        Ok(Some(result.revision))
    }

    // ---- what is asked for ------------------------------------------------------------------------------------

    /// The shards in order.
    ///
    /// # Errors
    /// NotLeader; Unavailable without a quorum; Overloaded.
    pub async fn list_shards(&self, call: &Call) -> Result<v1::ListShardsResponse, Failure> {
        self.confirmed_on_duty(&call.caller).await?;
        let applied = self.published.current();
        let state = &applied.state;
        let Routes { settings, mut routes } = routes(state);
        let count = settings.map_or(0, |settings| settings.shards);
        // Settings of fewer shards may have been put since.
        routes.retain(|shard, _| *shard < count);
        let now = clock::now();
        let countdowns = lock(self.duties.of(Mortal::Lease));
        let detectors = lock(&self.nodes.detectors);
        let shards = routes.into_iter().map(|(shard, fenced)| {
            let route = fenced.route;
            let alive = has_lease(state, &route.node, route.lease);
            v1::ShardStatus {
                shard,
                lease: route.lease,
                fence: fenced.revision,
                remaining_ms: alive.then(|| countdowns.remaining(route.lease, now).map_or(0, millis)),
                suspicion: detectors.phi(&route.node, now),
                node: route.node,
                followers: route.followers,
                reason: route.reason,
            }
        });
        Ok(v1::ListShardsResponse {
            header: Some(self.header(state.revision())),
            count,
            maintenance: settings.is_some_and(|settings| settings.maintenance),
            shards: shards.collect(),
        })
    }

    /// What is known after a quorum has confirmed this leader.
    async fn known_world(&self, call: &Call) -> Result<(u64, World), Failure> {
        let term = self.confirmed_on_duty(&call.caller).await?;
        let state = self.published.current().state.clone();
        let world = self.world(&state).ok_or_else(no_shards)?;
        Ok((term, world))
    }

    /// Begins or ends maintenance mode. Says at which revision.
    ///
    /// # Errors
    /// As [`Member::move_shard`].
    pub async fn maintain_shards(&self, maintenance: bool, call: &Call) -> Result<u64, Failure> {
        for _ in 0..RACES {
            let term = self.confirmed_on_duty(&call.caller).await?;
            let state = self.published.current().state.clone();
            let entry = state.get(SETTINGS).ok_or_else(no_shards)?;
            let settings = Settings::of(&entry).ok_or_else(no_shards)?;
            if settings.maintenance == maintenance {
                return Ok(state.revision());
            }
            let settings = Settings { maintenance, ..settings };
            let txn = Txn {
                when: vec![Compare::mod_revision(SETTINGS, entry.mod_revision), in_term(term)],
                then: vec![Op::put(SETTINGS, settings.to_bytes())],
                otherwise: vec![],
            };
            let result = self.commit(txn, None, call).await?;
            if result.succeeded {
                tracing::info!(maintenance, "maintenance mode of the shards");
                return Ok(result.revision);
            }
        }
        Err(self.raced("the settings of the shards"))
    }

    /// Whether that would change anything.
    ///
    /// # Errors
    /// As [`Member::maintain_shards`].
    pub async fn would_maintain(&self, maintenance: bool, call: &Call) -> Result<bool, Failure> {
        let (_, world) = self.known_world(call).await?;
        Ok(world.settings.maintenance != maintenance)
    }

    fn raced(&self, what: &str) -> Failure {
        let id = self.identity.id;
        Failure::unavailable(format!(
            "peer {id}: {what} was changed {RACES} times meanwhile; nothing was done, try again"
        ))
    }
}

fn no_shards() -> Failure {
    let what = "the cluster has no shards yet: it gets them when its first node with the role worker is registered";
    Failure::new(Kind::InvalidArgument, what.to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use bytes::Bytes;
    use lake_proto::v1::instruction_answer::Outcome;
    use tokio::sync::mpsc;

    use super::*;
    use crate::log::memory::MemoryDisk;
    use crate::peer::{Opened, Peer, Settings as PeerSettings, founding};
    use crate::raft::network::Transport;
    use crate::raft::state_machine::{Applied, Observe};
    use crate::raft::types::{Answer, Entry};
    use crate::support::eventually;

    #[derive(Debug)]
    struct Nobody;

    impl Observe for Nobody {
        fn applied(&self, _: &Entry, _: &Answer, _: &State) {}

        fn installed(&self, _: &Applied) {}
    }

    /// A peer that is a cluster by itself, of two shards, on duty in this term; a lease of node a; and what gives it a shard.
    async fn alone() -> (Arc<Peer>, Arc<Member>, u64, impl Fn(u32) -> Change, tempfile::TempDir) {
        let (dir, settings) = (tempfile::tempdir().unwrap(), PeerSettings::default());
        let disk = MemoryDisk::new(1, "ab".repeat(16), 1, Duration::from_millis(2));
        let opened = Opened::in_memory(&disk, dir.path().to_owned(), &settings, Arc::new(Nobody)).unwrap();
        let transport = Transport::new(HashMap::new(), None);
        let peer = Peer::start(opened, String::new(), String::new(), settings, transport).await.unwrap();
        let member = founding::found_alone(&peer).await.unwrap();
        let term = *member.duties.term().wait_for(|term| *term != 0).await.unwrap();
        let call = &Call::own(clock::now() + Duration::from_secs(30));
        let lease = member.grant_lease(60_000, "node a".to_owned(), None, call).await.unwrap();
        let shards = Settings { shards: 2, maintenance: false };
        assert!(
            member.commit(Txn::cas(SETTINGS, Expected::Absent, shards.to_bytes()), None, call).await.unwrap().succeeded
        );
        let planned = move |shard| Change {
            shard,
            expected: None,
            from: None,
            route: Route { node: "a".to_owned(), lease, ..Route::default() },
            why: Why::Begins,
        };
        (peer, member, term, planned, dir)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_planned_before_maintenance_began_is_not_done_after_it() {
        let (peer, member, term, planned, _dir) = alone().await;
        let call = &Call::own(clock::now() + Duration::from_secs(30));
        let planned_in = member.published.current().state.clone();
        let route_of = |shard| member.published.current().state.get(&key(shard));
        let mut under_way = UnderWay::default();
        member.carry_out(term, &planned_in, vec![(false, planned(0))], &mut under_way).await;
        assert!(route_of(0).is_some());
        member.maintain_shards(true, call).await.unwrap();
        member.carry_out(term, &planned_in, vec![(false, planned(1))], &mut under_way).await;
        assert!(route_of(1).is_none(), "it was told that nothing is moved by itself any more");
        // Somebody has asked for this one.
        assert!(member.change_route(term, &planned(1), None, call).await.unwrap().is_some());
        peer.shutdown().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nobody_waits_for_the_target_of_anothers_move() {
        let (peer, member, term, planned, _dir) = alone().await;
        let state = member.published.current().state.clone();
        let route_of = |shard| member.published.current().state.get(&key(shard));
        let (outgoing, mut sent) = mpsc::channel(4);
        member.nodes.mailbox.open("a", 1, &outgoing);
        let mut under_way = UnderWay::default();
        let both = vec![(true, planned(0)), (false, planned(1))];
        member.carry_out(term, &state, both, &mut under_way).await;
        assert!(route_of(1).is_some());
        assert!(under_way.has(0), "it is being moved while others are looked after");
        // Planned again meanwhile, it is not begun again.
        let again = vec![(true, planned(0)), (false, planned(0))];
        member.carry_out(term, &state, again, &mut under_way).await;
        let warm = sent.recv().await.unwrap();
        let answer = v1::InstructionAnswer { id: warm.id, outcome: Some(Outcome::Done(Bytes::new())) };
        member.nodes.mailbox.answered("a", 1, answer);
        eventually("its move", async || route_of(0).filter(|_| under_way.moves().next().is_none())).await;
        assert!(sent.try_recv().is_err(), "it was told once, and nobody had the shard before");

        // What is under way ends with the supervisor.
        let again = Change { expected: route_of(0).map(|entry| entry.mod_revision), ..planned(0) };
        member.carry_out(term, &state, vec![(true, again)], &mut under_way).await;
        sent.recv().await.unwrap();
        drop(under_way);
        eventually("nobody to wait", async || (member.nodes.mailbox.waited_for() == 0).then_some(())).await;
        peer.shutdown().await;
    }
}
