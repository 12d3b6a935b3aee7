//! The plan of a run: which fault, when, for how long. A function of the seed, so that the same seed makes the same plan.
//!
//! Faults follow each other with quiet between them, in which the cluster is to recover; now and then one begins before the
//! one before it has ended. All that were asked for come in turn before one comes again, so that a short run has them all.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::kind::Requested;

/// Faults that use up spare peers, in one run.
pub const MAX_SPARE_PEERS: u64 = 6;
/// The first fault begins after this much of a run, so that there is something to lose.
const FIRST_AFTER: Duration = Duration::from_millis(1500);
/// How long a fault lasts.
const LASTS_MS: std::ops::Range<u64> = 1_500..6_000;
/// How long it is quiet between two.
const QUIET_MS: std::ops::Range<u64> = 1_500..4_000;
/// The probability that a fault begins before the one before it has ended.
const OVERLAP: f64 = 0.2;
/// The last fault ends so long before the end of the run.
const CALM_END: Duration = Duration::from_millis(1000);

/// One fault of the plan. Times are since the run began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Index into what was asked for.
    pub which: usize,
    pub begins: Duration,
    pub ends: Duration,
}

/// The plan of a run that takes `time`.
pub fn plan(requested: &[Requested], time: Duration, seed: u64) -> Vec<Planned> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut plan: Vec<Planned> = Vec::new();
    let mut turn: Vec<usize> = Vec::new();
    let mut spares = 0;
    let mut at = FIRST_AFTER;
    // When the fault before has ended and it has been quiet for a while.
    let mut quiet_at = at;
    let mut stood_alone = false;
    let last_end = time.saturating_sub(CALM_END);
    while !requested.is_empty() {
        if turn.is_empty() {
            let affordable = |which: &usize| spares + requested[*which].kind.spare_peers() <= MAX_SPARE_PEERS;
            turn = (0..requested.len()).filter(affordable).collect();
            turn.shuffle(&mut rng);
        }
        let Some(which) = turn.pop() else { break };
        let kind = requested[which].kind;
        if spares + kind.spare_peers() > MAX_SPARE_PEERS {
            continue;
        }
        spares += kind.spare_peers();
        if kind.stands_alone() || stood_alone {
            at = at.max(quiet_at);
        }
        stood_alone = kind.stands_alone();
        if at >= last_end {
            break;
        }
        let lasts = if kind.is_momentary() { Duration::ZERO } else { millis(&mut rng, LASTS_MS) };
        let ends = (at + lasts).min(last_end);
        plan.push(Planned { which, begins: at, ends });
        quiet_at = ends.max(quiet_at) + millis(&mut rng, QUIET_MS);
        let overlaps = rng.random_bool(OVERLAP) && requested.len() > 1;
        at = if overlaps { at + (ends - at) / 2 } else { quiet_at };
    }
    // One fault of a kind at a time, whatever each is done to.
    for n in 0..plan.len() {
        let (begins, kind) = (plan[n].begins, requested[plan[n].which].kind);
        for earlier in &mut plan[..n] {
            if requested[earlier.which].kind == kind {
                earlier.ends = earlier.ends.min(begins);
            }
        }
    }
    plan
}

fn millis(rng: &mut StdRng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(rng.random_range(range))
}

#[cfg(test)]
mod tests {
    use super::super::kind::Kind;
    use super::*;

    fn requested() -> Vec<Requested> {
        Kind::ALL.map(Requested::any).to_vec()
    }

    #[test]
    fn the_same_seed_makes_the_same_plan() {
        let time = Duration::from_secs(300);
        assert_eq!(plan(&requested(), time, 7), plan(&requested(), time, 7));
        assert_ne!(plan(&requested(), time, 7), plan(&requested(), time, 8));
    }

    #[test]
    fn all_come_in_turn_and_end_in_time() {
        for seed in 0..200 {
            for time in [10, 60, 600] {
                let time = Duration::from_secs(time);
                let requested = requested();
                let plan = plan(&requested, time, seed);
                assert!(!plan.is_empty());
                let first: std::collections::HashSet<_> = plan.iter().take(requested.len()).map(|p| p.which).collect();
                if plan.len() >= requested.len() {
                    assert_eq!(first.len(), requested.len());
                }
                for (n, planned) in plan.iter().enumerate() {
                    assert!(planned.begins <= planned.ends && planned.ends <= time);
                    let before = plan[..n].iter().filter(|p| p.which == planned.which);
                    assert!(before.into_iter().all(|p| p.ends <= planned.begins));
                }
                let used: u64 = plan.iter().map(|p| requested[p.which].kind.spare_peers()).sum();
                assert!(used <= MAX_SPARE_PEERS);
            }
        }
    }

    #[test]
    fn two_faults_of_a_kind_are_not_in_force_at_once() {
        let requested = ["kill:leader", "kill:all", "slow"].map(|word| word.parse::<Requested>().unwrap());
        for seed in 0..200 {
            let plan = plan(&requested, Duration::from_secs(120), seed);
            for (n, planned) in plan.iter().enumerate() {
                let kind = requested[planned.which].kind;
                let mut before = plan[..n].iter().filter(|p| requested[p.which].kind == kind);
                assert!(before.all(|p| p.ends <= planned.begins), "seed {seed}");
            }
        }
    }

    #[test]
    fn nothing_asked_for_is_nothing_planned() {
        assert!(plan(&[], Duration::from_secs(60), 1).is_empty());
    }
}
