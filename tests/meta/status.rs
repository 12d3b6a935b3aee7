//! What is told of a cluster, well and not; and its settings.

use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::common::{PATIENCE, Peers, printed, tool, until};

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_of_each_peer_what_can_be_compared() {
    let mut peers = Peers::founded(3).await;
    peers.done(&["put", "/kv/a", "1234567890"]).await;
    // Followers apply a little later.
    let status = until("all peers to have applied the same", async || {
        let (_, status) = peers.json(&["status"]).await;
        let of = |name: &str| -> Vec<Value> {
            status["peers"].as_array().unwrap().iter().map(|p| p[name].clone()).collect()
        };
        let hashes = of("state_hash");
        let same = hashes.iter().all(|hash| *hash == hashes[0] && hash["index"] == status["peers"][0]["applied_index"]);
        if same && of("revision").iter().all(|r| *r == status["revision"]) {
            Ok(status)
        } else {
            Err(status.to_string())
        }
    })
    .await;
    let list = status["peers"].as_array().unwrap();
    assert_eq!(list.len(), 3);
    assert_eq!((&status["problems"], &status["keys"], &status["map_bytes"]), (&json!([]), &json!(1), &json!(15)));
    assert!(
        status["map_limit_bytes"].as_u64().unwrap() > 0 && status["feature_level"].as_u64().unwrap() > 0,
        "{status}"
    );
    for peer in list {
        assert_eq!(peer["state_hash"]["hash"].as_str().unwrap().len(), 32);
        assert_eq!((&peer["cluster_id"], &peer["term"]), (&status["cluster_id"], &status["term"]));
        assert!(peer["disk"]["data_bytes"].as_u64().unwrap() > 0 && peer["disk"]["free_bytes"].as_u64().unwrap() > 0);
        assert!(peer["lag_entries"].as_u64().is_some(), "{peer}");
        assert!(["leader", "follower"].contains(&peer["role"].as_str().unwrap()));
    }
    let text = peers.meta(&["status"]).await.text();
    for part in ["led by peer", "map: 1 keys, 15 B of 4.0 GiB", "STATE HASH", "leader", "follower"] {
        assert!(text.contains(part), "{part}: {text}");
    }

    // Asked of one peer, the others are found through it; also the one that is down.
    peers.kill(3);
    let one = ["status", "--format", "json", "--at", &peers.address(1)];
    let status = until("the loss to be told", async || {
        let printed = printed(tool(&one), b"").await;
        if printed.code == Some(3) { Ok(printed.json()) } else { Err(format!("{printed:?}")) }
    })
    .await;
    assert!(status["peers"].as_array().unwrap().iter().any(|p| p["role"] == "unreachable"), "{status}");
    assert!(!status["problems"].as_array().unwrap().is_empty());

    // Without a quorum nobody leads.
    peers.kill(2);
    until("no leader", async || {
        let printed = peers.meta(&["status"]).await;
        let told = printed.code == Some(1) && printed.text().contains("no peer leads");
        if told { Ok(()) } else { Err(format!("{printed:?}")) }
    })
    .await;
    peers.meta(&["members", "list"]).await.ended(1, "no peer leads");
    let put = peers.meta(&["put", "/kv/a", "1", "--timeout-secs", "2"]).await;
    put.ended(1, "know of no leader: without a majority of the voters there is none");
    let mut elsewhere = tool(&["status"]);
    elsewhere.env("LAKE_QUERY", "127.0.0.1:1").current_dir(peers.path(""));
    printed(elsewhere, b"").await.ended(1, "(LAKE_QUERY, which is set, names query nodes)");
    let nobody = printed(tool(&["status", "--at", "127.0.0.1:1"]), b"").await;
    assert_eq!(nobody.code, Some(1), "{nobody:?}");
    assert!(nobody.text().contains("cluster unknown: no peer answers"), "{nobody:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn quotas_are_set_shown_and_warned_of() {
    let peers = Peers::founded(1).await;
    let set = peers.meta(&["settings", "quota", "--prefix", "/kv/team/", "--bytes", "1KiB"]).await;
    assert_eq!((set.code, set.text().as_str()), (Some(0), "the quota of /kv/team/ is 1.0 KiB\n"), "{set:?}");
    peers.done(&["put", "/kv/team/a", &"x".repeat(900)]).await;
    let shown = peers.done(&["settings", "show"]).await;
    assert_eq!(shown["quotas"][1], json!({ "prefix": "/kv/team/", "limit_bytes": 1024, "used_bytes": 910 }));
    assert!(shown["feature_level"].as_u64().unwrap() <= shown["peers"][0]["supported_feature_level"].as_u64().unwrap());
    let text = peers.meta(&["settings", "show"]).await.text();
    assert!(text.contains("the whole map") && text.contains("88.9 %") && text.contains("feature level"), "{text}");
    let (code, status) = peers.json(&["status"]).await;
    assert_eq!(code, Some(3), "{status}");
    assert!(status["problems"][0].as_str().unwrap().contains("/kv/team/"), "{status}");

    peers.done(&["settings", "quota", "--prefix", "/kv/team/", "--unlimited"]).await;
    assert_eq!(peers.done(&["settings", "show"]).await["quotas"].as_array().unwrap().len(), 1);
    assert_eq!(peers.meta(&["status"]).await.code, Some(0));
    peers.done(&["settings", "quota", "--bytes", "8GiB"]).await;
    assert_eq!(peers.done(&["settings", "show"]).await["quotas"][0]["limit_bytes"], 8u64 << 30);
    peers.meta(&["settings", "quota", "--prefix", "kv/", "--bytes", "1"]).await.ended(1, "no prefix of keys");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_with_a_secret_wants_it_and_nobody_prints_it() {
    let dir = tempfile::tempdir().unwrap();
    let (right, wrong) = (dir.path().join("secret"), dir.path().join("wrong"));
    let secret = "correct-horse-battery-staple";
    std::fs::write(&right, secret).unwrap();
    std::fs::write(&wrong, "incorrect-horse-battery").unwrap();
    let option = ["--secret-file", right.to_str().unwrap()];
    let mut peers = Peers::founded_with(1, &option, &option).await;
    let put = peers.meta(&["put", "/kv/a", "1"]).await;
    assert_eq!(put.code, Some(0), "{put:?}");

    for (file, why) in [(None, "this cluster has a secret"), (Some(&wrong), "the cluster secret is wrong")] {
        peers.tool_args =
            file.map(|file| ["--secret-file".to_owned(), file.display().to_string()].into()).unwrap_or_default();
        for args in [&["get", "/kv/a"][..], &["status"], &["watch", "--count", "1"], &["members", "list"]] {
            let args = [args, &["--timeout-secs", "2"]].concat();
            let refused = peers.meta(&args).await;
            assert_ne!(refused.code, Some(0), "{args:?}: {refused:?}");
            let said = refused.text() + &refused.err;
            assert!(said.contains(why) || args[0] == "members", "{args:?}: {said}");
            assert!(!said.contains(secret) && !said.contains("incorrect-horse"), "{said}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_is_interrupted_leaves_nothing_behind() {
    let peers = Peers::founded(1).await;
    let file = peers.path("saved.snap");
    let begun = || {
        let entries = std::fs::read_dir(peers.path("")).unwrap();
        entries.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains(".saving-")).count()
    };
    peers.signal(1, Signal::STOP);
    let mut command = peers.command(&["snapshot", "save", file.to_str().unwrap(), "--timeout-secs", "60"]);
    let process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    until("the file to be begun", async || if begun() == 1 { Ok(()) } else { Err("nothing is there".to_owned()) })
        .await;
    kill_process(Pid::from_raw(process.id().unwrap() as i32).unwrap(), Signal::INT).unwrap();
    let ended = tokio::time::timeout(PATIENCE, process.wait_with_output()).await.expect("it ends").unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    assert_eq!((begun(), file.exists()), (0, false));

    // The time that is given counts. The quickest of some, for a machine that is busy with other things.
    let mut quickest = PATIENCE;
    for _ in 0..3 {
        let began = std::time::Instant::now();
        let late = peers.meta(&["snapshot", "save", file.to_str().unwrap(), "--timeout-secs", "1"]).await;
        late.ended(1, "nothing was written");
        quickest = quickest.min(began.elapsed());
    }
    assert!(quickest < std::time::Duration::from_secs(8), "{quickest:?}");
    peers.signal(1, Signal::CONT);
    assert_eq!(peers.meta(&["snapshot", "save", file.to_str().unwrap()]).await.code, Some(0));
}
