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
use lake_client::procedures::purge::{CHECK, DELETE, Purge, RETAIN};
use lake_client::procedures::purge_warehouse::{REMOVE, WarehousePurge};
use lake_client::procedures::upkeep::{PLACE, RUN, TableUpkeep, What};
use lake_client::procedures::{Record, State, calls};
use lake_client::remote::RemoteStore;
use lake_client::remote::node::NodeKeeper;
use lake_client::shards::{self, LEAVE_SHARD, ShardStatus, WARM_SHARD};
use lake_client::store::{MetaStore, ReadOptions};
use lake_client::warehouse::Profile;
use tokio::sync::{Mutex, MutexGuard};

use super::failpoints::{LEAVE, Point, ROUTE, VARIABLE, WARM};
use crate::support::processes::Processes;
use crate::support::purging::{
    COUNT, Death, Dying, FILES, Runner, Worker, deleted, soon, submit, submit_upkeep, until,
};
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
        self.dies_with(1, point, step).await;
    }

    /// It is to die once so many procedures stand at this point.
    async fn dies_with(&self, procedures: usize, point: Point, step: &str) {
        self.peers.leader().await;
        std::fs::write(&self.die_at, format!("{}\n{procedures}", point.of(step))).unwrap();
    }

    /// Waits until a worker has died with so many instructions of a step in hand, of which `keeper` is dropped; and with `both` the leader
    /// over what it makes of that, which it does when the worker's stream is gone. Says which peer has died.
    async fn worker_died(
        &mut self,
        dying: &Dying,
        keeper: NodeKeeper,
        (instructions, step): (usize, &str),
        both: bool,
    ) -> Option<u64> {
        dying.died().await;
        if both {
            self.dies_with(instructions, Point::Uncommitted, step).await;
        }
        drop(keeper);
        if both { Some(self.died().await) } else { None }
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
        let died = cluster.worker_died(&worker.dying, keeper, (1, death.step), both).await;
        keeper = NodeKeeper::start(cluster.peers.store(), "w", worker.clone());
        cluster.is_done_once(&id, &table, &worker, &format!("worker at {death:?}, and the leader: {both}")).await;
        if let Some(died) = died {
            cluster.back(died).await;
        }
    }
    // The same with the purges of all tables of a schema and of a warehouse in hand, for which these two wait.
    let catalog = Catalog::new(Arc::new(cluster.peers.store()));
    let deaths = [(CHECK, false), (DELETE, true)].map(|(step, afterwards)| Death { step, afterwards });
    for (n, (death, both)) in deaths.into_iter().flat_map(|death| [false, true].map(|both| (death, both))).enumerate() {
        let whose = format!("worker at {death:?}, and the leader: {both}");
        let namespace: Namespace = format!("n{n}").parse().unwrap();
        catalog.create_namespace(&namespace, BTreeMap::new(), soon()).await.unwrap();
        for name in ["a", "b"] {
            create_table(&catalog, &namespace, name).await;
        }
        let warehouse = format!("w{n}");
        create_warehouse(&catalog, &warehouse).await;
        worker.dying.dies_with(death, 4);
        let schema = catalog.submit_namespace_drop(&namespace, true, 0, soon()).await.unwrap();
        let warehouse = catalog.submit_warehouse_purge(&warehouse, 0, soon()).await.unwrap();
        let died = cluster.worker_died(&worker.dying, keeper, (4, death.step), both).await;
        keeper = NodeKeeper::start(cluster.peers.store(), "w", worker.clone());
        let is_done = |record: &Record| record.state == State::Done;
        let dropped: NamespaceDrop = until(&cluster.store, &schema, is_done).await.record.data().unwrap();
        let purged: WarehousePurge = until(&cluster.store, &warehouse, is_done).await.record.data().unwrap();
        assert_eq!((dropped.dropped, dropped.purges, purged.dropped, purged.purges), (2, 2, 3, 2), "{whose}");
        let all = calls::list(&cluster.store, ReadOptions::default(), soon()).await.unwrap().value;
        let children = all
            .iter()
            .filter(|child| child.record.parent.as_ref().is_some_and(|of| [&schema, &warehouse].contains(&of)));
        let children: Vec<_> = children.collect();
        assert_eq!(children.len(), 4, "{whose}");
        for child in children {
            let purge: Purge = child.record.data().unwrap();
            cluster.is_done_once(&child.id, &purge.table, &worker, &whose).await;
        }
        if let Some(died) = died {
            cluster.back(died).await;
        }
    }
    drop(keeper);
}

/// A table without files.
async fn create_table(catalog: &Catalog, namespace: &Namespace, name: &str) -> (String, TablePointer) {
    let ident = TableIdent::new(namespace.clone(), name).unwrap();
    let (uuid, metadata_location) = (uuid::Uuid::new_v4(), format!("file:///{ident}.json"));
    let pointer = TablePointer { uuid, metadata_location, previous_location: None };
    catalog.create_table(&ident, &pointer, soon()).await.unwrap();
    (ident.name, pointer)
}

/// A warehouse with a table, and another one in a namespace that is nested in its own.
async fn create_warehouse(catalog: &Catalog, name: &str) -> [Namespace; 2] {
    let profile = Profile::new(&format!("file:///{name}"), None).unwrap();
    catalog.create_warehouse(name, &profile, soon()).await.unwrap();
    let namespaces = [Namespace::new([name]), Namespace::new([name, "n"])].map(Result::unwrap);
    catalog.create_namespace(&namespaces[1], BTreeMap::new(), soon()).await.unwrap();
    for namespace in &namespaces {
        create_table(catalog, namespace, "t").await;
    }
    namespaces
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
            made.extend([create_table(&catalog, &namespace, &format!("t{t}")).await]);
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
        let namespaces = create_warehouse(&catalog, &name).await;
        cluster.dies_at(point, step).await;
        let id = catalog.submit_warehouse_purge(&name, 0, soon()).await.unwrap();
        let died = cluster.died().await;
        let done = until(&cluster.store, &id, |record| record.state == State::Done).await.record;
        let purge: WarehousePurge = done.data().unwrap();
        assert_eq!((purge.dropped, purge.purges), (3, 2), "{whose}: two tables, and a namespace");
        for namespace in &namespaces {
            assert_eq!(worker.deleted_of(&format!("{namespace}.t")), (0..FILES).collect(), "{whose}");
            assert!(!catalog.namespace_exists(namespace, soon()).await.unwrap(), "{whose}");
        }
        assert!(catalog.warehouses(soon()).await.unwrap().profiles.is_empty(), "{whose}");
        let held = cluster.store.list_scopes("", "", 0, ReadOptions::default(), soon()).await.unwrap().value.items;
        assert!(held.is_empty(), "{whose}: {held:?}");
        cluster.back(died).await;
    }
}

/// Has each kind of upkeep done, by procedures of this round.
async fn submit_each_upkeep(store: &RemoteStore, round: usize) {
    for what in What::ALL {
        submit_upkeep(store, &upkeep_id(round, what), what).await;
    }
}

fn upkeep_id(round: usize, what: What) -> String {
    format!("{what}-{round}")
}

/// Waits until that is done.
async fn each_upkeep_is_done(store: &RemoteStore, round: usize, whose: &str) -> Vec<TableUpkeep> {
    let mut all = Vec::new();
    for what in What::ALL {
        let done = until(store, &upkeep_id(round, what), |record| record.state == State::Done).await.record;
        let upkeep: TableUpkeep = done.data().unwrap();
        assert_eq!((upkeep.what, upkeep.count), (what, Some(COUNT)), "{whose}");
        all.push(upkeep);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn upkeep_is_done_wherever_the_leader_dies() {
    let mut cluster = Mortal::founded().await;
    let _keeper = NodeKeeper::start(cluster.peers.store(), "w", Runner::new(true));
    let steps = ["new", PLACE, RUN];
    for (n, (step, point)) in steps.iter().flat_map(|step| Point::ALL.map(|point| (step, point))).enumerate() {
        // One of each kind stands there.
        cluster.dies_with(What::ALL.len(), point, step).await;
        submit_each_upkeep(&cluster.store, n).await;
        let died = cluster.died().await;
        each_upkeep_is_done(&cluster.store, n, &format!("leader at {step} {point:?}")).await;
        cluster.back(died).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upkeep_is_done_wherever_its_worker_dies_and_the_leader_with_it() {
    let mut cluster = Mortal::founded().await;
    let deaths = [false, true].into_iter().flat_map(|afterwards| [false, true].map(|both| (afterwards, both)));
    for (n, (afterwards, both)) in deaths.enumerate() {
        let whose = format!("worker afterwards: {afterwards}, and the leader: {both}");
        let dies = Runner::new(true);
        let keeper = NodeKeeper::start(cluster.peers.store(), "w", dies.clone());
        // With one of each kind in hand.
        dies.dying.dies_with(Death { step: RUN, afterwards }, What::ALL.len());
        submit_each_upkeep(&cluster.store, n).await;
        let died = cluster.worker_died(&dies.dying, keeper, (What::ALL.len(), RUN), both).await;
        let keeper = NodeKeeper::start(cluster.peers.store(), "x", Runner::new(true));
        let done = each_upkeep_is_done(&cluster.store, n, &whose).await;
        assert!(done.iter().all(|upkeep| upkeep.node.as_deref() == Some("x")), "{whose}: {done:?}");
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
