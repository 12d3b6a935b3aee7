//! SQL: one statement from text to rows or to a change.
//!
//! ```text
//! text -> statement ([`statement`]: what kind, or refused), with the values of its parameters in it ([`bound`])
//!      -> the tables it names, their pointers resolved all at once ([`catalog`])
//!      -> a plan on that one snapshot
//!      -> a query: a stream of rows          ([`Engine::query`])
//!         a change: done once, a row count   ([`Engine::change`]; of rows in [`dml`], of the catalog in [`ddl`])
//! ```
//! What a client's statements have in common (settings, operation ids, transactions) is above that, in [`session`].
//!
//! Planning changes nothing, so that a client may ask what a statement would return. Each statement has a session of its
//! own with its own catalog: two references to a table in one statement see the same version, and nothing a statement
//! does to its session outlives it.
//!
//! Threads of their own make plans and execute them ([`computing`]).
//!
//! Limits: how many statements run and wait ([`admission`]), the memory they share ([`memory`]; more spills to disk, up to a
//! limit), what a query may return ([`rows`]), deadlines. A panic in planning or running becomes an `Internal` error.

pub mod add_files;
pub mod admission;
pub mod alter;
pub mod arguments;
pub mod as_of;
pub mod as_written;
pub mod bound;
pub mod catalog;
pub mod clauses;
pub mod column_types;
pub mod columns;
pub mod computing;
pub mod copy;
pub mod ddl;
pub mod dialect;
pub mod dml;
pub mod faults;
pub mod files;
pub mod floats;
pub mod growing;
pub mod headings;
pub mod information;
pub mod literal;
pub mod memory;
pub mod once;
pub mod overflow;
mod planning;
pub mod procedures;
pub mod rewrite;
pub mod rounding;
mod row_set;
pub mod rows;
pub mod schemas;
pub mod session;
pub mod statement;
pub mod subqueries;
pub mod sum;
pub mod system;
mod system_procedures;
pub mod times;
pub mod tpch;
pub mod transactions;
mod undrop;
pub mod values;
pub mod views;
pub mod yielding;

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arrow::datatypes::{Field, SchemaRef};
use datafusion::common::TableReference;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::datasource::physical_plan::FileScanConfig;
use datafusion::datasource::source::DataSourceExec;
use datafusion::execution::FunctionRegistry;
use datafusion::execution::context::SessionConfig;
use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::execution::session_state::{SessionState, SessionStateBuilder};
use datafusion::logical_expr::{AggregateUDF, DmlStatement, LogicalPlan};
use datafusion::optimizer::Analyzer;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::sql::parser::Statement as ParsedStatement;
use futures::FutureExt;
use lake_client::remote::RemoteStore;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::distributed::{Distributed, Mode};
use crate::error::{Error, Kind, Result, words_of_panic};
use crate::scan::guard::NameDamagedFiles;
use crate::table::pins::Pins;
use crate::table::{Tables, catalog_error};
use admission::{Admission, Slot};
use as_written::AsWritten;
use bound::Bound;
use computing::ComputeThreads;
use ddl::Ddl;
use faults::Faults;
use memory::SharedMemory;
use planning::{Done, Part};
use procedures::{Procedure, apart};
use statement::{Action, Command};

/// The name of the one catalog.
pub const CATALOG: &str = "lake";
/// The namespace of a table named without one; created when it is first needed.
pub const DEFAULT_SCHEMA: &str = "default";
/// Longest statement, in bytes.
pub const MAX_STATEMENT_BYTES: usize = 4 << 20;
/// How long a query waits for what it has to ask the metadata cluster: several times a change of leader.
const METADATA_PATIENCE: Duration = Duration::from_secs(15);
/// Files that an error about reading names.
const FILES_NAMED: usize = 3;

/// Runs statements.
#[derive(Debug)]
pub struct Engine {
    tables: Arc<Tables>,
    template: SessionState,
    computing: ComputeThreads,
    admission: Admission,
    memory: Arc<SharedMemory>,
    /// Queries whose rows are being sent: each ends with its client or at its deadline.
    tasks: TaskTracker,
    max_rows: u64,
    max_bytes: u64,
    /// The metadata cluster, if the metadata is in one.
    cluster: Option<RemoteStore>,
    read_timeout: Duration,
    write_timeout: Duration,
    /// The other nodes, once this one is served.
    distributed: OnceLock<Arc<Distributed>>,
}

/// A statement, planned and not yet run.
pub struct Planned {
    pub command: Command,
    /// The schema of what comes back. Of a change: one column, `count`.
    pub schema: SchemaRef,
    /// The age of the oldest table pointer used because the metadata cluster is away.
    pub stale: Option<Duration>,
    pub deadline: Instant,
    /// What a statement takes whose parameters have no values: a field each, of type Null where any will do. It is not run so.
    pub parameters: Vec<Field>,
    /// The versions that it reads.
    pub pins: Arc<Pins>,
    /// On whose behalf.
    tables: Arc<Tables>,
    /// What can go wrong with single rows.
    faults: Arc<Faults>,
    state: SessionState,
    work: Work,
    /// What its columns are called where the rows leave the node.
    names: AsWritten,
    /// How a query is to be spread over nodes if it may be, and its plan for that.
    spread: Option<Box<(Mode, LogicalPlan)>>,
    slot: Slot,
}

enum Work {
    Query(Box<LogicalPlan>),
    ChangeRows(Box<DmlStatement>),
    Ddl(Box<Ddl>),
    Call(Box<Procedure>),
    CopyTo { plan: Box<LogicalPlan>, overwrite: bool },
}

impl Planned {
    /// Whether it changes something: then [`Engine::change`] runs it, else [`Engine::query`].
    pub fn is_change(&self) -> bool {
        !matches!(self.work, Work::Query(_))
    }

    /// # Errors
    /// `Invalid`: its parameters have no values.
    fn check_bound(&self) -> Result<()> {
        match self.parameters.len() {
            0 => Ok(()),
            count => Err(Error::invalid(format!(
                "the statement has {count} parameters, and no values are bound to them; nothing was done"
            ))),
        }
    }
}

impl Engine {
    /// # Errors
    /// If the directory for spill files cannot be made, or the threads to compute on cannot be had.
    pub fn new(config: &Config, tables: Arc<Tables>) -> Result<Self> {
        let spill = config.dir.join("spill");
        prepare_spill(&spill)
            .map_err(|e| Error::storage(format!("preparing the spill directory {}: {e}", spill.display())))?;
        if !config.allow_local_files {
            tables.storage.keep_to_warehouses();
        }
        let memory = SharedMemory::new(config.memory_limit_bytes, config.statement_memory_bytes);
        let runtime = RuntimeEnvBuilder::new()
            .with_memory_pool(memory.statement())
            .with_metadata_cache_limit(usize::try_from(config.metadata_cache_bytes / 4).unwrap_or(usize::MAX))
            // DataFusion's has no end: a directory that was read once would never be listed again, whatever comes or goes.
            .with_object_list_cache_limit(0)
            .with_disk_manager_builder(
                DiskManagerBuilder::default()
                    .with_mode(DiskManagerMode::Directories(vec![spill]))
                    .with_max_temp_directory_size(config.spill_limit_bytes),
            )
            .build_arc()?;
        let computing = ComputeThreads::start()?;
        let mut session = SessionConfig::new()
            .with_extension(computing.extension())
            .with_default_catalog_and_schema(CATALOG, DEFAULT_SCHEMA)
            .with_create_default_catalog_and_schema(false)
            // The statement's catalog has one ([`information`]).
            .with_information_schema(false)
            .with_target_partitions(config.target_partitions);
        session.options_mut().sql_parser.collect_spans = true;
        // 0.1 in SQL is a decimal, exactly: through a float, 28 digits would come out as 16.
        session.options_mut().sql_parser.parse_float_as_decimal = true;
        let mut rules = Analyzer::new().rules;
        let coercion = rules.iter().position(|rule| rule.name() == "type_coercion").unwrap_or(0);
        rules.insert(coercion, Arc::new(floats::DecimalsMeetFloats));
        rules.insert(0, Arc::new(subqueries::SubqueriesKnowNull));
        rules.push(Arc::new(overflow::IntegersDoNotWrap));
        rules.push(Arc::new(rounding::IntegersAreRounded));
        let mut template = SessionStateBuilder::new()
            .with_analyzer_rules(rules)
            .with_type_planner(Arc::new(column_types::MoreTypes::default()))
            .with_config(session)
            .with_runtime_env(runtime)
            .with_default_features()
            .with_physical_optimizer_rule(Arc::new(yielding::JoinsYield))
            .with_physical_optimizer_rule(Arc::new(NameDamagedFiles))
            .build();
        template.register_udaf(Arc::new(AggregateUDF::from(sum::CheckedSum::default())))?;
        template.register_udtf("tpch", Arc::new(tpch::TpchFunction));
        growing::limit(&mut template, config.memory_limit_bytes)?;
        times::limit(&mut template)?;
        arguments::widen(&mut template)?;
        Ok(Self {
            tables,
            template,
            computing,
            admission: Admission::new(config),
            memory,
            tasks: TaskTracker::new(),
            max_rows: config.max_result_rows.unwrap_or(u64::MAX),
            max_bytes: config.max_result_bytes.unwrap_or(u64::MAX),
            cluster: None,
            read_timeout: config.read_timeout,
            write_timeout: config.write_timeout,
            distributed: OnceLock::new(),
        })
    }

    /// From now on large queries are spread over several nodes. Said once.
    pub fn distribute(&self, distributed: Distributed) {
        // The first stays.
        let _ = self.distributed.set(Arc::new(distributed));
    }

    /// The other nodes, if queries may be spread over them.
    pub fn distributed(&self) -> Option<&Arc<Distributed>> {
        self.distributed.get()
    }

    /// What the sessions of statements are made from.
    pub(crate) fn template(&self) -> &SessionState {
        &self.template
    }

    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The same in a metadata cluster, whose nodes it can list.
    #[must_use]
    pub fn in_cluster(self, cluster: Option<RemoteStore>) -> Self {
        Self { cluster, ..self }
    }

    /// How many statements run now.
    pub fn running(&self) -> usize {
        self.admission.figures().0
    }

    /// How many statements wait for others to end.
    pub fn waiting(&self) -> usize {
        self.admission.figures().1
    }

    /// How much memory statements hold, in bytes.
    pub fn memory_held(&self) -> usize {
        self.memory.figures().0
    }

    /// The tables it works on.
    pub fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// What kind of statement it is, without looking anything up.
    pub fn classify(&self, sql: &str) -> Result<Action> {
        statement::parse(&self.template, sql).map(|(_, action)| action)
    }

    /// How many parameters it has, and whether it is one change with many rows of values for them.
    ///
    /// # Errors
    /// Those of parsing, and of parameters that are written wrongly.
    pub fn parameters_of(&self, sql: &str) -> Result<(usize, bool)> {
        let (mut parsed, _) = statement::parse(&self.template, sql)?;
        let many = bound::takes_many_rows(&parsed);
        Ok((Bound::from(sql).put(&mut parsed)?.0, many))
    }

    /// Plans a statement. Nothing is changed by it.
    ///
    /// `timeout` is what the client asks for, from now on; else the configuration's for its kind of statement.
    pub async fn plan(&self, statement: &Bound, timeout: Option<Duration>) -> Result<Planned> {
        self.plan_in(statement, timeout, &self.tables).await
    }

    /// The same on somebody's behalf: of the tables as [`Tables::within`] shows them.
    pub async fn plan_in(&self, statement: &Bound, timeout: Option<Duration>, tables: &Arc<Tables>) -> Result<Planned> {
        let (parsed, action) = statement::parse(&self.template, &statement.sql)?;
        let default = if action.is_change() { self.write_timeout } else { self.read_timeout };
        let deadline = Instant::now() + timeout.unwrap_or(default);
        let planning = self.plan_parsed(parsed, action, statement, deadline, tables.clone());
        match tokio::time::timeout_at(deadline.into(), AssertUnwindSafe(planning).catch_unwind()).await {
            Ok(Ok(planned)) => planned,
            Ok(Err(panic)) => Err(panicked("planning the statement", panic.as_ref())),
            Err(_) => Err(Error::deadline("planning the statement took longer than its deadline; nothing was done")),
        }
    }

    /// Whether there is such a table now.
    ///
    /// # Errors
    /// `Invalid` for what cannot be a name; the metadata's.
    pub async fn has_table(&self, schema: &str, table: &str, deadline: Instant) -> Result<bool> {
        let ident = catalog::ident(&TableReference::partial(schema, table))?;
        let found = self.tables.metadata.read_table(&ident, deadline).await;
        Ok(found.map_err(|e| catalog_error("looking up a table", e))?.is_some())
    }

    /// Until when a change that begins now must be made.
    pub fn write_deadline(&self, timeout: Option<Duration>) -> Instant {
        Instant::now() + timeout.unwrap_or(self.write_timeout)
    }

    async fn plan_parsed(
        &self,
        mut parsed: ParsedStatement,
        action: Action,
        bound: &Bound,
        deadline: Instant,
        tables: Arc<Tables>,
    ) -> Result<Planned> {
        let slot = self.admission.enter(deadline).await?;
        if let Action::Session(_) = action {
            let command = action.command().as_str();
            return Err(Error::not_supported(format!(
                "{command} is for clients that keep a session; nothing was done"
            )));
        }
        let faults = Arc::new(Faults::of(&parsed, &bound.sql));
        let names = AsWritten::of(&parsed);
        let (unbound, rows) = bound.put(&mut parsed)?;
        if (unbound > 0 || bound.parameters.is_some()) && !action.takes_parameters() {
            let command = action.command().as_str();
            return Err(Error::not_supported(format!("parameters in {command} are not supported; nothing was done")));
        }
        let references = self.template.resolve_table_references(&parsed)?;
        // A change is waited for as long as its client wants; a query that cannot be planned says so soon.
        let patience = match action.is_change() {
            true => deadline,
            false => deadline.min(Instant::now() + METADATA_PATIENCE),
        };
        let found =
            catalog::resolve(self, &tables, &parsed, &references, rows, action.changes_what_is_there(), patience)
                .await?;
        let pins = Arc::new(found.pins.clone());
        // With memory of its own.
        let shared = self.template.runtime_env();
        let runtime = RuntimeEnv { memory_pool: self.memory.statement(), ..shared.as_ref().clone() };
        let mut state = SessionStateBuilder::new_from_existing(self.template.clone())
            .with_session_id(uuid::Uuid::new_v4().to_string())
            .with_runtime_env(Arc::new(runtime))
            .with_catalog_list(found.catalogs.clone())
            .build();
        state.mark_start_execution();
        let (command, stale) = (action.command(), found.stale);
        let part = Part {
            state,
            parsed,
            action,
            found,
            faults: faults.clone(),
            sql: bound.sql.clone(),
            unbound,
            asked: bound.distributed,
            distributed: self.distributed().cloned(),
        };
        let done = match computing::planning(&self.template, part.plan()).await? {
            Ok(done) => done,
            Err(error) => return Err(catalog::suggest(&tables, error, patience).await),
        };
        let Done { mut schema, parameters, state, work, spread } = done;
        if let Work::Query(_) = &work {
            schema = names.put(schema);
        }
        if let Work::Call(call) = &work {
            procedures::check_readable(self, call)?;
        }
        Ok(Planned {
            command,
            schema,
            stale,
            deadline,
            parameters,
            pins,
            tables,
            faults,
            state,
            work,
            names,
            spread,
            slot,
        })
    }

    /// Makes a change and returns how many rows were written. Its commit, once begun, runs to its end even if this
    /// future is dropped.
    pub async fn change(&self, planned: Planned) -> Result<u64> {
        planned.check_bound()?;
        let Planned { tables, faults, state, work, deadline, slot: _slot, .. } = planned;
        // Boxed: whoever waits for this holds it, level by level, and without optimisation on the stack of each.
        let changing = AssertUnwindSafe(async {
            match work {
                Work::ChangeRows(dml) => apart(|| dml::run(&tables, &state, &dml, deadline)).await,
                Work::Call(call) => apart(|| procedures::run(&tables, &state, *call, deadline)).await,
                Work::CopyTo { plan, overwrite } => apart(|| copy::run(self, &state, &plan, overwrite, deadline)).await,
                Work::Ddl(ddl) => apart(|| ddl::run(&tables, &state, *ddl, deadline)).await,
                Work::Query(_) => Err(Error::internal("a query was run as a change")),
            }
        });
        let changed = Box::pin(changing.catch_unwind()).await;
        let changed = changed.unwrap_or_else(|panic| Err(panicked("making the change", panic.as_ref())));
        changed.map_err(|e| faults.explain(e).of_a_change())
    }

    /// Lets no further statement begin. What runs goes on.
    pub fn close(&self) {
        self.admission.close();
        if let Some(distributed) = self.distributed() {
            distributed.parts().close();
        }
    }

    /// Whether it has been told to let none begin.
    pub fn is_closed(&self) -> bool {
        self.admission.is_closed()
    }

    /// Ends the threads that statements compute on; waits at most so long for what they are at.
    pub async fn stop_computing(&self, patience: Duration) {
        self.computing.stop(patience).await;
    }
}

/// Says which files were being read, when reading failed and the message does not name one.
fn name_files(error: Error, plan: &Arc<dyn ExecutionPlan>) -> Error {
    if !matches!(error.kind, Kind::Corrupt | Kind::Storage | Kind::Invalid | Kind::NotFound) {
        return error;
    }
    let mut files = Vec::new();
    // Collecting cannot fail.
    let _ = plan.apply(|node| {
        if let Some(source) = node.downcast_ref::<DataSourceExec>()
            && let Some(scan) = source.data_source().downcast_ref::<FileScanConfig>()
        {
            files
                .extend(scan.file_groups.iter().flat_map(|group| group.iter()).map(|file| format!("/{}", file.path())));
        }
        Ok(TreeNodeRecursion::Continue)
    });
    let concerns_files = error.kind != Kind::Invalid || error.message.contains("Parquet") || is_of_text(&error.message);
    if files.is_empty()
        || !concerns_files
        || files.iter().any(|file| error.message.contains(file.trim_start_matches('/')))
    {
        return error;
    }
    let more = match files.len().saturating_sub(FILES_NAMED) {
        0 => String::new(),
        more => format!(" or {more} more"),
    };
    files.truncate(FILES_NAMED);
    let hint = if is_of_text(&error.message) {
        "; the types of its columns follow from its first rows: make a table with others, and COPY it into that"
    } else {
        ""
    };
    Error { message: format!("{} (while reading {}{more}{hint})", error.message, files.join(", ")), ..error }
}

/// Whether a value in a file of CSV or JSON is not of the type of its column, by Arrow's words.
fn is_of_text(message: &str) -> bool {
    ["rror while parsing value", "whilst decoding field"].iter().any(|words| message.contains(words))
}

fn panicked(doing: &str, panic: &(dyn std::any::Any + Send)) -> Error {
    let words = words_of_panic(panic);
    tracing::error!(doing, panic = words, "a statement panicked");
    Error::internal(format!("{doing} failed inside lake: {words}; please report this"))
}

/// An empty directory: what an earlier run of the node left is of no use.
fn prepare_spill(spill: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(spill) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    std::fs::create_dir_all(spill)
}
