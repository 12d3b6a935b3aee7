//! Transactions over lists that only grow: what was read must not have changed when the appends are made. That is compared list by
//! list, or for all lists at once.

use std::collections::BTreeMap;

use async_trait::async_trait;
use lake_client::store::{Committed, Error, MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Condition, Expected, KeyValue, Op, Revision, Txn};
use rand::Rng;

use super::access::Access;
use super::rotation::Rotation;
use super::{Actor, Frame, Plan, Unique, numbers_of, numbers_to, place};
use crate::history::{Action, Append, Key, Workload};
use crate::run::recorder::Scribe;

/// Steps on one list.
const USES: u64 = 120;
/// Most steps in one transaction.
const MAX_STEPS: usize = 4;
/// Lists in one final read.
const FINAL_KEYS: usize = 16;
/// How often one compare is for all lists.
const GUARDED_TOGETHER: f64 = 0.03;
/// How often a list is compared as what lies under a prefix. Lists whose names begin with its own then count, too.
const GUARDED_AS_PREFIX: f64 = 0.2;

pub(super) fn plan(clients: usize) -> Plan {
    let lists = Rotation::new((clients / 2).max(3), USES);
    let values = Unique::default();
    let client = |_| Client { lists: lists.clone(), values: values.clone() };
    Plan::of(clients, client, Final { lists: lists.clone() })
}

struct Client {
    lists: Rotation,
    values: Unique,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let steps: Vec<Append> = (0..access.rng.random_range(1..=MAX_STEPS))
            .map(|_| {
                let key = Key::from(self.lists.pick(&mut access.rng));
                match access.chance(0.5) {
                    true => Append::Append { key, value: self.values.next() },
                    false => Append::Read { key, list: None },
                }
            })
            .collect();
        // How it ended is in the history.
        let _ = transact(steps, access, scribe).await;
    }
}

fn key_of(step: &Append) -> &Key {
    match step {
        Append::Append { key, .. } | Append::Read { key, .. } => key,
    }
}

/// Runs the steps as one transaction and writes it down.
async fn transact(steps: Vec<Append>, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    let asked = Action::Append(steps.clone());
    let writes = steps.iter().any(|step| matches!(step, Append::Append { .. }));
    let mut places: BTreeMap<String, Key> = BTreeMap::new();
    for step in &steps {
        places.insert(place(Workload::Append, key_of(step)), key_of(step).clone());
    }
    let keys: Vec<String> = places.keys().cloned().collect();
    scribe.invoke(asked.clone());
    let deadline = access.deadline();
    let (read, peer) = match access.any_peer() {
        Some((id, at)) => (access.store.batch_get_from(&at, &keys, ReadOptions::default(), deadline).await, Some(id)),
        None => (access.store.batch_get(&keys, ReadOptions::default(), deadline).await, None),
    };
    let read = match read {
        Ok(read) => read,
        Err(error) => {
            scribe.read_failed(asked, &error, peer);
            return Err(error);
        }
    };
    let before: BTreeMap<&str, &KeyValue> = read.value.iter().map(|entry| (entry.key.as_str(), entry)).collect();
    let mut lists: BTreeMap<Key, Vec<i64>> = BTreeMap::new();
    for (place, key) in &places {
        lists.insert(key.clone(), before.get(place.as_str()).map_or(Vec::new(), |entry| numbers_of(&entry.value)));
    }
    let mut appended: BTreeMap<String, Key> = BTreeMap::new();
    let mut answered = Vec::with_capacity(steps.len());
    for step in steps {
        match &step {
            Append::Append { key, value } => {
                lists.entry(key.clone()).or_default().push(*value);
                appended.insert(place(Workload::Append, key), key.clone());
                answered.push(step);
            }
            Append::Read { key, .. } => {
                let list = lists.get(key).cloned().unwrap_or_default();
                answered.push(Append::Read { key: key.clone(), list: Some(list) });
            }
        }
    }
    let answered = Action::Append(answered);
    if !writes {
        scribe.ok(answered, Some(read.revision), peer);
        return Ok(());
    }
    let txn = Txn {
        when: guards(&keys, &before, read.revision, access),
        then: appended.iter().map(|(place, key)| Op::put(place.clone(), numbers_to(&lists[key]))).collect(),
        otherwise: vec![],
    };
    match access.store.commit(txn, deadline).await {
        Ok(Committed { result, .. }) if result.succeeded => {
            scribe.ok(answered, Some(result.revision), None);
            appended.keys().for_each(|place| access.ledger.put(place, result.revision));
        }
        Ok(done) => {
            // The first of two sendings may have done it: then what it wrote stands there, or begins what stands there.
            let wrote = |(place, key): (&String, &Key)| {
                let there = done.result.observed.iter().find(|entry| entry.key == *place);
                there.is_some_and(|entry| numbers_of(&entry.value).starts_with(&lists[key]))
            };
            match done.resent {
                true if appended.iter().all(wrote) => scribe.ok(answered, None, None),
                true => scribe.unknown(asked, "sent twice, and the second compare failed"),
                false => scribe.refused(asked, "what was read has changed"),
            }
        }
        Err(error) => {
            scribe.change_failed(asked, &error);
            return Err(error);
        }
    }
    Ok(())
}

/// Compares that fail if any of these lists is not as it was read, at this revision.
fn guards(
    keys: &[String],
    before: &BTreeMap<&str, &KeyValue>,
    revision: Revision,
    access: &mut Access,
) -> Vec<Compare> {
    let unchanged = |prefix: String| Compare { key: prefix, condition: Condition::PrefixUnchangedSince(revision) };
    if access.chance(GUARDED_TOGETHER) {
        return vec![unchanged(place(Workload::Append, &Key::from("")))];
    }
    let mut guards = Vec::with_capacity(keys.len());
    for key in keys {
        let as_prefix = access.chance(GUARDED_AS_PREFIX);
        guards.push(match before.get(key.as_str()) {
            Some(_) if as_prefix => unchanged(key.clone()),
            None if as_prefix => Compare::prefix_empty(key.clone()),
            Some(entry) => Compare::expected(key.clone(), Expected::ModRevision(entry.mod_revision)),
            None => Compare::expected(key.clone(), Expected::Absent),
        });
    }
    guards
}

struct Final {
    lists: Rotation,
}

#[async_trait]
impl Frame for Final {
    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        let all: Vec<i64> = self.lists.all().collect();
        for some in all.chunks(FINAL_KEYS) {
            let steps = some.iter().map(|key| Append::Read { key: Key::from(*key), list: None }).collect();
            transact(steps, access, scribe).await?;
        }
        Ok(())
    }
}
