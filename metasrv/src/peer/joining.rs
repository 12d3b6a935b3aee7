//! A fresh peer that was told to join a cluster (`join`): it asks until it is a learner (semantics, section 9).
//!
//! It finds the leader through any of the peers it was given, and asks to be joined with its id, addresses and incarnation.
//! The leader calls back, has it adopt the cluster's id durably, and adds it; the log or a snapshot follows. A peer that
//! finds itself in the membership that it has asks nothing. One that has a log without being in it may be a member that has
//! not heard of that yet, or one that a deposed leader had begun to take in: it asks, which is safe to repeat. Without `join` a fresh peer waits; either way a list of addresses
//! founds nothing.
//!
//! Limits: one request of [`ANSWER`] at a time, [`FIRST_RETRY`] to [`LAST_RETRY`] apart.
//! Failure cases: nobody leads, or another change is under way: it asks again. Refused for what it is (its id was used
//! before, it belongs to another cluster): the peer ends with the leader's words. Turned away at the door, because its secret
//! is missing or wrong, by every peer that answers: it ends as well, since no later attempt would fare better.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use lake_client::clock;
use lake_client::dial::Dialer;
use lake_client::remote::{RemoteConfig, RemoteStore, admin};
use lake_client::secret::Secret;
use lake_client::store::Error;
use openraft::RaftMetrics;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Peer, note_end};
use crate::raft::types::TypeConfig;

const ANSWER: Duration = Duration::from_secs(10);
/// How long a peer may take to open its door, or not.
const KNOCK: Duration = Duration::from_secs(2);
/// How long the consensus core may take to say which membership it has found.
const LOOK: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(5);

/// Asks through these endpoints until the peer is a member, is refused, or is told to stop.
pub(crate) async fn ask_to_join(
    peer: Arc<Peer>,
    endpoints: Vec<String>,
    secret: Option<Secret>,
    failed: watch::Sender<Option<String>>,
    stop: CancellationToken,
) {
    tokio::select! {
        () = stop.cancelled() => {}
        refused = ask(&peer, endpoints, secret) => if let Err(why) = refused {
            let what = format!("peer {} cannot join the cluster: {why}", peer.identity.id);
            tracing::error!("{what}");
            note_end(&failed, what);
        },
    }
}

/// Whether the membership that the peer has on its disk names it.
async fn knows_itself(peer: &Peer) -> bool {
    let Some(member) = peer.member() else { return false };
    let id = peer.identity.id;
    let found = member.view.raft().wait(Some(LOOK));
    let names_it = |metrics: &RaftMetrics<TypeConfig>| metrics.membership_config.membership().get_node(&id).is_some();
    found.metrics(names_it, "a membership with this peer in it").await.is_ok()
}

async fn ask(peer: &Peer, endpoints: Vec<String>, secret: Option<Secret>) -> Result<(), String> {
    if knows_itself(peer).await {
        return Ok(());
    }
    let config = RemoteConfig { endpoints, secret };
    let cluster = RemoteStore::connect_by(config.clone(), peer.transport.dialer()).map_err(|e| e.to_string())?;
    let mut retry = FIRST_RETRY;
    loop {
        if let Some(why) = turned_away(&config, &peer.transport.dialer()).await {
            return Err(why);
        }
        match cluster.join(peer.identity.to_wire(), clock::now() + ANSWER).await {
            Ok(answer) => {
                tracing::info!(cluster = answer.cluster_id, peer = peer.identity.id, "joined the cluster as a learner");
                return Ok(());
            }
            Err(error) if error.is_unavailable() => {
                tracing::warn!("asking to join the cluster: {error}");
                tokio::time::sleep(retry).await;
                retry = (retry * 2).min(LAST_RETRY);
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Why every peer that answers refuses even to talk, if so.
async fn turned_away(config: &RemoteConfig, dialer: &Dialer) -> Option<String> {
    let asked = config.endpoints.iter().map(async |endpoint| {
        let answer = admin::peer_status_by(dialer, endpoint, config.secret.as_ref(), KNOCK).await;
        (endpoint, answer)
    });
    let mut refusals = Vec::new();
    for (endpoint, answer) in join_all(asked).await {
        match answer {
            // Nothing else is refused of this question.
            Err(Error::Refused { message, .. }) => refusals.push(format!("{endpoint}: {message}")),
            // It does not answer, and may be one that would not refuse; the others speak for it.
            Err(error) if error.is_unavailable() => {}
            Ok(_) | Err(_) => return None,
        }
    }
    (!refusals.is_empty()).then(|| {
        let refusals = refusals.join("; ");
        format!("{refusals}. Correct secret_file (--secret-file) and start the peer again; nothing was changed")
    })
}
