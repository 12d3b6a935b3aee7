//! What a fuzzer calls: every decoder of bytes that come from the disk or the network, as functions of bytes.
//!
//! Each must come back whatever it is given, and hold memory in proportion to it; what decodes must encode to something
//! that decodes to the same. Where a checksum would turn almost every input away, the checksum is made right first, so
//! that what lies behind it is reached too: a checksum finds damage, and says nothing of a defect on the other side.
//!
//! `metasrv/fuzz/run.sh` fuzzes them; `metasrv/tests/alone/mutations.rs` runs the same functions on a fixed number of
//! mutated inputs as an ordinary test.

use std::path::Path;

use bytes::Bytes;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::watch::Changes;
use prost::Message;

use crate::log::{journal, mark, sled_log};
use crate::peer::pages;
use crate::raft::state_machine::Applied;
use crate::raft::wire::{
    append_request_from_wire, entry_from_wire, entry_to_wire, log_id_from_wire, membership_from_wire,
    membership_to_wire, required_vote, snapshot_meta_from_wire, snapshot_meta_to_wire,
};
use crate::snapshot;
use crate::state::command::{Action, Command, Outcome};
use crate::state::{FEATURE_LEVEL, State};

/// A function of a fuzzer, by its name.
pub type Target = (&'static str, fn(&[u8]) -> bool);

/// All of them. Each tells whether the bytes meant something.
pub const TARGETS: [Target; 15] = [
    ("log_entry", log_entry),
    ("log_values", log_values),
    ("journal", journal),
    ("mark", mark),
    ("snapshot", snapshot),
    ("snapshot_records", snapshot_records),
    ("append_request", append_request),
    ("snapshot_meta", snapshot_meta),
    ("command", command),
    ("outcome", outcome),
    ("vote_request", vote_request),
    ("txn_request", txn_request),
    ("pipeline_requests", pipeline_requests),
    ("watch_response", watch_response),
    ("page_token", page_token),
];

/// The payload of a log entry.
pub fn log_entry(bytes: &[u8]) -> bool {
    let Ok(wire) = v1::LogEntry::decode(bytes) else { return false };
    let Ok(entry) = entry_from_wire(wire) else { return false };
    let again = v1::LogEntry::decode(&entry_to_wire(&entry).encode_to_vec()[..]).expect("what was encoded");
    assert_eq!(entry_from_wire(again).as_ref(), Ok(&entry));
    true
}

/// The values of a log in their order: each is the length of its key, the key, two bytes of length, and the value. The
/// checksums of packed frames are made right.
pub fn log_values(bytes: &[u8]) -> bool {
    let mut values = Vec::new();
    let mut rest = bytes;
    while let Some((key_len, after)) = rest.split_first() {
        let Some((key, after)) = after.split_at_checked(usize::from(*key_len)) else { break };
        let Some((len, after)) = after.split_first_chunk::<2>() else { break };
        let value = &after[..after.len().min(usize::from(u16::from_be_bytes(*len)))];
        let mut value_fixed = value.to_owned();
        sled_log::fix_checksums(&mut value_fixed);
        values.push((key.to_owned(), value_fixed));
        rest = &after[value.len()..];
    }
    sled_log::decode_values(&values).is_ok_and(|frames| {
        assert!(frames.iter().map(|f| f.payload.len()).sum::<usize>() <= bytes.len());
        !frames.is_empty()
    })
}

/// A half of the journal; the other one is the same. The checksums of records are made right.
pub fn journal(bytes: &[u8]) -> bool {
    journal::read_half(bytes).is_ok_and(|frames| {
        assert!(frames.iter().map(|f| f.payload.len()).sum::<usize>() <= bytes.len());
        !frames.is_empty()
    })
}

/// A half of a journal with records of entries with these payloads.
pub fn journal_half(records: &[&[&[u8]]]) -> Vec<u8> {
    journal::write_half(records)
}

/// The file of the mark, as it is and with its checksums made right.
pub fn mark(bytes: &[u8]) -> bool {
    let mut file = bytes.to_owned();
    let as_it_is = mark::decode_file(&file).is_some();
    for slot in file.chunks_exact_mut(mark::SLOT_BYTES) {
        mark::fix_checksum(slot);
    }
    mark::decode_file(&file).is_some() || as_it_is
}

/// The file of a snapshot, as it is.
pub fn snapshot(bytes: &[u8]) -> bool {
    snapshot::read_from(bytes, Path::new("fuzzed"), FEATURE_LEVEL).is_ok()
}

/// The records of a snapshot, each behind two bytes of length; framed, and with the state's hash made right.
pub fn snapshot_records(bytes: &[u8]) -> bool {
    let mut records = Vec::new();
    let mut rest = bytes;
    while let Some((len, after)) = rest.split_first_chunk::<2>() {
        let (record, after) = after.split_at(after.len().min(usize::from(u16::from_be_bytes(*len))));
        records.push(record);
        rest = after;
    }
    let Ok(loaded) = snapshot::read_records(&records) else { return false };
    // Nothing that was accepted makes the state stumble later.
    let mut state = loaded.state;
    for (id, _) in state.clone().lease_ttls(0) {
        state.apply(1, &Action::RevokeLease { lease: id }.unstamped());
    }
    for (id, _) in state.clone().session_ttls(0) {
        state.apply(1, &Action::CloseSession { session: id }.unstamped());
    }
    assert_eq!((state.counts().0, state.counts().2), (0, 0));
    true
}

/// What a leader sends.
pub fn append_request(bytes: &[u8]) -> bool {
    v1::AppendRequest::decode(bytes).is_ok_and(|wire| append_request_from_wire(wire).is_ok())
}

/// What a snapshot says that it covers, with the membership.
pub fn snapshot_meta(bytes: &[u8]) -> bool {
    let Ok(wire) = v1::SnapshotMeta::decode(bytes) else { return false };
    let Ok(meta) = snapshot_meta_from_wire(wire) else { return false };
    assert_eq!(snapshot_meta_from_wire(snapshot_meta_to_wire(&meta)).as_ref(), Ok(&meta));
    let membership = meta.last_membership.membership();
    assert_eq!(membership_from_wire(membership_to_wire(membership)).as_ref(), Ok(membership));
    true
}

/// A command of the log; if a peer would propose it, it is applied.
pub fn command(bytes: &[u8]) -> bool {
    let Ok(command) = Command::decode(Bytes::copy_from_slice(bytes)) else { return false };
    assert_eq!(Command::decode(command.encode()).as_ref(), Ok(&command));
    let valid = match &command.action {
        Action::Txn(txn) => txn.validate().is_ok(),
        _ => true,
    };
    if valid && command.stamp.is_none_or(|stamp| stamp.validate().is_ok()) {
        let mut state = State::default();
        for action in [
            Action::GrantLease { ttl_ms: 1000, holder: String::new() },
            Action::OpenSession { ttl_ms: 5000, holder: String::new() },
        ] {
            state.apply(1, &action.unstamped());
        }
        let first = state.apply(1, &command);
        outcome(&v1::Outcome::from(first).encode_to_vec());
        state.apply(2, &command);
    }
    true
}

/// What a command did, as sessions and snapshots keep it.
pub fn outcome(bytes: &[u8]) -> bool {
    let Ok(wire) = v1::Outcome::decode(bytes) else { return false };
    let Ok(outcome) = Outcome::try_from(wire) else { return false };
    let again = v1::Outcome::decode(&v1::Outcome::from(outcome.clone()).encode_to_vec()[..]).expect("what was encoded");
    assert_eq!(Outcome::try_from(again).as_ref(), Ok(&outcome));
    true
}

/// What a candidate asks.
pub fn vote_request(bytes: &[u8]) -> bool {
    v1::VoteRequest::decode(bytes).is_ok_and(|wire| {
        let _ = wire.last_log_id.map(log_id_from_wire);
        required_vote(wire.vote).is_ok()
    })
}

/// A client's transaction; if a peer would propose it, it is run.
pub fn txn_request(bytes: &[u8]) -> bool {
    v1::TxnRequest::decode(bytes).is_ok_and(|wire| wire.txn.is_some_and(transaction))
}

fn transaction(wire: v1::Txn) -> bool {
    let Ok(txn) = Txn::try_from(wire) else { return false };
    assert_eq!(Txn::try_from(v1::Txn::from(txn.clone())).as_ref(), Ok(&txn));
    if txn.validate().is_ok() {
        State::default().apply(1, &Action::Txn(txn).unstamped());
    }
    true
}

/// A client's requests on one stream.
pub fn pipeline_requests(bytes: &[u8]) -> bool {
    use v1::pipeline_request::Request;
    let Ok(wire) = v1::PipelineRequests::decode(bytes) else { return false };
    let understood = wire.requests.into_iter().filter(|request| match &request.request {
        Some(Request::Txn(request)) => request.txn.clone().is_some_and(transaction),
        Some(_) => true,
        None => false,
    });
    understood.count() > 0
}

/// What a watcher is told, as its client reads it.
pub fn watch_response(bytes: &[u8]) -> bool {
    v1::WatchResponse::decode(bytes).is_ok_and(|wire| Changes::try_from(wire).is_ok())
}

/// A client's token of a later page, behind a byte that says of which listing it is to be. The listing is held under whatever id
/// the token has.
pub fn page_token(bytes: &[u8]) -> bool {
    const PREFIXES: [&str; 4] = ["", "/kv/", "/kv/a", "/kv/é/"];
    let Some((prefix, token)) = bytes.split_first() else { return false };
    let Ok(token) = std::str::from_utf8(token) else { return false };
    let prefix = PREFIXES[usize::from(*prefix) % PREFIXES.len()];
    let mut applied = Applied::default();
    let then = ["a", "a/1", "a/2", "b", "é", "é/1", "é/2"].map(|key| Op::put(format!("/kv/{key}"), "value")).to_vec();
    applied.state.apply(1, &Action::Txn(Txn { then, ..Txn::default() }).unstamped());
    let Ok(page) = pages::follow(token, prefix, 2, applied.clone()) else { return false };
    let after = token.split_once('/').map_or("", |(_, after)| after);
    let mut keys = vec![after];
    keys.extend(page.entries.iter().map(|entry| entry.key.as_str()));
    assert!(keys.is_sorted_by(|one, next| one < next) && keys.iter().all(|key| key.starts_with(prefix)));
    if let Some(next) = &page.next {
        let next = pages::follow(next, prefix, 2, applied).expect("what was given");
        assert!(next.entries.iter().all(|entry| entry.key.as_str() > keys[keys.len() - 1]));
    }
    true
}
