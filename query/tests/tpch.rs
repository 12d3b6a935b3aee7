//! The sample: loaded, it has the rows it should, and TPC-H's queries return what DataFusion returns over the same rows.

mod common;

use std::sync::Arc;

use common::*;
use datafusion::datasource::MemTable;
use datafusion::prelude::SessionContext;
use lake_query::sql::tpch::{TABLES, rows};

const SCALE: f64 = 0.01;

const QUERIES: [(&str, &str); 3] = [
    (
        "Q1",
        "SELECT l_returnflag, l_linestatus, sum(l_quantity) AS sum_qty, sum(l_extendedprice) AS sum_base_price, \
         sum(l_extendedprice * (1 - l_discount)) AS sum_disc_price, \
         sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) AS sum_charge, avg(l_quantity) AS avg_qty, \
         avg(l_extendedprice) AS avg_price, avg(l_discount) AS avg_disc, count(*) AS count_order \
         FROM tpch.lineitem WHERE l_shipdate <= DATE '1998-09-02' \
         GROUP BY l_returnflag, l_linestatus ORDER BY l_returnflag, l_linestatus",
    ),
    (
        "Q3",
        "SELECT l_orderkey, sum(l_extendedprice * (1 - l_discount)) AS revenue, o_orderdate, o_shippriority \
         FROM tpch.customer, tpch.orders, tpch.lineitem \
         WHERE c_mktsegment = 'BUILDING' AND c_custkey = o_custkey AND l_orderkey = o_orderkey \
         AND o_orderdate < DATE '1995-03-15' AND l_shipdate > DATE '1995-03-15' \
         GROUP BY l_orderkey, o_orderdate, o_shippriority ORDER BY revenue DESC, o_orderdate LIMIT 10",
    ),
    (
        "Q6",
        "SELECT sum(l_extendedprice * l_discount) AS revenue FROM tpch.lineitem \
         WHERE l_shipdate >= DATE '1994-01-01' AND l_shipdate < DATE '1995-01-01' \
         AND l_discount BETWEEN 0.05 AND 0.07 AND l_quantity < 24",
    ),
];

async fn expected(sql: &str) -> Vec<Vec<String>> {
    let context = SessionContext::new();
    context.sql("CREATE SCHEMA tpch").await.unwrap().collect().await.unwrap();
    for table in TABLES {
        let generated = rows(table, SCALE, 1, 1).unwrap();
        let schema = generated.schema().clone();
        let memory = MemTable::try_new(schema, vec![generated.collect()]).unwrap();
        context.register_table(format!("tpch.{table}").as_str(), Arc::new(memory)).unwrap();
    }
    let batches = context.sql(sql).await.unwrap().collect().await.unwrap();
    let mut rows = Vec::new();
    for batch in &batches {
        for row in 0..batch.num_rows() {
            let value = |column| arrow::util::display::array_value_to_string(column, row).unwrap();
            rows.push(batch.columns().iter().map(|column| value(column)).collect());
        }
    }
    rows
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sample_answers_as_datafusion_does() {
    let cluster = Cluster::start(2).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE SCHEMA tpch").await;
    for table in TABLES {
        run(&client, &format!("CREATE TABLE tpch.{table} AS SELECT * FROM tpch('{table}', {SCALE})")).await;
    }
    for node in 0..2 {
        let client = cluster.client(node).await;
        assert_eq!(number(&client, "SELECT count(*) FROM tpch.lineitem").await, 60175);
        for (name, sql) in QUERIES {
            assert_eq!(text(&client, sql).await, expected(sql).await, "{name} on node {node}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_table_function_explains_itself() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    assert_eq!(number(&client, "SELECT count(*) FROM tpch('REGION', 1)").await, 5);
    for sql in ["SELECT * FROM tpch('lines', 1)", "SELECT * FROM tpch('nation')", "SELECT * FROM tpch('nation', 0)"] {
        let error = refused(&client, sql).await;
        assert!(error.message.contains("tpch"), "{error}");
    }
}
