//! Two writers of one table, through different query nodes, at the same moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lake_chaos::ProcessName;
use tokio::task::JoinSet;

use crate::common::{PATIENCE, Scratch, TestCluster, files, until};

/// Rounds of two INSERTs at once.
const ROUNDS: i64 = 25;

#[tokio::test(flavor = "multi_thread")]
async fn no_row_is_lost_when_two_nodes_write_one_table_at_once() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let [a, b] = [cluster.sql(0).await, cluster.sql(1).await];
    a.run("CREATE TABLE t (v BIGINT)").await.unwrap();

    let mut expected = Vec::new();
    for round in 0..ROUNDS {
        let (left, right) = (2 * round, 2 * round + 1);
        let (left_sql, right_sql) =
            (format!("INSERT INTO t VALUES ({left})"), format!("INSERT INTO t VALUES ({right})"));
        let (l, r) = tokio::join!(a.run(&left_sql), b.run(&right_sql));
        for (value, outcome) in [(left, l), (right, r)] {
            match outcome {
                Ok(_) => expected.push(value),
                // The other allowed answer. It says that nothing was committed, and the count below holds it to that.
                Err(e) => assert!(e.message.contains("nothing was committed"), "{e}"),
            }
        }
    }
    assert!(expected.len() as i64 >= ROUNDS, "in each round at least one of two writers wins");
    for node in [&a, &b] {
        cluster.until_rows(node, "SELECT v FROM t ORDER BY v", &expected).await;
    }
    a_killed_node_leaves_no_half_of_a_write(&cluster, &expected).await;
    cluster.stop().await;
}

/// A node is killed while it writes files for a table: what others see of the table is what was there.
async fn a_killed_node_leaves_no_half_of_a_write(cluster: &TestCluster, expected: &[i64]) {
    let [a, b] = [cluster.sql(0).await, cluster.sql(1).await];
    let warehouse = cluster.processes.dir().join("warehouse");
    let before = files(&warehouse).len();
    let large = "INSERT INTO t SELECT l_orderkey FROM tpch('lineitem', 100)";
    let writing = tokio::spawn(async move { a.run(large).await });
    until("a file of the large INSERT", PATIENCE, || async {
        let now = files(&warehouse).len();
        if now > before { Ok(()) } else { Err(format!("{now} files")) }
    })
    .await;
    let victim = ProcessName::query(1);
    cluster.processes.process(victim).unwrap().kill().await.unwrap();
    let error = writing.await.unwrap().unwrap_err();
    assert!(error.message.contains("unknown"), "{error}");
    cluster.until_rows(&b, "SELECT v FROM t ORDER BY v", expected).await;
    cluster.processes.start_one(victim).await.unwrap();
    let a = cluster.sql(0).await;
    a.run("INSERT INTO t VALUES (-1)").await.unwrap();
    let expected: Vec<i64> = std::iter::once(-1).chain(expected.iter().copied()).collect();
    for node in [&a, &b] {
        cluster.until_rows(node, "SELECT v FROM t ORDER BY v", &expected).await;
    }
}

/// Two writers through each of two nodes, for as long as one has not made its share.
#[tokio::test(flavor = "multi_thread")]
async fn no_node_starves_another() {
    const SHARE: usize = 20;
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    cluster.sql(0).await.run("CREATE TABLE t (node BIGINT)").await.unwrap();
    let made = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let mut writers = JoinSet::new();
    for writer in 0..4 {
        let (node, made) = (writer % 2, made.clone());
        let sql = cluster.sql(node).await;
        writers.spawn(async move {
            while made.iter().any(|m| m.load(Ordering::SeqCst) < SHARE) {
                let insert = format!("INSERT INTO t VALUES ({node})");
                sql.run(&insert).await.unwrap_or_else(|e| panic!("node {node}: {e}"));
                made[node].fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    while let Some(ended) = writers.join_next().await {
        ended.unwrap();
    }
    let made = made.each_ref().map(|m| m.load(Ordering::SeqCst));
    println!("INSERTs through each node: {made:?}");
    // Nobody can be held to equal shares; to be passed over again and again is another thing.
    assert!(made.iter().max().unwrap() <= &(10 * SHARE), "{made:?}");
    cluster.stop().await;
}
