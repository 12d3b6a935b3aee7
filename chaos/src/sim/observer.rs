//! Turns what a peer's state machine and disk do into what the invariants are about.

use std::hash::Hasher;
use std::sync::{Arc, Mutex, PoisonError};

use lake_metasrv::log::memory::Change;
use lake_metasrv::raft::state_machine::{Applied as State, Observe};
use lake_metasrv::raft::types::{Answer, Entry, Payload};
use lake_metasrv::raft::wire::vote_to_wire;
use lake_metasrv::state;
use lake_metasrv::state::command::{Action, Outcome};
use lake_proto::coordination::{LeaseId, ScopeOwner};
use lake_proto::kv::{Condition, Op, OpResult, Txn, TxnResult};

use super::invariants::{Applied, Effect, Seen};
use super::model::Model;
use super::trace::Fnv;

/// What was seen since somebody last looked. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Eyes {
    seen: Arc<Mutex<Vec<Seen>>>,
    /// Of all peers: whoever applies an entry first is held against it.
    model: Arc<Mutex<Model>>,
}

impl Eyes {
    /// Notes something.
    pub fn see(&self, seen: Seen) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    }

    /// All of it, in order.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Those that look at one peer's state machine.
    pub fn on(&self, peer: u64) -> Arc<dyn Observe> {
        Arc::new(OnStateMachine { peer, eyes: self.clone() })
    }
}

#[derive(Debug)]
struct OnStateMachine {
    peer: u64,
    eyes: Eyes,
}

impl Observe for OnStateMachine {
    fn applied(&self, entry: &Entry, answer: &Answer, state: &state::State) {
        let mut applied = Applied {
            index: entry.log_id.index,
            term: entry.log_id.leader_id.term,
            entry: hash(entry),
            state: state.digest(),
            revision: state.revision(),
            ..Applied::default()
        };
        let command = match (&entry.payload, answer) {
            (Payload::Normal(command), Answer(Some(outcome))) => {
                Some((command.command().expect("it was applied"), outcome))
            }
            _ => None,
        };
        if let Some((command, outcome)) = command {
            applied.stamp = command.stamp.map(|stamp| (stamp.session, stamp.sequence));
            applied.refused = matches!(outcome, Outcome::Refused(_));
            applied.effects = effects(applied.term, &command.action, outcome);
            let left = applied.effects.iter().flat_map(|effect| match effect {
                Effect::LeaseEnded(lease) | Effect::LeaseExpired(lease) => left_behind(state, *lease),
                _ => Vec::new(),
            });
            let left: Vec<Effect> = left.collect();
            applied.effects.extend(left);
        }
        let Applied { index, term, .. } = applied;
        // What an invariant of its own has a name for is told by that.
        self.eyes.see(Seen::Applied { peer: self.peer, applied });
        let mut model = self.eyes.model.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(what) = model.applied(index, term, command, state) {
            self.eyes.see(Seen::Differs { peer: self.peer, index, what });
        }
    }

    fn installed(&self, applied: &State) {
        if let Some(last) = applied.last {
            self.eyes.see(Seen::Installed { peer: self.peer, index: last.index, state: applied.state.digest() });
        }
    }
}

/// What a change of a peer's disk says.
pub fn on_disk(peer: u64, change: &Change) -> Option<Seen> {
    Some(match change {
        Change::Appended(entry) => {
            Seen::Appended { peer, index: entry.log_id.index, term: entry.log_id.leader_id.term, entry: hash(entry) }
        }
        Change::Truncated(last) => Seen::Truncated { peer, last: last.map(|id| id.index) },
        Change::Purged(upto) => Seen::Purged { peer, upto: upto.index },
        Change::Voted(vote) => {
            let vote = vote_to_wire(vote);
            if !vote.committed {
                return None;
            }
            Seen::Follows { peer, term: vote.term, leader: vote.node_id }
        }
        Change::Covered(_) | Change::Adopted(_) => return None,
    })
}

/// Of what the entry carries.
fn hash(entry: &Entry) -> u64 {
    let mut hasher = Fnv::default();
    match &entry.payload {
        Payload::Blank => {}
        Payload::Normal(command) => hasher.write(command.encoded()),
        // Its maps are ordered.
        Payload::Membership(membership) => hasher.write(format!("{membership:?}").as_bytes()),
    }
    hasher.finish()
}

/// Keys that hang on a lease, and scopes that it owns, in a state in which it is over.
fn left_behind(state: &state::State, lease: LeaseId) -> Vec<Effect> {
    let entries = state.iter().filter(|entry| entry.lease == Some(lease)).map(|entry| entry.key);
    let scopes = state.scopes("", "").filter(|scope| scope.owner == ScopeOwner::Lease(lease)).map(|scope| scope.path);
    entries.chain(scopes).map(|what| Effect::LeftBehind { lease, what }).collect()
}

fn effects(term: u64, action: &Action, outcome: &Outcome) -> Vec<Effect> {
    match (action, outcome) {
        (Action::Txn(txn), Outcome::Txn(result)) => of_txn(txn, result),
        (Action::GrantLease { ttl_ms, .. }, Outcome::Granted { id }) => {
            vec![Effect::LeaseBegan { lease: *id, ttl_ms: *ttl_ms }]
        }
        (Action::RevokeLease { lease }, Outcome::Ended { .. }) => vec![Effect::LeaseEnded(*lease)],
        (Action::ExpireLeases { leases, term: of }, Outcome::Ended { .. }) if *of == term => {
            leases.iter().copied().map(Effect::LeaseExpired).collect()
        }
        _ => Vec::new(),
    }
}

fn of_txn(txn: &Txn, result: &TxnResult) -> Vec<Effect> {
    let leases = txn.when.iter().filter_map(|compare| match compare.condition {
        Condition::LeaseAlive(lease) if result.succeeded => Some(Effect::UnderLease(lease)),
        _ => None,
    });
    let ran = if result.succeeded { &txn.then } else { &txn.otherwise };
    let scopes = ran.iter().zip(&result.results).filter_map(|(op, result)| match (op, result) {
        (Op::AcquireScope { path, owner }, OpResult::AcquireScope { fence }) => {
            Some(Effect::Acquired { path: path.clone(), owner: owner.clone(), fence: *fence })
        }
        (Op::ReleaseScope { path, owner }, _) => Some(Effect::Released { path: path.clone(), owner: owner.clone() }),
        _ => None,
    });
    leases.chain(scopes).collect()
}
