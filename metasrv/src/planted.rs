//! Bugs on purpose, to show that fault runs find them. Only a build with the feature `planted-bugs`, which no package has,
//! can have one, and has the one that [`VARIABLE`] names.

/// Names the bug, in a build that can have one.
pub const VARIABLE: &str = "LAKE_PLANTED_BUG";

/// A bug, and what it breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// Reads are served from what is applied here, without asking a quorum.
    StaleReads,
    /// Entries are acknowledged before they are synced.
    AcknowledgedUnsynced,
    /// A repeated request of a session runs again.
    AppliedTwice,
    /// Some events do not reach watchers.
    LostEvent,
    /// The compare that a lease is alive holds when it is over.
    LeaseOutlived,
    /// A scope does not conflict with its descendants.
    DescendantsIgnored,
    /// A peer that starts does not know whom it has voted for.
    VoteForgotten,
    /// A snapshot that is installed lacks the newest change.
    SnapshotShort,
    /// Compare-and-set looks whether the key is there, not at its revision.
    CasIgnored,
}

/// Each with its name.
pub const BUGS: [(&str, Bug); 9] = [
    ("stale-reads", Bug::StaleReads),
    ("acknowledged-unsynced", Bug::AcknowledgedUnsynced),
    ("applied-twice", Bug::AppliedTwice),
    ("lost-event", Bug::LostEvent),
    ("lease-outlived", Bug::LeaseOutlived),
    ("descendants-ignored", Bug::DescendantsIgnored),
    ("vote-forgotten", Bug::VoteForgotten),
    ("snapshot-short", Bug::SnapshotShort),
    ("cas-ignored", Bug::CasIgnored),
];

/// Whether this process has the bug.
#[cfg(not(feature = "planted-bugs"))]
pub(crate) const fn has(_: Bug) -> bool {
    false
}

/// Whether this process has the bug.
#[cfg(feature = "planted-bugs")]
pub(crate) fn has(bug: Bug) -> bool {
    static PLANTED: std::sync::OnceLock<Option<Bug>> = std::sync::OnceLock::new();
    let planted = PLANTED.get_or_init(|| {
        let name = std::env::var(VARIABLE).ok()?;
        let bug = BUGS.iter().find(|(known, _)| *known == name).map(|(_, bug)| *bug);
        match bug {
            Some(bug) => tracing::error!("this process has the bug {bug:?} on purpose"),
            None => tracing::warn!("{VARIABLE}: peers have no bug {name:?} to be planted"),
        }
        bug
    });
    *planted == Some(bug)
}
