//! What is sent again with the key of a request, as a load balancer does that got no answer, is made once: whatever it is, whatever
//! became of the first, and while that is on its way still.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use lake_client::Error;
use lake_client::memory::MemoryStore;
use lake_client::store::{Applied, Committed, SharedStore};
use lake_proto::kv::{Op, Txn};
use serde_json::{Value, json};
use tokio::sync::Notify;
use uuid::Uuid;

use crate::common::in_time;
use crate::common::store::{Through, Way, unavailable};
use crate::http::{Answer, Http};
use crate::wire::{TABLES, schema, set, with_table};
use crate::{cluster, over, rest};

const SPACES: &str = "/v1/lake/namespaces";
const VIEWS: &str = "/v1/lake/namespaces/n/views";

fn view(name: &str) -> Value {
    json!({"name": name, "schema": schema(), "view-version": {"version-id": 1, "schema-id": 0,
        "timestamp-ms": 1_700_000_000_000i64, "summary": {}, "default-namespace": ["n"],
        "representations": [{"type": "sql", "sql": "SELECT 1 AS id", "dialect": "spark"}]}})
}

fn renamed(from: &str, to: &str) -> Value {
    json!({"source": {"namespace": ["n"], "name": from}, "destination": {"namespace": ["n"], "name": to}})
}

/// These nodes, for requests with this key.
fn keyed(nodes: &[Http; 2], key: &str) -> [Http; 2] {
    nodes.each_ref().map(|node| node.with("Idempotency-Key", key))
}

/// Sends a change to both nodes at once, and again, under one key, which then is no other request's.
async fn change(nodes: &[Http; 2], method: &str, path: &str, body: Value) -> Value {
    // As nginx makes them.
    let key = Uuid::new_v4().simple().to_string();
    let [one, other] = &keyed(nodes, &key);
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let body = text.as_bytes();
    let told = |answer: Answer| {
        assert!([200, 204].contains(&answer.status), "{method} {path}: {answer:?}");
        if answer.body.is_empty() { Value::Null } else { answer.json() }
    };
    let (first, second) = tokio::join!(one.send(method, path, body), other.send(method, path, body));
    let first = told(first);
    assert_eq!(told(second), first, "{method} {path}");
    assert_eq!(told(other.send(method, path, body).await), first, "{method} {path}");
    let another = one.send(method, &format!("{path}?purgeRequested=true"), body).await;
    let message = another.refused(422, "UnprocessableEntityException");
    assert!(message.contains("another request; nothing was done"), "{message}");
    first
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_that_two_nodes_are_sent_at_once_is_made_once() {
    let cluster = cluster(2).await;
    let nodes = [rest(&cluster, 0), rest(&cluster, 1)];
    with_table(&nodes[0]).await;
    let (mut made, mut answers) = (0, Vec::new());
    let set_k = json!({"updates": [set("k", "1")]});
    let of = |name: &str| json!({"identifier": {"namespace": ["n"], "name": name}, "requirements": [], "updates": [set("m", "1")]});
    for (method, path, body) in [
        ("POST", SPACES.to_owned(), json!({"namespace": ["n", "s"]})),
        ("POST", format!("{SPACES}/n%1Fs/properties"), json!({"updates": {"k": "1"}})),
        ("DELETE", format!("{SPACES}/n%1Fs"), Value::Null),
        ("POST", TABLES.to_owned(), json!({"name": "u", "schema": schema()})),
        ("POST", format!("{TABLES}/t"), set_k.clone()),
        ("POST", "/v1/lake/transactions/commit".to_owned(), json!({"table-changes": [of("t"), of("u")]})),
        ("POST", "/v1/lake/tables/rename".to_owned(), renamed("u", "v")),
        ("DELETE", format!("{TABLES}/v"), Value::Null),
        ("POST", VIEWS.to_owned(), view("w")),
        ("POST", format!("{VIEWS}/w"), set_k),
        ("POST", "/v1/lake/views/rename".to_owned(), renamed("w", "x")),
        ("DELETE", format!("{VIEWS}/x"), Value::Null),
    ] {
        answers.push(change(&nodes, method, &path, body).await);
        made += 1;
    }
    for (path, i) in [("register", 3), ("register-view", 8)] {
        let body = json!({"name": format!("again_{i}"), "metadata-location": answers[i]["metadata-location"]});
        change(&nodes, "POST", &format!("{SPACES}/n/{path}"), body).await;
        made += 1;
    }
    let table = nodes[0].get(&format!("{TABLES}/t")).await.expect(200).json();
    assert_eq!(table["metadata"]["metadata-log"].as_array().unwrap().len(), 2, "two commits");
    // These are all the changes that there are.
    let document = nodes[0].get("/openapi").await.expect(200).json();
    assert_eq!(made, document["paths"].to_string().matches("Idempotency-Key").count());
}

/// What a node does with the first change of a table that it is to make.
#[derive(Debug, Default)]
struct First {
    /// It waits before the metadata until it may go on.
    slow: AtomicBool,
    waits: Notify,
    go_on: Notify,
    /// It is made, and then nothing can be asked any more.
    dies: AtomicBool,
    away: AtomicBool,
}

#[async_trait::async_trait]
impl Way for First {
    async fn call(&self, _: &str, _: Instant) -> Result<(), Error> {
        match self.away.load(Ordering::SeqCst) {
            true => Err(unavailable(Applied::No)),
            false => Ok(()),
        }
    }

    async fn commit(&self, store: &SharedStore, txn: Txn, by: Instant) -> Result<Committed, Error> {
        let counts = |op: &Op| op.is_write() && op.key().starts_with("/lake/table/");
        if txn.then.iter().any(counts) {
            if self.slow.swap(false, Ordering::SeqCst) {
                self.waits.notify_one();
                self.go_on.notified().await;
            }
            if self.dies.swap(false, Ordering::SeqCst) {
                store.commit(txn, by).await?;
                self.away.store(true, Ordering::SeqCst);
                return Err(unavailable(Applied::Unknown));
            }
        }
        store.commit(txn, by).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_may_be_slow_or_die_and_what_is_sent_again_is_made_once() {
    let store = Arc::new(Through { store: Arc::new(MemoryStore::new()), way: First::default() });
    let cluster = over(store.clone(), 2, |options| options).await;
    let nodes = [rest(&cluster, 0), rest(&cluster, 1)];
    with_table(&nodes[0]).await;
    let table = format!("{TABLES}/t");
    let created = json!({"name": "u", "schema": schema()});
    for (path, body) in [(TABLES, created), (table.as_str(), json!({"updates": [set("slow", "1")]}))] {
        let [slow, other] = keyed(&nodes, &Uuid::new_v4().to_string());
        store.slow.store(true, Ordering::SeqCst);
        let first = tokio::spawn({
            let (path, body) = (path.to_owned(), body.clone());
            async move { slow.post(&path, body).await }
        });
        in_time("the first to wait", store.waits.notified()).await;
        let second = other.post(path, body).await.expect(200).json();
        store.go_on.notify_one();
        assert_eq!(in_time("the first", first).await.unwrap().expect(200).json(), second);
    }
    for (path, body) in [
        (TABLES.to_owned(), json!({"name": "v", "schema": schema()})),
        (table.clone(), json!({"updates": [set("dies", "1")]})),
        ("/v1/lake/tables/rename".to_owned(), renamed("v", "w")),
    ] {
        let [dying, other] = keyed(&nodes, &Uuid::new_v4().to_string());
        store.dies.store(true, Ordering::SeqCst);
        dying.post(&path, body.clone()).await.refused(500, "CommitStateUnknownException");
        store.away.store(false, Ordering::SeqCst);
        let answer = other.post(&path, body).await;
        assert!([200, 204].contains(&answer.status), "{path}: {answer:?}");
    }
    let log = nodes[0].get(&table).await.expect(200).json()["metadata"]["metadata-log"].clone();
    assert_eq!(log.as_array().unwrap().len(), 2, "each commit was made once");
    nodes[0].head(&format!("{TABLES}/w")).await.expect(204);
}
