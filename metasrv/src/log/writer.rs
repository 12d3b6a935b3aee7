//! The thread that writes a peer's log and mark.
//!
//! It takes everything that is queued, makes one batch of neighbouring appends, and makes it durable:
//! - in the journal: write, fdatasync, callbacks; sled gets the entries afterwards, unsynced, many at once;
//! - a batch that is large for the journal: sled, fdatasync, mark, fdatasync, callbacks.
//!
//! [`Writer::drain`] syncs sled and notes in the mark that nothing in the journal counts any more. It is done when the
//! journal is full, before a large batch, before a truncation or purge, and when the log is closed. So the journal only
//! ever holds entries that follow on what the mark says. Votes and truncations write the mark first. Requests are done
//! strictly in the order they were queued.
//!
//! Failure cases:
//! - little room on the disk: the batch is held, unacknowledged, and looked at again every [`HOLD_POLL`]; whatever is
//!   queued behind it waits too, which stops this peer's Raft core, but not its process; once the peer stops, all of that is
//!   refused;
//! - a failed write or sync: after it nobody knows what is on disk, so nothing is acknowledged ever again
//!   ([`Health::Failed`]), and the process must end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lake_client::clock;
use openraft::storage::IOFlushed;
use prost::Message;
use tokio::sync::mpsc::{self, error::TryRecvError};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::journal::Journal;
use super::mark::MarkFile;
use super::sled_log::{Frame, SledLog};
use super::{Health, LogOptions, Shared, entry_bytes, lock};
use crate::peer::latencies::{self, LogLatencies};
use crate::raft::types::{Entry, LogId, TypeConfig, Vote};
use crate::raft::wire::entry_to_wire;

/// How often a held batch looks for room.
pub const HOLD_POLL: Duration = Duration::from_millis(100);
/// So many bytes are given to sled at once.
const STORE_BYTES: usize = 32 << 10;
/// A batch takes up no more once it has this many bytes.
const BATCH_BYTES: usize = 8 << 20;
/// Room a batch may take beyond its own bytes: sled writes whole segments.
const OVERHEAD_BYTES: u64 = 8 << 20;

type Reply = oneshot::Sender<io::Result<()>>;

/// What the writer is asked to do.
pub enum Request {
    Append {
        entries: Vec<Entry>,
        callback: IOFlushed<TypeConfig>,
        /// What the entries take of the queue's room.
        room: OwnedSemaphorePermit,
    },
    Vote {
        vote: Vote,
        reply: Reply,
    },
    Truncate {
        last: Option<LogId>,
        reply: Reply,
    },
    Purge {
        upto: LogId,
        reply: Reply,
    },
    Snapshot {
        upto: LogId,
        reply: Reply,
    },
    Adopt {
        cluster_id: String,
        reply: Reply,
    },
    Stop,
}

/// Entries to write, and who is told.
struct Append {
    entries: Vec<Entry>,
    callback: IOFlushed<TypeConfig>,
    _room: OwnedSemaphorePermit,
}

/// What a log consists of on disk.
pub(crate) struct Files {
    pub(crate) mark: MarkFile,
    pub(crate) journal: Journal,
    pub(crate) entries: Arc<SledLog>,
}

/// The writer thread's own state.
pub(crate) struct Writer {
    options: LogOptions,
    mark: MarkFile,
    journal: Journal,
    entries: Arc<SledLog>,
    shared: Arc<Shared>,
    requests: mpsc::Receiver<Request>,
    /// In the journal, and not in sled yet: less than [`STORE_BYTES`], and one batch.
    pending: Vec<Frame>,
    pending_bytes: usize,
    /// The last entry written.
    last: Option<LogId>,
    /// Entries up to here are still to be removed from disk.
    purge_upto: Option<u64>,
    latencies: LogLatencies,
    /// Why nothing is written any more.
    refuses: Option<String>,
}

impl Writer {
    pub(crate) fn new(
        options: LogOptions,
        files: Files,
        shared: Arc<Shared>,
        requests: mpsc::Receiver<Request>,
        last: Option<LogId>,
        latencies: LogLatencies,
    ) -> Self {
        let Files { mark, journal, entries } = files;
        let purge_upto = mark.get().purged.map(|id| id.index);
        let (pending, pending_bytes) = (Vec::new(), 0);
        Self {
            options,
            mark,
            journal,
            entries,
            shared,
            requests,
            pending,
            pending_bytes,
            last,
            purge_upto,
            latencies,
            refuses: None,
        }
    }

    pub(crate) fn run(mut self) {
        while let Some(request) = self.next() {
            let mut batch = Vec::new();
            let mut next = Some(request);
            let mut bytes = 0;
            while let Some(request) = next {
                match request {
                    Request::Append { entries, callback, room } => {
                        bytes += entries.iter().map(entry_bytes).sum::<usize>();
                        batch.push(Append { entries, callback, _room: room });
                    }
                    Request::Stop => {
                        self.append(batch);
                        self.close();
                        return;
                    }
                    other => {
                        self.append(std::mem::take(&mut batch));
                        self.single(other);
                        bytes = 0;
                    }
                }
                next = if bytes < BATCH_BYTES { self.requests.try_recv().ok() } else { None };
            }
            self.append(batch);
        }
    }

    /// The next request; while there is none, removes what was purged.
    fn next(&mut self) -> Option<Request> {
        while let Some(upto) = self.purge_upto {
            match self.requests.try_recv() {
                Ok(request) => return Some(request),
                Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => {}
            }
            self.purge_some(upto);
        }
        self.requests.blocking_recv()
    }

    fn purge_some(&mut self, upto: u64) {
        if self.refuses.is_some() {
            self.purge_upto = None;
            return;
        }
        match self.entries.purge_some(upto) {
            Ok(true) => {}
            Ok(false) => self.purge_upto = None,
            Err(e) => {
                self.purge_upto = None;
                self.fail(&e);
            }
        }
    }

    fn append(&mut self, batch: Vec<Append>) {
        if batch.is_empty() {
            return;
        }
        let result = self.busy(|this| this.write(batch.iter().flat_map(|append| &append.entries)));
        for append in batch {
            append.callback.io_completed(result.as_ref().copied().map_err(copy));
        }
        // After the callbacks, which others wait for. Entries that are in sled may leave memory.
        if self.pending_bytes >= STORE_BYTES && self.refuses.is_none() {
            // What fails here is final, and told as such; these entries are durable.
            let _ = self.busy(Self::store);
        }
        // Also under steady load the log must not keep what was purged.
        if let Some(upto) = self.purge_upto {
            self.purge_some(upto);
        }
    }

    fn write<'a>(&mut self, entries: impl Iterator<Item = &'a Entry>) -> io::Result<()> {
        self.check()?;
        let mut last = None;
        let frames: Vec<Frame> = entries
            .map(|entry| {
                last = Some(entry.log_id);
                Frame {
                    index: entry.log_id.index,
                    term: entry.log_id.leader_id.term,
                    payload: entry_to_wire(entry).encode_to_vec().into(),
                }
            })
            .collect();
        let Some(last) = last else { return Ok(()) };
        let bytes = frames.iter().map(|f| f.payload.len()).sum::<usize>();
        self.hold(bytes as u64)?;
        if self.journal.takes(&frames) {
            if !self.journal.has_room(&frames) {
                self.drain()?;
            }
            let began = clock::now();
            self.finally(|this| this.journal.append(&frames))?;
            latencies::note(&self.latencies.journal, clock::since(began));
            self.last = Some(last);
            self.pending.extend(frames);
            self.pending_bytes += bytes;
            return Ok(());
        }
        self.drain()?;
        let entries = self.entries.clone();
        let began = clock::now();
        self.finally(|this| {
            entries.append(&frames)?;
            entries.sync()?;
            this.mark.update(|m| m.last = Some(last))
        })?;
        latencies::note(&self.latencies.entries, clock::since(began));
        self.last = Some(last);
        let mut tail = lock(&self.shared.tail);
        tail.mark = self.mark.get().clone();
        tail.stored(last.index);
        Ok(())
    }

    /// Gives sled what only the journal has.
    fn store(&mut self) -> io::Result<()> {
        let frames = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        let Some(last) = frames.last().map(|f| f.index) else { return Ok(()) };
        let entries = self.entries.clone();
        self.finally(|_| entries.append(&frames))?;
        lock(&self.shared.tail).stored(last);
        Ok(())
    }

    /// Makes everything durable in sled, and the room of the journal free.
    fn drain(&mut self) -> io::Result<()> {
        self.check()?;
        if self.mark.get().journal == Some(self.journal.end()) {
            return Ok(());
        }
        self.store()?;
        let (entries, last, end) = (self.entries.clone(), self.last, self.journal.end());
        let began = clock::now();
        self.finally(|this| {
            entries.sync()?;
            this.mark.update_both(|m| {
                m.last = last;
                m.journal = Some(end);
            })
        })?;
        latencies::note(&self.latencies.entries, clock::since(began));
        self.journal.release();
        lock(&self.shared.tail).mark = self.mark.get().clone();
        Ok(())
    }

    /// So that the next start has nothing to do. Everything is durable without it.
    fn close(&mut self) {
        let room = self.options.free_space.bytes(&self.options.dir) > self.options.disk_reserve_bytes;
        if room
            && self.refuses.is_none()
            && let Err(e) = self.busy(Self::drain)
        {
            tracing::warn!(dir = %self.options.dir.display(), "closing the log: {e}");
        }
    }

    /// Waits until there is room for `bytes` beyond the reserve.
    fn hold(&mut self, bytes: u64) -> io::Result<()> {
        let wanted = self.options.disk_reserve_bytes.saturating_add(bytes);
        let wanted = if self.options.disk_reserve_bytes == 0 { wanted } else { wanted.saturating_add(OVERHEAD_BYTES) };
        let mut held = false;
        loop {
            let free = self.options.free_space.bytes(&self.options.dir);
            if free >= wanted {
                break;
            }
            if self.shared.stop.load(Ordering::Acquire) {
                let what = "stopped while the disk was full".to_owned();
                // There may be room for what comes next, which must not be there without this.
                self.refuses = Some(what.clone());
                return Err(io::Error::new(io::ErrorKind::StorageFull, what));
            }
            if !held {
                held = true;
                let what = format!(
                    "disk full: {} has {} MiB free and {} MiB are needed (a reserve included); nothing is acknowledged \
                     until there is room",
                    self.options.dir.display(),
                    free >> 20,
                    wanted.div_ceil(1 << 20)
                );
                tracing::error!("{what}");
                self.shared.health.send_replace(Health::Held(what));
            }
            std::thread::sleep(HOLD_POLL);
        }
        if held {
            tracing::info!(dir = %self.options.dir.display(), "there is room on the disk again: going on");
            self.shared.health.send_replace(Health::Good);
        }
        Ok(())
    }

    fn single(&mut self, request: Request) {
        let (reply, result) = match request {
            Request::Vote { vote, reply } => (reply, self.mark_both(|m| m.vote = Some(vote))),
            Request::Adopt { cluster_id, reply } => (reply, self.mark_both(|m| m.cluster_id = cluster_id)),
            Request::Snapshot { upto, reply } => (reply, self.mark_one(|m| m.snapshot = m.snapshot.max(Some(upto)))),
            Request::Truncate { last, reply } => (reply, self.truncate(last)),
            Request::Purge { upto, reply } => (reply, self.purge(upto)),
            Request::Append { .. } | Request::Stop => return,
        };
        // Whoever asked may be gone, being shut down.
        let _ = reply.send(result);
    }

    fn mark_both(&mut self, change: impl FnOnce(&mut super::mark::Mark)) -> io::Result<()> {
        self.check()?;
        self.busy(|this| this.finally(|this| this.mark.update_both(change)))?;
        lock(&self.shared.tail).mark = self.mark.get().clone();
        Ok(())
    }

    fn mark_one(&mut self, change: impl FnOnce(&mut super::mark::Mark)) -> io::Result<()> {
        self.check()?;
        self.busy(|this| this.finally(|this| this.mark.update(change)))?;
        lock(&self.shared.tail).mark = self.mark.get().clone();
        Ok(())
    }

    fn truncate(&mut self, last: Option<LogId>) -> io::Result<()> {
        self.busy(Self::drain)?;
        // The mark first, in both slots: it must never ask for entries that are about to go.
        self.mark_both(|m| {
            if m.last > last {
                m.last = last;
            }
        })?;
        let entries = self.entries.clone();
        self.busy(|this| this.finally(|_| entries.truncate_from(last.map_or(0, |id| id.index + 1))))?;
        self.last = last;
        Ok(())
    }

    fn purge(&mut self, upto: LogId) -> io::Result<()> {
        self.busy(Self::drain)?;
        self.mark_both(|m| {
            m.purged = m.purged.max(Some(upto));
            // A snapshot from the leader may reach beyond the end of the log.
            m.last = m.last.max(Some(upto));
        })?;
        self.last = self.last.max(Some(upto));
        self.purge_upto = Some(upto.index);
        lock(&self.shared.tail).purge(upto);
        Ok(())
    }

    fn busy<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        *lock(&self.shared.busy_since) = Some(clock::now());
        let result = work(self);
        *lock(&self.shared.busy_since) = None;
        result
    }

    /// Runs a write whose failure is final.
    fn finally(&mut self, work: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        work(self).and_then(|()| self.options.failing.check()).inspect_err(|e| self.fail(e))
    }

    fn fail(&mut self, error: &io::Error) {
        let what = format!("writing failed: {error}; what is on the disk is not known, so this peer stops");
        tracing::error!("{what}");
        self.refuses = Some(what.clone());
        self.shared.health.send_replace(Health::Failed(what));
    }

    fn check(&self) -> io::Result<()> {
        self.refuses.as_ref().map_or(Ok(()), |what| Err(io::Error::other(what.clone())))
    }
}

fn copy(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string())
}
