//! A voter whose leader's connection broke asks for votes as soon as the leader's lease has run out.
//!
//! A process that dies closes its connections at once, and its followers see that. Raft's own timer cannot know: behind the
//! lease it waits for another, random time, so that a leader that is only slow is not unseated. Here that wait is left out.
//!
//! It changes when a question is asked, and nothing of who may be elected: what begins is a pre-vote, which writes nothing,
//! which the core itself refuses while its own lease lasts, and which every other voter refuses that has heard the leader
//! within the lease. A connection that broke between two peers that live therefore costs a few questions at the most.
//!
//! The voters that are left take turns in the order of their ids, [`TURN`] apart, so that two rarely stand at once.
//!
//! Limits: [`ROUNDS`] questions after one broken connection, then Raft's timer alone decides, as it does when a machine
//! dies or a network is cut, where nobody closes anything.

use std::time::{Duration, Instant};

use lake_client::clock;
use openraft::ServerState;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::view::View;

/// From one voter's turn to the next one's: about what an election takes on a busy machine.
pub const TURN: Duration = Duration::from_millis(80);
/// Questions that one voter asks.
pub const ROUNDS: u32 = 3;
/// Behind the lease: clocks are read at different moments.
const MARGIN: Duration = Duration::from_millis(10);
/// The log tells of questions this often at most: on a machine that is too busy connections may break all the time.
const TOLD_EVERY: Duration = Duration::from_secs(60);
/// What the leader sent before the connection broke is dealt with by then. A call that is accepted later is of one that
/// lives.
const SETTLED: Duration = Duration::from_millis(50);

/// Where broken connections are noted.
#[derive(Debug)]
pub struct Succession {
    broken: watch::Sender<Option<Broken>>,
}

#[derive(Debug, Clone, Copy)]
struct Broken {
    leader: u64,
    at: Instant,
}

/// Notes, when it is dropped, that a leader's stream of appends has ended.
#[derive(Debug)]
pub struct Tie {
    broken: watch::Sender<Option<Broken>>,
    leader: u64,
}

impl Drop for Tie {
    fn drop(&mut self) {
        self.broken.send_replace(Some(Broken { leader: self.leader, at: clock::now() }));
    }
}

impl Succession {
    /// Nothing has broken yet; and the task that asks, until it is cancelled.
    pub fn new(view: View, lease: Duration, stop: CancellationToken) -> (Self, impl Future<Output = ()>) {
        let broken = watch::Sender::new(None);
        let mut news = broken.subscribe();
        let task = async move {
            let mut told = Told::default();
            while news.changed().await.is_ok() {
                let Some(broken) = *news.borrow_and_update() else { continue };
                ask(&view, lease, broken, &mut told).await;
            }
        };
        let task = async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = task => {}
            }
        };
        (Self { broken }, task)
    }

    /// A stream of appends of this peer's begins.
    pub fn tie(&self, leader: u64) -> Tie {
        Tie { broken: self.broken.clone(), leader }
    }
}

/// What the log was told.
#[derive(Debug, Default)]
struct Told {
    at: Option<Instant>,
    /// Questions since.
    untold: u32,
}

impl Told {
    /// Another question is asked. `Some` if it is to be told: how many came before it that were not.
    fn tells(&mut self, now: Instant) -> Option<u32> {
        if self.at.is_some_and(|at| now.saturating_duration_since(at) < TOLD_EVERY) {
            self.untold = self.untold.saturating_add(1);
            return None;
        }
        self.at = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

/// Asks for votes when it is this voter's turn, unless the leader shows itself or there is another one.
async fn ask(view: &View, lease: Duration, broken: Broken, told: &mut Told) {
    let metrics = view.metrics();
    let successors: Vec<u64> = metrics.membership_config.voter_ids().filter(|id| *id != broken.leader).collect();
    let Some(place) = successors.iter().position(|id| *id == view.id()) else { return };
    let before = |turns: usize| TURN * u32::try_from(turns).unwrap_or(u32::MAX);
    for round in 0..ROUNDS {
        let turn = before(place).saturating_add(before(successors.len()).saturating_mul(round));
        let heard = loop {
            let heard = view.heard_at();
            tokio::time::sleep_until((heard + lease + MARGIN + turn).into()).await;
            if view.heard_at() == heard {
                break heard;
            }
            if view.heard_at() > broken.at + SETTLED {
                return;
            }
        };
        let now = view.metrics();
        let orphaned = now.state == ServerState::Follower
            && now.current_term == metrics.current_term
            && now.current_leader == Some(broken.leader);
        if !orphaned || heard > broken.at + SETTLED {
            return;
        }
        if let Some(before) = told.tells(clock::now()) {
            tracing::info!(
                leader = broken.leader,
                term = now.current_term,
                untold_before = before,
                "the leader's connection broke: asking for votes"
            );
        }
        if let Err(e) = view.raft().trigger().elect(true).await {
            tracing::debug!("asking for votes: {e}");
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_break_all_the_time_are_told_once_a_minute() {
        let (start, mut told) = (clock::now(), Told::default());
        let mut at = |secs: u64| told.tells(start + Duration::from_secs(secs));
        assert_eq!([at(0), at(1), at(59), at(60), at(61)], [Some(0), None, None, Some(2), None]);
    }
}
