//! What is known of a pointer, and until when: pure.
//!
//! An entry is a state of one table's pointer (or its absence) that a read, a commit or the watch told, with the revision
//! it was told at. The watch adds to that, for all entries at once:
//!
//! ```text
//! revisions  --- from ------- entry.revision ------------- progress ---->
//!                             the state was told           every change of any pointer up to here is in the entries
//!                             `---------- it is current in all of these ----------'
//! ```
//! So an entry whose revision is at least `from`, where the watch began, and that no change has replaced is current up to
//! `progress`. The cover must be read before the entry: changes go into the entries first, and into the cover afterwards.
//!
//! Progress is about revisions and says nothing of time: a peer that lags tells of an old one for ever. Time comes from
//! linearizable reads. One that was begun at T and answered from revision R says that whatever was acknowledged before T is
//! in the first R revisions. Once the progress has reached R, every covered entry is as it was at T, or later. One small
//! read for all entries thus does what a read of each would do.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use lake_proto::kv::Revision;

use crate::catalog::{TablePointer, Versioned};

/// A table's pointer, or that there is none, as it was told.
#[derive(Debug)]
pub struct Entry {
    pub pointer: Option<Versioned<TablePointer>>,
    /// The state at this revision.
    pub revision: Revision,
    /// It was current at this time, or later.
    pub read_at: Instant,
    /// Somebody has asked for its renewal.
    pub renewing: AtomicBool,
    /// When somebody had reason to think that it is not so any more.
    pub doubted: Option<Instant>,
}

impl Entry {
    pub fn new(pointer: Option<Versioned<TablePointer>>, revision: Revision, read_at: Instant) -> Self {
        Self { pointer, revision, read_at, renewing: AtomicBool::new(false), doubted: None }
    }

    /// The same, of which somebody doubted then that it is still so.
    pub fn doubted_at(self, doubted: Instant) -> Self {
        Self { doubted: Some(doubted), ..self }
    }
}

/// What the watch adds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cover {
    /// Every change after this revision is told; `None`: nothing is.
    pub from: Option<Revision>,
    /// Every change up to this one has been.
    pub progress: Revision,
    /// Whatever was acknowledged before this time was told by then.
    pub as_of: Option<Instant>,
    /// A peer is being followed: the progress is about to go on.
    pub live: bool,
    /// The latest linearizable read whose revision the progress has yet to reach.
    pub awaited: Option<(Revision, Instant)>,
}

/// An entry with all that is known of it.
#[derive(Debug, Clone)]
pub struct Known {
    pub entry: Arc<Entry>,
    /// It is current up to this revision.
    pub through: Revision,
    /// It was current at this time, or later.
    pub as_of: Instant,
}

impl Cover {
    /// Begins anew with what a linearizable read said, which was begun at `at`.
    pub fn begin(&mut self, revision: Revision, at: Instant) {
        *self = Self { from: Some(revision), progress: revision, as_of: Some(at), live: false, awaited: None };
    }

    pub fn covers(&self, entry: &Entry) -> bool {
        self.from.is_some_and(|from| entry.revision >= from)
    }

    /// What is known of an entry that was looked up after this was read.
    pub fn know(&self, entry: Arc<Entry>) -> Known {
        let (mut through, mut as_of) = (entry.revision, entry.read_at);
        if self.covers(&entry) {
            through = through.max(self.progress);
            as_of = as_of.max(self.as_of.unwrap_or(as_of));
        }
        Known { entry, through, as_of }
    }

    /// A linearizable read that was begun at `at` answered from this revision.
    pub fn confirmed(&mut self, revision: Revision, at: Instant) {
        if self.from.is_none() {
            return;
        }
        if revision <= self.progress {
            self.as_of = self.as_of.max(Some(at));
        } else if self.awaited.is_none() {
            self.awaited = Some((revision, at));
        }
    }

    /// Every change up to `progress` is in the entries.
    pub fn progressed(&mut self, progress: Revision) {
        self.progress = self.progress.max(progress);
        if let Some((revision, at)) = self.awaited
            && revision <= self.progress
        {
            self.as_of = self.as_of.max(Some(at));
            self.awaited = None;
        }
    }
}

/// Whether there is a revision in which all of these are current (semantics, section 11).
pub fn one_moment<'a>(known: impl Iterator<Item = &'a Known>) -> bool {
    let (mut changed, mut through) = (0, Revision::MAX);
    for known in known {
        // Of a table that is not there it is unknown since when: since what was told, at the latest.
        let since = known.entry.pointer.as_ref().map_or(known.entry.revision, |pointer| pointer.mod_revision);
        changed = changed.max(since);
        through = through.min(known.through);
    }
    changed <= through
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;
    use crate::clock;

    fn entry(mod_revision: Revision, revision: Revision, read_at: Instant) -> Arc<Entry> {
        let value =
            TablePointer { uuid: Uuid::nil(), metadata_location: "file:///1".to_owned(), previous_location: None };
        let pointer = Some(Versioned { value, mod_revision, valid_through: revision });
        Arc::new(Entry::new(pointer, revision, read_at))
    }

    #[tokio::test]
    async fn progress_moves_revisions_and_only_a_confirmed_read_moves_time() {
        let began = clock::now();
        let at = |seconds: u64| began + Duration::from_secs(seconds);
        let mut cover = Cover::default();
        cover.confirmed(10, at(0));
        cover.progressed(0);
        assert_eq!(cover.know(entry(5, 10, at(1))).through, 10, "nothing is covered yet");

        cover.begin(8, at(2));
        let (before, within) = (entry(5, 7, at(1)), entry(5, 10, at(1)));
        cover.progressed(20);
        let known = cover.know(within.clone());
        assert_eq!((known.through, known.as_of), (20, at(2)));
        let known = cover.know(before);
        assert_eq!((known.through, known.as_of), (7, at(1)), "a change between 7 and 8 would not have been told");

        cover.confirmed(25, at(3));
        cover.confirmed(40, at(4));
        cover.progressed(24);
        assert_eq!(cover.know(within.clone()).as_of, at(2));
        cover.progressed(30);
        let known = cover.know(within.clone());
        assert_eq!((known.through, known.as_of), (30, at(3)));
        cover.confirmed(30, at(5));
        assert_eq!(cover.know(within).as_of, at(5));
    }

    #[tokio::test]
    async fn several_are_of_one_moment_if_some_revision_has_them_all() {
        let now = clock::now();
        let known = |changed, through| Known { entry: entry(changed, changed, now), through, as_of: now };
        assert!(one_moment([known(3, 9), known(9, 12)].iter()));
        assert!(!one_moment([known(3, 8), known(9, 12)].iter()));
        let absent = Known { entry: Arc::new(Entry::new(None, 9, now)), through: 9, as_of: now };
        assert!(!one_moment([known(3, 8), absent.clone()].iter()), "it may have been there at 8");
        assert!(one_moment([known(3, 9), absent].iter()));
        assert!(one_moment([].iter()));
    }
}
