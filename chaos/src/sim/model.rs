//! What every command must do and answer, worked out a second time from the text of the semantics (sections 1, 2 and 4 to 6), as
//! plainly as possible: ordered maps, and every question answered by looking at what there is.
//!
//! The first peer that applies an entry is compared with it: the answer, what is under each key that the command is about, the
//! change that watchers are to be told of, and how many entries, leases, scopes and sessions there are; now and then all of
//! it. Peers that apply it later have the same state, as another invariant says.
//!
//! Limits of numbers and bytes are not in it: nothing in a simulation comes near them, and a refusal that names one is wrong.

use std::collections::BTreeMap;
use std::ops::Bound;

use lake_metasrv::state::command::{Action, Command, Outcome, Refusal};
use lake_metasrv::state::{FIRST_FEATURE_LEVEL, State};
use lake_proto::coordination::{LeaseId, Scope, ScopeOwner, SessionId};
use lake_proto::kv::{Compare, Condition, KeyValue, Op, OpResult, Revision, Txn, TxnResult};
use lake_proto::limits::{MAX_PAGE_ENTRIES, SESSION_WINDOW};

/// Everything is compared after so many entries.
const COMPARE_ALL_EVERY: u64 = 200;
/// More of a command or an answer is not told.
const TOLD_CHARS: usize = 400;

#[derive(Debug)]
struct Session {
    lowest: u64,
    kept: BTreeMap<u64, Outcome>,
}

/// The state that the commands so far have to come to.
#[derive(Debug)]
pub struct Model {
    /// The log index that comes next.
    next: u64,
    revision: Revision,
    feature_level: u32,
    entries: BTreeMap<String, KeyValue>,
    leases: BTreeMap<LeaseId, u64>,
    scopes: BTreeMap<String, Scope>,
    sessions: BTreeMap<SessionId, Session>,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            next: 0,
            revision: 0,
            feature_level: FIRST_FEATURE_LEVEL,
            entries: BTreeMap::new(),
            leases: BTreeMap::new(),
            scopes: BTreeMap::new(),
            sessions: BTreeMap::new(),
        }
    }
}

/// What one command did.
struct Did {
    outcome: Outcome,
    /// It is the answer of the first time.
    repeated: bool,
    /// The keys that it was about, each with what was there before.
    before: BTreeMap<String, Option<KeyValue>>,
}

impl Did {
    fn of(outcome: Outcome) -> Self {
        Self { outcome, repeated: false, before: BTreeMap::new() }
    }

    fn refused(refusal: Refusal) -> Self {
        Self::of(Outcome::Refused(refusal))
    }
}

impl Model {
    /// A peer has applied an entry, with this answer if it carries a command, and has come to this state. Nothing is looked at
    /// if another peer had done so before.
    ///
    /// # Errors
    /// What is not as it must be, in words.
    pub fn applied(
        &mut self,
        index: u64,
        term: u64,
        command: Option<(&Command, &Outcome)>,
        state: &State,
    ) -> Result<(), String> {
        if index != self.next {
            return Ok(());
        }
        self.next += 1;
        let revision = self.revision;
        let did = command.map(|(command, _)| self.apply(term, command));
        if let (Some(did), Some((command, answer))) = (&did, command)
            && !is_answer(did, answer)
        {
            return Err(format!(
                "it answers {} to {}, and not {}",
                shortened(answer),
                shortened(&command.action),
                shortened(&did.outcome)
            ));
        }
        let before = did.map(|did| did.before).unwrap_or_default();
        self.compare(revision, &before, state)?;
        if index.is_multiple_of(COMPARE_ALL_EVERY) { self.compare_all(state) } else { Ok(()) }
    }

    // ---- comparing --------------------------------------------------------------------------------------------

    fn compare(
        &self,
        revision_before: Revision,
        before: &BTreeMap<String, Option<KeyValue>>,
        state: &State,
    ) -> Result<(), String> {
        if state.revision() != self.revision {
            return Err(format!("the revision is {}, and not {}", state.revision(), self.revision));
        }
        for key in before.keys() {
            let (is, should_be) = (state.get(key), self.entries.get(key));
            if is.as_ref() != should_be {
                return Err(format!("{key} holds {}, and not {}", shortened(&is), shortened(&should_be)));
            }
        }
        let (is, should_be) = ((state.len(), state.counts()), (self.entries.len(), self.counts()));
        if is != should_be {
            return Err(format!("keys, and leases, scopes and sessions, are {is:?}, and not {should_be:?}"));
        }
        if self.revision == revision_before {
            return Ok(());
        }
        let told = state.changes().from(self.revision).map_err(|e| format!("its change is not kept: {e:?}"))?;
        let told: Vec<_> = told
            .flat_map(|change| {
                change.events().iter().map(move |event| (change.revision, event.key(), event.key_value()))
            })
            .collect();
        let should_be: Vec<_> = before
            .iter()
            .map(|(key, before)| (key, before, self.entries.get(key).cloned()))
            .filter(|(_, before, after)| before.is_some() || after.is_some())
            .map(|(key, _, after)| (self.revision, key.as_str(), after))
            .collect();
        if told != should_be {
            return Err(format!("watchers are told {}, and not {}", shortened(&told), shortened(&should_be)));
        }
        Ok(())
    }

    fn counts(&self) -> (usize, usize, usize) {
        (self.leases.len(), self.scopes.len(), self.sessions.len())
    }

    fn compare_all(&self, state: &State) -> Result<(), String> {
        if let Some((is, should_be)) = state.iter().zip(self.entries.values()).find(|(is, should_be)| is != *should_be)
        {
            return Err(format!("there is {}, and not {}", shortened(&is), shortened(should_be)));
        }
        if !state.scopes("", "").eq(self.scopes.values().cloned()) {
            return Err(format!("the scopes are not {}", shortened(&self.scopes.values().collect::<Vec<_>>())));
        }
        if !state.lease_ttls(0).eq(self.leases.iter().map(|(id, ttl_ms)| (*id, *ttl_ms))) {
            return Err(format!("the leases are not {}", shortened(&self.leases)));
        }
        if !state.session_ttls(0).map(|(id, _)| id).eq(self.sessions.keys().copied()) {
            return Err(format!("the sessions are not {}", shortened(&self.sessions.keys().collect::<Vec<_>>())));
        }
        Ok(())
    }

    // ---- commands ---------------------------------------------------------------------------------------------

    /// Section 4: a repeated request returns the first result and changes nothing.
    fn apply(&mut self, term: u64, command: &Command) -> Did {
        let Some(stamp) = command.stamp else { return self.act(term, command) };
        let Some(session) = self.sessions.get_mut(&stamp.session) else {
            return Did::refused(Refusal::SessionExpired { session: stamp.session });
        };
        session.lowest = session.lowest.max(stamp.lowest_unanswered);
        session.kept = session.kept.split_off(&session.lowest);
        if stamp.sequence < session.lowest {
            return Did::refused(Refusal::SequenceAnswered { sequence: stamp.sequence });
        }
        if let Some(outcome) = session.kept.get(&stamp.sequence) {
            return Did { repeated: true, ..Did::of(outcome.clone()) };
        }
        if stamp.sequence - session.lowest >= SESSION_WINDOW {
            return Did::refused(Refusal::WindowFull { sequence: stamp.sequence });
        }
        let did = self.act(term, command);
        // The request may have closed its own session.
        if let Some(session) = self.sessions.get_mut(&stamp.session) {
            session.kept.insert(stamp.sequence, did.outcome.clone());
        }
        did
    }

    fn act(&mut self, term: u64, command: &Command) -> Did {
        match &command.action {
            Action::Txn(txn) => self.transact(term, command.proposed_unix_ms, txn),
            Action::GrantLease { ttl_ms, .. } => {
                self.revision += 1;
                self.leases.insert(self.revision, *ttl_ms);
                Did::of(Outcome::Granted { id: self.revision })
            }
            Action::OpenSession { .. } => {
                self.revision += 1;
                self.sessions.insert(self.revision, Session { lowest: 1, kept: BTreeMap::new() });
                Did::of(Outcome::Granted { id: self.revision })
            }
            Action::RevokeLease { lease } => self.end_leases(&[*lease]),
            Action::ExpireLeases { leases, term: of } if *of == term => self.end_leases(leases),
            Action::CloseSession { session } => self.end_sessions(&[*session]),
            Action::ExpireSessions { sessions, term: of } if *of == term => self.end_sessions(sessions),
            Action::ExpireLeases { .. } | Action::ExpireSessions { .. } => self.ended(false),
            Action::SetFeatureLevel { term: of, .. } if *of != term => self.ended(false),
            Action::SetFeatureLevel { level, .. } if *level <= self.feature_level => {
                Did::refused(Refusal::FeatureLevel { level: self.feature_level })
            }
            Action::SetFeatureLevel { level, .. } => {
                self.feature_level = *level;
                self.set()
            }
            Action::SetQuota { .. } => self.set(),
        }
    }

    fn set(&mut self) -> Did {
        self.revision += 1;
        Did::of(Outcome::Set { revision: self.revision })
    }

    fn ended(&self, existed: bool) -> Did {
        Did::of(Outcome::Ended { revision: self.revision, existed })
    }

    /// Section 5: the keys that hang on a lease are deleted with it; section 6: its scopes end.
    fn end_leases(&mut self, ids: &[LeaseId]) -> Did {
        let alive: Vec<LeaseId> = ids.iter().copied().filter(|id| self.leases.remove(id).is_some()).collect();
        if alive.is_empty() {
            return self.ended(false);
        }
        self.scopes.retain(|_, scope| !matches!(&scope.owner, ScopeOwner::Lease(id) if alive.contains(id)));
        let hangs = |entry: &KeyValue| entry.lease.is_some_and(|id| alive.contains(&id));
        let gone: Vec<KeyValue> = self.entries.values().filter(|entry| hangs(entry)).cloned().collect();
        for entry in &gone {
            self.entries.remove(&entry.key);
        }
        self.revision += 1;
        Did { before: gone.into_iter().map(|entry| (entry.key.clone(), Some(entry))).collect(), ..self.ended(true) }
    }

    fn end_sessions(&mut self, ids: &[SessionId]) -> Did {
        let ended = ids.iter().filter(|id| self.sessions.remove(*id).is_some()).count();
        self.revision += u64::from(ended > 0);
        self.ended(ended > 0)
    }

    /// Section 2: one branch, at one revision.
    fn transact(&mut self, term: u64, proposed_unix_ms: u64, txn: &Txn) -> Did {
        let succeeded = txn.when.iter().all(|compare| self.holds(term, compare));
        let (mut observed, mut conflicts) = (BTreeMap::new(), BTreeMap::new());
        for compare in txn.when.iter().filter(|_| !succeeded) {
            match &compare.condition {
                Condition::EntryTerm(_) | Condition::LeaseAlive(_) => {}
                Condition::ScopeFree(owner) => {
                    let others = self.conflicts(&compare.key, owner.as_ref());
                    conflicts.extend(others.map(|scope| (scope.path.clone(), scope.clone())));
                }
                Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => {
                    let under = self.under(&compare.key).take(MAX_PAGE_ENTRIES);
                    observed.extend(under.map(|entry| (entry.key.clone(), entry.clone())));
                }
                _ => observed.extend(self.entries.get(&compare.key).map(|entry| (entry.key.clone(), entry.clone()))),
            }
        }
        let mut run = Run { at: self.revision + 1, proposed_unix_ms, changed: false, before: BTreeMap::new() };
        let ops = if succeeded { &txn.then } else { &txn.otherwise };
        let results = ops.iter().map(|op| run.op(self, op)).collect();
        if run.changed {
            self.revision = run.at;
        }
        let outcome = Outcome::Txn(TxnResult {
            revision: self.revision,
            succeeded,
            results,
            observed: observed.into_values().collect(),
            conflicts: conflicts.into_values().collect(),
            reduced: None,
        });
        Did { before: run.before, ..Did::of(outcome) }
    }

    fn holds(&self, term: u64, compare: &Compare) -> bool {
        let entry = self.entries.get(&compare.key);
        match &compare.condition {
            Condition::Absent => entry.is_none(),
            Condition::ModRevision(revision) => entry.is_some_and(|e| e.mod_revision == *revision),
            Condition::CreateRevision(revision) => entry.is_some_and(|e| e.create_revision == *revision),
            Condition::Version(version) => entry.is_some_and(|e| e.version == *version),
            Condition::Value(value) => entry.is_some_and(|e| e.value == *value),
            Condition::PrefixEmpty => self.under(&compare.key).next().is_none(),
            Condition::PrefixUnchangedSince(revision) => self.under(&compare.key).all(|e| e.mod_revision <= *revision),
            Condition::EntryTerm(of) => *of == term,
            Condition::LeaseAlive(lease) => self.leases.contains_key(lease),
            Condition::ScopeFree(owner) => {
                let can_own = match owner {
                    Some(ScopeOwner::Lease(lease)) => self.leases.contains_key(lease),
                    Some(ScopeOwner::Procedure(_)) | None => true,
                };
                can_own && self.conflicts(&compare.key, owner.as_ref()).next().is_none()
            }
        }
    }

    fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a KeyValue> + 'a {
        let from = self.entries.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        from.take_while(move |(key, _)| key.starts_with(prefix)).map(|(_, entry)| entry)
    }

    /// Section 6: equal, an ancestor or a descendant, of another owner.
    fn conflicts<'a>(&'a self, path: &'a str, owner: Option<&'a ScopeOwner>) -> impl Iterator<Item = &'a Scope> + 'a {
        let parts = |path: &'a str| path.split('/').filter(|part| !part.is_empty());
        let related = move |other: &'a str| parts(other).zip(parts(path)).all(|(one, other)| one == other);
        self.scopes.values().filter(move |scope| related(&scope.path) && owner != Some(&scope.owner))
    }
}

/// One branch under way.
struct Run {
    at: Revision,
    proposed_unix_ms: u64,
    changed: bool,
    before: BTreeMap<String, Option<KeyValue>>,
}

impl Run {
    fn op(&mut self, model: &mut Model, op: &Op) -> OpResult {
        let previous = match op {
            Op::Put { key, .. } | Op::Delete { key, .. } => {
                let previous = model.entries.get(key).cloned();
                self.before.entry(key.clone()).or_insert_with(|| previous.clone());
                previous
            }
            _ => None,
        };
        match op {
            Op::Put { key, value, return_previous, lease } => {
                self.changed = true;
                let entry = KeyValue {
                    key: key.clone(),
                    value: value.clone(),
                    version: previous.as_ref().map_or(1, |e| e.version + 1),
                    create_revision: previous.as_ref().map_or(self.at, |e| e.create_revision),
                    mod_revision: self.at,
                    lease: *lease,
                };
                model.entries.insert(key.clone(), entry);
                OpResult::Put { previous: previous.filter(|_| *return_previous) }
            }
            Op::Delete { key, return_previous } => {
                model.entries.remove(key);
                self.changed |= previous.is_some();
                OpResult::Delete { deleted: previous.is_some(), previous: previous.filter(|_| *return_previous) }
            }
            Op::Get { key } => OpResult::Get { entry: model.entries.get(key).cloned() },
            Op::List { prefix, limit } => {
                let limit = *limit as usize;
                let entries: Vec<KeyValue> = model.under(prefix).take(limit).cloned().collect();
                OpResult::List { entries, more: model.under(prefix).nth(limit).is_some() }
            }
            Op::AcquireScope { path, owner } => {
                if let Some(held) = model.scopes.get(path) {
                    return OpResult::AcquireScope { fence: held.fence };
                }
                self.changed = true;
                let scope = Scope {
                    path: path.clone(),
                    owner: owner.clone(),
                    fence: self.at,
                    acquired_unix_ms: self.proposed_unix_ms,
                };
                model.scopes.insert(path.clone(), scope);
                OpResult::AcquireScope { fence: self.at }
            }
            Op::ReleaseScope { path, owner } => {
                let released = model.scopes.get(path).is_some_and(|held| held.owner == *owner);
                if released {
                    model.scopes.remove(path);
                }
                self.changed |= released;
                OpResult::ReleaseScope { released }
            }
        }
    }
}

/// Whether a command is answered as it must be. A repeated request's first answer may have been too large to be kept whole.
fn is_answer(did: &Did, answer: &Outcome) -> bool {
    match (&did.outcome, answer) {
        (Outcome::Txn(whole), Outcome::Txn(kept)) if did.repeated && kept.reduced.is_some() => {
            (whole.revision, whole.succeeded) == (kept.revision, kept.succeeded)
        }
        (expected, answer) => expected == answer,
    }
}

fn shortened(what: &impl std::fmt::Debug) -> String {
    format!("{what:?}").chars().take(TOLD_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use lake_proto::coordination::Stamp;
    use rand::rngs::StdRng;
    use rand::seq::IndexedRandom;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// A state and the model beside it.
    #[derive(Default)]
    struct Both {
        state: State,
        model: Model,
        index: u64,
    }

    impl Both {
        fn run(&mut self, command: &Command) -> Outcome {
            let outcome = self.state.apply(1, command);
            let index = self.index;
            self.index += 1;
            self.model.applied(index, 1, Some((command, &outcome)), &self.state).unwrap_or_else(|e| panic!("{e}"));
            outcome
        }

        fn granted(&mut self, action: Action) -> u64 {
            match self.run(&action.unstamped()) {
                Outcome::Granted { id } => id,
                other => panic!("{other:?}"),
            }
        }
    }

    fn lease(both: &mut Both) -> LeaseId {
        both.granted(Action::GrantLease { ttl_ms: 1000, holder: "a".into() })
    }

    fn key(rng: &mut StdRng) -> String {
        (*["/kv/a", "/kv/a/b", "/kv/ab", "/kv/b", "/kv/c/1", "/kv/c/2"].choose(rng).unwrap()).to_owned()
    }

    fn compare(rng: &mut StdRng, leases: &[LeaseId]) -> Compare {
        let revision = rng.random_range(0..60);
        let condition = match rng.random_range(0..8) {
            0 => Condition::Absent,
            1 => Condition::ModRevision(revision),
            2 => Condition::CreateRevision(revision),
            3 => Condition::Version(revision % 4),
            4 => Condition::Value(revision.to_string().into()),
            5 => Condition::PrefixEmpty,
            6 => Condition::PrefixUnchangedSince(revision),
            _ => return Compare::lease_alive(*leases.choose(rng).unwrap()),
        };
        Compare { key: key(rng), condition }
    }

    fn op(rng: &mut StdRng, owner: LeaseId) -> Op {
        let (key, return_previous) = (key(rng), rng.random_bool(0.5));
        match rng.random_range(0..8) {
            0..3 => {
                let lease = rng.random_bool(0.3).then_some(owner);
                Op::Put { key, value: rng.random_range(0..9).to_string().into(), return_previous, lease }
            }
            3 => Op::Delete { key, return_previous },
            4 => Op::Get { key },
            5 => Op::List { prefix: key, limit: 2 },
            6 => Op::AcquireScope { path: key, owner: ScopeOwner::Lease(owner) },
            _ => Op::ReleaseScope { path: key, owner: ScopeOwner::Lease(owner) },
        }
    }

    #[test]
    fn a_sound_state_does_what_the_model_says() {
        let mut rng = StdRng::seed_from_u64(3);
        for _ in 0..40 {
            let mut both = Both::default();
            let mut leases = vec![lease(&mut both), lease(&mut both)];
            let session = both.granted(Action::OpenSession { ttl_ms: 5000, holder: "b".into() });
            for n in 0..300 {
                let owner = *leases.choose(&mut rng).unwrap();
                let action = match rng.random_range(0..30) {
                    0 => {
                        leases.push(lease(&mut both));
                        continue;
                    }
                    1 => Action::RevokeLease { lease: owner },
                    2 => Action::ExpireLeases { leases: leases.clone(), term: rng.random_range(1..3) },
                    3 => Action::CloseSession { session: rng.random_range(0..99) },
                    4 => Action::SetQuota { prefix: "/kv/".into(), bytes: Some(1 << 20) },
                    _ => {
                        let mut when: Vec<_> =
                            (0..rng.random_range(0..3)).map(|_| compare(&mut rng, &leases)).collect();
                        let then: Vec<_> = (0..rng.random_range(0..4)).map(|_| op(&mut rng, owner)).collect();
                        // What the contract asks of a transaction: nothing in it can fail.
                        when.push(Compare::lease_alive(owner));
                        when.extend(then.iter().filter_map(|op| match op {
                            Op::AcquireScope { path, owner } => {
                                Some(Compare::scope_free(path.clone(), Some(owner.clone())))
                            }
                            _ => None,
                        }));
                        let otherwise = vec![Op::put(key(&mut rng), "9"), Op::delete(key(&mut rng))];
                        Action::Txn(Txn { when, then, otherwise })
                    }
                };
                let sequence = 1 + n / 3 + rng.random_range(0..3);
                let stamp = Stamp { session, sequence, lowest_unanswered: sequence.min(1 + n / 4) };
                let stamp = rng.random_bool(0.5).then_some(stamp);
                both.run(&Command { stamp, proposed_unix_ms: n, action });
            }
        }
    }

    #[test]
    fn what_is_done_otherwise_is_noticed() {
        let put = |value: &str| Txn { then: vec![Op::put("/kv/a", value.to_owned())], ..Txn::default() };
        let command = |txn| Action::Txn(txn).unstamped();
        let mut both = Both::default();
        both.run(&command(put("1")));
        let judge = |both: &mut Both, asked: &Command, did: &Command| {
            let outcome = both.state.apply(1, did);
            let index = both.index;
            both.model.applied(index, 1, Some((asked, &outcome)), &both.state).unwrap_err()
        };
        let told = judge(&mut both, &command(put("2")), &command(put("3")));
        assert!(told.starts_with("/kv/a holds"), "{told}");
        let mut both = Both::default();
        let told = judge(&mut both, &command(put("2")), &command(Txn::default()));
        assert!(told.starts_with("it answers"), "{told}");
        let mut both = Both::default();
        let lease = lease(&mut both);
        let owner = ScopeOwner::Lease(lease);
        let when = vec![Compare::lease_alive(lease), Compare::scope_free("/a", Some(owner.clone()))];
        let acquire = Txn { when, then: vec![Op::AcquireScope { path: "/a".into(), owner }], ..Txn::default() };
        both.run(&command(acquire));
        let revoke = Action::RevokeLease { lease }.unstamped();
        let outcome = both.state.apply(1, &revoke);
        // As if the scope had been forgotten in the end of its lease.
        both.model.scopes.clear();
        both.model.scopes.insert(
            "/b".into(),
            Scope { path: "/b".into(), owner: ScopeOwner::Procedure("p".into()), fence: 1, acquired_unix_ms: 0 },
        );
        let told = both.model.applied(both.index, 1, Some((&revoke, &outcome)), &both.state).unwrap_err();
        assert!(told.starts_with("keys, and leases"), "{told}");
    }
}
