//! A stream of appends to one follower, and its answers.
//!
//! openraft makes a request whenever there is something new; tonic sends it as soon as the connection takes it; answers
//! come back in the same order. What is unanswered is remembered, so that an answer can be told which entries it is about.
//!
//! Failure cases: no answer for [`APPEND_TIMEOUT`] while one is due, a broken connection, an answer that makes no sense.
//! The end of the answers takes openraft's requests away from tonic at once, however long the connection lingers: the
//! next stream needs what they hold.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures::Stream;
use lake_proto::v1;
use openraft::raft::{AppendEntriesRequest, StreamAppendError, StreamAppendResult};
use tonic::{Status, Streaming};

use super::network::{APPEND_TIMEOUT, append_to_wire};
use super::types::{LogId, TypeConfig};
use super::wire::{log_id_from_wire, vote_from_wire};
use crate::log::lock;

/// Why there is no further answer.
pub(super) enum AppendFailed {
    Status(Status),
    Nonsense(&'static str),
    /// One was due for too long.
    Silent,
}

/// What a request was about.
#[derive(Debug, Clone, Copy)]
struct Range {
    previous: Option<LogId>,
    last: Option<LogId>,
}

#[derive(Debug)]
struct Shared<S> {
    /// Taken away when the answers end.
    input: Option<S>,
    unanswered: VecDeque<Range>,
    /// For the first message only.
    header: Option<v1::RaftHeader>,
}

/// The answers' side of a pipeline; its end is the end of the requests.
#[derive(Debug)]
pub(super) struct Pipeline<S>(Arc<Mutex<Shared<S>>>);

impl<S> Drop for Pipeline<S> {
    fn drop(&mut self) {
        let input = lock(&self.0).input.take();
        drop(input);
    }
}

/// The requests' side, as tonic sends them.
pub(super) struct Requests<S>(Arc<Mutex<Shared<S>>>);

/// Both sides of a pipeline.
pub(super) fn pipeline<S>(header: Option<v1::RaftHeader>, input: S) -> (Pipeline<S>, Requests<S>) {
    let shared = Arc::new(Mutex::new(Shared { input: Some(input), unanswered: VecDeque::new(), header }));
    (Pipeline(shared.clone()), Requests(shared))
}

impl<S: Stream<Item = AppendEntriesRequest<TypeConfig>> + Unpin> Stream for Requests<S> {
    type Item = v1::AppendRequest;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<v1::AppendRequest>> {
        let mut shared = lock(&self.0);
        let Some(input) = &mut shared.input else { return Poll::Ready(None) };
        let Some(request) = std::task::ready!(Pin::new(input).poll_next(cx)) else { return Poll::Ready(None) };
        let last = request.entries.last().map(|entry| entry.log_id).or(request.prev_log_id);
        shared.unanswered.push_back(Range { previous: request.prev_log_id, last });
        let header = shared.header.take();
        Poll::Ready(Some(append_to_wire(header, &request)))
    }
}

/// What the answers say of the requests, in order; ends with the first that is no success.
pub(super) fn results<S: Send + 'static>(
    pipeline: Pipeline<S>,
    answers: Streaming<v1::AppendResponse>,
) -> impl Stream<Item = Result<StreamAppendResult<TypeConfig>, AppendFailed>> + Send {
    futures::stream::unfold(Some((pipeline, answers)), |state| async move {
        let (pipeline, mut answers) = state?;
        let answer = match next(&pipeline, &mut answers).await {
            Ok(Some(answer)) => answer,
            Ok(None) => return None,
            Err(failed) => return Some((Err(failed), None)),
        };
        let Some(range) = lock(&pipeline.0).unanswered.pop_front() else {
            return Some((Err(AppendFailed::Nonsense("an answer to no append")), None));
        };
        match meaning(answer, range) {
            Ok(Ok(matched)) if matched == range.last => Some((Ok(Ok(matched)), Some((pipeline, answers)))),
            Ok(result) => Some((Ok(result), None)),
            Err(what) => Some((Err(AppendFailed::Nonsense(what)), None)),
        }
    })
}

/// The next answer; waits for ever while none is due.
async fn next<S>(
    pipeline: &Pipeline<S>,
    answers: &mut Streaming<v1::AppendResponse>,
) -> Result<Option<v1::AppendResponse>, AppendFailed> {
    loop {
        let due = !lock(&pipeline.0).unanswered.is_empty();
        match tokio::time::timeout(APPEND_TIMEOUT, answers.message()).await {
            Ok(answer) => return answer.map_err(AppendFailed::Status),
            // What became due in the meantime has its own time.
            Err(_) if due => return Err(AppendFailed::Silent),
            Err(_) => {}
        }
    }
}

fn meaning(answer: v1::AppendResponse, range: Range) -> Result<StreamAppendResult<TypeConfig>, &'static str> {
    use v1::append_response::Result as Wire;
    match answer.result {
        Some(Wire::Success(_)) => Ok(Ok(range.last)),
        Some(Wire::PartialSuccess(id)) => Ok(Ok(Some(log_id_from_wire(id)))),
        Some(Wire::Conflict(_)) => match range.previous {
            Some(previous) => Ok(Err(StreamAppendError::Conflict(previous))),
            None => Err("a conflict before the first entry"),
        },
        Some(Wire::HigherVote(vote)) => Ok(Err(StreamAppendError::HigherVote(vote_from_wire(vote)))),
        None => Err("an answer to an append without a result"),
    }
}
