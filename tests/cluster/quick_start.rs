//! What a newcomer does: one command, a sample, SQL; and again the next day.

use std::process::Stdio;
use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::datasource::MemTable;
use datafusion::prelude::SessionContext;
use lake_chaos::{ProcessName, manifest, probe};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tpchgen::generators::{CustomerGenerator, LineItemGenerator, OrderGenerator};
use tpchgen_arrow::{CustomerArrow, LineItemArrow, OrderArrow};

use crate::common::{LAKE, PATIENCE, Scratch, Sql, lake, table, until};

const COUNT: &str = "SELECT count(*) FROM tpch.lineitem";
/// Rows of lineitem at scale 0.01.
const LINEITEMS: &str = "60175";

const Q1: &str =
    "SELECT l_returnflag, l_linestatus, sum(l_quantity) AS sum_qty, sum(l_extendedprice) AS sum_base_price,
    sum(l_extendedprice * (1 - l_discount)) AS sum_disc_price,
    sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) AS sum_charge, avg(l_quantity) AS avg_qty,
    avg(l_extendedprice) AS avg_price, avg(l_discount) AS avg_disc, count(*) AS count_order
    FROM tpch.lineitem WHERE l_shipdate <= date '1998-12-01' - interval '90' day
    GROUP BY l_returnflag, l_linestatus ORDER BY l_returnflag, l_linestatus";
const Q3: &str = "SELECT l_orderkey, sum(l_extendedprice * (1 - l_discount)) AS revenue, o_orderdate, o_shippriority
    FROM tpch.customer, tpch.orders, tpch.lineitem
    WHERE c_mktsegment = 'BUILDING' AND c_custkey = o_custkey AND l_orderkey = o_orderkey
      AND o_orderdate < date '1995-03-15' AND l_shipdate > date '1995-03-15'
    GROUP BY l_orderkey, o_orderdate, o_shippriority ORDER BY revenue DESC, o_orderdate LIMIT 10";
const Q6: &str = "SELECT sum(l_extendedprice * l_discount) AS revenue FROM tpch.lineitem
    WHERE l_shipdate >= date '1994-01-01' AND l_shipdate < date '1995-01-01'
      AND l_discount BETWEEN 0.05 AND 0.07 AND l_quantity < 24";

/// DataFusion alone over the same generated rows, without anything of lake's.
async fn reference() -> SessionContext {
    let context = SessionContext::new();
    context.sql("CREATE SCHEMA tpch").await.unwrap();
    let register = |name: &str, batches: Vec<RecordBatch>| {
        let table = MemTable::try_new(batches[0].schema(), vec![batches]).unwrap();
        context.register_table(format!("tpch.{name}"), Arc::new(table)).unwrap();
    };
    let scale = 0.01;
    register("lineitem", LineItemArrow::new(LineItemGenerator::new(scale, 1, 1)).collect());
    register("orders", OrderArrow::new(OrderGenerator::new(scale, 1, 1)).collect());
    register("customer", CustomerArrow::new(CustomerGenerator::new(scale, 1, 1)).collect());
    context
}

fn is_alive(pid: u32) -> bool {
    let pid = Pid::from_raw(pid as i32).expect("a pid is above 0");
    // A child that has ended and that nobody has waited for yet is a zombie: it runs nothing.
    test_kill_process(pid).is_ok()
        && std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))
            .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
}

async fn until_gone(pids: &[u32]) {
    until("every process of the cluster to be gone", PATIENCE, || async {
        let left: Vec<_> = pids.iter().filter(|p| is_alive(**p)).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("still running: {left:?}")) }
    })
    .await;
}

/// `lake up --no-shell`, or `lake standalone --no-shell`, until it serves.
struct Serving {
    process: tokio::process::Child,
    dir: std::path::PathBuf,
}

impl Serving {
    async fn start(dir: &std::path::Path, args: &[&str]) -> Self {
        let mut command = tokio::process::Command::new(LAKE);
        command.args(args).arg("--no-shell").arg("--dir").arg(dir);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().unwrap();
        // Read to the end, so that it never waits for us.
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                println!("{line}");
            }
        });
        let this = Self { process, dir: dir.to_owned() };
        until("every process of cluster.json to serve", 2 * PATIENCE, || async {
            let entries = manifest::read(&this.dir).map_err(|e| e.to_string())?.ok_or("no cluster.json yet")?;
            let queries: Vec<_> = entries.iter().filter_map(|e| e.addresses.get("flight")).collect();
            let flight = queries.last().ok_or("no query node yet")?;
            probe::serves(flight).await?;
            // The sample comes last.
            match Sql::connect(flight).await.run(COUNT).await {
                Ok(_) => Ok(()),
                Err(e) => Err(e.to_string()),
            }
        })
        .await;
        this
    }

    fn pids(&self) -> Vec<u32> {
        manifest::read(&self.dir).unwrap().unwrap().iter().filter_map(|e| e.pid).collect()
    }

    fn endpoint(&self) -> String {
        let entries = manifest::read(&self.dir).unwrap().unwrap();
        entries.iter().find_map(|e| e.addresses.get("flight").cloned()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().expect("it runs") as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    async fn ended(&mut self) -> Option<i32> {
        tokio::time::timeout(PATIENCE, self.process.wait()).await.expect("it ends").unwrap().code()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_command_answers_the_first_time_and_after_a_restart() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("home")).unwrap();
    for command in ["up", "standalone"] {
        let dir = scratch.path(command);
        let dir = dir.to_str().unwrap();
        for start in ["first", "second"] {
            let args = [command, "--dir", dir, "-c", COUNT, "--format", "csv"];
            let printed = lake(&scratch.path("home"), &args).await;
            assert_eq!(printed.code, Some(0), "{command}, {start} start: {}", printed.err);
            assert_eq!(printed.out.lines().last(), Some(LINEITEMS), "{command}, {start} start: {printed:?}");
        }
        let wrong = lake(&scratch.path("home"), &[command, "--dir", dir, "-c", "SELECT * FROM tpch.lineitems"]).await;
        assert_ne!(wrong.code, Some(0));
        assert!(wrong.err.contains("lineitems"), "{wrong:?}");
        assert!(wrong.out.is_empty(), "{wrong:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tpch_answers_what_datafusion_answers_over_the_same_rows() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let mut up = Serving::start(&scratch.path("lake-data"), &["up"]).await;
    let sql = Sql::connect(&up.endpoint()).await;
    let reference = reference().await;
    for (name, query) in [("Q1", Q1), ("Q3", Q3), ("Q6", Q6)] {
        let expected = reference.sql(query).await.unwrap().collect().await.unwrap();
        let answer = sql.run(query).await.unwrap();
        assert_eq!(table(&answer.batches), table(&expected), "{name}");
    }
    let pids = up.pids();
    assert_eq!(pids.len(), 5);
    up.signal(Signal::TERM);
    assert_eq!(up.ended().await, Some(0));
    until_gone(&pids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_in_use_is_refused_and_no_orphan_survives() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let dir = scratch.path("lake-data");
    let mut up = Serving::start(&dir, &["up", "--sample", "tpch:0.001"]).await;
    let owner = up.process.id().unwrap();

    for command in ["up", "standalone"] {
        let second = lake(&scratch.path(""), &[command, "--dir", dir.to_str().unwrap(), "-c", "SELECT 1"]).await;
        assert_eq!(second.code, Some(1), "{second:?}");
        assert!(second.err.contains("in use") && second.err.contains(&owner.to_string()), "{second:?}");
    }

    // A child that dies by itself is restarted, and cluster.json says so.
    let before = manifest::read(&dir).unwrap().unwrap();
    let victim = ProcessName::metasrv(2);
    let pid = before.iter().find(|e| e.name() == victim).and_then(|e| e.pid).unwrap();
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    until("the killed peer to be restarted", PATIENCE, || async {
        let now = manifest::read(&dir).map_err(|e| e.to_string())?.unwrap_or_default();
        let entry = now.into_iter().find(|e| e.name() == victim).ok_or("it is gone from cluster.json")?;
        let new = entry.pid.filter(|p| *p != pid).ok_or("not yet")?;
        probe::peer(&entry.addresses["grpc"]).await.map(|_| new)
    })
    .await;

    let pids = up.pids();
    up.signal(Signal::KILL);
    up.ended().await;
    until_gone(&pids).await;
    // And what is left behind starts again.
    let again = lake(&scratch.path(""), &["up", "--dir", dir.to_str().unwrap(), "-c", COUNT, "--format", "csv"]).await;
    assert_eq!(again.code, Some(0), "{again:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn formats_are_for_people_and_for_programs() {
    let scratch = Scratch::new();
    let query = "SELECT 1 AS a, 'x' AS b, CAST(NULL AS INT) AS c";
    let dir = scratch.path("lake-data");
    let run = async |format: &str| {
        let args = ["standalone", "--sample", "none", "--dir", dir.to_str().unwrap(), "-c", query, "--format", format];
        let printed = lake(&scratch.path(""), &args).await;
        assert_eq!(printed.code, Some(0), "{printed:?}");
        printed.out
    };
    assert_eq!(run("csv").await, "a,b,c\n1,x,\n");
    let json = run("json").await;
    assert!(json.contains("\"a\":1") && json.contains("\"b\":\"x\""), "{json}");
    let people = run("table").await;
    assert!(people.contains("NULL") && people.contains('|'), "{people}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_find_a_cluster_by_its_directory_or_by_its_addresses() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let mut up = Serving::start(&scratch.path("lake-data"), &["up", "--peers", "5", "--sample", "tpch:0.001"]).await;
    // In the directory where ./lake-data is.
    let here = lake(&scratch.path(""), &["sql", "-c", "SELECT 41 + 1", "--format", "csv"]).await;
    assert_eq!((here.code, here.out.lines().last()), (Some(0), Some("42")), "{here:?}");
    let status = lake(&scratch.path(""), &["meta", "status"]).await;
    assert_eq!(status.code, Some(0), "{status:?}");
    assert!(status.out.contains("leader") && status.out.contains("follower"), "{status:?}");
    let members = lake(&scratch.path(""), &["meta", "members", "list", "--format", "json"]).await;
    let members: Value = serde_json::from_str(&members.out).unwrap_or_else(|e| panic!("{e}: {members:?}"));
    let voting = members["members"].as_array().unwrap().iter().filter(|member| member["role"] != "learner");
    assert_eq!(voting.count(), 5, "{members}");
    // Elsewhere, by address.
    std::fs::create_dir(scratch.path("elsewhere")).unwrap();
    let there = scratch.path("elsewhere");
    let by_address = lake(&there, &["sql", "--at", &up.endpoint(), "-c", "SELECT 1", "--format", "csv"]).await;
    assert_eq!(by_address.code, Some(0), "{by_address:?}");
    let nowhere = lake(&there, &["sql", "-c", "SELECT 1"]).await;
    assert_eq!(nowhere.code, Some(1), "{nowhere:?}");
    assert!(nowhere.err.contains("--at"), "{nowhere:?}");
    told_of_what_takes_long(&up.endpoint()).await;
    up.signal(Signal::INT);
    assert_eq!(up.ended().await, Some(0));
}

/// Whoever sits before a terminal is told of a statement that takes long, and of its rows where they go elsewhere.
async fn told_of_what_takes_long(at: &str) {
    let endless = "SELECT value FROM generate_series(1, 1000000000000)";
    let command = format!("exec {LAKE} sql --at {at} --format csv -c '{endless}' > /dev/null");
    // Of util-linux: gives what it starts a terminal, and tells what arrives there.
    let mut script = tokio::process::Command::new("script");
    script.args(["-qefc", &command, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut script = script.kill_on_drop(true).spawn().unwrap();
    let mut arriving = script.stdout.take().unwrap();
    let mut told = Vec::new();
    let seen = tokio::time::timeout(PATIENCE, async {
        while !String::from_utf8_lossy(&told).contains("rows so far; Ctrl-C stops it") {
            assert!(arriving.read_buf(&mut told).await.unwrap() > 0, "{}", String::from_utf8_lossy(&told));
        }
    });
    seen.await.unwrap_or_else(|_| panic!("nothing was told of it"));
    script.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_during_the_start_leaves_nothing_behind() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let dir = scratch.path("lake-data");
    let mut command = tokio::process::Command::new(LAKE);
    command.args(["up", "--no-shell", "--dir"]).arg(&dir).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let mut process = command.spawn().unwrap();
    let pids = until("some children", PATIENCE, || async {
        let entries = manifest::read(&dir).map_err(|e| e.to_string())?.unwrap_or_default();
        let pids: Vec<_> = entries.iter().filter_map(|e| e.pid).collect();
        if pids.is_empty() { Err("none yet".to_owned()) } else { Ok(pids) }
    })
    .await;
    kill_process(Pid::from_raw(process.id().unwrap() as i32).unwrap(), Signal::INT).unwrap();
    tokio::time::timeout(PATIENCE, process.wait()).await.expect("it ends soon").unwrap();
    let now = manifest::read(&dir).unwrap().unwrap_or_default();
    until_gone(&[pids, now.iter().filter_map(|e| e.pid).collect()].concat()).await;
}
