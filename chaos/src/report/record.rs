//! `run.json`: what was asked for, and what was seen besides the history.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Error;
use crate::check::{Death, Run, convergence};
use crate::history::Workload;

/// Its name in a run's directory.
pub const FILE_NAME: &str = "run.json";

/// What was asked for, with what, and what was seen besides the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The command that repeats the run, word by word.
    pub command: Vec<String>,
    /// Of lake.
    pub version: String,
    /// When it began, by the wall clock, in milliseconds since 1970.
    pub began_unix_ms: u64,
    pub workload: Workload,
    /// The faults that were asked for, as they were: `kill:leader`.
    pub nemeses: Vec<String>,
    /// What the history calls them, each once: `kill-leader`.
    pub faults: Vec<String>,
    pub peers: u64,
    #[serde(default)]
    pub query_nodes: u64,
    pub clients: u64,
    /// Operations per second that were asked for.
    pub rate: f64,
    /// How long clients were to be at it.
    pub time_ms: u64,
    pub seed: u64,
    /// When the clients ended, in the history's time.
    pub load_ended_ns: u64,
    /// What was seen once every fault had ended; none if the run did not get that far.
    pub facts: Option<convergence::Facts>,
    /// How often operations ended in which error.
    pub errors: BTreeMap<String, u64>,
    /// Peers that ended without having been told to; missing where this program is not their supervisor.
    pub deaths: Option<Vec<Death>>,
    /// Why the run ended before it was done.
    pub interrupted: Option<String>,
}

impl Record {
    /// What the checkers need of it.
    pub fn run(&self) -> Run<'_> {
        Run {
            faults: &self.faults,
            deaths: self.deaths.as_deref(),
            convergence: self.facts.as_ref(),
            interrupted: self.interrupted.as_deref(),
        }
    }

    /// The command as it is typed into a shell.
    pub fn command_line(&self) -> String {
        self.command.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=@%+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Reads a run's record; `None` if there is none.
///
/// # Errors
/// The file cannot be read, or is no record.
pub fn read(dir: &Path) -> Result<Option<Record>, Error> {
    let path = dir.join(FILE_NAME);
    let Some(text) = super::read(&path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|source| Error::Json { path, line: source.line(), source })
}

/// Writes a run's record.
///
/// # Errors
/// The file cannot be written.
pub fn write(dir: &Path, record: &Record) -> Result<(), Error> {
    let path = dir.join(FILE_NAME);
    let mut json =
        serde_json::to_vec_pretty(record).map_err(|source| Error::Json { path: path.clone(), line: 0, source })?;
    json.push(b'\n');
    super::put(&path, &json)
}
