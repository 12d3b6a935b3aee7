//! INSERT: the rows of a plan are written as data files and then committed.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use arrow::datatypes::{Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::common::Result as DfResult;
use datafusion::datasource::sink::DataSink;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::{DisplayAs, DisplayFormatType};
use futures::StreamExt;

use crate::error::{Error, Result};
use crate::table::writer::{DataFiles, DataWriter};
use crate::table::{Table, Tables};

/// Appends what it is given to one table.
pub struct AppendSink {
    tables: Arc<Tables>,
    table: Table,
    /// Every column may be null here: the writer refuses nulls, naming the column, and DataFusion would name a number.
    schema: SchemaRef,
    deadline: Instant,
}

impl AppendSink {
    pub fn new(tables: Arc<Tables>, table: Table, schema: &Schema, deadline: Instant) -> Self {
        let nullable = schema.fields().iter().map(|field| field.as_ref().clone().with_nullable(true));
        let schema = Arc::new(Schema::new(nullable.collect::<Vec<_>>()));
        Self { tables, table, schema, deadline }
    }

    async fn append(&self, rows: SendableRecordBatchStream) -> Result<u64> {
        let writer = self.tables.data_writer(&self.table.metadata)?;
        let files = write_rows(writer, rows, self.deadline).await?;
        let count = files.rows;
        self.tables.append(&self.table, files, self.deadline).await?;
        Ok(count)
    }
}

/// Writes all rows into data files, until the deadline.
pub async fn write_rows(
    mut writer: DataWriter,
    mut rows: SendableRecordBatchStream,
    deadline: Instant,
) -> Result<DataFiles> {
    let write = async {
        while let Some(batch) = rows.next().await {
            writer.write(&batch?).await?;
        }
        writer.finish().await
    };
    tokio::time::timeout_at(deadline.into(), write).await.unwrap_or_else(|_| {
        Err(Error::deadline("the rows were not written before the deadline; nothing was committed"))
    })
}

impl fmt::Debug for AppendSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppendSink({})", self.table.ident)
    }
}

impl DisplayAs for AppendSink {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AppendSink(table={})", self.table.ident)
    }
}

#[async_trait]
impl DataSink for AppendSink {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    async fn write_all(&self, rows: SendableRecordBatchStream, _: &Arc<TaskContext>) -> DfResult<u64> {
        self.append(rows).await.map_err(Error::into_datafusion)
    }
}
