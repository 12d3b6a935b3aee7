//! Operations as EDN: `{:type :ok, :f :cas, :value [k [1 2]], :process 3, :time 1200, :index 7}`.
//!
//! Registers, sets and list-append transactions are written as Jepsen's own tests write them, so that Knossos, Elle and
//! the converters of Porcupine read them; the other workloads have maps as values. [`super::decode`] is the inverse.

use std::collections::{BTreeMap, BTreeSet};

use super::action::{
    Accounts, Action, Append, Bank, Cached, Catalog, Change, Chore, Ddl, Fenced, Hot, Idempotency, Key, Lock, Register,
    Session, Set, Snapshot, Table, Watch, Worked,
};
use super::edn::Edn;
use super::fault::{Fault, Installation, Phase};
use super::operation::{Kind, Operation, Process};

/// What the names of operations begin with that have upkeep beside them.
pub(super) const KEPT: &str = "kept-";

/// One operation as a map.
pub fn operation(operation: &Operation) -> Edn {
    let (f, value) = action(&operation.action);
    let kind = match operation.kind {
        Kind::Invoke => "invoke",
        Kind::Ok => "ok",
        Kind::Fail => "fail",
        Kind::Info => "info",
    };
    let process = match operation.process {
        Process::Client(number) => int(number),
        Process::Nemesis => Edn::keyword("nemesis"),
    };
    let mut entries = vec![
        entry("type", Edn::keyword(kind)),
        entry("f", Edn::Keyword(f)),
        entry("value", value),
        entry("process", process),
        entry("time", int(operation.time_ns)),
        entry("index", int(operation.index)),
    ];
    entries.extend(operation.revision.map(|revision| entry("revision", int(revision))));
    entries.extend(operation.peer.map(|peer| entry("peer", int(peer))));
    let text = |name, text: &Option<String>| Some(entry(name, Edn::Text(text.clone()?)));
    entries.extend(text("refusal", &operation.refusal));
    entries.extend(text("error", &operation.error));
    Edn::Map(entries)
}

/// What an action does, as a name and a value.
pub fn action(action: &Action) -> (String, Edn) {
    let (f, value) = match action {
        Action::Register(Register::Read { key, value }) => ("read", keyed(key, optional(*value))),
        Action::Register(Register::Write { key, value }) => ("write", keyed(key, Edn::Int(*value))),
        Action::Register(Register::Cas { key, from, to }) => {
            ("cas", keyed(key, Edn::Vector(vec![optional(*from), Edn::Int(*to)])))
        }
        Action::Set(Set::Add { key, element }) => ("add", keyed(key, Edn::Int(*element))),
        Action::Set(Set::Read { key, elements }) => {
            ("read", keyed(key, elements.as_ref().map_or(Edn::Nil, |e| set_of(e))))
        }
        Action::Append(steps) => ("txn", Edn::Vector(steps.iter().map(step).collect())),
        Action::Bank(Bank::Open { balances }) => ("open", by_key(balances)),
        Action::Bank(Bank::Transfer { from, to, amount }) => ("transfer", moved(from, to, *amount)),
        Action::Bank(Bank::Read { balances }) => ("read", balances.as_ref().map_or(Edn::Nil, by_key)),
        Action::Watch(watch) => self::watch(watch),
        Action::Lock(lock) => self::lock(lock),
        Action::Idempotency(Idempotency::Apply { key, id }) => ("apply", keyed(key, Edn::Int(*id))),
        Action::Idempotency(Idempotency::Count { key, count }) => ("count", keyed(key, count.map_or(Edn::Nil, int))),
        Action::Session(session) => self::session(session),
        Action::Table(table) => self::table(table),
        Action::Accounts(accounts) => self::accounts(accounts),
        Action::Catalog(catalog) => self::catalog(catalog),
        Action::Hot(hot) => self::hot(hot),
        Action::Upkeep(hot) => {
            let (f, value) = self::hot(hot);
            return (format!("{KEPT}{f}"), value);
        }
        Action::Cached(Cached::Write { table, number }) => ("write-cached", keyed(table, Edn::Int(*number))),
        Action::Cached(Cached::Read { values, stale_ms }) => {
            let mut entries = vec![entry("values", values.as_ref().map_or(Edn::Nil, by_key))];
            entries.extend(stale_ms.map(|stale_ms| entry("stale-ms", int(stale_ms))));
            ("read-cached", Edn::Map(entries))
        }
        Action::Fault(fault) => return self::fault(fault),
    };
    (f.to_owned(), value)
}

fn step(step: &Append) -> Edn {
    Edn::Vector(match step {
        Append::Append { key, value } => vec![Edn::keyword("append"), name(key), Edn::Int(*value)],
        Append::Read { key, list } => {
            vec![Edn::keyword("r"), name(key), list.as_ref().map_or(Edn::Nil, |list| Edn::Vector(ints(list)))]
        }
    })
}

fn watch(watch: &Watch) -> (&'static str, Edn) {
    let changed = |changes: &BTreeMap<Key, Option<i64>>| {
        Edn::Map(changes.iter().map(|(key, value)| (name(key), optional(*value))).collect())
    };
    match watch {
        Watch::Change { changes } => ("change", changed(changes)),
        Watch::Open { watcher, after } => {
            ("watch", Edn::Map(vec![entry("watcher", int(*watcher)), entry("after", int(*after))]))
        }
        Watch::Next { watcher, changes } => {
            let changes = changes.as_ref().map_or(Edn::Nil, changed);
            ("next", Edn::Map(vec![entry("watcher", int(*watcher)), entry("changes", changes)]))
        }
        Watch::List { watcher, entries } => {
            let entries = entries.as_ref().map_or(Edn::Nil, by_key);
            ("list", Edn::Map(vec![entry("watcher", int(*watcher)), entry("entries", entries)]))
        }
        Watch::Final { entries } => ("final", entries.as_ref().map_or(Edn::Nil, by_key)),
    }
}

fn lock(action: &Lock) -> (&'static str, Edn) {
    let (f, lock, more) = match action {
        Lock::Acquire { lock, fence } => ("acquire", lock, vec![entry("fence", fence.map_or(Edn::Nil, int))]),
        Lock::Release { lock, fence } => ("release", lock, vec![entry("fence", int(*fence))]),
        Lock::Write { lock, fence, value } => {
            ("guarded-write", lock, vec![entry("fence", int(*fence)), entry("value", Edn::Int(*value))])
        }
        Lock::Read { lock, value } => ("guarded-read", lock, vec![entry("value", optional(*value))]),
    };
    (f, Edn::Map([vec![entry("lock", name(lock))], more].concat()))
}

fn session(action: &Session) -> (&'static str, Edn) {
    let (f, session, key, value) = match action {
        Session::Write { session, key, value } => ("session-write", session, key, Some(*value)),
        Session::Read { session, key, value } => ("session-read", session, key, *value),
    };
    (f, Edn::Map(vec![entry("session", int(*session)), entry("key", name(key)), entry("value", optional(value))]))
}

fn moved(from: &Key, to: &Key, amount: i64) -> Edn {
    Edn::Map(vec![entry("from", name(from)), entry("to", name(to)), entry("amount", Edn::Int(amount))])
}

fn accounts(action: &Accounts) -> (&'static str, Edn) {
    match action {
        Accounts::Open { balances } => ("open-accounts", by_key(balances)),
        Accounts::Move { from, to, amount } => ("move", moved(from, to, *amount)),
        Accounts::Read { balances, versions, stale_ms } => {
            let mut entries = vec![entry("balances", balances.as_ref().map_or(Edn::Nil, by_key))];
            entries.extend(versions.as_ref().map(|versions| entry("versions", by_key(versions))));
            entries.extend(stale_ms.map(|stale_ms| entry("stale-ms", int(stale_ms))));
            ("read-accounts", Edn::Map(entries))
        }
    }
}

fn catalog(action: &Catalog) -> (&'static str, Edn) {
    let of = |entries: &[(&str, Edn)]| Edn::Map(entries.iter().map(|(key, value)| entry(key, value.clone())).collect());
    match action {
        Catalog::Ddl(Ddl::CreateSchema { schema }) => ("create-schema", of(&[("schema", name(schema))])),
        Catalog::Ddl(Ddl::DropSchema { schema, cascade }) => {
            ("drop-schema", of(&[("schema", name(schema)), ("cascade", Edn::Bool(*cascade))]))
        }
        Catalog::Ddl(Ddl::Create { table, number }) => {
            ("create-table", of(&[("table", name(table)), ("number", Edn::Int(*number))]))
        }
        Catalog::Ddl(Ddl::Rename { from, to }) => ("rename-table", of(&[("from", name(from)), ("to", name(to))])),
        Catalog::Ddl(Ddl::Drop { table, purge }) => {
            ("drop-table", of(&[("table", name(table)), ("purge", Edn::Bool(*purge))]))
        }
        Catalog::Ddl(Ddl::Undrop { table }) => ("undrop-table", of(&[("table", name(table))])),
        Catalog::Claim { path } => ("claim", of(&[("path", name(path))])),
        Catalog::Unclaim { path } => ("unclaim", of(&[("path", name(path))])),
        Catalog::Tree { schemas, tables } => {
            let schemas = schemas.as_ref().map_or(Edn::Nil, |all| Edn::Vector(all.iter().map(name).collect()));
            ("tree", of(&[("schemas", schemas), ("tables", tables.as_ref().map_or(Edn::Nil, by_key))]))
        }
    }
}

fn hot(action: &Hot) -> (&'static str, Edn) {
    let (f, table, more) = match action {
        Hot::Append { table, number } => ("append-rows", table, vec![entry("number", Edn::Int(*number))]),
        Hot::Read { table, whole, odd, stale_ms } => {
            let mut more = vec![entry("whole", whole.as_ref().map_or(Edn::Nil, |whole| Edn::Vector(ints(whole))))];
            more.extend((!odd.is_empty()).then(|| entry("odd", by_key(odd))));
            more.extend(stale_ms.map(|stale_ms| entry("stale-ms", int(stale_ms))));
            ("read-appends", table, more)
        }
        Hot::Past { table, number, kept_ms, whole, odd } => {
            let mut more = vec![entry("number", Edn::Int(*number)), entry("kept-ms", int(*kept_ms))];
            more.push(entry("whole", whole.as_ref().map_or(Edn::Nil, |whole| Edn::Vector(ints(whole)))));
            more.extend((!odd.is_empty()).then(|| entry("odd", by_key(odd))));
            ("read-past", table, more)
        }
        Hot::Chore { table, what: Chore::Pack } => ("pack-files", table, vec![]),
        Hot::Chore { table, what: Chore::Expire } => ("expire-snapshots", table, vec![]),
        Hot::Chore { table, what: Chore::Sweep } => ("sweep-orphans", table, vec![]),
        Hot::Chore { table, what: Chore::Purge } => ("purge-copy", table, vec![]),
        Hot::Fences { table, line } => {
            let one = |Fenced { sequence, shard, fence, worker }: &Fenced| {
                Edn::Vector(vec![int(*sequence), int(*shard), int(*fence), Edn::Text(worker.clone())])
            };
            let line = line.as_ref().map_or(Edn::Nil, |line| Edn::Vector(line.iter().map(one).collect()));
            ("read-fences", table, vec![entry("line", line)])
        }
        Hot::Worked { table, chores } => {
            let one = |of: &Worked| {
                let time = |time: Option<u64>| time.map_or(Edn::Nil, int);
                Edn::Vector(vec![
                    int(of.shard),
                    int(of.fence),
                    Edn::Text(of.worker.clone()),
                    Edn::Text(of.what.clone()),
                    int(of.began_ms),
                    time(of.acted_ms),
                    time(of.ended_ms),
                ])
            };
            let chores = chores.as_ref().map_or(Edn::Nil, |chores| Edn::Vector(chores.iter().map(one).collect()));
            ("read-chores", table, vec![entry("chores", chores)])
        }
        Hot::Snapshots { table, count } => {
            ("count-snapshots", table, vec![entry("count", count.map_or(Edn::Nil, int))])
        }
    };
    (f, Edn::Map([vec![entry("table", name(table))], more].concat()))
}

fn table(action: &Table) -> (&'static str, Edn) {
    match action {
        Table::Write(write) => {
            let f = match write.change {
                Change::Insert => "insert-rows",
                Change::Update => "update-rows",
                Change::Merge => "merge-rows",
                Change::Delete => "delete-rows",
            };
            let entries = [
                entry("table", name(&write.table)),
                entry("id", Edn::Int(write.id)),
                entry("number", Edn::Int(write.number)),
                entry("once", Edn::Bool(write.once)),
            ];
            (f, Edn::Map(entries.into()))
        }
        Table::Read { table, rows, snapshot, stale_ms } => {
            let of_id = |(id, values): (&i64, &Vec<i64>)| (Edn::Int(*id), Edn::Vector(ints(values)));
            let rows = rows.as_ref().map_or(Edn::Nil, |rows| Edn::Map(rows.iter().map(of_id).collect()));
            let mut entries = vec![entry("table", name(table)), entry("rows", rows)];
            entries.extend(snapshot.map(|snapshot| entry("snapshot", Edn::Int(snapshot))));
            entries.extend(stale_ms.map(|stale_ms| entry("stale-ms", int(stale_ms))));
            ("read-rows", Edn::Map(entries))
        }
        Table::Line { table, snapshots } => {
            let one = |snapshot: &Snapshot| {
                let Snapshot { sequence, id, parent, number } = snapshot;
                Edn::Vector(vec![int(*sequence), Edn::Int(*id), optional(*parent), optional(*number)])
            };
            let line = snapshots.as_ref().map_or(Edn::Nil, |line| Edn::Vector(line.iter().map(one).collect()));
            ("snapshots", Edn::Map(vec![entry("table", name(table)), entry("line", line)]))
        }
        Table::Push { table, row, number } => {
            let entries =
                [entry("table", name(table)), entry("row", Edn::Int(*row)), entry("number", Edn::Int(*number))];
            ("push-number", Edn::Map(entries.into()))
        }
        Table::Turn { table, row, on } => {
            let entries = [entry("table", name(table)), entry("row", Edn::Int(*row)), entry("on", Edn::Bool(*on))];
            ("turn-row", Edn::Map(entries.into()))
        }
        Table::Shared { table, rows, stale_ms } => {
            let lists = |lists: &Vec<Vec<i64>>| Edn::Vector(lists.iter().map(|list| Edn::Vector(ints(list))).collect());
            let of_row = |(row, of): (&i64, &Vec<Vec<i64>>)| (Edn::Int(*row), lists(of));
            let rows = rows.as_ref().map_or(Edn::Nil, |rows| Edn::Map(rows.iter().map(of_row).collect()));
            let mut entries = vec![entry("table", name(table)), entry("rows", rows)];
            entries.extend(stale_ms.map(|stale_ms| entry("stale-ms", int(stale_ms))));
            ("read-shared", Edn::Map(entries))
        }
    }
}

fn fault(fault: &Fault) -> (String, Edn) {
    let phase = match fault.phase {
        Phase::Start => "start",
        Phase::Stop => "stop",
    };
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let mut entries = vec![entry("target", Edn::Text(fault.target.clone()))];
    if let Some(installation) = &fault.installation {
        let (outcome, because) = match installation {
            Installation::Installed(proof) => ("installed", proof),
            Installation::Skipped(reason) => ("skipped", reason),
            Installation::Failed(reason) => ("failed", reason),
        };
        entries.push(entry("outcome", Edn::keyword(outcome)));
        entries.push(entry("because", Edn::Text(because.clone())));
    }
    (format!("{phase}-{}", fault.name.chars().map(plain).collect::<String>()), Edn::Map(entries))
}

fn entry(name: &str, value: Edn) -> (Edn, Edn) {
    (Edn::keyword(name), value)
}

fn keyed(key: &Key, value: Edn) -> Edn {
    Edn::Vector(vec![name(key), value])
}

fn name(key: &Key) -> Edn {
    match key {
        Key::Number(number) => Edn::Int(*number),
        Key::Name(name) => Edn::Text(name.to_string()),
    }
}

fn by_key(values: &BTreeMap<Key, i64>) -> Edn {
    Edn::Map(values.iter().map(|(key, value)| (name(key), Edn::Int(*value))).collect())
}

fn ints(values: &[i64]) -> Vec<Edn> {
    values.iter().map(|value| Edn::Int(*value)).collect()
}

/// To any other reader a set that has an element twice is no EDN: that is written as a vector, which Jepsen's checkers take as well.
fn set_of(elements: &[i64]) -> Edn {
    let distinct: BTreeSet<&i64> = elements.iter().collect();
    if distinct.len() == elements.len() { Edn::Set(ints(elements)) } else { Edn::Vector(ints(elements)) }
}

fn optional(value: Option<i64>) -> Edn {
    value.map_or(Edn::Nil, Edn::Int)
}

/// Revisions, times and ids stay far below 2^63.
fn int(number: u64) -> Edn {
    Edn::Int(i64::try_from(number).unwrap_or(i64::MAX))
}
