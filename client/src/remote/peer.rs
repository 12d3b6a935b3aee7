//! Reads of one peer that the caller names, whether it leads or not (semantics, section 3).
//!
//! Every peer serves every read; a call that may go anywhere goes to the leader, because that saves a question. These are for
//! those who want the peer beside them, or want to know what a certain peer says. One attempt each: a peer that cannot
//! answer is not replaced by another.

use std::time::Instant;

use lake_proto::kv::{Invalid, KeyValue, validate_key};
use lake_proto::limits::MAX_BATCH_GET_KEYS;
use lake_proto::v1;
use lake_proto::v1::pipeline_request::Request as Piped;
use lake_proto::v1::pipeline_response::Response as PipedAnswer;

use super::attempts::{ATTEMPT_TIMEOUT, Attempts, classify, describe, ended, in_time};
use super::{RemoteStore, revision, wire_options};
use crate::store::{Applied, Error, Read, ReadOptions};

impl RemoteStore {
    /// One entry, or `None`, as the peer at `endpoint` has it.
    ///
    /// # Errors
    /// `Unavailable` if that peer does not answer by the deadline, or cannot answer so fresh a read.
    pub async fn get_from(
        &self,
        endpoint: &str,
        key: &str,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Option<KeyValue>>, Error> {
        validate_key(key)?;
        let message = v1::GetRequest { key: key.to_owned(), options: Some(wire_options(options)) };
        let take = |answer| if let PipedAnswer::Get(get) = answer { Some(get) } else { None };
        let answer = self.ask_peer(endpoint, format!("reading {key}"), Piped::Get(message), take, deadline).await?;
        Ok(Read { revision: revision(answer.header), value: answer.entry.map(Into::into) })
    }

    /// The entries of those `keys` that exist, at one revision, as the peer at `endpoint` has them.
    ///
    /// # Errors
    /// As [`RemoteStore::get_from`].
    pub async fn batch_get_from(
        &self,
        endpoint: &str,
        keys: &[String],
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        if keys.len() > MAX_BATCH_GET_KEYS {
            return Err(Invalid::BatchKeys { count: keys.len() }.into());
        }
        keys.iter().try_for_each(|key| validate_key(key))?;
        let message = v1::BatchGetRequest { keys: keys.to_vec(), options: Some(wire_options(options)) };
        let take = |answer| if let PipedAnswer::BatchGet(get) = answer { Some(get) } else { None };
        let doing = format!("reading {} keys", keys.len());
        let answer = self.ask_peer(endpoint, doing, Piped::BatchGet(message), take, deadline).await?;
        let entries = answer.entries.into_iter().map(Into::into).collect();
        Ok(Read { revision: revision(answer.header), value: entries })
    }

    async fn ask_peer<T>(
        &self,
        endpoint: &str,
        doing: String,
        request: Piped,
        take: impl FnOnce(PipedAnswer) -> Option<T>,
        deadline: Instant,
    ) -> Result<T, Error> {
        let mut attempts = Attempts::new(&doing, deadline);
        attempts.count = 1;
        let Some(timeout) = attempts.remaining().map(|left| left.min(ATTEMPT_TIMEOUT)) else {
            return Err(self.unavailable(attempts, Applied::No));
        };
        let status = match in_time(timeout, self.inner.piped(endpoint, request, timeout, take)).await {
            Ok(answer) => return Ok(answer),
            Err(status) => status,
        };
        let failure = classify(status);
        if failure.broken {
            self.inner.lock().forget_connection(endpoint);
        }
        if !failure.retry {
            return Err(ended(&doing, failure, false));
        }
        attempts.last = format!("{endpoint}: {}", describe(&failure.status));
        Err(self.unavailable(attempts, Applied::No))
    }
}
