//! The directory of a stopped peer, held against being started, and never written.
//!
//! sled writes to what it opens, and a log that is opened may have a torn end cut off. So what belongs to the log is copied
//! to a scratch directory, and opened there; snapshots are read where they are. The scratch directory is under the system's
//! directory for temporary files (`TMPDIR`), needs as much room as the log takes, and goes when the value is dropped.
//!
//! Failure cases: no peer's directory; in use; no room for the copy: each an [`Error`] that says so.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::directory::{DirectoryLock, LOG_FILES};
use crate::error::Error;
use crate::files::FreeSpace;
use crate::snapshot::SnapshotStore;

/// Room that is left over for others where the copy is made, in bytes.
const SPARE_BYTES: u64 = 16 << 20;

/// A held directory. Dropping it lets others in.
#[derive(Debug)]
pub struct Held {
    dir: PathBuf,
    scratch: TempDir,
    log_bytes: u64,
    /// None on a file system that nothing can write to.
    lock: Option<DirectoryLock>,
}

impl Held {
    /// Takes a directory and copies its log. Blocks.
    ///
    /// # Errors
    /// It is no peer's directory, a process uses it, it cannot be read, or there is no room for the copy.
    pub fn take(dir: &Path) -> Result<Self, Error> {
        check_is_a_peers(dir)?;
        let lock = DirectoryLock::take_existing(dir)?;
        let scratch = tempfile::Builder::new().prefix("lake-log-").tempdir();
        let scratch = scratch.map_err(Error::io(format!(
            "making a directory in {} for a copy of the log (TMPDIR names another place)",
            std::env::temp_dir().display()
        )))?;
        let reading = || format!("reading the data directory {}", dir.display());
        let mut log_bytes = 0;
        for name in LOG_FILES {
            log_bytes += size(&dir.join(name)).map_err(Error::io(reading()))?;
        }
        let free = FreeSpace::default().bytes(scratch.path());
        if free < log_bytes + SPARE_BYTES {
            let what = format!(
                "copying the log of {}, {} MiB, to {}, where {} MiB are free: name another place with TMPDIR",
                dir.display(),
                log_bytes >> 20,
                scratch.path().display(),
                free >> 20
            );
            return Err(Error::Io { doing: what, source: std::io::ErrorKind::StorageFull.into() });
        }
        for name in LOG_FILES {
            let to = scratch.path().join(name);
            let doing = format!("copying {} to {}", dir.join(name).display(), to.display());
            copy(&dir.join(name), &to).map_err(Error::io(doing))?;
        }
        Ok(Self { dir: dir.to_owned(), scratch, log_bytes, lock })
    }

    /// The directory itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a file of the log is that may be written to.
    pub(super) fn copied(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// What the log takes on disk, in bytes.
    pub fn log_bytes(&self) -> u64 {
        self.log_bytes
    }

    /// The snapshots there are.
    pub(super) fn snapshots(&self) -> SnapshotStore {
        SnapshotStore::existing(self.dir.join("snapshots"))
    }

    /// Removes the copy; the directory stays held for as long as what is given.
    pub(super) fn without_copy(self) -> Option<DirectoryLock> {
        self.lock
    }

    /// What was said of the copy, said of the directory itself.
    pub(super) fn in_its_words(&self, said: impl Display) -> String {
        said.to_string().replace(&self.scratch.path().display().to_string(), &self.dir.display().to_string())
    }
}

fn check_is_a_peers(dir: &Path) -> Result<(), Error> {
    let not = |what: String| Err(Error::NoPeer { dir: dir.to_owned(), what });
    if !dir.is_dir() {
        return not("there is no such directory".to_owned());
    }
    if dir.join("mark").exists() || dir.join("log").is_dir() || dir.join("snapshots").is_dir() {
        return Ok(());
    }
    let below = dir.join("metasrv-1");
    if below.is_dir() {
        return not(format!("it holds a whole cluster; name one peer's directory, as {}", below.display()));
    }
    not("it has neither a mark, nor a log, nor snapshots".to_owned())
}

/// Bytes of a file, or of all files in a directory; 0 of what is not there.
fn size(path: &Path) -> std::io::Result<u64> {
    if !path.is_dir() {
        return match path.metadata() {
            Ok(file) => Ok(file.len()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(0),
            Err(e) => Err(e),
        };
    }
    std::fs::read_dir(path)?.map(|entry| size(&entry?.path())).sum()
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    if from.is_dir() {
        std::fs::create_dir(to)?;
        for entry in std::fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    } else if from.exists() {
        std::fs::copy(from, to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_peers_directory_is_named_and_nothing_is_made_there() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("nowhere");
        let said = Held::take(&missing).unwrap_err().to_string();
        assert!(said.contains(&missing.display().to_string()) && said.contains("no such directory"), "{said}");
        assert!(!missing.exists());
        let said = Held::take(dir.path()).unwrap_err().to_string();
        assert!(said.contains("neither a mark"), "{said}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        std::fs::create_dir(dir.path().join("metasrv-1")).unwrap();
        let said = Held::take(dir.path()).unwrap_err().to_string();
        assert!(said.contains("name one peer's directory"), "{said}");
    }

    #[test]
    fn a_directory_in_use_is_refused_with_who_uses_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("snapshots")).unwrap();
        let lock = DirectoryLock::take(dir.path()).unwrap();
        let said = Held::take(dir.path()).unwrap_err();
        assert!(matches!(&said, Error::Locked { .. }), "{said}");
        assert!(said.to_string().contains(&format!("process {}", std::process::id())), "{said}");
        drop(lock);
        let held = Held::take(dir.path()).unwrap();
        assert!(matches!(DirectoryLock::take(dir.path()), Err(Error::Locked { .. })), "nobody starts it meanwhile");
        drop(held);
        DirectoryLock::take(dir.path()).unwrap();
    }
}
