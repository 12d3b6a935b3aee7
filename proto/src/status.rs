//! How an error travels in a gRPC status: [`v1::ErrorDetail`] in the status details, and the one mapping to gRPC codes.

use prost::Message;
use tonic::{Code, Status};

use crate::v1::ErrorDetail;
use crate::v1::error_detail::{Applied, Kind};

/// The gRPC code for a kind of error. The only place that maps them.
pub fn code(kind: Kind) -> Code {
    match kind {
        Kind::NotLeader | Kind::ChangeUnderWay | Kind::UnsafeChange => Code::FailedPrecondition,
        Kind::InvalidArgument => Code::InvalidArgument,
        Kind::Unavailable => Code::Unavailable,
        Kind::WrongIdentity => Code::PermissionDenied,
        Kind::Overloaded | Kind::QuotaExceeded | Kind::LimitReached => Code::ResourceExhausted,
        Kind::SessionExpired | Kind::LeaseExpired => Code::NotFound,
        Kind::Compacted | Kind::SnapshotExpired => Code::OutOfRange,
        Kind::Unauthenticated => Code::Unauthenticated,
        Kind::Internal | Kind::Unspecified => Code::Internal,
    }
}

/// A status that carries its detail, without a leader.
pub fn status(kind: Kind, applied: Applied, message: impl Into<String>) -> Status {
    let detail = ErrorDetail { kind: kind as i32, applied: applied as i32, ..ErrorDetail::default() };
    with_detail(detail, message)
}

/// A status that carries this detail.
pub fn with_detail(detail: ErrorDetail, message: impl Into<String>) -> Status {
    Status::with_details(code(detail.kind()), message, detail.encode_to_vec().into())
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
    use crate::v1::Member;

    #[test]
    fn a_status_keeps_its_detail() {
        let leader = Member { id: 2, grpc_address: "127.0.0.1:1".into(), ..Member::default() };
        let given = ErrorDetail {
            kind: Kind::NotLeader as i32,
            term: 7,
            leader: Some(leader.clone()),
            ..ErrorDetail::default()
        };
        let s = with_detail(given, "peer 1 does not lead");
        assert_eq!(s.code(), Code::FailedPrecondition);
        let d = detail(&s).unwrap();
        assert_eq!((d.kind(), d.applied(), d.term, d.leader), (Kind::NotLeader, Applied::NotApplied, 7, Some(leader)));
        assert_eq!(detail(&Status::unavailable("a proxy said so")), None);
    }
}
