//! The replicated state as a pure value (semantics, sections 1, 2 and 4 to 7).
//!
//! A [`State`] is a persistent ordered map from key to entry, the cluster-wide `revision`, and beside them the leases,
//! scopes, sessions, quotas and recent changes. The only way it changes is [`State::apply`], a function of the command
//! and the term of the log entry that carries it: no clock, no random source, no I/O, so that the same log gives the same
//! state, and the same hash of it, on every peer and after every restart.
//!
//! Cloning is O(1) and the clone never changes: this is what pages of a listing, snapshots and readers hold.
//!
//! In reading order: [`command`] (what can be asked), this file (the parts, and reading them), [`apply`] (commands and
//! transactions), [`scopes`], [`sessions`], [`quotas`], [`changes`], [`roster`], [`hash`]; [`restore`] puts a state together again
//! from what a snapshot holds, and [`rebirth`] makes of it what a new cluster begins with.

mod apply;
pub mod changes;
pub mod command;
mod entry;
mod hash;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod model;
#[cfg(test)]
mod properties;
pub mod quotas;
pub mod rebirth;
#[cfg(test)]
mod reference;
pub mod restore;
pub mod roster;
mod scopes;
mod sessions;
#[cfg(test)]
mod tests;

use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use imbl::{OrdMap, OrdSet};
use lake_proto::coordination::{LeaseId, Scope, SessionId};
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::limits::MAX_PAGE_BYTES;

use self::changes::Changes;
use self::entry::Entry;
use self::hash::StateHash;
use self::quotas::{DEFAULT_QUOTA_BYTES, Quota, Quotas};
use self::roster::Roster;
use self::scopes::Scopes;
use self::sessions::Sessions;

pub use self::scopes::MAX_SCOPES;
pub use self::sessions::MAX_SESSIONS;

/// The feature level that this build writes at, and the highest it can apply (semantics, section 1). It covers the
/// limits, the formats of commands and snapshots, and what is hashed how.
pub const FEATURE_LEVEL: u32 = 1;
/// What a cluster begins at, whatever builds found it: the log is applied from there by every later build, too.
pub const FIRST_FEATURE_LEVEL: u32 = 1;
/// Leases at once.
pub const MAX_LEASES: usize = 100_000;
/// Keys and scopes on one lease: its end is one step for all who write.
pub const MAX_HANGING: usize = 10_000;
/// Entries, kept changes and scopes that the compares of one transaction may look at, and as many again to say why they do not
/// hold: a transaction is one step for all who write.
pub const MAX_COMPARED: usize = 100_000;

/// A live lease. Its countdown is the leader's affair.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    ttl_ms: u64,
    holder: Arc<str>,
    keys: OrdSet<Arc<str>>,
    scopes: OrdSet<Arc<str>>,
}

impl Held {
    fn new(ttl_ms: u64, holder: &str) -> Self {
        Self { ttl_ms, holder: holder.into(), keys: OrdSet::new(), scopes: OrdSet::new() }
    }

    fn hanging(&self) -> usize {
        self.keys.len() + self.scopes.len()
    }
}

/// What is told of a live lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub id: LeaseId,
    pub ttl_ms: u64,
    pub holder: String,
    pub keys: usize,
}

/// The entries, by key.
#[derive(Debug, Clone, Default)]
struct Entries(OrdSet<Entry>);

impl Entries {
    fn get(&self, key: &str) -> Option<&Entry> {
        self.0.get(key.as_bytes())
    }
}

impl PartialEq for Entries {
    fn eq(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(one, other)| one.is_same(other))
    }
}

impl Eq for Entries {}

/// The whole replicated state at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    entries: Entries,
    revision: Revision,
    /// Bytes of all keys and values.
    bytes: u64,
    leases: OrdMap<LeaseId, Held>,
    /// Bytes of the leases' holders.
    holder_bytes: u64,
    scopes: Scopes,
    sessions: Sessions,
    quotas: Quotas,
    roster: Roster,
    changes: Changes,
    feature_level: u32,
    hash: StateHash,
}

impl Default for State {
    /// As a cluster is founded: empty, with the default quota.
    fn default() -> Self {
        let mut hash = StateHash::default();
        let mut quotas = Quotas::default();
        quotas.set("", Some(DEFAULT_QUOTA_BYTES), 0, &mut hash);
        Self { quotas, hash, ..Self::bare() }
    }
}

/// Some entries of a listing, and whether there are more behind them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub entries: Vec<KeyValue>,
    pub more: bool,
}

impl State {
    /// Nothing at all, not even a quota.
    fn bare() -> Self {
        Self {
            entries: Entries::default(),
            revision: 0,
            bytes: 0,
            leases: OrdMap::new(),
            holder_bytes: 0,
            scopes: Scopes::default(),
            sessions: Sessions::default(),
            quotas: Quotas::default(),
            roster: Roster::default(),
            changes: Changes::default(),
            feature_level: FIRST_FEATURE_LEVEL,
            hash: StateHash::default(),
        }
    }

    /// The revision of the last command that changed anything.
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.0.len()
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether there is no key at all.
    pub fn is_empty(&self) -> bool {
        self.entries.0.is_empty()
    }

    /// The entry under `key`.
    pub fn get(&self, key: &str) -> Option<KeyValue> {
        self.entries.get(key).map(Entry::key_value)
    }

    /// When the entry under `key` was last changed.
    pub fn mod_revision(&self, key: &str) -> Option<Revision> {
        self.entries.get(key).map(Entry::mod_revision)
    }

    /// The keys under `prefix`, in order.
    pub fn keys<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        self.under(prefix, None).map(Entry::key)
    }

    /// The entries under `prefix` behind the key `after`, in key order: at most `limit`, and not much more than
    /// `max_bytes` bytes of keys and values (one entry is always returned if there is one).
    pub fn list(&self, prefix: &str, after: Option<&str>, limit: usize, max_bytes: usize) -> Listing {
        let mut listing = Listing::default();
        let mut bytes = 0;
        for entry in self.under(prefix, after) {
            if listing.entries.len() >= limit || (bytes >= max_bytes && !listing.entries.is_empty()) {
                listing.more = true;
                break;
            }
            bytes += entry.size() as usize;
            listing.entries.push(entry.key_value());
        }
        listing
    }

    /// Every entry, in key order.
    pub fn iter(&self) -> impl Iterator<Item = KeyValue> + '_ {
        self.entries.0.iter().map(Entry::key_value)
    }

    /// Leases that are alive, in order of their ids, behind an id.
    pub fn leases(&self, after: LeaseId) -> impl Iterator<Item = Lease> + '_ {
        self.leases.range((Bound::Excluded(after), Bound::Unbounded)).map(|(id, lease)| Lease {
            id: *id,
            ttl_ms: lease.ttl_ms,
            holder: lease.holder.to_string(),
            keys: lease.keys.len(),
        })
    }

    /// The times to live of the live leases granted behind a revision, in order of their ids.
    pub fn lease_ttls(&self, after: Revision) -> impl Iterator<Item = (LeaseId, u64)> + '_ {
        self.leases.range((Bound::Excluded(after), Bound::Unbounded)).map(|(id, lease)| (*id, lease.ttl_ms))
    }

    /// A lease's time to live, if it is alive.
    pub fn lease_ttl(&self, id: LeaseId) -> Option<u64> {
        self.leases.get(&id).map(|lease| lease.ttl_ms)
    }

    /// To whom a lease was granted, if it is alive.
    pub fn lease_holder(&self, id: LeaseId) -> Option<&str> {
        self.leases.get(&id).map(|lease| &*lease.holder)
    }

    /// How many keys and scopes go with a lease.
    pub fn lease_hanging(&self, id: LeaseId) -> usize {
        self.leases.get(&id).map_or(0, Held::hanging)
    }

    /// How many scopes a lease owns.
    pub fn lease_scopes(&self, id: LeaseId) -> usize {
        self.leases.get(&id).map_or(0, |lease| lease.scopes.len())
    }

    /// Whether a lease is alive.
    pub fn has_lease(&self, id: LeaseId) -> bool {
        self.leases.contains_key(&id)
    }

    /// The live scopes whose path begins with a prefix, behind a path, in order.
    pub fn scopes<'a>(&'a self, prefix: &'a str, after: &'a str) -> impl Iterator<Item = Scope> + 'a {
        self.scopes.list(prefix, after)
    }

    /// Whether a scope is held.
    pub fn has_scope(&self, path: &str) -> bool {
        self.scopes.is_held(path)
    }

    /// Whether a session is open.
    pub fn has_session(&self, id: SessionId) -> bool {
        self.sessions.contains(id)
    }

    /// A session's time to live, if it is open.
    pub fn session_ttl(&self, id: SessionId) -> Option<u64> {
        self.sessions.ttl_ms(id)
    }

    /// The times to live of the sessions opened behind a revision, in order of their ids.
    pub fn session_ttls(&self, after: Revision) -> impl Iterator<Item = (SessionId, u64)> + '_ {
        self.sessions.ttls(after)
    }

    /// How many leases, scopes and sessions there are.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.leases.len(), self.scopes.len(), self.sessions.len())
    }

    /// The limits on bytes, by prefix; the empty one is the whole map's.
    pub fn quotas(&self) -> impl Iterator<Item = (&str, Quota)> {
        self.quotas.iter()
    }

    /// The recent changes.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// The feature level that commands are applied at.
    pub fn feature_level(&self) -> u32 {
        self.feature_level
    }

    /// The hash of all of this: equal on peers that have applied the same log.
    pub fn digest(&self) -> u128 {
        self.hash.digest([self.revision, u64::from(self.feature_level), self.changes.compacted()])
    }

    /// Takes away what was written last ([`crate::planted`]).
    pub(crate) fn forget_newest(&mut self) {
        let newest = self.iter().max_by_key(|entry| entry.mod_revision).map(|entry| entry.key);
        if let Some(key) = newest {
            self.remove(&key);
        }
    }

    fn add_lease(&mut self, id: LeaseId, ttl_ms: u64, holder: &str) {
        self.hash.add(hash::lease(id, ttl_ms, holder));
        self.holder_bytes += holder.len() as u64;
        self.leases.insert(id, Held::new(ttl_ms, holder));
    }

    fn insert(&mut self, entry: Entry) {
        let parts = entry.parts();
        self.hash.add(hash::entry(&parts));
        self.bytes += parts.size();
        self.quotas.grown(parts.key, parts.size());
        let lease = parts.numbers.lease.map(|id| (id, Arc::from(parts.key())));
        if let Some(previous) = self.entries.0.insert(entry) {
            self.forget(&previous);
        }
        if let Some((id, key)) = lease
            && let Some(held) = self.leases.get_mut(&id)
        {
            held.keys.insert(key);
        }
    }

    fn remove(&mut self, key: &str) -> Option<Entry> {
        let previous = self.entries.0.remove(key.as_bytes())?;
        self.forget(&previous);
        Some(previous)
    }

    /// What is no longer there no longer counts.
    fn forget(&mut self, previous: &Entry) {
        let parts = previous.parts();
        self.hash.remove(hash::entry(&parts));
        self.bytes -= parts.size();
        self.quotas.shrunk(parts.key, parts.size());
        if let Some(held) = parts.numbers.lease.and_then(|id| self.leases.get_mut(&id)) {
            held.keys.remove(parts.key());
        }
    }

    fn under<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> impl Iterator<Item = &'a Entry> + 'a {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after.as_bytes()),
            _ => Bound::Included(prefix.as_bytes()),
        };
        let from = self.entries.0.range::<_, [u8]>((start, Bound::Unbounded));
        from.take_while(move |entry| entry.key().starts_with(prefix))
    }
}

/// A copy that owns exactly its bytes: a decoded value is a slice of the message it came in, and would keep all of
/// that in memory.
fn compact(value: &Bytes) -> Bytes {
    Bytes::copy_from_slice(value)
}

/// Entries returned by one list operation inside a transaction end once they hold this many bytes.
const MAX_LIST_BYTES: usize = MAX_PAGE_BYTES;
