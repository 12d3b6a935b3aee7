//! The clients of a run: each does one operation at a time, at a pace that all of them together make the rate.
//!
//! An open loop: a client that was held up does not slow the rate down for good, it catches up by at most [`MAX_DEBT`].

use std::sync::Arc;
use std::time::Duration;

use lake_client::Error;
use lake_client::dial::Dialer;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::secret::Secret;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::ledger::Ledger;
use super::recorder::Recorder;
use crate::workload::Actor;
use crate::workload::access::{Access, Door, Roster, Sessions};

/// How far a client that was held up may be behind its pace.
const MAX_DEBT: Duration = Duration::from_millis(500);
/// How long the session of every other client may be silent, which is the least that there can be: faults outlast it.
const SHORT_SESSION: Duration = Duration::from_secs(5);

/// How clients reach the cluster, and how long they wait.
#[derive(Debug, Clone)]
pub struct Reach {
    pub roster: Roster,
    pub ledger: Arc<Ledger>,
    /// What they are told of at first.
    pub endpoints: Vec<String>,
    pub timeout: Duration,
    pub seed: u64,
    /// The cluster's, if it has one.
    pub secret: Option<Secret>,
    /// How connections are made.
    pub dialer: Dialer,
    /// How query nodes are reached, if clients are to speak SQL.
    pub door: Option<Door>,
}

impl Reach {
    /// A client's own connections and chance.
    ///
    /// # Errors
    /// An endpoint that is none.
    pub fn access(&self, number: u64) -> Result<Access, Error> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut endpoints = self.endpoints.clone();
        endpoints.shuffle(&mut rng);
        let config = RemoteConfig { endpoints, secret: self.secret.clone() };
        let store = RemoteStore::connect_by(config, self.dialer.clone())?;
        let store = if number % 2 == 1 { store.with_session_ttl(SHORT_SESSION)? } else { store };
        let (sessions, roster) = (self.door.clone().map(Sessions::new), self.roster.clone());
        Ok(Access { store, sessions, roster, ledger: self.ledger.clone(), timeout: self.timeout, rng })
    }
}

/// All clients of a run.
pub struct Clients {
    paced: JoinSet<()>,
    waiting: JoinSet<()>,
    stop_paced: CancellationToken,
    /// Why clients ended that should not have.
    broken: Vec<String>,
}

impl Clients {
    /// Starts one task per actor. Those that keep to a pace make `rate` operations per second together.
    ///
    /// # Errors
    /// An endpoint that is none.
    pub fn start(
        actors: Vec<Box<dyn Actor>>,
        rate: f64,
        reach: &Reach,
        recorder: &Arc<Recorder>,
    ) -> Result<Self, Error> {
        let paced_count = actors.iter().filter(|actor| actor.is_paced()).count();
        let interval = Duration::from_secs_f64(paced_count as f64 / rate);
        let mut clients = Self {
            paced: JoinSet::new(),
            waiting: JoinSet::new(),
            stop_paced: CancellationToken::new(),
            broken: Vec::new(),
        };
        for (number, mut actor) in actors.into_iter().enumerate() {
            let (mut access, mut scribe) = (reach.access(number as u64)?, recorder.scribe());
            let recorder = recorder.clone();
            if actor.is_paced() {
                let stop = clients.stop_paced.clone();
                clients.paced.spawn(async move {
                    let mut next = Instant::now();
                    while !recorder.is_full() {
                        next += interval.mul_f64(access.rng.random_range(0.0..2.0));
                        next = next.max(Instant::now() - MAX_DEBT);
                        tokio::select! {
                            () = stop.cancelled() => return,
                            () = sleep_until(next) => {}
                        }
                        actor.step(&mut access, &mut scribe).await;
                    }
                });
            } else {
                clients.waiting.spawn(async move {
                    while !recorder.is_full() {
                        actor.step(&mut access, &mut scribe).await;
                    }
                });
            }
        }
        Ok(clients)
    }

    /// Ends those that keep to a pace, each after the operation it is at; what takes until `deadline` is left as it is, with
    /// an outcome that nobody knows.
    pub async fn stop_paced(&mut self, deadline: Instant) {
        self.stop_paced.cancel();
        let ended = async {
            while let Some(ended) = self.paced.join_next().await {
                self.broken.extend(panicked(ended));
            }
        };
        if timeout_at(deadline, ended).await.is_err() {
            tracing::warn!(clients = self.paced.len(), "clients did not end their operations in time");
            self.paced.shutdown().await;
        }
    }

    /// Ends the others, which wait for what may never come. Gives why clients ended before, if any did: this program has a
    /// bug then, and the run was not what was asked for.
    pub async fn stop_waiting(&mut self) -> Vec<String> {
        self.waiting.abort_all();
        while let Some(ended) = self.waiting.join_next().await {
            self.broken.extend(panicked(ended));
        }
        std::mem::take(&mut self.broken)
    }
}

fn panicked(ended: Result<(), JoinError>) -> Option<String> {
    ended.err().filter(JoinError::is_panic).map(|e| format!("a client of this program panicked: {e}"))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;

    use super::*;
    use crate::run::recorder::Scribe;

    static RUNNING: AtomicUsize = AtomicUsize::new(2);

    struct Broken {
        is_paced: bool,
    }

    impl Drop for Broken {
        fn drop(&mut self) {
            RUNNING.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[async_trait]
    impl Actor for Broken {
        async fn step(&mut self, _: &mut Access, _: &mut Scribe) {
            panic!("on purpose");
        }

        fn is_paced(&self) -> bool {
            self.is_paced
        }
    }

    #[tokio::test]
    async fn a_client_that_panics_is_told() {
        let reach = Reach {
            roster: Roster::default(),
            ledger: Arc::default(),
            endpoints: vec!["127.0.0.1:1".to_owned()],
            timeout: Duration::from_secs(1),
            seed: 1,
            secret: None,
            dialer: lake_client::dial::Dialer::default(),
            door: None,
        };
        let actors = [true, false].map(|is_paced| Box::new(Broken { is_paced }) as Box<dyn Actor>);
        let mut clients = Clients::start(actors.into(), 1000.0, &reach, &Recorder::new()).unwrap();
        // Both are there to be joined once both have panicked.
        let both = || async {
            let running = RUNNING.load(Ordering::SeqCst);
            if running == 0 { Ok(()) } else { Err(format!("{running} have not panicked yet")) }
        };
        crate::probe::until("both clients to panic", Duration::from_secs(20), both).await.unwrap();
        clients.stop_paced(Instant::now() + Duration::from_secs(20)).await;
        let told = clients.stop_waiting().await;
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told.iter().all(|told| told.contains("panicked")), "{told:?}");
    }
}
