//! Changes by operation id: each is made once by this node, however often it is asked for.
//!
//! The first to ask starts it in a task of its own, which runs to its end whether somebody waits or not; everybody who
//! asks gets the one outcome. Outcomes are kept for [`KEPT_FOR`], at most [`MAX_OPERATIONS`] of them; running ones are
//! never forgotten. They do not outlive the node: what must, has an operation id ([`crate::sql::once`]).

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::sql::session::Changed;

/// How long an outcome is remembered.
pub const KEPT_FOR: Duration = Duration::from_secs(3600);
/// Most operations remembered.
pub const MAX_OPERATIONS: usize = 10_000;

type Outcome = watch::Receiver<Option<Result<Changed>>>;

/// The operations of this node.
#[derive(Debug, Default)]
pub struct Operations {
    known: Mutex<Known>,
    tasks: TaskTracker,
}

#[derive(Debug, Default)]
struct Known {
    outcomes: HashMap<Uuid, Outcome>,
    /// In the order they began.
    order: VecDeque<(Instant, Uuid)>,
}

impl Known {
    /// Forgets what is old, and the oldest that are done while there are too many.
    fn make_room(&mut self) -> Result<()> {
        while let Some((began, id)) = self.order.front().copied() {
            let running = self.outcomes.get(&id).is_some_and(|outcome| outcome.borrow().is_none());
            let due = began.elapsed() > KEPT_FOR || self.order.len() >= MAX_OPERATIONS;
            if !due {
                return Ok(());
            }
            self.order.pop_front();
            if running {
                // Looked at again once it has come to the front.
                self.order.push_back((Instant::now(), id));
                if self.order.len() >= MAX_OPERATIONS && !self.any_done() {
                    return Err(Error::exhausted("too many changes are running on this node; nothing was done"));
                }
                continue;
            }
            self.outcomes.remove(&id);
        }
        Ok(())
    }

    fn any_done(&self) -> bool {
        self.outcomes.values().any(|outcome| outcome.borrow().is_some())
    }
}

impl Operations {
    /// The outcome of operation `id`. `change` makes it, if this is the first time it is asked for.
    pub async fn run<F>(self: &Arc<Self>, id: Uuid, change: impl FnOnce() -> F) -> Result<Changed>
    where
        F: Future<Output = Result<Changed>> + Send + 'static,
    {
        let mut outcome = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            match known.outcomes.get(&id) {
                Some(outcome) => outcome.clone(),
                None => {
                    known.make_room()?;
                    let (done, outcome) = watch::channel(None);
                    let change = change();
                    self.tasks.spawn(async move {
                        let result = change.await;
                        done.send_replace(Some(result));
                    });
                    known.outcomes.insert(id, outcome.clone());
                    known.order.push_back((Instant::now(), id));
                    outcome
                }
            }
        };
        let ended = || Error::internal("the change ended unexpectedly; whether it was made is unknown");
        let result = outcome.wait_for(Option::is_some).await.map_err(|_| ended())?;
        result.clone().unwrap_or_else(|| Err(ended()))
    }

    /// Waits for the changes under way.
    pub async fn close(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn count(count: u64) -> Changed {
        Changed { count, settings: None }
    }

    #[tokio::test]
    async fn an_operation_runs_once() {
        let operations = Arc::new(Operations::default());
        let runs = Arc::new(AtomicU64::new(0));
        let id = Uuid::new_v4();
        let ask = || {
            let runs = runs.clone();
            operations.run(id, move || async move {
                tokio::task::yield_now().await;
                Ok(count(runs.fetch_add(1, Ordering::Relaxed) + 10))
            })
        };
        let (a, b) = tokio::join!(ask(), ask());
        assert_eq!((a, b, ask().await), (Ok(count(10)), Ok(count(10)), Ok(count(10))));
        assert_eq!(runs.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn an_operation_ends_though_nobody_waits() {
        let operations = Arc::new(Operations::default());
        let runs = Arc::new(AtomicU64::new(0));
        let counted = runs.clone();
        let mut asking = Box::pin(operations.run(Uuid::new_v4(), move || async move {
            tokio::task::yield_now().await;
            Ok(count(counted.fetch_add(1, Ordering::Relaxed)))
        }));
        assert!(futures::poll!(&mut asking).is_pending());
        drop(asking);
        operations.close().await;
        assert_eq!(runs.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn only_so_many_are_remembered() {
        let operations = Arc::new(Operations::default());
        for _ in 0..MAX_OPERATIONS + 10 {
            operations.run(Uuid::new_v4(), || async { Ok(count(0)) }).await.unwrap();
        }
        assert!(operations.known.lock().unwrap().outcomes.len() <= MAX_OPERATIONS);
    }
}
