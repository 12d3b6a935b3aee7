//! What holds of every object store, and of bad ones.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use futures::stream::BoxStream;
use lake_proto::kv::OpResult;
use object_store::memory::InMemory;
use object_store::{CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, PutMultipartOptions};
use object_store::{PutPayload, PutResult};

use super::*;
use crate::conformance;

fn soon() -> Instant {
    clock::now() + Duration::from_secs(60)
}

#[tokio::test]
async fn an_object_store_does_what_a_store_does() {
    let store = ObjectMetaStore::open(Arc::new(InMemory::new()), "some/where", soon()).await.unwrap();
    conformance::run(Arc::new(store)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_directory_does_what_a_store_does() {
    let dir = tempfile::tempdir().unwrap();
    conformance::run(Arc::new(ObjectMetaStore::local(dir.path().join("new")).unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_stores_in_one_directory_lose_no_update() {
    let dir = tempfile::tempdir().unwrap();
    let count = async |store: ObjectMetaStore| {
        for _ in 0..50 {
            let txn = Txn { then: vec![Op::put("/kv/n", "x")], ..Txn::default() };
            assert!(store.commit(txn, soon()).await.unwrap().result.succeeded);
        }
    };
    let [one, other] = [(); 2].map(|()| ObjectMetaStore::local(dir.path()).unwrap());
    tokio::join!(count(one), count(other));
    let store = ObjectMetaStore::local(dir.path()).unwrap();
    let entry = store.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap();
    assert_eq!((entry.version, entry.mod_revision), (100, 100));
}

#[tokio::test]
async fn a_file_that_lake_did_not_write_is_named_and_left() {
    let dir = tempfile::tempdir().unwrap();
    let store = ObjectMetaStore::local(dir.path()).unwrap();
    let file = dir.path().join("d/dkv/fa");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "something else").unwrap();
    // Long enough for one attempt on any machine.
    let by = clock::now() + Duration::from_secs(2);
    let error = store.get("/kv/a", ReadOptions::default(), by).await.unwrap_err().to_string();
    assert!(error.contains("d/dkv/fa") && error.contains("no entry"), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"something else");
}

#[test]
fn any_key_has_a_path_of_its_own_and_comes_back() {
    let swaps = Swaps::Conditional;
    let store = ObjectMetaStore {
        objects: Arc::new(InMemory::new()),
        root: "r".into(),
        name: String::new(),
        swaps,
        listings: Mutex::default(),
    };
    let keys = ["/kv/a", "/kv/a/", "/kv//a", "/kv/../a", "/kv/.", "/kv/a b", "/kv/a=20b", "/kv/ä%2F#1", "a", "/"];
    let mut paths = std::collections::BTreeSet::new();
    for key in keys {
        let path = store.path(key);
        assert_eq!(Path::parse(path.as_ref()).unwrap(), path, "{key}");
        assert_eq!(store.key(&path).as_deref(), Some(key), "{path}");
        paths.insert(path);
    }
    assert_eq!(paths.len(), keys.len());
}

/// An object store whose conditions, or answers to puts, are as bad as it is told.
#[derive(Debug, Default)]
struct Bad {
    objects: InMemory,
    ignores_conditions: bool,
    /// So many puts are made and their answers lost.
    lose: AtomicU32,
    /// So many others write right after a put whose answer is lost.
    overwritten: Revision,
    /// A put whose answer is lost is made again by the client itself, which is told that it lost.
    repeats: bool,
    /// Every put is told that it lost.
    always_lost: AtomicBool,
}

impl std::fmt::Display for Bad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a bad store")
    }
}

#[async_trait]
impl ObjectStore for Bad {
    async fn put_opts(&self, at: &Path, bytes: PutPayload, options: PutOptions) -> object_store::Result<PutResult> {
        if self.ignores_conditions {
            return self.objects.put(at, bytes).await;
        }
        let lost = || object_store::Error::Precondition { path: at.to_string(), source: "lost".into() };
        if self.always_lost.load(Ordering::SeqCst) {
            return Err(lost());
        }
        let put = self.objects.put_opts(at, bytes.clone(), options).await?;
        if self.lose.load(Ordering::SeqCst) == 0 || at.as_ref().contains("probe") {
            return Ok(put);
        }
        self.lose.fetch_sub(1, Ordering::SeqCst);
        let bytes: Bytes = bytes.into();
        let mut stored = Stored::decode("/kv/n", &bytes, UpdateVersion { e_tag: None, version: None }).unwrap();
        for _ in 0..self.overwritten {
            stored.count += 1;
            stored.ids.insert(0, Uuid::new_v4());
            stored.ids.truncate(IDS_KEPT);
            let other = Stored::encode(stored.count, &stored.ids, stored.entry.as_ref());
            self.objects.put(at, other.into()).await?;
        }
        if self.repeats {
            return Err(lost());
        }
        Err(failed("the connection broke"))
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.objects.put_multipart_opts(at, options).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.objects.get_opts(at, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.objects.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.objects.copy_opts(from, to, options).await
    }
}

#[tokio::test]
async fn a_service_that_ignores_conditions_is_refused() {
    let bad = Bad { ignores_conditions: true, ..Bad::default() };
    let error = ObjectMetaStore::open(Arc::new(bad), "", soon()).await.unwrap_err();
    assert!(matches!(&error, Error::Refused { message, .. } if message.contains("If-None-Match")), "{error}");
}

fn put(value: &str) -> Txn {
    let op = Op::Put { key: "/kv/n".into(), value: value.to_owned().into(), return_previous: true, lease: None };
    Txn { then: vec![op], ..Txn::default() }
}

#[tokio::test]
async fn a_put_whose_answer_was_lost_is_found_again() {
    let bad = Arc::new(Bad::default());
    let store = ObjectMetaStore::open(bad.clone(), "", soon()).await.unwrap();
    store.commit(put("1"), soon()).await.unwrap();
    bad.lose.store(1, Ordering::SeqCst);
    let done = store.commit(put("2"), soon()).await.unwrap();
    let OpResult::Put { previous: Some(previous) } = &done.result.results[0] else { panic!("{done:?}") };
    assert_eq!((&previous.value[..], done.result.revision, done.resent), (&b"1"[..], 2, false));
    let entry = store.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap();
    assert_eq!((&entry.value[..], entry.version), (&b"2"[..], 2));
}

/// What comes of a second put whose answer is lost.
async fn second_put(bad: Bad) -> (Result<Committed, Error>, KeyValue) {
    let bad = Arc::new(bad);
    let store = ObjectMetaStore::open(bad.clone(), "", soon()).await.unwrap();
    store.commit(put("1"), soon()).await.unwrap();
    bad.lose.store(1, Ordering::SeqCst);
    let done = store.commit(put("2"), soon()).await;
    (done, store.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap())
}

#[tokio::test]
async fn a_put_that_was_lost_and_overwritten_is_found_behind_the_others() {
    for repeats in [false, true] {
        for overwritten in [0, 1, IDS_KEPT as Revision - 1] {
            let (done, entry) = second_put(Bad { overwritten, repeats, ..Bad::default() }).await;
            assert_eq!(done.unwrap().result.revision, 2);
            assert_eq!(entry.mod_revision, 2 + overwritten, "nothing on top of the others");
        }
        let overwritten = IDS_KEPT as Revision;
        let (done, entry) = second_put(Bad { overwritten, repeats, ..Bad::default() }).await;
        let error = done.unwrap_err();
        assert!(matches!(error, Error::InDoubt { .. }), "{error}");
        assert_eq!(entry.mod_revision, 2 + overwritten, "nothing on top of the others");
    }
}

#[tokio::test(start_paused = true)]
async fn a_put_that_loses_all_the_time_ends_with_its_deadline() {
    let bad = Arc::new(Bad::default());
    let store = ObjectMetaStore::open(bad.clone(), "", soon()).await.unwrap();
    bad.always_lost.store(true, Ordering::SeqCst);
    let by = clock::now() + Duration::from_millis(300);
    let ended = tokio::time::timeout(Duration::from_secs(5), store.commit(put("1"), by)).await.expect("it ends");
    let error = ended.unwrap_err();
    assert!(error.is_unavailable() && error.applied() == Applied::Unknown, "{error}");
}

#[tokio::test]
async fn a_key_that_no_object_can_be_named_for_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let local = ObjectMetaStore::local(dir.path()).unwrap();
    let objects = ObjectMetaStore::open(Arc::new(InMemory::new()), "root", soon()).await.unwrap();
    let key = |bytes| format!("/kv/{}", "k".repeat(bytes));
    for (store, most) in [(&local, FILE_NAME_BYTES - 1), (&objects, NAME_BYTES - "root/d/dkv/f".len())] {
        store.cas(&key(most), None, "v".into(), soon()).await.unwrap();
        let longer = key(most + 1);
        for error in [
            store.cas(&longer, None, "v".into(), soon()).await.unwrap_err(),
            store.get(&longer, ReadOptions::default(), soon()).await.unwrap_err(),
            store.batch_get(&[longer], ReadOptions::default(), soon()).await.unwrap_err(),
        ] {
            assert!(matches!(error, Error::Refused { .. }) && error.applied() == Applied::No, "{error}");
        }
    }
}

#[tokio::test]
async fn a_change_that_could_not_have_the_lock_was_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let store = ObjectMetaStore::local(dir.path()).unwrap();
    let held = File::options().append(true).open(dir.path().join(LOCK_FILE)).unwrap();
    held.lock().unwrap();
    let by = clock::now() + Duration::from_millis(100);
    let error = store.cas("/kv/a", None, "1".into(), by).await.unwrap_err();
    assert!(error.is_unavailable() && error.applied() == Applied::No, "{error}");
    drop(held);
    assert!(store.cas("/kv/a", None, "1".into(), soon()).await.unwrap().result.succeeded);
}
