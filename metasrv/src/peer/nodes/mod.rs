//! The query nodes, as the leader coordinates them: who is registered, who lives, what is sent to whom.
//! docs/src/coordination.md has states, messages, limits and failure cases.
//!
//! - [`heartbeat`]: a heartbeat from its arrival to its answer, through handlers in a written order;
//! - [`registry`]: what was heard of whom, in memory, of one term;
//! - [`records`]: the nodes' entries as they were read last;
//! - [`turns`]: one request of a node at a time;
//! - [`gathering`]: renewals that are confirmed together;
//! - [`mailbox`]: instructions to nodes, and their answers.
//!
//! Invariants:
//! - the epoch of a process is the revision of its registration in the map; of two processes with one node's name, the one
//!   that was registered later is the node's;
//! - nothing is renewed or said to a process that is not the node's, but that it is over;
//! - a tenure is answered only by a leader that a quorum has confirmed since the heartbeat arrived.

pub mod gathering;
pub mod heartbeat;
pub mod mailbox;
pub mod records;
pub mod registry;
pub mod turns;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use lake_client::clock;
use lake_client::nodes::{MAX_NODES, NODES, Rhythm, validate_node};
use lake_proto::coordination::LeaseId;
use lake_proto::limits::MAX_HOLDER_BYTES;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;

use self::gathering::Gathering;
use self::mailbox::{MAX_PAYLOAD_BYTES, Mailbox, NotDone};
use self::records::Records;
use self::registry::Registry;
use self::turns::Turns;
use super::duties::Mortal;
use super::failure::Failure;
use super::member::Member;
use super::placement::phi::Detectors;
use super::shares::Call;
use crate::log::lock;
use crate::state::State;

/// What is put before a node's name where a lease is granted to it.
const HOLDER: &str = "node ";

/// What a member knows of the nodes while it leads.
#[derive(Debug)]
pub struct Nodes {
    pub rhythm: Rhythm,
    pub mailbox: Mailbox,
    /// Locked before the others, by whoever needs several.
    pub(super) records: Mutex<Records>,
    pub(super) registry: Mutex<Registry>,
    pub(super) detectors: Mutex<Detectors>,
    turns: Turns,
    gathering: Gathering,
    streams: AtomicU64,
}

impl Nodes {
    /// Nobody is known yet.
    pub fn new(rhythm: Rhythm) -> Self {
        Self {
            rhythm,
            mailbox: Mailbox::default(),
            records: Mutex::default(),
            registry: Mutex::default(),
            detectors: Mutex::default(),
            turns: Turns::default(),
            gathering: Gathering::new(rhythm.interval),
            streams: AtomicU64::new(0),
        }
    }

    /// This peer is on duty in `term` from now on.
    pub(super) fn lead(&self, term: u64) {
        lock(&self.registry).lead(term);
        lock(&self.detectors).lead(term, self.rhythm.into(), clock::now());
    }

    /// It is no longer.
    pub(super) fn stop(&self) {
        lock(&self.records).clear();
        lock(&self.registry).stop();
        lock(&self.detectors).stop();
    }

    /// A number for a stream that no other one has.
    pub fn next_stream(&self) -> u64 {
        self.streams.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A stream of a node has closed. What came over it goes; nothing else does.
    pub fn closed(&self, node: &str, stream: u64) {
        lock(&self.registry).closed(node, stream);
        self.mailbox.close(node, stream);
    }

    /// The nodes of a role that have a stream to this peer, in order of their names.
    pub fn connected_as(&self, role: &str) -> Vec<String> {
        lock(&self.registry).connected_as(role)
    }

    /// How many nodes have a stream to this peer.
    pub fn connected(&self) -> usize {
        lock(&self.registry).connected()
    }
}

/// Whether a lease lives, and was granted to this node.
pub(super) fn has_lease(state: &State, node: &str, lease: LeaseId) -> bool {
    state.lease_holder(lease).and_then(|holder| holder.strip_prefix(HOLDER)) == Some(node)
}

/// To whom a node's lease is granted.
fn holder(node: &str) -> String {
    format!("{HOLDER}{node}")
}

impl Member {
    /// The nodes that are registered, in order of their names, and what this leader knows of each.
    ///
    /// # Errors
    /// NotLeader; Unavailable without a quorum; Overloaded.
    pub async fn list_nodes(&self, call: &Call) -> Result<(u64, Vec<v1::NodeStatus>), Failure> {
        self.confirmed_on_duty(&call.caller).await?;
        let applied = self.published.current();
        let now = clock::now();
        let mut records = lock(&self.nodes.records);
        let registry = lock(&self.nodes.registry);
        let countdowns = lock(self.duties.of(Mortal::Lease));
        let nodes = applied.state.keys(NODES).take(MAX_NODES).filter_map(|key| {
            let node = key.strip_prefix(NODES)?.to_owned();
            // What somebody else has put there is no node.
            let (record, epoch) = records.of(&applied.state, &node)?;
            let heard = registry.of(&node, &record.process);
            let remaining = (record.lease != 0).then(|| countdowns.remaining(record.lease, now)).flatten();
            Some(v1::NodeStatus {
                epoch,
                lease: record.lease,
                remaining_ms: remaining.map(millis),
                silent_ms: heard.map(|heard| millis(heard.silent(now))),
                connected: heard.is_some_and(|heard| heard.stream.is_some()),
                info: Some(heard.map_or_else(|| record.info(), |heard| heard.info.clone())),
                load: heard.map(|heard| heard.load.clone()),
                process: record.process.clone(),
                node,
            })
        });
        Ok((applied.state.revision(), nodes.collect()))
    }

    /// Sends an instruction to a node, and waits for its answer unless it is one-way (then it is empty). One-way it may also go to all nodes
    /// that are connected, whose name is empty: the answer is how many it is on its way to.
    ///
    /// # Errors
    /// NotLeader; InvalidArgument over a limit, or what the node itself refuses; Unavailable for a node that is not connected,
    /// goes or is late: whether it was done is then unknown, unless it never was sent.
    pub async fn instruct(
        &self,
        node: &str,
        kind: &str,
        payload: Bytes,
        one_way: bool,
        call: &Call,
    ) -> Result<Bytes, Failure> {
        let to_all = one_way && node.is_empty();
        if !to_all {
            validate_node(node).map_err(Failure::invalid)?;
        }
        if kind.is_empty() || kind.len() > MAX_HOLDER_BYTES || payload.len() > MAX_PAYLOAD_BYTES {
            let what = format!(
                "an instruction of a kind with {} bytes and {} bytes of payload; a kind has 1 to {MAX_HOLDER_BYTES}, and a \
                 payload at most {MAX_PAYLOAD_BYTES}",
                kind.len(),
                payload.len()
            );
            return Err(Failure::invalid(what));
        }
        self.confirmed_on_duty(&call.caller).await?;
        if to_all {
            return Ok(self.nodes.mailbox.tell_all(kind, &payload).to_string().into());
        }
        let answer = match one_way {
            true => self.nodes.mailbox.tell(node, kind, payload).map(|()| Bytes::new()),
            false => self.nodes.mailbox.ask(node, kind, payload, call.deadline).await,
        };
        answer.map_err(|not_done| failure(&not_done))
    }
}

fn failure(not_done: &NotDone) -> Failure {
    let what = not_done.to_string();
    match not_done {
        NotDone::NotConnected { .. } => Failure::unavailable(what),
        NotDone::Full { .. } => Failure::new(Kind::Overloaded, what),
        NotDone::Gone { .. } | NotDone::Late { .. } => Failure::unknown(what),
        NotDone::Refused { .. } => Failure::invalid(what),
    }
}

pub(super) fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}
