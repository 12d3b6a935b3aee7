//! How many statements run at a time. What is more waits in the order it came, up to a number and a time; what is more than
//! that is refused at once. Once closed, nothing is let in any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

use crate::config::Config;
use crate::error::{Error, Result};

/// The right to run, until dropped.
#[derive(Debug)]
pub struct Slot {
    _permit: OwnedSemaphorePermit,
}

/// Who may run.
#[derive(Debug)]
pub struct Admission {
    slots: Arc<Semaphore>,
    size: usize,
    waiting: AtomicUsize,
    max_waiting: usize,
    longest_wait: Duration,
}

impl Admission {
    pub fn new(config: &Config) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(config.max_statements)),
            size: config.max_statements,
            waiting: AtomicUsize::new(0),
            max_waiting: config.max_queued_statements,
            longest_wait: config.max_queue_wait,
        }
    }

    /// Waits for the turn.
    ///
    /// # Errors
    /// `Exhausted` if too many wait already, or too long; `Unavailable` once closed. Nothing was done then.
    pub async fn enter(&self, deadline: Instant) -> Result<Slot> {
        match self.slots.clone().try_acquire_owned() {
            Ok(permit) => return Ok(Slot { _permit: permit }),
            Err(TryAcquireError::Closed) => return Err(stopping()),
            Err(TryAcquireError::NoPermits) => {}
        }
        let running = self.size;
        let _place = self.queue().ok_or_else(|| {
            Error::exhausted(format!(
                "{running} statements run on this node and {} wait (max_statements, max_queued_statements); nothing was \
                 done: try again later, or another node",
                self.max_waiting
            ))
        })?;
        let until = deadline.min(Instant::now() + self.longest_wait);
        match tokio::time::timeout_at(until.into(), self.slots.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Slot { _permit: permit }),
            Ok(Err(_)) => Err(stopping()),
            Err(_) => Err(Error::exhausted(format!(
                "{running} statements run on this node (max_statements), and none has ended while this one waited \
                 (max_queue_wait_secs, or its deadline); nothing was done: try again later, or another node"
            ))),
        }
    }

    /// A place in the queue, if there is one.
    fn queue(&self) -> Option<Place<'_>> {
        let taken = self
            .waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < self.max_waiting).then_some(n + 1));
        taken.ok().map(|_| Place(&self.waiting))
    }

    /// How many run, and how many wait.
    pub fn figures(&self) -> (usize, usize) {
        let running = self.size.saturating_sub(self.slots.available_permits());
        (running, self.waiting.load(Ordering::Relaxed))
    }

    /// Lets nothing in any more. What runs goes on; what waits is refused.
    pub fn close(&self) {
        self.slots.close();
    }

    pub fn is_closed(&self) -> bool {
        self.slots.is_closed()
    }
}

struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a statement is told that comes too late.
fn stopping() -> Error {
    Error::unavailable("this node is stopping and takes no new statements; nothing was done: run it on another node")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Options;
    use crate::error::Kind;

    fn admission(size: usize, queue: usize) -> Admission {
        let options = Options {
            warehouse: Some("file:///w".into()),
            max_statements: Some(size),
            max_queued_statements: Some(queue),
            ..Options::default()
        };
        Admission::new(&Config::new(options).unwrap())
    }

    #[tokio::test]
    async fn so_many_run_so_many_wait_and_the_rest_is_refused() {
        let admission = admission(1, 1);
        let far = Instant::now() + Duration::from_secs(60);
        let first = admission.enter(far).await.unwrap();
        let late = admission.enter(Instant::now()).await.unwrap_err();
        assert!(late.kind == Kind::Exhausted && late.message.contains("max_queue_wait_secs"), "{late}");
        let mut second = Box::pin(admission.enter(far));
        assert!(futures::poll!(&mut second).is_pending());
        assert_eq!(admission.figures(), (1, 1));
        let third = admission.enter(far).await.unwrap_err();
        assert!(third.kind == Kind::Exhausted && third.message.contains("max_queued_statements"), "{third}");
        drop(first);
        let _second = second.await.unwrap();
        assert_eq!(admission.figures(), (1, 0));
        let mut waits = Box::pin(admission.enter(far));
        assert!(futures::poll!(&mut waits).is_pending());
        admission.close();
        for refused in [waits.await.unwrap_err(), admission.enter(far).await.unwrap_err()] {
            assert!(refused.kind == Kind::Unavailable && refused.message.contains("another node"), "{refused}");
        }
    }
}
