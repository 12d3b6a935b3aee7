//! The replicated map as a pure value (semantics, sections 1 and 2).
//!
//! A [`State`] is a persistent ordered map from key to entry and the cluster-wide `revision`. The only way it changes
//! is [`State::apply`], a function of the command and the term of the log entry that carries it: no clock, no random
//! source, no I/O, so that the same log gives the same state on every peer and after every restart.
//!
//! Cloning is O(1) and the clone never changes: this is what pages of a listing, snapshots and readers hold.
//!
//! In reading order: this file (the map and its reads), [`apply`] (transactions).

mod apply;
#[cfg(test)]
mod model;

use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use imbl::OrdMap;
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::limits::MAX_PAGE_BYTES;

/// What the map holds under one key.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    value: Bytes,
    version: u64,
    create_revision: Revision,
    mod_revision: Revision,
}

impl Entry {
    fn key_value(&self, key: &str) -> KeyValue {
        KeyValue {
            key: key.to_owned(),
            value: self.value.clone(),
            version: self.version,
            create_revision: self.create_revision,
            mod_revision: self.mod_revision,
        }
    }
}

/// The whole replicated map at one revision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    entries: OrdMap<Arc<str>, Arc<Entry>>,
    revision: Revision,
    /// Bytes of all keys and values.
    bytes: u64,
}

/// Some entries of a listing, and whether there are more behind them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub entries: Vec<KeyValue>,
    pub more: bool,
}

impl State {
    /// The revision of the last command that changed anything.
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether there is no key at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entry under `key`.
    pub fn get(&self, key: &str) -> Option<KeyValue> {
        self.entries.get(key).map(|entry| entry.key_value(key))
    }

    /// The entries under `prefix` behind the key `after`, in key order: at most `limit`, and not much more than
    /// `max_bytes` bytes of keys and values (one entry is always returned if there is one).
    pub fn list(&self, prefix: &str, after: Option<&str>, limit: usize, max_bytes: usize) -> Listing {
        let mut listing = Listing::default();
        let mut bytes = 0;
        for (key, entry) in self.under(prefix, after) {
            if listing.entries.len() >= limit || (bytes >= max_bytes && !listing.entries.is_empty()) {
                listing.more = true;
                break;
            }
            bytes += key.len() + entry.value.len();
            listing.entries.push(entry.key_value(key));
        }
        listing
    }

    /// Every entry, in key order.
    pub fn iter(&self) -> impl Iterator<Item = KeyValue> + '_ {
        self.entries.iter().map(|(key, entry)| entry.key_value(key))
    }

    fn insert(&mut self, key: Arc<str>, entry: Entry) {
        self.bytes += (key.len() + entry.value.len()) as u64;
        let key_len = key.len();
        if let Some(previous) = self.entries.insert(key, Arc::new(entry)) {
            self.bytes -= (key_len + previous.value.len()) as u64;
        }
    }

    fn remove(&mut self, key: &str) -> Option<Arc<Entry>> {
        let previous = self.entries.remove(key)?;
        self.bytes -= (key.len() + previous.value.len()) as u64;
        Some(previous)
    }

    fn under<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a Arc<Entry>)> + 'a {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        self.entries.range::<_, str>((start, Bound::Unbounded)).take_while(move |(key, _)| key.starts_with(prefix))
    }
}

/// Rebuilds a [`State`] from what a snapshot holds.
#[derive(Debug, Default)]
pub struct StateBuilder {
    state: State,
}

impl StateBuilder {
    /// Adds an entry.
    pub fn add(&mut self, entry: KeyValue) {
        let kept = Entry {
            value: compact(&entry.value),
            version: entry.version,
            create_revision: entry.create_revision,
            mod_revision: entry.mod_revision,
        };
        self.state.insert(entry.key.into(), kept);
    }

    /// The finished state, at `revision`.
    pub fn build(self, revision: Revision) -> State {
        State { revision, ..self.state }
    }
}

/// A copy that owns exactly its bytes: a decoded value is a slice of the message it came in, and would keep all of
/// that in memory.
fn compact(value: &Bytes) -> Bytes {
    Bytes::copy_from_slice(value)
}

/// Entries returned by one list operation inside a transaction end once they hold this many bytes.
const MAX_LIST_BYTES: usize = MAX_PAGE_BYTES;
