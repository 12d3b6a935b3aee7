//! Generated histories of the workload `cached`: nodes that answer from what they know and say how old it is are valid, and the same
//! with one broken promise are not.

use std::collections::BTreeMap;

use lake_chaos::check::Verdict;
use lake_chaos::check::cached::MISSING;
use lake_chaos::history::{Action, Cached, History, Key, Kind, Operation, Process, Workload};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{assert_found, judged, read_back};

const TABLES: i64 = 3;
const NODES: usize = 3;
const STEPS: usize = 800;
const SEEDS: u64 = 24;
/// Milliseconds.
const FRESH: u64 = 1_000;

/// What a node knows, and of when.
struct Node {
    values: BTreeMap<i64, i64>,
    at_ms: u64,
    is_cut: bool,
}

struct Sim {
    rng: StdRng,
    now_ms: u64,
    operations: Vec<Operation>,
    nodes: Vec<Node>,
    /// What there is.
    values: BTreeMap<i64, i64>,
    tried: BTreeMap<i64, i64>,
    process: u64,
    /// The probability that a node whose turn it is is cut off.
    cuts: f64,
}

impl Sim {
    fn new(seed: u64) -> Self {
        let first = || (0..TABLES).map(|table| (table, 0)).collect::<BTreeMap<_, _>>();
        let node = |_| Node { values: first(), at_ms: 0, is_cut: false };
        Self {
            rng: StdRng::seed_from_u64(seed),
            now_ms: 0,
            operations: Vec::new(),
            nodes: (0..NODES).map(node).collect(),
            values: first(),
            tried: first(),
            process: 0,
            cuts: 0.3,
        }
    }

    /// Something that takes a few milliseconds and has its effect meanwhile.
    fn event(&mut self, kind: Kind, action: Cached, node: Option<usize>) {
        self.now_ms += 3;
        let operation =
            Operation::new(Process::Client(self.process), kind, self.now_ms * 1_000_000, Action::Cached(action));
        self.operations.push(Operation { peer: node.map(|node| node as u64), ..operation });
    }

    fn learn(&mut self, at: usize) {
        self.nodes[at].values = self.values.clone();
        self.nodes[at].at_ms = self.now_ms;
    }

    fn write(&mut self) {
        self.process += 1;
        let (at, table) = (self.rng.random_range(0..NODES), self.rng.random_range(0..TABLES));
        let number = self.tried[&table] + 1;
        self.tried.insert(table, number);
        let action = Cached::Write { table: table.into(), number };
        self.event(Kind::Invoke, action.clone(), None);
        if self.nodes[at].is_cut {
            self.event(Kind::Fail, action, Some(at));
            return;
        }
        let (is_lost, is_made) = (self.rng.random_bool(0.1), self.rng.random_bool(0.5));
        if !is_lost || is_made {
            self.values.insert(table, number);
        }
        if is_lost {
            self.event(Kind::Info, action, Some(at));
        } else {
            self.nodes[at].values.insert(table, number);
            self.event(Kind::Ok, action, Some(at));
        }
    }

    fn read(&mut self, at: usize) {
        self.process += 1;
        self.event(Kind::Invoke, Cached::Read { values: None, stale_ms: None }, None);
        // Nobody may show what is older than this, unless it says so.
        let age = self.now_ms - self.nodes[at].at_ms;
        if !self.nodes[at].is_cut && (age > FRESH / 2 || self.rng.random_bool(0.2)) {
            self.learn(at);
        }
        let age = self.now_ms - self.nodes[at].at_ms;
        let stale_ms = (age > FRESH).then_some(age);
        let values: BTreeMap<Key, i64> = self.nodes[at].values.iter().map(|(table, n)| ((*table).into(), *n)).collect();
        self.event(Kind::Ok, Cached::Read { values: Some(values), stale_ms }, Some(at));
    }

    fn step(&mut self) {
        self.now_ms += self.rng.random_range(0..60);
        match self.rng.random_range(0..10) {
            0..4 => self.write(),
            4 => {
                let at = self.rng.random_range(0..NODES);
                self.nodes[at].is_cut = self.rng.random_bool(self.cuts);
            }
            _ => {
                let at = self.rng.random_range(0..NODES);
                self.read(at);
            }
        }
    }

    fn run(mut self, steps: usize) -> History {
        (0..steps).for_each(|_| self.step());
        History::new(self.operations).unwrap()
    }

    /// All nodes know everything, and a table has got another value since: its number, and when.
    fn written_since(&mut self) -> i64 {
        for at in 0..NODES {
            self.nodes[at].is_cut = false;
            self.learn(at);
            self.read(at);
        }
        self.process += 1;
        let number = self.tried[&0] + 1;
        self.tried.insert(0, number);
        self.values.insert(0, number);
        self.nodes[0].values.insert(0, number);
        let action = Cached::Write { table: 0.into(), number };
        self.event(Kind::Invoke, action.clone(), None);
        self.event(Kind::Ok, action, Some(0));
        number
    }

    /// A read of the first table that is answered so.
    fn told(&mut self, at: usize, value: i64, stale_ms: Option<u64>) {
        self.process += 1;
        self.event(Kind::Invoke, Cached::Read { values: None, stale_ms: None }, None);
        let values = BTreeMap::from([(0.into(), value)]);
        self.event(Kind::Ok, Cached::Read { values: Some(values), stale_ms }, Some(at));
    }
}

type Break = fn(&mut Sim);

/// Broken promises, by what must be found.
const BROKEN: [(&str, Break); 9] = [
    ("older than allowed", |sim| {
        let number = sim.written_since();
        sim.now_ms += FRESH + 10;
        sim.told(1, number - 1, None);
    }),
    ("older than allowed", |sim| {
        let number = sim.written_since();
        sim.told(0, number - 1, None);
    }),
    ("older than told", |sim| {
        let number = sim.written_since();
        sim.now_ms += 5 * FRESH;
        sim.told(1, number - 1, Some(3 * FRESH));
    }),
    ("younger than told", |sim| {
        let number = sim.written_since();
        sim.now_ms += FRESH / 2;
        sim.told(1, number - 1, Some(2 * FRESH));
    }),
    ("younger than told", |sim| {
        let number = sim.written_since();
        sim.now_ms += 2 * FRESH;
        sim.told(1, number - 1, Some(2 * FRESH));
        // It grows as time passes.
        sim.now_ms += FRESH;
        sim.told(1, number - 1, Some(4 * FRESH));
    }),
    ("went back", |sim| {
        let number = sim.written_since();
        sim.told(1, number, None);
        sim.told(1, number - 1, None);
    }),
    ("unexpected", |sim| {
        let number = sim.written_since();
        sim.told(1, number + 1_000, None);
    }),
    ("unexpected", |sim| sim.told(1, MISSING, None)),
    ("impossible", |sim| {
        let number = sim.written_since();
        sim.told(1, number, None);
        sim.operations.last_mut().unwrap().error = Some("it has a row that cannot be there".to_owned());
    }),
];

#[test]
fn nodes_that_say_how_old_their_answers_are_are_valid() {
    for seed in 0..SEEDS {
        let history = Sim::new(seed).run(STEPS);
        assert_eq!(judged(Workload::Cached, &history), Verdict::Valid, "seed {seed}");
        assert_eq!(read_back(&history), (Workload::Cached, history));
    }
}

#[test]
fn nodes_that_were_never_cut_off_show_nothing() {
    for seed in 0..SEEDS {
        let verdict = judged(Workload::Cached, &Sim { cuts: 0.0, ..Sim::new(seed) }.run(STEPS));
        assert!(matches!(&verdict, Verdict::Unknown(why) if why.contains("cut off")), "seed {seed}: {verdict:?}");
    }
}

#[test]
fn every_broken_promise_is_found_and_named() {
    for (name, break_it) in BROKEN {
        for seed in 0..SEEDS {
            let mut sim = Sim::new(seed);
            (0..1 + 20 * seed as usize).for_each(|_| sim.step());
            // There is something to judge, whatever is broken.
            sim.written_since();
            break_it(&mut sim);
            assert_found(name, seed, Workload::Cached, &sim.run(STEPS / 4));
        }
    }
}
