//! What a state does, written down a second time from the text of the semantics (sections 1, 2, 4 to 7 and 9), as plainly as
//! possible: ordinary maps, everything copied, every question answered by looking at all there is. [`super::properties`]
//! compares the two.

use std::collections::BTreeMap;

use lake_proto::coordination::{LeaseId, Scope, ScopeOwner, SessionId};
use lake_proto::kv::{Compare, Condition, KeyValue, Op, OpResult, Reduced, Revision, Txn, TxnResult};
use lake_proto::v1;
use prost::Message;

use super::changes::{MAX_CHANGE_BYTES, MAX_CHANGES};
use super::command::{Action, Command, Outcome, Refusal};

/// What one command did to the keys: the last word on each.
pub type Change = (Revision, BTreeMap<String, Option<KeyValue>>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    pub ttl_ms: u64,
    pub holder: String,
    pub lowest: u64,
    pub kept: BTreeMap<u64, Outcome>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    pub revision: Revision,
    pub entries: BTreeMap<String, KeyValue>,
    pub leases: BTreeMap<LeaseId, (u64, String)>,
    pub scopes: BTreeMap<String, Scope>,
    pub sessions: BTreeMap<SessionId, Session>,
    pub quotas: BTreeMap<String, u64>,
    pub changes: Vec<Change>,
    pub compacted: Revision,
    pub feature_level: u32,
    /// Who is or was a member: with which incarnation, and whether it was removed.
    pub peers: BTreeMap<u64, (String, bool)>,
}

impl Default for Reference {
    fn default() -> Self {
        Self {
            revision: 0,
            entries: BTreeMap::new(),
            leases: BTreeMap::new(),
            scopes: BTreeMap::new(),
            sessions: BTreeMap::new(),
            quotas: BTreeMap::from([(String::new(), 4 << 30)]),
            changes: Vec::new(),
            compacted: 0,
            feature_level: 1,
            peers: BTreeMap::new(),
        }
    }
}

fn size(entry: &KeyValue) -> u64 {
    (entry.key.len() + entry.value.len()) as u64
}

impl Reference {
    /// Bytes of keys and values under a prefix.
    pub fn bytes(&self, prefix: &str) -> u64 {
        self.under(prefix).iter().map(size).sum()
    }

    fn under(&self, prefix: &str) -> Vec<KeyValue> {
        self.entries.values().filter(|entry| entry.key.starts_with(prefix)).cloned().collect()
    }

    /// Section 9: a peer that is no member any more stays known as removed.
    pub fn set_members(&mut self, members: &BTreeMap<u64, String>) {
        self.peers.values_mut().for_each(|(_, removed)| *removed = true);
        self.peers.extend(members.iter().map(|(id, incarnation)| (*id, (incarnation.clone(), false))));
    }

    /// Section 4: a repeated request returns the first result and changes nothing.
    pub fn apply(&mut self, term: u64, command: &Command) -> Outcome {
        let Some(stamp) = command.stamp else { return self.act(term, command) };
        let Some(session) = self.sessions.get_mut(&stamp.session) else {
            return Outcome::Refused(Refusal::SessionExpired { session: stamp.session });
        };
        session.lowest = session.lowest.max(stamp.lowest_unanswered);
        let lowest = session.lowest;
        session.kept.retain(|sequence, _| *sequence >= lowest);
        if stamp.sequence < lowest {
            return Outcome::Refused(Refusal::SequenceAnswered { sequence: stamp.sequence });
        }
        if let Some(outcome) = session.kept.get(&stamp.sequence) {
            return outcome.clone();
        }
        if stamp.sequence >= lowest + 256 {
            return Outcome::Refused(Refusal::WindowFull { sequence: stamp.sequence });
        }
        let outcome = self.act(term, command);
        if let Some(session) = self.sessions.get_mut(&stamp.session) {
            session.kept.insert(stamp.sequence, kept(&outcome));
        }
        outcome
    }

    fn act(&mut self, term: u64, command: &Command) -> Outcome {
        match &command.action {
            Action::Txn(txn) => self.transact(term, command.proposed_unix_ms, txn),
            Action::GrantLease { ttl_ms, holder } => {
                self.revision += 1;
                self.leases.insert(self.revision, (*ttl_ms, holder.clone()));
                Outcome::Granted { id: self.revision }
            }
            Action::RevokeLease { lease } => self.end_leases(&[*lease]),
            Action::ExpireLeases { leases, term: proposed } if *proposed == term => self.end_leases(leases),
            Action::OpenSession { ttl_ms, holder } => {
                self.revision += 1;
                let session = Session { ttl_ms: *ttl_ms, holder: holder.clone(), lowest: 1, kept: BTreeMap::new() };
                self.sessions.insert(self.revision, session);
                Outcome::Granted { id: self.revision }
            }
            Action::CloseSession { session } => self.end_sessions(&[*session]),
            Action::ExpireSessions { sessions, term: proposed } if *proposed == term => self.end_sessions(sessions),
            Action::ExpireLeases { .. } | Action::ExpireSessions { .. } => {
                Outcome::Ended { revision: self.revision, existed: false }
            }
            Action::SetFeatureLevel { term: proposed, .. } if *proposed != term => {
                Outcome::Ended { revision: self.revision, existed: false }
            }
            Action::SetFeatureLevel { level, .. } if *level > self.feature_level => {
                self.feature_level = *level;
                self.revision += 1;
                Outcome::Set { revision: self.revision }
            }
            Action::SetFeatureLevel { .. } => Outcome::Refused(Refusal::FeatureLevel { level: self.feature_level }),
            Action::SetQuota { prefix, bytes } => {
                match bytes {
                    Some(_) if !self.quotas.contains_key(prefix) && self.quotas.len() >= 64 => {
                        return Outcome::Refused(Refusal::TooMany { what: "quotas", limit: 64 });
                    }
                    Some(bytes) => drop(self.quotas.insert(prefix.clone(), *bytes)),
                    None => drop(self.quotas.remove(prefix)),
                }
                self.revision += 1;
                Outcome::Set { revision: self.revision }
            }
        }
    }

    /// Section 5: expiry deletes the keys that hang on the lease; section 6: the scope ends with it.
    fn end_leases(&mut self, ids: &[LeaseId]) -> Outcome {
        let alive: Vec<LeaseId> = ids.iter().copied().filter(|id| self.leases.contains_key(id)).collect();
        if alive.is_empty() {
            return Outcome::Ended { revision: self.revision, existed: false };
        }
        self.leases.retain(|id, _| !alive.contains(id));
        self.scopes.retain(|_, scope| !matches!(&scope.owner, ScopeOwner::Lease(id) if alive.contains(id)));
        let hangs = |entry: &KeyValue| entry.lease.is_some_and(|id| alive.contains(&id));
        let gone = self.entries.values().filter(|e| hangs(e)).map(|e| (e.key.clone(), None)).collect();
        self.entries.retain(|_, entry| !hangs(entry));
        self.revision += 1;
        self.note(gone);
        Outcome::Ended { revision: self.revision, existed: true }
    }

    fn end_sessions(&mut self, ids: &[SessionId]) -> Outcome {
        let before = self.sessions.len();
        self.sessions.retain(|id, _| !ids.contains(id));
        let existed = self.sessions.len() < before;
        self.revision += u64::from(existed);
        Outcome::Ended { revision: self.revision, existed }
    }

    /// Section 7: the last 100,000 changes or 64 MiB.
    fn note(&mut self, events: BTreeMap<String, Option<KeyValue>>) {
        if events.is_empty() {
            return;
        }
        self.changes.push((self.revision, events));
        let count = |changes: &[Change]| changes.iter().map(|(_, events)| events.len()).sum::<usize>();
        let bytes = |changes: &[Change]| {
            let events = changes.iter().flat_map(|(_, events)| events);
            events.map(|(key, e)| e.as_ref().map_or(key.len() as u64, size)).sum::<u64>()
        };
        while count(&self.changes) > MAX_CHANGES || bytes(&self.changes) > MAX_CHANGE_BYTES {
            self.compacted = self.changes.remove(0).0;
        }
    }

    /// Section 2: all or nothing, at one revision.
    fn transact(&mut self, term: u64, proposed_unix_ms: u64, txn: &Txn) -> Outcome {
        let succeeded = txn.when.iter().all(|compare| self.holds(term, compare));
        let mut after = self.clone();
        let next = self.revision + 1;
        let ops = if succeeded { &txn.then } else { &txn.otherwise };
        let mut changed = false;
        let results: Vec<OpResult> = ops.iter().map(|op| after.op(op, next, proposed_unix_ms, &mut changed)).collect();
        let returned: u64 = results
            .iter()
            .map(|one| match one {
                OpResult::Put { previous } | OpResult::Delete { previous, .. } => previous.as_ref().map_or(0, size),
                OpResult::Get { entry } => entry.as_ref().map_or(0, size),
                OpResult::List { .. } | OpResult::AcquireScope { .. } | OpResult::ReleaseScope { .. } => 0,
            })
            .sum();
        if returned > 8 << 20 {
            return Outcome::Refused(Refusal::AnswerTooLarge { bytes: returned });
        }
        for (prefix, limit) in &self.quotas {
            let (used, then) = (self.bytes(prefix), after.bytes(prefix));
            if then > used && then > *limit {
                return Outcome::Refused(Refusal::QuotaExceeded { prefix: prefix.clone(), limit: *limit, used });
            }
        }
        if changed {
            after.revision = next;
            let keys: Vec<&String> = self.entries.keys().chain(after.entries.keys()).collect();
            let differs = |key: &&&String| {
                // An entry that was put again has a new revision, though nothing else of it may differ.
                self.entries.get(**key) != after.entries.get(**key)
            };
            let events = keys.iter().filter(differs).map(|key| ((*key).clone(), after.entries.get(*key).cloned()));
            let events = events.collect();
            after.note(events);
        }
        let (mut observed, mut conflicts) = (BTreeMap::new(), BTreeMap::new());
        if !succeeded {
            for compare in &txn.when {
                match &compare.condition {
                    Condition::EntryTerm(_) | Condition::LeaseAlive(_) => {}
                    Condition::ScopeFree(owner) => {
                        conflicts.extend(self.conflicts(&compare.key, owner.as_ref()).map(|s| (s.path.clone(), s)));
                    }
                    Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => {
                        observed.extend(self.under(&compare.key).into_iter().map(|e| (e.key.clone(), e)));
                    }
                    _ => observed.extend(self.entries.get(&compare.key).map(|e| (e.key.clone(), e.clone()))),
                }
            }
        }
        *self = after;
        Outcome::Txn(TxnResult {
            revision: self.revision,
            succeeded,
            results,
            observed: observed.into_values().collect(),
            conflicts: conflicts.into_values().collect(),
            reduced: None,
        })
    }

    fn holds(&self, term: u64, compare: &Compare) -> bool {
        let entry = self.entries.get(&compare.key);
        match &compare.condition {
            Condition::Absent => entry.is_none(),
            Condition::ModRevision(r) => entry.is_some_and(|e| e.mod_revision == *r),
            Condition::CreateRevision(r) => entry.is_some_and(|e| e.create_revision == *r),
            Condition::Version(v) => entry.is_some_and(|e| e.version == *v),
            Condition::Value(v) => entry.is_some_and(|e| e.value == *v),
            Condition::PrefixEmpty => self.under(&compare.key).is_empty(),
            Condition::PrefixUnchangedSince(r) => self.under(&compare.key).iter().all(|e| e.mod_revision <= *r),
            Condition::EntryTerm(t) => *t == term,
            Condition::LeaseAlive(id) => self.leases.contains_key(id),
            Condition::ScopeFree(owner) => {
                let alive = match owner {
                    Some(ScopeOwner::Lease(id)) => self.leases.contains_key(id),
                    _ => true,
                };
                alive && self.conflicts(&compare.key, owner.as_ref()).next().is_none()
            }
        }
    }

    /// Section 6: equal, an ancestor or a descendant, of another owner.
    fn conflicts(&self, path: &str, owner: Option<&ScopeOwner>) -> impl Iterator<Item = Scope> {
        let parts = |path: &str| path.split('/').filter(|p| !p.is_empty()).map(str::to_owned).collect::<Vec<_>>();
        let mine = parts(path);
        let related = |other: &str| parts(other).iter().zip(&mine).all(|(a, b)| a == b);
        let found: Vec<Scope> =
            self.scopes.values().filter(|s| related(&s.path) && owner != Some(&s.owner)).cloned().collect();
        found.into_iter()
    }

    fn op(&mut self, op: &Op, next: Revision, proposed_unix_ms: u64, changed: &mut bool) -> OpResult {
        match op {
            Op::Put { key, value, return_previous, lease } => {
                *changed = true;
                let previous = self.entries.get(key).cloned();
                let entry = KeyValue {
                    key: key.clone(),
                    value: value.clone(),
                    version: previous.as_ref().map_or(1, |e| e.version + 1),
                    create_revision: previous.as_ref().map_or(next, |e| e.create_revision),
                    mod_revision: next,
                    lease: *lease,
                };
                self.entries.insert(key.clone(), entry);
                OpResult::Put { previous: previous.filter(|_| *return_previous) }
            }
            Op::Delete { key, return_previous } => {
                let previous = self.entries.remove(key);
                *changed |= previous.is_some();
                OpResult::Delete { deleted: previous.is_some(), previous: previous.filter(|_| *return_previous) }
            }
            Op::Get { key } => OpResult::Get { entry: self.entries.get(key).cloned() },
            Op::List { prefix, limit } => {
                let all = self.under(prefix);
                let entries: Vec<KeyValue> = all.iter().take(*limit as usize).cloned().collect();
                OpResult::List { more: entries.len() < all.len(), entries }
            }
            Op::AcquireScope { path, owner } => {
                if let Some(held) = self.scopes.get(path) {
                    return OpResult::AcquireScope { fence: held.fence };
                }
                *changed = true;
                let (owner, path) = (owner.clone(), path.clone());
                let scope = Scope { path: path.clone(), owner, fence: next, acquired_unix_ms: proposed_unix_ms };
                self.scopes.insert(path, scope);
                OpResult::AcquireScope { fence: next }
            }
            Op::ReleaseScope { path, owner } => {
                let released = self.scopes.get(path).is_some_and(|held| held.owner == *owner);
                if released {
                    self.scopes.remove(path);
                }
                *changed |= released;
                OpResult::ReleaseScope { released }
            }
        }
    }
}

/// Section 4: results over 4 KiB are kept as branch, revision and mod_revisions (256 of them). That is all there is here: the
/// random runs do not come to the 64 MiB beyond which everything is kept without those, which has a test of its own.
fn kept(outcome: &Outcome) -> Outcome {
    let Outcome::Txn(result) = outcome else { return outcome.clone() };
    if v1::Outcome::from(outcome.clone()).encoded_len() <= 4096 {
        return outcome.clone();
    }
    let mut entries: Vec<&KeyValue> = Vec::new();
    for one in &result.results {
        match one {
            OpResult::Put { previous } | OpResult::Delete { previous, .. } => entries.extend(previous),
            OpResult::Get { entry } => entries.extend(entry),
            OpResult::List { entries: listed, .. } => entries.extend(listed),
            OpResult::AcquireScope { .. } | OpResult::ReleaseScope { .. } => {}
        }
    }
    entries.extend(&result.observed);
    let mod_revisions = entries.iter().map(|e| e.mod_revision).take(256).collect();
    Outcome::Txn(TxnResult {
        revision: result.revision,
        succeeded: result.succeeded,
        reduced: Some(Reduced { mod_revisions }),
        ..TxnResult::default()
    })
}
