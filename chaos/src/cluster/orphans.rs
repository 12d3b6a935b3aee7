//! Children of an earlier supervisor that are not gone yet.
//!
//! They end by themselves, soon after their supervisor; until then they hold their ports and data. They are known by
//! what `cluster.json` says of this very directory, and by their command line, so that a pid used anew by something
//! else is left alone.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::manifest::Entry;
use crate::{Error, Result, probe};

/// How long children may take to end by themselves.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long the kernel may take to end one that was killed.
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Waits for the end of every child that an earlier supervisor of `dir` left; kills those that take too long.
///
/// # Errors
/// One that does not even end when killed.
pub(super) async fn await_end(dir: &Path, previous: &[Entry]) -> Result<()> {
    for entry in previous.iter().filter(|e| e.data_dir == dir.join(e.name().to_string())) {
        let Some(pid) = entry.pid else { continue };
        if gone(pid, &entry.data_dir, PATIENCE).await {
            continue;
        }
        tracing::warn!(process = %entry.name(), pid, "outlived its supervisor: killing it");
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            // If it has just ended there is nothing to kill.
            let _ = kill_process(pid, Signal::KILL);
        }
        if !gone(pid, &entry.data_dir, KILL_PATIENCE).await {
            return Err(Error::Directory {
                dir: dir.to_owned(),
                problem: format!("{} of an earlier start (pid {pid}) does not end, not even when killed", entry.name()),
            });
        }
    }
    Ok(())
}

async fn gone(pid: u32, data_dir: &Path, patience: Duration) -> bool {
    let check = || async { if is_child(pid, data_dir) { Err("it is alive".to_owned()) } else { Ok(()) } };
    probe::until("the end of an earlier child", patience, check).await.is_ok()
}

/// Whether `pid` is a child that runs on `data_dir`. Where there is no /proc, nobody can be told apart: no.
fn is_child(pid: u32, data_dir: &Path) -> bool {
    let command_line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let arguments = || command_line.split(|b| *b == 0);
    let data_dir = data_dir.as_os_str().as_encoded_bytes();
    arguments().any(|a| a == b"--exit-with-parent") && arguments().any(|a| a == data_dir)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use super::*;
    use crate::process::{ProcessName, Role};

    fn entry(dir: &Path, pid: u32) -> Entry {
        let data_dir = dir.join(ProcessName::metasrv(1).to_string());
        let log_file = data_dir.join("lake.log");
        Entry { role: Role::Metasrv, id: 1, pid: Some(pid), log_file, data_dir, addresses: BTreeMap::new() }
    }

    #[tokio::test]
    async fn an_earlier_child_is_awaited_and_a_stranger_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let data_dir = dir.join("metasrv-1");
        let mut stranger = Command::new("sleep").arg("1000").spawn().unwrap();
        let started = Instant::now();
        await_end(dir, &[entry(dir, stranger.id())]).await.unwrap();
        assert!(started.elapsed() < PATIENCE);
        stranger.kill().unwrap();
        stranger.wait().unwrap();

        let mut child = Command::new("sh")
            .args(["-c", "cat; exit 0", "lake", "--exit-with-parent"])
            .arg(&data_dir)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        // For a moment after it was started, a process has no command line.
        let shown = || async { is_child(child.id(), &data_dir).then_some(()).ok_or("not shown".to_owned()) };
        probe::until("its command line", PATIENCE, shown).await.unwrap();
        assert!(!is_child(child.id(), &dir.join("metasrv-2")));
        // What a copy of the directory says of this child is not about the copy.
        await_end(&dir.join("copy"), &[entry(dir, child.id())]).await.unwrap();
        let stdin = child.stdin.take();
        let entries = [entry(dir, child.id())];
        let reaped = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(stdin);
            child.wait()
        });
        await_end(dir, &entries).await.unwrap();
        assert!(reaped.join().unwrap().unwrap().success(), "it ended by itself");
    }
}
