//! Results on standard output: as a table, CSV or JSON, as they come.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::util::display::ArrayFormatter;
use futures::StreamExt;
use lake_query::client::{Rows, SqlError};

use super::table;
use super::telling::Telling;

/// Rows of a table whose columns get one width. A longer result is printed as several tables, so that memory is bounded.
const TABLE_ROWS: usize = 10_000;

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people
    Table,
    /// Comma-separated values with a header; NULL is empty
    Csv,
    /// One array of objects per result
    Json,
}

/// What became of a result that was printed.
#[derive(Debug, PartialEq, Eq)]
pub enum Summary {
    /// So many rows; there were more if it was cut.
    Rows { rows: usize, cut: bool },
    /// A change: what it was, and how many rows it changed; of CALL the procedure's count, of whatever it counts.
    Change { command: String, count: String },
}

impl Summary {
    /// One line for people.
    pub fn describe(&self, elapsed: Option<Duration>) -> String {
        let elapsed = elapsed.map(|e| format!("{:.3} s", e.as_secs_f64()));
        let with = |what: String| match &elapsed {
            Some(elapsed) => format!("{what}, {elapsed}"),
            None => what,
        };
        match self {
            Summary::Rows { rows: 1, cut: false } => format!("({})", with("1 row".to_owned())),
            Summary::Rows { rows, cut: false } => format!("({})", with(format!("{rows} rows"))),
            Summary::Rows { rows, cut: true } => {
                format!(
                    "({}; there are more, \\limit changes how many are printed)",
                    with(format!("the first {rows} rows"))
                )
            }
            Summary::Change { command, count } if command == "CALL" => with(format!("{command}: {count}")),
            Summary::Change { command, count } if count == "0" && command != "INSERT" => with(command.clone()),
            Summary::Change { command, count } if command == "DROP SCHEMA" => {
                let what = if count == "1" { "table or view" } else { "tables and views" };
                with(format!("{command}: {count} {what}"))
            }
            Summary::Change { command, count } if count == "1" => with(format!("{command}: 1 row")),
            Summary::Change { command, count } => with(format!("{command}: {count} rows")),
        }
    }
}

/// Why a result could not be printed.
#[derive(Debug)]
pub enum Failure {
    Sql(SqlError),
    Output(io::Error),
    Show(anyhow::Error),
}

impl From<SqlError> for Failure {
    fn from(e: SqlError) -> Self {
        Failure::Sql(e)
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Failure::Output(e)
    }
}

impl From<ArrowError> for Failure {
    fn from(e: ArrowError) -> Self {
        match e {
            ArrowError::IoError(_, e) => Failure::Output(e),
            other => Failure::Show(other.into()),
        }
    }
}

/// The texts of the first two columns.
pub fn pairs(batches: &[RecordBatch]) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    for batch in batches {
        let column = |index: usize| batch.columns().get(index).and_then(|column| column.as_string_opt::<i32>());
        if let (Some(first), Some(second)) = (column(0), column(1)) {
            pairs.extend(first.iter().zip(second).filter_map(|(a, b)| Some((a?.to_owned(), b?.to_owned()))));
        }
    }
    pairs
}

/// Prints a result, or what a change changed; as a table, or `expanded`, a line for each value. With a limit, a result is read no further than that.
pub async fn print(
    mut rows: Rows,
    format: Format,
    limit: Option<usize>,
    expanded: bool,
    out: &mut impl Write,
    telling: &mut Telling,
) -> Result<Summary, Failure> {
    if let Some(command) = rows.command.clone() {
        let mut count = String::new();
        while let Some(batch) = rows.next().await {
            count = change_count(&batch?)?;
        }
        return Ok(Summary::Change { command, count });
    }
    let mut left = limit.unwrap_or(usize::MAX);
    let (mut printed, mut cut) = (0, false);
    // Whoever asks for all rows gets all of each, and of a plan or a statement no end of a line is less than another.
    let is_whole = ["plan_type", "create_statement"].iter().any(|name| rows.schema.column_with_name(name).is_some());
    let widest = if limit.is_some() && !is_whole && !expanded { table::MAX_CELL_WIDTH } else { usize::MAX };
    let mut sink = Sink::new(format, rows.schema.clone(), widest, expanded, out);
    while let Some(batch) = telling.during(printed, rows.next()).await {
        let batch = batch?;
        telling.make_way();
        cut = batch.num_rows() > left;
        let batch = if cut { batch.slice(0, left) } else { batch };
        left -= batch.num_rows();
        printed += batch.num_rows();
        sink.write(batch)?;
        if cut {
            break;
        }
    }
    telling.make_way();
    sink.finish()?;
    Ok(Summary::Rows { rows: printed, cut })
}

fn change_count(batch: &RecordBatch) -> Result<String, Failure> {
    if batch.num_rows() == 0 || batch.num_columns() == 0 {
        return Ok("0".to_owned());
    }
    let options = table::value_options();
    Ok(ArrayFormatter::try_new(batch.column(0).as_ref(), &options)?.value(0).try_to_string()?)
}

/// Where batches are turned into text.
enum Sink<'a, W: Write> {
    Table { out: &'a mut W, schema: SchemaRef, waiting: Vec<RecordBatch>, rows: usize, tables: usize, widest: usize },
    Records { out: &'a mut W, schema: SchemaRef, written: usize, widest: usize },
    Csv { out: Box<arrow::csv::Writer<&'a mut W>>, schema: SchemaRef, written: bool },
    Json(arrow::json::ArrayWriter<&'a mut W>),
}

impl<'a, W: Write> Sink<'a, W> {
    fn new(format: Format, schema: SchemaRef, widest: usize, expanded: bool, out: &'a mut W) -> Self {
        match format {
            Format::Table if expanded => Sink::Records { out, schema, written: 0, widest },
            Format::Table => Sink::Table { out, schema, waiting: Vec::new(), rows: 0, tables: 0, widest },
            Format::Csv => {
                let out = arrow::csv::WriterBuilder::new().with_header(true).build(out);
                Sink::Csv { out: Box::new(out), schema, written: false }
            }
            Format::Json => Sink::Json(arrow::json::WriterBuilder::new().with_explicit_nulls(true).build(out)),
        }
    }

    fn write(&mut self, batch: RecordBatch) -> Result<(), Failure> {
        match self {
            Sink::Table { out, schema, waiting, rows, tables, widest } => {
                *rows += batch.num_rows();
                waiting.push(batch);
                if *rows >= TABLE_ROWS {
                    let text = table::render(schema, &std::mem::take(waiting), *widest).map_err(Failure::Show)?;
                    out.write_all(text.as_bytes())?;
                    (*rows, *tables) = (0, *tables + 1);
                }
            }
            Sink::Records { out, schema, written, widest } => {
                let text = table::render_records(schema, &batch, *written, *widest).map_err(Failure::Show)?;
                out.write_all(text.as_bytes())?;
                *written += batch.num_rows();
            }
            Sink::Csv { out, written, .. } => {
                out.write(&flat(&batch)?)?;
                *written = true;
            }
            Sink::Json(out) => out.write(&batch)?,
        }
        Ok(())
    }

    fn finish(self) -> Result<(), Failure> {
        match self {
            Sink::Table { out, schema, waiting, rows, tables, widest } => {
                if rows > 0 || tables == 0 {
                    let text = table::render(&schema, &waiting, widest).map_err(Failure::Show)?;
                    out.write_all(text.as_bytes())?;
                }
            }
            Sink::Records { .. } => {}
            Sink::Csv { mut out, schema, written } => {
                if !written {
                    // For the header.
                    out.write(&flat(&RecordBatch::new_empty(schema))?)?;
                }
            }
            Sink::Json(mut writer) => {
                writer.finish()?;
                writer.into_inner().write_all(b"\n")?;
            }
        }
        Ok(())
    }
}

/// The batch with lists, structs and maps as the text that a table has of them: CSV has no such values.
fn flat(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let schema = batch.schema();
    if !schema.fields().iter().any(|field| field.data_type().is_nested()) {
        return Ok(batch.clone());
    }
    let options = table::value_options();
    let columns = batch.columns().iter().zip(schema.fields()).map(|(column, field)| {
        if !field.data_type().is_nested() {
            return Ok((field.as_ref().clone(), column.clone()));
        }
        let values = ArrayFormatter::try_new(column.as_ref(), &options)?;
        let text = |row: usize| column.is_valid(row).then(|| values.value(row).try_to_string()).transpose();
        let texts: StringArray = (0..column.len()).map(text).collect::<Result<_, ArrowError>>()?;
        Ok::<_, ArrowError>((Field::new(field.name(), DataType::Utf8, true), Arc::new(texts) as ArrayRef))
    });
    let (fields, columns): (Vec<Field>, Vec<ArrayRef>) =
        columns.collect::<Result<Vec<_>, ArrowError>>()?.into_iter().unzip();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, ListArray};
    use arrow::datatypes::Int64Type;

    use super::*;

    fn printed(format: Format, batches: Vec<RecordBatch>) -> String {
        let schema = batches[0].schema();
        let mut out = Vec::new();
        let mut sink = Sink::new(format, schema, usize::MAX, false, &mut out);
        for batch in batches.into_iter().filter(|b| b.num_rows() > 0) {
            sink.write(batch).unwrap();
        }
        sink.finish().unwrap();
        String::from_utf8(out).unwrap()
    }

    fn batch(rows: usize) -> RecordBatch {
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows as i64));
        let names: ArrayRef = Arc::new(StringArray::from_iter((0..rows).map(|i| (i % 2 == 0).then_some("a,b"))));
        RecordBatch::try_from_iter_with_nullable([("id", ids, true), ("name", names, true)]).unwrap()
    }

    #[test]
    fn each_format_over_several_batches() {
        let twice = || vec![batch(2), batch(1)];
        assert_eq!(printed(Format::Csv, twice()), "id,name\n0,\"a,b\"\n1,\n0,\"a,b\"\n");
        let json = r#"[{"id":0,"name":"a,b"},{"id":1,"name":null},{"id":0,"name":"a,b"}]"#;
        assert_eq!(printed(Format::Json, twice()), format!("{json}\n"));
        assert_eq!(printed(Format::Table, twice()).lines().count(), 7);
    }

    #[test]
    fn rows_can_be_lines() {
        let mut out = Vec::new();
        let mut sink = Sink::new(Format::Table, batch(1).schema(), usize::MAX, true, &mut out);
        for batch in [batch(2), batch(1)] {
            sink.write(batch).unwrap();
        }
        sink.finish().unwrap();
        let expected = "-[ 1 ]-\nid   | 0\nname | a,b\n-[ 2 ]-\nid   | 1\nname | NULL\n-[ 3 ]-\nid   | 0\nname | a,b\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn csv_has_lists_as_text() {
        let lists = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1), None]), None]);
        let batch = RecordBatch::try_from_iter([("l", Arc::new(lists) as ArrayRef)]).unwrap();
        assert_eq!(printed(Format::Csv, vec![batch.clone()]), "l\n\"[1, NULL]\"\n\"\"\n");
        assert_eq!(printed(Format::Csv, vec![batch.slice(0, 0)]), "l\n");
    }

    #[test]
    fn only_a_prompt_cuts_what_is_wide() {
        let wide: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(2 * table::MAX_CELL_WIDTH)]));
        let batch = RecordBatch::try_from_iter([("name", wide)]).unwrap();
        assert!(printed(Format::Table, vec![batch.clone()]).contains(&"x".repeat(2 * table::MAX_CELL_WIDTH)));
        let cut = table::render(&batch.schema(), &[batch], table::MAX_CELL_WIDTH).unwrap();
        assert!(cut.contains("x…"), "{cut}");
    }

    #[test]
    fn no_rows_are_still_a_result() {
        assert_eq!(printed(Format::Csv, vec![batch(0)]), "id,name\n");
        assert_eq!(printed(Format::Json, vec![batch(0)]), "[]\n");
        assert_eq!(printed(Format::Table, vec![batch(0)]).lines().count(), 3);
    }

    #[test]
    fn a_long_table_is_printed_in_parts() {
        let text = printed(Format::Table, vec![batch(TABLE_ROWS), batch(1)]);
        assert_eq!(text.lines().count(), TABLE_ROWS + 1 + 2 * 4);
    }

    #[test]
    fn summaries_read_well() {
        let change = |command: &str, count: &str| Summary::Change { command: command.into(), count: count.into() };
        let took = Some(Duration::from_millis(1_234));
        assert_eq!(Summary::Rows { rows: 1, cut: false }.describe(took), "(1 row, 1.234 s)");
        assert_eq!(Summary::Rows { rows: 0, cut: false }.describe(None), "(0 rows)");
        assert!(Summary::Rows { rows: 10, cut: true }.describe(took).starts_with("(the first 10 rows, 1.234 s;"));
        assert_eq!(change("INSERT", "0").describe(None), "INSERT: 0 rows");
        assert_eq!(change("CREATE TABLE", "0").describe(took), "CREATE TABLE, 1.234 s");
        assert_eq!(change("INSERT", "1").describe(None), "INSERT: 1 row");
        assert_eq!(change("DROP SCHEMA", "0").describe(None), "DROP SCHEMA");
        assert_eq!(change("DROP SCHEMA", "1").describe(None), "DROP SCHEMA: 1 table or view");
        assert_eq!(change("DROP SCHEMA", "8").describe(None), "DROP SCHEMA: 8 tables and views");
        assert_eq!(change("CALL", "0").describe(None), "CALL: 0");
        assert_eq!(change("CALL", "5").describe(took), "CALL: 5, 1.234 s");
    }
}
