//! Blind changes whose answers are lost on purpose and that are then sent again, as the same request of a session. A key's
//! version counts how often it was changed.
//!
//! Several changes of a session may be unanswered at a time: they are sent first one after the other, and again from the last
//! to the first, so that a session has to remember more than its newest request; or again in their order, each saying that
//! those before it were answered, so that a session forgets these, and just these.
//!
//! An answer is lost by not waiting for it: the first sendings have so little time that they often arrive and are not
//! answered. Each sending is an operation of its own in the history, under the id of the change, so that what each was
//! answered can be compared: one that was quicker than its time, or was waited for, is sent once more all the same. Some changes
//! are large and ask for what was there before, so that their answer is kept in parts only.
//!
//! Now and then a client makes several changes and counts at once, as calls of one program are made: by its library's own
//! session and over one connection, where each must get its own number and its own answer.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::future::join_all;
use lake_client::clock;
use lake_client::store::{Error, MetaStore, ReadOptions};
use lake_proto::coordination::{SessionId, Stamp};
use lake_proto::kv::{Op, Txn};
use rand::Rng;

use super::access::Access;
use super::rotation::Rotation;
use super::{Actor, Frame, Plan, Unique, place};
use crate::check::idempotency;
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
/// The probability that a change is sent once more when later ones have told the session that it was answered: it comes too late,
/// as what the network has kept may, and must be refused.
const LATE: f64 = 0.3;
/// The probability that a client makes several calls at once.
const AT_ONCE: f64 = 0.15;
/// How many of them.
const MOST_AT_ONCE: usize = 6;
/// The probability that a change asks for what was there before, and that it writes so much that an answer with it is too large to
/// be kept whole.
const RETURNS_PREVIOUS: f64 = 0.3;
const LARGE: f64 = 0.2;
/// Digits of a large value, leading zeros counted.
const LARGE_DIGITS: usize = 6 << 10;
/// Sendings with too little time, before the one that is waited for.
const MAX_LOST: u32 = 3;
/// Changes of a session that may be unanswered at a time.
const MAX_UNDER_WAY: usize = 3;

pub(super) fn plan(clients: usize) -> Plan {
    let keys = Rotation::new(clients.max(2), USES);
    let ids = Unique::default();
    let client = |_| Client { keys: keys.clone(), ids: ids.clone(), session: None, answered: None };
    Plan::of(clients, client, Final { keys: keys.clone() })
}

struct Client {
    keys: Rotation,
    ids: Unique,
    session: Option<Session>,
    /// A change of the session that was answered before its last ones.
    answered: Option<Request>,
}

/// A session of the client's own.
struct Session {
    id: SessionId,
    /// Of the next request.
    sequence: u64,
    /// When the last request was sent that was answered.
    spoke: Instant,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        if access.chance(AT_ONCE) {
            return self.at_once(access, scribe).await;
        }
        let key = self.keys.pick(&mut access.rng);
        if access.chance(0.25) {
            let from = access.any_peer();
            // How it ended is in the history.
            let _ = count(key, from, access, scribe).await;
            return;
        }
        let asked = clock::now();
        let mut session = match self.session.take() {
            Some(session) => session,
            None => match access.store.open_session(SESSION_TTL, "chaos", access.deadline()).await {
                Ok(id) => Session { id, sequence: 1, spoke: asked },
                // Nothing has been asked for yet.
                Err(_) => return,
            },
        };
        let lowest_unanswered = session.sequence;
        let under_way = access.rng.random_range(1..=MAX_UNDER_WAY);
        let mut requests = Vec::with_capacity(under_way);
        for sequence in (lowest_unanswered..).take(under_way) {
            let key = if sequence == lowest_unanswered { key } else { self.keys.pick(&mut access.rng) };
            let stamp = Stamp { session: session.id, sequence, lowest_unanswered };
            requests.push(Request::new(key, self.ids.next(), stamp, access));
        }
        session.sequence += under_way as u64;
        let before = self.answered.take();
        // Otherwise a request may be on its way still: a later one must not run ahead of it under this session.
        if apply(&requests, &mut session, access, scribe).await.is_ok() {
            if access.chance(LATE)
                && let Some(late) = &before
            {
                // It is refused, or its answer is in the history.
                let _ = late.send(late.stamp, None, &mut session, access, scribe).await;
            }
            self.session = Some(session);
            self.answered = requests.into_iter().next();
        }
    }
}

impl Client {
    /// Several changes and counts at the same time. How each ended is in the history, as if there had been a client for it.
    async fn at_once(&self, access: &mut Access, scribe: &Scribe) {
        let mut calls = Vec::new();
        for _ in 0..access.rng.random_range(2..=MOST_AT_ONCE) {
            let id = access.chance(0.7).then(|| self.ids.next());
            let from = if access.chance(0.5) { access.any_peer() } else { None };
            calls.push((self.keys.pick(&mut access.rng), id, from, scribe.beside()));
        }
        let access = &*access;
        let calls = calls.into_iter().map(|(key, id, from, mut scribe)| async move {
            match id {
                Some(id) => change(key, id, access, &mut scribe).await,
                None => drop(count(key, from, access, &mut scribe).await),
            }
        });
        join_all(calls).await;
    }
}

/// A change as any program makes it.
async fn change(key: i64, id: i64, access: &Access, scribe: &mut Scribe) {
    let place = place(Workload::Idempotency, &key.into());
    let action = Action::Idempotency(Idempotency::Apply { key: key.into(), id });
    let txn = Txn { then: vec![Op::put(place.clone(), id.to_string())], ..Txn::default() };
    scribe.invoke(action.clone());
    match access.store.commit(txn, access.deadline()).await {
        Ok(done) => {
            scribe.ok(action, Some(done.result.revision), None);
            access.ledger.put(&place, done.result.revision);
        }
        Err(error) => scribe.change_failed(action, &error),
    }
}

/// Sends changes until each is answered in time, or one fails. The last answers count.
async fn apply(
    requests: &[Request],
    session: &mut Session,
    access: &mut Access,
    scribe: &mut Scribe,
) -> Result<(), Error> {
    for request in requests {
        for _ in 0..access.rng.random_range(0..=MAX_LOST) {
            let too_short = Duration::from_micros(access.rng.random_range(TOO_SHORT_US));
            // Some are waited for, however slow the machine: what is answered more than once is compared.
            let within = (!access.chance(WAITED_FOR)).then_some(too_short);
            if request.send(request.stamp, within, session, access, scribe).await.is_ok_and(|answered| answered) {
                break;
            }
        }
    }
    if access.chance(0.5) {
        for request in requests.iter().rev() {
            request.send(request.stamp, None, session, access, scribe).await?;
        }
    } else {
        for request in requests {
            let stamp = Stamp { lowest_unanswered: request.stamp.sequence, ..request.stamp };
            request.send(stamp, None, session, access, scribe).await?;
        }
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
    fn new(key: i64, id: i64, stamp: Stamp, access: &mut Access) -> Self {
        let place = place(Workload::Idempotency, &key.into());
        let digits = if access.chance(LARGE) { LARGE_DIGITS } else { 1 };
        let put = Op::Put {
            key: place.clone(),
            value: format!("{id:0>digits$}").into(),
            return_previous: access.chance(RETURNS_PREVIOUS),
            lease: None,
        };
        Self {
            action: Action::Idempotency(Idempotency::Apply { key: key.into(), id }),
            txn: Txn { then: vec![put], ..Txn::default() },
            place,
            stamp,
        }
    }

    /// Sends it once; says whether it was answered in time. Without `within` there is as much time as any operation has.
    async fn send(
        &self,
        stamp: Stamp,
        within: Option<Duration>,
        session: &mut Session,
        access: &mut Access,
        scribe: &mut Scribe,
    ) -> Result<bool, Error> {
        scribe.invoke(self.action.clone());
        let sent = clock::now();
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
                session.spoke = sent;
                scribe.ok(self.action.clone(), Some(done.result.revision), None);
                access.ledger.put(&self.place, done.result.revision);
                Ok(true)
            }
            // The leader hears of a session by each request that it answers.
            Err(error @ Error::SessionExpired { .. }) if clock::now() < session.spoke + SESSION_TTL => {
                scribe.refused(self.action.clone(), idempotency::OVER_EARLY);
                Err(error)
            }
            // One that comes too late is to be.
            Err(error @ Error::Refused { .. }) => {
                scribe.refused(self.action.clone(), "the request was refused");
                Err(error)
            }
            Err(error) => {
                scribe.change_failed(self.action.clone(), &error);
                Err(error)
            }
        }
    }
}

/// How often the key was changed, as some peer has it, or whoever leads.
async fn count(key: i64, from: Option<(u64, String)>, access: &Access, scribe: &mut Scribe) -> Result<(), Error> {
    let action = |count| Action::Idempotency(Idempotency::Count { key: key.into(), count });
    let place = place(Workload::Idempotency, &key.into());
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
            let from = access.any_peer();
            count(key, from, access, scribe).await?;
        }
        Ok(())
    }
}
