//! Going through a log from end to end: each entry is applied, and each snapshot compared with what that gives at its place.
//!
//! Failure cases: an entry that does not read: what stands before it counts; one that this build does not know: an error.

use std::collections::BTreeSet;
use std::io::ErrorKind;

use openraft::entry::RaftEntry;

use super::reading::{LogRange, Reading};
use crate::error::Error;
use crate::log::{Log, READ_BYTES};
use crate::raft::state_machine::Applied;
use crate::raft::types::LogId;
use crate::state::FEATURE_LEVEL;

/// Going through a log.
pub(super) struct Replay<'a> {
    log: &'a Log,
    hashes_at: BTreeSet<u64>,
    range: LogRange,
    /// The newest entry looked at.
    newest: Option<LogId>,
}

impl<'a> Replay<'a> {
    /// Of a log that is open. `hashes_at`: where the state's hash is wanted.
    pub fn new(log: &'a Log, hashes_at: BTreeSet<u64>) -> Self {
        Self { log, hashes_at, range: LogRange::default(), newest: None }
    }

    /// Applies it to a state that it joins, and notes what comes of it.
    ///
    /// # Errors
    /// An entry that only a newer build knows; what the system refuses.
    pub async fn run(mut self, base: Option<Applied>, reading: &mut Reading) -> Result<(), Error> {
        let (purged, last) = self.log.bounds();
        self.range = LogRange { purged, last, ..reading.log.unwrap_or_default() };
        let joins = |applied: &Applied| applied.last.map(|id| id.index) >= purged.map(|id| id.index);
        let mut applied = base.or_else(|| purged.is_none().then(Applied::default));
        if !applied.as_ref().is_some_and(joins) {
            let from = purged.map_or(0, |id| id.index);
            let snapshots = reading.dir.join("snapshots");
            reading.damage(snapshots, format!("there is no snapshot that reaches entry {from}, where the log begins"));
        }
        let goes_on = applied.as_ref().is_some_and(joins);
        let committed = reading.committed_index();
        let mut next = purged.map_or(0, |id| id.index + 1);
        let mut at_once = READ_BYTES;
        loop {
            let entries = match self.log.read(next.., at_once).await {
                Ok(entries) if entries.is_empty() => break,
                Ok(entries) => entries,
                Err(e) if e.kind() == ErrorKind::Unsupported => return Err(Error::Newer(e.to_string())),
                // One by one, up to the one that does not read.
                Err(_) if at_once > 1 => {
                    at_once = 1;
                    continue;
                }
                // Of the copy: that says nothing of the log.
                Err(e) if e.kind() != ErrorKind::InvalidData => {
                    return Err(Error::Io {
                        doing: format!("reading the log of {}", reading.dir.display()),
                        source: e,
                    });
                }
                Err(e) => {
                    reading.damage(reading.dir.join("log"), format!("from entry {next} on: {e}"));
                    self.range.whole = false;
                    break;
                }
            };
            for entry in entries {
                let id = entry.log_id;
                next = entry.index() + 1;
                self.newest = Some(id);
                self.range.entries += 1;
                let Some(state) = applied.as_mut().filter(|state| goes_on && state.last < Some(id)) else { continue };
                // What a snapshot covers is known to be committed, also where the log goes on.
                if reading.committed.is_none() && state.last.map(|id| id.index) == committed {
                    reading.committed = Some(state.clone());
                }
                state.apply(entry, FEATURE_LEVEL).map_err(|e| Error::Newer(e.to_string()))?;
                self.compare(state, reading);
            }
        }
        self.finish(applied, reading);
        Ok(())
    }

    /// Compares the state with a snapshot taken at the same place.
    fn compare(&self, state: &Applied, reading: &mut Reading) {
        let Some(last) = state.last else { return };
        let hash = || state.state.digest();
        if self.hashes_at.contains(&last.index) {
            // What is taken of a log is what it gives, whatever a snapshot says.
            reading.hashes.insert(last.index, hash());
        }
        let Some(snapshot) = reading.snapshots.iter().find(|s| s.covers.index == last.index && s.hash.is_some()) else {
            return;
        };
        let path = snapshot.path.clone();
        if snapshot.covers != last {
            let covers = snapshot.covers;
            reading.damage(path, format!("it covers {covers}, and the log has {last} there"));
            reading.contradicts_itself = true;
        } else if snapshot.hash != Some(hash()) {
            reading.damage(path, "its state is not what the log gives from the snapshot before it");
            reading.contradicts_itself = true;
        }
    }

    fn finish(mut self, applied: Option<Applied>, reading: &mut Reading) {
        // A log that could not be read to its end ends where it still reads.
        if !self.range.whole {
            self.range.last = self.newest.or(self.range.purged);
        }
        reading.log = Some(self.range);
        reading.replayed = applied.filter(|applied| applied.last.is_some());
        if reading.mark.as_ref().is_some_and(|mark| {
            let noted = mark.snapshot.map(|id| id.index);
            reading.snapshots.iter().map(|s| s.covers.index).max() < noted
        }) {
            let snapshots = reading.dir.join("snapshots");
            reading.damage(snapshots, "the mark notes a newer snapshot than there is");
        }
        if reading.replayed.as_ref().is_some_and(|applied| reading.is_alone(applied)) {
            reading.committed.clone_from(&reading.replayed);
        }
    }
}
