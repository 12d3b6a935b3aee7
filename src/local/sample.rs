//! The sample tables: the eight of TPC-H, loaded at the first start.
//!
//! `<dir>/sample.json` says which sample a directory has and whether it is complete, so that a start without work to do
//! asks nothing. A load that was interrupted is gone on with: a table is there as a whole or not at all.

use std::fmt;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use lake_query::Kind;
use lake_query::client::{SqlClient, SqlError};
use serde::{Deserialize, Serialize};

use crate::console::Progress;

const SCHEMA: &str = "tpch";
const TABLES: [&str; 8] = ["region", "nation", "supplier", "customer", "part", "partsupp", "orders", "lineitem"];
const DEFAULT_SCALE: f64 = 0.01;
const MARKER: &str = "sample.json";
/// How long one statement may take.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3600);
/// How often a statement is tried that failed for reasons that pass, and how long after.
const ATTEMPTS: u32 = 5;
const RETRY_WAIT: Duration = Duration::from_millis(500);

/// What to load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sample {
    None,
    /// TPC-H at a scale; 1 is about 1 GB of raw data.
    Tpch(f64),
}

impl FromStr for Sample {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if s == "none" {
            return Ok(Sample::None);
        }
        let scale = s.strip_prefix("tpch:").ok_or("write tpch:SCALE, like tpch:0.01, or none")?;
        match scale.parse::<f64>() {
            Ok(scale) if scale.is_finite() && scale > 0.0 => Ok(Sample::Tpch(scale)),
            _ => Err(format!("the scale {scale:?} is not a number above 0")),
        }
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sample::None => f.write_str("none"),
            Sample::Tpch(scale) => write!(f, "tpch:{scale}"),
        }
    }
}

/// What a directory has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Marker {
    sample: String,
    complete: bool,
}

/// The scale to load, if anything is to be loaded.
fn plan(marker: Option<&Marker>, asked: Option<Sample>) -> Result<Option<f64>> {
    let held = marker.map(|m| m.sample.parse::<Sample>()).transpose().map_err(|e| anyhow::anyhow!("{MARKER}: {e}"))?;
    let complete = marker.is_some_and(|m| m.complete);
    match (held, asked) {
        (_, Some(Sample::None)) => Ok(None),
        (Some(held), Some(asked)) if held != asked => bail!(
            "the directory has the sample {held}, and {asked} was asked for: choose another directory with --dir, or \
             drop the tables of schema {SCHEMA} and remove {MARKER}"
        ),
        (Some(Sample::None), _) => Ok(None),
        (Some(_), _) if complete => Ok(None),
        (Some(Sample::Tpch(scale)), _) | (None, Some(Sample::Tpch(scale))) => Ok(Some(scale)),
        (None, None) => Ok(Some(DEFAULT_SCALE)),
    }
}

/// Loads what is asked for and not there yet. `None` asks for the default, or for what the directory has.
///
/// # Errors
/// Another sample is there, no query node can be reached, or a statement fails.
pub async fn load(dir: &Path, asked: Option<Sample>, endpoints: &[String], progress: &Progress) -> Result<()> {
    let path = dir.join(MARKER);
    let Some(scale) = plan(read_marker(&path)?.as_ref(), asked)? else { return Ok(()) };
    let sample = Sample::Tpch(scale).to_string();
    write_marker(&path, &Marker { sample: sample.clone(), complete: false })?;

    progress.step(format!("loading the sample {sample}: connecting"));
    let client = SqlClient::connect(endpoints, None).await.context("loading the sample")?;
    run(&client, &format!("CREATE SCHEMA IF NOT EXISTS {SCHEMA}")).await?;
    let present = tables(&client).await?;
    for (i, table) in TABLES.iter().enumerate() {
        if present.iter().any(|p| p == table) {
            continue;
        }
        progress.step(format!("loading the sample {sample}: {SCHEMA}.{table} ({} of {})", i + 1, TABLES.len()));
        run(&client, &format!("CREATE TABLE {SCHEMA}.{table} AS SELECT * FROM tpch('{table}', {scale})")).await?;
    }
    write_marker(&path, &Marker { sample, complete: true })
}

async fn tables(client: &SqlClient) -> Result<Vec<String>> {
    let sql = format!("SELECT table_name FROM information_schema.tables WHERE table_schema = '{SCHEMA}'");
    let batches = client.query(&sql, Some(STATEMENT_TIMEOUT)).await.context("looking which sample tables there are")?;
    let mut names = Vec::new();
    for batch in batches.iter().filter(|b| b.num_columns() > 0) {
        let options = FormatOptions::new();
        let column = ArrayFormatter::try_new(batch.column(0).as_ref(), &options)?;
        for row in 0..batch.num_rows() {
            names.push(column.value(row).try_to_string()?);
        }
    }
    Ok(names)
}

async fn run(client: &SqlClient, sql: &str) -> Result<()> {
    let mut attempt = 1;
    loop {
        let error = match client.query(sql, Some(STATEMENT_TIMEOUT)).await {
            Ok(_) => return Ok(()),
            Err(SqlError { kind: Kind::AlreadyExists, .. }) => return Ok(()),
            Err(e) => e,
        };
        let passing = matches!(error.kind, Kind::Unavailable | Kind::Unknown | Kind::Conflict);
        if !passing || attempt >= ATTEMPTS {
            return Err(error).with_context(|| format!("loading the sample: {sql}"));
        }
        tracing::warn!(%error, attempt, sql, "loading the sample: trying again");
        attempt += 1;
        tokio::time::sleep(RETRY_WAIT).await;
    }
}

fn read_marker(path: &Path) -> Result<Option<Marker>> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
    };
    let marker = serde_json::from_slice(&text);
    marker
        .map(Some)
        .with_context(|| format!("{} is damaged: remove it, and the sample is looked at anew", path.display()))
}

fn write_marker(path: &Path, marker: &Marker) -> Result<()> {
    let next = path.with_extension("json.next");
    let text = serde_json::to_vec(marker)?;
    fs::File::create(&next)
        .and_then(|mut file| file.write_all(&text))
        .and_then(|()| fs::rename(&next, path))
        .with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_as_they_are_shown() {
        for text in ["none", "tpch:0.01", "tpch:1", "tpch:0.005"] {
            assert_eq!(text.parse::<Sample>().unwrap().to_string(), text);
        }
        for wrong in ["tpch", "tpch:", "tpch:0", "tpch:-1", "tpch:inf", "tpch:NaN", "ssb:1", ""] {
            assert!(wrong.parse::<Sample>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_sample_is_loaded_once() {
        let marker = |sample: &str, complete| Marker { sample: sample.to_owned(), complete };
        let small = Sample::Tpch(0.01);
        assert_eq!(plan(None, None).unwrap(), Some(DEFAULT_SCALE));
        assert_eq!(plan(None, Some(Sample::Tpch(1.0))).unwrap(), Some(1.0));
        assert_eq!(plan(None, Some(Sample::None)).unwrap(), None);
        let complete = marker("tpch:0.01", true);
        assert_eq!(plan(Some(&complete), None).unwrap(), None);
        assert_eq!(plan(Some(&complete), Some(small)).unwrap(), None);
        // One that was interrupted is gone on with, also when it is not the default.
        assert_eq!(plan(Some(&marker("tpch:0.1", false)), None).unwrap(), Some(0.1));
        let message = plan(Some(&complete), Some(Sample::Tpch(1.0))).unwrap_err().to_string();
        assert!(message.contains("tpch:0.01") && message.contains("tpch:1 "), "{message}");
        assert!(plan(Some(&marker("what", true)), None).is_err());
    }

    #[test]
    fn a_damaged_marker_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(MARKER);
        assert_eq!(read_marker(&path).unwrap(), None);
        let marker = Marker { sample: "tpch:1".into(), complete: true };
        write_marker(&path, &marker).unwrap();
        assert_eq!(read_marker(&path).unwrap(), Some(marker));
        fs::write(&path, "{").unwrap();
        assert!(read_marker(&path).unwrap_err().to_string().contains(MARKER));
    }
}
