//! Other engines keep writing while leaders die.

use std::path::PathBuf;

use lake_chaos::{ProcessName, Role};

use crate::balancer::Balancer;
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

/// What happens to a cluster's processes, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The leader is killed.
    Leader,
    /// A query node is killed.
    Killed(usize),
    /// A query node is stopped, as for an upgrade.
    Restarted(usize),
}

const FAULTS: [Fault; 10] = [
    Fault::Leader,
    Fault::Killed(0),
    Fault::Leader,
    Fault::Restarted(1),
    Fault::Leader,
    Fault::Killed(1),
    Fault::Restarted(0),
    Fault::Leader,
    Fault::Restarted(1),
    Fault::Killed(0),
];

/// One writer: its script, and the file in which it tells how many of its rows are acknowledged.
struct Writer {
    script: &'static str,
    number: usize,
    acknowledged: PathBuf,
}

impl Writer {
    fn rows(&self) -> usize {
        std::fs::read_to_string(&self.acknowledged).unwrap_or_default().lines().count()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_go_on_behind_a_balancer_while_leaders_and_query_nodes_go() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let queries: Vec<_> = cluster.processes.entries().into_iter().filter(|entry| entry.role == Role::Query).collect();
    let nodes: Vec<ProcessName> = queries.iter().map(|entry| entry.name()).collect();
    let rest: Vec<String> = queries.iter().map(|entry| entry.addresses["rest"].clone()).collect();
    let balancer = Balancer::start(&rest, &scratch.path("balancer")).await;
    let uri = format!("http://{}", balancer.address);
    python::run("pyiceberg_client.py", "tables_of_writers", &[&uri]).await;
    let scripts = ["pyiceberg_client.py", "pyiceberg_client.py", "duckdb_client.py"];
    let writers: Vec<Writer> = scripts
        .into_iter()
        .enumerate()
        .map(|(number, script)| Writer {
            script,
            number,
            acknowledged: scratch.path(&format!("acknowledged-{number}")),
        })
        .collect();
    let stop = scratch.path("stop");
    let writing = writers.iter().map(|writer| {
        let (script, number) = (writer.script, writer.number.to_string());
        let arguments = [uri.clone(), number, path(&writer.acknowledged), path(&stop)];
        async move {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            python::run(script, "write_behind_a_balancer", &arguments).await
        }
    });
    let writing = futures::future::join_all(writing);
    let faults = async {
        for fault in FAULTS {
            go_on(&writers).await;
            happen(&cluster, &nodes, fault).await;
        }
        go_on(&writers).await;
        std::fs::write(&stop, "").unwrap();
    };
    // A writer that ends early has failed, and says so.
    tokio::pin!(writing);
    let said = tokio::select! {
        said = &mut writing => panic!("the writers have ended by themselves: {said:?}"),
        () = faults => writing.await,
    };

    let sql = cluster.sql(0).await;
    for (writer, said) in writers.iter().zip(said) {
        // Every row was acknowledged, and is there once.
        let rows: i64 = said.trim().parse().unwrap();
        let table = if writer.script.starts_with("duckdb") { "of_duckdb" } else { "of_pyiceberg" };
        let there = format!("SELECT n FROM {table} WHERE writer = {} ORDER BY n", writer.number);
        assert_eq!(sql.numbers(&there).await, (0..rows).collect::<Vec<_>>(), "{table} of {}", writer.number);
        println!("{table} of {}: {rows} rows", writer.number);
    }
    cluster.stop().await;
}

fn path(path: &std::path::Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Waits until each writer has had a row acknowledged since now.
async fn go_on(writers: &[Writer]) {
    let before: Vec<usize> = writers.iter().map(Writer::rows).collect();
    until("every writer to go on", PATIENCE, || async {
        let now: Vec<usize> = writers.iter().map(Writer::rows).collect();
        match now.iter().zip(&before).all(|(now, before)| now > before) {
            true => Ok(()),
            false => Err(format!("{now:?} rows, and {before:?} before")),
        }
    })
    .await;
}

/// Something goes, and comes again.
async fn happen(cluster: &TestCluster, nodes: &[ProcessName], fault: Fault) {
    let processes = &cluster.processes;
    let name = match fault {
        Fault::Leader => processes.leader(PATIENCE).await.unwrap().process,
        Fault::Killed(node) | Fault::Restarted(node) => nodes[node],
    };
    match fault {
        Fault::Restarted(_) => processes.process(name).unwrap().stop().await.unwrap(),
        _ => processes.process(name).unwrap().kill().await.unwrap(),
    }
    processes.start_one(name).await.unwrap();
}
