//! Joins give way. From one batch of input a join can make thousands, and try millions of pairs of which it keeps none, each in one
//! poll of its consumer; nothing that it reads is asked meanwhile, and only what is read gives way by itself. The thread would have
//! no other work for so long, neither small statements nor the cancelling of this very query.
//!
//! [`JoinsYield`] puts two nodes around each:
//! - [`TurnExec`] above: once its task's budget of batches is spent, other tasks have their turn. It notes when a poll begins.
//! - [`SlicesExec`] above what a hash join or a nested loop join reads row by row (the right): a join goes on until it has a batch of
//!   rows for its consumer, over any number of batches that have none, so its input ends its turn after [`TURN`]. And it hands out
//!   slices, of which each is worth about a turn: how long the join was at the last one says how large the next one is.
//!
//! Both go to other nodes with the joins of a query in stages ([`encode`]).

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::common::{Result, Statistics, internal_err};
use datafusion::execution::{RecordBatchStream, SendableRecordBatchStream, TaskContext};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::coop::make_cooperative;
use datafusion::physical_plan::execution_plan::{CardinalityEffect, SchedulingType};
use datafusion::physical_plan::joins::{
    CrossJoinExec, HashJoinExec, NestedLoopJoinExec, PiecewiseMergeJoinExec, SortMergeJoinExec,
};
use datafusion::physical_plan::unnest::UnnestExec;
use datafusion::physical_plan::{
    ChildStats, ChildrenPropertiesMode, DisplayAs, DisplayFormatType, ExecutionPlan, PhysicalExpr, PlanProperties,
    ReplaceChildrenOptions, StatisticsArgs,
};
use futures::{Stream, StreamExt};

/// How long a join may be at it before others have their turn.
const TURN: Duration = Duration::from_millis(10);
/// Rows of the first slice: each may meet all rows of the other side.
const FIRST_ROWS: usize = 256;

/// The rule that makes all joins, and what unfolds lists, give way to other tasks.
#[derive(Debug)]
pub struct JoinsYield;

impl PhysicalOptimizerRule for JoinsYield {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|node| match multiplies(node.as_ref()) {
            true => {
                let node = sliced(node)?;
                Ok(Transformed::yes(Arc::new(TurnExec::new(node)) as Arc<dyn ExecutionPlan>))
            }
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

/// A join that may be at many batches in one poll reads slices of its right side. Its left one it collects.
fn sliced(join: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    if !join.is::<NestedLoopJoinExec>() && !join.is::<HashJoinExec>() {
        return Ok(join);
    }
    let mut children: Vec<_> = join.children().into_iter().cloned().collect();
    let Some(right) = children.pop() else { return Ok(join) };
    children.push(Arc::new(SlicesExec { input: right }));
    join.replace_children(children, ReplaceChildrenOptions::new(ChildrenPropertiesMode::Keep))
}

/// What another node makes of these nodes.
const ENCODED_TURN: &[u8] = b"T";
const ENCODED_SLICES: &[u8] = b"S";

/// What one of these nodes, whose input travels beside it, is to other query nodes. None: it is no such node.
pub fn encode(node: &dyn ExecutionPlan) -> Option<&'static [u8]> {
    match (node.is::<TurnExec>(), node.is::<SlicesExec>()) {
        (true, _) => Some(ENCODED_TURN),
        (false, true) => Some(ENCODED_SLICES),
        (false, false) => None,
    }
}

/// The node that another one has encoded. None: these bytes are of no such node.
///
/// # Errors
/// If it came without its input.
pub fn decode(bytes: &[u8], inputs: &[Arc<dyn ExecutionPlan>]) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    if ![ENCODED_TURN, ENCODED_SLICES].contains(&bytes) {
        return Ok(None);
    }
    let [input] = inputs else { return internal_err!("a part of a plan came with {} inputs, not one", inputs.len()) };
    Ok(Some(match bytes == ENCODED_TURN {
        true => Arc::new(TurnExec::new(input.clone())),
        false => Arc::new(SlicesExec { input: input.clone() }),
    }))
}

/// When the poll of a partition of a join began that is under way: what its input goes by.
#[derive(Debug)]
struct Turn {
    origin: Instant,
    /// Nanoseconds after the origin.
    began: AtomicU64,
}

impl Turn {
    fn new() -> Self {
        Self { origin: Instant::now(), began: AtomicU64::new(0) }
    }

    fn begin(&self) {
        let since = u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.began.store(since, Ordering::Relaxed);
    }

    fn began(&self) -> Instant {
        self.origin + Duration::from_nanos(self.began.load(Ordering::Relaxed))
    }
}

/// What passes rows through, above a join.
#[derive(Debug)]
struct TurnExec {
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl TurnExec {
    fn new(input: Arc<dyn ExecutionPlan>) -> Self {
        let properties = PlanProperties::clone(input.properties()).with_scheduling_type(SchedulingType::Cooperative);
        Self { input, properties: Arc::new(properties) }
    }
}

impl DisplayAs for TurnExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TurnExec")
    }
}

impl ExecutionPlan for TurnExec {
    fn name(&self) -> &str {
        "TurnExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(Self::new(only(children)?)))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let turn = Arc::new(Turn::new());
        // The slices next below are this join's: a join between would have a turn of its own.
        let config = context.session_config().clone().with_extension(turn.clone());
        let context = TaskContext::new(
            context.task_id(),
            context.session_id(),
            config,
            context.scalar_functions().clone(),
            context.higher_order_functions().clone(),
            context.aggregate_functions().clone(),
            context.window_functions().clone(),
            context.runtime_env(),
        );
        let rows = self.input.execute(partition, Arc::new(context))?;
        Ok(make_cooperative(Box::pin(Turns { rows, turn })))
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(partition)]
    }

    fn statistics_from_inputs(&self, inputs: &[Arc<Statistics>], _: &StatisticsArgs) -> Result<Arc<Statistics>> {
        of_input(inputs)
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::Equal
    }
}

/// What hands rows to a join slice by slice.
#[derive(Debug)]
struct SlicesExec {
    input: Arc<dyn ExecutionPlan>,
}

impl DisplayAs for SlicesExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SlicesExec")
    }
}

impl ExecutionPlan for SlicesExec {
    fn name(&self) -> &str {
        "SlicesExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(Self { input: only(children)? }))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let rows = self.input.execute(partition, context.clone())?;
        let Some(turn) = context.session_config().get_extension::<Turn>() else { return Ok(rows) };
        let most = context.session_config().batch_size().max(1);
        let size = FIRST_ROWS.min(most);
        Ok(Box::pin(Slices { rows, turn, rest: None, size, most, handed: None, gave_way: false }))
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(partition)]
    }

    fn statistics_from_inputs(&self, inputs: &[Arc<Statistics>], _: &StatisticsArgs) -> Result<Arc<Statistics>> {
        of_input(inputs)
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::Equal
    }
}

fn only(mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
    match (children.pop(), children.is_empty()) {
        (Some(input), true) => Ok(input),
        _ => internal_err!("what gives way is above one part of a plan"),
    }
}

fn of_input(inputs: &[Arc<Statistics>]) -> Result<Arc<Statistics>> {
    match inputs {
        [input] => Ok(input.clone()),
        _ => internal_err!("what gives way is above one part of a plan"),
    }
}

/// The rows of a join, each of whose polls is a turn.
struct Turns {
    rows: SendableRecordBatchStream,
    turn: Arc<Turn>,
}

impl Stream for Turns {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.turn.begin();
        self.rows.poll_next_unpin(context)
    }
}

impl RecordBatchStream for Turns {
    fn schema(&self) -> SchemaRef {
        self.rows.schema()
    }
}

/// The rows that a join reads.
struct Slices {
    rows: SendableRecordBatchStream,
    turn: Arc<Turn>,
    /// What is left of a batch.
    rest: Option<RecordBatch>,
    /// Rows of the next slice.
    size: usize,
    most: usize,
    /// When the join got the last slice, if it has not come back since.
    handed: Option<Instant>,
    /// Others have had their turn since the last slice: once is enough, however long the join takes before it asks.
    gave_way: bool,
}

impl Slices {
    /// Takes the next slice off a batch.
    fn hand(&mut self, batch: RecordBatch) -> RecordBatch {
        self.handed = Some(Instant::now());
        self.gave_way = false;
        let rows = batch.num_rows();
        if rows <= self.size {
            return batch;
        }
        self.rest = Some(batch.slice(self.size, rows - self.size));
        batch.slice(0, self.size)
    }
}

/// Rows of the next slice, after one of `size` that took so long.
fn next_size(size: usize, took: Duration, most: usize) -> usize {
    let turn = TURN.as_nanos();
    let took = took.as_nanos();
    if took > turn {
        let part = (size as u128) * turn / took;
        return usize::try_from(part).unwrap_or(most).clamp(1, most);
    }
    if took < turn / 4 { size.saturating_mul(2).min(most) } else { size }
}

impl Stream for Slices {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let (now, began) = (Instant::now(), self.turn.began());
        if let Some(handed) = self.handed.take() {
            // What was done before this turn was others' work, in part.
            let took = now.saturating_duration_since(handed.max(began));
            self.size = next_size(self.size, took, self.most);
        }
        if !self.gave_way && now.saturating_duration_since(began) >= TURN {
            self.gave_way = true;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let batch = match self.rest.take() {
            Some(rest) => rest,
            None => match ready!(self.rows.poll_next_unpin(context)) {
                Some(Ok(batch)) => batch,
                end => return Poll::Ready(end),
            },
        };
        Poll::Ready(Some(Ok(self.hand(batch))))
    }
}

impl RecordBatchStream for Slices {
    fn schema(&self) -> SchemaRef {
        self.rows.schema()
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::Int64Type;
    use datafusion::dataframe::DataFrame;
    use datafusion::execution::SessionStateBuilder;
    use datafusion::prelude::{SessionConfig, SessionContext};

    use super::*;

    async fn query(sql: &str) -> DataFrame {
        let state = SessionStateBuilder::new()
            .with_config(SessionConfig::new().with_target_partitions(1))
            .with_default_features()
            .with_physical_optimizer_rule(Arc::new(JoinsYield))
            .build();
        SessionContext::new_with_state(state).sql(sql).await.unwrap()
    }

    /// How often another task of the same thread has had its turn while a query ran.
    async fn turns(sql: &str) -> u64 {
        let query = query(sql).await;
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

    #[tokio::test]
    async fn a_join_that_finds_nothing_gives_way_and_can_be_stopped() {
        let both = "generate_series(1, 20000) a(x), generate_series(1, 20000) b(y)";
        for condition in ["x + y = 1", "x / 1000000 = y / 1000000 AND x + y = 1"] {
            let query = query(&format!("SELECT count(*) FROM {both} WHERE {condition}")).await;
            let query = tokio::spawn(query.collect());
            // Another task of the thread has its turns long before the query could end.
            // (One that yields to the runtime has its next turn when all others have had many.)
            let (abort, mut turns) = (query.abort_handle(), 0);
            let stop = std::future::poll_fn(move |context| {
                turns += 1;
                if turns > 20 {
                    abort.abort();
                    return Poll::Ready(());
                }
                context.waker().wake_by_ref();
                Poll::Pending
            });
            tokio::spawn(stop);
            let ended = query.await;
            assert!(ended.as_ref().is_err_and(|error| error.is_cancelled()), "{condition}: {ended:?}");
        }
    }

    #[tokio::test]
    async fn slices_lose_no_row() {
        let both = "generate_series(1, 2000) a(x) FULL JOIN generate_series(1001, 3000) b(y)";
        for condition in ["x = y", "x = y AND x <> 1500", "x - y = 0", "x >= y AND x <= y"] {
            let counted = format!("SELECT count(*), count(x), count(y), sum(x), sum(y) FROM {both} ON {condition}");
            let rows = query(&counted).await.collect().await.unwrap();
            let figures: Vec<i64> =
                rows[0].columns().iter().map(|column| column.as_primitive::<Int64Type>().value(0)).collect();
            let all = if condition.contains("1500") { 3_001 } else { 3_000 };
            assert_eq!(figures, [all, 2_000, 2_000, 2_001_000, 4_001_000], "{condition}");
        }
    }

    #[test]
    fn a_slice_is_worth_a_turn() {
        let ms = Duration::from_millis;
        assert_eq!(next_size(256, ms(1), 8192), 512);
        assert_eq!(next_size(8192, ms(0), 8192), 8192);
        assert_eq!(next_size(256, ms(5), 8192), 256);
        assert_eq!(next_size(256, ms(40), 8192), 64);
        assert_eq!(next_size(3, ms(4000), 8192), 1);
    }
}
