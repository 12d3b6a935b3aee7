//! Errors as gRPC statuses and back: the one place where kinds and codes meet.

use tonic::{Code, Status};

use super::{KIND_HEADER, POSITION_HEADER};
use crate::error::{Error, Kind, Position};

const KINDS: [(Kind, Code, &str); 13] = [
    (Kind::Invalid, Code::InvalidArgument, "invalid"),
    (Kind::NotSupported, Code::Unimplemented, "not-supported"),
    (Kind::NotFound, Code::NotFound, "not-found"),
    (Kind::AlreadyExists, Code::AlreadyExists, "already-exists"),
    (Kind::Denied, Code::PermissionDenied, "denied"),
    (Kind::Conflict, Code::Aborted, "conflict"),
    (Kind::Unavailable, Code::Unavailable, "unavailable"),
    (Kind::Unknown, Code::Unknown, "unknown-outcome"),
    (Kind::Deadline, Code::DeadlineExceeded, "deadline"),
    (Kind::Exhausted, Code::ResourceExhausted, "exhausted"),
    (Kind::Corrupt, Code::DataLoss, "corrupt"),
    (Kind::Storage, Code::Internal, "storage"),
    (Kind::Cancelled, Code::Cancelled, "cancelled"),
];

/// The status that tells a client about an error.
pub fn from_error(error: &Error) -> Status {
    let known = KINDS.iter().find(|(kind, ..)| *kind == error.kind);
    let (code, name) = known.map_or((Code::Internal, "internal"), |(_, code, name)| (*code, *name));
    let mut status = Status::new(code, &error.message);
    let headers = status.metadata_mut();
    headers.insert(KIND_HEADER, tonic::metadata::MetadataValue::from_static(name));
    if let Some(value) = error.position.and_then(|position| position.to_string().parse().ok()) {
        headers.insert(POSITION_HEADER, value);
    }
    status
}

/// The error that a status tells about.
pub fn to_error(status: &Status) -> Error {
    let text = |name: &str| status.metadata().get(name).and_then(|value| value.to_str().ok());
    let named = text(KIND_HEADER);
    let kind = KINDS
        .iter()
        .find(|(_, code, name)| named.map_or(*code == status.code(), |named| named == *name))
        .map_or(Kind::Internal, |(kind, ..)| *kind);
    let position = text(POSITION_HEADER).and_then(|text| text.parse::<Position>().ok());
    Error { kind, message: status.message().to_owned(), position }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_back() {
        for (kind, ..) in KINDS {
            let error = Error::new(kind, "words").at(Some(Position { line: 3, column: 14 }));
            assert_eq!(to_error(&from_error(&error)), error);
        }
        assert_eq!(to_error(&from_error(&Error::internal("x"))), Error::internal("x"));
        assert_eq!(to_error(&Status::not_found("x")).kind, Kind::NotFound);
    }
}
