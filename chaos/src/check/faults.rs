//! Did every fault that was asked for take effect at least once? A run without it has shown nothing about it.

use std::collections::BTreeMap;

use super::outcome::Outcome;
use super::verdict::Verdict;
use crate::history::{History, Installation, Phase};

/// Its name in results.
pub const NAME: &str = "faults";

/// Compares what was asked for with what the nemesis did.
pub fn check(history: &History, asked: &[String]) -> Outcome {
    let mut installed: BTreeMap<&str, usize> = asked.iter().map(|name| (name.as_str(), 0)).collect();
    let mut reasons: BTreeMap<&str, String> = BTreeMap::new();
    for (_, fault) in history.faults().filter(|(_, fault)| fault.phase == Phase::Start) {
        match &fault.installation {
            Some(Installation::Installed(_)) => *installed.entry(&fault.name).or_default() += 1,
            Some(Installation::Skipped(why)) => {
                reasons.insert(&fault.name, format!("skipped, because {why}"));
            }
            Some(Installation::Failed(why)) => {
                reasons.insert(&fault.name, format!("failed, because {why}"));
            }
            None => {}
        }
    }
    let missing: Vec<String> = installed
        .iter()
        .filter(|(_, times)| **times == 0)
        .map(|(name, _)| match reasons.get(name) {
            Some(why) => format!("{name} ({why})"),
            None => format!("{name} (never tried)"),
        })
        .collect();
    let verdict = match missing.as_slice() {
        [] => Verdict::Valid,
        missing => Verdict::Unknown(format!("never took effect: {}", missing.join("; "))),
    };
    installed.iter().fold(Outcome::new(NAME, verdict), |outcome, (name, times)| outcome.with(name, *times))
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
}
