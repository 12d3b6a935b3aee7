//! Query nodes as the cluster knows them: what is kept of each in the map, and the times that a node and the leader keep.
//! docs/src/coordination.md has the whole of it.
//!
//! Pure values. [`crate::remote::node`] is a node's side, lake-metasrv's `peer::nodes` the leader's.

use std::time::Duration;

use bytes::Bytes;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{KeyValue, Revision};
use lake_proto::limits::LEASE_TTL_MS;
use lake_proto::v1;
use serde::{Deserialize, Serialize};

/// Under it lies one entry for each node that is registered.
pub const NODES: &str = "/lake/node/";
/// An instruction that is answered with its own payload.
pub const PING: &str = "ping";
/// An instruction that tells of a revision of the map, as decimal digits: what is cached of an earlier one is renewed when it is
/// next used.
pub const NOTICE: &str = "notice";
/// Longest name of a node, in bytes.
pub const MAX_NODE_BYTES: usize = 128;
/// Most nodes that are registered at once.
pub const MAX_NODES: usize = 10_000;
/// Of the processes that were registered as a node before, so many are remembered: one that asks again is told that it is over.
pub const MAX_SUPERSEDED: usize = 8;
/// Longest name of a process, an address, a role or a version, in bytes; and most roles.
const MAX_WORD_BYTES: usize = 256;
const MAX_ROLES: usize = 8;
/// Most procedures that a heartbeat names.
const MAX_PROCEDURES: usize = 1000;

/// The times between a node and the leader.
///
/// Two heartbeats in a row may be lost, or one and the leader, before the lease is: `lease >= 2 (interval + timeout)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rhythm {
    /// From one heartbeat to the next.
    pub interval: Duration,
    /// How long the lease lives that a heartbeat renews.
    pub lease: Duration,
}

impl Default for Rhythm {
    fn default() -> Self {
        Self { interval: Duration::from_secs(3), lease: Duration::from_secs(10) }
    }
}

impl Rhythm {
    /// The shortest interval.
    pub const LEAST_INTERVAL: Duration = Duration::from_millis(100);

    /// How long a node waits for the answer to a heartbeat, before it looks for the leader elsewhere.
    pub fn timeout(self) -> Duration {
        self.interval * 2 / 3
    }

    /// How long a node whose stream to the leader ended waits before it asks who leads, if its lease lives for `left` still.
    /// `chance` is anything from 0 to 1, drawn anew each time.
    ///
    /// An interval at most, so that however many nodes lose the same leader, they ask about as often as they send heartbeats; and a third of
    /// what is left at most, so that the lease never comes near its end by it. After a heartbeat that was lost that third is more
    /// than half an interval: nobody asks twice as often as heartbeats come.
    pub fn before_asking(self, left: Duration, chance: f64) -> Duration {
        self.interval.min(left / 3).mul_f64(chance)
    }

    /// The shortest lease that goes with the interval.
    pub fn least_lease(self) -> Duration {
        (self.interval + self.timeout()) * 2
    }

    /// Checks what must hold.
    ///
    /// # Errors
    /// What does not.
    pub fn check(self) -> Result<(), String> {
        let ms = |d: Duration| d.as_millis();
        if self.interval < Self::LEAST_INTERVAL {
            return Err(format!("nodes send a heartbeat every {} ms; the least is 100 ms", ms(self.interval)));
        }
        let (least, most) = (Duration::from_millis(LEASE_TTL_MS.0), Duration::from_millis(LEASE_TTL_MS.1));
        if self.lease < least || self.lease > most {
            return Err(format!(
                "a node's lease lives {} ms; it may be {} to {} ms",
                ms(self.lease),
                ms(least),
                ms(most)
            ));
        }
        if self.lease < self.least_lease() {
            return Err(format!(
                "a node's lease lives {} ms, and with a heartbeat every {} ms it must live at least {} ms, so that it \
                 outlives one that is lost",
                ms(self.lease),
                ms(self.interval),
                ms(self.least_lease())
            ));
        }
        Ok(())
    }
}

/// What the map keeps of a node, under [`key`]. JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The process that is registered.
    pub process: String,
    /// Its epoch, if this is not its first entry; see [`Record::epoch`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    epoch: Option<Revision>,
    /// Its lease.
    pub lease: LeaseId,
    pub roles: Vec<String>,
    pub flight_address: String,
    pub rest_address: String,
    pub version: String,
    /// The processes registered before, the last one last: at most [`MAX_SUPERSEDED`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub superseded: Vec<String>,
}

/// Where the entry of a node is.
pub fn key(node: &str) -> String {
    format!("{NODES}{node}")
}

impl Record {
    /// The entry of a process that registers with this lease, over what is there: `before` is that node's record, and its
    /// process's epoch. The same process keeps its epoch.
    pub fn next(process: &str, lease: LeaseId, info: &v1::NodeInfo, before: Option<(Record, Revision)>) -> Self {
        let (epoch, superseded) = match before {
            Some((before, epoch)) if before.process == process => (Some(epoch), before.superseded),
            Some((before, _)) => {
                let mut superseded = before.superseded;
                superseded.push(before.process);
                let forgotten = superseded.len().saturating_sub(MAX_SUPERSEDED);
                superseded.drain(..forgotten);
                (None, superseded)
            }
            None => (None, Vec::new()),
        };
        Self {
            process: process.to_owned(),
            epoch,
            lease,
            roles: info.roles.clone(),
            flight_address: info.flight_address.clone(),
            rest_address: info.rest_address.clone(),
            version: info.version.clone(),
            superseded,
        }
    }

    /// What an entry holds. `None`: something that is no node's record.
    pub fn of(entry: &KeyValue) -> Option<Self> {
        serde_json::from_slice(&entry.value).ok()
    }

    /// The epoch of the process: the revision of its first registration. `mod_revision` is the entry's.
    pub fn epoch(&self, mod_revision: Revision) -> Revision {
        self.epoch.unwrap_or(mod_revision)
    }

    /// As it is kept.
    pub fn to_bytes(&self) -> Bytes {
        // A struct of strings and numbers cannot fail to be written.
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    /// What is told of the node's process.
    pub fn info(&self) -> v1::NodeInfo {
        v1::NodeInfo {
            roles: self.roles.clone(),
            flight_address: self.flight_address.clone(),
            rest_address: self.rest_address.clone(),
            version: self.version.clone(),
            ..v1::NodeInfo::default()
        }
    }
}

/// What is wrong with a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHeartbeat {
    #[error("{name:?} is no name of a node: it has 1 to {MAX_NODE_BYTES} bytes, and neither / nor what cannot be seen")]
    Node { name: String },
    #[error("the heartbeat's {what} has {len} bytes or parts; it may have at most {most}")]
    TooLong { what: &'static str, len: usize, most: usize },
    #[error("the heartbeat lacks its {0}")]
    Lacks(&'static str),
}

/// Checks the limits of a node's name.
///
/// # Errors
/// When it is none.
pub fn validate_node(name: &str) -> Result<(), InvalidHeartbeat> {
    let fits = (1..=MAX_NODE_BYTES).contains(&name.len());
    if fits && !name.chars().any(|c| c == '/' || c.is_control() || c.is_whitespace()) {
        return Ok(());
    }
    Err(InvalidHeartbeat::Node { name: name.chars().take(MAX_NODE_BYTES).collect() })
}

/// Checks the limits of a heartbeat.
///
/// # Errors
/// The first one that is passed.
pub fn validate_heartbeat(beat: &v1::Heartbeat) -> Result<(), InvalidHeartbeat> {
    validate_node(&beat.node)?;
    let within = |what, len: usize, most| match len <= most {
        true => Ok(()),
        false => Err(InvalidHeartbeat::TooLong { what, len, most }),
    };
    if beat.process.is_empty() {
        return Err(InvalidHeartbeat::Lacks("process"));
    }
    within("process", beat.process.len(), MAX_WORD_BYTES)?;
    let info = beat.info.as_ref().ok_or(InvalidHeartbeat::Lacks("node's description"))?;
    within("roles", info.roles.len(), MAX_ROLES)?;
    let words = [("address", &info.flight_address), ("REST address", &info.rest_address), ("version", &info.version)];
    let roles = info.roles.iter().map(|role| ("role", role));
    words.into_iter().chain(roles).try_for_each(|(what, word)| within(what, word.len(), MAX_WORD_BYTES))?;
    let procedures = beat.load.as_ref().map_or(&[][..], |load| load.procedures.as_slice());
    within("procedures", procedures.len(), MAX_PROCEDURES)?;
    procedures.iter().try_for_each(|id| within("procedure's id", id.len(), MAX_WORD_BYTES))
}

/// A node as the leader tells of it.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeStatus {
    pub node: String,
    pub process: String,
    pub epoch: Revision,
    pub lease: LeaseId,
    /// How long until its lease ends unless it is heard; `None`: it has ended.
    pub remaining: Option<Duration>,
    /// Since its last heartbeat; `None`: the leader has not heard of it since it leads.
    pub silent: Option<Duration>,
    /// Whether its stream to the leader is open.
    pub connected: bool,
    pub info: v1::NodeInfo,
    pub load: Option<v1::NodeLoad>,
}

/// What a node's standing comes to, in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    /// Its lease lives, and its stream is open.
    Up,
    /// Its lease lives, and nothing is heard of it now.
    Silent,
    /// Its lease has ended.
    Down,
}

impl NodeState {
    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            NodeState::Up => "up",
            NodeState::Silent => "silent",
            NodeState::Down => "down",
        }
    }
}

impl NodeStatus {
    /// What that comes to.
    pub fn state(&self) -> NodeState {
        match (self.remaining, self.connected) {
            (None, _) => NodeState::Down,
            (Some(_), true) => NodeState::Up,
            (Some(_), false) => NodeState::Silent,
        }
    }
}

impl From<v1::NodeStatus> for NodeStatus {
    fn from(status: v1::NodeStatus) -> Self {
        Self {
            node: status.node,
            process: status.process,
            epoch: status.epoch,
            lease: status.lease,
            remaining: status.remaining_ms.map(Duration::from_millis),
            silent: status.silent_ms.map(Duration::from_millis),
            connected: status.connected,
            info: status.info.unwrap_or_default(),
            load: status.load,
        }
    }
}

/// A name that no other process has.
pub fn new_process() -> String {
    uuid::Uuid::new_v4().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(process: &str, before: Option<(Record, Revision)>) -> Record {
        Record::next(process, 7, &v1::NodeInfo::default(), before)
    }

    #[test]
    fn the_times_of_a_node_go_together() {
        assert_eq!(Rhythm::default().check(), Ok(()));
        assert_eq!(Rhythm::default().least_lease(), Rhythm::default().lease);
        let of = |interval_ms, lease_ms| {
            let ms = Duration::from_millis;
            Rhythm { interval: ms(interval_ms), lease: ms(lease_ms) }.check()
        };
        assert_eq!(of(300, 1000), Ok(()));
        assert!(of(50, 10_000).unwrap_err().contains("every 50 ms"));
        assert!(of(200, 900).unwrap_err().contains("lives 900 ms"));
        assert!(of(3000, 9999).unwrap_err().contains("at least 10000 ms"));
        assert!(of(3000, 60_001).is_err());
    }

    #[test]
    fn nodes_that_lose_the_same_leader_ask_less_than_twice_as_often_as_they_send_heartbeats() {
        const NODES: u32 = 1000;
        let of = |interval_ms, lease_ms| Rhythm {
            interval: Duration::from_millis(interval_ms),
            lease: Duration::from_millis(lease_ms),
        };
        for rhythm in [Rhythm::default(), of(300, 1000), of(100, 60_000), of(18_000, 60_000)] {
            rhythm.check().unwrap();
            let one_was_lost = rhythm.lease - rhythm.interval - rhythm.timeout();
            for left in [rhythm.lease, rhythm.lease - rhythm.interval, one_was_lost] {
                let chances = (0..NODES).map(|n| f64::from(n) / f64::from(NODES));
                let waits: Vec<_> = chances.map(|chance| rhythm.before_asking(left, chance)).collect();
                assert!(waits.iter().all(|wait| *wait <= left / 3 && *wait <= rhythm.interval), "{rhythm:?} {left:?}");
                let part = rhythm.interval / 10;
                for n in 0..10 {
                    let together = waits.iter().filter(|wait| (part * n..part * (n + 1)).contains(*wait)).count();
                    assert!(together < 2 * NODES as usize / 10, "{rhythm:?} {left:?}: {together} in part {n}");
                }
            }
            assert_eq!(rhythm.before_asking(Duration::ZERO, 0.9), Duration::ZERO, "there is no time to lose");
        }
    }

    #[test]
    fn a_process_keeps_its_epoch_and_the_next_one_gets_another() {
        let first = record("a", None);
        assert_eq!(first.epoch(5), 5);
        let again = record("a", Some((first.clone(), 5)));
        assert_eq!(again.epoch(9), 5);
        let third = record("a", Some((again.clone(), again.epoch(9))));
        assert_eq!(third.epoch(11), 5);
        let other = record("b", Some((third, 5)));
        assert_eq!((other.epoch(12), other.superseded.as_slice()), (12, &["a".to_owned()][..]));
        let entry = KeyValue {
            key: key("n"),
            value: other.to_bytes(),
            version: 1,
            create_revision: 12,
            mod_revision: 12,
            lease: None,
        };
        assert_eq!(Record::of(&entry), Some(other));
        assert_eq!(Record::of(&KeyValue { value: "up".into(), ..entry }), None);
    }

    #[test]
    fn the_oldest_of_many_processes_is_forgotten() {
        let mut last = record("0", None);
        for n in 1..=MAX_SUPERSEDED + 1 {
            last = record(&n.to_string(), Some((last, 1)));
        }
        assert_eq!(last.superseded.len(), MAX_SUPERSEDED);
        assert_eq!(last.superseded.first().map(String::as_str), Some("1"));
    }

    #[test]
    fn heartbeats_have_limits() {
        let good = || v1::Heartbeat {
            node: "query-1".into(),
            process: "p".into(),
            info: Some(v1::NodeInfo { roles: vec!["query".into()], ..v1::NodeInfo::default() }),
            ..v1::Heartbeat::default()
        };
        assert_eq!(validate_heartbeat(&good()), Ok(()));
        for name in ["", "a/b", "a b", "a\n", &"n".repeat(MAX_NODE_BYTES + 1)] {
            let wrong = v1::Heartbeat { node: name.to_owned(), ..good() };
            assert!(matches!(validate_heartbeat(&wrong), Err(InvalidHeartbeat::Node { .. })), "{name:?}");
        }
        assert!(validate_heartbeat(&v1::Heartbeat { process: String::new(), ..good() }).is_err());
        assert!(validate_heartbeat(&v1::Heartbeat { info: None, ..good() }).is_err());
        let load = v1::NodeLoad { procedures: vec!["p".into(); MAX_PROCEDURES + 1], ..v1::NodeLoad::default() };
        assert!(validate_heartbeat(&v1::Heartbeat { load: Some(load), ..good() }).is_err());
    }
}
