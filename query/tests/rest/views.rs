//! Views, commits to several tables, and requests that are sent again.

use std::time::{Duration, Instant};

use lake_client::store::ReadOptions;
use serde_json::{Value, json};

use crate::http::Http;
use crate::{cluster, rest};

const NAMESPACE: &str = "/v1/lake/namespaces/n";

fn schema() -> Value {
    json!({"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "id", "type": "long", "required": false}]})
}

fn version(sql: &str) -> Value {
    json!({"version-id": 1, "schema-id": 0, "timestamp-ms": 1_700_000_000_000i64, "summary": {},
        "default-namespace": ["n"], "representations": [{"type": "sql", "sql": sql, "dialect": "spark"}]})
}

async fn namespace(rest: &Http) {
    rest.post("/v1/lake/namespaces", json!({"namespace": ["n"]})).await.expect(200);
}

async fn table(rest: &Http, name: &str) -> Value {
    rest.post(&format!("{NAMESPACE}/tables"), json!({"name": name, "schema": schema()})).await.expect(200).json()
}

fn set(name: &str, value: &str) -> Value {
    json!({"action": "set-properties", "updates": {name: value}})
}

#[tokio::test(flavor = "multi_thread")]
async fn views_of_sql_are_those_of_rest() {
    use crate::common::{number, refused, run};
    let cluster = cluster(2).await;
    let (rest, client) = (rest(&cluster, 0), cluster.client(1).await);
    namespace(&rest).await;
    run(&client, "CREATE TABLE n.t AS SELECT CAST(7 AS BIGINT) AS id").await;
    run(&client, "CREATE VIEW n.v (number COMMENT 'the id') COMMENT 'of t' AS SELECT id FROM n.t").await;
    let view = rest.get(&format!("{NAMESPACE}/views/v")).await.expect(200).json();
    let metadata = &view["metadata"];
    let representation = &metadata["versions"][0]["representations"][0];
    assert_eq!(representation["dialect"], "datafusion");
    assert!(representation["sql"].as_str().unwrap().contains("SELECT id FROM n.t"), "{representation}");
    let column = &metadata["schemas"][0]["fields"][0];
    assert_eq!(
        (&column["name"], &column["type"], &column["doc"]),
        (&json!("number"), &json!("long"), &json!("the id"))
    );
    assert_eq!(metadata["properties"]["comment"], "of t");
    assert_eq!(number(&client, "SELECT number FROM n.v").await, 7);

    // Another engine's, in its dialect and then in ours; its names are of its own namespace.
    let views = format!("{NAMESPACE}/views");
    let foreign = json!({"name": "w", "schema": schema(), "view-version": version("SELECT id FROM t")});
    let created = rest.post(&views, foreign).await.expect(200).json();
    let error = refused(&client, "SELECT * FROM n.w").await;
    assert!(error.message.contains("only in: spark"), "{error}");
    let mut ours = version("SELECT id, id + 1 AS more FROM t");
    let spark = ours["representations"][0].clone();
    ours["representations"][0]["dialect"] = json!("datafusion");
    ours["representations"].as_array_mut().unwrap().push(spark);
    let replace = json!({"requirements": [{"type": "assert-view-uuid", "uuid": created["metadata"]["view-uuid"]}],
        "updates": [{"action": "add-view-version", "view-version": ours},
            {"action": "set-current-view-version", "view-version-id": -1}]});
    rest.post(&format!("{views}/w"), replace).await.expect(200);
    assert_eq!(number(&client, "SELECT * FROM n.w").await, 7, "the columns are the view's");
    run(&client, "CREATE OR REPLACE VIEW n.w AS SELECT id * 2 AS id FROM n.t").await;
    assert_eq!(number(&client, "SELECT id FROM n.w").await, 14);
    let replaced = rest.get(&format!("{views}/w")).await.expect(200).json();
    assert_eq!(replaced["metadata"]["properties"].get("replace.drop-dialect.allowed"), None);
    run(&client, "DROP VIEW n.w").await;
    rest.get(&format!("{views}/w")).await.refused(404, "NoSuchViewException");
    run(&client, "DROP SCHEMA n CASCADE").await;
    rest.get(&format!("{views}/v")).await.refused(404, "NoSuchViewException");
}

#[tokio::test]
async fn views_share_the_names_of_tables() {
    let cluster = cluster(2).await;
    let (rest, other) = (rest(&cluster, 0), rest(&cluster, 1));
    namespace(&rest).await;
    table(&rest, "t").await;
    let views = format!("{NAMESPACE}/views");
    let view = |name: &str| json!({"name": name, "schema": schema(), "view-version": version("SELECT 1")});
    rest.post(&views, view("t")).await.refused(409, "AlreadyExistsException");
    let created = rest.post(&views, view("v")).await.expect(200).json();
    assert_eq!(created["metadata"]["versions"][0]["representations"][0]["sql"], "SELECT 1");
    rest.post(&views, view("v")).await.refused(409, "AlreadyExistsException");
    let taken = json!({"name": "v", "schema": schema()});
    rest.post(&format!("{NAMESPACE}/tables"), taken.clone()).await.refused(409, "AlreadyExistsException");
    let mut staged = taken;
    staged["stage-create"] = json!(true);
    rest.post(&format!("{NAMESPACE}/tables"), staged).await.refused(409, "AlreadyExistsException");
    assert_eq!(other.get(&views).await.json()["identifiers"], json!([{"namespace": ["n"], "name": "v"}]));
    other.head(&format!("{views}/v")).await.expect(204);
    assert_eq!(other.get(&format!("{views}/v")).await.expect(200).json(), created);

    let replace = |uuid: &Value, sql: &str| {
        json!({"requirements": [{"type": "assert-view-uuid", "uuid": uuid}], "updates": [
            {"action": "add-view-version", "view-version": version(sql)},
            {"action": "set-current-view-version", "view-version-id": -1}]})
    };
    let uuid = &created["metadata"]["view-uuid"];
    let replaced = other.post(&format!("{views}/v"), replace(uuid, "SELECT 2")).await.expect(200).json();
    assert_eq!(replaced["metadata"]["current-version-id"], 2);
    assert_eq!(rest.get(&format!("{views}/v")).await.json(), replaced);
    let foreign = replace(&json!(uuid::Uuid::nil()), "SELECT 3");
    rest.post(&format!("{views}/v"), foreign).await.refused(409, "CommitFailedException");
    rest.post(&format!("{views}/w"), replace(uuid, "SELECT 3")).await.refused(404, "NoSuchViewException");
    let moved = json!({"updates": [{"action": "set-location", "location": "file:///tmp"}]});
    rest.post(&format!("{views}/v"), moved).await.refused(400, "BadRequestException");

    // Every kind of update that there is.
    let mut wider = schema();
    wider["fields"].as_array_mut().unwrap().push(json!({"id": 2, "name": "n", "type": "int", "required": false}));
    let mut third = version("SELECT 3");
    third["schema-id"] = json!(-1);
    let all = json!({"requirements": [], "updates": [
        {"action": "assign-uuid", "uuid": uuid},
        {"action": "upgrade-format-version", "format-version": 1},
        {"action": "set-location", "location": created["metadata"]["location"]},
        {"action": "add-schema", "schema": wider, "last-column-id": 2},
        {"action": "add-view-version", "view-version": third},
        {"action": "set-current-view-version", "view-version-id": -1},
        {"action": "set-properties", "updates": {"a": "b", "c": "d"}},
        {"action": "remove-properties", "removals": ["c"]},
    ]});
    let changed = rest.post(&format!("{views}/v"), all).await.expect(200).json();
    let metadata = &changed["metadata"];
    assert_eq!((&metadata["current-version-id"], &metadata["properties"]), (&json!(3), &json!({"a": "b"})));
    let third = metadata["versions"].as_array().unwrap().iter().find(|version| version["version-id"] == 3).unwrap();
    let of_third = metadata["schemas"].as_array().unwrap().iter().find(|one| one["schema-id"] == third["schema-id"]);
    assert_eq!(of_third.unwrap()["fields"], wider["fields"]);
    assert_eq!(other.get(&format!("{views}/v")).await.json(), changed);

    let rename = |from: &str, to: &str| {
        let named = |name: &str| json!({"namespace": ["n"], "name": name});
        let (rest, body) = (rest.clone(), json!({"source": named(from), "destination": named(to)}));
        async move { rest.post("/v1/lake/views/rename", body).await }
    };
    rename("v", "t").await.refused(409, "AlreadyExistsException");
    rename("x", "y").await.refused(404, "NoSuchViewException");
    rename("v", "w").await.expect(204);
    rest.get(&format!("{views}/v")).await.refused(404, "NoSuchViewException");
    rest.delete(&format!("{NAMESPACE}/tables/t")).await.expect(204);
    rest.delete(NAMESPACE).await.refused(409, "NamespaceNotEmptyException");
    rest.delete(&format!("{views}/w")).await.expect(204);
    rest.delete(&format!("{views}/w")).await.refused(404, "NoSuchViewException");
    let again = json!({"name": "v", "metadata-location": created["metadata-location"]});
    let registered = rest.post(&format!("{NAMESPACE}/register-view"), again).await.expect(200).json();
    assert_eq!(registered, created);
}

#[tokio::test]
async fn several_tables_change_together_or_not_at_all() {
    let cluster = cluster(2).await;
    let (rest, other) = (rest(&cluster, 0), rest(&cluster, 1));
    namespace(&rest).await;
    let (a, b) = (table(&rest, "a").await, table(&rest, "b").await);
    let is = |table: &Value| json!([{"type": "assert-table-uuid", "uuid": table["metadata"]["table-uuid"]}]);
    let part = |name: &str, requirements: Value, updates: Value| json!({"identifier": {"namespace": ["n"], "name": name}, "requirements": requirements, "updates": updates});
    let commit = |changes: Value| {
        let rest = rest.clone();
        async move { rest.post("/v1/lake/transactions/commit", json!({"table-changes": changes})).await }
    };
    let property = async |name: &str| {
        let answer = other.get(&format!("{NAMESPACE}/tables/{name}")).await.expect(200).json();
        answer["metadata"]["properties"]["k"].as_str().unwrap_or_default().to_owned()
    };
    let both = json!([part("a", is(&a), json!([set("k", "1")])), part("b", is(&b), json!([set("k", "1")]))]);
    commit(both).await.expect(204);
    assert_eq!((property("a").await, property("b").await), ("1".into(), "1".into()));
    // One of them does not hold: none is made, and nothing is left of it.
    let before = cluster.files("metadata.json").len();
    let half = json!([part("a", is(&a), json!([set("k", "2")])), part("b", is(&a), json!([set("k", "2")]))]);
    commit(half).await.refused(409, "CommitFailedException");
    let gone = json!([part("a", is(&a), json!([set("k", "2")])), part("x", is(&a), json!([set("k", "2")]))]);
    commit(gone).await.refused(404, "NoSuchTableException");
    assert_eq!((property("a").await, cluster.files("metadata.json").len()), ("1".into(), before));
    let twice = json!([part("a", json!([]), json!([])), part("a", json!([]), json!([]))]);
    assert!(commit(twice).await.refused(400, "BadRequestException").starts_with("table-changes[1]: "));
    let wrong = json!([part("a", json!([]), json!([{"action": "x"}]))]);
    assert!(commit(wrong).await.refused(400, "BadRequestException").starts_with("table-changes[0].updates[0]: "));

    // A table that is created together with a change of another.
    let staged = json!({"name": "c", "schema": schema(), "stage-create": true});
    let staged = rest.post(&format!("{NAMESPACE}/tables"), staged).await.expect(200).json();
    let metadata = &staged["metadata"];
    let create = json!([
        {"action": "assign-uuid", "uuid": metadata["table-uuid"]},
        {"action": "add-schema", "schema": metadata["schemas"][0]},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "set-location", "location": metadata["location"]},
    ]);
    let made =
        json!([part("c", json!([{"type": "assert-create"}]), create), part("b", is(&b), json!([set("k", "3")]))]);
    commit(made.clone()).await.expect(204);
    assert_eq!(property("b").await, "3");
    rest.head(&format!("{NAMESPACE}/tables/c")).await.expect(204);
    // Sent again as it was, it is found to be made; another that creates the table is not.
    let before = cluster.files("metadata.json").len();
    commit(made.clone()).await.expect(204);
    assert_eq!(cluster.files("metadata.json").len(), before);
    let mut elsewhere = made;
    elsewhere[0]["updates"][0]["uuid"] = json!(uuid::Uuid::from_u128(1));
    elsewhere[0]["updates"].as_array_mut().unwrap().pop();
    commit(elsewhere).await.refused(409, "CommitFailedException");

    // Many at once, in turn with commits to one of the tables: all are made.
    let transactions = (0..8).map(|i| {
        let changes = json!([
            part("a", json!([]), json!([set(&format!("m{i}"), "x")])),
            part("b", json!([]), json!([set(&format!("m{i}"), "x")]))
        ]);
        commit(changes)
    });
    let singles =
        (0..8).map(|i| {
            let other = other.clone();
            async move {
                other.post(&format!("{NAMESPACE}/tables/a"), json!({"updates": [set(&format!("s{i}"), "x")]})).await
            }
        });
    let (transactions, singles) =
        tokio::join!(futures::future::join_all(transactions), futures::future::join_all(singles));
    transactions.into_iter().for_each(|answer| drop(answer.expect(204)));
    singles.into_iter().for_each(|answer| drop(answer.expect(200)));
    let count = |answer: Value, with: char| {
        let properties = answer["metadata"]["properties"].as_object().unwrap().clone();
        properties.keys().filter(|k| k.len() == 2 && k.starts_with(with)).count()
    };
    for name in ["a", "b"] {
        assert_eq!(count(rest.get(&format!("{NAMESPACE}/tables/{name}")).await.json(), 'm'), 8);
    }
    assert_eq!(count(rest.get(&format!("{NAMESPACE}/tables/a")).await.json(), 's'), 8);
}

#[tokio::test]
async fn a_request_that_is_sent_again_is_made_once() {
    let cluster = cluster(2).await;
    let nodes = [rest(&cluster, 0), rest(&cluster, 1)];
    namespace(&nodes[0]).await;
    let keyed = |node: usize, key: u128| nodes[node].with("Idempotency-Key", &uuid::Uuid::from_u128(key).to_string());
    let tables = format!("{NAMESPACE}/tables");
    let create = json!({"name": "t", "schema": schema()});
    let first = keyed(0, 1).post(&tables, create.clone()).await.expect(200).json();
    // To another node, which knows of it by the metadata alone.
    assert_eq!(keyed(1, 1).post(&tables, create.clone()).await.expect(200).json(), first);
    nodes[1].post(&tables, create.clone()).await.refused(409, "AlreadyExistsException");

    let table = format!("{tables}/t");
    let commit = json!({"updates": [set("k", "1")]});
    let made = keyed(0, 2).post(&table, commit.clone()).await.expect(200).json();
    nodes[0].post(&table, json!({"updates": [set("k", "2")]})).await.expect(200);
    assert_eq!(keyed(1, 2).post(&table, commit).await.expect(200).json(), made);
    assert_eq!(nodes[0].get(&table).await.json()["metadata"]["properties"]["k"], "2");
    let other = keyed(1, 2).post(&table, json!({"updates": [set("k", "3")]})).await;
    assert!(other.refused(422, "UnprocessableEntityException").contains("another request"));

    // A refusal stays one, also when what was in the way is gone.
    let view = json!({"name": "t", "schema": schema(), "view-version": version("SELECT 1")});
    keyed(0, 3).post(&format!("{NAMESPACE}/views"), view.clone()).await.refused(409, "AlreadyExistsException");
    keyed(0, 4).delete(&table).await.expect(204);
    keyed(1, 4).delete(&table).await.expect(204);
    nodes[0].delete(&table).await.refused(404, "NoSuchTableException");
    keyed(1, 3).post(&format!("{NAMESPACE}/views"), view.clone()).await.refused(409, "AlreadyExistsException");
    let made = keyed(0, 5).post(&format!("{NAMESPACE}/views"), view.clone()).await.expect(200).json();
    assert_eq!(keyed(1, 5).post(&format!("{NAMESPACE}/views"), view).await.expect(200).json(), made);

    let nested = json!({"namespace": ["n", "m"], "properties": {"a": "b"}});
    let answer = keyed(0, 6).post("/v1/lake/namespaces", nested.clone()).await.expect(200).json();
    assert_eq!(keyed(1, 6).post("/v1/lake/namespaces", nested).await.expect(200).json(), answer);
    nodes[0].with("Idempotency-Key", "x").delete(&table).await.refused(400, "BadRequestException");

    // All at once, to both nodes: one is made, and all are told so.
    table_again(&nodes[0]).await;
    let commit = json!({"updates": [set("once", "1")]});
    let before = cluster.files("metadata.json").len();
    let at_once = (0..8).map(|i| {
        let (node, table, commit) = (keyed(i % 2, 7), &table, commit.clone());
        async move { node.post(table, commit).await.expect(200).json()["metadata-location"].clone() }
    });
    let mut locations = futures::future::join_all(at_once).await;
    locations.dedup();
    assert_eq!(locations.len(), 1, "{locations:?}");
    assert_eq!(cluster.files("metadata.json").len(), before + 1);

    // What has nothing to change is an outcome, too: on what others do afterwards it might have.
    let location = nodes[0].get(&table).await.json()["metadata"]["location"].clone();
    let nothing = json!({"action": "set-location", "location": location});
    let kept = async |key: u128| {
        let key = format!("/lake/op/rest/{}", uuid::Uuid::from_u128(key));
        let by = Instant::now() + Duration::from_secs(10);
        cluster.store.get(&key, ReadOptions::default(), by).await.unwrap().value.is_some()
    };
    keyed(0, 8).post(&table, json!({"updates": [nothing]})).await.expect(200);
    assert!(kept(8).await && !kept(9).await);

    // What was answered with is removed once it is old: then the table is told as it is now.
    let few = json!({"updates": [set("write.metadata.previous-versions-max", "1")]});
    let first = keyed(0, 10).post(&table, few.clone()).await.expect(200).json();
    for n in 0..2 {
        nodes[0].post(&table, json!({"updates": [set("n", &n.to_string())]})).await.expect(200);
    }
    let file = first["metadata-location"].as_str().unwrap().trim_start_matches("file://");
    crate::common::until("old metadata to be gone", async || !std::path::Path::new(file).exists()).await;
    let now = keyed(1, 10).post(&table, few.clone()).await.expect(200).json();
    assert_eq!(now, nodes[0].get(&table).await.json());
    nodes[0].delete(&table).await.expect(204);
    let message = keyed(1, 10).post(&table, few).await.refused(404, "NoSuchTableException");
    assert!(message.contains("was made") && message.contains("dropped, renamed or replaced since"), "{message}");
}

async fn table_again(rest: &Http) {
    rest.delete(&format!("{NAMESPACE}/views/t")).await.expect(204);
    table(rest, "t").await;
}

#[tokio::test]
async fn a_node_describes_and_counts_what_it_serves() {
    let cluster = cluster(1).await;
    let rest = rest(&cluster, 0);
    let page = String::from_utf8(rest.get("/").await.expect(200).body).unwrap();
    assert!(page.contains("/v1/{prefix}/transactions/commit") && page.contains("load_catalog"), "{page}");
    let document = rest.get("/openapi").await.expect(200).json();
    assert!(document["paths"]["/v1/{prefix}/views/rename"]["post"]["operationId"] == "renameView", "{document}");
    rest.get("/v1/lake/namespaces").await.expect(200);
    rest.get("/v1/lake/namespaces/x").await.expect(404);
    rest.get("/x").await.expect(404);
    let metrics = String::from_utf8(rest.get("/metrics").await.expect(200).body).unwrap();
    for line in [
        r#"lake_query_rest_requests_total{endpoint="listNamespaces",outcome="done"} 1"#,
        r#"lake_query_rest_requests_total{endpoint="loadNamespace",outcome="missing"} 1"#,
        r#"lake_query_rest_requests_total{endpoint="none",outcome="missing"} 1"#,
        r#"lake_query_rest_request_seconds_count{endpoint="listNamespaces"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_counts_what_it_asks_the_metadata_and_what_it_need_not_ask() {
    use crate::common::run;
    let cluster = cluster(1).await;
    let (rest, client) = (rest(&cluster, 0), cluster.client(0).await);
    let figures = async || {
        let metrics = String::from_utf8(rest.get("/metrics").await.expect(200).body).unwrap();
        move |name: &str| -> u64 {
            let line = metrics.lines().find(|line| line.split(' ').next() == Some(name));
            let line = line.unwrap_or_else(|| panic!("{name} is not in {metrics}"));
            line.rsplit(' ').next().unwrap().parse().unwrap()
        }
    };
    let before = figures().await;
    for zero in ["pointer_cache_tables", "pointer_cache_misses_total", "pointer_cache_stale_total"] {
        assert_eq!(before(&format!("lake_query_{zero}")), 0, "{zero}");
    }
    namespace(&rest).await;
    run(&client, "CREATE TABLE n.t AS SELECT CAST(7 AS BIGINT) AS id").await;
    // A pointer that is a second old is asked for again, so how many of them are hits is the machine's to say.
    let after = loop {
        run(&client, "SELECT id FROM n.t").await;
        let now = figures().await;
        if now("lake_query_pointer_cache_hits_total") > 0 {
            break now;
        }
    };
    assert_eq!(after("lake_query_pointer_cache_tables"), 1);
    assert!(after("lake_query_pointer_cache_misses_total") > 0);
    let writes = r#"lake_query_metadata_calls_total{reason="write"}"#;
    assert!(after(writes) >= before(writes) + 2, "a namespace and a table were made");
    for reason in ["miss", "expired", "refresh", "moment", "confirm", "watch", "read", "list"] {
        after(&format!(r#"lake_query_metadata_calls_total{{reason="{reason}"}}"#));
    }
}
