//! Requests that are nearly right: what is wrong with one is told, and the node goes on.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::wire::{TABLES, main_is, schema, set, set_main, snapshot, with_table};
use crate::{cluster, rest};

const REQUESTS: usize = 500;

/// Requests as they should be: path and body.
fn requests(created: &Value) -> Vec<(String, Value)> {
    let at = |rest: &str| format!("/v1/lake/namespaces/n{rest}");
    let table = &created["metadata"];
    let spec = json!({"spec-id": 0, "fields": [{"source-id": 1, "name": "b", "transform": "bucket[4]"}]});
    let order = json!({"order-id": 1, "fields": [
        {"source-id": 1, "transform": "identity", "direction": "asc", "null-order": "nulls-first"}]});
    let version = json!({"version-id": 1, "timestamp-ms": 1, "schema-id": 0, "summary": {"engine-name": "x"},
        "default-namespace": ["n"], "representations": [{"type": "sql", "sql": "SELECT 1 AS id", "dialect": "spark"}]});
    let statistics = json!({"snapshot-id": 1, "statistics-path": "file:///nowhere/s.puffin", "file-size-in-bytes": 9,
        "file-footer-size-in-bytes": 3, "blob-metadata": [{"type": "x", "snapshot-id": 1, "sequence-number": 1,
        "fields": [1], "properties": {}}]});
    let nested = json!({"type": "struct", "schema-id": 0, "identifier-field-ids": [1], "fields": [
        {"id": 1, "name": "id", "type": "long", "required": true, "write-default": 1},
        {"id": 2, "name": "l", "required": false,
         "type": {"type": "list", "element-id": 3, "element": "decimal(9, 2)", "element-required": false}},
        {"id": 4, "name": "m", "required": false, "type": {"type": "map", "key-id": 5, "key": "string", "value-id": 6,
         "value-required": true, "value": {"type": "struct", "fields": [
            {"id": 7, "name": "f", "type": "fixed[16]", "required": false}]}}},
    ]});
    let creation = json!({"requirements": [{"type": "assert-create"}], "updates": [
        {"action": "assign-uuid", "uuid": uuid::Uuid::from_u128(9)},
        {"action": "upgrade-format-version", "format-version": 2},
        {"action": "add-schema", "schema": nested}, {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": spec}, {"action": "set-default-spec", "spec-id": -1},
        {"action": "add-sort-order", "sort-order": order}, {"action": "set-default-sort-order", "sort-order-id": -1},
        snapshot(1, None, 1), set_main(1), set("a", "b"),
    ]});
    let commit = json!({"identifier": {"namespace": ["n"], "name": "t"}, "requirements": [
        {"type": "assert-table-uuid", "uuid": table["table-uuid"]}, main_is(None),
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 2},
        {"type": "assert-current-schema-id", "current-schema-id": 0},
        {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 999},
        {"type": "assert-default-spec-id", "default-spec-id": 0},
        {"type": "assert-default-sort-order-id", "default-sort-order-id": 0},
    ], "updates": [set("a", "b")]});
    let updates = json!({"updates": [
        {"action": "add-schema", "schema": schema(), "last-column-id": 2},
        {"action": "add-spec", "spec": {"fields": [{"source-id": 1, "name": "b", "transform": "truncate[4]"}]}},
        {"action": "add-sort-order", "sort-order": order},
        snapshot(1, None, 1), set_main(1),
        {"action": "set-snapshot-ref", "ref-name": "b", "type": "branch", "snapshot-id": 1, "max-ref-age-ms": 1,
         "max-snapshot-age-ms": 1, "min-snapshots-to-keep": 1},
        {"action": "set-statistics", "snapshot-id": 1, "statistics": statistics},
        {"action": "remove-snapshot-ref", "ref-name": "b"}, {"action": "remove-properties", "removals": ["a"]},
        {"action": "remove-snapshots", "snapshot-ids": [7]},
    ]});
    vec![
        ("/v1/lake/namespaces".to_owned(), json!({"namespace": ["n", "m"], "properties": {"k": "v"}})),
        (at("/properties"), json!({"removals": ["x"], "updates": {"k": "v"}})),
        (
            at("/tables"),
            json!({"name": "u", "schema": nested, "partition-spec": spec, "write-order": order, "stage-create": false,
                "properties": {"format-version": "2", "k": "v"}}),
        ),
        (at("/tables"), json!({"name": "s", "schema": schema(), "stage-create": true})),
        (at("/tables/c"), creation),
        (at("/tables/t"), commit.clone()),
        (at("/tables/t"), updates),
        (at("/register"), json!({"name": "r", "metadata-location": created["metadata-location"], "overwrite": true})),
        (at("/tables/t/metrics"), json!({"report-type": "scan-report"})),
        (
            "/v1/lake/tables/rename".to_owned(),
            json!({"source": {"namespace": ["n"], "name": "u"}, "destination": {"namespace": ["n"], "name": "w"}}),
        ),
        ("/v1/lake/transactions/commit".to_owned(), json!({"table-changes": [commit]})),
        (at("/views"), json!({"name": "v", "schema": schema(), "view-version": version, "properties": {"k": "v"}})),
        (
            at("/views/v"),
            json!({"requirements": [], "updates": [{"action": "add-view-version", "view-version": version},
                {"action": "set-current-view-version", "view-version-id": -1}, set("a", "b")]}),
        ),
        (at("/register-view"), json!({"name": "x", "metadata-location": created["metadata-location"]})),
        (
            "/v1/lake/views/rename".to_owned(),
            json!({"source": {"namespace": ["n"], "name": "v"}, "destination": {"namespace": ["n"], "name": "t"}}),
        ),
    ]
}

/// Types and transforms that there are not, or not there.
const ODD_TYPES: [&str; 6] = ["bucket[0]", "truncate[99999999999]", "decimal(99, 99)", "fixed[-1]", "void", "2"];

/// What nobody expects.
fn odd(rng: &mut StdRng) -> Value {
    match rng.random_range(0..20) {
        0 => Value::Null,
        1 => json!(rng.random_bool(0.5)),
        2 => json!(-1),
        3 => json!(0),
        4 => json!(rng.random_range(1..12)),
        5 => json!(i32::MAX),
        6 => json!(i64::from(i32::MAX) + 1),
        7 => json!(i64::MAX),
        8 => json!(i64::MIN),
        9 => json!(u64::MAX),
        10 => json!(1e308),
        11 => json!(""),
        12 => json!("\u{0}\u{1f}/"),
        13 => json!("x".repeat(300)),
        14 => json!("ü".repeat(120)),
        15 => json!("file:///"),
        16 => json!({}),
        17 => json!([]),
        18 => json!([{"a": [null, {"type": "struct"}]}]),
        _ => json!(ODD_TYPES[rng.random_range(0..ODD_TYPES.len())]),
    }
}

/// Makes one thing of a body something else.
fn mutate(value: &mut Value, rng: &mut StdRng) {
    match value {
        Value::Object(map) if !map.is_empty() && rng.random_bool(0.9) => {
            let at = rng.random_range(0..map.len());
            let Some(key) = map.keys().nth(at).cloned() else { return };
            match map.get_mut(&key) {
                Some(inner) if rng.random_bool(0.9) => mutate(inner, rng),
                _ => drop(map.remove(&key)),
            }
        }
        Value::Array(list) if !list.is_empty() && rng.random_bool(0.9) => {
            let at = rng.random_range(0..list.len());
            match rng.random_range(0..10) {
                0 => drop(list.remove(at)),
                1 => {
                    let again = list[at].clone();
                    list.push(again);
                }
                _ => mutate(&mut list[at], rng),
            }
        }
        other => *other = odd(rng),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_nearly_right_is_told_what_is_wrong() {
    let seed: u64 = match std::env::var("LAKE_TEST_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => rand::random::<u32>().into(),
    };
    println!("LAKE_TEST_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    let requests = requests(&with_table(&rest).await);
    let mut session = rest.session().await;
    let mut done = 0;
    for n in 0..REQUESTS {
        let (path, mut body) = requests[rng.random_range(0..requests.len())].clone();
        for _ in 0..rng.random_range(0..4) {
            mutate(&mut body, &mut rng);
        }
        let mut text = body.to_string().into_bytes();
        if rng.random_bool(0.1) {
            let at = rng.random_range(0..text.len());
            match rng.random_bool(0.5) {
                true => text.truncate(at),
                false => text[at] = rng.random(),
            }
        }
        let answer = session.send("POST", &path, &text).await;
        let said =
            || format!("{n}: {path} {}: {}", String::from_utf8_lossy(&text), String::from_utf8_lossy(&answer.body));
        match answer.status {
            200 | 204 => done += 1,
            400 | 404 | 406 | 409 | 422 => assert!(!answer.error().1.is_empty(), "{}", said()),
            other => panic!("{other}: {}", said()),
        }
    }
    assert!(done > 0, "all were refused");
    rest.get(&format!("{TABLES}/t")).await.expect(200);
    let metrics = String::from_utf8(rest.get("/metrics").await.expect(200).body).unwrap();
    assert!(!metrics.contains("outcome=\"failed\"") && !metrics.contains("outcome=\"unavailable\""), "{metrics}");
}
