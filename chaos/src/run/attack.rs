//! Carries out the plan: begins and ends faults when they are due, one after the other, and writes down what came of each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::recorder::Recorder;
use crate::history::{Fault, Installation, Phase};
use crate::nemesis::kind::Requested;
use crate::nemesis::schedule::Planned;
use crate::nemesis::{Done, Nemesis};

/// How long beginning or ending one fault may take. Its own waits are shorter.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// The faults in force, for people. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct InForce(Arc<Mutex<BTreeMap<usize, String>>>);

impl InForce {
    /// Their names.
    pub fn names(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    fn set(&self, which: usize, name: Option<String>) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match name {
            Some(name) => names.insert(which, name),
            None => names.remove(&which),
        };
    }
}

/// When a fault begins or ends: the order of what is to be done.
fn steps(plan: &[Planned]) -> Vec<(Duration, usize, Phase)> {
    let mut steps: Vec<_> = plan
        .iter()
        .enumerate()
        .flat_map(|(n, planned)| [(planned.begins, n, Phase::Start), (planned.ends, n, Phase::Stop)])
        .collect();
    // What ends goes before what begins at the same time; a fault begins before it ends.
    steps.sort_by_key(|(at, n, phase)| (*at, *n, *phase == Phase::Stop));
    steps
}

/// Begins and ends faults until the plan is done or `stop` says so. Whatever was begun is ended.
pub async fn attack<F: Sync + 'static>(
    field: &F,
    mut nemeses: Vec<Box<dyn Nemesis<F>>>,
    requested: &[Requested],
    plan: &[Planned],
    seed: u64,
    (recorder, in_force): (&Recorder, &InForce),
    stop: &CancellationToken,
) {
    let started = Instant::now();
    let mut rng = StdRng::seed_from_u64(seed);
    let mut begun: BTreeMap<usize, usize> = BTreeMap::new();
    for (at, n, phase) in steps(plan) {
        let which = plan[n].which;
        let due = async {
            tokio::select! {
                biased;
                () = stop.cancelled() => false,
                () = sleep_until(started + at) => true,
            }
        };
        if !due.await {
            break;
        }
        let name = &requested[which].label();
        let nemesis = &mut nemeses[which];
        match phase {
            Phase::Start => {
                begun.insert(which, n);
                note(recorder, name, Phase::Start, "", None);
                let done = within(nemesis.start(field, &mut rng)).await;
                if matches!(done.installation, Installation::Installed(_)) {
                    in_force.set(which, Some(format!("{name} ({})", done.target)));
                }
                note(recorder, name, Phase::Start, &done.target.clone(), Some(done));
            }
            // One that was late has taken its place.
            Phase::Stop if begun.get(&which) == Some(&n) => {
                begun.remove(&which);
                end(field, name, nemesis.as_mut(), recorder).await;
                in_force.set(which, None);
            }
            Phase::Stop => {}
        }
    }
    for which in begun.into_keys() {
        end(field, &requested[which].label(), nemeses[which].as_mut(), recorder).await;
        in_force.set(which, None);
    }
}

async fn end<F: Sync + 'static>(field: &F, name: &str, nemesis: &mut dyn Nemesis<F>, recorder: &Recorder) {
    note(recorder, name, Phase::Stop, "", None);
    let done = within(nemesis.stop(field)).await;
    note(recorder, name, Phase::Stop, &done.target.clone(), Some(done));
}

async fn within(step: impl Future<Output = Done>) -> Done {
    timeout(STEP_TIMEOUT, step).await.unwrap_or_else(|_| Done {
        target: "?".to_owned(),
        installation: Installation::Failed(format!("not done within {} s", STEP_TIMEOUT.as_secs())),
    })
}

fn note(recorder: &Recorder, name: &str, phase: Phase, target: &str, done: Option<Done>) {
    let installation = done.map(|done| done.installation);
    match &installation {
        Some(Installation::Failed(why)) => tracing::warn!(fault = name, ?phase, target, "failed: {why}"),
        Some(Installation::Skipped(why)) => tracing::warn!(fault = name, ?phase, target, "skipped: {why}"),
        Some(Installation::Installed(proof)) => tracing::info!(fault = name, ?phase, target, "{proof}"),
        None => {}
    }
    recorder.fault(Fault { name: name.to_owned(), phase, target: target.to_owned(), installation });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_in_time_and_a_fault_begins_before_it_ends() {
        let planned = |which, begins, ends| Planned {
            which,
            begins: Duration::from_secs(begins),
            ends: Duration::from_secs(ends),
        };
        let steps = steps(&[planned(0, 1, 5), planned(1, 3, 3), planned(0, 5, 8)]);
        let words: Vec<String> = steps.iter().map(|(_, n, phase)| format!("{phase:?} {n}")).collect();
        assert_eq!(words, ["Start 0", "Start 1", "Stop 1", "Stop 0", "Start 2", "Stop 2"]);
    }
}
