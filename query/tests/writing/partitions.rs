//! Partitioned and sorted tables.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use iceberg::spec::{DataFile, Literal};
use lake_client::memory::MemoryStore;
use lake_query::{Kind, Options};

use crate::common::*;
use crate::table::{files, metadata};

fn partition_of(file: &DataFile) -> String {
    format!("{:?}", file.partition().fields())
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_go_into_files_of_their_partition() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(
        &client,
        "CREATE TABLE t (id BIGINT, day DATE, at TIMESTAMP, zone TIMESTAMP WITH TIME ZONE, s VARCHAR, n DECIMAL(9, 2), f DOUBLE) \
         PARTITIONED BY (bucket(3, id), day, hour(at), truncate(1, s))",
    )
    .await;
    let table = metadata(&cluster, "t").await;
    let names: Vec<_> = table.default_partition_spec().fields().iter().map(|field| field.name.clone()).collect();
    assert_eq!(names, ["id_bucket", "day", "at_hour", "s_trunc"]);
    let rows = "SELECT value AS id, CASE value % 2 WHEN 0 THEN DATE '2026-01-01' ELSE DATE '2026-01-02' END AS day, \
         CASE value % 3 WHEN 0 THEN TIMESTAMP '2026-01-01 00:30:00' WHEN 1 THEN TIMESTAMP '2026-01-01 01:30:00' \
         ELSE TIMESTAMP '1969-12-31 23:30:00' END AS at, \
         CASE WHEN value % 10 = 0 THEN NULL WHEN value % 2 = 1 THEN 'bxyz' ELSE 'axyz' END AS s FROM generate_series(1, 600)";
    assert_eq!(number(&client, &format!("INSERT INTO t (id, day, at, s) {rows}")).await, 600);
    let written = files(&metadata(&cluster, "t").await).await;
    let mut by_partition: BTreeMap<String, u64> = BTreeMap::new();
    for file in &written {
        *by_partition.entry(partition_of(file)).or_default() += file.record_count();
    }
    assert_eq!(by_partition.len(), written.len(), "one file each");
    assert_eq!(by_partition.values().sum::<u64>(), 600);
    // 3 buckets, 3 hours, and of one day one letter, of the other one or null.
    assert_eq!(by_partition.len(), 3 * 3 * 3, "{by_partition:?}");
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE day = DATE '2026-01-02' AND s LIKE 'b%'").await, 300);
    // Rows that are changed move where they belong.
    assert_eq!(number(&client, "UPDATE t SET day = DATE '2027-07-07' WHERE id <= 2").await, 2);
    let moved = files(&metadata(&cluster, "t").await).await;
    assert!(moved.iter().filter(|file| file.record_count() == 1).count() >= 2, "{}", moved.len());
    assert_eq!(
        text(&client, "SELECT id, s FROM t WHERE day > DATE '2027-01-01' ORDER BY id").await,
        [["1", "bxyz"], ["2", "axyz"]]
    );
    assert_eq!(number(&client, "DELETE FROM t WHERE day = DATE '2027-07-07'").await, 2);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 598);
    let error = refused(&client, "ALTER TABLE t DROP COLUMN day").await;
    assert!(error.message.contains("partitioned by it"), "{error}");
    for (sql, words) in [
        ("CREATE TABLE u (a INT) PARTITIONED BY (b)", "no column b"),
        ("CREATE TABLE u (a INT) PARTITIONED BY (day(a))", "cannot be partitioned by"),
        ("CREATE TABLE u (a INT[]) PARTITIONED BY (a)", "cannot be laid out by a"),
    ] {
        let error = refused(&client, sql).await;
        assert!(error.kind == Kind::Invalid && error.message.contains(words), "{sql}: {error}");
    }
}

/// By the values that Iceberg's specification has (appendix B), and by those of just before 1970.
#[tokio::test(flavor = "multi_thread")]
async fn rows_are_where_the_format_says_by_every_transform() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let ints = |values: &[i32]| values.iter().map(|value| Some(Literal::int(*value))).collect::<Vec<_>>();
    let truncated = |i: i32, s: &str, n: i128| {
        let (i, l) = (Literal::int(i), Literal::long(i64::from(i)));
        vec![Some(i), Some(l), Some(Literal::string(s)), Some(Literal::decimal(n))]
    };
    let buckets = "bucket(100, i), bucket(100, l), bucket(100, s), bucket(100, d), bucket(100, ts), bucket(100, tz), \
                   bucket(100, n)";
    let truncations = "truncate(10, i), truncate(10, l), truncate(3, s), truncate(50, n)";
    for (i, (partitions, expected)) in [
        (buckets, vec![ints(&[79, 79, 89, 26, 7, 7, 59])]),
        (truncations, vec![truncated(30, "ice", 1400), truncated(-10, "übe", -50)]),
        ("year(d), year(ts), year(tz)", vec![ints(&[47; 3]), ints(&[-1; 3])]),
        ("month(d), month(ts), month(tz)", vec![ints(&[574; 3]), ints(&[-1; 3])]),
        ("day(d), day(ts), day(tz)", vec![ints(&[17_486; 3]), ints(&[-1; 3])]),
        ("hour(ts), hour(tz)", vec![ints(&[419_686; 2]), ints(&[-1; 2])]),
    ]
    .into_iter()
    .enumerate()
    {
        let columns = "i INT, l BIGINT, s VARCHAR, d DATE, ts TIMESTAMP, tz TIMESTAMP WITH TIME ZONE, n DECIMAL(9, 2)";
        run(&client, &format!("CREATE TABLE t{i} ({columns}) PARTITIONED BY ({partitions})")).await;
        let rows = "(34, 34, 'iceberg', '2017-11-16', '2017-11-16 22:31:08', '2017-11-16T14:31:08-08:00', 14.20), \
                    (-1, -1, 'über', '1969-12-31', '1969-12-31 23:30:00', '1969-12-31T23:30:00Z', -0.05), \
                    (NULL, NULL, NULL, NULL, NULL, NULL, NULL)";
        assert_eq!(number(&client, &format!("INSERT INTO t{i} VALUES {rows}")).await, 3);
        let written = files(&metadata(&cluster, &format!("t{i}")).await).await;
        assert_eq!(written.len(), 3, "{partitions}");
        let found: Vec<_> = written.iter().map(|file| file.partition().fields().to_vec()).collect();
        let width = found[0].len();
        for partition in expected.into_iter().chain([vec![None; width]]) {
            assert!(found.contains(&partition), "{partitions}: {partition:?} is not in {found:?}");
        }
        for filter in ["i = 34", "s = 'iceberg' AND d = '2017-11-16'", "ts < '1970-01-01'", "n IS NULL"] {
            let sql = format!("SELECT count(*) FROM t{i} WHERE {filter}");
            assert_eq!(number(&client, &sql).await, 1, "{partitions}: {filter}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn overwriting_replaces_the_partitions_that_new_rows_are_in() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t PARTITIONED BY (p) AS SELECT value % 3 AS p, value AS v FROM generate_series(0, 8)")
        .await;
    assert_eq!(number(&client, "INSERT OVERWRITE t VALUES (1, 100), (7, 700)").await, 2);
    assert_eq!(
        text(&client, "SELECT p, count(*), max(v) FROM t GROUP BY p ORDER BY p").await,
        [["0", "3", "6"], ["1", "1", "100"], ["2", "3", "8"], ["7", "1", "700"]]
    );
    assert_eq!(number(&client, "INSERT OVERWRITE t SELECT * FROM t WHERE false").await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 8);
    run(&client, "CREATE OR REPLACE TABLE t PARTITIONED BY (bucket(2, b)) AS SELECT v AS b FROM t").await;
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 8);
    assert_eq!(number(&client, "INSERT INTO t VALUES (5)").await, 1);
    run(&client, "CREATE OR REPLACE TABLE t AS SELECT 1 AS b").await;
    assert!(metadata(&cluster, "t").await.default_partition_spec().is_unpartitioned());
    assert_eq!(number(&client, "DELETE FROM t").await, 1);
}

/// Files of an earlier partitioning lose the rows that are in the partitions of today which are replaced.
#[tokio::test(flavor = "multi_thread")]
async fn overwriting_replaces_rows_of_partitions_that_were_others_before() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT value % 3 AS p, value AS v FROM generate_series(0, 8)").await;
    run(&client, "ALTER TABLE t SET PARTITIONED BY (truncate(10, v))").await;
    run(&client, "INSERT INTO t VALUES (0, 9), (0, 10)").await;
    run(&client, "ALTER TABLE t SET PARTITIONED BY (p)").await;
    run(&client, "INSERT INTO t VALUES (0, 11), (1, 12)").await;
    assert_eq!(number(&client, "INSERT OVERWRITE t VALUES (0, 100), (7, 700)").await, 2);
    assert_eq!(
        text(&client, "SELECT p, count(*), max(v) FROM t GROUP BY p ORDER BY p").await,
        [["0", "1", "100"], ["1", "4", "12"], ["2", "3", "8"], ["7", "1", "700"]]
    );
    assert_eq!(number(&client, "INSERT OVERWRITE t SELECT * FROM t WHERE false").await, 0);
    // Today's partitions go as a whole.
    assert_eq!(number(&client, "INSERT OVERWRITE t VALUES (7, 701)").await, 1);
    assert_eq!(numbers(&client, "SELECT v FROM t WHERE p = 7").await, [701]);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 9);
}

/// Rows come in an order in which hardly two that follow each other are of one partition.
#[tokio::test(flavor = "multi_thread")]
async fn many_partitions_need_one_open_file() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (p BIGINT, v BIGINT) PARTITIONED BY (p)").await;
    let rows = "SELECT (value * 7919) % 200, value FROM generate_series(1, 4000)";
    assert_eq!(number(&client, &format!("INSERT INTO t {rows}")).await, 4000);
    let written = files(&metadata(&cluster, "t").await).await;
    assert_eq!(written.len(), 200);
    assert!(written.iter().all(|file| file.record_count() == 20));
    assert_eq!(number(&client, "SELECT count(*) FROM t WHERE p = 17").await, 20);
    assert_eq!(number(&client, "DELETE FROM t WHERE p = 17").await, 20);
}

/// How many files there are in a directory's own directories, where DataFusion spills to.
fn spilled(dir: &Path) -> usize {
    let entries = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries(dir).map(|inner| entries(&inner.path()).count()).sum()
}

/// More rows than the statement has memory for, and each run of them of all partitions.
#[tokio::test(flavor = "multi_thread")]
async fn very_many_partitions_are_written_in_little_memory() {
    const PARTITIONS: i64 = 1000;
    const ROWS: i64 = 400_000;
    const MEMORY: usize = 64 << 20;
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 1, |options| Options {
        memory_limit_bytes: Some(MEMORY),
        statement_memory_bytes: Some(48 << 20),
        ..options
    })
    .await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (p BIGINT, n BIGINT, s VARCHAR) PARTITIONED BY (p)").await;
    let (partition, text_of_row) = (format!("(n * 7919) % {PARTITIONS}"), "concat(repeat('x', 140), n)");
    let insert =
        format!("INSERT INTO t SELECT {partition}, n, {text_of_row} FROM generate_series(1, {ROWS}) AS series(n)");
    let engine = cluster.nodes[0].engine();
    let spill = cluster.dir.path().join("node0/spill");
    let (mut held, mut files_spilled) = (0, 0);
    let inserting = number(&client, &insert);
    tokio::pin!(inserting);
    let inserted = loop {
        tokio::select! {
            inserted = &mut inserting => break inserted,
            () = tokio::time::sleep(Duration::from_millis(5)) => {
                held = held.max(engine.memory_held());
                files_spilled = files_spilled.max(spilled(&spill));
            }
        }
    };
    assert_eq!(inserted, ROWS);
    assert!(files_spilled > 0 && 0 < held && held <= MEMORY, "{files_spilled} files, at most {held} bytes at once");
    let written = files(&metadata(&cluster, "t").await).await;
    let partitions: BTreeSet<String> = written.iter().map(partition_of).collect();
    assert_eq!((written.len(), partitions.len()), (PARTITIONS as usize, PARTITIONS as usize));
    assert!(written.iter().all(|file| file.record_count() == (ROWS / PARTITIONS) as u64));
    assert_eq!(
        text(&client, "SELECT count(*), sum(n), count(DISTINCT p) FROM t").await,
        [[ROWS.to_string(), (ROWS * (ROWS + 1) / 2).to_string(), PARTITIONS.to_string()]]
    );
    let wrong = format!("SELECT count(*) FROM t WHERE p <> {partition} OR s <> {text_of_row}");
    assert_eq!(number(&client, &wrong).await, 0);
    until("the spilled files to be gone, and all memory free", async || {
        spilled(&spill) == 0 && engine.memory_held() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_a_sorted_table_are_sorted() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (a BIGINT, b VARCHAR) PARTITIONED BY (truncate(100, a)) SORTED BY (b DESC, a)").await;
    let rows = "SELECT (value * 37) % 200, CASE WHEN value % 5 = 0 THEN NULL ELSE concat('b', value % 7) END FROM generate_series(0, 199)";
    assert_eq!(number(&client, &format!("INSERT INTO t {rows}")).await, 200);
    assert_eq!(number(&client, "UPDATE t SET b = 'z' WHERE a % 10 = 3").await, 20);
    let table = metadata(&cluster, "t").await;
    let written = files(&table).await;
    assert_eq!(written.iter().map(|file| file.record_count()).sum::<u64>(), 200);
    for file in &written {
        assert_eq!(file.sort_order_id(), Some(1));
        let path = file.file_path().strip_prefix("file://").unwrap();
        let reader =
            parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(std::fs::File::open(path).unwrap());
        let mut rows = Vec::new();
        for batch in reader.unwrap().build().unwrap() {
            rows.extend(rows_of(&[batch.unwrap()]));
        }
        let key = |row: &Vec<String>| {
            let b = if row[1] == "NULL" { String::new() } else { row[1].clone() };
            (std::cmp::Reverse(b), row[0].parse::<i64>().unwrap())
        };
        assert!(rows.is_sorted_by_key(key), "{rows:?}");
        assert_eq!(rows.len() as u64, file.record_count());
    }
}

/// The first column of a file, in order.
fn first_column(file: &DataFile) -> Vec<i64> {
    let path = file.file_path().strip_prefix("file://").unwrap();
    let reader =
        parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(std::fs::File::open(path).unwrap());
    let batches = reader.unwrap().build().unwrap().flat_map(|batch| rows_of(&[batch.unwrap()]));
    batches.map(|row| row[0].parse().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_sorted_by_what_transforms_make_of_columns() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    // By the texts themselves 10 would come before 14.
    let order = "truncate(1, s) DESC, bucket(1, nr), year(due), nr DESC";
    run(&client, &format!("CREATE TABLE t (nr BIGINT, s VARCHAR, due DATE) SORTED BY ({order})")).await;
    let rows = "(10, 'az', '2026-05-05'), (11, 'aa', '2025-01-01'), (12, 'b', '2026-01-01'), (13, NULL, NULL), (14, 'ab', '2026-01-01')";
    assert_eq!(number(&client, &format!("INSERT INTO t VALUES {rows}")).await, 5);
    let table = metadata(&cluster, "t").await;
    let written = files(&table).await;
    assert_eq!(written[0].sort_order_id(), Some(1));
    assert_eq!(first_column(&written[0]), [12, 11, 14, 10, 13]);
    let told = text(&client, "SHOW CREATE TABLE t").await;
    assert!(told[0].iter().any(|told| told.contains(&format!("SORTED BY ({order})"))), "{told:?}");
    // Every statement that writes rows, and those that write none.
    assert_eq!(number(&client, "UPDATE t SET s = 'c' WHERE nr IN (10, 11)").await, 2);
    let written = files(&metadata(&cluster, "t").await).await;
    assert_eq!(number(&client, "DELETE FROM t WHERE nr = 13").await, 1);
    assert!(written.iter().any(|file| first_column(file).starts_with(&[11, 10])), "{written:?}");
    run(&client, "ALTER TABLE t SET SORTED BY (bucket(16, nr), nr)").await;
    run(&client, "INSERT OVERWRITE t SELECT value, 'x', NULL FROM generate_series(1, 100)").await;
    let written = files(&metadata(&cluster, "t").await).await;
    let ids = first_column(&written[0]);
    assert_eq!((written.len(), ids.len(), written[0].sort_order_id()), (1, 100, Some(2)));
    let bucket = iceberg::transform::create_transform_function(&iceberg::spec::Transform::Bucket(16)).unwrap();
    let bucket = |nr: &i64| bucket.transform_literal(&iceberg::spec::Datum::long(*nr)).unwrap().unwrap();
    assert!(ids.is_sorted_by_key(|nr| (bucket(nr), *nr)) && !ids.is_sorted(), "{ids:?}");
    run(&client, "TRUNCATE TABLE t").await;
    run(&client, "CALL system.rewrite_data_files('t', strategy => 'sort', sort_order => 'truncate(10, nr) DESC')")
        .await;
    for (sql, words) in [
        ("CREATE TABLE u (a INT) SORTED BY (day(a))", "cannot be sorted by day of a"),
        ("ALTER TABLE t SET SORTED BY (nr + 1)", "not by nr + 1"),
        ("ALTER TABLE t SET SORTED BY (void(nr))", "void(nr)"),
    ] {
        let error = refused(&client, sql).await;
        assert!(error.kind == Kind::Invalid && error.message.contains(words), "{sql}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_laid_out_by_parts_of_structs() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let row = "named_struct('k', concat('k', value % 2), 'deep', named_struct('n', value))";
    run(
        &client,
        &format!(
            "CREATE TABLE t PARTITIONED BY (s.k, truncate(4, s.deep.n), bucket(1, \"odd name\")) SORTED BY (s.deep.n DESC) \
             AS SELECT value AS id, {row} AS s, 1 AS \"odd name\" FROM generate_series(0, 7)"
        ),
    )
    .await;
    let table = metadata(&cluster, "t").await;
    let names: Vec<_> = table.default_partition_spec().fields().iter().map(|field| field.name.clone()).collect();
    assert_eq!(names, ["s_k", "s_deep_n_trunc", "odd_name_bucket"], "as manifests take them");
    let mut written: Vec<_> = files(&table).await.iter().map(first_column).collect();
    written.sort();
    assert_eq!(written, [[2, 0], [3, 1], [6, 4], [7, 5]]);
    // What is nothing has no parts.
    assert_eq!(number(&client, "INSERT INTO t (id) VALUES (8), (9)").await, 2);
    let written = files(&metadata(&cluster, "t").await).await;
    assert!(written.iter().any(|file| file.partition().fields()[..2] == [None, None]), "{written:?}");
    assert_eq!(written.len(), 5);
    assert_eq!(
        numbers(&client, "SELECT id FROM t WHERE s['k'] = 'k1' AND s['deep']['n'] > 4 ORDER BY id").await,
        [5, 7]
    );
    assert_eq!(number(&client, "DELETE FROM t WHERE s['k'] = 'k0'").await, 4);
    assert_eq!(
        number(&client, "UPDATE t SET s = named_struct('k', 'k7', 'deep', named_struct('n', 70)) WHERE id = 8").await,
        1
    );
    assert_eq!(numbers(&client, "SELECT id FROM t ORDER BY id").await, [1, 3, 5, 7, 8, 9]);
    let told = text(&client, "SHOW CREATE TABLE t").await;
    let clause = "PARTITIONED BY (s.k, truncate(4, s.deep.n), bucket(1, \"odd name\"))";
    assert!(told[0].iter().any(|told| told.contains(clause) && told.contains("SORTED BY (s.deep.n DESC)")), "{told:?}");
    for (sql, words) in [
        ("ALTER TABLE t SET PARTITIONED BY (s.nope)", "no column s.nope"),
        ("ALTER TABLE t SET PARTITIONED BY (s.deep)", "cannot be laid out by s.deep"),
        ("CREATE TABLE u PARTITIONED BY (l.element) AS SELECT [1, 2] AS l", "inside of a list or a map"),
        ("ALTER TABLE t DROP COLUMN s.k", "partitioned by it"),
    ] {
        let error = refused(&client, sql).await;
        assert!(error.kind == Kind::Invalid && error.message.contains(words), "{sql}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_laid_out_otherwise_from_now_on() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (day DATE, v BIGINT)").await;
    run(&client, "INSERT INTO t VALUES (DATE '2026-01-01', 1), (DATE '2026-02-02', 2)").await;
    run(&client, "ALTER TABLE t SET PARTITIONED BY (month(day))").await;
    run(&client, "ALTER TABLE t SET SORTED BY (v DESC)").await;
    run(&client, "INSERT INTO t VALUES (DATE '2026-01-01', 3), (DATE '2026-02-02', 4)").await;
    let table = metadata(&cluster, "t").await;
    let written = files(&table).await;
    assert_eq!(written.len(), 3);
    assert_eq!(written.iter().filter(|file| file.sort_order_id() == Some(1)).count(), 2);
    assert_eq!(number(&client, "UPDATE t SET v = v + 10 WHERE day = DATE '2026-01-01'").await, 2);
    assert_eq!(numbers(&client, "SELECT v FROM t ORDER BY v").await, [2, 4, 11, 13]);
    run(&client, "ALTER TABLE t SET PARTITIONED BY ()").await;
    let before = metadata(&cluster, "t").await;
    assert!(before.default_partition_spec().is_unpartitioned());
    run(&client, "ALTER TABLE t SET SORTED BY (v DESC)").await;
    assert_eq!(metadata(&cluster, "t").await.last_updated_ms(), before.last_updated_ms(), "as it was");
    let error = refused(&client, "ALTER TABLE t SET PARTITIONED BY (nope)").await;
    assert!(error.kind == Kind::Invalid && error.message.contains("no column nope"), "{error}");
}
