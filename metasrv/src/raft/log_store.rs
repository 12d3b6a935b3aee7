//! openraft's log storage: a thin coat over [`Log`].

use std::fmt::Debug;
use std::io;
use std::ops::{Range, RangeBounds};

use futures::Stream;
use openraft::OptionalSend;
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};

use super::types::{Entry, LogId, TypeConfig, Vote};
use crate::log::{Log, READ_BYTES, half_open};
use crate::planted::{self, Bug};

/// The log, as openraft sees it. Readers are clones of it.
#[derive(Debug, Clone)]
pub struct LogStore {
    log: Log,
}

impl LogStore {
    /// Over an open log.
    pub fn new(log: Log) -> Self {
        Self { log }
    }
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> Result<Vec<Entry>, io::Error>
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        // Asked for when a peer starts, all behind the last snapshot, for the memberships and ids in it: what is applied or sent is
        // read by the two below.
        self.log.read_unread(range).await
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
        self.clone()
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
