//! Why a peer does not start, or has to stop.

use std::io;
use std::path::PathBuf;

use crate::config::ConfigError;
use crate::log::mark::MarkError;
use crate::log::sled_log::OpenError;
use crate::snapshot::SnapshotError;

/// Every variant is something an operator acts on differently.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is wrong.
    #[error("the configuration is wrong: {0}")]
    Config(#[from] ConfigError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address} for {what}: {source}; is another process listening there?")]
    Listen { what: &'static str, address: String, source: io::Error },
    /// Another process uses the data directory.
    #[error("the data directory {} is in use by {holder}; stop that process, or choose another directory", .dir.display())]
    Locked { dir: PathBuf, holder: String },
    /// The data directory belongs to another peer.
    #[error("the data directory {} belongs to peer {found}, not to peer {expected}; choose the directory or the id accordingly", .dir.display())]
    OtherPeer { dir: PathBuf, found: u64, expected: u64 },
    /// A single process cannot serve a directory whose cluster has other voters.
    #[error("the data directory {} belongs to a cluster with {voters} voters and cannot be used by one process alone; start its peers with `lake metasrv`", .dir.display())]
    ManyVoters { dir: PathBuf, voters: usize },
    /// What was named as a peer's data directory is none.
    #[error("{} is no peer's data directory: {what}", .dir.display())]
    NoPeer { dir: PathBuf, what: String },
    /// Something is where a file or directory was to be made.
    #[error("{} exists already, and nothing is ever written over: name a path where nothing is", .path.display())]
    Exists { path: PathBuf },
    /// A file that was to be a saved snapshot is none, or no longer.
    #[error("the saved snapshot {} cannot be used: {what}", .path.display())]
    Saved { path: PathBuf, what: String },
    /// The survivors of a cluster do not give a new one.
    #[error("nothing was recovered: {0}")]
    Unrecoverable(String),
    /// The data directory cannot be read or written.
    #[error("{doing}: {source}")]
    Io { doing: String, source: io::Error },
    /// The data directory is damaged, or lacks what this peer has acknowledged.
    #[error("{0}")]
    Damaged(String),
    /// The data directory holds what only a newer build knows. Nothing is wrong with it.
    #[error("{0}")]
    Newer(String),
    /// A write or sync failed, or the consensus core ended: the peer cannot go on.
    #[error("this peer has to stop: {0}")]
    Stopped(String),
}

impl Error {
    /// An I/O error with what was being done.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }
}

impl From<MarkError> for Error {
    fn from(e: MarkError) -> Self {
        match e {
            MarkError::Io { path, source } => Self::Io { doing: format!("opening {}", path.display()), source },
            damaged => Self::Damaged(damaged.to_string()),
        }
    }
}

impl From<OpenError> for Error {
    fn from(e: OpenError) -> Self {
        match e {
            OpenError::Io { dir, source } => {
                Self::Io { doing: format!("opening the log in {}", dir.display()), source }
            }
            damaged => Self::Damaged(damaged.to_string()),
        }
    }
}

impl From<SnapshotError> for Error {
    fn from(e: SnapshotError) -> Self {
        match e {
            SnapshotError::Io { path, source } => {
                Self::Io { doing: format!("reading the snapshot {}", path.display()), source }
            }
            newer @ SnapshotError::Newer { .. } => Self::Stopped(newer.to_string()),
            damaged => Self::Damaged(damaged.to_string()),
        }
    }
}
