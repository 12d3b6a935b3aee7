//! Sessions that carry the newest revision they have seen, and read from any peer what that has applied by then: they see
//! their own writes, and never less than before.

use async_trait::async_trait;
use lake_client::store::{Consistency, Error, MetaStore, ReadOptions};
use lake_proto::kv::{Op, Revision, Txn};
use rand::Rng;

use super::access::Access;
use super::{Actor, Frame, Plan, Unique, number_of, place};
use crate::history::{Action, Session, Workload};
use crate::run::recorder::Scribe;

const KEYS: i64 = 8;

pub(super) fn plan(clients: usize) -> Plan {
    let values = Unique::default();
    let client = |session: usize| Client { session: session as u64, values: values.clone(), seen: 0 };
    Plan::of(clients, client, Final { session: clients as u64 })
}

struct Client {
    session: u64,
    values: Unique,
    /// The newest revision that the session has seen.
    seen: Revision,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let key = access.rng.random_range(0..KEYS);
        if access.chance(0.6) {
            if let Ok(revision) = read(self.session, key, Consistency::Local, self.seen, access, scribe).await {
                self.seen = self.seen.max(revision);
            }
            return;
        }
        let value = self.values.next();
        let action = Action::Session(Session::Write { session: self.session, key: key.into(), value });
        let place = place(Workload::Session, &key.into());
        let put = Op::put(place.clone(), value.to_string());
        scribe.invoke(action.clone());
        match access.store.commit(Txn { then: vec![put], ..Txn::default() }, access.deadline()).await {
            Ok(done) => {
                self.seen = self.seen.max(done.result.revision);
                scribe.ok(action, Some(done.result.revision), None);
                access.ledger.put(&place, done.result.revision);
            }
            Err(error) => scribe.change_failed(action, &error),
        }
    }
}

/// Reads a key from any peer; gives the revision of the state it was read from.
async fn read(
    session: u64,
    key: i64,
    consistency: Consistency,
    min_revision: Revision,
    access: &mut Access,
    scribe: &mut Scribe,
) -> Result<Revision, Error> {
    let action = |value| Action::Session(Session::Read { session, key: key.into(), value });
    let options = ReadOptions { consistency, min_revision, snapshot: None };
    let place = place(Workload::Session, &key.into());
    let from = access.any_peer();
    scribe.invoke(action(None));
    let (answer, peer) = access.get(from, &place, options).await;
    match answer {
        Ok(read) => {
            let entry = read.value.as_ref();
            let value = entry.and_then(|entry| number_of(&entry.value));
            scribe.ok(action(value), entry.map(|entry| entry.mod_revision), peer);
            Ok(read.revision)
        }
        Err(error) => {
            scribe.read_failed(action(None), &error, peer);
            Err(error)
        }
    }
}

struct Final {
    session: u64,
}

#[async_trait]
impl Frame for Final {
    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        for key in 0..KEYS {
            read(self.session, key, Consistency::Linearizable, 0, access, scribe).await?;
        }
        Ok(())
    }
}
