//! What a node does not let a request or a connection do: make it fall, take its time, or take its place; and how often a
//! load asks the metadata.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lake_client::memory::MemoryStore;
use lake_client::store::{Capabilities, Committed, Page, Read, SharedStore};
use lake_client::{Error, MetaStore, ReadOptions};
use lake_proto::kv::{KeyValue, Txn};
use lake_query::Options;
use serde_json::json;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::in_time;
use crate::http::Http;
use crate::wire::{TABLES, set, with_table};
use crate::{cluster, over, rest};

/// A store whose listings of namespaces begin and never end.
#[derive(Debug)]
struct Holding {
    inner: SharedStore,
    begun: AtomicUsize,
    /// Reads of tables' pointers.
    reads: AtomicUsize,
}

impl Holding {
    fn new() -> Arc<Self> {
        Arc::new(Self { inner: Arc::new(MemoryStore::new()), begun: 0.into(), reads: 0.into() })
    }

    fn count(&self, counts: bool) {
        self.reads.fetch_add(usize::from(counts), Ordering::SeqCst);
    }
}

#[async_trait::async_trait]
impl MetaStore for Holding {
    fn capabilities(&self) -> Capabilities {
        Capabilities { watch: false, ..self.inner.capabilities() }
    }

    async fn get(&self, key: &str, options: ReadOptions, by: Instant) -> Result<Read<Option<KeyValue>>, Error> {
        self.count(key.starts_with("/lake/table/"));
        self.inner.get(key, options, by).await
    }

    async fn batch_get(
        &self,
        keys: &[String],
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Vec<KeyValue>>, Error> {
        self.count(keys.iter().any(|key| key.starts_with("/lake/table/")));
        self.inner.batch_get(keys, options, by).await
    }

    async fn list(
        &self,
        at: &str,
        page: Option<&str>,
        limit: u32,
        options: ReadOptions,
        by: Instant,
    ) -> Result<Read<Page>, Error> {
        // Whoever makes a table looks through those that there are.
        if at.starts_with("/lake/table/") {
            return self.inner.list(at, page, limit, options, by).await;
        }
        // A node looks through outcomes by itself.
        self.begun.fetch_add(usize::from(!at.starts_with("/lake/op/")), Ordering::SeqCst);
        std::future::pending().await
    }

    async fn commit(&self, txn: Txn, by: Instant) -> Result<Committed, Error> {
        self.inner.commit(txn, by).await
    }
}

#[tokio::test]
async fn a_load_looks_at_the_pointer_unless_the_node_may_use_what_it_has_cached() {
    let reads = |store: &Holding| store.reads.load(Ordering::SeqCst);
    for cached in [false, true] {
        let store = Holding::new();
        let cluster = over(store.clone(), 1, |o| Options {
            rest_cached_reads: Some(cached),
            pointer_ttl_ms: Some(3_600_000),
            ..o
        })
        .await;
        let rest = rest(&cluster, 0);
        with_table(&rest).await;
        let table = format!("{TABLES}/t");
        rest.get(&table).await.expect(200);
        for n in 0..5 {
            let set = rest.post(&table, json!({"updates": [set("n", &n.to_string())]})).await.expect(200).json();
            let before = reads(&store);
            // What this node has committed it sees in either case.
            assert_eq!(rest.get(&table).await.expect(200).json()["metadata-location"], set["metadata-location"]);
            assert_eq!(reads(&store) - before, if cached { 0 } else { 1 });
        }
    }
}

#[tokio::test]
async fn nothing_that_is_sent_makes_a_node_fall() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    let table = format!("{TABLES}/t");
    let deep = format!("{{\"updates\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for body in [&b"{"[..], b"", b"[]", b"\xff\xfe", b"null", b"3", deep.as_bytes(), br#"{"updates": {}}"#] {
        let answer = rest.send("POST", &table, body).await;
        assert!([200, 400].contains(&answer.status), "{}: {}", answer.status, String::from_utf8_lossy(body));
    }
    // What the metadata code panics on, or would have to.
    for update in [
        json!({"action": "add-schema", "schema": {"type": "struct", "schema-id": 2147483647, "fields": []}}),
        json!({"action": "add-spec", "spec": {"spec-id": 2147483647, "fields": [
            {"source-id": 1, "field-id": 2147483647, "name": "x", "transform": "bucket[0]"}]}}),
        json!({"action": "add-spec", "spec": {"fields": [{"source-id": 1, "name": "x", "transform": "truncate[4294967295]"}]}}),
        json!({"action": "remove-snapshots", "snapshot-ids": [1]}),
        json!({"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": 1}),
        json!({"action": "remove-schemas", "schema-ids": [0]}),
        json!({"action": "remove-partition-specs", "spec-ids": [0]}),
        json!({"action": "set-default-sort-order", "sort-order-id": -9}),
        json!({"action": "add-snapshot", "snapshot": {"snapshot-id": i64::MIN, "sequence-number": i64::MAX,
            "timestamp-ms": i64::MIN, "manifest-list": "", "summary": {"operation": "append"}}}),
    ] {
        let answer = rest.post(&table, json!({"requirements": [], "updates": [update]})).await;
        assert!([200, 400, 406, 409].contains(&answer.status), "{update}: {}", answer.status);
        rest.get(&table).await.expect(200);
    }
    for path in [
        "/v1/config?warehouse=%00",
        "/v1/config?warehouse=%ff%2F&warehouse",
        "/v1/%00/namespaces",
        "/v1/lake/namespaces?parent=%1F",
        "/v1/lake/namespaces?pageToken=%ff&pageSize=18446744073709551616",
        "/v1/lake/namespaces/%1F/tables",
        "/v1/lake/namespaces/n%00/views?pageSize=-0",
        "/v1/lake/namespaces/n/tables/t?snapshots=%00",
        "/v1/lake/namespaces/n/tables/%20?snapshots=refs&snapshots=all",
    ] {
        let odd = rest.with("If-None-Match", "W/\"\", , *").with("X-Iceberg-Access-Delegation", "a;,,");
        let answer = odd.get(path).await;
        assert!([400, 404].contains(&answer.status) && !answer.error().1.is_empty(), "{path}: {answer:?}");
    }
    let raw = |request: String| {
        let rest = rest.clone();
        async move { rest.exchange(request.as_bytes()).await.status }
    };
    let head = format!("POST {table} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    assert_eq!(raw(format!("{head}Content-Length: 99999999999\r\n\r\n")).await, 413);
    let chunk = format!("{:x}\r\n{}\r\n", 1 << 20, "x".repeat(1 << 20));
    assert_eq!(raw(format!("{head}Transfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n", chunk.repeat(17))).await, 413);
    rest.get("/v1/lake/namespaces/%ff").await.refused(400, "BadRequestException");
    rest.get("/v1/lake/namespaces/a%2Fb").await.refused(400, "BadRequestException");
    rest.get("/v1/config").await.expect(200);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let cluster = over(Arc::new(MemoryStore::new()), 1, |o| Options { rest_body_within_ms: Some(500), ..o }).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    let table = format!("{TABLES}/t");
    let body = json!({"updates": [set("slow", "1")]}).to_string();
    let half = &body[..body.len() / 2];
    let head = format!("POST {table} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    let length = body.len();
    // The connection stays open, and no more comes.
    for sent in [
        format!("{head}Content-Length: {length}\r\n\r\n{half}"),
        format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{half}\r\n", half.len()),
        format!("{head}Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{body}\r\n"),
    ] {
        let message = rest.exchange(sent.as_bytes()).await.refused(408, "BadRequestException");
        assert!(message.starts_with("body: ") && message.contains("nothing was done"), "{message}");
    }
    let properties = async || rest.get(&table).await.expect(200).json()["metadata"]["properties"].clone();
    assert_eq!(properties().await.get("slow"), None);
    rest.exchange(format!("{head}Content-Length: {length}\r\n\r\n{body}").as_bytes()).await.expect(200);
    assert_eq!(properties().await["slow"], "1");
}

/// A node's figure.
async fn figure(rest: &Http, name: &str) -> Option<f64> {
    let text = String::from_utf8(rest.get("/metrics").await.expect(200).body).unwrap();
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let cluster = over(Arc::new(MemoryStore::new()), 1, |o| Options { rest_head_within_ms: Some(500), ..o }).await;
    let rest = rest(&cluster, 0);
    let mut half = TcpStream::connect(rest.address).await.unwrap();
    half.write_all(b"GET /v1/config HTTP/1.1\r\nHo").await.unwrap();
    let mut dripping = TcpStream::connect(rest.address).await.unwrap();
    dripping.write_all(b"GET /v1/config HTTP/1.1\r\nX: ").await.unwrap();
    rest.get("/v1/config").await.expect(200);
    let mut received = Vec::new();
    in_time("the end of half a head", half.read_to_end(&mut received)).await.unwrap();
    assert!(received.is_empty(), "{}", String::from_utf8_lossy(&received));
    // Neither is one that goes on for ever.
    let drips = async {
        while dripping.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    in_time("the end of a head without end", drips).await;
    assert_eq!(figure(&rest, "lake_query_rest_connections_closed_total{reason=\"head\"}").await, Some(2.0));
}

#[tokio::test]
async fn an_idle_connection_does_not_keep_its_place() {
    let change = |o| Options { rest_max_connections: Some(2), rest_idle_secs: Some(2), ..o };
    let cluster = over(Arc::new(MemoryStore::new()), 1, change).await;
    let rest = rest(&cluster, 0);
    let mut silent = TcpStream::connect(rest.address).await.unwrap();
    let mut session = rest.session().await;
    session.get("/v1/config").await.expect(200);
    // Both places are taken.
    rest.get("/v1/config").await.expect(200);
    in_time("the end of a silent connection", silent.read_to_end(&mut Vec::new())).await.unwrap();
    assert_eq!(in_time("the end of an idle connection", session.rest()).await, b"");
    // A client learns of the end before it is counted, and the one that asked in between may have been idle for as long. Where
    // that came late, the longest idle has made room for it.
    crate::support::eventually("two idle connections to be counted", async || {
        let mut closed = 0.0;
        for reason in ["idle", "room"] {
            let name = format!("lake_query_rest_connections_closed_total{{reason=\"{reason}\"}}");
            closed += figure(&rest, &name).await.unwrap_or_default();
        }
        (closed >= 2.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_connection_too_many_waits_and_the_others_make_room() {
    let change = |o| Options { rest_max_connections: Some(1), rest_idle_secs: Some(3600), ..o };
    let cluster = over(Arc::new(MemoryStore::new()), 1, change).await;
    let rest = rest(&cluster, 0);
    let mut session = rest.session().await;
    assert_eq!(session.get("/v1/config").await.expect(200).header("connection"), None);
    let other = tokio::spawn({
        let rest = rest.clone();
        async move { rest.get("/v1/config").await }
    });
    let makes_room = async {
        while session.get("/v1/config").await.expect(200).header("connection") != Some("close") {
            assert!(!other.is_finished(), "two connections were open");
            tokio::task::yield_now().await;
        }
    };
    in_time("an answer that makes room", makes_room).await;
    in_time("the other's turn", other).await.unwrap().expect(200);
    assert_eq!(in_time("the end of the first", session.rest()).await, b"");
    assert!(figure(&rest, "lake_query_rest_connections_waited_total").await >= Some(1.0));
    assert_eq!(figure(&rest, "lake_query_rest_connections").await, Some(1.0), "the one that asks");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_go_away_make_no_room_for_more_than_a_node_serves() {
    const SERVED: usize = 256;
    let begun = |store: &Holding| store.begun.load(Ordering::SeqCst);
    let store = Holding::new();
    let cluster = over(store.clone(), 1, |options| options).await;
    let rest = rest(&cluster, 0);
    let ask = || async {
        let sent = rest.get("/v1/lake/namespaces");
        // The connection is closed once the request is being served.
        let before = begun(&store);
        tokio::select! {
            answer = sent => panic!("answered: {answer:?}"),
            () = async { while begun(&store) == before { tokio::task::yield_now().await } } => {}
        }
    };
    for _ in 0..SERVED {
        ask().await;
    }
    let message = rest.get("/v1/lake/namespaces").await.refused(503, "ServiceUnavailableException");
    assert!(message.contains("nothing was done"), "{message}");
    assert_eq!(begun(&store), SERVED);
}
