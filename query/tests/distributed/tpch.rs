//! TPC-H.

use lake_query::sql::tpch::{TABLES, queries};

use crate::common::*;
use crate::{counts, until_idle};

const SCALE: f64 = 0.01;

/// Rows in an order of their own: where a query leaves theirs open, nodes may give another.
async fn sorted(client: &lake_query::client::SqlClient, sql: &str) -> Vec<Vec<String>> {
    let mut rows = text(client, sql).await;
    rows.sort();
    rows
}

#[tokio::test(flavor = "multi_thread")]
async fn every_query_of_tpch_answers_over_several_nodes_as_on_one() {
    let cluster = crate::cluster().await;
    let (spread, alone) = (cluster.client(0).await, cluster.client(1).await);
    run(&alone, "SET lake.distributed = off").await;
    for table in TABLES {
        run(&alone, &format!("CREATE TABLE {table} AS SELECT * FROM tpch('{table}', {SCALE})")).await;
    }
    // More than one file, and deleted rows.
    run(&alone, "INSERT INTO lineitem SELECT * FROM lineitem WHERE l_orderkey < 1000").await;
    run(&alone, "DELETE FROM lineitem WHERE l_orderkey BETWEEN 2000 AND 2100").await;
    let queries = queries();
    assert_eq!(queries.len(), 22);
    for (number, sql) in queries.iter().enumerate() {
        let before = counts(&cluster, 0);
        assert_eq!(sorted(&spread, sql).await, sorted(&alone, sql).await, "Q{}", number + 1);
        let after = counts(&cluster, 0);
        assert_eq!(after, (before.0 + 1, before.1), "Q{} was not spread, or ran on one node after all", number + 1);
    }
    assert_eq!(counts(&cluster, 1), (0, 0));
    until_idle(&cluster).await;
}
