//! The same of what is written through SQL: versions in one line, and query nodes that show one for as long as they may.
//!
//! - [`Sql`]: clients that take turns by chance; [`FAULTS`]: one broken promise each, in the midst of it.

use std::collections::BTreeMap;

use lake_chaos::check::table::FRESH_NS;
use lake_chaos::history::{
    Accounts, Action, Change, History, Key, Kind, Operation, Process, Snapshot, Table, Workload, Write,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const CLIENTS: usize = 5;
const NODES: u64 = 2;
/// From one event to the next, at most.
const PAUSE_NS: u64 = 60_000_000;
const TABLES: i64 = 3;
/// Accounts of one table that clients use.
const ACCOUNTS: i64 = 3;
/// Accounts of two tables that no client touches, so that nothing in doubt can excuse what is found there.
const QUIET: [(i64, i64); 2] = [(0, 9), (1, 9)];
const BALANCE: i64 = 100;

fn account((table, n): (i64, i64)) -> Key {
    Key::from(table * 100 + n)
}

fn only_table() -> Key {
    Key::from(1)
}

/// Everything as one version has it.
#[derive(Clone, Default)]
struct State {
    rows: BTreeMap<i64, Vec<i64>>,
    balances: BTreeMap<Key, i64>,
    versions: BTreeMap<Key, i64>,
}

/// Which version a query node shows, and since when.
#[derive(Clone, Copy, Default)]
struct Node {
    at: usize,
    since_ns: u64,
}

/// What an action came to: how it ends, and with which revision.
struct Answer(Kind, Action, Option<u64>);

enum Stage {
    Idle,
    Asked(Action),
    Answered(Answer),
}

struct Client {
    process: u64,
    node: u64,
    stage: Stage,
    /// Ids whose rows it knows to be there.
    mine: Vec<i64>,
}

/// A run under way.
pub struct Sql {
    workload: Workload,
    rng: StdRng,
    /// All versions, the newest last. Of the only table each but the first is a snapshot.
    states: Vec<State>,
    line: Vec<Snapshot>,
    nodes: BTreeMap<u64, Node>,
    clients: Vec<Client>,
    /// Asked for by clients that never learned the outcome, and not done yet.
    late: Vec<Action>,
    operations: Vec<Operation>,
    now_ns: u64,
    next_process: u64,
    next_number: i64,
}

impl Sql {
    pub fn new(workload: Workload, seed: u64) -> Self {
        let mut sql = Self {
            workload,
            rng: StdRng::seed_from_u64(seed),
            states: vec![State::default()],
            line: Vec::new(),
            nodes: (1..=NODES).map(|node| (node, Node::default())).collect(),
            clients: Vec::new(),
            late: Vec::new(),
            operations: Vec::new(),
            now_ns: 0,
            next_process: 0,
            next_number: 0,
        };
        for _ in 0..CLIENTS {
            let client = Client { process: sql.process(), node: 1, stage: Stage::Idle, mine: Vec::new() };
            sql.clients.push(client);
        }
        if workload == Workload::MultiTable {
            let used = (0..TABLES).flat_map(|table| (0..ACCOUNTS).map(move |n| (table, n)));
            let balances: BTreeMap<Key, i64> = used.chain(QUIET).map(|place| (account(place), BALANCE)).collect();
            let versions = (0..TABLES).map(|table| (Key::from(table), 1)).collect();
            sql.states = vec![State { balances: balances.clone(), versions, ..State::default() }];
            let open = Action::Accounts(Accounts::Open { balances });
            sql.told(open.clone(), Answer(Kind::Ok, open, None), 1);
        }
        sql
    }

    /// Takes so many turns, reads everything, and gives the history.
    pub fn run(mut self, steps: usize) -> History {
        self.steps(steps);
        // From now on every node has to show everything.
        self.now_ns += FRESH_NS;
        for node in 1..=NODES {
            self.honest(self.read(None), node);
        }
        if self.workload == Workload::Table {
            let line = |snapshots| Action::Table(Table::Line { table: only_table(), snapshots });
            self.told(line(None), Answer(Kind::Ok, line(Some(self.line.clone())), None), 1);
        }
        History::new(self.operations).expect("a simulation is well formed")
    }

    pub fn steps(&mut self, steps: usize) {
        (0..steps).for_each(|_| self.step());
    }

    fn step(&mut self) {
        if !self.late.is_empty() && self.rng.random_bool(0.1) {
            let at = self.rng.random_range(0..self.late.len());
            let (action, node) = (self.late.swap_remove(at), self.rng.random_range(1..=NODES));
            self.apply(&action, node);
            return;
        }
        let at = self.rng.random_range(0..self.clients.len());
        let (process, node) = (self.clients[at].process, self.clients[at].node);
        match std::mem::replace(&mut self.clients[at].stage, Stage::Idle) {
            Stage::Idle => {
                let action = self.choose(at);
                self.clients[at].node = self.rng.random_range(1..=NODES);
                self.event(process, Kind::Invoke, action.clone(), None, None);
                self.clients[at].stage = Stage::Asked(action);
            }
            Stage::Asked(action) if self.rng.random_bool(0.05) => {
                self.lose(at, action.clone());
                if self.rng.random_bool(0.5) {
                    self.late.push(action);
                }
            }
            Stage::Asked(action) => self.clients[at].stage = Stage::Answered(self.apply(&action, node)),
            Stage::Answered(Answer(_, action, _)) if self.rng.random_bool(0.05) => self.lose(at, action),
            Stage::Answered(Answer(kind, action, revision)) => {
                if let (Kind::Ok, Action::Table(Table::Write(write))) = (kind, &action)
                    && write.change != Change::Delete
                {
                    self.clients[at].mine.push(write.id);
                }
                self.event(process, kind, action, revision, Some(node));
            }
        }
    }

    fn lose(&mut self, at: usize, action: Action) {
        self.event(self.clients[at].process, Kind::Info, action, None, None);
        self.clients[at].process = self.process();
    }

    fn choose(&mut self, at: usize) -> Action {
        if self.rng.random_bool(0.4) {
            return self.read(None);
        }
        if self.workload == Workload::MultiTable {
            let from = self.rng.random_range(0..TABLES);
            let to = (from + self.rng.random_range(1..TABLES)) % TABLES;
            let [from, to] = [from, to].map(|table| account((table, self.rng.random_range(0..ACCOUNTS))));
            return Action::Accounts(Accounts::Move { from, to, amount: self.rng.random_range(1..=40) });
        }
        let known = self.clients[at].mine.len();
        if known == 0 || self.rng.random_bool(0.5) {
            return Action::Table(Table::Write(self.insert()));
        }
        let change = [Change::Update, Change::Merge, Change::Delete][self.rng.random_range(0..3)];
        let id = self.clients[at].mine.swap_remove(self.rng.random_range(0..known));
        Action::Table(Table::Write(Write { change, id, ..self.insert() }))
    }

    // ---- what is there ----------------------------------------------------------------------------------------

    fn newest(&self) -> &State {
        self.states.last().expect("there is a first version")
    }

    /// The version that a node shows: as old as it may be, or the newest.
    fn shown_by(&mut self, node: u64) -> usize {
        let known = self.nodes[&node];
        if self.now_ns >= known.since_ns + FRESH_NS || self.rng.random_bool(0.3) {
            self.nodes.insert(node, Node { at: self.states.len() - 1, since_ns: self.now_ns });
        }
        self.nodes[&node].at
    }

    /// A node has committed: it shows that from now on.
    fn commit(&mut self, state: State, number: Option<i64>, node: u64) {
        self.states.push(state);
        let at = self.states.len() - 1;
        let (sequence, parent) = (at as u64, self.line.last().map(|before| before.id));
        self.line.push(Snapshot { sequence, id: 1_000 + at as i64, parent, number });
        self.nodes.insert(node, Node { at, since_ns: self.now_ns });
    }

    fn apply(&mut self, action: &Action, node: u64) -> Answer {
        let mut state = self.newest().clone();
        match action {
            Action::Table(Table::Write(write)) => {
                let must_be_there = matches!(write.change, Change::Update | Change::Delete);
                if must_be_there && !state.rows.contains_key(&write.id) {
                    return Answer(Kind::Fail, action.clone(), None);
                }
                match write.change {
                    Change::Delete => drop(state.rows.remove(&write.id)),
                    _ => drop(state.rows.insert(write.id, Table::values(write.number))),
                }
                self.commit(state, write.once.then_some(write.number), node);
                Answer(Kind::Ok, action.clone(), None)
            }
            Action::Accounts(Accounts::Move { from, to, amount }) => {
                if state.balances[from] < *amount {
                    return Answer(Kind::Fail, action.clone(), None);
                }
                moved(&mut state, from, to, *amount);
                self.commit(state, None, node);
                Answer(Kind::Ok, action.clone(), None)
            }
            Action::Table(_) | Action::Accounts(_) => {
                let at = self.shown_by(node);
                self.answered(at)
            }
            other => unreachable!("it is not said in SQL: {other:?}"),
        }
    }

    /// What a read of a version answers.
    fn answered(&self, at: usize) -> Answer {
        let revision = (self.workload == Workload::Table && at > 0).then_some(at as u64);
        Answer(Kind::Ok, self.read(Some(at)), revision)
    }

    /// A read, or its answer.
    fn read(&self, at: Option<usize>) -> Action {
        let state = at.map(|at| &self.states[at]);
        match self.workload {
            Workload::Table => Action::Table(Table::Read {
                table: only_table(),
                rows: state.map(|state| state.rows.clone()),
                snapshot: at.and_then(|at| Some(self.line.get(at.checked_sub(1)?)?.id)),
                stale_ms: None,
            }),
            _ => Action::Accounts(Accounts::Read {
                balances: state.map(|state| state.balances.clone()),
                versions: state.map(|state| state.versions.clone()),
                stale_ms: None,
            }),
        }
    }

    // ---- what is told -----------------------------------------------------------------------------------------

    fn process(&mut self) -> u64 {
        self.next_process += 1;
        self.next_process
    }

    fn event(&mut self, process: u64, kind: Kind, action: Action, revision: Option<u64>, peer: Option<u64>) {
        self.now_ns += self.rng.random_range(1..PAUSE_NS);
        let index = self.operations.len() as u64;
        let operation = Operation::new(Process::Client(process), kind, self.now_ns, action);
        self.operations.push(Operation { index, revision, peer, ..operation });
    }

    /// A call of a new client that ends at once, with any answer.
    fn told(&mut self, asked: Action, Answer(kind, answer, revision): Answer, node: u64) {
        let process = self.process();
        self.event(process, Kind::Invoke, asked, None, None);
        self.event(process, kind, answer, revision, Some(node));
    }

    /// The same, as it is answered. It is done after it was asked for.
    fn honest(&mut self, action: Action, node: u64) {
        let process = self.process();
        self.event(process, Kind::Invoke, action.clone(), None, None);
        let Answer(kind, answer, revision) = self.apply(&action, node);
        self.event(process, kind, answer, revision, Some(node));
    }

    /// A write of rows under an id of its own.
    fn insert(&mut self) -> Write {
        self.next_number += 1;
        let (number, once) = (self.next_number, self.rng.random_bool(0.5));
        Write { change: Change::Insert, table: only_table(), id: number, number, once }
    }

    /// A write that is told to have been made, and has left these rows.
    fn leaves(&mut self, rows: impl FnOnce(Vec<i64>) -> Vec<i64>) {
        let write = self.insert();
        let mut state = self.newest().clone();
        state.rows.insert(write.id, rows(Table::values(write.number)));
        self.commit(state, None, 1);
        let write = Action::Table(Table::Write(write));
        self.told(write.clone(), Answer(Kind::Ok, write, None), 1);
    }

    /// A read of other balances than there are.
    fn reads(&mut self, change: impl FnOnce(&mut BTreeMap<Key, i64>)) {
        let mut state = self.newest().clone();
        change(&mut state.balances);
        self.states.push(state);
        let answer = self.answered(self.states.len() - 1);
        self.states.pop();
        self.told(self.read(None), answer, 1);
    }
}

fn moved(state: &mut State, from: &Key, to: &Key, amount: i64) {
    for (key, amount) in [(from, -amount), (to, amount)] {
        *state.balances.entry(key.clone()).or_default() += amount;
        let table = (0..TABLES).find(|table| (0..100).any(|n| account((*table, n)) == *key));
        *state.versions.entry(Key::from(table.expect("each account is of a table"))).or_default() += 1;
    }
}

fn quiet() -> Action {
    let [from, to] = QUIET.map(account);
    Action::Accounts(Accounts::Move { from, to, amount: 10 })
}

/// A way of breaking a promise.
pub struct Fault {
    pub name: &'static str,
    pub workload: Workload,
    pub inject: fn(&mut Sql),
}

const fn fault(name: &'static str, workload: Workload, inject: fn(&mut Sql)) -> Fault {
    Fault { name, workload, inject }
}

pub const FAULTS: &[Fault] = &[
    fault("an acknowledged write that never was", Workload::Table, |sql| {
        let write = Action::Table(Table::Write(Write { once: false, ..sql.insert() }));
        sql.told(write.clone(), Answer(Kind::Ok, write, None), 1);
    }),
    fault("half a write", Workload::Table, |sql| sql.leaves(|rows| rows[..2].to_vec())),
    fault("rows that are there twice", Workload::Table, |sql| {
        sql.leaves(|rows| rows.iter().flat_map(|row| [*row, *row]).collect());
    }),
    fault("rows of two writes", Workload::Table, |sql| sql.leaves(|rows| vec![rows[0], rows[1], rows[2] + 1])),
    fault("rows of a write that failed", Workload::Table, |sql| {
        let write = Write { once: false, ..sql.insert() };
        let action = Action::Table(Table::Write(write));
        sql.told(action.clone(), Answer(Kind::Fail, action.clone(), None), 1);
        sql.apply(&action, 1);
    }),
    fault("a read that lacks what its own node has acknowledged", Workload::Table, |sql| {
        let write = Action::Table(Table::Write(sql.insert()));
        sql.honest(write, 1);
        let before = sql.answered(sql.states.len() - 2);
        sql.told(sql.read(None), before, 1);
    }),
    fault("a read that lacks what another node has acknowledged long before", Workload::Table, |sql| {
        let write = Action::Table(Table::Write(sql.insert()));
        sql.honest(write, 1);
        let before = sql.answered(sql.states.len() - 2);
        sql.now_ns += FRESH_NS;
        sql.told(sql.read(None), before, 2);
    }),
    fault("a node that goes back", Workload::Table, |sql| {
        let (one, other) = (sql.insert(), sql.insert());
        for write in [one, other] {
            sql.honest(Action::Table(Table::Write(write)), 1);
        }
        let [older, newer] = [2, 1].map(|back| sql.answered(sql.states.len() - back));
        sql.told(sql.read(None), newer, 2);
        sql.told(sql.read(None), older, 2);
    }),
    fault("two snapshots after one", Workload::Table, |sql| {
        for _ in 0..2 {
            let write = Action::Table(Table::Write(sql.insert()));
            sql.honest(write, 1);
        }
        let parent = sql.line[sql.line.len() - 2].parent;
        sql.line.last_mut().expect("two were made").parent = parent;
    }),
    fault("a statement that is made twice under its id", Workload::Table, |sql| {
        let write = Action::Table(Table::Write(Write { once: true, ..sql.insert() }));
        sql.honest(write.clone(), 1);
        sql.apply(&write, 2);
    }),
    fault("a snapshot of what was refused", Workload::Table, |sql| {
        let write = Write { once: true, ..sql.insert() };
        let number = write.number;
        let action = Action::Table(Table::Write(write));
        sql.told(action.clone(), Answer(Kind::Fail, action, None), 1);
        sql.commit(sql.newest().clone(), Some(number), 1);
    }),
    fault("money from nowhere", Workload::MultiTable, |sql| {
        sql.reads(|balances| *balances.entry(account(QUIET[0])).or_default() += 7);
    }),
    fault("an account that is gone", Workload::MultiTable, |sql| {
        sql.reads(|balances| balances.retain(|key, _| *key != account(QUIET[0])));
    }),
    fault("half a transfer", Workload::MultiTable, |sql| {
        sql.honest(quiet(), 1);
        sql.reads(|balances| *balances.entry(account(QUIET[1])).or_default() -= 10);
    }),
    fault("a transfer that is made twice", Workload::MultiTable, |sql| {
        sql.honest(quiet(), 1);
        sql.apply(&quiet(), 1);
    }),
    fault("an acknowledged transfer that never was", Workload::MultiTable, |sql| {
        sql.told(quiet(), Answer(Kind::Ok, quiet(), None), 1);
    }),
    fault("a transfer that failed and was made", Workload::MultiTable, |sql| {
        sql.told(quiet(), Answer(Kind::Fail, quiet(), None), 1);
        sql.apply(&quiet(), 1);
    }),
    fault("a read that lacks its own node's transfer", Workload::MultiTable, |sql| {
        sql.honest(quiet(), 1);
        let before = sql.answered(sql.states.len() - 2);
        sql.told(sql.read(None), before, 1);
    }),
    fault("two reads, each newer in one table", Workload::MultiTable, |sql| {
        for newer in [0_i64, 1] {
            let mut state = sql.newest().clone();
            *state.versions.entry(Key::from(newer)).or_default() += 1;
            sql.states.push(state);
            let answer = sql.answered(sql.states.len() - 1);
            sql.states.pop();
            sql.told(sql.read(None), answer, 1);
        }
    }),
];
