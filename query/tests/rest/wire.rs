//! The protocol, request by request: statuses, types, fields, limits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use lake_client::memory::MemoryStore;
use lake_query::Options;
use serde_json::{Value, json};

use crate::common::store::{Gated, Through};
use crate::common::{TIMEOUT, in_time, number, numbers, run, until};
use crate::http::Http;
use crate::{cluster, over, rest};

pub fn schema() -> Value {
    json!({"type": "struct", "schema-id": 0, "fields": [
        {"id": 1, "name": "id", "type": "long", "required": true},
        {"id": 2, "name": "what", "type": "string", "required": false},
    ]})
}

pub const TABLES: &str = "/v1/lake/namespaces/n/tables";

/// A namespace `n` with a table `t`; the answer that made it.
pub async fn with_table(rest: &Http) -> Value {
    rest.post("/v1/lake/namespaces", json!({"namespace": ["n"]})).await.expect(200);
    rest.post(TABLES, json!({"name": "t", "schema": schema()})).await.expect(200).json()
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

pub fn snapshot(id: i64, parent: Option<i64>, sequence: i64) -> Value {
    let mut snapshot = json!({
        "snapshot-id": id, "sequence-number": sequence, "timestamp-ms": now_ms(),
        "manifest-list": format!("file:///nowhere/snap-{id}.avro"), "schema-id": 0, "summary": {"operation": "append"},
    });
    if let Some(parent) = parent {
        snapshot["parent-snapshot-id"] = json!(parent);
    }
    json!({"action": "add-snapshot", "snapshot": snapshot})
}

pub fn set_main(id: i64) -> Value {
    json!({"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": id})
}

pub fn set(name: &str, value: &str) -> Value {
    json!({"action": "set-properties", "updates": {name: value}})
}

pub fn main_is(id: Option<i64>) -> Value {
    json!({"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": id})
}

#[tokio::test]
async fn the_configuration_says_what_is_served() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    for query in ["", "?warehouse=", "?warehouse=lake"] {
        let config = rest.get(&format!("/v1/config{query}")).await.expect(200).json();
        assert_eq!(config["overrides"]["prefix"], "lake");
        let endpoints: Vec<_> = config["endpoints"].as_array().unwrap().iter().map(|e| e.as_str().unwrap()).collect();
        assert!(endpoints.contains(&"HEAD /v1/{prefix}/namespaces/{namespace}/tables/{table}"), "{endpoints:?}");
        // What is not served is not advertised.
        for word in ["sign", "oauth", "plan", "tasks", "credentials"] {
            assert!(!endpoints.iter().any(|endpoint| endpoint.contains(word)), "{word} in {endpoints:?}");
        }
        assert_eq!(config["idempotency-key-lifetime"], "PT30M");
    }
    // What is advertised is served, and is all of the protocol that is, but for keys that this node does not lend.
    let config = rest.get("/v1/config").await.expect(200).json();
    let mut advertised: Vec<_> = config["endpoints"].as_array().unwrap().iter().map(|e| e.as_str().unwrap()).collect();
    for endpoint in &advertised {
        let (method, path) = endpoint.split_once(' ').unwrap();
        let path = path.replace("{prefix}", "lake").replace(['{', '}'], "");
        let answer = rest.send(method, &path, if method == "POST" { &b"{}"[..] } else { b"" }).await;
        assert!(answer.status != 405 && answer.status < 500, "{endpoint}: {answer:?}");
        assert!(answer.body.is_empty() || !String::from_utf8_lossy(&answer.body).contains("not served"), "{answer:?}");
    }
    let document = rest.get("/openapi").await.expect(200).json();
    let described = document["paths"].as_object().unwrap().iter().flat_map(|(path, methods)| {
        methods.as_object().unwrap().keys().map(move |method| format!("{} {path}", method.to_uppercase()))
    });
    let mut described: Vec<String> =
        described.filter(|one| one.contains(" /v1/") && !one.ends_with("/credentials")).collect();
    described.sort();
    advertised.sort();
    assert_eq!(advertised, described);
    rest.get("/v1/config?warehouse=other").await.refused(404, "NoSuchWarehouseException");
    rest.get("/v1/other/namespaces").await.refused(404, "NoSuchWarehouseException");
    rest.get("/v1/nothing").await.refused(404, "NotFoundException");
    let other = rest.send("PUT", "/v1/config", b"").await.expect(405);
    assert_eq!(other.header("allow"), Some("GET"));
}

#[tokio::test]
async fn namespaces_nest_and_have_properties() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    let all = "/v1/lake/namespaces";
    let created = rest.post(all, json!({"namespace": ["a"], "properties": {"k": "v"}})).await.expect(200).json();
    assert_eq!(created, json!({"namespace": ["a"], "properties": {"k": "v"}}));
    rest.post(all, json!({"namespace": ["a"]})).await.refused(409, "AlreadyExistsException");
    rest.post(all, json!({"namespace": ["x", "y"]})).await.refused(404, "NoSuchNamespaceException");
    for name in ["b c", "ü"] {
        rest.post(all, json!({"namespace": ["a", name]})).await.expect(200);
    }
    assert_eq!(rest.get(all).await.json()["namespaces"], json!([["a"]]));
    let children = rest.get(&format!("{all}?parent=a")).await.json();
    assert_eq!(children, json!({"namespaces": [["a", "b c"], ["a", "ü"]], "next-page-token": null}));
    rest.get(&format!("{all}?parent=x")).await.refused(404, "NoSuchNamespaceException");
    let first = rest.get(&format!("{all}?parent=a&pageSize=1")).await.json();
    assert_eq!(first["namespaces"], json!([["a", "b c"]]));
    let token = first["next-page-token"].as_str().unwrap().replace('\u{1f}', "%1F").replace(' ', "+");
    let second = rest.get(&format!("{all}?parent=a&pageSize=1&pageToken={token}")).await.json();
    assert_eq!(second, json!({"namespaces": [["a", "ü"]], "next-page-token": null}));

    // As Python and as Java write a space.
    for path in ["a%1Fb%20c", "a%1Fb+c"] {
        rest.head(&format!("{all}/{path}")).await.expect(204);
    }
    assert_eq!(rest.get(&format!("{all}/a")).await.json()["properties"], json!({"k": "v"}));
    rest.head(&format!("{all}/x")).await.expect(404);
    let updated = json!({"removals": ["k", "absent"], "updates": {"n": "1"}});
    let updated = rest.post(&format!("{all}/a/properties"), updated).await.expect(200).json();
    assert_eq!(updated, json!({"updated": ["n"], "removed": ["k"], "missing": ["absent"]}));
    let both = json!({"removals": ["n"], "updates": {"n": "1"}});
    rest.post(&format!("{all}/a/properties"), both).await.refused(422, "UnprocessableEntityException");
    rest.post(&format!("{all}/x/properties"), json!({})).await.refused(404, "NoSuchNamespaceException");
    rest.delete(&format!("{all}/a")).await.refused(409, "NamespaceNotEmptyException");
    for path in ["a%1Fb%20c", "a%1F%C3%BC", "a"] {
        rest.delete(&format!("{all}/{path}")).await.expect(204);
    }
    rest.delete(&format!("{all}/a")).await.refused(404, "NoSuchNamespaceException");
}

#[tokio::test]
async fn a_table_is_created_loaded_listed_renamed_and_dropped() {
    let cluster = cluster(2).await;
    let (rest, other) = (rest(&cluster, 0), rest(&cluster, 1));
    rest.post(TABLES, json!({"name": "t", "schema": schema()})).await.refused(404, "NoSuchNamespaceException");
    let created = with_table(&rest).await;
    let (location, uuid) = (&created["metadata"]["location"], created["metadata"]["table-uuid"].as_str().unwrap());
    assert!(location.as_str().unwrap().ends_with(uuid), "{location}");
    rest.post(TABLES, json!({"name": "t", "schema": schema()})).await.refused(409, "AlreadyExistsException");
    // Every node serves what any has acknowledged.
    let loaded = other.get(&format!("{TABLES}/t")).await.expect(200);
    assert_eq!(loaded.json()["metadata-location"], created["metadata-location"]);
    let tag = loaded.header("etag").unwrap().to_owned();
    let unchanged = other.with("If-None-Match", &format!("\"x\", {tag}")).get(&format!("{TABLES}/t")).await.expect(304);
    assert_eq!((unchanged.body.len(), unchanged.header("etag")), (0, Some(tag.as_str())));
    other.with("If-None-Match", &tag).get(&format!("{TABLES}/t?snapshots=refs")).await.expect(200);
    rest.post(&format!("{TABLES}/t"), json!({"updates": [set("a", "b")]})).await.expect(200);
    other.with("If-None-Match", &tag).get(&format!("{TABLES}/t")).await.expect(200);
    other.get(&format!("{TABLES}/t?snapshots=some")).await.refused(400, "BadRequestException");

    rest.head(&format!("{TABLES}/t")).await.expect(204);
    rest.head(&format!("{TABLES}/u")).await.expect(404);
    rest.get(&format!("{TABLES}/u")).await.refused(404, "NoSuchTableException");
    assert_eq!(rest.get(TABLES).await.json()["identifiers"], json!([{"namespace": ["n"], "name": "t"}]));
    rest.get("/v1/lake/namespaces/x/tables").await.refused(404, "NoSuchNamespaceException");
    rest.post(&format!("{TABLES}/t/metrics"), json!({"report-type": "scan-report"})).await.expect(204);

    let name = |namespace: &str, name: &str| json!({"namespace": [namespace], "name": name});
    let rename = |from: Value, to: Value| {
        let rest = rest.clone();
        async move { rest.post("/v1/lake/tables/rename", json!({"source": from, "destination": to})).await }
    };
    rename(name("n", "u"), name("n", "v")).await.refused(404, "NoSuchTableException");
    rename(name("n", "t"), name("x", "v")).await.refused(404, "NoSuchNamespaceException");
    rest.post(TABLES, json!({"name": "other", "schema": schema()})).await.expect(200);
    rename(name("n", "t"), name("n", "other")).await.refused(409, "AlreadyExistsException");
    rest.delete(&format!("{TABLES}/other")).await.expect(204);
    rename(name("n", "t"), name("n", "v")).await.expect(204);
    other.get(&format!("{TABLES}/t")).await.refused(404, "NoSuchTableException");
    assert_eq!(other.get(&format!("{TABLES}/v")).await.json()["metadata"]["table-uuid"], uuid);

    rest.delete("/v1/lake/namespaces/n").await.refused(409, "NamespaceNotEmptyException");
    let purges = async || {
        let by = std::time::Instant::now() + crate::common::PATIENCE;
        let all =
            lake_client::procedures::calls::list(cluster.store.as_ref(), Default::default(), by).await.unwrap().value;
        all.into_iter().map(|purge| (purge.record.subject, purge.record.data["uuid"].clone())).collect::<Vec<_>>()
    };
    rest.delete(&format!("{TABLES}/v?purgeRequested=True")).await.expect(204);
    assert_eq!(purges().await, [("n.v".to_owned(), json!(uuid))], "submitted with the drop");
    rest.delete(&format!("{TABLES}/v?purgeRequested=true")).await.refused(404, "NoSuchTableException");
    assert_eq!(purges().await.len(), 1);
    rest.delete("/v1/lake/namespaces/n").await.expect(204);
}

#[tokio::test]
async fn what_a_table_cannot_be_is_named() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    rest.post("/v1/lake/namespaces", json!({"namespace": ["n"]})).await.expect(200);
    let fields = |fields: Value| json!({"type": "struct", "schema-id": 0, "fields": fields});
    for (body, field) in [
        (json!({"name": "t"}), "body: missing field `schema`"),
        (json!({"name": "a/b", "schema": schema()}), "name: "),
        (json!({"name": "t", "schema": {"type": "struct"}}), "schema: "),
        (json!({"name": "t", "schema": schema(), "location": "file:///tmp/x"}), "location: "),
        (json!({"name": "t", "schema": schema(), "partition-spec": {"fields": [{"name": "x"}]}}), "partition-spec: "),
        (
            json!({"name": "t", "schema": schema(), "partition-spec": {"fields": [
                {"source-id": 77, "name": "x", "transform": "identity"}]}}),
            "partition-spec, field x: ",
        ),
        (
            json!({"name": "t", "schema": schema(), "properties": {"format-version": "9"}}),
            "properties.format-version: ",
        ),
        (
            json!({"name": "t", "schema": fields(json!([
                {"id": 1, "name": "a", "type": "long", "required": true},
                {"id": 1, "name": "b", "type": "long", "required": true}]))}),
            "schema",
        ),
    ] {
        let message = rest.post(TABLES, body).await.refused(400, "BadRequestException");
        assert!(message.starts_with(field), "{message}");
    }
    rest.head(&format!("{TABLES}/t")).await.expect(404);
    assert_eq!(cluster.files("metadata.json"), [""; 0].map(std::path::PathBuf::from));
}

#[tokio::test]
async fn commits_build_on_each_other_and_a_lost_race_is_told() {
    let cluster = cluster(2).await;
    let (rest, other) = (rest(&cluster, 0), rest(&cluster, 1));
    let created = with_table(&rest).await;
    let uuid = json!({"type": "assert-table-uuid", "uuid": created["metadata"]["table-uuid"]});
    let table = format!("{TABLES}/t");
    let append = |id: i64, parent: Option<i64>, sequence: i64| json!({"requirements": [uuid, main_is(parent)], "updates": [snapshot(id, parent, sequence), set_main(id)]});
    let first = rest.post(&table, append(1, None, 1)).await.expect(200).json();
    assert_eq!(first["metadata"]["current-snapshot-id"], 1);
    assert_eq!(first["metadata"]["metadata-log"][0]["metadata-file"], created["metadata-location"]);

    // Another node's commit was first: the requirement no longer holds.
    other.post(&table, append(2, Some(1), 2)).await.expect(200);
    rest.post(&table, append(3, Some(1), 2)).await.refused(409, "CommitFailedException");
    let passed = json!({"updates": [snapshot(3, Some(2), 2), set_main(3)]});
    assert!(rest.post(&table, passed).await.refused(409, "CommitFailedException").contains("sequence number 2"));
    // The very commit that was made, sent again by something that got no answer, is not made twice, and no lost race.
    let again = other.post(&table, append(1, None, 1)).await.expect(200).json();
    assert_eq!(again["metadata"]["snapshots"].as_array().unwrap().len(), 2);
    // What holds on the newest version is applied there.
    let properties = rest.post(&table, json!({"requirements": [uuid], "updates": [set("a", "b")]})).await.expect(200);
    assert_eq!(properties.json()["metadata"]["current-snapshot-id"], 2);

    let snapshots = |answer: Value| -> Vec<i64> {
        let list = answer["metadata"]["snapshots"].as_array().unwrap().clone();
        list.iter().map(|s| s["snapshot-id"].as_i64().unwrap()).collect()
    };
    assert_eq!(snapshots(other.get(&table).await.json()), [1, 2]);
    assert_eq!(snapshots(other.get(&format!("{table}?snapshots=refs")).await.json()), [2]);

    let gone = json!({"requirements": [{"type": "assert-table-uuid", "uuid": uuid::Uuid::nil()}], "updates": []});
    rest.post(&table, gone).await.refused(409, "CommitFailedException");
    rest.post(&format!("{TABLES}/u"), append(1, None, 1)).await.refused(404, "NoSuchTableException");
    let elsewhere = json!({"identifier": {"namespace": ["n"], "name": "u"}, "updates": []});
    rest.post(&table, elsewhere).await.refused(400, "BadRequestException");
    for (updates, field) in [
        (json!([set("a", "b"), {"action": "set-current-schema", "schema-id": 9}]), "updates[1]: "),
        (json!([{"action": "set-location", "location": "file:///tmp"}]), "updates[0].location: "),
        (json!([{"action": "remove-everything"}]), "updates[0]: "),
        (json!([set("format-version", "1")]), "updates[0]: "),
    ] {
        let message = rest.post(&table, json!({"updates": updates})).await.refused(400, "BadRequestException");
        assert!(message.starts_with(field), "{message}");
    }
    // One version per commit that was made, and nothing of those that were not.
    assert_eq!(cluster.files("metadata.json").len(), 4);
    let same = rest.post(&table, json!({"updates": [set("a", "b")], "requirements": []})).await.expect(200);
    assert_eq!(same.json()["metadata"]["properties"]["a"], "b");
}

#[tokio::test]
async fn a_staged_table_exists_once_it_is_committed() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    rest.post("/v1/lake/namespaces", json!({"namespace": ["n"]})).await.expect(200);
    let staged = json!({"name": "t", "schema": schema(), "stage-create": true, "partition-spec": {"fields": [
        {"source-id": 1, "name": "id_bucket", "transform": "bucket[4]"}]}});
    let staged = rest.post(TABLES, staged).await.expect(200).json();
    assert_eq!(staged.get("metadata-location"), None);
    let metadata = &staged["metadata"];
    let location = metadata["location"].as_str().unwrap();
    assert!(std::path::Path::new(location.strip_prefix("file://").unwrap()).join("metadata").is_dir());
    rest.head(&format!("{TABLES}/t")).await.expect(404);
    let commit = |location: &str| {
        json!({"requirements": [{"type": "assert-create"}], "updates": [
            {"action": "assign-uuid", "uuid": metadata["table-uuid"]},
            {"action": "upgrade-format-version", "format-version": 2},
            {"action": "add-schema", "schema": metadata["schemas"][0]},
            {"action": "set-current-schema", "schema-id": -1},
            {"action": "add-spec", "spec": metadata["partition-specs"][0]},
            {"action": "set-default-spec", "spec-id": -1},
            {"action": "add-sort-order", "sort-order": metadata["sort-orders"][0]},
            {"action": "set-default-sort-order", "sort-order-id": -1},
            {"action": "set-location", "location": location},
            {"action": "set-properties", "updates": metadata["properties"]},
            snapshot(5, None, 1), set_main(5),
        ]})
    };
    let table = format!("{TABLES}/t");
    let foreign = rest.post(&table, commit("file:///tmp/t")).await.refused(400, "BadRequestException");
    assert!(foreign.starts_with("updates[8].location: "), "{foreign}");
    let made = rest.post(&table, commit(location)).await.expect(200).json();
    for same in ["table-uuid", "location", "schemas", "partition-specs", "last-column-id", "properties"] {
        assert_eq!(made["metadata"][same], metadata[same], "{same}");
    }
    assert_eq!(made["metadata"]["current-snapshot-id"], 5);
    // Sent again as it was, it is found to be made; another that would create the table is not.
    let again = rest.post(&table, commit(location)).await.expect(200).json();
    assert_eq!(again, made);
    let mut other = commit(location);
    other["updates"][0]["uuid"] = json!(uuid::Uuid::from_u128(1));
    rest.post(&table, other).await.refused(409, "CommitFailedException");
}

#[tokio::test]
async fn a_table_is_not_made_under_the_uuid_of_another() {
    let cluster = cluster(2).await;
    let (rest, other) = (rest(&cluster, 0), rest(&cluster, 1));
    let there = with_table(&rest).await;
    let requirements = json!([{"type": "assert-create"}]);
    let updates = json!([
        {"action": "assign-uuid", "uuid": there["metadata"]["table-uuid"]},
        {"action": "add-schema", "schema": schema()},
        {"action": "set-current-schema", "schema-id": -1},
    ]);
    let create = json!({"requirements": requirements, "updates": updates});
    let before = cluster.files("metadata.json").len();
    let message = other.post(&format!("{TABLES}/u"), create.clone()).await.refused(409, "CommitFailedException");
    assert!(message.contains("n.t"), "{message}");
    let named = |name: &str| json!({"namespace": ["n"], "name": name});
    let both = json!({"table-changes": [
        {"identifier": named("t"), "requirements": [], "updates": [set("k", "1")]},
        {"identifier": named("u"), "requirements": requirements, "updates": updates},
    ]});
    other.post("/v1/lake/transactions/commit", both).await.refused(409, "AlreadyExistsException");
    rest.head(&format!("{TABLES}/u")).await.expect(404);
    assert_eq!(rest.get(&format!("{TABLES}/t")).await.json()["metadata"]["properties"].get("k"), None);
    assert_eq!(cluster.files("metadata.json").len(), before);
    // Once there is no such table it may be; but not while the files of that one are to be deleted.
    rest.delete(&format!("{TABLES}/t")).await.expect(204);
    other.post(&format!("{TABLES}/u"), create.clone()).await.expect(200);
    other.delete(&format!("{TABLES}/u?purgeRequested=true")).await.expect(204);
    let message = rest.post(&format!("{TABLES}/u"), create).await.refused(409, "CommitFailedException");
    assert!(message.contains("PURGE"), "{message}");
}

#[tokio::test]
async fn a_table_is_registered_by_its_metadata() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    let created = with_table(&rest).await;
    let register = |name: &str, location: &Value, overwrite: bool| {
        let rest = rest.clone();
        let body = json!({"name": name, "metadata-location": location, "overwrite": overwrite});
        async move { rest.post("/v1/lake/namespaces/n/register", body).await }
    };
    let first = &created["metadata-location"];
    register("t", first, false).await.refused(409, "AlreadyExistsException");
    rest.delete(&format!("{TABLES}/t")).await.expect(204);
    let again = register("back", first, false).await.expect(200).json();
    assert_eq!(
        (&again["metadata-location"], &again["metadata"]["table-uuid"]),
        (first, &created["metadata"]["table-uuid"])
    );
    let changed = rest.post(&format!("{TABLES}/back"), json!({"updates": [set("a", "b")]})).await.expect(200).json();
    assert_ne!(&changed["metadata-location"], first);
    // One table has one name: two would change it without each other's knowledge, and each one's files would be the other's.
    for location in [first, &changed["metadata-location"]] {
        let message = register("twin", location, false).await.refused(409, "AlreadyExistsException");
        assert!(message.contains("n.back"), "{message}");
    }
    rest.post(TABLES, json!({"name": "other", "schema": schema()})).await.expect(200);
    register("other", first, true).await.refused(409, "AlreadyExistsException");
    register("back", first, true).await.expect(200);
    assert_eq!(&rest.get(&format!("{TABLES}/back")).await.json()["metadata-location"], first);
    for nothing in ["file:///nowhere/v1.metadata.json", "file:///etc/passwd", "file:///", "gs://b/x", "nonsense"] {
        let message = register("u", &json!(nothing), false).await.refused(400, "BadRequestException");
        assert!(message.starts_with("metadata-location: "), "{message}");
        assert!(!message.contains("root:"), "{message}");
    }

    let closed = over(cluster.store.clone(), 1, |o| Options { allow_local_files: Some(false), ..o }).await;
    let body = json!({"name": "u", "metadata-location": first});
    let outside = crate::rest(&closed, 0).post("/v1/lake/namespaces/n/register", body).await;
    assert!(outside.refused(400, "BadRequestException").contains("outside of every warehouse"));
}

#[tokio::test]
async fn tables_of_version_3_have_ids_for_their_rows() {
    let cluster = cluster(2).await;
    let (rest, other) = (rest(&cluster, 0), rest(&cluster, 1));
    rest.post("/v1/lake/namespaces", json!({"namespace": ["n"]})).await.expect(200);
    let third = json!({"name": "t", "schema": schema(), "properties": {"format-version": "3"}});
    let created = rest.post(TABLES, third).await.expect(200).json();
    let told =
        |answer: &Value| (answer["metadata"]["format-version"].clone(), answer["metadata"]["next-row-id"].clone());
    assert_eq!(told(&created), (json!(3), json!(0)));
    let table = format!("{TABLES}/t");
    let add = |id: i64, parent: Option<i64>, first: Option<u64>, rows: u64| {
        let mut added = snapshot(id, parent, id);
        if let Some(first) = first {
            added["snapshot"]["first-row-id"] = json!(first);
            added["snapshot"]["added-rows"] = json!(rows);
        }
        json!({"requirements": [main_is(parent)], "updates": [added, set_main(id)]})
    };
    let first = rest.post(&table, add(1, None, Some(0), 30)).await.expect(200).json();
    assert_eq!(told(&first), (json!(3), json!(30)));
    let loaded = other.get(&table).await.expect(200).json();
    assert_eq!(loaded["metadata"], first["metadata"]);
    assert_eq!(loaded["metadata"]["snapshots"][0]["first-row-id"], 0);
    assert_eq!(loaded["metadata"]["snapshots"][0]["added-rows"], 30);
    // Ids that another commit has given already are a lost race; a snapshot without any is no snapshot of this version.
    let passed = json!({"updates": add(2, Some(1), Some(10), 5)["updates"]});
    assert!(rest.post(&table, passed).await.refused(409, "CommitFailedException").contains("row ids"));
    rest.post(&table, add(2, Some(1), None, 0)).await.refused(400, "BadRequestException");
    other.post(&table, add(2, Some(1), Some(30), 5)).await.expect(200);
    assert_eq!(told(&rest.get(&table).await.json()), (json!(3), json!(35)));

    // Another is upgraded, for good; one is created by a commit; one is registered.
    rest.post(TABLES, json!({"name": "u", "schema": schema()})).await.expect(200);
    let version = |version: u8| json!({"updates": [{"action": "upgrade-format-version", "format-version": version}]});
    let upgraded = rest.post(&format!("{TABLES}/u"), version(3)).await.expect(200).json();
    assert_eq!(told(&upgraded), (json!(3), json!(0)));
    rest.post(&format!("{TABLES}/u"), version(2)).await.refused(400, "BadRequestException");
    let staged = json!({"name": "s", "schema": schema(), "stage-create": true, "properties": {"format-version": "3"}});
    let staged = rest.post(TABLES, staged).await.expect(200).json();
    let mut rows = snapshot(1, None, 1);
    (rows["snapshot"]["first-row-id"], rows["snapshot"]["added-rows"]) = (json!(0), json!(7));
    let create = json!({"requirements": [{"type": "assert-create"}], "updates": [
        {"action": "assign-uuid", "uuid": staged["metadata"]["table-uuid"]},
        {"action": "upgrade-format-version", "format-version": 3},
        {"action": "add-schema", "schema": staged["metadata"]["schemas"][0]},
        {"action": "set-current-schema", "schema-id": -1},
        rows, set_main(1),
    ]});
    let made = rest.post(&format!("{TABLES}/s"), create).await.expect(200).json();
    assert_eq!(told(&made), (json!(3), json!(7)));
    rest.delete(&format!("{TABLES}/s")).await.expect(204);
    let again = json!({"name": "r", "metadata-location": made["metadata-location"]});
    let registered = rest.post("/v1/lake/namespaces/n/register", again).await.expect(200).json();
    assert_eq!(registered["metadata"], made["metadata"]);
}

#[tokio::test]
async fn sql_and_rest_see_the_same_tables() {
    let cluster = cluster(1).await;
    let (rest, sql) = (rest(&cluster, 0), cluster.client(0).await);
    run(&sql, "CREATE TABLE t AS SELECT * FROM (VALUES (1, 'a'), (2, 'b')) AS v(id, what)").await;
    let loaded = rest.get("/v1/lake/namespaces/default/tables/t").await.expect(200).json();
    assert_eq!(loaded["metadata"]["snapshots"].as_array().unwrap().len(), 1);
    // A column more, by REST; SQL sees it, and goes on writing.
    let mut wider = loaded["metadata"]["schemas"][0].clone();
    let last = loaded["metadata"]["last-column-id"].as_i64().unwrap();
    let added = json!({"id": last + 1, "name": "more", "type": "long", "required": false});
    wider["fields"].as_array_mut().unwrap().push(added);
    let updates = json!([{"action": "add-schema", "schema": wider}, {"action": "set-current-schema", "schema-id": -1}]);
    rest.post("/v1/lake/namespaces/default/tables/t", json!({"updates": updates})).await.expect(200);
    run(&sql, "INSERT INTO t VALUES (3, 'c', 30)").await;
    assert_eq!(numbers(&sql, "SELECT coalesce(more, 0) FROM t ORDER BY id").await, [0, 0, 30]);
    rest.post(TABLES.replace("/n/", "/default/").as_str(), json!({"name": "u", "schema": schema()})).await.expect(200);
    run(&sql, "INSERT INTO u VALUES (7, 'x')").await;
    assert_eq!(number(&sql, "SELECT id FROM u").await, 7);
    run(&sql, "DROP TABLE u").await;
    rest.head("/v1/lake/namespaces/default/tables/u").await.expect(404);
}

#[tokio::test]
async fn many_commits_at_once_are_all_made() {
    let cluster = cluster(2).await;
    with_table(&rest(&cluster, 0)).await;
    let clients = (0..16).map(|i| {
        let rest = rest(&cluster, i % 2);
        async move {
            for n in 0..4 {
                let body = json!({"requirements": [], "updates": [set(&format!("c{i}-{n}"), "x")]});
                rest.post(&format!("{TABLES}/t"), body).await.expect(200);
            }
        }
    });
    futures::future::join_all(clients).await;
    let loaded = rest(&cluster, 1).get(&format!("{TABLES}/t")).await.json();
    let mine = loaded["metadata"]["properties"].as_object().unwrap().keys().filter(|k| k.starts_with('c')).count();
    assert_eq!(mine, 64);
    // Each is a version of its own, and no version was lost.
    assert_eq!(loaded["metadata"]["metadata-log"].as_array().unwrap().len(), 64);
    assert_eq!(cluster.files("metadata.json").len(), 65);
}

#[tokio::test]
async fn metadata_files_beyond_what_a_table_keeps_are_removed() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    let keep = json!({"updates": [set("write.metadata.previous-versions-max", "2")]});
    rest.post(&format!("{TABLES}/t"), keep).await.expect(200);
    for n in 0..5 {
        rest.post(&format!("{TABLES}/t"), json!({"updates": [set("n", &n.to_string())]})).await.expect(200);
    }
    crate::support::eventually("old metadata to be gone", async || {
        (cluster.files("metadata.json").len() == 3).then_some(())
    })
    .await;
}

#[tokio::test]
async fn metadata_files_stay_where_a_table_wants_them_to() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    let keep = json!({"updates": [
        set("write.metadata.previous-versions-max", "2"),
        set("write.metadata.delete-after-commit.enabled", "false"),
    ]});
    rest.post(&format!("{TABLES}/t"), keep).await.expect(200);
    let mut answer = Value::Null;
    for n in 0..5 {
        answer =
            rest.post(&format!("{TABLES}/t"), json!({"updates": [set("n", &n.to_string())]})).await.expect(200).json();
    }
    // They fall out of the log, and what the node has begun has ended once it has stopped.
    assert_eq!(answer["metadata"]["metadata-log"].as_array().unwrap().len(), 2);
    let mut cluster = cluster;
    cluster.nodes.remove(0).shutdown().await;
    assert_eq!(cluster.files("metadata.json").len(), 7);
}

#[tokio::test]
async fn a_secret_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secret");
    std::fs::write(&path, "open-sesame-open-sesame\n").unwrap();
    let secret = Some(path);
    let store = std::sync::Arc::new(lake_client::memory::MemoryStore::new());
    let cluster = over(store, 1, |o| Options { secret_file: secret.clone(), ..o }).await;
    let rest = rest(&cluster, 0);
    rest.get("/v1/config").await.refused(401, "NotAuthorizedException");
    rest.with("Authorization", "Bearer nonsense").get("/v1/config").await.refused(401, "NotAuthorizedException");
    rest.with("Authorization", "Bearer open-sesame-open-sesame").get("/v1/config").await.expect(200);
}

#[tokio::test]
async fn a_node_that_stops_ends_what_it_has_begun() {
    let way = Arc::new(Through { store: Arc::new(MemoryStore::new()), way: Gated::default() });
    let mut cluster = over(way.clone(), 1, |options| options).await;
    let rest = rest(&cluster, 0);
    with_table(&rest).await;
    // An idle connection does not hold it up.
    let _idle = tokio::net::TcpStream::connect(rest.address).await.unwrap();
    let commits = futures::future::join_all((0..8).map(|i| {
        let rest = rest.clone();
        async move {
            let body = json!({"updates": [set(&format!("p{i}"), "x")]});
            rest.post(&format!("{TABLES}/t"), body).await.status
        }
    }));
    assert_eq!(commits.await, [200; 8]);
    let (client, other) = (cluster.client(0).await, cluster.client(0).await);
    run(&client, "CREATE TABLE n.u (x BIGINT)").await;
    // Two changes come to their commits, and no further.
    let gate = way.gate.lock().await;
    let before = way.came.load(Ordering::SeqCst);
    let commit = tokio::spawn({
        let rest = rest.clone();
        async move { rest.post(&format!("{TABLES}/t"), json!({"updates": [set("p", "x")]})).await.status }
    });
    let insert = tokio::spawn(async move { run(&client, "INSERT INTO n.u VALUES (1)").await });
    until("both to be there", async || way.came.load(Ordering::SeqCst) == before + 2).await;
    let stops = tokio::spawn(cluster.nodes.remove(0).shutdown());
    until("no statement to begin", async || other.query("SELECT 1", TIMEOUT).await.is_err()).await;
    assert!(!stops.is_finished());
    drop(gate);
    assert_eq!(commit.await.unwrap(), 200);
    insert.await.unwrap();
    in_time("the node to stop", stops).await.unwrap();
    assert!(tokio::net::TcpStream::connect(rest.address).await.is_err());
}
