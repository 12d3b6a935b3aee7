//! Everything moved from each of the five stores to each of them, also to another one of its kind: by `lake meta` as far as
//! it reaches, which is everything but what is inside of another process.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lake_client::etcd::EtcdStore;
use lake_client::memory::MemoryStore;
use lake_client::object::ObjectMetaStore;
use lake_client::remote::{RemoteConfig, RemoteStore};
use lake_client::store::{Lease, MetaStore, ReadOptions, SharedStore, Token};
use lake_client::transfer::file::Sum;
use lake_client::transfer::{self, Existing, Imported};
use lake_metasrv::EmbeddedStore;
use lake_proto::kv::{Compare, Op, Txn};
use lake_proto::limits::MAX_VALUE_BYTES;

use crate::common::{PATIENCE, Peers, Printed, printed, tool};
use crate::etcd::Etcd;

/// Keys of every kind that lake has, and some that are the beginning of others, or awkward as a name.
const KEYS: [&str; 26] = [
    "/kv/",
    "/kv/a",
    "/kv/a/",
    "/kv/a/b",
    "/kv/ab",
    "/kv/\u{e9} \u{2206}",
    "/kv/=2F#1%..\\",
    "/kv/../d/f",
    "/lake/append/sales/orders/1",
    "/lake/catalog/sales",
    "/lake/catalog/sales\u{1f}eu",
    "/lake/janitor/fence",
    "/lake/janitor/lease",
    "/lake/named/01980000-0000-7000-8000-000000000001",
    "/lake/node/one",
    "/lake/op/1",
    "/lake/proc/of-a-later-release",
    "/lake/route/shard/0003",
    "/lake/table/sales/orders",
    "/lake/table/sales\u{1f}eu/orders",
    "/lake/ticketkeys",
    "/lake/turn/sales.orders",
    "/lake/view/sales/totals",
    "/lake/warehouses",
    "/lake/z",
    "/lake/z/z",
];

/// What each can, as docs/src/client.md has it: several keys in one transaction, listings and snapshots of one revision, watches,
/// leases.
const CAN: [(&str, [bool; 4]); 5] = [
    ("cluster", [true; 4]),
    ("embedded", [true; 4]),
    ("memory", [true, true, true, false]),
    ("etcd", [true; 4]),
    ("directory", [false; 4]),
];

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// What is moved.
fn everything() -> BTreeMap<String, Bytes> {
    let mut all: BTreeMap<_, Bytes> = KEYS.iter().map(|key| ((*key).to_owned(), format!("of {key}").into())).collect();
    let mut put = |key: &str, value: Bytes| assert!(all.insert(key.to_owned(), value).is_none(), "{key}");
    put("/kv/empty", Bytes::new());
    put("/kv/bytes", (0..=255).collect());
    put("/kv/large/1", vec![7; MAX_VALUE_BYTES].into());
    put("/lake/large/1", vec![8; MAX_VALUE_BYTES / 2].into());
    // Those that the leader goes by say what they may say.
    put("/lake/clock", "12345".into());
    put("/lake/route/settings", r#"{"shards":4,"maintenance":true}"#.into());
    all
}

/// One end of a move.
struct End {
    kind: &'static str,
    store: SharedStore,
    /// As `lake meta` calls it; `None`: it cannot.
    name: Option<String>,
}

/// What was said of a move.
#[derive(Debug, PartialEq, Eq)]
struct Moved {
    written: u64,
    left_out: u64,
    of_one_revision: bool,
    /// Of the data, and of what the target has.
    hashes: [String; 2],
}

fn hash(sum: &Sum) -> String {
    format!("{:032x}", sum.hash)
}

impl From<Imported> for Moved {
    fn from(imported: Imported) -> Self {
        let Imported { file, written, verified, .. } = imported;
        let of_one_revision = file.header.revision.is_some();
        Self { written, left_out: file.left_out, of_one_revision, hashes: [hash(&file.sum), hash(&verified)] }
    }
}

impl From<Printed> for Moved {
    fn from(printed: Printed) -> Self {
        assert_eq!(printed.code, Some(0), "{printed:?}");
        let (json, text) = (printed.json(), |value: &serde_json::Value| value.as_str().unwrap().to_owned());
        Self {
            written: json["written"].as_u64().unwrap(),
            left_out: json["data"]["left_out"].as_u64().unwrap(),
            of_one_revision: json["data"]["revision"].is_u64(),
            hashes: [text(&json["data"]["hash"]), text(&json["verified"]["hash"])],
        }
    }
}

async fn lake_meta(args: &[&str]) -> Printed {
    printed(tool(&[args, &["--format", "json"]].concat()), b"").await
}

/// Moves everything by as few commands as there are; `data` is where a data file may be.
async fn moved(from: &End, to: &End, data: &Path) -> Moved {
    let data_name = data.to_str().unwrap();
    if let (Some(from), Some(to)) = (&from.name, &to.name) {
        return lake_meta(&["import", from, "--to", to]).await.into();
    }
    match &from.name {
        Some(name) => {
            let exported = lake_meta(&["export", data_name, "--from", name]).await;
            assert_eq!(exported.code, Some(0), "{exported:?}");
        }
        None => {
            transfer::export(from.store.as_ref(), from.kind, data, PATIENCE, &|_| {}).await.unwrap();
        }
    }
    match &to.name {
        Some(name) => lake_meta(&["import", data_name, "--to", name]).await.into(),
        None => {
            let imported = transfer::import(data, to.store.as_ref(), Existing::Refuse, PATIENCE, &|_| {}).await;
            imported.unwrap().into()
        }
    }
}

async fn fill(store: &dyn MetaStore, entries: &BTreeMap<String, Bytes>) {
    for (key, value) in entries {
        assert!(store.cas(key, None, value.clone(), soon()).await.unwrap().result.succeeded, "{key} is there");
    }
}

/// Puts a key that hangs on a lease.
async fn put_leased(store: &dyn MetaStore) -> Lease {
    let lease = store.grant_lease(Duration::from_secs(60), "a test", soon()).await.unwrap();
    let put = Txn {
        when: vec![Compare::lease_alive(lease.id)],
        then: vec![Op::put_leased("/kv/leased", "x", lease.id)],
        otherwise: vec![],
    };
    assert!(store.commit(put, soon()).await.unwrap().result.succeeded);
    lease
}

/// What a store holds; no key was written twice.
async fn content(store: &dyn MetaStore) -> BTreeMap<String, Bytes> {
    let all = store.list_all("", ReadOptions::default(), soon()).await.unwrap().value;
    assert!(all.iter().all(|entry| entry.version == 1 && entry.lease.is_none()), "{all:?}");
    all.into_iter().map(|entry| (entry.key, entry.value)).collect()
}

async fn empty(store: &dyn MetaStore) {
    for entry in store.list_all("", ReadOptions::default(), soon()).await.unwrap().value {
        let deleted = store.cas_delete(&entry.key, Token::of(&entry), soon()).await.unwrap();
        assert!(deleted.result.succeeded, "{entry:?}");
    }
}

/// Two of each kind, of which one is moved from.
struct Stores {
    clusters: [Peers; 2],
    embedded: [Arc<EmbeddedStore>; 2],
    etcd: Etcd,
    dir: tempfile::TempDir,
}

impl Stores {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (one, two, etcd) = tokio::join!(Peers::founded(1), Peers::founded(1), Etcd::start());
        let embedded = async |name: &str| EmbeddedStore::open(dir.path().join(name)).await.unwrap();
        let embedded = [embedded("embedded-1").await, embedded("embedded-2").await];
        Self { clusters: [one, two], embedded, etcd, dir }
    }

    /// One of each kind: the first of the two, or the second one. What is new for each `name` holds nothing.
    fn ends(&self, second: bool, name: &str) -> [End; 5] {
        let one = usize::from(second);
        let cluster = self.clusters[one].address(1);
        let config = RemoteConfig { endpoints: vec![cluster.clone()], secret: None };
        let etcd = EtcdStore::connect(vec![self.etcd.endpoint.clone()], &format!("/{name}")).unwrap();
        let directory = self.dir.path().join(name);
        let end = |kind, store: SharedStore, name| End { kind, store, name };
        [
            end("cluster", Arc::new(RemoteStore::connect(config).unwrap()), Some(format!("lake://{cluster}"))),
            end("embedded", self.embedded[one].clone(), None),
            end("memory", MemoryStore::shared(), None),
            end("etcd", Arc::new(etcd), Some(format!("etcd://{}/{name}", self.etcd.endpoint))),
            end(
                "directory",
                Arc::new(ObjectMetaStore::local(&directory).unwrap()),
                Some(format!("file://{}", directory.display())),
            ),
        ]
    }

    /// Where no file is yet.
    fn data(&self, from: &str, to: &End) -> std::path::PathBuf {
        self.dir.path().join(format!("{from}-{}.data", to.kind))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_moved_between_any_two_of_the_five_stores() {
    let stores = Stores::start().await;
    let all = everything();
    let mut sum = Sum::default();
    all.iter().for_each(|(key, value)| sum.add(key, value));
    for (from, (kind, told)) in stores.ends(false, "from").into_iter().zip(CAN) {
        let can = from.store.capabilities();
        let is = [can.multi_key, can.consistent_listing && can.snapshots, can.watch, can.leases];
        assert_eq!((from.kind, is), (kind, told));
        fill(from.store.as_ref(), &all).await;
        let mut lease = None;
        if can.leases {
            lease = Some(put_leased(from.store.as_ref()).await);
        }
        let said = Moved {
            written: all.len() as u64,
            left_out: u64::from(can.leases),
            of_one_revision: can.consistent_listing,
            hashes: [hash(&sum), hash(&sum)],
        };
        for to in stores.ends(true, &format!("to-{}", from.kind)) {
            if let Some(held) = &mut lease {
                *held = from.store.renew_lease(*held, soon()).await.unwrap().expect("a minute has not gone by");
            }
            empty(to.store.as_ref()).await;
            assert_eq!(moved(&from, &to, &stores.data(from.kind, &to)).await, said, "{} to {}", from.kind, to.kind);
            assert!(content(to.store.as_ref()).await == all, "{} to {}", from.kind, to.kind);
        }
    }

    // A part of a key that is longer than a file's name may be: all but a directory take it, and that says so.
    let long = format!("/kv/{}", "k".repeat(300));
    let all = BTreeMap::from([("/kv/a".to_owned(), Bytes::from("1")), (long, Bytes::from("2"))]);
    let from = End { kind: "memory", store: MemoryStore::shared(), name: None };
    fill(from.store.as_ref(), &all).await;
    for to in stores.ends(true, "to-long") {
        empty(to.store.as_ref()).await;
        let data = stores.data("long", &to);
        if to.kind == "directory" {
            transfer::export(from.store.as_ref(), from.kind, &data, PATIENCE, &|_| {}).await.unwrap();
            let name = to.name.as_deref().unwrap();
            let refused = lake_meta(&["import", data.to_str().unwrap(), "--to", name]).await;
            refused.ended(4, "the key cannot be kept here: a name would have 301 bytes, and has at most 253");
        } else {
            assert_eq!(moved(&from, &to, &data).await.written, 2, "to {}", to.kind);
            assert!(content(to.store.as_ref()).await == all, "to {}", to.kind);
        }
    }

    let Stores { clusters, embedded, etcd: Etcd { service, dir, .. }, dir: all_of_it } = stores;
    for embedded in embedded {
        embedded.shutdown().await;
    }
    drop((clusters, service, dir, all_of_it));
}
