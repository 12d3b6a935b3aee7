//! Did every fault that was asked for take effect at least once, and end as it should? A run without it has shown nothing
//! about it. Some faults show their effect only in their end: a peer that was held down until it needs a snapshot has not
//! needed one unless it comes back with it.

use std::collections::BTreeMap;

use super::outcome::Outcome;
use super::verdict::Verdict;
use crate::history::{History, Installation, Phase};

/// Its name in results.
pub const NAME: &str = "faults";

/// What came of all faults of one name.
#[derive(Default)]
struct Tried {
    /// Which began with effect, and ended as they should.
    complete: usize,
    /// One has begun with effect, and has not ended yet.
    in_force: bool,
    /// Why the last that is not complete is not.
    why: Option<String>,
}

/// Compares what was asked for with what the nemesis did.
pub fn check(history: &History, asked: &[String]) -> Outcome {
    let mut all: BTreeMap<&str, Tried> = asked.iter().map(|name| (name.as_str(), Tried::default())).collect();
    for (_, fault) in history.faults() {
        let Some(installation) = &fault.installation else { continue };
        let tried = all.entry(&fault.name).or_default();
        let because = |what: &str, why: &str| Some(format!("{what}, because {why}"));
        match (fault.phase, installation) {
            (Phase::Start, Installation::Installed(_)) => tried.in_force = true,
            (Phase::Start, Installation::Skipped(why)) => tried.why = because("skipped", why),
            (Phase::Start, Installation::Failed(why)) => tried.why = because("failed", why),
            (Phase::Stop, Installation::Installed(_)) => {
                tried.complete += usize::from(std::mem::take(&mut tried.in_force));
            }
            (Phase::Stop, Installation::Skipped(why) | Installation::Failed(why)) => {
                if std::mem::take(&mut tried.in_force) {
                    tried.why = because("it began, and its end failed", why);
                }
            }
        }
    }
    // A history may end under a fault.
    for tried in all.values_mut() {
        tried.complete += usize::from(std::mem::take(&mut tried.in_force));
    }
    let missing: Vec<String> = all
        .iter()
        .filter(|(_, tried)| tried.complete == 0)
        .map(|(name, tried)| format!("{name} ({})", tried.why.as_deref().unwrap_or("never tried")))
        .collect();
    let verdict = match missing.as_slice() {
        [] => Verdict::Valid,
        missing => Verdict::Unknown(format!("never took effect: {}", missing.join("; "))),
    };
    all.iter().fold(Outcome::new(NAME, verdict), |outcome, (name, tried)| outcome.with(name, tried.complete))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Action, Fault, Kind, Operation, Process};

    fn verdict(asked: &[&str], done: &[(&str, Phase, Installation)]) -> Verdict {
        let operations = done.iter().map(|(name, phase, installation)| {
            let fault = Fault {
                name: name.to_string(),
                phase: *phase,
                target: "1".into(),
                installation: Some(installation.clone()),
            };
            Operation::new(Process::Nemesis, Kind::Info, 0, Action::Fault(fault))
        });
        let asked: Vec<String> = asked.iter().map(ToString::to_string).collect();
        check(&History::new(operations.collect()).unwrap(), &asked).verdict
    }

    #[test]
    fn one_effect_of_each_is_enough() {
        let proof = || Installation::Installed("pid 7 is gone".into());
        let failed = || Installation::Failed("no such pid".into());
        assert_eq!(verdict(&[], &[]), Verdict::Valid);
        assert_eq!(
            verdict(&["kill"], &[("kill", Phase::Start, failed()), ("kill", Phase::Start, proof())]),
            Verdict::Valid
        );
    }

    #[test]
    fn a_fault_without_effect_makes_the_run_unknown() {
        let skipped = Installation::Skipped("libfaketime is not there".into());
        let done = [("clock", Phase::Start, skipped), ("kill", Phase::Stop, Installation::Installed(String::new()))];
        let verdict = verdict(&["clock", "kill"], &done);
        let expected = "never took effect: clock (skipped, because libfaketime is not there); kill (never tried)";
        assert_eq!(verdict, Verdict::Unknown(expected.into()));
    }

    #[test]
    fn a_fault_that_did_not_end_as_it_should_shows_nothing() {
        let proof = || Installation::Installed("it is down".into());
        let no_snapshot = || Installation::Failed("its snapshot covers 7".into());
        let once = [("snapshot", Phase::Start, proof()), ("snapshot", Phase::Stop, no_snapshot())];
        let expected = "never took effect: snapshot (it began, and its end failed, because its snapshot covers 7)";
        assert_eq!(verdict(&["snapshot"], &once), Verdict::Unknown(expected.into()));
        let again = [("snapshot", Phase::Start, proof()), ("snapshot", Phase::Stop, proof())];
        assert_eq!(verdict(&["snapshot"], &[&once[..], &again].concat()), Verdict::Valid);
        assert_eq!(
            verdict(&["snapshot-one"], &again),
            Verdict::Unknown("never took effect: snapshot-one (never tried)".into())
        );
    }
}
