//! What openraft is told about lake: the types that make up its log, votes and members.
//!
//! Leader ids are the standard kind: at most one leader per term, so that "who leads in term T" has one answer and the
//! compare on the entry's term (semantics, section 2) stops a deposed leader.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use lake_proto::kv::Invalid;
use lake_proto::v1;
use openraft::impls::{BoxedErrorSource, InlineBatch, TokioRuntime, leader_id_std};
use openraft::raft::responder::Responder;
use openraft::vote::leader_id_std::CommittedLeaderId;
use openraft::{OptionalSend, RaftTypeConfig};
use prost::Message;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::sync::oneshot;

use crate::peer::shares::Held;
use crate::state::command::{self as state, Outcome};

/// lake's instantiation of openraft. Written out, since openraft's macro cannot name a [`Reply`].
#[derive(Debug, Clone, Copy, Default, Eq, PartialEq, Ord, PartialOrd)]
pub struct TypeConfig;

impl RaftTypeConfig for TypeConfig {
    type D = Command;
    type R = Answer;
    type NodeId = u64;
    type Node = Member;
    type Term = u64;
    type LeaderId = leader_id_std::LeaderId<u64, u64>;
    type Vote = Vote;
    type Payload = Payload;
    type Entry = Entry;
    type AsyncRuntime = TokioRuntime;
    type Responder<T>
        = Reply<T>
    where
        T: OptionalSend + 'static;
    type Batch<T>
        = InlineBatch<T>
    where
        T: OptionalSend + 'static;
    type ErrorSource = BoxedErrorSource;
}

/// A handle to the consensus core.
pub type Raft = openraft::Raft<TypeConfig, super::state_machine::StateMachine>;
/// Term and index of a log entry.
pub type LogId = openraft::LogId<CommittedLeaderId<u64>>;
/// Whom a peer has voted for, or follows, in a term.
pub type Vote = openraft::Vote<leader_id_std::LeaderId<u64, u64>>;
/// A log entry.
pub type Entry = openraft::Entry<CommittedLeaderId<u64>, Payload>;
/// What a log entry carries.
pub type Payload = openraft::EntryPayload<Command, u64, Member>;
/// Voters, learners, and who they are.
pub type Membership = openraft::Membership<u64, Member>;
/// A membership and the log entry that set it.
pub type StoredMembership = openraft::StoredMembership<CommittedLeaderId<u64>, u64, Member>;
/// What a snapshot covers.
pub type SnapshotMeta = openraft::SnapshotMeta<CommittedLeaderId<u64>, u64, Member>;

/// A log id from its parts.
pub fn log_id(term: u64, index: u64) -> LogId {
    LogId { leader_id: CommittedLeaderId::new(term), index }
}

/// What the log replicates: a command, and the bytes that stand for it in the log and on the network, which its values are parts
/// of. It is encoded once, where it is proposed, and decoded from that on every peer, once. Cheap to clone.
#[derive(Clone)]
pub struct Command {
    decoded: Arc<OnceLock<state::Command>>,
    encoded: Bytes,
}

impl PartialEq for Command {
    fn eq(&self, other: &Self) -> bool {
        self.encoded == other.encoded
    }
}

impl Eq for Command {}

impl Command {
    /// Encodes a command that is about to be proposed. Its values are parts of the message in which it came, and would keep all of
    /// that in memory for as long as the log's end has the command there: they are read anew.
    pub fn new(command: state::Command) -> Self {
        Self::decode(command.into_encoded()).expect("a build knows what it encodes")
    }

    /// Reads one from the log or the network.
    ///
    /// # Errors
    /// When the bytes are no command that this build knows.
    pub fn decode(encoded: Bytes) -> Result<Self, Invalid> {
        let decoded = state::Command::decode(encoded.clone())?;
        Ok(Self { decoded: Arc::new(OnceLock::from(decoded)), encoded })
    }

    /// One that is decoded when somebody wants to know what is to be done, if ever.
    pub fn unread(encoded: Bytes) -> Self {
        Self { decoded: Arc::default(), encoded }
    }

    /// What is to be done.
    ///
    /// # Errors
    /// When an [unread](Self::unread) one is no command that this build knows.
    pub fn command(&self) -> Result<&state::Command, Invalid> {
        if let Some(decoded) = self.decoded.get() {
            return Ok(decoded);
        }
        let decoded = state::Command::decode(self.encoded.clone())?;
        Ok(self.decoded.get_or_init(|| decoded))
    }

    /// The bytes that stand for it.
    pub fn encoded(&self) -> &Bytes {
        &self.encoded
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.command() {
            Ok(command) => command.fmt(f),
            Err(unknown) => write!(f, "a command that cannot be read: {unknown}"),
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use state::Action;
        match self.command().map(|command| &command.action) {
            Ok(Action::Txn(txn)) => {
                write!(f, "txn of {} compares, {} + {} operations", txn.when.len(), txn.then.len(), txn.otherwise.len())
            }
            Ok(other) => write!(f, "{other:?}"),
            Err(_) => fmt::Debug::fmt(self, f),
        }
    }
}

/// What applying an entry answers to whoever proposed it: nothing, for a blank or membership entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer(pub Option<Outcome>);

/// Where a command's answer goes. It holds what the command counts against for as long as the command is under way, also
/// when nobody waits for the answer any more.
pub struct Reply<T> {
    sender: oneshot::Sender<T>,
    _counted: Counted,
}

/// What a command in flight counts against.
pub type Counted = [Held; 2];

impl<T> Reply<T> {
    /// The reply, and where it arrives.
    pub fn new(counted: Counted) -> (Self, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self { sender, _counted: counted }, receiver)
    }
}

impl<T: OptionalSend + 'static> Responder<TypeConfig, T> for Reply<T> {
    fn on_complete(self, result: T) {
        // Whoever asked may have given up.
        let _ = self.sender.send(result);
    }
}

// openraft's `serde` feature, which the workspace enables, asks for these two; lake's own encodings are the .proto ones.
impl Serialize for Command {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.encoded)
    }
}

impl<'de> Deserialize<'de> for Command {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Vec::<u8>::deserialize(deserializer)?;
        Command::decode(bytes.into()).map_err(serde::de::Error::custom)
    }
}

impl Serialize for Answer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.clone().map(|outcome| v1::Outcome::from(outcome).encode_to_vec()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Answer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Some(bytes) = Option::<Vec<u8>>::deserialize(deserializer)? else { return Ok(Answer(None)) };
        let wire = v1::Outcome::decode(&bytes[..]).map_err(serde::de::Error::custom)?;
        Outcome::try_from(wire).map(|outcome| Answer(Some(outcome))).map_err(serde::de::Error::custom)
    }
}

/// A member of the cluster as the membership keeps it (semantics, section 9). The id is the key it stands under.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Where the other peers reach it; empty for a peer that has only ever run embedded.
    pub raft_address: String,
    /// Where clients reach it; empty as above.
    pub grpc_address: String,
    /// Random, made with the data directory.
    pub incarnation: String,
}

impl Member {
    /// The form that goes over the wire.
    pub fn to_wire(&self, id: u64) -> v1::Member {
        v1::Member {
            id,
            raft_address: self.raft_address.clone(),
            grpc_address: self.grpc_address.clone(),
            incarnation: self.incarnation.clone(),
        }
    }
}

impl From<v1::Member> for Member {
    fn from(m: v1::Member) -> Self {
        Member { raft_address: m.raft_address, grpc_address: m.grpc_address, incarnation: m.incarnation }
    }
}

/// The members of a membership, by id.
pub fn members(membership: &Membership) -> BTreeMap<u64, Member> {
    membership.nodes().map(|(id, member)| (*id, member.clone())).collect()
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Op, Txn};

    use super::*;

    #[test]
    fn a_command_keeps_nothing_of_the_message_in_which_it_came() {
        let message: Arc<[u8]> = vec![7; 1000].into();
        let put = |value: Bytes| {
            let txn = Txn { then: vec![Op::put("/kv/a", value)], ..Txn::default() };
            state::Action::Txn(txn).unstamped()
        };
        let proposed = Command::new(put(Bytes::from_owner(message.clone()).slice(10..13)));
        assert_eq!(Arc::strong_count(&message), 1);
        assert_eq!(proposed.command(), Ok(&put(Bytes::from_static(&[7; 3]))));
        assert_eq!(Command::decode(proposed.encoded().clone()), Ok(proposed));
    }
}
