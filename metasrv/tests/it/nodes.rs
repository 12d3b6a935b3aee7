//! Query nodes and the leader that coordinates them: who is a node's process, what it holds, what it is told.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use lake_client::nodes::{NodeState, NodeStatus, PING, Rhythm, key};
use lake_client::remote::RemoteStore;
use lake_client::remote::node::{Node, NodeKeeper, Tenure};
use lake_client::store::{MetaStore, ReadOptions};
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::heartbeat_answer::Outcome;
use lake_proto::v1::nodes_client::NodesClient;
use rustix::process::Signal;
use tokio::sync::mpsc;
use tonic::Streaming;

use crate::herd::allow_files;
use crate::support::processes::Processes;
use crate::support::{PATIENCE, TestCluster, eventually, figure, kind};

/// A node is heard a few times a second, and its lease lives longer than it must.
const RHYTHM: Rhythm = Rhythm { interval: Duration::from_millis(600), lease: Duration::from_millis(8000) };

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// A node that does nothing.
#[derive(Debug, Default)]
struct Idle {
    load: AtomicUsize,
}

#[async_trait]
impl Node for Idle {
    fn info(&self) -> v1::NodeInfo {
        let roles = vec!["query".to_owned(), "worker".to_owned()];
        let flight_address = "127.0.0.1:9".to_owned();
        v1::NodeInfo { roles, flight_address, cores: 3, memory_bytes: 4, ..v1::NodeInfo::default() }
    }

    fn load(&self) -> v1::NodeLoad {
        let running_statements = self.load.load(Ordering::Relaxed) as u32;
        let procedures = vec!["in-hand".to_owned()];
        v1::NodeLoad { running_statements, cache_bytes: 5, cpu_millicores: 6, observed_revision: 7, procedures }
    }

    async fn carry_out(&self, kind: &str, payload: Bytes) -> Result<Bytes, String> {
        match kind {
            PING => Ok(payload),
            "load" => {
                self.load.store(payload.len(), Ordering::Relaxed);
                Ok(Bytes::new())
            }
            "never" => std::future::pending().await,
            other => Err(format!("{other} is nothing that it does")),
        }
    }
}

fn node(store: RemoteStore, name: &str) -> NodeKeeper {
    NodeKeeper::start(store, name, Arc::new(Idle::default()))
}

async fn held(keeper: &NodeKeeper) -> Tenure {
    let held = tokio::time::timeout(PATIENCE, keeper.held()).await;
    held.unwrap_or_else(|_| panic!("not registered: {:?}", keeper.last_failure())).expect("it is not superseded")
}

/// Waits until a heartbeat is answered that is sent after this call.
async fn heard_again(keeper: &NodeKeeper, lease: Duration) -> Tenure {
    let later = Instant::now() + lease;
    eventually("a heartbeat's answer", async || keeper.tenure().filter(|tenure| tenure.held_until >= later)).await
}

async fn listed(store: &RemoteStore, name: &str) -> Option<NodeStatus> {
    let nodes = store.nodes(soon()).await.unwrap().value;
    nodes.into_iter().find(|node| node.node == name)
}

async fn until_listed(store: &RemoteStore, name: &str, is: impl Fn(&NodeStatus) -> bool) -> NodeStatus {
    eventually("the node to be listed so", async || listed(store, name).await.filter(|node| is(node))).await
}

/// Whether a commit that is to happen only while a lease lives is made.
async fn commits(store: &RemoteStore, lease: u64) -> bool {
    let when = vec![Compare::lease_alive(lease)];
    let txn = Txn { when, then: vec![Op::put("/kv/upkeep", "done")], otherwise: vec![] };
    eventually("a commit", async || store.commit(txn.clone(), soon()).await.ok()).await.result.succeeded
}

async fn founded() -> TestCluster {
    TestCluster::founded(3, |config| {
        config.rhythm = RHYTHM;
        config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    })
    .await
}

/// A stream that is spoken on by hand: as a process does that sleeps, wakes, and repeats itself.
struct ByHand {
    process: String,
    outgoing: mpsc::Sender<v1::NodeMessage>,
    answers: Streaming<v1::LeaderMessage>,
    sequence: u64,
}

impl ByHand {
    async fn open(cluster: &TestCluster, process: &str) -> Self {
        let leader = cluster.leader().await;
        let (outgoing, messages) = mpsc::channel(4);
        let messages = tokio_stream::wrappers::ReceiverStream::new(messages);
        let answers = NodesClient::new(cluster.channel(leader)).heartbeat(messages).await.unwrap().into_inner();
        Self { process: process.to_owned(), outgoing, answers, sequence: 0 }
    }

    /// One heartbeat, and what it comes to.
    async fn beat(&mut self, epoch: u64, lease: u64) -> Outcome {
        self.sequence += 1;
        let beat = v1::Heartbeat {
            node: "n".to_owned(),
            process: self.process.clone(),
            epoch,
            lease,
            sequence: self.sequence,
            info: Some(v1::NodeInfo::default()),
            load: None,
            leaving: false,
        };
        let message = Some(v1::node_message::Message::Heartbeat(beat));
        self.outgoing.send(v1::NodeMessage { message }).await.unwrap();
        match self.answers.message().await.unwrap().unwrap().message.unwrap() {
            v1::leader_message::Message::Answer(answer) => {
                assert_eq!(answer.sequence, self.sequence);
                answer.outcome.unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    async fn registers(&mut self, epoch: u64, lease: u64) -> (u64, u64) {
        match self.beat(epoch, lease).await {
            Outcome::Tenure(tenure) => (tenure.epoch, tenure.lease),
            other => panic!("{other:?}"),
        }
    }

    /// It was told that it is over, and nothing else, and its stream has ended.
    async fn is_over(&mut self, epoch: u64, lease: u64) {
        match self.beat(epoch, lease).await {
            Outcome::Superseded(why) => assert!(why.contains("node n") && why.contains("revision"), "{why}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(self.answers.message().await.unwrap(), None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_processes_the_later_one_is_the_node() {
    let mut cluster = founded().await;
    let store = cluster.client();
    let first = node(cluster.client(), "n");
    let tenure = held(&first).await;
    let entry = store.get(&key("n"), ReadOptions::default(), soon()).await.unwrap().value.unwrap();
    assert_eq!(tenure.epoch, entry.mod_revision, "the epoch is the revision of the registration");
    assert!(commits(&store, tenure.lease).await);

    let second = node(cluster.client(), "n");
    let later = held(&second).await;
    assert!(later.epoch > tenure.epoch && later.lease != tenure.lease);
    assert!(!commits(&store, tenure.lease).await, "what the older one held is over when the later one is admitted");
    assert!(commits(&store, later.lease).await);
    let why = tokio::time::timeout(PATIENCE, first.superseded()).await.expect("the older one is told");
    assert!(why.contains("another process was registered as node n later"), "{why}");
    assert_eq!((first.tenure(), first.held().await), (None, None));
    // The older one's stream has closed, and took nothing of the later one with it.
    heard_again(&second, RHYTHM.lease).await;
    let listing = until_listed(&store, "n", |node| node.state() == NodeState::Up).await;
    assert_eq!((listing.process.as_str(), listing.epoch, listing.lease), (second.process(), later.epoch, later.lease));

    // A follower names the leader.
    let leader = cluster.leader().await;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    let refused = NodesClient::new(cluster.channel(follower)).list(v1::ListNodesRequest {}).await.unwrap_err();
    assert_eq!(kind(&refused), Kind::NotLeader);

    // One that ends in order leaves nothing.
    second.leave(PATIENCE).await;
    assert_eq!(listed(&store, "n").await, None);
    assert!(!commits(&store, later.lease).await);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_slept_keeps_its_epoch_unless_another_came() {
    let mut cluster = founded().await;
    let store = cluster.client();
    let mut sleeper = ByHand::open(&cluster, "sleeper").await;
    let (epoch, lease) = sleeper.registers(0, 0).await;
    assert_eq!(sleeper.registers(0, 0).await, (epoch, lease), "its answer was lost: it asks again");
    assert_eq!(sleeper.registers(epoch, lease).await, (epoch, lease));
    // Its stream ends with its lease; both are its own.
    let down = until_listed(&store, "n", |node| node.state() == NodeState::Down).await;
    assert!(!commits(&store, down.lease).await);
    eventually("its stream to end", async || {
        let connected = listed(&store, "n").await?.connected;
        (!connected).then_some(())
    })
    .await;
    let mut sleeper = ByHand::open(&cluster, "sleeper").await;
    assert_eq!(sleeper.beat(epoch, lease).await, Outcome::LeaseOver(true));
    let (same, another) = sleeper.registers(epoch, 0).await;
    assert!(same == epoch && another > lease, "{same} {another}");

    // An open stream of the older process, and what was under way on it, end at the fence.
    let mut other = ByHand::open(&cluster, "other").await;
    let (later, held) = other.registers(0, 0).await;
    assert!(later > epoch && !commits(&store, another).await && commits(&store, held).await);
    sleeper.is_over(epoch, another).await;
    for (epoch, lease) in [(epoch, 0), (0, 0)] {
        ByHand::open(&cluster, "sleeper").await.is_over(epoch, lease).await;
    }
    assert_eq!(other.registers(later, held).await, (later, held));
    assert!(listed(&store, "n").await.unwrap().connected);

    // The fence survives the leader.
    let leader = cluster.leader().await;
    cluster.stop(leader).await;
    let mut other = ByHand::open(&cluster, "other").await;
    assert_eq!(other.registers(later, held).await, (later, held), "a new leader accepts the same epoch and lease");
    ByHand::open(&cluster, "sleeper").await.is_over(epoch, another).await;

    // A stream is of one process.
    other.process = "third".to_owned();
    let beat = v1::Heartbeat {
        node: "n".to_owned(),
        process: "third".to_owned(),
        info: Some(v1::NodeInfo::default()),
        ..v1::Heartbeat::default()
    };
    let message = Some(v1::node_message::Message::Heartbeat(beat));
    other.outgoing.send(v1::NodeMessage { message }).await.unwrap();
    assert_eq!(kind(&other.answers.message().await.unwrap_err()), Kind::InvalidArgument);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instructions_reach_a_node_and_their_answers_come_back() {
    let mut cluster = founded().await;
    let store = cluster.client();
    let keeper = node(cluster.client(), "n");
    held(&keeper).await;
    let ask = |kind: &'static str, payload: &'static str, within: Duration| {
        let store = store.clone();
        async move { store.instruct("n", kind, payload.into(), false, Instant::now() + within).await }
    };
    assert_eq!(ask(PING, "hello", PATIENCE).await.unwrap(), Bytes::from_static(b"hello"));
    let refused = ask("dance", "", PATIENCE).await.unwrap_err().to_string();
    assert!(refused.contains("dance is nothing that it does"), "{refused}");
    // One-way, and then in order behind it one that is answered: the load was set when the next heartbeat told it.
    store.instruct("n", "load", Bytes::from_static(b"four"), true, soon()).await.unwrap();
    assert_eq!(ask(PING, "", PATIENCE).await.unwrap(), Bytes::new());
    let has = |load: u32| move |node: &NodeStatus| node.load.as_ref().is_some_and(|has| has.running_statements == load);
    let told = until_listed(&store, "n", has(4)).await;
    let idle = Idle { load: AtomicUsize::new(4) };
    assert_eq!((told.info, told.load), (idle.info(), Some(idle.load())), "all of it is what the node says");
    // To all of them; there is nobody whose answer could be waited for.
    let other = node(cluster.client(), "m");
    held(&other).await;
    let all = store.instruct("", "load", Bytes::from_static(b"seven"), true, soon()).await.unwrap();
    assert_eq!(all, Bytes::from_static(b"2"));
    for name in ["n", "m"] {
        until_listed(&store, name, has(5)).await;
    }
    assert!(store.instruct("", PING, Bytes::new(), false, soon()).await.is_err());
    other.leave(PATIENCE).await;

    let late = ask("never", "", Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(late.applied(), lake_client::store::Applied::Unknown, "{late}");
    let waits = tokio::spawn(ask("never", "", PATIENCE));
    let leader = cluster.leader().await;
    let member = cluster.running[&leader].peer().member().unwrap();
    eventually("the instruction to be on its way", async || (member.nodes.mailbox.waited_for() > 0).then_some(()))
        .await;
    drop(keeper);
    // It is told why, and not that its time is over.
    let gone = waits.await.unwrap().unwrap_err();
    assert!(gone.to_string().contains("went before it answered"), "{gone}");
    let nobody = ask(PING, "", Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(nobody.applied(), lake_client::store::Applied::No, "{nobody}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_moves_with_the_leader() {
    let mut cluster = founded().await;
    let store = cluster.client();
    let keeper = node(cluster.client(), "n");
    let tenure = held(&keeper).await;
    let same = |now: Tenure| assert_eq!((now.epoch, now.lease), (tenure.epoch, tenure.lease));
    // At step-down, and before its own next heartbeat would have told it.
    for _ in 0..2 {
        let leader = cluster.leader().await;
        let successor = (1..=3).find(|id| *id != leader).unwrap();
        store.transfer_leader(Some(successor), soon()).await.unwrap();
        until_listed(&store, "n", |node| node.connected && node.silent.is_some()).await;
        same(heard_again(&keeper, RHYTHM.lease).await);
    }
    let leader = cluster.leader().await;
    cluster.stop(leader).await;
    same(heard_again(&keeper, RHYTHM.lease).await);
    until_listed(&store, "n", |node| node.state() == NodeState::Up && node.load.is_some()).await;
    // Without a quorum nothing is renewed, and the node knows by itself when that is too long.
    let leader = cluster.leader().await;
    cluster.stop(leader).await;
    eventually("the node to hold nothing any more", async || keeper.tenure().is_none().then_some(())).await;
    cluster.start(leader).await;
    let again = held(&keeper).await;
    assert_eq!(again.epoch, tenure.epoch, "a process registers once");
    cluster.stop_all().await;
}

/// So many nodes, each with connections and a view of its own.
async fn nodes_of(peers: &Processes, n: usize) -> Vec<(NodeKeeper, Tenure)> {
    let keepers: Vec<_> = (0..n).map(|i| node(peers.store(), &format!("node-{i}"))).collect();
    let mut nodes = Vec::new();
    for keeper in keepers {
        let tenure = held(&keeper).await;
        nodes.push((keeper, tenure));
    }
    nodes
}

/// Waits until each has been heard by the leader there is; says how long the last one took. None has lost what it held.
async fn all_heard(nodes: &[(NodeKeeper, Tenure)], lease: Duration, since: Instant) -> Duration {
    for (keeper, tenure) in nodes {
        let later = since + lease;
        let now =
            eventually("each node to be heard", async || keeper.tenure().filter(|now| now.held_until >= later)).await;
        assert_eq!((now.epoch, now.lease), (tenure.epoch, tenure.lease), "nobody registers twice");
    }
    since.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_outlive_a_leader_that_sleeps_and_one_that_is_killed() {
    let mut peers = Processes::founded(100_000).await;
    let nodes = nodes_of(&peers, 60).await;
    let store = peers.store();
    let asleep = peers.leader().await;
    peers.signal(asleep, Signal::STOP);
    let awake = peers.leader_besides(&[asleep]).await;
    all_heard(&nodes, Processes::RHYTHM.lease, Instant::now()).await;
    peers.signal(asleep, Signal::CONT);
    // The one that slept ends no lease, and answers for nobody.
    let still = async || {
        let nodes = store.nodes(soon()).await.unwrap().value;
        let up = nodes.iter().filter(|node| node.state() == NodeState::Up).count();
        (up == 60).then_some(())
    };
    eventually("every node to be up", still).await;
    all_heard(&nodes, Processes::RHYTHM.lease, Instant::now()).await;
    peers.leader_besides(&[]).await;
    peers.kill(awake);
    peers.leader_besides(&[awake]).await;
    all_heard(&nodes, Processes::RHYTHM.lease, Instant::now()).await;
    eventually("every node to be up", still).await;
}

/// The processor time that a process has used.
fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let ticks = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().skip(11).take(2);
    Duration::from_millis(ticks.map(|field| field.parse::<u64>().unwrap() * 10).sum())
}

/// How often these peers were asked who leads.
async fn questions(peers: &Processes, ids: &[u64]) -> f64 {
    let mut all = 0.0;
    for id in ids {
        all += peers.figure(*id, "lake_metasrv_leader_questions_total").await;
    }
    all
}

/// What a thousand nodes cost their leader, and how they come back when it is killed. To be run by itself, in release.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "wants the machine to itself: cargo test --release --workspace --test it a_thousand_nodes -- --ignored --nocapture"]
async fn a_thousand_nodes() {
    const NODES: usize = 1000;
    // Two connections of each to the leader, and a host has half of what a peer takes in.
    allow_files(10_000, 20_000);
    let mut peers = Processes::with_rhythm(Rhythm::default()).await;
    let began = Instant::now();
    let nodes = nodes_of(&peers, NODES).await;
    println!("{NODES} nodes were registered within {:.2?}", began.elapsed());
    let leader = peers.leader().await;
    all_heard(&nodes, Rhythm::default().lease, Instant::now()).await;
    let (at, used) = (Instant::now(), processor_time(peers.peers.pid(leader).unwrap()));
    tokio::time::sleep(Duration::from_secs(30)).await;
    let core = (processor_time(peers.peers.pid(leader).unwrap()) - used).as_secs_f64() / at.elapsed().as_secs_f64();
    println!("the leader of {NODES} nodes took {:.1} % of a core", core * 100.0);
    assert_eq!(peers.leader().await, leader, "another peer leads since: run it again");
    let left: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let before = questions(&peers, &left).await;
    peers.kill(leader);
    let killed = Instant::now();
    // Per second, for each half of one.
    let mut rates: Vec<f64> = Vec::new();
    let watch = async {
        let (mut at, mut asked) = (killed, before);
        while rates.len() < 600 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let (now, all) = (Instant::now(), questions(&peers, &left).await);
            rates.push((all - asked) / (now - at).as_secs_f64());
            (at, asked) = (now, all);
        }
    };
    let last = tokio::select! {
        last = all_heard(&nodes, Rhythm::default().lease, killed) => last,
        () = watch => panic!("not all were heard within five minutes"),
    };
    let asked = questions(&peers, &left).await - before;
    let steady = NODES as f64 / Rhythm::default().interval.as_secs_f64();
    println!(
        "after the leader was killed the last node was heard within {last:.2?}; who leads was asked {asked} times, at most {:.0} times \
         a second; the nodes send {steady:.0} heartbeats a second",
        rates.iter().copied().fold(0.0, f64::max)
    );
    assert!(last < Duration::from_secs(10), "{last:?}");
    // One question of each, and more only where an answer came too late.
    assert!(asked <= 2.0 * NODES as f64, "who leads was asked {asked} times");
    assert!(asked >= NODES as f64 / 2.0, "who has lost the leader has to ask, and {asked} did");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happened_to_nodes_is_counted() {
    let mut cluster = founded().await;
    let keeper = node(cluster.client(), "n");
    held(&keeper).await;
    let leader = cluster.leader().await;
    let http = cluster.running[&leader].http_address().unwrap();
    assert_eq!(figure(http, "lake_metasrv_nodes_connected").await, 1.0);
    assert_eq!(figure(http, "lake_metasrv_nodes_registered_total").await, 1.0);
    keeper.leave(PATIENCE).await;
    eventually("its stream to end", async || (figure(http, "lake_metasrv_nodes_connected").await == 0.0).then_some(()))
        .await;
    cluster.stop_all().await;
}
