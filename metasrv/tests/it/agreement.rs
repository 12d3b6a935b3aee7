//! Peers compare the hashes of their states: one that holds something else than the majority stops, and the rest goes on.

use std::collections::BTreeSet;

use crate::support::{PATIENCE, TestCluster, eventually, kind};
use lake_metasrv::Server;
use lake_metasrv::rescue::reading;
use lake_metasrv::snapshot::{self, SnapshotStore};
use lake_metasrv::state::FEATURE_LEVEL;
use lake_metasrv::state::command::Action;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::read_options::Consistency;

/// Changes what the newest snapshot of a stopped peer holds, in a way that no checksum can tell.
fn falsify(dir: &std::path::Path, with: &'static str) {
    let store = SnapshotStore::open(dir.join("snapshots")).unwrap();
    let newest = store.list().unwrap().into_iter().next().expect("a snapshot").1;
    let mut loaded = snapshot::read(&newest, FEATURE_LEVEL).unwrap();
    let rogue = Txn { then: vec![Op::put("/kv/rogue", with)], ..Txn::default() };
    loaded.state.apply(1, &Action::Txn(rogue).unstamped());
    store.write(&loaded.meta, &loaded.cluster_id, &loaded.state).unwrap();
}

/// Three peers with a snapshot each, and the next index at which they compare their states not far away.
async fn with_snapshots() -> TestCluster {
    let cluster = TestCluster::founded(3, |config| {
        config.storage.snapshot_entries = 300;
        config.storage.purge_margin_entries = 50;
    })
    .await;
    for n in 0..700 {
        cluster.put(&format!("/kv/{n:04}"), "v").await;
    }
    cluster
}

/// Restarts a peer on a state that nobody else has.
async fn restart_falsified(cluster: &mut TestCluster, id: u64, with: &'static str) {
    cluster.stop(id).await;
    falsify(&cluster.configs[&id].dir, with);
    cluster.start(id).await;
}

/// What any call to a peer is refused with.
async fn refused(cluster: &TestCluster, id: u64, sender: &v1::Member) -> Vec<tonic::Status> {
    let status = cluster.status(id).await;
    let itself = status.self_.unwrap();
    let header = v1::RaftHeader {
        cluster_id: status.cluster_id,
        from_id: sender.id,
        from_incarnation: sender.incarnation.clone(),
        to_id: id,
        to_incarnation: itself.incarnation,
    };
    let local = v1::ReadOptions { consistency: Consistency::Local as i32, ..v1::ReadOptions::default() };
    let vote = v1::VoteRequest { header: Some(header.clone()), ..v1::VoteRequest::default() };
    let append = v1::AppendRequest { header: Some(header), ..v1::AppendRequest::default() };
    vec![
        cluster.try_get(id, "/kv/0000", local).await.unwrap_err(),
        cluster.raft(id).vote(vote).await.unwrap_err(),
        cluster.raft(id).append(append).await.unwrap_err(),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_with_another_state_stops_for_good_and_the_others_go_on() {
    let mut cluster = with_snapshots().await;
    let leader = cluster.leader().await;
    let odd = (1..=3).find(|id| *id != leader).unwrap();
    restart_falsified(&mut cluster, odd, "nobody has written this").await;
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
        () = tokio::time::sleep(4 * PATIENCE) => panic!("nobody has noticed"),
    };
    assert!(why.contains(&format!("peer {odd}")) && why.contains("majority"), "{why}");
    // Its process is still there.
    let sender = cluster.status(leader).await.self_.unwrap();
    for refused in refused(&cluster, odd, &sender).await {
        assert_eq!(kind(&refused), Kind::Unavailable);
        assert!(refused.message().contains("not what a majority of the voters has"), "{refused:?}");
    }
    cluster.put("/kv/after", "the others go on").await;

    cluster.stop(odd).await;
    let config = cluster.configs[&odd].clone();
    let dir = config.dir.clone();
    let restarted = Server::start(config).await.err().expect("it must not come back").to_string();
    assert!(restarted.contains("majority") && restarted.contains("learner"), "{restarted}");
    let reading = reading::read(&dir, BTreeSet::new()).await.unwrap();
    assert!(reading.is_damaged() && !reading.is_whole(), "it counts as no survivor: {:?}", reading.findings);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_majority_for_any_state_nothing_is_written_and_a_restart_knows_it() {
    let mut cluster = with_snapshots().await;
    let leader = cluster.leader().await;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    for (id, with) in followers.iter().zip(["one", "another"]) {
        restart_falsified(&mut cluster, *id, with).await;
    }
    let leader = cluster.leader().await;
    let put = async |cluster: &TestCluster| {
        let txn = Txn { then: vec![Op::put("/kv/0000", "w")], ..Txn::default() };
        let mut request = tonic::Request::new(v1::TxnRequest { txn: Some(txn.into()), stamp: None });
        request.set_timeout(PATIENCE);
        cluster.kv(leader).txn(request).await
    };
    let refusal = eventually("writes to be refused", async || {
        for _ in 0..50 {
            if let Err(refused) = put(&cluster).await
                && refused.message().contains("no majority of the voters has the same state")
            {
                return Some(refused);
            }
        }
        None
    })
    .await;
    assert_eq!(kind(&refusal), Kind::Unavailable);
    let status = cluster.status(leader).await;
    assert!(status.problem.contains("no majority"), "{status:?}");
    let remove = v1::RemoveRequest { id: followers[0], force: false };
    let unchanged = cluster.cluster(leader).remove(remove).await.unwrap_err();
    assert!(unchanged.message().contains("no majority"), "{unchanged:?}");

    cluster.stop(leader).await;
    cluster.start(leader).await;
    let status = cluster.status(leader).await;
    assert!(status.problem.contains("no majority") && status.problem.contains("alarm"), "{status:?}");
    cluster.stop_all().await;
}
