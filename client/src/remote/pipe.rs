//! Many calls on one stream to one peer (`Kv.Pipeline`), so that calls made together cost little more than one.
//!
//! One task owns the stream. It sends what has been queued by the time the stream takes more, as one message, and hands
//! each answer to whoever waits for it. It is ended with the last handle, and ends with the stream, or when the peer cannot
//! be reached; all that wait are then told why, and a new pipe is opened by the next call.
//!
//! Limits: [`MAX_OUTSTANDING`] calls unanswered and as many queued, beyond which callers wait within their deadlines;
//! [`MESSAGE_BYTES`] in one message. A caller that gives up is forgotten; its call runs its course at the peer, if it has left. One
//! that has not left when its time is nearly over is taken back, and its caller told that it was not made ([`NotSent`]).

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
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::attempts::{NotSent, describe};

/// Calls on one pipe that are unanswered; the peer allows no more.
const MAX_OUTSTANDING: usize = 1000;
/// A message takes up no more calls once it has this many bytes.
const MESSAGE_BYTES: usize = 1 << 20;
/// How long before its time is over a call that has not left is taken back, at the most: its caller is to hear of it in time.
const TAKEN_BACK_BEFORE: Duration = Duration::from_millis(20);
/// Messages that wait for the connection.
const MESSAGES_WAITING: usize = 2;

type Answer = Result<Response, Status>;

struct Call {
    request: Request,
    timeout: Duration,
    answer: oneshot::Sender<Answer>,
    /// Set by who sends it, or by its caller who takes it back: whoever is first.
    taken: Arc<AtomicBool>,
}

/// A stream to one peer. Cheap to clone; the last clone ends it.
#[derive(Debug, Clone)]
pub(super) struct Pipe {
    calls: mpsc::Sender<Call>,
    ended: Arc<AtomicBool>,
    /// Whoever waits for an answer has a handle, so nobody waits when the last one goes.
    _task: Arc<AbortOnDropHandle<()>>,
}

impl Pipe {
    /// Opens a stream over `channel`. `opening` is the request that opens it, with the metadata of every call.
    pub fn open(channel: Channel, opening: impl FnOnce(Outgoing) -> Result<tonic::Request<Outgoing>, Status>) -> Self {
        let (calls, queued) = mpsc::channel(MAX_OUTSTANDING);
        let (messages, outgoing) = mpsc::channel(MESSAGES_WAITING);
        let ended = Arc::new(AtomicBool::new(false));
        let opening = opening(Outgoing(outgoing));
        let task = tokio::spawn({
            let ended = ended.clone();
            async move {
                let mut task = Task { queued, first: None, messages, waiting: HashMap::new(), next_id: 1 };
                let why = task.run(channel, opening).await;
                ended.store(true, Ordering::Release);
                task.end(why).await;
            }
        });
        Self { calls, ended, _task: Arc::new(AbortOnDropHandle::new(task)) }
    }

    /// Whether calls on it can only fail.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Makes a call. The peer is told how long the answer may take; the caller keeps to that by itself.
    pub async fn call(&self, request: Request, timeout: Duration) -> Answer {
        let (answer, mut answered) = oneshot::channel();
        let taken = Arc::new(AtomicBool::new(false));
        let ended = || Status::unavailable("the stream to the peer has ended");
        let until = tokio::time::Instant::now() + timeout - TAKEN_BACK_BEFORE.min(timeout / 20);
        let call = Call { request, timeout, answer, taken: taken.clone() };
        match tokio::time::timeout_at(until, self.calls.send(call)).await {
            Ok(queued) => queued.map_err(|_| never_sent(&ended()))?,
            Err(_) => return Err(NotSent(timeout).into()),
        }
        let answer = match tokio::time::timeout_at(until, &mut answered).await {
            Ok(answer) => answer,
            Err(_) if !taken.swap(true, Ordering::AcqRel) => return Err(NotSent(timeout).into()),
            Err(_) => answered.await,
        };
        answer.unwrap_or_else(|_| Err(ended()))
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
    /// Taken from the queue when that was empty, and not sent yet.
    first: Option<Call>,
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
            let some = self.first.is_some() || !self.queued.is_empty();
            // Answers are read whatever else is waited for: a peer that cannot be rid of them reads no requests.
            tokio::select! {
                answered = answers.next() => match answered {
                    Some(Ok(message)) => self.dispatch(message),
                    Some(Err(e)) => return Some(e),
                    None => return Some(Status::unavailable("the peer has ended the stream")),
                },
                permit = messages.reserve(), if room && some => {
                    let Ok(permit) = permit else { return Some(Status::unavailable("the connection is gone")) };
                    let message = self.gather();
                    if !message.requests.is_empty() {
                        permit.send(message);
                    }
                }
                call = self.queued.recv(), if !some => self.first = Some(call?),
            }
        }
    }

    /// One message of what is queued.
    fn gather(&mut self) -> v1::PipelineRequests {
        let mut requests = Vec::new();
        let mut bytes = 0;
        let mut next = self.first.take().or_else(|| self.queued.try_recv().ok());
        while let Some(call) = next {
            // Who has given up is not asked for: a peer that is behind has enough to do.
            if !call.answer.is_closed() && !call.taken.swap(true, Ordering::AcqRel) {
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
        if let Some(call) = self.first.take() {
            let _ = call.answer.send(Err(unsent.clone()));
        }
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
    use futures::stream::FuturesUnordered;
    use lake_proto::v1::kv_server::{Kv, KvServer};
    use tokio::sync::Notify;
    use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
    use tonic::{Response as Answered, Streaming};

    use super::*;
    use crate::remote::attempts::classify;
    use crate::remote::{RemoteConfig, RemoteStore};

    /// A peer that reads no requests while it is not rid of its answers.
    struct Talkative {
        /// Waited for after the first message of requests.
        go_on: Arc<Notify>,
    }

    /// What it says first, which nobody asked for: more than a connection holds.
    const CHATTER_BYTES: usize = 1 << 20;
    const CHATTER: usize = 16;

    #[tonic::async_trait]
    impl Kv for Talkative {
        type PipelineStream = ReceiverStream<Result<v1::PipelineResponses, Status>>;

        async fn pipeline(
            &self,
            request: tonic::Request<Streaming<v1::PipelineRequests>>,
        ) -> Result<Answered<Self::PipelineStream>, Status> {
            let (sender, answers) = mpsc::channel(1);
            let (mut requests, go_on) = (request.into_inner(), self.go_on.clone());
            tokio::spawn(async move {
                let mut quiet = true;
                while let Ok(Some(message)) = requests.message().await {
                    let id = |id| {
                        let entry = v1::KeyValue { value: vec![0; CHATTER_BYTES].into(), ..Default::default() };
                        let header = Some(v1::ResponseHeader { membership: 7, ..Default::default() });
                        let get = v1::GetResponse { header, entry: Some(entry) };
                        v1::PipelineResponse { id, response: Some(Response::Get(get)) }
                    };
                    let mut responses: Vec<_> = message.requests.iter().map(|request| id(request.id)).collect();
                    if std::mem::take(&mut quiet) {
                        go_on.notified().await;
                        responses.extend((0..CHATTER).map(|_| id(u64::MAX)));
                    }
                    for response in responses {
                        if sender.send(Ok(v1::PipelineResponses { responses: vec![response] })).await.is_err() {
                            return;
                        }
                    }
                }
            });
            Ok(Answered::new(ReceiverStream::new(answers)))
        }

        async fn get(&self, _: tonic::Request<v1::GetRequest>) -> Result<Answered<v1::GetResponse>, Status> {
            unreachable!()
        }

        async fn batch_get(
            &self,
            _: tonic::Request<v1::BatchGetRequest>,
        ) -> Result<Answered<v1::BatchGetResponse>, Status> {
            unreachable!()
        }

        async fn list(&self, _: tonic::Request<v1::ListRequest>) -> Result<Answered<v1::ListResponse>, Status> {
            unreachable!()
        }

        async fn open_snapshot(
            &self,
            _: tonic::Request<v1::OpenSnapshotRequest>,
        ) -> Result<Answered<v1::OpenSnapshotResponse>, Status> {
            unreachable!()
        }

        async fn close_snapshot(
            &self,
            _: tonic::Request<v1::CloseSnapshotRequest>,
        ) -> Result<Answered<v1::CloseSnapshotResponse>, Status> {
            unreachable!()
        }

        async fn txn(&self, _: tonic::Request<v1::TxnRequest>) -> Result<Answered<v1::TxnResponse>, Status> {
            unreachable!()
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn large_requests_and_large_answers_do_not_wait_for_each_other() {
        let go_on = Arc::new(Notify::new());
        let service = KvServer::new(Talkative { go_on: go_on.clone() }).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder().add_service(service);
        let server = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy();
        let pipe = Pipe::open(channel, |outgoing| Ok(tonic::Request::new(outgoing)));
        let mut calls = FuturesUnordered::new();
        for _ in 0..16 {
            let keys = vec!["k".repeat(MESSAGE_BYTES)];
            let request = Request::BatchGet(v1::BatchGetRequest { keys, options: None });
            let mut call = Box::pin(pipe.call(request, Duration::from_secs(60)));
            assert!(futures::poll!(&mut call).is_pending(), "it is queued now");
            calls.push(call);
            // One by one: the queue is empty whenever one comes, until the connection takes no more.
            for _ in 0..50 {
                tokio::time::sleep(Duration::from_millis(1)).await;
                if pipe.calls.capacity() == pipe.calls.max_capacity() {
                    break;
                }
            }
        }
        go_on.notify_one();
        let answered = async {
            while let Some(answer) = calls.next().await {
                assert!(matches!(answer, Ok(Response::Get(_))));
            }
        };
        tokio::time::timeout(Duration::from_secs(30), answered).await.expect("every call is answered");
        server.abort();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_answer_that_tells_of_a_newer_membership_has_the_members_asked_for_soon() {
        let go_on = Arc::new(Notify::new());
        go_on.notify_one();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tonic::transport::Server::builder().add_service(KvServer::new(Talkative { go_on }));
        let server = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let store = RemoteStore::connect(RemoteConfig { endpoints: vec![address.clone()], secret: None }).unwrap();
        for is_news in [true, false] {
            let far = crate::clock::now() + Duration::from_secs(3600);
            store.inner.lock().members_due = Some(far);
            let get = Request::Get(v1::GetRequest { key: "/kv/a".into(), options: None });
            store.inner.piped(&address, get, Duration::from_secs(30), Some).await.unwrap();
            assert_eq!(store.inner.lock().members_due.is_some_and(|due| due < far), is_news);
        }
        server.abort();
    }

    #[tokio::test]
    async fn a_call_on_a_pipe_that_has_ended_was_not_applied() {
        let (calls, queued) = mpsc::channel(1);
        drop(queued);
        let task = Arc::new(AbortOnDropHandle::new(tokio::spawn(async {})));
        let pipe = Pipe { calls, ended: Arc::default(), _task: task };
        let get = Request::Get(v1::GetRequest { key: "/kv/a".into(), options: None });
        let failed = pipe.call(get, Duration::from_secs(1)).await.unwrap_err();
        assert_eq!(status::detail(&failed).unwrap().applied(), Applied::NotApplied, "{failed}");
    }

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
        let mut task = Task { queued, first: None, messages, waiting: HashMap::new(), next_id: 1 };
        let call = |key: &str| {
            let (answer, answered) = oneshot::channel();
            let request = Request::Get(v1::GetRequest { key: key.into(), options: None });
            (Call { request, timeout: Duration::from_secs(1), answer, taken: Arc::default() }, answered)
        };
        let (wanted, _answered) = call("/kv/a");
        task.first = Some(wanted);
        assert_eq!(task.gather().requests.len(), 1);
        let (given_up, answered) = call("/kv/b");
        drop(answered);
        task.first = Some(given_up);
        assert!(task.gather().requests.is_empty());
        let (taken_back, _answered) = call("/kv/c");
        taken_back.taken.store(true, Ordering::Release);
        task.first = Some(taken_back);
        assert!(task.gather().requests.is_empty());
        assert_eq!(task.waiting.len(), 1);
    }

    #[tokio::test]
    async fn a_call_that_could_not_be_sent_in_time_was_not_applied() {
        // Connections are made, and nobody answers: the stream is never opened.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let channel = Channel::from_shared(format!("http://{}", silent.local_addr().unwrap())).unwrap().connect_lazy();
        let pipe = Pipe::open(channel, |outgoing| Ok(tonic::Request::new(outgoing)));
        let within = Duration::from_millis(200);
        let get = Request::Get(v1::GetRequest { key: "/kv/a".into(), options: None });
        let unsent =
            tokio::time::timeout(within, pipe.call(get, within)).await.expect("a little before its time is over");
        let failure = classify(unsent.unwrap_err());
        assert!(failure.applied == crate::store::Applied::No && failure.retry && !failure.broken);
    }
}
