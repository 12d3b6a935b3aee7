//! Commands: each is checked against the state as it was before, and then done at one revision, or not at all.
//!
//! A transaction's compares come first, then one branch. What an operation needs (a live lease, a free scope) its
//! transaction has compared, so that an operation cannot fail; limits on numbers and bytes are looked at before the branch
//! begins.
//!
//! Bounds on what an answer may hold are part of the function, since every peer must compute the same: the entries
//! observed by failed compares and those of list operations are cut at [`MAX_ANSWER_BYTES`] over the whole answer, and
//! lists say that there is more; a branch whose other operations would return more than that is refused. So are bounds on the
//! work: whatever a command does, all others wait for it. Compares look at [`MAX_COMPARED`] things at most, and a lease takes
//! [`MAX_HANGING`] keys and scopes with it. Only a new quota on a prefix goes through all that lies under it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use imbl::OrdSet;
use lake_proto::coordination::{LeaseId, Scope, ScopeOwner};
use lake_proto::kv::{Compare, Condition, KeyValue, Op, OpResult, Revision, Txn, TxnResult};
use lake_proto::limits::{MAX_IDS, MAX_PAGE_ENTRIES, MAX_TXN_BYTES};

use super::changes::{Change, Event};
use super::command::{self, Action, Command, Outcome, Refusal};
use super::entry::{Entry, Numbers, Scratch};
use super::quotas::MAX_QUOTAS;
use super::scopes::{Acquired, MAX_SCOPES};
use super::sessions::{Begin, MAX_SESSIONS};
use super::{MAX_COMPARED, MAX_HANGING, MAX_LEASES, MAX_LIST_BYTES, State, hash};
use crate::planted::{self, Bug};

/// Observed and listed entries of one answer hold about this many bytes at most.
const MAX_ANSWER_BYTES: usize = MAX_TXN_BYTES;

impl State {
    /// Does what a log entry of `term` asks.
    pub fn apply(&mut self, term: u64, command: &Command) -> Outcome {
        let Some(stamp) = command.stamp else { return self.act(term, command) };
        match self.sessions.begin(stamp, &mut self.hash) {
            Begin::Run => {}
            Begin::Repeated(_) if planted::has(Bug::AppliedTwice) => {}
            Begin::Repeated(outcome) => return outcome,
            Begin::Refused(refusal) => return Outcome::Refused(refusal),
        }
        let outcome = self.act(term, command);
        self.sessions.keep(stamp, &outcome, &mut self.hash);
        outcome
    }

    fn act(&mut self, term: u64, command: &Command) -> Outcome {
        let done = match &command.action {
            Action::Txn(txn) => self.transact(term, command.proposed_unix_ms, txn).map(Outcome::Txn),
            Action::GrantLease { ttl_ms, holder } => self.grant(*ttl_ms, holder),
            Action::RevokeLease { lease } => Ok(self.end_leases(&[*lease])),
            Action::ExpireLeases { leases, term: proposed } if *proposed == term => Ok(self.end_leases(leases)),
            Action::OpenSession { ttl_ms, holder } => self.open_session(*ttl_ms, holder),
            Action::CloseSession { session } => Ok(self.end_sessions(&[*session])),
            Action::ExpireSessions { sessions, term: proposed } if *proposed == term => Ok(self.end_sessions(sessions)),
            Action::SetFeatureLevel { level, term: proposed } if *proposed == term => self.set_feature_level(*level),
            Action::ExpireLeases { .. } | Action::ExpireSessions { .. } | Action::SetFeatureLevel { .. } => {
                Ok(self.ended(false))
            }
            Action::SetQuota { prefix, bytes } => self.set_quota(prefix, *bytes),
        };
        done.unwrap_or_else(Outcome::Refused)
    }

    fn next_revision(&mut self) -> Revision {
        self.revision += 1;
        self.revision
    }

    // ---- leases, sessions, settings -------------------------------------------------------------------------------

    fn grant(&mut self, ttl_ms: u64, holder: &str) -> Result<Outcome, Refusal> {
        if self.leases.len() >= MAX_LEASES {
            return Err(Refusal::TooMany { what: command::LEASES, limit: MAX_LEASES as u64 });
        }
        let id = self.next_revision();
        self.add_lease(id, ttl_ms, holder);
        Ok(Outcome::Granted { id })
    }

    /// Ends those leases that there are, deletes the keys that hang on them and releases their scopes.
    fn end_leases(&mut self, ids: &[LeaseId]) -> Outcome {
        let mut deleted = BTreeSet::new();
        let mut existed = false;
        for id in ids {
            let Some(lease) = self.leases.remove(id) else { continue };
            existed = true;
            self.hash.remove(hash::lease(*id, lease.ttl_ms, &lease.holder));
            self.holder_bytes -= lease.holder.len() as u64;
            for path in &lease.scopes {
                self.scopes.release(path, &ScopeOwner::Lease(*id), &mut self.hash);
            }
            for key in &lease.keys {
                self.remove(key);
                deleted.insert(key.clone());
            }
        }
        if existed {
            let revision = self.next_revision();
            let events = deleted.into_iter().map(Event::deleted).collect();
            self.changes.push(revision, events, &mut self.hash);
        }
        self.ended(existed)
    }

    fn open_session(&mut self, ttl_ms: u64, holder: &str) -> Result<Outcome, Refusal> {
        if self.sessions.len() >= MAX_SESSIONS {
            return Err(Refusal::TooMany { what: command::SESSIONS, limit: MAX_SESSIONS as u64 });
        }
        let id = self.next_revision();
        self.sessions.open(id, ttl_ms, holder, &mut self.hash);
        Ok(Outcome::Granted { id })
    }

    fn end_sessions(&mut self, ids: &[Revision]) -> Outcome {
        let mut existed = false;
        for id in ids {
            existed |= self.sessions.close(*id, &mut self.hash);
        }
        if existed {
            self.next_revision();
        }
        self.ended(existed)
    }

    fn ended(&self, existed: bool) -> Outcome {
        Outcome::Ended { revision: self.revision, existed }
    }

    fn set_feature_level(&mut self, level: u32) -> Result<Outcome, Refusal> {
        if level <= self.feature_level {
            return Err(Refusal::FeatureLevel { level: self.feature_level });
        }
        self.feature_level = level;
        Ok(Outcome::Set { revision: self.next_revision() })
    }

    fn set_quota(&mut self, prefix: &str, limit_bytes: Option<u64>) -> Result<Outcome, Refusal> {
        if limit_bytes.is_some() && !self.quotas.contains(prefix) && self.quotas.len() >= MAX_QUOTAS {
            return Err(Refusal::TooMany { what: command::QUOTAS, limit: MAX_QUOTAS as u64 });
        }
        // Only a prefix that has no limit yet is looked through.
        let used_bytes = match (prefix, self.quotas.used_bytes(prefix)) {
            ("", _) => self.bytes,
            (_, Some(known)) => known,
            (_, None) if limit_bytes.is_none() => 0,
            (prefix, None) => self.under(prefix, None).map(Entry::size).sum(),
        };
        self.quotas.set(prefix, limit_bytes, used_bytes, &mut self.hash);
        Ok(Outcome::Set { revision: self.next_revision() })
    }

    // ---- transactions -----------------------------------------------------------------------------------------

    fn transact(&mut self, term: u64, proposed_unix_ms: u64, txn: &Txn) -> Result<TxnResult, Refusal> {
        let mut looks = Looks { left: MAX_COMPARED, found: None };
        let succeeded = self.all_hold(term, &txn.when, &mut looks)?;
        // What is compared is most often what is put next.
        let found = looks.found.map(|(key, entry)| (key, entry.cloned()));
        let (observed, conflicts) =
            if succeeded { (Vec::new(), Vec::new()) } else { (self.observe(&txn.when), self.in_the_way(&txn.when)) };
        let ops = if succeeded { &txn.then } else { &txn.otherwise };
        self.check_limits(ops)?;

        let mut run = Run {
            next_revision: self.revision + 1,
            proposed_unix_ms,
            found,
            changed: false,
            events: Vec::new(),
            bytes_left: MAX_ANSWER_BYTES,
            scratch: Scratch::default(),
        };
        let results = ops.iter().map(|op| run.op(self, op)).collect();
        if run.changed {
            self.revision = run.next_revision;
            let events = run.events();
            self.changes.push(self.revision, events, &mut self.hash);
        }
        Ok(TxnResult { revision: self.revision, succeeded, results, observed, conflicts, reduced: None })
    }

    fn all_hold<'s, 't>(&'s self, term: u64, when: &'t [Compare], looks: &mut Looks<'s, 't>) -> Result<bool, Refusal> {
        for compare in when {
            if !self.holds(term, compare, looks)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn holds<'s, 't>(&'s self, term: u64, compare: &'t Compare, looks: &mut Looks<'s, 't>) -> Result<bool, Refusal> {
        let mut entry = || {
            let entry = self.entries.get(&compare.key);
            looks.found = Some((compare.key.as_str(), entry));
            entry
        };
        Ok(match &compare.condition {
            Condition::Absent => entry().is_none(),
            Condition::ModRevision(_) if planted::has(Bug::CasIgnored) => entry().is_some(),
            Condition::ModRevision(r) => entry().is_some_and(|e| e.mod_revision() == *r),
            Condition::CreateRevision(r) => entry().is_some_and(|e| e.numbers().create_revision == *r),
            Condition::Version(v) => entry().is_some_and(|e| e.numbers().version == *v),
            Condition::Value(v) => entry().is_some_and(|e| e.value() == *v),
            Condition::PrefixEmpty => self.under(&compare.key, None).next().is_none(),
            Condition::PrefixUnchangedSince(r) => self.unchanged_since(&compare.key, *r, looks)?,
            Condition::EntryTerm(t) => *t == term,
            Condition::LeaseAlive(_) if planted::has(Bug::LeaseOutlived) => true,
            Condition::LeaseAlive(id) => self.leases.contains_key(id),
            Condition::ScopeFree(owner) => {
                if !self.can_own(owner.as_ref()) {
                    return Ok(false);
                }
                for other in self.scopes.owners(&compare.key) {
                    looks.one()?;
                    if owner.as_ref() != Some(other) {
                        return Ok(false);
                    }
                }
                true
            }
        })
    }

    /// Whether no entry under a prefix is newer. Where the changes since are all kept, each that is newer was written by one of
    /// them: the entries and the changes are gone through side by side, and the shorter way decides.
    fn unchanged_since(&self, prefix: &str, since: Revision, looks: &mut Looks<'_, '_>) -> Result<bool, Refusal> {
        let is_newer = |entry: &Entry| entry.mod_revision() > since;
        let mut entries = self.under(prefix, None);
        let kept = self.changes.from(since.saturating_add(1)).ok();
        let mut events = kept.map(|changes| changes.flat_map(Change::events));
        loop {
            looks.one()?;
            match entries.next() {
                None => return Ok(true),
                Some(entry) if is_newer(entry) => return Ok(false),
                Some(_) => {}
            }
            if let Some(events) = &mut events {
                match events.next() {
                    None => return Ok(true),
                    Some(event) if !event.key().starts_with(prefix) => {}
                    // It may have been deleted since.
                    Some(event) if self.entries.get(event.key()).is_some_and(is_newer) => return Ok(false),
                    Some(_) => {}
                }
            }
        }
    }

    fn hangs(&self, id: LeaseId, key: &str) -> bool {
        self.leases.get(&id).is_some_and(|held| held.keys.contains(key))
    }

    pub(super) fn can_own(&self, owner: Option<&ScopeOwner>) -> bool {
        match owner {
            Some(ScopeOwner::Lease(id)) => self.leases.contains_key(id),
            Some(ScopeOwner::Procedure(_)) | None => true,
        }
    }

    /// The scopes that made compares fail, each once, in order.
    fn in_the_way(&self, when: &[Compare]) -> Vec<Scope> {
        let mut found = BTreeMap::new();
        let mut left = MAX_COMPARED;
        for compare in when {
            if let Condition::ScopeFree(owner) = &compare.condition {
                for scope in self.scopes.conflicts(&compare.key, owner.as_ref(), &mut left) {
                    if found.len() >= MAX_IDS {
                        break;
                    }
                    found.insert(scope.path.clone(), scope);
                }
            }
        }
        found.into_values().collect()
    }

    /// The entries that exist among those the compares name, each once, in key order.
    fn observe(&self, when: &[Compare]) -> Vec<KeyValue> {
        let mut seen: BTreeMap<&str, &Entry> = BTreeMap::new();
        let mut bytes = 0;
        let mut left = MAX_COMPARED;
        for compare in when {
            match compare.condition {
                Condition::EntryTerm(_) | Condition::LeaseAlive(_) | Condition::ScopeFree(_) => {}
                Condition::PrefixEmpty | Condition::PrefixUnchangedSince(_) => {
                    for entry in self.under(&compare.key, None).take(MAX_PAGE_ENTRIES.min(left)) {
                        if bytes >= MAX_ANSWER_BYTES {
                            break;
                        }
                        left -= 1;
                        if seen.insert(entry.key(), entry).is_none() {
                            bytes += entry.size() as usize;
                        }
                    }
                }
                _ => {
                    if bytes < MAX_ANSWER_BYTES
                        && let Some(entry) = self.entries.get(&compare.key)
                        && seen.insert(entry.key(), entry).is_none()
                    {
                        bytes += entry.size() as usize;
                    }
                }
            }
        }
        seen.into_values().map(Entry::key_value).collect()
    }

    /// Refuses a branch that would return too much, leave more than a quota, too many scopes, or too much on one lease.
    fn check_limits(&self, ops: &[Op]) -> Result<(), Refusal> {
        // What each key will hold, after the last operation on it.
        let mut sizes: BTreeMap<&str, u64> = BTreeMap::new();
        let mut scopes = BTreeSet::new();
        // What comes to hang on leases. What a branch takes away makes room only for the next one.
        let mut hanging: BTreeMap<LeaseId, BTreeSet<(bool, &str)>> = BTreeMap::new();
        let mut returned = 0;
        for op in ops {
            let returns = match op {
                Op::Get { .. } => true,
                Op::Put { return_previous, .. } | Op::Delete { return_previous, .. } => *return_previous,
                Op::List { .. } | Op::AcquireScope { .. } | Op::ReleaseScope { .. } => false,
            };
            if returns {
                let now = || self.entries.get(op.key()).map_or(0, Entry::size);
                returned += sizes.get(op.key()).copied().unwrap_or_else(now);
            }
            match op {
                Op::Put { key, lease: Some(id), .. } if !self.hangs(*id, key) => {
                    hanging.entry(*id).or_default().insert((false, key.as_str()));
                }
                Op::AcquireScope { path, owner: ScopeOwner::Lease(id) } if !self.scopes.is_held(path) => {
                    hanging.entry(*id).or_default().insert((true, path.as_str()));
                }
                _ => {}
            }
            match op {
                Op::Put { key, value, .. } => {
                    sizes.insert(key, (key.len() + value.len()) as u64);
                }
                Op::Delete { key, .. } => {
                    sizes.insert(key, 0);
                }
                Op::AcquireScope { path, .. } if !self.scopes.is_held(path) => {
                    scopes.insert(path.as_str());
                }
                _ => {}
            }
        }
        if returned > MAX_ANSWER_BYTES as u64 {
            return Err(Refusal::AnswerTooLarge { bytes: returned });
        }
        if !scopes.is_empty() && self.scopes.len() + scopes.len() > MAX_SCOPES {
            return Err(Refusal::TooMany { what: command::SCOPES, limit: MAX_SCOPES as u64 });
        }
        if hanging.iter().any(|(id, more)| self.lease_hanging(*id) + more.len() > MAX_HANGING) {
            return Err(Refusal::TooMany { what: command::HANGING, limit: MAX_HANGING as u64 });
        }
        let growth = sizes.iter().map(|(key, size)| {
            let now = self.entries.get(key).map_or(0, Entry::size);
            (*key, *size as i64 - now as i64)
        });
        self.quotas.check(sizes.values().sum(), growth)
    }
}

/// What the compares of one transaction may still look at, and what they have seen.
struct Looks<'s, 't> {
    left: usize,
    /// The last key that was looked up, and what is there.
    found: Option<(&'t str, Option<&'s Entry>)>,
}

impl Looks<'_, '_> {
    fn one(&mut self) -> Result<(), Refusal> {
        let left = self.left.checked_sub(1).ok_or(Refusal::ComparesTooMuch { limit: MAX_COMPARED as u64 })?;
        self.left = left;
        Ok(())
    }
}

/// One branch under way: each operation sees what those before it did.
struct Run<'t> {
    next_revision: Revision,
    proposed_unix_ms: u64,
    /// What is known to be under a key before the first operation.
    found: Option<(&'t str, Option<Entry>)>,
    changed: bool,
    /// What each write left, in order, and whether its key was there before.
    events: Vec<(Event, bool)>,
    bytes_left: usize,
    scratch: Scratch,
}

impl Run<'_> {
    fn op(&mut self, state: &mut State, op: &Op) -> OpResult {
        let found = self.found.take();
        match op {
            Op::Put { key, value, return_previous, lease } => {
                self.changed = true;
                let previous = match found {
                    Some((of, entry)) if of == key.as_str() => entry,
                    _ => state.entries.get(key).cloned(),
                };
                let before = previous.as_ref().map(Entry::numbers);
                let numbers = Numbers {
                    version: before.map_or(1, |b| b.version + 1),
                    create_revision: before.map_or(self.next_revision, |b| b.create_revision),
                    mod_revision: self.next_revision,
                    lease: *lease,
                };
                let entry = self.scratch.entry(key, value, numbers);
                self.events.push((Event::put(entry.clone()), previous.is_some()));
                state.insert(entry);
                OpResult::Put { previous: previous.filter(|_| *return_previous).map(|p| p.key_value()) }
            }
            Op::Delete { key, return_previous } => {
                let previous = state.remove(key);
                if previous.is_some() {
                    self.changed = true;
                    self.events.push((Event::deleted(Arc::from(key.as_str())), true));
                }
                let deleted = previous.is_some();
                let previous = previous.filter(|_| *return_previous).map(|p| p.key_value());
                OpResult::Delete { deleted, previous }
            }
            Op::Get { key } => OpResult::Get { entry: state.get(key) },
            Op::List { prefix, limit } => {
                let listing = state.list(prefix, None, *limit as usize, MAX_LIST_BYTES.min(self.bytes_left));
                let bytes: usize = listing.entries.iter().map(|e| e.key.len() + e.value.len()).sum();
                self.bytes_left = self.bytes_left.saturating_sub(bytes);
                OpResult::List { entries: listing.entries, more: listing.more }
            }
            Op::AcquireScope { path, owner } => {
                let (fence, at) = (self.next_revision, self.proposed_unix_ms);
                match state.scopes.acquire(path, owner, fence, at, &mut state.hash) {
                    Acquired::Already(fence) => OpResult::AcquireScope { fence },
                    Acquired::New => {
                        self.changed = true;
                        state.note_scope(owner, |scopes| drop(scopes.insert(path.as_str().into())));
                        OpResult::AcquireScope { fence }
                    }
                }
            }
            Op::ReleaseScope { path, owner } => {
                let released = state.scopes.release(path, owner, &mut state.hash);
                if released {
                    self.changed = true;
                    state.note_scope(owner, |scopes| drop(scopes.remove(path.as_str())));
                }
                OpResult::ReleaseScope { released }
            }
        }
    }

    /// What the branch has changed, one event per key, in key order: what its last write left. A key that was not there
    /// before and is not there now was not changed.
    fn events(mut self) -> Vec<Event> {
        // Stable: writes of one key stay in order.
        self.events.sort_by(|(one, _), (other, _)| one.key().cmp(other.key()));
        let mut left: Vec<(Event, bool)> = Vec::with_capacity(self.events.len());
        for (event, was_there) in self.events {
            match left.last_mut() {
                Some((last, _)) if last.key() == event.key() => *last = event,
                _ => left.push((event, was_there)),
            }
        }
        left.into_iter().filter(|(event, was_there)| *was_there || event.is_put()).map(|(event, _)| event).collect()
    }
}

impl State {
    /// Keeps a lease's own list of its scopes.
    pub(super) fn note_scope(&mut self, owner: &ScopeOwner, note: impl FnOnce(&mut OrdSet<Arc<str>>)) {
        if let ScopeOwner::Lease(id) = owner
            && let Some(lease) = self.leases.get_mut(id)
        {
            note(&mut lease.scopes);
        }
    }
}
