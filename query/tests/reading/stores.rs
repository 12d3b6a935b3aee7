//! A table whose files are in several stores.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{CONTENT_RANGE, ETAG, LAST_MODIFIED, RANGE};
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use iceberg::spec::{FormatVersion, PrimitiveType, UnboundPartitionSpec};
use lake_client::Catalog;
use lake_client::warehouse::Profile;
use lake_query::{Kind, Options};

use crate::common::*;
use crate::foreign::*;

fn ids(range: std::ops::Range<i64>) -> RecordBatch {
    batch(vec![(1, "id", Arc::new(Int64Array::from_iter_values(range)) as ArrayRef)])
}

/// An S3 service that has one object, under every name, and lets anybody read it; under one of them never. Where it is.
async fn serve(object: Bytes) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().fallback(read).with_state(object);
    tokio::spawn(async move { axum::serve(listener, router).await });
    endpoint
}

async fn read(State(object): State<Bytes>, uri: Uri, headers: HeaderMap) -> Response {
    if uri.path().ends_with("hangs.parquet") {
        std::future::pending::<()>().await;
    }
    let size = object.len();
    let answer = Response::builder().header(ETAG, "\"1\"").header(LAST_MODIFIED, "Tue, 01 Dec 2026 00:00:00 GMT");
    let answer = match headers.get(RANGE) {
        None => answer.body(Body::from(object)),
        Some(range) => {
            let (first, last) = range.to_str().unwrap().strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let last: Option<usize> = last.parse().ok();
            let range = match first.parse() {
                Ok(first) => first..last.map_or(size, |last| size.min(last + 1)),
                Err(_) => size - last.unwrap().min(size)..size,
            };
            let said = format!("bytes {}-{}/{size}", range.start, range.end - 1);
            answer.status(206).header(CONTENT_RANGE, said).body(Body::from(object.slice(range)))
        }
    };
    answer.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_one_table_are_read_from_several_stores() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, "key").unwrap();
    let away = "s3://elsewhere/data/away.parquet";
    let rows = ids(250..500);
    let mut object = Vec::new();
    let mut writer = parquet::arrow::ArrowWriter::try_new(&mut object, rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
    let bytes = object.len() as u64;
    let endpoint = serve(object.into()).await;
    let cluster = crate::with(|options| Options {
        s3_endpoint: Some(endpoint.clone()),
        s3_access_key_file: Some(key.clone()),
        s3_secret_key_file: Some(key.clone()),
        ..options
    })
    .await;
    let client = cluster.client(0).await;
    let columns = schema(0, [optional(1, "id", PrimitiveType::Long)]);
    let unpartitioned = UnboundPartitionSpec::builder().with_spec_id(0).build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns, unpartitioned, &[]).await;
    let here = table.data(&ids(0..250));
    let there = table.data(&rows).with(|file| {
        file.file_path(away.to_owned()).file_size_in_bytes(bytes);
    });
    let near = location_of(&here);
    table.commit("t", vec![here, there]).await;
    let deleted = table.positions(&[(&near, 3), (away, 3)]);
    table.commit("t", vec![deleted]).await;
    for (sql, expected) in [
        ("SELECT count(*), sum(id), max(id) FROM t", vec![["498", "124494", "499"]]),
        ("SELECT count(*), min(id), max(id) FROM t WHERE id >= 240 AND id < 260", vec![["19", "240", "259"]]),
        ("SELECT count(*), min(id), max(id) FROM t WHERE id > 400", vec![["99", "401", "499"]]),
        ("SELECT count(*), min(id), max(id) FROM t WHERE id IN (2, 3, 4, 252, 253, 254)", vec![["4", "2", "254"]]),
        ("SELECT count(*), 0, 1 FROM (SELECT id FROM t LIMIT 300)", vec![["300", "0", "1"]]),
        ("SELECT count(*), sum(a.id), max(b.id) FROM t a JOIN t b ON a.id = b.id", vec![["498", "124494", "499"]]),
        ("SELECT id, id + 1, id + 2 FROM t ORDER BY id DESC LIMIT 1", vec![["499", "500", "501"]]),
    ] {
        assert_eq!(text(&client, sql).await, expected, "{sql}");
    }
    crate::check_where_they_ran(&cluster);
    let explained = format!("{:?}", text(&client, "EXPLAIN SELECT * FROM t").await);
    assert!(explained.contains("UnionExec"), "{explained}");
    // A store that does not answer fails the statement, at its deadline, and nobody else's.
    let columns = schema(0, [optional(1, "id", PrimitiveType::Long)]);
    let unpartitioned = UnboundPartitionSpec::builder().with_spec_id(0).build();
    let mut table = Foreign::create(&cluster, "u", FormatVersion::V2, columns, unpartitioned, &[]).await;
    let hanging = table.data(&rows).with(|file| {
        file.file_path("s3://elsewhere/data/hangs.parquet".to_owned()).file_size_in_bytes(bytes);
    });
    table.commit("u", vec![hanging]).await;
    let error = client.query("SELECT sum(id) FROM u", Some(Duration::from_secs(2))).await.unwrap_err();
    assert_eq!(error.kind, Kind::Deadline, "{error}");
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE id > 400").await, 99);
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_outside_of_warehouses_are_refused_where_they_are_not_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, "key").unwrap();
    let away = "s3://elsewhere/data/away.parquet";
    let rows = ids(0..100);
    let mut object = Vec::new();
    let mut writer = parquet::arrow::ArrowWriter::try_new(&mut object, rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
    let bytes = object.len() as u64;
    // Its keys open the bucket.
    let endpoint = serve(object.into()).await;
    let cluster = crate::with(|options| Options {
        s3_endpoint: Some(endpoint.clone()),
        s3_access_key_file: Some(key.clone()),
        s3_secret_key_file: Some(key.clone()),
        allow_local_files: Some(false),
        ..options
    })
    .await;
    let client = cluster.client(0).await;
    let columns = || schema(0, [optional(1, "id", PrimitiveType::Long)]);
    let unpartitioned = || UnboundPartitionSpec::builder().with_spec_id(0).build();
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns(), unpartitioned(), &[]).await;
    let there = table.data(&rows).with(|file| {
        file.file_path(away.to_owned()).file_size_in_bytes(bytes);
    });
    table.commit("t", vec![there]).await;
    let mut table = Foreign::create(&cluster, "u", FormatVersion::V2, columns(), unpartitioned(), &[]).await;
    let here = table.data(&rows);
    table.commit("u", vec![here]).await;
    let deletes = table.equality(&ids(0..1)).with(|file| {
        file.file_path(away.to_owned()).file_size_in_bytes(bytes);
    });
    table.commit("u", vec![deletes]).await;
    let sum = |table: &str| format!("SELECT sum(id) FROM {table} WHERE id < 50");
    for table in ["t", "u"] {
        let error = refused(&client, &sum(table)).await;
        assert!(error.kind == Kind::Denied, "{table}: {:?} {error}", error.kind);
        assert!(error.message.contains(away) && error.message.contains("allow_local_files"), "{table}: {error}");
    }
    // A warehouse says that it may.
    let by = std::time::Instant::now() + PATIENCE;
    let profile = Profile::new("s3://elsewhere/data", None).unwrap();
    Catalog::new(cluster.store.clone()).create_warehouse("w", &profile, by).await.unwrap();
    until("the node to learn of the warehouse", async || client.query(&sum("t"), TIMEOUT).await.is_ok()).await;
    assert_eq!(number(&client, &sum("t")).await, 1225);
}
