//! Many clients that lose the same leader: how often they ask who leads, and how long they are without one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::hurt::put;
use crate::support::processes::Processes;
use crate::support::{PATIENCE, TestCluster, eventually, figure};
use lake_client::remote::RemoteStore;
use lake_client::store::{MetaStore, ReadOptions};

/// Counted by each peer.
const QUESTIONS: &str = "lake_metasrv_leader_questions_total";
/// Between two calls of a client, about. All of them together keep the cluster busy, but not overloaded.
const PAUSE: Duration = Duration::from_millis(500);

/// A client that makes a call now and then.
#[derive(Default)]
struct Client {
    /// When it last had an answer, in microseconds since the beginning.
    answered_us: AtomicU64,
    /// Its slowest call.
    slowest_us: AtomicU64,
}

async fn calls(n: usize, store: RemoteStore, client: Arc<Client>, began: Instant, stop: Arc<AtomicBool>) {
    let key = format!("/kv/{n}");
    let mut write = n.is_multiple_of(2);
    while !stop.load(Ordering::Relaxed) {
        let called = Instant::now();
        let deadline = called + PATIENCE;
        if write {
            store.commit(put(&key, "v"), deadline).await.unwrap();
        } else {
            store.get(&key, ReadOptions::default(), deadline).await.unwrap();
        }
        write = !write;
        client.slowest_us.fetch_max(called.elapsed().as_micros() as u64, Ordering::Relaxed);
        client.answered_us.store(began.elapsed().as_micros() as u64, Ordering::Relaxed);
        tokio::time::sleep(PAUSE.mul_f64(rand::random_range(0.5..=1.5))).await;
    }
}

/// So many clients, each with connections and a view of its own, and a leader that is killed. No more questions than so many
/// a client reach each of the peers that are left; two more for each second that nobody leads, since one is answered within a
/// second then.
async fn through_a_leader_kill(clients: usize, questions_each: f64) {
    let mut peers = Processes::founded(100_000).await;
    let (began, stop) = (Instant::now(), Arc::<AtomicBool>::default());
    let states: Vec<_> = (0..clients).map(|_| Arc::<Client>::default()).collect();
    let running: Vec<_> = states
        .iter()
        .enumerate()
        .map(|(n, state)| tokio::spawn(calls(n, peers.store(), state.clone(), began, stop.clone())))
        .collect();
    let all_since = |since: Instant| {
        let since_us = (since - began).as_micros() as u64;
        states.iter().all(|state| state.answered_us.load(Ordering::Relaxed) > since_us).then_some(())
    };
    let everybody = async |since: Instant| eventually("every client to be answered", async || all_since(since)).await;
    everybody(began).await;
    everybody(Instant::now()).await;

    let leader = peers.leader().await;
    let survivors: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let mut before = Vec::new();
    for id in &survivors {
        before.push(peers.figure(*id, QUESTIONS).await);
    }
    states.iter().for_each(|state| state.slowest_us.store(0, Ordering::Relaxed));
    let killed = Instant::now();
    peers.kill(leader);
    peers.leader_besides(&[leader]).await;
    let elected = killed.elapsed();
    everybody(Instant::now()).await;
    let mut slowest: Vec<_> = states.iter().map(|state| state.slowest_us.load(Ordering::Relaxed)).collect();
    slowest.sort_unstable();
    let [half, last] = [slowest[clients / 2], slowest[clients - 1]].map(Duration::from_micros);
    let mut questions = Vec::new();
    for (id, before) in survivors.iter().zip(before) {
        questions.push(peers.figure(*id, QUESTIONS).await - before);
    }
    stop.store(true, Ordering::Relaxed);
    for client in running {
        client.await.unwrap();
    }
    let each: Vec<_> = questions.iter().map(|n| format!("{:.2}", n / clients as f64)).collect();
    println!(
        "{clients} clients lost their leader: another one led after {elected:.2?}; the slowest call of \
         half of the clients took up to {half:.2?}, that of the last one {last:.2?}; the two peers left were asked {questions:?} times, which is {} a client",
        each.join(" and ")
    );
    let most = questions_each + 2.0 * elected.as_secs_f64();
    for n in questions {
        assert!(n / clients as f64 >= 0.5, "who lost the leader has to ask");
        assert!(n / clients as f64 <= most, "a herd: {n} questions");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_callers_of_one_client_ask_once_and_remember() {
    const CALLERS: usize = 500;
    let mut cluster = TestCluster::founded(3, |config| {
        config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    })
    .await;
    let questions = async || {
        let mut all = Vec::new();
        for server in cluster.running.values() {
            all.push(figure(server.http_address().unwrap(), QUESTIONS).await);
        }
        all
    };
    let since = |before: &[f64], now: Vec<f64>| now.iter().zip(before).map(|(now, before)| now - before).sum::<f64>();
    let before = questions().await;
    let store = cluster.client();
    let soon = || Instant::now() + PATIENCE;
    let calls = async |n: usize| {
        if n.is_multiple_of(2) {
            store.commit(put(&format!("/kv/{n}"), "v"), soon()).await.map(drop).unwrap();
        } else {
            store.get("/kv/0", ReadOptions::default(), soon()).await.map(drop).unwrap();
        }
    };
    futures::future::join_all((0..CALLERS).map(calls)).await;
    let asked = since(&before, questions().await);
    // Every peer at the same time: one that answers late may not be asked to the end.
    assert!((1.0..=3.0).contains(&asked), "{CALLERS} callers asked {asked} times");
    for n in 0..CALLERS {
        calls(n).await;
    }
    assert_eq!(since(&before, questions().await), asked, "who leads is remembered");

    // The old leader names its successor, which is as good as an answer.
    let leader = cluster.leader().await;
    let successor = (1..=3).find(|id| *id != leader).unwrap();
    cluster.client().transfer_leader(Some(successor), soon()).await.unwrap();
    eventually("the old leader to know its successor", async || {
        cluster.status(leader).await.leader.filter(|l| l.id == successor)
    })
    .await;
    let before = questions().await;
    calls(0).await;
    assert_eq!(since(&before, questions().await), 0.0, "the hint was followed");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_clients_lose_their_leader() {
    through_a_leader_kill(200, 5.0).await;
}

/// To be run by itself, in release, with 4,000 open files allowed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "wants the machine to itself: cargo test --release --workspace --test it herd -- --ignored --nocapture"]
async fn a_thousand_clients_lose_their_leader() {
    through_a_leader_kill(1000, 5.0).await;
}
