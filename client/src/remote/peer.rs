//! Reads of one peer that the caller names, whether it leads or not (semantics, section 3).
//!
//! Every peer serves every read; a call that may go anywhere goes to the leader, because that saves a question. These are for
//! those who want the peer beside them, or want to know what a certain peer says. One attempt each: a peer that cannot
//! answer is neither asked again nor replaced by another. [`RemoteStore::reading_at`] asks until the deadline.

use std::time::Instant;

use lake_proto::kv::KeyValue;

use super::RemoteStore;
use crate::store::{Error, MetaStore, Read, ReadOptions};

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
        self.at(endpoint, true).get(key, options, deadline).await
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
        self.at(endpoint, true).batch_get(keys, options, deadline).await
    }
}
