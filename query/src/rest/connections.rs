//! Connections: how many at a time, and how long each may take with what is its client's to do.
//!
//! ```text
//!   accept -> a place, or wait for one -> idle --first byte--> head --whole--> served --answered--> idle
//!                                          | idle               | head_within
//!                                          v                    v
//!                                        closed               closed
//! ```
//! - One connection more than there are places waits, and further ones in the listener's backlog: places become free by
//!   themselves, so that waiting is a slow answer, where a refusal would be an error. While one waits, every answer over
//!   HTTP/1 closes its connection, so that clients that keep theirs open take turns with those that have none; and of those
//!   that have been idle for [`SPARED`] the one that has for longest is closed.
//! - A head has [`Bounds::head_within`] from its first byte. The next request has [`Bounds::idle`] from the accept or from
//!   the last answer, and so has the client for taking that answer.
//! - HTTP/2 without TLS is understood too. There the bytes between requests may be anything, so that only its first head has
//!   a time of its own; and they may be a request that is not whole yet, or not taken apart, so that who has just sent some is
//!   closed [`SPARED`] later at the earliest.
//! - Told to stop, it closes what is idle or within a head, and ends when the requests that are served have been answered.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, Version, header};
use axum::response::Response;
use axum::serve::Listener;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

use super::metrics::ConnectionFigures;

/// Most bytes of a head.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Most requests of one HTTP/2 connection at a time; more are refused to it.
const MAX_STREAMS: u32 = 64;
/// The longest that anything is waited for, whatever is configured.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// How often an HTTP/2 connection is asked whether it is still there, and how long it has for the answer.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// How long a connection is idle at least before it makes room for another: its next request may be on its way, and would be cut.
const SPARED: Duration = Duration::from_secs(1);
/// The same for HTTP/2, where an answer may still wait for its client to ask for more of it, which is not seen here.
const SPARED_HTTP2: Duration = Duration::from_secs(10);
/// How often one that waits looks for what is idle.
const LOOK: Duration = Duration::from_millis(50);

/// What connections may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub connections: usize,
    pub head_within: Duration,
    pub idle: Duration,
}

/// The connections of one listener.
#[derive(Debug)]
pub struct Connections {
    bounds: Bounds,
    places: Arc<Semaphore>,
    /// One has been accepted, and has no place.
    one_waits: AtomicBool,
    open: Mutex<Open>,
    figures: ConnectionFigures,
}

/// The connections that are open, by number.
#[derive(Debug, Default)]
struct Open {
    next: u64,
    all: HashMap<u64, Weak<Connection>>,
}

impl Connections {
    pub fn new(bounds: Bounds, figures: ConnectionFigures) -> Self {
        let bounds = Bounds {
            connections: bounds.connections.min(Semaphore::MAX_PERMITS),
            head_within: bounds.head_within.min(LONGEST),
            idle: bounds.idle.min(LONGEST),
        };
        let places = Arc::new(Semaphore::new(bounds.connections));
        Self { bounds, places, one_waits: AtomicBool::new(false), open: Mutex::default(), figures }
    }

    /// One more that is open.
    fn open(self: &Arc<Self>) -> Arc<Connection> {
        let mut open = self.lock();
        let number = open.next;
        open.next += 1;
        let connection = Arc::new(Connection::new(self.clone(), number));
        open.all.insert(number, Arc::downgrade(&connection));
        connection
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for the one that was accepted. `None` never: nobody closes the places.
    async fn place(&self) -> Option<Place> {
        let permit = match self.places.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                self.figures.waited.inc();
                self.one_waits.store(true, Ordering::Relaxed);
                let permit = self.made_free().await?;
                self.one_waits.store(false, Ordering::Relaxed);
                permit
            }
        };
        self.figures.accepted.inc();
        self.figures.open.inc();
        Some(Place { figures: self.figures.clone(), _permit: permit })
    }

    /// Waits for a place, for which what is idle makes room.
    async fn made_free(&self) -> Option<OwnedSemaphorePermit> {
        let mut free = pin!(self.places.clone().acquire_owned());
        loop {
            self.close_longest_idle();
            tokio::select! {
                permit = &mut free => return permit.ok(),
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    fn close_longest_idle(&self) {
        // The last one to have a connection takes it off the list, so it is not looked at under the list's lock.
        let open: Vec<Arc<Connection>> = self.lock().all.values().filter_map(Weak::upgrade).collect();
        let idle = open.iter().filter_map(|connection| Some((connection.lock().spared_until()?, connection)));
        if let Some((until, connection)) = idle.min_by_key(|(until, _)| *until)
            && until <= Instant::now()
        {
            connection.make_room();
        }
    }
}

/// One connection's place.
#[derive(Debug)]
struct Place {
    figures: ConnectionFigures,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.figures.open.dec();
    }
}

/// Answers what comes over the listener's connections, until it is told to stop.
pub async fn serve<A, F>(mut listener: TcpListener, connections: Arc<Connections>, answer: A, stop: CancellationToken)
where
    A: Fn(SocketAddr, Request) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    loop {
        let (stream, address) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = stop.cancelled() => break,
            Some(_) = tasks.join_next() => continue,
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection answers with delay");
        }
        let place = tokio::select! {
            place = connections.place() => place,
            () = stop.cancelled() => break,
        };
        let connection = connections.open();
        tasks.spawn(connection.run(stream, place, address, answer.clone(), stop.clone()));
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

/// What a connection's client is doing.
#[derive(Debug)]
struct State {
    /// Requests that are being answered.
    served: usize,
    /// The accept, or the last answer.
    since: Instant,
    /// When the first byte came behind that.
    head_since: Option<Instant>,
    /// When the client took what was last written to it; `None` while it has not.
    taken: Option<Instant>,
    /// When something last came from it.
    heard: Instant,
    http2: bool,
    /// It is to be closed if it is idle still.
    makes_room: bool,
    /// Who reads or writes, to be told when the time for it changes: with the end of an answer, or to make room.
    waiting: Option<Waker>,
}

impl State {
    /// When it may be closed to make room, if it is idle and not told so already.
    fn spared_until(&self) -> Option<Instant> {
        let (spared, within_a_head) = match self.http2 {
            true => (SPARED_HTTP2, false),
            false => (SPARED, self.head_since.is_some()),
        };
        let idle = self.served == 0 && !within_a_head && !self.makes_room;
        self.taken.filter(|_| idle).map(|taken| (taken.max(self.since) + spared).max(self.heard + SPARED))
    }
}

#[derive(Debug)]
struct Connection {
    of: Arc<Connections>,
    number: u64,
    state: Mutex<State>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.of.lock().all.remove(&self.number);
    }
}

impl Connection {
    fn new(of: Arc<Connections>, number: u64) -> Self {
        Self {
            of,
            number,
            state: Mutex::new(State {
                served: 0,
                since: Instant::now(),
                head_since: None,
                taken: Some(Instant::now()),
                heard: Instant::now(),
                http2: false,
                makes_room: false,
                waiting: None,
            }),
        }
    }

    async fn run<S, A, F>(
        self: Arc<Self>,
        stream: S,
        place: Option<Place>,
        address: SocketAddr,
        answer: A,
        stop: CancellationToken,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        A: Fn(SocketAddr, Request) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response> + Send + 'static,
    {
        let _place = place;
        let router = Router::new().fallback({
            let connection = self.clone();
            move |request: Request| connection.clone().answered(address, request, answer.clone())
        });
        let mut builder = Builder::new(TokioExecutor::new());
        builder.http1().max_buf_size(MAX_HEAD_BYTES);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEAD_BYTES as u32)
            .keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE);
        let stream = TokioIo::new(Timed::new(stream, self.clone()));
        let mut served = pin!(builder.serve_connection(stream, TowerToHyperService::new(router)));
        let ended = tokio::select! {
            ended = served.as_mut() => ended,
            () = stop.cancelled() => {
                if self.is_within_a_head() {
                    return;
                }
                served.as_mut().graceful_shutdown();
                served.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%address, %error, "a connection ended");
        }
    }

    async fn answered<A, F>(self: Arc<Self>, address: SocketAddr, request: Request, answer: A) -> Response
    where
        A: Fn(SocketAddr, Request) -> F,
        F: Future<Output = Response>,
    {
        let http2 = request.version() == Version::HTTP_2;
        let _served = Served::new(&self, http2);
        let mut response = answer(address, request).await;
        if !http2 && self.of.one_waits.load(Ordering::Relaxed) {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    fn received(&self) {
        let mut state = self.lock();
        let now = Instant::now();
        state.heard = now;
        if state.served == 0 {
            state.head_since.get_or_insert(now);
            // It may be the next request, and what has come is answered.
            state.makes_room = false;
        }
    }

    /// What there was to write has been taken by the client, or not yet.
    fn written(&self, taken: bool) {
        self.lock().taken = taken.then(Instant::now);
    }

    fn is_within_a_head(&self) -> bool {
        let state = self.lock();
        state.head_since.is_some() && !state.http2
    }

    /// Ends it, unless a request comes first, or something has come since it was chosen.
    fn make_room(&self) {
        let mut state = self.lock();
        if state.spared_until().is_none_or(|until| until > Instant::now()) {
            return;
        }
        state.makes_room = true;
        let waiting = state.waiting.take();
        drop(state);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }

    /// Until when the client must have done what is its turn to do, and what that is; `cx` is woken when that changes.
    /// `None`: it is the server's turn.
    fn over(&self, cx: &Context<'_>) -> Option<(Instant, &'static str)> {
        let mut state = self.lock();
        state.waiting = Some(cx.waker().clone());
        match state.head_since {
            _ if state.served > 0 => None,
            Some(began) if !state.http2 => Some((began + self.of.bounds.head_within, "head")),
            _ if state.makes_room => Some((state.since, "room")),
            _ => {
                let idle = state.since + self.of.bounds.idle;
                // What came in time has its time to become a request; what comes later has none, whatever it is.
                let spared = state.heard.min(idle) + SPARED;
                Some((if state.http2 { idle.max(spared) } else { idle }, "idle"))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request while it is being answered.
struct Served<'a>(&'a Connection);

impl<'a> Served<'a> {
    fn new(connection: &'a Connection, http2: bool) -> Self {
        let mut state = connection.lock();
        state.served += 1;
        state.head_since = None;
        state.http2 = http2;
        state.makes_room = false;
        drop(state);
        Self(connection)
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.served -= 1;
        state.since = Instant::now();
        let waiting = state.waiting.take();
        drop(state);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }
}

/// A connection's stream, which fails once its client has taken too long.
struct Timed<S = TcpStream> {
    stream: S,
    connection: Arc<Connection>,
    timer: Pin<Box<Sleep>>,
}

impl<S> Timed<S> {
    fn new(stream: S, connection: Arc<Connection>) -> Self {
        Self { stream, connection, timer: Box::pin(tokio::time::sleep(Duration::ZERO)) }
    }

    /// For what waits for the client: an error once that has taken too long.
    fn poll_over<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        let Some((deadline, reason)) = self.connection.over(cx) else { return Poll::Pending };
        if self.timer.deadline() != deadline {
            self.timer.as_mut().reset(deadline);
        }
        ready!(self.timer.as_mut().poll(cx));
        self.connection.of.figures.closed.with_label_values(&[reason]).inc();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Pending => this.poll_over(cx),
            read => {
                if buf.filled().len() > before {
                    this.connection.received();
                }
                read
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.connection.written(written.is_ready());
        if written.is_ready() { written } else { this.poll_over(cx) }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.connection.written(written.is_ready());
        if written.is_ready() { written } else { this.poll_over(cx) }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
