//! The few file-system helpers that the log, the mark and the snapshots share.

use std::fs::File;
use std::io;
use std::path::Path;

/// The way out for a peer whose directory can no longer speak for it (semantics, section 9).
pub(crate) const REJOIN: &str = "if a majority of the other peers is healthy, move this data directory away and start \
     the peer with an empty directory and a new, never used id, then join it as a learner; else restore the directory \
     from a backup";

/// Makes names created, renamed or removed in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Bytes that an unprivileged writer can still use on the file system of `path`.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
