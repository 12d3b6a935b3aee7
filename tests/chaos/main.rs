//! `lake chaos run` as a user meets it: short fault runs of real processes, and their verdicts.
//!
//! They run one at a time: on two cores, two clusters would measure each other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lake_chaos::history::{Action, History, Installation, Phase, file};
use lake_chaos::manifest;
use lake_chaos::report::{Record, record};

const LAKE: &str = env!("CARGO_BIN_EXE_lake");
/// How long what should happen soon may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

static ALONE: Mutex<()> = Mutex::new(());

/// One run, in a directory that goes away.
struct Run {
    dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Run {
    fn new() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { dir: tempfile::Builder::new().prefix("lake-chaos-").tempdir().unwrap(), _alone: alone }
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(LAKE);
        command.args(["chaos", "run", "--seed", "7", "--out"]).arg(self.out()).args(arguments.split_whitespace());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn go(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn record(&self) -> Record {
        record::read(&self.out()).unwrap().unwrap()
    }

    fn history(&self) -> History {
        file::read(&self.out().join(file::FILE_NAME), None).unwrap().1
    }
}

#[track_caller]
fn assert_code(output: &Output, code: i32) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{out}\n{err}");
}

/// The faults that began with effect.
fn installed(history: &History) -> BTreeSet<String> {
    let began = history.faults().map(|(_, fault)| fault).filter(|fault| fault.phase == Phase::Start);
    let effective = began.filter(|fault| matches!(fault.installation, Some(Installation::Installed(_))));
    effective.map(|fault| fault.name.clone()).collect()
}

fn assert_files(dir: &Path) {
    for name in ["history.edn", "results.json", "report.html", "samples.jsonl", "run.json", "logs/metasrv-1.log"] {
        let path = dir.join(name);
        assert!(path.metadata().is_ok_and(|file| file.len() > 0), "{} is missing or empty", path.display());
    }
}

#[test]
fn registers_survive_kills_and_partitions() {
    let run = Run::new();
    let output = run.go("--workload register --nemesis kill,partition --time 15s --rate 200 --clients 8");
    assert_code(&output, 0);
    assert_files(&run.out());
    let history = run.history();
    assert_eq!(installed(&history), BTreeSet::from(["kill".to_owned(), "partition".to_owned()]));
    // Reads were spread over the peers, and say who answered.
    let peers: BTreeSet<u64> = history.operations().iter().filter_map(|operation| operation.peer).collect();
    assert_eq!(peers, BTreeSet::from([1, 2, 3]));
    let facts = run.record().facts.unwrap();
    assert!(facts.looked_for > 0 && facts.not_found.is_empty(), "{facts:?}");
    let hashes: BTreeSet<String> = facts.peers.iter().map(|peer| peer.state.clone().unwrap().hash).collect();
    assert_eq!((hashes.len(), facts.peers.len()), (1, 3));
}

#[test]
fn transfers_keep_their_total_on_a_slow_network_and_under_pauses() {
    let run = Run::new();
    assert_code(&run.go("--workload bank --nemesis pause,slow --time 12s --rate 150 --clients 6"), 0);
    assert_eq!(installed(&run.history()), BTreeSet::from(["pause".to_owned(), "slow".to_owned()]));
}

#[test]
fn a_peer_that_lost_everything_is_replaced_under_load() {
    let run = Run::new();
    assert_code(&run.go("--workload set --nemesis wipe --time 12s --rate 100 --clients 4"), 0);
    let peers: Vec<u64> = run.record().facts.unwrap().peers.iter().map(|peer| peer.id).collect();
    assert_eq!(peers.len(), 3);
    assert!(peers.iter().any(|id| *id > 3), "{peers:?}");
}

#[test]
fn a_fault_that_never_took_effect_makes_the_verdict_unknown() {
    let run = Run::new();
    let output = run.go("--cluster local:1 --workload register --nemesis partition --time 5s --rate 100 --clients 2");
    assert_code(&output, 2);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("partition") && said.contains("only one peer"), "{said}");
}

#[test]
fn an_interrupted_run_is_recorded_and_leaves_nothing_behind() {
    let run = Run::new();
    let child = run.command("--workload register --nemesis kill --time 10m --rate 100").spawn().unwrap();
    let manifest = run.out().join("cluster");
    await_load(&run.out());
    let children = pids(&manifest);
    assert_eq!(children.len(), 3);
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_code(&output, 2);
    assert_files(&run.out());
    assert!(run.record().interrupted.is_some());
    assert!(!run.history().calls().is_empty());
    for pid in children {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is left");
    }
}

#[test]
fn a_directory_that_holds_something_is_left_alone() {
    let run = Run::new();
    std::fs::create_dir(run.out()).unwrap();
    std::fs::write(run.out().join("mine"), "x").unwrap();
    let output = run.go("--time 5s");
    assert_code(&output, 3);
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not empty"));
    assert_eq!(std::fs::read_dir(run.out()).unwrap().count(), 1);
}

#[test]
fn the_plan_of_faults_follows_from_the_seed() {
    let plan = || {
        let run = Run::new();
        assert_code(&run.go("--workload session --nemesis pause:one,slow --time 8s --rate 100 --clients 4"), 0);
        let history = run.history();
        let actions = history.operations().iter().filter_map(|operation| match &operation.action {
            Action::Fault(fault) if fault.installation.is_some() => Some((fault.name.clone(), fault.phase)),
            _ => None,
        });
        actions.collect::<Vec<_>>()
    };
    assert_eq!(plan(), plan());
}

/// Waits until the peers are up and clients at it.
fn await_load(out: &Path) {
    let until = Instant::now() + PATIENCE;
    let samples = out.join("samples.jsonl");
    while !samples.exists() || pids(&out.join("cluster")).len() < 3 {
        assert!(Instant::now() < until, "the run does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn pids(dir: &Path) -> Vec<u32> {
    manifest::read(dir).ok().flatten().unwrap_or_default().into_iter().filter_map(|entry| entry.pid).collect()
}

fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}
