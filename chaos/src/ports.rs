//! Ports for a supervisor's children, reserved so that no two supervisors take the same one.
//!
//! Binding port 0 and giving the number away does not do: between the two, the kernel hands the port to somebody else.
//! Three things together make a port safe: it lies outside the range that the kernel gives to outgoing connections; a
//! locked file under the temporary directory says that it is taken, until the [`Port`] is dropped or its process ends;
//! and nobody listens on it. The lock comes first, so that looking whether a port is free never disturbs its owner.

use std::fs::{self, File, OpenOptions};
use std::net::{Ipv4Addr, TcpListener};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use rand::Rng;
use rustix::fs::{FlockOperation, flock};

use crate::{Error, IoContext, Result};

/// How many candidates are looked at before giving up.
const MAX_CANDIDATES: usize = 4_000;
/// Ports below are left to the services of this machine.
const LOWEST: u16 = 10_000;
/// The range of outgoing ports when the kernel does not say: Linux's default.
const DEFAULT_EPHEMERAL: RangeInclusive<u16> = 32_768..=60_999;

/// A port that is this process's to give to a child, until dropped.
#[derive(Debug)]
pub struct Port {
    number: u16,
    /// Locked.
    lock: File,
    /// Where that is.
    path: PathBuf,
}

impl Drop for Port {
    fn drop(&mut self) {
        // While it is locked: whoever locks it next finds that it is there no more.
        if is_at(&self.lock, &self.path) {
            // One that stays is the next one's.
            let _ = fs::remove_file(&self.path);
        }
        // Closing alone would leave it locked while a child that is just being spawned has a copy of the descriptor.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

impl Port {
    /// The number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// `127.0.0.1:<number>`.
    pub fn loopback(&self) -> String {
        format!("{}:{}", Ipv4Addr::LOCALHOST, self.number)
    }

    /// Whether nobody listens on it right now.
    pub fn is_free(&self) -> bool {
        is_bindable(self.number)
    }
}

/// Reserves some free port.
///
/// # Errors
/// [`Error::NoFreePort`], or that the directory of the lock files cannot be made.
pub fn reserve() -> Result<Port> {
    let dir = lock_dir()?;
    let ephemeral = ephemeral_range();
    let candidates = candidates(&ephemeral);
    let count = candidates.iter().map(|r| usize::from(r.end() - r.start()) + 1).sum::<usize>();
    let first = if count == 0 { 0 } else { rand::rng().random_range(0..count) };
    let tried = count.min(MAX_CANDIDATES);
    (0..tried)
        .filter_map(|i| candidates.iter().cloned().flatten().nth((first + i) % count))
        .find_map(|number| try_reserve(&dir, number))
        .ok_or(Error::NoFreePort { low: *ephemeral.start(), high: *ephemeral.end(), tried })
}

/// Reserves this port, if it is free.
///
/// # Errors
/// That the directory of the lock files cannot be made.
pub fn reserve_exactly(number: u16) -> Result<Option<Port>> {
    Ok(try_reserve(&lock_dir()?, number))
}

fn try_reserve(dir: &Path, number: u16) -> Option<Port> {
    // A lock file that another user made cannot be opened: that port is theirs.
    let path = dir.join(format!("{number}.lock"));
    let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&path).ok()?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
    // Whoever had it may have removed the file in between.
    let is_there = is_at(&lock, &path);
    let port = Port { number, lock, path };
    (is_there && port.is_free()).then_some(port)
}

/// Whether a path still leads to this file.
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let identity = |of: &fs::Metadata| (of.dev(), of.ino());
    matches!((file.metadata(), fs::metadata(path)), (Ok(file), Ok(there)) if identity(&file) == identity(&there))
}

fn is_bindable(number: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok()
}

/// One directory for every supervisor on this machine. The files in it are empty, at most one per port, and go with their ports
/// unless a process is killed.
fn lock_dir() -> Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt;

    let dir = std::env::temp_dir().join("lake-ports");
    if !dir.is_dir() {
        fs::create_dir_all(&dir).doing(|| format!("making {} for the port locks", dir.display()))?;
        // Open to every user of the machine, like the temporary directory itself. Fails only if another made it.
        let _ = fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777));
    }
    Ok(dir)
}

fn ephemeral_range() -> RangeInclusive<u16> {
    fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| parse_range(&text))
        .unwrap_or(DEFAULT_EPHEMERAL)
}

fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut numbers = text.split_whitespace().map(str::parse);
    let (low, high) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    (low <= high).then_some(low..=high)
}

/// What lies above [`LOWEST`] and outside the range of outgoing ports.
fn candidates(ephemeral: &RangeInclusive<u16>) -> Vec<RangeInclusive<u16>> {
    let below = LOWEST..=ephemeral.start().saturating_sub(1);
    let above = ephemeral.end().saturating_add(1).max(LOWEST)..=u16::MAX;
    let above = if *ephemeral.end() == u16::MAX { None } else { Some(above) };
    [Some(below), above].into_iter().flatten().filter(|r| !r.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::{Duration, Instant};

    use super::*;

    /// A child that another test spawns has a copy of what was open then, for a moment. Waits until it has let go of it.
    fn in_the_end<T>(mut look: impl FnMut() -> Option<T>) -> T {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < until, "it is not free");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_reserved_port_is_nobody_elses() {
        let ports: Vec<Port> = (0..50).map(|_| reserve().unwrap()).collect();
        let numbers: HashSet<u16> = ports.iter().map(Port::number).collect();
        assert_eq!(numbers.len(), ports.len());
        let ephemeral = ephemeral_range();
        assert!(numbers.iter().all(|n| !ephemeral.contains(n)));
        assert!(reserve_exactly(ports[0].number()).unwrap().is_none());
    }

    #[test]
    fn a_port_is_free_again_once_dropped() {
        let port = reserve().unwrap();
        let (number, path) = (port.number(), port.path.clone());
        assert!(path.exists());
        drop(port);
        assert!(!path.exists());
        assert_eq!(in_the_end(|| reserve_exactly(number).unwrap()).number(), number);
    }

    #[test]
    fn a_port_somebody_listens_on_is_not_free() {
        let port = reserve().unwrap();
        let listener = TcpListener::bind(port.loopback()).unwrap();
        assert!(!port.is_free() && reserve_exactly(port.number()).unwrap().is_none() && port.path.exists());
        drop(listener);
        in_the_end(|| port.is_free().then_some(()));
    }

    #[test]
    fn candidates_avoid_the_outgoing_range() {
        assert_eq!(parse_range("32768\t60999\n"), Some(32_768..=60_999));
        assert_eq!(parse_range("60999 32768"), None);
        assert_eq!(candidates(&(32_768..=60_999)), vec![10_000..=32_767, 61_000..=65_535]);
        assert_eq!(candidates(&(1_024..=65_535)), Vec::<RangeInclusive<u16>>::new());
        assert_eq!(candidates(&(1_024..=60_999)), vec![61_000..=65_535]);
    }
}
