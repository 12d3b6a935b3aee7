//! Blind changes whose answers are lost on purpose and that are then sent again, as the same request of a session. A key's
//! version counts how often it was changed.
//!
//! An answer is lost by not waiting for it: the first sending has so little time that it often arrives and is not answered.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::store::{Applied, Error, MetaStore, ReadOptions};
use lake_proto::coordination::{SessionId, Stamp};
use lake_proto::kv::{Op, Txn};
use rand::Rng;

use super::access::Access;
use super::rotation::Rotation;
use super::{Actor, Frame, Plan, Unique, place};
use crate::history::{Action, Idempotency, Workload};
use crate::run::recorder::Scribe;

/// Operations on one key.
const USES: u64 = 100;
/// Longer than any run: the client's own silence must not end the session.
const SESSION_TTL: Duration = Duration::from_secs(3600);
/// The time of a sending whose answer is to be lost.
const TOO_SHORT_US: std::ops::Range<u64> = 200..6_000;
/// Sendings with too little time, before the one that is waited for.
const MAX_LOST: u32 = 3;

pub(super) fn plan(clients: usize) -> Plan {
    let keys = Rotation::new(clients.max(2), USES);
    let ids = Unique::default();
    let actor = || Box::new(Client { keys: keys.clone(), ids: ids.clone(), session: None }) as Box<dyn Actor>;
    Plan { actors: (0..clients).map(|_| actor()).collect(), frame: Box::new(Final { keys: keys.clone() }) }
}

struct Client {
    keys: Rotation,
    ids: Unique,
    /// With the sequence of the next request.
    session: Option<(SessionId, u64)>,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let key = self.keys.pick(&mut access.rng);
        if access.chance(0.25) {
            // How it ended is in the history.
            let _ = count(key, access, scribe).await;
            return;
        }
        let (session, sequence) = match self.session {
            Some(session) => session,
            None => match access.store.open_session(SESSION_TTL, "chaos", access.deadline()).await {
                Ok(session) => (session, 1),
                // Nothing has been asked for yet.
                Err(_) => return,
            },
        };
        let stamp = Stamp { session, sequence, lowest_unanswered: sequence };
        self.session = match apply(key, self.ids.next(), stamp, access, scribe).await {
            Ok(()) => Some((session, sequence + 1)),
            // The request may be on its way still: a later one must not run ahead of it under this session.
            Err(_) => None,
        };
    }
}

async fn apply(key: i64, id: i64, stamp: Stamp, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    let action = Action::Idempotency(Idempotency::Apply { key: key.into(), id });
    let place = place(Workload::Idempotency, &key.into());
    let put = Op::put(place.clone(), id.to_string());
    let txn = Txn { then: vec![put], ..Txn::default() };
    let deadline = access.deadline();
    scribe.invoke(action.clone());
    let mut in_doubt = false;
    for _ in 0..access.rng.random_range(0..=MAX_LOST) {
        let too_short = Duration::from_micros(access.rng.random_range(TOO_SHORT_US));
        // Told to nobody, neither the client nor the peer: the connection stays, and the answer comes to nobody.
        let sending = access.store.commit_stamped(txn.clone(), stamp, deadline);
        match tokio::time::timeout(too_short, sending).await {
            Ok(Ok(done)) => {
                // It was quicker than that. Sent again all the same, it must be answered with the same revision.
                let again = access.store.commit_stamped(txn.clone(), stamp, deadline).await;
                let revision = again.unwrap_or(done).result.revision;
                scribe.ok(action, Some(revision), None);
                access.ledger.put(&place, revision);
                return Ok(());
            }
            Ok(Err(error)) => in_doubt |= error.applied() == Applied::Unknown,
            Err(_) => in_doubt = true,
        }
    }
    match access.store.commit_stamped(txn, stamp, deadline).await {
        Ok(done) => {
            scribe.ok(action, Some(done.result.revision), None);
            access.ledger.put(&place, done.result.revision);
            Ok(())
        }
        // Not applied by the last sending, but perhaps by one before it.
        Err(error) if in_doubt => {
            scribe.unknown(action, &error.to_string());
            Err(error)
        }
        Err(error) => {
            scribe.change_failed(action, &error);
            Err(error)
        }
    }
}

/// How often the key was changed, as any peer has it.
async fn count(key: i64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    let action = |count| Action::Idempotency(Idempotency::Count { key: key.into(), count });
    let place = place(Workload::Idempotency, &key.into());
    let (from, deadline): (_, Instant) = (access.any_peer(), access.deadline());
    scribe.invoke(action(None));
    let (answer, peer) = match from {
        Some((id, at)) => (access.store.get_from(&at, &place, ReadOptions::default(), deadline).await, Some(id)),
        None => (access.store.get(&place, ReadOptions::default(), deadline).await, None),
    };
    match answer {
        Ok(read) => {
            let version = read.value.as_ref().map_or(0, |entry| entry.version);
            scribe.ok(action(Some(version)), read.value.map(|entry| entry.mod_revision), peer);
            Ok(())
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
            count(key, access, scribe).await?;
        }
        Ok(())
    }
}
