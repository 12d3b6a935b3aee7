//! One child process, owned by one task: spawned, signalled, and restarted when it dies by itself.
//!
//! The child's standard input is a pipe whose write end only the supervisor holds. However the supervisor ends, the
//! kernel closes it, and the child, started with `--exit-with-parent`, ends as well; this works whichever thread
//! spawned it, which the kernel's parent-death signal does not. One that stands still is made to go on first (`guard`).
//! Children get a process group of their own, so that a Ctrl-C meant for the shell reaches the supervisor alone.

use std::ffi::OsString;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::str::FromStr;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};

use crate::guard::Guard;
use crate::nemesis::clock;
use crate::{Error, IoContext, Result};

/// How many requests may wait for a process's task.
const REQUEST_QUEUE: usize = 16;
/// How long the kernel may take to end a process that was killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);
/// How much of a log's end goes into an error message.
const TAIL_BYTES: u64 = 4 << 10;
const TAIL_LINES: usize = 20;

/// What a process is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A peer of the metadata cluster.
    #[default]
    Metasrv,
    /// A query node.
    Query,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Role::Metasrv => "metasrv",
            Role::Query => "query",
        })
    }
}

/// A process of a cluster: `metasrv-1`, `query-2`. Also the name of its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessName {
    pub role: Role,
    /// From 1.
    pub id: u64,
}

impl ProcessName {
    pub fn metasrv(id: u64) -> Self {
        Self { role: Role::Metasrv, id }
    }

    pub fn query(id: u64) -> Self {
        Self { role: Role::Query, id }
    }
}

impl fmt::Display for ProcessName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}-{}", self.role, self.id))
    }
}

impl FromStr for ProcessName {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let wrong = || format!("{s:?} is no process name; one looks like metasrv-1 or query-2");
        let (role, id) = s.split_once('-').ok_or_else(wrong)?;
        let role = match role {
            "metasrv" => Role::Metasrv,
            "query" => Role::Query,
            _ => return Err(wrong()),
        };
        Ok(Self { role, id: id.parse().map_err(|_| wrong())? })
    }
}

/// How to start a process, decided anew at each start.
#[derive(Debug, Clone)]
pub struct Launch {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub env: Vec<(OsString, OsString)>,
    /// Where its standard output and error go.
    pub output: PathBuf,
    /// Keep there what earlier starts wrote; otherwise it is emptied at each start.
    pub append: bool,
}

/// Decides how to start a process, right before it is started.
pub type Launcher = Box<dyn FnMut() -> Result<Launch> + Send>;

/// Told the pid whenever a process starts (`Some`) or has ended (`None`), before anybody else learns of it.
pub type OnChange = Box<dyn Fn(Option<u32>) + Send>;

/// What the task does by itself.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Restart a child that died by itself.
    pub restart: bool,
    /// Wait before the first restart; doubles with each.
    pub min_backoff: Duration,
    /// Longest wait before a restart.
    pub max_backoff: Duration,
    /// A child that ran this long starts again with the shortest wait.
    pub steady_after: Duration,
    /// From SIGTERM to SIGKILL.
    pub stop_timeout: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            restart: true,
            min_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(30),
            steady_after: Duration::from_secs(30),
            // A query node lets its commits end (10 s), then its connections (10 s).
            stop_timeout: Duration::from_secs(25),
        }
    }
}

/// What a supervisor reports.
#[derive(Debug, Clone)]
pub enum Event {
    /// A child was started.
    Started { process: ProcessName, pid: u32, restart: bool },
    /// A child died by itself; of the signal, if it was one.
    Died { process: ProcessName, pid: u32, how: String, signal: Option<i32>, restart_in: Option<Duration> },
    /// A child could not be restarted.
    RestartFailed { process: ProcessName, why: String, retry_in: Duration },
    /// A child's port was taken by somebody else: it has a new one, of which the others are told.
    Moved { process: ProcessName },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Started { process, pid, restart: false } => write!(f, "{process} started (pid {pid})"),
            Event::Started { process, pid, restart: true } => write!(f, "{process} was restarted (pid {pid})"),
            Event::Died { process, pid, how, restart_in: Some(wait), .. } => {
                write!(f, "{process} (pid {pid}) {how}; restarting it in {:.1} s", wait.as_secs_f64())
            }
            Event::Died { process, pid, how, restart_in: None, .. } => write!(f, "{process} (pid {pid}) {how}"),
            Event::RestartFailed { process, why, retry_in } => {
                write!(f, "{process} could not be restarted ({why}); trying again in {:.1} s", retry_in.as_secs_f64())
            }
            Event::Moved { process } => write!(f, "{process} has a new port, because its own was taken"),
        }
    }
}

/// What is known of a process from outside its task.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Absent while it is down.
    pub pid: Option<u32>,
    /// How often it was started.
    pub starts: u64,
    /// How often it died by itself.
    pub deaths: u64,
    /// How it ended last.
    pub last_exit: Option<String>,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Start,
    Stop,
    Kill,
    Signal(Signal),
}

struct Request {
    action: Action,
    reply: oneshot::Sender<Result<()>>,
}

/// A supervised process. When the last clone is dropped, the child is stopped.
#[derive(Debug, Clone)]
pub struct Process {
    name: ProcessName,
    requests: mpsc::Sender<Request>,
    state: watch::Receiver<State>,
}

impl Process {
    /// Begins supervision. Nothing is started yet.
    pub fn supervise(
        name: ProcessName,
        launcher: Launcher,
        on_change: OnChange,
        policy: Policy,
        events: broadcast::Sender<Event>,
    ) -> Self {
        let (requests, receiver) = mpsc::channel(REQUEST_QUEUE);
        let (published, state) = watch::channel(State::default());
        let task = Task {
            name,
            launcher,
            on_change,
            policy,
            events,
            published,
            running: None,
            restart_at: None,
            backoff: policy.min_backoff,
        };
        tokio::spawn(task.run(receiver));
        Self { name, requests, state }
    }

    /// Its name.
    pub fn name(&self) -> ProcessName {
        self.name
    }

    /// What is known of it now.
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// To wait for changes of its state.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Starts it, unless it runs. Returns once it is spawned, which says nothing about whether it serves.
    ///
    /// # Errors
    /// It could not be spawned.
    pub async fn start(&self) -> Result<()> {
        self.ask(Action::Start).await
    }

    /// SIGTERM, and SIGKILL if it does not end in time. Down until started again.
    ///
    /// # Errors
    /// It could not be signalled.
    pub async fn stop(&self) -> Result<()> {
        self.ask(Action::Stop).await
    }

    /// SIGKILL. Down until started again. Returns once it has ended.
    ///
    /// # Errors
    /// It could not be signalled.
    pub async fn kill(&self) -> Result<()> {
        self.ask(Action::Kill).await
    }

    /// SIGSTOP: it stands still, with its connections open, until resumed.
    ///
    /// # Errors
    /// It is not running.
    pub async fn pause(&self) -> Result<()> {
        self.ask(Action::Signal(Signal::STOP)).await
    }

    /// SIGCONT.
    ///
    /// # Errors
    /// It is not running.
    pub async fn resume(&self) -> Result<()> {
        self.ask(Action::Signal(Signal::CONT)).await
    }

    async fn ask(&self, action: Action) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::ShuttingDown(self.name);
        self.requests.send(Request { action, reply }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

struct Running {
    child: Child,
    pid: u32,
    since: Instant,
    /// The end that closes with the supervisor. Nothing is ever written to it.
    _stdin: Option<ChildStdin>,
    /// While it stands still.
    guard: Option<Guard>,
}

struct Task {
    name: ProcessName,
    launcher: Launcher,
    on_change: OnChange,
    policy: Policy,
    events: broadcast::Sender<Event>,
    published: watch::Sender<State>,
    running: Option<Running>,
    /// Set while it is down against its will.
    restart_at: Option<Instant>,
    backoff: Duration,
}

impl Task {
    async fn run(mut self, mut requests: mpsc::Receiver<Request>) {
        loop {
            tokio::select! {
                request = requests.recv() => match request {
                    Some(Request { action, reply }) => {
                        let result = self.act(action).await;
                        // Whoever asked may have stopped waiting.
                        let _ = reply.send(result);
                    }
                    None => {
                        // Nobody is left who could be told; what cannot be stopped ends with its standard input.
                        let _ = self.stop().await;
                        return;
                    }
                },
                status = ended(&mut self.running) => self.died(status),
                () = due(self.restart_at) => self.restart(),
            }
        }
    }

    async fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Start if self.running.is_some() => Ok(()),
            Action::Start => {
                self.restart_at = None;
                self.backoff = self.policy.min_backoff;
                self.spawn(false)
            }
            Action::Stop => self.stop().await,
            Action::Kill => self.kill().await,
            Action::Signal(signal) => self.signal(signal),
        }
    }

    fn spawn(&mut self, restart: bool) -> Result<()> {
        let launch = (self.launcher)()?;
        let doing = || format!("starting {} ({})", self.name, launch.program.display());
        let output = OpenOptions::new()
            .create(true)
            .write(true)
            .append(launch.append)
            .truncate(!launch.append)
            .open(&launch.output)
            .doing(|| format!("creating {}", launch.output.display()))?;
        let mut child = Command::new(&launch.program)
            .args(&launch.args)
            .envs(launch.env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::piped())
            .stdout(output.try_clone().doing(doing)?)
            .stderr(output)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .doing(doing)?;
        // Taken out, because waiting for a child closes the input it still holds.
        let stdin = child.stdin.take();
        let pid = child.id().unwrap_or_default();
        tracing::info!(process = %self.name, pid, "started");
        self.running = Some(Running { child, pid, since: Instant::now(), _stdin: stdin, guard: None });
        self.publish(|state| {
            state.pid = Some(pid);
            state.starts += 1;
        });
        self.report(Event::Started { process: self.name, pid, restart });
        Ok(())
    }

    fn restart(&mut self) {
        self.restart_at = None;
        if let Err(e) = self.spawn(true) {
            let wait = self.next_backoff();
            tracing::warn!(process = %self.name, error = %e, "cannot be restarted");
            self.restart_at = Some(Instant::now() + wait);
            self.report(Event::RestartFailed { process: self.name, why: e.to_string(), retry_in: wait });
        }
    }

    fn died(&mut self, status: std::io::Result<ExitStatus>) {
        let Some(Running { pid, since, .. }) = self.running.take() else { return };
        let signal = status.as_ref().ok().and_then(ExitStatusExt::signal);
        let how = describe(status);
        if since.elapsed() >= self.policy.steady_after {
            self.backoff = self.policy.min_backoff;
        }
        let restart_in = self.policy.restart.then(|| self.next_backoff());
        self.restart_at = restart_in.map(|wait| Instant::now() + wait);
        tracing::warn!(process = %self.name, pid, %how, "died by itself");
        self.publish(|state| {
            state.pid = None;
            state.deaths += 1;
            state.last_exit = Some(how.clone());
        });
        self.report(Event::Died { process: self.name, pid, how, signal, restart_in });
    }

    fn next_backoff(&mut self) -> Duration {
        let wait = self.backoff;
        self.backoff = (wait * 2).min(self.policy.max_backoff);
        wait
    }

    async fn stop(&mut self) -> Result<()> {
        self.restart_at = None;
        let Some(running) = &mut self.running else { return Ok(()) };
        send(self.name, running, Signal::TERM)?;
        // A paused process takes the signal only once it goes on.
        send(self.name, running, Signal::CONT)?;
        match timeout(self.policy.stop_timeout, running.child.wait()).await {
            Ok(status) => {
                self.ended(status);
                Ok(())
            }
            Err(_) => {
                tracing::warn!(process = %self.name, "did not stop in time: killing it");
                self.kill().await
            }
        }
    }

    async fn kill(&mut self) -> Result<()> {
        self.restart_at = None;
        let Some(running) = &mut self.running else { return Ok(()) };
        send(self.name, running, Signal::KILL)?;
        let status = timeout(KILL_TIMEOUT, running.child.wait()).await.map_err(|_| Error::Io {
            doing: format!("waiting for {} (pid {}) to end after SIGKILL", self.name, running.pid),
            source: std::io::Error::other("it hangs in the kernel, perhaps on a disk that does not answer"),
        })?;
        self.ended(status);
        Ok(())
    }

    fn signal(&mut self, signal: Signal) -> Result<()> {
        match &mut self.running {
            Some(running) => {
                if signal == Signal::STOP && running.guard.is_none() {
                    let doing = || format!("starting what has {} go on if this process ends", self.name);
                    running.guard = Some(Guard::of(running.pid).doing(doing)?);
                }
                send(self.name, running, signal)?;
                if signal == Signal::CONT {
                    running.guard = None;
                }
                Ok(())
            }
            None => Err(Error::Io {
                doing: format!("signalling {}", self.name),
                source: std::io::Error::new(std::io::ErrorKind::NotFound, "it is not running"),
            }),
        }
    }

    /// It ended because it was told to.
    fn ended(&mut self, status: std::io::Result<ExitStatus>) {
        self.running = None;
        let how = describe(status);
        tracing::info!(process = %self.name, %how, "stopped");
        self.publish(|state| {
            state.pid = None;
            state.last_exit = Some(how);
        });
    }

    fn publish(&mut self, change: impl FnOnce(&mut State)) {
        let mut state = self.published.borrow().clone();
        let before = state.pid;
        change(&mut state);
        if let (Some(ended), None) = (before, state.pid) {
            clock::clear_up(ended);
        }
        (self.on_change)(state.pid);
        self.published.send_replace(state);
    }

    fn report(&self, event: Event) {
        // Events are for whoever listens; nobody has to.
        let _ = self.events.send(event);
    }
}

/// The child is not reaped before its task says so: the pid cannot be somebody else's.
fn send(name: ProcessName, running: &Running, signal: Signal) -> Result<()> {
    let doing = || format!("sending {signal:?} to {name} (pid {})", running.pid);
    let pid = i32::try_from(running.pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| std::io::Error::other("it has no pid"))
        .doing(doing)?;
    match kill_process(pid, signal) {
        // It has ended already and waits to be reaped by its task.
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(e) => Err(Error::Io { doing: doing(), source: e.into() }),
    }
}

async fn ended(running: &mut Option<Running>) -> std::io::Result<ExitStatus> {
    match running {
        Some(running) => running.child.wait().await,
        None => std::future::pending().await,
    }
}

async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn describe(status: std::io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("ended with exit code {code}"),
            (None, Some(signal)) => format!("was killed by signal {signal}"),
            (None, None) => "ended".to_owned(),
        },
        Err(e) => format!("ended, and how is not known ({e})"),
    }
}

/// The last lines of a file, for an error message. Empty if there is nothing to read.
pub fn tail(path: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut end = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut end)?;
        Ok(end)
    };
    let end = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&end);
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
