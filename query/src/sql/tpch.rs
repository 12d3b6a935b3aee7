//! `tpch('lineitem', 0.01)`: the rows of a TPC-H table, made as they are read.
//!
//! `CREATE TABLE tpch.lineitem AS SELECT * FROM tpch('lineitem', 0.01)` loads the sample. The rows of a scale are always
//! the same. From scale 1 on the parts of a table are made in parallel.

use std::fmt;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::catalog::{TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::{Result as DfResult, ScalarValue};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use tpchgen::generators::{
    CustomerGenerator, LineItemGenerator, NationGenerator, OrderGenerator, PartGenerator, PartSuppGenerator,
    RegionGenerator, SupplierGenerator,
};
use tpchgen_arrow::{
    CustomerArrow, LineItemArrow, NationArrow, OrderArrow, PartArrow, PartSuppArrow, RecordBatchIterator, RegionArrow,
    SupplierArrow,
};

use crate::error::{Error, Result};

/// The eight tables.
pub const TABLES: [&str; 8] = ["region", "nation", "supplier", "customer", "part", "partsupp", "orders", "lineitem"];
const QUERIES: &str = include_str!("tpch.sql");
/// Largest scale factor.
const MAX_SCALE: f64 = 1000.0;

/// The 22 queries, in order, for measuring and tests.
pub fn queries() -> Vec<String> {
    let lines: Vec<&str> = QUERIES.lines().filter(|line| !line.starts_with("--")).collect();
    lines.join("\n").split(';').map(|sql| sql.trim().to_owned()).filter(|sql| !sql.is_empty()).collect()
}

/// The table function.
#[derive(Debug)]
pub struct TpchFunction;

impl TableFunctionImpl for TpchFunction {
    fn call_with_args(&self, args: TableFunctionArgs) -> DfResult<Arc<dyn TableProvider>> {
        let (table, scale) = arguments(args.exprs()).map_err(Error::into_datafusion)?;
        let parts = if scale >= 1.0 { args.session().config().target_partitions().min(64) } else { 1 };
        let first = rows(&table, scale, 1, 1).map_err(Error::into_datafusion)?;
        let schema = first.schema().clone();
        let partitions = (1..=parts).map(|part| {
            let part =
                Part { table: table.clone(), scale, part: part as i32, parts: parts as i32, schema: schema.clone() };
            Arc::new(part) as Arc<dyn PartitionStream>
        });
        Ok(Arc::new(StreamingTable::try_new(schema.clone(), partitions.collect())?))
    }
}

fn arguments(exprs: &[Expr]) -> Result<(String, f64)> {
    let wrong = || {
        Error::invalid(format!(
            "tpch takes a table and a scale, like tpch('lineitem', 0.01); tables: {}",
            TABLES.join(", ")
        ))
    };
    let [Expr::Literal(table, _), scale] = exprs else { return Err(wrong()) };
    let scale = match scale {
        Expr::Literal(scale, _) => scale.clone(),
        _ => return Err(wrong()),
    };
    let Some(Some(table)) = table.try_as_str() else { return Err(wrong()) };
    let scale = match scale.cast_to(&arrow::datatypes::DataType::Float64) {
        Ok(ScalarValue::Float64(Some(scale))) => scale,
        _ => return Err(wrong()),
    };
    if !(scale > 0.0 && scale <= MAX_SCALE) {
        return Err(Error::invalid(format!("tpch: the scale is above 0 and at most {MAX_SCALE}, not {scale}")));
    }
    Ok((table.to_lowercase(), scale))
}

/// The rows of one part of a table.
pub fn rows(table: &str, scale: f64, part: i32, parts: i32) -> Result<Box<dyn RecordBatchIterator>> {
    Ok(match table {
        "region" => Box::new(RegionArrow::new(RegionGenerator::new(scale, part, parts))),
        "nation" => Box::new(NationArrow::new(NationGenerator::new(scale, part, parts))),
        "supplier" => Box::new(SupplierArrow::new(SupplierGenerator::new(scale, part, parts))),
        "customer" => Box::new(CustomerArrow::new(CustomerGenerator::new(scale, part, parts))),
        "part" => Box::new(PartArrow::new(PartGenerator::new(scale, part, parts))),
        "partsupp" => Box::new(PartSuppArrow::new(PartSuppGenerator::new(scale, part, parts))),
        "orders" => Box::new(OrderArrow::new(OrderGenerator::new(scale, part, parts))),
        "lineitem" => Box::new(LineItemArrow::new(LineItemGenerator::new(scale, part, parts))),
        other => return Err(Error::invalid(format!("tpch has no table {other:?}; tables: {}", TABLES.join(", ")))),
    })
}

struct Part {
    table: String,
    scale: f64,
    part: i32,
    parts: i32,
    schema: SchemaRef,
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tpch({}, {}) part {} of {}", self.table, self.scale, self.part, self.parts)
    }
}

impl PartitionStream for Part {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        // Region and nation do not come in parts.
        let whole = matches!(self.table.as_str(), "region" | "nation");
        let rows = match whole && self.part > 1 {
            true => None,
            false => Some(match whole {
                true => rows(&self.table, self.scale, 1, 1),
                false => rows(&self.table, self.scale, self.part, self.parts),
            }),
        };
        let batches = futures::stream::unfold(rows, |rows| async move {
            // Making rows never waits for anything: others get their turn here.
            tokio::task::yield_now().await;
            match rows? {
                Ok(mut rows) => {
                    let batch: RecordBatch = rows.next()?;
                    Some((Ok(batch), Some(Ok(rows))))
                }
                Err(error) => Some((Err(error.into_datafusion()), None)),
            }
        });
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), batches))
    }
}
