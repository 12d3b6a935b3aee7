//! A peer's data directory: who holds it, whose it is, and everything in it opened and checked.
//!
//! ```text
//!   lock         held by the process that uses the directory; holds its pid
//!   mark         identity, vote, and how far the log was acknowledged (log/mark.rs)
//!   log/         the log's entries (log/sled_log.rs)
//!   journal      the end of the log, until it is synced in log/ (log/journal.rs)
//!   snapshots/   the newest two snapshots (snapshot.rs)
//!   odd, alarm   what the other peers' states have shown about this one (peer/verdicts.rs)
//! ```
//!
//! When a directory is made, the log is made under another name and renamed once it is durable, and the mark is written
//! last: a log with that other name may be thrown away at any time, and a directory with a mark is complete.
//!
//! Failure cases: in use, of another peer, damaged: each an [`Error`] that names the directory or the file.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::config::StorageConfig;
use crate::error::Error;
use crate::files::{self, FreeSpace};
use crate::log::mark::{Mark, MarkFile};
use crate::log::sled_log::SledLog;
use crate::log::{Log, LogOptions, SkipSync};
use crate::peer::verdicts::Verdicts;
use crate::planted::{self, Bug};
use crate::raft::state_machine::{DiskReserve, StateMachine};
use crate::snapshot::{self, Loaded, SnapshotData, SnapshotError, SnapshotStore};

/// What of a directory belongs to the log, as far as it is there.
pub(crate) const LOG_FILES: [&str; 3] = ["mark", "journal", "log"];

/// A directory that this process holds. Dropping it lets others in.
#[derive(Debug)]
pub struct DirectoryLock {
    file: File,
}

impl DirectoryLock {
    /// Takes the directory, making it if need be.
    ///
    /// # Errors
    /// When another process holds it ([`Error::Locked`] says which), or it cannot be made.
    pub fn take(dir: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("making the data directory {}", dir.display())))?;
        let path = dir.join("lock");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(Error::io(locking(&path)))?;
        let mut this = Self::lock(dir, &path, file)?;
        this.file
            .set_len(0)
            .and_then(|()| this.file.rewind())
            .and_then(|()| writeln!(this.file, "{}", std::process::id()))
            .map_err(Error::io(locking(&path)))?;
        Ok(this)
    }

    /// Takes a directory that is there. On a file system that cannot be written nothing is; without a lock file there, nobody
    /// can be using it: `None`.
    ///
    /// # Errors
    /// As [`DirectoryLock::take`].
    pub fn take_existing(dir: &Path) -> Result<Option<Self>, Error> {
        let path = dir.join("lock");
        match Self::take(dir) {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::ReadOnlyFilesystem => {}
            taken => return taken.map(Some),
        }
        match File::open(&path) {
            Ok(file) => Self::lock(dir, &path, file).map(Some),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(locking(&path))(e)),
        }
    }

    fn lock(dir: &Path, path: &Path, mut file: File) -> Result<Self, Error> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { file }),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                let holder = match file.read_to_string(&mut pid) {
                    Ok(_) if !pid.trim().is_empty() => format!("process {}", pid.trim()),
                    _ => "another process".to_owned(),
                };
                Err(Error::Locked { dir: dir.to_owned(), holder })
            }
            Err(e) => Err(Error::io(locking(path))(e.into())),
        }
    }
}

fn locking(path: &Path) -> String {
    format!("locking the data directory with {}", path.display())
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Closing is not enough: a child that is being spawned may still hold a copy of the descriptor.
        if let Err(e) = flock(&self.file, FlockOperation::Unlock) {
            tracing::warn!("unlocking the data directory: {e}");
        }
    }
}

/// The open contents of a directory.
pub struct Contents {
    pub log: Log,
    pub state_machine: StateMachine,
}

/// What opening a directory needs to know.
pub struct DirectoryOptions {
    /// `None`: whatever the directory says, 1 for a new one.
    pub peer_id: Option<u64>,
    pub storage: StorageConfig,
    pub free_space: FreeSpace,
    /// The highest that entries and snapshots may be of.
    pub feature_level: u32,
    #[doc(hidden)]
    pub skip_sync: SkipSync,
}

/// Opens, or makes, everything in a directory that is held. Blocks.
///
/// # Errors
/// When it belongs to another peer, is damaged, holds another state than the majority did, or cannot be read or written.
pub fn open(dir: &Path, options: DirectoryOptions) -> Result<Contents, Error> {
    if let Some(what) = Verdicts::in_dir(dir).odd()? {
        return Err(Error::Damaged(what));
    }
    let mark_path = dir.join("mark");
    let mut log_options = LogOptions::new(dir.join("log"), &options.storage);
    log_options.free_space = options.free_space.clone();
    log_options.skip_sync = match planted::has(Bug::AcknowledgedUnsynced) {
        true => SkipSync { entries: true, mark: true, journal: true },
        false => options.skip_sync,
    };
    let reserve = DiskReserve { bytes: options.storage.disk_reserve_bytes, free_space: options.free_space };
    let snapshot_dir = dir.join("snapshots");
    let snapshots = SnapshotStore::open(snapshot_dir.clone())
        .map_err(Error::io(format!("opening the snapshots in {}", snapshot_dir.display())))?;
    if !mark_path.exists() {
        let log = create(dir, &mark_path, log_options, &snapshots, options.peer_id.unwrap_or(1))?;
        let state_machine = StateMachine::new(snapshots, log.clone(), reserve, None).supporting(options.feature_level);
        return Ok(Contents { log, state_machine });
    }
    let mark = MarkFile::open(&mark_path)?;
    if let Some(expected) = options.peer_id
        && mark.get().peer_id != expected
    {
        return Err(Error::OtherPeer { dir: dir.to_owned(), found: mark.get().peer_id, expected });
    }
    // The log first: checking it takes as much memory as it has bytes, and the state can have that afterwards.
    let log = Log::open(log_options, mark)?;
    let loaded = load_snapshot(&snapshots, &log.mark(), options.feature_level)?;
    let state_machine = StateMachine::new(snapshots, log.clone(), reserve, loaded).supporting(options.feature_level);
    Ok(Contents { log, state_machine })
}

fn create(
    dir: &Path,
    mark_path: &Path,
    log_options: LogOptions,
    snapshots: &SnapshotStore,
    peer_id: u64,
) -> Result<Log, Error> {
    let without_mark = |what: String| {
        Error::Damaged(format!(
            "the data directory {} has {what} but no {}: who this peer was and whom it voted for is lost; {}",
            dir.display(),
            mark_path.display(),
            files::REJOIN
        ))
    };
    let doing = || format!("making the data directory {}", dir.display());
    if !snapshots.list().map_err(Error::io(doing()))?.is_empty() {
        return Err(without_mark("snapshots".to_owned()));
    }
    if log_options.dir.exists() {
        // Left by a start that was cut off after it made the log and before it wrote the mark, unless there is something
        // in it.
        match SledLog::holds_entries(&log_options.dir) {
            Ok(false) => std::fs::remove_dir_all(&log_options.dir).map_err(Error::io(doing()))?,
            Ok(true) => return Err(without_mark("a log".to_owned())),
            Err(e) => return Err(without_mark(format!("a log that cannot be read ({e})"))),
        }
    }
    let building = log_options.dir.with_extension("new");
    if building.exists() {
        std::fs::remove_dir_all(&building).map_err(Error::io(doing()))?;
    }
    let identity = Mark { peer_id, incarnation: uuid::Uuid::new_v4().simple().to_string(), ..Mark::default() };
    SledLog::create(&building, &identity.incarnation).map_err(Error::io(doing()))?;
    std::fs::rename(&building, &log_options.dir).and_then(|()| files::sync_dir(dir)).map_err(Error::io(doing()))?;
    let mark = MarkFile::create(mark_path, identity).map_err(Error::io(doing()))?;
    Ok(Log::open(log_options, mark)?)
}

/// The newest snapshot, or, if that is damaged, the one before it where it still joins the log.
pub(crate) fn load_snapshot(
    snapshots: &SnapshotStore,
    mark: &Mark,
    feature_level: u32,
) -> Result<Option<(Loaded, SnapshotData)>, Error> {
    let list =
        snapshots.list().map_err(Error::io(format!("listing the snapshots in {}", snapshots.dir().display())))?;
    let joins = |index: u64| mark.purged.is_none_or(|purged| index >= purged.index);
    let mut damaged = None;
    for (id, path) in list.into_iter().filter(|(id, _)| joins(id.index)) {
        match snapshot::read(&path, feature_level) {
            Ok(loaded) if loaded.cluster_id == mark.cluster_id => {
                if let Some(what) = &damaged {
                    tracing::warn!(path = %path.display(), "using an older snapshot, the log joins it: {what}");
                }
                return Ok(Some((loaded, SnapshotData { path })));
            }
            Ok(loaded) => {
                return Err(Error::Damaged(format!(
                    "the snapshot {} is of cluster {}, but this peer belongs to cluster {}; put the right one back",
                    path.display(),
                    loaded.cluster_id,
                    mark.cluster_id
                )));
            }
            // An older one would lead to the entry that this build does not know.
            Err(e @ SnapshotError::Newer { .. }) => return Err(e.into()),
            Err(e) => damaged = damaged.or_else(|| Some(format!("the snapshot at index {}: {e}", id.index))),
        }
    }
    match (damaged, mark.purged) {
        (Some(what), _) => Err(Error::Damaged(what)),
        (None, Some(purged)) => Err(Error::Damaged(format!(
            "{} holds no snapshot that reaches entry {}, where the log in this directory begins; {}",
            snapshots.dir().display(),
            purged.index,
            files::REJOIN
        ))),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::FEATURE_LEVEL;

    fn options() -> DirectoryOptions {
        let storage = StorageConfig { disk_reserve_bytes: 0, ..StorageConfig::default() };
        DirectoryOptions {
            peer_id: None,
            storage,
            free_space: FreeSpace::default(),
            feature_level: FEATURE_LEVEL,
            skip_sync: SkipSync::default(),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_directory_whose_making_was_cut_off_is_made_again() {
        // While the log was made: whatever is there may be torn.
        let dir = tempfile::tempdir().unwrap();
        let building = dir.path().join("log.new");
        std::fs::create_dir(&building).unwrap();
        std::fs::write(building.join("conf"), b"").unwrap();
        std::fs::write(building.join("db"), [0; 100]).unwrap();
        open(dir.path(), options()).unwrap().log.close().await;
        assert!(!building.exists());
        // Before the mark had its name.
        std::fs::rename(dir.path().join("mark"), dir.path().join("mark.new")).unwrap();
        open(dir.path(), options()).unwrap().log.close().await;
        open(dir.path(), options()).unwrap().log.close().await;
    }

    #[test]
    fn a_lock_given_up_is_free_though_a_copy_of_its_descriptor_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DirectoryLock::take(dir.path()).unwrap();
        assert!(matches!(DirectoryLock::take(dir.path()), Err(Error::Locked { .. })));
        let _copy = lock.file.try_clone().unwrap();
        drop(lock);
        DirectoryLock::take(dir.path()).unwrap();
    }
}
