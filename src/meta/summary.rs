//! What is told of a state, a log id, a value: for people and as JSON.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use lake_metasrv::raft::types::{LogId, Member};
use lake_metasrv::rescue::Summary;
use serde_json::{Value, json};

/// A value longer than this is cut in a table.
const SHOWN_BYTES: usize = 64;

/// Prints to standard output. Whoever reads it may have seen enough before the end.
///
/// # Errors
/// It cannot be written for other reasons.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e).context("writing to standard output"),
        _ => Ok(()),
    }
}

/// Prints JSON to standard output, as [`print`] does.
///
/// # Errors
/// As [`print`].
pub fn print_json(value: &Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}

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

/// A value on one line: as text if it is that, else its bytes in hexadecimal; the beginning of a long one.
pub fn value(bytes: &[u8]) -> String {
    let text = std::str::from_utf8(bytes).ok().filter(|text| !text.chars().any(char::is_control));
    let (whole, shown) = match text {
        Some(text) => (text.len() <= SHOWN_BYTES, text.chars().take(SHOWN_BYTES).collect()),
        None => {
            (bytes.len() <= SHOWN_BYTES / 2, format!("0x{}", hexadecimal(&bytes[..bytes.len().min(SHOWN_BYTES / 2)])))
        }
    };
    if whole { shown } else { format!("{shown}... ({} bytes)", bytes.len()) }
}

/// A value, whole: `value` if it is text, else `value_hex`.
pub fn value_json(bytes: &[u8]) -> (&'static str, String) {
    match std::str::from_utf8(bytes) {
        Ok(text) => ("value", text.to_owned()),
        Err(_) => ("value_hex", hexadecimal(bytes)),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_as_what_they_are() {
        assert_eq!(value(b"plain"), "plain");
        assert_eq!(value("größe".as_bytes()), "größe");
        assert_eq!(value(b"two\nlines"), "0x74776f0a6c696e6573");
        assert_eq!(value(&[0xff, 0]), "0xff00");
        let long = value(&[b'a'; 1000]);
        assert!(long.ends_with("... (1000 bytes)") && long.len() < 100, "{long}");
        assert_eq!(value_json(b"two\nlines"), ("value", "two\nlines".to_owned()));
        assert_eq!(value_json(&[0xff]), ("value_hex", "ff".to_owned()));
    }
}
