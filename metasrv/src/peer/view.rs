//! What a member knows of its cluster at this moment: term, leader, members. Never waits.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lake_client::clock;
use lake_proto::v1;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::{Instant, RaftMetrics, ServerState};

use super::Identity;
use super::failure::Failure;
use crate::log::lock;
use crate::raft::types::{Member, Raft, TypeConfig};

/// A look at the consensus core. Cheap to clone.
#[derive(Debug, Clone)]
pub struct View {
    raft: Raft,
    identity: Arc<Identity>,
    /// A leader that no quorum has confirmed for this long no longer calls itself one.
    leader_lease: Duration,
    /// Whose call as a leader was last accepted, and when. openraft's core keeps naming a leader that has fallen silent
    /// until there is another one.
    heard: Arc<Mutex<(Option<u64>, std::time::Instant)>>,
}

/// How much of the leader's log a member has, as far as the leader knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replicated {
    /// Entries that it is not known to have.
    pub lag_entries: u64,
    /// What it lacks is still in the leader's log: it needs no snapshot.
    pub from_log: bool,
    /// The leader has learnt since it leads what the member has. Until then all of the log counts as lacking.
    pub known: bool,
}

impl View {
    /// Of this core.
    pub fn new(raft: Raft, identity: Arc<Identity>, leader_lease: Duration) -> Self {
        let heard = Arc::new(Mutex::new((None, clock::now())));
        Self { raft, identity, leader_lease, heard }
    }

    /// The core itself.
    pub fn raft(&self) -> &Raft {
        &self.raft
    }

    /// Who this peer is, and where it is reached now.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// This peer's id.
    pub fn id(&self) -> u64 {
        self.identity.id
    }

    /// What the core last said of itself.
    pub fn metrics(&self) -> RaftMetrics<TypeConfig> {
        self.raft.metrics().borrow_watched().clone()
    }

    /// The term that this peer's core leads, as it believes itself; confirmed by a quorum or not.
    pub fn leading_term(&self) -> Option<u64> {
        let receiver = self.raft.metrics();
        let metrics = receiver.borrow_watched();
        (metrics.state == ServerState::Leader).then_some(metrics.current_term)
    }

    /// The term.
    pub fn term(&self) -> u64 {
        self.raft.metrics().borrow_watched().current_term
    }

    /// A leader's call was accepted.
    pub fn heard_from(&self, id: u64) {
        *lock(&self.heard) = (Some(id), clock::now());
    }

    /// When a leader's call was last accepted, or this peer became a member.
    pub fn heard_at(&self) -> std::time::Instant {
        lock(&self.heard).1
    }

    /// How long no leader has called, or since this peer is a member.
    pub fn silence(&self) -> Duration {
        clock::since(self.heard_at())
    }

    /// Who leads, as far as this peer can know: not this one, if it has lost its quorum, and not one that has fallen silent.
    pub fn leader_id(&self) -> Option<u64> {
        let receiver = self.raft.metrics();
        let metrics = receiver.borrow_watched();
        let leader = metrics.current_leader?;
        if leader != self.identity.id {
            let (from, at) = *lock(&self.heard);
            return from.filter(|id| *id == leader && clock::since(at) <= self.leader_lease * 2);
        }
        let alone = metrics.membership_config.voter_ids().eq([self.identity.id]);
        let confirmed = metrics.last_quorum_acked.is_some_and(|at| at.elapsed() <= self.leader_lease * 2);
        (metrics.state == ServerState::Leader && (alone || confirmed)).then_some(leader)
    }

    /// The term in which this peer leads, as far as its core knows: a quorum may have moved on.
    pub fn led_term(&self) -> Option<u64> {
        let receiver = self.raft.metrics();
        let metrics = receiver.borrow_watched();
        let leads = metrics.state == ServerState::Leader && metrics.current_leader == Some(self.identity.id);
        leads.then_some(metrics.current_term)
    }

    /// The term in which this peer leads, if a quorum has confirmed that within the leader's lease (semantics, section 8).
    pub fn confirmed_term(&self) -> Option<u64> {
        let term = self.led_term()?;
        let receiver = self.raft.metrics();
        let metrics = receiver.borrow_watched();
        let alone = metrics.membership_config.voter_ids().eq([self.identity.id]);
        let confirmed = metrics.last_quorum_acked.is_some_and(|at| at.elapsed() <= self.leader_lease);
        (metrics.current_term == term && (alone || confirmed)).then_some(term)
    }

    /// Who leads, with its addresses.
    pub fn leader(&self) -> Option<v1::Member> {
        self.member(self.leader_id()?)
    }

    /// What this peer says when it does not lead.
    pub fn not_leader(&self) -> Failure {
        Failure::not_leader(self.id(), self.term(), self.leader())
    }

    /// A member by its id.
    pub fn member(&self, id: u64) -> Option<v1::Member> {
        let metrics = self.raft.metrics();
        let membership = metrics.borrow_watched().membership_config.clone();
        membership.membership().get_node(&id).map(|member| self.identity.known_as(member.to_wire(id)))
    }

    /// The log entry with the newest membership that this peer knows.
    pub fn membership(&self) -> u64 {
        let metrics = self.raft.metrics();
        metrics.borrow_watched().membership_config.log_id().map_or(0, |id| id.index)
    }

    /// Every voter, and every learner.
    pub fn members(&self) -> (Vec<v1::Member>, Vec<v1::Member>) {
        let metrics = self.raft.metrics();
        let membership = metrics.borrow_watched().membership_config.clone();
        let voters: BTreeSet<u64> = membership.voter_ids().collect();
        membership
            .membership()
            .nodes()
            .map(|(id, member)| self.identity.known_as(member.to_wire(*id)))
            .partition(|member| voters.contains(&member.id))
    }

    /// What the membership says of this peer: where it was reached when that was written.
    pub fn own_record(&self) -> Option<Member> {
        let metrics = self.raft.metrics();
        let membership = metrics.borrow_watched().membership_config.clone();
        membership.membership().get_node(&self.identity.id).cloned()
    }

    /// The members that have answered this leader within a time, itself among them. Empty unless this peer leads.
    pub fn alive(&self, within: Duration) -> BTreeSet<u64> {
        let metrics = self.metrics();
        let answered = metrics.heartbeat.into_iter().flatten();
        let answered = answered.filter(|(_, at)| at.is_some_and(|at| at.elapsed() <= within)).map(|(id, _)| id);
        let own = (metrics.state == ServerState::Leader).then_some(self.identity.id);
        answered.chain(own).collect()
    }

    /// How much of this leader's log a member has.
    pub fn replicated(&self, id: u64) -> Replicated {
        let metrics = self.metrics();
        let last = metrics.last_log_index;
        let matched = match metrics.replication.as_ref().and_then(|all| all.get(&id)) {
            _ if id == self.identity.id => last,
            Some(matched) => matched.map(|id| id.index),
            None => None,
        };
        let entries = |last: Option<u64>| last.map_or(0, |index| index + 1);
        Replicated {
            lag_entries: entries(last).saturating_sub(entries(matched)),
            from_log: matched.is_some() && matched >= metrics.purged.map(|id| id.index),
            known: matched.is_some(),
        }
    }

    /// The other voters, those that have replicated most of the log first: who should lead next. Empty unless this peer
    /// leads.
    pub fn successors(&self) -> Vec<u64> {
        let metrics = self.metrics();
        let voters: BTreeSet<u64> = metrics.membership_config.voter_ids().collect();
        let mut others: Vec<_> = metrics
            .replication
            .into_iter()
            .flatten()
            .filter(|(id, _)| *id != self.identity.id && voters.contains(id))
            .collect();
        others.sort_by_key(|(_, matched)| std::cmp::Reverse(*matched));
        others.into_iter().map(|(id, _)| id).collect()
    }
}
