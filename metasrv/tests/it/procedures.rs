//! Procedures, and the leader who runs them: what becomes of them when leaders and workers go, when they fail, are
//! cancelled, and end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use lake_client::catalog::{Catalog, CatalogError, Namespace, TableIdent, TablePointer};
use lake_client::nodes::Rhythm;
use lake_client::procedures::calls::{self, Asked, Clear, Submitted};
use lake_client::procedures::drop_namespace::{AT_ONCE, NamespaceDrop, PURGES};
use lake_client::procedures::purge::{Answer, CHECK, DELETE, RETAIN, Task};
use lake_client::procedures::upkeep::{RUN, TableUpkeep, What};
use lake_client::procedures::{Procedure, Record, State, kept};
use lake_client::remote::RemoteStore;
use lake_client::remote::node::{Node, NodeKeeper};
use lake_client::store::{MetaStore, ReadOptions};
use lake_metasrv::peer::procedures::machine::Pace;
use lake_proto::v1;
use rustix::process::Signal;

use crate::support::processes::Processes;
use crate::support::purging::{COUNT, FILES, Runner, Worker, deleted, purge, soon, submit, submit_upkeep, until};
use crate::support::{PATIENCE, TestCluster, eventually};

const RHYTHM: Rhythm = Rhythm { interval: Duration::from_millis(600), lease: Duration::from_millis(6000) };

fn pace() -> Pace {
    let ms = Duration::from_millis;
    Pace { retention: Duration::ZERO, first_retry: ms(20), longest_retry: ms(50), max_failures: 4, ..Pace::default() }
}

async fn founded(pace: Pace) -> TestCluster {
    TestCluster::founded(3, |config| (config.rhythm, config.pace) = (RHYTHM, pace)).await
}

async fn get(store: &RemoteStore, id: &str) -> Procedure {
    calls::get(store, id, soon()).await.unwrap().unwrap_or_else(|| panic!("{id} is gone"))
}

async fn scopes(store: &RemoteStore) -> Vec<String> {
    let read = store.list_scopes("", "", 0, ReadOptions::default(), soon()).await.unwrap();
    read.value.items.into_iter().map(|scope| scope.path).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_procedure_goes_on_under_the_next_leader_and_with_the_next_worker() {
    let mut cluster = founded(pace()).await;
    let store = cluster.client();
    let (first, second) = (Worker::new(), Worker::new());
    let id = submit(&store, "slow").await;
    let other = submit(&store, "t").await;
    // Nobody is there who could do it, which is no failure.
    let waits = until(&store, &id, |record| record.note.contains("no worker is connected")).await;
    assert_eq!((waits.record.step.as_str(), waits.record.failures), (CHECK, 0));
    let mut keepers = vec![NodeKeeper::start(cluster.client(), "w1", first.clone())];
    let accepted = (waits.record.accepted_ms, waits.record.due_ms);
    for n in 1..FILES {
        first.may.add_permits(1);
        second.may.add_permits(1);
        let now = until(&store, &id, |record| deleted(record) >= n).await;
        assert_eq!((now.record.accepted_ms, now.record.due_ms), accepted, "it is accepted once");
        match n {
            // A worker goes with a part in hand, and another one comes.
            4 => {
                keepers.clear();
                keepers.push(NodeKeeper::start(cluster.client(), "w2", second.clone()));
            }
            2 | 6 | 9 => {
                let leader = cluster.leader().await;
                cluster.stop(leader).await;
                cluster.start(leader).await;
            }
            _ => {}
        }
    }
    let many = FILES as usize * 10;
    first.may.add_permits(many);
    second.may.add_permits(many);
    for (id, table) in [(&id, "slow"), (&other, "t")] {
        let done = until(&store, id, |record| record.state == State::Done).await.record;
        assert_eq!((deleted(&done), done.steps), (FILES, 2 + FILES), "each step is committed once: {done:?}");
        let files = first.deleted_of(table).union(&second.deleted_of(table)).copied().collect::<BTreeSet<u64>>();
        assert_eq!(files, (0..FILES).collect());
        assert!(done.note.contains("12 files are deleted") && done.ended_ms.is_some(), "{done:?}");
    }
    assert_eq!(scopes(&store).await, Vec::<String>::new());
    // Submitted again, it is what it was.
    let (_, record) = purge("slow");
    let known = calls::submit(&store, &id, &record, soon()).await.unwrap();
    assert!(matches!(known, Submitted::Known(known) if known.record.state == State::Done));
    drop(keepers);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_procedure_keeps_its_scopes_until_it_is_cleared() {
    let mut cluster = founded(pace()).await;
    let store = cluster.client();
    let _worker = NodeKeeper::start(cluster.client(), "w", Worker::new());
    // Who has asked for it goes; the scope is the procedure's.
    let asks = cluster.client();
    let damaged = submit(&asks, "damaged").await;
    drop(asks);
    let poisoned = until(&store, &damaged, |record| record.state == State::Poisoned).await.record;
    assert!(
        poisoned.note.contains("has failed 4 times") && poisoned.note.contains("cannot be deleted"),
        "{poisoned:?}"
    );
    let odd = submit(&store, "odd").await;
    let doubtful = until(&store, &odd, |record| record.state == State::Poisoned).await.record;
    assert_eq!(doubtful.failures, 0);
    assert_eq!(scopes(&store).await, ["/catalog/a/damaged", "/catalog/a/odd"]);
    let (id, record) = purge("damaged");
    let taken = calls::submit(&store, &id, &record, soon()).await.unwrap();
    assert!(matches!(&taken, Submitted::Taken(scopes) if scopes[0].owner.to_string().contains(&damaged)), "{taken:?}");

    // Also under another leader.
    let leader = cluster.leader().await;
    cluster.stop(leader).await;
    assert!(matches!(calls::cancel(&store, &odd, soon()).await.unwrap(), Asked::NotNow(_)));
    assert!(matches!(calls::clear(&store, &damaged, Clear::Retry, soon()).await.unwrap(), Asked::Now(_)));
    let again = until(&store, &damaged, |record| record.state == State::Poisoned).await.record;
    assert_eq!(again.failures, poisoned.failures, "it was tried as often again");
    for id in [&damaged, &odd] {
        assert!(matches!(calls::clear(&store, id, Clear::GiveUp, soon()).await.unwrap(), Asked::Now(_)));
        let over = until(&store, id, |record| record.ended_ms.is_some()).await.record;
        assert!(over.state == State::Failed && over.note.starts_with("given up: "), "{over:?}");
    }
    assert_eq!(scopes(&store).await, Vec::<String>::new());
    // What cannot be done, and was not begun, ends by itself.
    let shared = submit(&store, "shared").await;
    let failed = until(&store, &shared, |record| record.state == State::Failed).await.record;
    assert_eq!(failed.note, "another table lives there");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_procedure_is_cancelled_while_that_is_not_too_late() {
    let mut cluster = founded(Pace { retention: Duration::from_secs(3600), ..pace() }).await;
    let store = cluster.client();
    let worker = Worker::new();
    let _keeper = NodeKeeper::start(cluster.client(), "w", worker.clone());
    let id = submit(&store, "t").await;
    let waits = until(&store, &id, |record| record.accepted_ms.is_some()).await.record;
    assert_eq!((waits.step.as_str(), waits.due_ms), (RETAIN, waits.accepted_ms.map(|at| at + 3_600_000)));
    assert!(matches!(calls::cancel(&store, &id, soon()).await.unwrap(), Asked::Now(_)));
    let over = until(&store, &id, |record| record.ended_ms.is_some()).await.record;
    assert_eq!((over.state, worker.deleted_of("t").len()), (State::Cancelled, 0));
    assert_eq!(scopes(&store).await, Vec::<String>::new());

    // Its time has come before: files go.
    let (id, record) = purge("slow");
    let begun = Record { step: DELETE.to_owned(), accepted_ms: Some(0), ..record };
    calls::submit(&store, &id, &begun, soon()).await.unwrap();
    worker.may.add_permits(1);
    until(&store, &id, |record| deleted(record) == 1).await;
    calls::cancel(&store, &id, soon()).await.unwrap();
    worker.may.add_permits(FILES as usize * 2);
    let done = until(&store, &id, |record| record.state == State::Done).await.record;
    assert!(!done.cancel && deleted(&done) == FILES, "{done:?}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn history_is_bounded_and_what_nobody_knows_is_left_alone() {
    let mut cluster = founded(Pace { most_ended: 2, ..pace() }).await;
    let store = cluster.client();
    let (id, record) = ("of-later", Record::new("of_a_later_release", "s", "first", kept(&1), 0));
    calls::submit(&store, id, &record, soon()).await.unwrap();
    store
        .commit(lake_proto::kv::Txn::cas("/lake/proc/odd", lake_proto::kv::Expected::Absent, "?"), soon())
        .await
        .unwrap();
    let _worker = NodeKeeper::start(cluster.client(), "w", Worker::new());
    let mut last = String::new();
    for n in 0..5 {
        last = submit(&store, &format!("t{n}")).await;
        let ended = calls::wait(&store, &last, soon()).await.unwrap();
        // The one that has just ended may be the one that is forgotten only if it is older than two others.
        assert!(ended.is_some_and(|p| p.record.state == State::Done));
    }
    eventually("the oldest to be forgotten", async || {
        let all = calls::list(&store, ReadOptions::default(), soon()).await.ok()?.value;
        (all.iter().filter(|p| p.record.state == State::Done).count() == 2).then_some(())
    })
    .await;
    assert_eq!(get(&store, &last).await.record.state, State::Done);
    assert_eq!(get(&store, id).await.record, record);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deposed_leader_advances_nothing() {
    let peers = Processes::founded(100_000).await;
    let store = peers.store();
    let worker = Worker::new();
    let _keeper = NodeKeeper::start(peers.store(), "w", worker.clone());
    let id = submit(&store, "slow").await;
    worker.may.add_permits(2);
    until(&store, &id, |record| deleted(record) == 2).await;
    // It sleeps with a part in hand, whose answer it is sent.
    let asleep = peers.leader().await;
    peers.signal(asleep, Signal::STOP);
    peers.leader_besides(&[asleep]).await;
    worker.may.add_permits(FILES as usize * 3);
    let done = until(&store, &id, |record| record.state == State::Done).await;
    assert_eq!((deleted(&done.record), done.record.steps), (FILES, 2 + FILES));
    peers.signal(asleep, Signal::CONT);
    // Awake, it has heard of the other leader, and applied what that one has done since.
    let other = submit(&store, "t").await;
    until(&store, &other, |record| record.state == State::Done).await;
    let revision = store.get("/kv/any", ReadOptions::default(), soon()).await.unwrap().revision;
    eventually("the one that slept to follow", async || {
        let status = peers.status(asleep).await?;
        (status.leader.as_ref()?.id != asleep && status.revision >= revision).then_some(())
    })
    .await;
    assert_eq!(get(&store, &id).await, done);
}

/// A schema with so many tables.
async fn schema(catalog: &Catalog, name: &str, tables: usize) -> Namespace {
    let namespace: Namespace = name.parse().unwrap();
    catalog.create_namespace(&namespace, BTreeMap::new(), soon()).await.unwrap();
    for t in 0..tables {
        let ident = TableIdent::new(namespace.clone(), format!("t{t}")).unwrap();
        let uuid = uuid::Uuid::new_v4();
        let pointer = TablePointer { uuid, metadata_location: format!("file:///{ident}"), previous_location: None };
        catalog.create_table(&ident, &pointer, soon()).await.unwrap();
    }
    namespace
}

const SCHEMA_IS_GONE: &str = "its schema is gone";

/// A worker that refuses to purge, and says how it found the table's schema.
#[derive(Debug)]
struct Looks {
    catalog: Catalog,
}

#[async_trait]
impl Node for Looks {
    fn info(&self) -> v1::NodeInfo {
        v1::NodeInfo { roles: vec!["worker".to_owned()], ..v1::NodeInfo::default() }
    }

    fn load(&self) -> v1::NodeLoad {
        v1::NodeLoad::default()
    }

    async fn carry_out(&self, _: &str, payload: Bytes) -> Result<Bytes, String> {
        let table = Task::of(&payload)?.purge.ident().ok_or("it names no table")?;
        let is_there = self.catalog.namespace_exists(&table.namespace, soon()).await.map_err(|e| e.to_string())?;
        let found = if is_there { "its schema is there" } else { SCHEMA_IS_GONE };
        Ok(Answer::Refused(found.to_owned()).to_bytes())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_goes_with_what_is_in_it_and_its_children_end_before_it_does() {
    let mut cluster = founded(pace()).await;
    let store = cluster.client();
    let catalog = Catalog::new(Arc::new(cluster.client()));
    // More than go in one transaction.
    let large = schema(&catalog, "large", AT_ONCE + 20).await;
    let id = catalog.submit_namespace_drop(&large, false, 1, soon()).await.unwrap();
    let done = until(&store, &id, |record| record.state == State::Done).await.record;
    assert_eq!(done.data::<NamespaceDrop>().unwrap().dropped, AT_ONCE as u64 + 20);
    assert!(!catalog.namespace_exists(&large, soon()).await.unwrap());
    // Its name is free.
    schema(&catalog, "large", 1).await;

    // One with another in it is nobody's to drop.
    let outer = schema(&catalog, "outer", 1).await;
    schema(&catalog, "outer.inner", 0).await;
    let refused = catalog.submit_namespace_drop(&outer, true, 1, soon()).await;
    assert_eq!(refused, Err(CatalogError::NamespaceNotEmpty(outer)));

    // None of the files is looked at while a table is left that could be taken for a live one which uses them.
    let keeper = NodeKeeper::start(cluster.client(), "l", Arc::new(Looks { catalog: catalog.clone() }));
    let shared = schema(&catalog, "shared", AT_ONCE + 1).await;
    let id = catalog.submit_namespace_drop(&shared, true, 1, soon()).await.unwrap();
    until(&store, &id, |record| record.state == State::Done).await;
    let all = calls::list(&store, ReadOptions::default(), soon()).await.unwrap().value;
    let looked: Vec<&str> =
        all.iter().filter(|p| p.record.parent.as_ref() == Some(&id)).map(|p| p.record.note.as_str()).collect();
    assert_eq!(looked, [SCHEMA_IS_GONE; AT_ONCE + 1]);
    keeper.leave(PATIENCE).await;

    // With their files.
    let small = schema(&catalog, "small", 3).await;
    let id = catalog.submit_namespace_drop(&small, true, 1, soon()).await.unwrap();
    let waits = until(&store, &id, |record| record.step == PURGES).await.record;
    assert_eq!((waits.state, waits.scopes.len()), (State::Active, 0));
    assert!(!catalog.namespace_exists(&small, soon()).await.unwrap());
    let worker = Worker::new();
    let _keeper = NodeKeeper::start(cluster.client(), "w", worker.clone());
    until(&store, &id, |record| record.state == State::Done).await;
    let all = calls::list(&store, ReadOptions::default(), soon()).await.unwrap().value;
    let children: Vec<&Procedure> = all.iter().filter(|child| child.record.parent.as_ref() == Some(&id)).collect();
    assert!(children.len() == 3 && children.iter().all(|child| child.record.state == State::Done), "{children:?}");
    for n in 0..3 {
        assert_eq!(worker.deleted_of(&format!("small.t{n}")).len() as u64, FILES);
    }
    assert_eq!(scopes(&store).await, Vec::<String>::new());
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upkeep_runs_at_one_worker_until_it_ends_and_at_another_one_if_that_goes() {
    let mut cluster = founded(pace()).await;
    let store = cluster.client();
    submit_upkeep(&store, "one", What::RewriteDataFiles).await;
    until(&store, "one", |record| record.note.contains("no worker is connected")).await;
    let runs = Runner::new(false);
    let keeper = NodeKeeper::start(cluster.client(), "a", runs.clone());
    until(&store, "one", |record| record.step == RUN).await;
    eventually("it to be asked again", async || (runs.asked.load(Ordering::SeqCst) >= 3).then_some(())).await;
    // Nothing comes of one that is cancelled.
    submit_upkeep(&store, "other", What::RemoveOrphanFiles).await;
    until(&store, "other", |record| record.step == RUN).await;
    assert!(matches!(calls::cancel(&store, "other", soon()).await.unwrap(), Asked::Now(_)));
    until(&store, "other", |record| record.state == State::Cancelled).await;

    drop(keeper);
    let ends = Runner::new(true);
    let _keeper = NodeKeeper::start(cluster.client(), "b", ends.clone());
    let done = until(&store, "one", |record| record.state == State::Done).await.record;
    let upkeep: TableUpkeep = done.data().unwrap();
    assert_eq!((upkeep.node.as_deref(), upkeep.count), (Some("b"), Some(COUNT)));
    cluster.stop_all().await;
}
