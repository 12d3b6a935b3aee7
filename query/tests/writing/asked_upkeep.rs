//! Upkeep that somebody has asked for: what a worker makes of it, and what it leaves if it is not its own any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lake_client::catalog::{Catalog, TableIdent};
use lake_client::memory::MemoryStore;
use lake_client::nodes::NOTICE;
use lake_client::procedures::upkeep::{Answer, RUN, TABLE_UPKEEP, TableUpkeep, Task, What, of_table};
use lake_client::procedures::{Record, calls, kept};
use lake_client::remote::node::Node;
use lake_client::store::SharedStore;
use lake_proto::kv::Txn;
use lake_query::Config;
use lake_query::cluster::ThisNode;

use crate::common::store::{Gated, Through};
use crate::common::*;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Submits what the leader has placed at node "n"; gives the transaction that cancels it.
async fn placed(store: &SharedStore, id: &str, table: &TableIdent, uuid: uuid::Uuid) -> Txn {
    let (_, record) = of_table(What::RewriteDataFiles, table, uuid, 1);
    let upkeep = TableUpkeep { node: Some("n".to_owned()), ..record.data().unwrap() };
    let record = Record { step: RUN.to_owned(), data: kept(&upkeep), ..record };
    let calls::Submitted::New(revision) = calls::submit(store.as_ref(), id, &record, soon()).await.unwrap() else {
        panic!("{id} was submitted before")
    };
    Record { cancel: true, ..record }.change(id, revision)
}

/// What the node says in the end.
async fn answered(this: &ThisNode, id: &str, node: &str) -> Answer {
    let task = Task { id: id.to_owned(), node: node.to_owned() };
    loop {
        let answer = this.carry_out(TABLE_UPKEEP, task.to_bytes()).await.unwrap();
        match Answer::of(&answer).unwrap() {
            Answer::Running => {}
            other => return other,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_does_what_was_asked_for_while_it_is_its_own() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let way = Arc::new(Through { store: store.clone(), way: Gated::default() });
    let cluster = Cluster::over(way.clone(), 1, |options| options).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    for n in 0..6 {
        run(&client, &format!("INSERT INTO t VALUES ({n})")).await;
    }
    let table = TableIdent::new("default".parse().unwrap(), "t").unwrap();
    let pointer = async || Catalog::new(store.clone()).load_table(&table, soon()).await.unwrap().unwrap();
    let before = pointer().await;
    let config = Config::new(options(cluster.dir.path())).unwrap();
    let this = ThisNode::new(&config, String::new(), None, cluster.nodes[0].engine().clone());

    // Another node's, or nobody's.
    let cancelled = placed(&store, "first", &table, before.value.uuid).await;
    assert_eq!(answered(&this, "first", "m").await, Answer::Over);
    assert_eq!(answered(&this, "nothing", "n").await, Answer::Over);
    // Cancelled between its work and its commit.
    *way.first.0.lock().unwrap() = Some(cancelled);
    let Answer::Failed(why) = answered(&this, "first", "n").await else { panic!("it was cancelled") };
    assert!(why.contains("rewrite_data_files of table default.t"), "{why}");
    assert_eq!(pointer().await.value, before.value, "nothing was committed");
    assert_eq!(answered(&this, "first", "n").await, Answer::Over);
    assert!(this.load().procedures.is_empty());

    // Of a table that was dropped, and another one has its name.
    placed(&store, "of-another", &table, uuid::Uuid::nil()).await;
    let gone = answered(&this, "of-another", "n").await;
    assert!(matches!(&gone, Answer::Refused(why) if why.contains("not there any more")), "{gone:?}");

    placed(&store, "second", &table, before.value.uuid).await;
    // While it runs the node's heartbeats say so.
    let gate = way.gate.lock().await;
    let looks = async {
        until("the node to say what runs", async || this.load().procedures == ["second"]).await;
        drop(gate);
    };
    let (answer, ()) = tokio::join!(answered(&this, "second", "n"), looks);
    assert!(matches!(answer, Answer::Done(_)), "{answer:?}");
    assert!(this.load().procedures.is_empty());
    assert_ne!(pointer().await.value, before.value);
    assert!(numbers(&client, "SELECT count(*) FROM default.\"t$files\"").await[0] < 6);
    assert_eq!(numbers(&client, "SELECT count(*) FROM t").await, [6]);

    // A revision that the leader tells of is what the node has seen from then on, and no one reads behind it.
    let told = this.load().observed_revision + 1000;
    assert_eq!(this.carry_out(NOTICE, told.to_string().into()).await.unwrap(), "");
    assert_eq!(this.load().observed_revision, told);
    assert!(this.carry_out(NOTICE, "soon".into()).await.unwrap_err().contains("decimal digits"));
}
