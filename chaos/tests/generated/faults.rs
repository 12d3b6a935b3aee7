//! One broken promise each. Whatever the other clients do meanwhile, no honest system could have answered so.

use std::collections::BTreeMap;

use lake_chaos::history::{
    Action, Append, Bank, Idempotency, Key, Kind, Lock, Register, Session, Set, Watch, Workload,
};

use crate::sim::{QUIET, Sim};

/// A way of breaking a promise.
pub struct Fault {
    pub name: &'static str,
    pub workload: Workload,
    pub inject: fn(&mut Sim),
}

const fn fault(name: &'static str, workload: Workload, inject: fn(&mut Sim)) -> Fault {
    Fault { name, workload, inject }
}

pub const FAULTS: &[Fault] = &[
    fault("a stale read", Workload::Register, |sim| {
        let (key, old, new) = (sim.key(), sim.value(), sim.value());
        write(sim, &key, old);
        write(sim, &key, new);
        read(sim, &key, Some(old));
    }),
    fault("an acknowledged write that never was", Workload::Register, |sim| {
        let (key, old, lost) = (sim.key(), sim.value(), sim.value());
        write(sim, &key, old);
        let lost = Action::Register(Register::Write { key: key.clone(), value: lost });
        sim.told(lost.clone(), lost, None);
        sim.honest(Action::Register(Register::Read { key, value: None }));
    }),
    fault("a compare that does not compare", Workload::Register, |sim| {
        let (key, never, to) = (sim.key(), sim.value(), sim.value());
        sim.store.put(key.clone(), to);
        let cas = Action::Register(Register::Cas { key, from: Some(never), to });
        sim.told(cas.clone(), cas, None);
    }),
    fault("a write that is made twice", Workload::Register, |sim| {
        let (key, once, other) = (sim.key(), sim.value(), sim.value());
        write(sim, &key, once);
        write(sim, &key, other);
        read(sim, &key, Some(other));
        sim.store.put(key.clone(), once);
        read(sim, &key, Some(once));
    }),
    fault("a read of what failed", Workload::Register, |sim| {
        let (key, value, process) = (sim.key(), sim.value(), sim.process());
        let write = Action::Register(Register::Write { key: key.clone(), value });
        sim.event(process, Kind::Invoke, write.clone(), None);
        sim.event(process, Kind::Fail, write, None);
        read(sim, &key, Some(value));
    }),
    fault("a lost element", Workload::Set, |sim| {
        let (key, element) = (sim.key(), sim.value());
        let add = Action::Set(Set::Add { key: key.clone(), element });
        sim.told(add.clone(), add, None);
    }),
    fault("an element of nobody", Workload::Set, |sim| {
        let (key, element) = (sim.key(), sim.value());
        sim.store.lists.entry(key).or_default().push(element);
    }),
    fault("a read that misses an element", Workload::Set, |sim| {
        let (key, element) = (sim.key(), sim.value());
        sim.honest(Action::Set(Set::Add { key: key.clone(), element }));
        let all = sim.store.lists[&key].iter().copied().filter(|other| *other != element).collect();
        let read = |elements| Action::Set(Set::Read { key: key.clone(), elements });
        sim.told(read(None), read(Some(all)), None);
    }),
    fault("a lost append", Workload::Append, |sim| {
        let append = vec![Append::Append { key: sim.key(), value: sim.value() }];
        sim.told(Action::Append(append.clone()), Action::Append(append), None);
    }),
    fault("a read of an aborted append", Workload::Append, |sim| {
        let (key, value, process) = (sim.key(), sim.value(), sim.process());
        let append = Action::Append(vec![Append::Append { key: key.clone(), value }]);
        sim.event(process, Kind::Invoke, append.clone(), None);
        sim.event(process, Kind::Fail, append, None);
        sim.store.lists.entry(key).or_default().push(value);
    }),
    fault("half a transaction read", Workload::Append, |sim| {
        let [one, other] = [Key::from(0), Key::from(1)];
        let before = sim.store.lists.get(&other).cloned().unwrap_or_default();
        let append = |key: &Key, value| Append::Append { key: key.clone(), value };
        let appends = vec![append(&one, sim.value()), append(&other, sim.value())];
        sim.honest(Action::Append(appends));
        let after = sim.store.lists[&one].clone();
        let read = |key: &Key, list| Append::Read { key: key.clone(), list };
        let asked = Action::Append(vec![read(&one, None), read(&other, None)]);
        sim.told(asked, Action::Append(vec![read(&one, Some(after)), read(&other, Some(before))]), None);
    }),
    fault("write skew", Workload::Append, |sim| {
        let [one, other] = [Key::from(0), Key::from(1)];
        let list = |sim: &Sim, key: &Key| Some(sim.store.lists.get(key).cloned().unwrap_or_default());
        let (of_one, of_other) = (list(sim, &one), list(sim, &other));
        let (first, second) = (sim.process(), sim.process());
        let (a, b) = (sim.value(), sim.value());
        let transaction = |reads: &Key, list, appends: &Key, value| {
            let read = Append::Read { key: reads.clone(), list };
            Action::Append(vec![read, Append::Append { key: appends.clone(), value }])
        };
        sim.event(first, Kind::Invoke, transaction(&one, None, &other, a), None);
        sim.event(second, Kind::Invoke, transaction(&other, None, &one, b), None);
        sim.store.lists.entry(other.clone()).or_default().push(a);
        sim.store.lists.entry(one.clone()).or_default().push(b);
        sim.event(first, Kind::Ok, transaction(&one, of_one, &other, a), None);
        sim.event(second, Kind::Ok, transaction(&other, of_other, &one, b), None);
    }),
    fault("money from nowhere", Workload::Bank, |sim| {
        let mut balances = sim.store.balances.clone();
        *balances.entry(sim.key()).or_default() += 7;
        let read = |balances| Action::Bank(Bank::Read { balances });
        sim.told(read(None), read(Some(balances)), Some(sim.store.revision));
    }),
    fault("a transfer that is made twice", Workload::Bank, |sim| {
        let [from, to] = QUIET.map(Key::from);
        let transfer = Action::Bank(Bank::Transfer { from, to, amount: 10 });
        sim.honest(transfer.clone());
        sim.store.apply(&transfer);
        sim.honest(Action::Bank(Bank::Read { balances: None }));
    }),
    fault("an acknowledged transfer that never was", Workload::Bank, |sim| {
        let [from, to] = QUIET.map(Key::from);
        let transfer = Action::Bank(Bank::Transfer { from, to, amount: 10 });
        let revision = sim.store.next();
        sim.told(transfer.clone(), transfer, Some(revision));
        sim.honest(Action::Bank(Bank::Read { balances: None }));
    }),
    fault("an event that is never delivered", Workload::Watch, |sim| {
        let (revision, _) = change(sim);
        sim.watched(0, Changes::new(), revision);
    }),
    fault("an event that is delivered twice", Workload::Watch, |sim| {
        let (revision, changes) = change(sim);
        sim.watched(0, changes.clone(), revision);
        sim.watched(0, changes, revision);
    }),
    fault("half a transaction delivered", Workload::Watch, |sim| {
        let (revision, changes) = change(sim);
        sim.watched(0, changes.into_iter().take(1).collect(), revision);
    }),
    fault("events out of order", Workload::Watch, |sim| {
        let (first, of_first) = change(sim);
        let (second, of_second) = next_change(sim);
        sim.watched(0, of_second, second);
        sim.watched(0, of_first, first);
    }),
    fault("an event of what failed", Workload::Watch, |sim| {
        sim.catch_up(0);
        let (changes, process) = (some_changes(sim), sim.process());
        let change = Action::Watch(Watch::Change { changes: changes.clone() });
        sim.event(process, Kind::Invoke, change.clone(), None);
        sim.event(process, Kind::Fail, change, None);
        let revision = sim.store.next();
        sim.watched(0, changes, revision);
    }),
    fault("a write under an old fence", Workload::Lock, |sim| {
        let lock = sim.key();
        let old = acquire(sim, &lock);
        acquire(sim, &lock);
        let value = sim.value();
        let write = Action::Lock(Lock::Write { lock: lock.clone(), fence: old, value });
        let revision = sim.store.put(lock, value);
        sim.told(write.clone(), write, Some(revision));
    }),
    fault("a fence for two", Workload::Lock, |sim| {
        let lock = sim.key();
        let fence = acquire(sim, &lock);
        let acquire = |fence| Action::Lock(Lock::Acquire { lock: lock.clone(), fence });
        sim.told(acquire(None), acquire(Some(fence)), None);
    }),
    fault("a guarded value that goes back", Workload::Lock, |sim| {
        let lock = sim.key();
        let (old, late, new) = (acquire(sim, &lock), sim.value(), sim.value());
        // The old holder's write is on its way when the new one takes over.
        let process = sim.process();
        let write = |fence, value| Action::Lock(Lock::Write { lock: lock.clone(), fence, value });
        sim.event(process, Kind::Invoke, write(old, late), None);
        let newer = acquire(sim, &lock);
        sim.honest(write(newer, new));
        sim.store.put(lock.clone(), late);
        sim.honest(Action::Lock(Lock::Read { lock, value: None }));
    }),
    fault("a change that is made twice", Workload::Idempotency, |sim| {
        let (key, id) = (Key::from(QUIET[0]), sim.value());
        sim.honest(Action::Idempotency(Idempotency::Apply { key: key.clone(), id }));
        *sim.store.counts.entry(key.clone()).or_default() += 1;
        sim.honest(Action::Idempotency(Idempotency::Count { key, count: None }));
    }),
    fault("an acknowledged change that never was", Workload::Idempotency, |sim| {
        let (key, id) = (Key::from(QUIET[0]), sim.value());
        let apply = Action::Idempotency(Idempotency::Apply { key: key.clone(), id });
        sim.told(apply.clone(), apply, None);
        sim.honest(Action::Idempotency(Idempotency::Count { key, count: None }));
    }),
    fault("a change that is answered with two revisions", Workload::Idempotency, |sim| {
        let (key, id) = (sim.key(), sim.value());
        let apply = Action::Idempotency(Idempotency::Apply { key, id });
        sim.honest(apply.clone());
        let again = sim.store.next();
        sim.told(apply.clone(), apply, Some(again));
    }),
    fault("a session that does not see its own write", Workload::Session, |sim| {
        let (key, value) = (sim.key(), sim.value());
        let before = sim.store.entries.get(&key).copied();
        sim.honest(Action::Session(Session::Write { session: 77, key: key.clone(), value }));
        let read = |value| Action::Session(Session::Read { session: 77, key: key.clone(), value });
        sim.told(read(None), read(before.map(|entry| entry.value)), before.map(|entry| entry.revision));
    }),
    fault("a session that goes back", Workload::Session, |sim| {
        let (key, old, new) = (sim.key(), sim.value(), sim.value());
        let write = |value| Action::Session(Session::Write { session: 78, key: key.clone(), value });
        let read = |value| Action::Session(Session::Read { session: 77, key: key.clone(), value });
        sim.honest(write(old));
        let revision = sim.store.revision;
        sim.honest(write(new));
        sim.honest(read(None));
        sim.told(read(None), read(Some(old)), Some(revision));
    }),
];

fn write(sim: &mut Sim, key: &Key, value: i64) {
    sim.honest(Action::Register(Register::Write { key: key.clone(), value }));
}

fn read(sim: &mut Sim, key: &Key, value: Option<i64>) {
    let read = |value| Action::Register(Register::Read { key: key.clone(), value });
    sim.told(read(None), read(value), None);
}

fn acquire(sim: &mut Sim, lock: &Key) -> u64 {
    match sim.honest(Action::Lock(Lock::Acquire { lock: lock.clone(), fence: None })) {
        Action::Lock(Lock::Acquire { fence: Some(fence), .. }) => fence,
        other => panic!("{other:?}"),
    }
}

type Changes = BTreeMap<Key, Option<i64>>;

/// A change that is acknowledged, and next in line for the first watcher.
fn change(sim: &mut Sim) -> (u64, Changes) {
    sim.catch_up(0);
    next_change(sim)
}

fn next_change(sim: &mut Sim) -> (u64, Changes) {
    let changes = some_changes(sim);
    sim.honest(Action::Watch(Watch::Change { changes: changes.clone() }));
    (sim.store.revision, changes)
}

fn some_changes(sim: &mut Sim) -> Changes {
    (0..3).map(|key| (Key::from(key), Some(sim.value()))).collect()
}
