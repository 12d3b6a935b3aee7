//! Power cuts: a peer's directory on a disk whose unsynced writes are lost, looked at as it would be found after a cut at
//! an arbitrary moment.
//!
//! A child process works in a directory on such a disk (see [`lake_chaos::disk::volatile`]) and tells, over a pipe, each thing that
//! was acknowledged to it, and each thing that it is about to take back. At random writes and flushes the disk gives an
//! image: everything flushed, and a random part of the rest; of a record of the journal, or a slot of the mark, that is being
//! written, one sector may be torn. What had been told before that moment must be there when
//! the image is mounted and opened; the log must be contiguous and hold what was appended; the vote must not have gone
//! back; the snapshot must be what the log up to it gives; and the directory must open at all. The last image of a round
//! is the disk that the next round begins with, so that cuts follow upon cuts. Now and then the child is killed and another
//! goes on: what that finds is promised from then on, though the first may not have synced it.
//!
//! What it does not cover: drives that tear a sector of the file system's own or of sled's, or that lose what they were told to
//! flush. Several disks that are cut at once: `lake chaos run --nemesis power`.
//!
//! Needs root, FUSE and loop devices. Where they are missing the tests fail, unless `LAKE_SKIP_POWER_CUTS=1` says that
//! this is known. `LAKE_POWER_CUTS` sets the number of cuts per test.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::log_oracle::{LogWorker, Told, check_contents, open};
use lake_chaos::disk::volatile::{Contents as Disk, Fate, Flushes, MountedImage, VolatileDisk, empty_file_system};
use lake_client::store::{MetaStore, ReadOptions};
use lake_metasrv::EmbeddedStore;
use lake_metasrv::config::StorageConfig;
use lake_metasrv::log::SkipSync;
use lake_metasrv::peer::Settings;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const INSIDE: &str = "LAKE_POWER_CUT_INSIDE";
const WORKER: &str = "LAKE_POWER_CUT_WORKER";
const SKIP: &str = "LAKE_SKIP_POWER_CUTS";
const CUTS: &str = "LAKE_POWER_CUTS";
const DISK_BYTES: u64 = 128 << 20;
/// How long a cut may take to come, and anything else here.
const PATIENCE: Duration = Duration::from_secs(120);

// ---- the tests ----------------------------------------------------------------------------------------------------

#[test]
fn the_log_survives_power_cuts() {
    in_a_namespace("the_log_survives_power_cuts", |dir| {
        let found = Run { worker: "log", ..Run::default() }.go(dir, cuts(10));
        assert_eq!(found, None);
    });
}

#[test]
fn making_a_directory_survives_power_cuts() {
    in_a_namespace("making_a_directory_survives_power_cuts", |dir| {
        let found = Run { rounds: Rounds::Creation, ..Run::default() }.go(dir, cuts(8));
        assert_eq!(found, None);
    });
}

#[test]
fn a_whole_peer_survives_power_cuts() {
    in_a_namespace("a_whole_peer_survives_power_cuts", |dir| {
        let found = Run { worker: "peer", ..Run::default() }.go(dir, cuts(5));
        assert_eq!(found, None);
    });
}

#[test]
fn a_missing_sync_is_found() {
    in_a_namespace("a_missing_sync_is_found", |dir| {
        for (what, run) in [
            ("the journal is not synced", Run { skip: "journal", ..Run::default() }),
            ("the entries are not synced", Run { skip: "entries", ..Run::default() }),
            ("the mark is not synced", Run { skip: "mark", ..Run::default() }),
            ("the drive lies about flushes", Run { flushes: Flushes::Lies, ..Run::default() }),
        ] {
            let found = Run { worker: "log", rounds: Rounds::Empty, ..run }.go(dir, 60);
            println!("{what}: {}", found.as_deref().unwrap_or("NOT FOUND"));
            assert!(found.is_some(), "{what}, and 60 power cuts did not show it");
        }
    });
}

fn cuts(default: usize) -> usize {
    std::env::var(CUTS).map_or(default, |n| n.parse().expect("LAKE_POWER_CUTS is a number"))
}

/// Runs a test again in a mount namespace of its own, so that no mount outlives it, however it ends.
fn in_a_namespace(test: &str, body: impl FnOnce(&Path)) {
    if std::env::var_os(INSIDE).is_some() {
        let dir = tempfile::tempdir().unwrap();
        return body(dir.path());
    }
    if let Some(missing) = lake_chaos::disk::missing() {
        let what = format!("power cuts were NOT TESTED here: {missing}");
        assert!(std::env::var_os(SKIP).is_some(), "{what}. Set {SKIP}=1 to accept that");
        eprintln!("{what} ({SKIP} is set)");
        return;
    }
    let status = Command::new("unshare")
        .args(["--mount", "--propagation", "private"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("power_cut::{test}"), "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{test} failed inside its namespace: {status}; see above");
}

// ---- runs and cuts ------------------------------------------------------------------------------------------------

#[derive(Clone, Copy)]
struct Run {
    worker: &'static str,
    skip: &'static str,
    flushes: Flushes,
    rounds: Rounds,
}

/// How the disk of a round comes to be, and when its cuts are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounds {
    /// It is the last image of the round before, and every third time it is empty.
    Chained,
    /// It is empty.
    Empty,
    /// It is empty, and there is one cut, early on.
    Creation,
}

impl Default for Run {
    fn default() -> Self {
        Self { worker: "log", skip: "", flushes: Flushes::Honest, rounds: Rounds::Chained }
    }
}

/// What the disk is asked for: an image once so many writes and flushes have passed.
struct Wanted {
    after_events: u64,
    seed: u64,
}

struct Cut {
    told: Told,
    image: Vec<u8>,
    lost: usize,
    volatile: usize,
    /// What of a sector was written, if one is torn.
    torn: Option<usize>,
}

impl Run {
    /// Cuts the power so many times; the first thing that was wrong afterwards.
    fn go(self, dir: &Path, cuts: usize) -> Option<String> {
        let seed: u64 = std::env::var("LAKE_TEST_SEED").map_or_else(|_| rand::random(), |s| s.parse().unwrap());
        println!("{} {}: LAKE_TEST_SEED={seed}", self.worker, self.skip);
        let mut rng = StdRng::seed_from_u64(seed);
        let empty = empty_file_system(dir, DISK_BYTES).unwrap();
        let (mut image, mut told) = (empty.clone(), Told::default());
        let mut done = 0;
        while done < cuts {
            let per_round = if self.rounds == Rounds::Creation { 1 } else { rng.random_range(2..=4) };
            if self.rounds != Rounds::Chained || rng.random_ratio(1, 3) {
                (image, told) = (empty.clone(), Told::default());
            }
            let mut round = Round::start(self, dir, image.clone(), told.clone(), rng.random());
            for n in 0..per_round {
                if n > 0 && rng.random_ratio(1, 2) {
                    round.kill_and_go_on(rng.random());
                }
                // The first ones fall into opening and creation.
                let range = if n == 0 { 1..120 } else { 1..400 };
                let cut = round.cut(rng.random_range(range), rng.random());
                done += 1;
                let checked = match (MountedImage::new(dir, &cut.image), self.worker) {
                    (Err(said), _) => Some(said.to_string()),
                    (Ok(after), "log") => check_log(after.path(), &cut.told),
                    (Ok(after), _) => check_peer(after.path(), &cut.told),
                };
                println!(
                    "cut {done}: {} of {} unflushed sectors lost{}, told of {}: {}",
                    cut.lost,
                    cut.volatile,
                    cut.torn.map_or_else(String::new, |bytes| format!(", one torn after {bytes} bytes")),
                    cut.told,
                    checked.as_deref().map_or("whole", |_| "NOT WHOLE")
                );
                if checked.is_some() {
                    return checked;
                }
                (image, told) = (cut.image, cut.told);
            }
        }
        None
    }
}

struct Round {
    run: Run,
    worker: Child,
    reader: Option<std::thread::JoinHandle<()>>,
    told: Arc<Mutex<Told>>,
    disk: Option<VolatileDisk>,
    wanted: Arc<Mutex<Option<Wanted>>>,
    images: Receiver<Cut>,
}

impl Round {
    fn start(run: Run, dir: &Path, image: Vec<u8>, told: Told, seed: u64) -> Self {
        let disk = VolatileDisk::mount(dir, image, run.flushes).unwrap();
        let told = Arc::new(Mutex::new(told));
        let wanted = Arc::new(Mutex::new(None::<Wanted>));
        let (sender, images) = sync_channel(1);
        let (asked, heard) = (wanted.clone(), told.clone());
        disk.watch(Box::new(move |disk| {
            let mut asked = asked.lock().unwrap();
            let Some(wanted) = &mut *asked else { return };
            wanted.after_events -= 1;
            if wanted.after_events == 0 {
                // What was told comes first: all of that was acknowledged before this moment.
                let told = heard.lock().unwrap().clone();
                let _ = sender.send(cut(disk, told, wanted.seed));
                *asked = None;
            }
        }));
        let (worker, reader) = spawn_worker(run, disk.path(), told.clone(), seed);
        Self { run, worker, reader: Some(reader), told, disk: Some(disk), wanted, images }
    }

    /// The process is killed and another one goes on, with what the first wrote still in the system's memory, synced or
    /// not. From then on all of that is promised.
    fn kill_and_go_on(&mut self, seed: u64) {
        self.end_worker();
        let Some(disk) = &self.disk else { return };
        let (worker, reader) = spawn_worker(self.run, disk.path(), self.told.clone(), seed);
        (self.worker, self.reader) = (worker, Some(reader));
    }

    fn end_worker(&mut self) {
        let _ = self.worker.kill();
        let _ = self.worker.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }

    fn cut(&self, after_events: u64, seed: u64) -> Cut {
        *self.wanted.lock().unwrap() = Some(Wanted { after_events, seed });
        self.images.recv_timeout(PATIENCE).expect("the worker has stopped writing; see what it said above")
    }
}

impl Drop for Round {
    fn drop(&mut self) {
        self.end_worker();
        drop(self.disk.take());
    }
}

/// Starts a child process that works in the directory on the disk, and hears what it tells.
fn spawn_worker(run: Run, disk: &Path, told: Arc<Mutex<Told>>, seed: u64) -> (Child, std::thread::JoinHandle<()>) {
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "power_cut::work", "--nocapture"])
        .env(WORKER, format!("{}|{}|{seed}|{}", run.worker, run.skip, disk.join("peer").display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(worker.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        for line in lines.lines() {
            let Ok(line) = line else { return };
            if let Some(line) = line.strip_prefix("TOLD ") {
                told.lock().unwrap().hear(line);
            }
        }
    });
    (worker, reader)
}

/// What begins a block of what this project writes in place.
const IN_PLACE: [&[u8]; 2] = [b"lakejrnl", b"lakemark"];

/// A random part of what is not flushed survives: none, all, each sector by chance, or all up to a moment. One of the last sectors
/// that are written in place may be torn.
fn cut(disk: &Disk, told: Told, seed: u64) -> Cut {
    let mut rng = StdRng::seed_from_u64(seed);
    let volatile = disk.volatile_sectors();
    let (kind, chance, until) = (rng.random_range(0..5), rng.random_range(0.02..0.98), rng.random_range(0..=volatile));
    let newest = disk.newest_blocks(&IN_PLACE);
    // Most of what there is to misread stands in the first sector.
    let torn = (!newest.is_empty() && rng.random_ratio(2, 3)).then(|| {
        let block = newest[rng.random_range(0..newest.len())];
        (block + if rng.random_ratio(1, 4) { rng.random_range(0..8) } else { 0 }, rng.random_range(1..512))
    });
    let (mut lost, mut n) = (0, 0);
    let image = disk.after_power_cut(|| {
        n += 1;
        if let Some((sector, bytes)) = torn
            && sector == n - 1
        {
            return Fate::Torn(bytes);
        }
        let survives = match kind {
            0 => false,
            1 => true,
            2 => n <= until,
            3 => n > until,
            _ => rng.random_bool(chance),
        };
        lost += usize::from(!survives);
        Fate::from(survives)
    });
    Cut { told, image, lost, volatile, torn: torn.map(|(_, bytes)| bytes) }
}

// ---- the workers, and what they tell -----------------------------------------------------------------------------

fn tell(what: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "TOLD {what}").and_then(|()| out.flush()).expect("the pipe to the test is open");
}

/// Not a test by itself: what the child process runs.
#[test]
fn work() {
    let Ok(arguments) = std::env::var(WORKER) else { return };
    let parts: Vec<&str> = arguments.split('|').collect();
    // The test harness has begun a line.
    println!();
    let (seed, dir) = (parts[2].parse().unwrap(), PathBuf::from(parts[3]));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        match parts[0] {
            "log" => {
                let [journal, entries, mark] = ["journal", "entries", "mark"].map(|what| parts[1] == what);
                let skip = SkipSync { journal, entries, mark };
                let say = |line: &str| tell(format_args!("{line}"));
                let mut worker = LogWorker::start(dir, seed, skip, Box::new(say)).await;
                loop {
                    if skip == SkipSync::default() { worker.step().await } else { worker.step_in_the_log().await }
                }
            }
            _ => peer_worker(dir).await,
        }
    });
}

fn settings() -> Settings {
    Settings {
        storage: StorageConfig {
            snapshot_entries: 40,
            purge_margin_entries: 10,
            disk_reserve_bytes: 0,
            journal_bytes: 64 << 10,
            ..StorageConfig::default()
        },
        ..Settings::default()
    }
}

/// One voter with all its parts, and clients that write to it.
async fn peer_worker(dir: PathBuf) {
    let store = EmbeddedStore::open_with(dir, settings()).await.expect("opening");
    let run: u64 = rand::random();
    let writers = (0..4).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0u64.. {
                let key = format!("/kv/{run}/{writer}/{n}");
                let value = vec![n as u8; 100 + (n as usize * 37) % 3000];
                let deadline = Instant::now() + PATIENCE;
                let done = store.cas(&key, None, value.into(), deadline).await.expect("a write");
                assert!(done.result.succeeded);
                tell(format_args!("key {key} {}", done.result.revision));
            }
        })
    });
    futures::future::join_all(writers).await;
}

// ---- what must be there -------------------------------------------------------------------------------------------

fn check_log(mounted: &Path, told: &Told) -> Option<String> {
    let dir = mounted.join("peer");
    if !dir.exists() && told.incarnation.is_none() {
        return None;
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let contents = match open(&dir, SkipSync::default()) {
        Ok(contents) => contents,
        Err(e) => return Some(format!("the directory is refused: {e}")),
    };
    let checked = runtime.block_on(async {
        let checked = check_contents(&contents, told).await;
        contents.log.close().await;
        checked
    });
    checked.err()
}

fn check_peer(mounted: &Path, told: &Told) -> Option<String> {
    let dir = mounted.join("peer");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let store = match EmbeddedStore::open_with(dir, settings()).await {
            Ok(store) => store,
            Err(e) => return Some(format!("the peer does not start: {e}")),
        };
        let read = store.list_all("/kv/", ReadOptions::default(), Instant::now() + PATIENCE).await;
        store.shutdown().await;
        let read = match read {
            Ok(read) => read,
            Err(e) => return Some(format!("the peer does not answer: {e}")),
        };
        let found: BTreeMap<String, u64> = read.value.into_iter().map(|e| (e.key, e.mod_revision)).collect();
        let lost: Vec<_> = told.keys.iter().filter(|(key, revision)| found.get(*key) != Some(*revision)).collect();
        (!lost.is_empty()).then(|| format!("{} of {} acknowledged writes are lost", lost.len(), told.keys.len()))
    })
}
