//! PyIceberg, as its users use it.

use std::path::Path;
use std::sync::Arc;

use lake_client::memory::MemoryStore;
use lake_query::Options;

use crate::common::{Cluster, number, numbers, refused, run, text};
use crate::s3::{ACCESS_KEY, S3, SECRET_KEY};
use crate::{cluster, make_from_sql, over, python, uri};

const SCRIPT: &str = "pyiceberg_client.py";

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_makes_changes_and_reads_tables() {
    let cluster = cluster(2).await;
    let uri = uri(&cluster, 0);
    python::run(SCRIPT, "session", &[&uri]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_and_sql_read_what_the_other_wrote() {
    let cluster = cluster(2).await;
    let sql = cluster.client(1).await;
    let uri = uri(&cluster, 0);
    make_from_sql(&sql, r#""default""#).await;
    python::run(SCRIPT, "reads_and_appends", &[&uri]).await;
    assert_eq!(numbers(&sql, "SELECT id FROM from_sql ORDER BY id").await, [1, 2, 3, 4]);
    assert_eq!(number(&sql, "SELECT count(*) FROM from_python WHERE what IS NULL").await, 1);
    let rows = text(&sql, "SELECT id, what, price FROM from_python ORDER BY id").await;
    assert_eq!(rows, [["10", "x", "1.25"], ["11", "NULL", "NULL"], ["12", "z", "3.50"]]);
    run(&sql, "INSERT INTO from_python VALUES (13, 'q', 4.75)").await;
    python::run(SCRIPT, "sees_what_sql_added", &[&uri]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_pyiceberg_or_sql_deletes_is_gone_for_the_other() {
    let cluster = cluster(2).await;
    let sql = cluster.client(1).await;
    let uri = uri(&cluster, 0);
    run(&sql, r#"CREATE SCHEMA IF NOT EXISTS "default""#).await;
    python::run(SCRIPT, "deletes", &[&uri]).await;
    let rows = text(&sql, "SELECT id, what FROM deleted_there ORDER BY id").await;
    assert_eq!(rows, [["1", "a"], ["3", "z"], ["5", "e"], ["6", "f"]]);
    run(&sql, "DELETE FROM deleted_there WHERE id IN (1, 5)").await;
    run(&sql, "UPDATE deleted_there SET what = 'y' WHERE id = 3").await;
    python::run(SCRIPT, "sees_what_sql_deleted", &[&uri]).await;
}

/// A node whose warehouse is on an S3 service, with the keys in files here; it lends them if it is told to.
async fn on_s3(dir: &Path, lends: Option<bool>) -> (S3, Cluster) {
    let s3 = S3::start("lake-test").await;
    let file = |name: &str, value: &str| {
        let path = dir.join(name);
        std::fs::write(&path, value).unwrap();
        Some(path)
    };
    let (access, secret) = (file("access", ACCESS_KEY), file("secret", SECRET_KEY));
    let cluster = over(Arc::new(MemoryStore::new()), 1, |options| Options {
        warehouse: Some("s3://lake-test/warehouse".into()),
        s3_endpoint: Some(s3.endpoint.clone()),
        s3_region: Some("us-east-1".into()),
        s3_access_key_file: access.clone(),
        s3_secret_key_file: secret.clone(),
        rest_lend_credentials: lends,
        ..options
    })
    .await;
    (s3, cluster)
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_on_s3_are_reached_as_the_catalog_says() {
    let dir = tempfile::tempdir().unwrap();
    let (_s3, cluster) = on_s3(dir.path(), None).await;
    let uri = uri(&cluster, 0);
    // Endpoint and region come from the catalog; keys do not.
    let keys = [format!("s3.access-key-id={ACCESS_KEY}"), format!("s3.secret-access-key={SECRET_KEY}")];
    python::run(SCRIPT, "session", &[&uri, &keys[0], &keys[1]]).await;
    let back = "SELECT id FROM a.back ORDER BY id";
    assert_eq!(numbers(&cluster.client(0).await, back).await, [2, 3, 4, 5, 6], "what PyIceberg has left there");
    let rest = crate::rest(&cluster, 0);
    let config = rest.get("/v1/config").await.expect(200);
    let config = String::from_utf8(config.body).unwrap();
    assert!(!config.contains(ACCESS_KEY) && !config.contains("credentials"), "{config}");
    let table = "/v1/lake/namespaces/a/tables/back";
    let asking = rest.with("X-Iceberg-Access-Delegation", "vended-credentials");
    let loaded = String::from_utf8(asking.get(table).await.expect(200).body).unwrap();
    assert!(!loaded.contains(SECRET_KEY) && !loaded.contains("credentials"), "{loaded}");
    asking.get(&format!("{table}/credentials")).await.refused(406, "UnsupportedOperationException");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_lent_to_who_asks_where_the_node_may() {
    let dir = tempfile::tempdir().unwrap();
    let (_s3, cluster) = on_s3(dir.path(), Some(true)).await;
    let uri = uri(&cluster, 0);
    // PyIceberg asks for keys by itself, and has none of its own here.
    python::run(SCRIPT, "with_lent_keys", &[&uri]).await;
    let rest = crate::rest(&cluster, 0);
    let table = "/v1/lake/namespaces/lent/tables/t";
    assert!(!String::from_utf8(rest.get(table).await.expect(200).body).unwrap().contains(SECRET_KEY), "not asked for");
    let lent = rest.get(&format!("{table}/credentials")).await.expect(200).json();
    assert_eq!(lent["storage-credentials"][0]["config"]["s3.access-key-id"], ACCESS_KEY);
    let config = String::from_utf8(rest.get("/v1/config").await.expect(200).body).unwrap();
    assert!(!config.contains(ACCESS_KEY) && config.contains("tables/{table}/credentials"), "{config}");
}

#[tokio::test(flavor = "multi_thread")]
async fn random_changes_come_out_as_pyiceberg_itself_makes_them() {
    let seed = std::env::var("LAKE_TEST_SEED").unwrap_or_else(|_| rand::random::<u32>().to_string());
    println!("LAKE_TEST_SEED={seed}");
    let cluster = cluster(1).await;
    let uri = uri(&cluster, 0);
    for version in ["2", "3"] {
        let said = python::run(SCRIPT, "random_updates", &[&uri, &seed, "30", version]).await;
        assert_eq!(said.trim(), "30 commits", "of version {version}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_reads_tables_of_version_3_and_changes_all_but_their_rows() {
    let cluster = cluster(2).await;
    let sql = cluster.client(1).await;
    let uri = uri(&cluster, 0);
    let with = "'format-version' = '3', 'write.delete.mode' = 'merge-on-read', 'write.update.mode' = 'merge-on-read'";
    run(&sql, &format!("CREATE TABLE third (id BIGINT, what TEXT) WITH ({with})")).await;
    run(&sql, "INSERT INTO third VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, NULL)").await;
    run(&sql, "DELETE FROM third WHERE id = 2").await;
    run(&sql, "UPDATE third SET what = 'z' WHERE id = 3").await;
    python::run(SCRIPT, "version_3", &[&uri]).await;
    run(&sql, "INSERT INTO third VALUES (5, 'e', 50)").await;
    assert_eq!(numbers(&sql, "SELECT coalesce(more, 0) FROM third ORDER BY id").await, [0, 0, 0, 50]);
    run(&sql, "INSERT INTO third_too VALUES (1, 'by sql'), (2, 'too'), (3, NULL)").await;
    run(&sql, "DELETE FROM third_too WHERE id = 2").await;
    python::run(SCRIPT, "sees_version_3", &[&uri]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_version_1_is_upgraded_by_sql_and_written() {
    let cluster = cluster(1).await;
    let sql = cluster.client(0).await;
    let uri = uri(&cluster, 0);
    run(&sql, r#"CREATE SCHEMA IF NOT EXISTS "default""#).await;
    python::run(SCRIPT, "version_1", &[&uri]).await;
    for write in ["INSERT INTO version_one VALUES (4, 'd')", "DELETE FROM version_one WHERE id = 2"] {
        let error = refused(&sql, write).await;
        assert!(error.message.contains("SET TBLPROPERTIES ('format-version' = '2')"), "{write}: {error}");
    }
    run(
        &sql,
        "ALTER TABLE version_one SET TBLPROPERTIES ('format-version' = '2', 'write.delete.mode' = 'merge-on-read')",
    )
    .await;
    run(&sql, "INSERT INTO version_one VALUES (4, 'd')").await;
    run(&sql, "DELETE FROM version_one WHERE id = 2").await;
    run(&sql, "UPDATE version_one SET what = 'z' WHERE id = 3").await;
    python::run(SCRIPT, "sees_version_1_upgraded", &[&uri, "2"]).await;
    run(&sql, "ALTER TABLE version_one SET TBLPROPERTIES ('format-version' = '3')").await;
    run(&sql, "UPDATE version_one SET what = 'd' WHERE id = 4").await;
    python::run(SCRIPT, "sees_version_1_upgraded", &[&uri, "3"]).await;
    let error = refused(&sql, "ALTER TABLE version_one SET TBLPROPERTIES ('format-version' = '2')").await;
    assert!(error.message.contains("has format version 3 and cannot go back to 2"), "{error}");
}
