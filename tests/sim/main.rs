//! `lake chaos sim`, as it is used: seeds that hold, the same seed again, a plan from a file. With the feature `planted-bugs`:
//! that it finds bugs, and makes what found them smaller.
//!
//!     cargo test --release --features planted-bugs --test sim

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;

const LAKE: &str = env!("CARGO_BIN_EXE_lake");
/// How long what should happen soon may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

fn scratch() -> TempDir {
    tempfile::Builder::new().prefix("lake-sim-").tempdir().unwrap()
}

fn simulate(dir: &Path, arguments: &str, bug: Option<&str>) -> (Option<i32>, String) {
    let mut command = Command::new(LAKE);
    command.args(["chaos", "sim", "--out"]).arg(dir).args(arguments.split_whitespace()).current_dir(dir);
    if let Some(bug) = bug {
        command.env("LAKE_PLANTED_BUG", bug);
    }
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    println!("{said}");
    (status.code(), said)
}

/// What is left in a trace after a simulation that is valid.
#[track_caller]
fn trace(dir: &Path, seed: u64) -> String {
    let file = dir.join(format!("trace-{seed}"));
    let arguments = format!("--seeds {seed} --time 4s --trace {}", file.display());
    let (code, said) = simulate(dir, &arguments, None);
    assert_eq!(code, Some(0), "{said}");
    std::fs::read_to_string(file).unwrap()
}

#[test]
fn the_same_seed_leaves_the_same_trace_and_another_one_another() {
    let dir = scratch();
    let first = trace(dir.path(), 11);
    assert!(first.lines().count() > 500, "{first}");
    let again = trace(dir.path(), 11);
    let differs = first.lines().zip(again.lines()).find(|(one, other)| one != other);
    assert!(first == again, "{differs:?}");
    assert_ne!(first, trace(dir.path(), 12));
}

/// Answers are lost on purpose here, so that many calls are given up.
const GIVEN_UP: &str = r#"{
    "seed": 21, "peers": 3, "workload": "idempotency", "clients": 8, "rate": 300.0, "operations": 100000, "time_ms": 6000,
    "latency_ms": 6, "sync_ms": 20, "snapshot_entries": 100000, "kept_entries": 10000,
    "faults": [
        { "at_ms": 500, "fault": { "isolate": { "who": "leader", "held": true, "for_ms": 2500 } } },
        { "at_ms": 3200, "fault": { "slow": { "latency_ms": 120, "for_ms": 1500 } } }
    ]
}"#;

/// The trace of one simulation, whose process is stopped for `pause` each time that the trace has grown by so many bytes;
/// and how often it was.
fn halting(dir: &Path, plan: &str, grown_by: u64, pause: Option<Duration>) -> (String, u32) {
    let (plan_file, trace) = (dir.join("plan"), dir.join("trace"));
    std::fs::write(&plan_file, plan).unwrap();
    let mut command = Command::new(LAKE);
    command.args(["chaos", "sim", "--child", "--trace"]).arg(&trace).current_dir(dir);
    command.stdin(File::open(plan_file).unwrap()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let pid = Pid::from_child(&child);
    let (mut next, mut stopped) = (grown_by, 0);
    let ended = loop {
        if let Some(ended) = child.try_wait().unwrap() {
            break ended;
        }
        let bytes = std::fs::metadata(&trace).map_or(0, |metadata| metadata.len());
        match pause {
            Some(pause) if bytes >= next => {
                next = bytes + grown_by;
                kill_process(pid, Signal::STOP).unwrap();
                sleep(pause);
                kill_process(pid, Signal::CONT).unwrap();
                stopped += 1;
            }
            _ => sleep(Duration::from_millis(1)),
        }
    };
    assert!(ended.success());
    let trace_of = std::fs::read_to_string(&trace).unwrap();
    // Its size is what the next one's growth is measured by.
    std::fs::remove_file(&trace).unwrap();
    let snapshots = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    snapshots.filter(|path| path.is_dir()).for_each(|path| std::fs::remove_dir_all(path).unwrap());
    (trace_of, stopped)
}

/// The process of a simulation may be held up for as long as the machine likes: libraries that look at the clock (h2 forgets a
/// stream that was reset after a second) must see the simulation's.
#[test]
fn a_process_that_is_held_up_leaves_the_same_trace() {
    let dir = scratch();
    let (first, _) = halting(dir.path(), GIVEN_UP, u64::MAX, None);
    // Longer than h2 remembers a stream.
    let pause = Duration::from_millis(1_100);
    // Often enough that it is so between the end of a stream and the frame that comes late. Where this process is held up itself,
    // it misses some.
    let mut stopped = 0;
    for times in [20, 60, 180] {
        let (again, so_often) = halting(dir.path(), GIVEN_UP, first.len() as u64 / times, Some(pause));
        let differs = first.lines().zip(again.lines()).find(|(one, other)| one != other);
        assert!(first == again, "{differs:?}");
        stopped = so_often;
        if stopped >= 10 {
            break;
        }
    }
    assert!(stopped >= 10, "it was held up {stopped} times only");
}

/// What was done to peers is in the trace, by what came of it.
#[test]
fn clocks_full_disks_and_a_lost_one_are_seen_to_take_effect() {
    let dir = scratch();
    let plan = r#"{
        "seed": 5, "peers": 3, "workload": "lock", "clients": 6, "rate": 200.0, "operations": 100000, "time_ms": 8000,
        "latency_ms": 4, "sync_ms": 5, "snapshot_entries": 100, "kept_entries": 20,
        "faults": [
            { "at_ms": 300, "fault": { "clock": { "who": "leader", "others": false, "jump_ms": 1500, "faster_percent": 40,
                                                  "for_ms": 2000 } } },
            { "at_ms": 600, "fault": { "full": { "who": { "peer": 2 }, "for_ms": 900 } } },
            { "at_ms": 2500, "fault": { "clock": { "who": { "peer": 3 }, "others": true, "jump_ms": 0,
                                                   "faster_percent": 100, "for_ms": 1500 } } },
            { "at_ms": 3000, "fault": { "lose": { "who": { "peer": 1 }, "by": 4, "for_ms": 200 } } }
        ]
    }"#;
    std::fs::write(dir.path().join("plan.json"), plan).unwrap();
    let (code, said) = simulate(dir.path(), "--plan plan.json --trace trace", None);
    assert_eq!(code, Some(0), "{said}");
    let trace = std::fs::read_to_string(dir.path().join("trace")).unwrap();
    let has = |what: &str| assert!(trace.lines().any(|line| line.contains(what)), "{what:?} is not in the trace");
    has("-- the clocks of peers [1, 2] go like the others again");
    has("-- peer 2 has room on its disk again, which");
    has("p1 has lost its disk");
    has("-- peer 4 is in the place of peer 1");
    has("-- peer 1 was refused: ");
    assert!(!trace.contains("which 0 batches waited for"));
}

/// A fault that cannot be had leaves nothing to conclude from it.
#[test]
fn a_fault_without_effect_makes_the_verdict_unknown() {
    let dir = scratch();
    let plan = r#"{
        "seed": 5, "peers": 3, "workload": "register", "clients": 3, "rate": 100.0, "operations": 1000, "time_ms": 5000,
        "latency_ms": 4, "sync_ms": 5, "snapshot_entries": 100000, "kept_entries": 10000,
        "faults": [
            { "at_ms": 300, "fault": { "lose": { "who": { "peer": 1 }, "by": 4, "for_ms": 100 } } },
            { "at_ms": 900, "fault": { "lose": { "who": { "peer": 2 }, "by": 5, "for_ms": 100 } } }
        ]
    }"#;
    std::fs::write(dir.path().join("plan.json"), plan).unwrap();
    let (code, said) = simulate(dir.path(), "--plan plan.json", None);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("took no effect") && said.contains("two could be a majority"), "{said}");
}

/// Where no peer runs there is nothing to crash, and nothing is sent between peers: both are waited for, and then told.
#[test]
fn crashes_and_cuts_that_meet_nothing_make_the_verdict_unknown() {
    let dir = scratch();
    let plan = r#"{
        "seed": 5, "peers": 3, "workload": "register", "clients": 3, "rate": 100.0, "operations": 1000, "time_ms": 3000,
        "latency_ms": 4, "sync_ms": 5, "snapshot_entries": 100000, "kept_entries": 10000,
        "faults": [
            { "at_ms": 300, "fault": { "isolate": { "who": "leader", "held": false, "for_ms": 500 } } },
            { "at_ms": 900, "fault": { "slow": { "latency_ms": 20, "for_ms": 500 } } },
            { "at_ms": 2000, "fault": { "crash_all": { "for_ms": 60000 } } },
            { "at_ms": 2100, "fault": { "crash": { "who": "leader", "for_ms": 100 } } },
            { "at_ms": 2100, "fault": { "isolate": { "who": { "peer": 2 }, "held": false, "for_ms": 100 } } }
        ]
    }"#;
    std::fs::write(dir.path().join("plan.json"), plan).unwrap();
    let (code, said) = simulate(dir.path(), "--plan plan.json --trace trace", None);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("took no effect: isolate peer 2 ") && said.contains("; crash the leader, back"), "{said}");
    // The others were seen to.
    assert!(said.contains("crash 0 of 1, crash-all 1 of 1, isolate 1 of 2, slow 1 of 1"), "{said}");
    let trace = std::fs::read_to_string(dir.path().join("trace")).unwrap();
    assert!(trace.contains("links are whole again, 0 messages met the cut"), "{said}");
}

/// A network so slow that no cluster can be founded on it: that breaks a promise without a bug. It is told as a failing seed is,
/// and what has nothing to do with it is left out.
#[test]
fn what_fails_is_told_and_made_smaller() {
    let dir = scratch();
    let plan = r#"{
        "seed": 5, "peers": 3, "workload": "register", "clients": 3, "rate": 100.0, "operations": 1000, "time_ms": 3000,
        "latency_ms": 300000, "sync_ms": 5, "snapshot_entries": 100000, "kept_entries": 10000,
        "faults": [
            { "at_ms": 300, "fault": { "crash": { "who": "leader", "for_ms": 100 } } },
            { "at_ms": 900, "fault": { "slow": { "latency_ms": 20, "for_ms": 500 } } }
        ]
    }"#;
    std::fs::write(dir.path().join("plan.json"), plan).unwrap();
    let (code, said) = simulate(dir.path(), "--plan plan.json", None);
    assert_eq!(code, Some(1), "{said}");
    for part in [
        "seed 5: violation: recovery: founding the cluster",
        "made smaller in ",
        "0 of 2 faults",
        "1 of 3 clients",
        "what was done, and came of it",
        "the trace's last ",
        "lake chaos sim --plan ./seed-5.json --trace FILE",
        "1 seeds: 0 valid, 0 unknown, 1 violations",
    ] {
        let part = part.replace("./", &format!("{}/", dir.path().display()));
        assert!(said.contains(&part), "{part} is not said");
    }
    let (code, again) = simulate(dir.path(), "--plan seed-5.json --attempts 0", None);
    assert_eq!(code, Some(1), "{again}");
    assert!(again.contains("seed 5: violation: recovery: founding the cluster"), "{again}");
}

/// Nothing can be said of what hardly happened.
#[test]
fn too_few_operations_make_the_verdict_unknown() {
    let dir = scratch();
    let plan = r#"{
        "seed": 5, "peers": 3, "workload": "register", "clients": 3, "rate": 100.0, "operations": 1000, "time_ms": 3000,
        "latency_ms": 4, "sync_ms": 5, "snapshot_entries": 100000, "kept_entries": 10000,
        "faults": [
            { "at_ms": 0, "fault": { "cut_clients": { "who": { "peer": 1 }, "for_ms": 3000 } } },
            { "at_ms": 0, "fault": { "cut_clients": { "who": { "peer": 2 }, "for_ms": 3000 } } },
            { "at_ms": 0, "fault": { "cut_clients": { "who": { "peer": 3 }, "for_ms": 3000 } } }
        ]
    }"#;
    std::fs::write(dir.path().join("plan.json"), plan).unwrap();
    let (code, said) = simulate(dir.path(), "--plan plan.json", None);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("operations succeeded, 20 are needed"), "{said}");
}

/// Of a profile that is named a fault must be seen to take effect, or there is no verdict.
#[test]
fn every_profile_takes_effect_and_all_holds() {
    let dir = scratch();
    for profile in ["crash", "partition", "membership", "snapshot"] {
        let (code, said) = simulate(dir.path(), &format!("--seeds 1..3 --time 4s --profile {profile}"), None);
        assert_eq!(code, Some(0), "{profile}: {said}");
        assert!(said.contains("3 seeds: 3 valid"), "{profile}: {said}");
    }
}

#[test]
fn seeds_of_every_workload_hold() {
    let dir = scratch();
    for workload in ["register", "set", "append", "bank", "watch", "lock", "idempotency", "session"] {
        let (code, said) = simulate(dir.path(), &format!("--seeds 1..2 --time 4s --workload {workload}"), None);
        assert_eq!(code, Some(0), "{workload}: {said}");
        assert!(said.contains("2 seeds: 2 valid, 0 unknown, 0 violations"), "{workload}: {said}");
    }
    let (code, said) = simulate(dir.path(), "--seeds 1..8 --time 4s --profile clock,disk", None);
    assert_eq!(code, Some(0), "{said}");
}

/// What simulations of this process have in memory, or wherever temporary files are: a directory each.
fn under_way(parent: Pid) -> Vec<String> {
    let places = [Path::new("/dev/shm").to_owned(), std::env::temp_dir()];
    let entries = places.iter().filter_map(|place| std::fs::read_dir(place).ok()).flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&format!("lake-sim-{}-", parent.as_raw_nonzero()))).collect()
}

/// Ctrl-C, which a terminal sends to all of a group, and SIGTERM: no more is begun, what was judged is told, and a part of the
/// seeds is not taken for all of them.
#[test]
fn an_interrupted_simulation_ends_with_what_was_judged_and_is_unknown() {
    for signal in [Signal::INT, Signal::TERM] {
        let dir = scratch();
        let mut command = Command::new(LAKE);
        // It would end by itself if this test fails.
        let arguments = "--seeds 1..100000 --budget 4m --jobs 1 --time 4s --workload register --profile none";
        command.args(["chaos", "sim", "--out"]).arg(dir.path()).args(arguments.split_whitespace());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let child = command.spawn().unwrap();
        let parent = Pid::from_child(&child);
        let until = Instant::now() + PATIENCE;
        // Its simulations are numbered from 0.
        let second = format!("lake-sim-{}-1-", parent.as_raw_nonzero());
        while !under_way(parent).iter().any(|name| name.starts_with(&second)) {
            assert!(Instant::now() < until, "no simulation ends");
            sleep(Duration::from_millis(2));
        }
        let sent =
            if signal == Signal::INT { kill_process_group(parent, signal) } else { kill_process(parent, signal) };
        sent.unwrap();
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let said = format!("{}\n{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert_eq!(status.code(), Some(2), "{signal:?}: {said}");
        assert!(said.contains("unknown: interrupted after "), "{said}");
        assert!(said.contains(" valid, 0 unknown, 0 violations") && !said.contains("seeds: 0 valid"), "{said}");
        // The one that was under way came to nothing, which is nobody's fault.
        assert!(!said.contains("no verdict"), "{said}");
        assert_eq!(under_way(parent), Vec::<String>::new());
    }
}

#[test]
fn arguments_that_make_no_sense_are_no_verdict() {
    let dir = scratch();
    for arguments in ["--seeds 9..2", "--profile fire", "--seeds 1..3 --trace t", "--plan nowhere.json", "--time 1000s"]
    {
        let (code, said) = simulate(dir.path(), arguments, None);
        assert_eq!(code, Some(3), "{arguments}: {said}");
    }
}

/// A peer whose address refuses connections must be tried again with pauses: without, the simulation's time never goes on.
#[test]
fn a_peer_that_refuses_connections_is_tried_again_with_pauses() {
    let dir = scratch();
    let plan = r#"{
        "seed": 20, "peers": 3, "workload": "register", "clients": 3, "rate": 100.0, "operations": 1000, "time_ms": 5000,
        "latency_ms": 3, "sync_ms": 5, "snapshot_entries": 100000, "kept_entries": 10000,
        "faults": [{ "at_ms": 500, "fault": { "isolate": { "who": { "peer": 2 }, "held": false, "for_ms": 4000 } } }]
    }"#;
    std::fs::write(dir.path().join("plan.json"), plan).unwrap();
    let (code, said) = simulate(dir.path(), "--plan plan.json", None);
    assert_eq!(code, Some(0), "{said}");
}

#[cfg(feature = "planted-bugs")]
mod planted {
    use super::*;

    /// Seeds until a bug must have been found.
    const SEEDS: u64 = 60;

    /// Finds the bug, by one of these promises, and finds it again in the smaller plan that is left.
    #[track_caller]
    fn is_found(bug: &str, arguments: &str, by: &[&str]) {
        let dir = scratch();
        let found = (1..=SEEDS).step_by(10).find_map(|from| {
            let to = from + 9;
            let arguments = format!("--seeds {from}..{to} --attempts 0 {arguments}");
            let (code, said) = simulate(dir.path(), &arguments, Some(bug));
            let seed = said.split("seed ").find_map(|rest| rest.split_once(": violation")?.0.parse::<u64>().ok());
            (code == Some(1)).then(|| seed.unwrap())
        });
        let seed = found.unwrap_or_else(|| panic!("{bug} was not found in {SEEDS} seeds"));
        let (code, said) = simulate(dir.path(), &format!("--seeds {seed} --attempts 40 {arguments}"), Some(bug));
        assert_eq!(code, Some(1), "seed {seed} does it again: {said}");
        assert!(by.iter().any(|promise| said.contains(&format!("violation: {promise}: "))), "{said}");
        let plan = dir.path().join(format!("seed-{seed}.json"));
        let (code, said) = simulate(dir.path(), &format!("--plan {} --attempts 0", plan.display()), Some(bug));
        assert_eq!(code, Some(1), "the smaller plan does it again: {said}");
        let (code, said) = simulate(dir.path(), &format!("--plan {} --attempts 0", plan.display()), None);
        assert_ne!(code, Some(1), "without the bug it does not: {said}");
    }

    #[test]
    fn stale_reads() {
        is_found("stale-reads", "--workload register --profile partition", &["linearizable registers"]);
    }

    #[test]
    fn acknowledged_unsynced() {
        let by = ["committed", "sets", "acknowledged", "state", "log matching", "election safety"];
        is_found("acknowledged-unsynced", "--workload set --profile crash", &by);
    }

    #[test]
    fn applied_twice() {
        is_found("applied-twice", "--workload idempotency --profile crash,partition", &["exactly once"]);
    }

    #[test]
    fn vote_forgotten() {
        let by = ["election safety", "committed", "log matching", "sets", "acknowledged"];
        is_found("vote-forgotten", "--workload set --profile crash,partition", &by);
    }

    #[test]
    fn snapshot_short() {
        is_found("snapshot-short", "--workload register --profile snapshot", &["state"]);
    }

    #[test]
    fn lease_outlived() {
        is_found("lease-outlived", "--workload lock --profile none", &["leases", "locks"]);
    }

    #[test]
    fn lost_event() {
        is_found("lost-event", "--workload watch --profile none", &["watches"]);
    }

    #[test]
    fn cas_ignored() {
        is_found("cas-ignored", "--workload register --profile none", &["commands", "linearizable registers"]);
    }

    #[test]
    fn descendants_ignored() {
        is_found("descendants-ignored", "--workload lock --profile none", &["scopes", "commands", "locks"]);
    }
}
