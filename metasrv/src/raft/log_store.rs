//! openraft's log storage: a thin coat over [`Log`].

use std::fmt::Debug;
use std::io;
use std::ops::{Range, RangeBounds};

use futures::Stream;
use openraft::OptionalSend;
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};

use super::types::{Entry, LogId, TypeConfig, Vote};
use crate::log::{Log, READ_BYTES, entry_bytes, half_open};
use crate::planted::{self, Bug};

/// The log, as openraft sees it. Readers have the same log.
#[derive(Debug)]
pub struct LogStore {
    log: Log,
    ahead: Ahead,
}

impl LogStore {
    /// Over an open log.
    pub fn new(log: Log) -> Self {
        Self { log, ahead: Ahead::default() }
    }

    /// How many entries were read before they were asked for, and wait.
    #[cfg(test)]
    pub(crate) fn read_ahead(&self) -> usize {
        self.ahead.entries.len()
    }
}

/// What a reader that goes backwards through the log has read beyond what it was asked for. openraft's search for memberships goes
/// so when a peer starts, 64 entries at a time, down to the snapshot where it finds none: each of its steps would be work for
/// another thread, and a search in sled.
///
/// Limit: about [`READ_BYTES`] of entries.
#[derive(Debug, Default)]
struct Ahead {
    /// In order. What is asked for next is their end.
    entries: Vec<Entry>,
    /// Where the last range that was asked for began.
    start: u64,
    /// How many entries may be read at once, if they are like those of that range.
    step: u64,
    /// How often they were larger of late: each time half as many are tried from then on, and twice as many after a read that was not.
    misses: u32,
    /// How often entries had been taken back when these were read.
    truncations: u64,
}

impl Ahead {
    /// The entries of a range, if all of them are here.
    fn take(&mut self, start: u64, end: u64, log: &Log) -> Option<Vec<Entry>> {
        let begins = self.entries.first().is_some_and(|first| (first.index()..end).contains(&start));
        let ends = self.entries.last().is_some_and(|last| last.index() + 1 == end);
        let is_there =
            log.truncations() == self.truncations && log.bounds().0.is_none_or(|purged| purged.index < start);
        if begins && ends && is_there {
            return Some(self.split(start));
        }
        self.entries.clear();
        None
    }

    /// From where to read for a range: from further back for who goes backwards, by whole ranges of that length.
    fn begin(&self, start: u64, end: u64) -> u64 {
        let length = end.saturating_sub(start).max(1);
        let ahead = (self.step / length).saturating_sub(1) * length;
        if end == self.start { start.saturating_sub(ahead) } else { start }
    }

    /// Keeps what was read before a range, and returns the rest.
    fn keep(&mut self, read: Vec<Entry>, start: u64) -> Vec<Entry> {
        let bytes: usize = read.iter().map(entry_bytes).sum();
        let step = (READ_BYTES / 2 * read.len()).checked_div(bytes).unwrap_or(0);
        self.step = step as u64 >> self.misses.min(63);
        self.entries = read;
        self.split(start)
    }

    fn split(&mut self, start: u64) -> Vec<Entry> {
        self.start = start;
        let at = self.entries.partition_point(|entry| entry.index() < start);
        self.entries.split_off(at)
    }
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> Result<Vec<Entry>, io::Error>
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        // Asked for when a peer starts, all behind the last snapshot, for the memberships and ids in it: what is applied or sent is
        // read by the two below.
        let Range { start, end } = half_open(&range);
        if let Some(entries) = self.ahead.take(start, end, &self.log) {
            return Ok(entries);
        }
        let begin = self.ahead.begin(start, end);
        if begin < start {
            self.ahead.truncations = self.log.truncations();
            let read = self.log.read_unread(begin..end, READ_BYTES).await?;
            if read.last().is_some_and(|last| last.index() + 1 == end) {
                self.ahead.misses = self.ahead.misses.saturating_sub(1);
                return Ok(self.ahead.keep(read, start));
            }
            self.ahead.misses += 1;
        } else {
            self.ahead.misses = self.ahead.misses.saturating_sub(1);
        }
        let read = self.log.read_unread(start..end, usize::MAX).await?;
        Ok(self.ahead.keep(read, start))
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.log.vote().filter(|_| !planted::has(Bug::VoteForgotten)))
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        let entries = self.log.read(start..end, READ_BYTES).await?;
        // If a purge overtook this, the first ones are gone. What follows would be sent behind an entry that it does not
        // follow; nothing is taken for a heartbeat.
        Ok(if entries.first().is_some_and(|first| first.index() == start) { entries } else { Vec::new() })
    }

    /// In pieces of about [`READ_BYTES`], so that applying a long log does not take all of it into memory.
    async fn entries_stream<RB>(&mut self, range: RB) -> impl Stream<Item = Result<Entry, io::Error>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let Range { start, end } = half_open(&range);
        let log = self.log.clone();
        let pieces = futures::stream::try_unfold(start, move |next| {
            let log = log.clone();
            async move {
                let entries = log.read(next..end, READ_BYTES).await?;
                let after = entries.last().map(|e| e.index() + 1);
                Ok::<_, io::Error>(after.map(|after| (futures::stream::iter(entries.into_iter().map(Ok)), after)))
            }
        });
        Box::pin(futures::TryStreamExt::try_flatten(pieces))
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, io::Error> {
        let (last_purged_log_id, last_log_id) = self.log.bounds();
        Ok(LogState { last_purged_log_id, last_log_id })
    }

    async fn get_log_reader(&mut self) -> Self {
        Self::new(self.log.clone())
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        self.log.save_vote(*vote).await
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        self.log.append(entries.into_iter().collect(), callback).await
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> Result<(), io::Error> {
        self.log.truncate_after(last_log_id).await
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), io::Error> {
        self.log.purge(log_id).await
    }
}
