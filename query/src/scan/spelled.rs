//! What a table is, in words of SQL: the statement that makes one like it, and its properties.

use std::collections::BTreeMap;

use arrow::datatypes::DataType;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::common::ScalarValue;
use datafusion::sql::sqlparser::keywords::ALL_KEYWORDS;
use iceberg::spec::{Literal, NullOrder, SortDirection, TableMetadata, Transform};

use super::adapter::NAME_MAPPING;
use super::values::literal_scalar;
use crate::error::Result;
use crate::table::layout;
use crate::table::types::arrow_schema;
use crate::table::{FORMAT_VERSION, Table, new_table_properties};
use crate::words;

/// The statement. It leaves out what every new table has, and what goes by the ids of this one's columns.
///
/// # Errors
/// If there is a column that lake cannot read.
pub fn create_statement(table: &Table) -> Result<String> {
    let metadata = table.metadata.as_ref();
    let schema = metadata.current_schema();
    let arrow = arrow_schema(schema)?;
    let columns = schema.as_struct().fields().iter().zip(arrow.fields()).map(|(column, field)| {
        let mut text = format!("  {} {}", name(&column.name), words::sql_type(field.data_type()));
        if column.required {
            text.push_str(" NOT NULL");
        }
        if let Some(Literal::Primitive(default)) = &column.write_default
            && let Some(default) = literal_scalar(default, field.data_type()).as_ref().and_then(value)
        {
            text.push_str(&format!(" DEFAULT {default}"));
        }
        if let Some(comment) = &column.doc {
            text.push_str(&format!(" COMMENT {}", quoted(comment)));
        }
        text
    });
    let columns: Vec<String> = columns.collect();
    let (namespace, table) = (name(&table.ident.namespace.to_string()), name(&table.ident.name));
    let mut text = format!("CREATE TABLE {namespace}.{table} (\n{}\n)", columns.join(",\n"));
    if let Some(columns) = partitioning(metadata) {
        text.push_str(&format!("\nPARTITIONED BY ({columns})"));
    }
    if let Some(columns) = order(metadata) {
        text.push_str(&format!("\nSORTED BY ({columns})"));
    }
    let new = new_table_properties();
    let own = metadata.properties().iter().filter(|(key, value)| *key != NAME_MAPPING && new.get(*key) != Some(*value));
    let own: BTreeMap<&String, &String> = own.collect();
    let version = metadata.format_version() as u8;
    // Format version 2 is what a table has of which nothing is said.
    let version = (version > 2).then(|| format!("'{FORMAT_VERSION}' = '{version}'"));
    let own = own.into_iter().map(|(key, value)| format!("{} = {}", quoted(key), quoted(value)));
    let properties: Vec<String> = version.into_iter().chain(own).collect();
    if !properties.is_empty() {
        text.push_str(&format!("\nWITH ({})", properties.join(", ")));
    }
    Ok(text)
}

/// The properties, and under names that no property may have what the metadata says elsewhere.
pub fn properties(table: &Table) -> BTreeMap<String, String> {
    let metadata = table.metadata.as_ref();
    let mut properties: BTreeMap<String, String> =
        metadata.properties().iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    let more = [
        (FORMAT_VERSION, Some((metadata.format_version() as u8).to_string())),
        ("location", Some(metadata.location().to_owned())),
        ("default-partition-spec", partitioning(metadata)),
        ("default-sort-order", order(metadata)),
    ];
    properties.extend(more.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
    properties
}

/// A value as a statement has it.
pub fn value(of: &ScalarValue) -> Option<String> {
    let array = of.to_array().ok()?;
    let text =
        ArrayFormatter::try_new(array.as_ref(), &FormatOptions::default()).ok()?.value(0).try_to_string().ok()?;
    Some(match of.data_type() {
        DataType::Boolean | DataType::Int32 | DataType::Int64 | DataType::Decimal128(..) => text,
        DataType::Float32 | DataType::Float64 if text.parse::<f64>().is_ok_and(f64::is_finite) => text,
        DataType::Binary | DataType::BinaryView | DataType::FixedSizeBinary(_) => format!("X'{text}'"),
        _ => quoted(&text),
    })
}

/// What a table is partitioned by.
fn partitioning(metadata: &TableMetadata) -> Option<String> {
    let fields = metadata.default_partition_spec().fields().iter();
    let columns = fields.filter_map(|field| transformed(metadata, field.source_id, field.transform));
    joined(columns)
}

/// What the rows of a file are sorted by.
fn order(metadata: &TableMetadata) -> Option<String> {
    let columns = metadata.default_sort_order().fields.iter().filter_map(|field| {
        let descending = field.direction == SortDirection::Descending;
        let nulls_first = field.null_order == NullOrder::First;
        let direction = if descending { " DESC" } else { "" };
        let nulls = match (descending, nulls_first) {
            (true, true) => " NULLS FIRST",
            (false, false) => " NULLS LAST",
            // As it is where nothing is said.
            _ => "",
        };
        Some(format!("{}{direction}{nulls}", transformed(metadata, field.source_id, field.transform)?))
    });
    joined(columns)
}

fn joined(columns: impl Iterator<Item = String>) -> Option<String> {
    let columns: Vec<String> = columns.collect();
    (!columns.is_empty()).then(|| columns.join(", "))
}

/// None for what makes no difference: a column that is gone.
fn transformed(metadata: &TableMetadata, column: i32, transform: Transform) -> Option<String> {
    let path = layout::names(metadata.current_schema(), column)?;
    let column = path.into_iter().map(name).collect::<Vec<_>>().join(".");
    Some(match transform {
        Transform::Void => return None,
        Transform::Identity => column,
        Transform::Bucket(n) => format!("bucket({n}, {column})"),
        Transform::Truncate(n) => format!("truncate({n}, {column})"),
        other => format!("{other}({column})"),
    })
}

/// A name as a statement has it. One that is a word of SQL is quoted, whether it has to be or not.
pub fn name(of: &str) -> String {
    match words::quoted(of) {
        plain if plain == of && ALL_KEYWORDS.contains(&of.to_ascii_uppercase().as_str()) => format!("\"{of}\""),
        name => name,
    }
}

/// A text as a statement has it.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
