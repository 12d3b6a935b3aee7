//! `lake chaos matrix`: what it would run, what came of it, and that it ends in order.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use lake_chaos::matrix::PAIRS;
use lake_chaos::report::record;
use rustix::process::Signal;

use super::{ATTEMPTS, LAKE, PATIENCE, Room, assert_code, assert_files, await_load, pids, signal};

fn matrix(out: &Path, arguments: &str) -> Command {
    let mut command = Command::new(LAKE);
    command.args(["chaos", "matrix", "--seed", "7", "--out"]).arg(out).args(arguments.split_whitespace());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The directory of a run, as the place of its pair in the list has it.
fn directory_of(name: &str) -> String {
    let place = PAIRS.iter().position(|pair| pair.name() == name).unwrap_or_else(|| panic!("there is no {name}"));
    format!("{:02}-{}", place + 1, PAIRS[place].directory())
}

const TABLE: &str = "table/query-kill:one+kill:leader";
const REGISTER: &str = "register/kill:leader+partition";
const SESSION: &str = "session/transfer+kill:one";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_dry_run_says_what_would_be_run_and_does_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("matrix");
    let output = matrix(&out, "--dry-run --minutes 3").output().unwrap();
    assert_code(&output, 0);
    let said = said(&output);
    assert!(said.contains("lake chaos run --workload table --nemesis query-kill:one,kill:leader --time 30s"), "{said}");
    assert_eq!(said.matches("lake chaos run").count(), 4, "{said}");
    assert!(said.contains("not run: session/transfer+kill:one: there is no time for it"), "{said}");
    assert!(said.contains("not run: table/store-late+store-throttle: there is no object store"), "{said}");
    assert!(!out.exists());
    let store = "--warehouse s3://b/w --s3-endpoint http://127.0.0.1:9000 --query-arg --s3-path-style";
    let output = matrix(&out, &format!("--dry-run --only table/store-late+store-throttle {store}")).output().unwrap();
    assert_code(&output, 0);
    let said = String::from_utf8_lossy(&output.stdout);
    let run = "--workload table --nemesis store-late,store-throttle --time";
    assert!(
        said.contains(run) && said.contains("--warehouse s3://b/w/06-table-store-late-store-throttle-12"),
        "{said}"
    );
    assert!(said.contains("--s3-endpoint http://127.0.0.1:9000 --query-arg --s3-path-style"), "{said}");
    let output = matrix(&out, "--dry-run --only tables").output().unwrap();
    assert_code(&output, 3);
    assert!(String::from_utf8_lossy(&output.stderr).contains("session/transfer+kill:one"));
}

#[test]
fn the_runs_of_a_matrix_are_summed_up_on_one_page() {
    let _room = Room::take();
    let dir = tempfile::Builder::new().prefix("lake-matrix-").tempdir().unwrap();
    let out = dir.path().join("matrix");
    let mut output = None;
    // A busy machine may show too little.
    for _ in 0..ATTEMPTS {
        let _ = std::fs::remove_dir_all(&out);
        let ended = matrix(&out, &format!("--minutes 1.6 --only {TABLE},session")).output().unwrap();
        let is_judged = ended.status.code() != Some(2);
        output = Some(ended);
        if is_judged {
            break;
        }
    }
    let output = output.unwrap();
    assert_code(&output, 0);
    let said = said(&output);
    let index = std::fs::read_to_string(out.join("index.html")).unwrap();
    assert!(index.contains("<b>valid</b> 2 of 2 runs valid"), "{index}");
    for (name, workload) in [(directory_of(TABLE), "table"), (directory_of(SESSION), "session")] {
        assert_files(&out.join(&name));
        assert!(index.contains(&format!("<a href=\"{name}/report.html\">")), "{index}");
        assert!(out.join(format!("{name}.log")).metadata().unwrap().len() > 0);
        let row = said.lines().find(|line| line.starts_with(workload) && line.ends_with(&name));
        let row = row.unwrap_or_else(|| panic!("{name} is not told: {said}"));
        assert!(row.contains("  valid  ") && row.contains(" in effect"), "{row}");
    }
    // What repeats a run is what anybody would type.
    let record = record::read(&out.join(directory_of(SESSION))).unwrap().unwrap();
    let place = PAIRS.iter().position(|pair| pair.name() == SESSION).unwrap();
    assert_eq!(record.seed, 7 + place as u64);
    assert!(!record.command_line().contains("parent"), "{}", record.command_line());
}

#[test]
fn a_matrix_that_is_interrupted_tells_what_was_run_and_leaves_nothing_behind() {
    let _room = Room::take();
    let dir = tempfile::Builder::new().prefix("lake-matrix-").tempdir().unwrap();
    let out = dir.path().join("matrix");
    let child = matrix(&out, &format!("--minutes 60 --only {REGISTER},session")).spawn().unwrap();
    let first = out.join(directory_of(REGISTER));
    await_load(&first);
    let children = pids(&first.join("cluster"));
    assert_eq!(children.len(), 3);
    let began = Instant::now();
    signal(child.id(), Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert_code(&output, 2);
    assert!(began.elapsed() < PATIENCE, "it ended after {:?}", began.elapsed());
    let said = said(&output);
    assert!(said.contains("it was interrupted") && said.contains("not run: session/"), "{said}");
    let index = std::fs::read_to_string(out.join("index.html")).unwrap();
    assert!(index.contains(&format!("{}/report.html", directory_of(REGISTER))) && index.contains("<h2>Not run</h2>"));
    for pid in children {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is left");
    }
}

/// The run that is under way ends with a matrix that is killed, and its processes with it.
#[test]
fn a_run_ends_with_its_matrix() {
    let _room = Room::take();
    let dir = tempfile::Builder::new().prefix("lake-matrix-").tempdir().unwrap();
    let out = dir.path().join("matrix");
    let mut child = matrix(&out, &format!("--minutes 60 --only {REGISTER}")).spawn().unwrap();
    let first = out.join(directory_of(REGISTER));
    await_load(&first);
    let mut processes = pids(&first.join("cluster"));
    // Its own as well: it writes what it has seen until it ends.
    processes.push(std::fs::read_to_string(first.join("cluster/lock")).unwrap().parse().unwrap());
    signal(child.id(), Signal::KILL);
    child.wait().unwrap();
    let until = Instant::now() + PATIENCE;
    while processes.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        assert!(Instant::now() < until, "the run goes on without its matrix");
        std::thread::sleep(Duration::from_millis(50));
    }
}
