//! Two nodes that append to one table, and hand what they append to each other, while one of them is killed between each
//! two steps of that. And what `lake bench` says of such nodes.

use std::time::Duration;

use lake_chaos::{ProcessName, Role};
use serde_json::Value;

use crate::common::load::{Load, judge, rows};
use crate::common::{PATIENCE, Scratch, TestCluster, lake, until};

/// Where a node dies: as a giver, and as the one that commits (`query/src/table/handing.rs`).
const STEPS: [&str; 6] = ["append-written", "handed", "taken", "joined", "version-written", "swapped"];
/// Clients, half of them at each node.
const CLIENTS: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_doubled_whichever_node_dies_at_whichever_step() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let step_file = scratch.path("die-at");
    let variable = ("LAKE_QUERY_DIE_AT".into(), step_file.clone().into_os_string());
    let cluster = TestCluster::start_as(&scratch, |spec| spec.query_env = vec![variable]).await;
    let load = Load::start(&cluster, CLIENTS, Duration::from_secs(20)).await;
    let nodes = [ProcessName::query(1), ProcessName::query(2)];
    for step in STEPS {
        load.until_acknowledged(2 * CLIENTS).await;
        std::fs::write(&step_file, step).unwrap();
        let died = until(&format!("a node to die at {step}"), PATIENCE, || async {
            let dead = nodes.iter().find(|name| cluster.processes.process(**name).unwrap().state().pid.is_none());
            dead.copied().ok_or_else(|| "both live".to_owned())
        })
        .await;
        std::fs::remove_file(&step_file).unwrap();
        let how = cluster.processes.process(died).unwrap().state().last_exit.clone().unwrap_or_default();
        assert!(
            how.contains("SIGKILL") || how.contains("signal 9") || how.contains("signal: 9"),
            "{step}: {died}: {how}"
        );
        // The other one goes on alone.
        load.until_acknowledged(CLIENTS).await;
        for name in nodes {
            if cluster.processes.process(name).unwrap().state().pid.is_none() {
                cluster.processes.start_one(name).await.unwrap();
            }
        }
    }
    load.until_acknowledged(2 * CLIENTS).await;
    let outcomes = load.stop().await;
    assert_eq!(cluster.processes.endpoints(Role::Query).len(), nodes.len());
    for node in 0..nodes.len() {
        let sql = cluster.sql(node).await;
        until("every acknowledged row, and none twice", PATIENCE, || async { judge(&outcomes, &rows(&sql).await) })
            .await;
    }
    measure_appends(&scratch, &cluster).await;
    cluster.stop().await;
}

/// What `lake bench` prints as JSON.
async fn bench(scratch: &Scratch, args: &[&str]) -> Value {
    let printed = lake(&scratch.path(""), &[&["bench"][..], args, &["--format", "json"]].concat()).await;
    assert_eq!(printed.code, Some(0), "{args:?}: {printed:?}");
    serde_json::from_str(&printed.out).unwrap_or_else(|e| panic!("{args:?}: {e}: {printed:?}"))
}

/// Positive figures of a report.
fn figures(report: &Value, names: &[&str]) -> Vec<f64> {
    let figure = |name: &&str| report[*name].as_f64().filter(|figure| *figure > 0.0);
    names.iter().map(|name| figure(name).unwrap_or_else(|| panic!("{name} of {report}"))).collect()
}

/// `lake bench append` on nodes that run: each way of committing is told, and of no append it is told that it has failed.
async fn measure_appends(scratch: &Scratch, cluster: &TestCluster) {
    let nodes = cluster.processes.endpoints(Role::Query).join(",");
    let lengths = ["--seconds", "2", "--one-by-one-seconds", "2", "--warmup", "0", "--look-every", "1"];
    let args = [&["append", "--at", &nodes, "--clients", "2"][..], &lengths].concat();
    // A busy machine may not end a single append in so short a time.
    let reports = until("appends of both ways", PATIENCE, || async {
        let reports = bench(scratch, &args).await;
        let all = reports.as_array().cloned().unwrap_or_default();
        let some = all.iter().all(|report| report["acknowledged_per_second"].as_f64().is_some_and(|rate| rate > 0.0));
        if all.len() == 2 && some { Ok(all) } else { Err(reports.to_string()) }
    })
    .await;
    for (report, way) in reports.iter().zip(["one-by-one", "together"]) {
        assert_eq!(report["way"], way, "{report}");
        for name in ["clients", "nodes", "seconds"] {
            assert_eq!(report[name], 2, "{name} of {report}");
        }
        assert_eq!((&report["success_rate"], &report["last_error"]), (&Value::from(1.0), &Value::Null), "{report}");
        for name in ["failed", "missing", "doubled", "unasked", "unseen"] {
            assert_eq!(report[name], 0, "{name} of {report}");
        }
        assert!(report["looks"].is_u64(), "{report}");
        for name in ["first_part_per_second", "last_part_per_second"] {
            assert!(report[name].is_f64(), "{name} of {report}");
        }
        let told = figures(report, &["p50_ms", "p99_ms", "max_ms", "acknowledged_per_second", "rows"]);
        assert!(told[0] <= told[1] && told[1] <= told[2], "{report}");
        assert!(2.0 * told[3] <= told[4], "fewer rows than were acknowledged: {report}");
    }
}

/// `lake bench sql`, with a cluster of its own: answers are right, and the report has all that scripts read.
#[tokio::test(flavor = "multi_thread")]
async fn sql_is_measured_beside_datafusion() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let dir = scratch.path("bench").display().to_string();
    let round = ["--rounds", "1", "--dir", &dir];
    let small = ["points", "--queries", "40", "--clients", "2", "--rows", "1000"];
    let report = bench(&scratch, &[&["sql"][..], &small, &round].concat()).await;
    for (name, said) in [("rounds", 1), ("queries", 40), ("clients", 2), ("rows", 1000)] {
        assert_eq!(report[name], said, "{name} of {report}");
    }
    let told = figures(&report, &["p50_ms", "p99_ms", "lake_per_second", "datafusion_per_second", "seconds", "hits"]);
    assert!(told[0] <= told[1], "{report}");
    assert!(report["metasrv_calls"].is_u64() && report["confirmations"].is_u64(), "{report}");
    assert!(report["metasrv_calls_by_reason"].is_object(), "{report}");
    assert!(!scratch.path("bench").exists(), "the directory is removed");

    let report = bench(&scratch, &[&["sql", "insert", "--scale", "0.01"][..], &round].concat()).await;
    assert_eq!((&report["rounds"], &report["scale"]), (&Value::from(1), &Value::from(0.01)), "{report}");
    assert_eq!(report["rows"], 60_175, "{report}");
    let each = ["rows_per_second", "files", "bytes"];
    for whose in ["lake", "datafusion"] {
        figures(&report, &each.map(|name| format!("{whose}_{name}")).each_ref().map(String::as_str));
    }
    figures(&report, &["ratio"]);
}
