//! Did every peer and query node live until it was told to end? One that panics, crashes or gives up by itself has broken the promise that
//! faults of others do not take a sound peer down; its last words are shown. What was damaged on purpose may give up.
//!
//! One that a signal ended that only others send (SIGKILL, SIGTERM, ...) was ended from outside: by a machine without
//! memory, or by somebody. That is no fault of its own, and the run has not shown what it was to show.

use serde::{Deserialize, Serialize};

use super::outcome::{Finding, Findings, Outcome};
use super::verdict::Verdict;
use crate::process::Role;

/// Its name in results.
pub const NAME: &str = "peers";
/// SIGHUP, SIGINT, SIGKILL, SIGTERM: what a process does not do to itself.
const FROM_OUTSIDE: [i32; 4] = [1, 2, 9, 15];

/// A process that ended without having been told to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Death {
    pub peer: u64,
    /// What it was: the number is a peer's or a query node's.
    #[serde(default)]
    pub role: Role,
    /// When, in the history's time.
    pub time_ns: u64,
    /// Exit code or signal, in words.
    pub how: String,
    pub signal: Option<i32>,
    /// The end of its log.
    pub last_lines: Vec<String>,
    /// Why it may: what had been done to it.
    pub excused: Option<String>,
}

impl Death {
    /// In one sentence.
    pub fn told(&self) -> String {
        let at = self.time_ns as f64 / 1e9;
        match &self.excused {
            None => format!("{} {} at {at:.1} s, without having been told to", self.named(), self.how),
            Some(why) => format!("{} {} at {at:.1} s, as it may: {why}", self.named(), self.how),
        }
    }

    fn named(&self) -> String {
        match self.role {
            Role::Metasrv => format!("peer {}", self.peer),
            Role::Query => format!("query node {}", self.peer),
        }
    }

    fn finding(&self, kind: &str) -> Finding {
        let mut finding = Finding::new(kind, self.told(), Vec::new());
        if !self.last_lines.is_empty() {
            finding.explanation.push(format!("The end of its log (logs/{}-{}.log):", self.role, self.peer));
            finding.explanation.extend(self.last_lines.iter().cloned());
        }
        finding
    }
}

/// Judges all deaths of a run.
pub fn check(deaths: &[Death]) -> Outcome {
    let mut findings = Findings::default();
    let unexcused = || deaths.iter().filter(|death| death.excused.is_none());
    let from_outside = |death: &&Death| death.signal.is_some_and(|signal| FROM_OUTSIDE.contains(&signal));
    for death in unexcused().filter(|death| !from_outside(death)) {
        findings.add("ended by itself", || death.finding("ended by itself"));
    }
    let ended: Vec<&Death> = unexcused().filter(from_outside).collect();
    let otherwise = match ended.first() {
        None => Verdict::Valid,
        Some(first) => Verdict::Unknown(format!("{}: something else ended it", first.told())),
    };
    let mut outcome = findings.conclude(NAME, otherwise);
    let kept = super::outcome::MAX_FINDINGS.saturating_sub(outcome.findings.len());
    outcome.findings.extend(ended.iter().take(kept).map(|death| death.finding("ended from outside")));
    let excused = deaths.len() - unexcused().count();
    outcome.with("deaths", unexcused().count()).with("excused deaths", excused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn death(signal: Option<i32>, excused: Option<&str>) -> Death {
        let how = signal.map_or("ended with exit code 101".to_owned(), |n| format!("was killed by signal {n}"));
        let last_lines = vec!["thread 'main' panicked".to_owned()];
        Death {
            peer: 2,
            role: Role::Metasrv,
            time_ns: 3_500_000_000,
            how,
            signal,
            last_lines,
            excused: excused.map(str::to_owned),
        }
    }

    #[test]
    fn a_peer_that_dies_by_itself_is_a_violation_with_its_last_words() {
        for signal in [None, Some(6), Some(11)] {
            let outcome = check(&[death(signal, None)]);
            assert!(matches!(&outcome.verdict, Verdict::Violation(what) if what.contains("at 3.5 s")), "{outcome:?}");
            assert!(outcome.findings[0].explanation.iter().any(|line| line.contains("panicked")), "{outcome:?}");
        }
    }

    #[test]
    fn a_query_node_is_told_from_a_peer() {
        let death = Death { role: Role::Query, ..death(Some(6), None) };
        let outcome = check(&[death]);
        assert!(
            matches!(&outcome.verdict, Verdict::Violation(what) if what.starts_with("query node 2 ")),
            "{outcome:?}"
        );
        assert!(outcome.findings[0].explanation.iter().any(|line| line.contains("logs/query-2.log")), "{outcome:?}");
    }

    #[test]
    fn one_that_was_ended_from_outside_makes_the_run_unknown() {
        let outcome = check(&[death(Some(9), None)]);
        assert!(matches!(outcome.verdict, Verdict::Unknown(_)), "{outcome:?}");
        assert_eq!(outcome.findings[0].kind, "ended from outside");
        assert!(matches!(check(&[death(Some(9), None), death(None, None)]).verdict, Verdict::Violation(_)));
    }

    #[test]
    fn what_was_damaged_may_give_up() {
        let outcome = check(&[death(None, Some("a bit was flipped"))]);
        assert_eq!((outcome.verdict, outcome.figures["excused deaths"]), (Verdict::Valid, 1));
        assert_eq!(check(&[]).verdict, Verdict::Valid);
    }
}
