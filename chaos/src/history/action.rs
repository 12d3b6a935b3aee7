//! What an operation is about, typed by workload.
//!
//! An action has the same shape when it begins and when it ends; what only the answer tells is an `Option`, `None` in
//! the invocation. Values are unique within a run wherever a checker has to tell one change from another; each type
//! says where.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::fault::Fault;
use super::workload::Workload;

/// A key of a workload: a number in lake's own histories, anything readable in those of others.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    Number(i64),
    Name(Arc<str>),
}

impl From<i64> for Key {
    fn from(number: i64) -> Self {
        Key::Number(number)
    }
}

impl From<&str> for Key {
    fn from(name: &str) -> Self {
        Key::Name(name.into())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Number(number) => write!(f, "{number}"),
            Key::Name(name) => f.write_str(name),
        }
    }
}

/// What an operation is about.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    Register(Register),
    Set(Set),
    Append(Vec<Append>),
    Bank(Bank),
    Watch(Watch),
    Lock(Lock),
    Idempotency(Idempotency),
    Session(Session),
    Table(Table),
    Accounts(Accounts),
    Catalog(Catalog),
    Cached(Cached),
    Hot(Hot),
    /// The same, with chores.
    Upkeep(Hot),
    /// The nemesis's only action.
    Fault(Fault),
}

impl Action {
    /// The workload it belongs to; none for a fault.
    pub fn workload(&self) -> Option<Workload> {
        Some(match self {
            Action::Register(_) => Workload::Register,
            Action::Set(_) => Workload::Set,
            Action::Append(_) => Workload::Append,
            Action::Bank(_) => Workload::Bank,
            Action::Watch(_) => Workload::Watch,
            Action::Lock(_) => Workload::Lock,
            Action::Idempotency(_) => Workload::Idempotency,
            Action::Session(_) => Workload::Session,
            Action::Table(_) => Workload::Table,
            Action::Accounts(_) => Workload::MultiTable,
            Action::Catalog(_) => Workload::Catalog,
            Action::Cached(_) => Workload::Cached,
            Action::Hot(_) => Workload::Hot,
            Action::Upkeep(_) => Workload::Upkeep,
            Action::Fault(_) => return None,
        })
    }
}

/// Single registers, absent at first, each linearizable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Register {
    /// `value`: what was read; `None` in an answer means that the key is absent.
    Read {
        key: Key,
        value: Option<i64>,
    },
    Write {
        key: Key,
        value: i64,
    },
    /// `from`: `None` expects the key to be absent. A compare that fails is a [`super::Kind::Fail`].
    Cas {
        key: Key,
        from: Option<i64>,
        to: i64,
    },
}

/// Sets that only grow. An element is added once in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Set {
    Add {
        key: Key,
        element: i64,
    },
    /// `elements`: all there were, in any order.
    Read {
        key: Key,
        elements: Option<Vec<i64>>,
    },
}

/// One step of a transaction over lists that only grow. A value is appended to a key once in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Append {
    Append {
        key: Key,
        value: i64,
    },
    /// `list`: all that was there, oldest first; an absent key is an empty list.
    Read {
        key: Key,
        list: Option<Vec<i64>>,
    },
}

/// Accounts between which money moves, so that its total never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bank {
    /// The accounts as they were made, before anything else.
    Open { balances: BTreeMap<Key, i64> },
    /// A transfer that finds too little is a [`super::Kind::Fail`]. The answer carries the revision of the change.
    Transfer { from: Key, to: Key, amount: i64 },
    /// `balances`: all accounts at one revision, which the answer carries, however old.
    Read { balances: Option<BTreeMap<Key, i64>> },
}

/// Changes under one prefix, and watchers of it. A value is written once in a run.
///
/// A watcher is a client that goes on under the same `watcher` for the whole run, whatever its process number. It
/// begins with an [`Watch::Open`] or a [`Watch::List`]; after a broken stream it opens again from the last revision it
/// saw, and after being told that this is compacted it lists first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Watch {
    /// One transaction: keys with their new values, `None` for a delete. The operation carries its revision.
    Change { changes: BTreeMap<Key, Option<i64>> },
    /// The watcher asks for every change later than `after`, a revision.
    Open { watcher: u64, after: u64 },
    /// The watcher waits for the next transaction: the answer carries its revision and what it changed.
    /// An answer without changes is a mark of progress: nothing is missing up to that revision.
    Next { watcher: u64, changes: Option<BTreeMap<Key, Option<i64>>> },
    /// The watcher lists everything and starts again from there: the answer carries the revision.
    List { watcher: u64, entries: Option<BTreeMap<Key, i64>> },
    /// All there is at the end, at the operation's revision, read by anybody. Watchers go on until they have got there.
    Final { entries: Option<BTreeMap<Key, i64>> },
}

/// Locks with fences, each guarding a register. A value is written once in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lock {
    /// `fence`: what the holder was given. The operation's revision is that of the grant.
    Acquire {
        lock: Key,
        fence: Option<u64>,
    },
    Release {
        lock: Key,
        fence: u64,
    },
    /// A write to the guarded register that must not happen unless `fence` still holds the lock.
    Write {
        lock: Key,
        fence: u64,
        value: i64,
    },
    /// What the guarded register holds, read linearizably by anybody; `None` in an answer: nothing was written yet.
    Read {
        lock: Key,
        value: Option<i64>,
    },
}

/// Changes that are sent again when their answer is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Idempotency {
    /// One logical change, however often it is sent. `id` is unique in a run; the answer carries the revision at which
    /// it was made, the same for every sending.
    Apply { key: Key, id: i64 },
    /// How many changes the key has seen (its version), read linearizably.
    Count { key: Key, count: Option<u64> },
}

/// What one session may rely on when it reads from any peer with `min_revision`.
///
/// `session` lives on when its client gets a new process number. Keys are written, never deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Session {
    /// The answer carries the revision of the change.
    Write { session: u64, key: Key, value: i64 },
    /// The answer carries the revision at which the entry was last changed; none and no value if the key was absent.
    Read { session: u64, key: Key, value: Option<i64> },
}

/// Rows of tables, written through SQL. Under an `id` a table has [`Table::PARTS`] rows or none: all that one statement writes. An id
/// is written by one client at a time, and no more once the outcome of a write is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Table {
    Write(Write),
    /// All rows of one version: by id the values of its rows, in order. The answer's revision is the version's sequence number,
    /// its peer the query node. `stale_ms`: how old the version is, if the node said that it may be older than it should.
    Read {
        table: Key,
        rows: Option<BTreeMap<i64, Vec<i64>>>,
        snapshot: Option<i64>,
        stale_ms: Option<u64>,
    },
    /// Every snapshot that the table's metadata has in the end, by sequence number.
    Line {
        table: Key,
        snapshots: Option<Vec<Snapshot>>,
    },
    /// One statement puts a number, unique in a run, at the end of the list that a row has: any client, in any row. Tables of such rows
    /// have keys of their own.
    Push {
        table: Key,
        row: i64,
        number: i64,
    },
    /// One statement adds a row of another kind, from [`Table::LAMPS`] on, unless it is there; or deletes it, unless there is no other one of them
    /// in the table. One that finds it so is a [`super::Kind::Fail`].
    Turn {
        table: Key,
        row: i64,
        on: bool,
    },
    /// All such rows of one version, whose sequence number is the answer's revision: by their ids the list of each that there is; of the second
    /// kind they are empty. The rest is as with [`Table::Read`].
    Shared {
        table: Key,
        rows: Option<BTreeMap<i64, Vec<Vec<i64>>>>,
        stale_ms: Option<u64>,
    },
}

impl Table {
    /// Rows under one id.
    pub const PARTS: usize = 3;
    /// From here on the ids of shared rows are of those that come and go.
    pub const LAMPS: i64 = 100;

    /// The values of the rows that a write of this number leaves: no two rows of a run are alike.
    pub fn values(number: i64) -> Vec<i64> {
        let parts = Self::PARTS as i64;
        (0..parts).map(|part| number.saturating_mul(parts).saturating_add(part)).collect()
    }

    /// The number of the write that has left these rows; `None` if no single one leaves such.
    pub fn number(values: &[i64]) -> Option<i64> {
        let number = values.first()?.div_euclid(Self::PARTS as i64);
        (Self::values(number) == values).then_some(number)
    }
}

/// One statement that changes the rows under an id. An UPDATE or DELETE that finds none is a [`super::Kind::Fail`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    pub change: Change,
    pub table: Key,
    pub id: i64,
    /// Unique in a run.
    pub number: i64,
    /// It was made under an operation id, which has that number, and may have been sent several times.
    pub once: bool,
}

/// What a statement does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Change {
    Insert,
    Update,
    /// UPDATE if the rows are there, else INSERT.
    Merge,
    Delete,
}

/// A snapshot of a table as its metadata lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub sequence: u64,
    pub id: i64,
    pub parent: Option<i64>,
    /// Of the write under whose operation id it was made.
    pub number: Option<i64>,
}

/// Accounts that are rows of several tables, between which money moves in transactions of SQL. A key is of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Accounts {
    /// The accounts as they were made, before anything else.
    Open { balances: BTreeMap<Key, i64> },
    /// BEGIN, an UPDATE of each account, COMMIT. One that finds too little, or a conflict, is a [`super::Kind::Fail`].
    Move { from: Key, to: Key, amount: i64 },
    /// All accounts, by one query; its peer is the query node. `versions`: by table, the sequence number of the version that was
    /// read. `stale_ms`: how old they are, if the node said that they may be older than they should.
    Read { balances: Option<BTreeMap<Key, i64>>, versions: Option<BTreeMap<Key, i64>>, stale_ms: Option<u64> },
}

/// Schemas and tables, changed through SQL. A table's place is `schema/name`; the levels of a schema are joined by dots. What a table
/// is is told by the number that it was made with, wherever it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Catalog {
    Ddl(Ddl),
    /// A scope on a path (`schema/name`, `schema`, each level a part): from its answer until [`Catalog::Unclaim`] begins nothing
    /// there may be changed, if that has an answer, too.
    Claim {
        path: Key,
    },
    Unclaim {
        path: Key,
    },
    /// All schemas, and all tables with their numbers by place, at one revision, which the answer carries. A table that nobody is
    /// known to have made has the number 0.
    Tree {
        schemas: Option<Vec<Key>>,
        tables: Option<BTreeMap<Key, i64>>,
    },
}

/// One statement that changes the catalog; one that cannot be done as things are is a [`super::Kind::Fail`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ddl {
    CreateSchema {
        schema: Key,
    },
    /// `cascade`: with its tables, all at once.
    DropSchema {
        schema: Key,
        cascade: bool,
    },
    /// `number` is unique in a run.
    Create {
        table: Key,
        number: i64,
    },
    Rename {
        from: Key,
        to: Key,
    },
    /// `purge`: it can be undropped.
    Drop {
        table: Key,
        purge: bool,
    },
    Undrop {
        table: Key,
    },
}

/// Values that only grow, one in each of a few tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cached {
    /// Each of a table is larger than those before it; a smaller one is not written.
    Write { table: Key, number: i64 },
    /// By one query, whose peer is the query node. `stale_ms`: how old what is shown is, if the node said that it may be older than it
    /// should.
    Read { values: Option<BTreeMap<Key, i64>>, stale_ms: Option<u64> },
}

/// Appends of many clients to one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hot {
    /// One INSERT of the rows that [`Table::values`] has for its number, which is unique in a run.
    Append { table: Key, number: i64 },
    /// By one query, whose peer is the query node. `whole`: the appends of which just the rows are there that there should be; `odd`:
    /// of others how many rows there are, -1 if they are as many as there should be. `stale_ms`: how old that is, if the node said that
    /// it may be older than it should.
    Read { table: Key, whole: Option<Vec<i64>>, odd: BTreeMap<Key, i64>, stale_ms: Option<u64> },
    /// A read of the snapshot that was the newest, at the same node, when append `number` had been acknowledged: it is there for `kept_ms` at
    /// least, counted from when that was asked for. The rest is as with [`Hot::Read`].
    Past { table: Key, number: i64, kept_ms: u64, whole: Option<Vec<i64>>, odd: BTreeMap<Key, i64> },
    /// How many snapshots the table has in the end.
    Snapshots { table: Key, count: Option<u64> },
    /// Upkeep, asked for by a client.
    Chore { table: Key, what: Chore },
    /// The snapshots that workers' own upkeep has made, of those that the table has, by sequence number.
    Fences { table: Key, line: Option<Vec<Fenced>> },
    /// What workers have done to the table by themselves, as their logs say it. Where they are all of one machine.
    Worked { table: Key, chores: Option<Vec<Worked>> },
}

/// A snapshot made by a worker's upkeep, and under which fence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fenced {
    pub sequence: u64,
    pub shard: u64,
    /// The revision of the shard's route.
    pub fence: u64,
    /// The node.
    pub worker: String,
}

/// A chore of a worker's own upkeep, and under which fence. Times are the machine's, in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worked {
    pub shard: u64,
    /// The revision of the shard's route.
    pub fence: u64,
    /// The node.
    pub worker: String,
    /// The procedure.
    pub what: String,
    /// After the fence was looked up.
    pub began_ms: u64,
    /// The last time before something was sent for which the fence must hold, and did.
    pub acted_ms: Option<u64>,
    /// When nothing of it went on any more.
    pub ended_ms: Option<u64>,
}

/// What is done to a table's files, and nothing to its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Chore {
    /// Small files become larger ones.
    Pack,
    /// Old snapshots are dropped, and the files that only they needed.
    Expire,
    /// Files that nothing refers to are removed.
    Sweep,
    /// A copy of the table, which has borrowed its files, is dropped, and its own are purged.
    Purge,
}
