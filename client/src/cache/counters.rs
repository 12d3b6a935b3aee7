//! What the cache has done so far.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why the metadata was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A table was asked for that is not cached.
    Miss,
    /// What was cached had become too old to be used, or was of an earlier revision than asked for.
    Expired,
    /// What was cached is renewed before it becomes too old.
    Refresh,
    /// Several tables had to be of one moment.
    Moment,
    /// One small read that renews everything that the watch covers, or finds out whether metasrv is back.
    Confirm,
    /// A watch was opened.
    Watch,
    /// Something that is not cached was read, or a snapshot opened or closed for that.
    Read,
    /// Something was listed.
    List,
    /// Something was changed, also a lease.
    Write,
}

/// All of them, in the order of their numbers.
pub const REASONS: [Reason; 9] = [
    Reason::Miss,
    Reason::Expired,
    Reason::Refresh,
    Reason::Moment,
    Reason::Confirm,
    Reason::Watch,
    Reason::Read,
    Reason::List,
    Reason::Write,
];

impl Reason {
    /// As metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Miss => "miss",
            Reason::Expired => "expired",
            Reason::Refresh => "refresh",
            Reason::Moment => "moment",
            Reason::Confirm => "confirm",
            Reason::Watch => "watch",
            Reason::Read => "read",
            Reason::List => "list",
            Reason::Write => "write",
        }
    }
}

/// Counts since the start, at one moment or nearly so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tables given from the cache without a wait.
    pub hits: u64,
    /// Tables that were not cached, or not fit for use, and had to be waited for.
    pub misses: u64,
    /// Renewals in the background: of one table, or of all that the watch covers.
    pub refreshes: u64,
    /// Tables given although they were too old, because metasrv could not be reached.
    pub stale: u64,
    /// Changes of cached tables that the watch brought.
    pub told: u64,
    /// Answers that were not used because something later was known.
    pub refused: u64,
    calls: [u64; REASONS.len()],
}

impl Counters {
    /// Calls to the metadata for this reason; a retry is one of its own.
    pub fn calls(&self, reason: Reason) -> u64 {
        self.calls[reason as usize]
    }

    pub fn all_calls(&self) -> u64 {
        self.calls.iter().sum()
    }
}

/// Where they are counted.
#[derive(Debug, Default)]
pub(crate) struct Counting {
    pub hits: AtomicU64,
    pub misses: AtomicU64,
    pub refreshes: AtomicU64,
    pub stale: AtomicU64,
    pub told: AtomicU64,
    pub refused: AtomicU64,
    calls: [AtomicU64; REASONS.len()],
}

/// Counts one more.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counting {
    pub fn call(&self, reason: Reason) {
        count(&self.calls[reason as usize]);
    }

    pub fn snapshot(&self) -> Counters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            hits: of(&self.hits),
            misses: of(&self.misses),
            refreshes: of(&self.refreshes),
            stale: of(&self.stale),
            told: of(&self.told),
            refused: of(&self.refused),
            calls: std::array::from_fn(|at| of(&self.calls[at])),
        }
    }
}
