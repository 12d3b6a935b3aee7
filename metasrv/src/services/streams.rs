//! Streams of answers, each served by a task of its own.
//!
//! Limits: [`MAX_STREAMS`] open at once, more are refused at once. The tasks end with their callers, and when the server
//! stops: it waits for them.

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
pub type Messages<T> = mpsc::Sender<Result<T, Status>>;

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
    pub fn open<T, F>(
        &self,
        serve: impl FnOnce(Messages<T>, CancellationToken) -> F,
    ) -> Result<ReceiverStream<Result<T, Status>>, Failure>
    where
        T: Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        if self.tasks.len() >= MAX_STREAMS {
            return Err(Failure::new(Kind::Overloaded, format!("{MAX_STREAMS} streams are open, which is the most")));
        }
        let (messages, stream) = mpsc::channel(MESSAGES_WAITING);
        self.tasks.spawn(serve(messages, self.stop.clone()));
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
