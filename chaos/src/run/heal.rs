//! What is found once every fault has ended: one leader, and the same state everywhere.

use std::time::Duration;

use lake_proto::v1::StatusResponse;
use lake_proto::v1::status_response::Stage;
use tokio::time::Instant;

use crate::check::convergence::{Facts, Peer, State};
use crate::nemesis::field::{Field, MEND_WITHIN};
use crate::probe;
use crate::process::ProcessName;

/// How long all peers may take to have applied the same.
const SAME_WITHIN: Duration = Duration::from_secs(30);

/// Has every peer that belongs to the cluster run, and waits until all of them name one leader.
pub async fn heal(field: &Field) -> Facts {
    field.calm_all();
    for id in field.roster.ids() {
        // One that does not start is found out when the states are compared.
        if let Err(e) = field.cluster.start_one(ProcessName::metasrv(id)).await {
            tracing::warn!("{e}");
        }
    }
    let began = Instant::now();
    let members = field.roster.ids();
    let named = probe::until("all peers to name one leader", MEND_WITHIN, || async {
        let answers = field.statuses().await;
        let leader = |answer: &StatusResponse| Some(answer.leader.as_ref()?.id);
        let named: Vec<Option<u64>> = members.iter().map(|id| of(&answers, *id).and_then(leader)).collect();
        let one = named.first().copied().flatten();
        if one.is_some() && named.iter().all(|leader| *leader == one) { Ok(()) } else { Err(format!("{named:?}")) }
    })
    .await;
    let watched_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    Facts { leader_after_ms: named.ok().map(|()| watched_ms), watched_ms, ..Facts::default() }
}

/// Compares the states of all peers once nothing changes any more.
pub async fn compare(field: &Field, facts: &mut Facts) {
    let members = field.roster.ids();
    let settled = probe::until("all peers to have applied the same", SAME_WITHIN, || async {
        let answers = field.statuses().await;
        let all: Vec<&StatusResponse> = members.iter().filter_map(|id| of(&answers, *id)).collect();
        let applied: Vec<u64> = all.iter().map(|answer| answer.applied_index).collect();
        let same = applied.windows(2).all(|pair| pair[0] == pair[1]);
        let serve = all.iter().all(|answer| answer.stage() == Stage::Member);
        match same && serve && all.len() == members.len() {
            true => Ok(answers),
            false => Err(format!("applied: {applied:?}; {} of {} peers answer", all.len(), members.len())),
        }
    })
    .await;
    let answers = match settled {
        Ok(answers) => answers,
        Err(e) => {
            tracing::warn!("{e}");
            field.statuses().await
        }
    };
    let peer = |id: u64| {
        let state = match of(&answers, id) {
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
        Peer { id, state, excused: None }
    };
    facts.peers = members.into_iter().map(peer).collect();
}

fn of(answers: &[StatusResponse], id: u64) -> Option<&StatusResponse> {
    answers.iter().find(|answer| answer.self_.as_ref().is_some_and(|own| own.id == id))
}
