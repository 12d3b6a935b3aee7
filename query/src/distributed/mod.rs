//! One query over many nodes.
//!
//! A large query is cut into stages, and each stage runs as tasks on several query nodes at a time; rows go from node to node
//! between stages. datafusion-distributed plans that and runs the stages; what goes over the wire, who may, and when a part counts
//! as done, is here. Any node coordinates, and takes part in queries that others coordinate.
//!
//! ```text
//! a query, planned for this node
//!   reads less than `distribute_above_bytes`, or other than tables     -> runs here, as ever
//!   fewer than two nodes are there ([`peers`])                         -> runs here
//!   cannot be planned in stages                                        -> runs here
//! planned in stages ([`leaves`]: which node reads which files)         -> parts go to their nodes ([`channel`], [`service`])
//!   all rows have come, each part said that it was done                -> done
//!   a node fails, and the client has no row yet                        -> runs here, from the start, once
//!   a node fails after that; a row fails (division by zero, ...)       -> the query fails
//!   the client goes away, or the deadline passes                       -> every part stops
//! ```
//! What holds:
//! - **Never a short result.** The rows of a part end with a message that says how many they were ([`message`]); an end without it is
//!   a failure, and so is a panic ([`guard`]). A panic or a lost connection looks like an end to the layers below.
//! - **Never other rows.** Scans travel whole, with their deletes and the ids of their columns ([`codec`]), or the query does not. No
//!   two tasks of a stage are on one node, and no file's range is in two.
//! - Parts run with their own node's stores, limits and caches. A node takes so many ([`service`]), and all parts of a statement share
//!   one statement's memory there, which they give back when the query ends, however it does ([`taken`]).
//! - Only nodes of this lake are answered ([`token`]), of the coordinator's version.
//!
//! Changes, EXPLAIN ANALYZE, and queries of anything but tables (files, functions that make rows, `system`) run on one node.

pub mod channel;
pub mod codec;
pub mod guard;
pub mod leaves;
pub mod message;
pub mod peers;
pub mod service;
pub mod taken;
#[cfg(test)]
mod tests;
pub mod token;

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::common::{DataFusionError, Result as DfResult};
use datafusion::execution::session_state::{SessionState, SessionStateBuilder};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::{LogicalPlan, PlanType, StringifiedPlan};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::analyze::AnalyzeExec;
use datafusion::physical_plan::explain::ExplainExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion_distributed::{
    BroadcastExec, DistributedConfig, DistributedExec, DistributedExt, NetworkBoundaryExt, SessionStateBuilderExt,
    WorkerResolver, display_plan_ascii,
};
use futures::StreamExt;
use lake_client::remote::RemoteStore;
use serde::{Deserialize, Serialize};
use url::Url;
use uuid::Uuid;

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::flight::keys::TicketKeys;
use crate::sql::{Engine, computing};
use channel::{Channels, Failure};
use codec::ScanCodec;
use leaves::Spread;
use peers::Peers;
use service::{Parts, WorkerSessions};

/// When a query is spread over several nodes, as a session asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Never.
    Off,
    /// If it reads enough.
    Auto,
    /// Whenever it can be, down to its smallest scan.
    On,
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Mode::Off),
            "auto" => Ok(Mode::Auto),
            "on" => Ok(Mode::On),
            other => Err(Error::invalid(format!("off, auto or on, not {other:?}"))),
        }
    }
}

/// What a node does for sessions that do not ask, and whether they may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Spreads no query, whatever a session asks for.
    Off,
    /// As a session asks, and no query of others.
    Allowed,
    /// As a session asks; of others, the queries that read enough.
    #[default]
    Auto,
    /// As a session asks; of others, every query that can be.
    On,
}

impl Policy {
    /// When a query of a session that asks for this is spread.
    pub fn mode(self, asked: Option<Mode>) -> Mode {
        match self {
            Policy::Off => Mode::Off,
            Policy::Allowed => asked.unwrap_or(Mode::Off),
            Policy::Auto => asked.unwrap_or(Mode::Auto),
            Policy::On => asked.unwrap_or(Mode::On),
        }
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Policy::Off),
            "allowed" => Ok(Policy::Allowed),
            "auto" => Ok(Policy::Auto),
            "on" => Ok(Policy::On),
            other => Err(Error::invalid(format!("off, allowed, auto or on, not {other:?}"))),
        }
    }
}

/// What has come of it on this node.
#[derive(Debug, Default)]
struct Figures {
    queries: AtomicU64,
    fallen_back: AtomicU64,
}

/// See the module.
pub struct Distributed {
    policy: Policy,
    above_bytes: u64,
    /// Most nodes that a query is spread over.
    nodes: usize,
    peers: Peers,
    keys: Arc<TicketKeys>,
    channels: Channels,
    codec: Arc<ScanCodec>,
    parts: Parts,
    figures: Arc<Figures>,
}

impl fmt::Debug for Distributed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Distributed").field("policy", &self.policy).field("parts", &self.parts).finish_non_exhaustive()
    }
}

/// The nodes of one query, as they were when it was planned.
struct Settled(Arc<[Url]>);

impl WorkerResolver for Settled {
    fn get_urls(&self) -> DfResult<Vec<Url>> {
        Ok(self.0.to_vec())
    }
}

/// A query in stages.
struct Staged {
    plan: Arc<dyn ExecutionPlan>,
    task: Arc<TaskContext>,
    failure: Arc<Failure>,
}

impl Distributed {
    /// Of a node with this engine; `cluster`: the metadata cluster that knows the others.
    ///
    /// # Errors
    /// `Invalid`: a node in `distribute_over` is no address.
    pub fn new(config: &Config, engine: &Engine, cluster: Option<RemoteStore>, keys: Arc<TicketKeys>) -> Result<Self> {
        let channels = Channels::new(config.secret.as_ref())?;
        let codec = Arc::new(ScanCodec::new(engine.tables().clone()));
        let sessions = WorkerSessions {
            template: engine.template().clone(),
            memory: engine.memory().clone(),
            codec: codec.clone(),
            channels: channels.clone(),
            statements: Mutex::default(),
        };
        Ok(Self {
            policy: config.distribute,
            above_bytes: config.distribute_above_bytes,
            nodes: config.distribute_nodes,
            peers: Peers::new(cluster, &config.distribute_over, engine.tables().metadata.clone())?,
            parts: Parts::new(sessions, keys.clone(), config.distribute_tasks),
            keys,
            channels,
            codec,
            figures: Arc::default(),
        })
    }

    /// What this node does for queries that others coordinate.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Which nodes there are.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The configuration's.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Queries that were spread, and those of them that ran here after all.
    pub fn counts(&self) -> (u64, u64) {
        let Figures { queries, fallen_back } = self.figures.as_ref();
        (queries.load(Ordering::Relaxed), fallen_back.load(Ordering::Relaxed))
    }

    /// A query in stages, if it is to be and can be.
    async fn staged(
        &self,
        state: &SessionState,
        logical: &LogicalPlan,
        local: &Arc<dyn ExecutionPlan>,
        mode: Mode,
        deadline: Instant,
    ) -> Option<Staged> {
        if mode == Mode::Off || local.is::<AnalyzeExec>() {
            return None;
        }
        let reads = leaves::reads(local)?;
        if mode == Mode::Auto && reads.bytes < self.above_bytes {
            return None;
        }
        match self.in_stages(state, logical, local, &reads, mode, deadline).await {
            Ok(staged) => staged,
            Err(error) => {
                tracing::warn!(%error, "a query could not be spread over the query nodes and runs on this one");
                None
            }
        }
    }

    async fn in_stages(
        &self,
        state: &SessionState,
        logical: &LogicalPlan,
        local: &Arc<dyn ExecutionPlan>,
        reads: &leaves::Reads,
        mode: Mode,
        deadline: Instant,
    ) -> Result<Option<Staged>> {
        let nodes = self.peers.now(deadline).await?;
        let first = self.peers.of_shard(reads.table);
        let nodes = peers::preferred(&nodes, &first, reads.largest.as_deref().unwrap_or_default(), self.nodes);
        if nodes.len() < 2 {
            return Ok(None);
        }
        let nodes: Arc<[Url]> = nodes.into();
        let spread = Spread { nodes: nodes.clone(), everything: mode == Mode::On };
        let failure = Arc::new(Failure::default());
        let token = token::sign(&self.keys, Uuid::new_v4(), deadline).await?;
        let state = SessionStateBuilder::new_from_existing(state.clone())
            .with_distributed_option_extension(DistributedConfig::default())
            .with_distributed_metrics_collection(false)?
            .with_distributed_children_isolator_unions(false)?
            .with_distributed_max_tasks_per_stage(nodes.len())?
            .with_distributed_passthrough_headers(token.into_headers())?
            .with_distributed_worker_resolver(Settled(nodes))
            .with_distributed_channel_resolver(self.channels.noting(failure.clone()))
            .with_distributed_user_codec_arc(self.codec.clone())
            .with_distributed_desired_task_count_handler(spread.clone())
            .with_distributed_scale_up_leaf_node_handler(spread.clone())
            .with_distributed_route_tasks_handler(spread)
            .with_distributed_planner()
            .build();
        let plan = without_broadcasts_to_one(computing::physical_plan(&state, logical).await?)?;
        let is_staged = plan.is::<DistributedExec>() && head_is_sound(&plan) && has_same_columns(&plan, local);
        Ok(is_staged.then(|| Staged { plan, task: state.task_ctx(), failure }))
    }

    /// What EXPLAIN shows of a query in stages.
    async fn explained(
        &self,
        state: &SessionState,
        logical: &LogicalPlan,
        explain: &ExplainExec,
        mode: Mode,
        deadline: Instant,
    ) -> Option<Arc<dyn ExecutionPlan>> {
        let LogicalPlan::Explain(of) = logical else { return None };
        let local = computing::physical_plan(state, &of.plan).await.ok()?;
        let staged = self.staged(state, &of.plan, &local, mode, deadline).await?;
        let mut plans = explain.stringified_plans().to_vec();
        plans.retain(|plan| plan.plan_type != PlanType::FinalPhysicalPlan);
        plans.push(StringifiedPlan::new(PlanType::FinalPhysicalPlan, display_plan_ascii(staged.plan.as_ref(), false)));
        Some(Arc::new(ExplainExec::new(explain.schema(), plans, explain.verbose())))
    }
}

/// The plan without broadcasts that only one task reads, above the first boundaries between nodes: where the planner has left out a
/// boundary, they hand on their input, and in a task of their own, whose panic looks like an end.
fn without_broadcasts_to_one(plan: Arc<dyn ExecutionPlan>) -> DfResult<Arc<dyn ExecutionPlan>> {
    let plan = plan.transform_down(|mut node| {
        let mut changed = false;
        while let Some(broadcast) = node.downcast_ref::<BroadcastExec>().filter(|of| of.consumer_task_count() == 1) {
            node = broadcast.input().clone();
            changed = true;
        }
        let next = match node.is_network_boundary() {
            true => TreeNodeRecursion::Jump,
            false => TreeNodeRecursion::Continue,
        };
        Ok(Transformed::new(node, changed, next))
    });
    plan.data()
}

/// Whether nothing above the first boundary between nodes can take a panic for an end: what is below it has a guard.
fn head_is_sound(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let mut sound = true;
    let visited = plan.apply(|node| {
        if node.is_network_boundary() {
            return Ok(TreeNodeRecursion::Jump);
        }
        sound &= !node.is::<BroadcastExec>();
        Ok(TreeNodeRecursion::Continue)
    });
    visited.is_ok() && sound
}

fn has_same_columns(plan: &Arc<dyn ExecutionPlan>, other: &Arc<dyn ExecutionPlan>) -> bool {
    let (these, those) = (plan.schema(), other.schema());
    these.fields().len() == those.fields().len()
        && these
            .fields()
            .iter()
            .zip(those.fields())
            .all(|(a, b)| a.name() == b.name() && a.data_type() == b.data_type())
}

/// Whether a failure may be the other nodes' own, so that the query may well run here.
fn may_run_here(error: &Error) -> bool {
    matches!(
        error.kind,
        Kind::Unavailable | Kind::Exhausted | Kind::Internal | Kind::Storage | Kind::NotSupported | Kind::Denied
    )
}

/// The rows of a query in stages.
struct Running {
    rows: SendableRecordBatchStream,
    /// Of the nodes; `None`: it runs here.
    failure: Option<Arc<Failure>>,
    /// How it runs here, until the first row was given away.
    here: Option<(Arc<dyn ExecutionPlan>, Arc<TaskContext>)>,
    figures: Arc<Figures>,
}

impl Running {
    /// What comes next, from the nodes or, where they fail first, from here.
    async fn next(&mut self) -> DfResult<Option<arrow::array::RecordBatch>> {
        loop {
            let next = match &self.failure {
                None => self.rows.next().await,
                Some(failure) => tokio::select! {
                    biased;
                    next = self.rows.next() => next,
                    error = failure.met() => Some(Err(error.into_datafusion())),
                },
            };
            let error = match next {
                None => return Ok(None),
                Some(Ok(batch)) => {
                    self.here = None;
                    return Ok(Some(batch));
                }
                Some(Err(error)) => Error::from(error),
            };
            let Some((plan, task)) = self.here.take().filter(|_| may_run_here(&error)) else {
                return Err(error.into_datafusion());
            };
            tracing::warn!(%error, "a query that was spread over the query nodes failed and runs on this one");
            self.figures.fallen_back.fetch_add(1, Ordering::Relaxed);
            (self.rows, self.failure) = (computing::execute(&plan, task)?, None);
        }
    }
}

impl Engine {
    /// Begins a query that was planned for this node: here, or spread over several. `spread`: how it is to be, and its logical plan.
    ///
    /// # Errors
    /// Those of running it here.
    pub(crate) async fn begin(
        &self,
        state: &SessionState,
        local: Arc<dyn ExecutionPlan>,
        spread: Option<&(Mode, LogicalPlan)>,
        deadline: Instant,
    ) -> DfResult<(Arc<dyn ExecutionPlan>, SendableRecordBatchStream)> {
        let here = |plan: Arc<dyn ExecutionPlan>| -> DfResult<_> {
            let rows = computing::execute(&plan, state.task_ctx())?;
            Ok((plan, rows))
        };
        let (Some(distributed), Some((mode, logical))) = (self.distributed(), spread) else { return here(local) };
        if let Some(explain) = local.downcast_ref::<ExplainExec>() {
            let explained = distributed.explained(state, logical, explain, *mode, deadline).await;
            return here(explained.unwrap_or(local));
        }
        let Some(staged) = distributed.staged(state, logical, &local, *mode, deadline).await else {
            return here(local);
        };
        let figures = distributed.figures.clone();
        figures.queries.fetch_add(1, Ordering::Relaxed);
        let running = Running {
            rows: computing::execute(&staged.plan, staged.task)?,
            failure: Some(staged.failure),
            here: Some((local.clone(), state.task_ctx())),
            figures,
        };
        let rows = futures::stream::try_unfold(running, |mut running| async move {
            let next = running.next().await?;
            Ok::<_, DataFusionError>(next.map(|batch| (batch, running)))
        });
        let rows = RecordBatchStreamAdapter::new(local.schema(), rows);
        Ok((local, Box::pin(rows)))
    }
}
