//! One watcher: its place in the changes, and how it waits.

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
use super::groups::{Joined, Signal};
use super::message::Message;
use super::position::Position;
use crate::log::lock;
use crate::peer::failure::Failure;
use crate::peer::shares::Held;
use crate::state::changes::Compacted;

/// How long a watcher that finds another one looking waits until it tries again.
const LOOK_AGAIN_MS: RangeInclusive<u64> = 1..=20;

/// A watch. Dropping it ends it.
pub struct Watcher {
    watches: Arc<Watches>,
    shard: u64,
    signals: Receiver<Signal>,
    position: Position,
    /// Where it was before the last message.
    before: Revision,
    _share: Held,
}

impl Watcher {
    pub(super) fn new(watches: Arc<Watches>, joined: Joined, next: Revision, share: Held) -> Self {
        let Joined { prefix, shard, signals } = joined;
        Self { watches, shard, signals, position: Position::new(prefix, next), before: next, _share: share }
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
            self.before = self.position.next();
            if self.position.is_behind() {
                match self.look().await? {
                    Some(message) => return Ok(message),
                    None => continue,
                }
            }
            match self.signals.recv().await {
                Ok(signal) => {
                    if let Some(message) = self.position.signalled(signal, Instant::now()) {
                        return Ok(Message::clone(&message));
                    }
                }
                Err(RecvError::Lagged(_)) => self.position.missed(),
                Err(RecvError::Closed) => return Err(self.watches.stopping()),
            }
        }
    }

    /// Goes back to before the last message, which nobody was told: the next one has its changes again.
    pub fn step_back(&mut self) {
        self.position.step_back(self.before);
    }

    /// Looks at the kept changes, once, and gives way to others if there is nothing to tell.
    async fn look(&mut self) -> Result<Option<Message>, Failure> {
        let (found, revision) = {
            let watches = self.watches.clone();
            let _alone = watches.turn_to_look().await;
            let applied = self.watches.published.current();
            (self.position.look(&applied.state, Instant::now()), applied.state.revision())
        };
        let Some(found) = found.map_err(|compacted| self.compacted(compacted))? else {
            tokio::task::yield_now().await;
            return Ok(None);
        };
        Ok(Some(Message::new(self.watches.header(revision), found.changes, found.after, found.upto)))
    }

    fn compacted(&self, Compacted { oldest }: Compacted) -> Failure {
        let what = format!(
            "peer {}: the changes under {:?} from revision {} on are no longer kept; the first that can be watched from is {oldest}: list again, and watch from the revision after the listing's",
            self.watches.view.id(),
            self.position.prefix(),
            self.position.next()
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
        lock(&self.watches.groups).leave(self.position.prefix(), self.shard);
    }
}
