//! `lake chaos sim`, as it is used: seeds that hold, the same seed again, a plan from a file. With the feature `planted-bugs`:
//! that it finds bugs, and makes what found them smaller.
//!
//!     cargo test --release --features planted-bugs --test sim

use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const LAKE: &str = env!("CARGO_BIN_EXE_lake");

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

#[test]
fn seeds_of_every_workload_hold() {
    let dir = scratch();
    for workload in ["register", "set", "append", "bank", "watch", "lock", "idempotency", "session"] {
        let (code, said) = simulate(dir.path(), &format!("--seeds 1..2 --time 4s --workload {workload}"), None);
        assert_eq!(code, Some(0), "{workload}: {said}");
        assert!(said.contains("2 seeds: 2 valid, 0 unknown, 0 violations"), "{workload}: {said}");
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
    fn descendants_ignored() {
        is_found("descendants-ignored", "--workload lock --profile none", &["scopes", "locks"]);
    }
}
