//! The session whose requests this client's mutations are (semantics, section 4): opened with the first mutation, shared by
//! all clones of the store, kept open in the background for as long as there is one.
//!
//! ```text
//!   none --- first mutation: Open ---> open --- the leader says that it is over ---> none
//!     |                                 ^ |
//!     |                                 +-+ each mutation; a keep-alive after a quiet third of its time
//!     +--- Open refused (the cluster has as many as it can): without one, for a while
//! ```
//! A mutation keeps its number until it is answered: what is sent again after a lost answer is answered with the first
//! result. If the session ends meanwhile, a request that may have been applied ends in doubt, and one that certainly was not
//! becomes a request of the next session. Without a session a mutation is sent again only if each write in it is covered by
//! a compare on that very key, which its first application makes false; the answer then says `resent`.
//!
//! A session is opened by a task of its own, which goes on for the next mutation when the one that needed it first has given up:
//! else each mutation in a hurry would leave a session behind at a leader that is slow.
//!
//! One task keeps it open, ended with the store. It is away from the leader for as long as it is: that the session is over is the
//! leader's to say. With the last clone of the store the session is closed, in the background and once ([`Inner::leaving`]): it
//! ends by itself where that fails, or where no runtime is left to do it. A process that is about to end waits for the closing
//! ([`RemoteStore::leave`]).
//!
//! Limits: one session for all clones, [`SESSION_WINDOW`] requests of it unanswered ([`super::window`]); further ones wait
//! until their deadlines, [`MAX_WAITING`] of them, beyond which one is refused at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures::Stream;
use lake_proto::coordination::{LeaseId, SessionId, Stamp, validate_session_ttl};
use lake_proto::limits::SESSION_WINDOW;
use lake_proto::v1;
use lake_proto::v1::leases_client::LeasesClient;
use lake_proto::v1::sessions_client::SessionsClient;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Response, Status, Streaming};

use super::RemoteStore;
use super::attempts::{ATTEMPT_TIMEOUT, Attempts, Rules};
use super::connections::Inner;
use super::flight::{Flight, Joined};
use super::window::{Ticket, Window};
use crate::clock;
use crate::store::{Applied, Error};

/// How long the session may be silent. Longer than a call that is sent again and again while the cluster has no leader.
const TTL: Duration = Duration::from_secs(60);
/// Keep-alives per time to live of a session that is silent otherwise.
const PER_TTL: u32 = 3;
/// How long nobody asks for a session after one was refused.
const REFUSED_FOR: Duration = Duration::from_secs(5);
/// Most mutations that wait for a number, or for a session to be opened. Far more than a cluster does in one second.
const MAX_WAITING: usize = 50_000;
/// How long the closing of a session that nobody needs any more is waited for.
const LEFT_WITHIN: Duration = Duration::from_secs(2);
/// Sessions that one mutation may find to be over before it says so.
const MAX_LOST: u32 = 4;

/// The session of a store.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    state: Mutex<State>,
    /// Held while one is opened.
    opening: tokio::sync::Mutex<()>,
    /// Mutations that have no number yet.
    waiting: AtomicUsize,
}

/// One mutation that has no number yet.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    /// `None`: there are as many as there may be.
    fn begin(waiting: &'a AtomicUsize) -> Option<Self> {
        // Decremented when dropped, in either case.
        let before = waiting.fetch_add(1, Ordering::Relaxed);
        Some(Self(waiting)).filter(|_| before < MAX_WAITING)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct State {
    current: Option<Arc<Window>>,
    /// When opening one was last refused.
    refused: Option<Instant>,
    /// Another one than [`TTL`].
    ttl: Option<Duration>,
    keeper: Option<AbortOnDropHandle<()>>,
    /// The last one that was asked for, and at which peer.
    opening: Option<(String, Flight<Result<(), Status>>)>,
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session that is open; `Some(None)`: mutations do without for now.
    fn current(&self) -> Option<Option<Arc<Window>>> {
        let state = self.lock();
        match &state.current {
            Some(window) if !window.is_closed() => Some(Some(window.clone())),
            _ if state.refused.is_some_and(|at| clock::since(at) < REFUSED_FOR) => Some(None),
            _ => None,
        }
    }

    /// Has the next mutation open another session. The one that was open, if there was one.
    fn end(&self) -> Option<SessionId> {
        let mut state = self.lock();
        let window = state.current.take().filter(|window| !window.is_closed())?;
        window.close();
        state.keeper = None;
        Some(window.session())
    }

    fn ttl(&self) -> Duration {
        self.lock().ttl.unwrap_or(TTL)
    }

    fn opened(&self, window: &Arc<Window>, ttl: Duration, inner: Weak<Inner>) {
        let keeper = tokio::spawn(keep(inner, window.clone(), ttl / PER_TTL));
        let mut state = self.lock();
        state.refused = None;
        state.current = Some(window.clone());
        state.keeper = Some(AbortOnDropHandle::new(keeper));
    }
}

impl RemoteStore {
    /// The session of this store and its clones may be silent for so long; 60 s unless something else is said here before
    /// the first change. An answer that was lost is found again if the cluster is reached within that time.
    ///
    /// # Errors
    /// `Invalid` outside 5 s to 1 h.
    pub fn with_session_ttl(self, ttl: Duration) -> Result<Self, Error> {
        validate_session_ttl(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX))?;
        self.inner.sessions.lock().ttl = Some(ttl);
        Ok(self)
    }

    /// Closes the session whose requests the changes of this store and its clones have been, and waits until that is done, or
    /// has failed, for at most two seconds: for a process that is about to end. A session that stays open ends by itself in
    /// time. What is still unanswered becomes unknown; a change that is made afterwards opens another session.
    pub async fn leave(&self) {
        if let Some(leaving) = self.inner.leaving() {
            leaving.await;
        }
    }

    /// One mutation, as a request of this client's session. The answer comes with whether an earlier attempt may have been
    /// applied, which can only be without a session; `otherwise` are the rules then.
    pub(super) async fn mutate<T, F>(
        &self,
        doing: &str,
        deadline: Instant,
        otherwise: Rules,
        send: impl Fn(Option<Stamp>, String, Duration) -> F,
    ) -> Result<(T, bool), Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        // Of the whole call, whatever sessions it takes.
        let mut attempts = Attempts::new(doing, deadline);
        let mut lost = 0;
        loop {
            let Some(ticket) = self.ticket(&mut attempts).await? else {
                let unstamped = |address, timeout| send(None, address, timeout);
                return self.on_peer(None, &mut attempts, otherwise, unstamped).await;
            };
            let stamped = |address, timeout| send(Some(ticket.stamp()), address, timeout);
            match self.on_peer(None, &mut attempts, Rules::STAMPED, stamped).await {
                Ok((answer, _)) => {
                    ticket.window().spoke();
                    return Ok((answer, false));
                }
                // Nothing ran.
                Err(Error::SessionExpired { .. }) if lost < MAX_LOST => {
                    lost += 1;
                    ticket.window().close();
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// The next number of the session; `None`: do without.
    async fn ticket(&self, attempts: &mut Attempts) -> Result<Option<Ticket>, Error> {
        let Some(_waiting) = Waiting::begin(&self.inner.sessions.waiting) else {
            attempts.last = format!("{MAX_WAITING} changes of this client wait to be sent, which is the most");
            let message = self.in_vain(attempts).told();
            return Err(Error::Overloaded { doing: attempts.doing.clone(), message });
        };
        loop {
            let Some(window) = self.window(attempts).await? else { return Ok(None) };
            match tokio::time::timeout_at(attempts.deadline.into(), window.enter()).await {
                Ok(Some(ticket)) => return Ok(Some(ticket)),
                // It ended meanwhile.
                Ok(None) => {}
                Err(_) => {
                    attempts.last =
                        format!("{SESSION_WINDOW} changes of this client are unanswered, which is the most");
                    return Err(self.unavailable(attempts, Applied::No));
                }
            }
        }
    }

    /// The session that is open, opened if there is none; `None`: do without.
    async fn window(&self, attempts: &mut Attempts) -> Result<Option<Arc<Window>>, Error> {
        let sessions = &self.inner.sessions;
        if let Some(current) = sessions.current() {
            return Ok(current);
        }
        let Ok(_turn) = tokio::time::timeout_at(attempts.deadline.into(), sessions.opening.lock()).await else {
            attempts.last = "another call of this client tries to open a session, and has not been answered".to_owned();
            return Err(self.unavailable(attempts, Applied::No));
        };
        loop {
            if let Some(current) = sessions.current() {
                return Ok(current);
            }
            // Whatever becomes of it, the mutation was not sent.
            let open = async |address: String, _: Duration| self.inner.open_session_at(&address).await;
            match self.on_peer(None, attempts, Rules::READ, open).await {
                // It is there, unless it is over already.
                Ok(_) => {}
                Err(Error::Refused { message, .. }) => {
                    tracing::warn!("going on without a session: {message}");
                    sessions.lock().refused = Some(clock::now());
                    return Ok(None);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Says on a stream of its own that the session is wanted. False: it is over.
    async fn renew_session(&self, id: SessionId, deadline: Instant) -> Result<bool, Error> {
        let (answer, _) = self
            .on_leader("keeping a session open", deadline, Rules::RESENDABLE, async |address, timeout| {
                let mut client = SessionsClient::new(self.inner.channel(&address)?);
                the_answer(client.keep_alive(self.inner.request(one_message(id), timeout)?).await?).await
            })
            .await?;
        Ok(answer.alive.contains(&id))
    }

    /// The same of a lease.
    pub(super) async fn renew_one_lease(&self, id: LeaseId, deadline: Instant) -> Result<bool, Error> {
        let (answer, _) = self
            .on_leader(&format!("renewing lease {id}"), deadline, Rules::RESENDABLE, async |address, timeout| {
                let mut client = LeasesClient::new(self.inner.channel(&address)?);
                the_answer(client.keep_alive(self.inner.request(one_message(id), timeout)?).await?).await
            })
            .await?;
        Ok(answer.alive.contains(&id))
    }
}

fn one_message(id: u64) -> impl Stream<Item = v1::KeepAliveRequest> + Send + 'static {
    futures::stream::iter([v1::KeepAliveRequest { ids: vec![id], tag: 1 }])
}

async fn the_answer(stream: Response<Streaming<v1::KeepAliveResponse>>) -> Result<v1::KeepAliveResponse, Status> {
    let answer = stream.into_inner().message().await?;
    answer.ok_or_else(|| Status::unavailable("the peer closed the stream without an answer"))
}

impl Inner {
    /// Has the peer at this address open a session, which is this client's then. Whoever asks for one while that is under way waits
    /// for the same answer.
    async fn open_session_at(self: &Arc<Self>, address: &str) -> Result<(), Status> {
        match self.opening_at(address).outcome().await {
            Some(opened) => opened,
            None => Err(Status::unavailable("who asked for a session has ended")),
        }
    }

    /// The opening that is under way there, begun if there is none.
    fn opening_at(self: &Arc<Self>, address: &str) -> Joined<Result<(), Status>> {
        let mut state = self.sessions.lock();
        let there = state.opening.as_ref().filter(|(at, _)| at == address);
        if let Some(opening) = there.and_then(|(_, opening)| opening.join()) {
            return opening;
        }
        let (inner, at) = (self.clone(), address.to_owned());
        // It ends within the time of an attempt, and keeps the store alive for as long.
        let opening = Flight::begin(async move { inner.open_session(&at).await });
        let joined = opening.joined();
        state.opening = Some((address.to_owned(), opening));
        joined
    }

    async fn open_session(self: &Arc<Self>, address: &str) -> Result<(), Status> {
        let ttl = self.sessions.ttl();
        // Told to people. A process id is chance, which has no place in the log of a simulation.
        let holder = match self.dialer.is_tcp() {
            true => format!("process {}", std::process::id()),
            false => "a simulated process".to_owned(),
        };
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let message = v1::OpenSessionRequest { ttl_ms, holder };
        let asked = async {
            let request = self.request(message, ATTEMPT_TIMEOUT)?;
            Ok::<_, Status>(SessionsClient::new(self.channel(address)?).open(request).await?.into_inner())
        };
        // One that is opened and whose answer is lost ends by itself.
        let answered = tokio::time::timeout(ATTEMPT_TIMEOUT, asked).await.unwrap_or_else(|_| {
            Err(Status::deadline_exceeded(format!("no answer within {:.1} s", ATTEMPT_TIMEOUT.as_secs_f64())))
        });
        let id = answered?.id;
        tracing::debug!(session = id, "opened a session");
        self.sessions.opened(&Arc::new(Window::new(id)), ttl, Arc::downgrade(self));
        Ok(())
    }

    /// Has the leader close the session that is open, which nobody needs any more. `None`: there is none, or no connection to a
    /// leader; it ends in time by itself.
    pub fn leaving(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        let session = self.sessions.end()?;
        let channel = self.leader_channel()?;
        let request = self.request(v1::CloseSessionRequest { id: session }, LEFT_WITHIN).ok()?;
        Some(async move {
            let mut client = SessionsClient::new(channel);
            match tokio::time::timeout(LEFT_WITHIN, client.close(request)).await {
                Ok(Ok(_)) => {}
                Ok(Err(e)) => tracing::debug!(session, "a session is left to end by itself: {e}"),
                Err(_) => tracing::debug!(session, "a session is left to end by itself: its leader does not answer"),
            }
        })
    }
}

/// Keeps a session open until it is over, or the store is gone. It is heard at least every `quiet`.
async fn keep(inner: Weak<Inner>, window: Arc<Window>, quiet: Duration) {
    while !window.is_closed() {
        tokio::time::sleep_until((window.last_spoke() + quiet).into()).await;
        if clock::since(window.last_spoke()) < quiet {
            continue;
        }
        let Some(inner) = inner.upgrade() else { return };
        let store = RemoteStore { inner, reads_at: None };
        match store.renew_session(window.session(), clock::now() + quiet).await {
            Ok(true) => window.spoke(),
            Ok(false) => {
                tracing::debug!(session = window.session(), "the session is over, as the leader says");
                window.close();
            }
            // It has been tried for a while, and may still be open. What cannot be mended fails at once.
            Err(e) => {
                tracing::debug!(session = window.session(), "{e}");
                drop(store);
                tokio::time::sleep(quiet / PER_TTL).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::v1::sessions_server::{Sessions as Served, SessionsServer};
    use tokio::sync::Notify;
    use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
    use tonic::Request;

    use super::*;
    use crate::remote::RemoteConfig;
    use crate::store::MetaStore;

    /// Changes in a hurry, one after the other.
    const HURRIED: u64 = 8;
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A leader that opens a session when it is told to.
    #[derive(Clone, Default)]
    struct Slow {
        asked: Arc<AtomicUsize>,
        go_on: Arc<Notify>,
    }

    #[tonic::async_trait]
    impl Served for Slow {
        type KeepAliveStream = ReceiverStream<Result<v1::KeepAliveResponse, Status>>;

        async fn open(&self, _: Request<v1::OpenSessionRequest>) -> Result<Response<v1::OpenSessionResponse>, Status> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            self.go_on.notified().await;
            Ok(Response::new(v1::OpenSessionResponse { id: 7, ..Default::default() }))
        }

        async fn close(
            &self,
            _: Request<v1::CloseSessionRequest>,
        ) -> Result<Response<v1::CloseSessionResponse>, Status> {
            Ok(Response::new(v1::CloseSessionResponse::default()))
        }

        async fn keep_alive(
            &self,
            _: Request<Streaming<v1::KeepAliveRequest>>,
        ) -> Result<Response<Self::KeepAliveStream>, Status> {
            unreachable!()
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_session_whose_caller_has_given_up_is_the_next_ones() {
        let leader = Slow::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tonic::transport::Server::builder().add_service(SessionsServer::new(leader.clone()));
        let server = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let store = RemoteStore::connect(RemoteConfig { endpoints: vec![address.clone()], secret: None }).unwrap();
        let member = v1::Member { id: 1, grpc_address: address, ..v1::Member::default() };
        let change = async |term: u64, patience: Duration| {
            // Silence has it forgotten.
            store.inner.lock().view.learn(term, Some(&member));
            store.cas("/kv/a", None, "1".into(), clock::now() + patience).await.unwrap_err()
        };
        for term in 1..=HURRIED {
            let error = change(term, Duration::from_millis(100)).await;
            assert!(error.is_unavailable() && error.applied() == Applied::No, "{error}");
        }
        let opened = async {
            loop {
                match store.inner.sessions.current().flatten() {
                    Some(window) => return window.session(),
                    None => leader.go_on.notify_one(),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        // The change itself is nothing that this leader knows.
        let (session, _) = tokio::join!(tokio::time::timeout(PATIENCE, opened), change(HURRIED + 1, PATIENCE));
        assert_eq!(session, Ok(7));
        let asked = leader.asked.load(Ordering::SeqCst) as u64;
        assert!(asked < HURRIED / 2, "each has asked for a session of its own: {asked} were");
        server.abort();
    }

    #[tokio::test]
    async fn a_change_too_many_is_refused_at_once_and_one_less_makes_room() {
        // Connections are made, and nobody answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoints = vec![silent.local_addr().unwrap().to_string()];
        let store = RemoteStore::connect(RemoteConfig { endpoints, secret: None }).unwrap();
        let by = clock::now() + Duration::from_secs(300);
        let mut waiting: Vec<_> = (0..MAX_WAITING).map(|_| store.cas("/kv/a", None, "1".into(), by)).collect();
        for one in &mut waiting {
            assert!(futures::poll!(one).is_pending());
        }
        for _ in 0..2 {
            let refused = futures::poll!(Box::pin(store.cas("/kv/b", None, "1".into(), by)));
            let std::task::Poll::Ready(Err(error)) = refused else { panic!("{refused:?}") };
            assert!(matches!(error, Error::Overloaded { .. }) && error.applied() == Applied::No, "{error}");
        }
        waiting.pop();
        assert!(futures::poll!(Box::pin(store.cas("/kv/b", None, "1".into(), by))).is_pending());
        drop(waiting);
        assert_eq!(store.inner.sessions.waiting.load(Ordering::Relaxed), 0);
    }
}
