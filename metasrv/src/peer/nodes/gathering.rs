//! Renewals that come about the same time wait for each other, and are confirmed by a quorum in one round: the round is most of what a
//! heartbeat costs, and a thousand nodes send one every 3 ms.
//!
//! Invariant: the round of a renewal begins after that has come.
//!
//! Limits: one round a window, which is a part of the interval. It ends with the last who waits for it.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use lake_client::clock;

use crate::log::lock;
use crate::peer::failure::Failure;

/// Heartbeats wait for each other for at most this part of the interval.
const GATHER: u32 = 15;

type Round = BoxFuture<'static, Result<u64, Failure>>;

/// The renewals that wait.
#[derive(Debug)]
pub struct Gathering {
    began: Instant,
    window: Duration,
    /// The end of the latest window, and its round.
    latest: Mutex<Option<(Instant, WeakShared<Round>)>>,
}

impl Gathering {
    /// Nobody waits yet; nodes send heartbeats at this interval.
    pub fn new(interval: Duration) -> Self {
        let window = (interval / GATHER).max(Duration::from_nanos(1));
        Self { began: clock::now(), window, latest: Mutex::default() }
    }

    /// Waits for the end of the window, and then for what `confirm` comes to: of all who wait in the same window one is asked for it.
    ///
    /// # Errors
    /// Those of the round.
    pub async fn confirmed<F>(&self, confirm: impl FnOnce() -> F) -> Result<u64, Failure>
    where
        F: Future<Output = Result<u64, Failure>> + Send + 'static,
    {
        self.round(self.gathered(clock::now()), confirm).await
    }

    /// The round after a window that has this end.
    fn round<F>(&self, end: Instant, confirm: impl FnOnce() -> F) -> Shared<Round>
    where
        F: Future<Output = Result<u64, Failure>> + Send + 'static,
    {
        let mut latest = lock(&self.latest);
        let known = latest.as_ref().filter(|(of, _)| *of == end).and_then(|(_, round)| round.upgrade());
        known.unwrap_or_else(|| {
            let confirming = confirm();
            let round = async move {
                tokio::time::sleep_until(end.into()).await;
                confirming.await
            };
            let round = round.boxed().shared();
            *latest = round.downgrade().map(|round| (end, round));
            round
        })
    }

    /// When the renewals that come now are confirmed.
    fn gathered(&self, now: Instant) -> Instant {
        let window = self.window.as_nanos();
        let passed = now.saturating_duration_since(self.began).as_nanos();
        let left = window - passed % window;
        now + Duration::from_nanos(u64::try_from(left).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(3);

    #[test]
    fn heartbeats_that_come_together_are_gathered() {
        let gathering = Gathering::new(INTERVAL);
        let at = |us| gathering.began + Duration::from_micros(us);
        let window = Duration::from_millis(200);
        for (arrived, confirmed) in [(0, 200), (1, 200), (199_999, 200), (200_000, 400), (599_999, 600)] {
            assert_eq!(gathering.gathered(at(arrived)), at(confirmed * 1000), "{arrived}");
        }
        for arrived in (0..1_000_000).step_by(777).map(at) {
            let waits = gathering.gathered(arrived) - arrived;
            assert!(!waits.is_zero() && waits <= window, "{waits:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn those_of_a_window_are_confirmed_in_one_round_that_begins_after_it() {
        let (gathering, rounds) = (Arc::new(Gathering::new(INTERVAL)), Arc::new(AtomicU64::new(0)));
        let renew = || {
            let (gathering, rounds) = (gathering.clone(), rounds.clone());
            async move {
                let came = clock::now();
                let confirm = || async move {
                    assert!(clock::now() > came, "it has begun before");
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    Ok(rounds.fetch_add(1, Ordering::SeqCst))
                };
                gathering.confirmed(confirm).await.unwrap()
            }
        };
        for round in 0..3 {
            let renewals = (0..20).map(|n| {
                let renew = renew();
                async move {
                    tokio::time::sleep(Duration::from_millis(n)).await;
                    renew.await
                }
            });
            let renewals: Vec<_> = renewals.map(tokio::spawn).collect();
            for renewal in renewals {
                assert_eq!(renewal.await.unwrap(), round);
            }
        }
        // Those who have the round begin may go: it is the others' still. With the last of them it ends.
        let mut first = tokio::spawn(renew());
        let given_up = tokio::time::timeout(Duration::from_millis(50), &mut first).await;
        assert!(given_up.is_err());
        let second = tokio::spawn(renew());
        tokio::task::yield_now().await;
        first.abort();
        assert_eq!(second.await.unwrap(), 3);
        tokio::time::timeout(Duration::from_millis(50), renew()).await.unwrap_err();
        assert_eq!(renew().await, 4, "the one before was not made");
    }
}
