//! For how long outcomes of operations have been kept, for certain: counted by whoever looks after them, one process after
//! the other.
//!
//! No wall clock can say how old an outcome is, and no process need live for as long as one is kept. So the map says it, for
//! each domain: since the store was at this revision, at least so much time has passed. A process that reads that adds, by
//! compare-and-set, what has passed on its own monotonic clock since it read it or wrote it itself. The compare fails where
//! another has counted meanwhile, so that no time is counted twice; what passes while nobody looks, or too briefly, is not
//! counted. The count is late, and never early.
//!
//! Once it is long enough, what was left up to that revision, and not since, is forgotten, and the count begins anew if anything
//! is left. So an outcome goes when it was kept for one to two times as long, of the time that is counted.
//!
//! A mark that came here from another store counts nothing, since revisions are others there: it names its own version, and has
//! another one where it was put by somebody else.
//!
//! Only over a store whose revisions are those of all its keys
//! ([`Capabilities::consistent_listing`](crate::store::Capabilities::consistent_listing)).

use std::time::{Duration, Instant};

use lake_proto::kv::{Expected, KeyValue, Revision, Txn};
use serde::{Deserialize, Serialize};

use super::Catalog;
use super::error::Result;
use super::operations::{operation_key, operations_of};
use super::pointers::encode;
use crate::clock;
use crate::store::ReadOptions;

/// What the marks are filed under, each by its domain.
const DOMAIN: &str = "kept";

/// Since the store was at the revision `since`, at least so much time has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// Of its own entry.
    version: u64,
    since: Revision,
    passed_ms: u64,
}

/// A mark as it was read or written.
#[derive(Debug, Clone, Copy)]
struct Seen {
    revision: Revision,
    /// When it was known to be there.
    at: Instant,
}

/// The outcomes of one domain, as one process looks after them.
#[derive(Debug)]
pub struct Keeping {
    domain: String,
    seen: Option<Seen>,
}

impl Keeping {
    /// Nothing has been looked at yet.
    pub fn new(domain: &str) -> Self {
        Self { domain: domain.to_owned(), seen: None }
    }
}

impl Mark {
    fn of(entry: &KeyValue) -> Option<Self> {
        let mark: Self = serde_json::from_slice(&entry.value).ok()?;
        (mark.version == entry.version && mark.since <= entry.mod_revision).then_some(mark)
    }

    fn later(self, by: Duration) -> Self {
        let by = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
        Self { version: self.version + 1, passed_ms: self.passed_ms.saturating_add(by), ..self }
    }
}

impl Catalog {
    /// Counts for how long a domain's outcomes have been kept, and forgets those that were for at least so long. Returns how many
    /// those were. To be called again and again; what passes between two calls counts.
    ///
    /// # Errors
    /// The store's; `InvalidName` if the domain's is not valid.
    pub async fn forget_kept(&self, keeping: &mut Keeping, least: Duration, deadline: Instant) -> Result<usize> {
        let key = operation_key(DOMAIN, &keeping.domain)?;
        let read = self.store.get(&key, ReadOptions::default(), deadline).await?;
        let at = clock::now();
        let prefix = operations_of(&keeping.domain);
        let Some((entry, mark)) = read.value.as_ref().and_then(|entry| Some((entry, Mark::of(entry)?))) else {
            let some = self.store.list(&prefix, None, 1, ReadOptions::default(), deadline).await?;
            if !some.value.entries.is_empty() {
                let expected = read.value.as_ref().map_or(Expected::Absent, |e| Expected::ModRevision(e.mod_revision));
                let version = read.value.as_ref().map_or(0, |entry| entry.version) + 1;
                let mark = Mark { version, since: read.revision, passed_ms: 0 };
                keeping.seen = self.mark(&key, expected, mark, deadline).await?;
            }
            return Ok(0);
        };
        let Some(seen) = keeping.seen.take().filter(|seen| seen.revision == entry.mod_revision) else {
            // Another counts, or this one begins to.
            keeping.seen = Some(Seen { revision: entry.mod_revision, at });
            return Ok(0);
        };
        let later = mark.later(clock::since(seen.at));
        let counted = self.mark(&key, Expected::ModRevision(seen.revision), later, deadline).await?;
        keeping.seen = counted;
        let Some(counted) = counted.filter(|_| Duration::from_millis(later.passed_ms) >= least) else { return Ok(0) };

        let all = self.store.list_all(&prefix, ReadOptions::default(), deadline).await?.value;
        let of_all = all.len();
        let old = all.into_iter().filter(|entry| entry.mod_revision <= later.since);
        let old: Vec<_> = old.map(|entry| (entry.key, entry.mod_revision)).collect();
        self.forget(&old, deadline).await?;
        keeping.seen = if old.len() == of_all {
            self.store.commit(Txn::cas_delete(&key, counted.revision), deadline).await?;
            None
        } else {
            let anew = Mark { version: later.version + 1, since: counted.revision, passed_ms: 0 };
            self.mark(&key, Expected::ModRevision(counted.revision), anew, deadline).await?
        };
        Ok(old.len())
    }

    /// Nothing where another was first.
    async fn mark(&self, key: &str, expected: Expected, mark: Mark, deadline: Instant) -> Result<Option<Seen>> {
        let value = encode(&mark, key)?;
        let result = self.store.commit(Txn::cas(key, expected, value), deadline).await?.result;
        Ok(result.succeeded.then(|| Seen { revision: result.revision, at: clock::now() }))
    }
}
