//! The plans that this node has taken, each until the request that brought it ends.
//!
//! What a plan's operators have built stays reserved for as long as the plan is there: the table of a join, the window of a
//! connection that nobody reads. So a plan goes at once when its request ends, and nothing else keeps one. The worker of
//! datafusion-distributed is not used for that reason: it has plans in a cache that drops what is removed when it is next used, and
//! each plan's session has that worker, so that neither ever goes. Here sessions know the way to plans weakly ([`Own`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use datafusion::common::{DataFusionError, Result as DfResult};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, Partitioning};
use datafusion_distributed::{BroadcastExec, MaybeEncoded};
use tokio::sync::watch;
use url::Url;
use uuid::Uuid;

use super::message::{Head, Task};
use crate::error::{Error, Result};

/// How long rows wait for their plan, which comes by another way.
const PLAN_WITHIN: Duration = Duration::from_secs(10);

/// A part of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    pub statement: Uuid,
    pub task: Task,
}

/// Its plan.
struct Part {
    plan: Arc<dyn ExecutionPlan>,
    task: Arc<TaskContext>,
    /// As those who ask for its rows want them divided. All of them want the same, and they share what it has made.
    headed: OnceLock<Result<Arc<dyn ExecutionPlan>, Arc<DataFusionError>>>,
}

impl Part {
    fn headed(&self, head: Head, body: &[u8]) -> DfResult<Arc<dyn ExecutionPlan>> {
        let headed = self.headed.get_or_init(|| self.with_head(head, body).map_err(Arc::new));
        headed.clone().map_err(DataFusionError::Shared)
    }

    fn with_head(&self, head: Head, body: &[u8]) -> DfResult<Arc<dyn ExecutionPlan>> {
        // What it came with is in the place of this.
        let input = if let Some(divided) = self.plan.downcast_ref::<RepartitionExec>() {
            divided.input()
        } else if let Some(broadcast) = self.plan.downcast_ref::<BroadcastExec>() {
            broadcast.input()
        } else {
            &self.plan
        };
        let input = input.clone();
        let headed: Arc<dyn ExecutionPlan> = match head {
            Head::AsTheyAre => input,
            Head::Broadcast { partitions } => {
                let each = input.output_partitioning().partition_count().max(1);
                Arc::new(BroadcastExec::new(input, partitions / each))
            }
            Head::Partitioned => {
                let partitioning = MaybeEncoded::<Partitioning>::Encoded(body.to_vec());
                let partitioning = partitioning.decode(input.schema(), &self.task)?;
                Arc::new(RepartitionExec::try_new(input, partitioning)?)
            }
        };
        Ok(headed)
    }
}

/// See the module.
#[derive(Default)]
pub struct Taken {
    parts: watch::Sender<HashMap<Key, Arc<Part>>>,
}

impl fmt::Debug for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Taken").field("parts", &self.parts.borrow().len()).finish()
    }
}

impl Taken {
    /// Keeps a plan until what is returned is dropped.
    ///
    /// # Errors
    /// `Invalid`: this part has one already.
    pub fn keep(self: &Arc<Self>, key: Key, plan: Arc<dyn ExecutionPlan>, task: Arc<TaskContext>) -> Result<Kept> {
        let part = Arc::new(Part { plan, task, headed: OnceLock::new() });
        let is_new = self.parts.send_if_modified(|parts| match parts.entry(key) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert(part);
                true
            }
        });
        match is_new {
            true => Ok(Kept { taken: self.clone(), key }),
            false => Err(Error::invalid("this part of the query has a plan already")),
        }
    }

    /// Begins the rows of some of a part's partitions. Its plan may have yet to come.
    ///
    /// # Errors
    /// `Unavailable`: no plan came in time; `Invalid`: there are no such partitions; those of beginning them.
    pub async fn rows(
        &self,
        key: Key,
        partitions: Range<usize>,
        head: Head,
        body: &[u8],
    ) -> Result<Vec<SendableRecordBatchStream>> {
        let part = self.part(key).await?;
        let plan = part.headed(head, body)?;
        let count = plan.output_partitioning().partition_count();
        if partitions.end > count {
            return Err(Error::invalid(format!("a part of {count} partitions is asked for {partitions:?}")));
        }
        let begun: DfResult<Vec<_>> = partitions.map(|partition| plan.execute(partition, part.task.clone())).collect();
        begun.map_err(Error::from)
    }

    async fn part(&self, key: Key) -> Result<Arc<Part>> {
        let mut parts = self.parts.subscribe();
        let come = async {
            let parts = parts.wait_for(|parts| parts.contains_key(&key)).await.ok()?;
            parts.get(&key).cloned()
        };
        match tokio::time::timeout(PLAN_WITHIN, come).await {
            Ok(Some(part)) => Ok(part),
            _ => Err(Error::unavailable("the plan of this part of the query did not come in time")),
        }
    }
}

/// A plan that is kept.
#[derive(Debug)]
pub struct Kept {
    taken: Arc<Taken>,
    key: Key,
}

impl Drop for Kept {
    fn drop(&mut self) {
        let mut gone = None;
        // Nobody waits for one to go.
        self.taken.parts.send_if_modified(|parts| {
            gone = parts.remove(&self.key);
            false
        });
        // Its operators end with it: that is not for under the lock.
        drop(gone);
    }
}

/// The parts of a statement on the node that asks for their rows itself.
#[derive(Debug, Clone)]
pub struct Own {
    /// As plans name the node.
    node: Url,
    statement: Uuid,
    /// A part's session has this. If it kept the plans, the part would keep itself.
    taken: Weak<Taken>,
}

impl Own {
    pub fn new(node: Url, statement: Uuid, taken: &Arc<Taken>) -> Self {
        Self { node, statement, taken: Arc::downgrade(taken) }
    }

    /// Whether a node's name is this one's.
    pub fn is(&self, node: &Url) -> bool {
        self.node == *node
    }

    /// As [`Taken::rows`].
    ///
    /// # Errors
    /// As there; `Unavailable`: the node is stopping.
    pub async fn rows(
        &self,
        task: Task,
        partitions: Range<usize>,
        head: Head,
        body: &[u8],
    ) -> Result<Vec<SendableRecordBatchStream>> {
        let taken = self.taken.upgrade().ok_or_else(|| Error::unavailable("this query node is stopping"))?;
        taken.rows(Key { statement: self.statement, task }, partitions, head, body).await
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::Schema;
    use datafusion::physical_plan::placeholder_row::PlaceholderRowExec;
    use futures::TryStreamExt;

    use super::*;

    fn key(number: usize) -> Key {
        Key { statement: Uuid::nil(), task: Task { query: Uuid::nil(), stage: 1, number } }
    }

    #[tokio::test]
    async fn a_plan_is_there_until_its_request_ends_and_no_longer() {
        let taken = Arc::new(Taken::default());
        let plan: Arc<dyn ExecutionPlan> = Arc::new(PlaceholderRowExec::new(Arc::new(Schema::empty())));
        let task = Arc::new(TaskContext::default());
        let head = Head::Broadcast { partitions: 2 };
        // Asked for before it has come.
        let (rows, kept) = tokio::join!(taken.rows(key(0), 0..2, head, &[]), async {
            tokio::task::yield_now().await;
            taken.keep(key(0), plan.clone(), task.clone()).unwrap()
        });
        for rows in rows.unwrap() {
            let batches: Vec<_> = rows.try_collect().await.unwrap();
            assert_eq!(batches.iter().map(|batch| batch.num_rows()).sum::<usize>(), 1);
        }
        let twice = taken.keep(key(0), plan.clone(), task.clone()).unwrap_err();
        assert_eq!(twice.kind, crate::error::Kind::Invalid, "{twice}");
        let Err(beyond) = taken.rows(key(0), 2..3, head, &[]).await else { panic!("there is no third partition") };
        assert_eq!(beyond.kind, crate::error::Kind::Invalid, "{beyond}");
        assert!(Arc::strong_count(&plan) > 1 && Arc::strong_count(&task) > 1);
        drop(kept);
        assert_eq!((Arc::strong_count(&plan), Arc::strong_count(&task)), (1, 1), "something keeps the plan");
        taken.keep(key(0), plan, task).unwrap();
    }
}
