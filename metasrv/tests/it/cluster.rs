//! Three peers over real gRPC: founding, reading anywhere, restarting, snapshots, and what is refused.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::hurt::{Hurt, put};
use crate::support::{PATIENCE, TestCluster, eventually, kind, why};
use lake_chaos::net::condition::{Condition, Cut};
use lake_chaos::net::{Conditions, Node, Path, partition};
use lake_client::store::{self, MetaStore};
use lake_metasrv::files::FreeSpace;
use lake_proto::kv::{Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::{Applied, Kind};
use lake_proto::v1::read_options::Consistency;
use tonic::Request;

#[tokio::test(flavor = "multi_thread")]
async fn three_fresh_peers_become_a_cluster_that_reads_and_writes_everywhere() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let again = cluster.init(2).await.unwrap();
    assert!(!again.founded, "founding is idempotent, whoever is asked");
    assert_eq!(again.cluster_id, cluster.status(1).await.cluster_id);

    assert!(cluster.create("/lake/table/a", "1").await);
    assert!(!cluster.create("/lake/table/a", "2").await);
    let revision = cluster.put("/kv/x", "1").await;
    for id in 1..=3 {
        assert_eq!(&cluster.get(id, "/lake/table/a").await.unwrap().value[..], b"1", "peer {id}");
        let entry = cluster.get(id, "/kv/x").await.unwrap();
        assert_eq!((entry.mod_revision, entry.version), (revision, 1));
        let local = v1::ReadOptions {
            consistency: Consistency::Local as i32,
            min_revision: revision,
            ..v1::ReadOptions::default()
        };
        assert!(cluster.try_get(id, "/kv/x", local).await.unwrap().entry.is_some());
        let bounded = v1::ReadOptions {
            consistency: Consistency::Bounded as i32,
            max_staleness_ms: 1000,
            ..v1::ReadOptions::default()
        };
        assert!(cluster.try_get(id, "/kv/x", bounded).await.unwrap().entry.is_some());
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_there_after_all_peers_are_restarted() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    for i in 0..50 {
        cluster.put(&format!("/kv/{i}"), format!("{i}")).await;
    }
    // It has applied all of it by then.
    assert!(cluster.get(1, "/kv/49").await.is_some());
    let before = cluster.status(1).await;
    cluster.stop_all().await;
    for id in 1..=3 {
        cluster.start(id).await;
    }
    for id in 1..=3 {
        for i in 0..50 {
            assert_eq!(cluster.get(id, &format!("/kv/{i}")).await.unwrap().value, format!("{i}"));
        }
        let status = cluster.status(id).await;
        assert_eq!((status.cluster_id.as_str(), status.revision), (before.cluster_id.as_str(), before.revision));
    }
    assert_eq!(cluster.put("/kv/more", "1").await, before.revision + 1, "the revision goes on where it was");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_leader_goes_another_takes_over() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let old = cluster.leader().await;
    cluster.stop(old).await;
    let started = Instant::now();
    cluster.put("/kv/a", "2").await;
    println!("handed over in {:?}", started.elapsed());
    let new = cluster.leader().await;
    assert_ne!(new, old);
    assert_eq!(&cluster.get(new, "/kv/a").await.unwrap().value[..], b"2");
    cluster.start(old).await;
    assert_eq!(&cluster.get(old, "/kv/a").await.unwrap().value[..], b"2", "the old leader catches up before it reads");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_the_last_to_stop_waits_for_nobody() {
    const AT_ONCE: Duration = Duration::from_millis(400);
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let mut quickest = Duration::MAX;
    // The quickest of some, for a machine that is busy with other things.
    for _ in 0..10 {
        if quickest < AT_ONCE {
            break;
        }
        let leader = cluster.leader().await;
        let last = cluster.running.remove(&leader).unwrap();
        cluster.stop_all().await;
        let started = Instant::now();
        last.shutdown().await;
        quickest = quickest.min(started.elapsed());
        for id in 1..=3 {
            cluster.start(id).await;
        }
    }
    assert!(quickest < AT_ONCE, "it waited {quickest:?}, for a successor that is down");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_was_away_too_long_gets_a_snapshot() {
    let mut cluster = TestCluster::founded(3, |config| {
        config.storage.snapshot_entries = 40;
        config.storage.purge_margin_entries = 10;
    })
    .await;
    let leader = cluster.leader().await;
    let away = (1..=3).find(|id| *id != leader).unwrap();
    cluster.stop(away).await;
    for i in 0..200 {
        cluster.put(&format!("/kv/{i:03}"), vec![i as u8; 3000]).await;
    }
    let leader = cluster.leader().await;
    let purged = eventually("the log to be purged", async || {
        let status = cluster.status(leader).await;
        (status.snapshot_index > 100 && status.purged_index > 100).then_some(status.purged_index)
    })
    .await;
    cluster.start(away).await;
    assert_eq!(cluster.get(away, "/kv/199").await.unwrap().value, vec![199u8; 3000]);
    let status = cluster.status(away).await;
    assert!(status.purged_index >= purged.min(status.snapshot_index) && status.snapshot_index > 100, "{status:?}");
    assert_eq!(status.keys, 200);

    // The snapshot it was given is what it starts from, and the log goes on behind it.
    cluster.stop(away).await;
    cluster.put("/kv/new", "1").await;
    cluster.start(away).await;
    assert!(cluster.get(away, "/kv/new").await.is_some());
    assert_eq!(cluster.get(away, "/kv/000").await.unwrap().value, vec![0u8; 3000]);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_a_listing_see_one_revision_and_expire() {
    const LIFE: Duration = Duration::from_secs(3);
    let mut cluster = TestCluster::founded(1, |config| config.page_life = LIFE).await;
    for i in 0..30 {
        cluster.put(&format!("/kv/{i:02}"), "1").await;
    }
    let list = async |page: &str| {
        let request = v1::ListRequest { prefix: "/kv/".into(), limit: 10, page: page.into(), options: None };
        cluster.kv(1).list(request).await.map(|r| r.into_inner())
    };
    // A machine that is busy with other things may let a page expire that is asked for at once: then again.
    let (first, second) = eventually("two pages", async || {
        cluster.put("/kv/15", "1").await;
        let first = list("").await.unwrap();
        cluster.put("/kv/15", "changed").await;
        match list(&first.next_page).await {
            Ok(second) => Some((first, second)),
            Err(error) if kind(&error) == Kind::SnapshotExpired => None,
            Err(error) => panic!("{error}"),
        }
    })
    .await;
    assert_eq!(second.entries[5].value, "1", "a later page does not see what changed meanwhile");
    assert_eq!(first.header.unwrap().revision, second.header.clone().unwrap().revision);
    // It lives for as long as it is asked for.
    let left_alone = async || {
        tokio::time::sleep(2 * LIFE).await;
        list(&second.next_page).await.err()
    };
    let error = eventually("the listing to expire", left_alone).await;
    assert_eq!(kind(&error), Kind::SnapshotExpired);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_says_who_leads_and_proposes_nothing() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let leader = cluster.leader().await;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    let txn = Txn { then: vec![Op::put("/kv/a", "1")], ..Txn::default() };
    let error = cluster.kv(follower).txn(v1::TxnRequest { txn: Some(txn.into()), stamp: None }).await.unwrap_err();
    let detail = lake_proto::status::detail(&error).unwrap();
    assert_eq!((detail.kind(), detail.applied()), (Kind::NotLeader, Applied::NotApplied));
    let hint = detail.leader.unwrap();
    assert_eq!((hint.id, hint.grpc_address), (leader, cluster.configs[&leader].listen.to_string()));
    assert_eq!(detail.term, cluster.status(leader).await.term);

    let answer = cluster.cluster(follower).leader(v1::LeaderRequest::default()).await.unwrap().into_inner();
    assert_eq!((answer.leader.map(|l| l.id), answer.members.len()), (Some(leader), 3));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_the_contract_is_refused_before_it_is_proposed() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    let index = cluster.status(1).await.last_log_index;
    let blind = Txn { then: vec![Op::put("/lake/table/a", "1")], ..Txn::default() };
    let error = cluster.kv(1).txn(v1::TxnRequest { txn: Some(blind.into()), stamp: None }).await.unwrap_err();
    assert_eq!(kind(&error), Kind::InvalidArgument);
    assert!(error.message().contains("/lake/table/a"), "{error}");
    let error = cluster.kv(1).txn(v1::TxnRequest { txn: None, stamp: None }).await.unwrap_err();
    assert_eq!(kind(&error), Kind::InvalidArgument);
    let key = "k".repeat(5000);
    let error = cluster.try_get(1, &key, v1::ReadOptions::default()).await.unwrap_err();
    assert_eq!(kind(&error), Kind::InvalidArgument);
    assert_eq!(cluster.status(1).await.last_log_index, index);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_quorum_nothing_is_read_or_written_and_the_error_says_whether_it_may_have_been() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    for id in (1..=3).filter(|id| *id != leader) {
        cluster.stop(id).await;
    }
    let txn = Txn { then: vec![Op::put("/kv/a", "2")], ..Txn::default() };
    let refused = why(async || {
        let mut request = Request::new(v1::TxnRequest { txn: Some(txn.clone().into()), stamp: None });
        request.set_timeout(Duration::from_millis(300));
        cluster.kv(leader).txn(request).await
    })
    .await;
    assert!(matches!(refused, Kind::Unavailable | Kind::NotLeader), "{refused:?}");

    let refused = why(async || {
        let mut read = Request::new(v1::GetRequest { key: "/kv/a".into(), options: None });
        read.set_timeout(Duration::from_millis(500));
        cluster.kv(leader).get(read).await
    })
    .await;
    assert_eq!(refused, Kind::Unavailable);

    eventually("the lonely leader to stop calling itself one", async || {
        cluster.status(leader).await.leader.is_none().then_some(())
    })
    .await;
    let error = cluster.kv(leader).txn(v1::TxnRequest { txn: Some(txn.into()), stamp: None }).await.unwrap_err();
    let detail = lake_proto::status::detail(&error).unwrap();
    assert_eq!(detail.applied(), Applied::NotApplied, "it knows that nothing can be committed: {error}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_of_another_cluster_are_refused() {
    let mut ours = TestCluster::founded(1, |_| {}).await;
    let mut theirs = TestCluster::founded(1, |_| {}).await;
    let mut founders = ours.founders();
    founders.extend(theirs.founders().into_iter().map(|m| v1::Member { id: 2, ..m }));
    let error = ours.cluster(1).init(v1::InitRequest { founders }).await.unwrap_err();
    assert_eq!(kind(&error), Kind::WrongIdentity);

    let mut raft = lake_proto::v1::raft_client::RaftClient::connect(format!("http://{}", ours.configs[&1].raft_listen))
        .await
        .unwrap();
    let identity = raft.identity(v1::IdentityRequest {}).await.unwrap().into_inner();
    let header = v1::RaftHeader {
        cluster_id: theirs.status(1).await.cluster_id,
        from_id: 9,
        from_incarnation: "f".repeat(32),
        to_id: 1,
        to_incarnation: identity.incarnation.clone(),
    };
    let vote = |header| v1::VoteRequest {
        header: Some(header),
        vote: Some(v1::Vote { term: 99, node_id: 9, committed: false }),
        last_log_id: None,
        leadership_transfer: false,
    };
    let error = raft.vote(vote(header.clone())).await.unwrap_err();
    assert_eq!(kind(&error), Kind::WrongIdentity, "{error}");
    let ours_but_other =
        v1::RaftHeader { cluster_id: identity.cluster_id.clone(), to_incarnation: "0".into(), ..header.clone() };
    assert_eq!(kind(&raft.vote(vote(ours_but_other)).await.unwrap_err()), Kind::WrongIdentity);
    let impostor = v1::RaftHeader { cluster_id: identity.cluster_id, from_id: 1, ..header };
    assert_eq!(kind(&raft.vote(vote(impostor)).await.unwrap_err()), Kind::WrongIdentity);
    assert!(ours.status(1).await.term < 99, "none of these calls moved the term");
    ours.stop_all().await;
    theirs.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_calls_at_once_share_a_stream_and_none_is_forgotten() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let remote = cluster.client();
    let local = store::ReadOptions { consistency: store::Consistency::Local, ..store::ReadOptions::default() };
    let reading = (0..64).map(|_| {
        let remote = remote.clone();
        tokio::spawn(async move {
            for _ in 0..2_000 {
                // Shorter than what a call waits for an answer before it is made again elsewhere.
                let deadline = Instant::now() + Duration::from_secs(3);
                assert!(remote.get("/kv/a", local, deadline).await.unwrap().value.is_some());
            }
        })
    });
    for reader in reading.collect::<Vec<_>>() {
        reader.await.unwrap();
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_share_their_confirmations_and_keep_no_write_waiting() {
    const READS: u64 = 256;
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    for i in 0..100 {
        cluster.put(&format!("/kv/{i:02}"), "1").await;
    }
    let leader = cluster.leader().await;
    for at in 1..=3 {
        let member = cluster.running[&at].peer().member().unwrap();
        let before = member.reads.rounds();
        let client = cluster.kv(at);
        let reading = (0..READS).map(|i| {
            let mut kv = client.clone();
            async move { kv.get(v1::GetRequest { key: format!("/kv/{:02}", i % 100), options: None }).await }
        });
        for answer in futures::future::join_all(reading).await {
            assert!(answer.unwrap().into_inner().entry.is_some());
        }
        let rounds = member.reads.rounds() - before;
        assert!((1..=READS / 4).contains(&rounds), "{rounds} rounds for {READS} reads at peer {at}");
    }

    // Somebody is in the middle of reading everything: what is written meanwhile neither waits for that nor shows in it.
    let read = cluster.running[&leader].peer().member().unwrap().published.current();
    let mut entries = read.state.iter();
    let first = entries.next().unwrap();
    cluster.put(&first.key, "2").await;
    cluster.put("/kv/99", "2").await;
    let rest: Vec<_> = entries.collect();
    assert!(first.value == "1" && rest.len() == 99 && rest.iter().all(|entry| entry.value == "1"));

    // Keys that are always written together are read together, at any peer.
    let keys: Vec<String> = (0..100).map(|i| format!("/kv/{i:02}")).collect();
    let together = |value: String| Txn {
        then: keys.iter().map(|key| Op::put(key, value.repeat(1000))).collect(),
        ..Txn::default()
    };
    cluster.commit(together("a".to_owned())).await;
    let written = Cell::new(false);
    let writing = async {
        for n in 0..50 {
            cluster.commit(together((n % 10).to_string())).await;
        }
        written.set(true);
    };
    let reading = (1..=3).map(|at| {
        let (mut kv, keys, written) = (cluster.kv(at), &keys, &written);
        async move {
            while !written.get() {
                let read = kv.batch_get(v1::BatchGetRequest { keys: keys.clone(), options: None }).await.unwrap();
                let v1::BatchGetResponse { header, entries } = read.into_inner();
                let one = &entries[0];
                let is_like_it =
                    |entry: &v1::KeyValue| (&entry.value, entry.mod_revision) == (&one.value, one.mod_revision);
                assert!(entries.len() == 100 && entries.iter().all(is_like_it), "peer {at}: {header:?}");
                assert!(header.unwrap().revision >= one.mod_revision);
            }
        }
    });
    tokio::join!(writing, futures::future::join_all(reading));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_quorum_a_read_is_as_old_as_it_may_be_and_no_older() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/a", "1").await;
    let leader = cluster.leader().await;
    cluster.get(leader, "/kv/a").await.unwrap();
    for id in (1..=3).filter(|id| *id != leader) {
        cluster.stop(id).await;
    }
    let read = async |consistency: Consistency, max_staleness_ms, within| {
        let options =
            v1::ReadOptions { consistency: consistency as i32, max_staleness_ms, ..v1::ReadOptions::default() };
        let mut request = Request::new(v1::GetRequest { key: "/kv/a".into(), options: Some(options) });
        request.set_timeout(within);
        cluster.kv(leader).get(request).await.map(|answer| answer.into_inner().entry.unwrap().value)
    };
    let soon = Duration::from_millis(500);
    assert_eq!(
        why(async || read(Consistency::Bounded, 100, soon).await).await,
        Kind::Unavailable,
        "what it has is too old by then"
    );
    assert_eq!(read(Consistency::Bounded, 600_000, PATIENCE).await.unwrap(), "1", "which needs nobody");
    assert_eq!(read(Consistency::Local, 0, PATIENCE).await.unwrap(), "1");
    assert_eq!(why(async || read(Consistency::Linearizable, 0, soon).await).await, Kind::Unavailable);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_waited_is_as_old_as_it_may_be_and_no_older() {
    let hurt = Hurt::founded().await;
    hurt.store.commit(put("/kv/a", "1"), Instant::now() + PATIENCE).await.unwrap();
    let leader = hurt.cluster.leader().await;
    let at = (1..=3).find(|id| *id != leader).unwrap();
    let before = hurt.cluster.get(at, "/kv/a").await.unwrap();
    let member = hurt.cluster.running[&at].peer().member().unwrap();
    let kv = hurt.cluster.kv(at);
    let read = |max: Duration, min_revision, within| {
        let options = v1::ReadOptions {
            consistency: Consistency::Bounded as i32,
            max_staleness_ms: max.as_millis() as u64,
            min_revision,
            ..v1::ReadOptions::default()
        };
        let mut request = Request::new(v1::GetRequest { key: "/kv/a".into(), options: Some(options) });
        request.set_timeout(within);
        let mut kv = kv.clone();
        async move { kv.get(request).await.map(|answer| answer.into_inner().entry.unwrap().value) }
    };

    // What was new enough when the read came is not when the revision does that it waits for. Others raise it, too, but not so far.
    const AHEAD: u64 = 20;
    let max = Duration::from_millis(500);
    let waiting = tokio::spawn(read(max, before.mod_revision + AHEAD, PATIENCE));
    let is_old = async || member.reads.staleness().is_some_and(|staleness| staleness > 2 * max).then_some(());
    eventually("what the peer has to be old", is_old).await;
    let rounds = member.reads.rounds();
    for _ in 0..AHEAD {
        hurt.store.commit(put("/kv/a", "2"), Instant::now() + PATIENCE).await.unwrap();
    }
    assert_eq!(waiting.await.unwrap().unwrap(), "2");
    assert!(member.reads.rounds() > rounds, "what it has was not confirmed again");

    // Where the others hear of a peer late only, all that it is told is older than this.
    let late = Condition { delay: Duration::from_millis(250), ..Condition::default() };
    let others = (1..=3).filter(|id| *id != at);
    hurt.fabric.set(others.map(|other| ((Node::Peer(at), Node::Peer(other)), late.clone())).collect());
    let max = Duration::from_millis(100);
    assert_eq!(why(async || read(max, 0, Duration::from_secs(2)).await).await, Kind::Unavailable);
    let rounds = member.reads.rounds();
    let trying = tokio::spawn(read(max, 0, PATIENCE));
    eventually("it to be confirmed too late", async || (member.reads.rounds() > rounds).then_some(())).await;
    hurt.fabric.set(Conditions::new());
    assert_eq!(trying.await.unwrap().unwrap(), "2", "it was tried again while there was time");
    drop(member);
    hurt.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_was_cut_off_unseats_nobody_when_it_comes_back() {
    let hurt = Hurt::founded().await;
    hurt.store.commit(put("/kv/a", "1"), Instant::now() + PATIENCE).await.unwrap();
    let leader = hurt.cluster.leader().await;
    let term = hurt.cluster.status(leader).await.term;
    let cut_off = (1..=3).find(|id| *id != leader).unwrap();
    let member = hurt.cluster.running[&cut_off].peer().member().unwrap();
    let others = (1..=3).filter(|id| *id != cut_off);
    let paths: Vec<Path> = others
        .flat_map(|other| {
            let (one, other) = (Node::Peer(cut_off), Node::Peer(other));
            [(one, other), (other, one)]
        })
        .collect();
    hurt.fabric.set(partition::cut(&paths, Cut::Silent));
    let several = 5 * hurt.cluster.configs[&cut_off].timing.election_timeout_max;
    eventually("it to have wanted an election for long", async || (member.view.silence() > several).then_some(()))
        .await;
    hurt.fabric.set(Conditions::new());
    hurt.store.commit(put("/kv/a", "2"), Instant::now() + PATIENCE).await.unwrap();
    eventually("it to follow again", async || {
        let applied = member.published.current();
        (applied.state.get("/kv/a")?.value == "2").then_some(())
    })
    .await;
    let status = hurt.cluster.status(cut_off).await;
    assert_eq!((status.term, status.leader.map(|l| l.id)), (term, Some(leader)));
    assert_eq!(hurt.cluster.status(leader).await.term, term);
    hurt.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_was_away_for_a_little_needs_no_snapshot() {
    let mut cluster = TestCluster::founded(3, |config| {
        config.storage.snapshot_entries = 40;
        config.storage.purge_margin_entries = 1_000;
    })
    .await;
    let leader = cluster.leader().await;
    let away = (1..=3).find(|id| *id != leader).unwrap();
    let had = cluster.status(away).await.last_log_index;
    cluster.stop(away).await;
    for i in 0..200 {
        cluster.put(&format!("/kv/{i:03}"), "1").await;
    }
    let leader = cluster.leader().await;
    eventually("a snapshot of what it lacks", async || {
        (cluster.status(leader).await.snapshot_index > had + 100).then_some(())
    })
    .await;
    cluster.start(away).await;
    assert!(cluster.get(away, "/kv/199").await.is_some());
    // One that was sent a snapshot has nothing before it.
    let status = cluster.status(away).await;
    assert_eq!((status.purged_index, status.keys), (0, 200), "{status:?}");
    assert_eq!(cluster.status(leader).await.purged_index, 0);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_disk_hangs_before_a_write_gives_the_lead_up() {
    let hangs = Arc::new(AtomicU64::new(0));
    let cluster = TestCluster::founded(3, |config| {
        let (hangs, id) = (hangs.clone(), config.id);
        // Asked by what writes the log, before each write.
        config.free_space = FreeSpace::new(move |_| {
            while hangs.load(Ordering::SeqCst) == id {
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(u64::MAX)
        });
    })
    .await;
    gives_the_lead_up(cluster, |_, id, so| hangs.store(if so { id } else { 0 }, Ordering::SeqCst)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_sync_hangs_gives_the_lead_up() {
    let cluster = TestCluster::founded(3, |_| {}).await;
    gives_the_lead_up(cluster, |cluster, id, so| cluster.running[&id].peer().log.failing().hang(so)).await;
}

/// The leader's disk hangs until another one leads and writes, and then no more.
async fn gives_the_lead_up(mut cluster: TestCluster, hang: impl Fn(&TestCluster, u64, bool)) {
    cluster.put("/kv/a", "1").await;
    let old = cluster.leader().await;
    hang(&cluster, old, true);
    let mut to_old = cluster.kv(old);
    let txn = Txn { then: vec![Op::put("/kv/a", "hangs")], ..Txn::default() };
    let hanging = tokio::spawn(async move { to_old.txn(v1::TxnRequest { txn: Some(txn.into()), stamp: None }).await });
    let other = (1..=3).find(|id| *id != old).unwrap();
    let view = cluster.running[&other].peer().member().unwrap().view.clone();
    eventually("another leader", async || view.leader_id().filter(|leader| *leader != old)).await;
    let answer = eventually("a write", async || {
        let leader = view.leader_id()?;
        let txn = Txn { then: vec![Op::put("/kv/b", "1")], ..Txn::default() };
        let mut request = Request::new(v1::TxnRequest { txn: Some(txn.into()), stamp: None });
        request.set_timeout(Duration::from_secs(2));
        cluster.kv(leader).txn(request).await.ok()
    })
    .await;
    assert!(answer.into_inner().succeeded);
    hang(&cluster, old, false);
    drop(hanging.await.unwrap());
    assert_eq!(cluster.get(old, "/kv/b").await.unwrap().value, "1", "it follows");
    cluster.stop_all().await;
}
