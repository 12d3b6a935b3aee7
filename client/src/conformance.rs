//! What every store is held to, as a program: [`run`] uses a store the way lake does, and panics where it does something
//! else than the contract says (semantics, sections 1 to 3, and 5 and 7 as far as the store can).
//!
//! It looks at what the store says it can do ([`Capabilities`](crate::store::Capabilities)): what it can is tried, and what
//! it cannot must be refused with nothing done. It writes under `/kv/conformance/<a new id>/` and under `/lake/conformance/`,
//! and where several keys can be changed at once, makes a namespace of the catalog `conformance-<a new id>` and drops it. It
//! goes by nothing that is elsewhere, so that it may be run against a store that is in use.
//!
//! Not looked at: faults. That an answer is lost, a leader dies or a disk fails is the business of each store's own tests.

use std::collections::BTreeSet;
use std::slice::from_ref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use lake_proto::kv::{Compare, Condition, Invalid, KeyValue, Op, OpResult, Revision, Txn};
use lake_proto::limits::{MAX_BATCH_GET_KEYS, MAX_KEY_BYTES, MAX_VALUE_BYTES};
use uuid::Uuid;

use crate::catalog::{Catalog, CatalogError, Namespace, TableIdent, TablePointer};
use crate::clock;
use crate::store::{Applied, Committed, Error, Lease, ReadOptions, SharedStore, Token};

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

    async fn one_key(&self) {
        let (store, key) = (&self.store, self.key("one"));
        assert_eq!(self.get(&key).await, None);
        let created = succeeded(store.cas(&key, None, "1".into(), soon()).await).result.revision;
        let entry = self.get(&key).await.expect("it was just created");
        let expected = KeyValue {
            key: key.clone(),
            value: "1".into(),
            version: 1,
            create_revision: created,
            mod_revision: created,
            lease: None,
        };
        assert_eq!(entry, expected);
        assert_eq!(failed(store.cas(&key, None, "2".into(), soon()).await), from_ref(&entry), "the loser is shown why");

        let changed = succeeded(store.cas(&key, Some(Token::of(&entry)), "2".into(), soon()).await).result.revision;
        let now = self.get(&key).await.expect("it was just changed");
        assert_eq!(
            (&now.value[..], now.version, now.create_revision, now.mod_revision),
            (&b"2"[..], 2, created, changed)
        );
        assert!(changed > created, "revisions rise");
        let stale = store.cas(&key, Some(Token::of(&entry)), "3".into(), soon()).await;
        assert_eq!(failed(stale), from_ref(&now));
        assert!(failed(store.cas_delete(&key, Token::of(&entry), soon()).await) == [now.clone()]);
        assert_eq!(self.get(&key).await, Some(now.clone()), "a failed compare changes nothing");
        succeeded(store.cas_delete(&key, Token::at(changed), soon()).await);
        assert_eq!(self.get(&key).await, None);
        assert!(failed(store.cas(&key, Some(Token::of(&now)), "3".into(), soon()).await).is_empty(), "it is gone");
        assert!(failed(store.cas_delete(&key, Token::of(&now), soon()).await).is_empty());

        let guarded = format!("/lake/conformance/{}", Uuid::now_v7());
        let done = succeeded(store.cas(&guarded, None, Bytes::new(), soon()).await).result.revision;
        assert_eq!(self.get(&guarded).await.expect("it was just created").value, Bytes::new(), "no bytes are a value");
        succeeded(store.cas_delete(&guarded, Token::at(done), soon()).await);
    }

    async fn no_state_comes_again(&self) {
        let (store, key) = (&self.store, self.key("aba"));
        let mut seen = Vec::new();
        for _ in 0..3 {
            succeeded(store.cas(&key, None, "same".into(), soon()).await);
            let entry = self.get(&key).await.expect("it was just created");
            assert_eq!((entry.version, entry.create_revision), (1, entry.mod_revision), "it begins anew");
            for old in &seen {
                assert_ne!(*old, Token::of(&entry));
                assert_eq!(failed(store.cas_delete(&key, *old, soon()).await), from_ref(&entry));
            }
            seen.push(Token::of(&entry));
            succeeded(store.cas_delete(&key, Token::of(&entry), soon()).await);
        }
    }

    async fn blind_writes(&self) {
        let key = self.key("blind");
        let put = |value: &str| {
            vec![Op::Put { key: key.clone(), value: value.to_owned().into(), return_previous: true, lease: None }]
        };
        let delete = |return_previous| vec![Op::Delete { key: key.clone(), return_previous }];
        let done = succeeded(self.run(vec![], put("1")).await);
        assert_eq!(done.result.results, [OpResult::Put { previous: None }]);
        let first = self.get(&key).await;
        let done = succeeded(self.run(vec![], put("2")).await);
        assert_eq!(done.result.results, [OpResult::Put { previous: first }]);
        let second = self.get(&key).await;
        let done = succeeded(self.run(vec![], delete(true)).await);
        assert_eq!(done.result.results, [OpResult::Delete { deleted: true, previous: second }]);
        let nothing = succeeded(self.run(vec![], delete(false)).await);
        assert_eq!(nothing.result.results, [OpResult::Delete { deleted: false, previous: None }]);
        assert_eq!(self.get(&key).await, None);
    }

    async fn compares_of_one_key(&self) {
        let key = self.key("compares");
        self.put(&key, "1").await;
        self.put(&key, "2").await;
        let entry = self.get(&key).await.expect("it was just put");
        let compare = |condition| vec![Compare { key: key.clone(), condition }];
        let get = || vec![Op::Get { key: key.clone() }];
        for condition in [
            Condition::ModRevision(entry.mod_revision),
            Condition::CreateRevision(entry.create_revision),
            Condition::Version(2),
            Condition::Value("2".into()),
        ] {
            let done = succeeded(self.run(compare(condition), get()).await);
            assert_eq!(done.result.results, [OpResult::Get { entry: Some(entry.clone()) }]);
        }
        for condition in [
            Condition::Absent,
            Condition::ModRevision(entry.create_revision),
            Condition::CreateRevision(entry.mod_revision),
            Condition::Version(1),
            Condition::Value("1".into()),
        ] {
            let txn = Txn { when: compare(condition), then: vec![Op::put(&key, "3")], otherwise: get() };
            let done = self.store.commit(txn, soon()).await.expect("a compare that fails is an answer");
            assert!(!done.result.succeeded);
            assert_eq!(done.result.results, [OpResult::Get { entry: Some(entry.clone()) }], "`otherwise` ran");
        }
        let other = self.key("compares-otherwise");
        let txn = Txn { when: vec![Compare::absent(&other)], then: vec![], otherwise: vec![Op::put(&other, "1")] };
        succeeded(self.store.commit(txn.clone(), soon()).await);
        assert_eq!(self.get(&other).await, None, "`then` ran, which is empty");
        self.put(&other, "0").await;
        failed(self.store.commit(txn, soon()).await);
        assert_eq!(self.get(&other).await.expect("it was put").value, "1", "`otherwise` ran");
        let both = vec![Compare::mod_revision(&key, entry.mod_revision), Compare::absent(&key)];
        assert_eq!(failed(self.run(both, vec![Op::put(&key, "3")]).await), from_ref(&entry));
        assert_eq!(self.get(&key).await, Some(entry));
    }

    async fn no_update_is_lost(&self) {
        let key = self.key("count");
        // Counts of which nobody knows whether they were made.
        let doubts = AtomicU64::new(0);
        let count = async || {
            for _ in 0..COUNTS {
                loop {
                    let entry = self.get(&key).await;
                    let n: u64 = entry.as_ref().map_or(0, |entry| {
                        std::str::from_utf8(&entry.value).ok().and_then(|n| n.parse().ok()).expect("a number")
                    });
                    let token = entry.as_ref().map(Token::of);
                    let done = match self.store.cas(&key, token, (n + 1).to_string().into(), soon()).await {
                        Err(e) if e.applied() == Applied::Unknown => None,
                        done => Some(done.expect("a compare-and-set")),
                    };
                    match done {
                        Some(done) if done.result.succeeded => break,
                        Some(done) if !done.resent => {}
                        _ => {
                            doubts.fetch_add(1, Ordering::Relaxed);
                            break;
                        }
                    }
                }
            }
        };
        futures::future::join_all((0..WRITERS).map(|_| count())).await;
        let entry = self.get(&key).await.expect("it was counted on");
        let (all, doubts) = (WRITERS * COUNTS, doubts.into_inner());
        assert!(doubts < all / 4, "{doubts} of {all} counts ended in doubt");
        assert!((all - doubts..=all).contains(&entry.version), "{} of {all}, {doubts} in doubt", entry.version);
        assert_eq!(entry.value, entry.version.to_string());
    }

    async fn listings(&self) {
        let root = self.key("list");
        // What one lists under must not hide what lies deeper, and what merely begins alike is no part of it.
        let names = ["/a", "/a/", "/a/b", "/a//b", "/a/../b", "/ab", "/ä b%2F=", "/z"];
        let mut keys: Vec<String> = names.iter().map(|name| format!("{root}{name}")).collect();
        for key in &keys {
            self.put(key, "v").await;
        }
        self.put(&format!("{root}2/a"), "elsewhere").await;
        self.put(&format!("{root}/gone"), "v").await;
        succeeded(self.run(vec![], vec![Op::delete(format!("{root}/gone"))]).await);
        keys.sort();
        for prefix in [format!("{root}/"), format!("{root}/a"), format!("{root}/a/"), format!("{root}/none")] {
            let expected: Vec<_> = keys.iter().filter(|key| key.starts_with(&prefix)).cloned().collect();
            let all = self.store.list_all(&prefix, fresh(), soon()).await.expect("a listing").value;
            assert_eq!(
                all.iter().map(|e| e.key.clone()).collect::<Vec<_>>(),
                expected,
                "under {prefix:?}, in key order"
            );
            assert!(all.iter().all(|entry| entry.value == "v" && entry.version == 1));
        }
        let (mut paged, mut page, mut beginnings) = (Vec::new(), None, 1);
        loop {
            let read = match self.store.list(&format!("{root}/"), page.as_deref(), 3, fresh(), soon()).await {
                Err(Error::SnapshotExpired { .. }) if page.is_some() && beginnings < MAX_BEGINNINGS => {
                    (paged, page) = (Vec::new(), None);
                    beginnings += 1;
                    continue;
                }
                read => read.expect("a page"),
            };
            assert!(read.value.entries.len() <= 3 && !read.value.entries.is_empty(), "{:?}", read.value);
            paged.extend(read.value.entries.into_iter().map(|entry| entry.key));
            page = read.value.next;
            if page.is_none() {
                break;
            }
        }
        assert_eq!(paged, keys, "the pages together");
    }

    async fn several_keys_read(&self) {
        let keys: Vec<String> = ["c", "none", "a", "b"].map(|name| self.key(&format!("batch/{name}"))).into();
        for key in keys.iter().filter(|key| !key.ends_with("none")) {
            self.put(key, "v").await;
        }
        let read = self.store.batch_get(&keys, fresh(), soon()).await.expect("a read").value;
        let found: Vec<_> = read.into_iter().map(|entry| entry.key).collect();
        assert_eq!(
            found,
            [keys[0].clone(), keys[2].clone(), keys[3].clone()],
            "those that are there, in the order asked"
        );
        let nothing = self.store.batch_get(&[], fresh(), soon()).await.expect("a read of nothing").value;
        assert!(nothing.is_empty());
    }

    async fn limits(&self) {
        let store = &self.store;
        let long = format!("{}{}", self.root, "k".repeat(MAX_KEY_BYTES));
        for key in ["", &long] {
            invalid(store.get(key, fresh(), soon()).await);
            invalid(store.batch_get(&[key.to_owned()], fresh(), soon()).await);
            invalid(store.cas(key, None, "v".into(), soon()).await);
        }
        invalid(store.list(&long, None, 10, fresh(), soon()).await);
        let many = vec![self.key("a"); MAX_BATCH_GET_KEYS + 1];
        invalid(store.batch_get(&many, fresh(), soon()).await);
        let key = self.key("large");
        let large = Bytes::from(vec![7; MAX_VALUE_BYTES]);
        succeeded(store.cas(&key, None, large.clone(), soon()).await);
        assert_eq!(self.get(&key).await.expect("it was just put").value, large);
        invalid(store.cas(&self.key("larger"), None, vec![7; MAX_VALUE_BYTES + 1].into(), soon()).await);
        let blind = self.run(vec![], vec![Op::put("/lake/conformance", "v")]).await;
        assert!(matches!(blind, Err(Error::Invalid(Invalid::BlindWrite { .. }))), "{blind:?}");
        invalid(self.run(vec![], vec![Op::put("/elsewhere", "v")]).await);
    }

    /// More than any message holds.
    /// The largest transactions that the store says it takes, and one with an operation more.
    async fn largest_transactions(&self) {
        let can = self.store.capabilities();
        if !can.multi_key {
            return;
        }
        let prefix = self.key("largest/");
        let listed = async || self.store.list_all(&prefix, fresh(), soon()).await.expect("a listing").value;
        let put = |n: usize, value: Bytes| Op::put(format!("{prefix}{n:04}"), value);
        let puts = |count: usize| (0..count).map(|n| put(n, "v".into())).collect::<Vec<_>>();
        invalid(self.run(vec![], puts(can.txn_ops + 1)).await);
        assert_eq!(listed().await, [], "nothing of it was done");
        succeeded(self.run(vec![], puts(can.txn_ops)).await);
        assert_eq!(listed().await.len(), can.txn_ops);

        let count = can.txn_bytes.div_ceil(MAX_VALUE_BYTES) + 1;
        let (share, rest) = (can.txn_bytes / count, can.txn_bytes % count);
        let key_bytes = prefix.len() + 4;
        let value = |n: usize| vec![n as u8; share - key_bytes + if n == 0 { rest } else { 0 }];
        let largest: Vec<_> = (0..count).map(|n| put(n, value(n).into())).collect();
        succeeded(self.run(vec![], largest).await);
        let all = listed().await;
        assert!(all[..count].iter().enumerate().all(|(n, entry)| entry.value == value(n)), "each with its value");
        for some in all.chunks(can.txn_ops) {
            let deletes = some.iter().map(|entry| Op::delete(&entry.key)).collect();
            succeeded(self.run(vec![], deletes).await);
        }
    }

    async fn much_at_once(&self) {
        let prefix = self.key("much/");
        let keys: Vec<_> = (0..20).map(|n| format!("{prefix}{n:02}")).collect();
        for (n, key) in keys.iter().enumerate() {
            let value = Bytes::from(vec![n as u8; MAX_VALUE_BYTES]);
            succeeded(self.run(vec![], vec![Op::put(key, value)]).await);
        }
        let all = self.store.list_all(&prefix, fresh(), soon()).await.expect("a listing").value;
        assert!(all.iter().map(|entry| &entry.key).eq(&keys), "all of them, in order");
        let whole = |(n, entry): (usize, &KeyValue)| entry.value == vec![n as u8; MAX_VALUE_BYTES];
        assert!(all.iter().enumerate().all(whole), "each with its value");
        let some = self.store.batch_get(&keys[..7], fresh(), soon()).await.expect("a read within the limits").value;
        assert!(some == all[..7], "the same entries");
        for entry in all {
            succeeded(self.store.cas_delete(&entry.key, Token::of(&entry), soon()).await);
        }
    }

    async fn several_keys_changed(&self) {
        let (a, b) = (self.key("txn/a"), self.key("txn/b"));
        let both = || vec![Op::put(&a, "1"), Op::put(&b, "1")];
        if !self.store.capabilities().multi_key {
            refused(self.run(vec![], both()).await);
            refused(self.run(vec![Compare::absent(&a)], vec![Op::put(&b, "1")]).await);
            refused(self.run(vec![Compare::prefix_empty(&self.root)], vec![Op::put(&a, "1")]).await);
            assert_eq!((self.get(&a).await, self.get(&b).await), (None, None), "nothing was done");
            return;
        }
        let prefix = self.key("txn/");
        let done = succeeded(self.run(vec![Compare::prefix_empty(&prefix)], both()).await).result.revision;
        let (first, second) = (self.get(&a).await.expect("just put"), self.get(&b).await.expect("just put"));
        assert_eq!((first.mod_revision, second.mod_revision), (done, done), "one revision for all of it");
        let observed = failed(self.run(vec![Compare::prefix_empty(&prefix)], both()).await);
        assert_eq!(observed, [first.clone(), second.clone()]);

        let half = vec![Compare::mod_revision(&a, done), Compare::absent(&b)];
        assert_eq!(failed(self.run(half, both()).await), [first.clone(), second.clone()]);
        assert_eq!(self.get(&a).await, Some(first.clone()), "all or nothing");

        let since = |r| Compare { key: prefix.clone(), condition: Condition::PrefixUnchangedSince(r) };
        let reads = vec![
            Op::List { prefix: prefix.clone(), limit: 1 },
            Op::Get { key: b.clone() },
            Op::delete(&b),
            Op::List { prefix: prefix.clone(), limit: 10 },
        ];
        let read = succeeded(self.run(vec![since(done)], reads).await);
        let expected = [
            OpResult::List { entries: vec![first.clone()], more: true },
            OpResult::Get { entry: Some(second) },
            OpResult::Delete { deleted: true, previous: None },
            OpResult::List { entries: vec![first.clone()], more: false },
        ];
        assert_eq!(read.result.results, expected, "each operation sees those before it");
        self.put(&a, "2").await;
        failed(self.run(vec![since(done)], both()).await);
    }

    /// What lake keeps there, changed as lake does.
    async fn catalog(&self) {
        if !self.store.capabilities().multi_key {
            return;
        }
        let key = self.key("scoped");
        let free = Compare::scope_free(format!("/conformance/{}", Uuid::now_v7()), None);
        let scoped = self.run(vec![free, Compare::absent(&key)], vec![Op::put(&key, "v")]).await;
        match self.store.capabilities().scopes {
            true => drop(succeeded(scoped)),
            false => refused(scoped),
        }

        let catalog = Catalog::new(self.store.clone());
        let name = format!("conformance-{}", Uuid::now_v7());
        let outer = Namespace::new([name.as_str()]).expect("a name");
        let inner = Namespace::new([name.as_str(), "inner"]).expect("a name");
        for namespace in [&outer, &inner] {
            catalog.create_namespace(namespace, Default::default(), soon()).await.expect("a namespace");
        }
        let twice = catalog.create_namespace(&outer, [("a".into(), "b".into())].into(), soon()).await;
        assert!(matches!(twice, Err(CatalogError::NamespaceExists(_))), "{twice:?}");
        let table = TableIdent::new(inner.clone(), "t").expect("a name");
        let uuid = Uuid::now_v7();
        let pointer =
            |n: u32| TablePointer { uuid, metadata_location: format!("file:///{n}"), previous_location: None };
        let created = catalog.create_table(&table, &pointer(1), soon()).await.expect("a table");
        let swapped =
            catalog.swap_table(&table, created.mod_revision, &pointer(2), None, soon()).await.expect("a swap");
        let late = catalog.swap_table(&table, created.mod_revision, &pointer(3), None, soon()).await;
        let Err(CatalogError::Conflict { current: Some(current), .. }) = late else { panic!("{late:?}") };
        assert_eq!((&current.value, current.mod_revision), (&pointer(2), swapped.mod_revision));
        let turn = catalog.claim_turn(uuid, Uuid::now_v7(), soon()).await.expect("a claim");
        let other = catalog.swap_table(&table, swapped.mod_revision, &pointer(3), None, soon()).await;
        assert!(matches!(other, Err(CatalogError::NotYourTurn { .. })), "{other:?}");
        let last = catalog.swap_table(&table, swapped.mod_revision, &pointer(3), turn, soon()).await.expect("a swap");
        let missing = TableIdent::new(outer.clone(), "t").expect("a name");
        let read = catalog.load_tables(&[missing, table.clone()], fresh(), soon()).await.expect("a read").1;
        let read: Vec<_> = read.into_iter().map(|found| found.map(|found| found.value)).collect();
        assert_eq!(read, [None, Some(pointer(3))]);
        for (namespace, tables) in [(&outer, vec![]), (&inner, vec!["t"])] {
            assert_eq!(catalog.list_tables(namespace, soon()).await.expect("a listing"), tables);
            let full = catalog.drop_namespace(namespace, soon()).await;
            assert!(matches!(full, Err(CatalogError::NamespaceNotEmpty(_))), "{full:?}");
        }
        catalog.drop_table(&table, last.mod_revision, soon()).await.expect("a drop");
        for namespace in [&inner, &outer] {
            catalog.drop_namespace(namespace, soon()).await.expect("it is empty");
            assert!(!catalog.namespace_exists(namespace, soon()).await.expect("a read"));
        }
    }

    /// What is held for a reader may be gone with the peer that held it: then it begins again, as every caller has to.
    async fn pages_and_snapshots(&self) {
        for n in 1.. {
            match self.pages_and_snapshots_once(n).await {
                Err(Error::SnapshotExpired { .. }) if n < MAX_BEGINNINGS => {}
                done => return done.expect("pages and reads of one revision"),
            }
        }
    }

    async fn pages_and_snapshots_once(&self, n: u32) -> Result<(), Error> {
        let can = self.store.capabilities();
        let prefix = self.key(&format!("pages/{n}/"));
        for i in 0..6 {
            self.put(&format!("{prefix}{i}"), "before").await;
        }
        let first = self.store.list(&prefix, None, 2, fresh(), soon()).await.expect("a page");
        let opened = self.store.open_snapshot(fresh(), soon()).await;
        let snapshot = match can.snapshots {
            true => Some(opened.expect("a snapshot")),
            false => {
                refused(opened);
                None
            }
        };
        self.put(&format!("{prefix}1"), "after").await;
        self.put(&format!("{prefix}5"), "after").await;
        self.put(&format!("{prefix}9"), "after").await;
        succeeded(self.run(vec![], vec![Op::delete(format!("{prefix}4"))]).await);
        let mut rest = Vec::new();
        let mut page = first.value.next;
        while let Some(token) = page {
            let read = self.store.list(&prefix, Some(&token), 2, fresh(), soon()).await?;
            assert!(!can.consistent_listing || read.revision == first.revision, "every page at one revision");
            rest.extend(read.value.entries);
            page = read.value.next;
        }
        let names: Vec<_> = rest.iter().map(|entry| &entry.key[prefix.len()..]).collect();
        if can.consistent_listing {
            assert_eq!(names, ["2", "3", "4", "5"]);
            assert!(rest.iter().all(|entry| entry.value == "before"), "{rest:?}");
            let newest = self.put(&format!("{prefix}1"), "newest").await;
            let waited = ReadOptions { min_revision: newest, ..fresh() };
            let read = self.store.get(&format!("{prefix}1"), waited, soon()).await.expect("a read of that revision");
            assert!(read.revision >= newest && read.value.is_some_and(|entry| entry.value == "newest"));
            // Others may change much meanwhile, but not that much.
            let never = ReadOptions { min_revision: newest + (1 << 40), ..fresh() };
            let by = clock::now() + Duration::from_millis(200);
            let early = self.store.get(&format!("{prefix}1"), never, by).await.expect_err("it has not come");
            assert_eq!(early.applied(), Applied::No, "{early}");
        } else {
            // What is there all the time is listed once, whatever else changes.
            for there in ["2", "3", "5"] {
                assert_eq!(names.iter().filter(|name| **name == there).count(), 1, "{names:?}");
            }
            assert!(names.is_sorted(), "{names:?}");
            refused(self.store.get(&prefix, ReadOptions { min_revision: 1, ..fresh() }, soon()).await);
        }

        let Some(snapshot) = snapshot else { return Ok(()) };
        let at = ReadOptions::at(snapshot.value);
        let all = self.store.list_all(&prefix, at, soon()).await?;
        assert_eq!((all.revision, all.value.len()), (snapshot.revision, 6));
        assert!(all.value.iter().all(|entry| entry.value == "before"));
        let one = self.store.get(&format!("{prefix}4"), at, soon()).await?;
        assert!(one.value.is_some_and(|entry| entry.value == "before"), "it was there then");
        let keys = [format!("{prefix}9"), format!("{prefix}1")];
        let two = self.store.batch_get(&keys, at, soon()).await?;
        assert_eq!(two.value.iter().map(|entry| &entry.value[..]).collect::<Vec<_>>(), [b"before"]);
        // A store that keeps old states for everybody has nothing to let go.
        if self.store.close_snapshot(snapshot.value, soon()).await.expect("closing a snapshot") {
            let gone = self.store.get(&keys[0], at, soon()).await;
            assert!(matches!(gone, Err(Error::SnapshotExpired { .. })), "{gone:?}");
        }
        Ok(())
    }

    async fn changes_told(&self) {
        let prefix = self.key("watch/");
        if !self.store.capabilities().watch {
            refused(self.store.watch(&prefix, 0, soon()).await.map(drop));
            return;
        }
        let (a, b) = (format!("{prefix}a"), format!("{prefix}b"));
        let before = self.put(&a, "0").await;
        let first = self.put(&a, "1").await;
        let mut watch = self.store.watch(&prefix, first, soon()).await.expect("a watch");
        let both = succeeded(self.run(vec![], vec![Op::put(&b, "2"), Op::put(&a, "2")]).await).result.revision;
        let elsewhere = self.put(&self.key("watched-not"), "x").await;
        let mut deleted = None;
        let (mut told, mut progress) = (Vec::new(), before);
        while deleted.is_none_or(|deleted| progress < deleted) {
            // What changes elsewhere is not told, and is progress: nothing has changed here up to then.
            if progress >= elsewhere && deleted.is_none() {
                deleted = Some(succeeded(self.run(vec![], vec![Op::delete(&a)]).await).result.revision);
            }
            let message = tokio::time::timeout(DEADLINE, watch.next()).await.expect("changes in time");
            let message = message.expect("a watch does not end by itself").expect("no error");
            assert!(message.progress >= progress, "progress goes back");
            for change in message.changes {
                assert!(change.revision > progress, "{change:?} comes after {progress}");
                progress = change.revision;
                let events = change.events.into_iter().map(|e| (e.key, e.entry.map(|entry| entry.value)));
                told.push((change.revision, events.collect::<Vec<_>>()));
            }
            progress = progress.max(message.progress);
        }
        let value = |v: &'static str| Some(Bytes::from(v));
        let expected = [
            (first, vec![(a.clone(), value("1"))]),
            (both, vec![(a.clone(), value("2")), (b, value("2"))]),
            (deleted.unwrap_or_default(), vec![(a.clone(), None)]),
        ];
        assert_eq!(told, expected, "every change from there on, each transaction whole, in order");

        let mut watch = self.store.watch(&prefix, 0, soon()).await.expect("a watch");
        let next = self.put(&a, "3").await;
        let first = loop {
            let message = tokio::time::timeout(DEADLINE, watch.next()).await.expect("changes in time");
            let message = message.expect("a watch does not end by itself").expect("no error");
            assert!(message.progress < next || !message.changes.is_empty(), "a change is left out");
            if let Some(first) = message.changes.into_iter().next() {
                break first;
            }
        };
        assert_eq!(first.revision, next, "what was changed after the watch was opened, and nothing before");
    }

    async fn leases(&self) {
        let (store, key) = (&self.store, self.key("leased"));
        let hang = |lease| self.run(vec![Compare::lease_alive(lease)], vec![Op::put_leased(&key, "v", lease)]);
        let ttl = Duration::from_secs(60);
        if !store.capabilities().leases {
            refused(store.grant_lease(ttl, "conformance", soon()).await);
            refused(store.revoke_lease(1, soon()).await);
            let none = Lease { id: 1, ttl, held_until: clock::now() + ttl };
            refused(store.renew_lease(none, soon()).await);
            refused(hang(1).await);
            assert_eq!(self.get(&key).await, None, "nothing was done");
            return;
        }
        invalid(store.grant_lease(Duration::from_millis(1), "conformance", soon()).await);
        let lease = store.grant_lease(ttl, "conformance", soon()).await.expect("a lease");
        let other = store.grant_lease(ttl, "conformance", soon()).await.expect("another lease");
        assert!(lease.id != other.id && lease.ttl == ttl && lease.held_until > clock::now());
        succeeded(hang(lease.id).await);
        assert_eq!(self.get(&key).await.expect("it was just put").lease, Some(lease.id));
        let kept = succeeded(self.run(vec![], vec![Op::put(self.key("kept"), "v")]).await).result.revision;
        let renewed = store.renew_lease(lease, soon()).await.expect("a renewal").expect("it is alive");
        assert!(renewed.id == lease.id && renewed.held_until >= lease.held_until);
        assert!(store.revoke_lease(lease.id, soon()).await.expect("a revocation"));
        assert_eq!(self.get(&key).await, None, "what hangs on it goes with it");
        assert_eq!(self.get(&self.key("kept")).await.expect("it hangs on nothing").mod_revision, kept);
        assert!(!store.revoke_lease(lease.id, soon()).await.expect("an answer"), "it is over already");
        assert_eq!(store.renew_lease(lease, soon()).await.expect("an answer"), None);
        failed(hang(lease.id).await);
        assert_eq!(self.get(&key).await, None, "a holder whose lease is over changes nothing");
        succeeded(hang(other.id).await);
        assert!(store.revoke_lease(other.id, soon()).await.expect("a revocation"));
        let ids: BTreeSet<_> = [lease.id, other.id].into();
        let third = store.grant_lease(ttl, "conformance", soon()).await.expect("a lease");
        assert!(!ids.contains(&third.id), "an id is never given twice");
        assert!(store.revoke_lease(third.id, soon()).await.expect("a revocation"));

        let by = soon();
        let short = loop {
            let short = store.grant_lease(Duration::from_secs(1), "conformance", soon()).await.expect("a lease");
            // One that a busy machine has let end by now is tried again.
            if hang(short.id).await.expect("a compare that fails is an answer").result.succeeded {
                break short;
            }
            assert!(clock::now() < by, "leases end too early");
        };
        while self.get(&key).await.is_some() {
            assert!(clock::now() < by, "a lease that nobody renews does not end");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(clock::now() >= short.held_until, "it ended while its holder could believe in it");
        assert_eq!(store.renew_lease(short, soon()).await.expect("an answer"), None);
        failed(hang(short.id).await);
    }
}
