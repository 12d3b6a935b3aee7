//! What goes wrong inside of a part of a query.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use lake_client::memory::MemoryStore;
use lake_client::store::SharedStore;

use super::guard::PANICS;
use super::{Mode, Policy};
use crate::client::SqlClient;
use crate::{Config, Options, QueryNode};

const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));

#[test]
fn large_queries_are_spread_unless_somebody_says_otherwise() {
    assert_eq!(Policy::default().mode(None), Mode::Auto);
    for (policy, unasked, asked) in [
        ("off", Mode::Off, Mode::Off),
        ("allowed", Mode::Off, Mode::On),
        ("auto", Mode::Auto, Mode::On),
        ("on", Mode::On, Mode::On),
    ] {
        let policy: Policy = policy.parse().unwrap();
        assert_eq!((policy.mode(None), policy.mode(Some(Mode::On))), (unasked, asked), "{policy:?}");
    }
}

async fn node(dir: &std::path::Path, name: &str, store: SharedStore) -> QueryNode {
    let options = Options {
        listen: Some("127.0.0.1:0".into()),
        dir: Some(dir.join(name)),
        warehouse: Some(format!("file://{}", dir.join("warehouse").display())),
        memory_limit_bytes: Some(256 << 20),
        target_partitions: Some(2),
        distribute: Some("on".into()),
        ..Options::default()
    };
    QueryNode::start(Config::new(options).unwrap(), store).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_panics_costs_no_row() {
    let dir = tempfile::tempdir().unwrap();
    let store: SharedStore = Arc::new(MemoryStore::new());
    let nodes = [node(dir.path(), "a", store.clone()).await, node(dir.path(), "b", store).await];
    let addresses = nodes.each_ref().map(|node| node.flight_address().to_string());
    nodes.iter().for_each(|node| node.distribute_over(&addresses).unwrap());
    let client = SqlClient::connect(&addresses, None).await.unwrap();
    let run = async |sql: &str| client.query(sql, TIMEOUT).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
    run("CREATE TABLE t AS SELECT value AS x FROM generate_series(1, 1000)").await;
    run("INSERT INTO t SELECT value FROM generate_series(1001, 2000)").await;
    let sum = async || run("SELECT sum(x) FROM t").await[0].column(0).as_primitive::<Int64Type>().value(0);
    assert_eq!(sum().await, 2_001_000);
    let (spread, fallen_back) = nodes[0].engine().distributed().unwrap().counts();
    assert!(spread > 0 && fallen_back == 0, "{spread} {fallen_back}");
    let began = Instant::now();
    PANICS.store(true, Ordering::SeqCst);
    assert_eq!(sum().await, 2_001_000);
    assert!(!PANICS.load(Ordering::SeqCst), "nothing panicked");
    assert_eq!(nodes[0].engine().distributed().unwrap().counts(), (spread + 1, 1), "after {:?}", began.elapsed());
    for node in nodes {
        node.shutdown().await;
    }
}
