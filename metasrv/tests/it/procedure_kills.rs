//! The leader is killed at each point of each step of a procedure, and in the end it was done once in effect. In
//! builds with the feature `failpoints` only.

use std::sync::Arc;
use std::time::Instant;

use lake_client::procedures::State;
use lake_client::procedures::purge::{CHECK, DELETE, RETAIN};
use lake_client::remote::node::NodeKeeper;
use lake_metasrv::peer::procedures::failpoints::{Point, VARIABLE};

use crate::procedures::{FILES, Worker, deleted, submit, until};
use crate::support::processes::Processes;
use crate::support::{PATIENCE, eventually};

/// The steps that a purge comes to, the first one being that it is accepted.
const STEPS: [&str; 4] = ["new", RETAIN, CHECK, DELETE];

/// Whether a peer's process has ended, which nobody has waited for yet.
fn is_dead(peers: &Processes, id: u64) -> bool {
    let stat = peers.peers.pid(id).map(|pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default());
    stat.is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('Z')))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_procedure_is_done_once_wherever_its_leader_dies() {
    let dir = tempfile::tempdir().unwrap();
    let die_at = dir.path().join("die-at");
    let mut peers = Processes::founded_in(vec![(VARIABLE.to_owned(), die_at.clone().into_os_string())]).await;
    let store = peers.store();
    let worker = Worker::new();
    let node: Arc<Worker> = worker.clone();
    let _keeper = NodeKeeper::start(peers.store(), "w", node);
    for (n, (step, point)) in STEPS.iter().flat_map(|step| Point::ALL.map(|point| (step, point))).enumerate() {
        let table = format!("t{n}");
        std::fs::write(&die_at, point.of(step)).unwrap();
        peers.leader().await;
        let id = submit(&store, &table).await;
        eventually("the leader to come to the point", async || (!die_at.exists()).then_some(())).await;
        let died = eventually("a peer to die", async || (1..=3).find(|id| is_dead(&peers, *id))).await;
        peers.peers.ended(died, PATIENCE).await.unwrap();
        let began = Instant::now();
        let done = until(&store, &id, |record| record.state == State::Done).await.record;
        println!("{step} {point:?}: done {:.1?} after the leader had died", began.elapsed());
        assert_eq!((deleted(&done), done.steps), (FILES, 2 + FILES), "{step} {point:?}: each step is committed once");
        assert_eq!(worker.deleted_of(&table), (0..FILES).collect(), "{step} {point:?}");
        peers.spawn(died);
        eventually("it to be back", async || peers.status(died).await.and_then(|status| status.leader).map(drop)).await;
    }
}
