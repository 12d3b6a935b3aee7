//! A table with ten thousand files is dropped with PURGE, and whoever deletes them is killed in the middle of each
//! part, and the leader after it: all of its files go, and none else.

use std::collections::BTreeSet;
use std::path::PathBuf;

use lake_chaos::{ProcessName, Role};
use serde_json::Value;

use crate::common::{PATIENCE, Scratch, TestCluster, files, lake, table, until};

/// Files of the table that is dropped.
const FILES: usize = 10_000;
/// Of which so many are written, one for each partition; the others are further names of one of them.
const WRITTEN: usize = 500;
/// Where a worker dies (`query/src/chores/purge.rs`).
const STEPS: [&str; 5] = ["purge-checked", "purge-files", "purge-manifests", "purge-lists", LAST];
const LAST: &str = "purge-metadata";

/// What `lake meta proc list` says of the only procedure.
async fn listed(scratch: &Scratch, cluster: &TestCluster) -> Result<Value, String> {
    let at = cluster.processes.endpoints(Role::Metasrv).join(",");
    let printed = lake(&scratch.path(""), &["meta", "proc", "list", "--at", &at, "--format", "json"]).await;
    let listing: Value = serde_json::from_str(&printed.out).map_err(|e| format!("{e}: {printed:?}"))?;
    listing["procedures"].as_array().and_then(|all| all.first()).cloned().ok_or_else(|| listing.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_of_a_dropped_table_go_and_none_else_whoever_is_killed() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let step_file = scratch.path("die-at");
    let variable = ("LAKE_QUERY_DIE_AT".into(), step_file.clone().into_os_string());
    let cluster = TestCluster::start_as(&scratch, |spec| {
        let args = ["--purge-retention-secs", "0", "--node-heartbeat-ms", "500", "--node-lease-ms", "3000"];
        spec.metasrv_args = args.map(str::to_owned).to_vec();
        spec.query_env = vec![variable];
    })
    .await;
    let sql = cluster.sql(0).await;
    sql.run("CREATE TABLE other AS SELECT 1 AS x").await.unwrap();
    sql.run("CREATE TABLE t (k BIGINT, x BIGINT) PARTITIONED BY (k)").await.unwrap();
    let insert = format!("INSERT INTO t SELECT value, 2 * value FROM generate_series(1, {WRITTEN})");
    sql.run_within(&insert, 5 * PATIENCE).await.unwrap();
    sql.run_within("DELETE FROM t WHERE k < 100", 5 * PATIENCE).await.unwrap();
    let warehouse = scratch.path("lake-data/warehouse");
    let is_of_t = |file: &PathBuf| file.strip_prefix(&warehouse).is_ok_and(|f| f.to_string_lossy().contains("/t-"));
    let is_parquet = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "parquet");
    let one = files(&warehouse).into_iter().rfind(|file| is_of_t(file) && is_parquet(file)).unwrap();
    let links = one.with_file_name("links");
    std::fs::create_dir(&links).unwrap();
    (WRITTEN..FILES).for_each(|n| std::fs::hard_link(&one, links.join(format!("{n}.parquet"))).unwrap());
    let add = format!("CALL system.add_files('t', 'file://{}')", links.display());
    sql.run_within(&add, 5 * PATIENCE).await.unwrap();
    let before = files(&warehouse);
    assert!(before.iter().filter(|file| is_of_t(file)).count() > FILES);
    std::fs::write(&step_file, STEPS[0]).unwrap();
    sql.run_within("DROP TABLE t PURGE", 5 * PATIENCE).await.unwrap();

    let workers = [ProcessName::query(1), ProcessName::query(2)];
    let lives = |name: ProcessName| cluster.processes.process(name).unwrap().state().pid.is_some();
    for step in STEPS {
        std::fs::write(&step_file, step).unwrap();
        for name in workers.into_iter().filter(|name| !lives(*name)) {
            cluster.processes.start_one(name).await.unwrap();
        }
        // One after the other is given the part, until none is left. At the very end nothing is: the next one finds
        // that, and is done.
        let die = if step == LAST { 1 } else { workers.len() };
        until(&format!("{die} workers to die at {step}"), 5 * PATIENCE, || async {
            let dead = workers.into_iter().filter(|name| !lives(*name)).count();
            if dead >= die { Ok(()) } else { Err(format!("{dead} did: {:?}", listed(&scratch, &cluster).await)) }
        })
        .await;
        let leader = cluster.processes.leader(PATIENCE).await.unwrap();
        cluster.processes.process(leader.process).unwrap().kill().await.unwrap();
        cluster.processes.leader(PATIENCE).await.unwrap();
        cluster.processes.start_one(leader.process).await.unwrap();
    }
    std::fs::remove_file(&step_file).unwrap();
    for name in workers.into_iter().filter(|name| !lives(*name)) {
        cluster.processes.start_one(name).await.unwrap();
    }
    let sql = cluster.sql(0).await;
    sql.run("CREATE TABLE t AS SELECT 7 AS x").await.unwrap();
    let done = until("the purge to be done", 5 * PATIENCE, || async {
        let listed = listed(&scratch, &cluster).await?;
        if listed["state"] == "done" { Ok(listed) } else { Err(listed.to_string()) }
    })
    .await;
    assert!(done["note"].as_str().is_some_and(|note| note.contains("files are deleted")), "{done}");
    let left: BTreeSet<PathBuf> = before.iter().filter(|file| !is_of_t(file)).cloned().collect();
    let now = files(&warehouse);
    assert_eq!(now.intersection(&before).cloned().collect::<BTreeSet<_>>(), left);
    assert_eq!(sql.numbers("SELECT x FROM t").await, [7]);
    assert_eq!(sql.numbers("SELECT x FROM other").await, [1]);

    let shown = sql.run("SELECT kind, subject, state, step FROM system.procedures").await.unwrap();
    let shown = table(&shown.batches);
    assert!(shown.contains("| purge_table | default.t | done  | delete |"), "{shown}");
    let at = cluster.processes.endpoints(Role::Metasrv).join(",");
    let id = done["id"].as_str().unwrap();
    let meta =
        async |args: &[&str]| lake(&scratch.path(""), &[&["meta", "proc"][..], args, &["--at", &at]].concat()).await;
    let printed = meta(&["show", id]).await;
    assert!(
        printed.code == Some(0) && printed.out.contains("default.t") && printed.out.contains("done"),
        "{printed:?}"
    );
    assert_eq!(meta(&["wait", id]).await.code, Some(0));
    let would = meta(&["cancel", id, "--dry-run"]).await;
    assert!(would.code == Some(3) && would.out.ends_with(": would not be done: it is done\n"), "{would:?}");
    let would = meta(&["clear", id, "--give-up", "--dry-run"]).await;
    assert!(would.code == Some(3) && would.out.contains("it is done, not poisoned"), "{would:?}");
    for refused in [["cancel", id].as_slice(), &["clear", id, "--retry"], &["show", "nothing"]] {
        assert_eq!(meta(refused).await.code, Some(3), "{refused:?}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_goes_with_the_files_of_its_tables() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start_as(&scratch, |spec| {
        spec.metasrv_args = ["--purge-retention-secs", "0"].map(str::to_owned).to_vec();
    })
    .await;
    let sql = cluster.sql(0).await;
    for statement in [
        "CREATE TABLE other AS SELECT 1 AS x",
        "CREATE SCHEMA s",
        "CREATE TABLE s.t AS SELECT 1 AS x",
        "CREATE TABLE s.u AS SELECT 2 AS x",
        "CREATE VIEW s.v AS SELECT x FROM s.t",
        "DROP SCHEMA s CASCADE PURGE",
        // Its name is free at once.
        "CREATE SCHEMA s",
    ] {
        sql.run_within(statement, 5 * PATIENCE).await.unwrap_or_else(|e| panic!("{statement}: {e:?}"));
    }
    let warehouse = scratch.path("lake-data/warehouse");
    let is_data = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "parquet");
    until("the files of its tables to go", 5 * PATIENCE, || async {
        let left = files(&warehouse).into_iter().filter(is_data).count();
        if left == 1 { Ok(()) } else { Err(format!("{left} are left")) }
    })
    .await;
    let done = "SELECT count(*) FROM system.procedures WHERE kind = 'drop_namespace' AND state = 'done'";
    until("the schema's procedure to be done", 5 * PATIENCE, || async {
        let done = sql.numbers(done).await;
        if done == [1] { Ok(()) } else { Err(format!("{done:?}")) }
    })
    .await;
    assert_eq!(sql.numbers("SELECT x FROM other").await, [1]);

    // A warehouse, the same.
    let at = cluster.processes.endpoints(Role::Metasrv).join(",");
    let meta = async |args: &[&str]| lake(&scratch.path(""), &[&["meta"][..], args, &["--at", &at]].concat()).await;
    let root = scratch.path("archive");
    std::fs::create_dir(&root).unwrap();
    let root_uri = format!("file://{}", root.display());
    let made = meta(&["warehouse", "create", "archive", "--root", &root_uri]).await;
    assert_eq!(made.code, Some(0), "{made:?}");
    for statement in [
        "CREATE TABLE archive.t AS SELECT 1 AS x",
        "CREATE SCHEMA \"archive.sales\"",
        "CREATE TABLE \"archive.sales\".t AS SELECT 2 AS x",
    ] {
        until(statement, PATIENCE, || async {
            // Query nodes learn of the warehouse a moment later.
            sql.run_within(statement, PATIENCE).await.map(drop).map_err(|e| format!("{e:?}"))
        })
        .await;
    }
    assert_eq!(files(&root).into_iter().filter(is_data).count(), 2);
    let would = meta(&["warehouse", "remove", "archive", "--purge", "--dry-run"]).await;
    assert!(would.code == Some(0) && would.out.contains("with 2 tables, 0 views, 1 nested schemas"), "{would:?}");
    let purged = meta(&["warehouse", "remove", "archive", "--purge", "--format", "json"]).await;
    let purged: Value = serde_json::from_str(&purged.out).unwrap_or_else(|e| panic!("{e}: {purged:?}"));
    let waited = meta(&["proc", "wait", purged["procedure"].as_str().unwrap(), "--timeout-secs", "120"]).await;
    assert!(waited.code == Some(0) && waited.out.contains("purge_warehouse"), "{waited:?}");
    assert_eq!(files(&root).into_iter().filter(is_data).count(), 0);
    let again = meta(&["warehouse", "remove", "archive", "--purge"]).await;
    assert!(again.code == Some(1) && again.err.contains("does not exist"), "{again:?}");
    assert_eq!(sql.numbers("SELECT x FROM other").await, [1]);

    // Upkeep that an operator asks for is done by a worker.
    for n in 2..8 {
        sql.run(&format!("INSERT INTO other VALUES ({n})")).await.unwrap();
    }
    let proc = async |args: &[&str]| {
        lake(&scratch.path(""), &[&["meta", "proc"][..], args, &["--at", &at, "--timeout-secs", "120"]].concat()).await
    };
    let start = ["start", "rewrite-data-files", "default.other", "--id", "pack"];
    let dry = proc(&[&start[..], &["--dry-run"]].concat()).await;
    assert!(dry.code == Some(0) && dry.out.contains("would be submitted as pack"), "{dry:?}");
    assert_eq!(proc(&["show", "pack"]).await.code, Some(3), "nothing was submitted");
    let started = proc(&start).await;
    assert_eq!(started.code, Some(0), "{started:?}");
    let again = proc(&[&start[..], &["--dry-run"]].concat()).await;
    assert!(again.code == Some(0) && again.out.contains("nothing would be submitted"), "{again:?}");
    for more in [None, Some("--dry-run")] {
        let nothing = ["start", "rewrite-data-files", "default.nothing"].into_iter().chain(more);
        assert_eq!(proc(&nothing.collect::<Vec<_>>()).await.code, Some(3));
    }
    let waited = proc(&["wait", "pack"]).await;
    assert!(waited.code == Some(0) && waited.out.contains("table_upkeep"), "{waited:?}");
    until("its files to be packed", PATIENCE, || async {
        let files = sql.numbers("SELECT count(*) FROM default.\"other$files\"").await;
        if files[0] < 5 { Ok(()) } else { Err(format!("{files:?}")) }
    })
    .await;
    cluster.stop().await;
}
