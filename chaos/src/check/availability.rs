//! How much of what was asked was answered, and how soon again after a fault?
//!
//! An answer is a success or a refusal (a compare that found another value). Everything else was not served. Faults excuse
//! what overlaps them and [`RECOVERY_NS`] after them.
//!
//! Too few answers outside of faults, too few successes among them (clients that are refused, or are in each other's way, all the
//! time), seconds in which nothing at all succeeded but for a few, or a kind of operation that
//! never succeeded in [`TRIES`] tries, make a run [`Verdict::Unknown`]: it has shown too little. No success for
//! [`Limits::outage_ns`] after all faults had ended, though it was tried, is a violation.

use std::collections::{BTreeMap, BTreeSet};

use super::outcome::{Finding, Findings, Outcome};
use super::verdict::Verdict;
use crate::history::{Action, Call, History, Installation, Outcome as End, Phase, Watch, Workload};

/// Its name in results.
pub const NAME: &str = "availability";
/// How long after a fault what goes wrong is put down to it, in nanoseconds.
pub const RECOVERY_NS: u64 = 5_000_000_000;
/// A kind of operation that was tried so often should have succeeded once.
const TRIES: usize = 10;

/// What is enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Operations that must succeed.
    pub successes: usize,
    /// Of a hundred operations outside of faults, how many must be answered.
    pub answered_percent: usize,
    /// The same of those that must succeed, where there are [`TRIES`]: a refusal is an answer, and changes nothing.
    pub succeeded_percent: usize,
    /// Of a hundred seconds in which something was asked for, in faults or not, in how many something must succeed: what
    /// serves nobody from the first fault on keeps every promise.
    pub served_percent: usize,
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
        let succeeded_percent = 10;
        Limits { successes: 20, answered_percent, succeeded_percent, served_percent: 20, outage_ns: 30_000_000_000 }
    }
}

/// A time during which some fault was in force, in nanoseconds of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub from_ns: u64,
    /// The end of the history if the fault never ended.
    pub to_ns: u64,
}

/// When each fault was in force, or may have been, by its name and in the order of their beginnings.
pub fn windows(history: &History) -> Vec<(String, Window)> {
    let end = history.operations().last().map_or(0, |operation| operation.time_ns);
    let mut windows: Vec<(String, Window)> = Vec::new();
    let mut open: BTreeMap<&str, usize> = BTreeMap::new();
    let mut tried: BTreeMap<&str, u64> = BTreeMap::new();
    // Other tools do not say what came of a fault: then it is taken to have been as it was meant.
    let told = history.faults().any(|(_, fault)| fault.installation.is_some());
    for (time_ns, fault) in history.faults() {
        let name = fault.name.as_str();
        match (fault.phase, &fault.installation) {
            (Phase::Start, None) if told => {
                tried.insert(name, time_ns);
            }
            (_, Some(Installation::Skipped(_))) => {}
            // One that failed may have done some harm, from when it was tried.
            (Phase::Start, _) if !open.contains_key(name) => {
                let window = Window { from_ns: tried.remove(name).unwrap_or(time_ns), to_ns: end };
                open.insert(name, windows.len());
                windows.push((name.to_owned(), window));
            }
            (Phase::Stop, None) if told => {}
            (Phase::Stop, None | Some(Installation::Installed(_))) => {
                if let Some(at) = open.remove(name) {
                    windows[at].1.to_ns = time_ns;
                }
            }
            _ => {}
        }
    }
    windows
}

/// When something succeeded that was asked for, in nanoseconds of the run and in order.
pub fn successes(history: &History) -> Vec<u64> {
    let calls = history.calls().iter().filter(|call| call.outcome == End::Ok && is_asked_for(history, call));
    let mut successes: Vec<u64> = calls.filter_map(|call| Some(history.end(call)?.time_ns)).collect();
    successes.sort_unstable();
    successes
}

/// Judges how much was served. `stood_still_ns`: for how long the machine stood still between the end of the last fault and that of the
/// history, in nanoseconds.
pub fn check(history: &History, limits: &Limits, stood_still_ns: u64) -> Outcome {
    let mut findings = Findings::default();
    let faults = merged(windows(history).into_iter().map(|(_, window)| window));
    let calls: Vec<&Call> = history.calls().iter().filter(|call| is_asked_for(history, call)).collect();
    let outside: Vec<&&Call> = calls.iter().filter(|call| !overlaps(history, call, &faults)).collect();
    let answered = outside.iter().filter(|call| is_answered(history, call)).count();
    let succeeded = calls.iter().filter(|call| call.outcome == End::Ok).count();
    let calm = outside.iter().filter(|call| call.outcome == End::Ok).count();
    let Outages { longest, excused } = outages(history, &calls, &faults, limits, stood_still_ns, &mut findings);
    let (served, asked) = seconds(history, &calls);
    let otherwise = if let Some(outage) = excused {
        let (outage, still) = (outage / 1_000_000, stood_still_ns / 1_000_000);
        Verdict::Unknown(format!(
            "nothing succeeded for {outage} ms, but this machine stood still for {still} ms of them"
        ))
    } else if succeeded < limits.successes {
        Verdict::Unknown(format!("only {succeeded} operations succeeded, {} are needed", limits.successes))
    // One that was late may be a tenth of them all.
    } else if outside.len() > answered + 1 && answered * 100 < outside.len() * limits.answered_percent {
        Verdict::Unknown(format!(
            "outside of faults only {answered} of {} operations were answered, {} of 100 are needed",
            outside.len(),
            limits.answered_percent
        ))
    } else if outside.len() >= TRIES && calm * 100 < outside.len() * limits.succeeded_percent {
        Verdict::Unknown(format!(
            "outside of faults only {calm} of {} operations succeeded, {} of 100 are needed: clients starved",
            outside.len(),
            limits.succeeded_percent
        ))
    } else if served * 100 < asked * limits.served_percent {
        Verdict::Unknown(format!(
            "in only {served} of {asked} seconds did anything succeed: faults left too little to judge"
        ))
    } else if let Some(kind) = never_succeeded(history) {
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
        .with("succeeded outside of faults in %", calm * 100 / outside.len().max(1))
        .with("seconds", asked)
        .with("seconds with a success", served)
        .with("longest outage after faults in ms", usize::try_from(longest / 1_000_000).unwrap_or(usize::MAX))
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

/// In how many seconds something succeeded, of those in which something was asked for.
fn seconds(history: &History, calls: &[&Call]) -> (usize, usize) {
    let second = |time_ns: u64| time_ns / 1_000_000_000;
    let asked: BTreeSet<u64> = calls.iter().map(|call| second(history.invocation(call).time_ns)).collect();
    let ended = calls.iter().filter(|call| call.outcome == End::Ok).filter_map(|call| history.end(call));
    let served: BTreeSet<u64> = ended.map(|end| second(end.time_ns)).collect();
    (served.intersection(&asked).count(), asked.len())
}

/// A kind of operation that was tried often enough, and never succeeded: whatever is promised of it was not seen.
pub fn never_succeeded(history: &History) -> Option<String> {
    let mut kinds: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for call in history.calls().iter().filter(|call| is_asked_for(history, call)) {
        let (kind, _) = crate::history::encode::action(&history.invocation(call).action);
        let (tried, succeeded) = kinds.entry(kind).or_default();
        *tried += 1;
        *succeeded += usize::from(call.outcome == End::Ok);
    }
    let never = kinds.into_iter().find(|(_, (tried, succeeded))| *tried >= TRIES && *succeeded == 0);
    never.map(|(kind, _)| kind)
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

/// Times from the end of all faults to the next success, in nanoseconds.
struct Outages {
    longest: u64,
    /// The one that is too long by what the machine stood still.
    excused: Option<u64>,
}

fn outages(
    history: &History,
    calls: &[&Call],
    faults: &[Window],
    limits: &Limits,
    stood_still_ns: u64,
    findings: &mut Findings,
) -> Outages {
    let successes = successes(history);
    let end = history.operations().last().map_or(0, |operation| operation.time_ns);
    let (mut longest, mut excused) = (0, None);
    for (i, fault) in faults.iter().enumerate() {
        // Until the next fault, which may be to blame from then on.
        let until = faults.get(i + 1).map_or(end, |next| next.from_ns);
        let next = successes.get(successes.partition_point(|at| *at < fault.to_ns)).copied();
        let back = next.unwrap_or(u64::MAX).min(until);
        let outage = back.saturating_sub(fault.to_ns);
        longest = longest.max(outage);
        let tried = calls.iter().any(|call| (fault.to_ns..back).contains(&history.invocation(call).time_ns));
        // The machine was watched after the last one.
        let is_last = i + 1 == faults.len();
        let own = if is_last { outage.saturating_sub(stood_still_ns) } else { outage };
        if own <= limits.outage_ns && outage > limits.outage_ns && tried {
            excused = Some(outage);
        } else if outage > limits.outage_ns && tried {
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
    Outages { longest, excused }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Fault, Kind, Operation, Process, Register};

    const SECOND: u64 = 1_000_000_000;

    /// One read a second, which ends as told at once; a fault in force between two times, if any.
    fn judged(seconds: u64, end: impl Fn(u64) -> (Kind, Option<&'static str>), fault: Option<(u64, u64)>) -> Outcome {
        judged_on(0, seconds, end, fault)
    }

    /// The same, on a machine that stood still for so many seconds after the fault.
    fn judged_on(
        still: u64,
        seconds: u64,
        end: impl Fn(u64) -> (Kind, Option<&'static str>),
        fault: Option<(u64, u64)>,
    ) -> Outcome {
        let read = |value| Action::Register(Register::Read { key: 1.into(), value });
        let mut operations = Vec::new();
        for second in 0..seconds {
            let phase = fault.and_then(|(from, to)| match second {
                at if at == from => Some(Phase::Start),
                at if at == to => Some(Phase::Stop),
                _ => None,
            });
            for installation in [None, Some(Installation::Installed("proof".into()))] {
                operations.extend(phase.map(|phase| {
                    let fault = Fault { name: "kill".into(), phase, target: "1".into(), installation };
                    Operation::new(Process::Nemesis, Kind::Info, second * SECOND, Action::Fault(fault))
                }));
            }
            let process = Process::Client(second);
            let (kind, refusal) = end(second);
            operations.push(Operation::new(process, Kind::Invoke, second * SECOND, read(None)));
            let ended = Operation::new(process, kind, second * SECOND + 1, read(Some(1)));
            operations.push(Operation { refusal: refusal.map(str::to_owned), ..ended });
        }
        check(&History::new(operations).unwrap(), &Limits::of(Workload::Register), still * SECOND)
    }

    #[test]
    fn refusals_are_answers_and_faults_excuse_what_they_touch() {
        let ok = |_: u64| (Kind::Ok, None);
        assert_eq!(judged(100, ok, None).verdict, Verdict::Valid);
        let half = |n: u64| if n.is_multiple_of(2) { (Kind::Ok, None) } else { (Kind::Fail, Some("it is 3")) };
        assert_eq!(judged(100, half, None).verdict, Verdict::Valid);
        let away = |n: u64| if (10..24).contains(&n) { (Kind::Info, None) } else { (Kind::Ok, None) };
        let outcome = judged(100, away, Some((10, 20)));
        assert_eq!(outcome.verdict, Verdict::Valid);
        assert_eq!(outcome.figures["longest outage after faults in ms"], 4000);
        assert!(matches!(judged(100, away, None).verdict, Verdict::Unknown(_)), "without a fault there is no excuse");
        let late = |n: u64| if n == 3 { (Kind::Info, None) } else { (Kind::Ok, None) };
        let outcome = judged(100, late, Some((6, 99)));
        assert_eq!((outcome.figures["answered outside of faults"], outcome.figures["outside of faults"]), (5, 6));
        assert_eq!(outcome.verdict, Verdict::Valid, "six operations are no share");
    }

    #[test]
    fn what_shows_too_little_is_unknown_and_what_never_comes_back_a_violation() {
        let unknown = |outcome: Outcome, why: &str| match outcome.verdict {
            Verdict::Unknown(reason) => assert!(reason.contains(why), "{reason}"),
            other => panic!("{other}"),
        };
        unknown(judged(10, |_| (Kind::Ok, None), None), "only 10 operations succeeded");
        let failing = |n: u64| if n.is_multiple_of(2) { (Kind::Ok, None) } else { (Kind::Fail, None) };
        unknown(judged(100, failing, None), "only 50 of 100 operations were answered");
        // Every one was answered.
        let refused = |n: u64| if n < 25 { (Kind::Ok, None) } else { (Kind::Fail, Some("it is 3")) };
        unknown(judged(400, refused, None), "only 25 of 400 operations succeeded");
        // Faults excuse each of these, and yet all that was judged are the first seconds.
        let hardly = |n: u64| if n < 22 { (Kind::Ok, None) } else { (Kind::Info, None) };
        unknown(judged(120, hardly, Some((22, 119))), "in only 22 of 120 seconds");
        let gone = |n: u64| if n < 30 { (Kind::Ok, None) } else { (Kind::Info, None) };
        let outcome = judged(100, gone, Some((30, 40)));
        assert!(matches!(outcome.verdict, Verdict::Violation(_)), "{}", outcome.verdict);
        assert_eq!(outcome.findings[0].kind, "outage");
    }

    #[test]
    fn a_machine_that_stands_still_shows_nothing_of_an_outage() {
        let away = |n: u64| if (30..80).contains(&n) { (Kind::Info, None) } else { (Kind::Ok, None) };
        let still = |seconds| judged_on(seconds, 100, away, Some((30, 40))).verdict;
        assert!(matches!(still(9), Verdict::Violation(_)), "31 s are left");
        match still(20) {
            Verdict::Unknown(why) => assert!(why.contains("stood still for 20000 ms"), "{why}"),
            other => panic!("{other}"),
        }
        assert_eq!(judged_on(50, 100, |_| (Kind::Ok, None), Some((30, 40))).verdict, Verdict::Valid);
    }
}
