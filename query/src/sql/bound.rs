//! A statement's text with what is bound to it: values of its parameters, versions of tables, and rows that came along.
//!
//! Parameters are written `?`, or `$1`, `$2` and so on; not both in one statement. Their values come as rows of Arrow columns.
//! A value takes its parameter's place in the parsed statement as the literal that it is, of its own type ([`super::literal`]); so a
//! statement with values means exactly what it would mean with them written into it, and no text is made of text.
//!
//! ```text
//! one row of values                        -> literals
//! several, INSERT ... VALUES (one row)     -> INSERT ... SELECT from them: one change
//! several, another change                  -> the statement once for each, all of it one transaction ([`super::session`])
//! several, a query                         -> refused
//! none, though there are parameters        -> it can be described, and not run
//! ```
//! Bounds: [`MAX_PARAMETERS`], [`MAX_ROWS`], and the bytes of their values (by who takes them in, [`crate::flight::prepared`]).

use std::collections::BTreeSet;
use std::fmt;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::compute::concat_batches;
use arrow::datatypes::{Field, Schema};
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamDecoder;
use arrow::ipc::writer::StreamWriter;
use datafusion::catalog::TableProvider;
use datafusion::datasource::MemTable;
use datafusion::sql::parser::{CopyToSource, Statement as Parsed};
use datafusion::sql::sqlparser::ast::{
    Expr, Ident, Query, SelectItem, SetExpr, Statement, Value, ValueWithSpan, VisitMut, VisitorMut,
};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::parser::Parser;
use datafusion::sql::sqlparser::tokenizer::Span;
use uuid::Uuid;

use super::{literal, once};
use crate::distributed::Mode;
use crate::error::{Error, Result, words_of_panic};
use crate::outcomes::fingerprint;
use crate::table::pins::Pins;

/// Most parameters of a statement.
pub const MAX_PARAMETERS: usize = 10_000;
/// Most rows of values.
pub const MAX_ROWS: usize = 1_000_000;
/// The table of the rows that came with a statement.
pub const ROWS: &str = "__lake_rows";

/// See the module.
#[derive(Clone, Default)]
pub struct Bound {
    pub sql: String,
    /// Values of the parameters: a column each.
    pub parameters: Option<RecordBatch>,
    /// The versions that a query reads, where they were settled before.
    pub pins: Option<Arc<Pins>>,
    /// The rows that came along, which the statement names [`ROWS`].
    pub rows: Option<Arc<dyn TableProvider>>,
    /// The ticket it was asked for with: a change is made once by it, whichever node is asked.
    pub ticket: Option<Uuid>,
    /// How a query is spread over nodes, if its client says so.
    pub distributed: Option<Mode>,
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.parameters.as_ref().map(RecordBatch::num_rows);
        f.debug_struct("Bound").field("sql", &self.sql).field("rows_of_parameters", &rows).finish_non_exhaustive()
    }
}

impl From<&str> for Bound {
    fn from(sql: &str) -> Self {
        Self { sql: sql.to_owned(), ..Self::default() }
    }
}

impl Bound {
    /// What tells it from another statement, or from the same with other values.
    ///
    /// # Errors
    /// As [`to_bytes`].
    pub fn fingerprint(&self) -> Result<u64> {
        let text = once::statement(&self.sql);
        Ok(match &self.parameters {
            None => text,
            Some(values) => fingerprint(&[&text.to_le_bytes(), &to_bytes(values)?]),
        })
    }

    /// How many rows of values there are; 1 for a statement without.
    pub fn len(&self) -> usize {
        self.parameters.as_ref().map_or(1, RecordBatch::num_rows)
    }

    /// Whether there are values, and no row of them: nothing is to be done then.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The statement with one of its rows of values.
    #[must_use]
    pub fn row(&self, row: usize) -> Self {
        Self { parameters: self.parameters.as_ref().map(|values| values.slice(row, 1)), ..self.clone() }
    }

    /// Puts the values into the parsed statement. Returns how many parameters have none, which are numbered then, and the rows
    /// that the statement now reads from [`ROWS`].
    ///
    /// # Errors
    /// `Invalid`: there are other values than parameters, or parameters of two kinds; `NotSupported`: several rows of values for
    /// a query, a value that cannot be written in SQL.
    pub fn put(&self, statement: &mut Parsed) -> Result<(usize, Option<Arc<dyn TableProvider>>)> {
        let count = number(statement)?;
        let Some(values) = self.parameters.as_ref().filter(|values| values.num_columns() > 0) else {
            return Ok((count, self.rows.clone()));
        };
        if values.num_columns() != count {
            return Err(Error::invalid(format!(
                "the statement has {count} parameters, and {} values are bound; nothing was done",
                values.num_columns()
            )));
        }
        if values.num_rows() == 1 {
            let literals = values.columns().iter().enumerate();
            let literals = literals.map(|(i, column)| literal::of(column, 0, i + 1)).collect::<Result<Vec<_>>>()?;
            replace(statement, &literals);
            return Ok((0, self.rows.clone()));
        }
        if !takes_many_rows(statement) {
            return Err(Error::not_supported(format!(
                "{} rows of values are bound, and this statement takes one; nothing was done",
                values.num_rows()
            )));
        }
        let column = |i: usize| format!("p{}", i + 1);
        let names: Vec<Expr> = (0..count).map(|i| Expr::Identifier(Ident::with_quote('"', column(i)))).collect();
        replace(statement, &names);
        select_rows(statement)?;
        let bound = values.schema();
        let fields =
            bound.fields().iter().enumerate().map(|(i, field)| Field::new(column(i), field.data_type().clone(), true));
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let rows = RecordBatch::try_new(schema.clone(), values.columns().to_vec())
            .map_err(|e| Error::invalid(format!("reading the values of the parameters: {e}")))?;
        Ok((0, Some(Arc::new(MemTable::try_new(schema, vec![vec![rows]])?))))
    }
}

/// Values as a stream of Arrow's IPC format.
///
/// # Errors
/// `Invalid`: Arrow cannot write them.
pub fn to_bytes(values: &RecordBatch) -> Result<Vec<u8>> {
    let write = || {
        let mut bytes = Vec::new();
        let mut writer = StreamWriter::try_new(&mut bytes, &values.schema())?;
        writer.write(values)?;
        writer.finish()?;
        drop(writer);
        Ok(bytes)
    };
    write().map_err(|e: ArrowError| Error::invalid(format!("writing the values of the parameters: {e}")))
}

/// Values from what [`to_bytes`] has written. They come from a client: nothing is allocated for a length that they tell, and what
/// Arrow panics on is an error.
///
/// # Errors
/// `Invalid`: it is something else, or more than [`MAX_ROWS`].
pub fn from_bytes(bytes: &[u8]) -> Result<RecordBatch> {
    let read = || -> Result<RecordBatch, ArrowError> {
        let (mut decoder, mut rest) = (StreamDecoder::new(), Buffer::from(bytes));
        let (mut batches, mut rows) = (Vec::new(), 0usize);
        while !rest.is_empty() {
            if let Some(batch) = decoder.decode(&mut rest)? {
                rows = rows.saturating_add(batch.num_rows());
                batches.push(batch);
            }
        }
        decoder.finish()?;
        if rows > MAX_ROWS {
            return Err(ArrowError::IpcError(format!("they have more than {MAX_ROWS} rows")));
        }
        let schema = decoder.schema().ok_or_else(|| ArrowError::IpcError("they have no schema".to_owned()))?;
        concat_batches(&schema, &batches)
    };
    let failed = |why: &dyn fmt::Display| Error::invalid(format!("reading the values of the parameters: {why}"));
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(read) => read.map_err(|e| failed(&e)),
        Err(panic) => Err(failed(&words_of_panic(panic.as_ref()))),
    }
}

/// Whether a statement is one change with many rows of values: INSERT of one row of VALUES.
pub fn takes_many_rows(statement: &Parsed) -> bool {
    let Parsed::Statement(statement) = statement else { return false };
    let Statement::Insert(insert) = statement.as_ref() else { return false };
    let Some(Query { with: None, body, order_by: None, limit_clause: None, fetch: None, .. }) =
        insert.source.as_deref()
    else {
        return false;
    };
    // A name in VALUES is the word DEFAULT, which no SELECT has.
    matches!(body.as_ref(), SetExpr::Values(values) if matches!(values.rows.as_slice(), [row]
        if !row.iter().any(|value| matches!(value, Expr::Identifier(_)))))
}

/// `INSERT ... VALUES (row)` becomes `INSERT ... SELECT row FROM` [`ROWS`].
fn select_rows(statement: &mut Parsed) -> Result<()> {
    let failed = |what: &str| Error::internal(format!("binding rows of values: {what}"));
    let Parsed::Statement(statement) = statement else { return Err(failed("no statement")) };
    let Statement::Insert(insert) = statement.as_mut() else { return Err(failed("no INSERT")) };
    let sql = format!("SELECT 1 FROM \"{ROWS}\"");
    let parser = Parser::new(&GenericDialect {}).try_with_sql(&sql);
    let mut query = parser.and_then(|mut parser| parser.parse_query()).map_err(|e| failed(&e.to_string()))?;
    let Some(SetExpr::Values(values)) = insert.source.as_deref_mut().map(|query| query.body.as_mut()) else {
        return Err(failed("no VALUES"));
    };
    let SetExpr::Select(select) = query.body.as_mut() else { return Err(failed("no SELECT")) };
    let row = values.rows.pop().ok_or_else(|| failed("no row"))?;
    // Names of their own: two parameters may be the same.
    let named = |(i, expr): (usize, &Expr)| SelectItem::ExprWithAlias {
        expr: expr.clone(),
        alias: Ident::with_quote('"', format!("v{}", i + 1)),
    };
    select.projection = row.iter().enumerate().map(named).collect();
    insert.source = Some(query);
    Ok(())
}

/// Numbers the parameters in the order that they are written in, and returns how many there are.
fn number(statement: &mut Parsed) -> Result<usize> {
    let mut seen = Placeholders::default();
    visit(statement, &mut seen);
    if seen.marks.is_empty() {
        let most = seen.numbers.iter().max().copied().unwrap_or(0);
        return match seen.odd {
            Some(odd) => Err(Error::not_supported(format!(
                "the parameter {odd} has a name; parameters are ?, or $1, $2 and so on; nothing was done"
            ))),
            None if most > MAX_PARAMETERS => Err(too_many(most)),
            None => Ok(most),
        };
    }
    if !seen.numbers.is_empty() || seen.odd.is_some() {
        return Err(Error::invalid("the statement has parameters of two kinds: they are ?, or $1, $2 and so on"));
    }
    if seen.marks.len() > MAX_PARAMETERS {
        return Err(too_many(seen.marks.len()));
    }
    let marks: Vec<(u64, u64)> = seen.marks.into_iter().collect();
    visit(statement, &mut Numbering { marks: &marks });
    Ok(marks.len())
}

fn too_many(count: usize) -> Error {
    Error::invalid(format!("the statement has {count} parameters, and at most {MAX_PARAMETERS} are allowed"))
}

fn replace(statement: &mut Parsed, values: &[Expr]) {
    visit(statement, &mut Replacing { values });
}

/// Shows a visitor all of a statement. Nothing may break off.
pub(super) fn visit(statement: &mut Parsed, visitor: &mut impl VisitorMut<Break = ()>) {
    // Nothing breaks off.
    let _ = match statement {
        Parsed::Statement(statement) => statement.visit(visitor),
        Parsed::Explain(explain) => {
            visit(&mut explain.statement, visitor);
            ControlFlow::Continue(())
        }
        Parsed::CopyTo(copy) => match &mut copy.source {
            CopyToSource::Query(query) => query.visit(visitor),
            CopyToSource::Relation(_) => ControlFlow::Continue(()),
        },
        _ => ControlFlow::Continue(()),
    };
}

fn placeholder(expr: &Expr) -> Option<(&str, Span)> {
    match expr {
        Expr::Value(ValueWithSpan { value: Value::Placeholder(id), span }) => Some((id, *span)),
        _ => None,
    }
}

fn start(span: Span) -> (u64, u64) {
    (span.start.line, span.start.column)
}

/// Which there are.
#[derive(Default)]
struct Placeholders {
    /// Where there is a `?`.
    marks: BTreeSet<(u64, u64)>,
    numbers: BTreeSet<usize>,
    odd: Option<String>,
}

impl VisitorMut for Placeholders {
    type Break = ();

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        match placeholder(expr) {
            None => {}
            Some(("?", span)) => {
                self.marks.insert(start(span));
            }
            Some((id, _)) => match id.strip_prefix(['$', '?']).and_then(|digits| digits.parse().ok()) {
                Some(number) if number > 0 => {
                    self.numbers.insert(number);
                }
                _ => self.odd = Some(id.to_owned()),
            },
        }
        ControlFlow::Continue(())
    }
}

struct Numbering<'a> {
    marks: &'a [(u64, u64)],
}

impl VisitorMut for Numbering<'_> {
    type Break = ();

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        if let Expr::Value(ValueWithSpan { value: Value::Placeholder(id), span }) = expr
            && let Ok(index) = self.marks.binary_search(&start(*span))
        {
            *id = format!("${}", index + 1);
        }
        ControlFlow::Continue(())
    }
}

struct Replacing<'a> {
    values: &'a [Expr],
}

impl VisitorMut for Replacing<'_> {
    type Break = ();

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        let index =
            placeholder(expr).and_then(|(id, _)| id.strip_prefix(['$', '?'])?.parse::<usize>().ok()?.checked_sub(1));
        if let Some(value) = index.and_then(|index| self.values.get(index)) {
            *expr = value.clone();
        }
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array, NullArray, StringArray};
    use datafusion::sql::parser::DFParser;

    use super::*;
    use crate::error::Kind;

    fn values(columns: Vec<ArrayRef>) -> RecordBatch {
        RecordBatch::try_from_iter(columns.into_iter().enumerate().map(|(i, column)| (i.to_string(), column))).unwrap()
    }

    fn put(sql: &str, parameters: Option<RecordBatch>) -> Result<(String, usize, bool)> {
        let mut parsed = DFParser::parse_sql(sql).unwrap().pop_front().unwrap();
        let bound = Bound { parameters, ..Bound::from(sql) };
        let (unbound, rows) = bound.put(&mut parsed)?;
        Ok((parsed.to_string(), unbound, rows.is_some()))
    }

    #[test]
    fn values_take_the_places_of_parameters() {
        let two =
            || Some(values(vec![Arc::new(Int64Array::from(vec![-5])), Arc::new(StringArray::from(vec!["it's"]))]));
        for (sql, with) in [
            ("SELECT ? FROM t WHERE a = ?", "SELECT -5 FROM t WHERE a = 'it''s'"),
            ("SELECT ?2 FROM t WHERE a = ?1", "SELECT 'it''s' FROM t WHERE a = -5"),
            ("SELECT $2 FROM t WHERE a = $1 OR b = $1", "SELECT 'it''s' FROM t WHERE a = -5 OR b = -5"),
            ("SELECT a FROM t WHERE b = (SELECT ?) LIMIT ?", "SELECT a FROM t WHERE b = (SELECT -5) LIMIT 'it''s'"),
            ("UPDATE t SET a = ? WHERE b = ?", "UPDATE t SET a = -5 WHERE b = 'it''s'"),
            ("INSERT INTO t VALUES (?, ?)", "INSERT INTO t VALUES (-5, 'it''s')"),
            ("EXPLAIN SELECT ?, ?", "EXPLAIN SELECT -5, 'it''s'"),
        ] {
            assert_eq!(put(sql, two()).unwrap(), (with.to_owned(), 0, false), "{sql}");
        }
        assert_eq!(put("SELECT ? WHERE ?", None).unwrap(), ("SELECT $1 WHERE $2".to_owned(), 2, false));
    }

    #[test]
    fn many_rows_are_one_insert() {
        let rows = values(vec![Arc::new(Int64Array::from(vec![1, 2]))]);
        let (sql, _, has_rows) = put("INSERT INTO t (a, b) VALUES (?, 1 + 1)", Some(rows.clone())).unwrap();
        assert_eq!(sql, "INSERT INTO t (a, b) SELECT \"p1\" AS \"v1\", 1 + 1 AS \"v2\" FROM \"__lake_rows\"");
        assert!(has_rows);
        for sql in ["SELECT ?", "DELETE FROM t WHERE a = ?", "INSERT INTO t VALUES (?), (2)"] {
            assert_eq!(put(sql, Some(rows.clone())).unwrap_err().kind, Kind::NotSupported, "{sql}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let one = || Some(values(vec![Arc::new(Int64Array::from(vec![1]))]));
        for (sql, kind) in [
            ("SELECT 1", Kind::Invalid),
            ("SELECT ?, ?", Kind::Invalid),
            ("SELECT $2", Kind::Invalid),
            ("SELECT ?, $1", Kind::Invalid),
            ("SELECT $a", Kind::NotSupported),
        ] {
            assert_eq!(put(sql, one()).unwrap_err().kind, kind, "{sql}");
        }
        let bound = |value: i64| Bound {
            parameters: Some(values(vec![Arc::new(Int64Array::from(vec![value]))])),
            ..Bound::from("SELECT ?")
        };
        assert_eq!(bound(1).fingerprint().unwrap(), bound(1).fingerprint().unwrap());
        assert_ne!(bound(1).fingerprint().unwrap(), bound(2).fingerprint().unwrap());
        assert_eq!(Bound::from("SELECT 1").fingerprint(), Ok(once::statement("SELECT 1")));
        let seven = bound(7).parameters.unwrap();
        assert_eq!(from_bytes(&to_bytes(&seven).unwrap()), Ok(seven));
        assert_eq!(from_bytes(b"nonsense").unwrap_err().kind, Kind::Invalid);
        assert_eq!(from_bytes(b"").unwrap_err().kind, Kind::Invalid);
        let many = values(vec![Arc::new(NullArray::new(MAX_ROWS + 1))]);
        assert_eq!(from_bytes(&to_bytes(&many).unwrap()).unwrap_err().kind, Kind::Invalid);
    }

    #[test]
    fn damaged_values_are_an_error() {
        let of = values(vec![Arc::new(Int64Array::from(vec![1, 2])), Arc::new(StringArray::from(vec!["a", "it's"]))]);
        let bytes = to_bytes(&of).unwrap();
        for place in 0..bytes.len() {
            for bit in [0x01, 0x80] {
                let mut damaged = bytes.clone();
                damaged[place] ^= bit;
                if let Err(error) = from_bytes(&damaged) {
                    assert_eq!(error.kind, Kind::Invalid, "{place}");
                }
            }
            // What is missing may be the end of the stream alone.
            assert!(from_bytes(&bytes[..place]).is_err() || place + 8 >= bytes.len(), "{place}");
        }
    }
}
