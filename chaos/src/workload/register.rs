//! Single registers: reads from every peer, blind writes, and compare-and-set by the revision, by the value, or by the version
//! and when the key was created.
//!
//! A compare-and-set expects what its client last saw there, which somebody else may have changed since. If that is there still,
//! and it is refused, the client says so: values are written once, so that it is the very same. Some blind writes
//! delete the key and create it again, in one transaction: its versions begin anew then. A key is left after [`USES`]
//! operations.

use std::collections::HashMap;

use async_trait::async_trait;
use lake_client::store::{Error, MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Condition, Expected, KeyValue, Op, OpResult, Revision, Txn, TxnResult};
use rand::Rng;

use super::access::Access;
use super::rotation::Rotation;
use super::{Actor, Frame, Plan, Unique, number_of, place};
use crate::check::refusals;
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

/// What a client last saw under a key, or that it is absent.
type Seen = Option<There>;

#[derive(Debug, Clone, Copy)]
struct There {
    value: i64,
    revision: Revision,
    /// When the key was created and its version since, if the client knows.
    life: Option<(Revision, u64)>,
}

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
        let anew = access.chance(0.3);
        let delete = anew.then(|| Op::delete(place.clone()));
        let then = delete.into_iter().chain([Op::put(place.clone(), value.to_string())]).collect();
        scribe.invoke(action.clone());
        match access.store.commit(Txn { then, ..Txn::default() }, access.deadline()).await {
            Ok(done) => {
                let revision = done.result.revision;
                scribe.ok(action, Some(revision), None);
                access.ledger.put(&place, revision);
                self.seen.insert(key, Some(There { value, revision, life: anew.then_some((revision, 1)) }));
            }
            Err(error) => scribe.change_failed(action, &error),
        }
    }

    async fn cas(&mut self, key: i64, seen: Seen, access: &mut Access, scribe: &mut Scribe) {
        let to = self.values.next();
        let action = Action::Register(Register::Cas { key: key.into(), from: seen.map(|there| there.value), to });
        let place = place(Workload::Register, &key.into());
        let is = |condition| Compare { key: place.clone(), condition };
        let when = match (seen, access.rng.random_range(0..10)) {
            (None, _) => vec![Compare::expected(place.clone(), Expected::Absent)],
            (Some(There { value, .. }), 0..3) => vec![is(Condition::Value(value.to_string().into()))],
            (Some(There { life: Some((created, version)), .. }), 3..6) => {
                vec![is(Condition::CreateRevision(created)), is(Condition::Version(version))]
            }
            (Some(There { revision, .. }), _) => {
                vec![Compare::expected(place.clone(), Expected::ModRevision(revision))]
            }
        };
        let otherwise = if access.chance(0.3) { vec![Op::Get { key: place.clone() }] } else { vec![] };
        let txn = Txn { when, then: vec![Op::put(place.clone(), to.to_string())], otherwise };
        scribe.invoke(action.clone());
        match access.store.commit(txn, access.deadline()).await {
            Ok(done) if done.result.succeeded => {
                let revision = done.result.revision;
                scribe.ok(action, Some(revision), None);
                access.ledger.put(&place, revision);
                let life = match seen {
                    None => Some((revision, 1)),
                    Some(There { life, .. }) => life.map(|(created, version)| (created, version + 1)),
                };
                self.seen.insert(key, Some(There { value: to, revision, life }));
            }
            Ok(done) => {
                let there = done.result.observed.first().and_then(as_seen);
                self.seen.insert(key, there);
                match there {
                    // The first of two sendings did it, and only the second was answered.
                    Some(There { value, revision, .. }) if value == to => scribe.ok(action, Some(revision), None),
                    _ if done.resent => scribe.unknown(action, "sent twice, and the second compare failed"),
                    _ if is_wrong(seen, &done.result) => scribe.refused(action, refusals::WRONGLY),
                    _ => scribe.refused(action, "the compare failed"),
                }
            }
            Err(error) => scribe.change_failed(action, &error),
        }
    }
}

/// Whether a refusal shows just what was expected, or the other branch has found something else than the compares.
fn is_wrong(expected: Seen, refused: &TxnResult) -> bool {
    let value = |entry: Option<&KeyValue>| entry.and_then(|entry| number_of(&entry.value));
    let there = refused.observed.first();
    let found = refused.results.iter().find_map(|result| match result {
        OpResult::Get { entry } => Some(entry.as_ref()),
        _ => None,
    });
    value(there) == expected.map(|there| there.value) || found.is_some_and(|found| found != there)
}

fn as_seen(entry: &KeyValue) -> Seen {
    let life = Some((entry.create_revision, entry.version));
    Some(There { value: number_of(&entry.value)?, revision: entry.mod_revision, life })
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
            scribe.ok(action(seen.map(|there| there.value)), seen.map(|there| there.revision), peer);
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
