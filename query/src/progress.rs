//! How far a statement has come, for whoever waits for its end.
//!
//! - A change: how many rows it has inserted, updated or deleted so far. They are counted where the statement's own task takes them from
//!   its plan; whoever wants to know gives that task a counter.
//! - A query: which share of the rows of its tables its plan has read ([`Scans`]). How long what it does with them takes is not known, so
//!   a query that runs has never read all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::physical_plan::{ExecutionPlan, StatisticsArgs};

/// The most that is said of a query that has not ended.
const ALMOST: f64 = 0.99;

tokio::task_local! {
    static ROWS: Arc<AtomicU64>;
    static SCANS: Arc<Scans>;
}

/// Makes a change, whose rows are counted there.
pub async fn told_to<T>(rows: Arc<AtomicU64>, change: impl Future<Output = T>) -> T {
    ROWS.scope(rows, change).await
}

/// Counts rows of the change that this task makes.
pub fn count(rows: u64) {
    // Perhaps nobody wants to know.
    let _ = ROWS.try_with(|known| known.fetch_add(rows, Ordering::Relaxed));
}

/// Begins a query, whose scans are looked at there.
pub async fn shown_to<T>(scans: Arc<Scans>, query: impl Future<Output = T>) -> T {
    SCANS.scope(scans, query).await
}

/// The query that this task begins runs by this plan.
pub(crate) fn runs_by(plan: &Arc<dyn ExecutionPlan>) {
    // Perhaps nobody wants to know.
    let _ = SCANS.try_with(|known| known.lock().plan = Some(Arc::downgrade(plan)));
}

/// What the scans of a query read. It keeps nothing of the query alive.
#[derive(Debug, Default)]
pub struct Scans(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    plan: Option<Weak<dyn ExecutionPlan>>,
    most: Option<f64>,
}

impl Scans {
    /// Which share of its rows the query has read, between 0 and 1. It does not go back. `None`: not known, as where one of its scans
    /// cannot say how much there is to be read.
    pub fn share(&self) -> Option<f64> {
        let mut known = self.lock();
        let plan = known.plan.as_ref().and_then(Weak::upgrade);
        known.note(plan.and_then(|plan| share_of(&plan)))
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn note(&mut self, share: Option<f64>) -> Option<f64> {
        if let Some(share) = share {
            self.most = Some(self.most.unwrap_or_default().max(share.min(ALMOST)));
        }
        self.most
    }
}

/// The same of a plan as it is now.
fn share_of(plan: &Arc<dyn ExecutionPlan>) -> Option<f64> {
    let (mut read, mut all, mut is_known) = (0_usize, 0_usize, true);
    // Looking at it cannot fail.
    let _ = plan.apply(|node| {
        if !node.children().is_empty() {
            return Ok(TreeNodeRecursion::Continue);
        }
        let statistics = node.statistics_from_inputs(&[], &StatisticsArgs::new()).ok();
        let Some(rows) = statistics.and_then(|statistics| statistics.num_rows.get_value().copied()) else {
            is_known = false;
            return Ok(TreeNodeRecursion::Stop);
        };
        all = all.saturating_add(rows);
        let known = node.metrics().and_then(|metrics| metrics.output_rows()).unwrap_or_default();
        read = read.saturating_add(known.min(rows));
        Ok(TreeNodeRecursion::Continue)
    });
    (is_known && all > 0).then(|| read as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array, RecordBatch};
    use datafusion::datasource::memory::MemorySourceConfig;

    use super::*;

    #[test]
    fn what_is_said_does_not_go_back_and_is_never_all() {
        let mut known = Known::default();
        let shares = [None, Some(0.5), Some(0.25), None, Some(1.0), Some(0.0)];
        let said = shares.map(|share| known.note(share));
        assert_eq!(said, [None, Some(0.5), Some(0.5), Some(0.5), Some(ALMOST), Some(ALMOST)]);
    }

    #[tokio::test]
    async fn a_plan_is_looked_at_and_not_kept() {
        let column: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3, 4]));
        let rows = vec![vec![RecordBatch::try_from_iter([("x", column)]).unwrap()]];
        let plan: Arc<dyn ExecutionPlan> = MemorySourceConfig::try_new_exec(&rows, rows[0][0].schema(), None).unwrap();
        let scans = Arc::new(Scans::default());
        assert_eq!(scans.share(), None);
        shown_to(scans.clone(), async { runs_by(&plan) }).await;
        assert_eq!(scans.share(), Some(0.0));
        assert_eq!(Arc::strong_count(&plan), 1);
        drop(plan);
        assert_eq!(scans.share(), Some(0.0));
    }
}
