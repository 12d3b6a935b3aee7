//! Parquet files named in SQL, damaged files, and tables as others read them.

mod common;

use std::sync::Arc;

use arrow::array::{ArrayRef, Decimal128Array, Int64Array, RecordBatch, StringArray};
use bytes::Bytes;
use common::*;
use futures::TryStreamExt;
use iceberg::io::FileIO;
use iceberg::spec::{ManifestContentType, TableMetadata};
use lake_client::memory::MemoryStore;
use lake_query::{Kind, Options};
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaDataReader, ParquetMetaDataWriter};
use parquet::file::properties::WriterProperties;

/// Every so many bytes one is damaged.
const DAMAGE_STEP: usize = 7;

fn write_parquet(path: &std::path::Path, ids: std::ops::Range<i64>) {
    let names: Vec<String> = ids.clone().map(|id| format!("name {id}")).collect();
    let batch = RecordBatch::try_from_iter([
        ("id", Arc::new(Int64Array::from_iter_values(ids)) as _),
        ("name", Arc::new(StringArray::from(names)) as _),
    ])
    .unwrap();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// With a page index of several pages, two row groups, and a decimal, whose statistics are bytes.
fn write_paged_parquet(path: &std::path::Path) {
    let prices = Decimal128Array::from_iter_values(0..200).with_precision_and_scale(30, 2).unwrap();
    let batch = RecordBatch::try_from_iter([
        ("id", Arc::new(Int64Array::from_iter_values(0..200)) as ArrayRef),
        ("name", Arc::new(StringArray::from_iter((0..200).map(|id| (id % 3 > 0).then(|| format!("name {id}")))))),
        ("price", Arc::new(prices)),
    ])
    .unwrap();
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(100))
        .set_data_page_row_count_limit(20)
        .set_write_batch_size(10)
        .build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_read_and_loaded() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let dir = cluster.dir.path().join("in put");
    std::fs::create_dir(&dir).unwrap();
    write_parquet(&dir.join("a.parquet"), 0..10);
    write_parquet(&dir.join("b.parquet"), 10..30);
    let dir = dir.display();
    assert_eq!(number(&client, &format!("SELECT count(*) FROM '{dir}/a.parquet'")).await, 10);
    assert_eq!(number(&client, &format!("SELECT count(*) FROM '{dir}/*.parquet'")).await, 30);
    assert_eq!(number(&client, &format!("SELECT sum(id) FROM '{dir}'")).await, 435);
    assert_eq!(
        number(&client, &format!("SELECT count(*) FROM 'file://{dir}/b.parquet' WHERE name = 'name 12'")).await,
        1
    );
    assert_eq!(number(&client, &format!("CREATE TABLE loaded AS SELECT * FROM '{dir}/a.parquet'")).await, 10);
    assert_eq!(number(&client, &format!("INSERT INTO loaded SELECT * FROM '{dir}/b.parquet'")).await, 20);
    assert_eq!(text(&client, "SELECT count(*), min(name), sum(id) FROM loaded").await, [["30", "name 0", "435"]]);
    let error = refused(&client, &format!("INSERT INTO '{dir}/a.parquet' SELECT * FROM loaded")).await;
    assert_eq!(error.kind, Kind::NotSupported, "{error}");
    let error = refused(&client, &format!("SELECT * FROM '{dir}/none.parquet'")).await;
    assert!(error.kind == Kind::NotFound && error.message.contains("none.parquet"), "{:?} {error}", error.kind);
    let error = refused(&client, "SELECT * FROM 'ftp://x/y.parquet'").await;
    assert!(error.message.contains("ftp"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_refused_where_they_are_not_allowed() {
    let store = Arc::new(lake_client::memory::MemoryStore::new());
    let cluster = Cluster::over(store, 2, |options| {
        let allows = options.dir.as_ref().is_some_and(|dir| dir.ends_with("node1"));
        Options { allow_local_files: Some(allows), pointer_ttl_ms: Some(0), ..options }
    })
    .await;
    let error = refused(&cluster.client(0).await, "SELECT * FROM '/etc/x.parquet'").await;
    assert!(error.kind == Kind::Denied && error.message.contains("allow_local_files"), "{error}");
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT 1 AS x").await;
    let outside = cluster.dir.path().join("x.csv");
    let warehouse = cluster.dir.path().join("warehouse");
    let around = format!("{}/../x.csv", warehouse.display());
    for path in [&outside.display().to_string(), &around, "/etc/passwd", "s3://elsewhere/x.csv"] {
        for sql in [
            format!("COPY t TO '{path}' (FORMAT csv)"),
            format!("COPY t FROM '{path}' (FORMAT csv)"),
            format!("CREATE VIEW v AS SELECT * FROM '{path}/x.csv'"),
        ] {
            let error = refused(&client, &sql).await;
            assert!(matches!(error.kind, Kind::Denied | Kind::Invalid), "{sql}: {:?} {error}", error.kind);
        }
    }
    assert!(!outside.exists());
    // Inside of the warehouse everybody may.
    let inside = format!("{}/exports/x.csv", warehouse.display());
    assert_eq!(number(&client, &format!("COPY t TO '{inside}'")).await, 1);
    assert_eq!(number(&client, &format!("COPY t FROM '{inside}'")).await, 1);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 2);
    // Nor are they read because a table has them, where another node has let them into it.
    let other = cluster.client(1).await;
    let outside = cluster.dir.path().join("rows.parquet").display().to_string();
    run(&other, &format!("COPY t TO '{outside}'")).await;
    run(&other, "CREATE TABLE borrowed (x BIGINT)").await;
    assert_eq!(number(&other, &format!("CALL system.add_files('borrowed', 'file://{outside}')")).await, 1);
    assert_eq!(number(&other, "SELECT sum(x) FROM borrowed").await, 2);
    let error = refused(&client, "SELECT sum(x) FROM borrowed").await;
    assert!(error.kind == Kind::Denied && error.message.contains("allow_local_files"), "{error}");
    assert!(error.message.contains(&outside), "{error}");
    assert_eq!(number(&client, "SELECT sum(x) FROM t").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_writes_into_an_empty_directory_and_over_no_link_to_nothing() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let home = cluster.dir.path().join("out");
    std::fs::create_dir(&home).unwrap();
    let path = |name: &str| home.join(name).display().to_string();
    let count = |dir: &str| std::fs::read_dir(home.join(dir)).map_or(0, Iterator::count);
    // By any name: with an ending or without one, as a path or as a URL. What is there is looked up each time.
    for dir in ["a", "b.parquet"] {
        for scheme in ["", "file://"] {
            let target = format!("{scheme}{}", path(dir));
            std::fs::create_dir(home.join(dir)).unwrap();
            assert_eq!(number(&client, &format!("COPY (SELECT 1 AS a) TO '{target}' (OVERWRITE)")).await, 1);
            let files = count(dir);
            assert_eq!(number(&client, &format!("SELECT sum(a) FROM '{}/'", path(dir))).await, 1);
            for options in ["", "(OVERWRITE)"] {
                let error = refused(&client, &format!("COPY (SELECT 2 AS a) TO '{target}' {options}")).await;
                assert!(error.kind == Kind::AlreadyExists, "{target} {options}: {:?} {error}", error.kind);
            }
            assert_eq!(count(dir), files);
            std::fs::remove_dir_all(home.join(dir)).unwrap();
        }
    }
    // What has no ending becomes a directory, of which nothing stays if the query fails.
    let fails = "SELECT 1 / (value - 2) AS a FROM generate_series(0, 5)";
    refused(&client, &format!("COPY ({fails}) TO '{}'", path("c"))).await;
    assert_eq!(count("c"), 0);
    assert_eq!(number(&client, &format!("COPY (SELECT 1 AS a) TO '{}'", path("c"))).await, 1);
    refused(&client, &format!("COPY (SELECT 1 AS a) TO 'file://{}'", path("c"))).await;
    assert_eq!(number(&client, &format!("SELECT sum(a) FROM '{}'", path("c"))).await, 1);

    let (link, nothing) = (home.join("link.parquet"), home.join("nothing.parquet"));
    std::os::unix::fs::symlink(&nothing, &link).unwrap();
    for sql in ["COPY (SELECT 1 AS a) TO '{}'", "COPY (SELECT 1 AS a) TO '{}' (OVERWRITE)", "SELECT * FROM '{}'"] {
        let error = refused(&client, &sql.replace("{}", &link.display().to_string())).await;
        assert!(error.kind == Kind::Invalid && error.message.contains("symbolic link"), "{sql}: {error}");
        assert!(error.message.contains("nothing.parquet") && !nothing.exists(), "{sql}: {error}");
    }
    assert!(link.is_symlink());
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_files_are_named() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let path = |name: &str| cluster.dir.path().join(name);
    write_parquet(&path("good.parquet"), 0..1000);
    let good = std::fs::read(path("good.parquet")).unwrap();
    std::fs::write(path("text.parquet"), "this is no Parquet file at all").unwrap();
    std::fs::write(path("empty.parquet"), "").unwrap();
    std::fs::write(path("cut.parquet"), &good[..good.len() / 2]).unwrap();
    let mut flipped = good.clone();
    for byte in &mut flipped[4..good.len() / 2] {
        *byte ^= 0x55;
    }
    std::fs::write(path("flipped.parquet"), flipped).unwrap();
    std::fs::write(path("lying.parquet"), b"PAR1\xff\xff\xff\xffPAR1").unwrap();
    for name in ["text.parquet", "empty.parquet", "cut.parquet", "flipped.parquet", "lying.parquet"] {
        let error = refused(&client, &format!("SELECT sum(id), max(name) FROM '{}'", path(name).display())).await;
        assert!(error.message.contains(name), "{name}: {error}");
        assert_ne!(error.kind, Kind::Internal, "{name}: {error}");
    }
    let error =
        refused(&client, &format!("CREATE TABLE bad AS SELECT * FROM '{}'", path("flipped.parquet").display())).await;
    assert!(error.message.contains("flipped.parquet"), "{error}");
    assert!(cluster.files(".parquet").is_empty());
    assert_eq!(number(&client, "SELECT 1").await, 1, "the node lives");
}

/// Whichever byte of a footer or a page index is damaged: rows or an error that names the file, and never a defect.
#[tokio::test(flavor = "multi_thread")]
async fn damage_to_what_a_file_says_of_itself_is_survived() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let path = |name: &str| cluster.dir.path().join(name);
    write_paged_parquet(&path("good.parquet"));
    let good = std::fs::read(path("good.parquet")).unwrap();
    let footer = u32::from_le_bytes(good[good.len() - 8..good.len() - 4].try_into().unwrap()) as usize;
    // The page index is right before it.
    for place in (good.len() - 8 - footer - 400..good.len()).step_by(DAMAGE_STEP) {
        let mut bytes = good.clone();
        bytes[place] = !bytes[place];
        let name = format!("{place}.parquet");
        std::fs::write(path(&name), bytes).unwrap();
        let file = path(&name).display().to_string();
        for sql in [
            format!("SELECT count(*), min(price), max(name) FROM '{file}'"),
            format!("SELECT * FROM '{file}' WHERE id > 150 AND price < 180 ORDER BY id"),
        ] {
            if let Err(error) = client.query(&sql, TIMEOUT).await {
                // Damage may also make a column one of another type, which the statement does not fit.
                let fits = error.kind == Kind::Invalid || error.message.contains(&name);
                assert!(fits && error.kind != Kind::Internal, "{sql}: {:?} {error}", error.kind);
            }
        }
    }
}

/// A file of the same length, whose columns begin with a dictionary and whose footer does not say so: only the pages show it.
fn without_dictionaries(good: &[u8]) -> Vec<u8> {
    let mut metadata =
        ParquetMetaDataReader::new().parse_and_finish(&Bytes::copy_from_slice(good)).unwrap().into_builder();
    let mut forgotten = 0;
    for group in metadata.take_row_groups() {
        let columns = group.columns().iter().map(|column| {
            forgotten += usize::from(column.dictionary_page_offset().is_some());
            column.clone().into_builder().set_dictionary_page_offset(None).build().unwrap()
        });
        let columns = columns.collect();
        metadata = metadata.add_row_group(group.into_builder().set_column_metadata(columns).build().unwrap());
    }
    assert!(forgotten > 0, "the file has dictionaries");
    let mut footer = Vec::new();
    ParquetMetaDataWriter::new(&mut footer, &metadata.build()).finish().unwrap();
    let before = u32::from_le_bytes(good[good.len() - 8..good.len() - 4].try_into().unwrap()) as usize;
    let mut bytes = good[..good.len() - 8 - before].to_vec();
    bytes.resize(good.len() - footer.len(), 0);
    bytes.extend(footer);
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_that_only_the_pages_show_is_an_error_that_names_the_file() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    let path = |name: &str| cluster.dir.path().join(name);
    write_parquet(&path("good.parquet"), 0..1000);
    let good = std::fs::read(path("good.parquet")).unwrap();
    std::fs::write(path("lost.parquet"), without_dictionaries(&good)).unwrap();
    let files = [path("good.parquet"), path("lost.parquet")].map(|file| file.display().to_string());
    let dir = cluster.dir.path().display();
    for sql in [
        format!("SELECT count(name), sum(id) FROM '{}'", files[1]),
        format!("SELECT * FROM '{}' ORDER BY id LIMIT 3", files[1]),
        format!("SELECT sum(length(name)) FROM '{dir}/*.parquet'"),
        format!("CREATE TABLE bad AS SELECT * FROM '{}'", files[1]),
    ] {
        let error = refused(&client, &sql).await;
        assert!(error.kind == Kind::Corrupt && error.message.contains(&files[1]), "{sql}: {:?} {error}", error.kind);
        assert!(!error.message.contains(&files[0]), "{sql}: {error}");
    }
    assert_eq!(number(&client, &format!("SELECT count(name) FROM '{}'", files[0])).await, 1000, "the node lives");

    // The same in a table.
    run(&client, "CREATE TABLE t AS SELECT * FROM tpch('nation', 0.01)").await;
    let data = cluster.files(".parquet").into_iter().find(|file| !files.contains(&file.display().to_string())).unwrap();
    let damaged = without_dictionaries(&std::fs::read(&data).unwrap());
    std::fs::write(&data, damaged).unwrap();
    let error = refused(&client, "SELECT min(n_name) FROM t WHERE n_nationkey > 0").await;
    let name = data.file_name().unwrap().to_string_lossy().into_owned();
    assert!(error.message.contains(&name) && error.kind != Kind::Internal, "{:?} {error}", error.kind);
}

/// Where the bodies of a file's pages are, as its footer, its page index and their headers say.
fn page_bodies(file: &[u8]) -> Vec<std::ops::Range<usize>> {
    /// Of the compact protocol, a field with a number right behind another one.
    fn number(bytes: &mut &[u8]) -> usize {
        let (&0x15, rest) = bytes.split_first().unwrap() else { panic!("no page begins with {bytes:02x?}") };
        let length = rest.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
        let zigzag = rest[..length].iter().rev().fold(0, |value, byte| value << 7 | usize::from(byte & 0x7f));
        *bytes = &rest[length..];
        zigzag >> 1
    }
    let reader = ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Required);
    let metadata = reader.parse_and_finish(&Bytes::copy_from_slice(file)).unwrap();
    let mut bodies = Vec::new();
    for (group, index) in metadata.row_groups().iter().zip(metadata.offset_index().unwrap()) {
        for (column, index) in group.columns().iter().zip(index) {
            let (start, length) = column.byte_range();
            let mut starts = vec![start as usize];
            starts.extend(index.page_locations().iter().map(|page| page.offset as usize));
            // Twice where there is no dictionary.
            starts.dedup();
            starts.push((start + length) as usize);
            for page in starts.windows(2) {
                let mut header = &file[page[0]..page[1]];
                let [_, _, body] = [(); 3].map(|()| number(&mut header));
                bodies.push(page[1] - body..page[1]);
            }
        }
    }
    bodies
}

/// Whichever byte of a page of a data file or of a file of deletes has changed: never other rows.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_does_not_match_its_checksum_is_an_error_that_names_the_file() {
    let change = |options| Options { metadata_cache_bytes: Some(0), ..options };
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 1, change).await;
    let client = cluster.client(0).await;
    let properties = "'write.parquet.compression-codec' = 'uncompressed', 'write.delete.mode' = 'merge-on-read'";
    run(
        &client,
        &format!(
            "CREATE TABLE t WITH ({properties}) AS SELECT value AS id, 'row ' || (value % 3) AS s, [value] AS l \
             FROM generate_series(1, 8)"
        ),
    )
    .await;
    run(&client, "DELETE FROM t WHERE id IN (2, 5)").await;
    let files = cluster.files(".parquet");
    let (deletes, data): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|file| file.to_string_lossy().ends_with("-deletes.parquet"));
    assert_eq!((deletes.len(), data.len()), (1, 1));
    // Pages by the index, and all of them. Deletes that were read once are kept: theirs are damaged first.
    let (some, all) = ("SELECT s, l FROM t WHERE id > 6", "SELECT * FROM t");
    for (file, statements) in [(&deletes[0], &[all][..]), (&data[0], &[all, some])] {
        let good = std::fs::read(file).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let bodies = page_bodies(&good);
        assert!(bodies.len() >= 4, "{bodies:?}");
        for place in bodies.into_iter().flatten() {
            let mut bytes = good.clone();
            bytes[place] ^= 1 << (place % 8);
            std::fs::write(file, bytes).unwrap();
            let mut refusals = 0;
            for sql in statements {
                // A page that the statement does not need does no harm.
                if let Err(error) = client.query(sql, TIMEOUT).await {
                    let says = error.message.contains(&name) && error.message.contains("checksum");
                    assert!(error.kind == Kind::Corrupt && says, "{name}, byte {place}: {:?} {error}", error.kind);
                    refusals += 1;
                }
            }
            assert!(refusals > 0, "{name}, byte {place}");
        }
        std::fs::write(file, good).unwrap();
    }
    assert_eq!(numbers(&client, "SELECT id FROM t ORDER BY id").await, [1, 3, 4, 6, 7, 8]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_table_is_an_error_that_names_the_file() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t AS SELECT * FROM tpch('nation', 0.01)").await;
    let data = cluster.files(".parquet").pop().unwrap();
    let bytes = std::fs::read(&data).unwrap();
    let name = data.file_name().unwrap().to_string_lossy().into_owned();
    // Shorter than its footer is from its end.
    for size in [bytes.len() / 2, bytes.len() - 1, 100, 0] {
        std::fs::write(&data, &bytes[..size]).unwrap();
        let error = refused(&client, "SELECT n_name FROM t").await;
        assert!(error.kind == Kind::Corrupt && error.message.contains(&name), "{size}: {:?} {error}", error.kind);
        let told = format!("it has {size} bytes, and {} are expected", bytes.len());
        assert!(error.message.contains(&told) && error.message.contains("put the whole file back"), "{size}: {error}");
    }
    std::fs::write(&data, &bytes).unwrap();
    assert_eq!(text(&client, "SELECT min(n_nationkey) FROM (SELECT * FROM t LIMIT 5)").await, [["0"]]);
    std::fs::write(&data, &bytes[..8]).unwrap();
    let error = refused(&client, "SELECT n_comment FROM t").await;
    assert!(error.message.contains("it has 8 bytes"), "{error}");
    std::fs::remove_file(&data).unwrap();
    let error = refused(&client, "SELECT n_comment FROM t").await;
    assert!(error.message.contains(&name), "{error}");
    let metadata = cluster.files(".metadata.json").pop().unwrap();
    std::fs::write(&data, &bytes).unwrap();
    std::fs::write(&metadata, "{").unwrap();
    // Another node, which has nothing cached.
    let config = lake_query::Config::new(options(cluster.dir.path())).unwrap();
    let node = lake_query::QueryNode::start(config, cluster.store.clone()).await.unwrap();
    let other = lake_query::client::SqlClient::connect(&[node.flight_address().to_string()], None).await.unwrap();
    let error = refused(&other, "SELECT * FROM t").await;
    assert!(error.kind == Kind::Corrupt && error.message.contains(".metadata.json"), "{:?} {error}", error.kind);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_manifests_are_errors_that_name_them() {
    // A node that keeps nothing of what it has read.
    let change = |options| Options { metadata_cache_bytes: Some(0), ..options };
    let cluster = Cluster::over(Arc::new(MemoryStore::new()), 1, change).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (x BIGINT, day DATE) PARTITIONED BY (day)").await;
    run(&client, "INSERT INTO t VALUES (1, '2026-01-01'), (2, '2026-01-02')").await;
    let sql = "SELECT sum(x) FROM t WHERE x > 1";
    assert_eq!(number(&client, sql).await, 2);
    let files = cluster.files(".avro");
    assert_eq!(files.len(), 2, "a manifest, and the list that names it: {files:?}");
    for file in files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let good = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let error = refused(&client, sql).await;
        assert!(error.message.contains(&name), "{error}");
        for bytes in [&good[..good.len() / 2], &good[..good.len() - 1], b"", b"this is no Avro file at all"] {
            std::fs::write(&file, bytes).unwrap();
            let error = refused(&client, sql).await;
            let said = error.kind == Kind::Corrupt && error.message.contains(&name);
            assert!(said, "{} bytes: {:?} {error}", bytes.len(), error.kind);
        }
        // Whichever byte it is: rows, or an error that is no defect.
        for place in (0..good.len()).step_by(5 * DAMAGE_STEP) {
            let mut bytes = good.clone();
            bytes[place] = !bytes[place];
            std::fs::write(&file, bytes).unwrap();
            if let Err(error) = client.query(sql, TIMEOUT).await {
                assert_ne!(error.kind, Kind::Internal, "{name}, byte {place}: {error}");
            }
        }
        std::fs::write(&file, &good).unwrap();
        assert_eq!(number(&client, sql).await, 2, "the node serves on");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn others_read_the_table_as_the_format_says() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t (id BIGINT NOT NULL, name VARCHAR, x DOUBLE)").await;
    for start in [0, 100, 200] {
        let rows: Vec<String> = (start..start + 10).map(|i| format!("({i}, 'n{i}', {i}.5)")).collect();
        run(&client, &format!("INSERT INTO t VALUES {}", rows.join(", "))).await;
    }
    let location = cluster.files(".metadata.json").pop().unwrap().display().to_string();
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&location).unwrap()).unwrap();
    let sequences: Vec<i64> =
        json["snapshots"].as_array().unwrap().iter().map(|s| s["sequence-number"].as_i64().unwrap()).collect();
    assert_eq!(sequences, [1, 2, 3], "snapshots are in order");
    assert_eq!(json["format-version"], 2);
    assert_eq!(json["snapshots"][2]["summary"]["total-records"], "30");
    assert_eq!(json["metadata-log"].as_array().unwrap().len(), 3);

    let io = FileIO::new_with_fs();
    let metadata = TableMetadata::read_from(&io, &format!("file://{location}")).await.unwrap();
    let ids: Vec<i32> = metadata.current_schema().as_struct().fields().iter().map(|field| field.id).collect();
    assert_eq!(ids, [1, 2, 3]);
    let ident = iceberg::TableIdent::from_strs(["default", "t"]).unwrap();
    let table = iceberg::table::Table::builder()
        .metadata(metadata)
        .identifier(ident)
        .file_io(io.clone())
        .metadata_location(format!("file://{location}"))
        .runtime(iceberg::Runtime::current())
        .build()
        .unwrap();
    let snapshot = table.metadata().current_snapshot().unwrap().clone();
    let list = table.manifest_list_reader(&snapshot).load().await.unwrap();
    let mut rows = 0;
    for manifest in list.entries() {
        assert_eq!(manifest.content, ManifestContentType::Data);
        for entry in manifest.load_manifest(&io).await.unwrap().entries() {
            let file = entry.data_file();
            rows += file.record_count();
            assert_eq!(file.null_value_counts()[&1], 0);
            assert_eq!(file.nan_value_counts()[&3], 0);
            assert!(file.lower_bounds().contains_key(&1) && file.upper_bounds().contains_key(&2));
            let on_disk = std::fs::metadata(file.file_path().strip_prefix("file://").unwrap()).unwrap().len();
            assert_eq!(file.file_size_in_bytes(), on_disk);
        }
    }
    assert_eq!(rows, 30);
    let read: Vec<_> = table.scan().build().unwrap().to_arrow().await.unwrap().try_collect().await.unwrap();
    assert_eq!(read.iter().map(|batch| batch.num_rows()).sum::<usize>(), 30, "the iceberg crate's own reader agrees");
}
