//! Query nodes over one memory store and one warehouse directory, and clients for them.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod store;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use lake_client::memory::MemoryStore;
use lake_client::store::SharedStore;
use lake_query::client::{SqlClient, SqlError};
use lake_query::{Config, Options, QueryNode};
use tokio::sync::Semaphore;

/// One or more query nodes that share their metadata and their warehouse.
pub struct Cluster {
    pub dir: tempfile::TempDir,
    pub store: SharedStore,
    pub nodes: Vec<QueryNode>,
}

pub fn options(dir: &Path) -> Options {
    Options {
        listen: Some("127.0.0.1:0".into()),
        dir: Some(dir.join("node")),
        warehouse: Some(format!("file://{}", dir.join("warehouse").display())),
        memory_limit_bytes: Some(256 << 20),
        target_partitions: Some(2),
        ..Options::default()
    }
}

impl Cluster {
    pub async fn start(nodes: usize) -> Self {
        Self::over(Arc::new(MemoryStore::new()), nodes, |options| options).await
    }

    pub async fn over(store: SharedStore, nodes: usize, change: impl Fn(Options) -> Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = Cluster { dir, store, nodes: Vec::new() };
        for i in 0..nodes {
            let options =
                Options { dir: Some(cluster.dir.path().join(format!("node{i}"))), ..options(cluster.dir.path()) };
            let config = Config::new(change(options)).unwrap();
            cluster.nodes.push(QueryNode::start(config, cluster.store.clone()).await.unwrap());
        }
        cluster
    }

    pub async fn client(&self, node: usize) -> SqlClient {
        SqlClient::connect(&[self.nodes[node].flight_address().to_string()], None).await.unwrap()
    }

    /// Every file in the warehouse whose name ends so.
    pub fn files(&self, suffix: &str) -> Vec<std::path::PathBuf> {
        fn walk(dir: &Path, suffix: &str, found: &mut Vec<std::path::PathBuf>) {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    walk(&path, suffix, found);
                } else if path.to_string_lossy().ends_with(suffix) {
                    found.push(path);
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.dir.path().join("warehouse"), suffix, &mut found);
        found.sort();
        found
    }
}

pub const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));
/// How long anything may take that comes by itself.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until something holds.
pub async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Whatever takes too long is a failure, and does not hang.
pub async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

/// Waits for a permit of a semaphore that counts what has happened, and takes it.
pub async fn happened(what: &str, count: &Semaphore) {
    in_time(what, count.acquire()).await.unwrap().forget();
}

pub async fn run(client: &SqlClient, sql: &str) -> Vec<RecordBatch> {
    client.query(sql, TIMEOUT).await.unwrap_or_else(|e| panic!("{sql}: {e}"))
}

pub async fn refused(client: &SqlClient, sql: &str) -> SqlError {
    match client.query(sql, TIMEOUT).await {
        Ok(rows) => panic!("{sql} was not refused: {}", pretty(&rows)),
        Err(error) => error,
    }
}

/// The one number that a statement returns.
pub async fn number(client: &SqlClient, sql: &str) -> i64 {
    let batches = run(client, sql).await;
    let values: Vec<i64> =
        batches.iter().flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values().to_vec()).collect();
    assert_eq!(values.len(), 1, "{sql} returned {}", pretty(&batches));
    values[0]
}

/// The numbers of a statement's first column.
pub async fn numbers(client: &SqlClient, sql: &str) -> Vec<i64> {
    let batches = run(client, sql).await;
    batches.iter().flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values().to_vec()).collect()
}

pub fn pretty(batches: &[RecordBatch]) -> String {
    arrow::util::pretty::pretty_format_batches(batches).unwrap().to_string()
}

/// The statement's rows as a table of text without borders.
pub async fn text(client: &SqlClient, sql: &str) -> Vec<Vec<String>> {
    rows_of(&run(client, sql).await)
}

/// Rows as text.
pub fn rows_of(batches: &[RecordBatch]) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for batch in batches {
        let options = arrow::util::display::FormatOptions::default().with_null("NULL");
        let columns: Vec<_> = batch
            .columns()
            .iter()
            .map(|column| arrow::util::display::ArrayFormatter::try_new(column, &options).unwrap())
            .collect();
        for row in 0..batch.num_rows() {
            rows.push(columns.iter().map(|column| column.value(row).to_string()).collect());
        }
    }
    rows
}
