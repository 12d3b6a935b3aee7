//! The `Snapshots` service: the state of a running peer as the bytes of a snapshot file.
//!
//! The state is one immutable value, so that whatever is written meanwhile neither waits for it nor shows in it. It is encoded
//! a chunk at a time, when the connection has taken the ones before, in a task that gives way between chunks: a caller that is
//! slow holds up nobody but itself.
//!
//! Limits: [`MAX_SAVES`] at once, since each keeps its version of the state in memory, and one to each host
//! ([`crate::peer::shares`]); chunks of about [`CHUNK_BYTES`]; a caller that takes none for [`MAX_STALL`], or is not done within
//! [`MAX_SAVE`], is cut off.
//! Failure cases: a stream that ends early lacks its end, which whoever reads the file notices.

use std::sync::Arc;
use std::time::Duration;

use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::snapshots_server::Snapshots;
use tonic::{Request, Response, Status};

use super::kv::read_options;
use super::streams::{Answers, Messages, Streams};
use super::{call, serving};
use crate::peer::Peer;
use crate::peer::failure::Failure;
use crate::peer::shares::{Held, Pool, Resource};
use crate::raft::state_machine::Applied;
use crate::snapshot::Encoder;

/// Snapshots that one peer sends to callers at once. Whoever takes one slowly keeps nobody of another host out.
pub const MAX_SAVES: usize = 2;
/// About how much is sent in one message; a record is never cut.
pub const CHUNK_BYTES: usize = 64 << 10;
/// How long a caller may take no chunk.
pub const MAX_STALL: Duration = Duration::from_secs(30);
/// How long it may all take.
pub const MAX_SAVE: Duration = Duration::from_secs(3600);

/// Answers for one peer.
pub struct SnapshotsService {
    peer: Arc<Peer>,
    streams: Streams,
    turns: Pool,
}

impl SnapshotsService {
    /// Of this peer.
    pub fn new(peer: Arc<Peer>, streams: Streams) -> Self {
        Self { peer, streams, turns: Pool::new(Resource::Saves, MAX_SAVES) }
    }
}

#[tonic::async_trait]
impl Snapshots for SnapshotsService {
    type SaveStream = Answers<v1::SaveResponse>;

    async fn save(&self, request: Request<v1::SaveRequest>) -> Result<Response<Self::SaveStream>, Status> {
        let (call, member) = (call(&self.peer, &request), serving(&self.peer, request.metadata())?);
        let options = read_options(request.into_inner().options)?;
        let turn = self.turns.take(&call.caller, 1).map_err(|refused| {
            let what = format!(
                "peer {}: {refused} has as many snapshots on their way as it may have, of {MAX_SAVES}: ask another peer, or ask \
                 again later",
                self.peer.identity.id
            );
            Failure::new(Kind::Overloaded, what)
        })?;
        let applied = member.read(options, &call).await?;
        let cluster_id = member.cluster_id.clone();
        let stream = self.streams.open(&call.caller, |messages| send(applied, cluster_id, messages, turn))?;
        Ok(Response::new(stream))
    }
}

/// Sends a state to a caller.
async fn send(applied: Arc<Applied>, cluster_id: String, messages: Messages<v1::SaveResponse>, _turn: Held) {
    let sending = tokio::time::timeout(MAX_SAVE, send_all(&applied, &cluster_id, &messages));
    let failure = tokio::select! {
        () = messages.stopped() => Some("the peer is stopping: save from another one".to_owned()),
        sent = sending => match sent {
            Ok(sent) => sent.err(),
            Err(_) => Some(format!("the snapshot was not taken within {} s", MAX_SAVE.as_secs())),
        },
    };
    if let Some(what) = failure {
        tracing::info!("a snapshot that was being saved is cut off: {what}");
        // Whoever does not take the chunks will not take this either.
        messages.end(Failure::unavailable(what));
    }
}

async fn send_all(applied: &Applied, cluster_id: &str, messages: &Messages<v1::SaveResponse>) -> Result<(), String> {
    let mut encoder = Encoder::new(&applied.snapshot_meta(), cluster_id, &applied.state);
    let mut more = true;
    while more {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES + CHUNK_BYTES / 8);
        while more && chunk.len() < CHUNK_BYTES {
            more = encoder.next_into(&mut chunk).map_err(|e| format!("a record cannot be encoded: {e}"))?;
        }
        if chunk.is_empty() {
            break;
        }
        let message = v1::SaveResponse { chunk: chunk.into() };
        match tokio::time::timeout(MAX_STALL, messages.send(message)).await {
            Ok(true) => {}
            Ok(false) => return Err("the caller has gone".to_owned()),
            Err(_) => return Err(format!("the caller took nothing for {} s", MAX_STALL.as_secs())),
        }
        tokio::task::yield_now().await;
    }
    Ok(())
}
