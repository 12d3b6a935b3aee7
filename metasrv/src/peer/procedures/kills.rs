//! The leader, a worker, and both are killed wherever a procedure can stand, and in the end it was done once in effect. So is the leader where
//! it gives a shard to another worker, which is one transaction.
//!
//! Peers are processes: this binary again ([`crate::support::processes`]), which as a build for tests can die at
//! [`failpoints`](super::failpoints).
#![allow(clippy::disallowed_methods, reason = "tests read any clock")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lake_client::catalog::{Catalog, Namespace, TableIdent, TablePointer};
use lake_client::procedures::drop_namespace::{DROP, NamespaceDrop, PURGES, RESTORE};
use lake_client::procedures::purge::{CHECK, DELETE, RETAIN};
use lake_client::procedures::purge_warehouse::{REMOVE, WarehousePurge};
use lake_client::procedures::upkeep::{PLACE, RUN, TableUpkeep, What};
use lake_client::procedures::{State, calls};
use lake_client::remote::RemoteStore;
use lake_client::remote::node::NodeKeeper;
use lake_client::shards::{self, LEAVE_SHARD, ShardStatus, WARM_SHARD};
use lake_client::store::{MetaStore, ReadOptions};
use lake_client::warehouse::Profile;
use tokio::sync::{Mutex, MutexGuard};

use super::failpoints::{LEAVE, Point, ROUTE, VARIABLE, WARM};
use crate::support::processes::Processes;
use crate::support::purging::{COUNT, Death, FILES, Runner, Worker, deleted, soon, submit, submit_upkeep, until};
use crate::support::{PATIENCE, eventually};

/// The steps that a purge comes to, the first one being that it is accepted.
const STEPS: [&str; 4] = ["new", RETAIN, CHECK, DELETE];

/// Three peers of which the one that comes to a point that is named dies there.
struct Mortal {
    peers: Processes,
    store: RemoteStore,
    die_at: PathBuf,
    _dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// One test at a time has peers that die: they take turns in leading as it is.
static ALONE: Mutex<()> = Mutex::const_new(());

impl Mortal {
    async fn founded() -> Self {
        let alone = ALONE.lock().await;
        let dir = tempfile::tempdir().unwrap();
        let die_at = dir.path().join("die-at");
        let peers = Processes::founded_in(vec![(VARIABLE.to_owned(), die_at.clone().into_os_string())]).await;
        Self { store: peers.store(), peers, die_at, _dir: dir, _alone: alone }
    }

    /// The leader that comes to this point is to die. There is one.
    async fn dies_at(&self, point: Point, step: &str) {
        self.peers.leader().await;
        std::fs::write(&self.die_at, point.of(step)).unwrap();
    }

    /// Waits until a peer has died there. Says which.
    async fn died(&mut self) -> u64 {
        eventually("the leader to come to the point", async || (!self.die_at.exists()).then_some(())).await;
        let died = eventually("a peer to die", async || (1..=3).find(|id| is_dead(&self.peers, *id))).await;
        self.peers.peers.ended(died, PATIENCE).await.unwrap();
        died
    }

    async fn back(&mut self, id: u64) {
        self.peers.spawn(id);
        let knows = async || self.peers.status(id).await.and_then(|status| status.leader).map(drop);
        eventually("it to be back", knows).await;
    }

    /// Waits until a purge is done, and looks whether each of its steps was done once in effect.
    async fn is_done_once(&self, id: &str, table: &str, worker: &Worker, whose: &str) {
        let began = Instant::now();
        let done = until(&self.store, id, |record| record.state == State::Done).await.record;
        println!("{whose}: done {:.1?} after the death", began.elapsed());
        assert_eq!((deleted(&done), done.steps), (FILES, 2 + FILES), "{whose}: each step is committed once");
        assert_eq!(worker.deleted_of(table), (0..FILES).collect(), "{whose}");
    }
}

/// Whether a peer's process has ended, which nobody has waited for yet.
fn is_dead(peers: &Processes, id: u64) -> bool {
    let of = |pid: u32| std::fs::read_to_string(Path::new("/proc").join(format!("{pid}/stat"))).unwrap_or_default();
    let is_zombie =
        |stat: String| stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('Z'));
    peers.peers.pid(id).is_ok_and(|pid| is_zombie(of(pid)))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_procedure_is_done_once_wherever_its_leader_dies() {
    let mut cluster = Mortal::founded().await;
    let worker = Worker::new();
    let _keeper = NodeKeeper::start(cluster.peers.store(), "w", worker.clone());
    for (n, (step, point)) in STEPS.iter().flat_map(|step| Point::ALL.map(|point| (step, point))).enumerate() {
        let table = format!("t{n}");
        cluster.dies_at(point, step).await;
        let id = submit(&cluster.store, &table).await;
        let died = cluster.died().await;
        cluster.is_done_once(&id, &table, &worker, &format!("leader at {step} {point:?}")).await;
        cluster.back(died).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_procedure_is_done_once_wherever_its_worker_dies_and_the_leader_with_it() {
    let mut cluster = Mortal::founded().await;
    let worker = Worker::new();
    let mut keeper = NodeKeeper::start(cluster.peers.store(), "w", worker.clone());
    let deaths =
        [CHECK, DELETE].into_iter().flat_map(|step| [false, true].map(|afterwards| Death { step, afterwards }));
    for (n, (death, both)) in deaths.flat_map(|death| [false, true].map(|both| (death, both))).enumerate() {
        let table = format!("t{n}");
        worker.dying.dies_at(death);
        let id = submit(&cluster.store, &table).await;
        worker.dying.died().await;
        // The leader dies over what it makes of that: it knows when the worker's stream is gone.
        if both {
            cluster.dies_at(Point::Uncommitted, death.step).await;
        }
        drop(keeper);
        let died = if both { Some(cluster.died().await) } else { None };
        keeper = NodeKeeper::start(cluster.peers.store(), "w", worker.clone());
        cluster.is_done_once(&id, &table, &worker, &format!("worker at {death:?}, and the leader: {both}")).await;
        if let Some(died) = died {
            cluster.back(died).await;
        }
    }
    drop(keeper);
}

/// Tables of the schemas that are dropped.
const TABLES: usize = 5;

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_is_dropped_and_had_back_once_wherever_the_leader_dies() {
    let mut cluster = Mortal::founded().await;
    let catalog = Catalog::new(Arc::new(cluster.peers.store()));
    // Nobody purges here: that the schema's purges wait is all the same to what is undone.
    let steps = ["new", DROP, PURGES, RESTORE];
    for (n, (step, point)) in steps.iter().flat_map(|step| Point::ALL.map(|point| (step, point))).enumerate() {
        let namespace: Namespace = format!("n{n}").parse().unwrap();
        catalog.create_namespace(&namespace, BTreeMap::new(), soon()).await.unwrap();
        let mut made = BTreeMap::new();
        for t in 0..TABLES {
            let ident = TableIdent::new(namespace.clone(), format!("t{t}")).unwrap();
            let (uuid, metadata_location) = (uuid::Uuid::new_v4(), format!("file:///{ident}.json"));
            let pointer = TablePointer { uuid, metadata_location, previous_location: None };
            catalog.create_table(&ident, &pointer, soon()).await.unwrap();
            made.insert(ident.name, pointer);
        }
        cluster.dies_at(point, step).await;
        let whose = format!("leader at {step} {point:?}");
        let id = catalog.submit_namespace_drop(&namespace, true, 0, soon()).await.unwrap();
        let gone = until(&cluster.store, &id, |record| record.step == PURGES).await.record;
        assert!(gone.scopes.is_empty() && !catalog.namespace_exists(&namespace, soon()).await.unwrap(), "{whose}");
        let all = calls::list(&cluster.store, ReadOptions::default(), soon()).await.unwrap().value;
        let children = all.iter().filter(|child| child.record.parent.as_ref() == Some(&id)).count();
        assert_eq!(children, TABLES, "{whose}");
        calls::cancel(&cluster.store, &id, soon()).await.unwrap();
        let died = cluster.died().await;
        let over = until(&cluster.store, &id, |record| record.state == State::Cancelled).await.record;
        let dropping: NamespaceDrop = over.data().unwrap();
        assert_eq!((dropping.dropped, dropping.restored), (TABLES as u64, TABLES as u64), "{whose}");
        for (name, pointer) in made {
            let ident = TableIdent::new(namespace.clone(), name).unwrap();
            let there = catalog.load_table(&ident, soon()).await.unwrap();
            assert_eq!(there.map(|there| there.value), Some(pointer), "{whose}");
        }
        let held = cluster.store.list_scopes("", "", 0, ReadOptions::default(), soon()).await.unwrap().value.items;
        assert!(held.is_empty(), "{whose}: {held:?}");
        cluster.back(died).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warehouse_is_purged_once_wherever_the_leader_dies() {
    let mut cluster = Mortal::founded().await;
    let catalog = Catalog::new(Arc::new(cluster.peers.store()));
    let worker = Worker::new();
    let _keeper = NodeKeeper::start(cluster.peers.store(), "w", worker.clone());
    let steps = [DROP, PURGES, REMOVE];
    for (n, (step, point)) in steps.iter().flat_map(|step| Point::ALL.map(|point| (step, point))).enumerate() {
        let (name, whose) = (format!("w{n}"), format!("leader at {step} {point:?}"));
        let profile = Profile::new(&format!("file:///{name}"), None).unwrap();
        catalog.create_warehouse(&name, &profile, soon()).await.unwrap();
        let own = Namespace::new([name.as_str()]).unwrap();
        let nested = Namespace::new([name.as_str(), "n"]).unwrap();
        catalog.create_namespace(&nested, BTreeMap::new(), soon()).await.unwrap();
        for namespace in [&own, &nested] {
            let ident = TableIdent::new(namespace.clone(), "t").unwrap();
            let (uuid, metadata_location) = (uuid::Uuid::new_v4(), format!("file:///{ident}.json"));
            let pointer = TablePointer { uuid, metadata_location, previous_location: None };
            catalog.create_table(&ident, &pointer, soon()).await.unwrap();
        }
        cluster.dies_at(point, step).await;
        let id = catalog.submit_warehouse_purge(&name, 0, soon()).await.unwrap();
        let died = cluster.died().await;
        let done = until(&cluster.store, &id, |record| record.state == State::Done).await.record;
        let purge: WarehousePurge = done.data().unwrap();
        assert_eq!((purge.dropped, purge.purges), (3, 2), "{whose}: two tables, and a namespace");
        for namespace in [&own, &nested] {
            assert_eq!(worker.deleted_of(&format!("{namespace}.t")), (0..FILES).collect(), "{whose}");
            assert!(!catalog.namespace_exists(namespace, soon()).await.unwrap(), "{whose}");
        }
        assert!(catalog.warehouses(soon()).await.unwrap().profiles.is_empty(), "{whose}");
        let held = cluster.store.list_scopes("", "", 0, ReadOptions::default(), soon()).await.unwrap().value.items;
        assert!(held.is_empty(), "{whose}: {held:?}");
        cluster.back(died).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upkeep_is_done_wherever_the_leader_dies() {
    let mut cluster = Mortal::founded().await;
    let _keeper = NodeKeeper::start(cluster.peers.store(), "w", Runner::new(true));
    let steps = ["new", PLACE, RUN];
    for (n, (step, point)) in steps.iter().flat_map(|step| Point::ALL.map(|point| (step, point))).enumerate() {
        cluster.dies_at(point, step).await;
        let (id, what) = (format!("upkeep-{n}"), What::ALL[n % What::ALL.len()]);
        submit_upkeep(&cluster.store, &id, what).await;
        let died = cluster.died().await;
        let done = until(&cluster.store, &id, |record| record.state == State::Done).await.record;
        assert_eq!(done.data::<TableUpkeep>().unwrap().count, Some(COUNT), "leader at {step} {point:?}");
        cluster.back(died).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upkeep_is_done_wherever_its_worker_dies_and_the_leader_with_it() {
    let mut cluster = Mortal::founded().await;
    let deaths = [false, true].into_iter().flat_map(|afterwards| [false, true].map(|both| (afterwards, both)));
    for (what, (afterwards, both)) in What::ALL.into_iter().zip(deaths) {
        let whose = format!("{what}, worker afterwards: {afterwards}, and the leader: {both}");
        let dies = Runner::new(true);
        let keeper = NodeKeeper::start(cluster.peers.store(), "w", dies.clone());
        dies.dying.dies_at(Death { step: RUN, afterwards });
        submit_upkeep(&cluster.store, what.as_str(), what).await;
        dies.dying.died().await;
        // The leader dies over what it makes of that.
        if both {
            cluster.dies_at(Point::Uncommitted, RUN).await;
        }
        drop(keeper);
        let died = if both { Some(cluster.died().await) } else { None };
        let runs = Runner::new(true);
        let keeper = NodeKeeper::start(cluster.peers.store(), "x", runs.clone());
        let done = until(&cluster.store, what.as_str(), |record| record.state == State::Done).await.record;
        let upkeep: TableUpkeep = done.data().unwrap();
        assert_eq!((upkeep.node.as_deref(), upkeep.count), (Some("x"), Some(COUNT)), "{whose}");
        if let Some(died) = died {
            cluster.back(died).await;
        }
        keeper.leave(PATIENCE).await;
    }
}

/// Waits until each of two workers has its half of the shards, and follows the other's: there is nothing left to do about them.
async fn placed(store: &RemoteStore) -> Vec<ShardStatus> {
    eventually("the shards to be placed", async || {
        store.balance_shards(false, soon()).await.ok()?;
        let listing = store.shards(soon()).await.ok()?.value;
        let (count, of_a) = (listing.count as usize, |shard: &&ShardStatus| shard.route.node == "a");
        let is_settled = |shard: &ShardStatus| shard.remaining.is_some() && shard.route.followers.len() == 1;
        let all = count > 0 && listing.shards.len() == count && listing.shards.iter().all(is_settled);
        (all && listing.shards.iter().filter(of_a).count() == count / 2).then_some(listing.shards)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_is_given_to_another_worker_once_wherever_the_leader_dies() {
    let mut cluster = Mortal::founded().await;
    let store = cluster.store.clone();
    let [of_a, of_b] = [Worker::new(), Worker::new()];
    let worker = |peers: &Processes, name, worker: &Arc<Worker>| NodeKeeper::start(peers.store(), name, worker.clone());
    let (_a, mut b) = (worker(&cluster.peers, "a", &of_a), worker(&cluster.peers, "b", &of_b));
    let version = async |shard: u32| {
        let read = store.get(&shards::key(shard), ReadOptions::default(), soon()).await.unwrap();
        read.value.unwrap().version
    };
    // It is asked for, and surrounded by what has the target warmed and the source leave.
    for (step, point) in
        [(WARM, Point::Begin), (ROUTE, Point::Begin), (ROUTE, Point::Committed), (LEAVE, Point::Committed)]
    {
        let shard = placed(&store).await.swap_remove(0);
        let (to, before) = (shard.route.followers[0].clone(), version(shard.shard).await);
        let target = if to == "a" { &of_a } else { &of_b };
        target.warmed.lock().unwrap().clear();
        cluster.dies_at(point, step).await;
        // A worker comes to the next leader a moment later.
        let moves = async || store.move_shard(shard.shard, &to, false, soon()).await.ok();
        let moved = eventually("the shard to be moved", moves).await;
        let died = cluster.died().await;
        let whose = format!("leader at {step} {point:?}");
        assert_eq!((moved.to, version(shard.shard).await), (to, before + 1), "moved once, {whose}");
        assert!(target.warmed.lock().unwrap().contains(&shard.shard), "{whose}");
        cluster.back(died).await;
    }
    // The one that is given it dies as it makes itself ready, or the one that had it as it ends what it does; and the leader over it, or not.
    let deaths = [(WARM_SHARD, "b", Point::Begin, ROUTE), (LEAVE_SHARD, "a", Point::Committed, LEAVE)];
    for ((kind, to, point, step), both) in deaths.into_iter().flat_map(|death| [false, true].map(|both| (death, both)))
    {
        let whose = format!("worker at {kind}, and the leader: {both}");
        let shards = placed(&store).await;
        let shard = shards.iter().find(|shard| shard.route.node != to).unwrap().shard;
        let before = version(shard).await;
        of_b.dying.dies_at(Death { step: kind, afterwards: false });
        if both {
            cluster.dies_at(point, step).await;
        }
        let dies = async {
            of_b.dying.died().await;
            drop(b);
            if !both {
                return None;
            }
            let died = cluster.died().await;
            Some((died, worker(&cluster.peers, "b", &of_b)))
        };
        let moves = async || store.move_shard(shard, to, false, soon()).await.ok();
        let (moved, after) = tokio::join!(eventually("the shard to be moved", moves), dies);
        assert_eq!((moved.to.as_str(), version(shard).await), (to, before + 1), "moved once, {whose}");
        b = match after {
            Some((died, again)) => {
                cluster.back(died).await;
                again
            }
            None => worker(&cluster.peers, "b", &of_b),
        };
    }
    // Its worker is gone.
    for point in [Point::Begin, Point::Committed] {
        placed(&store).await;
        cluster.dies_at(point, ROUTE).await;
        b.leave(PATIENCE).await;
        let died = cluster.died().await;
        eventually("the other worker to have all", async || {
            let shards = store.shards(soon()).await.ok()?.value.shards;
            shards.iter().all(|shard| shard.route.node == "a" && shard.remaining.is_some()).then_some(())
        })
        .await;
        cluster.back(died).await;
        b = worker(&cluster.peers, "b", &of_b);
    }
}
