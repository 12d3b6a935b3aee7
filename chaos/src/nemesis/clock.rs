//! Wall clocks that jump and drift: one peer's, or those that were asked for, each in its own way. Needs libfaketime: it is loaded into every peer, and reads its
//! clock's deviation from a file. What the clock then shows is asked of the peer itself. The monotonic clock stays true, as
//! it does on a machine whose time is set.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use lake_client::clock;
use lake_proto::v1::StatusResponse;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, PROOF_WITHIN};
use super::kind::Target;
use super::{Done, Nemesis};
use crate::{IoContext, Result, probe};

/// Where distributions put it.
const PLACES: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib64/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
    "/usr/local/lib/faketime/libfaketimeMT.so.1",
];
/// The pace is told, too: the library keeps the one before otherwise.
const RIGHT: &str = "+0 x1.0";
const MISSING: &str = "libfaketime is not installed (the package is usually called faketime or libfaketime)";

/// By how much a clock jumps, either way.
const LEAST_JUMP_S: i64 = 60;
const MOST_JUMP_S: i64 = 86_400;
/// A clock that is seen to have moved by this has jumped.
pub(crate) const MOVED_MS: i64 = 10_000;
/// What is left of a deviation once a clock is right.
pub(crate) const RIGHT_MS: i64 = 1_000;

/// The library, if this machine has it.
pub fn library() -> Option<PathBuf> {
    PLACES.iter().map(PathBuf::from).find(|path| path.exists())
}

/// The environment of peers whose clocks can be faked, and are right at first: `{id}` stands for a peer's id.
///
/// # Errors
/// The files of the clocks cannot be made.
pub fn environment(library: &Path, dir: &Path, peers: &[u64]) -> Result<Vec<(OsString, OsString)>> {
    let doing = || format!("making {} for the peers' clocks", dir.display());
    std::fs::create_dir_all(dir).doing(doing)?;
    peers.iter().try_for_each(|id| std::fs::write(file(dir, *id), RIGHT)).doing(doing)?;
    let file = dir.join("{id}");
    let set = |name: &str, value: &str| (name.into(), value.into());
    Ok(vec![
        ("LD_PRELOAD".into(), library.as_os_str().to_owned()),
        ("FAKETIME_TIMESTAMP_FILE".into(), file.into_os_string()),
        set("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        set("DONT_FAKE_MONOTONIC", "1"),
        set("FAKETIME_NO_CACHE", "1"),
        set("FAKETIME_DONT_RESET", "1"),
    ])
}

/// Removes what the library has shared with itself in a process that has ended: it does so itself, unless it is killed.
pub(crate) fn clear_up(pid: u32) {
    for of_process in ["faketime_shm_", "sem.faketime_sem_"] {
        // Most processes have none, and one that stays takes a page.
        let _ = std::fs::remove_file(Path::new("/dev/shm").join(format!("{of_process}{pid}")));
    }
}

/// What peer `id` reads its clock's deviation from.
pub fn file(dir: &Path, id: u64) -> PathBuf {
    dir.join(id.to_string())
}

/// How far a peer's clock is ahead of this process's, in milliseconds: something between these two, for the answer took its
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ahead {
    least_ms: i64,
    most_ms: i64,
}

impl Ahead {
    /// A clock that showed `shown_ms` at some time between these two, all since 1970.
    fn between(shown_ms: u64, asked_ms: u64, answered_ms: u64) -> Self {
        let less = |ms: u64| shown_ms.cast_signed().saturating_sub(ms.cast_signed());
        Self { least_ms: less(answered_ms), most_ms: less(asked_ms) }
    }

    /// How far it has moved since.
    pub(crate) fn since(self, before: Ahead) -> Ahead {
        Ahead {
            least_ms: self.least_ms.saturating_sub(before.most_ms),
            most_ms: self.most_ms.saturating_sub(before.least_ms),
        }
    }

    /// Certainly more than so many milliseconds, to the side of the sign.
    pub(crate) fn is_beyond(self, ms: i64) -> bool {
        if ms >= 0 { self.least_ms > ms } else { self.most_ms < ms }
    }
}

impl fmt::Display for Ahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:+.3} to {:+.3} s ahead", self.least_ms as f64 / 1e3, self.most_ms as f64 / 1e3)
    }
}

/// What a peer itself says, that is asked by `status`.
pub(crate) async fn shown(status: impl Future<Output = Option<StatusResponse>>) -> Result<Ahead, String> {
    let now_ms = || u64::try_from(clock::wall().as_millis()).unwrap_or(u64::MAX);
    let asked_ms = now_ms();
    let status = status.await.ok_or_else(|| "it does not answer".to_owned())?;
    Ok(Ahead::between(status.unix_ms, asked_ms, now_ms()))
}

/// Waits until a look at its clock is as it should be.
async fn seen(field: &Field, id: u64, what: &str, is_so: impl Fn(Ahead) -> bool) -> Result<Ahead> {
    let what = format!("the clock of peer {id} {what}");
    probe::until(&what, PROOF_WITHIN, || async {
        match shown(field.status(id)).await? {
            ahead if is_so(ahead) => Ok(ahead),
            ahead => Err(format!("it is {ahead}")),
        }
    })
    .await
}

/// What a clock is told.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Wrong {
    seconds: i64,
    /// How many of its seconds pass in one.
    pace: f64,
}

impl Wrong {
    fn draw(rng: &mut StdRng) -> Self {
        let seconds = rng.random_range(LEAST_JUMP_S..=MOST_JUMP_S) * if rng.random_bool(0.5) { 1 } else { -1 };
        let pace = match rng.random_range(0..4) {
            0 => rng.random_range(0.5..0.8),
            1 => rng.random_range(1.25..3.0),
            _ => 1.0,
        };
        Self { seconds, pace }
    }

    /// Looks until the peer's clock has done so, and says what was seen. It showed `before`.
    async fn shows(self, field: &Field, id: u64, before: Ahead) -> Result<String> {
        // How long the process has been running may count as well where the pace is another.
        let far = MOVED_MS * self.seconds.signum();
        let far_away = |ahead: Ahead| ahead.since(before).is_beyond(far) || ahead.since(before).is_beyond(-far);
        let jumped = seen(field, id, "to jump", far_away).await?;
        if self.pace == 1.0 {
            return Ok(format!("its clock is {jumped}"));
        }
        let further = if self.pace > 1.0 { 0 } else { -1 };
        let now = seen(field, id, "to go at another pace", |ahead| ahead.since(jumped).is_beyond(further)).await?;
        Ok(format!("its clock was {jumped}, and then {now}"))
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:+} x{:.2}", self.seconds, self.pace)
    }
}

/// Clocks jump, and may go too fast or too slow from there.
pub struct Jump {
    target: Option<Target>,
    wrong: Vec<u64>,
}

impl Jump {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, wrong: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Jump {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let Some(dir) = &field.clocks else { return Done::skipped("nobody", MISSING) };
        let ids = match field.pick(self.target.unwrap_or(Target::One), rng).await {
            Ok(ids) => ids,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for id in ids {
            let wrong = Wrong::draw(rng);
            // Whatever comes of it, it is set right in the end.
            self.wrong.push(id);
            let jumped = make_wrong(field, dir, id, wrong).await;
            came.push((id, jumped.map(|proof| format!("{wrong}: {proof}")).map_err(|e| e.to_string())));
        }
        Done::of_each(&came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let wrong = std::mem::take(&mut self.wrong);
        let dir = match &field.clocks {
            Some(dir) if !wrong.is_empty() => dir,
            _ => return Done::skipped("nobody", "no clock was wrong"),
        };
        let mut came = Vec::new();
        for id in wrong {
            came.push((id, set_right(field, dir, id).await.map_err(|e| e.to_string())));
        }
        Done::of_each(&came)
    }
}

/// Makes a clock wrong, and says what the peer then says of it.
async fn make_wrong(field: &Field, dir: &Path, id: u64, wrong: Wrong) -> Result<String> {
    let before = seen(field, id, "to be told", |_| true).await?;
    let path = file(dir, id);
    std::fs::write(&path, wrong.to_string()).doing(|| format!("writing {}", path.display()))?;
    wrong.shows(field, id, before).await
}

/// Sets a clock right, and says what the peer then says of it.
async fn set_right(field: &Field, dir: &Path, id: u64) -> Result<String> {
    std::fs::write(file(dir, id), RIGHT).doing(|| "setting a clock right".to_owned())?;
    let is_right = |ahead: Ahead| !ahead.is_beyond(RIGHT_MS) && !ahead.is_beyond(-RIGHT_MS);
    let ahead = seen(field, id, "to be right", is_right).await?;
    Ok(format!("its clock is {ahead}"))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn a_clock_has_moved_only_as_far_as_the_time_of_the_answer_lets_one_know() {
        let before = Ahead::between(1_000_000, 999_990, 1_000_020);
        assert_eq!(before, Ahead { least_ms: -20, most_ms: 10 });
        // Put ahead by ten seconds, and asked a second later.
        let after = Ahead::between(1_011_000, 1_000_950, 1_001_040).since(before);
        assert_eq!(after, Ahead { least_ms: 9_950, most_ms: 10_070 });
        assert!(after.is_beyond(9_000) && !after.is_beyond(10_000) && !after.is_beyond(-1));
        let back = Ahead::between(500_000, 1_000_950, 1_001_040).since(before);
        assert!(back.is_beyond(-400_000) && !back.is_beyond(0) && !back.is_beyond(-600_000));
        let still = Ahead::between(1_001_000, 1_000_950, 1_001_040).since(before);
        assert!(!still.is_beyond(0) && !still.is_beyond(-1), "an answer that took long shows nothing");
    }

    #[test]
    fn a_clock_that_is_wrong_is_wrong_by_more_than_a_look_can_be() {
        let mut rng = StdRng::seed_from_u64(1);
        let drawn: Vec<Wrong> = (0..200).map(|_| Wrong::draw(&mut rng)).collect();
        assert!(drawn.iter().all(|wrong| wrong.seconds.abs() * 1000 > 2 * MOVED_MS));
        assert!(drawn.iter().all(|wrong| wrong.pace == 1.0 || (wrong.pace - 1.0).abs() >= 0.2));
        assert!(drawn.iter().any(|wrong| wrong.seconds < 0) && drawn.iter().any(|wrong| wrong.pace < 1.0));
        assert_eq!(Wrong { seconds: -70, pace: 1.0 }.to_string(), "-70 x1.00");
    }
}
