//! Two writers of one table, through different query nodes, at the same moment.

use crate::common::{Scratch, TestCluster};

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
    cluster.stop().await;
}
