//! Damage at random places of every file of a peer's directory: each ends in a refusal that names what is damaged, or in
//! a start with everything that was acknowledged (semantics, section 10). Never in a panic, never in other data.
//!
//! `LAKE_TEST_SEED` repeats a run, `LAKE_DAMAGED_DIRECTORIES` sets how many directories are damaged.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::directories::{copy, files};
use crate::log_oracle::{LogWorker, Told, check_contents, open};
use lake_metasrv::log::SkipSync;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// How long opening may take, damaged or not, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
static PANICS: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Clone, Copy)]
enum Damage {
    FlipBit,
    FlipSome,
    ZeroSector,
    ZeroTail,
    Truncate,
    Empty,
    Remove,
    Append,
}

const KINDS: [Damage; 8] = [
    Damage::FlipBit,
    Damage::FlipSome,
    Damage::ZeroSector,
    Damage::ZeroTail,
    Damage::Truncate,
    Damage::Empty,
    Damage::Remove,
    Damage::Append,
];

/// Memory, where there is a file system of it: nothing here is about what a disk keeps.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

#[test]
fn damage_anywhere_is_refused_by_name_or_harmless() {
    let seed: u64 = std::env::var("LAKE_TEST_SEED").map_or_else(|_| rand::random(), |s| s.parse().unwrap());
    let trials = std::env::var("LAKE_DAMAGED_DIRECTORIES").map_or(320, |n| n.parse().unwrap());
    println!("LAKE_TEST_SEED={seed}");
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        report(panic);
    }));
    let mut rng = StdRng::seed_from_u64(seed);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let scratch = scratch();
    // Several directories with a past of their own.
    let made: Vec<(PathBuf, Told)> = (0..4)
        .map(|n| {
            let dir = scratch.path().join(format!("healthy-{n}"));
            let told = runtime.block_on(lived(&dir, rng.random::<u64>() / 4 * 4 + n));
            (dir, told)
        })
        .collect();
    for (dir, told) in &made {
        let opened_one = dir.with_extension("opened");
        copy(dir, &opened_one);
        assert_eq!(opened(&runtime, &opened_one, told), Ok(()), "an undamaged directory");
    }
    let mut outcomes: BTreeMap<(String, &str), u32> = BTreeMap::new();
    for trial in 0..trials {
        let (healthy, told) = &made[trial % made.len()];
        let dir = scratch.path().join(format!("trial-{trial}"));
        copy(healthy, &dir);
        let files = files(&dir);
        let file = files[rng.random_range(0..files.len())].clone();
        let kind = KINDS[rng.random_range(0..KINDS.len())];
        let what = format!("{kind:?} {}", file.strip_prefix(&dir).unwrap().display());
        let at = damage(&file, kind, &mut rng);
        let verdict = match opened(&runtime, &dir, told) {
            Ok(()) => "started with everything",
            Err(said) => {
                // The files of sled are one thing to whoever has to act: the directory is named.
                let named = match file.parent() {
                    Some(parent) if parent.ends_with("log") => parent.to_owned(),
                    Some(parent) if matches!(kind, Damage::Remove) => parent.to_owned(),
                    _ => file.clone(),
                };
                let names = said.contains(&named.display().to_string());
                assert!(said.starts_with("refused: "), "trial {trial}: {what} at {at}: {said}");
                assert!(names, "trial {trial}: {what} at {at}: {} is not named in: {said}", named.display());
                assert!(
                    said.contains("leave the peer stopped"),
                    "trial {trial}: {what} at {at}: no way out in: {said}"
                );
                "refused by name"
            }
        };
        let panics = PANICS.load(Ordering::SeqCst);
        assert_eq!(panics, 0, "trial {trial}: {what} at {at}: a panic was reported");
        let name = file.strip_prefix(&dir).unwrap().display().to_string();
        let name = if name.contains("snap.") { "log/snap.*".to_owned() } else { name };
        let name = if name.ends_with(".snap") { "snapshots/*".to_owned() } else { name };
        *outcomes.entry((name, verdict)).or_default() += 1;
        std::fs::remove_dir_all(&dir).unwrap();
    }
    println!("{outcomes:#?}");
    let refused: u32 = outcomes.iter().filter(|((_, v), _)| v.starts_with("refused")).map(|(_, n)| n).sum();
    assert!(refused as usize >= trials / 10, "damage was hardly noticed at all: {refused} of {trials}");
}

/// A directory that has been through a hundred requests of every kind: closed, or as a process that is killed leaves it.
async fn lived(dir: &Path, seed: u64) -> Told {
    let told = Arc::new(Mutex::new(Told::default()));
    let hears = told.clone();
    let hear = move |line: &str| hears.lock().unwrap().hear(line);
    let mut worker = LogWorker::start(dir.to_owned(), seed, SkipSync::default(), Box::new(hear)).await;
    let steps = 80 + seed % 60;
    for _ in 0..steps {
        worker.step().await;
    }
    worker.settle(seed.is_multiple_of(2)).await;
    if seed.is_multiple_of(3) {
        worker.stop().await;
    } else {
        // Nothing is under way now.
        let killed = dir.with_extension("killed");
        copy(dir, &killed);
        worker.stop().await;
        std::fs::remove_dir_all(dir).unwrap();
        std::fs::rename(&killed, dir).unwrap();
    }
    std::mem::take(&mut *told.lock().unwrap())
}

/// What comes of opening a directory: everything there, a refusal, or something that must not be.
fn opened(runtime: &tokio::runtime::Runtime, dir: &Path, told: &Told) -> Result<(), String> {
    let (sender, receiver) = std::sync::mpsc::channel();
    // An older snapshot that joins the log will do.
    let (owned, told) = (dir.to_owned(), Told { snapshot: None, ..told.clone() });
    let handle = runtime.handle().clone();
    let opening = std::thread::spawn(move || {
        let result = match open(&owned, SkipSync::default()) {
            Err(e) => Err(format!("refused: {e}")),
            Ok(contents) => handle.block_on(async {
                let checked = check_contents(&contents, &told).await;
                contents.log.close().await;
                checked.map_err(|what| format!("started wrongly: {what}"))
            }),
        };
        let _ = sender.send(result);
    });
    let result = receiver.recv_timeout(PATIENCE).unwrap_or_else(|e| Err(format!("it neither starts nor refuses: {e}")));
    let _ = opening.join();
    result
}

/// Does it, mostly where something is written; where that was.
fn damage(file: &Path, kind: Damage, rng: &mut StdRng) -> usize {
    let mut bytes = std::fs::read(file).unwrap();
    let len = bytes.len().max(1);
    let mut at = rng.random_range(0..len);
    if rng.random_ratio(4, 5) {
        for _ in 0..1000 {
            if bytes.get(at).is_some_and(|byte| *byte != 0) {
                break;
            }
            at = rng.random_range(0..len);
        }
    }
    let sector = at / 512 * 512;
    let end = (sector + 512).min(bytes.len());
    match kind {
        Damage::FlipBit => bytes[at] ^= 1 << rng.random_range(0..8),
        Damage::FlipSome => (0..8).for_each(|_| {
            let near = (at + rng.random_range(0..4096)).min(bytes.len() - 1);
            bytes[near] ^= 1 << rng.random_range(0..8);
        }),
        Damage::ZeroSector => bytes[sector..end].fill(0),
        Damage::ZeroTail => bytes[at..].fill(0),
        Damage::Truncate => bytes.truncate(at),
        Damage::Empty => bytes.clear(),
        Damage::Append => bytes.extend((0..rng.random_range(1..5000)).map(|_| rng.random::<u8>())),
        Damage::Remove => {
            std::fs::remove_file(file).unwrap();
            return 0;
        }
    }
    std::fs::write(file, bytes).unwrap();
    at
}
