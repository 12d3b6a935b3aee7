//! Valid inputs of every fuzz target, by the project's own encoders: what fuzzing and mutating begin with.

use lake_metasrv::fuzzing;
use lake_metasrv::raft::types::{
    Command as LogCommand, Entry, Member, Membership, Payload, SnapshotMeta, StoredMembership, log_id,
};
use lake_metasrv::raft::wire::{entry_to_wire, snapshot_meta_to_wire};
use lake_metasrv::snapshot::SnapshotStore;
use lake_metasrv::state::State;
use lake_metasrv::state::command::{Action, Command};
use lake_proto::coordination::{ScopeOwner, Stamp};
use lake_proto::kv::{Compare, Expected, Op, Txn};
use lake_proto::v1;
use prost::Message;

/// Those of one target.
pub fn of(name: &str) -> Vec<Vec<u8>> {
    match name {
        "command" => commands().iter().map(|command| command.encode().to_vec()).collect(),
        "outcome" => outcomes(),
        "log_entry" => entries().iter().map(|entry| entry_to_wire(entry).encode_to_vec()).collect(),
        "log_values" => vec![log_values()],
        "journal" => vec![fuzzing::journal_half(&[&[b"one", b"two"], &[&[7; 5000]], &[b""]])],
        "mark" => vec![mark()],
        "snapshot" => vec![snapshot_file()],
        "snapshot_records" => vec![snapshot_records()],
        "append_request" => vec![append_request()],
        "snapshot_meta" => vec![snapshot_meta_to_wire(&snapshot_meta()).encode_to_vec()],
        "vote_request" => vec![vote_request()],
        "txn_request" => transactions().into_iter().map(|txn| txn_request(txn).encode_to_vec()).collect(),
        "pipeline_requests" => vec![pipeline_requests()],
        "watch_response" => vec![watch_response()],
        "page_token" => vec![b"\x010123456789abcdef//kv/a/1".to_vec(), "\x03ffffffffffffffff//kv/é/1".into()],
        other => panic!("no inputs for {other}"),
    }
}

fn commands() -> Vec<Command> {
    let owner = ScopeOwner::Lease(1);
    let txn = Txn {
        when: vec![Compare::lease_alive(1), Compare::scope_free("/a/b", Some(owner.clone()))],
        then: vec![
            Op::put_leased("/kv/a", "value", 1),
            Op::delete("/kv/b"),
            Op::List { prefix: "/kv/".into(), limit: 10 },
            Op::AcquireScope { path: "/a/b".into(), owner },
        ],
        otherwise: vec![Op::Get { key: "/kv/a".into() }],
    };
    let stamp = Stamp { session: 2, sequence: 1, lowest_unanswered: 1 };
    vec![
        Command { stamp: Some(stamp), proposed_unix_ms: 1_700_000_000_000, action: Action::Txn(txn) },
        Action::Txn(Txn::cas("/lake/table/a/b", Expected::Absent, "pointer")).unstamped(),
        Action::GrantLease { ttl_ms: 5_000, holder: "node 1".into() }.unstamped(),
        Action::ExpireLeases { leases: vec![1, 2, 3], term: 4 }.unstamped(),
        Action::OpenSession { ttl_ms: 60_000, holder: "a client".into() }.unstamped(),
        Action::CloseSession { session: 2 }.unstamped(),
        Action::SetQuota { prefix: "/kv/".into(), bytes: Some(1 << 20) }.unstamped(),
        Action::SetFeatureLevel { level: 2, term: 3 }.unstamped(),
    ]
}

fn transactions() -> Vec<Txn> {
    let txns = commands().into_iter().filter_map(|command| match command.action {
        Action::Txn(txn) => Some(txn),
        _ => None,
    });
    txns.collect()
}

fn txn_request(txn: Txn) -> v1::TxnRequest {
    v1::TxnRequest { txn: Some(txn.into()), stamp: None }
}

fn pipeline_requests() -> Vec<u8> {
    use v1::pipeline_request::Request;
    let get = v1::GetRequest { key: "/kv/a".into(), options: Some(v1::ReadOptions::default()) };
    let requests = transactions().into_iter().map(|txn| Request::Txn(txn_request(txn))).chain([Request::Get(get)]);
    let numbered = requests.enumerate();
    let numbered =
        numbered.map(|(id, request)| v1::PipelineRequest { id: id as u64, timeout_ms: 1_000, request: Some(request) });
    v1::PipelineRequests { requests: numbered.collect() }.encode_to_vec()
}

fn vote_request() -> Vec<u8> {
    let vote = v1::Vote { term: 3, node_id: 2, committed: false };
    let last_log_id = Some(v1::LogId { term: 2, node_id: 1, index: 7 });
    v1::VoteRequest { header: None, vote: Some(vote), last_log_id, leadership_transfer: false }.encode_to_vec()
}

fn watch_response() -> Vec<u8> {
    let entry = v1::KeyValue { key: "/kv/a".into(), value: "value".into(), mod_revision: 5, ..Default::default() };
    let event = |key: &str, entry| v1::Event { key: key.into(), entry };
    let events = vec![event("/kv/a", Some(entry)), event("/kv/b", None)];
    let header =
        Some(v1::ResponseHeader { cluster_id: "a cluster".into(), peer_id: 1, term: 2, revision: 5, membership: 7 });
    let changes = vec![v1::Change { revision: 5, events }];
    v1::WatchResponse { header, changes, progress_revision: 5 }.encode_to_vec()
}

/// A lease, a session, and what the commands do to them.
fn state() -> (State, Vec<Vec<u8>>) {
    let mut state = State::default();
    for action in [
        Action::GrantLease { ttl_ms: 5_000, holder: "node 1".into() },
        Action::OpenSession { ttl_ms: 60_000, holder: "a client".into() },
    ] {
        state.apply(1, &action.unstamped());
    }
    let outcomes = commands()[..2].iter().map(|c| v1::Outcome::from(state.apply(1, c)).encode_to_vec()).collect();
    (state, outcomes)
}

fn outcomes() -> Vec<Vec<u8>> {
    let (mut state, mut outcomes) = state();
    outcomes.extend(commands().iter().map(|c| v1::Outcome::from(state.apply(1, c)).encode_to_vec()));
    outcomes
}

fn membership() -> Membership {
    let member = |n: u64| Member {
        raft_address: format!("10.0.0.{n}:7001"),
        grpc_address: format!("10.0.0.{n}:7000"),
        incarnation: "ab".repeat(16),
    };
    let nodes: std::collections::BTreeMap<u64, Member> = (1..=4).map(|n| (n, member(n))).collect();
    Membership::new(vec![[1, 2, 3].into(), [1, 2, 4].into()], nodes).unwrap()
}

fn entries() -> Vec<Entry> {
    let mut payloads = vec![Payload::Membership(membership()), Payload::Blank];
    payloads.extend(commands().into_iter().map(|command| Payload::Normal(LogCommand::new(command))));
    payloads.into_iter().zip(7..).map(|(payload, index)| Entry { log_id: log_id(3, index), payload }).collect()
}

fn append_request() -> Vec<u8> {
    v1::AppendRequest {
        header: Some(v1::RaftHeader {
            cluster_id: "c".into(),
            from_id: 1,
            from_incarnation: "a".into(),
            to_id: 2,
            to_incarnation: "b".into(),
        }),
        vote: Some(v1::Vote { term: 3, node_id: 1, committed: true }),
        prev_log_id: Some(v1::LogId { term: 3, node_id: 0, index: 6 }),
        entries: entries().iter().map(entry_to_wire).collect(),
        leader_commit: Some(v1::LogId { term: 3, node_id: 0, index: 5 }),
    }
    .encode_to_vec()
}

fn snapshot_meta() -> SnapshotMeta {
    SnapshotMeta {
        last_log_id: Some(log_id(3, 700)),
        last_membership: StoredMembership::new(Some(log_id(3, 7)), membership()),
    }
}

fn snapshot_file() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(dir.path().to_owned()).unwrap();
    std::fs::read(store.write(&snapshot_meta(), "c", &state().0).unwrap().path).unwrap()
}

/// Behind the twelve bytes it begins with, a file's records have eight bytes of frame: here it is two.
fn snapshot_records() -> Vec<u8> {
    let file = snapshot_file();
    let (mut rest, mut out) = (&file[12..], Vec::new());
    while let Some((len, after)) = rest.split_first_chunk::<4>() {
        let len = u32::from_be_bytes(*len) as usize;
        out.extend_from_slice(&(len as u16).to_be_bytes());
        out.extend_from_slice(&after[4..4 + len]);
        rest = &after[4 + len..];
    }
    out
}

/// Kinds and frames as `log/sled_log.rs` describes them: one packed value of two entries.
fn log_values() -> Vec<u8> {
    let frame = |index: u64, len: usize, payload: &[u8]| {
        let mut out = (len as u32).to_be_bytes().to_vec();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&index.to_be_bytes());
        out.extend_from_slice(&3u64.to_be_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(payload);
        out
    };
    let mut packed = vec![1];
    packed.extend(frame(5, 10, &[7; 10]));
    packed.extend(frame(6, 0, &[]));
    let mut out = Vec::new();
    let key = 5u64.to_be_bytes().to_vec();
    out.push(key.len() as u8);
    out.extend(key);
    out.extend((packed.len() as u16).to_be_bytes());
    out.extend(packed);
    out
}

fn mark() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mark");
    let mark = lake_metasrv::log::mark::Mark {
        cluster_id: "c".into(),
        peer_id: 3,
        incarnation: "ab".repeat(16),
        last: Some(log_id(3, 700)),
        purged: Some(log_id(2, 500)),
        ..Default::default()
    };
    lake_metasrv::log::mark::MarkFile::create(&path, mark).unwrap();
    std::fs::read(path).unwrap()
}
