//! Peers that are restarted on other ports: the membership follows them, and only they can have it changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::support::load::Load;
use crate::support::{TestCluster, eventually, kind};
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;

type Addresses = BTreeMap<u64, v1::Member>;

fn by_id(members: Vec<v1::Member>) -> Addresses {
    members.into_iter().map(|m| (m.id, m)).collect()
}

/// Every member as it was founded, at the addresses that its configuration says now.
fn now(cluster: &TestCluster, founded: &Addresses) -> Addresses {
    let reached = |(id, config): (&u64, &lake_metasrv::Config)| v1::Member {
        raft_address: config.raft_listen.to_string(),
        grpc_address: config.listen.to_string(),
        ..founded[id].clone()
    };
    by_id(cluster.configs.iter().map(reached).collect())
}

/// Waits until every peer knows every peer where it is, and the leader too.
async fn all_know(cluster: &TestCluster, founded: &Addresses) {
    let expected = now(cluster, founded);
    for id in cluster.running.keys() {
        eventually(&format!("peer {id} to know where the others are"), async || {
            let status = cluster.status(*id).await;
            let answer = cluster.cluster(*id).leader(v1::LeaderRequest::default()).await.unwrap().into_inner();
            let leads = |leader: Option<v1::Member>| leader.is_some_and(|leader| expected[&leader.id] == leader);
            let known = by_id(status.voters) == expected && by_id(answer.members) == expected;
            (known && status.learners.is_empty() && leads(status.leader) && leads(answer.leader)).then_some(())
        })
        .await;
    }
}

async fn move_and_start(cluster: &mut TestCluster, moved: &[u64]) {
    for id in moved {
        cluster.relocate(*id);
    }
    for id in 1..=3 {
        cluster.start(id).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_membership_follows_a_peer_that_is_restarted_elsewhere() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let founded = by_id(cluster.status(1).await.voters);
    cluster.put("/kv/a", "1").await;

    for moved in [&[2][..], &[1, 2, 3]] {
        cluster.stop_all().await;
        move_and_start(&mut cluster, moved).await;
        all_know(&cluster, &founded).await;

        let hint = eventually("a follower to say who leads", async || {
            let leader = cluster.leader().await;
            let follower = (1..=3).find(|id| *id != leader).unwrap();
            let txn = Txn { then: vec![Op::put("/kv/a", "2")], ..Txn::default() };
            let error = cluster.kv(follower).txn(v1::TxnRequest { txn: Some(txn.into()), stamp: None }).await.err()?;
            lake_proto::status::detail(&error)?.leader
        })
        .await;
        assert_eq!(hint.grpc_address, cluster.configs[&hint.id].listen.to_string());
    }

    // The membership is enough now: nobody needs to be told any more where the others are.
    cluster.stop_all().await;
    cluster.configs.values_mut().for_each(|config| config.peers.clear());
    move_and_start(&mut cluster, &[]).await;
    all_know(&cluster, &founded).await;
    cluster.put("/kv/a", "3").await;
    for id in 1..=3 {
        assert_eq!(&cluster.get(id, "/kv/a").await.unwrap().value[..], b"3", "peer {id}");
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_peer_is_restarted_elsewhere_while_the_others_serve_and_clients_write() {
    const SOME: u64 = 50;
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let founded = by_id(cluster.status(1).await.voters);
    // Told of the old addresses only.
    let load = Load::start(Arc::new(cluster.client()), 4, "moves");
    load.grows_by(SOME).await;
    let leader = cluster.leader().await;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    for moved in [follower, leader] {
        cluster.stop(moved).await;
        load.grows_by(SOME).await;
        cluster.relocate(moved);
        cluster.start(moved).await;
        // Nobody else is restarted: it is the peer itself that tells the leader where it is.
        all_know(&cluster, &founded).await;
        load.grows_by(SOME).await;
    }
    // Both that have moved are the majority now.
    let stayed = (1..=3).find(|id| ![follower, leader].contains(id)).unwrap();
    cluster.stop(stayed).await;
    load.grows_by(SOME).await;
    load.finish().await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_speaks_for_itself_only_and_to_the_leader_only() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let leader = cluster.leader().await;
    let status = cluster.status(leader).await;
    let members = by_id(status.voters);
    let [caller, other] = *(1..=3).filter(|id| *id != leader).collect::<Vec<_>>() else { panic!("three peers") };
    let ask = async |to: u64, from: &v1::Member, record: v1::Member| {
        let header = v1::RaftHeader {
            cluster_id: status.cluster_id.clone(),
            from_id: from.id,
            from_incarnation: from.incarnation.clone(),
            to_id: to,
            to_incarnation: members[&to].incarnation.clone(),
        };
        let request = v1::ReaddressRequest { header: Some(header), self_: Some(record) };
        cluster.raft(to).readdress(request).await.map_err(|status| kind(&status))
    };
    let me = &members[&caller];
    let elsewhere = |member: &v1::Member| v1::Member { grpc_address: "127.0.0.1:1".into(), ..member.clone() };
    let stranger = v1::Member { id: 9, incarnation: "f".repeat(32), ..me.clone() };

    assert_eq!(ask(leader, me, elsewhere(&members[&other])).await.err(), Some(Kind::WrongIdentity), "of another peer");
    let renamed = v1::Member { incarnation: stranger.incarnation.clone(), ..me.clone() };
    assert_eq!(ask(leader, me, renamed.clone()).await.err(), Some(Kind::WrongIdentity), "another incarnation");
    assert_eq!(ask(leader, &renamed, renamed.clone()).await.err(), Some(Kind::WrongIdentity), "an impostor");
    assert_eq!(ask(leader, &stranger, stranger.clone()).await.err(), Some(Kind::WrongIdentity), "no member");
    let nowhere = v1::Member { raft_address: String::new(), ..me.clone() };
    assert_eq!(ask(leader, me, nowhere).await.err(), Some(Kind::InvalidArgument));
    assert_eq!(ask(other, me, elsewhere(me)).await.err(), Some(Kind::NotLeader));
    ask(leader, me, me.clone()).await.unwrap();

    let after = cluster.status(leader).await;
    assert_eq!(by_id(after.voters), members);
    assert!(after.learners.is_empty());
    if after.term == status.term {
        assert_eq!(after.last_log_index, status.last_log_index, "nothing of this was written");
    }

    // What the membership says falsely of a running peer does not stay.
    ask(leader, me, elsewhere(me)).await.unwrap();
    all_know(&cluster, &members).await;
    cluster.stop_all().await;
}
