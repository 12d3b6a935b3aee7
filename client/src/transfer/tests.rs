//! Everything moved between stores in memory, with and without faults.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::FutureExt;
use lake_proto::limits::MAX_VALUE_BYTES;

use super::*;
use crate::faulty::{FaultyStore, soon};
use crate::memory::MemoryStore;
use crate::store::ReadOptions;

const SHORT: Duration = Duration::from_secs(5);

fn silent(_: Progress) {}

/// A store with many small entries and some large ones, and a file of it.
async fn source(dir: &Path) -> (MemoryStore, PathBuf, Described) {
    let store = MemoryStore::new();
    let put = async |key: String, value: Bytes| {
        assert!(store.cas(&key, None, value, soon()).await.unwrap().result.succeeded);
    };
    for n in 0..3000 {
        put(format!("/kv/{n:05}"), n.to_string().into()).await;
    }
    for n in 0..5 {
        put(format!("/lake/large/{n}"), vec![n; MAX_VALUE_BYTES].into()).await;
    }
    put("/lake/nothing".to_owned(), Bytes::new()).await;
    let path = dir.join("data");
    let described = export(&store, "a test", &path, SHORT, &silent).await.unwrap();
    assert_eq!((described.sum.entries, described.left_out), (3006, 0));
    assert_eq!(described.header.revision, Some(3006));
    (store, path, described)
}

async fn content(store: &dyn MetaStore) -> Vec<(String, Bytes)> {
    let all = store.list_all("", ReadOptions::default(), soon()).await.unwrap().value;
    all.into_iter().map(|entry| (entry.key, entry.value)).collect()
}

#[tokio::test]
async fn a_store_is_moved_by_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let (old, path, described) = source(dir.path()).await;
    let new = MemoryStore::new();
    let imported = import(&path, &new, Existing::Refuse, SHORT, &silent).await.unwrap();
    assert_eq!((imported.written, imported.there, imported.verified), (3006, 0, described.sum));
    assert!(content(&new).await == content(&old).await);
    let again = dir.path().join("again");
    assert_eq!(export(&new, "a test", &again, SHORT, &silent).await.unwrap().sum, described.sum);
}

#[tokio::test]
async fn an_import_that_was_stopped_goes_on_from_there() {
    let dir = tempfile::tempdir().unwrap();
    let (old, path, _) = source(dir.path()).await;
    let new = FaultyStore::default();
    let away = |progress: Progress| {
        if progress.step == Step::Writing && progress.entries >= 1000 {
            new.away.store(true, Ordering::SeqCst);
        }
    };
    let stopped = import(&path, &new, Existing::Refuse, SHORT, &away).await.unwrap_err();
    let Error::Stopped { done, of: 3006, source } = &stopped else { panic!("{stopped}") };
    assert!(*done >= 1000 && matches!(**source, Error::Store(store::Error::Unavailable { .. })), "{stopped}");
    new.away.store(false, Ordering::SeqCst);
    let imported = import(&path, &new, Existing::Refuse, SHORT, &silent).await.unwrap();
    assert!(imported.there >= *done && imported.there + imported.written == 3006, "{imported:?}");
    assert!(content(&new).await == content(&old).await);
}

#[tokio::test]
async fn answers_that_are_lost_lose_and_double_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (old, path, described) = source(dir.path()).await;
    let new = FaultyStore::default();
    let lose = |progress: Progress| {
        if progress.step == Step::Writing {
            new.lose_answers.store(1, Ordering::SeqCst);
        }
    };
    let imported = import(&path, &new, Existing::Refuse, SHORT, &lose).await.unwrap();
    assert_eq!((imported.there + imported.written, imported.verified), (3006, described.sum));
    assert!(content(&new).await == content(&old).await);
}

#[tokio::test]
async fn what_others_write_meanwhile_is_never_taken_back_and_told() {
    let dir = tempfile::tempdir().unwrap();
    let (_, path, _) = source(dir.path()).await;
    let write = |store: &MemoryStore, key: &str| {
        let done = store.cas(key, None, "another's".into(), soon()).now_or_never();
        assert!(done.is_none_or(|done| done.is_ok()), "the first time it is written");
    };
    for existing in [Existing::Refuse, Existing::Keep, Existing::Replace] {
        let new = MemoryStore::new();
        let on = |progress: Progress| {
            if progress.step == Step::Writing {
                write(&new, "/lake/nothing");
            }
        };
        let done = import(&path, &new, existing, SHORT, &on).await;
        let value = new.get("/lake/nothing", ReadOptions::default(), soon()).await.unwrap().value.unwrap().value;
        match (existing, done) {
            (Existing::Refuse, Err(Error::Stopped { source, .. })) => {
                assert!(matches!(*source, Error::Changed { .. }), "{source}");
                assert_eq!(value, "another's");
            }
            (Existing::Keep, Ok(imported)) => assert_eq!((imported.kept, value), (1, "another's".into())),
            (Existing::Replace, Ok(imported)) => assert_eq!((imported.replaced, value), (1, Bytes::new())),
            (_, done) => panic!("{existing:?}: {done:?}"),
        }
    }
    // What is found only by the comparison in the end.
    let new = MemoryStore::new();
    let on = |progress: Progress| {
        if progress.step == Step::Writing && progress.entries == 3006 {
            write(&new, "/kv/another");
        }
    };
    let done = import(&path, &new, Existing::Refuse, SHORT, &on).await.unwrap_err();
    let Error::Stopped { source, .. } = done else { panic!("{done}") };
    assert!(matches!(*source, Error::Differs { missing: 0, other: 0, extra: 1, .. }), "{source}");
}

#[tokio::test]
async fn a_target_with_other_keys_is_refused_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let (_, path, _) = source(dir.path()).await;
    for key in ["/kv/", "/kv/00001", "/kv/00001a", "/lake/z"] {
        let new = MemoryStore::new();
        new.cas(key, None, "x".into(), soon()).await.unwrap();
        let refused = import(&path, &new, Existing::Refuse, SHORT, &silent).await.unwrap_err();
        assert!(matches!(&refused, Error::NotEmpty { key: named, .. } if named == key), "{refused}");
        assert_eq!(content(&new).await.len(), 1);
    }
}

#[tokio::test]
async fn a_listing_that_expires_all_the_time_ends_in_its_error() {
    let dir = tempfile::tempdir().unwrap();
    let store = FaultyStore::default();
    store.forgets_listings.store(true, Ordering::SeqCst);
    let error = export(&store, "a test", &dir.path().join("data"), SHORT, &silent).await.unwrap_err();
    assert!(matches!(error, Error::Store(store::Error::SnapshotExpired { .. })), "{error}");
    assert_eq!(store.calls.load(Ordering::SeqCst), LISTINGS);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
