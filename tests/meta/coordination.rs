//! Leases and scopes by hand.

use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::common::{PATIENCE, Peers};

/// Grants a lease of a minute.
async fn grant(peers: &Peers, holder: &str) -> String {
    let granted = peers.done(&["lease", "grant", "--ttl-secs", "60", "--holder", holder]).await;
    granted["id"].as_u64().unwrap().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_granted_shown_kept_alive_and_ended_with_its_keys() {
    let peers = Peers::founded(3).await;
    let (lease, other) = (grant(&peers, "node-7").await, grant(&peers, "node-8").await);
    let listed = peers.done(&["lease", "list"]).await;
    let holders: Vec<_> = listed["leases"].as_array().unwrap().iter().map(|l| l["holder"].clone()).collect();
    assert_eq!(holders, ["node-7", "node-8"]);

    peers.done(&["put", "/kv/mine", "1", "--lease", &lease]).await;
    peers.done(&["cas", "/lake/node/7", "up", "--expect", "absent", "--lease", &lease]).await;
    peers.done(&["scope", "acquire", "/catalog/a", "--lease", &lease]).await;
    let shown = peers.done(&["lease", "show", &lease]).await;
    assert_eq!(
        (&shown["keys"], &shown["scopes"], &shown["ttl_ms"]),
        (&json!(2), &json!(["/catalog/a"]), &json!(60000))
    );
    let shown = peers.meta(&["lease", "show", &lease]).await.text();
    assert!(shown.contains("node-7") && shown.contains("owns the scope /catalog/a"), "{shown}");

    let renewed = peers.meta(&["lease", "keep-alive", &lease, "--once"]).await;
    assert_eq!(renewed.code, Some(0), "{renewed:?}");
    assert!(renewed.text().starts_with(&format!("lease {lease}: held for ")), "{renewed:?}");

    // Kept alive until it is interrupted, or the lease is ended by somebody else.
    let keep = |lease: &str| {
        let mut command = peers.command(&["lease", "keep-alive", lease, "--format", "json"]);
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        (process, lines)
    };
    let (process, mut lines) = keep(&other);
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("it is renewed").unwrap().unwrap();
    assert!(line.contains("\"held_ms\":"), "{line}");
    kill_process(Pid::from_raw(process.id().unwrap() as i32).unwrap(), Signal::INT).unwrap();
    let ended = tokio::time::timeout(PATIENCE, process.wait_with_output()).await.expect("it ends").unwrap();
    assert_eq!(ended.status.code(), Some(0));
    let short = peers.done(&["lease", "grant", "--ttl-secs", "30"]).await["id"].to_string();
    let (process, mut lines) = keep(&short);
    tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("it is renewed").unwrap().unwrap();
    assert_eq!(peers.meta(&["lease", "revoke", &short]).await.code, Some(0));
    let ended = tokio::time::timeout(PATIENCE, process.wait_with_output()).await.expect("it ends").unwrap();
    assert_eq!(ended.status.code(), Some(3));
    assert!(String::from_utf8(ended.stderr).unwrap().contains(&format!("lease {short} is over")));

    // Its end takes everything with it.
    let revoked = peers.meta(&["lease", "revoke", &lease]).await;
    assert_eq!((revoked.code, revoked.text()), (Some(0), format!("lease {lease} was ended\n")));
    assert_eq!(peers.meta(&["get", "/kv/mine", "/lake/node/7"]).await.code, Some(3));
    assert_eq!(peers.meta(&["scope", "show", "/catalog/a"]).await.code, Some(3));
    peers.meta(&["lease", "show", &lease]).await.ended(3, "there is no lease");
    peers.meta(&["lease", "keep-alive", &lease]).await.ended(3, "there is no lease");
    assert_eq!(peers.meta(&["lease", "revoke", &lease]).await.code, Some(3));
    let late = peers.meta(&["put", "/kv/mine", "2", "--lease", &lease]).await;
    assert_eq!((late.code, late.text()), (Some(3), format!("/kv/mine: not written: lease {lease} is over\n")));
    let late = peers.meta(&["cas", "/kv/mine", "2", "--expect", "absent", "--lease", &lease]).await;
    assert_eq!((late.code, late.text()), (Some(3), format!("/kv/mine: not written: lease {lease} is over\n")));

    for wrong in ["0", "61"] {
        let refused = peers.meta(&["lease", "grant", "--ttl-secs", wrong]).await;
        refused.ended(1, "it may be 1000 to 60000 ms");
    }
    let long = "x".repeat(300);
    peers.meta(&["lease", "grant", "--holder", &long]).await.ended(1, "at most 256");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_is_held_by_one_and_the_others_are_told_by_whom() {
    let peers = Peers::founded(3).await;
    let (mine, theirs) = (grant(&peers, "my backup").await, grant(&peers, "their rename").await);
    let acquired = peers.done(&["scope", "acquire", "/c/sales", "/c/old", "--lease", &mine]).await;
    let fence = acquired["fences"]["/c/sales"].as_u64().unwrap();
    assert_eq!((&acquired["revision"], &acquired["fences"]["/c/old"]), (&json!(fence), &json!(fence)));
    let again = peers.done(&["scope", "acquire", "/c/sales", "--lease", &mine]).await;
    assert_eq!(again["fences"]["/c/sales"], fence, "held already: it stays as it is");

    // An ancestor, a descendant, and one path of several: none is claimed.
    for paths in [&["/c"][..], &["/c/sales/orders"], &["/c/free", "/c/old"]] {
        let (code, refused) = peers.json(&[&["scope", "acquire"][..], paths, &["--lease", &theirs]].concat()).await;
        assert_eq!((code, &refused["succeeded"]), (Some(3), &json!(false)), "{refused}");
        assert_eq!(refused["conflicts"][0]["owner"]["lease"].to_string(), mine, "{refused}");
    }
    let refused = peers.meta(&["scope", "acquire", "/c/sales/orders", "--procedure", "p-1"]).await;
    assert_eq!(refused.code, Some(3));
    let text = refused.text();
    assert!(text.starts_with("not claimed") && text.contains("my backup") && text.contains("/c/sales"), "{text}");
    assert!(text.contains(&fence.to_string()) && text.contains("Z"), "since when: {text}");

    let shown = peers.done(&["scope", "show", "/c/sales/orders/2026"]).await;
    assert_eq!(shown["scopes"][0]["path"], "/c/sales");
    assert_eq!(peers.done(&["scope", "show", "/"]).await["scopes"].as_array().unwrap().len(), 2);
    peers.meta(&["scope", "show", "/c/sale"]).await.ended(3, "nobody holds");
    peers.meta(&["scope", "show", "c"]).await.ended(1, "is no scope path");
    let listed = peers.meta(&["scope", "list", "/c/s"]).await.text();
    assert!(listed.contains("/c/sales") && !listed.contains("/c/old"), "{listed}");

    // Released in the owner's name only.
    let wrong = peers.meta(&["scope", "release", "/c/old", "--lease", &theirs]).await;
    assert_eq!(wrong.code, Some(3), "{wrong:?}");
    assert!(wrong.text().contains("does not hold it"), "{wrong:?}");
    assert_eq!(
        peers.done(&["scope", "release", "/c/old", "--lease", &mine]).await["released"],
        json!({ "/c/old": true })
    );
    let taken = peers.done(&["scope", "acquire", "/c/old", "--procedure", "rename-1"]).await;
    assert!(taken["fences"]["/c/old"].as_u64().unwrap() > fence);
    assert_eq!(peers.meta(&["lease", "revoke", &mine]).await.code, Some(0));
    let left = peers.done(&["scope", "list"]).await;
    assert_eq!(
        left["scopes"][0]["owner"],
        json!({ "procedure": "rename-1" }),
        "a procedure's scope has no end of its own"
    );
    assert_eq!(left["scopes"].as_array().unwrap().len(), 1);
    let over = peers.meta(&["scope", "acquire", "/c/sales", "--lease", &mine]).await;
    assert_eq!((over.code, over.text()), (Some(3), format!("not claimed: lease {mine} is over\n")));
    assert_eq!(peers.meta(&["scope", "release", "/c/old", "--procedure", "rename-1"]).await.code, Some(0));
}
