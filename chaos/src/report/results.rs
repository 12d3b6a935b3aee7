//! `results.json`: the verdicts of a run, and its figures.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::attacks::{Attack, attacks};
use super::record::Record;
use crate::check::{self, Outcome, Verdict};
use crate::history::{History, Outcome as End, Workload, encode};

/// Its name in a run's directory.
pub const FILE_NAME: &str = "results.json";

/// What came of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The worst of all.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// What `lake chaos run` ends with: 0 valid, 1 violation, 2 unknown.
    pub exit_code: u8,
    pub workload: Workload,
    /// Missing for a history from elsewhere.
    pub run: Option<Record>,
    /// By the name of the operation, as in the history.
    pub operations: BTreeMap<String, Counts>,
    /// What was done to the cluster.
    #[serde(default)]
    pub faults: Vec<Attack>,
    pub checks: Vec<Outcome>,
}

/// How operations of one name ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub ok: u64,
    /// The system said no, as it should.
    pub refused: u64,
    /// Not served, and surely not done.
    pub failed: u64,
    pub unknown: u64,
    /// Of those that succeeded, in microseconds.
    pub p50_us: u64,
    pub p99_us: u64,
    pub max_us: u64,
}

impl Results {
    /// Adds up what was judged and counted.
    pub fn new(workload: Workload, history: &History, run: Option<Record>, checks: Vec<Outcome>) -> Results {
        let verdict = check::verdict(&checks);
        Results {
            exit_code: verdict.exit_code(),
            verdict,
            workload,
            run,
            operations: operations(history),
            faults: attacks(history),
            checks,
        }
    }
}

fn operations(history: &History) -> BTreeMap<String, Counts> {
    let mut counts: BTreeMap<String, (Counts, Vec<u64>)> = BTreeMap::new();
    for call in history.calls() {
        let invocation = history.invocation(call);
        let (name, _) = encode::action(&invocation.action);
        let (counts, latencies_ns) = counts.entry(name).or_default();
        let end = history.end(call);
        match call.outcome {
            End::Ok => {
                counts.ok += 1;
                latencies_ns.extend(end.map(|end| end.time_ns.saturating_sub(invocation.time_ns)));
            }
            End::Fail if end.is_some_and(|end| end.refusal.is_some()) => counts.refused += 1,
            End::Fail => counts.failed += 1,
            End::Unknown => counts.unknown += 1,
        }
    }
    let finished = |(name, (mut counts, mut latencies_ns)): (String, (Counts, Vec<u64>))| {
        latencies_ns.sort_unstable();
        counts.p50_us = quantile(&latencies_ns, 50).unwrap_or(0) / 1000;
        counts.p99_us = quantile(&latencies_ns, 99).unwrap_or(0) / 1000;
        counts.max_us = latencies_ns.last().copied().unwrap_or(0) / 1000;
        (name, counts)
    };
    counts.into_iter().map(finished).collect()
}

/// The smallest value that so many of a hundred do not exceed.
pub(super) fn quantile(sorted: &[u64], percent: usize) -> Option<u64> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}
