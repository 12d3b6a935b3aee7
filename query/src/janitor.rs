//! Upkeep without a metadata cluster: one process at a time does that of all tables, over a store that has no leases
//! ([`lake_client::janitor`] has how it is one at a time).
//!
//! ```text
//!   waits for the lease --- held ---> rounds of upkeep, the lease advanced beside them --- over, or another's ---> waits
//!                                       `-- stopped: the lease is let go
//! ```
//! Every commit carries the fence of the lease, and is begun only while that is certainly held. A round also sees to the files of dropped
//! tables ([`purges`]).
//!
//! Limits: the lease is advanced three times in its life; one statement at a time. Failure cases: a store that cannot be reached ends the
//! rounds in time, and the lease is waited for again.

pub mod purges;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::janitor::{self, Held};
use lake_client::store::SharedStore;
use lake_proto::kv::Compare;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::purges::Purged;
use crate::error::Result;
use crate::sql::Engine;
use crate::table::Tables;
use crate::upkeep::{Claim, Guard, Round, Upkeep};

/// Advances of the lease in its life.
const ADVANCES: u32 = 3;
/// The pause after the store could not be reached.
const AGAIN: Duration = Duration::from_secs(1);

/// How a janitor works.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How long the lease lives without a sign of its holder.
    pub ttl: Duration,
    /// From one round to the next.
    pub interval: Duration,
    /// How long the files of a table that was dropped with PURGE are kept, from when a janitor has seen that.
    pub retention: Duration,
    /// One round, and no more.
    pub once: bool,
    /// Called once before each wait for another one's lease, with how long that lives without a sign of its holder.
    pub waits: fn(Duration),
}

/// What is held now; `None`: nothing.
type Holding = Option<(Instant, Vec<Compare>)>;

/// All tables, while the lease is held.
#[derive(Debug)]
struct All {
    holding: watch::Receiver<Holding>,
}

#[async_trait]
impl Claim for All {
    fn guard(&self, _: Uuid) -> Option<Guard> {
        let holding = self.holding.borrow();
        holding.as_ref().filter(|(until, _)| Instant::now() < *until).map(|(_, guard)| guard.clone().into())
    }

    fn is_any(&self) -> bool {
        self.guard(Uuid::nil()).is_some()
    }

    async fn lost(&self, _: Uuid) {
        let mut holding = self.holding.clone();
        loop {
            let until = holding.borrow_and_update().as_ref().map(|(until, _)| *until);
            let Some(until) = until.filter(|until| Instant::now() < *until) else { return };
            tokio::select! {
                () = tokio::time::sleep_until(until.into()) => {}
                changed = holding.changed() => if changed.is_err() { return },
            }
        }
    }
}

/// Works until it is stopped, or with [`Options::once`] until a round is done, and says what that did.
///
/// # Errors
/// With [`Options::once`]: the round failed.
pub async fn run(
    engine: Arc<Engine>,
    store: SharedStore,
    options: Options,
    stop: &CancellationToken,
) -> Result<Option<Round>> {
    let mut is_told = false;
    loop {
        let waits = |left: Duration| {
            if !std::mem::replace(&mut is_told, true) {
                tracing::info!(?left, "another janitor holds the lease; waiting");
                (options.waits)(left);
            }
        };
        let held = tokio::select! {
            held = janitor::take_telling(&store, options.ttl, waits) => held,
            () = stop.cancelled() => return Ok(None),
        };
        let mut held = match held {
            Ok(held) => held,
            Err(error) => {
                tracing::warn!(%error, "the janitor's lease cannot be had; trying again");
                tokio::time::sleep(AGAIN).await;
                continue;
            }
        };
        tracing::info!("this process is the janitor");
        is_told = false;
        let (sender, holding) = watch::channel(Some((held.held_until(), held.guard())));
        let claim: Arc<dyn Claim> = Arc::new(All { holding });
        let mut upkeep = Upkeep::new(engine.clone(), claim.clone());
        let rounds = async {
            loop {
                let round = upkeep.round().await;
                let purged = purges::round(engine.tables(), claim.as_ref(), options.retention).await;
                let round = together(round, purged);
                if options.once {
                    return round;
                }
                match round {
                    Ok(round) if round.changed + round.failed + round.purged > 0 => tracing::info!(?round, "upkeep"),
                    Ok(_) => {}
                    Err(error) => {
                        tracing::warn!(%error, "tables could not be looked through for upkeep, or for purges")
                    }
                }
                tokio::time::sleep(options.interval).await;
            }
        };
        let ended = tokio::select! {
            round = rounds => Some(round.map(Some)),
            () = advance(&mut held, &sender, options.ttl) => None,
            () = stop.cancelled() => Some(Ok(None)),
        };
        sender.send_replace(None);
        let Some(ended) = ended else {
            tracing::warn!("the janitor's lease is over, or another process's by now");
            continue;
        };
        if let Err(error) = held.release().await {
            tracing::debug!(%error, "the janitor's lease was not let go: it ends by itself");
        }
        return ended;
    }
}

/// What a round did, of both kinds. What one of them could not even begin with did not keep the other one from being done.
fn together(round: Result<Round>, purged: Result<Purged>) -> Result<Round> {
    let (round, Purged { done, failed }) = (round?, purged?);
    Ok(Round { purged: done, failed: round.failed + failed, ..round })
}

/// Keeps the lease until it is over.
async fn advance(held: &mut Held, holding: &watch::Sender<Holding>, ttl: Duration) {
    let mut pause = ttl / ADVANCES;
    loop {
        tokio::time::sleep(pause).await;
        pause = match held.advance().await {
            Ok(true) => {
                holding.send_replace(Some((held.held_until(), held.guard())));
                ttl / ADVANCES
            }
            Ok(false) => return,
            Err(error) if Instant::now() < held.held_until() => {
                tracing::debug!(%error, "the janitor's lease was not advanced; trying again");
                AGAIN.min(ttl / (4 * ADVANCES))
            }
            Err(_) => return,
        };
    }
}

/// What runs the statements of a janitor, over tables of its own.
///
/// # Errors
/// A warehouse that cannot be written, a directory that cannot be made.
pub async fn engine(config: &crate::Config, store: SharedStore) -> Result<Arc<Engine>> {
    let tables: Arc<Tables> = crate::node::tables(config, store).await?;
    Ok(Arc::new(Engine::new(config, tables)?))
}
