//! Wall clocks jump, of query nodes and of peers: no lease ends, no shard moves, and nothing that waits begins.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use lake_chaos::nemesis::clock;
use lake_chaos::{ProcessName, Role};
use serde_json::Value;

use crate::common::install::install;
use crate::common::{PATIENCE, Scratch, TestCluster, lake, until};

/// Of a query node's lease.
const LEASE: Duration = Duration::from_secs(10);
const DAY_S: i64 = 86_400;
/// A clock that is off by this has jumped.
const JUMPED_S: i64 = DAY_S - 1000;

/// What `lake meta` lists.
async fn listed(scratch: &Scratch, cluster: &TestCluster, what: &[&str]) -> Result<Value, String> {
    let at = cluster.processes.endpoints(Role::Metasrv).join(",");
    let args = [&["meta"][..], what, &["--at", &at, "--format", "json"]].concat();
    let printed = lake(&scratch.path(""), &args).await;
    serde_json::from_str(&printed.out).map_err(|e| format!("{e}: {printed:?}"))
}

/// These fields of each.
fn of_each(listing: &Value, what: &str, fields: &[&str]) -> Vec<Vec<Value>> {
    let each = listing[what].as_array().into_iter().flatten();
    each.map(|one| fields.iter().map(|field| one[field].clone()).collect()).collect()
}

/// By how much a time since 1970 is ahead of this process's clock, in seconds.
fn ahead_s(shown_s: i64) -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    shown_s - i64::try_from(now.as_secs()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_owned_and_what_waits_does_not_go_by_wall_clocks() {
    let _alone = crate::common::alone().await;
    install(&["libfaketime"], || clock::library().is_none());
    let library = clock::library().expect("libfaketime (the package is usually called faketime or libfaketime)");
    let scratch = Scratch::new();
    let (of_peers, of_nodes) = (scratch.path("clocks-of-peers"), scratch.path("clocks-of-nodes"));
    let cluster = TestCluster::start_as(&scratch, |spec| {
        let lease = LEASE.as_millis().to_string();
        let args = ["--node-heartbeat-ms", "500", "--node-lease-ms", &lease, "--shards", "8"];
        let retention = ["--purge-retention-secs", "3600"];
        spec.metasrv_args = args.iter().chain(&retention).map(|arg| (*arg).to_owned()).collect();
        spec.metasrv_env = clock::environment(&library, &of_peers, &[1, 2, 3]).unwrap();
        spec.query_env = clock::environment(&library, &of_nodes, &[1, 2]).unwrap();
    })
    .await;
    let (sql, other) = (cluster.sql(0).await, cluster.sql(1).await);
    for table in ["t", "u"] {
        sql.run(&format!("CREATE TABLE {table} AS SELECT 1 AS x")).await.unwrap();
    }
    sql.run("DROP TABLE t PURGE").await.unwrap();
    let shards = until("each worker to have its half", PATIENCE, || async {
        // By itself the leader heeds how busy the workers are, and leaves a small difference as it is.
        let at = cluster.processes.endpoints(Role::Metasrv).join(",");
        let balanced = lake(&scratch.path(""), &["meta", "shards", "balance", "--at", &at]).await;
        let shards = listed(&scratch, &cluster, &["shards", "list"]).await?;
        let held = of_each(&shards, "shards", &["state"]).iter().all(|of| of[0] == "held");
        let led = |node: &str| of_each(&shards, "shards", &["node"]).iter().filter(|of| of[0] == node).count();
        match held && led("query-1") == 4 && led("query-2") == 4 {
            true => Ok(shards.clone()),
            false => Err(format!("{balanced:?}, then {shards}")),
        }
    })
    .await;
    let tenures = |listing: &Value| of_each(listing, "nodes", &["node", "process", "epoch", "lease"]);
    let routes = |listing: &Value| of_each(listing, "shards", &["shard", "state", "node", "fence"]);
    let nodes = tenures(&listed(&scratch, &cluster, &["nodes"]).await.unwrap());
    assert_eq!(nodes.len(), 2);
    let routes_before = routes(&shards);

    // Everybody's clock is wrong, in one way and then in the other.
    let leader = cluster.processes.leader(PATIENCE).await.unwrap().process;
    let jump = |file: PathBuf, seconds: i64| std::fs::write(file, format!("{seconds:+} x1.0")).unwrap();
    for direction in [1, -1] {
        for id in 1..=3 {
            let leads = ProcessName::metasrv(id) == leader;
            jump(clock::file(&of_peers, id), if leads { direction * DAY_S } else { -direction * DAY_S });
        }
        jump(clock::file(&of_nodes, 1), direction * DAY_S);
        jump(clock::file(&of_nodes, 2), -direction * DAY_S);
        for (sql, direction) in [(&sql, direction), (&other, -direction)] {
            until("a node's clock to have jumped", PATIENCE, || async {
                let shown = sql.numbers("SELECT CAST(floor(date_part('epoch', now())) AS BIGINT)").await[0];
                let off = ahead_s(shown) - direction * DAY_S;
                if off.abs() < DAY_S - JUMPED_S { Ok(()) } else { Err(format!("it is {off} s off that")) }
            })
            .await;
        }
        // Longer than a lease lives that is not renewed.
        let began = Instant::now();
        until("a lease's life to pass", 10 * LEASE, || async {
            let now = tenures(&listed(&scratch, &cluster, &["nodes"]).await?);
            assert_eq!(now, nodes, "{direction}");
            let now = routes(&listed(&scratch, &cluster, &["shards", "list"]).await?);
            assert_eq!(now, routes_before, "{direction}");
            let passed = began.elapsed();
            if passed > LEASE + LEASE / 5 { Ok(()) } else { Err(format!("{passed:?} have")) }
        })
        .await;
        if direction == 1 {
            // Whoever leads dates what it accepts by its clock, which has jumped.
            sql.run("DROP TABLE u PURGE").await.unwrap();
            until("a peer's clock to have jumped", PATIENCE, || async {
                let listing = listed(&scratch, &cluster, &["proc", "list"]).await?;
                let of = of_each(&listing, "procedures", &["subject", "accepted_ms", "changed_unix_ms"]);
                let of_u = of.iter().find(|of| of[0] == "default.u" && !of[1].is_null());
                let dated = of_u.and_then(|of| of[2].as_i64()).map(|ms| ahead_s(ms / 1000));
                match dated {
                    Some(ahead) if ahead.abs() > JUMPED_S => Ok(()),
                    other => Err(format!("{other:?} s ahead: {listing}")),
                }
            })
            .await;
        }
        // An hour has passed on no clock that counts.
        let listing = listed(&scratch, &cluster, &["proc", "list"]).await.unwrap();
        let of = of_each(&listing, "procedures", &["state", "step"]);
        assert!(!of.is_empty() && of.iter().all(|of| of[0] == "active" && of[1] == "retain"), "{listing}");
    }
    for table in ["t", "u"] {
        sql.run(&format!("UNDROP TABLE {table}")).await.unwrap();
        assert_eq!(sql.numbers(&format!("SELECT x FROM {table}")).await, [1]);
    }
    cluster.stop().await;
}
