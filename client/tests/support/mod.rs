//! Services of others that the tests run stores against: installed from PyPI, started, and killed when dropped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lake_client::memory::MemoryStore;
use lake_client::store::MetaStore;
use lake_client::transfer::{self, Existing};
use lake_proto::limits::MAX_VALUE_BYTES;

/// How long anything in these tests may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a command that must succeed.
fn must(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The binary that comes with a package, installed under the target directory if it is not there yet.
pub fn installed(package: &str, binary: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let name = package.replace("==", "-");
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&name);
    if !home.exists() {
        // Made aside and renamed, so that an interrupted installation is not taken for a whole one. A venv knows its own
        // path, but what is looked for in it does not care.
        let unfinished = home.with_file_name(format!("{name}.unfinished-{}", std::process::id()));
        must(Command::new("python3").args(["-m", "venv"]).arg(&unfinished));
        must(Command::new(unfinished.join("bin/python")).args(["-m", "pip", "install", "--quiet", package]));
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

/// Moves many entries, small and large, from a store in memory to this one and back to a file.
pub async fn filled_and_read_again(target: &dyn MetaStore) {
    let soon = || Instant::now() + PATIENCE;
    let memory = MemoryStore::new();
    for n in 0..400u32 {
        memory.cas(&format!("/kv/many/{n:04}"), None, n.to_string().into(), soon()).await.unwrap();
    }
    for n in 0..20u8 {
        memory.cas(&format!("/lake/large/{n:02}"), None, vec![n; MAX_VALUE_BYTES].into(), soon()).await.unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let (data, again) = (dir.path().join("data"), dir.path().join("again"));
    let exported = transfer::export(&memory, "memory", &data, PATIENCE, &|_| {}).await.unwrap();
    let imported = transfer::import(&data, target, Existing::Refuse, PATIENCE, &|_| {}).await.unwrap();
    assert_eq!((imported.written, imported.verified), (420, exported.sum));
    let twice = transfer::import(&data, target, Existing::Refuse, PATIENCE, &|_| {}).await.unwrap();
    assert_eq!((twice.written, twice.there), (0, 420));
    let back = transfer::export(target, "the target", &again, PATIENCE, &|_| {}).await.unwrap();
    assert_eq!(back.sum, exported.sum);
    assert_eq!(back.header.revision.is_some(), target.capabilities().consistent_listing);
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
