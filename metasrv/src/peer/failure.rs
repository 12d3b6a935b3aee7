//! Why a call to a peer failed, before it becomes a gRPC status or a client's error.

use lake_proto::status;
use lake_proto::v1;
use lake_proto::v1::error_detail::{Applied, Kind};

use crate::state::command::Refusal;

/// A failed call. Cheap enough to hand to every reader that waited for the same thing.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    pub kind: Kind,
    pub applied: Applied,
    pub message: String,
    pub term: u64,
    pub leader: Option<v1::Member>,
    /// With Compacted: the first revision that can be watched from.
    pub oldest_revision: u64,
    /// The state machine's answer, which it keeps for the request's session.
    pub kept: bool,
}

impl Failure {
    /// A failure after which nothing was proposed.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            applied: Applied::NotApplied,
            message: message.into(),
            term: 0,
            leader: None,
            oldest_revision: 0,
            kept: false,
        }
    }

    /// Peer `id` does not lead `term`; `leader` does, as far as it knows. One that names the peer itself says nothing.
    pub fn not_leader(id: u64, term: u64, leader: Option<v1::Member>) -> Self {
        let leader = leader.filter(|leader| leader.id != id);
        let message = match &leader {
            Some(leader) => {
                format!("peer {id} does not lead term {term}; peer {} at {} does", leader.id, leader.grpc_address)
            }
            None => format!("peer {id} does not lead term {term}, and knows of no leader"),
        };
        Self { term, leader, ..Self::new(Kind::NotLeader, message) }
    }

    /// Cannot be served now; nothing was proposed.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Kind::Unavailable, message)
    }

    /// Breaks the contract.
    pub fn invalid(error: impl std::fmt::Display) -> Self {
        Self::new(Kind::InvalidArgument, error.to_string())
    }

    /// The state machine refused a command: nothing was changed. Of a repeated request whose session is over nobody
    /// knows what the first attempt did.
    pub fn refused(refusal: &Refusal) -> Self {
        let kind = match refusal {
            Refusal::SessionExpired { .. } => Kind::SessionExpired,
            Refusal::QuotaExceeded { .. } => Kind::QuotaExceeded,
            Refusal::TooMany { .. } | Refusal::WindowFull { .. } => Kind::LimitReached,
            Refusal::SequenceAnswered { .. }
            | Refusal::FeatureLevel { .. }
            | Refusal::AnswerTooLarge { .. }
            | Refusal::ComparesTooMuch { .. } => Kind::InvalidArgument,
        };
        // The others say that the request was not looked at.
        let kept = !matches!(
            refusal,
            Refusal::SessionExpired { .. } | Refusal::SequenceAnswered { .. } | Refusal::WindowFull { .. }
        );
        Self { kept, ..Self::new(kind, refusal.to_string()) }
    }

    /// The same failure, of a change that was made before it and that goes on.
    pub fn after_all(self) -> Self {
        Self { applied: Applied::Unknown, ..self }
    }

    /// Proposed, and then nobody answered.
    pub fn unknown(message: impl Into<String>) -> Self {
        Self { applied: Applied::Unknown, ..Self::unavailable(message) }
    }
}

impl Failure {
    fn into_parts(self) -> (v1::ErrorDetail, String) {
        let detail = v1::ErrorDetail {
            kind: self.kind as i32,
            applied: self.applied as i32,
            term: self.term,
            leader: self.leader,
            oldest_revision: self.oldest_revision,
            kept: self.kept,
        };
        (detail, self.message)
    }
}

impl From<Failure> for tonic::Status {
    fn from(f: Failure) -> Self {
        let (detail, message) = f.into_parts();
        status::with_detail(detail, message)
    }
}

impl From<Failure> for v1::CallError {
    fn from(f: Failure) -> Self {
        let (detail, message) = f.into_parts();
        v1::CallError { message, detail: Some(detail) }
    }
}
