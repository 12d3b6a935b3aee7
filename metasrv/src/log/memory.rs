//! A log in memory, with a model of what a crash loses: what a simulation gives a peer instead of a disk.
//!
//! A [`MemoryDisk`] outlives the peers that run on it, one after the other. The task that stands in for the writer thread
//! takes everything that is queued, writes it, lets the time of a sync pass, and then makes it durable and calls back, in
//! order, as [`super::writer`] does. [`MemoryDisk::crash`] keeps what is durable; of what was written since, it keeps a
//! beginning, as long as chance has it. On a disk without room ([`MemoryDisk::fill`]) a batch with entries waits, unacknowledged,
//! and so does what is queued behind it. A disk can be lost ([`MemoryDisk::lose`]).
//!
//! What it does not model: damage, failed writes. The tests of the real log have these.
//!
//! Limits: what became durable is kept for whoever looks ([`MemoryDisk::take_news`]) up to [`MAX_NEWS`] changes.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lake_client::clock;
use openraft::storage::IOFlushed;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::{mpsc, oneshot};

use super::mark::Mark;
use super::writer::{HOLD_POLL, Request};
use super::{Health, QUEUE_REQUESTS, Shared, Tail, entry_bytes, lock};
use crate::planted::{self, Bug};
use crate::raft::types::{Entry, LogId, TypeConfig, Vote};

/// Changes kept for whoever looks; the oldest go first.
pub const MAX_NEWS: usize = 100_000;

/// A change of what is on the disk.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    Appended(Entry),
    /// Everything behind this entry is gone.
    Truncated(Option<LogId>),
    /// Everything up to this entry is gone.
    Purged(LogId),
    Voted(Vote),
    /// A durable snapshot covers the log up to this entry.
    Covered(LogId),
    /// The peer belongs to this cluster.
    Adopted(String),
}

/// What a peer has on its disk. Cheap to clone; all clones are the same disk.
#[derive(Debug, Clone)]
pub struct MemoryDisk {
    held: Arc<Mutex<Held>>,
}

#[derive(Debug)]
struct Held {
    mark: Mark,
    /// Contiguous.
    entries: VecDeque<Entry>,
    /// Written and not synced.
    written: Vec<Change>,
    news: VecDeque<Change>,
    chance: StdRng,
    /// How long a sync takes at most.
    longest_sync: Duration,
    full: bool,
    /// Batches that had to wait for room so far.
    waited: u64,
    /// One waits for room now.
    waiting: bool,
}

impl MemoryDisk {
    /// An empty disk of a peer. Chance follows from the seed.
    pub fn new(peer_id: u64, incarnation: String, seed: u64, longest_sync: Duration) -> Self {
        let mark = Mark { peer_id, incarnation, ..Mark::default() };
        let held = Held {
            mark,
            entries: VecDeque::new(),
            written: Vec::new(),
            news: VecDeque::new(),
            chance: StdRng::seed_from_u64(seed),
            longest_sync,
            full: false,
            waited: 0,
            waiting: false,
        };
        Self { held: Arc::new(Mutex::new(held)) }
    }

    /// What is durable besides the entries.
    pub fn mark(&self) -> Mark {
        lock(&self.held).mark.clone()
    }

    /// What has become durable, or was taken back, since this was last asked, in order.
    pub fn take_news(&self) -> Vec<Change> {
        lock(&self.held).news.drain(..).collect()
    }

    /// The peer is gone, in the middle of whatever it was at. Says how many changes were written and not durable, and how many
    /// of them are lost.
    pub fn crash(&self) -> (usize, usize) {
        let mut held = lock(&self.held);
        let written = held.written.len();
        let kept = held.chance.random_range(0..=written);
        held.written.truncate(kept);
        held.sync();
        held.waiting = false;
        (written, written - kept)
    }

    /// From now on there is no room for entries.
    pub fn fill(&self) {
        lock(&self.held).full = true;
    }

    /// There is room again.
    pub fn make_room(&self) {
        lock(&self.held).full = false;
    }

    /// Whether there is no room.
    pub fn is_full(&self) -> bool {
        lock(&self.held).full
    }

    /// How many batches had to wait for room so far.
    pub fn waited(&self) -> u64 {
        lock(&self.held).waited
    }

    /// Whether one waits for room now.
    pub fn is_waiting(&self) -> bool {
        lock(&self.held).waiting
    }

    fn begin_to_wait(&self) {
        let mut held = lock(&self.held);
        held.waited += 1;
        held.waiting = true;
    }

    /// All that was on it is gone, while nobody runs on it. Whoever starts on it next is a fresh peer, of this incarnation.
    pub fn lose(&self, incarnation: String) {
        let mut held = lock(&self.held);
        held.mark = Mark { peer_id: held.mark.peer_id, incarnation, ..Mark::default() };
        held.entries.clear();
        held.written.clear();
        held.news.clear();
    }

    fn sync_time(&self) -> Duration {
        let mut held = lock(&self.held);
        let longest = held.longest_sync;
        longest.mul_f64(held.chance.random_range(0.0..1.0))
    }

    /// The tail of a log on this disk, as it is when a peer starts.
    pub(super) fn tail(&self) -> Tail {
        let held = lock(&self.held);
        let entries: VecDeque<_> = held.entries.iter().map(|entry| (entry.clone(), entry_bytes(entry))).collect();
        Tail {
            bytes: entries.iter().map(|(_, bytes)| bytes).sum(),
            purged: held.mark.purged,
            last: entries.back().map(|(entry, _)| entry.log_id).max(held.mark.purged),
            entries,
            mark: held.mark.clone(),
            ..Tail::default()
        }
    }
}

impl Held {
    fn sync(&mut self) {
        for change in std::mem::take(&mut self.written) {
            self.mark.note(&change);
            match &change {
                Change::Appended(entry) => self.entries.push_back(entry.clone()),
                Change::Truncated(last) => {
                    let keep = last.map_or(0, |id| id.index + 1);
                    while self.entries.back().is_some_and(|entry| entry.log_id.index >= keep) {
                        self.entries.pop_back();
                    }
                }
                Change::Purged(upto) => {
                    while self.entries.front().is_some_and(|entry| entry.log_id.index <= upto.index) {
                        self.entries.pop_front();
                    }
                }
                Change::Voted(_) | Change::Covered(_) | Change::Adopted(_) => {}
            }
            if self.news.len() >= MAX_NEWS {
                self.news.pop_front();
            }
            self.news.push_back(change);
        }
    }
}

impl Mark {
    /// What the mark says after a change.
    fn note(&mut self, change: &Change) {
        match change {
            Change::Appended(entry) => self.last = Some(entry.log_id),
            Change::Truncated(last) => self.last = self.last.min(*last),
            Change::Purged(upto) => {
                self.purged = self.purged.max(Some(*upto));
                self.last = self.last.max(Some(*upto));
            }
            Change::Voted(vote) => self.vote = Some(*vote),
            Change::Covered(upto) => self.snapshot = self.snapshot.max(Some(*upto)),
            Change::Adopted(cluster_id) => self.cluster_id.clone_from(cluster_id),
        }
    }
}

/// Who waits for a request to be durable.
enum Waiting {
    Flushed(IOFlushed<TypeConfig>),
    Reply(oneshot::Sender<io::Result<()>>),
}

impl Waiting {
    fn end(self, how: io::Result<()>) {
        match self {
            Waiting::Flushed(callback) => callback.io_completed(how),
            // Whoever asked may be gone, being shut down.
            Waiting::Reply(reply) => drop(reply.send(how)),
        }
    }
}

/// Waits until there is room; false if the log is closed meanwhile.
async fn hold(disk: &MemoryDisk, shared: &Shared) -> bool {
    if !disk.is_full() {
        return true;
    }
    disk.begin_to_wait();
    let what = "disk full: nothing is acknowledged until there is room";
    shared.health.send_replace(Health::Held(what.to_owned()));
    while disk.is_full() {
        if shared.stop.load(Ordering::Acquire) {
            lock(&disk.held).waiting = false;
            return false;
        }
        tokio::time::sleep(HOLD_POLL).await;
    }
    lock(&disk.held).waiting = false;
    shared.health.send_replace(Health::Good);
    true
}

/// Stands in for the writer thread: until it is told to stop, or nobody can ask for anything any more.
pub(super) async fn write(disk: MemoryDisk, shared: Arc<Shared>, mut requests: mpsc::Receiver<Request>) {
    let mut batch = Vec::new();
    let mut stopping = false;
    while !stopping && requests.recv_many(&mut batch, QUEUE_REQUESTS).await > 0 {
        let mut changes = Vec::new();
        let mut waiting = Vec::new();
        for request in batch.drain(..) {
            let (change, reply) = match request {
                Request::Append { entries, callback, .. } => {
                    changes.extend(entries.into_iter().map(Change::Appended));
                    waiting.push(Waiting::Flushed(callback));
                    continue;
                }
                Request::Stop => {
                    stopping = true;
                    break;
                }
                Request::Vote { vote, reply } => (Change::Voted(vote), reply),
                Request::Truncate { last, reply } => (Change::Truncated(last), reply),
                Request::Purge { upto, reply } => (Change::Purged(upto), reply),
                Request::Snapshot { upto, reply } => (Change::Covered(upto), reply),
                Request::Adopt { cluster_id, reply } => (Change::Adopted(cluster_id), reply),
            };
            changes.push(change);
            waiting.push(Waiting::Reply(reply));
        }
        let adds = changes.iter().any(|change| matches!(change, Change::Appended(_)));
        if adds && !hold(&disk, &shared).await {
            let stopped = || io::Error::new(io::ErrorKind::StorageFull, "stopped while the disk was full");
            waiting.into_iter().for_each(|waiting| waiting.end(Err(stopped())));
            return;
        }
        lock(&disk.held).written.extend(changes.iter().cloned());
        *lock(&shared.busy_since) = Some(clock::now());
        if !planted::has(Bug::AcknowledgedUnsynced) || stopping {
            tokio::time::sleep(disk.sync_time()).await;
            lock(&disk.held).sync();
        }
        *lock(&shared.busy_since) = None;
        {
            let mut tail = lock(&shared.tail);
            for change in &changes {
                tail.mark.note(change);
                if let Change::Purged(upto) = change {
                    tail.purge(*upto);
                }
            }
        }
        waiting.into_iter().for_each(|waiting| waiting.end(Ok(())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Log;
    use crate::raft::types::{Payload, log_id};

    fn entry(term: u64, index: u64) -> Entry {
        Entry { log_id: log_id(term, index), payload: Payload::Blank }
    }

    async fn indexes(log: &Log) -> Vec<u64> {
        log.read(.., usize::MAX).await.unwrap().iter().map(|entry| entry.log_id.index).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_crash_keeps_what_was_synced_and_a_beginning_of_what_was_written() {
        let mut lost_some = 0;
        for seed in 0..20 {
            let disk = MemoryDisk::new(1, "a".into(), seed, Duration::from_millis(10));
            let log = Log::in_memory(&disk).unwrap();
            log.append(vec![entry(1, 0), entry(1, 1)], IOFlushed::noop()).await.unwrap();
            log.save_vote(Vote::new(1, 1)).await.unwrap();
            log.append((2..10).map(|index| entry(1, index)).collect(), IOFlushed::noop()).await.unwrap();
            // The writer takes it up, and no time passes.
            tokio::task::yield_now().await;
            let (written, lost) = disk.crash();
            assert_eq!(written, 8);
            lost_some += usize::from(lost > 0 && lost < 8);
            drop(log);

            let again = Log::in_memory(&disk).unwrap();
            assert_eq!(indexes(&again).await, (0..10 - lost as u64).collect::<Vec<_>>());
            assert_eq!(again.vote(), Some(Vote::new(1, 1)));
        }
        assert!(lost_some > 0, "chance never kept a part");
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_disk_acknowledges_nothing_until_there_is_room() {
        let disk = MemoryDisk::new(1, "a".into(), 3, Duration::from_millis(10));
        let log = Log::in_memory(&disk).unwrap();
        log.append(vec![entry(1, 0)], IOFlushed::noop()).await.unwrap();
        log.save_vote(Vote::new(1, 1)).await.unwrap();
        disk.fill();
        log.append(vec![entry(1, 1)], IOFlushed::noop()).await.unwrap();
        // What is queued behind it waits as well.
        let voted = tokio::time::timeout(Duration::from_secs(60), log.save_vote(Vote::new(2, 1))).await;
        assert!(voted.is_err() && disk.waited() == 1 && disk.is_waiting());
        assert!(matches!(&*log.health().borrow(), Health::Held(_)));
        assert_eq!(disk.crash(), (0, 0), "nothing of it was written");
        disk.make_room();
        log.save_vote(Vote::new(3, 1)).await.unwrap();
        assert!(matches!(&*log.health().borrow(), Health::Good) && !disk.is_waiting());
        assert_eq!(indexes(&Log::in_memory(&disk).unwrap()).await, [0, 1]);

        disk.fill();
        log.append(vec![entry(3, 2)], IOFlushed::noop()).await.unwrap();
        log.close().await;
        assert_eq!(indexes(&Log::in_memory(&disk).unwrap()).await, [0, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_disk_is_that_of_a_fresh_peer() {
        let disk = MemoryDisk::new(1, "a".into(), 3, Duration::from_millis(10));
        let log = Log::in_memory(&disk).unwrap();
        log.adopt("c".into()).await.unwrap();
        log.append(vec![entry(1, 0)], IOFlushed::noop()).await.unwrap();
        log.save_vote(Vote::new(1, 1)).await.unwrap();
        drop(log);
        disk.crash();
        disk.lose("b".into());
        let again = Log::in_memory(&disk).unwrap();
        assert_eq!((again.vote(), again.bounds()), (None, (None, None)));
        assert_eq!(disk.mark(), Mark { peer_id: 1, incarnation: "b".into(), ..Mark::default() });
    }

    #[tokio::test(start_paused = true)]
    async fn a_log_that_was_closed_is_there_with_its_truncations_and_purges() {
        let disk = MemoryDisk::new(1, "a".into(), 7, Duration::from_millis(10));
        let log = Log::in_memory(&disk).unwrap();
        log.adopt("c".into()).await.unwrap();
        log.append((0..10).map(|index| entry(1, index)).collect(), IOFlushed::noop()).await.unwrap();
        log.truncate_after(Some(log_id(1, 6))).await.unwrap();
        log.append(vec![entry(2, 7)], IOFlushed::noop()).await.unwrap();
        log.purge(log_id(1, 2)).await.unwrap();
        log.close().await;
        assert!(log.save_vote(Vote::new(3, 1)).await.is_err());
        assert_eq!(disk.crash(), (0, 0));

        let again = Log::in_memory(&disk).unwrap();
        assert_eq!(indexes(&again).await, [3, 4, 5, 6, 7]);
        assert_eq!(again.bounds(), (Some(log_id(1, 2)), Some(log_id(2, 7))));
        assert_eq!(again.mark().cluster_id, "c");
        let truncated = Change::Truncated(Some(log_id(1, 6)));
        assert!(disk.take_news().contains(&truncated) && disk.take_news().is_empty());
    }
}
