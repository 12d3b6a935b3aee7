//! Leases and scopes over three peers: what ends, what stays, and who may still commit.

use std::time::{Duration, Instant};

use crate::support::{PATIENCE, TestCluster, eventually, kind};
use lake_client::remote::RemoteStore;
use lake_client::remote::coordination::Lease;
use lake_client::remote::keeper::LeaseKeeper;
use lake_client::store::{MetaStore, ReadOptions};
use lake_metasrv::peer::counters::{Counter, Counters};
use lake_proto::coordination::ScopeOwner;
use lake_proto::kv::{Compare, Op, OpResult, Txn, TxnResult};
use lake_proto::limits::MAX_IDS;
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::leases_client::LeasesClient;
use tonic::Status;
use tonic::transport::Channel;

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn leases(cluster: &TestCluster, at: u64) -> LeasesClient<Channel> {
    LeasesClient::new(cluster.channel(at))
}

async fn grant(store: &RemoteStore, ttl_ms: u64) -> Lease {
    store.grant_lease(Duration::from_millis(ttl_ms), "a test", soon()).await.unwrap()
}

async fn commit(store: &RemoteStore, when: Vec<Compare>, then: Vec<Op>) -> TxnResult {
    let txn = Txn { when, then, otherwise: vec![] };
    // None of these does harm a second time.
    eventually("a commit", async || store.commit(txn.clone(), soon()).await.ok()).await.result
}

/// Puts a key that hangs on a lease.
async fn hang(store: &RemoteStore, key: &str, lease: &Lease) {
    let done = commit(store, vec![Compare::lease_alive(lease.id)], vec![Op::put_leased(key, "v", lease.id)]).await;
    assert!(done.succeeded);
}

async fn is_there(store: &RemoteStore, key: &str) -> bool {
    store.get(key, ReadOptions::default(), soon()).await.unwrap().value.is_some()
}

async fn until_gone(store: &RemoteStore, key: &str) {
    eventually("a key to go with its lease", async || (!is_there(store, key).await).then_some(())).await;
}

/// One message on a stream of its own.
async fn keep_alive(cluster: &TestCluster, at: u64, ids: Vec<u64>) -> Result<v1::KeepAliveResponse, Status> {
    let messages = tokio_stream::iter([v1::KeepAliveRequest { ids, tag: 7 }]);
    let mut answers = leases(cluster, at).keep_alive(messages).await?.into_inner();
    answers.message().await.map(|answer| answer.expect("one message, one answer"))
}

fn acquire(path: &str, owner: &ScopeOwner) -> (Compare, Op) {
    let op = Op::AcquireScope { path: path.to_owned(), owner: owner.clone() };
    (Compare::scope_free(path, Some(owner.clone())), op)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_lease_ends_and_takes_its_keys_with_it() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let asked = Instant::now();
    let lease = grant(&store, 6000).await;
    hang(&store, "/kv/hangs", &lease).await;
    commit(&store, vec![], vec![Op::put("/kv/stays", "v")]).await;
    until_gone(&store, "/kv/hangs").await;
    assert!(asked.elapsed() >= lease.ttl, "it ended early");
    assert!(is_there(&store, "/kv/stays").await);
    let leader = cluster.leader().await;
    let list = leases(&cluster, leader).list(v1::ListLeasesRequest::default()).await.unwrap().into_inner();
    assert_eq!((list.leases, list.more), (vec![], false));
    let answer = eventually("a keep-alive's answer", async || {
        keep_alive(&cluster, cluster.leader().await, vec![lease.id]).await.ok()
    })
    .await;
    assert_eq!((answer.alive, answer.expired, answer.tag), (vec![], vec![lease.id], 7));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_kept_alive_stays_until_it_is_revoked() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let lease = grant(&store, 6000).await;
    hang(&store, "/kv/hangs", &lease).await;
    let keeper = LeaseKeeper::start(store.clone(), lease);
    let long = lease.held_until + Duration::from_secs(4);
    eventually("renewals", async || (keeper.held_until() > long).then_some(())).await;
    assert!(is_there(&store, "/kv/hangs").await && keeper.is_held());
    assert!(store.revoke_lease(lease.id, soon()).await.unwrap());
    assert!(!is_there(&store, "/kv/hangs").await);
    let why = keeper.lost().await;
    assert!(why.contains("is over"), "{why}");
    assert!(!keeper.is_held());
    keeper.stop().await;
    assert!(!store.revoke_lease(lease.id, soon()).await.unwrap(), "it was there no more");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_leader_gives_every_lease_its_full_time_and_ends_it_then() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let ttl = Duration::from_secs(8);
    let lease = grant(&store, 8000).await;
    hang(&store, "/kv/hangs", &lease).await;
    let leader = eventually("most of its time to pass", async || {
        let leader = cluster.leader().await;
        let list = leases(&cluster, leader).list(v1::ListLeasesRequest::default()).await.ok()?.into_inner();
        list.leases.first()?.remaining_ms.filter(|left| *left < 4000).map(|_| leader)
    })
    .await;
    let stopped = Instant::now();
    cluster.stop(leader).await;
    until_gone(&store, "/kv/hangs").await;
    let lived = stopped.elapsed();
    assert!(lived >= ttl, "the new leader ended it after {lived:?}");
    println!("ended {:?} after the old leader was stopped", lived);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_finds_the_new_leader_in_time() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let lease = grant(&store, 12_000).await;
    hang(&store, "/kv/hangs", &lease).await;
    let keeper = LeaseKeeper::start(store.clone(), lease);
    for _ in 0..2 {
        let leader = cluster.leader().await;
        cluster.stop(leader).await;
        let later = Instant::now() + lease.ttl;
        eventually("a renewal by the new leader", async || (keeper.held_until() > later).then_some(())).await;
        cluster.start(leader).await;
    }
    assert!(keeper.is_held() && is_there(&store, "/kv/hangs").await);
    cluster.stop_all().await;
    let why = keeper.lost().await;
    assert!(why.contains("was not renewed within its 12.0 s"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_was_paused_cannot_commit() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let zombie = grant(&store, 6000).await;
    let (when, then) = acquire("/kv/scope", &ScopeOwner::Lease(zombie.id));
    assert!(commit(&store, vec![when], vec![then]).await.succeeded);
    hang(&store, "/kv/owner", &zombie).await;
    until_gone(&store, "/kv/owner").await;
    let heir = grant(&store, 60_000).await;
    let (when, then) = acquire("/kv/scope", &ScopeOwner::Lease(heir.id));
    assert!(commit(&store, vec![when], vec![then]).await.succeeded, "it went with the zombie's lease");
    hang(&store, "/kv/owner", &heir).await;
    assert!(heir.id > zombie.id, "fences rise");

    let put = |value: &'static str| vec![Op::put("/kv/result", value)];
    assert!(!commit(&store, vec![Compare::lease_alive(zombie.id)], put("the zombie's")).await.succeeded);
    assert!(!is_there(&store, "/kv/result").await);
    assert!(commit(&store, vec![Compare::lease_alive(heir.id)], put("the heir's")).await.succeeded);

    // Each is counted where it was proposed; what is asked for again behind a lost answer, again.
    let counted = |of: fn(&Counters) -> &Counter| {
        let members = cluster.running.values().map(|server| server.peer().member().unwrap());
        members.map(|member| of(&member.counters).get()).sum::<u64>()
    };
    assert!(counted(|c| &c.leases_expired) >= 1 && counted(|c| &c.scopes_acquired) >= 2);
    assert!(counted(|c| &c.scopes_taken) >= 1, "it was taken from a holder that fell silent");
    assert!(counted(|c| &c.scopes_acquired_micros) > 0, "acquiring took some time");
    assert!(counted(|c| &c.fences_refused) >= 1, "the zombie's commit");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scopes_conflict_up_and_down_the_hierarchy_and_a_takeover_has_a_greater_fence() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let (first, second) = (grant(&store, 60_000).await, grant(&store, 60_000).await);
    let (mine, theirs) = (ScopeOwner::Lease(first.id), ScopeOwner::Lease(second.id));
    let take = async |path: &str, owner: &ScopeOwner| {
        let (when, then) = acquire(path, owner);
        commit(&store, vec![when], vec![then]).await
    };
    let fence = |result: &TxnResult| match result.results[..] {
        [OpResult::AcquireScope { fence }] => fence,
        ref other => panic!("{other:?}"),
    };
    let taken = take("/catalog/ns/t", &mine).await;
    assert!(taken.succeeded);
    for path in ["/catalog/ns/t", "/catalog/ns", "/catalog/ns/t/part", "/"] {
        let refused = take(path, &theirs).await;
        assert!(!refused.succeeded, "{path}");
        let [conflict] = &refused.conflicts[..] else { panic!("{path}: {:?}", refused.conflicts) };
        assert_eq!((conflict.path.as_str(), &conflict.owner), ("/catalog/ns/t", &mine));
        assert!(conflict.fence == fence(&taken) && conflict.acquired_unix_ms > 0);
    }
    assert!(take("/catalog/ns/t2", &theirs).await.succeeded, "a neighbour is none");
    let procedure = ScopeOwner::Procedure("drop-7".into());
    assert!(take("/catalog/other", &procedure).await.succeeded);

    let list = async |prefix: &str, after: &str, limit| {
        let read = store.list_scopes(prefix, after, limit, ReadOptions::default(), soon()).await.unwrap().value;
        (read.items.into_iter().map(|scope| scope.path).collect::<Vec<_>>(), read.more)
    };
    assert_eq!(list("/catalog/ns/", "", 1).await, (vec!["/catalog/ns/t".to_owned()], true));
    assert_eq!(list("/catalog/ns/", "/catalog/ns/t", 0).await, (vec!["/catalog/ns/t2".to_owned()], false));

    assert!(store.revoke_lease(first.id, soon()).await.unwrap());
    let taken_over = take("/catalog/ns/t", &theirs).await;
    assert!(taken_over.succeeded && fence(&taken_over) > fence(&taken));
    assert!(!take("/catalog/ns/t", &mine).await.succeeded, "a lease that is over owns nothing");
    assert!(store.revoke_lease(second.id, soon()).await.unwrap());
    assert_eq!(list("/", "", 0).await, (vec!["/catalog/other".to_owned()], false), "a procedure's scope stays");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_lead_says_so_and_limits_are_named() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let lease = grant(&store, 60_000).await;
    let ask = |ttl_ms| v1::GrantLeaseRequest { ttl_ms, holder: String::new(), stamp: None };

    let (leader, follower) = eventually("a follower that names the leader", async || {
        let leader = cluster.leader().await;
        let follower = (1..=3).find(|id| *id != leader)?;
        let refused = [
            leases(&cluster, follower).grant(ask(1000)).await.err()?,
            keep_alive(&cluster, follower, vec![lease.id]).await.err()?,
        ];
        let named = refused.map(|status| {
            let detail = lake_proto::status::detail(&status).unwrap();
            (detail.kind(), detail.leader.map(|l| l.id))
        });
        (named == [(Kind::NotLeader, Some(leader)), (Kind::NotLeader, Some(leader))]).then_some((leader, follower))
    })
    .await;
    let on_follower = leases(&cluster, follower).list(v1::ListLeasesRequest::default()).await.unwrap().into_inner();
    assert_eq!(on_follower.leases[0].remaining_ms, None, "a follower measures nothing");
    assert_eq!((on_follower.leases[0].id, on_follower.leases[0].ttl_ms), (lease.id, 60_000));

    for ttl_ms in [999, 60_001] {
        assert_eq!(kind(&leases(&cluster, leader).grant(ask(ttl_ms)).await.unwrap_err()), Kind::InvalidArgument);
    }
    let many = vec![lease.id; MAX_IDS + 1];
    assert_eq!(kind(&keep_alive(&cluster, leader, many).await.unwrap_err()), Kind::InvalidArgument);
    cluster.stop_all().await;
}

/// User and system time of this process.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

/// How much of a core this process uses, measured over two seconds.
async fn idle_percent() -> f64 {
    let (before, began) = (cpu(), Instant::now());
    tokio::time::sleep(Duration::from_secs(2)).await;
    (cpu() - before).as_secs_f64() / began.elapsed().as_secs_f64() * 100.0
}

/// Keeps leases alive on one stream, message after message.
async fn renew(mut client: LeasesClient<Channel>, ids: Vec<u64>, rounds: u64) -> Result<(), Status> {
    let (sender, messages) = tokio::sync::mpsc::channel(1);
    let message = |tag| v1::KeepAliveRequest { ids: ids.clone(), tag };
    sender.send(message(0)).await.unwrap();
    let messages = tokio_stream::wrappers::ReceiverStream::new(messages);
    let mut answers = client.keep_alive(messages).await?.into_inner();
    for tag in 0..rounds {
        if tag > 0 {
            sender.send(message(tag)).await.map_err(|_| Status::unavailable("the stream has ended"))?;
        }
        let answer = answers.message().await?.ok_or_else(|| Status::unavailable("the stream has ended"))?;
        assert_eq!((answer.tag, answer.alive.len(), answer.expired.len()), (tag, ids.len(), 0));
    }
    Ok(())
}

/// Prints what 5,000 leases cost; all three peers and the clients are in this process. The figures are of use where nothing
/// else runs in it: `--test it five_thousand`.
#[tokio::test(flavor = "multi_thread")]
async fn five_thousand_leases_are_kept_alive() {
    const LEASES: usize = 5000;
    const STREAMS: usize = 100;
    const ROUNDS: u64 = 10;
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let without_leases = idle_percent().await;
    let mut ids = Vec::new();
    while ids.len() < LEASES {
        let granting = (0..250).map(|_| grant(&store, 60_000));
        ids.extend(futures::future::join_all(granting).await.into_iter().map(|lease| lease.id));
    }
    let with_leases = idle_percent().await;
    // A busy machine may elect in the middle, which ends the streams: then again.
    let (used, took, rounds) = eventually("a run without an election", async || {
        let leader = cluster.leader().await;
        let client = leases(&cluster, leader);
        let member = cluster.running[&leader].peer().member()?;
        let (cpu_before, began, rounds) = (cpu(), Instant::now(), member.reads.rounds());
        let streams = ids.chunks(LEASES / STREAMS).map(|ids| tokio::spawn(renew(client.clone(), ids.to_vec(), ROUNDS)));
        let ended = futures::future::join_all(streams).await;
        let rounds = member.reads.rounds() - rounds;
        ended.into_iter().all(|stream| stream.unwrap().is_ok()).then(|| (cpu() - cpu_before, began.elapsed(), rounds))
    })
    .await;
    let messages = STREAMS as u64 * ROUNDS;
    assert!(rounds <= messages / 4, "{rounds} confirmations for {messages} messages: all that wait share one");
    println!(
        "{LEASES} leases on {STREAMS} streams, renewed {ROUNDS} times in {took:?}, confirmed {rounds} times: {used:?} of CPU, {:?} a message, {:?} a \
         renewal; three renewals per 10 s would take {:.2} % of a core",
        used / (STREAMS as u32 * ROUNDS as u32),
        used / (LEASES as u32 * ROUNDS as u32),
        used.as_secs_f64() / ROUNDS as f64 * 3.0 / 10.0 * 100.0
    );
    println!("three idle peers: {without_leases:.1} % of a core, with {LEASES} leases {with_leases:.1} %");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_without_a_quorum_keeps_no_lease_alive() {
    // It goes on as the leader for as long as the test takes.
    let mut cluster = TestCluster::founded(3, |config| {
        config.timing.election_timeout_min = Duration::from_secs(59);
        config.timing.election_timeout_max = Duration::from_secs(60);
    })
    .await;
    let store = cluster.client();
    let lease = grant(&store, 60_000).await;
    let leader = cluster.leader().await;
    let kept = keep_alive(&cluster, leader, vec![lease.id]).await.unwrap();
    assert_eq!(kept.alive, [lease.id]);
    for id in (1..=3).filter(|id| *id != leader) {
        cluster.stop(id).await;
    }
    let answer = tokio::time::timeout(Duration::from_secs(4), keep_alive(&cluster, leader, vec![lease.id])).await;
    assert!(!matches!(&answer, Ok(Ok(kept)) if !kept.alive.is_empty()), "nobody has confirmed it: {answer:?}");
    let status = cluster.status(leader).await;
    assert_eq!(status.leader.map(|l| l.id), Some(leader), "it was still asked as the leader");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_no_quorum_confirms_ends_no_lease_and_gives_it_its_full_time_afterwards() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let store = cluster.client();
    let ttl = Duration::from_millis(6000);
    let lease = grant(&store, 6000).await;
    hang(&store, "/kv/hangs", &lease).await;
    // However long stopping the others takes.
    let keeper = LeaseKeeper::start(store.clone(), lease);
    let leader = cluster.leader().await;
    let others: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    for id in &others {
        cluster.stop(*id).await;
    }
    keeper.stop().await;
    // A proposal would be in its log, whether or not anybody else has it.
    let member = cluster.running[&leader].peer().member().unwrap();
    let alone_since = Instant::now();
    eventually("it to be confirmed no more", async || member.view.confirmed_term().is_none().then_some(())).await;
    let proposed = member.log.bounds().1;
    assert_eq!(member.view.led_term(), Some(cluster.status(leader).await.term), "its core goes on as the leader");
    let over = alone_since + ttl + Duration::from_millis(500);
    eventually("the lease's time to be over", async || (Instant::now() > over).then_some(())).await;
    assert_eq!(member.log.bounds().1, proposed, "it has proposed something");
    drop(member);

    let heard_again = Instant::now();
    for id in &others {
        cluster.start(*id).await;
    }
    until_gone(&store, "/kv/hangs").await;
    assert!(heard_again.elapsed() >= ttl, "it ended {:?} after a quorum was there again", heard_again.elapsed());
    cluster.stop_all().await;
}
