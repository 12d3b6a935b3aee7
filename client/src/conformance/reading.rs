//! Listings, pages and snapshots, and several keys read at once.

use std::time::Duration;

use lake_proto::kv::Op;

use super::{DEADLINE, MAX_BEGINNINGS, Suite, fresh, refused, soon, succeeded};
use crate::clock;
use crate::store::{Applied, Consistency, Error, ReadOptions};

impl Suite {
    pub(super) async fn listings(&self) {
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

    pub(super) async fn several_keys_read(&self) {
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

    /// What is held for a reader may be gone with the peer that held it: then it begins again, as every caller has to.
    pub(super) async fn pages_and_snapshots(&self) {
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
            for consistency in [Consistency::Linearizable, Consistency::Local, Consistency::Bounded(DEADLINE)] {
                let waited = ReadOptions { consistency, min_revision: newest, ..fresh() };
                let read = self.store.get(&format!("{prefix}1"), waited, soon()).await;
                let read = read.expect("a read of that revision");
                assert!(
                    read.revision >= newest && read.value.is_some_and(|entry| entry.value == "newest"),
                    "{consistency:?}"
                );
            }
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
}
