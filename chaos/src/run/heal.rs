//! What is found once every fault has ended: one leader, the same state everywhere, and query nodes that serve.
//!
//! All of it is bounded, so that a run against a cluster that is dead ends soon: what has no leader by then is not asked for
//! more.

use std::time::Duration;

use lake_proto::v1::StatusResponse;
use lake_proto::v1::status_response::Stage;
use tokio::time::timeout;

use super::ground::Ground;
use super::pulse::Pulse;
use crate::check::convergence::{Facts, LEADER_WITHIN_MS, Peer, State};
use crate::nemesis::field::Field;
use crate::process::ProcessName;

/// How long peers that have to be started may take until they serve; after that the others are looked at without them.
const SERVE_WITHIN: Duration = Duration::from_secs(10);
/// The same of query nodes.
const QUERY_SERVES_WITHIN: Duration = Duration::from_secs(40);
/// How long a leader is looked for: beyond what it may take, so that a late one is told from none.
pub(super) const LOOK_FOR_LEADER: Duration = Duration::from_millis(LEADER_WITHIN_MS + 2_000);
/// How long all peers may take to have applied the same.
pub(super) const SAME_WITHIN: Duration = Duration::from_secs(15);

/// Peers that must be there: all members but those that have lost what they had.
fn expected(field: &Field) -> Vec<u64> {
    field.roster.ids().into_iter().filter(|id| field.loss_of(*id).is_none()).collect()
}

/// Has every peer that belongs to the cluster run, waits until all of them name one leader, and then has every query node run. The
/// network is sound.
pub async fn heal(field: &Field, pulse: &Pulse) -> Facts {
    let members = expected(field);
    let starting = members.iter().copied().map(|id| async move {
        // One that does not start is found out when the states are compared.
        match timeout(SERVE_WITHIN, field.cluster.start_one(ProcessName::metasrv(id))).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::warn!("{e}"),
            Err(_) => tracing::warn!(peer = id, "does not serve within {} s after all faults", SERVE_WITHIN.as_secs()),
        }
    });
    futures::future::join_all(starting).await;
    let answers = field.statuses().await;
    let serves = |id: u64| of(&answers, id).is_some_and(|answer| answer.stage() == Stage::Member);
    for id in members.into_iter().filter(|id| !serves(*id)) {
        // It has found its damage after all.
        if let Some(what) = field.damage_of(id) {
            field.lose(id, &what);
        }
    }
    let (leader_after_ms, watched_ms) = one_leader(field, &expected(field), pulse).await;
    let nodes = field.query_nodes.ids();
    let coming = nodes.iter().map(|id| async move {
        match timeout(QUERY_SERVES_WITHIN, field.start_query(*id)).await {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(format!("query node {id}: {e}")),
            Err(_) => Some(format!("query node {id} does not serve within {} s", QUERY_SERVES_WITHIN.as_secs())),
        }
    });
    let away = futures::future::join_all(coming).await;
    let query_nodes_away: Vec<String> = away.into_iter().flatten().collect();
    Facts { leader_after_ms, watched_ms, query_nodes_away, ..Facts::default() }
}

/// Waits until all of these peers name one leader: after how many milliseconds they did, and for how many they were watched. Those in
/// which the machine stood still are not among them.
pub async fn one_leader(ground: &dyn Ground, members: &[u64], pulse: &Pulse) -> (Option<u64>, u64) {
    let naming = pulse.until("all peers to name one leader", LOOK_FOR_LEADER, || async {
        let answers = ground.statuses().await;
        let leader = |answer: &StatusResponse| Some(answer.leader.as_ref()?.id);
        let named: Vec<Option<u64>> = members.iter().map(|id| of(&answers, *id).and_then(leader)).collect();
        let one = named.first().copied().flatten();
        if one.is_some() && named.iter().all(|leader| *leader == one) { Ok(()) } else { Err(format!("{named:?}")) }
    });
    let (named, watched) = naming.await;
    let watched_ms = u64::try_from(watched.as_millis()).unwrap_or(u64::MAX);
    (named.ok().map(|()| watched_ms), watched_ms)
}

/// Compares the states of all peers once nothing changes any more. Without a leader they are looked at as they are.
pub async fn compare(field: &Field, facts: &mut Facts, pulse: &Pulse) {
    let answers = settled(field, &expected(field), facts.leader_after_ms.is_some(), pulse).await;
    facts.peers = field.roster.ids().into_iter().map(|id| peer(&answers, id, field.loss_of(id))).collect();
}

/// What these peers say once all have applied the same, or what all say if they do not in time.
pub async fn settled(ground: &dyn Ground, members: &[u64], has_leader: bool, pulse: &Pulse) -> Vec<StatusResponse> {
    let within = if has_leader { SAME_WITHIN } else { Duration::ZERO };
    let settling = pulse.until("all peers to have applied the same", within, || async {
        let answers = ground.statuses().await;
        let all: Vec<&StatusResponse> = members.iter().filter_map(|id| of(&answers, *id)).collect();
        let applied: Vec<u64> = all.iter().map(|answer| answer.applied_index).collect();
        let same = applied.windows(2).all(|pair| pair[0] == pair[1]);
        let serve = all.iter().all(|answer| answer.stage() == Stage::Member);
        match same && serve && all.len() == members.len() {
            true => Ok(answers),
            false => Err(format!("applied: {applied:?}; {} of {} peers answer", all.len(), members.len())),
        }
    });
    match settling.await.0 {
        Ok(answers) => answers,
        Err(e) => {
            tracing::warn!("{e}");
            ground.statuses().await
        }
    }
}

/// What a peer says of its state; it is excused for a reason, or not.
pub fn peer(answers: &[StatusResponse], id: u64, excused: Option<String>) -> Peer {
    let state = match of(answers, id) {
        None => Err("it does not answer".to_owned()),
        Some(answer) if answer.stage() != Stage::Member => {
            Err(format!("{} {}", answer.stage().as_str_name(), answer.problem))
        }
        Some(answer) => {
            let at = answer.state_hash.clone().unwrap_or_default();
            let hash = at.hash.iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(State { applied: at.index, hash })
        }
    };
    Peer { id, state, excused }
}

fn of(answers: &[StatusResponse], id: u64) -> Option<&StatusResponse> {
    answers.iter().find(|answer| answer.self_.as_ref().is_some_and(|own| own.id == id))
}
