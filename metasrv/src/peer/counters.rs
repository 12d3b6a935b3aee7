//! How often what happened to leases, sessions and scopes on this peer, and to callers that ask for too much, for whoever
//! reads metrics. Counted where a command was proposed, and only what was answered: over all peers, each event once. They
//! start at zero with the process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use lake_client::clock;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{Condition, Op, OpResult, Txn, TxnResult};

use crate::state::State;

/// The counts. All only rise.
#[derive(Debug, Default)]
pub struct Counters {
    pub leases_granted: Counter,
    pub leases_revoked: Counter,
    pub leases_expired: Counter,
    pub sessions_opened: Counter,
    pub sessions_closed: Counter,
    pub sessions_expired: Counter,
    /// Leases and sessions renewed by keep-alives.
    pub renewed: Counter,
    /// Leases and sessions in keep-alives that were over.
    pub not_renewed: Counter,
    pub scopes_acquired: Counter,
    /// Microseconds that the transactions took which acquired them, together.
    pub scopes_acquired_micros: Counter,
    /// Scopes taken from holders that fell silent, whether or not anybody acquires them then: free for others from then on.
    pub scopes_taken: Counter,
    /// Transactions that found another's scope in the way.
    pub scopes_contended: Counter,
    /// Transactions refused because a lease that they named was over.
    pub fences_refused: Counter,
    /// Commands refused because their caller had its part of what may be in flight.
    pub overloaded: Counter,
    /// Processes registered as query nodes.
    pub nodes_registered: Counter,
    /// Processes told that another one was registered as their node since.
    pub nodes_superseded: Counter,
    /// Shards given to another worker because theirs was lost or has left.
    pub shards_failed_over: Counter,
    /// Shards moved for balance or because it was asked for.
    pub shards_moved: Counter,
}

/// One count.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// So many more.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What of a transaction concerns leases and scopes.
#[derive(Debug)]
pub struct Guards {
    began: Instant,
    leases: Vec<LeaseId>,
    acquires: bool,
}

impl Guards {
    /// Of a transaction about to be proposed.
    pub fn of(txn: &Txn) -> Self {
        let leases = txn.when.iter().filter_map(|compare| match compare.condition {
            Condition::LeaseAlive(lease) => Some(lease),
            _ => None,
        });
        let acquires = txn.then.iter().any(|op| matches!(op, Op::AcquireScope { .. }));
        Self { began: clock::now(), leases: leases.collect(), acquires }
    }
}

impl Counters {
    /// A transaction was answered; `state` is one that holds what it did.
    pub fn transaction(&self, guards: &Guards, result: &TxnResult, state: &State) {
        if result.succeeded {
            if guards.acquires {
                let acquired = result.results.iter().filter(|r| matches!(r, OpResult::AcquireScope { .. }));
                self.scopes_acquired.add(acquired.count() as u64);
                self.scopes_acquired_micros.add(clock::since(guards.began).as_micros() as u64);
            }
            return;
        }
        if !result.conflicts.is_empty() {
            self.scopes_contended.add(1);
        }
        if guards.leases.iter().any(|lease| !state.has_lease(*lease)) {
            self.fences_refused.add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::coordination::{Scope, ScopeOwner};
    use lake_proto::kv::Compare;

    use super::*;

    #[test]
    fn a_transaction_counts_as_what_it_came_to() {
        let counters = Counters::default();
        let state = State::default();
        let owner = ScopeOwner::Procedure("p".into());
        let txn = Txn {
            when: vec![Compare::lease_alive(7)],
            then: vec![Op::AcquireScope { path: "/a".into(), owner: owner.clone() }],
            ..Txn::default()
        };
        let guards = Guards::of(&txn);
        let acquired =
            TxnResult { succeeded: true, results: vec![OpResult::AcquireScope { fence: 1 }], ..TxnResult::default() };
        counters.transaction(&guards, &acquired, &state);
        counters.transaction(&guards, &TxnResult::default(), &state);
        let in_the_way = Scope { path: "/a".into(), owner, fence: 1, acquired_unix_ms: 0 };
        let contended = TxnResult { conflicts: vec![in_the_way], ..TxnResult::default() };
        counters.transaction(&Guards::of(&Txn::default()), &contended, &state);
        let counts =
            [&counters.scopes_acquired, &counters.fences_refused, &counters.scopes_contended].map(Counter::get);
        assert_eq!(counts, [1, 1, 1]);
    }
}
