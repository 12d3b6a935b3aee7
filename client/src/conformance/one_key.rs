//! What is about one key: compare-and-set, blind writes, every compare, and no update lost.

use std::slice::from_ref;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use lake_proto::kv::{Compare, Condition, KeyValue, Op, OpResult, Txn};
use uuid::Uuid;

use super::{COUNTS, Suite, WRITERS, failed, soon, succeeded};
use crate::store::{Applied, Token};

impl Suite {
    pub(super) async fn one_key(&self) {
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

    pub(super) async fn no_state_comes_again(&self) {
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

    pub(super) async fn blind_writes(&self) {
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

    pub(super) async fn compares_of_one_key(&self) {
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

    pub(super) async fn no_update_is_lost(&self) {
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
}
