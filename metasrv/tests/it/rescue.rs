//! Saving a running cluster, restoring it as a new one, and reading the directories of stopped peers, over real peers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::{PATIENCE, TestCluster, eventually, kind};
use lake_client::remote::snapshots;
use lake_client::store::{Consistency, Error, MetaStore, ReadOptions};
use lake_metasrv::rescue::reading::{self, Reading};
use lake_metasrv::rescue::restore::restore;
use lake_metasrv::rescue::saved::{self, Saved, Writing};
use lake_metasrv::rescue::{Summary, recover};
use lake_metasrv::state::rebirth::REVISION_GAP;
use lake_proto::coordination::{ScopeOwner, Stamp};
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use rand::Rng;
use tonic::Request;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Saves what one peer sends.
async fn save(cluster: &TestCluster, at: u64, consistency: Consistency, file: &Path) -> Result<Saved, Error> {
    let endpoint = cluster.configs[&at].listen.to_string();
    let mut saving = snapshots::save(&endpoint, None, consistency, PATIENCE).await?;
    let mut writing = Writing::begin(file).unwrap();
    while let Some(chunk) = saving.next().await? {
        writing.add(&chunk).unwrap();
    }
    Ok(writing.finish().unwrap())
}

async fn read(dir: &Path) -> Reading {
    reading::read(dir, BTreeSet::new()).await.unwrap()
}

/// Every file of a directory but the lock, which says who held it last.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(contents(&path));
        } else if path.file_name().unwrap() != "lock" {
            found.insert(path.clone(), std::fs::read(path).unwrap());
        }
    }
    found
}

const ACCOUNTS: u64 = 10;
const BALANCE: i64 = 100;

fn account(n: u64) -> String {
    format!("/lake/bank/{n}")
}

/// Moves money between accounts, both in one transaction, until told to stop.
async fn transfer(store: Arc<dyn MetaStore>, stop: Arc<AtomicBool>, moved: Arc<AtomicU64>) {
    while !stop.load(Ordering::Relaxed) {
        let (from, to) = (rand::random_range(0..ACCOUNTS), rand::random_range(0..ACCOUNTS));
        if from == to {
            continue;
        }
        let keys = [account(from), account(to)];
        let read = store.batch_get(&keys, ReadOptions::default(), soon()).await.unwrap().value;
        let amount: i64 = rand::random_range(1..20);
        let balance = |n: usize| String::from_utf8(read[n].value.to_vec()).unwrap().parse::<i64>().unwrap();
        let txn = Txn {
            when: read.iter().map(|e| Compare::mod_revision(&e.key, e.mod_revision)).collect(),
            then: vec![
                Op::put(&keys[0], (balance(0) - amount).to_string()),
                Op::put(&keys[1], (balance(1) + amount).to_string()),
            ],
            ..Txn::default()
        };
        let committed = store.commit(txn, soon()).await.unwrap();
        moved.fetch_add(u64::from(committed.result.succeeded), Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_saved_under_load_is_one_state_from_any_peer() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store: Arc<dyn MetaStore> = Arc::new(cluster.client());
    for n in 0..ACCOUNTS {
        store.cas(&account(n), None, BALANCE.to_string().into(), soon()).await.unwrap();
    }
    let (stop, moved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let movers: Vec<_> = (0..4).map(|_| tokio::spawn(transfer(store.clone(), stop.clone(), moved.clone()))).collect();
    let dir = scratch();
    let mut last = 0;
    for round in 0..6 {
        let wanted = moved.load(Ordering::Relaxed) + 20;
        eventually("transfers", async || (moved.load(Ordering::Relaxed) >= wanted).then_some(())).await;
        let noted = cluster.put(&format!("/kv/noted/{round}"), "1").await;
        let file = dir.path().join(format!("{round}.snap"));
        let saved = save(&cluster, 1 + round % 3, Consistency::Linearizable, &file).await.unwrap();
        let state = &saved.applied.state;
        assert!(state.revision() >= noted && state.revision() > last, "everything acknowledged before is in it");
        last = state.revision();
        assert!(state.get(&format!("/kv/noted/{round}")).is_some());
        let sum: i64 = (0..ACCOUNTS)
            .map(|n| String::from_utf8(state.get(&account(n)).unwrap().value.to_vec()).unwrap().parse::<i64>().unwrap())
            .sum();
        assert_eq!(sum, BALANCE * ACCOUNTS as i64, "no transfer is in it by half");
        // What is on disk is what was checked.
        assert_eq!(saved::read(&file).unwrap().summary(), saved.summary());
        assert_eq!(saved.cluster_id, cluster.status(1).await.cluster_id);
    }
    stop.store(true, Ordering::Relaxed);
    for mover in movers {
        mover.await.unwrap();
    }
    // Nothing is written over.
    let error = Writing::begin(&dir.path().join("0.snap")).unwrap_err().to_string();
    assert!(error.contains("0.snap exists already"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 6, "no temporary file is left");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_caller_holds_up_only_the_next_one_who_saves() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    for n in 0..16 {
        cluster.put(&format!("/kv/large/{n}"), vec![n; 1 << 19]).await;
    }
    let endpoint = cluster.configs[&1].listen.to_string();
    let mut slow = snapshots::save(&endpoint, None, Consistency::Linearizable, PATIENCE).await.unwrap();
    let mut came = slow.next().await.unwrap().unwrap().len();
    let refused = snapshots::save(&endpoint, None, Consistency::Linearizable, PATIENCE).await.unwrap_err();
    assert!(refused.to_string().contains("this host has as many snapshots on their way"), "{refused}");
    // Writes go on, and do not show in what was begun before.
    let load = Load::start(Arc::new(cluster.client()), 2, "meanwhile");
    load.grows_by(20).await;
    let dir = scratch();
    let mut bytes = Vec::new();
    while let Some(chunk) = slow.next().await.unwrap() {
        came += chunk.len();
        bytes.extend_from_slice(&chunk);
    }
    assert!(came > 8 << 20);
    load.finish().await;

    // A caller that goes away in the middle lets the next one in.
    let mut gone = snapshots::save(&endpoint, None, Consistency::Linearizable, PATIENCE).await.unwrap();
    gone.next().await.unwrap().unwrap();
    drop(gone);
    let file = dir.path().join("after.snap");
    let saved =
        eventually("the next to be let in", async || match save(&cluster, 1, Consistency::Linearizable, &file).await {
            Ok(saved) => Some(saved),
            Err(Error::Refused { .. }) => None,
            Err(error) => panic!("{error}"),
        })
        .await;
    assert!(saved.applied.state.len() > 16 + 20);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_without_a_majority_gives_what_it_has_and_says_no_to_more() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let revision = cluster.put("/kv/a", "1").await;
    for id in [2, 3] {
        let caught_up = v1::ReadOptions { min_revision: revision, ..v1::ReadOptions::default() };
        cluster.try_get(1, "/kv/a", caught_up).await.unwrap();
        cluster.stop(id).await;
    }
    let dir = scratch();
    let endpoint = cluster.configs[&1].listen.to_string();
    let timeout = Duration::from_secs(2);
    let error = snapshots::save(&endpoint, None, Consistency::Linearizable, timeout).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let saved = save(&cluster, 1, Consistency::Local, &dir.path().join("local.snap")).await.unwrap();
    assert_eq!(&saved.applied.state.get("/kv/a").unwrap().value[..], b"1");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_and_truncated_files_are_refused_and_make_nothing() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    for n in 0..50 {
        cluster.put(&format!("/kv/{n}"), vec![n; 200]).await;
    }
    let dir = scratch();
    let file = dir.path().join("good.snap");
    save(&cluster, 1, Consistency::Linearizable, &file).await.unwrap();
    cluster.stop_all().await;
    let good = std::fs::read(&file).unwrap();
    let (bad, made) = (dir.path().join("bad.snap"), dir.path().join("made"));
    for _ in 0..60 {
        let mut bytes = good.clone();
        let at = rand::random_range(0..bytes.len());
        let flip = rand::random();
        if flip {
            bytes[at] ^= 1 << rand::rng().random_range(0..8);
        } else {
            bytes.truncate(at);
        }
        std::fs::write(&bad, bytes).unwrap();
        let error = restore(&bad, &made, 1).await.unwrap_err().to_string();
        assert!(error.contains(&bad.display().to_string()), "flipped {flip} at {at}: {error}");
        assert!(!made.exists());
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

async fn granted(cluster: &TestCluster) -> u64 {
    cluster.client().grant_lease(Duration::from_secs(60), "a test", soon()).await.unwrap().id
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_cluster_is_a_new_one_and_grows_to_three() {
    let mut old = TestCluster::founded(3, |_| {}).await;
    old.put("/kv/stays", "1").await;
    let lease = granted(&old).await;
    let session = old.client().open_session(Duration::from_secs(60), "a test", soon()).await.unwrap();
    let hangs = Op::put_leased("/kv/hangs", "2", lease);
    old.commit(Txn { when: vec![Compare::lease_alive(lease)], then: vec![hangs], ..Txn::default() }).await;
    let scope = |path: &str, owner: ScopeOwner| Txn {
        when: vec![Compare::scope_free(path, Some(owner.clone()))],
        then: vec![Op::AcquireScope { path: path.to_owned(), owner }],
        ..Txn::default()
    };
    old.commit(scope("/leased", ScopeOwner::Lease(lease))).await;
    old.commit(scope("/procedure", ScopeOwner::Procedure("drop".into()))).await;
    let dir = scratch();
    let file = dir.path().join("saved.snap");
    let saved = save(&old, 2, Consistency::Linearizable, &file).await.unwrap();
    // The old cluster goes on meanwhile.
    let later = old.put("/kv/later", "1").await;

    let mut new = TestCluster::fresh(0, |_| {}).await;
    new.prepare(1, |_| {});
    let (_, made) = restore(&file, &new.configs[&1].dir, 1).await.unwrap();
    // One was opened here; that of the client which was granted the lease is closed behind it, sooner or later.
    assert!((1..=2).contains(&made.dropped.sessions), "{}", made.dropped.sessions);
    assert_eq!((made.dropped.leases, made.dropped.keys, made.dropped.scopes), (1, 1, 1));
    assert_eq!(made.state.revision, saved.applied.state.revision() + REVISION_GAP);
    let again = restore(&file, &new.configs[&1].dir, 1).await.unwrap_err().to_string();
    assert!(again.contains("exists already"), "{again}");
    new.start(1).await;
    new.leader().await;
    let status = new.status(1).await;
    assert_eq!(status.cluster_id, made.cluster_id);
    assert_ne!(status.cluster_id, old.status(1).await.cluster_id);
    assert_eq!(status.voters.iter().map(|m| m.id).collect::<Vec<_>>(), [1]);

    // Keys are what they were; promises of the old cluster are over.
    let kept = new.get(1, "/kv/stays").await.unwrap();
    assert_eq!(Some(&kept), saved.applied.state.get("/kv/stays").map(v1::KeyValue::from).as_ref());
    assert_eq!((new.get(1, "/kv/hangs").await, new.get(1, "/kv/later").await), (None, None));
    assert!(new.client().revoke_lease(lease, soon()).await.is_ok_and(|existed| !existed), "there is no such lease");
    assert!(new.commit(scope("/leased", ScopeOwner::Procedure("other".into()))).await.succeeded);
    assert!(!new.commit(scope("/procedure", ScopeOwner::Procedure("other".into()))).await.succeeded);
    let stamp = Stamp { session, sequence: 1, lowest_unanswered: 1 };
    let txn = Txn { then: vec![Op::put("/kv/x", "1")], ..Txn::default() };
    let request = v1::TxnRequest { txn: Some(txn.into()), stamp: Some(stamp.into()) };
    assert_eq!(kind(&new.kv(1).txn(request).await.unwrap_err()), Kind::SessionExpired);
    for from in [1, saved.applied.state.revision(), later + 1, made.state.revision] {
        let mut watch = new.client().watch("/kv/", from).unwrap();
        let told = watch.next().await.unwrap();
        assert!(matches!(told, Err(Error::Compacted { .. })), "a watch from {from}: {told:?}");
    }
    let next = new.put("/kv/next", "1").await;
    assert!(next > made.state.revision, "{next}");

    // Peers of the old cluster are strangers, also under the ids and addresses of before.
    let error = new.client().join(v1::Member { id: 2, ..old.named(2) }, soon()).await.unwrap_err().to_string();
    assert!(error.contains("belongs to cluster"), "{error}");
    let from = old.status(3).await;
    let header = v1::RaftHeader {
        cluster_id: from.cluster_id.clone(),
        from_id: 3,
        from_incarnation: from.self_.unwrap().incarnation,
        to_id: 1,
        to_incarnation: status.self_.unwrap().incarnation,
    };
    let vote = v1::Vote { term: 1_000_000, node_id: 3, committed: false };
    let vote = v1::VoteRequest { header: Some(header), vote: Some(vote), ..v1::VoteRequest::default() };
    assert_eq!(kind(&new.raft(1).vote(vote).await.unwrap_err()), Kind::WrongIdentity);
    let mut request = Request::new(v1::GetRequest { key: "/kv/stays".into(), options: None });
    request.metadata_mut().insert(lake_proto::CLUSTER_METADATA_KEY, from.cluster_id.parse().unwrap());
    assert_eq!(kind(&new.kv(1).get(request).await.unwrap_err()), Kind::WrongIdentity, "a client of the old one");

    let load = Load::start(Arc::new(new.client()), 2, "growth");
    for id in [2, 3] {
        let join = vec![new.configs[&1].listen.to_string()];
        new.prepare(id, |config| config.join = join);
        new.start(id).await;
        eventually("the learner to vote", async || match new.client().promote(id, soon()).await {
            Ok(answer) => answer.voter.then_some(()),
            Err(Error::Refused { .. }) => None,
            Err(error) => panic!("{error}"),
        })
        .await;
    }
    load.grows_by(20).await;
    load.finish().await;
    new.stop(1).await;
    new.put("/kv/without-the-first", "1").await;
    assert!(new.get(3, "/kv/stays").await.is_some());
    // It starts again like any other.
    new.start(1).await;
    assert!(new.get(1, "/kv/without-the-first").await.is_some());
    new.stop_all().await;
    old.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_of_a_stopped_peer_is_what_it_said_when_it_ran() {
    let mut cluster = TestCluster::founded(1, |config| {
        config.storage.snapshot_entries = 40;
        config.storage.purge_margin_entries = 5;
    })
    .await;
    let lease = granted(&cluster).await;
    for n in 0..130 {
        cluster.put(&format!("/kv/{n:03}"), format!("{n}")).await;
    }
    let purged = eventually("the log to be purged", async || {
        let status = cluster.status(1).await;
        (status.purged_index > 0 && status.snapshot_index > 40).then_some(status)
    })
    .await;
    let dir = cluster.configs[&1].dir.clone();
    let in_use = reading::read(&dir, BTreeSet::new()).await.unwrap_err();
    assert!(matches!(&in_use, lake_metasrv::Error::Locked { .. }), "{in_use}");
    let in_use = recover::plan(std::slice::from_ref(&dir)).await.unwrap_err();
    assert!(matches!(&in_use, lake_metasrv::Error::Locked { .. }), "{in_use}");
    let scratch = scratch();
    let live = save(&cluster, 1, Consistency::Linearizable, &scratch.path().join("live.snap")).await.unwrap();
    let said = cluster.status(1).await;
    cluster.stop_all().await;

    let before = contents(&dir);
    let reading = read(&dir).await;
    assert_eq!(reading.findings, []);
    let mark = reading.mark.as_ref().unwrap();
    assert_eq!((mark.peer_id, &mark.cluster_id), (1, &said.cluster_id));
    assert_eq!(Some(&mark.incarnation), said.self_.as_ref().map(|m| &m.incarnation));
    let log = reading.log.unwrap();
    assert_eq!(log.last.unwrap().index, said.last_log_index);
    assert!(log.purged.unwrap().index >= purged.purged_index);
    assert_eq!(log.entries, log.last.unwrap().index - log.purged.unwrap().index);
    let newest = reading.snapshots.first().unwrap();
    assert!(newest.covers.index >= purged.snapshot_index && newest.hash.is_some());
    let replayed = Summary::from(reading.replayed.as_ref().unwrap());
    assert_eq!((replayed.revision, replayed.keys), (said.revision, said.keys));
    assert_eq!(replayed, live.summary(), "the hash, too");
    assert_eq!(reading.replayed.as_ref().unwrap().state, live.applied.state);
    assert!(reading.replayed.as_ref().unwrap().state.has_lease(lease));
    let certain = Summary::from(reading.committed.as_ref().unwrap());
    assert_eq!(certain, replayed, "whoever votes alone has committed what it has");
    assert!(matches!(lake_metasrv::directory::DirectoryLock::take(&dir), Err(lake_metasrv::Error::Locked { .. })));
    drop(reading);
    assert_eq!(contents(&dir), before, "nothing was written");

    // The same of peers that are not alone: what is behind their snapshots is not certain.
    let mut cluster = TestCluster::founded(3, |config| config.storage.snapshot_entries = 40).await;
    for n in 0..60 {
        cluster.put(&format!("/kv/{n:03}"), format!("{n}")).await;
    }
    for id in 1..=3 {
        eventually("a snapshot", async || (cluster.status(id).await.snapshot_index > 0).then_some(())).await;
    }
    // Too few for another one.
    for n in 60..70 {
        cluster.put(&format!("/kv/{n:03}"), format!("{n}")).await;
    }
    let live = save(&cluster, 2, Consistency::Linearizable, &scratch.path().join("three.snap")).await.unwrap();
    for id in 1..=3 {
        let read = v1::ReadOptions { min_revision: live.applied.state.revision(), ..v1::ReadOptions::default() };
        cluster.try_get(id, "/kv/000", read).await.unwrap();
    }
    cluster.stop_all().await;
    for id in 1..=3 {
        let reading = read(&cluster.configs[&id].dir).await;
        assert!(!reading.is_damaged() && reading.is_whole(), "{:?}", reading.findings);
        let replayed = reading.replayed.as_ref().unwrap();
        assert_eq!((replayed.state.digest(), replayed.state.len()), (live.applied.state.digest(), 70));
        let certain = reading.committed.as_ref().unwrap();
        assert!(certain.last >= Some(reading.snapshots[0].covers) && certain.last < replayed.last);
    }
}

/// One survivor of three, and it was not the one with everything.
#[tokio::test(flavor = "multi_thread")]
async fn one_of_three_survives_with_everything_that_it_knew() {
    let mut cluster = TestCluster::founded(3, |config| config.storage.snapshot_entries = 30).await;
    let leader = cluster.leader().await;
    let survivor = (1..=3).find(|id| *id != leader).unwrap();
    let mut known = 0;
    for n in 0..50 {
        known = cluster.put(&format!("/kv/known/{n}"), "1").await;
    }
    let applied = v1::ReadOptions { min_revision: known, ..v1::ReadOptions::default() };
    cluster.try_get(survivor, "/kv/known/0", applied).await.unwrap();
    let before = cluster.status(survivor).await;
    cluster.stop(survivor).await;
    // The others go on without it, and are lost.
    for n in 0..20 {
        cluster.put(&format!("/kv/unknown/{n}"), "1").await;
    }
    cluster.stop_all().await;

    let dir = cluster.configs[&survivor].dir.clone();
    let untouched = contents(&dir);
    let plan = recover::plan(std::slice::from_ref(&dir)).await.unwrap();
    assert!(!plan.is_majority() && !plan.quorums.complete);
    let warned = plan.warnings().join("\n");
    assert!(warned.contains("acknowledged writes behind") && warned.contains("may be lost"), "{warned}");
    let mut new = TestCluster::fresh(0, |_| {}).await;
    new.prepare(7, |_| {});
    let made = plan.carry_out(&new.configs[&7].dir, 7).await.unwrap();
    let locked = lake_metasrv::directory::DirectoryLock::take(&dir);
    assert!(matches!(locked, Err(lake_metasrv::Error::Locked { .. })), "it is held until the end");
    drop(plan);
    assert_eq!(contents(&dir), untouched);
    assert!(made.state.revision >= before.revision + REVISION_GAP);
    assert_ne!(made.cluster_id, before.cluster_id);

    new.start(7).await;
    new.leader().await;
    for n in 0..50 {
        assert!(new.get(7, &format!("/kv/known/{n}")).await.is_some(), "{n}");
    }
    let term = new.status(7).await.term;
    assert!(term > before.term, "{term}");
    assert!(new.put("/kv/after", "1").await > made.state.revision);
    // The others come back after all, and are refused.
    let others: Vec<u64> = (1..=3).filter(|id| *id != survivor).collect();
    for id in &others {
        cluster.start(*id).await;
    }
    for id in others {
        let error = new.client().join(cluster.named(id), soon()).await.unwrap_err().to_string();
        assert!(error.contains("belongs to cluster"), "{error}");
    }
    cluster.stop_all().await;
    new.stop_all().await;
}

/// Two survivors of five, of different length.
#[tokio::test(flavor = "multi_thread")]
async fn two_of_five_survive_and_the_longer_one_is_taken() {
    let mut cluster = TestCluster::founded(5, |_| {}).await;
    let leader = cluster.leader().await;
    let followers: Vec<u64> = (1..=5).filter(|id| *id != leader).collect();
    let (short, long) = (followers[0], followers[1]);
    let write = async |cluster: &TestCluster, to: u64, name: &str| {
        let mut revision = 0;
        for n in 0..10 {
            revision = cluster.put(&format!("/kv/{name}/{n}"), "1").await;
        }
        let applied = v1::ReadOptions { min_revision: revision, ..v1::ReadOptions::default() };
        cluster.try_get(to, "/kv/x", applied).await.unwrap();
    };
    write(&cluster, short, "both").await;
    cluster.stop(short).await;
    write(&cluster, long, "longer").await;
    cluster.stop(long).await;
    write(&cluster, leader, "lost").await;
    cluster.stop_all().await;

    let dirs = [short, long].map(|id| cluster.configs[&id].dir.clone());
    let plan = recover::plan(&dirs).await.unwrap();
    assert_eq!(plan.taken().peer_id, Some(long));
    let absent: BTreeSet<u64> = (1..=5).filter(|id| ![short, long].contains(id)).collect();
    assert_eq!(plan.quorums.absent, absent);
    let mut new = TestCluster::fresh(0, |_| {}).await;
    new.prepare(1, |_| {});
    plan.carry_out(&new.configs[&1].dir, 1).await.unwrap();
    drop(plan);
    new.start(1).await;
    new.leader().await;
    for n in 0..10 {
        assert!(new.get(1, &format!("/kv/both/{n}")).await.is_some());
        assert!(new.get(1, &format!("/kv/longer/{n}")).await.is_some());
        assert!(new.get(1, &format!("/kv/lost/{n}")).await.is_none());
    }
    new.stop_all().await;

    // Three of five are a majority: nothing is lost, and they should go on as they are.
    let dirs: Vec<PathBuf> = followers[..3].iter().map(|id| cluster.configs[id].dir.clone()).collect();
    let plan = recover::plan(&dirs).await.unwrap();
    assert!(plan.is_majority() && plan.quorums.complete);
    assert!(plan.warnings()[0].contains("no acknowledged write is lost"), "{:?}", plan.warnings());
}
