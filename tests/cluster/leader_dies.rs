//! The leader is killed while clients write: they see nothing but a pause.

use std::time::Instant;

use lake_proto::v1::status_response::Stage;

use crate::common::load::{Load, Outcome};
use crate::common::{PATIENCE, Scratch, TestCluster, until};

const KILLS: usize = 5;
const CLIENTS: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn every_insert_is_there_once_though_the_leader_is_killed_five_times() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let load = Load::start(&cluster, CLIENTS, PATIENCE).await;

    let mut pauses = Vec::new();
    for kill in 1..=KILLS {
        load.until_acknowledged(16).await;
        let leader = cluster.processes.leader(PATIENCE).await.unwrap();
        let killed_at = Instant::now();
        cluster.processes.process(leader.process).unwrap().kill().await.unwrap();
        // More than the answers that were on their way.
        load.until_acknowledged(3 * CLIENTS).await;
        let pause = load.pause_around(killed_at);
        println!("kill {kill}: {} led term {}; {} ms without a commit", leader.process, leader.term, pause.as_millis());
        pauses.push(pause);

        cluster.processes.start_one(leader.process).await.unwrap();
        // The next kill needs a quorum beside it.
        until("the killed peer to be back and up to date", PATIENCE, || async {
            let statuses = cluster.processes.statuses().await;
            let newest = statuses.iter().map(|s| s.applied_index).max().unwrap_or(0);
            let serving = statuses.iter().filter(|s| s.stage() == Stage::Member);
            let behind = serving.filter(|s| s.applied_index + 1000 >= newest).count();
            if behind == 3 { Ok(()) } else { Err(format!("{behind} of 3 peers serve and are up to date")) }
        })
        .await;
    }
    let outcomes = load.stop().await;
    pauses.sort();
    println!(
        "{} inserts; without a commit for: median {} ms, longest {} ms",
        outcomes.len(),
        pauses[KILLS / 2].as_millis(),
        pauses[KILLS - 1].as_millis()
    );
    for o in &outcomes {
        if let Outcome::Failed { message } = &o.outcome {
            panic!("insert {} of client {} failed after {:?}: {message}", o.number, o.client, o.took);
        }
    }
    cluster.check_rows(&outcomes).await;
    cluster.stop().await;
}
