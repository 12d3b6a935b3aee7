//! Peers compare the hashes of their states: one that holds something else than the majority stops, and the rest goes on.

use crate::support::{PATIENCE, TestCluster};
use lake_metasrv::snapshot::{self, SnapshotStore};
use lake_metasrv::state::FEATURE_LEVEL;
use lake_metasrv::state::command::Action;
use lake_proto::kv::{Op, Txn};

/// Changes what the newest snapshot of a stopped peer holds, in a way that no checksum can tell.
fn falsify(dir: &std::path::Path) {
    let store = SnapshotStore::open(dir.join("snapshots")).unwrap();
    let newest = store.list().unwrap().into_iter().next().expect("a snapshot").1;
    let mut loaded = snapshot::read(&newest, FEATURE_LEVEL).unwrap();
    let rogue = Txn { then: vec![Op::put("/kv/rogue", "nobody has written this")], ..Txn::default() };
    loaded.state.apply(1, &Action::Txn(rogue).unstamped());
    store.write(&loaded.meta, &loaded.cluster_id, &loaded.state).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_with_another_state_stops_and_the_others_go_on() {
    let mut cluster = TestCluster::founded(3, |config| {
        config.storage.snapshot_entries = 300;
        config.storage.purge_margin_entries = 50;
    })
    .await;
    for n in 0..700 {
        cluster.put(&format!("/kv/{n:04}"), "v").await;
    }
    let leader = cluster.leader().await;
    let odd = (1..=3).find(|id| *id != leader).unwrap();
    cluster.stop(odd).await;
    falsify(&cluster.configs[&odd].dir);
    cluster.start(odd).await;
    let failed = cluster.running[&odd].failed();
    // The next index at which hashes are compared is passed by these.
    let writes = async {
        for n in 0.. {
            cluster.put(&format!("/kv/{:04}", n % 700), "w").await;
        }
    };
    let why = tokio::select! {
        error = failed => error.to_string(),
        () = writes => unreachable!("it never ends"),
        () = tokio::time::sleep(PATIENCE) => panic!("nobody has noticed"),
    };
    assert!(why.contains(&format!("peer {odd}")) && why.contains("majority"), "{why}");
    cluster.put("/kv/after", "the others go on").await;
    cluster.stop_all().await;
}
