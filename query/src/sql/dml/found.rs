//! The rows that a statement has found to go, to come and to be written anew, and what is made of them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch};
use arrow::compute::filter_record_batch;
use arrow::datatypes::{Int32Type, Int64Type};
use datafusion::datasource::provider_as_source;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::LogicalPlanBuilder;
use futures::StreamExt;
use iceberg::spec::DataFile;

use super::{INSERT, KIND, SEEN, UPDATE, path_of};
use crate::error::{Error, Result};
use crate::progress;
use crate::scan::plan::{DeleteKind, PlannedFile};
use crate::scan::{FILE_COLUMN, LakeTable, POSITION_COLUMN, Wanted};
use crate::sql::row_set::RowSet;
use crate::sql::{computing, name_files};
use crate::table::Tables;
use crate::table::deletes::{self, Deleted, Granularity};
use crate::table::layout;
use crate::table::memory::WriterMemory;
use crate::table::writer::{DataFiles, DataWriter};

/// The changes of one statement as they are found.
pub(super) struct Work {
    /// Columns of the table, which come first in each batch.
    pub(super) columns: usize,
    pub(super) removed: RowSet,
    /// Rows of the target that a MERGE has matched without changing them.
    seen: RowSet,
    pub(super) reservation: MemoryReservation,
    writer: DataWriter,
    count: u64,
    merge: bool,
}

/// What is to be committed, and how many rows are changed by it.
pub(super) struct Changed {
    pub(super) added: DataFiles,
    /// Data files that go.
    pub(super) removed: HashSet<String>,
    pub(super) count: u64,
}

impl Work {
    pub(super) fn new(
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

    pub(super) async fn take(&mut self, batch: &RecordBatch) -> Result<()> {
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
    pub(super) async fn keep_the_rest(
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
            let physical = computing::physical_plan(state, &scan).await?;
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
    pub(super) async fn name_the_rows(
        self,
        tables: &Tables,
        state: &SessionState,
        target: &LakeTable,
        files: &[PlannedFile],
    ) -> Result<Changed> {
        let metadata = &target.table().metadata;
        let granularity = Granularity::of(metadata)?;
        let reader = target.delete_reader(state.runtime_env());
        let memory = reader.memory("the files that are changed");
        let (mut removed, mut replaced) = (HashSet::new(), HashSet::new());
        let mut deleted = Vec::new();
        for file in files.iter().filter(|file| self.removed.count(file.data_file().file_path()) > 0) {
            let (path, rows) = (file.data_file().file_path(), file.data_file().record_count());
            let mut positions = self.removed.positions(path);
            let known = file.deletes.iter().filter(|delete| !matches!(delete.kind, DeleteKind::Equality(_)));
            // What is known already is named again, in the place of what names it now.
            for delete in known.filter(|_| granularity == Granularity::File) {
                if let Some(known) = reader.positions(delete, path).await? {
                    positions |= &*known;
                }
                if delete.of_one_file {
                    replaced.insert(delete.place());
                }
            }
            positions.remove_range(rows..);
            memory.try_grow(positions.serialized_size())?;
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
