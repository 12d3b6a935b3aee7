//! A store that keeps every promise: one state, changed by one action at a time.

use std::collections::BTreeMap;

use lake_chaos::history::{Action, Append, Bank, Idempotency, Key, Lock, Register, Session, Set};

/// One key's value, and the revision at which it was changed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entry {
    pub value: i64,
    pub revision: u64,
}

/// What an action came to.
pub enum Answer {
    /// With the revision that the answer carries.
    Done(Action, Option<u64>),
    Refused,
}

/// The state of everything.
#[derive(Debug, Clone, Default)]
pub struct Store {
    pub revision: u64,
    pub entries: BTreeMap<Key, Entry>,
    pub lists: BTreeMap<Key, Vec<i64>>,
    pub balances: BTreeMap<Key, i64>,
    /// How often each key was changed.
    pub counts: BTreeMap<Key, u64>,
    pub holders: BTreeMap<Key, u64>,
    /// Every change of watched keys.
    pub log: Vec<(u64, BTreeMap<Key, Option<i64>>)>,
}

impl Store {
    /// Carries out what can be told without knowing who asks. Watchers are the simulation's own.
    pub fn apply(&mut self, action: &Action) -> Answer {
        let done = |action: Action, revision: u64| Answer::Done(action, Some(revision));
        match action.clone() {
            Action::Register(Register::Read { key, .. }) => {
                let entry = self.entries.get(&key).copied();
                let value = entry.map(|entry| entry.value);
                Answer::Done(Action::Register(Register::Read { key, value }), entry.map(|entry| entry.revision))
            }
            Action::Register(Register::Write { key, value }) => done(action.clone(), self.put(key, value)),
            Action::Register(Register::Cas { key, from, to }) => {
                match self.entries.get(&key).map(|entry| entry.value) == from {
                    true => done(action.clone(), self.put(key, to)),
                    false => Answer::Refused,
                }
            }
            Action::Set(Set::Add { key, element }) => {
                self.lists.entry(key).or_default().push(element);
                done(action.clone(), self.next())
            }
            Action::Set(Set::Read { key, .. }) => {
                let elements = Some(self.lists.get(&key).cloned().unwrap_or_default());
                done(Action::Set(Set::Read { key, elements }), self.revision)
            }
            Action::Append(steps) => {
                let answered = steps.into_iter().map(|step| match step {
                    Append::Append { key, value } => {
                        self.lists.entry(key.clone()).or_default().push(value);
                        Append::Append { key, value }
                    }
                    Append::Read { key, .. } => {
                        let list = Some(self.lists.get(&key).cloned().unwrap_or_default());
                        Append::Read { key, list }
                    }
                });
                let answered = Action::Append(answered.collect());
                done(answered, self.next())
            }
            Action::Bank(Bank::Open { balances }) => {
                self.balances = balances;
                done(action.clone(), self.next())
            }
            Action::Bank(Bank::Transfer { from, to, amount }) => {
                if self.balances[&from] < amount {
                    return Answer::Refused;
                }
                *self.balances.entry(from).or_default() -= amount;
                *self.balances.entry(to).or_default() += amount;
                done(action.clone(), self.next())
            }
            Action::Bank(Bank::Read { .. }) => {
                done(Action::Bank(Bank::Read { balances: Some(self.balances.clone()) }), self.revision)
            }
            Action::Lock(Lock::Acquire { lock, .. }) => {
                let fence = self.next();
                self.holders.insert(lock.clone(), fence);
                done(Action::Lock(Lock::Acquire { lock, fence: Some(fence) }), fence)
            }
            Action::Lock(Lock::Release { lock, fence }) => match self.holders.get(&lock) == Some(&fence) {
                true => {
                    self.holders.remove(&lock);
                    done(action.clone(), self.next())
                }
                false => Answer::Refused,
            },
            Action::Lock(Lock::Write { lock, fence, value }) => match self.holders.get(&lock) == Some(&fence) {
                true => done(action.clone(), self.put(lock, value)),
                false => Answer::Refused,
            },
            Action::Lock(Lock::Read { lock, .. }) => {
                let value = self.entries.get(&lock).map(|entry| entry.value);
                Answer::Done(Action::Lock(Lock::Read { lock, value }), None)
            }
            Action::Idempotency(Idempotency::Apply { key, .. }) => {
                *self.counts.entry(key).or_default() += 1;
                done(action.clone(), self.next())
            }
            Action::Idempotency(Idempotency::Count { key, .. }) => {
                let count = Some(self.counts.get(&key).copied().unwrap_or(0));
                Answer::Done(Action::Idempotency(Idempotency::Count { key, count }), None)
            }
            Action::Session(Session::Write { key, value, .. }) => done(action.clone(), self.put(key, value)),
            Action::Session(Session::Read { session, key, .. }) => {
                let entry = self.entries.get(&key).copied();
                let value = entry.map(|entry| entry.value);
                let answer = Action::Session(Session::Read { session, key, value });
                Answer::Done(answer, entry.map(|entry| entry.revision))
            }
            Action::Watch(lake_chaos::history::Watch::Change { changes }) => {
                let revision = self.next();
                for (key, value) in &changes {
                    match value {
                        Some(value) => self.entries.insert(key.clone(), Entry { value: *value, revision }),
                        None => self.entries.remove(key),
                    };
                }
                self.log.push((revision, changes));
                done(action.clone(), revision)
            }
            Action::Watch(_) | Action::Fault(_) => unreachable!("the simulation does these itself"),
            action => unreachable!("there is no model here of {action:?}"),
        }
    }

    /// The watched keys and their values.
    pub fn listed(&self) -> BTreeMap<Key, i64> {
        self.entries.iter().map(|(key, entry)| (key.clone(), entry.value)).collect()
    }

    pub fn next(&mut self) -> u64 {
        self.revision += 1;
        self.revision
    }

    pub fn put(&mut self, key: Key, value: i64) -> u64 {
        let revision = self.next();
        self.entries.insert(key, Entry { value, revision });
        revision
    }
}
