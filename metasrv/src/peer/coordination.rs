//! Leases, sessions, scopes and quotas as a member serves them (semantics, sections 4 to 6).
//!
//! What changes anything is a command through the log. A keep-alive is none: it is answered once a quorum has confirmed,
//! in one read-index round for all that wait, that this peer leads the term in which it counts silence, and only then
//! renews ([`super::countdowns`]). A renewal counts from the arrival of the request.
//!
//! Failure cases: a peer that does not lead, or no longer leads the same term, answers NotLeader; without a quorum:
//! Unavailable. A keep-alive that failed has renewed nothing and may be sent again.

use std::time::{Duration, Instant};

use lake_client::clock;
use lake_client::store::ReadOptions;
use lake_proto::coordination::{
    LeaseId, Scope, SessionId, Stamp, validate_holder, validate_lease_ttl, validate_session_ttl,
};
use lake_proto::kv::{Revision, validate_prefix};
use lake_proto::limits::MAX_IDS;
use lake_proto::v1;

use super::countdowns::Renewal;
use super::duties::Mortal;
use super::failure::Failure;
use super::member::{Member, misanswered};
use super::shares::{Call, Caller, Held};
use crate::log::lock;
use crate::state::command::{Action, Outcome};
use crate::state::quotas::Quota;
use crate::state::{Lease, State};

/// How long a keep-alive waits for a new leader to begin its duties.
const DUTY_BEGINS: Duration = Duration::from_secs(2);
/// How long a confirmed keep-alive waits until what was committed before is applied.
const APPLIES: Duration = Duration::from_secs(5);

/// What a keep-alive came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptAlive {
    pub revision: Revision,
    pub alive: Vec<Revision>,
    pub expired: Vec<Revision>,
}

/// A part of a listing, and whether there is more behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part<T> {
    pub revision: Revision,
    pub items: Vec<T>,
    pub more: bool,
}

impl<T> Part<T> {
    fn of(revision: Revision, items: impl Iterator<Item = T>, limit: u32) -> Self {
        let limit = match limit as usize {
            0 => MAX_IDS,
            limit => limit.min(MAX_IDS),
        };
        let mut items: Vec<T> = items.take(limit + 1).collect();
        let more = items.len() > limit;
        items.truncate(limit);
        Self { revision, items, more }
    }
}

/// The quotas that it is time to warn of.
pub(super) fn nearly_full(state: &State) -> Vec<v1::Quota> {
    state
        .quotas()
        .filter(|(_, quota)| quota.is_nearly_full())
        .map(|(prefix, quota)| quota_to_wire(prefix, quota))
        .collect()
}

/// A quota as it is told.
pub fn quota_to_wire(prefix: &str, quota: Quota) -> v1::Quota {
    v1::Quota { prefix: prefix.to_owned(), limit_bytes: quota.limit_bytes, used_bytes: quota.used_bytes }
}

impl Member {
    // ---- leases and sessions ----------------------------------------------------------------------------------

    /// Grants a lease.
    ///
    /// # Errors
    /// As [`Member::propose`]; Overloaded also when the caller has its part of all leases. A grant of which nobody knows leaves
    /// at most a lease that expires by itself.
    pub async fn grant_lease(
        &self,
        ttl_ms: u64,
        holder: String,
        stamp: Option<Stamp>,
        call: &Call,
    ) -> Result<LeaseId, Failure> {
        validate_lease_ttl(ttl_ms).and_then(|()| validate_holder(&holder)).map_err(Failure::invalid)?;
        let room = self.room(Mortal::Lease, &call.caller)?;
        let granted = self.propose(Action::GrantLease { ttl_ms, holder }, stamp, call).await?;
        let id = self.began(Mortal::Lease, ttl_ms, granted, room)?;
        self.counters.leases_granted.add(1);
        Ok(id)
    }

    /// Ends a lease, with the keys that hang on it and its scopes. Says at which revision, and whether there was one.
    ///
    /// # Errors
    /// As [`Member::propose`].
    pub async fn revoke_lease(
        &self,
        lease: LeaseId,
        stamp: Option<Stamp>,
        call: &Call,
    ) -> Result<(Revision, bool), Failure> {
        let (revision, existed) = self.end(Mortal::Lease, lease, Action::RevokeLease { lease }, stamp, call).await?;
        self.counters.leases_revoked.add(u64::from(existed));
        Ok((revision, existed))
    }

    /// Opens a session.
    ///
    /// # Errors
    /// As [`Member::propose`]; Overloaded also when the caller has its part of all sessions. An opening of which nobody knows
    /// leaves at most a session that ends by itself.
    pub async fn open_session(&self, ttl_ms: u64, holder: String, call: &Call) -> Result<SessionId, Failure> {
        validate_session_ttl(ttl_ms).and_then(|()| validate_holder(&holder)).map_err(Failure::invalid)?;
        let room = self.room(Mortal::Session, &call.caller)?;
        let opened = self.propose(Action::OpenSession { ttl_ms, holder }, None, call).await?;
        let id = self.began(Mortal::Session, ttl_ms, opened, room)?;
        self.counters.sessions_opened.add(1);
        Ok(id)
    }

    /// Closes a session. Says at which revision, and whether there was one.
    ///
    /// # Errors
    /// As [`Member::propose`].
    pub async fn close_session(&self, session: SessionId, call: &Call) -> Result<(Revision, bool), Failure> {
        let action = Action::CloseSession { session };
        let (revision, existed) = self.end(Mortal::Session, session, action, None, call).await?;
        self.counters.sessions_closed.add(u64::from(existed));
        Ok((revision, existed))
    }

    /// Room for one more of a caller's.
    fn room(&self, kind: Mortal, caller: &Caller) -> Result<Vec<Held>, Failure> {
        self.duties.ledger(kind).room(caller, 1, &self.published.current().state)
    }

    fn began(&self, kind: Mortal, ttl_ms: u64, outcome: Outcome, room: Vec<Held>) -> Result<Revision, Failure> {
        let Outcome::Granted { id } = outcome else { return Err(misanswered(&outcome)) };
        lock(self.duties.of(kind)).began(id, Duration::from_millis(ttl_ms), clock::now());
        room.into_iter().for_each(|held| self.duties.ledger(kind).put_down(id, id, held));
        Ok(id)
    }

    async fn end(
        &self,
        kind: Mortal,
        id: Revision,
        action: Action,
        stamp: Option<Stamp>,
        call: &Call,
    ) -> Result<(Revision, bool), Failure> {
        match self.propose(action, stamp, call).await? {
            Outcome::Ended { revision, existed } => {
                self.duties.ended(kind, id);
                Ok((revision, existed))
            }
            other => Err(misanswered(&other)),
        }
    }

    /// Renews what is alive of `ids`, counted from `arrived`, once a quorum has confirmed this leader since then.
    ///
    /// # Errors
    /// InvalidArgument for too many ids, NotLeader, Unavailable without a quorum, Overloaded: nothing was renewed.
    pub async fn keep_alive(
        &self,
        kind: Mortal,
        ids: &[Revision],
        caller: &Caller,
        arrived: Instant,
    ) -> Result<KeptAlive, Failure> {
        if ids.len() > MAX_IDS {
            let what = format!("{} ids are to be kept alive by one message; at most {MAX_IDS} can be", ids.len());
            return Err(Failure::invalid(what));
        }
        let term = self.confirmed_on_duty(caller).await?;
        let kept = self.renew(kind, term, ids, arrived).ok_or_else(|| self.leads_no_more(term))?;
        let state = &self.published.current().state;
        self.duties.ledger(kind).kept_alive(kept.alive.iter().copied(), caller, state);
        self.counters.renewed.add(kept.alive.len() as u64);
        self.counters.not_renewed.add(kept.expired.len() as u64);
        Ok(kept)
    }

    /// Waits until a quorum has confirmed, since this call, that this peer leads the term in which it is on duty, and what was
    /// committed before is applied. Says which term.
    ///
    /// # Errors
    /// NotLeader, Unavailable without a quorum, Overloaded.
    pub(crate) async fn confirmed_on_duty(&self, caller: &Caller) -> Result<u64, Failure> {
        // As a reader that waits, until it is answered.
        let place = self.reads.wait(caller)?;
        let term = self.term_on_duty().await?;
        let point = self.reads.round_for(&place).await?;
        if point.term != term {
            return Err(self.leads_no_more(term));
        }
        let mut published = self.published.subscribe();
        let applied = published.wait_for(|applied| applied.last.is_some_and(|id| id.index >= point.index));
        match tokio::time::timeout(APPLIES, applied).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return Err(Failure::unavailable(format!("peer {} is stopping", self.identity.id))),
            Err(_) => {
                let what = format!(
                    "peer {} has not applied what was committed before within {} s: nothing was renewed, send it again",
                    self.identity.id,
                    APPLIES.as_secs()
                );
                return Err(Failure::unavailable(what));
            }
        }
        self.reads.confirm(point);
        Ok(term)
    }

    /// Renews what is alive, if this peer still counts in `term`. What has ended leaves the state first and the countdowns
    /// then, so the state is looked at with the countdowns held: a lease cannot end in between and begin here again.
    pub(super) fn renew(&self, kind: Mortal, term: u64, ids: &[Revision], arrived: Instant) -> Option<KeptAlive> {
        let mut countdowns = lock(self.duties.of(kind));
        let applied = self.published.current();
        let mut kept = KeptAlive { revision: applied.state.revision(), ..KeptAlive::default() };
        for id in ids {
            let renewal = kind.ttl(&applied.state, *id).map(|ttl| countdowns.renew(term, *id, ttl, arrived));
            match renewal {
                Some(Renewal::Alive) => kept.alive.push(*id),
                Some(Renewal::Over) | None => kept.expired.push(*id),
                Some(Renewal::OtherTerm) => return None,
            }
        }
        Some(kept)
    }

    /// The term in which this peer is on duty; waits for a new leader to begin.
    async fn term_on_duty(&self) -> Result<u64, Failure> {
        let mut term = self.duties.term();
        let on_duty = *term.borrow();
        if on_duty != 0 {
            return Ok(on_duty);
        }
        if self.view.led_term().is_none() {
            return Err(self.view.not_leader());
        }
        match tokio::time::timeout(DUTY_BEGINS, term.wait_for(|term| *term != 0)).await {
            Ok(Ok(term)) => Ok(*term),
            Ok(Err(_)) => Err(Failure::unavailable(format!("peer {} is stopping", self.identity.id))),
            Err(_) if self.view.led_term().is_none() => Err(self.view.not_leader()),
            Err(_) => {
                let term = self.view.term();
                let what = format!(
                    "peer {} leads term {term}, but has not begun its duties within {} s: send it again",
                    self.identity.id,
                    DUTY_BEGINS.as_secs()
                );
                Err(Failure { term, leader: self.view.leader(), ..Failure::unavailable(what) })
            }
        }
    }

    pub(super) fn leads_no_more(&self, term: u64) -> Failure {
        let failure = self.view.not_leader();
        let message =
            format!("peer {} no longer leads term {term}: nothing was renewed, ask the leader", self.identity.id);
        Failure { message, ..failure }
    }

    /// Live leases behind an id, each with how long it has left, if this peer measures that.
    ///
    /// # Errors
    /// As [`Member::read`].
    pub async fn list_leases(
        &self,
        after: LeaseId,
        limit: u32,
        options: ReadOptions,
        call: &Call,
    ) -> Result<Part<(Lease, Option<Duration>)>, Failure> {
        let applied = self.read(options, call).await?;
        let part = Part::of(applied.state.revision(), applied.state.leases(after), limit);
        let now = clock::now();
        let countdowns = lock(self.duties.of(Mortal::Lease));
        let items = part.items.into_iter().map(|lease| {
            let remaining = countdowns.remaining(lease.id, now);
            (lease, remaining)
        });
        Ok(Part { items: items.collect(), revision: part.revision, more: part.more })
    }

    // ---- scopes and quotas ------------------------------------------------------------------------------------

    /// Live scopes whose path begins with a prefix, behind a path.
    ///
    /// # Errors
    /// As [`Member::read`].
    pub async fn list_scopes(
        &self,
        prefix: &str,
        after: &str,
        limit: u32,
        options: ReadOptions,
        call: &Call,
    ) -> Result<Part<Scope>, Failure> {
        for path in [prefix, after] {
            check_length(path)?;
        }
        let applied = self.read(options, call).await?;
        Ok(Part::of(applied.state.revision(), applied.state.scopes(prefix, after), limit))
    }

    /// Limits the bytes of keys and values under a prefix (empty: of the whole map), or lifts the limit.
    ///
    /// # Errors
    /// As [`Member::propose`]; InvalidArgument for what is no prefix of keys.
    pub async fn set_quota(
        &self,
        prefix: String,
        bytes: Option<u64>,
        stamp: Option<Stamp>,
        call: &Call,
    ) -> Result<Revision, Failure> {
        check_length(&prefix)?;
        if !prefix.is_empty() && !prefix.starts_with('/') {
            let what = format!("{prefix:?} is no prefix of keys: it is empty, for the whole map, or begins with `/`");
            return Err(Failure::invalid(what));
        }
        match self.propose(Action::SetQuota { prefix, bytes }, stamp, call).await? {
            Outcome::Set { revision } => Ok(revision),
            other => Err(misanswered(&other)),
        }
    }

    /// All quotas.
    ///
    /// # Errors
    /// As [`Member::read`].
    pub async fn list_quotas(&self, options: ReadOptions, call: &Call) -> Result<(Revision, Vec<v1::Quota>), Failure> {
        let applied = self.read(options, call).await?;
        let quotas = applied.state.quotas().map(|(prefix, quota)| quota_to_wire(prefix, quota)).collect();
        Ok((applied.state.revision(), quotas))
    }
}

fn check_length(prefix: &str) -> Result<(), Failure> {
    validate_prefix(prefix).map_err(Failure::invalid)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::peer::{Opened, Peer, Settings, founding};
    use crate::raft::network::Transport;

    #[tokio::test(flavor = "multi_thread")]
    async fn what_ends_while_its_keep_alive_waits_is_not_renewed() {
        let (dir, settings) = (tempfile::tempdir().unwrap(), Settings::default());
        let opened = Opened::open(dir.path().to_owned(), None, &settings).await.unwrap();
        let transport = Transport::new(HashMap::new(), None);
        let peer = Peer::start(opened, String::new(), String::new(), settings, transport).await.unwrap();
        let member = founding::found_alone(&peer).await.unwrap();
        let mut recovered = member.recovered();
        recovered.wait_for(|recovered| *recovered).await.unwrap();
        let call = &Call::own(clock::now() + Duration::from_secs(30));
        let lease = member.grant_lease(60_000, String::new(), None, call).await.unwrap();
        let term = member.term_on_duty().await.unwrap();

        // All of this may fall between the confirmation of a keep-alive and its renewal.
        let expire = Action::ExpireLeases { leases: vec![lease], term };
        member.propose(expire, None, call).await.unwrap();
        lock(member.duties.of(Mortal::Lease)).ended(lease);
        let kept = member.renew(Mortal::Lease, term, &[lease], clock::now()).expect("it still leads");
        assert_eq!((kept.alive, kept.expired), (vec![], vec![lease]));
        assert_eq!(lock(member.duties.of(Mortal::Lease)).len(), 0, "nothing counts down for it");
        peer.shutdown().await;
    }

    #[test]
    fn a_part_says_whether_there_is_more() {
        assert_eq!(Part::of(1, 0..3, 2), Part { revision: 1, items: vec![0, 1], more: true });
        assert_eq!(Part::of(1, 0..2, 2), Part { revision: 1, items: vec![0, 1], more: false });
        assert_eq!(Part::of(1, 0..5000, 0).items.len(), MAX_IDS);
        assert_eq!(Part::of(1, 0..5000, 4000).items.len(), MAX_IDS);
    }
}
