//! The requests of one session that are unanswered: which numbers they have, and who may send the next one.
//!
//! ```text
//!   answered ... | lowest unanswered ... (some of them answered) ... newest | ... free, up to lowest + SESSION_WINDOW
//! ```
//! The state machine refuses a sequence that lies [`SESSION_WINDOW`] or more above the lowest unanswered one. So what is
//! limited is that distance, and not how many are unanswered: one slow request in the end holds up those behind it.
//!
//! Limits: [`SESSION_WINDOW`] numbers out at once; whoever comes then waits, in order of arrival.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::clock;
use lake_proto::coordination::{SessionId, Stamp};
use lake_proto::limits::SESSION_WINDOW;
use tokio::sync::Semaphore;

/// The window of one session.
#[derive(Debug)]
pub(super) struct Window {
    session: SessionId,
    /// As many permits as there are numbers that may be given out. Closed once the session is over.
    free: Semaphore,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    next: u64,
    unanswered: BTreeSet<u64>,
    /// When the session was last heard by the leader, as far as this client knows.
    spoke: Instant,
}

impl State {
    fn lowest(&self) -> u64 {
        self.unanswered.first().copied().unwrap_or(self.next)
    }
}

impl Window {
    /// Of a session that was just opened.
    pub fn new(session: SessionId) -> Self {
        let state = State { next: 1, unanswered: BTreeSet::new(), spoke: clock::now() };
        Self { session, free: Semaphore::new(SESSION_WINDOW as usize), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Waits for a number. `None`: the session is over.
    pub async fn enter(self: Arc<Self>) -> Option<Ticket> {
        self.free.acquire().await.ok()?.forget();
        let sequence = {
            let mut state = self.lock();
            let sequence = state.next;
            state.next += 1;
            state.unanswered.insert(sequence);
            sequence
        };
        Some(Ticket { window: self, sequence })
    }

    /// The session is over: nobody gets a number any more.
    pub fn close(&self) {
        self.free.close();
    }

    pub fn is_closed(&self) -> bool {
        self.free.is_closed()
    }

    /// The leader has heard of the session now.
    pub fn spoke(&self) {
        self.lock().spoke = clock::now();
    }

    /// When it last did.
    pub fn last_spoke(&self) -> Instant {
        self.lock().spoke
    }
}

/// A request's number. Whoever drops it has its answer, or has given up on it for good: once another request of the session
/// has been applied, what is still on its way under this number does nothing.
#[derive(Debug)]
pub(super) struct Ticket {
    window: Arc<Window>,
    sequence: u64,
}

impl Ticket {
    /// What the request carries, if it is sent now.
    pub fn stamp(&self) -> Stamp {
        let lowest_unanswered = self.window.lock().lowest();
        Stamp { session: self.window.session, sequence: self.sequence, lowest_unanswered }
    }

    /// The window that it is of.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let freed = {
            let mut state = self.window.lock();
            let before = state.lowest();
            state.unanswered.remove(&self.sequence);
            state.lowest() - before
        };
        self.window.free.add_permits(freed as usize);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use rand::rngs::StdRng;
    use rand::seq::IndexedRandom;
    use rand::{Rng, SeedableRng};

    use super::*;

    async fn entered(window: &Arc<Window>) -> Option<Ticket> {
        // A number that is free is given at once, also to a task whose turn at the runtime is over.
        tokio::task::coop::unconstrained(window.clone().enter()).now_or_never().flatten()
    }

    #[tokio::test]
    async fn the_distance_is_limited_and_not_the_count() {
        let window = Arc::new(Window::new(7));
        let first = entered(&window).await.unwrap();
        let mut others = Vec::new();
        while let Some(ticket) = entered(&window).await {
            others.push(ticket);
        }
        assert_eq!(others.len() as u64, SESSION_WINDOW - 1);
        others.clear();
        assert!(entered(&window).await.is_none(), "the first one is unanswered still");
        assert_eq!(first.stamp(), Stamp { session: 7, sequence: 1, lowest_unanswered: 1 });
        drop(first);
        let next = entered(&window).await.unwrap();
        let stamp = Stamp { session: 7, sequence: SESSION_WINDOW + 1, lowest_unanswered: SESSION_WINDOW + 1 };
        assert_eq!(next.stamp(), stamp);
    }

    #[tokio::test]
    async fn whoever_waits_when_the_session_ends_is_told() {
        let window = Arc::new(Window::new(7));
        let mut held = Vec::new();
        while let Some(ticket) = entered(&window).await {
            held.push(ticket);
        }
        let waiting = tokio::spawn(window.clone().enter());
        window.close();
        assert!(waiting.await.unwrap().is_none());
        drop(held);
        assert!(window.clone().enter().await.is_none() && window.is_closed());
    }

    #[tokio::test]
    async fn whatever_the_order_of_answers_every_stamp_is_allowed() {
        let mut rng = StdRng::seed_from_u64(11);
        let window = Arc::new(Window::new(1));
        let mut out: Vec<Ticket> = Vec::new();
        for _ in 0..20_000 {
            if rng.random_bool(0.6) && window.free.available_permits() > 0 {
                out.push(entered(&window).await.unwrap());
            } else if let Some(ticket) = (0..out.len()).collect::<Vec<_>>().choose(&mut rng).copied() {
                out.swap_remove(ticket);
            }
            for ticket in &out {
                let stamp = ticket.stamp();
                stamp.validate().unwrap();
                assert!(stamp.sequence - stamp.lowest_unanswered < SESSION_WINDOW);
            }
            let state = window.lock();
            assert_eq!(window.free.available_permits() as u64 + state.next - state.lowest(), SESSION_WINDOW);
        }
    }
}
