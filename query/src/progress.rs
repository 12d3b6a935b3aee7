//! How far a change has come, for whoever waits for its end: how many rows it has inserted, updated or deleted so far.
//!
//! They are counted where the statement's own task takes them from its plan; whoever wants to know gives that task a counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

tokio::task_local! {
    static ROWS: Arc<AtomicU64>;
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
