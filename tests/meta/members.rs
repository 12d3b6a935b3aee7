//! The life of a cluster by hand: real peers join, vote, are replaced and removed.

use serde_json::{Value, json};

use crate::common::{Peers, until};

async fn listed(peers: &Peers) -> Vec<(u64, String)> {
    let members = peers.done(&["members", "list"]).await["members"].clone();
    let member = |m: &Value| (m["id"].as_u64().unwrap(), m["role"].as_str().unwrap().to_owned());
    members.as_array().unwrap().iter().map(member).collect()
}

fn voters(members: &[(u64, String)]) -> Vec<u64> {
    members.iter().filter(|(_, role)| role != "learner").map(|(id, _)| *id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_join_vote_and_are_removed_and_the_leadership_moves() {
    let mut peers = Peers::founded(3).await;
    peers.done(&["put", "/kv/a", "1"]).await;
    assert_eq!(voters(&listed(&peers).await), [1, 2, 3]);

    // A fresh peer is there before it is asked for; then a learner, then a voter.
    let nobody = peers.meta(&["members", "add", "127.0.0.1:1", "--timeout-secs", "5"]).await;
    nobody.ended(1, "127.0.0.1:1");
    peers.start(4);
    let at = peers.address(4);
    until("the fresh peer to answer", async || {
        let status = peers.json(&["status"]).await.1;
        status["peers"].as_array().unwrap().iter().any(|p| p["role"] == "fresh").then_some(()).ok_or(status.to_string())
    })
    .await;
    let added = peers.done(&["members", "add", &at]).await;
    assert_eq!((&added["id"], &added["joined"]), (&json!(4), &json!(true)));
    assert!(listed(&peers).await.contains(&(4, "learner".to_owned())));
    assert_eq!(peers.done(&["members", "add", &at]).await["joined"], false, "asked again, it is the same");
    assert_eq!(peers.done(&["members", "promote", "4"]).await["voter"], true);
    assert_eq!(peers.meta(&["members", "promote", "4"]).await.text(), "peer 4 votes\n");
    peers.meta(&["members", "promote", "9"]).await.ended(1, "9");
    assert_eq!(voters(&listed(&peers).await), [1, 2, 3, 4]);
    let table = peers.meta(&["members", "list"]).await.text();
    assert!(table.contains(&at) && table.contains("leader"), "{table}");

    // The leadership goes where it is told.
    let leader = peers.leader().await;
    let to = if leader == 4 { 1 } else { 4 };
    let moved = peers.done(&["transfer-leader", &to.to_string()]).await;
    assert_eq!(moved["leader"], to);
    peers.meta(&["transfer-leader", "9"]).await.ended(1, "9");

    // Removed for good: the process ends, and its id is never used again.
    let removed = peers.meta(&["members", "remove", "3"]).await;
    assert_eq!((removed.code, removed.text().as_str()), (Some(0), "peer 3 is removed\n"), "{removed:?}");
    assert_ne!(peers.ended(3).await, Some(0));
    assert_eq!(peers.meta(&["members", "remove", "3"]).await.text(), "peer 3 was removed before\n");
    assert_eq!(voters(&listed(&peers).await), [1, 2, 4]);
    peers.meta(&["members", "remove", "77"]).await.ended(1, "77");
    assert_eq!(peers.done(&["get", "/kv/a"]).await["entries"][0]["value"], "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn five_peers_are_founded_as_one_cluster_that_bears_the_loss_of_two() {
    let mut peers = Peers::founded(5).await;
    assert_eq!(voters(&listed(&peers).await), [1, 2, 3, 4, 5]);
    let again = peers.meta(&["init"]).await;
    assert!(again.code == Some(0) && again.text().contains("was founded before, of the same peers"), "{again:?}");
    let leader = peers.leader().await;
    let other = if leader == 1 { 2 } else { 1 };
    peers.kill(leader);
    peers.kill(other);
    peers.done(&["put", "/kv/a", "1"]).await;
    assert_eq!(peers.done(&["get", "/kv/a"]).await["entries"][0]["value"], "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_is_gone_for_good_is_replaced() {
    let mut peers = Peers::founded(3).await;
    peers.done(&["put", "/kv/a", "1"]).await;
    peers.kill(2);
    let status = until("the loss to be seen", async || {
        let printed = peers.meta(&["status"]).await;
        let told = printed.code == Some(3) && printed.text().contains("unreachable");
        if told { Ok(printed.text()) } else { Err(format!("{printed:?}")) }
    })
    .await;
    assert!(status.contains("problem: "), "{status}");

    peers.start(5);
    let by = peers.address(5);
    until("the fresh peer to answer", async || {
        let printed = peers.meta(&["status"]).await.text();
        if printed.contains("fresh") { Ok(()) } else { Err(printed) }
    })
    .await;
    let replaced = peers.done(&["members", "replace", "2", "--by", &by]).await;
    assert_eq!(replaced, json!({ "id": 2, "by": 5, "replaced": true }));
    assert_eq!(voters(&listed(&peers).await), [1, 3, 5]);
    assert_eq!(peers.done(&["members", "replace", "2", "--by", &by]).await["replaced"], false);
    until("no problem to be left", async || {
        let printed = peers.meta(&["status"]).await;
        if printed.code == Some(0) { Ok(()) } else { Err(printed.text()) }
    })
    .await;
    assert_eq!(peers.done(&["get", "/kv/a", "--peer", "5"]).await["entries"][0]["value"], "1");

    // The peer that was replaced learns of it, and which ids are free by now.
    peers.start(2);
    assert_ne!(peers.ended(2).await, Some(0));
    let log = std::fs::read_to_string(peers.log(2)).unwrap();
    assert!(log.contains("peer 2 was removed") && log.contains("(from 6 on)"), "{log}");

    // With one more gone, removing a voter that lives would leave no majority.
    peers.kill(1);
    peers.leader().await;
    peers.meta(&["members", "remove", "5"]).await.ended(1, "no majority");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_voter_stays() {
    let peers = Peers::founded(1).await;
    for force in [&[][..], &["--force"]] {
        let refused = peers.meta(&[&["members", "remove", "1"][..], force].concat()).await;
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.err.contains("last voter"), "{refused:?}");
    }
    peers.meta(&["transfer-leader"]).await.ended(1, "only voter");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_with_another_secret_is_told_as_that() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    std::fs::write(&ours, "correct-horse-battery-staple").unwrap();
    std::fs::write(&theirs, "incorrect-horse-battery-staple").unwrap();
    let with = |file: &std::path::Path| ["--secret-file".to_owned(), file.display().to_string()];
    let option = with(&ours);
    let option = [option[0].as_str(), option[1].as_str()];
    let mut peers = Peers::founded_with(1, &option, &option).await;
    peers.start_with(2, &with(&theirs));
    let at = peers.address(2);
    until("the other peer to be told of", async || {
        let printed = peers.meta(&["members", "add", &at]).await;
        let told = printed.code == Some(1) && printed.err.contains("another secret");
        if told && printed.err.contains(&at) && !printed.err.contains("start the peer, then") {
            Ok(())
        } else {
            Err(format!("{printed:?}"))
        }
    })
    .await;
    // One that asks by itself ends, and says why.
    let join = ["--join".to_owned(), peers.address(1)];
    peers.start_with(3, &[&with(&theirs)[..], &join].concat());
    assert_eq!(peers.ended(3).await, Some(1));
}
