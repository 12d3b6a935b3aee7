//! Why a call to a peer failed, before it becomes a gRPC status or a client's error.

use lake_proto::status;
use lake_proto::v1;
use lake_proto::v1::error_detail::{Applied, Kind};

/// A failed call. Cheap enough to hand to every reader that waited for the same thing.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    pub kind: Kind,
    pub applied: Applied,
    pub message: String,
    pub term: u64,
    pub leader: Option<v1::Member>,
}

impl Failure {
    /// A failure after which nothing was proposed.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, applied: Applied::NotApplied, message: message.into(), term: 0, leader: None }
    }

    /// Cannot be served now; nothing was proposed.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Kind::Unavailable, message)
    }

    /// Breaks the contract.
    pub fn invalid(error: impl std::fmt::Display) -> Self {
        Self::new(Kind::InvalidArgument, error.to_string())
    }

    /// Proposed, and then nobody answered.
    pub fn unknown(message: impl Into<String>) -> Self {
        Self { applied: Applied::Unknown, ..Self::unavailable(message) }
    }
}

impl From<Failure> for tonic::Status {
    fn from(f: Failure) -> Self {
        status::with_leader(f.kind, f.applied, f.message, f.term, f.leader)
    }
}
