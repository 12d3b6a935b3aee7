//! INSERT, DELETE, UPDATE, MERGE and TRUNCATE.
//!
//! ```text
//! plan of the statement -> the same plan over a scan that tells each row's place ([`LakeTable::places`])
//!                       -> rows: new values, file, position, and what is to be done
//!                       -> which rows go (a bit each, by file); new rows into new data files
//!                       -> copy-on-write: what is left of each file that lost rows, written anew
//!                          merge-on-read: delete files that name the rows ([`crate::table::deletes`])
//!                       -> one snapshot: files that are done with out, the new ones in
//! ```
//! What DataFusion hands to a table provider for these statements is not relied on: for a condition with a subquery its
//! filters may be empty, or another query's. The condition is taken from the logical plan, where it is what SELECT
//! would run.
//!
//! Each statement also says what it has read ([`Reads`]): as far as its conditions on the target alone bound that, files that
//! cannot match are nothing to it, and nobody who changes them is in its way.

mod found;
mod on;
mod reads;
mod row_plan;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use datafusion::catalog::TableProvider;
use datafusion::datasource::{provider_as_source, source_as_provider};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::{DmlStatement, LogicalPlan, LogicalPlanBuilder, WriteOp};
use datafusion::physical_plan::ExecutionPlanProperties;
use futures::StreamExt;
use iceberg::spec::{DataFile, Operation, SortOrder, Struct, TableMetadata};

use self::found::{Changed, Work};
use self::reads::{reads_besides, scope};
use self::row_plan::row_plan;
use super::{computing, name_files};
use crate::error::{Error, Result};
use crate::scan::plan::PlannedFile;
use crate::scan::sink::{Sharing, write_in_any_order, write_rows};
use crate::scan::{LakeTable, Wanted, plan};
use crate::table::conflict::{Isolation, Reads, Scope};
use crate::table::deletes::Mode;
use crate::table::layout::{self, Partitioner};
use crate::table::memory::WriterMemory;
use crate::table::version::Removed;
use crate::table::writer::DataFiles;
use crate::table::{Table, Tables};

/// The column that says what becomes of a row.
const KIND: &str = "__lake_kind";

/// A row of the target that matches and that no clause applies to.
const SEEN: i32 = 0;
const DELETE: i32 = 1;
const UPDATE: i32 = 2;
const INSERT: i32 = 3;

/// Whether a statement changes rows that are there.
pub fn changes_rows(dml: &DmlStatement) -> bool {
    match dml.op {
        WriteOp::Delete | WriteOp::Update | WriteOp::MergeInto(_) | WriteOp::Truncate => true,
        WriteOp::Insert(op) => op == InsertOp::Overwrite,
        _ => false,
    }
}

/// Makes the change and returns how many rows were deleted, updated or inserted.
pub async fn run(tables: &Arc<Tables>, state: &SessionState, dml: &DmlStatement, deadline: Instant) -> Result<u64> {
    let provider = source_as_provider(&dml.target)?;
    let target = lake_table(provider.as_ref(), dml)?;
    target.table().check_writable()?;
    match &dml.op {
        WriteOp::Truncate => truncate(tables, target, deadline).await,
        WriteOp::Insert(op) => insert(tables, state, target, dml, *op == InsertOp::Overwrite, deadline).await,
        _ => change_rows(tables, state, target, dml, deadline).await,
    }
}

/// The plan that finds the rows which the statement changes, for EXPLAIN.
pub fn explain(dml: &DmlStatement) -> Result<LogicalPlan> {
    match dml.op {
        WriteOp::Delete | WriteOp::Update | WriteOp::MergeInto(_) => {
            let provider = source_as_provider(&dml.target)?;
            row_plan(lake_table(provider.as_ref(), dml)?, dml, Arc::new(|_: &DataFile| true))
        }
        _ => Ok(dml.input.as_ref().clone()),
    }
}

fn lake_table<'a>(provider: &'a (dyn TableProvider + 'static), dml: &DmlStatement) -> Result<&'a LakeTable> {
    let table = provider
        .downcast_ref::<LakeTable>()
        .ok_or_else(|| Error::not_supported(format!("{} is no table whose rows can be changed", dml.table_name)))?;
    match table.snapshot().map(|snapshot| snapshot.snapshot_id()) == table.table().metadata.current_snapshot_id() {
        true => Ok(table),
        false => Err(Error::invalid(format!("{}: earlier versions of a table are read only", dml.table_name))),
    }
}

async fn truncate(tables: &Arc<Tables>, target: &LakeTable, deadline: Instant) -> Result<u64> {
    let table = target.table();
    if table.metadata.current_snapshot().is_none() {
        return Ok(0);
    }
    if !tables.scope.is_staged() {
        // Whatever is there when it is committed goes: nothing was read, so nobody is in the way.
        return tables
            .change(table, Operation::Delete, no_files(tables), Removed::Everything, None, deadline)
            .await
            .map(|()| 0);
    }
    // A transaction removes what it sees, and no rows that others add before it is committed.
    let seen: HashSet<String> = data_files(tables, table).await?.iter().map(path_of).collect();
    if seen.is_empty() {
        return Ok(0);
    }
    let reads = Reads {
        snapshot: table.metadata.current_snapshot_id(),
        scope: Scope::Nothing,
        files: Arc::default(),
        isolation: Isolation::Snapshot,
        only_deletes: false,
    };
    let removed = Removed::Files(Arc::new(seen));
    tables.change(table, Operation::Delete, no_files(tables), removed, Some(reads), deadline).await.map(|()| 0)
}

fn no_files(tables: &Tables) -> DataFiles {
    DataFiles::new(tables.storage.clone(), tables.tasks.clone())
}

async fn insert(
    tables: &Arc<Tables>,
    state: &SessionState,
    target: &LakeTable,
    dml: &DmlStatement,
    overwrite: bool,
    deadline: Instant,
) -> Result<u64> {
    let table = target.table();
    let metadata = &table.metadata;
    let isolation = Isolation::of(metadata, "overwrite")?;
    let mut files = write_plan(tables, state, metadata, &dml.input, deadline).await?;
    let count = files.rows;
    tables.will_answer(count);
    if !overwrite {
        return tables.append(table, files, deadline).await.map(|()| count);
    }
    // Of a partitioned table those partitions are replaced that new rows are in.
    let partitioned = !metadata.default_partition_spec().is_unpartitioned();
    let partitions: Arc<HashSet<Struct>> = Arc::new(files.files.iter().map(|file| file.partition().clone()).collect());
    let spec_id = metadata.default_partition_spec_id();
    let before = data_files(tables, table).await?;
    let (of_spec, older): (Vec<_>, Vec<_>) =
        before.into_iter().partition(|file| !partitioned || file.spec_id == spec_id);
    let replaced = {
        let partitions = partitions.clone();
        move |file: &DataFile| !partitioned || partitions.contains(file.partition())
    };
    let mut removed: HashSet<String> = of_spec.iter().filter(|file| replaced(file.data_file())).map(path_of).collect();
    let mut scope = Scope::Files(Arc::new(replaced));
    if !older.is_empty() && !partitions.is_empty() {
        let found = take_rows_of(tables, state, target, &older, &partitions, deadline).await?;
        files.take_over(found.added);
        removed.extend(found.removed);
    }
    if removed.is_empty() && files.files.is_empty() {
        return Ok(0);
    }
    // What the query reads of the target is not known to be in those partitions, and of a file partitioned otherwise nobody can
    // tell.
    if reads_besides(dml)? || !older.is_empty() {
        scope = Scope::Everything;
    }
    let removed = Arc::new(removed);
    let snapshot = metadata.current_snapshot_id();
    let reads = Reads { snapshot, scope, files: removed.clone(), isolation, only_deletes: false };
    tables
        .change(table, Operation::Overwrite, files, Removed::Files(removed), Some(reads), deadline)
        .await
        .map(|()| count)
}

/// Files that are partitioned otherwise than the table is now, without the rows that are in some of today's partitions.
async fn take_rows_of(
    tables: &Arc<Tables>,
    state: &SessionState,
    target: &LakeTable,
    files: &[PlannedFile],
    partitions: &HashSet<Struct>,
    deadline: Instant,
) -> Result<Changed> {
    let Some(partitioner) = Partitioner::new(&target.table().metadata)? else {
        return Err(Error::internal("a table without partitions has files of some"));
    };
    let paths: HashSet<String> = files.iter().map(path_of).collect();
    let source = target.places(Arc::new(move |file: &DataFile| paths.contains(file.file_path())))?;
    let scan = LogicalPlanBuilder::scan("older", provider_as_source(Arc::new(source)), None)?.build()?;
    let work = async {
        let mut work = Work::new(tables, state, target, files, false)?;
        let physical = computing::physical_plan(state, &scan).await?;
        let mut rows = computing::execute(&physical, state.task_ctx())?;
        while let Some(batch) = rows.next().await {
            let batch = batch.map_err(|e| name_files(e.into(), &physical))?;
            let file = batch.column(work.columns).as_string::<i32>();
            let position = batch.column(work.columns + 1).as_primitive::<Int64Type>();
            for (rows, partition) in partitioner.runs(&batch)? {
                if partitions.contains(&partition) {
                    for row in rows {
                        work.removed.add(file.value(row), position.value(row), &work.reservation)?;
                    }
                }
            }
        }
        drop(rows);
        work.keep_the_rest(state, target, files).await
    };
    in_time(deadline, work).await
}

/// Writes the rows of a query into data files of a table, laid out as it asks for. Rows that come in an order keep it.
pub async fn write_plan(
    tables: &Arc<Tables>,
    state: &SessionState,
    metadata: &TableMetadata,
    plan: &LogicalPlan,
    deadline: Instant,
) -> Result<DataFiles> {
    let physical = in_time(deadline, computing::physical_plan(state, plan)).await?;
    let physical = layout::cluster(physical, metadata)?;
    let in_order = physical.output_ordering().is_some();
    let rows = computing::execute(&physical, state.task_ctx())?;
    let writer = tables.data_writer(metadata)?;
    let memory = &state.runtime_env().memory_pool;
    let written = match in_order {
        true => write_rows(writer.within(WriterMemory::new(memory, 1)), rows, deadline).await,
        false => {
            let sharing = Sharing::new(state.config().target_partitions(), memory);
            write_in_any_order(writer, rows, &sharing, deadline).await
        }
    };
    written.map_err(|e| name_files(e, &physical))
}

/// The same in another order than the table's, if one is given, and by one writer: files that were to become one do.
pub(super) async fn write_sorted(
    tables: &Arc<Tables>,
    state: &SessionState,
    metadata: &TableMetadata,
    order: Option<&SortOrder>,
    plan: &LogicalPlan,
    deadline: Instant,
) -> Result<DataFiles> {
    let physical = in_time(deadline, computing::physical_plan(state, plan)).await?;
    let physical = layout::cluster_by(physical, metadata, order.unwrap_or(metadata.default_sort_order()))?;
    let rows = computing::execute(&physical, state.task_ctx())?;
    let memory = WriterMemory::new(&state.runtime_env().memory_pool, 1);
    let mut writer = tables.data_writer(metadata)?.within(memory);
    if order.is_some_and(|order| order.fields != metadata.default_sort_order().fields) {
        writer = writer.in_no_order();
    }
    let written = write_rows(writer, rows, deadline).await;
    written.map_err(|e| name_files(e, &physical))
}

async fn change_rows(
    tables: &Arc<Tables>,
    state: &SessionState,
    target: &LakeTable,
    dml: &DmlStatement,
    deadline: Instant,
) -> Result<u64> {
    let table = target.table();
    let kind = property_kind(&dml.op);
    let isolation = Isolation::of(&table.metadata, kind)?;
    let mode = Mode::of(&table.metadata, kind)?;
    let scope = in_time(deadline, scope(state, target, dml)).await?;
    let files = data_files(tables, table).await?;
    let wanted: Wanted = {
        let scope = scope.clone();
        Arc::new(move |file: &DataFile| scope.covers(file))
    };
    let logical = row_plan(target, dml, wanted)?;
    let work = async {
        let mut work = Work::new(tables, state, target, &files, matches!(dml.op, WriteOp::MergeInto(_)))?;
        let mut physical = computing::physical_plan(state, &logical).await?;
        // DELETE writes no rows here.
        if dml.op != WriteOp::Delete {
            physical = layout::cluster(physical, &table.metadata)?;
        }
        let mut rows = computing::execute(&physical, state.task_ctx())?;
        while let Some(batch) = rows.next().await {
            let batch = batch.map_err(|e| name_files(e.into(), &physical))?;
            work.take(&batch).await?;
        }
        drop(rows);
        match mode {
            Mode::CopyOnWrite => work.keep_the_rest(state, target, &files).await,
            Mode::MergeOnRead => work.name_the_rows(tables, state, target, &files).await,
        }
    };
    let Changed { added, removed, count } = in_time(deadline, work).await?;
    tables.will_answer(count);
    let operation = match (added.files.is_empty(), removed.is_empty() && added.deletes.is_empty()) {
        (true, true) => return Ok(0),
        (true, false) => Operation::Delete,
        (false, true) => Operation::Append,
        (false, false) => Operation::Overwrite,
    };
    let removed = match removed.is_empty() {
        true => Removed::Nothing,
        false => Removed::Files(Arc::new(removed)),
    };
    let read = match &scope {
        Scope::Files(_) => files.iter().filter(|file| scope.covers(file.data_file())).map(path_of).collect(),
        Scope::Nothing | Scope::Everything => HashSet::new(),
    };
    let reads = Reads {
        snapshot: table.metadata.current_snapshot_id(),
        scope,
        files: Arc::new(read),
        isolation,
        only_deletes: mode == Mode::MergeOnRead && dml.op == WriteOp::Delete && !reads_besides(dml)?,
    };
    tables.change(table, operation, added, removed, Some(reads), deadline).await.map(|()| count)
}

async fn in_time<T>(deadline: Instant, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = || Error::deadline("the rows were not written before the deadline; nothing was committed");
    tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(|_| Err(late()))
}

/// The data files of the current version, with what is deleted from them.
pub(super) async fn data_files(tables: &Tables, table: &Table) -> Result<Vec<PlannedFile>> {
    let snapshot = table.metadata.current_snapshot().map(AsRef::as_ref);
    Ok(plan::files(&tables.cache, table, snapshot, None).await?.files)
}

pub(super) fn path_of(file: &PlannedFile) -> String {
    file.data_file().file_path().to_owned()
}

/// Under which name the table's properties speak of such a statement.
fn property_kind(op: &WriteOp) -> &'static str {
    match op {
        WriteOp::Delete => "delete",
        WriteOp::Update => "update",
        _ => "merge",
    }
}
