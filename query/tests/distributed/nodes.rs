//! Nodes that fail, refuse, and stop.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Int64Array};
use arrow_flight::FlightData;
use arrow_flight::flight_service_client::FlightServiceClient;
use futures::{StreamExt, TryStreamExt};
use iceberg::spec::{FormatVersion, PrimitiveType, UnboundPartitionSpec};
use lake_client::memory::MemoryStore;
use lake_query::client::SqlClient;
use lake_query::distributed::token;
use lake_query::flight::keys::TicketKeys;
use lake_query::{Kind, Options};
use tonic::metadata::{BinaryMetadataValue, MetadataMap};
use tonic::transport::Endpoint;
use tonic::{Code, Request};

use crate::common::*;
use crate::foreign::{Foreign, batch, optional, schema};
use crate::proxy::Proxy;
use crate::{counts, until_idle};

const ROWS: i64 = 400_000;
const GIB: u64 = 1 << 30;

/// A table with a file for each node and more.
async fn with_table(cluster: &Cluster) {
    let client = cluster.client(0).await;
    run(&client, "SET lake.distributed = off").await;
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    for part in 0..4 {
        let (from, to) = (part * ROWS / 4 + 1, (part + 1) * ROWS / 4);
        run(&client, &format!("INSERT INTO t SELECT value FROM generate_series({from}, {to})")).await;
    }
}

/// Two nodes with the table. The first, whose client this is, reaches the second through the proxy.
async fn through_a_proxy() -> (Cluster, Proxy, SqlClient) {
    let cluster = crate::nodes(2, |options| options).await;
    with_table(&cluster).await;
    let proxy = Proxy::to(cluster.nodes[1].flight_address()).await;
    cluster.nodes[0]
        .distribute_over(&[cluster.nodes[0].flight_address().to_string(), proxy.address.to_string()])
        .unwrap();
    let client = cluster.client(0).await;
    (cluster, proxy, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_shows_the_stages_and_settings_say_whether_there_are_any() {
    let cluster = crate::nodes(2, |options| {
        let forbids = options.dir.as_ref().is_some_and(|dir| dir.ends_with("node1"));
        Options { distribute: forbids.then(|| "off".into()), ..options }
    })
    .await;
    with_table(&cluster).await;
    let client = cluster.client(0).await;
    let sql = "SELECT x % 10, count(*) FROM t GROUP BY x % 10";
    let stages = async || text(&client, &format!("EXPLAIN {sql}")).await.concat().join("\n").contains("Stage 1");
    assert!(!stages().await, "it is small");
    run(&client, sql).await;
    assert_eq!(counts(&cluster, 0), (0, 0));
    run(&client, "SET lake.distributed = on").await;
    assert!(stages().await);
    assert_eq!(run(&client, sql).await.iter().map(|batch| batch.num_rows()).sum::<usize>(), 10);
    assert_eq!(counts(&cluster, 0), (1, 0));
    run(&client, "SET lake.distributed = off").await;
    assert!(!stages().await);
    run(&client, "SET lake.distributed = DEFAULT").await;
    assert!(!stages().await);
    // It is how much a query reads that decides here, as the table's metadata has it: 1 GiB, as nothing is configured.
    for (name, sizes, is_spread) in [
        ("below", vec![GIB - 1], false),
        ("exactly", vec![GIB], true),
        ("all_below", vec![GIB / 2, GIB / 2 - 1], false),
        ("together", vec![GIB / 2, GIB / 2], true),
    ] {
        let columns = schema(0, [optional(1, "x", PrimitiveType::Long)]);
        let spec = UnboundPartitionSpec::builder().with_spec_id(0).build();
        let mut large = Foreign::create(&cluster, name, FormatVersion::V2, columns, spec, &[]).await;
        let files = sizes.into_iter().map(|bytes| {
            let file = large.data(&batch(vec![(1, "x", Arc::new(Int64Array::from(vec![1])) as ArrayRef)]));
            file.with(|file| {
                file.file_size_in_bytes(bytes).record_count(100_000_000);
            })
        });
        let files = files.collect();
        large.commit(name, files).await;
        let explain = format!("EXPLAIN SELECT x % 10, count(*) FROM {name} GROUP BY x % 10");
        let plan = text(&client, &explain).await.concat().join("\n");
        assert_eq!(plan.contains("Stage 1"), is_spread, "{name}: {plan}");
    }
    let wrong = refused(&client, "SET lake.distributed = 'far'").await;
    assert!(wrong.kind == Kind::Invalid && wrong.message.contains("off, auto or on"), "{wrong}");
    // What is not in tables stays here.
    run(&client, "SET lake.distributed = on").await;
    assert_eq!(number(&client, "SELECT count(*) FROM generate_series(1, 10)").await, 10);
    let mixed = "SELECT count(*) FROM t JOIN generate_series(1, 10) AS g(y) ON x = y";
    assert_eq!(number(&client, mixed).await, 10);
    assert_eq!(counts(&cluster, 0), (1, 0));
    // A node whose operator has it off takes parts of others' queries, and nobody's word for its own.
    let client = cluster.client(1).await;
    let forbidden = refused(&client, "SET lake.distributed = on").await;
    assert!(forbidden.kind == Kind::Denied && forbidden.message.contains("distribute"), "{forbidden}");
    run(&client, "SET lake.distributed = off").await;
    until_idle(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_a_row_is_told_as_on_one_node() {
    let cluster = crate::nodes(2, |options| options).await;
    with_table(&cluster).await;
    let client = cluster.client(0).await;
    let error = refused(&client, "SELECT sum(100 / (x - 399999)) FROM t").await;
    assert!(error.kind == Kind::Invalid && error.message.to_lowercase().contains("divide by zero"), "{error}");
    let error = refused(&client, "SELECT sum(9223372036854775807 - 1 + x) FROM t").await;
    assert!(error.kind == Kind::Invalid && error.message.to_lowercase().contains("overflow"), "{error}");
    assert_eq!(counts(&cluster, 0), (2, 0));
    until_idle(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_cannot_be_reached_costs_no_row() {
    let (cluster, proxy, client) = through_a_proxy().await;
    let sum = "SELECT sum(x) FROM t";
    assert_eq!(number(&client, sum).await, ROWS * (ROWS + 1) / 2);
    assert_eq!(counts(&cluster, 0), (1, 0));
    proxy.cut();
    assert_eq!(number(&client, sum).await, ROWS * (ROWS + 1) / 2);
    assert_eq!(counts(&cluster, 0), (2, 1));
    until_idle(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_lost_in_the_middle_ends_the_query_with_an_error() {
    let (cluster, proxy, client) = through_a_proxy().await;
    // Far more than is under way at any time.
    let mut rows = client.execute("SELECT x, repeat('a', 500) FROM t", TIMEOUT).await.unwrap();
    let first = rows.next().await.unwrap().unwrap();
    assert!(first.num_rows() > 0);
    proxy.cut();
    let error =
        in_time("the end", rows.try_collect::<Vec<_>>()).await.expect_err("rows are missing, and nothing said so");
    assert!(error.kind == Kind::Unavailable && error.message.contains("query node"), "{error}");
    assert_eq!(counts(&cluster, 0), (1, 0));
    until_idle(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_says_nothing_any_more_ends_the_query_with_an_error() {
    let (cluster, proxy, client) = through_a_proxy().await;
    let mut rows = client.execute("SELECT x, repeat('a', 500) FROM t", TIMEOUT).await.unwrap();
    rows.next().await.unwrap().unwrap();
    proxy.silence();
    let error =
        in_time("the end", rows.try_collect::<Vec<_>>()).await.expect_err("rows are missing, and nothing said so");
    assert!(error.kind == Kind::Unavailable && error.message.contains("query node"), "{error}");
    proxy.cut();
    until_idle(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_stops_every_part() {
    let cluster = crate::nodes(3, |options| options).await;
    with_table(&cluster).await;
    let client = cluster.client(0).await;
    // One that has enough before all rows have come ...
    assert_eq!(text(&client, "SELECT x, repeat('a', 500) FROM t LIMIT 3").await.len(), 3);
    until_idle(&cluster).await;
    // ... one that is given up ...
    let mut rows = client.execute("SELECT x, repeat('a', 500) FROM t", TIMEOUT).await.unwrap();
    rows.next().await.unwrap().unwrap();
    let in_hand = |node: usize| cluster.nodes[node].engine().distributed().unwrap().parts().in_hand();
    assert!((0..3).map(in_hand).sum::<usize>() > 0);
    drop(rows);
    until_idle(&cluster).await;
    // ... and one that no part of which has begun to send.
    let endless = "SELECT count(*) FROM t a, t b WHERE a.x + b.x = 0";
    let query = tokio::spawn(async move { client.query(endless, TIMEOUT).await });
    until("the parts to be there", async || (0..3).map(in_hand).sum::<usize>() > 0).await;
    query.abort();
    until_idle(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_takes_so_many_parts_and_what_it_refuses_is_done_by_who_asks() {
    let cluster = crate::nodes(2, |options| Options { distribute_tasks: Some(1), ..options }).await;
    with_table(&cluster).await;
    let client = cluster.client(0).await;
    // Two stages on each node.
    let groups = "SELECT count(*) FROM (SELECT x % 1000 AS y FROM t GROUP BY x % 1000) AS g";
    assert_eq!(number(&client, groups).await, 1000);
    assert_eq!(counts(&cluster, 0), (1, 1));
    until_idle(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_are_for_nodes_of_this_lake() {
    let cluster = crate::nodes(1, |options| options).await;
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut strangers =
        vec![token::sign(&TicketKeys::new(Arc::new(MemoryStore::new())), Default::default(), deadline).await.unwrap()];
    let mut nonsense = MetadataMap::new();
    nonsense.insert_bin("lake-part-bin", BinaryMetadataValue::from_bytes(b"nonsense"));
    strangers.push(nonsense);
    let uri = format!("http://{}", cluster.nodes[0].flight_address());
    let mut flight = FlightServiceClient::new(Endpoint::from_shared(uri).unwrap().connect().await.unwrap());
    let mut ask = async |headers: MetadataMap| {
        let mut request = Request::new(futures::stream::iter([FlightData::default()]));
        *request.metadata_mut() = headers;
        flight.do_exchange(request).await.map(|_| ()).unwrap_err()
    };
    for headers in strangers {
        let refused = ask(headers).await;
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    }
    let known = token::sign(&TicketKeys::new(cluster.store.clone()), Default::default(), deadline).await.unwrap();
    let refused = ask(known).await;
    assert_eq!(refused.code(), Code::InvalidArgument, "a message of no kind: {refused}");
}
