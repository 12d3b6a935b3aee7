//! What SQL does, written down as sqllogictest files: `*.slt` beside this one, each run over a cluster of its own.
//!
//! Of the format these records are used: `statement ok`, `statement count N`, `statement error TEXT`, `query TYPES
//! [rowsort]` with `----` and the rows, `query error TEXT`, and `connection NAME`, where a name that ends in 2 is a client
//! of the second node. A value is written as text, NULL as `NULL` and an empty text as `(empty)`; how many spaces are between
//! values does not matter. The text of an error must be in the message.

use std::collections::HashMap;
use std::path::Path;

use lake_query::client::SqlClient;

use crate::common::*;

/// One record of a file.
#[derive(Debug)]
struct Record {
    line: usize,
    connection: String,
    sql: String,
    expected: Expected,
}

#[derive(Debug)]
enum Expected {
    Ok,
    Count(u64),
    Error(String),
    Rows { columns: usize, rows: Vec<String>, sorted: bool },
}

fn records(text: &str) -> Vec<Record> {
    let mut records = Vec::new();
    let mut connection = "default".to_owned();
    let mut lines = text.lines().enumerate().peekable();
    while let Some((number, line)) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let expected = match words.as_slice() {
            [] => continue,
            [word, ..] if word.starts_with('#') => continue,
            ["connection", name] => {
                connection = (*name).to_owned();
                continue;
            }
            ["statement", "ok"] => Expected::Ok,
            ["statement", "count", count] => Expected::Count(count.parse().unwrap()),
            ["statement" | "query", "error", ..] => {
                Expected::Error(line.split_once("error").map(|(_, rest)| rest.trim().to_owned()).unwrap())
            }
            ["query", types] => Expected::Rows { columns: types.len(), rows: Vec::new(), sorted: false },
            ["query", types, "rowsort"] => Expected::Rows { columns: types.len(), rows: Vec::new(), sorted: true },
            _ => panic!("line {}: {line:?} is no record", number + 1),
        };
        let mut sql = Vec::new();
        let mut rows = Vec::new();
        let mut into_rows = false;
        while let Some((_, line)) = lines.next_if(|(_, line)| !line.trim().is_empty()) {
            match (line, into_rows) {
                ("----", _) => into_rows = true,
                (line, false) => sql.push(line),
                (line, true) => rows.push(line.split_whitespace().collect::<Vec<_>>().join(" ")),
            }
        }
        let expected = match expected {
            Expected::Rows { columns, sorted, .. } => {
                if sorted {
                    rows.sort();
                }
                Expected::Rows { columns, rows, sorted }
            }
            other => other,
        };
        records.push(Record { line: number + 1, connection: connection.clone(), sql: sql.join("\n"), expected });
    }
    records
}

/// Whether a record holds; else what it was like.
async fn check(client: &SqlClient, record: &Record) -> Result<(), String> {
    let answer = match client.execute(&record.sql, TIMEOUT).await {
        Ok(rows) => {
            let command = rows.command.clone();
            let columns = rows.schema.fields().len();
            futures::TryStreamExt::try_collect::<Vec<_>>(rows).await.map(|batches| (command, columns, batches))
        }
        Err(error) => Err(error),
    };
    match (&record.expected, answer) {
        (Expected::Error(text), Err(error)) if error.message.contains(text) => Ok(()),
        (Expected::Error(text), Err(error)) => Err(format!("an error with {text:?} was expected, not: {error}")),
        (_, Err(error)) => Err(format!("{:?} {error}", error.kind)),
        (Expected::Error(text), Ok((_, _, rows))) => {
            Err(format!("an error with {text:?} was expected, not:\n{}", pretty(&rows)))
        }
        (Expected::Ok, Ok(_)) => Ok(()),
        (Expected::Count(count), Ok((_, _, rows))) => match rows_of(&rows).concat() {
            found if found == [count.to_string()] => Ok(()),
            found => Err(format!("{count} rows were expected, not {found:?}")),
        },
        (Expected::Rows { columns, rows, sorted }, Ok((_, width, batches))) => {
            let value = |value: &String| match value.is_empty() {
                true => "(empty)".to_owned(),
                false => value.split_whitespace().collect::<Vec<_>>().join(" "),
            };
            let found = rows_of(&batches);
            let mut found: Vec<String> =
                found.iter().map(|row| row.iter().map(value).collect::<Vec<_>>().join(" ")).collect();
            if *sorted {
                found.sort();
            }
            match (width == *columns, found == *rows) {
                (true, true) => Ok(()),
                (false, _) => Err(format!("{columns} columns were expected, not {width}")),
                (_, false) => Err(format!("expected:\n{}\nfound:\n{}", rows.join("\n"), found.join("\n"))),
            }
        }
    }
}

/// Runs one file, and says of every record that does not hold what it was like.
async fn run_file(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let cluster = Cluster::over(std::sync::Arc::new(lake_client::memory::MemoryStore::new()), 2, |options| {
        lake_query::Options { allow_local_files: Some(true), ..options }
    })
    .await;
    let files = cluster.dir.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let mut clients: HashMap<String, SqlClient> = HashMap::new();
    let mut wrong = Vec::new();
    for mut record in records(&text) {
        record.sql = record.sql.replace("$FILES", &files.display().to_string());
        let node = usize::from(record.connection.ends_with('2'));
        if !clients.contains_key(&record.connection) {
            clients.insert(record.connection.clone(), cluster.client(node).await);
        }
        if let Err(why) = check(&clients[&record.connection], &record).await {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            wrong.push(format!("{name}:{}: {}\n{why}\n", record.line, record.sql));
        }
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
