//! Makes a failing plan smaller: fewer faults, fewer operations, fewer clients, as long as it still fails in the same way.
//!
//! Faults are removed as in delta debugging: halves first, then quarters, down to one at a time. Every attempt is a whole
//! simulation, so their number is bounded.

use super::plan::Plan;

/// What a simulation of a plan came to: the promise it broke, and how many operations its clients had begun.
pub struct Tried<T> {
    pub broke: Option<String>,
    pub operations: u64,
    pub result: T,
}

/// A plan that still fails.
#[derive(Debug)]
pub struct Smaller<T> {
    pub plan: Plan,
    pub result: T,
    /// Simulations that it took.
    pub attempts: u32,
}

/// Looks for a smaller plan, in so many attempts. `None` if none was found that still breaks `promise`.
pub fn minimise<T>(
    plan: &Plan,
    promise: &str,
    operations: u64,
    attempts: u32,
    mut attempt: impl FnMut(&Plan) -> Option<Tried<T>>,
) -> Option<Smaller<T>> {
    let mut search = Search { promise, left: attempts, attempts, best: None, operations };
    let mut plan = plan.clone();
    search.faults(&mut plan, &mut attempt);
    search.operations(&mut plan, &mut attempt);
    search.clients(&mut plan, &mut attempt);
    // With fewer operations, fewer faults may do.
    search.faults(&mut plan, &mut attempt);
    search.best
}

struct Search<'a, T> {
    promise: &'a str,
    left: u32,
    attempts: u32,
    best: Option<Smaller<T>>,
    /// Of the smallest plan so far.
    operations: u64,
}

impl<T> Search<'_, T> {
    /// Whether this plan fails in the same way; then it is the best so far.
    fn fails(&mut self, plan: &Plan, attempt: &mut impl FnMut(&Plan) -> Option<Tried<T>>) -> bool {
        let Some(left) = self.left.checked_sub(1) else { return false };
        self.left = left;
        let Some(tried) = attempt(plan) else {
            self.left = 0;
            return false;
        };
        if tried.broke.as_deref() != Some(self.promise) {
            return false;
        }
        self.operations = tried.operations;
        self.best = Some(Smaller { plan: plan.clone(), result: tried.result, attempts: self.attempts - self.left });
        true
    }

    fn faults(&mut self, plan: &mut Plan, attempt: &mut impl FnMut(&Plan) -> Option<Tried<T>>) {
        let mut size = plan.faults.len();
        while size > 0 && self.left > 0 {
            let mut at = 0;
            while at < plan.faults.len() && self.left > 0 {
                let mut without = plan.clone();
                without.faults.drain(at..(at + size).min(plan.faults.len()));
                if self.fails(&without, attempt) {
                    *plan = without;
                } else {
                    at += size;
                }
            }
            size = if size == 1 { 0 } else { size.div_ceil(2) };
        }
    }

    fn operations(&mut self, plan: &mut Plan, attempt: &mut impl FnMut(&Plan) -> Option<Tried<T>>) {
        let mut low = 0;
        let mut high = self.operations.min(plan.operations);
        while low < high && self.left > 0 {
            let operations = low + (high - low) / 2;
            let fewer = Plan { operations, ..plan.clone() };
            if self.fails(&fewer, attempt) {
                *plan = fewer;
                high = operations.min(self.operations);
            } else {
                low = operations + 1;
            }
        }
    }

    fn clients(&mut self, plan: &mut Plan, attempt: &mut impl FnMut(&Plan) -> Option<Tried<T>>) {
        for clients in 1..plan.clients {
            let fewer = Plan { clients, ..plan.clone() };
            if self.fails(&fewer, attempt) {
                *plan = fewer;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::history::Workload;
    use crate::sim::plan::{Fault, Profile};

    fn plan() -> Plan {
        let plans = (0..).map(|seed| Plan::draw(seed, Profile::ALL, &Workload::OF_KEYS, Duration::from_secs(20)));
        let fits = |plan: &Plan| plan.faults.len() > 8 && plan.has(|f| matches!(f, Fault::Transfer));
        plans.into_iter().find(fits).unwrap()
    }

    /// Fails with a handover, if there are 17 operations.
    fn attempt(plan: &Plan) -> Option<Tried<()>> {
        let fails = plan.has(|fault| matches!(fault, Fault::Transfer)) && plan.operations >= 17;
        let broke = fails.then(|| "p".to_owned());
        Some(Tried { broke, operations: plan.operations.min(500), result: () })
    }

    #[test]
    fn only_what_it_takes_is_left() {
        let smaller = minimise(&plan(), "p", 500, 200, attempt).unwrap();
        let plan = smaller.plan;
        assert_eq!((plan.faults.len(), plan.operations, plan.clients), (1, 17, 1), "{plan:?}");
        assert!(matches!(plan.faults[0].fault, Fault::Transfer));
    }

    #[test]
    fn attempts_are_bounded_and_another_failure_is_none() {
        let mut attempts = 0;
        let mut counted = |plan: &Plan| {
            attempts += 1;
            attempt(plan)
        };
        minimise(&plan(), "p", 500, 5, &mut counted);
        assert!(attempts <= 5);
        assert!(minimise(&plan(), "another", 500, 50, attempt).is_none());
        assert!(minimise::<()>(&plan(), "p", 500, 50, |_| None).is_none(), "no time is left");
    }
}
