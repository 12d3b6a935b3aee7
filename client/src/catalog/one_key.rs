//! The catalog over a store that changes one key at a time
//! ([`Capabilities::multi_key`](crate::store::Capabilities::multi_key): an object store, library mode).
//!
//! ```text
//!   a transaction that writes one key --- its compares of other keys: looked up ---> one does not hold: that is the answer
//!                                     `-- its compares of that key, and the write: one transaction of the store's
//! ```
//! So namespaces and tables are created, and pointers swapped and dropped, by compare-and-set on their own keys, and what a
//! transaction would compare besides is looked up right before. A table and a view that are created at the same moment can have
//! one name; two tables of one uuid cannot be (`registering`). What writes several keys (renaming, several tables at once,
//! operations that leave their outcome), or rests on what
//! lies under a prefix (dropping a namespace, so that one which was looked up stays), goes to the store as it is, and is refused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{Compare, Condition, KeyValue, Op, Revision, Txn, TxnResult};

use crate::store::{
    Capabilities, ChangeStream, Committed, Error, Lease, MetaStore, Page, Read, ReadOptions, SharedStore, Snapshot,
};

/// The store itself, if it changes several keys in one transaction; else one that takes the catalog's.
pub fn over(store: SharedStore) -> SharedStore {
    if store.capabilities().multi_key { store } else { Arc::new(OneKey(store)) }
}

#[derive(Debug)]
struct OneKey(SharedStore);

/// The only key that a transaction writes; `None`: there are several, or it reads and writes otherwise.
fn only_written(txn: &Txn) -> Option<String> {
    let mut keys = txn.then.iter().map(|op| op.is_write().then(|| op.key()));
    let first = keys.next()??;
    (txn.otherwise.is_empty() && keys.all(|key| key == Some(first))).then(|| first.to_owned())
}

/// Whether a compare of one key holds of the state that was read; `None`: it is not about one key's state.
fn holds(compare: &Compare, entry: Option<&KeyValue>) -> Option<bool> {
    match &compare.condition {
        Condition::Absent => Some(entry.is_none()),
        Condition::ModRevision(revision) => Some(entry.is_some_and(|entry| entry.mod_revision == *revision)),
        _ => None,
    }
}

#[async_trait]
impl MetaStore for OneKey {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        self.0.get(key, options, by).await
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        self.0.batch_get(keys, options, by).await
    }

    async fn list(
        &self,
        prefix: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Page>, Error> {
        self.0.list(prefix, page, limit, options, by).await
    }

    async fn open_snapshot(&self, options: ReadOptions, by: Instant) -> Result<Read<Snapshot>, Error> {
        self.0.open_snapshot(options, by).await
    }

    async fn close_snapshot(&self, snapshot: Snapshot, by: Instant) -> Result<bool, Error> {
        self.0.close_snapshot(snapshot, by).await
    }

    async fn commit(&self, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let Some(key) = only_written(&txn) else { return self.0.commit(txn, by).await };
        if txn.when.iter().any(|compare| compare.key != key && holds(compare, None).is_none()) {
            return self.0.commit(txn, by).await;
        }
        let (own, others): (Vec<_>, Vec<_>) = txn.when.into_iter().partition(|compare| compare.key == key);
        if !others.is_empty() {
            let mut keys: Vec<String> = others.iter().map(|compare| compare.key.clone()).collect();
            keys.push(key);
            let observed = self.0.batch_get(&keys, ReadOptions::default(), by).await?.value;
            let entry = |key: &str| observed.iter().find(|entry| entry.key == key);
            if !others.iter().all(|compare| holds(compare, entry(&compare.key)) == Some(true)) {
                let result = TxnResult { observed, ..TxnResult::default() };
                return Ok(Committed { result, resent: false });
            }
        }
        self.0.commit(Txn { when: own, then: txn.then, otherwise: Vec::<Op>::new() }, by).await
    }

    async fn watch(&self, prefix: &str, from: Revision, by: Instant) -> Result<ChangeStream, Error> {
        self.0.watch(prefix, from, by).await
    }

    async fn grant_lease(&self, ttl: Duration, holder: &str, by: Instant) -> Result<Lease, Error> {
        self.0.grant_lease(ttl, holder, by).await
    }

    async fn renew_lease(&self, lease: Lease, by: Instant) -> Result<Option<Lease>, Error> {
        self.0.renew_lease(lease, by).await
    }

    async fn revoke_lease(&self, id: LeaseId, by: Instant) -> Result<bool, Error> {
        self.0.revoke_lease(id, by).await
    }
}

#[cfg(all(test, feature = "store-object"))]
mod tests {
    use std::collections::BTreeSet;

    use uuid::Uuid;

    use super::*;
    use crate::catalog::{Catalog, CatalogError, Namespace, Operation, TableChange, TableIdent, TablePointer};
    use crate::faulty::soon;
    use crate::store::{Applied, Token};

    fn pointer() -> TablePointer {
        let uuid = Uuid::new_v4();
        TablePointer { uuid, metadata_location: format!("file:///t-{uuid}/0.json"), previous_location: None }
    }

    #[tokio::test]
    async fn writers_on_one_directory_change_tables_and_nothing_that_takes_several_keys() {
        const TIMES: usize = 20;
        let dir = tempfile::tempdir().unwrap();
        let open = || Catalog::new(over(Arc::new(crate::object::ObjectMetaStore::local(dir.path()).unwrap())));
        let (one, two) = (open(), open());
        let nested: Namespace = "a.b".parse().unwrap();
        let table = TableIdent::new(nested.clone(), "t").unwrap();
        let missing = one.create_table(&table, &pointer(), soon()).await;
        assert!(matches!(missing, Err(CatalogError::NamespaceNotFound(_))), "{missing:?}");
        for name in ["a", "a.b"] {
            one.create_namespace(&name.parse().unwrap(), Default::default(), soon()).await.unwrap();
        }
        let first = one.create_table(&table, &pointer(), soon()).await.unwrap();
        assert_eq!(two.create_table(&table, &pointer(), soon()).await, Err(CatalogError::TableExists(table.clone())));
        assert_eq!(two.create_view(&table, &pointer(), soon()).await, Err(CatalogError::TableExists(table.clone())));
        assert_eq!(two.list_tables(&nested, soon()).await.unwrap(), ["t"]);
        assert_eq!(two.claim_turn(first.value.uuid, Uuid::new_v4(), soon()).await.unwrap(), None, "nobody has turns");

        // Each swaps what the other has left, and none of the swaps is lost: every one names those before it.
        let writer = async |catalog: &Catalog, name: &str| {
            for n in 0..TIMES {
                let mut base = catalog.load_table(&table, soon()).await.unwrap().unwrap();
                loop {
                    let next = TablePointer {
                        uuid: base.value.uuid,
                        metadata_location: format!("{}/{name}{n}", base.value.metadata_location),
                        previous_location: Some(base.value.metadata_location),
                    };
                    match catalog.swap_table(&table, base.mod_revision, &next, None, soon()).await {
                        Ok(_) => break,
                        Err(CatalogError::Conflict { current: Some(current), resent: false, .. }) => base = current,
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        };
        tokio::join!(writer(&one, "one"), writer(&two, "two"));
        let last = two.load_table(&table, soon()).await.unwrap().unwrap();
        let added = last.value.metadata_location.strip_prefix(&first.value.metadata_location).unwrap();
        let swaps: BTreeSet<&str> = added.split('/').filter(|swap| !swap.is_empty()).collect();
        assert_eq!(swaps.len(), 2 * TIMES, "{added}");

        let other = TableIdent::new(nested.clone(), "u").unwrap();
        let change = |table: &TableIdent| TableChange { table: table.clone(), expected: None, new: pointer() };
        let within = one.within(Operation::new("test", "1", "done").unwrap());
        let third = TableIdent::new(nested.clone(), "v").unwrap();
        for refused in [
            one.rename_table(&table, &other, soon()).await.map(drop),
            one.drop_namespace(&nested, soon()).await,
            one.change_tables(&[change(&third), change(&other)], soon()).await.map(drop),
            within.create_table(&other, &pointer(), soon()).await.map(drop),
        ] {
            let error = refused.unwrap_err();
            assert!(error.to_string().contains("one key at a time") && error.applied() == Applied::No, "{error}");
        }
        assert_eq!(one.change_tables(&[change(&other)], soon()).await.unwrap().len(), 1);
        assert!(one.drop_table(&table, first.mod_revision, soon()).await.is_err());
        one.drop_table(&table, last.mod_revision, soon()).await.unwrap();
        let name = format!("/lake/named/{}", last.value.uuid);
        assert_eq!(one.store().get(&name, ReadOptions::default(), soon()).await.unwrap().value, None);
        assert_eq!(two.load_table(&table, soon()).await.unwrap(), None);
        let again = two.create_table(&table, &pointer(), soon()).await.unwrap();
        assert!(again.mod_revision > last.mod_revision, "no state of it comes again");
    }

    #[tokio::test]
    async fn of_two_who_register_at_once_at_most_one_is_told_that_it_did() {
        const TIMES: usize = 20;
        let dir = tempfile::tempdir().unwrap();
        let open = || Catalog::new(over(Arc::new(crate::object::ObjectMetaStore::local(dir.path()).unwrap())));
        let (one, two) = (open(), open());
        let namespace: Namespace = "n".parse().unwrap();
        one.create_namespace(&namespace, Default::default(), soon()).await.unwrap();
        let [a, b] = ["a", "b"].map(|name| TableIdent::new(namespace.clone(), name).unwrap());
        let mut made = 0;
        for n in 0..TIMES {
            let new = pointer();
            if n % 2 == 0 {
                // Somebody who took the name has ended, or is about to make a table.
                let (name, key) = (format!("/lake/named/{}", new.uuid), a.key());
                assert!(one.store().cas(&name, None, key.into(), soon()).await.unwrap().result.succeeded);
            }
            let first = one.register_table(&a, &new, None, soon());
            let both: [_; 2] = tokio::join!(first, two.register_table(&b, &new, None, soon())).into();
            assert!(both.iter().any(Result::is_err), "{both:?}");
            for (ident, registered) in [&a, &b].into_iter().zip(both) {
                let there = one.load_table(ident, soon()).await.unwrap();
                match registered {
                    Ok(registered) => {
                        assert_eq!(there.unwrap().value, new);
                        let twin = two.register_table(if *ident == a { &b } else { &a }, &new, None, soon()).await;
                        assert_eq!(twin, Err(CatalogError::Registered(ident.clone())));
                        one.drop_table(ident, registered.mod_revision, soon()).await.unwrap();
                        made += 1;
                    }
                    Err(error) => {
                        assert!(matches!(error, CatalogError::Registered(_)), "{error}");
                        assert_eq!(there, None, "what was made of it is gone");
                    }
                }
            }
        }
        assert!(made > 0, "nobody ever registered anything");

        // In the place of a table of another uuid.
        let [old, new] = [pointer(), pointer()];
        let there = one.create_table(&a, &old, soon()).await.unwrap();
        let other = one.create_table(&b, &pointer(), soon()).await.unwrap();
        let twin = TablePointer { uuid: other.value.uuid, ..pointer() };
        let refused = two.register_table(&a, &twin, Some(there.mod_revision), soon()).await;
        assert_eq!(refused, Err(CatalogError::Registered(b.clone())));
        assert_eq!(two.load_table(&a, soon()).await.unwrap().unwrap().value, old);
        two.register_table(&a, &new, Some(there.mod_revision), soon()).await.unwrap();
        two.register_table(&TableIdent::new(namespace.clone(), "c").unwrap(), &old, None, soon()).await.unwrap();

        // Where the tables are from before there were names.
        for name in [other.value.uuid.to_string(), new.uuid.to_string(), "all".to_owned()] {
            let name = format!("/lake/named/{name}");
            let read = one.store().get(&name, ReadOptions::default(), soon()).await.unwrap();
            if let Some(there) = read.value {
                assert!(one.store().cas_delete(&name, Token::of(&there), soon()).await.unwrap().result.succeeded);
            }
        }
        for (ident, uuid) in [(&b, other.value.uuid), (&a, new.uuid)] {
            let twin = TablePointer { uuid, ..pointer() };
            let d = TableIdent::new(namespace.clone(), "d").unwrap();
            assert_eq!(
                open().register_table(&d, &twin, None, soon()).await,
                Err(CatalogError::Registered(ident.clone()))
            );
        }
    }
}
