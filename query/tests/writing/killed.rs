//! Statements whose node is killed at each of its calls, to the object store or to the metadata, one after the other: the table is as
//! before or as after, another node goes on with it, and a sweep leaves what belongs to it and nothing else.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use iceberg::spec::{Manifest, ManifestList, TableMetadata};
use lake_client::Catalog;
use lake_client::catalog::TableIdent;
use lake_client::memory::MemoryStore;
use lake_client::store::{Error, SharedStore};
use lake_query::client::SqlClient;
use lake_query::{Config, Kind, Options, QueryNode};
use tokio::runtime::Builder;

use crate::bucket::{Bucket, Life, location};
use crate::common::store::{Through, Way};
use crate::common::*;

/// More calls than any of these statements makes.
const MOST_CALLS: i64 = 300;
/// And fewer: a statement that is not killed so often was hardly tested.
const LEAST_CALLS: i64 = 5;
/// As the threads of a node's own process have.
const THREAD_STACK_BYTES: usize = 32 << 20;

/// A node's way to the metadata, for as long as it lives.
#[derive(Debug)]
struct Mortal(Arc<Life>);

#[async_trait]
impl Way for Mortal {
    async fn call(&self, _about: &str, _by: Instant) -> Result<(), Error> {
        self.0.call().await;
        Ok(())
    }
}

/// What nodes share: the metadata, and a bucket for the tables.
struct Place {
    dir: tempfile::TempDir,
    store: SharedStore,
    bucket: Arc<Bucket>,
}

/// How a statement ended whose node was to be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Its client has no answer.
    Killed,
    /// It was done, and its node was killed right behind that.
    DoneAndKilled,
    Done,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), store: Arc::new(MemoryStore::new()), bucket: Arc::default() }
    }

    /// What a node is started with.
    async fn node(&self, name: &str, life: &Arc<Life>) -> (Config, SharedStore) {
        let key = self.dir.path().join("key");
        std::fs::write(&key, "key").unwrap();
        let options = Options {
            dir: Some(self.dir.path().join(name)),
            warehouse: Some(location("warehouse")),
            s3_endpoint: Some(self.bucket.door(life).await),
            s3_access_key_file: Some(key.clone()),
            s3_secret_key_file: Some(key),
            pointer_ttl_ms: Some(0),
            ..options(self.dir.path())
        };
        let store: SharedStore = Arc::new(Through { store: self.store.clone(), way: Mortal(life.clone()) });
        (Config::new(options).unwrap(), store)
    }

    /// Has a new node run a statement, and kills it at the call behind so many. With the runtime all of its tasks are gone, wherever
    /// they are, as with a process.
    async fn killed_after(&self, calls: i64, sql: &str) -> End {
        let life = Life::new();
        let (config, store) = self.node(&format!("victim{calls}"), &life).await;
        let starting = tokio::task::spawn_blocking(move || {
            let mut builder = Builder::new_multi_thread();
            let runtime = builder.worker_threads(2).thread_stack_size(THREAD_STACK_BYTES).enable_all().build().unwrap();
            let node = runtime.block_on(QueryNode::start(config, store)).unwrap();
            (runtime, node)
        });
        let (runtime, node) = starting.await.unwrap();
        let (address, text, of_node) = (node.flight_address().to_string(), sql.to_owned(), life.clone());
        let statement = runtime.spawn(async move {
            let client = SqlClient::connect(&[address], None).await.unwrap();
            of_node.ends_after(calls);
            client.query(&text, TIMEOUT).await
        });
        let ended = tokio::select! {
            biased;
            ended = statement => Some(ended),
            () = life.until_over() => None,
        };
        let is_over = life.is_over();
        life.ends_after(0);
        runtime.shutdown_background();
        drop(node);
        match (ended.map(Result::unwrap), is_over) {
            (Some(Ok(_)), false) => End::Done,
            (Some(Ok(_)), true) => End::DoneAndKilled,
            (Some(Err(error)), false) => panic!("{sql}: {error}"),
            (Some(Err(_)) | None, _) => End::Killed,
        }
    }

    /// Where a table is, and everything that its metadata names.
    async fn named(&self, table: &str) -> (String, BTreeSet<String>) {
        let ident = TableIdent::new("default".parse().unwrap(), table).unwrap();
        let by = Instant::now() + Duration::from_secs(10);
        let pointer = Catalog::new(self.store.clone()).load_table(&ident, by).await.unwrap().unwrap().value;
        let metadata: TableMetadata = serde_json::from_slice(&self.bucket.read(&pointer.metadata_location)).unwrap();
        let mut named = BTreeSet::from([pointer.metadata_location]);
        named.extend(metadata.metadata_log().iter().map(|entry| entry.metadata_file.clone()));
        named.extend(metadata.statistics_iter().map(|file| file.statistics_path.clone()));
        for snapshot in metadata.snapshots() {
            named.insert(snapshot.manifest_list().to_owned());
            let list = self.bucket.read(snapshot.manifest_list());
            for file in ManifestList::parse_with_version(&list, metadata.format_version()).unwrap().entries() {
                named.insert(file.manifest_path.clone());
                let manifest = Manifest::parse_avro(&self.bucket.read(&file.manifest_path)).unwrap();
                let alive = manifest.entries().iter().filter(|entry| entry.is_alive());
                named.extend(alive.map(|entry| entry.data_file().file_path().to_owned()));
            }
        }
        (metadata.location().to_owned(), named)
    }
}

type Rows = Vec<Vec<String>>;

fn rows(of: &[[i64; 2]]) -> Rows {
    of.iter().map(|row| row.iter().map(ToString::to_string).collect()).collect()
}

/// The rows of a table, if it is there.
async fn read(client: &SqlClient, table: &str) -> Option<Rows> {
    match client.query(&format!("SELECT id, v FROM {table} ORDER BY id"), TIMEOUT).await {
        Ok(rows) => Some(rows_of(&rows)),
        Err(error) => {
            assert_eq!(error.kind, Kind::NotFound, "{table}: {error}");
            None
        }
    }
}

/// Runs a statement about a table `{t}` again and again, each time on a table of its own and by a node of its own, which is killed one
/// call later than the one before; until it is not killed any more. Without rows before it the table is not there.
async fn killed_at_each_call(sql: &str, before: Option<&[[i64; 2]]>, after: &[[i64; 2]]) {
    let place = Place::new();
    let (config, store) = place.node("survivor", &Life::new()).await;
    let survivor = QueryNode::start(config, store).await.unwrap();
    let client = SqlClient::connect(&[survivor.flight_address().to_string()], None).await.unwrap();
    let (before, after) = (before.map(rows), rows(after));
    let mut kills = 0;
    loop {
        let table = format!("t{kills}");
        let sql = sql.replace("{t}", &table);
        if before.is_some() {
            let series = "SELECT value AS id, value * 10 AS v FROM generate_series(1, 2)";
            run(&client, &format!("CREATE TABLE {table} AS {series}")).await;
            assert_eq!(read(&client, &table).await, before);
        }
        let end = place.killed_after(kills, &sql).await;
        let seen = read(&client, &table).await;
        let is_after = seen.as_ref() == Some(&after);
        assert!(is_after || (end == End::Killed && seen == before), "{end:?} after {kills} calls: {sql}: {seen:?}");

        // Another node makes what is not there, and goes on with what is.
        if seen.is_none() {
            run(&client, &sql).await;
        }
        run(&client, &format!("INSERT INTO {table} VALUES (99, 990)")).await;
        let mut expected = seen.unwrap_or_else(|| after.clone());
        expected.extend(rows(&[[99, 990]]));
        assert_eq!(read(&client, &table).await.as_ref(), Some(&expected), "after {kills} calls: {sql}");

        place.bucket.go_on(30);
        let sweep = format!("CALL system.remove_orphan_files('{table}', older_than_hours => 24, dry_run => false)");
        number(&client, &sweep).await;
        let (root, named) = place.named(&table).await;
        assert_eq!(place.bucket.locations(&format!("{root}/")), named, "after {kills} calls: {sql}");
        assert_eq!(read(&client, &table).await.as_ref(), Some(&expected), "after {kills} calls: {sql}");
        if end == End::Done {
            break;
        }
        kills += 1;
        assert!(kills < MOST_CALLS, "{sql}: it never ends");
    }
    assert!(kills > LEAST_CALLS, "{sql}: killed {kills} times only");
    survivor.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_whose_node_is_killed_is_whole_or_nothing() {
    let merge = "MERGE INTO {t} AS x USING (SELECT 2 AS id, 200 AS v UNION ALL SELECT 3, 300) AS s ON x.id = s.id \
                 WHEN MATCHED THEN UPDATE SET v = s.v WHEN NOT MATCHED THEN INSERT (id, v) VALUES (s.id, s.v)";
    killed_at_each_call(merge, Some(&[[1, 10], [2, 20]]), &[[1, 10], [2, 200], [3, 300]]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_made_of_a_query_whose_node_is_killed_is_there_with_all_rows_or_not_at_all() {
    let create = "CREATE TABLE {t} AS SELECT value AS id, value * 10 AS v FROM generate_series(1, 2)";
    killed_at_each_call(create, None, &[[1, 10], [2, 20]]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_whose_node_is_killed_while_it_replaces_it_is_the_old_one_or_the_new_one() {
    let replace = "CREATE OR REPLACE TABLE {t} AS SELECT id + 10 AS id, v FROM {t}";
    killed_at_each_call(replace, Some(&[[1, 10], [2, 20]]), &[[11, 10], [12, 20]]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overwrite_whose_node_is_killed_is_whole_or_nothing() {
    let overwrite = "INSERT OVERWRITE {t} SELECT id + 20, v FROM {t}";
    killed_at_each_call(overwrite, Some(&[[1, 10], [2, 20]]), &[[21, 10], [22, 20]]).await;
}
