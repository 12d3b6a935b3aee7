//! Single registers: reads from every peer, blind writes, and compare-and-set by the revision or by the value.
//!
//! A compare-and-set expects what its client last saw there, which somebody else may have changed since. A key is left after
//! [`USES`] operations.

use std::collections::HashMap;

use async_trait::async_trait;
use lake_client::store::{Error, MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Condition, Expected, KeyValue, Op, Revision, Txn};
use rand::Rng;

use super::access::Access;
use super::rotation::Rotation;
use super::{Actor, Frame, Plan, Unique, number_of, place};
use crate::history::{Action, Key, Register, Workload};
use crate::run::recorder::Scribe;

/// Operations on one key.
const USES: u64 = 200;
/// What a client remembers of keys it saw.
const MAX_SEEN: usize = 1000;

pub(super) fn plan(clients: usize) -> Plan {
    let keys = Rotation::new(clients.max(2), USES);
    let values = Unique::default();
    let client = |_| Client { keys: keys.clone(), values: values.clone(), seen: HashMap::new() };
    Plan::of(clients, client, Final { keys: keys.clone() })
}

/// What a client last saw under a key: the value and its revision, or that it is absent.
type Seen = Option<(i64, Revision)>;

struct Client {
    keys: Rotation,
    values: Unique,
    seen: HashMap<i64, Seen>,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let key = self.keys.pick(&mut access.rng);
        if self.seen.len() > MAX_SEEN {
            self.seen.clear();
        }
        match (access.rng.random_range(0..100), self.seen.get(&key).copied()) {
            (0..20, _) => self.write(key, access, scribe).await,
            (20..55, Some(seen)) => self.cas(key, seen, access, scribe).await,
            _ => {
                if let Ok(seen) = read(key, access, scribe).await {
                    self.seen.insert(key, seen);
                }
            }
        }
    }
}

impl Client {
    async fn write(&mut self, key: i64, access: &mut Access, scribe: &mut Scribe) {
        let value = self.values.next();
        let action = Action::Register(Register::Write { key: key.into(), value });
        let place = place(Workload::Register, &key.into());
        let put = Op::put(place.clone(), value.to_string());
        scribe.invoke(action.clone());
        match access.store.commit(Txn { then: vec![put], ..Txn::default() }, access.deadline()).await {
            Ok(done) => {
                scribe.ok(action, Some(done.result.revision), None);
                access.ledger.put(&place, done.result.revision);
                self.seen.insert(key, Some((value, done.result.revision)));
            }
            Err(error) => scribe.change_failed(action, &error),
        }
    }

    async fn cas(&mut self, key: i64, seen: Seen, access: &mut Access, scribe: &mut Scribe) {
        let to = self.values.next();
        let action = Action::Register(Register::Cas { key: key.into(), from: seen.map(|(value, _)| value), to });
        let place = place(Workload::Register, &key.into());
        let compare = match seen {
            None => Compare::expected(place.clone(), Expected::Absent),
            Some((value, _)) if access.chance(0.3) => {
                Compare { key: place.clone(), condition: Condition::Value(value.to_string().into()) }
            }
            Some((_, revision)) => Compare::expected(place.clone(), Expected::ModRevision(revision)),
        };
        let txn = Txn { when: vec![compare], then: vec![Op::put(place.clone(), to.to_string())], otherwise: vec![] };
        scribe.invoke(action.clone());
        match access.store.commit(txn, access.deadline()).await {
            Ok(done) if done.result.succeeded => {
                scribe.ok(action, Some(done.result.revision), None);
                access.ledger.put(&place, done.result.revision);
                self.seen.insert(key, Some((to, done.result.revision)));
            }
            Ok(done) => {
                let there = done.result.observed.first().and_then(as_seen);
                self.seen.insert(key, there);
                match there {
                    // The first of two sendings did it, and only the second was answered.
                    Some((value, revision)) if value == to => scribe.ok(action, Some(revision), None),
                    _ if done.resent => scribe.unknown(action, "sent twice, and the second compare failed"),
                    _ => scribe.refused(action, "the compare failed"),
                }
            }
            Err(error) => scribe.change_failed(action, &error),
        }
    }
}

fn as_seen(entry: &KeyValue) -> Seen {
    Some((number_of(&entry.value)?, entry.mod_revision))
}

/// Reads a key, from any peer or from the leader.
async fn read(key: i64, access: &mut Access, scribe: &mut Scribe) -> Result<Seen, Error> {
    let place = place(Workload::Register, &key.into());
    let action = |value| Action::Register(Register::Read { key: Key::from(key), value });
    let from = if access.chance(0.75) { access.any_peer() } else { None };
    scribe.invoke(action(None));
    let (answer, peer) = access.get(from, &place, ReadOptions::default()).await;
    match answer {
        Ok(read) => {
            let seen = read.value.as_ref().and_then(as_seen);
            scribe.ok(action(seen.map(|(value, _)| value)), seen.map(|(_, revision)| revision), peer);
            Ok(seen)
        }
        Err(error) => {
            scribe.read_failed(action(None), &error, peer);
            Err(error)
        }
    }
}

struct Final {
    keys: Rotation,
}

#[async_trait]
impl Frame for Final {
    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        for key in self.keys.all() {
            read(key, access, scribe).await?;
        }
        Ok(())
    }
}
