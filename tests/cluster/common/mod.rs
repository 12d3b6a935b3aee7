//! What the tests share: directories that go away, clusters of the built binary, SQL with readable answers, waiting.

pub mod install;
pub mod load;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use arrow::util::pretty::pretty_format_batches;
use futures::TryStreamExt;
use lake_chaos::process::Policy;
use lake_chaos::{Cluster, Role, Spec};
use lake_query::client::{Rows, SqlClient, SqlError};
use tokio::sync::{Mutex, MutexGuard};

use self::load::{Insert, Outcome};

/// The binary under test.
pub const LAKE: &str = env!("CARGO_BIN_EXE_lake");
/// How long what should happen soon may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

static ALONE: Mutex<()> = Mutex::const_new(());

/// Held by tests that measure or hurt processes.
pub async fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().await
}

/// A directory of one test, removed at its end.
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    pub fn new() -> Self {
        Self { dir: tempfile::Builder::new().prefix("lake-test-").tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Every file below a directory.
pub fn files(dir: &Path) -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let below = entries.flat_map(|entry| match entry.path() {
        path if path.is_dir() => files(&path),
        path => BTreeSet::from([path]),
    });
    below.collect()
}

/// Waits until `check` has an answer; fails with what was seen last.
pub async fn until<T, F>(what: &str, patience: Duration, check: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    lake_chaos::probe::until(what, patience, check).await.unwrap_or_else(|e| panic!("{e}"))
}

/// Three peers and two query nodes.
pub struct TestCluster {
    pub processes: Cluster,
}

impl TestCluster {
    pub async fn start(scratch: &Scratch) -> Self {
        Self::start_as(scratch, |_| {}).await
    }

    /// Starts a cluster that differs from the usual one.
    pub async fn start_as(scratch: &Scratch, change: impl FnOnce(&mut Spec)) -> Self {
        Self { processes: Cluster::start(Self::spec(&scratch.path("lake-data"), change)).await.unwrap() }
    }

    pub fn spec(dir: &Path, change: impl FnOnce(&mut Spec)) -> Spec {
        let mut spec = Spec::new(LAKE, dir);
        spec.peers = Some(3);
        // The tests decide what is down and when it is up again.
        spec.policy = Policy { restart: false, ..Policy::default() };
        spec.start_timeout = 3 * PATIENCE;
        change(&mut spec);
        spec
    }

    /// A connection to one query node, counted from 0.
    pub async fn sql(&self, node: usize) -> Sql {
        Sql::connect(&self.processes.endpoints(Role::Query)[node]).await
    }

    /// Waits until a node sees exactly these numbers: another node's commit shows within the age that it allows its
    /// cached pointers.
    pub async fn until_rows(&self, node: &Sql, query: &str, expected: &[i64]) {
        until(&format!("{query} to show {expected:?}"), PATIENCE, || async {
            let seen = node.numbers(query).await;
            if seen == expected { Ok(()) } else { Err(format!("{seen:?}")) }
        })
        .await;
    }

    /// Every acknowledged insert is there once and whole, every refused one is not there, and of those whose outcome is
    /// unknown none is there in half. Seen through each node.
    pub async fn check_rows(&self, outcomes: &[Insert]) {
        for node in 0..self.processes.endpoints(Role::Query).len() {
            let sql = self.sql(node).await;
            until("the rows that the acknowledgements promise", PATIENCE, || async {
                let found = load::rows(&sql).await;
                load::judge(outcomes, &found)
            })
            .await;
        }
        let acknowledged = outcomes.iter().filter(|o| o.outcome == Outcome::Acknowledged).count();
        assert!(acknowledged > 0, "nothing was acknowledged, so nothing was tested");
    }

    pub async fn stop(self) {
        self.processes.shutdown().await;
    }
}

/// Statements, and what they answer.
#[derive(Clone)]
pub struct Sql {
    client: SqlClient,
}

/// The rows of an answer, and what was said beside them.
#[derive(Debug)]
pub struct Answer {
    pub batches: Vec<RecordBatch>,
    pub notices: Vec<String>,
}

impl Sql {
    pub async fn connect(endpoint: &str) -> Self {
        let client = until("a query node to answer", PATIENCE, || async {
            SqlClient::connect(&[endpoint.to_owned()], None).await.map_err(|e| e.to_string())
        })
        .await;
        Self { client }
    }

    pub async fn run(&self, sql: &str) -> Result<Answer, SqlError> {
        self.run_within(sql, PATIENCE).await
    }

    pub async fn run_within(&self, sql: &str, timeout: Duration) -> Result<Answer, SqlError> {
        let rows = self.client.execute(sql, Some(timeout)).await?;
        let notices = rows.notices.clone();
        Ok(Answer { batches: rows.try_collect().await?, notices })
    }

    /// A query's rows, as they come.
    pub async fn rows(&self, sql: &str) -> Result<Rows, SqlError> {
        self.client.execute(sql, Some(PATIENCE)).await
    }

    /// The first column of a query, as integers.
    pub async fn numbers(&self, sql: &str) -> Vec<i64> {
        let answer = self.run(sql).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
        numbers(&answer.batches, 0)
    }

    /// The error that a statement must end in.
    pub async fn error(&self, sql: &str) -> SqlError {
        match self.run(sql).await {
            Ok(answer) => panic!("{sql} should fail, and answered\n{}", table(&answer.batches)),
            Err(e) => e,
        }
    }
}

/// A column as integers.
pub fn numbers(batches: &[RecordBatch], column: usize) -> Vec<i64> {
    let mut all = Vec::new();
    for batch in batches {
        let values = cast(batch.column(column), &DataType::Int64).unwrap();
        let values = values.as_primitive::<Int64Type>();
        assert_eq!(values.null_count(), 0);
        all.extend(values.values());
    }
    all
}

/// Rows as people read them; equal rows look equal whatever batches they come in.
pub fn table(batches: &[RecordBatch]) -> String {
    pretty_format_batches(batches).unwrap().to_string()
}

/// What a command printed, and how it ended.
#[derive(Debug)]
pub struct Printed {
    pub out: String,
    pub err: String,
    pub code: Option<i32>,
}

/// Runs `lake` to its end. Fails if that takes longer than the patience allows.
pub async fn lake(dir: &Path, args: &[&str]) -> Printed {
    let mut command = tokio::process::Command::new(LAKE);
    command.args(args).current_dir(dir).stdin(std::process::Stdio::null()).kill_on_drop(true);
    for name in ["LAKE_META", "LAKE_QUERY", "LAKE_LOG"] {
        command.env_remove(name);
    }
    let started = Instant::now();
    let output = tokio::time::timeout(2 * PATIENCE, command.output()).await;
    let output = output.unwrap_or_else(|_| panic!("lake {args:?} still runs after {:?}", started.elapsed())).unwrap();
    Printed {
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
        code: output.status.code(),
    }
}
