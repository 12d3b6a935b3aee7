//! Everything that a stopped peer's directory holds, read once, and what is wrong with it.
//!
//! Read are both slots of the mark; each snapshot, whole; and the log with its journal from end to end, which is applied to the oldest snapshot
//! that joins it: so each newer snapshot is compared with what the log gives at its place.
//!
//! What the log gives in the end is not all certain. An entry is on this disk before it is committed, and may never have been:
//! the disk alone tells only that everything up to the newest snapshot, or up to what the mark notes of one, was. In a cluster
//! of one everything on its disk is committed.
//!
//! A log that is damaged gives what stands before the damage: each entry has its checksum and that of the one before it, so
//! that much is proven to have been written like that. Where a snapshot that reads reaches further than that, it counts
//! instead, as it does for a peer that was stopped between receiving a snapshot and letting go of its log.
//!
//! Failure cases: the directory cannot be held or read at all, or holds what only a newer build knows: an error, since what
//! cannot be read is not therefore damaged. Everything that is wrong inside of it: a [`Finding`].

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::held::Held;
use super::replay::Replay;
use super::{blocking, members};
use crate::config::StorageConfig;
use crate::directory::DirectoryLock;
use crate::error::Error;
use crate::log::journal::{self, JournalError};
use crate::log::mark::{Mark, MarkFile, SLOT_BYTES, decode_file};
use crate::log::sled_log::OpenError;
use crate::log::{Log, LogOptions};
use crate::peer::verdicts::{ALARM, ODD, Verdicts};
use crate::raft::state_machine::Applied;
use crate::raft::types::{LogId, Vote};
use crate::snapshot::{self, Loaded, SnapshotError};
use crate::state::FEATURE_LEVEL;

/// Something that is not as a peer leaves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub weight: Weight,
    pub file: PathBuf,
    /// Where in it, and what.
    pub what: String,
}

/// What a finding means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// What a crash leaves behind: nothing is lost by it.
    Remark,
    /// Something that was kept does not read as it was written, or is missing.
    Damage,
}

/// A snapshot in the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    pub path: PathBuf,
    /// What it covers, as its name says.
    pub covers: LogId,
    pub bytes: u64,
    /// The state's hash; none if the file cannot be read.
    pub hash: Option<u128>,
}

/// What the log holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogRange {
    /// Up to where entries are gone.
    pub purged: Option<LogId>,
    /// The last one that reads.
    pub last: Option<LogId>,
    pub entries: u64,
    /// False: something was behind `last` once.
    pub whole: bool,
}

/// What a directory holds.
#[derive(Debug)]
pub struct Reading {
    pub dir: PathBuf,
    /// None if neither slot reads.
    pub mark: Option<Mark>,
    /// Newest first.
    pub snapshots: Vec<SnapshotFile>,
    /// None if it cannot be opened at all.
    pub log: Option<LogRange>,
    /// What the files of the log take on disk.
    pub log_bytes: u64,
    pub cluster_id: String,
    /// The state that was certainly committed, if it can still be put together.
    pub committed: Option<Applied>,
    /// The state that all there is gives. What is in it beyond `committed` may never have been committed.
    pub replayed: Option<Applied>,
    /// The hashes of the state at the indexes that were asked for, and of the snapshots.
    pub hashes: BTreeMap<u64, u128>,
    pub findings: Vec<Finding>,
    /// A snapshot and the log give different states at one place, or the peers have found that this one's state is not that of
    /// the majority: something in it is wrong.
    pub(super) contradicts_itself: bool,
    /// Nobody starts the peer while this is looked at.
    lock: Option<DirectoryLock>,
}

impl Reading {
    /// Whether anything is damaged.
    pub fn is_damaged(&self) -> bool {
        self.findings.iter().any(|finding| finding.weight == Weight::Damage)
    }

    /// Up to where the peer knew that everything is committed, whether that is still to be read or not.
    pub fn committed_index(&self) -> Option<u64> {
        let mark = self.mark.as_ref();
        let noted = mark.and_then(|m| m.snapshot).max(mark.and_then(|m| m.purged)).map(|id| id.index);
        let kept = self.snapshots.iter().filter(|s| s.hash.is_some()).map(|s| s.covers.index).max();
        let alone = self.replayed.as_ref().filter(|applied| self.is_alone(applied)).and_then(|a| a.last);
        noted.max(kept).max(alone.map(|id| id.index))
    }

    /// What holds the directory, and everything else.
    pub(super) fn into_lock(mut self) -> (Option<DirectoryLock>, Self) {
        (self.lock.take(), self)
    }

    /// Whether all that the peer ever acknowledged reads, and none of it contradicts the rest.
    pub fn is_whole(&self) -> bool {
        let end = self.log.filter(|log| log.whole).map(|log| log.last);
        let given = self.replayed.as_ref().and_then(|applied| applied.last);
        !self.contradicts_itself && end.is_some_and(|end| end <= given && self.acknowledged() <= given)
    }

    /// Up to where the peer is known to have acknowledged entries. What was only in a journal that does not read is not.
    pub fn acknowledged(&self) -> Option<LogId> {
        let end = self.log.filter(|log| log.whole).and_then(|log| log.last);
        self.mark.as_ref().and_then(|mark| mark.last).max(end)
    }

    /// The vote that the peer cast last.
    pub fn vote(&self) -> Option<Vote> {
        self.mark.as_ref().and_then(|mark| mark.vote)
    }

    pub(super) fn is_alone(&self, applied: &Applied) -> bool {
        let (voters, _) = members(applied.membership.membership());
        let own = self.mark.as_ref().map(|mark| (mark.peer_id, mark.incarnation.as_str()));
        matches!(&voters[..], [(id, voter)] if Some((*id, voter.incarnation.as_str())) == own)
    }

    pub(super) fn damage(&mut self, file: impl Into<PathBuf>, what: impl Into<String>) {
        self.findings.push(Finding { weight: Weight::Damage, file: file.into(), what: what.into() });
    }

    fn remark(&mut self, file: impl Into<PathBuf>, what: impl Into<String>) {
        self.findings.push(Finding { weight: Weight::Remark, file: file.into(), what: what.into() });
    }
}

/// Reads a directory. `hashes_at`: where else the state's hash is wanted.
///
/// # Errors
/// As [`Held::take`]; a file that cannot be read for reasons of the system.
pub async fn read(dir: &Path, hashes_at: BTreeSet<u64>) -> Result<Reading, Error> {
    let dir = dir.to_owned();
    let (held, mut reading, kept, log) = blocking(move || {
        let held = Held::take(&dir)?;
        let mut reading = Reading {
            log_bytes: held.log_bytes(),
            dir,
            mark: None,
            snapshots: Vec::new(),
            log: None,
            cluster_id: String::new(),
            committed: None,
            replayed: None,
            hashes: BTreeMap::new(),
            findings: Vec::new(),
            contradicts_itself: false,
            lock: None,
        };
        read_mark(&held, &mut reading)?;
        let kept = read_snapshots(&held, &mut reading)?;
        left_behind(&held, &mut reading)?;
        let log = open_log(&held, &mut reading)?;
        Ok::<_, Error>((held, reading, kept, log))
    })
    .await??;
    if let Some(log) = log {
        let replayed = Replay::new(&log, hashes_at).run(kept.base, &mut reading).await;
        log.close().await;
        replayed.map_err(|error| match error {
            Error::Newer(what) => Error::Newer(held.in_its_words(what)),
            error => error,
        })?;
    }
    // What a snapshot holds is committed, and proven, also where the log does not lead there.
    if let Some(newest) = kept.newest
        && reading.replayed.as_ref().and_then(|applied| applied.last) < newest.last
    {
        reading.committed = Some(newest.clone());
        reading.replayed = Some(newest);
    }
    if reading.committed.is_none()
        && let Some(replayed) = &reading.replayed
        && replayed.last.map(|id| id.index) <= reading.committed_index()
    {
        reading.committed = Some(replayed.clone());
    }
    for finding in &mut reading.findings {
        finding.what = held.in_its_words(&finding.what);
    }
    reading.lock = held.without_copy();
    Ok(reading)
}

/// The snapshots that a directory names, without looking into them.
pub fn snapshot_indexes(dir: &Path) -> BTreeSet<u64> {
    let store = snapshot::SnapshotStore::existing(dir.join("snapshots"));
    store.list().unwrap_or_default().into_iter().map(|(id, _)| id.index).collect()
}

fn read_mark(held: &Held, reading: &mut Reading) -> Result<(), Error> {
    let path = held.dir().join("mark");
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => {
            reading.damage(path, "it is missing: who this peer is, and whom it voted for, is lost");
            return Ok(());
        }
        Err(e) => return Err(Error::io(format!("reading {}", path.display()))(e)),
    };
    for slot in 0..2 {
        let begin = slot * SLOT_BYTES;
        let readable = bytes.get(begin..begin + SLOT_BYTES).is_some_and(|slot| decode_file(slot).is_some());
        if !readable {
            reading.damage(&path, format!("slot {slot} (bytes {begin} to {}) does not read", begin + SLOT_BYTES - 1));
        }
    }
    if bytes.len() > 2 * SLOT_BYTES {
        reading.damage(&path, format!("it goes on behind its {} bytes", 2 * SLOT_BYTES));
    }
    reading.mark = decode_file(&bytes).map(|(_, mark)| mark);
    if let Some(mark) = &reading.mark {
        reading.cluster_id.clone_from(&mark.cluster_id);
    } else {
        reading.damage(path, "neither slot reads: who this peer is, and whom it voted for, is lost");
    }
    Ok(())
}

/// Of the snapshots that read.
#[derive(Default)]
struct Kept {
    /// The oldest that joins the log.
    base: Option<Applied>,
    newest: Option<Applied>,
}

/// Checks every snapshot.
fn read_snapshots(held: &Held, reading: &mut Reading) -> Result<Kept, Error> {
    let store = held.snapshots();
    let list = match store.list() {
        Ok(list) => list,
        Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(Error::io(format!("listing the snapshots in {}", store.dir().display()))(e)),
    };
    let purged = reading.mark.as_ref().map(|mark| mark.purged.map_or(0, |id| id.index));
    let mut kept = Kept::default();
    for (covers, path) in list.into_iter().rev() {
        let bytes = path.metadata().map_or(0, |file| file.len());
        let loaded = read_snapshot(&path, covers, reading)?;
        let hash = loaded.as_ref().map(|loaded| loaded.state.digest());
        reading.snapshots.push(SnapshotFile { path, covers, bytes, hash });
        reading.hashes.extend(hash.map(|hash| (covers.index, hash)));
        let Some(loaded) = loaded else { continue };
        if reading.cluster_id.is_empty() {
            reading.cluster_id.clone_from(&loaded.cluster_id);
        }
        let applied = Applied::from(loaded);
        if purged.is_some_and(|purged| covers.index >= purged) {
            kept.base.get_or_insert_with(|| applied.clone());
        }
        kept.newest = Some(applied);
    }
    reading.snapshots.reverse();
    Ok(kept)
}

fn read_snapshot(path: &Path, covers: LogId, reading: &mut Reading) -> Result<Option<Loaded>, Error> {
    let loaded = match snapshot::read(path, FEATURE_LEVEL) {
        Ok(loaded) => loaded,
        Err(SnapshotError::Damaged { what, .. }) => {
            reading.damage(path, what);
            return Ok(None);
        }
        Err(newer @ SnapshotError::Newer { .. }) => return Err(Error::Newer(newer.to_string())),
        Err(SnapshotError::Io { path, source }) => {
            return Err(Error::io(format!("reading the snapshot {}", path.display()))(source));
        }
    };
    if reading.mark.as_ref().is_some_and(|mark| mark.cluster_id != loaded.cluster_id) {
        let what = format!("it is of cluster {}, and the mark says {}", loaded.cluster_id, reading.cluster_id);
        reading.damage(path, what);
        return Ok(None);
    }
    if loaded.meta.last_log_id != Some(covers) {
        let what = format!("it covers {}, and is named for {covers}", shown(loaded.meta.last_log_id));
        reading.damage(path, what);
        return Ok(None);
    }
    Ok(Some(loaded))
}

/// What an interrupted start or snapshot leaves, and what is in the way of nobody and was not looked at.
fn left_behind(held: &Held, reading: &mut Reading) -> Result<(), Error> {
    let dir = held.dir().join("snapshots");
    let doing = || format!("listing the snapshots in {}", dir.display());
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries.collect::<Result<Vec<_>, _>>().map_err(Error::io(doing()))?,
        Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(Error::io(doing())(e)),
    };
    let known: BTreeSet<PathBuf> = reading.snapshots.iter().map(|snapshot| snapshot.path.clone()).collect();
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths.into_iter().filter(|path| !known.contains(path)) {
        let what = if path.extension().is_some_and(|e| e == "tmp") {
            "it was left half-made; the next start removes it"
        } else {
            "it has no snapshot's name, was not looked at, and is not used"
        };
        reading.remark(path, what);
    }
    for (name, odd) in [(ODD, true), (ALARM, false)] {
        let path = held.dir().join(name);
        if path.exists() {
            reading.contradicts_itself |= odd;
            let verdicts = Verdicts::in_dir(held.dir());
            let what = if odd { verdicts.odd()? } else { verdicts.alarm()? };
            reading.damage(path, what.unwrap_or_default());
        }
    }
    for path in ["log.new", "mark.new", "journal.new", "odd.new", "alarm.new"].map(|name| held.dir().join(name)) {
        if path.exists() {
            reading.remark(path, "it was left half-made, and is not used");
        }
    }
    Ok(())
}

/// Opens the copy of the log; what of it reads, if it is damaged.
///
/// # Errors
/// What the system refuses of the copy: that says nothing of the log.
fn open_log(held: &Held, reading: &mut Reading) -> Result<Option<Log>, Error> {
    let path = held.copied("mark");
    let storage = StorageConfig { disk_reserve_bytes: 0, ..StorageConfig::default() };
    let open = |mark| Log::open(LogOptions::new(held.copied("log"), &storage), mark);
    let Some(mark) = reading.mark.clone() else { return Ok(None) };
    let first = MarkFile::open(&path)?;
    // Before it is opened, which empties it.
    let journal = match std::fs::read(held.copied("journal")) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(refused(held, e)),
    };
    let (file, what) = match open(first) {
        Ok(log) => {
            check_journal(held, reading, &journal, &mark);
            if let Some(what) = log.cut_off() {
                let what = format!(
                    "its end is torn {what}; the next start cuts that off, which loses nothing: it was not acknowledged, or \
                     the journal has it"
                );
                reading.remark(held.dir().join("log"), what);
            }
            reading.log = Some(LogRange { whole: true, ..LogRange::default() });
            return Ok(Some(log));
        }
        Err(e) => wrong(held, e)?,
    };
    reading.damage(file, what);
    // On the copy: as if nothing had been acknowledged behind the snapshot, so that what stands before the damage is given;
    // and if the journal does not join that, without it.
    for with_journal in [true, false] {
        let mut mark = MarkFile::open(&path)?;
        let lowered = mark.update_both(|mark| {
            mark.last = mark.purged;
            mark.journal = mark.journal.filter(|_| with_journal);
        });
        lowered.map_err(|e| refused(held, e))?;
        match open(mark) {
            Ok(log) => {
                reading.log = Some(LogRange::default());
                return Ok(Some(log));
            }
            // Damaged, as was told before.
            Err(e) => drop(wrong(held, e)?),
        }
    }
    Ok(None)
}

/// What the system refused of the copy.
fn refused(held: &Held, source: std::io::Error) -> Error {
    let doing = format!(
        "opening a copy of the log of {} in {} (TMPDIR names another place)",
        held.dir().display(),
        std::env::temp_dir().display()
    );
    Error::Io { doing, source }
}

/// What is wrong in a journal with which the log could be opened.
fn check_journal(held: &Held, reading: &mut Reading, bytes: &[u8], mark: &Mark) {
    // Until the mark says that there is one, whatever is there is made again.
    let Some(from) = mark.journal else { return };
    let path = held.dir().join("journal");
    let flaws = match journal::check(bytes, &mark.incarnation, from) {
        Ok(flaws) => flaws,
        Err(what) => return reading.damage(path, what),
    };
    if flaws.damaged > 0 {
        let what = format!("records that are whole in only one of its halves: {}", flaws.damaged);
        reading.damage(&path, what);
    }
    if flaws.torn {
        reading.remark(
            path,
            "its end is torn: the last record was not written whole to both halves, and so was not acknowledged; the next \
             start goes on from what reads",
        );
    }
}

/// Which file is wrong, and what about it.
///
/// # Errors
/// None is: the system refused something.
fn wrong(held: &Held, error: OpenError) -> Result<(PathBuf, String), Error> {
    let log = held.dir().join("log");
    Ok(match error {
        OpenError::Io { source, .. } | OpenError::Journal(JournalError::Io { source, .. })
            if source.kind() != ErrorKind::InvalidData =>
        {
            return Err(refused(held, source));
        }
        OpenError::Damaged { what, .. } => (log, what),
        OpenError::Behind { found, acknowledged, .. } => {
            (log, format!("it ends at {found}, and entries up to index {acknowledged} were acknowledged"))
        }
        OpenError::Journal(JournalError::Damaged { what, .. }) => (held.dir().join("journal"), what),
        other => (log, other.to_string()),
    })
}

/// A log id for people.
pub fn shown(id: Option<LogId>) -> String {
    id.map_or_else(|| "nothing".to_owned(), |id| format!("index {} of term {}", id.index, id.leader_id.term))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_refuses_of_the_copy_is_no_damage() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("snapshots")).unwrap();
        let held = Held::take(dir.path()).unwrap();
        let io = |kind: ErrorKind| OpenError::Io { dir: held.copied("log"), source: kind.into() };
        let refused = wrong(&held, io(ErrorKind::StorageFull)).unwrap_err();
        assert!(matches!(refused, Error::Io { .. }) && refused.to_string().contains("TMPDIR"), "{refused}");
        let journal = JournalError::Io { path: held.copied("journal"), source: ErrorKind::PermissionDenied.into() };
        assert!(wrong(&held, journal.into()).is_err());
        assert_eq!(wrong(&held, io(ErrorKind::InvalidData)).unwrap().0, dir.path().join("log"));
    }
}
