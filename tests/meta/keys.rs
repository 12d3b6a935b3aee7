//! Keys read and changed: by name, by prefix, in transactions; and what is said when that cannot be.

use serde_json::{Value, json};

use crate::common::{PATIENCE, Peers, printed, tool};

/// Every byte there is.
fn bytes() -> Vec<u8> {
    (0..=255).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_put_read_compared_and_deleted() {
    let peers = Peers::founded(3).await;

    let put = peers.meta(&["put", "/kv/greeting", "hello\nyou"]).await;
    assert_eq!(put.code, Some(0), "{put:?}");
    assert!(put.text().starts_with("/kv/greeting: written at revision "), "{put:?}");
    let get = peers.meta(&["get", "/kv/greeting"]).await;
    assert!(get.text().contains("value     hello\\nyou\n"), "{get:?}");
    let got = peers.done(&["get", "/kv/greeting"]).await;
    let entry = &got["entries"][0];
    assert_eq!((&entry["value"], &entry["version"]), (&json!("hello\nyou"), &json!(1)));
    // The writer's session may have been closed since, which has a revision, too.
    assert!(entry["mod_revision"].as_u64() <= got["revision"].as_u64() && entry["mod_revision"].is_u64(), "{got}");

    let missing = peers.meta(&["get", "/kv/greeting", "/kv/nothing"]).await;
    missing.ended(3, "there is no key \"/kv/nothing\"");
    let (code, both) = peers.json(&["get", "/kv/greeting", "/kv/nothing"]).await;
    assert_eq!((code, &both["missing"]), (Some(3), &json!(["/kv/nothing"])));
    peers.meta(&["get", "/kv/nothing", "--raw"]).await.ended(3, "/kv/nothing");

    // Any bytes go in and come out.
    let written = peers.meta_with(&["put", "/kv/binary", "--file", "-"], &bytes()).await;
    assert_eq!(written.code, Some(0), "{written:?}");
    assert_eq!(peers.meta(&["get", "/kv/binary", "--raw"]).await.out, bytes());
    let binary = peers.done(&["get", "/kv/binary"]).await;
    assert!(binary["entries"][0]["value_base64"].is_string() && binary["entries"][0]["value"].is_null(), "{binary}");
    std::fs::write(peers.path("value"), bytes()).unwrap();
    let file = peers.path("value");
    let written = peers.done(&["put", "/kv/binary", "--file", file.to_str().unwrap(), "--previous"]).await;
    assert_eq!(written["previous"], binary["entries"][0]);

    // Compare-and-set: the loser is told what is there.
    let made = peers.done(&["cas", "/lake/op/test/1", "--expect", "absent", "one"]).await;
    let at = made["revision"].as_u64().unwrap().to_string();
    let lost = peers.meta(&["cas", "/lake/op/test/1", "--expect", "absent", "two"]).await;
    assert_eq!(lost.code, Some(3), "{lost:?}");
    let text = lost.text();
    assert!(text.contains(&format!("no such key was expected, and it is at revision {at}")), "{text}");
    assert!(text.contains("one"), "{text}");
    let (code, lost) = peers.json(&["cas", "/lake/op/test/1", "--expect", "7777777", "two"]).await;
    assert_eq!((code, &lost["succeeded"]), (Some(3), &json!(false)));
    assert_eq!(
        (&lost["observed"][0]["value"], lost["observed"][0]["mod_revision"].to_string()),
        (&json!("one"), at.clone())
    );
    let won = peers.done(&["cas", "/lake/op/test/1", "--expect", &at, "-2", "--previous"]).await;
    assert_eq!((&won["previous"]["value"], &won["succeeded"]), (&json!("one"), &json!(true)));
    let gone = peers.meta(&["cas", "/lake/op/test/2", "--expect", &at, "x"]).await;
    assert_eq!(gone.code, Some(3));
    assert!(gone.text().contains("there is no such key"), "{gone:?}");

    // Deleting.
    let now = won["revision"].as_u64().unwrap().to_string();
    let (code, lost) = peers.json(&["delete", "/lake/op/test/1", "--expect", &at]).await;
    assert_eq!((code, lost["observed"][0]["mod_revision"].to_string()), (Some(3), now.clone()));
    let deleted = peers.done(&["delete", "/lake/op/test/1", "--expect", &now, "--previous"]).await;
    assert_eq!(deleted["previous"]["value"], "-2");
    assert_eq!(peers.meta(&["delete", "/kv/greeting"]).await.code, Some(0));
    let again = peers.meta(&["delete", "/kv/greeting"]).await;
    assert_eq!((again.code, again.text().as_str()), (Some(3), "/kv/greeting: there is no such key\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_contract_does_not_allow_is_refused_with_its_reason() {
    let peers = Peers::founded(1).await;
    peers.meta(&["put", "/lake/table/a/b", "x"]).await.ended(1, "is lake's own");
    peers.meta(&["delete", "/lake/table/a/b"]).await.ended(1, "is lake's own");
    peers.meta(&["put", "elsewhere", "x"]).await.ended(1, "lies neither under /lake/ nor under /kv/");
    let long = format!("/kv/{}", "k".repeat(5000));
    peers.meta(&["put", &long, "x"]).await.ended(1, "a key has 1 to 4096");
    peers.meta(&["get", &long]).await.ended(1, "a key has 1 to 4096");
    let large = vec![b'x'; (1 << 20) + 1];
    let refused = peers.meta_with(&["put", "/kv/large", "--file", "-"], &large).await;
    refused.ended(1, "standard input has more than 1048576 bytes, which is the most that a value may have");
    let largest = peers.meta_with(&["put", "/kv/large", "--file", "-"], &large[1..]).await;
    assert_eq!(largest.code, Some(0), "{largest:?}");
    peers.meta(&["put", "/kv/a", "--file", "/no/such/file"]).await.ended(1, "opening /no/such/file");

    // At a quota what grows is refused, and what shrinks is not.
    peers.done(&["settings", "quota", "--prefix", "/kv/small/", "--bytes", "30"]).await;
    assert_eq!(peers.meta(&["put", "/kv/small/a", "0123456789"]).await.code, Some(0));
    peers.meta(&["put", "/kv/small/b", "0123456789"]).await.ended(1, "more than its quota of 30 bytes");
    assert_eq!(peers.meta(&["delete", "/kv/small/a"]).await.code, Some(0));

    // The command line.
    for wrong in [
        &["cas", "/kv/a", "x"][..],
        &["cas", "/kv/a", "x", "--expect", "soon"],
        &["put", "/kv/a"],
        &["get"],
        &["get", "/kv/a", "--consistency", "eventually"],
        &["scope", "acquire", "/a"],
        &["watch", "--count", "0"],
        &["nonsense"],
    ] {
        let refused = peers.meta(wrong).await;
        assert_eq!(refused.code, Some(2), "{wrong:?}: {refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_closes_its_session_before_it_ends() {
    const COMMANDS: u64 = 12;
    let peers = Peers::founded(1).await;
    let revision = async || peers.done(&["list", "/kv/"]).await["revision"].as_u64().unwrap();
    let before = revision().await;
    for n in 0..COMMANDS {
        peers.done(&["put", "/kv/a", &n.to_string()]).await;
    }
    // Opened, written, closed. One that is not closed within two seconds, because the machine is busy, is left to its end.
    let made = revision().await - before;
    assert!((3 * COMMANDS - 2..=3 * COMMANDS).contains(&made), "{made} revisions of {COMMANDS} commands");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_is_listed_in_pages_of_one_revision() {
    let peers = Peers::founded(3).await;
    let put = |n: u32| json!({ "put": { "key": format!("/kv/many/{n:04}"), "value": "v".repeat(100) } });
    let puts: Vec<Value> = (0..1000).map(put).collect();
    let document = json!({ "then": puts }).to_string();
    let loaded = peers.meta_with(&["txn", "-"], document.as_bytes()).await;
    assert_eq!(loaded.code, Some(0), "{}", loaded.err);
    let more = json!({ "then": (1000..1500).map(put).collect::<Vec<_>>() }).to_string();
    let written = peers.meta_with(&["txn", "-"], more.as_bytes()).await.json()["revision"].as_u64().unwrap();

    let first = peers.done(&["list", "/kv/many/", "--limit", "600"]).await;
    // The sessions of the writers may have been closed since, which has revisions, too.
    let revision = &first["revision"];
    assert!(revision.as_u64().unwrap() >= written, "{revision} is not after {written}");
    assert_eq!(first["entries"].as_array().unwrap().len(), 600);
    assert_eq!(
        first["entries"][7],
        json!({
            "key": "/kv/many/0007", "value_bytes": 100, "version": 1, "create_revision": first["entries"][0]["mod_revision"],
            "mod_revision": first["entries"][0]["mod_revision"], "lease": null,
        })
    );
    peers.done(&["put", "/kv/many/0700-later", "x"]).await;
    let page = first["next_page"].as_str().unwrap();
    let second = peers.done(&["list", "/kv/many/", "--page", page, "--limit", "0"]).await;
    let keys: Vec<_> = second["entries"].as_array().unwrap().iter().map(|e| e["key"].clone()).collect();
    assert_eq!((keys.len(), &keys[0], &second["revision"]), (900, &json!("/kv/many/0600"), revision));
    assert!(!keys.contains(&json!("/kv/many/0700-later")), "it came after the first page");
    peers.meta(&["list", "/kv/many/", "--page", "nonsense"]).await.ended(1, "not one that this listing gave");

    let all = peers.done(&["list", "/kv/many/", "--limit", "0"]).await;
    assert_eq!((all["entries"].as_array().unwrap().len(), &all["more"]), (1501, &json!(false)));
    let table = peers.meta(&["list", "/kv/many/", "--limit", "1200"]).await;
    assert_eq!(table.text().lines().count(), 1201, "one heading over all pages");
    assert!(table.err.contains("--page"), "{}", table.err);
    assert!(table.text().lines().next().unwrap().starts_with("KEY"));
    assert_eq!(peers.meta(&["list", "/kv/none/"]).await.code, Some(0));

    // With values, and several prefixes at once.
    let values = peers.done(&["get", "--prefix", "/kv/many/000", "--limit", "5"]).await;
    assert_eq!((values["entries"].as_array().unwrap().len(), &values["more"]), (5, &json!(true)));
    assert_eq!(values["entries"][0]["value"], "v".repeat(100));
    let args = ["get", "--prefix", "/kv/many/000", "/kv/many/100", "--revision-consistent"];
    let both = peers.done(&args).await;
    assert_eq!((both["entries"].as_array().unwrap().len(), both["revision"].is_u64()), (20, true));
    let table = peers.meta(&["get", "--prefix", "/kv/many/0001"]).await;
    assert!(table.text().contains(&format!("{}... (100 bytes)", "v".repeat(80))), "{table:?}");

    // A reader that has enough ends it without a complaint.
    let mut command = peers.command(&["list", "--limit", "0", "--format", "json"]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().await.unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(0), ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_names_its_consistency_and_may_name_its_peer() {
    let mut peers = Peers::founded(3).await;
    peers.done(&["put", "/kv/a", "1"]).await;
    let revision = peers.done(&["put", "/kv/a", "2"]).await["revision"].as_u64().unwrap().to_string();
    for peer in ["1", "2", "3", &peers.address(2)] {
        for consistency in ["linearizable", "bounded:60000"] {
            let args = ["get", "/kv/a", "--peer", peer, "--consistency", consistency, "--min-revision", &revision];
            assert_eq!(peers.done(&args).await["entries"][0]["value"], "2", "{args:?}");
        }
        let args = ["get", "/kv/a", "--peer", peer, "--consistency", "local", "--min-revision", &revision];
        assert_eq!(peers.done(&args).await["entries"][0]["value"], "2");
        assert_eq!(peers.done(&["list", "/kv/", "--peer", peer]).await["entries"][0]["key"], "/kv/a");
    }
    peers.meta(&["get", "/kv/a", "--peer", "9"]).await.ended(1, "peer 9 does not answer, or is no member");
    peers.meta(&["get", "/kv/a", "--peer", "x"]).await.ended(1, "neither a peer's id nor HOST:PORT");
    let ahead = ["get", "/kv/a", "--consistency", "local", "--min-revision", "999999", "--timeout-secs", "1"];
    peers.meta(&ahead).await.ended(1, "safe to try again");

    // Without a quorum a local read is all that there is.
    let leader = peers.leader().await;
    let alone = (1..=3).find(|id| *id != leader).unwrap();
    for id in (1..=3).filter(|id| *id != alone) {
        peers.kill(id);
    }
    assert_eq!(peers.done(&["get", "/kv/a", "--consistency", "local"]).await["entries"][0]["value"], "2");
    let blocked = peers.meta(&["get", "/kv/a", "--timeout-secs", "2"]).await;
    blocked.ended(1, "Nothing was changed: it is safe to try again.");
    let blocked = peers.meta(&["cas", "/kv/a", "3", "--expect", &revision, "--timeout-secs", "2"]).await;
    assert!(matches!(blocked.code, Some(1 | 4)), "{blocked:?}");
    assert!(blocked.err.contains("the metadata cluster is unreachable"), "{blocked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_is_a_document() {
    let peers = Peers::founded(3).await;
    let run = async |document: Value| {
        let printed = peers.meta_with(&["txn", "-"], document.to_string().as_bytes()).await;
        (printed.code, printed.json())
    };
    let (code, made) = run(json!({
        "when": [{ "key": "/kv/a", "absent": true }, { "prefix": "/kv/", "empty": true }],
        "then": [
            { "put": { "key": "/kv/a", "value": "1" } },
            { "put": { "key": "/kv/b", "value_base64": "/wA=" } },
            { "get": { "key": "/kv/a" } },
            { "list": { "prefix": "/kv/", "limit": 1 } }
        ]
    }))
    .await;
    assert_eq!((code, &made["branch"]), (Some(0), &json!("then")));
    let revision = &made["revision"];
    assert_eq!(made["results"][2]["get"]["entry"]["mod_revision"], *revision, "operations see those before them");
    assert_eq!((&made["results"][3]["list"]["more"], &made["observed"]), (&json!(true), &json!([])));

    let again = json!({
        "when": [{ "key": "/kv/a", "value": "2" }, { "key": "/kv/b", "mod_revision": revision }],
        "then": [{ "delete": { "key": "/kv/a" } }],
        "otherwise": [{ "delete": { "key": "/kv/b", "return_previous": true } }, { "get": { "key": "/kv/none" } }]
    });
    let (code, lost) = run(again).await;
    assert_eq!((code, &lost["branch"], &lost["succeeded"]), (Some(3), &json!("otherwise"), &json!(false)));
    assert_eq!(lost["results"][0]["delete"]["previous"]["value_base64"], "/wA=");
    assert_eq!(lost["results"][1], json!({ "get": { "entry": null } }));
    let observed: Vec<_> = lost["observed"].as_array().unwrap().iter().map(|e| e["key"].clone()).collect();
    assert_eq!(observed, ["/kv/a", "/kv/b"], "what the compares looked at");

    // From a file; and what means nothing.
    let file = peers.path("txn.json");
    std::fs::write(&file, r#"{"then": [{"put": {"key": "/kv/c", "value": "3"}}]}"#).unwrap();
    assert_eq!(peers.meta(&["txn", file.to_str().unwrap()]).await.code, Some(0));
    for (document, why) in [
        ("{", "EOF while parsing"),
        (r#"{"then": [{"put": {"key": "/kv/c"}}]}"#, "then[0]: a put has a value"),
        (r#"{"when": [{"key": "/kv/c", "absnet": true}]}"#, "unknown field `absnet`"),
        (r#"{"then": [{"put": {"key": "/lake/a", "value": ""}}]}"#, "is lake's own"),
        (r#"{"then": [{"list": {"prefix": "", "limit": 2000}}]}"#, "1 to 1000"),
    ] {
        peers.meta_with(&["txn", "-"], document.as_bytes()).await.ended(1, why);
    }
    let many = vec![json!({ "get": { "key": "/kv/a" } }); 1025];
    peers.meta_with(&["txn", "-"], json!({ "then": many }).to_string().as_bytes()).await.ended(1, "at most 1024");
    peers.meta(&["txn", "/no/such/file"]).await.ended(1, "opening /no/such/file");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_cluster_it_says_where_it_looked() {
    let nowhere = ["get", "/kv/a", "--at", "127.0.0.1:1", "--timeout-secs", "1"];
    let printed = printed(tool(&nowhere), b"").await;
    printed.ended(1, "127.0.0.1:1");
    assert!(printed.err.contains("unreachable") && printed.err.contains("safe to try again"), "{printed:?}");
    let dir = tempfile::tempdir().unwrap();
    let mut here = tool(&["put", "/kv/a", "1"]);
    here.current_dir(dir.path());
    crate::common::printed(here, b"").await.ended(1, "say where the cluster is with --at");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_printed_may_have_been_done() {
    let peers = Peers::founded(1).await;
    let ended = async |args: &[&str]| {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = peers.command(args);
        command.stdout(full).stderr(std::process::Stdio::piped());
        let ended = command.spawn().unwrap().wait_with_output();
        tokio::time::timeout(PATIENCE, ended).await.expect("it ends").unwrap()
    };
    let put = ended(&["put", "/kv/a", "1"]).await;
    let said = String::from_utf8(put.stderr).unwrap();
    assert_eq!(put.status.code(), Some(4), "{said}");
    assert!(said.contains("may already have been done"), "{said}");
    assert_eq!(peers.done(&["get", "/kv/a"]).await["entries"][0]["value"], "1");
    assert_eq!(ended(&["get", "/kv/a"]).await.status.code(), Some(1), "a read has done nothing");
}
