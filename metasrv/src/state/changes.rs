//! The recent changes, for watchers (semantics, section 7).
//!
//! They are part of the state: trimmed while applying, so that all peers keep the same.

use std::sync::Arc;

use imbl::Vector;
use lake_proto::kv::{KeyValue, Revision};

use super::entry::Entry;
use super::hash::{self, StateHash};

/// Changes of keys that are kept.
pub const MAX_CHANGES: usize = 100_000;
/// Bytes of keys and values in the changes that are kept.
pub const MAX_CHANGE_BYTES: u64 = 64 << 20;

/// What one command did to the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub revision: Revision,
    events: Events,
}

/// Nearly every command changes one key, which takes no piece of memory of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Events {
    One(Event),
    /// Any other number.
    Many(Arc<[Event]>),
}

impl From<Vec<Event>> for Events {
    fn from(events: Vec<Event>) -> Self {
        match <[Event; 1]>::try_from(events) {
            Ok([event]) => Events::One(event),
            Err(events) => Events::Many(events.into()),
        }
    }
}

/// What a command left under one key.
#[derive(Debug, Clone)]
pub struct Event(Left);

#[derive(Debug, Clone)]
enum Left {
    /// Shared with the map for as long as it is current.
    Entry(Entry),
    /// The key was deleted.
    Nothing(Arc<str>),
}

impl Event {
    pub(super) fn put(entry: Entry) -> Self {
        Self(Left::Entry(entry))
    }

    pub(super) fn deleted(key: Arc<str>) -> Self {
        Self(Left::Nothing(key))
    }

    /// The key that was changed.
    pub fn key(&self) -> &str {
        match &self.0 {
            Left::Entry(entry) => entry.key(),
            Left::Nothing(key) => key,
        }
    }

    /// Whether the key is there since.
    pub(super) fn is_put(&self) -> bool {
        matches!(self.0, Left::Entry(_))
    }

    fn entry(&self) -> Option<&Entry> {
        match &self.0 {
            Left::Entry(entry) => Some(entry),
            Left::Nothing(_) => None,
        }
    }

    /// What the key holds since; `None` if it was deleted.
    pub fn key_value(&self) -> Option<KeyValue> {
        self.entry().map(Entry::key_value)
    }

    /// Bytes of key and value.
    pub fn size(&self) -> u64 {
        self.entry().map_or(self.key().len() as u64, Entry::size)
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Left::Entry(one), Left::Entry(other)) => one.is_same(other),
            (Left::Nothing(one), Left::Nothing(other)) => one == other,
            _ => false,
        }
    }
}

impl Eq for Event {}

impl Change {
    /// One event per key, in key order.
    pub fn events(&self) -> &[Event] {
        match &self.events {
            Events::One(event) => std::slice::from_ref(event),
            Events::Many(events) => events,
        }
    }

    fn key_bytes(&self) -> u64 {
        self.events().iter().map(|event| event.key().len() as u64).sum()
    }

    fn size(&self) -> u64 {
        self.events().iter().map(Event::size).sum()
    }
}

/// The changes asked for are no longer kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compacted {
    /// The first revision that can be watched from.
    pub oldest: Revision,
}

/// The changes that are kept, oldest first. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    queue: Vector<Change>,
    events: usize,
    bytes: u64,
    /// Bytes of the keys alone.
    key_bytes: u64,
    /// Changes up to this revision are gone.
    compacted: Revision,
}

impl Changes {
    /// The first revision that can be watched from.
    pub fn oldest(&self) -> Revision {
        self.compacted + 1
    }

    /// The changes from a revision on, oldest first.
    ///
    /// # Errors
    /// When some of them are no longer kept.
    pub fn from(&self, revision: Revision) -> Result<impl Iterator<Item = &Change>, Compacted> {
        if revision <= self.compacted {
            return Err(Compacted { oldest: self.oldest() });
        }
        let at = self.queue.binary_search_by_key(&revision, |change| change.revision).unwrap_or_else(|at| at);
        Ok(self.queue.focus().narrow(at..).into_iter())
    }

    /// How many changes of keys are kept, the bytes of their keys and values, and of the keys alone.
    pub(super) fn extent(&self) -> (usize, u64, u64) {
        (self.events, self.bytes, self.key_bytes)
    }

    /// Every change that is kept.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Change> {
        self.queue.iter()
    }

    /// The newest change's revision; where there is none, that of the newest one gone.
    pub(super) fn last_revision(&self) -> Revision {
        self.queue.last().map_or(self.compacted, |change| change.revision)
    }

    pub(super) fn compacted(&self) -> Revision {
        self.compacted
    }

    pub(super) fn push(&mut self, revision: Revision, events: Vec<Event>, hash: &mut StateHash) {
        if events.is_empty() {
            return;
        }
        let change = Change { revision, events: events.into() };
        self.events += change.events().len();
        self.bytes += change.size();
        self.key_bytes += change.key_bytes();
        each_item(&change, |item| hash.add(item));
        self.queue.push_back(change);
        while self.events > MAX_CHANGES || self.bytes > MAX_CHANGE_BYTES {
            let Some(oldest) = self.queue.pop_front() else { break };
            self.events -= oldest.events().len();
            self.bytes -= oldest.size();
            self.key_bytes -= oldest.key_bytes();
            self.compacted = oldest.revision;
            each_item(&oldest, |item| hash.remove(item));
        }
    }

    /// Starts a restored state: changes up to this revision are gone.
    pub(super) fn restored(compacted: Revision) -> Self {
        Self { compacted, ..Self::default() }
    }
}

fn each_item(change: &Change, mut each: impl FnMut(hash::Item)) {
    for event in change.events() {
        each(hash::event(change.revision, event.key(), event.entry()));
    }
}
