//! Watches over real peers: nothing lost, nothing twice, whatever dies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::{PATIENCE, TestCluster, eventually, free_port, kind};
use futures::StreamExt;
use lake_client::follow::{Follower, Told};
use lake_client::remote::watch::Watch;
use lake_client::store::{Error, MetaStore, ReadOptions, Token};
use lake_metasrv::EmbeddedStore;
use lake_proto::kv::{Op, Revision, Txn};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use lake_proto::v1::watch_client::WatchClient;
use lake_proto::watch::{Change, Changes};
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

const PREFIXES: [&str; 7] = ["", "/kv/", "/kv/a", "/kv/a/", "/kv/b/1", "/kv/none/", "/lake/"];

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn client(cluster: &TestCluster, at: u64) -> WatchClient<Channel> {
    let address = format!("http://{}", cluster.configs[&at].listen);
    let channel = Channel::from_shared(address).unwrap().connect_lazy();
    WatchClient::new(channel).max_decoding_message_size(lake_proto::MAX_WATCH_MESSAGE_BYTES)
}

async fn watch(
    cluster: &TestCluster,
    at: u64,
    prefix: &str,
    from: Revision,
) -> Result<Streaming<v1::WatchResponse>, Status> {
    let request = v1::WatchRequest { prefix: prefix.to_owned(), from_revision: from };
    client(cluster, at).watch(request).await.map(|r| r.into_inner())
}

async fn message(stream: &mut Streaming<v1::WatchResponse>) -> Result<Changes, Status> {
    let message = tokio::time::timeout(PATIENCE, stream.message()).await.expect("a message in time")?;
    Ok(Changes::try_from(message.expect("the stream goes on")).unwrap())
}

/// Everything from where a stream begins up to a revision, checked as it comes.
async fn history(stream: &mut Streaming<v1::WatchResponse>, from: Revision, upto: Revision) -> Vec<Change> {
    let mut history = History::new(from);
    while history.progress < upto {
        history.add(message(stream).await.unwrap());
    }
    history.changes
}

/// What a watcher was told.
struct History {
    changes: Vec<Change>,
    progress: Revision,
}

impl History {
    fn new(from: Revision) -> Self {
        Self { changes: vec![], progress: from.saturating_sub(1) }
    }

    fn add(&mut self, told: Changes) {
        for change in told.changes {
            assert!(change.revision > self.progress, "told {} after {}", change.revision, self.progress);
            self.progress = change.revision;
            self.changes.push(change);
        }
        assert!(told.progress >= self.progress, "progress goes back");
        self.progress = told.progress;
    }
}

/// What of a history lies under a prefix.
fn under(history: &[Change], prefix: &str, from: Revision) -> Vec<Change> {
    let part = |change: &Change| Change {
        revision: change.revision,
        events: change.events.iter().filter(|e| e.key.starts_with(prefix)).cloned().collect(),
    };
    history.iter().filter(|c| c.revision >= from).map(part).filter(|c| !c.events.is_empty()).collect()
}

/// The kept changes of a peer: what a watcher reads that comes afterwards.
async fn kept(cluster: &TestCluster, at: u64, upto: Revision) -> Vec<Change> {
    let mut stream = watch(cluster, at, "", 1).await.unwrap();
    history(&mut stream, 1, upto).await
}

/// Writes transactions of one to four keys and returns the revisions that were acknowledged, and what was put then.
async fn write(cluster: &TestCluster, writer: usize, count: usize) -> BTreeMap<Revision, String> {
    let mut acknowledged = BTreeMap::new();
    for i in 0..count {
        let value = format!("{writer}.{i}");
        let key = |n: usize| format!("/kv/{}/{}", ["a", "b", "ab", "c"][(writer + n) % 4], (i + n) % 3);
        let mut then: Vec<_> = (0..=i % 4).map(|n| Op::put(key(n), value.clone())).collect();
        if i % 5 == 4 {
            then.push(Op::delete(key(then.len())));
        }
        let done = cluster.commit(Txn { then, ..Txn::default() }).await;
        acknowledged.insert(done.revision, value);
    }
    acknowledged
}

fn assert_holds(history: &[Change], acknowledged: &BTreeMap<Revision, String>) {
    for (revision, value) in acknowledged {
        let at = history.binary_search_by_key(revision, |change| change.revision).expect("the revision is told");
        let entries = history[at].events.iter().filter_map(|event| event.entry.as_ref());
        assert!(entries.clone().count() > 0);
        assert!(entries.into_iter().all(|entry| entry.value == value.as_bytes() && entry.mod_revision == *revision));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_watcher_on_every_peer_sees_every_change_once_and_in_order() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.create("/lake/table/a", "1").await;
    let before = cluster.put("/kv/a/0", "before").await;
    let mut watchers = vec![];
    for at in 1..=3 {
        for prefix in PREFIXES {
            for from in [1, before, before + 20, 0] {
                let mut stream = watch(&cluster, at, prefix, from).await.unwrap();
                let from = match from {
                    0 => message(&mut stream).await.unwrap().progress + 1,
                    from => from,
                };
                watchers.push((at, prefix, from, stream));
            }
        }
    }
    let writers = (0..6).map(|writer| write(&cluster, writer, 30));
    let reading = async {
        let written = futures::future::join_all(writers).await;
        let last = cluster.put("/kv/last", "1").await;
        (written, last)
    };
    let (written, last) = reading.await;
    let own = kept(&cluster, 1, last).await;
    written.iter().for_each(|acknowledged| assert_holds(&own, acknowledged));
    assert_eq!(own.len() as u64, last, "each revision was a change");
    for at in 2..=3 {
        assert_eq!(kept(&cluster, at, last).await, own, "peer {at} keeps the same");
    }
    for (at, prefix, from, mut stream) in watchers {
        let told = history(&mut stream, from, last).await;
        assert!(told == under(&own, prefix, from), "peer {at}, {prefix:?} from {from}");
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watchers_that_come_and_go_while_others_write_miss_nothing() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    let first = cluster.put("/kv/a/0", "first").await;
    let done = AtomicU64::new(0);
    let hops = PREFIXES.map(|_| AtomicU64::new(0));
    // However quick the machine is, writing goes on until every watcher has come and gone in the middle of it.
    let writing = async {
        let mut writer = 0;
        while hops.iter().any(|hops| hops.load(Ordering::Acquire) < 4) {
            futures::future::join_all((writer..writer + 4).map(|writer| write(&cluster, writer, 30))).await;
            writer += 4;
        }
        let last = cluster.put("/kv/last", "1").await;
        done.store(last, Ordering::Release);
        last
    };
    // Each hops on where the last one hopped off.
    let hopping = async |n: usize, prefix: &'static str| {
        let mut all = History::new(first);
        loop {
            let mut stream = watch(&cluster, 1, prefix, all.progress + 1).await.unwrap();
            hops[n].fetch_add(1, Ordering::AcqRel);
            for _ in 0..3 {
                all.add(message(&mut stream).await.unwrap());
                let last = done.load(Ordering::Acquire);
                if last > 0 && all.progress >= last {
                    return (prefix, all.changes);
                }
            }
        }
    };
    let hopped = futures::future::join_all(PREFIXES.iter().enumerate().map(|(n, prefix)| hopping(n, prefix)));
    let (last, hopped) = futures::join!(writing, hopped);
    let own = kept(&cluster, 1, last).await;
    for (prefix, told) in hopped {
        assert!(told == under(&own, prefix, first), "{prefix:?} after {hops:?} hops");
    }
    cluster.stop_all().await;
}

async fn next(watch: &mut Watch) -> Result<Changes, Error> {
    tokio::time::timeout(PATIENCE, watch.next()).await.expect("a message in time").expect("the watch goes on")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_outlives_the_leader_and_any_peer() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let first = cluster.put("/kv/a/0", "first").await;
    let stores: Vec<_> = (0..4).map(|_| cluster.client()).collect();
    let last = Arc::new(AtomicU64::new(0));
    let mut watching = tokio::task::JoinSet::new();
    for store in &stores {
        for prefix in PREFIXES {
            let (mut watch, last) = (store.watch(prefix, first).unwrap(), last.clone());
            watching.spawn(async move {
                let mut told = History::new(first);
                loop {
                    told.add(next(&mut watch).await.unwrap());
                    let last = last.load(Ordering::Acquire);
                    if last > 0 && told.progress >= last {
                        return (prefix, told.changes);
                    }
                }
            });
        }
    }
    let mut acknowledged = BTreeMap::new();
    for round in 0..4 {
        acknowledged.extend(write(&cluster, 2 * round, 12).await);
        let leader = cluster.leader().await;
        // The leader, and then another one, each in the middle of the watches.
        let gone = if round % 2 == 0 { leader } else { (1..=3).find(|id| *id != leader).unwrap() };
        cluster.stop(gone).await;
        acknowledged.extend(write(&cluster, 2 * round + 1, 12).await);
        cluster.start(gone).await;
    }
    let end = cluster.put("/kv/last", "1").await;
    last.store(end, Ordering::Release);
    let own = kept(&cluster, 1, end).await;
    assert_holds(&own, &acknowledged);
    while let Some(told) = watching.join_next().await {
        let (prefix, told) = told.unwrap();
        assert!(told == under(&own, prefix, first), "{prefix:?}");
    }
    cluster.stop_all().await;
}

/// Writes more than is kept.
async fn overflow(cluster: &TestCluster) -> Revision {
    let value = bytes::Bytes::from(vec![7; (1 << 20) - 64]);
    let mut last = 0;
    for i in 0..10 {
        let then = (0..8).map(|n| Op::put(format!("/kv/large/{n}"), value.clone())).collect();
        last = cluster.commit(Txn { then, ..Txn::default() }).await.revision;
        cluster.put("/kv/small", format!("{i}")).await;
    }
    last + 1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_that_does_not_read_is_cut_off_and_writers_go_on() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    let first = cluster.put("/kv/small", "first").await;
    let mut slow = vec![];
    for at in 1..=3 {
        slow.push((at, watch(&cluster, at, "/kv/", first).await.unwrap()));
    }
    let mut quick = watch(&cluster, 1, "/kv/small", first).await.unwrap();
    let remote = cluster.client();
    let mut resting = remote.watch("/kv/", first).unwrap();
    let last = overflow(&cluster).await;
    assert!(history(&mut quick, first, last).await.len() >= 11, "one that reads is told everything");

    for (at, mut stream) in slow {
        let mut told = History::new(first);
        let status = loop {
            match message(&mut stream).await {
                Ok(changes) => told.add(changes),
                Err(status) => break status,
            }
            assert!(told.progress < last, "peer {at} did not cut it off");
        };
        assert_eq!(kind(&status), Kind::Compacted, "peer {at}: {status:?}");
        let oldest = lake_proto::status::detail(&status).unwrap().oldest_revision;
        assert!(oldest > told.progress + 1 && oldest <= last);
        let mut again = watch(&cluster, at, "/kv/", oldest).await.unwrap();
        assert_eq!(history(&mut again, oldest, last).await.len() as u64, last + 1 - oldest);
        let refused = message(&mut watch(&cluster, at, "/kv/", oldest - 1).await.unwrap()).await.unwrap_err();
        assert_eq!(kind(&refused), Kind::Compacted);
    }

    // The client's own watch has let its stream go, and kept its place.
    let mut told = History::new(first);
    while told.progress < last {
        told.add(next(&mut resting).await.unwrap());
    }
    assert_eq!(told.changes.len() as u64, last + 1 - first);
    // Too late, it says from where one can go on.
    let mut old = remote.watch("/kv/small", 1).unwrap();
    let error = next(&mut old).await.unwrap_err();
    let Error::Compacted { oldest, .. } = error else { panic!("{error}") };
    assert!(oldest > 1 && oldest <= last && error.to_string().contains(&oldest.to_string()), "{error}");
    assert!(old.next().await.is_none(), "an error ends it");
    let mut again = remote.watch("/kv/small", oldest).unwrap();
    assert!(next(&mut again).await.unwrap().progress >= oldest);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_fell_behind_begins_again_with_a_listing() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    cluster.put("/kv/small", "first").await;
    let store = Arc::new(cluster.client());
    let mut follower = Follower::new(store.clone(), "/kv/");
    let (mut copy, mut revision, mut resets) = (BTreeMap::new(), 0, 0);
    for wanted_resets in [1, 2] {
        let mut last = cluster.put("/kv/small", format!("{wanted_resets}")).await;
        if wanted_resets == 2 {
            // More than is kept, while nobody takes what is told.
            last = overflow(&cluster).await;
        }
        while revision < last {
            match tokio::time::timeout(PATIENCE, follower.next()).await.expect("it is told").unwrap() {
                Told::Reset(all) => {
                    resets += 1;
                    assert!(all.revision >= revision, "it goes back");
                    (copy, revision) =
                        (all.value.into_iter().map(|entry| (entry.key.clone(), entry)).collect(), all.revision);
                }
                Told::Changes(told) => {
                    assert!(told.changes.iter().all(|change| change.revision > revision), "it is told twice");
                    for event in told.changes.into_iter().flat_map(|change| change.events) {
                        copy.insert(event.key, event.entry.expect("nobody deletes"));
                    }
                    revision = told.progress;
                }
            }
        }
        assert_eq!(resets, wanted_resets);
        let all = store.list_all("/kv/", ReadOptions::default(), soon()).await.unwrap();
        assert!(copy.values().eq(&all.value), "the copy is what the cluster holds");
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_caller_of_the_client_goes_on_where_it_was() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    let first = cluster.put("/kv/a", "first").await;
    let remote = cluster.client();
    let mut watch = remote.watch("/kv/", first).unwrap();
    let value = bytes::Bytes::from(vec![7; 700 << 10]);
    let mut last = first;
    for _ in 0..40 {
        last = cluster.put("/kv/a", value.clone()).await;
    }
    // What it has not taken holds up no other call on the same connection.
    let read = remote.get("/kv/a", ReadOptions::default(), soon()).await.unwrap();
    assert_eq!(read.revision, last);
    let mut told = History::new(first);
    while told.progress < last {
        told.add(next(&mut watch).await.unwrap());
    }
    assert_eq!(told.changes.len() as u64, last + 1 - first);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_future_revision_waits_and_is_the_first_that_is_told() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    let now = cluster.put("/kv/a", "now").await;
    let mut stream = watch(&cluster, 1, "/kv/", now + 3).await.unwrap();
    for _ in 0..2 {
        cluster.put("/kv/a", "early").await;
    }
    // Its turn would have come, and it hears nothing.
    let mut other = watch(&cluster, 1, "/kv/", now + 1).await.unwrap();
    assert_eq!(history(&mut other, now + 1, now + 2).await.len(), 2);
    assert_eq!(cluster.put("/kv/a", "wanted").await, now + 3);
    let told = message(&mut stream).await.unwrap();
    assert_eq!(told.changes.iter().map(|c| c.revision).collect::<Vec<_>>(), [now + 3]);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_is_told_while_nothing_changes_under_the_prefix_and_not_too_often() {
    let mut cluster = TestCluster::founded(1, |_| {}).await;
    let mut last = cluster.put("/kv/busy", "1").await;
    let mut stream = watch(&cluster, 1, "/kv/quiet/", 0).await.unwrap();
    let began = Instant::now();
    let greeting = message(&mut stream).await.unwrap();
    assert_eq!(greeting, Changes { changes: vec![], progress: last });
    let mut marks = 1;
    for _ in 0..5 {
        for _ in 0..20 {
            last = cluster.put("/kv/busy", "2").await;
        }
        loop {
            let mark = message(&mut stream).await.unwrap();
            marks += 1;
            assert!(mark.changes.is_empty() && mark.progress <= last);
            if mark.progress == last {
                break;
            }
        }
    }
    // The revision stands still: the peer says that it still follows.
    for _ in 0..2 {
        assert_eq!(message(&mut stream).await.unwrap().progress, last);
        marks += 1;
    }
    let most = began.elapsed().as_millis() / 100 + 1;
    assert!(marks <= most, "{marks} marks in {:?}", began.elapsed());
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_watched_is_refused_with_its_reason() {
    let mut cluster = TestCluster::fresh(1, |_| {}).await;
    let status = watch(&cluster, 1, "/kv/", 0).await.unwrap_err();
    assert_eq!(kind(&status), Kind::Unavailable, "a fresh peer has nothing to tell: {status:?}");
    cluster.init(1).await.unwrap();
    cluster.leader().await;
    cluster.put("/kv/a", "1").await;
    let status = watch(&cluster, 1, &"k".repeat(5000), 0).await.unwrap_err();
    assert_eq!(kind(&status), Kind::InvalidArgument);
    assert!(cluster.client().watch(&"k".repeat(5000), 0).is_err());
    let mut request = Request::new(v1::WatchRequest { prefix: "/kv/".into(), from_revision: 0 });
    request.metadata_mut().insert(lake_proto::CLUSTER_METADATA_KEY, "another".parse().unwrap());
    let status = client(&cluster, 1).watch(request).await.unwrap_err();
    assert_eq!(kind(&status), Kind::WrongIdentity);

    // A peer that stops says so at once. The quickest of some, for a machine that is busy with other things.
    let mut quickest = Duration::MAX;
    for _ in 0..3 {
        let revision = cluster.put("/kv/a", "2").await;
        let mut stream = watch(&cluster, 1, "/kv/", revision).await.unwrap();
        assert_eq!(message(&mut stream).await.unwrap().changes.len(), 1);
        let stopping = Instant::now();
        cluster.stop(1).await;
        quickest = quickest.min(stopping.elapsed());
        let status = loop {
            match message(&mut stream).await {
                Ok(told) => assert!(told.changes.is_empty()),
                Err(status) => break status,
            }
        };
        assert_eq!(kind(&status), Kind::Unavailable);
        cluster.start(1).await;
    }
    assert!(quickest < lake_metasrv::server::DRAIN, "no watch is waited for: {quickest:?}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_was_away_serves_no_watch_before_it_has_what_it_had() {
    let mut cluster = TestCluster::founded(3, |_| {}).await;
    for i in 0..50 {
        cluster.put("/kv/a", format!("{i}")).await;
    }
    let last = cluster.put("/kv/a", "last").await;
    let leader = cluster.leader().await;
    let away = (1..=3).find(|id| *id != leader).unwrap();
    let mut stream = watch(&cluster, away, "/kv/", 1).await.unwrap();
    history(&mut stream, 1, last).await;
    drop(stream);
    cluster.stop(away).await;
    cluster.start(away).await;
    // Nor does it answer anything else from before that.
    let local =
        v1::ReadOptions { consistency: v1::read_options::Consistency::Local as i32, ..v1::ReadOptions::default() };
    let read = cluster.try_get(away, "/kv/a", local).await.unwrap();
    assert_eq!((read.entry.unwrap().value, read.header.unwrap().revision), ("last".into(), last));
    // From now on means: not before what it had told already.
    let mut stream = watch(&cluster, away, "/kv/", 0).await.unwrap();
    let greeting = message(&mut stream).await.unwrap();
    assert!(greeting.progress >= last, "{} is before {last}", greeting.progress);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedded_store_is_watched_like_any_peer() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(dir.path()).await.unwrap();
    let created = store.cas("/lake/table/a", None, "1".into(), soon()).await.unwrap().result.revision;
    let mut watch = store.watch("/lake/table/", 1, soon()).await.unwrap();
    let told = watch.next().await.unwrap().unwrap();
    assert_eq!((told.changes.len(), told.changes[0].revision, told.progress), (1, created, created));
    let other = Txn { then: vec![Op::put("/kv/a", "1")], ..Txn::default() };
    store.commit(other, soon()).await.unwrap();
    let deleted = store.cas_delete("/lake/table/a", Token::at(created), soon()).await.unwrap().result.revision;
    let mut history = History::new(created + 1);
    while history.progress < deleted {
        history.add(watch.next().await.unwrap().unwrap());
    }
    assert_eq!(history.changes.len(), 1);
    assert_eq!(history.changes[0].events[0].entry, None);
    assert!(matches!(store.watch(&"k".repeat(5000), 0, soon()).await, Err(Error::Refused { .. })));

    store.shutdown().await;
    let error = loop {
        match watch.next().await.unwrap() {
            Ok(told) => assert!(told.changes.is_empty()),
            Err(error) => break error,
        }
    };
    assert!(error.is_unavailable(), "{error}");
    assert!(watch.next().await.is_none());
}

/// A watcher's peer that is cut off from the leader for so long that it needs a snapshot: its watchers go on without a gap as
/// long as the kept changes reach back to where they are, and are told where they do not.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_goes_on_across_a_snapshot_that_its_peer_is_sent() {
    let way = Way::new().await;
    let cut_off = 3;
    let (listen, leads_through) = (way.behind(), way.address());
    let mut cluster = TestCluster::founded(3, |config| {
        config.storage.snapshot_entries = 100;
        config.storage.snapshot_bytes = 8 << 20;
        config.storage.purge_margin_entries = 10;
        match config.id {
            id if id == cut_off => config.raft_listen = listen,
            _ => drop(config.peers.insert(cut_off, leads_through.clone())),
        }
    })
    .await;
    if cluster.leader().await == cut_off {
        cluster.client().transfer_leader(None, soon()).await.unwrap();
    }
    let first = cluster.put("/kv/a/0", "before").await;
    let mut stream = watch(&cluster, cut_off, "/kv/a/", 1).await.unwrap();
    let mut told = History::new(1);
    while told.progress < first {
        told.add(message(&mut stream).await.unwrap());
    }

    let behind = fall_behind(&cluster, &way, cut_off, 400, 10).await;
    let last = cluster.put("/kv/a/last", "after").await;
    while told.progress < last {
        told.add(message(&mut stream).await.unwrap());
    }
    let status = cluster.status(cut_off).await;
    assert!(status.purged_index > behind, "it was sent a snapshot: {} and {behind}", status.purged_index);
    let leader = cluster.leader().await;
    assert_eq!(told.changes, under(&kept(&cluster, leader, last).await, "/kv/a/", 1));

    // More than is kept.
    fall_behind(&cluster, &way, cut_off, 80, 1 << 20).await;
    let compacted = loop {
        match message(&mut stream).await {
            Ok(more) => told.add(more),
            Err(status) => break status,
        }
    };
    assert_eq!(kind(&compacted), Kind::Compacted);
    let detail = lake_proto::status::detail(&compacted).unwrap();
    assert!(detail.oldest_revision > told.progress + 1, "{} and {}", detail.oldest_revision, told.progress);
    cluster.stop_all().await;
}

/// Cuts a peer off, writes until the log that it lacks is gone everywhere, and lets it back. Returns how far it was.
async fn fall_behind(cluster: &TestCluster, way: &Way, id: u64, writes: usize, bytes: usize) -> u64 {
    way.cut();
    let behind = cluster.status(id).await.last_log_index;
    for n in 0..writes {
        cluster.put(&format!("/kv/{}/{}", ["a", "b"][n % 2], n % 3), vec![n as u8; bytes]).await;
    }
    let leader = cluster.leader().await;
    let written = cluster.status(leader).await.last_log_index;
    eventually("the log to be purged, behind a snapshot of all of it", async || {
        // A snapshot is taken, and the log behind it purged, as writes come.
        cluster.put("/kv/b/more", "v").await;
        let status = cluster.status(leader).await;
        (status.purged_index > behind && status.snapshot_index >= written).then_some(())
    })
    .await;
    way.open();
    behind
}

/// The way to a peer, which can be cut.
struct Way {
    address: std::net::SocketAddr,
    behind: std::net::SocketAddr,
    is_open: tokio::sync::watch::Sender<bool>,
    forwards: tokio::task::JoinHandle<()>,
}

impl Way {
    async fn new() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, behind) = (listener.local_addr().unwrap(), free_port());
        let is_open = tokio::sync::watch::Sender::new(true);
        let open = is_open.subscribe();
        let forwards = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (mut from, _) = listener.accept().await.unwrap();
                let mut open = open.clone();
                while connections.try_join_next().is_some() {}
                connections.spawn(async move {
                    let forward = async {
                        let mut to = tokio::net::TcpStream::connect(behind).await.ok()?;
                        tokio::io::copy_bidirectional(&mut from, &mut to).await.ok()
                    };
                    let closed = async { drop(open.wait_for(|open| !open).await) };
                    tokio::select! {
                        () = closed => {}
                        _ = forward => {}
                    }
                });
            }
        });
        Self { address, behind, is_open, forwards }
    }

    /// Where the peer is to listen.
    fn behind(&self) -> std::net::SocketAddr {
        self.behind
    }

    /// Where the others reach it.
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// Every connection breaks, and so does each that is made.
    fn cut(&self) {
        self.is_open.send_replace(false);
    }

    fn open(&self) {
        self.is_open.send_replace(true);
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        self.forwards.abort();
    }
}
