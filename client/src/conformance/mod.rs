//! What every store is held to, as a program: [`run`] uses a store the way lake does, and panics where it does something
//! else than the contract says (semantics, sections 1 to 3, and 5 and 7 as far as the store can).
//!
//! It looks at what the store says it can do ([`Capabilities`](crate::store::Capabilities)): what it can is tried, and what
//! it cannot must be refused with nothing done. It writes under `/kv/conformance/<a new id>/` and under `/lake/conformance/`,
//! and where several keys can be changed at once, makes a namespace of the catalog `conformance-<a new id>` and drops it. It
//! goes by nothing that is elsewhere, so that it may be run against a store that is in use.
//!
//! Not looked at: faults. That an answer is lost, a leader dies or a disk fails is the business of each store's own tests.

mod in_time;
mod limits;
mod one_key;
mod reading;
mod several;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use lake_proto::kv::{Compare, KeyValue, Op, Revision, Txn};
use uuid::Uuid;

use crate::clock;
use crate::store::{Applied, Committed, Error, ReadOptions, SharedStore};

/// How long a call may take, though faults be between the store and whoever has it: large listings begin again and again then.
const DEADLINE: Duration = Duration::from_secs(60);
/// Writers that count on one key at once, and how far each counts.
const WRITERS: u64 = 8;
const COUNTS: u64 = 5;
/// How often a listing may have to begin again.
const MAX_BEGINNINGS: u32 = 20;

/// Holds a store to all of it.
///
/// # Panics
/// Where it does something else.
pub async fn run(store: SharedStore) {
    let suite = Suite::of(store);
    suite.much_at_once().await;
    suite.largest_transactions().await;
    suite.all_but_much().await;
}

/// The same without what needs tens of megabytes: for stores with faults in the way, where an answer of hundreds of messages
/// would hardly ever come.
///
/// # Panics
/// Where the store does something else.
pub async fn run_small(store: SharedStore) {
    Suite::of(store).all_but_much().await;
}

fn soon() -> Instant {
    clock::now() + DEADLINE
}

fn fresh() -> ReadOptions {
    ReadOptions::default()
}

struct Suite {
    store: SharedStore,
    root: String,
}

/// Of a commit whose compares held.
#[track_caller]
fn succeeded(done: Result<Committed, Error>) -> Committed {
    let done = done.expect("a change that nothing stands against");
    assert!(done.result.succeeded, "a compare failed that holds: {:?}", done.result);
    done
}

/// Of a commit whose compares did not: what they looked at.
#[track_caller]
fn failed(done: Result<Committed, Error>) -> Vec<KeyValue> {
    let done = done.expect("a compare that fails is an answer");
    assert!(!done.result.succeeded, "a compare held that does not: {:?}", done.result);
    done.result.observed
}

/// What a store must say to what it cannot do.
#[track_caller]
fn refused<T: std::fmt::Debug>(done: Result<T, Error>) {
    let error = done.expect_err("the store says that it cannot do this");
    assert!(matches!(error, Error::Refused { .. }), "not a refusal: {error}");
    assert_eq!(error.applied(), Applied::No, "{error}");
}

#[track_caller]
fn invalid<T: std::fmt::Debug>(done: Result<T, Error>) {
    let error = done.expect_err("the contract does not allow this");
    assert!(matches!(error, Error::Invalid(_) | Error::Refused { .. }), "not said to be invalid: {error}");
    assert_eq!(error.applied(), Applied::No, "{error}");
}

impl Suite {
    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.root)
    }

    async fn get(&self, key: &str) -> Option<KeyValue> {
        self.store.get(key, fresh(), soon()).await.expect("a read").value
    }

    async fn put(&self, key: &str, value: &str) -> Revision {
        let txn = Txn { then: vec![Op::put(key, value.to_owned())], ..Txn::default() };
        succeeded(self.store.commit(txn, soon()).await).result.revision
    }

    async fn run(&self, when: Vec<Compare>, then: Vec<Op>) -> Result<Committed, Error> {
        self.store.commit(Txn { when, then, otherwise: vec![] }, soon()).await
    }

    fn of(store: SharedStore) -> Self {
        Self { root: format!("/kv/conformance/{}", Uuid::now_v7()), store }
    }

    async fn all_but_much(&self) {
        self.one_key().await;
        self.no_state_comes_again().await;
        self.blind_writes().await;
        self.compares_of_one_key().await;
        self.no_update_is_lost().await;
        self.listings().await;
        self.several_keys_read().await;
        self.limits().await;
        self.several_keys_changed().await;
        self.catalog().await;
        self.pages_and_snapshots().await;
        self.changes_told().await;
        self.leases().await;
    }
}
