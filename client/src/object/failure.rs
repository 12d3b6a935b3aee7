//! What an object store's errors mean.

use crate::store::Error;

pub(super) fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic { store: "metadata", source: error.into() }
}

pub(super) fn late() -> object_store::Error {
    failed("no answer by the deadline")
}

pub(super) fn is_precondition(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
}

pub(super) fn is_lost<T>(put: &object_store::Result<T>) -> bool {
    put.as_ref().is_err_and(is_precondition)
}

/// Whether trying again cannot help, and nothing was done.
pub(super) fn is_final(error: &object_store::Error) -> bool {
    use object_store::Error::*;
    matches!(
        error,
        PermissionDenied { .. }
            | Unauthenticated { .. }
            | NotSupported { .. }
            | NotImplemented { .. }
            | InvalidPath { .. }
            | UnknownConfigurationKey { .. }
    )
}

pub(super) fn refused(doing: &str, error: impl std::fmt::Display) -> Error {
    Error::Refused { doing: doing.to_owned(), message: error.to_string() }
}

pub(super) fn innermost(error: &object_store::Error) -> String {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        reason = error.to_string();
        source = error.source();
    }
    reason
}
