//! The few file-system helpers that the log, the mark and the snapshots share.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The way out for a peer whose directory can no longer speak for it (semantics, section 9).
pub(crate) const REJOIN: &str = "keep this directory for inspection and leave the peer stopped: the others go on without \
     it while they are a majority. Do not start it from an older copy of its directory, which would break promises it \
     has made since. To put a fresh peer in its place, start one with an empty data directory, an id that the cluster has \
     never used, and `join` set to the address of a peer that works: it comes in as a learner, and replaces this one once \
     it has caught up and the leader is asked for that";

/// Makes names created, renamed or removed in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

type Ask = dyn Fn(&Path) -> io::Result<u64> + Send + Sync;

/// Tells how many bytes are free on the file system of a path. By default it asks the file system; a seam for tests.
#[derive(Clone)]
pub struct FreeSpace {
    ask: Arc<Ask>,
}

impl fmt::Debug for FreeSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeSpace").finish_non_exhaustive()
    }
}

impl Default for FreeSpace {
    fn default() -> Self {
        Self::new(|path| {
            let stat = rustix::fs::statvfs(path)?;
            Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
        })
    }
}

impl FreeSpace {
    /// Asks this function.
    pub fn new(ask: impl Fn(&Path) -> io::Result<u64> + Send + Sync + 'static) -> Self {
        Self { ask: Arc::new(ask) }
    }

    /// Bytes that an unprivileged writer can still use. A file system that cannot be asked has room: the write itself
    /// finds out.
    pub fn bytes(&self, path: &Path) -> u64 {
        (self.ask)(path).unwrap_or(u64::MAX)
    }
}
