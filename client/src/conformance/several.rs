//! Several keys changed at once, and the catalog, which is made of that.

use lake_proto::kv::{Compare, Condition, Op, OpResult};
use uuid::Uuid;

use super::{Suite, failed, fresh, refused, soon, succeeded};
use crate::catalog::{Catalog, CatalogError, Namespace, TableIdent, TablePointer};

impl Suite {
    pub(super) async fn several_keys_changed(&self) {
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
    pub(super) async fn catalog(&self) {
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
}
