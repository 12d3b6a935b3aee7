//! A disk whose unsynced writes can be lost: what a power cut leaves of it can be looked at, at any moment.
//!
//! ```text
//!   ext4, mounted -- loop device -- a file of a FUSE file system, which is this module
//! ```
//!
//! The kernel's block layer sends us every write that reaches the "drive", and a flush wherever a file system or an
//! fsync asks for one. A write is answered at once and stands in a volatile cache until the next flush. What a power cut
//! leaves is everything flushed, and of the rest any subset of its 512-byte sectors, which is what a drive promises: it
//! neither keeps the order of unflushed writes nor writes more than one sector at once.
//!
//! FUSE is spoken directly (the protocol of <https://www.kernel.org/doc/html/latest/filesystems/fuse.html> and
//! `include/uapi/linux/fuse.h`): the file system is one file, mounted over a file, so that ten messages are enough.
//!
//! Needs root, `/dev/fuse`, loop devices, and the `mount`, `umount` and `mkfs.ext4` programs. Everything is mounted in
//! the mount namespace of the process, and loop devices clear themselves: in a namespace of its own nothing is left
//! behind, however the process ends.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a drive writes at once.
const SECTOR: usize = 512;
/// Largest FUSE write; the protocol's default of pages in one.
const MAX_WRITE: usize = 128 << 10;

/// What the drive does with a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushes {
    Honest,
    /// It says that it flushed, and did not.
    Lies,
}

/// What the drive holds.
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
        let Some(place) = self.current.get_mut(at..at + data.len()) else { return false };
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

    /// What a power cut now would leave; `survives` says of each unflushed sector, in the order of their writes, whether
    /// it reached the medium.
    pub fn after_power_cut(&self, mut survives: impl FnMut() -> bool) -> Vec<u8> {
        let mut image = self.durable.clone();
        for (at, data) in &self.volatile {
            for (n, sector) in data.chunks(SECTOR).enumerate() {
                if survives() {
                    let at = at + n * SECTOR;
                    image[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        image
    }
}

struct Shared {
    contents: Contents,
    watcher: Option<Watcher>,
}

/// The disk with an ext4 file system on it, mounted.
pub struct VolatileDisk {
    shared: Arc<Mutex<Shared>>,
    server: Option<std::thread::JoinHandle<()>>,
    device: PathBuf,
    mounted: PathBuf,
}

impl VolatileDisk {
    /// A disk with this image on it, under `dir`.
    pub fn mount(dir: &Path, image: Vec<u8>, flushes: Flushes) -> Self {
        let device = dir.join("device");
        let mounted = dir.join("mounted");
        File::create(&device).unwrap();
        std::fs::create_dir_all(&mounted).unwrap();
        let size = image.len() as u64;
        let shared = Arc::new(Mutex::new(Shared { contents: Contents::new(image, flushes), watcher: None }));
        let fuse = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let child = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o", "fd=0,rootmode=100600,user_id=0,group_id=0", "volatile-disk"])
            .arg(&device)
            .stdin(Stdio::from(fuse.try_clone().unwrap()))
            .spawn()
            .unwrap();
        let served = shared.clone();
        let server = std::thread::spawn(move || serve(fuse, size, &served));
        let mut this = Self { shared, server: Some(server), device, mounted };
        wait(child, "mounting the FUSE file");
        this.mount_ext4();
        this
    }

    fn mount_ext4(&mut self) {
        mount_loop(&self.device, &self.mounted).unwrap();
    }

    /// Where the file system is.
    pub fn path(&self) -> &Path {
        &self.mounted
    }

    /// Has every write and flush from now on looked at.
    pub fn watch(&self, watcher: Watcher) {
        self.shared.lock().unwrap().watcher = Some(watcher);
    }
}

impl Drop for VolatileDisk {
    fn drop(&mut self) {
        self.shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner).watcher = None;
        unmount(&self.mounted);
        unmount(&self.device);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// An empty ext4 file system of this size.
pub fn empty_file_system(dir: &Path, bytes: u64) -> Vec<u8> {
    let path = dir.join("empty.img");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    run(Command::new("mkfs.ext4")
        .args(["-q", "-F", "-m", "0", "-b", "4096", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"])
        .arg(&path));
    let image = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    image
}

/// An image, mounted on an honest disk: what a machine finds when it starts after a power cut.
pub struct MountedImage {
    file: PathBuf,
    mounted: PathBuf,
}

impl MountedImage {
    /// # Errors
    /// When there is no sound file system on it, which flushes that were answered rule out.
    pub fn new(dir: &Path, image: &[u8]) -> Result<Self, String> {
        let (path, mounted) = (dir.join("image"), dir.join("after"));
        std::fs::create_dir_all(&mounted).unwrap();
        let file = File::create(&path).unwrap();
        file.set_len(image.len() as u64).unwrap();
        for (n, block) in image.chunks(4096).enumerate() {
            if block.iter().any(|byte| *byte != 0) {
                file.write_all_at(block, n as u64 * 4096).unwrap();
            }
        }
        drop(file);
        mount_loop(&path, &mounted)?;
        Ok(Self { file: path, mounted })
    }

    pub fn path(&self) -> &Path {
        &self.mounted
    }
}

impl Drop for MountedImage {
    fn drop(&mut self) {
        unmount(&self.mounted);
        let _ = std::fs::remove_file(&self.file);
    }
}

/// Loop devices are one pool for the whole machine: between finding a free one and taking it, another may be quicker.
fn mount_loop(file: &Path, at: &Path) -> Result<(), String> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let mut mount = Command::new("mount");
        mount.args(["-t", "ext4", "-o", "loop,nodiscard"]).arg(file).arg(at);
        let output = mount.stdin(Stdio::null()).output().unwrap();
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !said.contains("loop device") || Instant::now() > until {
            return Err(said);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn run(command: &mut Command) {
    let child = command.stdin(Stdio::null()).spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    wait(child, &format!("{command:?}"));
}

fn wait(mut child: std::process::Child, what: &str) {
    let status = child.wait().unwrap();
    assert!(status.success(), "{what}: {status}");
}

/// Files that were just closed by other threads may keep it busy for a moment.
fn unmount(path: &Path) {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let done = Command::new("umount").arg(path).stderr(Stdio::null()).status().is_ok_and(|s| s.success());
        if done {
            return;
        }
        if Instant::now() > until {
            let _ = Command::new("umount").arg("-l").arg(path).status();
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

// ---- the FUSE file ------------------------------------------------------------------------------------------------

const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const DESTROY: u32 = 38;
const BATCH_FORGET: u32 = 42;

const EIO: i32 = 5;
const ENOSYS: i32 = 38;

fn serve(mut fuse: File, size: u64, shared: &Mutex<Shared>) {
    let mut buffer = vec![0; MAX_WRITE + (16 << 10)];
    let mut begun = false;
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let len = match fuse.read(&mut buffer) {
            Ok(len) => len,
            // ENOENT: the request was taken back; EINTR, EAGAIN: again. Everything else: unmounted.
            Err(e) if matches!(e.raw_os_error(), Some(2 | 4 | 11)) => continue,
            // EPERM: not mounted yet.
            Err(e) if e.raw_os_error() == Some(1) && !begun && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(_) => return,
        };
        begun = true;
        let message = &buffer[..len];
        let (opcode, unique) = (u32_at(message, 4), u64_at(message, 8));
        if matches!(opcode, FORGET | BATCH_FORGET | INTERRUPT) {
            continue;
        }
        let answer = answer(opcode, &message[40..], size, shared);
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut reply = Vec::with_capacity(16 + body.len());
        reply.extend_from_slice(&(16 + body.len() as u32).to_ne_bytes());
        reply.extend_from_slice(&error.to_ne_bytes());
        reply.extend_from_slice(&unique.to_ne_bytes());
        reply.extend_from_slice(&body);
        // Whoever asked may have gone meanwhile.
        let _ = fuse.write(&reply);
        if opcode == DESTROY {
            return;
        }
    }
}

fn answer(opcode: u32, body: &[u8], size: u64, shared: &Mutex<Shared>) -> Result<Vec<u8>, i32> {
    let mut shared = shared.lock().unwrap();
    match opcode {
        INIT => {
            let mut out = Vec::new();
            // Version 7.31, read-ahead, flags (big writes), background and congestion limits, largest write, granularity.
            for word in [7, 31, 0, 1 << 5, 12 | 9 << 16, MAX_WRITE as u32, 1] {
                out.extend_from_slice(&u32::to_ne_bytes(word));
            }
            out.resize(64, 0);
            Ok(out)
        }
        GETATTR | SETATTR => {
            let mut out = vec![0; 16];
            out.extend_from_slice(&attributes(size));
            Ok(out)
        }
        OPEN => {
            // Direct I/O: nothing of ours is cached by the kernel.
            let mut out = vec![0; 16];
            out[8..12].copy_from_slice(&1u32.to_ne_bytes());
            Ok(out)
        }
        READ => {
            let (at, len) = (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
            let current = &shared.contents.current;
            Ok(current.get(at.min(current.len())..(at + len).min(current.len())).unwrap_or_default().to_owned())
        }
        WRITE => {
            let (at, len) = (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
            if !shared.contents.write(at, &body[40..40 + len]) {
                return Err(EIO);
            }
            look(&mut shared);
            let mut out = vec![0; 8];
            out[..4].copy_from_slice(&(len as u32).to_ne_bytes());
            Ok(out)
        }
        FSYNC => {
            look(&mut shared);
            shared.contents.flush();
            Ok(Vec::new())
        }
        FLUSH | RELEASE | DESTROY => Ok(Vec::new()),
        _ => Err(ENOSYS),
    }
}

fn look(shared: &mut Shared) {
    shared.contents.events += 1;
    let Shared { contents, watcher } = shared;
    if let Some(watcher) = watcher {
        watcher(contents);
    }
}

/// A regular file of root's.
fn attributes(size: u64) -> Vec<u8> {
    let mut out = Vec::new();
    for number in [1, size, size / 512, 0, 0, 0] {
        out.extend_from_slice(&u64::to_ne_bytes(number));
    }
    // Nanoseconds of three times, mode, links, owner, group, device, block size, flags.
    for number in [0, 0, 0, 0o100_600, 1, 0, 0, 0, 4096, 0] {
        out.extend_from_slice(&u32::to_ne_bytes(number));
    }
    out
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}
