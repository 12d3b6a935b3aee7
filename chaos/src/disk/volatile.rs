//! A disk whose unsynced writes can be lost: what a power cut leaves of it can be looked at, at any moment.
//!
//! ```text
//!   ext4, mounted -- loop device -- a file of a FUSE file system, served by this process
//! ```
//!
//! The kernel's block layer sends us every write that reaches the "drive", and a flush wherever a file system or an
//! fsync asks for one. A write is answered at once and stands in a volatile cache until the next flush. What a power cut
//! leaves is everything flushed, and of the rest any subset of its 512-byte sectors, which is what a drive promises: it
//! neither keeps the order of unflushed writes nor writes more than one sector at once. Worse drives leave a part of a sector
//! ([`Fate::Torn`]); a file system need not bear that in what is its own.
//!
//! Needs root, `/dev/fuse`, loop devices, and the `mount`, `umount` and `mkfs.ext4` programs. Everything is mounted in
//! the mount namespace of the process, and loop devices clear themselves: in a namespace of its own nothing is left
//! behind, however the process ends.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::fuse::{self, Served};
use super::mount::{mount_loop, run, unmount};
use crate::{IoContext, Result};

/// What a drive writes at once.
const SECTOR: usize = 512;
/// The file system goes without checksums of its own. With them the superblock, two sectors of which are written in place whenever a file is
/// removed, has its checksum in the second one: a power cut in the midst of that leaves one that no kernel mounts, and the journal that would mend it
/// is never read. Whatever else is half written the journal has whole.
const FEATURES: &str = "^metadata_csum,^metadata_csum_seed";
const BLOCK: usize = 4096;

/// What the drive does with a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushes {
    Honest,
    /// It says that it flushed, and did not.
    Lies,
}

/// What becomes of a sector that is not flushed when the power goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Lost,
    /// So many bytes of it were written.
    Torn(usize),
    Survives,
}

impl From<bool> for Fate {
    fn from(survives: bool) -> Self {
        if survives { Self::Survives } else { Self::Lost }
    }
}

/// What the drive holds.
#[derive(Debug)]
pub struct Contents {
    /// What a power cut cannot take.
    durable: Vec<u8>,
    /// What a reader sees.
    current: Vec<u8>,
    /// Writes since the last flush, in order.
    volatile: Vec<(usize, Vec<u8>)>,
    flushes: Flushes,
    /// Writes and flushes so far.
    pub events: u64,
    pub flushed: u64,
}

/// Called at every write and flush, before a flush takes effect.
pub type Watcher = Box<dyn FnMut(&Contents) + Send>;

impl Contents {
    fn new(content: Vec<u8>, flushes: Flushes) -> Self {
        Self { durable: content.clone(), current: content, volatile: Vec::new(), flushes, events: 0, flushed: 0 }
    }

    fn write(&mut self, at: usize, data: &[u8]) -> bool {
        let Some(place) = at.checked_add(data.len()).and_then(|end| self.current.get_mut(at..end)) else {
            return false;
        };
        place.copy_from_slice(data);
        self.volatile.push((at, data.to_owned()));
        true
    }

    fn flush(&mut self) {
        self.flushed += 1;
        if self.flushes == Flushes::Lies {
            return;
        }
        for (at, data) in self.volatile.drain(..) {
            self.durable[at..at + data.len()].copy_from_slice(&data);
        }
    }

    /// How many sectors a power cut could lose now.
    pub fn volatile_sectors(&self) -> usize {
        self.volatile.iter().map(|(_, data)| data.len() / SECTOR).sum()
    }

    /// The newest unflushed write that has blocks of a file which begin with one of these: of each of its blocks that does, the
    /// place of the first of its eight sectors in the order in which [`Contents::after_power_cut`] asks.
    pub fn newest_blocks(&self, beginnings: &[&[u8]]) -> Vec<usize> {
        let mut sectors = 0;
        let mut newest = Vec::new();
        for (at, data) in &self.volatile {
            // A file system's blocks are not where the kernel's requests begin.
            let first = at.next_multiple_of(BLOCK) - at;
            let whole = data.get(first..).unwrap_or_default().chunks_exact(BLOCK).enumerate();
            let begin = whole.filter(|(_, block)| beginnings.iter().any(|beginning| block.starts_with(beginning)));
            let found: Vec<usize> = begin.map(|(n, _)| sectors + (first + n * BLOCK) / SECTOR).collect();
            if !found.is_empty() {
                newest = found;
            }
            sectors += data.len().div_ceil(SECTOR);
        }
        newest
    }

    /// What a power cut now would leave; `fate` says of each unflushed sector, in the order of their writes, whether it
    /// reached the medium.
    pub fn after_power_cut<F: Into<Fate>>(&self, mut fate: impl FnMut() -> F) -> Vec<u8> {
        let mut image = self.durable.clone();
        for (at, data) in &self.volatile {
            for (n, sector) in data.chunks(SECTOR).enumerate() {
                let written = match fate().into() {
                    Fate::Lost => 0,
                    Fate::Torn(bytes) => bytes.min(sector.len()),
                    Fate::Survives => sector.len(),
                };
                let at = at + n * SECTOR;
                image[at..at + written].copy_from_slice(&sector[..written]);
            }
        }
        image
    }
}

struct Shared {
    contents: Contents,
    watcher: Option<Watcher>,
    /// How long a flush takes, beyond nothing, and how many took that long.
    flush_takes: Duration,
    slow_flushes: u64,
}

impl Shared {
    fn look(&mut self) {
        self.contents.events += 1;
        let Shared { contents, watcher, .. } = self;
        if let Some(watcher) = watcher {
            watcher(contents);
        }
    }
}

struct Drive {
    size: u64,
    shared: Mutex<Shared>,
}

impl Drive {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Served for Drive {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let shared = self.lock();
        let current = &shared.contents.current;
        let end = at.saturating_add(len).min(current.len());
        current.get(at.min(end)..end).unwrap_or_default().to_owned()
    }

    fn write(&self, at: usize, data: &[u8]) -> bool {
        let mut shared = self.lock();
        let written = shared.contents.write(at, data);
        if written {
            shared.look();
        }
        written
    }

    fn flush(&self) {
        let takes = self.lock().flush_takes;
        std::thread::sleep(takes);
        let mut shared = self.lock();
        if !takes.is_zero() {
            shared.slow_flushes += 1;
        }
        shared.look();
        shared.contents.flush();
    }
}

/// The disk with an ext4 file system on it, mounted.
pub struct VolatileDisk {
    drive: Arc<Drive>,
    server: Option<std::thread::JoinHandle<()>>,
    device: PathBuf,
    mounted: PathBuf,
}

impl std::fmt::Debug for VolatileDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolatileDisk").field("mounted", &self.mounted).finish_non_exhaustive()
    }
}

impl VolatileDisk {
    /// A disk with this image on it, mounted at `<dir>/mounted`.
    ///
    /// # Errors
    /// As [`VolatileDisk::mount_at`].
    pub fn mount(dir: &Path, image: Vec<u8>, flushes: Flushes) -> Result<Self> {
        Self::mount_at(&dir.join("device"), &dir.join("mounted"), image, flushes)
    }

    /// A disk with this image on it: its drive is the file `device`, its file system is mounted at `mounted`.
    ///
    /// # Errors
    /// Not root, no FUSE, no loop device, or no sound file system in the image.
    pub fn mount_at(device: &Path, mounted: &Path, image: Vec<u8>, flushes: Flushes) -> Result<Self> {
        let doing = || format!("mounting a disk at {}", mounted.display());
        File::create(device).doing(doing)?;
        std::fs::create_dir_all(mounted).doing(doing)?;
        let size = image.len() as u64;
        let contents = Contents::new(image, flushes);
        let shared = Mutex::new(Shared { contents, watcher: None, flush_takes: Duration::ZERO, slow_flushes: 0 });
        let drive = Arc::new(Drive { size, shared });
        let channel = File::options().read(true).write(true).open("/dev/fuse").doing(doing)?;
        let mut mount = Command::new("mount");
        mount
            .args(["-i", "-t", "fuse", "-o", "fd=0,rootmode=100600,user_id=0,group_id=0", "volatile-disk"])
            .arg(device)
            .stdin(Stdio::from(channel.try_clone().doing(doing)?));
        let served = drive.clone();
        // It ends when the file is unmounted, or is not mounted in time.
        let server = std::thread::spawn(move || fuse::serve(channel, &*served));
        let mut disk = Self { drive, server: None, device: device.to_owned(), mounted: mounted.to_owned() };
        run(&mut mount)?;
        disk.server = Some(server);
        mount_loop(&disk.device, &disk.mounted)?;
        Ok(disk)
    }

    /// Where the file system is.
    pub fn path(&self) -> &Path {
        &self.mounted
    }

    /// Has every write and flush from now on looked at.
    pub fn watch(&self, watcher: Watcher) {
        self.drive.lock().watcher = Some(watcher);
    }

    /// From now on a flush takes so long.
    pub fn slow_down(&self, flush_takes: Duration) {
        self.drive.lock().flush_takes = flush_takes;
    }

    /// How many flushes have been slow so far.
    pub fn slow_flushes(&self) -> u64 {
        self.drive.lock().slow_flushes
    }

    /// How many sectors a power cut could lose now.
    pub fn volatile_sectors(&self) -> usize {
        self.drive.lock().contents.volatile_sectors()
    }

    /// The power goes: what is left on the medium. `survives` says of each unflushed sector whether it got there. Whoever had
    /// files open on the disk must be dead already.
    #[must_use]
    pub fn cut_power(self, survives: impl FnMut() -> bool) -> Vec<u8> {
        self.drive.lock().contents.after_power_cut(survives)
    }
}

impl Drop for VolatileDisk {
    fn drop(&mut self) {
        {
            let mut shared = self.drive.lock();
            shared.watcher = None;
            shared.flush_takes = Duration::ZERO;
        }
        unmount(&self.mounted);
        unmount(&self.device);
        if let Some(server) = self.server.take() {
            // It has no result.
            let _ = server.join();
        }
    }
}

/// An empty ext4 file system of this size.
///
/// # Errors
/// `mkfs.ext4` is missing or fails.
pub fn empty_file_system(dir: &Path, bytes: u64) -> Result<Vec<u8>> {
    let path = dir.join("empty.img");
    let doing = || format!("making a file system in {}", path.display());
    File::create(&path).and_then(|file| file.set_len(bytes)).doing(doing)?;
    run(Command::new("mkfs.ext4")
        .args(["-q", "-F", "-m", "0", "-b", "4096", "-O", FEATURES])
        .args(["-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"])
        .arg(&path))?;
    let image = std::fs::read(&path).doing(doing)?;
    std::fs::remove_file(&path).doing(doing)?;
    Ok(image)
}

/// An image, mounted on an honest disk: what a machine finds when it starts after a power cut.
#[derive(Debug)]
pub struct MountedImage {
    file: PathBuf,
    mounted: PathBuf,
}

impl MountedImage {
    /// # Errors
    /// When there is no sound file system on it, which flushes that were answered rule out.
    pub fn new(dir: &Path, image: &[u8]) -> Result<Self> {
        let (path, mounted) = (dir.join("image"), dir.join("after"));
        let doing = || format!("mounting the image {}", path.display());
        std::fs::create_dir_all(&mounted).doing(doing)?;
        let file = File::create(&path).doing(doing)?;
        file.set_len(image.len() as u64).doing(doing)?;
        for (n, block) in image.chunks(BLOCK).enumerate() {
            if block.iter().any(|byte| *byte != 0) {
                file.write_all_at(block, (n * BLOCK) as u64).doing(doing)?;
            }
        }
        drop(file);
        mount_loop(&path, &mounted)?;
        Ok(Self { file: path, mounted })
    }

    /// Where the file system is.
    pub fn path(&self) -> &Path {
        &self.mounted
    }
}

impl Drop for MountedImage {
    fn drop(&mut self) {
        unmount(&self.mounted);
        // Left behind, it is only a file in a temporary directory.
        let _ = std::fs::remove_file(&self.file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the superblock is, and in it the features that only writers must know.
    const SUPERBLOCK: usize = 1024;
    const RO_FEATURES: usize = SUPERBLOCK + 0x64;
    const METADATA_CSUM: u32 = 0x400;

    #[test]
    fn a_torn_sector_has_its_beginning_and_what_was_there_before() {
        let mut disk = Contents::new(vec![0; 3 * BLOCK], Flushes::Honest);
        assert!(disk.write(0, &[1; SECTOR]));
        disk.flush();
        let mut record = vec![2; 2 * BLOCK];
        record[..6].copy_from_slice(b"record");
        assert!(disk.write(0, &[3; SECTOR]) && disk.write(BLOCK, &record) && disk.write(0, &[4; SECTOR]));
        assert!(disk.newest_blocks(&[b"nothing"]).is_empty());
        let [torn] = disk.newest_blocks(&[b"nothing", b"record"])[..] else { panic!("there is one") };
        assert_eq!(torn, 1, "behind one sector");

        let mut n = 0;
        let image = disk.after_power_cut(|| {
            n += 1;
            if n - 1 == torn { Fate::Torn(100) } else { Fate::Lost }
        });
        assert_eq!(n, disk.volatile_sectors());
        let there =
            [vec![1; SECTOR], vec![0; BLOCK - SECTOR], record[..100].to_owned(), vec![0; 2 * BLOCK - 100]].concat();
        assert!(image == there);
        assert!(disk.after_power_cut(|| true) == disk.current && disk.after_power_cut(|| false) == disk.durable);
    }

    #[test]
    fn a_superblock_of_which_one_sector_was_written_is_still_one() {
        let dir = tempfile::tempdir().unwrap();
        if Command::new("mkfs.ext4").arg("-V").stderr(Stdio::null()).status().is_err() {
            println!("skipped: mkfs.ext4 is not there");
            return;
        }
        let image = empty_file_system(dir.path(), 16 << 20).unwrap();
        let features = u32::from_le_bytes(image[RO_FEATURES..RO_FEATURES + 4].try_into().unwrap());
        assert_eq!(features & METADATA_CSUM, 0, "it has a checksum over both sectors: {features:#x}");
    }
}
