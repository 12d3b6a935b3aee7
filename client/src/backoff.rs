//! How long to wait between attempts: exponential, capped, each anything from half to all of that, so that a thousand clients that lost the
//! same leader do not come back at the same moment.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::clock;

const FIRST: Duration = Duration::from_millis(10);
const CAP: Duration = Duration::from_millis(150);
/// An attempt that has less time than this is not begun: it would hardly be answered, and that no answer came in time says less than
/// what the one before it was told.
const LEAST: Duration = Duration::from_millis(20);

/// The waits of one call.
#[derive(Debug)]
pub struct Backoff {
    waits: u32,
    jitter: StdRng,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::seeded(rand::rng().random())
    }
}

impl Backoff {
    /// The same waits for the same seed.
    pub fn seeded(seed: u64) -> Self {
        Self { waits: 0, jitter: StdRng::seed_from_u64(seed) }
    }

    /// Begins again with short waits.
    #[cfg(feature = "cache")]
    pub fn reset(&mut self) {
        self.waits = 0;
    }

    /// Waits for that long. False, and at once: there would be no time left for another attempt.
    pub async fn wait(&mut self, deadline: Instant) -> bool {
        let until = clock::now() + self.next_wait();
        if until + LEAST > deadline {
            return false;
        }
        tokio::time::sleep_until(until.into()).await;
        true
    }

    /// The next wait: anything from half of the current ceiling to all of it.
    pub fn next_wait(&mut self) -> Duration {
        let ceiling = FIRST.saturating_mul(1 << self.waits.min(10)).min(CAP);
        self.waits = self.waits.saturating_add(1);
        ceiling.mul_f64(self.jitter.random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_cap_and_stay_there() {
        let mut backoff = Backoff::default();
        let waits: Vec<_> = (0..100).map(|_| backoff.next_wait()).collect();
        assert!(waits[0] >= FIRST / 2 && waits[0] <= FIRST);
        assert!(waits[20..].iter().all(|w| *w >= CAP / 2 && *w <= CAP));
    }

    #[tokio::test(start_paused = true)]
    async fn no_attempt_is_begun_that_has_no_time() {
        for seed in 0..200 {
            let (mut backoff, deadline) = (Backoff::seeded(seed), clock::now() + Duration::from_millis(500));
            let mut waits = 0;
            while backoff.wait(deadline).await {
                waits += 1;
                let left = deadline.saturating_duration_since(clock::now());
                // A sleep ends up to a millisecond later.
                assert!(left + Duration::from_millis(1) >= LEAST, "{left:?} were left");
            }
            assert!(waits > 3, "{waits}");
        }
    }

    #[test]
    fn those_who_lost_the_same_leader_do_not_come_back_together() {
        let mut clients: Vec<_> = (0..1000).map(Backoff::seeded).collect();
        for wait in 0..10 {
            let mut waits: Vec<_> = clients.iter_mut().map(Backoff::next_wait).collect();
            waits.sort();
            // In each eighth of the time in which they come there are some, and not many more than an eighth.
            let ceiling = FIRST.saturating_mul(1 << wait).min(CAP);
            for part in 0..8 {
                let (from, until) = (ceiling * (8 + part) / 16, ceiling * (9 + part) / 16);
                let there = waits.iter().filter(|wait| (from..until).contains(*wait)).count();
                assert!((60..250).contains(&there), "{there} of 1000 wait between {from:?} and {until:?}");
            }
        }
    }
}
