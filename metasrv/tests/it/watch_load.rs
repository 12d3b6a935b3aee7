//! What many watchers cost the writers. Prints figures and judges none: run it on a machine that does nothing else with
//! `cargo test --profile dist -p lake-metasrv --test it watch_load -- --ignored --nocapture`. It takes two minutes.
//!
//! Three peers as processes of their own, so that what each costs is told apart; all watchers at the leader, over gRPC, in
//! another process of a low priority: elsewhere that work is done on other machines. Writers here each begin a write at a fixed
//! rate, on keys under prefixes that are all watched. Rounds with watchers and rounds without take turns, and who is first
//! changes, so that what else the machine does hits both. That the watchers were told nevertheless is seen by the changes
//! received.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::eventually;
use crate::support::processes::Processes;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::kv_client::KvClient;
use lake_proto::v1::watch_client::WatchClient;
use tonic::transport::Channel;

const WATCHERS: u64 = 20_000;
const PREFIXES: usize = 300;
/// Few watchers on each, so that it has little of what all connections of a host share.
const CONNECTIONS: usize = 128;
const WRITERS: usize = 8;
const ROUNDS: usize = 3;
const VALUE_BYTES: usize = 256;
/// Between the beginnings of two writes of one writer.
const PACE: Duration = Duration::from_millis(40);
const WARM_UP: Duration = Duration::from_secs(3);
const ROUND: Duration = Duration::from_secs(12);

/// Where the watching process finds whom to watch, and with how many.
const WATCH: &str = "LAKE_TEST_WATCH";
/// What it begins a line with.
const SEEN: &str = "SEEN ";

// ---- the process that watches -------------------------------------------------------------------------------------

/// Not a test by itself: watches what the environment names until it is killed, and says what it sees. Without that: nothing.
#[test]
fn watch_until_killed() {
    let Ok(arguments) = std::env::var(WATCH) else { return };
    let (address, count) = arguments.split_once('|').unwrap();
    // Not the lowest: the connections' pings have to be answered. Threads have it from who starts them.
    rustix::process::nice(10).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(watch(address, count.parse().unwrap()));
}

#[derive(Default)]
struct Received {
    open: AtomicU64,
    messages: AtomicU64,
    changes: AtomicU64,
    /// Why a watch was refused, or ended.
    ended: Mutex<Option<String>>,
}

async fn watch(address: &str, count: usize) {
    let received = Arc::new(Received::default());
    let channels: Vec<_> =
        (0..CONNECTIONS).map(|_| Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy()).collect();
    for i in 0..count {
        let mut client = WatchClient::new(channels[i % CONNECTIONS].clone());
        let received = received.clone();
        tokio::spawn(async move {
            let prefix = format!("/kv/{:03}/", i % PREFIXES);
            let watching = async {
                let mut stream = client.watch(v1::WatchRequest { prefix, from_revision: 0 }).await?.into_inner();
                let mut first = true;
                while let Some(message) = stream.message().await? {
                    received.open.fetch_add(u64::from(std::mem::take(&mut first)), Ordering::Relaxed);
                    received.messages.fetch_add(1, Ordering::Relaxed);
                    received.changes.fetch_add(message.changes.len() as u64, Ordering::Relaxed);
                }
                Ok::<_, tonic::Status>(())
            };
            let why = watching.await.map_or_else(|status| status.to_string(), |()| "the peer ended it".to_owned());
            received.ended.lock().unwrap().get_or_insert(why);
        });
    }
    // The test harness has begun a line.
    println!();
    loop {
        let [open, messages, changes] =
            [&received.open, &received.messages, &received.changes].map(|number| number.load(Ordering::Relaxed));
        let ended = received.ended.lock().unwrap().clone().unwrap_or_default().replace('\n', " ");
        let mut out = std::io::stdout().lock();
        let said = writeln!(out, "{SEEN}{open} {messages} {changes} {ended}").and_then(|()| out.flush());
        drop(out);
        if said.is_err() {
            // Nobody listens any more.
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What that process has said.
#[derive(Debug, Default, Clone)]
struct Seen {
    /// Watches that have had a message.
    open: u64,
    messages: u64,
    changes: u64,
    /// Why one ended.
    ended: String,
}

impl Seen {
    fn read(line: &str) -> Option<Self> {
        let mut parts = line.strip_prefix(SEEN)?.splitn(4, ' ');
        let mut number = || parts.next()?.parse().ok();
        let (open, messages, changes) = (number()?, number()?, number()?);
        Some(Self { open, messages, changes, ended: parts.next()?.to_owned() })
    }
}

/// That process.
struct Watching {
    child: Child,
    seen: Arc<Mutex<Seen>>,
    reader: Option<JoinHandle<()>>,
}

impl Watching {
    fn start(address: &str, count: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "watch_load::watch_until_killed", "--nocapture"])
            .env(WATCH, format!("{address}|{count}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let told = seen.clone();
        let reader = std::thread::spawn(move || {
            for said in lines.map_while(Result::ok).filter_map(|line| Seen::read(&line)) {
                *told.lock().unwrap() = said;
            }
        });
        Self { child, seen, reader: Some(reader) }
    }

    /// What it has said last, unless a watch has ended.
    fn seen(&self) -> Seen {
        let seen = self.seen.lock().unwrap().clone();
        assert!(seen.ended.is_empty(), "a watch ended: {}", seen.ended);
        seen
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

// ---- the measurement ----------------------------------------------------------------------------------------------

/// How long each write took, the shortest first.
async fn writes(peers: &Processes, at: u64, during: Duration) -> Vec<Duration> {
    let writer = async |writer: usize| {
        let mut kv = KvClient::new(peers.channel(at));
        let mut took = vec![];
        let began = Instant::now();
        let mut ticks = tokio::time::interval(PACE);
        tokio::time::sleep(PACE / WRITERS as u32 * writer as u32).await;
        let mut i = writer * 37;
        while began.elapsed() < during {
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

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Seconds of processor time that a process has taken.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Its name, in which there may be anything, stands in parentheses.
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 1..].split_whitespace().collect();
    // In user mode and in the system's, in hundredths of a second.
    fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of two minutes: cargo test --profile dist -p lake-metasrv --test it watch_load -- --ignored --nocapture"]
async fn writes_beside_many_watchers() {
    let peers = Processes::still(100_000).await;
    let leader = peers.leader().await;
    let address = peers.peers.place(leader).unwrap().grpc();
    writes(&peers, leader, WARM_UP).await;
    let (mut without, mut with) = (vec![], vec![]);
    for round in 1..=ROUNDS {
        let order = if round % 2 == 1 { [false, true] } else { [true, false] };
        for watched in order {
            let opening = Instant::now();
            let watching = watched.then(|| Watching::start(&address, WATCHERS));
            if let Some(watching) = &watching {
                eventually("the watchers", async || (watching.seen().open == WATCHERS).then_some(())).await;
            }
            let opened = opening.elapsed();
            // The peers, the leader first, and who watches.
            let mut pids: Vec<u32> = [leader]
                .into_iter()
                .chain((1..=3).filter(|id| *id != leader))
                .map(|id| peers.peers.pid(id).unwrap())
                .collect();
            pids.extend(watching.as_ref().map(|watching| watching.child.id()));
            let seen = || watching.as_ref().map(Watching::seen).unwrap_or_default();
            let (before, cpu_before, began) =
                (seen(), pids.iter().map(|pid| cpu_seconds(*pid)).collect::<Vec<_>>(), Instant::now());
            let took = writes(&peers, leader, ROUND).await;
            let elapsed = began.elapsed().as_secs_f64();
            let cpu: Vec<f64> = pids
                .iter()
                .zip(cpu_before)
                .map(|(pid, before)| 100.0 * (cpu_seconds(*pid) - before) / elapsed)
                .collect();
            let after = seen();
            let (p50, p99) = (millis(&took, 0.5), millis(&took, 0.99));
            let p99s = if watched { &mut with } else { &mut without };
            p99s.push(p99);
            println!(
                "round {round}, {:>5} watchers (open after {:.1} s): {} writes, p50 {p50:.2} ms, p99 {p99:.2} ms; of a processor: \
                 leader {:.0} %, followers {:.0} and {:.0} %, watchers {:.0} %; {} messages with {} changes received",
                if watched { WATCHERS } else { 0 },
                opened.as_secs_f64(),
                took.len(),
                cpu[0],
                cpu[1],
                cpu[2],
                cpu.get(3).copied().unwrap_or_default(),
                after.messages - before.messages,
                after.changes - before.changes,
            );
            drop(watching);
            eventually("the watchers to be gone", async || {
                (peers.figure(leader, "lake_metasrv_watches").await == 0.0).then_some(())
            })
            .await;
        }
    }
    let (without, with) = (median(&mut without), median(&mut with));
    println!(
        "p99 of writes, median of {ROUNDS} rounds: {without:.2} ms without watchers, {with:.2} ms with {WATCHERS}: {:.2} times",
        with / without
    );
}
