//! The life of a cluster, over real gRPC: peers join, vote, are replaced and removed, and the leadership moves, while clients
//! write.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::load::{DEADLINE, Load};
use crate::support::{PATIENCE, TestCluster, eventually, kind};
use lake_client::remote::admin;
use lake_client::secret::Secret;
use lake_client::store::{Error, MetaStore};
use lake_metasrv::EmbeddedStore;
use lake_metasrv::config::Config;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::status_response::Stage;
use tonic::Request;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn ids(members: &[v1::Member]) -> BTreeSet<u64> {
    members.iter().map(|m| m.id).collect()
}

/// A request with the time that operators give.
fn patiently<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(Duration::from_secs(30));
    request
}

/// Waits until every running peer sees exactly these voters, no learner, and no change under way.
async fn all_see(cluster: &TestCluster, voters: &[u64]) {
    let voters: BTreeSet<u64> = voters.iter().copied().collect();
    for id in cluster.running.keys() {
        eventually(&format!("peer {id} to see the voters {voters:?}"), async || {
            let status = cluster.status(*id).await;
            (ids(&status.voters) == voters && status.learners.is_empty() && !status.changing_voters).then_some(())
        })
        .await;
    }
}

/// The answer, or nothing while another change is under way: that of a peer which joins by itself ends a little after the
/// learner is seen.
fn in_turn<T>(answer: Result<T, Error>) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(Error::Refused { message, .. }) if message.contains("ask again once that has ended") => None,
        Err(error) => panic!("{error}"),
    }
}

/// Asks until the learner votes.
async fn promoted(cluster: &TestCluster, id: u64) {
    eventually(&format!("peer {id} to be promoted"), async || {
        in_turn(cluster.client().promote(id, soon()).await)?.voter.then_some(())
    })
    .await;
}

async fn follower(cluster: &TestCluster) -> u64 {
    let leader = cluster.leader().await;
    *cluster.running.keys().find(|id| **id != leader).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_peer_grows_to_three_while_clients_write() {
    let mut cluster = TestCluster::founded(1, |config| {
        config.storage.snapshot_entries = 200;
        config.storage.purge_margin_entries = 20;
    })
    .await;
    let load = Load::start(Arc::new(cluster.client()), 4, "growth");
    // Far enough that the log alone no longer holds everything.
    load.grows_by(500).await;
    eventually("the log to be purged", async || (cluster.status(1).await.purged_index > 0).then_some(())).await;

    // One is told where the cluster is, and asks itself; it may ask anyone, also through peers that are not there.
    let join = vec!["127.0.0.1:1".to_owned(), cluster.configs[&1].listen.to_string()];
    cluster.prepare(2, |config| config.join = join);
    cluster.start(2).await;
    eventually("peer 2 to be a learner", async || ids(&cluster.status(1).await.learners).contains(&2).then_some(()))
        .await;
    promoted(&cluster, 2).await;
    // The other is added by an operator, twice.
    cluster.prepare(3, |_| {});
    cluster.start(3).await;
    assert_eq!(cluster.status(3).await.stage(), Stage::Fresh, "a fresh peer that was told nothing waits");
    let first = cluster.client().join(cluster.named(3), soon()).await.unwrap();
    let again = cluster.client().join(cluster.named(3), soon()).await.unwrap();
    assert_eq!((first.joined, again.joined, &first.member), (true, false, &again.member));
    // While it is away and behind it does not come to vote, and the answer says how far behind it is.
    cluster.stop(3).await;
    let away = |progress: &v1::Progress| progress.id == 3 && !progress.answers && progress.lag_entries > 0;
    eventually("the leader to miss it", async || {
        let leader = cluster.leader().await;
        cluster.status(leader).await.progress.iter().any(away).then_some(())
    })
    .await;
    let behind = eventually("its turn", async || in_turn(cluster.client().promote(3, soon()).await)).await;
    assert!(!behind.voter && behind.lag_entries > 0, "{behind:?}");
    assert_eq!(ids(&cluster.status(1).await.voters), BTreeSet::from([1, 2]));
    cluster.start(3).await;
    promoted(&cluster, 3).await;
    assert!(cluster.client().promote(3, soon()).await.unwrap().voter, "asked again, it is the same");
    load.grows_by(100).await;
    all_see(&cluster, &[1, 2, 3]).await;
    println!("the slowest write of the growth took {:?}", load.slowest());
    load.finish().await;

    // It is a cluster of three: it does without any one of them.
    let leader = cluster.leader().await;
    cluster.stop(leader).await;
    cluster.put("/kv/after", "1").await;
    cluster.start(leader).await;
    assert!(cluster.get(leader, "/kv/after").await.is_some());
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_began_embedded_grows_to_three() {
    let mut cluster = TestCluster::fresh(0, |_| {}).await;
    cluster.prepare(1, |_| {});
    let store = EmbeddedStore::open(cluster.configs[&1].dir.clone()).await.unwrap();
    store.cas("/kv/a", None, "1".into(), soon()).await.unwrap();
    store.shutdown().await;
    cluster.start(1).await;
    for id in [2, 3] {
        let join = vec![cluster.configs[&1].listen.to_string()];
        cluster.prepare(id, |config| config.join = join);
        cluster.start(id).await;
    }
    for id in [2, 3] {
        eventually("the learner", async || ids(&cluster.status(1).await.learners).contains(&id).then_some(())).await;
    }
    for id in [2, 3] {
        promoted(&cluster, id).await;
    }
    all_see(&cluster, &[1, 2, 3]).await;
    let first = cluster.status(2).await.voters.into_iter().find(|m| m.id == 1).unwrap();
    assert_eq!(first.raft_address, cluster.configs[&1].raft_listen.to_string(), "its record has addresses now");
    cluster.stop(1).await;
    assert_eq!(&cluster.get(3, "/kv/a").await.unwrap().value[..], b"1");
    cluster.put("/kv/b", "2").await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_peer_is_replaced_while_clients_write() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let load = Load::start(Arc::new(cluster.client()), 4, "replacement");
    load.grows_by(50).await;
    let dead = follower(&cluster).await;
    cluster.stop(dead).await;
    cluster.prepare(4, |_| {});
    cluster.start(4).await;
    assert!(cluster.client().replace(dead, cluster.named(4), soon()).await.unwrap().replaced);
    let again = cluster.client().replace(dead, cluster.named(4), soon()).await.unwrap();
    assert!(!again.replaced, "it was replaced before");
    let voters: Vec<u64> = (1..=4).filter(|id| *id != dead).collect();
    all_see(&cluster, &voters).await;
    load.grows_by(50).await;
    load.finish().await;
    // The fresh one carries its part: with one of the old ones away there is a majority only with it.
    let old = *voters.iter().find(|id| **id != 4).unwrap();
    cluster.stop(old).await;
    cluster.put("/kv/after", "1").await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_to_go_hands_over_first() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let load = Load::start(Arc::new(cluster.client()), 4, "leader-removed");
    load.grows_by(50).await;
    let leader = cluster.leader().await;
    // Asked directly, it names who leads now; the client follows.
    let error = cluster.cluster(leader).remove(patiently(v1::RemoveRequest { id: leader, force: false })).await;
    let detail = lake_proto::status::detail(&error.unwrap_err()).unwrap();
    assert_eq!(detail.kind(), Kind::NotLeader);
    assert!(detail.leader.is_some_and(|named| named.id != leader));
    assert!(cluster.client().remove(leader, false, soon()).await.unwrap().removed);
    assert!(!cluster.client().remove(leader, false, soon()).await.unwrap().removed, "it was removed before");
    load.grows_by(50).await;
    load.finish().await;

    // The removed peer, which is up, learns of it and stops serving.
    let reason = cluster.running[&leader].failed();
    let reason = tokio::time::timeout(PATIENCE, reason).await.expect("the removed peer ends").to_string();
    assert!(reason.contains("was removed") && reason.contains("from 4 on"), "{reason}");
    let local =
        v1::ReadOptions { consistency: v1::read_options::Consistency::Local as i32, ..v1::ReadOptions::default() };
    let error = cluster.try_get(leader, "/kv/x", local).await.unwrap_err();
    assert_eq!(kind(&error), Kind::Unavailable, "a client that knows it as the leader goes on elsewhere");
    assert!(error.message().contains("was removed"), "{}", error.message());
    let status = cluster.status(leader).await;
    assert_eq!(status.stage(), Stage::Stopped);
    assert!(status.problem.contains("was removed"), "{}", status.problem);
    cluster.stop(leader).await;
    let left: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    all_see(&cluster, &left).await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn removals_that_would_leave_no_majority_are_refused() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let dead = follower(&cluster).await;
    cluster.stop(dead).await;
    let leader = cluster.leader().await;
    let other = (1..=3).find(|id| *id != dead && *id != leader).unwrap();
    let refused = |error: Error| match error {
        Error::Refused { message, .. } => message,
        other => panic!("{other}"),
    };
    let said = refused(cluster.client().remove(other, false, soon()).await.unwrap_err());
    assert!(said.contains("no majority") && said.contains(&format!("only {{{leader}}} answer")), "{said}");
    cluster.put("/kv/still", "1").await;

    // The one that is gone may go, and then so may another: two are left, and both answer.
    assert!(cluster.client().remove(dead, false, soon()).await.unwrap().removed);
    all_see(&cluster, &[leader, other]).await;
    let said = refused(cluster.client().remove(9, false, soon()).await.unwrap_err());
    assert!(said.contains("peer 9 is no member"), "{said}");
    assert!(cluster.client().remove(other, false, soon()).await.unwrap().removed);
    let error = cluster.cluster(leader).remove(v1::RemoveRequest { id: leader, force: true }).await.unwrap_err();
    assert_eq!(kind(&error), Kind::UnsafeChange, "the last voter stays, whatever is said");
    assert!(error.message().contains("last voter"), "{}", error.message());
    cluster.put("/kv/alone", "1").await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_change_is_told_what_is_under_way() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    // It takes connections, and never says a word.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = v1::Member {
        id: 2,
        raft_address: silent.local_addr().unwrap().to_string(),
        grpc_address: "127.0.0.1:1".into(),
        incarnation: String::new(),
    };
    let mut first = cluster.cluster(1);
    let first = tokio::spawn(async move {
        loop {
            // The second may have been a moment quicker.
            let error = first.join(patiently(v1::JoinRequest { member: Some(nobody.clone()) })).await.unwrap_err();
            if kind(&error) != Kind::ChangeUnderWay {
                return error;
            }
        }
    });
    let error = eventually("the first change to be under way", async || {
        let error = cluster.cluster(1).remove(v1::RemoveRequest { id: 7, force: false }).await.unwrap_err();
        (kind(&error) == Kind::ChangeUnderWay).then_some(error)
    })
    .await;
    assert!(error.message().contains("adding peer 2"), "{}", error.message());
    cluster.put("/kv/a", "1").await;
    let error = first.await.unwrap();
    assert_eq!(kind(&error), Kind::Unavailable);
    assert!(error.message().contains("peer 2") && error.message().contains("ask again"), "{}", error.message());
    // Its end lets others in, also when its caller goes away.
    let nobody = v1::Member { id: 2, raft_address: silent.local_addr().unwrap().to_string(), ..cluster.named(1) };
    let mut request = Request::new(v1::JoinRequest { member: Some(nobody) });
    request.set_timeout(Duration::from_millis(100));
    assert!(cluster.cluster(1).join(request).await.is_err());
    cluster.prepare(3, |_| {});
    cluster.start(3).await;
    assert!(cluster.client().join(cluster.named(3), soon()).await.unwrap().joined);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_peer_that_comes_back_disturbs_nobody_and_is_told() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let gone = follower(&cluster).await;
    let record = cluster.status(gone).await.self_.unwrap();
    cluster.stop(gone).await;
    assert!(cluster.client().remove(gone, false, soon()).await.unwrap().removed);
    let left: Vec<u64> = (1..=3).filter(|id| *id != gone).collect();
    all_see(&cluster, &left).await;
    let leader = cluster.leader().await;
    let before = cluster.status(leader).await;

    cluster.start(gone).await;
    let reason = tokio::time::timeout(PATIENCE, cluster.running[&gone].failed()).await.expect("it ends").to_string();
    assert!(reason.contains("was removed") && reason.contains("empty data directory"), "{reason}");
    assert!(cluster.try_get(gone, "/kv/a", v1::ReadOptions::default()).await.is_err());
    cluster.stop(gone).await;

    // Whatever it might still send is refused.
    for id in &left {
        let to = cluster.status(*id).await.self_.unwrap();
        let header = v1::RaftHeader {
            cluster_id: before.cluster_id.clone(),
            from_id: gone,
            from_incarnation: record.incarnation.clone(),
            to_id: *id,
            to_incarnation: to.incarnation,
        };
        let vote = v1::VoteRequest {
            header: Some(header),
            vote: Some(v1::Vote { term: before.term + 50, node_id: gone, committed: false }),
            last_log_id: Some(v1::LogId { term: before.term + 40, node_id: 0, index: before.last_log_index + 100 }),
            leadership_transfer: true,
        };
        for answer in [cluster.raft(*id).vote(vote.clone()).await, cluster.raft(*id).pre_vote(vote).await] {
            assert_eq!(kind(&answer.unwrap_err()), Kind::WrongIdentity);
        }
    }
    cluster.put("/kv/b", "1").await;
    let after = cluster.status(cluster.leader().await).await;
    assert_eq!((after.term, after.leader.unwrap().id), (before.term, leader), "the term has not risen");

    // It stays known as removed over a restart of all that are left, and its id is never used again.
    cluster.stop_all().await;
    for id in &left {
        cluster.start(*id).await;
    }
    cluster.prepare(gone, |_| {});
    std::fs::remove_dir_all(&cluster.configs[&gone].dir).unwrap();
    cluster.start(gone).await;
    let error = cluster.client().join(cluster.named(gone), soon()).await.unwrap_err().to_string();
    assert!(error.contains("was removed") && error.contains("from 4 on"), "{error}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wiped_peer_is_refused_under_its_old_id_and_welcome_under_a_new_one() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let wiped = follower(&cluster).await;
    cluster.stop(wiped).await;
    std::fs::remove_dir_all(&cluster.configs[&wiped].dir).unwrap();
    let endpoints: Vec<String> = cluster.configs.values().map(|c| c.listen.to_string()).collect();
    cluster.configs.get_mut(&wiped).unwrap().join = endpoints.clone();
    cluster.start(wiped).await;
    let reason = tokio::time::timeout(PATIENCE, cluster.running[&wiped].failed()).await.expect("it ends").to_string();
    assert!(reason.contains("lost its data directory") && reason.contains("free id is 4"), "{reason}");
    let status = cluster.status(wiped).await;
    assert_eq!((status.stage(), status.term), (Stage::Fresh, 0), "it has taken part in nothing");
    cluster.stop(wiped).await;

    cluster.prepare(4, |config| config.join = endpoints);
    cluster.start(4).await;
    eventually("the fresh peer to be a learner", async || {
        let leader = cluster.leader().await;
        ids(&cluster.status(leader).await.learners).contains(&4).then_some(())
    })
    .await;
    let replaced = eventually("the wiped peer to be replaced", async || {
        in_turn(cluster.client().replace(wiped, cluster.named(4), soon()).await)
    })
    .await;
    assert!(replaced.replaced);
    let voters: Vec<u64> = (1..=4).filter(|id| *id != wiped).collect();
    all_see(&cluster, &voters).await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_of_other_clusters_and_wrong_addresses_are_refused() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    let mut other = TestCluster::founded(1, |_| {}).await;
    let foreign = v1::Member { id: 1, ..other.named(1) };
    let error = cluster.cluster(1).join(v1::JoinRequest { member: Some(foreign) }).await.unwrap_err();
    assert_eq!(kind(&error), Kind::WrongIdentity);
    cluster.prepare(2, |_| {});
    cluster.start(2).await;
    let misnamed = v1::Member { id: 3, ..cluster.named(2) };
    let error = cluster.cluster(1).join(v1::JoinRequest { member: Some(misnamed) }).await.unwrap_err();
    assert_eq!(kind(&error), Kind::InvalidArgument);
    assert!(error.message().contains("there is peer 2"), "{}", error.message());
    let nowhere = v1::Member { grpc_address: String::new(), ..cluster.named(2) };
    let error = cluster.cluster(1).join(v1::JoinRequest { member: Some(nowhere) }).await.unwrap_err();
    assert_eq!(kind(&error), Kind::InvalidArgument);
    assert_eq!(cluster.status(2).await.stage(), Stage::Fresh);
    assert_eq!(ids(&cluster.status(1).await.learners), BTreeSet::new(), "nothing of this was written");

    cluster.client().join(cluster.named(2), soon()).await.unwrap();
    let error = other.cluster(1).join(v1::JoinRequest { member: Some(cluster.named(2)) }).await.unwrap_err();
    assert_eq!(kind(&error), Kind::WrongIdentity);
    assert!(error.message().contains("belongs to cluster"), "{}", error.message());
    other.stop_all().await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_does_not_know_the_feature_level_in_force_is_not_taken_in() {
    let mut cluster = TestCluster::founded(1, |config| config.feature_level = 2).await;
    eventually("the feature level to rise", async || (cluster.status(1).await.feature_level == 2).then_some(())).await;
    let join = vec![cluster.configs[&1].listen.to_string()];
    cluster.prepare(2, |config| (config.join, config.feature_level) = (join, 1));
    cluster.start(2).await;
    let reason = tokio::time::timeout(PATIENCE, cluster.running[&2].failed()).await.expect("it ends").to_string();
    assert!(reason.contains("supports feature level 1") && reason.contains("is at 2"), "{reason}");
    assert_eq!(cluster.status(2).await.stage(), Stage::Fresh, "it has become part of nothing");
    assert_eq!(ids(&cluster.status(1).await.learners), BTreeSet::new());

    cluster.stop(2).await;
    cluster.configs.get_mut(&2).unwrap().feature_level = 2;
    cluster.start(2).await;
    eventually("the learner", async || ids(&cluster.status(1).await.learners).contains(&2).then_some(())).await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_a_secret_takes_in_who_knows_it() {
    let secret = Secret::new("a-secret-of-the-cluster").unwrap();
    let with_secret = |config: &mut Config| config.secret = Some(secret.clone());
    let mut cluster = TestCluster::fresh(1, with_secret).await;
    let endpoint = |cluster: &TestCluster, id: u64| cluster.configs[&id].listen.to_string();
    let founders = cluster.founders();
    admin::init(&endpoint(&cluster, 1), founders, Some(&secret), PATIENCE).await.unwrap();
    let join = vec![endpoint(&cluster, 1)];
    for (id, known) in [(2, Some(secret.clone())), (3, None)] {
        cluster.prepare(id, |config| (config.join, config.secret) = (join.clone(), known));
        cluster.start(id).await;
    }
    let status = async |id| admin::peer_status(&endpoint(&cluster, id), Some(&secret), PATIENCE).await;
    eventually("the learner", async || {
        let status = status(1).await.unwrap();
        ids(&status.learners).contains(&2).then_some(())
    })
    .await;
    promoted(&cluster, 2).await;
    let store = cluster.client();
    store.cas("/kv/a", None, "1".into(), soon()).await.unwrap();
    eventually("the new voter to see itself as one", async || {
        (ids(&status(2).await.unwrap().voters) == BTreeSet::from([1, 2])).then_some(())
    })
    .await;

    // The other one was turned away by all who are there, and ends with what is to be done.
    let ended = tokio::time::timeout(PATIENCE, cluster.running[&3].failed()).await.expect("it ends").to_string();
    assert!(ended.contains("peer 3 cannot join the cluster") && ended.contains("this cluster has a secret"), "{ended}");
    assert!(ended.contains("--secret-file") && ended.contains(&endpoint(&cluster, 1)), "{ended}");
    let wrong = Secret::new("a-secret-of-others").unwrap();
    let nowhere = crate::support::free_port().to_string();
    cluster.prepare(4, |config| {
        (config.join, config.secret) = (vec![nowhere, join[0].clone()], Some(wrong.clone()));
    });
    cluster.start(4).await;
    let ended = tokio::time::timeout(PATIENCE, cluster.running[&4].failed()).await.expect("it ends").to_string();
    assert!(ended.contains("the cluster secret is wrong") && !ended.contains("a-secret-of"), "{ended}");
    let learners = admin::peer_status(&endpoint(&cluster, 1), Some(&secret), PATIENCE).await.unwrap().learners;
    assert_eq!(ids(&learners), BTreeSet::new());
    let unknown = cluster.cluster(1).join(v1::JoinRequest { member: Some(cluster.named(3)) }).await.unwrap_err();
    assert_eq!(kind(&unknown), Kind::Unauthenticated);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leadership_goes_where_it_is_told() {
    let mut cluster = TestCluster::founded(3, |config| config.timing = unhurried()).await;
    let first = cluster.leader().await;
    let term = cluster.status(first).await.term;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != first).collect();
    for (n, to) in followers.iter().chain([&first]).enumerate() {
        let answer = cluster.client().transfer_leader(Some(*to), soon()).await.unwrap();
        assert_eq!((answer.leader.unwrap().id, answer.term), (*to, term + 1 + n as u64));
        let same = cluster.client().transfer_leader(Some(*to), soon()).await.unwrap();
        assert_eq!(same.term, answer.term, "it leads already");
        cluster.put("/kv/a", format!("{n}")).await;
    }
    let anyone = cluster.client().transfer_leader(None, soon()).await.unwrap();
    assert_ne!(anyone.leader.unwrap().id, first);
    let error = cluster.client().transfer_leader(Some(9), soon()).await.unwrap_err().to_string();
    assert!(error.contains("peer 9 is no voter"), "{error}");
    let follower = follower(&cluster).await;
    let error = cluster.cluster(follower).transfer_leadership(v1::TransferLeadershipRequest { to: 0 }).await;
    assert_eq!(kind(&error.unwrap_err()), Kind::NotLeader);
    cluster.stop_all().await;
}

/// Timeouts so long that an election by timeout is told from a transfer, also on a busy machine.
fn unhurried() -> lake_metasrv::config::Timing {
    lake_metasrv::config::Timing {
        heartbeat: Duration::from_millis(200),
        election_timeout_min: Duration::from_secs(2),
        election_timeout_max: Duration::from_secs(4),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_costs_no_election_timeout() {
    let mut cluster = TestCluster::founded(3, |config: &mut Config| config.timing = unhurried()).await;
    let load = Load::start(Arc::new(cluster.client()), 4, "rolling");
    load.grows_by(50).await;
    let before = cluster.status(cluster.leader().await).await.term;
    load.slowest();
    let mut transfers = 0;
    for id in 1..=3 {
        transfers += u64::from(cluster.leader().await == id);
        cluster.stop(id).await;
        cluster.start(id).await;
        let revision = cluster.put("/kv/restarted", format!("{id}")).await;
        let caught_up = v1::ReadOptions { min_revision: revision, ..v1::ReadOptions::default() };
        cluster.try_get(id, "/kv/restarted", caught_up).await.unwrap();
        load.grows_by(20).await;
    }
    let after = cluster.status(cluster.leader().await).await.term;
    let slowest = load.slowest();
    println!(
        "rolling restart: {transfers} transfers, terms {before} to {after}, the slowest write took {slowest:?} (an election \
         timeout is at least {:?}, a client waits {DEADLINE:?})",
        unhurried().election_timeout_max
    );
    assert!(transfers > 0, "whoever leads at first is restarted too");
    assert_eq!(after - before, transfers, "each term began by a transfer");
    load.finish().await;
    cluster.stop_all().await;
}

/// What a leader leaves behind that dies between the two entries of a swap, made by hand: its followers have the first entry,
/// and nobody has the second.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_leader_ends_the_swap_that_the_old_one_left_in_the_middle() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.prepare(4, |_| {});
    cluster.start(4).await;
    cluster.client().join(cluster.named(4), soon()).await.unwrap();
    let dead = cluster.leader().await;
    let before = cluster.status(dead).await;
    let dead_member = before.self_.clone().unwrap();
    cluster.stop(dead).await;
    let rest: Vec<u64> = (1..=3).filter(|id| *id != dead).collect();
    cluster.put("/kv/a", "1").await;
    let status = eventually("the two to have the same log", async || {
        let (one, two) = (cluster.status(rest[0]).await, cluster.status(rest[1]).await);
        let settled = one.last_log_index == one.applied_index && one.term == two.term;
        (settled && one.last_log_index == two.last_log_index).then_some(one)
    })
    .await;

    let nodes: Vec<v1::Member> = before.voters.iter().chain(&before.learners).cloned().collect();
    let config = |voters: Vec<u64>| v1::membership::Config { voters };
    let mut swapped = rest.clone();
    swapped.push(4);
    let joint = v1::Membership { configs: vec![config((1..=3).collect()), config(swapped.clone())], nodes };
    let term = status.term + 1;
    for id in &rest {
        let to = cluster.status(*id).await.self_.unwrap();
        let request = v1::AppendRequest {
            header: Some(v1::RaftHeader {
                cluster_id: before.cluster_id.clone(),
                from_id: dead,
                from_incarnation: dead_member.incarnation.clone(),
                to_id: *id,
                to_incarnation: to.incarnation,
            }),
            vote: Some(v1::Vote { term, node_id: dead, committed: true }),
            prev_log_id: Some(v1::LogId { term: status.term, node_id: 0, index: status.last_log_index }),
            entries: vec![v1::LogEntry {
                log_id: Some(v1::LogId { term, node_id: 0, index: status.last_log_index + 1 }),
                payload: Some(v1::log_entry::Payload::Membership(joint.clone())),
            }],
            leader_commit: None,
        };
        let answer = cluster.raft(*id).append(request).await.unwrap().into_inner().result;
        assert!(matches!(answer, Some(v1::append_response::Result::Success(_))), "{answer:?}");
    }
    let left_behind = cluster.status(rest[0]).await;
    println!("left in the middle: {}, in term {}", left_behind.changing_voters, left_behind.term);

    all_see(&cluster, &swapped).await;
    cluster.put("/kv/b", "1").await;
    cluster.start(dead).await;
    let reason = tokio::time::timeout(PATIENCE, cluster.running[&dead].failed()).await.expect("it ends").to_string();
    assert!(reason.contains("was removed"), "{reason}");
    cluster.stop_all().await;
}

/// A leader that is deposed while it takes a peer in leaves that with a beginning of the log, made by hand here, and a new leader
/// that has never heard of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_a_deposed_leader_had_begun_to_take_in_asks_again_after_a_restart() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let leader = cluster.leader().await;
    let status = cluster.status(leader).await;
    let from = status.self_.clone().unwrap();
    cluster.prepare(4, |_| {});
    cluster.start(4).await;
    let left = cluster.status(4).await.self_.unwrap();
    let adopt =
        v1::AdoptRequest { cluster_id: status.cluster_id.clone(), to_id: 4, to_incarnation: left.incarnation.clone() };
    cluster.raft(4).adopt(adopt).await.unwrap();
    let founding = v1::Membership {
        configs: vec![v1::membership::Config { voters: vec![1, 2, 3] }],
        nodes: status.voters.clone(),
    };
    let append = v1::AppendRequest {
        header: Some(v1::RaftHeader {
            cluster_id: status.cluster_id.clone(),
            from_id: leader,
            from_incarnation: from.incarnation,
            to_id: 4,
            to_incarnation: left.incarnation,
        }),
        vote: Some(v1::Vote { term: status.term, node_id: leader, committed: true }),
        prev_log_id: None,
        entries: vec![v1::LogEntry {
            log_id: Some(v1::LogId { term: 0, node_id: 0, index: 0 }),
            payload: Some(v1::log_entry::Payload::Membership(founding)),
        }],
        leader_commit: None,
    };
    let answer = cluster.raft(4).append(append).await.unwrap().into_inner().result;
    assert!(matches!(answer, Some(v1::append_response::Result::Success(_))), "{answer:?}");
    cluster.stop(4).await;

    let endpoints = vec![cluster.configs[&1].listen.to_string()];
    cluster.configs.get_mut(&4).unwrap().join = endpoints;
    cluster.start(4).await;
    eventually("peer 4 to be a learner", async || {
        ids(&cluster.status(cluster.leader().await).await.learners).contains(&4).then_some(())
    })
    .await;
    promoted(&cluster, 4).await;
    all_see(&cluster, &[1, 2, 3, 4]).await;

    // Now it knows itself: without any peer to ask it starts as a member.
    cluster.stop(4).await;
    cluster.configs.get_mut(&4).unwrap().join = vec!["127.0.0.1:1".to_owned()];
    cluster.put("/kv/a", "1").await;
    cluster.start(4).await;
    assert!(cluster.get(4, "/kv/a").await.is_some());
    cluster.stop_all().await;
}
