//! Everything moved from one store to another: by a data file, by a local directory, straight.

use std::path::Path;

use lake_client::memory::MemoryStore;
use lake_client::store::MetaStore;
use lake_client::transfer::{self, Existing};
use lake_metasrv::EmbeddedStore;
use serde_json::{Value, json};

use crate::common::{PATIENCE, Peers, printed, tool};

/// A cluster with keys of all kinds; how many of them are to be moved.
async fn filled() -> (Peers, u64) {
    let peers = Peers::founded(1).await;
    let put = |n: u32| json!({ "put": { "key": format!("/kv/many/{n:04}"), "value": format!("value {n}") } });
    for part in [0..700, 700..1400] {
        let document = json!({ "then": part.map(put).collect::<Vec<_>>() }).to_string();
        let loaded = peers.meta_with(&["txn", "-"], document.as_bytes()).await;
        assert_eq!(loaded.code, Some(0), "{}", loaded.err);
    }
    let bytes: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    for key in ["/kv/large/1", "/kv/large/2", "/kv/large/3"] {
        assert_eq!(peers.meta_with(&["put", key, "--file", "-"], &bytes).await.code, Some(0));
    }
    peers.done(&["cas", "/lake/table/sales/orders", "--expect", "absent", "pointer"]).await;
    let lease = peers.done(&["lease", "grant", "--ttl-secs", "60", "--holder", "a test"]).await["id"].to_string();
    peers.done(&["put", "/kv/leased", "x", "--lease", &lease]).await;
    (peers, 1404)
}

/// Keys and values, as one peer has them.
async fn content(peers: &Peers) -> Vec<Value> {
    let all = peers.done(&["get", "--prefix", "/", "--limit", "0"]).await;
    let entry = |entry: &Value| {
        let value = if entry["value"].is_null() { &entry["value_base64"] } else { &entry["value"] };
        json!([entry["key"], value])
    };
    all["entries"].as_array().unwrap().iter().map(entry).filter(|entry| entry[0] != "/kv/leased").collect()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_written_to_a_file_and_a_new_one_is_filled_from_it() {
    let (old, count) = filled().await;
    let file = old.path("everything.data");
    let file = text(&file);
    let exported = old.done(&["export", file]).await;
    let data = &exported["data"];
    assert_eq!((&data["entries"], &data["left_out"]), (&json!(count), &json!(1)), "{exported}");
    assert!(data["revision"].is_u64() && data["hash"].as_str().unwrap().len() == 32, "{exported}");
    old.meta(&["export", file]).await.ended(1, "exists already");

    let new = Peers::founded(3).await;
    let imported = new.done(&["import", file]).await;
    assert_eq!((&imported["written"], &imported["data"]), (&json!(count), data), "{imported}");
    assert_eq!(imported["verified"]["hash"], data["hash"]);
    assert_eq!(content(&new).await, content(&old).await);
    new.meta(&["get", "/kv/leased"]).await.ended(3, "there is no key");

    // Once more, as after one that was stopped.
    let again = new.done(&["import", file]).await;
    assert_eq!((&again["written"], &again["were_there"]), (&json!(0), &json!(count)), "{again}");

    // A target that holds something else.
    new.done(&["put", "/kv/many/0007", "another"]).await;
    let refused = new.meta(&["import", file]).await;
    refused.ended(3, "key \"/kv/many/0007\" has another value than the data");
    let kept = new.done(&["import", file, "--existing", "keep"]).await;
    assert_eq!((&kept["kept"], &kept["written"]), (&json!(1), &json!(0)), "{kept}");
    new.done(&["put", "/kv/of-its-own", "x"]).await;
    new.meta(&["import", file]).await.ended(3, "key \"/kv/of-its-own\" is not in the data");
    let replaced = new.done(&["import", file, "--existing", "replace"]).await;
    assert_eq!(
        (&replaced["replaced"], &replaced["written"], &replaced["others"]),
        (&json!(1), &json!(1), &json!(1)),
        "{replaced}"
    );
    new.done(&["delete", "/kv/of-its-own"]).await;
    assert_eq!(content(&new).await, content(&old).await);

    // A damaged file is found before anything is written.
    let mut bytes = std::fs::read(file).unwrap();
    let middle = bytes.len() - 100;
    bytes[middle] ^= 1;
    let damaged = old.path("damaged.data");
    std::fs::write(&damaged, bytes).unwrap();
    new.done(&["delete", "/kv/many/0001"]).await;
    new.meta(&["import", text(&damaged)]).await.ended(1, "a record's checksum is wrong");
    new.meta(&["get", "/kv/many/0001"]).await.ended(3, "there is no key");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_moved_straight_to_another_one() {
    let (old, count) = filled().await;
    let new = Peers::founded(1).await;
    let from = format!("lake://{}", old.address(1));
    let imported = new.done(&["import", &from]).await;
    assert_eq!(imported["written"], json!(count), "{imported}");
    assert_eq!(content(&new).await, content(&old).await);
    let table = old.meta(&["export", &format!("lake://{}", new.address(1)), "--existing", "keep"]).await;
    assert_eq!(table.code, Some(0), "{table:?}");
    assert!(table.text().contains(&format!("were there  {count}\n")), "{table:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_in_one_process_is_moved_as_everything_else() {
    let (old, count) = filled().await;
    let data = old.path("cluster.data");
    let hash = old.done(&["export", text(&data)]).await["data"]["hash"].clone();
    let embedded = EmbeddedStore::open(&old.path("embedded")).await.unwrap();
    let memory = MemoryStore::new();
    // From the cluster through both of them, each into the next one, and into a cluster again.
    let mut from = data;
    for (name, store) in [("embedded", &*embedded as &dyn MetaStore), ("memory", &memory)] {
        let imported = transfer::import(&from, store, Existing::Refuse, PATIENCE, &|_| {}).await.unwrap();
        assert_eq!((imported.written, imported.verified), (count, imported.file.sum), "{name}");
        from = old.path(&format!("{name}.data"));
        let exported = transfer::export(store, name, &from, PATIENCE, &|_| {}).await.unwrap();
        assert_eq!((exported.sum, exported.left_out), (imported.verified, 0), "{name}");
    }
    embedded.shutdown().await;
    let new = Peers::founded(1).await;
    let imported = new.done(&["import", text(&from)]).await;
    assert_eq!((&imported["written"], &imported["verified"]["hash"]), (&json!(count), &hash), "{imported}");
    assert_eq!(content(&new).await, content(&old).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_moved_is_refused() {
    let run = async |args: &[&str]| printed(tool(args), b"").await;
    run(&["export", "gs://bucket/x", "--from", "cluster"]).await.ended(2, "it is a data file");
    run(&["import", "a.data", "--to", "b.data"]).await.ended(1, "copy the file");
    run(&["import", "lake://a:1", "--to", "lake://a:1"]).await.ended(1, "moved to itself");
    run(&["import", "/no/such.data", "--to", "etcd://127.0.0.1:1"]).await.ended(1, "opening /no/such.data");
    run(&["export", "x.data", "--from", "file:///d", "--existing", "keep"]).await.ended(1, "--existing is for stores");
    let nobody = ["export", "x.data", "--from", "etcd://127.0.0.1:1", "--timeout-secs", "1"];
    run(&nobody).await.ended(1, "safe to try again");
    assert!(!Path::new("x.data").exists());
    if !cfg!(feature = "store-object") {
        run(&["export", "x.data", "--from", "file:///d"]).await.ended(1, "--features store-object");
    }
}

#[cfg(feature = "store-object")]
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_kept_in_a_local_directory_and_brought_back() {
    let (old, count) = filled().await;
    let directory = format!("file://{}", text(&old.path("metadata")));
    let exported = old.done(&["export", &directory]).await;
    assert_eq!((&exported["written"], &exported["data"]["left_out"]), (&json!(count), &json!(1)), "{exported}");
    let new = Peers::founded(1).await;
    let imported = new.done(&["import", &directory]).await;
    assert_eq!(imported["verified"]["hash"], exported["verified"]["hash"]);
    assert_eq!(imported["data"]["revision"], Value::Null, "a directory has no revision of all its keys");
    assert_eq!(content(&new).await, content(&old).await);
}
