//! The log on sled 0.34: the only file that knows sled.
//!
//! What sled does not give, and this file does (facts are measured, see docs/):
//! - `flush()` does not reach the drive: [`SledLog::sync`] adds an fdatasync on a handle of our own on `<dir>/db`;
//! - `conf`, `db` and the directories are never synced: they are, once, after creation;
//! - values of a quarter segment or more spill into `blobs/`, which is never synced: entries are packed into values of
//!   at most [`MAX_VALUE_BYTES`], larger ones are split, and [`SledLog::sync`] fails if `blobs/` is ever not empty;
//! - segments can be reused before our sync: keys are removed at most [`REMOVE_KEYS`] at a time, each followed by a sync;
//! - damage is met with a panic or with silent loss: every call runs under `catch_unwind`, every entry carries a CRC, and
//!   [`SledLog::open`] reads the whole log and checks it for contiguity and against the durable mark;
//! - damage could bring an older version of some values back, from before a truncation: each entry carries the CRC of the
//!   one before it, so that what was not written after one another is not read after one another.
//!
//! Layout: tree `log`, one value per packed run of entries under the big-endian index of its first entry. A value is
//! `kind` followed by frames `len, crc, index, term, previous, payload` (all big-endian; the CRC covers all behind it;
//! `previous` is the CRC of the entry before, 0 where that is not known, as behind a snapshot that was received).
//! An entry too large for that is one frame whose payload is cut: the head's value under the index, and the other parts
//! under the index followed by a part number. Tree `meta` holds the incarnation of the directory the log was made for.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once};
use std::time::Duration;

use bytes::Bytes;
use lake_client::clock;

use super::lock;
use crate::files;

/// Largest value given to sled. A leaf of its tree has up to 16 of them, and its cache keeps at least one leaf in each of 256
/// parts, whatever size it is told to have: with values of 32 KiB a peer had 270 MiB of them in memory.
pub const MAX_VALUE_BYTES: usize = 4 << 10;
/// Most keys removed between two syncs.
pub const REMOVE_KEYS: usize = 100;

/// What sled says of a database that is open already.
const LOCKED: &str = "could not acquire lock";
/// How long opening waits for a database of this process to be closed.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const SEGMENT_BYTES: usize = 8 << 20;
/// What leaves sled's cache is read from its files again, and nothing is written for it: the size has no part in what is durable.
/// What is written is in the leaf that was touched last, which stays; what is read is read once, from one end to the other.
const CACHE_BYTES: u64 = 8 << 20;
const FRAME_HEADER_BYTES: usize = 4 + 4 + 8 + 8 + 4;
const KIND_PACKED: u8 = 1;
const KIND_SPLIT: u8 = 2;
const KIND_PART: u8 = 3;
const INCARNATION_KEY: &[u8] = b"incarnation";

/// One log entry as it lies on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub index: u64,
    pub term: u64,
    pub payload: Bytes,
}

/// What a peer knows of its log from elsewhere, when it opens it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Term and index up to which entries are no longer needed.
    pub purged: Option<(u64, u64)>,
    /// Term and index that were durable when last acknowledged.
    pub durable: Option<(u64, u64)>,
}

/// Why a log could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the log in {}: {source}", .dir.display())]
    Io { dir: PathBuf, source: io::Error },
    #[error("the log in {} is damaged: {what}; {}", .dir.display(), files::REJOIN)]
    Damaged { dir: PathBuf, what: String },
    #[error(
        "the log in {} ends at {found}, but this peer has acknowledged entries up to index {acknowledged}: acknowledged \
         writes are missing from its disk, so it cannot vote as itself any more; {}",
        .dir.display(), files::REJOIN
    )]
    Behind { dir: PathBuf, found: String, acknowledged: u64 },
    #[error("the log in {} was made for another data directory (incarnation {found}, expected {expected}); put the log and the mark of one directory together again", .dir.display())]
    OtherPeer { dir: PathBuf, found: String, expected: String },
    #[error(transparent)]
    Journal(#[from] super::journal::JournalError),
}

/// An open log. All calls block; one thread writes, any may read.
#[derive(Debug)]
pub struct SledLog {
    log: sled::Tree,
    db: sled::Db,
    db_file: File,
    dir: PathBuf,
    /// The index and CRC of the last entry; none is known in an empty log.
    chain: Mutex<Option<(u64, u32)>>,
    /// What was cut off when it was opened: a torn end that was never acknowledged.
    cut_off: Option<String>,
    /// For the test of power cuts: see [`super::SkipSync`].
    pub(super) skip_sync: bool,
}

thread_local! {
    /// Whether a panic on this thread is one that [`guard`] will turn into an error.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Lets panics that [`guard`] catches pass without the panic message, which would look like a crash; all others are
/// reported as before.
fn quiet_guarded_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                report(panic);
            }
        }));
    });
}

/// Runs a call into sled and turns both its errors and its panics into an I/O error that names the directory. What the
/// operating system refuses is told as it is; everything else that sled says of its files means that they are damaged,
/// though it has other words for it (a flipped bit in `conf` makes it an older version's database).
fn guard<T>(dir: &Path, doing: &str, call: impl FnOnce() -> Result<T, sled::Error>) -> io::Result<T> {
    GUARDED.set(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(false);
    let damaged = |said: &str| {
        let what = format!("{doing} the log: a file in {} is damaged (sled says: {said})", dir.display());
        io::Error::new(io::ErrorKind::InvalidData, what)
    };
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(sled::Error::Io(e))) if is_the_systems(&e) => {
            Err(io::Error::new(e.kind(), format!("{doing} the log in {}: {e}", dir.display())))
        }
        Ok(Err(e)) => Err(damaged(&e.to_string())),
        Err(panic) => {
            let said = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err(damaged(said))
        }
    }
}

/// Whether the operating system refused something, for reasons other than being asked for places that cannot be.
fn is_the_systems(e: &io::Error) -> bool {
    use rustix::io::Errno;
    let impossible = [Errno::INVAL, Errno::FBIG, Errno::OVERFLOW].map(|errno| Some(errno.raw_os_error()));
    match e.raw_os_error() {
        None => e.to_string().contains(LOCKED),
        errno => !impossible.contains(&errno),
    }
}

impl SledLog {
    /// Makes an empty log, durably, for the data directory with this incarnation.
    pub fn create(dir: &Path, incarnation: &str) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let this = Self::open_sled(dir)?;
        guard(dir, "creating", || this.db.insert(INCARNATION_KEY, incarnation.as_bytes()))?;
        this.sync()?;
        for file in ["conf", "db"] {
            File::open(dir.join(file))?.sync_all()?;
        }
        let blobs = dir.join("blobs");
        if blobs.is_dir() {
            files::sync_dir(&blobs)?;
        }
        files::sync_dir(dir)?;
        if let Some(parent) = dir.parent() {
            files::sync_dir(parent)?;
        }
        Ok(this)
    }

    /// Opens a log, reads all of it, and checks it against what the peer knows. What lies behind the acknowledged end and
    /// is torn is cut off; the rest of it stays. Returns the log and its last entry's term and index.
    ///
    /// # Errors
    /// When the log cannot be read, is damaged or ends before what was acknowledged.
    pub fn open(dir: &Path, incarnation: &str, bounds: Bounds) -> Result<(Self, Option<(u64, u64)>), OpenError> {
        let owned = || dir.to_owned();
        for file in ["conf", "db"] {
            let path = dir.join(file);
            if !path.is_file() {
                return Err(OpenError::Damaged { dir: owned(), what: format!("{} is missing", path.display()) });
            }
        }
        let classify = |source: io::Error| match source.kind() {
            io::ErrorKind::InvalidData => OpenError::Damaged { dir: owned(), what: source.to_string() },
            _ => OpenError::Io { dir: owned(), source },
        };
        let mut this = Self::open_sled(dir).map_err(classify)?;
        let found = guard(dir, "reading", || this.db.get(INCARNATION_KEY)).map_err(classify)?;
        match found {
            Some(found) if found == incarnation.as_bytes() => {}
            Some(found) => {
                let found = String::from_utf8_lossy(&found).into_owned();
                return Err(OpenError::OtherPeer { dir: owned(), found, expected: incarnation.to_owned() });
            }
            None => {
                let what = format!("{} has lost everything it held", dir.join("db").display());
                return Err(OpenError::Damaged { dir: owned(), what });
            }
        }
        let (last, read_bytes) = this.check(bounds)?;
        // What was read stays in sled's cache, however long the log is: a scan touches each leaf once, and the cache looks at
        // its size after 64 touches of one of its 256 parts. A database that is opened anew has read nothing. Where it is no
        // more than the cache may have, that is not worth what opening writes and syncs.
        if read_bytes > CACHE_BYTES {
            let cut_off = this.cut_off.take();
            drop(this);
            this = Self { cut_off, ..Self::open_sled(dir).map_err(classify)? };
        }
        this.chain_up_to(u64::MAX).map_err(classify)?;
        Ok((this, last))
    }

    fn open_sled(dir: &Path) -> io::Result<Self> {
        quiet_guarded_panics();
        let until = clock::now() + LOCK_PATIENCE;
        let db = loop {
            let opened = guard(dir, "opening", || {
                sled::Config::new()
                    .path(dir)
                    .flush_every_ms(None)
                    .segment_size(SEGMENT_BYTES)
                    .cache_capacity(CACHE_BYTES)
                    .open()
            });
            match opened {
                // A database of this process that was just dropped is closed by sled's own threads, a moment later. No
                // other process can hold it: the data directory's lock is ours.
                Err(e) if e.to_string().contains(LOCKED) && clock::now() < until => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                opened => break opened?,
            }
        };
        let log = guard(dir, "opening", || db.open_tree("log"))?;
        let db_file = File::options().read(true).write(true).open(dir.join("db"))?;
        Ok(Self { log, db, db_file, dir: dir.to_owned(), chain: Mutex::new(None), cut_off: None, skip_sync: false })
    }

    /// Whether a log directory without a mark holds anything that must not be thrown away.
    pub fn holds_entries(dir: &Path) -> io::Result<bool> {
        let this = Self::open_sled(dir)?;
        guard(dir, "reading", || this.log.iter().next().transpose()).map(|first| first.is_some())
    }

    /// What was cut off when the log was opened, if something was.
    pub fn cut_off(&self) -> Option<&str> {
        self.cut_off.as_deref()
    }

    /// Reads everything and finds the last good entry: its term and index, and how many bytes of values were read.
    fn check(&mut self, bounds: Bounds) -> Result<(Option<(u64, u64)>, u64), OpenError> {
        let first_needed = bounds.purged.map_or(0, |(_, index)| index + 1);
        let mut last: Option<(u64, u64)> = bounds.purged;
        let mut trouble: Option<String> = None;
        let mut other_term = None;
        let mut decoder = Decoder::new(first_needed);
        let mut frames = Vec::new();
        let mut read_bytes = 0;
        'values: for item in self.log.iter() {
            let item = guard(&self.dir, "reading", || item).map_err(|e| e.to_string());
            let step = item.and_then(|(key, value)| {
                read_bytes += value.len() as u64;
                decoder.push(&key, &value, &mut frames)
            });
            for frame in frames.drain(..) {
                if frame.index < first_needed {
                    continue;
                }
                let expected = last.map_or(0, |(_, index)| index + 1);
                if frame.index != expected {
                    trouble = Some(format!("entry {expected} is missing, entry {} follows instead", frame.index));
                    break 'values;
                }
                if last.is_some_and(|(term, _)| frame.term < term) {
                    trouble = Some(format!("entry {} has a term below that of the entry before it", frame.index));
                    break 'values;
                }
                last = Some((frame.term, frame.index));
                // A log that went back to before a truncation can be long enough and still not be what was acknowledged.
                if bounds.durable.is_some_and(|(term, index)| index == frame.index && term != frame.term) {
                    other_term = Some(frame.term);
                }
            }
            if let Err(what) = step {
                trouble = Some(what);
                break;
            }
        }
        if trouble.is_none() {
            trouble = decoder.unfinished();
        }
        let next = last.map_or(0, |(_, index)| index + 1);
        if let Some(what) = trouble {
            if bounds.durable.is_some_and(|(_, durable)| next <= durable) {
                let what = format!("{}: {what}", self.dir.join("db").display());
                return Err(OpenError::Damaged { dir: self.dir.clone(), what });
            }
            tracing::warn!(dir = %self.dir.display(), from = next, what, "cutting off the log's torn, never acknowledged end");
            self.truncate_from(next).map_err(|source| OpenError::Io { dir: self.dir.clone(), source })?;
            self.cut_off = Some(format!("from entry {next} on: {what}"));
        }
        if let Some((_, durable)) = bounds.durable
            && (next <= durable || other_term.is_some())
        {
            let found = match (other_term, last) {
                (Some(term), _) => format!("an older state, with term {term} at index {durable}"),
                (None, Some((_, index))) => format!("index {index}"),
                (None, None) => "nothing at all".to_owned(),
            };
            return Err(OpenError::Behind { dir: self.dir.clone(), found, acknowledged: durable });
        }
        Ok((last, read_bytes))
    }

    /// Adds entries behind the last one. They are neither durable nor certain to survive before [`SledLog::sync`].
    pub fn append(&self, frames: &[Frame]) -> io::Result<()> {
        let mut packed = Vec::with_capacity(MAX_VALUE_BYTES);
        let mut first_index = 0;
        let mut chain = lock(&self.chain);
        for frame in frames {
            let previous = chain.filter(|(index, _)| index + 1 == frame.index).map_or(0, |(_, crc)| crc);
            let header = Header::of(frame, previous);
            *chain = Some((frame.index, header.crc));
            let size = FRAME_HEADER_BYTES + frame.payload.len();
            if !packed.is_empty() && packed.len() + size > MAX_VALUE_BYTES {
                self.insert(&head_key(first_index), &packed)?;
                packed.clear();
            }
            if 1 + size > MAX_VALUE_BYTES {
                self.append_split(frame, &header)?;
                continue;
            }
            if packed.is_empty() {
                packed.push(KIND_PACKED);
                first_index = frame.index;
            }
            header.write(&mut packed);
            packed.extend_from_slice(&frame.payload);
        }
        if !packed.is_empty() {
            self.insert(&head_key(first_index), &packed)?;
        }
        Ok(())
    }

    fn append_split(&self, frame: &Frame, header: &Header) -> io::Result<()> {
        let room = MAX_VALUE_BYTES - 1 - FRAME_HEADER_BYTES;
        let mut value = Vec::with_capacity(MAX_VALUE_BYTES);
        value.push(KIND_SPLIT);
        header.write(&mut value);
        value.extend_from_slice(&frame.payload[..room]);
        self.insert(&head_key(frame.index), &value)?;
        for (number, part) in frame.payload[room..].chunks(MAX_VALUE_BYTES - 1).enumerate() {
            value.clear();
            value.push(KIND_PART);
            value.extend_from_slice(part);
            self.insert(&part_key(frame.index, number as u32), &value)?;
        }
        Ok(())
    }

    fn insert(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        guard(&self.dir, "writing", || self.log.insert(key, value)).map(drop)
    }

    /// Makes everything written so far durable, through the drive's cache.
    pub fn sync(&self) -> io::Result<()> {
        guard(&self.dir, "flushing", || self.db.flush())?;
        let blobs = self.dir.join("blobs");
        if let Ok(mut entries) = std::fs::read_dir(&blobs)
            && entries.next().is_some()
        {
            let what = format!("{} is not empty: what lies there is not durable; this is a defect", blobs.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        if self.skip_sync {
            return Ok(());
        }
        self.db_file
            .sync_data()
            .map_err(|e| io::Error::new(e.kind(), format!("syncing {}: {e}", self.dir.join("db").display())))
    }

    /// Removes the entries from `index` on, durably. The value that holds entries on both sides is rewritten.
    pub fn truncate_from(&self, index: u64) -> io::Result<()> {
        let start = head_key(index);
        let straddling = guard(&self.dir, "reading", || self.log.range(..start).next_back().transpose())?;
        let mut kept = None;
        if let Some((key, value)) = straddling
            && value.first() == Some(&KIND_PACKED)
        {
            let mut frames = Vec::new();
            let whole = Decoder::new(0).push(&key, &value, &mut frames).is_ok();
            if !whole || frames.last().is_some_and(|f| f.index >= index) {
                frames.retain(|f| f.index < index);
                let bytes: usize = frames.iter().map(|f| FRAME_HEADER_BYTES + f.payload.len()).sum();
                kept = Some((key, value.subslice(0, 1 + bytes), frames.is_empty()));
            }
        }
        loop {
            let keys = guard(&self.dir, "reading", || {
                self.log.range(start..).keys().rev().take(REMOVE_KEYS).collect::<Result<Vec<_>, _>>()
            })?;
            if keys.is_empty() {
                break;
            }
            for key in &keys {
                guard(&self.dir, "truncating", || self.log.remove(key))?;
            }
            self.sync()?;
        }
        // One insert over the old value: there is no moment without the entries that stay.
        match kept {
            Some((key, _, true)) => guard(&self.dir, "truncating", || self.log.remove(&key).map(drop))?,
            Some((key, kept, false)) => self.insert(&key, &kept)?,
            None => {}
        }
        self.sync()?;
        self.chain_up_to(index)
    }

    /// Finds the last entry before an index, which the next one appended will follow.
    fn chain_up_to(&self, index: u64) -> io::Result<()> {
        let last = guard(&self.dir, "reading", || {
            let Some((key, value)) = self.log.range(..head_key(index)).next_back().transpose()? else {
                return Ok(None);
            };
            // A part stands behind its head, which has the header.
            match key.get(..8) {
                Some(head) if key.len() > 8 => self.log.get(head),
                _ => Ok(Some(value)),
            }
        })?;
        let mut rest = last.as_ref().and_then(|value| value.get(1..)).unwrap_or_default();
        let mut chain = None;
        while let Some(header) = Header::read(rest) {
            chain = Some((header.index, header.crc));
            rest = rest.get(FRAME_HEADER_BYTES + header.len..).unwrap_or_default();
        }
        *lock(&self.chain) = chain;
        Ok(())
    }

    /// Removes, durably, at most [`REMOVE_KEYS`] values that hold nothing behind `upto`. Whether there may be more.
    pub fn purge_some(&self, upto: u64) -> io::Result<bool> {
        let items = guard(&self.dir, "reading", || self.log.iter().take(REMOVE_KEYS).collect::<Result<Vec<_>, _>>())?;
        let looked_at = items.len();
        let mut removed = 0;
        for (key, value) in items {
            if last_index(&key, &value).is_none_or(|last| last > upto) {
                break;
            }
            guard(&self.dir, "purging", || self.log.remove(&key))?;
            removed += 1;
        }
        if removed > 0 {
            self.sync()?;
        }
        Ok(removed == looked_at && looked_at == REMOVE_KEYS)
    }

    /// The entries from `start` to before `end`, in order, from the first that is there; ends early once they hold
    /// `max_bytes` (one is always returned if there is one).
    pub fn read(&self, start: u64, end: u64, max_bytes: usize) -> io::Result<Vec<Frame>> {
        let from = guard(&self.dir, "reading", || self.log.range(..=head_key(start)).next_back().transpose())?
            .map_or(head_key(start), |(key, _)| {
                key.get(..8).and_then(|head| head.try_into().ok()).unwrap_or(head_key(start))
            });
        let damaged = |what: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged: {what}", self.dir.join("db").display()))
        };
        let mut decoder = Decoder::new(start);
        let (mut frames, mut decoded, mut bytes) = (Vec::new(), Vec::new(), 0);
        for item in self.log.range(from..) {
            let (key, value) = guard(&self.dir, "reading", || item)?;
            decoder.push(&key, &value, &mut decoded).map_err(damaged)?;
            for frame in decoded.drain(..).filter(|f| f.index >= start) {
                if frame.index >= end || (bytes >= max_bytes && !frames.is_empty()) {
                    return Ok(frames);
                }
                bytes += frame.payload.len();
                frames.push(frame);
            }
        }
        decoder.unfinished().map_or(Ok(frames), |what| Err(damaged(what)))
    }
}

fn head_key(index: u64) -> [u8; 8] {
    index.to_be_bytes()
}

fn part_key(index: u64, number: u32) -> [u8; 12] {
    let mut key = [0; 12];
    key[..8].copy_from_slice(&index.to_be_bytes());
    key[8..].copy_from_slice(&number.to_be_bytes());
    key
}

/// For fuzzing: the frames in values in key order.
pub(crate) fn decode_values(values: &[(Vec<u8>, Vec<u8>)]) -> Result<Vec<Frame>, String> {
    let (mut decoder, mut frames) = (Decoder::new(0), Vec::new());
    for (key, value) in values {
        last_index(key, value);
        decoder.push(key, value, &mut frames)?;
    }
    decoder.unfinished().map_or(Ok(frames), Err)
}

/// For fuzzing: makes the checksums of the whole frames in a value right.
pub(crate) fn fix_checksums(value: &mut [u8]) {
    let mut at = 1;
    while let Some(header) = value.get(at..).and_then(Header::read) {
        let payload = at + FRAME_HEADER_BYTES;
        let end = (payload + header.len).min(value.len());
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&value[at + 8..end]);
        value[at + 4..at + 8].copy_from_slice(&hasher.finalize().to_be_bytes());
        at = end;
    }
}

/// The index of the last entry in a value; `None` if it makes no sense.
fn last_index(key: &[u8], value: &[u8]) -> Option<u64> {
    let head = u64::from_be_bytes(key.get(..8)?.try_into().ok()?);
    if *value.first()? != KIND_PACKED {
        return Some(head);
    }
    let mut rest = &value[1..];
    let mut last = None;
    while let Some(header) = Header::read(rest) {
        last = Some(header.index);
        rest = rest.get(FRAME_HEADER_BYTES + header.len..)?;
    }
    last
}

struct Header {
    len: usize,
    crc: u32,
    index: u64,
    term: u64,
    /// The CRC of the entry before; 0: not known.
    previous: u32,
}

impl Header {
    fn of(frame: &Frame, previous: u32) -> Self {
        let mut this = Self { len: frame.payload.len(), crc: 0, index: frame.index, term: frame.term, previous };
        this.crc = this.checksum(&frame.payload);
        this
    }

    fn checksum(&self, payload: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.index.to_be_bytes());
        hasher.update(&self.term.to_be_bytes());
        hasher.update(&self.previous.to_be_bytes());
        hasher.update(payload);
        hasher.finalize()
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.len as u32).to_be_bytes());
        out.extend_from_slice(&self.crc.to_be_bytes());
        out.extend_from_slice(&self.index.to_be_bytes());
        out.extend_from_slice(&self.term.to_be_bytes());
        out.extend_from_slice(&self.previous.to_be_bytes());
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let double = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        Some(Self { len: word(0)? as usize, crc: word(4)?, index: double(8)?, term: double(16)?, previous: word(24)? })
    }

    /// The frame, if it is whole and was written behind `before`, should that be the entry before it.
    fn check(&self, payload: &[u8], before: &mut Option<(u64, u32)>) -> Result<Frame, String> {
        if self.checksum(payload) != self.crc {
            return Err(format!("the checksum of entry {} does not match", self.index));
        }
        let follows = before.is_none_or(|(index, crc)| {
            index.checked_add(1) != Some(self.index) || self.previous == 0 || self.previous == crc
        });
        if !follows {
            return Err(format!("entry {} was not written behind the entry that is before it now", self.index));
        }
        *before = Some((self.index, self.crc));
        Ok(Frame { index: self.index, term: self.term, payload: Bytes::copy_from_slice(payload) })
    }
}

/// Puts frames together again from values in key order.
struct Decoder {
    /// A split entry before this index is passed over: a purge may have removed only some of its parts.
    from: u64,
    /// A split entry whose parts are still coming.
    split: Option<(Header, Vec<u8>, u32)>,
    /// The index and CRC of the entry that came last.
    before: Option<(u64, u32)>,
}

impl Decoder {
    fn new(from: u64) -> Self {
        Self { from, split: None, before: None }
    }

    fn push(&mut self, key: &[u8], value: &[u8], out: &mut Vec<Frame>) -> Result<(), String> {
        let head = key
            .get(..8)
            .and_then(|k| k.try_into().ok())
            .map(u64::from_be_bytes)
            .ok_or_else(|| "a key is too short".to_owned())?;
        let (kind, mut rest) = value.split_first().ok_or_else(|| format!("the value at {head} is empty"))?;
        let stray = || format!("the value at {head} does not belong there");
        if head < self.from && *kind != KIND_PACKED {
            return Ok(());
        }
        if *kind == KIND_PART {
            let number = key.get(8..).and_then(|k| k.try_into().ok()).map(u32::from_be_bytes).ok_or_else(stray)?;
            let (header, mut payload, next) = self.split.take().ok_or_else(stray)?;
            if header.index != head || number != next || payload.len() + rest.len() > header.len {
                return Err(stray());
            }
            payload.extend_from_slice(rest);
            if payload.len() == header.len {
                out.push(header.check(&payload, &mut self.before)?);
            } else {
                self.split = Some((header, payload, next + 1));
            }
            return Ok(());
        }
        if let Some(what) = self.unfinished() {
            return Err(what);
        }
        match *kind {
            KIND_SPLIT => {
                let header = Header::read(rest).filter(|h| h.index == head).ok_or_else(stray)?;
                let payload = rest[FRAME_HEADER_BYTES..].to_vec();
                if payload.len() >= header.len {
                    return Err(stray());
                }
                self.split = Some((header, payload, 0));
            }
            KIND_PACKED => {
                let mut expected = head;
                while !rest.is_empty() {
                    let header = Header::read(rest).filter(|h| h.index == expected).ok_or_else(stray)?;
                    let end = FRAME_HEADER_BYTES + header.len;
                    let payload = rest.get(FRAME_HEADER_BYTES..end).ok_or_else(stray)?;
                    out.push(header.check(payload, &mut self.before)?);
                    expected = expected.checked_add(1).ok_or_else(stray)?;
                    rest = &rest[end..];
                }
            }
            _ => return Err(stray()),
        }
        Ok(())
    }

    /// What is wrong if no value follows.
    fn unfinished(&mut self) -> Option<String> {
        self.split.take().map(|(header, ..)| format!("entry {} is not complete", header.index))
    }
}

#[cfg(test)]
#[path = "sled_log_tests.rs"]
mod tests;
