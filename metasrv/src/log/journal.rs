//! The journal: what was appended to the log and is not yet synced in sled, in a file of fixed size.
//!
//! sled needs a write, a sync and a synced mark for each batch, because its own file cannot say where it ends. A record of
//! the journal can: it is numbered, checksummed and there twice. So a batch is durable, and is acknowledged, after one
//! write and one fdatasync here, and sled gets it a little later without a sync of its own. When the journal is full, and
//! before anything but appending happens to the log, what sled has is synced, the mark notes the journal's position, and
//! the room is free again (the writer does that; see [`super::writer`]).
//!
//! Layout: a half, a divider of one [`BLOCK`], and another half, with the same records at the same offsets. A half is a
//! ring. A record is
//! `magic, owner, sequence, body length, entries, CRC, body`, padded to [`BLOCK`], so that no sector of it is ever written
//! again while the record counts. The body is the entries' frames: `length, index, term, payload`. Sequences rise by one
//! from record to record and are never used twice. A record that does not fit before the end of the ring stands at its
//! beginning. The file is written in full when it is made, so that writing needs no room and no change of the file
//! system's own records.
//!
//! Reading begins at the [`Position`] in the mark and ends at the first sequence that is whole in neither half:
//! - nothing with a higher sequence lies anywhere: that record was never written whole, so never acknowledged;
//! - something does: the writer goes on only behind a record that is durable, so this one was acknowledged and is damaged.
//!
//! Damage to one place of the file, however large, leaves the other half, and nothing is lost; or it goes over the divider,
//! and is noticed. What is not noticed is damage to the newest records at two places that meets both copies of them.
//!
//! Failure cases: a file that is missing, has another size or belongs to another directory: refused, since the mark says
//! that it must be there. A failed write or sync is final for the process.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::sled_log::Frame;
use crate::files;

/// What a record is padded to: what disks write at once.
pub const BLOCK: u64 = 4096;
/// Largest share of a half that one record may take: larger batches go to sled directly.
const SHARE: u64 = 4;
const MAGIC: &[u8; 8] = b"lakejrnl";
const HEADER_BYTES: usize = 8 + 8 + 8 + 4 + 4 + 4;
const FRAME_HEADER_BYTES: usize = 4 + 8 + 8;

/// Where the records begin that sled may not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Size of one half.
    pub half_bytes: u64,
    /// Number of the first record that counts.
    pub sequence: u64,
    /// Where that record is, unless it had to be put at the beginning.
    pub offset: u64,
}

/// Why a journal could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("{}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} is damaged: {what}; {}", .path.display(), files::REJOIN)]
    Damaged { path: PathBuf, what: String },
}

/// The open journal. One thread writes it.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
    owner: u64,
    half_bytes: u64,
    /// The number of the next record, and where it goes if there is room before the end.
    sequence: u64,
    offset: u64,
    /// Bytes behind the position of the mark, skipped ends included.
    used: u64,
    buffer: Vec<u8>,
    /// For the test of power cuts: see [`super::SkipSync`].
    pub(super) skip_sync: bool,
    pub(super) failing: super::Failing,
}

impl Journal {
    /// Makes an empty file, durably, of two halves of at least `half_bytes`, for the directory with this incarnation, and
    /// says where it begins.
    pub fn create(path: &Path, incarnation: &str, half_bytes: u64) -> io::Result<Position> {
        let half_bytes = half_bytes.next_multiple_of(BLOCK).max(SHARE * BLOCK);
        let temporary = path.with_extension("new");
        let mut file = File::create(&temporary)?;
        write_zeros(&mut file, half_bytes)?;
        file.write_all(&divider(owner(incarnation), half_bytes))?;
        write_zeros(&mut file, half_bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        files::sync_dir(path.parent().unwrap_or(Path::new(".")))?;
        Ok(Position { half_bytes, sequence: 1, offset: 0 })
    }

    /// Opens the file of the directory with this incarnation, and reads the entries behind a position.
    ///
    /// # Errors
    /// When it cannot be read, or a record that was acknowledged is damaged.
    pub fn open(path: &Path, incarnation: &str, from: Position) -> Result<(Self, Vec<Frame>), JournalError> {
        let io_error = |source| JournalError::Io { path: path.to_owned(), source };
        let damaged = |what: String| JournalError::Damaged { path: path.to_owned(), what };
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(damaged("it is missing".to_owned())),
            opened => opened.map_err(io_error)?,
        };
        let size = file.metadata().map_err(io_error)?.len();
        let made = from.half_bytes.checked_mul(2).and_then(|halves| halves.checked_add(BLOCK));
        if made != Some(size) {
            return Err(damaged(format!("it has {size} bytes, which is not what it was made with")));
        }
        let mut bytes = Vec::with_capacity(size as usize);
        (&file).take(size).read_to_end(&mut bytes).map_err(io_error)?;
        let owner = owner(incarnation);
        let contents = read(&bytes, owner, from).map_err(damaged)?;
        if contents.repaired > 0 {
            tracing::warn!(path = %path.display(), records = contents.repaired, "records of the journal are damaged; the other half has them");
        }
        let this = Self {
            file,
            path: path.to_owned(),
            owner,
            half_bytes: from.half_bytes,
            sequence: contents.sequence,
            offset: contents.offset,
            used: contents.used,
            buffer: Vec::new(),
            skip_sync: false,
            failing: super::Failing::default(),
        };
        Ok((this, contents.frames))
    }

    /// Whether entries of so many bytes may be put here at all.
    pub fn takes(&self, frames: &[Frame]) -> bool {
        record_bytes(frames) <= self.half_bytes / SHARE
    }

    /// Whether there is room for these entries now.
    pub fn has_room(&self, frames: &[Frame]) -> bool {
        let bytes = record_bytes(frames);
        let (_, skipped) = self.place(bytes);
        self.used + skipped + bytes <= self.half_bytes
    }

    /// Where the next record begins: the position for the mark, once sled has synced everything before.
    pub fn end(&self) -> Position {
        Position { half_bytes: self.half_bytes, sequence: self.sequence, offset: self.offset }
    }

    /// Gives back the room of everything written so far. Only after the mark says so.
    pub fn release(&mut self) {
        self.used = 0;
    }

    /// Writes entries as one record and makes them durable.
    ///
    /// # Errors
    /// When there is no room for them, and when a write or sync fails: that is final.
    pub fn append(&mut self, frames: &[Frame]) -> io::Result<()> {
        if !self.has_room(frames) {
            return Err(io::Error::other("the journal is full; this is a defect"));
        }
        encode(&mut self.buffer, self.owner, self.sequence, frames);
        let bytes = self.buffer.len() as u64;
        let (at, skipped) = self.place(bytes);
        let context = |e: io::Error| io::Error::new(e.kind(), format!("writing {}: {e}", self.path.display()));
        for half in [0, self.half_bytes + BLOCK] {
            self.file.write_all_at(&self.buffer, half + at).map_err(context)?;
        }
        if !self.skip_sync {
            self.failing.hold_sync();
            self.file.sync_data().map_err(context)?;
        }
        self.used += skipped + bytes;
        self.offset = at + bytes;
        self.sequence += 1;
        Ok(())
    }

    /// Where a record of so many bytes goes that comes next, and what stays unused at the end of the ring.
    fn place(&self, bytes: u64) -> (u64, u64) {
        if self.offset + bytes > self.half_bytes { (0, self.half_bytes - self.offset) } else { (self.offset, 0) }
    }
}

fn write_zeros(file: &mut File, bytes: u64) -> io::Result<()> {
    io::copy(&mut io::repeat(0).take(bytes), &mut io::BufWriter::with_capacity(1 << 20, file)).map(drop)
}

/// What stands between the halves: damage that goes from one into the other goes over it.
fn divider(owner: u64, half_bytes: u64) -> [u8; BLOCK as usize] {
    let mut block = [0xa5; BLOCK as usize];
    block[..8].copy_from_slice(MAGIC);
    block[8..16].copy_from_slice(&owner.to_be_bytes());
    block[16..24].copy_from_slice(&half_bytes.to_be_bytes());
    block
}

/// Tells the journals of directories apart.
fn owner(incarnation: &str) -> u64 {
    twox_hash::XxHash3_128::oneshot(incarnation.as_bytes()) as u64
}

fn record_bytes(frames: &[Frame]) -> u64 {
    let body: usize = frames.iter().map(|f| FRAME_HEADER_BYTES + f.payload.len()).sum();
    ((HEADER_BYTES + body) as u64).next_multiple_of(BLOCK)
}

fn encode(out: &mut Vec<u8>, owner: u64, sequence: u64, frames: &[Frame]) {
    out.clear();
    out.resize(HEADER_BYTES, 0);
    for frame in frames {
        out.extend_from_slice(&(frame.payload.len() as u32).to_be_bytes());
        out.extend_from_slice(&frame.index.to_be_bytes());
        out.extend_from_slice(&frame.term.to_be_bytes());
        out.extend_from_slice(&frame.payload);
    }
    let body = (out.len() - HEADER_BYTES) as u32;
    out[..8].copy_from_slice(MAGIC);
    out[8..16].copy_from_slice(&owner.to_be_bytes());
    out[16..24].copy_from_slice(&sequence.to_be_bytes());
    out[24..28].copy_from_slice(&body.to_be_bytes());
    out[28..32].copy_from_slice(&(frames.len() as u32).to_be_bytes());
    let crc = checksum(out);
    out[32..36].copy_from_slice(&crc.to_be_bytes());
    out.resize(out.len().next_multiple_of(BLOCK as usize), 0);
}

/// Over a record without its padding and its checksum.
fn checksum(record: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&record[..32]);
    hasher.update(&record[HEADER_BYTES..]);
    hasher.finalize()
}

/// What lies in a journal behind a position.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) frames: Vec<Frame>,
    sequence: u64,
    offset: u64,
    used: u64,
    /// Records that only one half has.
    repaired: usize,
    /// The last record is one of those.
    last_repaired: bool,
}

/// Reads all records behind a position.
///
/// # Errors
/// With what is wrong, where a record that was acknowledged is damaged.
pub(crate) fn read(bytes: &[u8], owner: u64, from: Position) -> Result<Contents, String> {
    let half = bytes.len().saturating_sub(BLOCK as usize) / 2;
    let (first, rest) = bytes.split_at(half);
    let (between, second) = rest.split_at((BLOCK as usize).min(rest.len()));
    if between != divider(owner, half as u64) {
        return Err("the divider between its halves is not what it was".to_owned());
    }
    let halves = [first, second];
    if from.offset > half as u64 || !from.offset.is_multiple_of(BLOCK) {
        return Err(format!("there is no place {} in it, where the mark says that it begins", from.offset));
    }
    let mut contents = Contents { sequence: from.sequence, offset: from.offset, ..Contents::default() };
    // What counts is never more than a ring.
    while let Some((at, record, both)) = find(halves, owner, contents.sequence, contents.offset as usize) {
        let skipped = if at as u64 == contents.offset { 0 } else { half as u64 - contents.offset };
        contents.used += skipped + record.bytes as u64;
        if contents.used > half as u64 {
            return Err(format!("record {} overlaps the first one", contents.sequence));
        }
        for frame in record.frames {
            if contents.frames.last().is_some_and(|last| last.index.checked_add(1) != Some(frame.index)) {
                return Err(format!("entry {} does not follow the one before it", frame.index));
            }
            contents.frames.push(frame);
        }
        contents.repaired += usize::from(!both);
        contents.last_repaired = !both;
        contents.offset = (at + record.bytes) as u64;
        contents.sequence += 1;
    }
    let later = halves
        .iter()
        .flat_map(|half| half.chunks_exact(BLOCK as usize).enumerate().map(|(n, _)| &half[n * BLOCK as usize..]))
        .filter_map(|place| header(place, owner).filter(|h| h.sequence > contents.sequence))
        .find(|h| h.whole);
    match later {
        Some(later) => Err(format!(
            "record {} is not readable in either half, and record {} is there: acknowledged entries are missing",
            contents.sequence, later.sequence
        )),
        None => Ok(contents),
    }
}

/// What is not as it should be in a journal that can be opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flaws {
    /// Records that are whole in one half only, and have others behind them: they were whole in both once.
    pub(crate) damaged: usize,
    /// The last record is whole in one half only, or a further one was begun and is whole in neither: what a crash in the
    /// middle of writing leaves. Such a record was not acknowledged.
    pub(crate) torn: bool,
}

/// What is wrong in the records behind a position. For whoever looks into the file without opening it.
///
/// # Errors
/// With what is wrong, where a record that was acknowledged is damaged.
pub(crate) fn check(bytes: &[u8], incarnation: &str, from: Position) -> Result<Flaws, String> {
    let owner = owner(incarnation);
    let contents = read(bytes, owner, from)?;
    let half = bytes.len().saturating_sub(BLOCK as usize) / 2;
    // Behind the end of the ring stands the divider, which looks like a record.
    let places = [0, contents.offset as usize].into_iter().filter(|at| *at < half);
    let begun = places.flat_map(|at| [at, half + BLOCK as usize + at]).any(|at| {
        let next = bytes.get(at..).and_then(|place| header(place, owner));
        next.is_some_and(|next| next.sequence == contents.sequence)
    });
    let damaged = contents.repaired - usize::from(contents.last_repaired);
    Ok(Flaws { damaged, torn: contents.last_repaired || begun })
}

struct Record {
    frames: Vec<Frame>,
    /// With padding.
    bytes: usize,
}

/// The record with this number, where it is, and whether both halves have it.
fn find(halves: [&[u8]; 2], owner: u64, sequence: u64, offset: usize) -> Option<(usize, Record, bool)> {
    let places = if offset == 0 { &[0][..] } else { &[offset, 0][..] };
    places.iter().find_map(|&at| {
        let [first, second] = halves.map(|half| half.get(at..).and_then(|place| decode(place, owner, sequence)));
        let both = first.is_some() && second.is_some();
        first.or(second).map(|record| (at, record, both))
    })
}

struct Header {
    sequence: u64,
    body: usize,
    entries: usize,
    /// Whether the checksum matches.
    whole: bool,
}

fn header(place: &[u8], owner: u64) -> Option<Header> {
    let word = |at: usize| Some(u32::from_be_bytes(place.get(at..at + 4)?.try_into().ok()?));
    let double = |at: usize| Some(u64::from_be_bytes(place.get(at..at + 8)?.try_into().ok()?));
    if place.get(..8)? != MAGIC || double(8)? != owner {
        return None;
    }
    let body = word(24)? as usize;
    let whole = match place.get(..HEADER_BYTES + body) {
        Some(record) => checksum(record) == word(32)?,
        None => false,
    };
    Some(Header { sequence: double(16)?, body, entries: word(28)? as usize, whole })
}

fn decode(place: &[u8], owner: u64, sequence: u64) -> Option<Record> {
    let header = header(place, owner).filter(|h| h.whole && h.sequence == sequence)?;
    let mut rest = &place[HEADER_BYTES..HEADER_BYTES + header.body];
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let len = u32::from_be_bytes(rest.get(..4)?.try_into().ok()?) as usize;
        let index = u64::from_be_bytes(rest.get(4..12)?.try_into().ok()?);
        let term = u64::from_be_bytes(rest.get(12..FRAME_HEADER_BYTES)?.try_into().ok()?);
        let payload = rest.get(FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + len)?;
        frames.push(Frame { index, term, payload: Bytes::copy_from_slice(payload) });
        rest = &rest[FRAME_HEADER_BYTES + len..];
    }
    (frames.len() == header.entries)
        .then(|| Record { frames, bytes: (HEADER_BYTES + header.body).next_multiple_of(BLOCK as usize) })
}

/// For fuzzing: the entries in a file whose halves are both this, with the checksums of all records made right.
pub(crate) fn read_half(half: &[u8]) -> Result<Vec<Frame>, String> {
    let (owner, size) = (1, half.len() / BLOCK as usize * BLOCK as usize);
    let mut half = half[..size].to_owned();
    for at in (0..size).step_by(BLOCK as usize) {
        if let Some(found) = header(&half[at..], owner)
            && let Some(record) = half.get_mut(at..at + HEADER_BYTES + found.body)
        {
            let crc = checksum(record);
            record[32..36].copy_from_slice(&crc.to_be_bytes());
        }
    }
    let file = [&half[..], &divider(owner, size as u64), &half].concat();
    read(&file, owner, Position { half_bytes: size as u64, sequence: 1, offset: 0 }).map(|contents| contents.frames)
}

/// For fuzzing: records of entries with these payloads, as [`read_half`] takes them.
pub(crate) fn write_half(records: &[&[&[u8]]]) -> Vec<u8> {
    let (mut half, mut record, mut index) = (Vec::new(), Vec::new(), 0);
    for (n, payloads) in records.iter().enumerate() {
        let frames = payloads.iter().map(|payload| {
            index += 1;
            Frame { index, term: 1, payload: Bytes::copy_from_slice(payload) }
        });
        encode(&mut record, 1, n as u64 + 1, &frames.collect::<Vec<_>>());
        half.extend_from_slice(&record);
    }
    half
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
