//! Raft's vocabulary to and from `lake/v1/raft.proto`: the same bytes go over the network and onto the disk.
//!
//! Decoding never panics: what does not make sense is [`Invalid`], which a service turns into InvalidArgument and the
//! log into "damaged".

use std::collections::{BTreeMap, BTreeSet};

use lake_proto::kv::Invalid;
use lake_proto::v1;
use openraft::vote::RaftLeaderId;

use super::types::{Command, Entry, LogId, Member, Membership, Payload, SnapshotMeta, StoredMembership, Vote, log_id};

/// A log id as it is sent and kept.
pub fn log_id_to_wire(id: LogId) -> v1::LogId {
    v1::LogId { term: id.leader_id.term, node_id: 0, index: id.index }
}

/// The other way.
pub fn log_id_from_wire(id: v1::LogId) -> LogId {
    log_id(id.term, id.index)
}

/// A vote as it is sent and kept.
pub fn vote_to_wire(vote: &Vote) -> v1::Vote {
    v1::Vote { term: vote.leader_id.term, node_id: *vote.leader_id.node_id(), committed: vote.committed }
}

/// The other way.
pub fn vote_from_wire(vote: v1::Vote) -> Vote {
    if vote.committed { Vote::new_committed(vote.term, vote.node_id) } else { Vote::new(vote.term, vote.node_id) }
}

/// A vote that must be there.
pub fn required_vote(vote: Option<v1::Vote>) -> Result<Vote, Invalid> {
    vote.map(vote_from_wire).ok_or(Invalid::Missing("vote"))
}

/// A membership as it is sent and kept.
pub fn membership_to_wire(membership: &Membership) -> v1::Membership {
    v1::Membership {
        configs: membership
            .get_joint_config()
            .iter()
            .map(|voters| v1::membership::Config { voters: voters.iter().copied().collect() })
            .collect(),
        nodes: membership.nodes().map(|(id, member)| member.to_wire(*id)).collect(),
    }
}

/// The other way.
pub fn membership_from_wire(wire: v1::Membership) -> Result<Membership, Invalid> {
    let configs: Vec<BTreeSet<u64>> = wire.configs.into_iter().map(|c| c.voters.into_iter().collect()).collect();
    let nodes: BTreeMap<u64, Member> = wire.nodes.into_iter().map(|m| (m.id, Member::from(m))).collect();
    Membership::new(configs, nodes).map_err(|_| Invalid::Missing("membership's voters, or the nodes of some"))
}

/// A membership with its log id, as a snapshot keeps it.
pub fn stored_membership_to_wire(stored: &StoredMembership) -> v1::StoredMembership {
    v1::StoredMembership {
        log_id: stored.log_id().map(log_id_to_wire),
        membership: Some(membership_to_wire(stored.membership())),
    }
}

/// The other way.
pub fn stored_membership_from_wire(wire: v1::StoredMembership) -> Result<StoredMembership, Invalid> {
    let membership = membership_from_wire(wire.membership.ok_or(Invalid::Missing("membership"))?)?;
    Ok(StoredMembership::new(wire.log_id.map(log_id_from_wire), membership))
}

/// What a snapshot covers, as it is sent and kept.
pub fn snapshot_meta_to_wire(meta: &SnapshotMeta) -> v1::SnapshotMeta {
    v1::SnapshotMeta {
        last_log_id: meta.last_log_id.map(log_id_to_wire),
        membership: Some(stored_membership_to_wire(&meta.last_membership)),
        snapshot_id: String::new(),
    }
}

/// The other way.
pub fn snapshot_meta_from_wire(wire: v1::SnapshotMeta) -> Result<SnapshotMeta, Invalid> {
    Ok(SnapshotMeta {
        last_log_id: wire.last_log_id.map(log_id_from_wire),
        last_membership: stored_membership_from_wire(
            wire.membership.ok_or(Invalid::Missing("snapshot's membership"))?,
        )?,
    })
}

/// A log entry as it is sent and kept.
pub fn entry_to_wire(entry: &Entry) -> v1::LogEntry {
    use v1::log_entry::Payload as Wire;
    let payload = match &entry.payload {
        Payload::Blank => Wire::Blank(true),
        Payload::Normal(command) => Wire::Command(command.encoded().clone()),
        Payload::Membership(membership) => Wire::Membership(membership_to_wire(membership)),
    };
    v1::LogEntry { log_id: Some(log_id_to_wire(entry.log_id)), payload: Some(payload) }
}

/// The other way.
pub fn entry_from_wire(wire: v1::LogEntry) -> Result<Entry, Invalid> {
    use v1::log_entry::Payload as Wire;
    let log_id = log_id_from_wire(wire.log_id.ok_or(Invalid::Missing("log id"))?);
    let payload = match wire.payload.ok_or(Invalid::Missing("log entry's payload"))? {
        Wire::Blank(_) => Payload::Blank,
        Wire::Command(command) => Payload::Normal(Command::decode(command)?),
        Wire::Membership(membership) => Payload::Membership(membership_from_wire(membership)?),
    };
    Ok(Entry { log_id, payload })
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Op, Txn};

    use super::*;
    use crate::state::command::Action;

    #[test]
    fn entries_survive_the_wire() {
        let member = Member { raft_address: "a:1".into(), grpc_address: "a:2".into(), incarnation: "f".repeat(32) };
        let membership =
            Membership::new(vec![BTreeSet::from([1, 2])], BTreeMap::from([(1, member.clone()), (2, member)])).unwrap();
        let txn = Txn { then: vec![Op::put("/kv/a", "1")], ..Txn::default() };
        for payload in [
            Payload::Blank,
            Payload::Membership(membership),
            Payload::Normal(Command::new(Action::Txn(txn).unstamped())),
        ] {
            let entry = Entry { log_id: log_id(3, 7), payload };
            assert_eq!(entry_from_wire(entry_to_wire(&entry)).unwrap(), entry);
        }
        assert!(entry_from_wire(v1::LogEntry::default()).is_err());
        for vote in [Vote::new(3, 1), Vote::new_committed(3, 1)] {
            assert_eq!(vote_from_wire(vote_to_wire(&vote)), vote);
        }
    }
}
