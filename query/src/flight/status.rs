//! Errors as gRPC statuses and back: the one place where kinds and codes meet.

use tonic::{Code, Status};

use super::{KIND_HEADER, POSITION_HEADER};
use crate::error::{Error, Kind, Position};

const CODES: [(Kind, Code); 13] = [
    (Kind::Invalid, Code::InvalidArgument),
    (Kind::NotSupported, Code::Unimplemented),
    (Kind::NotFound, Code::NotFound),
    (Kind::AlreadyExists, Code::AlreadyExists),
    (Kind::Denied, Code::PermissionDenied),
    (Kind::Conflict, Code::Aborted),
    (Kind::Unavailable, Code::Unavailable),
    (Kind::Unknown, Code::Unknown),
    (Kind::Deadline, Code::DeadlineExceeded),
    (Kind::Exhausted, Code::ResourceExhausted),
    (Kind::Corrupt, Code::DataLoss),
    (Kind::Storage, Code::Internal),
    (Kind::Cancelled, Code::Cancelled),
];

/// The status that tells a client about an error.
pub fn from_error(error: &Error) -> Status {
    let code = CODES.iter().find(|(kind, _)| *kind == error.kind).map_or(Code::Internal, |(_, code)| *code);
    let mut status = Status::new(code, &error.message);
    let headers = status.metadata_mut();
    headers.insert(KIND_HEADER, tonic::metadata::MetadataValue::from_static(error.kind.as_str()));
    if let Some(value) = error.position.and_then(|position| position.to_string().parse().ok()) {
        headers.insert(POSITION_HEADER, value);
    }
    status
}

/// The error that a status tells about.
pub fn to_error(status: &Status) -> Error {
    let text = |name: &str| status.metadata().get(name).and_then(|value| value.to_str().ok());
    let kind = match text(KIND_HEADER) {
        Some(named) => Kind::named(named),
        None => CODES.iter().find(|(_, code)| *code == status.code()).map_or(Kind::Internal, |(kind, _)| *kind),
    };
    let position = text(POSITION_HEADER).and_then(|text| text.parse::<Position>().ok());
    Error { kind, message: status.message().to_owned(), position }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_back() {
        for (kind, _) in CODES {
            let error = Error::new(kind, "words").at(Some(Position { line: 3, column: 14 }));
            assert_eq!(to_error(&from_error(&error)), error);
        }
        assert_eq!(to_error(&from_error(&Error::internal("x"))), Error::internal("x"));
        assert_eq!(to_error(&Status::not_found("x")).kind, Kind::NotFound);
    }
}
