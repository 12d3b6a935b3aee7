//! Which checkers judge which workload.

use super::convergence::Facts;
use super::{
    Budget, Death, Outcome, Verdict, accounts, append, availability, bank, cached, catalog, convergence, deaths,
    faults, fences, hot, idempotency, linear, lock, session, set, table, watch,
};
use crate::history::{History, Workload};

/// How a history is judged.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// What searches may cost.
    pub budget: Budget,
    /// What is expected of transactions.
    pub model: append::Model,
    /// Clocks that measure what passes were made to differ.
    pub drift: bool,
}

/// What is known of a run besides its history.
#[derive(Debug, Clone, Default)]
pub struct Run<'a> {
    /// The faults that were asked for, by name.
    pub faults: &'a [String],
    /// Peers that ended without having been told to; none if nobody would have noticed.
    pub deaths: Option<&'a [Death]>,
    /// What was seen after healing; none if the run did not get that far.
    pub convergence: Option<&'a Facts>,
    /// Why the run ended before it was done.
    pub interrupted: Option<&'a str>,
}

/// Judges what a history says, wherever it comes from.
pub fn judge_history(workload: Workload, history: &History, options: &Options) -> Vec<Outcome> {
    match workload {
        Workload::Register => vec![linear::check(history, &options.budget)],
        Workload::Set => vec![set::check(history)],
        Workload::Append => vec![append::check(history, options.model)],
        Workload::Bank => vec![bank::check(history)],
        Workload::Watch => vec![watch::check(history)],
        // What a lock guards is a register as well.
        Workload::Lock => vec![lock::check(history, options.drift), linear::check(history, &options.budget)],
        Workload::Idempotency => vec![idempotency::check(history, options.drift)],
        Workload::Session => vec![session::check(history)],
        Workload::Table => vec![table::check(history)],
        Workload::MultiTable => vec![accounts::check(history)],
        Workload::Catalog => vec![catalog::check(history)],
        Workload::Cached => vec![cached::check(history)],
        Workload::Hot => vec![hot::check(history)],
        Workload::Upkeep => vec![hot::check_upkeep(history), fences::check(history)],
    }
}

/// Judges a run: its history, and whether it has shown enough.
pub fn judge_run(workload: Workload, history: &History, run: &Run<'_>, options: &Options) -> Vec<Outcome> {
    let mut outcomes = judge_history(workload, history, options);
    let stood_still_ns = run.convergence.map_or(0, |facts| facts.stood_still_ms.saturating_mul(1_000_000));
    outcomes.push(availability::check(history, &availability::Limits::of(workload), stood_still_ns));
    outcomes.push(faults::check(history, run.faults));
    outcomes.extend(run.deaths.map(deaths::check));
    outcomes.push(match run.convergence {
        Some(facts) => convergence::check(facts),
        None => Outcome::new(convergence::NAME, Verdict::Unknown("the cluster was not looked at after healing".into())),
    });
    if let Some(why) = run.interrupted {
        outcomes.push(Outcome::new("run", Verdict::Unknown(format!("it ended early: {why}"))));
    }
    outcomes
}

/// The worst of several verdicts; unknown if there are none.
pub fn verdict(outcomes: &[Outcome]) -> Verdict {
    let named = |outcome: &Outcome| match &outcome.verdict {
        Verdict::Valid => Verdict::Valid,
        Verdict::Unknown(why) => Verdict::Unknown(format!("{}: {why}", outcome.checker)),
        Verdict::Violation(what) => Verdict::Violation(format!("{}: {what}", outcome.checker)),
    };
    let verdicts = outcomes.iter().map(named);
    verdicts.reduce(Verdict::worse).unwrap_or_else(|| Verdict::Unknown("nothing was judged".into()))
}
