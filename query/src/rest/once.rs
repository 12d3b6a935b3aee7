//! Requests that are made once, however often they are sent: those with an `Idempotency-Key`.
//!
//! What became of one is left in the metadata under its key, in the transaction that makes its change, or by itself if it
//! was refused (semantics, section 4). Whoever sends it again, to any node, is given that: the same status, and the table
//! or view of the same metadata. What is not certain, or may go well another time (5xx), is not left.
//!
//! A key is good for [`LIFETIME`], which clients are told, and is kept twice as long.

use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use lake_client::catalog::Operation as Kept;
use lake_client::metadata::MetadataWriter;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::endpoint::{Endpoint, Operation};
use super::error::{RestError, Result, kind};
use super::request::Call;
use super::{Rest, namespaces, tables, views};
use crate::outcomes::{self, fingerprint, now_ms};

/// The header.
pub const KEY_HEADER: &str = "idempotency-key";
/// How long a client may send a request again.
pub const LIFETIME: Duration = Duration::from_secs(30 * 60);
/// [`LIFETIME`] as the configuration says it.
pub const ADVERTISED_LIFETIME: &str = "PT30M";
/// What the outcomes are filed under.
const DOMAIN: &str = "rest";

/// A request's key, and what tells it from another request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    id: Uuid,
    request: u64,
}

/// What is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Outcome {
    request: u64,
    at_ms: u64,
    status: u16,
    /// The metadata of the table or view that was answered with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    location: Option<String>,
    /// Type and message of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refusal: Option<(String, String)>,
}

impl Key {
    /// The key that a request carries, if it is for a change.
    ///
    /// # Errors
    /// 400: it is not a UUID.
    pub fn of(endpoint: &Endpoint, path: &str, call: &Call) -> Result<Option<Self>> {
        let Some(value) = call.headers.get(KEY_HEADER).filter(|_| endpoint.changes()) else { return Ok(None) };
        let id = value.to_str().ok().and_then(|text| Uuid::try_parse(text.trim()).ok());
        let id = id.ok_or_else(|| RestError::bad("Idempotency-Key", "it is not a UUID"))?;
        let mut parts = vec![endpoint.method.as_str().as_bytes(), path.as_bytes(), &call.body[..]];
        parts.extend(call.query.iter().flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]));
        Ok(Some(Self { id, request: fingerprint(&parts) }))
    }

    fn outcome(self, status: StatusCode, location: Option<&str>, refusal: Option<&RestError>) -> Result<Kept> {
        let outcome = Outcome {
            request: self.request,
            at_ms: now_ms(),
            status: status.as_u16(),
            location: location.map(str::to_owned),
            refusal: refusal.map(|error| (error.kind.to_owned(), error.message.clone())),
        };
        let bytes = serde_json::to_vec(&outcome)
            .map_err(|e| RestError::of_a_change(crate::Error::internal(format!("writing an outcome: {e}"))))?;
        Ok(Kept::new(DOMAIN, &self.id.to_string(), bytes)?)
    }
}

/// A refusal that could not be left, for this reason: what was in its way may be what another attempt under the key has made.
fn unsettled(refusal: RestError, why: &impl fmt::Display) -> RestError {
    if !matches!(refusal.status, StatusCode::CONFLICT | StatusCode::NOT_FOUND) {
        // It is about the request itself.
        return refusal;
    }
    RestError::unknown(format!(
        "this attempt changed nothing ({}), and whether another one under its Idempotency-Key has could not be found out: {why}; \
         send it again with the same key",
        refusal.message
    ))
}

impl Rest {
    /// What changes are made with for this request, answered with this status and, if it is a table or view that is
    /// answered with, its metadata.
    pub fn writer(&self, call: &Call, status: StatusCode, location: Option<&str>) -> Result<MetadataWriter> {
        match call.key {
            Some(key) => Ok(self.tables.writer.within(key.outcome(status, location, None)?)),
            None => Ok(self.tables.writer.clone()),
        }
    }

    /// Leaves the outcome of a request that had nothing to change: sent again, it would be made on what others have done since.
    ///
    /// # Errors
    /// The metadata's: nothing was changed, and it may be sent again.
    pub async fn leave_done(&self, call: &Call, status: StatusCode, location: Option<&str>) -> Result<()> {
        let Some(key) = call.key else { return Ok(()) };
        let outcome = key.outcome(status, location, None)?;
        self.tables.writer.leave_outcome(&outcome, call.deadline).await?;
        Ok(())
    }

    /// Serves a request once: again only if nothing became of it.
    pub async fn run_once(&self, endpoint: &Endpoint, call: &Call) -> Result<Response> {
        let Some(key) = call.key else { return self.run(endpoint, call).await };
        if let Some(kept) = self.kept(key, call).await? {
            return self.again(endpoint, call, key, &kept).await;
        }
        let error = match self.run(endpoint, call).await {
            Ok(response) => return Ok(response),
            Err(error) => error,
        };
        if error.kind == kind::ALREADY_DONE {
            // Sent twice at the same time.
            let kept = self.kept(key, call).await.map_err(|why| unsettled(error.clone(), &why.message))?;
            let kept = kept.ok_or_else(|| RestError::unknown(error.message))?;
            return self.again(endpoint, call, key, &kept).await;
        }
        if !error.status.is_client_error() || error.status == StatusCode::REQUEST_TIMEOUT {
            return Err(error);
        }
        let refusal = key.outcome(error.status, None, Some(&error))?;
        match self.tables.writer.leave_outcome(&refusal, call.deadline).await {
            Ok(kept) => self.again(endpoint, call, key, &kept).await,
            Err(why) => Err(unsettled(error, &why)),
        }
    }

    async fn kept(&self, key: Key, call: &Call) -> Result<Option<Bytes>> {
        Ok(self.tables.writer.outcome(DOMAIN, &key.id.to_string(), call.deadline).await?)
    }

    /// The answer that was given before.
    async fn again(&self, endpoint: &Endpoint, call: &Call, key: Key, kept: &Bytes) -> Result<Response> {
        let outcome: Outcome = serde_json::from_slice(kept)
            .map_err(|e| RestError::unknown(format!("the outcome kept of request {} is damaged: {e}", key.id)))?;
        if outcome.request != key.request {
            return Err(RestError::unprocessable(format!(
                "Idempotency-Key: {} has been used for another request; nothing was done",
                key.id
            )));
        }
        let status = StatusCode::from_u16(outcome.status).unwrap_or(StatusCode::OK);
        if let Some((kind, message)) = outcome.refusal {
            return Err(RestError::new(status, kind::known(&kind), message));
        }
        match (endpoint.operation, &outcome.location) {
            (Operation::CreateView | Operation::ReplaceView | Operation::RegisterView, Some(location)) => {
                views::again(self, location, call.deadline).await
            }
            (_, Some(location)) => tables::again(self, call, key.id, location).await,
            (Operation::CreateNamespace, None) => namespaces::created(call),
            (Operation::UpdateNamespace, None) => namespaces::updated(call),
            _ => Ok(status.into_response()),
        }
    }
}

/// Forgets outcomes that have been kept long enough, until it is dropped.
pub async fn sweep(rest: &Rest) -> Infallible {
    outcomes::sweep(&rest.tables.writer, &[DOMAIN], LIFETIME).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_good_for_as_long_as_is_advertised() {
        assert_eq!(ADVERTISED_LIFETIME, format!("PT{}M", LIFETIME.as_secs() / 60));
    }

    #[test]
    fn a_refusal_that_could_not_be_left_may_be_of_what_was_made_before() {
        for refusal in [RestError::lost("main has moved"), RestError::not_found(kind::NOT_FOUND, "t is not there")] {
            let error = unsettled(refusal.clone(), &"nobody answers");
            assert_eq!((error.status, error.kind), (StatusCode::INTERNAL_SERVER_ERROR, kind::COMMIT_UNKNOWN));
            assert!(
                [refusal.message.as_str(), "nobody answers"].iter().all(|said| error.message.contains(said)),
                "{error:?}"
            );
        }
        let wrong = RestError::bad("updates", "there is none");
        assert_eq!(unsettled(wrong.clone(), &"nobody answers"), wrong);
    }
}
