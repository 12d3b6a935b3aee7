//! Warehouses made, listed, changed and removed by hand; where their secrets are is kept, and they themselves are nowhere.

use serde_json::json;

use crate::common::Peers;

const SECRET: &str = "correct-horse-battery-staple";

#[tokio::test(flavor = "multi_thread")]
async fn a_warehouse_is_made_changed_and_removed_and_its_secrets_are_nowhere() {
    let peers = Peers::founded(1).await;
    let file = peers.path("key");
    std::fs::write(&file, SECRET).unwrap();
    let access = format!("file:{}", file.display());
    let root = ["archive", "--root", "s3://archive/lake"];
    let with = |command: &'static str, endpoint: &'static str| {
        let reached = ["--s3-endpoint", endpoint, "--s3-path-style", "--s3-access-key", &access];
        [&["warehouse", command][..], &root[..], &reached[..], &["--s3-secret-key", "env:ARCHIVE_SECRET"]].concat()
    };
    let made = peers.done(&with("create", "http://s3.rack2:8333")).await;
    assert_eq!((&made["warehouse"], &made["root"]), (&json!("archive"), &json!("s3://archive/lake")));
    let again = peers.meta(&with("create", "http://s3.rack2:8333")).await;
    assert!(again.code != Some(0) && again.err.contains("exists already"), "{again:?}");
    peers.done(&with("change", "http://s3.rack3:8333")).await;
    let place = peers.path("tables");
    let place = format!("file://{}", place.display());
    peers.done(&["warehouse", "create", "local", "--root", &place]).await;
    let inside = peers.meta(&["warehouse", "create", "inside", "--root", &format!("{place}/in")]).await;
    assert!(inside.code != Some(0) && inside.err.contains("overlap"), "{inside:?}");

    let listed = peers.done(&["warehouse", "list"]).await;
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|one| (&one["warehouse"], &one["root"])).collect();
    assert_eq!(names, [(&json!("archive"), &json!("s3://archive/lake")), (&json!("local"), &json!(place))]);
    assert_eq!(listed[0]["s3"]["endpoint"], "http://s3.rack3:8333");
    let shown = peers.meta(&["warehouse", "list"]).await.text();
    assert!(shown.contains(&access) && shown.contains("env:ARCHIVE_SECRET") && !shown.contains(SECRET), "{shown}");

    // What is kept of them, and replicated, is where they are. A secret itself is not taken.
    let kept = peers.done(&["get", "/lake/warehouses"]).await.to_string();
    assert!(kept.contains("env:ARCHIVE_SECRET") && !kept.contains(SECRET), "{kept}");
    let given =
        peers.meta(&[&["warehouse", "create", "open"][..], &root[1..], &["--s3-access-key", SECRET]].concat()).await;
    assert_ne!(given.code, Some(0), "{given:?}");

    for name in ["archive", "local"] {
        peers.done(&["warehouse", "remove", name]).await;
    }
    assert_eq!(peers.done(&["warehouse", "list"]).await, json!([]));
    let gone = peers.meta(&["warehouse", "remove", "archive"]).await;
    assert!(gone.code != Some(0) && gone.err.contains("does not exist"), "{gone:?}");
}
