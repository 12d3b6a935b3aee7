//! What a peer says when it cannot start: each time the thing that is wrong, by name.

use std::os::unix::fs::FileExt;
use std::time::Instant;

use crate::support::{PATIENCE, TestCluster, eventually, kind};
use lake_client::secret::Secret;
use lake_metasrv::config::Config;
use lake_metasrv::server::Server;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;

async fn refusal(config: Config) -> String {
    match Server::start(config).await {
        Ok(_) => panic!("the peer started"),
        Err(e) => e.to_string(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::new(1, dir.path());
    config.raft_listen = taken.local_addr().unwrap();
    let said = refusal(config).await;
    assert!(said.contains(&taken.local_addr().unwrap().to_string()) && said.contains("raft_listen"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_in_use_or_of_another_peer_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Config::new(1, dir.path())).await.unwrap();
    let said = refusal(Config::new(1, dir.path())).await;
    assert!(said.contains(&dir.path().display().to_string()) && said.contains("in use by process"), "{said}");
    server.shutdown().await;
    let said = refusal(Config::new(2, dir.path())).await;
    assert!(said.contains("belongs to peer 1"), "{said}");
    Server::start(Config::new(1, dir.path())).await.unwrap().shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_directory_is_refused_and_the_file_named() {
    let mut cluster = TestCluster::founded(3, |config| {
        config.storage.snapshot_entries = 20;
        config.storage.purge_margin_entries = 5;
    })
    .await;
    for i in 0..100 {
        cluster.put(&format!("/kv/{i}"), "1").await;
    }
    for id in 1..=3 {
        eventually("a purged log", async || (cluster.status(id).await.purged_index > 20).then_some(())).await;
    }
    cluster.stop_all().await;
    let config = |id: u64| cluster.configs[&id].clone();

    // 1: no snapshot joins the log any more.
    let snapshots = config(1).dir.join("snapshots");
    for file in std::fs::read_dir(&snapshots).unwrap() {
        let path = file.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let said = refusal(config(1)).await;
    assert!(said.contains(".snap") && said.contains("damaged") && said.contains("leave the peer stopped"), "{said}");
    std::fs::remove_dir_all(&snapshots).unwrap();
    let said = refusal(config(1)).await;
    assert!(said.contains("holds no snapshot that reaches entry"), "{said}");

    // 2: the log's file is cut off.
    let db = config(2).dir.join("log").join("db");
    let file = std::fs::File::options().write(true).open(&db).unwrap();
    file.set_len(4096).unwrap();
    let said = refusal(config(2)).await;
    assert!(said.contains(&config(2).dir.join("log").display().to_string()), "{said}");

    // 3: the mark is gone, and with it the vote.
    std::fs::remove_file(config(3).dir.join("mark")).unwrap();
    let said = refusal(config(3)).await;
    assert!(said.contains("mark") && said.contains("whom it voted for is lost"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_directory_does_not_come_back_as_itself() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    let lost = (1..=3).find(|id| *id != leader).unwrap();
    cluster.stop(lost).await;
    std::fs::remove_dir_all(&cluster.configs[&lost].dir).unwrap();
    cluster.start(lost).await;
    let error = cluster.init(lost).await.unwrap_err();
    assert_eq!(kind(&error), Kind::WrongIdentity);
    assert!(error.message().contains("start it with a new id"), "{error}");
    let status = cluster.status(lost).await;
    assert_eq!((status.stage(), status.last_log_index), (v1::status_response::Stage::Fresh, 0));
    cluster.put("/kv/a", "2").await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cluster_secret_is_asked_for_by_everything_but_health() {
    let secret = Secret::new("a-secret-of-the-cluster").unwrap();
    let with_secret = |config: &mut Config| config.secret = Some(secret.clone());
    let mut cluster = TestCluster::fresh(3, with_secret).await;
    let error = cluster.init(1).await.unwrap_err();
    assert_eq!(kind(&error), Kind::Unauthenticated);

    let mut request = tonic::Request::new(v1::InitRequest { founders: cluster.founders() });
    let value = secret.bearer();
    request.metadata_mut().insert(lake_proto::SECRET_METADATA_KEY, value.parse().unwrap());
    cluster.cluster(1).init(request).await.unwrap();
    eventually("a commit", async || {
        for id in 1..=3 {
            let txn = Txn { then: vec![Op::put("/kv/a", "1")], ..Txn::default() };
            let mut request = tonic::Request::new(v1::TxnRequest { txn: Some(txn.into()), stamp: None });
            request.metadata_mut().insert(lake_proto::SECRET_METADATA_KEY, value.parse().unwrap());
            if cluster.kv(id).txn(request).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
    let error = cluster.try_get(1, "/kv/a", v1::ReadOptions::default()).await.unwrap_err();
    assert_eq!(kind(&error), Kind::Unauthenticated);

    let address = format!("http://{}", cluster.configs[&1].listen);
    let channel = tonic::transport::Channel::from_shared(address).unwrap().connect_lazy();
    eventually("health without a secret", async || {
        let request = tonic_health::pb::HealthCheckRequest { service: "lake.v1.Kv".into() };
        let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
        let status = health.check(request).await.unwrap().into_inner().status;
        (status == tonic_health::ServingStatus::Serving as i32).then_some(())
    })
    .await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_that_is_met_while_the_peer_runs_ends_it_and_is_named() {
    // All of the log stays, and most of it is neither among the newest entries in memory nor in the store's cache.
    let mut cluster = TestCluster::founded(1, |config| {
        config.storage.snapshot_entries = 100_000;
        config.storage.snapshot_bytes = 1 << 40;
    })
    .await;
    for n in 0..96u8 {
        cluster.put(&format!("/kv/{}", n % 4), vec![n; 1 << 20]).await;
    }
    let db = cluster.configs[&1].dir.join("log/db");
    let file = std::fs::File::options().read(true).write(true).open(&db).unwrap();
    let mut byte = [0];
    for at in (1 << 20..file.metadata().unwrap().len() / 2).step_by(4096) {
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
    // What is in memory is served on.
    assert_eq!(cluster.get(1, "/kv/3").await.unwrap().value, vec![95; 1 << 20]);

    // A learner needs the log from its beginning.
    let failed = cluster.running[&1].failed();
    cluster.prepare(2, |_| {});
    cluster.start(2).await;
    let client = cluster.client();
    let joining = client.join(cluster.named(2), Instant::now() + PATIENCE);
    let why = tokio::select! {
        why = async { joining.await.ok(); failed.await } => why.to_string(),
        () = tokio::time::sleep(2 * PATIENCE) => panic!("it goes on"),
    };
    assert!(why.contains(&db.parent().unwrap().display().to_string()) && why.contains("damaged"), "{why}");
    cluster.stop_all().await;
}
