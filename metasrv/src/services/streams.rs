//! Streams of answers, each served by a task of its own.
//!
//! Limits: [`MAX_STREAMS`] open at once, of which each caller has its part ([`crate::peer::shares`]); more are refused at once.
//! The tasks end with their callers, and when the server stops, also one whose caller does not read: the server waits for them.

use lake_proto::v1::error_detail::Kind;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use crate::peer::failure::Failure;
use crate::peer::shares::{Caller, Pool, Resource};

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
    shares: Pool,
}

impl Streams {
    /// None yet; all end with `stop`.
    pub fn new(stop: CancellationToken) -> Self {
        Self { stop, tasks: TaskTracker::new(), shares: Pool::new(Resource::Streams, MAX_STREAMS) }
    }

    /// Opens a stream to a caller that `serve` fills.
    ///
    /// # Errors
    /// Overloaded.
    pub fn open<T, F>(
        &self,
        caller: &Caller,
        serve: impl FnOnce(Messages<T>) -> F,
    ) -> Result<ReceiverStream<Result<T, Status>>, Failure>
    where
        T: Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let share = self.shares.take(caller, 1).map_err(|refused| {
            let what = format!(
                "{refused} has as many streams open as it may have, of {MAX_STREAMS}: send more on each of them, or ask another \
                 peer"
            );
            Failure::new(Kind::Overloaded, what)
        })?;
        let (waiting, stream) = mpsc::channel(MESSAGES_WAITING);
        let serving = serve(Messages { waiting, stop: self.stop.clone() });
        self.tasks.spawn(async move {
            serving.await;
            drop(share);
        });
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
    use crate::peer::shares::Callers;

    #[tokio::test]
    async fn a_stream_that_nobody_reads_ends_with_the_server() {
        let stop = CancellationToken::new();
        let streams = Streams::new(stop.clone());
        let serve = |messages: Messages<u64>| async move { while messages.send(Ok(1)).await {} };
        let unread = streams.open(&Caller::own(), serve).unwrap();
        while unread.as_ref().len() < MESSAGES_WAITING {
            tokio::task::yield_now().await;
        }
        stop.cancel();
        tokio::time::timeout(std::time::Duration::from_secs(30), streams.ended()).await.expect("the task ends");
        assert!(streams.is_empty());
    }

    #[tokio::test]
    async fn who_has_its_part_of_all_streams_is_refused_and_another_is_not() {
        let (streams, callers) = (Streams::new(CancellationToken::new()), Callers::default());
        let [greedy, modest] = [1, 2].map(|port| callers.at(Some(([10, 0, 0, 1], port).into())));
        let until_stopped = |messages: Messages<()>| async move { messages.stopped().await };
        let refused = loop {
            if let Err(refused) = streams.open(&greedy, until_stopped) {
                break refused;
            }
        };
        assert!((5_000..MAX_STREAMS / 2).contains(&streams.len()), "{}", streams.len());
        assert!(refused.kind == Kind::Overloaded && refused.message.starts_with("this connection"), "{refused:?}");
        streams.open(&modest, until_stopped).unwrap();
        streams.stop.cancel();
        streams.ended().await;
        assert_eq!(streams.shares.taken(), 0);
    }
}
