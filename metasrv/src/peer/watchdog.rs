//! What a member looks after by the clock: a disk that hangs or is full, a core or log that has ended, snapshots by the
//! size of the log, and listings that nobody continues.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_client::clock;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::note_end;
use super::pages::Pages;
use super::snapshot_turns::SnapshotTurns;
use super::view::View;
use crate::log::{Health, Log};

/// How often it looks.
const EVERY: Duration = Duration::from_millis(100);
/// A leader whose disk takes longer than this gives the leadership up (semantics, section 8).
pub const DISK_HANGS: Duration = Duration::from_secs(2);
/// How long until it tries that again.
const GIVE_UP_AGAIN: Duration = Duration::from_secs(5);
/// At most about so many bytes of entries are kept behind a snapshot.
const PURGE_MARGIN_BYTES: u64 = 32 << 20;
/// How long until a snapshot is asked for again that was put off, for want of room.
pub(super) const SNAPSHOT_AGAIN: Duration = Duration::from_secs(10);

pub(super) struct Watchdog {
    pub view: View,
    pub log: Log,
    pub snapshot_turns: SnapshotTurns,
    pub pages: Arc<Pages>,
    pub failed: watch::Sender<Option<String>>,
}

impl Watchdog {
    pub(super) async fn run(self, stop: CancellationToken) {
        let mut gave_up = Spaced::new(GIVE_UP_AGAIN);
        let mut asked = Spaced::new(SNAPSHOT_AGAIN);
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            self.pages.expire();
            if let Some(problem) = self.ended() {
                note_end(&self.failed, problem);
                return;
            }
            // A core that waits for the disk takes no orders.
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.give_orders(&mut gave_up, &mut asked) => {}
            }
        }
    }

    async fn give_orders(&self, gave_up: &mut Spaced, asked: &mut Spaced) {
        let hangs = self.log.busy_for() > DISK_HANGS;
        if hangs {
            if gave_up.may(clock::now()) && self.give_up_leadership().await {
                gave_up.done(clock::now());
            }
            // The rest would pile up before a core that cannot do it.
            return;
        }
        self.purge_what_is_large().await;
        if !self.snapshot_turns.is_due() {
            asked.forget();
        } else if asked.may(clock::now()) {
            asked.done(clock::now());
            self.snapshot_turns.want().await;
        }
    }

    /// openraft keeps a number of entries behind a snapshot for followers that are a little late; where they are large, fewer.
    async fn purge_what_is_large(&self) {
        let Some(snapshot) = self.view.metrics().snapshot else { return };
        let Some(upto) = self.log.with_bytes_before(snapshot.index, PURGE_MARGIN_BYTES) else { return };
        if self.log.bounds().0.is_none_or(|purged| purged.index < upto)
            && let Err(e) = self.view.raft().trigger().purge_log(upto).await
        {
            tracing::debug!("purging the log: {e}");
        }
    }

    /// What ended the peer for good.
    fn ended(&self) -> Option<String> {
        if let Health::Failed(what) = &*self.log.health().borrow() {
            return Some(what.clone());
        }
        self.view.metrics().running_state.err().map(|e| format!("the consensus core ended: {e}"))
    }

    async fn give_up_leadership(&self) -> bool {
        if self.view.leader_id() != Some(self.view.id()) {
            return false;
        }
        let Some(&successor) = self.view.successors().first() else { return false };
        tracing::error!(
            successor,
            millis = self.log.busy_for().as_millis() as u64,
            "the disk does not answer or is full: giving the leadership up"
        );
        if let Err(e) = self.view.raft().trigger().transfer_leader(successor).await {
            tracing::warn!("giving the leadership up: {e}");
        }
        true
    }
}

/// Something that is done again only after a while.
struct Spaced {
    least: Duration,
    last: Option<Instant>,
}

impl Spaced {
    fn new(least: Duration) -> Self {
        Self { least, last: None }
    }

    fn may(&self, now: Instant) -> bool {
        self.last.is_none_or(|last| now.saturating_duration_since(last) >= self.least)
    }

    fn done(&mut self, now: Instant) {
        self.last = Some(now);
    }

    /// What made it necessary is over: the next time is a first one.
    fn forget(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_off_is_not_asked_for_at_every_look() {
        let start = clock::now();
        let mut asked = Spaced::new(SNAPSHOT_AGAIN);
        let mut times = 0;
        for look in 0..300 {
            let now = start + EVERY * look;
            if asked.may(now) {
                asked.done(now);
                times += 1;
            }
        }
        assert_eq!(times, 3, "in half a minute");
        asked.forget();
        assert!(asked.may(start));
    }
}
