//! What a client of the REST protocol is told when something fails: a status that says what it may do next, and the
//! `type` that clients look at.
//!
//! | status | when |
//! |---|---|
//! | 400 | the request is wrong; the message names the field |
//! | 401, 403 | the secret is missing or wrong; the store of the objects does not let this node |
//! | 404 | there is no such thing; the type says which |
//! | 405, 406 | not this method; not supported |
//! | 409 | it exists already, is not empty, or a commit lost its race: nothing was done |
//! | 408, 413, 422 | the body took too long, or is too large; understood, and cannot be done |
//! | 500 | of a change: whether it was made is unknown (`CommitStateUnknownException`); of a read: a defect or damage |
//! | 503 | not now, and nothing was done: try again after `Retry-After` |

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use lake_client::catalog::CatalogError;
use lake_client::store::{Applied, Error as StoreError};
use serde_json::json;

use crate::error::{Error, Kind};

/// How long a client is asked to wait before it tries again, in seconds.
const RETRY_AFTER_SECS: &str = "1";

/// The types that clients tell apart.
pub mod kind {
    pub const BAD_REQUEST: &str = "BadRequestException";
    pub const NOT_AUTHORIZED: &str = "NotAuthorizedException";
    pub const NO_SUCH_NAMESPACE: &str = "NoSuchNamespaceException";
    pub const NO_SUCH_TABLE: &str = "NoSuchTableException";
    pub const NO_SUCH_VIEW: &str = "NoSuchViewException";
    pub const NO_SUCH_WAREHOUSE: &str = "NoSuchWarehouseException";
    pub const NOT_FOUND: &str = "NotFoundException";
    pub const ALREADY_EXISTS: &str = "AlreadyExistsException";
    pub const NAMESPACE_NOT_EMPTY: &str = "NamespaceNotEmptyException";
    pub const COMMIT_FAILED: &str = "CommitFailedException";
    pub const COMMIT_UNKNOWN: &str = "CommitStateUnknownException";
    pub const UNSUPPORTED: &str = "UnsupportedOperationException";
    pub const UNPROCESSABLE: &str = "UnprocessableEntityException";
    pub const UNAVAILABLE: &str = "ServiceUnavailableException";
    pub const INTERNAL: &str = "InternalServerError";
    pub const FORBIDDEN: &str = "ForbiddenException";
    /// Never sent: the answer that was given before is.
    pub const ALREADY_DONE: &str = "AlreadyDone";

    /// The type that this text is.
    pub fn known(text: &str) -> &'static str {
        [
            BAD_REQUEST,
            NOT_AUTHORIZED,
            NO_SUCH_NAMESPACE,
            NO_SUCH_TABLE,
            NO_SUCH_VIEW,
            NO_SUCH_WAREHOUSE,
            NOT_FOUND,
            ALREADY_EXISTS,
            NAMESPACE_NOT_EMPTY,
            COMMIT_FAILED,
            COMMIT_UNKNOWN,
            UNSUPPORTED,
            UNPROCESSABLE,
            UNAVAILABLE,
            FORBIDDEN,
        ]
        .into_iter()
        .find(|kind| *kind == text)
        .unwrap_or(INTERNAL)
    }
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub message: String,
}

/// The result of serving a request.
pub type Result<T, E = RestError> = std::result::Result<T, E>;

impl RestError {
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into() }
    }

    /// A field of the request is wrong.
    pub fn bad(field: &str, why: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, kind::BAD_REQUEST, format!("{field}: {why}"))
    }

    pub fn not_found(kind: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, kind, message)
    }

    pub fn exists(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, kind::ALREADY_EXISTS, message)
    }

    /// A commit that was not made, because of what others have committed.
    pub fn lost(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, kind::COMMIT_FAILED, message)
    }

    /// Whether the change was made cannot be told.
    pub fn unknown(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, kind::COMMIT_UNKNOWN, message)
    }

    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_ACCEPTABLE, kind::UNSUPPORTED, message)
    }

    pub fn unprocessable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, kind::UNPROCESSABLE, message)
    }

    /// Nothing was done, and it can be tried again.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, kind::UNAVAILABLE, message)
    }

    /// An error while something was to be changed. Only one whose outcome is unknown becomes a 500.
    pub fn of_a_change(error: Error) -> Self {
        match error.kind {
            Kind::Corrupt | Kind::Internal | Kind::Cancelled => Self::unprocessable(error.of_a_change().message),
            _ => Self::of_a_read(error),
        }
    }

    /// An error while something was read.
    pub fn of_a_read(error: Error) -> Self {
        let message = error.message;
        match error.kind {
            Kind::Invalid => Self::new(StatusCode::BAD_REQUEST, kind::BAD_REQUEST, message),
            Kind::NotSupported => Self::unsupported(message),
            Kind::NotFound => Self::not_found(kind::NOT_FOUND, message),
            Kind::AlreadyExists => Self::exists(message),
            Kind::Denied => Self::new(StatusCode::FORBIDDEN, kind::FORBIDDEN, message),
            Kind::Conflict => Self::lost(message),
            Kind::Unavailable | Kind::Deadline | Kind::Exhausted | Kind::Storage => Self::unavailable(message),
            Kind::Unknown => Self::unknown(message),
            Kind::Corrupt | Kind::Cancelled | Kind::Internal => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, kind::INTERNAL, message)
            }
        }
    }

    /// The same error; a 404 is about this kind of thing.
    pub fn where_missing(mut self, kind: &'static str) -> Self {
        if self.status == StatusCode::NOT_FOUND {
            self.kind = kind;
        }
        self
    }
}

impl From<CatalogError> for RestError {
    fn from(error: CatalogError) -> Self {
        let message = error.to_string();
        match error {
            CatalogError::InDoubt { .. } => Self::unknown(message),
            error if error.applied() == Applied::Unknown => {
                Self::unknown(format!("{message}; whether it was done is unknown: look before doing it again"))
            }
            CatalogError::InvalidName { .. } => Self::new(StatusCode::BAD_REQUEST, kind::BAD_REQUEST, message),
            CatalogError::NamespaceNotFound(_) => Self::not_found(kind::NO_SUCH_NAMESPACE, message),
            CatalogError::TableNotFound(_) => Self::not_found(kind::NO_SUCH_TABLE, message),
            CatalogError::ViewNotFound(_) => Self::not_found(kind::NO_SUCH_VIEW, message),
            CatalogError::AlreadyDone(_) => Self::new(StatusCode::CONFLICT, kind::ALREADY_DONE, message),
            CatalogError::NamespaceExists(_)
            | CatalogError::TableExists(_)
            | CatalogError::ViewExists(_)
            | CatalogError::Registered(_) => Self::exists(message),
            CatalogError::NamespaceNotEmpty(_) | CatalogError::IsWarehouse(_) => {
                Self::new(StatusCode::CONFLICT, kind::NAMESPACE_NOT_EMPTY, message)
            }
            CatalogError::Conflict { .. } | CatalogError::NotYourTurn { .. } | CatalogError::Fenced { .. } => {
                Self::lost(message)
            }
            CatalogError::ScopeHeld { .. } | CatalogError::Behind { .. } | CatalogError::TooOld { .. } => {
                Self::unavailable(message)
            }
            CatalogError::Damaged { .. } => Self::unprocessable(message),
            CatalogError::Store(StoreError::Invalid(_)) => {
                Self::new(StatusCode::BAD_REQUEST, kind::BAD_REQUEST, message)
            }
            CatalogError::Store(StoreError::Refused { .. } | StoreError::Internal { .. }) => {
                Self::unprocessable(message)
            }
            CatalogError::Store(_) => Self::unavailable(message),
        }
    }
}

/// What became of a change: one whose answer was lost was made if a look says so.
///
/// # Errors
/// The change's own.
pub async fn unless_made<T>(changed: Result<T, CatalogError>, made: impl Future<Output = bool>) -> Result<()> {
    let error = match changed {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    match error.applied() == Applied::Unknown && made.await {
        true => Ok(()),
        false => Err(error.into()),
    }
}

impl IntoResponse for RestError {
    fn into_response(self) -> Response {
        let body = json!({"error": {"message": self.message, "type": self.kind, "code": self.status.as_u16()}});
        let mut response = json_response(self.status, body.to_string());
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_SECS));
        }
        response
    }
}

/// A response that holds JSON.
pub fn json_response(status: StatusCode, body: impl Into<Body>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.into()).into_response()
}

#[cfg(test)]
mod tests {
    use lake_client::catalog::TableIdent;
    use lake_client::store::Leader;

    use super::*;

    fn unavailable(applied: Applied) -> CatalogError {
        CatalogError::Store(StoreError::Unavailable {
            doing: "swapping".into(),
            endpoints: vec![],
            attempts: 1,
            elapsed: std::time::Duration::ZERO,
            leader: Leader::Without,
            last: "refused".into(),
            applied,
        })
    }

    #[test]
    fn only_an_unknown_outcome_of_a_change_is_a_500() {
        let table = TableIdent::new("n".parse().unwrap(), "t").unwrap();
        let conflict = |resent| CatalogError::Conflict { table: table.clone(), current: None, resent };
        for (error, status, kind) in [
            (unavailable(Applied::No), 503, kind::UNAVAILABLE),
            (unavailable(Applied::Unknown), 500, kind::COMMIT_UNKNOWN),
            (conflict(false), 409, kind::COMMIT_FAILED),
            (conflict(true), 500, kind::COMMIT_UNKNOWN),
            (CatalogError::InDoubt { met: "x".into() }, 500, kind::COMMIT_UNKNOWN),
            (CatalogError::TableNotFound(table.clone()), 404, kind::NO_SUCH_TABLE),
        ] {
            let told = RestError::from(error);
            assert_eq!((told.status.as_u16(), told.kind), (status, kind));
            let response = told.into_response();
            assert_eq!(response.headers().contains_key(header::RETRY_AFTER), status == 503);
        }
        for certain in [Error::corrupt("x"), Error::internal("x"), Error::storage("x"), Error::conflict("x")] {
            assert_ne!(RestError::of_a_change(certain).status, StatusCode::INTERNAL_SERVER_ERROR);
        }
        assert_eq!(RestError::of_a_change(Error::unknown("x")).kind, kind::COMMIT_UNKNOWN);
    }
}
