//! Packages of the system that a test needs.

use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Installs packages where that can be done. What is still missing then, the run says.
pub fn install(packages: &[&str], is_missing: impl Fn() -> bool) {
    static ONCE: Mutex<()> = Mutex::new(());
    let _one = ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    let root = rustix::process::geteuid().is_root();
    if !is_missing() || !root || Command::new("apt-get").arg("--version").output().is_err() {
        return;
    }
    let apt = |arguments: &[&str]| {
        let mut apt = Command::new("apt-get");
        apt.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
        let output = apt.output().unwrap();
        println!("apt-get {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    };
    apt(&["update", "-q"]);
    let mut installing = vec!["install", "-q", "-y", "--no-install-recommends"];
    installing.extend(packages);
    apt(&installing);
}
