//! Clients that take turns by chance: each invokes something, has it take effect, and ends it; sometimes it never learns
//! the outcome, and what it asked for takes effect late or never.

use std::collections::BTreeMap;

use lake_chaos::history::{
    Action, Append, Bank, History, Idempotency, Key, Kind, Lock, Operation, Process, Register, Session, Set, Watch,
    Workload,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::store::{Answer, Store};

const CLIENTS: usize = 5;
const WATCHERS: u64 = 2;
/// Of every workload but where [`Sim::on`] says otherwise.
const KEYS: i64 = 4;

/// Keys that no client touches, so that nothing in doubt can excuse what is found there.
pub const QUIET: [i64; 2] = [1000, 1001];

/// Where a client is.
enum Stage {
    Idle,
    Invoked(Action),
    Answered(Answer, Action),
}

struct Client {
    process: u64,
    stage: Stage,
    /// Of the lock workload: the lock it believes to hold.
    held: Option<(Key, u64)>,
}

struct Watcher {
    process: u64,
    position: Option<u64>,
    is_open: bool,
}

/// A run under way.
pub struct Sim {
    pub workload: Workload,
    pub store: Store,
    pub rng: StdRng,
    operations: Vec<Operation>,
    clients: Vec<Client>,
    watchers: Vec<Watcher>,
    /// Asked for by clients that never learned the outcome, and not done yet.
    late: Vec<Action>,
    next_process: u64,
    next_value: i64,
    keys: i64,
}

impl Sim {
    /// A few clients on a few keys.
    pub fn new(workload: Workload, seed: u64) -> Sim {
        Sim::on(KEYS, CLIENTS, workload, seed)
    }

    pub fn on(keys: i64, clients: usize, workload: Workload, seed: u64) -> Sim {
        let mut sim = Sim {
            workload,
            store: Store::default(),
            rng: StdRng::seed_from_u64(seed),
            operations: Vec::new(),
            clients: Vec::new(),
            watchers: Vec::new(),
            late: Vec::new(),
            next_process: 0,
            next_value: 0,
            keys,
        };
        for _ in 0..clients {
            let process = sim.process();
            sim.clients.push(Client { process, stage: Stage::Idle, held: None });
        }
        match workload {
            Workload::Watch => {
                for _ in 0..WATCHERS {
                    let process = sim.process();
                    sim.watchers.push(Watcher { process, position: None, is_open: false });
                }
            }
            Workload::Bank => {
                // The last two are left alone by all clients.
                let balances = (0..keys).chain(QUIET).map(|key| (Key::from(key), 100)).collect();
                sim.honest(Action::Bank(Bank::Open { balances }));
            }
            _ => {}
        }
        sim
    }

    /// Takes so many turns, reads everything, and gives the history.
    pub fn run(mut self, steps: usize) -> History {
        self.steps(steps);
        self.finish();
        History::new(self.operations).expect("a simulation is well formed")
    }

    pub fn steps(&mut self, steps: usize) {
        (0..steps).for_each(|_| self.step());
    }

    /// A number that no other call of this gives.
    pub fn value(&mut self) -> i64 {
        self.next_value += 1;
        self.next_value
    }

    pub fn key(&mut self) -> Key {
        Key::from(self.rng.random_range(0..self.keys))
    }

    /// A process that does nothing else.
    pub fn process(&mut self) -> u64 {
        self.next_process += 1;
        self.next_process
    }

    /// A call of a new client that ends at once, as the store answers it.
    pub fn honest(&mut self, action: Action) -> Action {
        match self.store.apply(&action) {
            Answer::Done(answer, revision) => {
                self.told(action, answer.clone(), revision);
                answer
            }
            Answer::Refused => panic!("refused: {action:?}"),
        }
    }

    /// A call of a new client that ends at once, with any answer.
    pub fn told(&mut self, asked: Action, answer: Action, revision: Option<u64>) {
        let process = self.process();
        self.event(process, Kind::Invoke, asked, None);
        self.event(process, Kind::Ok, answer, revision);
    }

    pub fn event(&mut self, process: u64, kind: Kind, action: Action, revision: Option<u64>) {
        let time_ns = self.operations.len() as u64 * 1_000_000;
        let operation = Operation::new(Process::Client(process), kind, time_ns, action);
        self.operations.push(Operation { index: self.operations.len() as u64, revision, ..operation });
    }

    /// What a watcher is given next: a transaction, or a mark of progress.
    pub fn watched(&mut self, watcher: u64, changes: BTreeMap<Key, Option<i64>>, revision: u64) {
        let process = self.watchers[watcher as usize].process;
        let next = |changes| Action::Watch(Watch::Next { watcher, changes });
        self.event(process, Kind::Invoke, next(None), None);
        self.event(process, Kind::Ok, next(Some(changes)), Some(revision));
        self.watchers[watcher as usize].position = Some(revision);
    }

    /// Has a watcher see everything so far.
    pub fn catch_up(&mut self, watcher: u64) {
        let behind = |sim: &Sim| sim.watchers[watcher as usize].position.is_none_or(|at| at < sim.store.revision);
        while behind(self) || !self.watchers[watcher as usize].is_open {
            self.step_watcher(watcher);
        }
    }

    fn step(&mut self) {
        if !self.late.is_empty() && self.rng.random_bool(0.05) {
            let at = self.rng.random_range(0..self.late.len());
            let action = self.late.swap_remove(at);
            self.store.apply(&action);
            return;
        }
        let turn = self.rng.random_range(0..self.clients.len() + self.watchers.len());
        match turn.checked_sub(self.clients.len()) {
            None => self.step_client(turn),
            Some(watcher) => self.step_watcher(watcher as u64),
        }
    }

    fn step_client(&mut self, at: usize) {
        let process = self.clients[at].process;
        match std::mem::replace(&mut self.clients[at].stage, Stage::Idle) {
            Stage::Idle => {
                let action = self.choose(at);
                self.event(process, Kind::Invoke, action.clone(), None);
                self.clients[at].stage = Stage::Invoked(action);
            }
            Stage::Invoked(action) if self.rng.random_bool(0.05) => {
                self.lose(at, action.clone());
                if self.rng.random_bool(0.5) {
                    self.late.push(action);
                }
            }
            Stage::Invoked(action) => {
                let answer = self.store.apply(&action);
                self.clients[at].stage = Stage::Answered(answer, action);
            }
            Stage::Answered(_, action) if self.rng.random_bool(0.05) => self.lose(at, action),
            Stage::Answered(Answer::Refused, action) => {
                self.event(process, Kind::Fail, action, None);
                self.clients[at].held = None;
            }
            Stage::Answered(Answer::Done(answer, revision), _) => {
                match &answer {
                    Action::Lock(Lock::Acquire { lock, fence: Some(fence) }) => {
                        self.clients[at].held = Some((lock.clone(), *fence));
                    }
                    Action::Lock(Lock::Release { .. }) => self.clients[at].held = None,
                    _ => {}
                }
                self.event(process, Kind::Ok, answer, revision);
            }
        }
    }

    fn lose(&mut self, at: usize, action: Action) {
        self.event(self.clients[at].process, Kind::Info, action, None);
        self.clients[at].process = self.process();
        self.clients[at].held = None;
    }

    fn choose(&mut self, at: usize) -> Action {
        let (key, value, reads) = (self.key(), self.value(), self.rng.random_bool(0.4));
        match self.workload {
            Workload::Register if reads => Action::Register(Register::Read { key, value: None }),
            Workload::Register if self.rng.random_bool(0.5) => {
                let from = self.store.entries.get(&key).map(|entry| entry.value);
                Action::Register(Register::Cas { key, from, to: value })
            }
            Workload::Register => Action::Register(Register::Write { key, value }),
            Workload::Set if reads => Action::Set(Set::Read { key, elements: None }),
            Workload::Set => Action::Set(Set::Add { key, element: value }),
            Workload::Append => {
                let steps = self.rng.random_range(1..4);
                let step = |_| match self.rng.random_bool(0.5) {
                    true => Append::Read { key: self.key(), list: None },
                    false => Append::Append { key: self.key(), value: self.value() },
                };
                Action::Append((0..steps).map(step).collect())
            }
            Workload::Bank if reads => Action::Bank(Bank::Read { balances: None }),
            Workload::Bank => {
                let amount = self.rng.random_range(1..40);
                Action::Bank(Bank::Transfer { from: key, to: self.key(), amount })
            }
            Workload::Lock => match self.clients[at].held.clone() {
                _ if reads => Action::Lock(Lock::Read { lock: key, value: None }),
                None => Action::Lock(Lock::Acquire { lock: key, fence: None }),
                Some((lock, fence)) if self.rng.random_bool(0.2) => Action::Lock(Lock::Release { lock, fence }),
                Some((lock, fence)) => Action::Lock(Lock::Write { lock, fence, value }),
            },
            Workload::Idempotency if reads => Action::Idempotency(Idempotency::Count { key, count: None }),
            Workload::Idempotency => Action::Idempotency(Idempotency::Apply { key, id: value }),
            Workload::Session if reads => Action::Session(Session::Read { session: at as u64, key, value: None }),
            Workload::Session => Action::Session(Session::Write { session: at as u64, key, value }),
            Workload::Watch => {
                let keys = self.rng.random_range(1..3);
                let change = |_| match self.rng.random_bool(0.2) {
                    true => (self.key(), None),
                    false => (self.key(), Some(self.value())),
                };
                let mut changes: BTreeMap<Key, Option<i64>> = (0..keys).map(change).collect();
                // Transactions are told apart by what they write.
                changes.insert(key, Some(value));
                Action::Watch(Watch::Change { changes })
            }
            workload => unreachable!("{workload} has no model here"),
        }
    }

    fn step_watcher(&mut self, watcher: u64) {
        let at = watcher as usize;
        let process = self.watchers[at].process;
        let listed = self.watchers[at].position.is_some() && self.rng.random_bool(0.02);
        if listed || (self.watchers[at].position.is_none() && self.rng.random_bool(0.5)) {
            let list = |entries| Action::Watch(Watch::List { watcher, entries });
            self.event(process, Kind::Invoke, list(None), None);
            let (entries, revision) = (self.store.listed(), self.store.revision);
            self.event(process, Kind::Ok, list(Some(entries)), Some(revision));
            self.watchers[at].position = Some(revision);
            return;
        }
        let position = self.watchers[at].position.unwrap_or(0);
        if !self.watchers[at].is_open {
            let open = Action::Watch(Watch::Open { watcher, after: position });
            self.event(process, Kind::Invoke, open.clone(), None);
            self.event(process, Kind::Ok, open, None);
            self.watchers[at].position = Some(position);
            self.watchers[at].is_open = true;
            return;
        }
        match self.store.log.iter().find(|(revision, _)| *revision > position).cloned() {
            Some((revision, changes)) => self.watched(watcher, changes, revision),
            None => self.watched(watcher, BTreeMap::new(), self.store.revision),
        }
        self.watchers[at].is_open = self.rng.random_bool(0.9);
    }

    /// Reads everything once more, and lets watchers see the end.
    fn finish(&mut self) {
        for key in (0..self.keys).map(Key::from) {
            let session = u64::MAX >> 1;
            let action = match self.workload {
                Workload::Register => Action::Register(Register::Read { key, value: None }),
                Workload::Set => Action::Set(Set::Read { key, elements: None }),
                Workload::Append => Action::Append(vec![Append::Read { key, list: None }]),
                Workload::Bank => Action::Bank(Bank::Read { balances: None }),
                Workload::Lock => Action::Lock(Lock::Read { lock: key, value: None }),
                Workload::Idempotency => Action::Idempotency(Idempotency::Count { key, count: None }),
                Workload::Session => Action::Session(Session::Read { session, key, value: None }),
                _ => break,
            };
            self.honest(action);
        }
        if self.workload == Workload::Watch {
            let (entries, revision) = (Some(self.store.listed()), self.store.revision);
            let asked = Action::Watch(Watch::Final { entries: None });
            self.told(asked, Action::Watch(Watch::Final { entries }), Some(revision));
            (0..WATCHERS).for_each(|watcher| self.catch_up(watcher));
        }
    }
}
