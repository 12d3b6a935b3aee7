//! Two writers at once. The first is held back just before its pointer is swapped; the second commits; then the first goes on
//! and must find out whether what it has done still holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use lake_client::memory::MemoryStore;
use lake_client::store::{Capabilities, Committed, Error, SharedStore};
use lake_proto::kv::{Op, Txn};
use lake_query::{Config, Kind, Options, QueryNode};
use tokio::sync::Semaphore;

use crate::common::store::{Through, Way};
use crate::common::*;
use crate::table::{metadata, set_property};

/// Holds back commits to tables while it is armed.
#[derive(Debug)]
struct Gate {
    armed: AtomicBool,
    reached: Semaphore,
    released: Semaphore,
}

#[async_trait]
impl Way for Gate {
    fn capabilities(&self, of: Capabilities) -> Capabilities {
        // Without watches every pointer is looked at anew.
        Capabilities { watch: false, ..of }
    }

    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let of_table = |op: &Op| matches!(op, Op::Put { key, .. } if key.starts_with("/lake/table/"));
        if txn.then.iter().any(of_table) && self.armed.swap(false, Ordering::SeqCst) {
            self.reached.add_permits(1);
            happened("the first writer to be let go on", &self.released).await;
        }
        store.commit(txn, by).await
    }
}

/// A cluster of two nodes, of which the first can be held back.
struct Pair {
    cluster: Cluster,
    gate: Arc<Through<Gate>>,
}

impl Pair {
    async fn start() -> Self {
        let inner: SharedStore = Arc::new(MemoryStore::new());
        let gate = Gate { armed: AtomicBool::new(false), reached: Semaphore::new(0), released: Semaphore::new(0) };
        let gate = Arc::new(Through { store: inner.clone(), way: gate });
        let change = |options| Options { pointer_ttl_ms: Some(0), ..options };
        let mut cluster = Cluster::over(gate.clone() as SharedStore, 1, change).await;
        let dir = cluster.dir.path().join("other");
        let options = change(Options { dir: Some(dir), ..options(cluster.dir.path()) });
        cluster.nodes.push(QueryNode::start(Config::new(options).unwrap(), inner.clone()).await.unwrap());
        cluster.store = inner;
        Self { cluster, gate }
    }

    /// Runs `first` up to its commit, then `second`, and then lets the first go on.
    async fn meet(&self, first: &str, second: &str) -> Result<i64, lake_query::client::SqlError> {
        let (a, b) = (self.cluster.client(0).await, self.cluster.client(1).await);
        self.gate.armed.store(true, Ordering::SeqCst);
        let first = async {
            let batches = a.query(first, TIMEOUT).await?;
            use arrow::array::AsArray;
            Ok(batches[0].column(0).as_primitive::<arrow::datatypes::Int64Type>().value(0))
        };
        let second = async {
            happened("the first writer to come to its commit", &self.gate.reached).await;
            run(&b, second).await;
            self.gate.released.add_permits(1);
        };
        tokio::join!(first, second).0
    }
}

/// What became of the first writer's statement.
enum Outcome {
    Done,
    Conflict(&'static str),
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_read_and_changed_decides_and_not_that_the_pointer_moved() {
    use Outcome::{Conflict, Done};
    let pair = Pair::start().await;
    let cases: [Case; 18] = [
        ("", "INSERT INTO t VALUES (50)", "INSERT INTO t VALUES (51)", Done, &[50, 51]),
        ("", "INSERT INTO t VALUES (50)", "DELETE FROM t WHERE id = 1", Done, &[50, -1]),
        ("", "INSERT INTO t VALUES (50)", "TRUNCATE TABLE t", Done, &[-1000, -1001, 50]),
        ("", "DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (51)", Done, &[-1, 51]),
        ("", "DELETE FROM t WHERE id < 3", "INSERT INTO t VALUES (2)", Conflict("added rows"), &[2]),
        ("snapshot", "DELETE FROM t WHERE id < 3", "INSERT INTO t VALUES (2)", Done, &[-1, -2, 2]),
        ("", "DELETE FROM t WHERE id = 1", "DELETE FROM t WHERE id = 101", Done, &[-1, -101]),
        ("", "DELETE FROM t WHERE id = 1", "DELETE FROM t WHERE id = 2", Conflict("meanwhile"), &[-2]),
        ("snapshot", "DELETE FROM t WHERE id = 1", "DELETE FROM t WHERE id = 2", Conflict("data file that"), &[-2]),
        ("", "UPDATE t SET id = -id WHERE id = 1", "DELETE FROM t WHERE id > 100", Done, &[-1, -1001]),
        ("", "DELETE FROM t WHERE id = 1", "TRUNCATE TABLE t", Conflict("data file that"), &[-1000, -1001]),
        ("", "TRUNCATE TABLE t", "INSERT INTO t VALUES (50)", Done, &[-1000, -1001]),
        ("", "INSERT OVERWRITE t VALUES (7)", "INSERT INTO t VALUES (50)", Conflict("added rows"), &[50]),
        ("snapshot", "INSERT OVERWRITE t VALUES (7)", "INSERT INTO t VALUES (50)", Done, &[-1000, -1001, 7, 50]),
        (
            "",
            "MERGE INTO t USING (SELECT 60 AS k) AS s ON t.id = s.k WHEN NOT MATCHED THEN INSERT VALUES (s.k)",
            "INSERT INTO t VALUES (60)",
            Conflict("added rows"),
            &[60],
        ),
        (
            "",
            "MERGE INTO t USING (SELECT 60 AS k) AS s ON t.id = s.k AND t.id > 55 WHEN NOT MATCHED THEN INSERT VALUES (s.k)",
            "INSERT INTO t VALUES (50)",
            Done,
            &[50, 60],
        ),
        (
            "",
            "UPDATE t SET id = (SELECT max(id) FROM t) WHERE id = 1",
            "INSERT INTO t VALUES (200)",
            Conflict("added rows"),
            &[200],
        ),
        (
            "",
            "DELETE FROM t WHERE id = 1 AND id IN (SELECT id FROM t)",
            "DELETE FROM t WHERE id > 100",
            Conflict("deleted rows"),
            &[-1001],
        ),
    ];
    check(&pair, "copy-on-write", cases).await;
}

/// Rows are named in delete files: a row may be deleted twice, and files that lose rows stay.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_deleted_meanwhile_matter_to_whoever_has_read_them() {
    use Outcome::{Conflict, Done};
    const REWRITE: &str = "CALL system.rewrite_data_files('t', 2)";
    let pair = Pair::start().await;
    let cases: [Case; 16] = [
        ("", "DELETE FROM t WHERE id = 1", "DELETE FROM t WHERE id = 2", Done, &[-1, -2]),
        ("snapshot", "DELETE FROM t WHERE id = 1", "DELETE FROM t WHERE id = 2", Done, &[-1, -2]),
        ("", "DELETE FROM t WHERE id = 1", "DELETE FROM t WHERE id <= 2", Done, &[-1, -2]),
        ("", "DELETE FROM t WHERE id = 1", "UPDATE t SET id = 60 WHERE id = 2", Done, &[-1, -2, 60]),
        ("", "DELETE FROM t WHERE id < 3", "UPDATE t SET id = 2 WHERE id = 109", Conflict("added rows"), &[-109, 2]),
        ("", "DELETE FROM t WHERE id = 1", "TRUNCATE TABLE t", Conflict("data file that"), &[-1000, -1001]),
        ("", "DELETE FROM t WHERE id = 1", REWRITE, Conflict("data file that"), &[]),
        ("snapshot", REWRITE, "DELETE FROM t WHERE id = 1", Conflict("deleted rows"), &[-1]),
        ("", "UPDATE t SET id = -id WHERE id = 1", "DELETE FROM t WHERE id = 2", Conflict("deleted rows"), &[-2]),
        (
            "snapshot",
            "UPDATE t SET id = -id WHERE id = 1",
            "DELETE FROM t WHERE id = 2",
            Conflict("deleted rows"),
            &[-2],
        ),
        ("", "UPDATE t SET id = -id WHERE id = 1", "DELETE FROM t WHERE id = 102", Done, &[-1, -102]),
        ("", "UPDATE t SET id = -id WHERE id = 1", "DELETE FROM t WHERE id > 100", Done, &[-1, -1001]),
        ("", "UPDATE t SET id = -id WHERE id = 1", REWRITE, Conflict("data file that"), &[]),
        (
            "",
            "DELETE FROM t WHERE id = 1 AND id IN (SELECT id FROM t)",
            "DELETE FROM t WHERE id = 102",
            Conflict("deleted rows"),
            &[-102],
        ),
        (
            "",
            "MERGE INTO t USING (SELECT 1 AS k) AS s ON t.id = s.k WHEN MATCHED THEN DELETE",
            "DELETE FROM t WHERE id = 102",
            Conflict("deleted rows"),
            &[-102],
        ),
        (
            "",
            "MERGE INTO t USING (SELECT 1 AS k) AS s ON t.id = s.k AND t.id < 50 WHEN MATCHED AND t.id = ANY (SELECT id FROM t) THEN DELETE",
            "DELETE FROM t WHERE id = 102",
            Conflict("deleted rows"),
            &[-102],
        ),
    ];
    check(&pair, "merge-on-read", cases).await;
}

/// Isolation, what the first and the second writer do, what becomes of the first, and the rows that come and go. There are two files:
/// 1 to 10, and 101 to 110.
type Case = (&'static str, &'static str, &'static str, Outcome, &'static [i64]);

async fn check(pair: &Pair, mode: &str, cases: impl IntoIterator<Item = Case>) {
    use Outcome::{Conflict, Done};
    let (a, b) = (pair.cluster.client(0).await, pair.cluster.client(1).await);
    for (isolation, first, second, expected, changes) in cases {
        let what = format!("{first} / {second} {isolation} {mode}");
        run(&b, "CREATE TABLE t AS SELECT value AS id FROM generate_series(1, 10)").await;
        run(&b, "INSERT INTO t SELECT value FROM generate_series(101, 110)").await;
        // The other one is the default.
        if mode == "merge-on-read" {
            for kind in ["delete", "update", "merge"] {
                set_property(&pair.cluster, "t", &format!("write.{kind}.mode"), mode).await;
            }
        }
        if !isolation.is_empty() {
            for kind in ["delete", "update", "merge", "overwrite"] {
                set_property(&pair.cluster, "t", &format!("write.{kind}.isolation-level"), isolation).await;
            }
        }
        let outcome = pair.meet(first, second).await;
        let done = matches!(expected, Outcome::Done);
        match (outcome, expected) {
            (Ok(_), Done) => {}
            (Err(error), Conflict(words)) => {
                assert_eq!(error.kind, Kind::Conflict, "{what}: {error}");
                assert!(error.message.contains(words), "{what}: {error}");
                assert!(error.message.contains("nothing was committed"), "{what}: {error}");
            }
            (Ok(count), Conflict(words)) => panic!("{what}: {count} rows, and no conflict ({words})"),
            (Err(error), Done) => panic!("{what}: {error}"),
        }
        let mut rows: Vec<i64> = (1..=10).chain(101..=110).collect();
        for change in changes {
            match change {
                -1000 => rows.retain(|id| *id > 100),
                -1001 => rows.retain(|id| *id <= 100),
                gone if *gone < 0 => rows.retain(|id| *id != -gone),
                new => rows.push(*new),
            }
        }
        if done && first.contains("-id") {
            rows.push(-1);
        }
        rows.sort_unstable();
        for client in [&a, &b] {
            assert_eq!(numbers(client, "SELECT id FROM t ORDER BY id").await, rows, "{what}");
        }
        // Nothing is left that no snapshot names, once the clean-up is through.
        let named = named_files(&pair.cluster).await;
        until(&format!("{what}: {named} files"), async || pair.cluster.files(".parquet").len() == named).await;
        run(&b, "DROP TABLE t").await;
        // What nothing names, a clean-up may remove meanwhile.
        for file in pair.cluster.files("") {
            let removed = std::fs::remove_file(&file);
            assert!(removed.is_ok() || !file.exists(), "{}: {removed:?}", file.display());
        }
    }
}

/// How many data files all snapshots together name.
async fn named_files(cluster: &Cluster) -> usize {
    let table = metadata(cluster, "t").await;
    let io = iceberg::io::FileIO::new_with_fs();
    let mut named = std::collections::HashSet::new();
    for snapshot in table.snapshots() {
        let list = std::fs::read(snapshot.manifest_list().strip_prefix("file://").unwrap()).unwrap();
        for file in iceberg::spec::ManifestList::parse_with_version(&list, table.format_version()).unwrap().entries() {
            let manifest = file.load_manifest(&io).await.unwrap();
            named.extend(manifest.entries().iter().map(|entry| entry.file_path().to_owned()));
        }
    }
    named.len()
}

/// Writers on two nodes count up one row; a conflict says that nothing was done, so that trying again is right.
#[tokio::test(flavor = "multi_thread")]
async fn counters_that_try_again_after_conflicts_miss_nothing() {
    let cluster = Cluster::start(2).await;
    run(&cluster.client(0).await, "CREATE TABLE t AS SELECT 0 AS n, 0 AS other").await;
    let writers = (0..4).map(|writer| {
        let cluster = &cluster;
        async move {
            let client = cluster.client(writer % 2).await;
            let mut done = 0;
            while done < 5 {
                match client.query("UPDATE t SET n = n + 1", TIMEOUT).await {
                    Ok(_) => done += 1,
                    Err(error) => {
                        assert_eq!(error.kind, Kind::Conflict, "{error}");
                        assert!(error.message.contains("nothing was committed"), "{error}");
                    }
                }
            }
        }
    });
    futures::future::join_all(writers).await;
    let client = cluster.client(0).await;
    // Another node's pointer is believed for a moment.
    until("every count to be seen", async || numbers(&client, "SELECT n FROM t").await == [20]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_replaced_by_its_own_rows_loses_none_of_others() {
    let pair = Pair::start().await;
    let client = pair.cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    run(&client, "CREATE VIEW v AS SELECT x FROM t").await;
    run(&client, "ALTER TABLE t SET TBLPROPERTIES ('write.overwrite.isolation-level' = 'snapshot')").await;
    for query in [
        "SELECT x FROM t",
        "SELECT x FROM t WHERE x > 1000",
        "SELECT x FROM v",
        "SELECT 1 AS x WHERE 1 IN (SELECT x FROM t)",
    ] {
        let error =
            pair.meet(&format!("CREATE OR REPLACE TABLE t AS {query}"), "INSERT INTO t VALUES (2)").await.unwrap_err();
        assert!(error.kind == Kind::Conflict && error.message.contains("added rows"), "{query}: {error}");
    }
    assert_eq!(numbers(&client, "SELECT x FROM t ORDER BY x").await, [1, 2, 2, 2, 2]);
    // What reads nothing of it replaces what is there.
    assert_eq!(pair.meet("CREATE OR REPLACE TABLE t AS SELECT 7 AS x", "INSERT INTO t VALUES (2)").await.unwrap(), 1);
    assert_eq!(numbers(&client, "SELECT x FROM t").await, [7]);
    assert_eq!(pair.meet("CREATE OR REPLACE TABLE t AS SELECT x FROM t", "SELECT 1").await.unwrap(), 1);
}
