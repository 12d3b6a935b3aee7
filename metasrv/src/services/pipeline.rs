//! Many calls on one stream (`Kv.Pipeline`): the cost of a gRPC call is paid once for all that are ready together.
//!
//! One task serves one stream. It starts every request of a message at once, and sends the answers in whatever order they
//! come, as many in one message as there are by then. It holds no logic: each request is the call of the same name.
//!
//! Limits: [`MAX_IN_FLIGHT`] requests of one stream, more are answered Overloaded at once, and a message with more than that
//! ends the stream; answers of about [`MESSAGE_BYTES`] in one message; a caller that does not read its answers is not read
//! from. What all callers have not read is bounded together ([`crate::peer::untaken`]): who has its part is answered Overloaded
//! at once, also instead of what was read for it meanwhile; the other answers, for which there is no room, end the stream: with
//! Overloaded if nothing that it was asked for is in doubt then.
//! It ends when the caller closes its side and has been answered, when the caller goes, and when the server stops.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use lake_client::clock;
use lake_proto::codec::framed;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::pipeline_request::Request;
use lake_proto::v1::pipeline_response::Response;
use prost::Message;
use tonic::Streaming;

use super::kv;
use super::streams::Messages;
use super::{DEFAULT_DEADLINE, MAX_DEADLINE};
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::shares::{Call, Caller};

/// Requests of one stream that are under way.
pub const MAX_IN_FLIGHT: usize = 1024;
/// A message takes up no more answers once it has this many bytes.
const MESSAGE_BYTES: usize = 1 << 20;

/// Serves one stream.
pub async fn serve(
    member: Arc<Member>,
    caller: Caller,
    mut requests: Streaming<v1::PipelineRequests>,
    answers: Messages<Bytes>,
) {
    let mut in_flight = FuturesUnordered::new();
    let mut ready = Vec::new();
    let mut open = true;
    while open || !in_flight.is_empty() {
        tokio::select! {
            () = answers.stopped() => {
                return answers.end(Failure::unknown(format!("peer {} is stopping", member.identity.id)));
            }
            message = requests.message(), if open => match message {
                Ok(Some(message)) if message.requests.len() > MAX_IN_FLIGHT => {
                    let what = format!(
                        "a message has {} requests; a stream has at most {MAX_IN_FLIGHT} in flight: none of these was begun, and \
                         what became of those before them is not told",
                        message.requests.len()
                    );
                    return answers.end(Failure::invalid(what).after_all());
                }
                Ok(Some(message)) => {
                    let refused = answers.may_ask().err();
                    for request in message.requests {
                        match &refused {
                            Some(failure) => ready.push(failed(request.id, failure.clone())),
                            None if in_flight.len() < MAX_IN_FLIGHT => {
                                in_flight.push(answer(member.clone(), caller.clone(), request));
                            }
                            None => ready.push(overloaded(request.id)),
                        }
                    }
                }
                Ok(None) => open = false,
                // The caller is gone: what it asked for goes on without it.
                Err(_) => return,
            },
            Some(response) = in_flight.next() => ready.push(response),
        }
        let mut bytes: usize = ready.iter().map(Message::encoded_len).sum();
        while bytes < MESSAGE_BYTES
            && let std::task::Poll::Ready(Some(response)) = futures::poll!(in_flight.next())
        {
            bytes += response.encoded_len();
            ready.push(response);
        }
        if let Err(failure) = answers.room(bytes) {
            // It can be read again.
            for read in ready.iter_mut().filter(|answer| is_read(answer)) {
                *read = failed(read.id, failure.clone());
            }
            bytes = ready.iter().map(Message::encoded_len).sum();
            if let Err(failure) = answers.room(bytes) {
                return answers.end(untold(failure, &ready, in_flight.is_empty()));
            }
        }
        if !ready.is_empty() {
            // Encoded before it waits: what is decoded has several times the bytes that count.
            let message = v1::PipelineResponses { responses: std::mem::take(&mut ready) };
            if !answers.send(framed(&message)).await {
                return;
            }
        }
    }
}

/// Answers one request.
fn answer(
    member: Arc<Member>,
    caller: Caller,
    request: v1::PipelineRequest,
) -> BoxFuture<'static, v1::PipelineResponse> {
    let timeout = match request.timeout_ms {
        0 => DEFAULT_DEADLINE,
        millis => Duration::from_millis(millis).min(MAX_DEADLINE),
    };
    let call = Call { caller, deadline: clock::now() + timeout };
    async move {
        let response = match request.request {
            Some(Request::Get(get)) => kv::get(&member, get, &call).await.map(Response::Get),
            Some(Request::BatchGet(get)) => kv::batch_get(&member, get, &call).await.map(Response::BatchGet),
            Some(Request::Txn(txn)) => kv::txn(&member, txn, &call).await.map(Response::Txn),
            None => Err(Failure::invalid("the stream has a request of an unknown kind")),
        };
        let response = response.unwrap_or_else(|failure| Response::Error(failure.into()));
        v1::PipelineResponse { id: request.id, response: Some(response) }
    }
    .boxed()
}

fn overloaded(id: u64) -> v1::PipelineResponse {
    let what = format!("the stream has {MAX_IN_FLIGHT} requests in flight, which is the most");
    failed(id, Failure::new(Kind::Overloaded, what))
}

fn failed(id: u64, failure: Failure) -> v1::PipelineResponse {
    v1::PipelineResponse { id, response: Some(Response::Error(failure.into())) }
}

/// Why a stream ends with answers for which there is no room; whether they are for all that it was asked for.
fn untold(no_room: Failure, answers: &[v1::PipelineResponse], all: bool) -> Failure {
    let message = format!("the stream ends, and what it has not answered is not told: {}", no_room.message);
    if all && answers.iter().all(is_refusal) {
        return Failure { message, ..no_room };
    }
    // Not Overloaded: that says that nothing was done.
    Failure::unknown(message)
}

/// Whether an answer is that nothing was done, and that it can be asked for again.
fn is_refusal(answer: &v1::PipelineResponse) -> bool {
    let Some(Response::Error(error)) = &answer.response else { return false };
    error.detail.as_ref().is_some_and(|detail| detail.kind() == Kind::Overloaded)
}

fn is_read(answer: &v1::PipelineResponse) -> bool {
    matches!(answer.response, Some(Response::Get(_) | Response::BatchGet(_)))
}

#[cfg(test)]
mod tests {
    use lake_proto::v1::error_detail::Applied;

    use super::*;

    #[test]
    fn a_stream_without_room_says_that_nothing_was_done_only_if_that_is_so_of_all() {
        let no_room = || Failure::new(Kind::Overloaded, "no room");
        let done = v1::PipelineResponse { id: 2, response: Some(Response::Txn(v1::TxnResponse::default())) };
        let doubtful = failed(3, Failure::unknown("nobody knows"));
        let told = |answers: &[v1::PipelineResponse], all| {
            let failure = untold(no_room(), answers, all);
            assert!(failure.message.ends_with("no room"), "{failure:?}");
            (failure.kind, failure.applied)
        };
        let (nothing, unknown) = ((Kind::Overloaded, Applied::NotApplied), (Kind::Unavailable, Applied::Unknown));
        assert_eq!(told(&[overloaded(1), overloaded(2)], true), nothing);
        assert_eq!(told(&[overloaded(1), overloaded(2)], false), unknown, "another one is under way");
        assert_eq!(told(&[overloaded(1), done], true), unknown);
        assert_eq!(told(&[overloaded(1), doubtful], true), unknown);
    }
}
