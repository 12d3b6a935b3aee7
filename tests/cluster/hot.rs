//! Two nodes that append to one table, and hand what they append to each other, while one of them is killed between each
//! two steps of that.

use std::time::Duration;

use lake_chaos::{ProcessName, Role};

use crate::common::load::{Load, judge, rows};
use crate::common::{PATIENCE, Scratch, TestCluster, until};

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
    cluster.stop().await;
}
