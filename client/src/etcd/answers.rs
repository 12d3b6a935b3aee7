//! What etcd's answers say: entries, revisions, and what its errors mean.

use lake_proto::MAX_MESSAGE_BYTES;
use lake_proto::etcd as wire;
use lake_proto::kv::{KeyValue, Revision};
use tonic::{Code, Status};

use crate::remote::attempts::describe;
use crate::store::{Applied, Error};

/// An entry as this store tells it, whose keys lie under `root` in etcd.
pub(super) fn entry(root: &str, entry: wire::KeyValue) -> Result<KeyValue, String> {
    let key = std::str::from_utf8(&entry.key).map_err(|e| format!("a key is no text: {e}"))?;
    let key = key.strip_prefix(root).ok_or("a key lies outside what was asked for")?;
    let number = |n: i64| u64::try_from(n).map_err(|_| format!("{key:?} has a number below 0"));
    Ok(KeyValue {
        key: key.to_owned(),
        version: number(entry.version)?,
        create_revision: number(entry.create_revision)?,
        mod_revision: number(entry.mod_revision)?,
        lease: Some(number(entry.lease)?).filter(|id| *id > 0),
        value: entry.value,
    })
}

/// A number that etcd counts in, too.
pub(super) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

pub(super) fn header(doing: &str, header: &Option<wire::ResponseHeader>) -> Result<Revision, Error> {
    let revision = header.as_ref().and_then(|header| u64::try_from(header.revision).ok());
    revision.ok_or_else(|| unreadable(doing, "it has no revision".to_owned()))
}

/// Of a read.
pub(super) fn unreadable(doing: &str, what: String) -> Error {
    let message = format!("etcd's answer cannot be read: {what}");
    Error::Internal { doing: doing.to_owned(), message, applied: Applied::No }
}

/// Of a read.
pub(super) fn too_large(doing: &str) -> Error {
    let message = format!("etcd's answer has more than {MAX_MESSAGE_BYTES} bytes: ask for less at once");
    Error::Internal { doing: doing.to_owned(), message, applied: Applied::No }
}

/// Whether this end did not take the answer, because of its size. etcd itself says that of revisions, with its name.
pub(super) fn is_too_large(status: &Status) -> bool {
    status.code() == Code::OutOfRange && !status.message().starts_with("etcdserver")
}

/// An answer; `None`: it is too large.
pub(super) fn fitting<T>(answer: Result<tonic::Response<T>, Status>) -> Result<Option<T>, Status> {
    match answer {
        Ok(answer) => Ok(Some(answer.into_inner())),
        Err(status) if is_too_large(&status) => Ok(None),
        Err(status) => Err(status),
    }
}

/// Whether etcd has so much to do that it has not begun with what was asked.
pub(super) fn is_busy(status: &Status) -> bool {
    status.code() == Code::ResourceExhausted && status.message().contains("too many requests")
}

/// Whether etcd said no to what was asked, and did nothing.
pub(super) fn is_refusal(status: &Status) -> bool {
    !is_busy(status)
        && matches!(
            status.code(),
            Code::InvalidArgument
                | Code::NotFound
                | Code::FailedPrecondition
                | Code::OutOfRange
                | Code::ResourceExhausted
                | Code::PermissionDenied
                | Code::Unauthenticated
                | Code::Unimplemented
        )
}

pub(super) fn refused(doing: &str, status: &Status) -> Error {
    if status.code() == Code::OutOfRange {
        // A revision that is no longer kept, or that lies in the future: either way there is no such state.
        return Error::snapshot_expired(doing);
    }
    Error::Refused { doing: doing.to_owned(), message: describe(status) }
}
