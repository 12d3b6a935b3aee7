//! Watches: changes as they happen (semantics, section 7).
//!
//! ```text
//!   state machine -- Published --> hub (one task) -- signals --> shards (watchers of one prefix, at most 16)
//!                        \                                          |  woken
//!                         \______ kept changes of the state ______  v
//!                                                                watcher: its place, and nothing else
//! ```
//!
//! The kept changes, which are part of the state, are the only buffer. A [`Watcher`] is a place in them: the next revision
//! it has to be told of. It reads from there whenever it is behind: at its beginning, when it was slow, when a message was
//! too large to share. When what it needs next is no longer kept it ends with Compacted. A watcher that does not read its
//! messages therefore costs no memory but for the two that its connection has taken, and slows nobody.
//!
//! The hub follows what is applied and shares the work of those that keep up. It finds the prefixes that a change lies
//! under by hashing the key's beginnings, one for each length of prefix in use ([`groups`]); encodes a message once for all
//! watchers of a prefix ([`message`]); and signals the shards one after the other, no faster than [`pace`] allows, so that
//! many watchers delay each other and not the writers. Changes that come meanwhile share a message. A signal names its
//! message by a weak reference; the hub keeps the newest messages alive, [`MAX_PREPARED_BYTES`] of them. A watcher that
//! finds its message gone, or that missed signals, reads from the kept changes instead.
//!
//! Progress marks: a shard that has been told of nothing for [`pace::mark_interval`] is told the revision up to which there
//! was nothing to tell; ten times as late if the revision stands still. The marks of all shards are spread over the interval.
//!
//! Limits: [`MAX_WATCHERS`] watchers, of which each caller has its part ([`super::shares`]); messages of about
//! [`MESSAGE_BYTES`], or one change; [`SCAN_EVENTS`] events read at a time by a watcher that is behind, one such read at a
//! time in the whole peer.
//! Failure cases: the peer has not recovered by the deadline, or stops: Unavailable; the state jumps
//! over changes that are no longer kept (a snapshot from the leader): Compacted for those that needed them; too many
//! watchers: Overloaded.

mod groups;
mod hub;
mod message;
mod pace;
mod position;
#[cfg(test)]
mod properties;
mod watcher;

use std::sync::{Arc, Mutex};

use lake_proto::kv::{Revision, validate_prefix};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use self::message::Message;
pub use self::watcher::Watcher;

use self::groups::Groups;
use super::failure::Failure;
use super::shares::{Caller, Held, Pool, Resource};
use super::view::View;
use crate::log::lock;
use crate::raft::state_machine::Published;

/// Watchers of one peer.
pub const MAX_WATCHERS: usize = 50_000;
/// A message takes up no more changes once it has this many bytes of keys and values.
pub const MESSAGE_BYTES: u64 = 512 << 10;
/// Bytes of shared messages that are kept for watchers to take.
pub const MAX_PREPARED_BYTES: usize = 32 << 20;
/// Events that a watcher which is behind, or the hub, looks at in one go.
pub const SCAN_EVENTS: usize = 4096;

/// The watches of one peer.
pub struct Watches {
    published: Arc<Published>,
    view: View,
    cluster_id: String,
    groups: Mutex<Groups>,
    shares: Pool,
    /// The first watcher has come.
    joined: Notify,
    /// Held for one look at the kept changes, so that watchers which are behind keep at most one thread busy.
    looking: Semaphore,
    ended: CancellationToken,
}

impl Watches {
    /// None yet; all end with `stop`. [`Watches::run`] is the hub.
    pub fn new(published: Arc<Published>, view: View, cluster_id: String, stop: &CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            published,
            view,
            cluster_id,
            groups: Mutex::default(),
            shares: Pool::new(Resource::Watches, MAX_WATCHERS),
            joined: Notify::new(),
            looking: Semaphore::new(1),
            ended: stop.child_token(),
        })
    }

    /// A caller's share of all watches, for one.
    ///
    /// # Errors
    /// Overloaded.
    pub fn share(&self, caller: &Caller) -> Result<Held, Failure> {
        self.shares.take(caller, 1).map_err(|refused| {
            let what = format!(
                "peer {}: {refused} has as many watches as it may have, of {MAX_WATCHERS}; end some of them, or watch at \
                 another peer",
                self.view.id()
            );
            Failure::new(Kind::Overloaded, what)
        })
    }

    /// Watches a prefix from a revision on; from the next one if that is 0. The peer has recovered.
    ///
    /// # Errors
    /// InvalidArgument, Unavailable while stopping.
    pub fn watch(self: &Arc<Self>, prefix: &str, from: Revision, share: Held) -> Result<Watcher, Failure> {
        validate_prefix(prefix).map_err(Failure::invalid)?;
        let joined = {
            let mut groups = lock(&self.groups);
            if self.ended.is_cancelled() {
                return Err(self.stopping());
            }
            if groups.watchers() == 0 {
                groups.moved(self.published.current().state.revision());
            }
            groups.join(prefix, Instant::now())
        };
        self.joined.notify_one();
        let next = if from == 0 { self.published.current().state.revision() + 1 } else { from };
        Ok(Watcher::new(self.clone(), joined, next, share))
    }

    /// How many watchers there are.
    pub fn watchers(&self) -> usize {
        lock(&self.groups).watchers()
    }

    /// Ends every watch, and refuses new ones: the peer is stopping.
    pub fn close(&self) {
        self.ended.cancel();
        lock(&self.groups).clear();
    }

    fn stopping(&self) -> Failure {
        Failure::unavailable(format!(
            "peer {} is stopping: watch at another one, from the revision after the last progress",
            self.view.id()
        ))
    }

    fn header(&self, revision: Revision) -> v1::ResponseHeader {
        v1::ResponseHeader {
            cluster_id: self.cluster_id.clone(),
            peer_id: self.view.id(),
            term: self.view.term(),
            revision,
            membership: self.view.membership(),
        }
    }
}
