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
//! One task, ended with the store. It is away from the leader for as long as it is: that the session is over is the
//! leader's to say.
//!
//! Limits: one session for all clones, [`SESSION_WINDOW`] requests of it unanswered ([`super::window`]); further ones wait
//! until their deadlines.

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
use super::attempts::{Attempts, Rules};
use super::connections::Inner;
use super::window::{Ticket, Window};
use crate::clock;
use crate::store::{Applied, Error};

/// How long the session may be silent. Longer than a call that is sent again and again while the cluster has no leader.
const TTL: Duration = Duration::from_secs(60);
/// Keep-alives per time to live of a session that is silent otherwise.
const PER_TTL: u32 = 3;
/// How long nobody asks for a session after one was refused.
const REFUSED_FOR: Duration = Duration::from_secs(5);
/// Sessions that one mutation may find to be over before it says so.
const MAX_LOST: u32 = 4;

/// The session of a store.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    state: Mutex<State>,
    /// Held while one is opened.
    opening: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    current: Option<Arc<Window>>,
    /// When opening one was last refused.
    refused: Option<Instant>,
    /// Another one than [`TTL`].
    ttl: Option<Duration>,
    keeper: Option<AbortOnDropHandle<()>>,
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
        let mut lost = 0;
        loop {
            let Some(ticket) = self.ticket(doing, deadline).await? else {
                return self
                    .on_leader(doing, deadline, otherwise, |address, timeout| send(None, address, timeout))
                    .await;
            };
            let stamped = |address, timeout| send(Some(ticket.stamp()), address, timeout);
            match self.on_leader(doing, deadline, Rules::STAMPED, stamped).await {
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
    async fn ticket(&self, doing: &str, deadline: Instant) -> Result<Option<Ticket>, Error> {
        loop {
            let Some(window) = self.window(doing, deadline).await? else { return Ok(None) };
            match tokio::time::timeout_at(deadline.into(), window.enter()).await {
                Ok(Some(ticket)) => return Ok(Some(ticket)),
                // It ended meanwhile.
                Ok(None) => {}
                Err(_) => {
                    let what = format!("{SESSION_WINDOW} changes of this client are unanswered, which is the most");
                    return Err(self.not_sent(doing, deadline, what));
                }
            }
        }
    }

    /// The session that is open, opened if there is none; `None`: do without.
    async fn window(&self, doing: &str, deadline: Instant) -> Result<Option<Arc<Window>>, Error> {
        let sessions = &self.inner.sessions;
        if let Some(current) = sessions.current() {
            return Ok(current);
        }
        let Ok(_turn) = tokio::time::timeout_at(deadline.into(), sessions.opening.lock()).await else {
            let what = "another call of this client tries to open a session, and has not been answered".to_owned();
            return Err(self.not_sent(doing, deadline, what));
        };
        if let Some(current) = sessions.current() {
            return Ok(current);
        }
        // Told to people. A process id is chance, which has no place in the log of a simulation.
        let holder = match self.inner.dialer.is_tcp() {
            true => format!("process {}", std::process::id()),
            false => "a simulated process".to_owned(),
        };
        let ttl = sessions.ttl();
        match self.open_session_for(doing, ttl, &holder, deadline).await {
            Ok(id) => {
                tracing::debug!(session = id, "opened a session");
                let window = Arc::new(Window::new(id));
                sessions.opened(&window, ttl, Arc::downgrade(&self.inner));
                Ok(Some(window))
            }
            Err(Error::Refused { message, .. }) => {
                tracing::warn!("going on without a session: {message}");
                sessions.lock().refused = Some(clock::now());
                Ok(None)
            }
            // Whatever became of the session, the mutation was not sent.
            Err(Error::Unavailable { doing, endpoints, attempts, elapsed, leader, last, .. }) => {
                Err(Error::Unavailable { doing, endpoints, attempts, elapsed, leader, last, applied: Applied::No })
            }
            Err(Error::Internal { doing, message, .. }) => {
                Err(Error::Internal { doing, message, applied: Applied::No })
            }
            Err(e) => Err(e),
        }
    }

    fn not_sent(&self, doing: &str, deadline: Instant, last: String) -> Error {
        let mut attempts = Attempts::new(doing, deadline);
        attempts.last = last;
        self.unavailable(attempts, Applied::No)
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
