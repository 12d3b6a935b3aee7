//! A fresh peer that was told to join a cluster (`join`): it asks until it is a learner (semantics, section 9).
//!
//! It finds the leader through any of the peers it was given, and asks to be joined with its id, addresses and incarnation.
//! The leader calls back, has it adopt the cluster's id durably, and adds it; the log or a snapshot follows. A peer that has
//! a log asks nothing: it was founded or joined before. Without `join` a fresh peer waits; either way a list of addresses
//! founds nothing.
//!
//! Limits: one request of [`ANSWER`] at a time, [`FIRST_RETRY`] to [`LAST_RETRY`] apart.
//! Failure cases: nobody leads, or another change is under way: it asks again. Refused for what it is (its id was used
//! before, it belongs to another cluster): the peer ends with the leader's words.

use std::sync::Arc;
use std::time::Duration;

use lake_client::clock;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::secret::Secret;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Peer, note_end};

const ANSWER: Duration = Duration::from_secs(10);
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

async fn ask(peer: &Peer, endpoints: Vec<String>, secret: Option<Secret>) -> Result<(), String> {
    if peer.log.bounds().1.is_some() {
        return Ok(());
    }
    let cluster = RemoteStore::connect_by(RemoteConfig { endpoints, secret }, peer.transport.dialer());
    let cluster = cluster.map_err(|e| e.to_string())?;
    let mut retry = FIRST_RETRY;
    loop {
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
