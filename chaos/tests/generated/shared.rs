//! Generated histories of the rows that clients of the workload `table` share: statements that are each made on the newest version, some of
//! which conflict or are never answered, are valid, and the same with one broken promise are not.

use std::collections::BTreeMap;

use lake_chaos::check::Verdict;
use lake_chaos::history::{Action, Change, History, Kind, Operation, Process, Snapshot, Table, Workload, Write};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{assert_found, judged, read_back};

const NODES: usize = 2;
const ROWS: i64 = 2;
const STEPS: usize = 400;
const SEEDS: u64 = 24;
/// Milliseconds.
const FRESH: u64 = 1_000;

type Rows = BTreeMap<i64, Vec<Vec<i64>>>;

struct Sim {
    rng: StdRng,
    now_ms: u64,
    operations: Vec<Operation>,
    /// The newest last; each but the first has its place as its sequence number.
    versions: Vec<Rows>,
    /// Which of them each node knows, and of when.
    known: Vec<(usize, u64)>,
    /// Begun, and not done: process, what, and node.
    waiting: Vec<(u64, Table, usize)>,
    /// Never answered, and not done yet.
    late: Vec<Table>,
    next: i64,
    process: u64,
}

impl Sim {
    fn new(seed: u64) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            now_ms: 0,
            operations: Vec::new(),
            versions: vec![Rows::new()],
            known: vec![(0, 0); NODES],
            waiting: Vec::new(),
            late: Vec::new(),
            next: 1,
            process: 0,
        }
    }

    fn event(&mut self, process: u64, kind: Kind, action: Table, sequence: Option<u64>, node: Option<usize>) {
        self.now_ms += 2;
        let operation = Operation::new(Process::Client(process), kind, self.now_ms * 1_000_000, Action::Table(action));
        self.operations.push(Operation { revision: sequence, peer: node.map(|node| node as u64), ..operation });
    }

    fn begin(&mut self, change: Table, node: usize) {
        self.process += 1;
        self.event(self.process, Kind::Invoke, change.clone(), None, None);
        self.waiting.push((self.process, change, node));
    }

    fn push(&mut self, row: i64) -> Table {
        self.next += 1;
        Table::Push { table: 0.into(), row, number: self.next }
    }

    fn any(&mut self) -> Table {
        let row = self.rng.random_range(0..ROWS);
        match self.rng.random_bool(0.5) {
            true => self.push(row),
            false => turn(Table::LAMPS + row, self.rng.random_bool(0.5)),
        }
    }

    /// Makes a change on the newest version, or finds that there is nothing to be changed.
    fn apply(&mut self, change: &Table) -> bool {
        let mut rows = self.newest().clone();
        let lamps = rows.range(Table::LAMPS..).count();
        let is_changed = match change {
            Table::Push { row, number, .. } => {
                let lists = rows.entry(*row).or_insert_with(|| vec![Vec::new()]);
                lists[0].push(*number);
                true
            }
            Table::Turn { row, on: true, .. } => rows.insert(*row, vec![Vec::new()]).is_none(),
            Table::Turn { row, .. } => lamps > 1 && rows.remove(row).is_some(),
            _ => false,
        };
        if is_changed {
            self.versions.push(rows);
        }
        is_changed
    }

    fn newest(&self) -> &Rows {
        self.versions.last().unwrap()
    }

    fn end(&mut self, (process, change, node): (u64, Table, usize)) {
        let kind = match self.rng.random_range(0..10) {
            0 => Kind::Fail,
            1 => Kind::Info,
            _ if self.apply(&change) => Kind::Ok,
            _ => Kind::Fail,
        };
        match kind {
            Kind::Info if self.rng.random_bool(0.5) => self.late.push(change.clone()),
            Kind::Ok => self.known[node] = (self.versions.len() - 1, self.now_ms),
            _ => {}
        }
        self.event(process, kind, change, None, Some(node));
    }

    fn read(&mut self, node: usize) {
        if self.now_ms - self.known[node].1 > FRESH / 2 || self.rng.random_bool(0.3) {
            self.known[node] = (self.versions.len() - 1, self.now_ms);
        }
        let at = self.known[node].0;
        self.told(self.versions[at].clone(), at, node);
    }

    /// A read that is answered so.
    fn told(&mut self, rows: Rows, sequence: usize, node: usize) {
        let read = |rows| Table::Shared { table: 0.into(), rows, stale_ms: None };
        self.process += 1;
        self.event(self.process, Kind::Invoke, read(None), None, None);
        self.event(self.process, Kind::Ok, read(Some(rows)), (sequence > 0).then_some(sequence as u64), Some(node));
    }

    fn step(&mut self) {
        self.now_ms += self.rng.random_range(0..60);
        match self.rng.random_range(0..10) {
            0..4 => {
                let (change, node) = (self.any(), self.rng.random_range(0..NODES));
                self.begin(change, node);
            }
            4..7 if !self.waiting.is_empty() => {
                let at = self.rng.random_range(0..self.waiting.len());
                let ended = self.waiting.swap_remove(at);
                self.end(ended);
            }
            7 if !self.late.is_empty() => {
                let change = self.late.remove(0);
                self.apply(&change);
            }
            _ => {
                let node = self.rng.random_range(0..NODES);
                self.read(node);
            }
        }
    }

    /// A change that is acknowledged.
    fn done(&mut self, change: Table) {
        self.process += 1;
        self.event(self.process, Kind::Invoke, change.clone(), None, None);
        self.apply(&change);
        self.known[0] = (self.versions.len() - 1, self.now_ms);
        self.event(self.process, Kind::Ok, change, None, Some(0));
    }

    /// Two numbers that are acknowledged one after the other, and a lamp that is on; every node must show all that.
    fn own(&mut self) -> (i64, i64) {
        std::mem::take(&mut self.waiting).into_iter().for_each(|waiting| self.end(waiting));
        self.late.clear();
        // Whether one was on is as chance has it: it is on now.
        if !self.newest().contains_key(&Table::LAMPS) {
            self.done(turn(Table::LAMPS, true));
        }
        let pushes = [self.push(0), self.push(0)];
        pushes.into_iter().for_each(|push| self.done(push));
        self.now_ms += FRESH + 10;
        self.read(0);
        (self.next - 1, self.next)
    }

    /// A read of the newest version with something else in it.
    fn differs(&mut self, change: impl FnOnce(&mut Rows)) {
        let mut rows = self.newest().clone();
        change(&mut rows);
        self.told(rows, self.versions.len() - 1, 1);
    }

    fn run(mut self, steps: usize) -> History {
        (0..steps).for_each(|_| self.step());
        std::mem::take(&mut self.waiting).into_iter().for_each(|waiting| self.end(waiting));
        self.now_ms += FRESH + 10;
        (0..NODES).for_each(|node| {
            self.known[node] = (self.versions.len() - 1, self.now_ms);
            self.read(node);
        });
        self.others();
        History::new(self.operations).unwrap()
    }

    /// What the workload does besides, without which it is not judged.
    fn others(&mut self) {
        let write = Write { change: Change::Insert, table: 9.into(), id: 1, number: 1, once: false };
        let rows = |rows, snapshot| Table::Read { table: 9.into(), rows, snapshot, stale_ms: None };
        let line = |snapshots| Table::Line { table: 9.into(), snapshots };
        let there = BTreeMap::from([(1, Table::values(1))]);
        let snapshots = vec![Snapshot { sequence: 1, id: 901, parent: None, number: None }];
        for (asked, answer, sequence) in [
            (Table::Write(write.clone()), Table::Write(write), None),
            (rows(None, None), rows(Some(there), Some(901)), Some(1)),
            (line(None), line(Some(snapshots)), None),
        ] {
            self.process += 1;
            self.event(self.process, Kind::Invoke, asked, None, None);
            self.event(self.process, Kind::Ok, answer, sequence, Some(0));
        }
    }
}

fn turn(row: i64, on: bool) -> Table {
    Table::Turn { table: 0.into(), row, on }
}

fn list(rows: &mut Rows) -> &mut Vec<i64> {
    &mut rows.get_mut(&0).unwrap()[0]
}

type Break = fn(&mut Sim, (i64, i64));

/// Broken promises, by what must be found.
const BROKEN: [(&str, Break); 12] = [
    ("twice", |sim, _| {
        sim.differs(|rows| {
            let again = list(rows).clone();
            rows.get_mut(&0).unwrap().push(again);
        });
    }),
    ("twice", |sim, (_, newer)| sim.differs(|rows| list(rows).push(newer))),
    ("unexpected", |sim, _| sim.differs(|rows| list(rows).push(1_000_000))),
    ("unexpected", |sim, _| {
        let failed = sim.push(0);
        let Table::Push { number, .. } = failed else { unreachable!() };
        sim.process += 1;
        sim.event(sim.process, Kind::Invoke, failed.clone(), None, None);
        sim.event(sim.process, Kind::Fail, failed, None, Some(0));
        sim.differs(|rows| list(rows).push(number));
    }),
    ("unexpected", |sim, _| sim.differs(|rows| drop(rows.insert(Table::LAMPS + 50, vec![Vec::new()])))),
    ("lost update", |sim, (older, _)| sim.differs(|rows| list(rows).retain(|number| *number != older))),
    ("out of order", |sim, _| {
        sim.differs(|rows| {
            let last = list(rows).len() - 1;
            list(rows).swap(last - 1, last);
        });
    }),
    ("other beginning", |sim, _| {
        let (rows, at) = (sim.newest().clone(), sim.versions.len() - 1);
        sim.told(rows.clone(), at, 1);
        let mut other = rows;
        list(&mut other).remove(0);
        sim.told(other, at + 1, 1);
    }),
    ("stale", |sim, (older, _)| sim.differs(|rows| list(rows).retain(|number| *number < older))),
    ("lost", |sim, (older, _)| {
        let mut rows = sim.newest().clone();
        list(&mut rows).retain(|number| *number < older);
        sim.versions.push(rows);
        sim.known = vec![(sim.versions.len() - 1, sim.now_ms); NODES];
        sim.differs(|_| ());
    }),
    ("none on", |sim, _| sim.differs(|rows| rows.retain(|row, _| *row < Table::LAMPS))),
    ("impossible", |sim, _| {
        sim.differs(|_| ());
        sim.operations.last_mut().unwrap().error = Some("it has a row that cannot be there".to_owned());
    }),
];

#[test]
fn statements_one_after_the_other_are_valid_and_judged_the_same_from_their_file() {
    for seed in 0..SEEDS {
        let history = Sim::new(seed).run(STEPS);
        assert_eq!(judged(Workload::Table, &history), Verdict::Valid, "seed {seed}");
        assert_eq!(read_back(&history), (Workload::Table, history));
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
            assert_found(name, seed, Workload::Table, &sim.run(STEPS / 4));
        }
    }
}

/// Each was made on what the other had not changed yet: the last two lamps go.
#[test]
fn two_that_have_each_seen_another_lamp_are_found() {
    for seed in 0..SEEDS {
        let mut sim = Sim::new(seed);
        (0..10 * seed as usize).for_each(|_| sim.step());
        sim.own();
        let both = [0, 1].map(|n| turn(Table::LAMPS + n, false));
        let mut rows = sim.newest().clone();
        rows.retain(|row, _| *row < Table::LAMPS);
        sim.versions.push(rows);
        for change in both {
            sim.process += 1;
            sim.event(sim.process, Kind::Invoke, change.clone(), None, None);
            sim.event(sim.process, Kind::Ok, change, None, Some(0));
        }
        sim.known[0] = (sim.versions.len() - 1, sim.now_ms);
        sim.read(0);
        assert_found("none on", seed, Workload::Table, &sim.run(STEPS / 4));
    }
}

/// Rows that were changed and never read afterwards show nothing.
#[test]
fn shared_rows_that_nobody_reads_are_unknown() {
    let mut sim = Sim::new(1);
    let push = sim.push(0);
    sim.done(push);
    sim.others();
    let verdict = judged(Workload::Table, &History::new(sim.operations).unwrap());
    assert!(matches!(&verdict, Verdict::Unknown(why) if why.contains("share")), "{verdict:?}");
}
