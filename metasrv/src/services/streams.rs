//! Streams of answers, each served by a task of its own.
//!
//! Limits: [`MAX_STREAMS`] open at once, of which each caller has its part ([`crate::peer::shares`]); more are refused at once.
//! Messages that wait for their callers are counted ([`crate::peer::untaken`]).
//! The tasks end with their callers, and when the server stops, also one whose caller does not read: the server waits for them.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures::Stream;
use lake_proto::v1::error_detail::Kind;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use crate::log::lock;
use crate::peer::failure::Failure;
use crate::peer::shares::{Caller, Held, Pool, Resource};
use crate::peer::untaken::Untaken;

/// Streams open at once.
pub const MAX_STREAMS: usize = 50_000;
/// Messages that wait for a connection to take them.
const MESSAGES_WAITING: usize = 4;
/// Why a stream ends, once its messages have been taken.
type Why = Arc<Mutex<Option<Status>>>;

/// Where a stream's task puts its messages.
#[derive(Debug)]
pub struct Messages<T> {
    waiting: mpsc::Sender<(T, Held)>,
    why: Why,
    stop: CancellationToken,
    untaken: Untaken,
    caller: Caller,
}

impl<T: Message> Messages<T> {
    /// Puts a message there, once there is room for it in the stream. False: the caller is gone, or the server stops; the stream is
    /// over.
    pub async fn send(&self, message: T) -> bool {
        let held = self.untaken.note(&self.caller, message.encoded_len());
        tokio::select! {
            biased;
            sent = self.waiting.send((message, held)) => sent.is_ok(),
            () = self.stop.cancelled() => false,
        }
    }

    /// Says why the stream ends, unless that has been said. Its task ends next.
    pub fn end(&self, why: Failure) {
        lock(&self.why).get_or_insert(why.into());
    }

    /// Whether there is room for a message of so many bytes now.
    ///
    /// # Errors
    /// Overloaded.
    pub fn room(&self, bytes: usize) -> Result<(), Failure> {
        self.untaken.room(&self.caller, bytes)
    }

    /// Whether the caller may ask for more, or has too much that it has not taken.
    ///
    /// # Errors
    /// Overloaded.
    pub fn may_ask(&self) -> Result<(), Failure> {
        self.untaken.may_ask(&self.caller)
    }

    /// Resolves when the server stops.
    pub async fn stopped(&self) {
        self.stop.cancelled().await;
    }
}

/// A stream's messages for its connection, and why it ends.
#[derive(Debug)]
pub struct Answers<T> {
    messages: ReceiverStream<(T, Held)>,
    why: Why,
}

impl<T> Stream for Answers<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = std::task::ready!(Pin::new(&mut self.messages).poll_next(cx));
        Poll::Ready(match next {
            Some((message, _)) => Some(Ok(message)),
            None => lock(&self.why).take().map(Err),
        })
    }
}

/// The streams of one server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Streams {
    stop: CancellationToken,
    tasks: TaskTracker,
    shares: Pool,
    untaken: Untaken,
}

impl Streams {
    /// None yet; all end with `stop`. What waits for their callers counts in `untaken`.
    pub fn new(stop: CancellationToken, untaken: Untaken) -> Self {
        Self { stop, tasks: TaskTracker::new(), shares: Pool::new(Resource::Streams, MAX_STREAMS), untaken }
    }

    /// Opens a stream to a caller that `serve` fills.
    ///
    /// # Errors
    /// Overloaded.
    pub fn open<T, F>(&self, caller: &Caller, serve: impl FnOnce(Messages<T>) -> F) -> Result<Answers<T>, Failure>
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
        let (waiting, messages) = mpsc::channel(MESSAGES_WAITING);
        let why = Why::default();
        let serving = serve(Messages {
            waiting,
            why: why.clone(),
            stop: self.stop.clone(),
            untaken: self.untaken.clone(),
            caller: caller.clone(),
        });
        self.tasks.spawn(async move {
            serving.await;
            drop(share);
        });
        Ok(Answers { messages: ReceiverStream::new(messages), why })
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
    use std::time::Duration;

    use futures::StreamExt;

    use super::*;
    use crate::peer::shares::Callers;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn streams(untaken: Untaken) -> Streams {
        Streams::new(CancellationToken::new(), untaken)
    }

    #[tokio::test]
    async fn a_stream_that_nobody_reads_ends_with_the_server() {
        let streams = streams(Untaken::default());
        let serve = |messages: Messages<u64>| async move { while messages.send(1).await {} };
        let unread = streams.open(&Caller::own(), serve).unwrap();
        // Those in the stream, and one that has no room there.
        let waiting = (MESSAGES_WAITING + 1) * 1u64.encoded_len();
        let all_wait = async {
            while streams.untaken.bytes() < waiting {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, all_wait).await.expect("as many wait");
        streams.stop.cancel();
        tokio::time::timeout(PATIENCE, streams.ended()).await.expect("the task ends");
        assert!(streams.is_empty());
        drop(unread);
        assert_eq!(streams.untaken.bytes(), 0);
    }

    #[tokio::test]
    async fn why_a_stream_ends_is_told_after_what_it_has() {
        let streams = streams(Untaken::default());
        let serve = |messages: Messages<u64>| async move {
            for n in 1..=MESSAGES_WAITING as u64 {
                assert!(messages.send(n).await);
            }
            messages.end(Failure::invalid("the reason"));
            messages.end(Failure::invalid("what came of it"));
        };
        let mut answers = streams.open(&Caller::own(), serve).unwrap();
        tokio::time::timeout(PATIENCE, streams.ended()).await.expect("the task ends");
        for n in 1..=MESSAGES_WAITING as u64 {
            assert_eq!(answers.next().await.unwrap().unwrap(), n);
        }
        assert_eq!(answers.next().await.unwrap().unwrap_err().message(), "the reason");
        assert!(answers.next().await.is_none());
    }

    #[tokio::test]
    async fn who_has_its_part_of_all_streams_is_refused_and_another_is_not() {
        let (streams, callers) = (streams(Untaken::default()), Callers::default());
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
