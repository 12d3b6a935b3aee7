//! Warehouses besides the nodes' own: namespaces with a place of their own, one of them on S3, where every client goes.

use std::time::{Duration, Instant};

use lake_client::Catalog;
use lake_client::warehouse::{Profile, S3 as OnS3, SecretRef};
use lake_query::sql::copy::put_in_place;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde_json::json;

use crate::common::{Cluster, numbers, run};
use crate::s3::{ACCESS_KEY, S3, SECRET_KEY};
use crate::{cluster, make_from_sql, python, rest};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

async fn create(cluster: &Cluster, name: &str, profile: Profile) {
    Catalog::new(cluster.store.clone()).create_warehouse(name, &profile, soon()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warehouse_is_a_catalog_of_its_own() {
    let cluster = cluster(2).await;
    let place = cluster.dir.path().join("other");
    create(&cluster, "w", Profile::new(&format!("file://{}", place.display()), None).unwrap()).await;
    let (one, two) = (rest(&cluster, 0), rest(&cluster, 1));
    let config = one.get("/v1/config?warehouse=w").await.expect(200).json();
    assert_eq!(config["overrides"]["prefix"], "w");
    one.get("/v1/config?warehouse=nope").await.refused(404, "NoSuchWarehouseException");
    one.get("/v1/nope/namespaces").await.refused(404, "NoSuchWarehouseException");

    // Its names are its own.
    for prefix in ["lake", "w"] {
        let namespaces = format!("/v1/{prefix}/namespaces");
        let made = one.post(&namespaces, json!({"namespace": ["n"]})).await.expect(200).json();
        assert_eq!(made["namespace"], json!(["n"]));
        one.post(&namespaces, json!({"namespace": ["n", "m"]})).await.expect(200);
        let schema = json!({"type": "struct", "schema-id": 0, "fields": [
            {"id": 1, "name": "id", "type": "long", "required": false},
        ]});
        let table = json!({"name": "t", "schema": schema});
        let made = two.post(&format!("{namespaces}/n%1Fm/tables"), table).await.expect(200).json();
        let root = if prefix == "w" { place.clone() } else { cluster.dir.path().join("warehouse") };
        let location = made["metadata"]["location"].as_str().unwrap();
        assert!(location.starts_with(&format!("file://{}/", root.display())), "{location}");
    }
    assert_eq!(two.get("/v1/w/namespaces").await.expect(200).json()["namespaces"], json!([["n"]]));
    let within = two.get("/v1/w/namespaces?parent=n").await.expect(200).json();
    assert_eq!(within["namespaces"], json!([["n", "m"]]));
    assert_eq!(two.get("/v1/w/namespaces/n%1Fm").await.expect(200).json()["namespace"], json!(["n", "m"]));
    let listed = two.get("/v1/w/namespaces/n%1Fm/tables").await.expect(200).json();
    assert_eq!(listed["identifiers"], json!([{"namespace": ["n", "m"], "name": "t"}]));
    let change = json!({"table-changes": [
        {"identifier": {"namespace": ["n", "m"], "name": "t"}, "requirements": [],
         "updates": [{"action": "set-properties", "updates": {"a": "b"}}]},
    ]});
    two.post("/v1/w/transactions/commit", change).await.expect(204);
    let names =
        json!({"source": {"namespace": ["n", "m"], "name": "t"}, "destination": {"namespace": ["n"], "name": "u"}});
    two.post("/v1/w/tables/rename", names).await.expect(204);
    let loaded = one.get("/v1/w/namespaces/n/tables/u").await.expect(200).json();
    assert_eq!(loaded["metadata"]["properties"]["a"], "b");
    one.head("/v1/lake/namespaces/n%1Fm/tables/t").await.expect(204);

    // For SQL, and for whoever connects to the nodes' own warehouse, it is the namespace of its name.
    let sql = cluster.client(1).await;
    run(&sql, r#"INSERT INTO "w.n".u VALUES (1), (2)"#).await;
    run(&sql, r#"CREATE TABLE "w.n".made AS SELECT id * 10 AS id FROM "w.n".u"#).await;
    assert_eq!(numbers(&sql, r#"SELECT id FROM "w.n".made ORDER BY id"#).await, [10, 20]);
    one.head("/v1/w/namespaces/n/tables/made").await.expect(204);
    assert_eq!(cluster.files(".parquet").len(), 0);
    let top = one.get("/v1/lake/namespaces").await.expect(200).json();
    assert_eq!(top["namespaces"], json!([["n"], ["w"]]));
    one.delete("/v1/lake/namespaces/w").await.refused(409, "NamespaceNotEmptyException");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_that_is_the_nodes_own_is_refused() {
    let cluster = cluster(1).await;
    let inside = format!("file://{}/warehouse/inside", cluster.dir.path().display());
    create(&cluster, "w", Profile::new(&inside, None).unwrap()).await;
    let rest = rest(&cluster, 0);
    rest.post("/v1/w/namespaces", json!({"namespace": ["n"]})).await.expect(200);
    let schema = json!({"type": "struct", "schema-id": 0, "fields": []});
    let table = json!({"name": "t", "schema": schema});
    let message = rest.post("/v1/w/namespaces/n/tables", table).await.refused(400, "BadRequestException");
    assert!(message.contains("overlap"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_client_reaches_a_warehouse_on_s3() {
    let s3 = S3::start("lake-archive").await;
    // The nodes' own warehouse is on files, and their own configuration knows nothing of S3.
    let cluster = cluster(2).await;
    let secret = |name: &str, value: &str| {
        let path = cluster.dir.path().join(name);
        std::fs::write(&path, value).unwrap();
        Some(SecretRef::File(path.to_str().unwrap().to_owned()))
    };
    let reached = OnS3 {
        endpoint: Some(s3.endpoint.clone()),
        region: Some("us-east-1".into()),
        path_style: true,
        access_key: secret("access", ACCESS_KEY),
        secret_key: secret("secret", SECRET_KEY),
    };
    create(&cluster, "archive", Profile::new("s3://lake-archive/tables", Some(reached)).unwrap()).await;
    let uri = format!("http://{}", cluster.nodes[0].rest_address().unwrap());
    let sql = cluster.client(1).await;
    run(&sql, r#"CREATE SCHEMA "archive.default""#).await;
    make_from_sql(&sql, r#""archive.default""#).await;

    // Endpoint, region and path style come from the catalog; keys do not.
    let keys = [
        "warehouse=archive".to_owned(),
        format!("s3.access-key-id={ACCESS_KEY}"),
        format!("s3.secret-access-key={SECRET_KEY}"),
    ];
    let frames = [&uri, &keys[0], &keys[1], &keys[2]].map(String::as_str);
    python::run("frames_client.py", "with_polars", &frames).await;
    python::run("frames_client.py", "with_daft", &frames).await;
    let duckdb = [
        uri.clone(),
        keys[0].clone(),
        format!("endpoint={}", s3.endpoint),
        format!("access={ACCESS_KEY}"),
        format!("secret={SECRET_KEY}"),
    ];
    let duckdb: Vec<&str> = duckdb.iter().map(String::as_str).collect();
    python::run("duckdb_client.py", "reads_and_session", &duckdb).await;
    python::run("pyiceberg_client.py", "reads_and_appends", &frames).await;

    assert_eq!(numbers(&sql, r#"SELECT id FROM "archive.default".from_sql ORDER BY id"#).await, [1, 2, 3, 4]);
    assert_eq!(numbers(&sql, r#"SELECT id FROM "archive.default".from_polars"#).await, [4]);
    assert_eq!(numbers(&sql, r#"SELECT id FROM "archive.default".from_daft ORDER BY id"#).await, [1, 2, 3]);
    assert_eq!(numbers(&sql, r#"SELECT id FROM "archive.d".t ORDER BY id"#).await, [1, 3, 4]);
    assert_eq!(cluster.files("").len(), 0, "something is in the nodes' own warehouse");

    // COPY replaces a file there by a copy; one that is too large for that goes in parts, here in some of the least size.
    let file = "s3://lake-archive/out/x.parquet";
    for n in [1, 2] {
        run(&sql, &format!("COPY (SELECT CAST({n} AS BIGINT) AS id) TO '{file}' (OVERWRITE)")).await;
        assert_eq!(numbers(&sql, &format!("SELECT id FROM '{file}'")).await, [n]);
    }
    let (objects, new, old) = (s3.bucket("lake-archive"), Path::from("out/new"), Path::from("out/x.parquet"));
    let bytes: Vec<u8> = (0..11 << 20).map(|i: u32| (i >> 16) as u8).collect();
    objects.put(&new, bytes.clone().into()).await.unwrap();
    put_in_place(&*objects, &new, &old, [bytes.len() as u64 - 1, 5 << 20], soon()).await.unwrap();
    assert!(objects.get(&old).await.unwrap().bytes().await.unwrap() == bytes, "it is another");

    let config = rest(&cluster, 0).get("/v1/config?warehouse=archive").await.expect(200);
    let text = String::from_utf8(config.body).unwrap();
    assert!(text.contains(&s3.endpoint) && !text.contains(ACCESS_KEY), "{text}");
}
