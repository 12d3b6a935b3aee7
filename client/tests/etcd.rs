//! An etcd, from PyPI, as a store.

#[path = "support/etcd.rs"]
mod etcd;
#[path = "support/moving.rs"]
mod moving;
mod support;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd::{ETCD, Etcd};
use futures::StreamExt;
use lake_client::conformance;
use lake_client::etcd::EtcdStore;
use lake_client::store::{Applied, Error, MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Op, Txn};
use moving::filled_and_read_again;
use support::{PATIENCE, eventually, free_port, installed};

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_does_what_a_store_does() {
    let etcd = Etcd::start().await;
    conformance::run(Arc::new(etcd.store())).await;
    let store = etcd.store();
    let all = store.list_all("", ReadOptions::default(), soon()).await.unwrap().value;
    assert!(all.iter().all(|entry| entry.key.starts_with("/kv/conformance/")), "what else is in etcd is not shown");

    // What only lake's own stores have.
    for compare in [Compare::scope_free("/a", None), Compare { key: String::new(), condition: term() }] {
        let txn = Txn { when: vec![compare], then: vec![Op::put("/kv/a", "1")], otherwise: vec![] };
        let refused = store.commit(txn, soon()).await.unwrap_err();
        assert!(matches!(refused, Error::Refused { .. }) && refused.applied() == Applied::No, "{refused}");
    }
    let many = Txn { then: (0..200).map(|n| Op::put(format!("/kv/{n}"), "1")).collect(), ..Txn::default() };
    let refused = store.commit(many, soon()).await.unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "etcd's own limits: {refused}");
}

fn term() -> lake_proto::kv::Condition {
    lake_proto::kv::Condition::EntryTerm(1)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_etcd_has_compacted_is_said_to_be_gone() {
    let etcd = Etcd::start().await;
    let store = etcd.store();
    let put = |value: &str| Txn { then: vec![Op::put("/kv/a", value.to_owned())], ..Txn::default() };
    let first = store.commit(put("1"), soon()).await.unwrap().result.revision;
    let snapshot = store.open_snapshot(ReadOptions::default(), soon()).await.unwrap().value;
    store.cas("/kv/b", None, "1".into(), soon()).await.unwrap();
    let page = store.list("/kv/", None, 1, ReadOptions::default(), soon()).await.unwrap().value.next;
    let last = store.commit(put("2"), soon()).await.unwrap().result.revision;
    let etcdctl = tokio::task::spawn_blocking(|| installed(ETCD, "etcdctl")).await.unwrap();
    let compacted = Command::new(etcdctl)
        .args([format!("--endpoints={}", etcd.endpoint), "compact".to_owned(), last.to_string()])
        .env("ETCDCTL_API", "3")
        .output()
        .unwrap();
    assert!(compacted.status.success(), "{compacted:?}");

    let gone = store.get("/kv/a", ReadOptions::at(snapshot), soon()).await;
    assert!(matches!(gone, Err(Error::SnapshotExpired { .. })), "{gone:?}");
    let gone = store.list("/kv/", page.as_deref(), 1, ReadOptions::default(), soon()).await;
    assert!(matches!(gone, Err(Error::SnapshotExpired { .. })), "{gone:?}");
    let mut watch = store.watch("/kv/", first, soon()).await.unwrap();
    let Some(Err(Error::Compacted { oldest, .. })) = watch.next().await else { panic!("it is compacted") };
    assert_eq!(oldest, last);
    assert!(watch.next().await.is_none());
    let mut watch = store.watch("/kv/", oldest, soon()).await.unwrap();
    assert_eq!(watch.next().await.unwrap().unwrap().changes[0].revision, last);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_gone_is_named_and_its_watches_end() {
    let Etcd { service, endpoint, dir } = Etcd::start().await;
    let store = EtcdStore::connect(vec![endpoint.clone()], "").unwrap();
    store.cas("/kv/a", None, "1".into(), soon()).await.unwrap();
    let mut watch = store.watch("/kv/", 0, soon()).await.unwrap();
    watch.next().await.unwrap().unwrap();
    drop(service);
    let ended = tokio::time::timeout(PATIENCE, watch.next()).await.expect("it ends").unwrap();
    assert!(ended.unwrap_err().is_unavailable());
    let by = Instant::now() + Duration::from_millis(500);
    let error = store.get("/kv/a", ReadOptions::default(), by).await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains(&endpoint), "{error}");
    // An attempt that is cut short leaves a doubt, also if it would have been refused in the next moment.
    eventually("a change to have met nobody who could make it", async || {
        let by = Instant::now() + Duration::from_secs(1);
        let error = store.cas("/kv/b", None, "1".into(), by).await.unwrap_err();
        (error.applied() == Applied::No).then_some(())
    })
    .await;
    drop(dir);
}

#[tokio::test(flavor = "multi_thread")]
async fn much_is_watched_and_moved_in_messages_of_a_bearable_size() {
    let etcd = Etcd::start().await;
    let store = etcd.store();
    let value = vec![b'v'; 1 << 20];
    let both = |n: u32| {
        let put = |name: &str, value: &[u8]| Op::put(format!("/kv/{name}"), value.to_vec());
        Txn { then: vec![put("large", &value), put("small", n.to_string().as_bytes())], ..Txn::default() }
    };
    let first = store.commit(both(0), soon()).await.unwrap().result.revision;
    for n in 1..40 {
        store.commit(both(n), soon()).await.unwrap();
    }
    // All of it is behind the watch that begins now.
    let mut watch = store.watch("/kv/", first, soon()).await.unwrap();
    let mut told = first - 1;
    while told < first + 39 {
        let message = tokio::time::timeout(PATIENCE, watch.next()).await.expect("in time").unwrap().unwrap();
        for change in message.changes {
            told += 1;
            assert_eq!((change.revision, change.events.len()), (told, 2), "each whole, in order");
        }
        assert_eq!(message.progress, told);
    }
    filled_and_read_again(&EtcdStore::connect(vec![etcd.endpoint.clone()], "/moved").unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_without_a_leader_ends_its_watches() {
    let ports = [free_port(), free_port(), free_port()];
    let names = ["one", "two", "three"];
    let members: Vec<_> =
        names.iter().zip(ports).map(|(name, port)| format!("{name}=http://127.0.0.1:{port}")).collect();
    let members = members.join(",");
    let start = |n: usize| Etcd::member(tempfile::tempdir().unwrap(), names[n], ports[n], &members);
    let (one, two, three) = tokio::join!(start(0), start(1), start(2));
    let store = EtcdStore::connect(vec![one.endpoint.clone()], "").unwrap();
    eventually("the cluster to take a change", async || {
        let put = Txn { then: vec![Op::put("/kv/a", "1")], ..Txn::default() };
        store.commit(put, Instant::now() + Duration::from_secs(1)).await.ok()
    })
    .await;
    let mut watch = store.watch("/kv/", 0, soon()).await.unwrap();
    watch.next().await.unwrap().unwrap();
    drop((two, three));
    let ended = async {
        while let Some(message) = watch.next().await {
            if let Err(e) = message {
                return e;
            }
        }
        panic!("it ended without an error");
    };
    let ended = tokio::time::timeout(PATIENCE, ended).await.expect("it ends");
    assert!(ended.is_unavailable(), "{ended}");
}
