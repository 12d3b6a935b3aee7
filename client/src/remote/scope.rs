//! Scopes that are held for as long as something lives (semantics, section 6).
//!
//! A guard has a lease of its own, which owns the scopes and is kept alive. They go with it: at once when the guard is
//! released or dropped, and after its time to live when its process dies, or the cluster cannot be reached. That a guard
//! exists protects nothing by itself: what is done under it carries its compares ([`ScopeGuard::commit`] puts them there).
//!
//! Who finds a scope taken is told so ([`ScopeGuard::acquire`]), or waits for it ([`ScopeGuard::wait_for`]): with reads, which
//! cost the log nothing. Whoever comes first after a release has it; there is no queue.

use std::time::{Duration, Instant};

use lake_proto::coordination::{LeaseId, Scope, ScopeOwner};
use lake_proto::kv::{Compare, Op, Txn};

use super::RemoteStore;
use super::keeper::LeaseKeeper;
use crate::backoff::Backoff;
use crate::clock;
use crate::store::{Committed, Error, InVain, Leader, MetaStore, ReadOptions};

/// How long the release of a guard that was dropped is tried. Its lease ends by itself after that.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);

/// What came of a transaction under scopes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fenced {
    /// They were held: its own compares decided.
    Ran(Committed),
    /// They are held no more, and nothing was done.
    Lost,
}

/// Scopes that are held. Dropping it, inside a tokio runtime, gives them back in the background.
#[derive(Debug)]
pub struct ScopeGuard {
    keeper: LeaseKeeper,
    leaving: Leaving,
    paths: Vec<String>,
}

/// Revokes the lease when it is dropped, unless that is done.
#[derive(Debug)]
struct Leaving {
    store: RemoteStore,
    lease: Option<LeaseId>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let Some(id) = self.lease else { return };
        // Without a runtime nobody keeps the lease alive either.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let store = self.store.clone();
        // Nobody waits for it: it ends within its deadline.
        runtime.spawn(async move {
            if let Err(e) = store.revoke_lease(id, clock::now() + RELEASE_WITHIN).await {
                tracing::debug!(lease = id, "the lease of a dropped guard is left to end by itself: {e}");
            }
        });
    }
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
    /// Acquires all of these scopes at once, or none, and waits for those that others hold until the deadline. `Taken` then,
    /// as last seen: a look for which there was less than a second may fail without that being an error.
    ///
    /// # Errors
    /// As [`ScopeGuard::acquire`]; `Unavailable` if the cluster did not answer for longer than that.
    pub async fn wait_for(
        store: &RemoteStore,
        paths: Vec<String>,
        ttl: Duration,
        holder: &str,
        deadline: Instant,
    ) -> Result<Acquired, Error> {
        let mut acquired = Self::acquire(store, paths.clone(), ttl, holder, deadline).await?;
        while let Acquired::Taken(taken) = acquired {
            for (n, scope) in taken.iter().enumerate() {
                if !is_gone_by(deadline, async || is_live(store, scope, deadline).await).await? {
                    return Ok(Acquired::Taken(taken[n..].to_vec()));
                }
            }
            let had = deadline.saturating_duration_since(clock::now());
            let again = Self::acquire(store, paths.clone(), ttl, holder, deadline).await;
            acquired = match in_time(again, had)? {
                Some(again) => again,
                None => return Ok(Acquired::Taken(taken)),
            };
        }
        Ok(acquired)
    }

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
        // Dropped on any way out.
        let leaving = Leaving { store: store.clone(), lease: Some(lease.id) };
        let guard = Self { keeper: LeaseKeeper::start(store.clone(), lease), leaving, paths };
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
        std::iter::once(self.keeper.compare()).chain(scopes).collect()
    }

    /// Runs a transaction that takes effect only while the scopes are held: with [`ScopeGuard::compares`] before its own.
    ///
    /// # Errors
    /// `Refused` if it writes in `otherwise`, which would run when the scopes are lost; as every commit; `InDoubt` if they are lost and
    /// an attempt whose answer was lost may have been applied before.
    pub async fn commit(&self, txn: Txn, deadline: Instant) -> Result<Fenced, Error> {
        let store = &self.leaving.store;
        if txn.otherwise.iter().any(Op::is_write) {
            return Err(Error::Refused {
                doing: format!("committing under {}", self.paths.join(", ")),
                message:
                    "what is written in `otherwise` would be written although the scopes are lost; write in `then`"
                        .to_owned(),
            });
        }
        let began = clock::now();
        let when = self.compares().into_iter().chain(txn.when).collect();
        let done = store.commit(Txn { when, ..txn }, deadline).await?;
        if done.result.succeeded {
            return Ok(Fenced::Ran(done));
        }
        // Was it for these compares, or for its own?
        let held = Txn { when: self.compares(), ..Txn::default() };
        let held = store.commit(held, deadline).await.map(|held| held.result.succeeded);
        let doing = format!("committing under {}", self.paths.join(", "));
        not_run(done, held, doing, began)
    }

    /// The lease, for waiting until it may be lost, or working only until then.
    pub fn lease(&self) -> &LeaseKeeper {
        &self.keeper
    }

    /// Gives the scopes back. Says whether they were still held.
    ///
    /// # Errors
    /// As every call; it is then tried in the background, and the scopes end with the lease at the latest.
    pub async fn release(self, deadline: Instant) -> Result<bool, Error> {
        let Self { keeper, mut leaving, .. } = self;
        let id = keeper.id();
        keeper.stop().await;
        let held = leaving.store.revoke_lease(id, deadline).await?;
        leaving.lease = None;
        Ok(held)
    }
}

/// What came of a transaction that did not run, by whether the scopes are held: unknown, if an attempt may have run before.
fn not_run(done: Committed, held: Result<bool, Error>, doing: String, began: Instant) -> Result<Fenced, Error> {
    let last = match held {
        Ok(true) => return Ok(Fenced::Ran(done)),
        Ok(false) if !done.resent => return Ok(Fenced::Lost),
        Err(error) if !done.resent => return Err(error),
        Ok(false) => "the scopes are held no more".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(InVain { doing, attempts: 2, elapsed: clock::since(began), leader: Leader::Without, last }.in_doubt())
}

/// What came of asking again for scopes that were taken a moment ago; `None`: with so little time, `had`, it was not answered, and
/// that says nothing. What was acquired nevertheless is given back.
fn in_time(again: Result<Acquired, Error>, had: Duration) -> Result<Option<Acquired>, Error> {
    match again {
        Err(e) if e.is_of_a_last_look(had) => Ok(None),
        again => again.map(Some),
    }
}

/// Waits until a claim that stood a moment ago is gone, as these looks at it say. False: it is not, by the deadline.
async fn is_gone_by(deadline: Instant, is_live: impl AsyncFn() -> Result<bool, Error>) -> Result<bool, Error> {
    let mut backoff = Backoff::default();
    loop {
        let had = deadline.saturating_duration_since(clock::now());
        match is_live().await {
            Ok(true) => {}
            Ok(false) => return Ok(true),
            Err(e) if e.is_of_a_last_look(had) => return Ok(false),
            Err(e) => return Err(e),
        }
        if !backoff.wait(deadline).await {
            return Ok(false);
        }
    }
}

/// Whether this very claim still stands.
async fn is_live(store: &RemoteStore, scope: &Scope, deadline: Instant) -> Result<bool, Error> {
    // In order: a scope comes before those whose paths begin with its own.
    let first = store.list_scopes(&scope.path, "", 1, ReadOptions::default(), deadline).await?;
    Ok(first.value.items.first().is_some_and(|found| (&found.path, found.fence) == (&scope.path, scope.fence)))
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::TxnResult;

    use super::*;
    use crate::store::Applied;

    /// What a look says for which there was no time.
    fn late() -> Error {
        Error::Unavailable {
            doing: "listing the scopes".into(),
            endpoints: vec![],
            attempts: 1,
            elapsed: Duration::ZERO,
            leader: Leader::Without,
            last: "Timeout expired".into(),
            applied: Applied::No,
        }
    }

    #[test]
    fn scopes_that_are_lost_do_not_say_that_nothing_was_done_where_an_answer_was_lost() {
        let end = |resent, held| {
            let done = Committed { result: TxnResult::default(), resent };
            not_run(done, held, "committing".into(), clock::now())
        };
        assert_eq!(end(false, Ok(false)), Ok(Fenced::Lost));
        for (resent, applied) in [(false, Applied::No), (true, Applied::Unknown)] {
            assert!(matches!(end(resent, Ok(true)), Ok(Fenced::Ran(done)) if done.resent == resent));
            assert_eq!(end(resent, Err(late())).unwrap_err().applied(), applied);
        }
        let unknown = end(true, Ok(false)).unwrap_err();
        assert_eq!(unknown.applied(), Applied::Unknown, "{unknown}");
    }

    /// The end of a wait of this length for a claim that stands. A look takes 5 ms; what would be answered later than after
    /// `away` is not.
    async fn waits(patience: Duration, away: Duration) -> Result<bool, Error> {
        let (began, deadline) = (clock::now(), clock::now() + patience);
        is_gone_by(deadline, async || {
            let answer = clock::now() + Duration::from_millis(5);
            if answer.duration_since(began) > away || answer > deadline {
                tokio::time::sleep_until(deadline.into()).await;
                return Err(late());
            }
            tokio::time::sleep_until(answer.into()).await;
            Ok(true)
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_comes_too_late_leaves_a_claim_as_it_was_seen() {
        // Deadlines in the middle of a look, before and behind one.
        for more in 0..300 {
            assert_eq!(waits(Duration::from_millis(1500 + more), Duration::MAX).await, Ok(false), "{more} ms more");
        }
        let patience = Duration::from_secs(10);
        assert_eq!(waits(patience, patience - Duration::from_millis(500)).await, Ok(false), "it was away for a moment");
        assert_eq!(waits(patience, patience - Duration::from_secs(3)).await, Err(late()), "nobody knows");
    }

    #[test]
    fn an_answer_for_which_there_was_no_time_is_no_failure() {
        assert!(matches!(in_time(Err(late()), Duration::from_millis(200)), Ok(None)));
        assert!(matches!(in_time(Err(late()), Duration::from_secs(5)), Err(e) if e == late()));
        let taken = in_time(Ok(Acquired::Taken(Vec::new())), Duration::ZERO);
        assert!(matches!(taken, Ok(Some(Acquired::Taken(_)))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_is_gone_is_waited_for_no_longer() {
        let began = clock::now();
        let gone =
            is_gone_by(began + Duration::from_secs(60), async || Ok(clock::since(began) < Duration::from_secs(1)));
        assert_eq!(gone.await, Ok(true));
        assert!(clock::since(began) < Duration::from_secs(2));
        let refused = Error::Refused { doing: "a test".into(), message: "no".into() };
        assert_eq!(
            is_gone_by(began, async || Err(refused.clone())).await,
            Err(refused.clone()),
            "it is no lack of time"
        );
    }
}
