//! `lake chaos check` and `lake chaos report`: exit codes, and what is printed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use clojure_reader::edn::{self, Edn};

fn lake(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lake")).args(arguments).output().unwrap()
}

fn history(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("chaos/tests/histories").join(name)
}

fn check(name: &str, more: &[&str]) -> (Option<i32>, String) {
    let path = history(name);
    let output = lake(&[&["chaos", "check", path.to_str().unwrap()], more].concat());
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn the_exit_code_is_the_verdict() {
    let (code, text) = check("register-concurrent.valid.edn", &[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.ends_with("\nvalid\n"), "{text}");
    let (code, text) = check("register-nothing-succeeded.unknown.edn", &[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("unknown: linearizable registers: no operation on a register succeeded"), "{text}");
    let (code, text) = check("register-stale-read.violation.edn", &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("read 1 = 10 (process 1) must come next, but cannot: it read 10."), "{text}");
    assert!(text.contains("write 1 := 20"), "{text}");
}

#[test]
fn the_verdict_is_there_for_scripts() {
    let (code, text) = check("append-write-skew.violation.edn", &["--format", "json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(code, Some(1));
    assert_eq!((&json["verdict"], &json["exit_code"]), (&"violation".into(), &1.into()));
    assert_eq!(json["checks"][0]["findings"][0]["kind"], "G2");
    let (code, _) = check("append-lost-update.violation.edn", &["--model", "serializable"]);
    assert_eq!(code, Some(0), "without time there is an order");
}

/// Knossos and elle-cli know one register: what they get has no keys, and only the one that is broken is.
#[test]
fn a_history_is_split_for_tools_that_know_one_object() {
    let dir = tempfile::tempdir().unwrap();
    let split = |name: &str| {
        let into = dir.path().join(name);
        let (code, _) = check(name, &["--split", into.to_str().unwrap()]);
        let mut parts: Vec<PathBuf> = std::fs::read_dir(into).unwrap().map(|part| part.unwrap().path()).collect();
        parts.sort();
        (code, parts)
    };
    let judge = |path: &Path| lake(&["chaos", "check", path.to_str().unwrap()]).status.code();
    let (code, parts) = split("register-other-keys.valid.edn");
    assert!(code == Some(0) && parts.len() > 1, "{parts:?}");
    // The second was never written: there is nothing to judge.
    assert_eq!(parts.iter().map(|part| judge(part)).collect::<Vec<_>>(), [Some(0), Some(2)], "{parts:?}");
    for part in &parts {
        let text = std::fs::read_to_string(part).unwrap();
        for (n, line) in text.lines().enumerate() {
            let operation = edn::read_string(line).unwrap();
            let get = |name: &'static str| operation.get(&Edn::Key(name.into())).unwrap();
            assert_eq!(get("index"), &Edn::Int(n as i64));
            let is_plain = |value: &Edn| matches!(value, Edn::Nil | Edn::Int(_));
            let value = get("value");
            assert!(is_plain(value) || matches!(value, Edn::Vector(cas) if cas.iter().all(is_plain)), "{line}");
        }
    }
    let (code, parts) = split("register-stale-read.violation.edn");
    assert_eq!((code, parts.iter().filter(|part| judge(part) == Some(1)).count()), (Some(1), 1), "{parts:?}");
    let output =
        lake(&["chaos", "check", history("session-back.violation.edn").to_str().unwrap(), "--split", "nowhere"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("registers, sets, lists and banks"), "{output:?}");
}

#[test]
fn what_goes_wrong_is_no_verdict() {
    let cases: [&[&str]; 9] = [
        &["chaos"],
        &["chaos", "run", "--no-such-option"],
        &["chaos", "run", "--cluster", "cloud:3", "--out", "never-made"],
        &["chaos", "run", "--nemesis", "wipe:all", "--out", "never-made"],
        &["chaos", "check", "no-such-file.edn"],
        &["chaos", "check", "--workload", "registers", "x.edn"],
        &["chaos", "check", "--no-such-option", "x.edn"],
        &["chaos", "check", "Cargo.toml"],
        &["chaos", "report", "no-such-directory"],
    ];
    for arguments in cases {
        let output = lake(arguments);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {output:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
    assert_eq!(lake(&["chaos", "check", "--help"]).status.code(), Some(0));
    assert_eq!(lake(&["meta", "--no-such-option"]).status.code(), Some(2), "only to chaos is 2 a verdict");
}

#[test]
fn a_page_is_made_of_a_history_alone() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(history("lock-zombie.violation.edn"), dir.path().join("history.edn")).unwrap();
    let checked = lake(&["chaos", "check", dir.path().to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(1), "a directory is taken as well: {checked:?}");
    let output = lake(&["chaos", "report", dir.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let page = std::fs::read_to_string(dir.path().join("report.html")).unwrap();
    assert!(page.contains("a write under fence 5 succeeded after fence 8 was granted"), "{page}");
    assert!(dir.path().join("results.json").exists());
}

/// Of a run whose fault never came, the history alone would be valid.
#[test]
fn a_runs_directory_is_judged_by_what_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(history("register-concurrent.valid.edn"), dir.path().join("history.edn")).unwrap();
    let record = r#"{"command": ["lake"], "version": "1", "began_unix_ms": 0, "workload": "register", "nemeses": ["kill"],
        "faults": ["kill"], "peers": 3, "clients": 3, "rate": 9.5, "time_ms": 1000, "seed": 1, "load_ended_ns": 0, "facts": null,
        "errors": {}, "deaths": null, "interrupted": null}"#;
    std::fs::write(dir.path().join("run.json"), record).unwrap();
    let checked = lake(&["chaos", "check", dir.path().to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(2), "{checked:?}");
    let said = String::from_utf8(checked.stdout).unwrap();
    assert!(said.lines().any(|line| line.starts_with("faults ") && line.contains(" unknown ")), "{said}");
}

/// Bugs on purpose are in a build with that feature only: any other knows neither the variable that names one nor the words that tell
/// of one. A build with the feature shows that they would be found here.
#[test]
fn a_release_build_has_no_planted_bugs() {
    for text in [lake_metasrv::planted::VARIABLE, "this process has the bug"] {
        // The program has some hundred megabytes.
        let grep = Command::new("grep").args(["-qaF", text, env!("CARGO_BIN_EXE_lake")]).status().unwrap();
        let expected = if cfg!(feature = "planted-bugs") { 0 } else { 1 };
        assert_eq!(grep.code(), Some(expected), "{text}");
    }
}
