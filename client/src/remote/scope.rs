//! Scopes that are held for as long as something lives (semantics, section 6).
//!
//! A guard has a lease of its own, which owns the scopes and is kept alive. They go with it: at once when the guard is
//! released, and after its time to live when the guard is dropped, its process dies, or the cluster cannot be reached. That
//! a guard exists protects nothing by itself: what is done under it carries its compares ([`ScopeGuard::compares`]).

use std::time::{Duration, Instant};

use lake_proto::coordination::{Scope, ScopeOwner};
use lake_proto::kv::{Compare, Op, Txn};

use super::RemoteStore;
use super::keeper::LeaseKeeper;
use crate::store::{Error, MetaStore};

/// Scopes that are held.
#[derive(Debug)]
pub struct ScopeGuard {
    store: RemoteStore,
    keeper: LeaseKeeper,
    paths: Vec<String>,
}

/// What came of asking for scopes.
#[derive(Debug)]
pub enum Acquired {
    /// They are held.
    Held(ScopeGuard),
    /// None is: these stand in the way.
    Taken(Vec<Scope>),
}

impl ScopeGuard {
    /// Acquires all of these scopes at once, or none. `holder` is shown to whoever finds them taken.
    ///
    /// # Errors
    /// `Invalid` for what is no scope's path, a time to live or a name beyond the limits; as every commit.
    pub async fn acquire(
        store: &RemoteStore,
        paths: Vec<String>,
        ttl: Duration,
        holder: &str,
        deadline: Instant,
    ) -> Result<Acquired, Error> {
        let lease = store.grant_lease(ttl, holder, deadline).await?;
        // Dropped on any way out: the lease then ends by itself.
        let guard = Self { store: store.clone(), keeper: LeaseKeeper::start(store.clone(), lease), paths };
        let owner = guard.owner();
        let acquire = |path: &String| Op::AcquireScope { path: path.clone(), owner: owner.clone() };
        let then = guard.paths.iter().map(acquire).collect();
        let txn = Txn { when: guard.compares(), then, otherwise: vec![] };
        let result = store.commit(txn, deadline).await?.result;
        if result.succeeded {
            return Ok(Acquired::Held(guard));
        }
        let lost = Error::Refused {
            doing: format!("acquiring {}", guard.paths.join(", ")),
            message: format!("lease {}, which was to own them, ended before that: try again", lease.id),
        };
        // Nobody waits for the lease: one that is not revoked ends by itself.
        if let Err(e) = guard.release(deadline).await {
            tracing::debug!(lease = lease.id, "a lease that owns nothing is left to end: {e}");
        }
        if result.conflicts.is_empty() { Err(lost) } else { Ok(Acquired::Taken(result.conflicts)) }
    }

    /// Who owns the scopes.
    pub fn owner(&self) -> ScopeOwner {
        ScopeOwner::Lease(self.keeper.id())
    }

    /// The scopes' paths.
    pub fn paths(&self) -> &[String] {
        &self.paths
    }

    /// What a transaction carries that is to take effect only while the scopes are held.
    pub fn compares(&self) -> Vec<Compare> {
        let scopes = self.paths.iter().map(|path| Compare::scope_free(path.clone(), Some(self.owner())));
        std::iter::once(Compare::lease_alive(self.keeper.id())).chain(scopes).collect()
    }

    /// The lease, for waiting until it may be lost, or working only until then.
    pub fn lease(&self) -> &LeaseKeeper {
        &self.keeper
    }

    /// Gives the scopes back. Says whether they were still held.
    ///
    /// # Errors
    /// As every call; the scopes then end with the lease, after its time to live.
    pub async fn release(self, deadline: Instant) -> Result<bool, Error> {
        let id = self.keeper.id();
        self.keeper.stop().await;
        self.store.revoke_lease(id, deadline).await
    }
}
