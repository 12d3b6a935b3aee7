//! `lake meta status`: what each peer knows, side by side, and what is wrong with it.
//!
//! Every peer is asked, those given and those that they name; none of the answers waits for a quorum. [`problems`] is what an
//! operator would look for in them: a pure function, so that each kind can be shown in a test.

use anyhow::Result;
use lake_proto::v1::status_response::Stage;
use lake_proto::v1::{Progress, StateHashAt, StatusResponse};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::output::{FormatArgs, escaped, size};
use super::peers::{Answer, ask_all, leader, role, statuses};
use super::{EXIT_FAILED, EXIT_NO};
use crate::columns::columns;

/// Entries that a member may lack before it is said.
const LAG_ENTRIES: u64 = 1_000;
/// Digits of a hash that a table shows.
const HASH_DIGITS: usize = 8;

/// Options of `lake meta status`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: 0 all is well, 1 no peer leads, 3 one leads and something is wrong (each problem has a line).

Examples:
  lake meta status
  lake meta status --at 10.0.0.1:9191 --format json | jq '.problems[]'")]
pub struct Args {
    #[command(flatten)]
    format: FormatArgs,
}

/// Asks, and prints what came.
///
/// # Errors
/// No endpoint is known.
pub async fn run(cluster: &Cluster, args: Args) -> Result<u8> {
    let answers = ask_all(cluster.endpoints()?, cluster.secret()?.as_ref()).await;
    let leader = leader(&answers);
    let problems = problems(&answers, leader.as_ref());
    args.format
        .print(|| text(&answers, leader.as_ref(), &problems), || as_json(&answers, leader.as_ref(), &problems))?;
    Ok(match (leader, problems.is_empty()) {
        (None, _) => EXIT_FAILED,
        (Some(_), false) => EXIT_NO,
        (Some(_), true) => 0,
    })
}

fn id(status: &StatusResponse) -> Option<u64> {
    status.self_.as_ref().map(|m| m.id)
}

/// The peer behind an answer, or the member that is known under an address where nobody answers.
fn peer(answer: &Answer, leader: Option<&StatusResponse>) -> Option<u64> {
    let members = || leader.into_iter().flat_map(|leader| leader.voters.iter().chain(&leader.learners));
    answer.id().or_else(|| members().find(|member| member.grpc_address == answer.endpoint).map(|member| member.id))
}

/// How many entries of the leader's log a peer lacks.
fn lag(peer: Option<u64>, leader: Option<&StatusResponse>) -> Option<u64> {
    let leader = leader?;
    if peer == id(leader) {
        return Some(0);
    }
    leader.progress.iter().find(|progress| Some(progress.id) == peer).and_then(known_lag)
}

/// How many entries a member lacks; `None` where the leader has not heard since it leads.
pub(super) fn known_lag(progress: &Progress) -> Option<u64> {
    (!progress.unheard).then_some(progress.lag_entries)
}

// ---- what is wrong --------------------------------------------------------------------------------------------

/// What an operator has to know, a line each.
fn problems(answers: &[Answer], leader: Option<&StatusResponse>) -> Vec<String> {
    let mut problems = Vec::new();
    if leader.is_none() {
        problems.push("no peer leads: nothing can be written, or read linearizably".to_owned());
    }
    let mut clusters: Vec<&str> =
        statuses(answers).map(|s| s.cluster_id.as_str()).filter(|id| !id.is_empty()).collect();
    clusters.sort_unstable();
    clusters.dedup();
    if clusters.len() > 1 {
        problems.push(format!("the peers belong to different clusters ({}): correct --at", clusters.join(", ")));
    }
    for answer in answers {
        match &answer.status {
            Err(why) => problems.push(why.clone()),
            Ok(status) => problems.extend(of_peer(status)),
        }
    }
    problems.extend(disagreements(answers));
    if let Some(leader) = leader {
        problems.extend(of_cluster(leader));
    }
    problems
}

/// What a peer says of itself.
fn of_peer(status: &StatusResponse) -> Vec<String> {
    let name = format!("peer {}", id(status).unwrap_or_default());
    let mut problems = Vec::new();
    match status.stage() {
        _ if !status.problem.is_empty() => problems.push(format!("{name}: {}", status.problem)),
        Stage::Fresh => problems.push(format!("{name} belongs to no cluster yet")),
        Stage::Recovering => problems.push(format!("{name} is recovering what it had applied before it was started")),
        Stage::Stopped => problems.push(format!("{name} has stopped")),
        Stage::Member | Stage::Unspecified => {}
    }
    if let Some(disk) = &status.disk
        && disk.free_bytes < disk.reserve_bytes.saturating_mul(2)
    {
        let (free, reserve) = (size(disk.free_bytes), size(disk.reserve_bytes));
        problems.push(format!("{name}: {free} are free on its disk; with less than {reserve} it writes nothing"));
    }
    problems
}

/// Peers that have another state than others at the same index of the log.
fn disagreements(answers: &[Answer]) -> Vec<String> {
    let hashes = |status: &StatusResponse| -> Vec<StateHashAt> {
        status.state_hash.iter().chain(&status.compared_hash).cloned().collect()
    };
    let mut problems = Vec::new();
    let peers: Vec<_> = statuses(answers).filter(|s| !s.cluster_id.is_empty()).collect();
    for (n, one) in peers.iter().enumerate() {
        for other in peers.iter().skip(n + 1).filter(|other| other.cluster_id == one.cluster_id) {
            let (ours, theirs) = (hashes(one), hashes(other));
            let differ = ours.iter().find(|a| theirs.iter().any(|b| a.index == b.index && a.hash != b.hash));
            if let Some(at) = differ {
                let (one, other) = (id(one).unwrap_or_default(), id(other).unwrap_or_default());
                problems.push(format!("peers {one} and {other} hold different states at log index {}", at.index));
            }
        }
    }
    problems
}

/// What the leader knows of the others, and of the map.
fn of_cluster(leader: &StatusResponse) -> Vec<String> {
    let mut problems = Vec::new();
    if leader.changing_voters {
        problems.push("the voters are being changed: for the moment two majorities are needed".to_owned());
    }
    for progress in &leader.progress {
        let peer = progress.id;
        match known_lag(progress) {
            None if !progress.answers => {
                problems.push(format!("peer {peer} has not answered the leader since that leads"));
            }
            Some(lag) if !progress.answers => problems
                .push(format!("peer {peer} has not answered the leader lately, and lacks {lag} entries of its log")),
            Some(lag) if lag > LAG_ENTRIES => {
                let how = if progress.needs_snapshot { ", and needs a snapshot for them" } else { "" };
                problems.push(format!("peer {peer} lacks {lag} entries of the leader's log{how}"));
            }
            None | Some(_) => {}
        }
    }
    for quota in &leader.nearly_full_quotas {
        let of = if quota.prefix.is_empty() { "the map".to_owned() } else { format!("{:?}", quota.prefix) };
        let (used, limit) = (size(quota.used_bytes), size(quota.limit_bytes));
        problems.push(format!("the quota of {of} is nearly full: {used} of {limit} are used"));
    }
    problems
}

// ---- printed --------------------------------------------------------------------------------------------------

fn text(answers: &[Answer], leader: Option<&StatusResponse>, problems: &[String]) -> String {
    let mut text = heading(answers, leader);
    text.push_str(&table(answers, leader));
    for problem in problems {
        text.push_str(&format!("problem: {}\n", escaped(problem)));
    }
    text
}

fn heading(answers: &[Answer], leader: Option<&StatusResponse>) -> String {
    let clusters: Vec<&str> = statuses(answers).map(|s| s.cluster_id.as_str()).collect();
    let unknown = if clusters.is_empty() { "unknown: no peer answers" } else { "not founded yet" };
    let cluster = escaped(clusters.iter().find(|id| !id.is_empty()).unwrap_or(&unknown));
    let Some(leader) = leader else { return format!("cluster {cluster}\n") };
    let map = match leader.map_limit_bytes {
        Some(limit) => format!(
            "{} of {} ({:.1} %)",
            size(leader.map_bytes),
            size(limit),
            leader.map_bytes as f64 / limit.max(1) as f64 * 100.0
        ),
        None => format!("{}, without a limit", size(leader.map_bytes)),
    };
    format!(
        "cluster {cluster}, led by peer {} in term {}, at feature level {}\nmap: {} keys, {map}, revision {}\n",
        id(leader).unwrap_or_default(),
        leader.term,
        leader.feature_level,
        leader.keys,
        leader.revision,
    )
}

fn table(answers: &[Answer], leader: Option<&StatusResponse>) -> String {
    let header = [
        "PEER",
        "ADDRESS",
        "ROLE",
        "TERM",
        "LAST LOG",
        "APPLIED",
        "LAG",
        "SNAPSHOT",
        "REVISION",
        "STATE HASH",
        "DISK",
        "FREE",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    let or_none = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
    let number = |cell: Option<u64>| or_none(cell.map(|n| n.to_string()));
    for answer in answers {
        let Ok(s) = &answer.status else {
            let mut row = ["-"; 12].map(str::to_owned);
            let peer = peer(answer, leader);
            (row[0], row[6]) = (number(peer), number(lag(peer, leader)));
            (row[1], row[2]) = (escaped(&answer.endpoint), "unreachable".to_owned());
            rows.push(row);
            continue;
        };
        let hash = s.state_hash.as_ref().map(|at| format!("{}@{}", &hash(at)[..HASH_DIGITS], at.index));
        rows.push([
            number(id(s)),
            escaped(&answer.endpoint),
            role(s, leader.and_then(id)).to_owned(),
            s.term.to_string(),
            s.last_log_index.to_string(),
            s.applied_index.to_string(),
            number(lag(id(s), leader)),
            s.snapshot_index.to_string(),
            s.revision.to_string(),
            or_none(hash),
            or_none(s.disk.as_ref().map(|disk| size(disk.data_bytes))),
            or_none(s.disk.as_ref().map(|disk| size(disk.free_bytes))),
        ]);
    }
    columns(rows)
}

/// At least [`HASH_DIGITS`] hexadecimal digits.
fn hash(at: &StateHashAt) -> String {
    let digits: String = at.hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digits:0>HASH_DIGITS$}")
}

fn as_json(answers: &[Answer], leader: Option<&StatusResponse>, problems: &[String]) -> Value {
    let cluster_id = statuses(answers).map(|s| s.cluster_id.as_str()).find(|id| !id.is_empty());
    json!({
        "cluster_id": cluster_id,
        "leader": leader.and_then(id),
        "term": leader.map(|l| l.term),
        "revision": leader.map(|l| l.revision),
        "keys": leader.map(|l| l.keys),
        "map_bytes": leader.map(|l| l.map_bytes),
        "map_limit_bytes": leader.and_then(|l| l.map_limit_bytes),
        "feature_level": leader.map(|l| l.feature_level),
        "changing_voters": leader.map(|l| l.changing_voters),
        "problems": problems,
        "peers": answers.iter().map(|answer| peer_json(answer, leader)).collect::<Value>(),
    })
}

fn peer_json(answer: &Answer, leader: Option<&StatusResponse>) -> Value {
    let s = match &answer.status {
        Ok(s) => s,
        Err(why) => {
            let peer = peer(answer, leader);
            return json!({
                "id": peer,
                "address": answer.endpoint,
                "role": "unreachable",
                "lag_entries": lag(peer, leader),
                "problem": why,
            });
        }
    };
    let hash_json = |at: &Option<StateHashAt>| at.as_ref().map(|at| json!({ "index": at.index, "hash": hash(at) }));
    let own = s.self_.clone().unwrap_or_default();
    json!({
        "id": id(s),
        "address": answer.endpoint,
        "grpc_address": own.grpc_address,
        "raft_address": own.raft_address,
        "incarnation": own.incarnation,
        "role": role(s, leader.and_then(id)),
        "cluster_id": s.cluster_id,
        "term": s.term,
        "last_log_index": s.last_log_index,
        "applied_index": s.applied_index,
        "lag_entries": lag(id(s), leader),
        "snapshot_index": s.snapshot_index,
        "purged_index": s.purged_index,
        "revision": s.revision,
        "keys": s.keys,
        "map_bytes": s.map_bytes,
        "state_hash": hash_json(&s.state_hash),
        "compared_hash": hash_json(&s.compared_hash),
        "disk": s.disk.as_ref().map(|disk| json!({
            "data_bytes": disk.data_bytes,
            "free_bytes": disk.free_bytes,
            "reserve_bytes": disk.reserve_bytes,
        })),
        "feature_level": s.feature_level,
        "supported_feature_level": s.supported_feature_level,
        "unix_ms": s.unix_ms,
        "problem": s.problem,
        "version": s.version,
    })
}

#[cfg(test)]
mod tests {
    use lake_proto::v1::{DiskUse, Member, Quota};

    use super::*;

    fn member(id: u64) -> Member {
        Member { id, ..Member::default() }
    }

    /// Peer `id` of three, led by peer 2, which has applied everything.
    fn status(id: u64) -> StatusResponse {
        StatusResponse {
            self_: Some(member(id)),
            cluster_id: "c1".into(),
            stage: Stage::Member as i32,
            term: 7,
            leader: Some(member(2)),
            voters: (1..=3).map(member).collect(),
            applied_index: 40,
            state_hash: Some(StateHashAt { index: 40, hash: vec![0xab; 16].into() }),
            disk: Some(DiskUse { data_bytes: 4096, free_bytes: 1 << 30, reserve_bytes: 1 << 20 }),
            progress: match id {
                2 => vec![progress(1, 0), progress(3, 0)],
                _ => vec![],
            },
            map_bytes: 512,
            map_limit_bytes: Some(1024),
            ..StatusResponse::default()
        }
    }

    fn progress(id: u64, lag_entries: u64) -> Progress {
        Progress { id, lag_entries, needs_snapshot: false, answers: true, unheard: false }
    }

    fn answers(statuses: [StatusResponse; 3]) -> Vec<Answer> {
        let answer = |(n, s)| Answer { endpoint: format!("peer:{n}"), status: Ok(s) };
        statuses.into_iter().enumerate().map(answer).collect()
    }

    fn found(change: impl FnOnce(&mut [StatusResponse; 3])) -> Vec<String> {
        let mut statuses = [1, 2, 3].map(status);
        change(&mut statuses);
        let answers = answers(statuses);
        problems(&answers, leader(&answers).as_ref())
    }

    #[test]
    fn the_table_says_who_leads_how_far_the_others_are_and_who_is_away() {
        let mut answers = answers([1, 2, 3].map(status));
        answers[2] = Answer { endpoint: "c:1".into(), status: Err("c:1: no answer".into()) };
        let leader = leader(&answers).unwrap();
        let problems = problems(&answers, Some(&leader));
        let text = text(&answers, Some(&leader), &problems);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "cluster c1, led by peer 2 in term 7, at feature level 0");
        assert_eq!(lines[1], "map: 0 keys, 512 B of 1.0 KiB (50.0 %), revision 0");
        let row: Vec<&str> = lines[4].split_whitespace().collect();
        assert_eq!(row[..7], ["2", "peer:1", "leader", "7", "0", "40", "0"], "{text}");
        assert!(row.contains(&"abababab@40") && lines[3].contains("follower"), "{text}");
        assert!(lines[5].contains("unreachable") && lines[6] == "problem: c:1: no answer", "{text}");
        let json = as_json(&answers, Some(&leader), &problems);
        assert_eq!((&json["leader"], &json["peers"][2]["role"]), (&json!(2), &json!("unreachable")));
        assert_eq!(json["peers"][0]["state_hash"], json!({ "index": 40, "hash": "ab".repeat(16) }));
        assert_eq!(json["peers"][0]["lag_entries"], 0);
    }

    #[test]
    fn a_healthy_cluster_has_no_problem() {
        assert_eq!(found(|_| {}), Vec::<String>::new());
        // Nor has one whose leader has only just begun, and has not learnt yet what the others have.
        let unheard = |s: &mut [StatusResponse; 3]| {
            s[1].progress[0] = Progress { unheard: true, needs_snapshot: true, ..progress(1, 5000) };
        };
        assert_eq!(found(unheard), Vec::<String>::new());
        let mut statuses = [1, 2, 3].map(status);
        unheard(&mut statuses);
        let answers = answers(statuses);
        assert_eq!(lag(Some(1), leader(&answers).as_ref()), None);
    }

    #[test]
    fn each_problem_is_found_and_names_the_peer() {
        let one = |change: fn(&mut [StatusResponse; 3])| {
            let problems = found(change);
            assert_eq!(problems.len(), 1, "{problems:?}");
            problems.into_iter().next().unwrap()
        };
        assert!(one(|s| s[1].leader = None).starts_with("no peer leads"));
        assert!(one(|s| s[2].problem = "the disk is full".into()).starts_with("peer 3: the disk is full"));
        assert!(one(|s| s[2].stage = Stage::Recovering as i32).starts_with("peer 3 is recovering"));
        assert!(one(|s| s[0].cluster_id = "c2".into()).contains("c1, c2"));
        assert!(one(|s| s[0].disk.as_mut().unwrap().free_bytes = 1 << 20).starts_with("peer 1: 1.0 MiB are free"));
        assert!(one(|s| s[1].changing_voters = true).contains("two majorities"));
        assert!(one(|s| s[1].progress[1].answers = false).contains("peer 3 has not answered"));
        assert!(one(|s| s[1].progress[0] = progress(1, 1001)).contains("peer 1 lacks 1001 entries"));
        let full = one(|s| {
            s[1].nearly_full_quotas = vec![Quota { prefix: "/kv/".into(), limit_bytes: 100, used_bytes: 90 }];
        });
        assert!(full.contains("\"/kv/\"") && full.contains("90 B of 100 B"), "{full}");
    }

    #[test]
    fn states_are_compared_where_both_have_been() {
        let hash_at = |index, byte| Some(StateHashAt { index, hash: vec![byte; 16].into() });
        let differing = found(|s| {
            s[0].state_hash = hash_at(50, 1);
            s[0].compared_hash = hash_at(40, 2);
        });
        assert_eq!(
            differing,
            [
                "peers 1 and 2 hold different states at log index 40",
                "peers 1 and 3 hold different states at log index 40"
            ]
        );
        assert_eq!(found(|s| s[0].state_hash = hash_at(41, 1)), Vec::<String>::new(), "it has applied more");
    }

    #[test]
    fn nobody_answers() {
        let answers = [Answer { endpoint: "a:1".into(), status: Err("a:1: refused".into()) }];
        let problems = problems(&answers, None);
        assert!(text(&answers, None, &problems).starts_with("cluster unknown: no peer answers"));
        assert_eq!(problems.len(), 2);
    }
}
