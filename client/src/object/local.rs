//! Changes on a local file system, which cannot put conditionally: under a lock of the directory, each synced.

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::Path as FsPath;
use std::time::Instant;

use lake_proto::kv::Revision;
use object_store::UpdateVersion;

use super::Put;
use super::failure::failed;
use super::stored::Stored;
use crate::backoff::Backoff;

/// Whoever holds a lock on this file changes the entries of a local directory.
pub(super) const LOCK_FILE: &str = "lock";

/// Puts a file in the place of one with this count, and syncs it.
pub(super) fn replace(file: &FsPath, key: &str, count: Option<Revision>, after: &[u8]) -> std::io::Result<Put> {
    let damaged = |why| std::io::Error::other(format!("{}: it is no entry of lake's metadata: {why}", file.display()));
    let found = match std::fs::read(file) {
        Ok(bytes) => {
            let version = UpdateVersion { e_tag: None, version: None };
            Some(Stored::decode(key, &bytes.into(), version).map_err(damaged)?.count)
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    if found != count {
        return Ok(Put::Another);
    }
    let dir = file.parent().ok_or_else(|| damaged("it has no directory"))?;
    make_dir(dir)?;
    let mut aside = file.as_os_str().to_owned();
    // A listing leaves out what is named so.
    aside.push("#1");
    let mut unfinished = File::create(&aside)?;
    unfinished.write_all(after)?;
    unfinished.sync_all()?;
    std::fs::rename(&aside, file)?;
    File::open(dir)?.sync_all()?;
    Ok(Put::Done)
}

/// Makes a directory and those above it, and syncs the names of those that were not there.
pub(super) fn make_dir(dir: &FsPath) -> std::io::Result<()> {
    let made: Vec<_> = dir.ancestors().take_while(|dir| !dir.exists()).map(FsPath::to_owned).collect();
    std::fs::create_dir_all(dir)?;
    for above in made.iter().filter_map(|dir| dir.parent()) {
        File::open(above)?.sync_all()?;
    }
    Ok(())
}

/// Locks a file until the handle is dropped.
pub(super) async fn lock(path: &FsPath, by: Instant) -> object_store::Result<File> {
    let file = File::options().append(true).open(path).map_err(failed)?;
    let mut backoff = Backoff::default();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(failed(e)),
            Err(TryLockError::WouldBlock) => {}
        }
        if !backoff.wait(by).await {
            return Err(failed(format!("{} is locked by others all the time", path.display())));
        }
    }
}
