//! Raft's vocabulary to and from `lake/v1/raft.proto`: the same bytes go over the network and onto the disk.
//!
//! Decoding never panics: what does not make sense is [`Invalid`], which a service turns into InvalidArgument and the
//! log into "damaged".

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use lake_proto::kv::Invalid;
use lake_proto::v1;
use openraft::raft::AppendEntriesRequest;
use openraft::vote::RaftLeaderId;

use super::types::{
    Command, Entry, LogId, Member, Membership, Payload, SnapshotMeta, StoredMembership, TypeConfig, Vote, log_id,
};

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
        last_log_id: wire.last_log_id.map(possible_log_id).transpose()?,
        last_membership: stored_membership_from_wire(
            wire.membership.ok_or(Invalid::Missing("snapshot's membership"))?,
        )?,
    })
}

/// Far beyond any index a log can reach: what counts on from here cannot overflow.
const MAX_INDEX: u64 = 1 << 62;

/// A log id that a log can have.
fn possible_log_id(id: v1::LogId) -> Result<LogId, Invalid> {
    if id.index > MAX_INDEX { Err(Invalid::Missing("log id, within bounds")) } else { Ok(log_id_from_wire(id)) }
}

/// What a leader asks its followers to append.
///
/// # Errors
/// When something is missing, or the entries do not follow one upon the other and upon the one before them.
pub fn append_request_from_wire(wire: v1::AppendRequest) -> Result<AppendEntriesRequest<TypeConfig>, Invalid> {
    let prev_log_id = wire.prev_log_id.map(possible_log_id).transpose()?;
    let entries: Vec<Entry> = wire.entries.into_iter().map(entry_from_wire).collect::<Result<_, _>>()?;
    // Before the very first entry there is nothing, and the log may begin at any index.
    let mut before = prev_log_id;
    for entry in &entries {
        if before.is_some_and(|before| entry.log_id.index != before.index + 1 || entry.log_id < before) {
            return Err(Invalid::Missing("entries, in order"));
        }
        before = Some(entry.log_id);
    }
    Ok(AppendEntriesRequest {
        vote: required_vote(wire.vote)?,
        prev_log_id,
        entries,
        leader_commit: wire.leader_commit.map(possible_log_id).transpose()?,
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

/// What is said of an entry that this build does not know, wherever it comes from; `None` for every other error. A peer
/// that meets one stops: it must not be skipped (semantics, section 1).
pub fn unknown_entry(error: &Invalid) -> Option<String> {
    let Invalid::UnknownCommand { index, what } = error else { return None };
    Some(format!(
        "log entry {index} holds a command that this build ({}) cannot read ({what}): start this peer with the build that \
         the leader runs; its data stays as it is",
        env!("CARGO_PKG_VERSION")
    ))
}

/// The other way.
pub fn entry_from_wire(wire: v1::LogEntry) -> Result<Entry, Invalid> {
    entry_with(wire, Command::decode)
}

/// The same, its command left unread: for who looks for something else.
pub fn unread_entry_from_wire(wire: v1::LogEntry) -> Result<Entry, Invalid> {
    entry_with(wire, |command| Ok(Command::unread(command)))
}

/// An entry's command could not be read.
pub fn unknown_command(index: u64, error: &Invalid) -> Invalid {
    Invalid::UnknownCommand { index, what: error.to_string() }
}

fn entry_with(wire: v1::LogEntry, command: impl FnOnce(Bytes) -> Result<Command, Invalid>) -> Result<Entry, Invalid> {
    use v1::log_entry::Payload as Wire;
    let log_id = possible_log_id(wire.log_id.ok_or(Invalid::Missing("log id"))?)?;
    let payload = match wire.payload.ok_or(Invalid::Missing("log entry's payload"))? {
        Wire::Blank(_) => Payload::Blank,
        Wire::Command(encoded) => Payload::Normal(command(encoded).map_err(|e| unknown_command(log_id.index, &e))?),
        // Without voters everyone would be a quorum.
        Wire::Membership(membership) if membership.configs.is_empty() => {
            return Err(Invalid::Missing("membership's voters"));
        }
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
        let empty = v1::log_entry::Payload::Membership(v1::Membership::default());
        let log_id_at = |index| Some(log_id_to_wire(log_id(1, index)));
        assert!(entry_from_wire(v1::LogEntry { log_id: log_id_at(1), payload: Some(empty) }).is_err());
        let blank =
            |index| v1::LogEntry { log_id: log_id_at(index), payload: Some(v1::log_entry::Payload::Blank(true)) };
        assert!(entry_from_wire(blank(u64::MAX)).is_err(), "nothing can follow it");
        let append = |prev, entries: &[u64]| {
            append_request_from_wire(v1::AppendRequest {
                vote: Some(v1::Vote::default()),
                prev_log_id: prev,
                entries: entries.iter().map(|index| blank(*index)).collect(),
                ..v1::AppendRequest::default()
            })
        };
        assert!(append(log_id_at(3), &[4, 5]).is_ok() && append(None, &[0, 1]).is_ok());
        assert!(append(log_id_at(3), &[5]).is_err() && append(None, &[1, 3]).is_err());
        for vote in [Vote::new(3, 1), Vote::new_committed(3, 1)] {
            assert_eq!(vote_from_wire(vote_to_wire(&vote)), vote);
        }
    }
}
