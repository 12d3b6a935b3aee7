//! How an error travels in a gRPC status: [`v1::ErrorDetail`] in the status details, and the one mapping to gRPC codes.

use prost::Message;
use tonic::{Code, Status};

use crate::v1::error_detail::{Applied, Kind};
use crate::v1::{ErrorDetail, Member};

/// The gRPC code for a kind of error. The only place that maps them.
pub fn code(kind: Kind) -> Code {
    match kind {
        Kind::NotLeader => Code::FailedPrecondition,
        Kind::InvalidArgument => Code::InvalidArgument,
        Kind::Unavailable => Code::Unavailable,
        Kind::WrongIdentity => Code::PermissionDenied,
        Kind::SnapshotExpired => Code::OutOfRange,
        Kind::Overloaded => Code::ResourceExhausted,
        Kind::Unauthenticated => Code::Unauthenticated,
        Kind::Internal | Kind::Unspecified => Code::Internal,
    }
}

/// A status that carries its detail.
pub fn status(kind: Kind, applied: Applied, message: impl Into<String>) -> Status {
    with_leader(kind, applied, message, 0, None)
}

/// A status that also says who leads, in which term.
pub fn with_leader(
    kind: Kind,
    applied: Applied,
    message: impl Into<String>,
    term: u64,
    leader: Option<Member>,
) -> Status {
    let detail = ErrorDetail { kind: kind as i32, applied: applied as i32, term, leader };
    Status::with_details(code(kind), message, detail.encode_to_vec().into())
}

/// The detail of a failed call, if the other side was a lake peer that gave one.
pub fn detail(status: &Status) -> Option<ErrorDetail> {
    if status.details().is_empty() {
        return None;
    }
    ErrorDetail::decode(status.details()).ok().filter(|d| d.kind() != Kind::Unspecified)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_keeps_its_detail() {
        let leader = Member { id: 2, grpc_address: "127.0.0.1:1".into(), ..Member::default() };
        let s = with_leader(Kind::NotLeader, Applied::NotApplied, "peer 1 does not lead", 7, Some(leader.clone()));
        assert_eq!(s.code(), Code::FailedPrecondition);
        let d = detail(&s).unwrap();
        assert_eq!((d.kind(), d.applied(), d.term, d.leader), (Kind::NotLeader, Applied::NotApplied, 7, Some(leader)));
        assert_eq!(detail(&Status::unavailable("a proxy said so")), None);
    }
}
