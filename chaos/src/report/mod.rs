//! What is left of a run: `results.json` for machines, `report.html` for people.
//!
//! - [`record`]: `run.json`, what was asked for and what was seen besides the history; [`sample`]: `samples.jsonl`, who
//!   led and how far each peer was;
//! - [`results`]: the verdicts and figures; [`attacks`]: the faults; [`series`]: throughput and latency over time;
//! - [`page`]: the page; [`charts`], [`diagram`]: its pictures; [`svg`]: shapes and text, escaped;
//! - [`index`]: one page over several runs.
//!
//! The page is one file that needs nothing else: its pictures are inline SVG, and it loads nothing. All of it follows from
//! the files of the run's directory, so that it can be made again ([`build`]).

pub mod attacks;
mod charts;
mod diagram;
pub mod index;
pub mod page;
pub mod record;
pub mod results;
pub mod sample;
pub mod series;
mod svg;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

pub use record::Record;
pub use results::Results;
pub use sample::{PeerSample, Sample};

use crate::check::{self, Options};
use crate::history::{History, Workload, file};

/// Why a report could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{doing} {}: {source}", .path.display())]
    Io { doing: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{}, line {line}: {source}", .path.display())]
    Json { path: PathBuf, line: usize, source: serde_json::Error },
    #[error(transparent)]
    History(#[from] file::ReadError),
}

/// Judges the run whose files are in a directory, and writes its results and page there.
///
/// Without a `run.json` only the history is judged: what was asked for is not known.
///
/// # Errors
/// A file cannot be read, is not what it should be, or cannot be written.
pub fn build(dir: &Path, options: &Options) -> Result<Results, Error> {
    let record = record::read(dir)?;
    let samples = sample::read(dir)?;
    let asked = record.as_ref().map(|record| record.workload);
    let (workload, history) = file::read(&dir.join(file::FILE_NAME), asked)?;
    write(dir, workload, &history, record.as_ref(), &samples, options)
}

/// The same for a run whose parts are at hand.
///
/// # Errors
/// A file cannot be written.
pub fn write(
    dir: &Path,
    workload: Workload,
    history: &History,
    record: Option<&Record>,
    samples: &[Sample],
    options: &Options,
) -> Result<Results, Error> {
    let outcomes = match record {
        Some(record) => check::judge_run(workload, history, &record.run(), options),
        None => check::judge_history(workload, history, options),
    };
    let results = Results::new(workload, history, record.cloned(), outcomes);
    let mut json = serde_json::to_vec_pretty(&results).map_err(|source| Error::Json {
        path: dir.join(results::FILE_NAME),
        line: 0,
        source,
    })?;
    json.push(b'\n');
    put(&dir.join(results::FILE_NAME), &json)?;
    put(&dir.join(page::FILE_NAME), page::page(&results, history, samples).as_bytes())?;
    Ok(results)
}

/// Replaces a file: a reader sees the old or the new one.
fn put(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let next = path.with_extension("next");
    fs::write(&next, bytes).and_then(|()| fs::rename(&next, path)).map_err(|source| Error::Io {
        doing: "writing",
        path: path.to_owned(),
        source,
    })
}

/// Reads a file that may be missing.
fn read(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { doing: "reading", path: path.to_owned(), source }),
    }
}
