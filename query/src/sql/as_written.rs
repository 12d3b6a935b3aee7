//! What the columns of a query's answer are called: an expression without a name as the statement has it (`count(*) + 1`,
//! `date_trunc('month', day)`), and not as DataFusion calls it (`date_trunc(Utf8("month"),t.day)`).
//!
//! Only what leaves the node is called so. Within the statement, and in tables and views that are made of a query, names are
//! DataFusion's: nothing that a statement refers to changes its meaning.

use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::datatypes::{FieldRef, Fields, Schema, SchemaRef};
use datafusion::sql::parser::Statement as Parsed;
use datafusion::sql::sqlparser::ast::{Expr, Query, SelectItem, SetExpr, Statement};

use super::statement::floats_as_written;
use crate::error::{Error, Result};

/// Longer ones are cut, in characters.
const MAX_CHARS: usize = 200;

/// Names for the columns of an answer, as far as they are to be others than DataFusion's.
#[derive(Debug, Default)]
pub struct AsWritten {
    /// From the first column on.
    first: Vec<Option<String>>,
    /// Behind an asterisk, which stands for no one knows how many: to the last column.
    last: Option<Vec<Option<String>>>,
}

impl AsWritten {
    /// Of a statement as it was parsed, before values are put into it.
    pub fn of(statement: &Parsed) -> Self {
        match statement {
            Parsed::Statement(statement) => match statement.as_ref() {
                Statement::Query(query) => Self::of_query(query),
                _ => Self::default(),
            },
            _ => Self::default(),
        }
    }

    fn of_query(query: &Query) -> Self {
        let mut body = query.body.as_ref();
        let mut plain = query.pipe_operators.is_empty();
        // The first part of a UNION names the columns.
        let select = loop {
            match body {
                SetExpr::Select(select) => break select,
                SetExpr::Query(query) => {
                    plain &= query.pipe_operators.is_empty();
                    body = &query.body;
                }
                SetExpr::SetOperation { left, .. } => body = left,
                _ => return Self::default(),
            }
        };
        // Of a struct it makes as many columns as that has fields.
        let unfolds = |item: &SelectItem| item.to_string().to_ascii_lowercase().contains("unnest");
        if !plain || select.projection.iter().any(unfolds) {
            return Self::default();
        }
        let is_all = |item: &SelectItem| matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..));
        let named = |items: &[SelectItem]| items.iter().map(heading).collect::<Vec<_>>();
        let items = select.projection.as_slice();
        match (items.iter().position(is_all), items.iter().rposition(is_all)) {
            (Some(first), Some(last)) => Self { first: named(&items[..first]), last: Some(named(&items[last + 1..])) },
            _ => Self { first: named(items), last: None },
        }
    }

    /// The schema with these names; as it is where there are none, or where they are not for as many columns.
    pub fn put(&self, schema: SchemaRef) -> SchemaRef {
        let (behind, all) = (self.last.as_deref().unwrap_or_default(), schema.fields().len());
        let fits = match self.last {
            Some(_) => self.first.len() + behind.len() <= all,
            None => self.first.len() == all,
        };
        if !fits || self.first.iter().chain(behind).all(Option::is_none) {
            return schema;
        }
        let name = |i: usize| match self.first.get(i) {
            Some(name) => name.as_ref(),
            None => (i + behind.len()).checked_sub(all).and_then(|i| behind.get(i)).and_then(Option::as_ref),
        };
        let field = |(i, field): (usize, &FieldRef)| match name(i) {
            Some(name) => Arc::new(field.as_ref().clone().with_name(name)),
            None => field.clone(),
        };
        let fields: Fields = schema.fields().iter().enumerate().map(field).collect();
        Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
    }
}

/// What an item is called, if DataFusion does not call it as it should be.
fn heading(item: &SelectItem) -> Option<String> {
    let SelectItem::UnnamedExpr(expr) = item else { return None };
    match uncast(&floats_as_written(expr)) {
        Expr::Identifier(_) | Expr::CompoundIdentifier(_) => None,
        expr => {
            let mut text = expr.to_string();
            if let Some((end, _)) = text.char_indices().nth(MAX_CHARS) {
                text.truncate(end);
                text.push_str("...");
            }
            Some(text)
        }
    }
}

/// What is cast: it has its name, as in DataFusion.
fn uncast(expr: &Expr) -> &Expr {
    match expr {
        Expr::Cast { expr, .. } | Expr::Nested(expr) => uncast(expr),
        other => other,
    }
}

/// The rows under another schema, of which only names differ, and that a column may be NULL.
///
/// # Errors
/// `Internal`: more does.
pub fn under(schema: &SchemaRef, batch: RecordBatch) -> Result<RecordBatch> {
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema.clone(), batch.columns().to_vec(), &rows)
        .map_err(|e| Error::internal(format!("naming the columns of the answer: {e}")))
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::{DataType, Field};
    use datafusion::execution::session_state::SessionStateBuilder;

    use super::super::statement;
    use super::*;

    /// The names of an answer of as many columns, of which DataFusion calls each `_`.
    fn names(sql: &str, columns: usize) -> Vec<String> {
        let state = SessionStateBuilder::new_with_default_features().build();
        let (parsed, _) = statement::parse(&state, sql).unwrap();
        let schema = Schema::new(vec![Field::new("_", DataType::Int64, true); columns]);
        let named = AsWritten::of(&parsed).put(Arc::new(schema));
        named.fields().iter().map(|field| field.name().clone()).collect()
    }

    #[test]
    fn expressions_are_called_as_they_are_written() {
        for (sql, expected) in [
            ("SELECT a, 1, t.b, COUNT(*), a + 1 AS c, x'00' FROM t", vec!["_", "1", "_", "COUNT(*)", "_", "X'00'"]),
            (
                "SELECT date_trunc('month', at), CAST(1.5 AS INT), CAST(a AS INT), $1",
                vec!["date_trunc('month', at)", "1.5", "_", "$1"],
            ),
            ("WITH x AS (SELECT 1) (SELECT 1 FROM x) UNION ALL SELECT 2 ORDER BY 1 LIMIT 1", vec!["1"]),
            ("SELECT 1, *, 2, a, 3 FROM t", vec!["1", "_", "_", "2", "_", "3"]),
            ("SELECT t.*, 2, u.*, 3 FROM t, u", vec!["_", "_", "_", "3"]),
            ("SELECT 1, unnest(s) FROM t", vec!["_", "_", "_"]),
            ("SELECT 1, 2", vec!["_", "_", "_"]),
            ("SELECT 1e3, 2.5 * 1e-1", vec!["1e3", "2.5 * 1e-1"]),
            ("VALUES (1)", vec!["_"]),
            ("EXPLAIN SELECT 1", vec!["_"]),
        ] {
            assert_eq!(names(sql, expected.len()), expected, "{sql}");
        }
        assert_eq!(names(&format!("SELECT 'é{}'", "a".repeat(300)), 1)[0].chars().count(), MAX_CHARS + 3);
    }

    #[test]
    fn rows_are_put_under_their_names() {
        let plain = Arc::new(Schema::new(vec![Field::new("Int64(1)", DataType::Int64, false)]));
        let named = Arc::new(Schema::new(vec![Field::new("1", DataType::Int64, false)]));
        let one: arrow::array::ArrayRef = Arc::new(arrow::array::Int64Array::from(vec![1]));
        let batch = RecordBatch::try_new(plain, vec![one]).unwrap();
        assert_eq!(under(&named, batch).unwrap().schema(), named);
        let none = Arc::new(Schema::empty());
        let options = RecordBatchOptions::new().with_row_count(Some(3));
        let batch = RecordBatch::try_new_with_options(none.clone(), Vec::new(), &options).unwrap();
        assert_eq!(under(&none, batch).unwrap().num_rows(), 3);
    }
}
