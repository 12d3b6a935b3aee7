//! Many clients that lose the same leader: how often they ask who leads, and how long they are without one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::hurt::put;
use crate::support::processes::Processes;
use crate::support::{PATIENCE, TestCluster, eventually, figure};
use lake_chaos::probe;
use lake_client::remote::RemoteStore;
use lake_client::store::{MetaStore, ReadOptions};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Counted by each peer.
const QUESTIONS: &str = "lake_metasrv_leader_questions_total";
/// Between two calls of a client, about. All of them together keep the cluster busy, but not overloaded.
const PAUSE: Duration = Duration::from_millis(500);
/// How long any of them may have to wait where the machine has much else to do.
const LONG: Duration = Duration::from_secs(120);
/// Clients that begin at the same time: how they find their first leader is not what is measured.
const BEGIN_AT_ONCE: usize = 50;

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
        let deadline = called + LONG;
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

/// Lets this process, and the peers that it starts, have so many files open.
pub fn allow_files(least: u64, most: u64) {
    let limit = getrlimit(Resource::Nofile);
    let allowed = limit.maximum.unwrap_or(most).min(most);
    assert!(allowed >= least, "{least} open files are needed, and {allowed} are allowed: see `ulimit -Hn`");
    if limit.current.is_some_and(|current| current < allowed) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(allowed), ..limit }).unwrap();
    }
}

/// So many clients, each with connections and a view of its own. However long the peers take to elect another leader, and the
/// clients to have their turn on a busy machine: everybody is answered again, and nobody asks and asks meanwhile.
async fn through_a_leader_kill(clients: usize) {
    let mut peers = Processes::founded(100_000).await;
    let (began, stop) = (Instant::now(), Arc::<AtomicBool>::default());
    let states: Vec<_> = (0..clients).map(|_| Arc::<Client>::default()).collect();
    let answered_since = async |states: &[Arc<Client>], since: Instant| {
        let since_us = (since - began).as_micros() as u64;
        let waiting = || states.iter().filter(|state| state.answered_us.load(Ordering::Relaxed) <= since_us).count();
        let answered = async || match waiting() {
            0 => Ok(()),
            waiting => Err(format!("{waiting} clients wait")),
        };
        probe::until("every client to be answered", LONG, answered).await.unwrap_or_else(|e| panic!("{e}"));
    };
    let mut running = Vec::new();
    for (n, state) in states.iter().enumerate() {
        running.push(tokio::spawn(calls(n, peers.store(), state.clone(), began, stop.clone())));
        if running.len().is_multiple_of(BEGIN_AT_ONCE) {
            answered_since(&states[..running.len()], began).await;
        }
    }
    answered_since(&states, Instant::now()).await;

    let leader = peers.leader().await;
    let survivors: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let mut before = Vec::new();
    let counted = Instant::now();
    for id in &survivors {
        before.push(peers.figure(*id, QUESTIONS).await);
    }
    states.iter().for_each(|state| state.slowest_us.store(0, Ordering::Relaxed));
    let killed = Instant::now();
    peers.kill(leader);
    peers.leader_besides(&[leader]).await;
    let elected = killed.elapsed();
    answered_since(&states, Instant::now()).await;
    let recovered = killed.elapsed();
    let mut slowest: Vec<_> = states.iter().map(|state| state.slowest_us.load(Ordering::Relaxed)).collect();
    slowest.sort_unstable();
    let [half, last] = [slowest[clients / 2], slowest[clients - 1]].map(Duration::from_micros);
    let mut questions = Vec::new();
    for (id, before) in survivors.iter().zip(before) {
        questions.push(peers.figure(*id, QUESTIONS).await - before);
    }
    let counted = counted.elapsed();
    stop.store(true, Ordering::Relaxed);
    for client in running {
        client.await.unwrap();
    }
    let each = questions.iter().map(|n| n / clients as f64);
    let told: Vec<_> = each.clone().map(|each| format!("{each:.2}")).collect();
    println!(
        "{clients} clients lost their leader: another one led after {elected:.2?}; the slowest call of half of the clients \
         took up to {half:.2?}, that of the last one {last:.2?}; all were answered again after {recovered:.2?}; the two \
         peers left were asked {questions:?} times in {counted:.2?}, which is {} a client",
        told.join(" and ")
    );
    assert!(each.clone().sum::<f64>() >= 1.0, "who lost the leader has to ask");
    // Once at once and once more, and while there is still none they are asked to wait for a second. A machine that is busy
    // has clients lose the next leader as well: a connection that was silent for so long is given up.
    let most = 3.0 + 2.0 * counted.as_secs_f64();
    assert!(each.clone().all(|each| each <= most), "a herd: more than {most:.1} questions from each client");
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
async fn a_thousand_clients_lose_their_leader() {
    allow_files(4_000, 20_000);
    through_a_leader_kill(1000).await;
}
