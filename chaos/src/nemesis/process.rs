//! Faults of processes: peers and query nodes killed and paused; peers restarted, and held down until the others have thrown away
//! what they lack.

use std::path::Path;

use async_trait::async_trait;
use rand::rngs::StdRng;

use super::field::{Field, MEND_WITHIN, PROOF_WITHIN, called, named, named_as};
use super::kind::Target;
use super::{Done, Nemesis};
use crate::net::condition::Cut;
use crate::net::partition;
use crate::process::{Process, ProcessName, Role};
use crate::{Error, Result, probe};

/// How a process ends that was stopped in order, as its state says.
const IN_ORDER: &str = "ended with exit code 0";

/// SIGKILL, and a start when it is over.
pub struct Kill {
    role: Role,
    target: Option<Target>,
    killed: Vec<u64>,
}

impl Kill {
    pub fn new(role: Role, target: Option<Target>) -> Self {
        Self { role, target, killed: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Kill {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.killed = match field.claim_of(self.role, self.target, rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for id in &self.killed {
            let gone = match field.cluster.process(ProcessName { role: self.role, id: *id }) {
                Ok(process) => killed(process).await,
                Err(e) => Err(e),
            };
            came.push((*id, gone.map(|pid| format!("process {pid} is gone")).map_err(|e| e.to_string())));
        }
        Done::of_all(called(self.role), &came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let killed = std::mem::take(&mut self.killed);
        let starting = killed.iter().map(|id| field.start_of(self.role, *id));
        let done = started(named_as(called(self.role), &killed), futures::future::try_join_all(starting).await);
        field.release_of(self.role, &killed);
        done
    }
}

/// Kills a peer's process; gives the pid that it had.
///
/// # Errors
/// As [`killed`].
pub(super) async fn kill(field: &Field, id: u64) -> Result<u32> {
    killed(field.cluster.process(ProcessName::metasrv(id))?).await
}

/// Kills a process, and looks whether it is gone.
///
/// # Errors
/// There was none, so that nothing was done to it; it cannot be signalled; it is alive after that.
async fn killed(process: &Process) -> Result<u32> {
    let before = process.state().pid;
    process.kill().await?;
    let pid = before.ok_or_else(|| Error::NoProcess(process.name()))?;
    let outlived = || std::io::Error::other("it is alive after SIGKILL");
    if is_alive(pid) {
        return Err(Error::Io { doing: format!("killing {} (pid {pid})", process.name()), source: outlived() });
    }
    Ok(pid)
}

/// Starts peers again, all at once, and waits until each serves.
pub(super) async fn start_all(field: &Field, peers: &[u64]) -> Done {
    let starting = peers.iter().map(|id| field.start_of(Role::Metasrv, *id));
    started(named(peers), futures::future::try_join_all(starting).await)
}

fn started(target: String, came: Result<Vec<()>>) -> Done {
    match came {
        Ok(_) => Done::installed(target, "all serve"),
        Err(e) => Done::failed(target, e),
    }
}

/// The state of a process as the kernel says, a letter; `None` if there is none, or no /proc.
fn kernel_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// A zombie is not alive.
fn is_alive(pid: u32) -> bool {
    kernel_state(pid).is_some_and(|state| state != 'Z')
}

/// SIGSTOP, and SIGCONT when it is over.
pub struct Pause {
    role: Role,
    target: Option<Target>,
    paused: Vec<u64>,
}

impl Pause {
    pub fn new(role: Role, target: Option<Target>) -> Self {
        Self { role, target, paused: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Pause {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.paused = match field.claim_of(self.role, self.target, rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for id in &self.paused {
            let stopped = async {
                let process = field.cluster.process(ProcessName { role: self.role, id: *id })?;
                process.pause().await?;
                seen_in(process, "to stand still", |state| state == 'T').await
            };
            let stopped = stopped.await.map(|pid| format!("process {pid} is stopped"));
            came.push((*id, stopped.map_err(|e| e.to_string())));
        }
        Done::of_all(called(self.role), &came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let paused = std::mem::take(&mut self.paused);
        let mut came = Vec::new();
        for id in &paused {
            let resumed = async {
                let process = field.cluster.process(ProcessName { role: self.role, id: *id })?;
                process.resume().await?;
                seen_in(process, "to go on", |state| state != 'T').await
            };
            let resumed = resumed.await.map(|pid| format!("process {pid} goes on"));
            came.push((*id, resumed.map_err(|e| e.to_string())));
        }
        field.release_of(self.role, &paused);
        Done::of_all(called(self.role), &came)
    }
}

/// Waits until the kernel says this of a process; gives its pid.
///
/// # Errors
/// There is no process, or it is not so within [`PROOF_WITHIN`].
async fn seen_in(process: &Process, what: &str, is_so: impl Fn(char) -> bool) -> Result<u32> {
    let pid = process.state().pid.ok_or_else(|| Error::NoProcess(process.name()))?;
    probe::until(&format!("{} {what}", process.name()), PROOF_WITHIN, || async {
        match kernel_state(pid) {
            Some(state) if is_so(state) => Ok(pid),
            Some(state) => Err(format!("process {pid} is in state {state}")),
            None => Err(format!("process {pid} is gone")),
        }
    })
    .await
}

/// Every peer, or those that were asked for, is stopped in order and started again, one after the other.
pub struct RollingRestart {
    target: Option<Target>,
    claimed: Vec<u64>,
}

impl RollingRestart {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, claimed: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for RollingRestart {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.claimed = match field.claim(Some(self.target.unwrap_or(Target::All)), rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for id in &self.claimed {
            let replaced = replaced(field, *id).await;
            let done = replaced.is_ok();
            came.push((*id, replaced.map_err(|e| e.to_string())));
            // The others stay as they are: with several down it would be no rolling restart.
            if !done {
                break;
            }
        }
        Done::of_each(&came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        // One that was left in the middle may be down.
        let peers = std::mem::take(&mut self.claimed);
        let done = start_all(field, &peers).await;
        field.release(&peers);
        done
    }
}

/// Stops a peer in order and starts it again; says how the process before ended, and which one is in its place.
async fn replaced(field: &Field, id: u64) -> Result<String> {
    let process = field.cluster.process(ProcessName::metasrv(id))?;
    let before = process.state().pid.ok_or_else(|| Error::NoProcess(process.name()))?;
    process.stop().await?;
    let how = process.state().last_exit.unwrap_or_default();
    field.cluster.start_one(process.name()).await?;
    let after = process.state().pid.filter(|after| *after != before);
    let after = after.ok_or_else(|| Error::NoProcess(process.name()))?;
    if how != IN_ORDER {
        let source = std::io::Error::other(format!("process {before} {how}"));
        return Err(Error::Io { doing: format!("stopping {} in order", process.name()), source });
    }
    Ok(format!("process {before} {how}, {after} serves"))
}

/// A peer, or those that were asked for, are held down until the leader has purged what they lack, so that they need a
/// snapshot. Needs small limits on the log: [`SNAPSHOT_ARGUMENTS`].
pub struct LeftBehind {
    target: Option<Target>,
    claimed: Vec<u64>,
    /// Who is down, and how far its log went.
    down: Vec<(u64, u64)>,
}

/// What peers are started with, so that logs are cut off often.
pub const SNAPSHOT_ARGUMENTS: [&str; 4] = ["--snapshot-entries", "300", "--purge-margin-entries", "50"];

impl LeftBehind {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, claimed: Vec::new(), down: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for LeftBehind {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.claimed = match field.claim(Some(self.target.unwrap_or(Target::One)), rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let mut came = Vec::new();
        for id in self.claimed.clone() {
            let held_down = async {
                let status = field.status(id).await;
                let had = status.ok_or_else(|| "it does not say how far its log goes".to_owned())?.last_log_index;
                let pid = kill(field, id).await.map_err(|e| e.to_string())?;
                self.down.push((id, had));
                Ok::<_, String>(format!("process {pid} is gone, its log ends at {had}"))
            };
            came.push((id, held_down.await));
        }
        Done::of_each(&came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let (claimed, down) = (std::mem::take(&mut self.claimed), std::mem::take(&mut self.down));
        // Those of which nobody knew how far they were are started as well.
        let purged = match down.iter().map(|(_, had)| *had).max() {
            Some(had) => purged_beyond(field, had).await.map_err(|e| e.to_string()),
            None => Err("nobody was down".to_owned()),
        };
        let started = start_all(field, &claimed).await;
        let mut came = Vec::new();
        for (id, had) in down {
            let shown = match purged.clone() {
                Ok(purged) => has_a_snapshot(field, id, had, purged).await.map_err(|e| e.to_string()),
                Err(why) => Err(why),
            };
            came.push((id, shown));
        }
        field.release(&claimed);
        if started.is_installed() { Done::of_each(&came) } else { started }
    }
}

/// Waits until the leader has purged its log beyond an index; gives up to where.
async fn purged_beyond(field: &Field, had: u64) -> Result<u64> {
    probe::until("the log that a peer lacks to be purged", MEND_WITHIN / 2, || async {
        let answers = field.statuses().await;
        let purged = probe::leader(&answers).map_or(0, |leader| leader.purged_index);
        if purged > had { Ok(purged) } else { Err(format!("purged up to {purged}, its log ends at {had}")) }
    })
    .await
}

/// Waits until a peer whose log ended at `had` has a snapshot that goes further.
async fn has_a_snapshot(field: &Field, id: u64, had: u64, purged: u64) -> Result<String> {
    let index = probe::until("a peer that was left behind to have a snapshot", MEND_WITHIN / 2, || async {
        let index = field.status(id).await.map_or(0, |status| status.snapshot_index);
        if index > had { Ok(index) } else { Err(format!("its snapshot covers {index}")) }
    });
    let index = index.await?;
    Ok(format!("its log ended at {had}, others had purged up to {purged}, it has a snapshot of {index}"))
}

/// The leader is cut off until the others have another one; then they are all killed, and come back together with it. What
/// they promised in the meantime they must have written down, or the old leader takes them back.
#[derive(Default)]
pub struct Rejoin {
    claimed: Vec<u64>,
    /// Of these, all but the old leader.
    others: Vec<u64>,
}

const REJOIN: &str = "rejoin";

#[async_trait]
impl Nemesis for Rejoin {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let peers = match field.claim(Some(Target::All), rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        (self.claimed, self.others) = (peers.clone(), Vec::new());
        let answers = field.statuses().await;
        let leader = probe::leader(&answers).and_then(|answer| Some((answer.self_.as_ref()?.id, answer.term)));
        let Some((old, old_term)) = leader.filter(|(id, _)| peers.contains(id)) else {
            return Done::failed(named(&peers), "there is no leader that is under no other fault");
        };
        let paths = partition::paths(partition::Kind::LeaderAlone, &field.roster.ids(), Some(old), rng);
        let target = format!("{} cut off", named(&[old]));
        if let Err(e) = field.disturb(REJOIN, partition::cut(&paths, Cut::Silent)).await {
            return Done::failed(target, e);
        }
        self.others = peers.into_iter().filter(|id| *id != old).collect();
        let succeeded = probe::until("another leader", PROOF_WITHIN, || async {
            let answers = field.statuses().await;
            match probe::leader(&answers) {
                Some(new) if new.term > old_term => Ok(new.term),
                _ => Err(format!("nobody leads after term {old_term}")),
            }
        });
        match succeeded.await {
            Ok(term) => Done::installed(target, format!("the others have a leader in term {term}")),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let others = std::mem::take(&mut self.others);
        // At the same time, whatever becomes of each.
        let dying = others.iter().map(|id| async { (*id, kill(field, *id).await) });
        let killed = futures::future::join_all(dying).await;
        let calmed = field.calm(REJOIN).await;
        let started = start_all(field, &others).await;
        field.release(&std::mem::take(&mut self.claimed));
        if others.is_empty() {
            return Done::skipped("nobody", "nobody was to be killed");
        }
        let came = killed.into_iter().map(|(id, killed)| match killed {
            Ok(pid) => (id, Ok(format!("process {pid} is gone"))),
            Err(e) => (id, Err(e.to_string())),
        });
        match (calmed, Done::of_each(&came.collect::<Vec<_>>())) {
            (Err(e), _) => Done::failed(named(&others), e),
            (Ok(()), killed) if killed.is_installed() => started,
            (Ok(()), killed) => killed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::process::{Launch, Policy};

    /// Sleeps until it is killed.
    fn sleeper() -> Process {
        let launch = Launch {
            program: "sleep".into(),
            args: vec!["1000".into()],
            env: Vec::new(),
            output: "/dev/null".into(),
            append: true,
        };
        let policy = Policy { restart: false, stop_timeout: Duration::from_secs(5), ..Policy::default() };
        let (events, _) = tokio::sync::broadcast::channel(8);
        Process::supervise(
            ProcessName::metasrv(1),
            Box::new(move || Ok(launch.clone())),
            Box::new(|_| {}),
            policy,
            events,
        )
    }

    #[tokio::test]
    async fn a_peer_without_a_process_is_not_killed() {
        let process = sleeper();
        assert!(matches!(killed(&process).await, Err(Error::NoProcess(_))));
        process.start().await.unwrap();
        let pid = process.state().pid.unwrap();
        assert_eq!(killed(&process).await.unwrap(), pid);
        assert!(!is_alive(pid));
        assert!(matches!(killed(&process).await, Err(Error::NoProcess(_))));
    }

    #[tokio::test]
    async fn the_kernel_says_whether_a_process_stands_still() {
        let process = sleeper();
        let stands_still = || seen_in(&process, "to stand still", |state| state == 'T');
        assert!(matches!(stands_still().await, Err(Error::NoProcess(_))));
        process.start().await.unwrap();
        process.pause().await.unwrap();
        let pid = stands_still().await.unwrap();
        process.resume().await.unwrap();
        assert_eq!(seen_in(&process, "to go on", |state| state != 'T').await.unwrap(), pid);
        process.kill().await.unwrap();
    }
}
