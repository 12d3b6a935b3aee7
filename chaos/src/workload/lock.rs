//! Locks with fences. A lock is a scope held by a lease; its fence is the scope's. What it guards is a register that is
//! written only while the lease is alive.
//!
//! With the lock a holder puts a key that hangs on its lease. The next one must not find it: it goes with the lease. Another key
//! it hangs on the lease and takes off again, by a write or a delete, before it leaves it there without one: the next
//! one must find that.
//!
//! Half of the clients claim the lock's path, half a part of it: an ancestor and a descendant exclude each other. Some
//! holders stand still for longer than their lease lives, without keeping it alive, and then write as if nothing had
//! happened: the compare that the lease is alive is all that stops them.
//!
//! A lock is let go by the end of its lease, or by itself. Others try to let it go as well, which must come to nothing. Who is
//! refused a lock and is told that one is in the way which had been let go before says so.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::clock;
use lake_client::remote::coordination::Lease;
use lake_client::remote::keeper::LeaseKeeper;
use lake_client::store::{Error, MetaStore, ReadOptions};
use lake_proto::coordination::{LeaseId, ScopeOwner};
use lake_proto::kv::{Compare, Op, OpResult, Txn};
use rand::Rng;

use super::access::Access;
use super::{Actor, Frame, Plan, Unique, number_of, place};
use crate::check::lock;
use crate::history::{Action, Lock, Workload};
use crate::run::recorder::Scribe;

const LEASE_TTL: Duration = Duration::from_secs(1);
/// Guarded writes under one claim.
const WRITES: std::ops::Range<u32> = 1..8;
/// How often a lock is let go by itself, and not by the end of its lease.
const BY_ITSELF: f64 = 0.4;
/// How often somebody tries to let go what another one may hold.
const MEDDLES: f64 = 0.1;
/// The lease of nobody.
const NOBODY: LeaseId = LeaseId::MAX;
/// Locks that were let go of which it is known when: the newest.
const MAX_LET_GO: usize = 1_000;
/// How long a holder sleeps, with its lease kept alive or not: for longer than it lives otherwise.
const OVERSLEPT: std::ops::Range<u64> = 1_200..2_500;

pub(super) fn plan(clients: usize) -> Plan {
    let values = Unique::default();
    let locks = (clients as i64 / 3).max(1);
    let granted = Granted::default();
    let client =
        |n: usize| Client { locks, part: n % 2 == 1, values: values.clone(), granted: granted.clone(), holding: None };
    Plan::of(clients, client, Final { locks })
}

/// What clients tell each other. Cheap to clone.
#[derive(Debug, Clone, Default)]
struct Granted(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    /// The locks that somebody was told to have got, each with what is left there.
    granted: BTreeSet<i64>,
    /// By their fences, when it was acknowledged that they were let go.
    let_go: BTreeMap<u64, Instant>,
}

impl Granted {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn let_go(&self, fence: u64) {
        let mut known = self.lock();
        known.let_go.insert(fence, clock::now());
        if known.let_go.len() > MAX_LET_GO {
            known.let_go.pop_first();
        }
    }

    /// Whether one with this fence was let go before.
    fn was_let_go(&self, fence: u64, before: Instant) -> bool {
        self.lock().let_go.get(&fence).is_some_and(|at| *at < before)
    }
}

struct Holding {
    lock: i64,
    path: String,
    fence: u64,
    lease: Lease,
    /// Until its holder oversleeps.
    keeper: Option<LeaseKeeper>,
    writes_left: u32,
}

struct Client {
    locks: i64,
    /// Claims a part of the lock, which is as good as all of it.
    part: bool,
    values: Unique,
    granted: Granted,
    holding: Option<Holding>,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        match self.holding.take() {
            None if access.chance(0.3) => {
                let lock = access.rng.random_range(0..self.locks);
                // How it ended is in the history.
                let _ = read(lock, access, scribe).await;
            }
            None if access.chance(MEDDLES) => self.meddle(access).await,
            None => self.holding = self.acquire(access, scribe).await,
            Some(holding) if holding.writes_left == 0 => self.release(holding, access, scribe).await,
            Some(holding) => self.holding = self.write(holding, access, scribe).await,
        }
    }
}

impl Client {
    fn path(&self, lock: i64) -> String {
        if self.part { format!("/chaos/lock/{lock}/part") } else { format!("/chaos/lock/{lock}") }
    }

    /// Tries to let go what it does not hold. If that came to something, the next holder and the one before it would write at one
    /// time.
    async fn meddle(&self, access: &mut Access) {
        let path = self.path(access.rng.random_range(0..self.locks));
        let then = vec![Op::ReleaseScope { path, owner: ScopeOwner::Lease(NOBODY) }];
        // Whether it was tried shows in nothing else.
        let _ = access.store.commit(Txn { then, ..Txn::default() }, access.deadline()).await;
    }

    /// Hangs a key on a lease and takes it off again, so that it stays when the lease ends.
    fn taken_off(lease: LeaseId, place: &str, by_delete: bool) -> Vec<Op> {
        let put = |lease: Option<LeaseId>| Op::Put {
            key: place.to_owned(),
            value: "kept".into(),
            return_previous: lease.is_some(),
            lease,
        };
        let delete = by_delete.then(|| Op::delete(place.to_owned()));
        std::iter::once(put(Some(lease))).chain(delete).chain([put(None)]).collect()
    }

    async fn acquire(&self, access: &mut Access, scribe: &mut Scribe) -> Option<Holding> {
        let lock = access.rng.random_range(0..self.locks);
        let action = |fence| Action::Lock(Lock::Acquire { lock: lock.into(), fence });
        let deadline = access.deadline();
        // A lease is nothing to anybody yet.
        let lease = access.store.grant_lease(LEASE_TTL, "chaos", deadline).await.ok()?;
        let path = self.path(lock);
        let owner = ScopeOwner::Lease(lease.id);
        let holder = Op::Put {
            key: holder_place(lock),
            value: lease.id.to_string().into(),
            return_previous: true,
            lease: Some(lease.id),
        };
        let kept = format!("{}/kept", place(Workload::Lock, &lock.into()));
        let txn = Txn {
            when: vec![Compare::lease_alive(lease.id), Compare::scope_free(path.clone(), Some(owner.clone()))],
            then: [Op::AcquireScope { path: path.clone(), owner }, holder]
                .into_iter()
                .chain(Self::taken_off(lease.id, &kept, access.chance(0.5)))
                .collect(),
            otherwise: vec![],
        };
        let must_be_kept = self.granted.lock().granted.contains(&lock);
        let began = clock::now();
        scribe.invoke(action(None));
        let answer = access.store.commit(txn, deadline).await;
        match answer {
            Ok(done) if done.result.succeeded => {
                let Some(OpResult::AcquireScope { fence }) = done.result.results.first() else {
                    scribe.unknown(action(None), "the answer has no fence");
                    return None;
                };
                let was_there =
                    |at: usize| matches!(done.result.results.get(at), Some(OpResult::Put { previous: Some(_), .. }));
                let amiss = if was_there(1) {
                    Some(lock::LEFT_BEHIND)
                } else {
                    (must_be_kept && !was_there(2)).then_some(lock::TAKEN_ALONG)
                };
                match amiss {
                    Some(amiss) => scribe.amiss(action(Some(*fence)), Some(done.result.revision), None, amiss),
                    None => scribe.ok(action(Some(*fence)), Some(done.result.revision), None),
                }
                access.ledger.put(&kept, done.result.revision);
                self.granted.lock().granted.insert(lock);
                let keeper = access.chance(0.5).then(|| LeaseKeeper::start(access.store.clone(), lease));
                let writes_left = access.rng.random_range(WRITES);
                return Some(Holding { lock, path, fence: *fence, lease, keeper, writes_left });
            }
            // The first of two sendings may have got it, for as long as the lease lived.
            Ok(done) if done.resent => scribe.unknown(action(None), "sent twice, and the second compare failed"),
            Ok(done) if done.result.conflicts.iter().any(|scope| self.granted.was_let_go(scope.fence, began)) => {
                scribe.refused(action(None), lock::STILL_HELD);
            }
            Ok(_) => scribe.refused(action(None), "somebody holds it, or the lease is over"),
            Err(error) => scribe.change_failed(action(None), &error),
        }
        // If it fails it ends by itself.
        let _ = access.store.revoke_lease(lease.id, access.deadline()).await;
        None
    }

    async fn write(&self, mut holding: Holding, access: &mut Access, scribe: &mut Scribe) -> Option<Holding> {
        let oversleep = Duration::from_millis(access.rng.random_range(OVERSLEPT));
        if access.chance(0.06) {
            if let Some(keeper) = holding.keeper.take() {
                keeper.stop().await;
            }
            tokio::time::sleep(oversleep).await;
        } else if let Some(keeper) = &holding.keeper
            && access.chance(0.06)
        {
            // If it is lost meanwhile the write is tried at once, and shows whether that was too early.
            let _ = keeper.while_held(tokio::time::sleep(oversleep)).await;
        }
        holding.writes_left -= 1;
        let value = self.values.next();
        let action = Action::Lock(Lock::Write { lock: holding.lock.into(), fence: holding.fence, value });
        let place = place(Workload::Lock, &holding.lock.into());
        let txn = Txn {
            when: vec![Compare::lease_alive(holding.lease.id)],
            then: vec![Op::put(place.clone(), value.to_string())],
            otherwise: vec![],
        };
        scribe.invoke(action.clone());
        match access.store.commit(txn, access.deadline()).await {
            Ok(done) if done.result.succeeded => {
                scribe.ok(action, Some(done.result.revision), None);
                access.ledger.put(&place, done.result.revision);
                Some(holding)
            }
            Ok(done) if done.resent => {
                scribe.unknown(action, "sent twice, and the second compare failed");
                None
            }
            Ok(_) => {
                let until = holding.keeper.as_ref().map_or(holding.lease.held_until, LeaseKeeper::held_until);
                let is_early = clock::now() < until;
                scribe.refused(action, if is_early { lock::OVER_EARLY } else { "the lease is over" });
                None
            }
            Err(error) => {
                scribe.change_failed(action, &error);
                Some(holding)
            }
        }
    }

    async fn release(&self, holding: Holding, access: &mut Access, scribe: &mut Scribe) {
        let Holding { lock, path, fence, lease, keeper, .. } = holding;
        let action = Action::Lock(Lock::Release { lock: lock.into(), fence });
        let by_itself = access.chance(BY_ITSELF);
        if by_itself {
            let txn = Txn {
                when: vec![Compare::lease_alive(lease.id)],
                then: vec![
                    Op::ReleaseScope { path, owner: ScopeOwner::Lease(lease.id) },
                    Op::delete(holder_place(lock)),
                ],
                otherwise: vec![],
            };
            scribe.invoke(action.clone());
            match access.store.commit(txn, access.deadline()).await {
                Ok(done) if done.result.succeeded => {
                    let released = done.result.results.first() == Some(&OpResult::ReleaseScope { released: true });
                    match released || done.result.reduced.is_some() {
                        true => scribe.ok(action.clone(), Some(done.result.revision), None),
                        false => scribe.amiss(action.clone(), Some(done.result.revision), None, lock::NOT_HELD),
                    }
                    self.granted.let_go(fence);
                }
                Ok(_) => scribe.unknown(action.clone(), "the lease was over"),
                Err(error) => scribe.change_failed(action.clone(), &error),
            }
        }
        if let Some(keeper) = keeper {
            keeper.stop().await;
        }
        let deadline: Instant = access.deadline();
        if by_itself {
            // If it fails it ends by itself.
            let _ = access.store.revoke_lease(lease.id, deadline).await;
            return;
        }
        scribe.invoke(action.clone());
        match access.store.revoke_lease(lease.id, deadline).await {
            Ok(true) => {
                scribe.ok(action, None, None);
                self.granted.let_go(fence);
            }
            // It was over already, or the first of two sendings has ended it.
            Ok(false) => scribe.unknown(action, "the lease was over"),
            Err(error) => scribe.change_failed(action, &error),
        }
    }
}

/// Where the key is that hangs on the holder's lease.
fn holder_place(lock: i64) -> String {
    format!("{}/holder", place(Workload::Lock, &lock.into()))
}

/// What the guarded register holds, as any peer has it.
async fn read(lock: i64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
    let action = |value| Action::Lock(Lock::Read { lock: lock.into(), value });
    let place = place(Workload::Lock, &lock.into());
    let from = access.any_peer();
    scribe.invoke(action(None));
    let (answer, peer) = access.get(from, &place, ReadOptions::default()).await;
    match answer {
        Ok(read) => {
            let entry = read.value.as_ref();
            let value = entry.and_then(|entry| number_of(&entry.value));
            scribe.ok(action(value), entry.map(|entry| entry.mod_revision), peer);
            Ok(())
        }
        Err(error) => {
            scribe.read_failed(action(None), &error, peer);
            Err(error)
        }
    }
}

struct Final {
    locks: i64,
}

#[async_trait]
impl Frame for Final {
    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        for lock in 0..self.locks {
            read(lock, access, scribe).await?;
        }
        Ok(())
    }
}
