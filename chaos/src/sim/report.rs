//! What came of a simulation.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::plan::Plan;
use crate::check::Verdict;

/// Faults of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effect {
    pub begun: u64,
    /// Of these, those that were seen to take effect.
    pub took_effect: u64,
}

/// What is told of one simulation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub plan: Plan,
    pub verdict: Verdict,
    /// The promise that was broken: an invariant or a checker.
    pub broke: Option<String>,
    /// What checkers found, in sentences.
    pub findings: Vec<String>,
    /// What was done to the cluster, with the times.
    pub faults: Vec<String>,
    /// By the kind of fault.
    pub effects: BTreeMap<String, Effect>,
    /// How the trace ends, its number of lines, and a hash of all of it.
    pub tail: Vec<String>,
    pub lines: u64,
    pub hash: String,
    /// Operations that clients began, and of these, how many succeeded.
    pub operations: u64,
    pub succeeded: u64,
    /// Entries that were applied.
    pub applied: u64,
    /// Of the simulation's time.
    pub simulated_ms: u64,
}
