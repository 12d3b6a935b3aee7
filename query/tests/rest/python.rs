//! Python with the clients, and scripts that use them.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::support::{alone, bounded, installed, must};

/// What installs the rest, in seconds: pip backtracks for minutes.
const UV: &str = "uv==0.13.9";
/// Everything, down to the last dependency.
const REQUIREMENTS: &str = include_str!("requirements.txt");
/// How long one script may take: longer than any of them does.
const WITHIN: Duration = Duration::from_secs(15 * 60);

/// The interpreter that has the clients, installed under the target directory if it is not there yet.
pub fn interpreter() -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let uv = installed(UV, "uv");
    let _alone = alone("iceberg-clients");
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("iceberg-clients");
    let wanted = home.join("requirements.txt");
    if std::fs::read_to_string(&wanted).is_ok_and(|had| had == REQUIREMENTS) {
        return home.join("bin/python");
    }
    // Where it builds it leaves locks.
    let scratch = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| must(bounded(&uv).env("TMPDIR", scratch.path()).args(args));
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
    let path = scripts().join(script).display().to_string();
    let arguments = [&["-B", path.as_str(), function][..], arguments].concat();
    python(script, &arguments).await
}

/// Runs Python with these arguments; it must end well, and ends with the test. Returns what it printed.
pub async fn python(what: &str, arguments: &[&str]) -> String {
    let mut command = tokio::process::Command::new(tokio::task::spawn_blocking(interpreter).await.unwrap());
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    // Settings of whoever runs the tests are not the tests'.
    command.env("PYICEBERG_HOME", "/nonexistent").env_remove("PYTHONPATH");
    let ended = tokio::time::timeout(WITHIN, command.output()).await;
    let output = ended.unwrap_or_else(|_| panic!("{what} does not end")).unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{what}: {}{}", said(&output.stdout), said(&output.stderr));
    said(&output.stdout)
}
