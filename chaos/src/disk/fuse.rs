//! FUSE, spoken directly (the protocol of <https://www.kernel.org/doc/html/latest/filesystems/fuse.html> and
//! `include/uapi/linux/fuse.h`): the file system is one file, mounted over a file, so that ten messages are enough.

use std::fs::File;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

/// Largest write; the protocol's default of pages in one.
const MAX_WRITE: usize = 128 << 10;

/// The file that is served. A failed read or write is an I/O error to whoever asked.
pub(super) trait Served {
    /// Bytes.
    fn size(&self) -> u64;
    /// At most `len` bytes; fewer at the end.
    fn read(&self, at: usize, len: usize) -> Vec<u8>;
    /// False: beyond the end.
    fn write(&self, at: usize, data: &[u8]) -> bool;
    /// Returns once everything written before is durable, or is said to be.
    fn flush(&self);
}

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

/// How long after the file was opened it may take to be mounted.
const MOUNTED_WITHIN: Duration = Duration::from_secs(20);

const EIO: i32 = 5;
const ENOSYS: i32 = 38;

/// Answers the kernel until the file is unmounted.
pub(super) fn serve(mut fuse: File, served: &impl Served) {
    let mut buffer = vec![0; MAX_WRITE + (16 << 10)];
    let mut begun = false;
    let until = Instant::now() + MOUNTED_WITHIN;
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
        let answer = message.get(40..).ok_or(EIO).and_then(|body| answer(opcode, body, served));
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

fn answer(opcode: u32, body: &[u8], served: &impl Served) -> Result<Vec<u8>, i32> {
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
            out.extend_from_slice(&attributes(served.size()));
            Ok(out)
        }
        OPEN => {
            // Direct I/O: nothing of ours is cached by the kernel.
            let mut out = vec![0; 16];
            out[8..12].copy_from_slice(&1u32.to_ne_bytes());
            Ok(out)
        }
        READ => Ok(served.read(u64_at(body, 8) as usize, u32_at(body, 16) as usize)),
        WRITE => {
            let (at, len) = (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
            let data = body.get(40..40 + len).ok_or(EIO)?;
            if !served.write(at, data) {
                return Err(EIO);
            }
            let mut out = vec![0; 8];
            out[..4].copy_from_slice(&(len as u32).to_ne_bytes());
            Ok(out)
        }
        FSYNC => {
            served.flush();
            Ok(Vec::new())
        }
        FLUSH | RELEASE | DESTROY => Ok(Vec::new()),
        _ => Err(ENOSYS),
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

/// A number in a message; 0 behind its end.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok()).map_or(0, u64::from_ne_bytes)
}
