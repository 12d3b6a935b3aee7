//! About which part of a file's rows a filter leaves, by what is known of the file's columns: bounds, counts, bytes, distinct values.
//!
//! Values are taken to be spread evenly between a column's bounds, and columns to have nothing to do with each other. Where nothing is
//! known the answer is 1: all rows. What a filter of a join is now is looked into, as it stands when the file is opened.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{AsArray, Int64Array, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::common::stats::Precision;
use datafusion::common::{ScalarValue, Statistics};
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::expressions::{
    BinaryExpr, CaseExpr, Column, DynamicFilterPhysicalExpr, InListExpr, IsNotNullExpr, IsNullExpr, Literal,
};
use datafusion::physical_expr::{PhysicalExpr, split_conjunction};
use datafusion::physical_plan::joins::HashTableLookupExpr;

use super::values::{COMPRESSION, is_text};

/// How many keys a join's hash table is asked for to find out how full it is.
const PROBES: i64 = 4096;
/// How many rows there are for each possible key, at least, where each is taken to be one. Keys that leave out most numbers, as
/// TPC-H's orders, have fewer.
const ROWS_A_KEY: f64 = 4.0;
/// Its multiples, without what stands before the point, are spread evenly, however many there are.
const GOLDEN_SECTION: f64 = 0.618_033_988_75;
/// What a value without a fixed width takes at least in memory, in bytes: its view.
const VIEW_BYTES: f64 = 16.0;

/// What is known of a file.
pub struct Known<'a> {
    /// The columns that the statistics are of.
    pub schema: &'a Schema,
    pub statistics: &'a Statistics,
    /// How many distinct values the table's columns have, where that is told.
    pub distinct: &'a [Option<usize>],
}

/// What filters leave of a column.
struct Left {
    from: f64,
    to: f64,
    /// Of the rows, by the single values that are asked for.
    members: f64,
}

impl Default for Left {
    fn default() -> Self {
        Self { from: f64::NEG_INFINITY, to: f64::INFINITY, members: 1.0 }
    }
}

impl Known<'_> {
    /// Which part of the rows `filter` leaves, from 0 to 1.
    pub fn part(&self, filter: &Arc<dyn PhysicalExpr>) -> f64 {
        let mut part = 1.0;
        let mut columns: HashMap<usize, Left> = HashMap::new();
        self.look_at(filter, &mut columns, &mut part);
        for (column, left) in columns {
            let of_range = self.bounds(column).map_or(1.0, |(lower, upper, step)| {
                let (from, to) = (left.from.max(lower), left.to.min(upper));
                let (all, asked) = (upper - lower + step, to - from + step);
                if all > 0.0 { (asked / all).clamp(0.0, 1.0) } else { 1.0 }
            });
            // Who asks for values often says between which they are, too.
            part *= of_range.min(left.members);
        }
        part
    }

    /// What a row takes of the column in memory, about, in bytes.
    pub fn row_bytes(&self, column: usize) -> f64 {
        let width = self.schema.fields().get(column).and_then(|field| field.data_type().primitive_width());
        match (width, self.bytes(column)) {
            (Some(width), _) => width as f64,
            (None, Some(bytes)) => (bytes / self.rows()).max(VIEW_BYTES),
            (None, None) => VIEW_BYTES,
        }
    }

    fn look_at(&self, filter: &Arc<dyn PhysicalExpr>, columns: &mut HashMap<usize, Left>, part: &mut f64) {
        for conjunct in split_conjunction(filter) {
            if let Some(dynamic) = conjunct.downcast_ref::<DynamicFilterPhysicalExpr>() {
                if let Ok(now) = dynamic.current() {
                    self.look_at(&now, columns, part);
                }
                continue;
            }
            if let Some((column, from, to)) = self.range(conjunct) {
                let left = columns.entry(column).or_default();
                (left.from, left.to) = (left.from.max(from), left.to.min(to));
            } else if let Some((column, members)) = self.members(conjunct) {
                let left = columns.entry(column).or_default();
                left.members = left.members.min(members);
            } else {
                *part *= self.other(conjunct);
            }
        }
    }

    /// The column that is compared with a constant, and between which values it then is.
    fn range(&self, filter: &Arc<dyn PhysicalExpr>) -> Option<(usize, f64, f64)> {
        let (column, operator, value) = self.comparison(filter)?;
        let (_, _, step) = self.bounds(column)?;
        let (value, _) = number(value)?;
        Some(match operator {
            Operator::Lt => (column, f64::NEG_INFINITY, value - step),
            Operator::LtEq => (column, f64::NEG_INFINITY, value),
            Operator::Gt => (column, value + step, f64::INFINITY),
            Operator::GtEq => (column, value, f64::INFINITY),
            _ => return None,
        })
    }

    /// The column of which single values are asked for, and which part of the rows has them.
    fn members(&self, filter: &Arc<dyn PhysicalExpr>) -> Option<(usize, f64)> {
        if let Some((column, Operator::Eq | Operator::IsNotDistinctFrom, _)) = self.comparison(filter) {
            return Some((column, 1.0 / self.distinct(column)?));
        }
        if let Some(list) = filter.downcast_ref::<InListExpr>().filter(|list| !list.negated()) {
            let column = self.column(list.expr())?;
            return Some((column, (list.len() as f64 / self.distinct(column)?).min(1.0)));
        }
        if filter.is::<HashTableLookupExpr>() {
            return self.looked_up(filter);
        }
        None
    }

    fn other(&self, filter: &Arc<dyn PhysicalExpr>) -> f64 {
        let nulls = |arg: &Arc<dyn PhysicalExpr>| {
            let nulls = self.statistics.column_statistics.get(self.column(arg)?)?.null_count.get_value()?;
            Some((*nulls as f64 / self.rows()).min(1.0))
        };
        if let Some(literal) = filter.downcast_ref::<Literal>() {
            return f64::from(matches!(literal.value(), ScalarValue::Boolean(Some(true))));
        }
        if let Some(null) = filter.downcast_ref::<IsNullExpr>() {
            return nulls(null.arg()).unwrap_or(1.0);
        }
        if let Some(not_null) = filter.downcast_ref::<IsNotNullExpr>() {
            return nulls(not_null.arg()).map_or(1.0, |nulls| 1.0 - nulls);
        }
        if let Some(either) = filter.downcast_ref::<BinaryExpr>()
            && *either.op() == Operator::Or
        {
            return (self.part(either.left()) + self.part(either.right())).min(1.0);
        }
        // Of a join in partitions: each row belongs to one of them.
        match filter.downcast_ref::<CaseExpr>() {
            Some(case) => {
                let thens = case.when_then_expr().iter().map(|(_, then)| then);
                thens.chain(case.else_expr()).map(|then| self.part(then)).sum::<f64>().min(1.0)
            }
            None => 1.0,
        }
    }

    /// Which part of the rows has a key in a join's hash table, by asking it for keys between the column's bounds. That tells something
    /// only where most of those are keys of rows: where there are [`ROWS_A_KEY`] for each.
    fn looked_up(&self, lookup: &Arc<dyn PhysicalExpr>) -> Option<(usize, f64)> {
        let [on] = lookup.children()[..] else { return None };
        let column = self.column(on)?;
        let data_type = self.schema.field(column).data_type();
        if !matches!(data_type, DataType::Int32 | DataType::Int64 | DataType::Date32) {
            return None;
        }
        let (lower, upper, _) = self.bounds(column)?;
        let keys = upper - lower + 1.0;
        if keys * ROWS_A_KEY > self.rows() {
            return None;
        }
        // Of a few, each; of many, some that follow no pattern.
        let probes = PROBES.min(keys as i64);
        let place = |probe: i64| match probes < PROBES {
            true => probe as f64,
            false => ((probe as f64 * GOLDEN_SECTION).fract() * keys).floor(),
        };
        let asked = Int64Array::from_iter_values((0..probes).map(|probe| (lower + place(probe)) as i64));
        let asked = match data_type {
            // There is no way from Int64.
            DataType::Date32 => cast(&cast(&asked, &DataType::Int32).ok()?, data_type).ok()?,
            _ => cast(&asked, data_type).ok()?,
        };
        let schema = Arc::new(Schema::new(vec![Field::new("key", data_type.clone(), true)]));
        let batch = RecordBatch::try_new(schema, vec![asked]).ok()?;
        let lookup = lookup.clone().with_new_children(vec![Arc::new(Column::new("key", 0))]).ok()?;
        let found = lookup.evaluate(&batch).ok()?.into_array(batch.num_rows()).ok()?;
        let found = found.as_boolean_opt()?.true_count();
        Some((column, found as f64 / batch.num_rows().max(1) as f64))
    }

    /// `column operator constant`, whichever stands first.
    fn comparison<'e>(&self, filter: &'e Arc<dyn PhysicalExpr>) -> Option<(usize, Operator, &'e ScalarValue)> {
        let binary = filter.downcast_ref::<BinaryExpr>()?;
        let constant = |side: &'e Arc<dyn PhysicalExpr>| side.downcast_ref::<Literal>().map(Literal::value);
        match (self.column(binary.left()), constant(binary.right())) {
            (Some(column), Some(value)) => Some((column, *binary.op(), value)),
            _ => Some((self.column(binary.right())?, binary.op().swap()?, constant(binary.left())?)),
        }
    }

    /// The place of a column among the statistics.
    fn column(&self, expr: &Arc<dyn PhysicalExpr>) -> Option<usize> {
        self.schema.index_of(expr.downcast_ref::<Column>()?.name()).ok()
    }

    /// At least 1.
    fn rows(&self) -> f64 {
        self.statistics.num_rows.get_value().map_or(1.0, |rows| (*rows).max(1) as f64)
    }

    fn bytes(&self, column: usize) -> Option<f64> {
        let bytes: &Precision<usize> = &self.statistics.column_statistics.get(column)?.byte_size;
        bytes.get_value().map(|bytes| *bytes as f64)
    }

    /// The column's bounds, and how far apart two values of it are at least.
    fn bounds(&self, column: usize) -> Option<(f64, f64, f64)> {
        let of = self.statistics.column_statistics.get(column)?;
        let (lower, step) = number(of.min_value.get_value()?)?;
        let (upper, _) = number(of.max_value.get_value()?)?;
        Some((lower, upper, step))
    }

    /// About how many distinct values the column has, at least 1 and at most one for each row.
    fn distinct(&self, column: usize) -> Option<f64> {
        let told = || self.distinct.get(column).copied().flatten().map(|distinct| distinct as f64);
        let of_range = || {
            let (lower, upper, step) = self.bounds(column)?;
            (step > 0.0).then_some(upper - lower + step)
        };
        // No writer takes fewer bits for a value than it must to tell it from the others.
        let of_bits = || {
            let bytes = self.bytes(column).filter(|_| is_text(self.schema.field(column).data_type()))?;
            Some((bytes / COMPRESSION as f64 / self.rows() * 8.0).exp2())
        };
        let distinct = told().or_else(of_range).or_else(of_bits)?;
        Some(distinct.clamp(1.0, self.rows()))
    }
}

/// A value as a number, and how far the next one is; 0 where they are dense.
fn number(value: &ScalarValue) -> Option<(f64, f64)> {
    use ScalarValue as Value;
    Some(match value {
        Value::Int32(Some(v)) | Value::Date32(Some(v)) => (f64::from(*v), 1.0),
        Value::Int64(Some(v))
        | Value::Time64Microsecond(Some(v))
        | Value::TimestampMicrosecond(Some(v), _)
        | Value::TimestampNanosecond(Some(v), _) => (*v as f64, 1.0),
        // In units of its scale, which the two sides of a comparison have in common.
        Value::Decimal128(Some(v), _, _) => (*v as f64, 1.0),
        Value::Float32(Some(v)) => (f64::from(*v), 0.0),
        Value::Float64(Some(v)) => (*v, 0.0),
        _ => return None,
    })
}
