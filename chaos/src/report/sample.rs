//! `samples.jsonl`: one look at all peers a line.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Error;

/// Its name in a run's directory.
pub const FILE_NAME: &str = "samples.jsonl";

/// One look at all peers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Nanoseconds since the run began, as in the history.
    pub time_ns: u64,
    /// Whom a quorum's newest term names; none if nobody is known to lead.
    pub leader: Option<u64>,
    /// The highest that any peer knows.
    pub term: u64,
    /// Those that answered.
    pub peers: Vec<PeerSample>,
}

/// What one peer said of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerSample {
    pub id: u64,
    /// `member`, `recovering`, ...
    pub stage: String,
    pub term: u64,
    /// The log index up to which it has applied.
    pub applied: u64,
    /// The last log index that it has.
    pub last: u64,
}

/// Reads a run's samples; none if there is no such file.
///
/// # Errors
/// The file cannot be read, or a line is no sample.
pub fn read(dir: &Path) -> Result<Vec<Sample>, Error> {
    let path = dir.join(FILE_NAME);
    let text = super::read(&path)?.unwrap_or_default();
    let sample = |(line, text): (usize, &str)| {
        serde_json::from_str(text).map_err(|source| Error::Json { path: path.clone(), line: line + 1, source })
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(sample).collect()
}
