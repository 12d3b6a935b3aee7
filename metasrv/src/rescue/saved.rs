//! A snapshot in a file of its own: the bytes that a peer sends ([`crate::services::snapshots`]), and what is in them.
//!
//! A file is written under a temporary name beside its own, read again whole (checksums, the end, the state's hash), synced
//! and renamed: only then does it exist.
//!
//! Failure cases: something is there already, the disk, a stream that broke or ended early: nothing is left of it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::Summary;
use crate::error::Error;
use crate::files;
use crate::raft::state_machine::Applied;
use crate::snapshot::{self, SnapshotError};
use crate::state::FEATURE_LEVEL;

/// A whole snapshot that was read.
#[derive(Debug)]
pub struct Saved {
    pub cluster_id: String,
    /// Of the file.
    pub bytes: u64,
    pub applied: Applied,
}

impl Saved {
    /// What is told of it.
    pub fn summary(&self) -> Summary {
        Summary::from(&self.applied)
    }
}

/// Reads and checks a file. Blocks.
///
/// # Errors
/// It cannot be read, is damaged or not whole, or holds what this build does not know.
pub fn read(path: &Path) -> Result<Saved, Error> {
    read_named(path, path)
}

fn read_named(path: &Path, name: &Path) -> Result<Saved, Error> {
    let io_error = |source| Error::io(format!("reading the saved snapshot {}", name.display()))(source);
    let bytes = std::fs::metadata(path).map_err(io_error)?.len();
    match snapshot::read(path, FEATURE_LEVEL) {
        Ok(loaded) => Ok(Saved { cluster_id: loaded.cluster_id.clone(), bytes, applied: loaded.into() }),
        Err(SnapshotError::Io { source, .. }) => Err(io_error(source)),
        Err(SnapshotError::Damaged { what, .. }) => {
            let what = format!("it is damaged ({what}): use another copy of it, or save one anew");
            Err(Error::Saved { path: name.to_owned(), what })
        }
        Err(SnapshotError::Newer { what, .. }) => Err(Error::Saved { path: name.to_owned(), what }),
    }
}

/// A file that is being written.
#[derive(Debug)]
pub struct Writing {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    finished: bool,
}

impl Writing {
    /// Begins one. Blocks, as do the others.
    ///
    /// # Errors
    /// Something is there already, or the directory cannot be written.
    pub fn begin(path: &Path) -> Result<Self, Error> {
        if path.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: path.to_owned() });
        }
        let name = path.file_name().map(|name| name.display().to_string()).unwrap_or_default();
        let temporary = path.with_file_name(format!("{name}.saving-{}", uuid::Uuid::new_v4().simple()));
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary);
        let file = file.map_err(Error::io(format!("making {}", temporary.display())))?;
        Ok(Self { path: path.to_owned(), temporary, file, finished: false })
    }

    /// Adds what came.
    ///
    /// # Errors
    /// What the disk says.
    pub fn add(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(Error::io(format!("writing {}", self.temporary.display())))
    }

    /// Checks what was written and gives it its name.
    ///
    /// # Errors
    /// It is not a whole snapshot, or the disk failed.
    pub fn finish(mut self) -> Result<Saved, Error> {
        let doing = || format!("writing {}", self.path.display());
        self.file.sync_all().map_err(Error::io(doing()))?;
        let saved = read_named(&self.temporary, &self.path)?;
        if self.path.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: self.path.clone() });
        }
        std::fs::rename(&self.temporary, &self.path).map_err(Error::io(doing()))?;
        self.finished = true;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        files::sync_dir(parent.unwrap_or(Path::new("."))).map_err(Error::io(doing()))?;
        Ok(saved)
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
