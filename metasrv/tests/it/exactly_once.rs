//! The client's changes happen once, whatever becomes of the answers: cut on their way, of a leader that dies, of a session
//! that ends. Where the network is hurt it is the fault runs' own, between the clients and each peer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::hurt::{Hurt, previous, put};
use crate::support::processes::Processes;
use crate::support::{PATIENCE, TestCluster, eventually};
use lake_client::store::{Applied, Error, MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::limits::SESSION_WINDOW;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_was_cut_off_is_asked_for_again() {
    let hurt = Hurt::founded().await;
    let store = &hurt.store;
    let first = store.commit(put("/kv/n", "1"), soon()).await.unwrap();
    let leader = hurt.cluster.leader().await;
    hurt.mute(leader);
    let blind = tokio::spawn({
        let store = store.clone();
        async move { store.commit(put("/kv/n", "2"), soon()).await }
    });
    let guarded = tokio::spawn({
        let store = store.clone();
        async move { store.cas("/lake/a", None, "1".into(), soon()).await }
    });
    let lease = tokio::spawn({
        let store = store.clone();
        async move { store.grant_lease(Duration::from_secs(60), "a test", soon()).await }
    });
    let entry = hurt.applied("/kv/n", "2").await;
    hurt.applied("/lake/a", "1").await;
    let quota = tokio::spawn({
        let store = store.clone();
        async move { store.set_quota("/kv/q/", Some(1000), soon()).await }
    });
    let direct = hurt.cluster.client();
    let leases = async || direct.all_leases(ReadOptions::default(), soon()).await.unwrap().value;
    eventually("a lease", async || (leases().await.len() == 1).then_some(())).await;
    let quotas = async || {
        let quotas = direct.quotas(ReadOptions::default(), soon()).await.unwrap().value;
        quotas.into_iter().find(|quota| quota.prefix == "/kv/q/").map(|quota| quota.limit_bytes)
    };
    eventually("a quota", async || (quotas().await == Some(1000)).then_some(())).await;
    direct.set_quota("/kv/q/", Some(2000), soon()).await.unwrap();
    hurt.reset(leader).await;

    let blind = blind.await.unwrap().unwrap();
    assert!(blind.result.succeeded && !blind.resent);
    assert_eq!(previous(&blind).unwrap().mod_revision, first.result.revision);
    assert_eq!((entry.version, entry.mod_revision), (2, blind.result.revision));
    let guarded = guarded.await.unwrap().unwrap();
    assert!(guarded.result.succeeded && !guarded.resent, "{guarded:?}");
    let lease = lease.await.unwrap().unwrap();
    assert_eq!(leases().await.iter().map(|lease| lease.id).collect::<Vec<_>>(), [lease.id]);
    quota.await.unwrap().unwrap();
    assert_eq!(quotas().await, Some(2000), "what another has set since stays");
    assert_eq!(hurt.applied("/kv/n", "2").await, entry, "nothing was done twice");
    hurt.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_leader_gives_the_first_answer() {
    let mut hurt = Hurt::founded().await;
    let first = hurt.store.commit(put("/kv/n", "1"), soon()).await.unwrap();
    let leader = hurt.cluster.leader().await;
    hurt.mute(leader);
    let sent = tokio::spawn({
        let store = hurt.store.clone();
        async move { store.commit(put("/kv/n", "2"), soon()).await }
    });
    let entry = hurt.applied("/kv/n", "2").await;
    hurt.cluster.stop(leader).await;
    let answer = sent.await.unwrap().unwrap();
    assert_eq!(previous(&answer).unwrap().mod_revision, first.result.revision);
    assert_eq!((entry.version, entry.mod_revision), (2, answer.result.revision));
    assert_eq!(hurt.applied("/kv/n", "2").await, entry, "nothing was done twice");
    hurt.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_large_to_be_kept_comes_whole_all_the_same() {
    const KEYS: usize = 20;
    let hurt = Hurt::founded().await;
    let keys: Vec<String> = (0..KEYS).map(|n| format!("/kv/{n}")).collect();
    let then = keys.iter().map(|key| Op::put(key, vec![7; 1024])).collect();
    hurt.store.commit(Txn { then, ..Txn::default() }, soon()).await.unwrap();
    let leader = hurt.cluster.leader().await;
    let proposed = async || hurt.cluster.status(leader).await.last_log_index;
    let before = proposed().await;
    hurt.mute(leader);
    let sent = tokio::spawn({
        let (store, when) = (hurt.store.clone(), keys.iter().map(Compare::absent).collect());
        async move { store.commit(Txn { when, then: vec![Op::put("/kv/new", "1")], otherwise: vec![] }, soon()).await }
    });
    eventually("the request to be proposed", async || (proposed().await > before).then_some(())).await;
    hurt.reset(leader).await;
    let result = sent.await.unwrap().unwrap().result;
    assert!(!result.succeeded && result.reduced.is_none());
    assert_eq!(result.observed.len(), KEYS);
    assert!(result.observed.iter().all(|entry| entry.value.len() == 1024));
    hurt.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_ends_with_a_request_in_doubt_leaves_it_unknown() {
    let hurt = Hurt::founded().await;
    let (store, direct) = (&hurt.store, hurt.cluster.client());
    // Opening the session is the change before it.
    let first = store.commit(put("/kv/n", "1"), soon()).await.unwrap().result.revision;
    let leader = hurt.cluster.leader().await;
    hurt.mute(leader);
    let sent = tokio::spawn({
        let store = store.clone();
        async move { store.commit(put("/kv/n", "2"), soon()).await }
    });
    let entry = hurt.applied("/kv/n", "2").await;
    assert!(direct.close_session(first - 1, soon()).await.unwrap());
    hurt.reset(leader).await;
    let error = sent.await.unwrap().unwrap_err();
    assert!(matches!(&error, Error::InDoubt { attempts, .. } if *attempts > 1), "{error:?}");
    assert_eq!(error.applied(), Applied::Unknown);
    let message = error.to_string();
    assert!(message.contains("/kv/n") && message.contains("attempts in") && message.contains("in term"), "{message}");
    assert_eq!(hurt.applied("/kv/n", "2").await, entry, "nothing was done twice");

    // The next session is opened by the next change, and so is the one after that: neither was in doubt.
    for value in ["3", "4"] {
        let done = store.commit(put("/kv/n", value), soon()).await.unwrap().result.revision;
        assert!(direct.close_session(done - 1, soon()).await.unwrap(), "a session was opened for it");
    }
    hurt.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_changes_than_a_window_holds_wait_their_turn() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let before = cluster.put("/kv/before", "1").await;
    let many = 5 * SESSION_WINDOW;
    let puts = (0..many).map(|n| {
        let store = store.clone();
        async move { store.commit(put(&format!("/kv/{n}"), "1"), soon()).await.unwrap() }
    });
    let revisions: Vec<_> = futures::future::join_all(puts).await.iter().map(|done| done.result.revision).collect();
    // One for each of them, and one for the session; another one for each time that its opening was asked for again.
    let distinct: std::collections::BTreeSet<_> = revisions.iter().collect();
    let sessions = distinct.last().map(|last| **last - before - many);
    assert!(distinct.len() as u64 == many && sessions.is_some_and(|n| (1..=3).contains(&n)), "{sessions:?} sessions");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_kept_open_while_its_store_lives_and_no_longer() {
    const TTL: Duration = Duration::from_secs(10);
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client().with_session_ttl(TTL).unwrap();
    let direct = cluster.client();
    let revision = async || direct.get("/kv/n", ReadOptions::default(), soon()).await.unwrap().revision;
    store.commit(put("/kv/n", "1"), soon()).await.unwrap();
    // Nobody keeps this one open: by its end so much time has passed, twice.
    for _ in 0..2 {
        let opened = direct.open_session(TTL, "silent", soon()).await.unwrap();
        eventually("a silent session to end", async || (revision().await == opened + 1).then_some(())).await;
    }
    let before = revision().await;
    let done = store.commit(put("/kv/n", "2"), soon()).await.unwrap();
    assert_eq!(done.result.revision, before + 1, "its session was open still");
    drop(store);
    eventually("the session of a store that is gone to end", async || (revision().await == before + 2).then_some(()))
        .await;
    // One that would live for an hour is not waited for.
    let store = cluster.client().with_session_ttl(Duration::from_secs(3600)).unwrap();
    let done = store.commit(put("/kv/n", "3"), soon()).await.unwrap().result.revision;
    drop(store);
    eventually("the session to be closed", async || (revision().await == done + 1).then_some(())).await;
    // Whoever is about to end waits for the closing; a change that is made nevertheless is one of another session.
    let store = cluster.client().with_session_ttl(Duration::from_secs(3600)).unwrap();
    let done = store.commit(put("/kv/n", "4"), soon()).await.unwrap().result.revision;
    store.leave().await;
    eventually("the session to be closed", async || (revision().await == done + 1).then_some(())).await;
    store.leave().await;
    let later = store.commit(put("/kv/n", "5"), soon()).await.unwrap().result.revision;
    assert_eq!(later, done + 3, "a session was opened for it");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leaders_killed_with_requests_in_flight_lose_nothing_and_do_nothing_twice() {
    const WRITERS: usize = 32;
    let mut peers = Processes::founded(100_000).await;
    let store = peers.store();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let count = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (store, stop, count) = (store.clone(), stop.clone(), count.clone());
            tokio::spawn(async move {
                let key = format!("/kv/{writer}");
                let mut last = None;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let done = store.commit(put(&key, "v"), soon()).await.unwrap();
                    let replaced = previous(&done).map(|entry| entry.mod_revision);
                    assert_eq!(replaced, last, "each change of {key} follows the one before");
                    last = Some(done.result.revision);
                    count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
                last
            })
        })
        .collect();
    let grows = async || {
        let wanted = count.load(std::sync::atomic::Ordering::Relaxed) + 500;
        let enough = async || (count.load(std::sync::atomic::Ordering::Relaxed) >= wanted).then_some(());
        eventually("more changes", enough).await;
    };
    for _ in 0..4 {
        grows().await;
        let leader = peers.leader().await;
        peers.kill(leader);
        grows().await;
        peers.spawn(leader);
    }
    grows().await;
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    for (writer, ended) in writers.into_iter().enumerate() {
        let last = ended.await.unwrap();
        let entry = store.get(&format!("/kv/{writer}"), ReadOptions::default(), soon()).await.unwrap().value;
        assert_eq!(entry.map(|entry| entry.mod_revision), last);
    }
    println!("{} changes, each once", count.load(std::sync::atomic::Ordering::Relaxed));
}
