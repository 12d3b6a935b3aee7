//! Watching the cluster: changes as they happen, whichever peer lives (semantics, section 7).
//!
//! One task follows one peer and puts what that sends into a bounded queue. When the peer or the connection fails it goes
//! on at the next endpoint, from the revision after the last progress, so that nothing is lost and nothing comes twice.
//!
//! | what happens                              | what follows                                                       |
//! |-------------------------------------------|--------------------------------------------------------------------|
//! | connection or peer lost, overloaded       | the next endpoint, after a wait                                    |
//! | something else answers there              | the same; the end, if that is so of one endpoint after the other   |
//! | no peer serves for [`PATIENCE`]           | `Unavailable`, the end                                             |
//! | the changes are no longer kept            | `Compacted`, the end: list again, watch from the revision after it |
//! | the caller does not take its messages     | the peer's stream is let go, and taken up again from that place    |
//! | the watch is dropped                      | the task ends                                                      |
//!
//! The caller that falls behind holds up nobody: a stream that nobody reads would in the end stop the connection it shares
//! with other calls, so it is closed after [`ROOM_WITHIN`].

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::Stream;
use lake_proto::kv::{Revision, validate_prefix};
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::watch_client::WatchClient;
use lake_proto::watch::Changes;
use lake_proto::{MAX_WATCH_MESSAGE_BYTES, v1};
use rand::Rng;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tonic::Status;

use super::RemoteStore;
use super::attempts::{Failure, classify, describe, ended};
use super::connections::Inner;
use crate::backoff::Backoff;
use crate::clock;
use crate::store::{Applied, Error, InVain};

/// How long no peer may serve before the watch ends with `Unavailable`.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Messages that wait for the caller. One has about half a MiB, or one change.
const MESSAGES_WAITING: usize = 8;
/// How long a message waits for room before the peer's stream is let go.
const ROOM_WITHIN: Duration = Duration::from_millis(500);
/// How long a peer may take to open a stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(4);
/// A stream that has lived so long counts as served, also without a message.
const SETTLED: Duration = Duration::from_secs(1);

/// A watch. A stream that ends after its first error; dropping it ends the watch.
#[derive(Debug)]
pub struct Watch {
    messages: mpsc::Receiver<Result<Changes, Error>>,
    opened: Option<oneshot::Receiver<()>>,
    task: JoinHandle<()>,
}

impl Watch {
    /// Waits until a peer has taken the watch on, or it has ended. False: neither is so by the deadline.
    pub async fn opened(&mut self, deadline: Instant) -> bool {
        let Some(opened) = &mut self.opened else { return true };
        let in_time = tokio::time::timeout_at(deadline.into(), opened).await.is_ok();
        if in_time {
            self.opened = None;
        }
        in_time
    }

    /// The next message; `None` after an error.
    pub async fn next(&mut self) -> Option<Result<Changes, Error>> {
        self.messages.recv().await
    }
}

impl Stream for Watch {
    type Item = Result<Changes, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.messages.poll_recv(cx)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RemoteStore {
    /// Watches every change under `prefix` from a revision on; 0: from what the first peer that answers has applied, the
    /// next one on. Its first message, once it has caught up, comes at once and says from where that was.
    ///
    /// Call it inside a tokio runtime.
    ///
    /// # Errors
    /// A prefix that is too long. What happens later comes through the stream.
    pub fn watch(&self, prefix: &str, from: Revision) -> Result<Watch, Error> {
        validate_prefix(prefix)?;
        let (sender, messages) = mpsc::channel(MESSAGES_WAITING);
        let (open, opened) = oneshot::channel();
        let follower = Follower {
            inner: self.inner.clone(),
            prefix: prefix.to_owned(),
            next: from,
            cluster_id: None,
            failing_since: None,
            opened: None,
            tell_opened: Some(open),
            backoff: Backoff::default(),
            attempts: 0,
            refused: 0,
            messages: sender,
        };
        Ok(Watch { messages, opened: Some(opened), task: tokio::spawn(follower.run()) })
    }
}

struct Follower {
    inner: Arc<Inner>,
    prefix: String,
    /// The first revision that has not been seen; 0 until the first message, if none was given.
    next: Revision,
    /// Revisions of another cluster mean nothing here.
    cluster_id: Option<String>,
    /// Since when no peer serves.
    failing_since: Option<Instant>,
    /// When the stream that is followed was opened.
    opened: Option<Instant>,
    /// Who waits for the first one to be.
    tell_opened: Option<oneshot::Sender<()>>,
    backoff: Backoff,
    /// Since a peer served last.
    attempts: u32,
    /// Endpoints in a row that said that they will never serve it.
    refused: usize,
    messages: mpsc::Sender<Result<Changes, Error>>,
}

/// Why one peer is no longer followed.
enum Ended {
    /// Nobody listens any more.
    Dropped,
    /// The caller is too slow; what did not fit has not been seen.
    Full,
    Failed(Failure),
}

impl Follower {
    async fn run(mut self) {
        let mut turn = rand::rng().random_range(0..super::MAX_ENDPOINTS);
        // The peers need not be asked who leads, but for what comes with the answer: the cluster's id and its members.
        if self.inner.lock().view.leader().is_none() {
            self.inner.ask().await;
        }
        loop {
            let endpoints = self.inner.endpoints();
            let address = &endpoints[turn % endpoints.len()];
            self.attempts = self.attempts.saturating_add(1);
            let ended_by = self.follow(address).await;
            if self.opened.take().is_some_and(|at| clock::since(at) >= SETTLED) {
                self.served();
            }
            let failure = match ended_by {
                Ended::Dropped => return,
                Ended::Full => match self.messages.reserve_many(MESSAGES_WAITING).await {
                    Ok(_) => continue,
                    Err(_) => return,
                },
                Ended::Failed(failure) => failure,
            };
            let last = format!("{address}: {}", describe(&failure.status));
            tracing::debug!(prefix = self.prefix, next = self.next, error = last, "a watch was lost");
            if failure.broken {
                self.inner.lock().forget_connection(address);
                self.inner.members_may_have_changed();
            }
            let failing_for = clock::since(*self.failing_since.get_or_insert_with(clock::now));
            self.refused = if failure.retry { 0 } else { self.refused + 1 };
            // Another peer says the same of what was asked; of who was asked, each speaks for itself.
            let by_all = matches!(failure.kind(), Some(Kind::Compacted | Kind::InvalidArgument));
            let end = if by_all || self.refused >= endpoints.len() {
                ended(self.in_vain(last, failing_for), &failure, false)
            } else if failing_for >= PATIENCE {
                self.in_vain(last, failing_for).unavailable(endpoints, Applied::No)
            } else {
                turn += 1;
                tokio::time::sleep(self.backoff.next_wait()).await;
                if (self.attempts as usize).is_multiple_of(endpoints.len()) {
                    // None of them serves: members that were not known may have come.
                    self.inner.ask().await;
                }
                continue;
            };
            // The caller may be gone as well.
            let _ = self.messages.send(Err(end)).await;
            return;
        }
    }

    /// Follows one peer for as long as that goes well.
    async fn follow(&mut self, address: &str) -> Ended {
        let mut stream = match tokio::time::timeout(OPEN_TIMEOUT, self.open(address)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(status)) => return Ended::Failed(classify(status)),
            Err(_) => {
                let what = format!("no answer within {:.1} s", OPEN_TIMEOUT.as_secs_f64());
                return Ended::Failed(classify(Status::deadline_exceeded(what)));
            }
        };
        self.opened = Some(clock::now());
        if let Some(waiting) = self.tell_opened.take() {
            // Whoever waited may have given up.
            let _ = waiting.send(());
        }
        loop {
            let message = tokio::select! {
                () = self.messages.closed() => return Ended::Dropped,
                message = stream.message() => message,
            };
            let response = match message {
                Ok(Some(response)) => response,
                Ok(None) => return Ended::Failed(classify(Status::unavailable("the peer ended the stream"))),
                Err(status) => return Ended::Failed(classify(status)),
            };
            match self.take(response).await {
                Ok(()) => {}
                Err(ended) => return ended,
            }
        }
    }

    async fn open(&self, address: &str) -> Result<tonic::Streaming<v1::WatchResponse>, Status> {
        let mut client =
            WatchClient::new(self.inner.channel(address)?).max_decoding_message_size(MAX_WATCH_MESSAGE_BYTES);
        let message = v1::WatchRequest { prefix: self.prefix.clone(), from_revision: self.next };
        Ok(client.watch(self.inner.untimed(message)?).await?.into_inner())
    }

    /// Passes a message on, and then counts it as seen.
    async fn take(&mut self, response: v1::WatchResponse) -> Result<(), Ended> {
        let defect = |what: String| Ended::Failed(Failure::fatal(Status::internal(what)));
        let v1::ResponseHeader { cluster_id, membership, .. } = response.header.clone().unwrap_or_default();
        let ours = self.cluster_id.get_or_insert_with(|| cluster_id.clone());
        if *ours != cluster_id {
            return Err(defect(format!(
                "the watch began in cluster {ours} and would go on in cluster {cluster_id}: correct the endpoints"
            )));
        }
        let changes = Changes::try_from(response).map_err(|e| defect(format!("the peer's message: {e}")))?;
        let progress = changes.progress;
        if progress.saturating_add(1) < self.next
            || changes.changes.iter().any(|c| c.revision < self.next || c.revision > progress)
        {
            return Err(defect(format!("the peer's message goes back behind revision {}", self.next)));
        }
        match self.messages.try_send(Ok(changes)) {
            Ok(()) => {}
            Err(TrySendError::Closed(_)) => return Err(Ended::Dropped),
            Err(TrySendError::Full(changes)) => {
                match tokio::time::timeout(ROOM_WITHIN, self.messages.send(changes)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return Err(Ended::Dropped),
                    Err(_) => return Err(Ended::Full),
                }
            }
        }
        self.next = progress.saturating_add(1);
        self.served();
        self.inner.keep_members(membership);
        Ok(())
    }

    fn served(&mut self) {
        (self.failing_since, self.refused) = (None, 0);
        self.backoff = Backoff::default();
        self.attempts = 0;
    }

    fn in_vain(&self, last: String, elapsed: Duration) -> InVain {
        let doing = format!("watching {:?} from revision {} on", self.prefix, self.next);
        let leader = self.inner.lock().view.leading();
        InVain { doing, attempts: self.attempts, elapsed, leader, last }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use lake_proto::v1::watch_server::{Watch as Watching, WatchServer};
    use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
    use tonic::service::Routes;
    use tonic::transport::Server;
    use tonic::{Request, Response};

    use super::*;
    use crate::remote::RemoteConfig;
    use crate::store::MetaStore;

    /// A peer that tells of one progress, and of nothing after it.
    struct Quiet;

    #[tonic::async_trait]
    impl Watching for Quiet {
        type WatchStream = ReceiverStream<Result<v1::WatchResponse, Status>>;

        async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
            let (sender, messages) = mpsc::channel(1);
            sender
                .try_send(Ok(v1::WatchResponse { progress_revision: 5, ..Default::default() }))
                .expect("there is room");
            tokio::spawn(async move { sender.closed().await });
            Ok(Response::new(ReceiverStream::new(messages)))
        }
    }

    async fn serving(routes: Routes) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        // It ends with the test's runtime.
        tokio::spawn(Server::builder().add_routes(routes).serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }

    fn store(endpoints: &[SocketAddr]) -> RemoteStore {
        let endpoints = endpoints.iter().map(ToString::to_string).collect();
        RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap()
    }

    fn soon() -> Instant {
        clock::now() + Duration::from_secs(30)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_endpoint_where_something_else_answers_ends_no_watch() {
        let peer = serving(Routes::new(WatchServer::new(Quiet))).await;
        let other = serving(Routes::default()).await;
        // Which endpoint is first is chance.
        for _ in 0..16 {
            let mut watch = store(&[peer, other]).watch("/kv/", 6).unwrap();
            let told = tokio::time::timeout_at(soon().into(), watch.next()).await.expect("in time");
            assert_eq!(told.unwrap().unwrap().progress, 5);
        }
        let mut watch = store(&[other]).watch("/kv/", 6).unwrap();
        let told = tokio::time::timeout_at(soon().into(), watch.next()).await.expect("in time").unwrap();
        assert!(told.unwrap_err().to_string().contains("something else than a metadata peer"));
        assert!(watch.next().await.is_none());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_watch_that_nobody_takes_on_is_not_said_to_be_one() {
        // Connections are made, and nobody answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let store = store(&[silent.local_addr().unwrap()]);
        let by = clock::now() + Duration::from_millis(300);
        let Err(error) = MetaStore::watch(&store, "/kv/", 6, by).await else { panic!("nobody is there") };
        assert!(error.is_unavailable() && clock::now() >= by, "{error}");
        let peer = serving(Routes::new(WatchServer::new(Quiet))).await;
        let store = self::store(&[peer]);
        assert!(MetaStore::watch(&store, "/kv/", 6, soon()).await.is_ok());
    }
}
