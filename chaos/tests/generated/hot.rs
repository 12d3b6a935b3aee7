//! Generated histories of the workloads `hot` and `upkeep`: appends that are merged and shown late are valid, also while files are packed and
//! snapshots expire and workers look after a table in turn, and the same with one broken promise are not.

use std::collections::BTreeMap;

use lake_chaos::check::Verdict;
use lake_chaos::check::hot::{EXPIRED, GONE, RETAINED, TORN};
use lake_chaos::history::{Action, Chore, Fenced, History, Hot, Key, Kind, Operation, Process, Worked, Workload};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{assert_found, judged, read_back};

const NODES: usize = 2;
const STEPS: usize = 400;
const SEEDS: u64 = 24;
/// The table that workers look after by themselves.
const TENDED: i64 = 1;
/// Milliseconds.
const FRESH: u64 = 1_000;
const KEPT: u64 = 12_000;

struct Sim {
    workload: Workload,
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
    /// Of these, what no chore has been about.
    unpacked: u64,
    unexpired: u64,
    /// A chore that never finds anything to do.
    idle: Option<Chore>,
    /// The fence of the shard, and the snapshots that workers have made, the oldest of which expire.
    fence: u64,
    fenced: Vec<Fenced>,
    /// What workers have done without one.
    worked: Vec<Worked>,
}

impl Sim {
    fn new(workload: Workload, seed: u64) -> Self {
        Self {
            workload,
            rng: StdRng::seed_from_u64(seed),
            now_ms: 0,
            operations: Vec::new(),
            there: Vec::new(),
            known: vec![(0, 0); NODES],
            waiting: Vec::new(),
            next: 1,
            process: 0,
            snapshots: 0,
            unpacked: 0,
            unexpired: 0,
            idle: None,
            fence: 1,
            fenced: Vec::new(),
            worked: Vec::new(),
        }
    }

    fn event(&mut self, process: u64, kind: Kind, action: Hot, node: Option<usize>) {
        self.now_ms += 2;
        let action = if self.workload == Workload::Upkeep { Action::Upkeep(action) } else { Action::Hot(action) };
        let operation = Operation::new(Process::Client(process), kind, self.now_ms * 1_000_000, action);
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
        let made = u64::from(!waiting.is_empty());
        self.snapshots += made;
        self.unpacked += made;
        self.unexpired += made;
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

    /// A chore. One that finds nothing to do is refused, and changes nothing that anybody reads either way.
    fn keep_up(&mut self, what: Chore) {
        let work = match what {
            Chore::Pack => &mut self.unpacked,
            Chore::Expire => &mut self.unexpired,
            Chore::Sweep | Chore::Purge => return,
        };
        let is_done = *work > 1 && self.idle != Some(what);
        if is_done {
            *work = 1;
        }
        self.process += 1;
        let action = Hot::Chore { table: 0.into(), what };
        self.event(self.process, Kind::Invoke, action.clone(), None);
        self.event(self.process, if is_done { Kind::Ok } else { Kind::Fail }, action, Some(0));
    }

    /// A worker packs the table that it looks after: the one that has the shard, which may have been given to it just now.
    fn tend(&mut self) {
        self.fence += u64::from(self.rng.random_bool(0.2));
        self.tend_under(self.fence, self.fence % NODES as u64);
        self.work_under(self.fence, self.fence % NODES as u64, 0);
        // The one before has not heard of it yet, and goes on with something that is refused.
        if let Some(before) = self.worked.iter().rev().find(|chore| chore.fence < self.fence).cloned() {
            let began_ms = self.now_ms;
            self.worked.push(Worked { began_ms, acted_ms: None, ended_ms: Some(began_ms + 50), ..before });
        }
        if self.fenced.len() > 20 {
            self.fenced.remove(0);
        }
    }

    fn tend_under(&mut self, fence: u64, worker: u64) {
        let sequence = self.fenced.last().map_or(1, |last| last.sequence + self.rng.random_range(1..4));
        self.fenced.push(Fenced { sequence, shard: 7, fence, worker: format!("query-{worker}") });
    }

    /// Snapshots expire, the change of which was sent that long after it was begun.
    fn work_under(&mut self, fence: u64, worker: u64, acts_after_ms: u64) {
        let (began_ms, acted_ms) = (self.now_ms, self.now_ms + acts_after_ms);
        self.worked.push(Worked {
            shard: 7,
            fence,
            worker: format!("query-{worker}"),
            what: "expire_snapshots".to_owned(),
            began_ms,
            acted_ms: Some(acted_ms),
            // Its answer came late.
            ended_ms: Some(acted_ms + 100),
        });
    }

    fn read_chores(&mut self) {
        self.process += 1;
        let worked = |chores| Hot::Worked { table: TENDED.into(), chores };
        self.event(self.process, Kind::Invoke, worked(None), None);
        self.event(self.process, Kind::Ok, worked(Some(self.worked.clone())), None);
    }

    fn read_fences(&mut self) {
        self.process += 1;
        let fences = |line| Hot::Fences { table: TENDED.into(), line };
        self.event(self.process, Kind::Invoke, fences(None), None);
        self.event(self.process, Kind::Ok, fences(Some(self.fenced.clone())), Some(0));
    }

    /// A read that fails.
    fn fails(&mut self, error: &str) {
        self.process += 1;
        let read = Hot::Read { table: 0.into(), whole: None, odd: BTreeMap::new(), stale_ms: None };
        self.event(self.process, Kind::Invoke, read.clone(), None);
        self.event(self.process, Kind::Fail, read, Some(1));
        self.operations.last_mut().unwrap().error = Some(error.to_owned());
    }

    /// A read of what was there after an append.
    fn looks_back(&mut self, number: i64, answer: Result<Vec<i64>, &str>) {
        self.process += 1;
        let read = |whole| Hot::Past { table: 0.into(), number, kept_ms: KEPT, whole, odd: BTreeMap::new() };
        self.event(self.process, Kind::Invoke, read(None), None);
        match answer {
            Ok(whole) => self.event(self.process, Kind::Ok, read(Some(whole)), Some(0)),
            Err(error) => {
                self.event(self.process, Kind::Fail, read(None), Some(0));
                self.operations.last_mut().unwrap().error = Some(format!("{error}: so it is said"));
            }
        }
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
            7 if self.workload == Workload::Upkeep => match self.rng.random_range(0..7) {
                0 => self.keep_up(Chore::Pack),
                1 => self.keep_up(Chore::Expire),
                2 => self.tend(),
                3 => self.read_fences(),
                4 => {
                    let own = self.own();
                    self.looks_back(own, Ok(self.there.clone()));
                }
                5 => {
                    let own = self.own();
                    self.now_ms += KEPT;
                    self.looks_back(own, Err(EXPIRED));
                }
                _ => self.fails("query node 2 accepts no connection"),
            },
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
        if self.workload == Workload::Upkeep {
            [Chore::Pack, Chore::Expire].into_iter().for_each(|what| self.keep_up(what));
            self.tend();
            self.read_fences();
            self.read_chores();
        }
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

/// Broken promises, by what must be found. All of them may be of either workload.
const BROKEN: [(&str, Break); 9] = [
    ("half", |sim, own| odd(sim, own, 2)),
    ("twice", |sim, own| odd(sim, own, 6)),
    ("torn", |sim, own| odd(sim, own, TORN)),
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
    ("impossible", |sim, _| {
        let whole = sim.there.clone();
        sim.told(1, whole, BTreeMap::new());
        sim.operations.last_mut().unwrap().error = Some("it has a row that cannot be there".to_owned());
    }),
    ("file gone", |sim, _| {
        // Its node knows all there is, so that nothing of it may have expired.
        sim.known[1] = (sim.there.len(), sim.now_ms);
        sim.read(1);
        sim.fails(&format!("{GONE}: reading /w/chaos/hot_0/data/1.parquet"));
    }),
];

/// What late reads must not find.
const PASSED: [(&str, Break); 4] = [
    ("expired early", |sim, own| sim.looks_back(own, Err(EXPIRED))),
    ("file gone", |sim, own| sim.looks_back(own, Err(GONE))),
    ("lost", |sim, own| {
        let whole = sim.without(own);
        sim.looks_back(own, Ok(whole));
    }),
    ("unexpected", |sim, own| {
        let whole = sim.there.iter().copied().chain([1_000_000]).collect();
        sim.looks_back(own, Ok(whole));
    }),
];

/// What workers must not do.
const UNFENCED: [(&str, Break); 5] = [
    ("fence fell", |sim, _| {
        sim.fence += 1;
        sim.tend_under(sim.fence, 1);
        sim.tend_under(sim.fence - 1, 0);
    }),
    ("two workers", |sim, _| {
        sim.fence += 1;
        sim.tend_under(sim.fence, 0);
        sim.tend_under(sim.fence, 1);
    }),
    ("went on", |sim, _| {
        sim.fence += 2;
        sim.work_under(sim.fence - 1, (sim.fence - 1) % NODES as u64, 20);
        sim.now_ms += 10;
        sim.work_under(sim.fence, sim.fence % NODES as u64, 5);
    }),
    ("two workers", |sim, _| {
        sim.fence += 1;
        sim.work_under(sim.fence, 0, 0);
        sim.work_under(sim.fence, 1, 0);
    }),
    ("two snapshots", |sim, _| {
        sim.tend();
        sim.read_fences();
        sim.fence += 1;
        let last = sim.fenced.len() - 1;
        sim.fenced[last].fence = sim.fence;
    }),
];

const BOTH: [Workload; 2] = [Workload::Hot, Workload::Upkeep];

#[test]
fn appends_that_are_merged_are_valid_and_judged_the_same_from_their_file() {
    for (workload, seed) in BOTH.into_iter().flat_map(|workload| (0..SEEDS).map(move |seed| (workload, seed))) {
        let history = Sim::new(workload, seed).run(STEPS);
        assert_eq!(judged(workload, &history), Verdict::Valid, "{workload}, seed {seed}");
        assert_eq!(read_back(&history), (workload, history));
    }
}

#[test]
fn every_broken_promise_is_found_and_named() {
    for (workload, (name, break_it)) in BOTH.into_iter().flat_map(|workload| BROKEN.map(|broken| (workload, broken))) {
        for seed in 0..SEEDS {
            let mut sim = Sim::new(workload, seed);
            (0..10 * seed as usize).for_each(|_| sim.step());
            let own = sim.own();
            break_it(&mut sim, own);
            assert_found(name, seed, workload, &sim.run(STEPS / 4));
        }
    }
}

#[test]
fn what_expires_too_early_is_found_and_named() {
    for (name, break_it) in PASSED {
        for seed in 0..SEEDS {
            let mut sim = Sim::new(Workload::Upkeep, seed);
            (0..10 * seed as usize).for_each(|_| sim.step());
            let own = sim.own();
            break_it(&mut sim, own);
            assert_found(name, seed, Workload::Upkeep, &sim.run(STEPS / 4));
        }
    }
}

#[test]
fn upkeep_by_two_workers_is_found_and_named() {
    for (name, break_it) in UNFENCED {
        for seed in 0..SEEDS {
            let mut sim = Sim::new(Workload::Upkeep, seed);
            (0..10 * seed as usize).for_each(|_| sim.step());
            break_it(&mut sim, 0);
            sim.read_fences();
            assert_found(name, seed, Workload::Upkeep, &sim.run(STEPS / 4));
        }
    }
}

/// A node that is cut off goes on with a version that others let expire.
#[test]
fn a_version_that_may_have_expired_need_not_be_there() {
    let gone = format!("{GONE}: reading /w/chaos/hot_0/data/1.parquet");
    for seed in 0..SEEDS {
        let mut sim = Sim::new(Workload::Upkeep, seed);
        (0..10 * seed as usize).for_each(|_| sim.step());
        for _ in 0..RETAINED {
            sim.own();
        }
        sim.fails(&gone);
        assert_eq!(judged(Workload::Upkeep, &sim.run(STEPS)), Verdict::Valid, "seed {seed}");
    }
    // Once it has shown what there is, it is past that.
    let mut sim = Sim::new(Workload::Upkeep, 1);
    for _ in 0..RETAINED {
        sim.own();
    }
    let whole = sim.there.clone();
    sim.told(1, whole, BTreeMap::new());
    sim.fails(&gone);
    assert_found("file gone", 1, Workload::Upkeep, &sim.run(STEPS));
}

#[test]
fn upkeep_that_finds_nothing_to_do_shows_nothing() {
    for what in [Chore::Pack, Chore::Expire] {
        for seed in 0..SEEDS {
            let sim = Sim { idle: Some(what), ..Sim::new(Workload::Upkeep, seed) };
            let verdict = judged(Workload::Upkeep, &sim.run(STEPS));
            let is_told = matches!(&verdict, Verdict::Unknown(why) if why.contains("packed"));
            assert!(is_told, "{what:?}, seed {seed}: {verdict:?}");
        }
    }
}
