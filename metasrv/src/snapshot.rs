//! Snapshots: the whole state in one file, so that the log before it can go and a restart is quick.
//!
//! Format: `magic, format version`, then records framed `length, CRC-32, v1::SnapshotRecord`: a head (what the snapshot
//! covers, cluster id, the state's numbers and its hash, how many records follow), every part of the state, and an end
//! with the number of records. A file without its end, with any damaged frame, or whose state has another hash than the
//! head says, is not a snapshot.
//!
//! A file is written under a temporary name, synced, renamed and its directory synced; only then does it exist. The two
//! newest are kept. Names begin with the index, so that their order is the order of age.
//!
//! Failure cases: a damaged newest file is refused ([`SnapshotError::Damaged`]) unless the one before still joins the
//! log, which the caller decides.

mod entries;

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use lake_client::clock;
use lake_proto::kv::Invalid;
use lake_proto::v1;
use prost::{EncodeError, Message};

use crate::files;
use crate::raft::types::{LogId, SnapshotMeta, log_id};
use crate::raft::wire::{snapshot_meta_from_wire, snapshot_meta_to_wire};
use crate::state::State;
use crate::state::restore::{Numbers, Part, Piece, StateBuilder};

/// How many snapshots are kept.
pub const KEEP: usize = 2;
const MAGIC: &[u8; 8] = b"lakesnap";
const FORMAT: u32 = 3;
/// Larger than any record can be: a key and a value at their limits.
const MAX_RECORD_BYTES: usize = 2 << 20;
/// Written to a file at once, and synced: one large sync at the end would hold up those of the log, and so does a piece that is
/// large.
const WRITE_BYTES: usize = 1 << 20;
/// The longest rest between two pieces: a disk that is slow for a moment does not stop a snapshot.
const LONGEST_REST: Duration = Duration::from_millis(100);
/// Read from a file at once.
const READ_BYTES: usize = 1 << 20;
const EXTENSION: &str = "snap";
const TEMPORARY: &str = "tmp";

/// A snapshot on disk: what openraft hands around.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotData {
    pub path: PathBuf,
}

/// What a snapshot file holds.
#[derive(Debug)]
pub struct Loaded {
    pub meta: SnapshotMeta,
    pub cluster_id: String,
    pub state: State,
}

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("the snapshot {}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("the snapshot {} is damaged: {what}; {}", .path.display(), files::REJOIN)]
    Damaged { path: PathBuf, what: String },
    #[error("the snapshot {}: {what}", .path.display())]
    Newer { path: PathBuf, what: String },
}

impl From<SnapshotError> for io::Error {
    fn from(e: SnapshotError) -> Self {
        let kind = match &e {
            SnapshotError::Io { source, .. } => source.kind(),
            SnapshotError::Damaged { .. } | SnapshotError::Newer { .. } => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, e.to_string())
    }
}

/// The snapshots of one peer.
#[derive(Debug, Clone)]
pub struct SnapshotStore {
    dir: PathBuf,
}

impl SnapshotStore {
    /// Opens the directory, making it if need be, and removes what was left half-written.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&dir)?;
        for entry in std::fs::read_dir(&dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == TEMPORARY) {
                std::fs::remove_file(&path)?;
            }
        }
        Ok(Self { dir })
    }

    /// A directory that is only read.
    pub fn existing(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The snapshots there are, newest first.
    pub fn list(&self) -> io::Result<Vec<(LogId, PathBuf)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if let Some(id) = parse_name(&path) {
                found.push((id, path));
            }
        }
        found.sort_by(|a, b| b.0.index.cmp(&a.0.index).then(b.0.cmp(&a.0)));
        Ok(found)
    }

    /// Writes a snapshot, durably. Blocks for as long as that takes.
    pub fn write(&self, meta: &SnapshotMeta, cluster_id: &str, state: &State) -> io::Result<SnapshotData> {
        self.write_with(meta, cluster_id, state, |_| Ok(()))
    }

    /// The same beside a log that is being written: after each piece the disk is the log's for as long as the piece took. It is
    /// given up once that log is not to go on: whoever takes the directory next is to find nobody in it.
    pub fn write_beside(
        &self,
        meta: &SnapshotMeta,
        cluster_id: &str,
        state: &State,
        goes_on: impl Fn() -> bool,
    ) -> io::Result<SnapshotData> {
        self.write_with(meta, cluster_id, state, |took| {
            if !goes_on() {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "the peer is stopping"));
            }
            // In a simulation nothing takes any time.
            if !took.is_zero() {
                thread::sleep(took.min(LONGEST_REST));
            }
            Ok(())
        })
    }

    /// `rest` is told after each piece but the last how long it took to write and sync; its error is the end.
    fn write_with(
        &self,
        meta: &SnapshotMeta,
        cluster_id: &str,
        state: &State,
        rest: impl FnMut(Duration) -> io::Result<()>,
    ) -> io::Result<SnapshotData> {
        let path = self.path_for(meta);
        let temporary = self.temporary("building");
        let written =
            write_file(&temporary, meta, cluster_id, state, rest).and_then(|()| self.publish(&temporary, &path));
        if written.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        written.map_err(|e| io::Error::new(e.kind(), format!("writing the snapshot {}: {e}", path.display())))?;
        Ok(SnapshotData { path })
    }

    /// Makes a snapshot that was received one of this peer's own, durably. A file from elsewhere is copied.
    pub fn adopt(&self, meta: &SnapshotMeta, data: &SnapshotData) -> io::Result<SnapshotData> {
        let path = self.path_for(meta);
        if data.path != path {
            if data.path.parent() == Some(&self.dir) {
                self.publish(&data.path, &path)?;
            } else {
                let temporary = self.temporary("copying");
                std::fs::copy(&data.path, &temporary)?;
                File::open(&temporary)?.sync_all()?;
                self.publish(&temporary, &path)?;
            }
        }
        Ok(SnapshotData { path })
    }

    /// A name for a file to receive into; it is removed at the next start if it is never adopted.
    pub fn temporary(&self, purpose: &str) -> PathBuf {
        self.dir.join(format!("{purpose}-{}.{TEMPORARY}", uuid::Uuid::new_v4().simple()))
    }

    /// Removes all but the newest [`KEEP`].
    pub fn prune(&self) -> io::Result<()> {
        for (_, path) in self.list()?.into_iter().skip(KEEP) {
            std::fs::remove_file(path)?;
        }
        files::sync_dir(&self.dir)
    }

    fn publish(&self, temporary: &Path, path: &Path) -> io::Result<()> {
        std::fs::rename(temporary, path)?;
        files::sync_dir(&self.dir)
    }

    fn path_for(&self, meta: &SnapshotMeta) -> PathBuf {
        let (term, index) = meta.last_log_id.map_or((0, 0), |id| (id.leader_id.term, id.index));
        self.dir.join(format!("{index:020}-{term}.{EXTENSION}"))
    }
}

fn parse_name(path: &Path) -> Option<LogId> {
    if path.extension()? != EXTENSION {
        return None;
    }
    let (index, term) = path.file_stem()?.to_str()?.split_once('-')?;
    Some(log_id(term.parse().ok()?, index.parse().ok()?))
}

fn write_file(
    path: &Path,
    meta: &SnapshotMeta,
    cluster_id: &str,
    state: &State,
    mut rest: impl FnMut(Duration) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let mut encoder = Encoder::new(meta, cluster_id, state);
    let mut buffer = Vec::with_capacity(WRITE_BYTES);
    while encoder.next_into(&mut buffer)? {
        if buffer.len() >= WRITE_BYTES {
            let began = clock::now();
            file.write_all(&buffer)?;
            file.sync_data()?;
            buffer.clear();
            rest(clock::since(began))?;
        }
    }
    file.write_all(&buffer)?;
    file.sync_all()
}

/// The bytes of a snapshot's file, a record at a time.
pub struct Encoder<'a> {
    /// Until it is written.
    head: Option<v1::snapshot_record::Head>,
    pieces: Box<dyn Iterator<Item = Piece<'a>> + Send + 'a>,
    records: u64,
    ended: bool,
}

impl<'a> Encoder<'a> {
    /// Of a state that covers what `meta` says.
    pub fn new(meta: &SnapshotMeta, cluster_id: &str, state: &'a State) -> Self {
        let numbers = state.numbers();
        let head = v1::snapshot_record::Head {
            meta: Some(snapshot_meta_to_wire(meta)),
            cluster_id: cluster_id.to_owned(),
            revision: numbers.revision,
            feature_level: numbers.feature_level,
            compacted_revision: numbers.compacted,
            state_hash: state.digest().to_be_bytes().to_vec().into(),
        };
        Self { head: Some(head), pieces: Box::new(state.pieces()), records: 0, ended: false }
    }

    /// Adds what comes next to `out`: at most one record. `false`: that was all before.
    ///
    /// # Errors
    /// A record that cannot be encoded.
    pub fn next_into(&mut self, out: &mut Vec<u8>) -> io::Result<bool> {
        use v1::snapshot_record::{End, Record};
        let message = |record| v1::SnapshotRecord { record: Some(record) };
        if let Some(head) = self.head.take() {
            out.extend_from_slice(MAGIC);
            out.extend_from_slice(&FORMAT.to_be_bytes());
            return framed(out, |out| message(Record::Head(head)).encode(out));
        }
        if let Some(piece) = self.pieces.next() {
            self.records += 1;
            return framed(out, |out| match piece {
                Piece::Entry(entry) => {
                    entries::encode(&entry, out);
                    Ok(())
                }
                Piece::Part(part) => message(part_to_wire(part)).encode(out),
            });
        }
        if self.ended {
            return Ok(false);
        }
        self.ended = true;
        let end = End { records: self.records };
        framed(out, |out| message(Record::End(end)).encode(out))
    }
}

/// Adds one record, with its length and its checksum before it.
fn framed(out: &mut Vec<u8>, encode: impl FnOnce(&mut Vec<u8>) -> Result<(), EncodeError>) -> io::Result<bool> {
    let begin = out.len();
    out.extend_from_slice(&[0; 8]);
    encode(out).map_err(io::Error::other)?;
    let len = out.len() - begin - 8;
    let crc = crc32fast::hash(&out[begin + 8..]);
    out[begin..begin + 4].copy_from_slice(&(len as u32).to_be_bytes());
    out[begin + 4..begin + 8].copy_from_slice(&crc.to_be_bytes());
    Ok(true)
}

fn part_to_wire(part: Part) -> v1::snapshot_record::Record {
    use v1::snapshot_record::{Event, Lease, Peer, Quota, Record, Session, session::Kept};
    match part {
        Part::Lease { id, ttl_ms, holder } => Record::Lease(Lease { id, ttl_ms, holder }),
        Part::Entry(entry) => Record::Entry(entry.into()),
        Part::Scope(scope) => Record::Scope(scope.into()),
        Part::Session { id, ttl_ms, holder, lowest, kept } => Record::Session(Session {
            id,
            ttl_ms,
            holder,
            lowest_unanswered: lowest,
            kept: kept.into_iter().map(|(sequence, outcome)| Kept { sequence, outcome }).collect(),
        }),
        Part::Quota { prefix, bytes } => Record::Quota(Quota { prefix, bytes }),
        Part::Event { revision, key, entry } => Record::Event(Event { revision, key, entry: entry.map(Into::into) }),
        Part::Peer { id, incarnation, removed } => Record::Peer(Peer { id, incarnation, removed }),
    }
}

/// The part that a record holds; none for the head and the end.
fn part_from_wire(record: v1::snapshot_record::Record) -> Result<Option<Part>, Invalid> {
    use v1::snapshot_record::Record;
    Ok(Some(match record {
        Record::Head(_) | Record::End(_) => return Ok(None),
        Record::Lease(l) => Part::Lease { id: l.id, ttl_ms: l.ttl_ms, holder: l.holder },
        Record::Entry(entry) => Part::Entry(entry.into()),
        Record::Scope(scope) => Part::Scope(scope.try_into()?),
        Record::Session(s) => Part::Session {
            id: s.id,
            ttl_ms: s.ttl_ms,
            holder: s.holder,
            lowest: s.lowest_unanswered,
            kept: s.kept.into_iter().map(|kept| (kept.sequence, kept.outcome)).collect(),
        },
        Record::Quota(q) => Part::Quota { prefix: q.prefix, bytes: q.bytes },
        Record::Event(e) => Part::Event { revision: e.revision, key: e.key, entry: e.entry.map(Into::into) },
        Record::Peer(p) => Part::Peer { id: p.id, incarnation: p.incarnation, removed: p.removed },
    }))
}

/// Reads and checks a whole snapshot, which is of this feature level at most. Blocks for as long as that takes.
pub fn read(path: &Path, feature_level: u32) -> Result<Loaded, SnapshotError> {
    let io_error = |source| SnapshotError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io_error)?;
    read_from(BufReader::with_capacity(READ_BYTES, file), path, feature_level)
}

/// Reads and checks a whole snapshot; the path is for messages.
pub(crate) fn read_from(reader: impl Read, path: &Path, feature_level: u32) -> Result<Loaded, SnapshotError> {
    read_hashed(reader, path, feature_level, |state, hash| state.digest().to_be_bytes() == *hash)
}

fn read_hashed(
    mut reader: impl Read,
    path: &Path,
    feature_level: u32,
    is_hash: impl FnOnce(&State, &[u8]) -> bool,
) -> Result<Loaded, SnapshotError> {
    let io_error = |source| SnapshotError::Io { path: path.to_owned(), source };
    let damaged = |what: &str| SnapshotError::Damaged { path: path.to_owned(), what: what.to_owned() };
    let mut read_exact = |bytes: &mut [u8]| match reader.read_exact(bytes) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(damaged("it ends too early")),
        other => other.map_err(io_error),
    };
    let mut start = [0; 12];
    read_exact(&mut start)?;
    if start[..8] != MAGIC[..] {
        return Err(damaged("it does not begin like one"));
    }
    if start[8..] != FORMAT.to_be_bytes() {
        return Err(damaged("its format is of another version of lake"));
    }
    // One piece of memory for all records: fresh memory costs more than anything else here.
    let mut bytes = Vec::new();
    let mut next = |bytes: &mut Vec<u8>| -> Result<(), SnapshotError> {
        let mut header = [0; 8];
        read_exact(&mut header)?;
        let len = u32::from_be_bytes([header[0], header[1], header[2], header[3]]) as usize;
        if len > MAX_RECORD_BYTES {
            return Err(damaged("a record is longer than can be"));
        }
        bytes.resize(len, 0);
        read_exact(bytes)?;
        if crc32fast::hash(bytes).to_be_bytes() != header[4..] {
            return Err(damaged("a record's checksum does not match"));
        }
        Ok(())
    };
    use v1::snapshot_record::Record;
    let message = |bytes: &[u8]| -> Result<Record, SnapshotError> {
        let message = v1::SnapshotRecord::decode(bytes).map_err(|e| damaged(&e.to_string()))?;
        message.record.ok_or_else(|| damaged("a record is of an unknown kind"))
    };
    next(&mut bytes)?;
    let Record::Head(head) = message(&bytes)? else { return Err(damaged("its head is missing")) };
    if head.feature_level > feature_level {
        let what = format!(
            "it is of feature level {}, and this build ({}) knows {feature_level}: start this peer with the build that the \
             leader runs; its data stays as it is",
            head.feature_level,
            env!("CARGO_PKG_VERSION")
        );
        return Err(SnapshotError::Newer { path: path.to_owned(), what });
    }
    let meta = head.meta.ok_or_else(|| damaged("its head is incomplete"))?;
    let meta = snapshot_meta_from_wire(meta).map_err(|e| damaged(&e.to_string()))?;
    let mut state = StateBuilder::new(Numbers {
        revision: head.revision,
        feature_level: head.feature_level,
        compacted: head.compacted_revision,
    });
    for n in 0u64.. {
        next(&mut bytes)?;
        if let Some(entry) = entries::decode(&bytes) {
            state.add_entry(entry).map_err(damaged)?;
            continue;
        }
        let record = message(&bytes)?;
        if let Record::End(end) = &record {
            if end.records != n {
                return Err(damaged("records are missing"));
            }
            break;
        }
        let part = part_from_wire(record).map_err(|e| damaged(&e.to_string()))?;
        let part = part.ok_or_else(|| damaged("it has a second head"))?;
        state.add(part).map_err(damaged)?;
    }
    match reader.read(&mut [0]).map_err(io_error)? {
        0 => {}
        _ => return Err(damaged("it goes on behind its end")),
    }
    let state = state.build();
    if !is_hash(&state, &head.state_hash) {
        return Err(damaged("its state has another hash than it says"));
    }
    Ok(Loaded { meta, cluster_id: head.cluster_id, state })
}

/// For fuzzing: reads records as if they had come in a file that frames them rightly, whatever the state's hash is.
pub(crate) fn read_records(records: &[&[u8]]) -> Result<Loaded, SnapshotError> {
    use crate::state::FEATURE_LEVEL;
    let mut file = [&MAGIC[..], &FORMAT.to_be_bytes()].concat();
    for record in records {
        file.extend_from_slice(&(record.len() as u32).to_be_bytes());
        file.extend_from_slice(&crc32fast::hash(record).to_be_bytes());
        file.extend_from_slice(record);
    }
    read_hashed(&file[..], Path::new("fuzzed"), FEATURE_LEVEL, |_, _| true)
}

/// Checks a whole snapshot without keeping it. Blocks for as long as that takes.
pub fn check(path: &Path, feature_level: u32) -> Result<(), SnapshotError> {
    read(path, feature_level).map(drop)
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Op, Txn};

    use super::*;
    use crate::raft::types::StoredMembership;
    use crate::state::FEATURE_LEVEL;

    fn sample() -> (SnapshotMeta, State) {
        let mut state = State::default();
        for i in 0..500 {
            state.run(1, &Txn { then: vec![Op::put(format!("/kv/{i:04}"), vec![i as u8; i])], ..Txn::default() });
        }
        state.set_members([(1, "a"), (2, "b")]);
        state.set_members([(1, "a")]);
        let meta = SnapshotMeta { last_log_id: Some(log_id(2, 700)), last_membership: StoredMembership::default() };
        (meta, state)
    }

    #[test]
    fn a_snapshot_is_read_as_it_was_written_and_two_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path().join("snapshots")).unwrap();
        let (mut meta, state) = sample();
        for index in [700, 800, 900] {
            meta.last_log_id = Some(log_id(2, index));
            let data = store.write(&meta, "c", &state).unwrap();
            let loaded = read(&data.path, FEATURE_LEVEL).unwrap();
            assert_eq!((loaded.meta, loaded.cluster_id.as_str(), loaded.state), (meta.clone(), "c", state.clone()));
            store.prune().unwrap();
        }
        let kept: Vec<u64> = store.list().unwrap().into_iter().map(|(id, _)| id.index).collect();
        assert_eq!(kept, [900, 800]);
    }

    #[test]
    fn a_snapshot_is_written_in_pieces_with_rests_between_them() {
        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path().to_owned()).unwrap();
        let (meta, mut state) = sample();
        for i in 0..40 {
            let value = vec![i as u8; 256 << 10];
            state.run(1, &Txn { then: vec![Op::put(format!("/kv/large/{i}"), value)], ..Txn::default() });
        }
        let path = store.path_for(&meta);
        let mut seen = vec![];
        let so_far = || {
            let building = std::fs::read_dir(store.dir()).unwrap().map(|entry| entry.unwrap());
            building.map(|entry| entry.metadata().unwrap().len()).sum::<u64>()
        };
        let data = store
            .write_with(&meta, "c", &state, |_| {
                seen.push(so_far());
                Ok(())
            })
            .unwrap();
        assert_eq!(data.path, path);
        let whole = std::fs::metadata(&path).unwrap().len();
        assert!(seen.len() >= 9, "it has {whole} bytes, and rested at {seen:?}");
        // A piece is over with the record in which it becomes large enough.
        let most = (WRITE_BYTES + (512 << 10)) as u64;
        let mut before = 0;
        for after in seen.into_iter().chain([whole]) {
            assert!(after - before <= most, "{before} to {after} at once");
            before = after;
        }
        assert_eq!(read(&path, FEATURE_LEVEL).unwrap().state, state);

        // A peer that stops leaves nobody behind in its directory.
        std::fs::remove_file(&path).unwrap();
        let given_up = store.write_beside(&meta, "c", &state, || false).unwrap_err();
        assert!(given_up.to_string().contains("the peer is stopping"), "{given_up}");
        assert_eq!(std::fs::read_dir(store.dir()).unwrap().count(), 0);
        assert_eq!(store.write_beside(&meta, "c", &state, || true).unwrap().path, path);
        assert_eq!(read(&path, FEATURE_LEVEL).unwrap().state, state);
    }

    #[test]
    fn every_damaged_byte_and_every_truncation_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path().to_owned()).unwrap();
        let (meta, state) = sample();
        let path = store.write(&meta, "c", &state).unwrap().path;
        let good = std::fs::read(&path).unwrap();
        let step = good.len() / 97;
        std::fs::write(&path, [&good[..], b"x"].concat()).unwrap();
        assert!(read(&path, FEATURE_LEVEL).unwrap_err().to_string().contains("goes on behind its end"));
        for at in (0..good.len()).step_by(step) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            let error = read(&path, FEATURE_LEVEL).unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
            std::fs::write(&path, &good[..at]).unwrap();
            assert!(matches!(read(&path, FEATURE_LEVEL), Err(SnapshotError::Damaged { .. })), "cut at {at}");
        }
    }

    #[test]
    fn half_written_files_are_removed_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path().to_owned()).unwrap();
        let left = store.temporary("receiving");
        std::fs::write(&left, b"half").unwrap();
        SnapshotStore::open(dir.path().to_owned()).unwrap();
        assert!(!left.exists());
    }
}
