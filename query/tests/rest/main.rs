//! The Iceberg REST catalog: on the wire, and as real clients use it, which are installed from PyPI.

mod again;
mod comeback;
#[path = "../common/mod.rs"]
mod common;
mod duckdb;
mod frames;
mod http;
mod limits;
mod mutations;
mod outcomes;
mod pyiceberg;
mod python;
#[path = "../../../client/tests/support/s3.rs"]
mod s3;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../../client/tests/support/mod.rs"]
mod support;
mod updates;
mod views;
mod warehouses;
mod wire;

use std::sync::Arc;

use lake_client::memory::MemoryStore;
use lake_client::store::SharedStore;
use lake_query::Options;
use lake_query::client::SqlClient;

use crate::common::{Cluster, run};
use crate::http::Http;

/// Query nodes that serve the REST catalog, over one store.
async fn cluster(nodes: usize) -> Cluster {
    over(Arc::new(MemoryStore::new()), nodes, |options| options).await
}

async fn over(store: SharedStore, nodes: usize, change: impl Fn(Options) -> Options) -> Cluster {
    Cluster::over(store, nodes, |options| change(Options { rest_listen: Some("127.0.0.1:0".into()), ..options })).await
}

/// Where a node's REST catalog is, for clients of other makers.
fn uri(cluster: &Cluster, node: usize) -> String {
    format!("http://{}", cluster.nodes[node].rest_address().unwrap())
}

/// Makes two tables by SQL for them to read, in this schema. Rows of the second that are deleted or changed stay in their files:
/// they are named in delete files.
async fn make_from_sql(sql: &SqlClient, schema: &str) {
    let rows = "SELECT * FROM (VALUES (1, 'a'), (2, NULL)) AS v(id, what)";
    run(sql, &format!("CREATE TABLE {schema}.from_sql AS {rows}")).await;
    run(sql, &format!("INSERT INTO {schema}.from_sql VALUES (3, 'c')")).await;
    let with = "WITH ('write.delete.mode' = 'merge-on-read', 'write.update.mode' = 'merge-on-read')";
    run(sql, &format!("CREATE TABLE {schema}.deleted (id BIGINT, what TEXT) {with}")).await;
    run(sql, &format!("INSERT INTO {schema}.deleted VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, NULL)")).await;
    run(sql, &format!("DELETE FROM {schema}.deleted WHERE id = 2")).await;
    run(sql, &format!("UPDATE {schema}.deleted SET what = 'z' WHERE id = 3")).await;
}

/// A client of a node's REST catalog.
fn rest(cluster: &Cluster, node: usize) -> Http {
    Http::new(cluster.nodes[node].rest_address().unwrap())
}
