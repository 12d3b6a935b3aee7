//! Snapshots that a peer holds, so that several reads see one revision.

use std::time::{Duration, Instant};

use lake_client::store::{Error, MetaStore, ReadOptions};
use lake_metasrv::EmbeddedStore;
use lake_metasrv::peer::Settings;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;

use crate::support::{PATIENCE, TestCluster, eventually, kind};

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_of_one_snapshot_see_one_revision_until_it_ends() {
    let mut cluster = TestCluster::founded(3, |config| config.page_life = Duration::from_secs(4)).await;
    let store = cluster.client();
    for i in 0..30 {
        cluster.put(&format!("/kv/{i:02}"), "before").await;
    }
    let opened_at = Instant::now();
    let opened = store.open_snapshot(ReadOptions::default(), soon()).await.unwrap();
    let at = ReadOptions::at(opened.value);
    for i in 0..30 {
        cluster.put(&format!("/kv/{i:02}"), "after").await;
    }
    cluster.put("/kv/new", "after").await;
    let read = async {
        let one = store.get("/kv/07", at, soon()).await?;
        let keys = ["/kv/03".to_owned(), "/kv/new".to_owned(), "/kv/09".to_owned()];
        let some = store.batch_get(&keys, at, soon()).await?;
        let first = store.list("/kv/", None, 20, at, soon()).await?;
        let second = store.list("/kv/", first.value.next.as_deref(), 20, at, soon()).await?;
        let revisions = [one.revision, some.revision, first.revision, second.revision];
        assert_eq!(revisions, [opened.revision; 4]);
        assert_eq!((some.value.len(), first.value.entries.len(), second.value.entries.len()), (2, 20, 10));
        let all = one.value.iter().chain(&some.value).chain(&first.value.entries).chain(&second.value.entries);
        assert!(all.into_iter().all(|entry| entry.value == "before"));
        Ok::<_, Error>(())
    };
    match read.await {
        Ok(()) => {}
        // A machine that is busy with other things.
        Err(Error::SnapshotExpired { .. }) if opened_at.elapsed() > Duration::from_secs(3) => {}
        Err(error) => panic!("{error}"),
    }
    assert_eq!(&store.get("/kv/07", ReadOptions::default(), soon()).await.unwrap().value.unwrap().value[..], b"after");
    let another = store.open_snapshot(ReadOptions::default(), soon()).await.unwrap();
    if store.close_snapshot(another.value, soon()).await.unwrap() {
        let closed = store.get("/kv/07", ReadOptions::at(another.value), soon()).await.unwrap_err();
        assert!(matches!(closed, Error::SnapshotExpired { .. }), "{closed}");
    } else {
        assert!(
            opened_at.elapsed() > Duration::from_secs(3),
            "it was held, unless the machine is busy with other things"
        );
    }
    assert!(!store.close_snapshot(another.value, soon()).await.unwrap(), "it is gone");
    let expired = loop {
        match store.get("/kv/07", at, soon()).await {
            Ok(read) => assert_eq!(read.revision, opened.revision),
            Err(error) => break error,
        }
        assert!(opened_at.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(matches!(expired, Error::SnapshotExpired { .. }), "{expired}");
    let unknown = v1::ReadOptions { snapshot: 77, ..v1::ReadOptions::default() };
    let status = cluster.try_get(1, "/kv/07", unknown).await.unwrap_err();
    assert_eq!(kind(&status), Kind::SnapshotExpired);
    let nested = store.open_snapshot(at, soon()).await.unwrap_err();
    assert!(matches!(nested, Error::Refused { .. }), "{nested}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedded_store_has_snapshots_too() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings { page_life: Duration::from_millis(300), ..Settings::default() };
    let store = EmbeddedStore::open_with(dir.path(), settings).await.unwrap();
    store.cas("/lake/a", None, "1".into(), soon()).await.unwrap();
    let opened = store.open_snapshot(ReadOptions::default(), soon()).await.unwrap();
    let expired = eventually("the snapshot to end", async || {
        match store.get("/lake/a", ReadOptions::at(opened.value), soon()).await {
            Ok(read) => {
                assert_eq!(read.revision, opened.revision);
                None
            }
            Err(error) => Some(error),
        }
    })
    .await;
    assert!(matches!(expired, Error::SnapshotExpired { .. }), "{expired}");
    assert!(!store.close_snapshot(opened.value, soon()).await.unwrap(), "it has ended");
    store.shutdown().await;
}
