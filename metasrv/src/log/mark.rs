//! The durable mark: one small file that says who this peer is, whom it voted for, and how far its log was when it
//! last acknowledged anything (semantics, sections 9 and 10).
//!
//! sled loses the end of its log silently when a file is damaged, so the log alone cannot say that it is complete. The
//! mark can: it is written and synced each time sled has been, and says where the journal goes on from there. A log that
//! ends before its mark has lost acknowledged writes, and its peer must not vote as itself again.
//!
//! Format: two slots of [`SLOT_BYTES`] in a file that is preallocated at creation, so that writing needs no room on the
//! disk. A slot is `magic, format, payload length, sequence, payload`, zeros, and a CRC-32 over all of that. Writes
//! alternate between the slots and the valid slot with the higher sequence counts, so that a torn write leaves the one
//! before. What must survive even the later loss of either slot is written to both: identity and vote, and what a log
//! would be refused for if the slot before counted again (a truncation, a purge, the journal's position). Where nothing
//! but the end of the log changes it is written to one: the slot before holds a lower bound, which is as true.
//!
//! Failure cases: both slots unreadable: [`MarkError::Damaged`]. A failed write or sync is final for the process.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use lake_proto::v1;
use prost::Message;

use super::journal::Position;
use crate::files;
use crate::raft::types::{LogId, Vote};
use crate::raft::wire::{log_id_from_wire, log_id_to_wire, vote_from_wire, vote_to_wire};

/// Size of one slot: what disks write at once.
pub const SLOT_BYTES: usize = 4096;
const MAGIC: &[u8; 8] = b"lakemark";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 8 + 4 + 4 + 8;

/// What the mark says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mark {
    /// Empty until the peer is founded or joined.
    pub cluster_id: String,
    pub peer_id: u64,
    /// Random, made with the directory.
    pub incarnation: String,
    /// The vote lives here and nowhere else.
    pub vote: Option<Vote>,
    /// The last log entry that sled had durably when the mark was written. The journal may have more behind it.
    pub last: Option<LogId>,
    /// Entries up to this one are no longer needed.
    pub purged: Option<LogId>,
    /// The last entry that a durable snapshot covers.
    pub snapshot: Option<LogId>,
    /// Where the journal begins to hold what sled may not have; absent until there is one.
    pub journal: Option<Position>,
}

/// The mark as bytes: a protobuf message, so that later versions may add to it.
#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(string, tag = "1")]
    cluster_id: String,
    #[prost(uint64, tag = "2")]
    peer_id: u64,
    #[prost(string, tag = "3")]
    incarnation: String,
    #[prost(message, optional, tag = "4")]
    vote: Option<v1::Vote>,
    #[prost(message, optional, tag = "5")]
    last: Option<v1::LogId>,
    #[prost(message, optional, tag = "6")]
    purged: Option<v1::LogId>,
    #[prost(message, optional, tag = "7")]
    snapshot: Option<v1::LogId>,
    #[prost(message, optional, tag = "8")]
    journal: Option<JournalRecord>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct JournalRecord {
    #[prost(uint64, tag = "1")]
    half_bytes: u64,
    #[prost(uint64, tag = "2")]
    sequence: u64,
    #[prost(uint64, tag = "3")]
    offset: u64,
}

impl From<&Mark> for Record {
    fn from(m: &Mark) -> Self {
        Record {
            cluster_id: m.cluster_id.clone(),
            peer_id: m.peer_id,
            incarnation: m.incarnation.clone(),
            vote: m.vote.as_ref().map(vote_to_wire),
            last: m.last.map(log_id_to_wire),
            purged: m.purged.map(log_id_to_wire),
            snapshot: m.snapshot.map(log_id_to_wire),
            journal: m.journal.map(|p| JournalRecord {
                half_bytes: p.half_bytes,
                sequence: p.sequence,
                offset: p.offset,
            }),
        }
    }
}

impl From<Record> for Mark {
    fn from(r: Record) -> Self {
        Mark {
            cluster_id: r.cluster_id,
            peer_id: r.peer_id,
            incarnation: r.incarnation,
            vote: r.vote.map(vote_from_wire),
            last: r.last.map(log_id_from_wire),
            purged: r.purged.map(log_id_from_wire),
            snapshot: r.snapshot.map(log_id_from_wire),
            journal: r.journal.map(|p| Position { half_bytes: p.half_bytes, sequence: p.sequence, offset: p.offset }),
        }
    }
}

/// Why a mark could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum MarkError {
    #[error("{}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "{}: neither slot of the durable mark is readable: the file is damaged. What this peer voted for is lost, so it \
         cannot start as itself; {}",
        .path.display(), files::REJOIN
    )]
    Damaged { path: PathBuf },
}

/// The open mark file and what it says.
#[derive(Debug)]
pub struct MarkFile {
    file: File,
    path: PathBuf,
    sequence: u64,
    mark: Mark,
    /// For the test of power cuts: see [`super::SkipSync`].
    pub(super) skip_sync: bool,
}

impl MarkFile {
    /// Makes the file, durably. The directory entry is synced too.
    pub fn create(path: &Path, mark: Mark) -> io::Result<Self> {
        let temporary = path.with_extension("new");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&temporary)?;
        let mut this = Self { file, path: path.to_owned(), sequence: 0, mark, skip_sync: false };
        for sequence in [1, 2] {
            this.sequence = sequence;
            this.write_slot()?;
        }
        this.file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        files::sync_dir(path.parent().unwrap_or(Path::new(".")))?;
        Ok(this)
    }

    /// Opens an existing file.
    ///
    /// # Errors
    /// When it cannot be read, or neither slot is valid.
    pub fn open(path: &Path) -> Result<Self, MarkError> {
        let io_error = |source| MarkError::Io { path: path.to_owned(), source };
        let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(io_error)?;
        let mut bytes = Vec::with_capacity(2 * SLOT_BYTES);
        file.by_ref().take(2 * SLOT_BYTES as u64).read_to_end(&mut bytes).map_err(io_error)?;
        let readable = bytes.chunks_exact(SLOT_BYTES).filter(|slot| decode_slot(slot).is_some()).count();
        if readable == 1 {
            tracing::warn!(
                path = %path.display(),
                "one slot of the durable mark is torn or damaged; the other one counts"
            );
        }
        let (sequence, mark) = decode_file(&bytes).ok_or_else(|| MarkError::Damaged { path: path.to_owned() })?;
        // A process that was killed may have written this and not synced it. From now on it counts.
        file.sync_data().map_err(io_error)?;
        Ok(Self { file, path: path.to_owned(), sequence, mark, skip_sync: false })
    }

    /// What the file says.
    pub fn get(&self) -> &Mark {
        &self.mark
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a change durable in one slot. For what is only ever a bound: losing it later to damage falls back to the
    /// bound before.
    pub fn update(&mut self, change: impl FnOnce(&mut Mark)) -> io::Result<()> {
        change(&mut self.mark);
        self.write_next()
    }

    /// Makes a change durable in both slots, one after the other. For whatever is more than a bound.
    pub fn update_both(&mut self, change: impl FnOnce(&mut Mark)) -> io::Result<()> {
        self.update(change)?;
        self.write_next()
    }

    fn write_next(&mut self) -> io::Result<()> {
        self.sequence += 1;
        self.write_slot()?;
        if self.skip_sync { Ok(()) } else { self.file.sync_data() }
    }

    fn write_slot(&self) -> io::Result<()> {
        let bytes = encode_slot(self.sequence, &self.mark)?;
        self.file.write_all_at(&bytes, (self.sequence % 2) * SLOT_BYTES as u64)
    }
}

fn encode_slot(sequence: u64, mark: &Mark) -> io::Result<[u8; SLOT_BYTES]> {
    let payload = Record::from(mark).encode_to_vec();
    if HEADER_BYTES + payload.len() + 4 > SLOT_BYTES {
        return Err(io::Error::other(format!(
            "the durable mark would take {} bytes; a slot has {SLOT_BYTES}",
            payload.len()
        )));
    }
    let mut slot = [0; SLOT_BYTES];
    slot[..8].copy_from_slice(MAGIC);
    slot[8..12].copy_from_slice(&FORMAT.to_be_bytes());
    slot[12..16].copy_from_slice(&(payload.len() as u32).to_be_bytes());
    slot[16..24].copy_from_slice(&sequence.to_be_bytes());
    slot[HEADER_BYTES..HEADER_BYTES + payload.len()].copy_from_slice(&payload);
    let crc = crc32fast::hash(&slot[..SLOT_BYTES - 4]);
    slot[SLOT_BYTES - 4..].copy_from_slice(&crc.to_be_bytes());
    Ok(slot)
}

/// What the newest readable slot says, and its number.
pub(crate) fn decode_file(bytes: &[u8]) -> Option<(u64, Mark)> {
    bytes.chunks_exact(SLOT_BYTES).take(2).filter_map(decode_slot).max_by_key(|(sequence, _)| *sequence)
}

/// For fuzzing: makes a slot's checksum right.
pub(crate) fn fix_checksum(slot: &mut [u8]) {
    let crc = crc32fast::hash(&slot[..SLOT_BYTES - 4]);
    slot[SLOT_BYTES - 4..].copy_from_slice(&crc.to_be_bytes());
}

fn decode_slot(slot: &[u8]) -> Option<(u64, Mark)> {
    let word = |at: usize| u32::from_be_bytes([slot[at], slot[at + 1], slot[at + 2], slot[at + 3]]);
    if &slot[..8] != MAGIC || word(8) != FORMAT || crc32fast::hash(&slot[..SLOT_BYTES - 4]) != word(SLOT_BYTES - 4) {
        return None;
    }
    let payload = slot[..SLOT_BYTES - 4].get(HEADER_BYTES..HEADER_BYTES.checked_add(word(12) as usize)?)?;
    let record = Record::decode(payload).ok()?;
    let sequence = (u64::from(word(16)) << 32) | u64::from(word(20));
    Some((sequence, record.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::types::log_id;

    fn mark() -> Mark {
        Mark { peer_id: 3, incarnation: "ab".repeat(16), ..Mark::default() }
    }

    fn damage(path: &Path, slot: u64) {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let at = slot * SLOT_BYTES as u64 + 100;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        let mut file = MarkFile::create(&path, mark()).unwrap();
        file.update_both(|m| m.vote = Some(Vote::new(4, 3))).unwrap();
        file.update(|m| m.last = Some(log_id(4, 17))).unwrap();
        let read = MarkFile::open(&path).unwrap();
        assert_eq!(read.get(), &Mark { vote: Some(Vote::new(4, 3)), last: Some(log_id(4, 17)), ..mark() });
    }

    #[test]
    fn a_torn_slot_leaves_the_one_before_and_never_an_older_vote() {
        for torn in 0..2 {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("mark");
            let mut file = MarkFile::create(&path, mark()).unwrap();
            file.update(|m| m.last = Some(log_id(1, 1))).unwrap();
            file.update_both(|m| m.vote = Some(Vote::new(9, 3))).unwrap();
            damage(&path, torn);
            let read = MarkFile::open(&path).unwrap();
            assert_eq!(read.get().vote, Some(Vote::new(9, 3)));
            assert_eq!(read.get().last, Some(log_id(1, 1)));
        }
    }

    #[test]
    fn damage_to_both_slots_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        MarkFile::create(&path, mark()).unwrap();
        damage(&path, 0);
        damage(&path, 1);
        let error = MarkFile::open(&path).unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()) && error.contains("damaged"), "{error}");

        std::fs::write(&path, b"").unwrap();
        assert!(matches!(MarkFile::open(&path), Err(MarkError::Damaged { .. })));
    }
}
