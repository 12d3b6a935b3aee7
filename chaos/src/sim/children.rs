//! Simulations in processes of their own: the program is started again with a plan on its standard input, and answers with
//! a report on its standard output.
//!
//! A child ends with its parent, and is killed if it takes too long or too much memory; both are the harness's failures, not
//! verdicts. Each has a directory of its own for snapshots, in memory if the machine has such a place, which goes with it.

use std::io::{Read, Write};
use std::ops::RangeInclusive;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal};

use super::minimise::{Smaller, Tried, minimise};
use super::plan::Plan;
use super::report::Report;
use super::run;

/// What a child is started with, behind the program's name.
pub const ARGUMENTS: [&str; 3] = ["chaos", "sim", "--child"];
/// Longest that a simulation may take of a processor: on a busy machine it may wait for one for much longer.
pub const LIMIT: Duration = Duration::from_secs(180);
/// Longest that it may take of real time: one that waits for something that never comes takes no processor.
const DEADLINE: Duration = Duration::from_secs(1800);
/// Most memory that a simulation may take, addresses counted.
const MEMORY_BYTES: u64 = 8 << 30;
/// What of a child's complaints is kept.
const COMPLAINTS_BYTES: u64 = 1 << 20;
const COMPLAINTS_TOLD: usize = 2_000;
/// Directories that others have left behind where one is to be made.
const MAX_LEFT_BEHIND: u32 = 100;
/// How often a child is looked after.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Runs simulations.
#[derive(Debug)]
pub struct Children {
    program: PathBuf,
    /// Nothing more is begun, and what runs is ended.
    stop: AtomicBool,
    started: AtomicU64,
}

/// A directory that goes when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn make(number: u64) -> std::io::Result<Self> {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let mut left_behind = 0;
        loop {
            let dir = base.join(format!("lake-sim-{}-{number}-{left_behind}", std::process::id()));
            match std::fs::create_dir(&dir) {
                // By one that was killed, and whose process id has come round.
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && left_behind < MAX_LEFT_BEHIND => {
                    left_behind += 1;
                }
                made => return made.map(|()| Self(dir)),
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // It is of no use to anybody, and whoever looks after such places removes it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Children {
    /// Of this program.
    pub fn new(program: PathBuf) -> Self {
        Self { program, stop: AtomicBool::new(false), started: AtomicU64::new(0) }
    }

    /// Ends what runs, and begins nothing more.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether it was told to stop.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Simulates one plan. The trace goes to a file if one is named, by an absolute path.
    ///
    /// # Errors
    /// The child does not start, is stopped, takes too long, dies, or cannot make sense of its own history.
    pub fn simulate(&self, plan: &Plan, trace: Option<&Path>) -> Result<Report, String> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let scratch = Scratch::make(number).map_err(|e| format!("making a directory for a simulation: {e}"))?;
        let mut command = Command::new(&self.program);
        command.args(ARGUMENTS).current_dir(&scratch.0);
        if let Some(path) = trace {
            command.arg("--trace").arg(path);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C on a terminal is for the parent alone: a child that dies of it would be taken for one that failed.
        command.process_group(0);
        let mut child = command.spawn().map_err(|e| format!("starting {}: {e}", self.program.display()))?;
        let plan = serde_json::to_vec(plan).map_err(|e| format!("writing the plan: {e}"))?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let read = |from: Option<Box<dyn Read + Send>>| {
            let mut bytes = Vec::new();
            // What could be read counts; what is missing shows in what is made of it.
            let _ = from.map(|from| from.take(COMPLAINTS_BYTES).read_to_end(&mut bytes));
            bytes
        };
        thread::scope(|scope| {
            let out = scope.spawn(move || read(stdout.map(|s| Box::new(s) as Box<dyn Read + Send>)));
            let complaints = scope.spawn(move || read(stderr.map(|s| Box::new(s) as Box<dyn Read + Send>)));
            // A child that died before it read everything says why itself.
            let _ = stdin.map(|mut stdin| stdin.write_all(&plan));
            let ended = self.look_after(&mut child);
            let (out, complaints) = (out.join().unwrap_or_default(), complaints.join().unwrap_or_default());
            ended?;
            serde_json::from_slice(&out).map_err(|e| {
                let complaints = String::from_utf8_lossy(&complaints);
                let skipped = complaints.chars().count().saturating_sub(COMPLAINTS_TOLD);
                let told: String = complaints.chars().skip(skipped).collect();
                format!("its report makes no sense ({e}); it said: {told}")
            })
        })
    }

    fn look_after(&self, child: &mut Child) -> Result<(), String> {
        let deadline = Instant::now() + DEADLINE;
        let why = loop {
            match child.try_wait() {
                Ok(Some(status)) if status.signal() == Some(Signal::XCPU.as_raw()) => {
                    return Err(format!("it takes more than {} s of a processor", LIMIT.as_secs()));
                }
                // Ctrl-C reached it before it had a group of its own, and the parent, too, if perhaps later.
                Ok(Some(status)) if status.signal() == Some(Signal::INT.as_raw()) => {
                    self.stop();
                    return Err("it was stopped".to_owned());
                }
                Ok(Some(_)) => return Ok(()),
                Ok(None) if self.stopped() => break "it was stopped".to_owned(),
                Ok(None) if Instant::now() >= deadline => break format!("it takes more than {} s", DEADLINE.as_secs()),
                Ok(None) => thread::sleep(LOOK_EVERY),
                Err(e) => break format!("looking after it: {e}"),
            }
        };
        // It may have ended just now.
        let _ = child.kill();
        let _ = child.wait();
        Err(why)
    }

    /// Simulates what is drawn for each seed, so many at a time, and tells of each as it ends. Nothing is begun after `until`.
    pub fn all(
        &self,
        seeds: RangeInclusive<u64>,
        jobs: usize,
        until: Option<Instant>,
        draw: impl Fn(u64) -> Plan + Sync,
        tell: impl Fn(u64, Result<Report, String>) + Sync,
    ) {
        let next = AtomicU64::new(*seeds.start());
        thread::scope(|scope| {
            for _ in 0..jobs.max(1) {
                scope.spawn(|| {
                    while !self.stopped() && until.is_none_or(|until| Instant::now() < until) {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed > *seeds.end() {
                            return;
                        }
                        let report = self.simulate(&draw(seed), None);
                        if !(report.is_err() && self.stopped()) {
                            tell(seed, report);
                        }
                    }
                });
            }
        });
    }

    /// A smaller plan that fails in the same way as a report's, if there is one to be found in so many simulations.
    pub fn minimise(&self, report: &Report, attempts: u32) -> Option<Smaller<Report>> {
        let promise = report.broke.as_deref()?;
        let attempt = |plan: &Plan| {
            let result = self.simulate(plan, None);
            match result {
                Ok(result) => Some(Tried { broke: result.broke.clone(), operations: result.operations, result }),
                Err(_) if self.stopped() => None,
                // One that hangs does not fail in the same way.
                Err(_) => Some(Tried { broke: None, operations: 0, result: report.clone() }),
            }
        };
        minimise(&report.plan, promise, report.operations, attempts, attempt)
    }
}

/// What a child does: simulates the plan on its standard input, and gives the report.
///
/// # Errors
/// The plan cannot be read; as [`run::alone`].
pub fn child(trace: Option<PathBuf>) -> Result<Report, String> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| format!("to end with the parent: {e}"))?;
    let limit = |resource, limit: u64, what: &str| {
        // At its first limit of time it gets a signal that says why; it ends with that, and leaves no image of its memory.
        let maximum = Some(limit + u64::from(matches!(resource, Resource::Cpu)));
        let limit = Rlimit { current: Some(limit), maximum };
        rustix::process::setrlimit(resource, limit).map_err(|e| format!("limiting {what}: {e}"))
    };
    limit(Resource::As, MEMORY_BYTES, "the memory")?;
    limit(Resource::Core, 0, "what a crash leaves")?;
    limit(Resource::Cpu, LIMIT.as_secs(), "the time")?;
    let plan = serde_json::from_reader(std::io::stdin().lock()).map_err(|e| format!("reading the plan: {e}"))?;
    run::alone(plan, trace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_ctrl_c_ended_was_stopped_and_one_that_was_killed_failed() {
        for (signal, stopped) in [("INT", true), ("KILL", false)] {
            let children = Children::new(PathBuf::from("sh"));
            let mut child = Command::new("sh").args(["-c", &format!("kill -{signal} $$")]).spawn().unwrap();
            let ended = children.look_after(&mut child);
            assert!(ended.is_err() == stopped && children.stopped() == stopped, "{signal}: {ended:?}");
        }
    }

    #[test]
    fn a_directory_that_was_left_behind_is_in_nobodys_way() {
        let (left, made) = (Scratch::make(u64::MAX).unwrap(), Scratch::make(u64::MAX).unwrap());
        assert!(left.0 != made.0 && left.0.is_dir() && made.0.is_dir());
    }
}
