//! openraft's state machine: applies committed entries to the pure [`State`] and publishes the result.
//!
//! There is one writer, openraft's state machine task. Readers take [`Published::current`], an immutable value, and never
//! wait for the writer; only while a peer recovers, when nobody is served, what is published is changed where it is
//! (`StateMachine::replay`). What an entry did is published before its proposer hears of it.
//!
//! Snapshots are written from such an immutable value, in the background. A durable snapshot is noted in the log's mark
//! before openraft purges the log behind it.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{Stream, StreamExt};
use lake_client::clock;
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine, Snapshot};
use openraft::vote::leader_id_std::CommittedLeaderId;
use openraft::{EntryPayload, OptionalSend};
use tokio::sync::watch;

use super::types::{Answer, Entry, LogId, Member, SnapshotMeta, StoredMembership, TypeConfig};
use super::wire::{unknown_command, unknown_entry};
use crate::blocking::{behind, blocking};
use crate::files::FreeSpace;
use crate::log::{Log, entry_bytes, lock};
use crate::peer::agreement::{Note, Notes};
use crate::planted::{self, Bug};
use crate::snapshot::{self, SnapshotData, SnapshotStore};
use crate::state::command::Action;
use crate::state::{FEATURE_LEVEL, State};

/// A snapshot as openraft hands it around.
pub type RaftSnapshot = Snapshot<CommittedLeaderId<u64>, u64, Member, SnapshotData>;

/// Answers of at most this many entries wait for one publication.
const PUBLISH_EVERY: usize = 256;
/// Entries that nobody waits for are published once they take so many bytes: what a publication shows is shared with readers, so
/// the map's nodes that the next entries change are copied, which costs whoever catches up more than the entries themselves.
const PUBLISH_BYTES: u64 = 2 << 20;
/// Entries that are applied in one go to what readers would look at: who looks meanwhile waits for so many.
const IN_PLACE: usize = 64;
/// How long a snapshot that found no room on the disk waits before it is tried again.
const ROOM_AGAIN: Duration = Duration::from_secs(1);

/// Everything that entries up to `last` have done.
#[derive(Debug, Clone, Default)]
pub struct Applied {
    pub last: Option<LogId>,
    pub membership: StoredMembership,
    pub state: State,
    /// The state's hashes at some indexes, for comparison with the other peers.
    pub notes: Notes,
}

impl Applied {
    /// Applies the entry that comes next. `feature_level` is the highest that can be applied.
    ///
    /// # Errors
    /// When the entry raises the feature level above that, or this build does not know it. It must not be skipped (semantics,
    /// section 1).
    pub fn apply(&mut self, entry: Entry, feature_level: u32) -> Result<Answer, io::Error> {
        let log_id = entry.log_id;
        let command = match &entry.payload {
            EntryPayload::Normal(command) => Some(command.command().map_err(|e| {
                let unknown = unknown_entry(&unknown_command(log_id.index, &e));
                io::Error::new(io::ErrorKind::Unsupported, unknown.unwrap_or_default())
            })?),
            EntryPayload::Blank | EntryPayload::Membership(_) => None,
        };
        if let Some(command) = command
            && let Action::SetFeatureLevel { level, term } = command.action
            && term == log_id.leader_id.term
            && level > feature_level
        {
            return Err(io::Error::other(format!(
                "log entry {} raises the cluster's feature level to {level}, and this build ({}) knows {feature_level}: \
                 start this peer with the build that the leader runs; its data stays as it is",
                log_id.index,
                env!("CARGO_PKG_VERSION"),
            )));
        }
        self.last = Some(log_id);
        let answer = Answer(command.map(|command| self.state.apply(log_id.leader_id.term, command)));
        if let EntryPayload::Membership(membership) = entry.payload {
            self.state.set_members(membership.nodes().map(|(id, member)| (*id, member.incarnation.as_str())));
            self.membership = StoredMembership::new(Some(log_id), membership);
        }
        if Notes::due(log_id.index) {
            self.notes.add(Note { index: log_id.index, hash: self.state.digest() });
        }
        Ok(answer)
    }

    /// What a snapshot of this covers.
    pub fn snapshot_meta(&self) -> SnapshotMeta {
        SnapshotMeta { last_log_id: self.last, last_membership: self.membership.clone() }
    }
}

impl From<snapshot::Loaded> for Applied {
    fn from(loaded: snapshot::Loaded) -> Self {
        let snapshot::Loaded { meta, state, .. } = loaded;
        Self { last: meta.last_log_id, membership: meta.last_membership, state, notes: Notes::default() }
    }
}

/// Where the newest [`Applied`] is to be had.
#[derive(Debug)]
pub struct Published {
    current: watch::Sender<Arc<Applied>>,
    behind: Behind,
    /// How many snapshots this peer has begun to write, and of how many that has ended, well or not.
    snapshots_begun: AtomicU64,
    snapshots_ended: AtomicU64,
}

/// A snapshot that is being written, until this is dropped.
#[derive(Debug)]
struct Writing(Arc<Published>);

impl Writing {
    fn begin(published: Arc<Published>) -> Self {
        published.snapshots_begun.fetch_add(1, Ordering::SeqCst);
        Self(published)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.snapshots_ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// What lies behind the newest snapshot, the one being written included.
#[derive(Debug, Default)]
struct Behind {
    entries: AtomicU64,
    bytes: AtomicU64,
    /// What that snapshot takes; 0 without one.
    covered_bytes: AtomicU64,
}

/// What lies behind the newest snapshot, the one being written included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinceSnapshot {
    /// Entries applied since.
    pub entries: u64,
    /// Bytes that they take in memory.
    pub bytes: u64,
    /// About how many bytes that snapshot takes; 0 without one.
    pub covered_bytes: u64,
}

impl Published {
    fn new(applied: Applied) -> Arc<Self> {
        let behind = Behind::default();
        behind.begun(&applied.state);
        let (snapshots_begun, snapshots_ended) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { current: watch::Sender::new(Arc::new(applied)), behind, snapshots_begun, snapshots_ended })
    }

    /// The newest.
    pub fn current(&self) -> Arc<Applied> {
        self.current.borrow().clone()
    }

    /// The newest, and every one that comes.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Applied>> {
        self.current.subscribe()
    }

    /// How many snapshots this peer has begun to write since it was started.
    pub fn snapshots_begun(&self) -> u64 {
        self.snapshots_begun.load(Ordering::SeqCst)
    }

    /// Whether it is writing one.
    pub fn writes_snapshot(&self) -> bool {
        // In this order: what begins in between counts as being written.
        let ended = self.snapshots_ended.load(Ordering::SeqCst);
        self.snapshots_begun() > ended
    }

    /// What lies behind the newest snapshot.
    pub fn since_snapshot(&self) -> SinceSnapshot {
        SinceSnapshot {
            entries: self.behind.entries.load(Ordering::Relaxed),
            bytes: self.behind.bytes.load(Ordering::Relaxed),
            covered_bytes: self.behind.covered_bytes.load(Ordering::Relaxed),
        }
    }
}

impl Behind {
    /// A snapshot of this state is there, or is being written.
    fn begun(&self, state: &State) {
        self.entries.store(0, Ordering::Relaxed);
        self.bytes.store(0, Ordering::Relaxed);
        self.covered_bytes.store(state.map_written_bytes(), Ordering::Relaxed);
    }

    fn applied(&self, entries: u64, bytes: u64) {
        self.entries.fetch_add(entries, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Sees everything that a state machine does, as it does it. A seam for simulations, which check it.
pub trait Observe: std::fmt::Debug + Send + Sync {
    /// It has applied the entry that comes next, to this state.
    fn applied(&self, entry: &Entry, answer: &Answer, state: &State);
    /// It begins, or goes on, from a snapshot.
    fn installed(&self, applied: &Applied);
}

/// The state machine.
#[derive(Debug)]
pub struct StateMachine {
    published: Arc<Published>,
    snapshots: Arc<Snapshots>,
    feature_level: u32,
    /// The last entry that the log had when the peer started. Until it is applied the peer is recovering, and nobody is served.
    had: Option<u64>,
    observer: Option<Arc<dyn Observe>>,
}

/// Room on the disk that a snapshot must leave.
#[derive(Debug, Clone, Default)]
pub struct DiskReserve {
    pub bytes: u64,
    pub free_space: FreeSpace,
}

/// What the state machine and the builder of a snapshot share.
#[derive(Debug)]
struct Snapshots {
    store: SnapshotStore,
    log: Log,
    reserve: DiskReserve,
    newest: Mutex<Option<(SnapshotMeta, SnapshotData)>>,
}

impl StateMachine {
    /// Starts from what the newest usable snapshot holds, if there is one.
    pub fn new(
        store: SnapshotStore,
        log: Log,
        reserve: DiskReserve,
        loaded: Option<(snapshot::Loaded, SnapshotData)>,
    ) -> Self {
        let (applied, newest) = match loaded {
            Some((loaded, data)) => {
                let meta = loaded.meta.clone();
                (loaded.into(), Some((meta, data)))
            }
            None => (Applied::default(), None),
        };
        let had = log.bounds().1.map(|id| id.index);
        let snapshots = Snapshots { store, log, reserve, newest: Mutex::new(newest) };
        let published = Published::new(applied);
        Self { published, snapshots: Arc::new(snapshots), feature_level: FEATURE_LEVEL, had, observer: None }
    }

    /// The same, able to apply entries up to this feature level instead of this build's own.
    pub fn supporting(self, feature_level: u32) -> Self {
        Self { feature_level, ..self }
    }

    /// The same, seen by an observer from now on.
    pub fn observed_by(self, observer: Arc<dyn Observe>) -> Self {
        let applied = self.published.current();
        if applied.last.is_some() {
            observer.installed(&applied);
        }
        Self { observer: Some(observer), ..self }
    }

    /// Where readers find what was applied.
    pub fn published(&self) -> Arc<Published> {
        self.published.clone()
    }

    /// Where snapshots are kept, and received.
    pub fn snapshots(&self) -> SnapshotStore {
        self.snapshots.store.clone()
    }

    /// Applies what the log had when the peer started, for as long as that comes, and returns what comes behind it. What was
    /// published shares the map's nodes, each of which the next write would copy, with a count to raise in every entry of a
    /// leaf. While nobody is served nobody holds it: it is changed where it is. Whoever holds it nevertheless, as a snapshot that
    /// is being written does, keeps it as it is.
    async fn replay<Strm>(&self, entries: &mut Strm) -> Result<Option<EntryResponder<TypeConfig>>, io::Error>
    where
        Strm: Stream<Item = Result<EntryResponder<TypeConfig>, io::Error>> + Unpin + OptionalSend,
    {
        let mut untold = false;
        loop {
            let (mut taken, mut bytes) = (Vec::new(), 0);
            let mut end = None;
            while end.is_none() && taken.len() < IN_PLACE && bytes < PUBLISH_BYTES {
                match entries.next().await {
                    Some(Ok((entry, None))) if self.is_replayed(&entry) => {
                        bytes += entry_bytes(&entry) as u64;
                        taken.push(entry);
                    }
                    other => end = Some(other.transpose()),
                }
            }
            untold |= !taken.is_empty();
            self.apply_in_place(taken, bytes)?;
            if let Some(end) = end {
                if untold {
                    self.published.current.send_modify(|_| {});
                }
                return end;
            }
            // Who waited to look comes first.
            tokio::task::yield_now().await;
        }
    }

    /// An observer may look at what is published, which cannot be had while it is changed.
    fn is_replayed(&self, entry: &Entry) -> bool {
        self.observer.is_none() && self.had.is_some_and(|had| entry.log_id.index <= had)
    }

    /// Applies entries to what is published, and tells nobody. After an error those before the one that failed are applied.
    fn apply_in_place(&self, entries: Vec<Entry>, bytes: u64) -> Result<(), io::Error> {
        if entries.is_empty() {
            return Ok(());
        }
        self.published.behind.applied(entries.len() as u64, bytes);
        let mut done = Ok(());
        self.published.current.send_if_modified(|current| {
            let applied = Arc::make_mut(current);
            done = entries.into_iter().try_for_each(|entry| applied.apply(entry, self.feature_level).map(drop));
            false
        });
        done
    }

    fn builder(&self) -> SnapshotBuilder {
        let applied = self.published.current();
        self.published.behind.begun(&applied.state);
        let _writing = Writing::begin(self.published.clone());
        SnapshotBuilder { applied, snapshots: self.snapshots.clone(), _writing }
    }
}

impl RaftStateMachine<TypeConfig> for StateMachine {
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = SnapshotBuilder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        let applied = self.published.current();
        Ok((applied.last, applied.membership.clone()))
    }

    async fn apply<Strm>(&mut self, mut entries: Strm) -> Result<(), io::Error>
    where
        Strm: Stream<Item = Result<EntryResponder<TypeConfig>, io::Error>> + Unpin + OptionalSend,
    {
        let Some(next) = self.replay(&mut entries).await? else { return Ok(()) };
        let mut entries = futures::stream::iter([Ok(next)]).chain(entries);
        let mut ended = false;
        while !ended {
            let mut applied = Applied::clone(&self.published.current());
            let mut answers = Vec::new();
            let (mut count, mut bytes) = (0, 0);
            let mut failed = None;
            while answers.len() < PUBLISH_EVERY && bytes < PUBLISH_BYTES {
                match entries.next().await {
                    Some(Ok((entry, responder))) => {
                        let size = entry_bytes(&entry) as u64;
                        let observed = self.observer.as_ref().map(|observer| (observer, entry.clone()));
                        match applied.apply(entry, self.feature_level) {
                            Ok(outcome) => {
                                if let Some((observer, entry)) = observed {
                                    observer.applied(&entry, &outcome, &applied.state);
                                }
                                answers.extend(responder.map(|responder| (responder, outcome)));
                            }
                            Err(e) => {
                                failed = Some(e);
                                break;
                            }
                        }
                        count += 1;
                        bytes += size;
                    }
                    Some(Err(e)) => {
                        failed = Some(e);
                        break;
                    }
                    None => {
                        ended = true;
                        break;
                    }
                }
            }
            self.published.behind.applied(count, bytes);
            self.published.current.send_replace(Arc::new(applied));
            for (responder, outcome) in answers {
                responder.send(outcome);
            }
            if let Some(e) = failed {
                return Err(e);
            }
        }
        Ok(())
    }

    async fn try_create_snapshot_builder(&mut self, force: bool) -> Option<SnapshotBuilder> {
        if !force {
            // A snapshot that does not fit would stop this peer; the log can wait.
            let state = &self.published.current().state;
            let size = state.written_bytes();
            let free = self.snapshots.reserve.free_space.bytes(self.snapshots.store.dir());
            if free < self.snapshots.reserve.bytes.saturating_add(size) {
                tracing::warn!(
                    free_mib = free >> 20,
                    needed_mib = size >> 20,
                    "no room for a snapshot beyond the disk's reserve: putting it off"
                );
                return None;
            }
        }
        Some(self.builder())
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder {
        self.builder()
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: SnapshotData) -> Result<(), io::Error> {
        let snapshots = self.snapshots.clone();
        let meta = meta.clone();
        let feature_level = self.feature_level;
        let (applied, meta, data) = blocking(move || {
            let mut loaded = snapshot::read(&snapshot.path, feature_level)?;
            if planted::has(Bug::SnapshotShort) {
                loaded.state.forget_newest();
            }
            if loaded.meta.last_log_id != meta.last_log_id {
                let what = format!(
                    "the snapshot {} covers {:?}, not {:?} as was said",
                    snapshot.path.display(),
                    loaded.meta.last_log_id,
                    meta.last_log_id
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            let data = snapshots.store.adopt(&loaded.meta, &snapshot)?;
            let meta = loaded.meta.clone();
            Ok((Applied::from(loaded), meta, data))
        })
        .await?;
        self.snapshots.keep(meta, data).await?;
        let applied: Applied = applied;
        if let Some(observer) = &self.observer {
            observer.installed(&applied);
        }
        self.published.behind.begun(&applied.state);
        self.published.current.send_replace(Arc::new(applied));
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<RaftSnapshot>, io::Error> {
        let newest = lock(&self.snapshots.newest).clone();
        Ok(newest.map(|(meta, snapshot)| Snapshot { meta, snapshot }))
    }
}

impl Snapshots {
    /// A snapshot has become durable: notes it in the mark, and lets older ones go.
    async fn keep(&self, meta: SnapshotMeta, data: SnapshotData) -> io::Result<()> {
        if let Some(last) = meta.last_log_id {
            self.log.note_snapshot(last).await?;
        }
        {
            let mut newest = lock(&self.newest);
            if newest.as_ref().is_none_or(|(have, _)| have.last_log_id <= meta.last_log_id) {
                *newest = Some((meta, data));
            }
        }
        let store = self.store.clone();
        blocking(move || store.prune()).await
    }
}

/// Writes a snapshot, however often it takes until the disk has room for it, and the machine a thread: others may take what was
/// free when it began. The log is kept meanwhile, and nothing is lost.
///
/// # Errors
/// Those of writing; that there was no room when the peer was stopped.
async fn where_there_is_room<T: Send + 'static>(
    log: &Log,
    write: impl Fn() -> io::Result<T> + Clone + Send + 'static,
) -> io::Result<T> {
    let mut told = false;
    loop {
        match behind("lake-snapshot", write.clone()).await {
            Err(e) if is_for_want_of_room(&e) && !log.holds_no_more() => {
                if !told {
                    told = true;
                    tracing::warn!("{e}; the log stays as it is, and the snapshot is written once there is room");
                }
                tokio::time::sleep(ROOM_AGAIN).await;
            }
            ended => return ended,
        }
    }
}

/// Of the disk, or of the machine for a thread.
fn is_for_want_of_room(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::WouldBlock)
}

/// Writes one snapshot from an immutable state.
#[derive(Debug)]
pub struct SnapshotBuilder {
    applied: Arc<Applied>,
    snapshots: Arc<Snapshots>,
    _writing: Writing,
}

impl RaftSnapshotBuilder<TypeConfig> for SnapshotBuilder {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> Result<RaftSnapshot, io::Error> {
        let meta = self.applied.snapshot_meta();
        let started = clock::now();
        let (applied, snapshots, covered) = (self.applied.clone(), self.snapshots.clone(), meta.clone());
        let cluster_id = self.snapshots.log.mark().cluster_id;
        let log = self.snapshots.log.clone();
        let write = move || {
            let goes_on = || !snapshots.log.holds_no_more();
            snapshots.store.write_beside(&covered, &cluster_id, &applied.state, goes_on)
        };
        let data = where_there_is_room(&log, write).await?;
        self.snapshots.keep(meta.clone(), data.clone()).await?;
        tracing::info!(
            index = meta.last_log_id.map(|id| id.index),
            keys = self.applied.state.len(),
            millis = clock::since(started).as_millis() as u64,
            "snapshot written"
        );
        Ok(Snapshot { meta, snapshot: data })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicUsize;

    use lake_proto::kv::{Op, Txn};
    use openraft::storage::IOFlushed;

    use super::*;
    use crate::log::memory::MemoryDisk;
    use crate::raft::types::{Command, log_id};

    /// Sees how far readers saw when each entry was applied.
    #[derive(Debug, Default)]
    struct Readers {
        published: OnceLock<Arc<Published>>,
        saw: Mutex<Vec<Option<u64>>>,
    }

    impl Observe for Readers {
        fn applied(&self, _: &Entry, _: &Answer, _: &State) {
            let last = self.published.get().and_then(|published| published.current().last);
            lock(&self.saw).push(last.map(|id| id.index));
        }

        fn installed(&self, _: &Applied) {}
    }

    #[tokio::test]
    async fn what_nobody_waits_for_is_published_by_its_bytes() {
        let log = Log::in_memory(&MemoryDisk::new(1, "incarnation".to_owned(), 0, Duration::ZERO)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path().to_owned()).unwrap();
        let readers = Arc::new(Readers::default());
        let mut machine = StateMachine::new(store, log, DiskReserve::default(), None).observed_by(readers.clone());
        readers.published.set(machine.published()).unwrap();
        let put = |index: u64, bytes: usize| {
            let txn = Txn { then: vec![Op::put("/kv/a", vec![7; bytes])], ..Txn::default() };
            let payload = EntryPayload::Normal(Command::new(Action::Txn(txn).unstamped()));
            Entry { log_id: log_id(1, index), payload }
        };
        let entries = (0..1000).map(|n| put(n, 10)).chain((1000..1008).map(|n| put(n, 1 << 20)));
        let entries = entries.map(|entry| Ok::<EntryResponder<TypeConfig>, io::Error>((entry, None)));
        machine.apply(futures::stream::iter(entries)).await.unwrap();
        let saw = lock(&readers.saw);
        assert!(saw[..1002].iter().all(Option::is_none), "{:?}", saw.iter().position(Option::is_some));
        let large = [1001, 1001, 1003, 1003, 1005, 1005].map(Some);
        assert_eq!(saw[1002..], large, "two of a megabyte at a time");
        assert_eq!(machine.published().current().last, Some(log_id(1, 1007)), "and all of it in the end");
    }

    #[tokio::test]
    async fn what_the_log_had_is_applied_where_it_is_and_who_holds_it_keeps_it() {
        let disk = MemoryDisk::new(1, "incarnation".to_owned(), 0, Duration::ZERO);
        let put = |index: u64| {
            let txn = Txn { then: vec![Op::put(format!("/kv/{}", index % 70), vec![7; 9])], ..Txn::default() };
            let payload = EntryPayload::Normal(Command::new(Action::Txn(txn).unstamped()));
            Entry { log_id: log_id(1, index), payload }
        };
        let log = Log::in_memory(&disk).unwrap();
        log.append((0..300).map(put).collect(), IOFlushed::noop()).await.unwrap();
        log.close().await;

        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path().to_owned()).unwrap();
        let log = Log::in_memory(&disk).unwrap();
        let mut machine = StateMachine::new(store, log, DiskReserve::default(), None);
        let published = machine.published();
        let place = || Arc::as_ptr(&published.current());
        let entries = |indexes: std::ops::Range<u64>| {
            futures::stream::iter(indexes.map(move |n| Ok::<EntryResponder<TypeConfig>, io::Error>((put(n), None))))
        };
        let begins = place();
        machine.apply(entries(0..150)).await.unwrap();
        assert_eq!(place(), begins, "nobody holds it");

        let held = published.current();
        let mut told = published.subscribe();
        let before = held.state.iter().collect::<Vec<_>>();
        machine.apply(entries(150..290)).await.unwrap();
        assert!(told.has_changed().unwrap() && told.borrow_and_update().last == Some(log_id(1, 289)));
        assert_eq!((held.last, held.state.iter().collect::<Vec<_>>()), (Some(log_id(1, 149)), before));
        drop(held);

        // From the middle of it on the entries are new.
        let last = place();
        machine.apply(entries(290..310)).await.unwrap();
        assert_ne!(place(), last, "what is new is published anew");
        assert_eq!(published.since_snapshot().entries, 310);
        let mut expected = Applied::default();
        for index in 0..310 {
            expected.apply(put(index), FEATURE_LEVEL).unwrap();
        }
        let current = published.current();
        assert_eq!((current.last, &current.state), (expected.last, &expected.state));
    }

    #[tokio::test(start_paused = true)]
    async fn a_snapshot_without_room_is_written_once_there_is_some() {
        let log = Log::in_memory(&MemoryDisk::new(1, "incarnation".to_owned(), 0, Duration::ZERO)).unwrap();
        let tried = Arc::new(AtomicUsize::new(0));
        let full_until = |tries: usize| {
            let tried = tried.clone();
            move || match tried.fetch_add(1, Ordering::SeqCst) {
                // So it is said that there is no thread to be had.
                1 => Err(io::Error::from_raw_os_error(rustix::io::Errno::AGAIN.raw_os_error())),
                n if n < tries => Err(io::Error::from(io::ErrorKind::StorageFull)),
                n => Ok(n),
            }
        };
        assert_eq!(where_there_is_room(&log, full_until(3)).await.unwrap(), 3);
        let broken = where_there_is_room(&log, || Err::<(), _>(io::ErrorKind::InvalidData.into())).await;
        assert_eq!(broken.unwrap_err().kind(), io::ErrorKind::InvalidData, "other errors are final");
        log.hold_no_more();
        let stopped = where_there_is_room(&log, full_until(usize::MAX)).await;
        assert_eq!(stopped.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
