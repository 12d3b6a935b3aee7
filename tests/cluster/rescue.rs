//! An operator's session: saving a cluster, looking into the directories of stopped peers, a new cluster from a saved snapshot,
//! and one from a single survivor.

use std::path::Path;

use lake_chaos::{Cluster, Role};
use serde_json::Value;

use crate::common::{Printed, Scratch, Sql, TestCluster, lake};

fn json(printed: &Printed) -> Value {
    serde_json::from_str(&printed.out).unwrap_or_else(|e| panic!("{e}: {printed:?}"))
}

/// The files of a peer's directory but for logs and the lock.
fn data(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            found.extend(data(&path));
        } else if name != "lock" && !name.ends_with(".log") {
            found.push((path.display().to_string(), std::fs::read(path).unwrap()));
        }
    }
    found.sort();
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_saved_looked_into_restored_and_recovered() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let here = scratch.path("");
    let cluster = TestCluster::start_as(&scratch, |spec| spec.query_nodes = 1).await;
    let sql = cluster.sql(0).await;
    sql.run("CREATE TABLE t AS SELECT * FROM (VALUES (1), (2), (3)) AS v(n)").await.unwrap();
    let peers = cluster.processes.endpoints(Role::Metasrv).join(",");
    let dir = cluster.processes.dir().to_owned();
    let peer = |n: u64| dir.join(format!("metasrv-{n}")).display().to_string();
    let table = "/lake/table/";

    // One endpoint that is not there is passed over.
    let at = format!("127.0.0.1:1,{peers}");
    let saved = lake(&here, &["meta", "--at", &at, "snapshot", "save", "a.snap", "--format", "json"]).await;
    assert_eq!(saved.code, Some(0), "{saved:?}");
    let saved = json(&saved);
    let shown = lake(&here, &["meta", "snapshot", "show", "a.snap", "--format", "json"]).await;
    assert_eq!(json(&shown), saved, "read again it is the same");
    let again = lake(&here, &["meta", "--at", &peers, "snapshot", "save", "a.snap"]).await;
    assert_eq!(again.code, Some(1), "{again:?}");
    assert!(again.err.contains("a.snap exists already"), "{again:?}");
    let nobody = lake(&here, &["meta", "--at", "127.0.0.1:1", "snapshot", "save", "b.snap"]).await;
    assert_eq!(nobody.code, Some(1), "{nobody:?}");
    assert!(nobody.err.contains("127.0.0.1:1") && nobody.err.contains("nothing was written"), "{nobody:?}");
    assert!(!scratch.path("b.snap").exists());

    let in_use = lake(&here, &["meta", "inspect", "--dir", &peer(1)]).await;
    assert_eq!(in_use.code, Some(1), "{in_use:?}");
    assert!(in_use.err.contains("is in use by process"), "{in_use:?}");
    cluster.stop().await;

    let before: Vec<_> = (1..=3).map(|n| data(Path::new(&peer(n)))).collect();
    for n in 1..=3 {
        let verified = lake(&here, &["meta", "verify", "--dir", &peer(n)]).await;
        assert_eq!(verified.code, Some(0), "{verified:?}");
        assert!(verified.out.contains(": whole"), "{verified:?}");
        let inspected = lake(&here, &["meta", "inspect", "--dir", &peer(n), "--keys", table, "--format", "json"]).await;
        let told = json(&inspected);
        assert_eq!(told["cluster_id"], saved["cluster_id"]);
        assert_eq!((&told["mark"]["peer_id"], told["damaged"].as_bool()), (&n.into(), Some(false)));
        assert_eq!(told["keys"].as_array().unwrap().len(), 1, "{told:#}");
        let people = lake(&here, &["meta", "inspect", "--dir", &peer(n), "--keys", table]).await;
        assert_eq!(people.code, Some(0), "{people:?}");
        assert!(people.out.contains("with all of the log") && people.out.contains("voter"), "{people:?}");
    }

    // A new cluster from the file, on the same warehouse.
    let warehouse = format!("file://{}", dir.join("warehouse").display());
    let new = scratch.path("restored");
    let target = new.join("metasrv-1").display().to_string();
    let restored = lake(&here, &["meta", "snapshot", "restore", "a.snap", "--dir", &target]).await;
    assert_eq!(restored.code, Some(0), "{restored:?}");
    assert!(restored.err.contains("lake metasrv --id 1"), "{restored:?}");
    let spec = TestCluster::spec(&new, |spec| {
        (spec.peers, spec.query_nodes, spec.warehouse) = (None, 1, Some(warehouse.clone()));
    });
    let second = Cluster::start(spec).await.unwrap();
    let sql = Sql::connect(&second.endpoints(Role::Query)[0]).await;
    assert_eq!(sql.numbers("SELECT n FROM t ORDER BY n").await, [1, 2, 3]);
    sql.run("INSERT INTO t VALUES (4)").await.unwrap();
    assert_eq!(sql.numbers("SELECT n FROM t ORDER BY n").await, [1, 2, 3, 4]);
    second.shutdown().await;

    // One survivor: told first, made only when asked for with the word.
    let out = scratch.path("recovered").display().to_string();
    let args = ["meta", "recover", "--dir", &peer(2), "--out", &out];
    let told = lake(&here, &args).await;
    assert_eq!(told.code, Some(1), "{told:?}");
    assert!(told.out.contains("may be lost") && told.err.contains("--accept-losing-acknowledged-writes"), "{told:?}");
    assert!(!Path::new(&out).exists());
    let args: Vec<&str> = args.into_iter().chain(["--accept-losing-acknowledged-writes"]).collect();
    let made = lake(&here, &args).await;
    assert_eq!(made.code, Some(0), "{made:?}");
    let told = json(&lake(&here, &["meta", "inspect", "--dir", &out, "--keys", table, "--format", "json"]).await);
    assert_eq!(told["keys"].as_array().unwrap().len(), 1, "{told:#}");
    assert_ne!(told["cluster_id"], saved["cluster_id"]);
    let again = lake(&here, &args).await;
    assert!(again.code == Some(1) && again.err.contains("exists already"), "{again:?}");
    // Two are a majority.
    let other = scratch.path("other").display().to_string();
    let two = ["meta", "recover", "--dir", &peer(1), "--dir", &peer(2), "--out", &other];
    let two: Vec<&str> = two.into_iter().chain(["--accept-losing-acknowledged-writes"]).collect();
    let refused = lake(&here, &two).await;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.err.contains("start them as they are"), "{refused:?}");
    let even: Vec<&str> = two.into_iter().chain(["--even-with-a-majority"]).collect();
    let made = lake(&here, &even).await;
    assert_eq!(made.code, Some(0), "{made:?}");
    let after: Vec<_> = (1..=3).map(|n| data(Path::new(&peer(n)))).collect();
    assert!(after == before, "the survivors' directories are as they were");

    // A bit flips.
    let mark = Path::new(&peer(3)).join("mark");
    let mut bytes = std::fs::read(&mark).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&mark, bytes).unwrap();
    let verified = lake(&here, &["meta", "verify", "--dir", &peer(3)]).await;
    assert_eq!(verified.code, Some(1), "{verified:?}");
    assert!(verified.out.contains("slot 0") && verified.out.contains(": damaged"), "{verified:?}");
    let verified = lake(&here, &["meta", "verify", "--dir", &peer(3), "--format", "json"]).await;
    assert_eq!((verified.code, json(&verified)["damaged"].as_bool()), (Some(1), Some(true)));
}
