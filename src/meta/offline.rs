//! `lake meta inspect`, `lake meta verify`: what a stopped peer's directory holds, and whether it is as it was written.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;
use lake_metasrv::raft::state_machine::Applied;
use lake_metasrv::raft::wire::vote_to_wire;
use lake_metasrv::rescue::Summary;
use lake_metasrv::rescue::reading::{self, Finding, Reading, Weight};
use serde_json::{Value, json};

use super::listing::{listing, listing_json, listing_table};
use super::output::{Format, escaped, print, print_json};
use super::summary::{hash, log_id, log_id_json, state_json};
use crate::columns::columns;

/// Options of `lake meta inspect`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  lake meta inspect --dir /data/lake --keys /lake/table/")]
pub struct Inspect {
    /// The data directory of a peer that is stopped
    #[arg(long, value_name = "PATH")]
    dir: PathBuf,
    /// Also the keys with this prefix, and their values
    #[arg(long, value_name = "PREFIX")]
    keys: Option<String>,
    /// How many keys at most
    #[arg(long, default_value_t = 1000, value_name = "N", requires = "keys")]
    limit: usize,
    /// How it is printed
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Options of `lake meta verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  lake meta verify --dir /data/lake")]
pub struct Verify {
    /// The data directory of a peer that is stopped
    #[arg(long, value_name = "PATH")]
    dir: PathBuf,
    /// How it is printed
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Prints what is in a directory.
///
/// # Errors
/// It is no peer's, in use, or cannot be read.
pub async fn inspect(args: Inspect) -> Result<u8> {
    let reading = reading::read(&args.dir, BTreeSet::new()).await?;
    let listing = args.keys.as_deref().map(|prefix| listing(&reading, prefix, args.limit));
    match args.format {
        Format::Table => {
            let keys = listing.map_or_else(String::new, |listing| format!("\n{}", listing_table(&listing)));
            print(&format!("{}{keys}", table(&reading)))?;
        }
        Format::Json => {
            let mut all = as_json(&reading);
            if let Some(listing) = listing {
                all["keys"] = listing_json(&listing);
                all["more_keys"] = listing.more.into();
            }
            print_json(&all)?;
        }
    }
    Ok(0)
}

/// Prints what is wrong with a directory; exit code 1 if anything is damaged.
///
/// # Errors
/// As [`inspect`].
pub async fn verify(args: Verify) -> Result<u8> {
    let reading = reading::read(&args.dir, BTreeSet::new()).await?;
    match args.format {
        Format::Table => {
            let log = reading.log.map_or("no log".to_owned(), |log| format!("{} log entries", log.entries));
            let mark = if reading.mark.is_some() { "the mark" } else { "no mark" };
            let whole = reading.snapshots.iter().filter(|snapshot| snapshot.hash.is_some()).count();
            let read = format!("read {log}, {whole} snapshots and {mark}");
            let verdict = if reading.is_damaged() { "damaged" } else { "whole" };
            let findings = findings_table(&reading.findings);
            print(&format!("{findings}{}: {verdict} ({read})\n", reading.dir.display()))?;
        }
        Format::Json => {
            let all = json!({
                "dir": reading.dir,
                "damaged": reading.is_damaged(),
                "log_entries": reading.log.map(|log| log.entries),
                "findings": findings_json(&reading.findings),
            });
            print_json(&all)?;
        }
    }
    Ok(u8::from(reading.is_damaged()))
}

/// One line for each finding.
pub fn findings_table(findings: &[Finding]) -> String {
    let line = |f: &Finding| format!("{}: {}: {}\n", weight(f.weight), f.file.display(), escaped(&f.what));
    findings.iter().map(line).collect()
}

/// The same as JSON.
pub fn findings_json(findings: &[Finding]) -> Value {
    let one = |f: &Finding| json!({ "weight": weight(f.weight), "file": f.file, "what": f.what });
    Value::Array(findings.iter().map(one).collect())
}

fn weight(weight: Weight) -> &'static str {
    match weight {
        Weight::Damage => "damage",
        Weight::Remark => "remark",
    }
}

fn table(reading: &Reading) -> String {
    let mark = reading.mark.as_ref();
    let unknown = || "unknown: the mark does not read".to_owned();
    let cluster = if reading.cluster_id.is_empty() { "none yet".to_owned() } else { escaped(&reading.cluster_id) };
    let vote = reading.vote().map_or_else(
        || "none".to_owned(),
        |vote| {
            let vote = vote_to_wire(&vote);
            let kind = if vote.committed { "follows" } else { "voted for" };
            format!("term {}, {kind} peer {}", vote.term, vote.node_id)
        },
    );
    let log = reading.log.map_or_else(
        || "it cannot be opened".to_owned(),
        |log| {
            let first = log.purged.map_or(0, |id| id.index + 1);
            let end = if log.whole { "" } else { ", then damage" };
            match log.entries {
                0 => format!("no entries behind index {}", first.saturating_sub(1)),
                n => format!("{n} entries, from index {first} to {}{end}", log_id(log.last)),
            }
        },
    );
    let facts = [
        ["directory", &reading.dir.display().to_string()],
        ["peer", &mark.map_or_else(unknown, |m| format!("{}, incarnation {}", m.peer_id, m.incarnation))],
        ["cluster", &cluster],
        ["vote", &vote],
        ["acknowledged to", &mark.map_or_else(unknown, |_| log_id(reading.acknowledged()))],
        ["purged to", &mark.map_or_else(unknown, |m| log_id(m.purged))],
        ["log", &log],
        ["log on disk", &format!("{} bytes", reading.log_bytes)],
    ];
    let mut text = columns(facts.map(|row| row.map(str::to_owned)).to_vec());
    if !reading.snapshots.is_empty() {
        let mut rows = vec![["SNAPSHOT", "BYTES", "HASH"].map(str::to_owned)];
        rows.extend(
            reading.snapshots.iter().map(|s| {
                [log_id(Some(s.covers)), s.bytes.to_string(), s.hash.map_or_else(|| "damaged".to_owned(), hash)]
            }),
        );
        text.push_str(&format!("\n{}", columns(rows)));
    }
    text.push_str(&format!("\n{}", states_table(reading)));
    if let Some(members) = reading.replayed.as_ref().map(members_table) {
        text.push_str(&format!("\n{members}"));
    }
    if !reading.findings.is_empty() {
        text.push_str(&format!("\n{}", findings_table(&reading.findings)));
    }
    text
}

/// What is certain, and what all of the log gives.
fn states_table(reading: &Reading) -> String {
    let header = ["STATE", "LOG", "REVISION", "KEYS", "BYTES", "LEASES", "SCOPES", "SESSIONS", "HASH"];
    let row = |name: &str, applied: &Option<Applied>| {
        let Some(s) = applied.as_ref().map(Summary::from) else {
            let mut row = ["-"; 9].map(str::to_owned);
            row[0] = name.to_owned();
            return row;
        };
        [
            name.to_owned(),
            log_id(s.last),
            s.revision.to_string(),
            s.keys.to_string(),
            s.bytes.to_string(),
            s.leases.to_string(),
            s.scopes.to_string(),
            s.sessions.to_string(),
            hash(s.hash),
        ]
    };
    let rows = vec![
        header.map(str::to_owned),
        row("certainly committed", &reading.committed),
        row("with all of the log", &reading.replayed),
    ];
    columns(rows)
}

fn members_table(applied: &Applied) -> String {
    let state = Summary::from(applied);
    let row = |role: &str, id: u64, m: &lake_metasrv::raft::types::Member| {
        let [clients, peers, incarnation] =
            [&m.grpc_address, &m.raft_address, &m.incarnation].map(|text| escaped(text));
        [id.to_string(), role.to_owned(), clients, peers, incarnation]
    };
    let mut rows = vec![["MEMBER", "ROLE", "CLIENTS", "PEERS", "INCARNATION"].map(str::to_owned)];
    rows.extend(state.voters.iter().map(|(id, m)| row("voter", *id, m)));
    rows.extend(state.learners.iter().map(|(id, m)| row("learner", *id, m)));
    columns(rows)
}

fn as_json(reading: &Reading) -> Value {
    let state = |applied: &Option<Applied>| applied.as_ref().map(|a| state_json(&Summary::from(a)));
    let mark = reading.mark.as_ref().map(|mark| {
        json!({
            "peer_id": mark.peer_id,
            "incarnation": mark.incarnation,
            "vote": mark.vote.as_ref().map(vote_to_wire).map(|vote| json!({
                "term": vote.term,
                "peer_id": vote.node_id,
                "committed": vote.committed,
            })),
            "synced": log_id_json(mark.last),
            "purged": log_id_json(mark.purged),
            "snapshot": log_id_json(mark.snapshot),
        })
    });
    let log = reading.log.map(|log| {
        json!({
            "purged": log_id_json(log.purged),
            "last": log_id_json(log.last),
            "entries": log.entries,
            "whole": log.whole,
        })
    });
    let snapshots = reading.snapshots.iter().map(|s| {
        json!({ "path": s.path, "covers": log_id_json(Some(s.covers)), "bytes": s.bytes, "hash": s.hash.map(hash) })
    });
    json!({
        "dir": reading.dir,
        "cluster_id": reading.cluster_id,
        "acknowledged": log_id_json(reading.acknowledged()),
        "mark": mark,
        "log": log,
        "log_disk_bytes": reading.log_bytes,
        "snapshots": Value::Array(snapshots.collect()),
        "committed": state(&reading.committed),
        "replayed": state(&reading.replayed),
        "damaged": reading.is_damaged(),
        "findings": findings_json(&reading.findings),
    })
}
