//! `lake bench meta`: that every load is run and told. How fast it is, is for people to look at.

use crate::common::{Peers, until};

#[tokio::test(flavor = "multi_thread")]
async fn every_load_is_run_and_what_came_of_it_is_told() {
    let peers = Peers::founded(1).await;
    let small = ["--clients", "3", "--keys", "12", "--value-bytes", "100", "--seconds", "0.3", "--warmup", "0"];
    for load in ["put", "cas", "txn", "get", "get-bounded", "get-local", "watch", "mixed"] {
        let args = [&small[..], &["--load", load, "--format", "json"]].concat();
        // A busy machine may not end a single call in so short a time.
        let told = until(load, async || {
            let printed = peers.bench(&args).await;
            assert_eq!(printed.code, Some(0), "{printed:?}");
            let told = printed.json();
            if told["per_second"].as_f64().unwrap() > 0.0 { Ok(told) } else { Err(told.to_string()) }
        })
        .await;
        assert_eq!((&told["load"], &told["clients"], &told["keys"]), (&load.into(), &3.into(), &12.into()), "{told}");
        let [p50, p99, max] = ["p50_ms", "p99_ms", "max_ms"].map(|name| told[name].as_f64().unwrap());
        assert!(told["errors"] == 0 && 0.0 < p50 && p50 <= p99 && p99 <= max, "{told}");
    }
    // The keys go, unless they are asked to be kept.
    let left = async || peers.json(&["list", "/kv/bench/"]).await.1["entries"].as_array().map(Vec::len);
    assert_eq!(left().await, Some(0));
    let text = peers.bench(&[&small[..], &["--keep-keys"]].concat()).await.text();
    assert!(text.contains("cas: 3 clients on 1 connection, 12 keys of 100 B, 0.3 s: "), "{text}");
    assert_eq!(left().await, Some(12));
    let all = ["delete", "--prefix", "/kv/bench/"];
    peers.meta(&[&all[..], &["--limit", "11"]].concat()).await.ended(1, "more than 11 keys");
    let would = peers.meta(&[&all[..], &["--dry-run"]].concat()).await.text();
    assert_eq!((would.as_str(), left().await), ("/kv/bench/: 12 keys would be deleted\n", Some(12)));
    let deleted = peers.done(&all).await;
    assert_eq!((&deleted["deleted"], left().await), (&12.into(), Some(0)), "{deleted}");
    assert_eq!(peers.meta(&all).await.code, Some(3));
    peers.meta(&["delete", "--prefix", "/lake/"]).await.ended(1, "keys under /kv/ only");

    peers.bench(&["--clients", "4", "--keys", "3"]).await.ended(1, "--keys: as many as clients");
}
