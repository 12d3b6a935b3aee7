//! Every update that the specification has, made on one node and loaded from another.

use serde_json::{Value, json};

use crate::wire::{TABLES, schema, set, set_main, snapshot, with_table};
use crate::{cluster, rest};

/// How many entries a list of the metadata has; none, where there is no such list.
fn count(metadata: &Value, list: &str) -> usize {
    metadata[list].as_array().map_or(0, Vec::len)
}

#[tokio::test]
async fn every_update_is_made() {
    let cluster = cluster(2).await;
    let (rest, other) = (rest(&cluster, 0), rest(&cluster, 1));
    let created = with_table(&rest).await;
    let (uuid, location) = (&created["metadata"]["table-uuid"], &created["metadata"]["location"]);
    let table = format!("{TABLES}/t");
    let mut wider = schema();
    wider["schema-id"] = json!(1);
    wider["fields"].as_array_mut().unwrap().push(json!({"id": 3, "name": "n", "type": "int", "required": false}));
    let statistics = json!({"snapshot-id": 2, "statistics-path": "file:///nowhere/s.puffin", "file-size-in-bytes": 9,
        "file-footer-size-in-bytes": 3, "blob-metadata": []});
    let of_partitions =
        json!({"snapshot-id": 2, "statistics-path": "file:///nowhere/p.parquet", "file-size-in-bytes": 9});
    let key = json!({"key-id": "k", "encrypted-key-metadata": "AAEC", "encrypted-by-id": "kms"});
    // The updates of a commit, what is looked at then, and what it is.
    let commits: Vec<(Value, &str, Value)> = vec![
        (json!([{"action": "assign-uuid", "uuid": uuid}]), "/table-uuid", uuid.clone()),
        (json!([{"action": "set-location", "location": location}]), "/location", location.clone()),
        (
            json!([{"action": "add-schema", "schema": wider}, {"action": "set-current-schema", "schema-id": -1}]),
            "/current-schema-id",
            json!(1),
        ),
        (json!([{"action": "set-current-schema", "schema-id": 0}]), "/current-schema-id", json!(0)),
        (json!([{"action": "remove-schemas", "schema-ids": [1]}]), "schemas", json!(1)),
        (
            json!([
                {"action": "add-spec", "spec": {"fields": [{"source-id": 1, "name": "b", "transform": "bucket[4]"}]}},
                {"action": "set-default-spec", "spec-id": -1},
            ]),
            "/default-spec-id",
            json!(1),
        ),
        (json!([{"action": "set-default-spec", "spec-id": 0}]), "/default-spec-id", json!(0)),
        (json!([{"action": "remove-partition-specs", "spec-ids": [1]}]), "partition-specs", json!(1)),
        (
            json!([
                {"action": "add-sort-order", "sort-order": {"order-id": 1, "fields": [
                    {"source-id": 1, "transform": "identity", "direction": "asc", "null-order": "nulls-first"}]}},
                {"action": "set-default-sort-order", "sort-order-id": -1},
            ]),
            "/default-sort-order-id",
            json!(1),
        ),
        (json!([snapshot(1, None, 1), set_main(1)]), "/current-snapshot-id", json!(1)),
        (json!([snapshot(2, Some(1), 2), set_main(2)]), "/refs/main/snapshot-id", json!(2)),
        (
            json!([{"action": "set-snapshot-ref", "ref-name": "old", "type": "tag", "snapshot-id": 1}]),
            "/refs/old/snapshot-id",
            json!(1),
        ),
        (json!([{"action": "remove-snapshot-ref", "ref-name": "old"}]), "/refs/old", Value::Null),
        (
            json!([{"action": "set-statistics", "snapshot-id": 2, "statistics": statistics}]),
            "/statistics/0/statistics-path",
            statistics["statistics-path"].clone(),
        ),
        (json!([{"action": "remove-statistics", "snapshot-id": 2}]), "statistics", json!(0)),
        (
            json!([{"action": "set-partition-statistics", "partition-statistics": of_partitions}]),
            "/partition-statistics/0/statistics-path",
            of_partitions["statistics-path"].clone(),
        ),
        (json!([{"action": "remove-partition-statistics", "snapshot-id": 2}]), "partition-statistics", json!(0)),
        (json!([{"action": "remove-snapshots", "snapshot-ids": [1]}]), "snapshots", json!(1)),
        (json!([set("k", "v")]), "/properties/k", json!("v")),
        (json!([{"action": "remove-properties", "removals": ["k"]}]), "/properties/k", Value::Null),
        (json!([{"action": "upgrade-format-version", "format-version": 3}]), "/format-version", json!(3)),
        (json!([{"action": "add-encryption-key", "encryption-key": key}]), "/encryption-keys/0/key-id", json!("k")),
        (json!([{"action": "remove-encryption-key", "key-id": "k"}]), "encryption-keys", json!(0)),
    ];
    for (updates, at, expected) in commits {
        let made = rest.post(&table, json!({"requirements": [], "updates": updates})).await.expect(200).json();
        let metadata = &made["metadata"];
        let now = match at.starts_with('/') {
            true => metadata.pointer(at).cloned().unwrap_or_default(),
            false => json!(count(metadata, at)),
        };
        assert_eq!(now, expected, "{at} after {updates}: {metadata}");
        // Written and read again it is the same.
        let loaded = other.get(&table).await.expect(200).json();
        assert_eq!(loaded, made, "after {updates}");
    }
}
