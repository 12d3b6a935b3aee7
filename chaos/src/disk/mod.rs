//! Disks that can fail: small ones that fill up, and one that loses what was not flushed.
//!
//! - [`volatile`]: a disk whose unsynced writes are lost with the power, and whose flushes can be slow; [`fuse`]: how it is
//!   served to the kernel;
//! - [`mount`]: the programs that mount and unmount.
//!
//! All of it needs root, and a mount namespace of the process's own, in which nothing is left behind however it ends.

mod fuse;
mod mount;
pub mod small;
pub mod volatile;

use std::process::{Command, Stdio};

/// What this machine lacks for the disks here, if anything.
pub fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root".to_owned());
    }
    for path in ["/dev/fuse", "/dev/loop-control"] {
        if let Err(e) = std::fs::File::options().read(true).write(true).open(path) {
            return Some(format!("{path}: {e}"));
        }
    }
    ["unshare", "mount", "umount", "mkfs.ext4"].into_iter().find_map(|program| {
        let found = Command::new(program).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status();
        found.err().map(|e| format!("{program}: {e}"))
    })
}
