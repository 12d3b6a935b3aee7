//! Joins give way. From one batch of input a join can make thousands, each in one poll of its consumer; nothing that it reads is
//! asked meanwhile, and only what is read gives way by itself. The thread would have no other work for so long, neither the
//! node's heartbeats nor the cancelling of this very query.
//!
//! [`JoinsYield`] puts a [`CooperativeExec`] above each: once its task's budget of batches is spent, other tasks have their turn.

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::joins::{
    CrossJoinExec, HashJoinExec, NestedLoopJoinExec, PiecewiseMergeJoinExec, SortMergeJoinExec,
};
use datafusion::physical_plan::unnest::UnnestExec;

/// The rule that makes all joins, and what unfolds lists, give way to other tasks.
#[derive(Debug)]
pub struct JoinsYield;

impl PhysicalOptimizerRule for JoinsYield {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|node| match multiplies(node.as_ref()) {
            true => Ok(Transformed::yes(Arc::new(CooperativeExec::new(node)) as Arc<dyn ExecutionPlan>)),
            false => Ok(Transformed::no(node)),
        })
        .data()
    }

    fn name(&self) -> &str {
        "joins_yield"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Whether it makes many batches of one.
fn multiplies(node: &dyn ExecutionPlan) -> bool {
    node.is::<NestedLoopJoinExec>()
        || node.is::<CrossJoinExec>()
        || node.is::<HashJoinExec>()
        || node.is::<SortMergeJoinExec>()
        || node.is::<PiecewiseMergeJoinExec>()
        || node.is::<UnnestExec>()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use datafusion::execution::SessionStateBuilder;
    use datafusion::prelude::{SessionConfig, SessionContext};

    use super::*;

    /// How often another task of the same thread has had its turn while a query ran.
    async fn turns(sql: &str) -> u64 {
        let state = SessionStateBuilder::new()
            .with_config(SessionConfig::new().with_target_partitions(1))
            .with_default_features()
            .with_physical_optimizer_rule(Arc::new(JoinsYield))
            .build();
        let query = SessionContext::new_with_state(state).sql(sql).await.unwrap();
        let turns = Arc::new(AtomicU64::new(0));
        let counted = turns.clone();
        let other = tokio::spawn(async move {
            loop {
                tokio::task::yield_now().await;
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        let query = tokio::spawn(query.collect());
        assert_eq!(query.await.unwrap().unwrap().len(), 1);
        other.abort();
        turns.load(Ordering::Relaxed)
    }

    #[tokio::test]
    async fn others_have_their_turn_while_a_join_makes_many_rows_of_few() {
        // Some thousand batches of rows.
        let both = "generate_series(1, 4000) a(x), generate_series(1, 4000) b(y)";
        for condition in ["true", "x <> y", "x % 2 = y % 2"] {
            let turns = turns(&format!("SELECT count(*) FROM {both} WHERE {condition} AND x + y > 0")).await;
            assert!(turns >= 4, "{turns} turns of another task, with {condition}");
        }
    }
}
