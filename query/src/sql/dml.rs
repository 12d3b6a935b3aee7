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

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch};
use arrow::compute::filter_record_batch;
use arrow::datatypes::{FieldRef, Int32Type, Int64Type};
use datafusion::catalog::TableProvider;
use datafusion::common::pruning::PrunableStatistics;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{Column, DFSchema, JoinType, ScalarValue, TableReference};
use datafusion::datasource::{ViewTable, provider_as_source, source_as_provider};
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::utils::split_conjunction;
use datafusion::logical_expr::{
    DmlStatement, Expr, ExprSchemable, LogicalPlan, LogicalPlanBuilder, MergeIntoAction, MergeIntoClauseKind,
    MergeIntoOp, Projection, TableSource, WriteOp, lit, when,
};
use datafusion::physical_optimizer::pruning::PruningPredicateBuilder;
use datafusion::physical_plan::ExecutionPlanProperties;
use futures::StreamExt;
use iceberg::spec::{DataFile, Operation, SortOrder, Struct, TableMetadata};

use super::row_set::RowSet;
use super::{CATALOG, DEFAULT_SCHEMA, computing, name_files, rounding};
use crate::error::{Error, Result};
use crate::progress;
use crate::scan::plan::{DeleteKind, PlannedFile};
use crate::scan::sink::{Sharing, write_in_any_order, write_rows};
use crate::scan::{FILE_COLUMN, LakeTable, POSITION_COLUMN, Wanted, plan, values};
use crate::table::conflict::{Isolation, Reads, Scope};
use crate::table::deletes::{self, Deleted, Granularity, Mode};
use crate::table::layout::{self, Partitioner};
use crate::table::memory::WriterMemory;
use crate::table::version::Removed;
use crate::table::writer::{DataFiles, DataWriter};
use crate::table::{Table, Tables};

/// The column that is true for rows of a MERGE's source.
const SOURCE: &str = "__lake_source";
/// The column with the number of the WHEN clause that applies.
const CLAUSE: &str = "__lake_clause";
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
        // Rows that others delete meanwhile were to go anyway.
        only_deletes: true,
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
        let physical = state.create_physical_plan(&scan).await?;
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
    tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(|_| Err(rows_deadline()))
}

/// Writes the rows of a query into data files of a table, laid out as it asks for. Rows that come in an order keep it.
pub async fn write_plan(
    tables: &Arc<Tables>,
    state: &SessionState,
    metadata: &TableMetadata,
    plan: &LogicalPlan,
    deadline: Instant,
) -> Result<DataFiles> {
    let physical = state.create_physical_plan(plan).await?;
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
    let physical = state.create_physical_plan(plan).await?;
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
    // What a transaction writes is of versions that nobody sees yet, whose files a delete file would have to name.
    let mode = match tables.scope.is_staged() {
        true => Mode::CopyOnWrite,
        false => Mode::of(&table.metadata, kind)?,
    };
    let scope = scope(state, target, dml)?;
    let files = data_files(tables, table).await?;
    let wanted: Wanted = {
        let scope = scope.clone();
        Arc::new(move |file: &DataFile| scope.covers(file))
    };
    let logical = row_plan(target, dml, wanted)?;
    let work = async {
        let mut work = Work::new(tables, state, target, &files, matches!(dml.op, WriteOp::MergeInto(_)))?;
        let mut physical = state.create_physical_plan(&logical).await?;
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
    let Changed { added, removed, count } =
        tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(|_| Err(rows_deadline()))?;
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

fn rows_deadline() -> Error {
    Error::deadline("the rows were not written before the deadline; nothing was committed")
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

/// The changes of one statement as they are found.
struct Work {
    /// Columns of the table, which come first in each batch.
    columns: usize,
    removed: RowSet,
    /// Rows of the target that a MERGE has matched without changing them.
    seen: RowSet,
    reservation: MemoryReservation,
    writer: DataWriter,
    count: u64,
    merge: bool,
}

/// What is to be committed, and how many rows are changed by it.
struct Changed {
    added: DataFiles,
    /// Data files that go.
    removed: HashSet<String>,
    count: u64,
}

impl Work {
    fn new(
        tables: &Tables,
        state: &SessionState,
        target: &LakeTable,
        files: &[PlannedFile],
        merge: bool,
    ) -> Result<Self> {
        let table = target.table();
        let rows_of = files.iter().map(|file| (path_of(file), file.data_file().record_count())).collect();
        let rows_of: Arc<HashMap<String, u64>> = Arc::new(rows_of);
        let memory = &state.runtime_env().memory_pool;
        Ok(Work {
            columns: table.arrow_schema()?.fields().len(),
            removed: RowSet::new(rows_of.clone()),
            seen: RowSet::new(rows_of),
            reservation: MemoryConsumer::new("rows to be changed").register(memory),
            writer: tables.data_writer(&table.metadata)?.within(WriterMemory::new(memory, 1)),
            count: 0,
            merge,
        })
    }

    async fn take(&mut self, batch: &RecordBatch) -> Result<()> {
        let wrong = || Error::internal("the rows to be changed came without their place");
        let column = |name: &str| batch.column_by_name(name).ok_or_else(wrong);
        let files = column(FILE_COLUMN)?.as_string_opt::<i32>().ok_or_else(wrong)?;
        let positions = column(POSITION_COLUMN)?.as_primitive_opt::<Int64Type>().ok_or_else(wrong)?;
        let kinds = column(KIND)?.as_primitive_opt::<Int32Type>().ok_or_else(wrong)?;
        let before = self.count;
        for row in 0..batch.num_rows() {
            let kind = kinds.value(row);
            if kind != SEEN {
                self.count += 1;
            }
            if kind == INSERT {
                continue;
            }
            if files.is_null(row) || positions.is_null(row) {
                return Err(wrong());
            }
            let (file, position) = (files.value(row), positions.value(row));
            let (add_to, other) = match kind {
                SEEN => (&mut self.seen, &self.removed),
                _ => (&mut self.removed, &self.seen),
            };
            if other.contains(file, position) || !add_to.add(file, position, &self.reservation)? {
                return Err(match self.merge {
                    true => Error::invalid(
                        "a row of the target matches more than one row of the source: make the rows of the source unique by the \
                         ON condition",
                    ),
                    false => Error::internal("a row was to be changed twice"),
                });
            }
        }
        let written: BooleanArray = kinds.values().iter().map(|kind| Some(*kind >= UPDATE)).collect();
        if written.true_count() > 0 {
            self.write(batch, &written).await?;
        }
        progress::count(self.count - before);
        Ok(())
    }

    /// Writes the table's columns of some rows.
    async fn write(&mut self, batch: &RecordBatch, rows: &BooleanArray) -> Result<()> {
        let columns: Vec<usize> = (0..self.columns).collect();
        let chosen = batch.project(&columns).and_then(|batch| filter_record_batch(&batch, rows));
        self.writer.write(&chosen.map_err(Error::internal)?).await
    }

    /// Writes what is left of the files that lose rows.
    async fn keep_the_rest(
        mut self,
        state: &SessionState,
        target: &LakeTable,
        files: &[PlannedFile],
    ) -> Result<Changed> {
        let removed_of = |file: &PlannedFile| self.removed.count(file.data_file().file_path());
        let lose = || files.iter().filter(|file| removed_of(file) > 0);
        let removed: HashSet<String> = lose().map(path_of).collect();
        let some_left = lose().filter(|file| file.live_rows() != Some(removed_of(file)));
        let partly: HashSet<String> = some_left.map(path_of).collect();
        if !partly.is_empty() {
            let wanted: Wanted = Arc::new(move |file: &DataFile| partly.contains(file.file_path()));
            let source = target.places(wanted)?;
            let scan = LogicalPlanBuilder::scan("rest", provider_as_source(Arc::new(source)), None)?.build()?;
            let physical = state.create_physical_plan(&scan).await?;
            let physical = layout::cluster(physical, &target.table().metadata)?;
            let mut rows = computing::execute(&physical, state.task_ctx())?;
            while let Some(batch) = rows.next().await {
                let batch = batch.map_err(|e| name_files(e.into(), &physical))?;
                let file = batch.column(self.columns).as_string::<i32>();
                let position = batch.column(self.columns + 1).as_primitive::<Int64Type>();
                let kept: BooleanArray = (0..batch.num_rows())
                    .map(|row| Some(!self.removed.contains(file.value(row), position.value(row))))
                    .collect();
                self.write(&batch, &kept).await?;
            }
        }
        Ok(Changed { added: self.writer.finish().await?, removed, count: self.count })
    }

    /// Names the rows that go in delete files. A file of which no row is left is taken out.
    async fn name_the_rows(
        self,
        tables: &Tables,
        state: &SessionState,
        target: &LakeTable,
        files: &[PlannedFile],
    ) -> Result<Changed> {
        let metadata = &target.table().metadata;
        let granularity = Granularity::of(metadata)?;
        let reader = target.delete_reader(state.runtime_env().cache_manager.get_file_metadata_cache());
        let (mut removed, mut replaced) = (HashSet::new(), HashSet::new());
        let mut deleted = Vec::new();
        for file in files.iter().filter(|file| self.removed.count(file.data_file().file_path()) > 0) {
            let (path, rows) = (file.data_file().file_path(), file.data_file().record_count());
            let mut positions = self.removed.positions(path);
            let known = file.deletes.iter().filter(|delete| !matches!(delete.kind, DeleteKind::Equality(_)));
            // What is known already is named again, in the place of what names it now.
            for delete in known.filter(|_| granularity == Granularity::File) {
                if let Some(known) = reader.positions(delete, path).await? {
                    positions |= known.as_ref();
                }
                if delete.of_one_file {
                    replaced.insert(delete.place());
                }
            }
            positions.remove_range(rows..);
            match positions.len() == rows {
                true => {
                    removed.insert(path.to_owned());
                }
                false => deleted.push(Deleted {
                    data_file: path.to_owned(),
                    spec_id: file.spec_id,
                    partition: file.data_file().partition().clone(),
                    positions,
                }),
            }
        }
        let mut added = self.writer.finish().await?;
        deletes::write(&tables.storage, metadata, granularity, deleted, &mut added).await?;
        added.replaced_deletes = Arc::new(replaced);
        Ok(Changed { added, removed, count: self.count })
    }
}

/// The rows that a statement changes: the new values of all columns, file, position and kind.
fn row_plan(target: &LakeTable, dml: &DmlStatement, wanted: Wanted) -> Result<LogicalPlan> {
    let source = provider_as_source(Arc::new(target.places(wanted)?));
    match (&dml.op, dml.input.as_ref()) {
        (WriteOp::MergeInto(merge), _) => merge_plan(dml, merge, source),
        (WriteOp::Update, LogicalPlan::Projection(projection)) => {
            let input = with_row_ids(&projection.input, source)?;
            let mut exprs = projection.expr.clone();
            exprs.extend(row_ids(input.schema())?);
            exprs.push(lit(UPDATE).alias(KIND));
            Ok(LogicalPlan::Projection(Projection::try_new(exprs, Arc::new(input))?))
        }
        (WriteOp::Delete, input) => {
            let input = with_row_ids(input, source)?;
            let mut exprs = row_ids(input.schema())?;
            exprs.push(lit(DELETE).alias(KIND));
            Ok(LogicalPlan::Projection(Projection::try_new(exprs, Arc::new(input))?))
        }
        (op, _) => Err(Error::not_supported(format!("this form of {op} is not supported yet"))),
    }
}

/// The plan with another source for its first table, which is the target.
fn with_row_ids(plan: &LogicalPlan, source: Arc<dyn TableSource>) -> Result<LogicalPlan> {
    if let LogicalPlan::TableScan(scan) = plan {
        return Ok(LogicalPlanBuilder::scan(scan.table_name.clone(), source, None)?.build()?);
    }
    let mut inputs: Vec<LogicalPlan> = plan.inputs().into_iter().cloned().collect();
    let Some(first) = inputs.first_mut() else {
        return Err(Error::not_supported(
            "this form of the statement is not supported yet: it does not begin with a table",
        ));
    };
    *first = with_row_ids(first, source)?;
    Ok(plan.with_new_exprs(plan.expressions(), inputs)?)
}

fn row_ids(schema: &DFSchema) -> Result<Vec<Expr>> {
    let find = |name: &str| -> Result<Expr> {
        let found = schema.iter().find(|(_, field)| field.name() == name);
        let (qualifier, field) = found.ok_or_else(|| Error::internal(format!("the plan has lost column {name}")))?;
        Ok(Expr::Column(Column::from((qualifier, field))).alias(name))
    };
    Ok(vec![find(FILE_COLUMN)?, find(POSITION_COLUMN)?])
}

fn merge_plan(dml: &DmlStatement, merge: &MergeIntoOp, target: Arc<dyn TableSource>) -> Result<LogicalPlan> {
    if has_subquery(&merge.on) {
        return Err(Error::not_supported(
            "a subquery in the ON condition of MERGE is not supported yet; nothing was done",
        ));
    }
    let columns = dml.target.schema();
    let has = |kind| merge.clauses.iter().any(|clause| clause.kind.canonical() == kind);
    let join_type = match (has(MergeIntoClauseKind::NotMatchedByTarget), has(MergeIntoClauseKind::NotMatchedBySource)) {
        (false, false) => JoinType::Inner,
        (true, false) => JoinType::Right,
        (false, true) => JoinType::Left,
        (true, true) => JoinType::Full,
    };
    let column =
        |(qualifier, field): (Option<&TableReference>, &FieldRef)| Expr::Column(Column::from((qualifier, field)));
    let mut of_source: Vec<Expr> = dml.input.schema().iter().map(column).collect();
    of_source.push(lit(true).alias(SOURCE));
    let source = LogicalPlanBuilder::from(dml.input.as_ref().clone()).project(of_source)?.build()?;
    let joined = LogicalPlanBuilder::scan(dml.table_name.clone(), target, None)?
        .join_on(source, join_type, [merge.on.clone()])?
        .build()?;
    let [file, position] = <[Expr; 2]>::try_from(row_ids(joined.schema())?)
        .map_err(|_| Error::internal("a row has two ids"))?
        .map(Expr::unalias);
    let marked = Expr::Column(Column::new_unqualified(SOURCE));
    let matched = file.clone().is_not_null().and(marked.clone().is_not_null());

    // Kinds exclude each other, and a condition is looked at only for rows of its kind.
    let mut clause: Vec<(Expr, Expr)> = Vec::new();
    for (kind, holds) in [
        (MergeIntoClauseKind::Matched, matched.clone()),
        (MergeIntoClauseKind::NotMatchedByTarget, file.clone().is_null()),
        (MergeIntoClauseKind::NotMatchedBySource, marked.is_null()),
    ] {
        let of_kind = merge.clauses.iter().enumerate().filter(|(_, clause)| clause.kind.canonical() == kind);
        let conditions =
            of_kind.map(|(index, clause)| (clause.predicate.clone().unwrap_or_else(|| lit(true)), lit(index as i32)));
        if let Some(first) = case(conditions.collect(), None)? {
            clause.push((holds, first));
        }
    }
    let clause = case(clause, None)?.ok_or_else(|| Error::invalid("MERGE INTO needs a WHEN clause"))?;
    let mut with_clause: Vec<Expr> = joined.schema().iter().map(column).collect();
    with_clause.push(clause.alias(CLAUSE));
    let clause = || Expr::Column(Column::new_unqualified(CLAUSE));
    let applies = match has(MergeIntoClauseKind::Matched) {
        true => clause().is_not_null().or(matched),
        false => clause().is_not_null(),
    };
    let chosen = LogicalPlanBuilder::from(joined).project(with_clause)?.filter(applies)?.build()?;

    let mut output = Vec::new();
    for field in columns.fields() {
        let mut values = Vec::new();
        for (index, when) in merge.clauses.iter().enumerate() {
            let value = match &when.action {
                MergeIntoAction::Delete => continue,
                MergeIntoAction::Update(assignments) => {
                    let assigned = assignments.iter().find(|(name, _)| name == field.name());
                    assigned.map_or_else(
                        || Expr::Column(Column::new(Some(dml.table_name.clone()), field.name())),
                        |(_, value)| value.clone(),
                    )
                }
                MergeIntoAction::Insert { columns: names, values } => {
                    let place = match names.is_empty() {
                        true => columns.index_of(field.name()).ok(),
                        false => names.iter().position(|name| name == field.name()),
                    };
                    let default = || dml.target.get_column_default(field.name()).cloned();
                    let given = place.and_then(|place| values.get(place)).cloned();
                    given.or_else(default).unwrap_or_else(|| lit(ScalarValue::Null))
                }
            };
            values.push((clause().eq(lit(index as i32)), value.cast_to(field.data_type(), chosen.schema())?));
        }
        let value = match case(values, None)? {
            Some(value) => value,
            None => lit(ScalarValue::try_from(field.data_type())?),
        };
        output.push(value.alias(field.name()));
    }
    let kinds = merge.clauses.iter().enumerate().map(|(index, when)| {
        let kind = match when.action {
            MergeIntoAction::Delete => DELETE,
            MergeIntoAction::Update(_) => UPDATE,
            MergeIntoAction::Insert { .. } => INSERT,
        };
        (clause().eq(lit(index as i32)), lit(kind))
    });
    let kind = case(kinds.collect(), Some(lit(SEEN)))?.unwrap_or_else(|| lit(SEEN));
    output.extend([file.alias(FILE_COLUMN), position.alias(POSITION_COLUMN), kind.alias(KIND)]);
    Ok(LogicalPlan::Projection(Projection::try_new(output, Arc::new(chosen))?))
}

/// `CASE WHEN .. THEN .. END`; `None` without a case.
fn case(cases: Vec<(Expr, Expr)>, otherwise: Option<Expr>) -> Result<Option<Expr>> {
    let mut cases = cases.into_iter();
    let Some((condition, value)) = cases.next() else { return Ok(None) };
    let mut builder = when(condition, value);
    for (condition, value) in cases {
        builder = builder.when(condition, value);
    }
    Ok(Some(match otherwise {
        Some(otherwise) => builder.otherwise(otherwise)?,
        None => builder.end()?,
    }))
}

fn has_subquery(expr: &Expr) -> bool {
    let is_subquery = |expr: &Expr| {
        matches!(
            expr,
            Expr::ScalarSubquery(_)
                | Expr::InSubquery(_)
                | Expr::Exists(_)
                | Expr::SetComparison(_)
                | Expr::OuterReferenceColumn(..)
        )
    };
    expr.exists(|expr| Ok(is_subquery(expr))).unwrap_or(true)
}

/// In which files rows of the target may be that the statement reads, from its conditions on the target alone.
fn scope(state: &SessionState, target: &LakeTable, dml: &DmlStatement) -> Result<Scope> {
    if reads_besides(dml)? {
        return Ok(Scope::Everything);
    }
    let conditions: Vec<&Expr> = match &dml.op {
        WriteOp::MergeInto(merge) => {
            if merge.clauses.iter().any(|c| c.kind.canonical() == MergeIntoClauseKind::NotMatchedBySource) {
                return Ok(Scope::Everything);
            }
            split_conjunction(&merge.on)
        }
        _ => {
            let mut plan = dml.input.as_ref();
            while let LogicalPlan::Projection(Projection { input, .. }) = plan {
                plan = input;
            }
            match plan {
                LogicalPlan::Filter(filter) => split_conjunction(&filter.predicate),
                _ => Vec::new(),
            }
        }
    };
    let of_target = |expr: &&Expr| {
        let merge = matches!(dml.op, WriteOp::MergeInto(_));
        let columns = expr.column_refs();
        !columns.is_empty()
            && !expr.is_volatile()
            && !has_subquery(expr)
            && (!merge || columns.iter().all(|column| column.relation.as_ref() == Some(&dml.table_name)))
    };
    let Some(condition) = conditions.into_iter().filter(of_target).cloned().reduce(Expr::and) else {
        return Ok(Scope::Everything);
    };
    let schema = target.table().arrow_schema()?;
    let unqualified = condition.transform(|expr| {
        Ok(match expr {
            Expr::Column(column) => Transformed::yes(Expr::Column(Column::new_unqualified(column.name))),
            expr => Transformed::no(expr),
        })
    })?;
    // What cannot be used for pruning bounds nothing.
    let condition = DFSchema::try_from(schema.as_ref().clone()).and_then(|columns| {
        // As the rows are looked at.
        let condition = unqualified.data.transform_up(|expr| Ok(rounding::in_expr(expr, &columns)))?.data;
        state.create_physical_expr(condition, &columns)
    });
    let predicate = condition
        .ok()
        .and_then(|condition| PruningPredicateBuilder::new().with_file_schema(schema.clone()).build(condition));
    let Some(predicate) = predicate else { return Ok(Scope::Everything) };
    Ok(Scope::Files(Arc::new(move |file: &DataFile| {
        let statistics = Arc::new(values::file_statistics(file, &schema));
        let statistics = PrunableStatistics::new(vec![statistics], schema.clone());
        predicate.prune(&statistics).map_or(true, |keep| keep.first() != Some(&false))
    })))
}

/// Whether the statement reads its target a second time, where its conditions do not bound what it reads.
fn reads_besides(dml: &DmlStatement) -> Result<bool> {
    let resolved = dml.table_name.clone().resolve(CATALOG, DEFAULT_SCHEMA);
    let mut reads = 0;
    let mut view = false;
    let mut count = |plan: &LogicalPlan| {
        if let LogicalPlan::TableScan(scan) = plan {
            if scan.table_name.clone().resolve(CATALOG, DEFAULT_SCHEMA) == resolved {
                reads += 1;
            }
            // It may read anything.
            view |= source_as_provider(&scan.source).is_ok_and(|provider| provider.is::<ViewTable>());
        }
        Ok(TreeNodeRecursion::Continue)
    };
    dml.input.apply_with_subqueries(&mut count)?;
    let once = match &dml.op {
        // Of INSERT the input is the query alone.
        WriteOp::Insert(_) => 0,
        WriteOp::MergeInto(merge) => {
            for expr in merge.exprs() {
                expr.apply(|expr| {
                    match expr {
                        Expr::ScalarSubquery(subquery) => subquery.subquery.apply_with_subqueries(&mut count)?,
                        Expr::InSubquery(within) => within.subquery.subquery.apply_with_subqueries(&mut count)?,
                        Expr::Exists(exists) => exists.subquery.subquery.apply_with_subqueries(&mut count)?,
                        _ => TreeNodeRecursion::Continue,
                    };
                    Ok(TreeNodeRecursion::Continue)
                })?;
            }
            0
        }
        _ => 1,
    };
    Ok(view || reads > once)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_with_subqueries_are_told_apart() {
        assert!(!has_subquery(&lit(1).eq(lit(2))));
        let plan = LogicalPlanBuilder::empty(true).build().unwrap();
        assert!(has_subquery(&lit(true).and(datafusion::logical_expr::exists(Arc::new(plan)))));
        assert_eq!(arrow::datatypes::DataType::Int32, lit(SEEN).get_type(&DFSchema::empty()).unwrap());
    }
}
