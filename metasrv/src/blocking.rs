//! Work that waits for the disk, off the async threads.
//!
//! A simulation has one thread, and nothing may happen beside it: there such work is done where it is asked for.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

static INLINE: AtomicBool = AtomicBool::new(false);

/// Has this process do such work where it is asked for, from now on. For simulations.
pub fn inline() {
    INLINE.store(true, Ordering::Relaxed);
}

/// Runs it.
///
/// # Errors
/// What it fails with; its panic.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    if INLINE.load(Ordering::Relaxed) {
        return work();
    }
    tokio::task::spawn_blocking(work).await.map_err(|e| io::Error::other(format!("a disk task ended: {e}")))?
}
