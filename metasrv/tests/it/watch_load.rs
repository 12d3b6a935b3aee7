//! What many watchers cost the writers. Prints figures and judges none: run it on a quiet machine with
//! `cargo test --profile dist -p lake-metasrv --test it watch_load -- --ignored --nocapture`.
//!
//! Three peers in this process; all watchers at the leader, over gRPC, in a runtime of their own; writers that each begin
//! a write at a fixed rate, on keys under prefixes that are all watched. The numbers of watchers take turns, so that what
//! else the machine does hits all of them. The watchers' own thread has a low priority: elsewhere that work is done on other
//! machines. That it got done nevertheless is seen by the changes received.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{TestCluster, eventually};
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::watch_client::WatchClient;
use tonic::transport::Channel;

const WATCHERS: [usize; 3] = [0, 1_000, 20_000];
const PREFIXES: usize = 300;
/// Few watchers on each, so that it has little of what all connections of a host share.
const CONNECTIONS: usize = 128;
const WRITERS: usize = 8;
const ROUNDS: usize = 3;
const VALUE_BYTES: usize = 256;
/// Between the beginnings of two writes of one writer.
const PACE: Duration = Duration::from_millis(40);
const ROUND: Duration = Duration::from_secs(8);

#[derive(Default)]
struct Received {
    messages: AtomicU64,
    changes: AtomicU64,
    open: AtomicU64,
    /// Why a watch was refused, or ended.
    ended: Mutex<Option<String>>,
}

fn watchers(count: usize, address: &str, received: &Arc<Received>) -> tokio::runtime::Runtime {
    // Not the lowest: the connections' pings have to be answered.
    let last = || {
        rustix::process::nice(10).unwrap();
    };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).on_thread_start(last).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let channels: Vec<_> =
        (0..CONNECTIONS).map(|_| Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy()).collect();
    for i in 0..count {
        let mut client = WatchClient::new(channels[i % CONNECTIONS].clone());
        let received = received.clone();
        runtime.spawn(async move {
            let prefix = format!("/kv/{:03}/", i % PREFIXES);
            let watching = async {
                let mut stream = client.watch(v1::WatchRequest { prefix, from_revision: 0 }).await?.into_inner();
                received.open.fetch_add(1, Ordering::Relaxed);
                while let Some(message) = stream.message().await? {
                    received.messages.fetch_add(1, Ordering::Relaxed);
                    received.changes.fetch_add(message.changes.len() as u64, Ordering::Relaxed);
                }
                Ok::<_, tonic::Status>(())
            };
            let why = watching.await.map_or_else(|status| status.to_string(), |()| "the peer ended it".to_owned());
            received.ended.lock().unwrap().get_or_insert(why);
        });
    }
    drop(_inside);
    runtime
}

async fn writes(cluster: &TestCluster, at: u64) -> Vec<Duration> {
    let writer = async |writer: usize| {
        let mut kv = cluster.kv(at);
        let mut took = vec![];
        let began = Instant::now();
        let mut ticks = tokio::time::interval(PACE);
        tokio::time::sleep(PACE / WRITERS as u32 * writer as u32).await;
        let mut i = writer * 37;
        while began.elapsed() < ROUND {
            ticks.tick().await;
            i += 101;
            let put = Op::put(format!("/kv/{:03}/{}", i % PREFIXES, i % 10), vec![7; VALUE_BYTES]);
            let txn = Txn { then: vec![put], ..Txn::default() };
            let start = Instant::now();
            kv.txn(v1::TxnRequest { txn: Some(txn.into()), stamp: None }).await.unwrap();
            took.push(start.elapsed());
        }
        took
    };
    let mut all: Vec<_> = futures::future::join_all((0..WRITERS).map(writer)).await.concat();
    all.sort();
    all
}

fn millis(sorted: &[Duration], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of minutes: cargo test --release --workspace --test it watch_load -- --ignored --nocapture"]
async fn writes_beside_many_watchers() {
    let mut cluster = TestCluster::founded(3, |config| {
        // No elections, however slow the machine is: they are another measurement.
        config.timing.heartbeat = Duration::from_millis(500);
        config.timing.election_timeout_min = Duration::from_secs(10);
        config.timing.election_timeout_max = Duration::from_secs(15);
    })
    .await;
    let leader = cluster.leader().await;
    let address = cluster.configs[&leader].listen.to_string();
    writes(&cluster, leader).await;
    let mut p99s = BTreeMap::<usize, Vec<f64>>::new();
    for round in 1..=ROUNDS {
        for count in WATCHERS {
            let received = Arc::new(Received::default());
            let opening = Instant::now();
            let runtime = watchers(count, &address, &received);
            let none_ended = || {
                let ended = received.ended.lock().unwrap().clone();
                assert!(ended.is_none(), "a watch of {count} ended: {ended:?}");
            };
            eventually("the watchers", async || {
                none_ended();
                (received.messages.load(Ordering::Relaxed) >= count as u64
                    && received.open.load(Ordering::Relaxed) == count as u64)
                    .then_some(())
            })
            .await;
            let opened = opening.elapsed();
            let before = received.messages.load(Ordering::Relaxed);
            let took = writes(&cluster, leader).await;
            none_ended();
            let messages = received.messages.load(Ordering::Relaxed) - before;
            let (p50, p99) = (millis(&took, 0.5), millis(&took, 0.99));
            println!(
                "round {round}, {count:>6} watchers (open after {:.1} s): {} writes, p50 {p50:.2} ms, p99 {p99:.2} ms; {messages} messages with {} changes received",
                opened.as_secs_f64(),
                took.len(),
                received.changes.load(Ordering::Relaxed),
            );
            p99s.entry(count).or_default().push(p99);
            runtime.shutdown_background();
            let member = cluster.running[&leader].peer().member().unwrap();
            eventually("the watchers to be gone", async || (member.watches.watchers() == 0).then_some(())).await;
        }
    }
    let mut median = |count| {
        let p99s = p99s.get_mut(&count).unwrap();
        p99s.sort_by(f64::total_cmp);
        p99s[p99s.len() / 2]
    };
    let medians = WATCHERS.map(&mut median);
    println!("p99 of writes beside {WATCHERS:?} watchers, median of {ROUNDS} rounds: {medians:.2?} ms");
    println!("as ratios: {:.2?}", medians.map(|p99| p99 / medians[0]));
    cluster.stop_all().await;
}
