//! What the nemesis did.

/// A fault beginning or ending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Which nemesis: `kill`, `partition`. Letters, digits and dashes.
    pub name: String,
    pub phase: Phase,
    /// What it was done to, for people: `leader (2)`, `1 | 2 3`.
    pub target: String,
    /// What came of it; `None` while it is being tried.
    pub installation: Option<Installation>,
}

/// Which end of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Start,
    Stop,
}

/// What came of beginning or ending a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Installation {
    /// It took effect; with what shows that.
    Installed(String),
    /// This machine or cluster cannot have it; with the reason.
    Skipped(String),
    /// It was tried and did not take effect; with the reason.
    Failed(String),
}
