//! Rows as a table for people. Pure.

use anyhow::{Context, Result};
use arrow::array::RecordBatch;
use arrow::datatypes::Schema;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use unicode_width::UnicodeWidthStr;

/// Widest cell at a prompt, in columns; what is longer is cut, and ends with an ellipsis.
pub const MAX_CELL_WIDTH: usize = 200;

/// How values are written: NULL as NULL.
pub fn value_options() -> FormatOptions<'static> {
    FormatOptions::new().with_null("NULL")
}

/// The batches as one table, numbers aligned right. Cells with several lines take several lines, of at most `widest` columns.
///
/// # Errors
/// A value that cannot be shown.
pub fn render(schema: &Schema, batches: &[RecordBatch], widest: usize) -> Result<String> {
    let mut rows: Vec<Vec<Vec<String>>> = Vec::new();
    for batch in batches {
        let options = value_options();
        let columns = batch
            .columns()
            .iter()
            .map(|column| ArrayFormatter::try_new(column.as_ref(), &options))
            .collect::<Result<Vec<_>, _>>()
            .context("showing a result")?;
        for row in 0..batch.num_rows() {
            let cells = columns.iter().map(|column| Ok(lines(&column.value(row).try_to_string()?, widest)));
            rows.push(cells.collect::<Result<_, arrow::error::ArrowError>>().context("showing a result")?);
        }
    }
    let header: Vec<Vec<String>> = schema.fields().iter().map(|f| lines(f.name(), widest)).collect();
    let right: Vec<bool> = schema.fields().iter().map(|f| f.data_type().is_numeric()).collect();
    let width = |column: usize| {
        let cells = rows.iter().chain([&header]).filter_map(|row| row.get(column)).flatten();
        cells.map(|line| line.width()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();

    let rule = format!("+{}+\n", widths.iter().map(|w| "-".repeat(w + 2)).collect::<Vec<_>>().join("+"));
    let mut table = rule.clone();
    push_row(&mut table, &header, &widths, &vec![false; widths.len()]);
    table.push_str(&rule);
    for row in &rows {
        push_row(&mut table, row, &widths, &right);
    }
    if !rows.is_empty() {
        table.push_str(&rule);
    }
    Ok(table)
}

/// The rows as lines, one for each value; the first is the one behind as many as were `before`.
///
/// # Errors
/// A value that cannot be shown.
pub fn render_records(schema: &Schema, batch: &RecordBatch, before: usize, widest: usize) -> Result<String> {
    let names: Vec<String> = schema.fields().iter().map(|field| lines(field.name(), widest).join(" ")).collect();
    let width = names.iter().map(|name| name.width()).max().unwrap_or(0);
    let options = value_options();
    let columns = batch.columns().iter().map(|column| ArrayFormatter::try_new(column.as_ref(), &options));
    let columns = columns.collect::<Result<Vec<_>, _>>().context("showing a result")?;
    let mut text = String::new();
    for row in 0..batch.num_rows() {
        text.push_str(&format!("-[ {} ]-\n", before + row + 1));
        for (name, column) in names.iter().zip(&columns) {
            let value = column.value(row).try_to_string().context("showing a result")?;
            for (i, line) in lines(&value, widest).iter().enumerate() {
                let name = if i == 0 { name.as_str() } else { "" };
                let padding = " ".repeat(width - name.width());
                text.push_str(&format!("{name}{padding} | {line}\n"));
            }
        }
    }
    Ok(text)
}

fn push_row(table: &mut String, cells: &[Vec<String>], widths: &[usize], right: &[bool]) {
    let height = cells.iter().map(Vec::len).max().unwrap_or(1);
    for line in 0..height {
        for ((cell, width), right) in cells.iter().zip(widths).zip(right) {
            let text = cell.get(line).map_or("", String::as_str);
            let padding = " ".repeat(width.saturating_sub(text.width()));
            let (before, after) = if *right { (padding.as_str(), "") } else { ("", padding.as_str()) };
            table.push_str(&format!("| {before}{text}{after} "));
        }
        table.push_str("|\n");
    }
}

/// A cell's lines. Control characters are shown, not sent to the terminal.
fn lines(text: &str, widest: usize) -> Vec<String> {
    if text.is_empty() {
        return vec![String::new()];
    }
    text.lines().map(|line| shorten(&visible(line), widest)).collect()
}

fn visible(line: &str) -> String {
    line.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

fn shorten(line: &str, widest: usize) -> String {
    if line.width() <= widest {
        return line.to_owned();
    }
    let mut short: String = line.chars().take(widest.saturating_sub(1)).collect();
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int64Array, StringArray};
    use arrow::datatypes::{DataType, Field};

    use super::*;

    fn batch(numbers: Vec<Option<i64>>, texts: Vec<Option<&str>>) -> RecordBatch {
        let numbers: ArrayRef = Arc::new(Int64Array::from(numbers));
        let texts: ArrayRef = Arc::new(StringArray::from(texts));
        RecordBatch::try_from_iter_with_nullable([("count(*)", numbers, true), ("name", texts, true)]).unwrap()
    }

    #[test]
    fn numbers_are_right_and_null_is_null() {
        let batch = batch(vec![Some(60175), None], vec![Some("Ümläut 日"), None]);
        let expected = "\
+----------+-----------+
| count(*) | name      |
+----------+-----------+
|    60175 | Ümläut 日 |
|     NULL | NULL      |
+----------+-----------+
";
        assert_eq!(render(&batch.schema(), std::slice::from_ref(&batch), MAX_CELL_WIDTH).unwrap(), expected);
    }

    #[test]
    fn lines_stay_lines_and_control_characters_are_shown() {
        let batch = batch(vec![Some(1)], vec![Some("a\nbb\x1b[2J")]);
        let expected = "\
+----------+-------------+
| count(*) | name        |
+----------+-------------+
|        1 | a           |
|          | bb\\u{1b}[2J |
+----------+-------------+
";
        assert_eq!(render(&batch.schema(), std::slice::from_ref(&batch), MAX_CELL_WIDTH).unwrap(), expected);
    }

    #[test]
    fn no_rows_are_a_header() {
        let schema = Schema::new(vec![Field::new("a", DataType::Int64, true)]);
        assert_eq!(render(&schema, &[], MAX_CELL_WIDTH).unwrap(), "+---+\n| a |\n+---+\n");
    }
}
