//! Operations as people see them: bars on a time axis, one lane per process.

use std::collections::BTreeMap;
use std::fmt::Display;

use serde::{Deserialize, Serialize};

use crate::history::action::{
    Accounts, Append, Bank, Cached, Catalog, Change, Chore, Ddl, Fenced, Hot, Idempotency, Lock, Register, Session,
    Set, Table, Watch, Write,
};
use crate::history::{Action, Call, History, Key, Outcome};

/// Elements of a list or entries of a map that a label shows.
const LABEL_ELEMENTS: usize = 12;

/// One call, from its invocation to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bar {
    pub process: u64,
    /// What it did and saw, in a few words: `read 7 = 3`.
    pub label: String,
    /// Places in the history: what ended before something began has the smaller one. `None`: it never ended for sure.
    pub invoked: u64,
    pub ended: Option<u64>,
    pub invoked_ns: u64,
    pub ended_ns: Option<u64>,
    pub outcome: End,
    pub peer: Option<u64>,
    pub revision: Option<u64>,
    pub error: Option<String>,
}

/// How a call ended, as it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    Ok,
    Fail,
    Unknown,
}

/// Why one bar of a finding comes before another. Both are indexes into its bars.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edge {
    pub from: usize,
    pub to: usize,
    /// `ww`, `wr`, `rw` or `realtime`.
    pub kind: String,
    pub because: String,
}

impl Bar {
    /// A call as a bar.
    pub fn of(history: &History, call: &Call) -> Bar {
        let (invocation, end) = (history.invocation(call), history.end(call));
        Bar {
            process: call.process,
            label: label(history.action(call)),
            invoked: invocation.index,
            ended: call.happened_before().map(|index| index as u64),
            invoked_ns: invocation.time_ns,
            ended_ns: end.map(|end| end.time_ns),
            outcome: match call.outcome {
                Outcome::Ok => End::Ok,
                Outcome::Fail => End::Fail,
                Outcome::Unknown => End::Unknown,
            },
            peer: end.and_then(|end| end.peer).or(invocation.peer),
            revision: history.revision(call),
            error: end.and_then(|end| end.error.clone().or_else(|| end.refusal.clone())),
        }
    }

    /// Several calls as bars, in the order of their invocation, each once.
    pub fn all<'a>(history: &History, calls: impl IntoIterator<Item = &'a Call>) -> Vec<Bar> {
        let mut bars: Vec<Bar> = calls.into_iter().map(|call| Bar::of(history, call)).collect();
        bars.sort_by_key(|bar| bar.invoked);
        bars.dedup_by_key(|bar| bar.invoked);
        bars
    }
}

/// An action in a few words.
pub fn label(action: &Action) -> String {
    match action {
        Action::Register(Register::Read { key, value }) => format!("read {key} = {}", known(*value)),
        Action::Register(Register::Write { key, value }) => format!("write {key} := {value}"),
        Action::Register(Register::Cas { key, from, to }) => format!("cas {key}: {} -> {to}", known(*from)),
        Action::Set(Set::Add { key, element }) => format!("add {element} to {key}"),
        Action::Set(Set::Read { key, elements }) => format!("read {key} = {}", list(elements.as_deref())),
        Action::Append(steps) => steps.iter().map(step).collect::<Vec<_>>().join(", "),
        Action::Bank(Bank::Open { balances }) => format!("open {}", map(balances)),
        Action::Bank(Bank::Transfer { from, to, amount }) => format!("transfer {amount} from {from} to {to}"),
        Action::Bank(Bank::Read { balances }) => format!("read {}", balances.as_ref().map_or_else(dots, map)),
        Action::Watch(Watch::Change { changes }) => format!("change {}", changed(changes)),
        Action::Watch(Watch::Open { watcher, after }) => format!("watcher {watcher} opens after {after}"),
        Action::Watch(Watch::Next { watcher, changes }) => {
            format!("watcher {watcher} sees {}", changes.as_ref().map_or_else(|| "nothing more".into(), changed))
        }
        Action::Watch(Watch::List { watcher, entries }) => {
            format!("watcher {watcher} lists {}", entries.as_ref().map_or_else(dots, map))
        }
        Action::Watch(Watch::Final { entries }) => format!("final {}", entries.as_ref().map_or_else(dots, map)),
        Action::Lock(Lock::Acquire { lock, fence }) => {
            format!("acquire {lock}{}", fence.map_or_else(String::new, |fence| format!(", fence {fence}")))
        }
        Action::Lock(Lock::Release { lock, fence }) => format!("release {lock}, fence {fence}"),
        Action::Lock(Lock::Write { lock, fence, value }) => format!("write {lock} := {value} under fence {fence}"),
        Action::Lock(Lock::Read { lock, value }) => format!("read {lock} = {}", known(*value)),
        Action::Idempotency(Idempotency::Apply { key, id }) => format!("apply {id} to {key}"),
        Action::Idempotency(Idempotency::Count { key, count }) => {
            format!("count {key} = {}", count.map_or_else(dots, |count| count.to_string()))
        }
        Action::Session(Session::Write { session, key, value }) => format!("session {session} writes {key} := {value}"),
        Action::Session(Session::Read { session, key, value }) => {
            format!("session {session} reads {key} = {}", known(*value))
        }
        Action::Table(table) => self::table(table),
        Action::Accounts(Accounts::Open { balances }) => format!("open {}", map(balances)),
        Action::Accounts(Accounts::Move { from, to, amount }) => format!("move {amount} from {from} to {to}"),
        Action::Accounts(Accounts::Read { balances, .. }) => {
            format!("read {}", balances.as_ref().map_or_else(dots, map))
        }
        Action::Catalog(catalog) => self::catalog(catalog),
        Action::Hot(hot) | Action::Upkeep(hot) => self::hot(hot),
        Action::Cached(Cached::Write { table, number }) => format!("write {table} := {number}"),
        Action::Cached(Cached::Read { values, stale_ms }) => {
            let age = stale_ms.map_or_else(String::new, |ms| format!(", {ms} ms old"));
            format!("read {}{age}", values.as_ref().map_or_else(dots, map))
        }
        Action::Fault(fault) => format!("{:?} {} of {}", fault.phase, fault.name, fault.target),
    }
}

fn step(step: &Append) -> String {
    match step {
        Append::Append { key, value } => format!("append {value} to {key}"),
        Append::Read { key, list } => format!("read {key} = {}", self::list(list.as_deref())),
    }
}

fn table(action: &Table) -> String {
    match action {
        Table::Write(Write { change, table, id, number, once }) => {
            let what = match change {
                Change::Insert => "insert",
                Change::Update => "update",
                Change::Merge => "merge",
                Change::Delete => "delete",
            };
            let named = if *once { ", once" } else { "" };
            format!("{what} {id} in table {table} by write {number}{named}")
        }
        Table::Read { table, rows, .. } => {
            let told = |values: &Vec<i64>| match Table::number(values) {
                Some(number) => format!("write {number}"),
                None => list(Some(values.as_slice())),
            };
            let rows = rows.as_ref().map(|rows| entries_of(rows.iter().map(|(id, values)| (id, told(values)))));
            format!("read table {table} = {}", rows.unwrap_or_else(dots))
        }
        Table::Line { table, snapshots } => match snapshots {
            Some(line) => format!("{} snapshots of table {table}", line.len()),
            None => format!("snapshots of table {table}"),
        },
        Table::Push { table, row, number } => format!("push {number} to row {row} of table {table}"),
        Table::Turn { table, row, on } => format!("turn row {row} of table {table} {}", if *on { "on" } else { "off" }),
        Table::Shared { table, rows, .. } => {
            let told = |lists: &Vec<Vec<i64>>| {
                lists.iter().map(|of| list(Some(of.as_slice()))).collect::<Vec<_>>().join(" and ")
            };
            let rows = rows.as_ref().map(|rows| entries_of(rows.iter().map(|(row, lists)| (row, told(lists)))));
            format!("read shared rows of table {table} = {}", rows.unwrap_or_else(dots))
        }
    }
}

fn catalog(action: &Catalog) -> String {
    match action {
        Catalog::Ddl(Ddl::CreateSchema { schema }) => format!("create schema {schema}"),
        Catalog::Ddl(Ddl::DropSchema { schema, cascade }) => {
            format!("drop schema {schema}{}", if *cascade { " cascade" } else { "" })
        }
        Catalog::Ddl(Ddl::Create { table, number }) => format!("create {table}, number {number}"),
        Catalog::Ddl(Ddl::Rename { from, to }) => format!("rename {from} to {to}"),
        Catalog::Ddl(Ddl::Drop { table, purge }) => format!("drop {table}{}", if *purge { " purge" } else { "" }),
        Catalog::Ddl(Ddl::Undrop { table }) => format!("undrop {table}"),
        Catalog::Claim { path } => format!("claim {path}"),
        Catalog::Unclaim { path } => format!("let go of {path}"),
        Catalog::Tree { tables, .. } => format!("tree = {}", tables.as_ref().map_or_else(dots, map)),
    }
}

fn hot(action: &Hot) -> String {
    match action {
        Hot::Append { table, number } => format!("append {number} to table {table}"),
        Hot::Read { table, whole, odd, .. } => {
            let odd = if odd.is_empty() { String::new() } else { format!(", not whole: {}", map(odd)) };
            format!("read table {table} = {}{odd}", list(whole.as_deref()))
        }
        Hot::Past { table, number, whole, odd, .. } => {
            let odd = if odd.is_empty() { String::new() } else { format!(", not whole: {}", map(odd)) };
            format!("read table {table} as of append {number} = {}{odd}", list(whole.as_deref()))
        }
        Hot::Snapshots { table, count } => {
            format!("snapshots of table {table} = {}", count.map_or_else(dots, |count| count.to_string()))
        }
        Hot::Fences { table, line } => {
            format!("fences of table {table} = {}", line.as_deref().map_or_else(dots, fences))
        }
        Hot::Worked { table, chores } => {
            let chores = chores.as_ref().map_or_else(dots, |chores| chores.len().to_string());
            format!("chores of workers on table {table} = {chores}")
        }
        Hot::Chore { table, what: Chore::Pack } => format!("pack the files of table {table}"),
        Hot::Chore { table, what: Chore::Expire } => format!("expire snapshots of table {table}"),
        Hot::Chore { table, what: Chore::Sweep } => format!("sweep orphans of table {table}"),
        Hot::Chore { table, what: Chore::Purge } => format!("purge a copy of table {table}"),
    }
}

/// The newest few: the finding says which they are.
fn fences(line: &[Fenced]) -> String {
    const MOST: usize = 5;
    let newest = line.iter().skip(line.len().saturating_sub(MOST));
    let one = |of: &Fenced| format!("{}: {} by {}", of.sequence, of.fence, of.worker);
    format!("{{{}{}}}", if line.len() > MOST { "..., " } else { "" }, newest.map(one).collect::<Vec<_>>().join(", "))
}

fn known(value: Option<i64>) -> String {
    value.map_or_else(|| "nil".to_owned(), |value| value.to_string())
}

fn dots() -> String {
    "...".to_owned()
}

/// A list by its end, which is what tells lists apart that only grow.
fn list(elements: Option<&[i64]>) -> String {
    let Some(elements) = elements else { return dots() };
    let skipped = elements.len().saturating_sub(LABEL_ELEMENTS);
    let shown: Vec<String> = elements[skipped..].iter().map(i64::to_string).collect();
    match skipped {
        0 => format!("[{}]", shown.join(" ")),
        skipped => format!("[({skipped} more) {}]", shown.join(" ")),
    }
}

fn map(entries: &BTreeMap<Key, i64>) -> String {
    entries_of(entries.iter())
}

fn changed(changes: &BTreeMap<Key, Option<i64>>) -> String {
    entries_of(changes.iter().map(|(key, value)| (key, known(*value))))
}

fn entries_of<V: Display>(entries: impl ExactSizeIterator<Item = (impl Display, V)>) -> String {
    let more = entries.len().saturating_sub(LABEL_ELEMENTS);
    let shown: Vec<String> = entries.take(LABEL_ELEMENTS).map(|(key, value)| format!("{key}={value}")).collect();
    match more {
        0 => format!("{{{}}}", shown.join(" ")),
        more => format!("{{{} ({more} more)}}", shown.join(" ")),
    }
}
