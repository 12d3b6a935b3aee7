//! Faults of processes: killed, paused, restarted, and held down until the others have thrown away what they lack.

use std::path::Path;

use async_trait::async_trait;
use rand::rngs::StdRng;

use super::field::{Field, MEND_WITHIN, PROOF_WITHIN, named};
use super::kind::Target;
use super::{Done, Nemesis};
use crate::net::condition::Cut;
use crate::net::partition;
use crate::process::ProcessName;
use crate::{Error, Result, probe};

/// SIGKILL, and a start when it is over.
pub struct Kill {
    target: Option<Target>,
    killed: Vec<u64>,
}

impl Kill {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, killed: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Kill {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.killed = match field.claim(self.target, rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let target = named(&self.killed);
        let mut pids = Vec::new();
        for id in &self.killed {
            match kill(field, *id).await {
                Ok(pid) => pids.extend(pid),
                Err(e) => return Done::failed(target, e),
            }
        }
        match pids.iter().find(|pid| is_alive(**pid)) {
            _ if pids.is_empty() => Done::failed(target, "no process was running"),
            Some(pid) => Done::failed(target, format!("process {pid} is alive after SIGKILL")),
            None => Done::installed(target, format!("processes gone: {pids:?}")),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let peers = std::mem::take(&mut self.killed);
        let done = start_all(field, &peers).await;
        field.release(&peers);
        done
    }
}

/// Kills a peer's process; gives the pid that it had.
pub(super) async fn kill(field: &Field, id: u64) -> Result<Option<u32>> {
    let process = field.cluster.process(ProcessName::metasrv(id))?;
    let pid = process.state().pid;
    process.kill().await?;
    Ok(pid)
}

/// Starts peers again, all at once, and waits until each serves.
pub(super) async fn start_all(field: &Field, peers: &[u64]) -> Done {
    let target = named(peers);
    let starting = peers.iter().map(|id| field.cluster.start_one(ProcessName::metasrv(*id)));
    match futures::future::try_join_all(starting).await {
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
    target: Option<Target>,
    paused: Vec<u64>,
}

impl Pause {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, paused: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for Pause {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.paused = match field.claim(self.target, rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let target = named(&self.paused);
        let mut pids = Vec::new();
        for id in &self.paused {
            let paused = async {
                let process = field.cluster.process(ProcessName::metasrv(*id))?;
                process.pause().await?;
                Ok::<_, Error>(process.state().pid)
            };
            match paused.await {
                Ok(pid) => pids.extend(pid),
                Err(e) => return Done::failed(target, e),
            }
        }
        let stopped = || async {
            let moving: Vec<_> = pids.iter().filter(|pid| kernel_state(**pid) != Some('T')).collect();
            if moving.is_empty() { Ok(()) } else { Err(format!("not stopped: {moving:?}")) }
        };
        match probe::until("the processes to stand still", PROOF_WITHIN, stopped).await {
            Ok(()) => Done::installed(target, format!("processes stopped: {pids:?}")),
            Err(e) => Done::failed(target, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let peers = std::mem::take(&mut self.paused);
        let target = named(&peers);
        let mut done = Done::installed(target.clone(), "all go on");
        for id in &peers {
            let resumed = async { field.cluster.process(ProcessName::metasrv(*id))?.resume().await };
            if let Err(e) = resumed.await {
                done = Done::failed(target.clone(), e);
            }
        }
        field.release(&peers);
        done
    }
}

/// Every peer is stopped in order and started again, one after the other.
#[derive(Default)]
pub struct RollingRestart {
    claimed: Vec<u64>,
}

#[async_trait]
impl Nemesis for RollingRestart {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        self.claimed = match field.claim(Some(Target::All), rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let target = named(&self.claimed);
        for id in &self.claimed {
            let replaced = async {
                let name = ProcessName::metasrv(*id);
                let before = field.cluster.process(name)?.state().starts;
                field.cluster.restart(name).await?;
                Ok::<_, Error>(field.cluster.process(name)?.state().starts > before)
            };
            match replaced.await {
                Ok(true) => {}
                Ok(false) => return Done::failed(target, format!("peer {id} is the process that it was")),
                Err(e) => return Done::failed(target, e),
            }
        }
        Done::installed(target, format!("{} processes were replaced", self.claimed.len()))
    }

    async fn stop(&mut self, field: &Field) -> Done {
        // One that was left in the middle may be down.
        let peers = std::mem::take(&mut self.claimed);
        let done = start_all(field, &peers).await;
        field.release(&peers);
        done
    }
}

/// One follower is held down until the leader has purged what it lacks, so that it needs a snapshot. Needs small limits on
/// the log: [`SNAPSHOT_ARGUMENTS`].
#[derive(Default)]
pub struct LeftBehind {
    /// Who, and how far its log went.
    down: Option<(u64, u64)>,
}

/// What peers are started with, so that logs are cut off often.
pub const SNAPSHOT_ARGUMENTS: [&str; 4] = ["--snapshot-entries", "300", "--purge-margin-entries", "50"];

#[async_trait]
impl Nemesis for LeftBehind {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let id = match field.claim_one(rng).await {
            Ok(id) => id,
            Err(why) => return Done::failed("nobody", why),
        };
        let Some(status) = field.status(id).await else {
            field.release(&[id]);
            return Done::failed(named(&[id]), "it does not say how far its log goes");
        };
        self.down = Some((id, status.last_log_index));
        match kill(field, id).await {
            Ok(_) => Done::installed(named(&[id]), format!("it is down, its log ends at {}", status.last_log_index)),
            Err(e) => Done::failed(named(&[id]), e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let Some((id, had)) = self.down.take() else { return Done::failed("nobody", "nobody was down") };
        let purged = probe::until("the log that it lacks to be purged", MEND_WITHIN / 2, || async {
            let answers = field.statuses().await;
            let purged = probe::leader(&answers).map_or(0, |leader| leader.purged_index);
            if purged > had { Ok(purged) } else { Err(format!("purged up to {purged}, its log ends at {had}")) }
        })
        .await;
        let mut done = start_all(field, &[id]).await;
        if matches!(done.installation, crate::history::Installation::Installed(_)) {
            done = match purged {
                Err(e) => Done::failed(named(&[id]), e),
                Ok(purged) => match probe::until("it to have a snapshot", MEND_WITHIN / 2, || async {
                    let index = field.status(id).await.map_or(0, |status| status.snapshot_index);
                    if index > had { Ok(index) } else { Err(format!("its snapshot covers {index}")) }
                })
                .await
                {
                    Ok(index) => Done::installed(
                        named(&[id]),
                        format!(
                            "its log ended at {had}, others had purged up to {purged}, it has a snapshot of {index}"
                        ),
                    ),
                    Err(e) => Done::failed(named(&[id]), e),
                },
            };
        }
        field.release(&[id]);
        done
    }
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
        let dying = others.iter().map(|id| kill(field, *id));
        let killed = futures::future::try_join_all(dying).await;
        let calmed = field.calm(REJOIN).await;
        let mut done = start_all(field, &others).await;
        if let Err(e) = killed.map(|_| ()).and(calmed) {
            done = Done::failed(named(&others), e);
        }
        field.release(&std::mem::take(&mut self.claimed));
        done
    }
}
