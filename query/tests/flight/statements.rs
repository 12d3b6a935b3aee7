//! Prepared statements, metadata, and what else drivers ask for.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Int32Type};
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::sql::client::FlightSqlServiceClient;
use arrow_flight::sql::{
    CommandGetTables, CommandGetXdbcTypeInfo, CommandStatementIngest, EndTransaction, ProstMessageExt,
    TableDefinitionOptions, TableExistsOption, TableNotExistOption,
};
use arrow_flight::{FlightDescriptor, IpcMessage};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use prost::Message;
use tonic::transport::Channel;

use crate::common::{Cluster, in_time, number, rows_of, run, text, until};
use crate::support::eventually;
use crate::{flight_sql, redeem, ticket};

fn values(columns: Vec<ArrayRef>) -> RecordBatch {
    RecordBatch::try_from_iter(columns.into_iter().enumerate().map(|(i, column)| (i.to_string(), column))).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_are_bound_and_run_on_any_node() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (id INT NOT NULL, what VARCHAR)").await;
    let mut client = flight_sql(&cluster, 0).await;
    let mut insert = client.prepare("INSERT INTO t VALUES (?, ?)".to_owned(), None).await.unwrap();
    let types: Vec<_> = insert.parameter_schema().unwrap().fields().iter().map(|f| f.data_type().clone()).collect();
    assert_eq!(types, [DataType::Int32, DataType::Utf8], "those of the columns");
    let ids: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    let words: ArrayRef = Arc::new(StringArray::from(vec![Some("it's"), None, Some("c")]));
    insert.set_parameters(values(vec![ids, words])).unwrap();
    assert_eq!(insert.execute_update().await.unwrap(), 3);
    assert_eq!(number(&sql, "SELECT count(*) FROM \"t$snapshots\"").await, 1, "one change");
    let mut query = client.prepare("SELECT what FROM t WHERE id = $1 OR what = $2".to_owned(), None).await.unwrap();
    assert_eq!(query.dataset_schema().unwrap().field(0).name(), "what");
    let bound: Vec<ArrayRef> = vec![Arc::new(Int64Array::from(vec![3])), Arc::new(StringArray::from(vec!["it's"]))];
    query.set_parameters(values(bound)).unwrap();
    let info = query.execute().await.unwrap();
    let mut other = flight_sql(&cluster, 1).await;
    let mut rows = rows_of(&redeem(&mut other, ticket(&info)).await.unwrap());
    rows.sort();
    assert_eq!(rows, [["c"], ["it's"]]);
    // A few hundred of them are few bytes, though they come in one piece of memory.
    let many = 400;
    let marks = vec!["?"; many].join(", ");
    let mut query = client.prepare(format!("SELECT count(*) FROM t WHERE id IN ({marks})"), None).await.unwrap();
    query
        .set_parameters(values((0..many as i64).map(|n| Arc::new(Int64Array::from(vec![n])) as ArrayRef).collect()))
        .unwrap();
    let info = query.execute().await.unwrap();
    assert_eq!(rows_of(&redeem(&mut other, ticket(&info)).await.unwrap()), [["3"]]);
    // A value that is missing has a type, as one that is there.
    let mut query = client.prepare("SELECT ? AS x".to_owned(), None).await.unwrap();
    query.set_parameters(values(vec![Arc::new(StringArray::from(vec![None::<&str>]))])).unwrap();
    let info = query.execute().await.unwrap();
    let rows = redeem(&mut other, ticket(&info)).await.unwrap();
    assert_eq!(rows[0].schema().field(0).data_type(), &DataType::Utf8);
    // Other statements are run for each row, all or none.
    let mut update = client.prepare("UPDATE t SET what = ? WHERE id = ?".to_owned(), None).await.unwrap();
    let (words, ids) = (StringArray::from(vec!["x", "y"]), Int64Array::from(vec![1, 3]));
    update.set_parameters(values(vec![Arc::new(words), Arc::new(ids)])).unwrap();
    assert_eq!(update.execute_update().await.unwrap(), 2);
    assert_eq!(text(&sql, "SELECT what FROM t ORDER BY id").await, [["x"], ["NULL"], ["y"]]);
    let mut failing = client.prepare("UPDATE t SET id = id / ? WHERE id = 3".to_owned(), None).await.unwrap();
    failing.set_parameters(values(vec![Arc::new(Int64Array::from(vec![1, 0]))])).unwrap();
    let error = failing.execute_update().await.unwrap_err();
    assert!(error.to_string().contains("nothing was committed"), "{error}");
    assert_eq!(number(&sql, "SELECT CAST(max(id) AS BIGINT) FROM t").await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_said() {
    let cluster = Cluster::start(1).await;
    run(&cluster.client(0).await, "CREATE TABLE t (id BIGINT)").await;
    let mut client = flight_sql(&cluster, 0).await;
    let one = || values(vec![Arc::new(Int64Array::from(vec![1]))]);
    let two_rows = || values(vec![Arc::new(Int64Array::from(vec![1, 2]))]);
    let large = values(vec![Arc::new(StringArray::from(vec!["x".repeat(1 << 20)]))]);
    for (sql, bound, words) in [
        ("SELECT ? + ?", Some(one()), "2 parameters, and 1 values"),
        ("SELECT ?", None, "no values are bound"),
        ("SELECT id FROM t WHERE id = ?", Some(two_rows()), "takes one"),
        ("SELECT ?", Some(large), "bulk ingest"),
    ] {
        let mut prepared = client.prepare(sql.to_owned(), None).await.unwrap();
        if let Some(bound) = bound {
            prepared.set_parameters(bound).unwrap();
        }
        let error = prepared.execute().await.unwrap_err();
        assert!(error.to_string().contains(words), "{sql}: {error}");
    }
    for (sql, words) in [
        ("SELECT $a", "has a name"),
        ("SELECT * FROM nowhere WHERE x = ?", "nowhere does not exist"),
        ("CREATE VIEW v AS SELECT ? AS x", "parameters in CREATE VIEW"),
    ] {
        let error = client.prepare(sql.to_owned(), None).await.map(drop).unwrap_err();
        assert!(error.to_string().contains(words), "{sql}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_sent_again_by_their_operation_id_go_in_once() {
    let cluster = Cluster::start(1).await;
    let sql = cluster.client(0).await;
    let mut client = flight_sql(&cluster, 0).await;
    client.set_header("lake-operation-id", "load 1");
    for _ in 0..2 {
        let replacing = TableDefinitionOptions {
            if_not_exist: TableNotExistOption::Create as i32,
            if_exists: TableExistsOption::Replace as i32,
        };
        let command = CommandStatementIngest { table_definition_options: Some(replacing), ..appending("t", None) };
        let rows = values(vec![Arc::new(Int64Array::from(vec![1, 2]))]);
        let rows = futures::stream::iter([Ok(rows)]);
        assert_eq!(client.execute_ingest(command, rows).await.unwrap(), 2);
    }
    assert_eq!(number(&sql, "SELECT count(*) FROM \"t$snapshots\"").await, 1);
}

fn appending(table: &str, transaction_id: Option<Bytes>) -> CommandStatementIngest {
    CommandStatementIngest {
        table_definition_options: Some(TableDefinitionOptions {
            if_not_exist: TableNotExistOption::Fail as i32,
            if_exists: TableExistsOption::Append as i32,
        }),
        table: table.into(),
        transaction_id,
        ..CommandStatementIngest::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_ingested_into_a_transaction_at_any_node() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(1).await;
    run(&sql, "CREATE TABLE t (\"0\" BIGINT)").await;
    let batches = |count: i64, rows: i64| {
        let batch = move |n| values(vec![Arc::new(Int64Array::from_iter_values(n * rows..(n + 1) * rows))]);
        futures::stream::iter((0..count).map(move |n| Ok(batch(n))))
    };
    let mut holder = flight_sql(&cluster, 0).await;
    for (end, left) in [(EndTransaction::Rollback, 0), (EndTransaction::Commit, 1_000_006)] {
        let transaction = holder.begin_transaction().await.unwrap();
        // The command names it, or the cookie of a session does.
        let mut client = flight_sql(&cluster, 1).await;
        let named = appending("t", Some(transaction.clone()));
        assert_eq!(client.execute_ingest(named, batches(100, 10_000)).await.unwrap(), 1_000_000);
        let mut sessions = [flight_sql(&cluster, 0).await, flight_sql(&cluster, 1).await];
        for client in &mut sessions {
            client
                .set_header("cookie", format!("a=b; lake-transaction={}", std::str::from_utf8(&transaction).unwrap()));
            assert_eq!(client.execute_ingest(appending("t", None), batches(1, 3)).await.unwrap(), 3);
        }
        let info = client.execute("SELECT count(*) FROM t".to_owned(), Some(transaction.clone())).await.unwrap();
        assert_eq!(rows_of(&redeem(&mut client, ticket(&info)).await.unwrap()), [["1000006"]]);
        assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
        // What is refused there is told here.
        let command = CommandStatementIngest { table: "nowhere".into(), ..appending("t", Some(transaction.clone())) };
        if end == EndTransaction::Rollback {
            let error = client.execute_ingest(command, batches(1, 3)).await.unwrap_err();
            assert!(error.to_string().contains("nowhere"), "{error}");
        }
        client.end_transaction(transaction, end).await.unwrap();
        eventually("the end to be seen", async || (number(&sql, "SELECT count(*) FROM t").await == left).then_some(()))
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ingest_that_breaks_off_leaves_nothing() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (\"0\" BIGINT)").await;
    let mut holder = flight_sql(&cluster, 0).await;
    let transaction = holder.begin_transaction().await.unwrap();
    // By itself, in a transaction, and in one that another node holds.
    for (node, transaction) in [(0, None), (0, Some(transaction)), (1, Some(holder.begin_transaction().await.unwrap()))]
    {
        let command = FlightDescriptor::new_cmd(appending("t", transaction.clone()).as_any().encode_to_vec());
        let some = futures::stream::iter([Ok(values(vec![Arc::new(Int64Array::from(vec![1, 2]))]))]);
        let rows = FlightDataEncoderBuilder::new()
            .with_flight_descriptor(Some(command))
            .build(some.chain(futures::stream::pending()))
            .map(Result::unwrap);
        // Only the call is given up; the connection stays.
        let connection = flight_sql(&cluster, node).await;
        let mut client = connection.clone();
        let ingesting = tokio::spawn(async move { client.inner_mut().do_put(rows).await.map(drop) });
        let running = || cluster.nodes[0].engine().running();
        eventually("the rows to come in", async || (running() > 0).then_some(())).await;
        ingesting.abort();
        eventually("the change to end", async || (running() == 0).then_some(())).await;
        drop(connection);
        assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
        let Some(transaction) = transaction else { continue };
        let error = holder.end_transaction(transaction.clone(), EndTransaction::Commit).await.unwrap_err().to_string();
        assert!(error.contains("aborted"), "{error}");
        holder.end_transaction(transaction, EndTransaction::Rollback).await.unwrap();
        assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
    }
}

async fn listed(client: &mut FlightSqlServiceClient<Channel>, command: CommandGetTables) -> Vec<Vec<String>> {
    let info = client.get_tables(command).await.unwrap();
    let rows = redeem(client, ticket(&info)).await.unwrap();
    let rows = arrow::compute::concat_batches(&rows[0].schema(), &rows).unwrap();
    rows_of(&[rows.project(&[1, 2, 3]).unwrap()])
}

#[tokio::test(flavor = "multi_thread")]
async fn the_catalog_is_listed_with_views_and_patterns() {
    let cluster = Cluster::start(1).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE orders (id BIGINT)").await;
    run(&sql, "CREATE VIEW order_ids AS SELECT id FROM orders").await;
    run(&sql, "CREATE SCHEMA other").await;
    run(&sql, "CREATE TABLE other.orders (id BIGINT)").await;
    let mut client = flight_sql(&cluster, 0).await;
    let all = CommandGetTables { include_schema: true, ..CommandGetTables::default() };
    let (view, table, other) =
        (["default", "order_ids", "VIEW"], ["default", "orders", "TABLE"], ["other", "orders", "TABLE"]);
    assert_eq!(listed(&mut client, all.clone()).await, [view, table, other]);
    let views = CommandGetTables { table_types: vec!["VIEW".into()], ..all.clone() };
    assert_eq!(listed(&mut client, views).await, [view]);
    let some = CommandGetTables {
        db_schema_filter_pattern: Some("o%".into()),
        table_name_filter_pattern: Some("_rders".into()),
        ..all
    };
    assert_eq!(listed(&mut client, some).await, [other]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_describes_itself() {
    let cluster = Cluster::start(1).await;
    let mut client = flight_sql(&cluster, 0).await;
    let info = client.get_sql_info(Vec::new()).await.unwrap();
    let rows = redeem(&mut client, ticket(&info)).await.unwrap();
    assert!(rows.iter().map(RecordBatch::num_rows).sum::<usize>() > 30);
    let info = client.get_xdbc_type_info(CommandGetXdbcTypeInfo { data_type: None }).await.unwrap();
    let rows = redeem(&mut client, ticket(&info)).await.unwrap();
    let names = rows[0].column(0).as_string::<i32>();
    assert!(names.iter().flatten().any(|name| name == "VARCHAR"));
    let one = client.get_xdbc_type_info(CommandGetXdbcTypeInfo { data_type: Some(-5) }).await.unwrap();
    let rows = redeem(&mut client, ticket(&one)).await.unwrap();
    assert_eq!((rows[0].num_rows(), rows[0].column(1).as_primitive::<Int32Type>().value(0)), (1, -5));
}

#[tokio::test(flavor = "multi_thread")]
async fn polling_answers_with_all_there_is() {
    let cluster = Cluster::start(1).await;
    let mut client = flight_sql(&cluster, 0).await;
    let asking = |query: &str| {
        let command = arrow_flight::sql::CommandStatementQuery { query: query.into(), transaction_id: None };
        let command = prost::Message::encode_to_vec(&arrow_flight::sql::ProstMessageExt::as_any(&command));
        FlightDescriptor::new_cmd(command)
    };
    let descriptor = asking("SELECT 7 AS x");
    let inner = client.inner_mut();
    let poll = inner.poll_flight_info(descriptor.clone()).await.unwrap().into_inner();
    assert!(poll.flight_descriptor.is_none(), "there is nothing more to ask for");
    let info = poll.info.unwrap();
    let schema = inner.get_schema(descriptor).await.unwrap().into_inner();
    let schema = arrow::datatypes::Schema::try_from(IpcMessage(schema.schema)).unwrap();
    assert_eq!(schema.field(0).name(), "x");
    let stream = client.do_get(ticket(&info)).await.unwrap();
    let rows: Vec<RecordBatch> = stream.try_collect().await.unwrap();
    assert_eq!(rows_of(&rows), [["7"]]);
    assert_eq!(rows[0].column(0).null_count(), 0);
    // A query of months: nothing of it is waited for, nothing runs before its rows are asked for, and those come while it does.
    let running = || cluster.nodes[0].engine().running();
    let months = asking("SELECT value FROM generate_series(1, 1000000000000000)");
    let poll = in_time("an answer", client.inner_mut().poll_flight_info(months.clone())).await.unwrap().into_inner();
    assert!(poll.flight_descriptor.is_none());
    until("nothing to run", async || running() == 0).await;
    let mut rows = client.do_get(ticket(&poll.info.unwrap())).await.unwrap();
    assert!(in_time("the first rows", rows.try_next()).await.unwrap().unwrap().num_rows() > 0);
    assert_eq!(running(), 1);
    let poll = in_time("an answer meanwhile", client.inner_mut().poll_flight_info(months)).await.unwrap().into_inner();
    assert!(poll.info.is_some());
    drop(rows);
    until("the query to end", async || running() == 0).await;
}
