//! The Raft log of one peer: entries on disk, the durable mark beside them, and one thread that writes both.
//!
//! ```text
//!   openraft -- append --> memory tail (readable at once) -- queue --> writer thread
//!                                                                       | packs all that is queued into one batch
//!                                                                       | journal, fdatasync
//!                                                                       v callbacks, in order
//!                                                                       | sled; now and then: fdatasync, mark, fdatasync
//! ```
//!
//! - [`journal`]: what is acknowledged and not yet synced in sled;
//! - [`mark`]: the durable mark; also the only home of the vote;
//! - [`sled_log`]: entries on sled, the only file that knows it;
//! - [`writer`]: the thread, its messages, what it does when the disk is full or fails;
//! - [`memory`]: the same without a disk, for simulations;
//! - this file: [`Log`], the handle that everyone shares, and the memory tail.
//!
//! Limits: [`QUEUE_REQUESTS`] requests, and [`QUEUE_BYTES`] of entries, wait for the writer; the tail keeps what sled does not have yet, and up to
//! [`TAIL_BYTES`] of what it has; one read returns about [`READ_BYTES`].
//!
//! States, as [`Health`] tells them: `Good`; `Held`: the disk is full, nothing is acknowledged, it goes on by itself
//! once there is room; `Failed`: a write or sync failed, which is final for this process.

pub mod journal;
pub mod mark;
pub mod memory;
pub mod sled_log;
pub mod writer;

use std::collections::VecDeque;
use std::io;
use std::ops::{Bound, Range, RangeBounds};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lake_client::clock;
use lake_proto::kv::Invalid;
use lake_proto::v1;
use openraft::entry::RaftEntry;
use openraft::storage::IOFlushed;
use prost::Message;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use self::journal::{Journal, JournalError};
use self::mark::{Mark, MarkFile};
use self::sled_log::{Bounds, Frame, OpenError, SledLog};
use self::writer::{Files, Request, Writer};
use crate::config::StorageConfig;
use crate::files::FreeSpace;
use crate::peer::latencies::LogLatencies;
use crate::raft::types::{Entry, LogId, Payload, TypeConfig, Vote, log_id};
use crate::raft::wire::{entry_from_wire, unknown_entry, unread_entry_from_wire};

/// Requests that wait for the writer thread.
pub const QUEUE_REQUESTS: usize = 1024;
/// Bytes of entries that wait for the writer thread, but for what one append has beyond that: as many as a leader takes in.
pub const QUEUE_BYTES: usize = crate::peer::member::MAX_PROPOSED_BYTES;
/// Durable entries kept in memory for followers that are almost up to date: half a second of what a cluster can take at most.
pub const TAIL_BYTES: usize = 8 << 20;
/// How finely it is known how many bytes of entries lie before one.
const MILESTONE_BYTES: u64 = 1 << 20;
/// About how much one read returns.
pub const READ_BYTES: usize = 4 << 20;

/// How the log is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Good,
    /// Nothing is acknowledged until there is room on the disk again. Says what is full.
    Held(String),
    /// Final for this process. Says what failed.
    Failed(String),
}

/// What opening a log needs.
#[derive(Clone)]
pub struct LogOptions {
    /// The directory of the entries. The journal is the file `journal` beside it.
    pub dir: PathBuf,
    /// Size of a half of the journal, if it is to be made.
    pub journal_bytes: u64,
    /// Below this many free bytes nothing is written.
    pub disk_reserve_bytes: u64,
    pub free_space: FreeSpace,
    #[doc(hidden)]
    pub skip_sync: SkipSync,
    /// A seam for tests.
    #[doc(hidden)]
    pub failing: Failing,
}

/// Has writes that are final fail once they are done, as a disk does that loses what it took, and syncs of the journal hang.
#[doc(hidden)]
#[derive(Debug, Clone, Default)]
pub struct Failing {
    fails: Arc<AtomicBool>,
    hangs: Arc<AtomicBool>,
}

impl Failing {
    /// From now on writes fail, or from now on no more.
    pub fn set(&self, failing: bool) {
        self.fails.store(failing, Ordering::SeqCst);
    }

    /// From now on syncs do not return, or those that did not do from now on.
    pub fn hang(&self, hanging: bool) {
        self.hangs.store(hanging, Ordering::SeqCst);
    }

    fn check(&self) -> io::Result<()> {
        if self.fails.load(Ordering::SeqCst) { Err(io::Error::other("the disk was told to fail")) } else { Ok(()) }
    }

    /// Called where a sync is: blocks for as long as that hangs.
    fn hold_sync(&self) {
        while self.hangs.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// Syncs that are left out, so that the test of power cuts can show that it finds their absence. Nothing else sets it, but a bug
/// that is planted.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SkipSync {
    pub journal: bool,
    pub entries: bool,
    pub mark: bool,
}

impl LogOptions {
    /// A log in `dir` that looks at the real file system.
    pub fn new(dir: PathBuf, storage: &StorageConfig) -> Self {
        Self {
            dir,
            journal_bytes: storage.journal_bytes,
            disk_reserve_bytes: storage.disk_reserve_bytes,
            free_space: FreeSpace::default(),
            skip_sync: SkipSync::default(),
            failing: Failing::default(),
        }
    }
}

/// The handle to a peer's log. Cheap to clone.
#[derive(Clone)]
pub struct Log {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("dir", &self.inner.dir).finish_non_exhaustive()
    }
}

struct Inner {
    dir: PathBuf,
    shared: Arc<Shared>,
    /// See [`Log::cut_off`].
    cut_off: Option<String>,
    requests: mpsc::Sender<Request>,
    /// Room for what waits for the writer, in bytes.
    room: Arc<Semaphore>,
    writer: Mutex<Option<Running>>,
    latencies: LogLatencies,
    failing: Failing,
}

/// What writes.
enum Running {
    Thread(std::thread::JoinHandle<()>),
    /// In memory.
    Task(tokio::task::JoinHandle<()>),
}

/// What the handle, its readers and the writer thread share.
pub(crate) struct Shared {
    tail: Mutex<Tail>,
    entries: Mutex<Option<Arc<SledLog>>>,
    health: watch::Sender<Health>,
    /// Since when the writer is busy with one batch; how a hanging disk is noticed.
    busy_since: Mutex<Option<Instant>>,
    /// See [`Log::hold_no_more`].
    stop: AtomicBool,
}

/// The end of the log in memory, and where the log begins and ends.
#[derive(Debug, Default)]
struct Tail {
    /// Contiguous; the last one is `last`.
    entries: VecDeque<(Entry, usize)>,
    bytes: usize,
    /// Entries from this index on may not be in sled yet and stay in memory.
    next_unstored: u64,
    purged: Option<LogId>,
    last: Option<LogId>,
    /// How often entries were taken back.
    truncations: u64,
    /// Where the first entry ever appended stands: 0 in a cluster, anything in openraft's own tests.
    begin: u64,
    mark: Mark,
    /// Bytes of all entries pushed.
    pushed: u64,
    /// An entry for every [`MILESTONE_BYTES`] pushed: its index, and the bytes up to it. None of before the log was opened.
    milestones: VecDeque<(u64, u64)>,
}

fn queue_room() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(QUEUE_BYTES))
}

/// What a read finds in memory, and what is left for the disk.
struct Look {
    start: u64,
    disk_end: u64,
    from_tail: Vec<Entry>,
    truncations: u64,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is changed by assignments that cannot panic half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tail {
    fn first_index(&self) -> u64 {
        self.next_index() - self.entries.len() as u64
    }

    /// The first index that can be asked for.
    fn first_kept(&self) -> u64 {
        self.purged.map_or(self.begin, |id| id.index + 1)
    }

    fn next_index(&self) -> u64 {
        self.last.map_or(0, |id| id.index + 1)
    }

    fn push(&mut self, entry: Entry) -> io::Result<()> {
        let id = entry.log_id;
        let begins = self.last.is_none() && self.entries.is_empty();
        if !begins && id.index != self.next_index() {
            return Err(io::Error::other(format!(
                "appending to the log: entry {} does not follow entry {}; this is a defect",
                id.index,
                self.next_index().saturating_sub(1)
            )));
        }
        if begins {
            self.next_unstored = id.index;
            self.begin = id.index;
        }
        let bytes = entry_bytes(&entry);
        self.bytes += bytes;
        self.pushed += bytes as u64;
        if self.milestones.back().is_none_or(|(_, at)| self.pushed - at >= MILESTONE_BYTES) {
            self.milestones.push_back((id.index, self.pushed));
        }
        self.entries.push_back((entry, bytes));
        self.last = Some(id);
        Ok(())
    }

    fn truncate_after(&mut self, last: Option<LogId>) {
        let keep = last.map_or(0, |id| id.index + 1);
        if keep >= self.next_index() {
            return;
        }
        while self.entries.back().is_some_and(|(e, _)| e.log_id.index >= keep) {
            if let Some((_, bytes)) = self.entries.pop_back() {
                self.bytes -= bytes;
            }
        }
        while self.milestones.pop_back_if(|(index, _)| *index >= keep).is_some() {}
        self.truncations += 1;
        self.last = last;
        self.next_unstored = self.next_unstored.min(keep);
    }

    /// The last entry that has about so many bytes between it and the entry `upto`, if that is known.
    fn with_bytes_before(&self, upto: u64, bytes: u64) -> Option<u64> {
        let (_, end) = self.milestones.iter().rev().find(|(index, _)| *index <= upto)?;
        self.milestones.iter().rev().find(|(_, at)| at + bytes <= *end).map(|(index, _)| *index)
    }

    fn purge(&mut self, upto: LogId) {
        while self.entries.front().is_some_and(|(e, _)| e.log_id.index <= upto.index) {
            self.pop_front();
        }
        while self.milestones.pop_front_if(|(index, _)| *index <= upto.index).is_some() {}
        self.purged = Some(upto);
        if self.last.is_none_or(|last| last.index < upto.index) {
            self.last = Some(upto);
            self.next_unstored = upto.index + 1;
        }
    }

    /// sled has the entries up to this one.
    fn stored(&mut self, upto: u64) {
        // A truncation may already have taken back what has just been written.
        self.next_unstored = self.next_unstored.max(upto + 1).min(self.next_index());
        while self.bytes > TAIL_BYTES && self.entries.front().is_some_and(|(e, _)| e.log_id.index < self.next_unstored)
        {
            self.pop_front();
        }
    }

    fn pop_front(&mut self) {
        if let Some((_, bytes)) = self.entries.pop_front() {
            self.bytes -= bytes;
        }
    }
}

/// About how much memory an entry takes: what it decodes to shares its bytes.
pub fn entry_bytes(entry: &Entry) -> usize {
    256 + match &entry.payload {
        Payload::Blank => 0,
        Payload::Membership(_) => 1024,
        Payload::Normal(command) => command.encoded().len(),
    }
}

impl Log {
    /// Makes an empty log for the directory of `mark`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(options: LogOptions, mark: MarkFile) -> Result<Self, OpenError> {
        SledLog::create(&options.dir, &mark.get().incarnation)
            .map_err(|source| OpenError::Io { dir: options.dir.clone(), source })?;
        Self::open(options, mark)
    }

    /// Opens an existing log and checks it against the mark. What only the journal has goes to sled.
    ///
    /// # Errors
    /// When it cannot be read, is damaged, or ends before what the mark says was acknowledged.
    pub fn open(options: LogOptions, mut mark: MarkFile) -> Result<Self, OpenError> {
        let pair = |id: LogId| (id.leader_id.term, id.index);
        let bounds = Bounds { purged: mark.get().purged.map(pair), durable: mark.get().last.map(pair) };
        let (mut entries, last) = SledLog::open(&options.dir, &mark.get().incarnation, bounds)?;
        mark.skip_sync = options.skip_sync.mark;
        entries.skip_sync = options.skip_sync.entries;
        let (mut journal, last) = open_journal(&options, &mut mark, &entries, last)?;
        journal.skip_sync = options.skip_sync.journal;
        journal.failing = options.failing.clone();
        let dir = options.dir.clone();
        let last = last.map(|(term, index)| log_id(term, index));
        Self::start(options, mark, entries, journal, last).map_err(|source| OpenError::Io { dir, source })
    }

    fn start(
        options: LogOptions,
        mark: MarkFile,
        entries: SledLog,
        journal: Journal,
        last: Option<LogId>,
    ) -> io::Result<Self> {
        let (requests, receiver) = mpsc::channel(QUEUE_REQUESTS);
        let tail = Tail {
            next_unstored: last.map_or(0, |id| id.index + 1),
            purged: mark.get().purged,
            last,
            mark: mark.get().clone(),
            ..Tail::default()
        };
        let cut_off = entries.cut_off().map(str::to_owned);
        let entries = Arc::new(entries);
        let shared = Arc::new(Shared {
            tail: Mutex::new(tail),
            entries: Mutex::new(Some(entries.clone())),
            health: watch::Sender::new(Health::Good),
            busy_since: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let (dir, failing) = (options.dir.clone(), options.failing.clone());
        let latencies = LogLatencies::new().map_err(io::Error::other)?;
        let files = Files { mark, journal, entries };
        let writer = Writer::new(options, files, shared.clone(), receiver, last, latencies.clone());
        let thread = std::thread::Builder::new().name("lake-log".into()).spawn(move || writer.run())?;
        let writer = Mutex::new(Some(Running::Thread(thread)));
        let room = queue_room();
        Ok(Self { inner: Arc::new(Inner { dir, shared, cut_off, requests, room, writer, latencies, failing }) })
    }

    /// A log in memory, on a disk that outlives it. Its writer is a task of the current runtime.
    ///
    /// # Errors
    /// A defect in the metrics.
    pub fn in_memory(disk: &memory::MemoryDisk) -> io::Result<Self> {
        let (requests, receiver) = mpsc::channel(QUEUE_REQUESTS);
        let shared = Arc::new(Shared {
            tail: Mutex::new(disk.tail()),
            entries: Mutex::new(None),
            health: watch::Sender::new(Health::Good),
            busy_since: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let latencies = LogLatencies::new().map_err(io::Error::other)?;
        let task = tokio::spawn(memory::write(disk.clone(), shared.clone(), receiver));
        let (dir, writer) = (PathBuf::from("memory"), Mutex::new(Some(Running::Task(task))));
        Ok(Self {
            inner: Arc::new(Inner {
                dir,
                shared,
                cut_off: None,
                requests,
                room: queue_room(),
                writer,
                latencies,
                failing: Failing::default(),
            }),
        })
    }

    /// How long writes take until they are durable.
    pub fn latencies(&self) -> &LogLatencies {
        &self.inner.latencies
    }

    /// How the log is doing, and when that changes.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.inner.shared.health.subscribe()
    }

    /// What opening cut off, if something was: the torn end of what sled had beyond the last sync. The journal may have
    /// given those entries anew.
    pub fn cut_off(&self) -> Option<&str> {
        self.inner.cut_off.as_deref()
    }

    /// A seam for tests.
    #[doc(hidden)]
    pub fn failing(&self) -> &Failing {
        &self.inner.failing
    }

    /// For how long the writer has been busy with one batch.
    pub fn busy_for(&self) -> std::time::Duration {
        lock(&self.inner.shared.busy_since).map_or(std::time::Duration::ZERO, clock::since)
    }

    /// What the durable mark says.
    pub fn mark(&self) -> Mark {
        lock(&self.inner.shared.tail).mark.clone()
    }

    /// Up to where entries are gone, and the last one there is.
    pub fn bounds(&self) -> (Option<LogId>, Option<LogId>) {
        let tail = lock(&self.inner.shared.tail);
        (tail.purged, tail.last)
    }

    /// The last entry that may go if about `bytes` of entries are to stay up to the entry `upto`. `None`: there are not so many,
    /// or they are from before this process.
    pub fn with_bytes_before(&self, upto: u64, bytes: u64) -> Option<u64> {
        lock(&self.inner.shared.tail).with_bytes_before(upto, bytes)
    }

    /// Makes entries readable at once and durable soon: then, `callback`.
    pub async fn append(&self, entries: Vec<Entry>, callback: IOFlushed<TypeConfig>) -> io::Result<()> {
        let mut bytes = 0;
        {
            let mut tail = lock(&self.inner.shared.tail);
            for entry in &entries {
                tail.push(entry.clone())?;
                bytes += entry_bytes(entry);
            }
        }
        let bytes = u32::try_from(bytes.min(QUEUE_BYTES)).unwrap_or(u32::MAX);
        let room = self.inner.room.clone().acquire_many_owned(bytes).await.map_err(|_| self.closed())?;
        self.send(Request::Append { entries, callback, room }).await
    }

    /// Makes a vote durable.
    pub async fn save_vote(&self, vote: Vote) -> io::Result<()> {
        self.ask(|reply| Request::Vote { vote, reply }).await
    }

    /// Removes everything behind `last`.
    pub async fn truncate_after(&self, last: Option<LogId>) -> io::Result<()> {
        lock(&self.inner.shared.tail).truncate_after(last);
        self.ask(|reply| Request::Truncate { last, reply }).await
    }

    /// Notes durably that entries up to `upto` are no longer needed; they are removed in the background.
    pub async fn purge(&self, upto: LogId) -> io::Result<()> {
        self.ask(|reply| Request::Purge { upto, reply }).await
    }

    /// Notes durably that a durable snapshot covers the log up to `upto`.
    pub async fn note_snapshot(&self, upto: LogId) -> io::Result<()> {
        self.ask(|reply| Request::Snapshot { upto, reply }).await
    }

    /// Makes this directory part of a cluster.
    pub async fn adopt(&self, cluster_id: String) -> io::Result<()> {
        self.ask(|reply| Request::Adopt { cluster_id, reply }).await
    }

    /// The vote that was last saved.
    pub fn vote(&self) -> Option<Vote> {
        lock(&self.inner.shared.tail).mark.vote
    }

    async fn ask(&self, request: impl FnOnce(oneshot::Sender<io::Result<()>>) -> Request) -> io::Result<()> {
        let (reply, answer) = oneshot::channel();
        self.send(request(reply)).await?;
        answer.await.map_err(|_| self.closed())?
    }

    async fn send(&self, request: Request) -> io::Result<()> {
        self.inner.requests.send(request).await.map_err(|_| self.closed())
    }

    fn closed(&self) -> io::Error {
        io::Error::other(format!("the log in {} is closed", self.inner.dir.display()))
    }

    /// The entries of `range` that the log holds, in order; ends early after about `max_bytes`.
    ///
    /// # Errors
    /// When the disk cannot be read, or an entry in the middle is missing.
    pub async fn read(&self, range: impl RangeBounds<u64>, max_bytes: usize) -> io::Result<Vec<Entry>> {
        self.read_as(range, max_bytes, entry_from_wire).await
    }

    /// The same, whatever they hold, with their commands unread.
    ///
    /// # Errors
    /// As [`Log::read`], but for a command that this build does not know.
    pub async fn read_unread(&self, range: impl RangeBounds<u64>, max_bytes: usize) -> io::Result<Vec<Entry>> {
        self.read_as(range, max_bytes, unread_entry_from_wire).await
    }

    /// How often entries were taken back: what was read before that may not be there any more.
    pub fn truncations(&self) -> u64 {
        lock(&self.inner.shared.tail).truncations
    }

    async fn read_as(&self, range: impl RangeBounds<u64>, max_bytes: usize, read: FromWire) -> io::Result<Vec<Entry>> {
        let Range { start, end } = half_open(&range);
        loop {
            let look = self.look(start, end, max_bytes);
            if look.start >= look.disk_end {
                return Ok(look.from_tail);
            }
            let (from, truncations) = (look.start, look.truncations);
            match self.read_disk(look, max_bytes, read).await {
                // What is not as it should be was being removed meanwhile: whoever reads for a leader that is none any more
                // must not take that for damage. What is left is read again.
                Err(e) if e.kind() == io::ErrorKind::InvalidData && self.removed_since(from, truncations) => {}
                read => return read,
            }
        }
    }

    fn removed_since(&self, start: u64, truncations: u64) -> bool {
        let tail = lock(&self.inner.shared.tail);
        tail.first_kept() > start || tail.truncations > truncations
    }

    async fn read_disk(&self, look: Look, max_bytes: usize, read: FromWire) -> io::Result<Vec<Entry>> {
        let Look { start, disk_end, from_tail, .. } = look;
        let reader = lock(&self.inner.shared.entries).clone().ok_or_else(|| self.closed())?;
        let frames = tokio::task::spawn_blocking(move || reader.read(start, disk_end, max_bytes))
            .await
            .map_err(|e| io::Error::other(format!("reading the log: {e}")))??;
        let entries = frames.into_iter().map(|frame| decode(&self.inner.dir, frame, read));
        let mut entries = entries.collect::<io::Result<Vec<_>>>()?;
        let bytes: usize = entries.iter().map(entry_bytes).sum();
        let complete = entries.last().map_or(start, |e| e.index() + 1) >= disk_end;
        if complete && bytes < max_bytes {
            entries.extend(from_tail);
        }
        self.check_contiguous(start, disk_end, complete || bytes >= max_bytes, &entries)?;
        Ok(entries)
    }

    /// Clamps a range to the log and takes what the tail has of it.
    fn look(&self, start: u64, end: u64, max_bytes: usize) -> Look {
        let tail = lock(&self.inner.shared.tail);
        let truncations = tail.truncations;
        let start = start.max(tail.first_kept());
        let end = end.min(tail.next_index());
        if start >= end {
            return Look { start, disk_end: start, from_tail: Vec::new(), truncations };
        }
        let first = tail.first_index();
        let mut entries = Vec::new();
        let mut bytes = 0;
        let skip = start.saturating_sub(first) as usize;
        let take = end.saturating_sub(first.max(start)) as usize;
        for (entry, size) in tail.entries.iter().skip(skip).take(take) {
            if bytes >= max_bytes && !entries.is_empty() {
                break;
            }
            bytes += size;
            entries.push(entry.clone());
        }
        Look { start, disk_end: end.min(first), from_tail: entries, truncations }
    }

    /// Absent entries are allowed at the beginning, if a purge overtook the read; never elsewhere.
    fn check_contiguous(&self, start: u64, disk_end: u64, complete: bool, entries: &[Entry]) -> io::Result<()> {
        let kept = lock(&self.inner.shared.tail).first_kept();
        let begin = entries.first().map_or(disk_end, |e| e.index());
        let hole = entries.windows(2).any(|w| w[1].index() != w[0].index() + 1);
        if hole || !complete || begin > start.max(kept) {
            let what = format!(
                "reading entries {start} to {} from the log in {}: entries are missing that were acknowledged; {}",
                disk_end - 1,
                self.inner.dir.display(),
                crate::files::REJOIN
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(())
    }

    /// The peer stops: from now on what finds no room on the disk is refused, and all that comes behind it, instead of being
    /// held. Who waits for it would otherwise wait for as long as the disk is full.
    pub fn hold_no_more(&self) {
        self.inner.shared.stop.store(true, Ordering::Release);
    }

    /// Whether that was said.
    pub fn holds_no_more(&self) -> bool {
        self.inner.shared.stop.load(Ordering::Acquire)
    }

    /// Stops the writer once everything queued is written (or refused, while the disk is full), and closes the files.
    pub async fn close(&self) {
        self.hold_no_more();
        let _ = self.inner.requests.send(Request::Stop).await;
        let writer = lock(&self.inner.writer).take();
        let reader = lock(&self.inner.shared.entries).take();
        let thread = match writer {
            Some(Running::Thread(thread)) => thread,
            Some(Running::Task(task)) => return drop(task.await),
            None => return,
        };
        let waited = tokio::task::spawn_blocking(move || {
            let _ = thread.join();
            // Reads that are under way end soon; the files are free only after the last of them.
            let deadline = clock::now() + std::time::Duration::from_secs(2);
            while let Some(reader) = &reader
                && Arc::strong_count(reader) > 1
                && clock::now() < deadline
            {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let _ = waited.await;
    }
}

/// Opens the journal, or makes one, and gives sled what it has: afterwards nothing in it counts. Returns it and the term and
/// index of the log's last entry.
fn open_journal(
    options: &LogOptions,
    mark: &mut MarkFile,
    entries: &SledLog,
    last: Option<(u64, u64)>,
) -> Result<(Journal, Option<(u64, u64)>), OpenError> {
    let path = options.dir.with_file_name("journal");
    let io_error = |source| OpenError::Io { dir: options.dir.clone(), source };
    let incarnation = mark.get().incarnation.clone();
    let position = match mark.get().journal {
        Some(position) => position,
        // The mark will say below that there is one. Until then it may be made again.
        None => Journal::create(&path, &incarnation, options.journal_bytes).map_err(io_error)?,
    };
    let (mut journal, frames) = Journal::open(&path, &incarnation, position)?;
    let mut last = last;
    if let (Some(first), Some(end)) = (frames.first(), frames.last()) {
        if first.index > last.map_or(0, |(_, index)| index + 1) {
            let what = format!("it goes on with entry {}, and the log ends before that", first.index);
            return Err(JournalError::Damaged { path, what }.into());
        }
        // What sled has of these may have come there without order, unsynced; the journal has them whole.
        entries.truncate_from(first.index).and_then(|()| entries.append(&frames)).map_err(io_error)?;
        last = Some((end.term, end.index));
    }
    // Whatever is there counts from now on. A process that was killed may not have synced it.
    entries.sync().map_err(io_error)?;
    mark.update_both(|m| {
        m.last = m.last.max(last.map(|(term, index)| log_id(term, index)));
        m.journal = Some(journal.end());
    })
    .map_err(io_error)?;
    journal.release();
    Ok((journal, last))
}

/// The same range, without what bounds may leave open.
pub(crate) fn half_open(range: &impl RangeBounds<u64>) -> Range<u64> {
    let start = match range.start_bound() {
        Bound::Included(i) => *i,
        Bound::Excluded(i) => i.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(i) => i.saturating_add(1),
        Bound::Excluded(i) => *i,
        Bound::Unbounded => u64::MAX,
    };
    start..end
}

/// How an entry is made of what stands for it.
type FromWire = fn(v1::LogEntry) -> Result<Entry, Invalid>;

fn decode(dir: &Path, frame: Frame, read: FromWire) -> io::Result<Entry> {
    let (index, term) = (frame.index, frame.term);
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let senseless =
        |what: String| invalid(format!("entry {index} of the log in {} makes no sense: {what}", dir.display()));
    let wire = v1::LogEntry::decode(frame.payload).map_err(|e| senseless(e.to_string()))?;
    let entry = read(wire).map_err(|e| match unknown_entry(&e) {
        // Of a kind of its own: nothing is damaged.
        Some(what) => io::Error::new(io::ErrorKind::Unsupported, format!("{what} (the log is in {})", dir.display())),
        None => senseless(e.to_string()),
    })?;
    if entry.log_id == log_id(term, index) { Ok(entry) } else { Err(senseless("it is another entry".to_owned())) }
}

#[cfg(test)]
mod tests;
