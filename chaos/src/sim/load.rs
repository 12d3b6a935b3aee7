//! The clients of a simulation: the workloads of fault runs, over the simulated network, and whoever changes the membership.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use lake_client::clock;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::host;
use super::plan::Plan;
use crate::run::clients::{Clients, Reach};
use crate::run::ledger::Looked;
use crate::run::recorder::{Recorder, Scribe};
use crate::workload::access::Access;
use crate::workload::{self, Actor};

/// How long an operation may take beyond its timeout before it is left as it is.
const GRACE: Duration = Duration::from_secs(2);
/// How long each operation before and after may take.
const CALM_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a change of the membership may take.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(8);
/// How long a lost peer's replacement is asked for: until well after all faults.
const REPLACE_WITHIN: Duration = Duration::from_secs(240);
/// Between two looks of an actor that has nothing to do any more.
const IDLE: Duration = Duration::from_millis(100);

/// Where a simulation is, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Founding,
    Attacked,
    /// Clients end what they are at.
    Ending,
    /// All faults have ended, and the peers agree.
    Healed,
}

/// What the clients have brought so far. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Brought(Arc<Mutex<Inner>>);

/// The parts of it.
#[derive(Debug, Default)]
pub struct Inner {
    pub recorder: Option<Arc<Recorder>>,
    /// The clients are at it.
    pub begun: bool,
    /// Those that keep to a pace have ended.
    pub ended: bool,
    /// Everything was read at the end; what was not there as acknowledged.
    pub read: Option<Result<Looked, String>>,
    /// What came of changes of the membership since somebody last looked.
    pub changes: Vec<Came>,
    /// Lost peers in whose place there is another one.
    pub replaced: Vec<u64>,
}

impl Brought {
    /// All of it, for a look or a change.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An actor that does nothing any more once all actors together have done so many operations.
struct Limited {
    actor: Box<dyn Actor>,
    left: Arc<AtomicU64>,
}

#[async_trait]
impl Actor for Limited {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        let one_less = |left: u64| left.checked_sub(1);
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) {
            Ok(_) => self.actor.step(access, scribe).await,
            Err(_) => sleep(IDLE).await,
        }
    }

    fn is_paced(&self) -> bool {
        self.actor.is_paced()
    }
}

/// The clients, from the first operation to the last.
pub async fn clients(plan: Plan, reach: Reach, mut phase: watch::Receiver<Phase>, brought: Brought) -> turmoil::Result {
    phase.wait_for(|phase| *phase >= Phase::Attacked).await?;
    let recorder = Recorder::new();
    brought.lock().recorder = Some(recorder.clone());
    let workload::Plan { actors, mut frame } = workload::plan(plan.workload, plan.clients, None);
    let left = Arc::new(AtomicU64::new(plan.operations));
    let limited = |actor: Box<dyn Actor>| match actor.is_paced() {
        true => Box::new(Limited { actor, left: left.clone() }) as Box<dyn Actor>,
        false => actor,
    };
    let calm = Reach { timeout: CALM_TIMEOUT, ..reach.clone() };
    let mut scribe = recorder.scribe();
    frame.prepare(&mut calm.access(u64::MAX)?, &mut scribe).await?;
    let mut clients = Clients::start(actors.into_iter().map(limited).collect(), plan.rate, &reach, &recorder)?;
    brought.lock().begun = true;
    phase.wait_for(|phase| *phase >= Phase::Ending).await?;
    clients.stop_paced(Instant::now() + reach.timeout + GRACE).await;
    brought.lock().ended = true;
    phase.wait_for(|phase| *phase >= Phase::Healed).await?;
    // Of those that were told at first, perhaps nobody belongs to the cluster any more.
    let endpoints = calm.roster.peers().into_iter().map(|(_, endpoint)| endpoint).collect();
    let mut access = Reach { endpoints, ..calm }.access(u64::MAX)?;
    let finished = frame.finish(&mut access, &mut scribe).await;
    clients.stop_waiting().await;
    let looked = match finished {
        Ok(()) => access.ledger.look(&access.store).await,
        Err(e) => Err(e),
    };
    brought.lock().read = Some(looked.map_err(|e| e.to_string()));
    Ok(())
}

/// What came of a change of the membership.
#[derive(Debug)]
pub struct Came {
    pub change: Change,
    /// It was made.
    pub done: bool,
    /// For people.
    pub told: String,
}

/// A change of the membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// This fresh peer, which joins by itself, becomes a voter.
    Promote(u64),
    Remove(u64),
    /// The fresh peer `by`, which joins by itself, takes the place of one that has lost its disk.
    Replace {
        lost: u64,
        by: u64,
    },
    Transfer,
}

/// Makes the changes that it is told of, one after the other.
pub async fn changes(reach: Reach, mut wanted: mpsc::UnboundedReceiver<Change>, brought: Brought) -> turmoil::Result {
    while let Some(change) = wanted.recv().await {
        // A client of its own for each: the members that an older one was told of may be gone.
        let endpoints = reach.roster.peers().into_iter().map(|(_, endpoint)| endpoint).collect();
        let store = Reach { endpoints, ..reach.clone() }.access(u64::MAX - 1)?.store;
        let deadline = clock::now() + CHANGE_TIMEOUT;
        let (done, told) = match change {
            Change::Promote(id) => loop {
                match store.promote(id, deadline).await {
                    Ok(answer) if answer.voter => break (true, format!("peer {id} votes")),
                    // It has not joined yet, or lags behind.
                    Ok(_) | Err(_) if clock::now() < deadline => sleep(IDLE).await,
                    Ok(_) => break (false, format!("peer {id} does not vote: it lags behind")),
                    Err(e) => break (false, format!("peer {id} does not vote: {e}")),
                }
            },
            Change::Remove(id) => match store.remove(id, false, deadline).await {
                Ok(_) => (true, format!("peer {id} is removed")),
                Err(e) => (false, format!("peer {id} is not removed: {e}")),
            },
            Change::Replace { lost, by } => {
                let until = clock::now() + REPLACE_WITHIN;
                loop {
                    match store.replace(lost, host::member(by), clock::now() + CHANGE_TIMEOUT).await {
                        Ok(_) => {
                            brought.lock().replaced.push(lost);
                            break (true, format!("peer {by} is in the place of peer {lost}"));
                        }
                        // It has not joined yet, lags behind, or nobody leads.
                        Err(_) if clock::now() < until => sleep(IDLE).await,
                        Err(e) => break (false, format!("peer {lost} is not replaced: {e}")),
                    }
                }
            }
            Change::Transfer => match store.transfer_leader(None, deadline).await {
                Ok(answer) => (true, format!("term {} has another leader", answer.term)),
                Err(e) => (false, format!("nobody took over: {e}")),
            },
        };
        brought.lock().changes.push(Came { change, done, told });
    }
    Ok(())
}
