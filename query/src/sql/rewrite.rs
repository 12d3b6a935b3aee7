//! rewrite_data_files: the same rows in other files.
//!
//! Which files are rewritten ([`Strategy`]):
//! - `binpack`: files under three quarters of the target size, where a partition has enough of them; and files from which rows
//!   are deleted, however large they are.
//! - `sort`: all, so that rows of a partition are in order over all its files.
//!
//! With a condition only files are rewritten that may have rows for which it holds.
//!
//! What is deleted from a file is left out when it is rewritten, and delete files that apply to no data file any more go in the
//! same commit. Files of an earlier partitioning come out in today's.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use arrow::datatypes::DataType;
use datafusion::common::{DFSchema, DataFusionError};
use datafusion::datasource::provider_as_source;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::utils::split_conjunction_owned;
use datafusion::logical_expr::{Expr, LogicalPlanBuilder};
use iceberg::spec::{DataFile, ManifestContentType, Operation, Struct};

use super::dml::{data_files, path_of, write_sorted};
use super::statement::check_text;
use super::{clauses, computing};
use crate::error::{Error, Result};
use crate::scan::plan::{self, PlannedFile};
use crate::scan::prune::Pruning;
use crate::scan::{LakeTable, Wanted};
use crate::table::conflict::{Isolation, Reads, Scope};
use crate::table::deletes::{DeletePlace, place};
use crate::table::layout::Layout;
use crate::table::maintenance::NAMED_AT_MOST;
use crate::table::version::{Removed, has_live_files};
use crate::table::{Table, Tables};
use crate::words::sql_type;

/// Fewer small files than this in a partition are left as they are.
const MIN_INPUT_FILES: u64 = 5;
/// A data file with this many delete files is rewritten.
const DELETE_FILE_THRESHOLD: u64 = 1;

/// Which files are rewritten, and in which order their rows come out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Strategy {
    Binpack {
        min_input_files: u64,
        delete_file_threshold: u64,
    },
    /// By these columns, as in `SORTED BY`; by the table's order if there are none.
    Sort {
        order: Option<String>,
    },
}

impl Strategy {
    /// From the arguments of the procedure.
    ///
    /// # Errors
    /// `Invalid` for a strategy that does not exist, and an order without sorting.
    pub fn new(
        name: Option<&str>,
        order: Option<String>,
        min_input_files: Option<u64>,
        delete_file_threshold: Option<u64>,
    ) -> Result<Self> {
        match (name.unwrap_or(if order.is_some() { "sort" } else { "binpack" }), order) {
            ("binpack", None) => Ok(Strategy::Binpack {
                min_input_files: min_input_files.unwrap_or(MIN_INPUT_FILES).max(1),
                delete_file_threshold: delete_file_threshold.unwrap_or(DELETE_FILE_THRESHOLD).max(1),
            }),
            ("binpack", Some(_)) => Err(Error::invalid("sort_order is for the strategy sort")),
            ("sort", order) => Ok(Strategy::Sort { order }),
            (other, _) => Err(Error::invalid(format!("there is no strategy {other:?}: it is binpack or sort"))),
        }
    }
}

/// The data files that may have rows for which a condition on the table's columns holds, as partitions and bounds tell: where they are.
/// `None` for all.
///
/// # Errors
/// `Invalid` for what is no condition on them.
async fn files_where(
    tables: &Tables,
    state: &SessionState,
    table: &Table,
    condition: &str,
) -> Result<Option<HashSet<String>>> {
    check_text(condition)?;
    let wrong =
        |e: DataFusionError| Error::invalid(format!("the condition {condition:?} of which files to rewrite: {e}"));
    let schema = table.arrow_schema()?;
    let columns = DFSchema::try_from(schema.as_ref().clone())?;
    let expr = state.create_logical_expr(condition, &columns).map_err(wrong)?;
    let own = state.clone();
    let part = async move {
        let holds = own.create_physical_expr(expr.clone(), &columns)?.data_type(&schema)?;
        if holds != DataType::Boolean {
            let why = format!("it is {}, and neither true nor false", sql_type(&holds));
            return Err(DataFusionError::Plan(why));
        }
        let conditions: Vec<Expr> = split_conjunction_owned(expr);
        Ok(Pruning::new(&own, &schema, &conditions))
    };
    let pruning = computing::planning(state, part).await?.map_err(wrong)??;
    let Some(pruning) = pruning else { return Ok(None) };
    let snapshot = table.metadata.current_snapshot().map(AsRef::as_ref);
    let files = plan::files(&tables.cache, table, snapshot, Some(&pruning)).await?.files;
    Ok(Some(files.iter().map(path_of).collect()))
}

/// Rewrites data files, of those that `condition` is about if there is one, or with `dry_run` only counts them and logs which; no row changes. Returns how many files were rewritten, or
/// would be.
///
/// # Errors
/// `Conflict` if another writer has rewritten or removed one of them, or deleted rows of one.
pub async fn rewrite_data_files(
    tables: &Arc<Tables>,
    state: &SessionState,
    table: &Table,
    strategy: &Strategy,
    condition: Option<&str>,
    dry_run: bool,
    deadline: Instant,
) -> Result<u64> {
    table.check_writable()?;
    let metadata = &table.metadata;
    let order = match strategy {
        Strategy::Sort { order: Some(order) } => {
            let sort = clauses::sort_order(order)?;
            Some(Layout { partition: Vec::new(), sort }.order(metadata.current_schema())?)
        }
        Strategy::Sort { order: None } if metadata.default_sort_order().is_unsorted() => {
            return Err(Error::invalid(format!(
                "table {} has no order: name one (sort_order => 'a, b DESC'), or give it one with ALTER TABLE ... SET SORTED BY",
                table.ident
            )));
        }
        _ => None,
    };
    let files = data_files(tables, table).await?;
    let matching = match condition {
        Some(condition) => files_where(tables, state, table, condition).await?,
        None => None,
    };
    let candidates = files.iter().filter(|file| matching.as_ref().is_none_or(|paths| paths.contains(&path_of(file))));
    let chosen = choose(strategy, candidates, tables.target_file_bytes(metadata) as u64);
    let count = chosen.len() as u64;
    let removed: Arc<HashSet<String>> = Arc::new(chosen.iter().map(|file| path_of(file)).collect());
    let done_with = done_with(tables, table, &files, &removed).await?;
    if dry_run {
        let bytes: u64 = chosen.iter().map(|file| file.data_file().file_size_in_bytes()).sum();
        let delete_files = done_with.len();
        tracing::info!(table = %table.ident, files = count, bytes, delete_files, "a rewrite that was only asked about");
        for location in removed.iter().take(NAMED_AT_MOST) {
            tracing::info!(table = %table.ident, %location, "would be rewritten");
        }
        return Ok(count);
    }
    if chosen.is_empty() && done_with.is_empty() {
        return Ok(0);
    }
    let rows: u64 = chosen.iter().map(|file| file.data_file().record_count()).sum();
    let live: Option<u64> = chosen.iter().map(|file| file.live_rows()).sum();
    let wanted: Wanted = {
        let removed = removed.clone();
        Arc::new(move |file: &DataFile| removed.contains(file.file_path()))
    };
    let source = LakeTable::new(tables.clone(), table.clone(), deadline)?.places(wanted)?;
    let columns: Vec<usize> = (0..table.arrow_schema()?.fields().len()).collect();
    let scan = LogicalPlanBuilder::scan("files", provider_as_source(Arc::new(source)), Some(columns))?.build()?;
    let mut written = write_sorted(tables, state, metadata, order.as_ref(), &scan, deadline).await?;
    if written.rows > rows || live.is_some_and(|live| live != written.rows) {
        let expected = live.unwrap_or(rows);
        return Err(Error::internal(format!("rewriting made {} rows of {expected}", written.rows)));
    }
    written.replaced_deletes = Arc::new(done_with);
    // Rows are the same as before, so that only what happened to these very files matters.
    let reads = Reads {
        snapshot: metadata.current_snapshot_id(),
        scope: Scope::Nothing,
        files: Arc::default(),
        isolation: Isolation::Snapshot,
        only_deletes: false,
    };
    let removed = match removed.is_empty() {
        true => Removed::Nothing,
        false => Removed::Files(removed),
    };
    tables.will_answer(count);
    tables.change(table, Operation::Replace, written, removed, Some(reads), deadline).await.map(|()| count)
}

fn choose<'a>(
    strategy: &Strategy,
    files: impl Iterator<Item = &'a PlannedFile>,
    target_bytes: u64,
) -> Vec<&'a PlannedFile> {
    let (min_input_files, delete_file_threshold) = match strategy {
        Strategy::Sort { .. } => return files.collect(),
        Strategy::Binpack { min_input_files, delete_file_threshold } => (*min_input_files, *delete_file_threshold),
    };
    let has_deletes = |file: &PlannedFile| file.deletes.len() as u64 >= delete_file_threshold;
    let small = target_bytes / 4 * 3;
    let mut by_partition: HashMap<(i32, &Struct), Vec<&PlannedFile>> = HashMap::new();
    for file in files.filter(|file| has_deletes(file) || file.data_file().file_size_in_bytes() < small) {
        by_partition.entry((file.spec_id, file.data_file().partition())).or_default().push(file);
    }
    let mut chosen = Vec::new();
    for group in by_partition.into_values() {
        match group.len() as u64 >= min_input_files && group.len() > 1 {
            true => chosen.extend(group),
            false => chosen.extend(group.into_iter().filter(|file| has_deletes(file))),
        }
    }
    chosen
}

/// Delete files that apply to no data file but those at `gone`, or to none at all.
async fn done_with(
    tables: &Tables,
    table: &Table,
    files: &[PlannedFile],
    gone: &HashSet<String>,
) -> Result<HashSet<DeletePlace>> {
    let mut deletes = HashSet::new();
    let Some(snapshot) = table.metadata.current_snapshot() else { return Ok(deletes) };
    let list = tables.cache.manifest_list(&table.metadata, snapshot).await?;
    let of_deletes = list.entries().iter().filter(|manifest| manifest.content == ManifestContentType::Deletes);
    for manifest in of_deletes.filter(|manifest| has_live_files(manifest)) {
        let manifest = tables.cache.manifest(manifest).await?;
        let alive = manifest.entries().iter().filter(|entry| entry.is_alive());
        deletes.extend(alive.map(|entry| place(entry.data_file())));
    }
    for file in files.iter().filter(|file| !gone.contains(file.data_file().file_path())) {
        for delete in &file.deletes {
            deletes.remove(&delete.place());
        }
    }
    Ok(deletes)
}
