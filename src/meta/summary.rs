//! What is told of a state and of a log id: for people and as JSON.

use lake_metasrv::raft::types::{LogId, Member};
use lake_metasrv::rescue::Summary;
use serde_json::{Value, json};

/// `index 7 of term 2`.
pub fn log_id(id: Option<LogId>) -> String {
    lake_metasrv::rescue::reading::shown(id)
}

/// A log id, or null.
pub fn log_id_json(id: Option<LogId>) -> Value {
    id.map_or(Value::Null, |id| json!({ "term": id.leader_id.term, "index": id.index }))
}

/// A hash as everything that shows one shows it.
pub fn hash(hash: u128) -> String {
    format!("{hash:032x}")
}

/// Name and value of everything told of a state.
pub fn rows(state: &Summary) -> Vec<[String; 2]> {
    let voters: Vec<String> = state.voters.iter().map(|(id, _)| id.to_string()).collect();
    let learners: Vec<String> = state.learners.iter().map(|(id, _)| id.to_string()).collect();
    let members = match learners.is_empty() {
        true => format!("voters {}", voters.join(", ")),
        false => format!("voters {}, learners {}", voters.join(", "), learners.join(", ")),
    };
    [
        ["revision", &state.revision.to_string()],
        ["log", &log_id(state.last)],
        ["keys", &state.keys.to_string()],
        ["bytes", &state.bytes.to_string()],
        ["leases", &state.leases.to_string()],
        ["scopes", &state.scopes.to_string()],
        ["sessions", &state.sessions.to_string()],
        ["members", &members],
        ["feature level", &state.feature_level.to_string()],
        ["watch from", &state.oldest_watch.to_string()],
        ["hash", &hash(state.hash)],
    ]
    .map(|row| row.map(str::to_owned))
    .to_vec()
}

/// The same as JSON.
pub fn state_json(state: &Summary) -> Value {
    let members = |members: &[(u64, Member)]| {
        let member = |(id, m): &(u64, Member)| {
            json!({
                "id": id,
                "grpc_address": m.grpc_address,
                "raft_address": m.raft_address,
                "incarnation": m.incarnation,
            })
        };
        Value::Array(members.iter().map(member).collect())
    };
    json!({
        "revision": state.revision,
        "last_log_id": log_id_json(state.last),
        "keys": state.keys,
        "bytes": state.bytes,
        "leases": state.leases,
        "scopes": state.scopes,
        "sessions": state.sessions,
        "voters": members(&state.voters),
        "learners": members(&state.learners),
        "feature_level": state.feature_level,
        "oldest_watch": state.oldest_watch,
        "hash": hash(state.hash),
    })
}
