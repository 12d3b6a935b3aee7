//! What came of a simulation: the first broken invariant, or what the checkers say of the clients' history.

use super::super::invariants::Broken;
use super::super::plan::Fault;
use super::super::report::Report;
use super::Simulation;
use crate::check::{self, Options, Outcome, Verdict, availability, judge_history};
use crate::history::{History, Kind, Operation};
use crate::run::ledger::Looked;

/// Operations that must succeed, if clients begin so many: with fewer nothing is shown.
const LEAST_SUCCESSES: u64 = 20;
/// Checkers' sentences that are told.
const MAX_SENTENCES: usize = 12;

impl Simulation {
    /// What is reported of it.
    ///
    /// # Errors
    /// The simulation's own: a history that makes no sense.
    pub(super) fn conclude(mut self, ran: Result<(), Broken>) -> Result<Report, String> {
        let (recorder, read) = {
            let mut brought = self.brought.lock();
            (brought.recorder.take(), brought.read.take())
        };
        let tally = recorder.as_ref().map(|recorder| recorder.tally()).unwrap_or_default();
        let operations = recorder.map(|recorder| recorder.take().0).unwrap_or_default();
        let begun = operations.iter().filter(|operation| operation.kind == Kind::Invoke).count() as u64;
        let mut findings = Vec::new();
        let (verdict, broke) = match ran {
            Err(Broken { invariant, what }) => {
                (Verdict::Violation(format!("{invariant}: {what}")), Some(invariant.to_owned()))
            }
            Ok(()) => self.judge(operations, read, tally.ok, &mut findings)?,
        };
        self.line(&format!("-- {verdict}"));
        Ok(Report {
            verdict,
            broke,
            findings,
            faults: self.done,
            effects: self.effects,
            tail: self.trace.tail(),
            lines: self.trace.lines(),
            hash: format!("{:016x}", self.trace.hash()),
            operations: begun,
            succeeded: tally.ok,
            applied: self.invariants.applied(),
            simulated_ms: self.sim.elapsed().as_millis() as u64,
            plan: self.plan,
        })
    }

    /// What the history says of it.
    fn judge(
        &self,
        operations: Vec<Operation>,
        read: Option<Result<Looked, String>>,
        succeeded: u64,
        findings: &mut Vec<String>,
    ) -> Result<(Verdict, Option<String>), String> {
        let looked_for = match read {
            Some(Ok(looked)) if looked.not_found.is_empty() => looked.looked_for,
            Some(Ok(looked)) => {
                findings.extend(looked.not_found);
                let what = "acknowledged: something that was acknowledged is not there at the end".to_owned();
                return Ok((Verdict::Violation(what), Some("acknowledged".to_owned())));
            }
            Some(Err(e)) => {
                let what = format!("recovery: not everything could be read at the end: {e}");
                return Ok((Verdict::Violation(what), Some("recovery".to_owned())));
            }
            None => return Err("nothing was read at the end".to_owned()),
        };
        let history = History::new(operations).map_err(|e| format!("the history: {e}"))?;
        let drift = self.plan.has(|fault| matches!(fault, Fault::Clock { .. }));
        let options = Options { drift, ..Options::default() };
        let outcomes = judge_history(self.plan.workload, &history, &options);
        let is_broken = |outcome: &&Outcome| matches!(outcome.verdict, Verdict::Violation(_));
        let broke = outcomes.iter().find(is_broken).map(|outcome| outcome.checker.clone());
        for finding in outcomes.iter().flat_map(|outcome| &outcome.findings) {
            findings.extend(finding.explanation.iter().map(|sentence| format!("{}: {sentence}", finding.kind)));
        }
        findings.truncate(MAX_SENTENCES);
        // The first reason why it shows too little is told.
        let mut reasons = Vec::new();
        if !self.without_effect.is_empty() {
            reasons.push(format!("faults took no effect: {}", self.without_effect.join("; ")));
        }
        let needed = LEAST_SUCCESSES.min(self.plan.operations);
        if succeeded < needed {
            reasons.push(format!("only {succeeded} operations succeeded, {needed} are needed"));
        }
        if looked_for == 0 {
            reasons.push("nothing that was acknowledged could be looked for at the end".to_owned());
        }
        reasons.extend(availability::never_succeeded(&history).map(|kind| format!("no :{kind} ever succeeded")));
        let shown = reasons.into_iter().next().map_or(Verdict::Valid, Verdict::Unknown);
        let verdict = shown.worse(check::verdict(&outcomes));
        Ok((verdict, broke))
    }
}
