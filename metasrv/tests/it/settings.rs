//! Quotas and the feature level of three peers.

use std::time::Instant;

use crate::support::{PATIENCE, TestCluster, eventually, kind};
use lake_client::remote::coordination::Quota;
use lake_client::store::{Applied, Error, ReadOptions};
use lake_metasrv::server::Server;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::quotas_client::QuotasClient;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_is_told_before_it_refuses_and_deletes_go_on() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let leader = cluster.leader().await;
    store.set_quota("/kv/small/", Some(1000), soon()).await.unwrap();
    cluster.put("/kv/small/a", vec![0; 700]).await;
    let quotas = store.quotas(ReadOptions::default(), soon()).await.unwrap().value;
    assert_eq!((quotas.len(), quotas[0].prefix.as_str()), (2, ""), "the whole map's comes first");
    assert_eq!(quotas[1], Quota { prefix: "/kv/small/".into(), limit_bytes: 1000, used_bytes: 711 });
    assert_eq!(cluster.status(leader).await.nearly_full_quotas, []);

    cluster.put("/kv/small/b", vec![0; 200]).await;
    for id in 1..=3 {
        let full = eventually("every peer to say so", async || {
            let status = cluster.status(id).await;
            status.nearly_full_quotas.first().cloned()
        })
        .await;
        assert_eq!((full.prefix.as_str(), full.used_bytes), ("/kv/small/", 922));
    }
    let put = Txn { then: vec![Op::put("/kv/small/c", vec![0; 200])], ..Txn::default() };
    let request = v1::TxnRequest { txn: Some(put.into()), stamp: None };
    eventually("a refusal", async || {
        let refused = cluster.kv(cluster.leader().await).txn(request.clone()).await.unwrap_err();
        (kind(&refused) == Kind::QuotaExceeded).then_some(())
    })
    .await;
    cluster.commit(Txn { then: vec![Op::delete("/kv/small/a")], ..Txn::default() }).await;
    cluster.put("/kv/small/c", vec![0; 200]).await;
    store.set_quota("/kv/small/", None, soon()).await.unwrap();
    assert_eq!(store.quotas(ReadOptions::default(), soon()).await.unwrap().value.len(), 1);

    let mut quotas = QuotasClient::new(cluster.channel(leader));
    for prefix in ["kv/", &"/".repeat(5000)] {
        let wrong = v1::SetQuotaRequest { prefix: prefix.to_owned(), bytes: Some(1), stamp: None };
        assert_eq!(kind(&quotas.set(wrong).await.unwrap_err()), Kind::InvalidArgument);
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_more_than_there_may_be_is_refused_at_once() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    let store = cluster.client();
    // The whole map has one.
    for n in 1..64 {
        store.set_quota(&format!("/kv/{n}/"), Some(1000), soon()).await.unwrap();
    }
    let refused = store.set_quota("/kv/more/", Some(1000), soon()).await.unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused}");
    assert_eq!(refused.applied(), Applied::No);
    assert!(refused.to_string().contains("64 quotas"), "{refused}");
    store.set_quota("/kv/1/", None, soon()).await.unwrap();
    store.set_quota("/kv/more/", Some(1000), soon()).await.unwrap();
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_a_newer_feature_level_is_read_by_who_knows_it_only() {
    let mut cluster = TestCluster::founded(3, |config| {
        config.feature_level = 2;
        config.storage.snapshot_entries = 50;
        config.storage.purge_margin_entries = 10;
    })
    .await;
    for id in 1..=3 {
        eventually("the feature level to rise", async || (cluster.status(id).await.feature_level == 2).then_some(()))
            .await;
    }
    let begun = cluster.status(3).await.last_log_index;
    for n in 0..200 {
        cluster.put(&format!("/kv/{n}"), "v").await;
    }
    eventually("a snapshot of the new level", async || (cluster.status(3).await.purged_index > begun).then_some(()))
        .await;
    cluster.stop(3).await;
    cluster.start(3).await;
    assert!(cluster.get(3, "/kv/199").await.is_some());

    cluster.stop(3).await;
    cluster.configs.get_mut(&3).unwrap().feature_level = 1;
    let why = match Server::start(cluster.configs[&3].clone()).await {
        Ok(_) => panic!("it reads what it does not know"),
        Err(error) => error.to_string(),
    };
    assert!(why.contains("feature level 2") && why.contains("knows 1"), "{why}");

    // Nor does an older build take such a snapshot from the leader.
    std::fs::remove_dir_all(&cluster.configs[&3].dir).unwrap();
    cluster.prepare(4, |config| config.feature_level = 2);
    cluster.start(4).await;
    cluster.client().join(cluster.named(4), soon()).await.unwrap();
    cluster.stop(4).await;
    cluster.configs.get_mut(&4).unwrap().feature_level = 1;
    for n in 0..200 {
        cluster.put(&format!("/kv/{n}"), "w").await;
    }
    // It stops at its own snapshot, at one that it is sent, or at the entry: whichever it has come to.
    let why = match Server::start(cluster.configs[&4].clone()).await {
        Ok(server) => {
            let why = tokio::time::timeout(PATIENCE, server.failed()).await.expect("it ends").to_string();
            server.shutdown().await;
            why
        }
        Err(error) => error.to_string(),
    };
    assert!(why.contains("feature level") && why.contains("knows 1"), "{why}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_feature_level_rises_once_every_peer_supports_it_and_an_older_build_stops() {
    let mut cluster = TestCluster::founded(3, |config| config.feature_level = if config.id == 3 { 1 } else { 2 }).await;
    cluster.put("/kv/a", "1").await;
    for id in 1..=3 {
        let status = cluster.status(id).await;
        let supported = if id == 3 { 1 } else { 2 };
        assert_eq!((status.supported_feature_level, status.feature_level), (supported, 1));
    }
    cluster.stop(3).await;
    cluster.configs.get_mut(&3).unwrap().feature_level = 2;
    cluster.start(3).await;
    for id in 1..=3 {
        eventually("the feature level to rise", async || (cluster.status(id).await.feature_level == 2).then_some(()))
            .await;
    }
    cluster.put("/kv/a", "2").await;

    cluster.stop(3).await;
    cluster.configs.get_mut(&3).unwrap().feature_level = 1;
    cluster.start(3).await;
    let why = tokio::time::timeout(PATIENCE, cluster.running[&3].failed()).await.unwrap().to_string();
    assert!(why.contains("feature level to 2") && why.contains("knows 1"), "{why}");
    assert_eq!(cluster.status(3).await.stage(), v1::status_response::Stage::Stopped);
    cluster.put("/kv/a", "3").await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_cannot_be_read_stops_the_peer() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let leader = cluster.leader().await;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    let (from, to) = (cluster.status(leader).await, cluster.status(follower).await);
    let (from_self, to_self) = (from.self_.unwrap(), to.self_.unwrap());
    let header = v1::RaftHeader {
        cluster_id: from.cluster_id,
        from_id: leader,
        from_incarnation: from_self.incarnation,
        to_id: follower,
        to_incarnation: to_self.incarnation,
    };
    let index = from.last_log_index + 1;
    let request = v1::AppendRequest {
        header: Some(header),
        vote: Some(v1::Vote { term: from.term, node_id: leader, committed: true }),
        entries: vec![v1::LogEntry {
            log_id: Some(v1::LogId { term: from.term, node_id: 0, index }),
            payload: Some(v1::log_entry::Payload::Command(bytes::Bytes::from_static(b"\x08\x01"))),
        }],
        ..v1::AppendRequest::default()
    };
    let refused = cluster.raft(follower).append(request).await.unwrap_err();
    assert_eq!(kind(&refused), Kind::Unavailable);
    let why = tokio::time::timeout(PATIENCE, cluster.running[&follower].failed()).await.unwrap().to_string();
    assert!(why.contains(&format!("log entry {index}")) && why.contains("cannot read"), "{why}");
    cluster.put("/kv/a", "1").await;
    cluster.stop_all().await;
}
