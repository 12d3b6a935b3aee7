//! Which peer of the cluster writes its snapshot now: one after the other, as far as they can agree on it.
//!
//! All peers apply the same log, so their snapshots come to be due at the same moment. Written by all at once, they hold up
//! every write; written one after the other, a quorum of the peers has its disk and its processor for the log.
//!
//! ```text
//!   not due --- the log is long ---> waits --- the leader says that it may, or it cannot wait ---> writes
//!      ^                              |  ^                                                          |
//!      |                              +--+ another one's turn, or no answer: asks after ASK_AGAIN   |
//!      +----------------------------------- it has written: it says so to the leader --------------+
//! ```
//!
//! - [`Turns`]: whom this peer, as the leader, has let write: a pure value;
//! - [`SnapshotTurns`]: the task that waits, asks, has the core write, and gives the turn back.
//!
//! Invariants:
//! - of those that ask the leader lets one write, until that one says that it has written, has not been heard for [`LAPSE`], or
//!   has had [`LONGEST`]: one that died, or whose disk hangs, keeps nobody for longer;
//! - nobody waits once the log behind its last snapshot is [`TOO_LONG`] times as long as makes one due, nor for longer than
//!   [`PATIENCE`]: then it writes without a turn;
//! - a state of less than [`SMALL_BYTES`] is written without one, too: it takes no longer than asking is worth.
//!
//! Nothing here is needed for safety. What a leader has granted ends with it, so two peers may write at once after a change of
//! the leader. Failure cases: no leader, or one that does not answer: as another one's turn; one of an older build, which does
//! not know the question: all write when they want to.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_proto::v1;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::failure::Failure;
use super::view::View;
use super::watchdog::SNAPSHOT_AGAIN;
use crate::config::StorageConfig;
use crate::log::lock;
use crate::raft::network::Network;
use crate::raft::state_machine::{Published, SinceSnapshot};
use crate::raft::types::Member;

/// Snapshots write at most so many times the bytes of the log.
const MOST_WRITTEN_AGAIN: u64 = 4;
/// States that take less when they are written need no turn.
pub const SMALL_BYTES: u64 = 16 << 20;
/// A log so many times as long as makes a snapshot due waits for no turn.
const TOO_LONG: u64 = 2;
/// The longest wait for a turn.
const PATIENCE: Duration = Duration::from_secs(300);
/// A turn of which nothing was heard for so long is over.
pub const LAPSE: Duration = Duration::from_secs(5);
/// A turn that has lasted for so long is over for the others.
const LONGEST: Duration = Duration::from_secs(600);
/// How often a peer that waits asks again, and one that writes says so.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// How long the leader may take to answer.
const ANSWER: Duration = Duration::from_millis(500);
/// How often a peer that writes looks whether it has.
const LOOK: Duration = Duration::from_millis(100);

/// A snapshot writes the whole state, and reading it back is cheaper than applying the entries that led to it: one is due
/// when the log behind the last one is long, by either measure, unless that is little beside what would be written.
pub fn is_due(storage: &StorageConfig, since: SinceSnapshot) -> bool {
    let is_long = since.entries >= storage.snapshot_entries || since.bytes >= storage.snapshot_bytes;
    is_long && since.bytes >= since.covered_bytes / MOST_WRITTEN_AGAIN
}

fn cannot_wait(storage: &StorageConfig, since: SinceSnapshot) -> bool {
    let part = SinceSnapshot { entries: since.entries / TOO_LONG, bytes: since.bytes / TOO_LONG, ..since };
    is_due(storage, part)
}

/// Whom a leader has let write.
#[derive(Debug, Default)]
pub struct Turns {
    holder: Option<Holder>,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    peer: u64,
    since: Instant,
    heard: Instant,
}

impl Turns {
    /// A peer asks whether it may write, or says that it still does.
    pub fn ask(&mut self, peer: u64, now: Instant) -> bool {
        let lasts = |holder: Holder| now.saturating_duration_since(holder.heard) < LAPSE;
        match self.holder {
            Some(holder) if holder.peer == peer && lasts(holder) => {
                self.holder = Some(Holder { heard: now, ..holder });
            }
            Some(holder) if lasts(holder) && now.saturating_duration_since(holder.since) < LONGEST => return false,
            _ => self.holder = Some(Holder { peer, since: now, heard: now }),
        }
        true
    }

    /// A peer has written, or does not want to any more.
    pub fn over(&mut self, peer: u64) {
        self.holder = self.holder.filter(|holder| holder.peer != peer);
    }
}

/// A member's part in it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SnapshotTurns {
    view: View,
    network: Network,
    published: Arc<Published>,
    storage: StorageConfig,
    given: Arc<Mutex<Turns>>,
    wanted: Arc<Notify>,
}

impl SnapshotTurns {
    /// Nobody writes.
    pub fn new(view: View, network: Network, published: Arc<Published>, storage: StorageConfig) -> Self {
        Self { view, network, published, storage, given: Arc::default(), wanted: Arc::default() }
    }

    // ---- the leader's side ------------------------------------------------------------------------------------

    /// A peer asks for the turn, or says that its own is over. Says whether it may write.
    ///
    /// # Errors
    /// NotLeader with a hint.
    pub fn asked(&self, peer: u64, over: bool) -> Result<bool, Failure> {
        if self.view.leader_id() != Some(self.view.id()) {
            return Err(self.view.not_leader());
        }
        let mut given = lock(&self.given);
        if over {
            given.over(peer);
            return Ok(false);
        }
        Ok(given.ask(peer, clock::now()))
    }

    // ---- the peer's side --------------------------------------------------------------------------------------

    /// Whether the log is so long that a snapshot should be written.
    pub fn is_due(&self) -> bool {
        is_due(&self.storage, self.published.since_snapshot())
    }

    /// One is due: it is written, now or in turn.
    pub(super) async fn want(&self) {
        if self.published.current().state.written_bytes() < SMALL_BYTES {
            self.write().await;
        } else {
            self.wanted.notify_one();
        }
    }

    /// Waits for turns, and has snapshots written in them, until it is cancelled.
    pub(super) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled(self.whenever_wanted()).await;
    }

    async fn whenever_wanted(&self) {
        loop {
            self.wanted.notified().await;
            let Some(in_turn) = self.turn().await else { continue };
            let begun = self.published.snapshots_begun();
            self.write().await;
            self.written(begun, in_turn).await;
            if in_turn {
                self.ask(true).await;
            }
        }
    }

    /// Waits until this peer may write, or must: whether it has the turn. `None`: none is due any more.
    async fn turn(&self) -> Option<bool> {
        let patience = clock::now() + PATIENCE;
        let mut told = false;
        while self.is_due() {
            if self.ask(false).await {
                return Some(true);
            }
            if cannot_wait(&self.storage, self.published.since_snapshot()) || clock::now() >= patience {
                tracing::info!("writing a snapshot out of turn: it cannot wait any longer");
                return Some(false);
            }
            if !told {
                told = true;
                tracing::debug!("a snapshot is due, and waits until no other peer writes one");
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
        None
    }

    async fn write(&self) {
        if let Err(e) = self.view.raft().trigger().snapshot().await {
            tracing::warn!("asking for a snapshot: {e}");
        }
    }

    /// Waits until what was asked for after so many snapshots is written, or was put off.
    async fn written(&self, begun: u64, in_turn: bool) {
        let put_off = clock::now() + SNAPSHOT_AGAIN;
        let mut told = clock::now();
        while self.published.writes_snapshot() || self.published.snapshots_begun() == begun && clock::now() < put_off {
            tokio::time::sleep(LOOK).await;
            if in_turn && clock::since(told) >= ASK_AGAIN {
                told = clock::now();
                // What it answers changes nothing: it is being written.
                self.ask(false).await;
            }
        }
    }

    /// Asks the leader for the turn, or gives it back. Whether this peer may write.
    async fn ask(&self, over: bool) -> bool {
        let Some(leader) = self.view.leader_id() else { return false };
        if leader == self.view.id() {
            return self.asked(leader, over).unwrap_or(false);
        }
        let Some(member) = self.view.member(leader) else { return false };
        let Ok(mut client) = self.network.transport.client(leader, &member.raft_address) else { return false };
        let header = self.network.sender.header(leader, &Member::from(member));
        let request = v1::SnapshotTurnRequest { header: Some(header), over };
        match tokio::time::timeout(ANSWER, client.snapshot_turn(request)).await {
            Ok(Ok(answer)) => answer.into_inner().granted,
            Ok(Err(status)) => status.code() == Code::Unimplemented,
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage() -> StorageConfig {
        StorageConfig { snapshot_entries: 100, snapshot_bytes: 1000, ..StorageConfig::default() }
    }

    #[test]
    fn a_snapshot_is_taken_when_the_log_is_long_beside_the_state() {
        let due = |entries, bytes, covered_bytes| is_due(&storage(), SinceSnapshot { entries, bytes, covered_bytes });
        assert!(due(100, 10, 0) && due(1, 1000, 0), "by either measure");
        assert!(!due(99, 999, 0));
        assert!(due(100, 500, 2000) && !due(100, 499, 2000), "not for a small part of the state");
        assert!(due(1, 2500, 10_000) && !due(1, 2499, 10_000));
    }

    #[test]
    fn a_log_that_is_much_too_long_does_not_wait() {
        let waits =
            |entries, bytes, covered_bytes| !cannot_wait(&storage(), SinceSnapshot { entries, bytes, covered_bytes });
        assert!(waits(199, 1999, 0) && !waits(200, 10, 0) && !waits(1, 2000, 0));
        assert!(waits(1, 4999, 10_000) && !waits(1, 5000, 10_000));
    }

    #[test]
    fn one_peer_has_the_turn_until_it_is_over() {
        let (mut turns, now) = (Turns::default(), clock::now());
        assert!(turns.ask(1, now));
        assert!(!turns.ask(2, now) && !turns.ask(3, now));
        turns.over(2);
        assert!(!turns.ask(3, now), "that was not its turn");
        turns.over(1);
        assert!(turns.ask(3, now) && !turns.ask(1, now));
    }

    #[test]
    fn one_that_died_or_does_not_come_to_an_end_keeps_nobody_for_ever() {
        let (mut turns, begin) = (Turns::default(), clock::now());
        assert!(turns.ask(1, begin));
        let mut now = begin;
        while now < begin + LONGEST - ASK_AGAIN {
            now += ASK_AGAIN;
            assert!(turns.ask(1, now), "it writes still");
            assert!(!turns.ask(2, now), "at {:?}", now - begin);
        }
        now += ASK_AGAIN;
        assert!(turns.ask(1, now), "nobody else wants to");
        assert!(turns.ask(2, now), "long enough");
        assert!(!turns.ask(1, now));
        assert!(!turns.ask(3, now + LAPSE - Duration::from_millis(1)));
        assert!(turns.ask(3, now + LAPSE), "it died");
        // A turn that lapsed begins anew, also for the same peer.
        let later = now + LONGEST * 2;
        assert!(turns.ask(3, later) && !turns.ask(2, later));
    }
}
