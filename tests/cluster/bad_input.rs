//! What is wrong is named, nothing panics, and nothing is lost.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lake_chaos::{Cluster, ProcessName, Role};

use crate::common::{PATIENCE, Scratch, TestCluster, files, lake, until};

/// No process of the cluster has panicked.
fn assert_no_panic(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()) {
        for log in ["lake.log", "output.log"].map(|name| entry.join(name)) {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let line = text.lines().find(|l| l.contains("panicked at") || l.contains("\"panic\""));
            assert_eq!(line, None, "{}", log.display());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_that_cannot_be_done_say_why_and_where() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let sql = cluster.sql(0).await;
    sql.run("CREATE TABLE t (n BIGINT NOT NULL, s VARCHAR)").await.unwrap();
    sql.run("INSERT INTO t VALUES (1, 'one')").await.unwrap();

    let unknown = sql.error("SELECT *\nFROM nothing_there").await;
    assert!(unknown.message.contains("nothing_there"), "{unknown}");
    let unknown = sql.error("INSERT INTO nothing_there VALUES (1)").await;
    assert!(unknown.message.contains("nothing_there"), "{unknown}");
    let column = sql.error("SELECT n,\n  nope FROM t").await;
    assert!(column.message.contains("nope"), "{column}");
    assert_eq!(column.position.map(|p| (p.line, p.column)), Some((2, 3)), "{column:?}");
    let syntax = sql.error("SELECT n FORM t WHERE").await;
    assert!(syntax.position.is_some(), "{syntax:?}");

    let mismatch = sql.error("INSERT INTO t VALUES ('not a number', 'two')").await;
    assert!(mismatch.message.contains("not a number") || mismatch.message.contains("Int64"), "{mismatch}");
    let null = sql.error("INSERT INTO t VALUES (NULL, 'null')").await;
    assert!(null.message.contains('n'), "{null}");
    let arity = sql.error("INSERT INTO t VALUES (1)").await;
    assert!(!arity.message.is_empty());
    let exists = sql.error("CREATE TABLE t (n BIGINT)").await;
    assert!(exists.message.contains("t exists already"), "{exists}");
    for later in ["CREATE INDEX i ON t (x)", "USE s", "CREATE MATERIALIZED VIEW v AS SELECT 1 AS x"] {
        let refused = sql.error(later).await;
        assert!(refused.message.contains("not supported"), "{later}: {refused}");
    }
    assert_eq!(sql.numbers("SELECT n FROM t").await, [1]);
    assert_no_panic(cluster.processes.dir());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupt_parquet_file_is_named() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let cluster = TestCluster::start(&scratch).await;
    let sql = cluster.sql(0).await;
    sql.run("CREATE TABLE nation AS SELECT * FROM tpch('nation', 0.01)").await.unwrap();
    let warehouse = cluster.processes.dir().join("warehouse");
    let of_rows = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "parquet");
    let data: Vec<PathBuf> = files(&warehouse).into_iter().filter(of_rows).collect();
    assert_eq!(data.len(), 1);
    let whole = std::fs::read(&data[0]).unwrap();

    let flipped = {
        let mut bytes = whole.clone();
        let middle = bytes.len() / 3;
        bytes[middle..middle + 64].iter_mut().for_each(|b| *b = !*b);
        bytes
    };
    // As long as the table's metadata says, so that its footer is looked at.
    let with_end = |end: &[u8]| [&whole[..whole.len() - end.len()], end].concat();
    for (what, bytes) in [
        ("cut in half", &whole[..whole.len() / 2]),
        ("without its last byte", &whole[..whole.len() - 1]),
        ("empty", &[]),
        ("not Parquet at all", &[b'x'; 4096]),
        ("damaged in the middle", &flipped),
        ("with a lying footer", b"PAR1\xff\xff\xff\xffPAR1"),
        ("with a footer longer than itself", &with_end(b"\xff\xff\xff\xffPAR1")),
        ("with an empty footer", &with_end(b"\0\0\0\0PAR1")),
        ("encrypted", &with_end(b"PARE")),
    ] {
        // Named in SQL.
        let named = scratch.path(&format!("{}.parquet", what.replace(' ', "-")));
        std::fs::write(&named, bytes).unwrap();
        let error = sql.error(&format!("SELECT * FROM '{}'", named.display())).await;
        assert!(error.message.contains(named.file_name().unwrap().to_str().unwrap()), "{what}: {error}");
        let load = sql.error(&format!("INSERT INTO nation SELECT * FROM '{}'", named.display())).await;
        assert!(load.message.contains(named.file_name().unwrap().to_str().unwrap()), "{what}: {load}");
        // A table's own, through a node that has not read it yet: what it keeps in memory would hide the damage.
        std::fs::write(&data[0], bytes).unwrap();
        cluster.processes.restart(ProcessName::query(2)).await.unwrap();
        let error = cluster.sql(1).await.error("SELECT * FROM nation").await;
        assert!(error.message.contains(data[0].file_name().unwrap().to_str().unwrap()), "{what}: {error}");
        std::fs::write(&data[0], &whole).unwrap();
    }
    cluster.processes.restart(ProcessName::query(2)).await.unwrap();
    cluster.until_rows(&cluster.sql(1).await, "SELECT count(*) FROM nation", &[25]).await;
    assert_no_panic(cluster.processes.dir());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_start_says_what_is_in_the_way() {
    let scratch = Scratch::new();
    let here = scratch.path("");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();

    let dir = scratch.path("peer");
    let dir = dir.to_str().unwrap();
    let busy = lake(&here, &["metasrv", "--id", "1", "--dir", dir, "--listen", &taken]).await;
    assert_eq!(busy.code, Some(1), "{busy:?}");
    assert!(busy.err.contains(&taken), "{busy:?}");

    let node = scratch.path("node");
    let node = node.to_str().unwrap();
    let warehouse = format!("file://{}", scratch.path("warehouse").display());
    let query = |warehouse: &str, listen: &str| {
        let args = ["query", "--id", "q", "--dir", node, "--meta", "127.0.0.1:1", "--warehouse", warehouse];
        args.into_iter().chain(["--listen", listen]).map(str::to_owned).collect::<Vec<_>>()
    };
    let args = query(&warehouse, &taken);
    let busy = lake(&here, &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert_eq!(busy.code, Some(1), "{busy:?}");
    assert!(busy.err.contains(&taken), "{busy:?}");

    std::fs::write(scratch.path("a-file"), "").unwrap();
    let unwritable = scratch.path("a-file/warehouse");
    let args = query(&format!("file://{}", unwritable.display()), "127.0.0.1:0");
    let refused = lake(&here, &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.err.contains(unwritable.to_str().unwrap()), "{refused:?}");

    // An open network needs a secret, or the word that it is meant.
    let open = lake(&here, &["metasrv", "--id", "1", "--dir", dir, "--listen", "0.0.0.0:0"]).await;
    assert_eq!(open.code, Some(1), "{open:?}");
    assert!(open.err.contains("secret"), "{open:?}");
    let args = query(&warehouse, "0.0.0.0:0");
    let open = lake(&here, &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert_eq!(open.code, Some(1), "{open:?}");
    assert!(open.err.contains("secret"), "{open:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_directory_of_another_cluster_is_refused() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let dirs = [scratch.path("ours"), scratch.path("theirs")];
    for dir in &dirs {
        let cluster = Cluster::start(TestCluster::spec(dir, |s| s.query_nodes = 1)).await.unwrap();
        cluster.shutdown().await;
    }
    std::fs::rename(dirs[0].join("metasrv-1"), scratch.path("kept")).unwrap();
    std::fs::rename(dirs[1].join("metasrv-1"), dirs[0].join("metasrv-1")).unwrap();
    let spec = || TestCluster::spec(&dirs[0], |s| s.query_nodes = 1);
    let error = Cluster::start(spec()).await.unwrap_err().to_string();
    assert!(error.contains("metasrv-1") && error.contains("another cluster"), "{error}");
    // With its own directory back, everything is as it was.
    std::fs::rename(dirs[0].join("metasrv-1"), dirs[1].join("metasrv-1")).unwrap();
    std::fs::rename(scratch.path("kept"), dirs[0].join("metasrv-1")).unwrap();
    Cluster::start(spec()).await.unwrap().shutdown().await;

    // As another peer than it was made for.
    let other = dirs[1].join("metasrv-2");
    let ports = [lake_chaos::ports::reserve().unwrap(), lake_chaos::ports::reserve().unwrap()];
    let listen = ports.each_ref().map(|p| p.loopback());
    let args = ["metasrv", "--id", "3", "--dir", other.to_str().unwrap(), "--listen", &listen[0], "--raft-listen"];
    let args: Vec<_> = args.into_iter().chain([listen[1].as_str()]).collect();
    let refused = lake(&scratch.path(""), &args).await;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.err.contains("peer 2") && refused.err.contains(other.to_str().unwrap()), "{refused:?}");
}

/// A small file system of its own. Needs root.
struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    fn mount(path: PathBuf, mib: u32) -> Self {
        std::fs::create_dir_all(&path).unwrap();
        let size = format!("size={mib}m");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "lake-test"]).arg(&path).output().unwrap();
        let why = String::from_utf8_lossy(&mounted.stderr).into_owned();
        assert!(mounted.status.success(), "this test mounts a small tmpfs, for which it needs to be root: {why}");
        Self { path }
    }

    /// Writes until nothing more fits, but for `spare` bytes. Removing the file makes room again.
    fn fill(&self, spare: u64) -> PathBuf {
        let filler = self.path.join("filler");
        let stat = rustix::fs::statvfs(&self.path).unwrap();
        let bytes = (stat.f_bavail * stat.f_frsize).saturating_sub(spare);
        let file = std::fs::File::create(&filler).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
        filler
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disks_of_the_peers_stop_writes_until_there_is_room() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let disk = SmallDisk::mount(scratch.path("lake-data"), 512);
    let warehouse = scratch.path("warehouse");
    let cluster = TestCluster::start_as(&scratch, |spec| {
        spec.warehouse = Some(format!("file://{}", warehouse.display()));
        spec.metasrv_args = ["--disk-reserve-bytes", "16777216"].map(str::to_owned).to_vec();
    })
    .await;
    let sql = cluster.sql(0).await;
    sql.run("CREATE TABLE t AS SELECT * FROM (VALUES (1)) AS v(n)").await.unwrap();
    let pids = || cluster.processes.entries().iter().map(|e| e.pid).collect::<Vec<_>>();
    let before = pids();

    for (round, spare) in [(2, 8 << 20), (3, 0)] {
        let filler = disk.fill(spare);
        let error = sql.run_within(&format!("INSERT INTO t VALUES ({})", 10 * round), Duration::from_secs(10)).await;
        let error = error.expect_err("there is no room for the log");
        // What was proposed before the disk was found full may still come; the message has to say which of the two it is.
        let refused = error.message.contains("nothing was committed");
        assert!(refused || error.message.contains("unknown"), "{error}");
        until("the peers to say that their disks are full", PATIENCE, || async {
            let statuses = cluster.processes.statuses().await;
            let full = statuses.iter().filter(|s| s.problem.contains("disk full")).count();
            if full > 0 { Ok(()) } else { Err(format!("{statuses:?}")) }
        })
        .await;
        // Reading goes on.
        assert!(sql.numbers("SELECT n FROM t").await.contains(&1));
        std::fs::remove_file(filler).unwrap();
        until("a write after there is room", PATIENCE, || async {
            let insert = format!("INSERT INTO t VALUES ({round})");
            sql.run_within(&insert, Duration::from_secs(5)).await.map_err(|e| e.message)
        })
        .await;
        if refused {
            assert!(!sql.numbers("SELECT n FROM t").await.contains(&(10 * round)));
        }
    }
    let rows = sql.numbers("SELECT DISTINCT n FROM t WHERE n < 10 ORDER BY n").await;
    assert_eq!(rows, [1, 2, 3]);
    assert_eq!(pids(), before, "no process ended");
    assert_no_panic(cluster.processes.dir());

    // All of it is really on disk.
    cluster.processes.kill_role(Role::Metasrv).await.unwrap();
    cluster.processes.start_role(Role::Metasrv).await.unwrap();
    cluster.until_rows(&cluster.sql(1).await, "SELECT DISTINCT n FROM t WHERE n < 10 ORDER BY n", &[1, 2, 3]).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_warehouse_fails_the_insert_and_loses_nothing() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let disk = SmallDisk::mount(scratch.path("warehouse"), 64);
    let cluster = TestCluster::start_as(&scratch, |spec| {
        spec.warehouse = Some(format!("file://{}", disk.path.display()));
    })
    .await;
    let sql = cluster.sql(0).await;
    sql.run("CREATE TABLE nation AS SELECT * FROM tpch('nation', 0.01)").await.unwrap();
    let filler = disk.fill(16 << 10);
    let insert = "INSERT INTO nation SELECT n_nationkey, CAST(o_orderkey AS VARCHAR), n_regionkey, o_comment
        FROM nation, tpch('orders', 0.01)";
    let error = sql.error(insert).await;
    assert!(error.message.contains("No space left") || error.message.contains("disk is full"), "{error}");
    assert!(error.message.contains("nothing was committed"), "{error}");
    assert_eq!(sql.numbers("SELECT count(*) FROM nation").await, [25]);
    std::fs::remove_file(filler).unwrap();
    sql.run("INSERT INTO nation SELECT * FROM tpch('nation', 0.01)").await.unwrap();
    assert_eq!(sql.numbers("SELECT count(*) FROM nation").await, [50]);
    assert_no_panic(cluster.processes.dir());
    cluster.stop().await;
}
