//! Where a test has a leader die in the middle of a procedure: before a step is carried out, before what came of it is
//! committed, and after that. And around the one transaction that gives a shard to another worker ([`ROUTE`]), and what surrounds that.
//!
//! Only this crate's own tests (`kills`) are built so that they can; no package, and no other build of it, is: [`VARIABLE`] names a file,
//! and the peer that comes to the point named in it removes the file and kills itself. So one peer dies, and not the next leader as well.
//! The file may ask for several procedures to have come to the point: each waits there for the others, and all of them stand there when the
//! peer dies.

/// Names the file, in a build that can die.
pub const VARIABLE: &str = "LAKE_METASRV_DIE_AT";
/// What the file calls the change of a shard's route, as if it were a procedure's step: it has a begin, and is committed.
pub const ROUTE: &str = "route";
/// What it calls what comes before that, which has a begin only ...
pub const WARM: &str = "warm";
/// ... and after it: that is committed, as it were, once the worker before has answered.
pub const LEAVE: &str = "leave";

/// A point in the life of a procedure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// Something is to be done for it; nothing was.
    Begin,
    /// It was done, and not committed.
    Uncommitted,
    /// It was committed, and nobody in this process knows.
    Committed,
}

impl Point {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Begin, Self::Uncommitted, Self::Committed];

    /// As the file names it in its first line, with the procedure's step; a procedure that is not accepted yet has the step `new`. A second
    /// line may say how many procedures are to come to it.
    pub fn of(self, step: &str) -> String {
        let point = match self {
            Self::Begin => "begin",
            Self::Uncommitted => "uncommitted",
            Self::Committed => "committed",
        };
        format!("{step} {point}")
    }
}

/// A procedure has come to a point.
#[cfg(not(test))]
pub(super) async fn reached(_: Point, _: &lake_client::procedures::Record) {}

/// A procedure has come to a point.
#[cfg(test)]
pub(super) async fn reached(point: Point, record: &lake_client::procedures::Record) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static WAITING: AtomicUsize = AtomicUsize::new(0);
    /// It waits there until the peer dies, or leads no more.
    struct Waits;
    impl Drop for Waits {
        fn drop(&mut self) {
            WAITING.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let step = if record.accepted_ms.is_none() { "new" } else { record.step.as_str() };
    let Some(most) = meant(point, step) else { return };
    let waiting = WAITING.fetch_add(1, Ordering::SeqCst) + 1;
    let _waits = Waits;
    if waiting < most {
        std::future::pending::<()>().await;
    }
    die();
}

/// A point of a step was reached.
#[cfg(not(test))]
pub(in crate::peer) const fn reached_in(_: Point, _: &str) {}

/// A point of a step was reached.
#[cfg(test)]
pub(in crate::peer) fn reached_in(point: Point, step: &str) {
    if meant(point, step).is_some() {
        die();
    }
}

/// The file, in a process that was told of one.
#[cfg(test)]
fn file() -> Option<&'static std::path::Path> {
    static FILE: std::sync::OnceLock<Option<std::path::PathBuf>> = std::sync::OnceLock::new();
    FILE.get_or_init(|| std::env::var_os(VARIABLE).map(Into::into)).as_deref()
}

/// How many are to come to this point, if it is the one where somebody dies.
#[cfg(test)]
fn meant(point: Point, step: &str) -> Option<usize> {
    let told = std::fs::read_to_string(file()?).ok()?;
    let mut lines = told.lines();
    lines.next().filter(|named| *named == point.of(step))?;
    Some(lines.next().and_then(|count| count.parse().ok()).unwrap_or(1))
}

#[cfg(test)]
fn die() {
    // Of several that come to it at the same time one dies.
    if file().is_some_and(|file| std::fs::remove_file(file).is_ok()) {
        let me = rustix::process::getpid();
        // Where that is refused, the test waits in vain and says so.
        let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    }
}
