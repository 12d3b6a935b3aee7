//! How much of what was asked was answered, and how soon again after a fault?
//!
//! An answer is a success or a refusal (a compare that found another value). Everything else was not served. Faults excuse what overlaps them and [`RECOVERY_NS`] after them.
//!
//! Too few answers outside of faults, or a kind of operation that never succeeded, make a run [`Verdict::Unknown`]: it
//! has shown too little. No success for [`Limits::outage_ns`] after all faults had ended, though it was tried, is a
//! violation.

use std::collections::BTreeMap;

use super::outcome::{Finding, Findings, Outcome};
use super::verdict::Verdict;
use crate::history::{Action, Call, History, Installation, Outcome as End, Phase, Watch, Workload};

/// Its name in results.
pub const NAME: &str = "availability";
/// How long after a fault what goes wrong is put down to it, in nanoseconds.
pub const RECOVERY_NS: u64 = 5_000_000_000;

/// What is enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Operations that must succeed.
    pub successes: usize,
    /// Of a hundred operations outside of faults, how many must be answered.
    pub answered_percent: usize,
    /// The longest time without success after the end of all faults, in nanoseconds.
    pub outage_ns: u64,
}

impl Limits {
    /// What is enough for a workload.
    pub fn of(workload: Workload) -> Limits {
        let answered_percent = match workload {
            // It loses answers on purpose.
            Workload::Idempotency => 30,
            _ => 90,
        };
        Limits { successes: 20, answered_percent, outage_ns: 30_000_000_000 }
    }
}

/// A time during which some fault was in force, in nanoseconds of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub from_ns: u64,
    /// The end of the history if the fault never ended.
    pub to_ns: u64,
}

/// When each fault was in force, by its name, in the order of their beginnings.
pub fn windows(history: &History) -> Vec<(String, Window)> {
    let end = history.operations().last().map_or(0, |operation| operation.time_ns);
    let mut windows: Vec<(String, Window)> = Vec::new();
    let mut open: BTreeMap<&str, usize> = BTreeMap::new();
    for (time_ns, fault) in history.faults() {
        let took_effect = matches!(fault.installation, Some(Installation::Installed(_)));
        match fault.phase {
            Phase::Start if took_effect && !open.contains_key(fault.name.as_str()) => {
                open.insert(&fault.name, windows.len());
                windows.push((fault.name.clone(), Window { from_ns: time_ns, to_ns: end }));
            }
            // Foreign histories do not say what came of it.
            Phase::Stop if took_effect || fault.installation.is_none() => {
                if let Some(at) = open.remove(fault.name.as_str()) {
                    windows[at].1.to_ns = time_ns;
                }
            }
            _ => {}
        }
    }
    windows
}

/// Judges how much was served.
pub fn check(history: &History, limits: &Limits) -> Outcome {
    let mut findings = Findings::default();
    let faults = merged(windows(history).into_iter().map(|(_, window)| window));
    let calls: Vec<&Call> = history.calls().iter().filter(|call| is_asked_for(history, call)).collect();
    let outside: Vec<&&Call> = calls.iter().filter(|call| !overlaps(history, call, &faults)).collect();
    let answered = outside.iter().filter(|call| is_answered(history, call)).count();
    let succeeded = calls.iter().filter(|call| call.outcome == End::Ok).count();
    let longest = outages(history, &calls, &faults, limits, &mut findings);
    let kinds = kinds(history, &calls);
    let never = kinds.iter().find(|(_, successes)| **successes == 0).map(|(kind, _)| kind);
    let otherwise = if succeeded < limits.successes {
        Verdict::Unknown(format!("only {succeeded} operations succeeded, {} are needed", limits.successes))
    } else if answered * 100 < outside.len() * limits.answered_percent {
        Verdict::Unknown(format!(
            "outside of faults only {answered} of {} operations were answered, {} of 100 are needed",
            outside.len(),
            limits.answered_percent
        ))
    } else if let Some(kind) = never {
        Verdict::Unknown(format!("no :{kind} ever succeeded"))
    } else {
        Verdict::Valid
    };
    findings
        .conclude(NAME, otherwise)
        .with("operations", calls.len())
        .with("succeeded", succeeded)
        .with("outside of faults", outside.len())
        .with("answered outside of faults", answered)
        .with(
            "longest time without success after a fault, ms",
            usize::try_from(longest / 1_000_000).unwrap_or(usize::MAX),
        )
}

/// Watchers wait for what may never come.
fn is_asked_for(history: &History, call: &Call) -> bool {
    !matches!(history.action(call), Action::Watch(Watch::Next { .. } | Watch::Open { .. }))
}

fn is_answered(history: &History, call: &Call) -> bool {
    match call.outcome {
        End::Ok => true,
        End::Fail => history.end(call).is_some_and(|end| end.refusal.is_some()),
        End::Unknown => false,
    }
}

/// How often each kind of operation succeeded.
fn kinds(history: &History, calls: &[&Call]) -> BTreeMap<String, usize> {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for call in calls {
        let (kind, _) = crate::history::encode::action(&history.invocation(call).action);
        *kinds.entry(kind).or_default() += usize::from(call.outcome == End::Ok);
    }
    kinds
}

/// Windows that overlap joined, in order.
fn merged(windows: impl Iterator<Item = Window>) -> Vec<Window> {
    let mut windows: Vec<Window> = windows.collect();
    windows.sort_unstable_by_key(|window| window.from_ns);
    let mut merged: Vec<Window> = Vec::new();
    for window in windows {
        match merged.last_mut() {
            Some(last) if window.from_ns <= last.to_ns => last.to_ns = last.to_ns.max(window.to_ns),
            _ => merged.push(window),
        }
    }
    merged
}

fn overlaps(history: &History, call: &Call, faults: &[Window]) -> bool {
    let begun = history.invocation(call).time_ns;
    let ended = history.end(call).map_or(u64::MAX, |end| end.time_ns);
    faults.iter().any(|fault| begun <= fault.to_ns.saturating_add(RECOVERY_NS) && fault.from_ns <= ended)
}

/// The longest time from the end of all faults to the next success, in nanoseconds.
fn outages(history: &History, calls: &[&Call], faults: &[Window], limits: &Limits, findings: &mut Findings) -> u64 {
    let ended = |call: &&&Call| call.outcome == End::Ok;
    let mut successes: Vec<u64> =
        calls.iter().filter(ended).filter_map(|call| Some(history.end(call)?.time_ns)).collect();
    successes.sort_unstable();
    let end = history.operations().last().map_or(0, |operation| operation.time_ns);
    let mut longest = 0;
    for (i, fault) in faults.iter().enumerate() {
        // Until the next fault, which may be to blame from then on.
        let until = faults.get(i + 1).map_or(end, |next| next.from_ns);
        let next = successes.get(successes.partition_point(|at| *at < fault.to_ns)).copied();
        let back = next.unwrap_or(u64::MAX).min(until);
        let outage = back.saturating_sub(fault.to_ns);
        longest = longest.max(outage);
        let tried = calls.iter().any(|call| (fault.to_ns..back).contains(&history.invocation(call).time_ns));
        if outage > limits.outage_ns && tried {
            findings.add("outage", || {
                let seconds = |ns: u64| ns as f64 / 1e9;
                let what = format!(
                    "nothing succeeded for {:.1} s after the fault that ended at {:.1} s",
                    seconds(outage),
                    seconds(fault.to_ns)
                );
                Finding::new("outage", what, Vec::new())
            });
        }
    }
    longest
}
