//! A watcher's place in the changes, and what it does with what it hears: pure.

use std::sync::Arc;

use lake_proto::kv::Revision;
use lake_proto::v1;
use tokio::time::Instant;

use super::groups::{Place, Signal, What};
use super::message::{Message, look};
use super::pace::MARK_EVERY;
use crate::state::State;
use crate::state::changes::Compacted;

/// Where a watcher is.
#[derive(Debug)]
pub struct Position {
    prefix: Arc<str>,
    /// The first revision that has yet to be told.
    next: Revision,
    /// It has to look at the kept changes.
    behind: bool,
    told_at: Option<Instant>,
}

/// What a look at the kept changes is to tell.
#[derive(Debug, PartialEq)]
pub struct Found {
    pub changes: Vec<v1::Change>,
    /// Every change under the prefix after this revision ...
    pub after: Revision,
    /// ... up to this one is in it.
    pub upto: Revision,
}

impl Position {
    /// Before the revision `next`, of which it knows nothing yet.
    pub fn new(prefix: Arc<str>, next: Revision) -> Self {
        Self { prefix, next, behind: true, told_at: None }
    }

    /// What is watched.
    pub fn prefix(&self) -> &Arc<str> {
        &self.prefix
    }

    /// The first revision that has yet to be told.
    pub fn next(&self) -> Revision {
        self.next
    }

    /// Whether it has to look at the kept changes before it waits for a signal.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// Signals came that it has not heard.
    pub fn missed(&mut self) {
        self.behind = true;
    }

    /// What was to be told from the revision `next` on has not been.
    pub fn step_back(&mut self, next: Revision) {
        self.next = next;
        self.behind = true;
    }

    /// What is to be told of a signal; perhaps it is behind afterwards.
    pub fn signalled(&mut self, signal: Signal, now: Instant) -> Option<Arc<Message>> {
        match (signal.place(self.next), signal.what) {
            (Place::Skip, _) => None,
            (Place::Take, What::Message { message, first }) => {
                let Some(message) = message.upgrade() else {
                    self.behind = true;
                    return None;
                };
                self.next = signal.upto + 1;
                let told = first.is_some() || self.may_mark(now);
                told.then(|| {
                    self.told_at = Some(now);
                    message
                })
            }
            (Place::Take | Place::Look, _) => {
                self.behind = true;
                None
            }
        }
    }

    /// Looks at the kept changes, once. It is still behind afterwards if there is more to look at.
    ///
    /// # Errors
    /// When what comes next is no longer kept.
    pub fn look(&mut self, state: &State, now: Instant) -> Result<Option<Found>, Compacted> {
        let revision = state.revision();
        if revision + 1 < self.next {
            self.behind = false;
            return Ok(None);
        }
        let found = look(state, &self.prefix, self.next)?;
        let after = self.next - 1;
        self.next = found.upto + 1;
        self.behind = found.upto < revision;
        if found.changes.is_empty() && (self.behind || !self.may_mark(now)) {
            return Ok(None);
        }
        self.told_at = Some(now);
        Ok(Some(Found { changes: found.changes, after, upto: found.upto }))
    }

    /// Whether progress alone may be told now.
    fn may_mark(&self, now: Instant) -> bool {
        self.told_at.is_none_or(|at| now.saturating_duration_since(at) >= MARK_EVERY)
    }
}
