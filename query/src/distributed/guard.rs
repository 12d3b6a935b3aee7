//! A worker's panic is an error.
//!
//! What runs below a broadcast runs in a task of its own, and where that panics, those who read from it see an end, and take
//! what they have for all. So whatever a worker runs is put behind [`Catching`], which makes errors of panics: the whole of a
//! task, and what is below each broadcast.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::common::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    ChildrenPropertiesMode, DisplayAs, DisplayFormatType, ExecutionPlan, PhysicalExpr, PlanProperties,
    ReplaceChildrenOptions,
};
use datafusion_distributed::BroadcastExec;
use futures::StreamExt;

use crate::error::{Error, words_of_panic};
use crate::sql::computing;

/// Puts everything of a worker's plan that may panic behind a guard.
///
/// # Errors
/// Those of rebuilding the plan.
pub fn rewrite(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let plan = plan.transform_up(|node| match node.is::<BroadcastExec>() {
        true => below(node).map(Transformed::yes),
        false => Ok(Transformed::no(node)),
    });
    let plan = plan.data()?;
    // What distributes rows to those who ask stays at the head: it is replaced when they are known.
    let guarded: Arc<dyn ExecutionPlan> = match (plan.is::<BroadcastExec>(), plan.is::<RepartitionExec>()) {
        (true, _) => plan,
        (false, true) => below(plan)?,
        (false, false) => Arc::new(Catching::new(plan)),
    };
    Ok(guarded)
}

/// The node with guards below it.
fn below(node: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let guarded = |child: &Arc<dyn ExecutionPlan>| Arc::new(Catching::new(child.clone())) as Arc<dyn ExecutionPlan>;
    let children = node.children().into_iter().map(guarded).collect();
    node.replace_children(children, ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute))
}

fn failed(panic: &(dyn Any + Send)) -> DataFusionError {
    let words = words_of_panic(panic);
    tracing::error!(panic = words, "a part of a query panicked");
    Error::internal(format!("a part of the query failed inside lake: {words}; please report this")).into_datafusion()
}

/// In tests, what comes next panics once.
#[cfg(test)]
pub(super) static PANICS: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

fn planted() {
    #[cfg(test)]
    if PANICS.swap(false, std::sync::atomic::Ordering::SeqCst) {
        panic!("planted");
    }
}

/// Passes rows through; where making them panics, an error comes.
#[derive(Debug)]
struct Catching {
    inner: Arc<dyn ExecutionPlan>,
}

impl Catching {
    fn new(inner: Arc<dyn ExecutionPlan>) -> Self {
        Self { inner }
    }
}

impl DisplayAs for Catching {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Catching")
    }
}

impl ExecutionPlan for Catching {
    fn name(&self) -> &str {
        "Catching"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.inner.properties()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.inner]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        match (children.pop(), children.is_empty()) {
            (Some(inner), true) => Ok(Arc::new(Self { inner })),
            _ => Err(DataFusionError::Internal("a guard is of one part of a plan".to_owned())),
        }
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let rows = catch_unwind(AssertUnwindSafe(|| computing::execute_partition(&self.inner, partition, context)));
        let rows = rows.unwrap_or_else(|panic| Err(failed(panic.as_ref())))?;
        let schema = rows.schema();
        let rows = rows.inspect(|_| planted());
        // It ends with the panic.
        let rows = AssertUnwindSafe(rows).catch_unwind();
        let rows = rows.map(|batch| batch.unwrap_or_else(|panic| Err(failed(panic.as_ref()))));
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
    }
}
