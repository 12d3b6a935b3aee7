//! All metadata peers are stopped: what is cached goes on, nothing is written, and everybody is told.

use std::time::{Duration, Instant};

use lake_chaos::Role;

use crate::common::{PATIENCE, Scratch, TestCluster};

#[tokio::test(flavor = "multi_thread")]
async fn queries_go_on_without_metasrv_and_inserts_say_why_they_cannot() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let nodes = [cluster.sql(0).await, cluster.sql(1).await];
    nodes[0].run("CREATE TABLE t AS SELECT * FROM (VALUES (1), (2), (3)) AS v(x)").await.unwrap();
    nodes[0].run("CREATE TABLE never_read (x BIGINT)").await.unwrap();
    for node in &nodes {
        cluster.until_rows(node, "SELECT x FROM t ORDER BY x", &[1, 2, 3]).await;
    }

    cluster.processes.stop_role(Role::Metasrv).await.unwrap();
    for node in &nodes {
        for _ in 0..5 {
            assert_eq!(node.numbers("SELECT x FROM t ORDER BY x").await, [1, 2, 3]);
        }
        let joined = "SELECT count(*) FROM t a JOIN t b ON a.x = b.x";
        assert_eq!(node.numbers(joined).await, [3]);
        // The answer is old by now, and says so.
        crate::common::until("an answer that says how old it is", PATIENCE, || async {
            let answer = node.run("SELECT x FROM t").await.map_err(|e| e.to_string())?;
            answer.notices.iter().any(|n| n.contains("away")).then_some(()).ok_or_else(|| "no notice".to_owned())
        })
        .await;

        let started = Instant::now();
        // Enough to come as far as the pointer, also on a busy machine.
        let error = node.run_within("INSERT INTO t VALUES (4)", Duration::from_secs(10)).await.unwrap_err();
        assert!(error.message.contains("the metadata cluster is unreachable"), "{error}");
        assert!(error.message.contains("nothing was committed"), "{error}");
        assert!(started.elapsed() < PATIENCE, "it ended by its deadline, not after {:?}", started.elapsed());
    }

    cluster.processes.start_role(Role::Metasrv).await.unwrap();
    nodes[1].run("INSERT INTO t VALUES (5)").await.unwrap();
    for node in &nodes {
        cluster.until_rows(node, "SELECT x FROM t ORDER BY x", &[1, 2, 3, 5]).await;
    }
    cluster.stop().await;
}
