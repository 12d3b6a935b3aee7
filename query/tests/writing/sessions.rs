//! Sessions: operation ids and transactions, from two nodes and over Flight SQL's own calls.

use std::sync::Arc;

use arrow_flight::sql::EndTransaction;
use arrow_flight::sql::client::FlightSqlServiceClient;
use futures::future::join_all;
use lake_client::memory::MemoryStore;
use lake_query::client::SqlClient;
use lake_query::sql::transactions::{MAX_OPEN, MAX_STATEMENTS, Transactions};
use lake_query::table::conflict::Isolation;
use lake_query::{Kind, Options};

use crate::common::*;
use crate::table::{entries, metadata, summary};

/// A table of numbers.
async fn make(client: &SqlClient, table: &str, values: &str) {
    run(client, &format!("CREATE TABLE {table} AS SELECT CAST(x AS BIGINT) AS x FROM (VALUES {values}) AS v(x)")).await;
}

async fn all(client: &SqlClient, table: &str) -> Vec<i64> {
    numbers(client, &format!("SELECT x FROM {table} ORDER BY x")).await
}

/// Another node's pointer is believed for a moment.
async fn until_seen(client: &SqlClient, sql: &str, expected: &[i64]) {
    until(&format!("{sql} to be {expected:?}"), async || numbers(client, sql).await == expected).await;
}

async fn conflict(client: &SqlClient, sql: &str) -> String {
    let error = refused(client, sql).await;
    assert_eq!(error.kind, Kind::Conflict, "{error}");
    assert!(error.message.contains("nothing was committed"), "{error}");
    error.message
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_is_seen_by_itself_alone_and_then_by_all_at_once() {
    let cluster = Cluster::start(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    make(&a, "t", "(1), (2), (3)").await;
    make(&a, "u", "(10)").await;
    run(&a, "BEGIN").await;
    assert_eq!(number(&a, "INSERT INTO t SELECT x + 100 FROM u").await, 1);
    assert_eq!(number(&a, "UPDATE t SET x = 4 WHERE x >= 3 AND x < 100").await, 1);
    assert_eq!(number(&a, "DELETE FROM t WHERE x = 1").await, 1);
    assert_eq!(all(&a, "t").await, [2, 4, 110]);
    let merge =
        "MERGE INTO u USING t ON u.x = t.x WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT (x) VALUES (t.x)";
    assert_eq!(number(&a, merge).await, 3);
    assert_eq!(all(&a, "u").await, [2, 4, 10, 110]);
    assert_eq!((all(&b, "t").await, all(&b, "u").await), (vec![1, 2, 3], vec![10]), "nobody else sees it");
    let before = metadata(&cluster, "t").await;
    run(&a, "COMMIT").await;
    assert_eq!(all(&a, "t").await, [2, 4, 110]);
    let both = "SELECT t.x FROM t JOIN u ON t.x = u.x ORDER BY t.x";
    until_seen(&b, both, &[2, 4, 110]).await;
    let after = metadata(&cluster, "t").await;
    assert_eq!(after.snapshots().count(), before.snapshots().count() + 3, "a snapshot for each change");
    assert_eq!(after.metadata_log().len(), before.metadata_log().len() + 1, "one version");
    let noted = summary(&after, "lake.transaction-id");
    assert!(noted.is_some() && noted == summary(&metadata(&cluster, "u").await, "lake.transaction-id"));
    assert!(refused(&a, "COMMIT").await.message.contains("no transaction"));

    // What is taken back leaves nothing.
    let files = cluster.files("");
    run(&a, "BEGIN").await;
    run(&a, "INSERT OVERWRITE t VALUES (7)").await;
    run(&a, "TRUNCATE TABLE u").await;
    run(&a, "INSERT INTO u VALUES (8)").await;
    assert_eq!((all(&a, "t").await, all(&a, "u").await), (vec![7], vec![8]));
    run(&a, "ROLLBACK").await;
    assert_eq!((all(&a, "t").await, all(&a, "u").await), (vec![2, 4, 110], vec![2, 4, 10, 110]));
    assert_eq!(cluster.files(""), files);
    // And the same, committed.
    run(&a, "START TRANSACTION").await;
    run(&a, "INSERT OVERWRITE t VALUES (7)").await;
    run(&a, "TRUNCATE TABLE u").await;
    run(&a, "INSERT INTO u VALUES (8)").await;
    run(&a, "COMMIT").await;
    assert_eq!((all(&a, "t").await, all(&a, "u").await), (vec![7], vec![8]));
}

#[tokio::test(flavor = "multi_thread")]
async fn files_have_the_sequence_number_of_the_commit_and_not_the_one_that_was_staged() {
    let cluster = Cluster::start(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    run(&a, "CREATE TABLE t (x BIGINT) PARTITIONED BY (x)").await;
    run(&a, "BEGIN").await;
    run(&a, "INSERT INTO t VALUES (1), (2)").await;
    assert_eq!(all(&a, "t").await, [1, 2], "the node has read the manifest as it was staged");
    for x in 3..6 {
        run(&b, &format!("INSERT INTO t VALUES ({x})")).await;
    }
    run(&a, "COMMIT").await;
    let said = "SELECT sequence_number FROM default.\"t$entries\" ORDER BY 1";
    let expected = [1, 2, 3, 4, 4];
    assert_eq!(numbers(&a, said).await, expected);
    until_seen(&b, said, &expected).await;
    // Nor is the other one written down where the manifest is written anew.
    assert_eq!(number(&a, "DELETE FROM t WHERE x = 1").await, 1);
    let entries = entries(&metadata(&cluster, "t").await).await;
    let mut numbers: Vec<[i64; 2]> = entries.iter().map(|entry| [entry.sequence, entry.file_sequence]).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, expected.map(|number| [number; 2]));
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_conflict_where_they_meet_and_nowhere_else() {
    let cluster = Cluster::start(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    make(&a, "t", "(1), (2)").await;
    make(&a, "u", "(10)").await;
    // Appends of others are none of its business, and it sees none of them.
    run(&a, "BEGIN").await;
    run(&a, "INSERT INTO t VALUES (3)").await;
    run(&a, "DELETE FROM u WHERE x = 10").await;
    run(&b, "INSERT INTO t VALUES (4)").await;
    run(&b, "INSERT INTO u VALUES (11)").await;
    assert_eq!(all(&a, "t").await, [1, 2, 3]);
    run(&a, "COMMIT").await;
    assert_eq!((all(&a, "t").await, all(&a, "u").await), (vec![1, 2, 3, 4], vec![11]));

    // TRUNCATE removes the rows that the transaction sees, and not those that come since.
    make(&a, "w", "(1), (2)").await;
    run(&a, "BEGIN").await;
    run(&a, "INSERT INTO w VALUES (3)").await;
    assert_eq!(number(&a, "INSERT INTO u SELECT x + 100 FROM w").await, 3);
    run(&a, "TRUNCATE TABLE w").await;
    assert_eq!(all(&a, "w").await, [0_i64; 0]);
    run(&b, "INSERT INTO w VALUES (4)").await;
    run(&a, "COMMIT").await;
    assert_eq!((all(&a, "w").await, all(&a, "u").await), (vec![4], vec![11, 101, 102, 103]));
    run(&a, "DELETE FROM u WHERE x > 100").await;

    // What both change, one of them does.
    run(&a, "BEGIN").await;
    run(&a, "INSERT INTO u VALUES (12)").await;
    run(&a, "UPDATE t SET x = 20 WHERE x = 2").await;
    run(&b, "DELETE FROM t WHERE x = 2").await;
    conflict(&a, "COMMIT").await;
    let error = refused(&a, "SELECT 1").await;
    assert!(error.message.contains("only ROLLBACK ends it"), "{error}");
    let files = cluster.files(".parquet").len();
    run(&a, "ROLLBACK").await;
    assert_eq!(cluster.files(".parquet").len(), files - 2, "the new rows of both tables are gone");
    assert_eq!((all(&a, "t").await, all(&a, "u").await), (vec![1, 3, 4], vec![11]));

    // Serialisable: what was only read counts as well.
    for (isolation, commits) in [("SNAPSHOT", true), ("SERIALIZABLE", false)] {
        run(&a, &format!("BEGIN TRANSACTION ISOLATION LEVEL {isolation}")).await;
        run(&a, "INSERT INTO u SELECT sum(x) FROM t").await;
        run(&b, "INSERT INTO t VALUES (5)").await;
        match commits {
            true => drop(run(&a, "COMMIT").await),
            false => {
                conflict(&a, "COMMIT").await;
                run(&a, "ROLLBACK").await;
            }
        }
    }
    assert_eq!(all(&a, "u").await, [8, 11]);
    run(&a, "SET lake.isolation = 'serializable'").await;
    run(&a, "BEGIN").await;
    run(&a, "INSERT INTO u SELECT count(*) FROM t").await;
    run(&b, "INSERT INTO u VALUES (13)").await;
    conflict(&a, "COMMIT").await;
    run(&a, "ROLLBACK").await;
    // INSERT alone is then a transaction, too.
    assert_eq!(number(&a, "INSERT INTO u SELECT max(x) FROM t").await, 1);
    assert_eq!(all(&a, "u").await, [5, 8, 11, 13]);

    // Everything is of one moment, that of the first statement.
    run(&a, "BEGIN").await;
    assert_eq!(all(&a, "t").await, [1, 3, 4, 5, 5]);
    run(&b, "INSERT INTO t VALUES (6)").await;
    run(&b, "INSERT INTO u VALUES (15)").await;
    assert_eq!(all(&a, "u").await, [5, 8, 11, 13]);
    run(&a, "ROLLBACK").await;

    // Many at once, from both nodes: each is made whole, or not at all.
    make(&a, "one", "(0)").await;
    make(&a, "two", "(0)").await;
    let clients = join_all((0..4).map(|i| cluster.client(i % 2))).await;
    let writers = clients.iter().enumerate().map(|(i, client)| async move {
        for n in 0..3 {
            let value = i * 10 + n + 1;
            run(client, "BEGIN").await;
            run(client, &format!("INSERT INTO one VALUES ({value})")).await;
            run(client, &format!("INSERT INTO two VALUES ({value})")).await;
            run(client, "COMMIT").await;
        }
    });
    join_all(writers).await;
    until_seen(&a, "SELECT count(*) FROM one", &[13]).await;
    let missing = "SELECT count(*) FROM one FULL JOIN two ON one.x = two.x WHERE one.x IS NULL OR two.x IS NULL";
    assert_eq!(number(&a, missing).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_inside_of_a_transaction_ends_it() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    make(&client, "t", "(1)").await;
    for (sql, kind) in [
        ("SELECT * FROM nope", Kind::NotFound),
        ("SELECT 1 FORM t", Kind::Invalid),
        ("SELECT 1 / (x - 1) FROM t", Kind::Invalid),
        ("CREATE TABLE v (x INT)", Kind::NotSupported),
        ("CALL system.rewrite_manifests('t')", Kind::NotSupported),
        ("BEGIN", Kind::Invalid),
        ("SET lake.operation_id = 'a'", Kind::Invalid),
    ] {
        run(&client, "BEGIN").await;
        run(&client, "INSERT INTO t VALUES (2)").await;
        assert_eq!(refused(&client, sql).await.kind, kind, "{sql}");
        for sql in ["SELECT 1", "INSERT INTO t VALUES (3)", "COMMIT"] {
            let error = refused(&client, sql).await;
            assert!(error.kind == Kind::Invalid && error.message.contains("only ROLLBACK ends it"), "{sql}: {error}");
        }
        run(&client, "ROLLBACK").await;
    }
    assert_eq!(all(&client, "t").await, [1]);
    assert!(refused(&client, "ROLLBACK").await.message.contains("no transaction"));
    // Bounds.
    let few = Transactions::new(cluster.nodes[0].engine().tables().clone(), "here".to_owned());
    let handle = few.begin(Isolation::Snapshot, None).unwrap();
    for _ in 0..MAX_STATEMENTS {
        few.statement(&handle, 1, |_| async { Ok(()) }).await.unwrap();
    }
    let error = few.statement(&handle, 1, |_| async { Ok(()) }).await.unwrap_err();
    assert!(error.kind == Kind::Exhausted, "{error}");
    let clients = join_all((0..MAX_OPEN).map(|_| cluster.client(0))).await;
    for client in &clients {
        run(client, "BEGIN").await;
    }
    let error = refused(&client, "BEGIN").await;
    assert!(error.kind == Kind::Exhausted && error.message.contains("transactions are open"), "{error}");
    run(&clients[0], "COMMIT").await;
    run(&client, "BEGIN").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_belongs_to_its_node_and_is_settled_without_it() {
    let mut cluster = Cluster::start(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    make(&a, "t", "(1)").await;
    // Another node sends on what concerns it.
    run(&a, "BEGIN").await;
    run(&a, "INSERT INTO t VALUES (2)").await;
    b.resume(a.settings());
    assert_eq!(number(&b, "INSERT INTO t VALUES (3)").await, 1);
    assert_eq!(all(&b, "t").await, [1, 2, 3]);
    assert_eq!(all(&cluster.client(1).await, "t").await, [1]);
    let open = b.settings();
    run(&b, "COMMIT").await;
    assert_eq!((b.settings().transaction, all(&cluster.client(0).await, "t").await), (None, vec![1, 2, 3]));
    // COMMIT again, as after a lost answer, on either node.
    for client in [&a, &b] {
        client.resume(open.clone());
        run(client, "COMMIT").await;
        client.resume(open.clone());
        let error = refused(client, "ROLLBACK").await;
        assert!(error.message.contains("was committed"), "{error}");
        client.resume(Default::default());
    }
    until_seen(&cluster.client(1).await, "SELECT x FROM t ORDER BY x", &[1, 2, 3]).await;

    // Without the node the transaction is lost, and whoever asks is told the same.
    let a = cluster.client(0).await;
    run(&a, "BEGIN").await;
    run(&a, "INSERT INTO t VALUES (4)").await;
    cluster.nodes.remove(0).shutdown().await;
    let c = cluster.client(0).await;
    c.resume(a.settings());
    let error = refused(&c, "INSERT INTO t VALUES (5)").await;
    assert!(error.kind == Kind::Unavailable && error.message.contains("cannot be reached"), "{error}");
    let error = refused(&c, "COMMIT").await;
    assert!(error.kind == Kind::NotFound && error.message.contains("nothing of it was committed"), "{error}");
    run(&c, "ROLLBACK").await;
    assert_eq!(all(&c, "t").await, [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_is_made_once_on_whichever_node() {
    // Each node sees at once what the other has done.
    let change = |options| Options { pointer_ttl_ms: Some(0), ..options };
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 2, change).await;
    let clients = [cluster.client(0).await, cluster.client(1).await];
    let [a, b] = &clients;
    make(a, "t", "(1)").await;
    let again = async |client: &SqlClient, id: &str, sql: &str| {
        run(client, &format!("SET lake.operation_id = '{id}'")).await;
        let count = number(client, sql).await;
        assert_eq!(client.settings().operation, None, "it is for one change");
        count
    };
    for client in [a, b, a] {
        assert_eq!(again(client, "one", "INSERT INTO t VALUES (2), (3)").await, 2);
        assert_eq!(again(client, "none", "DELETE FROM t WHERE x = 77").await, 0);
        assert_eq!(again(client, "made", "CREATE TABLE u AS SELECT 1 AS x UNION ALL SELECT 2").await, 2);
        assert_eq!(again(client, "schema", "CREATE SCHEMA s").await, 0);
        assert_eq!(again(client, "gone", "UPDATE t SET x = x + 10 WHERE x = 3").await, 1);
    }
    assert_eq!(all(a, "t").await, [1, 2, 13]);
    assert_eq!(summary(&metadata(&cluster, "t").await, "lake.operation-id").as_deref(), Some("gone"));
    // A row that came since does not change what was done.
    run(a, "INSERT INTO t VALUES (77)").await;
    assert_eq!(again(b, "none", "DELETE FROM t WHERE x = 77").await, 0);
    // Refusals are outcomes as well.
    run(a, "SET lake.operation_id = 'refused'").await;
    assert_eq!(refused(a, "CREATE TABLE u (x INT)").await.kind, Kind::AlreadyExists);
    run(a, "SET lake.operation_id = DEFAULT").await;
    run(a, "DROP TABLE u").await;
    run(b, "SET lake.operation_id = 'refused'").await;
    assert_eq!(refused(b, "CREATE TABLE u (x INT)").await.kind, Kind::AlreadyExists);
    // Another statement is refused, and so is an id that is none.
    run(b, "SET lake.operation_id = 'one'").await;
    let error = refused(b, "INSERT INTO t VALUES (9)").await;
    assert!(error.message.contains("another statement"), "{error}");
    assert_eq!(refused(b, "SET lake.operation_id = 'a/b'").await.kind, Kind::Invalid);
    run(b, "SET lake.operation_id = DEFAULT").await;

    // All at once, from both nodes.
    let many = join_all((0..6).map(|i| cluster.client(i % 2))).await;
    for round in 0..3 {
        let sql = format!("INSERT INTO t VALUES ({})", 1000 + round);
        let counts = join_all(many.iter().map(|client| again(client, &sql, &sql))).await;
        assert_eq!(counts, [1; 6]);
    }
    assert_eq!(number(a, "SELECT count(*) FROM t WHERE x >= 1000").await, 3);

    // A whole transaction is one, too: the second time it changes nothing.
    for client in [a, b] {
        run(client, "SET lake.operation_id = 'all of it'").await;
        run(client, "BEGIN").await;
        run(client, "INSERT INTO t VALUES (2000)").await;
        run(client, "DELETE FROM t WHERE x < 10").await;
        run(client, "COMMIT").await;
    }
    assert_eq!(number(a, "SELECT count(*) FROM t WHERE x = 2000 OR x < 10").await, 1);
    run(b, "SET lake.operation_id = 'all of it'").await;
    run(b, "BEGIN").await;
    run(b, "INSERT INTO t VALUES (2001)").await;
    let error = refused(b, "COMMIT").await;
    assert!(error.message.contains("another statement"), "{error}");
    run(b, "ROLLBACK").await;
    run(b, "SET lake.isolation = serializable").await;
    for _ in 0..2 {
        assert_eq!(again(b, "serial", "INSERT INTO t SELECT count(*) + 5000 FROM t").await, 1);
    }
    assert_eq!(number(a, "SELECT count(*) FROM t WHERE x > 5000").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn drivers_use_their_own_calls() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    make(&client, "t", "(1)").await;
    let endpoint = format!("http://{}", cluster.nodes[0].flight_address());
    let channel = tonic::transport::Endpoint::from_shared(endpoint).unwrap().connect().await.unwrap();
    let mut driver = FlightSqlServiceClient::new(channel);
    for (end, rows) in [(EndTransaction::Rollback, 1), (EndTransaction::Commit, 2)] {
        let transaction = driver.begin_transaction().await.unwrap();
        let insert = "INSERT INTO t VALUES (2)".to_owned();
        assert_eq!(driver.execute_update(insert, Some(transaction.clone())).await.unwrap(), 1);
        let info = driver.execute("SELECT x FROM t".to_owned(), Some(transaction.clone())).await.unwrap();
        let ticket = info.endpoint[0].ticket.clone().unwrap();
        let found: Vec<_> = futures::TryStreamExt::try_collect(driver.do_get(ticket).await.unwrap()).await.unwrap();
        assert_eq!(rows_of(&found).len(), 2);
        driver.end_transaction(transaction, end).await.unwrap();
        assert_eq!(all(&client, "t").await.len(), rows);
    }
    let error = driver.execute_update("BEGIN".to_owned(), None).await.unwrap_err().to_string();
    assert!(error.contains("calls of their driver"), "{error}");
    driver.set_header("lake-operation-id", "from a driver");
    for _ in 0..2 {
        assert_eq!(driver.execute_update("INSERT INTO t VALUES (3)".to_owned(), None).await.unwrap(), 1);
    }
    assert_eq!(all(&client, "t").await, [1, 2, 3]);
}
