//! What a peer's data directory takes, and what is free beside it, for whoever asks after the peer.
//!
//! Asking costs a look at every file of the directory, so the answer is kept for [`FRESH`]. One look at a time, on a thread for
//! blocking work: a disk that hangs holds that thread and nobody else; those who ask get the last answer after [`WAIT`].
//!
//! It also says whether something large that arrives still leaves the reserve ([`Disk::room_for`]).
//!
//! Limits: [`MAX_FILES`] files are counted.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lake_client::clock;
use lake_proto::v1::DiskUse;

use crate::blocking::blocking;
use crate::files::FreeSpace;
use crate::log::lock;

/// How long an answer is good.
const FRESH: Duration = Duration::from_secs(1);
/// How long a look may take before those who ask get the last answer.
const WAIT: Duration = Duration::from_millis(200);
/// A directory has a few dozen files.
const MAX_FILES: usize = 100_000;
/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// Looks at one directory. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Disk {
    place: Arc<Place>,
    /// When it was looked at last, and what was seen then.
    last: Arc<Mutex<Option<(Instant, DiskUse)>>>,
    /// Held while looking.
    looking: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
struct Place {
    dir: PathBuf,
    reserve_bytes: u64,
    free_space: FreeSpace,
}

impl Disk {
    /// Of the data directory `dir`.
    pub fn new(dir: PathBuf, reserve_bytes: u64, free_space: FreeSpace) -> Self {
        let place = Arc::new(Place { dir, reserve_bytes, free_space });
        Self { place, last: Arc::default(), looking: Arc::default() }
    }

    /// What is used and free. `None` if the directory cannot be looked at, or not soon enough the first time.
    pub async fn usage(&self) -> Option<DiskUse> {
        if let Some((at, seen)) = *lock(&self.last)
            && clock::since(at) < FRESH
        {
            return Some(seen);
        }
        if let Ok(looking) = self.looking.clone().try_lock_owned() {
            let (place, last) = (self.place.clone(), self.last.clone());
            let look = blocking(move || {
                match place.look() {
                    Ok(seen) => *lock(&last) = Some((clock::now(), seen)),
                    Err(error) => {
                        tracing::debug!(dir = %place.dir.display(), %error, "looking what the directory takes")
                    }
                }
                drop(looking);
                Ok(())
            });
            // It goes on by itself if it takes longer.
            let _ = tokio::time::timeout(WAIT, look).await;
        }
        lock(&self.last).map(|(_, seen)| seen)
    }
}

impl Disk {
    /// Whether so many more bytes leave the reserve free. Looks each time.
    ///
    /// # Errors
    /// They do not; in words.
    pub async fn room_for(&self, bytes: u64) -> Result<(), String> {
        let place = self.place.clone();
        let looked = blocking(move || Ok(place.free_space.bytes(&place.dir))).await;
        let free = looked.map_err(|e| format!("looking how much room there is: {e}"))?;
        let (dir, reserve) = (self.place.dir.display(), self.place.reserve_bytes);
        if free >= reserve.saturating_add(bytes) {
            return Ok(());
        }
        Err(format!(
            "disk full: {free} bytes are free where {dir} is, {bytes} are needed and {reserve} are kept in reserve; it goes \
             on by itself once there is room"
        ))
    }
}

impl Place {
    fn look(&self) -> io::Result<DiskUse> {
        Ok(DiskUse {
            data_bytes: taken_by(&self.dir)?,
            free_bytes: self.free_space.bytes(&self.dir),
            reserve_bytes: self.reserve_bytes,
        })
    }
}

/// What the files under `dir` take on the disk. Those that go away meanwhile take nothing.
fn taken_by(dir: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    let mut files = 0;
    let mut directories = vec![dir.to_owned()];
    while let Some(dir) = directories.pop() {
        let entries = match std::fs::read_dir(&dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let metadata = match entry.metadata() {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                metadata => metadata?,
            };
            files += 1;
            if files > MAX_FILES {
                return Err(io::Error::other(format!("it has more than {MAX_FILES} files")));
            }
            if metadata.is_dir() {
                directories.push(entry.path());
            } else {
                bytes += metadata.blocks() * BLOCK_BYTES;
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn files_in_directories_count_and_an_answer_is_kept_for_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::new(dir.path().to_owned(), 7, FreeSpace::new(|_| Ok(1 << 30)));
        assert_eq!(disk.usage().await, Some(DiskUse { data_bytes: 0, free_bytes: 1 << 30, reserve_bytes: 7 }));

        std::fs::create_dir(dir.path().join("log")).unwrap();
        let file = std::fs::File::create(dir.path().join("log/entries")).unwrap();
        std::io::Write::write_all(&mut &file, &[1; 100_000]).unwrap();
        file.sync_all().unwrap();
        assert!(taken_by(dir.path()).unwrap() >= 100_000);
        let (_, seen) = lock(&disk.last).unwrap();
        *lock(&disk.last) = Some((clock::now() + 3600 * FRESH, seen));
        assert_eq!(disk.usage().await, Some(seen), "the last answer is good still");
        *lock(&disk.last) = Some((clock::now().checked_sub(FRESH).unwrap(), seen));
        assert!(disk.usage().await.unwrap().data_bytes >= 100_000);
    }

    #[tokio::test]
    async fn what_would_eat_the_reserve_has_no_room() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::new(dir.path().to_owned(), 30, FreeSpace::new(|_| Ok(100)));
        assert_eq!(disk.room_for(70).await, Ok(()));
        let said = disk.room_for(71).await.unwrap_err();
        assert!(said.contains("disk full: 100 bytes are free") && said.contains("30 are kept"), "{said}");
        assert!(disk.room_for(u64::MAX).await.is_err());
    }

    #[tokio::test]
    async fn a_directory_that_is_not_there_takes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::new(dir.path().join("gone"), 0, FreeSpace::new(|_| Ok(1)));
        assert_eq!(disk.usage().await.map(|seen| seen.data_bytes), Some(0));
    }

    #[tokio::test]
    async fn while_somebody_looks_the_others_get_the_last_answer() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::new(dir.path().to_owned(), 0, FreeSpace::new(|_| Ok(1)));
        let looking = disk.looking.clone().lock_owned().await;
        assert_eq!(disk.usage().await, None);
        drop(looking);
        assert!(disk.usage().await.is_some());
    }
}
