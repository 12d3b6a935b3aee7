//! Shards and the workers that have them: given, moved, taken over, and committed for by one at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use lake_client::follow::{Follower, Told};
use lake_client::nodes::Rhythm;
use lake_client::remote::RemoteStore;
use lake_client::remote::node::{Node, NodeKeeper, Tenures};
use lake_client::shards::{self, Moving, ROUTES, Routes, SETTINGS, Settings, ShardListing, ShardStatus};
use lake_client::store::{MetaStore, ReadOptions};
use lake_metasrv::peer::placement::phi::THRESHOLD;
use lake_metasrv::peer::placement::{MOVES_AT_ONCE, Placement};
use lake_proto::kv::{Expected, KeyValue, Op, Revision, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::shards_client::ShardsClient;
use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

use crate::support::processes::Processes;
use crate::support::{PATIENCE, TestCluster, eventually, kind};

/// Workers are heard a few times a second, and their leases live as long as they must.
const RHYTHM: Rhythm = Rhythm { interval: Duration::from_millis(600), lease: Duration::from_millis(6000) };
const SHARDS: u32 = 12;
/// Under it workers write what they have done, by shards.
const DONE: &str = "/kv/upkeep/";

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// What workers were told about moves: who, of which kind, and which move.
type AboutMoves = Arc<Mutex<Vec<(String, String, Moving)>>>;

#[derive(Debug)]
struct Plain {
    roles: Vec<String>,
    /// Its name, and where it writes down what it is told about moves; without, it refuses all it is told.
    told: Option<(String, AboutMoves)>,
}

#[async_trait]
impl Node for Plain {
    fn info(&self) -> v1::NodeInfo {
        v1::NodeInfo { roles: self.roles.clone(), ..v1::NodeInfo::default() }
    }

    fn load(&self) -> v1::NodeLoad {
        v1::NodeLoad::default()
    }

    async fn carry_out(&self, kind: &str, payload: Bytes) -> Result<Bytes, String> {
        let Some((name, told)) = &self.told else { return Err(format!("{kind} is nothing that it does")) };
        if kind == shards::LEAVE_SHARD {
            // What it has begun takes a while to end.
            tokio::time::sleep(shards::LEAVE_WITHIN * 9 / 20).await;
        }
        told.lock().unwrap().push((name.clone(), kind.to_owned(), Moving::of(&payload)?));
        Ok(Bytes::new())
    }
}

/// A worker that takes a moment to make itself ready for a shard, or never is.
#[derive(Debug, Default)]
struct Slow {
    /// How often it does so now, and at most did at once.
    at_once: Mutex<(usize, usize)>,
    never: AtomicBool,
    unanswered: AtomicUsize,
}

#[async_trait]
impl Node for Slow {
    fn info(&self) -> v1::NodeInfo {
        v1::NodeInfo { roles: vec![shards::WORKER.to_owned()], ..v1::NodeInfo::default() }
    }

    fn load(&self) -> v1::NodeLoad {
        v1::NodeLoad::default()
    }

    async fn carry_out(&self, kind: &str, _: Bytes) -> Result<Bytes, String> {
        if kind != shards::WARM_SHARD {
            return Ok(Bytes::new());
        }
        if self.never.load(Ordering::SeqCst) {
            self.unanswered.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
        {
            let mut at_once = self.at_once.lock().unwrap();
            at_once.0 += 1;
            at_once.1 = at_once.0.max(at_once.1);
        }
        // Long enough for others to be begun, and a fraction of what is waited for it.
        tokio::time::sleep(shards::WARM_WITHIN / 20).await;
        self.at_once.lock().unwrap().0 -= 1;
        Ok(Bytes::new())
    }
}

fn node(store: RemoteStore, name: &str, role: &str) -> NodeKeeper {
    NodeKeeper::start(store, name, Arc::new(Plain { roles: vec![role.to_owned()], told: None }))
}

/// A worker that writes down what it is told about moves.
fn told(store: RemoteStore, name: &str, told: &AboutMoves) -> NodeKeeper {
    let told = Some((name.to_owned(), told.clone()));
    NodeKeeper::start(store, name, Arc::new(Plain { roles: vec![shards::WORKER.to_owned()], told }))
}

fn worker(store: RemoteStore, name: &str) -> NodeKeeper {
    node(store, name, shards::WORKER)
}

async fn founded() -> TestCluster {
    TestCluster::founded(3, |config| {
        config.rhythm = RHYTHM;
        config.placement = Placement { shards: SHARDS, ..Placement::default() };
    })
    .await
}

async fn until_listed(store: &RemoteStore, what: &str, is: impl Fn(&ShardListing) -> bool) -> ShardListing {
    eventually(what, async || store.shards(soon()).await.ok().map(|read| read.value).filter(|listing| is(listing)))
        .await
}

/// All shards are held, and each of these has so many.
fn held_by(listing: &ShardListing, parts: &[(&str, usize)]) -> bool {
    let held = |shard: &&ShardStatus| shard.remaining.is_some();
    let of = |node: &str| listing.shards.iter().filter(held).filter(|shard| shard.route.node == node).count();
    listing.count > 0
        && listing.shards.iter().filter(held).count() == listing.count as usize
        && parts.iter().all(|(node, part)| of(node) == *part)
}

/// Learns all routes as they change, and when it did.
struct Seen {
    changes: Arc<Mutex<Vec<(Instant, u32, String)>>>,
    stop: CancellationToken,
}

impl Seen {
    fn begin(store: RemoteStore) -> Self {
        let (changes, stop) = (Arc::new(Mutex::new(Vec::new())), CancellationToken::new());
        let (told, stopped) = (changes.clone(), stop.clone());
        tokio::spawn(async move {
            let mut routes = Follower::new(Arc::new(store), ROUTES);
            while let Some(next) = stopped.run_until_cancelled(routes.next()).await {
                let entries: Vec<KeyValue> = match next {
                    Ok(Told::Reset(all)) => all.value,
                    Ok(Told::Changes(changes)) => {
                        changes.changes.into_iter().flat_map(|change| change.events).filter_map(|e| e.entry).collect()
                    }
                    Err(_) => continue,
                };
                let mut told = told.lock().unwrap();
                for entry in entries {
                    if let Some((shard, route)) = shards::shard_of_key(&entry.key).zip(shards::Route::of(&entry)) {
                        told.push((Instant::now(), shard, route.node));
                    }
                }
            }
        });
        Self { changes, stop }
    }

    /// When a node was first seen to be given one of these shards after an instant.
    fn first(&self, node: &str, of: &BTreeSet<u32>, after: Instant) -> Option<Instant> {
        let changes = self.changes.lock().unwrap();
        changes.iter().find(|(at, shard, to)| *at > after && to == node && of.contains(shard)).map(|(at, ..)| *at)
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_follow_their_workers() {
    let mut cluster = founded().await;
    let store = cluster.client();
    let nobody = store.maintain_shards(true, soon()).await.unwrap_err().to_string();
    assert!(nobody.contains("no shards yet"), "{nobody}");
    // A node without the role is given none.
    let _query = node(cluster.client(), "q", "query");
    let about = AboutMoves::default();
    let (_a, b) = (told(cluster.client(), "a", &about), told(cluster.client(), "b", &about));
    let halves = until_listed(&store, "each to have its half", |l| held_by(l, &[("a", 6), ("b", 6)])).await;
    assert_eq!((halves.count, halves.maintenance), (SHARDS, false));
    assert!(halves.shards.iter().all(|shard| shard.route.followers.len() == 1));

    // By hand: one transaction, which the leader will not do twice.
    let one = halves.shards.iter().find(|shard| shard.route.node == "a").unwrap();
    let would = store.move_shard(one.shard, "b", true, soon()).await.unwrap();
    assert_eq!((would.from.as_deref(), would.to.as_str(), would.fence), (Some("a"), "b", None));
    let listed = store.shards(soon()).await.unwrap().value;
    assert!(listed.shards.iter().any(|shard| shard.shard == one.shard && shard.fence == one.fence), "only told");
    let moved = store.move_shard(one.shard, "b", false, soon()).await.unwrap();
    assert!(moved.from.as_deref() == Some("a") && moved.fence > Some(one.fence), "{moved:?}");
    // Before it the one is told to make itself ready, and after it the other one to end what it does.
    let of = |node: &str, kind: &str, fence| (node.to_owned(), kind.to_owned(), Moving { shard: one.shard, fence });
    let both = [of("b", shards::WARM_SHARD, one.fence), of("a", shards::LEAVE_SHARD, moved.fence.unwrap())];
    let of_one = about.lock().unwrap().iter().filter(|told| told.2.shard == one.shard).cloned().collect::<Vec<_>>();
    assert_eq!(of_one.rchunks(2).next().unwrap(), both);
    let again = store.move_shard(one.shard, "b", false, soon()).await.unwrap();
    assert_eq!(again.fence, moved.fence, "it has it");
    for (shard, node, why) in [(SHARDS, "a", "no shard 12"), (0, "q", "role worker"), (0, "z", "role worker")] {
        let refused = store.move_shard(shard, node, false, soon()).await.unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }

    // In maintenance mode what b had stays with it, also when it is lost.
    store.maintain_shards(true, soon()).await.unwrap();
    let seen = Seen::begin(cluster.client());
    let tenures = b.tenures();
    let had: BTreeSet<u32> = store
        .shards(soon())
        .await
        .unwrap()
        .value
        .shards
        .into_iter()
        .filter_map(|shard| (shard.route.node == "b").then_some(shard.shard))
        .collect();
    assert_eq!(had.len(), 7);
    drop(b);
    let lost_at = Instant::now();
    let is_lost = |shard: &ShardStatus| shard.remaining.is_none() && shard.suspicion > Some(THRESHOLD);
    let listing = until_listed(&store, "what b had to be lost", |listing| {
        listing.shards.iter().filter(|shard| shard.route.node == "b").all(is_lost)
    })
    .await;
    assert_eq!(listing.shards.iter().filter(|shard| shard.route.node == "b").count(), 7);
    assert!(tenures.now().is_none(), "its tenure ended before the leader's lease did");
    assert_eq!(seen.first("a", &had, lost_at), None);
    let released = Instant::now();
    store.maintain_shards(false, soon()).await.unwrap();
    until_listed(&store, "a to have all", |listing| held_by(listing, &[("a", 12)])).await;
    eventually("the change to be told", async || seen.first("a", &had, released)).await;

    // A worker that is new: first asked for, then done.
    let c = worker(cluster.client(), "c");
    let dry = eventually("the new worker to be heard", async || {
        store.balance_shards(true, soon()).await.ok().filter(|moves| moves.len() == 6)
    })
    .await;
    assert!(dry.iter().all(|moved| moved.fence.is_none() && moved.from.as_deref() == Some("a") && moved.to == "c"));
    let moves = store.balance_shards(false, soon()).await.unwrap();
    assert!(moves.len() == 6 && moves.iter().all(|moved| moved.fence.is_some()), "{moves:?}");
    until_listed(&store, "each to have its half", |listing| held_by(listing, &[("a", 6), ("c", 6)])).await;

    // One that ends in order is not waited for, and one that comes back under the same name keeps what it had.
    c.leave(PATIENCE).await;
    let all = until_listed(&store, "a to have all", |listing| held_by(listing, &[("a", 12)])).await;
    assert!(all.shards.iter().any(|shard| shard.route.reason.contains("has left")), "{all:?}");
    let before = all.shards[0].route.lease;
    let _again = worker(cluster.client(), "a");
    let kept = until_listed(&store, "a to have all under its new lease", |listing| {
        held_by(listing, &[("a", 12)]) && listing.shards.iter().all(|shard| shard.route.lease > before)
    })
    .await;
    assert!(kept.shards.iter().all(|shard| shard.route.node == "a"));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_puts_in_the_place_of_a_route_or_the_settings_is_borne() {
    let mut cluster = founded().await;
    let store = cluster.client();
    let put = async |key: &str, over: Revision, value: Bytes| {
        let done = store.commit(Txn::cas(key, Expected::ModRevision(over), value), soon()).await.unwrap().result;
        assert!(done.succeeded, "{key}");
        done.revision
    };
    let _a = worker(cluster.client(), "a");
    let listing = until_listed(&store, "a to have all", |listing| held_by(listing, &[("a", 12)])).await;
    let odd = put(&shards::key(3), listing.shards[3].fence, "no route".into()).await;
    until_listed(&store, "the shard to be given again", |listing| {
        held_by(listing, &[("a", 12)]) && listing.shards[3].fence > odd
    })
    .await;
    let settings = store.get(SETTINGS, ReadOptions::default(), soon()).await.unwrap().value.unwrap();
    let fewer = Settings { shards: 5, maintenance: false };
    let fewer = put(SETTINGS, settings.mod_revision, fewer.to_bytes()).await;
    until_listed(&store, "the five that count to be listed", |listing| {
        held_by(listing, &[("a", 5)]) && listing.count == 5 && listing.shards.len() == 5
    })
    .await;

    // Of many moves so many are under way at once, however long who gets the shards takes.
    let many = u32::try_from(2 * MOVES_AT_ONCE + 8).unwrap();
    put(SETTINGS, fewer, Settings { shards: many, maintenance: false }.to_bytes()).await;
    let (from, to) = ("a", "b");
    until_listed(&store, "the one to have all", |l| l.count == many && held_by(l, &[(from, many as usize)])).await;
    // Nothing is changed by itself meanwhile.
    store.maintain_shards(true, soon()).await.unwrap();
    let slow = Arc::new(Slow::default());
    let _b = NodeKeeper::start(cluster.client(), to, slow.clone());
    eventually("the other one to be heard", async || {
        store.balance_shards(true, soon()).await.ok().filter(|moves| moves.len() == many as usize / 2)
    })
    .await;
    let moves = store.balance_shards(false, soon()).await.unwrap();
    assert!(moves.len() == many as usize / 2 && moves.iter().all(|moved| moved.fence.is_some()), "{moves:?}");
    let most = slow.at_once.lock().unwrap().1;
    assert!((2..=MOVES_AT_ONCE).contains(&most), "{most} were under way at once");

    // One that does not answer gets the shard all the same.
    let listing = store.shards(soon()).await.unwrap().value;
    let left = listing.shards.iter().find(|shard| shard.route.node == from).unwrap();
    slow.never.store(true, Ordering::SeqCst);
    let moved = store.move_shard(left.shard, to, false, soon()).await.unwrap();
    assert!(moved.fence > Some(left.fence) && moved.to == to, "{moved:?}");
    assert_eq!(slow.unanswered.load(Ordering::SeqCst), 1, "it was asked, once, and nobody waits for it any more");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_cut_off_has_stopped_before_another_begins() {
    let mut cluster = founded().await;
    let store = cluster.client();
    let _a = worker(cluster.client(), "a");
    let b = worker(cluster.client(), "b");
    until_listed(&store, "each to have its half", |l| held_by(l, &[("a", 6), ("b", 6)])).await;
    let listing = store.shards(soon()).await.unwrap().value;
    let had: BTreeSet<u32> =
        listing.shards.iter().filter(|shard| shard.route.node == "b").map(|shard| shard.shard).collect();
    let seen = Seen::begin(cluster.client());
    let tenures = b.tenures();
    let cut = Instant::now();
    drop(b);
    // Nothing is renewed from here on; what it believes is all that it has.
    let tenure = tenures.now().expect("it holds its lease");
    let taken = eventually("a to be given what b had", async || seen.first("a", &had, cut)).await;
    let until = tenure.held_until;
    assert!(taken >= until, "b may have worked for {:?} after it was given away", until - taken);
    assert!(tenures.now().is_none());
    tenures.over(tenure.lease).await;
    until_listed(&store, "a to have all", |listing| held_by(listing, &[("a", 12)])).await;
    cluster.stop_all().await;
}

/// A worker that commits something for each of its shards, again and again.
struct Working {
    keeper: Option<NodeKeeper>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Working {
    fn begin(cluster: &TestCluster, name: &str) -> Self {
        let (store, stop) = (cluster.client(), CancellationToken::new());
        let keeper = worker(cluster.client(), name);
        let task = tokio::spawn(work(store, name.to_owned(), keeper.tenures(), stop.clone()));
        Self { keeper: Some(keeper), stop, task }
    }

    /// Its heartbeats end. It works on, as long as it believes that it may.
    fn cut_off(&mut self) {
        self.keeper = None;
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

async fn work(store: RemoteStore, name: String, tenures: Tenures, stop: CancellationToken) {
    let mut follower = Follower::new(Arc::new(store.clone()), ROUTES);
    let mut routes = Routes::default();
    while !stop.is_cancelled() {
        // What it knows of the routes is a little old, as it is with every watch.
        match tokio::time::timeout(Duration::from_millis(20), follower.next()).await {
            Ok(Ok(Told::Reset(all))) => {
                routes = Routes::default();
                all.value.iter().for_each(|entry| routes.learn(&entry.key, Some(entry)));
            }
            Ok(Ok(Told::Changes(changes))) => changes
                .changes
                .into_iter()
                .flat_map(|change| change.events)
                .for_each(|event| routes.learn(&event.key, event.entry.as_ref())),
            Ok(Err(_)) | Err(_) => {}
        }
        let Some(tenure) = tenures.now() else { continue };
        let fences: Vec<_> = routes.held_by(&name, tenure.lease).collect();
        for fence in fences {
            let then = vec![Op::put(format!("{DONE}{}", fence.shard), format!("{name} {}", fence.revision))];
            let txn = Txn { when: fence.compares(), then, otherwise: vec![] };
            // Whether it is made is for the fence to say.
            let _ = store.commit(txn, Instant::now() + Duration::from_secs(2)).await;
        }
    }
}

/// All changes under a prefix from the first on, up to a revision.
async fn history(
    store: &RemoteStore,
    prefix: &str,
    last: Revision,
) -> BTreeMap<Revision, Vec<(String, Option<KeyValue>)>> {
    let mut stream = MetaStore::watch(store, prefix, 1, soon()).await.unwrap();
    let mut history = BTreeMap::new();
    loop {
        let told = tokio::time::timeout(PATIENCE, stream.next()).await.expect("it is told in time").unwrap().unwrap();
        for change in told.changes {
            history.insert(change.revision, change.events.into_iter().map(|event| (event.key, event.entry)).collect());
        }
        if told.progress >= last {
            return history;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn at_no_moment_do_two_workers_commit_for_one_shard() {
    let mut cluster = founded().await;
    let store = cluster.client();
    let names = ["a", "b", "c"];
    let mut working: BTreeMap<&str, Working> =
        names.iter().map(|name| (*name, Working::begin(&cluster, name))).collect();
    until_listed(&store, "every shard to be held", |listing| held_by(listing, &[])).await;
    for round in 0..12_u32 {
        // Shards go round, so that each has a new fence while its old leader is at work.
        for shard in 0..SHARDS {
            let to = names[((shard + round) % 3) as usize];
            // Refused while that one is lost.
            let _ = store.move_shard(shard, to, false, Instant::now() + Duration::from_secs(5)).await;
        }
        match round {
            3 => working.get_mut("b").unwrap().cut_off(),
            5 => {
                let leader = cluster.leader().await;
                let successor = (1..=3).find(|id| *id != leader).unwrap();
                store.transfer_leader(Some(successor), soon()).await.unwrap();
            }
            7 => {
                // Another process under the same name, while the old one may still be at work.
                let old = working.insert("b", Working::begin(&cluster, "b")).unwrap();
                until_listed(&store, "every shard to be held", |listing| held_by(listing, &[])).await;
                old.end().await;
            }
            _ => {}
        }
    }
    until_listed(&store, "every shard to be held", |listing| held_by(listing, &[])).await;
    for (_, working) in working {
        working.end().await;
    }
    let last = store.commit(Txn { then: vec![Op::put("/kv/end", "")], ..Txn::default() }, soon()).await.unwrap();
    let last = last.result.revision;
    let (mut all, done) = (history(&store, ROUTES, last).await, history(&store, DONE, last).await);
    for (revision, events) in done {
        assert!(all.insert(revision, events).is_none(), "one transaction writes one of them");
    }
    let (mut routes, mut workers) = (Routes::default(), BTreeMap::<u32, BTreeSet<String>>::new());
    for (revision, events) in all {
        for (key, entry) in events {
            let Some(shard) = key.strip_prefix(DONE) else {
                routes.learn(&key, entry.as_ref());
                continue;
            };
            let shard: u32 = shard.parse().unwrap();
            let fenced = &routes.routes[&shard];
            let wrote = String::from_utf8(entry.unwrap().value.to_vec()).unwrap();
            let may = format!("{} {}", fenced.route.node, fenced.revision);
            assert_eq!(wrote, may, "at revision {revision}, for shard {shard}: the left one committed");
            workers.entry(shard).or_default().insert(fenced.route.node.clone());
        }
    }
    let moved = workers.values().filter(|workers| workers.len() > 1).count();
    assert!(
        workers.len() == SHARDS as usize && moved > 0,
        "somebody worked for each, and some were moved: {workers:?}"
    );
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_slept_moves_nothing() {
    let peers = Processes::with_rhythm(RHYTHM).await;
    let store = peers.store();
    let (_a, _b) = (worker(peers.store(), "a"), worker(peers.store(), "b"));
    until_listed(&store, "each to have its half", |l| held_by(l, &[("a", 32), ("b", 32)])).await;
    let asleep = peers.leader().await;
    peers.signal(asleep, Signal::STOP);
    // It lies in its socket until it wakes.
    let mut at_the_sleeper = ShardsClient::new(peers.channel(asleep));
    let late = tokio::spawn(async move {
        at_the_sleeper.move_shard(v1::MoveShardRequest { shard: 0, node: "a".to_owned(), dry_run: false }).await
    });
    peers.leader_besides(&[asleep]).await;
    // The workers come to the new leader one after the other.
    let moved =
        eventually("b to be given the shard", async || store.move_shard(0, "b", false, soon()).await.ok()).await;
    let now = store.move_shard(0, "b", false, soon()).await.unwrap();
    assert_eq!((now.fence, now.to.as_str()), (moved.fence, "b"));
    peers.signal(asleep, Signal::CONT);
    let late = late.await.unwrap().map(|answer| answer.into_inner()).unwrap_err();
    assert!(matches!(kind(&late), Kind::NotLeader | Kind::Unavailable), "{late:?}");
    // Whatever it had in mind when it was stopped, what the new leader has done stands.
    eventually("it to know that it does not lead", async || {
        let status = peers.status(asleep).await?;
        let leader = status.leader?;
        (leader.id != asleep).then_some(())
    })
    .await;
    let listing = store.shards(soon()).await.unwrap().value;
    let shard = listing.shards.iter().find(|shard| shard.shard == 0).unwrap();
    assert_eq!((shard.route.node.as_str(), Some(shard.fence)), ("b", moved.fence));
}
