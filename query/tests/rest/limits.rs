//! What a node does not let a request or a connection do: make it fall, take its time, or take its place; and how often a
//! load asks the metadata.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lake_client::memory::MemoryStore;
use lake_client::store::{Capabilities, Committed, Page, Read, SharedStore};
use lake_client::{Error, MetaStore, ReadOptions};
use lake_proto::kv::{KeyValue, Txn};
use lake_query::{Kind, Options};
use serde_json::{Value, json};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::{in_time, refused};
use crate::http::Http;
use crate::wire::{TABLES, main_is, schema, set, set_main, snapshot, with_table};
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

const BAD: &str = "BadRequestException";

#[tokio::test]
async fn metadata_that_lake_cannot_use_does_not_come_in() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    let created = with_table(&rest).await;
    let of_type = |name: &str, id: i32, t: Value| json!({"id": id, "name": name, "type": t, "required": false});
    let columns = |fields: Value| json!({"type": "struct", "schema-id": 0, "fields": fields});
    let by = |source: i32, transform: &str| json!([{"source-id": source, "name": "x", "transform": transform}]);
    let sorted = |source: i32, transform: &str| {
        json!({"order-id": 1, "fields": [
            {"source-id": source, "transform": transform, "direction": "asc", "null-order": "nulls-first"}]})
    };
    let with = |part: &str, value: Value| {
        let mut body = json!({"name": "u", "schema": schema()});
        body[part] = value;
        body
    };
    for (body, words) in [
        (with("schema", columns(json!([of_type("d", 1, json!("decimal(99,2)"))]))), ["schema, column d", "1 to 38"]),
        (with("schema", columns(json!([of_type("d", 1, json!("decimal(2,3)"))]))), ["schema, column d", "scale"]),
        (with("schema", columns(json!([of_type("f", 1, json!("fixed[0]"))]))), ["schema, column f", "from 1"]),
        (with("schema", columns(json!([]))), ["schema", "at least one column"]),
        (
            with("schema", columns(json!([of_type("a", 1, json!("int")), of_type("a", 2, json!("int"))]))),
            ["schema", "multiple fields for name a"],
        ),
        (with("partition-spec", json!({"fields": by(1, "bucket[0]")})), ["partition-spec, field x", "1 to 2147483647"]),
        (with("partition-spec", json!({"fields": by(1, "truncate[0]")})), ["partition-spec, field x", "truncate[0]"]),
        (with("partition-spec", json!({"fields": by(1, "bucket[-1]")})), ["partition-spec", "bucket[N]"]),
        (with("partition-spec", json!({"fields": by(2, "year")})), ["partition-spec, field x", "date or timestamp"]),
        (with("partition-spec", json!({"fields": by(9, "identity")})), ["partition-spec, field x", "no column"]),
        (with("write-order", sorted(9, "identity")), ["write-order, fields[0]", "no column"]),
        (with("write-order", sorted(1, "bucket[0]")), ["write-order, fields[0]", "bucket[0]"]),
    ] {
        let message = rest.post(TABLES, body.clone()).await.refused(400, BAD);
        assert!(message.starts_with(words[0]) && message.contains(words[1]), "{body}: {message}");
    }
    rest.head(&format!("{TABLES}/u")).await.expect(404);

    // The same by commits: to one table, to several, and to one that they create.
    let bucket = json!({"action": "add-spec", "spec": {"fields": by(1, "bucket[0]")}});
    let refuses = async |updates: Value, words: [&str; 2]| {
        let table = format!("{TABLES}/t");
        let message = rest.post(&table, json!({"updates": updates})).await.refused(400, BAD);
        assert!(words.iter().all(|word| message.contains(word)), "{updates}: {message}");
        let named = |name: &str| json!({"namespace": ["n"], "name": name});
        let create =
            json!([{"action": "add-schema", "schema": schema()}, {"action": "set-current-schema", "schema-id": -1}]);
        let both = json!({"table-changes": [
            {"identifier": named("u"), "requirements": [{"type": "assert-create"}], "updates": create},
            {"identifier": named("t"), "requirements": [], "updates": updates},
        ]});
        let message = rest.post("/v1/lake/transactions/commit", both).await.refused(400, BAD);
        assert!(words.iter().all(|word| message.contains(word)), "{updates}: {message}");
        rest.head(&format!("{TABLES}/u")).await.expect(404);
    };
    refuses(json!([bucket]), ["updates[0].spec, field x", "bucket[0]"]).await;
    refuses(
        json!([{"action": "add-sort-order", "sort-order": sorted(2, "hour")}]),
        ["updates[0].sort-order, fields[0]", "it takes timestamp"],
    )
    .await;
    let create = json!({"requirements": [{"type": "assert-create"}], "updates": [
        {"action": "add-schema", "schema": schema()}, {"action": "set-current-schema", "schema-id": -1},
        bucket, {"action": "set-default-spec", "spec-id": -1},
    ]});
    let message = rest.post(&format!("{TABLES}/u"), create).await.refused(400, BAD);
    assert!(message.starts_with("updates[2].spec, field x: "), "{message}");

    // A schema stays while a snapshot that was written with it does.
    let table = format!("{TABLES}/t");
    let mut wider = schema();
    wider["fields"].as_array_mut().unwrap().push(of_type("n", 3, json!("int")));
    let grown = json!({"requirements": [main_is(None)], "updates": [
        snapshot(1, None, 1), set_main(1),
        {"action": "add-schema", "schema": wider}, {"action": "set-current-schema", "schema-id": -1},
    ]});
    let grown = rest.post(&table, grown).await.expect(200).json();
    let drop = json!([{"action": "remove-schemas", "schema-ids": [0]}]);
    refuses(drop.clone(), ["schema 0", "snapshot 1"]).await;
    let current = &grown["metadata"]["current-schema-id"];
    refuses(json!([{"action": "remove-schemas", "schema-ids": [current]}]), ["updates[0]", "current schema"]).await;
    let expired = json!([{"action": "remove-snapshot-ref", "ref-name": "main"},
        {"action": "remove-snapshots", "snapshot-ids": [1]}, drop[0]]);
    let expired = rest.post(&table, json!({"updates": expired})).await.expect(200).json();
    assert_eq!(expired["metadata"]["schemas"].as_array().unwrap().len(), 1);

    // And by metadata that is registered, here and in SQL.
    let mut metadata = created["metadata"].clone();
    metadata["table-uuid"] = json!(uuid::Uuid::new_v4());
    metadata["partition-specs"] = json!([{"spec-id": 0, "fields": [
        {"source-id": 1, "field-id": 1000, "name": "x", "transform": "bucket[0]"}]}]);
    let place = cluster.dir.path().join("foreign.metadata.json");
    std::fs::write(&place, metadata.to_string()).unwrap();
    let location = format!("file://{}", place.display());
    let body = json!({"name": "u", "metadata-location": location});
    let message = rest.post("/v1/lake/namespaces/n/register", body).await.refused(400, BAD);
    assert!(message.contains("partition spec 0, field x") && message.contains("bucket[0]"), "{message}");
    let client = cluster.client(0).await;
    let error = refused(&client, &format!("CALL system.register_table('n.u', '{location}')")).await;
    assert!(error.kind == Kind::Invalid && error.message.contains("partition spec 0, field x"), "{error}");
}

#[tokio::test]
async fn a_commit_names_no_place_that_the_node_keeps_out_of() {
    let closed = |o| Options { allow_local_files: Some(false), ..o };
    let cluster = over(Arc::new(MemoryStore::new()), 1, closed).await;
    let rest = rest(&cluster, 0);
    let created = with_table(&rest).await;
    let (table, location) = (format!("{TABLES}/t"), created["metadata"]["location"].as_str().unwrap());
    let listed = |place: &str| {
        let mut added = snapshot(1, None, 1);
        added["snapshot"]["manifest-list"] = json!(place);
        json!({"updates": [added, set_main(1)]})
    };
    let outside = |message: String| assert!(message.contains("outside of every warehouse"), "{message}");
    for place in ["file:///etc/passwd", "/etc/passwd", &format!("{location}/../../../../secret"), "s3://other/x", "x"] {
        outside(rest.post(&table, listed(place)).await.refused(400, BAD));
    }
    let other = json!([{"identifier": {"namespace": ["n"], "name": "t"}, "requirements": [],
        "updates": listed("file:///etc/passwd")["updates"]}]);
    outside(rest.post("/v1/lake/transactions/commit", json!({"table-changes": other})).await.refused(400, BAD));
    let statistics = json!({"snapshot-id": 1, "statistics-path": "file:///etc/passwd", "file-size-in-bytes": 9,
        "file-footer-size-in-bytes": 3, "blob-metadata": []});
    rest.post(&table, listed(&format!("{location}/metadata/snap-1.avro"))).await.expect(200);
    for update in [
        json!({"action": "set-statistics", "snapshot-id": 1, "statistics": statistics}),
        set("write.data.path", "file:///elsewhere"),
        set("write.metadata.path", "s3://elsewhere/m"),
    ] {
        outside(rest.post(&table, json!({"updates": [update]})).await.refused(400, BAD));
    }
    rest.post(&table, json!({"updates": [set("write.data.path", &format!("{location}/d"))]})).await.expect(200);
    let create = json!({"name": "u", "schema": schema(), "properties": {"write.data.path": "file:///elsewhere"}});
    outside(rest.post(TABLES, create).await.refused(400, BAD));

    // Metadata in the warehouse, of a table in it, whose snapshot is elsewhere.
    let now = rest.get(&table).await.expect(200).json();
    let mut metadata = now["metadata"].clone();
    metadata["table-uuid"] = json!(uuid::Uuid::new_v4());
    metadata["snapshots"][0]["manifest-list"] = json!("file:///etc/passwd");
    let place = format!("{location}/metadata/foreign.metadata.json");
    std::fs::write(place.strip_prefix("file://").unwrap(), metadata.to_string()).unwrap();
    let body = json!({"name": "u", "metadata-location": place});
    let message = rest.post("/v1/lake/namespaces/n/register", body).await.refused(400, BAD);
    assert!(message.starts_with("snapshot 1, manifest-list: "), "{message}");
    let client = cluster.client(0).await;
    let error = refused(&client, &format!("CALL system.register_table('n.u', '{place}')")).await;
    assert!(
        error.message.contains("snapshot 1, manifest-list") && error.message.contains("allow_local_files"),
        "{error}"
    );
    rest.head(&format!("{TABLES}/u")).await.expect(404);
}

#[tokio::test]
async fn nothing_new_is_called_as_a_path_goes_up() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    let before = cluster.files("metadata.json").len();
    let named = |name: &str| json!({"namespace": ["n"], "name": name});
    for name in [".", "..", "", "a/b", "a\u{0}", "a\nb"] {
        for (path, body) in [
            ("/v1/lake/namespaces", json!({"namespace": [name]})),
            ("/v1/lake/namespaces", json!({"namespace": ["n", name]})),
            (TABLES, json!({"name": name, "schema": schema()})),
            (TABLES, json!({"name": name, "schema": schema(), "stage-create": true})),
            ("/v1/lake/tables/rename", json!({"source": named("t"), "destination": named(name)})),
            (
                "/v1/lake/transactions/commit",
                json!({"table-changes": [
                    {"identifier": named("t"), "requirements": [], "updates": [set("k", "v")]},
                    {"identifier": named(name), "requirements": [{"type": "assert-create"}], "updates": [
                        {"action": "add-schema", "schema": schema()}, {"action": "set-current-schema", "schema-id": -1}]},
                ]}),
            ),
        ] {
            let message = rest.post(path, body.clone()).await.refused(400, BAD);
            assert!(message.contains("a name "), "{path} {body}: {message}");
        }
    }
    assert_eq!(cluster.files("metadata.json").len(), before);
    let location = &rest.get(&format!("{TABLES}/t")).await.expect(200).json()["metadata-location"];
    rest.delete(&format!("{TABLES}/t")).await.expect(204);
    let body = json!({"name": "..", "metadata-location": location});
    rest.post("/v1/lake/namespaces/n/register", body).await.refused(400, BAD);
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
