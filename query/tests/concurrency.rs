//! Several writers and a metadata cluster that misbehaves: every row exactly once, and errors that tell the truth.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use common::store::{Through, Way, unavailable};
use common::*;
use lake_client::memory::MemoryStore;
use lake_client::store::{Applied, Committed, Error, Read, ReadOptions, SharedStore, Snapshot};
use lake_proto::kv::Txn;
use lake_query::{Kind, Options};

/// Commits lose their answers, and the store can be out of reach.
#[derive(Debug, Default)]
struct Faulty {
    /// Every so many commits the answer is lost; 0: never.
    lose_every: AtomicU64,
    /// A lost answer's commit is made every other time only.
    commits: AtomicU64,
    away: AtomicBool,
    calls: AtomicU64,
    /// Snapshots are gone as soon as they are opened.
    short_snapshots: AtomicBool,
    /// So many commits of transactions are made, and their answers lost.
    lose_transactions: AtomicU64,
    /// So many questions for the outcomes of transactions are not answered.
    no_outcomes: AtomicU64,
}

impl Faulty {
    fn store() -> Arc<Through<Self>> {
        Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Self::default() })
    }
}

/// Where the outcomes of transactions are kept.
const OUTCOMES: &str = "/lake/op/transaction/";

/// Takes one of so many.
fn one_of(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

#[async_trait]
impl Way for Faulty {
    async fn call(&self, about: &str, by: Instant) -> Result<(), Error> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.away.load(Ordering::Relaxed) {
            tokio::time::sleep_until(by.into()).await;
            return Err(unavailable(Applied::No));
        }
        match about.starts_with(OUTCOMES) && one_of(&self.no_outcomes) {
            true => Err(unavailable(Applied::No)),
            false => Ok(()),
        }
    }

    async fn open_snapshot(&self, store: &SharedStore, by: Instant) -> Result<Read<Snapshot>, Error> {
        match self.short_snapshots.load(Ordering::Relaxed) {
            true => Ok(Read { value: Snapshot::from_wire(u64::MAX).unwrap(), revision: 0 }),
            false => store.open_snapshot(ReadOptions::default(), by).await,
        }
    }

    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let every = self.lose_every.load(Ordering::Relaxed);
        let number = self.commits.fetch_add(1, Ordering::Relaxed);
        if every > 0 && number.is_multiple_of(every) {
            if (number / every).is_multiple_of(2) {
                store.commit(txn, by).await?;
            }
            return Err(unavailable(Applied::Unknown));
        }
        let is_transaction = txn.then.iter().any(|op| op.key().starts_with(OUTCOMES));
        let committed = store.commit(txn, by).await?;
        if is_transaction && committed.result.succeeded && one_of(&self.lose_transactions) {
            return Err(unavailable(Applied::Unknown));
        }
        Ok(committed)
    }
}

/// `writers` clients insert `each` rows one by one, spread over the nodes; the row's value is unique.
async fn insert_concurrently(cluster: &Cluster, writers: usize, each: usize) {
    let inserts = (0..writers).map(|writer| async move {
        let client = cluster.client(writer % cluster.nodes.len()).await;
        for row in 0..each {
            let value = writer * each + row;
            let count = number(&client, &format!("INSERT INTO t VALUES ({value})")).await;
            assert_eq!(count, 1);
        }
    });
    futures::future::join_all(inserts).await;
}

async fn every_row_once(cluster: &Cluster, rows: usize) {
    // Another node's pointer is believed for a moment; the freshest one has every row.
    let client = cluster.client(0).await;
    let all: Vec<i64> = (0..rows as i64).collect();
    let until = Instant::now() + PATIENCE;
    loop {
        let values = numbers(&client, "SELECT x FROM t ORDER BY x").await;
        if values == all {
            return;
        }
        assert!(Instant::now() < until, "{} of {rows} rows: {values:?}", values.len());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_writers_on_two_nodes_lose_nothing() {
    let cluster = Cluster::start(2).await;
    run(&cluster.client(0).await, "CREATE TABLE t (x BIGINT)").await;
    insert_concurrently(&cluster, 8, 20).await;
    every_row_once(&cluster, 160).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_race_keeps_both_rows() {
    let cluster = Cluster::start(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    run(&a, "CREATE TABLE t (x BIGINT)").await;
    for round in 0..10 {
        let (first, second) =
            (format!("INSERT INTO t VALUES ({})", 2 * round), format!("INSERT INTO t VALUES ({})", 2 * round + 1));
        tokio::join!(run(&a, &first), run(&b, &second));
    }
    every_row_once(&cluster, 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answers_neither_lose_nor_repeat_rows() {
    let store = Faulty::store();
    let cluster = Cluster::over(store.clone() as SharedStore, 2, |options| options).await;
    run(&cluster.client(0).await, "CREATE TABLE t (x BIGINT)").await;
    store.lose_every.store(3, Ordering::Relaxed);
    insert_concurrently(&cluster, 6, 15).await;
    store.lose_every.store(0, Ordering::Relaxed);
    every_row_once(&cluster, 90).await;
    run(&cluster.client(0).await, "DROP TABLE t").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answers_neither_lose_nor_repeat_operations_and_transactions() {
    let store = Faulty::store();
    let cluster = Cluster::over(store.clone() as SharedStore, 2, |options| options).await;
    let clients = [cluster.client(0).await, cluster.client(1).await];
    for table in ["t", "u", "v"] {
        run(&clients[0], &format!("CREATE TABLE {table} (x BIGINT)")).await;
    }
    store.lose_every.store(3, Ordering::Relaxed);
    let writers = clients.iter().enumerate().map(|(i, client)| async move {
        for n in 0..8 {
            let value = n * 2 + i;
            run(client, &format!("SET lake.operation_id = '{value}'")).await;
            // As a client would that has lost the answer: here every answer is taken for lost once.
            for _ in 0..2 {
                let settings = client.settings();
                run(client, &format!("INSERT INTO t VALUES ({value})")).await;
                client.resume(settings);
            }
            run(client, "SET lake.operation_id = DEFAULT").await;
            run(client, "BEGIN").await;
            for table in ["u", "v"] {
                run(client, &format!("INSERT INTO {table} VALUES ({value})")).await;
            }
            let settings = client.settings();
            run(client, "COMMIT").await;
            client.resume(settings);
            run(client, "COMMIT").await;
        }
    });
    futures::future::join_all(writers).await;
    store.lose_every.store(0, Ordering::Relaxed);
    // Read within a transaction, which sees what is there now.
    run(&clients[0], "BEGIN").await;
    for table in ["t", "u", "v"] {
        let values = numbers(&clients[0], &format!("SELECT x FROM {table} ORDER BY x")).await;
        assert_eq!(values, (0..16).collect::<Vec<_>>(), "{table}");
    }
    run(&clients[0], "ROLLBACK").await;
}

/// The answer of its commit is lost, and then those of the questions for its outcome: that the pointer has moved is its own doing.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_was_committed_is_never_told_to_be_refused() {
    let store = Faulty::store();
    let cluster = Cluster::over(store.clone() as SharedStore, 1, |options| options).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    for (value, isolation) in [(1, "SERIALIZABLE"), (2, "SNAPSHOT")] {
        run(&client, &format!("BEGIN TRANSACTION ISOLATION LEVEL {isolation}")).await;
        run(&client, &format!("INSERT INTO t VALUES ({value})")).await;
        store.lose_transactions.store(1, Ordering::SeqCst);
        store.no_outcomes.store(3, Ordering::SeqCst);
        run(&client, "COMMIT").await;
        assert_eq!(store.no_outcomes.load(Ordering::SeqCst), 0, "it was asked for until there was an answer");
        assert_eq!(
            numbers(&client, "SELECT x FROM t ORDER BY x").await,
            (1..=value).collect::<Vec<_>>(),
            "{isolation}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_without_a_snapshot_sees_one_moment_or_says_that_it_cannot() {
    let store = Faulty::store();
    store.short_snapshots.store(true, Ordering::Relaxed);
    let cluster = Cluster::over(store.clone() as SharedStore, 2, |options| options).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    for table in ["t", "u"] {
        run(&a, &format!("CREATE TABLE {table} AS SELECT 1 AS x")).await;
    }
    run(&a, "BEGIN").await;
    assert_eq!(number(&a, "SELECT count(*) FROM t").await, 1);
    run(&b, "INSERT INTO u VALUES (2)").await;
    assert_eq!(number(&a, "SELECT count(*) FROM u").await, 2, "the first table is as it was: of this moment as well");
    run(&a, "ROLLBACK").await;
    run(&a, "BEGIN").await;
    assert_eq!(number(&a, "SELECT count(*) FROM t").await, 1);
    run(&b, "INSERT INTO t VALUES (2)").await;
    run(&b, "INSERT INTO u VALUES (3)").await;
    let error = refused(&a, "SELECT * FROM u").await;
    assert!(error.kind == Kind::Conflict && error.message.contains("no moment"), "{error}");
    run(&a, "ROLLBACK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ddl_survives_lost_answers() {
    let store = Faulty::store();
    let cluster = Cluster::over(store.clone() as SharedStore, 1, |options| options).await;
    let client = cluster.client(0).await;
    store.lose_every.store(2, Ordering::Relaxed);
    let mut unknown = 0;
    for i in 0..8 {
        for sql in [format!("CREATE TABLE t{i} AS SELECT 1 AS x"), format!("DROP TABLE t{i}")] {
            match client.query(&sql, TIMEOUT).await {
                Ok(_) => {}
                Err(error) => {
                    assert!(
                        error.kind == Kind::Unknown || error.kind == Kind::NotFound,
                        "{sql}: {:?} {error}",
                        error.kind
                    );
                    unknown += 1;
                }
            }
        }
    }
    store.lose_every.store(0, Ordering::Relaxed);
    assert!(unknown < 16, "some go through");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_metadata_away_reads_go_on_and_writes_say_so() {
    let store = Faulty::store();
    let cluster =
        Cluster::over(store.clone() as SharedStore, 1, |options| Options { pointer_ttl_ms: Some(50), ..options }).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 7 AS x").await;
    let before = cluster.files("").len();
    store.away.store(true, Ordering::Relaxed);
    until("word of stale rows", async || {
        let rows = client.execute("SELECT * FROM t", TIMEOUT).await.unwrap();
        rows.notices.iter().any(|notice| notice.contains("away"))
    })
    .await;
    assert_eq!(number(&client, "SELECT x FROM t").await, 7);
    let insert = client.query("INSERT INTO t VALUES (8)", Some(Duration::from_secs(5)));
    let error = in_time("a write to say so", insert).await.unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    assert!(error.message.contains("the metadata cluster is unreachable"), "{error}");
    assert!(error.message.contains("nothing was committed"), "{error}");
    assert_eq!(cluster.files("").len(), before, "what was written for it is removed: {:?}", cluster.files(""));
    let error = client.query("SELECT * FROM never_seen", Some(Duration::from_secs(2))).await.unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    store.away.store(false, Ordering::Relaxed);
    assert_eq!(number(&client, "INSERT INTO t VALUES (8)").await, 1);
    assert_eq!(number(&client, "SELECT sum(x) FROM t").await, 15);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_outcome_at_the_deadline_is_called_that() {
    let store = Faulty::store();
    let cluster = Cluster::over(store.clone() as SharedStore, 1, |options| options).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    // The commit's answer is lost, and then nothing can be reached any more.
    store.commits.store(0, Ordering::Relaxed);
    store.lose_every.store(1_000_000, Ordering::Relaxed);
    let insert = client.query("INSERT INTO t VALUES (1)", Some(Duration::from_secs(10)));
    tokio::pin!(insert);
    let result = loop {
        tokio::select! {
            result = &mut insert => break result,
            () = tokio::time::sleep(Duration::from_millis(1)) => {
                let lost = store.commits.load(Ordering::Relaxed) > 0;
                store.away.fetch_or(lost, Ordering::Relaxed);
            }
        }
    };
    match result {
        // The look came before the cluster went away.
        Ok(_) => {}
        Err(error) => {
            assert_eq!(error.kind, Kind::Unknown, "{error}");
            assert!(error.message.contains("whether the rows were committed is unknown"), "{error}");
        }
    }
    store.away.store(false, Ordering::Relaxed);
    store.lose_every.store(0, Ordering::Relaxed);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 1, "and its files are still there");
}

#[tokio::test(flavor = "multi_thread")]
async fn fresh_pointers_need_no_metadata_call() {
    let store = Faulty::store();
    let cluster =
        Cluster::over(store.clone() as SharedStore, 1, |options| Options { pointer_ttl_ms: Some(600_000), ..options })
            .await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 7 AS x").await;
    run(&client, "SELECT * FROM t").await;
    // What a node begins to follow when it starts, it may begin late.
    until("queries that ask for nothing", async || {
        let before = store.calls.load(Ordering::Relaxed);
        for _ in 0..20 {
            run(&client, "SELECT * FROM t").await;
        }
        store.calls.load(Ordering::Relaxed) == before
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_inserts_do_not_pile_up_manifests() {
    // Less than all versions of the metadata take.
    let most = 16 << 20;
    let change = |options| Options { metadata_cache_bytes: Some(most), ..options };
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 1, change).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    for i in 0..130 {
        run(&client, &format!("INSERT INTO t VALUES ({i})")).await;
    }
    every_row_once(&cluster, 130).await;
    assert!(!cluster.files("-m1.avro").is_empty(), "small manifests were merged");
    until("old metadata to be gone", async || cluster.files(".metadata.json").len() <= 101).await;
    let cached = || cluster.nodes[0].engine().tables().cache.bytes();
    until("what is cached to have its bytes and no more", async || {
        run(&client, "SELECT count(*) FROM t").await;
        (1..=most).contains(&cached())
    })
    .await;
}
