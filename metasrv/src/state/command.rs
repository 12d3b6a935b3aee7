//! What the log asks of the state, and what comes of it (semantics, section 1).
//!
//! Scopes have no commands of their own: they are acquired and released by operations of a transaction, so that taking
//! several, or taking one and writing a key, is all or nothing.

use bytes::Bytes;
use lake_proto::coordination::{LeaseId, SessionId, Stamp};
use lake_proto::kv::{Invalid, Revision, Txn, TxnResult};
use lake_proto::v1;
use prost::Message;

/// One command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// Which request of a session this is; without, it runs again if it is sent again.
    pub stamp: Option<Stamp>,
    /// The proposing leader's wall clock, in milliseconds since 1970. It is only ever handed on to people.
    pub proposed_unix_ms: u64,
    pub action: Action,
}

/// What a command does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Txn(Txn),
    GrantLease {
        ttl_ms: u64,
        holder: String,
    },
    RevokeLease {
        lease: LeaseId,
    },
    /// Ends leases that the leader of `term` found silent. Does nothing in an entry of another term.
    ExpireLeases {
        leases: Vec<LeaseId>,
        term: u64,
    },
    OpenSession {
        ttl_ms: u64,
        holder: String,
    },
    CloseSession {
        session: SessionId,
    },
    /// As [`Action::ExpireLeases`].
    ExpireSessions {
        sessions: Vec<SessionId>,
        term: u64,
    },
    /// Raises the level to what every member supported when the leader of `term` asked them. Does nothing in an entry of
    /// another term, before which others may have come in.
    SetFeatureLevel {
        level: u32,
        term: u64,
    },
    /// Limits the bytes of keys and values under a prefix; `None` lifts the limit.
    SetQuota {
        prefix: String,
        bytes: Option<u64>,
    },
}

impl Action {
    /// The command that carries this action outside of any session.
    pub fn unstamped(self) -> Command {
        Command { stamp: None, proposed_unix_ms: 0, action: self }
    }
}

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Txn(TxnResult),
    /// A lease or session began; the revision is its id.
    Granted {
        id: Revision,
    },
    /// A lease or session was ended, if there was one.
    Ended {
        revision: Revision,
        existed: bool,
    },
    /// A setting was made.
    Set {
        revision: Revision,
    },
    Refused(Refusal),
}

/// Why a command did nothing. An answer like any other: every peer gives the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("session {session} is over, or was never opened")]
    SessionExpired { session: SessionId },
    #[error("request {sequence} of the session was answered before, as the session itself has said")]
    SequenceAnswered { sequence: u64 },
    #[error(
        "request {sequence} is too far ahead of the oldest one unanswered: at most {} may be in flight",
        lake_proto::limits::SESSION_WINDOW
    )]
    WindowFull { sequence: u64 },
    #[error("there are {limit} {what} already, which is the limit")]
    TooMany { what: &'static str, limit: u64 },
    #[error("{} would have more than its quota of {limit} bytes ({used} now); delete something, or raise the quota", quota_name(.prefix))]
    QuotaExceeded { prefix: String, limit: u64, used: u64 },
    #[error(
        "the entries that the transaction is to return, each once for each operation, have {bytes} bytes; at most {} can be returned: ask for fewer at once",
        lake_proto::limits::MAX_TXN_BYTES
    )]
    AnswerTooLarge { bytes: u64 },
    #[error(
        "the transaction's compares would have to look at more than {limit} entries and scopes, which would keep all others \
         waiting: compare shorter prefixes, or with a revision whose changes are still kept"
    )]
    ComparesTooMuch { limit: u64 },
    #[error("the feature level is {level} already, and never goes back")]
    FeatureLevel { level: u32 },
}

fn quota_name(prefix: &str) -> String {
    if prefix.is_empty() { "the map".to_owned() } else { format!("what lies under {prefix:?}") }
}

/// The kinds of thing whose number is limited, as they are named in [`Refusal::TooMany`].
pub(crate) const LEASES: &str = "leases";
pub(crate) const SESSIONS: &str = "sessions";
pub(crate) const SCOPES: &str = "scopes";
pub(super) const QUOTAS: &str = "quotas";
pub(super) const HANGING: &str = "keys and scopes on one lease";

// ---- to and from the wire -------------------------------------------------------------------------------------

impl Command {
    /// The bytes that go into the log and over the network.
    pub fn encode(&self) -> Bytes {
        self.clone().into_encoded()
    }

    /// The same, of one that is not needed any more.
    pub fn into_encoded(self) -> Bytes {
        use v1::command::Action as Wire;
        let action = match self.action {
            Action::Txn(txn) => Wire::Txn(txn.into()),
            Action::GrantLease { ttl_ms, holder } => Wire::GrantLease(v1::GrantLease { ttl_ms, holder }),
            Action::RevokeLease { lease } => Wire::RevokeLease(v1::RevokeLease { lease }),
            Action::ExpireLeases { leases, term } => Wire::ExpireLeases(v1::Expire { ids: leases, term }),
            Action::OpenSession { ttl_ms, holder } => Wire::OpenSession(v1::OpenSession { ttl_ms, holder }),
            Action::CloseSession { session } => Wire::CloseSession(v1::CloseSession { session }),
            Action::ExpireSessions { sessions, term } => Wire::ExpireSessions(v1::Expire { ids: sessions, term }),
            Action::SetFeatureLevel { level, term } => Wire::SetFeatureLevel(v1::SetFeatureLevel { level, term }),
            Action::SetQuota { prefix, bytes } => Wire::SetQuota(v1::SetQuota { prefix, bytes }),
        };
        let stamp = self.stamp.map(Into::into);
        let wire = v1::Command { stamp, proposed_unix_ms: self.proposed_unix_ms, action: Some(action) };
        wire.encode_to_vec().into()
    }

    /// The other way.
    ///
    /// # Errors
    /// When the bytes are no command that this build knows.
    pub fn decode(bytes: Bytes) -> Result<Self, Invalid> {
        use v1::command::Action as Wire;
        let wire = v1::Command::decode(bytes).map_err(|_| Invalid::Missing("command, readably"))?;
        let action = match wire.action.ok_or(Invalid::Missing("command"))? {
            Wire::Txn(txn) => Action::Txn(txn.try_into()?),
            Wire::GrantLease(g) => Action::GrantLease { ttl_ms: g.ttl_ms, holder: g.holder },
            Wire::RevokeLease(r) => Action::RevokeLease { lease: r.lease },
            Wire::ExpireLeases(e) => Action::ExpireLeases { leases: e.ids, term: e.term },
            Wire::OpenSession(o) => Action::OpenSession { ttl_ms: o.ttl_ms, holder: o.holder },
            Wire::CloseSession(c) => Action::CloseSession { session: c.session },
            Wire::ExpireSessions(e) => Action::ExpireSessions { sessions: e.ids, term: e.term },
            Wire::SetFeatureLevel(s) => Action::SetFeatureLevel { level: s.level, term: s.term },
            Wire::SetQuota(s) => Action::SetQuota { prefix: s.prefix, bytes: s.bytes },
        };
        let stamp: Option<Stamp> = wire.stamp.map(Into::into);
        Ok(Self { stamp, proposed_unix_ms: wire.proposed_unix_ms, action })
    }
}

impl From<Outcome> for v1::Outcome {
    fn from(outcome: Outcome) -> Self {
        use v1::outcome::{self as wire, Outcome as Wire};
        let outcome = match outcome {
            Outcome::Txn(result) => Wire::Txn(result.into_response(None)),
            Outcome::Granted { id } => Wire::Granted(wire::Granted { id }),
            Outcome::Ended { revision, existed } => Wire::Ended(wire::Ended { revision, existed }),
            Outcome::Set { revision } => Wire::Set(wire::Set { revision }),
            Outcome::Refused(refusal) => Wire::Refused(refusal.into()),
        };
        v1::Outcome { outcome: Some(outcome) }
    }
}

impl TryFrom<v1::Outcome> for Outcome {
    type Error = Invalid;

    fn try_from(outcome: v1::Outcome) -> Result<Self, Invalid> {
        use v1::outcome::Outcome as Wire;
        Ok(match outcome.outcome.ok_or(Invalid::Missing("outcome"))? {
            Wire::Txn(response) => Outcome::Txn(response.try_into()?),
            Wire::Granted(g) => Outcome::Granted { id: g.id },
            Wire::Ended(e) => Outcome::Ended { revision: e.revision, existed: e.existed },
            Wire::Set(s) => Outcome::Set { revision: s.revision },
            Wire::Refused(refused) => Outcome::Refused(refused.try_into()?),
        })
    }
}

impl From<Refusal> for v1::outcome::Refused {
    fn from(refusal: Refusal) -> Self {
        use v1::outcome::refused::Refusal as Wire;
        use v1::outcome::{QuotaExceeded, TooMany};
        let refusal = match refusal {
            Refusal::SessionExpired { session } => Wire::SessionExpired(session),
            Refusal::SequenceAnswered { sequence } => Wire::SequenceAnswered(sequence),
            Refusal::WindowFull { sequence } => Wire::WindowFull(sequence),
            Refusal::TooMany { what, limit } => Wire::TooMany(TooMany { what: what.to_owned(), limit }),
            Refusal::QuotaExceeded { prefix, limit, used } => {
                Wire::QuotaExceeded(QuotaExceeded { prefix, limit, used })
            }
            Refusal::FeatureLevel { level } => Wire::FeatureLevel(level),
            Refusal::AnswerTooLarge { bytes } => Wire::AnswerTooLarge(bytes),
            Refusal::ComparesTooMuch { limit } => Wire::ComparesTooMuch(limit),
        };
        Self { refusal: Some(refusal) }
    }
}

impl TryFrom<v1::outcome::Refused> for Refusal {
    type Error = Invalid;

    fn try_from(refused: v1::outcome::Refused) -> Result<Self, Invalid> {
        use v1::outcome::refused::Refusal as Wire;
        Ok(match refused.refusal.ok_or(Invalid::Missing("refusal"))? {
            Wire::SessionExpired(session) => Refusal::SessionExpired { session },
            Wire::SequenceAnswered(sequence) => Refusal::SequenceAnswered { sequence },
            Wire::WindowFull(sequence) => Refusal::WindowFull { sequence },
            Wire::TooMany(t) => {
                let known = [LEASES, SESSIONS, SCOPES, QUOTAS, HANGING].into_iter().find(|what| *what == t.what);
                Refusal::TooMany { what: known.ok_or(Invalid::Missing("kind of limit"))?, limit: t.limit }
            }
            Wire::QuotaExceeded(q) => Refusal::QuotaExceeded { prefix: q.prefix, limit: q.limit, used: q.used },
            Wire::FeatureLevel(level) => Refusal::FeatureLevel { level },
            Wire::AnswerTooLarge(bytes) => Refusal::AnswerTooLarge { bytes },
            Wire::ComparesTooMuch(limit) => Refusal::ComparesTooMuch { limit },
        })
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::coordination::{Scope, ScopeOwner};
    use lake_proto::kv::{KeyValue, Op, OpResult, Reduced};
    use proptest::prelude::*;

    use super::*;

    fn action() -> impl Strategy<Value = Action> {
        // Whatever else a transaction may hold survives, too: lake-proto's own test shows it of its encoding.
        let put = (".*", any::<Vec<u8>>()).prop_map(|(key, value)| Op::put(key, value));
        let txn = prop::collection::vec(put, 0..4).prop_map(|then| Action::Txn(Txn { then, ..Txn::default() }));
        let ids = || prop::collection::vec(any::<u64>(), 0..5);
        prop_oneof![
            4 => txn,
            1 => (any::<u64>(), ".*").prop_map(|(ttl_ms, holder)| Action::GrantLease { ttl_ms, holder }),
            1 => any::<u64>().prop_map(|lease| Action::RevokeLease { lease }),
            1 => (ids(), any::<u64>()).prop_map(|(leases, term)| Action::ExpireLeases { leases, term }),
            1 => (any::<u64>(), ".*").prop_map(|(ttl_ms, holder)| Action::OpenSession { ttl_ms, holder }),
            1 => any::<u64>().prop_map(|session| Action::CloseSession { session }),
            1 => (ids(), any::<u64>()).prop_map(|(sessions, term)| Action::ExpireSessions { sessions, term }),
            1 => any::<(u32, u64)>().prop_map(|(level, term)| Action::SetFeatureLevel { level, term }),
            1 => (".*", any::<Option<u64>>()).prop_map(|(prefix, bytes)| Action::SetQuota { prefix, bytes }),
        ]
    }

    fn command() -> impl Strategy<Value = Command> {
        let stamp = any::<Option<[u64; 3]>>().prop_map(|numbers| {
            numbers.map(|[session, sequence, lowest_unanswered]| Stamp { session, sequence, lowest_unanswered })
        });
        (stamp, any::<u64>(), action()).prop_map(|(stamp, proposed_unix_ms, action)| Command {
            stamp,
            proposed_unix_ms,
            action,
        })
    }

    fn key_value() -> impl Strategy<Value = KeyValue> {
        (".*", any::<Vec<u8>>(), any::<[u64; 3]>(), prop::option::of(1..u64::MAX)).prop_map(
            |(key, value, [version, create_revision, mod_revision], lease)| KeyValue {
                key,
                value: value.into(),
                version,
                create_revision,
                mod_revision,
                lease,
            },
        )
    }

    fn op_result() -> impl Strategy<Value = OpResult> {
        let previous = || prop::option::of(key_value());
        prop_oneof![
            previous().prop_map(|previous| OpResult::Put { previous }),
            (any::<bool>(), previous()).prop_map(|(deleted, previous)| OpResult::Delete { deleted, previous }),
            previous().prop_map(|entry| OpResult::Get { entry }),
            (prop::collection::vec(key_value(), 0..3), any::<bool>())
                .prop_map(|(entries, more)| OpResult::List { entries, more }),
            any::<u64>().prop_map(|fence| OpResult::AcquireScope { fence }),
            any::<bool>().prop_map(|released| OpResult::ReleaseScope { released }),
        ]
    }

    fn outcome() -> impl Strategy<Value = Outcome> {
        let owner = prop_oneof![any::<u64>().prop_map(ScopeOwner::Lease), ".*".prop_map(ScopeOwner::Procedure)];
        let scope = (".*", owner, any::<[u64; 2]>()).prop_map(|(path, owner, [fence, acquired_unix_ms])| Scope {
            path,
            owner,
            fence,
            acquired_unix_ms,
        });
        let reduced = any::<Option<Vec<u64>>>().prop_map(|r| r.map(|mod_revisions| Reduced { mod_revisions }));
        let txn = (
            (any::<u64>(), any::<bool>(), reduced),
            prop::collection::vec(op_result(), 0..4),
            prop::collection::vec(key_value(), 0..3),
            prop::collection::vec(scope, 0..3),
        )
            .prop_map(|((revision, succeeded, reduced), results, observed, conflicts)| {
                Outcome::Txn(TxnResult { revision, succeeded, results, observed, conflicts, reduced })
            });
        let kinds = prop::sample::select(vec![LEASES, SESSIONS, SCOPES, QUOTAS]);
        let refusal = prop_oneof![
            any::<u64>().prop_map(|session| Refusal::SessionExpired { session }),
            any::<u64>().prop_map(|sequence| Refusal::SequenceAnswered { sequence }),
            any::<u64>().prop_map(|sequence| Refusal::WindowFull { sequence }),
            (kinds, any::<u64>()).prop_map(|(what, limit)| Refusal::TooMany { what, limit }),
            (".*", any::<[u64; 2]>()).prop_map(|(prefix, [limit, used])| Refusal::QuotaExceeded {
                prefix,
                limit,
                used
            }),
            any::<u32>().prop_map(|level| Refusal::FeatureLevel { level }),
            any::<u64>().prop_map(|bytes| Refusal::AnswerTooLarge { bytes }),
            any::<u64>().prop_map(|limit| Refusal::ComparesTooMuch { limit }),
        ];
        prop_oneof![
            3 => txn,
            1 => any::<u64>().prop_map(|id| Outcome::Granted { id }),
            1 => (any::<u64>(), any::<bool>()).prop_map(|(revision, existed)| Outcome::Ended { revision, existed }),
            1 => any::<u64>().prop_map(|revision| Outcome::Set { revision }),
            2 => refusal.prop_map(Outcome::Refused),
        ]
    }

    proptest! {
        #[test]
        fn a_command_survives_the_log(command in command()) {
            prop_assert_eq!(Command::decode(command.encode()).unwrap(), command);
        }

        #[test]
        fn an_outcome_survives_the_wire(outcome in outcome()) {
            let bytes = v1::Outcome::from(outcome.clone()).encode_to_vec();
            prop_assert_eq!(Outcome::try_from(v1::Outcome::decode(&bytes[..]).unwrap()).unwrap(), outcome);
        }
    }
}
