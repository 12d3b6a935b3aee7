//! Query nodes as the leader knows them: listed, paused, replaced by a process of the same name, stopped.

use std::process::Stdio;

use lake_chaos::{ProcessName, Role};
use serde_json::Value;

use crate::common::{LAKE, PATIENCE, Scratch, TestCluster, lake, table, until};

/// What `lake meta nodes` says of a node; nothing while no leader answers, or the node is not there.
async fn listed(scratch: &Scratch, cluster: &TestCluster, node: &str) -> Option<Value> {
    let at = cluster.processes.endpoints(Role::Metasrv).join(",");
    let printed = lake(&scratch.path(""), &["meta", "nodes", "--at", &at, "--format", "json"]).await;
    let listing: Value = serde_json::from_str(&printed.out).ok()?;
    let nodes = listing["nodes"].as_array()?;
    let down = nodes.iter().any(|node| node["state"] == "down");
    assert_eq!(printed.code, Some(if down { 3 } else { 0 }), "{printed:?}");
    nodes.iter().find(|listed| listed["node"] == node).cloned()
}

async fn until_listed(scratch: &Scratch, cluster: &TestCluster, node: &str, is: impl Fn(&Value) -> bool) -> Value {
    until(&format!("{node} to be listed so"), PATIENCE, || async {
        let listed = listed(scratch, cluster, node).await.ok_or("it is not listed")?;
        if is(&listed) { Ok(listed) } else { Err(listed.to_string()) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_what_its_last_process_is() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start_as(&scratch, |spec| {
        // Longer than a leader is elected on a busy machine: no node loses its lease by that.
        spec.metasrv_args = ["--node-heartbeat-ms", "500", "--node-lease-ms", "10000"].map(str::to_owned).to_vec();
    })
    .await;
    let up = |node: &Value| node["state"] == "up" && !node["cache_bytes"].is_null();
    let first = until_listed(&scratch, &cluster, "query-1", up).await;
    let second = until_listed(&scratch, &cluster, "query-2", up).await;
    assert_eq!(first["roles"], serde_json::json!(["query", "worker"]));
    assert_eq!(first["flight_address"], cluster.processes.endpoints(Role::Query)[0]);
    let sql = cluster.sql(1).await;
    let answer = sql.run("SELECT node, state, roles FROM system.nodes ORDER BY node").await.unwrap();
    let shown = table(&answer.batches);
    assert!(shown.contains("| query-1 | up    | query,worker |") && shown.contains("query-2"), "{shown}");
    let epochs = sql.numbers("SELECT epoch FROM lake.system.nodes ORDER BY node").await;
    assert_eq!(epochs, [&first["epoch"], &second["epoch"]].map(|epoch| epoch.as_i64().unwrap()));

    // One that is drained is said to be, and a name that nobody has is taken for a mistyped one.
    let at = cluster.processes.endpoints(Role::Metasrv).join(",");
    let drain = async |args: &[&str]| {
        let args = [&["meta", "shards", "drain", "--at", &at][..], args].concat();
        lake(&scratch.path(""), &args).await
    };
    let refused = drain(&["query-3"]).await;
    assert!(refused.code == Some(1) && refused.err.contains("no node query-3 is registered"), "{refused:?}");
    let told = drain(&["query-2"]).await;
    assert!(told.code == Some(0) && told.out.starts_with("query-2 is drained: "), "{told:?}");
    assert_eq!(drain(&[]).await.out, "query-2\n");
    until_listed(&scratch, &cluster, "query-2", |node| node["drained"] == true).await;
    let answer = sql.run("SELECT node FROM system.nodes WHERE drained").await.unwrap();
    let shown = table(&answer.batches);
    assert!(shown.contains("query-2") && !shown.contains("query-1"), "{shown}");
    assert_eq!(drain(&["query-2", "--end"]).await.out, "query-2 is drained no more\n");
    assert_eq!(drain(&["query-2", "--end"]).await.out, "query-2 was not drained\n");

    // A node that sleeps loses its lease, and gets another one; it stays the process that it was.
    let sleeper = cluster.processes.process(ProcessName::query(2)).unwrap();
    sleeper.pause().await.unwrap();
    until_listed(&scratch, &cluster, "query-2", |node| node["state"] == "down").await;
    sleeper.resume().await.unwrap();
    let awake = until_listed(&scratch, &cluster, "query-2", up).await;
    assert_eq!((&awake["epoch"], &awake["process"]), (&second["epoch"], &second["process"]));
    assert!(awake["lease"].as_u64() > second["lease"].as_u64());

    // Somebody starts a second process of the same name: the first one says why it ends.
    let args = [
        "query",
        "--id",
        "query-1",
        "--roles",
        "worker",
        "--listen",
        "127.0.0.1:0",
        "--exit-with-parent",
        "--log-stderr",
    ];
    let mut process = tokio::process::Command::new(LAKE)
        .args(args)
        .args(["--meta", &cluster.processes.endpoints(Role::Metasrv).join(",")])
        .args(["--warehouse", &format!("file://{}", scratch.path("lake-data/warehouse").display())])
        .args(["--dir", scratch.path("other").to_str().unwrap()])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut state = cluster.processes.process(ProcessName::query(1)).unwrap().watch();
    let ended = tokio::time::timeout(PATIENCE, state.wait_for(|state| state.deaths == 1)).await;
    let how = ended.expect("the older process ends").unwrap().last_exit.clone();
    assert!(how.as_deref().is_some_and(|how| how.contains("code 1")), "{how:?}");
    let words = cluster.processes.last_words(ProcessName::query(1));
    assert!(words.contains("another process was registered as node query-1 later"), "{words}");
    let later = until_listed(&scratch, &cluster, "query-1", up).await;
    assert!(later["epoch"].as_u64() > first["epoch"].as_u64() && later["roles"] == serde_json::json!(["worker"]));

    // A new leader knows them all again, under their epochs.
    let leader = cluster.processes.leader(PATIENCE).await.unwrap();
    cluster.processes.process(leader.process).unwrap().kill().await.unwrap();
    let after = until_listed(&scratch, &cluster, "query-1", up).await;
    assert_eq!((&after["epoch"], &after["lease"]), (&later["epoch"], &later["lease"]));
    cluster.processes.start_one(leader.process).await.unwrap();

    // What is stopped in order is listed no more.
    drop(process.stdin.take());
    let ended = tokio::time::timeout(PATIENCE, process.wait()).await.expect("it ends").unwrap();
    assert!(ended.success(), "{ended}");
    until("the node to be listed no more", PATIENCE, || async {
        match listed(&scratch, &cluster, "query-1").await {
            Some(node) => Err(node.to_string()),
            None => Ok(()),
        }
    })
    .await;
    until_listed(&scratch, &cluster, "query-2", up).await;
    cluster.stop().await;
}
