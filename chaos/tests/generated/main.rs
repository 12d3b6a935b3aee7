//! Histories with a known answer: a system that keeps its promises is valid, and the same with one fault is not.
//!
//! - [`sim`]: clients that take turns by chance on a store that is right; [`store`]: the store;
//! - [`faults`]: one broken promise each, in the midst of it;
//! - [`sql`], [`shared`], [`catalog`], [`cached`], [`hot`]: all of that for what is written through SQL;
//! - [`afterwards`]: what judges the run and not its workload.

mod afterwards;
mod cached;
mod catalog;
mod faults;
mod hot;
mod shared;
mod sim;
mod sql;
mod store;

use std::time::{Duration, Instant};

use lake_chaos::check::{self, Budget, Options, Verdict, judge_history};
use lake_chaos::history::{History, Workload, file};
use proptest::prelude::*;

use crate::faults::{FAULTS, Fault};
use crate::sim::Sim;
use crate::sql::Sql;

const STEPS: usize = 600;
/// For a search whose cost in steps is what is looked at.
const WITHIN: Duration = Duration::from_secs(600);

fn judged(workload: Workload, history: &History) -> Verdict {
    check::verdict(&judge_history(workload, history, &Options::default()))
}

/// What a history is once it was written to a file and read again.
fn read_back(history: &History) -> (Workload, History) {
    let mut text = Vec::new();
    history.operations().iter().for_each(|o| file::write_operation(&mut text, o).unwrap());
    file::parse(std::str::from_utf8(&text).unwrap(), None).unwrap()
}

/// A promise was broken, and it is told which.
#[track_caller]
fn assert_found(kind: &str, seed: u64, workload: Workload, history: &History) {
    let outcomes = judge_history(workload, history, &Options::default());
    let verdict = check::verdict(&outcomes);
    assert!(matches!(verdict, Verdict::Violation(_)), "{workload}, {kind}, seed {seed}: {verdict:?}");
    let mut found = outcomes.iter().flat_map(|outcome| &outcome.findings);
    assert!(found.any(|finding| finding.kind == kind), "{workload}, {kind}, seed {seed}: {outcomes:?}");
}

/// Breaks one promise after some steps.
fn broken(fault: &Fault, seed: u64, at: usize) {
    let mut sim = Sim::new(fault.workload, seed);
    sim.steps(at);
    (fault.inject)(&mut sim);
    let verdict = judged(fault.workload, &sim.run(STEPS - at));
    assert!(matches!(verdict, Verdict::Violation(_)), "{}, seed {seed}, after {at} steps: {verdict:?}", fault.name);
}

#[test]
fn every_broken_promise_is_found() {
    for fault in FAULTS {
        (0..8).for_each(|seed| broken(fault, seed, 37 * seed as usize));
    }
}

/// The same through SQL.
fn broken_sql(fault: &sql::Fault, seed: u64, at: usize) {
    let mut sql = Sql::new(fault.workload, seed);
    sql.steps(at);
    (fault.inject)(&mut sql);
    let verdict = judged(fault.workload, &sql.run(STEPS - at));
    assert!(matches!(verdict, Verdict::Violation(_)), "{}, seed {seed}, after {at} steps: {verdict:?}", fault.name);
}

#[test]
fn every_promise_that_is_broken_through_sql_is_found() {
    for fault in sql::FAULTS {
        (0..8).for_each(|seed| broken_sql(fault, seed, 37 * seed as usize));
    }
}

fn workloads() -> impl Strategy<Value = Workload> {
    prop::sample::select(&Workload::OF_KEYS[..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_system_that_keeps_its_promises_is_valid(workload in workloads(), seed: u64) {
        let history = Sim::new(workload, seed).run(STEPS);
        prop_assert_eq!(judged(workload, &history), Verdict::Valid);
    }

    #[test]
    fn one_broken_promise_is_found_whenever_it_is_broken(which in 0..FAULTS.len(), seed: u64, at in 0..STEPS) {
        broken(&FAULTS[which], seed, at);
    }

    #[test]
    fn what_keeps_its_promises_through_sql_is_valid(multi_table: bool, seed: u64) {
        let workload = if multi_table { Workload::MultiTable } else { Workload::Table };
        let history = Sql::new(workload, seed).run(STEPS);
        prop_assert_eq!(judged(workload, &history), Verdict::Valid);
        prop_assert_eq!(read_back(&history), (workload, history));
    }

    #[test]
    fn one_promise_broken_through_sql_is_found_whenever_it_is(which in 0..sql::FAULTS.len(), seed: u64, at in 0..STEPS) {
        broken_sql(&sql::FAULTS[which], seed, at);
    }

    #[test]
    fn what_is_written_to_a_file_is_judged_the_same(workload in workloads(), seed: u64) {
        let history = Sim::new(workload, seed).run(STEPS);
        prop_assert_eq!(read_back(&history), (workload, history));
    }
}

/// The cost of the search must not grow faster than the history: ten clients, 500 keys, some 200 operations on each.
#[test]
fn a_hundred_thousand_operations_are_judged() {
    let history = Sim::on(500, 10, Workload::Register, 1).run(300_000);
    assert!(history.calls().len() > 95_000, "{}", history.calls().len());
    let began = Instant::now();
    let outcome = check::linear::check(&history, &Budget::new(Budget::STEPS, WITHIN));
    assert_eq!(outcome.verdict, Verdict::Valid);
    println!("{} operations over 500 keys: {} ms", history.calls().len(), began.elapsed().as_millis());
}

#[test]
fn a_contradiction_among_a_hundred_thousand_operations_is_made_small() {
    let mut sim = Sim::on(500, 10, Workload::Register, 2);
    sim.steps(150_000);
    (FAULTS[0].inject)(&mut sim);
    let outcome = check::linear::check(&sim.run(150_000), &Budget::new(Budget::STEPS, WITHIN));
    assert!(matches!(outcome.verdict, Verdict::Violation(_)));
    assert_eq!(outcome.findings[0].bars.len(), 3, "{:?}", outcome.findings[0].explanation);
}

#[test]
fn twenty_thousand_transactions_are_judged() {
    let history = Sim::on(200, 10, Workload::Append, 3).run(60_000);
    assert!(history.calls().len() > 19_000, "{}", history.calls().len());
    let began = Instant::now();
    let outcome = check::append::check(&history, check::append::Model::StrictSerializable);
    assert_eq!(outcome.verdict, Verdict::Valid);
    println!("{} transactions over 200 lists: {} ms", history.calls().len(), began.elapsed().as_millis());
}
