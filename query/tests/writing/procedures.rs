//! CALL: history and files.

use std::time::{Duration, Instant};

use iceberg::spec::TableMetadata;
use lake_client::catalog::{Catalog, TableIdent, TablePointer};
use lake_query::Kind;
use uuid::Uuid;

use crate::common::*;
use crate::table::{entries, metadata, operation, summary};

fn current(metadata: &TableMetadata) -> i64 {
    metadata.current_snapshot_id().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_are_named_and_gone_back_to() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let first = current(&metadata(&cluster, "t").await);
    run(&client, "CALL system.create_tag('t', 'one')").await;
    run(&client, "INSERT INTO t VALUES (2)").await;
    let second = current(&metadata(&cluster, "t").await);
    run(&client, &format!("CALL system.create_branch(table => 't', snapshot_id => {first}, name => 'b')")).await;
    run(&client, &format!("CALL lake.system.rollback_to_snapshot('default.t', {first})")).await;
    assert_eq!(numbers(&client, "SELECT x FROM t").await, [1]);
    let error = refused(&client, &format!("CALL system.rollback_to_snapshot('t', {second})")).await;
    assert!(error.message.contains("does not come from"), "{error}");
    run(&client, &format!("CALL system.set_current_snapshot('t', {second})")).await;
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 2);
    let table = metadata(&cluster, "t").await;
    assert_eq!(table.snapshot_for_ref("one").unwrap().snapshot_id(), first);
    assert_eq!(table.snapshot_for_ref("b").unwrap().snapshot_id(), first);
    for (sql, kind, words) in [
        ("CALL system.create_tag('t', 'one')", Kind::AlreadyExists, "reference one already"),
        ("CALL system.drop_tag('t', 'b')", Kind::Invalid, "b is no tag"),
        ("CALL system.drop_branch('t', 'main')", Kind::Invalid, "the table itself"),
        ("CALL system.drop_tag('t', 'two')", Kind::NotFound, "no tag two"),
        ("CALL system.rollback_to_snapshot('t', 5)", Kind::NotFound, "no snapshot 5"),
        ("CALL system.rollback_to_snapshot('t')", Kind::Invalid, "snapshot_id is missing"),
        ("CALL system.rollback_to_snapshot('t', 5, 6)", Kind::Invalid, "is no argument"),
        ("CALL system.rollback_to_snapshot('t', 'x')", Kind::Invalid, "snapshot_id"),
        ("CALL system.make_coffee('t')", Kind::NotFound, "no procedure system.make_coffee"),
        (
            "CALL system.add_file('t')",
            Kind::NotFound,
            "did you mean add_files? (there are: add_files, cherrypick_snapshot",
        ),
        ("CALL make_coffee()", Kind::NotFound, "no procedure make_coffee"),
        ("CALL system.rewrite_manifests('nope')", Kind::NotFound, "nope does not exist"),
    ] {
        let error = refused(&client, sql).await;
        assert!(error.kind == kind && error.message.contains(words), "{sql}: {:?} {error}", error.kind);
    }
    run(&client, "CALL system.drop_tag('t', 'one')").await;
    run(&client, "CALL system.drop_branch('t', 'b')").await;
    assert!(metadata(&cluster, "t").await.snapshot_for_ref("one").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_snapshot_has_added_is_picked_once() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let first = current(&metadata(&cluster, "t").await);
    run(&client, "INSERT INTO t VALUES (2)").await;
    let second = current(&metadata(&cluster, "t").await);
    run(&client, "DELETE FROM t WHERE x = 2").await;
    let deleting = current(&metadata(&cluster, "t").await);
    let pick = |snapshot: i64| format!("CALL system.cherrypick_snapshot('t', {snapshot})");
    let error = refused(&client, &pick(second)).await;
    assert!(error.kind == Kind::Invalid && error.message.contains("comes from it already"), "{error}");
    // What directly follows becomes current itself.
    run(&client, &format!("CALL system.rollback_to_snapshot('t', {first})")).await;
    run(&client, &pick(second)).await;
    assert_eq!(current(&metadata(&cluster, "t").await), second);
    run(&client, &format!("CALL system.rollback_to_snapshot('t', {first})")).await;
    run(&client, "INSERT INTO t VALUES (3)").await;
    run(&client, &pick(second)).await;
    assert_eq!(numbers(&client, "SELECT x FROM t ORDER BY x").await, [1, 2, 3]);
    let table = metadata(&cluster, "t").await;
    assert_eq!(operation(&table), "append");
    assert_eq!(summary(&table, "source-snapshot-id"), Some(second.to_string()));
    assert_eq!(summary(&table, "total-records").as_deref(), Some("3"));
    for (snapshot, words) in [(second, "picked already"), (deleting, "more than append"), (5, "no snapshot 5")] {
        let error = refused(&client, &pick(snapshot)).await;
        assert!(error.message.contains(words) && error.message.contains("nothing was committed"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn branches_are_moved_on() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let first = current(&metadata(&cluster, "t").await);
    run(&client, "CALL system.create_branch('t', 'b')").await;
    run(&client, "INSERT INTO t VALUES (2)").await;
    let second = current(&metadata(&cluster, "t").await);
    let error = refused(&client, "CALL system.fast_forward('t', 'main', 'b')").await;
    assert!(error.kind == Kind::Invalid && error.message.contains("cannot be moved on"), "{error}");
    for branch in ["b", "made"] {
        run(&client, &format!("CALL system.fast_forward('t', '{branch}', 'main')")).await;
        assert_eq!(metadata(&cluster, "t").await.snapshot_for_ref(branch).unwrap().snapshot_id(), second);
    }
    run(&client, &format!("CALL system.rollback_to_snapshot('t', {first})")).await;
    run(&client, "CALL system.fast_forward('t', 'main', 'b')").await;
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 2);
    run(&client, "CALL system.create_tag('t', 'fixed')").await;
    let error = refused(&client, "CALL system.fast_forward('t', 'fixed', 'main')").await;
    assert!(error.message.contains("fixed is no branch"), "{error}");
    let error = refused(&client, "CALL system.fast_forward('t', 'main', 'nope')").await;
    assert!(error.kind == Kind::NotFound && error.message.contains("no reference nope"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_rewritten_in_order() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (a BIGINT, b BIGINT)").await;
    for start in [0, 7] {
        run(
            &client,
            &format!("INSERT INTO t SELECT (value * 5) % 14, value FROM generate_series({start}, {})", start + 6),
        )
        .await;
    }
    let error = refused(&client, "CALL system.rewrite_data_files('t', strategy => 'sort')").await;
    assert!(error.kind == Kind::Invalid && error.message.contains("has no order"), "{error}");
    let error = refused(&client, "CALL system.rewrite_data_files('t', strategy => 'zorder')").await;
    assert!(error.message.contains("no strategy"), "{error}");
    assert_eq!(number(&client, "CALL system.rewrite_data_files('t', sort_order => 'a DESC')").await, 2);
    assert_eq!(numbers(&client, "SELECT a FROM t").await, (0..14).rev().collect::<Vec<_>>());
    let order = |files: &[iceberg::spec::DataFile]| files.iter().map(|file| file.sort_order_id()).collect::<Vec<_>>();
    assert_eq!(order(&crate::table::files(&metadata(&cluster, "t").await).await), [None], "not the table's order");
    run(&client, "ALTER TABLE t SET SORTED BY (b)").await;
    assert_eq!(number(&client, "CALL system.rewrite_data_files('t', strategy => 'sort')").await, 1);
    assert_eq!(numbers(&client, "SELECT b FROM t").await, (0..14).collect::<Vec<_>>());
    assert_eq!(order(&crate::table::files(&metadata(&cluster, "t").await).await), [Some(1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_expired_snapshots_need_goes() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    run(&client, "CALL system.create_tag('t', 'kept')").await;
    run(&client, "UPDATE t SET x = 2").await;
    run(&client, "UPDATE t SET x = 3").await;
    run(&client, "INSERT INTO t VALUES (4)").await;
    assert_eq!(cluster.files(".parquet").len(), 4);
    assert_eq!(number(&client, "CALL system.expire_snapshots('t')").await, 0, "all are young");
    assert_eq!(
        number(&client, "CALL system.expire_snapshots('t', older_than => now())").await,
        0,
        "queries may read them"
    );
    assert_eq!(cluster.files(".parquet").len(), 4);
    run(&client, "ALTER TABLE t SET TBLPROPERTIES ('lake.expire-snapshots.held-ms' = '0')").await;
    let dry = "CALL system.expire_snapshots('t', older_than => now(), dry_run => true)";
    assert_eq!(number(&client, dry).await, 2);
    assert_eq!((metadata(&cluster, "t").await.snapshots().len(), cluster.files(".parquet").len()), (4, 4));
    // Of 4 snapshots the tagged one stays, and the newest.
    assert_eq!(number(&client, "CALL system.expire_snapshots('t', older_than => now())").await, 2);
    let table = metadata(&cluster, "t").await;
    assert_eq!(table.snapshots().len(), 2);
    // The file with 2 goes. That with 1 is the tag's, and that with 3 is of the current snapshot.
    assert_eq!(cluster.files(".parquet").len(), 3);
    assert_eq!(numbers(&client, "SELECT x FROM t ORDER BY x").await, [3, 4]);
    let kept = table.snapshot_for_ref("kept").unwrap().snapshot_id();
    run(&client, &format!("CALL system.set_current_snapshot('t', {kept})")).await;
    assert_eq!(numbers(&client, "SELECT x FROM t").await, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_kept_for_a_while() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    run(&client, "CALL system.create_tag('t', 'week', retain_days => 7)").await;
    run(
        &client,
        "CALL system.create_branch('t', 'b', retain_days => 30, snapshot_retain_days => 2, min_snapshots_to_keep => 3)",
    )
    .await;
    run(&client, "CALL system.create_tag('t', 'ever')").await;
    let refs = "SELECT name, max_reference_age_in_ms, min_snapshots_to_keep, max_snapshot_age_in_ms FROM \"t$refs\" \
                WHERE name <> 'main' ORDER BY name";
    let none = "NULL";
    assert_eq!(
        text(&client, refs).await,
        [["b", "2592000000", "3", "172800000"], ["ever", none, none, none], ["week", "604800000", none, none]]
    );
    for (sql, words) in [
        ("CALL system.create_tag('t', 'u', retain_days => 0)", "retain_days is 0"),
        ("CALL system.create_tag('t', 'u', retain_days => -1)", "retain_days is negative"),
        ("CALL system.create_tag('t', 'u', min_snapshots_to_keep => 1)", "is no argument"),
        ("CALL system.rollback_to_timestamp('t')", "timestamp is missing"),
    ] {
        let error = refused(&client, sql).await;
        assert!(error.kind == Kind::Invalid && error.message.contains(words), "{sql}: {error}");
    }
    // What no name leads to any more expires, once the table says that names are kept for hardly any time.
    run(&client, "UPDATE t SET x = 2").await;
    let then = "SELECT max(committed_at) FROM \"t$snapshots\"";
    let second = text(&client, then).await[0][0].clone();
    run(
        &client,
        "ALTER TABLE t SET TBLPROPERTIES ('history.expire.max-ref-age-ms' = '1', 'lake.expire-snapshots.held-ms' = '0')",
    )
    .await;
    assert_eq!(number(&client, "CALL system.expire_snapshots('t', older_than => now())").await, 0);
    assert_eq!(numbers(&client, "SELECT count(*) FROM \"t$refs\"").await, [3], "the others say for themselves");
    run(&client, "CALL system.drop_tag('t', 'week')").await;
    run(&client, "CALL system.drop_branch('t', 'b')").await;
    assert_eq!(number(&client, "CALL system.expire_snapshots('t', older_than => now())").await, 1);
    assert_eq!(cluster.files(".parquet").len(), 1);
    run(&client, "INSERT INTO t VALUES (3)").await;
    let error = refused(&client, &format!("CALL system.rollback_to_timestamp('t', TIMESTAMP '{second}')")).await;
    assert!(error.kind == Kind::NotFound && error.message.contains("before that moment"), "{error}");
    let after = format!("TIMESTAMP '{second}' + INTERVAL '1 millisecond'");
    run(&client, &format!("CALL system.rollback_to_timestamp('t', {after})")).await;
    assert_eq!(numbers(&client, "SELECT x FROM t").await, [2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn small_files_are_packed_and_no_row_changes() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (p INT, x BIGINT) PARTITIONED BY (p)").await;
    for i in 0..6 {
        run(&client, &format!("INSERT INTO t VALUES (1, {i}), ({}, {i})", 10 + i)).await;
    }
    let before = text(&client, "SELECT * FROM t ORDER BY p, x").await;
    assert_eq!(number(&client, "CALL system.rewrite_data_files('t', 100)").await, 0);
    assert_eq!(number(&client, "CALL system.rewrite_data_files('t')").await, 6);
    assert_eq!(text(&client, "SELECT * FROM t ORDER BY p, x").await, before);
    let table = metadata(&cluster, "t").await;
    assert_eq!(operation(&table), "replace");
    assert_eq!(summary(&table, "total-data-files").as_deref(), Some("7"));
    assert_eq!(summary(&table, "total-records").as_deref(), Some("12"));

    assert_eq!(number(&client, "CALL system.rewrite_manifests('t')").await, 7);
    let after = metadata(&cluster, "t").await;
    assert_eq!(operation(&after), "replace");
    assert_eq!(text(&client, "SELECT * FROM t ORDER BY p, x").await, before);
    let entries = entries(&after).await;
    assert_eq!(entries.len(), 7);
    assert!(
        entries.iter().any(|entry| entry.sequence == 1) && entries.iter().all(|entry| entry.sequence <= 7),
        "{entries:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_found_by_age_and_removed_when_asked() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    run(&client, "INSERT INTO t VALUES (2)").await;
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(100 * 3600);
    let age =
        |path: &std::path::Path| std::fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    // All of the table's own files are old as well.
    cluster.files("").iter().for_each(|path| age(path));
    let data = cluster.files(".parquet")[0].parent().unwrap().to_owned();
    let (lost, young) = (data.join("lost.parquet"), data.join("young.parquet"));
    std::fs::write(&lost, b"x").unwrap();
    age(&lost);
    std::fs::write(&young, b"x").unwrap();
    let before = cluster.files("").len();
    assert_eq!(number(&client, "CALL system.remove_orphan_files('t')").await, 1);
    assert_eq!(cluster.files("").len(), before, "a dry run");
    assert_eq!(number(&client, "CALL system.remove_orphan_files('t', dry_run => false)").await, 1);
    assert!(!lost.exists() && young.exists());
    assert_eq!(cluster.files("").len(), before - 1);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 2);
    let error = refused(&client, "CALL system.remove_orphan_files('t', older_than_hours => 1)").await;
    assert!(error.kind == Kind::Invalid && error.message.contains("24 hours"), "{error}");
    // Of two tables in one place, each one's files would be the other's orphans.
    let file = crate::table::pointer(&cluster, "t").await.value.metadata_location;
    let error = refused(&client, &format!("CALL system.register_table('twin', '{file}')")).await;
    assert!(error.kind == Kind::AlreadyExists && error.message.contains("default.t"), "{error}");
    let twin = TableIdent::new("default".parse().unwrap(), "twin").unwrap();
    let pointer = TablePointer { uuid: Uuid::new_v4(), metadata_location: file, previous_location: None };
    let soon = Instant::now() + Duration::from_secs(30);
    Catalog::new(cluster.store.clone()).create_table(&twin, &pointer, soon).await.unwrap();
    cluster.files("").iter().for_each(|path| age(path));
    let before = cluster.files("").len();
    for table in ["t", "twin"] {
        let error = refused(&client, &format!("CALL system.remove_orphan_files('{table}', dry_run => false)")).await;
        assert!(error.kind == Kind::NotSupported && error.message.contains("as well"), "{error}");
    }
    assert_eq!(cluster.files("").len(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_registered_under_another_name() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let file = crate::table::pointer(&cluster, "t").await.value.metadata_location;
    run(&client, "DROP TABLE t").await;
    run(&client, &format!("CALL system.register_table('again', '{file}')")).await;
    assert_eq!(numbers(&client, "SELECT x FROM again").await, [1]);
    run(&client, "INSERT INTO again VALUES (2)").await;
    let error = refused(&client, &format!("CALL system.register_table('again', '{file}')")).await;
    assert_eq!(error.kind, Kind::AlreadyExists, "{error}");
    let error = refused(&client, &format!("CALL system.register_table('other', '{file}x')")).await;
    assert_eq!(error.kind, Kind::NotFound, "{error}");
    assert_eq!(number(&client, "SELECT count(*) FROM again").await, 2);
}
