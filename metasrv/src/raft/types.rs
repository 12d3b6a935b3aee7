//! What openraft is told about lake: the types that make up its log, votes and members.
//!
//! Leader ids are the standard kind: at most one leader per term, so that "who leads in term T" has one answer and the
//! compare on the entry's term (semantics, section 2) stops a deposed leader.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use lake_proto::kv::{Txn, TxnResult};
use lake_proto::v1;
use openraft::impls::leader_id_std;
use openraft::vote::leader_id_std::CommittedLeaderId;
use prost::Message;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

openraft::declare_raft_types!(
    /// lake's instantiation of openraft.
    pub TypeConfig:
        D = Command,
        R = Outcome,
        NodeId = u64,
        Node = Member,
        LeaderId = leader_id_std::LeaderId<u64, u64>,
);

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

/// What the log replicates. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Txn(Arc<Txn>),
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Command::Txn(txn) => {
                write!(f, "txn of {} compares, {} + {} operations", txn.when.len(), txn.then.len(), txn.otherwise.len())
            }
        }
    }
}

/// What applying an entry answers to whoever proposed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A blank or membership entry.
    Nothing,
    Txn(TxnResult),
}

// openraft's `serde` feature, which the workspace enables, asks for these two; lake's own encodings are the .proto ones.
impl Serialize for Command {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&v1::Command::from(self).encode_to_vec())
    }
}

impl<'de> Deserialize<'de> for Command {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Vec::<u8>::deserialize(deserializer)?;
        let wire = v1::Command::decode(&bytes[..]).map_err(serde::de::Error::custom)?;
        Command::try_from(wire).map_err(serde::de::Error::custom)
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let wire = match self {
            Outcome::Nothing => None,
            Outcome::Txn(result) => Some(result.clone().into_response(v1::ResponseHeader::default()).encode_to_vec()),
        };
        wire.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Outcome {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Some(bytes) = Option::<Vec<u8>>::deserialize(deserializer)? else { return Ok(Outcome::Nothing) };
        let wire = v1::TxnResponse::decode(&bytes[..]).map_err(serde::de::Error::custom)?;
        TxnResult::try_from(wire).map(Outcome::Txn).map_err(serde::de::Error::custom)
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
