//! Bulk ingest: rows that a client streams into a table, as one change.
//!
//! It is a statement over the rows that come ([`ROWS`]): `INSERT INTO t (columns) SELECT columns`, by name, or `CREATE [OR REPLACE] TABLE
//! t AS SELECT`. So rows go to the table as they come, sorted and partitioned as the table wants, as fast as they are written; the
//! snapshot has all of them or none. A stream that breaks off fails the statement ([`super::whole`]).
//!
//! Where the table may or may not be there, it is created empty first, in a step of its own.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::sql::server::PeekableFlightDataStream;
use arrow_flight::sql::{CommandStatementIngest, TableExistsOption, TableNotExistOption};
use datafusion::catalog::TableProvider;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::{DataFusionError, Result as DfResult};
use datafusion::datasource::MemTable;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, TryStreamExt};

use super::prepared::failed;
use crate::error::{Error, Result};
use crate::sql::bound::{Bound, ROWS};
use crate::sql::{CATALOG, DEFAULT_SCHEMA};

/// Most rows that are worked on together.
const ROWS_AT_A_TIME: usize = 65_536;

/// What becomes of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It must not be there.
    Create,
    /// It must be there.
    Append,
    /// Its columns and rows become these, or it is created.
    Replace,
    /// The same, and it must be there.
    ReplaceExisting,
    /// It is created if it is not there.
    CreateOrAppend,
}

/// Where rows go, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub schema: String,
    pub table: String,
    pub mode: Mode,
}

impl Target {
    /// # Errors
    /// `NotSupported` or `Invalid`, saying what about the command.
    pub fn of(command: &CommandStatementIngest) -> Result<Self> {
        if command.temporary {
            return Err(Error::not_supported("temporary tables are not supported; nothing was done"));
        }
        if let Some(catalog) = command.catalog.as_deref().filter(|catalog| !catalog.is_empty() && *catalog != CATALOG) {
            return Err(Error::not_found(format!("catalog {catalog} does not exist; there is only {CATALOG}")));
        }
        let options = command.table_definition_options.unwrap_or_default();
        let missing = TableNotExistOption::try_from(options.if_not_exist).unwrap_or_default();
        let there = TableExistsOption::try_from(options.if_exists).unwrap_or_default();
        let creates = missing == TableNotExistOption::Create;
        let mode = match there {
            TableExistsOption::Append if creates => Mode::CreateOrAppend,
            TableExistsOption::Append => Mode::Append,
            TableExistsOption::Replace if creates => Mode::Replace,
            TableExistsOption::Replace => Mode::ReplaceExisting,
            TableExistsOption::Fail | TableExistsOption::Unspecified if creates => Mode::Create,
            TableExistsOption::Fail | TableExistsOption::Unspecified => {
                return Err(Error::invalid(
                    "the command must say what is done if the table exists, or if it does not; nothing was done",
                ));
            }
        };
        let schema = command.schema.as_deref().filter(|schema| !schema.is_empty()).unwrap_or(DEFAULT_SCHEMA);
        Ok(Self { schema: schema.to_owned(), table: command.table.clone(), mode })
    }

    fn name(&self) -> String {
        format!("{}.{}", quoted(&self.schema), quoted(&self.table))
    }

    /// Whether it matters, before the rows go in, if the table is there.
    pub fn looks_first(&self) -> bool {
        matches!(self.mode, Mode::ReplaceExisting | Mode::CreateOrAppend)
    }

    /// The statement that the rows go in by. It is the same whether the table is there or not, so that who sends it again by the
    /// same operation id is told what came of the first.
    pub fn statement(&self, rows: Incoming) -> Bound {
        let columns: Vec<String> = rows.schema.fields().iter().map(|field| quoted(field.name())).collect();
        let (name, columns) = (self.name(), columns.join(", "));
        let sql = match self.mode {
            Mode::Append | Mode::CreateOrAppend => {
                format!("INSERT INTO {name} ({columns}) SELECT {columns} FROM \"{ROWS}\"")
            }
            Mode::Create => format!("CREATE TABLE {name} AS SELECT * FROM \"{ROWS}\""),
            Mode::Replace | Mode::ReplaceExisting => {
                format!("CREATE OR REPLACE TABLE {name} AS SELECT * FROM \"{ROWS}\"")
            }
        };
        Bound { rows: Some(rows.table), ..Bound::from(sql.as_str()) }
    }

    /// The statement that creates the table without rows.
    ///
    /// # Errors
    /// Those of DataFusion.
    pub fn empty(&self, schema: &SchemaRef) -> Result<Bound> {
        let none = MemTable::try_new(schema.clone(), vec![vec![]])?;
        let sql = format!("CREATE TABLE IF NOT EXISTS {} AS SELECT * FROM \"{ROWS}\"", self.name());
        Ok(Bound { rows: Some(Arc::new(none)), ..Bound::from(sql.as_str()) })
    }
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The rows that a client streams.
pub struct Incoming {
    pub schema: SchemaRef,
    table: Arc<dyn TableProvider>,
}

impl Incoming {
    /// Waits for the first of them.
    ///
    /// # Errors
    /// `Invalid`: there is no schema; what the client's stream fails with.
    pub async fn new(stream: PeekableFlightDataStream) -> Result<Self> {
        let doing = "reading the rows to be ingested";
        let mut batches = FlightRecordBatchStream::new_from_flight_data(stream.map_err(FlightError::from));
        let first = batches.try_next().await.map_err(|e| failed(e, doing))?;
        let schema = batches.schema().cloned().filter(|schema| !schema.fields().is_empty());
        let schema =
            schema.ok_or_else(|| Error::invalid("the rows to be ingested have no columns; nothing was done"))?;
        // Ids and the like of wherever they come from mean nothing here.
        let plain = schema.fields().iter().map(|field| field.as_ref().clone().with_metadata(Default::default()));
        let schema = Arc::new(Schema::new(plain.collect::<Vec<_>>()));
        let target = schema.clone();
        let rows = futures::stream::iter(first.map(Ok)).chain(batches.map_err(move |e| failed(e, doing)));
        let rows = rows.map(move |batch| {
            let batch = batch.map_err(Error::into_datafusion)?;
            Ok::<_, DataFusionError>(parts(RecordBatch::try_new(target.clone(), batch.columns().to_vec())?))
        });
        let once = Once { schema: schema.clone(), rows: Mutex::new(Some(rows.try_flatten().boxed())) };
        let table = StreamingTable::try_new(schema.clone(), vec![Arc::new(once)])?;
        Ok(Self { schema, table: Arc::new(table) })
    }
}

/// A batch in parts: a few bytes may stand for any number of rows (of nothing but NULL, or of one value), which then need memory of
/// their own.
fn parts(batch: RecordBatch) -> impl Stream<Item = DfResult<RecordBatch>> + Send + 'static {
    let rows = batch.num_rows();
    let starts = (0..rows).step_by(ROWS_AT_A_TIME);
    futures::stream::iter(starts.map(move |at| Ok(batch.slice(at, ROWS_AT_A_TIME.min(rows - at)))))
}

/// Rows that can be read once.
struct Once {
    schema: SchemaRef,
    rows: Mutex<Option<BoxStream<'static, DfResult<RecordBatch>>>>,
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl PartitionStream for Once {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner).take();
        let rows = rows.unwrap_or_else(|| {
            let again = DataFusionError::Internal("rows that come once are read again".to_owned());
            futures::stream::iter([Err(again)]).boxed()
        });
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), rows))
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, NullArray};
    use arrow_flight::sql::TableDefinitionOptions;

    use super::*;
    use crate::error::Kind;

    #[tokio::test]
    async fn rows_that_take_no_room_come_in_parts() {
        let column: ArrayRef = Arc::new(NullArray::new(usize::MAX / 2));
        let batch = RecordBatch::try_from_iter_with_nullable([("x", column, true)]).unwrap();
        let mut rows = Box::pin(parts(batch));
        assert_eq!(rows.next().await.unwrap().unwrap().num_rows(), ROWS_AT_A_TIME);
        let column: ArrayRef = Arc::new(NullArray::new(ROWS_AT_A_TIME + 1));
        let batch = RecordBatch::try_from_iter_with_nullable([("x", column, true)]).unwrap();
        let sizes: Vec<usize> = parts(batch).map(|part| part.unwrap().num_rows()).collect().await;
        assert_eq!(sizes, [ROWS_AT_A_TIME, 1]);
    }

    #[test]
    fn modes_are_those_of_adbc() {
        let of = |if_not_exist: TableNotExistOption, if_exists: TableExistsOption| {
            let options = TableDefinitionOptions { if_not_exist: if_not_exist as i32, if_exists: if_exists as i32 };
            Target::of(&CommandStatementIngest {
                table_definition_options: Some(options),
                table: "t\"x".into(),
                ..CommandStatementIngest::default()
            })
        };
        use TableExistsOption as There;
        use TableNotExistOption as Missing;
        for (missing, there, mode) in [
            (Missing::Create, There::Fail, Mode::Create),
            (Missing::Fail, There::Append, Mode::Append),
            (Missing::Create, There::Replace, Mode::Replace),
            (Missing::Fail, There::Replace, Mode::ReplaceExisting),
            (Missing::Create, There::Append, Mode::CreateOrAppend),
        ] {
            assert_eq!(of(missing, there).unwrap().mode, mode);
        }
        assert_eq!(of(Missing::Fail, There::Fail).unwrap_err().kind, Kind::Invalid);
        assert_eq!(of(Missing::Create, There::Fail).unwrap().name(), "\"default\".\"t\"\"x\"");
        let elsewhere = CommandStatementIngest { catalog: Some("other".into()), ..CommandStatementIngest::default() };
        assert_eq!(Target::of(&elsewhere).unwrap_err().kind, Kind::NotFound);
    }
}
