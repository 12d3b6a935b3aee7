//! Connections as they come in: how many there may be, and what happens when the system gives none.
//!
//! Each takes its share of what the listener may have ([`crate::peer::shares`]) for as long as it lasts. One beyond that is
//! closed at once, so that whoever made it turns to another peer instead of waiting here. When the system cannot give a
//! connection, having no descriptor or no memory left for it, the next one is waited for after [`PAUSE`]; nothing else of the
//! peer is touched by that.
//!
//! Limits: [`max_connections`] of clients, [`MAX_PEER_CONNECTIONS`] of other peers. What is refused is told once in
//! [`TELL_EVERY`].

use std::any::Any;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use lake_client::clock;
use rustix::process::{Resource as Limit, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::peer::shares::{Callers, Held, Pool};

/// Connections of clients at once, where the process may have as many descriptors.
const MAX_CONNECTIONS: usize = 8_192;
/// Connections of other peers at once.
pub const MAX_PEER_CONNECTIONS: usize = 1_024;
/// How long until another connection is waited for when the system could not give one.
const PAUSE: Duration = Duration::from_millis(100);
/// How often it is told that connections are refused.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Connections of clients at once: half of the descriptors that the process may have is left for everything else.
pub fn max_connections() -> usize {
    let descriptors = getrlimit(Limit::Nofile).current.and_then(|most| usize::try_from(most).ok());
    descriptors.map_or(MAX_CONNECTIONS, |most| (most / 2).min(MAX_CONNECTIONS))
}

/// A connection that counts while it lasts.
#[derive(Debug)]
pub struct Counted<IO> {
    io: IO,
    _share: Held,
}

impl<IO> Counted<IO> {
    /// With the share that it has.
    pub(crate) fn new(io: IO, share: Held) -> Self {
        Self { io, _share: share }
    }
}

/// What comes in of `incoming`, each with its share of `pool`. `what` says who connects.
pub fn accept<S, IO>(
    what: &'static str,
    incoming: S,
    callers: Callers,
    pool: Pool,
) -> impl Stream<Item = io::Result<Counted<IO>>> + Send + 'static
where
    S: Stream<Item = io::Result<IO>> + Send + 'static,
    IO: Connected + Send + 'static,
{
    let accepting = Accepting { what, incoming: incoming.boxed(), callers, pool, told: None };
    futures::stream::unfold(accepting, |mut accepting| async move {
        let accepted = accepting.next().await?;
        Some((Ok(accepted), accepting))
    })
}

struct Accepting<IO> {
    what: &'static str,
    incoming: BoxStream<'static, io::Result<IO>>,
    callers: Callers,
    pool: Pool,
    /// When it was last told that connections are refused.
    told: Option<Instant>,
}

impl<IO: Connected> Accepting<IO> {
    async fn next(&mut self) -> Option<Counted<IO>> {
        loop {
            match self.incoming.next().await? {
                Ok(io) => {
                    let info = io.connect_info();
                    let tcp = (&info as &dyn Any).downcast_ref::<TcpConnectInfo>();
                    let address = tcp.and_then(TcpConnectInfo::remote_addr);
                    match self.pool.take(&self.callers.at(address), 1) {
                        Ok(share) => return Some(Counted::new(io, share)),
                        Err(refused) => self.tell(&format!("{refused} ({address:?}) has as many as it may have")),
                    }
                }
                Err(e) if of_one_connection(e.kind()) => tracing::debug!("a connection of {}: {e}", self.what),
                Err(e) => {
                    self.tell(&format!(
                        "{e}; if these are descriptors, have the process start with more of them (ulimit -n)"
                    ));
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    fn tell(&mut self, why: &str) {
        if self.told.is_none_or(|at| clock::since(at) >= TELL_EVERY) {
            self.told = Some(clock::now());
            tracing::warn!("connections of {} are refused: {why}", self.what);
        }
    }
}

/// Whether this says something of one connection only.
fn of_one_connection(kind: io::ErrorKind) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        kind,
        Kind::ConnectionAborted | Kind::ConnectionReset | Kind::BrokenPipe | Kind::Interrupted | Kind::TimedOut
    )
}

impl<IO: Connected> Connected for Counted<IO> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.io.connect_info()
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Counted<IO> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Counted<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, DuplexStream};

    use super::*;
    use crate::peer::shares::Resource;

    fn accepted(
        incoming: Vec<io::Result<DuplexStream>>,
        limit: usize,
    ) -> BoxStream<'static, io::Result<Counted<DuplexStream>>> {
        let pool = Pool::new(Resource::Connections, limit);
        accept("a test", futures::stream::iter(incoming), Callers::default(), pool).boxed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_system_that_has_no_connection_to_give_is_asked_again_after_a_pause() {
        let began = tokio::time::Instant::now();
        let exhausted = || Err(io::Error::from(rustix::io::Errno::MFILE));
        let aborted = || Err(io::Error::from(io::ErrorKind::ConnectionAborted));
        let (io, _other_end) = tokio::io::duplex(8);
        let mut accepted = accepted(vec![exhausted(), aborted(), exhausted(), Ok(io)], 64);
        accepted.next().await.unwrap().unwrap();
        assert_eq!(began.elapsed(), 2 * PAUSE, "it neither ends nor asks without a pause");
        assert!(accepted.next().await.is_none());
    }

    #[tokio::test]
    async fn one_more_than_there_may_be_is_closed_at_once_and_one_that_goes_makes_room() {
        let (ios, mut other_ends): (Vec<_>, Vec<_>) = (0..40).map(|_| tokio::io::duplex(8)).unzip();
        let mut accepted = accepted(ios.into_iter().map(Ok).collect(), 64);
        // They are one caller, which alone may have a quarter.
        let mut held = Vec::new();
        for _ in 0..15 {
            held.push(accepted.next().await.unwrap().unwrap());
        }
        assert!(futures::poll!(accepted.next()).is_ready(), "the rest is refused without waiting, and the stream ends");
        let refused = &mut other_ends[15];
        assert_eq!(refused.read(&mut [0; 1]).await.unwrap(), 0, "closed");
        drop(held);

        let (ios, _other_ends): (Vec<_>, Vec<_>) = (0..40).map(|_| tokio::io::duplex(8)).unzip();
        let mut accepted = self::accepted(ios.into_iter().map(Ok).collect(), 64);
        for _ in 0..40 {
            drop(accepted.next().await.unwrap().unwrap());
        }
    }
}
