//! Streams of answers, each served by a task of its own.
//!
//! Limits: [`MAX_STREAMS`] open at once, more are refused at once. The tasks end with their callers, and when the server
//! stops, also one whose caller does not read: the server waits for them.

use lake_proto::v1::error_detail::Kind;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use crate::peer::failure::Failure;

/// Streams open at once.
pub const MAX_STREAMS: usize = 50_000;
/// Messages that wait for a connection to take them.
const MESSAGES_WAITING: usize = 4;

/// Where a stream's task puts its messages.
#[derive(Debug)]
pub struct Messages<T> {
    waiting: mpsc::Sender<Result<T, Status>>,
    stop: CancellationToken,
}

impl<T> Messages<T> {
    /// Puts a message there, once there is room for it. False: the caller is gone, or the server stops; the stream is over.
    pub async fn send(&self, message: Result<T, Status>) -> bool {
        tokio::select! {
            biased;
            sent = self.waiting.send(message) => sent.is_ok(),
            () = self.stop.cancelled() => false,
        }
    }

    /// Says why the stream ends, if there is room for that.
    pub fn end(&self, why: Failure) {
        // The caller may be gone as well.
        let _ = self.waiting.try_send(Err(why.into()));
    }

    /// Resolves when the server stops.
    pub async fn stopped(&self) {
        self.stop.cancelled().await;
    }
}

/// The streams of one server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Streams {
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Streams {
    /// None yet; all end with `stop`.
    pub fn new(stop: CancellationToken) -> Self {
        Self { stop, tasks: TaskTracker::new() }
    }

    /// Opens a stream that `serve` fills.
    ///
    /// # Errors
    /// Overloaded.
    pub fn open<T, F>(&self, serve: impl FnOnce(Messages<T>) -> F) -> Result<ReceiverStream<Result<T, Status>>, Failure>
    where
        T: Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        if self.tasks.len() >= MAX_STREAMS {
            return Err(Failure::new(Kind::Overloaded, format!("{MAX_STREAMS} streams are open, which is the most")));
        }
        let (waiting, stream) = mpsc::channel(MESSAGES_WAITING);
        self.tasks.spawn(serve(Messages { waiting, stop: self.stop.clone() }));
        Ok(ReceiverStream::new(stream))
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether none is open.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Waits for the end of all, once they have been told to stop.
    pub async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_that_nobody_reads_ends_with_the_server() {
        let stop = CancellationToken::new();
        let streams = Streams::new(stop.clone());
        let serve = |messages: Messages<u64>| async move { while messages.send(Ok(1)).await {} };
        let unread = streams.open(serve).unwrap();
        while unread.as_ref().len() < MESSAGES_WAITING {
            tokio::task::yield_now().await;
        }
        stop.cancel();
        tokio::time::timeout(std::time::Duration::from_secs(30), streams.ended()).await.expect("the task ends");
        assert!(streams.is_empty());
    }
}
