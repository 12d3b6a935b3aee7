//! Peers and query nodes together, as child processes of this one.
//!
//! ```text
//! <dir>/lock            held by the supervisor
//! <dir>/cluster.json    what runs where
//! <dir>/metasrv-1 ...   a peer's data, its lake.log, and output.log (what it wrote before it had a log)
//! <dir>/query-1 ...     a query node's spill files and logs
//! <dir>/warehouse       the tables
//! ```
//! [`Cluster::open`] takes the directory and reserves ports, the same as last time where they are free;
//! [`Cluster::start_all`] starts everything, founds the metadata cluster if its peers are fresh, and returns once all
//! of it serves. A process keeps its ports for as long as the cluster is open. If somebody else takes one while its
//! process is down, the process moves to a new one, and the others are restarted, one by one, with the new address.

mod layout;
mod orphans;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_client::remote::admin;
use lake_proto::v1::status_response::Stage;
use lake_proto::v1::{Member, StatusResponse};
use tokio::sync::{broadcast, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use self::layout::Layout;
use crate::dirlock::DirLock;
use crate::manifest::Entry;
use crate::net::Network;
use crate::process::{Event, Policy, Process, ProcessName, Role, tail};
use crate::{Error, Result, manifest, probe};

/// Most peers, and most query nodes, that one supervisor starts.
pub const MAX_PROCESSES_PER_ROLE: u64 = 32;
/// Peers of a new cluster unless told otherwise.
pub const DEFAULT_PEERS: u64 = 3;
/// Events kept for a listener that is slow.
const EVENT_QUEUE: usize = 256;
/// The pause before founding is asked for again.
const FOUND_AGAIN: Duration = Duration::from_millis(200);
/// How long the tasks of stopped processes may take to end.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// What to run.
#[derive(Debug, Clone)]
pub struct Spec {
    /// The `lake` binary.
    pub binary: PathBuf,
    /// Everything the cluster keeps, made if it is not there.
    pub dir: PathBuf,
    /// `None`: as many as the directory holds, or [`DEFAULT_PEERS`] if it holds none.
    pub peers: Option<u64>,
    /// Further peers that are prepared, and started only one by one: fresh ones that ask to join. Only for a directory
    /// that holds no cluster yet.
    pub spare_peers: u64,
    pub query_nodes: u64,
    /// Where tables live. `None`: `<dir>/warehouse`.
    pub warehouse: Option<String>,
    /// The children's log level, if not their default.
    pub log_level: Option<String>,
    /// More arguments for every peer, and for every query node.
    pub metasrv_args: Vec<String>,
    pub query_args: Vec<String>,
    /// A directory in which every process's whole log is kept over its starts. `None`: with its data.
    pub logs: Option<PathBuf>,
    /// Added to the environment of every peer; `{id}` in a value stands for its id.
    pub metasrv_env: Vec<(OsString, OsString)>,
    /// The same for every query node.
    pub query_env: Vec<(OsString, OsString)>,
    /// How peers reach each other, and are reached by clients. `None`: directly, on loopback.
    pub network: Option<Network>,
    pub policy: Policy,
    /// How long a process may take until it serves, and peers until they are a cluster with a leader.
    pub start_timeout: Duration,
}

impl Spec {
    /// The usual cluster of this binary in this directory.
    pub fn new(binary: impl Into<PathBuf>, dir: impl Into<PathBuf>) -> Self {
        Self {
            binary: binary.into(),
            dir: dir.into(),
            peers: None,
            spare_peers: 0,
            query_nodes: 2,
            warehouse: None,
            log_level: None,
            metasrv_args: Vec::new(),
            query_args: Vec::new(),
            logs: None,
            metasrv_env: Vec::new(),
            query_env: Vec::new(),
            network: None,
            policy: Policy::default(),
            start_timeout: Duration::from_secs(60),
        }
    }
}

/// The peer that leads.
#[derive(Debug, Clone)]
pub struct Leader {
    pub process: ProcessName,
    pub term: u64,
}

/// A cluster of processes. Dropping it stops them, if the runtime lives on; [`Cluster::shutdown`] waits for their end.
#[derive(Debug)]
pub struct Cluster {
    spec: Spec,
    layout: Arc<Layout>,
    processes: Vec<Process>,
    events: broadcast::Sender<Event>,
    readdress: JoinHandle<()>,
}

impl Cluster {
    /// Takes the directory, and prepares to run what `spec` says. Starts nothing.
    ///
    /// # Errors
    /// The directory is in use, holds another number of peers, or cannot be written; no port is free.
    pub async fn open(mut spec: Spec) -> Result<Self> {
        spec.dir = std::path::absolute(&spec.dir).map_err(|source| Error::Io {
            doing: format!("finding out the absolute path of {}", spec.dir.display()),
            source,
        })?;
        let lock = DirLock::take(&spec.dir)?;
        let previous = manifest::read(&spec.dir)?.unwrap_or_default();
        orphans::await_end(&spec.dir, &previous).await?;
        let peers = layout::peer_count(&spec)?;
        for (count, what) in
            [(spec.query_nodes, "query nodes"), (peers + spec.spare_peers, "peers, spare ones included,")]
        {
            if count > MAX_PROCESSES_PER_ROLE {
                return Err(Error::Directory {
                    dir: spec.dir,
                    problem: format!("{count} {what} were asked for; at most {MAX_PROCESSES_PER_ROLE} can be"),
                });
            }
        }
        let names = (1..=peers + spec.spare_peers)
            .map(ProcessName::metasrv)
            .chain((1..=spec.query_nodes).map(ProcessName::query));
        let layout = Arc::new(Layout::new(spec.clone(), names.clone(), &previous, lock)?);

        let (events, _) = broadcast::channel(EVENT_QUEUE);
        let (moved, moves) = mpsc::channel(2 * MAX_PROCESSES_PER_ROLE as usize);
        let processes: Vec<Process> =
            names.map(|name| supervise(&layout, name, spec.policy, &events, &moved)).collect();
        let readdress = tokio::spawn(readdress(moves, layout.clone(), processes.clone(), spec.start_timeout));
        Ok(Self { spec, layout, processes, events, readdress })
    }

    /// Opens the cluster and starts all of it.
    ///
    /// # Errors
    /// As [`Cluster::open`] and [`Cluster::start_all`]. Nothing is left running then.
    pub async fn start(spec: Spec) -> Result<Self> {
        let cluster = Self::open(spec).await?;
        match cluster.start_all().await {
            Ok(()) => Ok(cluster),
            Err(e) => {
                cluster.shutdown().await;
                Err(e)
            }
        }
    }

    /// Starts everything but spare peers, founds the metadata cluster if its peers are fresh, and waits until all of it
    /// serves.
    ///
    /// # Errors
    /// A process that ends or does not serve in time, with the end of its log; a refused founding.
    pub async fn start_all(&self) -> Result<()> {
        for process in self.processes.iter().filter(|p| !self.layout.is_spare(p.name())) {
            process.start().await?;
        }
        self.await_serving(Role::Metasrv).await?;
        self.found().await?;
        self.leader(self.spec.start_timeout).await?;
        self.await_serving(Role::Query).await
    }

    /// What happens from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Every process, as in `cluster.json`.
    pub fn entries(&self) -> Vec<Entry> {
        self.layout.entries()
    }

    /// One process, as in `cluster.json`.
    ///
    /// # Errors
    /// [`Error::UnknownProcess`].
    pub fn entry(&self, name: ProcessName) -> Result<Entry> {
        self.layout.entry(name).ok_or(Error::UnknownProcess(name))
    }

    /// Where the peers (`grpc`) or query nodes (`flight`) listen for clients, whether they run or not.
    pub fn endpoints(&self, role: Role) -> Vec<String> {
        self.layout.endpoints(role)
    }

    /// The cluster's directory, absolute.
    pub fn dir(&self) -> &std::path::Path {
        &self.spec.dir
    }

    /// A process's handle, for signals and state.
    ///
    /// # Errors
    /// [`Error::UnknownProcess`].
    pub fn process(&self, name: ProcessName) -> Result<&Process> {
        self.processes.iter().find(|p| p.name() == name).ok_or(Error::UnknownProcess(name))
    }

    /// Starts a process and waits until it serves.
    ///
    /// # Errors
    /// It ends or does not serve in time; the message has the end of its log.
    pub async fn start_one(&self, name: ProcessName) -> Result<()> {
        let process = self.process(name)?;
        process.start().await?;
        await_serving(&self.layout, process, self.spec.start_timeout).await
    }

    /// Stops a process and starts it again; returns once it serves.
    ///
    /// # Errors
    /// As [`Cluster::start_one`].
    pub async fn restart(&self, name: ProcessName) -> Result<()> {
        self.process(name)?.stop().await?;
        self.start_one(name).await
    }

    /// SIGKILL to every process of a role, at the same time.
    ///
    /// # Errors
    /// One could not be signalled.
    pub async fn kill_role(&self, role: Role) -> Result<()> {
        self.each(role, |p| async move { p.kill().await }).await
    }

    /// Stops every process of a role.
    ///
    /// # Errors
    /// One could not be signalled.
    pub async fn stop_role(&self, role: Role) -> Result<()> {
        self.each(role, |p| async move { p.stop().await }).await
    }

    /// Starts every process of a role but spare peers, and waits until all serve; of peers, until one of them leads.
    ///
    /// # Errors
    /// As [`Cluster::start_one`].
    pub async fn start_role(&self, role: Role) -> Result<()> {
        self.each(role, |p| async move { p.start().await }).await?;
        self.await_serving(role).await?;
        match role {
            Role::Metasrv => self.leader(self.spec.start_timeout).await.map(|_| ()),
            Role::Query => Ok(()),
        }
    }

    /// The last lines that a process wrote. Empty: there are none.
    pub fn last_words(&self, name: ProcessName) -> String {
        last_words(&self.layout, name).0
    }

    /// What each running peer knows; those that do not answer are left out.
    pub async fn statuses(&self) -> Vec<StatusResponse> {
        let mut asking = JoinSet::new();
        let running = self.processes.iter().filter(|p| p.name().role == Role::Metasrv && p.state().pid.is_some());
        for address in running.filter_map(|p| self.layout.endpoint(p.name())) {
            asking.spawn(async move { probe::peer(&address).await });
        }
        let mut answers: Vec<_> = asking.join_all().await.into_iter().flatten().collect();
        answers.sort_by_key(|a| a.self_.as_ref().map(|m| m.id));
        answers
    }

    /// Waits for a leader that says so itself.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn leader(&self, timeout: Duration) -> Result<Leader> {
        probe::until("a leader of the metadata cluster", timeout, || async {
            let answers = self.statuses().await;
            match probe::leader(&answers).and_then(|a| Some((a.self_.as_ref()?.id, a.term))) {
                Some((id, term)) => Ok(Leader { process: ProcessName::metasrv(id), term }),
                None => Err(format!("{} peers answer, none leads", answers.len())),
            }
        })
        .await
    }

    /// Stops everything, query nodes first, and waits for the end.
    pub async fn shutdown(mut self) {
        // A half-done readdressing would start again what is stopped here.
        self.readdress.abort();
        let _ = (&mut self.readdress).await;
        for role in [Role::Query, Role::Metasrv] {
            let mut stopping = JoinSet::new();
            for process in self.processes.iter().filter(|p| p.name().role == role) {
                let process = process.clone();
                stopping.spawn(async move {
                    if let Err(error) = process.stop().await {
                        tracing::warn!(process = %process.name(), %error, "cannot be stopped");
                    }
                });
            }
            stopping.join_all().await;
        }
        // The directory is free once the tasks of the processes have ended, which they do when nobody can ask them any
        // more.
        let layout = Arc::downgrade(&self.layout);
        drop(self);
        let freed = probe::until("the directory to be free", SHUTDOWN_TIMEOUT, || async {
            if layout.strong_count() == 0 { Ok(()) } else { Err("a task still holds it".to_owned()) }
        });
        if let Err(error) = freed.await {
            tracing::warn!(%error, "the cluster is stopped, but its directory is still locked");
        }
    }

    async fn each<F>(&self, role: Role, act: impl Fn(Process) -> F) -> Result<()>
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let mut acting = JoinSet::new();
        for process in self.processes.iter().filter(|p| p.name().role == role && !self.layout.is_spare(p.name())) {
            acting.spawn(act(process.clone()));
        }
        acting.join_all().await.into_iter().collect()
    }

    async fn await_serving(&self, role: Role) -> Result<()> {
        let timeout = self.spec.start_timeout;
        let layout = self.layout.clone();
        self.each(role, move |p| {
            let layout = layout.clone();
            async move { await_serving(&layout, &p, timeout).await }
        })
        .await
    }

    /// Founds the cluster if a peer is fresh. Repeating it with the same founders is harmless, so that a founding that
    /// was interrupted is completed by the next start.
    async fn found(&self) -> Result<()> {
        let founders = self.processes.iter().map(Process::name);
        let founders = founders.filter(|name| name.role == Role::Metasrv && !self.layout.is_spare(*name));
        let peers: Vec<String> = founders.filter_map(|name| self.layout.endpoint(name)).collect();
        let until = Instant::now() + self.spec.start_timeout;
        // They serve; on a machine that has much to do one may be late with this answer all the same.
        let answers = loop {
            let answers = self.statuses().await;
            one_cluster(&answers)?;
            if answers.len() >= peers.len() {
                break answers;
            }
            if Instant::now() >= until {
                return Err(Error::Founding(format!("only {} of {} peers answer", answers.len(), peers.len())));
            }
            tokio::time::sleep(FOUND_AGAIN).await;
        };
        if answers.iter().all(|a| a.stage() != Stage::Fresh) {
            return Ok(());
        }
        let founders: Vec<Member> = answers.iter().filter_map(|a| a.self_.clone()).collect();
        // A peer that is a member already knows whether these founders are the ones it was founded with.
        let by = answers.iter().position(|a| a.stage() != Stage::Fresh).unwrap_or(0);
        let timeout = self.spec.start_timeout;
        let until = Instant::now() + timeout;
        let founded = loop {
            match admin::init(&peers[by], founders.clone(), None, timeout).await {
                // A founder was busy. It is safe to repeat.
                Err(e) if e.is_unavailable() && Instant::now() < until => tokio::time::sleep(FOUND_AGAIN).await,
                founded => break founded,
            }
        };
        founded.map_err(|e| {
            let fresh: Vec<String> = answers
                .iter()
                .filter(|a| a.stage() == Stage::Fresh)
                .filter_map(|a| a.self_.as_ref())
                .map(|m| ProcessName::metasrv(m.id).to_string())
                .collect();
            Error::Founding(match fresh.len() == answers.len() {
                true => e.to_string(),
                false => format!("{e}. Other peers are members already, but these are fresh: {}", fresh.join(", ")),
            })
        })?;
        let members = answers.iter().filter(|a| a.stage() != Stage::Fresh).count();
        probe::until("every founder to be a member", timeout, || async {
            let answers = self.statuses().await;
            let fresh = answers.iter().filter(|a| a.stage() == Stage::Fresh).filter_map(|a| a.self_.as_ref());
            let fresh: Vec<_> = fresh.map(|m| ProcessName::metasrv(m.id).to_string()).collect();
            match (fresh.is_empty(), members) {
                (true, _) => Ok(()),
                (false, 0) => Err(format!("{} belong to no cluster yet", fresh.join(", "))),
                (false, _) => Err(format!(
                    "the cluster is founded, but {} belong to none: was their data directory lost or emptied? Put it \
                     back",
                    fresh.join(", ")
                )),
            }
        })
        .await
    }
}

/// Peers of several clusters under one directory: somebody moved or restored one's data.
fn one_cluster(answers: &[StatusResponse]) -> Result<()> {
    let named = |a: &StatusResponse| Some((a.self_.as_ref()?.id, a.cluster_id.clone()));
    let belong: Vec<(u64, String)> = answers.iter().filter(|a| !a.cluster_id.is_empty()).filter_map(named).collect();
    let votes = |id: &String| belong.iter().filter(|(_, other)| other == id).count();
    let Some((_, ours)) = belong.iter().max_by_key(|(_, id)| votes(id)) else { return Ok(()) };
    match belong.iter().find(|(_, id)| id != ours) {
        None => Ok(()),
        Some((peer, theirs)) => Err(Error::Founding(format!(
            "the data directory of {} belongs to another cluster ({theirs}) than the others ({ours}): put its own back",
            ProcessName::metasrv(*peer)
        ))),
    }
}

fn supervise(
    layout: &Arc<Layout>,
    name: ProcessName,
    policy: Policy,
    events: &broadcast::Sender<Event>,
    moved: &mpsc::Sender<ProcessName>,
) -> Process {
    let (at_launch, at_change) = (layout.clone(), layout.clone());
    let (announce, moved) = (events.clone(), moved.clone());
    let launcher = move || {
        if at_launch.renew_taken_ports(name)? {
            // Nobody has to listen; and a full queue means that everybody is being restarted anyway.
            let _ = announce.send(Event::Moved { process: name });
            let _ = moved.try_send(name);
        }
        Ok(at_launch.launch(name))
    };
    let on_change = move |pid| at_change.set_pid(name, pid);
    Process::supervise(name, Box::new(launcher), Box::new(on_change), policy, events.clone())
}

/// Tells everybody of a peer's new address, by restarting them with it, one by one. A query node's concerns nobody.
async fn readdress(
    mut moves: mpsc::Receiver<ProcessName>,
    layout: Arc<Layout>,
    processes: Vec<Process>,
    start_timeout: Duration,
) {
    while let Some(moved) = moves.recv().await {
        if moved.role != Role::Metasrv {
            continue;
        }
        for process in processes.iter().filter(|p| p.name() != moved && p.state().pid.is_some()) {
            let restarted = async {
                process.stop().await?;
                process.start().await?;
                await_serving(&layout, process, start_timeout).await
            };
            if let Err(error) = restarted.await {
                tracing::warn!(process = %process.name(), %error, "does not serve after being told of a new address");
            }
        }
    }
}

/// The end of what a process wrote last, and where that is: before it had a log, or in its log.
fn last_words(layout: &Layout, name: ProcessName) -> (String, PathBuf) {
    let tails = layout.logs(name).map(|log| (tail(&log), log));
    tails.iter().find(|(tail, _)| !tail.is_empty()).unwrap_or(&tails[1]).clone()
}

/// Asks a process until it serves. One that dies meanwhile is not waited for any longer.
async fn await_serving(layout: &Layout, process: &Process, timeout: Duration) -> Result<()> {
    let name = process.name();
    let deaths = process.state().deaths;
    let mut watch = process.watch();
    let address = || layout.endpoint(name).ok_or(Error::UnknownProcess(name));
    let asking = probe::until("it to serve", timeout, || async {
        let address = address().map_err(|e| e.to_string())?;
        match name.role {
            Role::Metasrv => probe::peer(&address).await.map(|_| ()),
            Role::Query => probe::serves(&address).await,
        }
    });
    let not_serving = |what: String| {
        let (tail, log) = last_words(layout, name);
        Err(Error::NotServing { process: name, what, log, tail })
    };
    tokio::select! {
        served = asking => match served {
            Ok(()) => Ok(()),
            Err(Error::Timeout { waited, last, .. }) => {
                not_serving(format!("does not serve after {:.0} s ({last})", waited.as_secs_f64()))
            }
            Err(e) => Err(e),
        },
        state = watch.wait_for(|s| s.pid.is_none() || s.deaths > deaths) => {
            let how = state.ok().and_then(|s| s.last_exit.clone()).unwrap_or_else(|| "ended".to_owned());
            not_serving(format!("{how} instead of serving"))
        }
    }
}
