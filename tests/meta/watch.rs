//! Changes as they happen, whichever peer lives.

use std::process::Stdio;
use std::time::Instant;

use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::store::MetaStore;
use lake_proto::kv::{Op, Txn};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

use crate::common::{PATIENCE, Peers};

/// A watch under way.
struct Watching {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Watching {
    fn start(peers: &Peers, args: &[&str]) -> Self {
        let mut command = peers.command(&[&["watch"][..], args].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines }
    }

    async fn line(&mut self) -> String {
        let line = tokio::time::timeout(PATIENCE, self.lines.next_line()).await.expect("a line comes").unwrap();
        line.expect("the watch goes on")
    }

    async fn json(&mut self) -> Value {
        serde_json::from_str(&self.line().await).unwrap()
    }

    /// How it ended, and what it said on standard error.
    async fn ended(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        let mut err = self.process.stderr.take().unwrap();
        tokio::time::timeout(PATIENCE, err.read_to_string(&mut said)).await.expect("it ends").unwrap();
        (self.process.wait().await.unwrap().code(), said)
    }

    fn interrupt(&self) {
        let pid = Pid::from_raw(self.process.id().expect("it runs") as i32).unwrap();
        kill_process(pid, Signal::INT).unwrap();
    }
}

/// Creates a key, whoever leads. Gives the revision.
async fn create(peers: &Peers, key: &str) -> u64 {
    // A compare-and-set whose answer was lost with the peer may be found done.
    let (code, json) = peers.json(&["cas", key, "--expect", "absent", key]).await;
    match code {
        Some(0) => json["revision"].as_u64().unwrap(),
        Some(4) => json["observed"][0]["mod_revision"].as_u64().unwrap(),
        other => panic!("{other:?}: {json}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_goes_on_when_the_peer_that_it_talks_to_is_killed() {
    let mut peers = Peers::founded(3).await;
    let first = create(&peers, "/kv/seen/0").await;
    let from = first.to_string();
    let mut watch = Watching::start(&peers, &["/kv/seen/", "--from", &from, "--format", "json"]);
    let mut expected = vec![first];
    let change = watch.json().await;
    assert_eq!((&change["revision"], &change["events"][0]["key"]), (&json!(first), &json!("/kv/seen/0")));

    // Each peer in turn, so that the one that serves the watch is among them, wherever it goes.
    for id in 1..=3 {
        peers.kill(id);
        expected.push(create(&peers, &format!("/kv/seen/{id}-down")).await);
        create(&peers, &format!("/kv/other/{id}")).await;
        peers.start(id);
        expected.push(create(&peers, &format!("/kv/seen/{id}-up")).await);
        for revision in &expected[expected.len() - 2..] {
            assert_eq!(watch.json().await["revision"], json!(revision), "nothing is missing, and nothing comes twice");
        }
        crate::common::until("every peer to be back", async || {
            let printed = peers.meta(&["status"]).await;
            if printed.code == Some(0) { Ok(()) } else { Err(printed.text()) }
        })
        .await;
    }
    watch.interrupt();
    let (code, said) = watch.ended().await;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("go on with --from "), "{said}");

    // Whoever comes later sees the same.
    let mut again = Watching::start(&peers, &["/kv/seen/", "--from", &from, "--count", "7"]);
    for revision in &expected {
        assert!(again.line().await.starts_with(&format!("{revision} put /kv/seen/")));
    }
    assert_eq!(again.ended().await.0, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_is_told_whole_and_progress_if_asked_for() {
    let peers = Peers::founded(1).await;
    let created = create(&peers, "/kv/a").await;
    let from = created.to_string();
    let document = json!({ "then": [
        { "delete": { "key": "/kv/a" } },
        { "put": { "key": "/kv/b", "value_base64": "/wA=" } },
        { "put": { "key": "/kv/c", "value": "1\n2" } }
    ] });
    peers.meta_with(&["txn", "-"], document.to_string().as_bytes()).await;

    let mut text = Watching::start(&peers, &["/kv/", "--from", &from, "--count", "2"]);
    assert_eq!(text.line().await, format!("{created} put /kv/a /kv/a"));
    // Between the two each command has opened a session, which has a revision, too.
    let first = text.line().await;
    let next: u64 = first.split(' ').next().and_then(|revision| revision.parse().ok()).unwrap();
    assert!(next > created && first == format!("{next} delete /kv/a"), "{first}");
    for line in [format!("{next} put /kv/b 0xff00"), format!("{next} put /kv/c 1\\n2")] {
        assert_eq!(text.line().await, line);
    }
    assert_eq!(text.ended().await.0, Some(0));

    let mut watch = Watching::start(&peers, &["/kv/", "--from", &next.to_string(), "--progress", "--format", "json"]);
    let change = watch.json().await;
    assert_eq!(change["events"].as_array().unwrap().len(), 3);
    assert_eq!(change["events"][0], json!({ "type": "delete", "key": "/kv/a" }));
    assert_eq!(change["events"][1]["entry"]["value_base64"], "/wA=");
    // Outside of what is watched, progress is all that comes.
    let elsewhere = create(&peers, "/lake/op/test/1").await;
    while watch.json().await["progress"].as_u64().expect("progress") < elsewhere {}
    watch.interrupt();
    assert_eq!(watch.ended().await.0, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_that_are_no_longer_kept_are_told_as_such() {
    let peers = Peers::founded(1).await;
    let store = RemoteStore::connect(RemoteConfig { endpoints: vec![peers.address(1)], secret: None }).unwrap();
    // More than the 64 MiB that are kept.
    for round in 0..11 {
        let put = |n| Op::put(format!("/kv/large/{n}"), vec![round; 1 << 20]);
        let txn = Txn { then: (0..7).map(put).collect(), ..Txn::default() };
        store.commit(txn, Instant::now() + PATIENCE).await.unwrap();
    }
    let (code, said) = Watching::start(&peers, &["/kv/", "--from", "1"]).ended().await;
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("no longer kept") && said.contains("list again"), "{said}");
    let from = said.split("watched from is ").nth(1).unwrap();
    let oldest: u64 = from.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
    let mut kept = Watching::start(&peers, &["/kv/", "--from", &oldest.to_string(), "--count", "1"]);
    assert!(kept.line().await.starts_with(&format!("{oldest} put /kv/large/")));
}
