//! Other engines keep writing while leaders die.

use lake_chaos::Role;

use crate::common::{PATIENCE, Scratch, Sql, TestCluster, numbers, until};
use crate::python;

/// Rows that each writer appends, one commit each.
const ROWS: i64 = 25;
const WRITERS: i64 = 3;

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_notices_nothing_of_leaders_that_are_killed() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let entries = cluster.processes.entries();
    let nodes: Vec<String> = entries
        .iter()
        .filter(|entry| entry.role == Role::Query)
        .map(|entry| format!("http://{}", entry.addresses["rest"]))
        .collect();
    let (rows, writers) = (ROWS.to_string(), WRITERS.to_string());
    let mut arguments = vec![rows.as_str(), writers.as_str()];
    arguments.extend(nodes.iter().map(String::as_str));
    let writing = python::run("pyiceberg_client.py", "write_through_faults", &arguments);
    let sql = cluster.sql(0).await;
    tokio::pin!(writing);
    let mut kills = 0;
    loop {
        tokio::select! {
            _ = &mut writing => break,
            () = kill_the_leader(&cluster, &sql) => kills += 1,
        }
    }
    assert!(kills > 0, "no leader was killed while the writers wrote");
    // Every append was acknowledged, and is there once.
    assert_eq!(count(&sql).await, WRITERS * ROWS);
    let distinct = "SELECT count(*) FROM (SELECT DISTINCT writer, n FROM through_faults)";
    assert_eq!(sql.numbers(distinct).await, [WRITERS * ROWS]);
    cluster.stop().await;
}

/// Kills the leader once more rows are there than now: the writers are not just waiting. Starts it again.
async fn kill_the_leader(cluster: &TestCluster, sql: &Sql) {
    let before = count(sql).await;
    until("the writers to go on", PATIENCE, || async {
        let now = count(sql).await;
        if now > before { Ok(()) } else { Err(format!("{now} rows")) }
    })
    .await;
    let leader = cluster.processes.leader(PATIENCE).await.unwrap();
    cluster.processes.process(leader.process).unwrap().kill().await.unwrap();
    cluster.processes.start_one(leader.process).await.unwrap();
}

/// Rows there are; 0 while there is no table.
async fn count(sql: &Sql) -> i64 {
    match sql.run("SELECT count(*) FROM through_faults").await {
        Ok(answer) => numbers(&answer.batches, 0)[0],
        Err(_) => 0,
    }
}
