//! Every fault between a client and the peers, with everything that is asked of a store behind it: no change is lost, none
//! is made twice, and each error says rightly whether its change may have been made. A run in which a fault met nothing
//! fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::hurt::{Hurt, both_ways, put};
use crate::support::ledger::Ledger;
use crate::support::{PATIENCE, TestCluster, eventually, free_port};
use lake_chaos::net::condition::{AtMessage, Condition, Cut, When};
use lake_chaos::net::{Conditions, Fabric, Node, Path, partition};
use lake_client::conformance;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::v1;

/// Writers beside the suite.
const WRITERS: usize = 4;
/// Changes between one fault and the next, so that everybody gets something done.
const SOUND: u64 = 200;
/// The most that the suite is run to meet a fault often enough.
const MAX_RUNS: u32 = 20;

/// What is wrong, again and again.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Nobody listens at a peer's address, and connections to it are reset.
    Refuse,
    /// A peer's connections are silent, and so are new ones.
    Hang,
    /// A connection breaks when a request has arrived.
    AfterRequest,
    /// A connection breaks when an answer is about to come.
    BeforeAnswer,
    /// Everything takes its time, and connections overtake each other.
    Slow,
    /// The leader loses the other peers, and goes on answering clients from its old term.
    OldTerm,
}

/// The cluster while a fault is kept up.
struct Run {
    hurt: Hurt,
    ledger: Ledger,
    /// How often the fault has met something.
    met: AtomicU64,
    stop: AtomicBool,
}

impl Run {
    fn done_on(
        &self,
        paths: &[Path],
        condition: &Condition,
        before: &std::collections::BTreeMap<Path, lake_chaos::net::Counts>,
    ) -> u64 {
        let now = self.hurt.fabric.counts();
        paths.iter().map(|path| now[path].done_by(condition, &before[path])).sum()
    }

    /// Until told to stop: the leader and the others in turn are hurt until that met something, and all is well for a while.
    async fn keep(&self, fault: Fault) {
        let mut turn: u64 = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let leader = self.hurt.cluster.leader().await;
            // The leader every other time: most of what clients do is with it.
            let peer = if turn.is_multiple_of(2) { leader } else { 1 + (turn / 2) % 3 };
            match fault {
                Fault::Refuse => self.cut(peer, Cut::Refuse, peer == leader).await,
                Fault::Hang => self.cut(peer, Cut::Silent, peer == leader).await,
                Fault::OldTerm => self.isolate(leader).await,
                Fault::AfterRequest | Fault::BeforeAnswer | Fault::Slow => self.hamper(fault).await,
            }
            self.ledger.grows_by(SOUND).await;
            turn += 1;
        }
        self.hurt.fabric.set(Conditions::new());
    }

    /// Cuts a peer off from the clients until they have noticed. What is not the leader they may never ask meanwhile.
    async fn cut(&self, peer: u64, how: Cut, is_leader: bool) {
        let (paths, condition) = (both_ways(peer), Condition::cut(how));
        let (before, failed) = (self.hurt.fabric.counts(), self.ledger.not_applied());
        self.hurt.fabric.set(partition::cut(&paths, how));
        let noticed = || match how {
            // Somebody tried again and was told that nothing was sent.
            Cut::Refuse => self.done_on(&paths, &condition, &before) > 0 && self.ledger.not_applied() > failed,
            // Somebody gave a silent connection up for a new one, which is as silent.
            _ => self.hurt.fabric.counts()[&paths[0]].held_connections > before[&paths[0]].held_connections,
        };
        // Patient writers are to outlive it.
        let limit = Instant::now() + if is_leader { PATIENCE / 4 } else { Duration::from_millis(300) };
        while !noticed() && Instant::now() < limit && !self.stop.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.met.fetch_add(u64::from(noticed()), Ordering::Relaxed);
        self.hurt.fabric.set(Conditions::new());
    }

    /// Parts the leader from the other peers, but not from the clients, until another leads and the old one has said
    /// something of its old term.
    async fn isolate(&self, leader: u64) {
        let cluster = &self.hurt.cluster;
        let others: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
        let between =
            others.iter().flat_map(|id| [(Node::Peer(leader), Node::Peer(*id)), (Node::Peer(*id), Node::Peer(leader))]);
        self.hurt.fabric.set(partition::cut(&between.collect::<Vec<_>>(), Cut::Silent));
        let new_term = eventually("another leader", async || {
            for id in &others {
                let status = cluster.status(*id).await;
                if status.leader.is_some_and(|leads| leads.id == *id) {
                    return Some(status.term);
                }
            }
            None
        })
        .await;
        self.ledger.grows_by(SOUND).await;
        let answer = cluster.cluster(leader).leader(v1::LeaderRequest::default()).await.unwrap().into_inner();
        self.met.fetch_add(u64::from(answer.term < new_term), Ordering::Relaxed);
        self.hurt.fabric.set(Conditions::new());
        eventually("the old leader to follow", async || (cluster.status(leader).await.term >= new_term).then_some(()))
            .await;
    }

    /// Something by chance, on the ways to all peers, for some changes.
    async fn hamper(&self, fault: Fault) {
        let all: Vec<Path> = (1..=3).flat_map(both_ways).collect();
        let cut = |when| Condition { at_message: Some(AtMessage { chance: 0.04, when }), ..Condition::default() };
        let (paths, condition) = match fault {
            Fault::AfterRequest => {
                (all.iter().copied().filter(|path| path.0 == Node::Clients).collect(), cut(When::After))
            }
            Fault::BeforeAnswer => {
                (all.iter().copied().filter(|path| path.1 == Node::Clients).collect(), cut(When::Before))
            }
            _ => {
                let (delay, jitter) = (Duration::from_millis(3), Duration::from_millis(12));
                (all.clone(), Condition { delay, jitter, loss: 0.01, reorder: 0.05, ..Condition::default() })
            }
        };
        let before = self.hurt.fabric.counts();
        self.hurt.fabric.set(paths.iter().map(|path| (*path, condition.clone())).collect());
        self.ledger.grows_by(SOUND).await;
        self.met.fetch_add(self.done_on(&paths, &condition, &before), Ordering::Relaxed);
        self.hurt.fabric.set(Conditions::new());
    }
}

/// The suite, and writers beside it, until the fault has met something so often.
async fn under(fault: Fault, wanted: u64) -> crate::support::ledger::Judged {
    let hurt = Hurt::founded().await;
    let since = hurt.cluster.put("/kv/before", "1").await;
    let writers = (0..WRITERS).map(|_| hurt.client()).collect();
    let ledger = Ledger::start(writers, hurt.client(), hurt.cluster.client(), since);
    let run = Run { hurt, ledger, met: AtomicU64::new(0), stop: AtomicBool::new(false) };
    let suite = async {
        let mut runs = 0;
        while runs == 0 || run.met.load(Ordering::Relaxed) < wanted {
            runs += 1;
            assert!(runs <= MAX_RUNS, "{fault:?} met something only {:?} times", run.met);
            let suite = tokio::spawn(conformance::run_small(Arc::new(run.hurt.client())));
            suite.await.unwrap_or_else(|failed| std::panic::resume_unwind(failed.into_panic()));
        }
        run.stop.store(true, Ordering::Relaxed);
        runs
    };
    let (runs, ()) = futures::join!(suite, run.keep(fault));
    let Run { hurt, ledger, met, .. } = run;
    let judged = ledger.judge().await;
    println!("{fault:?} met something {met:?} times in {runs} runs of the suite; beside it: {judged:?}");
    hurt.end().await;
    judged
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_refuses() {
    let judged = under(Fault::Refuse, 6).await;
    assert!(judged.not_applied > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_hangs() {
    let judged = under(Fault::Hang, 4).await;
    assert!(judged.unknown > 0, "what is silent may have been done");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_cut_when_a_request_has_arrived() {
    under(Fault::AfterRequest, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_cut_before_the_answer() {
    under(Fault::BeforeAnswer, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_connections_that_overtake_each_other() {
    under(Fault::Slow, 1000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leaders_that_answer_from_an_old_term() {
    under(Fault::OldTerm, 3).await;
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[tokio::test(flavor = "multi_thread")]
async fn half_of_the_endpoints_may_be_black_holes_from_the_start() {
    const CLIENTS: usize = 10;
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    // Two that take a connection and say nothing, and one that does not even take it.
    let holes = Fabric::open(&[1, 2], 1).await.unwrap();
    let paths: Vec<Path> = [1, 2].into_iter().flat_map(both_ways).collect();
    holes.set(partition::cut(&paths, Cut::Silent));
    let full = socket_that_takes_nothing();
    let mut endpoints: Vec<String> = [1, 2].map(|id| holes.address(Node::Clients, Node::Peer(id)).unwrap()).into();
    endpoints.push(full.address.clone());
    endpoints.extend(cluster.configs.values().map(|config| config.listen.to_string()));
    let first_change = async |store: RemoteStore, key: String| {
        let began = Instant::now();
        store.cas(&key, None, "1".into(), soon()).await.unwrap();
        began.elapsed()
    };
    let (mut took, mut without) = (Vec::new(), Vec::new());
    for n in 0..CLIENTS {
        let store = RemoteStore::connect(RemoteConfig { endpoints: endpoints.clone(), secret: None }).unwrap();
        took.push(first_change(store, format!("/kv/{n}")).await);
        without.push(first_change(cluster.client(), format!("/kv/without/{n}")).await);
    }
    println!("the first change of a client took {took:?}, and without black holes {without:?}");
    // Whoever waits for a black hole waits for 500 ms at least. The machine may be busy, but not each time.
    let waited = took.iter().min().unwrap().saturating_sub(*without.iter().min().unwrap());
    assert!(waited < Duration::from_millis(450), "{took:?}, and without {without:?}");
    let held: u64 = paths.iter().map(|path| holes.counts()[path].held_connections).sum();
    assert!(held >= CLIENTS as u64, "{held} connections met a black hole");
    cluster.stop_all().await;
    holes.close().await;
}

/// A socket whose queue of connections is full: who connects hears nothing.
struct Full {
    address: String,
    _listener: std::net::TcpListener,
    _queue: Vec<std::net::TcpStream>,
}

fn socket_that_takes_nothing() -> Full {
    let address = free_port();
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    let listener = socket.listen(1).unwrap().into_std().unwrap();
    let wait = Duration::from_millis(100);
    let queue =
        std::iter::from_fn(|| std::net::TcpStream::connect_timeout(&address, wait).ok()).take(100).collect::<Vec<_>>();
    assert!(queue.len() < 100, "it takes every connection");
    Full { address: address.to_string(), _listener: listener, _queue: queue }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_falls_silent_is_given_up_in_about_a_second() {
    let hurt = Hurt::founded().await;
    let mut took = Vec::new();
    for n in 0..10 {
        if took.len() == 3 {
            break;
        }
        // The connection is there, and has been used.
        hurt.store.commit(put("/kv/n", &format!("{n}")), soon()).await.unwrap();
        let leader = hurt.cluster.leader().await;
        let paths = both_ways(leader);
        let before = hurt.fabric.counts()[&paths[0]];
        hurt.fabric.set(partition::cut(&paths, Cut::Silent));
        let began = Instant::now();
        let call = tokio::spawn({
            let store = hurt.store.clone();
            async move { store.get("/kv/n", ReadOptions::default(), soon()).await }
        });
        let again = || hurt.fabric.counts()[&paths[0]].held_connections > before.held_connections;
        // Answered all the same, another peer leads by now, and it was not this connection's to be given up.
        eventually("a new connection", async || (again() || call.is_finished()).then_some(())).await;
        if again() {
            took.push(began.elapsed());
            assert!(hurt.fabric.counts()[&paths[0]].held_bytes > before.held_bytes, "the call met the silence");
        }
        hurt.fabric.set(Conditions::new());
        assert!(call.await.unwrap().is_ok());
    }
    println!("a silent connection was given up after {took:?}");
    assert_eq!(took.len(), 3, "the lead moved again and again");
    // An attempt takes no longer than 4 s: that is not what ended it.
    assert!(took.iter().min().unwrap() < &Duration::from_millis(2500), "{took:?}");
    hurt.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_outlives_every_peer_that_it_was_given() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let operator = cluster.client();
    let given = store.endpoints();
    store.cas("/kv/a", None, "1".into(), soon()).await.unwrap();
    let leader = cluster.leader().await;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let mut swap = async |old: u64, new: u64| {
        cluster.prepare(new, |_| {});
        cluster.start(new).await;
        eventually("the replacement", async || operator.replace(old, cluster.named(new), soon()).await.ok()).await;
        cluster.stop(old).await;
        store.commit(put("/kv/a", &format!("without {old}")), soon()).await.unwrap();
    };
    // The leader stays: no call fails, and nothing tells the client of the others unless it asks.
    for (old, new) in followers.into_iter().zip(4..) {
        swap(old, new).await;
    }
    eventually("the client to know the new members", async || {
        store.get("/kv/a", ReadOptions::default(), soon()).await.unwrap();
        store.endpoints().into_iter().filter(|endpoint| !given.contains(endpoint)).nth(1)
    })
    .await;
    swap(leader, 6).await;
    // None of those that it was given is there, nor the one that it goes to now.
    let leader = cluster.leader().await;
    cluster.stop(leader).await;
    store.commit(put("/kv/a", "2"), soon()).await.unwrap();
    cluster.stop_all().await;
}
