//! `lake chaos run` as a user meets it: fault runs of real processes, and their verdicts.
//!
//! As many run at a time as the machine has room for: on too few cores, clusters would measure each other. Tests of several
//! runs have them side by side, so that there is always one that waits for room.

mod hosts;
#[path = "../cluster/common/install.rs"]
mod install;
mod jepsen;
mod matrix;
#[path = "../../query/tests/rest/python.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod python;
#[path = "../../client/tests/support/s3.rs"]
mod s3;
mod storage;
#[path = "../../client/tests/support/mod.rs"]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lake_chaos::check::Verdict;
use lake_chaos::history::{Action, History, Idempotency, Installation, Operation, Outcome, Phase, Table, file};
use lake_chaos::nemesis::clock;
use lake_chaos::report::{Record, Results, record, results};
use lake_chaos::{disk, manifest, net::namespaces};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use self::install::install;

const LAKE: &str = env!("CARGO_BIN_EXE_lake");
/// How long what should happen soon may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// How often a run is begun again whose verdict is that it showed too little: on a busy machine clients may get too few answers, and
/// faults may be seen too late. One that shows something wrong is never begun again.
const ATTEMPTS: u32 = 3;
/// Cores that one run should have for itself, its peers and clients together.
const CORES_PER_RUN: usize = 2;
/// Runs at a time on a machine with hardly any.
const LEAST_RUNS: usize = 3;

/// How many runs are under way.
static RUNS: Mutex<usize> = Mutex::new(0);
static ONE_ENDED: Condvar = Condvar::new();

/// Room for one run, until dropped.
struct Room;

impl Room {
    fn take() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let most = (cores / CORES_PER_RUN).max(LEAST_RUNS);
        let runs = RUNS.lock().unwrap_or_else(PoisonError::into_inner);
        let mut runs = ONE_ENDED.wait_while(runs, |runs| *runs >= most).unwrap_or_else(PoisonError::into_inner);
        *runs += 1;
        Self
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        *RUNS.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ONE_ENDED.notify_all();
    }
}

/// One run, in a directory that goes away.
struct Run {
    dir: tempfile::TempDir,
    _room: Room,
}

impl Run {
    fn new() -> Self {
        let room = Room::take();
        Self { dir: tempfile::Builder::new().prefix("lake-chaos-").tempdir().unwrap(), _room: room }
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

    /// Runs until it has shown something, [`ATTEMPTS`] times at most.
    fn go_until_judged(&self, arguments: &str) -> Output {
        self.until_judged(|| self.go(arguments))
    }

    /// The same of what runs in another way.
    fn until_judged(&self, go: impl Fn() -> Output) -> Output {
        let mut output = go();
        for _ in 1..ATTEMPTS {
            if output.status.code() != Some(2) {
                break;
            }
            println!("{}\nonce more", String::from_utf8_lossy(&output.stdout));
            std::fs::remove_dir_all(self.out()).unwrap();
            output = go();
        }
        output
    }

    /// Runs with faults that must all take effect, and whose verdict must be that all held. Its history must be one for others.
    #[track_caller]
    fn holds(&self, arguments: &str, faults: &[&str]) -> History {
        let nemeses = faults.join(",");
        assert_code(&self.go_until_judged(&format!("{arguments} --nemesis {nemeses}")), 0);
        assert_files(&self.out());
        let history = self.history();
        assert_eq!(installed(&history), faults.iter().map(|fault| fault.replace(':', "-")).collect::<BTreeSet<_>>());
        jepsen::assert_readable(&std::fs::read_to_string(self.out().join(file::FILE_NAME)).unwrap());
        history
    }

    fn record(&self) -> Record {
        record::read(&self.out()).unwrap().unwrap()
    }

    fn results(&self) -> Results {
        serde_json::from_slice(&std::fs::read(self.out().join(results::FILE_NAME)).unwrap()).unwrap()
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

/// What showed of each fault of this name that it took effect.
fn proofs(history: &History, name: &str) -> Vec<String> {
    shown(history, Phase::Start, name)
}

/// What showed of each fault of this name when it began, or when it ended.
fn shown(history: &History, phase: Phase, name: &str) -> Vec<String> {
    let faults = history.faults().map(|(_, fault)| fault).filter(|fault| fault.phase == phase);
    let shown = faults.filter(|fault| fault.name == name).filter_map(|fault| match &fault.installation {
        Some(Installation::Installed(proof)) => Some(proof.clone()),
        _ => None,
    });
    shown.collect()
}

fn assert_files(dir: &Path) {
    for name in ["history.edn", "results.json", "report.html", "samples.jsonl", "run.json", "logs/metasrv-1.log"] {
        let path = dir.join(name);
        assert!(path.metadata().is_ok_and(|file| file.len() > 0), "{} is missing or empty", path.display());
    }
}

/// Begins runs at once, and waits until all have ended.
fn side_by_side<const N: usize>(runs: [fn(); N]) {
    std::thread::scope(|scope| {
        let runs = runs.map(|run| scope.spawn(run));
        let ended = runs.map(|run| run.join());
        ended.into_iter().for_each(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
}

/// The lines that a run told while it was under way: seconds, operations that succeeded, the leader, and the faults in force.
fn told(out: &str) -> Vec<(u64, u64, String, String)> {
    let lines = out.split(['\n', '\r']).filter(|line| line.contains(" ok/s"));
    let parts =
        lines.map(|line| line.trim_start_matches("\x1b[2K").split("  ").map(str::trim).filter(|s| !s.is_empty()));
    let number = |text: &str| text.split(' ').next().and_then(|word| word.parse().ok());
    parts
        .map(|parts| match parts.collect::<Vec<_>>()[..] {
            [seconds, _, operations, leader, faults] => (
                number(seconds).unwrap_or_else(|| panic!("{seconds:?}")),
                number(operations).unwrap_or_else(|| panic!("{operations:?}")),
                leader.to_owned(),
                faults.to_owned(),
            ),
            ref parts => panic!("no live line: {parts:?}"),
        })
        .collect()
}

#[test]
fn registers_and_changes_survive_dead_leaders_and_lost_answers() {
    fn registers() {
        let run = Run::new();
        let history =
            run.holds("--workload register --time 30s --rate 150 --clients 8", &["kill:majority", "partition"]);
        // Reads were spread over the peers, and say who answered.
        let peers: BTreeSet<u64> = history.operations().iter().filter_map(|operation| operation.peer).collect();
        assert_eq!(peers, BTreeSet::from([1, 2, 3]));
        let facts = run.record().facts.unwrap();
        assert!(facts.looked_for > 0 && facts.not_found.is_empty(), "{facts:?}");
        let hashes: BTreeSet<String> = facts.peers.iter().map(|peer| peer.state.clone().unwrap().hash).collect();
        assert_eq!((hashes.len(), facts.peers.len()), (1, 3));
    }
    fn changes() {
        let run = Run::new();
        let faults = ["kill:leader", "endpoint:minority"];
        let history = run.holds("--workload idempotency --time 30s --rate 100 --clients 6", &faults);
        // Of some changes several answers arrived, which the checker has compared.
        let results = run.results();
        let once = results.checks.iter().find(|outcome| outcome.checker == "exactly once").unwrap();
        assert!(once.figures["changes answered more than once"] > 0, "{once:?}");
        let lost = history.calls().iter().filter(|call| call.outcome == Outcome::Unknown);
        let lost = lost.filter(|call| matches!(history.action(call), Action::Idempotency(Idempotency::Apply { .. })));
        assert!(lost.count() > 0, "no answer was lost");
    }
    side_by_side([registers, changes]);
}

#[test]
fn banks_and_sets_survive_bad_networks_and_lost_directories() {
    fn bank() {
        let run = Run::new();
        run.holds("--workload bank --time 30s --rate 150 --clients 6", &["pause:one", "slow:leader", "reorder"]);
    }
    fn set() {
        let run = Run::new();
        run.holds("--workload set --time 30s --rate 100 --clients 4", &["wipe", "lossy:all"]);
        let peers: Vec<u64> = run.record().facts.unwrap().peers.iter().map(|peer| peer.id).collect();
        assert_eq!(peers.len(), 3);
        assert!(peers.iter().any(|id| *id > 3), "{peers:?}");
        // Also those of peers that are no more.
        for id in [1, 2, 3].iter().chain(&peers) {
            let log = run.out().join(format!("logs/metasrv-{id}.log"));
            assert!(log.metadata().is_ok_and(|log| log.len() > 0), "{} is missing or empty", log.display());
        }
    }
    side_by_side([bank, set]);
}

/// What a peer did with a damaged file is seen, or the fault has not taken effect.
#[test]
fn watches_and_lists_survive_damage_and_changes_of_the_members() {
    fn damage() {
        let run = Run::new();
        let history = run.holds("--workload watch --time 30s --rate 100 --clients 6", &["corrupt", "loss"]);
        for (name, shown) in
            [("corrupt", ["it read the file", "it ended"]), ("loss", ["it made the file anew", "it ended"])]
        {
            let told = proofs(&history, name);
            assert!(told.iter().all(|proof| shown.iter().any(|shown| proof.contains(shown))), "{told:?}");
        }
    }
    fn members() {
        let run = Run::new();
        let faults = ["restart", "transfer", "membership:leader"];
        let history = run.holds("--workload append --time 35s --rate 100 --clients 6", &faults);
        assert!(proofs(&history, "restart").iter().all(|proof| proof.matches("ended with exit code 0").count() >= 3));
        assert!(proofs(&history, "transfer").iter().all(|proof| proof.contains("it leads in term")));
    }
    side_by_side([damage, members]);
}

/// The runs beside those with planted bugs of the log: the same faults, and nothing wrong.
#[test]
fn a_set_loses_nothing_with_the_power_or_where_peers_that_forgot_come_back() {
    fn power() {
        Run::new().holds("--workload set --time 25s --rate 300", &["power:all", "sync:minority"]);
    }
    fn rejoin() {
        Run::new().holds("--workload set --time 20s --rate 300", &["rejoin"]);
    }
    side_by_side([power, rejoin]);
}

#[test]
fn registers_survive_snapshots_that_are_sent_and_locks_have_one_holder() {
    fn snapshot() {
        Run::new().holds("--workload register --time 20s --rate 300", &["snapshot"]);
    }
    fn locks() {
        Run::new().holds("--workload lock --time 20s --rate 100", &["pause:one"]);
    }
    side_by_side([snapshot, locks]);
}

#[test]
fn a_peer_that_dies_by_itself_is_part_of_the_verdict() {
    let run = Run::new();
    let child = run.command("--workload session --nemesis none --time 20s --rate 100 --clients 4").spawn().unwrap();
    await_load(&run.out());
    signal(pids(&run.out().join("cluster"))[0], Signal::ABORT);
    let output = child.wait_with_output().unwrap();
    assert_code(&output, 1);
    let results = run.results();
    let peers = results.checks.iter().find(|outcome| outcome.checker == "peers").unwrap();
    let said = peers.findings[0].explanation.join("\n");
    assert!(said.contains("peer 1 was killed by signal 6"), "{said}");
    // Its last words.
    assert!(said.contains("logs/metasrv-1.log") && peers.findings[0].explanation.len() > 2, "{said}");
    let page = std::fs::read_to_string(run.out().join("report.html")).unwrap();
    assert!(page.contains("peer 1 was killed by signal 6"), "{page}");
    // Nothing else was wrong; on a busy machine something may have shown too little.
    let others = results.checks.iter().filter(|outcome| outcome.checker != "peers");
    assert!(others.clone().all(|outcome| outcome.verdict.word() != "violation"), "{:?}", others.collect::<Vec<_>>());
}

/// Query nodes run beside the peers, and each of their faults is seen to have taken effect.
#[test]
fn query_nodes_are_killed_paused_and_cut_off() {
    let run = Run::new();
    let faults = ["query-kill:all", "query-pause", "query-partition:one"];
    let arguments = "--workload session --query-nodes 2 --time 30s --rate 60 --clients 4";
    let history = run.holds(arguments, &faults);
    assert!(proofs(&history, "query-kill-all").iter().all(|proof| proof.matches("is gone").count() == 2));
    assert!(proofs(&history, "query-partition-one").iter().all(|proof| proof.ends_with("met the cut")));
    assert_eq!(run.record().query_nodes, 2);
    for id in [1, 2] {
        let log = std::fs::read_to_string(run.out().join(format!("logs/query-{id}.log"))).unwrap();
        assert!(log.matches("the query node serves Flight SQL").count() > 1, "it was not started again: {log}");
    }
}

/// What an SQL client is promised, and PyIceberg beside it, while query nodes die, sleep and are cut off.
#[test]
fn rows_are_there_once_and_whole_however_query_nodes_are_hurt() {
    let python = python::interpreter();
    let run = Run::new();
    let faults = ["query-kill:one", "query-pause:one", "query-partition:one"];
    // Where nothing was written through REST the verdict is unknown.
    let rest = format!("--rest-clients 2 --python {}", python.display());
    let history = run.holds(&format!("--workload table --time 35s --rate 12 --clients 7 {rest}"), &faults);
    let judged = run.results().checks.into_iter().find(|outcome| outcome.checker == "tables").unwrap();
    // How many there are is for the machine to say.
    assert!(judged.figures["writes"] > 3 && judged.figures["reads"] > 3, "{judged:?}");
    let nodes: BTreeSet<u64> = history.operations().iter().filter_map(|operation| operation.peer).collect();
    assert_eq!(nodes, BTreeSet::from([1, 2]));
    let listed =
        |operation: &Operation| matches!(&operation.action, Action::Table(Table::Line { snapshots: Some(_), .. }));
    assert!(history.operations().iter().any(listed));
    assert!(run.record().facts.unwrap().looked_for > 0);
}

#[test]
fn the_total_over_several_tables_never_changes_however_query_nodes_are_hurt() {
    let run = Run::new();
    let faults = ["query-kill:one", "query-pause:one", "kill:leader"];
    run.holds("--workload multi-table --time 35s --rate 8 --clients 4", &faults);
    let judged = run.results().checks.into_iter().find(|outcome| outcome.checker == "accounts").unwrap();
    assert!(judged.figures["transfers"] > 3 && judged.figures["reads"] > 3, "{judged:?}");
}

#[test]
fn schemas_and_tables_stay_a_tree_however_query_nodes_and_leaders_are_hurt() {
    let run = Run::new();
    let faults = ["query-kill:one", "query-pause:one", "kill:leader"];
    let history = run.holds("--workload catalog --time 35s --rate 12 --clients 5", &faults);
    let judged = run.results().checks.into_iter().find(|outcome| outcome.checker == "catalog").unwrap();
    assert!(judged.figures["trees"] > 3 && judged.figures["changes"] > 3, "{judged:?}");
    let nodes: BTreeSet<u64> = history.operations().iter().filter_map(|operation| operation.peer).collect();
    assert_eq!(nodes, BTreeSet::from([1, 2]));
}

/// Nodes that cannot ask the metadata answer from what they know, and say how old that is.
#[test]
fn answers_never_go_back_and_say_how_old_they_are_where_nodes_are_cut_off() {
    let run = Run::new();
    let faults = ["query-partition:one", "query-kill:one"];
    run.holds("--workload cached --time 40s --rate 25 --clients 6", &faults);
    let judged = run.results().checks.into_iter().find(|outcome| outcome.checker == "cached reads").unwrap();
    assert!(judged.figures["writes"] > 3 && judged.figures["reads"] > 3, "{judged:?}");
}

/// What nodes commit for each other is there once, whichever of them dies.
#[test]
fn appends_are_there_once_and_whole_whoever_of_giver_and_committer_dies() {
    let run = Run::new();
    run.holds("--workload hot --time 35s --rate 30 --clients 12", &["query-kill:one", "query-pause:one"]);
    let judged = run.results().checks.into_iter().find(|outcome| outcome.checker == "appends").unwrap();
    let there = judged.figures["appends in tables whose snapshots were counted"];
    assert!(there > judged.figures["snapshots"] && judged.figures["reads"] > 0, "{judged:?}");
}

/// Whatever is packed, and whatever expires: what is read is there.
#[test]
fn upkeep_deletes_nothing_that_is_read_whoever_dies_at_it() {
    let run = Run::new();
    run.holds("--workload upkeep --time 40s --rate 12 --clients 6", &["query-kill:one", "query-pause:one"]);
    let judged = run.results().checks.into_iter().find(|outcome| outcome.checker == "upkeep").unwrap();
    assert!(judged.figures["chores"] > 1 && judged.figures["reads"] > 3, "{judged:?}");
    let fences = run.results().checks.into_iter().find(|outcome| outcome.checker == "fences of upkeep").unwrap();
    assert!(fences.figures["snapshots of workers"] > 0 && fences.figures["fences"] > 0, "{fences:?}");
}

#[test]
fn a_client_through_rest_takes_a_python_with_pyiceberg() {
    let run = Run::new();
    let output = run.go("--workload table --time 5s --nemesis none --rest-clients 1 --python /nowhere/python3");
    assert_code(&output, 3);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("/nowhere/python3") && said.contains("pyiceberg[pyarrow]"), "{said}");
    std::fs::remove_dir_all(run.out()).unwrap();
    let output = run.go("--workload register --time 5s --rest-clients 1");
    assert_code(&output, 3);
    assert!(String::from_utf8_lossy(&output.stderr).contains("the workload table"));
}

#[test]
fn a_fault_of_query_nodes_takes_query_nodes() {
    let run = Run::new();
    let output = run.go("--nemesis query-kill --time 5s");
    assert_code(&output, 3);
    assert!(String::from_utf8_lossy(&output.stderr).contains("--query-nodes 2"));
    let output = run.go("--workload table --query-nodes 0 --time 5s");
    assert_code(&output, 3);
    assert!(String::from_utf8_lossy(&output.stderr).contains("speaks SQL"));
}

/// Elsewhere than on a terminal a line is told every ten seconds, and when faults begin or end.
#[test]
fn how_it_goes_is_told_while_it_runs() {
    let run = Run::new();
    let output = run.go_until_judged("--workload session --nemesis kill:one --time 12s --rate 100 --clients 4");
    assert_code(&output, 0);
    jepsen::assert_readable(&std::fs::read_to_string(run.out().join(file::FILE_NAME)).unwrap());
    let told = told(&String::from_utf8_lossy(&output.stdout));
    assert!(told.len() >= 3 && told.is_sorted_by_key(|(seconds, ok, ..)| (*seconds, *ok)), "{told:?}");
    let (seconds, ok, ..) = told[told.len() - 1];
    assert!(seconds >= 5 && ok > 20 && ok <= run.history().calls().len() as u64, "{told:?}");
    assert!(
        told.iter().any(|(_, _, leader, _)| leader.starts_with("leader ") && leader.contains(", term ")),
        "{told:?}"
    );
    assert!(told.iter().any(|(.., faults)| faults.starts_with("kill-one (peer ")), "{told:?}");
    assert!(told.iter().any(|(.., faults)| faults == "no fault"), "{told:?}");
}

#[test]
fn a_terminal_has_one_line_that_is_written_over() {
    let run = Run::new();
    // Of util-linux: gives what it starts a terminal, and tells what arrives there.
    let command = format!("{LAKE} chaos run --nemesis none --time 5s --rate 50 --seed 7 --out {}", run.out().display());
    let go = || Command::new("script").args(["-qefc", &command, "/dev/null"]).stdin(Stdio::null()).output().unwrap();
    let output = run.until_judged(go);
    assert_code(&output, 0);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.matches("\r\x1b[2K").count() >= 3, "{said:?}");
    let told = told(&said);
    assert!(told.iter().any(|(_, ok, leader, faults)| *ok > 0 && leader.starts_with("leader") && faults == "no fault"));
}

#[test]
fn a_run_whose_cluster_is_dead_in_the_end_ends_soon() {
    let run = Run::new();
    let child = run.command("--workload register --nemesis none --time 15s --rate 50 --clients 4").spawn().unwrap();
    await_load(&run.out());
    // They neither answer nor end.
    pids(&run.out().join("cluster")).into_iter().for_each(|pid| signal(pid, Signal::STOP));
    let began = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert_code(&output, 1);
    // One that did not give up would ask for every key in vain, for 20 s each.
    assert!(began.elapsed() < PATIENCE, "it took {:?} to say that nobody answers", began.elapsed());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("no common leader") && said.contains("peer 1 did not come back"), "{said}");
}

/// What peers in network namespaces need.
fn set_up_namespaces() {
    install(&["iproute2", "nftables"], || namespaces::missing().is_some());
}

/// A fault that this machine lacks something for makes the verdict unknown; of any other it is shown that it took effect.
#[test]
fn clocks_and_disks_are_seen_to_be_hurt() {
    install(&["libfaketime"], || clock::library().is_none());
    let run = Run::new();
    let can_be_had = BTreeMap::from([("clock", clock::library().is_some()), ("disk", disk::missing().is_none())]);
    let arguments = "--workload set --nemesis clock,disk --time 30s --rate 80 --clients 4";
    match can_be_had.values().all(|can| *can) {
        true => assert_code(&run.go_until_judged(arguments), 0),
        false => assert_code(&run.go(arguments), 2),
    }
    let history = run.history();
    let wanted = can_be_had.iter().filter(|(_, can)| **can).map(|(name, _)| (*name).to_owned());
    assert_eq!(installed(&history), wanted.collect::<BTreeSet<_>>());
    for (_, fault) in history.faults() {
        let Some(Installation::Installed(proof)) = &fault.installation else { continue };
        let shown = match (fault.name.as_str(), fault.phase) {
            ("clock", _) => "s ahead",
            (_, Phase::Start) => "waiting for room: peer",
            (_, Phase::Stop) => "KiB again",
        };
        assert!(proof.contains(shown), "{}: {proof}", fault.name);
    }
}

/// Namespaces and links of the machine that look like those of a run.
fn left_outside() -> Vec<String> {
    let names =
        ["/run/netns", "/sys/class/net"].into_iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten());
    let names = names.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("lake-")).collect()
}

#[test]
fn peers_in_network_namespaces_are_cut_apart_by_the_kernel() {
    set_up_namespaces();
    let run = Run::new();
    let arguments = "--cluster netns:3 --workload watch --time 25s --rate 100 --clients 6";
    run.holds(arguments, &["partition", "lossy", "endpoint"]);
    assert_eq!(left_outside(), Vec::<String>::new());
}

/// Also of peers that stand still then: they notice nothing until they go on.
#[test]
fn nothing_is_left_of_namespaces_when_their_run_is_killed() {
    set_up_namespaces();
    let run = Run::new();
    let mut child = run.command("--cluster netns:3 --nemesis pause:all --time 10m --rate 50").spawn().unwrap();
    await_load(&run.out());
    let children = pids(&run.out().join("cluster"));
    assert_eq!(children.len(), 3);
    let stands_still = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    };
    let until = Instant::now() + PATIENCE;
    while !children.iter().any(stands_still) {
        assert!(Instant::now() < until, "no peer is paused");
        std::thread::sleep(Duration::from_millis(2));
    }
    signal(child.id(), Signal::KILL);
    child.wait().unwrap();
    let until = Instant::now() + PATIENCE;
    while children.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        assert!(Instant::now() < until, "processes {children:?} are left");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(left_outside(), Vec::<String>::new());
}

/// One of two that were asked for comes, and the other one cannot.
#[test]
fn a_fault_that_never_took_effect_makes_the_verdict_unknown() {
    let run = Run::new();
    let arguments = "--cluster local:1 --workload register --nemesis kill,partition --time 14s --rate 100 --clients 2";
    // On a machine that is busy the other one may be seen too late.
    for _ in 0..ATTEMPTS {
        let _ = std::fs::remove_dir_all(run.out());
        assert_code(&run.go(arguments), 2);
        if !installed(&run.history()).is_empty() {
            break;
        }
    }
    assert_eq!(installed(&run.history()), BTreeSet::from(["kill".to_owned()]));
    let results = run.results();
    let faults = results.checks.iter().find(|outcome| outcome.checker == "faults").unwrap();
    assert!(faults.figures["kill"] > 0 && faults.figures["partition"] == 0, "{faults:?}");
    let Verdict::Unknown(why) = &faults.verdict else { panic!("{faults:?}") };
    assert!(why.contains("never took effect: partition (") && why.contains("only one peer"), "{why}");
    let page = std::fs::read_to_string(run.out().join("report.html")).unwrap();
    assert!(page.contains("never took effect: partition ("), "{page}");
}

/// By Ctrl-C, which a terminal sends to all of its group; and by SIGTERM, when nobody reads any more what it says.
#[test]
fn an_interrupted_run_is_recorded_and_leaves_nothing_behind() {
    side_by_side([
        || interrupted(|run| kill_process_group(Pid::from_child(run), Signal::INT).unwrap()),
        || {
            interrupted(|run| {
                drop(run.stdout.take());
                kill_process(Pid::from_child(run), Signal::TERM).unwrap();
            })
        },
    ]);
}

fn interrupted(by: fn(&mut Child)) {
    let run = Run::new();
    let mut command = run.command("--workload register --nemesis kill --time 10m --rate 100");
    let mut child = command.process_group(0).spawn().unwrap();
    let manifest = run.out().join("cluster");
    await_load(&run.out());
    let children = pids(&manifest);
    assert_eq!(children.len(), 3);
    by(&mut child);
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

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}
