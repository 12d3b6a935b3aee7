//! The parts started by hand, as on a server, before anybody has founded the cluster.

use std::process::{Output, Stdio};

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::common::{LAKE, PATIENCE, Scratch};

/// Starts a part. Gives it with the line that it prints once it serves.
async fn started(args: &[&str]) -> (Child, String) {
    let mut command = Command::new(LAKE);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("it says that it serves").unwrap();
    (child, line.expect("it serves"))
}

async fn lake(args: &[&str]) -> Output {
    Command::new(LAKE).args(args).stdin(Stdio::null()).kill_on_drop(true).output().await.unwrap()
}

/// The address behind a word of such a line.
fn address<'a>(line: &'a str, of: &str) -> &'a str {
    let (_, behind) = line.split_once(of).unwrap_or_else(|| panic!("no {of:?} in {line}"));
    behind.split([',', ';']).next().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_part_says_where_it_is_and_a_cluster_that_is_not_founded_is_named_as_the_reason() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).to_str().unwrap().to_owned();
    let (peer, node, warehouse) = (path("peer"), path("node"), path("warehouse"));
    let anywhere = "127.0.0.1:0";
    let args = ["metasrv", "--id", "1", "--listen", anywhere, "--raft-listen", anywhere, "--dir", &peer];
    let (_peer, line) = started(&args).await;
    let peers = address(&line, "clients at ");
    assert!(line.contains("peer 1, fresh: found a cluster") && line.contains("`lake meta init --at 127."), "{line}");
    assert!(line.ends_with(&format!("the log is {peer}/lake.log")), "{line}");

    let why = "belongs to no cluster yet: found one of all its peers with `lake meta init`";
    let put = lake(&["meta", "put", "/kv/a", "1", "--timeout-secs", "1", "--at", peers]).await;
    let said = String::from_utf8_lossy(&put.stderr);
    assert!(put.status.code() == Some(1) && said.contains(why), "{said}");

    std::fs::create_dir(&warehouse).unwrap();
    let args = ["query", "--listen", anywhere, "--rest-listen", anywhere, "--dir", &node, "--meta", peers];
    // The table is looked up a second time, for a second.
    let args = [&args[..], &["--warehouse", &warehouse, "--read-timeout-secs", "3"]].concat();
    let (_node, line) = started(&args).await;
    assert!(line.starts_with("lake query: SQL at 127.") && line.contains(", REST at 127."), "{line}");
    assert!(line.ends_with(&format!("the log is {node}/lake.log")), "{line}");
    let select = lake(&["sql", "--at", address(&line, "SQL at "), "-c", "SELECT * FROM t"]).await;
    let said = String::from_utf8_lossy(&select.stderr);
    assert!(!select.status.success() && said.contains(why), "{said}");
    assert!(!said.contains("()") && !said.contains("looking up tables: looking up tables"), "{said}");
}
