//! A heartbeat from its arrival to its answer.
//!
//! Handlers in this order, each with one duty; the first that has an answer, or fails, ends it:
//!
//! | handler     | its duty                                                         | may end it with                     |
//! |-------------|------------------------------------------------------------------|-------------------------------------|
//! | `check`     | the limits; one stream is of one process                         | InvalidArgument                     |
//! | `turns`     | one request of a node at a time                                  |                                     |
//! | `gather`    | renewals wait for others, a fifteenth of the interval at most    |                                     |
//! | `confirm`   | a quorum confirms this leader; what was committed is applied     | NotLeader, Unavailable, Overloaded  |
//! | `fence`     | is the process the node's? by what the map says                  | superseded, and nothing else        |
//! | `leave`     | a process that ends: its lease and its entry go                  | left                                |
//! | `renew`     | the lease, counted from the heartbeat's arrival                  | the lease is over                   |
//! | `register`  | a process without a lease: a lease, the old one's end, the entry | Unavailable, LimitReached           |
//! | `note`      | what was heard, in registry and detectors; the mailbox opens     |                                     |
//!
//! Fencing before renewing: a process that is over has nothing renewed. Registering is three commands: the new lease is granted,
//! the lease of the process before is ended, and the entry is written where it is still as it was read, the lease alive, and
//! the log entry of this leader's term. A leader that is stopped between two of them leaves a lease that ends by itself, or a
//! process whose lease was ended: each asks again, and the later one is the node's.
//!
//! Failure cases: a failure ends the stream, and the process sends again on another one; what it then asks for has been done,
//! and is answered as it was, or has not. Limits: a heartbeat is handled within [`WITHIN`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_client::nodes::{self, MAX_NODES, NODES, Record, validate_heartbeat};
use lake_proto::kv::{Compare, Condition, Expected, Op, Revision, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::heartbeat_answer::Outcome;
use tokio::sync::mpsc;

use super::registry::Presence;
use super::{holder, millis};
use crate::log::lock;
use crate::peer::duties::Mortal;
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::shares::{Call, Caller};
use crate::state::State;

/// How long a heartbeat may be in hand.
pub const WITHIN: Duration = Duration::from_secs(5);

/// One stream, and the process whose it is.
#[derive(Debug)]
pub struct Line {
    stream: u64,
    caller: Caller,
    outgoing: mpsc::Sender<v1::Instruction>,
    of: Option<(String, String)>,
    term: u64,
}

impl Line {
    /// A stream on which nothing was heard yet.
    pub fn new(stream: u64, caller: Caller, outgoing: mpsc::Sender<v1::Instruction>) -> Self {
        Self { stream, caller, outgoing, of: None, term: 0 }
    }

    /// Its number.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// The node's name, once it was heard.
    pub fn node(&self) -> Option<&str> {
        self.of.as_ref().map(|(node, _)| node.as_str())
    }

    /// The term in which the last heartbeat was accepted; 0: none was.
    pub fn term(&self) -> u64 {
        self.term
    }
}

/// What the map says of the process that sent a heartbeat.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    /// It is the node's, and so is the lease that it names.
    Holds { epoch: u64 },
    /// It is to be registered: it is the node's and names no lease, or nobody comes after it.
    Comes,
    /// It names a lease that is not the node's any more.
    LeaseOver,
    /// Another process is the node's.
    Superseded(String),
}

/// Decides what a process is by what the map says.
fn fence(known: Option<&(Arc<Record>, u64)>, beat: &v1::Heartbeat) -> Standing {
    match known {
        None if beat.lease != 0 => Standing::LeaseOver,
        None => Standing::Comes,
        Some((record, epoch)) if record.process == beat.process => match beat.lease {
            0 => Standing::Comes,
            lease if lease == record.lease => Standing::Holds { epoch: *epoch },
            _ => Standing::LeaseOver,
        },
        Some((record, epoch)) if beat.epoch != 0 || record.superseded.contains(&beat.process) => {
            let other = if record.flight_address.is_empty() { "elsewhere" } else { &record.flight_address };
            Standing::Superseded(format!(
                "another process was registered as node {} later, at revision {epoch}: the one at {other}. This one is over; \
                 if both are to run, give each a name of its own",
                beat.node
            ))
        }
        Some(_) => Standing::Comes,
    }
}

impl Member {
    /// Handles a heartbeat that came on a stream at `arrived`.
    ///
    /// # Errors
    /// As the handlers: the stream is over.
    pub async fn heartbeat(
        self: &Arc<Self>,
        line: &mut Line,
        beat: v1::Heartbeat,
        arrived: Instant,
    ) -> Result<v1::HeartbeatAnswer, Failure> {
        let deadline = arrived + WITHIN;
        match tokio::time::timeout_at(deadline.into(), self.handle(line, beat, arrived, deadline)).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::unknown(format!(
                "peer {}: a heartbeat was not handled within {} s; send it again",
                self.identity.id,
                WITHIN.as_secs()
            ))),
        }
    }

    async fn handle(
        self: &Arc<Self>,
        line: &mut Line,
        beat: v1::Heartbeat,
        arrived: Instant,
        deadline: Instant,
    ) -> Result<v1::HeartbeatAnswer, Failure> {
        check(line, &beat)?;
        let _turn = self.nodes.turns.take(&beat.node).await;
        let term = match beat.lease != 0 && !beat.leaving {
            true => {
                // One round for many callers: it is the peer's own.
                let round = || {
                    let this = self.clone();
                    async move { this.confirmed_on_duty(&Caller::own()).await }
                };
                self.nodes.gathering.confirmed(round).await?
            }
            false => self.confirmed_on_duty(&line.caller).await?,
        };
        line.term = term;
        let sequence = beat.sequence;
        let answer = |outcome| Ok(v1::HeartbeatAnswer { sequence, outcome: Some(outcome) });
        let applied = self.published.current();
        let state = &applied.state;
        let changed = state.mod_revision(&nodes::key(&beat.node));
        let known = lock(&self.nodes.records).of(state, &beat.node);
        let standing = fence(known.as_ref(), &beat);
        if let Standing::Superseded(why) = standing {
            self.counters.nodes_superseded.add(1);
            return answer(Outcome::Superseded(why));
        }
        let call = Call { caller: line.caller.clone(), deadline };
        if beat.leaving {
            self.leave(term, changed.zip(known), &beat, &call).await?;
            return answer(Outcome::Left(true));
        }
        let held = match standing {
            Standing::Holds { epoch } => self.renew_node(term, epoch, beat.lease, arrived)?,
            // Its first answer may have been lost: then it has a lease that lives.
            Standing::Comes => match known.as_ref().filter(|(record, _)| record.process == beat.process) {
                Some((record, epoch)) => self.renew_node(term, *epoch, record.lease, arrived)?,
                None => None,
            },
            Standing::LeaseOver => return answer(Outcome::LeaseOver(true)),
            Standing::Superseded(_) => None,
        };
        let (epoch, lease) = match held {
            Some(held) => held,
            None if beat.lease != 0 => return answer(Outcome::LeaseOver(true)),
            None => self.register(state, term, changed, known, &beat, &call).await?,
        };
        if !self.note(line, term, beat, arrived) {
            return Err(self.view.not_leader());
        }
        answer(Outcome::Tenure(v1::NodeTenure {
            header: Some(self.header(self.published.current().state.revision())),
            epoch,
            lease,
            lease_ms: millis(self.nodes.rhythm.lease),
            interval_ms: millis(self.nodes.rhythm.interval),
        }))
    }

    /// Renews a lease. `None`: it is over.
    fn renew_node(&self, term: u64, epoch: u64, lease: u64, arrived: Instant) -> Result<Option<(u64, u64)>, Failure> {
        let kept = self.renew(Mortal::Lease, term, &[lease], arrived).ok_or_else(|| self.leads_no_more(term))?;
        let alive = kept.alive.contains(&lease);
        match alive {
            true => self.counters.renewed.add(1),
            false => self.counters.not_renewed.add(1),
        }
        Ok(alive.then_some((epoch, lease)))
    }

    /// Makes the process the node's, over an entry that was changed then, if there is one. Says its epoch and its lease.
    async fn register(
        &self,
        state: &State,
        term: u64,
        changed: Option<Revision>,
        before: Option<(Arc<Record>, u64)>,
        beat: &v1::Heartbeat,
        call: &Call,
    ) -> Result<(u64, u64), Failure> {
        let key = nodes::key(&beat.node);
        if changed.is_none() && state.keys(NODES).take(MAX_NODES).count() >= MAX_NODES {
            let what = format!(
                "{MAX_NODES} nodes are registered, which is the most: delete the entries under {NODES} of those that will \
                 not come back"
            );
            return Err(Failure::new(Kind::LimitReached, what));
        }
        let ttl_ms = millis(self.nodes.rhythm.lease);
        let lease = self.grant_lease(ttl_ms, holder(&beat.node), None, call).await?;
        if let Some((before, _)) = before.as_ref().filter(|(before, _)| before.lease != 0) {
            self.revoke_lease(before.lease, None, call).await?;
        }
        let expected = changed.map_or(Expected::Absent, Expected::ModRevision);
        let before = before.map(|(before, epoch)| (Arc::unwrap_or_clone(before), epoch));
        let info = beat.info.clone().unwrap_or_default();
        let record = Record::next(&beat.process, lease, &info, before);
        let txn = Txn {
            when: vec![Compare::expected(&key, expected), Compare::lease_alive(lease), in_term(term)],
            then: vec![Op::put(&key, record.to_bytes())],
            otherwise: vec![],
        };
        let result = self.commit(txn, None, call).await?;
        if !result.succeeded {
            // It ends by itself if this fails.
            let _ = self.revoke_lease(lease, None, call).await;
            let what = format!(
                "peer {}: node {} was changed while it was registered, or another peer leads; send it again",
                self.identity.id, beat.node
            );
            return Err(Failure::unavailable(what));
        }
        self.counters.nodes_registered.add(1);
        let epoch = record.epoch(result.revision);
        tracing::info!(node = beat.node, process = beat.process, epoch, lease, "a node was registered");
        Ok((epoch, lease))
    }

    /// Takes a process that ends out of the map, if it is the node's.
    async fn leave(
        &self,
        term: u64,
        known: Option<(Revision, (Arc<Record>, u64))>,
        beat: &v1::Heartbeat,
        call: &Call,
    ) -> Result<(), Failure> {
        let own = known.filter(|(_, (record, _))| record.process == beat.process);
        let Some((changed, (record, _))) = own else { return Ok(()) };
        let mut txn = Txn::cas_delete(nodes::key(&beat.node), changed);
        txn.when.push(in_term(term));
        if !self.commit(txn, None, call).await?.succeeded {
            let what = format!(
                "peer {}: node {} was changed while it left, or another peer leads; send it again",
                self.identity.id, beat.node
            );
            return Err(Failure::unavailable(what));
        }
        if record.lease != 0 {
            self.revoke_lease(record.lease, None, call).await?;
        }
        lock(&self.nodes.registry).left(&beat.node, &beat.process);
        lock(&self.nodes.detectors).left(&beat.node, &beat.process);
        tracing::info!(node = beat.node, process = beat.process, "a node has left");
        Ok(())
    }

    /// Notes what was heard, and where the node is spoken to. False: another term has begun.
    fn note(&self, line: &Line, term: u64, beat: v1::Heartbeat, arrived: Instant) -> bool {
        let presence = Presence {
            process: beat.process.clone(),
            stream: Some(line.stream),
            heard: arrived,
            info: beat.info.unwrap_or_default(),
            load: beat.load.unwrap_or_default(),
        };
        let noted = lock(&self.nodes.registry).heard(term, &beat.node, presence);
        if noted {
            lock(&self.nodes.detectors).heard(term, &beat.node, &beat.process, arrived);
            self.nodes.mailbox.open(&beat.node, line.stream, &line.outgoing);
        }
        noted
    }
}

/// The limits of a heartbeat, and whose the stream is.
fn check(line: &mut Line, beat: &v1::Heartbeat) -> Result<(), Failure> {
    validate_heartbeat(beat).map_err(Failure::invalid)?;
    match &line.of {
        None => line.of = Some((beat.node.clone(), beat.process.clone())),
        Some((node, process)) if *node == beat.node && *process == beat.process => {}
        Some((node, _)) => {
            let what = format!("a stream of node {node} carries a heartbeat of another process or node: {}", beat.node);
            return Err(Failure::invalid(what));
        }
    }
    Ok(())
}

/// The log entry that carries the transaction is of this term.
pub(in crate::peer) fn in_term(term: u64) -> Compare {
    Compare { key: String::new(), condition: Condition::EntryTerm(term) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(process: &str, epoch: u64, lease: u64) -> v1::Heartbeat {
        v1::Heartbeat { node: "n".into(), process: process.into(), epoch, lease, ..v1::Heartbeat::default() }
    }

    #[test]
    fn the_map_decides_whose_the_node_is() {
        let info = v1::NodeInfo::default();
        let a = Record::next("a", 7, &info, None);
        let b = Record::next("b", 9, &info, Some((a.clone(), 8)));
        let (nobody, a, b) = (None, Some((Arc::new(a), 8)), Some((Arc::new(b), 10)));
        let of = |known: &Option<(Arc<Record>, u64)>, beat: v1::Heartbeat| fence(known.as_ref(), &beat);
        assert_eq!(of(&nobody, beat("a", 0, 0)), Standing::Comes);
        assert_eq!(of(&nobody, beat("a", 8, 7)), Standing::LeaseOver, "its entry is gone");
        assert_eq!(of(&a, beat("a", 8, 7)), Standing::Holds { epoch: 8 });
        assert_eq!(of(&a, beat("a", 8, 5)), Standing::LeaseOver);
        assert_eq!(of(&a, beat("a", 8, 0)), Standing::Comes, "again, under its epoch");
        assert_eq!(of(&a, beat("a", 0, 0)), Standing::Comes, "its first answer was lost");
        assert_eq!(of(&a, beat("b", 0, 0)), Standing::Comes, "the later one wins");
        let is_over = |standing| matches!(standing, Standing::Superseded(why) if why.contains("revision 10"));
        assert!(is_over(of(&b, beat("a", 8, 7))));
        assert!(is_over(of(&b, beat("a", 8, 0))));
        assert!(is_over(of(&b, beat("a", 0, 0))), "also if its first answer was lost");
    }

    #[test]
    fn a_stream_is_of_one_process() {
        let (outgoing, _) = mpsc::channel(1);
        let mut line = Line::new(1, Caller::own(), outgoing);
        let info = Some(v1::NodeInfo::default());
        let first = v1::Heartbeat { info: info.clone(), ..beat("a", 0, 0) };
        assert!(check(&mut line, &first).is_ok() && check(&mut line, &first).is_ok());
        let other = v1::Heartbeat { info, ..beat("b", 0, 0) };
        assert_eq!(check(&mut line, &other).unwrap_err().kind, Kind::InvalidArgument);
        assert_eq!(line.node(), Some("n"));
    }
}
