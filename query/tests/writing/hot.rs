//! Appends that wait together, on one node and on two: one snapshot for many, and each exactly once whatever gets lost.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::memory::MemoryStore;
use lake_client::store::{Applied, Capabilities, Committed, Error, Lease, ReadOptions, SharedStore};
use lake_proto::coordination::LeaseId;
use lake_proto::kv::{Compare, Condition, Op, Txn};
use lake_query::client::SqlError;
use lake_query::{Config, Kind, Options, QueryNode};
use tokio::sync::Semaphore;

use crate::common::store::{Through, Way, unavailable};
use crate::common::*;
use crate::table::metadata;

/// What a transaction is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum What {
    HandOver,
    Swap,
    Other,
}

fn what(txn: &Txn) -> What {
    let puts = |prefix: &str| txn.then.iter().any(|op| matches!(op, Op::Put { key, .. } if key.starts_with(prefix)));
    match (puts("/lake/append/"), puts("/lake/table/")) {
        (true, _) => What::HandOver,
        (_, true) => What::Swap,
        _ => What::Other,
    }
}

/// How long a store that is away leaves a call without an answer.
const SILENT_FOR: Duration = Duration::from_secs(1);

/// The leases of a store in memory, which has none of its own.
type Leases = Arc<Mutex<HashSet<LeaseId>>>;

/// One node's way to the store, with faults.
#[derive(Debug)]
struct Faults {
    leases: Leases,
    /// The next swap is held back.
    hold: AtomicBool,
    held: Semaphore,
    released: Semaphore,
    /// The answers to the next ones of these are lost.
    lose: Mutex<Vec<What>>,
    /// Every so many transactions the answer is lost, of every other one after it was made; 0: never.
    lose_every: AtomicU64,
    commits: AtomicU64,
    refuse_swaps: AtomicBool,
    /// What becomes true as soon as something is handed over: a giver does not wait for long.
    then_refuse_swaps: AtomicBool,
    then_away: AtomicBool,
    /// Nobody can be told what is handed over.
    refuse_listings: AtomicBool,
    away: AtomicBool,
    handed_over: Semaphore,
}

impl Faults {
    fn new(leases: &Leases) -> Self {
        Self {
            leases: leases.clone(),
            hold: AtomicBool::new(false),
            held: Semaphore::new(0),
            released: Semaphore::new(0),
            lose: Mutex::default(),
            lose_every: AtomicU64::new(0),
            commits: AtomicU64::new(0),
            refuse_swaps: AtomicBool::new(false),
            then_refuse_swaps: AtomicBool::new(false),
            then_away: AtomicBool::new(false),
            refuse_listings: AtomicBool::new(false),
            away: AtomicBool::new(false),
            handed_over: Semaphore::new(0),
        }
    }

    async fn until_held(&self) {
        happened("the swap to be held back", &self.held).await;
    }

    async fn until_handed_over(&self) {
        happened("what was held back to be handed over", &self.handed_over).await;
    }
}

#[async_trait]
impl Way for Faults {
    fn capabilities(&self, of: Capabilities) -> Capabilities {
        Capabilities { leases: true, ..of }
    }

    async fn call(&self, about: &str, by: Instant) -> Result<(), Error> {
        if self.away.load(Ordering::SeqCst) {
            // Silent, and not for longer than it takes to see that.
            tokio::time::sleep_until(by.min(Instant::now() + SILENT_FOR).into()).await;
            return Err(unavailable(Applied::No));
        }
        match self.refuse_listings.load(Ordering::SeqCst) && about.starts_with("/lake/append/") {
            true => Err(unavailable(Applied::No)),
            false => Ok(()),
        }
    }

    async fn commit(&self, store: &SharedStore, mut txn: Txn, by: Instant) -> Result<Committed, Error> {
        let what = what(&txn);
        if what == What::Swap && self.hold.swap(false, Ordering::SeqCst) {
            self.held.add_permits(1);
            happened("what is held back to be released", &self.released).await;
        }
        if what == What::Swap && self.refuse_swaps.load(Ordering::SeqCst) {
            return Err(unavailable(Applied::No));
        }
        for compare in &mut txn.when {
            if let Condition::LeaseAlive(lease) = compare.condition {
                // Holds, or does not.
                *compare = match self.leases.lock().unwrap().contains(&lease) {
                    true => Compare::absent("/kv/nothing"),
                    false => Compare::mod_revision("/kv/nothing", 1),
                };
            }
        }
        for op in &mut txn.then {
            if let Op::Put { lease, .. } = op {
                *lease = None;
            }
        }
        let number = self.commits.fetch_add(1, Ordering::SeqCst);
        let every = self.lose_every.load(Ordering::SeqCst);
        let lost = every > 0 && number.is_multiple_of(every);
        if lost && (number / every).is_multiple_of(2) {
            return Err(unavailable(Applied::Unknown));
        }
        let committed = store.commit(txn, by).await?;
        if what == What::HandOver && committed.result.succeeded {
            self.refuse_swaps.fetch_or(self.then_refuse_swaps.load(Ordering::SeqCst), Ordering::SeqCst);
            self.away.fetch_or(self.then_away.load(Ordering::SeqCst), Ordering::SeqCst);
            self.handed_over.add_permits(1);
        }
        let mut lose = self.lose.lock().unwrap();
        if let Some(at) = lose.iter().position(|lost| *lost == what) {
            lose.remove(at);
            return Err(unavailable(Applied::Unknown));
        }
        if lost { Err(unavailable(Applied::Unknown)) } else { Ok(committed) }
    }

    async fn grant_lease(&self, _: &SharedStore, ttl: Duration, _: Instant) -> Result<Lease, Error> {
        let mut leases = self.leases.lock().unwrap();
        let id = leases.len() as u64 + 1;
        leases.insert(id);
        Ok(Lease { id, ttl, held_until: Instant::now() + ttl })
    }

    async fn renew_lease(&self, _: &SharedStore, lease: Lease, _: Instant) -> Result<Option<Lease>, Error> {
        let alive = self.leases.lock().unwrap().contains(&lease.id);
        Ok(alive.then(|| Lease { held_until: Instant::now() + lease.ttl, ..lease }))
    }
}

/// Two nodes, each with its own way to the store, and a table.
struct Two {
    cluster: Cluster,
    ways: [Arc<Through<Faults>>; 2],
}

impl Two {
    async fn start() -> Self {
        let memory: SharedStore = Arc::new(MemoryStore::new());
        let leases = Leases::default();
        let ways = [(); 2].map(|()| Arc::new(Through { store: memory.clone(), way: Faults::new(&leases) }));
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = Cluster { dir, store: memory, nodes: Vec::new() };
        for (i, way) in ways.iter().enumerate() {
            let options =
                Options { dir: Some(cluster.dir.path().join(format!("node{i}"))), ..options(cluster.dir.path()) };
            let node = QueryNode::start(Config::new(options).unwrap(), way.clone() as SharedStore).await.unwrap();
            cluster.nodes.push(node);
        }
        run(&cluster.client(0).await, "CREATE TABLE t (x BIGINT)").await;
        Self { cluster, ways }
    }

    async fn insert(&self, node: usize, value: i64) -> Result<(), SqlError> {
        let sql = format!("INSERT INTO t VALUES ({value})");
        self.cluster.client(node).await.query(&sql, TIMEOUT).await.map(drop)
    }

    /// The first node's insert, which loses its race against one of the second node's and is handed over. Does `then` while
    /// the first node waits, and gives what became of the insert.
    async fn handed_over(&self, then: impl AsyncFnOnce()) -> Result<(), SqlError> {
        self.handed_over_from(0, then).await
    }

    /// The same with rows from `first` on.
    async fn handed_over_from(&self, first: i64, then: impl AsyncFnOnce()) -> Result<(), SqlError> {
        self.ways[0].hold.store(true, Ordering::SeqCst);
        let other = async {
            self.ways[0].until_held().await;
            self.insert(1, first + 1).await.unwrap();
            self.ways[0].released.add_permits(1);
            self.ways[0].until_handed_over().await;
            then().await;
        };
        let (outcome, ()) = tokio::join!(self.insert(0, first), other);
        outcome
    }

    async fn rows(&self) -> Vec<i64> {
        let client = self.cluster.client(0).await;
        let until = Instant::now() + PATIENCE;
        let current = metadata(&self.cluster, "t").await;
        let total = current.current_snapshot().unwrap().summary().additional_properties["total-records"].clone();
        loop {
            // The pointer that this node has cached may be a moment old.
            let rows = numbers(&client, "SELECT x FROM t ORDER BY x").await;
            if rows.len().to_string() == total || Instant::now() > until {
                return rows;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn snapshots(&self) -> usize {
        metadata(&self.cluster, "t").await.snapshots().len()
    }

    async fn under(&self, prefix: &str) -> usize {
        let by = Instant::now() + Duration::from_secs(5);
        self.cluster.store.list_all(prefix, ReadOptions::default(), by).await.unwrap().value.len()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_together_is_one_snapshot_unless_the_table_says_otherwise() {
    const WRITERS: i64 = 12;
    let two = Two::start().await;
    let way = &two.ways[0];
    way.hold.store(true, Ordering::SeqCst);
    let inserts = futures::future::join_all((0..WRITERS).map(|value| two.insert(0, value)));
    let holding = async {
        way.until_held().await;
        // All have written their files, and wait.
        until("all to have written their files", async || two.cluster.files(".parquet").len() as i64 >= WRITERS).await;
        way.released.add_permits(1);
    };
    let (outcomes, ()) = tokio::join!(inserts, holding);
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    assert_eq!(two.rows().await, (0..WRITERS).collect::<Vec<_>>());
    let snapshots = two.snapshots().await;
    assert!(
        snapshots <= WRITERS as usize / 2,
        "{snapshots} snapshots for {WRITERS} inserts of which all but the first waited"
    );

    run(&two.cluster.client(0).await, "ALTER TABLE t SET TBLPROPERTIES ('lake.merge-appends.enabled' = 'false')").await;
    for outcome in futures::future::join_all((0..4).map(|value| two.insert(0, WRITERS + value))).await {
        outcome.unwrap();
    }
    assert_eq!(two.snapshots().await, snapshots + 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_that_commits_takes_the_other_ones_appends_along() {
    let two = Two::start().await;
    let client = two.cluster.client(0).await;
    let mut next = 0;
    // On a machine that is busy with other things the other node may come too late, as a giver does not wait for long.
    loop {
        let before = two.snapshots().await;
        two.handed_over_from(next, async || two.insert(1, next + 2).await.unwrap()).await.unwrap();
        next += 3;
        let table = metadata(&two.cluster, "t").await;
        let totals = &table.current_snapshot().unwrap().summary().additional_properties;
        assert_eq!(totals["total-data-files"], next.to_string());
        let taken = totals["added-records"] == "2";
        let seen = match taken {
            true => numbers(&client, "SELECT x FROM t ORDER BY x").await,
            false => two.rows().await,
        };
        assert_eq!(seen, (0..next).collect::<Vec<_>>(), "seen at once by who was told that it is taken along");
        assert_eq!(two.under("/lake/append/").await, 0);
        if taken {
            assert_eq!(two.snapshots().await, before + 2);
            break;
        }
        assert!(next < 60, "nobody has taken anything along");
    }
    // The next is handed over without being tried, and comes back where nobody takes it along.
    let handed = two.ways[0].handed_over.available_permits();
    two.insert(0, next).await.unwrap();
    assert_eq!(two.ways[0].handed_over.available_permits(), handed + 1);
    assert_eq!((two.rows().await, two.under("/lake/append/").await), ((0..=next).collect(), 0));
    two.insert(0, next + 1).await.unwrap();
    assert_eq!(two.ways[0].handed_over.available_permits(), handed + 1, "not handed over again");
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answers_neither_lose_nor_repeat_what_is_handed_over() {
    for (way, lost) in [(0, What::HandOver), (1, What::Swap)] {
        let two = Two::start().await;
        let outcome = two.handed_over(async || {
            if lost == What::Swap {
                two.ways[way].lose.lock().unwrap().push(lost);
            }
            two.insert(1, 2).await.unwrap();
        });
        if lost == What::HandOver {
            two.ways[way].lose.lock().unwrap().push(lost);
        }
        outcome.await.unwrap();
        assert_eq!(two.rows().await, [0, 1, 2], "{lost:?} of node {way}");
        assert_eq!(two.under("/lake/append/").await, 0);
    }
}

/// A record that stayed behind its outcome would be taken along, and its rows added again, once the outcome is forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn a_giver_that_commits_by_itself_leaves_no_record_behind() {
    let two = Two::start().await;
    let outcome = two.handed_over(async || {
        // Nobody takes it along, and the giver does not see what is handed over, its own record among it.
        two.ways[0].refuse_listings.store(true, Ordering::SeqCst);
    });
    outcome.await.unwrap();
    two.ways[0].refuse_listings.store(false, Ordering::SeqCst);
    assert_eq!((two.rows().await, two.under("/lake/append/").await), (vec![0, 1], 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_committed_is_withdrawn() {
    let two = Two::start().await;
    let insert = async |two: &Two| {
        two.ways[0].hold.store(true, Ordering::SeqCst);
        let sql = two.cluster.client(0).await;
        let other = async {
            two.ways[0].until_held().await;
            two.insert(1, 1).await.unwrap();
            two.ways[0].then_refuse_swaps.store(true, Ordering::SeqCst);
            two.ways[0].released.add_permits(1);
        };
        let (outcome, ()) = tokio::join!(sql.query("INSERT INTO t VALUES (0)", TIMEOUT), other);
        outcome.unwrap_err()
    };
    let error = insert(&two).await;
    assert!(error.message.contains("nothing was committed"), "{error}");
    two.insert(1, 2).await.unwrap();
    assert_eq!((two.rows().await, two.under("/lake/append/").await), (vec![1, 2], 0));
    assert_eq!(two.cluster.files(".parquet").len(), 2, "its file is removed: {:?}", two.cluster.files(".parquet"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_giver_that_is_cut_off_keeps_its_files() {
    let two = Two::start().await;
    two.ways[0].hold.store(true, Ordering::SeqCst);
    let sql = two.cluster.client(0).await;
    let other = async {
        two.ways[0].until_held().await;
        two.insert(1, 1).await.unwrap();
        two.ways[0].then_away.store(true, Ordering::SeqCst);
        two.ways[0].released.add_permits(1);
        two.ways[0].until_handed_over().await;
        two.insert(1, 2).await.unwrap();
    };
    let (outcome, ()) = tokio::join!(sql.query("INSERT INTO t VALUES (0)", TIMEOUT), other);
    let error = outcome.unwrap_err();
    assert_eq!(error.kind, Kind::Unknown, "{error}");
    two.ways[0].then_away.store(false, Ordering::SeqCst);
    two.ways[0].away.store(false, Ordering::SeqCst);
    assert_eq!(two.rows().await, [0, 1, 2]);
    assert_eq!(two.cluster.files(".parquet").len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_lease_nothing_is_taken_along() {
    let two = Two::start().await;
    two.insert(0, 7).await.unwrap();
    two.ways[0].hold.store(true, Ordering::SeqCst);
    // Granted, and over before it is used: what is handed over under it is refused, and the node commits by itself.
    let other = async {
        two.ways[0].until_held().await;
        two.insert(1, 1).await.unwrap();
        two.ways[0].released.add_permits(1);
    };
    let ended = Arc::new(AtomicBool::new(false));
    let ending = {
        let (leases, ended) = (two.ways[0].leases.clone(), ended.clone());
        tokio::spawn(async move {
            while !ended.load(Ordering::SeqCst) {
                leases.lock().unwrap().clear();
                tokio::task::yield_now().await;
            }
        })
    };
    let (outcome, ()) = tokio::join!(two.insert(0, 0), other);
    ended.store(true, Ordering::SeqCst);
    ending.await.unwrap();
    outcome.unwrap();
    assert_eq!(two.rows().await, [0, 1, 7]);
    assert_eq!(two.under("/lake/append/").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_writers_and_many_lost_answers() {
    const WRITERS: usize = 8;
    const EACH: i64 = 12;
    let two = Two::start().await;
    two.ways[0].lose_every.store(3, Ordering::SeqCst);
    two.ways[1].lose_every.store(4, Ordering::SeqCst);
    let writers = (0..WRITERS).map(|writer| {
        let two = &two;
        async move {
            for row in 0..EACH {
                two.insert(writer % 2, writer as i64 * EACH + row).await.unwrap();
            }
        }
    });
    futures::future::join_all(writers).await;
    two.ways.iter().for_each(|way| way.lose_every.store(0, Ordering::SeqCst));
    assert_eq!(two.rows().await, (0..WRITERS as i64 * EACH).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_go_on_beside_deletes_that_conflict() {
    let two = Two::start().await;
    // One file, which two nodes rewrite at the same time.
    run(&two.cluster.client(0).await, "INSERT INTO t VALUES (0), (1), (2), (3), (4), (5), (6), (7)").await;
    let deleting = futures::future::join_all((0..2).map(|node| {
        let two = &two;
        async move {
            let mut kept = Vec::new();
            for row in 0..4 {
                let row = 4 * node as i64 + row;
                let sql = format!("DELETE FROM t WHERE x = {row}");
                if let Err(error) = two.cluster.client(node).await.query(&sql, TIMEOUT).await {
                    assert!(error.kind == Kind::Conflict && error.message.contains("nothing was committed"), "{error}");
                    kept.push(row);
                }
            }
            kept
        }
    }));
    let appending = futures::future::join_all((0..2).map(|node| {
        let two = &two;
        async move {
            for row in 0..20 {
                // Rows that no DELETE is about.
                two.insert(node, 100 + 20 * node as i64 + row).await.unwrap();
            }
        }
    }));
    let (kept, _) = tokio::join!(deleting, appending);
    let expected: Vec<i64> = kept.into_iter().flatten().chain(100..140).collect();
    assert_eq!(two.rows().await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_expire_while_rows_are_added() {
    let two = Two::start().await;
    let client = two.cluster.client(0).await;
    run(
        &client,
        "ALTER TABLE t SET TBLPROPERTIES ('lake.expire-snapshots.enabled' = 'true', \
         'lake.expire-snapshots.held-ms' = '0', 'history.expire.max-snapshot-age-ms' = '1', 'commit.manifest.min-count-to-merge' = '3')",
    )
    .await;
    let lists =
        || two.cluster.files(".avro").into_iter().filter(|path| path.to_string_lossy().contains("/snap-")).count();
    let deadline = Instant::now() + PATIENCE;
    let mut row = 0;
    let mut expired = false;
    while !expired {
        assert!(Instant::now() < deadline, "{} snapshots", two.snapshots().await);
        let before = two.snapshots().await;
        two.insert(0, row).await.unwrap();
        row += 1;
        expired = two.snapshots().await < before;
        assert_eq!(numbers(&client, "SELECT count(*) FROM t").await, [row]);
    }
    // The version before the current one names its own.
    until("manifest lists to go with their snapshots", async || lists() <= two.snapshots().await + 1).await;
    assert_eq!(two.rows().await, (0..row).collect::<Vec<_>>());
    let named: i64 = number(&client, "SELECT count(*) FROM \"t$manifests\"").await;
    assert!(named < 6, "{named} manifests");
}
