//! How fast watchers are told: pure.
//!
//! Handing one message to one watcher costs this peer some 10 microseconds, most of it in HTTP/2. The pace is a budget of
//! such deliveries. Beyond it changes are gathered into fewer messages, and what grows is the watchers' delay.

use std::time::Duration;

use tokio::time::Instant;

/// Changes are handed to this many watchers a second at most.
const DELIVERIES_PER_SECOND: f64 = 20_000.0;
/// ... and to this many at once, after a pause. What a write waits for behind them is a part of a millisecond.
const BURST: f64 = 64.0;
/// A watcher is told of its progress alone no more often than this (semantics, section 7: 100 ms).
pub const MARK_EVERY: Duration = Duration::from_millis(100);
/// Beyond [`MARK_EVERY`] by this much, since a mark that comes too early for a watcher is left out.
const MARK_MARGIN: Duration = Duration::from_millis(10);
/// The longest a progress mark waits while the revision moves, whatever the number of watchers; twice that between two.
const MARK_AT_LEAST_EVERY: Duration = Duration::from_secs(10);
/// What each watcher adds to the interval: 2,000 marks a second in all.
const MARK_SHARE: Duration = Duration::from_micros(500);
/// A mark that says nothing new, but that the peer still follows, comes after this many intervals.
pub const UNCHANGED_AFTER: u32 = 10;

/// How long a watcher is told of nothing before it gets a progress mark.
pub fn mark_interval(watchers: usize) -> Duration {
    let share = MARK_SHARE.saturating_mul(u32::try_from(watchers).unwrap_or(u32::MAX));
    share.clamp(MARK_EVERY + MARK_MARGIN, MARK_AT_LEAST_EVERY)
}

/// The budget of deliveries.
#[derive(Debug)]
pub struct Budget {
    left: f64,
    at: Instant,
}

impl Budget {
    /// A full one.
    pub fn new(now: Instant) -> Self {
        Self { left: BURST, at: now }
    }

    /// Whether anything may be delivered. The last delivery may overdraw the budget.
    pub fn allows(&mut self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.at);
        self.at = now;
        self.left = (self.left + since.as_secs_f64() * DELIVERIES_PER_SECOND).min(BURST);
        self.left > 0.0
    }

    /// A message has been handed to so many.
    pub fn spend(&mut self, watchers: usize) {
        self.left -= watchers as f64;
    }

    /// How long until something may be delivered again.
    pub fn wait(&self) -> Duration {
        Duration::from_secs_f64((1.0 - self.left).max(0.0) / DELIVERIES_PER_SECOND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_all_watchers_together_are_bounded_and_none_waits_for_ever() {
        assert_eq!(mark_interval(0), Duration::from_millis(110));
        assert_eq!(mark_interval(220), Duration::from_millis(110));
        assert_eq!(mark_interval(10_000), Duration::from_secs(5));
        assert_eq!(mark_interval(usize::MAX), MARK_AT_LEAST_EVERY);
    }

    #[test]
    fn the_budget_lets_a_burst_through_and_then_the_rate() {
        let start = Instant::now();
        let mut budget = Budget::new(start);
        let mut delivered = 0;
        for millis in 0..1000 {
            let now = start + Duration::from_millis(millis);
            while budget.allows(now) {
                budget.spend(64);
                delivered += 64;
            }
            assert!(budget.wait() <= Duration::from_millis(4));
        }
        assert!((20_000..=20_192).contains(&delivered), "{delivered} in a second");
        assert!(budget.allows(start + Duration::from_secs(3600)));
        assert!(budget.left <= BURST, "an hour without work allows no more than one burst");
    }
}
