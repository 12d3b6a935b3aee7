//! This process as a node of the cluster: what it tells the leader of itself, and what the leader may have it do.
//!
//! [`lake_client::remote::node`] keeps it registered; docs/src/coordination.md has the rules. A node that is superseded, because
//! another process was registered under its name since, says so ([`crate::node::QueryNode::failed`]), drains and ends.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use lake_client::nodes::{NOTICE, PING};
use lake_client::remote::node::Node;
use lake_proto::v1;

use crate::chores::Chores;
use crate::chores::moves::Moves;
use crate::config::Config;
use crate::sql::Engine;

/// How finely the system counts a process's time (`USER_HZ`, which Linux tells every program).
const TICKS_PER_SECOND: u64 = 100;

/// What this process tells of itself.
#[derive(Debug)]
pub struct ThisNode {
    info: v1::NodeInfo,
    engine: Arc<Engine>,
    chores: Chores,
    /// The processor time used, when it was last looked at.
    used: Mutex<Option<(Duration, Instant)>>,
}

impl ThisNode {
    /// A node that is reached there.
    pub fn new(config: &Config, flight_address: String, rest_address: Option<String>, engine: Arc<Engine>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let info = v1::NodeInfo {
            roles: config.roles.iter().map(|role| role.as_str().to_owned()).collect(),
            flight_address,
            rest_address: rest_address.unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            memory_bytes: config.memory_limit_bytes as u64,
            max_statements: u32::try_from(config.max_statements).unwrap_or(u32::MAX),
        };
        let chores = Chores::new(engine.clone());
        Self { info, engine, chores, used: Mutex::new(processor_time().map(|used| (used, Instant::now()))) }
    }

    /// What this node's own upkeep goes by, as the leader has told of moves.
    pub fn moves(&self) -> &Arc<Moves> {
        self.chores.moves()
    }

    /// Thousandths of a core that the process has used since it was last asked; 0 where the system does not tell.
    fn cpu_millicores(&self) -> u32 {
        let Some(used) = processor_time() else { return 0 };
        let now = Instant::now();
        let mut before = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((used_before, then)) = before.replace((used, now)) else { return 0 };
        millicores(used.saturating_sub(used_before), now.saturating_duration_since(then))
    }
}

fn millicores(used: Duration, passed: Duration) -> u32 {
    match passed.as_millis() {
        0 => 0,
        passed => u32::try_from(used.as_millis() * 1000 / passed).unwrap_or(u32::MAX),
    }
}

/// The processor time that this process has used.
fn processor_time() -> Option<Duration> {
    processor_time_in(&std::fs::read_to_string("/proc/self/stat").ok()?)
}

/// The same, as `/proc/<pid>/stat` says it: the name of the program stands in brackets, and may contain anything.
fn processor_time_in(stat: &str) -> Option<Duration> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let (user, system) = (ticks()?, ticks()?);
    Some(Duration::from_millis((user + system) * 1000 / TICKS_PER_SECOND))
}

#[async_trait]
impl Node for ThisNode {
    fn info(&self) -> v1::NodeInfo {
        self.info.clone()
    }

    fn load(&self) -> v1::NodeLoad {
        v1::NodeLoad {
            running_statements: u32::try_from(self.engine.running()).unwrap_or(u32::MAX),
            cache_bytes: self.engine.tables().cache.bytes(),
            cpu_millicores: self.cpu_millicores(),
            observed_revision: self.engine.tables().metadata.seen(),
            procedures: self.chores.in_hand(),
        }
    }

    async fn carry_out(&self, kind: &str, payload: Bytes) -> Result<Bytes, String> {
        match kind {
            PING => Ok(payload),
            NOTICE => {
                let revision = std::str::from_utf8(&payload).ok().and_then(|text| text.parse().ok());
                let revision = revision.ok_or("a notice names a revision, as decimal digits")?;
                self.engine.tables().metadata.notice(revision);
                Ok(Bytes::new())
            }
            other => match self.chores.carry_out(other, &payload).await {
                Some(done) => done,
                None => Err(format!("this node (lake {}) knows no instruction {other:?}", self.info.version)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_is_found_behind_any_name() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 0 0 0 150 50 9 9 20 0 1 0 1 1 1";
        assert_eq!(processor_time_in(stat), Some(Duration::from_secs(2)));
        assert_eq!(processor_time_in("42 (a) S 1"), None);
        assert!(processor_time().is_some());
        assert_eq!(millicores(Duration::from_secs(3), Duration::from_secs(2)), 1500);
        assert_eq!(millicores(Duration::from_secs(3), Duration::ZERO), 0);
    }
}
