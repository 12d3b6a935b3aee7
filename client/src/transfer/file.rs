//! A data file: everything that a store held, in one file that any store can be filled from.
//!
//! ```text
//!   LAKEMAP1 | record | record | ... | end record
//!   record:   kind (1 byte), length (u32), CRC-32 of kind and payload (u32), payload
//!   'H'       the first one: what it is of, as JSON ([`Header`])
//!   'E'       entries: length of the key (u32), length of the value (u32), key, value; keys rise over the whole file
//!   'Z'       the last one: entries (u64), their bytes (u64), their hash (u128), keys left out (u64)
//! ```
//! Numbers are big-endian. The hash is a chain: XXH3-128 of the hash before, the two lengths, the key and the value. A reader
//! that meets a kind it does not know refuses the file: it is of a newer format.
//!
//! A file is written under a temporary name beside its own, synced, read again whole, and renamed: only then does it exist.
//! Reading takes no more memory than a record, which has [`RECORD_BYTES`] or one entry.
//!
//! Failure cases: something is there already; the disk; a file that is cut short, changed, or no data file. Whatever is
//! damaged is found before its end is reached, and nothing that was read from it is the file's until then.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use lake_proto::kv::Revision;
use lake_proto::limits::{MAX_KEY_BYTES, MAX_VALUE_BYTES};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;
use uuid::Uuid;

/// What a data file begins with. The last byte is the format's version.
const MAGIC: &[u8; 8] = b"LAKEMAP1";
/// Kind, length, checksum.
const PREFIX_BYTES: usize = 1 + 4 + 4;
/// A record of entries is written once it has so many bytes.
const RECORD_BYTES: usize = 1 << 20;
/// Two lengths in front of each entry.
const LENGTHS_BYTES: usize = 8;
/// No record has more.
const MAX_RECORD_BYTES: usize = RECORD_BYTES + LENGTHS_BYTES + MAX_KEY_BYTES + MAX_VALUE_BYTES;
const END_BYTES: usize = 8 + 8 + 16 + 8;

const HEADER: u8 = b'H';
const ENTRIES: u8 = b'E';
const END: u8 = b'Z';

/// What a data file is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The store, as people know it.
    pub from: String,
    /// All entries are as they were at this revision; `None`: that store has no revision of all its keys.
    pub revision: Option<Revision>,
    /// When it was made, in milliseconds since 1970.
    pub made_unix_ms: u64,
    /// The version of the program that made it.
    pub made_by: String,
}

/// How much there is, and a hash of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    pub entries: u64,
    /// Of keys and values.
    pub bytes: u64,
    pub hash: u128,
}

impl Sum {
    /// With one more entry.
    pub fn add(&mut self, key: &str, value: &[u8]) {
        let mut chained = BytesMut::with_capacity(16 + LENGTHS_BYTES + key.len() + value.len());
        chained.put_u128(self.hash);
        put_entry(&mut chained, key, value);
        self.hash = XxHash3_128::oneshot(&chained);
        self.entries += 1;
        self.bytes += (key.len() + value.len()) as u64;
    }
}

/// All that is told of a whole file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    pub header: Header,
    pub sum: Sum,
    /// Keys that hung on leases, which are not in it.
    pub left_out: u64,
}

/// Why a file cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{} exists already: name another file, or remove it", .0.display())]
    Exists(PathBuf),
    #[error("{}: {what}", .path.display())]
    Unusable { path: PathBuf, what: String },
    #[error("{doing}: {source}")]
    Io { doing: String, source: std::io::Error },
}

fn io(doing: String) -> impl FnOnce(std::io::Error) -> FileError {
    move |source| FileError::Io { doing, source }
}

fn put_entry(bytes: &mut BytesMut, key: &str, value: &[u8]) {
    // Within the limits of the contract, which are far below 4 GiB.
    bytes.put_u32(key.len() as u32);
    bytes.put_u32(value.len() as u32);
    bytes.put_slice(key.as_bytes());
    bytes.put_slice(value);
}

fn checksum(kind: u8, payload: &[u8]) -> u32 {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&[kind]);
    checksum.update(payload);
    checksum.finalize()
}

/// A file that is being written. What was begun goes when this is dropped.
#[derive(Debug)]
pub struct Writing {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    entries: BytesMut,
    sum: Sum,
    left_out: u64,
    finished: bool,
}

impl Writing {
    /// Begins a file. Blocks, as do the others.
    ///
    /// # Errors
    /// Something is there already, or the directory cannot be written.
    pub fn begin(path: &Path, header: &Header) -> Result<Self, FileError> {
        if path.symlink_metadata().is_ok() {
            return Err(FileError::Exists(path.to_owned()));
        }
        let name = path.file_name().map(|name| name.display().to_string()).unwrap_or_default();
        let temporary = path.with_file_name(format!("{name}.unfinished-{}", Uuid::new_v4().simple()));
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary);
        let file = BufWriter::new(file.map_err(io(format!("making {}", temporary.display())))?);
        let (entries, sum) = (BytesMut::new(), Sum::default());
        let mut this = Self { path: path.to_owned(), temporary, file, entries, sum, left_out: 0, finished: false };
        this.write(MAGIC)?;
        let header = serde_json::to_vec(header).map_err(std::io::Error::other).map_err(io(this.doing()))?;
        this.record(HEADER, &header)?;
        Ok(this)
    }

    fn doing(&self) -> String {
        format!("writing {}", self.temporary.display())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.file.write_all(bytes).map_err(io(self.doing()))
    }

    fn record(&mut self, kind: u8, payload: &[u8]) -> Result<(), FileError> {
        let mut prefix = [0; PREFIX_BYTES];
        prefix[0] = kind;
        prefix[1..5].copy_from_slice(&(payload.len() as u32).to_be_bytes());
        prefix[5..].copy_from_slice(&checksum(kind, payload).to_be_bytes());
        self.write(&prefix)?;
        self.write(payload)
    }

    /// Adds an entry, whose key is behind those before it.
    ///
    /// # Errors
    /// What the disk says.
    pub fn add(&mut self, key: &str, value: &[u8]) -> Result<(), FileError> {
        self.sum.add(key, value);
        put_entry(&mut self.entries, key, value);
        if self.entries.len() >= RECORD_BYTES { self.flush() } else { Ok(()) }
    }

    /// Counts a key that is left out because it hangs on a lease.
    pub fn leave_out(&mut self) {
        self.left_out += 1;
    }

    /// What was added so far.
    pub fn sum(&self) -> Sum {
        self.sum
    }

    fn flush(&mut self) -> Result<(), FileError> {
        let entries = self.entries.split();
        if entries.is_empty() { Ok(()) } else { self.record(ENTRIES, &entries) }
    }

    /// Ends the file, checks it, and gives it its name.
    ///
    /// # Errors
    /// The disk failed, or gives back something else than was written.
    pub fn finish(mut self) -> Result<Described, FileError> {
        self.flush()?;
        let mut end = BytesMut::with_capacity(END_BYTES);
        end.put_u64(self.sum.entries);
        end.put_u64(self.sum.bytes);
        end.put_u128(self.sum.hash);
        end.put_u64(self.left_out);
        self.record(END, &end)?;
        let doing = self.doing();
        self.file.flush().and_then(|()| self.file.get_ref().sync_all()).map_err(io(doing))?;
        let described = check(&self.temporary)?;
        let naming = format!("giving {} its name", self.path.display());
        // Unlike a rename, it takes nobody's place.
        match std::fs::hard_link(&self.temporary, &self.path) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                return Err(FileError::Exists(self.path.clone()));
            }
            // There are file systems without: then whoever comes between is overwritten.
            Err(_) => std::fs::rename(&self.temporary, &self.path).map_err(io(naming.clone()))?,
            Ok(()) => std::fs::remove_file(&self.temporary).map_err(io(naming.clone()))?,
        }
        self.finished = true;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = File::open(parent.unwrap_or(Path::new(".")));
        parent.and_then(|parent| parent.sync_all()).map_err(io(naming))?;
        Ok(described)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.finished {
            // What cannot be removed stays under a name that says what it is.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Reads a file to its end. Blocks.
///
/// # Errors
/// It cannot be read, or is not as it was written.
pub fn check(path: &Path) -> Result<Described, FileError> {
    let mut reading = Reading::open(path)?;
    while reading.next_batch()?.is_some() {}
    reading.end.take().ok_or_else(|| reading.unusable("it has no end"))
}

/// A file that is being read.
#[derive(Debug)]
pub struct Reading {
    path: PathBuf,
    file: BufReader<File>,
    header: Header,
    last: Option<String>,
    sum: Sum,
    /// Once all of it was read.
    end: Option<Described>,
}

impl Reading {
    /// Opens a file. Blocks, as do the others.
    ///
    /// # Errors
    /// It cannot be read, or is no data file that this build knows.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file = File::open(path).map_err(io(format!("opening {}", path.display())))?;
        let header = Header { from: String::new(), revision: None, made_unix_ms: 0, made_by: String::new() };
        let (path, file) = (path.to_owned(), BufReader::new(file));
        let mut this = Self { path, file, header, last: None, sum: Sum::default(), end: None };
        let mut magic = [0; MAGIC.len()];
        let read = this.file.read_exact(&mut magic);
        if read.is_err() || magic[..7] != MAGIC[..7] {
            return Err(this.unusable("it is no data file of lake's metadata"));
        }
        if &magic != MAGIC {
            return Err(this.unusable("it is of a format that this build does not know: use a newer one"));
        }
        let (kind, header) = this.record()?;
        let header = (kind == HEADER).then(|| serde_json::from_slice(&header).ok()).flatten();
        this.header = header.ok_or_else(|| this.unusable("it is damaged: it does not say what it is of"))?;
        Ok(this)
    }

    /// What it is of.
    pub fn header(&self) -> &Header {
        &self.header
    }

    fn unusable(&self, what: &str) -> FileError {
        FileError::Unusable { path: self.path.clone(), what: what.to_owned() }
    }

    fn senseless(&self) -> FileError {
        self.unusable("it is damaged: its entries make no sense")
    }

    fn record(&mut self) -> Result<(u8, Bytes), FileError> {
        let mut prefix = [0; PREFIX_BYTES];
        self.exactly(&mut prefix)?;
        let [kind, len @ .., c0, c1, c2, c3] = prefix;
        let len = u32::from_be_bytes(len) as usize;
        if len > MAX_RECORD_BYTES {
            return Err(self.unusable("it is damaged: a record is longer than any can be"));
        }
        let mut payload = vec![0; len];
        self.exactly(&mut payload)?;
        if checksum(kind, &payload) != u32::from_be_bytes([c0, c1, c2, c3]) {
            return Err(self.unusable("it is damaged: a record's checksum is wrong"));
        }
        Ok((kind, payload.into()))
    }

    fn exactly(&mut self, bytes: &mut [u8]) -> Result<(), FileError> {
        match self.file.read_exact(bytes) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(self.unusable("it is damaged: it ends in the middle"))
            }
            Err(e) => Err(io(format!("reading {}", self.path.display()))(e)),
        }
    }

    /// Some more of its entries, in key order; `None`: these were all, and they are what was written.
    ///
    /// # Errors
    /// It cannot be read, or is not as it was written.
    pub fn next_batch(&mut self) -> Result<Option<Vec<(String, Bytes)>>, FileError> {
        if self.end.is_some() {
            return Ok(None);
        }
        match self.record()? {
            (ENTRIES, payload) => self.entries(payload).map(Some),
            (END, payload) => self.end(payload).map(|()| None),
            _ => Err(self.unusable("it has a record that this build does not know: use a newer one")),
        }
    }

    fn entries(&mut self, mut payload: Bytes) -> Result<Vec<(String, Bytes)>, FileError> {
        let mut entries = Vec::new();
        while !payload.is_empty() {
            if payload.len() < LENGTHS_BYTES {
                return Err(self.senseless());
            }
            let (key, value) = (payload.get_u32() as usize, payload.get_u32() as usize);
            if key > MAX_KEY_BYTES || value > MAX_VALUE_BYTES || key + value > payload.len() {
                return Err(self.senseless());
            }
            let key = String::from_utf8(payload.split_to(key).to_vec()).map_err(|_| self.senseless())?;
            let value = payload.split_to(value);
            if self.last.as_ref().is_some_and(|last| *last >= key) {
                return Err(self.senseless());
            }
            self.sum.add(&key, &value);
            self.last = Some(key.clone());
            entries.push((key, value));
        }
        Ok(entries)
    }

    fn end(&mut self, mut payload: Bytes) -> Result<(), FileError> {
        if payload.len() != END_BYTES {
            return Err(self.unusable("it is damaged: its end makes no sense"));
        }
        let sum = Sum { entries: payload.get_u64(), bytes: payload.get_u64(), hash: payload.get_u128() };
        if sum != self.sum {
            return Err(self.unusable("it is damaged: it does not hold what it says at its end"));
        }
        let mut behind = [0];
        match self.file.read(&mut behind) {
            Ok(0) => {}
            Ok(_) => return Err(self.unusable("it is damaged: there is more behind its end")),
            Err(e) => return Err(io(format!("reading {}", self.path.display()))(e)),
        }
        self.end = Some(Described { header: self.header.clone(), sum, left_out: payload.get_u64() });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header { from: "a test".into(), revision: Some(7), made_unix_ms: 1, made_by: "0".into() }
    }

    fn written(path: &Path, entries: usize, value: usize) -> Described {
        let mut writing = Writing::begin(path, &header()).unwrap();
        for n in 0..entries {
            writing.add(&format!("/kv/{n:05}"), &vec![n as u8; value]).unwrap();
        }
        writing.leave_out();
        writing.finish().unwrap()
    }

    #[test]
    fn what_was_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        for (name, entries, value) in [("none", 0, 0), ("small", 3000, 10), ("large", 3, MAX_VALUE_BYTES)] {
            let path = dir.path().join(name);
            let described = written(&path, entries, value);
            assert_eq!((described.sum.entries, described.left_out), (entries as u64, 1));
            assert_eq!(described.header, header());
            let mut reading = Reading::open(&path).unwrap();
            let mut read = Vec::new();
            while let Some(some) = reading.next_batch().unwrap() {
                read.extend(some);
            }
            assert_eq!(read.len(), entries);
            assert!(
                read.iter().enumerate().all(|(n, (k, v))| *k == format!("/kv/{n:05}") && *v == vec![n as u8; value])
            );
            assert_eq!(check(&path).unwrap(), described);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "no temporary file is left");
    }

    #[test]
    fn nothing_is_overwritten_and_what_is_given_up_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        drop(Writing::begin(&path, &header()).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let late = Writing::begin(&path, &header()).unwrap();
        let first = written(&path, 3, 3);
        assert!(matches!(late.finish(), Err(FileError::Exists(_))), "another one came first");
        assert!(matches!(Writing::begin(&path, &header()), Err(FileError::Exists(_))));
        assert_eq!(check(&path).unwrap(), first);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        written(&path, 5, 7);
        let bytes = std::fs::read(&path).unwrap();
        let judged = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            check(&path)
        };
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                let error = judged(&damaged).expect_err("a flipped bit").to_string();
                assert!(error.contains("data: it "), "{error}");
            }
            assert!(judged(&bytes[..at]).is_err(), "cut at {at}");
        }
        assert!(judged(&[&bytes[..], b"x"].concat()).unwrap_err().to_string().contains("behind its end"));
        judged(&bytes).unwrap();
    }
}
