//! Mounting and unmounting, by the programs that do it. Everything is mounted in the mount namespace of this process.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Error, IoContext, Result};

/// How long to look for a free loop device.
const LOOP_DEVICE_WITHIN: Duration = Duration::from_secs(20);
/// How long what was mounted may be busy.
const UNMOUNTED_WITHIN: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(30);

/// Mounts the file system in a file. Loop devices are one pool for the whole machine: between finding a free one and taking
/// it, another may be quicker.
pub(super) fn mount_loop(file: &Path, at: &Path) -> Result<()> {
    let until = Instant::now() + LOOP_DEVICE_WITHIN;
    loop {
        let mut mount = Command::new("mount");
        mount.args(["-t", "ext4", "-o", "loop,nodiscard"]).arg(file).arg(at);
        match run(&mut mount) {
            Err(Error::Io { source, .. }) if source.to_string().contains("loop device") && Instant::now() < until => {
                std::thread::sleep(LOOK_AGAIN);
            }
            result => return result,
        }
    }
}

/// An empty file system in memory, of this size.
pub(super) fn mount_tmpfs(bytes: u64, at: &Path) -> Result<()> {
    let mut mount = Command::new("mount");
    run(mount.args(["-t", "tmpfs", "-o", &format!("size={bytes},mode=0755"), "lake-chaos"]).arg(at))
}

/// Runs a program to its end.
pub(super) fn run(command: &mut Command) -> Result<()> {
    let doing = format!("running {command:?}");
    let output = command.stdout(Stdio::null()).stderr(Stdio::piped()).output().doing(|| doing.clone())?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(Error::Io { doing, source: io::Error::other(format!("{}: {}", output.status, said.trim())) })
        }
    }
}

/// Files that were just closed may keep it busy for a moment; after that it goes as soon as nobody uses it.
pub(super) fn unmount(path: &Path) {
    let until = Instant::now() + UNMOUNTED_WITHIN;
    loop {
        let done = Command::new("umount").arg(path).stderr(Stdio::null()).status().is_ok_and(|s| s.success());
        if done {
            return;
        }
        if Instant::now() > until {
            // It goes with the mount namespace at the latest.
            let _ = Command::new("umount").arg("-l").arg(path).stderr(Stdio::null()).status();
            return;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}
