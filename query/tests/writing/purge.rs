//! What the purge of a dropped table deletes, as workers do it part by part; and what it leaves.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::catalog::{Catalog, TableIdent, TablePointer};
use lake_client::memory::MemoryStore;
use lake_client::procedures::purge::{Answer, CHECK, DELETE, PURGE_TABLE, Purge, Task, of_drop};
use lake_client::procedures::{Procedure, Record, State, calls, id_of, kept};
use lake_client::store::{Applied, Capabilities, Committed, Error, SharedStore};
use lake_proto::kv::{Condition, Op, Txn};
use lake_query::Kind;
use lake_query::chores::{Chores, purge};
use lake_query::janitor::purges::{Purged, round};
use lake_query::upkeep::{Claim, Guard};

use crate::common::store::{Meanwhile, Through, Way, unavailable};
use crate::common::*;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

async fn procedure(cluster: &Cluster, subject: &str) -> Procedure {
    let all = calls::list(cluster.store.as_ref(), Default::default(), soon()).await.unwrap().value;
    let is = |p: &Procedure| p.record.subject == subject && p.record.state == State::Active;
    all.into_iter().find(is).unwrap_or_else(|| panic!("nothing is done with {subject}"))
}

async fn change(cluster: &Cluster, procedure: Procedure, record: Record) -> Procedure {
    let txn = record.change(&procedure.id, procedure.mod_revision);
    let committed = cluster.store.commit(txn, soon()).await.unwrap().result;
    assert!(committed.succeeded, "{committed:?}");
    Procedure { mod_revision: committed.revision, record, ..procedure }
}

/// Does what the leader does with the purge of a table, with parts as small as can be: each is done by one node, whose
/// answer is lost, and then by another one. Gives what was kept in the end, and how many parts there were; or what the
/// purge was stopped by.
async fn purged(cluster: &Cluster, table: &str) -> Result<(Purge, usize), Answer> {
    let mut procedure = procedure(cluster, table).await;
    let record = Record { step: CHECK.to_owned(), ..procedure.record.clone() };
    procedure = change(cluster, procedure, record).await;
    for parts in 1.. {
        let record = procedure.record.clone();
        let task = Task { id: procedure.id.clone(), step: record.step.clone(), purge: record.data().unwrap() };
        let nodes = cluster.nodes.iter().cycle().skip(parts).take(2);
        let mut answer = Answer::Over;
        for node in nodes {
            answer = purge::part(node.engine().tables(), task.clone(), Instant::now()).await.unwrap();
        }
        let (step, purge) = match answer {
            Answer::Part(purge) => (record.step.clone(), purge),
            Answer::Done(purge) if record.step == CHECK => (DELETE.to_owned(), purge),
            Answer::Done(purge) => return Ok((*purge, parts)),
            other => return Err(other),
        };
        let next = Record { step, data: kept(&purge), ..record };
        procedure = change(cluster, procedure, next).await;
    }
    unreachable!()
}

/// Where the files of a table are.
fn home(cluster: &Cluster, table: &str) -> PathBuf {
    let begins = format!("/{table}-");
    let metadata = cluster.files(".metadata.json");
    let of = metadata.iter().find(|path| path.to_string_lossy().contains(&begins));
    of.and_then(|path| path.ancestors().nth(2)).unwrap_or_else(|| panic!("no {table} in {metadata:?}")).to_owned()
}

fn all_files(cluster: &Cluster) -> BTreeSet<PathBuf> {
    cluster.files("").into_iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn all_files_of_the_table_are_deleted_and_none_else() {
    let cluster = Cluster::start(2).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE other AS SELECT * FROM (VALUES (1), (2)) v(x)").await;
    run(&client, "CREATE TABLE t (k BIGINT, x BIGINT) PARTITIONED BY (k) WITH ('write.delete.mode' = 'merge-on-read')")
        .await;
    for n in 0..4 {
        run(&client, &format!("INSERT INTO t SELECT value % 20, value + {n} FROM generate_series(1, 200)")).await;
    }
    run(&client, "DELETE FROM t WHERE x % 7 = 0").await;
    run(&client, "CALL system.rewrite_manifests('t')").await;
    run(&client, "UPDATE t SET x = 0 WHERE k = 3").await;
    let before = all_files(&cluster);
    let location = home(&cluster, "t");
    assert!(cluster.files(".parquet").iter().filter(|file| file.starts_with(&location)).count() > 80);
    run(&client, "DROP TABLE t PURGE").await;
    assert_eq!(refused(&client, "SELECT * FROM t").await.kind, Kind::NotFound, "it leaves the catalog at once");
    assert_eq!(all_files(&cluster), before, "and its files stay for a while");

    // Its name is another's meanwhile; and something lies in its location that it knows nothing of.
    run(&client, "CREATE TABLE t AS SELECT 7 AS x").await;
    let theirs = location.join("data/notes.txt");
    std::fs::write(&theirs, "mine").unwrap();
    let expected: BTreeSet<PathBuf> =
        all_files(&cluster).into_iter().filter(|file| !file.starts_with(&location) || *file == theirs).collect();
    let (purge, parts) = purged(&cluster, "default.t").await.unwrap();
    assert_eq!(all_files(&cluster), expected);
    assert!(parts > 5 && purge.outside == 0 && purge.kept.is_empty(), "{parts} {purge:?}");
    assert!(purge.deleted as usize >= before.iter().filter(|file| file.starts_with(&location)).count(), "{purge:?}");
    // Directories that are left empty go, and no other.
    assert!(theirs.exists() && !location.join("metadata").exists());
    assert_eq!(std::fs::read_dir(location.join("data")).unwrap().count(), 1);
    assert_eq!(numbers(&client, "SELECT x FROM t").await, [7]);
    assert_eq!(numbers(&client, "SELECT x FROM other ORDER BY x").await, [1, 2]);
}

/// Another drops the table in whose drop a purge is submitted: that is lost on its way, and nobody can say so.
#[derive(Debug)]
struct Overtaken;

#[async_trait]
impl Way for Overtaken {
    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let is_purge = |op: &Op| matches!(op, Op::Put { key, .. } if key.starts_with("/lake/proc/"));
        if !txn.then.iter().any(is_purge) {
            return store.commit(txn, by).await;
        }
        for compare in txn.when {
            if let Condition::ModRevision(revision) = compare.condition
                && compare.key.starts_with("/lake/table/")
            {
                store.commit(Txn::cas_delete(compare.key, revision), by).await?;
            }
        }
        Err(unavailable(Applied::Unknown))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drop_of_another_is_not_taken_for_one_with_a_purge() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let way = Arc::new(Through { store: store.clone(), way: Overtaken });
    let mut cluster = Cluster::over(way, 1, |options| options).await;
    cluster.store = store;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let error = refused(&client, "DROP TABLE t PURGE").await;
    assert!(error.kind == Kind::NotFound && error.message.contains("its files stay"), "{error}");
    assert!(calls::list(cluster.store.as_ref(), Default::default(), soon()).await.unwrap().value.is_empty());
}

/// Changes are applied and not answered, and others have gone on before it is looked for them: the table `made` has another name, and
/// another table its name; a purge has been taken on by the leader.
#[derive(Debug)]
struct GoneOn;

#[async_trait]
impl Way for GoneOn {
    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let put = |of: &str| {
            txn.then.iter().find_map(|op| match op {
                Op::Put { key, value, .. } if key.starts_with(of) => Some((key.clone(), value.clone())),
                _ => None,
            })
        };
        let (made, purge) = (put("/lake/table/default/made"), put("/lake/proc/"));
        let first = store.commit(txn.clone(), by).await?;
        if made.is_some() {
            let catalog = Catalog::new(store.clone());
            let [from, to] = ["made", "renamed"].map(|name| TableIdent::new("default".parse().unwrap(), name).unwrap());
            let made = catalog.rename_table(&from, &to, by).await.unwrap();
            let other = TablePointer { uuid: uuid::Uuid::new_v4(), ..made.value };
            catalog.create_table(&from, &other, by).await.unwrap();
            return Err(unavailable(Applied::Unknown));
        }
        let Some((key, value)) = purge else { return Ok(first) };
        let record: Record = serde_json::from_slice(&value).unwrap();
        let taken_on = Record { accepted_ms: Some(1), ..record };
        store.commit(taken_on.change(id_of(&key).unwrap(), first.result.revision), by).await?;
        Ok(Committed { resent: true, ..store.commit(txn, by).await? })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_have_gone_on_with_was_done_nevertheless() {
    let way = Arc::new(Through { store: Arc::new(MemoryStore::new()) as SharedStore, way: GoneOn });
    let cluster = Cluster::over(way, 1, |options| options).await;
    let client = cluster.client(0).await;
    let error = refused(&client, "CREATE TABLE made AS SELECT 7::BIGINT AS x").await;
    assert_eq!(error.kind, Kind::Unknown, "{error}");
    assert_eq!(numbers(&client, "SELECT x FROM renamed").await, [7], "its files are there");
    run(&client, "DROP TABLE renamed PURGE").await;
    assert_eq!(refused(&client, "SELECT x FROM renamed").await.kind, Kind::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_begins_to_be_purged_meanwhile_is_not_registered() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let way = Arc::new(Through { store: store.clone(), way: Meanwhile::default() });
    let mut cluster = Cluster::over(way.clone(), 1, |options| options).await;
    cluster.store = store.clone();
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let ident = TableIdent::new("default".parse().unwrap(), "t").unwrap();
    let pointer = Catalog::new(store).load_table(&ident, soon()).await.unwrap().unwrap();
    run(&client, "DROP TABLE t").await;
    let (id, record) = of_drop(&ident, &pointer.value, pointer.mod_revision, 1);
    *way.way.0.lock().unwrap() = Some(record.submission(&id));
    let register = format!("CALL system.register_table('t', '{}')", pointer.value.metadata_location);
    let error = refused(&client, &register).await;
    assert!(error.kind == Kind::Conflict && error.message.contains(&id), "{error}");
    assert_eq!(refused(&client, "SELECT * FROM t").await.kind, Kind::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_live_tables_refer_to_stays() {
    let cluster = Cluster::start(2).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1::BIGINT AS x").await;
    let first = cluster.files(".parquet");
    run(&client, "INSERT INTO t VALUES (2)").await;
    let source = first[0].display();
    run(&client, "CREATE TABLE borrower (x BIGINT)").await;
    run(&client, &format!("CALL system.add_files('borrower', 'file://{source}')")).await;
    run(&client, "DROP TABLE t PURGE").await;
    let (purge, _) = purged(&cluster, "default.t").await.unwrap();
    assert_eq!(purge.kept, [format!("file://{source}")]);
    assert_eq!(numbers(&client, "SELECT x FROM borrower").await, [1]);
    assert_eq!(cluster.files(".parquet"), first);

    // What a table has borrowed is not its own.
    run(&client, "DROP TABLE borrower PURGE").await;
    let (purge, _) = purged(&cluster, "default.borrower").await.unwrap();
    assert!(purge.outside > 0, "{purge:?}");
    assert_eq!(all_files(&cluster).into_iter().collect::<Vec<_>>(), first);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_table_spells_otherwise_stays_as_well() {
    let cluster = Cluster::start(2).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1::BIGINT AS x").await;
    let (metadata, list) = (cluster.files(".metadata.json").pop().unwrap(), cluster.files(".avro"));
    // As another engine may write it that has begun a table with the rows of this one.
    let text = std::fs::read_to_string(metadata).unwrap().replace("file:///", "file:/");
    let mut copy: serde_json::Value = serde_json::from_str(&text).unwrap();
    let elsewhere = cluster.dir.path().join("elsewhere/metadata");
    std::fs::create_dir_all(&elsewhere).unwrap();
    copy["table-uuid"] = serde_json::json!("00000000-0000-4000-8000-000000000007");
    copy["location"] = serde_json::json!(format!("file:{}/elsewhere", cluster.dir.path().display()));
    copy["metadata-log"] = serde_json::json!([]);
    let file = elsewhere.join("00000-00000000-0000-4000-8000-000000000007.metadata.json");
    std::fs::write(&file, copy.to_string()).unwrap();
    run(&client, &format!("CALL system.register_table('copy', 'file://{}')", file.display())).await;
    run(&client, "DROP TABLE t PURGE").await;
    let (purge, _) = purged(&cluster, "default.t").await.unwrap();
    assert!(!purge.kept.is_empty() && list.iter().all(|file| file.exists()), "{purge:?}");
    let fresh = Cluster::over(cluster.store.clone(), 1, |options| options).await;
    assert_eq!(numbers(&fresh.client(0).await, "SELECT x FROM copy").await, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_lives_on_is_not_purged() {
    let cluster = Cluster::start(2).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let metadata = cluster.files(".metadata.json").pop().unwrap();
    // The same table, twice, as nothing of lake's makes it.
    let catalog = Catalog::new(cluster.store.clone());
    let ident = |name: &str| TableIdent::new("default".parse().unwrap(), name).unwrap();
    let pointer = catalog.load_table(&ident("t"), soon()).await.unwrap().unwrap().value;
    let twin = serde_json::to_vec(&pointer).unwrap();
    let made = cluster.store.cas("/lake/table/default/again", None, twin.into(), soon()).await.unwrap();
    assert!(made.result.succeeded);
    let before = all_files(&cluster);
    run(&client, "DROP TABLE t PURGE").await;
    let stopped = purged(&cluster, "default.t").await.unwrap_err();
    assert!(matches!(&stopped, Answer::Refused(why) if why.contains("default.again is the same table")), "{stopped:?}");
    // While a purge waits the table is not registered.
    let register = format!("CALL system.register_table('third', 'file://{}')", metadata.display());
    let error = refused(&client, &register).await;
    assert!(error.kind == Kind::Conflict && error.message.contains("lake meta proc cancel purge-"), "{error}");
    let over = procedure(&cluster, "default.t").await;
    let failed = Record { state: State::Failed, ..over.record.clone() };
    let id = over.id.clone();
    change(&cluster, over, failed).await;
    run(&client, "DROP TABLE again").await;
    run(&client, &register).await;
    assert_eq!(numbers(&client, "SELECT count(*) FROM third").await, [1]);
    assert_eq!(all_files(&cluster), before);

    // A part of it that comes late finds that it is over.
    let purge = calls::get(cluster.store.as_ref(), &id, soon()).await.unwrap().unwrap().record.data().unwrap();
    for step in [CHECK, DELETE] {
        let task = Task { id: id.clone(), step: step.to_owned(), purge: Purge::clone(&purge) };
        let chores = Chores::new(cluster.nodes[0].engine().clone());
        let answer = chores.carry_out(PURGE_TABLE, &task.to_bytes()).await.unwrap().unwrap();
        assert_eq!(Answer::of(&answer), Ok(Answer::Over));
        assert!(chores.in_hand().is_empty());
    }
    assert_eq!(all_files(&cluster), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_to_purge_is_told() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    assert_eq!(refused(&client, "DROP TABLE t PURGE").await.kind, Kind::NotFound);
    run(&client, "DROP TABLE IF EXISTS t PURGE").await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    run(&client, "DROP TABLE t PURGE").await;
    let listed = text(&client, "SELECT kind, subject, state, step, steps, failures, note FROM system.procedures").await;
    assert_eq!(listed, [["purge_table", "default.t", "active", "retain", "0", "0", ""]]);
    assert_eq!(number(&client, "SELECT count(*) FROM system.procedures WHERE submitted <= now()").await, 1);
    // Files that somebody else has deleted.
    for file in cluster.files(".metadata.json") {
        std::fs::remove_file(file).unwrap();
    }
    let fresh = Cluster::over(cluster.store.clone(), 2, |options| options).await;
    let stopped = purged(&fresh, "default.t").await.unwrap_err();
    assert!(matches!(&stopped, Answer::Refused(why) if why.contains("is gone")), "{stopped:?}");
}

/// As an etcd: several keys at once, and nobody leads.
#[derive(Debug)]
struct Leaderless;

impl Way for Leaderless {
    fn capabilities(&self, of: Capabilities) -> Capabilities {
        Capabilities { scopes: false, ..of }
    }
}

/// A janitor that is not replaced.
struct Janitor;

#[async_trait]
impl Claim for Janitor {
    fn guard(&self, _: uuid::Uuid) -> Option<Guard> {
        Some(Guard::default())
    }

    fn is_any(&self) -> bool {
        true
    }

    async fn lost(&self, _: uuid::Uuid) {
        std::future::pending().await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_goes_with_the_files_of_its_tables_where_nobody_leads() {
    let store = Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Leaderless });
    let cluster = Cluster::over(store, 1, |options| options).await;
    let client = cluster.client(0).await;
    for sql in [
        "CREATE TABLE other AS SELECT 0 AS x",
        "CREATE SCHEMA s",
        "CREATE TABLE s.t AS SELECT 1 AS x",
        "CREATE TABLE s.u AS SELECT 2 AS x",
        "CREATE VIEW s.v AS SELECT x FROM s.t",
    ] {
        run(&client, sql).await;
    }
    let gone = home(&cluster, "u");
    let before = all_files(&cluster);
    run(&client, "DROP SCHEMA s CASCADE PURGE").await;
    assert_eq!(refused(&client, "SELECT x FROM s.t").await.kind, Kind::NotFound);
    assert_eq!((all_files(&cluster), number(&client, "SELECT count(*) FROM system.dropped_tables").await), (before, 2));
    let error = refused(&client, "UNDROP TABLE s.t").await;
    assert!(error.kind == Kind::NotFound && error.message.contains("CREATE SCHEMA s makes it"), "{error}");
    run(&client, "CREATE SCHEMA s").await;
    run(&client, "UNDROP TABLE s.t").await;
    let tables = cluster.nodes[0].engine().tables();
    let hour = Duration::from_secs(3600);
    assert_eq!(round(tables, &Janitor, hour).await.unwrap(), Purged::default());
    let is_there = || all_files(&cluster).iter().any(|file| file.starts_with(&gone));
    assert!(is_there(), "it waits");
    assert_eq!(round(tables, &Janitor, Duration::ZERO).await.unwrap(), Purged { done: 1, failed: 0 });
    assert!(!is_there());
    assert_eq!((number(&client, "SELECT x FROM s.t").await, number(&client, "SELECT x FROM other").await), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_table_comes_back_while_its_files_are_there() {
    let cluster = Cluster::start(2).await;
    let (client, other) = (cluster.client(0).await, cluster.client(1).await);
    assert_eq!(refused(&client, "UNDROP TABLE t").await.kind, Kind::NotFound);
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    run(&client, "DROP TABLE t PURGE").await;
    let dropped = procedure(&cluster, "default.t").await;
    let listed = "SELECT table_schema, table_name, step, procedure FROM system.dropped_tables";
    assert_eq!(text(&other, listed).await, [["default", "t", "retain", dropped.id.as_str()]]);
    let shown = text(&client, "SHOW DROPPED TABLES").await;
    assert_eq!((shown.len(), &shown[0][..2]), (1, &["default".to_owned(), "t".to_owned()][..]));
    run(&client, "CREATE TABLE t AS SELECT 2 AS x").await;
    assert_eq!(refused(&client, "UNDROP TABLE t").await.kind, Kind::AlreadyExists);
    run(&client, "DROP TABLE t").await;
    run(&other, "UNDROP TABLE t").await;
    assert_eq!(numbers(&client, "SELECT x FROM t").await, [1]);
    let purge = calls::get(cluster.store.as_ref(), &dropped.id, soon()).await.unwrap().unwrap().record;
    assert_eq!((purge.state, purge.note.as_str()), (State::Cancelled, "the table was undropped"));
    assert_eq!(refused(&client, "UNDROP TABLE t").await.kind, Kind::NotFound, "once");
    assert!(run(&client, "SHOW DROPPED TABLES").await.iter().all(|batch| batch.num_rows() == 0));

    // Of two the one that was dropped last, whatever the clocks of the nodes showed.
    run(&client, "CREATE TABLE u AS SELECT 1 AS x").await;
    run(&client, "DROP TABLE u PURGE").await;
    let first = procedure(&cluster, "default.u").await;
    let record = Record { submitted_unix_ms: u64::MAX, ..first.record.clone() };
    change(&cluster, first, record).await;
    run(&client, "CREATE TABLE u AS SELECT 2 AS x").await;
    run(&client, "DROP TABLE u PURGE").await;
    run(&client, "UNDROP TABLE u").await;
    assert_eq!(numbers(&client, "SELECT x FROM u").await, [2]);

    // Dropped again it is purged again; and then it is too late.
    run(&client, "INSERT INTO t VALUES (3)").await;
    run(&client, "DROP TABLE t PURGE").await;
    let again = procedure(&cluster, "default.t").await;
    assert_ne!(again.id, dropped.id);
    let record = Record { step: DELETE.to_owned(), ..again.record.clone() };
    change(&cluster, again, record).await;
    let late = refused(&client, "UNDROP TABLE t").await;
    assert!(late.kind == Kind::Conflict && late.message.contains("are being deleted"), "{late}");
}
