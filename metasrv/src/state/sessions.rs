//! Sessions: what makes a repeated request harmless (semantics, section 4).
//!
//! A session keeps the outcome of each request that its client may still ask about, encoded. A request below the
//! session's lowest unanswered sequence is never run again; one too far above it is refused.

use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use imbl::OrdMap;
use lake_proto::coordination::{SessionId, Stamp};
use lake_proto::limits::SESSION_WINDOW;
use lake_proto::v1;
use prost::Message;

use super::command::{Outcome, Refusal};
use super::hash::{self, StateHash};

/// Sessions at once. At the limit none is opened, and none is evicted.
pub const MAX_SESSIONS: usize = 10_000;
/// A larger outcome is kept reduced.
pub const MAX_KEPT_BYTES: usize = 4 << 10;
/// Once all outcomes that are kept have this many bytes, further ones are kept reduced as far as they can be.
pub const MAX_ALL_KEPT_BYTES: u64 = 64 << 20;
/// Revisions in a reduced outcome: at most 10 bytes each.
const REDUCED_REVISIONS: usize = MAX_KEPT_BYTES / 16;

/// One session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Session {
    pub ttl_ms: u64,
    pub holder: Arc<str>,
    pub lowest: u64,
    /// By sequence.
    pub kept: OrdMap<u64, Bytes>,
}

/// All sessions. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Sessions {
    by_id: OrdMap<SessionId, Session>,
    kept_bytes: u64,
    /// How many outcomes are kept.
    kept: usize,
    /// Bytes of the sessions' holders.
    holder_bytes: u64,
}

/// What is to be done with a stamped request.
pub(super) enum Begin {
    Run,
    /// It ran before, and this is what it did.
    Repeated(Outcome),
    Refused(Refusal),
}

impl Sessions {
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// How many outcomes are kept, their bytes, and those of the holders.
    pub fn extent(&self) -> (usize, u64, u64) {
        (self.kept, self.kept_bytes, self.holder_bytes)
    }

    pub fn iter(&self) -> impl Iterator<Item = (SessionId, &Session)> {
        self.by_id.iter().map(|(id, session)| (*id, session))
    }

    pub fn contains(&self, id: SessionId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub fn ttl_ms(&self, id: SessionId) -> Option<u64> {
        self.by_id.get(&id).map(|session| session.ttl_ms)
    }

    pub fn ttls(&self, after: SessionId) -> impl Iterator<Item = (SessionId, u64)> {
        self.by_id.range((Bound::Excluded(after), Bound::Unbounded)).map(|(id, session)| (*id, session.ttl_ms))
    }

    pub fn open(&mut self, id: SessionId, ttl_ms: u64, holder: &str, hash: &mut StateHash) {
        self.restore(id, Session { ttl_ms, holder: holder.into(), lowest: 1, kept: OrdMap::new() }, hash);
    }

    /// Puts a whole session in; if it is there already (a snapshot's next record), its outcomes are added.
    pub fn restore(&mut self, id: SessionId, session: Session, hash: &mut StateHash) {
        for (sequence, outcome) in &session.kept {
            hash.add(hash::kept(id, *sequence, outcome));
            self.kept_bytes += outcome.len() as u64;
            self.kept += 1;
        }
        match self.by_id.get_mut(&id) {
            Some(known) => known.kept = std::mem::take(&mut known.kept).union(session.kept),
            None => {
                hash.add(hash::session(id, session.ttl_ms, &session.holder));
                hash.add(hash::session_lowest(id, session.lowest));
                self.holder_bytes += session.holder.len() as u64;
                self.by_id.insert(id, session);
            }
        }
    }

    pub fn close(&mut self, id: SessionId, hash: &mut StateHash) -> bool {
        let Some(session) = self.by_id.remove(&id) else { return false };
        hash.remove(hash::session(id, session.ttl_ms, &session.holder));
        hash.remove(hash::session_lowest(id, session.lowest));
        self.holder_bytes -= session.holder.len() as u64;
        for (sequence, outcome) in &session.kept {
            hash.remove(hash::kept(id, *sequence, outcome));
            self.kept_bytes -= outcome.len() as u64;
            self.kept -= 1;
        }
        true
    }

    /// Looks whether a request is to run, and forgets what its client has been answered.
    pub fn begin(&mut self, stamp: Stamp, hash: &mut StateHash) -> Begin {
        let Stamp { session: id, sequence, lowest_unanswered } = stamp;
        let Some(session) = self.by_id.get_mut(&id) else {
            return Begin::Refused(Refusal::SessionExpired { session: id });
        };
        if lowest_unanswered > session.lowest {
            hash.remove(hash::session_lowest(id, session.lowest));
            hash.add(hash::session_lowest(id, lowest_unanswered));
            session.lowest = lowest_unanswered;
            while let Some((oldest, _)) = session.kept.get_min()
                && *oldest < lowest_unanswered
            {
                let oldest = *oldest;
                if let Some(outcome) = session.kept.remove(&oldest) {
                    hash.remove(hash::kept(id, oldest, &outcome));
                    self.kept_bytes -= outcome.len() as u64;
                    self.kept -= 1;
                }
            }
        }
        if sequence < session.lowest {
            return Begin::Refused(Refusal::SequenceAnswered { sequence });
        }
        if let Some(outcome) = session.kept.get(&sequence) {
            return Begin::Repeated(decode(outcome));
        }
        if sequence - session.lowest >= SESSION_WINDOW {
            return Begin::Refused(Refusal::WindowFull { sequence });
        }
        Begin::Run
    }

    /// Keeps what a request did until its client says that it knows.
    pub fn keep(&mut self, stamp: Stamp, outcome: &Outcome, hash: &mut StateHash) {
        // The request may have closed its own session.
        let Some(session) = self.by_id.get_mut(&stamp.session) else { return };
        let mut encoded = encode(outcome.clone());
        let crowded = self.kept_bytes + encoded.len() as u64 > MAX_ALL_KEPT_BYTES;
        if let Outcome::Txn(result) = outcome
            && (crowded || encoded.len() > MAX_KEPT_BYTES)
        {
            encoded = encode(Outcome::Txn(result.reduce(if crowded { 0 } else { REDUCED_REVISIONS })));
        }
        hash.add(hash::kept(stamp.session, stamp.sequence, &encoded));
        self.kept_bytes += encoded.len() as u64;
        self.kept += 1;
        session.kept.insert(stamp.sequence, encoded);
    }
}

fn encode(outcome: Outcome) -> Bytes {
    v1::Outcome::from(outcome).encode_to_vec().into()
}

fn decode(kept: &Bytes) -> Outcome {
    let decoded = v1::Outcome::decode(kept.clone()).ok().and_then(|wire| Outcome::try_from(wire).ok());
    decoded.expect("an outcome that this state encoded, or that was checked when it was restored")
}

/// Whether bytes from a snapshot are an outcome.
pub(super) fn is_outcome(bytes: &Bytes) -> bool {
    v1::Outcome::decode(bytes.clone()).is_ok_and(|wire| Outcome::try_from(wire).is_ok())
}
