//! One watcher: its place in the changes.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use lake_proto::kv::Revision;
use lake_proto::v1::error_detail::Kind;
use rand::Rng;
use tokio::sync::SemaphorePermit;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use super::Watches;
use super::groups::{Joined, Place, Signal, What};
use super::message::{Message, look};
use super::pace::MARK_EVERY;
use crate::log::lock;
use crate::peer::failure::Failure;
use crate::peer::shares::Held;
use crate::state::changes::Compacted;

/// How long a watcher that finds another one looking waits until it tries again.
const LOOK_AGAIN_MS: RangeInclusive<u64> = 1..=20;

/// A watch. Dropping it ends it.
pub struct Watcher {
    watches: Arc<Watches>,
    prefix: Arc<str>,
    shard: u64,
    signals: Receiver<Signal>,
    /// The first revision that has yet to be told.
    next: Revision,
    /// It has to look at the kept changes.
    behind: bool,
    told_at: Option<Instant>,
    _share: Held,
}

impl Watcher {
    pub(super) fn new(watches: Arc<Watches>, joined: Joined, next: Revision, share: Held) -> Self {
        let Joined { prefix, shard, signals } = joined;
        Self { watches, prefix, shard, signals, next, behind: true, told_at: None, _share: share }
    }

    /// The next message. Its first one, once it has caught up, comes at once, even if nothing has changed.
    ///
    /// # Errors
    /// Compacted when what it has to be told is no longer kept, Unavailable when the peer stops. The watch is then over.
    pub async fn next(&mut self) -> Result<Message, Failure> {
        loop {
            if self.watches.ended.is_cancelled() {
                return Err(self.watches.stopping());
            }
            if self.behind
                && let Some(message) = self.look().await?
            {
                return Ok(message);
            }
            if self.behind {
                continue;
            }
            let signal = match self.signals.recv().await {
                Ok(signal) => signal,
                Err(RecvError::Lagged(_)) => {
                    self.behind = true;
                    continue;
                }
                Err(RecvError::Closed) => return Err(self.watches.stopping()),
            };
            match (signal.place(self.next), signal.what) {
                (Place::Skip, _) => {}
                (Place::Take, What::Message { message, first }) => match message.upgrade() {
                    Some(message) => {
                        self.next = signal.upto + 1;
                        if first.is_some() || self.may_mark() {
                            self.told_at = Some(Instant::now());
                            return Ok(Message::clone(&message));
                        }
                    }
                    None => self.behind = true,
                },
                (Place::Take | Place::Look, _) => self.behind = true,
            }
        }
    }

    /// Whether progress alone may be told now.
    fn may_mark(&self) -> bool {
        self.told_at.is_none_or(|at| at.elapsed() >= MARK_EVERY)
    }

    /// Looks at the kept changes, once. It is still behind afterwards if there is more to look at.
    async fn look(&mut self) -> Result<Option<Message>, Failure> {
        let watches = self.watches.clone();
        let found = {
            let _alone = watches.turn_to_look().await;
            let applied = self.watches.published.current();
            if applied.state.revision() + 1 < self.next {
                self.behind = false;
                return Ok(None);
            }
            look(&applied.state, &self.prefix, self.next).map(|found| (found, applied.state.revision()))
        };
        let (found, revision) = found.map_err(|compacted| self.compacted(compacted))?;
        let after = self.next - 1;
        self.next = found.upto + 1;
        self.behind = found.upto < revision;
        if found.changes.is_empty() && (self.behind || !self.may_mark()) {
            tokio::task::yield_now().await;
            return Ok(None);
        }
        self.told_at = Some(Instant::now());
        Ok(Some(Message::new(self.watches.header(revision), found.changes, after, found.upto)))
    }

    fn compacted(&self, Compacted { oldest }: Compacted) -> Failure {
        let what = format!(
            "peer {}: the changes under {:?} from revision {} on are no longer kept; the first that can be watched from is {oldest}: list again, and watch from the revision after the listing's",
            self.watches.view.id(),
            self.prefix,
            self.next
        );
        Failure { oldest_revision: oldest, ..Failure::new(Kind::Compacted, what) }
    }
}

impl Watches {
    /// Waits until no other watcher looks. Not in a queue: a connection that has no room does not poll its watchers, and one
    /// whose turn it were would hold up all others.
    async fn turn_to_look(&self) -> SemaphorePermit<'_> {
        loop {
            if let Ok(turn) = self.looking.try_acquire() {
                return turn;
            }
            let wait = rand::rng().random_range(LOOK_AGAIN_MS);
            tokio::time::sleep(Duration::from_millis(wait)).await;
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        lock(&self.watches.groups).leave(&self.prefix, self.shard);
    }
}
