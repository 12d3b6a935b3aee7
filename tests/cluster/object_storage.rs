//! Tables on an S3 service.

use futures::TryStreamExt;
use object_store::multipart::MultipartStore;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectMeta, ObjectStore};

use crate::common::{PATIENCE, Scratch, TestCluster, files, until};
use crate::library::Library;
use crate::s3::{ACCESS_KEY, S3, SECRET_KEY};

#[tokio::test(flavor = "multi_thread")]
async fn tables_live_on_s3_as_well() {
    let _alone = crate::common::alone().await;
    let scratch = Scratch::new();
    let s3 = S3::start("lake-test").await;
    for (name, value) in [("access", ACCESS_KEY), ("secret", SECRET_KEY)] {
        std::fs::write(scratch.path(name), value).unwrap();
    }
    let file = |name: &str| scratch.path(name).to_str().unwrap().to_owned();
    let cluster = TestCluster::start_as(&scratch, |spec| {
        spec.warehouse = Some("s3://lake-test/warehouse".to_owned());
        spec.metasrv_args = ["--purge-retention-secs", "0"].map(str::to_owned).to_vec();
        spec.query_args =
            ["--s3-endpoint", &s3.endpoint, "--s3-access-key-file", &file("access"), "--s3-secret-key-file"]
                .map(str::to_owned)
                .to_vec();
        spec.query_args.push(file("secret"));
    })
    .await;
    let [a, b] = [cluster.sql(0).await, cluster.sql(1).await];
    a.run("CREATE TABLE nation AS SELECT * FROM tpch('nation', 0.01)").await.unwrap();
    let names = "SELECT count(DISTINCT n_name) FROM nation";
    cluster.until_rows(&b, names, &[25]).await;
    let copy = "INSERT INTO nation SELECT n_nationkey + 100, 'copy of ' || n_name, n_regionkey, n_comment FROM nation";
    b.run(copy).await.unwrap();
    for node in [&a, &b] {
        cluster.until_rows(node, "SELECT count(*) FROM nation WHERE n_nationkey >= 100", &[25]).await;
    }
    // Files of one table may be in several stores.
    let more = scratch.path("more.parquet").display().to_string();
    let rows = "SELECT n_nationkey + 1000 AS n_nationkey, n_name, n_regionkey, n_comment FROM nation";
    a.run(&format!("COPY ({rows} WHERE n_nationkey < 5) TO '{more}'")).await.unwrap();
    a.run(&format!("CALL system.add_files('nation', 'file://{more}')")).await.unwrap();
    for node in [&a, &b] {
        let some = "SELECT n_nationkey FROM nation WHERE n_nationkey % 1000 < 2 ORDER BY 1";
        cluster.until_rows(node, some, &[0, 1, 1000, 1001]).await;
    }
    assert_eq!(a.numbers("DELETE FROM nation WHERE n_nationkey IN (1, 1001)").await, [2]);
    for node in [&a, &b] {
        let some = "SELECT n_nationkey FROM nation WHERE n_nationkey % 1000 < 3 ORDER BY 1";
        cluster.until_rows(node, some, &[0, 2, 1000, 1002]).await;
        assert_eq!(node.numbers("SELECT count(*) FROM nation").await, [53]);
    }
    // An upload of a process that was killed. It is young; with the table it goes.
    assert_eq!(a.numbers("CALL system.remove_orphan_files(table => 'nation')").await, [0]);
    let bucket = s3.bucket("lake-test");
    let objects: Vec<ObjectMeta> = bucket.list(Some(&"warehouse".into())).try_collect().await.unwrap();
    let one = objects.iter().find(|object| object.location.as_ref().ends_with(".parquet")).unwrap();
    let left = ObjectPath::from(format!("{}-left", one.location));
    let id = bucket.create_multipart(&left).await.unwrap();
    let part = bucket.put_part(&left, &id, 0, "some".into()).await.unwrap();
    a.run("DROP TABLE nation PURGE").await.unwrap();
    until("the table's files to go", 5 * PATIENCE, || async {
        let done = a.numbers("SELECT count(*) FROM system.procedures WHERE state = 'done'").await;
        if done == [1] { Ok(()) } else { Err(format!("{done:?}")) }
    })
    .await;
    let aborted = bucket.complete_multipart(&left, &id, vec![part]).await.unwrap_err().to_string();
    assert!(aborted.contains("NoSuchUpload"), "{aborted}");
    cluster.stop().await;
    let access = [
        ("AWS_ENDPOINT_URL", s3.endpoint.as_str()),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
    ];
    let library = Library::new("s3://lake-test/library/meta", "s3://lake-test/library/tables").with(&access);
    library.holds_what_processes_write_that_know_of_nobody().await;
    for secret in [ACCESS_KEY, SECRET_KEY] {
        let logs = files(&scratch.path("lake-data")).into_iter().filter(|p| p.extension().is_some_and(|e| e == "log"));
        for log in logs {
            let text = std::fs::read_to_string(&log).unwrap();
            assert!(!text.contains(secret), "{} holds a key", log.display());
            assert!(!text.contains("uploads that were not completed, if there are any, stay"), "{}", log.display());
        }
    }
}
