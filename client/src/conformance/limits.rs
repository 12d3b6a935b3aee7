//! What is too much, and what is just not.

use bytes::Bytes;
use lake_proto::kv::{Invalid, KeyValue, Op};
use lake_proto::limits::{MAX_BATCH_GET_KEYS, MAX_KEY_BYTES, MAX_VALUE_BYTES};

use super::{Suite, fresh, invalid, soon, succeeded};
use crate::store::{Error, Token};

impl Suite {
    pub(super) async fn limits(&self) {
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

    /// The largest transactions that the store says it takes, and one with an operation more.
    pub(super) async fn largest_transactions(&self) {
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

    /// More than any message holds.
    pub(super) async fn much_at_once(&self) {
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
}
