//! The store inside one process, and its directory's way to becoming a peer.

use std::time::{Duration, Instant};

use crate::support::{TestCluster, eventually};
use lake_client::store::{Consistency, Error, MetaStore, ReadOptions, Token};
use lake_metasrv::config::Config;
use lake_metasrv::{EmbeddedStore, Server};
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::v1;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedded_store_keeps_what_it_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(dir.path()).await.unwrap();
    let created = store.cas("/lake/table/a", None, "1".into(), soon()).await.unwrap().result;
    assert!(created.succeeded);
    let lost = store.cas("/lake/table/a", None, "2".into(), soon()).await.unwrap().result;
    assert!(!lost.succeeded);
    assert_eq!((lost.observed.len(), &lost.observed[0].value[..]), (1, &b"1"[..]));
    let many = Txn {
        when: vec![Compare::prefix_empty("/kv/")],
        then: (0..25).map(|i| Op::put(format!("/kv/{i:02}"), "v")).collect(),
        otherwise: vec![],
    };
    assert!(store.commit(many, soon()).await.unwrap().result.succeeded);
    let blind = Txn { then: vec![Op::put("/lake/x", "1")], ..Txn::default() };
    assert!(matches!(store.commit(blind, soon()).await, Err(Error::Invalid(_))));

    let first = store.list("/kv/", None, 10, ReadOptions::default(), soon()).await.unwrap();
    store.cas_delete("/lake/table/a", Token::at(created.revision), soon()).await.unwrap();
    let second = store.list("/kv/", first.value.next.as_deref(), 10, ReadOptions::default(), soon()).await.unwrap();
    assert_eq!(first.revision, second.revision);
    let all = store.list_all("/kv/", ReadOptions::default(), soon()).await.unwrap();
    assert_eq!(all.value.len(), 25);
    let keys = ["/kv/01".to_owned(), "/kv/none".to_owned(), "/kv/00".to_owned()];
    let some = store.batch_get(&keys, ReadOptions::default(), soon()).await.unwrap();
    assert_eq!(some.value.iter().map(|e| e.key.as_str()).collect::<Vec<_>>(), ["/kv/01", "/kv/00"]);
    let local = ReadOptions { consistency: Consistency::Local, ..ReadOptions::default() };
    assert_eq!(store.get("/lake/table/a", local, soon()).await.unwrap().value, None);
    let future = ReadOptions { min_revision: 1000, ..ReadOptions::default() };
    let error = store.get("/kv/00", future, Instant::now() + Duration::from_millis(50)).await.unwrap_err();
    assert!(error.is_unavailable(), "a revision in the future is waited for up to the deadline: {error}");

    let taken = EmbeddedStore::open(dir.path()).await.unwrap_err().to_string();
    assert!(taken.contains("in use") && taken.contains(&std::process::id().to_string()), "{taken}");
    store.shutdown().await;
    let error = store.get("/kv/00", ReadOptions::default(), Instant::now() + Duration::from_millis(200)).await;
    assert!(error.is_err(), "a closed store answers nothing");

    let store = EmbeddedStore::open(dir.path()).await.unwrap();
    assert_eq!(store.get("/kv/24", ReadOptions::default(), soon()).await.unwrap().value.unwrap().version, 1);
    store.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn its_directory_can_later_be_a_peer() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(dir.path()).await.unwrap();
    store.cas("/kv/a", None, "1".into(), soon()).await.unwrap();
    store.shutdown().await;

    let server = Server::start(Config::new(1, dir.path())).await.unwrap();
    let cluster =
        v1::cluster_client::ClusterClient::connect(format!("http://{}", server.grpc_address())).await.unwrap();
    let leader = eventually("the peer to lead itself", async || {
        cluster.clone().leader(v1::LeaderRequest::default()).await.unwrap().into_inner().leader
    })
    .await;
    assert_eq!(leader.grpc_address, server.grpc_address().to_string(), "it says where it is now, not where it was");
    eventually("the peer to have recovered what it held", async || {
        let status = cluster.clone().status(v1::StatusRequest {}).await.unwrap().into_inner();
        (status.keys == 1).then_some(())
    })
    .await;
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_with_other_voters_is_refused() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    cluster.stop_all().await;
    let error = EmbeddedStore::open(&cluster.configs[&2].dir).await.unwrap_err().to_string();
    assert!(error.contains("3 voters") && error.contains("lake metasrv"), "{error}");
    cluster.start(2).await;
    cluster.stop_all().await;
}

/// On one thread, where a read that tried again without a pause would let nothing else run, the end of the store included.
#[tokio::test]
async fn reads_that_wait_do_not_keep_a_store_from_stopping() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(dir.path()).await.unwrap();
    let patient = Instant::now() + Duration::from_secs(60);
    let reading = || {
        let store = store.clone();
        async move { while store.get("/kv/a", ReadOptions::default(), patient).await.is_ok() {} }
    };
    let reads: Vec<_> = (0..4).map(|_| tokio::spawn(reading())).collect();
    store.get("/kv/a", ReadOptions::default(), patient).await.unwrap();
    store.shutdown().await;
    for read in reads {
        read.await.unwrap();
    }
    assert!(Instant::now() < patient, "only their deadlines ended the reads");
}
