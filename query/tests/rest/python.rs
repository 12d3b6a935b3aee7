//! Python with the clients, and scripts that use them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::support::installed;

/// What installs the rest, in seconds: pip backtracks for minutes.
const UV: &str = "uv==0.13.9";
/// Everything, down to the last dependency.
const REQUIREMENTS: &str = include_str!("requirements.txt");

/// The interpreter that has the clients, installed under the target directory if it is not there yet.
pub fn interpreter() -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let uv = installed(UV, "uv");
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("iceberg-clients");
    let wanted = home.join("requirements.txt");
    if std::fs::read_to_string(&wanted).is_ok_and(|had| had == REQUIREMENTS) {
        return home.join("bin/python");
    }
    let run = |args: &[&str]| {
        let output = Command::new(&uv).args(args).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "uv {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let list = scripts().join("requirements.txt");
    let python = home.join("bin/python");
    run(&["venv", "--quiet", "--clear", home.to_str().unwrap()]);
    run(&["pip", "install", "--quiet", "--python", python.to_str().unwrap(), "-r", list.to_str().unwrap()]);
    // Last, so that an interrupted installation is not taken for a whole one.
    std::fs::write(&wanted, REQUIREMENTS).unwrap();
    python
}

/// Where the scripts are, also for the tests of the whole workspace.
fn scripts() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let query = root.join("query");
    if query.is_dir() { query } else { root.to_owned() }.join("tests/rest")
}

/// Runs a function of a script beside this file, with these arguments; it must end well. Returns what it printed.
pub async fn run(script: &str, function: &str, arguments: &[&str]) -> String {
    let path = scripts().join(script);
    let (function, arguments): (String, Vec<String>) =
        (function.to_owned(), arguments.iter().map(|a| (*a).to_owned()).collect());
    let output = tokio::task::spawn_blocking(move || {
        // Settings of whoever runs the tests are not the tests'.
        let mut command = Command::new(interpreter());
        command.arg("-B").arg(path).arg(function).args(arguments).stdin(Stdio::null());
        command.env("PYICEBERG_HOME", "/nonexistent").env_remove("PYTHONPATH");
        command.output().unwrap()
    });
    let output = output.await.unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{script}: {}{}", said(&output.stdout), said(&output.stderr));
    said(&output.stdout)
}
