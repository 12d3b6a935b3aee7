//! Streams that keep leases or sessions alive: each message is answered once its renewals are confirmed, in order.
//!
//! One task serves one stream. It starts a message's renewal when the message arrives, so that all messages that wait
//! share the next confirmation; it holds no logic.
//!
//! Limits: [`MAX_IN_FLIGHT`] messages of one stream, further ones are not read until some are answered, and count as
//! arrived when they are read; a caller that does not read its answers is not read from.
//! It ends with the first message that fails, with that failure: the caller turns to whoever leads and sends again. It
//! also ends when the caller closes its side and has been answered, when the caller goes, and when the server stops.

use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use futures::stream::FuturesOrdered;
use lake_client::clock;
use lake_proto::v1;
use tonic::{Request, Response, Status, Streaming};

use super::serving;
use super::streams::{self, Messages, Streams};
use crate::peer::Peer;
use crate::peer::duties::Mortal;
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::shares::Caller;

/// Messages of one stream that are under way.
pub const MAX_IN_FLIGHT: usize = 16;

/// What a stream answers.
pub type Answers = streams::Answers<v1::KeepAliveResponse>;

/// Opens a stream.
///
/// # Errors
/// As [`serving`]; Overloaded.
pub fn open(
    peer: &Peer,
    kind: Mortal,
    streams: &Streams,
    request: Request<Streaming<v1::KeepAliveRequest>>,
) -> Result<Response<Answers>, Status> {
    let member = serving(peer, request.metadata())?;
    let caller = peer.callers.at(request.remote_addr());
    let requests = request.into_inner();
    Ok(Response::new(streams.open(&caller.clone(), |answers| serve(member, caller, kind, requests, answers))?))
}

/// Serves one stream.
async fn serve(
    member: Arc<Member>,
    caller: Caller,
    kind: Mortal,
    mut requests: Streaming<v1::KeepAliveRequest>,
    answers: Messages<v1::KeepAliveResponse>,
) {
    let mut in_flight = FuturesOrdered::new();
    let mut open = true;
    while open || !in_flight.is_empty() {
        let answer = tokio::select! {
            () = answers.stopped() => {
                let stopping = format!("peer {} is stopping: nothing was renewed, ask the leader", member.identity.id);
                return answers.end(Failure::unavailable(stopping));
            }
            message = requests.message(), if open && in_flight.len() < MAX_IN_FLIGHT => {
                match message {
                    Ok(Some(message)) => in_flight.push_back(answer(member.clone(), caller.clone(), kind, message, clock::now())),
                    Ok(None) => open = false,
                    Err(_) => return,
                }
                continue;
            }
            Some(answer) = in_flight.next() => answer,
        };
        match answer {
            Ok(answer) => {
                if !answers.send(answer).await {
                    return;
                }
            }
            Err(failure) => return answers.end(failure),
        }
    }
}

async fn answer(
    member: Arc<Member>,
    caller: Caller,
    kind: Mortal,
    request: v1::KeepAliveRequest,
    arrived: Instant,
) -> Result<v1::KeepAliveResponse, Failure> {
    let kept = member.keep_alive(kind, &request.ids, &caller, arrived).await?;
    Ok(v1::KeepAliveResponse {
        header: Some(member.header(kept.revision)),
        alive: kept.alive,
        expired: kept.expired,
        tag: request.tag,
    })
}
