//! Tickets: what they hold, where and how long they are good, and that nobody else makes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow_flight::sql::client::FlightSqlServiceClient;
use arrow_flight::sql::{Any, Command, CommandStatementQuery, EndTransaction, ProstMessageExt, TicketStatementQuery};
use arrow_flight::{
    Action, CancelFlightInfoRequest, CancelFlightInfoResult, CancelStatus, FlightDescriptor, FlightEndpoint,
    FlightInfo, Ticket,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use lake_client::memory::MemoryStore;
use lake_client::store::{Applied, Error};
use lake_query::flight::keys::TicketKeys;
use lake_query::flight::ticket::{Plan, StatementTicket};
use lake_query::sql::bound::Bound;
use lake_query::sql::session::{Sessions, Settings};
use lake_query::sql::transactions::Transactions;
use lake_query::{Kind, progress};
use prost::Message;
use tonic::transport::Channel;
use uuid::Uuid;

use crate::common::store::{Through, Way, unavailable};
use crate::common::{Cluster, TIMEOUT, number, numbers, rows_of, run};
use crate::support::eventually;
use crate::{flight_sql, redeem, ticket};

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_reads_what_was_there_on_any_node() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t AS SELECT 1 AS x").await;
    run(&sql, "CREATE VIEW v AS SELECT x FROM t").await;
    let mut clients = [flight_sql(&cluster, 0).await, flight_sql(&cluster, 1).await];
    let query = "SELECT count(*) FROM t JOIN v ON true".to_owned();
    let info = clients[0].execute(query, None).await.unwrap();
    assert!(info.endpoint[0].expiration_time.is_some());
    run(&sql, "INSERT INTO t VALUES (2), (3)").await;
    run(&sql, "CREATE OR REPLACE VIEW v AS SELECT x FROM t WHERE false").await;
    for client in &mut clients {
        let rows = redeem(client, ticket(&info)).await.unwrap();
        assert_eq!(rows_of(&rows), [["1"]], "the table and the view as they were");
    }
    assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 3);
    run(&sql, "DROP VIEW v").await;
    run(&sql, "DROP TABLE t").await;
    let rows = redeem(&mut clients[1], ticket(&info)).await.unwrap();
    assert_eq!(rows_of(&rows), [["1"]], "its files are there");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_whose_metadata_is_gone_is_found_in_what_came_after() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT) WITH ('write.metadata.previous-versions-max' = '1')").await;
    run(&sql, "INSERT INTO t VALUES (1)").await;
    let (mut here, mut there) = (flight_sql(&cluster, 0).await, flight_sql(&cluster, 1).await);
    let info = here.execute("SELECT * FROM t".to_owned(), None).await.unwrap();
    let before = cluster.files(".metadata.json");
    run(&sql, "ALTER TABLE t ADD COLUMN y BIGINT").await;
    for _ in 0..3 {
        run(&sql, "INSERT INTO t VALUES (2, 3)").await;
    }
    eventually("the version's metadata to be gone", async || {
        let stays = cluster.files(".metadata.json").iter().any(|file| before.contains(file));
        (!stays).then_some(())
    })
    .await;
    // The other node has it in no cache.
    let rows = redeem(&mut there, ticket(&info)).await.unwrap();
    assert_eq!(rows_of(&rows), [["1"]]);
    run(&sql, "DROP TABLE t").await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    let error = redeem(&mut flight_sql(&cluster, 1).await, ticket(&info)).await.unwrap_err();
    assert!(error.contains("is gone") && error.contains("run the query again"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_has_expired_since_is_said_to_be_gone() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    run(&sql, "INSERT INTO t VALUES (1)").await;
    let info = flight_sql(&cluster, 0).await.execute("SELECT * FROM t".to_owned(), None).await.unwrap();
    run(&sql, "INSERT INTO t VALUES (2)").await;
    // Whoever has a ticket may read it for a while, unless the table says otherwise.
    assert_eq!(number(&sql, "CALL system.expire_snapshots('t', older_than => now())").await, 0);
    let rows = redeem(&mut flight_sql(&cluster, 0).await, ticket(&info)).await.unwrap();
    assert_eq!(rows_of(&rows), [["1"]]);
    run(&sql, "ALTER TABLE t SET TBLPROPERTIES ('lake.expire-snapshots.held-ms' = '0')").await;
    assert_eq!(number(&sql, "CALL system.expire_snapshots('t', older_than => now())").await, 1);
    // Its metadata is there, and what is found by it is not.
    let error = redeem(&mut flight_sql(&cluster, 1).await, ticket(&info)).await.unwrap_err();
    assert!(error.contains("is gone") && error.contains("run the query again"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_that_was_tampered_with_is_refused() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t AS SELECT 1 AS x").await;
    let mut client = flight_sql(&cluster, 0).await;
    let info = client.execute("SELECT x FROM t".to_owned(), None).await.unwrap();
    let handle = match Command::try_from(Any::decode(&*ticket(&info).ticket).unwrap()).unwrap() {
        Command::TicketStatementQuery(ticket) => ticket.statement_handle,
        other => panic!("{other:?}"),
    };
    let with = |handle: Vec<u8>| Ticket {
        ticket: TicketStatementQuery { statement_handle: handle.into() }.as_any().encode_to_vec().into(),
    };
    let place = handle.windows(9).position(|bytes| bytes == b".metadata").unwrap();
    let mut forged = handle.to_vec();
    forged[place] = b'/';
    for wrong in [forged, handle[..40].to_vec(), vec![1], b"{}".to_vec()] {
        let error = redeem(&mut client, with(wrong)).await.unwrap_err();
        assert!(error.contains("not made by"), "{error}");
    }
    assert_eq!(rows_of(&redeem(&mut client, with(handle.to_vec())).await.unwrap()), [["1"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn asking_changes_nothing_and_a_change_is_made_once_whichever_nodes_are_asked() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    let (mut one, mut other) = (flight_sql(&cluster, 0).await, flight_sql(&cluster, 1).await);
    let mut infos = Vec::new();
    for insert in
        ["INSERT INTO t VALUES (1)", "INSERT INTO t SELECT count(*) FROM t", "CREATE TABLE u AS SELECT 5 AS x"]
    {
        infos.push(one.execute(insert.to_owned(), None).await.unwrap());
    }
    assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
    for info in &infos {
        let counts = [
            redeem(&mut one, ticket(info)).await.unwrap(),
            redeem(&mut other, ticket(info)).await.unwrap(),
            redeem(&mut one, ticket(info)).await.unwrap(),
        ];
        assert!(counts.iter().all(|count| rows_of(count) == [["1"]]), "{counts:?}");
    }
    assert_eq!(numbers(&sql, "SELECT x FROM t").await, [1, 1]);
    assert_eq!(numbers(&sql, "SELECT x FROM u").await, [5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_is_cancelled_by_its_flight_info() {
    let cluster = Cluster::start(1).await;
    let mut client = flight_sql(&cluster, 0).await;
    let endless = "SELECT value FROM generate_series(1, 1000000000000)".to_owned();
    let info = client.execute(endless, None).await.unwrap();
    let mut rows = client.do_get(ticket(&info)).await.unwrap();
    rows.next().await.unwrap().unwrap();
    assert_eq!(cancel(&cluster, &info).await, CancelStatus::Cancelled);
    let error = rows.try_for_each(|_| std::future::ready(Ok(()))).await.unwrap_err();
    assert!(error.to_string().contains("cancelled"), "{error}");
    // Its slot is given back, and there is nothing left to be cancelled.
    eventually("the query to be let go of", async || {
        let running = cluster.nodes[0].engine().running();
        (running == 0 && cancel(&cluster, &info).await == CancelStatus::NotCancellable).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_ticket_has_begun_is_cancelled_after_that_has_expired() {
    let cluster = Cluster::start(1).await;
    let mut client = flight_sql(&cluster, 0).await;
    let endless = StatementTicket::new("SELECT value FROM generate_series(1, 1000000000000)");
    let mut rows = client.do_get(endless.encode().unwrap()).await.unwrap();
    rows.next().await.unwrap().unwrap();
    let long_ago = serde_json::json!({"statement": endless, "expires_ms": 1});
    let plan: Plan = serde_json::from_value(long_ago).unwrap();
    let keys = TicketKeys::new(cluster.store.clone());
    let expired = plan.encode(&keys, Instant::now() + Duration::from_secs(60)).await.unwrap();
    let error = redeem(&mut client, expired.clone()).await.unwrap_err();
    assert!(error.contains("has expired"), "{error}");
    let info = FlightInfo::new().with_endpoint(FlightEndpoint::new().with_ticket(expired));
    assert_eq!(cancel(&cluster, &info).await, CancelStatus::Cancelled);
    let error = rows.try_for_each(|_| std::future::ready(Ok(()))).await.unwrap_err();
    assert!(error.to_string().contains("cancelled"), "{error}");
}

/// A cluster that answers nothing while this is held.
#[derive(Debug, Default)]
struct Held(tokio::sync::RwLock<()>);

#[async_trait]
impl Way for Held {
    async fn call(&self, _about: &str, by: Instant) -> Result<(), Error> {
        let answers = tokio::time::timeout_at(by.into(), self.0.read()).await;
        answers.map(drop).map_err(|_| unavailable(Applied::No))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_waits_for_the_metadata_says_so() {
    let store = Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Held::default() });
    let cluster = Cluster::over(store.clone(), 1, |options| options).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    let held = store.0.write().await;
    let (id, other) = (Uuid::new_v4(), cluster.client(0).await);
    let inserting = tokio::spawn(async move {
        let rows = other.execute_as(id, "INSERT INTO t VALUES (1)", TIMEOUT).await?;
        rows.try_collect::<Vec<_>>().await
    });
    let told = eventually("it to be told", async || sql.so_far(id).await.filter(|told| told.waits.is_some())).await;
    // It waits before its row is written or after, as what it needs first is cached or not.
    assert!(told.rows <= 1, "{}", told.rows);
    let waits = told.waits.unwrap();
    assert!(waits.starts_with("the metadata cluster has not answered a request for "), "{waits}");
    drop(held);
    inserting.await.unwrap().unwrap();
    assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_is_cancelled_leaves_nothing_and_aborts_its_transaction() {
    let cluster = Cluster::start(1).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    let mut client = flight_sql(&cluster, 0).await;
    let endless = "INSERT INTO t SELECT value FROM generate_series(1, 1000000000000)".to_owned();
    let cancelled = async |info: FlightInfo, id: Option<Uuid>| {
        let mut other = flight_sql(&cluster, 0).await;
        let insert = ticket(&info);
        let inserting = tokio::spawn(async move { redeem(&mut other, insert).await });
        if let Some(id) = id {
            eventually("its rows to be told", async || sql.so_far(id).await.filter(|told| told.rows > 0)).await;
        }
        let runs = async || (cancel(&cluster, &info).await == CancelStatus::Cancelled).then_some(());
        eventually("the change to run", runs).await;
        let error = inserting.await.unwrap().unwrap_err();
        assert!(error.contains("cancelled"), "{error}");
    };
    // By itself it leaves nothing. Meanwhile it tells how far it has come.
    let insert = StatementTicket::new(endless.clone());
    let info = FlightInfo::new().with_endpoint(FlightEndpoint::new().with_ticket(insert.encode().unwrap()));
    cancelled(info, Some(insert.id)).await;
    assert_eq!(sql.so_far(insert.id).await, None);
    assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
    eventually("its files to be gone", async || cluster.files(".parquet").is_empty().then_some(())).await;

    let transaction = client.begin_transaction().await.unwrap();
    client.execute_update("INSERT INTO t VALUES (1)".to_owned(), Some(transaction.clone())).await.unwrap();
    cancelled(client.execute(endless, Some(transaction.clone())).await.unwrap(), None).await;
    let ended = client.end_transaction(transaction, EndTransaction::Commit).await;
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("aborted") && error.contains("cancelled"), "{error}");
    assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
}

/// What COMMIT of a transaction is refused with, after which ROLLBACK ends it.
async fn refused_commit(client: &mut FlightSqlServiceClient<Channel>, transaction: Bytes) -> String {
    let error = client.end_transaction(transaction.clone(), EndTransaction::Commit).await.unwrap_err().to_string();
    let again = client.end_transaction(transaction.clone(), EndTransaction::Commit).await.unwrap_err().to_string();
    assert!(again.contains("aborted"), "{again}");
    client.end_transaction(transaction, EndTransaction::Rollback).await.unwrap();
    error
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_was_asked_for_and_never_fetched_keeps_commit_away() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    // By the node that holds the transaction, and by another.
    for node in 0..2 {
        let mut holder = flight_sql(&cluster, 0).await;
        let transaction = holder.begin_transaction().await.unwrap();
        let mut client = flight_sql(&cluster, node).await;
        let lost = "INSERT INTO t SELECT 1".to_owned();
        client.execute(lost.clone(), Some(transaction.clone())).await.unwrap();
        // The same once more is another change.
        let info = client.execute(lost, Some(transaction.clone())).await.unwrap();
        redeem(&mut client, ticket(&info)).await.unwrap();
        let error = refused_commit(&mut client, transaction).await;
        let told = ["never fetched: INSERT INTO t SELECT 1", "nothing was committed", "ROLLBACK"];
        assert!(told.iter().all(|told| error.contains(told)), "{error}");
        assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
    }
    // The same of prepared ones.
    let mut client = flight_sql(&cluster, 0).await;
    let transaction = client.begin_transaction().await.unwrap();
    let mut insert = client.prepare("INSERT INTO t SELECT 2".to_owned(), Some(transaction.clone())).await.unwrap();
    insert.execute().await.unwrap();
    let error = refused_commit(&mut client, transaction).await;
    assert!(error.contains("never fetched: INSERT INTO t SELECT 2"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_whose_changes_were_fetched_is_committed() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    let (mut client, mut other) = (flight_sql(&cluster, 0).await, flight_sql(&cluster, 1).await);
    let transaction = client.begin_transaction().await.unwrap();
    for (x, client) in [(1, &mut client), (2, &mut other)] {
        let info = client.execute(format!("INSERT INTO t VALUES ({x})"), Some(transaction.clone())).await.unwrap();
        for _ in 0..2 {
            assert_eq!(rows_of(&redeem(client, ticket(&info)).await.unwrap()), [["1"]]);
        }
        // What changes nothing may be left, and so may the rows of a change whose schema alone was asked for.
        client.execute("SELECT x FROM t".to_owned(), Some(transaction.clone())).await.unwrap();
        let query = "INSERT INTO t VALUES (9)".to_owned();
        let asked = CommandStatementQuery { query, transaction_id: Some(transaction.clone()) };
        let descriptor = FlightDescriptor::new_cmd(asked.as_any().encode_to_vec());
        client.inner_mut().get_schema(descriptor).await.unwrap();
    }
    client.end_transaction(transaction, EndTransaction::Commit).await.unwrap();
    assert_eq!(numbers(&sql, "SELECT x FROM t ORDER BY x").await, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_whose_answer_is_given_up_aborts_its_transaction() {
    let cluster = Cluster::start(2).await;
    let sql = cluster.client(0).await;
    run(&sql, "CREATE TABLE t (x BIGINT)").await;
    for node in 0..2 {
        let mut client = flight_sql(&cluster, 0).await;
        let transaction = client.begin_transaction().await.unwrap();
        client.execute_update("INSERT INTO t VALUES (1)".to_owned(), Some(transaction.clone())).await.unwrap();
        let endless = "INSERT INTO t SELECT value FROM generate_series(1, 1000000000000)".to_owned();
        let info = client.execute(endless, Some(transaction.clone())).await.unwrap();
        let mut giving_up = flight_sql(&cluster, node).await;
        let insert = ticket(&info);
        let inserting = tokio::spawn(async move { redeem(&mut giving_up, insert).await });
        eventually("the change to run", async || (cluster.nodes[0].engine().running() > 0).then_some(())).await;
        inserting.abort();
        eventually("the transaction to be aborted", async || {
            let asked = client.clone().execute("SELECT 1".to_owned(), Some(transaction.clone())).await;
            asked.is_err_and(|error| error.to_string().contains("gave up a change")).then_some(())
        })
        .await;
        let error = refused_commit(&mut client, transaction).await;
        assert!(error.contains("aborted") && error.contains("handed out: INSERT INTO t SELECT value"), "{error}");
        assert_eq!(number(&sql, "SELECT count(*) FROM t").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_for_many_rows_of_values_has_one_deadline() {
    let cluster = Cluster::start(1).await;
    run(&cluster.client(0).await, "CREATE TABLE t (x BIGINT)").await;
    let engine = cluster.nodes[0].engine().clone();
    let transactions = Transactions::new(engine.tables().clone(), "here".to_owned());
    let sessions = Sessions::new(engine, Arc::new(transactions));
    let column: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    let parameters = Some(RecordBatch::try_from_iter([("x", column)]).unwrap());
    let delete = Bound { parameters, ..Bound::from("DELETE FROM t WHERE x = ?") };
    let error = sessions.change(&delete, &Settings::default(), Some(Duration::ZERO)).await.unwrap_err();
    assert!(error.kind == Kind::Deadline && error.message.contains("0 of 3 rows of values"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_tells_how_many_rows_it_has_made() {
    let cluster = Cluster::start(1).await;
    run(&cluster.client(0).await, "CREATE TABLE t (x BIGINT)").await;
    let engine = cluster.nodes[0].engine().clone();
    let transactions = Transactions::new(engine.tables().clone(), "here".to_owned());
    let sessions = Sessions::new(engine, Arc::new(transactions));
    for (sql, made) in [
        ("INSERT INTO t SELECT value FROM generate_series(1, 10)", 10),
        ("INSERT INTO t SELECT value FROM generate_series(11, 20) ORDER BY value", 10),
        ("UPDATE t SET x = x + 100 WHERE x > 15", 5),
        ("DELETE FROM t WHERE x > 118", 2),
        (
            "MERGE INTO t USING (VALUES (1), (2), (50)) AS s(y) ON t.x = s.y WHEN MATCHED AND s.y = 1 THEN DELETE \
             WHEN NOT MATCHED THEN INSERT (x) VALUES (s.y)",
            2,
        ),
    ] {
        let rows = Arc::new(AtomicU64::new(0));
        let (bound, settings) = (Bound::from(sql), Settings::default());
        let change = progress::told_to(rows.clone(), sessions.change(&bound, &settings, TIMEOUT));
        let count = change.await.unwrap().count;
        assert_eq!((count, rows.load(Ordering::Relaxed)), (made, made), "{sql}");
    }
}

async fn cancel(cluster: &Cluster, info: &FlightInfo) -> CancelStatus {
    let body = CancelFlightInfoRequest::new(info.clone()).encode_to_vec();
    let action = Action::new("CancelFlightInfo", body);
    let mut client = flight_sql(cluster, 0).await;
    let answers: Vec<_> = client.do_action(tonic::Request::new(action)).await.unwrap().try_collect().await.unwrap();
    CancelFlightInfoResult::decode(&*answers[0].body).unwrap().status()
}
