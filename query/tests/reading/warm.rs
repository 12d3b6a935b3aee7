//! What is known already is not read again, and what is known early leaves work out.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use datafusion::catalog::TableProvider;
use datafusion::common::stats::Precision;
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use iceberg::spec::{BlobMetadata, Datum, FormatVersion, PrimitiveType, StatisticsFile, UnboundPartitionSpec};
use lake_client::memory::MemoryStore;
use lake_query::Options;
use lake_query::client::SqlClient;
use uuid::Uuid;

use crate::common::*;
use crate::foreign::*;

const FILES: i64 = 1000;

fn unpartitioned() -> UnboundPartitionSpec {
    UnboundPartitionSpec::builder().with_spec_id(0).build()
}

fn longs(values: impl IntoIterator<Item = i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(values))
}

/// Ten rows each, with bounds: `id` from ten times `number`, and `k` the number.
fn described(table: &mut Foreign<'_>, number: i64) -> Added {
    let rows: RecordBatch =
        batch(vec![(1, "id", longs(number * 10..number * 10 + 10)), (2, "k", longs(std::iter::repeat_n(number, 10)))]);
    table.data(&rows).with(|file| {
        file.lower_bounds([(1, Datum::long(number * 10)), (2, Datum::long(number))].into())
            .upper_bounds([(1, Datum::long(number * 10 + 9)), (2, Datum::long(number))].into())
            .null_value_counts([(1, 0), (2, 0)].into());
    })
}

fn columns() -> iceberg::spec::Schema {
    schema(0, [optional(1, "id", PrimitiveType::Long), optional(2, "k", PrimitiveType::Long)])
}

pub async fn analyzed(client: &SqlClient, sql: &str) -> String {
    let rows = text(client, &format!("EXPLAIN ANALYZE {sql}")).await;
    rows.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

/// The number that a metric of the scan of a table shows.
pub fn metric(plan: &str, name: &str) -> Option<i64> {
    let line = plan.lines().rfind(|line| line.contains("DataSourceExec"))?;
    let rest = &line[line.find(&format!("{name}="))? + name.len() + 1..];
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_query_reads_no_metadata_and_no_footer() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns(), unpartitioned(), &[]).await;
    let files: Vec<Added> = (0..FILES).map(|number| described(&mut table, number)).collect();
    let paths: Vec<String> = files.iter().map(location_of).collect();
    table.commit("t", files).await;
    let deletes = table.positions(&[(&paths[5], 0), (&paths[900], 9)]);
    let of_deletes = location_of(&deletes);
    table.commit("t", vec![deletes]).await;
    let query = "SELECT count(*), sum(id + k) FROM t WHERE k % 2 >= 0";
    let cold = text(&client, query).await;
    assert_eq!(cold[0][0], (FILES * 10 - 2).to_string());
    let storage = &cluster.nodes[0].engine().tables().storage;
    let before = storage.metadata_reads();
    assert!(before >= 4, "metadata, a list, two manifests");
    assert_eq!(text(&client, query).await, cold);
    assert_eq!(storage.metadata_reads(), before, "metadata objects were read again");

    // Nor could they be: they are gone, and so is what footers and deletes say.
    for file in cluster.files(".avro").into_iter().chain(cluster.files(".metadata.json")) {
        std::fs::remove_file(file).unwrap();
    }
    std::fs::remove_file(path_of(&of_deletes)).unwrap();
    for path in &paths {
        let mut bytes = std::fs::read(path_of(path)).unwrap();
        let end = bytes.len();
        bytes[end - 8..].fill(0);
        std::fs::write(path_of(path), bytes).unwrap();
    }
    assert_eq!(text(&client, query).await, cold);
    assert_eq!(storage.metadata_reads(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn manifests_of_many_files_are_kept_in_little_memory() {
    // A quarter of it is for manifests. The one here took more than twice that before its columns were packed.
    let change = |options: Options| Options { metadata_cache_bytes: Some(4 << 20), ..options };
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 1, change).await;
    let client = cluster.client(0).await;
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns(), unpartitioned(), &[]).await;
    let one = described(&mut table, 0);
    let made_up = |number: i64| {
        let file = Added { file: one.file.clone(), spec_id: one.spec_id, sequence_number: None };
        let path = format!("{}/data/{}.parquet", table.metadata.location(), Uuid::now_v7());
        file.with(|file| {
            file.file_path(path)
                .lower_bounds([(1, Datum::long(number * 10)), (2, Datum::long(number))].into())
                .upper_bounds([(1, Datum::long(number * 10 + 9)), (2, Datum::long(number))].into());
        })
    };
    let files = (0..2000).map(made_up).collect();
    table.commit("t", files).await;
    let storage = &cluster.nodes[0].engine().tables().storage;
    let mut before = None;
    for k in [700, 1300, 5] {
        let plan = text(&client, &format!("EXPLAIN SELECT id FROM t WHERE k = {k}")).await;
        assert!(format!("{plan:?}").contains("files_left_out=1999"), "{plan:?}");
        let reads = storage.metadata_reads();
        assert_eq!(*before.get_or_insert(reads), reads, "a manifest was read again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn joins_and_limits_leave_files_unread() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns(), unpartitioned(), &[]).await;
    let files: Vec<Added> = (0..40).map(|number| described(&mut table, number)).collect();
    let path = location_of(&files[7]);
    table.commit("t", files).await;
    // Also where rows are deleted.
    let deletes = table.positions(&[(&path, 0)]);
    table.commit("t", vec![deletes]).await;
    run(&client, "CREATE TABLE wanted AS SELECT CAST(7 AS BIGINT) AS k, 'seven' AS name").await;
    // A join: what the small side holds is known before the large one is read.
    let join = "SELECT t.id FROM t JOIN wanted ON t.k = wanted.k ORDER BY t.id";
    assert_eq!(numbers(&client, join).await, (71..80).collect::<Vec<_>>());
    let plan = analyzed(&client, join).await;
    assert!(plan.contains("DynamicFilter"), "{plan}");
    let of_t = plan.lines().find(|line| line.contains("DataSourceExec") && line.contains("DynamicFilter")).unwrap();
    let rows = metric(of_t, "output_rows").unwrap_or_else(|| panic!("{of_t}"));
    assert!(rows <= 20, "{rows} rows were read: {of_t}");
    // The greatest few: what was found leaves out files whose bounds are below.
    let greatest = "SELECT id FROM t ORDER BY id DESC LIMIT 3";
    assert_eq!(numbers(&client, greatest).await, [399, 398, 397]);
    let plan = analyzed(&client, greatest).await;
    let rows = metric(&plan, "output_rows").unwrap_or_else(|| panic!("{plan}"));
    assert!(rows < 200 && plan.contains("DynamicFilter"), "{rows} rows were read: {plan}");
    // A limit stops the scan.
    let plan = analyzed(&client, "SELECT id FROM t LIMIT 5").await;
    let rows = metric(&plan, "output_rows").unwrap_or_else(|| panic!("{plan}"));
    assert!(plan.contains("limit=5") && rows <= 20, "{rows} rows were read: {plan}");
    // Files are read by as many at a time as there are to be.
    let plan = format!("{:?}", text(&client, "EXPLAIN SELECT sum(id) FROM t").await);
    assert!(plan.contains("file_groups={2 groups"), "{plan}");
    // What planning left out is told.
    let plan = analyzed(&client, "SELECT id FROM t WHERE id BETWEEN 100 AND 119").await;
    assert!(plan.contains("files_left_out=38"), "{plan}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_optimizer_knows_what_the_metadata_says() {
    let cluster = crate::cluster().await;
    let client = cluster.client(0).await;
    let mut table = Foreign::create(&cluster, "t", FormatVersion::V2, columns(), unpartitioned(), &[]).await;
    let files = vec![described(&mut table, 1), described(&mut table, 2)];
    let snapshot_id = table.commit("t", files).await;
    let plan = |sql: &str| {
        let sql = format!("EXPLAIN {sql}");
        let client = &client;
        async move { text(client, &sql).await.into_iter().flatten().collect::<Vec<_>>().join("\n") }
    };
    assert_eq!(text(&client, "SELECT count(*), count(k), min(id), max(k) FROM t").await, [["20", "20", "10", "2"]]);
    let known = plan("SELECT count(*), count(k), min(id), max(k) FROM t").await;
    assert!(!known.contains("DataSourceExec"), "known from metadata: {known}");
    // Distinct values, as another engine has counted them.
    table
        .change("t", |builder| {
            builder.set_statistics(StatisticsFile {
                snapshot_id,
                statistics_path: "file:///nowhere/stats.puffin".into(),
                file_size_in_bytes: 1,
                file_footer_size_in_bytes: 1,
                key_metadata: None,
                blob_metadata: vec![BlobMetadata {
                    r#type: "apache-datasketches-theta-v1".into(),
                    snapshot_id,
                    sequence_number: 1,
                    fields: vec![2],
                    properties: [("ndv".to_owned(), "17".to_owned())].into(),
                }],
            })
        })
        .await;
    let added = described(&mut table, 3);
    table.commit("t", vec![added]).await;
    let tables = cluster.nodes[0].engine().tables();
    let mut loaded = tables.load(&[ident("t")], deadline()).await.unwrap();
    let current = loaded.tables.pop().flatten().unwrap();
    let provider = lake_query::scan::LakeTable::new(tables.clone(), current, deadline()).unwrap();
    let context = datafusion::prelude::SessionContext::new();
    let scan = provider.scan(&context.state(), None, &[], None).await.unwrap();
    let statistics = StatisticsContext::new().compute(scan.as_ref(), &StatisticsArgs::new()).unwrap();
    assert_eq!(statistics.num_rows, Precision::Exact(30));
    assert_eq!(statistics.column_statistics[1].distinct_count, Precision::Inexact(17));
    assert_eq!(statistics.column_statistics[1].null_count, Precision::Exact(0));
    let one = |value| Precision::Exact(datafusion::common::ScalarValue::Int64(Some(value)));
    assert_eq!(statistics.column_statistics[1].min_value, one(1));
    assert_eq!(statistics.column_statistics[0].max_value, one(39));
}
