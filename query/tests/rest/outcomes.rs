//! What a client is told when the metadata does not answer: that nothing was done only where that is so, and that the outcome is
//! unknown only where it is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use lake_client::Error;
use lake_client::catalog::{Catalog, TableIdent, TablePointer};
use lake_client::memory::MemoryStore;
use lake_client::store::{Applied, Committed, SharedStore};
use lake_proto::kv::{Op, Txn};
use serde_json::{Value, json};

use crate::common::store::{Through, Way, unavailable};
use crate::http::{Answer, Http};
use crate::wire::{TABLES, schema, set, with_table};
use crate::{over, rest};

/// What happens to the next change of a table, a view or a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    NotSent,
    /// It is made, or not, and no answer comes.
    NoAnswer {
        made: bool,
        /// And nothing can be asked any more, either.
        away: bool,
    },
    /// The table `gone` is made, and no answer comes; by then it has another name, and another table has its name.
    Renamed,
    /// The same request, sent to another node at the same time, is first, and then nothing can be asked any more.
    Twice,
}

#[derive(Debug, Default)]
struct Faults {
    next: Mutex<Option<Fault>>,
    away: AtomicBool,
}

#[async_trait::async_trait]
impl Way for Faults {
    async fn call(&self, _: &str, _: Instant) -> Result<(), Error> {
        match self.away.load(Ordering::SeqCst) {
            true => Err(unavailable(Applied::No)),
            false => Ok(()),
        }
    }

    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let prefixes = ["/lake/table/", "/lake/view/", "/lake/catalog/"];
        let counts = |op: &Op| op.is_write() && prefixes.iter().any(|prefix| op.key().starts_with(prefix));
        let fault = match txn.then.iter().any(counts) {
            true => self.next.lock().unwrap().take(),
            false => None,
        };
        match fault {
            None => store.commit(txn, by).await,
            Some(Fault::NotSent) => Err(unavailable(Applied::No)),
            Some(Fault::NoAnswer { made, away }) => {
                if made {
                    store.commit(txn, by).await?;
                }
                self.away.store(away, Ordering::SeqCst);
                Err(unavailable(Applied::Unknown))
            }
            Some(Fault::Twice) => {
                store.commit(txn.clone(), by).await?;
                self.away.store(true, Ordering::SeqCst);
                store.commit(txn, by).await
            }
            Some(Fault::Renamed) => {
                store.commit(txn, by).await?;
                let catalog = Catalog::new(store.clone());
                let [from, to] = ["gone", "renamed"].map(|name| TableIdent::new("n".parse().unwrap(), name).unwrap());
                let made = catalog.rename_table(&from, &to, by).await.unwrap();
                let other = TablePointer { uuid: uuid::Uuid::new_v4(), ..made.value };
                catalog.create_table(&from, &other, by).await.unwrap();
                Err(unavailable(Applied::Unknown))
            }
        }
    }
}

const FAULTS: [Fault; 5] = [
    Fault::NotSent,
    Fault::NoAnswer { made: true, away: false },
    Fault::NoAnswer { made: false, away: false },
    Fault::NoAnswer { made: true, away: true },
    Fault::NoAnswer { made: false, away: true },
];

/// Checks what was told of a change that met this fault, and is answered so if it is made. Returns whether it must have been made.
fn told(answer: Answer, fault: Fault, done: u16) -> bool {
    match fault {
        Fault::NotSent => {
            assert!(answer.header("retry-after").is_some(), "{answer:?}");
            answer.refused(503, "ServiceUnavailableException");
            false
        }
        // The node finds out, or does it again.
        Fault::NoAnswer { away: false, .. } => {
            answer.expect(done);
            true
        }
        Fault::NoAnswer { made, away: true } => {
            assert_eq!(answer.header("retry-after"), None, "{answer:?}");
            let message = answer.refused(500, "CommitStateUnknownException");
            assert!(message.contains("unknown"), "{message}");
            made
        }
        Fault::Renamed | Fault::Twice => unreachable!("it is told otherwise"),
    }
}

/// Sends a change that meets this fault.
async fn hurt(store: &Through<Faults>, rest: &Http, path: &str, body: Value, fault: Fault) -> Answer {
    *store.next.lock().unwrap() = Some(fault);
    let answer = rest.post(path, body).await;
    assert_eq!(*store.next.lock().unwrap(), None, "{fault:?} was met");
    store.away.store(false, Ordering::SeqCst);
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn what_became_of_a_change_is_told_as_it_is() {
    let store = Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Faults::default() });
    let cluster = over(store.clone(), 1, |options| options).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    let table = format!("{TABLES}/t");
    let versions = async || {
        let metadata = rest.get(&table).await.expect(200).json()["metadata"].clone();
        (metadata["metadata-log"].as_array().map_or(0, Vec::len), metadata["properties"].clone())
    };
    for (n, fault) in FAULTS.into_iter().enumerate() {
        let name = format!("p{n}");
        let (before, _) = versions().await;
        let answer = hurt(&store, &rest, &table, json!({"updates": [set(&name, "1")]}), fault).await;
        let made = told(answer, fault, 200);
        let (after, properties) = versions().await;
        assert_eq!(
            (after - before, properties.get(&name).is_some()),
            (usize::from(made), made),
            "{fault:?}: once or not"
        );

        let name = format!("t{n}");
        let answer = hurt(&store, &rest, TABLES, json!({"name": name, "schema": schema()}), fault).await;
        let made = looked_for(answer, fault, 200);
        rest.head(&format!("{TABLES}/{name}")).await.expect(if made { 204 } else { 404 });
    }
    let gone = json!({"name": "gone", "schema": schema()});
    hurt(&store, &rest, TABLES, gone, Fault::Renamed).await.refused(500, "CommitStateUnknownException");
    rest.get(&format!("{TABLES}/renamed")).await.expect(200);

    let keyed = rest.with("Idempotency-Key", &uuid::Uuid::from_u128(7).to_string());
    let (spaces, twice) = ("/v1/lake/namespaces", json!({"namespace": ["twice"]}));
    hurt(&store, &keyed, spaces, twice.clone(), Fault::Twice).await.refused(500, "CommitStateUnknownException");
    keyed.post(spaces, twice).await.expect(200);
}

/// The same of a change that is not made again, since it may still be on its way: it is looked for.
fn looked_for(answer: Answer, fault: Fault, done: u16) -> bool {
    match fault {
        Fault::NoAnswer { made: false, .. } => {
            answer.refused(500, "CommitStateUnknownException");
            false
        }
        _ => told(answer, fault, done),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_became_of_every_other_change_is_told_as_it_is() {
    const SPACES: &str = "/v1/lake/namespaces";
    const VIEWS: &str = "/v1/lake/namespaces/n/views";
    let store = Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Faults::default() });
    let cluster = over(store.clone(), 1, |options| options).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    let there = async |path: String| rest.head(&path).await.status == 204;
    let named = |name: &str| json!({"namespace": ["n"], "name": name});
    let version = json!({"version-id": 1, "schema-id": 0, "timestamp-ms": 1_700_000_000_000i64, "summary": {},
        "default-namespace": ["n"], "representations": [{"type": "sql", "sql": "SELECT 1 AS id", "dialect": "spark"}]});
    let view = |name: &str| json!({"name": name, "schema": schema(), "view-version": version});
    for (n, fault) in FAULTS.into_iter().enumerate() {
        let name = |what: &str| format!("{what}{n}");
        // A table, and a view, get another name.
        rest.post(TABLES, json!({"name": name("from"), "schema": schema()})).await.expect(200);
        rest.post(VIEWS, view(&name("view_from"))).await.expect(200);
        for (kind, from, to) in [("tables", name("from"), name("to")), ("views", name("view_from"), name("view_to"))] {
            let body = json!({"source": named(&from), "destination": named(&to)});
            let answer = hurt(&store, &rest, &format!("/v1/lake/{kind}/rename"), body, fault).await;
            let made = looked_for(answer, fault, 204);
            assert_eq!(there(format!("{SPACES}/n/{kind}/{to}")).await, made, "{fault:?}: {to}");
        }
        // A view is created, changed and dropped.
        let answer = hurt(&store, &rest, VIEWS, view(&name("made")), fault).await;
        let made = looked_for(answer, fault, 200);
        assert_eq!(there(format!("{VIEWS}/{}", name("made"))).await, made, "{fault:?}");
        let changed = name("changed");
        rest.post(VIEWS, view(&changed)).await.expect(200);
        let body = json!({"updates": [set("k", "1")]});
        let made = told(hurt(&store, &rest, &format!("{VIEWS}/{changed}"), body, fault).await, fault, 200);
        let now = rest.get(&format!("{VIEWS}/{changed}")).await.expect(200).json();
        assert_eq!(now["metadata"]["properties"].get("k").is_some(), made, "{fault:?}");
        *store.next.lock().unwrap() = Some(fault);
        let answer = rest.delete(&format!("{VIEWS}/{changed}")).await;
        store.away.store(false, Ordering::SeqCst);
        let made = looked_for(answer, fault, 204);
        assert_eq!(there(format!("{VIEWS}/{changed}")).await, !made, "{fault:?}");
        // A namespace is changed and dropped.
        let space = name("space");
        rest.post(SPACES, json!({"namespace": [space]})).await.expect(200);
        let body = json!({"updates": {"k": "1"}});
        let made = told(hurt(&store, &rest, &format!("{SPACES}/{space}/properties"), body, fault).await, fault, 200);
        let now = rest.get(&format!("{SPACES}/{space}")).await.expect(200).json();
        assert_eq!(now["properties"].get("k").is_some(), made, "{fault:?}");
        *store.next.lock().unwrap() = Some(fault);
        let answer = rest.delete(&format!("{SPACES}/{space}")).await;
        store.away.store(false, Ordering::SeqCst);
        let made = looked_for(answer, fault, 204);
        assert_eq!(there(format!("{SPACES}/{space}")).await, !made, "{fault:?}");
        // Several tables change together, and one is dropped.
        let two = [name("a"), name("b")];
        for name in &two {
            rest.post(TABLES, json!({"name": name, "schema": schema()})).await.expect(200);
        }
        let changes: Vec<Value> = two
            .iter()
            .map(|name| json!({"identifier": named(name), "requirements": [], "updates": [set("k", "1")]}))
            .collect();
        let body = json!({"table-changes": changes});
        let made = told(hurt(&store, &rest, "/v1/lake/transactions/commit", body, fault).await, fault, 204);
        for name in &two {
            let now = rest.get(&format!("{TABLES}/{name}")).await.expect(200).json();
            assert_eq!(now["metadata"]["properties"].get("k").is_some(), made, "{fault:?}: {name}");
            assert_eq!(
                now["metadata"]["metadata-log"].as_array().map_or(0, Vec::len),
                usize::from(made),
                "once or not"
            );
        }
        *store.next.lock().unwrap() = Some(fault);
        let answer = rest.delete(&format!("{TABLES}/{}", two[0])).await;
        store.away.store(false, Ordering::SeqCst);
        let made = told(answer, fault, 204);
        assert_eq!(there(format!("{TABLES}/{}", two[0])).await, !made, "{fault:?}");
    }
}
