//! The task that follows what is applied and wakes the watchers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use lake_proto::kv::Revision;
use tokio::time::Instant;

use super::groups::Due;
use super::message::Message;
use super::pace::{Budget, mark_interval};
use super::{MAX_PREPARED_BYTES, SCAN_EVENTS, Watches};
use crate::log::lock;
use crate::raft::state_machine::Applied;
use crate::state::State;
use crate::state::changes::{Change, Compacted};

/// How often the round of marks goes on.
const TICK: Duration = Duration::from_millis(20);

/// Messages that are kept for the watchers which have been told of them.
#[derive(Default)]
struct Prepared {
    messages: VecDeque<Arc<Message>>,
    bytes: usize,
}

impl Prepared {
    fn keep(&mut self, message: Arc<Message>) {
        if self.messages.back().is_some_and(|last| Arc::ptr_eq(last, &message)) {
            return;
        }
        self.bytes += cost(&message);
        self.messages.push_back(message);
        while self.bytes > MAX_PREPARED_BYTES && self.messages.len() > 1 {
            let Some(oldest) = self.messages.pop_front() else { break };
            self.bytes -= cost(&oldest);
        }
    }
}

fn cost(message: &Message) -> usize {
    message.framed.len() + size_of::<Message>()
}

/// How far the round of marks has come.
struct Round {
    at: Instant,
    /// Shards whose turn has come, in parts.
    owed: f64,
}

impl Watches {
    /// Runs until the peer stops.
    pub async fn run(self: Arc<Self>) {
        let mut applied = self.published.subscribe();
        while !self.ended.is_cancelled() {
            tokio::select! {
                () = self.ended.cancelled() => break,
                () = self.joined.notified() => {}
            }
            let now = Instant::now();
            let mut prepared = Prepared::default();
            let mut budget = Budget::new(now);
            let mut round = Round { at: now, owed: 0.0 };
            while self.watchers() > 0 {
                let now = applied.borrow_and_update().clone();
                self.put_down(&now).await;
                drop(now);
                self.tell(&mut budget, &mut prepared).await;
                self.mark(&mut round, &mut prepared).await;
                let pause = if lock(&self.groups).waiting() { budget.wait().min(TICK) } else { TICK };
                tokio::select! {
                    () = self.ended.cancelled() => break,
                    changed = applied.changed() => if changed.is_err() { break },
                    () = tokio::time::sleep(pause) => {}
                }
            }
        }
        self.close();
    }

    /// Puts down what has changed, a bounded part at a time.
    async fn put_down(&self, applied: &Applied) {
        let revision = applied.state.revision();
        loop {
            let position = lock(&self.groups).position();
            if position >= revision {
                return;
            }
            let Ok((part, more)) = part(&applied.state, position + 1) else {
                return lock(&self.groups).jumped(revision);
            };
            {
                let mut groups = lock(&self.groups);
                for change in &part {
                    groups.put_down(change);
                }
                if !more {
                    return groups.moved(revision);
                }
            }
            tokio::task::yield_now().await;
        }
    }

    /// Tells the shards whose turn it is, as far as the budget goes.
    async fn tell(&self, budget: &mut Budget, prepared: &mut Prepared) {
        while budget.allows(Instant::now()) {
            let due = lock(&self.groups).next_due(Instant::now(), |revision| self.header(revision));
            let Some(due) = due else { return };
            budget.spend(due.watchers);
            send(due, prepared).await;
        }
    }

    /// Goes on with the round of marks, so that it takes one interval.
    async fn mark(&self, round: &mut Round, prepared: &mut Prepared) {
        let now = Instant::now();
        let (shards, interval) = {
            let groups = lock(&self.groups);
            (groups.in_round(), mark_interval(groups.watchers()))
        };
        let part = now.saturating_duration_since(round.at).as_secs_f64() / interval.as_secs_f64();
        round.at = now;
        round.owed = (round.owed + part * shards as f64).min(shards as f64);
        while round.owed >= 1.0 {
            round.owed -= 1.0;
            let due = lock(&self.groups).next_mark(Instant::now(), interval, |revision| self.header(revision));
            if let Some(due) = due {
                send(due, prepared).await;
            }
        }
    }
}

/// Some changes from a revision on, and whether there are more.
fn part(state: &State, from: Revision) -> Result<(Vec<Change>, bool), Compacted> {
    let (mut part, mut events) = (vec![], 0);
    for change in state.changes().from(from)? {
        if events >= SCAN_EVENTS {
            return Ok((part, true));
        }
        events += change.events().len();
        part.push(change.clone());
    }
    Ok((part, false))
}

/// Wakes a shard, and lets those run that it woke.
async fn send(due: Due, prepared: &mut Prepared) {
    if let Some(message) = due.message {
        prepared.keep(message);
    }
    // All may have left in the meantime.
    let _ = due.to.send(due.signal);
    tokio::task::yield_now().await;
}
