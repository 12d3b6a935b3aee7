//! Many calls on one stream to one peer (`Kv.Pipeline`), so that calls made together cost little more than one.
//!
//! One task owns the stream. It sends what has been queued by the time the stream takes more, as one message, and hands
//! each answer to whoever waits for it. It ends with the last handle, with the stream, or when the peer cannot be
//! reached; all that wait are then told why, and a new pipe is opened by the next call.
//!
//! Limits: [`MAX_OUTSTANDING`] calls unanswered and as many queued, beyond which callers wait within their deadlines;
//! [`MESSAGE_BYTES`] in one message. A caller that gives up is forgotten; its call runs its course at the peer, if it has left.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use lake_proto::v1::error_detail::{Applied, Kind};
use lake_proto::v1::kv_client::KvClient;
use lake_proto::v1::pipeline_request::Request;
use lake_proto::v1::pipeline_response::Response;
use lake_proto::{MAX_MESSAGE_BYTES, status, v1};
use prost::Message;
use tokio::sync::{mpsc, oneshot};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::attempts::describe;

/// Calls on one pipe that are unanswered; the peer allows no more.
const MAX_OUTSTANDING: usize = 1000;
/// A message takes up no more calls once it has this many bytes.
const MESSAGE_BYTES: usize = 1 << 20;
/// Messages that wait for the connection.
const MESSAGES_WAITING: usize = 2;

type Answer = Result<Response, Status>;

struct Call {
    request: Request,
    timeout: Duration,
    answer: oneshot::Sender<Answer>,
}

/// A stream to one peer. Cheap to clone; the last clone ends it.
#[derive(Debug, Clone)]
pub(super) struct Pipe {
    calls: mpsc::Sender<Call>,
    ended: Arc<AtomicBool>,
}

impl Pipe {
    /// Opens a stream over `channel`. `opening` is the request that opens it, with the metadata of every call.
    pub fn open(channel: Channel, opening: impl FnOnce(Outgoing) -> Result<tonic::Request<Outgoing>, Status>) -> Self {
        let (calls, queued) = mpsc::channel(MAX_OUTSTANDING);
        let (messages, outgoing) = mpsc::channel(MESSAGES_WAITING);
        let ended = Arc::new(AtomicBool::new(false));
        let opening = opening(Outgoing(outgoing));
        let pipe = Self { calls, ended: ended.clone() };
        tokio::spawn(async move {
            let mut task = Task { queued, messages, waiting: HashMap::new(), next_id: 1 };
            let why = task.run(channel, opening).await;
            ended.store(true, Ordering::Release);
            task.end(why).await;
        });
        pipe
    }

    /// Whether calls on it can only fail.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Makes a call. The peer is told how long the answer may take; the caller keeps to that by itself.
    pub async fn call(&self, request: Request, timeout: Duration) -> Answer {
        let (answer, answered) = oneshot::channel();
        let ended = || Status::unavailable("the stream to the peer has ended");
        self.calls.send(Call { request, timeout, answer }).await.map_err(|_| ended())?;
        answered.await.unwrap_or_else(|_| Err(ended()))
    }
}

/// The messages of one pipe, as tonic sends them.
pub(super) struct Outgoing(mpsc::Receiver<v1::PipelineRequests>);

impl futures::Stream for Outgoing {
    type Item = v1::PipelineRequests;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

/// What the pipe's task owns.
struct Task {
    queued: mpsc::Receiver<Call>,
    messages: mpsc::Sender<v1::PipelineRequests>,
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    next_id: u64,
}

impl Task {
    /// Runs until there is nobody left to ask for anything (`None`), or the stream ends.
    async fn run(&mut self, channel: Channel, opening: Result<tonic::Request<Outgoing>, Status>) -> Option<Status> {
        let mut client = KvClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let opened = match opening {
            Ok(request) => client.pipeline(request).await,
            Err(e) => Err(e),
        };
        let mut answers = match opened {
            Ok(response) => response.into_inner(),
            Err(e) => return Some(e),
        };
        let messages = self.messages.clone();
        loop {
            let room = self.waiting.len() < MAX_OUTSTANDING;
            // Looked at once: were it looked at for each of the two cases, a call that comes in between would fall into neither.
            let queued = !self.queued.is_empty();
            tokio::select! {
                answered = answers.next() => match answered {
                    Some(Ok(message)) => self.dispatch(message),
                    Some(Err(e)) => return Some(e),
                    None => return Some(Status::unavailable("the peer has ended the stream")),
                },
                permit = messages.reserve(), if room && queued => {
                    let Ok(permit) = permit else { return Some(Status::unavailable("the connection is gone")) };
                    let message = self.gather(None);
                    if !message.requests.is_empty() {
                        permit.send(message);
                    }
                }
                call = self.queued.recv(), if room && !queued => {
                    let call = call?;
                    let message = self.gather(Some(call));
                    if !message.requests.is_empty() && messages.send(message).await.is_err() {
                        return Some(Status::unavailable("the connection is gone"));
                    }
                }
            }
        }
    }

    /// One message of what is queued.
    fn gather(&mut self, first: Option<Call>) -> v1::PipelineRequests {
        let mut requests = Vec::new();
        let mut bytes = 0;
        let mut next = first.or_else(|| self.queued.try_recv().ok());
        while let Some(call) = next {
            // Who has given up is not asked for: a peer that is behind has enough to do.
            if !call.answer.is_closed() {
                let id = self.next_id;
                self.next_id += 1;
                let timeout_ms = u64::try_from(call.timeout.as_millis()).unwrap_or(u64::MAX).max(1);
                let request = v1::PipelineRequest { id, timeout_ms, request: Some(call.request) };
                bytes += request.encoded_len();
                requests.push(request);
                self.waiting.insert(id, call.answer);
            }
            let room = bytes < MESSAGE_BYTES && self.waiting.len() < MAX_OUTSTANDING;
            next = if room { self.queued.try_recv().ok() } else { None };
        }
        v1::PipelineRequests { requests }
    }

    fn dispatch(&mut self, message: v1::PipelineResponses) {
        for response in message.responses {
            let Some(answer) = self.waiting.remove(&response.id) else { continue };
            let result = match response.response {
                Some(Response::Error(error)) => Err(failed(error)),
                Some(response) => Ok(response),
                None => Err(Status::internal("the peer's answer is of an unknown kind")),
            };
            // Whoever asked may have given up.
            let _ = answer.send(result);
        }
    }

    /// Tells all that wait, and all that are queued, why there will be no answer.
    async fn end(mut self, why: Option<Status>) {
        let why = why.unwrap_or_else(|| Status::cancelled("the stream is no longer needed"));
        for (_, answer) in self.waiting.drain() {
            let _ = answer.send(Err(why.clone()));
        }
        let unsent = never_sent(&why);
        self.queued.close();
        while let Some(call) = self.queued.recv().await {
            let _ = call.answer.send(Err(unsent.clone()));
        }
    }
}

/// What is told to a call that never left: nothing has applied it, whatever became of those that did. A peer's own words
/// stay as they are.
fn never_sent(why: &Status) -> Status {
    if let Some(detail) = status::detail(why) {
        let detail = v1::ErrorDetail { applied: Applied::NotApplied as i32, ..detail };
        return status::with_detail(detail, why.message());
    }
    match why.code() {
        Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded | Code::Internal => {
            status::status(Kind::Unavailable, Applied::NotApplied, describe(why))
        }
        _ => why.clone(),
    }
}

fn failed(error: v1::CallError) -> Status {
    match error.detail {
        Some(detail) => status::with_detail(detail, error.message),
        None => Status::new(Code::Unknown, error.message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_never_left_was_not_applied() {
        let stopping = status::status(Kind::Unavailable, Applied::Unknown, "peer 1 is stopping");
        for why in [stopping, Status::unavailable("connection reset"), Status::unknown("h2 error")] {
            let unsent = never_sent(&why);
            let detail = status::detail(&unsent).unwrap();
            assert_eq!((detail.kind(), detail.applied()), (Kind::Unavailable, Applied::NotApplied), "{why}");
            assert_eq!(unsent.message(), why.message());
        }
        let refused = status::status(Kind::WrongIdentity, Applied::NotApplied, "another cluster");
        assert_eq!(status::detail(&never_sent(&refused)).unwrap().kind(), Kind::WrongIdentity);
        assert_eq!(never_sent(&Status::unimplemented("")).code(), Code::Unimplemented);
    }

    #[tokio::test]
    async fn who_has_given_up_is_not_asked_for() {
        let (_, queued) = mpsc::channel(1);
        let (messages, _) = mpsc::channel(1);
        let mut task = Task { queued, messages, waiting: HashMap::new(), next_id: 1 };
        let call = |key: &str| {
            let (answer, answered) = oneshot::channel();
            let request = Request::Get(v1::GetRequest { key: key.into(), options: None });
            (Call { request, timeout: Duration::from_secs(1), answer }, answered)
        };
        let (wanted, _answered) = call("/kv/a");
        assert_eq!(task.gather(Some(wanted)).requests.len(), 1);
        let (given_up, answered) = call("/kv/b");
        drop(answered);
        assert!(task.gather(Some(given_up)).requests.is_empty());
        assert_eq!(task.waiting.len(), 1);
    }
}
