//! What came of a simulation.

use serde::{Deserialize, Serialize};

use super::plan::Plan;
use crate::check::Verdict;

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
