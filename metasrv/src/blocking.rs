//! Work that waits for the disk, off the async threads.
//!
//! A simulation has one thread, and nothing may happen beside it: there such work is done where it is asked for.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::sync::oneshot;

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

/// How far below its own priority a process does what nobody waits for. With 10, such a thread has about a tenth of a
/// processor that another one wants as well, which is enough for it to end.
#[cfg(target_os = "linux")]
const BEHIND: i32 = 10;

/// Runs long work that nobody waits for, on a thread of its own which gives way to all others of the process. The thread
/// ends with the work, also when the caller does not wait for it any more.
///
/// # Errors
/// What it fails with; its panic. `WouldBlock`: no thread could be had at present, and nothing was begun.
pub(crate) async fn behind<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    if INLINE.load(Ordering::Relaxed) {
        return work();
    }
    let (done, result) = oneshot::channel();
    let run = move || {
        give_way();
        // Whoever does not wait any more has no use for it.
        let _ = done.send(work());
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(run);
    spawned.map_err(|e| io::Error::new(e.kind(), format!("starting the thread {name}: {e}")))?;
    result.await.unwrap_or_else(|_| Err(io::Error::other(format!("the thread {name} panicked"))))
}

/// Lowers the priority of this thread. A pool's thread could not be raised again without a privilege.
fn give_way() {
    #[cfg(target_os = "linux")]
    {
        let own = rustix::process::getpriority_process(None);
        // `None` is this thread, not the process. Where it is not allowed, the work is done all the same.
        if let Err(e) = own.and_then(|own| rustix::process::setpriority_process(None, own + BEHIND)) {
            tracing::debug!("lowering a thread's priority: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn work_behind_the_others_has_a_lower_priority_and_leaves_theirs_alone() {
        let own = || rustix::process::getpriority_process(None).map_err(io::Error::from);
        let before = own().unwrap();
        let there = behind("lake-test", own).await.unwrap();
        assert_eq!((there, own().unwrap()), ((before + BEHIND).min(19), before));
        let failed = behind("lake-test", || Err::<(), _>(io::Error::other("no"))).await;
        assert_eq!(failed.unwrap_err().to_string(), "no");
        let panicked = behind("lake-test", || -> io::Result<()> { panic!("on purpose") }).await;
        assert!(panicked.unwrap_err().to_string().contains("lake-test panicked"));
    }
}
