//! Every peer killed at the same moment, under load.

use std::time::Duration;

use lake_chaos::Role;

use crate::common::load::{Load, Outcome};
use crate::common::{Scratch, TestCluster};

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_is_there_after_all_peers_were_killed_at_once() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let load = Load::start(&cluster, 8, Duration::from_secs(10)).await;
    for round in 1..=3 {
        load.until_acknowledged(20).await;
        cluster.processes.kill_role(Role::Metasrv).await.unwrap();
        cluster.processes.start_role(Role::Metasrv).await.unwrap();
        println!("round {round}: all peers killed and back");
    }
    load.until_acknowledged(20).await;
    let outcomes = load.stop().await;
    // Every peer is away for a while, so an error is allowed here; a lost or doubled row is not.
    let unknown = outcomes.iter().filter(|o| matches!(o.outcome, Outcome::Failed { .. })).count();
    println!("{} inserts acknowledged, {unknown} failed", outcomes.len() - unknown);
    cluster.check_rows(&outcomes).await;
    cluster.stop().await;
}
