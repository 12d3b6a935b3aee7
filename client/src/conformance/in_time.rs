//! What takes time: watches, and leases.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use lake_proto::kv::{Compare, Op};

use super::{DEADLINE, Suite, failed, invalid, refused, soon, succeeded};
use crate::clock;
use crate::store::Lease;

impl Suite {
    pub(super) async fn changes_told(&self) {
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

    pub(super) async fn leases(&self) {
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
