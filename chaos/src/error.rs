//! What can go wrong while running a cluster of processes.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::process::ProcessName;

/// Why a cluster of processes could not be started, changed or asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused; `doing` names the file or process.
    #[error("{doing}: {source}")]
    Io { doing: String, source: io::Error },
    /// Another supervisor holds the directory.
    #[error("{} is in use by another lake process{}: stop that one first, or choose another directory with --dir", .dir.display(), .pid.map(|p| format!(" (pid {p})")).unwrap_or_default())]
    DirectoryInUse { dir: PathBuf, pid: Option<u32> },
    /// The directory holds something this request cannot go on with.
    #[error("{}: {problem}", .dir.display())]
    Directory { dir: PathBuf, problem: String },
    /// Every port tried is taken.
    #[error(
        "no free port found outside the range {low}-{high} that the kernel gives to outgoing connections (tried {tried}); stop other clusters on this machine"
    )]
    NoFreePort { low: u16, high: u16, tried: usize },
    /// A process ended, or never answered, while it was waited for.
    #[error("{process} {what}{}", log_tail(.log, .tail))]
    NotServing { process: ProcessName, what: String, log: PathBuf, tail: String },
    /// The peers answer, but the cluster could not be founded from them.
    #[error("founding the metadata cluster: {0}")]
    Founding(String),
    /// A condition did not come true in time.
    #[error("waited {:.1} s for {what}; last seen: {last}", .waited.as_secs_f64())]
    Timeout { what: String, waited: Duration, last: String },
    /// No such process in this cluster.
    #[error("there is no {0} in this cluster")]
    UnknownProcess(ProcessName),
    /// There is no process that something could be done to.
    #[error("{0} has no process")]
    NoProcess(ProcessName),
    /// This program panicked, with that; the cluster has nothing to do with it.
    #[error("this program has a bug, and panicked: {0}")]
    Bug(String),
    /// The supervising task has ended, because the cluster is being shut down.
    #[error("{0} is no longer supervised: the cluster is shutting down")]
    ShuttingDown(ProcessName),
}

fn log_tail(log: &std::path::Path, tail: &str) -> String {
    match tail.is_empty() {
        true => format!("; its log is {}", log.display()),
        false => format!(". The end of {}:\n{tail}", log.display()),
    }
}

/// Says what was being done when the operating system refused.
pub(crate) trait IoContext<T> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> IoContext<T> for Result<T, E> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Io { doing: doing(), source: source.into() })
    }
}
