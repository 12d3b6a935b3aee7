//! Shards and the upkeep of their tables, by real query nodes: listed, moved, taken over from one that is killed; and without a
//! cluster, by a janitor.

use std::time::Instant;

use futures::{StreamExt, TryStreamExt};
use lake_chaos::{ProcessName, Role};
use lake_query::Kind;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::{LAKE, PATIENCE, Printed, Scratch, TestCluster, files, lake, numbers, table, until};
use crate::etcd::Etcd;
use crate::support::free_port;

async fn shards(scratch: &Scratch, cluster: &TestCluster, args: &[&str]) -> Printed {
    let at = cluster.processes.endpoints(Role::Metasrv).join(",");
    let args: Vec<&str> = ["meta", "shards"].iter().chain(args).copied().chain(["--at", &at]).collect();
    lake(&scratch.path(""), &args).await
}

/// The listing, once every shard is held and it is so.
async fn until_held(scratch: &Scratch, cluster: &TestCluster, what: &str, is: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    until(what, PATIENCE, || async {
        let listing = listing(scratch, cluster).await?;
        if is(&listing) { Ok(listing) } else { Err(format!("{listing:?}")) }
    })
    .await
}

/// The same, evenly spread by hand: by itself the leader heeds how busy the workers are, and leaves a small difference as it is.
async fn until_even(scratch: &Scratch, cluster: &TestCluster, what: &str) -> Vec<Value> {
    until(what, PATIENCE, || async {
        let balanced = shards(scratch, cluster, &["balance"]).await;
        let listing = listing(scratch, cluster).await?;
        let even = led_by(&listing, "query-1") == led_by(&listing, "query-2");
        if even { Ok(listing) } else { Err(format!("{balanced:?}, then {listing:?}")) }
    })
    .await
}

/// The listing, if every shard is held.
async fn listing(scratch: &Scratch, cluster: &TestCluster) -> Result<Vec<Value>, String> {
    let printed = shards(scratch, cluster, &["list", "--format", "json"]).await;
    let listing: Value = serde_json::from_str(&printed.out).map_err(|e| format!("{e}: {printed:?}"))?;
    let shards = listing["shards"].as_array().cloned().unwrap_or_default();
    let all = !shards.is_empty() && shards.len() as u64 == listing["count"].as_u64().unwrap_or(0);
    let held = all && shards.iter().all(|shard| shard["state"] == "held");
    assert_eq!(printed.code, Some(if held || listing["count"] == 0 { 0 } else { 3 }), "{printed:?}");
    if held { Ok(shards) } else { Err(listing.to_string()) }
}

fn led_by(shards: &[Value], node: &str) -> usize {
    shards.iter().filter(|shard| shard["node"] == node).count()
}

/// Parts of queries that others coordinate, and bytes of memory of statements, that a node says it has.
async fn in_hand(http: &str) -> Result<[u64; 2], String> {
    let asked = async {
        let mut connection = TcpStream::connect(http).await?;
        connection.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await?;
        let mut text = String::new();
        connection.read_to_string(&mut text).await?;
        Ok::<_, std::io::Error>(text)
    };
    let text = asked.await.map_err(|e| e.to_string())?;
    let figure = |name: &str| {
        let figure = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        figure.ok_or_else(|| format!("{name} is not in {text}"))
    };
    Ok([figure("lake_query_distributed_parts ")?, figure("lake_query_memory_held_bytes ")?])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_workers_shards_and_their_upkeep_go_on_elsewhere() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let http = free_port();
    let cluster = TestCluster::start_as(&scratch, |spec| {
        let times = ["--node-heartbeat-ms", "500", "--node-lease-ms", "6000", "--shards", "8"];
        spec.metasrv_args = times.map(str::to_owned).to_vec();
        let args = ["--upkeep-interval-secs", "1", "--slow-statement-ms", "1"];
        spec.query_args = args.map(str::to_owned).to_vec();
        spec.query_env = vec![("LAKE_QUERY_HTTP_LISTEN".into(), format!("127.0.0.{{id}}:{http}").into())];
    })
    .await;
    let listed = until_even(&scratch, &cluster, "each worker to have its half").await;
    let sql = cluster.sql(0).await;
    let shown = sql.run("SELECT node, state, count(*) FROM system.shards GROUP BY 1, 2 ORDER BY 1").await.unwrap();
    let shown = table(&shown.batches);
    assert!(shown.contains("| query-1 | held  | 4 ") && shown.contains("| query-2 | held  | 4 "), "{shown}");

    // By hand.
    let first = listed.iter().find(|shard| shard["node"] == "query-1").unwrap();
    let number = first["shard"].to_string();
    let moved = shards(&scratch, &cluster, &["move", &number, "query-2"]).await;
    assert!(moved.code == Some(0) && moved.out.contains("query-1  query-2"), "{moved:?}");
    let dry = shards(&scratch, &cluster, &["balance", "--dry-run"]).await;
    assert!(dry.code == Some(0) && dry.out.contains("dry run"), "{dry:?}");
    let balanced = shards(&scratch, &cluster, &["balance"]).await;
    assert!(balanced.code == Some(0) && balanced.out.contains("query-2  query-1"), "{balanced:?}");
    let nobody = shards(&scratch, &cluster, &["move", &number, "query-9"]).await;
    assert!(nobody.code == Some(1) && nobody.err.contains("query-9"), "{nobody:?}");
    for (mode, would) in [("on", "would begin"), ("off", "would end")] {
        let dry = shards(&scratch, &cluster, &["maintenance", mode, "--dry-run"]).await;
        assert!(dry.code == Some(0) && dry.out.contains(would), "{dry:?}");
        let dry = shards(&scratch, &cluster, &["maintenance", mode, "--dry-run"]).await;
        assert!(dry.out.contains(would), "it was only said: {dry:?}");
        let maintenance = shards(&scratch, &cluster, &["maintenance", mode]).await;
        assert_eq!(maintenance.code, Some(0), "{maintenance:?}");
    }

    // Some tables of each worker ask for upkeep, and get it.
    sql.run("CREATE SCHEMA s").await.unwrap();
    let tables: Vec<String> = (0..6).map(|n| format!("s.t{n}")).collect();
    let fill = async |upto: usize| {
        for name in &tables {
            for n in 0..upto {
                sql.run(&format!("INSERT INTO {name} VALUES ({n})")).await.unwrap();
            }
        }
    };
    for name in &tables {
        sql.run(&format!("CREATE TABLE {name} (x BIGINT)")).await.unwrap();
        sql.run(&format!("ALTER TABLE {name} SET TBLPROPERTIES ('lake.compaction.enabled' = 'true')")).await.unwrap();
    }
    let packed = async |rows: i64| {
        for name in &tables {
            let files = format!("SELECT count(*) FROM s.\"{}$files\"", name.trim_start_matches("s."));
            until(&format!("the files of {name} to be packed"), PATIENCE, || async {
                let count = sql.numbers(&files).await[0];
                if count < 5 { Ok(()) } else { Err(format!("{count} files")) }
            })
            .await;
            assert_eq!(sql.numbers(&format!("SELECT count(*) FROM {name}")).await, [rows]);
        }
    };
    fill(6).await;
    packed(6).await;

    // One is killed, while the other one works on a part of a query that it coordinates: nothing of that is left there.
    sql.run("CREATE TABLE s.wide AS SELECT value AS x FROM generate_series(1, 200000)").await.unwrap();
    sql.run("INSERT INTO s.wide SELECT -x FROM s.wide").await.unwrap();
    let log = cluster.processes.dir().join("query-1").join("lake.log");
    until("a statement of more than a millisecond to be in the log", PATIENCE, || async {
        let log = std::fs::read_to_string(&log).map_err(|e| e.to_string())?;
        let told = log.lines().any(|line| line.contains("a slow statement") && line.contains("CREATE TABLE s.wide"));
        if told { Ok(()) } else { Err(log) }
    })
    .await;
    let coordinator = cluster.sql(1).await;
    coordinator.run("SET lake.distributed = on").await.unwrap();
    cluster.until_rows(&coordinator, "SELECT count(*) FROM s.wide", &[400_000]).await;
    let endless = "SELECT count(*) FROM s.wide a, s.wide b WHERE a.x + b.x = 1";
    let endless = tokio::spawn(async move { coordinator.run(endless).await });
    let worker = format!("127.0.0.1:{http}");
    until("query-1 to have a part of the query", PATIENCE, || async {
        match in_hand(&worker).await? {
            [parts, bytes] if parts > 0 && bytes > 0 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    cluster.processes.process(ProcessName::query(2)).unwrap().kill().await.unwrap();
    let killed = Instant::now();
    let lost = endless.await.unwrap().expect_err("the node that it was asked of is gone");
    until("query-1 to have nothing of the query any more", PATIENCE, || async {
        match in_hand(&worker).await? {
            [0, 0] => Ok(()),
            other => Err(format!("{other:?}, after {lost}")),
        }
    })
    .await;

    // The other one has all shards, and does the upkeep of all tables.
    until_held(&scratch, &cluster, "query-1 to have all shards", |shards| led_by(shards, "query-1") == 8).await;
    println!("the shards of a worker that was killed were held elsewhere after {:.1?}", killed.elapsed());
    fill(6).await;
    packed(12).await;
    cluster.processes.start_one(ProcessName::query(2)).await.unwrap();
    until_even(&scratch, &cluster, "each worker to have its half again").await;
    kill_in_the_middle(&cluster, &worker).await;
    cluster.stop().await;
}

/// A node is killed while it works on its part of a query that another one coordinates: who asked has every row, or is told.
async fn kill_in_the_middle(cluster: &TestCluster, worker: &str) {
    const ROWS: usize = 400_000;
    let coordinator = cluster.sql(1).await;
    coordinator.run("SET lake.distributed = on").await.unwrap();
    // Far more than is under way at any time, and of both nodes.
    let sql = "SELECT x, repeat('a', 500) FROM s.wide";
    let (rows, first) = until("query-1 to have a part of a query that query-2 was asked", PATIENCE, || async {
        let mut rows = coordinator.rows(sql).await.map_err(|e| e.to_string())?;
        let first = rows.next().await.ok_or("it has no rows")?.map_err(|e| e.to_string())?;
        match in_hand(worker).await? {
            [parts, _] if parts > 0 => Ok((rows, first)),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    cluster.processes.process(ProcessName::query(1)).unwrap().kill().await.unwrap();
    match rows.try_collect::<Vec<_>>().await {
        Ok(rest) => {
            let all: usize = rest.iter().map(|batch| batch.num_rows()).sum();
            assert_eq!(first.num_rows() + all, ROWS, "rows are missing, and nothing said so");
        }
        Err(error) => {
            let said = error.kind == Kind::Unavailable && error.message.contains("query node");
            assert!(said, "{:?}: {error}", error.kind);
        }
    }
    // Who asks again is answered in full, by whoever is there, and by both once both are.
    let sums = "SELECT count(*), sum(abs(x)) FROM s.wide";
    let whole = [ROWS as i64, 200_000 * 200_001];
    let again = async |when: &str| {
        until(&format!("all rows {when}"), PATIENCE, || async {
            let answer = coordinator.run(sums).await.map_err(|e| e.to_string())?;
            let seen = [0, 1].map(|column| numbers(&answer.batches, column));
            // An answer is whole, whenever it comes.
            assert_eq!(seen, whole.map(|number| vec![number]), "{when}");
            Ok(())
        })
        .await;
    };
    again("beside a node that was killed").await;
    cluster.processes.start_one(ProcessName::query(1)).await.unwrap();
    again("with both nodes").await;
}

/// What the defaults come to. The figure is printed for docs/; how long it takes on a busy machine proves nothing.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: cargo test --release --test cluster how_long_a_failover_takes -- --ignored --nocapture"]
async fn how_long_a_failover_takes() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let mut took = Vec::new();
    for _ in 0..5 {
        let both = |shards: &[Value]| led_by(shards, "query-1") > 0 && led_by(shards, "query-2") > 0;
        until_held(&scratch, &cluster, "each worker to have shards", both).await;
        cluster.processes.process(ProcessName::query(2)).unwrap().kill().await.unwrap();
        let killed = Instant::now();
        until_held(&scratch, &cluster, "query-1 to have all shards", |shards| led_by(shards, "query-2") == 0).await;
        took.push(killed.elapsed());
        cluster.processes.start_one(ProcessName::query(2)).await.unwrap();
    }
    took.sort();
    println!("from kill -9 until all shards were held elsewhere: {took:.1?}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_janitor_does_the_upkeep_where_there_is_no_cluster() {
    let scratch = Scratch::new();
    let url = |name: &str| format!("file://{}", scratch.path(name).display());
    let (meta, warehouse) = (url("meta"), url("tables"));
    let run = async |statements: &str| {
        let args = ["sql", "--meta", &meta, "--warehouse", &warehouse, "--format", "csv", "-c", statements];
        let printed = lake(&scratch.path(""), &args).await;
        assert_eq!(printed.code, Some(0), "{statements}: {printed:?}");
        printed.out.lines().last().unwrap_or_default().to_owned()
    };
    let fill = |table: &str| (0..6).map(|n| format!("INSERT INTO {table} VALUES ({n});")).collect::<String>();
    run("CREATE SCHEMA s; CREATE TABLE s.t (x BIGINT); CREATE TABLE s.u (x BIGINT);").await;
    run("ALTER TABLE s.t SET TBLPROPERTIES ('lake.compaction.enabled' = 'true');").await;
    run(&fill("s.t")).await;
    run(&fill("s.u")).await;
    let janitor = ["janitor", "--store", &meta, "--warehouse", &warehouse, "--once", "--log-stderr"];
    for changes in ["1 change", "0 changes"] {
        let printed = lake(&scratch.path(""), &janitor).await;
        let expected = format!("2 tables, {changes}, 0 failures");
        assert!(printed.code == Some(0) && printed.out.contains(&expected), "{printed:?}");
    }
    assert_eq!(run("SELECT count(*) FROM s.\"t$files\";").await, "1");
    assert_eq!(run("SELECT count(*) FROM s.\"u$files\";").await, "6", "it has asked for nothing");
    assert_eq!(run("SELECT sum(x) FROM s.t;").await, "15");

    // While one works another one waits, and goes on once that is gone.
    run(&fill("s.t")).await;
    let holder = [&janitor[..5], &["--lease-secs", "3", "--interval-secs", "1", "--log-stderr"][..]].concat();
    let mut first = tokio::process::Command::new(LAKE)
        .args(&holder)
        .current_dir(scratch.path(""))
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let packed = async || {
        until("the files to be packed", PATIENCE, || async {
            let files = run("SELECT count(*) FROM s.\"t$files\";").await;
            if files.parse::<u64>().is_ok_and(|files| files < 5) { Ok(()) } else { Err(files) }
        })
        .await;
    };
    packed().await;
    let beside = lake(&scratch.path(""), &janitor).await;
    assert!(beside.code == Some(1) && beside.err.contains("in use by another lake process"), "{beside:?}");
    first.kill().await.unwrap();
    run(&fill("s.t")).await;
    let printed = lake(&scratch.path(""), &janitor).await;
    assert!(printed.code == Some(0) && printed.out.contains(" 1 change,"), "{printed:?}");
    assert_eq!(printed.err.matches("another janitor holds the lease").count(), 2, "once, and in the log: {printed:?}");
    packed().await;

    // A table that was dropped with PURGE waits for its time, and until then it comes back.
    run("CREATE TABLE s.gone AS SELECT 1::BIGINT AS x; CREATE TABLE s.back AS SELECT 2::BIGINT AS x;").await;
    let of = |table: &str| {
        let mut of = files(&scratch.path("tables"));
        of.retain(|file| file.to_string_lossy().contains(&format!("/{table}-")));
        of
    };
    let (gone, back) = (of("gone"), of("back"));
    assert!(gone.len() > 2 && back.len() > 2, "{gone:?} {back:?}");
    run("DROP TABLE s.gone PURGE; DROP TABLE s.back PURGE;").await;
    let printed = lake(&scratch.path(""), &janitor).await;
    assert!(printed.code == Some(0) && !printed.out.contains("purged"), "{printed:?}");
    assert_eq!((of("gone"), of("back")), (gone.clone(), back.clone()));
    assert_eq!(run("SELECT count(*) FROM system.dropped_tables;").await, "2");
    let all = ["sql", "--meta", &meta, "--warehouse", &warehouse, "-c", "DROP SCHEMA s CASCADE PURGE"];
    let all = lake(&scratch.path(""), &all).await;
    assert!(all.code != Some(0) && all.err.contains("one key at a time"), "{all:?}");
    run("UNDROP TABLE s.back; CREATE TABLE s.gone AS SELECT 7::BIGINT AS x;").await;
    // Whoever deletes dies in the middle of it, before what was done is committed, and after that.
    let die_at = scratch.path("die-at");
    let now = [&janitor[..], &["--lease-secs", "3", "--purge-retention-secs", "0"][..]].concat();
    for step in ["purge-manifests", "purge-committed", "purge-metadata"] {
        std::fs::write(&die_at, step).unwrap();
        let mut dies = tokio::process::Command::new(LAKE);
        dies.args(&now).current_dir(scratch.path("")).env("LAKE_QUERY_DIE_AT", &die_at);
        dies.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).kill_on_drop(true);
        let died = tokio::time::timeout(5 * PATIENCE, dies.status()).await.unwrap().unwrap();
        assert_eq!(
            died.code(),
            None,
            "it did not die at {step}: {}",
            run("SELECT step, note FROM system.procedures;").await
        );
    }
    let printed = lake(&scratch.path(""), &now).await;
    assert!(printed.code == Some(0) && printed.out.contains(", 0 failures, 1 table purged"), "{printed:?}");
    assert!(of("gone").is_disjoint(&gone), "all of its files are gone: {:?}", of("gone"));
    assert!(of("back").is_superset(&back), "and none of others");
    assert_eq!(run("SELECT state FROM system.procedures WHERE subject = 's.gone';").await, "done");
    assert_eq!(run("SELECT x FROM s.gone;").await + &run("SELECT x FROM s.back;").await, "72");
    let late = ["sql", "--meta", &meta, "--warehouse", &warehouse, "-c", "DROP TABLE s.gone; UNDROP TABLE s.gone;"];
    let late = lake(&scratch.path(""), &late).await;
    assert!(late.code != Some(0) && late.err.contains("waits to be purged"), "{late:?}");

    let cluster = lake(&scratch.path(""), &["janitor", "--store", "lake://a:1", "--warehouse", &warehouse]).await;
    assert!(cluster.code == Some(1) && cluster.err.contains("metadata cluster"), "{cluster:?}");
    let bare = lake(&scratch.path(""), &["janitor", "--store", "a:1", "--warehouse", &warehouse]).await;
    assert!(bare.code == Some(1) && bare.err.contains("none of etcd://"), "only what it takes is offered: {bare:?}");
    let nowhere =
        lake(&scratch.path(""), &["janitor", "--store", &url("met"), "--warehouse", &warehouse, "--once"]).await;
    assert!(nowhere.code == Some(1) && nowhere.err.contains("holds no metadata"), "{nowhere:?}");
    assert!(!scratch.path("met").exists(), "nothing was made there");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_janitor_packs_and_purges_over_an_etcd() {
    let (scratch, etcd) = (Scratch::new(), Etcd::start().await);
    let warehouse = format!("file://{}", scratch.path("tables").display());
    let meta = format!("etcd://{}/lake", etcd.endpoint);
    let run = async |statements: &str| {
        let args = ["sql", "--meta", &meta, "--warehouse", &warehouse, "--format", "csv", "-c", statements];
        let printed = lake(&scratch.path(""), &args).await;
        assert_eq!(printed.code, Some(0), "{statements}: {printed:?}");
        printed.out.lines().last().unwrap_or_default().to_owned()
    };
    let inserts: String = (0..6).map(|n| format!("INSERT INTO s.t VALUES ({n});")).collect();
    run(&format!(
        "CREATE SCHEMA s; CREATE TABLE s.t (x BIGINT); ALTER TABLE s.t SET TBLPROPERTIES ('lake.compaction.enabled' = 'true'); \
         {inserts} CREATE SCHEMA g; CREATE TABLE g.gone AS SELECT 1::BIGINT AS x; DROP SCHEMA g CASCADE PURGE;"
    ))
    .await;
    let gone = || files(&scratch.path("tables")).iter().any(|file| file.to_string_lossy().contains("/gone-"));
    let janitor = ["janitor", "--store", &meta, "--warehouse", &warehouse, "--once", "--log-stderr"];
    let printed = lake(&scratch.path(""), &janitor).await;
    assert!(printed.code == Some(0) && printed.out.trim() == "1 table, 1 change, 0 failures", "{printed:?}");
    assert!(gone(), "it waits");
    let printed = lake(&scratch.path(""), &[&janitor[..], &["--purge-retention-secs", "0"]].concat()).await;
    let done = "1 table, 0 changes, 0 failures, 1 table purged";
    assert!(printed.code == Some(0) && printed.out.trim() == done, "{printed:?}");
    assert!(!gone());
    let left = "SELECT sum, files FROM (SELECT sum(x) AS sum FROM s.t), (SELECT count(*) AS files FROM s.\"t$files\");";
    assert_eq!(run(left).await, "15,1");
    let Etcd { service, dir, .. } = etcd;
    drop((service, dir));
}
