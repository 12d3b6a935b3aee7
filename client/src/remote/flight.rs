//! Work that several wait for, as a task: it goes on though whoever began it has given up.

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// The work, which ends with this at the latest.
#[derive(Debug)]
pub(super) struct Flight<T> {
    outcome: watch::Receiver<Option<T>>,
    _task: AbortOnDropHandle<()>,
}

impl<T: Clone + Send + Sync + 'static> Flight<T> {
    /// Begins it. Needs a tokio runtime.
    pub fn begin(work: impl Future<Output = T> + Send + 'static) -> Self {
        let (report, outcome) = watch::channel(None);
        let task = tokio::spawn(async move {
            let done = work.await;
            report.send_replace(Some(done));
        });
        Self { outcome, _task: AbortOnDropHandle::new(task) }
    }

    /// Whoever waits for it.
    pub fn joined(&self) -> Joined<T> {
        Joined(self.outcome.clone())
    }

    /// The same while it is under way. `None`: it is over, or has gone with the runtime that it was begun in.
    pub fn join(&self) -> Option<Joined<T>> {
        let under_way = self.outcome.borrow().is_none() && self.outcome.has_changed().is_ok();
        under_way.then(|| self.joined())
    }
}

/// One of those who wait.
#[derive(Debug)]
pub(super) struct Joined<T>(watch::Receiver<Option<T>>);

impl<T: Clone> Joined<T> {
    /// What came of it; `None`: it has gone before its end.
    pub async fn outcome(mut self) -> Option<T> {
        let outcome = self.0.wait_for(Option::is_some).await.ok()?;
        outcome.clone()
    }
}
