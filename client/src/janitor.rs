//! One janitor at a time over a store without leases: a claim that is kept as a value and advanced by compare-and-set
//! (docs/src/placement.md).
//!
//! ```text
//!   /lake/janitor/lease    whose turn it is: a holder, and a count that the holder raises to show that it lives
//!   /lake/janitor/fence    written once at each takeover: its revision is the fence of what the holder commits
//!
//!   free, or seen unchanged by THIS process for the whole time to live, on its own monotonic clock
//!     --- the lease, by compare-and-set on what was seen ---> the fence, by compare-and-set on what was there before that --> held
//!   held --- advanced in time, counted from when that was SENT ---> held
//!        `-- not in time, or another's by now ---> over
//! ```
//!
//! No wall clock is compared with another. A taker has seen the last value after its holder had sent it, so that a holder whose time to
//! live has passed since it sent its last value knows that before anybody takes over. That belief protects nothing by itself:
//! what a holder commits carries the compare that the fence is still its own ([`Held::guard`]). Between taking the lease and writing
//! the fence the one before is over by its own clock already, and from the fence on it can commit nothing, asleep or not.
//!
//! Failure cases: a holder that dies is replaced after its time to live; one that cannot reach the store stops in time; of an advance
//! of which nobody knows whether it was made, the next one finds out. A store that changes one key at a time cannot compare the
//! fence in the same transaction: it is looked up right before, and a holder that sleeps for a whole takeover between the two
//! makes one more change, which is a table's commit, or the record of a purge, by compare-and-set like any other.

use std::time::{Duration, Instant};

use bytes::Bytes;
use lake_proto::kv::{Compare, KeyValue, Revision};
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::store::{Error, ReadOptions, SharedStore, Token};

/// Whose turn it is.
pub const LEASE: &str = "/lake/janitor/lease";
/// The fence of whoever's turn it is.
pub const FENCE: &str = "/lake/janitor/fence";
/// How long one call of the store may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Looks at a lease that is another's, in its time to live.
const LOOKS: u32 = 8;
/// The longest pause between two looks.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What the lease says. JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Claim {
    /// A name that no other process has.
    holder: String,
    /// Raised with each advance.
    count: u64,
    ttl_ms: u64,
    /// The holder has ended: whoever comes next need not wait.
    #[serde(default)]
    over: bool,
}

impl Claim {
    /// What an entry says; `None`: nothing that a janitor wrote.
    fn of(entry: &KeyValue) -> Option<Self> {
        serde_json::from_slice(&entry.value).ok()
    }

    fn to_bytes(&self) -> Bytes {
        // A struct of strings and numbers cannot fail to be written.
        serde_json::to_vec(self).unwrap_or_default().into()
    }
}

/// What one process has seen of a lease that is another's, as a pure value.
#[derive(Debug, Clone, Default)]
struct Watched {
    /// A state of the lease, and when this process first saw it.
    seen: Option<(Token, Instant)>,
}

impl Watched {
    /// The lease was looked at, and the answer was there at `now`. How long it has to stay as it is until it may be taken; zero: it
    /// may be taken now.
    fn look(&mut self, entry: Option<&KeyValue>, own_ttl: Duration, now: Instant) -> Duration {
        let Some(entry) = entry else { return Duration::ZERO };
        let claim = Claim::of(entry);
        if claim.as_ref().is_some_and(|claim| claim.over) {
            return Duration::ZERO;
        }
        // What cannot be read may be from a later release: as long as one's own.
        let ttl = claim.map_or(own_ttl, |claim| Duration::from_millis(claim.ttl_ms));
        let token = Token::of(entry);
        let since = match self.seen {
            Some((seen, since)) if seen == token => since,
            _ => now,
        };
        self.seen = Some((token, since));
        ttl.saturating_sub(now.saturating_duration_since(since))
    }
}

/// A lease that this process holds.
#[derive(Debug)]
pub struct Held {
    store: SharedStore,
    claim: Claim,
    ttl: Duration,
    token: Token,
    fence: Revision,
    held_until: Instant,
}

/// Takes the lease, as soon as it is free or its holder has shown no life for its whole time to live.
///
/// # Errors
/// The store's. Nothing is held then; call again.
pub async fn take(store: &SharedStore, ttl: Duration) -> Result<Held, Error> {
    take_telling(store, ttl, |_| {}).await
}

/// The same. `waits` is told, once, that it is another's, and after how long without a sign of that one it is taken over.
///
/// # Errors
/// As [`take`].
pub async fn take_telling(
    store: &SharedStore,
    ttl: Duration,
    waits: impl FnOnce(Duration) + Send,
) -> Result<Held, Error> {
    let mut waits = Some(waits);
    let mut watched = Watched::default();
    let holder = uuid::Uuid::new_v4().to_string();
    let mut count = 0;
    loop {
        // Before the lease: a taker that sleeps from here on finds another fence.
        let fence = read(store, FENCE).await?;
        let lease = read(store, LEASE).await?;
        let wait = watched.look(lease.as_ref(), ttl, clock::now());
        if !wait.is_zero() {
            if let Some(waits) = waits.take() {
                waits(wait);
            }
            tokio::time::sleep(wait.min(ttl / LOOKS).min(LONGEST_PAUSE)).await;
            continue;
        }
        count += 1;
        let claim = Claim { holder: holder.clone(), count, ttl_ms: millis(ttl), over: false };
        let (sent, value) = (clock::now(), claim.to_bytes());
        let Some(token) = swap(store, LEASE, lease.as_ref().map(Token::of), value).await? else { continue };
        let value = Bytes::from(format!("{holder} {count}"));
        let Some(fence) = swap(store, FENCE, fence.as_ref().map(Token::of), value).await? else { continue };
        let held_until = sent + ttl;
        if clock::now() < held_until {
            let fence = fence_revision(store, fence).await?;
            return Ok(Held { store: store.clone(), claim, ttl, token, fence, held_until });
        }
    }
}

/// The revision that compares of the fence expect, if it is still this one.
async fn fence_revision(store: &SharedStore, written: Token) -> Result<Revision, Error> {
    let entry = read(store, FENCE).await?;
    // Another one's by now: nothing can be committed with 0.
    Ok(entry.filter(|entry| Token::of(entry) == written).map_or(0, |entry| entry.mod_revision))
}

async fn read(store: &SharedStore, key: &str) -> Result<Option<KeyValue>, Error> {
    Ok(store.get(key, ReadOptions::default(), clock::now() + ANSWER_WITHIN).await?.value)
}

/// Puts a value that no other process writes, if the key is as expected; says its new state.
async fn swap(store: &SharedStore, key: &str, token: Option<Token>, value: Bytes) -> Result<Option<Token>, Error> {
    let result = store.cas(key, token, value.clone(), clock::now() + ANSWER_WITHIN).await?.result;
    if result.succeeded {
        return Ok(Some(Token::at(result.revision)));
    }
    // By an attempt whose answer was lost.
    let own = result.observed.iter().find(|entry| entry.key == key && entry.value == value);
    Ok(own.map(Token::of))
}

impl Held {
    /// Until when it is certainly held, by this process's monotonic clock.
    pub fn held_until(&self) -> Instant {
        self.held_until
    }

    /// What every commit carries.
    pub fn guard(&self) -> Vec<Compare> {
        vec![Compare::mod_revision(FENCE, self.fence)]
    }

    /// Shows that its holder lives. False: it is another's by now, or was not advanced in time.
    ///
    /// # Errors
    /// The store's: try again while it is held.
    pub async fn advance(&mut self) -> Result<bool, Error> {
        let sent = clock::now();
        if sent >= self.held_until {
            return Ok(false);
        }
        self.claim.count += 1;
        let value = self.claim.to_bytes();
        let deadline = self.held_until.min(sent + ANSWER_WITHIN);
        let result = self.store.cas(LEASE, Some(self.token), value, deadline).await?.result;
        if result.succeeded {
            (self.token, self.held_until) = (Token::at(result.revision), sent + self.ttl);
            return Ok(true);
        }
        // One's own value is there if an earlier advance was made whose answer was lost.
        let there = result.observed.iter().find(|entry| entry.key == LEASE);
        let own = there.filter(|entry| Claim::of(entry).is_some_and(|claim| claim.holder == self.claim.holder));
        match own {
            Some(entry) => {
                self.token = Token::of(entry);
                Ok(clock::now() < self.held_until)
            }
            None => Ok(false),
        }
    }

    /// Lets it go, so that whoever comes next need not wait. Without it, the time to live passes first.
    ///
    /// # Errors
    /// The store's.
    pub async fn release(self) -> Result<(), Error> {
        let over = Claim { over: true, count: self.claim.count + 1, ..self.claim };
        swap(&self.store, LEASE, Some(self.token), over.to_bytes()).await.map(drop)
    }
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::{Op, Txn};

    use super::*;
    use crate::memory::MemoryStore;

    const TTL: Duration = Duration::from_secs(30);

    fn entry(claim: &Claim, mod_revision: Revision) -> KeyValue {
        let value = claim.to_bytes();
        KeyValue { key: LEASE.into(), value, version: 1, create_revision: 1, mod_revision, lease: None }
    }

    fn claim(ttl: Duration) -> Claim {
        Claim { holder: "a".into(), count: 1, ttl_ms: millis(ttl), over: false }
    }

    #[test]
    fn a_lease_is_free_only_after_its_whole_time_without_a_change_was_seen() {
        let (mut watched, start) = (Watched::default(), clock::now());
        let at = |secs| start + Duration::from_secs(secs);
        assert_eq!(watched.look(None, TTL, start), Duration::ZERO);
        // However old it is: this process sees it for the first time.
        assert_eq!(watched.look(Some(&entry(&claim(TTL), 7)), TTL, at(0)), TTL);
        assert_eq!(watched.look(Some(&entry(&claim(TTL), 7)), TTL, at(20)), Duration::from_secs(10));
        assert_eq!(watched.look(Some(&entry(&claim(TTL), 8)), TTL, at(29)), TTL, "it was advanced");
        // The holder's own time counts, not the taker's.
        let long = entry(&claim(2 * TTL), 9);
        assert_eq!(watched.look(Some(&long), TTL, at(40)), 2 * TTL);
        assert_eq!(watched.look(Some(&long), TTL, at(100)), Duration::ZERO);
        let over = Claim { over: true, ..claim(TTL) };
        assert_eq!(watched.look(Some(&entry(&over, 10)), TTL, at(101)), Duration::ZERO, "it was let go");
        let odd = KeyValue { value: "?".into(), ..entry(&over, 11) };
        assert_eq!(watched.look(Some(&odd), TTL, at(102)), TTL);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_told_so_once() {
        let store = MemoryStore::shared();
        let mut told = Vec::new();
        let _first = take_telling(&store, TTL, |left| told.push(left)).await.unwrap();
        assert!(told.is_empty(), "nobody held it");
        take_telling(&store, TTL, |left| told.push(left)).await.unwrap();
        assert_eq!(told, [TTL]);
    }

    fn may_commit(held: &Held) -> Txn {
        let then = vec![Op::put("/kv/done", held.claim.holder.clone())];
        Txn { when: held.guard(), then, otherwise: vec![] }
    }

    async fn commits(store: &SharedStore, held: &Held) -> bool {
        store.commit(may_commit(held), clock::now() + ANSWER_WITHIN).await.unwrap().result.succeeded
    }

    #[tokio::test(start_paused = true)]
    async fn a_janitor_that_sleeps_is_replaced_and_can_commit_nothing_any_more() {
        let store = MemoryStore::shared();
        let mut first = take(&store, TTL).await.unwrap();
        assert!(commits(&store, &first).await);
        let second = tokio::spawn({
            let store = store.clone();
            async move { take(&store, TTL).await.unwrap() }
        });
        // It advances in time for much longer than its time to live.
        for _ in 0..20 {
            tokio::time::sleep(TTL / 3).await;
            assert!(first.advance().await.unwrap());
            assert!(!second.is_finished() && commits(&store, &first).await);
        }
        let until = first.held_until();
        let mut second = second.await.unwrap();
        assert!(clock::now() >= until, "it knew by itself before it was replaced");
        assert!(!commits(&store, &first).await && commits(&store, &second).await);
        assert!(!first.advance().await.unwrap());
        assert!(second.advance().await.unwrap() && commits(&store, &second).await);
        // One that ends in order is followed at once.
        let now = clock::now();
        second.release().await.unwrap();
        let third = take(&store, TTL).await.unwrap();
        assert!(clock::now() == now && commits(&store, &third).await);
    }

    #[tokio::test(start_paused = true)]
    async fn of_many_that_want_it_one_has_it_at_any_moment() {
        let store = MemoryStore::shared();
        let takers = (0..8).map(|n: u32| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut held = take(&store, TTL).await.unwrap();
                let began = clock::now();
                for _ in 0..n {
                    tokio::time::sleep(TTL / 3).await;
                    assert!(held.advance().await.unwrap());
                    assert!(commits(&store, &held).await);
                }
                // Half of them just die.
                if n.is_multiple_of(2) {
                    held.release().await.unwrap();
                    return (began, clock::now());
                }
                (began, held.held_until())
            })
        });
        let mut terms = Vec::new();
        for taker in takers.collect::<Vec<_>>() {
            terms.push(taker.await.unwrap());
        }
        terms.sort();
        assert!(terms.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{terms:?}");
    }
}
