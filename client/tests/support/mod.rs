//! Services of others that the tests run stores against: installed from PyPI, started, and killed when dropped.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long anything in these tests may take.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// How long one command of an installation may take, in seconds.
const INSTALL_WITHIN: &str = "600";
/// How often it is tried: registries fail now and then.
const INSTALL_ATTEMPTS: u32 = 3;

/// A program that is ended if it takes too long.
pub fn bounded(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", INSTALL_WITHIN]).arg(program);
    command
}

/// Runs a command that must succeed in the end, and may be run again.
pub fn must(command: &mut Command) {
    for attempt in 1.. {
        let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        if output.status.success() {
            return;
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(attempt < INSTALL_ATTEMPTS, "{command:?}, {attempt} times: {}: {said}", output.status);
        std::thread::sleep(Duration::from_secs(5));
    }
}

/// Waits until no other process of these tests installs what is called so, and keeps them waiting until it is dropped.
pub fn alone(name: &str) -> File {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.lock"));
    let lock = File::options().create(true).append(true).open(&path);
    let lock = lock.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    lock.lock().unwrap_or_else(|e| panic!("locking {}: {e}", path.display()));
    lock
}

/// The binary that comes with a package, installed under the target directory if it is not there yet.
pub fn installed(package: &str, binary: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let name = package.replace("==", "-");
    let _alone = alone(&name);
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&name);
    if !home.exists() {
        // Made aside and renamed, so that an interrupted installation is not taken for a whole one. A venv knows its own
        // path, but what is looked for in it does not care.
        let unfinished = home.with_file_name(format!("{name}.unfinished-{}", std::process::id()));
        must(bounded("python3").args(["-m", "venv"]).arg(&unfinished));
        must(bounded(unfinished.join("bin/python")).args(["-m", "pip", "install", "--quiet", package]));
        if let Err(e) = std::fs::rename(&unfinished, &home) {
            assert!(home.exists(), "{}: {e}", home.display());
            std::fs::remove_dir_all(&unfinished).unwrap();
        }
    }
    let found = find(&home, binary);
    found.unwrap_or_else(|| panic!("{package} brought no {binary} under {}", home.display()))
}

/// A program of that name, which is no script of Python's.
fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    let entries: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    let is_program = |path: &PathBuf| {
        path.file_name().is_some_and(|n| n == name)
            && path.is_file()
            && std::fs::read(path).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF"))
    };
    let dirs = entries.iter().filter(|path| path.is_dir() && !path.is_symlink());
    entries.iter().find(|path| is_program(path)).cloned().or_else(|| dirs.into_iter().find_map(|dir| find(dir, name)))
}

/// A port that nobody else gets for a while.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // With a connection that this end closed first, the kernel hands the port to nobody for a minute, except to who names it.
    let other_end = std::net::TcpStream::connect(address).unwrap();
    drop(listener.accept().unwrap());
    drop(other_end);
    address.port()
}

/// A process that ends with the test. What it says is printed if the test fails.
pub struct Service {
    process: Child,
    log: PathBuf,
}

impl Service {
    /// Starts it, with what it says in a file of this directory.
    pub fn start(command: &mut Command, dir: &Path) -> Self {
        let log = dir.join("said");
        let said = std::fs::File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(said.try_clone().unwrap()).stderr(said);
        Self { process: command.spawn().unwrap(), log }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        if std::thread::panicking() {
            println!("it said: {}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}

/// Waits for something to become true.
pub async fn eventually<T>(what: &str, look: impl AsyncFn() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
