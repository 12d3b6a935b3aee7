//! One supervisor per directory: a locked file with the holder's pid in it.
//!
//! The kernel releases the lock however the holder ends, so that a killed supervisor leaves nothing to clean up.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::{Error, IoContext, Result};

/// The directory is this process's until dropped.
#[derive(Debug)]
pub struct DirLock {
    file: File,
}

impl DirLock {
    /// Takes the directory, made if it is not there.
    ///
    /// # Errors
    /// [`Error::DirectoryInUse`] with the holder's pid, or what the file system refused.
    pub fn take(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).doing(|| format!("making the directory {}", dir.display()))?;
        let path = dir.join("lock");
        let doing = || format!("locking {}", path.display());
        let mut file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).doing(doing)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut text = String::new();
                // The pid is for the message only: without it the message is poorer, not wrong.
                let _ = file.read_to_string(&mut text);
                return Err(Error::DirectoryInUse { dir: dir.to_owned(), pid: text.trim().parse().ok() });
            }
            Err(e) => return Err(Error::Io { doing: doing(), source: e.into() }),
        }
        file.set_len(0).and_then(|()| write!(file, "{}", std::process::id())).doing(doing)?;
        Ok(Self { file })
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        // Closing alone would leave it locked while a child that is just being spawned has a copy of the descriptor.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("made/on/demand");
        let lock = DirLock::take(&dir).unwrap();
        let refused = DirLock::take(&dir).unwrap_err();
        let message = refused.to_string();
        assert!(message.contains(&format!("(pid {})", std::process::id())), "{message}");
        assert!(message.contains(&dir.display().to_string()), "{message}");
        drop(lock);
        DirLock::take(&dir).unwrap();
    }
}
