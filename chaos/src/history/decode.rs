//! EDN to operations: the inverse of [`super::encode`], and lenient where other tools write differently.
//!
//! Values of registers and sets may come without a key (Knossos): all of them then belong to the key 0. A `:read` means
//! the workload's own, so that the workload must be known first ([`hint`]). Operations of the nemesis are taken whatever
//! they hold. `:index` is not looked at: the order of the file counts. Without `:time` the place in the file is it.

use std::collections::BTreeMap;

use super::action::{
    Accounts, Action, Append, Bank, Cached, Catalog, Change, Chore, Ddl, Fenced, Hot, Idempotency, Key, Lock, Register,
    Session, Set, Snapshot, Table, Watch, Worked, Write,
};
use super::edn::Edn;
use super::encode::KEPT;
use super::fault::{Fault, Installation, Phase};
use super::operation::{Kind, Operation, Process};
use super::workload::Workload;

/// What is wrong with an operation.
type Problem = String;

/// The workload that an operation's name and value betray; `None` if they may belong to several.
pub fn hint(operation: &Edn) -> Option<Workload> {
    let value = operation.get("value");
    Some(match function(operation) {
        Some("write" | "cas") => Workload::Register,
        Some("add") => Workload::Set,
        Some("txn") => Workload::Append,
        Some("open" | "transfer") => Workload::Bank,
        Some("change" | "watch" | "next" | "list" | "final") => Workload::Watch,
        Some("acquire" | "release" | "guarded-write" | "guarded-read") => Workload::Lock,
        Some("apply" | "count") => Workload::Idempotency,
        Some("session-write" | "session-read") => Workload::Session,
        Some("insert-rows" | "update-rows" | "merge-rows" | "delete-rows" | "read-rows" | "snapshots") => {
            Workload::Table
        }
        Some("push-number" | "turn-row" | "read-shared") => Workload::Table,
        Some("open-accounts" | "move" | "read-accounts") => Workload::MultiTable,
        Some("create-schema" | "drop-schema" | "create-table" | "rename-table" | "drop-table" | "undrop-table") => {
            Workload::Catalog
        }
        Some("claim" | "unclaim" | "tree") => Workload::Catalog,
        Some("write-cached" | "read-cached") => Workload::Cached,
        Some("append-rows" | "read-appends" | "read-past" | "count-snapshots") => Workload::Hot,
        Some("read-fences" | "read-chores") => Workload::Hot,
        Some("pack-files" | "expire-snapshots" | "sweep-orphans" | "purge-copy") => Workload::Hot,
        Some(f) if f.starts_with(KEPT) => Workload::Upkeep,
        Some("read") => match value {
            Some(Edn::Map(_)) => Workload::Bank,
            Some(Edn::Set(_)) => Workload::Set,
            Some(value) if matches!(pair(value), Some((_, Edn::Set(_)))) => Workload::Set,
            _ => return None,
        },
        None if value.and_then(Edn::as_elements).is_some_and(|steps| steps.iter().any(|s| append_step(s).is_ok())) => {
            Workload::Append
        }
        _ => return None,
    })
}

/// One operation of a workload. `place` is its place in the file.
///
/// # Errors
/// What is missing, or is not what the workload has.
pub fn operation(edn: &Edn, workload: Workload, place: u64) -> Result<Operation, Problem> {
    if !matches!(edn, Edn::Map(_)) {
        return Err(format!("an operation is a map with :type, :f, :value and :process, not {}", shown(edn)));
    }
    let kind = match edn.get("type") {
        Some(Edn::Keyword(kind)) => match kind.as_str() {
            "invoke" => Kind::Invoke,
            "ok" => Kind::Ok,
            "fail" => Kind::Fail,
            "info" => Kind::Info,
            other => return Err(format!(":type is :invoke, :ok, :fail or :info, not :{other}")),
        },
        other => return Err(format!(":type is :invoke, :ok, :fail or :info, not {}", shown_or_missing(other))),
    };
    let process = match edn.get("process") {
        Some(Edn::Keyword(name)) if name == "nemesis" => Process::Nemesis,
        Some(Edn::Int(number)) => {
            Process::Client(u64::try_from(*number).map_err(|_| format!(":process is negative: {number}"))?)
        }
        other => return Err(format!(":process is a number or :nemesis, not {}", shown_or_missing(other))),
    };
    let action = match process {
        Process::Nemesis => Action::Fault(fault(edn)),
        Process::Client(_) => action(edn, workload)?,
    };
    let time_ns = number(edn, "time")?.unwrap_or(place);
    let mut operation = Operation::new(process, kind, time_ns, action);
    operation.index = place;
    operation.revision = number(edn, "revision")?;
    operation.peer = number(edn, "peer")?;
    operation.refusal = text(edn.get("refusal"));
    operation.error = text(edn.get("error"));
    Ok(operation)
}

fn function(operation: &Edn) -> Option<&str> {
    match operation.get("f") {
        Some(Edn::Keyword(f) | Edn::Text(f) | Edn::Symbol(f)) => Some(f),
        _ => None,
    }
}

fn action(edn: &Edn, workload: Workload) -> Result<Action, Problem> {
    let f = function(edn);
    let value = edn.get("value").unwrap_or(&Edn::Nil);
    let action = match workload {
        Workload::Register => register(f, value).map(Action::Register),
        Workload::Set => set(f, value).map(Action::Set),
        Workload::Append => append(value).map(Action::Append),
        Workload::Bank => bank(f, value).map(Action::Bank),
        Workload::Watch => watch(f, value).map(Action::Watch),
        Workload::Lock => lock(f, value).map(Action::Lock),
        Workload::Idempotency => idempotency(f, value).map(Action::Idempotency),
        Workload::Session => session(f, value).map(Action::Session),
        Workload::Table => table(f, value).map(Action::Table),
        Workload::MultiTable => accounts(f, value).map(Action::Accounts),
        Workload::Catalog => catalog(f, value).map(Action::Catalog),
        Workload::Cached => cached(f, value).map(Action::Cached),
        Workload::Hot => hot(f, value).map(Action::Hot),
        Workload::Upkeep => hot(f.and_then(|f| f.strip_prefix(KEPT)), value).map(Action::Upkeep),
    };
    let f = f.map_or_else(|| "an operation without :f".to_owned(), |f| format!(":{f}"));
    action.map_err(|problem| format!("{f} of the workload {workload}: {problem}"))
}

fn register(f: Option<&str>, value: &Edn) -> Result<Register, Problem> {
    match f {
        Some("read") => {
            let (key, value) = maybe_keyed(value)?;
            Ok(Register::Read { key, value: optional_int(value)? })
        }
        Some("write") => {
            let (key, value) = maybe_keyed(value)?;
            Ok(Register::Write { key, value: int(value)? })
        }
        Some("cas") => {
            let (key, value) = match pair(value) {
                Some((key, from_to)) if pair(from_to).is_some() => (self::key(key)?, from_to),
                _ => (Key::Number(0), value),
            };
            let (from, to) = pair(value).ok_or_else(|| expected("[from to] or [key [from to]]", value))?;
            Ok(Register::Cas { key, from: optional_int(from)?, to: int(to)? })
        }
        _ => Err("it has :read, :write and :cas".into()),
    }
}

fn set(f: Option<&str>, value: &Edn) -> Result<Set, Problem> {
    match f {
        Some("add") => {
            let (key, element) = maybe_keyed(value)?;
            Ok(Set::Add { key, element: int(element)? })
        }
        Some("read") => {
            let (key, elements) = match pair(value) {
                Some((key, elements @ (Edn::Nil | Edn::Set(_) | Edn::Vector(_)))) => (self::key(key)?, elements),
                _ => (Key::Number(0), value),
            };
            Ok(Set::Read { key, elements: optional(elements, ints)? })
        }
        _ => Err("it has :add and :read".into()),
    }
}

fn append(value: &Edn) -> Result<Vec<Append>, Problem> {
    let steps = value.as_elements().ok_or_else(|| expected("a vector of steps", value))?;
    steps.iter().map(append_step).collect()
}

fn append_step(step: &Edn) -> Result<Append, Problem> {
    match step.as_elements() {
        Some([Edn::Keyword(f), key, value]) if f == "append" => {
            Ok(Append::Append { key: self::key(key)?, value: int(value)? })
        }
        Some([Edn::Keyword(f), key, list]) if f == "r" => {
            Ok(Append::Read { key: self::key(key)?, list: optional(list, ints)? })
        }
        _ => Err(expected("[:append key value] or [:r key [values]]", step)),
    }
}

fn bank(f: Option<&str>, value: &Edn) -> Result<Bank, Problem> {
    match f {
        Some("open") => Ok(Bank::Open { balances: by_key(value, int)? }),
        Some("transfer") => Ok(Bank::Transfer {
            from: key(part(value, "from")?)?,
            to: key(part(value, "to")?)?,
            amount: int(part(value, "amount")?)?,
        }),
        Some("read") => Ok(Bank::Read { balances: optional(value, |value| by_key(value, int))? }),
        _ => Err("it has :open, :transfer and :read".into()),
    }
}

fn watch(f: Option<&str>, value: &Edn) -> Result<Watch, Problem> {
    let watcher = || natural(part(value, "watcher")?);
    match f {
        Some("change") => Ok(Watch::Change { changes: by_key(value, optional_int)? }),
        Some("watch") => Ok(Watch::Open { watcher: watcher()?, after: natural(part(value, "after")?)? }),
        Some("next") => {
            let changes = value.get("changes").unwrap_or(&Edn::Nil);
            Ok(Watch::Next { watcher: watcher()?, changes: optional(changes, |c| by_key(c, optional_int))? })
        }
        Some("list") => {
            let entries = value.get("entries").unwrap_or(&Edn::Nil);
            Ok(Watch::List { watcher: watcher()?, entries: optional(entries, |e| by_key(e, int))? })
        }
        Some("final") => Ok(Watch::Final { entries: optional(value, |e| by_key(e, int))? }),
        _ => Err("it has :change, :watch, :next, :list and :final".into()),
    }
}

fn lock(f: Option<&str>, value: &Edn) -> Result<Lock, Problem> {
    let lock = || key(part(value, "lock")?);
    let fence = || natural(part(value, "fence")?);
    match f {
        Some("acquire") => {
            let fence = value.get("fence").unwrap_or(&Edn::Nil);
            Ok(Lock::Acquire { lock: lock()?, fence: optional(fence, natural)? })
        }
        Some("release") => Ok(Lock::Release { lock: lock()?, fence: fence()? }),
        Some("guarded-write") => Ok(Lock::Write { lock: lock()?, fence: fence()?, value: int(part(value, "value")?)? }),
        Some("guarded-read") => {
            Ok(Lock::Read { lock: lock()?, value: optional_int(value.get("value").unwrap_or(&Edn::Nil))? })
        }
        _ => Err("it has :acquire, :release, :guarded-write and :guarded-read".into()),
    }
}

fn idempotency(f: Option<&str>, value: &Edn) -> Result<Idempotency, Problem> {
    let (key, value) = maybe_keyed(value)?;
    match f {
        Some("apply") => Ok(Idempotency::Apply { key, id: int(value)? }),
        Some("count") => Ok(Idempotency::Count { key, count: optional(value, natural)? }),
        _ => Err("it has :apply and :count".into()),
    }
}

fn session(f: Option<&str>, edn: &Edn) -> Result<Session, Problem> {
    let session = natural(part(edn, "session")?)?;
    let key = key(part(edn, "key")?)?;
    let value = optional_int(edn.get("value").unwrap_or(&Edn::Nil))?;
    match (f, value) {
        (Some("session-write"), Some(value)) => Ok(Session::Write { session, key, value }),
        (Some("session-read"), value) => Ok(Session::Read { session, key, value }),
        _ => Err("it has :session-write with a value, and :session-read".into()),
    }
}

fn table(f: Option<&str>, value: &Edn) -> Result<Table, Problem> {
    let table = key(part(value, "table")?)?;
    let change = match f {
        Some("insert-rows") => Change::Insert,
        Some("update-rows") => Change::Update,
        Some("merge-rows") => Change::Merge,
        Some("delete-rows") => Change::Delete,
        Some("read-rows") => {
            let rows = optional(value.get("rows").unwrap_or(&Edn::Nil), rows)?;
            let snapshot = optional_int(value.get("snapshot").unwrap_or(&Edn::Nil))?;
            return Ok(Table::Read { table, rows, snapshot, stale_ms: number(value, "stale-ms")? });
        }
        Some("snapshots") => {
            let snapshots = optional(value.get("line").unwrap_or(&Edn::Nil), line)?;
            return Ok(Table::Line { table, snapshots });
        }
        Some("push-number") => {
            return Ok(Table::Push { table, row: int(part(value, "row")?)?, number: int(part(value, "number")?)? });
        }
        Some("turn-row") => {
            let on = matches!(value.get("on"), Some(Edn::Bool(true)));
            return Ok(Table::Turn { table, row: int(part(value, "row")?)?, on });
        }
        Some("read-shared") => {
            let rows = optional(value.get("rows").unwrap_or(&Edn::Nil), shared_rows)?;
            return Ok(Table::Shared { table, rows, stale_ms: number(value, "stale-ms")? });
        }
        _ => {
            return Err(
                "it has :insert-rows, :update-rows, :merge-rows, :delete-rows, :read-rows, :snapshots, :push-number, :turn-row and \
                 :read-shared"
                    .into(),
            );
        }
    };
    let once = matches!(value.get("once"), Some(Edn::Bool(true)));
    let (id, number) = (int(part(value, "id")?)?, int(part(value, "number")?)?);
    Ok(Table::Write(Write { change, table, id, number, once }))
}

fn accounts(f: Option<&str>, value: &Edn) -> Result<Accounts, Problem> {
    match f {
        Some("open-accounts") => Ok(Accounts::Open { balances: by_key(value, int)? }),
        Some("move") => Ok(Accounts::Move {
            from: key(part(value, "from")?)?,
            to: key(part(value, "to")?)?,
            amount: int(part(value, "amount")?)?,
        }),
        Some("read-accounts") => {
            let of = |name: &str| optional(value.get(name).unwrap_or(&Edn::Nil), |value| by_key(value, int));
            let (balances, versions) = (of("balances")?, of("versions")?);
            Ok(Accounts::Read { balances, versions, stale_ms: number(value, "stale-ms")? })
        }
        _ => Err("it has :open-accounts, :move and :read-accounts".into()),
    }
}

fn catalog(f: Option<&str>, value: &Edn) -> Result<Catalog, Problem> {
    let of = |name: &str| key(part(value, name)?);
    let is = |name: &str| matches!(value.get(name), Some(Edn::Bool(true)));
    Ok(match f {
        Some("create-schema") => Catalog::Ddl(Ddl::CreateSchema { schema: of("schema")? }),
        Some("drop-schema") => Catalog::Ddl(Ddl::DropSchema { schema: of("schema")?, cascade: is("cascade") }),
        Some("create-table") => Catalog::Ddl(Ddl::Create { table: of("table")?, number: int(part(value, "number")?)? }),
        Some("rename-table") => Catalog::Ddl(Ddl::Rename { from: of("from")?, to: of("to")? }),
        Some("drop-table") => Catalog::Ddl(Ddl::Drop { table: of("table")?, purge: is("purge") }),
        Some("undrop-table") => Catalog::Ddl(Ddl::Undrop { table: of("table")? }),
        Some("claim") => Catalog::Claim { path: of("path")? },
        Some("unclaim") => Catalog::Unclaim { path: of("path")? },
        Some("tree") => {
            let tables = optional(value.get("tables").unwrap_or(&Edn::Nil), |value| by_key(value, int))?;
            Catalog::Tree { schemas: optional(value.get("schemas").unwrap_or(&Edn::Nil), keys)?, tables }
        }
        _ => {
            return Err(
                "it has :create-schema, :drop-schema, :create-table, :rename-table, :drop-table, :undrop-table, \
                        :claim, :unclaim and :tree"
                    .into(),
            );
        }
    })
}

fn cached(f: Option<&str>, value: &Edn) -> Result<Cached, Problem> {
    match f {
        Some("write-cached") => {
            let (table, number) = pair(value).ok_or_else(|| expected("[table number]", value))?;
            Ok(Cached::Write { table: key(table)?, number: int(number)? })
        }
        Some("read-cached") => {
            let values = optional(value.get("values").unwrap_or(&Edn::Nil), |value| by_key(value, int))?;
            Ok(Cached::Read { values, stale_ms: number(value, "stale-ms")? })
        }
        _ => Err("it has :write-cached and :read-cached".into()),
    }
}

fn hot(f: Option<&str>, value: &Edn) -> Result<Hot, Problem> {
    let table = key(part(value, "table")?)?;
    match f {
        Some("append-rows") => Ok(Hot::Append { table, number: int(part(value, "number")?)? }),
        Some("read-appends") => {
            let whole = optional(value.get("whole").unwrap_or(&Edn::Nil), ints)?;
            let odd = optional(value.get("odd").unwrap_or(&Edn::Nil), |odd| by_key(odd, int))?.unwrap_or_default();
            Ok(Hot::Read { table, whole, odd, stale_ms: number(value, "stale-ms")? })
        }
        Some("read-past") => {
            let whole = optional(value.get("whole").unwrap_or(&Edn::Nil), ints)?;
            let odd = optional(value.get("odd").unwrap_or(&Edn::Nil), |odd| by_key(odd, int))?.unwrap_or_default();
            let (number, kept_ms) = (int(part(value, "number")?)?, natural(part(value, "kept-ms")?)?);
            Ok(Hot::Past { table, number, kept_ms, whole, odd })
        }
        Some("count-snapshots") => Ok(Hot::Snapshots { table, count: number(value, "count")? }),
        Some("pack-files") => Ok(Hot::Chore { table, what: Chore::Pack }),
        Some("expire-snapshots") => Ok(Hot::Chore { table, what: Chore::Expire }),
        Some("sweep-orphans") => Ok(Hot::Chore { table, what: Chore::Sweep }),
        Some("purge-copy") => Ok(Hot::Chore { table, what: Chore::Purge }),
        Some("read-fences") => {
            Ok(Hot::Fences { table, line: optional(value.get("line").unwrap_or(&Edn::Nil), fenced_line)? })
        }
        Some("read-chores") => {
            Ok(Hot::Worked { table, chores: optional(value.get("chores").unwrap_or(&Edn::Nil), chores)? })
        }
        _ => Err(
            "it has :append-rows, :read-appends, :read-past, :count-snapshots, :pack-files, :expire-snapshots, :sweep-orphans, \
                  :purge-copy, :read-fences and :read-chores, and upkeep the same with :kept- before"
                .into(),
        ),
    }
}

/// `[[sequence shard fence worker] ...]`.
fn fenced_line(value: &Edn) -> Result<Vec<Fenced>, Problem> {
    let one = |value: &Edn| match value.as_elements() {
        Some([sequence, shard, fence, Edn::Text(worker)]) => Ok(Fenced {
            sequence: natural(sequence)?,
            shard: natural(shard)?,
            fence: natural(fence)?,
            worker: worker.clone(),
        }),
        _ => Err(expected("[sequence shard fence \"worker\"]", value)),
    };
    let snapshots = value.as_elements().ok_or_else(|| expected("a vector of snapshots", value))?;
    snapshots.iter().map(one).collect()
}

/// `[[shard fence worker what began acted ended] ...]`, the last two `nil` if they are not known.
fn chores(value: &Edn) -> Result<Vec<Worked>, Problem> {
    let one = |value: &Edn| match value.as_elements() {
        Some([shard, fence, Edn::Text(worker), Edn::Text(what), began, acted, ended]) => Ok(Worked {
            shard: natural(shard)?,
            fence: natural(fence)?,
            worker: worker.clone(),
            what: what.clone(),
            began_ms: natural(began)?,
            acted_ms: optional(acted, natural)?,
            ended_ms: optional(ended, natural)?,
        }),
        _ => Err(expected("[shard fence \"worker\" \"what\" began acted ended]", value)),
    };
    let chores = value.as_elements().ok_or_else(|| expected("a vector of chores", value))?;
    chores.iter().map(one).collect()
}

/// `[key ...]`.
fn keys(value: &Edn) -> Result<Vec<Key>, Problem> {
    let keys = value.as_elements().ok_or_else(|| expected("a vector of keys", value))?;
    keys.iter().map(key).collect()
}

/// `{id [value ...]}`.
fn rows(value: &Edn) -> Result<BTreeMap<i64, Vec<i64>>, Problem> {
    match value {
        Edn::Map(entries) => entries.iter().map(|(id, values)| Ok((int(id)?, ints(values)?))).collect(),
        _ => Err(expected("a map of rows by id", value)),
    }
}

/// `{row [[number ...] ...]}`.
fn shared_rows(value: &Edn) -> Result<BTreeMap<i64, Vec<Vec<i64>>>, Problem> {
    let lists = |lists: &Edn| {
        let each = lists.as_elements().ok_or_else(|| expected("a vector of lists", lists))?;
        each.iter().map(ints).collect::<Result<Vec<_>, _>>()
    };
    match value {
        Edn::Map(entries) => entries.iter().map(|(row, of)| Ok((int(row)?, lists(of)?))).collect(),
        _ => Err(expected("a map of lists by row", value)),
    }
}

/// `[snapshot ...]`.
fn line(value: &Edn) -> Result<Vec<Snapshot>, Problem> {
    let snapshots = value.as_elements().ok_or_else(|| expected("a vector of snapshots", value))?;
    snapshots.iter().map(snapshot).collect()
}

/// `[sequence id parent number]`.
fn snapshot(value: &Edn) -> Result<Snapshot, Problem> {
    match value.as_elements() {
        Some([sequence, id, parent, number]) => Ok(Snapshot {
            sequence: natural(sequence)?,
            id: int(id)?,
            parent: optional_int(parent)?,
            number: optional_int(number)?,
        }),
        _ => Err(expected("[sequence id parent number]", value)),
    }
}

fn fault(edn: &Edn) -> Fault {
    let f = function(edn).unwrap_or("start");
    let (phase, name) = match (f.strip_prefix("stop"), f.strip_prefix("start")) {
        (Some(name), _) => (Phase::Stop, name),
        (None, Some(name)) => (Phase::Start, name),
        (None, None) => (Phase::Start, f),
    };
    let name = match name.trim_start_matches('-') {
        "" => "fault",
        name => name,
    };
    let value = edn.get("value").unwrap_or(&Edn::Nil);
    let text = |value| text(value).unwrap_or_default();
    let because = || text(value.get("because"));
    let installation = match value.get("outcome") {
        Some(Edn::Keyword(outcome)) => match outcome.as_str() {
            "installed" => Some(Installation::Installed(because())),
            "skipped" => Some(Installation::Skipped(because())),
            _ => Some(Installation::Failed(because())),
        },
        _ => None,
    };
    let target = match value.get("target") {
        Some(target) => text(Some(target)),
        None => text(Some(value)),
    };
    Fault { name: name.to_owned(), phase, target, installation }
}

/// A string, or whatever else stands there, as it stands there.
fn text(value: Option<&Edn>) -> Option<String> {
    match value {
        None | Some(Edn::Nil) => None,
        Some(Edn::Text(text)) => Some(text.clone()),
        Some(other) => Some(other.to_string()),
    }
}

/// `[key value]`, or a value that belongs to the only key there is.
fn maybe_keyed(value: &Edn) -> Result<(Key, &Edn), Problem> {
    match pair(value) {
        Some((key, value)) => Ok((self::key(key)?, value)),
        None => Ok((Key::Number(0), value)),
    }
}

fn pair(value: &Edn) -> Option<(&Edn, &Edn)> {
    match value {
        Edn::Vector(elements) => match elements.as_slice() {
            [first, second] => Some((first, second)),
            _ => None,
        },
        _ => None,
    }
}

fn part<'a>(value: &'a Edn, name: &str) -> Result<&'a Edn, Problem> {
    value.get(name).ok_or_else(|| format!("its value has no :{name}: {}", shown(value)))
}

fn key(value: &Edn) -> Result<Key, Problem> {
    match value {
        Edn::Int(number) => Ok(Key::Number(*number)),
        Edn::Text(name) | Edn::Keyword(name) | Edn::Symbol(name) => Ok(name.as_str().into()),
        _ => Err(expected("a key (a number, a string or a keyword)", value)),
    }
}

fn by_key<T>(value: &Edn, read: impl Fn(&Edn) -> Result<T, Problem>) -> Result<BTreeMap<Key, T>, Problem> {
    match value {
        Edn::Map(entries) => entries.iter().map(|(key, value)| Ok((self::key(key)?, read(value)?))).collect(),
        _ => Err(expected("a map by key", value)),
    }
}

fn optional<T>(value: &Edn, read: impl Fn(&Edn) -> Result<T, Problem>) -> Result<Option<T>, Problem> {
    match value {
        Edn::Nil => Ok(None),
        value => read(value).map(Some),
    }
}

fn optional_int(value: &Edn) -> Result<Option<i64>, Problem> {
    optional(value, int)
}

fn int(value: &Edn) -> Result<i64, Problem> {
    value.as_int().ok_or_else(|| expected("a whole number", value))
}

fn natural(value: &Edn) -> Result<u64, Problem> {
    u64::try_from(int(value)?).map_err(|_| expected("a number that is not negative", value))
}

fn ints(value: &Edn) -> Result<Vec<i64>, Problem> {
    let elements = value.as_elements().ok_or_else(|| expected("a vector or set of whole numbers", value))?;
    elements.iter().map(int).collect()
}

fn number(edn: &Edn, name: &str) -> Result<Option<u64>, Problem> {
    let value = edn.get(name).unwrap_or(&Edn::Nil);
    optional(value, natural).map_err(|problem| format!(":{name}: {problem}"))
}

fn expected(what: &str, got: &Edn) -> Problem {
    format!("{what} was expected, not {}", shown(got))
}

fn shown_or_missing(value: Option<&Edn>) -> String {
    value.map_or_else(|| "missing".to_owned(), shown)
}

/// A value as it stands, shortened.
fn shown(value: &Edn) -> String {
    const LONGEST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
