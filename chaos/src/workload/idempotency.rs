//! Blind changes whose answers are lost on purpose and that are then sent again, as the same request of a session. A key's
//! version counts how often it was changed.
//!
//! Several changes of a session may be unanswered at a time: they are sent first one after the other, and again from the last
//! to the first, so that a session has to remember more than its newest request; or again in their order, each saying that
//! those before it were answered, so that a session forgets these, and just these.
//!
//! An answer is lost by not waiting for it: the first sendings have so little time that they often arrive and are not
//! answered. Each sending is an operation of its own in the history, under the id of the change, so that what each was
//! answered can be compared: one that was quicker than its time, or was waited for, is sent once more all the same.

use std::time::Duration;

use async_trait::async_trait;
use lake_client::store::{Error, ReadOptions};
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
/// Sessions that a client leaves after an unknown outcome end by themselves, or a long run would have more than there can be.
/// One that ends under a client that is seldom at it is opened anew.
const SESSION_TTL: Duration = Duration::from_secs(120);
/// The time of a sending whose answer is to be lost.
const TOO_SHORT_US: std::ops::Range<u64> = 200..6_000;
/// The probability that an answer is waited for though the change is sent again.
const WAITED_FOR: f64 = 0.1;
/// The probability that a change is sent once more when all were answered and the session has been told: it comes too late, as
/// what the network has kept may, and must be refused.
const LATE: f64 = 0.1;
/// Sendings with too little time, before the one that is waited for.
const MAX_LOST: u32 = 3;
/// Changes of a session that may be unanswered at a time.
const MAX_UNDER_WAY: usize = 3;

pub(super) fn plan(clients: usize) -> Plan {
    let keys = Rotation::new(clients.max(2), USES);
    let ids = Unique::default();
    let client = |_| Client { keys: keys.clone(), ids: ids.clone(), session: None };
    Plan::of(clients, client, Final { keys: keys.clone() })
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
        let under_way = access.rng.random_range(1..=MAX_UNDER_WAY);
        let requests = (sequence..).take(under_way).map(|own| {
            let key = if own == sequence { key } else { self.keys.pick(&mut access.rng) };
            Request::new(key, self.ids.next(), Stamp { session, sequence: own, lowest_unanswered: sequence })
        });
        let requests: Vec<Request> = requests.collect();
        self.session = match apply(&requests, access, scribe).await {
            Ok(()) => Some((session, sequence + under_way as u64)),
            // A request may be on its way still: a later one must not run ahead of it under this session.
            Err(_) => None,
        };
    }
}

/// Sends changes until each is answered in time, or one fails. The last answers count.
async fn apply(requests: &[Request], access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    for request in requests {
        for _ in 0..access.rng.random_range(0..=MAX_LOST) {
            let too_short = Duration::from_micros(access.rng.random_range(TOO_SHORT_US));
            // Some are waited for, however slow the machine: what is answered more than once is compared.
            let within = (!access.chance(WAITED_FOR)).then_some(too_short);
            if request.send(within, access, scribe).await.is_ok_and(|answered| answered) {
                break;
            }
        }
    }
    if access.chance(0.5) {
        for request in requests.iter().rev() {
            request.send(None, access, scribe).await?;
        }
    } else {
        for request in requests {
            let stamp = Stamp { lowest_unanswered: request.stamp.sequence, ..request.stamp };
            request.send_as(stamp, None, access, scribe).await?;
        }
    }
    if access.chance(LATE)
        && let Some((first, last)) = requests.first().zip(requests.last())
    {
        let stamp = Stamp { lowest_unanswered: last.stamp.sequence + 1, ..first.stamp };
        // It is refused, or its answer is in the history.
        let _ = first.send_as(stamp, None, access, scribe).await;
    }
    Ok(())
}

/// One change, as it is sent every time.
struct Request {
    action: Action,
    txn: Txn,
    place: String,
    stamp: Stamp,
}

impl Request {
    fn new(key: i64, id: i64, stamp: Stamp) -> Self {
        let place = place(Workload::Idempotency, &key.into());
        let put = Op::put(place.clone(), id.to_string());
        Self {
            action: Action::Idempotency(Idempotency::Apply { key: key.into(), id }),
            txn: Txn { then: vec![put], ..Txn::default() },
            place,
            stamp,
        }
    }

    /// Sends it once; says whether it was answered in time. Without `within` there is as much time as any operation has.
    async fn send(&self, within: Option<Duration>, access: &mut Access, scribe: &mut Scribe) -> Result<bool, Error> {
        self.send_as(self.stamp, within, access, scribe).await
    }

    async fn send_as(
        &self,
        stamp: Stamp,
        within: Option<Duration>,
        access: &mut Access,
        scribe: &mut Scribe,
    ) -> Result<bool, Error> {
        scribe.invoke(self.action.clone());
        // Told to nobody, neither the client nor the peer: the connection stays, and the answer comes to nobody.
        let sending = access.store.commit_stamped(self.txn.clone(), stamp, access.deadline());
        let answer = match within {
            Some(too_short) => match tokio::time::timeout(too_short, sending).await {
                Ok(answer) => answer,
                Err(_) => {
                    scribe.unknown(self.action.clone(), "its answer was not waited for");
                    return Ok(false);
                }
            },
            None => sending.await,
        };
        match answer {
            Ok(done) => {
                scribe.ok(self.action.clone(), Some(done.result.revision), None);
                access.ledger.put(&self.place, done.result.revision);
                Ok(true)
            }
            Err(error) => {
                scribe.change_failed(self.action.clone(), &error);
                Err(error)
            }
        }
    }
}

/// How often the key was changed, as any peer has it.
async fn count(key: i64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    let action = |count| Action::Idempotency(Idempotency::Count { key: key.into(), count });
    let place = place(Workload::Idempotency, &key.into());
    let from = access.any_peer();
    scribe.invoke(action(None));
    let (answer, peer) = access.get(from, &place, ReadOptions::default()).await;
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
