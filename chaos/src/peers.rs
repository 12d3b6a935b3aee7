//! Peers as plain child processes, for whoever kills, pauses and starts them again by hand: each keeps its ports and its
//! directory for as long as the value lives. What ends stays ended; the supervisor of a cluster is [`crate::process`].
//!
//! Invariant: no child outlives the value.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use lake_proto::v1::{Member, StatusResponse};
use rustix::process::{Pid, Signal, kill_process};

use crate::ports::{self, Port};
use crate::{Error, IoContext, ProcessName, Result, probe};

/// Peers by id, some of them down.
#[derive(Debug)]
pub struct Peers {
    root: PathBuf,
    places: BTreeMap<u64, Place>,
    running: BTreeMap<u64, Child>,
}

/// What a peer keeps from one start to the next.
#[derive(Debug)]
pub struct Place {
    grpc: Port,
    raft: Port,
    dir: PathBuf,
}

impl Place {
    /// Where clients reach it.
    pub fn grpc(&self) -> String {
        self.grpc.loopback()
    }

    /// Where the other peers reach it.
    pub fn raft(&self) -> String {
        self.raft.loopback()
    }

    /// Its data directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        for child in self.running.values_mut() {
            // One that has ended by itself is only reaped.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Peers {
    /// None yet; their data directories will be `root/peer-<id>`.
    pub fn new(root: PathBuf) -> Self {
        Self { root, places: BTreeMap::new(), running: BTreeMap::new() }
    }

    /// Starts a peer with the command for its place: a new one, or the one it had before.
    ///
    /// # Errors
    /// There is no free port, or the process cannot be spawned.
    pub fn start(&mut self, id: u64, command: impl FnOnce(&Place) -> Command) -> Result<()> {
        if !self.places.contains_key(&id) {
            let dir = self.root.join(format!("peer-{id}"));
            self.places.insert(id, Place { grpc: ports::reserve()?, raft: ports::reserve()?, dir });
        }
        let child = command(self.place(id)?).spawn().doing(|| format!("starting peer {id}"))?;
        self.running.insert(id, child);
        Ok(())
    }

    /// A peer's place.
    ///
    /// # Errors
    /// It was never started.
    pub fn place(&self, id: u64) -> Result<&Place> {
        self.places.get(&id).ok_or(Error::UnknownProcess(ProcessName::metasrv(id)))
    }

    /// The places of all that were ever started.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.places.values()
    }

    /// Those that were started, and neither killed nor seen to have ended.
    pub fn running(&self) -> impl Iterator<Item = u64> {
        self.running.keys().copied()
    }

    /// A running peer's process.
    ///
    /// # Errors
    /// It does not run.
    pub fn pid(&self, id: u64) -> Result<u32> {
        self.running.get(&id).map(Child::id).ok_or(Error::UnknownProcess(ProcessName::metasrv(id)))
    }

    /// SIGKILL; the process is gone when this returns.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self, id: u64) -> Result<()> {
        let mut child = self.running.remove(&id).ok_or(Error::UnknownProcess(ProcessName::metasrv(id)))?;
        child.kill().and_then(|()| child.wait()).map(drop).doing(|| format!("killing peer {id}"))
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// It does not run, or the system refuses.
    pub fn signal(&self, id: u64, signal: Signal) -> Result<()> {
        let doing = || format!("sending {signal:?} to peer {id}");
        let pid = i32::try_from(self.pid(id)?).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| std::io::Error::other("it has no pid")).doing(doing)?;
        kill_process(pid, signal).doing(doing)
    }

    /// Waits for the end of a peer that ends by itself.
    ///
    /// # Errors
    /// It does not run, or not end in time.
    pub async fn ended(&mut self, id: u64, timeout: Duration) -> Result<ExitStatus> {
        let mut child = self.running.remove(&id).ok_or(Error::UnknownProcess(ProcessName::metasrv(id)))?;
        let mut ended = || child.try_wait().map_err(|e| e.to_string())?.ok_or_else(|| "it goes on".to_owned());
        let status = probe::until(&format!("the end of peer {id}"), timeout, || std::future::ready(ended())).await;
        if status.is_err() {
            self.running.insert(id, child);
        }
        status
    }

    /// A peer as an operator names it, who does not know its incarnation.
    ///
    /// # Errors
    /// It was never started.
    pub fn named(&self, id: u64) -> Result<Member> {
        let place = self.place(id)?;
        Ok(Member { id, raft_address: place.raft(), grpc_address: place.grpc(), incarnation: String::new() })
    }

    /// What a peer knows. Nothing from one that is down, or asleep.
    pub async fn status(&self, id: u64) -> Option<StatusResponse> {
        probe::peer(&self.place(id).ok()?.grpc()).await.ok()
    }

    /// Waits until some running peer other than these says that it leads itself.
    ///
    /// # Errors
    /// None does in time; with what was seen last.
    pub async fn leader_besides(&self, besides: &[u64], timeout: Duration) -> Result<u64> {
        probe::until("a leader", timeout, async || {
            let mut seen = Vec::new();
            for id in self.running().filter(|id| !besides.contains(id)) {
                let status = self.status(id).await;
                if status.as_ref().is_some_and(|s| s.leader.as_ref().is_some_and(|leader| leader.id == id)) {
                    return Ok(id);
                }
                seen.push((id, status));
            }
            Err(format!("{seen:#?}"))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    fn sleeper(_: &Place) -> Command {
        let mut command = Command::new("sleep");
        command.arg("600").stdout(Stdio::null());
        command
    }

    #[tokio::test]
    async fn a_peer_keeps_its_place_and_ends_with_the_value() {
        let dir = tempfile::tempdir().unwrap();
        let mut peers = Peers::new(dir.path().to_owned());
        peers.start(1, sleeper).unwrap();
        let first = peers.named(1).unwrap();
        peers.kill(1).unwrap();
        assert_eq!(peers.running().count(), 0);
        assert!(peers.pid(1).is_err() && peers.kill(1).is_err(), "it does not run");
        peers.start(1, sleeper).unwrap();
        assert_eq!(peers.named(1).unwrap(), first);
        assert!(peers.place(1).unwrap().dir().ends_with("peer-1"));

        let late = peers.ended(1, Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(late, Error::Timeout { .. }), "{late}");
        peers.signal(1, Signal::TERM).unwrap();
        assert_eq!(peers.ended(1, Duration::from_secs(60)).await.unwrap().code(), None);

        peers.start(2, sleeper).unwrap();
        let process = format!("/proc/{}", peers.pid(2).unwrap());
        assert!(Path::new(&process).exists());
        drop(peers);
        assert!(!Path::new(&process).exists());
    }
}
