//! Who has what of what the state holds a limited number of: leases, sessions and scopes.
//!
//! The state knows no callers, since it is the same on every peer. So the leader keeps a ledger beside it, in memory: what is
//! granted goes down as whoever's asked for it, and what a keep-alive names that is nobody's yet as whoever's sent it. Each
//! caller gets its part of what there may be ([`super::shares`]); who asks for more is refused before anything is proposed.
//!
//! A new leader's ledger is empty, and knows within a time to live who keeps what alive. What nobody has put down is nobody's: the
//! state's own limits hold for all of it.
//!
//! Limits: what ended without this peer's doing, or with something else (a scope with its lease), is struck out once somebody
//! would be refused, at most every [`STRIKE_OUT_EVERY`]; no ledger has more entries than may stand in the state, and as many
//! again that are to be struck out.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_proto::kv::{Op, OpResult, Revision, Txn, TxnResult};
use lake_proto::v1::error_detail::Kind;

use super::failure::Failure;
use super::shares::{Caller, Held, Pool, Refused, Resource};
use crate::log::lock;
use crate::raft::state_machine::Applied;
use crate::state::{MAX_LEASES, MAX_SCOPES, MAX_SESSIONS, State, command};

/// How often the ledger is compared with the state, at most: that goes through all of it.
const STRIKE_OUT_EVERY: Duration = Duration::from_secs(1);

/// One ledger.
#[derive(Debug)]
pub struct Ledger<K> {
    pool: Pool,
    /// What it is of, in words, and how many there may be.
    what: &'static str,
    limit: usize,
    stands: fn(&State, &K) -> bool,
    entries: Mutex<Entries<K>>,
}

#[derive(Debug)]
struct Entries<K> {
    /// Each with the revision from which it stands: a state that is older says nothing of it.
    by_key: HashMap<K, (Revision, Held)>,
    struck_out: Option<Instant>,
}

impl<K: Eq + Hash> Ledger<K> {
    fn new(resource: Resource, what: &'static str, limit: usize, stands: fn(&State, &K) -> bool) -> Self {
        let entries = Mutex::new(Entries { by_key: HashMap::new(), struck_out: None });
        Self { pool: Pool::new(resource, limit), what, limit, stands, entries }
    }

    /// Room for so many more of a caller's. What is not put down in the end is given back by dropping it.
    ///
    /// # Errors
    /// Overloaded: the caller has its part. Nothing was changed.
    pub fn room(&self, caller: &Caller, count: usize, state: &State) -> Result<Vec<Held>, Failure> {
        let take = || (0..count).map(|_| self.pool.take(caller, 1)).collect::<Result<Vec<_>, _>>();
        take().or_else(|_| {
            self.strike_out(state);
            take().map_err(|refused| self.refused(refused))
        })
    }

    /// Something stands in the state from a revision on for whoever took the room.
    pub fn put_down(&self, key: K, since: Revision, held: Held) {
        lock(&self.entries).by_key.insert(key, (since, held));
    }

    /// A caller keeps these alive, which stand in `state`: those that are nobody's yet are this one's.
    pub fn kept_alive(&self, keys: impl Iterator<Item = K>, caller: &Caller, state: &State) {
        let mut entries = lock(&self.entries);
        if entries.by_key.len() >= self.limit {
            entries.strike_out(state, self.stands);
        }
        for key in keys {
            entries.by_key.entry(key).or_insert_with(|| (state.revision(), self.pool.note(caller, 1)));
        }
    }

    /// Something has ended.
    pub fn ended(&self, key: &K) {
        lock(&self.entries).by_key.remove(key);
    }

    /// Nothing is anybody's.
    pub fn clear(&self) {
        lock(&self.entries).by_key.clear();
    }

    fn strike_out(&self, state: &State) {
        lock(&self.entries).strike_out(state, self.stands);
    }

    fn refused(&self, refused: Refused) -> Failure {
        let (what, limit) = (self.what, self.limit);
        Failure::new(
            Kind::Overloaded,
            format!(
                "{refused} has as many {what} as it may have, of {limit}: end some of them, or let them end, then ask again"
            ),
        )
    }
}

impl<K: Eq + Hash> Entries<K> {
    fn strike_out(&mut self, state: &State, stands: fn(&State, &K) -> bool) {
        if self.struck_out.is_some_and(|at| clock::since(at) < STRIKE_OUT_EVERY) {
            return;
        }
        self.struck_out = Some(clock::now());
        self.by_key.retain(|key, (since, _)| *since > state.revision() || stands(state, key));
    }
}

/// All ledgers of a leader.
#[derive(Debug)]
pub struct Ledgers {
    pub leases: Ledger<u64>,
    pub sessions: Ledger<u64>,
    /// By path.
    pub scopes: Ledger<String>,
}

impl Default for Ledgers {
    fn default() -> Self {
        Self {
            leases: Ledger::new(Resource::Leases, command::LEASES, MAX_LEASES, |state, id| state.has_lease(*id)),
            sessions: Ledger::new(Resource::Sessions, command::SESSIONS, MAX_SESSIONS, |state, id| {
                state.has_session(*id)
            }),
            scopes: Ledger::new(Resource::Scopes, command::SCOPES, MAX_SCOPES, |state, path| state.has_scope(path)),
        }
    }
}

impl Ledgers {
    /// Nothing is anybody's.
    pub fn clear(&self) {
        self.leases.clear();
        self.sessions.clear();
        self.scopes.clear();
    }

    /// Room for the scopes that a transaction is to acquire, and what becomes of them; `None` for one that concerns no scope.
    ///
    /// # Errors
    /// As [`Ledger::room`].
    pub fn scopes_of(
        &self,
        txn: &Txn,
        caller: &Caller,
        applied: impl FnOnce() -> Arc<Applied>,
    ) -> Result<Option<ScopesOf>, Failure> {
        let of_scope = |op: &Op| match op {
            Op::AcquireScope { path, .. } | Op::ReleaseScope { path, .. } => Some(path.clone()),
            _ => None,
        };
        if !txn.then.iter().any(|op| of_scope(op).is_some()) {
            return Ok(None);
        }
        let acquired = txn.then.iter().filter(|op| matches!(op, Op::AcquireScope { .. })).count();
        let room = self.scopes.room(caller, acquired, &applied().state)?;
        Ok(Some(ScopesOf { room, paths: txn.then.iter().map(of_scope).collect() }))
    }
}

/// The scopes of one transaction that is under way.
#[derive(Debug)]
pub struct ScopesOf {
    room: Vec<Held>,
    /// For each operation its scope, if it has one.
    paths: Vec<Option<String>>,
}

impl ScopesOf {
    /// The transaction was answered.
    pub fn done(mut self, result: &TxnResult, ledgers: &Ledgers) {
        if !result.succeeded {
            return;
        }
        let since = result.revision;
        for (path, result) in self.paths.into_iter().zip(&result.results) {
            match (path, result) {
                (Some(path), OpResult::AcquireScope { .. }) => {
                    if let Some(held) = self.room.pop() {
                        ledgers.scopes.put_down(path, since, held);
                    }
                }
                (Some(path), OpResult::ReleaseScope { released: true }) => ledgers.scopes.ended(&path),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use lake_proto::coordination::ScopeOwner;

    use super::*;
    use crate::peer::shares::Callers;
    use crate::state::command::Action;

    fn at(callers: &Callers, host: u8, port: u16) -> Caller {
        callers.at(Some(SocketAddr::from(([10, 0, 0, host], port))))
    }

    /// A ledger of few, all of which stand.
    fn ledger(stands: fn(&State, &u64) -> bool) -> Ledger<u64> {
        Ledger::new(Resource::Leases, "leases", 64, stands)
    }

    /// Takes and puts down until it is refused.
    fn greedy(ledger: &Ledger<u64>, caller: &Caller, from: u64) -> (u64, Failure) {
        for n in 0.. {
            match ledger.room(caller, 1, &State::default()) {
                Ok(mut room) => ledger.put_down(from + n, 0, room.pop().unwrap()),
                Err(refused) => return (n, refused),
            }
        }
        unreachable!()
    }

    #[test]
    fn who_has_much_is_refused_and_who_has_little_gets_in() {
        let (ledger, callers) = (ledger(|_, _| true), Callers::default());
        let (much, beside, elsewhere) = (at(&callers, 1, 1), at(&callers, 1, 2), at(&callers, 2, 1));
        let (got, refused) = greedy(&ledger, &much, 0);
        assert!((10..=30).contains(&got), "{got} of 64");
        assert_eq!(refused.kind, Kind::Overloaded);
        assert!(refused.message.contains("this connection has as many leases"), "{}", refused.message);
        let (of_host, _) = greedy(&ledger, &beside, 1_000);
        assert!(of_host > 0 && got + of_host <= 32, "a host gets half: {got} and {of_host}");
        let (of_other, _) = greedy(&ledger, &elsewhere, 2_000);
        assert!(of_other > 5, "{of_other}");
        for id in 0..got {
            ledger.ended(&id);
        }
        assert!(ledger.room(&much, 1, &State::default()).is_ok(), "what has ended counts no more");
    }

    #[test]
    fn a_new_leader_learns_who_has_what_from_what_is_kept_alive() {
        let (ledger, callers) = (ledger(|_, _| true), Callers::default());
        let (much, other) = (at(&callers, 1, 1), at(&callers, 2, 1));
        ledger.kept_alive(0..40, &much, &State::default());
        ledger.kept_alive(0..40, &other, &State::default());
        assert_eq!(greedy(&ledger, &much, 100).0, 0, "it has more than its part");
        assert!(greedy(&ledger, &other, 200).0 > 0, "it only says the same again, and has none of them");
        ledger.clear();
        assert!(greedy(&ledger, &much, 300).0 > 10);
    }

    #[test]
    fn what_ended_unseen_is_struck_out_before_anybody_is_refused() {
        let (ledger, callers) = (ledger(|_, id| *id >= 1_000), Callers::default());
        let much = at(&callers, 1, 1);
        // None of these stands in the state: somebody else has ended them.
        let (got, _) = greedy(&ledger, &much, 0);
        assert!(got > 20, "{got}: the first refusal struck out what was there");
        assert!(lock(&ledger.entries).by_key.len() < 32);
        ledger.kept_alive(1_000..1_064, &much, &State::default());
        lock(&ledger.entries).struck_out = None;
        ledger.kept_alive(1_064..1_065, &much, &State::default());
        assert_eq!(lock(&ledger.entries).by_key.len(), 65, "these stand");

        ledger.clear();
        let mut room = ledger.room(&much, 1, &State::default()).unwrap();
        ledger.put_down(7, 1, room.pop().unwrap());
        lock(&ledger.entries).struck_out = None;
        ledger.strike_out(&State::default());
        assert!(lock(&ledger.entries).by_key.contains_key(&7), "a state that is older says nothing of it");
    }

    #[test]
    fn scopes_count_from_the_transaction_that_acquires_them_to_the_one_that_releases_them() {
        let (ledgers, callers) = (Ledgers::default(), Callers::default());
        let caller = at(&callers, 1, 1);
        let mut applied = Applied::default();
        let owner = || ScopeOwner::Procedure("p".to_owned());
        let mut run = |then: Vec<Op>| {
            let txn = Txn { then, ..Txn::default() };
            let scopes = ledgers.scopes_of(&txn, &caller, || Arc::new(applied.clone())).unwrap();
            let outcome = applied.state.apply(1, &Action::Txn(txn).unstamped());
            let command::Outcome::Txn(result) = outcome else { panic!("{outcome:?}") };
            let concerned = scopes.map(|scopes| scopes.done(&result, &ledgers)).is_some();
            (ledgers.scopes.pool.taken(), concerned)
        };
        let acquire = |n: u32| Op::AcquireScope { path: format!("/s/{n}"), owner: owner() };
        assert_eq!(run(vec![acquire(1), Op::put("/kv/a", "v"), acquire(2)]), (2, true));
        assert_eq!(run(vec![acquire(2)]), (2, true), "held already by the same owner");
        let release = |n: u32| Op::ReleaseScope { path: format!("/s/{n}"), owner: owner() };
        assert_eq!(run(vec![release(1), release(7)]), (1, true));
        assert_eq!(run(vec![Op::put("/kv/a", "w")]), (1, false));
        // It would be refused, and gives its room back.
        let in_the_way = Txn { then: vec![acquire(1), acquire(3)], ..Txn::default() };
        drop(ledgers.scopes_of(&in_the_way, &caller, Default::default).unwrap());
        assert_eq!(ledgers.scopes.pool.taken(), 1);
    }
}
