//! A state taken apart into what a snapshot holds, and put together again.
//!
//! Parts come in a fixed order: leases, entries, scopes, sessions, quotas, events, peers. What can be worked out again (which
//! keys hang on a lease, how much lies under a prefix, the hash) is not kept; the hash that a snapshot names is
//! compared with the one worked out.

use std::collections::VecDeque;

use bytes::Bytes;
use imbl::OrdMap;
use lake_proto::coordination::{LeaseId, Scope, ScopeOwner, SessionId};
use lake_proto::kv::{KeyValue, Revision};

use super::changes::{Changes, Event};
use super::entry::{Entry, Scratch};
use super::roster::KnownPeer;
use super::sessions::{self, Session};
use super::{State, compact};

/// Bytes of outcomes in one part of a session.
const SESSION_PART_BYTES: usize = 512 << 10;
/// How many entries of those that wait are held back: more than a leaf of the map has room for.
const HELD_BACK: usize = 128;

/// One part of a state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    Lease {
        id: LeaseId,
        ttl_ms: u64,
        holder: String,
    },
    Entry(KeyValue),
    Scope(Scope),
    /// A session with large outcomes takes several.
    Session {
        id: SessionId,
        ttl_ms: u64,
        holder: String,
        lowest: u64,
        kept: Vec<(u64, Bytes)>,
    },
    Quota {
        prefix: String,
        bytes: u64,
    },
    Event {
        revision: Revision,
        key: String,
        entry: Option<KeyValue>,
    },
    Peer {
        id: u64,
        incarnation: String,
        removed: bool,
    },
}

/// An entry where it lies, in a state or in what a snapshot was read into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryRef<'a> {
    pub key: &'a str,
    pub value: &'a [u8],
    pub version: u64,
    pub create_revision: Revision,
    pub mod_revision: Revision,
    pub lease: Option<LeaseId>,
}

impl<'a> EntryRef<'a> {
    /// That of a whole one.
    pub fn of(entry: &'a KeyValue) -> Self {
        let KeyValue { key, value, version, create_revision, mod_revision, lease } = entry;
        let (version, create_revision, mod_revision, lease) = (*version, *create_revision, *mod_revision, *lease);
        Self { key, value, version, create_revision, mod_revision, lease }
    }
}

/// One part of a state, or an entry of it that was not taken out.
#[derive(Debug)]
pub enum Piece<'a> {
    Entry(EntryRef<'a>),
    Part(Part),
}

/// The numbers that are not in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    pub revision: Revision,
    pub feature_level: u32,
    pub compacted: Revision,
}

impl State {
    /// The numbers that are not in parts.
    pub fn numbers(&self) -> Numbers {
        Numbers { revision: self.revision, feature_level: self.feature_level, compacted: self.changes.compacted() }
    }

    /// Everything else.
    pub fn parts(&self) -> impl Iterator<Item = Part> + '_ {
        let [before, behind] = self.parts_around_entries();
        before.chain(self.iter().map(Part::Entry)).chain(behind)
    }

    /// The same, with the entries left where they are.
    pub fn pieces(&self) -> impl Iterator<Item = Piece<'_>> + '_ {
        let [before, behind] = self.parts_around_entries();
        let entries = self.entries.0.iter().map(|entry| Piece::Entry(entry.entry_ref()));
        before.map(Piece::Part).chain(entries).chain(behind.map(Piece::Part))
    }

    /// What comes before the entries, and what comes behind them.
    fn parts_around_entries(&self) -> [Box<dyn Iterator<Item = Part> + Send + '_>; 2] {
        let leases = self.leases.iter().map(|(id, lease)| Part::Lease {
            id: *id,
            ttl_ms: lease.ttl_ms,
            holder: lease.holder.to_string(),
        });
        let scopes = self.scopes.list("", "").map(Part::Scope);
        let sessions = self.sessions.iter().flat_map(|(id, session)| session_parts(id, session));
        let quotas =
            self.quotas.iter().map(|(prefix, q)| Part::Quota { prefix: prefix.to_owned(), bytes: q.limit_bytes });
        let events = self.changes.iter().flat_map(|change| {
            change.events().iter().map(|event| Part::Event {
                revision: change.revision,
                key: event.key().to_owned(),
                entry: event.key_value(),
            })
        });
        let peers = self.known_peers().map(|(id, peer)| Part::Peer {
            id,
            incarnation: peer.incarnation.to_string(),
            removed: peer.removed,
        });
        [Box::new(leases), Box::new(scopes.chain(sessions).chain(quotas).chain(events).chain(peers))]
    }
}

/// What a part takes beside its texts and values: its frame, and numbers.
const PART_BYTES: u64 = 64;

impl State {
    /// About how many bytes the map alone takes when it is written down. At no cost.
    pub fn map_written_bytes(&self) -> u64 {
        self.bytes + self.len() as u64 * PART_BYTES
    }

    /// About how many bytes all parts take when they are written down, rather more than less. At no cost, however many they
    /// are: it is asked where commands are applied.
    pub fn written_bytes(&self) -> u64 {
        let leases = self.holder_bytes + self.leases.len() as u64 * PART_BYTES;
        let scopes = self.scopes.bytes() + self.scopes.len() as u64 * PART_BYTES;
        let (kept, kept_bytes, holder_bytes) = self.sessions.extent();
        let sessions = kept_bytes + holder_bytes + (self.sessions.len() + kept) as u64 * PART_BYTES;
        let quotas: u64 = self.quotas.iter().map(|(prefix, _)| prefix.len() as u64 + PART_BYTES).sum();
        // An event names its key twice.
        let (events, event_bytes, key_bytes) = self.changes.extent();
        let events = event_bytes + key_bytes + events as u64 * 2 * PART_BYTES;
        let peers: u64 = self.known_peers().map(|(_, peer)| peer.incarnation.len() as u64 + PART_BYTES).sum();
        self.map_written_bytes() + leases + scopes + sessions + quotas + events + peers
    }

    /// The same, counted part by part.
    #[cfg(test)]
    pub(super) fn written_bytes_counted(&self) -> u64 {
        let leases = self.leases.values().map(|lease| lease.holder.len() as u64 + PART_BYTES);
        let scopes = self.scopes.list("", "").map(|scope| {
            let owner = match &scope.owner {
                ScopeOwner::Lease(_) => 0,
                ScopeOwner::Procedure(id) => id.len(),
            };
            (scope.path.len() + owner) as u64 + PART_BYTES
        });
        let sessions = self.sessions.iter().map(|(_, session)| {
            let kept = session.kept.values().map(|outcome| outcome.len() as u64 + PART_BYTES);
            session.holder.len() as u64 + kept.sum::<u64>() + PART_BYTES
        });
        let quotas = self.quotas.iter().map(|(prefix, _)| prefix.len() as u64 + PART_BYTES);
        // An event names its key twice.
        let events = self.changes.iter().flat_map(|change| change.events());
        let events = events.map(|event| event.size() + event.key().len() as u64 + 2 * PART_BYTES);
        let peers = self.known_peers().map(|(_, peer)| peer.incarnation.len() as u64 + PART_BYTES);
        let entries = self.map_written_bytes();
        let rest = leases.chain(scopes).chain(sessions).chain(quotas).chain(events).chain(peers);
        entries + rest.sum::<u64>()
    }
}

fn session_parts(id: SessionId, session: &Session) -> Vec<Part> {
    let part = |kept| Part::Session {
        id,
        ttl_ms: session.ttl_ms,
        holder: session.holder.to_string(),
        lowest: session.lowest,
        kept,
    };
    let mut parts = Vec::new();
    let mut kept = Vec::new();
    let mut bytes = 0;
    for (sequence, outcome) in &session.kept {
        bytes += outcome.len();
        kept.push((*sequence, outcome.clone()));
        if bytes >= SESSION_PART_BYTES {
            parts.push(part(std::mem::take(&mut kept)));
            bytes = 0;
        }
    }
    if parts.is_empty() || !kept.is_empty() {
        parts.push(part(kept));
    }
    parts
}

/// Puts a [`State`] together.
#[derive(Debug)]
pub struct StateBuilder {
    state: State,
    /// The change whose events are coming in.
    change: Option<(Revision, Vec<Event>)>,
    /// The entry before.
    last: Option<Entry>,
    /// Every other entry, until those around it are in the map. A leaf that is full is split in the middle, and of entries that
    /// come in order the left half gets no more: these are what fills it.
    waiting: VecDeque<Entry>,
    /// Whether the next entry is one of those.
    waits: bool,
    scratch: Scratch,
}

impl StateBuilder {
    /// Begins with the numbers.
    pub fn new(numbers: Numbers) -> Self {
        let state = State {
            revision: numbers.revision,
            feature_level: numbers.feature_level,
            changes: Changes::restored(numbers.compacted),
            ..State::bare()
        };
        let (waiting, scratch) = (VecDeque::new(), Scratch::default());
        Self { state, change: None, last: None, waiting, waits: false, scratch }
    }

    /// Adds a part.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn add(&mut self, part: Part) -> Result<(), &'static str> {
        if !matches!(part, Part::Entry(_)) {
            self.settle();
        }
        let state = &mut self.state;
        match part {
            Part::Entry(entry) => self.add_entry(EntryRef::of(&entry))?,
            // Ids are revisions, and the first is 1.
            Part::Lease { id: 0, .. } | Part::Session { id: 0, .. } => {
                return Err("a lease or session has the id 0");
            }
            Part::Lease { id, ttl_ms, holder } => {
                state.add_lease(id, ttl_ms, &holder);
            }
            Part::Scope(scope) => {
                if !state.can_own(Some(&scope.owner)) {
                    return Err("a scope belongs to a lease that is not there");
                }
                if state.scopes.is_held(&scope.path) {
                    return Err("a scope is there twice");
                }
                state.scopes.acquire(&scope.path, &scope.owner, scope.fence, scope.acquired_unix_ms, &mut state.hash);
                if matches!(scope.owner, ScopeOwner::Lease(_)) {
                    state.note_scope(&scope.owner, |scopes| drop(scopes.insert(scope.path.as_str().into())));
                }
            }
            Part::Session { id, ttl_ms, holder, lowest, kept } => {
                if !kept.iter().all(|(_, outcome)| sessions::is_outcome(outcome)) {
                    return Err("what a session keeps is no outcome");
                }
                let kept: OrdMap<u64, Bytes> = kept.into_iter().map(|(sequence, o)| (sequence, compact(&o))).collect();
                let session = Session { ttl_ms, holder: holder.into(), lowest, kept };
                state.sessions.restore(id, session, &mut state.hash);
            }
            Part::Quota { prefix, bytes } => {
                let used = match prefix.as_str() {
                    "" => state.bytes,
                    prefix => state.under(prefix, None).map(Entry::size).sum(),
                };
                state.quotas.set(&prefix, Some(bytes), used, &mut state.hash);
            }
            Part::Event { revision, key, entry } => {
                if entry.as_ref().is_some_and(|entry| entry.key != key) {
                    return Err("a change is of another key than the entry it left");
                }
                if self.change.as_ref().is_some_and(|(open, _)| *open != revision) {
                    self.close_change();
                }
                let before = match &self.change {
                    Some((_, events)) => events.last().is_none_or(|last| last.key() < &*key),
                    None => self.state.changes.last_revision() < revision,
                };
                if !before || revision > self.state.revision {
                    return Err("its changes are out of order");
                }
                let event = shared_event(&self.state, &mut self.scratch, &key, entry);
                self.change.get_or_insert_with(|| (revision, Vec::new())).1.push(event);
            }
            Part::Peer { id, incarnation, removed } => {
                state.restore_peer(id, KnownPeer { incarnation: incarnation.into(), removed });
            }
        }
        Ok(())
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn add_entry(&mut self, entry: EntryRef<'_>) -> Result<(), &'static str> {
        if self.last.as_ref().is_some_and(|last| last.key_bytes() >= entry.key.as_bytes()) {
            return Err("its keys are out of order");
        }
        if entry.lease.is_some_and(|id| !self.state.has_lease(id)) {
            return Err("a key hangs on a lease that is not there");
        }
        let entry = self.scratch.entry_of(entry);
        self.last = Some(entry.clone());
        if self.waits {
            self.waiting.push_back(entry);
            if self.waiting.len() > HELD_BACK
                && let Some(next) = self.waiting.pop_front()
            {
                self.state.insert(next);
            }
        } else {
            self.state.insert(entry);
        }
        self.waits = !self.waits;
        Ok(())
    }

    /// Puts in what waits: whatever comes next may look at all entries.
    fn settle(&mut self) {
        for entry in self.waiting.drain(..) {
            self.state.insert(entry);
        }
    }

    fn close_change(&mut self) {
        if let Some((revision, events)) = self.change.take() {
            self.state.changes.push(revision, events, &mut self.state.hash);
        }
    }

    /// The finished state.
    pub fn build(mut self) -> State {
        self.settle();
        self.close_change();
        self.state
    }
}

/// An event shares its entry with the map for as long as that is current.
fn shared_event(state: &State, scratch: &mut Scratch, key: &str, entry: Option<KeyValue>) -> Event {
    let Some(entry) = entry else { return Event::deleted(key.into()) };
    match state.entries.get(key) {
        Some(current) if current.mod_revision() == entry.mod_revision => Event::put(current.clone()),
        _ => Event::put(scratch.entry_of(EntryRef::of(&entry))),
    }
}
