//! Generated histories of the workload `hot`: appends that are merged and shown late are valid, and the same with one broken promise are not.

use std::collections::BTreeMap;

use lake_chaos::check::{self, Options, Verdict, judge_history};
use lake_chaos::history::{Action, History, Hot, Key, Kind, Operation, Process, Workload, file};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const NODES: usize = 2;
const STEPS: usize = 400;
const SEEDS: u64 = 24;
/// Milliseconds.
const FRESH: u64 = 1_000;

struct Sim {
    rng: StdRng,
    now_ms: u64,
    operations: Vec<Operation>,
    /// What the table has.
    there: Vec<i64>,
    /// How much of that each node knows, and of when.
    known: Vec<(usize, u64)>,
    /// Begun and not committed yet: process, number and node.
    waiting: Vec<(u64, i64, usize)>,
    next: i64,
    process: u64,
    snapshots: u64,
}

impl Sim {
    fn new(seed: u64) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            now_ms: 0,
            operations: Vec::new(),
            there: Vec::new(),
            known: vec![(0, 0); NODES],
            waiting: Vec::new(),
            next: 1,
            process: 0,
            snapshots: 0,
        }
    }

    fn event(&mut self, process: u64, kind: Kind, action: Hot, node: Option<usize>) {
        self.now_ms += 2;
        let operation = Operation::new(Process::Client(process), kind, self.now_ms * 1_000_000, Action::Hot(action));
        self.operations.push(Operation { peer: node.map(|node| node as u64), ..operation });
    }

    fn begin(&mut self) -> i64 {
        let (number, node) = (self.next, self.rng.random_range(0..NODES));
        self.next += 1;
        self.process += 1;
        self.event(self.process, Kind::Invoke, append(number), None);
        self.waiting.push((self.process, number, node));
        number
    }

    /// All that wait become one snapshot, but for some that fail or whose answers are lost.
    fn commit(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        self.snapshots += u64::from(!waiting.is_empty());
        for (process, number, node) in waiting {
            let kind = match self.rng.random_range(0..10) {
                0 => Kind::Fail,
                1 => Kind::Info,
                _ => Kind::Ok,
            };
            if kind == Kind::Ok || (kind == Kind::Info && self.rng.random_bool(0.5)) {
                self.there.push(number);
            }
            if kind == Kind::Ok {
                self.known[node] = (self.there.len(), self.now_ms);
            }
            self.event(process, kind, append(number), Some(node));
        }
    }

    fn read(&mut self, node: usize) {
        if self.now_ms - self.known[node].1 > FRESH / 2 || self.rng.random_bool(0.3) {
            self.known[node] = (self.there.len(), self.now_ms);
        }
        let whole = self.there[..self.known[node].0].to_vec();
        self.told(node, whole, BTreeMap::new());
    }

    /// A read that is answered so.
    fn told(&mut self, node: usize, whole: Vec<i64>, odd: BTreeMap<Key, i64>) {
        self.process += 1;
        let read = |whole, odd| Hot::Read { table: 0.into(), whole, odd, stale_ms: None };
        self.event(self.process, Kind::Invoke, read(None, BTreeMap::new()), None);
        self.event(self.process, Kind::Ok, read(Some(whole), odd), Some(node));
    }

    fn step(&mut self) {
        self.now_ms += self.rng.random_range(0..40);
        match self.rng.random_range(0..10) {
            0..5 => drop(self.begin()),
            5 | 6 => self.commit(),
            _ => {
                let node = self.rng.random_range(0..NODES);
                self.read(node);
            }
        }
    }

    /// An append that is acknowledged, and that every node must show by now.
    fn own(&mut self) -> i64 {
        self.commit();
        self.process += 1;
        let number = self.next;
        self.next += 1;
        self.event(self.process, Kind::Invoke, append(number), None);
        self.there.push(number);
        self.event(self.process, Kind::Ok, append(number), Some(0));
        self.now_ms += FRESH + 10;
        number
    }

    fn without(&self, number: i64) -> Vec<i64> {
        self.there.iter().copied().filter(|other| *other != number).collect()
    }

    fn run(mut self, steps: usize) -> History {
        (0..steps).for_each(|_| self.step());
        self.commit();
        self.now_ms += FRESH + 10;
        (0..NODES).for_each(|node| {
            self.known[node] = (self.there.len(), self.now_ms);
            self.read(node);
        });
        let count = |count| Hot::Snapshots { table: 0.into(), count };
        self.process += 1;
        self.event(self.process, Kind::Invoke, count(None), None);
        self.event(self.process, Kind::Ok, count(Some(self.snapshots)), Some(0));
        History::new(self.operations).unwrap()
    }
}

fn append(number: i64) -> Hot {
    Hot::Append { table: 0.into(), number }
}

type Break = fn(&mut Sim, i64);

fn odd(sim: &mut Sim, number: i64, rows: i64) {
    let whole = sim.without(number);
    sim.told(1, whole, BTreeMap::from([(number.into(), rows)]));
}

/// Broken promises, by what must be found.
const BROKEN: [(&str, Break); 7] = [
    ("half", |sim, own| odd(sim, own, 2)),
    ("twice", |sim, own| odd(sim, own, 6)),
    ("torn", |sim, own| odd(sim, own, check::hot::TORN)),
    ("stale", |sim, own| {
        let whole = sim.without(own);
        sim.told(1, whole, BTreeMap::new());
    }),
    ("lost", |sim, own| {
        sim.there.retain(|number| *number != own);
        sim.known = vec![(0, 0); NODES];
    }),
    ("node went back", |sim, own| {
        let (with, without) = (sim.there.clone(), sim.without(own));
        sim.told(1, with, BTreeMap::new());
        sim.told(1, without, BTreeMap::new());
    }),
    ("unexpected", |sim, _| {
        let whole = sim.there.iter().copied().chain([1_000_000]).collect();
        sim.told(1, whole, BTreeMap::new());
    }),
];

fn judged(history: &History) -> (Verdict, Vec<String>) {
    let outcomes = judge_history(Workload::Hot, history, &Options::default());
    let kinds = outcomes.iter().flat_map(|outcome| outcome.findings.iter().map(|finding| finding.kind.clone()));
    (check::verdict(&outcomes), kinds.collect())
}

#[test]
fn appends_that_are_merged_are_valid_and_judged_the_same_from_their_file() {
    for seed in 0..SEEDS {
        let history = Sim::new(seed).run(STEPS);
        let (verdict, found) = judged(&history);
        assert_eq!(verdict, Verdict::Valid, "seed {seed}: {found:?}");
        let mut text = Vec::new();
        history.operations().iter().for_each(|o| file::write_operation(&mut text, o).unwrap());
        let read = file::parse(std::str::from_utf8(&text).unwrap(), None).unwrap();
        assert_eq!(read, (Workload::Hot, history));
    }
}

#[test]
fn every_broken_promise_is_found_and_named() {
    for (name, break_it) in BROKEN {
        for seed in 0..SEEDS {
            let mut sim = Sim::new(seed);
            (0..10 * seed as usize).for_each(|_| sim.step());
            let own = sim.own();
            break_it(&mut sim, own);
            let (verdict, found) = judged(&sim.run(STEPS / 4));
            assert!(matches!(verdict, Verdict::Violation(_)), "{name}, seed {seed}: {verdict:?}");
            assert!(found.iter().any(|kind| kind == name), "{name}, seed {seed}: {found:?}");
        }
    }
}
