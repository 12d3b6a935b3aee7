//! Bugs on purpose, to show that fault runs find them. Only a build with the feature `planted-bugs`, which no package has,
//! can have one, and has the one that [`VARIABLE`] names. Those of the metadata peers are in their own crate.

/// Names the bug, in a build that can have one.
pub const VARIABLE: &str = "LAKE_PLANTED_BUG";

/// A bug, and what it breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// What is committed under an operation id does not leave its outcome in the same transaction.
    OutcomeApart,
    /// A transaction commits its tables one after the other.
    TablesApart,
    /// A table is renamed in two transactions.
    RenameApart,
    /// What is read without the metadata does not say how old it is.
    AgeUntold,
    /// Appends that are taken along leave no outcome, and their records stay.
    AppendUnsettled,
    /// Expired snapshots take all of their files along.
    ExpiredTooMuch,
    /// A worker's upkeep goes on when its shard is another's, and commits without the fence.
    UpkeepUnfenced,
    /// A sweep takes what the snapshots are made of for orphans.
    SweptLive,
    /// A purge deletes what its table has borrowed, too.
    PurgedBorrowed,
    /// A commit through REST that has lost its race is acknowledged.
    RestRaceIgnored,
    /// What a statement has read is not looked at again where it is committed on a newer version.
    ReadsUnchecked,
    /// Snapshots expire however young they are, all but the newest.
    ExpiredYoung,
}

/// Each with its name.
pub const BUGS: [(&str, Bug); 12] = [
    ("outcome-apart", Bug::OutcomeApart),
    ("tables-apart", Bug::TablesApart),
    ("rename-apart", Bug::RenameApart),
    ("age-untold", Bug::AgeUntold),
    ("append-unsettled", Bug::AppendUnsettled),
    ("expired-too-much", Bug::ExpiredTooMuch),
    ("upkeep-unfenced", Bug::UpkeepUnfenced),
    ("swept-live", Bug::SweptLive),
    ("purged-borrowed", Bug::PurgedBorrowed),
    ("rest-race-ignored", Bug::RestRaceIgnored),
    ("reads-unchecked", Bug::ReadsUnchecked),
    ("expired-young", Bug::ExpiredYoung),
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
        let bug = BUGS.iter().find(|(known, _)| *known == name).map(|(_, bug)| *bug)?;
        tracing::error!("this process has the bug {bug:?} on purpose");
        Some(bug)
    });
    *planted == Some(bug)
}
