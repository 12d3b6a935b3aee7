//! What the tests share: peers as processes, the tool run on them, waiting.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use lake_chaos::peers;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// The binary under test.
const LAKE: &str = env!("CARGO_BIN_EXE_lake");
/// How long anything in these tests may take.
pub const PATIENCE: Duration = Duration::from_secs(90);
/// Nothing that the caller has set decides what a test sees.
const CALLERS: [&str; 4] = ["LAKE_META", "LAKE_QUERY", "LAKE_LOG", "LAKE_SECRET_FILE"];
/// How long a command may wait for a cluster that is there, in seconds.
const TIMEOUT_SECS: &str = "30";

/// Peers by id, some of them down, in a directory that goes away.
pub struct Peers {
    processes: peers::Peers,
    args: Vec<String>,
    /// More arguments of the tool.
    pub tool_args: Vec<String>,
    dir: tempfile::TempDir,
}

impl Peers {
    /// Peers 1 to `n`, founded as one cluster by the tool.
    pub async fn founded(n: u64) -> Self {
        Self::founded_with(n, &[], &[]).await
    }

    /// The same with more arguments for the peers and for the tool.
    pub async fn founded_with(n: u64, args: &[&str], tool_args: &[&str]) -> Self {
        let owned = |args: &[&str]| args.iter().map(|arg| (*arg).to_owned()).collect();
        let dir = tempfile::Builder::new().prefix("lake-meta-").tempdir().unwrap();
        let processes = peers::Peers::new(dir.path().to_owned());
        let mut peers = Self { processes, args: owned(args), tool_args: owned(tool_args), dir };
        for id in 1..=n {
            peers.start(id);
        }
        until("the cluster to be founded", async || {
            let printed = peers.meta(&["init"]).await;
            if printed.code == Some(0) { Ok(()) } else { Err(printed.err) }
        })
        .await;
        until("a leader and no problem", async || {
            let printed = peers.meta(&["status"]).await;
            if printed.code == Some(0) { Ok(()) } else { Err(printed.text() + &printed.err) }
        })
        .await;
        peers
    }

    /// Starts a peer, fresh if it has not run before.
    pub fn start(&mut self, id: u64) {
        let own = self.args.clone();
        self.start_with(id, &own);
    }

    /// The same with other arguments than the others have.
    pub fn start_with(&mut self, id: u64, args: &[String]) {
        let command = |place: &peers::Place| {
            let mut command = std::process::Command::new(LAKE);
            command
                .args(["metasrv", "--id", &id.to_string(), "--listen", &place.grpc(), "--raft-listen", &place.raft()])
                // Nobody leads less than it could because the machine is busy.
                .args(["--heartbeat-ms", "150", "--election-timeout-min-ms", "1000"])
                .args(["--election-timeout-max-ms", "1500", "--disk-reserve-bytes", "0", "--exit-with-parent", "--dir"])
                .arg(place.dir())
                .args(args);
            for name in CALLERS {
                command.env_remove(name);
            }
            command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
            command
        };
        self.processes.start(id, command).unwrap();
    }

    /// SIGKILL.
    pub fn kill(&mut self, id: u64) {
        self.processes.kill(id).unwrap();
    }

    /// Sends a signal to a peer.
    pub fn signal(&self, id: u64, signal: rustix::process::Signal) {
        self.processes.signal(id, signal).unwrap();
    }

    /// Waits for the end of a peer that ends by itself.
    pub async fn ended(&mut self, id: u64) -> Option<i32> {
        self.processes.ended(id, PATIENCE).await.unwrap_or_else(|e| panic!("{e}")).code()
    }

    /// Where clients reach a peer.
    pub fn address(&self, id: u64) -> String {
        self.processes.place(id).unwrap().grpc()
    }

    /// Where a peer logs.
    pub fn log(&self, id: u64) -> PathBuf {
        self.processes.place(id).unwrap().dir().join("lake.log")
    }

    /// A path in the directory of the test.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `lake meta` on the peers that run, to be started.
    pub fn command(&self, args: &[&str]) -> Command {
        let endpoints: Vec<String> = self.processes.running().map(|id| self.address(id)).collect();
        let mut command = tool(args);
        command.args(["--at", &endpoints.join(",")]).args(&self.tool_args);
        if !args.contains(&"--timeout-secs") {
            command.args(["--timeout-secs", TIMEOUT_SECS]);
        }
        command
    }

    /// Runs `lake bench meta` on the peers that run.
    pub async fn bench(&self, args: &[&str]) -> Printed {
        let endpoints: Vec<String> = self.processes.running().map(|id| self.address(id)).collect();
        let mut command = lake(&["bench", "meta"]);
        command.args(["--at", &endpoints.join(",")]).args(args);
        printed(command, b"").await
    }

    /// Runs `lake meta` on the peers that run.
    pub async fn meta(&self, args: &[&str]) -> Printed {
        printed(self.command(args), b"").await
    }

    /// The same with something on standard input.
    pub async fn meta_with(&self, args: &[&str], input: &[u8]) -> Printed {
        printed(self.command(args), input).await
    }

    /// What it prints as JSON, and its exit code.
    pub async fn json(&self, args: &[&str]) -> (Option<i32>, Value) {
        let args = [args, &["--format", "json"]].concat();
        let printed = self.meta(&args).await;
        (printed.code, printed.json())
    }

    /// The same for a command that is to succeed.
    pub async fn done(&self, args: &[&str]) -> Value {
        let (code, json) = self.json(args).await;
        assert_eq!(code, Some(0), "{args:?}: {json}");
        json
    }

    /// Who leads.
    pub async fn leader(&self) -> u64 {
        until("a leader", async || {
            let (_, status) = self.json(&["status"]).await;
            status["leader"].as_u64().ok_or_else(|| status.to_string())
        })
        .await
    }
}

/// `lake meta`, on no cluster in particular.
pub fn tool(args: &[&str]) -> Command {
    lake(&[&["meta"][..], args].concat())
}

fn lake(args: &[&str]) -> Command {
    let mut command = Command::new(LAKE);
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    for name in CALLERS {
        command.env_remove(name);
    }
    command
}

/// What a command printed, and how it ended.
#[derive(Debug)]
pub struct Printed {
    pub out: Vec<u8>,
    pub err: String,
    pub code: Option<i32>,
}

impl Printed {
    /// As text.
    pub fn text(&self) -> String {
        String::from_utf8(self.out.clone()).unwrap()
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// It ended with this code, and said something on standard error.
    pub fn ended(&self, code: i32, said: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.err.contains(said), "{said:?} is not in {}", self.err);
    }
}

/// Runs a command to its end.
pub async fn printed(mut command: Command, input: &[u8]) -> Printed {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let feed = async {
        // A command that does not read its input closes it.
        let _ = stdin.write_all(input).await;
        drop(stdin);
    };
    let run = async { tokio::join!(feed, child.wait_with_output()).1.unwrap() };
    let output = tokio::time::timeout(PATIENCE, run).await.unwrap_or_else(|_| panic!("{command:?} does not end"));
    Printed { out: output.stdout, err: String::from_utf8(output.stderr).unwrap(), code: output.status.code() }
}

/// Waits until something has an answer; fails with what was seen last.
pub async fn until<T>(what: &str, check: impl AsyncFn() -> Result<T, String>) -> T {
    lake_chaos::probe::until(what, PATIENCE, || check()).await.unwrap_or_else(|e| panic!("{e}"))
}
