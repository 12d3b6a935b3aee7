//! Statements from end to end: a client, Flight SQL, a node, a warehouse.

mod common;
#[path = "sqllogic/mod.rs"]
mod sqllogic;

use common::*;
use lake_query::Kind;
use lake_query::client::SqlClient;
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_made_filled_read_and_dropped() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    assert_eq!(number(&client, "CREATE SCHEMA shop").await, 0);
    assert_eq!(
        number(
            &client,
            "CREATE TABLE shop.orders (id BIGINT NOT NULL, what VARCHAR, price DECIMAL(10, 2), day DATE, at TIMESTAMP)"
        )
        .await,
        0
    );
    let inserted = "INSERT INTO shop.orders VALUES (1, 'tea', 2.50, DATE '2026-01-02', TIMESTAMP '2026-01-02 03:04:05.678901'), (2, NULL, NULL, NULL, NULL)";
    assert_eq!(number(&client, inserted).await, 2);
    assert_eq!(number(&client, "INSERT INTO shop.orders (price, id) VALUES (1, 3)").await, 1);
    assert_eq!(
        number(&client, "INSERT INTO shop.orders SELECT id + 10, what, price, day, at FROM shop.orders").await,
        3
    );
    assert_eq!(
        text(&client, "SELECT * FROM shop.orders WHERE id < 4 ORDER BY id").await,
        [
            ["1", "tea", "2.50", "2026-01-02", "2026-01-02T03:04:05.678901"],
            ["2", "NULL", "NULL", "NULL", "NULL"],
            ["3", "NULL", "1.00", "NULL", "NULL"],
        ]
    );
    assert_eq!(number(&client, "SELECT count(*) FROM shop.orders").await, 6);
    assert_eq!(number(&client, "SELECT max(id) FROM lake.shop.orders").await, 13);
    assert_eq!(text(&client, "SELECT count(*), sum(price) FROM shop.orders WHERE what = 'tea'").await, [["2", "5.00"]]);

    assert_eq!(number(&client, "CREATE TABLE copied AS SELECT id, what FROM shop.orders WHERE id > 2").await, 4);
    assert_eq!(number(&client, "SELECT count(*) FROM \"default\".copied").await, 4);
    assert_eq!(number(&client, "CREATE TABLE IF NOT EXISTS copied AS SELECT 1 AS x").await, 0);
    let error = refused(&client, "CREATE TABLE copied (x INT)").await;
    assert_eq!(
        (error.kind, error.message.as_str()),
        (Kind::AlreadyExists, "table default.copied exists already; nothing was committed")
    );

    // 28 digits stay 28 digits, and an exponent makes a float.
    let exact = "SELECT 9999999999999999.9999999999 - 0.0000000001, CAST(1e300 > 1e299 AS INT), CAST(1.5E2 AS INT)";
    assert_eq!(text(&client, exact).await, [["9999999999999999.9999999998", "1", "150"]]);

    // What comes out is called as it is written; within a statement names are DataFusion's.
    let written = "SELECT id, COUNT(*), sum(price) + 1, date_trunc('month', day), 1.5E2 AS x, 2e1 FROM shop.orders GROUP BY id, day";
    let names: Vec<String> =
        run(&client, written).await[0].schema().fields().iter().map(|field| field.name().clone()).collect();
    assert_eq!(names, ["id", "COUNT(*)", "sum(price) + 1", "date_trunc('month', day)", "x", "2e1"]);
    assert_eq!(number(&client, "SELECT \"count(*)\" FROM (SELECT COUNT(*) FROM shop.orders)").await, 6);

    assert_eq!(text(&client, "SHOW TABLES").await, [["default", "copied"], ["shop", "orders"]]);
    assert_eq!(text(&client, "SHOW TABLES FROM shop").await, [["shop", "orders"]]);
    assert_eq!(text(&client, "SHOW SCHEMAS").await, [["default"], ["shop"]]);
    assert_eq!(
        text(&client, "DESCRIBE copied").await,
        [["id", "BIGINT", "YES", "NULL"], ["what", "VARCHAR", "YES", "NULL"]]
    );
    // Each function once, also under its other names, and those that are tables.
    let named = |row: &Vec<String>| row[..2].to_vec();
    let shown: Vec<_> = text(&client, "SHOW FUNCTIONS").await.iter().map(named).collect();
    let routines = "SELECT DISTINCT routine_name, function_type FROM information_schema.routines ORDER BY 1, 2";
    assert_eq!(shown, text(&client, routines).await);
    for (name, kind) in [("date_part", "SCALAR"), ("datepart", "SCALAR"), ("tpch", "TABLE"), ("sum", "AGGREGATE")] {
        assert!(shown.contains(&vec![name.to_owned(), kind.to_owned()]), "{name}");
    }
    let columns =
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'orders' ORDER BY ordinal_position";
    assert_eq!(text(&client, columns).await.concat(), ["id", "what", "price", "day", "at"]);

    let error = refused(&client, "DROP SCHEMA shop").await;
    assert!(error.message.contains("not empty"), "{error}");
    run(&client, "DROP TABLE shop.orders").await;
    run(&client, "DROP SCHEMA shop").await;
    run(&client, "DROP TABLE IF EXISTS shop.orders").await;
    assert_eq!(refused(&client, "DROP TABLE shop.orders").await.kind, Kind::NotFound);
    assert_eq!(refused(&client, "SELECT * FROM shop.orders").await.kind, Kind::NotFound);
    assert_eq!(text(&client, "SHOW SCHEMAS").await, [["default"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_created_on_one_node_is_there_on_the_other_at_once() {
    let cluster = Cluster::start(2).await;
    let (a, b) = (cluster.client(0).await, cluster.client(1).await);
    assert_eq!(refused(&b, "SELECT * FROM t").await.kind, Kind::NotFound);
    run(&a, "CREATE TABLE t AS SELECT 1 AS x").await;
    assert_eq!(number(&b, "SELECT count(*) FROM t").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn nested_and_odd_values_come_back() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE odd AS SELECT [1, 2, NULL] AS list, named_struct('a', 1, 'b', 'x') AS st, map {'k': 1} AS pairs, arrow_cast(200, 'UInt8') AS small, arrow_cast('d', 'Dictionary(Int32, Utf8)') AS dict, X'00ff' AS bytes, CAST('NaN' AS DOUBLE) AS nan").await;
    run(&client, "INSERT INTO odd SELECT * FROM odd").await;
    assert_eq!(
        text(&client, "SELECT list, st, pairs, small, dict, bytes, nan FROM odd").await,
        [["[1, 2, NULL]", "{a: 1, b: x}", "{k: 1}", "200", "d", "00ff", "NaN"]; 2]
    );
    assert_eq!(number(&client, "SELECT count(*) FROM odd WHERE st['b'] = 'x' AND list[2] = 2").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn decimals_that_meet_floats_become_floats() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(
        &client,
        "CREATE TABLE f AS SELECT id, CAST(x AS DOUBLE) AS x, CAST(x AS REAL) AS r \
         FROM (VALUES (1, 'NaN'), (2, '1e20'), (3, '0.1'), (4, '2.5')) AS v(id, x)",
    )
    .await;
    // None of NaN and 1e20 is a decimal of the digits that 2.5 would be compared with.
    for (condition, rows) in [
        ("x < 2.5", 1),
        ("2.5 <= x", 3),
        ("x BETWEEN 0.1 AND 2.5", 2),
        ("x IN (0.1, 2.5)", 2),
        ("x = CAST(2.5 AS DECIMAL(10, 2))", 1),
        ("r IN (0.1, 2.5)", 2),
        ("x IS DISTINCT FROM 0.1", 3),
        ("CASE WHEN id > 1 THEN x ELSE 0.5 END > 1e19", 1),
        ("CASE x WHEN 0.1 THEN 1 WHEN 2.5 THEN 1 ELSE 0 END = 1", 2),
        ("coalesce(x, 0.5) > 1e19", 2),
        ("EXISTS (SELECT 1 FROM f AS g WHERE g.id = f.id AND g.x > 2.5)", 2),
        ("0.1 + 0.2 = 0.3", 4),
    ] {
        assert_eq!(number(&client, &format!("SELECT count(*) FROM f WHERE {condition}")).await, rows, "{condition}");
    }
    assert_eq!(number(&client, "UPDATE f SET x = 0.5 WHERE x > 2.5 AND x < 1e300").await, 1);
    assert_eq!(number(&client, "DELETE FROM f WHERE x >= 0.5").await, 3);
    assert_eq!(text(&client, "SELECT id, x FROM f").await, [["3", "0.1"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn nan_is_never_lost_to_bounds() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE f (x DOUBLE, y DOUBLE)").await;
    run(&client, "INSERT INTO f VALUES (5, 5), ('NaN', 5)").await;
    run(&client, "INSERT INTO f VALUES (5, 6)").await;
    assert_eq!(number(&client, "SELECT count(*) FROM f WHERE x = 5").await, 2);
    assert_eq!(number(&client, "SELECT count(*) FROM f WHERE x > 7").await, 1, "NaN is the largest value");
    assert_eq!(text(&client, "SELECT max(x), min(x), max(y) FROM f").await, [["NaN", "5.0", "6.0"]]);
    assert_eq!(number(&client, "SELECT count(*) FROM f WHERE x < 6 LIMIT 5").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_shows_and_does_nothing() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    let plan = pretty(&run(&client, "EXPLAIN INSERT INTO t VALUES (1)").await);
    assert!(plan.contains("AppendSink(table=default.t)"), "{plan}");
    run(&client, "INSERT INTO t VALUES (1)").await;
    let plan = pretty(&run(&client, "EXPLAIN ANALYZE SELECT * FROM t WHERE x > 0").await);
    assert!(plan.contains("DataSourceExec"), "{plan}");
    let error = refused(&client, "EXPLAIN ANALYZE INSERT INTO t VALUES (1)").await;
    assert_eq!(error.kind, Kind::NotSupported, "{error}");
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_say_what_and_where() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (id BIGINT NOT NULL, name VARCHAR)").await;
    for (sql, kind, words, position) in [
        ("SELECT *\nFROM nope.missing", Kind::NotFound, "table nope.missing does not exist", Some((2, 6))),
        ("SELECT 1 FORM t", Kind::Invalid, "syntax error", Some((1, 15))),
        ("SELECT nmae FROM t", Kind::NotFound, "column nmae does not exist; did you mean name?", Some((1, 8))),
        ("SELECT * FROM other.public.t", Kind::NotFound, "catalog other does not exist", Some((1, 15))),
        ("INSERT INTO t VALUES ('abc', 'x')", Kind::Invalid, "abc", None),
        ("INSERT INTO t VALUES (1)", Kind::Invalid, "row 1 of VALUES has 1 values, where 2 are expected", None),
        ("INSERT INTO t (name) VALUES ('x')", Kind::Invalid, "column id is NOT NULL", None),
        ("INSERT INTO nope VALUES (1)", Kind::NotFound, "table nope does not exist", Some((1, 13))),
        ("CREATE TABLE nowhere.t (x INT)", Kind::NotFound, "CREATE SCHEMA nowhere", None),
        ("CREATE TABLE u (x INTERVAL)", Kind::Invalid, "column x: there is no Iceberg type", None),
        ("CREATE TABLE u AS SELECT NULL AS x", Kind::Invalid, "column x: there is no Iceberg type", None),
        ("UPDATE t SET nope = 1", Kind::NotFound, "nope", None),
        ("INSERT INTO t (id, mane) VALUES (1, 'x')", Kind::NotFound, "did you mean name?", Some((1, 20))),
        ("SELECT * FROM tt", Kind::NotFound, "table tt does not exist; did you mean t?", Some((1, 15))),
        ("SELECT * FROM nope.t", Kind::NotFound, "table nope.t does not exist: there is no schema nope", Some((1, 15))),
        (
            "SELECT\n  uper(name) FROM t",
            Kind::Invalid,
            "function uper does not exist; did you mean upper?",
            Some((2, 3)),
        ),
        ("SELECT id FROM t WHERE id = true", Kind::Invalid, "BIGINT and BOOLEAN cannot be compared", Some((1, 24))),
        ("SELECT name + true FROM t", Kind::Invalid, "VARCHAR and BOOLEAN", Some((1, 8))),
        (
            "SELECT repeat(true, true) FROM t",
            Kind::Invalid,
            "function repeat does not take (BOOLEAN, BOOLEAN)",
            Some((1, 8)),
        ),
        ("SELECT a.id FROM t AS a, t AS b WHERE id = 1", Kind::Invalid, "column id is ambiguous", None),
        ("SELECT id FROM t WHERE id", Kind::Invalid, "is of type BIGINT, not BOOLEAN", None),
        (
            "INSERT INTO t SELECT 1",
            Kind::Invalid,
            "the query has 1 columns, where 2 are to be inserted into t (id, name)",
            None,
        ),
        (
            "INSERT INTO t (name) SELECT id, name FROM t",
            Kind::Invalid,
            "has 2 columns, where 1 are to be inserted",
            None,
        ),
        ("UPDATE t SET id = 1, ID = 2", Kind::Invalid, "column id is assigned twice", Some((1, 22))),
        ("REPLACE INTO t VALUES (1, 'x')", Kind::NotSupported, "MERGE INTO", None),
        ("SELECT 1 / 0", Kind::Invalid, "ivide by zero", None),
    ] {
        let error = refused(&client, sql).await;
        assert!(error.kind == kind && error.message.contains(words), "{sql}: {:?} {error}", error.kind);
        let found = error.position.map(|p| (p.line, p.column));
        assert!(position.is_none() || found == position, "{sql}: {found:?}");
    }
    // What nests without end is an error of the statement, and not the end of the node.
    let nested = |open: &str, within: &str, close: &str| {
        format!("SELECT {}{within}{} FROM t", open.repeat(20_000), close.repeat(20_000))
    };
    let each_twice = |i: usize| format!(", w{} AS (SELECT a.id FROM w{i} AS a, w{i} AS b)", i + 1);
    let with = |each: &dyn Fn(usize) -> String, last: usize| {
        format!("WITH w0 AS (SELECT id FROM t){} SELECT id FROM w{last}", (0..last).map(each).collect::<String>())
    };
    for (sql, words) in [
        (nested("(", "1", ")"), "nested"),
        (nested("[", "1", "]"), ""),
        (nested("(SELECT ", "1", ")"), "nested"),
        (format!("SELECT {}", "CAST(".repeat(40)), "nested more than 16 deep"),
        (nested("NOT ", "true", ""), "operators in a row"),
        (nested("abs(", "id", ")"), "nested"),
        (nested("", "id", " + 1"), "operators in a row"),
        (nested("", "id", "::int"), "operators in a row"),
        (format!("DELETE FROM t WHERE id = 0{}", " OR id = 1".repeat(10_000)), "operators in a row"),
        (format!("INSERT INTO t (id) SELECT 1{}", " UNION ALL SELECT 1".repeat(10_000)), "operators in a row"),
        (format!("SELECT 1{}", " UNION SELECT 1".repeat(600)), "above each other"),
        (format!("SELECT 1 FROM t{}", ", t AS t".repeat(10_000)), "tables and queries"),
        (with(&|i| format!(", w{} AS (SELECT id FROM w{i})", i + 1), 10_000), "tables and queries"),
        (with(&each_twice, 60), "tables and queries"),
        (format!("EXPLAIN {}", with(&each_twice, 60)), "tables and queries"),
    ] {
        let error = refused(&client, &sql).await;
        assert!(error.kind == Kind::Invalid && error.message.contains(words), "{sql:.60}: {:?} {error}", error.kind);
    }
    run(&client, "CREATE VIEW v0 AS SELECT id FROM t").await;
    let mut too_large = None;
    for i in 0..14 {
        let twice = format!("CREATE VIEW v{} AS SELECT a.id FROM v{i} AS a, v{i} AS b", i + 1);
        too_large = client.execute(&twice, TIMEOUT).await.err();
        if too_large.is_some() {
            break;
        }
    }
    let error = too_large.expect("views of views are limited");
    assert!(error.message.contains("views count wherever they are named"), "{error}");
    // As far as it may be it is run.
    assert_eq!(number(&client, &format!("SELECT 1{}", " + 1".repeat(99))).await, 100);
    assert_eq!(number(&client, &format!("SELECT count(*) FROM t WHERE id = 0{}", " OR id = 1".repeat(49))).await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 0, "none of it left a trace");
    assert!(cluster.files(".parquet").is_empty(), "{:?}", cluster.files(".parquet"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_redeemed_twice_is_made_once() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (x BIGINT)").await;
    let id = Uuid::new_v4();
    for _ in 0..3 {
        let rows = client.execute_as(id, "INSERT INTO t VALUES (1)", TIMEOUT).await.unwrap();
        assert_eq!(rows.command.as_deref(), Some("INSERT"));
    }
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_secret_is_asked_for() {
    use lake_client::secret::Secret;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secret");
    std::fs::write(&path, "open-sesame-open-sesame").unwrap();
    let store = std::sync::Arc::new(lake_client::memory::MemoryStore::new());
    let cluster =
        Cluster::over(store, 1, |options| lake_query::Options { secret_file: Some(path.clone()), ..options }).await;
    let error = refused(&cluster.client(0).await, "SELECT 1").await;
    assert_eq!(error.code, tonic::Code::Unauthenticated, "{error}");
    let endpoint = [cluster.nodes[0].flight_address().to_string()];
    let connect =
        async |secret: &str| SqlClient::connect(&endpoint, Some(&Secret::new(secret).unwrap())).await.unwrap();
    refused(&connect("wrong-wrong-wrong-wrong").await, "SELECT 1").await;
    assert_eq!(number(&connect("open-sesame-open-sesame").await, "SELECT 1").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_cannot_start_says_why() {
    use lake_query::{Config, Options, QueryNode};
    let dir = tempfile::tempdir().unwrap();
    let store = || std::sync::Arc::new(lake_client::memory::MemoryStore::new());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let config = Config::new(Options { listen: Some(address.clone()), ..options(dir.path()) }).unwrap();
    let error = QueryNode::start(config, store()).await.unwrap_err();
    assert!(error.message.contains(&address) && error.message.contains("another process"), "{error}");
    std::fs::write(dir.path().join("file"), "").unwrap();
    let warehouse = format!("file://{}/file/warehouse", dir.path().display());
    let config = Config::new(Options { warehouse: Some(warehouse.clone()), ..options(dir.path()) }).unwrap();
    let error = QueryNode::start(config, store()).await.unwrap_err();
    assert!(error.message.contains(&format!("the warehouse {warehouse} cannot be written")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_analyze_says_what_was_left_out_and_what_caches_had() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (day INT, x BIGINT) PARTITIONED BY (day)").await;
    run(&client, "INSERT INTO t VALUES (1, 10), (2, 20), (3, 30)").await;
    let analyzed = async || pretty(&run(&client, "EXPLAIN ANALYZE SELECT x FROM t WHERE day = 2").await);
    let (cold, warm) = (analyzed().await, analyzed().await);
    for figure in [
        "files_left_out=2",
        "manifests_left_out=0",
        "row_groups_pruned_statistics=1 total",
        "bytes_scanned=",
        "pointer_age_ms=",
    ] {
        assert!(warm.contains(figure), "{figure} is not in {warm}");
    }
    let had = |plan: &str, figure: &str| {
        let value = plan.split(&format!("{figure}=")).nth(1).unwrap_or_else(|| panic!("no {figure} in {plan}"));
        value.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<u64>().unwrap()
    };
    assert!(had(&cold, "footer_cache_misses") > 0, "{cold}");
    assert!(had(&warm, "footer_cache_hits") > 0 && had(&warm, "footer_cache_misses") == 0, "{warm}");
    assert!(had(&warm, "manifest_cache_hits") > 0 && had(&warm, "manifest_cache_misses") == 0, "{warm}");
}
