//! What SQL does, written down as sqllogictest files: `*.slt` beside this one, each run over a cluster of its own.
//!
//! They are read and run by the `sqllogictest` crate. These of its records are used:
//! - `statement ok`, `statement count N` for how many rows were changed, `statement error REGEX`.
//! - `query TYPES [rowsort]`, then `----` and the rows, and `query error REGEX`. Of `rowsort` the rows are written in order.
//!   TYPES has a letter for each column: `I` for integers, `R` for floats and decimals, `B` for booleans, `T` for all else.
//! - `connection NAME`: the next record, and only that, is run by a client of this name, and of the second node if the name
//!   ends in 2.
//! - `#` and what follows, where a record would begin.
//!
//! A value is written as text, NULL as `NULL` and an empty text as `(empty)`; how many spaces are between values does not
//! matter. `$FILES` in a statement is a directory of the file's own. The regular expression of an error must match within its
//! message: `(`, `)`, `+`, `*`, `?`, `[`, `{`, `|` and `\` need a backslash.

use std::cell::Cell;
use std::path::Path;

use arrow::datatypes::DataType;
use lake_query::client::{SqlClient, SqlError};
use sqllogictest::{
    AsyncDB, ColumnType, Connection, DBOutput, Record, RecordOutput, Runner, parse_with_name, strict_column_validator,
};

use crate::common::*;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Type {
    Integer,
    Real,
    Boolean,
    Text,
}

impl Type {
    fn of(column: &DataType) -> Self {
        match column {
            DataType::Boolean => Self::Boolean,
            column if column.is_integer() => Self::Integer,
            column if column.is_numeric() => Self::Real,
            _ => Self::Text,
        }
    }
}

impl ColumnType for Type {
    fn from_char(letter: char) -> Option<Self> {
        match letter {
            'I' => Some(Self::Integer),
            'R' => Some(Self::Real),
            'B' => Some(Self::Boolean),
            'T' => Some(Self::Text),
            _ => None,
        }
    }

    fn to_char(&self) -> char {
        match self {
            Self::Integer => 'I',
            Self::Real => 'R',
            Self::Boolean => 'B',
            Self::Text => 'T',
        }
    }
}

/// A session with a node.
struct Session {
    client: SqlClient,
    files: String,
}

#[async_trait::async_trait]
impl AsyncDB for Session {
    type Error = SqlError;
    type ColumnType = Type;

    async fn run(&mut self, sql: &str) -> Result<DBOutput<Type>, SqlError> {
        let answer = self.client.execute(&sql.replace("$FILES", &self.files), TIMEOUT).await?;
        let is_change = answer.command.is_some();
        let types = answer.schema.fields().iter().map(|field| Type::of(field.data_type())).collect();
        let batches: Vec<_> = futures::TryStreamExt::try_collect(answer).await?;
        let mut rows = rows_of(&batches);
        if is_change {
            let count = rows.concat();
            assert_eq!(count.len(), 1, "{sql} changed {count:?}");
            return Ok(DBOutput::StatementComplete(count[0].parse().unwrap()));
        }
        for value in rows.iter_mut().flatten().filter(|value| value.is_empty()) {
            "(empty)".clone_into(value);
        }
        Ok(DBOutput::Rows { types, rows })
    }

    async fn shutdown(&mut self) {}
}

/// Runs one file, and says of every record that does not hold what it was like.
async fn run_file(path: &Path) -> Vec<String> {
    let name = path.file_name().unwrap().to_string_lossy();
    let text = std::fs::read_to_string(path).unwrap();
    let records = match parse_with_name::<Type>(&text, name.as_ref()) {
        Ok(records) => records,
        Err(error) => return vec![error.to_string()],
    };
    let cluster = Cluster::over(std::sync::Arc::new(lake_client::memory::MemoryStore::new()), 2, |options| {
        lake_query::Options { allow_local_files: Some(true), ..options }
    })
    .await;
    let files = cluster.dir.path().join("files");
    std::fs::create_dir(&files).unwrap();
    // The runner asks for a new connection without its name.
    let node = Cell::new(0);
    let mut runner = Runner::new(|| {
        let (cluster, node, files) = (&cluster, node.get(), files.display().to_string());
        async move { Ok::<_, SqlError>(Session { client: cluster.client(node).await, files }) }
    });
    runner.with_column_validator(strict_column_validator);
    let (mut ran, mut wrong) = (0, Vec::new());
    for record in records {
        if let Record::Statement { connection, .. } | Record::Query { connection, .. } = &record {
            node.set(usize::from(matches!(connection, Connection::Named(name) if name.ends_with('2'))));
        }
        match runner.run_async(record.clone()).await {
            Ok(RecordOutput::Nothing) => continue,
            Ok(RecordOutput::Statement { .. }) if matches!(record, Record::Query { .. }) => {
                wrong.push(format!("{name}: this changes something, and is no query:\n{record}"));
            }
            Ok(_) => {}
            Err(error) => wrong.push(error.to_string()),
        }
        ran += 1;
    }
    let written = text.lines().filter(|line| line.starts_with("statement ") || line.starts_with("query ")).count();
    if ran != written {
        wrong.push(format!("{name}: {ran} of {written} records were run\n"));
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_hold() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sqllogic");
    let mut files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "slt"));
    files.sort();
    assert!(!files.is_empty());
    let wrong: Vec<String> = futures::future::join_all(files.iter().map(|path| run_file(path))).await.concat();
    assert!(wrong.is_empty(), "{} records do not hold:\n\n{}", wrong.len(), wrong.join("\n"));
}
