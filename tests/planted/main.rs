//! Each planted bug is found by the right checker, within a bounded number of bounded runs:
//!
//!     cargo test --release --features planted-bugs --test planted
//!
//! Runs of the same faults without a bug are valid: that is what the tests of `lake chaos run` (`tests/chaos/main.rs`) show.

#[path = "../../query/tests/rest/python.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod python;
#[path = "../../client/tests/support/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use lake_metasrv::planted::{BUGS, VARIABLE};
use lake_query::planted;
use serde_json::Value;

const LAKE: &str = env!("CARGO_BIN_EXE_lake");
/// Runs until a bug must have been found.
const ATTEMPTS: u64 = 4;

static ALONE: Mutex<()> = Mutex::new(());

/// Runs with the bug until one finds it; the checker that did.
fn found_by(bug: &str, arguments: &str) -> Vec<String> {
    let mut bugs = BUGS.iter().map(|(name, _)| *name).chain(planted::BUGS.iter().map(|(name, _)| *name));
    assert!(bugs.any(|name| name == bug) && VARIABLE == planted::VARIABLE, "there is no bug {bug}");
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::Builder::new().prefix("lake-planted-").tempdir().unwrap();
    let mut said = String::new();
    for attempt in 1..=ATTEMPTS {
        let out = dir.path().join(attempt.to_string());
        let output = Command::new(LAKE)
            .args(["chaos", "run", "--seed", &attempt.to_string(), "--out"])
            .arg(&out)
            .args(arguments.split_whitespace())
            .env(VARIABLE, bug)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        said = format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if output.status.code() == Some(1) {
            let checkers = violations(&out);
            println!("{bug}: found in run {attempt} by {}", checkers.join(", "));
            return checkers;
        }
        println!("{bug}: run {attempt} ended with {:?}", output.status.code());
    }
    panic!("{bug} was not found in {ATTEMPTS} runs; the last one said:\n{said}");
}

fn violations(out: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(out.join("results.json")).unwrap();
    let results: Value = serde_json::from_str(&text).unwrap();
    let mut found = Vec::new();
    collect(&results, &mut found);
    found
}

/// Names of checkers whose verdict is a violation, wherever they stand.
fn collect(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            if let (Some(Value::String(checker)), Some(Value::String(verdict))) =
                (fields.get("checker"), fields.get("verdict"))
                && verdict == "violation"
            {
                found.push(checker.clone());
            }
            fields.values().for_each(|value| collect(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, found)),
        _ => {}
    }
}

#[track_caller]
fn assert_found(bug: &str, arguments: &str, by: &[&str]) {
    let found = found_by(bug, arguments);
    assert!(found.iter().any(|checker| by.contains(&checker.as_str())), "{bug} was found by {found:?}, not by {by:?}");
}

#[test]
fn stale_reads() {
    assert_found(
        "stale-reads",
        "--workload register --nemesis slow --time 10s --rate 300",
        &["linearizable registers"],
    );
}

#[test]
fn acknowledged_unsynced() {
    let arguments = "--workload set --nemesis power:all --time 15s --rate 300";
    assert_found("acknowledged-unsynced", arguments, &["sets", "convergence"]);
}

#[test]
fn applied_twice() {
    assert_found("applied-twice", "--workload idempotency --nemesis none --time 8s --rate 200", &["exactly once"]);
}

#[test]
fn lost_event() {
    assert_found("lost-event", "--workload watch --nemesis none --time 8s --rate 200", &["watches"]);
}

#[test]
fn lease_outlived() {
    assert_found("lease-outlived", "--workload lock --nemesis none --time 20s --rate 100", &["locks"]);
}

#[test]
fn descendants_ignored() {
    assert_found("descendants-ignored", "--workload lock --nemesis none --time 15s --rate 100", &["locks"]);
}

#[test]
fn vote_forgotten() {
    let arguments = "--workload set --nemesis rejoin --time 25s --rate 300";
    assert_found("vote-forgotten", arguments, &["sets", "convergence"]);
}

#[test]
fn snapshot_short() {
    let arguments = "--workload register --nemesis snapshot --time 25s --rate 300";
    assert_found("snapshot-short", arguments, &["convergence", "linearizable registers"]);
}

#[test]
fn cas_ignored() {
    assert_found("cas-ignored", "--workload register --nemesis none --time 8s --rate 300", &["linearizable registers"]);
}

#[test]
fn outcome_apart() {
    assert_found("outcome-apart", "--workload table --nemesis none --time 20s --rate 15 --clients 5", &["tables"]);
}

#[test]
fn age_untold() {
    let arguments = "--workload cached --nemesis query-partition:one --time 25s --rate 25 --clients 6";
    assert_found("age-untold", arguments, &["cached reads"]);
}

#[test]
fn append_unsettled() {
    let arguments = "--workload hot --nemesis none --time 20s --rate 40 --clients 12";
    assert_found("append-unsettled", arguments, &["appends"]);
}

#[test]
fn expired_too_much() {
    let arguments = "--workload upkeep --nemesis none --time 30s --rate 16 --clients 6";
    assert_found("expired-too-much", arguments, &["upkeep"]);
}

#[test]
fn expired_young() {
    let arguments = "--workload upkeep --nemesis none --time 30s --rate 24 --clients 6";
    assert_found("expired-young", arguments, &["upkeep"]);
}

/// Operations that may take less: files look old the sooner.
#[test]
fn swept_live() {
    let arguments = "--workload upkeep --nemesis none --time 30s --rate 24 --clients 6 --operation-timeout 3s";
    assert_found("swept-live", arguments, &["upkeep"]);
}

#[test]
fn purged_borrowed() {
    let arguments = "--workload upkeep --nemesis none --time 25s --rate 16 --clients 6";
    assert_found("purged-borrowed", arguments, &["upkeep"]);
}

#[test]
fn rest_race_ignored() {
    let python = python::interpreter();
    let arguments = "--workload table --nemesis none --time 25s --rate 20 --clients 8 --rest-clients 3 --python";
    assert_found("rest-race-ignored", &format!("{arguments} {}", python.display()), &["tables"]);
}

#[test]
fn upkeep_unfenced() {
    let arguments = "--workload upkeep --nemesis none --time 25s --rate 16 --clients 6";
    assert_found("upkeep-unfenced", arguments, &["fences of upkeep"]);
}

#[test]
fn rename_apart() {
    let arguments = "--workload catalog --nemesis none --time 20s --rate 15 --clients 5";
    assert_found("rename-apart", arguments, &["catalog"]);
}

#[test]
fn reads_unchecked() {
    assert_found("reads-unchecked", "--workload table --nemesis none --time 25s --rate 15 --clients 5", &["tables"]);
}

#[test]
fn tables_apart() {
    let arguments = "--workload multi-table --nemesis none --time 20s --rate 15 --clients 5";
    assert_found("tables-apart", arguments, &["accounts"]);
}
