//! What was acknowledged, by key: so that it can be looked for once all is healed.
//!
//! Of each key the newest acknowledged change is kept. The key must then be at that revision or a later one. What was
//! deleted must be absent or written later. A key that a delete of unknown outcome may have taken is not looked for, until
//! something newer than what that delete expected to find was acknowledged: then it can take nothing any more.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lake_client::clock;
use lake_client::remote::RemoteStore;
use lake_client::store::{Error, MetaStore, ReadOptions};
use lake_proto::kv::Revision;

/// Keys read at once.
const KEYS_AT_ONCE: usize = 500;
/// How long reading them may take.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Of what is not there so many are named.
const MAX_NAMED: usize = 20;

#[derive(Debug, Clone, Default)]
struct Acknowledged {
    revision: Revision,
    deleted: bool,
    /// Deletes under way, or of unknown outcome: the revision that each expects to find.
    doubts: Vec<Revision>,
}

impl Acknowledged {
    fn is_certain(&self) -> bool {
        self.doubts.is_empty() && self.revision > 0
    }
}

/// What was looked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Looked {
    pub looked_for: u64,
    /// What was not there as it must be, each in a few words.
    pub not_found: Vec<String>,
}

/// The newest acknowledged change of every key; and how many acknowledged writes elsewhere were read again, for their checker.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<BTreeMap<String, Acknowledged>>, AtomicU64);

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Acknowledged>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A put was acknowledged.
    pub fn put(&self, key: &str, revision: Revision) {
        self.note(key, revision, false);
    }

    /// So many acknowledged writes, of what is no key, were looked for by the workload itself.
    pub fn looked_for_elsewhere(&self, writes: u64) {
        self.1.fetch_add(writes, Ordering::Relaxed);
    }

    /// A delete begins of what was changed at the revision `expected`; its outcome is in doubt from now on.
    pub fn deleting(&self, key: &str, expected: Revision) {
        self.lock().entry(key.to_owned()).or_default().doubts.push(expected);
    }

    /// That delete has ended: at that revision, or not at all.
    pub fn deleted(&self, key: &str, expected: Revision, at: Option<Revision>) {
        if let Some(entry) = self.lock().get_mut(key)
            && let Some(place) = entry.doubts.iter().position(|doubt| *doubt == expected)
        {
            entry.doubts.swap_remove(place);
        }
        if let Some(revision) = at {
            self.note(key, revision, true);
        }
    }

    fn note(&self, key: &str, revision: Revision, deleted: bool) {
        let mut keys = self.lock();
        match keys.get_mut(key) {
            Some(entry) if entry.revision < revision => {
                (entry.revision, entry.deleted) = (revision, deleted);
                // A delete that expects something older than this has happened before, or never will.
                entry.doubts.retain(|expected| *expected >= revision);
            }
            Some(_) => {}
            None => drop(keys.insert(key.to_owned(), Acknowledged { revision, deleted, doubts: Vec::new() })),
        }
    }

    /// Reads every key, linearizably.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub async fn look(&self, store: &RemoteStore) -> Result<Looked, Error> {
        let wanted: Vec<(String, Acknowledged)> =
            self.lock().iter().filter(|(_, a)| a.is_certain()).map(|(k, a)| (k.clone(), a.clone())).collect();
        let mut looked = Looked { looked_for: self.1.load(Ordering::Relaxed), ..Looked::default() };
        let mut missing = 0;
        for some in wanted.chunks(KEYS_AT_ONCE) {
            let keys: Vec<String> = some.iter().map(|(key, _)| key.clone()).collect();
            let read = store.batch_get(&keys, ReadOptions::default(), clock::now() + TIMEOUT).await?;
            let there: BTreeMap<&str, Revision> =
                read.value.iter().map(|entry| (entry.key.as_str(), entry.mod_revision)).collect();
            for (key, acknowledged) in some {
                looked.looked_for += 1;
                if let Some(what) = contradiction(key, acknowledged, there.get(key.as_str()).copied()) {
                    missing += 1;
                    if looked.not_found.len() < MAX_NAMED {
                        looked.not_found.push(what);
                    }
                }
            }
        }
        if missing > looked.not_found.len() {
            looked.not_found.push(format!("{} more", missing - looked.not_found.len()));
        }
        Ok(looked)
    }
}

fn contradiction(key: &str, acknowledged: &Acknowledged, there: Option<Revision>) -> Option<String> {
    let Acknowledged { revision, deleted, .. } = *acknowledged;
    match (there, deleted) {
        (None, true) => None,
        (Some(now), _) if now > revision || (now == revision && !deleted) => None,
        (None, false) => Some(format!("{key} was written at revision {revision}, and is absent")),
        (Some(now), true) => Some(format!("{key} was deleted at revision {revision}, and is there as of {now}")),
        (Some(now), false) => Some(format!("{key} was written at revision {revision}, and is there as of {now}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_must_not_be_older_than_what_was_acknowledged() {
        let put = Acknowledged { revision: 7, deleted: false, doubts: vec![] };
        let deleted = Acknowledged { deleted: true, ..put.clone() };
        for (acknowledged, there, sound) in [
            (&put, Some(7), true),
            (&put, Some(9), true),
            (&put, Some(6), false),
            (&put, None, false),
            (&deleted, None, true),
            (&deleted, Some(8), true),
            (&deleted, Some(7), false),
            (&deleted, Some(3), false),
        ] {
            assert_eq!(contradiction("k", acknowledged, there).is_none(), sound, "{acknowledged:?} {there:?}");
        }
    }

    #[test]
    fn the_newest_change_counts_and_a_lost_delete_is_a_doubt() {
        let ledger = Ledger::default();
        ledger.put("a", 5);
        ledger.put("a", 3);
        assert_eq!(ledger.lock()["a"].revision, 5);
        ledger.deleting("a", 5);
        assert!(!ledger.lock()["a"].is_certain());
        ledger.deleted("a", 5, Some(8));
        let entry = ledger.lock()["a"].clone();
        assert_eq!((entry.revision, entry.deleted, entry.is_certain()), (8, true, true));
        ledger.put("a", 9);
        assert!(!ledger.lock()["a"].deleted);
    }

    #[test]
    fn a_lost_delete_is_no_doubt_once_something_newer_is_there() {
        let ledger = Ledger::default();
        ledger.put("a", 5);
        // Of these nobody learns the outcome.
        ledger.deleting("a", 5);
        ledger.deleting("a", 7);
        assert!(!ledger.lock()["a"].is_certain());
        ledger.put("a", 6);
        assert!(!ledger.lock()["a"].is_certain(), "what it expects may come yet");
        ledger.put("a", 7);
        assert!(!ledger.lock()["a"].is_certain(), "it may take just this");
        ledger.put("a", 8);
        assert!(ledger.lock()["a"].is_certain());
    }
}
