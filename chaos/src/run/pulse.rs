//! Whether this machine gives its processes time: one that stands still, or whose disk does, has no leader either, and shows nothing of
//! the peers.
//!
//! A task sets a timer again and again, a thread flushes a byte to the disk that the peers have. What takes [`LATE`] longer than it should
//! is time that was lost, and does not count of what peers have ([`Pulse::until`]).
//!
//! Limits: of the two that have lost more counts, since one mostly comes of the other; [`MAX_LOST`] of a wait. Processes that wait for a
//! processor while this one gets its own are not noticed.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{Error, Result, probe};

/// From one look to the next.
const EVERY: Duration = Duration::from_millis(50);
/// The shortest wait of a peer before an election.
const LATE: Duration = Duration::from_millis(200);
/// So much of a wait at most was lost.
pub(super) const MAX_LOST: Duration = Duration::from_secs(60);

/// See the module. It goes on until it is dropped.
#[derive(Debug, Default)]
pub struct Pulse {
    timer: Arc<Beat>,
    disk: Arc<Beat>,
    /// What is flushed, if the disk is looked at.
    file: Option<PathBuf>,
}

/// One of the two.
#[derive(Debug, Default)]
struct Beat(Mutex<Lost>);

#[derive(Debug, Default)]
struct Lost {
    so_far: Duration,
    /// When what is under way began.
    since: Option<Instant>,
}

impl Lost {
    fn all(&self) -> Duration {
        let took = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        let late = took.saturating_sub(EVERY);
        if late < LATE { self.so_far } else { self.so_far + late }
    }
}

impl Beat {
    fn lock(&self) -> MutexGuard<'_, Lost> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self) -> Duration {
        self.lock().all()
    }

    /// What was under way is done, and the next begins.
    fn next(&self) {
        let mut lost = self.lock();
        *lost = Lost { so_far: lost.all(), since: Some(Instant::now()) };
    }

    /// There is no next one.
    fn end(&self) {
        let mut lost = self.lock();
        *lost = Lost { so_far: lost.all(), since: None };
    }
}

impl Pulse {
    /// Looks from now on. `dir`: a directory on the disk that peers have, if that is this machine's.
    pub fn start(dir: Option<&Path>) -> Self {
        let mut pulse = Self::default();
        tokio::spawn(tick(Arc::downgrade(&pulse.timer)));
        if let Some(path) = dir.map(|dir| dir.join("pulse"))
            && let Ok(file) = File::create(&path)
        {
            pulse.file = Some(path);
            let disk = Arc::downgrade(&pulse.disk);
            std::thread::spawn(move || flush(file, &disk));
        }
        pulse
    }

    /// How long this machine has stood still since the beginning.
    pub fn lost(&self) -> Duration {
        self.timer.lost().max(self.disk.lost())
    }

    /// Asks again and again until `check` has an answer, for so long and as long besides as the machine stands still meanwhile. Gives as well
    /// how much time it has had that was not lost.
    ///
    /// # Errors
    /// As [`probe::until`].
    pub async fn until<T, F>(&self, what: &str, time: Duration, mut check: impl FnMut() -> F) -> (Result<T>, Duration)
    where
        F: Future<Output = Result<T, String>>,
    {
        let (began, before) = (Instant::now(), self.lost());
        let mut left = time;
        loop {
            let asked = probe::until(what, left, &mut check).await;
            let (took, lost) = (began.elapsed(), self.lost().saturating_sub(before));
            left = (time + lost.min(MAX_LOST)).saturating_sub(took);
            match asked {
                Err(Error::Timeout { .. }) if !left.is_zero() => {}
                asked => return (asked, took.saturating_sub(lost)),
            }
        }
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        if let Some(path) = &self.file {
            // It is a few bytes in the run's own directory.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Until nobody looks any more.
async fn tick(timer: Weak<Beat>) {
    while let Some(timer) = timer.upgrade() {
        timer.next();
        drop(timer);
        sleep(EVERY).await;
    }
}

/// The same of the disk. One that takes nothing any more shows nothing.
fn flush(mut file: File, disk: &Weak<Beat>) {
    while let Some(beat) = disk.upgrade() {
        beat.next();
        drop(beat);
        std::thread::sleep(EVERY);
        if file.write_all(b".").and_then(|()| file.sync_data()).is_err() {
            break;
        }
    }
    if let Some(beat) = disk.upgrade() {
        beat.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Beats for a minute, but for the seconds of a pause that begins in the fifth; how long is waited for what never comes, and how much of
    /// that was not lost.
    async fn waited(pause: Duration) -> (Duration, Duration) {
        let pulse = Pulse::default();
        let beating = async {
            for n in 0u32.. {
                pulse.timer.next();
                sleep(if n == 100 { pause + EVERY } else { EVERY }).await;
            }
        };
        let began = Instant::now();
        let never = || async { Err::<(), _>("nothing".to_owned()) };
        let (asked, had) = tokio::select! {
            waited = pulse.until("a leader", 12 * SECOND, never) => waited,
            () = beating => unreachable!("it goes on"),
        };
        assert!(matches!(asked, Err(Error::Timeout { .. })), "{asked:?}");
        (began.elapsed(), had)
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_machine_that_stands_still_has_lost_is_given_back() {
        let about = |time: Duration, meant: Duration| time >= meant && time < meant + SECOND;
        let (took, had) = waited(Duration::ZERO).await;
        assert!(about(took, 12 * SECOND) && about(had, 12 * SECOND), "{took:?} {had:?}");
        // As late as peers bear.
        let (took, _) = waited(LATE - EVERY).await;
        assert!(about(took, 12 * SECOND), "{took:?}");
        let (took, had) = waited(20 * SECOND).await;
        assert!(about(took, 32 * SECOND) && about(had, 12 * SECOND), "{took:?} {had:?}");
        // Not for ever: then there was too little time to say anything.
        let (took, had) = waited(1_000 * SECOND).await;
        assert!(about(took, 12 * SECOND + MAX_LOST) && had < 10 * SECOND, "{took:?} {had:?}");
    }

    #[tokio::test]
    async fn the_disk_is_looked_at_until_nobody_asks() {
        let dir = tempfile::tempdir().unwrap();
        let pulse = Pulse::start(Some(dir.path()));
        let file = dir.path().join("pulse");
        let flushed = || async {
            let there = std::fs::metadata(&file).map_err(|e| e.to_string())?.len();
            if there >= 2 && pulse.disk.lock().since.is_some() { Ok(()) } else { Err(format!("{there} bytes")) }
        };
        probe::until("two bytes to be flushed", 30 * SECOND, flushed).await.unwrap();
        let disk = Arc::downgrade(&pulse.disk);
        drop(pulse);
        let gone = || async { if disk.strong_count() == 0 { Ok(()) } else { Err("it is held".to_owned()) } };
        probe::until("the thread to end", 30 * SECOND, gone).await.unwrap();
        assert!(!file.exists());
    }
}
