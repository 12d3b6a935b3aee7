//! Prepared statements, metadata, and what else drivers ask for.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Int32Type};
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::sql::client::FlightSqlServiceClient;
use arrow_flight::sql::{
    ActionCreatePreparedStatementRequest, ActionCreatePreparedStatementResult, Any, CommandGetTables,
    CommandGetXdbcTypeInfo, CommandPreparedStatementQuery, CommandStatementIngest, CommandStatementQuery,
    EndTransaction, ProstMessageExt, TableDefinitionOptions, TableExistsOption, TableNotExistOption,
    TicketStatementQuery,
};
use arrow_flight::{
    Action, CancelFlightInfoRequest, CancelFlightInfoResult, CancelStatus, FlightDescriptor, FlightInfo, IpcMessage,
    PollInfo, Ticket,
};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use lake_client::memory::MemoryStore;
use lake_query::Options;
use prost::Message;
use tonic::transport::Channel;
use tonic::{Code, Status};

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
async fn a_schema_is_told_without_rows() {
    let cluster = Cluster::start(1).await;
    let mut client = flight_sql(&cluster, 0).await;
    let schema = client.inner_mut().get_schema(asking("SELECT 7 AS x")).await.unwrap().into_inner();
    let schema = arrow::datatypes::Schema::try_from(IpcMessage(schema.schema)).unwrap();
    assert_eq!(schema.field(0).name(), "x");
}

fn asking(query: &str) -> FlightDescriptor {
    let command = CommandStatementQuery { query: query.into(), transaction_id: None };
    FlightDescriptor::new_cmd(command.as_any().encode_to_vec())
}

async fn poll(client: &mut FlightSqlServiceClient<Channel>, descriptor: FlightDescriptor) -> Result<PollInfo, Status> {
    let answer = in_time("an answer", client.inner_mut().poll_flight_info(descriptor)).await;
    answer.map(tonic::Response::into_inner)
}

/// Polls until there is nothing more to ask for.
async fn polled(
    client: &mut FlightSqlServiceClient<Channel>,
    descriptor: FlightDescriptor,
) -> Result<PollInfo, Status> {
    in_time("the end of a query", to_its_end(client, descriptor)).await
}

async fn to_its_end(
    client: &mut FlightSqlServiceClient<Channel>,
    mut descriptor: FlightDescriptor,
) -> Result<PollInfo, Status> {
    loop {
        let told = poll(client, descriptor).await?;
        match told.flight_descriptor.clone() {
            Some(next) => descriptor = next,
            None => return Ok(told),
        }
    }
}

async fn cancel(client: &mut FlightSqlServiceClient<Channel>, info: &FlightInfo) -> CancelStatus {
    let action = Action::new("CancelFlightInfo", CancelFlightInfoRequest::new(info.clone()).encode_to_vec());
    let answers: Vec<_> = client.do_action(tonic::Request::new(action)).await.unwrap().try_collect().await.unwrap();
    CancelFlightInfoResult::decode(&*answers[0].body).unwrap().status()
}

/// Runs for months, and returns one row.
const MONTHS: &str = "SELECT count(*) AS n FROM generate_series(1, 1000000000000000) WHERE value % 7 = 3";

#[tokio::test(flavor = "multi_thread")]
async fn a_polled_query_is_run_and_its_rows_are_kept_until_they_are_fetched() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t AS SELECT value AS x, CAST(value AS VARCHAR) AS s FROM generate_series(1, 20000)").await;
    let (mut here, mut there) = (flight_sql(&cluster, 0).await, flight_sql(&cluster, 1).await);
    let query = "SELECT x, s FROM t ORDER BY x";
    let told = polled(&mut here, asking(query)).await.unwrap();
    let info = told.info.unwrap();
    assert_eq!((told.progress, info.total_records, info.endpoint.len()), (Some(1.0), 20_000, 1));
    assert!(told.expiration_time.is_some());
    run(&sql, "DELETE FROM t WHERE x > 2").await;
    // Any node sends on what another has.
    let again = polled(&mut there, info.flight_descriptor.clone().unwrap()).await.unwrap();
    assert_eq!(again.info.as_ref(), Some(&info));
    let rows = redeem(&mut there, ticket(&info)).await.unwrap();
    assert_eq!(rows[0].schema().field(1).data_type(), &DataType::Utf8);
    let text = rows_of(&rows);
    assert_eq!(text.len(), 20_000, "as it was when it was asked for");
    assert_eq!(text[0], ["1", "1"]);
    assert_eq!(text[19_999], ["20000", "20000"]);
    for client in [&mut here, &mut there] {
        let error = redeem(client, ticket(&info)).await.unwrap_err();
        assert!(error.contains("fetched to the end"), "{error}");
    }
    assert_eq!(cancel(&mut there, &info).await, CancelStatus::NotCancellable);
    // A prepared one is run anew each time; no rows are an answer, too.
    let create = ActionCreatePreparedStatementRequest { query: query.to_owned(), transaction_id: None };
    let action = Action::new("CreatePreparedStatement", create.as_any().encode_to_vec());
    let answers: Vec<_> = here.do_action(tonic::Request::new(action)).await.unwrap().try_collect().await.unwrap();
    let created = Any::decode(&*answers[0].body).unwrap().unpack::<ActionCreatePreparedStatementResult>();
    let prepared_statement_handle = created.unwrap().unwrap().prepared_statement_handle;
    let command = CommandPreparedStatementQuery { prepared_statement_handle };
    let prepared = FlightDescriptor::new_cmd(command.as_any().encode_to_vec());
    for left in [2, 0] {
        let told = polled(&mut here, prepared.clone()).await.unwrap();
        let rows = redeem(&mut there, ticket(&told.info.unwrap())).await.unwrap();
        assert_eq!(rows_of(&rows).len(), left);
        run(&sql, "DELETE FROM t WHERE true").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_polled_query_that_runs_is_cancelled_at_any_node() {
    let cluster = Cluster::start(2).await;
    let running = || cluster.nodes[0].engine().running();
    for node in 0..2 {
        let (mut client, mut other) = (flight_sql(&cluster, 0).await, flight_sql(&cluster, node).await);
        let told = poll(&mut client, asking(MONTHS)).await.unwrap();
        let name = told.flight_descriptor.expect("it has not ended");
        let info = told.info.unwrap();
        assert!(info.endpoint.is_empty() && !info.schema.is_empty() && told.progress != Some(1.0));
        // Nobody has to stay.
        drop(client);
        until("it to run", async || running() == 1).await;
        let error = redeem(&mut other, Ticket { ticket: name.cmd.clone() }).await.unwrap_err();
        assert!(error.contains("still runs"), "{error}");
        let (mut waiting, asked) = (other.clone(), name.clone());
        let waiting = tokio::spawn(async move { poll(&mut waiting, asked).await });
        assert_eq!(cancel(&mut other, &info).await, CancelStatus::Cancelled);
        for told in [waiting.await.unwrap(), poll(&mut other, name).await] {
            let error = told.unwrap_err();
            assert_eq!(error.code(), Code::Cancelled, "{error}");
        }
        assert_eq!(cancel(&mut other, &info).await, CancelStatus::NotCancellable);
        until("the query to end", async || running() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_polled_query_that_fails_says_so_at_each_poll() {
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 1, |options| Options {
        spill_limit_bytes: Some(1 << 20),
        ..options
    })
    .await;
    let mut client = flight_sql(&cluster, 0).await;
    for (query, code, words) in [
        ("SELECT 1 / (value - 5000) FROM generate_series(1, 10000)", Code::InvalidArgument, "zero"),
        ("SELECT value FROM generate_series(1, 1000000)", Code::ResourceExhausted, "spill_limit_bytes"),
        ("SELECT x FROM nowhere", Code::NotFound, "nowhere"),
    ] {
        let error = polled(&mut client, asking(query)).await.unwrap_err();
        assert!(error.code() == code && error.message().contains(words), "{query}: {error}");
    }
    // What has failed holds nothing.
    let told = polled(&mut client, asking("SELECT value FROM generate_series(1, 1000)")).await.unwrap();
    assert_eq!(told.info.unwrap().total_records, 1000);
    // The deadline is the statement's, and not that of the call.
    let mut request = tonic::Request::new(asking(MONTHS));
    request.metadata_mut().insert("lake-timeout-ms", "1000".parse().unwrap());
    let error = match client.inner_mut().poll_flight_info(request).await {
        Ok(told) => polled(&mut client, told.into_inner().flight_descriptor.unwrap()).await.unwrap_err(),
        // Planning alone took as long.
        Err(error) => error,
    };
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    // A name is signed.
    let command = TicketStatementQuery { statement_handle: vec![2; 80].into() };
    let forged = FlightDescriptor::new_cmd(command.as_any().encode_to_vec());
    let error = poll(&mut client, forged).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn polling_for_a_change_changes_nothing() {
    let cluster = Cluster::start(1).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    let mut client = flight_sql(&cluster, 0).await;
    let told = poll(&mut client, asking("INSERT INTO t VALUES (1)")).await.unwrap();
    assert!(told.flight_descriptor.is_none());
    assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
    assert_eq!(rows_of(&redeem(&mut client, ticket(&told.info.unwrap())).await.unwrap()), [["1"]]);
    assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 1);
    // A query of a transaction runs as its rows are taken.
    let transaction_id = Some(client.begin_transaction().await.unwrap());
    let command = CommandStatementQuery { query: MONTHS.to_owned(), transaction_id };
    let told = poll(&mut client, FlightDescriptor::new_cmd(command.as_any().encode_to_vec())).await.unwrap();
    assert!(told.flight_descriptor.is_none());
    until("nothing to run", async || cluster.nodes[0].engine().running() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_waits_for_no_polled_query() {
    let mut cluster = Cluster::start(1).await;
    let mut client = flight_sql(&cluster, 0).await;
    let told = poll(&mut client, asking(MONTHS)).await.unwrap();
    assert!(told.flight_descriptor.is_some());
    let engine = cluster.nodes[0].engine().clone();
    until("it to run", async || engine.running() == 1).await;
    drop(client);
    in_time("the node to stop", cluster.nodes.remove(0).shutdown()).await;
    until("the query to end", async || engine.running() == 0).await;
}
