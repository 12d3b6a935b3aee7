//! SeaweedFS, from PyPI, as a store: an S3 service that honours conditional puts.

#[path = "support/moving.rs"]
mod moving;
#[path = "support/s3.rs"]
mod s3;
mod support;

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use lake_client::conformance;
use lake_client::object::ObjectMetaStore;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::{Op, Txn};
use moving::filled_and_read_again;
use s3::S3;
use support::PATIENCE;

const BUCKET: &str = "metadata";

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

async fn store(s3: &S3, root: &str) -> ObjectMetaStore {
    ObjectMetaStore::open(s3.bucket(BUCKET), root, soon()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_s3_service_does_what_a_store_does() {
    let before = left_by_the_dead();
    let s3 = S3::start(BUCKET).await;
    conformance::run(Arc::new(store(&s3, "here").await)).await;

    let count = async |store: ObjectMetaStore| {
        for _ in 0..20 {
            let txn = Txn { then: vec![Op::put("/kv/n", "x")], ..Txn::default() };
            assert!(store.commit(txn, soon()).await.unwrap().result.succeeded);
        }
    };
    tokio::join!(count(store(&s3, "two").await), count(store(&s3, "two").await));
    let entry = store(&s3, "two").await.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap();
    assert_eq!((entry.version, entry.mod_revision), (40, 40), "two clients at once lose no update");
    let elsewhere = store(&s3, "here").await.get("/kv/n", ReadOptions::default(), soon()).await.unwrap();
    assert_eq!(elsewhere.value, None);

    filled_and_read_again(&store(&s3, "moved").await).await;

    drop(s3);
    let left: Vec<_> = left_by_the_dead().difference(&before).cloned().collect();
    assert_eq!(left, Vec::<String>::new());
}

/// What services that no longer run have left outside their tests' directories.
fn left_by_the_dead() -> BTreeSet<String> {
    let paths = std::fs::read_dir("/tmp").unwrap().map(|entry| entry.unwrap().path().display().to_string());
    let theirs = paths.filter(|path| ["/tmp/seaweedfs-", "/tmp/weed."].iter().any(|of| path.starts_with(of)));
    theirs.filter(|path| UnixStream::connect(path).is_err()).collect()
}
