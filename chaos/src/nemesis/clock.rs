//! Wall clocks that jump and drift, one peer's at a time. Needs libfaketime: it is loaded into every peer, which reads its
//! clock's deviation from a file. The monotonic clock stays true, as it does on a machine whose time is set.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, named};
use super::{Done, Nemesis};
use crate::process::ProcessName;
use crate::{IoContext, Result};

/// Where distributions put it.
const PLACES: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib64/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
    "/usr/local/lib/faketime/libfaketimeMT.so.1",
];
/// The pace is told, too: the library keeps the one before otherwise.
const RIGHT: &str = "+0 x1.0";
const MISSING: &str = "libfaketime is not installed (the package is usually called faketime or libfaketime)";

/// The library, if this machine has it.
pub fn library() -> Option<PathBuf> {
    PLACES.iter().map(PathBuf::from).find(|path| path.exists())
}

/// The environment of peers whose clocks can be faked, and are right at first: `{id}` stands for a peer's id.
///
/// # Errors
/// The files of the clocks cannot be made.
pub fn environment(library: &Path, dir: &Path, peers: &[u64]) -> Result<Vec<(OsString, OsString)>> {
    let doing = || format!("making {} for the peers' clocks", dir.display());
    std::fs::create_dir_all(dir).doing(doing)?;
    peers.iter().try_for_each(|id| std::fs::write(file(dir, *id), RIGHT)).doing(doing)?;
    let file = dir.join("{id}");
    let set = |name: &str, value: &str| (name.into(), value.into());
    Ok(vec![
        ("LD_PRELOAD".into(), library.as_os_str().to_owned()),
        ("FAKETIME_TIMESTAMP_FILE".into(), file.into_os_string()),
        set("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        set("DONT_FAKE_MONOTONIC", "1"),
        set("FAKETIME_NO_CACHE", "1"),
        set("FAKETIME_DONT_RESET", "1"),
    ])
}

/// What peer `id` reads its clock's deviation from.
pub fn file(dir: &Path, id: u64) -> PathBuf {
    dir.join(id.to_string())
}

fn pid_of(field: &Field, id: u64) -> Option<u32> {
    field.cluster.process(ProcessName::metasrv(id)).ok()?.state().pid
}

fn is_loaded(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("libfaketime"))
}

/// One peer's clock jumps, and may go too fast or too slow from there.
#[derive(Default)]
pub struct Jump {
    wrong: Option<u64>,
}

#[async_trait]
impl Nemesis for Jump {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let Some(dir) = &field.clocks else { return Done::skipped("nobody", MISSING) };
        let peers = field.roster.ids();
        if peers.is_empty() {
            return Done::failed("nobody", "there is no peer");
        }
        let id = peers[rng.random_range(0..peers.len())];
        let seconds: i64 = rng.random_range(-86_400..=86_400);
        let drift = if rng.random_bool(0.5) { 1.0 } else { rng.random_range(0.5..3.0) };
        let words = format!("{seconds:+} x{drift:.2}");
        self.wrong = Some(id);
        let target = format!("{}: {words}", named(&[id]));
        let path = file(dir, id);
        if let Err(e) = std::fs::write(&path, &words).doing(|| format!("writing {}", path.display())) {
            return Done::failed(target, e);
        }
        match pid_of(field, id).filter(|pid| is_loaded(*pid)) {
            Some(pid) => Done::installed(target, format!("libfaketime is loaded in process {pid}")),
            None => Done::failed(target, "libfaketime is not loaded in its process"),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let (Some(dir), Some(id)) = (&field.clocks, self.wrong.take()) else {
            return Done::skipped("nobody", "no clock was wrong");
        };
        match std::fs::write(file(dir, id), RIGHT).doing(|| "setting a clock right".to_owned()) {
            Ok(()) => Done::installed(named(&[id]), "its clock is right"),
            Err(e) => Done::failed(named(&[id]), e),
        }
    }
}
