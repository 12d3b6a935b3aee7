//! `CALL system.<procedure>(...)`: what is done to a table's history and files, and not to its rows.
//!
//! Arguments come in order or by name (`name => value`); a value may be any expression of constants. The answer is a count.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::datatypes::{DataType, TimeUnit};
use datafusion::common::{ScalarValue, TableReference};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::LogicalPlanBuilder;
use datafusion::physical_plan::collect;
use datafusion::sql::sqlparser::ast::{
    Expr, Function, FunctionArg, FunctionArgExpr, FunctionArgOperator, FunctionArguments,
};
use iceberg::spec::SnapshotRetention;
use lake_client::catalog::TableIdent;

use super::add_files;
use super::catalog::ident;
use super::rewrite::{self, Strategy};
use super::statement::{normalize, refused};
use super::system::SYSTEM;
use super::{CATALOG, Engine};
use crate::error::{Error, Result};
use crate::table::version::Edit;
use crate::table::{Table, Tables, history, maintenance, numbers, orphans};
use crate::words::{did_you_mean, nearest};

const DAY_MS: i64 = 24 * 3600 * 1000;

/// Procedures, and what they take.
const PROCEDURES: [(&[&str], &[&str]); 12] = [
    (&["rollback_to_snapshot", "set_current_snapshot", "cherrypick_snapshot"], &["table", "snapshot_id"]),
    (&["rollback_to_timestamp"], &["table", "timestamp"]),
    (&["fast_forward"], &["table", "branch", "to"]),
    (&["create_tag"], &["table", "name", "snapshot_id", "retain_days"]),
    (
        &["create_branch"],
        &["table", "name", "snapshot_id", "retain_days", "snapshot_retain_days", "min_snapshots_to_keep"],
    ),
    (&["drop_tag", "drop_branch"], &["table", "name"]),
    (&["expire_snapshots"], &["table", "older_than", "retain_last", "dry_run"]),
    (
        &["rewrite_data_files"],
        &["table", "min_input_files", "strategy", "sort_order", "delete_file_threshold", "dry_run", "where"],
    ),
    (&["rewrite_manifests"], &["table"]),
    (&["remove_orphan_files"], &["table", "older_than_hours", "dry_run"]),
    (&["register_table"], &["table", "metadata_file"]),
    (&["add_files"], &["table", "source", "dry_run"]),
];

/// A procedure and what it is called with.
#[derive(Debug)]
pub enum Procedure {
    RollbackToSnapshot { table: TableIdent, snapshot: i64 },
    RollbackToTimestamp { table: TableIdent, before_ms: i64 },
    SetCurrentSnapshot { table: TableIdent, snapshot: i64 },
    CherrypickSnapshot { table: TableIdent, snapshot: i64 },
    FastForward { table: TableIdent, branch: String, to: String },
    CreateRef { table: TableIdent, name: String, snapshot: Option<i64>, retention: SnapshotRetention },
    DropRef { table: TableIdent, name: String, branch: bool },
    ExpireSnapshots { table: TableIdent, older_than_ms: Option<i64>, retain_last: Option<u64>, dry_run: bool },
    RewriteDataFiles { table: TableIdent, strategy: Strategy, condition: Option<String>, dry_run: bool },
    RewriteManifests { table: TableIdent },
    RemoveOrphanFiles { table: TableIdent, older_than: Duration, dry_run: bool },
    RegisterTable { table: TableIdent, metadata_file: String },
    AddFiles { table: TableIdent, source: String, dry_run: bool },
}

/// What CALL asks for.
///
/// # Errors
/// `NotFound` for a procedure that does not exist, `Invalid` for wrong arguments.
pub async fn plan(state: &SessionState, call: &Function) -> Result<Procedure> {
    let parts: Option<Vec<String>> = call.name.0.iter().map(|part| part.as_ident().map(normalize)).collect();
    let name = match parts.as_deref() {
        Some([system, name]) if system == SYSTEM => name.clone(),
        Some([catalog, system, name]) if catalog == CATALOG && system == SYSTEM => name.clone(),
        _ => {
            return Err(Error::not_found(format!(
                "there is no procedure {}; they are in the schema {SYSTEM}",
                call.name
            )));
        }
    };
    let known = PROCEDURES.iter().find(|(names, _)| names.contains(&name.as_str()));
    let (_, parameters) = known.ok_or_else(|| {
        let mut names: Vec<&str> = PROCEDURES.iter().flat_map(|(names, _)| names.iter().copied()).collect();
        names.sort_unstable();
        Error::not_found(format!(
            "there is no procedure {SYSTEM}.{name}{} (there are: {})",
            did_you_mean(nearest(&name, names.iter().copied())),
            names.join(", ")
        ))
    })?;
    let args = arguments(state, &name, parameters, call).await?;
    let table = args.text("table")?.ok_or_else(|| args.missing("table"))?;
    let table = ident(&TableReference::parse_str(&table))?;
    Ok(match name.as_str() {
        "rollback_to_snapshot" => {
            Procedure::RollbackToSnapshot { table, snapshot: args.required_number("snapshot_id")? }
        }
        "rollback_to_timestamp" => {
            let before_ms = args.timestamp_ms("timestamp")?.ok_or_else(|| args.missing("timestamp"))?;
            Procedure::RollbackToTimestamp { table, before_ms }
        }
        "set_current_snapshot" => {
            Procedure::SetCurrentSnapshot { table, snapshot: args.required_number("snapshot_id")? }
        }
        "cherrypick_snapshot" => {
            Procedure::CherrypickSnapshot { table, snapshot: args.required_number("snapshot_id")? }
        }
        "fast_forward" => {
            Procedure::FastForward { table, branch: args.required_text("branch")?, to: args.required_text("to")? }
        }
        "create_tag" | "create_branch" => Procedure::CreateRef {
            table,
            name: args.required_text("name")?,
            snapshot: args.number("snapshot_id")?,
            retention: args.retention(name == "create_branch")?,
        },
        "drop_tag" | "drop_branch" => {
            Procedure::DropRef { table, name: args.required_text("name")?, branch: name == "drop_branch" }
        }
        "expire_snapshots" => Procedure::ExpireSnapshots {
            table,
            older_than_ms: args.timestamp_ms("older_than")?,
            retain_last: args.count("retain_last")?,
            dry_run: args.boolean("dry_run")?.unwrap_or(false),
        },
        "rewrite_data_files" => {
            let (strategy, order) = (args.text("strategy")?, args.text("sort_order")?);
            let (files, deletes) = (args.count("min_input_files")?, args.count("delete_file_threshold")?);
            let strategy = Strategy::new(strategy.as_deref(), order, files, deletes);
            let strategy = strategy.map_err(|e| e.while_doing(format_args!("{SYSTEM}.{name}")))?;
            let (condition, dry_run) = (args.text("where")?, args.boolean("dry_run")?.unwrap_or(false));
            Procedure::RewriteDataFiles { table, strategy, condition, dry_run }
        }
        "rewrite_manifests" => Procedure::RewriteManifests { table },
        "remove_orphan_files" => {
            let hours = args.count("older_than_hours")?;
            let older_than = hours.map_or(orphans::ORPHAN_AGE, |hours| Duration::from_secs(hours.saturating_mul(3600)));
            if older_than < orphans::ORPHAN_AGE_LEAST {
                return Err(Error::invalid(format!(
                    "{SYSTEM}.remove_orphan_files: files younger than {} hours may belong to a statement that is running",
                    orphans::ORPHAN_AGE_LEAST.as_secs() / 3600
                )));
            }
            Procedure::RemoveOrphanFiles { table, older_than, dry_run: args.boolean("dry_run")?.unwrap_or(true) }
        }
        "add_files" => {
            let source = args.required_text("source")?;
            Procedure::AddFiles { table, source, dry_run: args.boolean("dry_run")?.unwrap_or(false) }
        }
        _ => Procedure::RegisterTable { table, metadata_file: args.required_text("metadata_file")? },
    })
}

/// What lies in the warehouse may be read, and elsewhere what the configuration allows.
///
/// # Errors
/// `Denied` for other files that a procedure would read.
pub fn check_readable(engine: &Engine, call: &Procedure) -> Result<()> {
    let (Procedure::AddFiles { source: location, .. } | Procedure::RegisterTable { metadata_file: location, .. }) =
        call
    else {
        return Ok(());
    };
    match engine.tables.storage.may_be_named(location) {
        true => Ok(()),
        false => Err(Error::denied(format!(
            "{location} is outside of every warehouse, and this node may not read there (allow_local_files)"
        ))),
    }
}

/// Does it and returns the count.
pub async fn run(tables: &Arc<Tables>, state: &SessionState, call: Procedure, deadline: Instant) -> Result<u64> {
    let load = move |ident: TableIdent| async move { load(tables, &ident, deadline).await };
    let edited = move |ident: TableIdent, edit: Edit| async move {
        let table = load(ident).await?;
        tables.edit(&table, edit, deadline).await.map(|()| 0)
    };
    match call {
        Procedure::RollbackToSnapshot { table, snapshot } => {
            apart(move || edited(table, maintenance::set_current(snapshot, true))).await
        }
        Procedure::RollbackToTimestamp { table, before_ms } => {
            apart(move || edited(table, maintenance::rollback_to_timestamp(before_ms))).await
        }
        Procedure::SetCurrentSnapshot { table, snapshot } => {
            apart(move || edited(table, maintenance::set_current(snapshot, false))).await
        }
        Procedure::CherrypickSnapshot { table, snapshot } => {
            let picked = move || async move {
                let table = load(table).await?;
                history::cherrypick_snapshot(tables, &table, snapshot, deadline).await.map(|()| 0)
            };
            apart(picked).await
        }
        Procedure::FastForward { table, branch, to } => {
            apart(move || edited(table, history::fast_forward(branch, to))).await
        }
        Procedure::CreateRef { table, name, snapshot, retention } => {
            apart(move || edited(table, maintenance::create_ref(name, snapshot, retention))).await
        }
        Procedure::DropRef { table, name, branch } => {
            apart(move || edited(table, maintenance::drop_ref(name, branch))).await
        }
        Procedure::ExpireSnapshots { table, older_than_ms, retain_last, dry_run } => {
            let expired = move || async move {
                let table = load(table).await?;
                match dry_run {
                    true => maintenance::would_expire(tables, &table, older_than_ms, retain_last, deadline).await,
                    false => maintenance::expire_snapshots(tables, &table, older_than_ms, retain_last, deadline).await,
                }
            };
            apart(expired).await
        }
        Procedure::RewriteDataFiles { table, strategy, condition, dry_run } => {
            let rewritten = move || async move {
                let (table, condition) = (load(table).await?, condition.as_deref());
                rewrite::rewrite_data_files(tables, state, &table, &strategy, condition, dry_run, deadline).await
            };
            apart(rewritten).await
        }
        Procedure::RewriteManifests { table } => {
            let rewritten = move || async move {
                let table = load(table).await?;
                maintenance::rewrite_manifests(tables, &table, deadline).await
            };
            apart(rewritten).await
        }
        Procedure::RemoveOrphanFiles { table, older_than, dry_run } => {
            let removed = move || async move {
                orphans::remove_orphan_files(tables, &table, older_than, dry_run, deadline).await
            };
            apart(removed).await
        }
        Procedure::RegisterTable { table, metadata_file } => {
            let registered = move || async move {
                maintenance::register_table(tables, &table, &metadata_file, deadline).await.map(|()| 0)
            };
            apart(registered).await
        }
        Procedure::AddFiles { table, source, dry_run } => {
            let footers = state.runtime_env().cache_manager.get_file_metadata_cache();
            let added = move || async move {
                let table = load(table).await?;
                add_files::add_files(tables, footers.as_ref(), &table, &source, dry_run, deadline).await
            };
            apart(added).await
        }
    }
}

/// A future on the heap, made in a frame of its own: else what runs one of many has room for each of them on its stack, and so has
/// whatever it is part of.
#[inline(never)]
pub(super) fn apart<F: Future>(make: impl FnOnce() -> F) -> Pin<Box<F>> {
    Box::pin(make())
}

async fn load(tables: &Tables, ident: &TableIdent, deadline: Instant) -> Result<Table> {
    let loaded = tables.load(std::slice::from_ref(ident), deadline).await?;
    let table = loaded.tables.into_iter().next().flatten();
    table.ok_or_else(|| Error::not_found(format!("table {ident} does not exist")))
}

/// Arguments by name.
struct Args {
    procedure: String,
    values: HashMap<&'static str, ScalarValue>,
}

async fn arguments(
    state: &SessionState,
    procedure: &str,
    parameters: &'static [&'static str],
    call: &Function,
) -> Result<Args> {
    let mut values = HashMap::new();
    let list = match &call.args {
        FunctionArguments::None => &Vec::new(),
        FunctionArguments::List(list) => &list.args,
        FunctionArguments::Subquery(_) => return Err(refused("CALL with a subquery")),
    };
    for (i, arg) in list.iter().enumerate() {
        let odd = || {
            Error::invalid(format!("{SYSTEM}.{procedure}: {arg} is no argument; it takes {}", parameters.join(", ")))
        };
        let (name, value) = match arg {
            FunctionArg::Unnamed(FunctionArgExpr::Expr(value)) => (*parameters.get(i).ok_or_else(odd)?, value),
            FunctionArg::Named {
                name,
                arg: FunctionArgExpr::Expr(value),
                operator: FunctionArgOperator::RightArrow,
            } => {
                let name = normalize(name);
                (*parameters.iter().find(|parameter| **parameter == name).ok_or_else(odd)?, value)
            }
            _ => return Err(odd()),
        };
        let value =
            constant(state, value).await.map_err(|e| e.while_doing(format_args!("{SYSTEM}.{procedure}: {name}")))?;
        if values.insert(name, value).is_some() {
            return Err(Error::invalid(format!("{SYSTEM}.{procedure}: {name} is given twice")));
        }
    }
    Ok(Args { procedure: procedure.to_owned(), values })
}

/// The value of an expression without columns.
pub(super) async fn constant(state: &SessionState, expr: &Expr) -> Result<ScalarValue> {
    let empty = LogicalPlanBuilder::empty(true).build()?;
    let expr = state.create_logical_expr(&expr.to_string(), empty.schema())?;
    let plan = LogicalPlanBuilder::from(empty).project([expr])?.build()?;
    let batches = collect(state.create_physical_plan(&plan).await?, state.task_ctx()).await?;
    let batch = batches.first().ok_or_else(|| Error::internal("a constant has no value"))?;
    Ok(ScalarValue::try_from_array(batch.column(0), 0)?)
}

impl Args {
    fn missing(&self, name: &str) -> Error {
        Error::invalid(format!("{SYSTEM}.{}: {name} is missing", self.procedure))
    }

    fn cast(&self, name: &str, to: &DataType) -> Result<Option<ScalarValue>> {
        let Some(value) = self.values.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
        let wrong = |e| Error::invalid(format!("{SYSTEM}.{}: {name}: {e}", self.procedure));
        numbers::cast(value, to).map(Some).map_err(wrong)
    }

    fn text(&self, name: &str) -> Result<Option<String>> {
        Ok(self.cast(name, &DataType::Utf8)?.and_then(|value| value.try_as_str().flatten().map(str::to_owned)))
    }

    fn required_text(&self, name: &str) -> Result<String> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    fn number(&self, name: &str) -> Result<Option<i64>> {
        match self.cast(name, &DataType::Int64)? {
            Some(ScalarValue::Int64(value)) => Ok(value),
            _ => Ok(None),
        }
    }

    fn required_number(&self, name: &str) -> Result<i64> {
        self.number(name)?.ok_or_else(|| self.missing(name))
    }

    fn count(&self, name: &str) -> Result<Option<u64>> {
        let number = self.number(name)?;
        let negative = || Error::invalid(format!("{SYSTEM}.{}: {name} is negative", self.procedure));
        number.map(|number| u64::try_from(number).map_err(|_| negative())).transpose()
    }

    /// How long a new branch, or tag, is kept, and with it the snapshots of a branch: as the table says where nothing is given.
    fn retention(&self, branch: bool) -> Result<SnapshotRetention> {
        let positive = |name: &str| match self.count(name)? {
            Some(0) => Err(Error::invalid(format!("{SYSTEM}.{}: {name} is 0, and 1 is the least", self.procedure))),
            given => Ok(given),
        };
        let ms = |name: &str| {
            let days = positive(name)?.map(|days| i64::try_from(days).unwrap_or(i64::MAX));
            Ok::<_, Error>(days.map(|days| days.saturating_mul(DAY_MS)))
        };
        let max_ref_age_ms = ms("retain_days")?;
        Ok(match branch {
            false => SnapshotRetention::Tag { max_ref_age_ms },
            true => SnapshotRetention::Branch {
                min_snapshots_to_keep: positive("min_snapshots_to_keep")?.map(|n| i32::try_from(n).unwrap_or(i32::MAX)),
                max_snapshot_age_ms: ms("snapshot_retain_days")?,
                max_ref_age_ms,
            },
        })
    }

    fn boolean(&self, name: &str) -> Result<Option<bool>> {
        match self.cast(name, &DataType::Boolean)? {
            Some(ScalarValue::Boolean(value)) => Ok(value),
            _ => Ok(None),
        }
    }

    fn timestamp_ms(&self, name: &str) -> Result<Option<i64>> {
        match self.cast(name, &DataType::Timestamp(TimeUnit::Millisecond, None))? {
            Some(ScalarValue::TimestampMillisecond(value, _)) => Ok(value),
            _ => Ok(None),
        }
    }
}
