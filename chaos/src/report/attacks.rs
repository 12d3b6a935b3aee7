//! What was done to the cluster, fault by fault: whether it took effect and what showed that, and how long nothing succeeded
//! once it was over.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::check::availability;
use crate::history::{History, Installation, Phase};

/// What came of beginning or ending a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Came {
    Installed,
    Skipped,
    Failed,
}

impl Came {
    /// As in results.
    pub fn word(self) -> &'static str {
        match self {
            Came::Installed => "installed",
            Came::Skipped => "skipped",
            Came::Failed => "failed",
        }
    }

    fn of(installation: &Installation) -> (Came, String) {
        match installation {
            Installation::Installed(why) => (Came::Installed, why.clone()),
            Installation::Skipped(why) => (Came::Skipped, why.clone()),
            Installation::Failed(why) => (Came::Failed, why.clone()),
        }
    }
}

/// One fault, from being tried to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attack {
    pub name: String,
    pub target: String,
    /// When it was tried, in milliseconds of the run.
    pub from_ms: u64,
    pub came: Came,
    /// What shows that it took effect, or why it did not.
    pub because: String,
    /// When it had ended; missing if it did not begin, or was in force to the end.
    pub to_ms: Option<u64>,
    /// The same of its end.
    pub end: Option<(Came, String)>,
    /// From its end to the next success, whatever else was in force then; missing if nothing succeeded any more.
    pub without_success_ms: Option<u64>,
}

/// Every fault of a history, in the order in which they were tried.
pub fn attacks(history: &History) -> Vec<Attack> {
    let ms = |time_ns: u64| time_ns / 1_000_000;
    let successes = availability::successes(history);
    let mut attacks: Vec<Attack> = Vec::new();
    let mut tried: BTreeMap<&str, u64> = BTreeMap::new();
    let mut open: BTreeMap<&str, usize> = BTreeMap::new();
    for (time_ns, fault) in history.faults() {
        let name = fault.name.as_str();
        match (fault.phase, &fault.installation) {
            (Phase::Start, None) => drop(tried.insert(name, time_ns)),
            (Phase::Start, Some(installation)) => {
                let (came, because) = Came::of(installation);
                if came == Came::Installed {
                    open.insert(name, attacks.len());
                }
                attacks.push(Attack {
                    name: fault.name.clone(),
                    target: fault.target.clone(),
                    from_ms: ms(tried.remove(name).unwrap_or(time_ns)),
                    came,
                    because,
                    to_ms: None,
                    end: None,
                    without_success_ms: None,
                });
            }
            (Phase::Stop, None) => {}
            (Phase::Stop, Some(installation)) => {
                let Some(attack) = open.remove(name).and_then(|at| attacks.get_mut(at)) else { continue };
                attack.to_ms = Some(ms(time_ns));
                attack.end = Some(Came::of(installation));
                let next = successes.get(successes.partition_point(|at| *at < time_ns));
                attack.without_success_ms = next.map(|next| ms(next - time_ns));
            }
        }
    }
    attacks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Action, Fault, Kind, Operation, Process, Register};

    const MS: u64 = 1_000_000;

    fn fault(at_ms: u64, name: &str, phase: Phase, installation: Option<Installation>) -> Operation {
        let fault = Fault { name: name.into(), phase, target: "2".into(), installation };
        Operation::new(Process::Nemesis, Kind::Info, at_ms * MS, Action::Fault(fault))
    }

    fn read(at_ms: u64, kind: Kind) -> [Operation; 2] {
        let action = |value| Action::Register(Register::Read { key: 1.into(), value });
        let process = Process::Client(at_ms);
        [
            Operation::new(process, Kind::Invoke, at_ms * MS, action(None)),
            Operation::new(process, kind, at_ms * MS + 1, action(Some(1))),
        ]
    }

    #[test]
    fn each_fault_has_what_came_of_it_and_how_long_nothing_succeeded_afterwards() {
        let installed = |why: &str| Some(Installation::Installed(why.into()));
        let mut operations = vec![
            fault(10, "kill", Phase::Start, None),
            fault(12, "kill", Phase::Start, installed("pid 7 is gone")),
            fault(15, "clock", Phase::Start, Some(Installation::Skipped("no library".into()))),
        ];
        operations.extend(read(16, Kind::Ok));
        operations.push(fault(20, "clock", Phase::Stop, Some(Installation::Skipped("it never began".into()))));
        operations.push(fault(30, "kill", Phase::Stop, None));
        operations.push(fault(40, "kill", Phase::Stop, Some(Installation::Failed("it does not serve".into()))));
        operations.extend(read(50, Kind::Fail));
        operations.extend(read(90, Kind::Ok));
        operations.push(fault(95, "slow", Phase::Start, installed("3 were late")));
        operations.push(fault(99, "slow", Phase::Stop, installed("on time again")));
        let attacks = attacks(&History::new(operations).unwrap());
        let told: Vec<_> = attacks.iter().map(|a| (a.name.as_str(), a.came, a.from_ms, a.to_ms)).collect();
        let expected = [
            ("kill", Came::Installed, 10, Some(40)),
            ("clock", Came::Skipped, 15, None),
            ("slow", Came::Installed, 95, Some(99)),
        ];
        assert_eq!(told, expected);
        assert_eq!(attacks[0].end, Some((Came::Failed, "it does not serve".into())));
        let without: Vec<_> = attacks.iter().map(|a| a.without_success_ms).collect();
        assert_eq!(without, [Some(50), None, None]);
    }
}
