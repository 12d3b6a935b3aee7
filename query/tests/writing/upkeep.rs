//! Upkeep: what tables ask for, of whoever has them, under a guard.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use async_trait::async_trait;
use lake_client::memory::MemoryStore;
use lake_client::shards::{LEAVE_SHARD, MAX_SHARDS, Moving, SETTINGS, Settings, WARM_SHARD, WorkerChore, key};
use lake_client::store::{Committed, Error, SharedStore, Token};
use lake_proto::kv::{Compare, Op, Txn};
use lake_query::chores::Chores;
use lake_query::upkeep::{Claim, FENCE_NOTE, Guard, Round, SHARD_NOTE, Upkeep, WORKER_NOTE};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::common::store::{Through, Way};
use crate::common::*;
use crate::table::metadata;

/// Has these tables, as long as a route is as it was.
#[derive(Debug, Default)]
struct Has {
    tables: HashSet<Uuid>,
    /// And may be given these.
    follows: HashSet<Uuid>,
    guard: Mutex<Vec<Compare>>,
    /// What was said of chores last, and of which.
    said: Mutex<Option<WorkerChore>>,
}

impl Has {
    /// Of which procedure the last chore was, once it has ended, and whether its guard held.
    async fn last(&self) -> (String, bool) {
        let said = || self.said.lock().unwrap().clone();
        until("the chore to end", async || said().is_some_and(|chore| chore.ended_ms.is_some())).await;
        let chore = said().unwrap();
        assert_eq!(WorkerChore::of_line(&format!("12:00 DEBUG {}\n", chore.to_line())).as_ref(), Some(&chore));
        assert_eq!((chore.worker.as_str(), chore.shard, chore.fence), ("w", 0, 7));
        assert!(Some(chore.began_ms) <= chore.ended_ms && chore.acted_ms <= chore.ended_ms, "{chore:?}");
        assert!(chore.acted_ms.is_none_or(|acted| chore.began_ms <= acted), "{chore:?}");
        (chore.what, chore.acted_ms.is_some())
    }
}

#[async_trait]
impl Claim for Has {
    fn guard(&self, table: Uuid) -> Option<Guard> {
        let compares = self.tables.contains(&table).then(|| self.guard.lock().unwrap().clone())?;
        let notes = [(FENCE_NOTE, "7"), (SHARD_NOTE, "0"), (WORKER_NOTE, "w")];
        Some(Guard { compares, notes: BTreeMap::from(notes.map(|(name, note)| (name, note.to_owned()))) })
    }

    fn follows(&self, table: Uuid) -> bool {
        self.follows.contains(&table)
    }

    fn is_any(&self) -> bool {
        true
    }

    async fn lost(&self, _: Uuid) {
        std::future::pending().await
    }

    fn says(&self, chore: &WorkerChore) {
        *self.said.lock().unwrap() = Some(chore.clone());
    }
}

/// Holds the next swap of a pointer back.
#[derive(Debug)]
struct Holds {
    next: AtomicBool,
    held: Semaphore,
    released: Semaphore,
}

#[async_trait]
impl Way for Holds {
    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let of_table = |op: &Op| op.is_write() && op.key().starts_with("/lake/table/");
        if txn.then.iter().any(of_table) && self.next.swap(false, Ordering::SeqCst) {
            self.held.add_permits(1);
            self.released.acquire().await.unwrap().forget();
        }
        store.commit(txn, by).await
    }
}

/// Has a table until it is told that it has not, and notes what is done to it.
#[derive(Debug)]
struct UntilTold {
    table: Uuid,
    told: Semaphore,
    at: Mutex<i32>,
}

#[async_trait]
impl Claim for UntilTold {
    fn guard(&self, table: Uuid) -> Option<Guard> {
        (table == self.table).then(Guard::default)
    }

    fn is_any(&self) -> bool {
        true
    }

    async fn lost(&self, _: Uuid) {
        self.told.acquire().await.unwrap().forget();
    }

    fn begins(&self, _: Uuid) {
        *self.at.lock().unwrap() += 1;
    }

    fn ended(&self, _: Uuid) {
        *self.at.lock().unwrap() -= 1;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_counts_as_work_after_its_statement_was_given_up() {
    let way = Holds { next: AtomicBool::new(false), held: Semaphore::new(0), released: Semaphore::new(0) };
    let store = Arc::new(Through { store: Arc::new(MemoryStore::new()), way });
    let cluster = Cluster::over(store.clone(), 1, |options| options).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    run(&client, "ALTER TABLE t SET TBLPROPERTIES ('lake.compaction.enabled' = 'true')").await;
    for n in 0..6 {
        run(&client, &format!("INSERT INTO t VALUES ({n})")).await;
    }
    let table = metadata(&cluster, "t").await.uuid();
    let claim = Arc::new(UntilTold { table, told: Semaphore::new(0), at: Mutex::new(0) });
    let mut upkeep = Upkeep::new(cluster.nodes[0].engine().clone(), claim.clone());
    store.next.store(true, Ordering::SeqCst);
    let round = upkeep.round();
    let given_up = async {
        store.held.acquire().await.unwrap().forget();
        claim.told.add_permits(1);
    };
    let (round, ()) = tokio::time::timeout(TIMEOUT.unwrap(), async { tokio::join!(round, given_up) }).await.unwrap();
    assert_eq!(round.unwrap(), Round { tables: 1, ..Round::default() });
    assert_eq!(*claim.at.lock().unwrap(), 1, "its commit goes on");
    store.released.add_permits(1);
    until("the commit to end", async || *claim.at.lock().unwrap() == 0).await;
    // What was done to the end has ended with its round.
    let files = number(&client, "SELECT count(*) FROM \"t$files\"").await;
    assert_eq!(files, 1, "it was made: nobody else had the shard");
    run(&client, "INSERT INTO t VALUES (6)").await;
    assert_eq!(upkeep.round().await.unwrap().tables, 1);
    until("nothing to be done", async || *claim.at.lock().unwrap() == 0).await;
}

/// Moves the shard; says what guards its new route.
async fn moved(cluster: &Cluster, token: Option<Token>) -> (Token, Vec<Compare>) {
    let put = cluster.store.cas(&key(0), token, "a route".into(), std::time::Instant::now() + TIMEOUT.unwrap()).await;
    let result = put.unwrap().result;
    assert!(result.succeeded);
    (Token::at(result.revision), vec![Compare::mod_revision(key(0), result.revision)])
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_get_what_they_ask_for_from_whoever_has_them() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let files = async |table: &str| number(&client, &format!("SELECT count(*) FROM \"{table}$files\"")).await;
    let fill = async |table: &str| {
        for n in 0..6 {
            run(&client, &format!("INSERT INTO \"{table}\" VALUES ({n})")).await;
        }
    };
    // One with an odd name, one that asks for nothing, and one that is another's.
    for (table, asks) in [("It's", true), ("silent", false), ("other", true)] {
        run(&client, &format!("CREATE TABLE \"{table}\" (x BIGINT)")).await;
        if asks {
            let property = "SET TBLPROPERTIES ('lake.compaction.enabled' = 'true')";
            run(&client, &format!("ALTER TABLE \"{table}\" {property}")).await;
        }
        fill(table).await;
    }
    let mut tables = HashSet::new();
    for table in ["It's", "silent"] {
        tables.insert(metadata(&cluster, table).await.uuid());
    }
    let (route, guard) = moved(&cluster, None).await;
    let claim = Arc::new(Has { tables, guard: Mutex::new(guard), ..Has::default() });
    let mut upkeep = Upkeep::new(cluster.nodes[0].engine().clone(), claim.clone());
    assert_eq!(upkeep.round().await.unwrap(), Round { tables: 2, changed: 1, failed: 0, ..Round::default() });
    assert_eq!(files("It's").await, 1);
    assert_eq!(claim.last().await, ("rewrite_data_files".to_owned(), true));
    // The snapshot of the upkeep says its fence, and no other does.
    let fenced = "SELECT count(*) FROM \"It's$snapshots\" WHERE summary['lake.fence']";
    let by_operation = async |operation: &str, says: &str| {
        number(&client, &format!("{fenced} {says} AND operation = '{operation}'")).await
    };
    assert_eq!((by_operation("replace", "= '7'").await, by_operation("append", "IS NULL").await), (1, 6));
    assert_eq!((files("silent").await, files("other").await), (6, 6));
    assert_eq!(
        upkeep.round().await.unwrap(),
        Round { tables: 2, changed: 0, failed: 0, ..Round::default() },
        "there is nothing to do"
    );

    // The shard is moved, which its worker does not know yet: nothing of what it does is committed.
    fill("It's").await;
    let before = metadata(&cluster, "It's").await.current_snapshot_id();
    let (_, guard) = moved(&cluster, Some(route)).await;
    assert_eq!(upkeep.round().await.unwrap(), Round { tables: 2, changed: 0, failed: 0, ..Round::default() });
    assert_eq!(metadata(&cluster, "It's").await.current_snapshot_id(), before);
    assert!(!claim.last().await.1, "its log does not say that the fence held");
    // Under the new fence it is.
    *claim.guard.lock().unwrap() = guard;
    assert_eq!(upkeep.round().await.unwrap(), Round { tables: 2, changed: 1, failed: 0, ..Round::default() });
    assert_eq!(files("It's").await, 1);
    assert_eq!(number(&client, "SELECT sum(x) FROM \"It's\"").await, 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_come_soon_is_in_the_cache() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    for table in ["one", "empty", "other"] {
        run(&client, &format!("CREATE TABLE {table} (x BIGINT)")).await;
    }
    run(&client, "INSERT INTO one VALUES (1)").await;
    let follows = followed(&cluster).await;
    let fresh = Cluster::over(cluster.store.clone(), 1, |options| options).await;
    let claim = Has { follows, ..Has::default() };
    let mut upkeep = Upkeep::new(fresh.nodes[0].engine().clone(), Arc::new(claim));
    for _ in 0..2 {
        assert_eq!(upkeep.round().await.unwrap(), Round { warmed: 2, ..Round::default() });
    }
    // One that is told that the shard is about to be its own, which all tables are in.
    let settings = Settings { shards: 1, maintenance: false };
    let put = cluster.store.cas(SETTINGS, None, settings.to_bytes(), std::time::Instant::now() + TIMEOUT.unwrap());
    assert!(put.await.unwrap().result.succeeded);
    let told = Cluster::over(cluster.store.clone(), 1, |options| options).await;
    let chores = Chores::new(told.nodes[0].engine().clone());
    let moving = |shard| Moving { shard, fence: 0 }.to_bytes();
    // Its copy of the routes comes by a watch.
    until("the tables to be read", async || chores.carry_out(WARM_SHARD, &moving(0)).await == Some(Ok("3".into())))
        .await;
    assert_eq!(chores.carry_out(WARM_SHARD, &moving(1)).await, Some(Ok("0".into())), "it has no tables");
    assert_eq!(chores.carry_out(LEAVE_SHARD, &moving(0)).await, Some(Ok(bytes::Bytes::new())));
    assert!(chores.carry_out(LEAVE_SHARD, &moving(MAX_SHARDS)).await.unwrap().unwrap_err().contains("no shard 1024"));
    // Nothing of it is asked for again.
    for file in cluster.files(".avro").into_iter().chain(cluster.files(".parquet")) {
        std::fs::remove_file(file).unwrap();
    }
    assert_eq!(upkeep.round().await.unwrap(), Round { warmed: 2, ..Round::default() }, "from the cache");
    assert_eq!(chores.carry_out(WARM_SHARD, &moving(0)).await, Some(Ok("3".into())), "from the cache");
    let another = Cluster::over(cluster.store.clone(), 1, |options| options).await;
    let claim = Has { follows: followed(&cluster).await, ..Has::default() };
    let mut upkeep = Upkeep::new(another.nodes[0].engine().clone(), Arc::new(claim));
    assert_eq!(upkeep.round().await.unwrap(), Round { warmed: 1, ..Round::default() });
}

/// Every table but the one that nobody follows.
async fn followed(cluster: &Cluster) -> HashSet<Uuid> {
    let mut follows = HashSet::new();
    for table in ["one", "empty"] {
        follows.insert(metadata(cluster, table).await.uuid());
    }
    follows
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_removed_once_a_day_where_a_table_asks_for_it() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let data = cluster.files(".parquet").pop().unwrap();
    let orphan = |name: &str| {
        let path = data.with_file_name(name);
        std::fs::write(&path, "nobody's").unwrap();
        let old = std::time::SystemTime::now() - std::time::Duration::from_secs(4 * 86_400);
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        path
    };
    let first = orphan("first.parquet");
    let uuid = metadata(&cluster, "t").await.uuid();
    let claim = Arc::new(Has { tables: HashSet::from([uuid]), ..Has::default() });
    let mut upkeep = Upkeep::new(cluster.nodes[0].engine().clone(), claim.clone());
    assert_eq!(upkeep.round().await.unwrap(), Round { tables: 1, ..Round::default() });
    assert!(first.exists(), "it does not ask for that");
    run(&client, "ALTER TABLE t SET TBLPROPERTIES ('lake.remove-orphan-files.enabled' = 'true')").await;
    assert_eq!(upkeep.round().await.unwrap(), Round { tables: 1, changed: 1, ..Round::default() });
    assert!(!first.exists() && data.exists());
    assert_eq!(claim.last().await, ("remove_orphan_files".to_owned(), true));
    let second = orphan("second.parquet");
    assert_eq!(upkeep.round().await.unwrap(), Round { tables: 1, ..Round::default() });
    assert!(second.exists(), "once a day");
    // Another worker had the shard, and it was moved, which that one does not know yet.
    let (route, old) = moved(&cluster, None).await;
    let (_, new) = moved(&cluster, Some(route)).await;
    for (guard, changed) in [(old, 0), (new, 1)] {
        let claim = Arc::new(Has { tables: HashSet::from([uuid]), guard: Mutex::new(guard), ..Has::default() });
        let mut upkeep = Upkeep::new(cluster.nodes[0].engine().clone(), claim.clone());
        assert_eq!(upkeep.round().await.unwrap(), Round { tables: 1, changed, ..Round::default() });
        assert_eq!(second.exists(), changed == 0, "it is removed under the new fence");
        assert_eq!(claim.last().await.1, changed == 1, "what is begun under the old one changes nothing");
    }
    assert_eq!(numbers(&client, "SELECT x FROM t").await, [1]);
}
