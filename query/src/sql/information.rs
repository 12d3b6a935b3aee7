//! `information_schema`: DataFusion's, but that columns and functions have the types that SQL has, and columns what SQL's standard says
//! of them.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, RecordBatch, StringArray, UInt64Array, new_null_array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use async_trait::async_trait;
use datafusion::catalog::information_schema::InformationSchemaProvider;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::catalog::{
    CatalogProvider, CatalogProviderList, SchemaProvider, Session, TableFunction, TableProvider,
};
use datafusion::common::Result as DfResult;
use datafusion::execution::TaskContext;
use datafusion::logical_expr::{Expr, TableType};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::physical_plan::{ExecutionPlan, SendableRecordBatchStream};
use futures::StreamExt;

use super::{CATALOG, catalog};
use crate::scan::spelled;
use crate::words;

const COLUMNS: &str = "columns";
/// One more than the standard has.
const COMMENT: &str = "column_comment";
/// The tables of functions, from which SHOW FUNCTIONS reads as well.
const FUNCTIONS: [&str; 2] = ["routines", "parameters"];

/// The schema, over what a statement sees.
#[derive(Debug)]
pub struct Information {
    plain: InformationSchemaProvider,
    catalogs: Arc<dyn CatalogProviderList>,
}

impl Information {
    pub fn new(catalogs: Arc<dyn CatalogProviderList>, functions: HashMap<String, Arc<TableFunction>>) -> Self {
        Self { plain: InformationSchemaProvider::new(catalogs.clone()).with_table_functions(functions), catalogs }
    }
}

#[async_trait]
impl SchemaProvider for Information {
    fn table_names(&self) -> Vec<String> {
        self.plain.table_names()
    }

    async fn table(&self, name: &str) -> DfResult<Option<Arc<dyn TableProvider>>> {
        let table = self.plain.table(name).await?;
        match (table, self.catalogs.catalog(CATALOG)) {
            (Some(table), Some(lake)) if name.eq_ignore_ascii_case(COLUMNS) => {
                let mut fields = table.schema().fields().to_vec();
                fields.push(Arc::new(Field::new(COMMENT, DataType::Utf8, true)));
                let schema = Arc::new(Schema::new(fields));
                let columns = Columns { schema: schema.clone(), lake };
                Ok(Some(Arc::new(StreamingTable::try_new(schema, vec![Arc::new(columns)])?)))
            }
            (Some(table), _) if FUNCTIONS.iter().any(|of| name.eq_ignore_ascii_case(of)) => {
                Ok(Some(Arc::new(Functions { plain: table })))
            }
            (table, _) => Ok(table),
        }
    }

    fn table_exist(&self, name: &str) -> bool {
        self.plain.table_exist(name)
    }
}

/// A table of functions, with types as SQL has them.
#[derive(Debug)]
struct Functions {
    plain: Arc<dyn TableProvider>,
}

#[async_trait]
impl TableProvider for Functions {
    fn schema(&self) -> SchemaRef {
        self.plain.schema()
    }

    fn table_type(&self) -> TableType {
        self.plain.table_type()
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> DfResult<Arc<dyn ExecutionPlan>> {
        let plain = self.plain.scan(state, None, &[], None).await?;
        let named = StreamingTable::try_new(self.schema(), vec![Arc::new(Named { schema: self.schema(), plain })])?;
        named.scan(state, projection, filters, limit).await
    }
}

/// The rows of such a table.
#[derive(Debug)]
struct Named {
    schema: SchemaRef,
    plain: Arc<dyn ExecutionPlan>,
}

impl PartitionStream for Named {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, task: Arc<TaskContext>) -> SendableRecordBatchStream {
        let schema = self.schema.clone();
        let rows = match self.plain.execute(0, task) {
            Ok(rows) => rows.map(|batch| in_words_of_sql(&batch?)).boxed(),
            Err(error) => futures::stream::iter([Err(error)]).boxed(),
        };
        Box::pin(RecordBatchStreamAdapter::new(schema, rows))
    }
}

fn in_words_of_sql(batch: &RecordBatch) -> DfResult<RecordBatch> {
    let column =
        |(field, column): (&Arc<Field>, &ArrayRef)| match (field.name().as_str(), column.as_string_opt::<i32>()) {
            ("data_type", Some(types)) => {
                let types = types.iter().map(|of| of.map(words::type_of_function));
                Arc::new(types.collect::<StringArray>()) as ArrayRef
            }
            _ => column.clone(),
        };
    let columns = batch.schema_ref().fields().iter().zip(batch.columns()).map(column).collect();
    Ok(RecordBatch::try_new(batch.schema(), columns)?)
}

/// The table `columns`, read when it is scanned.
#[derive(Debug)]
struct Columns {
    schema: SchemaRef,
    lake: Arc<dyn CatalogProvider>,
}

impl PartitionStream for Columns {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let (schema, lake) = (self.schema.clone(), self.lake.clone());
        let rows = futures::stream::once(async move { read(lake.as_ref(), schema).await });
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), rows))
    }
}

/// A column of a table.
struct Row {
    schema: String,
    table: String,
    field: Field,
    /// From 1.
    position: u64,
    default: Option<String>,
    comment: Option<String>,
}

async fn read(lake: &dyn CatalogProvider, schema: SchemaRef) -> DfResult<RecordBatch> {
    let mut rows = Vec::new();
    for name in lake.schema_names() {
        let Some(of) = lake.schema(&name) else { continue };
        for table_name in of.table_names() {
            // It may have been dropped since it was listed.
            let Some(table) = of.table(&table_name).await? else { continue };
            let mut comments = catalog::comments(table.as_ref()).into_iter();
            rows.extend(table.schema().fields().iter().zip(1..).map(|(field, position)| Row {
                schema: name.clone(),
                table: table_name.clone(),
                field: field.as_ref().clone(),
                position,
                default: table.get_column_default(field.name()).and_then(written),
                comment: comments.next().flatten(),
            }));
        }
    }
    let text = |of: fn(&Row) -> Option<String>| -> ArrayRef { Arc::new(rows.iter().map(of).collect::<StringArray>()) };
    let number = |of: fn(&Row) -> Option<u64>| -> ArrayRef { Arc::new(rows.iter().map(of).collect::<UInt64Array>()) };
    let column = |field: &Arc<Field>| match field.name().as_str() {
        "table_catalog" => text(|_| Some(CATALOG.to_owned())),
        "table_schema" => text(|row| Some(row.schema.clone())),
        "table_name" => text(|row| Some(row.table.clone())),
        "column_name" => text(|row| Some(row.field.name().clone())),
        "ordinal_position" => number(|row| Some(row.position)),
        "column_default" => text(|row| row.default.clone()),
        COMMENT => text(|row| row.comment.clone()),
        "is_nullable" => text(|row| Some(if row.field.is_nullable() { "YES" } else { "NO" }.to_owned())),
        "data_type" => text(|row| Some(words::sql_type(row.field.data_type()))),
        "numeric_precision" => number(|row| digits(row.field.data_type()).map(|(all, ..)| all)),
        "numeric_precision_radix" => number(|row| digits(row.field.data_type()).map(|(_, base, _)| base)),
        "numeric_scale" => number(|row| digits(row.field.data_type()).and_then(|(.., behind)| behind)),
        "datetime_precision" => number(|row| fractions(row.field.data_type())),
        // Text and binary values have no length.
        _ => new_null_array(field.data_type(), rows.len()),
    };
    let columns = schema.fields().iter().map(column).collect();
    Ok(RecordBatch::try_new(schema, columns)?)
}

/// A default as a statement would have it.
fn written(default: &Expr) -> Option<String> {
    let Expr::Literal(value, _) = default else { return None };
    spelled::value(value)
}

/// How many digits a number has, to which base, and how many of them behind the point, where that is certain.
fn digits(of: &DataType) -> Option<(u64, u64, Option<u64>)> {
    match of {
        DataType::Int8 | DataType::UInt8 => Some((8, 2, Some(0))),
        DataType::Int16 | DataType::UInt16 => Some((16, 2, Some(0))),
        DataType::Int32 | DataType::UInt32 => Some((32, 2, Some(0))),
        DataType::Int64 | DataType::UInt64 => Some((64, 2, Some(0))),
        DataType::Float32 => Some((24, 2, None)),
        DataType::Float64 => Some((53, 2, None)),
        DataType::Decimal32(precision, scale)
        | DataType::Decimal64(precision, scale)
        | DataType::Decimal128(precision, scale)
        | DataType::Decimal256(precision, scale) => Some((u64::from(*precision), 10, u64::try_from(*scale).ok())),
        _ => None,
    }
}

/// How many digits a time has behind the second.
fn fractions(of: &DataType) -> Option<u64> {
    match of {
        DataType::Date32 | DataType::Date64 => Some(0),
        DataType::Time32(unit) | DataType::Time64(unit) | DataType::Timestamp(unit, _) => Some(match unit {
            TimeUnit::Second => 0,
            TimeUnit::Millisecond => 3,
            TimeUnit::Microsecond => 6,
            TimeUnit::Nanosecond => 9,
        }),
        _ => None,
    }
}
