use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use lake_proto::kv::{Op, Txn};
use openraft::storage::{RaftLogReader, RaftLogStorage};
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::type_config::TypeConfigExt;

use super::*;
use crate::raft::log_store::LogStore;
use crate::raft::state_machine::{Applied, DiskReserve, StateMachine};
use crate::raft::types::Command;
use crate::raft::types::{Member, Membership};
use crate::snapshot::SnapshotStore;
use crate::state::FEATURE_LEVEL;
use crate::state::command::Action;

/// How long what should happen soon may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn identity() -> Mark {
    Mark { peer_id: 1, incarnation: "ab".repeat(16), ..Mark::default() }
}

fn options(dir: &Path) -> LogOptions {
    LogOptions::new(
        dir.join("log"),
        &StorageConfig { disk_reserve_bytes: 0, journal_bytes: 256 << 10, ..Default::default() },
    )
}

fn create(dir: &Path) -> Log {
    Log::create(options(dir), MarkFile::create(&dir.join("mark"), identity()).unwrap()).unwrap()
}

fn open(dir: &Path) -> Result<Log, OpenError> {
    Log::open(options(dir), MarkFile::open(&dir.join("mark")).unwrap())
}

fn entry(term: u64, index: u64, bytes: usize) -> Entry {
    let txn = Txn { then: vec![Op::put(format!("/kv/{index}"), vec![7; bytes])], ..Txn::default() };
    Entry { log_id: log_id(term, index), payload: Payload::Normal(Command::new(Action::Txn(txn).unstamped())) }
}

fn callback() -> (IOFlushed<TypeConfig>, impl Future<Output = io::Result<()>>) {
    let (sender, receiver) = TypeConfig::oneshot();
    (IOFlushed::signal(sender), async move { receiver.await.map_err(|_| io::Error::other("dropped"))? })
}

async fn append(log: &Log, entries: Vec<Entry>) -> io::Result<()> {
    let (callback, flushed) = callback();
    log.append(entries, callback).await?;
    flushed.await
}

struct Builder;

impl StoreBuilder<TypeConfig, LogStore, StateMachine, tempfile::TempDir> for Builder {
    async fn build(&self) -> Result<(tempfile::TempDir, LogStore, StateMachine), openraft::StorageError<TypeConfig>> {
        let dir = tempfile::tempdir().unwrap();
        let log = create(dir.path());
        let snapshots = SnapshotStore::open(dir.path().join("snapshots")).unwrap();
        let state_machine = StateMachine::new(snapshots, log.clone(), DiskReserve::default(), None);
        Ok((dir, LogStore::new(log), state_machine))
    }
}

/// openraft's own storage suite, on the real log and the real state machine.
#[tokio::test(flavor = "multi_thread")]
async fn openraft_storage_suite() {
    Suite::test_all(Builder).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_can_be_read_before_they_are_durable_and_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    let entries: Vec<Entry> = (0..100).map(|i| entry(1, i, 500)).collect();
    let (callback, flushed) = callback();
    log.append(entries.clone(), callback).await.unwrap();
    assert_eq!(log.read(.., usize::MAX).await.unwrap(), entries, "readable when append returns");
    flushed.await.unwrap();
    log.save_vote(Vote::new(3, 1)).await.unwrap();
    log.close().await;
    assert!(log.append(vec![entry(1, 100, 1)], IOFlushed::noop()).await.is_err(), "a closed log takes nothing");

    let log = open(dir.path()).unwrap();
    assert_eq!(log.bounds(), (None, Some(log_id(1, 99))));
    assert_eq!(log.vote(), Some(Vote::new(3, 1)));
    append(&log, vec![entry(3, 100, 500)]).await.unwrap();
    let read = log.read(95..=100, usize::MAX).await.unwrap();
    assert_eq!(read[..5], entries[95..], "from the disk");
    assert_eq!(read[5], entry(3, 100, 500), "and from memory");
    assert!(log.read(0..101, 2000).await.unwrap().len() < 10, "reads are bounded in bytes");
    log.close().await;
}

/// What a process that is killed leaves.
fn killed(dir: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    std::fs::create_dir(copy.path().join("log")).unwrap();
    for file in ["mark", "journal", "log/conf", "log/db"] {
        std::fs::copy(dir.join(file), copy.path().join(file)).unwrap();
    }
    copy
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_is_there_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    let mut next = 0;
    // Single entries, more than the journal holds, and one that is too large for it.
    for sizes in [vec![10; 1], vec![500; 40], vec![6_000; 80], vec![100_000; 1], vec![10; 3]] {
        for size in &sizes {
            append(&log, vec![entry(1, next, *size)]).await.unwrap();
            next += 1;
        }
        let copy = killed(dir.path());
        for _ in 0..2 {
            let log = open(copy.path()).unwrap();
            let read = log.read(.., usize::MAX).await.unwrap();
            assert_eq!(read.iter().map(|e| e.log_id.index).collect::<Vec<_>>(), (0..next).collect::<Vec<_>>());
            assert_eq!(read[read.len() - 1], entry(1, next - 1, sizes[0]));
            assert_eq!(log.mark().last, Some(log_id(1, next - 1)), "opening makes it durable in the log");
            log.close().await;
        }
    }
    log.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_journal_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    append(&log, vec![entry(1, 0, 10)]).await.unwrap();
    let copy = killed(dir.path());
    log.purge(log_id(1, 0)).await.unwrap();
    append(&log, vec![entry(1, 1, 10)]).await.unwrap();
    for file in ["mark", "journal"] {
        std::fs::copy(dir.path().join(file), copy.path().join(file)).unwrap();
    }
    log.close().await;
    assert_eq!(
        open(copy.path()).unwrap().bounds(),
        (Some(log_id(1, 0)), Some(log_id(1, 1))),
        "what is purged need not be there"
    );
    std::fs::remove_file(copy.path().join("journal")).unwrap();
    let error = open(copy.path()).unwrap_err().to_string();
    assert!(error.contains("journal is damaged: it is missing"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn old_entries_leave_memory_and_are_read_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    let size = 1 << 20;
    for i in 0..40 {
        append(&log, vec![entry(1, i, size)]).await.unwrap();
    }
    {
        let tail = lock(&log.inner.shared.tail);
        assert!(tail.bytes <= TAIL_BYTES && tail.first_index() > 0, "{} bytes in memory", tail.bytes);
    }
    let read = log.read(0..40, usize::MAX).await.unwrap();
    assert_eq!(read.iter().map(|e| e.log_id.index).collect::<Vec<_>>(), (0..40).collect::<Vec<_>>());
    let some = log.read(0..40, READ_BYTES).await.unwrap();
    assert!(some.len() <= 5, "{} entries of 1 MiB in one read", some.len());
    log.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn truncation_and_purge_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    append(&log, (0..50).map(|i| entry(1, i, 100)).collect()).await.unwrap();
    log.truncate_after(Some(log_id(1, 29))).await.unwrap();
    append(&log, vec![entry(2, 30, 100)]).await.unwrap();
    log.purge(log_id(1, 10)).await.unwrap();
    assert_eq!(log.bounds(), (Some(log_id(1, 10)), Some(log_id(2, 30))));
    log.close().await;

    let log = open(dir.path()).unwrap();
    assert_eq!(log.bounds(), (Some(log_id(1, 10)), Some(log_id(2, 30))));
    let read = log.read(.., usize::MAX).await.unwrap();
    assert_eq!((read[0].log_id, read.len()), (log_id(1, 11), 20));
    // A snapshot may reach beyond the log.
    log.purge(log_id(4, 100)).await.unwrap();
    append(&log, vec![entry(4, 101, 1)]).await.unwrap();
    log.close().await;
    let log = open(dir.path()).unwrap();
    assert_eq!(log.bounds(), (Some(log_id(4, 100)), Some(log_id(4, 101))));
    log.close().await;
}

/// A leader that was deposed may still be reading for a follower when its own log is truncated or purged.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_removal_overtakes_is_no_damage() {
    const ENTRIES: u64 = 4000;
    for purge in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let log = create(dir.path());
        // Some take several values.
        let entries = (0..ENTRIES).map(|i| entry(1, i, if i % 50 == 7 { 20_000 } else { 2_000 }));
        append(&log, entries.collect()).await.unwrap();
        log.close().await;
        // Nothing is in memory now.
        let log = open(dir.path()).unwrap();
        let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let readers = [0, 1].map(|_| {
            let (log, stop, reads) = (log.clone(), stop.clone(), reads.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let read = log.read(.., usize::MAX).await.unwrap();
                    assert!(read.windows(2).all(|two| two[1].log_id.index == two[0].log_id.index + 1));
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        for step in 1..=20 {
            let index = step * ENTRIES / 20 - 1;
            if purge {
                log.purge(log_id(1, index)).await.unwrap();
            } else {
                log.truncate_after(Some(log_id(1, ENTRIES - 1 - index))).await.unwrap();
            }
            let before = reads.load(Ordering::Relaxed);
            while reads.load(Ordering::Relaxed) == before && !readers.iter().any(|reader| reader.is_finished()) {
                tokio::task::yield_now().await;
            }
        }
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.await.unwrap();
        }
        log.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_slot_of_the_mark_lost_later_brings_no_bound_back_that_the_log_no_longer_meets() {
    for damaged_slot in 0..2 {
        for purge in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let log = create(dir.path());
            append(&log, (0..50).map(|i| entry(1, i, 100)).collect()).await.unwrap();
            if purge {
                log.purge(log_id(1, 29)).await.unwrap();
            } else {
                log.truncate_after(Some(log_id(1, 29))).await.unwrap();
            }
            log.close().await;
            let path = dir.path().join("mark");
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[damaged_slot * mark::SLOT_BYTES + 100] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            let bounds = open(dir.path()).unwrap().bounds();
            let expected = if purge { (Some(log_id(1, 29)), Some(log_id(1, 49))) } else { (None, Some(log_id(1, 29))) };
            assert_eq!(bounds, expected, "slot {damaged_slot}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_does_not_follow_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    append(&log, vec![entry(1, 0, 1)]).await.unwrap();
    let error = append(&log, vec![entry(1, 2, 1)]).await.unwrap_err();
    assert!(error.to_string().contains("entry 2 does not follow entry 0"), "{error}");
    log.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_behind_its_mark_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    append(&log, (0..10).map(|i| entry(1, i, 1)).collect()).await.unwrap();
    log.close().await;
    let mut mark = MarkFile::open(&dir.path().join("mark")).unwrap();
    assert_eq!(mark.get().last, Some(log_id(1, 9)));
    mark.update(|m| m.last = Some(log_id(1, 10))).unwrap();
    drop(mark);
    assert!(matches!(open(dir.path()).unwrap_err(), OpenError::Behind { .. }));
}

/// A log on a disk with as much room as a test says.
fn create_with_room(dir: &Path, room: &Arc<AtomicU64>) -> Log {
    let room = room.clone();
    let mut options = options(dir);
    options.disk_reserve_bytes = 1 << 20;
    options.free_space = crate::files::FreeSpace::new(move |_| Ok(room.load(Ordering::SeqCst)));
    Log::create(options, MarkFile::create(&dir.join("mark"), identity()).unwrap()).unwrap()
}

async fn until(log: &Log, wanted: impl Fn(&Health) -> bool) {
    let mut health = log.health();
    tokio::time::timeout(PATIENCE, health.wait_for(wanted)).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_holds_what_is_appended_until_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let room = Arc::new(AtomicU64::new(0));
    let log = create_with_room(dir.path(), &room);
    let (callback, flushed) = callback();
    log.append(vec![entry(1, 0, 10)], callback).await.unwrap();
    let mut flushed = Box::pin(flushed);
    until(&log, |h| matches!(h, Health::Held(what) if what.contains("disk full"))).await;
    assert!(futures::poll!(&mut flushed).is_pending(), "nothing is acknowledged");
    assert_eq!(log.read(.., usize::MAX).await.unwrap().len(), 1, "but it can be read");
    assert!(log.busy_for() > Duration::ZERO);
    room.store(u64::MAX, Ordering::SeqCst);
    flushed.await.unwrap();
    until(&log, |h| *h == Health::Good).await;
    log.close().await;
    assert_eq!(open(dir.path()).unwrap().bounds().1, Some(log_id(1, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_can_be_closed_while_the_disk_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let log = create_with_room(dir.path(), &Arc::new(AtomicU64::new(0)));
    let (callback, flushed) = callback();
    log.append(vec![entry(1, 0, 10)], callback).await.unwrap();
    until(&log, |h| matches!(h, Health::Held(_))).await;
    tokio::time::timeout(PATIENCE, log.close()).await.unwrap();
    assert!(flushed.await.is_err(), "what was held is refused");
    assert_eq!(open(dir.path()).unwrap().bounds().1, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_behind_what_was_refused_for_want_of_room() {
    const NONE: u64 = 0;
    const NONE_ONCE_MORE: u64 = 1;
    let dir = tempfile::tempdir().unwrap();
    let room = Arc::new(AtomicU64::new(NONE));
    let mut options = options(dir.path());
    options.disk_reserve_bytes = 1 << 20;
    let asked = room.clone();
    options.free_space = crate::files::FreeSpace::new(move |_| {
        let last = asked.compare_exchange(NONE_ONCE_MORE, u64::MAX, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        Ok(if last { 0 } else { asked.load(Ordering::SeqCst) })
    });
    let log = Log::create(options, MarkFile::create(&dir.path().join("mark"), identity()).unwrap()).unwrap();
    let (held, first) = callback();
    log.append(vec![entry(1, 0, 10)], held).await.unwrap();
    until(&log, |h| matches!(h, Health::Held(_))).await;
    let (behind, second) = callback();
    log.append(vec![entry(1, 1, 10)], behind).await.unwrap();
    log.hold_no_more();
    room.store(NONE_ONCE_MORE, Ordering::SeqCst);
    assert!(first.await.is_err());
    assert!(second.await.is_err(), "it would leave a hole");
    assert!(log.save_vote(Vote::new(3, 1)).await.is_err());
    log.close().await;
    assert_eq!(open(dir.path()).unwrap().bounds().1, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_while_the_disk_is_full_is_bounded_in_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let log = create_with_room(dir.path(), &Arc::new(AtomicU64::new(0)));
    // All share their bytes, so that only the log thinks that they are many.
    let large = entry(1, 0, 8 << 20);
    let most = QUEUE_BYTES / entry_bytes(&large);
    let log_id = |index| Entry { log_id: log_id(1, index), ..large.clone() };
    for index in 0..most as u64 {
        log.append(vec![log_id(index)], IOFlushed::noop()).await.unwrap();
    }
    let mut one_more = Box::pin(log.append(vec![log_id(most as u64)], IOFlushed::noop()));
    assert!(futures::poll!(&mut one_more).is_pending());
    log.hold_no_more();
    one_more.await.unwrap();
    log.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memberships_and_blank_entries_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    let membership = Membership::new(
        vec![BTreeSet::from([1])],
        std::collections::BTreeMap::from([(1, Member { incarnation: "a".into(), ..Member::default() })]),
    )
    .unwrap();
    let entries = vec![
        Entry { log_id: log_id(0, 0), payload: Payload::Membership(membership) },
        Entry { log_id: log_id(1, 1), payload: Payload::Blank },
    ];
    append(&log, entries.clone()).await.unwrap();
    log.close().await;
    let log = open(dir.path()).unwrap();
    assert_eq!(log.read(.., usize::MAX).await.unwrap(), entries);
    assert_eq!(LogStore::new(log.clone()).get_log_state().await.unwrap().last_log_id, Some(log_id(1, 1)));
    log.close().await;
}

#[tokio::test]
async fn what_is_looked_through_for_memberships_is_not_decoded() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    let payload = Payload::Normal(Command::unread(bytes::Bytes::from_static(b"\x08\x01")));
    let unknown = Entry { log_id: log_id(1, 1), payload };
    append(&log, vec![entry(1, 0, 10), unknown.clone()]).await.unwrap();
    log.close().await;
    let log = open(dir.path()).unwrap();
    let found = LogStore::new(log.clone()).try_get_log_entries(..).await.unwrap();
    assert_eq!(found, [entry(1, 0, 10), unknown.clone()]);
    // Whoever has to know what is to be done is told that it cannot be.
    let told = log.read(.., usize::MAX).await.unwrap_err();
    assert!(told.kind() == io::ErrorKind::Unsupported && told.to_string().contains("log entry 1"), "{told}");
    let told = Applied::default().apply(unknown, FEATURE_LEVEL).unwrap_err();
    assert!(told.kind() == io::ErrorKind::Unsupported && told.to_string().contains("log entry 1"), "{told}");
    log.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_goes_backwards_through_the_log_finds_it_read_ahead() {
    let dir = tempfile::tempdir().unwrap();
    let log = create(dir.path());
    // Too many at once are too large together.
    let size = |index: u64| if (1000..1100).contains(&index) { 100_000 } else { 300 };
    let entries: Vec<Entry> = (0..3000).map(|index| entry(1, index, size(index))).collect();
    append(&log, entries.clone()).await.unwrap();
    log.close().await;
    let log = open(dir.path()).unwrap();
    let mut reader = LogStore::new(log.clone());
    let mut ahead = vec![];
    for end in (1..=3000_u64).rev().step_by(64) {
        let start = end.saturating_sub(64);
        let read = reader.try_get_log_entries(start..end).await.unwrap();
        assert!(read == entries[start as usize..end as usize], "{start}..{end}");
        ahead.push(reader.read_ahead());
    }
    assert!(ahead[..20].iter().any(|ahead| *ahead > 500) && ahead[40..].iter().any(|ahead| *ahead > 100), "{ahead:?}");

    // What was taken back, or is gone, is not told.
    let mut reader = LogStore::new(log.clone());
    let terms = |read: Vec<Entry>| read.iter().map(|entry| entry.log_id.leader_id.term).collect::<BTreeSet<_>>();
    for end in [900_u64, 836, 772] {
        assert_eq!(terms(reader.try_get_log_entries(end - 64..end).await.unwrap()), BTreeSet::from([1]));
    }
    assert!(reader.read_ahead() > 100);
    log.truncate_after(Some(log_id(1, 499))).await.unwrap();
    append(&log, (500..900).map(|index| entry(2, index, 300)).collect()).await.unwrap();
    assert_eq!(terms(reader.try_get_log_entries(644..708).await.unwrap()), BTreeSet::from([2]));
    assert!(reader.read_ahead() > 100);
    log.purge(log_id(2, 600)).await.unwrap();
    let left = reader.try_get_log_entries(580..644).await.unwrap();
    assert_eq!((left[0].log_id, left.len()), (log_id(2, 601), 43));
    log.close().await;
}

#[test]
fn an_entry_of_a_newer_build_is_told_from_one_that_makes_no_sense() {
    let dir = Path::new("/data/log");
    let read = |entry: v1::LogEntry| {
        let frame = Frame { index: 7, term: 1, payload: entry.encode_to_vec().into() };
        decode(dir, frame, entry_from_wire).unwrap_err().to_string()
    };
    let log_id = Some(v1::LogId { term: 1, node_id: 0, index: 7 });
    let unknown = v1::log_entry::Payload::Command(bytes::Bytes::from_static(b"\x08\x01"));
    let newer = read(v1::LogEntry { log_id, payload: Some(unknown) });
    assert!(newer.contains("log entry 7") && newer.contains("start this peer with the build"), "{newer}");
    assert!(newer.contains("/data/log"), "{newer}");
    let senseless = read(v1::LogEntry { log_id, payload: None });
    assert!(senseless.contains("makes no sense") && senseless.contains("/data/log"), "{senseless}");
}

#[test]
fn it_is_known_how_many_bytes_lie_between_entries() {
    let mut tail = Tail::default();
    let payload = |bytes: usize| {
        let txn = Txn { then: vec![Op::put("/kv/a", vec![0; bytes])], ..Txn::default() };
        Payload::Normal(Command::new(Action::Txn(txn).unstamped()))
    };
    for index in 0..40 {
        tail.push(Entry { log_id: log_id(1, index), payload: payload(500 << 10) }).unwrap();
    }
    assert_eq!(tail.with_bytes_before(39, 100 << 20), None, "there are not so many");
    let kept = |tail: &Tail, upto, mib: u64| (upto - tail.with_bytes_before(upto, mib << 20).unwrap()) * 500 / 1024;
    assert!((9..=12).contains(&kept(&tail, 39, 10)) && (9..=12).contains(&kept(&tail, 30, 10)));
    tail.truncate_after(Some(log_id(1, 29)));
    assert!((9..=12).contains(&kept(&tail, 29, 10)));
    tail.purge(log_id(1, 20));
    assert_eq!(tail.with_bytes_before(29, 10 << 20), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sync_that_fails_is_final_though_the_disk_recovers() {
    // Of an append, small and large, of a vote, and of a truncation.
    for failing_write in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        let disk = options.failing.clone();
        let log = Log::create(options, MarkFile::create(&dir.path().join("mark"), identity()).unwrap()).unwrap();
        append(&log, vec![entry(1, 0, 10), entry(1, 1, 10)]).await.unwrap();
        log.save_vote(Vote::new(1, 1)).await.unwrap();
        disk.set(true);
        let failed = match failing_write {
            0 => append(&log, vec![entry(1, 2, 10)]).await,
            1 => append(&log, vec![entry(1, 2, 1 << 20)]).await,
            2 => log.save_vote(Vote::new(2, 1)).await,
            _ => log.truncate_after(Some(log_id(1, 0))).await,
        };
        assert!(failed.is_err(), "{failing_write}");
        until(&log, |health| matches!(health, Health::Failed(what) if what.contains("the disk was told to fail")))
            .await;
        disk.set(false);
        let next = log.bounds().1.unwrap().index + 1;
        assert!(append(&log, vec![entry(1, next, 10)]).await.is_err(), "nobody knows what is on the disk");
        assert!(log.save_vote(Vote::new(3, 1)).await.is_err());
        assert!(matches!(&*log.health().borrow(), Health::Failed(_)), "it does not become good again");
        log.close().await;

        let log = open(dir.path()).unwrap();
        let read = log.read(0..2, usize::MAX).await.unwrap();
        assert!(failing_write == 3 || read == [entry(1, 0, 10), entry(1, 1, 10)], "what was acknowledged is there");
        assert_ne!(log.vote(), Some(Vote::new(3, 1)));
        append(&log, vec![entry(3, log.bounds().1.unwrap().index + 1, 10)]).await.unwrap();
        log.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_together_is_synced_together() {
    const WAITING: u64 = 200;
    let dir = tempfile::tempdir().unwrap();
    let room = Arc::new(AtomicU64::new(0));
    let log = create_with_room(dir.path(), &room);
    let mut told = Vec::new();
    for index in 0..=WAITING {
        let (callback, flushed) = callback();
        log.append(vec![entry(1, index, 10)], callback).await.unwrap();
        if index == 0 {
            // The writer holds the first one; the others wait behind it.
            until(&log, |health| matches!(health, Health::Held(_))).await;
        }
        told.push(flushed);
    }
    room.store(u64::MAX, Ordering::SeqCst);
    futures::future::try_join_all(told).await.unwrap();
    assert_eq!(log.latencies().journal.get_sample_count(), 2, "the first one, and the rest");
    assert_eq!(log.read(.., usize::MAX).await.unwrap().len() as u64, WAITING + 1);
    log.close().await;
}
